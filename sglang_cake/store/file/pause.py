"""When a disk refuses to be written: not every block has to find that out again. Pure."""

FIRST_S = 1.0
MOST_S = 60.0


class Pause:
    """Doubles with every failure in a row, up to MOST_S; times are of any monotonic clock."""

    def __init__(self) -> None:
        self._until_s = float("-inf")
        self._next_s = FIRST_S
        self.reason = ""

    def left_s(self, now_s: float) -> float:
        """How long nothing should be written yet; 0 when it may be tried."""
        return max(0.0, self._until_s - now_s)

    def failed(self, now_s: float, reason: str) -> None:
        """A write failed; one that had begun before the pause does not make it longer."""
        if self.left_s(now_s) == 0.0:
            self._until_s = now_s + self._next_s
            self._next_s = min(MOST_S, 2 * self._next_s)
            self.reason = reason

    def succeeded(self) -> None:
        """A write succeeded: the next failure begins with FIRST_S again."""
        self._next_s = FIRST_S
