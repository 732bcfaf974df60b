"""The arguments that `simulate` and `plan` share: a model, GPUs, a store."""

import argparse
from dataclasses import dataclass
from typing import Any

from sglang_cake.errors import ConfigError
from sglang_cake.read.plan import Mode
from sglang_cake.sim.clairvoyant import clairvoyant
from sglang_cake.sim.hardware import (
    GPUS,
    MEDIA,
    Gpu,
    find_gpu,
    find_medium,
    load_cost,
    prefill_cost,
)
from sglang_cake.sim.machine import Machine, Source
from sglang_cake.sim.race import run_race
from sglang_cake.sim.shapes import MODELS, Shape, find_shape

ARMS: dict[str, Mode] = {"compute": "compute", "load": "load", "cake": "auto"}


def add_machine(parser: Any) -> None:
    """Add them."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|PATH",
        help=f"folder or config.json of a model, or one of {', '.join(sorted(MODELS))}",
    )
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="NAME|TFLOPS:TB/s:GiB",
        help=f"one of {', '.join(sorted(GPUS))}, or dense BF16 TFLOPS, memory TB/s and GiB",
    )
    parser.add_argument(
        "--store",
        required=True,
        action="append",
        metavar="MEDIUM|BANDWIDTH[,LATENCY]",
        help=f"one of {', '.join(sorted(MEDIA))}, or for example 2GB/s or 32Gbps,5ms; given twice: "
        "two sources that are read at once",
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="in tensor parallel")
    parser.add_argument(
        "--efficiency",
        type=float,
        metavar="SHARE",
        help="of the peak FLOPS that the matmuls of prefill reach, if you measured it (default: by "
        "GPU, see docs/simulator.md)",
    )
    parser.add_argument("--chunk-tokens", type=int, default=2048, metavar="N", help="of a step")
    parser.add_argument("--block-tokens", type=int, default=128, metavar="N", help="of the store")
    parser.add_argument(
        "--utilisation",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of every step's tokens that a prompt may have; others take the rest (default 1)",
    )
    parser.add_argument(
        "--smaller",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="how many times smaller than BF16 the KV is stored (a codec; default 1)",
    )
    parser.add_argument(
        "--early-last-step",
        action="store_true",
        help="the last step begins while the last block comes, as on a server with FlashInfer and "
        "without prefill CUDA graphs",
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What the arguments describe.

    Attributes:
        kv_bytes: of one token, as it is stored and read, all ranks together.
    """

    shape: Shape
    gpu: Gpu
    gpus: int
    kv_bytes: float
    machine: Machine
    chunk_tokens: int
    block_tokens: int


def read_machine(args: argparse.Namespace, slower: float = 1.0) -> Asked:
    """Check and convert.

    Args:
        slower: how many times longer computing takes than predicted.

    Raises: ConfigError, one line.
    """
    _within("--gpus", args.gpus, 1, 1024)
    if args.efficiency is not None:
        _within("--efficiency", args.efficiency, 0.01, 1)
    _within("--chunk-tokens", args.chunk_tokens, 16, 1_000_000)
    _within("--block-tokens", args.block_tokens, 1, 65536)
    _within("--utilisation", args.utilisation, 0.01, 1)
    _within("--smaller", args.smaller, 0.1, 100)
    if args.early_last_step and (args.gpus > 1 or args.smaller != 1):
        raise ConfigError("--early-last-step: needs --gpus 1 and no --smaller, as a server does")
    shape, gpu = find_shape(args.model), find_gpu(args.gpu)
    cost = prefill_cost(
        shape,
        gpu,
        gpus=args.gpus,
        chunk_tokens=args.chunk_tokens,
        utilisation=args.utilisation,
        efficiency=args.efficiency,
        slower=slower,
    )
    kv_bytes = shape.kv_bytes(args.gpus) / args.smaller
    loads = [load_cost(kv_bytes, find_medium(store), args.block_tokens) for store in args.store]
    taken = args.chunk_tokens - max(1, round(args.utilisation * args.chunk_tokens))
    machine = Machine(
        cost,
        loads[0],
        others=(lambda step: taken) if taken else None,
        further=tuple(Source(load) for load in loads[1:]),
        layers=shape.layers if args.early_last_step else 1,
    )
    return Asked(shape, gpu, args.gpus, kv_bytes, machine, args.chunk_tokens, args.block_tokens)


def read_lengths(text: str) -> list[int]:
    """`4096,16k` as tokens. Raises: ConfigError."""
    found = []
    for part in text.split(","):
        digits = part.strip().lower()
        thousands = digits.endswith("k")
        digits = digits.removesuffix("k")
        if not (digits.isascii() and digits.isdigit() and 0 < int(digits) <= 10_000_000):
            raise ConfigError(f"--prompt-tokens {text!r}: write for example 4096,16k")
        found.append(int(digits) * (1024 if thousands else 1))
    return found


def times(asked: Asked, tokens: int, stored_share: float = 1.0) -> dict[str, float]:
    """Seconds to the first token of one prompt, by way, with the optimum."""
    stored = int(tokens * stored_share) // asked.block_tokens
    found = {}
    for name, mode in ARMS.items():
        race = run_race(
            asked.machine,
            tokens,
            chunk_tokens=asked.chunk_tokens,
            block_tokens=asked.block_tokens,
            mode=mode,
            stored_blocks=stored,
        )
        found[name] = race.ttft_s
        if name == "cake":
            found["computed_share"] = race.computed_tokens / tokens
    ideal = clairvoyant(
        asked.machine,
        tokens,
        chunk_tokens=asked.chunk_tokens,
        block_tokens=asked.block_tokens,
        stored_blocks=stored,
    )
    return {**found, "optimum": ideal.ttft_s}


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} {value:g}: must be from {low:g} to {high:g}")
