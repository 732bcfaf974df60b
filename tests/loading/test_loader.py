"""The loader on its real thread, with stores that the test holds by the hand."""

import asyncio
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_cake.core.buffers import BufferPool, TellBytes
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreError, StoreUnavailable
from sglang_cake.core.io_thread import IoThread
from sglang_cake.core.keys import BlockKey, Digest, KeyChain, KeySeed
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.load_events import Found, Landed, LoaderEvent, Lost
from sglang_cake.loading.loader import Loader, Prompt
from sglang_cake.loading.reading import Reading
from sglang_cake.loading.staging import StagedBlock
from sglang_cake.stores.base import Store
from sglang_cake.stores.memory_store import MemoryStore
from sglang_cake.testing.faulty import FaultyStore, PassingStore, RecordingStore, SlowStore

BLOCK, BYTES, PATIENCE_S = 4, 32, 60.0
NOW_S = 0.0  # long ago: who waits until then does not wait
SEED = KeySeed(Digest(b"n" * 32))


@dataclass(slots=True, eq=False)
class HostBytes:
    data: bytearray

    @property
    def view(self) -> memoryview:
        return memoryview(self.data)


def tokens_of(name: int, blocks: int, shared: int = 0) -> array:
    """The first `shared` blocks are alike for every name."""
    own = range(1000 * (name + 1), 1000 * (name + 1) + (blocks - shared) * BLOCK)
    return array("q", [*range(shared * BLOCK), *own])


def keys_of(tokens: array) -> list[BlockKey]:
    return KeyChain(SEED, BLOCK).of(tokens)


def bytes_of(key: BlockKey) -> bytes:
    return bytes(key)[:BYTES].ljust(BYTES, b".")


class BrokenStore(PassingStore):
    """Raises what no store may raise."""

    def __init__(self, inner: Store, *, reads: bool = True, lookups: bool = True) -> None:
        super().__init__(inner)
        self.reads, self.lookups = reads, lookups

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self.lookups:
            raise ZeroDivisionError
        return await super().contains(keys)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        raise ZeroDivisionError


class TellingStore(PassingStore):
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


class Desk:
    """A loader, its store, and what came of it."""

    def __init__(self, *, buffers: int = 8, depth: int = 2) -> None:
        self.io = IoThread("test-io")
        self.memory = MemoryStore()
        self.slow = SlowStore(self.memory)
        self.faulty = FaultyStore(self.slow)
        self.store = RecordingStore(self.faulty)
        self.pool = BufferPool(buffers, lambda: HostBytes(bytearray(BYTES)))
        self.counters = Counters()
        self.loader = self.new_loader(self.store, depth)
        self.events: list[LoaderEvent] = []
        self.held: list[Landed] = []

    def new_loader(self, store: Store, depth: int = 2) -> Loader:
        prior = LoadCost(0.0, 1.0, depth=depth)
        return Loader(store, self.pool, self.io, self.counters, queue_depth=depth, prior=prior)

    # ---- the test's hands ----

    def fill(self, tokens: array, *, without: Sequence[int] = ()) -> list[BlockKey]:
        async def put() -> None:
            for block, key in enumerate(keys):
                if block not in without:
                    await self.memory.put(key, memoryview(bytes_of(key)))

        keys = keys_of(tokens)
        self.io.run(put(), PATIENCE_S)
        return keys

    def begin(
        self, rid: str, tokens: array, *, first: int = 0, least: int = 1, load: bool = True
    ) -> None:
        prompt = Prompt(
            rid=rid,
            chain=KeyChain(SEED, BLOCK),
            tokens=tokens,
            blocks=len(tokens) // BLOCK,
            first_block=first,
            worth=lambda stored, cost: load and sum(stored[first:]) >= least,
        )
        self.loader.begin(prompt)

    def settle(self) -> None:
        """Return when nothing more happens in the I/O thread by itself."""

        async def quiet() -> None:
            for _ in range(30):
                await asyncio.sleep(0)

        self.io.run(quiet(), PATIENCE_S)

    def open(self, *keys: BlockKey) -> None:
        async def release() -> None:
            self.slow.release(*keys)

        self.io.run(release(), PATIENCE_S)
        self.settle()

    def waiting(self) -> list[BlockKey]:
        self.settle()
        return list(self.slow.waiting)

    def news(self) -> list[LoaderEvent]:
        self.settle()
        events = self.loader.drain()
        for event in events:
            if isinstance(event, Landed):
                self.held.append(event)
        self.events += events
        return events

    def landed(self) -> list[tuple[str, int]]:
        """Landed since the last call of `news` or `landed`; the bytes must be right."""
        found = [e for e in self.news() if isinstance(e, Landed)]
        return [(e.rid, e.block) for e in found]

    def release(self, *, used: bool = True, reason: str = "ended") -> None:
        for event in self.held:
            event.staged.release(used=used, reason=reason)
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
        return self.store.keys_of("get")


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.io.close()


