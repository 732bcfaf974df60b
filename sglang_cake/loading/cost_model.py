"""The costs of computing and of loading, learned from every step and every fetched block.

The parts of both, and how wrong costs are corrected, are in docs/scheduling.md#costs. Pure: no
clock, no threads, no files.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

# Weight that an observation keeps after one more: about the last 50 steps count.
_KEEP = 0.98
# An observation that misses the prediction by more than this share counts as missing it by that.
_OUTLIER = 1.0
# Weight of the prior: the squared noise of a step (0.05) over that of a guess (0.7).
_PRIOR_WEIGHT = 0.005
_SHORTEST_S = 1e-6  # a shorter time is no step
_LONGEST_S = 1e4  # neither is a longer one
_TINY_S = 1e-9
_GUESS_ERROR = 0.5  # assumed while a cost was never measured
_FIRST_ERROR = 0.25  # assumed after one observation
# Shorter steps show the fixed part of a step, and nothing of the cost of a token.
_TELLING_TOKENS = 32
_GROUP_BLOCKS = 4  # the least in a group; reads in flight together end together
_NEWEST_BLOCKS = 0.4  # weight of the newest group in the time per block, if it has the least
_NEWEST_ERROR = 0.1  # weight of its miss in the mean miss
_NEWEST_LATENCY = 0.2
_SLOWEST_GROUP = 8.0  # a group counts as at most this many times the average

# Units that bring the five features of a step to about the same size.
_UNIT = np.array((1.0, 512.0, 512.0 * 512.0, 8.0, 8192.0))

# How far off the prior may be at least, where nothing is known, as a share of the first step.
_UNKNOWN = np.array((0.2, 0.0, 0.0, 0.2, 0.0))
# A remembered cost may be off by at least this share of the model's guess: one of 0 would be taken
# for certain otherwise. With a larger share, noise of short steps hides a cost far below the guess.
_GUESS_DOUBT = 0.15
# SGLang runs no graph that would pad a step to more than so many times its tokens.
_MOST_PADDING = 2

MOST_TIERS = 8  # further tiers count as the last of these
NO_TIER = 255
# Costs measured longer ago do not count. Otherwise a tier that was slow, so that nothing is loaded
# from it, would never be known to be fast again.
DOUBT_S = 60.0
# A read may take so many times the measured time, and at least LEAST_LIMIT_S. Before anything was
# measured it may take FIRST_LIMIT_S.
LIMIT_TIMES = 8.0
LEAST_LIMIT_S = 5.0
FIRST_LIMIT_S = 30.0

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Predicted seconds of prefill steps. `pair_s` is per (query, key) pair, causal.

    Attributes:
        prefix_s: seconds per step and token of the prefix; 0: the model has no such cost.
        graph_tokens: sizes of the graphs that run steps, ascending.
    """

    fixed_s: float
    token_s: float
    pair_s: float
    decode_s: float = 0.0  # seconds per request that decodes in the same step
    error: float = _GUESS_ERROR  # mean share by which predictions missed lately
    prefix_s: float = 0.0
    graph_tokens: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that are learned: all fields but the sizes of graphs, in their order."""
        return astuple(self)[:-1]

    def with_numbers(self, numbers: Sequence[float]) -> "PrefillCost":
        """The cost with other `numbers`. Raises: ValueError for another count of them."""
        fixed_s, token_s, pair_s, decode_s, error, prefix_s = numbers
        return PrefillCost(fixed_s, token_s, pair_s, decode_s, error, prefix_s, self.graph_tokens)

    @property
    def guessed(self) -> bool:
        """Whether the cost of a token was never measured, or measurements disagree too much."""
        return self.error >= _GUESS_ERROR

    @classmethod
    def prior(
        cls,
        *,
        hidden: int,
        on_gpu: bool,
        prefix_flops: float = 0.0,
        graph_tokens: tuple[int, ...] = (),
    ) -> "PrefillCost":
        """The guess before anything was measured: of a dense transformer, with 24 h^2 FLOPs per
        token and layer in matrix products and 4 h per pair in attention. The absolute numbers are
        those of an average machine; the first measured step replaces them.

        Args:
            prefix_flops: FLOPs of a layer in a step, per token of the prefix (MLA).
            graph_tokens: sizes of the graphs that run steps, ascending.
        """
        token_s = 1e-4 if on_gpu else 1e-3
        return cls(
            0.01,
            token_s,
            token_s / (6 * hidden),
            8 * token_s,
            prefix_s=token_s * prefix_flops / (24 * hidden**2),
            graph_tokens=graph_tokens,
        )

    def padded(self, tokens: int) -> int:
        """The tokens that a step computes to prefill so many."""
        i = bisect_left(self.graph_tokens, tokens)
        if i == len(self.graph_tokens) or self.graph_tokens[i] > _MOST_PADDING * tokens:
            return tokens  # no graph runs it
        return self.graph_tokens[i]

    def step_s(self, start: int, stop: int) -> float:
        """One step over tokens `[start, stop)`; an empty one takes no time."""
        return self.work_s(work_of(start, stop)) if stop > start else 0.0

    def span_s(self, start: int, stop: int, chunk_tokens: int) -> float:
        """All steps of at most `chunk_tokens` over `[start, stop)`."""
        if stop - start <= chunk_tokens:
            return self.step_s(start, stop)
        more = -(-(stop - start) // chunk_tokens) - 1  # whole steps before the last
        last = start + more * chunk_tokens
        prefix = more * start + chunk_tokens * more * (more - 1) / 2
        return (
            self.step_s(last, stop)
            + more * (self.fixed_s + self.token_s * self.padded(chunk_tokens))
            + self.pair_s * pairs(start, last)
            + self.prefix_s * prefix
        )

    def work_s(self, work: "StepWork") -> float:
        """One step that does `work`."""
        return (
            self.fixed_s
            + self.token_s * self.padded(work.tokens)
            + self.pair_s * work.pairs
            + self.decode_s * work.decodes
            + self.prefix_s * work.prefix_tokens
        )

    def queue_s(self, work: "StepWork", chunk_tokens: int) -> float:
        """The fewest steps of at most `chunk_tokens` that do `work`."""
        steps = -(-work.tokens // chunk_tokens)
        return self.work_s(work) + (steps - 1) * self.fixed_s if steps else 0.0

    def beside(self, others: "StepWork") -> "PrefillCost":
        """The cost of a part of steps that do `others` as well, which is a fixed cost to it. Where
        others prefill, the part's own tokens do not say which graph runs the step."""
        graph_tokens = () if others.tokens else self.graph_tokens
        return replace(self, fixed_s=self.work_s(others), graph_tokens=graph_tokens)


