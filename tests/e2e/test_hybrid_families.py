"""Families of models with end states, one server each: their pools differ.

`test_hybrids.py` has every situation, with one family of each kind of end state.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from live import BLOCK, CHUNK, NEW_TOKENS, TOLERANCE, Answer, Live, Start, distance, forge
from tiny_hybrids import (
    VOCAB,
    Transformers,
    build_gpt_oss,
    build_kimi_linear,
    build_mellum,
    build_nemotron_h,
    build_qwen3_next,
)

from sglang_cake.codecs.frame import HEADER_BYTES

Make = Callable[[int], list[int]]
WINDOW_TOKENS = 64
WINDOWS = ("--page-size", "16", "--swa-full-tokens-ratio", "0.25")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
EXTRA_BUFFER = ("--mamba-radix-cache-strategy", "extra_buffer")
STATES = ("--max-mamba-cache-size", "20", "--max-running-requests", "4")
STATE_ENV = {"CAKE_TEST_RECURRENT": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
MORE_STATES_ENV = STATE_ENV | {"CAKE_TEST_KDA_MAMBA2": "1"}


@dataclass(frozen=True, slots=True)
class Family:
    """How its model is made and served."""

    build: Callable[[Path], Path]
    flags: tuple[str, ...]
    env: dict[str, str]
    ranks: int = 1


FAMILIES = {
    # Conv states with channels last; blocks have latent rows.
    "kimi-linear": Family(build_kimi_linear, (*STATES, *NO_BUFFER), MORE_STATES_ENV),
    "kimi-linear-extra-buffer": Family(
        build_kimi_linear, (*STATES, *EXTRA_BUFFER), MORE_STATES_ENV
    ),
    "nemotron-h": Family(build_nemotron_h, (*STATES, *NO_BUFFER), MORE_STATES_ENV),
    "gpt-oss": Family(
        lambda path: build_gpt_oss(path, window_tokens=WINDOW_TOKENS),
        WINDOWS,
        {"CAKE_TEST_SINKS": "1", "TORCHDYNAMO_DISABLE": "1"},
    ),
    # Each rank has the windows, or the states, of its own heads.
    "mellum-2-ranks": Family(
        lambda path: build_mellum(path, window_tokens=WINDOW_TOKENS), WINDOWS, {}, ranks=2
    ),
    "qwen3-next-2-ranks": Family(build_qwen3_next, (*STATES, *EXTRA_BUFFER), STATE_ENV, ranks=2),
}


@dataclass(slots=True)
class Served:
    """A server, and its model by transformers."""

    live: Live
    model: Transformers

    def check(self, answer: Answer, ids: list[int], new_tokens: int = NEW_TOKENS) -> None:
        expected = self.model.answer(ids, new_tokens)
        assert answer.tokens == expected.tokens
        assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE

    def store(self, ids: list[int]) -> tuple[list[Path], list[Path]]:
        """The files of a prompt's blocks, and of the end state behind them."""
        blocks = self.live.ask_and_store(ids)
        return blocks, self.live.store.until_end_stored(ids)


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, start: Start, folder: Path, standins: dict[str, str]
) -> Iterator[Served]:
    family = FAMILIES[request.param]
    if (os.cpu_count() or 1) < family.ranks:
        pytest.skip("two ranks need two cores")
    model = family.build(folder / request.param / "model")
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if family.ranks > 1 else {}
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "4096", "--sleep-on-idle"),
        *("--cake-mode", "load", "--tp", str(family.ranks), *family.flags),
    )
    store = folder / f"store-{request.param}"
    with start(model, flags, store=store, env=standins | family.env | ranks) as live:
        assert live.store is not None
        live.store.ranks = family.ranks
        yield Served(live, Transformers(model))


@pytest.fixture
def tiny(prompt: Make) -> Make:
    """Random prompts of the tiny models' vocabulary."""
    return lambda tokens: [token % VOCAB for token in prompt(tokens)]


@pytest.fixture(autouse=True)
def no_family_alarm(served: Served) -> Iterator[None]:
    yield
    served.live.flush()  # waits until nothing runs; then SGLang checks all its books
    served.live.check_log()


def test_family_stored_document_with_new_questions_is_loaded_up_to_its_end(
    served: Served, tiny: Make
) -> None:
    document = tiny(12 * BLOCK + 11)
    served.check(served.live.ask(document), document)
    served.live.store.until_stored(document)
    served.live.store.until_end_stored(document)
    for ids in (document, document + tiny(CHUNK + 7)):
        answer = served.live.ask_flushed(ids)
        served.check(answer, ids)
        assert answer.loaded == 12 * BLOCK


def test_family_next_turn_behind_an_answer_is_loaded(served: Served, tiny: Make) -> None:
    ids = tiny(6 * BLOCK + 1)
    first = served.live.ask(ids, 2 * BLOCK)
    served.check(first, ids, 2 * BLOCK)
    served.live.store.until_stored(ids + first.tokens[:-1])
    turn = ids + first.tokens + tiny(20)
    answer = served.live.ask_flushed(turn)
    served.check(answer, turn)
    assert answer.loaded >= 6 * BLOCK


def test_family_prompts_that_share_a_beginning_give_the_answers_of_transformers(
    served: Served, tiny: Make
) -> None:
    """The tree has a part of what is stored: the rest is attached to a waiting request."""
    ids = tiny(16 * BLOCK + 3)
    served.store(ids)
    served.check(served.live.ask_flushed(ids[: 5 * BLOCK], 1), ids[: 5 * BLOCK], 1)
    answer = served.live.ask(ids)
    served.check(answer, ids)
    assert answer.loaded > 0


def test_family_third_prompt_with_a_beginning_is_loaded_up_to_where_they_part(
    served: Served, tiny: Make
) -> None:
    """The first prompt has its end behind its own question. The second one finds blocks and no
    end, and stores the end where they part."""
    beginning = tiny(14 * BLOCK + 9)
    for question in (12 * BLOCK, 12 * BLOCK + 20):
        ids = beginning + tiny(question)
        served.live.flush()
        served.store(ids)
    served.live.store.until_end_stored(beginning)
    ids = beginning + tiny(CHUNK)
    answer = served.live.ask_flushed(ids)
    served.check(answer, ids)
    assert answer.loaded == 14 * BLOCK


def test_control_family_end_state_of_another_prompt_changes_the_answer(
    served: Served, tiny: Make
) -> None:
    ids, other = tiny(12 * BLOCK + 1), tiny(12 * BLOCK + 1)
    blocks, end = served.store(ids)
    _, foreign = served.store(other)
    for file, source in zip(end, foreign, strict=True):
        forge(file, source.read_bytes()[HEADER_BYTES:])
    lie = served.live.ask_flushed(ids)
    served.live.store.remove(*blocks, *end)
    assert lie.loaded == 12 * BLOCK
    expected = served.model.answer(ids, NEW_TOKENS)
    assert distance(lie.logprobs, expected.logprobs) > 20 * TOLERANCE
    served.check(served.live.ask_flushed(ids), ids)
