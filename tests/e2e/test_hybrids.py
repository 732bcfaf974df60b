"""Models with sliding windows or recurrent states give the answers of transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import BLOCK, NEW_TOKENS, TOLERANCE, Answer, Live, Start, distance, falsify
from tiny_hybrids import VOCAB, Expected, Transformers, build_mellum, build_qwen3_next

Make = Callable[[int], list[int]]
WINDOW_TOKENS = 64
POOL_TOKENS = 4096
WINDOW_POOL_TOKENS = POOL_TOKENS // 4


@pytest.fixture(scope="module")
def mellum(folder: Path) -> Path:
    return build_mellum(folder / "mellum" / "model", window_tokens=WINDOW_TOKENS)


@pytest.fixture(scope="module")
def qwen3_next(folder: Path) -> Path:
    return build_qwen3_next(folder / "qwen3-next" / "model")


@pytest.fixture
def tiny(prompt: Make) -> Make:
    """Random prompts of the tiny models' vocabulary."""
    return lambda tokens: [token % VOCAB for token in prompt(tokens)]


def assert_expected(answer: Answer, expected: Expected) -> None:
    assert answer.tokens == expected.tokens
    assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE


def _flags(*more: str) -> tuple[str, ...]:
    return (
        *("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS), "--sleep-on-idle"),
        *("--enable-metrics", "--enable-cache-report", *more),
    )


def test_window_pool_without_cake_gives_the_answers_of_transformers_after_it_has_wrapped(
    start: Start, mellum: Path, tiny: Make
) -> None:
    model = Transformers(mellum)
    with start(mellum, _flags("--swa-full-tokens-ratio", "0.25")) as live:
        first = tiny(700)
        for ids in (first, tiny(900), first, tiny(1500), first + tiny(90), tiny(30)):
            assert_expected(live.ask(ids), model.answer(ids, NEW_TOKENS))


STATES = {
    "CAKE_TEST_GATED_DELTA": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # as exact as transformers
}


@pytest.mark.parametrize(
    ("flags", "cached"),  # the last state at or before token 700
    [
        (("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"), 700),
        (("--mamba-radix-cache-strategy", "extra_buffer", "--page-size", "16"), 10 * 64),
    ],
)
def test_states_without_cake_give_the_answers_of_transformers(
    start: Start,
    qwen3_next: Path,
    standins: dict[str, str],
    tiny: Make,
    flags: tuple[str, ...],
    cached: int,
) -> None:
    model = Transformers(qwen3_next)
    first = tiny(700)
    prompts = [first, first + tiny(90), tiny(1500), tiny(30)]
    with start(qwen3_next, _flags(*flags), env=standins | STATES) as live:
        answers = [live.ask(ids, 24) for ids in prompts]
    for ids, answer in zip(prompts, answers, strict=True):
        assert_expected(answer, model.answer(ids, 24))
    assert [answer.cached for answer in answers] == [0, cached, 0, 0]


@pytest.fixture(scope="module")
def one_pool(start: Start, mellum: Path, folder: Path) -> Iterator[Live]:
    """Sliding windows in a pool that keeps all tokens."""
    flags = _flags("--disable-hybrid-swa-memory", "--cake-mode", "load")
    with start(mellum, flags, store=folder / "store-one-pool") as live:
        yield live


def test_windows_in_one_pool_stored_prompt_gives_the_answer_of_transformers(
    one_pool: Live, mellum: Path, tiny: Make
) -> None:
    model = Transformers(mellum)
    ids = tiny(20 * BLOCK + 7)
    files = one_pool.ask_and_store(ids)
    expected = model.answer(ids, NEW_TOKENS)
    answer = one_pool.ask_flushed(ids)
    assert_expected(answer, expected)
    assert answer.loaded == 20 * BLOCK
    for file in files:  # the control
        falsify(file)
    lie = one_pool.ask_flushed(ids)
    one_pool.store.remove(*files)
    assert distance(lie.logprobs, expected.logprobs) > 20 * TOLERANCE
