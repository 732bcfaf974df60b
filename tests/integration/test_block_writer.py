"""The write pipeline: what is offered is stored or counted, and every buffer comes back."""

import asyncio
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
from faulty_stores import FaultyStore, RecordingStore
from polling import until

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.buffers import Buffer, BufferPool, on_page
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest, KeyChain, KeySeed, end_keys
from sglang_cake.core.threads import IoThread
from sglang_cake.integration.memory.block_saving import WriteJob, Writer
from sglang_cake.stores.base import LazyStore, RequestFacts, Store, StoredNamespace, WrapperStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME

BLOCK, BYTES, CAPACITY, PATIENCE_S = 4, 24, 6, 60.0
SEED = KeySeed(Digest(b"n" * 32))


class HeldStore(WrapperStore):
    """Puts wait for the test; remembers how many there were at a time."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.at_once, self.most = 0, 0
        self.error: Exception | None = None

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            for _ in range(10):
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            return await super().put(key, data)
        finally:
            self.at_once -= 1


class BlockWriterHarness:
    def __init__(self) -> None:
        self.io = IoThread()
        self.memory = MemoryStore()
        self.faulty = FaultyStore(self.memory)
        self.store = RecordingStore(self.faulty)
        self.counters = Counters()
        self.pool = BufferPool([Buffer(on_page(BYTES)) for _ in range(CAPACITY)])
        self.writer = Writer(self.store, self.pool, self.io, self.counters)

    def offer(
        self,
        tokens: array,
        blocks: tuple[int, ...],
        copied: "Future[None] | None" = None,
        facts: RequestFacts | None = None,
    ) -> None:
        buffers = []
        for block in blocks:
            buffer = self.writer.take()
            assert buffer is not None
            buffer.view[:] = bytes([block + 1]) * BYTES
            buffers.append(buffer)
        self.writer.offer(
            WriteJob(
                KeyChain(SEED, BLOCK),
                tokens,
                blocks,
                tuple[Buffer, ...](buffers),
                done() if copied is None else copied,
                facts,
            )
        )

    def drain(self) -> None:
        self.io.run(self.writer.drained(), PATIENCE_S)

    def count(self, name: str, label: str = "") -> int:
        return self.counters.snapshot()[name, label]

    def stored(self, store: MemoryStore | None = None) -> dict[BlockKey, bytes]:
        source = self.memory if store is None else store

        async def read() -> dict[BlockKey, bytes]:
            found = {}
            async for block in source.list_blocks():
                out = bytearray(BYTES)
                await source.get_into(block.key, memoryview(out))
                found[block.key] = bytes(out)
            return found

        return self.io.run(read(), PATIENCE_S)


def done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


@pytest.fixture
def harness() -> Iterator[BlockWriterHarness]:
    made = BlockWriterHarness()
    yield made
    made.io.close()


TOKENS = array("q", range(5 * BLOCK))
KEYS = KeyChain(SEED, BLOCK).of(TOKENS)


def test_block_writer_offered_blocks_are_stored_under_their_keys(
    harness: BlockWriterHarness,
) -> None:
    harness.offer(TOKENS[: 3 * BLOCK], (0, 2))
    harness.offer(TOKENS, (3, 4))
    harness.drain()
    assert harness.stored() == {KEYS[b]: bytes([b + 1]) * BYTES for b in (0, 2, 3, 4)}
    assert harness.count("stored_blocks") == 4
    assert harness.pool.free == CAPACITY


class FirstStore(RecordingStore):
    """Asks which blocks begin a prompt."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.firsts: list[BlockKey] = []

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        self.firsts.append(key)
        return await self.put(key, data)


def test_block_writer_first_block_of_a_prompt_is_marked(harness: BlockWriterHarness) -> None:
    store = FirstStore(harness.memory)
    harness.writer.use(store)
    harness.offer(TOKENS[: 3 * BLOCK], (0, 2))
    harness.offer(TOKENS, (3, 4))
    harness.drain()
    assert store.firsts == [KEYS[0]]
    assert set(harness.stored()) == {KEYS[block] for block in (0, 2, 3, 4)}


