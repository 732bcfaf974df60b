"""What loads cost where a store is made of several: each of its sources has costs of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple

from sglang_cake.read.cost import LoadCost, LoadFit

MOST_SOURCES = 8  # further ones count as the last of these


class LoadFits:
    """A `LoadFit` for each source. A landing counts for the source that the block came from, for
    the time since any block landed: so the times add up, also where sources are read together.

    Args:
        prior: of every source that nothing was read from yet.
    """

    def __init__(self, prior: LoadCost) -> None:
        self._prior = prior
        self._fits = [LoadFit(prior)]
        self._newest = self._fits[0]

    @property
    def newest(self) -> LoadCost:
        """Of the source that was read last."""
        return self._newest.cost

    @property
    def all(self) -> list[LoadCost]:
        """By source."""
        return [fit.cost for fit in self._fits]

    def recall(self, costs: Sequence[LoadCost]) -> None:
        """What an earlier process had learned, by source, takes the place of the prior."""
        for source, cost in enumerate(costs[:MOST_SOURCES]):
            self._fit(source).recall(cost)

    def landed(self, source: int, took_s: float, *, first: bool) -> None:
        """As `LoadFit.landed`."""
        self._newest = self._fit(source)
        self._newest.landed(took_s, first=first)

    def copied(self, took_s: float) -> None:
        """As `LoadFit.copied`: a copy does not know where the block came from."""
        for fit in self._fits:
            fit.copied(took_s)

    def of(self, blocks: Mapping[int, int]) -> LoadCost:
        """What an average block costs, of `{source: how many blocks}`; of none, the newest."""
        total = sum(blocks.values())
        if not total:
            return self.newest
        shares = [(self._fit(s).cost, count / total) for s, count in blocks.items() if count]
        columns = zip(*(astuple(cost) for cost, _ in shares), strict=True)
        means = (
            sum(value * share for value, (_, share) in zip(column, shares, strict=True))
            for column in columns
        )
        latency_s, block_s, copy_s, error, _ = means
        return LoadCost(latency_s, block_s, copy_s, error, self._prior.depth)

    def _fit(self, source: int) -> LoadFit:
        source = min(source, MOST_SOURCES - 1)
        while len(self._fits) <= source:
            self._fits.append(LoadFit(self._prior))
        return self._fits[source]
