"""Requests that end early: nothing leaks, and the log has no alarm."""

import contextlib
import http.client
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import requests
from live import (
    BLOCK,
    NEW_TOKENS,
    STAGES,
    Answer,
    Live,
    PendingRequest,
    Start,
    abort_at_every_stage,
    assert_same,
    request,
)
from polling import until

Make = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def document(both: Live) -> list[int]:
    """A long stored prompt."""
    ids = [(7 * i * i + 3 * i) % 9973 for i in range(32 * BLOCK + 5)]
    both.ask_and_store(ids)
    return ids


@pytest.fixture
def unharmed(both: Live, plain: Live, document: list[int]) -> Callable[[], None]:
    """Checks that the server is idle, that nothing leaked, and that its answers are right."""

    def check() -> None:
        both.flush()  # waits until nothing runs; then SGLang checks every slot
        both.check_log()
        answer = both.ask(document)
        assert_same(answer, plain.reference(document))
        assert answer.loaded > 0 or both.races
        both.flush()

    return check


def test_abort_at_every_stage_of_a_load_leaks_nothing(
    both: Live, document: list[int], unharmed: Callable[[], None]
) -> None:
    abort_at_every_stage(both, document)
    unharmed()


def test_client_disconnect_at_every_stage_of_a_load_leaks_nothing(
    both: Live, document: list[int], unharmed: Callable[[], None]
) -> None:
    for turn, (event, count) in enumerate(STAGES):
        both.flush()
        rid = f"hang-up-{turn}"
        body = request(document, 32, rid=rid, stream=True)
        with requests.post(both.url + "/generate", json=body, stream=True, timeout=60):
            pass  # the connection is cut after the headers, while the request runs

        body["rid"] = rid = f"hang-up-late-{turn}"
        asking = http.client.HTTPConnection(urlsplit(both.url).netloc, timeout=60)
        header = {"Content-Type": "application/json"}
        asking.request("POST", "/generate", json.dumps(body), header)
        until(lambda r=rid, e=event, n=count: _seen(both, r, e, n), f"{count} x {event}")
        asking.close()
    unharmed()


