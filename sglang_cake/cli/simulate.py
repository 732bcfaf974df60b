"""`sglang-cake simulate`: time to first token on a machine that you describe.

The scheduling code of the server runs on a virtual clock, with costs from data sheets. It needs no
GPU and no model weights. By default it serves one prompt at a time, by length: computed, loaded,
both at once (Cake), and the optimum with all speeds known beforehand. --requests also serves a
queue of prompts.

    sglang-cake simulate --model llama-3.1-8b --gpu h100 --store 25gbe --prompt-tokens 4k,16k,64k
    sglang-cake simulate --model ./my-model --gpu 312:2.0:80 --store 32Gbps --requests 200 --rate 2
"""

import argparse
import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_cake.cli.machine_args import (
    ARMS,
    ServerSpec,
    add_machine_args,
    parse_lengths,
    parse_server,
    predict_ttft,
)
from sglang_cake.cli.plots import plot_ttft
from sglang_cake.cli.text_tables import table
from sglang_cake.core.errors import ConfigError
from sglang_cake.simulator.machine import Speed
from sglang_cake.simulator.simulated_server import Policy, Prompt, PromptResult, serve

SPEED_PERIOD_S = 0.2  # with --fluctuate, a speed holds for so long
SPEED_PERIODS = 500  # then the speeds repeat
MIN_SPEED = 0.05  # share of full speed
MAX_REQUESTS = 100_000


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="time to first token on a machine that you describe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_machine_args(parser)
    parser.add_argument("--prompt-tokens", default="4k,16k,64k", metavar="N[,N...]")
    parser.add_argument(
        "--stored",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of each stored prompt that the store has, from its start (default 1)",
    )
    parser.add_argument(
        "--early-last-step",
        action="store_true",
        help="begin the last step while the last block is being loaded; no server on a GPU does",
    )
    parser.add_argument(
        "--fluctuate",
        type=int,
        metavar="SEED",
        help="draw a random speed of the device and of each link every 0.2 s, from 5 %% to full "
        "speed; the speeds repeat after 100 s",
    )
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="requests of the queue (default 0)"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="PER_S", help="arrivals per second (default 1)"
    )
    parser.add_argument(
        "--hit-share",
        type=float,
        default=0.75,
        metavar="SHARE",
        help="share of the requests whose prompt is stored (default 0.75)",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="output per request (default 64)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a .svg, .png or .pdf")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, print the result and return 0.

    Raises:
        ConfigError: an argument is invalid, or the plot cannot be written.
    """
    server = parse_server(args, early_last_step=args.early_last_step)
    if server.shape.unmodelled is not None:
        raise ConfigError(f"--model {args.model}: {server.shape.unmodelled}")
    if (unshared := server.shape.unshared(args.gpus)) is not None:
        raise ConfigError(f"--gpus {args.gpus}: {unshared}")
    lengths = parse_lengths(args.prompt_tokens, "--prompt-tokens")
    _check(args)
    if args.fluctuate is not None:
        server = _with_fluctuating_speed(server, args.fluctuate)
    prompts = []
    for prompt_tokens in lengths:
        predicted = predict_ttft(server, prompt_tokens, args.stored)
        rounded = {name: round(value, 5) for name, value in predicted.items()}
        prompts.append({"tokens": prompt_tokens, **rounded})
    result: dict[str, Any] = {
        "costs_s": {
            "step": server.machine.prefill.fixed_s,
            "token": server.machine.prefill.token_s,
            "pair": server.machine.prefill.pair_s,
            "prefix": server.machine.prefill.prefix_s,
            "block": [link.load.block_s for link in server.machine.store_links],
        },
        "read_bytes_per_token": round(server.read_bytes_per_token),
        "prompts": prompts,
    }
    if args.requests:
        result["queue"] = _serve_queue(server, lengths, args)
    if args.picture:
        plot_ttft(prompts, args.picture)
    print(json.dumps(result) if args.json else _text(result))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises: ConfigError."""
    shares = (("--stored", args.stored), ("--hit-share", args.hit_share))
    for name, share in shares:
        if not 0 <= share <= 1:
            raise ConfigError(f"{name} {share:g}: must be from 0 to 1")
    if not 0 <= args.requests <= MAX_REQUESTS:
        raise ConfigError(f"--requests {args.requests}: must be from 0 to {MAX_REQUESTS:,}")
    if not (math.isfinite(args.rate) and args.rate > 0) or args.new_tokens < 1:
        raise ConfigError("--rate must be above 0, and --new-tokens at least 1")
    if args.picture and args.picture.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--picture {args.picture}: must end in .svg, .png or .pdf")


