"""How many architectures of SGLang are served: each one by its kinds and by the settings that
SGLang forces on it, without loading a model. `test_flags.py` has SGLang resolve real configurations
of those that are refused."""

import ast
import re
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.models
from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.configs import FalconMambaConfig, Mamba2Config, MambaConfig, model_config
from sglang.srt.layers.attention.qsa.config import is_qwen_qsa
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from sglang_cake.config import CakeConfig
from sglang_cake.core.pooling_models import POOLING_ARCHITECTURES
from sglang_cake.integration import compat
from sglang_cake.integration.support_matrix import (
    MEDIA_ARCHITECTURES,
    PROMPT_AWARE,
    REFUSED,
    ModelTraits,
    unsupported,
)

ROOT = Path(__file__).parents[2]
MODELS = sorted(Path(sglang.srt.models.__path__[0]).glob("*.py"))

# Drafts, judges, embeddings, encoders, transcribers, diffusion models, and stand-ins for others.
NO_GENERATION = re.compile(
    r"""NextN$ | MTP$ | Eagle | Draft | Assistant | DSpark | DFlash | Embedding | Embed | Reward
    | Classification | ^(Bert|CLIP|XLMRoberta|Mistral|Qwen3|PixtralVision)Model | Contriever
    | Lfm2Bidirectional | ASR | Asr | ^Whisper | Diffusion | ^TransformersMultiModal | ^TorchNative
    | ^MindSpore | LLaDA | SDAR | ^Cosmos3 | ^GlmImage""",
    re.VERBOSE,
)
MAMBA = overrides._MAMBA_RADIX_CACHE_ARCHS | {
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "InklingForConditionalGeneration",
    "KimiK3LinearForCausalLM",
    "Lfm2VlForConditionalGeneration",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiniCPMSALAForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
}
ATTENTION_FREE = {
    "FalconMambaForCausalLM": FalconMambaConfig,
    "Mamba2ForCausalLM": Mamba2Config,
    "MambaForCausalLM": MambaConfig,
}
# What checkpoints of an architecture have, where a kind or a setting depends on it.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "HrmTextForCausalLM": {"prefix_lm": True},
    "MiniCPMSALAForCausalLM": {"has_lightning_layers": True},
    "Qwen4ExpForConditionalGeneration": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
    "UnlimitedOCRForCausalLM": {"num_hidden_layers": 2},
}
# The device, and what SGLang would find out of it.
MACHINES: dict[str, tuple[str, dict[str, bool]]] = {
    "CPU": ("cpu", {}),
    "Hopper": ("cuda", {"is_cuda": True, "is_sm90": True}),
    "Blackwell": ("cuda", {"is_cuda": True, "is_sm100": True}),
}
# Of those that `is_deepseek_dsa` names, the ones whose checkpoints all have an index.
DSA = {
    "DeepseekV32ForCausalLM",
    "Dots3NoteForCausalLM",
    "Glm5NextForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "HYV4ForCausalLM",
}


def architectures() -> list[str]:
    """The classes that SGLang's model files register."""
    return sorted(sources())


def registered(text: str) -> list[str]:
    """The classes that a model file registers."""
    found: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            found += re.findall(r"\w+", ast.unparse(node.value))
    return found


@cache
def sources() -> dict[str, str]:
    """The model file of each class."""
    files = sorted(Path(sglang.srt.models.__path__[0]).glob("*.py"))
    return {name: text for text in map(Path.read_text, files) for name in registered(text)}


def generative() -> list[str]:
    return [name for name in architectures() if not NO_GENERATION.search(name)]


class Config(SimpleNamespace):
    """The configuration of a checkpoint, which has None for all that is not given."""

    def __init__(self, name: str) -> None:
        super().__init__(architectures=[name], **CHECKPOINTS.get(name, {}))

    def __getattr__(self, name: str) -> None:
        if name.startswith("__") or name == "text_config":
            raise AttributeError(name)


def traits_of(name: str) -> ModelTraits:
    """As the architecture's name and what its checkpoints have tell them."""
    config = Config(name)
    windows = model_config.is_hybrid_swa_model([name])
    layers = config.num_hidden_layers and model_config.get_hybrid_layer_ids([name], config)
    return ModelTraits(
        is_hybrid_swa=windows,
        is_hybrid_ssm=name in MAMBA,
        is_encoder_decoder=model_config.is_encoder_decoder_model([name]),
        is_attention_free=name in ATTENTION_FREE,
        is_windows_only=layers is not None and layers[1] == [],
        is_prompt_aware=name == PROMPT_AWARE,
        is_compressed_index=is_qwen_qsa(config),
        is_multimodal=name in model_config.multimodal_model_archs,
        is_compressed=model_config.is_deepseek_v4(config),
        is_sparse=name in DSA or model_config.is_minimax_sparse(config),
    )


def resolved(name: str, device: str = "cpu") -> Any:
    """The settings of a server by default, with those that SGLang forces on this architecture."""
    config, args = Config(name), ServerArgs(model_path="none", device=device)
    args._model_config = Config(name)
    args._model_config.hf_config = args._model_config.hf_text_config = config
    args._quantization_explicitly_unset = False
    for source, forced in overrides.collect_model_override_declarations(name, args, config):
        declare_resolution(args, source, **forced)
    # As in SGLang's model_hook.py, which needs a checkpoint.
    if not model_config.is_multimodal_chunked_prefill_supported([name]):
        declare_resolution(args, "test", chunked_prefill_size=-1)
    if config.prefix_lm:
        declare_resolution(args, "test", chunked_prefill_size=-1, disable_radix_cache=True)
    return resolving_view(args)


