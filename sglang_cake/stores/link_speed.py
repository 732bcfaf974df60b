"""Measured speed of the links to stores, and the choice of the tier to read a block from.

Reads of one tier share its link. So a tier with `n` bytes in flight needs about
`(n + block) / bandwidth` seconds for one more block. Reading from the tier where this time is
shortest keeps all links busy and reaches the sum of their bandwidths. Tiers behind a common
bottleneck show it in their measured speed; then nothing is gained and nothing is lost.

Times are seconds of any monotonic clock.
"""

import math
import time
from collections.abc import Callable, Sequence

RATE_FRESH_S = 60.0  # older measurements are ignored: the tier may have been busy at that time
SMOOTHING = 0.3  # weight of the newest block in the moving average
_MIN_S_PER_BYTE = 1e-15


class TierLink:
    """Bytes in flight in one direction of a link, and the measured time per byte."""

    def __init__(self) -> None:
        self.bytes_under_way = 0
        self._s_per_byte: float | None = None
        self._ended_s = -math.inf

    def started(self, size_bytes: int) -> None:
        """A transfer starts."""
        self.bytes_under_way += size_bytes

    def ended(self, size_bytes: int) -> None:
        """A transfer has ended, successfully or not."""
        self.bytes_under_way -= size_bytes

    def transferred(self, size_bytes: int, started_s: float, now_s: float) -> None:
        """Record a successful transfer.

        Of concurrent transfers each counts from the end of the previous one. So the average is the
        throughput of the busy link, and not the latency of one transfer.
        """
        fresh = self.s_per_byte(now_s)
        took_s_per_byte = (now_s - max(self._ended_s, started_s)) / size_bytes
        self._ended_s = now_s
        if fresh is None:
            self._s_per_byte = took_s_per_byte
        else:
            self._s_per_byte = fresh + SMOOTHING * (took_s_per_byte - fresh)

    def s_per_byte(self, now_s: float) -> float | None:
        """The moving average; None without a transfer in the last RATE_FRESH_S."""
        return self._s_per_byte if now_s - self._ended_s <= RATE_FRESH_S else None


class LinkSpeed:
    """Speed of a store, in both directions."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.read = TierLink()
        self.written = TierLink()
        self._clock = clock
        self._known: float | None = None

    def bytes_per_s(self) -> float | None:
        """Speed of reads, the last known one. Before the first read, speed of recent writes."""
        now_s = self._clock()
        fresh = self.read.s_per_byte(now_s)
        if fresh is None and self._known is None:
            fresh = self.written.s_per_byte(now_s)
            return None if fresh is None else 1 / max(fresh, _MIN_S_PER_BYTE)
        if fresh is not None:
            self._known = 1 / max(fresh, _MIN_S_PER_BYTE)
        return self._known


def soonest(links: Sequence[TierLink], size_bytes: int, now_s: float) -> int:
    """Index of the link that should deliver `size_bytes` more bytes first; of equals, the fastest.

    A link of unknown speed is assumed to be as fast as the fastest known one, for one read at a
    time. Its speed becomes known at the cost of at most one slow block.
    """
    known = [rate for link in links if (rate := link.s_per_byte(now_s)) is not None]
    guess = min(known, default=1.0)

    def arrival_s(index: int) -> tuple[float, float]:
        link = links[index]
        rate = link.s_per_byte(now_s)
        if rate is None and link.bytes_under_way and known:
            return math.inf, guess
        rate = guess if rate is None else rate
        return (link.bytes_under_way + size_bytes) * rate, rate

    return min(range(len(links)), key=arrival_s)


def quickest(links: Sequence[TierLink], now_s: float) -> int:
    """Index of the fastest link, whatever is in flight; 0 if the speed of the first is unknown."""
    if links[0].s_per_byte(now_s) is None:
        return 0
    rates = [link.s_per_byte(now_s) or math.inf for link in links]
    return rates.index(min(rates))
