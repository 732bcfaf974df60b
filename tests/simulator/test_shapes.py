"""What `plan` reads from a config.json is what SGLang makes of it."""

import inspect
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_cake.core.errors import ConfigError
from sglang_cake.simulator.shapes import (
    MODELS,
    POOLS_BY_CONFIG,
    WINDOW_POOLS,
    Shape,
    find_shape,
    kv_token_bytes,
    shape_of,
)

LLAMA = MODELS["llama-3.1-8b"]
LLAMA_4 = {
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "vocab_size": 202048,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "llama-4-scout": {**LLAMA_4, "num_local_experts": 16, "interleave_moe_layer_step": 1},
    "llama-4-maverick": {**LLAMA_4, "num_local_experts": 128, "interleave_moe_layer_step": 2},
    "ernie-4.5-300b": {
        "num_hidden_layers": 54,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "moe_num_experts": 64,
        "moe_intermediate_size": 3584,
        "moe_k": 8,
        "moe_layer_start_index": 3,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 0,
        "vocab_size": 103424,
    },
}
LONGROPE = {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}


def _written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_shape_by_name_equals_shape_by_config_file(name: str, tmp_path: Path) -> None:
    by_file = find_shape(str(_written(tmp_path, MODELS[name])))
    assert by_file == find_shape(name)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-3.2-3b", 28 * 2 * 8 * 128 * 2),
        ("qwen3-30b-a3b", 48 * 2 * 4 * 128 * 2),  # heads of another size
        ("deepseek-v3", 61 * 576 * 2),  # MLA: one latent row a layer
        ("gpt-oss-120b", 18 * 2 * 8 * 64 * 2),  # of the layers without a window
    ],
)
def test_kv_token_bytes_equal_those_of_the_layers_with_kv_of_all_tokens(
    name: str, kv_bytes: int, tmp_path: Path
) -> None:
    folder = _written(tmp_path, MODELS[name])
    assert kv_token_bytes(folder, "auto") == kv_token_bytes(folder, "bfloat16") == kv_bytes
    assert kv_token_bytes(folder, "float32") == 2 * kv_bytes


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        # The makers' own numbers, embeddings in both.
        ("llama-2-7b", 6.74e9, 6.74e9),
        ("llama-2-13b", 13.0e9, 13.0e9),
        ("llama-3.2-3b", 3.21e9, 3.21e9),
        ("llama-3.1-8b", 8.03e9, 8.03e9),
        ("llama-3.1-70b", 70.6e9, 70.6e9),
        ("llama-3.1-405b", 405.9e9, 405.9e9),
        ("qwen3-8b", 8.19e9, 8.19e9),
        ("qwen3-32b", 32.8e9, 32.8e9),
        ("qwen3-30b-a3b", 30.5e9, 3.35e9),
        ("mistral-7b", 7.25e9, 7.25e9),
        ("deepseek-v3", 671e9, 37.5e9),
        ("gpt-oss-120b", 116.8e9, 5.7e9),  # 5.1e9 with one of the two embeddings
        ("kimi-linear-48b", 49.1e9, 3.48e9),
        ("qwen3.5-397b", 397e9, 17.3e9),
        ("llama-4-scout", 107.8e9, 17.2e9),
        ("llama-4-maverick", 400.7e9, 17.2e9),
        ("ernie-4.5-300b", 300e9, 47e9),
    ],
)
def test_shape_parameters_equal_the_published_numbers(
    name: str, parameters: float, active: float
) -> None:
    config = {**MODELS, **MIXTURES}[name]
    found = shape_of(config)
    vocabulary = config["vocab_size"] * config["hidden_size"]
    embeddings = vocabulary * (1 if config.get("tie_word_embeddings") else 2)
    assert found.parameters == pytest.approx(parameters, rel=0.01)
    assert found.active + embeddings == pytest.approx(active, rel=0.02)


def test_shape_experts_for_images_are_weights_that_text_tokens_do_not_pass() -> None:
    """ERNIE-4.5-VL-28B-A3B."""
    text = {
        "num_hidden_layers": 28,
        "hidden_size": 2560,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "moe_num_experts": 64,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2,
        "vocab_size": 103424,
        "tie_word_embeddings": True,
    }
    lists = {
        "moe_num_experts": [64, 64],
        "moe_intermediate_size": [1536, 512],
        "moe_layer_start_index": [1, 1],
    }
    found, of_text = shape_of({**text, **lists}), shape_of(text)
    assert found.active == of_text.active
    assert found.parameters - of_text.parameters == 27 * 64 * 3 * 2560 * 512
    assert found.parameters == pytest.approx(28.4e9, rel=0.01)
    assert found.active == pytest.approx(3e9, rel=0.05)


