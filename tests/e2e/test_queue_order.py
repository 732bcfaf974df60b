"""Prompts that are being loaded let others go first, in a real server. Answers stay the same."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import BLOCK, CHUNK, Live, PendingRequest, Start

Make = Callable[[int], list[int]]


PAGE = 16
KINDS = {
    "overlap": (),
    "mixed": (
        *("--enable-mixed-chunk", "--disable-overlap-schedule", "--page-size", str(PAGE)),
        "--enable-priority-scheduling",
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def live(
    request: pytest.FixtureRequest, start: Start, models: dict[str, Path], folder: Path
) -> Iterator[Live]:
    # Both ranks must schedule the same request first. Each rank needs a core.
    ranks = request.param == "overlap" and (os.cpu_count() or 1) >= 2
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "both"),
        *KINDS[request.param],
        *(("--tp", "2") if ranks else ()),
    )
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks else {}
    store = folder / f"store-turns-{request.param}"
    # The link is so slow that most of a prompt is computed, chunk by chunk.
    with start(models["first"], flags, store=store, bandwidth="0.3MB/s", env=env) as live:
        yield live


def test_chunked_request_that_loads_yields_and_answers_stay_exact(
    live: Live, plain: Live, prompt: Make
) -> None:
    stored, long = prompt(8 * CHUNK + 7), prompt(3 * CHUNK + 9)
    short = [prompt(n) for n in (32, 100, 200, 300)]
    live.ask_and_store(stored)
    for turn in range(10):  # the others may arrive after the load has ended
        live.flush()
        first = PendingRequest(live, stored, rid=f"stored-{turn}", return_logprob=False)
        first.until("claim")
        others = [
            PendingRequest(live, ids, rid=f"{turn}-{i}") for i, ids in enumerate([long, *short])
        ]
        for asking, ids in zip(others, [long, *short], strict=True):
            assert asking.answer().tokens == plain.reference(ids).tokens
        answer = first.answer()
        assert answer.tokens == plain.reference(stored).tokens
        events = [event["event"] for event in live.events(first.rid)]
        if "yield" in events:
            break
    assert "yield" in events
    # A page that was not whole when it yielded is computed again.
    again = answer.computed + answer.loaded - len(stored)
    assert 0 <= again < PAGE * events.count("yield")
    # Tokens that it computed before it yielded do not count as cached.
    assert answer.cached == answer.loaded
    live.flush()  # SGLang checks for leaks


def test_chunked_request_aborted_after_its_yield_leaves_the_server_working(
    live: Live, plain: Live, prompt: Make
) -> None:
    stored = prompt(8 * CHUNK + 7)
    live.ask_and_store(stored)
    live.flush()
    gone = PendingRequest(live, stored, rid="gone", return_logprob=False)
    gone.until("claim")
    other = prompt(3 * CHUNK)
    asking = PendingRequest(live, other, rid="after")
    gone.until("yield")
    live.post("/abort_request", rid="gone")
    assert asking.answer().tokens == plain.reference(other).tokens
    gone.answer()
    live.flush()
    ids = prompt(2 * BLOCK)
    assert live.ask(ids).tokens == plain.reference(ids).tokens


@pytest.mark.parametrize("live", ["mixed"], indirect=True)
def test_chunked_request_never_yields_to_a_lower_priority(
    live: Live, plain: Live, prompt: Make
) -> None:
    stored, long = prompt(8 * CHUNK + 7), prompt(3 * CHUNK + 9)
    live.ask_and_store(stored)
    live.flush()
    first = PendingRequest(live, stored, rid="first", return_logprob=False, priority=5)
    first.until("claim")
    other = PendingRequest(live, long, rid="below", priority=1)
    assert first.answer().tokens == plain.reference(stored).tokens
    assert other.answer().tokens == plain.reference(long).tokens
    assert "yield" not in [event["event"] for event in live.events("first")]
