"""Prefill and decode on servers of their own: a prefill server alone, with SGLang's stand-in for a
decode server, and one with a real decode server, over Mooncake's TCP transport."""

import hashlib
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live import (
    BLOCK,
    DRAFT_CHAIN,
    NEW_TOKENS,
    Answer,
    Live,
    PendingRequest,
    Start,
    accepted,
    assert_same,
    falsify,
    falsify_draft,
    until,
)
from tiny_drafts import VOCAB, build_mimo
from tiny_hybrids import Transformers

from sglang_cake.demo.sglang_server import free_port

try:
    import mooncake.engine  # noqa: F401  it takes KV from one server to the other
except ImportError as error:
    pytest.skip(f"Mooncake cannot be loaded: {error}", allow_module_level=True)

Make = Callable[[int], list[int]]
COMMON = (
    *("--dtype", "float32", "--max-total-tokens", "12000", "--enable-metrics"),
    *("--disaggregation-transfer-backend", "mooncake_tcp"),
)
NO_DECODE_SERVER = "2.2.2.2"  # SGLang's name for a decode server that takes KV and does nothing
# The share of requests, by a digest of their ids, that SGLang lets start over once.
STARTS_OVER = 1e-4
ROOMS = itertools.count(random.randrange(2**40))


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    return folder / "store-disaggregated"