def test_block_writer_block_offered_twice_is_counted_once(harness: BlockWriterHarness) -> None:
    harness.offer(TOKENS, (1,))
    harness.offer(TOKENS, (1,))
    harness.drain()
    assert harness.count("stored_blocks") == 1
    assert harness.pool.free == CAPACITY


def test_block_writer_full_queue_is_counted_and_drains(harness: BlockWriterHarness) -> None:
    copied: Future[None] = Future()
    harness.offer(TOKENS, (0, 1, 2, 3, 4), copied)
    assert harness.writer.take() is not None
    assert harness.writer.take() is None
    assert harness.writer.take() is None
    harness.writer.give_up(2)
    assert harness.count("unstored_blocks", "queue_full") == 2
    copied.set_result(None)
    harness.drain()
    assert harness.pool.free == CAPACITY - 1
    assert harness.count("stored_blocks") == 5


def test_block_writer_block_is_not_stored_before_its_copy_completes(
    harness: BlockWriterHarness,
) -> None:
    copied: Future[None] = Future()
    harness.offer(TOKENS, (0, 1), copied)
    harness.offer(TOKENS, (2,))  # a job that is ready does not wait for one that is not
    while not harness.stored():
        harness.io.run(harness.store.contains([]), PATIENCE_S)
    harness.io.run(
        harness.store.contains([]), PATIENCE_S
    )  # its buffer is given back in the same turn
    assert list(harness.stored()) == [KEYS[2]]
    assert harness.pool.free == CAPACITY - 2
    copied.set_result(None)
    harness.drain()
    assert len(harness.stored()) == 3


def test_block_writer_failed_copy_is_counted_and_not_stored(harness: BlockWriterHarness) -> None:
    copied: Future[None] = Future()
    copied.set_exception(RuntimeError("the device is gone"))
    harness.offer(TOKENS, (0, 1), copied)
    harness.offer(TOKENS, (2,))
    harness.drain()
    assert list(harness.stored()) == [KEYS[2]]
    assert harness.store.keys_of("put") == [KEYS[2]]
    assert harness.pool.free == CAPACITY
    assert harness.counters.snapshot()["unstored_blocks", "internal"] == 2


def test_block_writer_failed_put_loses_only_its_block(harness: BlockWriterHarness) -> None:
    harness.faulty.fail(KEYS[1], StoreUnavailable("full"))
    harness.offer(TOKENS, (0, 1, 2))
    harness.drain()
    assert set(harness.stored()) == {KEYS[0], KEYS[2]}
    assert harness.count("unstored_blocks", "unavailable") == 1
    assert harness.count("stored_blocks") == 2
    assert harness.pool.free == CAPACITY


def test_store_breaking_its_contract_loses_only_its_blocks(harness: BlockWriterHarness) -> None:
    held = HeldStore(harness.memory)
    held.error = ZeroDivisionError()
    harness.writer.use(held)
    harness.offer(TOKENS, (0, 1, 2, 3))
    harness.drain()
    assert held.at_once == 0  # drained means that no put is under way, whatever went wrong
    assert harness.count("unstored_blocks", "unavailable") == 4
    assert harness.pool.free == CAPACITY


class DeafStore(HeldStore):
    """Breaks its contract when it is told of a request."""

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        raise ZeroDivisionError


def test_block_writer_store_failing_in_touched_still_gets_the_blocks(
    harness: BlockWriterHarness,
) -> None:
    harness.writer.use(DeafStore(harness.memory))
    harness.offer(TOKENS, (0, 1), facts=RequestFacts("r1", len(TOKENS)))
    harness.drain()
    assert harness.count("stored_blocks") == 2
    assert harness.pool.free == CAPACITY


