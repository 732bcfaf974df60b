"""A speed that changes with time: a shared device, a shared link."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speed:
    """Piecewise constant. `values[i]` holds from `times_s[i]` on; the last one for ever.

    1 is the full speed. A speed of 0 stands still, which the last one must not.
    """

    times_s: tuple[float, ...] = (0.0,)
    values: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        grows = all(a < b for a, b in zip(self.times_s, self.times_s[1:], strict=False))
        if len(self.times_s) != len(self.values) or not self.times_s or not grows:
            raise ValueError("a speed needs a growing time for each value")
        if self.times_s[0] != 0 or min(self.values) < 0 or self.values[-1] <= 0:
            raise ValueError("a speed starts at time 0, is never negative, and ends above 0")

    def done_s(self, begin_s: float, work_s: float) -> float:
        """When work that takes `work_s` at full speed is done if it begins at `begin_s`."""
        i = bisect_right(self.times_s, begin_s) - 1
        now, left = begin_s, work_s
        while i + 1 < len(self.times_s):
            possible = (self.times_s[i + 1] - now) * self.values[i]
            if possible >= left:
                break
            left -= possible
            i += 1
            now = self.times_s[i]
        return now + left / self.values[i] if left > 0 else now

    def work_s(self, begin_s: float, end_s: float) -> float:
        """How much work, in seconds at full speed, fits into `[begin_s, end_s)`."""
        total, stops = 0.0, (*self.times_s[1:], max(end_s, self.times_s[-1]))
        for start_s, stop_s, value in zip(self.times_s, stops, self.values, strict=True):
            total += max(0.0, min(stop_s, end_s) - max(start_s, begin_s)) * value
        return total
