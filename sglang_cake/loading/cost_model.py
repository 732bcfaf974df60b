"""What computing and loading cost here, learned from every step and every block that arrives.

Prefill: the time of a step is a fixed part, a part per token (the linear layers), a part per
(query, key) pair (attention: this is why late chunks cost more), and a part per decoding request
that shares the step. Loading: a latency, and then a time per block.

Nothing is profiled. The first numbers are guesses whose shape comes from the model (`prior`); each
measured step moves them, the newest most, and a step that took far longer than expected (another
process, a page fault) only a little. Pure: no clock, no threads, no files.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

# Weight that an observation keeps after one more: about the last 50 steps count.
_KEEP = 0.98
# An observation that misses the prediction by more than this share is pulled in to it.
_OUTLIER = 1.0
# Weight of the prior: the squared noise of a step (0.05) over that of a guess (0.7).
_PRIOR_WEIGHT = 0.005
_SHORTEST_S, _LONGEST_S = 1e-6, 1e4  # what took less or more was no step
_TINY_S = 1e-9
_GUESS_ERROR = 0.5  # of what was never measured
_FIRST_ERROR = 0.25  # taken for granted after one observation
# Shorter steps show what a step costs at least, and nothing of what a token costs.
_TELLING_TOKENS = 32
_NEWEST_ERROR = 0.1  # weight of the newest miss in the mean miss
_GROUP_BLOCKS = 4  # reads in flight together land together
_NEWEST_BLOCKS = 0.4  # weight of the newest group in the time per block
_NEWEST_LATENCY = 0.2
_SLOWEST_TURN = 8.0  # one group may not count as slower than this many times the average

# Units that bring the four features of a step to about the same size.
_UNIT = np.array((1.0, 512.0, 512.0 * 512.0, 8.0))

# How far off the prior may be, as a share of the first step, where nothing is known.
_UNKNOWN = np.array((0.2, 0.0, 0.0, 0.2))

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Predicted seconds of prefill steps. `pair_s` is per (query, key) pair, causal."""

    fixed_s: float
    token_s: float
    pair_s: float
    decode_s: float = 0.0  # per request that decodes in the same step
    error: float = _GUESS_ERROR  # mean share by which predictions missed lately

    @property
    def guessed(self) -> bool:
        """Whether it was never measured what a token costs, or what was measured agrees so badly
        that it might as well not have been."""
        return self.error >= _GUESS_ERROR

    @classmethod
    def prior(cls, *, hidden: int, on_gpu: bool) -> "PrefillCost":
        """Before anything was measured.

        A dense transformer layer takes about 24 h^2 FLOPs per token in its matrix products and 4 h
        per pair in attention, whatever the number of layers: a pair costs 1 / (6 h) of a token.
        The absolute numbers are of a middling machine; the first measured step replaces them.
        """
        token_s = 1e-4 if on_gpu else 1e-3
        return cls(0.01, token_s, token_s / (6 * hidden), 8 * token_s)

    def step_s(self, start: int, stop: int) -> float:
        """One step over tokens `[start, stop)`; an empty one takes no time."""
        if stop <= start:
            return 0.0
        return self.fixed_s + self.token_s * (stop - start) + self.pair_s * pairs(start, stop)

    def span_s(self, start: int, stop: int, chunk_tokens: int) -> float:
        """Steps of at most `chunk_tokens` over `[start, stop)`."""
        if stop <= start:
            return 0.0
        steps = -(-(stop - start) // chunk_tokens)
        return self.step_s(start, stop) + (steps - 1) * self.fixed_s

    def work_s(self, work: "StepWork") -> float:
        """One step that does `work`."""
        return (
            self.fixed_s
            + self.token_s * work.tokens
            + self.pair_s * work.pairs
            + self.decode_s * work.decodes
        )

    def queue_s(self, work: "StepWork", chunk_tokens: int) -> float:
        """As few steps as do `work`, of at most `chunk_tokens` each."""
        steps = -(-work.tokens // chunk_tokens)
        return self.work_s(work) + (steps - 1) * self.fixed_s if steps else 0.0

    def beside(self, others: "StepWork") -> "PrefillCost":
        """Of a part of steps that do `others` as well: to the part, that is a fixed cost."""
        return replace(self, fixed_s=self.work_s(others))


def pairs(start: float, stop: float) -> float:
    """(query, key) pairs of tokens `[start, stop)`: each attends to all before it and itself."""
    tokens = stop - start
    return tokens * start + tokens * (tokens + 1) / 2


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step did: prefilled spans of every request in it, and requests that decoded."""

    tokens: int = 0
    pairs: float = 0.0
    decodes: int = 0

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(
            self.tokens + other.tokens, self.pairs + other.pairs, self.decodes + other.decodes
        )


def work_of(start: int, stop: int) -> StepWork:
    """The work of prefilling `[start, stop)`."""
    return StepWork(stop - start, pairs(start, stop))


class PrefillFit:
    """Least squares over recent steps, with forgetting, robust to outliers, never negative.

    Args:
        prior: holds as long as little was measured; its absolute scale follows the measurements
            from the first one on, its proportions give way slowly.
    """

    def __init__(self, prior: PrefillCost) -> None:
        self._prior = _vector(prior)
        self._scale = 1.0
        self._first_s = 0.0  # what the first step took
        self._products: Matrix = np.zeros((4, 4))  # sum of w x x'
        self._targets: Matrix = np.zeros(4)  # sum of w x y
        self._seen = 0
        self.cost = prior

    @property
    def measured(self) -> bool:
        """Whether any step was observed."""
        return self._seen > 0

    def recall(self, cost: PrefillCost) -> None:
        """What an earlier process had learned takes the place of the prior."""
        self._prior = _vector(cost)
        self.cost = cost

    def observe(self, work: StepWork, took_s: float) -> None:
        """A step that did `work` took `took_s`."""
        telling = work.tokens >= _TELLING_TOKENS
        if not _SHORTEST_S < took_s < _LONGEST_S or work.tokens <= 0:
            return
        if not telling and not self._seen:
            return  # its scale would be taken for that of tokens
        x = np.array((1.0, work.tokens, work.pairs, work.decodes)) / _UNIT
        expected_s = float(_vector(self.cost) @ x)
        error = self.cost.error
        if self._seen:
            if telling:
                error += _NEWEST_ERROR * (min(abs(took_s - expected_s) / took_s, 1.0) - error)
            took_s = min(took_s, expected_s * (1 + _OUTLIER))
        else:
            self._scale, self._first_s = took_s / expected_s, took_s
            expected_s, error = took_s, _FIRST_ERROR
        self._seen += 1
        x /= expected_s  # what counts is the relative miss
        self._products = _KEEP * self._products + np.outer(x, x)
        self._targets = _KEEP * self._targets + x * (took_s / expected_s)
        # The prior is one more observation of each coefficient alone, as sure as its spread says:
        # the model knows how tokens and pairs compare, nothing knows the other two.
        prior = np.maximum(self._scale * self._prior, _TINY_S)
        spread = np.maximum(prior, _UNKNOWN * self._first_s)
        found = _nonnegative(
            self._products + np.diag(_PRIOR_WEIGHT / spread**2),
            self._targets + _PRIOR_WEIGHT * prior / spread**2,
        )
        fixed_s, token_s, pair_s, decode_s = (float(v) for v in found / _UNIT)
        self.cost = PrefillCost(fixed_s, token_s, pair_s, decode_s, error)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Predicted seconds of loads: the first block after `latency_s`, then one each `block_s`."""

    latency_s: float
    block_s: float
    copy_s: float = 0.0  # from host staging to the device, per block; only the last is waited for
    error: float = _GUESS_ERROR  # mean share by which predictions missed lately
    coming_s: float = 0.0  # of a block, from its first byte to its last; 0: nobody tells
    depth: int = 1  # reads in flight at once

    @property
    def last_s(self) -> float:
        """How long before the end of all loads the last block begins to come.

        Reads that share a link take as long as several blocks, each; at the end fewer and fewer
        share it, so half of that. Where they have it one after another, it is a block's time.
        """
        return min(self.coming_s, (self.coming_s + self.block_s) / 2)

    def is_late(self, since_s: float, *, begun: bool) -> bool:
        """Whether a block was expected by now; args as those of `load_s`."""
        return since_s > self._next_s(begun)

    def _next_s(self, begun: bool) -> float:
        return self.block_s if begun else self.latency_s + self.block_s

    def load_s(self, blocks: int, *, since_s: float = 0.0, begun: bool = False) -> float:
        """Until `blocks` more have landed.

        Args:
            since_s: how long ago the last one landed (or the first read began). A block that was
                expected by then and has not come says that the link is slower than it was.
            begun: some have landed in this load already: the latency is behind us.
        """
        if blocks <= 0:
            return 0.0
        first_s = self._next_s(begun)
        # A block that is overdue is taken to be late for as long again: nobody waits for good.
        next_s = abs(first_s - since_s)
        block_s = max(self.block_s, (since_s - first_s) / self.depth)
        return next_s + block_s * (blocks - 1) + self.copy_s


@dataclass(frozen=True, slots=True)
class Costs:
    """What decisions are made on.

    Attributes:
        others_s: what a step takes that does the others' part of these steps alone; 0: they have
            none, the device rests when this prompt waits.
        backlog_s: device time that goes to others before this prompt's next step: the rest of the
            step under way, and prompts that are served first.
        pipelined: steps are planned while the one before runs, so that none begins at once.
        overlap: share of a prompt's last step that may run before its loads are over: of all layers
            but the first (docs/theory.md).
    """

    prefill: PrefillCost
    load: LoadCost
    others_s: float = 0.0
    backlog_s: float = 0.0
    pipelined: bool = False
    overlap: float = 0.0

    def beside(self, others: StepWork) -> "Costs":
        """Of a prompt in steps that do `others` as well."""
        others_s = self.prefill.work_s(others) if others != StepWork() else 0.0
        return replace(self, prefill=self.prefill.beside(others), others_s=others_s)


class LoadFit:
    """Averages over recent blocks of one link. Blocks that land together count as a group."""

    def __init__(self, prior: LoadCost) -> None:
        self.cost = prior
        self.measured = False
        self._prior_s, self._least_s = prior.block_s, math.inf
        self._group_s = 0.0
        self._group = 0

    @property
    def best(self) -> LoadCost:
        """At the best that was measured here; if nothing was, at the best of what was taken for
        granted."""
        best_s = self._least_s if math.isfinite(self._least_s) else self._prior_s
        return replace(self.cost, block_s=min(self.cost.block_s, best_s))

    def recall(self, cost: LoadCost) -> None:
        """What an earlier process had learned takes the place of the prior."""
        self.cost = replace(cost, depth=self.cost.depth)
        self.measured = True

    def landed(self, took_s: float, *, first: bool) -> None:
        """A block took the link for `took_s`; `first` of a load: its latency is in it."""
        cost = self.cost
        if not self.measured:
            self.measured = True
            self.cost = replace(cost, latency_s=0.0, block_s=took_s, error=_FIRST_ERROR)
            self._least_s = took_s
        elif first:
            latency_s = max(0.0, min(took_s, 4 * (cost.latency_s + cost.block_s)) - cost.block_s)
            latency_s = cost.latency_s + _NEWEST_LATENCY * (latency_s - cost.latency_s)
            self.cost = replace(cost, latency_s=latency_s)
        else:
            self._group_s += took_s
            self._group += 1
            if self._group == _GROUP_BLOCKS:
                self._measure(self._group_s / _GROUP_BLOCKS)
                self._group_s, self._group = 0.0, 0

    def copied(self, took_s: float) -> None:
        """A landed block's copy to the device took `took_s`."""
        cost = self.cost
        weight = _NEWEST_LATENCY if cost.copy_s else 1.0
        self.cost = replace(cost, copy_s=cost.copy_s + weight * (took_s - cost.copy_s))

    def came(self, took_s: float) -> None:
        """A block's bytes came in `took_s`, from the first one to the last; 0: nobody told."""
        cost = self.cost
        weight = _NEWEST_LATENCY if cost.coming_s else 1.0
        self.cost = replace(cost, coming_s=cost.coming_s + weight * (took_s - cost.coming_s))

    def _measure(self, block_s: float) -> None:
        cost = self.cost
        block_s = min(block_s, _SLOWEST_TURN * cost.block_s)
        miss = min(1.0, abs(block_s - cost.block_s) / max(block_s, 1e-9))
        self.cost = replace(
            cost,
            block_s=cost.block_s + _NEWEST_BLOCKS * (block_s - cost.block_s),
            error=cost.error + _NEWEST_ERROR * (miss - cost.error),
        )
        self._least_s = min(self._least_s, self.cost.block_s)


def _vector(cost: PrefillCost) -> Matrix:
    vector: Matrix = np.array((cost.fixed_s, cost.token_s, cost.pair_s, cost.decode_s)) * _UNIT
    return vector


def _nonnegative(products: Matrix, targets: Matrix) -> Matrix:
    """The v >= 0 that minimises v'Pv/2 - t'v, for positive definite P."""
    root = np.linalg.cholesky(products)
    v: Matrix = nnls(root.T, np.linalg.solve(root, targets))[0]
    return v
