"""The loader on its real thread, with stores that the test holds by the hand."""

import asyncio
import sys
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import pytest
from faulty_stores import RecordingStore
from held_reads import PATIENCE_S, HeldReads
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.buffers import PAGE_BYTES, Buffer, BufferPool, TellBytes, on_page
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreError, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest, KeyChain, KeySeed, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import IoThread, wait_uncancelled
from sglang_cake.loading import loader
from sglang_cake.loading.cost_model import MOST_TIERS, LoadCost, TierLoads
from sglang_cake.loading.loader import (
    ENDED_LOOKUP_S,
    BlockRead,
    Fetched,
    HostBlock,
    Loader,
    LoaderEvent,
    LoadRequest,
    LookedUp,
    Lost,
)
from sglang_cake.stores.base import LentBlock, Store, WrapperStore, read_until_s
from sglang_cake.stores.memory.host_memory_store import HostMemorySource
from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.virtual_time import VirtualIo, virtual_time

BLOCK, BYTES = 4, 32
NOW_S = 0.0  # long ago: who waits until then does not wait
SEED = KeySeed(Digest(b"n" * 32))


def buffer_pool(buffers: int) -> BufferPool:
    return BufferPool([Buffer(on_page(BYTES)) for _ in range(buffers)])


def tokens_of(name: int, blocks: int, shared: int = 0) -> array:
    """The first `shared` blocks are alike for every name."""
    own = range(1000 * (name + 1), 1000 * (name + 1) + (blocks - shared) * BLOCK)
    return array("q", [*range(shared * BLOCK), *own])


def keys_of(tokens: array) -> list[BlockKey]:
    return KeyChain(SEED, BLOCK).of(tokens)


def bytes_of(key: BlockKey) -> bytes:
    return bytes(key)[:BYTES].ljust(BYTES, b".")


class BrokenStore(WrapperStore):
    """Raises what no store may raise."""

    def __init__(self, inner: Store, *, lookups: bool = True) -> None:
        super().__init__(inner)
        self.lookups = lookups

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self.lookups:
            raise ZeroDivisionError
        return await super().contains(keys)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        raise ZeroDivisionError


class TellingStore(WrapperStore):
    """Bytes that have come are told of by the test."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.told: dict[BlockKey, TellBytes] = {}

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        assert progress is not None
        self.told[key] = progress
        return await super().get_into(key, out)


class HookedStore(WrapperStore):
    """Calls a test's function in the I/O thread when the read of a key ends, before the loader
    handles that end."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.at_end: dict[BlockKey, Callable[[], object]] = {}

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        try:
            return await self.inner.get_into(key, out, progress)
        finally:
            if key in self.at_end:
                self.at_end[key]()


class CountingIo(IoThread):
    """Attributes: posts: how many calls it was given."""

    posts = 0

    def post(self, action: Callable[..., object], *args: Any) -> None:
        self.posts += 1
        super().post(action, *args)


def looked_up(load_id: str, stored: Sequence[bool], ends: Sequence[bool] = ()) -> LookedUp:
    """The answer of a lookup whose blocks are all in one tier."""
    return LookedUp(load_id, tuple(stored), tuple(ends), bytes(len(stored)))


class LoaderStats(NamedTuple):
    """What a loader holds: live prompts, reads under way, and fetched blocks with a holder."""

    prompts: int
    reads: int
    staged_blocks: int


def stats_of(loader: Loader) -> LoaderStats:
    links = {queue.link for queue in list(loader._queues)}
    staged = sum(each._holders > 0 for each in list(loader._host_blocks.values()))
    return LoaderStats(len(loader._queues), sum(len(link.reads) for link in links), staged)


class LoaderHarness(HeldReads):
    """A loader over a store whose reads the test opens, and what came of it.

    As a context manager: all prompts end, and all buffers are free again.
    """

    def __init__(
        self, *, buffers: int = 8, depth: int = 2, io: IoThread | VirtualIo | None = None
    ) -> None:
        super().__init__(io or CountingIo())
        self.recorded = RecordingStore(self.faulty)
        self.pool = buffer_pool(buffers)
        self.counters = Counters()
        self.wakes = 0
        self.loader = self.new_loader(self.recorded, depth)
        self.keys: dict[str, list[BlockKey]] = {}  # by load id
        self.events: list[LoaderEvent] = []
        self.held: list[Fetched] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        try:
            if failure is None:
                for load_id in self.keys:
                    self.loader.cancel(load_id)
                self.news()
                self.release()
                assert self.pool.free == self.pool.capacity
        finally:
            self.close()

    def close(self) -> None:
        """As at the end of the process: reads that end with the thread start no others."""
        self.loader.close()
        self.io.close()

    def new_loader(
        self,
        store: Store,
        *depths: int,
        least_limit_s: float = PATIENCE_S,
        copy_s: float = 0.0,
    ) -> Loader:
        return Loader(
            store,
            self.pool,
            self.io,
            self.counters,
            depths=depths or [2],
            prior=LoadCost(0.0, 1.0, copy_s),
            least_limit_s=least_limit_s,
            wake=self.wake,
        )

    def wake(self) -> None:
        self.wakes += 1

    # ---- the test's hands ----

    def fill(self, tokens: array, *, without: Sequence[int] = ()) -> list[BlockKey]:
        keys = keys_of(tokens)
        self.store({key: bytes_of(key) for b, key in enumerate(keys) if b not in without})
        return keys

    def stored(
        self, blocks: int, *, name: int = 0, without: Sequence[int] = ()
    ) -> tuple[array, list[BlockKey]]:
        """A prompt, and the keys of its blocks, which are stored."""
        tokens = tokens_of(name, blocks)
        return tokens, self.fill(tokens, without=without)

    def begin(
        self, rid: str, tokens: array, *, first: int = 0, least: int = 1, load: bool = True
    ) -> list[TierLoads]:
        """Returns a list that gets the loads each time that the loader asks whether to load."""
        self.keys[rid] = keys_of(tokens)
        asked: list[TierLoads] = []

        def loads_now(stored: Sequence[bool], loads: TierLoads) -> bool:
            asked.append(loads)
            return load and sum(stored[first:]) >= least

        prompt = LoadRequest(
            load_id=rid,
            key_chain=KeyChain(SEED, BLOCK),
            tokens=tokens,
            block_count=len(tokens) // BLOCK,
            first_block=first,
            loads_now=loads_now,
        )
        self.loader.begin(prompt)
        return asked

    def waiting(self) -> list[BlockKey]:
        self.settle()
        return list(self.slow.waiting)

    def news(self) -> list[LoaderEvent]:
        """The loader's events since the last call; the bytes of fetched blocks must be right."""
        self.settle()
        events = self.loader.drain()
        for event in events:
            if isinstance(event, Fetched):
                assert event.host_block.buffer.view == bytes_of(
                    self.keys[event.load_id][event.block]
                )
                self.held.append(event)
        self.events += events
        return events

    def landed(self) -> list[tuple[str, int]]:
        """Fetched since the last call of `news` or `landed`."""
        found = [e for e in self.news() if isinstance(e, Fetched)]
        return [(e.load_id, e.block) for e in found]

    def release(self, *, used: bool = True, reason: str = "ended", copy_s: float = 0.0) -> None:
        for event in self.held:
            event.host_block.release(used=used, reason=reason, copy_s=copy_s)
        self.held.clear()
        self.settle()

    def wasted(self) -> dict[str, int]:
        values = self.counters.snapshot()
        return {label: n for (name, label), n in values.items() if name == "wasted_bytes" and n}

    def failures(self) -> dict[str, int]:
        values = self.counters.snapshot()
        return {label: n for (name, label), n in values.items() if name == "load_failures" and n}

    def read_keys(self) -> list[BlockKey]:
        self.settle()
        return self.recorded.keys_of("get")


def after_read_ends(
    harness: LoaderHarness, key: BlockKey, action: Callable[[], object]
) -> list[BlockKey]:
    """Have `action` run in the I/O thread when the read of `key` ends, in the same iteration of the
    loop in which the loader starts the next read, and before it does. Returns a list that gets the
    key then."""
    store = HookedStore(harness.recorded)
    harness.loader = harness.new_loader(store)
    ended: list[BlockKey] = []

    def act() -> None:
        ended.append(key)
        action()

    store.at_end[key] = act
    return ended


def after_next_read_starts(
    harness: LoaderHarness, key: BlockKey, action: Callable[[], object]
) -> list[BlockKey]:
    """The same one iteration later: the next read is started then, and its task has not run."""
    return after_read_ends(harness, key, lambda: asyncio.get_running_loop().call_soon(action))


@pytest.fixture
def harness() -> Iterator[LoaderHarness]:
    with LoaderHarness() as made:
        yield made


@pytest.fixture
def harness_of() -> Iterator[Callable[..., LoaderHarness]]:
    with ExitStack() as running:
        yield lambda **options: running.enter_context(LoaderHarness(**options))


