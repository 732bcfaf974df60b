"""Many prompts on a virtual clock: conservation, order, sharing, decoding."""

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.loading.planner import Mode
from sglang_cake.loading.priority import AGEING
from sglang_cake.simulator.machine import Clock, Machine, SharedStore, Speed, StoreLink
from sglang_cake.simulator.simulated_server import (
    Policy,
    Prompt,
    SimulatedServer,
    serve,
    simulate_prompt,
)

PREFILL = PrefillCost(0.01, 1e-4, 1e-9, 1e-4)
MACHINE = Machine(PREFILL, LoadCost(0.02, 0.015))
CHUNK = 512

prompts = st.lists(
    st.builds(
        Prompt,
        prompt_tokens=st.integers(1, 6000),
        arrive_s=st.floats(0, 2),
        stored_blocks=st.one_of(st.none(), st.integers(0, 40)),
        new_tokens=st.integers(1, 5),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(
    given_prompts=prompts,
    policy=st.sampled_from(["adaptive", "fcfs"]),
    mode=st.sampled_from(["auto", "both", "compute", "load"]),
    others=st.sampled_from([None, 0, 200, 448]),
    layers=st.sampled_from([1, 32]),
    plan_s=st.sampled_from([None, 0.0, 0.0015, 0.1]),
    end_blocks=st.sampled_from([0, 0, 1, 20]),
)
def test_simulated_server_random_prompts_finish_with_every_token_once(
    given_prompts: list[Prompt],
    policy: Policy,
    mode: Mode,
    others: int | None,
    layers: int,
    plan_s: float | None,
    end_blocks: int,
) -> None:
    taken = None if others is None else lambda step: others
    machine = Machine(
        PREFILL,
        MACHINE.load,
        others=taken,
        layers=layers,
        plan_s=plan_s,
        end_blocks=end_blocks,
    )
    server = serve(machine, given_prompts, chunk_tokens=CHUNK, mode=mode, policy=policy)
    for result in server.results:
        assert result.computed_tokens + result.loaded_tokens == result.prompt.prompt_tokens
        assert result.prompt.arrive_s < result.first_token_s <= result.finish_s
        assert result.ttft_s >= result.kv_s > 0
        assert result.overlapped_tokens <= result.loaded_tokens
        assert len({block for _, block in result.landings}) == len(result.landings)
        spans = [(step.start, step.stop) for step in result.steps]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for step in server.steps:
        held = step.decodes + step.plain_tokens + step.stored_tokens + step.other_tokens
        assert held <= CHUNK + step.decodes
    ends = [(step.begin_s, step.end_s) for step in server.steps]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 9000),
    stored=st.one_of(st.none(), st.integers(0, 70)),
    end_blocks=st.integers(1, 40),
    mode=st.sampled_from(["auto", "both", "load"]),
)
def test_simulated_server_loads_a_prompt_with_its_end_state_or_nothing(
    tokens: int, stored: int | None, end_blocks: int, mode: Mode
) -> None:
    """The blocks that are loaded end where the stored prefix ends."""
    machine = Machine(PREFILL, MACHINE.load, end_blocks=end_blocks)
    found = simulate_prompt(machine, tokens, chunk_tokens=CHUNK, mode=mode, stored_blocks=stored)
    blocks = (tokens - 1) // 128 if stored is None else min(stored, (tokens - 1) // 128)
    landed = [block for _, block in found.landings]
    if found.loaded_tokens:
        assert sum(step.start == blocks * 128 for step in found.steps) == 1
        first = (tokens - 1) // 128 + (blocks - 1) * end_blocks
        assert landed[:end_blocks] == list(range(first, first + end_blocks))[::-1]
        assert found.loaded_tokens <= 128 * (len(landed) - end_blocks)
    elif mode == "load":
        assert blocks == 0


def test_simulated_server_end_state_slower_than_computing_is_not_loaded() -> None:
    slow = Machine(PREFILL, MACHINE.load, end_blocks=60)  # 0.9 s; computing takes 0.5 s
    found = simulate_prompt(slow, 4200, chunk_tokens=CHUNK)
    assert found.landings == []
    assert found.ttft_s == simulate_prompt(slow, 4200, chunk_tokens=CHUNK, mode="compute").ttft_s


