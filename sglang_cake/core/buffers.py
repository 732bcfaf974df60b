"""Host buffers for blocks on their way: preallocated one by one, reused, bounded."""

import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

# Memory that starts on a multiple of it can be filled from a disk without a copy (O_DIRECT). A
# multiple of what any disk asks for, whatever the machine's pages are.
PAGE_BYTES = 4096


def is_on_page(view: memoryview) -> bool:
    """Whether writable, contiguous memory starts on a page."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0


def on_page(size_bytes: int) -> memoryview:
    """New memory that starts on a page; zeros."""
    raw = bytearray(size_bytes + PAGE_BYTES)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(raw)) % PAGE_BYTES
    return memoryview(raw)[start : start + size_bytes]


# Told how many bytes of a buffer have come so far.
TellBytes = Callable[[int], object]


class Buffer(Protocol):
    """One block of host memory. The adapter makes it (pinned when there is a GPU), on a page."""

    @property
    def view(self) -> memoryview:
        """All bytes, writable."""
        ...


class BufferPool:
    """At most `capacity` buffers, made when first needed and then reused. Thread-safe."""

    def __init__(self, capacity: int, make: Callable[[], Buffer]) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._make = make
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        self._made = 0

    def take(self) -> Buffer | None:
        """A buffer with undefined content, or None when all are in use. Never blocks on others."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._made == self.capacity:
                return None
            self._made += 1
        return self._make()

    def give(self, buffer: Buffer) -> None:
        """Return a buffer that nobody reads or writes any more."""
        with self._lock:
            self._idle.append(buffer)

    @property
    def free(self) -> int:
        """How many buffers could be taken now."""
        with self._lock:
            return len(self._idle) + self.capacity - self._made