def pairs(start: float, stop: float) -> float:
    """(query, key) pairs of tokens `[start, stop)`: each attends to itself and all before it."""
    tokens = stop - start
    return tokens * start + tokens * (tokens + 1) / 2


class StepWork(NamedTuple):
    """The work of one step: prefilled spans of every request in it, and requests that decode.

    Attributes:
        prefix_tokens: tokens before these spans.
    """

    tokens: int = 0
    pairs: float = 0.0
    decodes: int = 0
    prefix_tokens: int = 0

    def __add__(self, other: "StepWork") -> "StepWork":  # type: ignore[override]  # the sum, not both
        return StepWork(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.decodes + other.decodes,
            self.prefix_tokens + other.prefix_tokens,
        )


def total_work(works: Iterable[StepWork]) -> StepWork:
    """All that `works` do."""
    return StepWork(*map(sum, zip(*works, strict=True)))


def work_of(start: int, stop: int) -> StepWork:
    """The work of prefilling `[start, stop)` in one step."""
    if stop <= start:
        return StepWork()
    return StepWork(stop - start, pairs(start, stop), prefix_tokens=start)


class PrefillFit:
    """Least squares over recent steps, with forgetting, robust to outliers, never negative.

    Args:
        prior: used while little was measured. Its absolute scale follows the measurements from the
            first one on, and its proportions slowly.
    """

    def __init__(self, prior: PrefillCost) -> None:
        self._guess = _vector(prior)
        self._prior = self._guess
        self._scale = 1.0
        self._least_spread: Matrix = np.zeros(5)  # of the prior
        self._products: Matrix = np.zeros((5, 5))  # sum of w x x'
        self._targets: Matrix = np.zeros(5)  # sum of w x y
        self._graph_tokens = prior.graph_tokens
        self._has_prefix_cost = prior.prefix_s > 0
        self._seen = 0
        self.cost = prior

    @property
    def measured(self) -> bool:
        """Whether any step was observed."""
        return self._seen > 0

    def recall(self, cost: PrefillCost) -> None:
        """The cost that an earlier process learned replaces the prior."""
        cost = replace(cost, graph_tokens=self._graph_tokens)
        self._prior = _vector(cost)
        self.cost = cost

    def observe(self, work: StepWork, took_s: float) -> None:
        """A step that did `work` took `took_s`."""
        telling = work.tokens >= _TELLING_TOKENS
        if not _SHORTEST_S < took_s < _LONGEST_S or work.tokens <= 0:
            return
        if not telling and not self._seen:
            return  # its time is mostly the fixed part, and would set the scale of tokens
        prefix_tokens = work.prefix_tokens if self._has_prefix_cost else 0
        tokens = self.cost.padded(work.tokens)
        x = np.array((1.0, tokens, work.pairs, work.decodes, prefix_tokens)) / _UNIT
        expected_s = float(_vector(self.cost) @ x)
        if expected_s < _SHORTEST_S:  # the step does only work whose cost was found to be 0 so far
            expected_s = took_s
        error = self.cost.error
        if self._seen:
            if telling:
                error += _NEWEST_ERROR * (min(abs(took_s - expected_s) / took_s, 1.0) - error)
            took_s = min(took_s, expected_s * (1 + _OUTLIER))
        else:
            self._scale = took_s / expected_s
            guess = self._guess * (took_s / max(float(self._guess @ x), _SHORTEST_S))
            self._least_spread = np.maximum(_UNKNOWN * took_s, _GUESS_DOUBT * guess)
            expected_s = took_s
            error = _FIRST_ERROR
        self._seen += 1
        x /= expected_s  # so that relative misses count
        self._products = _KEEP * self._products + np.outer(x, x)
        self._targets = _KEEP * self._targets + x * (took_s / expected_s)
        # The prior is one more observation of each coefficient, with the weight of its spread. The
        # model decides how tokens and pairs compare; nothing is known of the other two.
        prior = np.maximum(self._scale * self._prior, _TINY_S)
        spread = np.maximum(prior, self._least_spread)
        found = _nonnegative(
            self._products + np.diag(_PRIOR_WEIGHT / spread**2),
            self._targets + _PRIOR_WEIGHT * prior / spread**2,
        )
        fixed_s, token_s, pair_s, decode_s, prefix_s = (float(v) for v in found / _UNIT)
        if not self._has_prefix_cost:
            prefix_s = 0.0
        self.cost = PrefillCost(
            fixed_s, token_s, pair_s, decode_s, error, prefix_s, self._graph_tokens
        )


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Predicted seconds of loads: the first block after `latency_s`, then one each `block_s`."""

    latency_s: float
    block_s: float
    copy_s: float = 0.0  # copy of a block to the device; only the last copy is waited for
    error: float = _GUESS_ERROR  # mean share by which predictions missed lately
    coming_s: float = 0.0  # time from the first byte of a block to its last; 0: not known
    depth: int = 1  # reads in flight at once

    @property
    def last_s(self) -> float:
        """Time from the first byte of the last block to the end of all loads.

        With one read at a time that is `coming_s`. With parallel reads the last read speeds up as
        the others end: the time is the mean of that beside other reads (`coming_s`) and that of a
        read alone (`block_s`).
        """
        return min(self.coming_s, (self.coming_s + self.block_s) / 2)

    def is_overdue(self, since_s: float, *, any_landed: bool) -> bool:
        """Whether a block was predicted to be here by now. Args: as for `load_s`."""
        return since_s > self._next_s(any_landed)

    def is_stalled(self, since_s: float) -> bool:
        """Whether twice the time has passed in which all reads in flight should have landed. Blocks
        that are read side by side may arrive together, after times without any."""
        return since_s > self.stall_s

    @property
    def stall_s(self) -> float:
        """The least time that `is_stalled` does not hold for."""
        return 2 * (self.latency_s + self.depth * self.block_s)

    def _next_s(self, any_landed: bool) -> float:
        return self.block_s if any_landed else self.latency_s + self.block_s

    def load_s(self, blocks: int, *, since_s: float = 0.0, any_landed: bool = False) -> float:
        """Time until `blocks` more have landed.

        Args:
            since_s: time since the last block landed, or since the first read began. If that is
                longer than predicted, the link is slower than it was.
            any_landed: a block has landed, so the latency is over.
        """
        return self.pace(since_s, any_landed=any_landed).load_s(blocks)

    def pace(self, since_s: float, *, any_landed: bool) -> "LoadPace":
        """How blocks are predicted to land from now on. Args: as for `load_s`."""
        first_s = self._next_s(any_landed)
        # An overdue block is predicted to take as long again, so that no prompt waits for ever.
        next_s = abs(first_s - since_s)
        block_s = max(self.block_s, (since_s - first_s) / self.depth)
        return LoadPace(next_s, block_s, self.copy_s)


class LoadPace(NamedTuple):
    """Predicted seconds of loads under way: the next block after `next_s`, then one each `block_s`.
    The last one is copied in `copy_s`."""

    next_s: float
    block_s: float
    copy_s: float

    def load_s(self, blocks: int) -> float:
        """Time until `blocks` more have landed."""
        return self.next_s + self.block_s * (blocks - 1) + self.copy_s if blocks > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """The costs that decisions about one prompt are made on.

    Attributes:
        load: the cost of an average block.
        tiers: the costs by tier; None: all blocks of the prompt are in one tier.
        silence_s: the longest silence of the tiers that blocks are wanted from, as in `TierLoads`.
        others_s: time of a step that does only the other requests' part of the prompt's steps; 0:
            there is no such part, and the device is idle while this prompt waits.
        others_wait: other prompts wait, which fill a short step of this one.
        backlog_s: device time of other requests before this prompt's next step: the rest of the
            step under way, and prompts that are served first.
        pipelined: a step is planned while the step before it runs, so no step begins at once.
        overlap_share: the share of a prompt's last step that may run before its loads are over: the
            share of all layers but the first (docs/theory.md).
        pause_s: time of the decode steps that follow each step of the prompt, before another step
            prefills (`--prefill-decode-interval`). `prefill` has it in its fixed cost, and
            `others_s` has it, too.
    """

    prefill: PrefillCost
    load: LoadCost
    tiers: "TierLoads | None" = None
    silence_s: float = 0.0
    others_s: float = 0.0
    others_wait: bool = False
    backlog_s: float = 0.0
    pipelined: bool = False
    overlap_share: float = 0.0
    pause_s: float = 0.0

    def beside(self, others: StepWork, pause_s: float = 0.0) -> "PromptCosts":
        """The costs of a prompt, which are those that it has alone, in steps that do `others` as
        well, each before a pause."""
        if others == StepWork() and not pause_s:
            return self
        prefill, others_s = self.prefill, 0.0
        if others != StepWork():
            others_s = prefill.work_s(others) + (pause_s if others.tokens else 0.0)
            prefill = prefill.beside(others)
        if pause_s:
            prefill = replace(prefill, fixed_s=prefill.fixed_s + pause_s)
        return replace(self, prefill=prefill, others_s=others_s, pause_s=pause_s)


@dataclass(frozen=True, slots=True)
class TierLoads:
    """The loads of a prompt whose blocks are in several tiers. Tiers are read side by side, each
    tier from the end of the prompt.

    Attributes:
        tiers: the number of the tier of each block of the prompt.
        costs: the cost of loads, by tier.
        silence_s: by tier, how long no block has arrived while blocks were being read.
    """

    tiers: bytes
    costs: tuple[LoadCost, ...]
    silence_s: tuple[float, ...] = (0.0,) * MOST_TIERS

    def tiers_of(self, marked: bytes, first: int) -> bytes:
        """The tier of each marked block, and NO_TIER for the others. Args: first: the block that
        `marked` begins with."""
        tiers = np.frombuffer(self.tiers, np.uint8)[first : first + len(marked)]
        found = np.full(len(marked), NO_TIER, np.uint8)
        np.copyto(found[: len(tiers)], tiers, where=np.frombuffer(marked, bool)[: len(tiers)])
        return found.tobytes()

    def average(self, where: bytes) -> LoadCost:
        """The cost of an average block of `where`, as from `tiers_of`. Tiers are read side by side,
        so all blocks take as long as those of one tier."""
        counts = [(cost, where.count(tier)) for tier, cost in enumerate(self.costs)]
        counts = [each for each in counts if each[1]] or [(self.costs[0], 1)]
        total = sum(count for _, count in counts)
        shares = [(cost, count / total) for cost, count in counts]
        return LoadCost(
            latency_s=sum(cost.latency_s * share for cost, share in shares),
            block_s=max(cost.block_s * share for cost, share in shares),
            copy_s=sum(cost.copy_s * share for cost, share in shares),
            error=sum(cost.error * share for cost, share in shares),
            coming_s=sum(cost.coming_s * share for cost, share in shares),
            depth=max(cost.depth for cost, _ in shares),
        )


class LoadFit:
    """Averages over recent blocks of one link. Blocks that come together count as a group."""

    def __init__(self, prior: LoadCost) -> None:
        self.cost = prior
        self.measured = False
        self._prior = prior
        self._only_first = False  # `cost.block_s` is the time of first blocks of loads alone
        self._groups = 0
        self._groups_s = 0.0  # the average time per block without the first block
        self._least_s = math.inf
        self._least_latency_s = math.inf
        self._group_s = 0.0
        self._group = 0

    @property
    def best(self) -> LoadCost:
        """The cost with the shortest latency and time per block that were measured; a time that was
        not measured is the prior's. The first block says nothing about the shortest time: it may
        have waited for a new connection or a busy disk."""
        cost = self.cost
        block_s = self._least_s if math.isfinite(self._least_s) else self._prior.block_s
        latency_s = self._least_latency_s
        if not math.isfinite(latency_s):
            latency_s = self._prior.latency_s
        return replace(
            cost, block_s=min(cost.block_s, block_s), latency_s=min(cost.latency_s, latency_s)
        )

    def recall(self, cost: LoadCost) -> None:
        """The cost that an earlier process learned replaces the prior."""
        self.cost = replace(cost, depth=self.cost.depth)
        self.measured = True
        self._only_first = False

    def fetched(self, took_s: float, *, first: bool) -> None:
        """A block took the link for `took_s`. `first`: the time contains the latency."""
        cost = self.cost
        if not self.measured:
            self.measured = True
            self._only_first = True
            self.cost = replace(cost, latency_s=0.0, block_s=took_s, error=_FIRST_ERROR)
        elif first and self._only_first and took_s < cost.block_s:
            # No block takes longer than one with the latency. So a slow first block is corrected,
            # even if each load is given up after one block.
            self.cost = replace(cost, latency_s=0.0, block_s=took_s)
        elif first:
            most_s = 4 * max(cost.latency_s + cost.block_s, _TINY_S)
            latency_s = max(0.0, min(took_s, most_s) - cost.block_s)
            latency_s = cost.latency_s + _NEWEST_LATENCY * (latency_s - cost.latency_s)
            self.cost = replace(cost, latency_s=latency_s)
            self._least_latency_s = min(self._least_latency_s, latency_s)
        else:
            self._group_s += took_s
            self._group += 1
            if self._group == self._group_blocks:
                self._measure(self._group_s / self._group)
                self._group_s = 0.0
                self._group = 0

    def copied(self, took_s: float) -> None:
        """The copy of a block to the device took `took_s`."""
        cost = self.cost
        weight = _NEWEST_LATENCY if cost.copy_s else 1.0
        self.cost = replace(cost, copy_s=cost.copy_s + weight * (took_s - cost.copy_s))

    def received(self, took_s: float) -> None:
        """A block's bytes arrived in `took_s`, from the first one to the last; 0: not known."""
        cost = self.cost
        if took_s == cost.coming_s:  # as ever, with a store that does not report its progress
            return
        weight = _NEWEST_LATENCY if cost.coming_s else 1.0
        self.cost = replace(cost, coming_s=cost.coming_s + weight * (took_s - cost.coming_s))

    def _measure(self, block_s: float) -> None:
        cost = self.cost
        block_s = min(block_s, _SLOWEST_GROUP * max(cost.block_s, _TINY_S))
        self._only_first = False
        self._groups += 1
        newest_blocks = self._weight(_NEWEST_BLOCKS)
        newest_error = self._weight(_NEWEST_ERROR)
        self._groups_s += max(newest_blocks, 1 / self._groups) * (block_s - self._groups_s)
        miss = min(1.0, abs(block_s - cost.block_s) / max(block_s, 1e-9))
        self.cost = replace(
            cost,
            block_s=cost.block_s + newest_blocks * (block_s - cost.block_s),
            error=cost.error + newest_error * (miss - cost.error),
        )
        self._least_s = min(self._least_s, self._groups_s)

    @property
    def _group_blocks(self) -> int:
        return max(_GROUP_BLOCKS, self.cost.depth)

    def _weight(self, newest: float) -> float:
        """The weight of a group, if a group of _GROUP_BLOCKS blocks has the weight `newest`: larger
        groups weigh as much as several such groups."""
        return 1.0 - float((1 - newest) ** (self._group_blocks / _GROUP_BLOCKS))