def test_simulated_server_link_carries_one_block_at_a_time() -> None:
    server = serve(MACHINE, [Prompt(4096), Prompt(4096, 0.1)], chunk_tokens=CHUNK, mode="load")
    landed = sorted(when_s for result in server.results for when_s, _ in result.landings)
    gaps = [b - a for a, b in itertools.pairwise(landed)]
    assert min(gaps) >= MACHINE.load.block_s - 1e-9


def test_simulated_server_two_sources_are_read_at_once() -> None:
    both = Machine(PREFILL, MACHINE.load, further=(StoreLink(MACHINE.load),))
    one_s = simulate_prompt(MACHINE, 8192, chunk_tokens=CHUNK, mode="load").ttft_s
    two_s = simulate_prompt(both, 8192, chunk_tokens=CHUNK, mode="load").ttft_s
    assert two_s < 0.55 * one_s


@pytest.mark.parametrize("times_slower", [1.5, 2.5, 8, 100])
@pytest.mark.parametrize("mode", ["load", "auto"])
def test_simulated_server_slower_source_beside_a_fast_one_never_slows_it(
    times_slower: float, mode: Mode
) -> None:
    fast = MACHINE.load
    slow = replace(fast, block_s=times_slower * fast.block_s)
    for tokens in (1024, 4096, 16384):
        alone, first, second = (
            simulate_prompt(machine, tokens, chunk_tokens=CHUNK, mode=mode).ttft_s
            for machine in (
                Machine(PREFILL, fast),
                Machine(PREFILL, fast, further=(StoreLink(slow),)),
                Machine(PREFILL, slow, further=(StoreLink(fast),)),
            )
        )
        assert max(first, second) <= 1.01 * alone


def test_simulated_server_bandwidths_of_unequal_sources_add_up() -> None:
    slow = replace(MACHINE.load, block_s=4 * MACHINE.load.block_s)
    both = Machine(PREFILL, MACHINE.load, further=(StoreLink(slow),))
    one_s = simulate_prompt(MACHINE, 32768, chunk_tokens=CHUNK, mode="load").ttft_s
    two_s = simulate_prompt(both, 32768, chunk_tokens=CHUNK, mode="load").ttft_s
    assert two_s == pytest.approx(one_s / 1.25, rel=0.02)


def test_simulated_server_adaptive_lets_short_prompts_pass() -> None:
    stored = Prompt(16384, rid="stored")
    short = [Prompt(300, 0.1 + 0.01 * i, 0, rid=str(i)) for i in range(8)]
    times: dict[Policy, list[float]] = {}
    for policy in ("fcfs", "adaptive"):
        found = serve(MACHINE, [stored, *short], chunk_tokens=CHUNK, policy=policy).results
        times[policy] = [result.ttft_s for result in found]
    fcfs, adaptive = times["fcfs"], times["adaptive"]
    assert max(adaptive[1:]) < min(fcfs[1:])
    assert adaptive[0] < 1.5 * fcfs[0]


def test_simulated_server_prompts_of_one_instant_pass_as_if_they_came_one_by_one() -> None:
    def stored_ttft_s(new_arrives_s: float) -> float:
        prompts = [Prompt(2000), Prompt(16_000, arrive_s=new_arrives_s, stored_blocks=0)]
        fast = Machine(PREFILL, LoadCost(0.001, 0.0005))
        return serve(fast, prompts, chunk_tokens=8192).results[0].ttft_s

    assert stored_ttft_s(0.0) == pytest.approx(stored_ttft_s(1e-6), rel=0.01)


def test_simulated_server_prompt_waiting_for_the_link_still_loads() -> None:
    """A prompt behind others on the link has loads to come, as they had."""
    sizes = (16384, 16384, 4096, 32768)
    for policy in ("fcfs", "adaptive"):
        prompts = [Prompt(tokens) for tokens in sizes]
        results = serve(MACHINE, prompts, chunk_tokens=CHUNK, policy=policy).results
        assert all(result.loaded_tokens >= result.prompt.prompt_tokens / 3 for result in results)


SIZES = (4096, 8192, 16384, 32768)


def ttfts(prompts: list[Prompt], policy: Policy) -> list[float]:
    return [r.ttft_s for r in serve(MACHINE, prompts, chunk_tokens=CHUNK, policy=policy).results]


ALONE_S = {tokens: ttfts([Prompt(tokens)], "adaptive")[0] for tokens in SIZES}


