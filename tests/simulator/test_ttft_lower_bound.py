"""The optimum is one: nobody is faster, and with constant speeds it is the closed form."""

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.loading.planner import Mode
from sglang_cake.simulator.machine import Machine, Speed, StoreLink
from sglang_cake.simulator.simulated_server import simulate_prompt
from sglang_cake.simulator.ttft_lower_bound import TOLERANCE, ttft_lower_bound

costs = st.builds(
    PrefillCost,
    fixed_s=st.floats(1e-4, 0.05),
    token_s=st.floats(1e-5, 1e-3),
    pair_s=st.floats(0, 1e-8),
    prefix_s=st.one_of(st.just(0.0), st.floats(1e-8, 9e-6)),
    graph_tokens=st.sampled_from([(), (128, 256, 512, 1024)]),
)
loads = st.builds(LoadCost, latency_s=st.floats(0, 0.1), block_s=st.floats(1e-4, 0.2))


@st.composite
def speeds(draw: st.DrawFn) -> Speed:
    values = draw(st.lists(st.floats(0.05, 1), min_size=1, max_size=8))
    gap_s = draw(st.floats(0.02, 0.5))
    return Speed(tuple(gap_s * i for i in range(len(values))), tuple(values))


@settings(max_examples=150)
@given(
    cost=costs,
    load=loads,
    device=speeds(),
    link=speeds(),
    further=st.booleans(),
    tokens=st.integers(1, 12000),
    share=st.one_of(st.none(), st.floats(0, 1)),
    chunk=st.sampled_from([256, 512, 2048]),
    mode=st.sampled_from(["auto", "both", "compute", "load"]),
    layers=st.sampled_from([1, 2, 40]),
    taken=st.one_of(st.none(), st.lists(st.floats(0, 0.95), min_size=1, max_size=9)),
    noises=st.lists(st.floats(1, 2), min_size=1, max_size=9),
    plan_s=st.sampled_from([None, 0.0, 0.0015]),
    end_blocks=st.sampled_from([0, 0, 1, 30]),
)
def test_ttft_lower_bound_random_races_are_never_faster(
    cost: PrefillCost,
    load: LoadCost,
    device: Speed,
    link: Speed,
    further: bool,
    tokens: int,
    share: float | None,
    chunk: int,
    mode: Mode,
    layers: int,
    taken: list[float] | None,
    noises: list[float],
    plan_s: float | None,
    end_blocks: int,
) -> None:
    """Alone and among others, whatever is stored."""
    machine = Machine(
        cost,
        load,
        device,
        link,
        noise=lambda step: noises[step % len(noises)],
        others=taken and (lambda step: int(chunk * taken[step % len(taken)])),
        further=(StoreLink(load),) if further else (),
        layers=layers,
        plan_s=plan_s,
        end_blocks=end_blocks,
    )
    stored = None if share is None else int(share * (tokens // 128))
    result = simulate_prompt(machine, tokens, chunk_tokens=chunk, mode=mode, stored_blocks=stored)
    ideal = ttft_lower_bound(machine, tokens, chunk_tokens=chunk, stored_blocks=stored)
    assert result.ttft_s >= ideal.ttft_s * (1 - 1e-9)


def test_ttft_lower_bound_without_stored_blocks_equals_computing() -> None:
    """Of what nobody stores the bound is exact: whole steps, and others as they come."""
    for others in (None, lambda step: 37 * step % 400):
        machine = Machine(PrefillCost(0.01, 1e-4, 1e-8), LoadCost(0.0, 0.01), others=others)
        for tokens in (1, 511, 512, 513, 5000):
            result = simulate_prompt(machine, tokens, chunk_tokens=512, stored_blocks=0)
            ideal = ttft_lower_bound(machine, tokens, chunk_tokens=512, stored_blocks=0)
            assert ideal.ttft_s == pytest.approx(result.ttft_s)


def test_ttft_lower_bound_last_step_also_computes_blocks_not_loaded() -> None:
    """A step has a price of its own: one that holds both is cheaper than two."""
    machine = Machine(PrefillCost(1.0, 1e-4, 0.0), LoadCost(0.0, 0.128))
    found = ttft_lower_bound(machine, 8 * 128 + 100, chunk_tokens=512)
    # 612 tokens come in 0.612 s; one step computes 412 others and the tail.
    assert found.ttft_s == pytest.approx(0.612 + 1.0 + 512 * 1e-4, rel=2 * TOLERANCE)


# The same examples every time: 8,000 random ones held, which is no proof that all do.
@settings(max_examples=100, derandomize=True)
@given(
    cost=costs,
    load=loads,
    tokens=st.integers(129, 20000),
    chunk=st.sampled_from([256, 512]),
    end_blocks=st.sampled_from([0, 0, 1, 30]),
)
def test_mode_auto_is_at_most_two_percent_behind_the_better_mode(
    cost: PrefillCost, load: LoadCost, tokens: int, chunk: int, end_blocks: int
) -> None:
    machine = Machine(cost, load, end_blocks=end_blocks)
    times = {
        mode: simulate_prompt(machine, tokens, chunk_tokens=chunk, mode=mode).ttft_s
        for mode in ("auto", "compute", "load")
    }
    assert times["auto"] <= 1.02 * min(times["compute"], times["load"])


def test_ttft_lower_bound_constant_speeds_equal_the_closed_form() -> None:
    token_s, block_s, tokens = 1e-4, 0.01, 12801
    machine = Machine(PrefillCost(0.0, token_s, 0.0), LoadCost(0.0, block_s))
    load_token_s = block_s / 128
    expected_s = (tokens - 1) * token_s * load_token_s / (token_s + load_token_s)
    found = ttft_lower_bound(machine, tokens, chunk_tokens=512)
    assert found.ttft_s == pytest.approx(expected_s + token_s, rel=2 * TOLERANCE)
    assert found.meet_token == pytest.approx(expected_s / token_s, rel=1e-3)


def test_ttft_lower_bound_end_blocks_are_loaded_before_any_token() -> None:
    token_s, block_s, tokens = 1e-4, 0.01, 12801
    machine = Machine(PrefillCost(0.0, token_s, 0.0), LoadCost(0.0, block_s), end_blocks=20)
    load_token_s = block_s / 128
    # Until t the device computes t / token_s tokens, and (t - 20 block_s) / load_token_s come.
    expected_s = (12800 + 20 * 128) * token_s * load_token_s / (token_s + load_token_s)
    found = ttft_lower_bound(machine, tokens, chunk_tokens=512)
    assert found.ttft_s == pytest.approx(expected_s + token_s, rel=2 * TOLERANCE)


def test_ttft_lower_bound_very_slow_link_is_not_used() -> None:
    machine = Machine(PrefillCost(0.0, 1e-6, 0.0), LoadCost(10.0, 1.0))
    assert ttft_lower_bound(machine, 10_000, chunk_tokens=512).ttft_s == pytest.approx(0.01)


@pytest.mark.parametrize("layers", [2, 40])
def test_ttft_lower_bound_layers_gain_alone_and_not_among_others(layers: int) -> None:
    one = Machine(PrefillCost(0.01, 1e-4, 0.0), LoadCost(0.0, 0.01))
    for others, gains in ((None, True), (lambda step: 100, False)):
        plain_s, early_s = (
            ttft_lower_bound(
                replace(one, others=others, layers=count), 8192, chunk_tokens=512
            ).ttft_s
            for count in (1, layers)
        )
        assert (early_s < plain_s) == gains


def _trace(draw: random.Random, gap_s: float, low: float) -> Speed:
    return Speed(
        tuple(gap_s * i for i in range(80)), tuple(draw.uniform(low, 1) for _ in range(80))
    )


def test_mode_auto_random_speeds_median_is_near_the_optimum() -> None:
    """Issue's bound for traces, on devices that slow down instead of sharing their budget."""
    over = []
    for seed in range(60):
        draw = random.Random(seed)
        machine = Machine(
            PrefillCost(0.01, 1.2e-4, 6e-9),
            LoadCost(0.038, draw.choice([0.015, 0.03, 0.06])),
            _trace(draw, 0.25, 0.2),
            _trace(draw, 0.3, 0.1),
        )
        result = simulate_prompt(machine, 16384, chunk_tokens=512)
        over.append(result.ttft_s / ttft_lower_bound(machine, 16384, chunk_tokens=512).ttft_s)
    assert statistics.median(over) <= 1.05
