"""Time limits and hedges, from numbers alone."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.stores.circuit_breaker import (
    SLACK,
    SLOWEST_BYTES_PER_S,
    AdaptiveTimeout,
    TimeoutLimits,
)
from sglang_cake.stores.http.http_transport import Hedging

PATIENCE = TimeoutLimits(first_s=30.0, floor_s=2.0, ceiling_s=600.0)
SIZES = st.integers(1, 1 << 30)
TIMES = st.floats(1e-6, 1e4)


def most_s(size):
    return max(PATIENCE.ceiling_s, size / SLOWEST_BYTES_PER_S)


@given(
    st.lists(st.one_of(st.tuples(SIZES, TIMES), st.just("late")), max_size=60),
    SIZES,
    SIZES,
)
def test_adaptive_timeout_stays_within_bounds_and_grows_with_size(history, size, more):
    pace = AdaptiveTimeout(PATIENCE)
    for event in history:
        if event == "late":
            pace.was_late(pace.backoff)
        else:
            pace.answered(*event)
    limit_s = pace.timeout_s(size)
    assert PATIENCE.floor_s <= limit_s <= most_s(size)
    assert pace.timeout_s(size + more) >= limit_s


@given(SIZES, st.floats(1e-10, 1e-6), st.integers(1, 50))
def test_adaptive_timeout_at_a_steady_rate_leaves_slack(size, per_byte_s, count):
    pace = AdaptiveTimeout(PATIENCE)
    for _ in range(count):
        pace.answered(size, size * per_byte_s)
    usual_s = size * per_byte_s
    assert pace.timeout_s(size) >= min(SLACK * usual_s * 0.999, most_s(size))


@given(st.floats(1.0, 100.0))
def test_adaptive_timeout_after_a_slowdown_suffices_in_seven_retries(slower):
    pace, size, usual_s = AdaptiveTimeout(PATIENCE), 1 << 20, 1.0
    for _ in range(20):
        pace.answered(size, usual_s)
    lost = 0
    while pace.timeout_s(size) < usual_s * slower:
        pace.was_late(pace.backoff)
        lost += 1
    assert lost <= 7
    for _ in range(200):  # once answered, it stays so
        pace.answered(size, usual_s * slower)
        assert pace.timeout_s(size) >= usual_s * slower


@pytest.mark.parametrize(
    ("small", "took_s", "large", "most_s"),
    [(0, 0.05, 64_000, PATIENCE.floor_s), (1000, 0.3, 16 << 20, PATIENCE.first_s)],
    ids=["lookups", "a description and a block"],
)
def test_adaptive_timeout_after_a_small_request_is_short_for_a_large_one(
    small, took_s, large, most_s
):
    pace = AdaptiveTimeout(PATIENCE)
    pace.answered(small, took_s)
    assert pace.timeout_s(large) <= most_s


def test_adaptive_timeout_without_answers_doubles_up_to_the_ceiling():
    pace = AdaptiveTimeout(PATIENCE)
    limits = []
    for _ in range(8):
        limits.append(pace.timeout_s(1 << 20))
        pace.was_late(pace.backoff)
    assert limits == [30, 60, 120, 240, 480, 600, 600, 600]


def test_adaptive_timeout_of_a_large_block_may_exceed_the_ceiling():
    pace, size, took_s = AdaptiveTimeout(PATIENCE), 1 << 30, 3600.0
    lost = 0
    while pace.timeout_s(size) < took_s:
        pace.was_late(pace.backoff)
        lost += 1
    assert lost <= 7
    pace.answered(size, took_s)
    assert pace.timeout_s(size) > took_s


def test_adaptive_timeout_doubles_once_for_parallel_late_requests():
    pace = AdaptiveTimeout(PATIENCE)
    begun = pace.backoff
    for _ in range(10):
        pace.was_late(begun)
    assert pace.timeout_s(1 << 20) == 60


def test_hedging_with_few_answers_gives_no_delay():
    hedging = Hedging(floor_s=0.001)
    for _ in range(Hedging.ENOUGH - 1):
        hedging.answered(0.01)
        assert hedging.delay_s() is None


def hedging_after(latencies, floor_s=0.0):
    hedging = Hedging(floor_s=floor_s)
    for latency in latencies:
        hedging.answered(latency)
    return hedging


@given(st.lists(st.floats(1e-6, 10.0), min_size=32, max_size=128))
def test_hedging_delay_is_exceeded_by_one_latency_in_twenty(latencies):
    latencies = latencies * 4
    delay_s = hedging_after(latencies).delay_s()
    recent = latencies[-Hedging.WINDOW :]
    assert delay_s in recent
    assert sum(latency > delay_s for latency in recent) <= 0.05 * len(recent)
    assert sum(latency >= delay_s for latency in recent) >= 0.05 * len(recent)


def test_hedging_delay_is_at_least_the_floor():
    assert hedging_after([0.0001] * 100, floor_s=0.005).delay_s() == pytest.approx(0.005)


def test_hedging_after_a_slowdown_stays_a_bounded_share():
    hedging, draw, hedges, requests = Hedging(floor_s=0.0), random.Random(3), 0, 2000
    for turn in range(requests):
        latency_s = draw.expovariate(100) * (50 if turn > 500 else 1)
        delay_s = hedging.delay_s()
        if delay_s is not None and latency_s > delay_s and hedging.take():
            hedges += 1
        hedging.answered(latency_s)
    assert 10 < hedges <= Hedging.SHARE * requests + Hedging.BURST
