"""Predictions for a prompt whose blocks are in several tiers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planner import ABSENT, LANDED, WANTED, costs, view_of

from sglang_cake.loading.cost_model import LoadCost, PromptCosts, TierLoads
from sglang_cake.loading.meet import BlockState, View
from sglang_cake.loading.planner import (
    LoadProgress,
    Outlook,
    is_overdue,
    loads_s,
    look_ahead,
    next_landings,
    next_step,
    with_loads,
)

NOTHING = LoadProgress()


def known(
    view: View, tiers: str, block_s: tuple[float, ...], silence_s: tuple[float, ...] = (0.0, 0.0)
) -> PromptCosts:
    """A token takes a second, a block 100. Args: tiers: of each block, a digit."""
    loads = TierLoads(
        bytes(map(int, tiers)), tuple(LoadCost(0.0, s, error=0.0) for s in block_s), silence_s
    )
    return with_loads(replace(costs(1), load=LoadCost(7.0, 7.0)), view, loads)


def outlook(states: list[BlockState], tiers: str, *block_s: float) -> Outlook:
    view = view_of(states)
    return look_ahead(
        view, chunk_tokens=10_000, costs=known(view, tiers, block_s), progress=NOTHING
    )


def test_tier_loads_of_one_tier_cost_what_that_tier_costs() -> None:
    view = view_of([ABSENT, WANTED, WANTED])
    found = known(view, "011", (1.0, 50.0))
    assert found.tiers is None
    assert found.load == LoadCost(0.0, 50.0, error=0.0)


@given(
    places=st.lists(st.tuples(st.sampled_from((WANTED, LANDED, ABSENT)), st.integers(0, 2))),
    block_s=st.tuples(*[st.floats(0.1, 1000.0)] * 3),
)
def test_tier_loads_take_as_long_as_those_of_the_slowest_tier(
    places: list[tuple[BlockState, int]], block_s: tuple[float, float, float]
) -> None:
    view = view_of([state for state, _ in places])
    tiers = "".join(str(tier) for _, tier in places)
    found = known(view, tiers, block_s, (0.0,) * 3)
    counts = [sum(place == (WANTED, tier) for place in places) for tier in range(3)]
    expected_s = max(count * s for count, s in zip(counts, block_s, strict=True))
    assert loads_s(view, found, NOTHING) == pytest.approx(expected_s)
    if found.tiers is not None:  # an average block takes its share of that
        assert sum(counts) * found.load.block_s == pytest.approx(expected_s)


def test_tier_loads_fast_first_half_is_jumped_over_and_the_slow_one_is_split() -> None:
    found = outlook([WANTED] * 10, "0000011111", 1.0, 100.0)
    assert found.load_s == 5 * 100 + 50
    assert found.compute_s == 1050
    assert found.both_s == 3 * 100 + 50
    assert found.meet_token == 0  # the fast blocks are there before the first one is computed
    assert found.wait_s == 5 * 1.0


def test_tier_loads_up_to_an_end_state_are_jumped_over_together() -> None:
    """The front may not jump before all blocks up to the end are there, and so the end itself."""
    view = replace(view_of([WANTED] * 10), end_blocks=1, end_wanted=1)
    slow = known(view, "0000011111", (1.0, 80.0))
    found = look_ahead(view, chunk_tokens=10_000, costs=slow, progress=NOTHING)
    assert found.load_s == found.both_s == (5 + 1) * 80 + 50
    plan = next_step(view, mode="auto", chunk_tokens=10_000, costs=slow, progress=NOTHING)
    assert (plan.wait, plan.wait_s) == (True, math.inf)


def test_tier_loads_computing_meets_the_loads_of_the_first_tier_first() -> None:
    """Computing meets the loads of tier 0 at 300 tokens, jumps to 600, and meets those of tier 1
    at 800."""
    found = outlook([WANTED] * 12, "000000111111", 100.0, 120.0)
    assert found.meet_token == 300
    assert found.both_s == 500 + 50
    assert outlook([WANTED] * 12, "0" * 12, 100.0).meet_token == 600


def test_tier_loads_slow_first_half_is_split_and_the_fast_one_is_loaded() -> None:
    found = outlook([WANTED] * 10, "1111100000", 1.0, 100.0)
    assert found.meet_token in (200, 300)
    assert found.both_s == 3 * 100 + 50


def test_tier_loads_tier_that_is_silent_is_predicted_to_take_longer() -> None:
    view = view_of([WANTED] * 4)
    quick = known(view, "0101", (10.0, 10.0))
    silent = known(view, "0101", (10.0, 10.0), (0.0, 200.0))
    assert loads_s(view, quick, NOTHING) == 2 * 10
    assert loads_s(view, silent, NOTHING) == 190 + 190
    asked = LoadProgress(load_from=0)
    assert not is_overdue(view, quick, asked)
    assert is_overdue(view, silent, asked)
    late = LoadProgress(since_s=200.0, load_from=0)  # nothing comes from any tier
    assert is_overdue(view, quick, late)


def test_tier_loads_block_that_hangs_is_overdue_while_other_prompts_get_theirs() -> None:
    """Blocks of other prompts arrive from its tier, so the tier is not silent."""
    view = view_of([WANTED, LANDED])
    found = known(view, "10", (10.0, 10.0), (0.0, 0.1))
    hangs = LoadProgress(since_s=200.0, any_landed=True, load_from=0)
    assert loads_s(view, found, hangs) == 190
    assert is_overdue(view, found, hangs)
    plan = next_step(view, mode="both", chunk_tokens=10_000, costs=found, progress=hangs)
    assert not plan.wait


def test_tier_loads_latency_counts_until_a_block_of_that_tier_has_landed() -> None:
    begun = LoadProgress(any_landed=True)
    for last, latency_s in ((WANTED, 1000.0), (LANDED, 0.0)):
        view = view_of([WANTED, WANTED, LANDED, last])
        loads = TierLoads(bytes((0, 1, 0, 1)), (LoadCost(0.0, 1.0), LoadCost(1000.0, 5.0)))
        blocks = 2 if last == WANTED else 1
        assert loads_s(view, with_loads(costs(1), view, loads), begun) == latency_s + blocks * 5.0


def test_tier_loads_next_landings_are_in_the_order_of_time() -> None:
    view = view_of([WANTED] * 6)
    found = known(view, "010101", (1.0, 2.5))
    assert next_landings(view, found, NOTHING, 0.5) == [4, 2, 5, 0]
    assert next_landings(view, found, NOTHING, 100.0) == [4, 2, 5, 0, 3, 1]
    assert next_landings(view, costs(1), NOTHING, 2.0) == [5, 4, 3]
    assert next_landings(view_of([LANDED]), found, NOTHING, 9.0) == []


def test_tier_loads_next_landings_are_those_of_each_tier_in_that_time() -> None:
    view = view_of([WANTED] * 150)
    found = known(view, "0" * 100 + "1" * 50, (0.1, 1.0))
    next_ones = set(next_landings(view, found, NOTHING, 10.0))
    assert next_ones == {*range(100), *range(139, 150)}


def test_tier_loads_step_ends_where_the_loads_of_a_tier_will_be() -> None:
    view = view_of([WANTED] * 12)
    found = known(view, "000000111111", (100.0, 120.0))
    plan = next_step(view, mode="auto", chunk_tokens=10_000, costs=found, progress=NOTHING)
    assert (plan.stop, plan.wait, plan.load_from) == (300, False, 3)
    waits = known(view, "000000111111", (1.0, 120.0))
    plan = next_step(view, mode="auto", chunk_tokens=10_000, costs=waits, progress=NOTHING)
    assert (plan.stop, plan.wait, plan.wait_s) == (0, True, 6 * 1.0)
