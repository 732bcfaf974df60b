"""What a step does for others counts as a fixed cost of the part that it leaves to a prompt."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from kv_pools import restore_of

from sglang_cake.core.config import CakeConfig
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import Costs, LoadCost, PrefillCost, StepWork

LIVE = restore_of(4, block=16)
COST = PrefillCost(0.01, 1e-3, 1e-6, decode_s=0.002, error=0.0)


@pytest.fixture
def pace() -> StepCosts:
    loader = Mock(cost=LoadCost(0.0, 0.05))
    return StepCosts(loader, COST, chunk_tokens=64, pipelined=False)


def test_what_a_step_already_does_is_part_of_its_price(pace: StepCosts) -> None:
    pace.scheduling(decodes=3)
    assert pace.costs(LIVE).prefill.fixed_s == pytest.approx(0.01 + 3 * 0.002)
    pace.claimed(0, 100)
    pace.claimed(50, 60)
    others_s = 110 * 1e-3 + (5050 + 10 * 50 + 55) * 1e-6 + 3 * 0.002
    assert pace.costs(LIVE).prefill.fixed_s == pytest.approx(0.01 + others_s)
    assert pace.costs(LIVE).prefill.token_s == COST.token_s
    assert pace.costs(LIVE).load == LIVE.load  # that of its own blocks
    assert pace.agreed == COST  # of a step that has nothing else to do


def test_the_next_step_starts_from_nothing(pace: StepCosts) -> None:
    pace.scheduling(decodes=3)
    pace.claimed(0, 100)
    pace.polled()
    assert pace.costs(LIVE) == Costs(pace.agreed, LIVE.load)
    assert pace.measured


AUTO = CakeConfig(mode="auto", block_tokens=16, min_load_tokens=16)
NOTHING, QUEUE = StepWork(), StepWork(tokens=640)


def test_what_waits_on_the_device_is_known_at_arrival_and_later(pace: StepCosts) -> None:
    """0.05 s a block, and 0.074 s for all four to be computed: alone it is computed."""
    live = restore_of(4, block=16)
    stored, load = (True,) * 4, LoadCost(0.04, 0.05)
    assert not pace.worth_now(live, AUTO, NOTHING)(stored, load)
    assert pace.worth_now(live, AUTO, QUEUE)(stored, load)
    live.meet.found(stored)
    live.load = load
    assert not pace.worth(live, "auto", NOTHING)
    assert pace.worth(live, "auto", QUEUE)
    assert not pace.worth(live, "compute", QUEUE)
    assert pace.worth(live, "load", NOTHING)


def test_who_decodes_shares_the_steps_of_who_waits(pace: StepCosts) -> None:
    live = restore_of(4, block=16)
    stored, load = (True,) * 4, LoadCost(0.04, 0.05)
    pace.scheduling(decodes=60)
    pace.polled()
    assert pace.worth_now(live, AUTO, NOTHING)(stored, load)


def test_launched_ahead_the_step_under_way_goes_first() -> None:
    pace = StepCosts(Mock(cost=LoadCost(0.0, 0.05)), COST, chunk_tokens=640, pipelined=True)
    live = restore_of(4, block=16)
    stored, load = (True,) * 4, LoadCost(0.04, 0.05)
    assert not pace.worth_now(live, AUTO, NOTHING)(stored, load)
    pace.claimed(0, 640)
    assert pace.worth_now(live, AUTO, NOTHING)(stored, load)
    pace.polled()
    assert pace.worth_now(live, AUTO, NOTHING)(stored, load)
    pace.polled()
    assert not pace.worth_now(live, AUTO, NOTHING)(stored, load)


def test_too_little_is_never_loaded(pace: StepCosts) -> None:
    live = restore_of(4, block=16)
    least = replace(AUTO, min_load_tokens=48)
    assert not pace.worth_now(live, least, QUEUE)((False, False, True, True), LIVE.load)
    assert pace.worth_now(live, least, QUEUE)((False, True, True, True), LIVE.load)


def test_steps_without_prefill_are_not_measured(pace: StepCosts) -> None:
    pace.scheduling(decodes=3)
    pace.polled()
    assert not pace.measured


def test_launched_ahead_only_a_run_of_steps_says_how_long_one_takes() -> None:
    pace = StepCosts(Mock(cost=LoadCost(0.0, 0.05)), COST, chunk_tokens=64, pipelined=True)
    pace.claimed(0, 64)
    pace.polled()
    assert not pace.measured
    pace.claimed(64, 128)
    pace.polled()
    assert pace.measured


def test_what_a_step_waited_for_kv_is_no_part_of_what_it_costs(
    pace: StepCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 107.0])
    monkeypatch.setattr(
        "sglang_cake.integration.step_costs.time", Mock(monotonic=lambda: next(clock))
    )
    pace.claimed(0, 64)
    pace.waited(6.5)
    pace.polled()
    assert pace.own.prefill.step_s(0, 64) == pytest.approx(0.5, rel=0.2)