@pytest.fixture(scope="module")
def ordinary(start: Start, models: dict[str, Path], store: Path) -> Iterator[Live]:
    """A server that does both, with the same store. Its answers are the references."""
    flags = ("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "load")
    with start(models["first"], flags, store=store) as live:
        yield live


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def env(standins: dict[str, str]) -> dict[str, str]:
    return standins | {"CAKE_TEST_DISAGGREGATION": "1"}


@pytest.fixture(scope="module")
def prefill(
    start: Start, models: dict[str, Path], store: Path, env: dict[str, str], port: int
) -> Iterator[Live]:
    flags = (
        *(*COMMON, "--disaggregation-mode", "prefill", "--cake-mode", "load"),
        *("--disaggregation-bootstrap-port", str(port)),
    )
    env = env | {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": str(STARTS_OVER)}
    with start(models["first"], flags, store=store, bandwidth="2MB/s", env=env) as live:
        yield live


def test_prefill_server_alone_loads_what_an_ordinary_server_stored(
    ordinary: Live, prefill: Live, prompt: Make
) -> None:
    document = prompt(10 * BLOCK + 7)
    reference = ordinary.ask(document, 1)
    files = ordinary.store.until_stored(document[: 10 * BLOCK])
    alone = {"bootstrap_host": NO_DECODE_SERVER, "bootstrap_room": next(ROOMS)}
    warm = prefill.ask(document, 1, **alone)
    assert warm.loaded == 10 * BLOCK
    assert_same(warm, reference)
    for file in files:
        falsify(file)
    lie = prefill.ask_flushed(document, 1, **alone)
    assert lie.loaded > 0
    with pytest.raises(AssertionError):
        assert_same(lie, reference)


@pytest.fixture(scope="module")
def racing_pair(
    start: Start, models: dict[str, Path], store: Path, env: dict[str, str], pair: "Pair"
) -> Iterator["Pair"]:
    """The same decode server, and a prefill server in the default mode, on a slow link."""
    port = free_port()
    flags = (
        *(*COMMON, "--disaggregation-mode", "prefill"),
        *("--disaggregation-bootstrap-port", str(port)),
    )
    with start(models["first"], flags, store=store, bandwidth="1MB/s", env=env) as live:
        yield Pair(live, pair.decode, port)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode server, and what a router does: each gets every request."""

    prefill: Live
    decode: Live
    port: int  # where the decode server finds the prefill server

    def room(self) -> dict[str, Any]:
        """The fields by which the servers find each other for one request."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": next(ROOMS),
        }

    def begin(self, ids: list[int], **extra: Any) -> tuple[PendingRequest, PendingRequest]:
        """Send a request to the decode and to the prefill server."""
        extra = self.room() | extra
        decoding = PendingRequest(self.decode, ids, **extra)
        return decoding, PendingRequest(self.prefill, ids, **extra)

    def ask(self, ids: list[int], **extra: Any) -> tuple[Answer, Answer]:
        """The answers of the decode server, which is the user's, and of the prefill server."""
        decoding, prefilling = self.begin(ids, **extra)
        return decoding.answer(), prefilling.answer()

    def stored(self) -> list[float]:
        """Blocks that the prefill server and the decode server have stored."""
        return [live.metric("stored_blocks_total") for live in (self.prefill, self.decode)]

    def flush(self) -> None:
        self.prefill.flush()
        self.decode.flush()


@pytest.fixture(scope="module")
def pair(
    start: Start,
    models: dict[str, Path],
    store: Path,
    env: dict[str, str],
    prefill: Live,
    port: int,
) -> Iterator[Pair]:
    flags = (
        *(*COMMON, "--disaggregation-mode", "decode"),
        *("--disaggregation-decode-enable-radix-cache",),
        *("--disaggregation-decode-retraction-backup", "none"),
    )
    with start(models["first"], flags, store=store, env=env) as decode:
        yield Pair(prefill, decode, port)


def test_pair_answers_as_an_ordinary_server_before_and_after_a_load(
    ordinary: Live, pair: Pair, prompt: Make
) -> None:
    document = prompt(10 * BLOCK + 7)
    reference = ordinary.ask(document, cache_salt="computed there")
    cold, first = pair.ask(document)
    assert first.loaded == 0
    assert_same(cold, reference)
    files = pair.prefill.store.until_stored(document[: 10 * BLOCK])
    pair.flush()
    warm, second = pair.ask(document)
    assert second.loaded == 10 * BLOCK
    assert_same(warm, reference)
    assert warm.cached == 10 * BLOCK
    for file in files:
        falsify(file)
    pair.flush()
    lie, third = pair.ask(document)
    assert third.loaded > 0
    with pytest.raises(AssertionError):
        assert_same(lie, reference)


def test_pair_decode_server_stores_the_answer_and_the_prefill_server_loads_it(
    ordinary: Live, pair: Pair, prompt: Make
) -> None:
    document, question = prompt(10 * BLOCK + 7), prompt(50)
    before = pair.stored()
    answer, _ = pair.ask(document, new_tokens=2 * BLOCK)
    conversation = document + answer.tokens
    files = pair.prefill.store.until_stored(conversation[: 12 * BLOCK])
    until(lambda: sum(pair.stored()) >= sum(before) + 12, "the metrics are up to date")
    assert [b - a for a, b in zip(before, pair.stored(), strict=True)] == [10, 2]
    reference = ordinary.ask(conversation + question, cache_salt="computed there")
    pair.flush()
    warm, prefilled = pair.ask(conversation + question)
    assert prefilled.loaded == 12 * BLOCK
    assert_same(warm, reference)
    for file in files[10:]:
        falsify(file)
    pair.flush()
    lie, prefilled = pair.ask(conversation + question)
    assert prefilled.loaded == 12 * BLOCK
    with pytest.raises(AssertionError):
        assert_same(lie, reference)


def test_pair_prompt_is_loaded_before_its_decode_server_is_there(
    ordinary: Live, pair: Pair, prompt: Make
) -> None:
    document = prompt(10 * BLOCK + 7)
    reference = ordinary.ask(document)
    ordinary.store.until_stored(document[: 10 * BLOCK])
    room = pair.room() | {"rid": "without a decode server"}
    prefilling = PendingRequest(pair.prefill, document, **room)
    prefilling.until("land", 10)
    assert prefilling.is_running
    assert not [e for e in pair.prefill.events(prefilling.rid) if e["event"] == "attach"]
    assert_same(pair.decode.ask(document, **room), reference)
    assert prefilling.answer().loaded == 10 * BLOCK


def test_pair_prompts_that_are_computed_and_loaded_at_once_are_sent_whole(
    ordinary: Live, racing_pair: Pair, prompt: Make
) -> None:
    documents = [prompt(30 * BLOCK + 7 * n) for n in range(1, 4)]
    references = [ordinary.ask(document) for document in documents]
    for document in documents:
        ordinary.store.until_stored(document[: 30 * BLOCK])
    loaded = computed = 0
    for together in (False, True):
        racing_pair.flush()
        asked = []
        for document in documents:
            asked.append(racing_pair.begin(document))
            if not together:
                asked[-1][1].join()
        for (decoding, prefilling), reference in zip(asked, references, strict=True):
            assert_same(decoding.answer(), reference)
            loaded += prefilling.answer().loaded
            computed += prefilling.answer().computed
    assert loaded >= 10 * BLOCK
    assert computed >= 10 * BLOCK


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pair_abort_at_each_stage_leaves_no_trace(
    ordinary: Live, pair: Pair, prompt: Make, side: str
) -> None:
    document = prompt(20 * BLOCK + 7)
    reference = ordinary.ask(document)
    ordinary.store.until_stored(document[: 20 * BLOCK])
    for stage in ("arrive", "land", "attach", "done"):
        pair.flush()
        asked = pair.begin(document, rid=f"{side} {stage}")
        asked[1].until(stage)
        sides = list(zip((pair.decode, pair.prefill), asked, strict=True))
        if side == "prefill":
            sides.reverse()
        for live, pending in sides:  # SGLang's servers tell each other only in part: a router tells
            live.post("/abort_request", rid=f"{side} {stage}")
            pending.join()
    pair.flush()
    answer, prefilled = pair.ask(document)
    assert prefilled.loaded == 20 * BLOCK
    assert_same(answer, reference)
    pair.flush()
    for live in (pair.prefill, pair.decode):
        live.check_log()


def test_prefill_server_abort_before_its_decode_server_is_there_leaves_no_trace(
    ordinary: Live, pair: Pair, prompt: Make
) -> None:
    document = prompt(10 * BLOCK + 7)
    ordinary.ask_and_store(document[: 10 * BLOCK])
    asked = PendingRequest(pair.prefill, document, rid="alone", **pair.room())
    asked.until("land")
    assert asked.is_running
    pair.prefill.post("/abort_request", rid=asked.rid)
    asked.join()
    pair.flush()
    pair.prefill.check_log()
    assert pair.ask(document)[1].loaded == 10 * BLOCK


def test_pair_prompt_that_starts_over_is_looked_up_again(
    ordinary: Live, pair: Pair, prompt: Make
) -> None:
    document = prompt(10 * BLOCK + 7)
    reference = ordinary.ask(document)
    ordinary.store.until_stored(document[: 10 * BLOCK])
    rid = next(rid for rid in (f"again-{n}" for n in itertools.count()) if starts_over(rid))
    answer, _ = pair.ask(document, rid=rid)
    assert_same(answer, reference)
    events = [event["event"] for event in pair.prefill.events(rid)]
    assert events.count("arrive") == 2
    assert "attach" in events


def starts_over(rid: str) -> bool:
    """As SGLang's `should_force_retry`."""
    digest = hashlib.sha256(rid.encode()).digest()
    return int.from_bytes(digest[:8], "big") < STARTS_OVER * 2**64


@pytest.fixture(scope="module")
def mimo(folder: Path) -> Path:
    return build_mimo(folder / "mimo-disaggregated" / "model")


@pytest.fixture(scope="module")
def drafting_pair(start: Start, folder: Path, mimo: Path, env: dict[str, str]) -> Iterator[Pair]:
    """Both servers have the model's MTP layer. The prefill server soon gives up on others."""
    port = free_port()
    store = folder / "store-drafting-pair"
    env = env | {"CAKE_TEST_SPECULATIVE": "1"}
    flags = (*COMMON, "--speculative-algorithm", "NEXTN", *DRAFT_CHAIN, "--cake-mode", "load")
    of_prefill = (
        *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port)),
    )
    of_decode = (
        *("--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"),
        *("--disaggregation-decode-retraction-backup", "none"),
    )
    with (
        start(
            mimo,
            (*flags, *of_prefill),
            store=store,
            bandwidth="1MB/s",
            env=env | {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20"},
        ) as prefill,
        start(mimo, (*flags, *of_decode), store=store, env=env) as decode,
    ):
        for live in (prefill, decode):
            assert live.store is not None
            live.store.next_tokens = 1
        yield Pair(prefill, decode, port)


def test_pair_with_a_draft_model_accepts_after_a_load_as_many_drafts_as_after_computing(
    drafting_pair: Pair, mimo: Path, prompt: Make
) -> None:
    """The prompt's blocks are of the prefill server, and the answer's of the decode server."""
    model = Transformers(mimo)
    document, question = ([token % VOCAB for token in prompt(n)] for n in (10 * BLOCK + 7, 50))
    answer, prefilled = drafting_pair.ask(document, new_tokens=3 * BLOCK)
    assert prefilled.loaded == 0
    assert answer.tokens == model.answer(document, 3 * BLOCK).tokens
    conversation = document + answer.tokens
    files = drafting_pair.prefill.store.until_stored(conversation[: 12 * BLOCK + 1])
    turn = conversation + question
    expected = model.answer(turn, 40).tokens
    drafting_pair.flush()
    computed, prefilled = drafting_pair.ask(turn, new_tokens=40, cache_salt="computed")
    assert prefilled.loaded == 0
    drafting_pair.flush()
    loaded, prefilled = drafting_pair.ask(turn, new_tokens=40)
    assert prefilled.loaded >= 12 * BLOCK
    assert computed.tokens == loaded.tokens == expected
    assert accepted(loaded) == accepted(computed)
    assert sum(accepted(loaded)[1:]) > sum(accepted(loaded)) / 2
    for file in files:
        falsify_draft(file)
    drafting_pair.flush()
    lie, prefilled = drafting_pair.ask(turn, new_tokens=40)
    assert prefilled.loaded >= 12 * BLOCK
    assert lie.tokens == expected
    assert sum(accepted(lie)) > 1.5 * sum(accepted(computed))  # steps for the same tokens


def test_prefill_server_whose_decode_server_never_comes_gives_up_and_loads_again(
    drafting_pair: Pair, prompt: Make
) -> None:
    document = [token % VOCAB for token in prompt(10 * BLOCK + 7)]
    drafting_pair.ask(document)
    drafting_pair.prefill.store.until_stored(document[: 10 * BLOCK + 1])
    drafting_pair.flush()
    waiting = PendingRequest(drafting_pair.prefill, document, rid="alone", **drafting_pair.room())
    waiting.until("land", 10)
    assert waiting.is_running
    waiting.join()
    drafting_pair.flush()
    drafting_pair.prefill.check_log()
    assert drafting_pair.ask(document)[1].loaded == 10 * BLOCK


def test_prefill_server_whose_decode_server_dies_while_it_loads_goes_on(
    drafting_pair: Pair, prompt: Make
) -> None:
    """The last test of the pair, since the decode server is killed."""
    prefill, decode = drafting_pair.prefill, drafting_pair.decode
    document = [token % VOCAB for token in prompt(20 * BLOCK + 7)]
    drafting_pair.ask(document)
    prefill.store.until_stored(document[: 20 * BLOCK + 1])
    drafting_pair.flush()
    asked = drafting_pair.begin(document, rid="orphan")
    asked[1].until("land")
    assert asked[1].is_running
    decode.killed = True
    os.killpg(decode.server.process.pid, signal.SIGKILL)
    for pending in asked:
        pending.join()
    prefill.flush()
    alone = {"bootstrap_host": NO_DECODE_SERVER, "bootstrap_room": next(ROOMS)}
    answer = prefill.ask(document, 1, **alone)
    assert answer.loaded == 20 * BLOCK
    prefill.flush()
    prefill.check_log()


def test_pair_of_two_ranks_each_answers_as_transformers_before_and_after_a_load(
    start: Start, models: dict[str, Path], folder: Path, env: dict[str, str], prompt: Make
) -> None:
    port, store = free_port(), folder / "store-pair-of-ranks"
    env = env | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    flags = (*COMMON, "--tp", "2", "--cake-mode", "load", "--max-total-tokens", "4096")
    of_prefill = (
        *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port)),
    )
    of_decode = (
        *("--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"),
        *("--disaggregation-decode-retraction-backup", "none"),
    )
    document, question = prompt(10 * BLOCK + 7), prompt(50)
    model = Transformers(models["first"])
    with (
        start(models["first"], (*flags, *of_prefill), store=store, env=env) as prefill,
        start(models["first"], (*flags, *of_decode), store=store, env=env) as decode,
    ):
        ranks = Pair(prefill, decode, port)
        answer, prefilled = ranks.ask(document, new_tokens=2 * BLOCK)
        assert prefilled.loaded == 0
        assert answer.tokens == model.answer(document, 2 * BLOCK).tokens
        turn = document + answer.tokens + question
        until(lambda: ranks.stored()[0] >= 10 and ranks.stored()[1] >= 2, "all is stored")
        ranks.flush()
        warm, prefilled = ranks.ask(turn)
        assert prefilled.loaded == 12 * BLOCK
        assert warm.tokens == model.answer(turn, NEW_TOKENS).tokens
