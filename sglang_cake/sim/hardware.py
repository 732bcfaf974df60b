"""Costs of a model on a GPU with a store, from data sheets: what to expect before measuring.

A step reads all weights once and then computes, so it costs

    fixed  = weight bytes / memory bandwidth + LAUNCH_S
    token  = 2 x active parameters / (peak FLOP/s x efficiency)
    pair   = 4 x heads x head_dim x layers / (peak FLOP/s x ATTENTION x efficiency)

`EFFICIENCY` is between what Cake's tables show for an A100 (0.65 of the peak, vLLM 0.6.2) and for
an H100 (0.27); ATTENTION is their share of attention. N GPUs in tensor parallel are
N x SCALING^log2(N) as fast as one: theirs gained 1.6 with two.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_cake.errors import ConfigError
from sglang_cake.read.cost import LoadCost, PrefillCost
from sglang_cake.store.url import parse_bandwidth

EFFICIENCY = 0.5
ATTENTION = 0.65
LAUNCH_S = 0.003
SCALING = 0.8
_VALUE_BYTES = 2  # of weights and KV: BF16


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer, as far as costs go.

    Attributes:
        active: parameters that a token passes, embeddings aside; `parameters`: all.
        kv_bytes: of one token, all layers, BF16.
    """

    layers: int
    attention_width: int  # heads x head_dim
    active: float
    parameters: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """From the maker's data sheet: dense BF16, without sparsity."""

    tflops: float
    memory_tb_per_s: float


@dataclass(frozen=True, slots=True)
class Medium:
    """What one server reads from; a known medium, or as given."""

    bytes_per_s: float
    latency_s: float


def _dense(
    layers: int, hidden: int, kv_heads: int, parameters: float, head_dim: int = 128
) -> Shape:
    kv_bytes = 2 * layers * kv_heads * head_dim * _VALUE_BYTES
    return Shape(layers, hidden, parameters, parameters, kv_bytes)


# From the models' config.json; `--model PATH` reads one. Mixture: active and all parameters.
MODELS = {
    "llama-2-7b": _dense(32, 4096, 32, 6.7e9),
    "llama-2-13b": _dense(40, 5120, 40, 13.0e9),
    "llama-3.1-8b": _dense(32, 4096, 8, 8.0e9),
    "llama-3.1-70b": _dense(80, 8192, 8, 70.6e9),
    "qwen3-8b": _dense(36, 4096, 8, 8.2e9),
    "qwen3-32b": _dense(64, 8192, 8, 32.8e9),
    "qwen3-30b-a3b": Shape(48, 4096, 3.3e9, 30.5e9, 2 * 48 * 4 * 128 * _VALUE_BYTES),
    "mistral-7b": _dense(32, 4096, 8, 7.2e9),
    "deepseek-v3": Shape(61, 24576, 37e9, 671e9, 61 * (512 + 64) * _VALUE_BYTES),
}
GPUS = {
    "a10": Gpu(125, 0.6),
    "a100": Gpu(312, 2.0),
    "h100": Gpu(989, 3.35),
    "h200": Gpu(989, 4.8),
    "b200": Gpu(2250, 8.0),
    "l4": Gpu(121, 0.3),
    "l40s": Gpu(362, 0.86),
    "rtx4090": Gpu(165, 1.0),
    "mi300x": Gpu(1307, 5.3),
}
MEDIA = {
    "hdd": Medium(200e6, 0.010),
    "sata-ssd": Medium(550e6, 0.0002),
    "nvme": Medium(3.5e9, 0.0001),  # one drive, PCIe 3
    "nvme-gen4": Medium(7.0e9, 0.0001),
    "10gbe": Medium(1.17e9, 0.0005),
    "25gbe": Medium(2.9e9, 0.0005),
    "100gbe": Medium(11.7e9, 0.0005),
    "s3": Medium(700e6, 0.050),  # eight connections
}


