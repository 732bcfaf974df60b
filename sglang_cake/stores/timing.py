"""Time limits from measured rates, and hedging from measured latencies. Pure."""

import bisect
import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeoutLimits:
    """Bounds of a time limit."""

    first_s: float = 20.0  # before the first measurement; less than the loader waits
    floor_s: float = 2.0
    ceiling_s: float = 600.0  # large bodies may take longer, by SLOWEST_BYTES_PER_S


MOST_BACKOFF = 1024.0
SLOWEST_BYTES_PER_S = 64 * 1024  # slower links are not waited for


class AdaptiveTimeout:
    """Time limit for requests of one kind, similar to TCP's retransmission timer (RFC 6298).

    The limit is SLACK times the expected duration of a request of this size, by the mean and the
    deviation of the measured time per byte. Each timeout doubles later limits, up to the ceiling,
    until a request is answered. So a link that becomes slow costs some requests and is then waited
    for.
    """

    SLACK = 8.0
    GAIN = 0.2  # weight of the newest measurement

    def __init__(self, patience: TimeoutLimits) -> None:
        self._patience = patience
        self._mean_s: float | None = None  # per byte
        self._deviation_s = 0.0
        self.backoff = 1.0  # factor of every limit

    def timeout_s(self, size_bytes: int) -> float:
        """Limit for a request that transfers `size_bytes`, at least 1."""
        patience = self._patience
        if self._mean_s is None:
            usual_s = patience.first_s
        else:
            usual_s = self.SLACK * size_bytes * (self._mean_s + 4 * self._deviation_s)
        most_s = max(patience.ceiling_s, size_bytes / SLOWEST_BYTES_PER_S)
        return min(max(usual_s, patience.floor_s) * self.backoff, most_s)

    def answered(self, size_bytes: int, took_s: float) -> None:
        """Record a request that transferred `size_bytes` in `took_s`."""
        per_byte_s = took_s / size_bytes
        self.backoff = 1.0
        if self._mean_s is None:
            self._mean_s = per_byte_s
            self._deviation_s = per_byte_s / 2
            return
        error_s = per_byte_s - self._mean_s
        self._deviation_s += self.GAIN * (abs(error_s) - self._deviation_s)
        self._mean_s += self.GAIN * error_s

    def was_late(self, backoff: float) -> None:
        """Record a timeout. Of concurrent requests only the first timeout counts.

        Args:
            backoff: value of `backoff` when the request started.
        """
        if backoff == self.backoff:
            self.backoff = min(2 * backoff, MOST_BACKOFF)


class Hedging:
    """When to send a second request for an answer that is late, and how often at most.

    The delay is a quantile of recent latencies. At most SHARE of the requests are hedged, in bursts
    of at most BURST, so that hedging does not overload a server that is slow for all requests.
    """

    QUANTILE = 0.95
    WINDOW = 128
    ENOUGH = 32  # latencies, for a useful quantile
    SHARE = 0.05
    BURST = 2.0

    def __init__(self, *, floor_s: float) -> None:
        """Args:
        floor_s: shortest delay.
        """
        self._floor_s = floor_s
        self._recent: deque[float] = deque(maxlen=self.WINDOW)
        self._sorted: list[float] = []
        self._credit = 0.0

    def answered(self, latency_s: float) -> None:
        """Record the latency of a request, from the first of its two."""
        if len(self._recent) == self.WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(latency_s)
        bisect.insort(self._sorted, latency_s)
        self._credit = min(self._credit + self.SHARE, self.BURST)

    def delay_s(self) -> float | None:
        """Delay of the second request; None: send none."""
        if len(self._sorted) < self.ENOUGH or self._credit < 1:
            return None
        at = math.ceil(self.QUANTILE * len(self._sorted)) - 1
        return max(self._sorted[at], self._floor_s)

    def take(self) -> bool:
        """Whether a second request may be sent now; counts it as sent."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True
