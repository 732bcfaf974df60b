"""When a prompt is shared, and with how many."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.runahead.decide import PAYS, Costs, chain_s, forced_plan, plan_chain
from sglang_cake.runahead.partition import Partition
from sglang_cake.runahead.table import PartitionTable
from sglang_cake.spans import Span


def costs(handover_s: float = 0.0, bytes_per_s: float = 1e12, pair_s: float = 1e-8) -> Costs:
    def step_s(start: int, stop: int) -> float:
        tokens = stop - start
        return 1e-4 * tokens + pair_s * tokens * (start + tokens / 2)

    return Costs(step_s, handover_s, bytes_per_s, 1000)


def test_a_long_prompt_is_shared_with_all_and_a_short_one_with_nobody() -> None:
    plan = plan_chain(Span(0, 8192), (0, 2, 5), costs(0.05), page_tokens=16, limit_tokens=8192)
    assert plan is not None
    assert plan.helpers == (0, 2, 5)
    assert plan.predicted_s < 0.3 * plan.alone_s
    assert (
        plan_chain(Span(0, 512), (0, 2, 5), costs(0.05), page_tokens=16, limit_tokens=8192) is None
    )
    assert plan_chain(Span(0, 8192), (), costs(), page_tokens=16, limit_tokens=8192) is None
    assert plan_chain(Span(0, 20), (0,), costs(), page_tokens=16, limit_tokens=8192) is None


def test_a_slow_link_takes_fewer_helpers_or_none() -> None:
    span = Span(0, 8192)
    fast = plan_chain(span, (0, 1, 2), costs(), page_tokens=16, limit_tokens=8192)
    slow = plan_chain(span, (0, 1, 2), costs(bytes_per_s=1.2e7), page_tokens=16, limit_tokens=8192)
    assert fast is not None
    assert slow is not None
    assert len(slow.helpers) < len(fast.helpers)
    assert (
        plan_chain(span, (0, 1, 2), costs(bytes_per_s=1e6), page_tokens=16, limit_tokens=8192)
        is None
    )


def test_a_searched_partition_is_preferred() -> None:
    table = PartitionTable()
    table.put(8192, Partition((0, 5120, 8192)))
    plan = plan_chain(Span(0, 8192), (3,), costs(), page_tokens=16, limit_tokens=8192, table=table)
    assert plan is not None
    assert plan.partition.bounds == (0, 5120, 8192)
    later = plan_chain(
        Span(64, 8192), (3,), costs(), page_tokens=16, limit_tokens=8192, table=table
    )
    assert later is not None
    assert later.partition.bounds[0] == 64


def test_forced_bounds_are_taken_or_ignored() -> None:
    span = Span(32, 1000)
    plan = forced_plan([64, 512], span, (0, 1, 2), page_tokens=16)
    assert plan is not None
    assert (plan.helpers, plan.partition.bounds) == ((0, 1), (32, 64, 512, 1000))
    wrong: list[object] = [[], [65], [16], [512, 512], [2000], ["64"], [64.0], 64, None, [1, 2, 3]]
    for bounds in wrong:
        assert forced_plan(bounds, span, (0, 1), page_tokens=16) is None
    assert forced_plan([64, 128], span, (0,), page_tokens=16) is None


@settings(deadline=None)
@given(
    st.integers(0, 50),
    st.integers(1, 20_000),
    st.integers(0, 6),
    st.floats(0, 1),
    st.floats(1e5, 1e12),
)
def test_what_is_planned_is_predicted_to_pay(
    page: int, tokens: int, helpers: int, handover_s: float, bytes_per_s: float
) -> None:
    span = Span(page * 16, page * 16 + tokens)
    found = costs(handover_s, bytes_per_s)
    plan = plan_chain(span, range(helpers), found, page_tokens=16, limit_tokens=8192)
    if plan is not None:
        assert plan.predicted_s == chain_s(plan.partition, found)
        part = (plan.partition.bounds[0], plan.partition.bounds[-1])
        assert plan.predicted_s <= PAYS * found.step_s(*part)
        assert plan.partition.workers == len(plan.helpers) + 1
        assert all(each.tokens <= 8192 for each in plan.partition.spans)
        assert part[0] == span.start
        if tokens <= 8192:
            assert part[1] == span.stop
        else:
            assert part[1] <= span.stop
