"""Reuse time of blocks: one distribution per request class, fitted to recent accesses.

Source: "KVCache Cache in the Wild" (arXiv 2506.02634), section 3.4: within a class, the time from
one access of a block to the next is exponential. Some blocks are never accessed again. So a class
has two parameters: the `share` of its blocks that are accessed again, and their rate `rate_per_s`.
By Bayes' rule, a block that was last accessed t seconds ago is accessed within the next
`life_s` seconds with probability

    share e^(-rate t) (1 - e^(-rate life_s)) / (1 - share + share e^(-rate t))
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple

# (workload, turn, whether the block was read since it was written: 0 or 1), as of the last request
# that accessed the block. Section 4.2 of the paper has the first two.
RequestClass = tuple[str, int, int]
MAX_TURN: Final = 4  # later turns count as this one
# Classes with a workload. Those without one are few, and always told apart.
MAX_CLASSES: Final = 64
MAX_CLASSES_PER_TENANT: Final = 16  # that the tenant was first to use
POOLED: Final[RequestClass] = ("", 0, 1)  # all classes together, among saved fits

REFIT_EVERY_S: Final = 60.0
# After a restart a saved fit is kept until accesses were observed for this many mean reuse times.
# By then 95 % of the blocks that are accessed again have been.
_OBSERVED_MEANS: Final = 3.0
_SAMPLE_ONE_IN: Final = 8  # blocks, selected by `ident`: a block stays in or out of the sample
MAX_SAMPLES: Final = 32_768  # accesses; at more, half of the blocks leave the sample
_BINS: Final = 64
_EM_ITERATIONS: Final = 20


@dataclass(frozen=True, slots=True)
class ReuseFit:
    """Fitted distribution of the reuse time of one class."""

    share: float  # of its blocks that are accessed again
    rate_per_s: float  # 1 / mean time to the next access of these blocks
    samples: int

    def log_reuse(self, age_s: float, life_s: float) -> float:
        """Logarithm of the probability of an access within the next `life_s` seconds, `age_s` after
        the last one."""
        faded = self.share * math.exp(-min(700.0, self.rate_per_s * age_s))
        return (
            math.log(self.share)
            - self.rate_per_s * age_s
            + math.log(-math.expm1(-self.rate_per_s * life_s))
            - math.log(1 - self.share + faded)
        )


ReuseFits = Mapping[RequestClass, ReuseFit]
# Gives the context in which the lock that the caller holds is released.
Unlocked = Callable[[], AbstractContextManager[None]]
PRIOR_FIT: Final = ReuseFit(0.3, 1 / 300, 0)


class _SampledAccess(NamedTuple):
    request_class: RequestClass
    at_s: float


class _Gap(NamedTuple):
    ident: int
    access: _SampledAccess  # the earlier one
    gap_s: float  # to the next one


class ReuseModel:
    """Samples accesses to blocks, also to evicted ones, and fits each class once a minute.

    Attributes:
        fits: by class, for classes that ever had enough samples.
        pooled: fit of all classes together.
        classes: classes with a workload that are told apart, at most MAX_CLASSES, with the tenant
            that was first to use them.
        window_s: older accesses are dropped.
        min_samples: a fit needs as many. A class has the pooled fit before its first one, and keeps
            its last one while it has fewer: it says more of the class than the pooled fit does.
        min_gap_s: closer accesses belong to concurrent requests.
    """

    window_s = 1800.0
    min_samples = 50
    min_gap_s = 1.0

    def __init__(self) -> None:
        self._last_access: dict[int, _SampledAccess] = {}  # of sampled blocks, by ident
        self._gaps: list[_Gap] = []
        self._one_in = _SAMPLE_ONE_IN
        self._refit_at_s = -math.inf
        self._since_s = -math.inf  # earlier accesses are ignored
        self._resumed: dict[RequestClass, ReuseFit] = {}  # saved fits that are not replaced yet
        self.fits: dict[RequestClass, ReuseFit] = {}
        self.pooled = PRIOR_FIT
        self.classes: dict[RequestClass, int] = {}
        self._idle: set[RequestClass] = set()  # of `classes`, those that may be forgotten

    @property
    def samples(self) -> int:
        return len(self._last_access) + len(self._gaps)

    def class_for(self, request_class: RequestClass, tenant: int = 0) -> RequestClass:
        """The class under which a request is counted: its own, or above the limits the one of
        requests without a workload.

        A class takes the place of one that has neither blocks nor accesses.

        Args:
            tenant: hash of the tenant; 0: unknown, and exempt from MAX_CLASSES_PER_TENANT.
        """
        workload, turn, was_read = request_class
        if not workload:
            return request_class
        self._idle.discard(request_class)
        if request_class in self.classes:
            return request_class
        rivals = [known for known, owner in self.classes.items() if tenant and owner == tenant]
        if len(rivals) < MAX_CLASSES_PER_TENANT:
            rivals = list(self.classes) if len(self.classes) >= MAX_CLASSES else []
        if rivals:
            idle = self._idle.intersection(rivals)
            if not idle:
                return "", turn, was_read
            gone = idle.pop()
            self._idle.remove(gone)
            del self.classes[gone]
            self.fits.pop(gone, None)
        self.classes[request_class] = tenant
        return request_class

    def fit(self, request_class: RequestClass) -> ReuseFit:
        """Fit of a class, or the pooled fit if the class has none."""
        return self.fits.get(request_class, self.pooled)

    def fits_to_save(self) -> ReuseFits:
        """All fits, with the pooled one under POOLED; empty while nothing was learned."""
        return self.fits if self.pooled == PRIOR_FIT else {**self.fits, POOLED: self.pooled}

    def resume(self, fits: ReuseFits, now_s: float) -> None:
        """Continue with the saved fits of the MAX_CLASSES classes with the most samples.

        Accesses before `now_s` are ignored from here on. The index would give only those of blocks
        that were neither evicted nor accessed again, and so a biased sample.
        """
        self._since_s = now_s
        by_samples = sorted(fits.items(), key=lambda item: -item[1].samples)
        self._resumed = dict(by_samples[: MAX_CLASSES + 1])
        self.pooled = self._resumed.get(POOLED, self.pooled)
        for request_class, fit in self._resumed.items():
            if request_class != POOLED:
                self.fits[request_class] = fit

    def record_access(self, ident: int, request_class: RequestClass, at_s: float) -> None:
        if at_s < self._since_s or not self._is_sampled(ident):
            return
        before = self._last_access.get(ident)
        if before is not None:
            gap_s = at_s - before.at_s
            if gap_s < 0:
                return
            if gap_s >= self.min_gap_s:
                self._gaps.append(_Gap(ident, before, gap_s))
        self._last_access[ident] = _SampledAccess(request_class, at_s)
        if self.samples > MAX_SAMPLES:
            # The same blocks leave both parts: a bound for each of them would change their ratio,
            # and so the share, by how busy the class and the store are.
            self._one_in *= 2
            self._last_access = {
                block: access
                for block, access in self._last_access.items()
                if self._is_sampled(block)
            }
            self._gaps = [gap for gap in self._gaps if self._is_sampled(gap.ident)]

    def _is_sampled(self, ident: int) -> bool:
        return not (ident * 0x9E3779B97F4A7C15 >> 32) % self._one_in

    def refit(
        self,
        now_s: float,
        present: Callable[[], Collection[RequestClass]] = tuple,
        unlocked: Unlocked = contextlib.nullcontext,
    ) -> bool:
        """Fit all classes, at most every REFIT_EVERY_S; whether it did. Takes tens of ms, most of
        them `unlocked`.

        Args:
            present: gives the classes of all blocks.
            unlocked: see `Unlocked`. Other calls may come meanwhile.
        """
        if now_s < self._refit_at_s:
            return False
        self._refit_at_s = now_s + REFIT_EVERY_S
        since_s = now_s - self.window_s
        accesses = self._last_access.copy()
        gaps_before = self._gaps
        gap_count = len(gaps_before)
        with unlocked():
            old = [(ident, access) for ident, access in accesses.items() if access.at_s < since_s]
            recent_gaps = [gap for gap in gaps_before[:gap_count] if gap.access.at_s >= since_s]
            # Blocks without a further access yet are censored samples: only their age is known.
            # After the clock was set back, accesses lie in the future.
            ages: dict[RequestClass, list[float]] = {}
            for access in accesses.values():
                if access.at_s < since_s:
                    continue
                ages.setdefault(access.request_class, []).append(max(0.0, now_s - access.at_s))
            gaps: dict[RequestClass, list[float]] = {}
            for gap in recent_gaps:
                gaps.setdefault(gap.access.request_class, []).append(gap.gap_s)
            fits: dict[RequestClass, ReuseFit] = {}
            sampled = ages.keys() | gaps.keys()
            for request_class in sampled:
                class_gaps, class_ages = gaps.get(request_class, []), ages.get(request_class, [])
                if self._can_fit(request_class, len(class_gaps) + len(class_ages), now_s):
                    fits[request_class] = fit_exponential(class_gaps, class_ages)
            all_gaps = [gap.gap_s for gap in recent_gaps]
            all_ages = [age_s for class_ages in ages.values() for age_s in class_ages]
            if self._can_fit(POOLED, len(all_gaps) + len(all_ages), now_s):
                fits[POOLED] = fit_exponential(all_gaps, all_ages)
        for ident, access in old:
            if self._last_access.get(ident) is access:
                del self._last_access[ident]
        if self._gaps is gaps_before:  # otherwise some left the sample; the next fit drops old ones
            self._gaps = recent_gaps + gaps_before[gap_count:]
        if self._one_in > _SAMPLE_ONE_IN and self.samples < MAX_SAMPLES // 4:
            self._one_in //= 2
        # A class that was used meanwhile has blocks.
        self._idle = self.classes.keys() - sampled - set(present())
        self.pooled = fits.pop(POOLED, self.pooled)
        self.fits.update(fits)
        return True

    def _can_fit(self, request_class: RequestClass, samples: int, now_s: float) -> bool:
        """Whether the samples of a class replace its fit.

        Soon after a restart hardly any block was accessed again, and a fit would give a share near
        0. The saved fit stays until accesses were observed for long enough.
        """
        if samples < self.min_samples:
            return False
        resumed = self._resumed.get(request_class)
        if resumed is not None:
            observed_s = min(self.window_s, _OBSERVED_MEANS / resumed.rate_per_s)
            if now_s - self._since_s < observed_s:
                return False
            del self._resumed[request_class]
        return True


def fit_exponential(gaps: Sequence[float], ages: Sequence[float]) -> ReuseFit:
    """Maximum-likelihood fit, by expectation maximisation with _EM_ITERATIONS steps.

    Args:
        gaps: seconds between two accesses of a block.
        ages: seconds since the last access of blocks without a further one (censored samples).
            Each may or may not be accessed again. `gaps` and `ages` must not both be empty.
    """
    total = len(gaps) + len(ages)
    binned = _binned(ages)
    gap_sum_s = sum(gaps)
    share = max(1e-4, len(gaps) / total)
    rate_per_s = len(gaps) / gap_sum_s if gap_sum_s > 0 else 1 / (1 + max(ages, default=0.0))
    for _ in range(_EM_ITERATIONS):
        expected = 0.0  # how many of `ages` will be accessed again
        waited_s = 0.0  # sum of the ages of these
        for age_s, count in binned:
            faded = share * math.exp(-min(700.0, rate_per_s * age_s))
            weight = count * faded / (1 - share + faded)
            expected += weight
            waited_s += weight * age_s
        share = min(0.999, max(1e-4, (len(gaps) + expected) / total))
        if gaps:
            rate_per_s = max(1e-6, len(gaps) / max(1e-9, gap_sum_s + waited_s))
    return ReuseFit(share, rate_per_s, total)


def _binned(ages: Sequence[float]) -> Iterable[tuple[float, int]]:
    """(mean, count) of at most _BINS bins of equal width."""
    if not ages:
        return []
    width = max(ages) / _BINS or 1.0
    bins: dict[int, list[float]] = {}
    for age_s in ages:
        bins.setdefault(int(age_s / width), []).append(age_s)
    return [(sum(members) / len(members), len(members)) for members in bins.values()]
