"""Loads from several sources: each is learned by itself, and a prompt pays for what it reads."""

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.loading.cost_model import (
    DOUBT_S,
    MOST_TIERS,
    LoadCost,
    LoadFit,
    LoadFits,
    TierLoads,
)

PRIOR = LoadCost(0.0, 1.0, depth=4)
times = st.floats(1e-4, 10.0)


@given(took=st.lists(st.tuples(times, st.booleans()), max_size=40))
def test_load_fits_single_source_equals_a_load_fit(took: list[tuple[float, bool]]) -> None:
    fits, fit = LoadFits(PRIOR, depths=[PRIOR.depth]), LoadFit(PRIOR)
    for took_s, first in took:
        fits.fetched(0, took_s, 1.0, first=first)
        fit.fetched(took_s, first=first)
    assert fits.newest == fit.cost
    assert fits.all == [fit.cost if took else None]
    assert (fits.all[0] is None) == (not took)
    mean = fits.cost(0, 1.0)
    assert mean.block_s == pytest.approx(fit.cost.block_s)
    assert mean.latency_s == pytest.approx(fit.cost.latency_s)
    assert mean.depth == fit.cost.depth


def test_load_fits_reads_that_end_together_take_equal_shares_of_their_time() -> None:
    depth, round_s = 16, 1.6
    fits = LoadFits(PRIOR, depths=[depth])
    for number in range(12):
        for place in range(depth):
            fits.fetched(0, 0.0 if place else round_s, 1.0, first=number == place == 0)
            if number >= 5:
                assert fits.newest.block_s == pytest.approx(round_s / depth, rel=0.1)
    assert fits.newest.error < 0.1


def test_load_fits_slow_source_leaves_a_fast_source_fast() -> None:
    fits = LoadFits(PRIOR)
    for _ in range(40):
        fits.fetched(0, 0.001, 1.0, first=False)
    for _ in range(40):
        fits.fetched(1, 0.1, 1.0, first=False)
    assert fits.cost(0, 1.0).block_s == pytest.approx(0.001)
    assert fits.cost(1, 1.0).block_s == pytest.approx(0.1)
    assert fits.newest.block_s == pytest.approx(0.1)
    # Both are read at once, so all blocks take as long as those of the slow one.
    loads = TierLoads(bytes([0] * 30 + [1] * 10), fits.by_tier(1.0))
    where = loads.tiers_of(bytes([1] * 40), 0)
    assert 40 * loads.average(where).block_s == pytest.approx(10 * 0.1)
    assert 35 * loads.average(loads.tiers_of(bytes([1] * 35), 0)).block_s == pytest.approx(5 * 0.1)
    assert loads.average(loads.tiers_of(bytes([1] * 10), 30)).block_s == pytest.approx(0.1)


def test_load_fits_copy_time_is_shared_by_all_sources() -> None:
    fits = LoadFits(PRIOR)
    fits.fetched(1, 0.1, 1.0, first=False)
    fits.copied(0.25)
    assert fits.all[0] is None  # nothing was read there
    assert [fits.cost(source, 1.0).copy_s for source in (0, 1)] == [0.25, 0.25]


def test_load_fits_recalled_costs_are_kept_per_source() -> None:
    fits = LoadFits(PRIOR, depths=[4, 16])
    learned = [LoadCost(0.0, 0.001), None, LoadCost(0.2, 0.1)]
    fits.recall(learned, 1.0)
    found = [c and (c.latency_s, c.block_s, c.depth) for c in fits.all]
    assert found == [(0.0, 0.001, 4), None, (0.2, 0.1, 16)]


def test_load_fits_number_of_sources_is_bounded() -> None:
    fits = LoadFits(PRIOR)
    for source in range(100):
        fits.fetched(source, 0.1, 1.0, first=False)
    fits.recall([PRIOR] * 100, 1.0)
    assert len(fits.all) == MOST_TIERS
    assert len(fits.by_tier(1.0)) == MOST_TIERS
    assert fits.cost(99, 1.0) == fits.cost(MOST_TIERS - 1, 1.0)


