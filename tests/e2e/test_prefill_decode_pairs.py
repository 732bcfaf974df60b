"""Further pairs of a prefill and a decode server: of two ranks each, and with a draft model. A file
of their own, so that fewer servers run at a time."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import BLOCK, DRAFT_CHAIN, NEW_TOKENS, PendingRequest, Start, accepted, falsify_draft
from polling import until
from server_pair import COMMON, NO_DECODE_SERVER, ROOMS, Pair
from tiny_drafts import VOCAB, build_mimo
from tiny_hybrids import Transformers

from sglang_cake.demo.sglang_server import free_port

try:
    import mooncake.engine  # noqa: F401  it takes KV from one server to the other
except ImportError as error:
    pytest.skip(f"Mooncake cannot be loaded: {error}", allow_module_level=True)

Make = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def env(standins: dict[str, str]) -> dict[str, str]:
    return standins | {"CAKE_TEST_DISAGGREGATION": "1"}


@pytest.mark.breadth  # test_disaggregation has one rank, and other files have ranks without pairs
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
    waiting.until("fetch", 10)
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
    asked[1].until("fetch")
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
