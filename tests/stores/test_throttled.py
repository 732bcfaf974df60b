"""The paced link, on a clock that the test moves."""

import asyncio
import heapq
import itertools
from functools import partial

import pytest
from faulty_stores import FaultyStore, SlowStore

from sglang_cake.core.errors import BlockCorrupt, BlockMissing
from sglang_cake.stores.base import USUAL_DEPTH
from sglang_cake.stores.open_store import depths_of, parse_sources
from sglang_cake.stores.s3.s3_store import S3Source
from sglang_cake.stores.throttled import LEAST_PIECE_BYTES, ThrottledSource, ThrottledStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, LAYOUT, ProgressRecord, block_of, key_of, read

READ_S = 2.0  # what one block takes on the link of these tests


class ManualClock:
    def __init__(self):
        self.now_s = 0.0
        self.slept_s = []
        self._sleepers, self._order = [], itertools.count()

    def time(self):
        return self.now_s

    async def sleep(self, delay_s):
        self.slept_s.append(delay_s)
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + delay_s, next(self._order), woken))
        await woken

    async def advance(self, delay_s):
        """Let `delay_s` pass, waking every sleeper at its own time."""
        await settle()
        end_s = self.now_s + delay_s
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self.now_s, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self.now_s = end_s


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_depth_of_a_throttled_or_encrypted_source_is_that_of_its_store():
    urls = (
        "file:///kv?bandwidth=1GB/s,s3://bucket/kv?bandwidth=1GB/s&key_file=/key,http://host:8700"
    )
    assert depths_of(parse_sources(urls), None) == [USUAL_DEPTH, S3Source.depth, USUAL_DEPTH]
    assert depths_of(parse_sources(urls), 7) == [7, 7, 7]


def paced(inner, clock):
    return ThrottledStore(
        inner,
        bytes_per_s=LAYOUT.block_bytes / READ_S,
        block_bytes=LAYOUT.block_bytes,
        clock=clock.time,
        sleep=clock.sleep,
    )


async def paced_reads():
    """A store, its clock, `start(store, name)`, which starts a read, and when each read ended."""
    clock, inner, ended = ManualClock(), MemoryStore(), {}
    for name in range(4):
        await inner.put(key_of(name), block_of(name))

    def start(store, name):
        async def one():
            try:
                return await read(store, key_of(name))
            finally:
                ended[name] = clock.now_s

        return asyncio.create_task(one())

    return inner, clock, start, ended


async def test_throttled_store_reads_complete_in_request_order():
    inner, clock, start, ended = await paced_reads()
    store = paced(inner, clock)
    tasks = [start(store, name) for name in (2, 0, 1)]
    await clock.advance(10)
    assert ended == {2: READ_S, 0: 2 * READ_S, 1: 3 * READ_S}
    assert [await task for task in tasks] == [block_of(name) for name in (2, 0, 1)]


class Opens:
    """A source of one store."""

    def __init__(self, store):
        self.store = store

    def open(self, frame, *, depth):
        return self.store


async def test_throttled_source_stores_share_its_link():
    """As the stores of a block's slices."""
    inner, told = MemoryStore(), []
    await inner.put(key_of(0), block_of(0))
    source = ThrottledSource(Opens(inner), bytes_per_s=1e-3)
    tasks = []
    for name in ("first", "second"):
        out, store = bytearray(LAYOUT.block_bytes), source.open(FRAME, depth=1)
        reading = store.get_into(key_of(0), memoryview(out), lambda _, name=name: told.append(name))
        tasks.append(asyncio.ensure_future(reading))
        await settle()
    assert set(told) == {"first"}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_throttled_store_idle_time_is_not_saved_up():
    inner, clock, start, ended = await paced_reads()
    store = paced(inner, clock)
    await clock.advance(100)
    start(store, 0)
    start(store, 1)
    await clock.advance(10)
    assert ended == {0: 100 + READ_S, 1: 100 + 2 * READ_S}


