"""What steps and loads cost: fits that find the truth, and a file that remembers it."""

import json
import math
import random
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.core.keys import Digest
from sglang_cake.loading.cost_file import MAX_FILES, CostFile
from sglang_cake.loading.cost_model import (
    LoadCost,
    LoadFit,
    PrefillCost,
    PrefillFit,
    StepWork,
    pairs,
    total_work,
    work_of,
)

TRUTHS = [
    (PrefillCost(0.02, 7e-4, 1.2e-7), 768),
    (PrefillCost(0.005, 1.5e-4, 6e-9), 5120),
    (PrefillCost(0.3, 1e-5, 1e-9), 4096),
]


def test_attention_pairs_of_a_span_are_summed_over_its_tokens() -> None:
    assert pairs(3, 7) == 4 + 5 + 6 + 7
    assert pairs(5, 5) == 0


def test_total_work_is_the_sum_of_each_part() -> None:
    works = [work_of(3, 7), StepWork(decodes=2), work_of(10, 12)]
    assert total_work(works) == works[0] + works[1] + works[2] == StepWork(6, 22 + 23, 2, 13)
    assert total_work([]) == StepWork()


GRAPHS = (128, 256, 512)


@given(
    st.integers(0, 4000),
    st.integers(0, 4000),
    st.integers(1, 700),
    st.sampled_from([0.0, 1e-3]),
    st.sampled_from([(), GRAPHS]),
)
def test_prefill_cost_span_is_the_sum_of_its_steps(
    start: int, tokens: int, chunk: int, prefix_s: float, graph_tokens: tuple[int, ...]
) -> None:
    cost = PrefillCost(0.5, 0.01, 1e-5, prefix_s=prefix_s, graph_tokens=graph_tokens)
    stop = start + tokens
    steps = [(at, min(at + chunk, stop)) for at in range(start, stop, chunk)]
    assert cost.span_s(start, stop, chunk) == pytest.approx(sum(cost.step_s(*s) for s in steps))


@pytest.mark.parametrize(
    ("tokens", "padded"), [(128, 128), (129, 256), (65, 128), (64, 128), (63, 63), (513, 513)]
)
def test_prefill_cost_tokens_are_padded_to_the_next_graph_that_runs_them(
    tokens: int, padded: int
) -> None:
    cost = PrefillCost(0.5, 0.01, 1e-5, graph_tokens=GRAPHS)
    assert cost.padded(tokens) == padded
    assert cost.step_s(0, tokens) == pytest.approx(0.5 + 0.01 * padded + 1e-5 * pairs(0, tokens))
    beside_a_prefill = cost.beside(StepWork(10, 55.0))
    assert beside_a_prefill.step_s(0, tokens) - beside_a_prefill.fixed_s == pytest.approx(
        0.01 * tokens + 1e-5 * pairs(0, tokens)
    )


def test_prefill_fit_cost_of_the_prefix_is_separated_from_that_of_attention() -> None:
    truth = PrefillCost(0.008, 1.5e-5, 2e-11, prefix_s=4e-7, graph_tokens=(*range(256, 8193, 256),))
    flops = 2.0 * 512 * 128 * 256
    prior = PrefillCost.prior(
        hidden=7168, on_gpu=True, prefix_flops=flops, graph_tokens=truth.graph_tokens
    )
    blind = PrefillCost.prior(hidden=7168, on_gpu=True)
    errors = []
    for fit in (PrefillFit(prior), PrefillFit(blind)):
        for start, tokens in ((0, 8192), (8192, 8192), (16384, 8192), (24576, 300)) * 5:
            fit.observe(work_of(start, start + tokens), truth.step_s(start, start + tokens))
        shorter, true_s = fit.cost.step_s(30000, 30500), truth.step_s(30000, 30500)
        errors.append(abs(shorter - true_s) / true_s)
        assert fit.cost.graph_tokens == (truth.graph_tokens if fit.cost.prefix_s else ())
    assert errors[0] < 0.05 < errors[1]


@pytest.mark.parametrize(("truth", "hidden"), TRUTHS)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_prefill_fit_noisy_steps_with_outliers_find_the_true_cost(
    truth: PrefillCost, hidden: int, on_gpu: bool
) -> None:
    random_of = random.Random(1)
    fit, position = PrefillFit(PrefillCost.prior(hidden=hidden, on_gpu=on_gpu)), 0
    for _ in range(200):
        chunk = random_of.choice([512, 512, 128, 256])
        took_s = truth.step_s(position, position + chunk) * random_of.lognormvariate(0, 0.05)
        took_s *= 6 if random_of.random() < 0.04 else 1
        fit.observe(work_of(position, position + chunk), took_s)
        position = (position + chunk) % 8192
    for start, stop in ((0, 512), (0, 128), (4096, 4608), (8000, 8128)):
        assert fit.cost.step_s(start, stop) == pytest.approx(truth.step_s(start, stop), rel=0.15)
    assert fit.cost.error < 0.2


