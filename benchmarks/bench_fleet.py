"""Hundreds of servers that share stores, simulated: how many servers a store can feed.

    python -m benchmarks.bench_fleet [--json FILE] [--picture FILE]

Each server has its own GPU and its own link; what all links together get is bounded by the store.
Prompts of 4k to 32k tokens arrive at every server, three in four of them stored. The same arrivals
are served with nothing loaded, with everything stored loaded, and by Cake. Deterministic, no GPU.
"""

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.command_line import parser_of
from benchmarks.paper.pictures import draw
from sglang_cake.cli.plots import COMPUTE, LOAD, MEET
from sglang_cake.cli.text_tables import table
from sglang_cake.simulator.hardware import GPUS, Medium, load_cost, prefill_cost
from sglang_cake.simulator.machine import Clock, Machine, SharedStore
from sglang_cake.simulator.shapes import find_shape
from sglang_cake.simulator.simulated_server import Prompt, SimulatedServer

ARMS = {"compute": "compute", "load": "load", "cake": "auto"}
LENGTHS = (4096, 8192, 16384, 32768)
CHUNK = 2048
BLOCK = 512  # larger than the default: fewer events
LINK = Medium(2.9e9, 0.001)  # 25 GbE
FULL = {"servers": (25, 50, 100, 200, 400), "requests": 12}
SMALL = {"servers": (2, 8), "requests": 4}
STORE_LINKS = 50.0  # a store (or several) that feeds 50 such links at full speed: 145 GB/s
RATE = 0.5  # requests per second and server


def run(servers: int, mode: str, *, requests: int, links: float, seed: int = 1) -> dict[str, Any]:
    """One fleet, one way: times to first token of all requests."""
    shape = find_shape("llama-3.1-8b")
    cost = prefill_cost(shape, GPUS["h100"], chunk_tokens=CHUNK)
    clock, shared_store, results = Clock(), SharedStore(links), []
    for number in range(servers):
        machine = Machine(
            cost, load_cost(shape.read_bytes(1), LINK, BLOCK), shared_store=shared_store
        )
        server = SimulatedServer(
            machine,
            clock,
            chunk_tokens=CHUNK,
            block_tokens=BLOCK,
            mode=mode,  # type: ignore[arg-type]
        )
        draw, now = random.Random(seed * 100_003 + number), 0.0
        for request in range(requests):
            now += draw.expovariate(RATE)
            tokens = draw.choice(LENGTHS)
            stored = None if draw.random() < 0.75 else 0
            results.append(server.submit(Prompt(tokens, now, stored, rid=f"{number}-{request}")))
    clock.run()
    ttft_s = sorted(result.ttft_s for result in results)
    loaded = sum(result.loaded_tokens for result in results)
    end_s = max(result.finish_s for result in results)
    return {
        "servers": servers,
        "requests": len(results),
        "ttft_mean_s": round(statistics.mean(ttft_s), 4),
        "ttft_p50_s": round(statistics.median(ttft_s), 4),
        "ttft_p99_s": round(ttft_s[int(0.99 * (len(ttft_s) - 1))], 4),
        "loaded_share": round(loaded / sum(result.prompt.prompt_tokens for result in results), 4),
        "store_gb_per_s": round(loaded * shape.read_bytes(1) / end_s / 1e9, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    parser = parser_of("bench_fleet", __doc__)
    parser.add_argument("--small", action="store_true", help="a few servers, a few requests")
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--picture", type=Path, help="for reports/img/fleet.svg")
    args = parser.parse_args(argv)
    size = SMALL if args.small else FULL
    links = 4.0 if args.small else STORE_LINKS
    cells = []
    for servers in size["servers"]:  # type: ignore[attr-defined]
        for arm, mode in ARMS.items():
            found = run(servers, mode, requests=int(size["requests"]), links=links)  # type: ignore[call-overload]
            cells.append({"arm": arm, **found})
    names = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "loaded_share", "store_gb_per_s")
    rows = [[str(c["servers"]), c["arm"], *(f"{c[name]:.3f}" for name in names)] for c in cells]
    heads = ["servers", "arm", "TTFT mean", "p50", "p99", "loaded share", "store GB/s"]
    print(table(heads, rows, right=(0, 2, 3, 4, 5, 6)))
    if args.json:
        settings = {"links_of_store": links, "link_bytes_per_s": LINK.bytes_per_s, "rate": RATE}
        facts.write(args.json, {**facts.header("fleet", **settings), "cells": cells})
    if args.picture:
        draw(lambda figure: _draw(figure, cells, links), args.picture, (10, 4.2))
    return 0


def _draw(figure: Any, cells: list[dict[str, Any]], links: float) -> None:
    planes = figure.subplots(1, 2)
    for arm, colour in (("compute", COMPUTE), ("load", LOAD), ("cake", MEET)):
        here = [cell for cell in cells if cell["arm"] == arm]
        servers = [cell["servers"] for cell in here]
        for axes, name in zip(planes, ("ttft_mean_s", "store_gb_per_s"), strict=True):
            axes.plot(servers, [cell[name] for cell in here], "o-", color=colour, label=arm)
    planes[0].set_ylabel("time to first token, mean (s)")
    planes[0].set_yscale("log")
    planes[1].set_ylabel("GB/s from the store")
    planes[1].axhline(links * LINK.bytes_per_s / 1e9, color="black", ls=":")
    for axes in planes:
        axes.set_xscale("log")
        axes.set_xlabel("servers")
    planes[0].legend(frameon=False)


if __name__ == "__main__":
    raise SystemExit(main())
