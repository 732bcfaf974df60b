"""Prefill and decode on servers of their own, over Mooncake's TCP transport."""

import hashlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from live import (
    BLOCK,
    Answer,
    Live,
    PendingRequest,
    Start,
    assert_same,
    falsify,
    request,
)
from polling import until
from server_pair import COMMON, Pair

from sglang_cake.demo.sglang_server import free_port

try:
    import mooncake.engine  # noqa: F401  it takes KV from one server to the other
except ImportError as error:
    pytest.skip(f"Mooncake cannot be loaded: {error}", allow_module_level=True)

Make = Callable[[int], list[int]]
# The share of requests, by a digest of their ids, that SGLang lets start over once.
STARTS_OVER = 1e-4
CHANGES_ROLES = ("--enable-pd-role-switch", "--disaggregation-decode-enable-radix-cache")


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    return folder / "store-disaggregated"


@pytest.fixture(scope="module")
def ordinary(
    start: Start, models: dict[str, Path], store: Path, standins: dict[str, str]
) -> Iterator[Live]:
    """A server that does both, with the same store and plug-ins. Its answers are the references."""
    flags = ("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "load")
    with start(models["first"], flags, store=store, env=standins) as live:
        yield live


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def failing_transfer(folder: Path) -> Path:
    """If a test makes this file, the next transfer removes it and fails."""
    return folder / "failing-transfer"


@pytest.fixture(scope="module")
def env(standins: dict[str, str], failing_transfer: Path) -> dict[str, str]:
    """A decode server finds within about 6 s that its prefill server is gone, and gives the memory
    of a failed transfer back after 1 s. A prefill server soon asks whether a decode server is there
    that a transfer has failed to."""
    return standins | {
        "CAKE_TEST_DISAGGREGATION": "1",
        "CAKE_TEST_TRANSFERS": str(failing_transfer),
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "1",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "3",
        "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "0.5",
    }


@pytest.fixture(scope="module")
def prefill(
    start: Start, models: dict[str, Path], store: Path, env: dict[str, str], port: int
) -> Iterator[Live]:
    flags = (
        *(*COMMON, *CHANGES_ROLES, "--disaggregation-mode", "prefill", "--cake-mode", "load"),
        *("--disaggregation-bootstrap-port", str(port)),
    )
    env = env | {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": str(STARTS_OVER)}
    with start(models["first"], flags, store=store, bandwidth="2MB/s", env=env) as live:
        yield live


@pytest.fixture(scope="module")
def racing_pair(
    start: Start, models: dict[str, Path], store: Path, env: dict[str, str], pair: Pair
) -> Iterator[Pair]:
    """The same decode server, and a prefill server in the default mode, on a slow link."""
    port = free_port()
    flags = (
        *(*COMMON, "--disaggregation-mode", "prefill"),
        *("--disaggregation-bootstrap-port", str(port)),
    )
    with start(models["first"], flags, store=store, bandwidth="1MB/s", env=env) as live:
        yield Pair(live, pair.decode, port)


@pytest.fixture(scope="module")
def turned_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def pair(
    start: Start,
    models: dict[str, Path],
    store: Path,
    env: dict[str, str],
    prefill: Live,
    port: int,
    turned_port: int,
) -> Iterator[Pair]:
    flags = (
        *(*COMMON, *CHANGES_ROLES, "--disaggregation-mode", "decode", "--cake-mode", "load"),
        *("--disaggregation-bootstrap-port", str(turned_port)),
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


def test_pair_prompt_that_differs_between_the_servers_is_kept_apart_from_others(
    ordinary: Live, pair: Pair, prompt: Make
) -> None:
    """Its last token, in no full block, as with a template that has the time of day."""
    document = prompt(10 * BLOCK + 7)
    rendered = [*document[:-1], document[-1] ^ 1]
    before, counted = pair.stored(), pair.decode.metric("differing_prompts_total")
    room = pair.room()
    decoding = PendingRequest(pair.decode, document, new_tokens=2 * BLOCK, **room)
    prefilling = PendingRequest(pair.prefill, rendered, new_tokens=2 * BLOCK, **room)
    decoding.answer()
    prefilling.answer()
    until(
        lambda: pair.decode.metric("differing_prompts_total") == counted + 1, "it has been counted"
    )
    reference = ordinary.ask(document, new_tokens=2 * BLOCK, cache_salt="computed there")
    answer, _ = pair.ask(document, new_tokens=2 * BLOCK)
    assert_same(answer, reference)
    until(lambda: sum(pair.stored()) >= sum(before) + 12, "the metrics are up to date")
    assert [b - a for a, b in zip(before, pair.stored(), strict=True)] == [10, 2]
    pair.flush()  # which SGLang refuses while a request has memory


def test_pair_prompt_is_loaded_before_its_decode_server_is_there(
    ordinary: Live, pair: Pair, prompt: Make
) -> None:
    document = prompt(10 * BLOCK + 7)
    reference = ordinary.ask(document)
    ordinary.store.until_stored(document[: 10 * BLOCK])
    room = pair.room() | {"rid": "without a decode server"}
    prefilling = PendingRequest(pair.prefill, document, **room)
    prefilling.until("fetch", 10)
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


@pytest.fixture
def router(pair: Pair) -> Iterator[str]:
    """The address of SGLang's router for the pair, which the tests stand for elsewhere."""
    pytest.importorskip("sglang_router")
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--prefill", pair.prefill.url, str(pair.port), "--decode", pair.decode.url),
        *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"),
    ]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return requests.get(f"{url}/readiness", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    process = subprocess.Popen(command)
    try:
        until(lambda: process.poll() is not None or is_ready(), "the router is ready")
        yield url
    finally:
        process.kill()
        process.wait()


def test_pair_behind_sglangs_router_answers_as_an_ordinary_server_before_and_after_a_load(
    ordinary: Live, pair: Pair, router: str, prompt: Make
) -> None:
    document = prompt(10 * BLOCK + 7)
    reference = ordinary.ask(document, cache_salt="computed there")

    def ask() -> Answer:
        reply = requests.post(f"{router}/generate", json=request(document), timeout=60)
        assert reply.status_code == 200, reply.text
        return Answer.of(reply.json())

    cold = ask()
    assert cold.cached == 0
    assert_same(cold, reference)
    pair.prefill.store.until_stored(document[: 10 * BLOCK])
    pair.flush()
    warm = ask()
    assert warm.cached == 10 * BLOCK
    assert_same(warm, reference)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pair_abort_at_each_stage_leaves_no_trace(
    ordinary: Live, pair: Pair, prompt: Make, side: str
) -> None:
    document = prompt(20 * BLOCK + 7)
    reference = ordinary.ask(document)
    ordinary.store.until_stored(document[: 20 * BLOCK])
    for stage in ("arrive", "fetch", "attach", "done"):
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
    asked.until("fetch")
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


@pytest.mark.parametrize("stage", ["of a loaded prompt", "while others load"])
def test_pair_transfer_that_fails_leaves_no_trace(
    ordinary: Live,
    pair: Pair,
    racing_pair: Pair,
    failing_transfer: Path,
    prompt: Make,
    stage: str,
) -> None:
    """The first transfer of a prompt, which on the slow link is that of its first chunk."""
    sending = pair if stage == "of a loaded prompt" else racing_pair
    document = prompt(20 * BLOCK + 7)
    reference = ordinary.ask(document)
    ordinary.store.until_stored(document[: 20 * BLOCK])
    sending.flush()

    def recoveries() -> int:
        return sending.prefill.server.logs().count("recovered via probe")

    before = recoveries()
    failing_transfer.touch()
    for pending in sending.begin(document, rid=f"failing transfer {stage}"):
        with pytest.raises(AssertionError, match=r"(?i)transfer"):
            pending.answer()
    assert not failing_transfer.exists()
    until(lambda: recoveries() > before, "the prefill server sends to the decode server again")
    sending.flush()
    answer, prefilled = sending.ask(document)
    assert_same(answer, reference)
    assert prefilled.loaded == 20 * BLOCK or sending is racing_pair
    sending.flush()
    for live in (sending.prefill, sending.decode):
        live.check_log()


def test_pair_that_changes_roles_loads_and_stores_in_the_new_ones(
    ordinary: Live, pair: Pair, turned_port: int, prompt: Make
) -> None:
    document, question = prompt(10 * BLOCK + 7), prompt(50)
    turned = Pair(pair.decode, pair.prefill, turned_port)
    try:
        turn_into("prefill", turned.prefill)
        turn_into("decode", turned.decode)
        before = turned.stored()
        answer, first = turned.ask(document, new_tokens=2 * BLOCK)
        assert first.loaded == 0
        conversation = document + answer.tokens
        turned.prefill.store.until_stored(conversation[: 12 * BLOCK])
        until(lambda: sum(turned.stored()) >= sum(before) + 12, "the metrics are up to date")
        assert [b - a for a, b in zip(before, turned.stored(), strict=True)] == [10, 2]
        reference = ordinary.ask(conversation + question, cache_salt="computed there")
        turned.flush()
        warm, prefilled = turned.ask(conversation + question)
        assert prefilled.loaded == 12 * BLOCK
        assert_same(warm, reference)
    finally:
        turn_into("prefill", pair.prefill)
        turn_into("decode", pair.decode)
    warm, prefilled = pair.ask(conversation + question)  # trees are empty after a change
    assert prefilled.loaded == 12 * BLOCK
    assert_same(warm, reference)


def turn_into(role: str, live: Live) -> None:
    live.flush()
    # No decode graphs are captured on a CPU.
    reply = live.post("/pd_role_switch", new_role=role, decode_cuda_graph_memory_gb=0)
    assert reply.status_code == 200, reply.text


def test_decode_server_whose_prefill_server_dies_while_it_loads_takes_kv_of_another(
    ordinary: Live, pair: Pair, racing_pair: Pair, prompt: Make
) -> None:
    """The last test of the pair, since its prefill server is killed."""
    dying, decode = pair.prefill, pair.decode
    document = prompt(20 * BLOCK + 7)
    reference = ordinary.ask(document)
    ordinary.store.until_stored(document[: 20 * BLOCK])
    before = racing_pair.stored()
    tries = itertools.count()

    def caught() -> tuple[PendingRequest, PendingRequest] | None:
        """A request that loads. Mode load: the link carries a block in more time than a look takes,
        unless the machine is busy."""
        pair.flush()
        rid = f"waits for the dead {next(tries)}"
        waiting, asked = pair.begin(document, rid=rid, new_tokens=2 * BLOCK)
        asked.until("fetch")
        if asked.is_running:
            return waiting, asked
        waiting.join()
        return None

    waiting, asked = until(caught, "a request that loads")
    dying.killed = True
    os.killpg(dying.server.process.pid, signal.SIGKILL)
    asked.join()
    with pytest.raises(AssertionError, match="Lost connection with prefill instance"):
        waiting.answer()
    racing_pair.flush()
    decode.check_log()
    answer, _ = racing_pair.ask(document)
    assert_same(answer, reference)
    assert racing_pair.stored() == before  # nothing of the request that failed


def starts_over(rid: str) -> bool:
    """As SGLang's `should_force_retry`."""
    digest = hashlib.sha256(rid.encode()).digest()
    return int.from_bytes(digest[:8], "big") < STARTS_OVER * 2**64
