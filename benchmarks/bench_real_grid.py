"""The papers' grid for real: lengths, bandwidths, token budgets; auto beside T* and single ways.

    python -m benchmarks.bench_real_grid [--small] [--mha] [--out FILE]

Tables 3 to 5 of Cake on this machine, with a small model. A budget is the tokens of a step
(`--chunked-prefill-size`), the paper's share of the device. On a CPU a step's time grows with its
tokens, so half the budget slows computing only by the fixed part of twice as many steps. Bandwidths
are ratios to the balanced one, at which loading the longest prompt takes as long as computing it in
the largest steps. Every run starts cold, as in `bench_ttft`; arms take turns, and servers that are
not measured are stopped.

Noise: `compute` runs twice in every round, on the same server. The ratio of the medians of those
two arms, over all cells, says what identical arms differ by: `noise` is its 95th percentile, and a
claim about auto is only as sharp as that. Each server's first run of a cell is not counted: costs
are learned in it.
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts, servers, stats
from benchmarks.bench_ttft import NEW_TOKENS, Bench
from benchmarks.command_line import fill, parser_of
from benchmarks.servers import BLOCK_TOKENS, SMALL_MODEL, FrozenServer
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.cli.demo_report import Arm, Arms, evaluate
from sglang_cake.cli.text_tables import table
from sglang_cake.demo.sglang_server import Reply, cake_metric

FULL = {"lengths": [2048, 4096, 6144, 8192], "chunks": [128, 256], "repeats": 3, "name": "cpu"}
SMALL = {"lengths": [1024], "chunks": [256], "repeats": 1, "name": "small"}
METRICS = ("--enable-metrics",)  # on all arms alike
METRICS_S = 1.2  # how old what a server says may be
MEDIAN_GOAL, WORST_GOAL, SINGLE_GOAL = 1.08, 1.15, 1.05
ORDERS = (
    ("compute", "load", "auto", "again"),
    ("auto", "again", "compute", "load"),
    ("again", "load", "auto", "compute"),
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_real_grid", __doc__)
    parser.add_argument("--small", action="store_true", help="one length, one budget, one repeat")
    parser.add_argument("--lengths", type=stats.whole_numbers, help="default 2048,4096,6144,8192")
    parser.add_argument("--chunks", type=stats.whole_numbers, help="budgets, default 128,256")
    parser.add_argument("--bandwidths", type=stats.numbers, default=[0.5, 1.0, 2.0], help="ratios")
    parser.add_argument("--repeats", type=int, metavar="N", help="counted runs (default 3)")
    parser.add_argument("--mha", action="store_true", help="a KV head for every head, not two")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    suffix = "-mha" if args.mha else ""
    args.out = args.out or facts.RESULTS / f"real-grid-{args.name}{suffix}.json"
    if args.repeats < 1 or any(length % BLOCK_TOKENS for length in args.lengths):
        parser.error(f"needs a repeat, and lengths that are multiples of {BLOCK_TOKENS}")
    return args


def measure(
    bench: Bench, arms: dict[str, FrozenServer], length: int, chunk: int, ratio: float
) -> dict[str, Any]:
    """One cell."""
    prompt = bench.prompt[: length + 1]
    for server in arms.values():
        server.cold(prompt, NEW_TOKENS)
    runs: dict[str, list[Reply]] = {name: [] for name in ORDERS[0]}
    read_before = traffic(arms["auto"])
    for repeat in range(bench.args.repeats):
        for name in ORDERS[repeat % len(ORDERS)]:
            server = arms["compute" if name == "again" else name]
            runs[name].append(server.cold(prompt, NEW_TOKENS))
    read_bytes, wasted_bytes = (
        now - then for now, then in zip(traffic(arms["auto"]), read_before, strict=True)
    )
    trace = {mode: bench.work / f"trace-{mode}.jsonl" for mode in arms}
    found = evaluate(
        Arms(
            compute=Arm("compute", trace["compute"], runs["compute"]),
            load=Arm("load", trace["load"], runs["load"]),
            both=Arm("both", trace["auto"], runs["auto"]),
        ),
        bandwidth=ratio * bench.balanced,
        prompt_bytes=len(prompt) * bench.token_bytes,
    )
    return cell(
        {name: [reply.ttft_s for reply in replies] for name, replies in runs.items()},
        ideal_s=found["ideal_s"],
        labels={
            "prompt_tokens": length + 1,
            "chunk_tokens": chunk,
            "bandwidth_ratio": ratio,
            "link_limit_s": round(found["link_limit_s"], 4),
            "same_tokens": found["same_tokens"],
            "read_bytes": read_bytes,
            "wasted_bytes": wasted_bytes,
        },
    )


def traffic(server: FrozenServer) -> tuple[int, int]:
    """Bytes read from the store so far, and those of them that were of no use."""
    with server.thawed() as url:
        time.sleep(METRICS_S)
        read, wasted = (cake_metric(url, f"{what}_bytes_total") for what in ("read", "wasted"))
    return round(read), round(wasted)


def cell(
    runs_s: dict[str, list[float]], *, ideal_s: float, labels: dict[str, Any]
) -> dict[str, Any]:
    """Medians and ratios of one cell; `again` is compute once more."""
    ttft_s = {name: statistics.median(times) for name, times in runs_s.items()}
    return {
        **labels,
        "ttft_s": {name: round(value, 4) for name, value in ttft_s.items()},
        "runs_s": {name: [round(t, 4) for t in times] for name, times in runs_s.items()},
        "ideal_s": round(ideal_s, 4),
        "over_ideal": round(ttft_s["auto"] / ideal_s, 4),
        "over_single": round(ttft_s["auto"] / min(ttft_s["compute"], ttft_s["load"]), 4),
        "identical": round(ttft_s["again"] / ttft_s["compute"], 4),
    }


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether the goals are met, and how much identical arms differ."""
    over = [cell["over_ideal"] for cell in cells]
    noise = sorted(max(cell["identical"], 1 / cell["identical"]) - 1 for cell in cells)
    read_bytes = sum(cell["read_bytes"] for cell in cells)
    return {
        "cells": len(cells),
        "over_ideal": stats.spread(over),
        "over_single": stats.spread([cell["over_single"] for cell in cells]),
        "wasted_share": round(sum(c["wasted_bytes"] for c in cells) / max(1, read_bytes), 5),
        "noise": round(noise[min(len(noise) - 1, int(0.95 * len(noise)))], 4),
        "goals": {
            f"median T/T* <= {MEDIAN_GOAL}": statistics.median(over) <= MEDIAN_GOAL,
            f"none above {WORST_GOAL}": max(over) <= WORST_GOAL,
            f"auto <= {SINGLE_GOAL} x the better arm": (
                max(cell["over_single"] for cell in cells) <= SINGLE_GOAL
            ),
        },
    }


