"""What a step does for others counts as a fixed cost of the part that it leaves to a prompt."""

from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest
from kv_pools import record_of

from sglang_cake.config import CakeConfig
from sglang_cake.integration.scheduler.rank_consensus import SharedCosts
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import (
    LoadCost,
    PrefillCost,
    PromptCosts,
    StepWork,
    TierLoads,
)
from sglang_cake.testing.virtual_time import virtual_time

LIVE = record_of(4, block=16)
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
    assert step_costs.agreed == COST  # of a step that has nothing else to do


def test_step_costs_next_step_starts_empty(step_costs: StepCosts) -> None:
    step_costs.scheduling(decodes=3)
    step_costs.claimed(0, 100)
    step_costs.polled()
    assert step_costs.costs(LIVE) == PromptCosts(step_costs.agreed, LoadCost(0.0, 0.05))
    assert step_costs.measured


def test_step_costs_recalled_for_another_store_leave_measured_steps_as_the_ranks_agreed() -> None:
    loader, loads = Mock(cost=LoadCost(0.0, 0.05)), [LoadCost(0.0, 0.5)]
    step_costs = StepCosts(loader, COST, chunk_tokens=64, pipelined=True)
    remembered = replace(COST, token_s=7e-3)
    step_costs.recall(remembered, loads)
    assert step_costs.own.prefill == step_costs.agreed == remembered
    step_costs.scheduling(decodes=0)
    step_costs.claimed(0, 64)
    step_costs.step_launched(Timer(0.08, ended=True))
    step_costs.polled()
    measured = step_costs.own.prefill
    assert measured != remembered
    agreed = replace(measured, token_s=measured.token_s / 2)  # another rank is faster
    step_costs.agree(SharedCosts(agreed, 0.0, ()))
    step_costs.recall(remembered, loads)
    assert step_costs.own.prefill == measured
    assert step_costs.agreed == agreed
    assert [call.args[0] for call in loader.recall.call_args_list] == [loads, loads]


def test_step_costs_known_are_none_until_a_step_and_a_load_were_measured() -> None:
    """A decode server, which neither computes prompts nor loads, has none."""
    guess, load = LoadCost(0.0, 0.05), LoadCost(0.0, 0.02)
    loader = Mock(cost=guess, costs=[None])
    step_costs = StepCosts(loader, COST, chunk_tokens=64, pipelined=True)
    assert step_costs.known is None
    step_costs.scheduling(decodes=0)
    step_costs.claimed(0, 64)
    step_costs.step_launched(Timer(0.08, ended=True))
    step_costs.polled()
    assert step_costs.known is None
    loader.costs = [None, load]  # of a tier that was not read last
    assert step_costs.known is None
    loader.cost = load
    assert step_costs.known == PromptCosts(step_costs.own.prefill, load)


AUTO = CakeConfig(mode="auto", block_tokens=16, min_load_tokens=16)
NOTHING, QUEUE = StepWork(), StepWork(tokens=640)


def test_step_costs_queue_on_the_device_makes_loading_worth_it(step_costs: StepCosts) -> None:
    """0.05 s a block, and 0.074 s for all four to be computed: alone it is computed."""
    live = record_of(4, block=16)
    stored, loads = (True,) * 4, TierLoads(bytes(4), (LoadCost(0.04, 0.05),))
    assert not step_costs.decision_at_arrival(live, AUTO, NOTHING)(stored, loads)
    assert step_costs.decision_at_arrival(live, AUTO, QUEUE)(stored, loads)
    live.meet.found(stored)
    step_costs.agree(SharedCosts(COST, 0.0, loads.costs))
    live.agreed.tiers = loads.tiers
    assert not step_costs.should_load(live, "auto", NOTHING)
    assert step_costs.should_load(live, "auto", QUEUE)
    assert not step_costs.should_load(live, "compute", QUEUE)
    assert step_costs.should_load(live, "load", NOTHING)


def test_step_costs_decoding_requests_make_loading_worth_it(step_costs: StepCosts) -> None:
    live = record_of(4, block=16)
    stored, loads = (True,) * 4, TierLoads(bytes(4), (LoadCost(0.04, 0.05),))
    step_costs.scheduling(decodes=60)
    step_costs.polled()
    assert step_costs.decision_at_arrival(live, AUTO, NOTHING)(stored, loads)


