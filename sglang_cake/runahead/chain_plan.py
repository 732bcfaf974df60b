"""Whether a prompt is shared, with how many helpers, and the span of each. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sglang_cake.core.keys import Span
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, PromptCosts
from sglang_cake.loading.meet import View
from sglang_cake.loading.planner import LoadProgress, island_start, look_ahead
from sglang_cake.runahead.partition import Partition, balanced
from sglang_cake.runahead.partition_table import PartitionTable

# A chain is used if it is predicted to take at most this share of one worker's time: a wrong
# prediction costs more than a small gain.
PAYS = 0.9
_ALL_COUNTS = 8  # up to so many workers, each number of them is tried
_NO_LIMIT = 2**31  # tokens of a chain's step, for the meeting point


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A chain: `helpers` first, the owner last, one span each."""

    helpers: tuple[int, ...]
    partition: Partition
    predicted_s: float
    alone_s: float

    @property
    def saved_s(self) -> float:
        return self.alone_s - self.predicted_s


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """The measured costs of a chain on this machine."""

    prefill: PrefillCost
    handover_s: float  # from the offers to the first layer, and at the end
    bytes_per_s: float  # of the link into the owner
    token_bytes: int  # K and V of one token, all layers

    def chain_s(self, partition: Partition) -> float:
        """Predicted seconds of a chain: its slowest worker or busiest link, and the handover."""
        slowest_s = max(self.prefill.step_s(*span) for span in partition.spans)
        crossing = (partition.bounds[-2] - partition.bounds[0]) * self.token_bytes
        return max(slowest_s, crossing / self.bytes_per_s) + self.handover_s


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Limits of a chain's partition.

    Attributes:
        step_tokens: most tokens of one worker's only forward.
        table: searched partitions, preferred to computed ones.
    """

    page_tokens: int
    step_tokens: int
    table: PartitionTable | None = None


@dataclass(frozen=True, slots=True)
class StoredTail:
    """The loads of the prompt's stored blocks, from the end of the prompt."""

    view: View
    progress: LoadProgress
    cost: LoadCost

    @property
    def facts(self) -> tuple[View, LoadCost, LoadProgress]:
        """The facts that a plan depends on. The wait for the next block counts only when it has
        doubled: a plan changes little before."""
        block_s = max(1e-3, self.cost.load_s(1, any_landed=self.progress.any_landed))
        waits = int(self.progress.since_s / block_s).bit_length()
        return self.view, self.cost, replace(self.progress, since_s=waits, relied_s=0.0)


def plan_chain(
    span: Span,
    helpers: Sequence[int],
    costs: ChainCosts,
    limits: ChainLimits,
    *,
    pays: float = PAYS,
) -> ChainPlan | None:
    """The chain that saves most time over one worker, or None if none saves enough.

    Args:
        span: tokens that may be shared; the chain takes all of them, or the front.
        helpers: ranks that may be asked.
        pays: the share of one worker's time that a chain may take.
    """

    def plan(workers: int) -> ChainPlan | None:
        partition = _within(span, workers, costs, limits)
        if partition is None:
            return None
        alone_s = costs.prefill.step_s(partition.bounds[0], partition.bounds[-1])
        predicted_s = costs.chain_s(partition)
        return ChainPlan(tuple(helpers[: workers - 1]), partition, predicted_s, alone_s)

    return _best(plan, helpers, pays)


