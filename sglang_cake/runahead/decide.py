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
    table: PartitionTable | None = None,
) -> Plan | None:
    """The quickest chain for `span`, or None if one worker alone is about as quick.

    Args:
        helpers: who may be asked.
        table: searched partitions, used where there are some.
    """
    alone_s = costs.step_s(*span)
    best: Plan | None = None
    for count in range(1, len(helpers) + 1):
        if span.tokens < (count + 1) * page_tokens:
            break
        found = table.predict(span, count + 1, page_tokens=page_tokens) if table else None
        partition = found or balanced(span, count + 1, costs.step_s, page_tokens=page_tokens)
        predicted_s = chain_s(partition, costs)
        if best is None or predicted_s < best.predicted_s:
            best = Plan(tuple(helpers[:count]), partition, predicted_s, alone_s)
    if best is None or best.predicted_s > PAYS * alone_s:
        return None
    return best


def chain_s(partition: Partition, costs: Costs) -> float:
    """Predicted seconds of a chain: its slowest worker or its busiest link, and handing over."""
    slowest_s = max(costs.step_s(*span) for span in partition.spans)
    crossing = (partition.bounds[-2] - partition.bounds[0]) * costs.token_bytes
    return max(slowest_s, crossing / costs.bytes_per_s) + costs.handover_s