def _with_fluctuating_speed(server: ServerSpec, seed: int) -> ServerSpec:
    rng = random.Random(seed)
    times_s = tuple(period * SPEED_PERIOD_S for period in range(SPEED_PERIODS))

    def speed() -> Speed:
        values = tuple(rng.uniform(MIN_SPEED, 1) for _ in times_s)
        return Speed(times_s, values, SPEED_PERIODS * SPEED_PERIOD_S)

    device, link = speed(), speed()
    further = tuple(replace(store_link, speed=speed()) for store_link in server.machine.further)
    machine = replace(server.machine, device=device, link=link, further=further)
    return replace(server, machine=machine)


def _serve_queue(
    server: ServerSpec, lengths: list[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Serve the same arrivals with each arm; one row per arm and queue policy."""
    prompts = _draw_prompts(server, lengths, args)
    rows = []
    for arm, mode in ARMS.items():
        policies: tuple[Policy, ...] = ("fcfs", "adaptive") if arm == "cake" else ("fcfs",)
        for policy in policies:
            served = serve(
                server.machine,
                prompts,
                chunk_tokens=server.chunk_tokens,
                block_tokens=server.block_tokens,
                mode=mode,
                policy=policy,
            )
            rows.append({"arm": arm, "policy": policy, **_summary(served.results)})
    return rows


def _draw_prompts(server: ServerSpec, lengths: list[int], args: argparse.Namespace) -> list[Prompt]:
    """Poisson arrivals with lengths drawn uniformly from `lengths`."""
    rng = random.Random(args.seed)
    arrive_s = 0.0
    prompts = []
    for number in range(args.requests):
        arrive_s += rng.expovariate(args.rate)
        prompt_tokens = rng.choice(lengths)
        stored = rng.random() < args.hit_share
        stored_blocks = int(prompt_tokens * args.stored) // server.block_tokens if stored else 0
        prompts.append(Prompt(prompt_tokens, arrive_s, stored_blocks, args.new_tokens, str(number)))
    return prompts


def _summary(results: list[PromptResult]) -> dict[str, float]:
    ttft_s = sorted(result.ttft_s for result in results)
    finish_s = max(result.finish_s for result in results)
    tokens = sum(result.prompt.prompt_tokens + result.prompt.new_tokens for result in results)
    return {
        "ttft_mean_s": round(statistics.mean(ttft_s), 4),
        "ttft_p50_s": round(statistics.median(ttft_s), 4),
        "ttft_p99_s": round(ttft_s[min(len(ttft_s) - 1, int(0.99 * len(ttft_s)))], 4),
        "tokens_per_s": round(tokens / finish_s, 1),
        "finish_s": round(finish_s, 3),
    }


def _text(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['tokens']:,}",
            *(f"{row[name]:.3f}" for name in ("compute", "load", "cake", "optimum")),
            f"{row['cake'] / row['optimum']:.3f}",
            f"{min(row['compute'], row['load']) / row['cake']:.2f}x",
        ]
        for row in result["prompts"]
    ]
    heads = ["tokens", "compute", "load", "Cake", "optimum", "Cake/optimum", "gain"]
    text = "seconds to the first token of one prompt; gain = over the better single way\n\n"
    text += table(heads, rows, right=range(7))
    if "queue" in result:
        names = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tokens_per_s")
        rows = [
            [row["arm"], row["policy"], *(f"{row[name]:,.3f}" for name in names)]
            for row in result["queue"]
        ]
        heads = ["queue", "policy", "mean", "p50", "p99", "tokens/s"]
        text += "\n\nseconds to the first token of all requests\n\n"
        text += table(heads, rows, right=range(2, 6))
    return text
