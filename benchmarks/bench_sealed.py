"""What sealing costs a store: put and get with and without, beside the cipher alone.

    python -m benchmarks sealed [--out benchmarks/results/sealed-cpu.json]

The process is held to one core, so that the threads of a store and of the cipher share it as they
would share a busy machine, and CPU time and wall time say the same unless something else runs.
Arms take turns, round by round, over the same blocks: a file store in the page cache (of the
folder's file system, nothing is synced), a store in memory, each plain and sealed, and the cipher
alone on the same bytes, which is the limit of what sealing can cost. GB are 10^9 bytes.
"""

import argparse
import asyncio
import hashlib
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks import documents
from benchmarks.command_line import parser_of
from benchmarks.facts import RESULTS, ROOT, header, shown, write
from benchmarks.file_arms import frame_of
from benchmarks.stats import spread, whole_numbers
from sglang_cake.codecs.frame import SEALED_BYTES, BlockFrame, sealed_frame
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import Store
from sglang_cake.stores.encrypted import BlockCipher, EncryptedStore, MasterKey
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.testing.memory_store import MemoryStore

MASTER = MasterKey(bytes(32))
Pairs = dict[tuple[str, str], list[tuple[float, float]]]  # (arm, call) -> one pair a round


def opened(arm: str, folder: Path, frame: BlockFrame, depth: int) -> Store:
    """The store of an arm: `file`, `memory`, or one of them with ` sealed` behind."""
    sealed = arm.endswith(" sealed")
    inner_frame = sealed_frame(frame, MASTER.name) if sealed else frame
    inner: Store = MemoryStore()
    if arm.startswith("file"):
        inner = FileSource(folder, min_free_bytes=0).open(inner_frame, depth=depth)
    if not sealed:
        return inner
    cipher = BlockCipher(MASTER.block_key(inner_frame.digest), inner_frame.digest)
    return EncryptedStore(inner, cipher, block_bytes=frame.payload_bytes, depth=depth)


async def timed(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


async def measure_store(
    store: Store, keys: list[BlockKey], block: memoryview, depth: int
) -> list[tuple[str, tuple[float, float]]]:
    """Put all blocks, read them all, `depth` at a time, and delete them."""
    outs = [memoryview(bytearray(len(block))) for _ in range(depth)]

    async def in_turns(call: Callable[[BlockKey, memoryview], Awaitable[object]]) -> None:
        async def lane(number: int) -> None:
            for key in keys[number::depth]:
                await call(key, outs[number])

        await asyncio.gather(*map(lane, range(depth)))

    put = await timed(lambda: in_turns(lambda key, out: store.put(key, block)))
    await in_turns(store.get_into)
    get = await timed(lambda: in_turns(store.get_into))
    assert all(out == block for out in outs)
    await in_turns(lambda key, out: store.delete(key))
    return [("put", put), ("get", get)]


async def measure_cipher(
    keys: list[BlockKey], block: memoryview
) -> list[tuple[str, tuple[float, float]]]:
    """The cipher alone, in this thread."""
    cipher = BlockCipher(bytes(32), frame_of(len(block)).digest)
    sealed, out = memoryview(bytearray(len(block) + SEALED_BYTES)), memoryview(bytearray(block))

    async def each(call: Callable[[BlockKey, memoryview, memoryview], None], *views: Any) -> None:
        for key in keys:
            call(key, *views)

    cipher.encrypt(keys[-1], block, sealed)
    put = await timed(lambda: each(cipher.encrypt, block, sealed))
    opening = each(lambda _, source, target: cipher.decrypt(keys[-1], source, target), sealed, out)
    get = await timed(lambda: opening)
    return [("put", put), ("get", get)]


async def measure(args: argparse.Namespace, folder: Path, block_bytes: int) -> Pairs:
    """All rounds of one size: (GB/s, CPU seconds a GB)."""
    frame, times = frame_of(block_bytes), defaultdict[Any, list[tuple[float, float]]](list)
    count = max(args.depth, args.round_bytes // block_bytes)
    keys = [BlockKey(hashlib.sha256(bytes([n % 256, n // 256])).digest()) for n in range(count)]
    block = memoryview(os.urandom(block_bytes))
    arms = ("file", "file sealed", "memory", "memory sealed")
    stores = {arm: opened(arm, folder, frame, args.depth) for arm in arms}
    try:
        for turn in range(args.repeats + 1):
            first = turn % len(arms)  # nobody always comes after the same one
            for arm in arms[first:] + arms[:first]:
                for call, took in await measure_store(stores[arm], keys, block, args.depth):
                    times[arm, call] += [took] if turn else []  # the first round warms up
            for call, took in await measure_cipher(keys, block):
                times["cipher alone", call] += [took] if turn else []
    finally:
        for store in stores.values():
            await store.close()
    round_bytes = count * block_bytes
    return {
        name: [(round_bytes / wall_s / 1e9, cpu_s / round_bytes * 1e9) for wall_s, cpu_s in took]
        for name, took in times.items()
    }


def rows(block_bytes: int, rates: Pairs) -> list[dict[str, Any]]:
    """One for each arm and call: GB/s, and CPU seconds a GB."""
    return [
        {
            "block_bytes": block_bytes,
            "arm": arm,
            "call": call,
            "gb_per_s": spread([rate for rate, _ in found]),
            "cpu_s_per_gb": spread([cost for _, cost in found]),
        }
        for (arm, call), found in rates.items()
    ]


def table(found: list[dict[str, Any]]) -> str:
    """For people: medians."""
    by_arm: dict[tuple[int, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in found:
        by_arm[row["block_bytes"], row["arm"]][row["call"]] = row
    lines = []
    for (size, arm), calls in by_arm.items():
        cells = [
            f"{calls[call][what]['median']:.2f}"
            for what in ("gb_per_s", "cpu_s_per_gb")
            for call in ("put", "get")
        ]
        lines.append([f"{size >> 20} MiB", arm, *cells])
    head = ["block", "arm", "put GB/s", "get GB/s", "put CPU s/GB", "get CPU s/GB"]
    return documents.table(head, lines)


def main() -> None:
    parser = parser_of("bench_sealed", __doc__)
    parser.add_argument("--block-mib", default="1,4,16", help="sizes of blocks")
    parser.add_argument("--round-bytes", type=int, default=128 << 20, help="that a round moves")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, after one that warms up")
    parser.add_argument("--depth", type=int, default=2, help="calls in flight")
    parser.add_argument("--out", type=Path, default=RESULTS / "sealed-cpu.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    result = header("sealed", **settings)
    folder = ROOT / "benchmarks" / ".work" / "sealed"
    found: list[dict[str, Any]] = []
    try:
        for mib in whole_numbers(args.block_mib):
            found += rows(mib << 20, asyncio.run(measure(args, folder, mib << 20)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["rows"] = found
    result["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
    write(args.out, result)
    print(table(found), f"\nwritten to {shown(args.out)}", sep="\n")


if __name__ == "__main__":
    main()
