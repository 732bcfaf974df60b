"""Arguments that `simulate` and `plan` share: a model, GPUs and a store."""

import argparse
from dataclasses import dataclass
from typing import Any

from sglang_cake.core.errors import ConfigError
from sglang_cake.loading.planner import Mode
from sglang_cake.simulator.hardware import (
    GPUS,
    MEDIA,
    PLAN_S,
    Gpu,
    find_gpu,
    find_medium,
    load_cost,
    prefill_cost,
)
from sglang_cake.simulator.machine import Machine, StoreLink
from sglang_cake.simulator.shapes import MODELS, Shape, find_shape
from sglang_cake.simulator.simulated_server import simulate_prompt
from sglang_cake.simulator.ttft_lower_bound import ttft_lower_bound

ARMS: dict[str, Mode] = {"compute": "compute", "load": "load", "cake": "auto"}


def add_machine_args(parser: Any) -> None:
    """Add the arguments that `parse_server` reads."""
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
        help=f"one of {', '.join(sorted(MEDIA))}, or for example 2GB/s or 32Gbps,5ms; may be given "
        "several times: the server reads from all of them at once",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="size of the tensor-parallel group"
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        metavar="SHARE",
        help="measured share of the peak FLOPS that the matmuls of prefill reach (default: by GPU, "
        "see docs/simulator.md)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="tokens of a prefill step (default 2048)",
    )
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens of a stored block (default 128)",
    )
    parser.add_argument(
        "--utilisation",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of every step's tokens that a prompt can have; other requests take the rest "
        "(default 1)",
    )
    parser.add_argument(
        "--smaller",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="compression ratio of the stored KV over BF16, recurrent states apart (default 1)",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="plan each step while the one before runs, as SGLang's overlap scheduler does on a "
        "GPU (default: when the one before is over)",
    )


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Server that the arguments describe.

    Attributes:
        gpus: size of the tensor-parallel group.
        stored_bytes_per_token, read_bytes_per_token: KV over all ranks.
        machine: costs of prefill and of loading.
    """

    shape: Shape
    gpu: Gpu
    gpus: int
    stored_bytes_per_token: float
    read_bytes_per_token: float
    machine: Machine
    chunk_tokens: int
    block_tokens: int


def parse_server(
    args: argparse.Namespace, slower: float = 1.0, *, early_last_step: bool = False
) -> ServerSpec:
    """The server that the arguments of `add_machine_args` describe.

    Args:
        slower: factor on the predicted compute time.
        early_last_step: it begins the last step while the last block is being loaded.

    Raises:
        ConfigError: an argument is invalid.
    """
    _check_range("--gpus", args.gpus, 1, 1024)
    if args.efficiency is not None:
        _check_range("--efficiency", args.efficiency, 0.01, 1)
    _check_range("--chunk-tokens", args.chunk_tokens, 16, 1_000_000)
    _check_range("--block-tokens", args.block_tokens, 1, 65536)
    _check_range("--utilisation", args.utilisation, 0.01, 1)
    _check_range("--smaller", args.smaller, 0.1, 100)
    if early_last_step and (args.gpus > 1 or args.smaller != 1):
        raise ConfigError("--early-last-step: needs --gpus 1 and no --smaller, as a server does")
    if early_last_step and args.overlap:
        raise ConfigError("--early-last-step: not with --overlap, which plans too early for it")
    shape = find_shape(args.model)
    gpu = find_gpu(args.gpu)
    cost = prefill_cost(
        shape,
        gpu,
        gpus=args.gpus,
        chunk_tokens=args.chunk_tokens,
        utilisation=args.utilisation,
        efficiency=args.efficiency,
        slower=slower,
    )
    read_bytes = shape.read_bytes(args.gpus) / args.smaller
    loads = [load_cost(read_bytes, find_medium(store), args.block_tokens) for store in args.store]
    other_tokens = args.chunk_tokens - max(1, round(args.utilisation * args.chunk_tokens))
    machine = Machine(
        cost,
        loads[0],
        others=(lambda step: other_tokens) if other_tokens else None,
        further=tuple(StoreLink(load) for load in loads[1:]),
        layers=shape.layers if early_last_step else 1,
        plan_s=PLAN_S if args.overlap else None,
        end_blocks=shape.end_blocks(args.gpus, args.block_tokens, smaller=args.smaller),
    )
    return ServerSpec(
        shape=shape,
        gpu=gpu,
        gpus=args.gpus,
        stored_bytes_per_token=shape.stored_bytes(args.gpus) / args.smaller,
        read_bytes_per_token=read_bytes,
        machine=machine,
        chunk_tokens=args.chunk_tokens,
        block_tokens=args.block_tokens,
    )


def parse_lengths(text: str, flag: str) -> list[int]:
    """Prompt lengths in tokens from text such as `4096,16k`, where k is 1024.

    Args:
        flag: names the text in an error.

    Raises:
        ConfigError: the text has another form, or a length is not from 1 to 10,000,000.
    """
    lengths = []
    for part in text.split(","):
        digits = part.strip().lower()
        unit = 1024 if digits.endswith("k") else 1
        digits = digits.removesuffix("k")
        is_number = digits.isascii() and digits.isdigit()
        # Python converts no more than 4,300 digits.
        if not is_number or len(digits) > 8 or not 0 < int(digits) * unit <= 10_000_000:
            raise ConfigError(f"{flag} {text!r}: write for example 4096,16k")
        lengths.append(int(digits) * unit)
    return lengths


def predict_ttft(
    server: ServerSpec, prompt_tokens: int, stored_share: float = 1.0
) -> dict[str, float]:
    """Seconds to the first token of one prompt, by arm and under `optimum`.

    Beside them, `computed_share` is the share of the prompt that the arm `cake` computes.

    Args:
        stored_share: share of the prompt that is stored, from its start.
    """
    stored_blocks = int(prompt_tokens * stored_share) // server.block_tokens
    predicted = {}
    for name, mode in ARMS.items():
        result = simulate_prompt(
            server.machine,
            prompt_tokens,
            chunk_tokens=server.chunk_tokens,
            block_tokens=server.block_tokens,
            mode=mode,
            stored_blocks=stored_blocks,
        )
        predicted[name] = result.ttft_s
        if name == "cake":
            predicted["computed_share"] = result.computed_tokens / prompt_tokens
    optimum = ttft_lower_bound(
        server.machine,
        prompt_tokens,
        chunk_tokens=server.chunk_tokens,
        block_tokens=server.block_tokens,
        stored_blocks=stored_blocks,
    )
    predicted["optimum"] = optimum.ttft_s
    return predicted


def _check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises: ConfigError."""
    if not low <= value <= high:
        raise ConfigError(f"{name} {value:g}: must be from {low:g} to {high:g}")
