"""The model of the chain: against arithmetic by hand, the paper's equations, and itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chain_model import (
    ChainLink,
    Worker,
    all_gather_tokens,
    chain_ttft,
    lower_bound,
    run_chain,
    sequence_parallel_ttft,
    traffic_tokens,
)
from sglang_cake.core.keys import Span
from sglang_cake.runahead.partition import Partition, balanced, even

FREE = ChainLink(1e30)


def test_chain_model_one_worker_takes_the_time_of_a_step() -> None:
    worker = Worker(32, 1e-4, 1e-8, floor_s=0.01, fixed_s=0.02)
    for tokens in (1, 100, 5000):
        alone = chain_ttft(Partition((0, tokens)), worker, FREE, 1e6)
        assert alone == pytest.approx(worker.step_s(0, tokens))


def test_chain_model_two_workers_one_layer_equals_arithmetic_by_hand() -> None:
    # 10 tokens each, 1 s a token, a quarter of it before K and V; 1 byte a token at 2 bytes/s.
    worker = Worker(1, 1.0, 0.0)
    times = run_chain([Partition((0, 10, 20))], worker, ChainLink(2.0), 1.0)
    assert times.projected[:, 0, 0].tolist() == [2.5, 2.5]
    assert times.sent[0, 0, 0] == 2.5
    assert times.received[1, 0, 0] == 2.5 + 5
    assert times.ttft_s[0] == 7.5 + 7.5
    # A blocking sender goes on after the sending.
    blocked = run_chain([Partition((0, 10, 20))], worker, ChainLink(2.0, blocking=True), 1.0)
    assert blocked.done[0, 0, 0] == times.done[0, 0, 0] + 5


def test_chain_model_received_kv_is_sent_on_before_the_own_part() -> None:
    worker = Worker(1, 1.0, 0.0)
    plan = Partition((0, 4, 20, 24))  # the second worker has the long span
    at_once = run_chain([plan], worker, ChainLink(100.0), 1.0)
    in_one = run_chain([plan], worker, ChainLink(100.0, blocking=True), 1.0)
    assert at_once.sent[1, 0, 0] == at_once.received[1, 0, 0] < at_once.projected[1, 0, 0]
    assert in_one.sent[1, 0, 0] == in_one.projected[1, 0, 0]
    assert at_once.ttft_s[0] < in_one.ttft_s[0]


@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.floats(1e3, 1e9),
    st.booleans(),
    st.floats(0, 0.01),
)
def test_chain_model_random_chains_keep_the_order_of_events(
    workers: int, layers: int, bytes_per_s: float, blocking: bool, latency_s: float
) -> None:
    worker = Worker(layers, 1e-4, 1e-8)
    plan = even(Span(0, 600), workers)
    t = run_chain([plan], worker, ChainLink(bytes_per_s, latency_s, blocking), 1e3)
    assert (t.started <= t.projected).all()
    assert (t.projected <= t.resumed).all()
    assert (t.resumed <= t.done).all()
    assert (t.received <= t.resumed + 1e-12).all()
    assert (t.done[:, :-1] <= t.started[:, 1:] + 1e-12).all()
    assert (t.sent[:-1] < t.received[1:]).all()
    # Neither faster than its slowest worker alone, nor than without a network.
    assert t.ttft_s[0] >= max(worker.step_s(*span) for span in plan.spans) - 1e-9
    assert t.ttft_s[0] >= chain_ttft(plan, worker, FREE, 1e3) - 1e-9


@given(st.integers(1, 8), st.integers(8, 5000))
def test_chain_model_traffic_equals_equations_4_to_7(workers: int, tokens: int) -> None:
    split = even(Span(0, tokens - tokens % workers), workers)
    whole = split.bounds[-1]
    assert traffic_tokens(split) == pytest.approx((workers - 1) / 2 * whole)
    assert all_gather_tokens(whole, workers) == (workers - 1) * whole


@pytest.mark.parametrize(
    ("workers", "attainable", "sent"), [(2, 0.382, 0.62), (4, 0.160, 1.89), (8, 0.072, 4.48)]
)
def test_chain_model_attention_only_optimum_equals_the_theory_page(
    workers: int, attainable: float, sent: float
) -> None:
    worker = Worker(200, 0.0, 1e-9, projections=0.0)
    tokens = 40_000
    plan = balanced(Span(0, tokens), workers, worker.step_s)
    ratio = chain_ttft(plan, worker, FREE, 1.0) / worker.step_s(0, tokens)
    assert ratio == pytest.approx(attainable, abs=0.001)
    assert ratio > lower_bound(workers)
    assert traffic_tokens(plan) / tokens == pytest.approx(sent, abs=0.01)
    tsp = sequence_parallel_ttft(tokens, workers, worker, FREE, 1.0)
    assert tsp / worker.step_s(0, tokens) == pytest.approx(1 / workers)


def test_chain_model_zigzag_with_causal_kernels_is_within_two_percent() -> None:
    worker = Worker(32, 0.0786 / 1024, 0.0208 / 1024**2, causal=True)
    for workers in (2, 4, 8):
        plan = balanced(Span(0, 16384), workers, worker.step_s)
        kvr_s = chain_ttft(plan, worker, FREE, 1.0)
        zigzag_s = sequence_parallel_ttft(16384, workers, worker, FREE, 1.0, zigzag=True)
        assert 0.98 < zigzag_s / kvr_s < 1.005


def test_chain_model_batch_of_partitions_equals_one_by_one() -> None:
    worker, link = Worker(8, 1e-4, 1e-8, floor_s=1e-3), ChainLink(1e8)
    plans = [Partition((0, a, a + 50, 400)) for a in (10, 100, 300)]
    together = run_chain(plans, worker, link, 1e4).ttft_s
    bounds = np.array([plan.bounds for plan in plans])
    assert together.tolist() == run_chain(bounds, worker, link, 1e4).ttft_s.tolist()
    assert together.tolist() == [chain_ttft(plan, worker, link, 1e4) for plan in plans]


def test_chain_model_slow_layers_delay_less_than_in_an_all_gather() -> None:
    worker, link, kv = Worker(32, 1e-4, 1e-8), ChainLink(1e9), 1e5
    slow = np.ones((4, 32))
    slow[1, ::4] = 8
    plan = balanced(Span(0, 8192), 4, worker.step_s)
    chain = chain_ttft(plan, worker, link, kv, slowdown=slow[:3]) / chain_ttft(
        plan, worker, link, kv
    )
    gather = sequence_parallel_ttft(
        8192, 4, worker, link, kv, slowdown=slow
    ) / sequence_parallel_ttft(8192, 4, worker, link, kv)
    assert 1 <= chain < gather
