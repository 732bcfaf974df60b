"""Serving from host memory and a disk: Cake's tiers beside HiCache's, and beside a device for all.

    python -m benchmarks.bench_memory_tier [--small] [--hits] [--out FILE] [--docs]

The workloads are those of `bench_serving` (shared prefixes, and three turns). The device holds two
prompts of nominal length, and host memory twice as much; both are far smaller than what is shared.
(Prompts are sent as text, and have up to twice as many tokens as asked for.) Everything is in files
too, behind a link on which loading a shared prefix takes as long as computing it:

    off          stock SGLang: what the device does not hold is computed
    file         Cake, `file://`
    memory       Cake, `memory://,file://`
    hicache-*    HiCache with as much host memory and its file backend, under each prefetch policy
    everything   stock SGLang with a device that holds all of the workload: the limit

Nothing is flushed between runs. Each arm runs a workload once unmeasured, then `repeats` times at
every rate. Reported: mean and p99 of TTFT, and their ratios to the best HiCache policy of the cell
(`to_hicache`) and to `everything` (`to_everything`). One server runs at a time.

`writes` has the file store's puts through the page cache and past it, as they are behind a tier in
memory: seconds of processor time per GB, and GB/s until the disk has all.

`reads` has blocks in memory on their way to the place where the device has them: `memcpy` is the
copy alone, `lent` the loader with blocks that memory lends it, `copied` the loader with blocks that
are copied into staging before. All three make the last copy in the main thread.

`--hits` measures something else, without servers: the processor time of a block in memory behind a
codec, up to the place where the device has it. `put` is the payload as the codec made it, decoded
at each hit; `moved up` was decoded when it moved up, and is lent.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks import bench_serving, documents, facts, servers, stats
from benchmarks.bench_serving import (
    CHUNK,
    LIMIT_S,
    QUESTION,
    SMALL,
    TURNS,
    measure,
)
from benchmarks.bench_ttft import HICACHE_FLAGS, POLICIES
from benchmarks.command_line import fill, parser_of
from benchmarks.file_arms import frame_of
from benchmarks.servers import FrozenServer
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.cli.text_tables import table
from sglang_cake.core.buffers import BufferPool, HostArena, copy_in_pieces, on_page
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import BlockKey, KeyChain, KeySeed, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import IoThread
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.loader import HostBlock, Loader, LoadRequest
from sglang_cake.simulator.shapes import kv_token_bytes
from sglang_cake.stores.base import Store, WrapperStore
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.memory.host_memory_store import HostMemorySource
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.testing.codec_contract import kv_like

HICACHE = tuple(f"hicache-{policy}" for policy in POLICIES)
ARMS = ("off", "file", "memory", *HICACHE, "everything")
HOST_RATIO = int(HICACHE_FLAGS[HICACHE_FLAGS.index("--hicache-ratio") + 1])  # to the device
# All arms take 10 minutes on two quiet cores.
SIZES = SMALL | {"groups": 16, "prompts": 1, "rates": [3.0], "repeats": 2, "name": "cpu"}
SIZES_SMALL = SIZES | {"repeats": 1, "name": "small"}
TIMES = ("ttft_mean_ms", "ttft_p99_ms")
DOC = facts.REPORTS / "stores.md"
READ = {"block_bytes": 16 << 20, "blocks": 32}
READ_SMALL = {"block_bytes": 1 << 20, "blocks": 16}
READ_ROUNDS = 5
READ_DEPTH = 8
HITS = 4  # of a block in a round
HIT_LAYERS = 32
HIT_CODECS = ("zstd", "int8", "int4", "kvquant3", "cachegen2")
WRITTEN = {"block_bytes": 16 << 20, "blocks": 128}
WRITTEN_SMALL = {"block_bytes": 1 << 20, "blocks": 64}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_memory_tier", __doc__)
    parser.add_argument("--small", action="store_true", help="one repeat")
    parser.add_argument("--arms", default=",".join(ARMS), help="to run, default all")
    parser.add_argument("--groups", type=int, metavar="N", help="that share a prefix (default 16)")
    parser.add_argument("--rates", type=stats.numbers, help="requests per second, default 3")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each run (default 2)")
    parser.add_argument("--hits", action="store_true", help="hits behind codecs, and nothing else")
    parser.add_argument("--docs", action="store_true", help="put the tables into reports/stores.md")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SIZES_SMALL if args.small else SIZES)
    args.arms, args.workloads = args.arms.split(","), list(TURNS)
    if args.repeats < 1 or not {ARMS[0]} <= set(args.arms) <= set(ARMS):
        parser.error(
            f"needs a repeat, and arms of {', '.join(ARMS)}, with {ARMS[0]}, which sets the link"
        )
    what = "memory-hits" if args.hits else "memory-tier"
    args.out = args.out or facts.RESULTS / f"{what}-{args.name}.json"
    return args


def shared_tokens(args: argparse.Namespace) -> int:
    """Tokens that the largest workload keeps in use."""
    turns = max(TURNS.values())
    return int(args.groups * (args.system + args.prompts * turns * (QUESTION + args.output)))


def start(
    arm: str, args: argparse.Namespace, model: Path, work: Path, bandwidth: float
) -> FrozenServer:
    """The server of an arm, not started."""
    if arm == "off" or arm in HICACHE:
        return bench_serving.start(arm, args, model, work, bandwidth)
    longest = bench_serving.longest_tokens(args)
    flags, log = servers.common_flags(CHUNK, longest), work / f"server-{arm}.log"
    if arm == "everything":
        flags += ["--max-total-tokens", str(2 * shared_tokens(args))]
        return FrozenServer(model, flags, log=log, env=servers.STOCK)
    url = f"{(work / f'store-{arm}').as_uri()}?bandwidth={bandwidth / 1e6:.3f}MB/s"
    if arm == "memory":
        host_tokens = HOST_RATIO * servers.pool_tokens(longest)
        url = f"memory://{host_tokens * kv_token_bytes(model, servers.DTYPE)},{url}"
    return FrozenServer(model, [*flags, *servers.cake_flags(url, "auto")], log=log)


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per workload, rate and arm: medians over the repeats, and ratios to the best policy of
    HiCache and to `everything`."""
    medians = {
        (run["workload"], run["rate"], run["arm"]): {
            name: stats.spread(
                [
                    other[name]
                    for other in runs
                    if all(other[field] == run[field] for field in ("workload", "rate", "arm"))
                ]
            )["median"]
            for name in TIMES
        }
        for run in runs
    }
    rows = []
    for (workload, rate, arm), times in medians.items():
        row = {"workload": workload, "rate": rate, "arm": arm, **times}
        for label, others in (("hicache", HICACHE), ("everything", ("everything",))):
            there = [medians[workload, rate, o] for o in others if (workload, rate, o) in medians]
            for name in TIMES if there else ():
                ratio = times[name] / min(other[name] for other in there)
                row[f"{name.removesuffix('_ms')}_to_{label}"] = round(ratio, 3)
        rows.append(row)
    return rows


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and the cells that the tiers lose."""
    ratios = [
        f"ttft_{kind}_to_{to}" for to in ("hicache", "everything") for kind in ("mean", "p99")
    ]
    lines = [
        [
            row["workload"],
            f"{row['rate']:g}",
            row["arm"],
            *(f"{row[name]:,.1f}" for name in TIMES),
            *(f"{row[name]:.3f}" if name in row else "-" for name in ratios),
        ]
        for row in rows
    ]
    lost = [
        f"{row['workload']} at {row['rate']:g}/s ({name})"
        for row in rows
        for name in ratios[:2]
        if row["arm"] == "memory" and row.get(name, 0) > 1
    ]
    heads = ["workload", "rate", "arm", *TIMES, *ratios]
    found = table(heads, lines, right=range(3, len(heads)))
    return f"{found}\n\nmemory slower than the best HiCache policy: {', '.join(lost) or 'nowhere'}"


def writes(folder: Path, *, block_bytes: int, blocks: int) -> list[dict[str, Any]]:
    """Puts into a file store, through the page cache and past it."""
    frame, data = frame_of(block_bytes), on_page(block_bytes)

    async def put_all(direct: bool) -> dict[str, Any]:
        source = FileSource(folder / f"writes-{direct}", min_free_bytes=0, direct_writes=direct)
        store = source.open(frame, depth=2)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        for first in range(0, blocks, 2):
            keys = [BlockKey(number.to_bytes(32, "big")) for number in (first, first + 1)]
            await asyncio.gather(*(store.put(key, data) for key in keys))
        cpu_s = time.process_time() - began_cpu_s
        for path in source.path.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        size_gb = blocks * block_bytes / 1e9
        took_s = time.monotonic() - began_s
        await store.close()
        return {
            "direct": direct,
            "cpu_s_per_gb": round(cpu_s / size_gb, 3),
            "gb_per_s": round(size_gb / took_s, 6),
        }

    return [asyncio.run(put_all(direct)) for direct in (False, True)]


def reads(*, block_bytes: int, blocks: int, rounds: int) -> list[dict[str, Any]]:
    """Blocks of a store in memory, read by a loader, three ways in turn."""
    tokens = array("q", range(blocks))
    frame = frame_of(block_bytes)
    chain = KeyChain(KeySeed(frame.digest), 1)
    # Memory lends half of its blocks at most. What is not used is not allocated.
    store = HostMemorySource(2 * blocks * block_bytes).open(frame, depth=READ_DEPTH)
    staging = BufferPool(HostArena([block_bytes] * 2 * READ_DEPTH, prefault=True).buffers)
    sources = [on_page(block_bytes) for _ in range(blocks)]
    target = on_page(block_bytes)
    io = IoThread()
    for key, source in zip(chain.of(tokens), sources, strict=True):
        io.run(store.put(key, source), LIMIT_S)

    def through_loader(read: Store, number: int) -> None:
        arrived: SimpleQueue[HostBlock] = SimpleQueue()

        def take(block: int, staged: HostBlock) -> bool:
            arrived.put(staged)
            return True

        prior = LoadCost(0.0, 0.01, depth=READ_DEPTH)
        loader = Loader(read, staging, io, Counters(), depths=[READ_DEPTH], prior=prior)
        name = str(number)
        loader.begin(LoadRequest(name, chain, tokens, blocks, 0, lambda *_: True, take_over=take))
        for _ in range(blocks):
            staged = arrived.get()
            copy_in_pieces(target, staged.buffer.view, lambda: None)
            staged.release(used=True)
        loader.cancel(name)

    def alone(number: int) -> None:
        for source in sources:
            copy_in_pieces(target, source, lambda: None)

    ways = {
        "memcpy": alone,
        "lent": functools.partial(through_loader, store),
        "copied": functools.partial(through_loader, WrapperStore(store)),
    }
    found = []
    for number, name in itertools.product(range(rounds), ways):
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        ways[name](number)
        took_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        size_gb = blocks * block_bytes / 1e9
        found.append(
            {
                "way": name,
                "repeat": number,
                "gb_per_s": round(size_gb / took_s, 6),
                "cpu_s_per_gb": round(cpu_s / size_gb, 4),
            }
        )
    io.run(store.close(), LIMIT_S)
    io.close()
    return found


def hits(folder: Path, *, layers: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of processor time for a hit of a block of `layers` * 512 KiB."""
    layout = BlockLayout.plain(layers, (("k", (8, 128)), ("v", (8, 128))), "bfloat16", 128)
    block, place = memoryview(kv_like(layout)), on_page(layout.block_bytes)
    key = BlockKey(bytes(32))
    found = []

    def opened(url: str, codec: str) -> Store:
        namespace = Namespace((("codec", codec), ("layout", layout.describe())))
        return open_blocks(parse_sources(url), [namespace], layout, codec=codec, depth=1)

    async def of(codec: str) -> None:
        files = f"{(folder / codec).as_uri()}?min_free=0"
        below, put, moved_up = (
            opened(url, codec)
            for url in (files, f"memory://{2 * layout.block_bytes}", f"memory://1GB,{files}")
        )
        await below.put(key, block)
        await put.put(key, block)
        staging = on_page(layout.block_bytes)
        await moved_up.contains([key])
        await moved_up.get_into(key, staging)

        async def decoded() -> None:
            await put.get_into(key, staging)
            copy_in_pieces(place, staging, lambda: None)

        async def as_it_is() -> None:
            lent = moved_up.lend(key)
            assert lent is not None
            copy_in_pieces(place, lent.buffer.view, lambda: None)
            lent.release()

        for repeat, (name, hit) in itertools.product(
            range(rounds), (("put", decoded), ("moved up", as_it_is))
        ):
            began_s = time.process_time()
            for _ in range(HITS):
                await hit()
            cpu_ms = (time.process_time() - began_s) / HITS * 1e3
            found.append({"codec": codec, "block": name, "repeat": repeat, "cpu_ms": cpu_ms})
        for store in (below, put, moved_up):
            await store.close()

    for codec in HIT_CODECS:
        asyncio.run(of(codec))
    return found


