"""The read of a block that is under way, for a thread that uses its first bytes before the rest.

Bytes are not checked until all have come. A thread that uses them before must wait for the end of
the read, and must be able to undo what it did with them.
"""

import threading
import time

from sglang_cake.core.buffers import Buffer


class Reading:
    """One read. Thread-safe: the store reports how far it is, the loader when it is over, and one
    other thread waits."""

    def __init__(self, buffer: Buffer, changed: threading.Condition | None = None) -> None:
        """
        Args:
            buffer: filled by the read, from its start. Its bytes are valid after
                `end(whole=True)`; after `end(whole=False)` the buffer belongs to another read.
            changed: guards the state, and is notified of its changes.
        """
        self.buffer = buffer
        self._changed = threading.Condition() if changed is None else changed
        self._bytes = 0
        self._starts = 0  # how often the read started from its first byte
        self._begun_s = 0.0  # when it did last
        self._used: int | None = None  # the start whose bytes were used
        self._whole: bool | None = None  # None: under way

    def came(self, count: int) -> None:
        """`count` leading bytes have come, unchecked (a `TellBytes`). 0: the read starts."""
        with self._changed:
            if count == 0:
                self._starts += 1
                self._begun_s = time.monotonic()
            self._bytes = count
            self._changed.notify_all()

    def end(self, *, whole: bool) -> None:
        """The read is over. Args: whole: all bytes have come and passed the check."""
        with self._changed:
            self._whole = whole
            self._changed.notify_all()

    @property
    def begun(self) -> bool:
        """Whether the read is under way, and the store reports its progress."""
        with self._changed:
            return self._starts > 0 and self._whole is None

    @property
    def to_come(self) -> float:
        """The share of the bytes that is still to come."""
        with self._changed:
            return 0.0 if self._whole else 1 - self._bytes / len(self.buffer.view)

    @property
    def is_over(self) -> bool:
        """Whether the read has ended, well or not."""
        with self._changed:
            return self._whole is not None

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come and passed the check."""
        with self._changed:
            return self._whole is True

    def coming_s(self) -> float:
        """Time since the first byte came; 0 if the store does not report its progress."""
        with self._changed:
            return time.monotonic() - self._begun_s if self._starts else 0.0

    def has(self, count: int) -> bool:
        """Whether `count` leading bytes have come."""
        with self._changed:
            return self._has(count)

    def wait(self, count: int, until_s: float) -> bool:
        """Block until `count` leading bytes have come, which the caller uses at once. Returns False
        if the read failed, if it restarted after bytes had been used, or at `until_s` (monotonic).
        """
        with self._changed:
            while not self._has(count) and self._whole is None and self._tick(until_s):
                pass
            return self._has(count) and self._use()

    def wait_whole(self, until_s: float) -> bool:
        """Block until the read is over. Returns whether all bytes passed the check, and all bytes
        that had been used are among them. False also at `until_s` (monotonic)."""
        with self._changed:
            while self._whole is None and self._tick(until_s):
                pass
            return self._whole is True and self._use()

    def _tick(self, until_s: float) -> bool:
        return self._changed.wait(until_s - time.monotonic())

    def _has(self, count: int) -> bool:
        return self._whole is True or (self._whole is None and self._bytes >= count > 0)

    def _use(self) -> bool:
        if self._used is None:
            self._used = self._starts
        return self._used == self._starts
