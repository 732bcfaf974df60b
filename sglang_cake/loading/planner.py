"""Compute, load, or both: decided at arrival and again later, on predicted costs. The rules, and
how far a step goes, are in docs/scheduling.md#one-prompt.

- `look_ahead` predicts the time of all three.
- `next_step` takes the best way, and says how far the next step computes.
- `should_load` decides whether blocks of a waiting prompt are loaded.
- `overlap_span` decides whether the last step begins before the last loads are over.
- `passing_tokens` shortens a step in which later prompts pass one that is loaded.

The split is greedy: each step starts from the blocks that have landed by then. Only the length of a
step is predicted. A running step cannot be aborted, so computing past the meeting point is lost.
"""

import functools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_cake.core.keys import Span
from sglang_cake.loading.cost_model import (
    NO_TIER,
    LoadCost,
    LoadPace,
    PrefillCost,
    PromptCosts,
    StepWork,
    TierLoads,
    work_of,
)
from sglang_cake.loading.meet import BlockState, View

Mode = Literal["auto", "both", "compute", "load"]

_LOADED = re.compile(b"[%c%c]+" % (BlockState.WANTED, BlockState.LANDED))

# Loads begin only if computing alone takes longer than the best way with loads by more than this
# share. Loads under way go on unless computing alone is quicker.
COMPUTE_SLACK = 0.015
TIE = 1e-9  # two sums of the same steps differ by less
# Loading alone may take longer than both by this share, since it leaves the device to others.
LOAD_SLACK = 0.01
# A prompt that is passed must gain so many times what all others lose by a shorter step.
PASSING_COST = 3.0
# No step goes further towards the meeting point than this share when predictions are poor.
_LEAST_SURE = 0.5


def _marks_of(*states: BlockState) -> bytes:
    """A table for `bytes.translate` that marks blocks in one of `states`."""
    return bytes(state in states for state in range(256))


