"""`/cake/store`: another store for a running server."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from live import (
    ADMIN,
    ADMIN_KEY,
    BLOCK,
    DEADLINE_S,
    VOCAB,
    Live,
    PendingRequest,
    Start,
    StoreView,
    assert_same,
)
from polling import until

from sglang_cake.simulator.request_traces import read_trace
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder


@pytest.fixture(scope="module")
def served(start: Start, models: dict[str, Path], folder: Path) -> Iterator[Live]:
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "load"),
        *("--enable-metrics", "--admin-api-key", ADMIN_KEY),
        *("--cake-record-trace", str(folder / "recorded.jsonl")),
    )
    with start(models["first"], flags, store=folder / "swap-first") as live:
        live.headers = ADMIN
        yield live


def prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(tokens)]


def test_store_swap_detach_replace_and_reattach_change_what_is_loaded(
    served: Live, plain: Live, folder: Path
) -> None:
    ids, other = prompt(1, 12 * BLOCK + 3), prompt(2, 6 * BLOCK + 3)
    first = served.ask_store("GET").json()
    assert first["attached"] is True
    served.ask(ids, 1)
    served.store.until_stored(ids)
    assert served.ask_flushed(ids).loaded == 12 * BLOCK

    assert served.ask_store("DELETE").json()["attached"] is False
    answer = served.ask_flushed(ids)
    assert_same(answer, plain.reference(ids))
    assert "cake" not in answer.meta
    assert_same(served.ask_flushed(other), plain.reference(other))

    second = StoreView(folder / "swap-second")
    url = f"file://{second.root}?min_free=0&capacity=1GB"
    assert served.ask_store("PUT", store=url).json() == {"attached": True, "store": url}
    answer = served.ask_flushed(ids)
    assert_same(answer, plain.reference(ids))
    assert answer.loaded == 0
    second.until_stored(ids)
    assert served.ask_flushed(ids).loaded == 12 * BLOCK
    # The capacity is published every few seconds. The first store had none.
    until(lambda: served.metric("store_capacity_bytes") == 1e9, "the new store's capacity")
    assert served.metric("store_used_bytes") > 12 * BLOCK
    assert served.metric("store_evicted_bytes_total") == 0

    assert served.ask_store("PUT", store=first["store"]).status_code == 200
    answer = served.ask_flushed(ids)
    assert answer.loaded == 12 * BLOCK
    assert_same(answer, plain.reference(ids))
    # Blocks that were computed while the store was detached were not stored.
    assert served.ask_flushed(other).loaded == 0


def test_store_swap_during_a_load_keeps_the_answer(served: Live, plain: Live, folder: Path) -> None:
    ids = prompt(3, 30 * BLOCK + 3)
    first = served.ask_store("GET").json()["store"]
    served.ask(ids, 1)
    served.store.until_stored(ids)
    for new in (f"file://{folder}/swap-third?min_free=0", None, first):
        served.flush()
        asking = PendingRequest(served, ids, rid=f"swap-{new}")
        asking.until("fetch", 2)
        if new is None:
            assert served.ask_store("DELETE").status_code == 200
        else:
            assert served.ask_store("PUT", store=new).status_code == 200
        assert_same(asking.answer(), plain.reference(ids))
    served.check_log()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"store": "gopher://a"}, "unknown scheme 'gopher'"),
        ({"store": "file:///proc/kv"}, "cannot be made or written"),
        ({"store": 7}, "send {"),
        ({"shop": "file:///a"}, "send {"),
        ({"store": "a" * 70_000}, "more than 65536 bytes"),
    ],
)
def test_store_swap_unusable_store_is_refused_in_one_line(
    served: Live, body: dict[str, Any], word: str
) -> None:
    before = served.ask_store("GET").json()
    reply = served.ask_store("PUT", **body)
    assert reply.status_code == 400
    assert word in reply.json()["error"]
    assert "\n" not in reply.json()["error"]
    assert served.ask_store("GET").json() == before


def test_store_swap_without_the_admin_key_is_refused(served: Live, loading: Live) -> None:
    assert requests.get(served.url + "/cake/store", timeout=DEADLINE_S).status_code == 401
    # A server without an admin key refuses the request.
    assert requests.get(loading.url + "/cake/store", timeout=DEADLINE_S).status_code == 400


def test_request_metadata_is_recorded_in_the_trace_and_the_index(
    served: Live, folder: Path
) -> None:
    ids = prompt(4, 5 * BLOCK + 3)
    file, before = folder / "recorded.jsonl", served.ask_store("GET").json()["store"]
    root = folder / "swap-recorded"
    assert served.ask_store("PUT", store=f"file://{root}?min_free=0").status_code == 200
    served.ask(ids, 1, sampling={"custom_params": {"cake_workload": "agent"}}, cache_salt="alice")
    StoreView(root).until_stored(ids, cache_salt="alice")
    assert read_trace(file).requests[-1].workload == "agent"
    assert len(read_trace(file).requests[-1].blocks) == 5
    assert "alice" not in file.read_text()
    with (
        contextlib.closing(BlockFolder(FolderSettings(root))) as kept,
        kept.supervisor.open() as index,
    ):
        uses = [booked.usage.context for booked in index.stored(0, 100)]
    assert sorted(use.position for use in uses) == list(range(5))
    assert {(use.workload, use.turn, use.reach) for use in uses} == {("agent", 1, 5)}
    assert len({use.tenant for use in uses} - {0}) == 1
    assert served.ask_store("PUT", store=before).status_code == 200
