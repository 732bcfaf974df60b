"""Servers of models with end states: what is done to each of them, and what its answers must be.

Every answer is compared with that of transformers, computed without SGLang and without a cache.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import (
    BLOCK,
    CHUNK,
    NEW_TOKENS,
    TOLERANCE,
    VOCAB,
    Answer,
    Live,
    PendingRequest,
    abort_at_every_stage,
    description_of,
    distance,
    forge,
    layout_from,
)
from tiny_hybrids import Expected, Transformers

from sglang_cake.codecs.frame import HEADER_BYTES

Make = Callable[[int], list[int]]
WINDOW_TOKENS = 64
PAGE_TOKENS = 16
POOL_TOKENS = 4096
# A prompt that one server stores and the next one loads.
KEPT = [(i * i * 31 + i * 17) % VOCAB for i in range(20 * BLOCK + 7)]
WINDOWS = ("--page-size", str(PAGE_TOKENS), "--swa-full-tokens-ratio", "0.25")
STATES = ("--max-mamba-cache-size", "20", "--max-running-requests", "4")  # the tree evicts some
EXTRA_BUFFER = ("--mamba-radix-cache-strategy", "extra_buffer")  # the default on a GPU
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
STATES_ENV = {"CAKE_TEST_RECURRENT": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}


def flags_of(mode: str | None, *more: str) -> tuple[str, ...]:
    """Args: mode: `both`: speed decides whether a block is loaded or computed; None: no cake."""
    return (
        *("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS)),
        *("--enable-metrics", "--enable-cache-report", *(("--cake-mode", mode) if mode else ())),
        *more,
    )


@dataclass(slots=True)
class Hybrid:
    """A running server, and its model by transformers.

    Attributes:
        is_second: another server has stored `KEPT` before.
    """

    live: Live
    model: Transformers
    is_second: bool = False
    expectations: dict[str, Expected] = field(default_factory=dict)

    def expected(self, ids: list[int], new_tokens: int = NEW_TOKENS) -> Expected:
        name = json.dumps([ids, new_tokens])
        if name not in self.expectations:
            self.expectations[name] = self.model.answer(ids, new_tokens)
        return self.expectations[name]

    def check(self, answer: Answer, ids: list[int], new_tokens: int = NEW_TOKENS) -> None:
        expected = self.expected(ids, new_tokens)
        assert answer.tokens == expected.tokens
        assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE

    def ask_and_store(self, ids: list[int]) -> tuple[list[Path], list[Path]]:
        """Ask for a prompt, and wait until it is stored. Returns the files of its blocks, and of
        the end state behind them."""
        files = self.live.ask_and_store(ids)
        return files, self.live.store.until_end_stored(ids)

    def ask_until(self, ids: list[int], is_wanted: Callable[[Answer], bool]) -> Answer:
        """Ask with an empty tree, until a server that races has computed and loaded as wanted: on
        a busy machine it may load nothing, or all blocks before the first chunk."""
        for _ in range(20 if self.live.races else 1):
            answer = self.live.ask_flushed(ids)
            if is_wanted(answer):
                return answer
        raise AssertionError(f"never as wanted, last {answer.meta['cake']}")

    def assert_changed(self, ids: list[int], stored: list[Path]) -> None:
        """The answer with forged files is wrong; without them it is right again."""
        lie = self.ask_until(ids, lambda answer: answer.loaded > 0)
        self.live.store.remove(*stored)
        assert lie.loaded == (len(ids) - 1) // BLOCK * BLOCK or self.live.races
        assert distance(lie.logprobs, self.expected(ids).logprobs) > 20 * TOLERANCE
        with pytest.raises(AssertionError):
            self.check(lie, ids)
        self.check(self.live.ask_flushed(ids), ids)


@pytest.fixture(autouse=True)
def no_hybrid_alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    """For the modules that import it."""
    yield
    if "hybrid" in request.fixturenames:
        live = request.getfixturevalue("hybrid").live
        live.flush()  # waits until nothing runs; then SGLang checks all its counts of memory
        live.check_log()


class Meeting:
    """Requests that are computed and loaded at once, or find a part in the tree.

    The module of a subclass has the fixture `hybrid`.
    """

    def test_one_prompt_from_both_ends_gives_the_answer_of_transformers(
        self, hybrid: Hybrid, prompt: Make
    ) -> None:
        if not hybrid.live.races:
            pytest.skip("mode load computes nothing that is stored")
        ids = prompt(40 * BLOCK + 5)
        hybrid.ask_and_store(ids)
        store = hybrid.live.store

        def met(answer: Answer) -> bool:
            hybrid.check(answer, ids)
            if answer.computed > BLOCK and answer.loaded > BLOCK:
                return True
            # On a busy machine, all blocks may be there before the first step, each time.
            store.remove(*store.files(ids[: 3 * BLOCK]))
            return False

        answer = hybrid.ask_until(ids, met)
        events = [event["event"] for event in hybrid.live.events(answer.meta["id"])]
        assert events.index("claim") < events.index("attach")  # while the request runs

    def test_stored_document_that_is_partly_in_the_tree_loads_the_rest(
        self, hybrid: Hybrid, prompt: Make
    ) -> None:
        """It is attached to a request that waits."""
        ids = prompt(16 * BLOCK + 3)
        hybrid.ask_and_store(ids)
        hybrid.check(hybrid.live.ask_flushed(ids[: 5 * BLOCK], 1), ids[: 5 * BLOCK], 1)
        answer = hybrid.live.ask(ids)
        hybrid.check(answer, ids)
        cake = answer.meta["cake"]
        assert cake["matched_tokens"] + answer.loaded + answer.computed == len(ids)
        assert answer.loaded > 0 or hybrid.live.races

    def test_generated_tokens_in_the_next_turn_give_the_answer_of_transformers(
        self, hybrid: Hybrid, prompt: Make
    ) -> None:
        ids = prompt(7 * BLOCK - 20)
        first = hybrid.live.ask(ids, 40)  # it ends some tokens behind a block
        hybrid.check(first, ids, 40)
        turn = ids + first.tokens + prompt(20)
        answered = ids + first.tokens[:-1]
        parts = parts_of(hybrid.live.store.until_stored(ids))
        end = hybrid.live.store.end_files(ids)
        loadable = 0
        # States end where SGLang keeps them, and an end of several blocks is not worth one block.
        if all("window_tokens" in part for part in parts) and len(end) == 1:
            hybrid.live.store.until_stored(answered)
            hybrid.live.store.until_end_stored(answered)
            loadable = len(answered) // BLOCK * BLOCK
        answer = hybrid.live.ask_flushed(turn)
        hybrid.check(answer, turn)
        assert answer.loaded > 0 or hybrid.live.races
        assert answer.loaded >= loadable or hybrid.live.races

    def test_control_end_state_of_another_prompt_changes_the_answer(
        self, hybrid: Hybrid, prompt: Make
    ) -> None:
        ids = prompt(12 * BLOCK + 1)
        other = prompt(12 * BLOCK + 1)
        files, end = hybrid.ask_and_store(ids)
        _, foreign = hybrid.ask_and_store(other)
        for file, source in zip(end, foreign, strict=True):
            forge(file, source.read_bytes()[HEADER_BYTES:])
        hybrid.assert_changed(ids, files + end)


class Crowding:
    """Requests that end early, or want more than there is.

    The module of a subclass has the fixture `hybrid`.
    """

    def test_prompts_that_outgrow_the_pools_together_give_the_answers_of_transformers(
        self, hybrid: Hybrid, prompt: Make
    ) -> None:
        prompts = [prompt(18 * BLOCK + i) for i in range(1, 5)]
        for ids in prompts:
            hybrid.ask_and_store(ids)
        hybrid.live.flush()
        asked = [
            PendingRequest(hybrid.live, ids, new_tokens=12, rid=f"full-{i}")
            for i, ids in enumerate(prompts)
        ]
        for asking, ids in zip(asked, prompts, strict=True):
            hybrid.check(asking.answer(), ids, 12)

    def test_abort_at_every_stage_of_a_load_leaks_nothing(self, hybrid: Hybrid) -> None:
        live = hybrid.live
        live.ask(KEPT, 1)
        live.store.until_end_stored(KEPT)
        abort_at_every_stage(live, KEPT)
        hybrid.check(live.ask_flushed(KEPT), KEPT)


class Loading:
    """What is stored is loaded up to its end. The module of a subclass has the fixture `hybrid`."""

    def test_prompt_stored_before_a_restart_is_loaded_up_to_its_end(self, hybrid: Hybrid) -> None:
        answer = hybrid.live.ask(KEPT)
        hybrid.check(answer, KEPT)
        hybrid.live.store.until_end_stored(KEPT)
        if hybrid.is_second:  # SGLang's own first requests may have left some tokens in the tree
            assert answer.loaded + answer.meta["cake"]["matched_tokens"] == 20 * BLOCK
            assert answer.loaded > 19 * BLOCK

    def test_stored_document_with_a_new_question_is_loaded_up_to_its_end(
        self, hybrid: Hybrid, prompt: Make
    ) -> None:
        document = prompt(10 * BLOCK + 11)
        hybrid.ask_and_store(document)
        for tail in (0, 1, CHUNK + 7):
            ids = document + prompt(tail)
            answer = hybrid.live.ask_flushed(ids)
            hybrid.check(answer, ids)
            assert answer.loaded == 10 * BLOCK or hybrid.live.races

    def test_third_prompt_with_a_beginning_is_loaded_up_to_where_they_part(
        self, hybrid: Hybrid, prompt: Make
    ) -> None:
        """The first prompt has its end behind its own question. The second one finds blocks and no
        end, and stores the end where they part."""
        beginning = prompt(14 * BLOCK + 9)
        for question in (12 * BLOCK, 12 * BLOCK + 20):
            hybrid.live.flush()
            hybrid.ask_and_store(beginning + prompt(question))
        hybrid.live.store.until_end_stored(beginning)
        ids = beginning + prompt(CHUNK)
        answer = hybrid.live.ask_flushed(ids)
        hybrid.check(answer, ids)
        assert answer.loaded == 14 * BLOCK or hybrid.live.races

    def test_control_window_shifted_by_one_page_changes_the_answer(
        self, hybrid: Hybrid, prompt: Make
    ) -> None:
        ids = prompt(12 * BLOCK + 1)
        files, end = hybrid.ask_and_store(ids)
        first, *_ = parts_of(end)
        if "window_tokens" not in first:
            pytest.skip("the model has no windows")
        for _, blocks in itertools.groupby(end, key=lambda file: file.parents[2]):  # of a rank
            shift_window(list(blocks), first)
        hybrid.assert_changed(ids, files + end)


def parts_of(files: list[Path]) -> list[dict[str, Any]]:
    """The parts of end states in the namespace of these blocks."""
    parts: list[dict[str, Any]] = json.loads(description_of(files[0])["end_states"])
    return parts


def shift_window(end: list[Path], described: dict[str, Any]) -> None:
    """Forge the end blocks of an end: the rows of its window are one page further back.

    Args: described: the window's part of the namespace.
    """
    payloads = np.stack([np.frombuffer(f.read_bytes()[HEADER_BYTES:], np.uint8) for f in end])
    offset = 0
    for plane in layout_from(described["layout"]).planes:  # each has rows, cut into blocks
        size = plane.rows * plane.row_bytes
        rows = payloads[:, offset : offset + size].reshape(-1, plane.row_bytes)
        window = rows[: described["window_tokens"]]
        window[:] = np.roll(window, PAGE_TOKENS, axis=0)
        payloads[:, offset : offset + size] = rows.reshape(len(end), size)
        offset += size
    for file, payload in zip(end, payloads, strict=True):
        forge(file, payload.tobytes())
