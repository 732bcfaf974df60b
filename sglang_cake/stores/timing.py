"""What is late: time limits from the rate that was measured, hedges from the latencies. Pure."""

import bisect
import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeoutLimits:
    """Bounds of every time limit, in seconds."""

    first_s: float = 20.0  # while nothing has been measured; less than the loader would wait
    floor_s: float = 2.0  # as well
    ceiling_s: float = 600.0  # for what is small; a large body may take SLOWEST_BYTES_PER_S


MOST_BACKOFF = 1024.0
SLOWEST_BYTES_PER_S = 64 * 1024  # no link that is any slower is worth waiting for


class AdaptiveTimeout:
    """How long requests of one kind may take, as TCP does it for its retransmissions.

    A limit is SLACK times what a request of this size should take by the measured rate, deviation
    included. A request that runs into it doubles the limits to come, up to the ceiling, until one
    is answered: so a link that became slow costs some requests and is then waited for.
    """

    SLACK = 8.0
    GAIN = 0.2  # weight of the newest measurement

    def __init__(self, patience: TimeoutLimits) -> None:
        self._patience = patience
        self._mean_s: float | None = None  # seconds a byte
        self._deviation_s = 0.0
        self.backoff = 1.0  # a factor on every limit

    def timeout_s(self, size_bytes: int) -> float:
        """How long a request that moves `size_bytes` (at least 1) may take."""
        patience = self._patience
        if self._mean_s is None:
            usual_s = patience.first_s
        else:
            usual_s = self.SLACK * size_bytes * (self._mean_s + 4 * self._deviation_s)
        most_s = max(patience.ceiling_s, size_bytes / SLOWEST_BYTES_PER_S)
        return min(max(usual_s, patience.floor_s) * self.backoff, most_s)

    def answered(self, size_bytes: int, took_s: float) -> None:
        """A request that moved `size_bytes` was answered after `took_s`."""
        per_byte_s = took_s / size_bytes
        self.backoff = 1.0
        if self._mean_s is None:
            self._mean_s, self._deviation_s = per_byte_s, per_byte_s / 2
            return
        error_s = per_byte_s - self._mean_s
        self._deviation_s += self.GAIN * (abs(error_s) - self._deviation_s)
        self._mean_s += self.GAIN * error_s

    def was_late(self, backoff: float) -> None:
        """A request ran into its limit, in which `backoff` was a factor. Of several that were under
        way at once only the first one counts: the others say nothing new."""
        if backoff == self.backoff:
            self.backoff = min(2 * backoff, MOST_BACKOFF)


class Hedging:
    """When to ask a second time for what was not answered yet, and how often at most.

    The limit is a quantile of the last latencies; of the requests at most SHARE are hedged, saved
    up to BURST, since a server that became slow for all is not helped by being asked twice.
    """

    QUANTILE = 0.95
    WINDOW = 128
    ENOUGH = 32  # latencies; a quantile of fewer says nothing
    SHARE = 0.05
    BURST = 2.0

    def __init__(self, *, floor_s: float) -> None:
        """Args: floor_s: never ask again before this."""
        self._floor_s = floor_s
        self._recent: deque[float] = deque(maxlen=self.WINDOW)
        self._sorted: list[float] = []
        self._credit = 0.0

    def answered(self, latency_s: float) -> None:
        """A request was answered `latency_s` after it was first asked."""
        if len(self._recent) == self.WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(latency_s)
        bisect.insort(self._sorted, latency_s)
        self._credit = min(self._credit + self.SHARE, self.BURST)

    def delay_s(self) -> float | None:
        """After how long to ask again; None: not at all."""
        if len(self._sorted) < self.ENOUGH or self._credit < 1:
            return None
        at = math.ceil(self.QUANTILE * len(self._sorted)) - 1
        return max(self._sorted[at], self._floor_s)

    def take(self) -> bool:
        """Whether one more hedge may be sent; it is counted as sent."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True
