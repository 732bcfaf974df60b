"""Whether a prompt is shared, with how many, and who computes what. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_cake.runahead.partition import Partition, StepSeconds, balanced
from sglang_cake.runahead.table import PartitionTable
from sglang_cake.spans import Span

# A chain is used if it is predicted to take at most this share of what one worker needs: being
# wrong about a prompt that gains a little costs more than it gains.
PAYS = 0.9


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

    step_s: StepSeconds
    handover_s: float  # from asking to the first layer, and what is lost at the end
    bytes_per_s: float  # of the link into the owner
    token_bytes: int  # K and V of one token, all layers


def plan_chain(
    span: Span,
    helpers: Sequence[int],
    costs: Costs,
    *,
    page_tokens: int,
    limit_tokens: int,
    table: PartitionTable | None = None,
) -> Plan | None:
    """The chain that saves most time over one worker, or None if none saves enough.

    Args:
        span: what may be shared; the chain takes all of it, or the front of it.
        helpers: who may be asked.
        limit_tokens: what one worker computes at most, in its one forward.
        table: searched partitions, used where there are some.
    """
    best: Plan | None = None
    for count in range(1, len(helpers) + 1):
        partition = _within(span, count + 1, costs, page_tokens, limit_tokens, table)
        if partition is None:
            continue
        alone_s = costs.step_s(partition.bounds[0], partition.bounds[-1])
        plan = Plan(tuple(helpers[:count]), partition, chain_s(partition, costs), alone_s)
        pays = plan.predicted_s <= PAYS * alone_s
        if pays and (best is None or plan.saved_s > best.saved_s):
            best = plan
    return best


def forced_plan(
    bounds: object, span: Span, helpers: Sequence[int], *, page_tokens: int
) -> Plan | None:
    """The chain with these inner bounds, as somebody who measures partitions asks for it.

    None if there are not so many helpers, or these are no bounds within the span.
    """
    if not isinstance(bounds, list) or not 0 < len(bounds) <= len(helpers):
        return None
    inner = [each for each in bounds if type(each) is int and each % page_tokens == 0]
    try:
        partition = Partition((span.start, *inner, span.stop))
    except ValueError:
        return None
    if len(inner) < len(bounds):
        return None
    return Plan(tuple(helpers[: len(inner)]), partition, 0.0, 0.0)


def _within(
    span: Span,
    workers: int,
    costs: Costs,
    page_tokens: int,
    limit_tokens: int,
    table: PartitionTable | None,
) -> Partition | None:
    """A partition of as much of the span as forwards of limited size can compute."""
    stop = min(span.stop, span.start + workers * limit_tokens)
    while (stop - span.start) >= workers * page_tokens:
        part = Span(span.start, stop)
        found = table.predict(part, workers, page_tokens=page_tokens) if table else None
        partition = found or balanced(part, workers, costs.step_s, page_tokens=page_tokens)
        longest = max(each.tokens for each in partition.spans)
        if longest <= limit_tokens:
            return partition
        fewer = span.start + int(part.tokens * limit_tokens / longest)
        stop = min(fewer, stop - 1) // page_tokens * page_tokens
    return None


def chain_s(partition: Partition, costs: Costs) -> float:
    """Predicted seconds of a chain: its slowest worker or its busiest link, and handing over."""
    slowest_s = max(costs.step_s(*span) for span in partition.spans)
    crossing = (partition.bounds[-2] - partition.bounds[0]) * costs.token_bytes
    return max(slowest_s, crossing / costs.bytes_per_s) + costs.handover_s