def test_load_fits_costs_can_be_asked_for_while_a_source_is_added() -> None:
    """The scheduler thread asks while the I/O thread measures the first block of a source: here it
    does so at each line."""
    fits = LoadFits(PRIOR)
    asked = []

    def ask(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename.endswith("cost_model.py"):
            asked.append(fits.by_tier(1.0))
            return ask
        return None

    before = sys.gettrace()
    sys.settrace(ask)
    try:
        fits.fetched(3, 0.1, 1.0, first=False)
    finally:
        sys.settrace(before)
    assert len(asked) > 10
    assert {len(costs) for costs in asked} == {MOST_TIERS}


def test_load_fits_slow_source_is_taken_for_fast_again_after_doubt_time() -> None:
    fits = LoadFits(PRIOR)
    for block_s in (0.01, 0.5):  # it was fast once, then slow
        for _ in range(100):
            fits.fetched(0, block_s, 1.0, first=False)
    assert fits.cost(0, 1.0 + DOUBT_S).block_s == pytest.approx(0.5, rel=0.01)
    assert fits.cost(0, 2.0 + DOUBT_S).block_s == pytest.approx(0.01)
    fits.fetched(0, 0.5, 2.0 + DOUBT_S, first=False)
    assert fits.cost(0, 2.0 + DOUBT_S).block_s == pytest.approx(0.5, rel=0.01)


def test_load_fits_late_first_answers_are_doubted_as_well() -> None:
    """A source whose first answers were late is asked again: nothing else would show that it is
    quick now."""
    fits = LoadFits(PRIOR)
    for latency_s in (0.02, 5.0):
        for _ in range(30):
            fits.fetched(0, latency_s + 0.01, 1.0, first=True)
            fits.fetched(0, 0.01, 1.0, first=False)
    assert fits.cost(0, 1.0 + DOUBT_S).latency_s > 2.0
    assert fits.cost(0, 2.0 + DOUBT_S).latency_s <= 0.02


def test_load_fits_recalled_cost_falls_back_to_the_prior_after_doubt_time() -> None:
    fits = LoadFits(PRIOR)
    fits.recall([LoadCost(0.1, 9.0)], 1.0)
    assert fits.cost(0, 1.0).block_s == 9.0
    assert fits.cost(0, 2.0 + DOUBT_S).block_s == PRIOR.block_s
    for _ in range(4):
        fits.fetched(0, 9.0, 100.0, first=False)
    assert fits.cost(0, 999.0).block_s == pytest.approx(9.0)  # this is how it is


def test_load_fits_slow_first_block_is_doubted_after_doubt_time() -> None:
    fits = LoadFits(LoadCost(0.0, 0.01))
    fits.fetched(0, 2.5, 1.0, first=True)
    assert fits.cost(0, 1.0 + DOUBT_S).block_s == 2.5
    assert fits.cost(0, 2.0 + DOUBT_S).block_s <= 0.01
    fits.fetched(0, 0.008, 100.0, first=True)  # one block shows that the first was an exception
    assert fits.cost(0, 100.0).block_s <= 0.01
    for _ in range(8):
        fits.fetched(0, 0.004, 100.0, first=False)
    assert fits.cost(0, 200.0).block_s == pytest.approx(0.004)


def test_load_fits_slow_first_block_before_few_quick_ones_is_doubted() -> None:
    """The average still counts the first block, so the loads of the next minutes show nothing."""
    fits = LoadFits(LoadCost(0.0, 0.01))
    fits.fetched(0, 2.5, 1.0, first=True)
    for _ in range(8):
        fits.fetched(0, 0.01, 1.0, first=False)
    assert fits.cost(0, 2.0 + DOUBT_S).block_s == pytest.approx(0.01)


def test_load_fits_source_that_is_slow_each_time_is_not_taken_for_fast() -> None:
    fits = LoadFits(LoadCost(0.0, 0.01), depths=[8])
    for _ in range(2):
        fits.fetched(0, 4.0, 1.0, first=False)
        for _ in range(7):  # eight reads in flight end together
            fits.fetched(0, 0.0, 1.0, first=False)
    assert fits.cost(0, 2.0 + DOUBT_S).block_s > 0.1


def test_load_fits_tier_is_measured_lately_until_nothing_was_read_from_it_for_a_while() -> None:
    fits = LoadFits(PRIOR)
    assert not any(fits.measured_lately(0.0))
    fits.fetched(1, 0.5, 1.0, first=True)
    assert fits.measured_lately(1.0 + DOUBT_S)[:3] == (False, True, False)
    assert not any(fits.measured_lately(2.0 + DOUBT_S))