@pytest.mark.parametrize(("depth", "puts"), [(1, 2), (4, 2), (6, 3)])
def test_block_writer_puts_in_flight_are_bounded_over_all_jobs(
    harness: BlockWriterHarness, depth: int, puts: int
) -> None:
    held = HeldStore(harness.memory)
    harness.writer.use(held, depth)
    harness.offer(TOKENS, (0, 1, 2))
    harness.offer(TOKENS, (3, 4))
    harness.drain()
    assert held.most == puts
    assert len(harness.stored()) == 5


def test_block_writer_replaced_store_gets_later_jobs_only(harness: BlockWriterHarness) -> None:
    go_on = threading.Event()
    other = MemoryStore()
    harness.io.post(go_on.wait, PATIENCE_S)  # the job is offered, and not yet taken in
    harness.offer(TOKENS, (0,))
    harness.writer.use(other)
    harness.offer(TOKENS, (1,))
    go_on.set()
    harness.drain()
    assert list(harness.stored()) == [KEYS[0]]
    assert list(harness.stored(other)) == [KEYS[1]]


class GatedStore(WrapperStore):
    """Puts hang until `go`."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.begun, self.go = threading.Event(), asyncio.Event()

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        self.begun.set()
        await self.go.wait()
        return await super().put(key, data)


def test_block_writer_store_that_hangs_does_not_hold_up_the_next_one(
    harness: BlockWriterHarness,
) -> None:
    hung, other = GatedStore(harness.memory), GatedStore(MemoryStore())
    harness.writer.use(hung)
    harness.offer(TOKENS, (0, 1))
    assert hung.begun.wait(PATIENCE_S)
    harness.writer.use(other)
    harness.offer(TOKENS, (3,))
    assert other.begun.wait(PATIENCE_S)
    harness.io.post(hung.go.set)
    harness.io.post(other.go.set)
    harness.drain()
    assert harness.count("stored_blocks") == 3


def test_block_writer_store_that_hangs_keeps_the_buffers_of_its_puts_and_no_others(
    harness: BlockWriterHarness,
) -> None:
    """Blocks that wait for a hung store have all buffers, so the next store would get no block."""
    hung, other = GatedStore(harness.memory), MemoryStore()
    harness.writer.use(hung)
    harness.offer(TOKENS, (0, 1, 2))
    harness.offer(TOKENS, (3, 4, 0))
    assert hung.begun.wait(PATIENCE_S)
    assert harness.writer.take() is None
    harness.writer.use(other)
    harness.io.run(harness.writer.drained(0.0), PATIENCE_S)
    until(lambda: harness.pool.free == CAPACITY - 2, "buffers come back")
    assert harness.count("unstored_blocks", "unavailable") == CAPACITY - 2
    harness.offer(TOKENS, (3, 4))
    until(lambda: harness.count("stored_blocks") == 2, "the next store gets blocks")
    assert set(harness.stored(other)) == {KEYS[3], KEYS[4]}
    harness.io.post(hung.go.set)
    harness.drain()
    assert harness.pool.free == CAPACITY


class HungSource:
    """Opens a store as the folder of a disk that is gone: not before `go`."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        self.begun.set()
        self.go.wait()
        raise StoreUnavailable("gone")

    def check(self) -> None: ...

    async def namespaces(self) -> list[StoredNamespace]:
        return []


def test_block_writer_closed_store_whose_opening_hangs_keeps_no_buffer(
    harness: BlockWriterHarness,
) -> None:
    source = HungSource()
    hung = LazyStore(source, FRAME, depth=4, close_s=0.001)
    harness.writer.use(hung)
    harness.offer(TOKENS, (0, 1, 2), facts=RequestFacts("r1", len(TOKENS)))
    harness.offer(TOKENS, (3, 4, 0))
    assert source.begun.wait(PATIENCE_S)
    harness.writer.use(MemoryStore())
    harness.io.run(harness.writer.drained(0.0), PATIENCE_S)
    harness.io.run(hung.close(), PATIENCE_S)
    until(lambda: harness.pool.free == CAPACITY, "buffers come back", PATIENCE_S)
    assert harness.count("unstored_blocks", "unavailable") == CAPACITY
    source.go.set()