def plan_beside_loader(
    tail: StoredTail,
    helpers: Sequence[int],
    costs: ChainCosts,
    limits: ChainLimits,
    *,
    pays: float = PAYS,
) -> ChainPlan | None:
    """The chain that meets the loader: [front, x) is shared, tokens from x on are loaded.

    x and the partition are found together (docs/theory.md): p workers count as one that is p times
    as fast and has one handover. Its meeting point is x, and the front up to x is split so that all
    workers need the same time. None if loading everything is faster, or one worker with the loader
    is nearly as fast.
    """
    view = tail.view

    def meet(prefill: PrefillCost, step_tokens: int) -> tuple[int, float]:
        """The meeting point of one worker with these costs, and its time."""
        outlook = look_ahead(
            view,
            chunk_tokens=step_tokens,
            costs=PromptCosts(prefill, tail.cost),
            progress=tail.progress,
        )
        alone = outlook.compute_s <= min(outlook.both_s, outlook.load_s)
        return (view.prompt_tokens if alone else outlook.meet_token), outlook.best_s

    alone_s = meet(costs.prefill, limits.step_tokens)[1]

    def plan(workers: int) -> ChainPlan | None:
        shared = replace(
            costs.prefill,
            fixed_s=costs.prefill.fixed_s + costs.handover_s,
            token_s=costs.prefill.token_s / workers,
            pair_s=costs.prefill.pair_s / workers,
        )
        stop, meet_s = meet(shared, _NO_LIMIT)
        span = Span(view.front, min(stop, island_start(view)))
        partition = _within(span, workers, costs, limits)
        if partition is None:
            return None
        # `meet` took the chain for a worker that is p times as fast; links may make it slower.
        slower_s = costs.chain_s(partition) - shared.step_s(span.start, partition.bounds[-1])
        predicted_s = meet_s + max(0.0, slower_s)
        return ChainPlan(tuple(helpers[: workers - 1]), partition, predicted_s, alone_s)

    return _best(plan, helpers, pays)


def forced_plan(
    ends: object, span: Span, helpers: Sequence[int], limits: ChainLimits
) -> ChainPlan | None:
    """The chain whose spans have these ends, for measuring partitions.

    None if there are too few helpers, or `ends` are no ends of spans within `span`, or a span has
    more than `step_tokens`.
    """
    if not isinstance(ends, list) or not 1 < len(ends) <= len(helpers) + 1:
        return None
    if any(type(end) is not int for end in ends) or ends[-1] > span.stop:
        return None
    if any(end % limits.page_tokens and end != span.stop for end in ends):
        return None
    try:
        partition = Partition((span.start, *ends))
    except ValueError:
        return None
    if max(each.tokens for each in partition.spans) > limits.step_tokens:
        return None
    return ChainPlan(tuple(helpers[: len(ends) - 1]), partition, 0.0, 0.0)


def _best(
    plan: Callable[[int], ChainPlan | None], helpers: Sequence[int], pays: float
) -> ChainPlan | None:
    plans: list[ChainPlan] = []
    for workers in _worker_counts(len(helpers) + 1):
        found = plan(workers)
        if found is None:
            continue
        if workers > _ALL_COUNTS and plans and found.saved_s < plans[-1].saved_s:
            break  # the links or the handover limit the chain, with more workers too
        plans.append(found)
    paying = [each for each in plans if each.predicted_s <= pays * each.alone_s]
    return max(paying, key=lambda each: each.saved_s, default=None)


def _worker_counts(most: int) -> list[int]:
    """The numbers of workers that are tried. Of many, not all are: the scheduler waits for the
    plan, and the gain changes little from one to the next."""
    counts = list(range(2, min(most, _ALL_COUNTS) + 1))
    while counts and counts[-1] < most:
        counts.append(min(most, counts[-1] * 3 // 2))
    return counts


def _within(span: Span, workers: int, costs: ChainCosts, limits: ChainLimits) -> Partition | None:
    """A partition of the longest front of the span that forwards of `step_tokens` can compute."""
    page_tokens, table = limits.page_tokens, limits.table
    stop = min(span.stop, span.start + workers * limits.step_tokens)
    while (stop - span.start) >= workers * page_tokens:
        part = Span(span.start, stop)
        found = table.predict(part, workers, page_tokens=page_tokens) if table else None
        partition = found or balanced(part, workers, costs.prefill.step_s, page_tokens=page_tokens)
        longest = max(each.tokens for each in partition.spans)
        if longest <= limits.step_tokens:
            return partition
        fewer = span.start + int(part.tokens * limits.step_tokens / longest)
        stop = min(fewer, stop - 1) // page_tokens * page_tokens
    return None
