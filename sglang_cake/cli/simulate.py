"""`sglang-cake simulate`: time to first token on a machine that you describe.

The server's own decisions run on a virtual clock, against costs from data sheets; no GPU, no model.
One prompt at a time by default, by length: computed, loaded, both at once (Cake), and the optimum
of somebody who knew everything beforehand. With --requests, a queue of prompts as well.

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

from sglang_cake.cli.machine_args import ARMS, Asked, add_machine, read_lengths, read_machine, times
from sglang_cake.cli.store_tables import table
from sglang_cake.errors import ConfigError
from sglang_cake.sim.engine import Policy, serve
from sglang_cake.sim.records import Prompt, Race
from sglang_cake.sim.trace import Speed

PERIOD_S = 0.2  # with --fluctuate, speeds hold for so long
PERIODS = 500
LEAST_SPEED = 0.05
MOST_REQUESTS = 100_000


def add_parser(subparsers: Any) -> None:
    """Add `simulate` to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="time to first token on a machine that you describe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_machine(parser)
    parser.add_argument("--prompt-tokens", default="4k,16k,64k", metavar="N[,N...]")
    parser.add_argument(
        "--stored",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of each stored prompt that is in the store, from its start (default 1)",
    )
    parser.add_argument(
        "--fluctuate",
        type=int,
        metavar="SEED",
        help="device and link change their speed at random, down to 5 %%, every 0.2 s",
    )
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="to serve in a queue")
    parser.add_argument("--rate", type=float, default=1.0, metavar="PER_S", help="they arrive at")
    parser.add_argument(
        "--hit-share",
        type=float,
        default=0.75,
        metavar="SHARE",
        help="of the requests, those of which something is stored (default 0.75)",
    )
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="per request")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a .svg, .png or .pdf")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print; 0. Raises: ConfigError for arguments that cannot be."""
    asked, lengths = read_machine(args), read_lengths(args.prompt_tokens)
    _check(args)
    if args.fluctuate is not None:
        asked = _fluctuating(asked, args.fluctuate)
    prompts = [
        {"tokens": tokens, **{k: round(v, 5) for k, v in times(asked, tokens, args.stored).items()}}
        for tokens in lengths
    ]
    result: dict[str, Any] = {
        "costs_s": {
            "step": asked.machine.prefill.fixed_s,
            "token": asked.machine.prefill.token_s,
            "pair": asked.machine.prefill.pair_s,
            "block": [source.load.block_s for source in asked.machine.sources],
        },
        "kv_bytes_per_token": round(asked.kv_bytes),
        "prompts": prompts,
    }
    if args.requests:
        result["queue"] = _queue(asked, lengths, args)
    if args.picture:
        _draw(prompts, args.picture)
    print(json.dumps(result) if args.json else _text(result))
    return 0


def _check(args: argparse.Namespace) -> None:
    shares = (("--stored", args.stored), ("--hit-share", args.hit_share))
    for name, share in shares:
        if not 0 <= share <= 1:
            raise ConfigError(f"{name} {share:g}: must be from 0 to 1")
    if not 0 <= args.requests <= MOST_REQUESTS:
        raise ConfigError(f"--requests {args.requests}: must be from 0 to {MOST_REQUESTS:,}")
    if not (math.isfinite(args.rate) and args.rate > 0) or args.new_tokens < 1:
        raise ConfigError("--rate must be above 0, and --new-tokens at least 1")
    if args.picture and args.picture.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--picture {args.picture}: must end in .svg, .png or .pdf")


def _fluctuating(asked: Asked, seed: int) -> Asked:
    draw = random.Random(seed)
    at = tuple(i * PERIOD_S for i in range(PERIODS))
    speeds = [Speed(at, tuple(draw.uniform(LEAST_SPEED, 1) for _ in at)) for _ in range(2)]
    return replace(asked, machine=replace(asked.machine, device=speeds[0], link=speeds[1]))


def _queue(asked: Asked, lengths: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same arrivals, served in every way."""
    draw, now, prompts = random.Random(args.seed), 0.0, []
    for number in range(args.requests):
        now += draw.expovariate(args.rate)
        tokens = draw.choice(lengths)
        hit = draw.random() < args.hit_share
        stored = int(tokens * args.stored) // asked.block_tokens if hit else 0
        prompts.append(Prompt(tokens, now, stored, args.new_tokens, str(number)))
    rows = []
    for name, mode in ARMS.items():
        policies: tuple[Policy, ...] = ("fcfs", "adaptive") if name == "cake" else ("fcfs",)
        for policy in policies:
            server = serve(
                asked.machine,
                prompts,
                chunk_tokens=asked.chunk_tokens,
                block_tokens=asked.block_tokens,
                mode=mode,
                policy=policy,
            )
            rows.append({"arm": name, "policy": policy, **_numbers(server.races)})
    return rows


def _numbers(races: list[Race]) -> dict[str, float]:
    ttft_s = sorted(race.ttft_s for race in races)
    end_s = max(race.finish_s for race in races)
    tokens = sum(race.prompt.prompt_tokens + race.prompt.new_tokens for race in races)
    return {
        "ttft_mean_s": round(statistics.mean(ttft_s), 4),
        "ttft_p50_s": round(statistics.median(ttft_s), 4),
        "ttft_p99_s": round(ttft_s[min(len(ttft_s) - 1, int(0.99 * len(ttft_s)))], 4),
        "tokens_per_s": round(tokens / end_s, 1),
        "finish_s": round(end_s, 3),
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
        rows = [[r["arm"], r["policy"], *(f"{r[n]:,.3f}" for n in names)] for r in result["queue"]]
        heads = ["queue", "policy", "mean", "p50", "p99", "tokens/s"]
        text += "\n\nseconds to the first token of all requests\n\n"
        text += table(heads, rows, right=range(2, 6))
    return text


def _draw(prompts: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from sglang_cake.cli.picture import COMPUTE, LOAD, MEET

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    styles = {
        "compute": {"color": COMPUTE, "marker": "o"},
        "load": {"color": LOAD, "marker": "o"},
        "cake": {"color": MEET, "marker": "o", "label": "Cake"},
        "optimum": {"color": "black", "ls": ":"},
    }
    rows = sorted(prompts, key=lambda row: row["tokens"])
    for name, style in styles.items():
        axes.plot(
            [row["tokens"] for row in rows], [row[name] for row in rows], **{"label": name} | style
        )
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token (s)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--picture {path}: {error.strerror}") from None
    finally:
        plt.close(figure)
