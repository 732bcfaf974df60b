"""One tier of a tiered store: its circuit breakers, its copies in the background, its calls."""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_cake.core.buffers import Buffer, BufferPool, TellBytes, copy_in_pieces
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.threads import DaemonPool, check_stop, run_stoppable
from sglang_cake.stores.base import LazyStore, LentBlock, Store, StoreStats, puts_at_once
from sglang_cake.stores.circuit_breaker import SLACK, Breaker
from sglang_cake.stores.link_speed import LinkSpeed
from sglang_cake.stores.memory.block_memory import Unwritten
from sglang_cake.stores.memory.host_memory_store import HostMemoryStore

logger = logging.getLogger(__name__)
T = TypeVar("T")

FAILURES_IN_A_ROW = 3
UNKNOWN_S = 2.0  # usual time of a read whose link was never measured
PROBE_S = 30.0  # time for a block that is read in the background
MOST_KEPT = 1 << 16  # blocks in a queue whose bytes stay in a tier in memory


class _KeptCopy:
    """As `Unwritten`, of a copy in a buffer."""

    def __init__(self, buffer: Buffer, size_bytes: int, buffers: BufferPool) -> None:
        self._buffer = buffer
        self._size_bytes = size_bytes
        self._buffers = buffers

    def pin(self) -> memoryview:
        return self._buffer.view[: self._size_bytes]

    def release(self) -> None:
        self._buffers.give(self._buffer)


class CopyQueue:
    """Blocks to be written to one tier in the background, after a put or to promote them.

    If a tier in memory has a block, its bytes stay there until they are written; MOST_KEPT bounds
    these blocks. Other blocks are copied to a buffer when they are offered: reading them back later
    would slow down loads. Without a free buffer a block is not copied. For one event loop.

    Attributes:
        buffers: each holds one block.
    """

    def __init__(
        self,
        write: Callable[[BlockKey, memoryview | None], Awaitable[object]],
        buffers: BufferPool,
        threads: DaemonPool,
        at_once: int,
    ) -> None:
        """Args:
        write: stores one block in the tier; must not raise. None: the block was evicted before it
            could be written.
        threads: copy the bytes.
        at_once: how many blocks are written at once.
        """
        self._write = write
        self.buffers = buffers
        self._threads = threads
        self._places = asyncio.Semaphore(at_once)
        self._filling: set[BlockKey] = set()  # being encoded, or copied into a buffer
        self._jobs: dict[BlockKey, asyncio.Task[None]] = {}  # waiting, or being written
        self._waiting: dict[BlockKey, Unwritten | _KeptCopy] = {}

    @property
    def pending(self) -> int:
        return len(self._filling) + len(self._jobs)

    @property
    def waiting(self) -> int:
        """Those of `pending` that are not being written yet."""
        return len(self._filling) + len(self._waiting)

    async def offer(self, key: BlockKey, form: Callable[[], Awaitable[memoryview]]) -> bool:
        """Queue a block; False if no buffer is free.

        Args:
            form: gives the payload; called only if a buffer is free. The payload is not used after
                the return.

        Raises: the errors of `form`; StoreUnavailable once the threads are shut down.
        Cancellation: returns once the payload is not used any more.
        """
        if key in self._jobs or key in self._filling:
            return True
        buffer = self.buffers.take()
        if buffer is None:
            return False
        self._filling.add(key)
        try:
            data = await form()
            await run_stoppable(
                self._threads,
                lambda stop: copy_in_pieces(buffer.view, data, lambda: check_stop(stop)),
            )
            wanted = key in self._filling
        except BaseException:
            self.buffers.give(buffer)
            raise
        finally:
            self._filling.discard(key)
        if not wanted:
            self.buffers.give(buffer)
            return True
        self._start(key, _KeptCopy(buffer, data.nbytes, self.buffers))
        return True

    def keep(self, key: BlockKey, block: Unwritten) -> bool:
        """Queue a block that a tier in memory keeps, and release it later; False if the queue is
        full. The block replaces a waiting one with the same key, which may be evicted by now."""
        if (before := self._waiting.get(key)) is not None:
            self._waiting[key] = block
            before.release()
            return True
        queued = key in self._jobs or key in self._filling
        if queued or len(self._jobs) >= MOST_KEPT:
            block.release()
            return queued
        self._start(key, block)
        return True

    def _start(self, key: BlockKey, block: Unwritten | _KeptCopy) -> None:
        self._waiting[key] = block
        task = asyncio.ensure_future(self._run(key))
        self._jobs[key] = task
        task.add_done_callback(lambda task: self._done(key))

    async def forget(self, key: BlockKey) -> None:
        """Drop the copy of a block. After the return no copy of it is waiting or being written."""
        self._filling.discard(key)
        task = self._jobs.get(key)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self, patience_s: float) -> int:
        """Go on for at most `patience_s`, and wait as long for the writes that are then cancelled.
        Returns how many these are. Writes that do not end keep their blocks."""
        if self._jobs:
            await asyncio.wait(self._jobs.values(), timeout=patience_s)
        left = list(self._jobs.values())
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=patience_s)
        return len(left)

    async def _run(self, key: BlockKey) -> None:
        async with self._places:
            block = self._waiting.pop(key)
            try:
                await self._write(key, block.pin())
            finally:
                block.release()

    def _done(self, key: BlockKey) -> None:
        del self._jobs[key]
        block = self._waiting.pop(key, None)
        if block is not None:  # the task was cancelled before it could write
            block.release()


