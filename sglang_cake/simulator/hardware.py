"""Expected costs of a model on a GPU with a store, from data sheets.

A step of prefill costs, with a GPU's rates below,

    one token      = LAUNCH_S + bytes of the weights that it passes / memory bandwidth
    chunk_tokens   = LAUNCH_S + the longer of: 2 x active parameters x tokens / matmul rate,
                                bytes of all weights / memory bandwidth
    pair           = FLOPs of a (query, key) pair / attention rate
    prefix_token   = FLOPs of a token of the prefix in each step / matmul rate (MLA)

Between one token and a full chunk the cost is the line through both: a mixture of experts reads few
experts for one token and all for many. N GPUs in tensor parallel are N x SCALING^log2(N) as fast,
but for the pairs of an index: each computes them all, in FP8.

The matmul rate is SERVED times the measured rate of the largest matmul on that GPU. A mixture of
experts has EXPERTS of that: a chunk leaves each expert few tokens. The attention rate is ATTENTION
of the peak. The measurements behind these shares, and how far they are off, are in
docs/simulator.md#rates-and-how-far-they-are-off. So times to compute are given as a range: the
middle divided by UNSURE, to the middle times UNSURE.
"""

import math
from dataclasses import dataclass
from typing import Any

from sglang_cake.core.errors import ConfigError
from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.simulator.shapes import Shape
from sglang_cake.stores.url import parse_bandwidth

REACHED = 0.8
SERVED = 0.72
EXPERTS = 0.55
ATTENTION = 0.55
FP8 = 2.0  # times as fast as BF16
MEMORY = 0.8  # share of the memory's bandwidth that reading weights reaches
LAUNCH_S = 0.001
PLAN_S = 0.0015  # SGLang's own time to form and launch a step
SCALING = 0.88
UNSURE = 1.3
MEMORY_SHARE = 0.88  # share of a GPU's memory for weights and KV: SGLang's --mem-fraction-static


@dataclass(frozen=True, slots=True)
class Gpu:
    """From the data sheet: dense BF16, without sparsity.

    Attributes:
        reached: measured share of the peak that the largest matmul reaches.
    """

    tflops: float
    memory_tb_per_s: float
    memory_gib: float
    reached: float = REACHED


@dataclass(frozen=True, slots=True)
class Medium:
    """The store of one server and its link."""

    bytes_per_s: float
    latency_s: float


GPUS = {
    "a10": Gpu(125, 0.6, 24),
    "a100": Gpu(312, 2.0, 80, 0.86),
    "h100": Gpu(989, 3.35, 80, 0.80),
    "h200": Gpu(989, 4.8, 141, 0.80),
    "b200": Gpu(2250, 8.0, 180, 0.78),
    "l4": Gpu(121, 0.3, 24),
    "l40s": Gpu(362, 0.86, 48),
    "rtx4090": Gpu(165, 1.0, 24),
    "mi300x": Gpu(1307, 5.3, 192, 0.60),
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
    shape: Shape,
    gpu: Gpu,
    *,
    gpus: int = 1,
    chunk_tokens: int = 2048,
    utilisation: float = 1.0,
    efficiency: float | None = None,
    slower: float = 1.0,
) -> PrefillCost:
    """Seconds of a prefill step (see the module).

    Args:
        utilisation: share of a step's tokens that are ours. Prompts of others are taken to be as
            long as ours, so a step has 1 / utilisation of our (query, key) pairs.
        efficiency: measured share of the peak that matmuls reach; None: by GPU.
        slower: factor on the times to compute, for the ends of the range.
    """
    many = gpus * SCALING ** math.log2(gpus)
    peak = gpu.tflops * 1e12 * many
    dense = efficiency or gpu.reached * SERVED
    served = efficiency or dense * (EXPERTS if shape.has_experts else 1)
    read_s = shape.weight_bytes / (gpu.memory_tb_per_s * 1e12 * MEMORY * many)
    first_s = shape.active * read_s
    chunk_s = max(
        2 * shape.active * chunk_tokens / (peak * served) * slower, shape.parameters * read_s
    )
    token_s = max(0.0, chunk_s - first_s) / chunk_tokens
    token_s += shape.token_flops / (peak * ATTENTION) * slower
    pair_s = shape.pair_flops / peak + shape.index_flops / (gpu.tflops * 1e12 * FP8)
    return PrefillCost(
        fixed_s=LAUNCH_S + first_s,
        token_s=token_s,
        pair_s=pair_s / (ATTENTION * utilisation) * slower,
        prefix_s=shape.prefix_flops / (peak * dense * utilisation) * slower,
        decode_s=token_s,
        error=0.02,
    )


def load_cost(kv_bytes: float, medium: Medium, block_tokens: int) -> LoadCost:
    """Seconds of a load. Args: kv_bytes: of one token, as it is read."""
    return LoadCost(medium.latency_s, block_tokens * kv_bytes / medium.bytes_per_s)


def kv_capacity_tokens(shape: Shape, gpu: Gpu, gpus: int) -> int:
    """Tokens whose KV fits beside the weights; negative if the weights alone do not fit."""
    kv_bytes = gpu.memory_gib * 2**30 * MEMORY_SHARE - shape.parameters * shape.weight_bytes / gpus
    return math.floor(kv_bytes / shape.rank_kv_bytes(gpus))


def gpus_for(shape: Shape, gpu: Gpu) -> int:
    """The least power of two of GPUs that hold the weights."""
    one = gpu.memory_gib * 2**30 * MEMORY_SHARE
    return int(2 ** math.ceil(math.log2(shape.parameters * shape.weight_bytes / one)))


def find_gpu(text: str) -> Gpu:
    """A known GPU, or `TFLOPS:TB/s:GiB`, for example 312:2.0:80. Raises: ConfigError."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        tflops, memory_tb_per_s, memory_gib = map(float, text.split(":"))
        if 0 < tflops < 1e6 and 0 < memory_tb_per_s < 1e4 and 0 < memory_gib < 1e5:
            return Gpu(tflops, memory_tb_per_s, memory_gib)
    except ValueError:
        pass
    raise ConfigError(
        f"--gpu {text!r} is not one of {_names(GPUS)}; otherwise write its dense BF16 TFLOPS, "
        "memory TB/s and memory GiB, for example 312:2.0:80"
    )


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