@pytest.mark.parametrize(
    ("name", "kv_bytes", "state_bytes", "window_bytes"),
    [
        # 18 of 36 layers; the others have a window of 128 tokens.
        ("gpt-oss-120b", 18 * 8 * 2 * 64 * 2, 0, 128 * 18 * 8 * 2 * 64 * 2),
        # 7 of 27 layers, MLA; the others have a float32 state and three convolutions.
        ("kimi-linear-48b", 7 * 576 * 2, 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2), 0),
        # 15 of 60 layers.
        ("qwen3.5-397b", 15 * 2 * 2 * 256 * 2, 45 * (64 * 128 * 128 * 4 + 12288 * 3 * 2), 0),
        # An index of 128 bytes and a scale beside each latent row.
        ("deepseek-v3.2", 61 * (576 * 2 + 132), 0, 0),
    ],
)
def test_shape_unequal_layers_have_kv_windows_and_states(
    name: str, kv_bytes: int, state_bytes: int, window_bytes: int
) -> None:
    found = find_shape(name)
    assert found.unmodelled is None
    assert found.read_bytes(1) == kv_bytes
    assert found.state_bytes == state_bytes
    assert found.kv_heads * found.window_head_bytes == window_bytes
    end_bytes = found.end_blocks(1, 128) * 128 * kv_bytes
    assert 0 <= end_bytes - state_bytes - window_bytes < 128 * kv_bytes


def test_shape_windows_of_a_model_with_one_pool_have_kv_of_all_tokens() -> None:
    windows = {"layer_types": ["sliding_attention"] * 32, "sliding_window": 128}
    assert shape_of({**LLAMA, **windows}) == shape_of(LLAMA)


@pytest.mark.parametrize(
    "facts",
    [
        {"hybrid_override_pattern": "M-M-M*-" * 4},
        {"layers_block_type": ["mamba", "moe", "attention", "moe"] * 8},
        {"layer_types": ["mamba", "attention"] * 16, "mamba_d_state": 128},
        {"layer_types": ["linear_attention", "full_attention"] * 16, "mamba_d_state": 128},
        {"mamba_d_state": 256},
        {"layer_types": ["conv", "full_attention"] * 16},
        {"hybrid_layer_pattern": [0, 1, 1, 1] * 8, "sliding_window": 128},
        {"local_layer_ids": [0, 1, 2]},
        {"layer_group_size": 8},
        {"mixer_types": ["minicpm4", "lightning-attn"] * 16},
        {"global_head_dim": 512, "layer_types": ["sliding_attention", "full_attention"] * 16},
        {"num_global_key_value_heads": 4},
        {"per_layer_config": {"05": {"head_dim": 512}}},
    ],
    ids=[
        *("nemotron-h", "nemotron-h by list", "granite-4", "granite-4 by transformers"),
        *("falcon-h1", "lfm2", "mimo-v2", "inkling", "ring", "minicpm"),
        *("gemma 4", "gemma 4, heads", "gemma 4 by transformers"),
    ],
)
def test_shape_layers_of_other_kinds_are_not_modelled(facts: dict[str, Any]) -> None:
    found = shape_of({**LLAMA, **facts})
    assert found.unmodelled == "layers of these kinds are not modelled"
    assert found.refused is None