@dataclass(slots=True)
class TierCounts:
    """Events in one tier since it was opened."""

    read_blocks: int = 0
    read_bytes: int = 0  # payload of `read_blocks`
    missing_blocks: int = 0  # reads of blocks that were not there
    corrupt_blocks: int = 0
    failed_calls: int = 0  # without an answer, or with a wrong one
    late_answers: int = 0  # lookups that were given up
    put_blocks: int = 0  # new blocks, by a put or in the background
    put_bytes: int = 0  # payload of `put_blocks`
    moved_up_blocks: int = 0  # queued for promotion from a lower tier
    full_blocks: int = 0  # refused by the tier with StoreFull
    queue_full_blocks: int = 0  # not copied in the background: no free buffer
    evicted_blocks: int = 0  # evicted from a tier in memory before they were copied
    left_out_blocks: int = 0  # not copied: the tier was left out
    dropped_blocks: int = 0  # not copied: the store was closed, or the block deleted
    left_out: int = 0  # how often the tier was left out


class Tier:
    """A store with its circuit breakers, its link and its queue of copies. For one event loop.

    Lookups, reads and writes have a breaker each: a disk that is full or read-only goes on serving
    reads, and lookups that work say nothing about reads. A breaker decides which calls the tiered
    store makes. It stops no call: a block is deleted from a tier that is left out, too.

    Methods that have the name of a method of `Store` do the same. Any other failure is a
    StoreUnavailable.

    Attributes:
        asking: the breaker of lookups.
        given_up: running calls whose result is not awaited any more.
        missed: blocks that were not written in the background, oldest first; see `TieredStore`.
        stats_call: the last call for statistics.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        buffers: BufferPool,
        threads: DaemonPool,
        clock: Callable[[], float],
        copied: Callable[["Tier", BlockKey], None],
        missed: Callable[["Tier", BlockKey], None],
        depth: int,
    ) -> None:
        """Args:
        index: position among the tiers; 0 is the fastest.
        copied: called when a block was written in the background, or promoted.
        missed: called when a block could not be written in the background.
        depth: how many reads at once its link needs.
        """
        self.store = store
        self.index = index
        self._clock = clock
        self._copied = copied
        self._missed = missed
        self.asking = _new_breaker()
        self.reading = _new_breaker()
        self.writing = _new_breaker()
        self.speed = LinkSpeed(clock)
        self.link = self.speed.read
        self.counts = TierCounts()
        self.given_up: set[asyncio.Task[Any]] = set()
        self.missed: OrderedDict[BlockKey, None] = OrderedDict()
        self.stats_call: asyncio.Task[StoreStats] | None = None
        self._has_complained = False
        self.copies = CopyQueue(self._write_copy, buffers, threads, puts_at_once(depth))

    @property
    def bit(self) -> int:
        """This tier as a set of tiers."""
        return 1 << self.index

    @property
    def serves(self) -> bool:
        """Whether neither lookups nor reads are left out."""
        return not self.given_up and self.asking.is_closed and self.reading.is_closed

    def may_serve(self, now_s: float) -> bool:
        """Whether the tier serves, or a probe is due."""
        return self.may_ask(now_s) and self.reading.may_call(now_s)

    def may_ask(self, now_s: float) -> bool:
        """Whether it may be asked. After a call was given up, it is not asked until that call has
        ended."""
        return not self.given_up and self.asking.may_call(now_s)

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._watched(self.asking, self._contains(keys))

    async def _contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = await self.store.contains(keys)
        if len(found) != len(keys):
            raise StoreUnavailable(
                f"tier {self.index + 1}: {len(found)} answers to {len(keys)} keys"
            )
        return found

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        started_s = self._clock()
        self.link.started(out.nbytes)
        rate = self.speed.bytes_per_s()
        usual_s = UNKNOWN_S if rate is None else SLACK * self.link.bytes_under_way / rate
        try:
            size_bytes = await self._watched(
                self.reading, self.store.get_into(key, out, progress), usual_s=usual_s
            )
        except BlockMissing:
            self.counts.missing_blocks += 1
            raise
        except BlockCorrupt:
            self.counts.corrupt_blocks += 1
            raise
        finally:
            self.link.ended(out.nbytes)
        self.link.transferred(size_bytes, started_s, self._clock())
        self.counts.read_blocks += 1
        self.counts.read_bytes += size_bytes
        return size_bytes

    async def probe(self, key: BlockKey) -> None:
        """Read a block, to find out whether reads work again; without a free buffer, nothing."""
        buffer = self.copies.buffers.take()
        if buffer is None:
            return
        ticket = self.reading.begin(self._clock())
        try:
            async with asyncio.timeout(PROBE_S):
                await self.get_into(key, buffer.view)
        except TimeoutError:
            self._failed(self.reading, ticket, f"no block in {PROBE_S:.0f} s")
        except StoreError as error:
            logger.debug("tier %d: the probe failed: %s", self.index + 1, error)
        finally:
            self.copies.buffers.give(buffer)

    def lend(self, key: BlockKey) -> LentBlock | None:
        """As `Store.lend`; None also while the tier is left out."""
        memory = self.memory
        if memory is None or not self.serves:
            return None
        lent = memory.lend(key)
        if lent is not None:
            self.counts.read_blocks += 1
            self.counts.read_bytes += lent.buffer.view.nbytes
        return lent

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        started_s = self._clock()
        try:
            fresh = await self._watched(self.writing, self.store.put(key, data))
        except StoreFull:
            self.counts.full_blocks += 1
            raise
        if fresh:
            self.speed.written.transferred(data.nbytes, started_s, self._clock())
            self.counts.put_blocks += 1
            self.counts.put_bytes += data.nbytes
        return fresh

    @property
    def memory(self) -> HostMemoryStore | None:
        """The store of a tier in memory, if it is open."""
        return memory_store_of(self.store)

    async def promote(self, memory: HostMemoryStore, key: BlockKey, data: memoryview) -> bool:
        fresh = await self._watched(self.writing, memory.promote(key, data))
        if fresh:
            self.counts.put_blocks += 1
            self.counts.put_bytes += data.nbytes
            self._copied(self, key)
        return fresh

    async def delete(self, key: BlockKey) -> None:
        await self._watched(self.writing, self.store.delete(key))

    async def stats(self, at_most_s: float) -> StoreStats | None:
        """As `Store.stats`; None if there is no answer within `at_most_s`. A call that hangs is not
        repeated. No breaker is told: a store that has no statistics now may be read."""
        call = self.stats_call
        if call is None or call.done():
            call = self.stats_call = asyncio.ensure_future(self.store.stats())
            call.add_done_callback(lambda call: call.cancelled() or call.exception())  # retrieved
        await asyncio.wait([call], timeout=at_most_s)
        if not call.done() or call.cancelled():
            return None
        error = call.exception()
        if error is None:
            return call.result()
        if not isinstance(error, StoreError) and not self._has_complained:
            self._has_complained = True
            logger.error("tier %d broke the contract of stores", self.index + 1, exc_info=error)
        return None

    async def _write_copy(self, key: BlockKey, data: memoryview | None) -> None:
        if data is None:
            self.counts.evicted_blocks += 1
            return
        if not self.writing.may_call(self._clock()):  # left out since the block was queued
            self.counts.left_out_blocks += 1
            self._missed(self, key)
            return
        try:
            await self.put(key, data)
        except StoreError:  # it is counted; other tiers have the block
            self._missed(self, key)
        else:
            self._copied(self, key)

    def late(self, ticket: int) -> None:
        """Record a lookup that was given up. Args: ticket: `asking.ticket` when it began."""
        self.counts.late_answers += 1
        self._failed(self.asking, ticket, "it answers too late")

    async def _watched(
        self, breaker: Breaker, call: Awaitable[T], *, usual_s: float = math.inf
    ) -> T:
        """Args: usual_s: a call that is cancelled after a longer time has failed."""
        started_s = self._clock()
        ticket = breaker.begin(started_s)
        try:
            result = await call
        except asyncio.CancelledError:
            now_s = self._clock()
            if breaker.given_up(started_s, now_s, usual_s):
                self._failed(breaker, ticket, f"given up after {now_s - started_s:.1f} s")
            raise
        except (BlockMissing, StoreFull):  # these are answers
            self._succeeded(breaker, ticket)
            raise
        except StoreError as error:
            self._failed(breaker, ticket, str(error))
            raise
        except Exception as error:
            logger.exception("tier %d broke the contract of stores", self.index + 1)
            self._failed(breaker, ticket, repr(error))
            raise StoreUnavailable(f"tier {self.index + 1}: {error!r}") from error
        self._succeeded(breaker, ticket)
        return result

    def _succeeded(self, breaker: Breaker, ticket: int) -> None:
        was_closed = breaker.is_closed
        breaker.succeeded(ticket)
        if breaker.is_closed and not was_closed:
            logger.info("tier %d is back for %s", self.index + 1, self._calls_of(breaker))

    def _failed(self, breaker: Breaker, ticket: int, why: str) -> None:
        self.counts.failed_calls += 1
        was_closed = breaker.is_closed
        breaker.failed(ticket, self._clock())
        if was_closed and not breaker.is_closed:
            self.counts.left_out += 1
            logger.warning(
                "tier %d is left out of %s until one of them succeeds: %s",
                self.index + 1,
                self._calls_of(breaker),
                why,
            )

    def _calls_of(self, breaker: Breaker) -> str:
        if breaker is self.writing:
            return "writes"
        return "reads" if breaker is self.reading else "lookups"


def memory_store_of(store: Store) -> HostMemoryStore | None:
    """The store in memory that `store` is or has opened."""
    opened = store.opened if isinstance(store, LazyStore) else store
    return opened if isinstance(opened, HostMemoryStore) else None


def _new_breaker() -> Breaker:
    return Breaker(failures=FAILURES_IN_A_ROW, calls_may_hang=True)
