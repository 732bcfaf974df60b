"""Models with end states, or an index beside KV, simulated: the gain of computing and loading.

    python -m benchmarks.bench_end_states [--json FILE] [--docs]

gpt-oss-120b, Kimi-Linear-48B, Qwen3.5-397B and DeepSeek V3.2 on the links of the Cake paper. Only
layers with KV of all tokens are raced for; the end state (windows, recurrent states) is loaded once
and first. Costs are from data sheets (docs/simulator.md). Deterministic, no GPU.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import documents, facts
from benchmarks.command_line import parser_of
from sglang_cake.cli.machine_args import ServerSpec, predict_ttft
from sglang_cake.cli.text_tables import size_text, table
from sglang_cake.simulator.hardware import GPUS, PLAN_S, Medium, load_cost, prefill_cost
from sglang_cake.simulator.machine import Machine
from sglang_cake.simulator.shapes import find_shape

BLOCK = 128
CHUNK = 8192  # SGLang's default on these GPUs
LATENCY_S = 0.001
LINKS_GBPS = (7, 32, 100)
LENGTHS = (16384, 65536)
DOC = facts.REPORTS / "simulator.md"


class Server(NamedTuple):
    """`copies`: how often the link carries what the ranks hold alike; None: once for each rank."""

    model: str
    gpu: str
    gpus: int
    copies: int | None = None

    @property
    def label(self) -> str:
        copies = "" if self.copies is None else ", KV read once"
        return f"{self.model}, {self.gpus} {self.gpu.upper()}{copies}"


SERVERS = (
    Server("gpt-oss-120b", "h100", 1),
    Server("kimi-linear-48b", "h200", 1),
    Server("qwen3.5-397b", "h100", 8),
    Server("qwen3.5-397b", "h100", 8, copies=1),
    Server("deepseek-v3.2", "h200", 8),
    Server("deepseek-v3.2", "h200", 8, copies=1),
)


def cell(server: Server, gbps: float, tokens: int) -> dict[str, Any]:
    """One wholly stored prompt on an idle server: seconds to its first token, by arm."""
    shape = find_shape(server.model)
    gpu = GPUS[server.gpu]
    copied = server.gpus if server.copies is None else min(server.gpus, shape.kv_heads)
    kv_bytes = shape.read_bytes(copied)
    end_blocks = shape.end_blocks(copied, BLOCK)
    machine = Machine(
        prefill_cost(shape, gpu, gpus=server.gpus, chunk_tokens=CHUNK),
        load_cost(kv_bytes, Medium(gbps * 1e9 / 8, LATENCY_S), BLOCK),
        plan_s=PLAN_S,
        end_blocks=end_blocks,
    )
    spec = ServerSpec(shape, gpu, server.gpus, kv_bytes, kv_bytes, machine, CHUNK, BLOCK)
    found = predict_ttft(spec, tokens)
    best_s = min(found["compute"], found["load"])
    no_end = dataclasses.replace(machine, end_blocks=0)
    free_s = predict_ttft(dataclasses.replace(spec, machine=no_end), tokens)["cake"]
    return {
        "server": server.label,
        "gbps": gbps,
        "tokens": tokens,
        "kv_bytes_per_token": kv_bytes,
        "end_bytes": end_blocks * BLOCK * kv_bytes,
        **{f"{arm}_s": round(found[arm], 4) for arm in ("compute", "load", "cake", "optimum")},
        "computed_share": round(found["computed_share"], 3),
        "gain": round(best_s / found["cake"], 3),
        "without_end_s": round(free_s, 4),
    }


def documented(result: dict[str, Any]) -> dict[str, str]:
    """The table of the report, by its name."""
    heads = ["model and GPUs", "KV of a token", "end state", "link, Gbps", "tokens", "compute"]
    heads += ["load", "**both**", "optimum", "gain", "computed"]
    lines = [
        [
            row["server"],
            f"{row['kv_bytes_per_token'] / 1e3:.1f} kB",
            size_text(row["end_bytes"]) if row["end_bytes"] else "-",
            f"{row['gbps']:g}",
            f"{row['tokens'] // 1024}k",
            f"{row['compute_s']:.2f}",
            f"{row['load_s']:.2f}",
            f"**{row['cake_s']:.2f}**",
            f"{row['optimum_s']:.2f}",
            f"{row['gain']:.2f}",
            f"{row['computed_share']:.0%}",
        ]
        for row in result["cells"]
    ]
    return {"end-states": documents.table(heads, lines, right=True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    parser = parser_of("bench_end_states", __doc__)
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--docs", action="store_true", help="write it into reports/simulator.md")
    args = parser.parse_args(argv)
    cells = [
        cell(server, gbps, tokens)
        for server in SERVERS
        for gbps in LINKS_GBPS
        for tokens in LENGTHS
    ]
    names = [name for name in cells[0] if name != "server"]
    rows = [[c["server"], *(f"{c[name]:g}" for name in names)] for c in cells]
    print(table(["server", *names], rows, right=range(1, len(names) + 1)))
    settings = {"chunk_tokens": CHUNK, "block_tokens": BLOCK, "latency_s": LATENCY_S}
    result = {**facts.header("end_states", **settings), "cells": cells}
    if args.json:
        facts.write(args.json, result)
    if args.docs:
        documents.update(documented(result), DOC)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