class LoadFits:
    """A `LoadFit` for each tier of a store. Times `now_s` are those of any steady clock.

    Args:
        prior: the cost of a tier before anything is read from it.
        least_limit_s: every read may take that long.
        depths: the most reads under way at once, by tier; the last number holds for all further
            tiers.
    """

    def __init__(
        self,
        prior: LoadCost,
        least_limit_s: float = LEAST_LIMIT_S,
        depths: Sequence[int] = (1,),
    ) -> None:
        self._priors = [
            replace(prior, depth=depths[min(tier, len(depths) - 1)]) for tier in range(MOST_TIERS)
        ]
        self._least_limit_s = least_limit_s
        self._fits: list[LoadFit] = []
        self._used_s: list[float] = []  # by tier, when the last block arrived from it
        self._newest = self._fits[self._index(0)]

    @property
    def newest(self) -> LoadCost:
        """The cost of the tier that was read last."""
        return self._newest.cost

    @property
    def all(self) -> list[LoadCost | None]:
        """The costs by tier; None: not known."""
        return [fit.cost if fit.measured else None for fit in self._fits]

    def recall(self, costs: Sequence[LoadCost | None], now_s: float) -> None:
        """The costs that an earlier process learned (`all`) replace the prior."""
        for tier, cost in enumerate(costs[:MOST_TIERS]):
            if cost is not None:
                self._used(tier, now_s).recall(cost)

    def fetched(
        self, tier: int, took_s: float, now_s: float, *, first: bool, coming_s: float = 0.0
    ) -> None:
        """As `LoadFit.fetched` and `LoadFit.received`, for a block of `tier`."""
        self._newest = self._used(tier, now_s)
        self._newest.fetched(took_s, first=first)
        self._newest.received(coming_s)

    def copied(self, took_s: float) -> None:
        """As `LoadFit.copied`, for every tier: a copy does not know its block's tier."""
        for fit in self._fits:
            fit.copied(took_s)

    def by_tier(self, now_s: float) -> tuple[LoadCost, ...]:
        """The costs of all MOST_TIERS tiers. A tier that was not read for DOUBT_S counts with its
        best time."""
        known = [self.cost(tier, now_s) for tier in range(len(self._fits))]
        return (*known, *self._priors[len(known) :])

    def measured_lately(self, now_s: float) -> tuple[bool, ...]:
        """For each of MOST_TIERS tiers, whether it was measured, and read in the last DOUBT_S."""
        fits = zip(self._fits, self._used_s, strict=False)
        known = [fit.measured and now_s - used_s <= DOUBT_S for fit, used_s in fits]
        return (*known, *[False] * (MOST_TIERS - len(known)))

    def limit_s(self, tier: int, now_s: float) -> float:
        """How long a read from a tier may take, with all reads that share the link with it."""
        if not self._fits[self._index(tier)].measured:
            return FIRST_LIMIT_S
        cost = self.cost(tier, now_s)
        return max(self._least_limit_s, LIMIT_TIMES * (cost.latency_s + cost.depth * cost.block_s))

    def cost(self, tier: int, now_s: float) -> LoadCost:
        """The cost of a load from a tier, as in `by_tier`."""
        tier = self._index(tier)
        fit = self._fits[tier]
        return fit.best if now_s - self._used_s[tier] > DOUBT_S else fit.cost

    def _used(self, tier: int, now_s: float) -> LoadFit:
        tier = self._index(tier)
        self._used_s[tier] = now_s
        return self._fits[tier]

    def _index(self, tier: int) -> int:
        """The index of the tier; a new tier gets an index."""
        tier = min(tier, MOST_TIERS - 1)
        while len(self._fits) <= tier:
            self._used_s.append(-math.inf)
            self._fits.append(LoadFit(self._priors[len(self._fits)]))  # now others may ask
        return tier


def _vector(cost: PrefillCost) -> Matrix:
    numbers = (cost.fixed_s, cost.token_s, cost.pair_s, cost.decode_s, cost.prefix_s)
    vector: Matrix = np.array(numbers) * _UNIT
    return vector


def _nonnegative(products: Matrix, measured: Matrix) -> Matrix:
    """The v >= 0 that minimises v'Pv/2 - t'v, for positive definite P."""
    root = np.linalg.cholesky(products)
    v: Matrix = nnls(root.T, np.linalg.solve(root, measured))[0]
    return v
