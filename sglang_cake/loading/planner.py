"""Compute, load, or both: decided at arrival and again at every poll, on predicted costs.

A prompt's first token can be had in three ways: everything computed, everything that is stored
loaded, or compute from the front while loads come from the back. `look_ahead` predicts all three;
`next_step` takes the best and says how far the next step computes; `worth_loading` says whether to
load meanwhile what waits for its turn. Nothing is final: a prompt that is only computed is loaded
once that pays, and the other way round.

The split is greedy: nothing is fixed beforehand, each step starts from what has landed by then
(theory: 1.02 x a clairvoyant's time). Only the size of a step is predicted. A running step cannot
be aborted, so what it overshoots past the meeting point is lost; so steps are whole chunks while
the meeting point is far, then as much of the way as the predictions are good for, then the rest.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from sglang_cake.loading.cost_model import Costs, StepWork, work_of
from sglang_cake.loading.meet import BlockState, View

Mode = Literal["auto", "both", "compute", "load"]

# How much longer computing alone may take than the best way with loads before a block is read. What
# is being loaded goes on unless computing alone is quicker: between the two nothing changes.
COMPUTE_SLACK = 0.015
TIE = 1e-9  # two sums of the same steps differ by less
# How much longer loading alone may take than racing and still leave the device to others.
LOAD_SLACK = 0.01
# No step goes further towards the meeting point than this share when predictions are poor.
_LEAST_SURE = 0.5

_PRESENT = bytes(1 if s is BlockState.LANDED else 0 for s in BlockState)
_TO_BE_PRESENT = bytes(1 if s in (BlockState.LANDED, BlockState.WANTED) else 0 for s in BlockState)
_WANTED = bytes(1 if s is BlockState.WANTED else 0 for s in BlockState)
_PAD = bytes(256 - len(BlockState))


@dataclass(frozen=True, slots=True)
class Progress:
    """How the loads of a prompt come on.

    Attributes:
        since_s: since the last block landed, or since the link began to serve the prompt.
        begun: whether a block has landed.
        keep: as of the last `Step`: no read of a block below it is under way; None: of none.
    """

    since_s: float = 0.0
    begun: bool = False
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted seconds from now to the end of prefill, by way, and where compute meets load."""

    compute_s: float
    load_s: float
    both_s: float
    meet_token: int  # what is stored right of it is loaded

    @property
    def best_s(self) -> float:
        """The remaining T* (theory B), with whole steps and blocks."""
        return min(self.compute_s, self.load_s, self.both_s)


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now.

    Attributes:
        stop: compute up to this token; with `wait` the front, and nothing is computed.
        keep: block from which on loads are worth starting; None: nothing is worth loading now.
        late: with `keep` None: the link owes a block, and is not asked again.
    """

    stop: int
    wait: bool = False
    keep: int | None = 0
    late: bool = False


def look_ahead(view: View, *, chunk_tokens: int, costs: Costs, progress: Progress) -> Outlook:
    """Predict the three ways (theory B): C(x) = l (n - x), over block borders x."""
    wanted = view.states.translate(_WANTED + _PAD)
    now = view.states.translate(_PRESENT + _PAD)
    later = view.states.translate(_TO_BE_PRESENT + _PAD)

    def compute_s(held: bytes, start: int, stop: int) -> float:
        total, at = 0.0, start
        while at < stop:
            begin, end = _next_held(view, held, at)
            total += costs.prefill.span_s(at, min(begin, stop), chunk_tokens)
            at = end
        return total

    since_s = progress.since_s if _is_asked(view, progress) else 0.0

    def load_s(border: int) -> float:
        return costs.load.load_s(wanted.count(1, border), since_s=since_s, begun=progress.begun)

    unbroken, early_s = _early_last_step(view, later, chunk_tokens, costs)

    def link_s(border: int) -> float:  # until the last step can begin
        return max(0.0, load_s(border) - (early_s if border >= unbroken else 0.0))

    def token(border: int) -> int:
        return max(view.front, (view.first + border) * view.block_tokens)

    def ahead_s(x: int) -> float:  # of the device, until x is computed
        return costs.backlog_s + compute_s(now, view.front, x)

    def both_s(border: int) -> float:
        x = token(border)
        device_s, loads_s = ahead_s(x), link_s(border)
        return max(device_s, loads_s + _to_next_step_s(loads_s, device_s, costs)) + rest_s(x)

    def rest_s(x: int) -> float:  # what no store has, right of x
        return compute_s(later, x, view.prompt_tokens)

    borders = range(wanted.rfind(1) + 2)
    meet = bisect_left(borders, 0.0, key=lambda b: ahead_s(token(b)) - link_s(b))
    best = min({max(0, min(meet, borders[-1])), max(0, meet - 1)}, key=both_s)
    if costs.others_s:  # a border further off may be better, if loads end with a step of others
        least_s = both_s(best)
        for border in range(best - 1, -1, -1):
            if link_s(border) >= least_s:
                break
            if (took_s := both_s(border)) < least_s:
                best, least_s = border, took_s
    # What nobody has is computed in any case.
    meet_token = min(_next_held(view, later, token(best))[0], token(borders[-1]))
    return Outlook(
        compute_s=ahead_s(view.prompt_tokens),
        load_s=both_s(0),
        both_s=both_s(best),
        meet_token=max(token(best), meet_token),
    )


def _early_last_step(
    view: View, later: bytes, chunk_tokens: int, costs: Costs
) -> tuple[int, float]:
    """(border from which on all is stored, up to the last step; by how much that step may begin
    before the loads are over): while the last block comes, if nobody else wants the device."""
    stop = later.rfind(1) + 1
    end = min((view.first + stop) * view.block_tokens, view.limit)
    if not stop or costs.others_s or view.prompt_tokens - end > chunk_tokens:
        return 0, 0.0
    last_s = costs.prefill.step_s(end, view.prompt_tokens)
    return later.rfind(0, 0, stop) + 1, costs.overlap * min(costs.load.last_s, last_s)


def _to_next_step_s(link_s: float, device_s: float, costs: Costs) -> float:
    """From the end of loads to that of the step that the device is in by then for others alone; the
    first of these began when it was through with this prompt."""
    if link_s <= device_s or not costs.others_s:
        return 0.0
    unsure_s = costs.load.error * link_s + costs.prefill.error * device_s
    if costs.pipelined or unsure_s > costs.others_s / 2:
        return costs.others_s / 2  # nobody knows: half of one is yet to come, on average
    return (device_s - link_s) % costs.others_s


def next_step(
    view: View,
    *,
    mode: Mode,
    chunk_tokens: int,
    costs: Costs,
    progress: Progress,
) -> Step:
    """Decide the step that starts at the front, which touches no island.

    Args:
        chunk_tokens: what the scheduler would compute at most in this step.
    """
    reach = min(view.front + chunk_tokens, view.prompt_tokens)
    edge = min(reach, room(view))
    if BlockState.WANTED not in view.states:
        return Step(edge)
    if mode == "load":
        return Step(view.front, wait=True)
    outlook = look_ahead(view, chunk_tokens=chunk_tokens, costs=costs, progress=progress)
    if mode == "auto" and _computing_wins(outlook, progress):
        return Step(edge, keep=None, late=is_late(view, costs, progress))
    meet = outlook.meet_token
    slack = LOAD_SLACK if mode == "auto" else 0.0
    if meet == view.front or outlook.load_s <= outlook.both_s * (1 + slack):
        if mode == "auto" and costs.prefill.guessed:
            # Or a guess that is too high would stand for ever: nothing would be computed.
            return Step(_one_block(edge, view), keep=view.first)
        # No wait for good: a loader that does not keep its promise makes `since_s`, and with it
        # the predicted load, grow until compute goes on.
        return Step(view.front, wait=True, keep=view.first)
    return _towards(meet, edge, view, costs)


def room(view: View) -> int:
    """Where a step that starts at the front ends at the latest: at the first landed block."""
    return _next_held(view, view.states.translate(_PRESENT + _PAD), view.front)[0]


def worth_loading(
    view: View, *, mode: Mode, chunk_tokens: int, costs: Costs, progress: Progress
) -> bool:
    """Whether what is stored of a prompt should be loaded while it waits for its turn.

    Asked at arrival and again at polls, with the device's load as it is then.

    Args:
        costs: `backlog_s` is what goes before it.
    """
    if mode != "auto":
        return mode != "compute"
    outlook = look_ahead(view, chunk_tokens=chunk_tokens, costs=costs, progress=progress)
    return not _computing_wins(outlook, progress)


def device_work(view: View, keep: int | None) -> StepWork:
    """What a prompt computes if what lies right of block `keep` is loaded; None: nothing is."""
    loads = keep is not None and BlockState.WANTED in view.states
    stop = min(view.prompt_tokens, (keep or 0) * view.block_tokens) if loads else view.prompt_tokens
    return work_of(view.front, max(view.front, stop))


def is_late(view: View, costs: Costs, progress: Progress) -> bool:
    """Whether the link owes the prompt a block that should have come by now."""
    late = costs.load.is_late(progress.since_s, begun=progress.begun)
    return late and _is_asked(view, progress)


def _is_asked(view: View, progress: Progress) -> bool:
    """Whether the link works for the prompt."""
    keep = progress.keep
    return keep is not None and view.first + view.states.rfind(BlockState.WANTED) >= keep


def _computing_wins(outlook: Outlook, progress: Progress) -> bool:
    slack = COMPUTE_SLACK if progress.keep is None else TIE
    return outlook.compute_s < min(outlook.both_s, outlook.load_s) * (1 + slack)


def _towards(meet: int, edge: int, view: View, costs: Costs) -> Step:
    """A step towards the meeting point."""
    size = view.block_tokens
    smallest = _one_block(edge, view)
    stop = min(edge, max(meet, smallest))
    error = min(_LEAST_SURE, max(costs.prefill.error, costs.load.error))
    keep = meet // size - int(error * (meet - stop) / size)
    # In the last step towards the meet: what a wrong prediction would cost, half of the time,
    # against another step.
    at_risk_s = error * costs.prefill.step_s(view.front, stop) / 2
    if stop == meet and at_risk_s > costs.prefill.fixed_s:
        # Whole blocks: one that is begun is one that cannot be loaded.
        sure = view.front + int((meet - view.front) * (1 - error))
        stop = max(smallest, sure - sure % size)
    return Step(stop, keep=keep)


def _one_block(edge: int, view: View) -> int:
    """Where the least step that is of use ends."""
    return min(edge, (view.front // view.block_tokens + 1) * view.block_tokens)


def _next_held(view: View, held: bytes, at: int) -> tuple[int, int]:
    """Token span of the next run of held blocks at or after token `at`; past the prompt: none."""
    size = view.block_tokens
    begin = held.find(1, at // size - view.first)
    if begin < 0 or at >= view.limit:
        return view.prompt_tokens, view.prompt_tokens
    stop = held.find(0, begin)
    stop = len(held) if stop < 0 else stop
    end = min((view.first + stop) * size, view.limit)
    return max(at, (view.first + begin) * size), end
