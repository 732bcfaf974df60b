"""The policy of "KVCache Cache in the Wild" (arXiv 2506.02634, section 4.2), and what any other
shares with it that knows how likely blocks are to be used again."""

from collections.abc import Callable, Hashable

from sglang_cake.store.eviction.base import BasePolicy, Usage
from sglang_cake.store.eviction.lanes import Lanes
from sglang_cake.store.eviction.reuse import MOST_TURNS, Fits, Kind, ReuseModel

LIFE_S = 30.0  # how far ahead a use counts; docs/eviction.md has what other values do


def kind_of(usage: Usage) -> Kind:
    """Request type x turn, as the paper has it, and whether the block was read since it was stored:
    what was, system prompts for one, comes back sooner than its neighbours (docs/eviction.md)."""
    return usage.use.workload, min(usage.use.turn, MOST_TURNS), min(usage.uses, 1)


# How much a class's own distribution counts; the rest is that of all classes together. With few
# samples the own one alone is wrong too often, and then what it is wrong about is lost.
TRUST = 0.5


class ReusePolicy(BasePolicy):
    """Implements `EvictionPolicy` but for what a block is worth: `lane` and `value`.

    Within a class of requests the probability of a use falls with the time since the last one, so
    an eviction looks at one block per lane.
    """

    def __init__(
        self,
        model: ReuseModel | None = None,
        life_s: float = LIFE_S,
        kind_of: Callable[[Usage], Kind] = kind_of,
        trust: float = TRUST,
    ) -> None:
        """Args: life_s: how far ahead a use counts; kind_of: the class of a block; trust: how much
        its own distribution counts, from 0 to 1."""
        super().__init__()
        self._trust = trust
        self._kind_of = kind_of
        self.model = model or ReuseModel()
        self._life_s = life_s
        self._lanes: Lanes[tuple[Hashable, ...]] = Lanes(self._lane_value)

    def lane(self, usage: Usage, kind: Kind) -> tuple[Hashable, ...]:
        """Where a block stands: of two in one lane, the less recently used is worth less."""
        return kind

    def kind_in(self, lane: tuple[Hashable, ...]) -> Kind:
        """The class that the blocks of a lane had when they were last used."""
        workload, turn, was_read = lane[:3]
        assert isinstance(workload, str)
        assert isinstance(turn, int)
        assert isinstance(was_read, int)
        return workload, turn, was_read

    def value(
        self, lane: tuple[Hashable, ...], usage: Usage, log_reuse: float
    ) -> tuple[float, ...]:
        """What a block is worth; the smallest goes first."""
        raise NotImplementedError

    def add(self, block: int, usage: Usage) -> None:
        kind = self._follow(usage)
        self._usage[block] = usage
        self._lanes.put(block, self.lane(usage, kind), usage.used_s)

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)
        self._lanes.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        block = self._lanes.pop(now_s)
        return None if block is None else (block, self._usage.pop(block))

    def skipped(self, usage: Usage) -> None:
        self._follow(usage)

    def chance(self, usage: Usage) -> float:
        share = self.model.fit(self.model.kind(self._kind_of(usage), usage.use.tenant)).share
        return self._trust * share + (1 - self._trust) * self.model.pooled.share

    def refresh(self, now_s: float) -> None:
        if self.model.refit(now_s):
            self._lanes.forget_values()

    def fits(self) -> Fits:
        return self.model.keep()

    def learned(self, fits: Fits, now_s: float) -> None:
        self.model.kept(fits, now_s)
        self._lanes.forget_values()

    def _follow(self, usage: Usage) -> Kind:
        """A block was used; returns its class."""
        kind = self.model.kind(self._kind_of(usage), usage.use.tenant)
        self.model.used(usage.ident, kind, usage.used_s)
        return kind

    def _lane_value(
        self, lane: tuple[Hashable, ...], block: int, now_s: float
    ) -> tuple[float, ...]:
        usage = self._usage[block]
        kind = self.kind_in(lane)
        age_s = max(0.0, now_s - usage.used_s)
        own = self.model.fit(kind).log_reuse(age_s, self._life_s)
        pooled = self.model.pooled.log_reuse(age_s, self._life_s)
        return self.value(lane, usage, self._trust * own + (1 - self._trust) * pooled)


class WorkloadPolicy(ReusePolicy):
    """Priority = (probability of a use within the coming life, -offset), compared as a tuple. With
    one class this is LRU."""

    def value(
        self, lane: tuple[Hashable, ...], usage: Usage, log_reuse: float
    ) -> tuple[float, ...]:
        return log_reuse, -float(usage.use.position)