@pytest.mark.parametrize(
    "facts",
    [
        {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        {"num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32},
    ],
    ids=["gemma 4", "hunyuan"],
)
def test_shape_experts_with_an_unknown_number_for_a_token_are_not_modelled(
    facts: dict[str, Any],
) -> None:
    found = shape_of({**LLAMA, **facts})
    assert found.unmodelled == "experts are not modelled whose number for a token is not known"
    assert found.refused is None


@pytest.mark.parametrize(
    "facts",
    [
        {"layer_types": ["attention"] * 32, "mamba_d_state": 128},  # Granite 4 without Mamba layers
        {"layer_types": ["full_attention"] * 32},
        {"layer_types": ["deepseek_sparse_attention"] * 32},
    ],
)
def test_shape_layers_with_kv_of_all_tokens_are_modelled(facts: dict[str, Any]) -> None:
    assert shape_of({**LLAMA, **facts}) == shape_of(LLAMA)


def test_shape_chunked_attention_has_kv_of_all_tokens_in_each_fourth_layer() -> None:
    plain = shape_of(LLAMA)
    chunked = {**LLAMA, "attention_chunk_size": 8192}
    assert shape_of(chunked) == plain  # without a pool for it
    found = shape_of({**chunked, "architectures": ["Llama4ForConditionalGeneration"]})
    assert found.kv_head_bytes == plain.kv_head_bytes // 4
    assert found.window_head_bytes == 8192 * 3 * found.kv_head_bytes
    assert found.end_blocks(1, 128) == 8192 * 3 // 128


def test_shape_end_blocks_of_a_rank_shrink_with_the_ranks_that_share_states() -> None:
    qwen = find_shape("qwen3.5-397b")
    assert [qwen.end_blocks(gpus, 128) for gpus in (1, 2, 8)] == [49, 49, 13]


def test_shape_end_blocks_with_smaller_kv_hold_states_of_the_same_size() -> None:
    kimi, gpt_oss = find_shape("kimi-linear-48b"), find_shape("gpt-oss-120b")
    block_bytes = 128 * kimi.rank_kv_bytes(1) / 2
    assert kimi.end_blocks(1, 128, smaller=2) == math.ceil(kimi.state_bytes / block_bytes)
    assert gpt_oss.end_blocks(1, 128, smaller=2) == gpt_oss.end_blocks(1, 128)  # windows are KV


def test_shape_mlp_widths_by_layer_count_as_their_sum() -> None:
    layers, width = int(LLAMA_4["num_hidden_layers"]), int(LLAMA_4["intermediate_size"])
    widths = [width - 64, width + 64] * (layers // 2)
    by_layer = shape_of({**LLAMA_4, "intermediate_size": widths})
    assert by_layer == shape_of(LLAMA_4)


def test_shape_mixture_uses_few_experts_and_holds_all() -> None:
    mixed = shape_of({**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2})
    assert mixed.has_experts
    assert not find_shape("llama-3.1-8b").has_experts
    assert mixed.parameters > 2 * mixed.active > 2 * find_shape("llama-3.1-8b").active


@pytest.mark.parametrize(
    ("name", "gpus", "read", "stored"),
    [
        ("llama-3.1-8b", 1, 1, 1),
        ("llama-3.1-8b", 8, 1, 1),
        ("llama-3.1-8b", 16, 2, 2),  # more ranks than KV heads: a head is on two ranks
        ("qwen3-30b-a3b", 8, 2, 2),
        ("deepseek-v3", 8, 8, 1),  # MLA: the latent row is on every rank, and stored once
        ("kimi-linear-48b", 8, 8, 1),  # the same, beside states that ranks divide
    ],
)
def test_shape_bytes_count_the_copies_that_ranks_read_and_store(
    name: str, gpus: int, read: int, stored: int
) -> None:
    shape = find_shape(name)
    assert shape.read_bytes(gpus) == read * shape.read_bytes(1)
    assert shape.stored_bytes(gpus) == stored * shape.stored_bytes(1)


@pytest.mark.parametrize(
    ("quantization", "weight_bytes"),
    [
        ({}, 2),
        ({"quant_method": "fp8"}, 1),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.56),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "gptq", "bits": 8}, 1),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            0.5,
        ),
    ],
)
def test_shape_quantized_checkpoint_has_smaller_weights(
    quantization: dict[str, Any], weight_bytes: float
) -> None:
    config = {**LLAMA, "quantization_config": quantization}
    assert shape_of(config).weight_bytes == weight_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"hidden_size": "x"}', "\x00", '{"a": 1', "[" * 100_000),
        json.dumps({**LLAMA, "hidden_size": math.inf}),
    ],
    ids=range(8),
)
def test_shape_bad_config_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize(
    "facts",
    [
        {"architectures": ["Llama4ForConditionalGeneration"], "attention_chunk_size": 8192},
        {"architectures": ["GptOssForCausalLM"], "layer_types": ["sliding_attention"] * 2},
    ],
    ids=["llama 4", "windows only"],
)
def test_shape_without_a_layer_that_has_kv_of_all_tokens_is_a_config_error(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    folder = _written(tmp_path, {**LLAMA, "num_hidden_layers": 2, **facts})
    with pytest.raises(ConfigError, match="no layer has KV of all tokens"):
        find_shape(str(folder))


@pytest.mark.parametrize("parts", [["text_config"], ["thinker_config", "text_config"]])
def test_shape_of_a_multimodal_config_is_that_of_its_text_model(parts: list[str]) -> None:
    config = dict(LLAMA)
    for part in reversed(parts):
        config = {part: config, "vision_config": {"hidden_size": 64}}
    assert shape_of(config) == shape_of(LLAMA)


def test_shape_path_that_the_system_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="is neither a folder"):
        find_shape("a" * 5000)


