"""SGLang's overlap loop in the simulator: a step is planned while the one before runs."""

import itertools
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_beside_others import outcome
from test_ttft_lower_bound import costs, loads

from sglang_cake.loading.cost_model import LoadCost, PrefillCost, PromptCosts
from sglang_cake.loading.meet import View
from sglang_cake.loading.planner import StepPlan, next_step
from sglang_cake.simulator.hardware import PLAN_S
from sglang_cake.simulator.machine import Machine
from sglang_cake.simulator.simulated_server import Prompt, serve, simulate_prompt
from sglang_cake.simulator.ttft_lower_bound import ttft_lower_bound
from sglang_cake.testing.scheduler_loop import prompt
from sglang_cake.testing.virtual_gpu import MODELS, GpuModel, virtual_scheduler

MACHINE = Machine(PrefillCost(0.01, 1e-4, 1e-9, 1e-4), LoadCost(0.02, 0.015), plan_s=PLAN_S)
CHUNK = 512
LATENCY_S = 0.001  # a lookup, and the first byte of a read


def machine(model: GpuModel, gb_per_s: float) -> Machine:
    block_s = model.layout.block_bytes / (gb_per_s * 1e9)
    return Machine(model.prefill, LoadCost(LATENCY_S, block_s), plan_s=PLAN_S)


def plan_for_now(view: View, *, costs: PromptCosts, **rest: object) -> StepPlan:
    """Plans as if the step began at once."""
    return next_step(view, costs=replace(costs, backlog_s=0.0), **rest)  # type: ignore[arg-type]


# ---- the loop ----


def test_overlap_loop_steps_follow_without_a_pause() -> None:
    steps = simulate_prompt(MACHINE, 5000, chunk_tokens=CHUNK, mode="compute").steps
    assert steps[0].begin_s == PLAN_S
    assert len(steps) == 10
    assert all(a.end_s == b.begin_s for a, b in itertools.pairwise(steps))


def test_overlap_loop_step_shorter_than_planning_waits_for_the_host() -> None:
    slow = replace(MACHINE, plan_s=1.0)
    steps = simulate_prompt(slow, 5000, chunk_tokens=CHUNK, mode="compute").steps
    assert [step.begin_s for step in steps] == [1.0 + i for i in range(10)]


def test_overlap_loop_step_reads_only_blocks_that_landed_before_its_plan() -> None:
    at_once = 0
    for block_s in (0.0005, 0.001, 0.003, 0.015, 0.03):
        machine = replace(MACHINE, load=LoadCost(0.02, block_s))
        result = simulate_prompt(machine, 6000, chunk_tokens=CHUNK, rule=plan_for_now)
        landed_s = {block: when_s for when_s, block in result.landings}
        for before, step in itertools.pairwise(result.steps):
            follows = step.begin_s == before.end_s
            planned_s = before.begin_s if follows else step.begin_s - PLAN_S
            read = range(-(-before.stop // 128), step.start // 128)
            assert all(landed_s[block] <= planned_s + 1e-9 for block in read)
            at_once += follows and len(read) > 0
    assert at_once


@pytest.mark.parametrize(("plan_s", "steps"), [(None, 3), (PLAN_S, 4)])
def test_overlap_loop_last_token_of_a_request_is_known_a_step_late(
    plan_s: float | None, steps: int
) -> None:
    server = serve(
        replace(MACHINE, plan_s=plan_s), [Prompt(256, 0, 0, new_tokens=3)], chunk_tokens=CHUNK
    )
    (result,) = server.results
    assert len(server.steps) == steps
    assert result.first_token_s == server.steps[0].end_s
    assert result.finish_s == server.steps[2].end_s


# ---- the decisions ----


@settings(max_examples=100)
@given(
    cost=costs,
    load=loads,
    tokens=st.integers(129, 20000),
    chunk=st.sampled_from([256, 512, 2048]),
    share=st.one_of(st.none(), st.floats(0.02, 0.98)),
    plan_s=st.sampled_from([0.0, PLAN_S]),
)
def test_overlap_loop_mode_auto_is_at_most_a_step_behind_the_better_mode(
    cost: PrefillCost, load: LoadCost, tokens: int, chunk: int, share: float | None, plan_s: float
) -> None:
    taken = None if share is None else int(share * chunk)
    others = None if taken is None else lambda step: taken
    found = outcome(Machine(cost, load, others=others, plan_s=plan_s), tokens, chunk)
    assert not found.too_late
    assert found.auto_s >= found.ideal_s * (1 - 1e-9)


def test_overlap_loop_beside_others_counts_that_blocks_must_land_before_the_plan() -> None:
    """Blocks that land while the step before the last one runs come a step of others too late."""
    cost = PrefillCost(0.03125, 1e-5, 0.0, 0.0, graph_tokens=(128, 256, 512, 1024))
    others = Machine(cost, LoadCost(0.0, 0.03125), others=lambda step: 576, plan_s=PLAN_S)
    found = outcome(others, 17280, 2048)
    assert found.auto_s < found.compute_s


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_overlap_loop_median_is_near_the_optimum_since_plans_count_the_running_step(
    model: GpuModel,
) -> None:
    """Without the rest of the running step, the meeting point is planned too far to the right."""
    over: dict[str, list[float]] = {"rule": [], "now": []}
    for gb_per_s, tokens in itertools.product((2, 4, 8, 12, 25), (16384, 24000, 32768)):
        here = machine(model, gb_per_s)
        ideal_s = ttft_lower_bound(here, tokens, chunk_tokens=model.chunk_tokens).ttft_s
        for name, rule in (("rule", next_step), ("now", plan_for_now)):
            result = simulate_prompt(here, tokens, chunk_tokens=model.chunk_tokens, rule=rule)
            over[name].append(result.ttft_s / ideal_s)
    print(model.name, {name: (statistics.median(o), max(o)) for name, o in over.items()})
    assert statistics.median(over["rule"]) <= 1.05
    assert max(over["rule"]) <= 1.1
    assert statistics.median(over["now"]) >= 1.3
    assert all(rule < now for rule, now in zip(over["rule"], over["now"], strict=True))


@pytest.mark.parametrize(("gb_per_s", "tokens"), [(2, 16384), (4, 32768), (8, 24000)])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_overlap_loop_agrees_with_the_coordinator_on_a_virtual_gpu(
    model: GpuModel, gb_per_s: float, tokens: int
) -> None:
    """The real coordinator and loader, with copies and the host's launches, take as long."""
    link = gb_per_s * 1e9
    with virtual_scheduler(model, link_bytes_per_s=link, latency_s=LATENCY_S / 2) as scheduler:
        scheduler.knows_costs()
        req = prompt(1, tokens)
        scheduler.store.keys.update(scheduler.keys(req.origin_input_ids))
        (run,) = scheduler.serve([(0.0, req)])
    result = simulate_prompt(machine(model, gb_per_s), tokens, chunk_tokens=model.chunk_tokens)
    assert result.ttft_s == pytest.approx(run.ttft_s, rel=0.03)
    assert result.computed_tokens == pytest.approx(run.report["computed_tokens"], abs=3 * 128)
