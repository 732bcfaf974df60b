"""Which prompts the loader records, and that a replay reads them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_loader import BLOCK, LateLookups, LoaderHarness, buffer_pool, tokens_of
from test_loader_ends import EndsHarness

from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.loader import Loader
from sglang_cake.simulator.request_traces import read_trace
from sglang_cake.stores.base import Store
from sglang_cake.stores.request_recording import RequestTraceFile

LoaderOf = Callable[[Store], Loader]


@pytest.fixture
def harness() -> Iterator[EndsHarness]:
    with EndsHarness() as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def recording(harness: LoaderHarness, path: Path) -> Iterator[LoaderOf]:
    """A loader over a store that records to `path`."""
    trace = RequestTraceFile(path, BLOCK)

    def made(store: Store) -> Loader:
        return Loader(
            store,
            buffer_pool(8),
            harness.io,
            harness.counters,
            depths=[2],
            prior=LoadCost(0.0, 1.0),
            record=trace.write,
        )

    yield made
    trace.close()


def test_loader_trace_of_prompts_with_end_states_has_their_blocks_alone(
    harness: EndsHarness, recording: LoaderOf, path: Path
) -> None:
    harness.loader = recording(harness.recorded)
    for name, blocks in (("a", 6), ("b", 4)):
        tokens = tokens_of(0, blocks)
        harness.fill_end(harness.fill(tokens), 3)
        harness.begin_ends(name, tokens, load=False)
        harness.news()
    a, b = (request.blocks for request in read_trace(path).requests)
    assert (len(a), len(b)) == (6, 4)
    assert a[:4] == b


def test_loader_trace_has_a_prompt_when_its_lookup_has_answered(
    harness: EndsHarness, recording: LoaderOf, path: Path
) -> None:
    store = LateLookups(harness.recorded)
    harness.loader = recording(store)
    harness.begin_ends("a", tokens_of(0, 6))
    harness.loader.cancel("a")  # its blocks may be saved now, and reported to the store
    harness.settle()
    assert path.read_text() == ""
    harness.io.loop.call_soon_threadsafe(store.answer.set)
    harness.settle()
    (request,) = read_trace(path).requests
    assert (request.tokens, len(request.blocks)) == (6 * BLOCK, 6)
