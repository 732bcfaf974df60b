"""A block's read that is under way, as a thread sees it that needs its first bytes before the rest.

What has come is not checked until all has. So whoever uses it early must see the read end well, and
must be able to take back what came of it.
"""

import threading
import time

from sglang_cake.core.buffers import Buffer


class Reading:
    """One read. Thread-safe: a store tells how far it is, the loader when it is over, and one other
    thread waits."""

    def __init__(self, buffer: Buffer) -> None:
        """Args: buffer: what the read fills, from its start. Once the read is over it is whoever's
        it is then: what is there means something only after `end(whole=True)`."""
        self.buffer = buffer
        self._changed = threading.Condition()
        self._bytes = 0
        self._turns = 0  # how often bytes began to come
        self._begun_s = 0.0  # the last time that they did
        self._used: int | None = None  # the turn whose bytes were used
        self._whole: bool | None = None  # None: under way

    def came(self, count: int) -> None:
        """So many leading bytes are there, unchecked (a `TellBytes`)."""
        with self._changed:
            if count == 0:
                self._turns += 1
                self._begun_s = time.monotonic()
            self._bytes = count
            self._changed.notify_all()

    def end(self, *, whole: bool) -> None:
        """It is over. Args: whole: all bytes are there, and passed the check."""
        with self._changed:
            self._whole = whole
            self._changed.notify_all()

    @property
    def begun(self) -> bool:
        """Whether bytes come, and are told of."""
        with self._changed:
            return self._turns > 0 and self._whole is None

    @property
    def to_come(self) -> float:
        """The share of its bytes that is not there."""
        with self._changed:
            return 0.0 if self._whole else 1 - self._bytes / len(self.buffer.view)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are there, and passed the check."""
        with self._changed:
            return self._whole is True

    def coming_s(self) -> float:
        """Since the first byte came; 0 if nobody told."""
        with self._changed:
            return time.monotonic() - self._begun_s if self._turns else 0.0

    def has(self, count: int) -> bool:
        """Whether so many leading bytes are there."""
        with self._changed:
            return self._has(count)

    def wait(self, count: int, until_s: float) -> bool:
        """Until so many leading bytes are there, to be used at once. False: they will not be, or
        what was used before them was no part of the same bytes, or it is `until_s` (monotonic)."""
        with self._changed:
            while not self._has(count) and self._whole is None and self._tick(until_s):
                pass
            return self._has(count) and self._use()

    def wait_whole(self, until_s: float) -> bool:
        """Until it is over, and all that was used was part of what has passed the check. False
        otherwise, and if it is not over at `until_s` (monotonic)."""
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
            self._used = self._turns
        return self._used == self._turns
