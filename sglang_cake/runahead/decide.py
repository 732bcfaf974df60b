"""Whether a prompt is shared, with how many, and who computes what. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sglang_cake.core.spans import Span
from sglang_cake.loading.cost_model import Costs as RaceCosts
from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.loading.meet import View
from sglang_cake.loading.planner import Progress, island_start, look_ahead
from sglang_cake.runahead.partition import Partition, balanced
from sglang_cake.runahead.table import PartitionTable

# A chain is used if it is predicted to take at most this share of what one worker needs: being
# wrong about a prompt that gains a little costs more than it gains.
PAYS = 0.9
_NO_LIMIT = 2**31  # tokens of a chain's step, as far as the meeting point is concerned


@dataclass(frozen=True, slots=True)
class Plan:
    """A chain: `helpers` first, the owner last, one span each."""

    helpers: tuple[int, ...]
    partition: Partition
    predicted_s: float
    alone_s: float

    @property
    def saved_s(self) -> float:
        """What it is predicted to save."""
        return self.alone_s - self.predicted_s


@dataclass(frozen=True, slots=True)
class Costs:
    """What the chain costs here, as far as it was measured."""

    prefill: PrefillCost
    handover_s: float  # from asking to the first layer, and what is lost at the end
    bytes_per_s: float  # of the link into the owner
    token_bytes: int  # K and V of one token, all layers

    def chain_s(self, partition: Partition) -> float:
        """Predicted seconds of a chain: its slowest worker or busiest link, and handing over."""
        slowest_s = max(self.prefill.step_s(*span) for span in partition.spans)
        crossing = (partition.bounds[-2] - partition.bounds[0]) * self.token_bytes
        return max(slowest_s, crossing / self.bytes_per_s) + self.handover_s


@dataclass(frozen=True, slots=True)
class Limits:
    """What a partition must keep to.

    Attributes:
        step_tokens: what one worker computes at most, in its one forward.
        table: searched partitions, used where there are some.
    """

    page_tokens: int
    step_tokens: int
    table: PartitionTable | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """What a store is about to bring of the prompt, from its end."""

    view: View
    progress: Progress
    cost: LoadCost


def plan_chain(
    span: Span, helpers: Sequence[int], costs: Costs, limits: Limits, *, pays: float = PAYS
) -> Plan | None:
    """The chain that saves most time over one worker, or None if none saves enough.

    Args:
        span: what may be shared; the chain takes all of it, or the front of it.
        helpers: who may be asked.
        pays: the share of one worker's time that a chain may take.
    """

    def plan(workers: int) -> Plan | None:
        partition = _within(span, workers, costs, limits)
        if partition is None:
            return None
        alone_s = costs.prefill.step_s(partition.bounds[0], partition.bounds[-1])
        return Plan(tuple(helpers[: workers - 1]), partition, costs.chain_s(partition), alone_s)

    return _best(plan, helpers, pays)


def plan_beside_loader(
    loading: Loading, helpers: Sequence[int], costs: Costs, limits: Limits, *, pays: float = PAYS
) -> Plan | None:
    """The chain that meets the loader: [front, x) is shared, what is right of x is loaded.

    x and the partition belong together (docs/theory.md): p workers are taken for one that is p
    times as fast and hands over once, its meeting point is x, and the front up to x is split so
    that all need the same time. None if loading all of it is quicker, or one worker and the loader
    nearly as quick.
    """
    view = loading.view

    def race(prefill: PrefillCost, step_tokens: int) -> tuple[int, float]:
        outlook = look_ahead(
            view,
            chunk_tokens=step_tokens,
            costs=RaceCosts(prefill, loading.cost),
            progress=loading.progress,
        )
        alone = outlook.compute_s <= min(outlook.both_s, outlook.load_s)
        return (view.prompt_tokens if alone else outlook.meet_token), outlook.best_s

    alone_s = race(costs.prefill, limits.step_tokens)[1]

    def plan(workers: int) -> Plan | None:
        shared = replace(
            costs.prefill,
            fixed_s=costs.prefill.fixed_s + costs.handover_s,
            token_s=costs.prefill.token_s / workers,
            pair_s=costs.prefill.pair_s / workers,
        )
        stop, race_s = race(shared, _NO_LIMIT)
        span = Span(view.front, min(stop, island_start(view)))
        partition = _within(span, workers, costs, limits)
        if partition is None:
            return None
        # The race took the chain for a worker that is p times as fast; links may make it slower.
        slower_s = costs.chain_s(partition) - shared.step_s(span.start, partition.bounds[-1])
        return Plan(tuple(helpers[: workers - 1]), partition, race_s + max(0.0, slower_s), alone_s)

    return _best(plan, helpers, pays)


def forced_plan(ends: object, span: Span, helpers: Sequence[int], limits: Limits) -> Plan | None:
    """The chain whose spans end there, as somebody who measures partitions asks for it.

    None if there are not so many helpers, or these are no ends of spans within `span`.
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
    return Plan(tuple(helpers[: len(ends) - 1]), partition, 0.0, 0.0)


def _best(plan: Callable[[int], Plan | None], helpers: Sequence[int], pays: float) -> Plan | None:
    plans = [plan(workers) for workers in range(2, len(helpers) + 2)]
    paying = [each for each in plans if each and each.predicted_s <= pays * each.alone_s]
    return max(paying, key=lambda each: each.saved_s, default=None)


def _within(span: Span, workers: int, costs: Costs, limits: Limits) -> Partition | None:
    """A partition of as much of the span as forwards of limited size can compute."""
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
