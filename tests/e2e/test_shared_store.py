"""Two servers with folders of their own and a shared store: one loads what the other has computed.

Blocks are stored with a lossless codec, so answers must be equal.
"""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import (
    ADMIN,
    ADMIN_KEY,
    BLOCK,
    VOCAB,
    Answer,
    Live,
    PendingRequest,
    Start,
    assert_same,
)
from polling import until
from shared_store import SharedStore

from sglang_cake.codecs.frame import HEADER_BYTES, read_header

FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "12000"),
    *("--cake-codec", "zstd"),
)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[SharedStore]:
    with SharedStore(folder / "shared") as store:
        yield store


@pytest.fixture(scope="module")
def one(start: Start, models: dict[str, Path], folder: Path, shared: SharedStore) -> Iterator[Live]:
    """A server whose second tier is the shared store. It gives up what is late, as the store is
    that a test stops."""
    flags = (*FLAGS, "--cake-mode", "both", "--enable-metrics", "--admin-api-key", ADMIN_KEY)
    urls = [shared.url]
    with start(models["first"], flags, store=folder / "tier-a", urls=urls, patient=False) as live:
        live.headers = ADMIN
        yield live


def test_shared_store_second_server_loads_blocks_of_the_first(
    start: Start,
    models: dict[str, Path],
    folder: Path,
    shared: SharedStore,
    one: Live,
    plain: Live,
) -> None:
    source = random.Random(11)

    def computed() -> list[int]:
        """A new prompt whose blocks are in the shared store."""
        ids = [source.randrange(VOCAB) for _ in range(12 * BLOCK + 5)]
        assert_same(one.ask(ids), plain.reference(ids))
        for file in shared.view.until_stored(ids):  # written down in the background
            assert read_header(file.read_bytes()[:HEADER_BYTES]).codec == "zstd"
        return ids

    with start(
        models["first"], (*FLAGS, "--cake-mode", "load"), store=folder / "tier-b", urls=[shared.url]
    ) as two:
        for _ in range(3):  # a tier that answers late is skipped, and all is computed
            ids = computed()
            first = two.ask(ids)
            after_first = [file for file in two.store.files(ids) if file.exists()]
            second = two.ask_flushed(ids)
            assert_same(first, plain.reference(ids))
            assert_same(second, plain.reference(ids))
            if first.loaded and second.loaded:
                break
        assert first.loaded == second.loaded == 12 * BLOCK
        assert first.meta["cake"]["lossy_tokens"] == 0
        assert after_first == []  # a block that was read once is not copied to the first tier
        assert len(two.store.until_stored(ids)) == 12  # a block that was read twice is


def test_http_store_stopped_killed_or_corrupt_requests_finish_as_misses(
    shared: SharedStore, one: Live, plain: Live
) -> None:
    """With the HTTP store alone. After each fault it is used again."""
    source = random.Random(13)
    ids = [source.randrange(VOCAB) for _ in range(16 * BLOCK + 5)]
    swapped = one.ask_store("PUT", store=f"{shared.url}?bandwidth=10MB/s")
    assert swapped.status_code == 200, swapped.text

    def again() -> Answer:
        answer = one.ask_flushed(ids)
        assert_same(answer, plain.reference(ids))
        return answer

    def failures() -> float:
        return one.metric("store_events_total", event="failures")

    again()
    files = shared.view.until_stored(ids)
    until(lambda: again().loaded > 0, "the store is used")

    one.flush()
    loading = PendingRequest(one, ids, rid="stopped while it loads")
    loading.until("fetch")
    shared.send(signal.SIGSTOP)
    assert_same(loading.answer(), plain.reference(ids))
    assert again().loaded == 0  # the store is stopped, so all was computed
    shared.send(signal.SIGCONT)
    until(lambda: again().loaded > 0, "it is used again")

    before = failures()
    shared.kill()
    assert again().loaded == 0
    until(lambda: failures() > before, "that it is down is counted")
    shared.start()
    until(lambda: again().loaded > 0, "it is used again")

    for file in files:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    until(lambda: again() and any(map(shared.view.set_aside, files)), "a lie is found out")
    until(lambda: one.metric("store_events_total", event="corrupt") > 0, "and counted")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two cores")
def test_data_parallel_worker_loads_blocks_of_the_other_worker(
    start: Start, models: dict[str, Path], folder: Path, plain: Live
) -> None:
    source = random.Random(12)
    ids = [source.randrange(VOCAB) for _ in range(12 * BLOCK + 5)]
    flags = ("--dtype", "float32", "--max-total-tokens", "12000", "--dp", "2")
    with start(
        models["first"],
        (*flags, "--cake-mode", "load"),
        store=folder / "store-dp",
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ) as live:
        live.ask_and_store(ids, routed_dp_rank=1)
        here, there = (live.ask(ids, routed_dp_rank=rank) for rank in (0, 1))
        assert [here.meta["dp_rank"], there.meta["dp_rank"]] == [0, 1]
        assert here.loaded == 12 * BLOCK
        assert there.loaded == 0  # it is in its own tree
        assert there.cached >= 12 * BLOCK
        for answer in (here, there):
            assert answer.tokens == plain.reference(ids).tokens
        live.flush()  # both workers' trees
        assert live.ask(ids, routed_dp_rank=1).loaded == 12 * BLOCK
