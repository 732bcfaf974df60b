"""Host memory of blocks in transit: a fixed number of buffers, used again and again; how much of it
there is, and where it lies."""

import ctypes
import mmap
import re
import resource
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from sglang_cake.core.errors import ConfigError

# With O_DIRECT, a read into memory that starts on a multiple of it needs no copy. It is a multiple
# of the alignment of every disk, whatever the machine's page size is.
PAGE_BYTES = 4096
PIECE_BYTES = 1 << 20  # a cancelled caller waits for the copy of at most one piece


def address_of(memory: memoryview | bytearray | mmap.mmap) -> int:
    """The address of the first byte of writable, contiguous memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def is_on_page(view: memoryview) -> bool:
    """Whether writable, contiguous memory starts on a page."""
    return address_of(view) % PAGE_BYTES == 0


def on_page(size_bytes: int) -> memoryview:
    """New memory that starts on a page; zeros."""
    raw = bytearray(size_bytes + PAGE_BYTES)
    start = -address_of(raw) % PAGE_BYTES
    return memoryview(raw)[start : start + size_bytes]


# KV of one layer on its way: a memoryview, or, between GPUs, a uint8 tensor on our GPU.
PartBytes = Any


# Called with the number of bytes of a buffer that have arrived so far.
TellBytes = Callable[[int], object]


def copy_in_pieces(
    out: memoryview,
    source: memoryview,
    check: Callable[[], object],
    progress: TellBytes | None = None,
) -> None:
    """Copy all of `source` to the start of `out`.

    Args:
        check: called before each piece; what it raises ends the copy.
    """
    # NumPy releases the GIL while it copies; a plain assignment would stop all other threads.
    read = np.frombuffer(source, np.uint8)
    written = np.frombuffer(out, np.uint8)[: len(read)]
    for start in range(0, len(read), PIECE_BYTES):
        check()
        if progress is not None:
            progress(start)
        piece = slice(start, start + PIECE_BYTES)
        np.copyto(written[piece], read[piece])
    if progress is not None:
        progress(len(read))


@dataclass(slots=True, eq=False)
class Buffer:
    """Host memory of one block. Attributes: view: all bytes, writable."""

    view: memoryview


class BufferPool:
    """A fixed set of buffers, handed out one by one. Thread-safe.

    Attributes:
        capacity: the number of all buffers.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        assert buffers
        self.capacity = len(buffers)
        self._idle = deque(buffers)

    def take(self) -> Buffer | None:
        """A buffer with undefined content, or None if all are in use. Never waits for one."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give(self, buffer: Buffer) -> None:
        """Return a buffer. No thread or device may use it any more."""
        self._idle.append(buffer)

    @property
    def free(self) -> int:
        """How many buffers could be taken now."""
        return len(self._idle)


DEFAULT_STAGING_BYTES = 2**30
DEFAULT_WRITE_QUEUE_BYTES = 2**28  # but at least two chunks
COPIED_BLOCKS = 4  # staging holds these beside the blocks that are being read
_MAX_POOLS = 2  # the most that a default takes, in sizes of the KV pool
_CGROUP_1, _CGROUP_2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: what the machine has left, or what a cgroup of this
    process (a container, a Slurm job, a systemd unit) has left, if that is less.

    Args: root: below it are `proc` and `sys`.
    """
    machine = re.search(r"MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text())
    assert machine is not None  # every Linux since 3.14 has it
    return min([int(machine[1]) * 1024, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> Iterator[int]:
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without cgroups
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount, limit, used, cache = _CGROUP_2, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, cache = _CGROUP_1, "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Limits of the groups above count too. In a container the path may be the one outside of
        # it; then `mount` itself is the group of the container.
        inner = root / mount / path.lstrip("/")
        for group in (inner, *inner.parents):
            if group == (root / mount).parent:
                break
            try:
                limit_bytes = int((group / limit).read_text())  # ValueError: "max", no limit
                used_bytes = int((group / used).read_text())
                cached = re.search(rf"^{cache} (\d+)", (group / "memory.stat").read_text(), re.M)
            except (OSError, ValueError):
                continue
            # Pages of files that were not read for long are given up before anything fails.
            yield max(0, limit_bytes - used_bytes + (int(cached[1]) if cached else 0))


class Mapping(mmap.mmap):
    """Memory that tells its end. Weak references are called when it is unmapped already.

    Attributes:
        before_unmap: called when nothing refers to the memory any more, before it is unmapped.
    """

    before_unmap: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None:
            self.before_unmap()


class HostArena:
    """One anonymous, private mapping, divided into buffers that start on pages.

    The memory is freed when nothing refers to `mapping` or to a buffer's view any more. A forked
    child does not have it: otherwise, the parent's first write after the fork would move a page
    away from where a GPU expects it.

    Attributes:
        mapping: all of the memory.
        address: the address of its first byte.
        size_bytes: the size of the mapping.
        buffers: in the order of their sizes.
        stops: where the pages of each buffer end.
        huge_pages: whether the system may use huge pages for it.
    """

    def __init__(self, sizes_bytes: Sequence[int], *, prefault: bool) -> None:
        """
        Args:
            sizes_bytes: the sizes of the buffers.
            prefault: the calling thread touches all memory now. The first touch decides on which
                NUMA node a page lies, so the thread must run on the right one. Otherwise a page is
                allocated when a buffer is first used.

        Raises: OSError if the system does not map so much.
        """
        strides = [whole_pages(size) for size in sizes_bytes]
        *starts, self.size_bytes = accumulate(strides, initial=0)
        self.stops = [*starts[1:], self.size_bytes]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.mapping = Mapping(-1, self.size_bytes, flags=flags)
        self.mapping.madvise(mmap.MADV_DONTFORK)
        self.huge_pages = _advise_huge_pages(self.mapping)
        self.address = address_of(self.mapping)
        if prefault:
            self.touch(0, self.size_bytes)
        view = memoryview(self.mapping)
        parts = zip(starts, sizes_bytes, strict=True)
        self.buffers = [Buffer(view[start : start + size]) for start, size in parts]

    def touch(self, start: int, stop: int) -> None:
        """Allocate a part of the memory, from the calling thread. It is zeros afterwards."""
        ctypes.memset(self.address + start, 0, stop - start)


# Lets a device copy to and from the first buffers of a new arena directly; how many.
Pin = Callable[[HostArena], int]


def pin_advice(pinned_bytes: int = 0) -> str:
    """What a user does about a device that pins no more host memory than this."""
    lower = "lower --cake-staging-bytes, --cake-write-queue-bytes and the size of memory://"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit < pinned_bytes:  # it is not what refused
        return lower
    return (
        f"raise the limit of locked memory, which is {mib(limit)} (ulimit -l, "
        f"LimitMEMLOCK=infinity, docker run --ulimit memlock=-1), or {lower}"
    )


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """How many blocks host memory holds.

    Attributes:
        loads: blocks that are being loaded.
        writes: blocks that are being stored.
        reduced: defaults were reduced to the memory that is available.
    """

    loads: int
    writes: int
    reduced: bool = False


def buffer_counts(
    *,
    load_bytes: int,
    write_bytes: int,
    reads: int,
    chunk_blocks: int,
    pool_blocks: int,
    staging_bytes: int | None,
    write_queue_bytes: int | None,
    available_bytes: int,
    end_blocks: int = 0,
) -> BufferCounts:
    """The settings, or defaults for this model and this server.

    Args:
        load_bytes, write_bytes: sizes of a buffer to load into, and of one to store from.
        reads: how many reads of the store run at once.
        chunk_blocks: blocks that a prefill step computes at most.
        pool_blocks: blocks that the KV pool of the device holds.
        staging_bytes, write_queue_bytes: as set; None takes the default.
        available_bytes: what the machine has left. At most half of it is used.
        end_blocks: blocks of an end state, which are all there before one of them is used.

    Raises: ConfigError if that is too little for what is set, or for the least that is needed.
    """
    load_bytes, write_bytes = whole_pages(load_bytes), whole_pages(write_bytes)
    least_loads = reads + COPIED_BLOCKS + end_blocks
    least_writes = 1 + end_blocks  # blocks may leave an end state's to it
    if staging_bytes is None:
        loads = min(DEFAULT_STAGING_BYTES // load_bytes, _MAX_POOLS * pool_blocks)
    else:
        loads = staging_bytes // load_bytes
    if write_queue_bytes is None:
        writes = max(DEFAULT_WRITE_QUEUE_BYTES // write_bytes, 2 * chunk_blocks + end_blocks)
        writes = min(writes, _MAX_POOLS * pool_blocks)
    else:
        writes = write_queue_bytes // write_bytes
    loads, writes = max(least_loads, loads), max(least_writes, writes)

    limit_bytes = available_bytes // 2
    whole_bytes = loads * load_bytes + writes * write_bytes
    if whole_bytes <= limit_bytes:
        return BufferCounts(loads, writes)
    fixed_bytes = loads * load_bytes if staging_bytes is not None else 0
    fixed_bytes += writes * write_bytes if write_queue_bytes is not None else 0
    if fixed_bytes < limit_bytes:  # the defaults share what is left
        left_bytes, default_bytes = limit_bytes - fixed_bytes, whole_bytes - fixed_bytes
        if staging_bytes is None:
            loads = max(least_loads, loads * left_bytes // default_bytes)
        if write_queue_bytes is None:
            writes = max(least_writes, writes * left_bytes // default_bytes)
        whole_bytes = loads * load_bytes + writes * write_bytes
    if whole_bytes > limit_bytes:
        raise ConfigError(
            f"cake needs {mib(whole_bytes)} of host memory for {loads} blocks being loaded and "
            f"{writes} being stored, but may use only half of the {mib(available_bytes)} that are "
            "available: lower --cake-staging-bytes, --cake-write-queue-bytes, --cake-queue-depth "
            "or --cake-block-tokens"
        )
    return BufferCounts(loads, writes, reduced=True)


def mib(size_bytes: int) -> str:
    """`16 MiB`, `0.125 MiB`."""
    return f"{size_bytes / 2**20:,.3f}".rstrip("0").rstrip(".") + " MiB"


def whole_pages(size_bytes: int) -> int:
    """The size of the pages that hold so many bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _advise_huge_pages(mapping: mmap.mmap) -> bool:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:  # a kernel without them
        return False
