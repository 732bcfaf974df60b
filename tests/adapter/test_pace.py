"""What a step does for others counts as a fixed cost of the part that it leaves to a prompt."""

from unittest.mock import Mock

import pytest
from kv_pools import restore_of

from sglang_cake.adapter.pace import Pace
from sglang_cake.read.cost import Costs, LoadCost, PrefillCost

LIVE = restore_of(4, block=16)
COST = PrefillCost(0.01, 1e-3, 1e-6, decode_s=0.002, error=0.0)


@pytest.fixture
def pace() -> Pace:
    loader = Mock(cost=LoadCost(0.0, 0.05))
    return Pace(loader, COST, chunk_tokens=64, pipelined=False)


def test_what_a_step_already_does_is_part_of_its_price(pace: Pace) -> None:
    pace.scheduling(decodes=3)
    assert pace.costs(LIVE).prefill.fixed_s == pytest.approx(0.01 + 3 * 0.002)
    pace.claimed(0, 100)
    pace.claimed(50, 60)
    others_s = 110 * 1e-3 + (5050 + 10 * 50 + 55) * 1e-6 + 3 * 0.002
    assert pace.costs(LIVE).prefill.fixed_s == pytest.approx(0.01 + others_s)
    assert pace.costs(LIVE).prefill.token_s == COST.token_s
    assert pace.costs(LIVE).load == LIVE.load  # that of its own blocks
    assert pace.agreed == COST  # of a step that has nothing else to do


def test_the_next_step_starts_from_nothing(pace: Pace) -> None:
    pace.scheduling(decodes=3)
    pace.claimed(0, 100)
    pace.polled()
    assert pace.costs(LIVE) == Costs(pace.agreed, LIVE.load)
    assert pace.measured


def test_steps_without_prefill_are_not_measured(pace: Pace) -> None:
    pace.scheduling(decodes=3)
    pace.polled()
    assert not pace.measured


def test_launched_ahead_only_a_run_of_steps_says_how_long_one_takes() -> None:
    pace = Pace(Mock(cost=LoadCost(0.0, 0.05)), COST, chunk_tokens=64, pipelined=True)
    pace.claimed(0, 64)
    pace.polled()
    assert not pace.measured
    pace.claimed(64, 128)
    pace.polled()
    assert pace.measured


def test_what_a_step_waited_for_kv_is_no_part_of_what_it_costs(
    pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 107.0])
    monkeypatch.setattr("sglang_cake.adapter.pace.time", Mock(monotonic=lambda: next(clock)))
    pace.claimed(0, 64)
    pace.waited(6.5)
    pace.polled()
    assert pace.own.prefill.step_s(0, 64) == pytest.approx(0.5, rel=0.2)
