"""Which tier a block is read from: the one that should have it here first.

Reads of one tier share its link, so a tier with `n` bytes under way needs about
`(n + block) / bandwidth` seconds for one more. Sending every read where that is smallest keeps all
links busy and gives the sum of their bandwidths; tiers that share a bottleneck show it in what is
measured, and then nothing is gained and nothing lost.
"""

import math
from collections.abc import Sequence

RATE_FRESH_S = 60.0  # an older measurement says nothing: the tier may have been busy then
SMOOTHING = 0.3  # weight of the newest block in the moving average


class TierLink:
    """What is known of one tier's reads: bytes under way, and how long a byte takes.

    Times are seconds of any one steady clock.
    """

    def __init__(self) -> None:
        self.bytes_under_way = 0
        self._s_per_byte: float | None = None
        self._landed_s = float("-inf")

    def started(self, size_bytes: int) -> None:
        """A read goes there."""
        self.bytes_under_way += size_bytes

    def ended(self, size_bytes: int) -> None:
        """A read is over, whatever came of it."""
        self.bytes_under_way -= size_bytes

    def landed(self, size_bytes: int, started_s: float, now_s: float) -> None:
        """All bytes of a read are here.

        Of several reads under way each counts from the landing before it, so that the average is
        what the link does while it is busy, and not what one read sees.
        """
        fresh = self.s_per_byte(now_s)
        took_s_per_byte = (now_s - max(self._landed_s, started_s)) / size_bytes
        self._landed_s = now_s
        if fresh is None:
            self._s_per_byte = took_s_per_byte
        else:
            self._s_per_byte = fresh + SMOOTHING * (took_s_per_byte - fresh)

    def s_per_byte(self, now_s: float) -> float | None:
        """The moving average; None if nothing landed lately."""
        return self._s_per_byte if now_s - self._landed_s <= RATE_FRESH_S else None


def soonest(links: Sequence[TierLink], size_bytes: int, now_s: float) -> int:
    """Index of the link that should have `size_bytes` more here first; of equals the faster.

    A link of unknown speed is taken to be as fast as the fastest known, for one read at a time:
    that is how it becomes known, at the cost of at most one late block.
    """
    known = [rate for link in links if (rate := link.s_per_byte(now_s)) is not None]
    guess = min(known, default=1.0)

    def arrival_s(index: int) -> tuple[float, float]:
        link, rate = links[index], links[index].s_per_byte(now_s)
        if rate is None and link.bytes_under_way and known:
            return float("inf"), guess
        rate = guess if rate is None else rate
        return (link.bytes_under_way + size_bytes) * rate, rate

    return min(range(len(links)), key=arrival_s)


def quickest(links: Sequence[TierLink], now_s: float) -> int:
    """Index of the link that takes least for a byte, whatever is under way on it; the first, if its
    speed is not known."""
    first = links[0].s_per_byte(now_s)
    if first is None:
        return 0
    rates = [link.s_per_byte(now_s) or math.inf for link in links]
    return rates.index(min(rates))