def prefill_cost(
    shape: Shape, gpu: Gpu, *, gpus: int = 1, efficiency: float = EFFICIENCY
) -> PrefillCost:
    """Seconds of a prefill step (see the module)."""
    faster = gpus * SCALING ** math.log2(gpus)
    flops = gpu.tflops * 1e12 * efficiency * faster
    weights_s = shape.parameters * _VALUE_BYTES / (gpu.memory_tb_per_s * 1e12 * faster)
    return PrefillCost(
        fixed_s=weights_s + LAUNCH_S,
        token_s=2 * shape.active / flops,
        pair_s=4 * shape.attention_width * shape.layers / (flops * ATTENTION),
        decode_s=2 * shape.active / flops,
        error=0.02,
    )


def load_cost(shape: Shape, medium: Medium, block_tokens: int, smaller: float = 1.0) -> LoadCost:
    """Seconds of a load. Args: smaller: how many times smaller than BF16 KV is stored."""
    block_bytes = block_tokens * shape.kv_bytes / smaller
    return LoadCost(medium.latency_s, block_bytes / medium.bytes_per_s)


def find_shape(text: str) -> Shape:
    """A known model's name, a model folder, or a config.json. Raises: ConfigError."""
    if text.lower() in MODELS:
        return MODELS[text.lower()]
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--model {text!r} is neither a folder, nor a config.json, nor one of {_names(MODELS)}"
        )
    try:
        config = json.loads(path.read_text())
        return _shape(config.get("text_config", config))
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, OSError) as error:
        raise ConfigError(
            f"--model {text!r}: not a transformer's config.json ({error!r})"
        ) from None


def find_gpu(text: str) -> Gpu:
    """A known GPU, or `TFLOPS:TB/s`, for example 312:2.0. Raises: ConfigError."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    tflops, colon, memory = text.partition(":")
    try:
        gpu = Gpu(float(tflops), float(memory))
    except ValueError:
        gpu = Gpu(0, 0)
    if not colon or not (0 < gpu.tflops < 1e6 and 0 < gpu.memory_tb_per_s < 1e4):
        raise ConfigError(
            f"--gpu {text!r} is not one of {_names(GPUS)}; otherwise write its dense BF16 TFLOPS "
            "and memory TB/s, for example 312:2.0"
        )
    return gpu


def find_medium(text: str) -> Medium:
    """A known medium, or a bandwidth and maybe a latency, `2GB/s` or `32Gbps,5ms`.

    Raises: ConfigError.
    """
    if text.lower() in MEDIA:
        return MEDIA[text.lower()]
    bandwidth, comma, latency = text.partition(",")
    try:
        latency_s = float(latency.removesuffix("ms")) / 1e3 if comma else 0.001
        if not 0 <= latency_s < 60 or (comma and not latency.endswith("ms")):
            raise ConfigError("")
        return Medium(parse_bandwidth(bandwidth), latency_s)
    except (ConfigError, ValueError):
        raise ConfigError(
            f"--store {text!r} is not one of {_names(MEDIA)}; otherwise write a bandwidth and, if "
            "you like, a latency: 2GB/s or 32Gbps,5ms"
        ) from None


def _names(table: dict[str, Any]) -> str:
    return ", ".join(sorted(table))


def _shape(config: dict[str, Any]) -> Shape:
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = hidden * head_dim * 2 * (heads + kv_heads)
    experts = int(
        config.get("num_experts")
        or config.get("num_local_experts")
        or config.get("n_routed_experts")
        or 0
    )
    chosen = int(config.get("num_experts_per_tok") or 0) + int(config.get("n_shared_experts") or 0)
    width = int(
        (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
    )
    mlp = 3 * hidden * width
    embeddings = int(config.get("vocab_size") or 0) * hidden
    active = layers * (attention + (chosen or 1) * mlp)
    every = layers * (attention + (experts or 1) * mlp) + 2 * embeddings
    if "kv_lora_rank" in config:  # MLA keeps one latent row a layer
        kv_values = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    else:
        kv_values = 2 * kv_heads * head_dim
    if min(hidden, layers, heads, width) <= 0:
        raise ValueError("a size is not positive")
    return Shape(layers, heads * head_dim, active, every, layers * kv_values * _VALUE_BYTES)
