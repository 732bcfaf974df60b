"""How fast a server loads over a link without a limit, beside its store and what a copy costs.

    python -m benchmarks load_rate [--small] [--out FILE] [--docs]

A prompt is stored in files of this machine and loaded by a server in mode `load`, with blocks of
two sizes: those that a small model has by default, and 15 MiB, about what a model of 8 billion
parameters has. The files are on the disk, or in the page cache. Three arms take turns:

    server   stored bytes over the time from the request's arrival at the scheduler to its last step
    reads    a process that reads and checks the same blocks, as many at a time (`store bench` does
             the same with blocks of its own, from the disk)
    copies   the same process, and a thread of it copies each block once, into memory of its own:
             the least that a server must do, since a block that is not checked yet may not be in
             the KV pool
"""

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import documents, facts, servers
from benchmarks.command_line import fill, parser_of
from benchmarks.file_arms import make_cold, read_store
from benchmarks.servers import FrozenServer
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.cli.named_stores import blocks_in, one_store, readable
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.buffers import HostArena
from sglang_cake.core.keys import BlockKey
from sglang_cake.demo.event_trace import TRACE_ENV, read_event_trace
from sglang_cake.simulator.shapes import kv_token_bytes
from sglang_cake.stores.base import USUAL_DEPTH

DOC = facts.REPORTS / "servers.md"
CHUNK_TOKENS = 512
STATES = {"disk": "on the disk", "cache": "in the page cache"}
ARMS = ("server", "reads", "copies")
FULL = {"tokens": 16_128, "block_tokens": [128, 768], "repeats": 5, "name": "cpu"}
SMALL = {"tokens": 1536, "block_tokens": [128, 768], "repeats": 1, "name": "small"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_load_rate", __doc__)
    parser.add_argument("--small", action="store_true", help="a small model, a short prompt")
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each arm (default 5)")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {DOC.name}")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    args.out = args.out or facts.RESULTS / f"load-rate-{args.name}.json"
    if args.repeats < 1:
        parser.error("needs a run of each arm")
    return args