def kinds_of(traits: ModelTraits) -> tuple[str, ...]:
    found = (field.name for field in fields(traits) if getattr(traits, field.name) is True)
    return tuple(name for name in found if name != "is_generation")


counted_in_0_5_23 = pytest.mark.skipif(
    compat.INSTALLED == "0.5.22", reason="SGLang 0.5.23 has more architectures"
)


@counted_in_0_5_23
def test_architectures_by_kind_are_those_that_were_reviewed() -> None:
    kinds = Counter(kinds_of(traits_of(name)) for name in generative())
    assert kinds == {
        (): 88,
        ("is_multimodal",): 47,
        ("is_hybrid_ssm",): 19,
        ("is_hybrid_ssm", "is_attention_free"): 3,
        ("is_hybrid_swa",): 11,
        ("is_hybrid_swa", "is_compressed"): 1,
        ("is_hybrid_ssm", "is_multimodal"): 10,
        ("is_hybrid_ssm", "is_multimodal", "is_compressed_index"): 1,
        ("is_hybrid_swa", "is_multimodal"): 6,
        ("is_hybrid_swa", "is_windows_only", "is_prompt_aware", "is_multimodal"): 1,
        ("is_sparse",): 4,
        ("is_encoder_decoder", "is_multimodal"): 2,
        ("is_multimodal", "is_sparse"): 2,
        ("is_hybrid_ssm", "is_multimodal", "is_sparse"): 1,
        ("is_hybrid_swa", "is_hybrid_ssm"): 1,
    }
    assert kinds.total() == 197


@counted_in_0_5_23
@pytest.mark.parametrize("machine", MACHINES)
def test_architectures_that_are_served_are_counted_and_others_have_a_reason(machine: str) -> None:
    device, facts = MACHINES[machine]
    with override_platform(**facts):
        reasons = {
            name: unsupported(resolved(name, device), traits_of(name), None)
            for name in generative()
        }
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    told = {reason: trait for trait, reason in REFUSED.items()}
    told["needs the radix cache"] = "disable_radix_cache"
    found = {}
    for name, reason in refused.items():
        plain = reason.removeprefix("cake ").removeprefix("does not support ")
        found[name] = told[plain.partition(", which SGLang turns off")[0]]
        assert "\n" not in reason
    assert found == {
        "FalconMambaForCausalLM": "is_attention_free",
        "HrmTextForCausalLM": "disable_radix_cache",
        "Mamba2ForCausalLM": "is_attention_free",
        "MambaForCausalLM": "is_attention_free",
        "MiniCPMSALAForCausalLM": "disable_radix_cache",
        "MllamaForConditionalGeneration": "is_encoder_decoder",
        "MossVLForConditionalGeneration": "is_encoder_decoder",
        "UnlimitedOCRForCausalLM": "is_prompt_aware",
    }
    said = f"Of the {len(reasons)} architectures of SGLang 0.5.23 that generate text, "
    said += f"{len(reasons) - len(refused)} are served."
    assert said in (ROOT / "README.md").read_text()


def test_architectures_of_deepseek_v4_have_pages_of_256_tokens_and_blocks_of_one() -> None:
    args, traits = resolved("DeepseekV4ForCausalLM"), traits_of("DeepseekV4ForCausalLM")
    assert args.page_size == CakeConfig().block_tokens_in(args.page_size) == 256
    assert unsupported(args, traits, None) is None
    assert "set --cake-block-tokens 256" in str(unsupported(args, traits, 128))


def test_architectures_without_attention_have_no_layer_with_kv() -> None:
    for kind in ATTENTION_FREE.values():
        assert kind().full_attention_layer_ids == []


def test_architectures_whose_answers_see_all_of_the_prompt_are_known() -> None:
    """`is_prompt_aware` goes by the name, since SGLang asks the model, which is not loaded yet."""
    (path,) = (path for path in MODELS if "def is_prefill_aware_swa" in path.read_text())
    assert f"EntryClass = {PROMPT_AWARE}" in path.read_text().replace("[", "").replace("]", "")


def test_architectures_with_reviewed_media_are_multimodal_ones_of_sglang() -> None:
    assert set(generative()) >= MEDIA_ARCHITECTURES
    assert set(model_config.multimodal_model_archs) >= MEDIA_ARCHITECTURES


def test_architectures_with_reviewed_media_take_no_audio() -> None:
    files = sources()
    assert [name for name in MEDIA_ARCHITECTURES if "audio" in files[name]] == []


def pooled(name: str) -> set[str]:
    """What the pooler of a class of SGLang takes: its own, or that of the classes it derives from.

    Some classes have the name of another one in another file, so all of that name are asked. A head
    of some checkpoints, for which SGLang turns the radix cache off, is no pooler of the class.
    """
    found: set[str] = set()
    for bases, source in classes().get(name, ()):
        own = set(re.findall(r"PoolingType\.(\w+)|(\w+Pooler)\(", source))
        kinds = {kind or other for kind, other in own} - {"Pooler", "JointSchemaPooler"}
        found |= kinds or {kind for base in bases for kind in pooled(base) if base != name}
    return found


@cache
def classes() -> dict[str, list[tuple[list[str], str]]]:
    """The bases and the source of SGLang's model classes."""
    found: dict[str, list[tuple[list[str], str]]] = {}
    for file in MODELS:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                found.setdefault(node.name, []).append((bases, ast.unparse(node)))
    return found


@counted_in_0_5_23
def test_architectures_with_reviewed_vectors_pool_the_last_token() -> None:
    assert {name: pooled(name) for name in POOLING_ARCHITECTURES} == {
        name: {"LAST"} for name in POOLING_ARCHITECTURES
    }