def documented(result: dict[str, Any]) -> dict[str, str]:
    """The tables of the report, by name: those of hits, or all others."""
    if "hits" in result:
        return {"memory-hits": hits_table(result["hits"])}
    heads = ["workload, requests/s", "arm", "TTFT ms", "p99", "to HiCache", "p99", "to everything"]
    ratios = ("ttft_mean_to_hicache", "ttft_p99_to_hicache", "ttft_mean_to_everything")
    cells = [
        [
            f"{row['workload']}, {row['rate']:g}",
            row["arm"],
            *(f"{row[name]:,.0f}" for name in TIMES),
            *(f"{row[name]:.2f}" if name in row else "-" for name in ratios),
        ]
        for row in result["summary"]
    ]
    rates = ("gb_per_s", "cpu_s_per_gb")
    heads_of_rates = ["GB/s", "CPU s/GB"]
    ways = by_median(result["reads"], "way", rates)
    puts = by_median(result["writes"], "direct", rates)
    names = {"True": "past the page cache", "False": "through the page cache"}
    return {
        "memory-tier": documents.table(heads, cells),
        "memory-reads": documents.table(["way", *heads_of_rates], ways, right=True),
        "memory-writes": documents.table(
            ["a put", *heads_of_rates], [[names[way], *rest] for way, *rest in puts], right=True
        ),
    }