async def test_throttled_store_time_of_the_inner_store_is_included():
    inner, clock, start, ended = await paced_reads()
    slow = SlowStore(inner)
    store = paced(slow, clock)
    for name in (0, 1):
        start(store, name)
    await slow.until_waiting(1)
    await clock.advance(READ_S / 2)
    slow.release(key_of(0))
    await clock.advance(READ_S)  # read 0 ends at READ_S, not half a READ_S later
    assert ended == {0: READ_S}
    await clock.advance(READ_S * 2)
    slow.release(key_of(1))  # slower than the link: no further wait
    await settle()
    assert ended[1] == clock.now_s


async def test_throttled_store_slow_inner_store_serves_reads_at_once():
    inner, clock, start, ended = await paced_reads()
    slow = SlowStore(inner)
    store = paced(slow, clock)
    for name in range(3):
        start(store, name)
    await slow.until_waiting(3)
    await clock.advance(3 * READ_S)
    slow.release(*map(key_of, range(3)))
    await clock.advance(10)
    assert ended == {0: 3 * READ_S, 1: 4 * READ_S, 2: 5 * READ_S}


async def test_throttled_store_sleeps_that_end_late_do_not_slow_the_link():
    inner, clock, start, ended = await paced_reads()
    store = ThrottledStore(
        inner,
        bytes_per_s=LAYOUT.block_bytes / READ_S,
        block_bytes=LAYOUT.block_bytes,
        clock=clock.time,
        sleep=lambda delay_s: clock.sleep(delay_s + READ_S / 4),
    )
    for name in range(4):
        start(store, name)
    await clock.advance(20)
    assert ended == {name: (name + 1) * READ_S + READ_S / 4 for name in range(4)}


async def test_throttled_store_read_cancelled_in_the_queue_leaves_the_inner_store():
    inner, clock, start, ended = await paced_reads()
    slow = SlowStore(inner)
    store = paced(slow, clock)
    start(store, 0)
    second = start(store, 1)
    await slow.until_waiting(2)
    second.cancel()
    await settle()
    assert second.done()
    slow.release(key_of(0))
    await clock.advance(10)
    assert ended == {0: READ_S, 1: 0.0}


async def test_throttled_store_read_cancelled_in_the_queue_takes_no_time():
    inner, clock, start, ended = await paced_reads()
    store = paced(inner, clock)
    start(store, 0)
    second = start(store, 1)
    start(store, 2)
    await clock.advance(READ_S / 2)
    second.cancel()
    await clock.advance(10)
    assert ended == {0: READ_S, 1: READ_S / 2, 2: 2 * READ_S}


async def test_throttled_store_read_cancelled_midway_frees_the_link_at_once():
    inner, clock, start, ended = await paced_reads()
    store = paced(inner, clock)
    first = start(store, 0)
    start(store, 1)
    await clock.advance(READ_S / 2)
    first.cancel()
    await clock.advance(10)
    assert ended == {0: READ_S / 2, 1: READ_S * 1.5}


@pytest.mark.parametrize(
    ("error", "cost_s"), [(BlockMissing("x"), 0.0), (BlockCorrupt("x"), READ_S)]
)
async def test_throttled_store_failed_read_takes_time_only_for_its_bytes(error, cost_s):
    inner, clock, start, ended = await paced_reads()
    faulty = FaultyStore(inner)
    faulty.fail(key_of(0), error)
    store = paced(faulty, clock)
    failed = start(store, 0)
    start(store, 1)
    await clock.advance(10)
    assert ended == {0: cost_s, 1: cost_s + READ_S}
    with pytest.raises(type(error)):
        await failed


async def test_throttled_store_puts_and_lookups_are_not_delayed():
    inner, clock, start, ended = await paced_reads()
    store = paced(inner, clock)
    start(store, 0)
    await settle()
    assert await store.put(key_of("new"), block_of("new"))
    assert await store.contains([key_of("new")]) == [True]
    await store.delete(key_of("new"))
    assert clock.now_s == 0.0
    assert ended == {}
    await clock.advance(READ_S)


# ---- what is told on the way ----

LARGE_BYTES = 4 * LEAST_PIECE_BYTES + LEAST_PIECE_BYTES // 2
BYTES_PER_S = LEAST_PIECE_BYTES / 2  # two seconds for a piece


