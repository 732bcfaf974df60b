"""The distribution of reuse times: its fit, what goes into it, and what comes out."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.store.eviction import Usage, Use, new_policy
from sglang_cake.store.eviction.reuse import (
    LEAST_SAMPLES,
    MOST_KINDS,
    OTHERS,
    UNKNOWN,
    Fit,
    ReuseModel,
    fit_exponential,
)

FIT = st.builds(Fit, st.floats(1e-4, 0.999), st.floats(1e-6, 10.0), st.just(100))


@given(fit=FIT, age_s=st.floats(0, 1e6), more_s=st.floats(1e-3, 1e6), life_s=st.floats(0.01, 1e6))
def test_the_probability_of_a_use_falls_with_age_and_grows_with_life(fit, age_s, more_s, life_s):
    now = fit.log_reuse(age_s, life_s)
    assert math.isfinite(now)
    assert now <= 0
    assert fit.log_reuse(age_s + more_s, life_s) <= now
    assert fit.log_reuse(age_s, life_s + more_s) >= now


def test_the_probability_is_that_of_bayes_rule():
    # Of 100 blocks 60 are used again, half of what is left every 10 s. After 10 s 30 of those are
    # left among 70, and 15 of them are used within the next 10 s.
    fit = Fit(0.6, math.log(2) / 10, 100)
    assert math.exp(fit.log_reuse(10.0, 10.0)) == pytest.approx(15 / 70)


@pytest.mark.parametrize(("share", "mean_s"), [(0.3, 20.0), (0.9, 200.0), (0.6, 5.0)])
def test_a_fit_finds_what_the_samples_were_made_from(share, mean_s):
    # Every block was last used at some time in the last 10 minutes; what was used again is known.
    chance = random.Random(1)
    gaps, ages = [], []
    for _ in range(20_000):
        age_s = chance.uniform(0, 600)
        gap_s = chance.expovariate(1 / mean_s) if chance.random() < share else math.inf
        (gaps if gap_s <= age_s else ages).append(min(gap_s, age_s))
    fit = fit_exponential(gaps, ages)
    assert fit.share == pytest.approx(share, abs=0.03)
    assert 1 / fit.rate_per_s == pytest.approx(mean_s, rel=0.06)


@given(gaps=st.lists(st.floats(0, 1e6), max_size=20), ages=st.lists(st.floats(0, 1e6), max_size=20))
def test_any_samples_give_a_fit_that_can_be_used(gaps, ages):
    if gaps or ages:
        fit = fit_exponential(gaps, ages)
        assert 0 < fit.share < 1
        assert 0 < fit.rate_per_s < math.inf
        assert math.isfinite(fit.log_reuse(3.0, 30.0))


def fed(**settings):
    """Class 1 comes back after 10 s, class 2 never."""
    model = ReuseModel(**settings)
    for start in range(0, 2000, 20):
        for ident in range(start * 100, start * 100 + 100):
            model.used(ident, ("", 1, 0), float(start))
            model.used(ident, ("", 1, 0), start + 10.0)
            model.used(ident + 50, ("", 2, 0), start + 10.0)
    return model


def test_classes_are_told_apart():
    model = fed()
    assert model.refit(2000.0)
    assert not model.refit(2030.0)  # not so soon
    assert model.fit(("", 1, 0)).log_reuse(0, 30.0) > model.fit(("", 2, 0)).log_reuse(0, 30.0)
    assert model.fit(("", 3, 0)) == model.pooled  # never seen
    assert model.pooled != UNKNOWN


def test_a_class_with_few_samples_is_like_all_together():
    model = fed(least_samples=10**6)
    model.refit(2000.0)
    assert not model.fits
    assert model.fit(("", 1, 0)) == UNKNOWN


def test_what_is_older_than_the_window_is_forgotten():
    model = fed()
    model.refit(2000.0)
    before = model.fits[("", 1, 0)]
    assert model.refit(10_000.0)
    assert not model._open
    assert model.fits[("", 1, 0)] == before  # nothing better is known


def test_uses_at_the_same_moment_are_no_reuse():
    model = ReuseModel()
    for ident in range(8 * LEAST_SAMPLES * 4):
        model.used(ident, ("", 1, 0), 100.0)
        model.used(ident, ("", 1, 0), 100.5)
    model.refit(200.0)
    assert model.fits[("", 1, 0)].share < 0.01


def test_kinds_are_bounded():
    model = ReuseModel()
    kinds = {model.kind((f"user text {number}", 1, 0)) for number in range(10 * MOST_KINDS)}
    assert len(kinds) == MOST_KINDS + 1
    assert OTHERS in kinds


def test_what_is_followed_is_bounded():
    model = ReuseModel()
    for ident in range(400_000):
        model.used(ident, ("", 1, 0), ident / 1000)
    assert len(model._open) <= 32_768


@pytest.mark.parametrize("name", ["workload", "cake"])
def test_fits_outlive_a_restart(name):
    before, after = new_policy(name), new_policy(name)
    now_s = 0.0
    for number in range(4000):
        now_s = number / 10
        before.add(number, Usage(1, now_s, now_s, 0, number, Use("chat", 1 + number % 2)))
        before.touch(number - 50, now_s)
    before.refresh(now_s)
    assert set(before.fits()) == {("chat", turn, read) for turn in (1, 2) for read in (0, 1)}
    after.learned(before.fits())
    assert after.fits() == before.fits()


def test_plain_policies_learn_nothing():
    policy = new_policy("lru")
    policy.refresh(1.0)
    policy.learned({})
    assert not policy.fits()
