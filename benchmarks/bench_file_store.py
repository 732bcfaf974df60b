"""How fast the file store reads from a disk, beside `fio` on the very same files; and writes.

    python benchmarks/bench_file_store.py [--dir /nvme/bench] [--json results.json]

Arms take turns in one run, each with a cold page cache. Ratios are of runs of the same round, to
the better of fio's two. Every arm moves whole files, a header of 4096 bytes and the payload.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import facts, stats
from benchmarks.command_line import parser_of
from benchmarks.file_arms import (
    Run,
    buffer_of,
    dealt,
    frame_of,
    make_cold,
    read_bare,
    read_fio,
    read_store,
    write_store,
)
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.file.block_files import FolderSettings, block_names
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.file_store import FileStore

MIB = 1 << 20
FIO = ("fio, page cache", "fio, direct")
STORE = "store"  # into pages, as the adapter's buffers are
ARMS = (STORE, "store, unaligned", *FIO, "bare, page cache", "bare, direct")
FSYNC = {"off": False, "data": True}


@contextmanager
def opened(root: Path, frame: BlockFrame, *, depth: int, sync: bool = False) -> Iterator[FileStore]:
    store = FileStore(
        BlockFolder(FolderSettings(root, fsync="data" if sync else "off")), frame, threads=depth
    )
    try:
        yield store
    finally:
        asyncio.run(store.close())


def blocks_of(block_bytes: int, total_bytes: int) -> list[tuple[BlockKey, memoryview]]:
    """Blocks of bytes that no disk can compress: windows on one random stretch."""
    count, step = max(1, total_bytes // block_bytes), 4096
    noise = memoryview(os.urandom(block_bytes + step * count))
    return [
        (BlockKey(os.urandom(32)), noise[step * i : step * i + block_bytes]) for i in range(count)
    ]


def write_rates(root: Path, mib: int, depth: int, total_bytes: int) -> dict[str, Any]:
    """Puts of new blocks, `fsync` off (to the page cache) and data (to the disk)."""
    frame = frame_of(mib * MIB)
    row: dict[str, Any] = {"block_mib": mib, "depth": depth}
    for name, sync in FSYNC.items():
        with (
            tempfile.TemporaryDirectory(dir=root) as folder,
            opened(Path(folder), frame, depth=depth, sync=sync) as store,
        ):
            os.sync()
            run = write_store(store, blocks_of(mib * MIB, total_bytes), depth)
        row[name] = {
            "gb_per_s": round(run.gb_per_s, 3),
            "cpu_s_per_gb": round(run.cpu_s_per_gb, 3),
        }
    return row


class Reads:
    """The files of one block size, and every arm that reads them."""

    def __init__(self, root: Path, mib: int, total_bytes: int) -> None:
        self.mib, self._root = mib, root
        self._frame = frame_of(mib * MIB)
        blocks = blocks_of(mib * MIB, total_bytes)
        self._keys = [key for key, _ in blocks]
        with opened(root / "store", self._frame, depth=4) as store:
            write_store(store, blocks, 4)
        digest = self._frame.digest
        self._files = [(root / "store").joinpath(*block_names(digest, key)) for key in self._keys]
        self.is_cold = make_cold(self._files)

    def measure(self, depth: int, repeats: int) -> dict[str, list[Run]]:
        """Every arm, `repeats` times, in turn; in every round another one comes first."""
        with opened(self._root / "store", self._frame, depth=depth) as store:
            arms = self._arms(store, depth)
            runs: dict[str, list[Run]] = {name: [] for name in arms}
            for round_ in range(repeats):
                first = round_ % len(ARMS)
                for name in ARMS[first:] + ARMS[:first]:
                    make_cold(self._files)
                    runs[name].append(arms[name]())
        return runs

    def _arms(self, store: FileStore, depth: int) -> dict[str, Callable[[], Run]]:
        block_bytes, framed_bytes = self.mib * MIB, self._frame.framed_bytes
        folder = self._root / f"fio-{depth}"
        shares = dealt(self._files, folder, depth)
        pages = [buffer_of(block_bytes) for _ in range(depth)]
        beside = [buffer_of(block_bytes, aligned=False) for _ in range(depth)]
        whole = [buffer_of(framed_bytes) for _ in range(depth)]
        keys, files = self._keys, self._files
        return {
            STORE: lambda: read_store(store, keys, pages, framed_bytes),
            "store, unaligned": lambda: read_store(store, keys, beside, framed_bytes),
            "fio, page cache": lambda: read_fio(shares, block_bytes, folder / "p", direct=False),
            "fio, direct": lambda: read_fio(shares, block_bytes, folder / "d", direct=True),
            "bare, page cache": lambda: read_bare(files, whole, direct=False),
            "bare, direct": lambda: read_bare(files, whole, direct=True),
        }


def summary(mib: int, depth: int, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """One cell: every run, medians, and ratios to the better fio."""
    rates = {name: [run.gb_per_s for run in many] for name, many in runs.items()}
    best = max(FIO, key=lambda name: statistics.median(rates[name]))
    arms = {}
    for name, many in runs.items():
        pairs = [[pair] for pair in zip(rates[name], rates[best], strict=True)]
        arms[name] = {
            "gb_per_s": stats.spread(rates[name], 3),
            "cpu_s_per_gb": stats.spread([run.cpu_s_per_gb for run in many], 3),
            "to_best_fio": stats.paired_ratio(pairs),
            "runs_gb_per_s": [round(rate, 3) for rate in rates[name]],
        }
    return {"block_mib": mib, "depth": depth, "best_fio": best, "arms": arms}


def table(cells: Sequence[dict[str, Any]]) -> str:
    """GB/s, the ratio to the better fio, and CPU seconds per GB, of every arm."""
    lines = [
        f"{'MiB':>3} {'depth':>5}  {'':16} {'GB/s':>7} {'to fio':>7} {'95 %':>12} {'CPU s/GB':>9}"
    ]
    for cell in cells:
        for name, arm in cell["arms"].items():
            ratio = arm["to_best_fio"]
            between = f"{ratio['low']:.2f}..{ratio['high']:.2f}"
            lines.append(
                f"{cell['block_mib']:>3} {cell['depth']:>5}  {name:16} "
                f"{arm['gb_per_s']['median']:>7.2f} {ratio['ratio']:>7.2f} {between:>12} "
                f"{arm['cpu_s_per_gb']['median']:>9.3f}" + (" *" * (name == cell["best_fio"]))
            )
    return "\n".join([*lines, "* the better fio"])


def write_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'MiB':>3} {'depth':>5}  {'fsync':6} {'put GB/s':>9} {'CPU s/GB':>9}"]
    for row in rows:
        lines += [
            f"{row['block_mib']:>3} {row['depth']:>5}  {name:6} "
            f"{row[name]['gb_per_s']:>9.2f} {row[name]['cpu_s_per_gb']:>9.3f}"
            for name in FSYNC
        ]
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = parser_of("bench_file_store", __doc__)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--mib", default="1,4,16", help="block sizes")
    parser.add_argument("--depths", default="1,4,8", help="reads in flight")
    parser.add_argument("--total-mib", type=int, default=512, help="read in every run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="little and few: shows that it works")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    if args.small:
        args.mib, args.total_mib, args.repeats = "1,4", 16, 2
    return args


def main() -> None:
    args = parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: apt-get install fio")
    sizes, depths = stats.whole_numbers(args.mib), stats.whole_numbers(args.depths)
    settings = {name: getattr(args, name) for name in ("mib", "depths", "total_mib", "repeats")}
    result = facts.header("file_store", **settings)
    cells, writes, is_cold = [], [], True
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-file-store-") as folder:
        for mib in sizes:
            root = Path(folder) / str(mib)
            root.mkdir()
            writes.append(write_rates(root, mib, 4, args.total_mib * MIB // 2))
            reads = Reads(root, mib, args.total_mib * MIB)
            is_cold = is_cold and reads.is_cold
            for depth in depths:
                cells.append(summary(mib, depth, reads.measure(depth, args.repeats)))
                print(table(cells[-1:]), flush=True)
    result |= {"page_cache_dropped": is_cold, "reads": cells, "writes": writes}
    print(f"{table(cells)}\n\n{write_table(writes)}")
    if not is_cold:
        print("not root: the page cache was only asked to forget the files")
    if args.json:
        facts.write(args.json, result)


if __name__ == "__main__":
    main()
