"""What a step does for others counts as a fixed cost of the part that it leaves to a prompt."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from kv_pools import load_of
from virtual_io import virtual_time

from sglang_cake.core.config import CakeConfig
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import Costs, LoadCost, PrefillCost, StepWork

LIVE = load_of(4, block=16)
COST = PrefillCost(0.01, 1e-3, 1e-6, decode_s=0.002, error=0.0)


@pytest.fixture
def step_costs() -> StepCosts:
    loader = Mock(cost=LoadCost(0.0, 0.05))
    return StepCosts(loader, COST, chunk_tokens=64, pipelined=False)


def test_step_costs_work_for_others_is_part_of_the_fixed_cost(step_costs: StepCosts) -> None:
    step_costs.scheduling(decodes=3)
    assert step_costs.costs(LIVE).prefill.fixed_s == pytest.approx(0.01 + 3 * 0.002)
    step_costs.claimed(0, 100)
    step_costs.claimed(50, 60)
    others_s = 110 * 1e-3 + (5050 + 10 * 50 + 55) * 1e-6 + 3 * 0.002
    assert step_costs.costs(LIVE).prefill.fixed_s == pytest.approx(0.01 + others_s)
    assert step_costs.costs(LIVE).prefill.token_s == COST.token_s
    assert step_costs.costs(LIVE).load == LIVE.agreed.cost  # that of its own blocks
    assert step_costs.agreed == COST  # of a step that has nothing else to do


def test_step_costs_next_step_starts_empty(step_costs: StepCosts) -> None:
    step_costs.scheduling(decodes=3)
    step_costs.claimed(0, 100)
    step_costs.polled()
    assert step_costs.costs(LIVE) == Costs(step_costs.agreed, LIVE.agreed.cost)
    assert step_costs.measured


AUTO = CakeConfig(mode="auto", block_tokens=16, min_load_tokens=16)
NOTHING, QUEUE = StepWork(), StepWork(tokens=640)


def test_step_costs_queue_on_the_device_makes_loading_worth_it(step_costs: StepCosts) -> None:
    """0.05 s a block, and 0.074 s for all four to be computed: alone it is computed."""
    live = load_of(4, block=16)
    stored, load = (True,) * 4, LoadCost(0.04, 0.05)
    assert not step_costs.should_load_at_arrival(live, AUTO, NOTHING)(stored, load)
    assert step_costs.should_load_at_arrival(live, AUTO, QUEUE)(stored, load)
    live.meet.found(stored)
    live.agreed.cost = load
    assert not step_costs.should_load(live, "auto", NOTHING)
    assert step_costs.should_load(live, "auto", QUEUE)
    assert not step_costs.should_load(live, "compute", QUEUE)
    assert step_costs.should_load(live, "load", NOTHING)


def test_step_costs_decoding_requests_make_loading_worth_it(step_costs: StepCosts) -> None:
    live = load_of(4, block=16)
    stored, load = (True,) * 4, LoadCost(0.04, 0.05)
    step_costs.scheduling(decodes=60)
    step_costs.polled()
    assert step_costs.should_load_at_arrival(live, AUTO, NOTHING)(stored, load)


def test_step_costs_pipelined_step_under_way_makes_loading_worth_it() -> None:
    step_costs = StepCosts(Mock(cost=LoadCost(0.0, 0.05)), COST, chunk_tokens=640, pipelined=True)
    live = load_of(4, block=16)
    stored, load = (True,) * 4, LoadCost(0.04, 0.05)
    assert not step_costs.should_load_at_arrival(live, AUTO, NOTHING)(stored, load)
    step_costs.claimed(0, 640)
    assert step_costs.should_load_at_arrival(live, AUTO, NOTHING)(stored, load)
    step_costs.polled()
    assert step_costs.should_load_at_arrival(live, AUTO, NOTHING)(stored, load)
    step_costs.polled()
    assert not step_costs.should_load_at_arrival(live, AUTO, NOTHING)(stored, load)


def test_step_costs_less_than_min_load_tokens_is_not_worth_loading(step_costs: StepCosts) -> None:
    live = load_of(4, block=16)
    least = replace(AUTO, min_load_tokens=48)
    assert not step_costs.should_load_at_arrival(live, least, QUEUE)(
        (False, False, True, True), LIVE.agreed.cost
    )
    assert step_costs.should_load_at_arrival(live, least, QUEUE)(
        (False, True, True, True), LIVE.agreed.cost
    )


def test_step_costs_decode_only_step_is_not_measured(step_costs: StepCosts) -> None:
    step_costs.scheduling(decodes=3)
    step_costs.polled()
    assert not step_costs.measured


def test_step_costs_pipelined_first_step_is_not_measured() -> None:
    step_costs = StepCosts(Mock(cost=LoadCost(0.0, 0.05)), COST, chunk_tokens=64, pipelined=True)
    step_costs.claimed(0, 64)
    step_costs.polled()
    assert not step_costs.measured
    step_costs.claimed(64, 128)
    step_costs.polled()
    assert step_costs.measured


def test_step_costs_waiting_for_kv_is_not_part_of_the_cost(
    step_costs: StepCosts,
) -> None:
    with virtual_time() as io:
        step_costs.claimed(0, 64)
        io.loop.now_s += 7.0
        step_costs.waited(6.5)
        step_costs.polled()
    assert step_costs.own.prefill.step_s(0, 64) == pytest.approx(0.5, rel=0.2)
