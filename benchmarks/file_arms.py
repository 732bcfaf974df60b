"""One run of every way to read the same files that `bench_file_store` compares."""

import asyncio
import itertools
import json
import mmap
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import Store


@dataclass(frozen=True, slots=True)
class Run:
    """What one run moved, and what it took."""

    moved_bytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.moved_bytes * 1e9


def read_store(
    store: Store,
    keys: Sequence[BlockKey],
    buffers: Sequence[memoryview],
    framed_bytes: int,
    use: Callable[[memoryview], object] | None = None,
) -> Run:
    """`len(buffers)` reads in flight, each into its own buffer. Args: use: is called with each
    block, in a thread of its own."""
    left = iter(keys)

    async def one(buffer: memoryview, user: Executor) -> None:
        for key in left:
            await store.get_into(key, buffer)
            if use is not None:
                await asyncio.get_running_loop().run_in_executor(user, use, buffer)

    async def all_at_once() -> None:
        with ThreadPoolExecutor(1) as user:
            await asyncio.gather(*(one(buffer, user) for buffer in buffers))

    with _clocked() as clock:
        asyncio.run(all_at_once())
    return clock(len(keys) * framed_bytes)


def write_store(store: Store, blocks: Sequence[tuple[BlockKey, memoryview]], depth: int) -> Run:
    """`depth` puts in flight."""
    left = iter(blocks)

    async def one() -> None:
        for key, block in left:
            assert await store.put(key, block)

    async def all_at_once() -> None:
        await asyncio.gather(*(one() for _ in range(depth)))

    with _clocked() as clock:
        asyncio.run(all_at_once())
    return clock(sum(len(block) for _, block in blocks))


def read_bare(files: Sequence[Path], buffers: Sequence[memoryview], *, direct: bool) -> Run:
    """The least that Python can do: a thread a buffer, a `preadv` a file, and nothing is checked.

    Args: buffers: page-aligned, a whole number of pages, as large as a file.
    """
    left, lock = iter(files), threading.Lock()
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)

    def one(buffer: memoryview) -> None:
        while True:
            with lock:
                path = next(left, None)
            if path is None:
                return
            fd = os.open(path, flags)
            size = os.preadv(fd, [buffer], 0)
            assert size == len(buffer), size
            os.close(fd)

    threads = [threading.Thread(target=one, args=(buffer,)) for buffer in buffers]
    with _clocked() as clock:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return clock(sum(len(buffers[0]) for _ in files))


def read_fio(shares: Sequence[Path], block_bytes: int, log: Path, *, direct: bool) -> Run:
    """fio, a thread a folder of `shares`, every file with one `preadv` of `block_bytes`.

    Its own clock is believed, which starts when its threads do.
    """
    jobs = [
        "[global]",
        "ioengine=psync",
        "rw=read",
        "thread=1",
        "file_service_type=sequential",
        "invalidate=0",  # done before, for all arms alike
        "group_reporting=1",
        f"bs={block_bytes}",
        f"direct={int(direct)}",
    ]
    for number, share in enumerate(shares):
        jobs += [f"[share{number}]", f"opendir={share}"]
    plan, result = log.with_suffix(".fio"), log.with_suffix(".json")
    plan.write_text("\n".join(jobs) + "\n")
    # --output: on stdout it mixes notes with its JSON.
    command = ["fio", "--output-format=json", f"--output={result}", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"fio failed: {done.stderr.strip() or result.read_text().strip()}")
    text = result.read_text()
    group = json.loads(text[text.index("{") :])["jobs"][0]
    cpu_share = (group["usr_cpu"] + group["sys_cpu"]) / 100
    return Run(
        moved_bytes=group["read"]["io_bytes"],
        wall_s=group["read"]["runtime"] / 1e3,
        cpu_s=cpu_share * group["job_runtime"] / 1e3,  # of all threads together
    )


def dealt(files: Sequence[Path], folder: Path, hands: int) -> list[Path]:
    """Hard links to `files` in `hands` new folders, as equal as can be."""
    shares = [folder / str(hand) for hand in range(hands)]
    for share in shares:
        share.mkdir(parents=True)
    for path, share in zip(files, itertools.cycle(shares), strict=False):
        os.link(path, share / path.name)
    return shares


def make_cold(files: Sequence[Path]) -> bool:
    """Take the files, which must be on the disk, out of the page cache; False if only asked for.

    Names and inodes stay in memory: they are no part of what is compared.
    """
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def frame_of(block_bytes: int) -> BlockFrame:
    """Of blocks that are one plane."""
    layout = BlockLayout.plain(
        layers=1, parts=(("kv", (block_bytes,)),), dtype="uint8", block_tokens=1
    )
    return BlockFrame(Namespace((("model", "bench"), ("layout", layout.describe()))), layout)


def buffer_of(size_bytes: int, *, aligned: bool = True) -> memoryview:
    """Memory that was touched, on a page or (not `aligned`) just behind the start of one."""
    shift = 0 if aligned else 64
    whole = memoryview(mmap.mmap(-1, size_bytes + shift))
    whole[:] = bytes(len(whole))
    return whole[shift:]


@contextmanager
def _clocked() -> Iterator[Callable[[int], Run]]:
    """Measure what is inside; afterwards, make a Run of it."""
    cpu_s, started_s = _cpu_s(), time.perf_counter()
    found: list[float] = []
    yield lambda moved_bytes: Run(moved_bytes, *found)
    found += [time.perf_counter() - started_s, _cpu_s() - cpu_s]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