def text(cells: Sequence[dict[str, Any]]) -> str:
    """One row a cell, and the summary."""
    names = ("compute", "load", "auto")
    rows = [
        [
            f"{c['prompt_tokens']:,}",
            str(c["chunk_tokens"]),
            f"{c['bandwidth_ratio']:g}",
            *(f"{c['ttft_s'][name]:.3f}" for name in names),
            *(f"{c[name]:.3f}" for name in ("ideal_s", "link_limit_s", "over_ideal")),
            *(f"{c[name]:.3f}" for name in ("over_single", "identical")),
        ]
        for c in cells
    ]
    heads = ["tokens", "budget", "ratio", *names, "T*", "link", "T/T*", "of better", "identical"]
    found = summary(cells)
    lines = [table(heads, rows, right=range(len(heads))), ""]
    lines += [f"{goal}: {'met' if met else 'MISSED'}" for goal, met in found["goals"].items()]
    lines.append(f"of the bytes that auto read, {found['wasted_share']:.2%} were of no use")
    lines.append(f"identical arms differ by up to {found['noise']:.1%} (95th percentile)")
    return "\n".join(lines)


def run(bench: Bench, result: dict[str, Any]) -> None:
    """All cells; the result file is written after each bandwidth."""
    for number, chunk in enumerate(sorted(bench.args.chunks, reverse=True)):
        with contextlib.ExitStack() as stack:
            compute = bench.start(stack, "compute", chunk, math.inf, METRICS)
            if not number:
                bench.fill(compute, [])
            for ratio in bench.args.bandwidths:
                with contextlib.ExitStack() as inner:
                    arms = {"compute": compute}
                    for mode in ("load", "auto"):
                        bandwidth = ratio * bench.balanced
                        arms[mode] = bench.start(inner, mode, chunk, bandwidth, METRICS)
                    for length in bench.args.lengths:
                        found = measure(bench, arms, length, chunk, ratio)
                        bench.cells.append(found)
                        bench.progress.say(
                            f"{length:,} tokens, budget {chunk}, {ratio:g}x: "
                            f"T/T* {found['over_ideal']:.3f}, "
                            f"of the better arm {found['over_single']:.3f}"
                        )
                result |= {"cells": bench.cells, "summary": summary(bench.cells)}
                facts.write(bench.args.out, result)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if all arms gave the same tokens in every cell."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    size = {**SMALL_MODEL, "kv_heads": SMALL_MODEL["heads"]} if args.mha else SMALL_MODEL
    result = facts.header(
        "real-grid",
        model=f"hidden {size['hidden']}, {size['layers']} layers, {size['kv_heads']} KV heads of "
        f"{size['heads']}",
        dtype=servers.DTYPE,
        block_tokens=BLOCK_TOKENS,
        repeats=args.repeats,
    )
    prompt = servers.random_prompt(max(args.lengths) + 1, seed=7)
    with servers.fresh_folder("real-grid") as work:
        bench = Bench(args, work, servers.model(True, size=size), prompt, ProgressLog())
        run(bench, result)
    facts.finish(args.out, result)
    print("", text(bench.cells), "", sep="\n")
    return 0 if all(found["same_tokens"] for found in bench.cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