def test_step_costs_no_tier_stalled_is_told_without_a_look_at_blocks_of_several_tiers(
    step_costs: StepCosts,
) -> None:
    """It is asked of hundreds of waiting requests in each step."""
    live = record_of(4, block=16)
    live.meet.found((True,) * 4)
    live.agreed.tiers, live.agreed.tier = bytes([0, 0, 1, 1]), None
    live.agreed.load_from = 0
    unseen = replace(live, meet=Mock(view=Mock(side_effect=AssertionError)))
    costs = SharedCosts(COST, 0.0, (LoadCost(0.0, 0.05),) * 3)
    step_costs.agree(costs._replace(silence_s=(0.1, 0.1, 0.1)))
    assert not step_costs.is_stalled(unseen)
    step_costs.agree(costs._replace(silence_s=(0.0, 0.11, 0.0)))
    assert step_costs.is_stalled(live)
    step_costs.agree(costs._replace(silence_s=(0.0, 0.0, 0.11)))  # it has no block there
    assert not step_costs.is_stalled(live)


@dataclass
class Timer:
    """A forward that ends when the test says."""

    took_s: float
    ended: bool = False

    def done(self) -> bool:
        return self.ended

    def seconds(self) -> float:
        return self.took_s


def pipelined(chunk_tokens: int = 640) -> StepCosts:
    loader = Mock(cost=LoadCost(0.0, 0.05))
    return StepCosts(loader, COST, chunk_tokens=chunk_tokens, pipelined=True)


def test_step_costs_pipelined_step_under_way_makes_loading_worth_it() -> None:
    step_costs = pipelined()
    live = record_of(4, block=16)
    stored, loads = (True,) * 4, TierLoads(bytes(4), (LoadCost(0.04, 0.05),))
    with virtual_time():
        assert not step_costs.decision_at_arrival(live, AUTO, NOTHING)(stored, loads)
        step_costs.claimed(0, 640)
        timer = Timer(0.85)
        step_costs.step_launched(timer)
        assert step_costs.decision_at_arrival(live, AUTO, NOTHING)(stored, loads)
        step_costs.polled()
        assert step_costs.decision_at_arrival(live, AUTO, NOTHING)(stored, loads)
        timer.ended = True
        step_costs.polled()
        assert not step_costs.decision_at_arrival(live, AUTO, NOTHING)(stored, loads)


def test_step_costs_pipelined_busy_time_is_the_rest_of_the_launched_steps() -> None:
    step_costs = pipelined()
    timers = [Timer(0.0), Timer(0.0)]
    with virtual_time() as io:
        for start, timer in zip((0, 100), timers, strict=True):
            step_costs.claimed(start, start + 100)
            step_costs.step_launched(timer)
            step_costs.polled()
        first_s, second_s = COST.step_s(0, 100), COST.step_s(100, 200)
        assert step_costs.busy_s == pytest.approx(first_s + second_s)
        io.now_s += first_s / 2
        assert step_costs.busy_s == pytest.approx(first_s / 2 + second_s)
        io.now_s += first_s  # later than predicted: the second one begins when it is seen
        assert step_costs.busy_s == pytest.approx(second_s - first_s / 2)
        timers[0].ended = True
        timers[0].took_s = first_s
        step_costs.polled()
        assert step_costs.busy_s == pytest.approx(second_s)
        io.now_s += 10 * second_s
        assert step_costs.busy_s == 0.0


def test_step_costs_plan_is_made_for_the_moment_at_which_the_device_is_free() -> None:
    step_costs = pipelined()
    with virtual_time():
        assert step_costs.costs(LIVE).backlog_s == 0.0
        step_costs.claimed(0, 640)
        step_costs.step_launched(Timer(0.85))
        step_costs.polled()
        step_costs.agree(SharedCosts(step_costs.own.prefill, step_costs.busy_s, ()))
        assert step_costs.costs(LIVE).backlog_s == pytest.approx(COST.step_s(0, 640))