def test_requests_with_one_id_at_two_tokenizers_keep_their_own_kv(
    start: Start, models: dict[str, Path], folder: Path, plain: Live, prompt: Make
) -> None:
    """Clients choose ids. SGLang refuses one that is in use only within a tokenizer's process."""
    long, short = prompt(100 * BLOCK), prompt(8 * BLOCK + 1)
    flags = ("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "load")
    flags += ("--enable-metrics", "--tokenizer-worker-num", "2", "--skip-tokenizer-init")
    with start(models["first"], flags, store=folder / "store-one-id") as live:
        until(lambda: live.server.logs().count("startup complete") == 2, "both accept connections")

        def both_served() -> bool:
            rid = f"the same {random.random()}"
            first = PendingRequest(live, long, rid=rid)
            first.until("arrive")
            with _connected_elsewhere(live) as connection:
                body = json.dumps(request(short, NEW_TOKENS, rid=rid))
                connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
                assert_same(Answer.of(json.load(connection.getresponse())), plain.reference(short))
            assert_same(first.answer(), plain.reference(long))
            return live.metric("unkeyed_requests_total", reason="id") > 0

        until(both_served, "both were in the scheduler at once")
        live.store.until_stored(long)
        for ids in (short, short, long):
            live.flush()
            answer = live.ask(ids)
            assert_same(answer, plain.reference(ids))
            live.store.until_stored(ids)
        (report,) = answer.meta["cake"]  # SGLang loads no plug-ins where it has several tokenizers
        assert report["loaded_tokens"] == len(long) - 1


@contextlib.contextmanager
def _connected_elsewhere(live: Live) -> Iterator[http.client.HTTPConnection]:
    """A connection that none of the processes has accepted that serve one now."""
    processes = psutil.Process(live.server.process.pid).children(recursive=True)
    with contextlib.closing(http.client.HTTPConnection(urlsplit(live.url).netloc)) as connection:
        busy = [each for each in processes if _clients(each, live)]
        for process in busy:
            process.suspend()
        try:
            connection.connect()
            port = connection.sock.getsockname()[1]
            until(lambda: any(port in _clients(each, live) for each in processes), "accepted")
        finally:
            for process in busy:
                process.resume()
        yield connection


def _clients(process: psutil.Process, live: Live) -> set[int]:
    """The ports of the clients whose connections to the server this process has accepted."""
    ours = urlsplit(live.url).port
    return {
        each.raddr.port
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED and each.laddr.port == ours
    }


def test_abort_all_with_a_queue_leaks_nothing(
    both: Live, document: list[int], unharmed: Callable[[], None]
) -> None:
    both.flush()
    asked = [PendingRequest(both, document[i:], new_tokens=16, rid=f"all-{i}") for i in range(5)]
    asked[0].until("fetch")
    both.post("/abort_request", abort_all=True)
    for asking in asked:
        assert asking.answer().meta["finish_reason"]["type"] in ("abort", "length")
    unharmed()


def test_flush_cache_during_a_load_keeps_the_answer_and_leaks_nothing(
    both: Live, plain: Live, document: list[int], unharmed: Callable[[], None]
) -> None:
    both.flush()
    asking = PendingRequest(both, document, rid="flush-while-loading")
    asking.until("fetch", 2)
    requests.post(both.url + "/flush_cache", timeout=60)
    assert_same(asking.answer(), plain.reference(document))
    unharmed()


def test_concurrent_requests_for_equal_blocks_read_less_than_twice(
    both: Live, plain: Live, document: list[int], prompt: Make
) -> None:
    both.flush()
    block_bytes = both.store.files(document)[0].stat().st_size - 4096
    before = {n: both.metric(n + "_total") for n in ("read_bytes", "loaded_tokens")}
    tails = [prompt(9), prompt(70)]
    asked = [
        PendingRequest(both, document + tail, rid=f"share-{i}") for i, tail in enumerate(tails)
    ]
    answers = [asking.answer() for asking in asked]
    for tail, answer in zip(tails, answers, strict=True):
        assert_same(answer, plain.reference(document + tail))
    loaded = sum(answer.loaded for answer in answers)
    assert loaded > 0 or both.races
    until(
        lambda: both.metric("loaded_tokens_total") - before["loaded_tokens"] >= loaded,
        "the counters are published",
    )
    blocks = len(document) // BLOCK
    # Blocks that had landed for the first before the second arrived may be read again, but not all
    # blocks. tests/loading/test_loader.py tests that two requests share the read of a block.
    assert both.metric("read_bytes_total") - before["read_bytes"] < 2 * blocks * block_bytes


def test_store_folder_renamed_away_server_answers_and_loads_again_later(
    both: Live, plain: Live, document: list[int], prompt: Make
) -> None:
    root, away = both.store.root, both.store.root.with_name("away")
    both.flush()
    root.rename(away)
    try:
        for ids in (document, prompt(5 * BLOCK)):
            assert_same(both.ask(ids), plain.reference(ids))
    finally:
        away.rename(root)
    both.flush()
    assert both.ask(document).loaded > 0 or both.races


def test_concurrent_requests_with_aborts_and_a_flush_answer_exactly(
    both: Live, plain: Live, document: list[int], unharmed: Callable[[], None]
) -> None:
    both.flush()
    starts = [0, 0, BLOCK, 1, 0, 2 * BLOCK, 1, BLOCK]
    # A prompt shares blocks with a document only if both start with the same tokens.
    asked = [
        PendingRequest(both, document[s : s + 1200], rid=f"many-{i}") for i, s in enumerate(starts)
    ]
    for victim in (asked[1], asked[5]):
        both.post("/abort_request", rid=victim.rid)
    requests.post(both.url + "/flush_cache", timeout=60)
    for index, (asking, s) in enumerate(zip(asked, starts, strict=True)):
        answer = asking.answer()
        if index not in (1, 5):
            assert_same(answer, plain.reference(document[s : s + 1200]))
    unharmed()


def _seen(live: Live, rid: str, event: str, count: int) -> bool:
    events = [e["event"] for e in live.events(rid)]
    return events.count(event) >= count or "done" in events