@pytest.fixture
def desk_of() -> Iterator[Callable[..., Desk]]:
    made = []

    def make(**options: int) -> Desk:
        made.append(Desk(**options))
        return made[-1]

    yield make
    for one in made:
        one.io.close()


# ---- one prompt ----


def test_the_last_block_comes_first_and_the_queue_has_its_depth(desk: Desk) -> None:
    tokens = tokens_of(0, 5)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert desk.waiting() == [keys[4], keys[3]]
    assert desk.news() == [Found("a", (True,) * 5)]
    desk.open(keys[3])
    assert desk.waiting() == [keys[4], keys[2]]
    desk.open(*keys)
    assert desk.read_keys() == keys[::-1]
    assert sorted(desk.landed()) == [("a", b) for b in range(5)]
    for event in desk.held:
        assert bytes(event.staged.buffer.view) == bytes_of(keys[event.block])
    desk.release()
    desk.loader.end("a")
    desk.settle()
    assert desk.pool.free == desk.pool.capacity
    assert desk.wasted() == {}
    assert desk.loader.cost.block_s != 1.0


class TwoPlaces(PassingStore):
    """Every third block of a prompt is in another place."""

    def __init__(self, inner: Store, keys: Sequence[BlockKey]) -> None:
        super().__init__(inner)
        self.places = {key: number % 3 // 2 for number, key in enumerate(keys)}

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return [self.places[key] for key in keys]


def test_a_prompt_is_asked_for_with_the_costs_of_where_it_lies(desk: Desk) -> None:
    tokens = tokens_of(0, 6)
    keys = desk.fill(tokens)
    desk.loader = desk.new_loader(TwoPlaces(desk.store, keys))
    desk.loader.recall([LoadCost(0.0, 0.5), LoadCost(0.0, 30.0)])
    asked: list[LoadCost] = []

    def worth(stored: Sequence[bool], cost: LoadCost) -> bool:
        asked.append(cost)
        return True

    desk.loader.begin(Prompt("a", KeyChain(SEED, BLOCK), tokens, 6, 0, worth))
    desk.settle()
    assert asked[0].block_s == pytest.approx((4 * 0.5 + 2 * 30.0) / 6)
    assert desk.loader.cost_of("a") == asked[0]  # nothing has landed yet
    assert desk.waiting() == [keys[5], keys[4]]
    desk.open(keys[5])  # from the slow place, in no time
    known = [cost.block_s for cost in desk.loader.costs if cost]
    assert known == [0.5, 30.0]  # one block says little
    desk.open(*keys)
    assert sorted(desk.landed()) == [("a", b) for b in range(6)]
    desk.release()
    assert desk.loader.cost_of("b") == desk.loader.cost  # of a prompt that is not there


class Broken(PassingStore):
    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return []


def test_a_store_that_does_not_know_where_blocks_are_is_not_read(desk: Desk) -> None:
    desk.loader = desk.new_loader(Broken(desk.store))
    desk.fill(tokens_of(0, 6))
    desk.begin("a", tokens_of(0, 6))
    assert desk.news() == [Found("a", (False,) * 6)]
    assert desk.failures() == {"lookup": 1}


def test_what_compute_has_passed_is_not_paid_for(desk: Desk) -> None:
    tokens = tokens_of(0, 6)
    keys = desk.fill(tokens)
    store = TwoPlaces(desk.store, keys)
    store.places = {key: int(number >= 3) for number, key in enumerate(keys)}
    desk.loader = desk.new_loader(store)
    desk.loader.recall([LoadCost(0.0, 0.5), LoadCost(0.0, 30.0)])
    desk.begin("a", tokens)
    assert desk.waiting() == [keys[5], keys[4]]
    assert desk.loader.cost_of("a").block_s == pytest.approx((3 * 0.5 + 3 * 30.0) / 6)
    desk.loader.fence("a", 3)
    desk.open(keys[5])
    assert desk.loader.cost_of("a").block_s == pytest.approx(30.0)


def test_only_what_is_stored_and_allowed_is_read(desk: Desk) -> None:
    tokens = tokens_of(0, 6)
    keys = desk.fill(tokens, without=[3])
    desk.open(*keys)
    desk.begin("a", tokens, first=2)
    assert desk.news()[0] == Found("a", (True, True, True, False, True, True))
    assert desk.read_keys() == [keys[5], keys[4], keys[2]]


@pytest.mark.parametrize(("least", "load"), [(4, True), (5, False)])
def test_too_little_is_not_worth_it(desk: Desk, least: int, load: bool) -> None:
    tokens = tokens_of(0, 6)
    desk.open(*desk.fill(tokens, without=[0]))
    desk.begin("a", tokens, first=2, least=least)
    assert desk.news()[0] == Found("a", (False, *[True] * 5))
    assert len(desk.read_keys()) == (4 if load else 0)


def test_a_lookup_alone_reads_nothing(desk: Desk) -> None:
    tokens = tokens_of(0, 3)
    desk.fill(tokens)
    desk.begin("a", tokens, load=False)
    assert desk.news() == [Found("a", (True,) * 3)]
    assert desk.read_keys() == []


# ---- the fence ----


def test_the_fence_stops_what_is_under_way_and_what_was_to_come(desk: Desk) -> None:
    tokens = tokens_of(0, 6)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert desk.waiting() == [keys[5], keys[4]]
    desk.loader.fence("a", 5)
    assert desk.waiting() == [keys[5]]
    assert desk.wasted() == {"cancelled": BYTES}
    desk.open(*keys)
    assert desk.landed() == [("a", 5)]
    assert desk.read_keys() == [keys[5], keys[4]]
    desk.loader.fence("a", 2)  # a fence never goes back
    assert desk.read_keys() == [keys[5], keys[4]]


def test_no_read_starts_behind_the_fence_even_in_the_narrowest_gap(desk: Desk) -> None:
    """The loader has taken the next block up and not begun to read it when the fence rises."""
    tokens = tokens_of(0, 4)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert desk.waiting() == [keys[3], keys[2]]
    entered, go_on = threading.Event(), threading.Event()

    def turn() -> None:
        desk.loader._depth = 3
        desk.loader._pump()  # takes block 1 up; its task runs after this turn
        entered.set()
        assert go_on.wait(PATIENCE_S)

    desk.io.post(turn)
    assert entered.wait(PATIENCE_S)
    taken_up = desk.loader.under_way("a")[1]
    desk.loader.fence("a", 2)
    go_on.set()
    assert desk.read_keys() == [keys[3], keys[2]]
    assert desk.loader.under_way("a").keys() == {3, 2}
    assert not taken_up.wait_whole(time.monotonic() + PATIENCE_S)
    desk.loader.end("a")
    desk.settle()
    assert desk.pool.free == desk.pool.capacity


def test_a_read_cancelled_before_it_began_gives_its_buffer_back(desk: Desk) -> None:
    tokens = tokens_of(0, 4)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert desk.waiting() == [keys[3], keys[2]]
    lane = desk.loader._by_rid["a"]

    def turn() -> None:
        desk.loader._depth = 3
        desk.loader._pump()  # takes block 1 up ...
        taken_up.append(lane.readings[1])
        lane.fence = 2
        desk.loader._trim(lane)  # ... and cancels it before its task has run at all

    taken_up: list[Reading] = []
    desk.io.post(turn)
    assert desk.read_keys() == [keys[3], keys[2]]
    assert desk.loader.under_way("a").keys() == {3, 2}
    assert not taken_up[0].wait_whole(time.monotonic() + PATIENCE_S)
    assert desk.pool.free == desk.pool.capacity - 2
    assert desk.wasted() == {}  # nothing was read
    desk.loader.end("a")
    desk.settle()
    assert desk.pool.free == desk.pool.capacity


# ---- shared blocks ----


def test_two_prompts_share_one_read(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(depth=4)
    a, b = tokens_of(0, 3, shared=2), tokens_of(1, 3, shared=2)
    keys = desk.fill(a)
    desk.fill(b)
    desk.open(keys[2], keys_of(b)[2])
    desk.begin("a", a)
    desk.begin("b", b)
    assert sorted(desk.landed()) == [("a", 2), ("b", 2)]
    assert sorted(desk.waiting()) == sorted([keys[0], keys[1]])
    desk.open(*keys)
    assert sorted(desk.landed()) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert len(desk.read_keys()) == 4
    for event in desk.held:
        keys_there = keys if event.rid == "a" else keys_of(b)
        assert bytes(event.staged.buffer.view) == bytes_of(keys_there[event.block])
    assert desk.pool.free == desk.pool.capacity - 4
    desk.release()
    assert desk.pool.free == desk.pool.capacity


def test_bytes_in_staging_serve_a_later_prompt_without_a_read(desk: Desk) -> None:
    tokens = tokens_of(0, 2)
    desk.open(*desk.fill(tokens))
    desk.begin("a", tokens)
    assert len(desk.landed()) == 2
    desk.begin("b", tokens)
    assert sorted(desk.landed()) == [("b", 0), ("b", 1)]
    assert len(desk.read_keys()) == 2
    first, rest = desk.held[:2], desk.held[2:]
    for event in first:
        event.staged.release(used=False, reason="overtaken")
    for event in rest:
        event.staged.release(used=True)
    desk.settle()
    desk.held.clear()
    assert desk.wasted() == {}  # they served one of the two
    assert desk.pool.free == desk.pool.capacity
    desk.begin("c", tokens)
    assert len(desk.landed()) == 2
    assert len(desk.read_keys()) == 4  # staging holds them no more


def test_one_of_two_prompts_leaving_does_not_cancel_their_read(desk: Desk) -> None:
    tokens = tokens_of(0, 1)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    desk.begin("b", tokens)
    assert desk.waiting() == keys
    desk.loader.end("a")
    assert desk.waiting() == keys
    desk.open(*keys)
    assert desk.landed() == [("b", 0)]
    assert desk.wasted() == {}


def test_who_comes_when_the_read_was_just_cancelled_still_gets_the_block(desk: Desk) -> None:
    tokens = tokens_of(0, 1)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    desk.begin("b", tokens, load=False)
    assert desk.waiting() == keys
    late = desk.loader._by_rid["b"]

    def turn() -> None:
        """In one turn of the loop: the only waiter leaves, another prompt wants the block."""
        desk.loader._close(desk.loader._by_rid.pop("a"))
        late.keep = 0
        desk.loader._pump()

    desk.io.post(turn)
    desk.open(*keys)
    assert desk.landed() == [("b", 0)]
    assert bytes(desk.held[0].staged.buffer.view) == bytes_of(keys[0])
    desk.release()
    assert desk.pool.free == desk.pool.capacity


def test_nobody_boards_a_read_that_has_just_failed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(0, 1)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    desk.begin("b", tokens, load=False)
    assert desk.waiting() == keys
    late, give_up = desk.loader._by_rid["b"], desk.loader._give_up

    def board() -> None:
        late.keep = 0
        desk.loader._pump()

    def failing(*args: Any, **options: Any) -> None:
        if late.keep and desk.failures() == {}:
            desk.io.loop.call_soon(board)  # comes before whatever the task's end sets off
        give_up(*args, **options)

    monkeypatch.setattr(desk.loader, "_give_up", failing)
    desk.io.run(desk.memory.delete(keys[0]), PATIENCE_S)
    desk.open(*keys)
    assert Lost("b", 0, "missing") in desk.news()
    assert desk.pool.free == desk.pool.capacity


# ---- reads that are under way ----


def test_what_has_come_of_a_read_is_seen_while_it_is_under_way(desk: Desk) -> None:
    tokens = tokens_of(0, 3)
    keys = desk.fill(tokens)
    store = TellingStore(desk.store)
    desk.loader = desk.new_loader(store)
    assert desk.loader.under_way("a") == {}
    desk.begin("a", tokens)
    assert desk.waiting() == [keys[2], keys[1]]
    readings = desk.loader.under_way("a")
    assert readings.keys() == {2, 1}, "block 0 waits for its turn"
    assert not any(reading.begun for reading in readings.values())
    store.told[keys[2]](0)
    store.told[keys[2]](8)
    assert (readings[2].begun, readings[2].has(8), readings[2].has(9)) == (True, True, False)
    assert not readings[1].begun
    desk.open(keys[2])
    assert desk.loader.under_way("a").keys() == {1, 0}
    assert readings[2].wait_whole(NOW_S)
    assert desk.landed() == [("a", 2)]
    assert desk.held[0].staged.buffer is readings[2].buffer


def test_prompts_that_share_a_read_see_the_same(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(depth=4)
    tokens = tokens_of(0, 2)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    desk.begin("b", tokens)
    desk.waiting()
    readings = desk.loader.under_way("a")
    assert readings.keys() == {1, 0}
    assert desk.loader.under_way("b") == readings
    desk.loader.fence("a", 1)
    desk.settle()
    assert desk.loader.under_way("a").keys() == {1}
    assert desk.loader.under_way("b") == readings, "for b it goes on"
    desk.loader.end("a")
    assert desk.loader.under_way("a") == {}
    desk.settle()
    assert desk.loader.under_way("b") == readings
    desk.open(*keys)
    assert desk.loader.under_way("b") == {}
    assert all(reading.wait_whole(NOW_S) for reading in readings.values())
    assert sorted(desk.landed()) == [("b", 0), ("b", 1)]


def test_who_joins_a_read_sees_what_has_come_of_it(desk: Desk) -> None:
    tokens = tokens_of(0, 1)
    keys = desk.fill(tokens)
    store = TellingStore(desk.store)
    desk.loader = desk.new_loader(store)
    desk.begin("a", tokens)
    desk.settle()
    store.told[keys[0]](0)
    store.told[keys[0]](8)
    desk.begin("b", tokens)
    desk.settle()
    assert desk.loader.under_way("b")[0].has(8)
    desk.open(*keys)
    desk.begin("c", tokens)
    assert ("c", 0) in desk.landed()
    assert desk.loader.under_way("c") == {}, "what is there is not read again"


@dataclass(frozen=True, slots=True)
class End:
    """What the thread finds that is woken by the end of a read."""

    reading: Reading
    whole: bool
    news: list[LoaderEvent]
    free: int  # buffers


@pytest.fixture
def ends(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[End]:
    def end(reading: Reading, *, whole: bool) -> None:
        real(reading, whole=whole)
        found.append(End(reading, whole, desk.loader.drain(), desk.pool.free))

    found: list[End] = []
    real = Reading.end
    monkeypatch.setattr(Reading, "end", end)
    return found


def test_who_sees_a_read_end_well_finds_the_block_landed(desk: Desk, ends: list[End]) -> None:
    tokens = tokens_of(0, 1)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    desk.begin("b", tokens)
    desk.waiting()
    desk.news()
    reading = desk.loader.under_way("a")[0]
    desk.open(*keys)
    (end,) = ends
    assert (end.reading, end.whole) == (reading, True)
    first, second = end.news
    assert isinstance(first, Landed)
    assert isinstance(second, Landed)
    assert (first.rid, second.rid) == ("a", "b")
    assert first.staged is second.staged
    assert first.staged.buffer is reading.buffer
    assert bytes(reading.buffer.view) == bytes_of(keys[0])


@pytest.mark.parametrize("how", ["missing", "broken", "fence", "end"])
def test_who_sees_a_read_fail_can_still_read_its_buffer(
    desk: Desk, ends: list[End], how: str
) -> None:
    """What is there means nothing. But it is nobody else's, as long as somebody may copy it."""
    tokens = tokens_of(0, 1)
    keys = desk.fill(tokens)
    if how == "broken":
        desk.loader = desk.new_loader(BrokenStore(desk.memory, lookups=False))
    elif how == "missing":
        desk.faulty.fail(keys[0], BlockMissing("gone"))
    desk.begin("a", tokens)
    desk.settle()
    if how == "fence":
        desk.loader.fence("a", 1)
    elif how == "end":
        desk.loader.end("a")
    desk.settle()
    (end,) = ends
    assert not end.whole
    assert end.free == desk.pool.capacity - 1
    assert desk.pool.free == desk.pool.capacity
    assert desk.loader.under_way("a") == {}
    assert not any(isinstance(event, Landed) for event in [*end.news, *desk.news()])


# ---- buffers ----


def test_loading_pauses_without_buffers_and_goes_on_with_them(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(buffers=3, depth=8)
    tokens = tokens_of(0, 7)
    keys = desk.fill(tokens)
    desk.open(*keys)
    desk.begin("a", tokens)
    order = []
    for expected in (3, 3, 1):
        got = desk.landed()
        order += [b for _, b in got]
        assert len(got) == expected
        assert desk.pool.free == 3 - expected
        assert desk.landed() == []
        desk.release()
    assert order == [6, 5, 4, 3, 2, 1, 0]
    assert desk.pool.free == 3


def test_a_lost_block_gives_its_buffer_to_the_next(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(buffers=1, depth=1)
    tokens = tokens_of(0, 3)
    keys = desk.fill(tokens)
    desk.faulty.fail(keys[2], BlockMissing("gone"))
    desk.faulty.fail(keys[1], BlockMissing("gone"))
    desk.open(*keys)
    desk.begin("a", tokens)
    assert desk.landed() == [("a", 0)]
    assert [e.block for e in desk.events if isinstance(e, Lost)] == [2, 1]


def test_waiting_prompts_leave_a_reserve_to_the_one_that_is_served(
    desk_of: Callable[..., Desk],
) -> None:
    desk = desk_of(buffers=8, depth=2)
    a, b = tokens_of(0, 10), tokens_of(1, 10)
    keys = [*desk.fill(a), *desk.fill(b)]
    desk.open(*keys)
    desk.begin("a", a)
    desk.begin("b", b)
    assert [rid for rid, _ in desk.landed()] == ["a"] * 6
    assert desk.pool.free == 2
    desk.loader.order(["b", "a"])
    assert desk.landed() == [("b", 9), ("b", 8)]
    assert desk.pool.free == 0
    desk.release()
    assert [rid for rid, _ in desk.landed()] == ["b"] * 8
    desk.loader.order(["nobody"])


def test_what_compute_will_reach_first_is_not_begun(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(depth=1)
    tokens = tokens_of(0, 6)
    desk.open(*desk.fill(tokens)[4:])
    desk.begin("a", tokens)
    desk.loader.keep("a", 3)
    assert desk.waiting() == [keys_of(tokens)[3]]  # block 3 is under way
    desk.open(*keys_of(tokens))
    assert desk.landed() == [("a", 5), ("a", 4), ("a", 3)]
    desk.loader.keep("a", 1)  # compute turned out to be slower
    assert desk.landed() == [("a", 2), ("a", 1)]


def test_what_is_not_worth_loading_now_is_stopped_and_goes_on_later(
    desk_of: Callable[..., Desk],
) -> None:
    desk = desk_of(depth=2)
    tokens = tokens_of(0, 6)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert desk.waiting() == [keys[5], keys[4]]
    desk.loader.keep("a", None)
    assert desk.waiting() == []
    assert desk.pool.free == desk.pool.capacity
    desk.loader.fence("a", 2)
    desk.loader.keep("a", 0)
    assert desk.waiting() == [keys[5], keys[4]]
    desk.open(*keys)
    assert sorted(desk.landed()) == [("a", 2), ("a", 3), ("a", 4), ("a", 5)]


def test_who_changes_their_mind_at_once_loses_no_read(desk: Desk) -> None:
    tokens = tokens_of(0, 2)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert desk.waiting() == keys[::-1]
    began = list(desk.loader.under_way("a").values())
    desk.loader.keep("a", None)
    desk.loader.keep("a", 0)
    desk.settle()
    desk.open(*keys)
    assert sorted(desk.landed()) == [("a", 0), ("a", 1)]
    assert len(began) == 2


def test_a_read_that_another_prompt_waits_for_goes_on(desk: Desk) -> None:
    tokens = tokens_of(0, 1)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    desk.begin("b", tokens)
    assert desk.waiting() == keys
    desk.loader.keep("a", None)
    desk.open(*keys)
    assert desk.landed() == [("b", 0)]


# ---- failures ----


@pytest.mark.parametrize("error", [BlockMissing, BlockCorrupt, StoreUnavailable])
def test_a_block_that_cannot_be_had_is_reported_with_its_reason(
    desk: Desk, error: type[StoreError]
) -> None:
    tokens = tokens_of(0, 3)
    keys = desk.fill(tokens)
    desk.faulty.fail(keys[1], error("x"))
    desk.open(*keys)
    desk.begin("a", tokens)
    assert sorted(desk.landed()) == [("a", 0), ("a", 2)]
    assert Lost("a", 1, error.reason) in desk.events
    assert desk.failures() == {error.reason: 1}
    desk.release()
    assert desk.pool.free == desk.pool.capacity
    assert desk.wasted() == {}


def test_everyone_who_waited_hears_of_a_loss(desk: Desk) -> None:
    tokens = tokens_of(0, 1)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    desk.begin("b", tokens)
    assert desk.waiting() == keys
    desk.memory.blocks.clear()
    desk.open(*keys)
    lost = [e for e in desk.news() if isinstance(e, Lost)]
    assert lost == [Lost("a", 0, "missing"), Lost("b", 0, "missing")]
    assert desk.failures() == {"missing": 1}
    # Whoever comes now is told anew; nobody boards a read that has failed.
    desk.begin("c", tokens)
    assert desk.news() == [Found("c", (False,))]


def test_a_store_that_breaks_its_contract_costs_blocks_only(desk: Desk) -> None:
    tokens = tokens_of(0, 3)
    desk.fill(tokens)
    desk.loader = desk.new_loader(BrokenStore(desk.memory, lookups=False))
    desk.begin("a", tokens)
    events = desk.news()
    assert [e.block for e in events if isinstance(e, Lost)] == [2, 1, 0]
    assert desk.failures() == {"internal": 3}
    assert desk.pool.free == desk.pool.capacity


@pytest.mark.parametrize("broken", [True, False])
def test_a_lookup_that_fails_finds_nothing(desk: Desk, broken: bool) -> None:
    tokens = tokens_of(0, 3)
    if broken:
        desk.loader = desk.new_loader(BrokenStore(desk.memory))
    else:
        desk.io.run(desk.memory.close(), PATIENCE_S)
    desk.begin("a", tokens)
    assert desk.news() == [Found("a", (False,) * 3)]
    assert desk.failures() == {"lookup": 1}


# ---- ending ----


def test_the_end_cancels_and_later_news_is_for_nobody(desk: Desk) -> None:
    tokens = tokens_of(0, 4)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert desk.waiting() == [keys[3], keys[2]]
    desk.loader.end("a")
    assert desk.waiting() == []
    assert desk.wasted() == {"cancelled": 2 * BYTES}
    assert desk.pool.free == desk.pool.capacity
    desk.open(*keys)
    assert desk.landed() == []
    desk.loader.end("a")
    desk.loader.fence("a", 3)


def test_an_end_before_the_lookup_answers_reads_nothing(desk: Desk) -> None:
    tokens = tokens_of(0, 3)
    desk.fill(tokens)
    go_on = threading.Event()
    desk.io.post(go_on.wait, PATIENCE_S)
    desk.begin("a", tokens)
    desk.loader.end("a")
    go_on.set()
    assert desk.read_keys() == []
    assert desk.pool.free == desk.pool.capacity


def test_an_end_during_the_lookup_reads_nothing(desk: Desk) -> None:
    class SlowLookup(PassingStore):
        async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
            asked.set()
            await answer.wait()
            return await super().contains(keys)

    tokens = tokens_of(0, 3)
    desk.fill(tokens)
    asked, answer = threading.Event(), asyncio.Event()
    desk.loader = desk.new_loader(SlowLookup(desk.store))
    desk.begin("a", tokens)
    assert asked.wait(PATIENCE_S)
    desk.loader.end("a")
    desk.io.post(answer.set)
    assert desk.read_keys() == []
    assert not desk.loader._flights
    assert desk.pool.free == desk.pool.capacity


def test_a_staged_block_is_used_if_any_holder_used_it_and_is_gone_with_the_last() -> None:
    for uses in ([True, False], [False, True], [False, False]):
        pool = BufferPool(1, lambda: HostBytes(bytearray(BYTES)))
        buffer = pool.take()
        assert buffer is not None
        freed: list[StagedBlock] = []
        staged = StagedBlock(buffer, pool, freed.append)
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
def test_bytes_in_vain_are_counted_by_reason(desk: Desk, reason: str) -> None:
    tokens = tokens_of(0, 3)
    desk.open(*desk.fill(tokens))
    desk.begin("a", tokens)
    assert len(desk.landed()) == 3
    desk.held.pop().staged.release(used=True)
    desk.release(used=False, reason=reason)
    assert desk.wasted() == {reason: 2 * BYTES}


def test_another_store_serves_prompts_that_begin_later(desk: Desk) -> None:
    tokens = tokens_of(0, 2)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert len(desk.waiting()) == 2
    other = RecordingStore(MemoryStore())
    desk.loader.use(other)
    desk.begin("b", tokens)
    assert Found("b", (False, False)) in desk.news()
    desk.open(*keys)
    assert sorted(desk.landed()) == [("a", 0), ("a", 1)]
    assert other.keys_of("get") == []


def test_a_closed_loader_reads_no_more(desk: Desk) -> None:
    tokens = tokens_of(0, 4)
    keys = desk.fill(tokens)
    desk.begin("a", tokens)
    assert len(desk.waiting()) == 2
    desk.loader.close()
    desk.open(*keys)
    assert len(desk.landed()) == 2
    assert len(desk.read_keys()) == 2


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "fence", "order", "keep", "end", "open", "news", "release", "lose"]
        ),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions=ACTIONS, buffers=st.integers(1, 5), depth=st.integers(1, 4))
def test_every_buffer_comes_back_whatever_happens(
    actions: list[tuple[str, int, int]], buffers: int, depth: int
) -> None:
    desk = Desk(buffers=buffers, depth=depth)
    try:
        play(desk, actions)
    finally:
        desk.io.close()


def play(desk: Desk, actions: list[tuple[str, int, int]]) -> None:
    prompts = [tokens_of(n, 6, shared=3) for n in range(3)]
    keys = [desk.fill(tokens) for tokens in prompts]
    live: set[int] = set()
    fence = [0, 0, 0]
    readings: set[Reading] = set()
    for action, who, number in actions:
        rid = str(who)
        if action == "begin" and who not in live:
            live.add(who)
            fence[who] = number // 2
            desk.begin(rid, prompts[who], first=fence[who])
        elif action == "fence":
            fence[who] = max(fence[who], number)
            desk.loader.fence(rid, number)
        elif action == "order":
            desk.loader.order([rid, *map(str, live - {who})])
        elif action == "keep":
            desk.loader.keep(rid, number)
        elif action == "end":
            live.discard(who)
            desk.loader.end(rid)
        elif action == "open":
            desk.io.loop.call_soon_threadsafe(desk.slow.release, keys[who][number])
        elif action == "lose":
            desk.faulty.lose(keys[who][number])
        elif action == "news":
            desk.news()
        else:
            desk.release(used=bool(number % 2))
        readings |= seen_under_way(desk)
        assert 0 <= desk.pool.free <= desk.pool.capacity
    # Whoever is left still gets all that it may have: no wake-up is lost.
    for tokens_keys in keys:
        desk.open(*tokens_keys)
    for who in live:
        desk.loader.keep(str(who), 0)
    for _ in range(20):
        desk.news()
        desk.release()
    for event in desk.events:
        if isinstance(event, Landed):
            assert event.rid in "012"
    for who in live:
        told = {e.block for e in desk.events if not isinstance(e, Found) and e.rid == str(who)}
        assert set(range(fence[who], 6)) <= told
    for who in live:
        desk.loader.end(str(who))
    desk.news()
    desk.release()
    assert desk.pool.free == desk.pool.capacity
    assert desk.slow.waiting == []
    assert not desk.loader._flights
    assert not desk.loader._staged
    assert not desk.loader._lanes
    assert all(reading._whole is not None for reading in readings), "somebody would wait forever"


def seen_under_way(desk: Desk) -> set[Reading]:
    """All reads that are under way; every prompt sees those that are made for it."""

    async def look() -> set[Reading]:
        flights = desk.loader._flights.values()
        for lane in desk.loader._lanes:
            its = {b: flight.reading for flight in flights for w, b in flight.waiters if w is lane}
            assert lane.readings == its
        assert all(flight.reading._whole is None for flight in flights)
        return {flight.reading for flight in flights}

    return desk.io.run(look(), PATIENCE_S)


class StuckStore(PassingStore):
    """A source that trickles: its reads begin, and never end."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.stuck = False
        self.asked = 0

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        self.asked += 1
        if self.stuck:
            assert progress is not None
            progress(0)
            progress(1)
            await asyncio.Event().wait()
        return await self.inner.get_into(key, out, progress)


def test_a_source_that_trickles_loses_all_that_its_prompt_had_to_load(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = desk
    stuck = StuckStore(d.memory)
    d.loader.use(stuck)
    known, tokens = tokens_of(1, 2), tokens_of(2, 40)
    d.fill(known)
    d.fill(tokens)
    d.begin("known", known)
    while len(d.held) < 2:
        d.news()
    d.release()
    monkeypatch.setattr("sglang_cake.loading.load_fits.LATE_S", 0.0)
    monkeypatch.setattr("sglang_cake.loading.load_fits.LATE_TIMES", 1e-6)
    stuck.stuck, stuck.asked = True, 0
    d.begin("late", tokens)
    lost: list[Lost] = []
    while len(lost) < 40:
        lost += [event for event in d.news() if isinstance(event, Lost)]
    assert sorted(event.block for event in lost) == list(range(40))
    assert {event.reason for event in lost} == {"late"}
    assert stuck.asked == 2  # one wait for all, not one for each two blocks
    assert d.failures() == {"late": 2}
    assert d.pool.free == d.pool.capacity


def test_bytes_loaded_in_vain_count_as_they_crossed_the_link(desk: Desk) -> None:
    """Not as large as they are once decoded."""
    tokens = tokens_of(0, 2)
    first, last = desk.fill(tokens)
    desk.counters.add("read_blocks", 2)  # as what decodes them counts
    desk.counters.add("read_bytes", 20)
    desk.begin("a", tokens)
    desk.open(last)
    assert desk.landed() == [("a", 1)]
    desk.release(used=False, reason="overtaken")
    assert desk.wasted() == {"overtaken": 10}
    assert desk.waiting() == [first]
    desk.loader.end("a")
    desk.settle()
    assert desk.wasted() == {"overtaken": 10, "cancelled": 10}