def test_prefill_fit_one_step_sets_the_scale_of_the_prior() -> None:
    # Theory B: 13B on an A100, chunks of 512 cost 80.3 ms, and 1.56 ms more each.
    fit = PrefillFit(PrefillCost.prior(hidden=5120, on_gpu=True))
    fit.observe(work_of(0, 512), 0.0803)
    assert fit.cost.step_s(31 * 512, 32 * 512) == pytest.approx(0.0803 + 31 * 0.00156, rel=0.15)


def test_prefill_fit_one_token_steps_leave_the_token_cost() -> None:
    """A server that loads all of every prompt computes only the last token of each."""
    prior = PrefillCost.prior(hidden=768, on_gpu=False)
    fit = PrefillFit(prior)
    for _ in range(50):
        fit.observe(work_of(4096, 4097), 0.02)
    assert fit.cost == prior
    assert fit.cost.guessed
    fit.observe(work_of(0, 128), 0.04)
    assert not fit.cost.guessed
    assert fit.cost.step_s(0, 128) == pytest.approx(0.04, rel=0.1)
    error = fit.cost.error
    for _ in range(200):
        fit.observe(work_of(4096, 4097), 0.02)
    assert fit.cost.error == error
    assert fit.cost.step_s(4096, 4097) == pytest.approx(0.02, rel=0.2)
    assert fit.cost.step_s(0, 128) == pytest.approx(0.04, rel=0.5)


def test_prefill_fit_slower_machine_is_followed() -> None:
    fit = PrefillFit(PrefillCost.prior(hidden=768, on_gpu=False))
    for slower in [1.0] * 100 + [2.0] * 150:
        fit.observe(work_of(0, 512), 0.4 * slower)
    assert fit.cost.step_s(0, 512) == pytest.approx(0.8, rel=0.15)


def test_prefill_fit_decoding_in_the_same_step_is_separated() -> None:
    truth = PrefillCost(0.01, 1e-4, 1e-9, decode_s=2e-3)
    fit = PrefillFit(PrefillCost.prior(hidden=4096, on_gpu=True))
    random_of = random.Random(2)
    for _ in range(150):
        start, decodes = 512 * random_of.randrange(16), random_of.randrange(32)
        work = StepWork(512, pairs(start, start + 512), decodes)
        fit.observe(work, truth.step_s(start, start + 512) + decodes * truth.decode_s)
    assert fit.cost.decode_s == pytest.approx(truth.decode_s, rel=0.1)
    assert fit.cost.step_s(0, 512) == pytest.approx(truth.step_s(0, 512), rel=0.1)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 999), st.floats()), max_size=30))
def test_prefill_fit_random_measurements_stay_finite_and_not_negative(
    steps: list[tuple[int, int, float]],
) -> None:
    fit = PrefillFit(PrefillCost.prior(hidden=64, on_gpu=True))
    for start, tokens, took_s in steps:
        fit.observe(work_of(start, start + tokens), took_s)
        cost = fit.cost
        numbers = (cost.fixed_s, cost.token_s, cost.pair_s, cost.decode_s)
        assert all(math.isfinite(n) and n >= 0 for n in numbers)
        assert 0 <= cost.error <= 1


@pytest.mark.parametrize("seen", [False, True])
def test_prefill_fit_step_that_seems_to_take_no_time_is_learned_from(seen: bool) -> None:
    """As in mixed chunks behind slow first steps: all time seemed to be that of decoding."""
    fit = PrefillFit(PrefillCost.prior(hidden=4096, on_gpu=True))
    if seen:
        fit.observe(work_of(0, 512), 0.01)
        fit.cost = PrefillCost(0.0, 0.0, 0.0, 2.6e-5, 0.3)
    else:
        fit.recall(PrefillCost(0.0, 0.0, 0.0, 2.6e-5, 0.3))
    for _ in range(10):
        fit.observe(work_of(0, 512), 0.01)
    assert fit.cost.work_s(work_of(0, 512)) == pytest.approx(0.01, rel=0.2)


MLA = (PrefillCost(0.008, 1.5e-5, 2e-11, prefix_s=4e-7), 7168)