async def large_reads():
    """A store, its clock, and `reads(name, progress)`, which begins to read a block of several
    pieces."""
    clock, inner = ManualClock(), MemoryStore()
    for name in range(2):
        await inner.put(key_of(name), memoryview(bytes([name + 1]) * LARGE_BYTES))
    store = ThrottledStore(
        SlowStore(inner),
        bytes_per_s=BYTES_PER_S,
        block_bytes=LARGE_BYTES,
        clock=clock.time,
        sleep=clock.sleep,
    )
    return store, clock, partial(LargeRead, store, clock)


class LargeRead:
    """A read, when what was told of it, and when it ended."""

    def __init__(self, store, clock, name, progress):
        self.clock, self.at_s, self.ended_s = clock, [], None
        self.out = bytearray(LARGE_BYTES)
        self.told = ProgressRecord(self.out, bytes([name + 1]) * LARGE_BYTES)
        self.task = asyncio.create_task(self._read(store, key_of(name), progress))

    async def _read(self, store, key, progress):
        try:
            await store.get_into(key, memoryview(self.out), self._came if progress else None)
        finally:
            self.ended_s = self.clock.now_s

    def _came(self, count):
        self.told(count)
        self.at_s.append(self.clock.now_s)


@pytest.mark.parametrize("late_s", [0.0, 3.0, 100.0])
async def test_throttled_store_progress_follows_the_link_speed(late_s):
    """The store itself takes `late_s`: less than the link, or more."""
    store, clock, reads = await large_reads()
    read = reads(0, True)
    await store.inner.until_waiting(1)
    await clock.advance(late_s)
    assert read.told.counts == [], "the store has nothing yet"
    store.inner.release(key_of(0))
    await clock.advance(100)
    assert read.told.wrong == []
    assert read.told.grew
    assert read.told.counts == [n * LEAST_PIECE_BYTES for n in range(5)]
    assert read.at_s == [max(late_s, n * LEAST_PIECE_BYTES / BYTES_PER_S) for n in range(5)]
    assert read.ended_s == max(late_s, LARGE_BYTES / BYTES_PER_S)


async def test_throttled_store_progress_of_the_next_read_starts_at_its_turn():
    store, clock, reads = await large_reads()
    store.inner.release(key_of(0), key_of(1))
    first, second = reads(0, True), reads(1, True)
    await clock.advance(100)
    assert second.at_s == [at_s + first.ended_s for at_s in first.at_s]
    assert second.told.grew
    assert second.told.wrong == []


@pytest.mark.parametrize("after_s", [0.5, 3.5, 8.5])
async def test_throttled_store_cancelled_read_reports_no_more_progress(after_s):
    store, clock, reads = await large_reads()
    store.inner.release(key_of(0), key_of(1))
    first, second = reads(0, True), reads(1, True)
    await clock.advance(after_s)
    first.task.cancel()
    await clock.advance(100)
    assert first.ended_s == after_s
    assert first.at_s == [2.0 * n for n in range(len(first.at_s))]
    assert first.at_s[-1] <= after_s
    assert second.at_s[0] == after_s, "it has the link at once"
    assert second.ended_s == after_s + LARGE_BYTES / BYTES_PER_S


async def test_throttled_store_read_without_progress_sleeps_once():
    store, clock, reads = await large_reads()
    store.inner.release(key_of(0))
    read = reads(0, False)
    await clock.advance(100)
    assert clock.slept_s == [LARGE_BYTES / BYTES_PER_S]
    assert read.ended_s == LARGE_BYTES / BYTES_PER_S
    assert read.told.counts == []


@pytest.mark.parametrize("error", [BlockMissing("x"), BlockCorrupt("x")])
async def test_throttled_store_failed_read_reports_no_progress(error):
    store, clock, reads = await large_reads()
    store.inner = FaultyStore(store.inner)
    store.inner.fail(key_of(0), error)
    read = reads(0, True)
    await clock.advance(100)
    with pytest.raises(type(error)):
        await read.task
    assert read.told.counts == []
