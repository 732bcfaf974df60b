"""When blocks are used again: a distribution per class of requests, fitted to what was seen lately.

"KVCache Cache in the Wild" (arXiv 2506.02634), section 3.4: within a class, the time until a block
is used again is exponential. Not every block is, so a class has two numbers: the share `share` of
its blocks that are used again at all, and the `rate_per_s` of those. For a block that was last used
t seconds ago, the probability of a use within the next `life` seconds is, by Bayes' rule,

    share e^(-rate t) (1 - e^(-rate life)) / (1 - share + share e^(-rate t))
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# A class of blocks: the workload and the turn of the last request that touched it, and whether it
# was read since it was stored (1) or never (0).
Kind = tuple[str, int, int]
MOST_TURNS: Final = 4  # later turns are like this one
MOST_KINDS: Final = 64  # further ones are taken together
MOST_OF_TENANT: Final = 16  # with names that one tenant brought first: others have theirs, too
OTHERS: Final[Kind] = ("", 0, 0)
POOLED: Final[Kind] = ("", 0, 1)  # all classes together, among fits that are kept

WINDOW_S: Final = 1800.0  # what is older says nothing any more
REFIT_EVERY_S: Final = 60.0
LEAST_SAMPLES: Final = 50  # a class with fewer is taken to be like all together
# A fit from before a restart stays until uses were followed for so many mean times of reuse: by
# then 95 % of those that come back have.
_FOLLOWED_MEANS: Final = 3.0
SHORTEST_GAP_S: Final = 1.0  # requests at the same moment: not what a store is for
_FOLLOWED_ONE_IN: Final = 8  # blocks, chosen by `ident`: the same ones again when they come back
_MOST_FOLLOWED: Final = 32_768
_MOST_GAPS: Final = 4096  # of one class
_BINS: Final = 64
_ROUNDS: Final = 20


@dataclass(frozen=True, slots=True)
class Fit:
    """What is known of one class."""

    share: float  # of its blocks that are used again
    rate_per_s: float  # 1 / mean time until then
    samples: int

    def log_reuse(self, age_s: float, life_s: float) -> float:
        """Logarithm of the probability of a use within `life_s`, for a block unused for `age_s`."""
        faded = self.share * math.exp(-min(700.0, self.rate_per_s * age_s))
        return (
            math.log(self.share)
            - self.rate_per_s * age_s
            + math.log(-math.expm1(-self.rate_per_s * life_s))
            - math.log(1 - self.share + faded)
        )


Fits = Mapping[Kind, Fit]
UNKNOWN: Final = Fit(0.3, 1 / 300, 0)


class ReuseModel:
    """Follows a sample of blocks, also past their eviction, and fits each class now and then.

    Args:
        window_s, least_samples, shortest_gap_s: as the constants say.
    """

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        least_samples: int = LEAST_SAMPLES,
        shortest_gap_s: float = SHORTEST_GAP_S,
    ) -> None:
        self._window_s, self._least_samples = window_s, least_samples
        self._shortest_gap_s = shortest_gap_s
        self._open: OrderedDict[int, tuple[Kind, float]] = OrderedDict()  # ident -> last use
        self._gaps: dict[Kind, deque[tuple[float, float]]] = {}  # (when, how long)
        self._refit_at_s = self._since_s = -math.inf
        self._kept: dict[Kind, Fit] = {}  # from before a restart, as long as they stand
        self.fits: dict[Kind, Fit] = {}
        self.pooled = UNKNOWN
        self.kinds: set[Kind] = set()  # no more than MOST_KINDS
        self._brought: Counter[int] = Counter()  # named classes, by the tenant that was first

    def kind(self, kind: Kind, tenant: int = 0) -> Kind:
        """The class that stands for this one: itself, while there are not too many.

        Args: tenant: whose request it is; 0: nobody's in particular.
        """
        if kind not in self.kinds:
            named = bool(kind[0] and tenant)
            if len(self.kinds) >= MOST_KINDS or (named and self._brought[tenant] >= MOST_OF_TENANT):
                return OTHERS
            self.kinds.add(kind)
            self._brought[tenant] += named
        return kind

    def fit(self, kind: Kind) -> Fit:
        """What is known of a class, or else of all."""
        return self.fits.get(kind, self.pooled)

    def keep(self) -> Fits:
        """What should outlive a restart; empty as long as nothing was learned."""
        return self.fits if self.pooled == UNKNOWN else {**self.fits, POOLED: self.pooled}

    def kept(self, fits: Fits, now_s: float) -> None:
        """What was kept before a restart, at most MOST_KINDS of it.

        Uses from before `now_s` are no samples from here on: the books have only blocks that were
        neither evicted nor used again since.
        """
        self._since_s = now_s
        self._kept = dict(sorted(fits.items(), key=lambda one: -one[1].samples)[: MOST_KINDS + 1])
        self.pooled = self._kept.get(POOLED, self.pooled)
        self.fits.update((kind, fit) for kind, fit in self._kept.items() if kind != POOLED)

    def used(self, ident: int, kind: Kind, at_s: float) -> None:
        """A request used a block, which is of class `kind` now."""
        if at_s < self._since_s or (ident * 0x9E3779B97F4A7C15 >> 32) % _FOLLOWED_ONE_IN:
            return
        before = self._open.get(ident)
        if before is not None:
            gap_s = at_s - before[1]
            if gap_s >= self._shortest_gap_s:
                gaps = self._gaps.setdefault(before[0], deque(maxlen=_MOST_GAPS))
                gaps.append((at_s, gap_s))
            elif gap_s <= 0:
                return
        self._open[ident] = (kind, at_s)
        self._open.move_to_end(ident)
        if len(self._open) > _MOST_FOLLOWED:
            self._open.popitem(last=False)

    def refit(self, now_s: float) -> bool:
        """Fit every class anew if it is time; whether that was done. Tens of milliseconds."""
        if now_s < self._refit_at_s:
            return False
        self._refit_at_s = now_s + REFIT_EVERY_S
        since_s = now_s - self._window_s
        for ident, (_, at_s) in list(self._open.items()):
            if at_s < since_s:
                del self._open[ident]
        ages: dict[Kind, list[float]] = {}
        for kind, at_s in self._open.values():
            ages.setdefault(kind, []).append(now_s - at_s)
        all_gaps: list[float] = []
        for kind in ages.keys() | self._gaps.keys():
            recent = self._gaps.get(kind, deque())
            while recent and recent[0][0] < since_s:
                recent.popleft()
            gaps = [gap_s for _, gap_s in recent]
            all_gaps += gaps
            if self._enough(kind, len(gaps) + len(ages.get(kind, ())), now_s):
                self.fits[kind] = fit_exponential(gaps, ages.get(kind, ()))
        all_ages = [age_s for some in ages.values() for age_s in some]
        if self._enough(POOLED, len(all_gaps) + len(all_ages), now_s):
            self.pooled = fit_exponential(all_gaps, all_ages)
        return True

    def _enough(self, kind: Kind, samples: int, now_s: float) -> bool:
        """Whether a class is fitted to what was seen. Soon after a restart hardly any block has
        come back, and a fit would say that none ever does: the kept one stands."""
        if samples < self._least_samples:
            return False
        kept = self._kept.get(kind)
        if kept is not None:
            followed_s = min(self._window_s, _FOLLOWED_MEANS / kept.rate_per_s)
            if now_s - self._since_s < followed_s:
                return False
            del self._kept[kind]
        return True


def fit_exponential(gaps: Sequence[float], ages: Sequence[float]) -> Fit:
    """Maximum likelihood by expectation maximisation.

    Args:
        gaps: seconds after which blocks were used again.
        ages: for how long others have not been used; each may or may not be one that will be.
    """
    total = len(gaps) + len(ages)
    binned = _binned(ages)
    gap_sum = sum(gaps)
    share = max(1e-4, len(gaps) / total)
    rate = len(gaps) / gap_sum if gap_sum > 0 else 1 / (1 + max(ages, default=0.0))
    for _ in range(_ROUNDS):
        expected = waited = 0.0  # of `ages`: how many will be used again, and their sum
        for age_s, count in binned:
            faded = share * math.exp(-min(700.0, rate * age_s))
            weight = count * faded / (1 - share + faded)
            expected += weight
            waited += weight * age_s
        share = min(0.999, max(1e-4, (len(gaps) + expected) / total))
        if gaps:
            rate = max(1e-6, len(gaps) / max(1e-9, gap_sum + waited))
    return Fit(share, rate, total)


def _binned(ages: Sequence[float]) -> Iterable[tuple[float, int]]:
    """(mean, count) of at most _BINS groups of about equal values."""
    if not ages:
        return []
    width = max(ages) / _BINS or 1.0
    groups: dict[int, list[float]] = {}
    for age_s in ages:
        groups.setdefault(int(age_s / width), []).append(age_s)
    return [(sum(group) / len(group), len(group)) for group in groups.values()]