def prompts(truth: PrefillCost, fit: PrefillFit, count: int, *, longest: int = 20000) -> None:
    """The steps of `count` prompts are observed."""
    random_of = random.Random(3)
    for _ in range(count):
        stop = random_of.randrange(200, longest)
        for at in range(0, stop, 4096):
            work = work_of(at, min(at + 4096, stop)) + StepWork(decodes=random_of.choice([0, 8]))
            fit.observe(work, truth.work_s(work))


def guess_of(hidden: int) -> PrefillCost:
    flops = 2.0 * 512 * 128 * 256 if hidden == MLA[1] else 0.0
    return PrefillCost.prior(hidden=hidden, on_gpu=True, prefix_flops=flops)


def test_prefill_fit_costs_that_a_slow_first_step_hid_are_learned_by_the_next_process(
    tmp_path: Path,
) -> None:
    """Kernels are compiled in the first step, and then the process ends."""
    truth, hidden = PrefillCost(0.012, 6e-5, 2.4e-9, 1e-3), 4096
    fit = PrefillFit(guess_of(hidden))
    fit.observe(work_of(0, 2000) + StepWork(decodes=30), 20.0)
    for start, decodes in ((2048, 60), (0, 4), (4096, 50), (0, 8), (2048, 20)):
        work = work_of(start, start + 2000) + StepWork(decodes=decodes)
        fit.observe(work, truth.work_s(work))
    assert fit.cost.token_s < 0.01 * truth.token_s
    for _ in range(2):
        assert file_in(tmp_path).write(fit.cost, [None])
        found = file_in(tmp_path).read()
        assert found is not None
        fit = PrefillFit(guess_of(hidden))
        fit.recall(found[0])
        prompts(truth, fit, 100)
        for start, stop in ((0, 500), (0, 4096), (8192, 12288)):
            assert fit.cost.step_s(start, stop) == pytest.approx(truth.step_s(start, stop), rel=0.1)


RECALLED = st.just(0.0) | st.floats(-18, 4).map(lambda power: min(10.0**power, 9999.0))


@settings(max_examples=25)
@given(st.sampled_from([*TRUTHS, MLA]), st.lists(RECALLED, min_size=6, max_size=6))
def test_prefill_fit_any_recalled_cost_is_corrected_by_steps(
    known: tuple[PrefillCost, int], recalled: list[float]
) -> None:
    truth, hidden = known
    fit = PrefillFit(guess_of(hidden))
    fit.recall(truth.with_numbers(recalled))
    prompts(truth, fit, 200)
    for start, stop in ((0, 500), (0, 4096), (8192, 12288), (16384, 17000)):
        assert fit.cost.step_s(start, stop) == pytest.approx(truth.step_s(start, stop), rel=0.25)


@pytest.mark.parametrize(("truth", "hidden"), [*TRUTHS, MLA])
def test_prefill_fit_true_recalled_cost_stays_true_from_the_first_step_on(
    truth: PrefillCost, hidden: int
) -> None:
    fit = PrefillFit(guess_of(hidden))
    fit.recall(truth)
    for count in (1, 20):
        prompts(truth, fit, count, longest=3000)
        assert fit.cost.span_s(0, 30000, 4096) == pytest.approx(
            truth.span_s(0, 30000, 4096), rel=0.02
        )


@pytest.mark.parametrize("share", [0.1, 0.01])
def test_prefill_fit_noise_of_short_steps_hides_no_recalled_cost_far_below_the_guess(
    share: float,
) -> None:
    """As of models with windows, few layers of which attend to all tokens."""
    truth = PrefillCost(0.012, 6e-5, share * 2.4e-9)
    for seed in range(10):
        random_of = random.Random(seed)
        fit = PrefillFit(guess_of(4096))
        fit.recall(truth)
        for _ in range(150):
            work = work_of(0, random_of.randrange(200, 3000))
            fit.observe(work, truth.work_s(work) * random_of.lognormvariate(0, 0.15))
        predicted_s = fit.cost.span_s(0, 100_000, 8192)
        assert predicted_s == pytest.approx(truth.span_s(0, 100_000, 8192), rel=0.3)


def test_load_fit_latency_is_separated_from_block_time() -> None:
    fit = LoadFit(LoadCost(0.0, 1.0))
    for _ in range(20):
        fit.fetched(0.5 + 0.02, first=True)
        for _ in range(12):
            fit.fetched(0.02, first=False)
    assert fit.cost.block_s == pytest.approx(0.02, rel=0.05)
    assert fit.cost.latency_s == pytest.approx(0.5, rel=0.1)
    assert fit.cost.error < 0.05


