"""Landed blocks in host memory, shared by the prompts that want them."""

import threading
from collections.abc import Callable

from sglang_cake.core.buffers import Buffer, BufferPool


class StagedBlock:
    """A landed block in a pool buffer, shared by every prompt that wants it. Thread-safe.

    It starts with one holder. The last release returns the buffer and calls `on_free`;
    `used` then says whether any holder took the bytes over; if none did, they were loaded in vain.
    """

    def __init__(
        self, buffer: Buffer, pool: BufferPool, on_free: Callable[["StagedBlock"], None]
    ) -> None:
        self.buffer = buffer
        self.used = False
        self.reason = "unused"
        self._pool = pool
        self._on_free = on_free
        self._lock = threading.Lock()
        self._holders = 1

    def hold(self) -> bool:
        """Become one more holder; False if the last one has just let go."""
        with self._lock:
            if self._holders == 0:
                return False
            self._holders += 1
            return True

    def release(self, *, used: bool, reason: str = "unused") -> None:
        """Stop being a holder. `reason` says why the bytes were of no use, if they were not."""
        with self._lock:
            self.used |= used
            if not used:
                self.reason = reason
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._pool.give(self.buffer)
            self._on_free(self)
