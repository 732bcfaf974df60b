"""Further models whose images have keys, each in a server. `test_multimodal.py` has more
situations with one model, and `test_hybrid_families.py` a model with recurrent states."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from live import VOCAB, Live, Start
from seeing import AFTER, BEFORE, PAD, check_images
from tiny_hybrids import Transformers

from sglang_cake.demo.models import write_model

PATCH = 14  # pixels
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "patch_size": PATCH,
    "out_hidden_size": TEXT["hidden_size"],
    "initializer_range": 0.08,
}
TOKENS = {"image_token_id": PAD, "video_token_id": VOCAB - 9, "tie_word_embeddings": False}


def rope(*section: int, **more: float) -> dict[str, Any]:
    """Args: section: half widths of time, height and width."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **more}


def build_qwen2_5_vl(path: Path) -> Path:
    """Write a random Qwen2.5-VL to `path`: one layer of its tower sees windows of the image."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope(4, 6, 6)},
        vision_config=VISION | {"intermediate_size": 128, "fullatt_block_indexes": [1]},
        vision_start_token_id=BEFORE,
        vision_end_token_id=AFTER,
        **TOKENS,
    )
    return write_model(path, transformers.Qwen2_5_VLForConditionalGeneration, config)


def build_glm_4_1v(path: Path) -> Path:
    """Write a random GLM-4.1V to `path`."""
    config = transformers.Glm4vConfig(
        text_config=TEXT | {"rope_parameters": rope(2, 3, 3, partial_rotary_factor=0.5)},
        vision_config=VISION | {"intermediate_size": 256, "image_size": 16 * PATCH},
        image_start_token_id=BEFORE,
        image_end_token_id=AFTER,
        video_start_token_id=VOCAB - 6,
        video_end_token_id=VOCAB - 5,
        **TOKENS,
    )
    return write_model(path, transformers.Glm4vForConditionalGeneration, config)


MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen2.5-vl": build_qwen2_5_vl,
    "glm-4.1v": build_glm_4_1v,
}
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "8192", "--cake-mode", "load"),
    *("--mm-attention-backend", "sdpa"),
)


@pytest.fixture(
    scope="module", params=[pytest.param("qwen2.5-vl", marks=pytest.mark.breadth), "glm-4.1v"]
)
def seeing(
    request: pytest.FixtureRequest, start: Start, folder: Path, standins: dict[str, str]
) -> Iterator[tuple[Live, Transformers]]:
    path = MODELS[request.param](folder / request.param / "model")
    env = {**standins, "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "cake_test_images"}
    with start(path, FLAGS, store=folder / f"store-{request.param}", env=env) as live:
        live.races = False
        yield live, Transformers(path, seeing=True)


def test_media_model_prompt_with_an_image_is_loaded_and_no_other_image_is_taken_for_it(
    seeing: tuple[Live, Transformers], prompt: Callable[[int], list[int]]
) -> None:
    live, model = seeing
    check_images(live, model, prompt, patch_values=3 * 2 * PATCH**2)
