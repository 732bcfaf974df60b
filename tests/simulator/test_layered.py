"""A last step that begins while the last blocks come, layer by layer, on the virtual clock."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ttft_lower_bound import costs, loads

from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.loading.planner import Mode
from sglang_cake.simulator.machine import Knowledge, Machine, Speed, StoreLink, layered_end_s
from sglang_cake.simulator.simulated_server import POLL_S, Prompt, serve, simulate_prompt
from sglang_cake.simulator.ttft_lower_bound import ttft_lower_bound

# Loading everything is the quickest by far: a prompt waits for all of its loads.
SLOW = PrefillCost(fixed_s=0.02, token_s=0.05, pair_s=0.0)
BLOCK = 128

shares = st.floats(0.05, 1)


# ---- the recurrence ----


@settings(max_examples=300)
@given(
    begin_s=st.floats(0, 10),
    work_s=st.floats(1e-4, 1),
    layers=st.integers(1, 64),
    first_s=st.floats(0, 10),
    takes_s=st.floats(1e-4, 2),
)
def test_layered_step_ends_when_its_slowest_layer_allows(
    begin_s: float, work_s: float, layers: int, first_s: float, takes_s: float
) -> None:
    """Unrolled: the last layer that waited, and all from that one on; or none waited."""

    def there_s(share: float) -> float:
        return first_s + share * takes_s

    from_layer = [
        there_s((layer + 1) / layers) + work_s * (layers - layer) / layers
        for layer in range(layers)
    ]
    found_s = layered_end_s(begin_s, work_s, layers, Speed(), there_s)
    assert found_s == pytest.approx(max(begin_s + work_s, *from_layer))


@settings(max_examples=200)
@given(
    begin_s=st.floats(0, 2),
    work_s=st.floats(1e-4, 1),
    layers=st.integers(1, 64),
    came_s=st.floats(0, 4),
    values=st.lists(shares, min_size=1, max_size=6),
)
def test_layered_step_ends_after_its_bytes_and_before_a_waiting_step(
    begin_s: float, work_s: float, layers: int, came_s: float, values: list[float]
) -> None:
    device = Speed(tuple(0.3 * i for i in range(len(values))), tuple(values))
    found_s = layered_end_s(begin_s, work_s, layers, device, lambda share: share * came_s)
    assert found_s > came_s
    assert found_s >= device.done_s(begin_s, work_s) * (1 - 1e-12)
    assert found_s <= device.done_s(max(begin_s, came_s), work_s) * (1 + 1e-12)


# ---- a server ----


@pytest.mark.parametrize("suffix", [1, 30], ids=["step_shorter", "step_longer"])
@pytest.mark.parametrize("layers", [2, 40])
def test_layered_step_of_a_lone_prompt_gains_the_shorter_of_step_and_block(
    suffix: int, layers: int
) -> None:
    block_s, blocks = 0.1, 20
    machine = Machine(SLOW, LoadCost(0.05, block_s))
    tokens = blocks * BLOCK + suffix
    step_s = SLOW.step_s(blocks * BLOCK, tokens)
    plain = simulate_prompt(machine, tokens, chunk_tokens=512)
    early = simulate_prompt(replace(machine, layers=layers), tokens, chunk_tokens=512)
    assert plain.ttft_s == pytest.approx(0.05 + blocks * block_s + step_s)
    gain_s = min(step_s, block_s) * (1 - 1 / layers)
    # It looks twice in a millisecond: so late may it see that it is time.
    assert plain.ttft_s - early.ttft_s == pytest.approx(gain_s, abs=POLL_S)
    assert (early.loaded_tokens, early.computed_tokens) == (blocks * BLOCK, suffix)
    assert (early.overlapped_tokens, plain.overlapped_tokens) == (BLOCK, 0)
    assert early.wasted_blocks == 0
    (step,) = early.steps
    landed_s = [when_s for when_s, _ in early.landings]
    assert landed_s[-2] <= step.begin_s < landed_s[-1] < step.end_s == early.first_token_s
    assert early.kv_s == landed_s[-1]
    assert early.waited_s == pytest.approx(step.begin_s, abs=2 * POLL_S)


def test_layered_step_begins_with_one_coming_block_per_link() -> None:
    load = LoadCost(0.05, 0.1)
    machine = Machine(SLOW, load, further=(StoreLink(load),), layers=40)
    result = simulate_prompt(machine, 20 * BLOCK + 30, chunk_tokens=512)
    assert result.overlapped_tokens == 2 * BLOCK
    assert (result.loaded_tokens, result.computed_tokens) == (20 * BLOCK, 30)
    # The step is longer than a block: it begins with both and waits for their first layers.
    step_s = SLOW.step_s(20 * BLOCK, result.prompt.prompt_tokens)
    assert result.ttft_s == pytest.approx(0.05 + 9 * 0.1 + 0.1 / 40 + step_s, abs=POLL_S)


def test_layered_step_with_two_links_ends_after_the_slower_block() -> None:
    machine = Machine(
        SLOW, LoadCost(0.05, 0.1), further=(StoreLink(LoadCost(0.05, 0.19)),), layers=40
    )
    result = simulate_prompt(machine, 20 * BLOCK + 1, chunk_tokens=512)
    landed_s = max(when_s for when_s, _ in result.landings)
    assert result.overlapped_tokens == 2 * BLOCK
    assert result.first_token_s == pytest.approx(landed_s + SLOW.step_s(20 * BLOCK, 2561) / 40)


def test_layered_step_that_waited_is_not_measured() -> None:
    machine = Machine(SLOW, LoadCost(0.05, 0.1), layers=40)
    for layers, measured in ((1, True), (40, False)):
        known = Knowledge.of(machine)
        machine = replace(machine, layers=layers)
        simulate_prompt(machine, 5 * BLOCK + 40, chunk_tokens=512, knowledge=known)
        assert known.prefill.measured == measured


def test_layered_step_beside_other_requests_is_not_begun_early() -> None:
    machine = Machine(SLOW, LoadCost(0.05, 0.1), layers=40)
    stored = Prompt(5 * BLOCK + 30)
    (alone,) = serve(machine, [stored], chunk_tokens=512).results
    decodes = Prompt(1, stored_blocks=0, new_tokens=100)
    (beside, _) = serve(machine, [stored, decodes], chunk_tokens=512).results
    waits = Prompt(20 * BLOCK + 30)
    (first, second) = serve(machine, [stored, waits], chunk_tokens=512).results
    busy = replace(machine, others=lambda step: 10)
    (among,) = serve(busy, [stored], chunk_tokens=512).results
    overlapped = [result.overlapped_tokens for result in (alone, beside, first, second, among)]
    assert overlapped == [BLOCK, 0, 0, BLOCK, 0]


def test_layered_step_prompt_arriving_meanwhile_waits_for_its_end() -> None:
    machine = Machine(SLOW, LoadCost(0.05, 0.1), layers=40)
    (step,) = simulate_prompt(machine, 5 * BLOCK + 30, chunk_tokens=512).steps
    late = Prompt(40, arrive_s=(step.begin_s + step.end_s) / 2, stored_blocks=0)
    (early, other) = serve(machine, [Prompt(5 * BLOCK + 30), late], chunk_tokens=512).results
    assert early.steps == [step]
    assert other.steps[0].begin_s == step.end_s


# ---- one layer: as it was ----

# First token, computed and loaded tokens, seconds waited, landings, steps; before layers counted.
PLAIN = Machine(PrefillCost(0.01, 1e-4, 1e-9, 1e-4), LoadCost(0.02, 0.015))
BEFORE = {
    "result": (PLAIN, [Prompt(6000, stored_blocks=40)]),
    "waits": (Machine(SLOW, LoadCost(0.05, 0.1)), [Prompt(5 * BLOCK + 30)]),
    "two": (PLAIN, [Prompt(4000), Prompt(3000, 0.1, new_tokens=3)]),
    "noise": (
        replace(PLAIN, link=Speed((0.0, 0.2), (1.0, 0.4)), others=lambda step: 100),
        [Prompt(8000)],
    ),
}
NUMBERS = {
    "result": [(0.43289324, 3440, 2560, 0.01072192, 20, 7)],
    "waits": [(2.07, 30, 640, 0.55, 5, 1)],
    "two": [(0.26022568, 2080, 1920, 0.0, 15, 11), (0.447784076, 1464, 1536, 0.0, 12, 11)],
    "noise": [(0.7517272, 4800, 3200, 0.0, 25, 13)],
}


@pytest.mark.parametrize("name", BEFORE)
def test_simulator_with_one_layer_gives_the_recorded_times(name: str) -> None:
    machine, prompts = BEFORE[name]
    server = serve(machine, prompts, chunk_tokens=512)
    found = [
        (
            result.first_token_s,
            result.computed_tokens,
            result.loaded_tokens,
            result.waited_s,
            len(result.landings),
            len(server.steps),
        )
        for result in server.results
    ]
    assert found == [pytest.approx(numbers, rel=1e-9) for numbers in NUMBERS[name]]


@settings(max_examples=60)
@given(
    cost=costs,
    load=loads,
    tokens=st.integers(1, 6000),
    mode=st.sampled_from(["both", "compute", "load"]),
)
def test_simulator_layers_do_not_change_modes_both_compute_and_load(
    cost: PrefillCost, load: LoadCost, tokens: int, mode: Mode
) -> None:
    found = [
        serve(Machine(cost, load, layers=layers), [Prompt(tokens)], chunk_tokens=512, mode=mode)
        for layers in (1, 32)
    ]
    assert found[0].results == found[1].results
    assert found[0].steps == found[1].steps


# ---- many layers ----


# The same examples every time: of 20,000 random ones none was later by more.
@settings(max_examples=150, derandomize=True)
@given(
    cost=costs,
    load=loads,
    tokens=st.integers(129, 12000),
    share=st.floats(0, 1),
    chunk=st.sampled_from([256, 512, 2048]),
    layers=st.sampled_from([2, 8, 32, 80]),
)
def test_layered_step_random_lone_prompts_are_at_most_slightly_later(
    cost: PrefillCost, load: LoadCost, tokens: int, share: float, chunk: int, layers: int
) -> None:
    """But for a layer of a block, which the plan does not count, where the step is longer than a
    block; and for what it does not see beforehand: the size of the steps towards the meet."""
    stored = int(share * (tokens // BLOCK))
    plain, early = (
        simulate_prompt(machine, tokens, chunk_tokens=chunk, stored_blocks=stored)
        for machine in (Machine(cost, load), Machine(cost, load, layers=layers))
    )
    assert early.ttft_s <= 1.01 * plain.ttft_s + load.block_s / layers
    assert early.computed_tokens + early.loaded_tokens == tokens


# Theory C.2: LongAlpaca-13B on an A100, 16k tokens stored, gains in % by Gbps.
STEP = PrefillCost(fixed_s=0.0159, token_s=0.0636 / 512, pair_s=0.00156 / 512**2)
SUFFIXES = {512: 0.130, 64: 0.030}  # tokens that no store has: what the step over them takes
THEORY = {512: {7: 0.9, 32: 3.6, 100: 9.4}, 64: {7: 0.2, 32: 0.9, 100: 2.4}}
LAYERS = 40


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("gbps", [7, 32, 100])
def test_layered_step_mean_gain_equals_the_theory_for_one_block(suffix: int, gbps: int) -> None:
    """Theory's gain is S (1 - 1/L) c / (c + l), with as many blocks layer by layer as come in that
    time. With one that is min(S, block) instead of S. Whole blocks and steps gain now more, now
    less: on average over lengths, just that."""
    token_bytes, stored = 800 * 1024, 16384
    load_token_s = token_bytes / (gbps * 1e9 / 8) + 0.117 / 16384
    one = Machine(STEP, LoadCost(0.038, BLOCK * load_token_s))
    many, tokens = replace(one, layers=LAYERS), stored + suffix
    step_s = STEP.step_s(stored, tokens)
    assert step_s == pytest.approx(SUFFIXES[suffix], rel=0.01)

    before = ttft_lower_bound(one, tokens, chunk_tokens=512, stored_blocks=stored // BLOCK)
    compute_token_s = STEP.fixed_s / 512 + STEP.token_s + STEP.pair_s * before.meet_token

    def gain(hidden_s: float) -> float:  # in %, of a last step that hides that much of the loads
        saved_s = hidden_s * compute_token_s / (compute_token_s + load_token_s)
        return 100 * saved_s * (1 - 1 / LAYERS) / before.ttft_s

    ideal, allowed = gain(step_s), gain(min(step_s, BLOCK * load_token_s))
    assert ideal == pytest.approx(THEORY[suffix][gbps], abs=0.05, rel=0.03)

    gains = []
    for blocks in range(96, 160):
        results = (
            simulate_prompt(
                machine, blocks * BLOCK + suffix, chunk_tokens=512, stored_blocks=blocks
            )
            for machine in (one, many)
        )
        plain_s, early_s = (result.ttft_s for result in results)
        gains.append(100 * (1 - early_s / plain_s))
    print(
        f"{gbps} Gbps: ideal {ideal:.2f} %, one block {allowed:.2f} %, ours", statistics.mean(gains)
    )
    assert statistics.mean(gains) == pytest.approx(allowed, rel=0.05)