@dataclass(slots=True)
class Bench:
    """The runs with one size of blocks. Attributes: rates: bytes per second, by state and arm."""

    block_tokens: int
    work: Path
    model: Path
    prompt: Sequence[int]  # one token more than is stored
    depth: int
    rates: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {state: {arm: [] for arm in ARMS} for state in STATES}
    )

    @property
    def store_url(self) -> str:
        return (self.work / "store").as_uri()

    @property
    def trace(self) -> Path:
        return self.work / "trace.jsonl"

    @property
    def token_bytes(self) -> int:
        return kv_token_bytes(self.model, servers.DTYPE)

    @property
    def stored_bytes(self) -> int:
        return (len(self.prompt) - 1) * self.token_bytes

    def server(self, mode: str) -> FrozenServer:
        """A server that is started with the context."""
        flags = [
            *servers.common_flags(CHUNK_TOKENS, len(self.prompt)),
            *servers.cake_flags(self.store_url, mode),
            *("--cake-block-tokens", str(self.block_tokens)),
            *("--cake-queue-depth", str(self.depth)),
        ]
        env = {TRACE_ENV: str(self.trace)}
        return FrozenServer(self.model, flags, log=self.work / f"server-{mode}.log", env=env)

    def run(self, repeats: int) -> None:
        """Fill the store, then all runs."""
        with self.server("compute") as compute:
            compute.cold(self.prompt, 1)
            with compute.thawed():
                servers.wait_until_steady(self.work / "store", self.stored_bytes)
        with self.server("load") as load:
            load.cold(self.prompt, 1)  # what is made at first use is there
            for number in range(repeats):
                arms = ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]
                for state in STATES:
                    for arm in arms:
                        self._bring(state)
                        rate = self._loaded(load) if arm == "server" else self._read(arm)
                        self.rates[state][arm].append(round(rate))

    def summary(self, token_bytes: int) -> dict[str, Any]:
        """Rates, and the median over runs of each ratio of arms that ran one after the other."""
        shares = {
            state: {
                f"server_to_{arm}": round(
                    statistics.median(
                        own / other for own, other in zip(rates["server"], rates[arm], strict=True)
                    ),
                    3,
                )
                for arm in ARMS[1:]
            }
            for state, rates in self.rates.items()
        }
        return {
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_tokens * token_bytes,
            "bytes_per_s": self.rates,
            "ratios": shares,
        }

    def _bring(self, state: str) -> None:
        """Have all files of the store in the page cache, or only on the disk."""
        files = [path for path in (self.work / "store").rglob("*") if path.is_file()]
        if state == "disk":
            make_cold(files)
        else:
            for path in files:
                path.read_bytes()

    def _loaded(self, server: FrozenServer) -> float:
        reply = server.cold(self.prompt, 1)
        trace = read_event_trace(self.trace, reply.meta["id"], reply.first_token_s)
        (step,) = trace.steps  # more if a block was lost
        return self.stored_bytes / (step.begin_s - trace.arrive_s)

    def _read(self, arm: str) -> float:
        named = one_store(self.store_url)

        async def stored() -> tuple[BlockFrame, list[BlockKey]]:
            [(_, frame)], _ = await readable(named)
            return frame, [block.key async for block in blocks_in(named, frame)]

        frame, keys = asyncio.run(stored())
        arena = HostArena([frame.payload_bytes] * (self.depth + len(keys)), prefault=True)
        views = [buffer.view for buffer in arena.buffers]
        buffers, pool = views[: self.depth], iter(views[self.depth :])
        store = named.source.open(frame, depth=self.depth)

        def copy(block: memoryview) -> None:
            np.copyto(np.frombuffer(next(pool), np.uint8), np.frombuffer(block, np.uint8))

        copies = copy if arm == "copies" else None
        try:
            done = read_store(store, keys, buffers, frame.payload_bytes, copies)
        finally:
            asyncio.run(store.close())
        return done.moved_bytes / done.wall_s


def text(cells: Sequence[Mapping[str, Any]]) -> str:
    """The table of a document: GB/s, medians."""
    head = ["block", "files", "server", "reads", "reads and copies", "server / reads"]
    head.append("server / reads and copies")
    rows = []
    for cell in cells:
        for state, rates in cell["bytes_per_s"].items():
            ratios = cell["ratios"][state]
            rows.append(
                [
                    f"{cell['block_bytes'] / 2**20:.1f} MiB",
                    STATES[state],
                    *(f"{statistics.median(rates[arm]) / 1e9:.2f}" for arm in ARMS),
                    *(f"{ratios[f'server_to_{arm}']:.2f}" for arm in ARMS[1:]),
                ]
            )
    return documents.table(head, rows, right=True)


def documented(result: dict[str, Any]) -> dict[str, str]:
    """The table of the report, by its name."""
    return {"load-rate": text(result["cells"])}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cells; the result file is written after each."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    progress = ProgressLog()
    depth = USUAL_DEPTH
    result = facts.header(
        "load-rate",
        model="hidden 256, 4 layers" if args.small else "hidden 768, 10 layers (92M)",
        dtype=servers.DTYPE,
        tokens=args.tokens,
        repeats=args.repeats,
        queue_depth=depth,
    )
    prompt = servers.random_prompt(args.tokens + 1, seed=7)
    result["cells"] = []
    for block_tokens in args.block_tokens:
        with servers.fresh_folder("load-rate") as work:
            bench = Bench(block_tokens, work, servers.model(args.small), prompt, depth)
            bench.run(args.repeats)
        result["cells"].append(bench.summary(bench.token_bytes))
        facts.write(args.out, result)
        progress.say(f"blocks of {block_tokens} tokens: {result['cells'][-1]['ratios']}")
    print("", text(result["cells"]), "", sep="\n")
    if args.docs:
        documents.update(documented(result), DOC)
    progress.say(f"result: {facts.shown(args.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
