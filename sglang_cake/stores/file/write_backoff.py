"""When a disk refuses to be written: not every block has to find that out again."""

import time
from collections.abc import Callable

from sglang_cake.core.errors import StoreError

FIRST_S = 1.0
MOST_S = 60.0


class WriteBackoff:
    """Doubles with every failure in a row, up to MOST_S.

    Args: clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s = float("-inf")
        self._next_s = FIRST_S
        self._failure: StoreError | None = None

    def left_s(self) -> float:
        """How long nothing should be written yet; 0 when it may be tried."""
        return max(0.0, self._until_s - self._clock())

    def check(self) -> None:
        """Raises: what the write that began the pause raised, StoreFull or StoreUnavailable, while
        nothing should be written: blocks that are refused have the same reason."""
        left_s = self.left_s()
        if left_s > 0 and self._failure is not None:
            raise type(self._failure)(f"writing rests for {left_s:.0f} s after {self._failure}")

    def failed(self, failure: StoreError) -> None:
        """A write failed; one that had begun before the pause does not make it longer."""
        if self.left_s() == 0.0:
            self._until_s = self._clock() + self._next_s
            self._next_s = min(MOST_S, 2 * self._next_s)
            self._failure = failure

    def succeeded(self) -> None:
        """A write succeeded: the next failure begins with FIRST_S again."""
        self._next_s = FIRST_S