def test_block_writer_drained_does_not_wait_for_jobs_offered_later(
    harness: BlockWriterHarness,
) -> None:
    old, new = GatedStore(harness.memory), GatedStore(MemoryStore())
    harness.writer.use(old)
    harness.offer(TOKENS, (0,))
    waits = threading.Event()

    async def drain() -> None:
        waits.set()
        await harness.writer.drained()

    drained = asyncio.run_coroutine_threadsafe(drain(), harness.io.loop)
    assert waits.wait(PATIENCE_S)
    harness.writer.use(new)
    harness.offer(TOKENS, (1,))
    assert new.begun.wait(PATIENCE_S)
    harness.io.post(old.go.set)
    drained.result(PATIENCE_S)
    assert list(harness.stored()) == [KEYS[0]]
    harness.io.post(new.go.set)
    harness.drain()


def test_block_writer_without_a_store_counts_offered_blocks(harness: BlockWriterHarness) -> None:
    harness.writer.use(None)
    harness.offer(TOKENS, (0, 1))
    harness.drain()
    assert harness.count("unstored_blocks", "unavailable") == 2
    assert harness.pool.free == CAPACITY


def test_block_writer_drained_waits_for_every_offered_job(harness: BlockWriterHarness) -> None:
    harness.drain()  # nothing to wait for
    for block in range(5):
        harness.offer(TOKENS, (block,))
    harness.drain()
    assert len(harness.stored()) == 5


# ---- end states ----


def _offer_end(
    harness: BlockWriterHarness, tokens: array, count: int, end_rank: tuple[int, int] = (0, 1)
) -> list[BlockKey]:
    """Keys of the end blocks; block `i` is full of byte `i`."""
    buffers = harness.writer.take_all(count)
    assert buffers is not None
    for index, buffer in enumerate(buffers):
        buffer.view[:] = bytes([index]) * BYTES
    copied: Future[None] = Future()
    copied.set_result(None)
    chain = KeyChain(SEED, BLOCK, end_rank=end_rank)
    job = WriteJob(chain, tokens, tuple(range(count)), tuple(buffers), copied, of_end=True)
    harness.writer.offer(job)
    harness.io.run(harness.writer.drained(), PATIENCE_S)
    assert harness.pool.free == CAPACITY
    return end_keys(chain.of(tokens)[-1], count, *end_rank)


@pytest.mark.parametrize("end_rank", [(0, 1), (1, 2)])
def test_writer_puts_the_first_end_block_of_its_rank_last(
    harness: BlockWriterHarness, end_rank: tuple[int, int]
) -> None:
    keys = _offer_end(harness, array("q", range(2 * BLOCK)), 4, end_rank)
    assert [key for _, key in harness.store.calls][-1] == keys[0]
    assert [harness.memory.blocks[key] for key in keys] == [bytes([i]) * BYTES for i in range(4)]


def test_writer_incomplete_end_is_not_to_be_found(harness: BlockWriterHarness) -> None:
    tokens = array("q", range(2 * BLOCK))
    keys = end_keys(KeyChain(SEED, BLOCK).of(tokens)[-1], 4)
    harness.faulty.fail(keys[2], StoreUnavailable("gone"))
    _offer_end(harness, tokens, 4)
    assert keys[0] not in harness.memory.blocks
    assert harness.counters.snapshot()["unstored_blocks", "unavailable"] == 2


def test_writer_gives_all_buffers_of_an_end_or_none(harness: BlockWriterHarness) -> None:
    assert harness.writer.take_all(CAPACITY + 1) is None
    assert harness.pool.free == CAPACITY
    taken = harness.writer.take_all(CAPACITY)
    assert taken is not None
    assert harness.writer.take_all(1) is None
    harness.writer.put_back(taken)
    assert harness.pool.free == CAPACITY
