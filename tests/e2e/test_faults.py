"""A server in mode `load` whose only store is behind a faulty link. Every request has the right
answer, the log names the fault, and the store is used again afterwards.

The whole table, with times and S3 beside HTTP, is `python -m benchmarks faults`.
"""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from live import ADMIN, ADMIN_KEY, BLOCK, DEADLINE_S, VOCAB, Answer, Live, Start, assert_same
from polling import until
from shared_store import SharedStore

from benchmarks.harness.fault_proxy import FAULTS, READ_METHODS, FaultProxy

BLOCKS = 16
# One fault of each reason for which a block is lost, and its name in the log.
TRIED = {"stalled": "timed out", "a flipped bit": "corrupt", "500": "status"}


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[SharedStore]:
    with SharedStore(folder / "store-faults") as store:
        yield store


@pytest.fixture(scope="module")
def proxy(shared: SharedStore) -> Iterator[FaultProxy]:
    with closing(FaultProxy(shared.port, 20e6)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def live(start: Start, models: dict[str, Path], folder: Path, proxy: FaultProxy) -> Iterator[Live]:
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "12000"),
        *("--cake-mode", "load", "--enable-metrics", "--admin-api-key", ADMIN_KEY),
    )
    with start(models["first"], flags, store=folder / "store-faults-near", patient=False) as live:
        live.headers = ADMIN
        swapped = live.ask_store("PUT", store=f"http://127.0.0.1:{proxy.port}")
        assert swapped.status_code == 200, swapped.text
        yield live


@pytest.mark.parametrize("fault", TRIED)
def test_store_link_fault_while_loading_is_logged_and_answers_stay_exact(
    live: Live, plain: Live, proxy: FaultProxy, fault: str
) -> None:
    source = random.Random(31)
    ids = [source.randrange(VOCAB) for _ in range(BLOCKS * BLOCK + 5)]

    def again() -> Answer:
        answer = live.ask_flushed(ids)
        assert_same(answer, plain.reference(ids))
        return answer

    def failures() -> float:
        return sum(
            live.metric("load_failures_total", reason=reason)
            for reason in ("unavailable", "corrupt", "late")
        )

    until(lambda: again().loaded == BLOCKS * BLOCK, "all of it is loaded")
    logged, failed = len(live.server.logs()), failures()
    proxy.spoil(FAULTS[fault], methods=READ_METHODS, spare=BLOCKS // 4)
    try:
        assert again().loaded < BLOCKS * BLOCK
        until(
            lambda: f"reads fail ({TRIED[fault]}: " in live.server.logs()[logged:] or not again(),
            "the log names the fault",
            2 * DEADLINE_S,  # five reads that time out: limits are long on a slow machine
        )
        until(lambda: failures() > failed, "what was not loaded is counted")
        again()  # while it lasts
    finally:
        proxy.spoil(None)
    until(lambda: again().loaded > 0, "the store is used again")
    assert "reads work again after" in live.server.logs()[logged:]
