"""What `--cake-head-groups` costs: blocks in 1, 2, 4 and 8 slices on every kind of store.

    python -m benchmarks.bench_head_slices [--small] [--stores file,http,...] [--out FILE] [--docs]

A server with as many ranks as head groups has one slice a block, as without the setting; one with
fewer ranks has several. Each arm writes and reads the same bytes in blocks of one size, `depth` at
a time. The arms of a store take turns within a round, and their rates are beside that of one slice
of the same round. `bench_stores` says what the stores are.
"""

import argparse
import asyncio
import contextlib
import hashlib
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import documents, facts
from benchmarks.bench_stores import KEYS, STORES
from benchmarks.command_line import fill, parser_of
from benchmarks.stats import spread
from sglang_cake.cli.text_tables import table
from sglang_cake.core.buffers import on_page
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.open_store import open_blocks, parse_sources

SLICES = (1, 2, 4, 8)
LAYERS, HEADS, TOKENS = 32, 8, 128
FULL = {"dims": [16, 64], "depth": 4, "mib": 256, "repeats": 3, "name": "cpu"}
SMALL = {"dims": [4], "depth": 4, "mib": 4, "repeats": 1, "name": "small"}
CALLS = ("read", "write")
DOC = facts.REPORTS / "stores.md"


async def rates(url: str, layout: BlockLayout, slices: int, blocks: int, depth: int) -> list[float]:
    """Bytes per second of reads and of writes. The blocks are deleted."""
    run = uuid.uuid4().hex
    groups = [
        Namespace((("benchmark", run), ("layout", layout.describe()), ("head_group", str(group))))
        for group in range(slices)
    ]
    store = open_blocks(parse_sources(url), groups, layout, codec="raw", depth=depth)
    data = memoryview(os.urandom(layout.block_bytes))
    keys = [BlockKey(hashlib.sha256(f"{run} {i}".encode()).digest()) for i in range(blocks)]
    buffers = [on_page(layout.block_bytes) for _ in range(depth)]

    async def timed(call: Callable[[BlockKey, memoryview], Awaitable[object]]) -> float:
        left = iter(keys)

        async def work(buffer: memoryview) -> None:
            for key in left:
                await call(key, buffer)

        begun_s = time.perf_counter()
        await asyncio.gather(*(work(buffer) for buffer in buffers))
        return blocks * layout.block_bytes / (time.perf_counter() - begun_s)

    try:
        await store.contains(keys[:1])  # opens the store
        write = await timed(lambda key, _: store.put(key, data))
        read = await timed(store.get_into)
        if not all(bytes(buffer) == data for buffer in buffers):
            raise SystemExit(f"{url}: {slices} slices were read wrong")
        for key in keys:
            await store.delete(key)
    finally:
        await store.close()
    return [read, write]


def measure(urls: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every single run."""
    runs = []
    for repeat in range(args.repeats):
        for dim in args.dims:
            shape = (HEADS, dim)
            layout = BlockLayout.plain(LAYERS, (("k", shape), ("v", shape)), "bfloat16", TOKENS)
            blocks = max(args.depth, (args.mib << 20) // layout.block_bytes)
            for name, url in urls.items():
                for slices in SLICES if repeat % 2 == 0 else SLICES[::-1]:
                    found = asyncio.run(rates(url, layout, slices, blocks, args.depth))
                    runs.append(
                        {
                            "repeat": repeat,
                            "store": name,
                            "block_bytes": layout.block_bytes,
                            "slices": slices,
                            **dict(zip(CALLS, found, strict=True)),
                        }
                    )
        print(f"round {repeat + 1} of {args.repeats} done", file=sys.stderr)
    return runs


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By store, block and slices: requests for a block, GB/s, and the rate beside one slice."""
    whole = {
        (run["repeat"], run["store"], run["block_bytes"]): run for run in runs if run["slices"] == 1
    }
    rows = []
    for cell in dict.fromkeys((run["store"], run["block_bytes"], run["slices"]) for run in runs):
        here = [run for run in runs if (run["store"], run["block_bytes"], run["slices"]) == cell]
        row: dict[str, Any] = dict(zip(("store", "block_bytes", "slices"), cell, strict=True))
        row["requests"] = row["slices"]
        for call in CALLS:
            beside = [run[call] / whole[run["repeat"], *cell[:2]][call] for run in here]
            row[f"{call}_gb_per_s"] = spread([run[call] / 1e9 for run in here], 3)
            row[f"{call}_to_one_slice"] = spread(beside, 3)
        rows.append(row)
    return rows


HEADS_OF_TABLE = ["store", "block", "groups", "reads, GB/s", "to one", "writes, GB/s", "to one"]


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["store"],
            f"{row['block_bytes'] / 2**20:g} MiB",
            str(row["slices"]),
            *(
                f"{row[f'{call}_{what}']['median']:.2f}"
                for call in CALLS
                for what in ("gb_per_s", "to_one_slice")
            ),
        ]
        for row in result["summary"]
    ]


def documented(result: dict[str, Any]) -> dict[str, str]:
    """The table of the report, by its name."""
    return {"head-slices": documents.table(HEADS_OF_TABLE, lines(result), right=True)}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench_head_slices", __doc__)
    parser.add_argument("--small", action="store_true", help="little and few: shows that it works")
    names = [name for name in STORES if name != "tiers"]
    parser.add_argument("--stores", default=",".join(names), help="which (default: all)")
    parser.add_argument("--docs", action="store_true", help="put the table into reports/stores.md")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    args.stores = args.stores.split(",")
    if not set(args.stores) <= set(names):
        parser.error(f"--stores takes {', '.join(names)}")
    args.out = args.out or facts.RESULTS / f"head-slices-{args.name}.json"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ |= KEYS  # of the S3 service
    settings = {name: getattr(args, name) for name in ("dims", "depth", "mib", "repeats")}
    result = facts.header("head_slices", **settings)
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(STORES[name](Path(work))) for name in args.stores}
        runs = measure(urls, args)
    rounded = [{**run, **{call: round(run[call]) for call in CALLS}} for run in runs]
    result |= {"summary": summary(runs), "runs": rounded}
    facts.write(args.out, result)
    print(table(HEADS_OF_TABLE, lines(result), right=range(1, len(HEADS_OF_TABLE))))
    if args.docs:
        documents.update(documented(result), DOC)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