def test_load_fit_reads_landing_together_give_one_rate() -> None:
    fit = LoadFit(LoadCost(0.0, 1.0))
    for i in range(64):
        fit.fetched(0.04 if i % 4 == 0 else 0.0, first=False)
    assert fit.cost.block_s == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("first", [False, True])
def test_load_fit_cost_recalled_as_zero_is_learned_again(first: bool) -> None:
    fit = LoadFit(LoadCost(0.0, 1.0))
    fit.recall(LoadCost(0.0, 0.0, error=0.0))
    for _ in range(120):
        fit.fetched(0.5, first=first)
    assert fit.cost.load_s(1) == pytest.approx(0.5, rel=0.05)


def test_load_fit_without_progress_of_reads_makes_no_other_cost() -> None:
    fit = LoadFit(LoadCost(0.0, 1.0))
    before = fit.cost
    fit.received(0.0)
    assert fit.cost is before


def test_load_cost_is_latency_plus_blocks() -> None:
    cost = LoadCost(0.5, 0.1, copy_s=0.01)
    assert cost.load_s(0) == 0
    assert cost.load_s(3) == pytest.approx(0.5 + 0.3 + 0.01)
    assert cost.load_s(3, any_landed=True) == pytest.approx(0.3 + 0.01)
    assert cost.load_s(3, any_landed=True, since_s=0.05) == pytest.approx(0.26)
    # A second late, it is taken to be a second more, and so is every block after it.
    assert cost.load_s(3, any_landed=True, since_s=1.1) == pytest.approx(3.0 + 0.01)


@given(st.integers(1, 50), st.floats(0, 10), st.booleans(), st.integers(1, 8))
def test_load_cost_silent_link_grows_with_time_and_blocks(
    blocks: int, since_s: float, any_landed: bool, depth: int
) -> None:
    cost = LoadCost(0.5, 0.1, depth=depth)
    due_s = 0.1 if any_landed else 0.6
    late = cost.load_s(blocks, since_s=due_s + since_s, any_landed=any_landed)
    assert late <= cost.load_s(blocks, since_s=due_s + since_s + 1, any_landed=any_landed)
    assert cost.load_s(blocks + 1, since_s=since_s, any_landed=any_landed) > cost.load_s(
        blocks, since_s=since_s, any_landed=any_landed
    )


# ---- the file ----

PREFILL = PrefillCost(0.01, 1e-4, 1e-9, 2e-3, 0.1)
LOADS = [LoadCost(0.02, 0.003, 1e-5, 0.2, depth=4), LoadCost(0.2, 0.03, 1e-5, 0.1, depth=4), None]


def file_in(folder: Path, store: str = "file:///x", byte: int = 1) -> CostFile:
    return CostFile(folder, model=Digest(bytes([byte]) * 32), store=store, device="cpu")


def test_cost_file_costs_are_read_back_for_their_store_and_namespace_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "costs"
    assert file_in(folder).read() is None
    assert file_in(folder).write(PREFILL, LOADS)
    found = file_in(folder).read()
    assert found is not None
    assert found == (PREFILL, [load and replace(load, depth=1) for load in LOADS])
    assert file_in(folder, store="file:///y").read() is None
    assert file_in(folder, byte=2).read() is None
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"version": 2}',
        b'{"version": 1}',
        b'{"version": 3}',
        b'{"loads": [{}]}',
        b"\xff\xfe",
        b"0" * 9999,
    ],
)
def test_cost_file_damaged_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    assert file_in(tmp_path).write(PREFILL, LOADS)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert file_in(tmp_path).read() is None


@pytest.mark.parametrize("number", [-1.0, "1", True, None, 1e9, math.nan, math.inf])
@pytest.mark.parametrize("part", ["prefill", "loads"])
def test_cost_file_invalid_numbers_are_ignored(tmp_path: Path, part: str, number: object) -> None:
    assert file_in(tmp_path).write(PREFILL, LOADS)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    name = "token_s" if part == "prefill" else "block_s"
    (content[part] if part == "prefill" else content[part][1])[name] = number
    path.write_text(json.dumps(content))
    assert file_in(tmp_path).read() is None


def test_cost_file_number_of_files_is_bounded(tmp_path: Path) -> None:
    for byte in range(MAX_FILES + 8):
        assert file_in(tmp_path, byte=byte).write(PREFILL, LOADS)
    assert len(list(tmp_path.iterdir())) == MAX_FILES


def test_cost_file_unwritable_folder_returns_false(tmp_path: Path) -> None:
    (tmp_path / "costs").write_text("a file")
    assert not file_in(tmp_path / "costs").write(PREFILL, LOADS)