def test_shape_window_pools_equal_those_of_sglang() -> None:
    from sglang.srt.configs import model_config

    names = set(re.findall(r'"([A-Z]\w+)"', inspect.getsource(model_config))) | WINDOW_POOLS
    theirs = {
        name
        for name in names
        if name not in POOLS_BY_CONFIG and model_config.is_hybrid_swa_model([name])
    }
    assert theirs == WINDOW_POOLS


@pytest.mark.parametrize(
    ("name", "kind", "window_tokens"),
    [
        ("BeamForCausalLM", "sliding_attention", 512),
        ("BeamForCausalLM", "full_attention", 512),
        ("LagunaForCausalLM", "sliding_attention", 512),
        ("LagunaForCausalLM", "sliding_attention", 0),
    ],
)
def test_shape_window_pool_by_config_equals_that_of_sglang(
    name: str, kind: str, window_tokens: int
) -> None:
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    facts = {"layer_types": ["full_attention", kind] * 16, "sliding_window": window_tokens}
    found = shape_of({**LLAMA, **facts, "architectures": [name]})
    has_pool = is_hybrid_swa_model([name], SimpleNamespace(**facts))
    assert found.kv_head_bytes == shape_of(LLAMA).kv_head_bytes // (2 if has_pool else 1)
    assert found.window_head_bytes == (window_tokens * found.kv_head_bytes if has_pool else 0)


def _served(config: dict[str, Any], folder: Path) -> tuple[str | None, int]:
    """What the server says of it: refused or not, and the context."""
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_cake.integration.support_matrix import ModelTraits, unsupported_model

    model = ModelConfig(str(_written(folder, config)), trust_remote_code=False)
    return unsupported_model(ModelTraits.of(model)), model.context_len


QWEN = {**MODELS["qwen3-8b"], "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMAS = {**LLAMA, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMAS,
    "llama3 rope": {
        **LLAMAS,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "linear rope": {**LLAMAS, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {
        **QWEN,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    },
    "experts": {
        **MODELS["qwen3-30b-a3b"],
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
    },
    "mla": {
        **MODELS["deepseek-v3"],
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
    },
    "dsa": {
        **MODELS["deepseek-v3"],
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v3",
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
    "gpt-oss": {
        **LLAMA,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 16,
    },
    "mistral 3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {**LLAMA, "model_type": "mistral"},
        "vision_config": {"model_type": "pixtral"},
    },
    "gemma 3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**LLAMA, "model_type": "gemma3_text"},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "gemma 3, text": {
        **LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 512,
    },
    "qwen3-next": {
        **LLAMA,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "linear_conv_kernel_dim": 4,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
    },
    "embedding": {**QWEN, "architectures": ["Qwen3Model"]},
    "embedding of the last token": {
        **LLAMA,
        "architectures": ["MistralModel"],
        "model_type": "mistral",
    },
    "reward": {**QWEN, "architectures": ["Qwen3ForRewardModel"]},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_shape_is_refused_exactly_if_the_server_refuses(kind: str, tmp_path: Path) -> None:
    config = CONFIGS[kind]
    reason, context_tokens = _served(config, tmp_path)
    found: Shape = find_shape(str(tmp_path))
    assert found.refused == reason
    if reason is None:
        assert found.context_tokens == context_tokens


def test_shape_longrope_context_ends_at_the_original_length() -> None:
    config = {**LLAMA, "original_max_position_embeddings": 4096, "rope_scaling": LONGROPE}
    assert shape_of(config).context_tokens == 4096
