"""Loads from several sources: each is learned by itself, and a prompt pays for what it reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.read.cost import LoadCost, LoadFit
from sglang_cake.read.load_fits import MOST_SOURCES, LoadFits

PRIOR = LoadCost(0.0, 1.0, depth=4)
times = st.floats(1e-4, 10.0)


@given(took=st.lists(st.tuples(times, st.booleans()), max_size=40))
def test_of_one_source_it_is_one_fit(took: list[tuple[float, bool]]) -> None:
    fits, fit = LoadFits(PRIOR), LoadFit(PRIOR)
    for took_s, first in took:
        fits.landed(0, took_s, first=first)
        fit.landed(took_s, first=first)
    assert fits.newest == fit.cost
    assert fits.all == [fit.cost]
    mean = fits.of({0: 7})
    assert mean.block_s == pytest.approx(fit.cost.block_s)
    assert mean.latency_s == pytest.approx(fit.cost.latency_s)
    assert mean.depth == fit.cost.depth


def test_a_slow_source_does_not_make_a_fast_one_slow() -> None:
    fits = LoadFits(PRIOR)
    for _ in range(40):
        fits.landed(0, 0.001, first=False)
    for _ in range(40):
        fits.landed(1, 0.1, first=False)
    assert fits.of({0: 5}).block_s == pytest.approx(0.001)
    assert fits.of({1: 5}).block_s == pytest.approx(0.1)
    assert fits.newest.block_s == pytest.approx(0.1)
    # As long as one block after the other takes.
    both = fits.of({0: 30, 1: 10})
    assert 40 * both.block_s == pytest.approx(30 * 0.001 + 10 * 0.1)
    assert fits.of({}) == fits.newest


def test_copies_say_nothing_of_the_source() -> None:
    fits = LoadFits(PRIOR)
    fits.landed(1, 0.1, first=False)
    fits.copied(0.25)
    assert [cost.copy_s for cost in fits.all] == [0.25, 0.25]


def test_what_was_learned_is_recalled_by_source() -> None:
    fits = LoadFits(PRIOR)
    learned = [LoadCost(0.0, 0.001), LoadCost(0.2, 0.1)]
    fits.recall(learned)
    assert [(c.latency_s, c.block_s, c.depth) for c in fits.all] == [(0.0, 0.001, 4), (0.2, 0.1, 4)]


def test_sources_are_few() -> None:
    fits = LoadFits(PRIOR)
    for source in range(100):
        fits.landed(source, 0.1, first=False)
    fits.recall([PRIOR] * 100)
    assert len(fits.all) == MOST_SOURCES
    assert fits.of({0: 1, 99: 1}).block_s > 0
