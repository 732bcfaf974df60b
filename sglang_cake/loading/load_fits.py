"""What loads cost where a store is made of several: each of its sources has costs of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from sglang_cake.loading.cost_model import LoadCost, LoadFit

MOST_SOURCES = 8  # further ones count as the last of these
# What was measured longer ago is doubted: a source that was slow, so that nothing is loaded from
# it, would never be known to be fast again.
DOUBT_S = 60.0
# A read may take so many times what was measured, but at least LATE_S; before anything was measured
# it may take FIRST_S.
LATE_TIMES, LATE_S, FIRST_S = 8.0, 5.0, 30.0


class LoadFits:
    """A `LoadFit` for each source. Times are of any one steady clock.

    A landing counts for the source that the block came from, for the time since any block landed:
    so the times add up, also where sources are read together.

    Args:
        prior: of every source that nothing was read from yet.
    """

    def __init__(self, prior: LoadCost) -> None:
        self._prior = prior
        self._fits = [LoadFit(prior)]
        self._heard_s = [-math.inf]  # by source
        self._newest = self._fits[0]

    @property
    def newest(self) -> LoadCost:
        """Of the source that was read last."""
        return self._newest.cost

    @property
    def all(self) -> list[LoadCost | None]:
        """By source; None where nothing is known."""
        return [fit.cost if fit.measured else None for fit in self._fits]

    def is_new(self, source: int) -> bool:
        """Whether nothing is known of the source."""
        return not self._fits[self._known(source)].measured

    def recall(self, costs: Sequence[LoadCost | None], now_s: float) -> None:
        """What an earlier process had learned (`all`) takes the place of the prior."""
        for source, cost in enumerate(costs[:MOST_SOURCES]):
            if cost is not None:
                self._heard(source, now_s).recall(cost)

    def landed(
        self, source: int, took_s: float, now_s: float, *, first: bool, came_s: float = 0.0
    ) -> None:
        """As `LoadFit.landed` and `LoadFit.came`, now."""
        self._newest = self._heard(source, now_s)
        self._newest.landed(took_s, first=first)
        self._newest.came(came_s)

    def copied(self, took_s: float) -> None:
        """As `LoadFit.copied`: a copy does not know where the block came from."""
        for fit in self._fits:
            fit.copied(took_s)

    def of(self, blocks: Mapping[int, int], now_s: float) -> LoadCost:
        """What an average block costs, of `{source: how many blocks}`; of none, the newest. Of a
        source that nothing was heard of for DOUBT_S, the best that it did."""
        total = sum(blocks.values())
        if not total:
            return self.newest
        shares = [(self._cost(s, now_s), count / total) for s, count in blocks.items() if count]
        if len(shares) == 1:  # of almost every prompt; asked at every landing, for each that waits
            return shares[0][0]
        columns = zip(*(astuple(cost) for cost, _ in shares), strict=True)
        means = (
            sum(value * share for value, (_, share) in zip(column, shares, strict=True))
            for column in columns
        )
        latency_s, block_s, copy_s, error, coming_s, _ = means
        return LoadCost(latency_s, block_s, copy_s, error, coming_s, self._prior.depth)

    def limit_s(self, source: int, now_s: float) -> float:
        """How long a read from there may take, with all that share the link with it."""
        if self.is_new(source):
            return FIRST_S
        cost = self._cost(source, now_s)
        return max(LATE_S, LATE_TIMES * (cost.latency_s + cost.depth * cost.block_s))

    def _cost(self, source: int, now_s: float) -> LoadCost:
        source = self._known(source)
        fit = self._fits[source]
        return fit.best if now_s - self._heard_s[source] > DOUBT_S else fit.cost

    def _heard(self, source: int, now_s: float) -> LoadFit:
        source = self._known(source)
        self._heard_s[source] = now_s
        return self._fits[source]

    def _known(self, source: int) -> int:
        """Its place; one that is new gets one."""
        source = min(source, MOST_SOURCES - 1)
        while len(self._fits) <= source:
            self._fits.append(LoadFit(self._prior))
            self._heard_s.append(-math.inf)
        return source
