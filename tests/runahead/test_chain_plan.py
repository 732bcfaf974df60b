"""When a prompt is shared, and with how many."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chain_model import with_loader
from sglang_cake.core.keys import Span
from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.loading.meet import BlockState, Meet, View
from sglang_cake.loading.planner import LoadProgress
from sglang_cake.runahead.chain_plan import (
    PAYS,
    ChainCosts,
    ChainLimits,
    StoredTail,
    forced_plan,
    plan_beside_loader,
    plan_chain,
)
from sglang_cake.runahead.partition import Partition
from sglang_cake.runahead.partition_table import PartitionTable

LIMITS = ChainLimits(page_tokens=16, step_tokens=8192)
BLOCK = 128


def costs(handover_s: float = 0.0, bytes_per_s: float = 1e12, pair_s: float = 1e-8) -> ChainCosts:
    return ChainCosts(PrefillCost(0.0, 1e-4, pair_s), handover_s, bytes_per_s, 1000)


def stored(tokens: int, stored_tokens: int, landed_tokens: int = 0) -> View:
    """A prompt of which the front is stored, and the end of that has landed."""
    meet = Meet(
        block_tokens=BLOCK, page_tokens=16, limit_tokens=tokens - 1, prompt_tokens=tokens, front=0
    )
    meet.found([block < stored_tokens // BLOCK for block in range(meet.block_count)])
    for block in range((stored_tokens - landed_tokens) // BLOCK, stored_tokens // BLOCK):
        meet.landed(block)
    return meet.view()


def stored_tail(view: View, block_s: float) -> StoredTail:
    return StoredTail(view, LoadProgress(), LoadCost(0.0, block_s))


def test_plan_chain_long_prompt_takes_all_helpers_and_a_short_one_none() -> None:
    plan = plan_chain(Span(0, 8192), (0, 2, 5), costs(0.05), LIMITS)
    assert plan is not None
    assert plan.helpers == (0, 2, 5)
    assert plan.predicted_s < 0.3 * plan.alone_s
    assert plan_chain(Span(0, 512), (0, 2, 5), costs(0.05), LIMITS) is None
    assert plan_chain(Span(0, 8192), (), costs(), LIMITS) is None
    assert plan_chain(Span(0, 20), (0,), costs(), LIMITS) is None


def test_plan_chain_slow_link_takes_fewer_helpers_or_none() -> None:
    span = Span(0, 8192)
    fast = plan_chain(span, (0, 1, 2), costs(), LIMITS)
    slow = plan_chain(span, (0, 1, 2), costs(bytes_per_s=1.2e7), LIMITS)
    assert fast is not None
    assert slow is not None
    assert len(slow.helpers) < len(fast.helpers)
    assert plan_chain(span, (0, 1, 2), costs(bytes_per_s=1e6), LIMITS) is None


class CountedCost(PrefillCost):
    """Counts its predictions."""

    calls = 0

    def step_s(self, start: int, stop: int) -> float:
        CountedCost.calls += 1
        return PrefillCost.step_s(self, start, stop)


def predictions(workers: int, bytes_per_s: float) -> int:
    """How often the cost of a step is predicted for the plan of a long prompt."""
    counted = ChainCosts(CountedCost(0.01, 1e-4, 1e-8), 0.02, bytes_per_s, 131072)
    CountedCost.calls = 0
    plan = plan_chain(Span(0, 32768), range(workers - 1), counted, LIMITS)
    assert plan is not None
    assert len(plan.helpers) == workers - 1 or bytes_per_s < 1e12
    return CountedCost.calls


def test_plan_chain_work_grows_little_faster_than_the_group() -> None:
    assert predictions(32, 1e13) < 4 * predictions(8, 1e13)
    assert predictions(128, 1e13) < 4 * predictions(32, 1e13)
    assert predictions(128, 1e9) < 2 * predictions(8, 1e9)  # a slow link ends the search


def test_plan_chain_searched_partition_is_preferred() -> None:
    table = PartitionTable()
    table.put(8192, Partition((0, 5120, 8192)))
    limits = ChainLimits(16, 8192, table)
    plan = plan_chain(Span(0, 8192), (3,), costs(), limits)
    assert plan is not None
    assert plan.partition.bounds == (0, 5120, 8192)
    later = plan_chain(Span(64, 8192), (3,), costs(), limits)
    assert later is not None
    assert later.partition.bounds[0] == 64


def test_forced_plan_valid_ends_are_taken_and_wrong_ones_ignored() -> None:
    span = Span(32, 1000)
    plan = forced_plan([64, 512, 1000], span, (0, 1, 2), LIMITS)
    assert plan is not None
    assert (plan.helpers, plan.partition.bounds) == ((0, 1), (32, 64, 512, 1000))
    part = forced_plan([64, 512], span, (0, 1, 2), LIMITS)
    assert part is not None
    assert part.partition.bounds == (32, 64, 512)
    wrong: list[object] = [[], [64], [65, 1000], [16, 1000], [512, 512, 1000], [64, 2000]]
    wrong += [["64", 1000], [64.0, 1000], [64, 999], 64, None, [64, 128, 256, 512], [True, 1000]]
    for ends in wrong:
        assert forced_plan(ends, span, (0, 1), LIMITS) is None
    assert forced_plan([64, 128, 1000], span, (0,), LIMITS) is None


def test_forced_plan_span_beyond_one_forward_is_ignored() -> None:
    limits = ChainLimits(page_tokens=16, step_tokens=512)
    assert forced_plan([512, 1024], Span(0, 1024), (0,), limits) is not None
    assert forced_plan([528, 1024], Span(0, 1024), (0,), limits) is None
    assert forced_plan([512, 1040], Span(0, 1040), (0,), limits) is None


@given(
    st.integers(0, 50),
    st.integers(1, 20_000),
    st.integers(0, 6),
    st.floats(0, 1),
    st.floats(1e5, 1e12),
)
def test_plan_chain_random_plans_are_predicted_to_pay(
    page: int, tokens: int, helpers: int, handover_s: float, bytes_per_s: float
) -> None:
    span = Span(page * 16, page * 16 + tokens)
    found = costs(handover_s, bytes_per_s)
    plan = plan_chain(span, range(helpers), found, LIMITS)
    if plan is not None:
        assert plan.predicted_s == found.chain_s(plan.partition)
        part = (plan.partition.bounds[0], plan.partition.bounds[-1])
        assert plan.predicted_s <= PAYS * found.prefill.step_s(*part)
        assert plan.partition.workers == len(plan.helpers) + 1
        assert all(each.tokens <= 8192 for each in plan.partition.spans)
        assert part[0] == span.start
        if tokens <= 8192:
            assert part[1] == span.stop
        else:
            assert part[1] <= span.stop


# ---- with a stored tail ----


def test_plan_beside_loader_meets_where_the_theory_says() -> None:
    view, found = stored(8193, 8192), costs()
    for workers in (2, 3, 4):
        for block_s in (0.01, 0.02, 0.04):
            plan = plan_beside_loader(
                stored_tail(view, block_s), range(workers - 1), found, LIMITS, pays=1.0
            )
            assert plan is not None
            ideal = with_loader(
                Span(0, 8192),
                plan.partition.workers,
                found.prefill.step_s,
                block_s / BLOCK,
                page_tokens=16,
                block_tokens=BLOCK,
            )
            assert abs(plan.partition.bounds[-1] - ideal.partition.bounds[-1]) <= BLOCK
            assert plan.predicted_s <= ideal.finish_s + block_s + 0.01


def test_plan_beside_loader_is_predicted_faster_than_either_alone() -> None:
    view, found = stored(8193, 8192), costs(0.02)
    plan = plan_beside_loader(stored_tail(view, 0.02), (0,), found, LIMITS)
    alone = plan_chain(Span(0, 8193), (0,), found, LIMITS)
    assert plan is not None
    assert alone is not None
    assert plan.predicted_s < PAYS * min(alone.predicted_s, 64 * 0.02, plan.alone_s)


def test_plan_beside_loader_fast_store_gives_no_plan_and_slow_store_no_part() -> None:
    view = stored(8193, 8192)
    assert plan_beside_loader(stored_tail(view, 1e-5), (0, 1), costs(0.01), LIMITS) is None
    slow = plan_beside_loader(stored_tail(view, 10.0), (0, 1), costs(0.01), LIMITS)
    assert slow is not None
    assert slow.partition.bounds[-1] == 8193


def test_stored_tail_facts_change_with_blocks_and_when_the_next_one_is_late() -> None:
    def facts(since_s: float, landed_tokens: int = 0) -> object:
        view = stored(8193, 8192, landed_tokens)
        return StoredTail(view, LoadProgress(since_s, any_landed=True), LoadCost(0.0, 0.02)).facts

    assert facts(0.0) == facts(0.019)
    assert len({facts(since_s / 100) for since_s in range(1000)}) < 12
    assert facts(0.0) != facts(0.1) != facts(1.0)
    assert facts(0.0) != facts(0.0, landed_tokens=4096)


def test_plan_beside_loader_ends_before_the_landed_blocks() -> None:
    view = stored(8193, 8192, landed_tokens=4096)
    plan = plan_beside_loader(stored_tail(view, 10.0), (0,), costs(), LIMITS)
    assert plan is not None
    assert plan.partition.bounds[-1] == 4096


@given(
    st.integers(1, 40),
    st.lists(st.sampled_from([*BlockState][:3]), min_size=40, max_size=40),
    st.floats(1e-5, 1.0),
    st.integers(0, 4),
    st.floats(0, 0.5),
)
def test_plan_beside_loader_random_plans_pay_and_avoid_landed_blocks(
    blocks: int, states: list[BlockState], block_s: float, helpers: int, handover_s: float
) -> None:
    tokens = blocks * BLOCK + 1
    view = View(0, 0, bytes(states[:blocks]), BLOCK, tokens, tokens - 1)
    landed = [b for b in range(blocks) if states[b] is BlockState.LANDED]
    if landed and landed[0] == 0:
        return  # the front touches an island: it is attached first
    plan = plan_beside_loader(stored_tail(view, block_s), range(helpers), costs(handover_s), LIMITS)
    if plan is not None:
        assert plan.predicted_s <= PAYS * plan.alone_s
        assert plan.partition.bounds[-1] <= (landed[0] * BLOCK if landed else tokens)
        assert 1 < plan.partition.workers == len(plan.helpers) + 1
