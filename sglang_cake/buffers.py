"""Host buffers for blocks on their way: preallocated one by one, reused, bounded."""

import threading
from collections.abc import Callable
from typing import Protocol


class Buffer(Protocol):
    """One block of host memory. The adapter makes it (pinned when there is a GPU)."""

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
