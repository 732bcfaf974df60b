"""Host buffers for blocks in transit: allocated one by one, reused, bounded."""

import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

# O_DIRECT reads fill memory that starts on a multiple of it without a copy. It is a multiple of the
# alignment of every disk, whatever the machine's page size is.
PAGE_BYTES = 4096


def is_on_page(view: memoryview) -> bool:
    """Whether writable, contiguous memory starts on a page."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0


def on_page(size_bytes: int) -> memoryview:
    """New memory that starts on a page; zeros."""
    raw = bytearray(size_bytes + PAGE_BYTES)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(raw)) % PAGE_BYTES
    return memoryview(raw)[start : start + size_bytes]


# Called with the number of bytes of a buffer that have arrived so far.
TellBytes = Callable[[int], object]


class Buffer(Protocol):
    """One block of host memory, aligned to a page; `integration` makes it (pinned for a GPU)."""

    @property
    def view(self) -> memoryview:
        """All bytes, writable."""
        ...


class BufferPool:
    """At most `capacity` buffers, allocated when first needed and then reused. Thread-safe."""

    def __init__(self, capacity: int, make: Callable[[], Buffer]) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._make = make
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        self._made = 0

    def take(self) -> Buffer | None:
        """A buffer with undefined content, or None if all are in use. Never waits for one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._made == self.capacity:
                return None
            self._made += 1
        return self._make()

    def give(self, buffer: Buffer) -> None:
        """Return a buffer. No thread or device may use it any more."""
        with self._lock:
            self._idle.append(buffer)

    @property
    def free(self) -> int:
        """How many buffers could be taken now."""
        with self._lock:
            return len(self._idle) + self.capacity - self._made