@pytest.mark.parametrize("least_tokens", [33, 48])  # more than two blocks of 16 tokens
def test_step_costs_less_than_min_load_tokens_is_not_worth_loading(
    step_costs: StepCosts, least_tokens: int
) -> None:
    live = record_of(4, block=16)
    least = replace(AUTO, min_load_tokens=least_tokens)
    loads = TierLoads(bytes(4), (LoadCost(0.0, 0.01, depth=4),))
    assert not step_costs.decision_at_arrival(live, least, QUEUE)((False, False, True, True), loads)
    assert step_costs.decision_at_arrival(live, least, QUEUE)((False, True, True, True), loads)


def test_step_costs_decode_only_step_is_not_measured(step_costs: StepCosts) -> None:
    step_costs.scheduling(decodes=3)
    step_costs.polled()
    assert not step_costs.measured


def test_step_costs_pipelined_steps_are_measured_by_their_own_timers() -> None:
    """Unequal steps, each seen to be over only when the next one is launched (gpu.md, A3)."""
    step_costs = pipelined(8192)
    true = PrefillCost(0.02, 2e-5, 1e-9)
    under_way: Timer | None = None
    with virtual_time() as io:
        for number in range(60):
            start = number % 5 * 8192
            tokens = 8192 if number % 5 < 4 else 700
            step_costs.claimed(start, start + tokens)
            timer = Timer(true.step_s(start, start + tokens))
            step_costs.step_launched(timer)
            if under_way is not None:
                io.now_s += under_way.took_s
                under_way.ended = True
            step_costs.polled()
            under_way = timer
    for start, stop in ((0, 8192), (24576, 32768), (32768, 33280)):
        assert step_costs.own.prefill.step_s(start, stop) == pytest.approx(
            true.step_s(start, stop), rel=0.1
        )
    assert step_costs.own.prefill.error < 0.05


def test_step_costs_pipelined_decode_step_is_not_measured() -> None:
    step_costs = pipelined()
    step_costs.step_launched(Timer(0.01, ended=True))
    step_costs.polled()
    assert not step_costs.measured


def test_step_costs_decode_steps_after_a_prefill_count_in_each_step_of_a_prompt(
    step_costs: StepCosts,
) -> None:
    with virtual_time() as io:
        step_costs.ran(decode=False)
        for took_s in (0.02, 0.02, 0.02, 5.0):  # it was paused in the last one
            step_costs.ran(decode=True)
            io.now_s += took_s
        step_costs.ran(decode=False)
    decode_step_s = step_costs.measured_here.decode_step_s
    assert decode_step_s == pytest.approx(0.02)
    step_costs.agree(SharedCosts(COST, 0.0, (), decode_step_s=decode_step_s))
    step_costs.scheduling(decodes=0, decode_steps=10)
    assert step_costs.costs(LIVE).prefill.fixed_s == pytest.approx(COST.fixed_s + 0.2)
    assert step_costs.costs(LIVE).others_s == 0.0
    step_costs.claimed(0, 100)
    others_s = COST.step_s(0, 100)
    assert step_costs.costs(LIVE).prefill.fixed_s == pytest.approx(others_s + 0.2)
    assert step_costs.costs(LIVE).others_s == pytest.approx(others_s + 0.2)
    step_costs.scheduling(decodes=0)
    assert step_costs.costs(LIVE).prefill == COST


def test_step_costs_decode_step_that_compiled_does_not_count_for_long(
    step_costs: StepCosts,
) -> None:
    with virtual_time() as io:
        for took_s in (30.0, *[0.02] * 20):
            step_costs.ran(decode=True)
            io.now_s += took_s
        step_costs.ran(decode=True)
    assert step_costs.measured_here.decode_step_s < 0.03


def test_step_costs_waiting_for_kv_is_not_part_of_the_cost(
    step_costs: StepCosts,
) -> None:
    with virtual_time() as io:
        step_costs.claimed(0, 64)
        io.now_s += 7.0
        step_costs.waited(6.5)
        step_costs.polled()
    assert step_costs.own.prefill.step_s(0, 64) == pytest.approx(0.5, rel=0.2)
