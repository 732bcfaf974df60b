"""Nothing is lossy without being asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereConfig, CohereModel
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaModel

pytest.importorskip("sglang")

from sglang_cake.config import CakeConfig, resolve
from sglang_cake.core.codec_names import CHOICES, LOSSY
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.identity.identity import rope_theta


def test_config_lossy_is_true_only_for_lossy_codecs_or_a_positive_bound() -> None:
    assert not CakeConfig().lossy
    for codec in CHOICES:
        assert resolve({"codec": codec}, {}).lossy == (codec in LOSSY)
    assert resolve({"codec": "auto", "max_error": "0.01"}, {}).lossy


@pytest.mark.parametrize("value", ["-1", "1", "nan", "inf", "much", True, None])
def test_config_invalid_max_error_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"--cake-max-error: .* a number from 0"):
        resolve({"codec": "auto", "max_error": value}, {})


def test_config_max_error_without_codec_auto_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cake-max-error has no effect with --cake-codec int4"):
        resolve({"codec": "int4", "max_error": "0.1"}, {})


@pytest.mark.parametrize(
    ("config", "halves", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 500000.0}}, True, 500000.0),
        ({"rope_theta": 10000}, True, 10000.0),
        ({"rope_theta": 10000}, False, None),
        ({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, True, None),
        ({}, True, None),
    ],
)
def test_rope_theta_is_that_of_whole_heads_whose_halves_are_rotated(
    config: dict[str, object], halves: bool, theta: float | None
) -> None:
    rotary = torch.nn.Identity()
    rotary.is_neox_style = halves  # as SGLang's `RotaryEmbedding` has it
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), rotary)
    assert rope_theta(SimpleNamespace(**config), model) == theta


@pytest.mark.parametrize(
    ("model_class", "config_class", "theta"),
    [
        (LlamaModel, LlamaConfig, 10000.0),
        (CohereModel, CohereConfig, None),  # as Helium, which SGLang has no model of its own for
        (torch.nn.Identity, None, None),
    ],
)
def test_rope_theta_of_the_transformers_backend_is_that_of_rotated_halves(
    model_class: type[torch.nn.Module], config_class: Any, theta: float | None
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    made = () if config_class is None else (config_class(**sizes, num_attention_heads=2),)
    model = torch.nn.Sequential(model_class(*made))
    model.attention_instances = {}
    config = SimpleNamespace(rope_parameters={"rope_theta": 10000.0})
    assert rope_theta(config, model) == theta
