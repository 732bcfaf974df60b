"""Models whose layers differ: which layers have KV of all tokens, and what the others cost.

A layer with a sliding window or a recurrent state has no KV of all tokens: its part of the end
state is stored in place of it. The work of kernels follows their formulas. A real GPU needs longer,
mostly for sparse attention.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

_STATE_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONV_VALUE_BYTES = 2  # SGLang's default
_CHUNKED_EVERY = 4  # Llama 4: each fourth layer sees all tokens, and not only those of its chunk
# The names in `layer_types` that are counted; sparse attention has KV of all tokens.
_COUNTED_KINDS = frozenset(
    {
        "attention",
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "linear_attention",
        "indexed_attention",
        "deepseek_sparse_attention",
        "qwen_sparse_attention",
        "minimax_m3_sparse",
    }
)
# Fields that name the layers of Nemotron-H, MiMo V2, Inkling, Bailing and MiniCPM, and those by
# which Gemma 4 has other KV heads in windows than in the other layers.
_UNCOUNTED_FIELDS = (
    "hybrid_override_pattern",
    "layers_block_type",
    "hybrid_layer_pattern",
    "local_layer_ids",
    "layer_group_size",
    "mixer_types",
    "global_head_dim",
    "num_global_key_value_heads",
    "per_layer_config",
)
_UPDATE_FLOPS = 6  # of the delta rule, per value of a state: read, correct, read for the output


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The layers of a model by kind.

    Attributes:
        full: layers with KV of all tokens.
        window: layers with KV of the last `window_tokens`.
        state: layers with a recurrent state.
        state_parameters, state_bytes, state_flops: of one of them; FLOPs per token.
    """

    full: int
    window: int = 0
    window_tokens: int = 0
    state: int = 0
    state_parameters: int = 0
    state_bytes: int = 0
    state_flops: int = 0


@dataclass(frozen=True, slots=True)
class SparseIndex:
    """The index of sparse attention in one layer (DeepSeek V3.2), zeros for dense attention.

    Attributes:
        kv_bytes: of one token beside its KV.
        pair_width: values that a (query, key) pair takes, over all heads of the index.
        chosen_tokens: a query attends to so many keys.
    """

    parameters: int = 0
    kv_bytes: int = 0
    pair_width: int = 0
    chosen_tokens: int = 0


def layer_kinds(config: Config, *, has_window_pool: bool) -> LayerKinds:
    """The layers of a parsed `config.json`, as far as its fields are known.

    Args:
        has_window_pool: SGLang keeps KV of sliding windows in a pool of their own.
    """
    layers = int(config["num_hidden_layers"])
    kinds: Collection[str] = config.get("layer_types") or ()
    windows = sum(kind == "sliding_attention" for kind in kinds) if has_window_pool else 0
    window = {"window": windows, "window_tokens": int(config.get("sliding_window") or 0)}
    kimi = config.get("linear_attn_config") or {}
    if kimi.get("full_attn_layers"):
        full = len(kimi["full_attn_layers"])
        return LayerKinds(full, state=layers - full, **_delta_attention(config, kimi))
    if config.get("linear_num_value_heads"):
        every = int(config.get("full_attention_interval") or 4)
        full = sum(kind == "full_attention" for kind in kinds) if kinds else layers // every
        return LayerKinds(full, state=layers - full, **_gated_delta_net(config))
    if has_window_pool and (chunk_tokens := int(config.get("attention_chunk_size") or 0)):
        full = layers // _CHUNKED_EVERY
        return LayerKinds(full, window=layers - full, window_tokens=chunk_tokens)
    return LayerKinds(layers - windows, **window)


def has_uncounted_layers(config: Config) -> bool:
    """Whether `layer_kinds` takes layers of a parsed `config.json` for others than they are.

    It knows no Mamba layer, no short convolution, and no window with KV heads of its own.
    """
    kinds = set(config.get("layer_types") or ())
    if kinds - _COUNTED_KINDS or any(config.get(name) for name in _UNCOUNTED_FIELDS):
        return True
    if "linear_attention" in kinds:
        return not (config.get("linear_num_value_heads") or config.get("linear_attn_config"))
    return not kinds and bool(config.get("mamba_d_state"))


def sparse_index(config: Config) -> SparseIndex:
    """The index of a parsed `config.json`."""
    chosen = int(config.get("index_topk") or 0)
    if not chosen:
        return SparseIndex()
    heads, width = int(config["index_n_heads"]), int(config["index_head_dim"])
    hidden, query_rank = int(config["hidden_size"]), int(config["q_lora_rank"])
    return SparseIndex(
        parameters=query_rank * heads * width + hidden * (width + heads),
        kv_bytes=width + 4,  # FP8, and a scale
        pair_width=heads * width,
        chosen_tokens=chosen,
    )


def _gated_delta_net(config: Config) -> dict[str, int]:
    """A layer of Qwen3-Next and Qwen3.5."""
    hidden = int(config["hidden_size"])
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    heads = int(config["linear_num_value_heads"])
    keys, values = int(config["linear_num_key_heads"]) * key_dim, heads * value_dim
    convolved = 2 * keys + values
    return _state(
        parameters=hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden,
        values=heads * key_dim * value_dim,
        convolved=convolved * (int(config["linear_conv_kernel_dim"]) - 1),
        config=config,
    )


def _delta_attention(config: Config, kimi: Config) -> dict[str, int]:
    """A layer of Kimi Delta Attention."""
    hidden, heads, width = int(config["hidden_size"]), int(kimi["num_heads"]), int(kimi["head_dim"])
    values = heads * width
    gates = 2 * width * (hidden + values) + hidden * heads
    return _state(
        parameters=4 * hidden * values + gates,
        values=values * width,
        convolved=3 * values * (int(kimi["short_conv_kernel_size"]) - 1),
        config=config,
    )


def _state(*, parameters: int, values: int, convolved: int, config: Config) -> dict[str, int]:
    value_bytes = _STATE_VALUE_BYTES[str(config.get("mamba_ssm_dtype") or "float32")]
    return {
        "state_parameters": parameters,
        "state_bytes": values * value_bytes + convolved * _CONV_VALUE_BYTES,
        "state_flops": _UPDATE_FLOPS * values,
    }
