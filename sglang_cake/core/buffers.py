"""Host buffers for blocks in transit: a fixed number, used again and again."""

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