def stored_prompts(seed: int, count: int, busy: float) -> list[Prompt]:
    """Stored prompts of 4k to 32k tokens that share one device and one link.

    Args:
        busy: their T* over the time between two of them, at random moments; 0: all at once.
    """
    draw, at_s, found = random.Random(seed), 0.0, []
    for i in range(count):
        found.append(Prompt(draw.choice(SIZES), at_s, rid=str(i)))
        if busy:
            at_s += draw.expovariate(busy / statistics.mean(ALONE_S.values()))
    return found


@pytest.mark.parametrize(
    ("count", "busy", "at_most"),
    [(4, 0, 0.85), (8, 0, 0.79), (50, 0.8, 0.86), (50, 0.95, 0.81)],
)
def test_simulated_server_adaptive_lowers_the_mean_ttft(
    count: int, busy: float, at_most: float
) -> None:
    """benchmarks/reports/scheduling.md has the numbers."""
    ratios, longest = [], []
    for seed in range(3 if busy else 12):
        prompts = stored_prompts(seed, count, busy)
        fcfs, adaptive = ttfts(prompts, "fcfs"), ttfts(prompts, "adaptive")
        ratios.append(sum(adaptive) / sum(fcfs))
        longest.append(max(adaptive) / max(fcfs))
        for prompt, first_s, found_s in zip(prompts, fcfs, adaptive, strict=True):
            # What ageing promises, and once its own T*, which two resources may overlap worse.
            alone_s = ALONE_S[prompt.prompt_tokens]
            assert found_s <= first_s + (1 / AGEING + 1) * alone_s
    assert statistics.mean(ratios) <= at_most
    assert max(ratios) <= 1.02
    assert statistics.mean(longest) <= 1.6


def test_queue_order_late_prompts_do_not_starve_a_stored_prompt() -> None:
    # A stored prompt in a stream of new ones that alone would keep the device busy for long.
    stream = [Prompt(512, 0.05 * i, 0, rid=str(i)) for i in range(400)]
    slow = Machine(PREFILL, LoadCost(0.02, 0.1))
    results = serve(slow, [Prompt(8192, rid="stored"), *stream], chunk_tokens=CHUNK).results
    assert results[0].first_token_s < max(result.finish_s for result in results) / 2


def test_simulated_server_decoding_requests_share_the_steps_of_others() -> None:
    prompts = [Prompt(256, 0, 0, new_tokens=50), Prompt(4096, 0.01, 0)]
    server = serve(MACHINE, prompts, chunk_tokens=CHUNK)
    mixed = [step for step in server.steps if step.decodes and step.plain_tokens]
    assert len(mixed) >= 8
    assert server.results[0].finish_s > server.results[1].finish_s
    assert sum(step.decodes for step in server.steps) == 49


def test_simulated_server_hub_slows_the_servers_that_share_it() -> None:
    def load_s(servers: int) -> float:
        clock, shared_store = Clock(), SharedStore(links=2.0)
        machine = Machine(PREFILL, MACHINE.load, shared_store=shared_store)
        fleet = [
            SimulatedServer(machine, clock, chunk_tokens=CHUNK, mode="load") for _ in range(servers)
        ]
        results = [server.submit(Prompt(4096)) for server in fleet]
        clock.run()
        assert shared_store.active == 0
        return max(result.ttft_s for result in results)

    assert load_s(2) == pytest.approx(load_s(1))
    assert load_s(8) == pytest.approx(4 * load_s(1), rel=0.15)


@pytest.mark.parametrize("repeat_s", [2.5, math.inf])
def test_speed_trace_work_and_done_are_inverse(repeat_s: float) -> None:
    speed = Speed((0.0, 1.0, 2.0), (0.5, 0.0, 2.0), repeat_s)
    for begin_s in (0.0, 0.3, 1.5, 4.0):
        for work in (0.1, 0.4, 3.0, 20.0):
            assert speed.work_s(begin_s, speed.done_s(begin_s, work)) == pytest.approx(work)


def test_speed_trace_that_repeats_begins_again() -> None:
    speed = Speed((0.0, 1.0), (0.5, 1.0), repeat_s=2.0)
    assert speed.work_s(2.0, 6.0) == 2 * speed.work_s(0.0, 2.0) == 3.0
    assert speed.done_s(3.5, 1.0) == 5.0
    with pytest.raises(ValueError, match="repeats"):
        Speed((0.0, 1.0), (0.5, 1.0), repeat_s=1.0)