def hits_table(rows: Sequence[dict[str, Any]]) -> str:
    """One row for each codec."""
    puts, moved = (
        by_median([row for row in rows if row["block"] == block], "codec", ["cpu_ms"])
        for block in ("put", "moved up")
    )
    cells = [
        [codec, f"{float(one):.1f}", f"{float(other):.1f}", f"{float(one) / float(other):.0f}"]
        for (codec, one), (_, other) in zip(puts, moved, strict=True)
    ]
    heads = ["codec", "decoded at each hit, CPU ms", "lent, CPU ms", "times"]
    return documents.table(heads, cells, right=True)


def by_median(rows: Sequence[dict[str, Any]], label: str, names: Sequence[str]) -> list[list[str]]:
    """A line for each value of `label`: medians over the repeats."""
    return [
        [
            str(value),
            *(
                f"{statistics.median(r[name] for r in rows if r[label] == value):.3f}"
                for name in names
            ),
        ]
        for value in dict.fromkeys(row[label] for row in rows)
    ]


def run(args: argparse.Namespace, model: Path, work: Path, progress: ProgressLog) -> dict[str, Any]:
    """All arms; `off` first, which the bandwidth is measured on."""
    result: dict[str, Any] = {
        "host_ratio": HOST_RATIO,
        "shared_tokens": shared_tokens(args),
        "device_tokens": servers.pool_tokens(bench_serving.longest_tokens(args)),
        "balanced_bytes_per_s": round(1e9),
        "reads": reads(**(READ_SMALL if args.small else READ), rounds=READ_ROUNDS),
        "writes": [],
        "runs": [],
    }
    progress.say(f"reads: {result['reads']}")
    sizes = WRITTEN_SMALL if args.small else WRITTEN
    for repeat in range(args.repeats):
        for found in writes(work / f"puts-{repeat}", **sizes):
            result["writes"].append({"repeat": repeat, **sizes, **found})
    progress.say(f"writes: {result['writes']}")
    for arm in sorted(args.arms, key=ARMS.index):
        with contextlib.ExitStack() as stack:
            bandwidth = result["balanced_bytes_per_s"]
            server = stack.enter_context(start(arm, args, model, work, bandwidth))
            progress.say(f"{arm}: healthy after {server.start_s:.1f} s")
            if arm == ARMS[0]:
                result["balanced_bytes_per_s"] = round(bench_serving.balanced(server, model, args))
            with server.thawed() as url:
                for workload in args.workloads:
                    cells = [
                        (rate, repeat) for rate in args.rates for repeat in range(args.repeats)
                    ]
                    for rate, repeat in [(max(args.rates), None), *cells]:
                        found = measure(
                            url, model, work, args, workload=workload, rate=rate, flush=False
                        )
                        labels = {"workload": workload, "rate": rate, "arm": arm, "repeat": repeat}
                        if repeat is not None:
                            result["runs"].append({**labels, **found})
                            progress.say(f"{arm}, {workload}, {rate:g}/s: {found['ttft_mean_ms']}")
        result["summary"] = summary(result["runs"])
        facts.write(args.out, {**facts.header("memory-tier", repeats=args.repeats), **result})
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    args = parse_args(argv)
    if args.hits:
        layers = 4 if args.small else HIT_LAYERS
        with tempfile.TemporaryDirectory() as work:
            found = hits(Path(work), layers=layers, rounds=READ_ROUNDS)
        result = {**facts.header("memory-hits", layers=layers), "hits": found}
        facts.write(args.out, result)
        print(hits_table(found))
    else:
        servers.unwind_when_told_to_end()
        with servers.fresh_folder("memory-tier") as work:
            result = run(args, servers.model(True), work, ProgressLog())
        print("", text(result["summary"]), "", sep="\n")
    if args.docs:
        documents.update(documented(result), DOC)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