_PRESENT = _marks_of(BlockState.LANDED)
_TO_BE_PRESENT = _marks_of(BlockState.LANDED, BlockState.WANTED)
_WANTED = _marks_of(BlockState.WANTED)
_IN_TIER_0 = bytes(0 if marked else NO_TIER for marked in _WANTED)  # the tier of a block
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a prompt's loads.

    Attributes:
        since_s: time since the last block landed, or since the link began to serve the prompt.
        any_landed: whether a block has landed.
        load_from: as in the last `StepPlan`: blocks from this one on are read; None: no block is.
        relied_from: the front at the first step that was shortened or left out because loads were
            expected; None: there was none.
        relied_s: time since that step could begin.
    """

    since_s: float = 0.0
    any_landed: bool = False
    load_from: int | None = None
    relied_from: int | None = None
    relied_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted seconds from now to the end of prefill for each way.

    Attributes:
        meet_token: with both, where computing meets loading: stored blocks right of it are loaded.
        wait_s: with both, the time until the blocks have landed that the device waits for at the
            front: the block there, or all blocks of a tier; infinite: it waits for all loads, or
            does not wait.
    """

    compute_s: float
    load_s: float
    both_s: float
    meet_token: int
    wait_s: float = math.inf

    @property
    def best_s(self) -> float:
        """The predicted time of the best way."""
        return min(self.compute_s, self.load_s, self.both_s)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The decision about the next step.

    Attributes:
        stop: compute up to this token.
        wait: compute nothing; `stop` is the front.
        wait_s: the time until a wait for some of the loads is predicted to end; infinite: a wait
            for all of them.
        load_from: blocks from this one on are worth loading; None: no block is.
        ends_loads: with `load_from` None: a block is overdue, so the loads end for good.
    """

    stop: int
    wait: bool = False
    wait_s: float = math.inf
    load_from: int | None = 0
    ends_loads: bool = False


def look_ahead(
    view: View, *, chunk_tokens: int, costs: PromptCosts, progress: LoadProgress
) -> Outlook:
    """Predict the time of computing all, of loading all, and of the best split at a block boundary
    (docs/theory.md#the-meeting-point).

    End blocks are loads that come first, unless all is computed.

    Args: chunk_tokens: the most that one step computes.
    """
    return _Ways(view, chunk_tokens, costs, progress).outlook()


class _Split(NamedTuple):
    """A way in which the device computes up to a border, and blocks right of it are loaded.

    Attributes:
        start_s: when the device begins.
        jumped: the blocks that it jumps over.
        border: the border with the earliest end, which is at `end_s`.
    """

    start_s: float
    jumped: "_Jumped"
    border: int
    end_s: float


class _Ways:
    """The times that `look_ahead` predicts. Each is found when it is asked for: the best split
    takes far longer than the others.

    A border is the first block that is loaded, counted from the front. Only borders at a block that
    is to come matter, since no load depends on the others. With end states, the device computes
    landed blocks left of the border.
    """

    def __init__(
        self, view: View, chunk_tokens: int, costs: PromptCosts, progress: LoadProgress
    ) -> None:
        self._view = view
        self._chunk_tokens = chunk_tokens
        self._costs = costs
        wanted = view.states.translate(_WANTED)
        present = view.states.translate(_TO_BE_PRESENT)
        self._later = _worth_loading(view, present, costs.prefill)
        if not is_asked(view, progress.load_from):
            progress = replace(progress, since_s=0.0)
        self._loads = _Loads(view, costs, progress)
        unbroken, overlap_s = _overlap_gain(view, self._later, chunk_tokens, costs)
        self._unbroken = unbroken  # from this border on, a step may begin `_overlap_s` early
        self._overlap_s = overlap_s
        self._not_stored = _ToCompute(view, self._later, chunk_tokens, costs.prefill)
        self._landed = _attachable(view)
        self._computed = _ToCompute(view, self._landed, chunk_tokens, costs.prefill)
        self._candidates = present if view.end_blocks else wanted
        self._borders = range(self._candidates.rfind(1) + 2)

    # The pause after the last step comes after the first token.

    @property
    def compute_s(self) -> float:
        """The time of computing all."""
        costs = self._costs
        rest_s = _rest_s(self._view, self._chunk_tokens, costs, self._computed)
        return costs.backlog_s + rest_s - costs.pause_s

    @property
    def load_s(self) -> float:
        """The time of loading all."""
        backlog_s = self._costs.backlog_s  # and nothing is computed before the loads are over
        planned_s = 0.0 if self._costs.pipelined else backlog_s
        return self._end_s(0, backlog_s, planned_s) - self._costs.pause_s

    def outlook(self) -> Outlook:
        """All three times, and where computing meets loading."""
        view, costs = self._view, self._costs
        starts_s = [costs.backlog_s]
        if costs.tiers is not None and not view.end_blocks:
            # With end states, the front jumps over all blocks together.
            starts_s += self._loads.waits_s(costs)
        splits = [self._best_from(start_s) for start_s in starts_s]
        best = min(splits, key=lambda split: split.end_s)
        start = self._token(best.border)
        # Blocks that are not stored are computed in any case.
        meet_token = min(_next_run(view, self._later, start)[0], self._token(self._borders[-1]))
        meet_token = max(start, meet_token)
        wait_s = math.inf
        if best is not splits[0]:
            meet_token = view.front
            wait_s = best.start_s
        elif costs.tiers is not None and meet_token > view.front:
            meet_token = min(meet_token, _next_run(view, best.jumped.marks, view.front)[0])
            if meet_token == view.front:
                wait_s = float(self._loads.landing_s()[0])
        return Outlook(
            compute_s=self.compute_s,
            load_s=self.load_s,
            both_s=best.end_s - costs.pause_s,
            meet_token=meet_token,
            wait_s=wait_s,
        )

    def _token(self, border: int) -> int:
        view = self._view
        return max(view.front, (view.first + border) * view.block_tokens)

    def _link_s(self, border: int) -> float:
        """The time until the last step can begin."""
        overlap_s = self._overlap_s if border >= self._unbroken else 0.0
        return max(0.0, self._loads.load_s(border) - overlap_s)

    def _rest_s(self, x: int) -> float:
        """The time to compute the tokens right of x that are not stored."""
        return self._not_stored.span_s(x, self._view.prompt_tokens)

    def _end_s(self, border: int, device_s: float, planned_s: float) -> float:
        """The end of a split.

        Args:
            device_s: when the device has computed up to the border.
            planned_s: when the step is planned that begins there.
        """
        loads_s, costs = self._link_s(border), self._costs
        begin_s = max(loads_s, device_s)
        if costs.others_s and (loads_s > device_s or loads_s > planned_s):
            begin_s = _delayed_step_s(loads_s, device_s, costs)
        return begin_s + self._rest_s(self._token(border))

    def _best_from(self, start_s: float) -> _Split:
        """The best split if the device begins at `start_s`."""
        view, costs, chunk_tokens = self._view, self._costs, self._chunk_tokens
        borders = self._borders
        jumped = _jumped(view, self._loads, chunk_tokens, costs, start_s)
        computed = self._computed
        if jumped.marks != self._landed:
            computed = _ToCompute(view, jumped.marks, chunk_tokens, costs.prefill)
        plan_matters = costs.pipelined and costs.others_s

        def ahead_s(x: int) -> float:  # until the device has computed up to x
            waits_s = [wait_s for at, wait_s in jumped.waits_s if at < x]
            return start_s + computed.span_s(view.front, x) + sum(waits_s)

        def planned_s(x: int) -> float:  # until the step is planned that begins at x
            return ahead_s(x - (x - view.front - 1) % chunk_tokens - 1) if x > view.front else 0.0

        def end_s(border: int) -> float:
            x = self._token(border)
            device_s = ahead_s(x)
            return self._end_s(border, device_s, planned_s(x) if plan_matters else device_s)

        def around(ready_s: Callable[[int], float]) -> set[int]:  # where loads end at `ready_s`
            meet = bisect_left(
                borders, 0.0, key=lambda b: ready_s(self._token(b)) - self._link_s(b)
            )
            return {max(0, min(meet, borders[-1])), max(0, meet - 1)}

        near = around(ahead_s)
        # If other requests use the device, two borders are compared. With the first one, the loads
        # are over when the plan is made. With the second one, they are over when a step of others
        # ends.
        ends_s = {b: end_s(b) for b in (near | around(planned_s) if plan_matters else near)}
        best = min(ends_s, key=ends_s.__getitem__)
        least_s = ends_s[best]
        if costs.others_s:
            border = min(near)
            # Further left loads end no sooner, and as much is computed after them.
            after_s = costs.others_s * costs.pipelined
            after_s += self._rest_s(_next_run(view, self._later, self._token(border))[1])
            while (border := self._candidates.rfind(1, 0, border)) >= 0:
                if self._link_s(border) + after_s >= least_s:
                    break
                if (took_s := end_s(border)) < least_s:
                    best = border
                    least_s = took_s
        return _Split(start_s, jumped, best, least_s)


def with_loads(costs: PromptCosts, view: View, tiers: TierLoads) -> PromptCosts:
    """The costs of a prompt with these loads."""
    wanted = tiers.tiers_of(view.states.translate(_WANTED), view.first)
    present = tiers.tiers_of(view.states.translate(_TO_BE_PRESENT), view.first)
    several = len({*present} - {NO_TIER}) > 1
    silence_s = max((tiers.silence_s[tier] for tier in {*wanted} - {NO_TIER}), default=0.0)
    load = tiers.average(wanted)
    return replace(costs, load=load, silence_s=silence_s, tiers=tiers if several else None)


def loads_s(view: View, costs: PromptCosts, progress: LoadProgress) -> float:
    """Predicted time until all wanted blocks have landed."""
    return _Loads(view, costs, progress).load_s(0)


def next_landings(
    view: View, costs: PromptCosts, progress: LoadProgress, within_s: float
) -> list[int]:
    """The wanted blocks that land within some time, and a few more: as many as are read at once.
    The first one to land is first."""
    loads = _Loads(view, costs, progress)
    count = min(loads.count_within(within_s), view.states.count(BlockState.WANTED))
    if costs.tiers is None:  # one tier is read from the end of the prompt
        blocks: list[int] = []
        at = len(view.states)
        while len(blocks) < count:
            at = view.states.rfind(BlockState.WANTED, 0, at)
            blocks.append(view.first + at)
        return blocks
    lands_s = loads.landing_s()[::-1]  # of blocks that land together, the last one comes first
    soonest = np.argsort(lands_s, kind="stable")[:count]
    return [view.first + len(lands_s) - 1 - int(at) for at in soonest]


class _Loads:
    """Predictions of the loads of one prompt.

    Attributes:
        where: the tier of each wanted block, and NO_TIER for all other blocks. Without costs by
            tier, all wanted blocks are in tier 0.
        tiers: the tiers that blocks are wanted from.
    """

    def __init__(self, view: View, costs: PromptCosts, progress: LoadProgress) -> None:
        self._ends = view.end_wanted
        self._end_tier = 0
        # Of use only before an end.
        self._present = view.states.translate(_TO_BE_PRESENT) if self._ends else b""
        if costs.tiers is None:
            self._costs: Sequence[LoadCost] = (costs.load,)
            silence_s: Sequence[float] = (costs.silence_s,)
            self.where = view.states.translate(_IN_TIER_0)
            landed_tiers = b"\x00"
        else:
            self._costs = costs.tiers.costs
            silence_s = costs.tiers.silence_s
            self.where = costs.tiers.tiers_of(view.states.translate(_WANTED), view.first)
            # Within a tier, landed blocks are right of all that are wanted.
            landed_tiers = costs.tiers.tiers_of(view.states.translate(_PRESENT), view.first)
            if self._ends:
                self._end_tier = costs.tiers.tiers[view.first + self._present.rfind(1)]
        self.tiers = [tier for tier in range(len(self._costs)) if tier in self.where]
        if self._ends and self._end_tier not in self.tiers:
            self.tiers.append(self._end_tier)
        self._since_s: dict[int, float] = {}
        self._paces: dict[int, LoadPace] = {}
        self._any_landed: dict[int, bool] = {}
        for tier in self.tiers:
            cost, silent_s = self._costs[tier], silence_s[tier]
            # A tier may have stalled while it was read for other prompts.
            since_s = max(progress.since_s, silent_s if cost.is_stalled(silent_s) else 0.0)
            any_landed = progress.any_landed and tier in landed_tiers
            self._since_s[tier] = since_s
            self._any_landed[tier] = any_landed
            self._paces[tier] = cost.pace(since_s, any_landed=any_landed)

    def load_s(self, border: int) -> float:
        """The time until the wanted blocks right of a border have landed, and the end blocks, if
        any block right of it is there or will be."""
        return max([self.tier_s(tier, border) for tier in self.tiers], default=0.0)

    def tier_s(self, tier: int, border: int = 0) -> float:
        """As `load_s`, for the blocks of one tier."""
        blocks = self.where.count(tier, border)
        if self._ends and tier == self._end_tier and self._present.find(1, border) >= 0:
            blocks += self._ends
        return self._paces[tier].load_s(blocks)

    def landing_s(self) -> FloatArray:
        """The time until each wanted block has landed; infinite for all other blocks."""
        where = np.frombuffer(self.where, np.uint8)
        found = np.full(len(where), np.inf)
        for tier in self.tiers:
            blocks = np.flatnonzero(where == tier)
            if len(blocks):
                next_s = self.tier_s(tier, int(blocks[-1]))
                found[blocks] = next_s + self._costs[tier].block_s * np.arange(len(blocks))[::-1]
        return found

    def count_within(self, within_s: float) -> int:
        """How many blocks all tiers bring in some time, with the blocks that are being read."""
        brought = 0
        for tier in self.tiers:
            cost = self._costs[tier]
            most = math.ceil(within_s / max(cost.block_s, 1e-6))
            brought += min(self.where.count(tier), cost.depth + most)
        return brought

    @property
    def overdue(self) -> bool:
        """Whether a block was predicted to land by now, and has not."""
        return any(
            self._costs[tier].is_overdue(self._since_s[tier], any_landed=self._any_landed[tier])
            for tier in self.tiers
        )

    @property
    def stalled(self) -> bool:
        """Whether no block has come for far longer than predicted."""
        return any(self._costs[tier].is_stalled(self._since_s[tier]) for tier in self.tiers)

    def waits_s(self, costs: PromptCosts) -> list[float]:
        """When the device can begin if it waits first for all blocks of a tier, for each tier but
        the one whose loads end last."""
        ends_s = [self.tier_s(tier) for tier in self.tiers]
        waits_s = [each for each in ends_s if costs.backlog_s < each < max(ends_s)]
        if costs.others_s:
            return [_delayed_step_s(each, costs.backlog_s, costs) for each in waits_s]
        return waits_s


class _Jumped(NamedTuple):
    """Blocks that the device will jump over.

    Attributes:
        marks: a mark for each block that it will jump over.
        waits_s: tokens at which it waits for such a block, and for how long.
    """

    marks: bytes
    waits_s: Sequence[tuple[int, float]] = ()


def _jumped(
    view: View, loads: _Loads, chunk_tokens: int, costs: PromptCosts, start_s: float
) -> _Jumped:
    """The landed blocks that the front can jump over. With several tiers also wanted blocks that
    land before the device, which begins at `start_s`, would have computed them.

    Within a tier these are the blocks from some border on, since later blocks land sooner and are
    computed later. The leftmost border of all tiers is found first. From there on the device jumps
    over the blocks of that tier, so it reaches all later blocks sooner.
    """
    now = _attachable(view)
    if costs.tiers is None or view.end_blocks:  # as in `look_ahead`
        return _Jumped(now)
    lands_s = loads.landing_s()
    cost = costs.prefill
    edges = np.arange(view.first, view.first + len(now) + 1) * view.block_tokens
    begin = edges[:-1].clip(view.front)
    tokens = edges[1:].clip(max=view.prompt_tokens) - begin
    token_s = (cost.fixed_s + cost.token_s * cost.padded(chunk_tokens)) / chunk_tokens
    took_s = tokens * (token_s + cost.prefix_s * begin / chunk_tokens)
    took_s += cost.pair_s * tokens * (begin + (tokens + 1) / 2)
    where = np.frombuffer(loads.where, np.uint8)
    there = np.frombuffer(now, bool).copy()
    took_s[there] = 0.0
    waits_s: list[tuple[int, float]] = []
    while True:
        ready_s = start_s + np.cumsum(took_s)
        in_time = lands_s <= ready_s
        if not in_time.any():
            return _Jumped(_worth_loading(view, there.tobytes(), cost), waits_s)
        first = int(np.argmax(in_time))
        wait_s = max(0.0, float(lands_s[first] - ready_s[first] + took_s[first]))
        waits_s.append((int(begin[first]), wait_s))
        of_tier = where == where[first]
        there[first:] |= of_tier[first:]
        took_s[first:][of_tier[first:]] = 0.0
        took_s[first] = wait_s
        lands_s[of_tier] = np.inf


def _overlap_gain(
    view: View, later: bytes, chunk_tokens: int, costs: PromptCosts
) -> tuple[int, float]:
    """The first block from which all blocks up to an overlapped last step are stored, and the time
    in seconds that this step may begin before the end of the loads."""
    stop = later.rfind(1) + 1
    end = min((view.first + stop) * view.block_tokens, view.limit)
    # During a pause others decode, and the step would wait beside them.
    alone = not costs.others_s and not costs.pause_s and not view.end_blocks
    if not stop or not alone or view.prompt_tokens - end > chunk_tokens:
        return 0, 0.0
    last_s = costs.prefill.step_s(end, view.prompt_tokens)
    return later.rfind(0, 0, stop) + 1, costs.overlap_share * min(costs.load.last_s, last_s)


def _delayed_step_s(loads_s: float, device_s: float, costs: PromptCosts) -> float:
    """When a step begins that loads delay: they end after its plan was to be made.

    Steps of other requests run one after another from `device_s` on, until this one is planned.
    With pipelined steps, it begins when the step is over that began with its plan.

    Args:
        loads_s: when the loads end.
        device_s: when the device has computed what is before the step.
    """
    others_s = costs.others_s
    unsure_s = costs.load.error * loads_s + costs.prefill.error * device_s
    if unsure_s > others_s / 2:
        seen_s = max(device_s, loads_s + others_s / 2)  # on average half of a step is left
    else:
        seen_s = device_s + math.ceil(max(0.0, loads_s - device_s) / others_s) * others_s
    return seen_s + others_s * costs.pipelined


def next_step(
    view: View,
    *,
    mode: Mode,
    chunk_tokens: int,
    costs: PromptCosts,
    progress: LoadProgress,
) -> StepPlan:
    """Decide the step that starts at the front, which touches no island. It may compute islands
    that are not worth a step of their own.

    Args:
        chunk_tokens: the most that the scheduler would compute in this step.
    """
    furthest = min(view.front + chunk_tokens, view.prompt_tokens)
    auto = mode == "auto"

    def edge_of(loads: bool) -> int:
        if not auto:
            return min(furthest, island_start(view))
        return min(furthest, _worth_a_step(view, chunk_tokens, costs, loads=loads))

    if not view.wanted:
        return StepPlan(edge_of(loads=False))
    if mode == "load":
        return StepPlan(view.front, wait=True)
    outlook = look_ahead(view, chunk_tokens=chunk_tokens, costs=costs, progress=progress)
    if mode == "auto" and _computing_wins(outlook, progress):
        edge = edge_of(loads=False)
        return StepPlan(edge, load_from=None, ends_loads=is_overdue(view, costs, progress))
    edge = edge_of(loads=True)
    left_s = patience_s(view, chunk_tokens=chunk_tokens, costs=costs, progress=progress)
    # Others would fill the step that this prompt leaves out, and the next one.
    stalled = costs.others_wait and is_stalled(view, costs, progress)
    if mode == "auto" and (left_s <= 0 or stalled):
        return StepPlan(edge, load_from=view.first)
    meet = outlook.meet_token
    slack = LOAD_SLACK if mode == "auto" else 0.0
    if meet == view.front or outlook.load_s <= outlook.both_s * (1 + slack):
        if mode == "auto" and costs.prefill.guessed:
            # A guess that is too high would never be corrected if nothing was computed.
            return StepPlan(_one_block(edge, view), load_from=view.first)
        if mode == "auto" and left_s < costs.others_s:
            # The wait would last until the device has stepped for others.
            return StepPlan(edge, load_from=view.first)
        # The wait ends: if no block lands, `since_s` grows, and with it the predicted load, until
        # computing is predicted to be quicker.
        wait_s = outlook.wait_s if meet == view.front else math.inf
        return StepPlan(view.front, wait=True, wait_s=wait_s, load_from=view.first)
    if mode == "auto" and left_s < costs.prefill.fixed_s:  # a short step makes one more necessary
        return StepPlan(edge, load_from=view.first)
    return _towards(meet, edge, view, costs)


def patience_s(
    view: View, *, chunk_tokens: int, costs: PromptCosts, progress: LoadProgress
) -> float:
    """How long a prompt may still wait for loads instead of computing: until it is one step later
    than if it had computed everything since it first relied on loads. The pause after that step
    does not count."""
    total, cost = view.prompt_tokens, costs.prefill
    start = view.front if progress.relied_from is None else progress.relied_from
    latest_s = cost.span_s(start, total, chunk_tokens) - progress.relied_s
    latest_s += cost.step_s(view.front, min(view.front + chunk_tokens, total)) - costs.pause_s
    not_landed = _ToCompute(view, _attachable(view), chunk_tokens, cost)
    return latest_s - _rest_s(view, chunk_tokens, costs, not_landed)


def island_start(view: View) -> int:
    """The start of the first landed block right of the front that can be attached, where a step
    must end; the end of the prompt if there is none."""
    return _next_run(view, _attachable(view), view.front)[0]


def should_load(
    view: View, *, mode: Mode, chunk_tokens: int, costs: PromptCosts, progress: LoadProgress
) -> bool:
    """Whether the stored blocks of a prompt should be loaded while it waits in the queue. Asked at
    arrival and again at polls."""
    if mode != "auto":
        return mode != "compute"
    ways = _Ways(view, chunk_tokens, costs, progress)
    # Behind enough work of others, loading alone is quick enough, whatever the best split takes.
    loading_wins = ways.compute_s >= ways.load_s * _least_gain(progress)
    return loading_wins or not _computing_wins(ways.outlook(), progress)


@functools.lru_cache(maxsize=1024)  # asked of every prompt that waits, in each step
def device_work(view: View, load_from: int | None) -> StepWork:
    """The work of a prompt if stored blocks from `load_from` on are loaded; None: no block is."""
    work, start = StepWork(), view.front
    if load_from is not None:
        for run in _LOADED.finditer(view.states, max(0, load_from - view.first)):
            stop = (view.first + run.start()) * view.block_tokens
            work += work_of(start, stop)
            start = max(start, min((view.first + run.end()) * view.block_tokens, view.limit))
    return work + work_of(start, view.prompt_tokens)


def is_overdue(view: View, costs: PromptCosts, progress: LoadProgress) -> bool:
    """Whether a block of the prompt was predicted to land by now, and has not."""
    return is_asked(view, progress.load_from) and _Loads(view, costs, progress).overdue


def is_stalled(view: View, costs: PromptCosts, progress: LoadProgress) -> bool:
    """Whether the prompt waits for a block, and its loads have stalled."""
    return is_asked(view, progress.load_from) and _Loads(view, costs, progress).stalled


def is_asked(view: View, load_from: int | None) -> bool:
    """Whether a block of the prompt is being read, or is next on the link."""
    if load_from is None or view.end_wanted:
        return load_from is not None
    return view.first + view.states.rfind(BlockState.WANTED) >= load_from


def overlap_span(
    view: View,
    *,
    missing_shares: Mapping[int, float],
    chunk_tokens: int,
    costs: PromptCosts,
) -> Span | None:
    """The stored tokens, from the front on, that an overlapped last step would find loaded or on
    their way if it began now (docs/scheduling.md#the-last-step). None: it must wait, or there will
    be no such step, as with end states: its first layer may need all of the end state.

    It begins when the loads are predicted to end before a step that begins now. The caller must see
    that no other request wants the device.

    Args:
        missing_shares: for each block whose bytes are arriving, the share that has not arrived.
        chunk_tokens: the most that the step may compute.
    """
    there = (BlockState.LANDED, BlockState.WANTED)
    count = next((i for i, state in enumerate(view.states) if state not in there), len(view.states))
    if view.end_blocks or any(state in there for state in view.states[count:]):
        return None  # the hole between these blocks is computed first
    wanted = [view.first + i for i in range(count) if view.states[i] == BlockState.WANTED]
    stop = min((view.first + count) * view.block_tokens, view.limit)
    fits = stop > view.front and view.prompt_tokens - stop <= chunk_tokens
    if not wanted or not fits or not all(block in missing_shares for block in wanted):
        return None
    left_s = costs.load.block_s * sum(missing_shares[block] for block in wanted)
    step_s = costs.prefill.step_s(stop, view.prompt_tokens)
    return Span(view.front, stop) if left_s <= step_s else None


def passing_tokens(
    rest: Span,
    chunk_tokens: int,
    *,
    ends_s: Iterable[float],
    last_ends_s: Iterable[float] = (),
    waiting: int,
    work: StepWork,
    cost: PrefillCost,
    backlog_s: float,
    pause_s: float = 0.0,
) -> int | None:
    """How many tokens a prompt computes in a step in which it passes earlier prompts, which wait
    for their loads or have their last step. 0: it has no part in the step. None: there is no limit.

    A prompt whose loads end while a step runs waits for the end of that step. So a step of prompts
    that pass ends when the loads do. If that is before the device is free, or before any step could
    end, nothing passes. The last step of a prompt that was loaded takes no longer than without
    those that pass.

    All other prompts then lose at most the time of a step that computes nothing, with what a model
    computes again of the prefix in each step. There is no limit unless one prompt gains more than
    `PASSING_COST` times what all of them lose. What the step does before this prompt takes its time
    in any case.

    Args:
        rest: the rest of its prefill.
        chunk_tokens: the most that it may compute in this step.
        ends_s: the time until the loads of each prompt that it passes are over.
        last_ends_s: the time until the last step of each such prompt is over. A prompt that has no
            part in that step loses the pause after it, too.
        waiting: how many prompts wait beside the one that gains.
        work: the work of the prompts before it in the step.
        backlog_s: the time until the step begins.
        pause_s: the time after the step in which none prefills, as in `PromptCosts`.
    """

    def end_s(tokens: int) -> float:
        return backlog_s + pause_s + cost.work_s(work + work_of(rest.start, rest.start + tokens))

    whole = min(chunk_tokens, rest.tokens)
    tokens = whole
    least_s = backlog_s if work == StepWork() else end_s(0)
    lost_s = waiting * cost.work_s(StepWork(prefix_tokens=rest.start))
    ends = [(each_s, lost_s) for each_s in ends_s]
    ends += [(each_s + pause_s, lost_s + waiting * pause_s) for each_s in last_ends_s]
    for each_s, all_lose_s in ends:
        gain_s = end_s(tokens) - max(each_s, least_s)
        if gain_s > PASSING_COST * all_lose_s:
            tokens = bisect_right(range(1, tokens + 1), each_s, key=end_s)
    return tokens if tokens < whole else None


def _computing_wins(outlook: Outlook, progress: LoadProgress) -> bool:
    return outlook.compute_s < min(outlook.both_s, outlook.load_s) * _least_gain(progress)


def _least_gain(progress: LoadProgress) -> float:
    """Computing must take so many times as long as a way with loads, if blocks are to be loaded."""
    return 1 + (COMPUTE_SLACK if progress.load_from is None else TIE)


def _towards(meet: int, edge: int, view: View, costs: PromptCosts) -> StepPlan:
    """A step towards the meeting point."""
    size = view.block_tokens
    smallest = _one_block(edge, view)
    stop = min(edge, max(meet, smallest))
    error = min(_LEAST_SURE, max(costs.prefill.error, costs.load.error))
    load_from = meet // size - int(error * (meet - stop) / size)
    # Half of the wrong predictions overshoot and lose time. A shorter step avoids that, and costs
    # the fixed time of one more step.
    at_risk_s = error * costs.prefill.step_s(view.front, stop) / 2
    if stop == meet and at_risk_s > costs.prefill.fixed_s:
        # Whole blocks: a block that is begun cannot be loaded.
        sure = view.front + int((meet - view.front) * (1 - error))
        stop = max(smallest, sure - sure % size)
    return StepPlan(stop, load_from=load_from)


class _ToCompute:
    """The spans right of the front that are not in marked blocks, and the time to compute them.
    Sums are kept: a plan asks for many borders, and a prompt may have hundreds of such spans."""

    def __init__(self, view: View, marked: bytes, chunk_tokens: int, cost: PrefillCost) -> None:
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._starts: list[int] = []
        self._stops: list[int] = []
        at = view.front
        while at < view.prompt_tokens:
            begin, end = _next_run(view, marked, at)
            if begin > at:
                self._starts.append(at)
                self._stops.append(begin)
            at = end
        self._sums_s = [0.0]  # by count: the time of so many first spans, as far as asked for

    def span_s(self, start: int, stop: int) -> float:
        """The time to compute what is in `[start, stop)`."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop) - 1
        if last < first:
            return 0.0
        if last == first:
            return self._one_s(max(start, self._starts[first]), min(stop, self._stops[first]))
        return (
            self._one_s(max(start, self._starts[first]), self._stops[first])
            + self._sum_s(last)
            - self._sum_s(first + 1)
            + self._one_s(self._starts[last], min(stop, self._stops[last]))
        )

    def _one_s(self, start: int, stop: int) -> float:
        return self._cost.span_s(start, stop, self._chunk_tokens)

    def _sum_s(self, count: int) -> float:
        """The time to compute the first `count` spans."""
        while len(self._sums_s) <= count:
            span = len(self._sums_s) - 1
            span_s = self._one_s(self._starts[span], self._stops[span])
            self._sums_s.append(self._sums_s[-1] + span_s)
        return self._sums_s[count]


def _rest_s(view: View, chunk_tokens: int, costs: PromptCosts, not_landed: _ToCompute) -> float:
    """The time to compute what is right of the front and has not landed. Where a pause follows each
    step, fewer steps that compute landed blocks too may take less time."""
    rest_s = not_landed.span_s(view.front, view.prompt_tokens)
    if not costs.pause_s:
        return rest_s
    return min(rest_s, costs.prefill.span_s(view.front, view.prompt_tokens, chunk_tokens))


def _worth_a_step(view: View, chunk_tokens: int, costs: PromptCosts, *, loads: bool) -> int:
    """As `island_start`, without the islands between holes that save less than the step loses that
    would end there.

    Args: loads: blocks are being loaded, so islands grow to the left. Where a pause follows each
        step, an island must be worth a step at its present size.
    """
    cost = costs.prefill
    marked = _attachable(view)
    start, stop = _next_run(view, marked, view.front)
    while start < stop:
        left = start // view.block_tokens - view.first - 1
        grows = loads and not costs.pause_s
        if left < 0 or (grows and view.states[left] == BlockState.WANTED):
            break
        following = _next_run(view, marked, stop)
        unused = -(start - view.front) % chunk_tokens
        if following[0] == view.prompt_tokens:
            jump_s = cost.span_s(view.front, start, chunk_tokens)
            jump_s += cost.span_s(stop, view.prompt_tokens, chunk_tokens)
            saves = jump_s <= cost.span_s(view.front, view.prompt_tokens, chunk_tokens)
        elif costs.others_wait:
            # They fill the step that ends here, so it takes as long as one that goes on.
            saves = stop - start >= unused
        else:
            # Steps go on after the next island, so parts of them count. The step that ends here
            # leaves out `unused` tokens of a whole one.
            fixed_s = cost.work_s(StepWork(prefix_tokens=stop))
            share = (unused - (stop - start)) / chunk_tokens
            saves = cost.step_s(start, stop) >= (1 + share) * fixed_s
        if saves:
            break
        start, stop = following
    return start


def _worth_loading(view: View, present: bytes, cost: PrefillCost) -> bytes:
    """The marks of `present` without islands between holes that take less time to compute than the
    step that would begin after them."""
    marked = bytearray(present)
    stop = max(0, marked.find(0))  # the front jumps over the first blocks in any case
    while (start := marked.find(1, stop)) >= 0 and (stop := marked.find(0, start)) >= 0:
        begin, end = ((view.first + i) * view.block_tokens for i in (start, stop))
        fixed_s = cost.work_s(StepWork(prefix_tokens=end))
        if cost.step_s(begin, end) - fixed_s < fixed_s:
            marked[start:stop] = bytes(stop - start)
    return bytes(marked)


def _attachable(view: View) -> bytes:
    """Marks of the landed blocks that the front can jump over when it reaches them."""
    if not view.attachable:
        return bytes(len(view.states))
    return view.states.translate(_PRESENT)


def _one_block(edge: int, view: View) -> int:
    """The end of the shortest useful step: the end of the block at the front."""
    return min(edge, (view.front // view.block_tokens + 1) * view.block_tokens)


def _next_run(view: View, marked: bytes, at: int) -> tuple[int, int]:
    """Token span of the next run of marked blocks at or after token `at`; past the prompt if there
    is none."""
    size = view.block_tokens
    begin = marked.find(1, at // size - view.first)
    if begin < 0 or at >= view.limit:
        return view.prompt_tokens, view.prompt_tokens
    stop = marked.find(0, begin)
    stop = len(marked) if stop < 0 else stop
    end = min((view.first + stop) * size, view.limit)
    return max(at, (view.first + begin) * size), end
