"""The distribution of reuse times: its fit, what goes into it, and what comes out."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_cake.stores.eviction import new_policy
from sglang_cake.stores.eviction.policy import AccessContext, Usage
from sglang_cake.stores.eviction.reuse_model import (
    MAX_CLASSES,
    MAX_CLASSES_PER_TENANT,
    MAX_SAMPLES,
    POOLED,
    PRIOR_FIT,
    ReuseFit,
    ReuseModel,
    fit_exponential,
)

FIT = st.builds(ReuseFit, st.floats(1e-4, 0.999), st.floats(1e-6, 10.0), st.just(100))


@given(fit=FIT, age_s=st.floats(0, 1e6), more_s=st.floats(1e-3, 1e6), life_s=st.floats(0.01, 1e6))
def test_reuse_fit_probability_falls_with_age_and_grows_with_life(fit, age_s, more_s, life_s):
    now = fit.log_reuse(age_s, life_s)
    assert math.isfinite(now)
    assert now <= 0
    assert fit.log_reuse(age_s + more_s, life_s) <= now
    assert fit.log_reuse(age_s, life_s + more_s) >= now


def test_reuse_fit_probability_equals_bayes_rule():
    # Of 100 blocks 60 are used again, half of what is left every 10 s. After 10 s 30 of those are
    # left among 70, and 15 of them are used within the next 10 s.
    fit = ReuseFit(0.6, math.log(2) / 10, 100)
    assert math.exp(fit.log_reuse(10.0, 10.0)) == pytest.approx(15 / 70)


@pytest.mark.parametrize(("share", "mean_s"), [(0.3, 20.0), (0.9, 200.0), (0.6, 5.0)])
def test_fit_exponential_synthetic_samples_recover_share_and_mean(share, mean_s):
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
def test_fit_exponential_any_samples_give_finite_parameters(gaps, ages):
    assume(gaps or ages)
    fit = fit_exponential(gaps, ages)
    assert 0 < fit.share < 1
    assert 0 < fit.rate_per_s < math.inf
    assert math.isfinite(fit.log_reuse(3.0, 30.0))


@pytest.mark.parametrize("ahead_s", [1.0, 3600.0, 3 * 86_400.0])
def test_reuse_model_accesses_in_the_future_count_as_accesses_now(ahead_s):
    model = ReuseModel()
    for ident in range(16 * ReuseModel.min_samples):
        model.record_access(ident, ("", 1, 0), START_S + ahead_s)
    assert model.refit(START_S)  # the clock was set back
    now = ReuseModel()
    for ident in range(16 * ReuseModel.min_samples):
        now.record_access(ident, ("", 1, 0), START_S)
    assert now.refit(START_S)
    assert model.pooled == now.pooled != PRIOR_FIT
    assert model.fits == now.fits


def fed(model):
    """Class 1 comes back after 10 s, class 2 never."""
    for start in range(0, 2000, 20):
        for ident in range(start * 100, start * 100 + 100):
            model.record_access(ident, ("", 1, 0), float(start))
            model.record_access(ident, ("", 1, 0), start + 10.0)
            model.record_access(ident + 50, ("", 2, 0), start + 10.0)
    return model


def test_reuse_model_reused_class_gets_a_higher_probability():
    model = fed(ReuseModel())
    assert model.refit(2000.0)
    assert not model.refit(2030.0)  # not so soon
    assert model.fit(("", 1, 0)).log_reuse(0, 30.0) > model.fit(("", 2, 0)).log_reuse(0, 30.0)
    assert model.fit(("", 3, 0)) == model.pooled  # never seen
    assert model.pooled != PRIOR_FIT


def test_reuse_model_too_few_samples_give_the_prior_fit():
    model = ReuseModel()
    model.min_samples = 10**6
    fed(model)
    model.refit(2000.0)
    assert not model.fits
    assert model.fit(("", 1, 0)) == PRIOR_FIT


def test_reuse_model_old_accesses_are_dropped_but_the_fit_is_kept():
    model = fed(ReuseModel())
    model.refit(2000.0)
    before = model.fits[("", 1, 0)]
    assert model.refit(10_000.0)
    assert not model.samples
    assert model.fits[("", 1, 0)] == before  # nothing better is known


def test_reuse_model_uses_half_a_second_apart_count_as_no_reuse():
    model = ReuseModel()
    for ident in range(8 * ReuseModel.min_samples * 4):
        model.record_access(ident, ("", 1, 0), 100.0)
        model.record_access(ident, ("", 1, 0), 100.5)
    model.refit(200.0)
    assert model.fits[("", 1, 0)].share < 0.01


def test_reuse_model_classes_beyond_the_limit_count_as_unnamed():
    model = ReuseModel()
    names = {model.class_for((f"user text {number}", 2, 1)) for number in range(10 * MAX_CLASSES)}
    assert len(names) == MAX_CLASSES + 1
    assert ("", 2, 1) in names
    for turn in (1, 2, 3, 4):  # requests that name nothing are always told apart by turn
        assert model.class_for(("", turn, 0)) == ("", turn, 0)


@pytest.mark.parametrize("tenant", [0, 7])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_reuse_policy_class_out_of_use_makes_room_for_a_new_one(tenant, has_blocks):
    policy = new_policy("workload")
    for number in range(MAX_CLASSES):
        context = AccessContext(f"job {number}", tenant=tenant)
        policy.add(number, Usage(1, START_S, START_S, 0, number, context))
    fits = {("job 0", 1, 0): ReuseFit(0.5, 0.1, 100)}
    policy.model.fits.update(fits)
    policy.refresh(START_S)
    for number in range(MAX_CLASSES):
        if not has_blocks:
            policy.remove(number)
    policy.refresh(START_S + ReuseModel.window_s + 1.0)
    limit = MAX_CLASSES_PER_TENANT if tenant else MAX_CLASSES
    new = [policy.model.class_for((f"new job {number}", 1, 0), tenant) for number in range(100)]
    assert len(set(new)) == (1 if has_blocks else limit + 1)
    assert len(policy.model.classes) == limit
    assert policy.model.fits == (fits if has_blocks else {})


def test_reuse_model_tenant_with_many_classes_leaves_others_theirs():
    model = ReuseModel()
    flood = {model.class_for((f"noise {number}", 1, 0), 7) for number in range(10 * MAX_CLASSES)}
    assert len(flood) == MAX_CLASSES_PER_TENANT + 1
    assert model.class_for(("agent", 1, 0), 8) == ("agent", 1, 0)
    assert model.class_for(("noise 0", 1, 0), 8) == ("noise 0", 1, 0)
    for turn in (1, 2, 3, 4):  # requests that name nothing are always told apart by turn
        assert model.class_for(("", turn, 0), 7) == ("", turn, 0)


def observed(classes, seconds):
    """A model that has seen blocks of some classes come and come back.

    Args: classes: name -> (new blocks a second, share and mean time of those that come back).
    """
    chance, accesses, idents = random.Random(1), [], iter(range(10**6))
    for name, (per_s, share, mean_s) in classes.items():
        for number in range(per_s * seconds):
            ident, at_s = next(idents), number / per_s
            while at_s < seconds:
                accesses.append((at_s, ident, name))
                came_back = chance.random() < share
                at_s += 1.0 + chance.expovariate(1 / mean_s) if came_back else math.inf
    model, most = ReuseModel(), 0
    for at_s, ident, name in sorted(accesses):
        model.record_access(ident, (name, 1, 0), at_s)
        model.refit(at_s)
        most = max(most, model.samples)
    model.refit(seconds + 60.0)
    return model, most


def test_reuse_model_busy_class_and_quiet_class_get_their_own_shares():
    model, most = observed({"busy": (150, 0.6, 60), "quiet": (20, 0.2, 60)}, 900)
    assert most == MAX_SAMPLES
    busy, quiet = model.fits[("busy", 1, 0)], model.fits[("quiet", 1, 0)]
    assert busy.share == pytest.approx(0.6, abs=0.04)
    assert quiet.share == pytest.approx(0.2, abs=0.04)
    for fit in (busy, quiet):
        assert 1 / fit.rate_per_s == pytest.approx(61, rel=0.1)


def test_reuse_model_reuse_after_a_third_of_the_window_keeps_share_and_mean():
    model, _ = observed({"chat": (20, 0.5, 600)}, 3600)
    fit = model.fits[("chat", 1, 0)]
    assert fit.share == pytest.approx(0.5, abs=0.04)
    assert 1 / fit.rate_per_s == pytest.approx(600, rel=0.1)


def test_reuse_model_after_a_busy_time_samples_as_before_it():
    model = ReuseModel()

    def sampled(now_s):
        for ident in range(8000):
            model.record_access(ident, ("", 1, 0), now_s)
        return model.samples

    before = sampled(0.0)
    for ident in range(10**6, 10**6 + 16 * MAX_SAMPLES):
        model.record_access(ident, ("", 1, 0), 1.0)
    assert model.samples <= MAX_SAMPLES
    for now_s in range(10_000, 11_000, 60):
        model.refit(float(now_s))
    assert sampled(11_000.0) == before


def test_reuse_model_access_whose_facts_come_later_counts_for_their_class():
    """A block that another process stored has no facts at first."""
    model = ReuseModel()
    for ident in range(8 * 2 * ReuseModel.min_samples):
        model.record_access(ident, ("", 1, 0), 100.0)
        model.record_access(ident, CHAT, 100.0)
        model.record_access(ident, ("", 2, 1), 120.0)
    model.refit(200.0)
    assert model.fits[CHAT].share > 0.9
    assert ("", 1, 0) not in model.fits


@pytest.mark.parametrize("name", ["workload", "cake"])
def test_reuse_policy_saved_fits_are_equal_after_resume(name):
    before, after = new_policy(name), new_policy(name)
    now_s = 0.0
    for number in range(4000):
        now_s = number / 10
        before.add(number, Usage(1, now_s, now_s, 0, number, AccessContext("chat", 1 + number % 2)))
        before.touch(number - 50, now_s)
    before.refresh(now_s)
    classes = {("chat", turn, read) for turn in (1, 2) for read in (0, 1)}
    assert set(before.fits_to_save()) == {*classes, POOLED}
    after.resume(before.fits_to_save(), now_s)
    assert after.fits_to_save() == before.fits_to_save()
    assert after.model.pooled == before.model.pooled
    assert after.model.fits == before.model.fits


def test_lru_policy_refresh_and_resume_save_no_fits():
    policy = new_policy("lru")
    policy.refresh(1.0)
    policy.resume({}, 1.0)
    assert not policy.fits_to_save()


# ---- after a restart ----

CHAT = ("chat", 1, 0)
KEPT = {CHAT: ReuseFit(0.6, 1 / 100, 900), POOLED: ReuseFit(0.5, 1 / 200, 4000)}
START_S = 50_000.0


def restarted(kept, uses_from_s=START_S - 5000.0):
    """As from an index: 4,000 blocks that were used before the restart, and only their last use."""
    model = ReuseModel()
    model.resume(kept, START_S)
    for ident in range(4000):
        model.record_access(ident, CHAT, uses_from_s + ident)
    return model


def go_on(model, from_s, until_s):
    """10 blocks a second, of which every second one comes back after 20 s."""
    for at_s in range(int(from_s), int(until_s)):
        for ident in range(10 * at_s, 10 * at_s + 10):
            model.record_access(ident, CHAT, float(at_s))
        for ident in range(10 * (at_s - 20), 10 * (at_s - 20) + 10, 2):
            model.record_access(ident, CHAT, float(at_s))


def test_reuse_model_refit_right_after_resume_keeps_the_saved_fits():
    model = restarted(KEPT)
    assert model.refit(START_S + 1.0)
    assert model.fits_to_save() == KEPT
    assert restarted({}).fits_to_save() == {}
    assert not restarted({}).samples


def test_reuse_model_saved_fit_stands_until_enough_new_observation():
    model = restarted(KEPT)
    go_on(model, START_S, START_S + 299)
    model.refit(START_S + 299)  # three mean times of reuse are 300 s
    assert model.fits_to_save() == KEPT
    go_on(model, START_S + 299, START_S + 400)
    model.refit(START_S + 400)
    seen = model.fits[CHAT]
    assert 1 / seen.rate_per_s == pytest.approx(20, rel=0.15)
    assert seen.share > 0.3
    assert model.pooled == KEPT[POOLED]  # of which the times are twice as long
    go_on(model, START_S + 400, START_S + 700)
    model.refit(START_S + 700)
    assert 1 / model.pooled.rate_per_s == pytest.approx(20, rel=0.15)


def test_reuse_model_saved_fit_is_replaced_after_one_window():
    model = restarted({CHAT: ReuseFit(0.6, 1e-6, 900), POOLED: ReuseFit(0.5, 1e-6, 900)})
    go_on(model, START_S + ReuseModel.window_s - 200, START_S + ReuseModel.window_s)
    model.refit(START_S + ReuseModel.window_s)
    assert {fit.samples for fit in model.fits_to_save().values()}.isdisjoint({900})


def test_reuse_model_resume_of_many_fits_keeps_the_best_sampled():
    model = ReuseModel()
    many = {(f"user text {number}", 1, 0): ReuseFit(0.5, 0.1, number) for number in range(500)}
    model.resume(many | {POOLED: ReuseFit(0.4, 0.1, 10**6)}, 0.0)
    assert len(model.fits) == MAX_CLASSES
    assert min(fit.samples for fit in model.fits.values()) == 500 - MAX_CLASSES
    assert model.pooled.samples == 10**6
