"""Pauses after failures of a server, a disk or a peer, longer each time. Times are seconds of any
monotonic clock.
"""

import math


class Backoff:
    """A pause after a failure, which doubles with each further failure."""

    def __init__(self, first_s: float = 1.0, last_s: float = 60.0) -> None:
        """Args:
        first_s, last_s: length of the first pause, and limit for later ones.
        """
        self._first_s = first_s
        self._last_s = last_s
        self._pause_s = 0.0  # length of the last pause; 0: the next one is the first
        self._until_s = -math.inf

    @property
    def has_failed(self) -> bool:
        """Whether there was a failure since `reset`."""
        return self._pause_s > 0

    def left_s(self, now_s: float) -> float:
        """Rest of the pause; 0 if there is none."""
        return max(0.0, self._until_s - now_s)

    def start(self, now_s: float) -> None:
        """Start the next pause, after a failure."""
        self._pause_s = min(2 * self._pause_s, self._last_s) if self._pause_s else self._first_s
        self._until_s = now_s + self._pause_s

    def repeat(self, now_s: float) -> None:
        """Start a pause of the same length as the last one."""
        self._until_s = now_s + self._pause_s

    def skip(self) -> None:
        """End the pause."""
        self._until_s = -math.inf

    def reset(self) -> None:
        """The next pause is the first one again. A pause that has begun goes on."""
        self._pause_s = 0.0