# ---- one prompt ----


def test_loader_closed_before_its_thread_leaves_no_read_behind() -> None:
    harness = LoaderHarness(depth=2)
    harness.begin("r", harness.stored(6)[0])
    assert len(harness.waiting()) == 2
    harness.close()
    assert not asyncio.all_tasks(harness.io.loop)


def test_loader_reads_from_the_last_block_with_the_given_depth(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(5)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[4], keys[3]]
    assert harness.news() == [looked_up("a", (True,) * 5)]
    harness.open(keys[3])
    assert harness.waiting() == [keys[4], keys[2]]
    harness.open(*keys)
    assert harness.read_keys() == keys[::-1]
    assert sorted(harness.landed()) == [("a", b) for b in range(5)]
    for event in harness.held:
        assert bytes(event.host_block.buffer.view) == bytes_of(keys[event.block])
    harness.release()
    harness.loader.cancel("a")
    harness.settle()
    assert harness.pool.free == harness.pool.capacity
    assert harness.wasted() == {}
    assert harness.loader.cost.block_s != 1.0


@pytest.mark.parametrize("load", [False, True])
def test_loader_lookup_and_reads_cost_the_same_however_many_prompts_load_nothing(
    harness: LoaderHarness, load: bool
) -> None:
    """Measured in calls of the loader's functions on the I/O thread."""
    calls: list[str] = []

    def called(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == loader.__file__:
            calls.append(frame.f_code.co_name)

    counts = []
    for waiting in 10, 200:
        for name in range(waiting):
            tokens, _ = harness.stored(2, name=name)
            harness.begin(f"{waiting}-{name}", tokens, load=False)
        harness.settle()
        tokens, keys = harness.stored(4, name=1000 + waiting)
        harness.open(*keys)
        calls.clear()
        harness.io.post(sys.setprofile, called)
        harness.begin(f"last {waiting}", tokens, load=load)
        harness.settle()
        harness.io.post(sys.setprofile, None)
        harness.settle()
        assert len([rid for rid, _ in harness.landed() if rid == f"last {waiting}"]) == 4 * load
        harness.loader.cancel(f"last {waiting}")
        harness.release()
        counts.append(Counter(calls))
    assert counts[0] == counts[1]


class TwoPlaces(WrapperStore):
    """Every third block of a prompt is in another place."""

    def __init__(self, inner: Store, keys: Sequence[BlockKey]) -> None:
        super().__init__(inner)
        self.places = {key: number % 3 // 2 for number, key in enumerate(keys)}

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return [self.places[key] for key in keys]


def test_loader_asks_with_the_tier_of_each_block_and_the_cost_of_each_tier(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(6)
    harness.loader = harness.new_loader(TwoPlaces(harness.recorded, keys), 1)
    harness.loader.recall([LoadCost(0.0, 0.5), LoadCost(0.0, 30.0)])
    asked = harness.begin("a", tokens)
    harness.settle()
    assert asked[0].tiers == bytes([0, 0, 1, 0, 0, 1])
    assert [cost.block_s for cost in asked[0].costs[:3]] == [0.5, 30.0, 1.0]
    assert asked[0].costs == harness.loader.tier_costs
    assert harness.waiting() == [keys[5], keys[4]]
    harness.open(keys[5])  # from the slow place, in no time
    known = [cost.block_s for cost in harness.loader.costs if cost]
    assert known == [0.5, 30.0]  # one block says little
    harness.open(*keys)
    assert sorted(harness.landed()) == [("a", b) for b in range(6)]
    harness.release()


def test_loader_silence_of_a_tier_lasts_while_its_reads_bring_nothing(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(6)
    harness.loader = harness.new_loader(TwoPlaces(harness.recorded, keys), 1)
    assert set(harness.loader.tier_silence_s) == {0.0}
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[5], keys[4]]
    first = harness.loader.tier_silence_s
    assert [silence_s > 0 for silence_s in first[:3]] == [True, True, False]
    harness.open(*keys[:2], *keys[3:5])  # of the first tier
    assert len(harness.landed()) == 4
    then = harness.loader.tier_silence_s
    assert then[0] == 0.0
    assert then[1] > first[1]
    harness.open(*keys)
    assert len(harness.landed()) == 2
    assert set(harness.loader.tier_silence_s) == {0.0}


def test_loader_silence_of_tiers_after_the_last_counted_one_counts_for_that_one(
    harness: LoaderHarness,
) -> None:
    """As their costs do."""
    tokens, keys = harness.stored(6)
    store = TwoPlaces(harness.recorded, keys)
    store.places = {key: MOST_TIERS + place for key, place in store.places.items()}
    harness.loader = harness.new_loader(store, 1)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[5], keys[4]]
    first = harness.loader.tier_silence_s
    assert [silence_s > 0 for silence_s in first] == [False] * (MOST_TIERS - 1) + [True]
    harness.open(*keys[:2], *keys[3:5])  # all of the first place
    assert len(harness.landed()) == 4
    assert harness.loader.tier_silence_s[-1] > first[-1]
    harness.open(*keys)
    assert len(harness.landed()) == 2
    assert set(harness.loader.tier_silence_s) == {0.0}


class Broken(WrapperStore):
    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return []


def test_loader_failing_sources_call_counts_as_a_failed_lookup(harness: LoaderHarness) -> None:
    harness.loader = harness.new_loader(Broken(harness.recorded))
    harness.fill(tokens_of(0, 6))
    harness.begin("a", tokens_of(0, 6))
    assert harness.news() == [looked_up("a", (False,) * 6)]
    assert harness.failures() == {"lookup": 1}


@pytest.mark.parametrize("tier", [-1, 0.5, None])
def test_loader_tier_that_is_no_number_of_one_counts_as_a_failed_lookup(
    harness: LoaderHarness, tier: object
) -> None:
    store = TwoPlaces(harness.recorded, [])
    harness.loader = harness.new_loader(store)
    store.places = dict.fromkeys(harness.fill(tokens_of(0, 6)), tier)
    harness.begin("a", tokens_of(0, 6))
    assert harness.news() == [looked_up("a", (False,) * 6)]
    assert harness.failures() == {"lookup": 1}


def test_loader_blocks_of_the_store_before_do_not_make_another_store_quick() -> None:
    with virtual_time() as io, LoaderHarness(io=io) as harness:
        tokens, keys = harness.stored(2)
        other, other_keys = tokens_of(1, 1), keys_of(tokens_of(1, 1))
        harness.fill(other)
        harness.begin("a", tokens)
        assert len(harness.waiting()) == 2
        harness.loader.use(WrapperStore(harness.recorded), [2])
        harness.loader.forget_costs()
        harness.begin("b", other)
        assert len(harness.waiting()) == 3
        io.now_s += 2.0
        harness.open(*keys)
        assert len(harness.landed()) == 2
        io.now_s += 1.0
        harness.open(*other_keys)
        assert harness.landed() == [("b", 0)]
        assert harness.loader.cost.block_s == 3.0


def test_loader_costs_of_a_store_are_forgotten_for_another_store(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(6)
    harness.loader.recall([LoadCost(0.0, 30.0)])
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[5], keys[4]]
    assert harness.loader.cost.block_s == 30.0
    harness.loader.use(WrapperStore(harness.recorded), [2])
    harness.loader.forget_costs()
    assert (harness.loader.cost.block_s, harness.loader.costs) == (1.0, [None])
    harness.open(*keys)  # the prompt goes on with the old store
    assert sorted(harness.landed()) == [("a", b) for b in range(6)]
    assert harness.loader.costs == [None]
    harness.release()
    other = tokens_of(1, 6)
    harness.open(*harness.fill(other))
    harness.begin("b", other)
    assert len(harness.landed()) == 6
    (cost,) = harness.loader.costs
    assert cost is not None


def test_loader_reads_only_stored_blocks_from_the_first_allowed(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(6, without=[3])
    harness.open(*keys)
    harness.begin("a", tokens, first=2)
    assert harness.news()[0] == looked_up("a", (True, True, True, False, True, True))
    assert harness.read_keys() == [keys[5], keys[4], keys[2]]


@pytest.mark.parametrize(("least", "load"), [(4, True), (5, False)])
def test_loader_fewer_blocks_than_the_least_are_not_read(
    harness: LoaderHarness, least: int, load: bool
) -> None:
    tokens = tokens_of(0, 6)
    harness.open(*harness.fill(tokens, without=[0]))
    harness.begin("a", tokens, first=2, least=least)
    assert harness.news()[0] == looked_up("a", (False, *[True] * 5))
    assert len(harness.read_keys()) == (4 if load else 0)


def test_loader_lookup_without_load_reads_nothing(harness: LoaderHarness) -> None:
    tokens = tokens_of(0, 3)
    harness.fill(tokens)
    harness.begin("a", tokens, load=False)
    assert harness.news() == [looked_up("a", (True,) * 3)]
    assert harness.read_keys() == []


# ---- computed blocks ----


def test_loader_reads_of_computed_blocks_end_and_none_starts(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(6)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[5], keys[4]]
    harness.loader.set_first_loadable("a", 5)
    assert harness.waiting() == [keys[5]]
    assert harness.wasted() == {"cancelled": BYTES}
    harness.open(*keys)
    assert harness.landed() == [("a", 5)]
    assert harness.read_keys() == [keys[5], keys[4]]
    harness.loader.set_first_loadable("a", 2)  # it never goes back
    assert harness.read_keys() == [keys[5], keys[4]]


def test_loader_block_computed_before_its_read_begins_is_not_read(
    harness: LoaderHarness,
) -> None:
    """The loader has started the next read, and its task has not run, when its block is
    computed."""
    tokens, keys = harness.stored(4)
    entered, go_on = threading.Event(), threading.Event()

    def before_block_1_is_read() -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    ended = after_next_read_starts(harness, keys[3], before_block_1_is_read)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[3], keys[2]]
    harness.io.loop.call_soon_threadsafe(harness.slow.release, keys[3])
    assert entered.wait(PATIENCE_S)
    started = harness.loader.under_way("a")[1]
    harness.loader.set_first_loadable("a", 2)
    go_on.set()
    assert harness.read_keys() == [keys[3], keys[2]]
    assert ended == [keys[3]]
    assert harness.loader.under_way("a").keys() == {2}
    assert not started.wait_whole(time.monotonic() + PATIENCE_S)
    harness.loader.cancel("a")
    assert harness.landed() == [("a", 3)]


def test_loader_read_cancelled_before_it_began_frees_its_buffer(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(4)
    ended = after_read_ends(harness, keys[3], lambda: harness.loader.cancel("a"))
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[3], keys[2]]
    # The read of block 1 starts, and is cancelled before its task has run at all.
    harness.open(keys[3])
    assert ended == [keys[3]]
    assert harness.read_keys() == [keys[3], keys[2]]
    assert harness.landed() == [("a", 3)]
    harness.release()
    assert harness.pool.free == harness.pool.capacity
    assert stats_of(harness.loader) == LoaderStats(prompts=0, reads=0, staged_blocks=0)


def test_loader_prompts_with_equal_blocks_share_one_read(
    harness_of: Callable[..., LoaderHarness],
) -> None:
    harness = harness_of(depth=4)
    a, b = tokens_of(0, 3, shared=2), tokens_of(1, 3, shared=2)
    keys = harness.fill(a)
    harness.fill(b)
    harness.open(keys[2], keys_of(b)[2])
    harness.begin("a", a)
    harness.begin("b", b)
    assert sorted(harness.landed()) == [("a", 2), ("b", 2)]
    assert sorted(harness.waiting()) == sorted([keys[0], keys[1]])
    harness.open(*keys)
    assert sorted(harness.landed()) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert len(harness.read_keys()) == 4
    for event in harness.held:
        keys_there = keys if event.load_id == "a" else keys_of(b)
        assert bytes(event.host_block.buffer.view) == bytes_of(keys_there[event.block])
    assert harness.pool.free == harness.pool.capacity - 4


def test_loader_staged_block_serves_a_later_prompt_without_a_read(harness: LoaderHarness) -> None:
    tokens = tokens_of(0, 2)
    harness.open(*harness.fill(tokens))
    harness.begin("a", tokens)
    assert len(harness.landed()) == 2
    harness.begin("b", tokens)
    assert sorted(harness.landed()) == [("b", 0), ("b", 1)]
    assert len(harness.read_keys()) == 2
    first, rest = harness.held[:2], harness.held[2:]
    for event in first:
        event.host_block.release(used=False, reason="overtaken")
    for event in rest:
        event.host_block.release(used=True)
    harness.settle()
    harness.held.clear()
    assert harness.wasted() == {}  # they served one of the two
    assert harness.pool.free == harness.pool.capacity
    harness.begin("c", tokens)
    assert len(harness.landed()) == 2
    assert len(harness.read_keys()) == 4  # staging holds them no more


class LendingStore(WrapperStore):
    """Lends some of its blocks."""

    def __init__(self, inner: Store, keys: Sequence[BlockKey], error: Exception | None = None):
        super().__init__(inner)
        self.keys = set(keys)
        self.error = error
        self.lent: list[BlockKey] = []
        self.given_back: list[BlockKey] = []
        self.most = 0  # lent at once

    def lend(self, key: BlockKey) -> LentBlock | None:
        if self.error is not None:
            raise self.error
        if key not in self.keys:
            return None
        self.lent.append(key)
        self.most = max(self.most, len(self.lent) - len(self.given_back))
        buffer = Buffer(memoryview(bytearray(bytes_of(key))))
        return LentBlock(buffer, lambda: self.given_back.append(key))


def test_loader_lent_blocks_take_no_read_and_no_buffer(
    harness_of: Callable[..., LoaderHarness],
) -> None:
    harness = harness_of(buffers=1, depth=7)
    tokens, keys = harness.stored(9)
    store = LendingStore(harness.recorded, keys)
    harness.loader = harness.new_loader(store, 7, copy_s=60.0)
    harness.begin("a", tokens, first=2)
    assert harness.landed() == [("a", block) for block in range(8, 1, -1)]
    assert isinstance(harness.events[0], LookedUp)
    assert harness.read_keys() == []
    assert harness.pool.free == 1
    assert harness.loader.cost.block_s == 60.0, "they wait for their copies alone"
    assert harness.wakes == 2, "the lookup, and the last block"
    assert store.given_back == []
    harness.begin("b", tokens, first=8)
    assert harness.landed() == [("b", 8)]
    assert len(store.lent) == 7, "two prompts share it"
    harness.release(used=False)
    assert sorted(store.given_back) == sorted(store.lent)
    assert stats_of(harness.loader) == LoaderStats(2, 0, 0)
    assert harness.wasted() == {}, "nothing crossed a link"


def test_loader_lent_blocks_say_nothing_of_the_cost_before_a_copy_is_measured(
    harness: LoaderHarness,
) -> None:
    tokens = tokens_of(0, 12)
    harness.loader = harness.new_loader(LendingStore(harness.recorded, harness.fill(tokens)))
    harness.begin("a", tokens)
    assert harness.landed() == [("a", 11), ("a", 10)]
    assert harness.loader.cost.block_s == 1.0, "as it was believed before"
    harness.release(copy_s=60.0)
    assert len(harness.landed()) == 2
    assert harness.loader.cost.block_s == 60.0


@pytest.mark.parametrize("copy_s", [0.0, 0.1, 0.002])
def test_loader_lends_a_prompt_as_many_blocks_as_are_copied_soon(
    harness: LoaderHarness, copy_s: float
) -> None:
    ahead = 5 if copy_s == 0.002 else 2  # 10 ms of copies, and the depth at least
    one, other = tokens_of(0, 12), tokens_of(1, 12)
    keys = [*harness.fill(one), *harness.fill(other)]
    harness.loader = harness.new_loader(LendingStore(harness.recorded, keys), copy_s=copy_s)
    harness.begin("a", one)
    assert harness.landed() == [("a", block) for block in range(11, 11 - ahead, -1)]
    harness.begin("b", other)
    assert len(harness.landed()) == ahead, "one prompt does not wait for the other's copies"
    harness.release()
    assert len(harness.landed()) == 2 * ahead
    assert harness.read_keys() == []


class LendingTier(LendingStore):
    """The blocks that it lends are in the first of two tiers."""

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return [int(key not in self.keys) for key in keys]


def test_loader_reads_blocks_below_while_lent_blocks_wait_for_their_copies(
    harness: LoaderHarness,
) -> None:
    """As when the device has no slots: the link to the tier below does not rest."""
    tokens, keys = harness.stored(12)
    store = LendingTier(harness.recorded, keys[1::2])
    harness.loader = harness.new_loader(store)
    harness.begin("a", tokens)
    assert harness.landed() == [("a", 11), ("a", 9)]
    assert harness.waiting() == [keys[10], keys[8]]
    harness.open(*keys)
    assert sorted(harness.landed()) == [("a", block) for block in range(0, 12, 2)]
    assert store.lent == [keys[11], keys[9]], "nothing was copied yet"
    harness.release()
    assert harness.landed() == [("a", 7), ("a", 5)]
    harness.release()
    assert harness.landed() == [("a", 3), ("a", 1)]
    harness.release()
    assert harness.read_keys() == keys[10::-2]
    assert harness.pool.free == harness.pool.capacity
    assert stats_of(harness.loader) == LoaderStats(1, 0, 0)
    assert harness.wakes == 2, "the lookup, and the last block"


def test_loader_last_lent_block_above_computed_ones_wakes_the_scheduler(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(8)
    harness.loader = harness.new_loader(LendingStore(harness.recorded, keys))
    harness.begin("a", tokens)
    assert harness.landed() == [("a", 7), ("a", 6)]
    harness.loader.set_first_loadable("a", 5)
    harness.release()
    assert harness.landed() == [("a", 5)]
    assert harness.wakes == 2, "the lookup, and the last block"


class MovingUp(WrapperStore):
    """Block 1 was in the first tier at the lookup, and is in the third one since."""

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return [2] if len(keys) == 1 else [int(block != 1) for block in range(len(keys))]


def test_loader_block_that_moved_to_another_idle_tier_is_read_at_once(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(4)
    harness.loader = harness.new_loader(MovingUp(harness.recorded), 1)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[3], keys[1]]
    harness.open(*keys)
    assert harness.read_keys() == [keys[3], keys[1], keys[2], keys[0]]


class HungLookups(WrapperStore):
    """Lookups that do not answer. Attributes: asked, cancelled: how many."""

    asked = cancelled = 0

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError


def test_loader_lookup_of_a_prompt_that_has_ended_is_cancelled_after_a_while() -> None:
    """While a disk hangs, lookups would pile up, and be answered before those of live prompts. Not
    at once: that a tier is late is found out by lookups that are late."""
    with virtual_time() as io, LoaderHarness(io=io) as harness:
        store = HungLookups(harness.recorded)
        harness.loader = harness.new_loader(store)
        for name in "ab":
            harness.begin(name, tokens_of(0, 8))
        harness.settle()
        harness.loader.cancel("a")
        io.until(io.now_s + 0.9 * ENDED_LOOKUP_S)
        assert (store.asked, store.cancelled) == (2, 0)
        io.until(io.now_s + 0.2 * ENDED_LOOKUP_S)
        assert (store.asked, store.cancelled) == (2, 1)
        assert harness.news() == []
        harness.loader.cancel("b")


class LateLookups(WrapperStore):
    """Lookups that answer when the test lets them."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.answer = asyncio.Event()

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        await self.answer.wait()
        return await super().contains(keys)


@pytest.mark.parametrize("ended", [False, True])
def test_loader_lookup_that_answers_after_its_prompt_has_ended_asks_and_reads_nothing(
    harness: LoaderHarness, ended: bool
) -> None:
    tokens, keys = harness.stored(8)
    store = LateLookups(harness.recorded)
    harness.loader = harness.new_loader(store)
    asked = harness.begin("a", tokens)
    harness.settle()
    if ended:
        harness.loader.cancel("a")
        harness.settle()
    harness.io.loop.call_soon_threadsafe(store.answer.set)
    harness.settle()
    assert (len(asked), len(harness.waiting())) == ((0, 0) if ended else (1, 2))
    harness.loader.cancel("a")
    harness.open(*keys)
    harness.settle()


class CountedTiers(list[int]):
    """Counts how often a tier is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


class TwoTiers(WrapperStore):
    """Every second block is in the second tier."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.given: list[CountedTiers] = []
        self._tiers: dict[BlockKey, int] = {}

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        if len(keys) > 1:  # of a lookup
            self.given.append(CountedTiers(number % 2 for number in range(len(keys))))
            self._tiers.update(zip(keys, list(self.given[-1]), strict=True))
            return self.given[-1]
        return [self._tiers[key] for key in keys]


class OneCountedTier(WrapperStore):
    """Blocks are in `tier`. Counts how often the tier of a block is looked at."""

    tier = 0

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.given: list[CountedTiers] = []

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        self.given.append(CountedTiers([self.tier] * len(keys)))
        return self.given[-1]

    @property
    def looks(self) -> int:
        return sum(tiers.looks for tiers in self.given)


@pytest.mark.parametrize("tier", [0, 1])
def test_loader_with_all_reads_of_a_tier_looks_at_no_prompt_that_waits_for_it(
    harness: LoaderHarness, tier: int
) -> None:
    """With hundreds of prompts, that would take longer than the read of a block. The other tier is
    idle, or none."""
    store = OneCountedTier(harness.recorded)
    harness.loader = harness.new_loader(store, 2)
    tokens, keys = harness.stored(2)
    harness.begin("fast", tokens)
    harness.open(*keys)
    store.tier = tier
    keys = harness.stored(6, name=1)[1]
    for number in range(1, 41):
        harness.begin(f"{number}", harness.stored(6, name=number)[0])
    assert harness.waiting() == [keys[5], keys[4]]
    before = store.looks
    harness.open(keys[5])
    assert harness.waiting() == [keys[4], keys[3]]
    assert store.looks - before < 20
    harness.open(keys[4], keys[3])


def test_loader_each_tier_has_reads_of_its_own(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(12)
    harness.loader = harness.new_loader(TwoTiers(harness.recorded), 1, 3)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[11], keys[10], keys[9], keys[7]]
    harness.open(keys[11])
    assert harness.waiting() == [keys[10], keys[9], keys[7], keys[5]]
    harness.open(keys[10])
    assert harness.waiting() == [keys[9], keys[7], keys[5], keys[8]]
    harness.open(*keys)


def test_loader_tier_with_all_its_reads_does_not_keep_another_one_idle(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(12)
    store = TwoPlaces(harness.recorded, keys)
    store.places = {key: int(number >= 6) for number, key in enumerate(keys)}
    harness.loader = harness.new_loader(store, 1)
    harness.begin("a", tokens, load=False)
    harness.settle()
    harness.loader.set_first_loadable("a", 2)
    harness.loader.set_load_from("a", 0)
    harness.open(*keys[:6])
    assert sorted(harness.landed()) == [("a", block) for block in range(2, 6)]
    assert harness.waiting() == [keys[11]]


def test_loader_block_whose_read_was_stopped_is_read_again_when_its_tier_has_a_place() -> None:
    """Before, as many blocks waited, and none of them was in that tier."""
    with LoaderHarness(buffers=16) as harness:
        tokens, keys = harness.stored(7)
        others, other_keys = harness.stored(2, name=1)
        store = TwoPlaces(harness.recorded, [*keys, *other_keys])
        store.places = {key: int(key in keys[1:]) for key in [*keys, *other_keys]}
        harness.loader = harness.new_loader(store, 2)
        harness.begin("a", tokens)
        assert harness.waiting() == [keys[6], keys[5], keys[0]]
        harness.loader.set_load_from("a", None)
        harness.begin("b", others)
        assert sorted(harness.waiting()) == sorted(other_keys)
        harness.loader.set_load_from("a", 0)
        harness.open(keys[6])
        assert keys[0] not in harness.waiting()
        harness.open(*other_keys)
        assert harness.waiting() == [keys[5], keys[4], keys[0]]
        harness.open(*keys)


def test_loader_without_a_buffer_does_not_search_for_a_block_of_another_tier(
    harness: LoaderHarness,
) -> None:
    class AskedPlaces(TwoPlaces):
        asked = 0

        def sources(self, keys: Sequence[BlockKey]) -> list[int]:
            self.asked += 1
            return super().sources(keys)

    tokens, keys = harness.stored(12)
    store = AskedPlaces(harness.recorded, keys)
    store.places = {key: int(number >= 6) for number, key in enumerate(keys)}
    harness.loader = harness.new_loader(store, 1)
    harness.begin("a", tokens)
    harness.open(*keys[1:6])
    assert harness.waiting() == [keys[11]], "the last quarter of the buffers is not for it"
    asked = store.asked
    harness.loader.order(["a"], may_use_all_buffers=None)
    harness.settle()
    assert store.asked == asked
    harness.news()
    harness.release()
    assert harness.waiting() == [keys[11], keys[0]]
    harness.open(*keys)


@pytest.mark.parametrize("tier", [0, 1])
def test_loader_tier_reads_no_block_before_the_first_that_is_worth_it(
    harness: LoaderHarness, tier: int
) -> None:
    tokens, keys = harness.stored(12)
    store = TwoPlaces(harness.recorded, keys)
    store.places = {key: int((number < 6) == tier) for number, key in enumerate(keys)}
    harness.loader = harness.new_loader(store, 1)
    harness.begin("a", tokens, load=False)
    harness.settle()
    harness.loader.set_load_from("a", 5)
    harness.open(*keys[:6])
    assert harness.landed() == [("a", 5)]
    assert harness.waiting() == [keys[11]]


@pytest.mark.parametrize("how", ["compute", "keep"])
def test_loader_ahead_of_its_copies_reads_nothing_that_is_not_worth_it(
    harness: LoaderHarness, how: str
) -> None:
    tokens, keys = harness.stored(12)
    harness.open(*keys)
    store = LendingTier(harness.recorded, keys[6:])
    harness.loader = harness.new_loader(store)
    harness.begin("a", tokens, load=False)
    harness.settle()
    if how == "compute":
        harness.loader.set_first_loadable("a", 4)
    harness.loader.set_load_from("a", 0 if how == "compute" else 4)
    assert sorted(harness.landed()) == [("a", 4), ("a", 5), ("a", 10), ("a", 11)]
    assert harness.read_keys() == [keys[5], keys[4]]
    harness.release()
    harness.landed()
    harness.release()
    harness.landed()
    assert store.lent == keys[:5:-1]
    assert harness.read_keys() == [keys[5], keys[4]]


def test_loader_ahead_of_its_copies_leaves_a_block_that_moved_up_in_memory(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(8)
    store = LendingTier(harness.recorded, keys[6:])
    harness.loader = harness.new_loader(store)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[5], keys[4]]
    store.keys |= set(keys[2:4])  # another prompt has read them
    harness.open(*keys)
    assert harness.read_keys() == [keys[5], keys[4], keys[1], keys[0]]
    assert store.lent == [keys[7], keys[6]]
    assert harness.news()
    harness.release()
    assert harness.landed() == [("a", 3), ("a", 2)]


def test_loader_ahead_of_its_copies_serves_the_prompts_behind(harness: LoaderHarness) -> None:
    one, other = tokens_of(0, 6), tokens_of(1, 4)
    keys, other_keys = harness.fill(one), harness.fill(other)
    harness.loader = harness.new_loader(LendingTier(harness.recorded, [*keys, other_keys[3]]))
    harness.begin("a", one)
    harness.begin("b", other)
    harness.loader.order(["a", "b"], may_use_all_buffers="a")
    assert harness.landed() == [("a", 5), ("a", 4), ("b", 3)]
    assert harness.waiting() == [other_keys[2], other_keys[1]]


def test_loader_over_memory_and_a_tier_below_reads_each_block_below_once(
    harness: LoaderHarness,
) -> None:
    """The real stores. No copy to the device ends before all of the tier below is read."""
    tokens, keys = harness.stored(24)
    layout = BlockLayout.plain(1, (("kv", (BYTES // BLOCK,)),), "uint8", BLOCK)
    frame = BlockFrame(Namespace((("layout", layout.describe()),)), layout)
    memory = HostMemorySource(64 * PAGE_BYTES).open(frame, depth=2)
    held = [key for block, key in enumerate(keys) if block // 3 % 2]
    for key in held:
        harness.io.run(memory.put(key, memoryview(bytes_of(key))), PATIENCE_S)
    harness.pool = buffer_pool(16)
    tiers = TieredStore([memory, harness.recorded], block_bytes=BYTES)
    harness.loader = harness.new_loader(tiers)
    harness.open(*keys)
    harness.begin("a", tokens)
    while len(harness.held) < 2 + len(keys) - len(held):
        harness.news()
    assert harness.read_keys() == [key for key in keys[::-1] if key not in held]
    assert [event.block for event in harness.held if keys[event.block] in held] == [23, 22]
    while len({event.block for event in harness.events[1:]}) < len(keys):
        harness.release()
        harness.news()
    harness.release()
    assert len(harness.read_keys()) == len(keys) - len(held)
    assert harness.pool.free == harness.pool.capacity
    harness.io.run(tiers.close(), PATIENCE_S)


def test_loader_blocks_that_are_not_lent_are_read(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(4)
    harness.open(*keys)
    harness.loader = harness.new_loader(LendingStore(harness.recorded, keys[2:]))
    harness.begin("a", tokens)
    assert harness.landed() == [("a", 3), ("a", 2)]
    assert harness.read_keys() == []
    harness.release()
    assert sorted(harness.landed()) == [("a", 0), ("a", 1)]
    assert harness.read_keys() == [keys[1], keys[0]]


@pytest.mark.parametrize("error", [StoreUnavailable("closed"), ValueError("a bug")])
def test_loader_store_that_fails_to_lend_is_read(harness: LoaderHarness, error: Exception) -> None:
    tokens, keys = harness.stored(2)
    harness.open(*keys)
    harness.loader = harness.new_loader(LendingStore(harness.recorded, keys, error))
    harness.begin("a", tokens)
    assert sorted(harness.landed()) == [("a", 0), ("a", 1)]


def test_loader_computed_blocks_are_not_lent(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(4)
    store = LendingStore(harness.recorded, keys)
    harness.loader = harness.new_loader(store)
    harness.begin("a", tokens, load=False)
    harness.settle()
    assert store.lent == []
    harness.loader.set_first_loadable("a", 2)
    harness.loader.set_load_from("a", 0)
    harness.settle()
    assert store.lent == [keys[3], keys[2]]


@pytest.mark.parametrize("ends", [True, False])
def test_loader_shared_read_goes_on_when_one_prompt_ends_or_wants_no_more(
    harness: LoaderHarness, ends: bool
) -> None:
    tokens, keys = harness.stored(1)
    harness.begin("a", tokens)
    harness.begin("b", tokens)
    assert harness.waiting() == keys
    if ends:
        harness.loader.cancel("a")
    else:
        harness.loader.set_load_from("a", None)
    assert harness.waiting() == keys
    harness.open(*keys)
    assert harness.landed() == [("b", 0)]
    assert harness.wasted() == {}


def test_loader_prompt_wanting_a_just_cancelled_read_gets_the_block(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(1)
    harness.begin("a", tokens)
    harness.begin("b", tokens, load=False)
    assert harness.waiting() == keys
    entered, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    harness.io.post(busy)
    assert entered.wait(PATIENCE_S)
    # The I/O thread does both in one iteration of its loop.
    harness.loader.cancel("a")
    harness.loader.set_load_from("b", 0)
    go_on.set()
    harness.open(*keys)
    assert harness.landed() == [("b", 0)]
    assert bytes(harness.held[0].host_block.buffer.view) == bytes_of(keys[0])


def test_loader_prompt_wanting_a_just_failed_read_gets_its_own_result(
    harness: LoaderHarness,
) -> None:
    tokens, keys = harness.stored(1)
    store = HookedStore(harness.recorded)
    harness.loader = harness.new_loader(store)
    # The other prompt wants the block before the loader handles the end of the read.
    store.at_end[keys[0]] = lambda: harness.loader.set_load_from("b", 0)
    harness.begin("a", tokens)
    harness.begin("b", tokens, load=False)
    assert harness.waiting() == keys
    harness.io.run(harness.memory.delete(keys[0]), PATIENCE_S)
    harness.open(*keys)
    assert Lost("b", 0, "missing") in harness.news()
    assert harness.pool.free == harness.pool.capacity


# ---- reads that are under way ----


def test_loader_under_way_shows_the_bytes_of_each_open_read(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(3)
    store = TellingStore(harness.recorded)
    harness.loader = harness.new_loader(store)
    assert harness.loader.under_way("a") == {}
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[2], keys[1]]
    readings = harness.loader.under_way("a")
    assert readings.keys() == {2, 1}, "block 0 waits for its turn"
    assert not any(reading.is_coming for reading in readings.values())
    store.told[keys[2]](0)
    store.told[keys[2]](8)
    assert (readings[2].is_coming, readings[2].has(8), readings[2].has(9)) == (True, True, False)
    assert not readings[1].is_coming
    harness.open(keys[2])
    assert harness.loader.under_way("a").keys() == {1, 0}
    assert readings[2].wait_whole(NOW_S)
    assert harness.landed() == [("a", 2)]
    assert harness.held[0].host_block.buffer is readings[2].buffer


def test_loader_prompts_sharing_a_read_see_the_same_reading(
    harness_of: Callable[..., LoaderHarness],
) -> None:
    harness = harness_of(depth=4)
    tokens, keys = harness.stored(2)
    harness.begin("a", tokens)
    harness.begin("b", tokens)
    harness.waiting()
    readings = harness.loader.under_way("a")
    assert readings.keys() == {1, 0}
    assert harness.loader.under_way("b") == readings
    harness.loader.set_first_loadable("a", 1)
    harness.settle()
    assert harness.loader.under_way("a").keys() == {1}
    assert harness.loader.under_way("b") == readings, "for b it goes on"
    harness.loader.cancel("a")
    assert harness.loader.under_way("a") == {}
    harness.settle()
    assert harness.loader.under_way("b") == readings
    harness.open(*keys)
    assert harness.loader.under_way("b") == {}
    assert all(reading.wait_whole(NOW_S) for reading in readings.values())
    assert sorted(harness.landed()) == [("b", 0), ("b", 1)]


def test_loader_prompt_joining_a_read_sees_its_bytes(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(1)
    store = TellingStore(harness.recorded)
    harness.loader = harness.new_loader(store)
    harness.begin("a", tokens)
    harness.settle()
    store.told[keys[0]](0)
    store.told[keys[0]](8)
    harness.begin("b", tokens)
    harness.settle()
    assert harness.loader.under_way("b")[0].has(8)
    harness.open(*keys)
    harness.begin("c", tokens)
    assert ("c", 0) in harness.landed()
    assert harness.loader.under_way("c") == {}, "what is there is not read again"


@dataclass(frozen=True, slots=True)
class End:
    """What the thread finds that is woken by the end of a read."""

    reading: BlockRead
    whole: bool
    news: list[LoaderEvent]
    free: int  # buffers


@pytest.fixture
def ends(harness: LoaderHarness, monkeypatch: pytest.MonkeyPatch) -> list[End]:
    def end(reading: BlockRead, *, whole: bool) -> None:
        real(reading, whole=whole)
        found.append(End(reading, whole, harness.loader.drain(), harness.pool.free))

    found: list[End] = []
    real = BlockRead.end
    # No thread that waits for the end would look soon enough to see a wrong order.
    monkeypatch.setattr(BlockRead, "end", end)
    return found


def test_loader_landed_event_is_queued_before_a_whole_read_ends(
    harness: LoaderHarness, ends: list[End]
) -> None:
    tokens, keys = harness.stored(1)
    harness.begin("a", tokens)
    harness.begin("b", tokens)
    harness.waiting()
    harness.news()
    reading = harness.loader.under_way("a")[0]
    harness.open(*keys)
    (end,) = ends
    assert (end.reading, end.whole) == (reading, True)
    first, second = end.news
    assert isinstance(first, Fetched)
    assert isinstance(second, Fetched)
    assert (first.load_id, second.load_id) == ("a", "b")
    assert first.host_block is second.host_block
    assert first.host_block.buffer is reading.buffer
    assert bytes(reading.buffer.view) == bytes_of(keys[0])
    harness.held += [first, second]


@pytest.mark.parametrize("how", ["missing", "broken", "compute", "end"])
def test_loader_failed_read_frees_its_buffer_only_after_its_end(
    harness: LoaderHarness, ends: list[End], how: str
) -> None:
    """What is there means nothing. But it is nobody else's, as long as somebody may copy it."""
    tokens, keys = harness.stored(1)
    if how == "broken":
        harness.loader = harness.new_loader(BrokenStore(harness.memory, lookups=False))
    elif how == "missing":
        harness.faulty.fail(keys[0], BlockMissing("gone"))
    harness.begin("a", tokens)
    harness.settle()
    if how == "compute":
        harness.loader.set_first_loadable("a", 1)
    elif how == "end":
        harness.loader.cancel("a")
    harness.settle()
    (end,) = ends
    assert not end.whole
    assert end.free == harness.pool.capacity - 1
    assert harness.pool.free == harness.pool.capacity
    assert harness.loader.under_way("a") == {}
    assert not any(isinstance(event, Fetched) for event in [*end.news, *harness.news()])


# ---- buffers ----


def test_loader_without_free_buffers_pauses_until_release(
    harness_of: Callable[..., LoaderHarness],
) -> None:
    harness = harness_of(buffers=3, depth=8)
    tokens, keys = harness.stored(7)
    harness.open(*keys)
    harness.begin("a", tokens)
    order = []
    for expected in (3, 3, 1):
        got = harness.landed()
        order += [b for _, b in got]
        assert len(got) == expected
        assert harness.pool.free == 3 - expected
        assert harness.landed() == []
        harness.release()
    assert order == [6, 5, 4, 3, 2, 1, 0]
    assert harness.pool.free == 3


def test_loader_lost_block_frees_its_buffer_for_the_next(
    harness_of: Callable[..., LoaderHarness],
) -> None:
    harness = harness_of(buffers=1, depth=1)
    tokens, keys = harness.stored(3)
    harness.faulty.fail(keys[2], BlockMissing("gone"))
    harness.faulty.fail(keys[1], BlockMissing("gone"))
    harness.open(*keys)
    harness.begin("a", tokens)
    assert harness.landed() == [("a", 0)]
    assert [e.block for e in harness.events if isinstance(e, Lost)] == [2, 1]


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("first", [False, True])
def test_loader_freed_buffer_wakes_the_io_thread_only_if_a_read_waits_for_it(
    harness_of: Callable[..., LoaderHarness], first: bool, buffers: int
) -> None:
    """A wake-up takes the interpreter from the scheduler thread, and the end of the read under way
    looks for the buffer."""
    harness = harness_of(buffers=buffers)
    tokens, keys = harness.stored(6)
    harness.begin("a", tokens)
    harness.loader.order(["a"], may_use_all_buffers="a" if first else None)
    assert harness.waiting() == [keys[5], keys[4]]
    harness.open(keys[5])
    assert harness.landed() == [("a", 5)]
    under_way = [keys[4], keys[3]] if buffers == 3 else [keys[4]]
    assert harness.waiting() == under_way
    (event,) = harness.held
    before = harness.io.posts
    event.host_block.release(used=True)
    harness.held.clear()
    assert harness.io.posts - before == (1 if buffers == 2 else 0)
    assert harness.waiting() == [keys[4], keys[3]]
    assert stats_of(harness.loader).staged_blocks == 0


def test_loader_freed_blocks_of_idle_links_are_let_go(
    harness: LoaderHarness,
) -> None:
    """What they refer to, such as memory that a store lent, may be about to be unmapped."""
    tokens = tokens_of(0, 1)
    (key,) = harness.fill(tokens)
    harness.begin("a", tokens)
    harness.open(key)
    assert harness.landed() == [("a", 0)]
    (event,) = harness.held
    gone = weakref.ref(event.host_block)
    harness.events.clear()
    del event
    harness.release()
    assert gone() is None


def test_loader_waiting_prompts_leave_buffers_for_the_one_that_may_fill_them(
    harness_of: Callable[..., LoaderHarness],
) -> None:
    harness = harness_of(buffers=8, depth=2)
    a, b = tokens_of(0, 10), tokens_of(1, 10)
    keys = [*harness.fill(a), *harness.fill(b)]
    harness.open(*keys)
    harness.begin("a", a)
    harness.begin("b", b)
    assert [rid for rid, _ in harness.landed()] == ["a"] * 6
    assert harness.pool.free == 2
    harness.loader.order(["b", "a"], may_use_all_buffers=None)
    assert harness.landed() == []
    harness.loader.order(["b", "a"], may_use_all_buffers="b")
    assert harness.landed() == [("b", 9), ("b", 8)]
    assert harness.pool.free == 0
    harness.release()
    assert [rid for rid, _ in harness.landed()] == ["b"] * 8
    harness.loader.order(["nobody"], may_use_all_buffers="nobody")


def test_loader_keep_limits_new_reads_to_later_blocks(
    harness_of: Callable[..., LoaderHarness],
) -> None:
    harness = harness_of(depth=1)
    tokens = tokens_of(0, 6)
    harness.open(*harness.fill(tokens)[4:])
    harness.begin("a", tokens)
    harness.loader.set_load_from("a", 3)
    assert harness.waiting() == [keys_of(tokens)[3]]  # block 3 is under way
    harness.open(*keys_of(tokens))
    assert harness.landed() == [("a", 5), ("a", 4), ("a", 3)]
    harness.loader.set_load_from("a", 1)  # compute turned out to be slower
    assert harness.landed() == [("a", 2), ("a", 1)]


def test_loader_keep_none_cancels_reads_and_a_later_keep_resumes(
    harness_of: Callable[..., LoaderHarness],
) -> None:
    harness = harness_of(depth=2)
    tokens, keys = harness.stored(6)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[5], keys[4]]
    harness.loader.set_load_from("a", None)
    assert harness.waiting() == []
    assert harness.pool.free == harness.pool.capacity
    harness.loader.set_first_loadable("a", 2)
    harness.loader.set_load_from("a", 0)
    assert harness.waiting() == [keys[5], keys[4]]
    harness.open(*keys)
    assert sorted(harness.landed()) == [("a", 2), ("a", 3), ("a", 4), ("a", 5)]


def test_loader_keep_none_then_zero_at_once_lands_every_block(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(2)
    harness.begin("a", tokens)
    assert harness.waiting() == keys[::-1]
    began = list(harness.loader.under_way("a").values())
    harness.loader.set_load_from("a", None)
    harness.loader.set_load_from("a", 0)
    harness.settle()
    harness.open(*keys)
    assert sorted(harness.landed()) == [("a", 0), ("a", 1)]
    assert len(began) == 2


# ---- when the scheduler thread should look ----


@pytest.mark.parametrize("last", ["arrives", "is lost", "is not worth loading"])
def test_loader_wakes_for_the_lookup_and_for_the_last_block(
    harness_of: Callable[..., LoaderHarness], last: str
) -> None:
    harness = harness_of(depth=2)
    tokens, keys = harness.stored(4)
    if last == "is lost":
        harness.faulty.fail(keys[0], BlockMissing("x"))
    harness.begin("a", tokens)
    if last == "is not worth loading":
        harness.loader.set_load_from("a", 1)
    harness.settle()
    assert harness.wakes == 1
    harness.open(keys[3], keys[2])
    assert harness.wakes == 1
    harness.open(keys[1])
    harness.open(keys[0])
    assert harness.wakes == 2


def test_loader_wakes_for_each_prompt_whose_loads_are_over(harness: LoaderHarness) -> None:
    one, other = tokens_of(0, 2), tokens_of(1, 2)
    keys = harness.fill(one)
    harness.fill(other)
    harness.begin("a", one)
    harness.begin("b", other)
    harness.settle()
    assert harness.wakes == 2
    for key in keys:
        harness.open(key)
    assert harness.wakes == 3
    for key in keys_of(other):
        harness.open(key)
    assert harness.wakes == 4


# ---- failures ----


@pytest.mark.parametrize("error", [BlockMissing, BlockCorrupt, StoreUnavailable])
def test_loader_store_error_reports_the_block_lost_with_its_reason(
    harness: LoaderHarness, error: type[StoreError]
) -> None:
    tokens, keys = harness.stored(3)
    harness.faulty.fail(keys[1], error("x"))
    harness.open(*keys)
    harness.begin("a", tokens)
    assert sorted(harness.landed()) == [("a", 0), ("a", 2)]
    assert Lost("a", 1, error.reason) in harness.events
    assert harness.failures() == {error.reason: 1}
    harness.release()
    assert harness.pool.free == harness.pool.capacity
    assert harness.wasted() == {}


def test_loader_failed_shared_read_is_reported_to_every_prompt(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(1)
    harness.begin("a", tokens)
    harness.begin("b", tokens)
    assert harness.waiting() == keys
    harness.memory.blocks.clear()
    harness.open(*keys)
    lost = [e for e in harness.news() if isinstance(e, Lost)]
    assert lost == [Lost("a", 0, "missing"), Lost("b", 0, "missing")]
    assert harness.failures() == {"missing": 1}
    # Whoever comes now is told anew; nobody boards a read that has failed.
    harness.begin("c", tokens)
    assert harness.news() == [looked_up("c", (False,))]


def test_store_breaking_its_contract_loses_only_its_blocks(harness: LoaderHarness) -> None:
    tokens = tokens_of(0, 3)
    harness.fill(tokens)
    harness.loader = harness.new_loader(BrokenStore(harness.memory, lookups=False))
    harness.begin("a", tokens)
    events = harness.news()
    assert [e.block for e in events if isinstance(e, Lost)] == [2, 1, 0]
    assert harness.failures() == {"internal": 3}
    assert harness.pool.free == harness.pool.capacity


@pytest.mark.parametrize("broken", [True, False])
def test_loader_failed_lookup_finds_no_blocks(harness: LoaderHarness, broken: bool) -> None:
    tokens = tokens_of(0, 3)
    if broken:
        harness.loader = harness.new_loader(BrokenStore(harness.memory))
    else:
        harness.io.run(harness.memory.close(), PATIENCE_S)
    harness.begin("a", tokens)
    assert harness.news() == [looked_up("a", (False,) * 3)]
    assert harness.failures() == {"lookup": 1}


# ---- ending ----


def test_loader_end_cancels_reads_and_reports_nothing_more(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(4)
    harness.begin("a", tokens)
    assert harness.waiting() == [keys[3], keys[2]]
    harness.loader.cancel("a")
    assert harness.waiting() == []
    assert harness.wasted() == {"cancelled": 2 * BYTES}
    assert harness.pool.free == harness.pool.capacity
    harness.open(*keys)
    assert harness.landed() == []
    harness.loader.cancel("a")
    harness.loader.set_first_loadable("a", 3)


def test_loader_end_before_the_lookup_begins_reads_nothing(harness: LoaderHarness) -> None:
    tokens = tokens_of(0, 3)
    harness.fill(tokens)
    go_on = threading.Event()
    harness.io.post(go_on.wait, PATIENCE_S)
    harness.begin("a", tokens)
    harness.loader.cancel("a")
    go_on.set()
    assert harness.read_keys() == []
    assert harness.pool.free == harness.pool.capacity


def test_loader_end_during_the_lookup_reads_nothing(harness: LoaderHarness) -> None:
    class SlowLookup(WrapperStore):
        async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
            asked.set()
            await answer.wait()
            return await super().contains(keys)

    tokens = tokens_of(0, 3)
    harness.fill(tokens)
    asked, answer = threading.Event(), asyncio.Event()
    harness.loader = harness.new_loader(SlowLookup(harness.recorded))
    harness.begin("a", tokens)
    assert asked.wait(PATIENCE_S)
    harness.loader.cancel("a")
    harness.io.post(answer.set)
    assert harness.read_keys() == []
    assert stats_of(harness.loader).reads == 0
    assert harness.pool.free == harness.pool.capacity


def test_staged_block_is_used_if_any_holder_used_it_and_freed_by_the_last() -> None:
    for uses in ([True, False], [False, True], [False, False]):
        pool = buffer_pool(1)
        buffer = pool.take()
        assert buffer is not None
        freed: list[HostBlock] = []
        staged = HostBlock(buffer, pool.give, freed.append)
        assert staged.hold()
        staged.release(used=uses[0], reason="overtaken")
        assert freed == []
        assert pool.free == 0
        staged.release(used=uses[1], reason="memory")
        assert freed == [staged]
        assert staged.used is any(uses)
        assert staged.reason == ("overtaken" if uses == [False, True] else "memory")
        assert pool.free == 1
        assert not staged.hold()


@pytest.mark.parametrize("reason", ["overtaken", "in_tree", "peer", "memory", "ended"])
def test_loader_unused_blocks_are_counted_as_wasted_by_reason(
    harness: LoaderHarness, reason: str
) -> None:
    tokens = tokens_of(0, 3)
    harness.open(*harness.fill(tokens))
    harness.begin("a", tokens)
    assert len(harness.landed()) == 3
    harness.held.pop().host_block.release(used=True)
    harness.release(used=False, reason=reason)
    assert harness.wasted() == {reason: 2 * BYTES}


def test_loader_replaced_store_serves_only_later_prompts(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(2)
    harness.begin("a", tokens)
    assert len(harness.waiting()) == 2
    other = RecordingStore(MemoryStore())
    harness.loader.use(other, [2])
    harness.begin("b", tokens)
    assert looked_up("b", (False, False)) in harness.news()
    harness.open(*keys)
    assert sorted(harness.landed()) == [("a", 0), ("a", 1)]
    assert other.keys_of("get") == []


def test_loader_prompt_after_a_swap_does_not_wait_for_reads_of_the_store_before(
    harness: LoaderHarness,
) -> None:
    """That store may hang, and have been replaced for that."""
    tokens, keys = harness.stored(4)
    harness.begin("a", tokens)
    assert len(harness.waiting()) == 2  # as many as may be under way
    harness.loader.use(harness.memory, [2])
    harness.begin("b", tokens)
    assert harness.landed() == [("b", 3), ("b", 2), ("b", 1), ("b", 0)]
    assert stats_of(harness.loader).reads == 2
    harness.loader.cancel("a")
    harness.release()
    assert harness.waiting() == []
    assert stats_of(harness.loader) == LoaderStats(1, 0, 0)
    assert harness.pool.free == harness.pool.capacity
    harness.open(*keys)


def test_loader_closed_finishes_open_reads_and_starts_no_more(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(4)
    harness.begin("a", tokens)
    assert len(harness.waiting()) == 2
    harness.loader.close()
    harness.open(*keys)
    assert len(harness.landed()) == 2
    assert len(harness.read_keys()) == 2


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "compute", "order", "keep", "end", "open", "news", "release", "lose"]
        ),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(max_examples=120)
@given(actions=ACTIONS, buffers=st.integers(1, 5), depth=st.integers(1, 4))
def test_loader_random_actions_return_every_buffer(
    actions: list[tuple[str, int, int]], buffers: int, depth: int
) -> None:
    with LoaderHarness(buffers=buffers, depth=depth) as harness:
        drive_loader(harness, [harness.fill(tokens) for tokens in PROMPTS], actions)


@settings(max_examples=120)
@given(
    actions=ACTIONS,
    buffers=st.integers(1, 5),
    depth=st.integers(1, 3),
    lent=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5))),
)
def test_loader_random_actions_with_lent_blocks_return_all_of_them(
    actions: list[tuple[str, int, int]], buffers: int, depth: int, lent: set[tuple[int, int]]
) -> None:
    with LoaderHarness(buffers=buffers, depth=depth) as harness:
        keys = [harness.fill(tokens) for tokens in PROMPTS]
        store = LendingTier(harness.recorded, [keys[who][block] for who, block in lent])
        harness.loader = harness.new_loader(store, depth)
        drive_loader(harness, keys, actions)
        assert Counter(store.lent) == Counter(store.given_back)
        assert store.most <= depth * len(PROMPTS)


PROMPTS = [tokens_of(n, 6, shared=3) for n in range(3)]


def drive_loader(
    harness: LoaderHarness, keys: list[list[BlockKey]], actions: list[tuple[str, int, int]]
) -> None:
    live: set[int] = set()
    first = [0, 0, 0]
    readings: set[BlockRead] = set()
    for action, who, number in actions:
        rid = str(who)
        if action == "begin" and who not in live:
            live.add(who)
            first[who] = number // 2
            harness.begin(rid, PROMPTS[who], first=first[who])
        elif action == "compute":
            first[who] = max(first[who], number)
            harness.loader.set_first_loadable(rid, number)
        elif action == "order":
            harness.loader.order([rid, *map(str, live - {who})], may_use_all_buffers=rid)
        elif action == "keep":
            harness.loader.set_load_from(rid, number)
        elif action == "end":
            live.discard(who)
            harness.loader.cancel(rid)
        elif action == "open":
            harness.io.loop.call_soon_threadsafe(harness.slow.release, keys[who][number])
        elif action == "lose":
            harness.faulty.lose(keys[who][number])
        elif action == "news":
            harness.news()
        else:
            harness.release(used=bool(number % 2))
        readings |= seen_under_way(harness, map(str, live))
        assert 0 <= harness.pool.free <= harness.pool.capacity
    # Whoever is left still gets all that it may have: no wake-up is lost.
    for tokens_keys in keys:
        harness.open(*tokens_keys)
    for who in live:
        harness.loader.set_load_from(str(who), 0)
    for _ in range(20):
        harness.news()
        harness.release()
    for event in harness.events:
        if isinstance(event, Fetched):
            assert event.load_id in "012"
    for who in live:
        told = {
            e.block for e in harness.events if not isinstance(e, LookedUp) and e.load_id == str(who)
        }
        assert set(range(first[who], 6)) <= told
    for who in live:
        harness.loader.cancel(str(who))
    harness.news()
    harness.release()
    assert harness.pool.free == harness.pool.capacity
    assert harness.slow.waiting == []
    assert stats_of(harness.loader) == LoaderStats(prompts=0, reads=0, staged_blocks=0)
    assert all(reading.is_over for reading in readings), "a thread would wait forever"


def seen_under_way(harness: LoaderHarness, rids: Iterable[str]) -> set[BlockRead]:
    """All reads that are under way for these prompts; none of them is over."""

    async def look() -> set[BlockRead]:
        found = {each for rid in rids for each in harness.loader.under_way(rid).values()}
        assert not any(reading.is_over for reading in found)
        assert len(found) <= stats_of(harness.loader).reads
        return found

    return harness.io.run(look(), PATIENCE_S)


class StuckStore(WrapperStore):
    """A source that trickles: its reads begin, and never end."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.stuck = False
        self.asked = 0
        self.until_s = 0.0  # the caller of the last read waits so long

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        self.asked += 1
        self.until_s = read_until_s.get()
        if self.stuck:
            assert progress is not None
            progress(0)
            progress(1)
            await asyncio.Event().wait()
        return await self.inner.get_into(key, out, progress)


def test_loader_stuck_source_loses_all_blocks_of_its_prompt_as_late(
    harness: LoaderHarness,
) -> None:
    d = harness
    stuck = StuckStore(d.memory)
    d.loader = d.new_loader(stuck, least_limit_s=0.0)
    known, tokens = tokens_of(1, 2), tokens_of(2, 40)
    d.fill(known)
    d.fill(tokens)
    d.begin("known", known)
    while len(d.held) < 2:
        d.news()
    d.release()
    stuck.stuck, stuck.asked = True, 0
    began_s = time.monotonic()
    d.begin("late", tokens)
    lost: list[Lost] = []
    while len(lost) < 40:
        lost += [event for event in d.news() if isinstance(event, Lost)]
    d.settle()  # the buffers come back after that
    assert sorted(event.block for event in lost) == list(range(40))
    assert {event.reason for event in lost} == {"late"}
    assert stuck.asked == 2  # one wait for all, not one for each two blocks
    assert began_s < stuck.until_s <= time.monotonic()
    assert d.failures() == {"late": 2}
    assert d.pool.free == d.pool.capacity


def test_loader_stuck_tier_loses_its_own_blocks_only(harness: LoaderHarness) -> None:
    tokens, keys = harness.stored(12)
    store = TwoPlaces(harness.recorded, keys)
    store.places = {key: int(number >= 6) for number, key in enumerate(keys)}
    harness.loader = harness.new_loader(store, 1, least_limit_s=0.0)
    harness.loader.recall([LoadCost(0.0, 0.001), LoadCost(0.0, 60.0)])
    harness.begin("a", tokens)
    lost: list[Lost] = []
    while len(lost) < 6:
        lost += [event for event in harness.news() if isinstance(event, Lost)]
    assert [(event.block, event.reason) for event in lost] == [
        (block, "late") for block in (5, 0, 1, 2, 3, 4)
    ]
    harness.open(*keys[6:])
    assert harness.waiting() == []
    assert len(harness.landed()) == 6


class HungStore(WrapperStore):
    """Reads of `hung` do not end before `answered`, also if they are cancelled: a thread waits for
    a disk."""

    def __init__(self, inner: Store, hung: Iterable[BlockKey], *, raises: bool) -> None:
        """Args: raises: a cancelled read raises its cancellation at its end, as it should."""
        super().__init__(inner)
        self.hung = set(hung)
        self.raises = raises
        self.answered = asyncio.Event()
        self.at_read: Callable[[], object] = lambda: None
        self.until_s = 0.0  # the caller of the last read waits so long

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        if key in self.hung:
            self.until_s = read_until_s.get()
            self.at_read()
            answer = asyncio.ensure_future(self.answered.wait())
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError:
                await wait_uncancelled(answer)
                if self.raises:
                    raise
        return await self.inner.get_into(key, out, progress)


def hung_after(d: LoaderHarness, known: array, tokens: array, *, raises: bool) -> HungStore:
    """Have the harness load `known`, so that its reads have a short limit. Those of `tokens` hang
    in the store, which is returned."""
    d.fill(known)
    hung = HungStore(d.memory, d.fill(tokens), raises=raises)
    d.loader = d.new_loader(hung, least_limit_s=0.0)
    d.begin("known", known)
    while len(d.held) < 2:
        d.news()
    d.release()
    return hung


@pytest.mark.parametrize("raises", [True, False])
def test_loader_read_that_cannot_be_cancelled_is_late_and_keeps_only_its_buffer(
    harness: LoaderHarness, raises: bool
) -> None:
    d = harness
    known, tokens = tokens_of(1, 2), tokens_of(2, 40)
    hung = hung_after(d, known, tokens, raises=raises)
    d.loader.cancel("known")
    wakes = d.wakes
    d.begin("late", tokens)
    lost: list[Lost] = []
    while len(lost) < 40:
        lost += [event for event in d.news() if isinstance(event, Lost)]
    d.settle()
    assert {event.reason for event in lost} == {"late"}
    assert d.wakes > wakes + 1  # at the lookup, and at the end
    assert d.failures() == {"late": 2}
    assert (stats_of(d.loader).reads, d.pool.free) == (0, d.pool.capacity - 2)
    d.begin("again", known)  # nothing stands in its way
    while len(d.held) < 2:
        d.news()
    d.release()
    d.io.post(hung.answered.set)
    while d.pool.free < d.pool.capacity:
        d.settle()
    assert d.news() == []
    assert d.failures() == {"late": 2}
    assert stats_of(d.loader) == LoaderStats(prompts=2, reads=0, staged_blocks=0)


def test_loader_cancelled_read_is_not_late_as_well(harness: LoaderHarness) -> None:
    d = harness
    tokens = tokens_of(2, 1)
    hung = hung_after(d, tokens_of(1, 2), tokens, raises=True)
    begun = threading.Event()

    def end_prompt() -> None:
        d.loader.cancel("gone")  # takes effect before the limit, however short that is
        begun.set()

    hung.at_read = end_prompt
    d.begin("gone", tokens)
    assert begun.wait(PATIENCE_S)
    while time.monotonic() < hung.until_s:
        d.settle()
    d.settle()
    d.io.post(hung.answered.set)
    while d.pool.free < d.pool.capacity:
        d.settle()
    assert d.failures() == {}
    assert d.wasted() == {"cancelled": BYTES}


def test_loader_wasted_bytes_are_counted_in_encoded_size(harness: LoaderHarness) -> None:
    """Not as large as they are once decoded."""
    tokens = tokens_of(0, 2)
    first, last = harness.fill(tokens)
    harness.counters.add("read_blocks", 2)  # as what decodes them counts
    harness.counters.add("read_bytes", 20)
    harness.begin("a", tokens)
    harness.open(last)
    assert harness.landed() == [("a", 1)]
    harness.release(used=False, reason="overtaken")
    assert harness.wasted() == {"overtaken": 10}
    assert harness.waiting() == [first]
    harness.loader.cancel("a")
    harness.settle()
    assert harness.wasted() == {"overtaken": 10, "cancelled": 10}
