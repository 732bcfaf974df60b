"""Puts new blocks into the store, in the background, with bounded memory.

The scheduler thread takes a write buffer for a block, has the block copied into it, and offers it.
When the copy is complete, the I/O thread hashes the key and stores the block. If all buffers are in
use until the request ends, the block is not stored, and counted: serving never waits for the store.
"""

import asyncio
import contextlib
import functools
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakSet

from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.core.counters import UNSTORED_REASONS, Counters
from sglang_cake.core.errors import StoreError, StoreUnavailable
from sglang_cake.core.io_thread import IoThread
from sglang_cake.core.keys import BlockKey, KeyChain
from sglang_cake.stores.base import USUAL_DEPTH, Store, puts_at_once
from sglang_cake.stores.request_facts import RequestFacts

logger = logging.getLogger(__name__)
WARN_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Some blocks of one request, in host buffers.

    Attributes:
        tokens: 'q': all tokens up to the end of the last block.
        copied: done when the copies into the buffers are complete; or the error of the copies.
        facts: of the request; the store gets them before the blocks.
        of_end: they are end blocks of the end at the last of `tokens`.
    """

    key_chain: KeyChain
    tokens: "array[int]"
    blocks: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    copied: "Future[None]"
    facts: RequestFacts | None = None
    of_end: bool = False


class _Puts(asyncio.Semaphore):
    """The puts into one store that are under way. For one event loop.

    Attributes: given_up: further puts are not made.
    """

    def __init__(self, depth: int) -> None:
        super().__init__(puts_at_once(depth))
        self.given_up = False

    def give_up(self) -> None:
        self.given_up = True
        self.release()  # a put that waits ends, and lets the next one in


class Writer:
    """The write pipeline. The capacity of the pool bounds the waiting blocks."""

    def __init__(
        self, store: Store | None, pool: BufferPool, io: IoThread, counters: Counters
    ) -> None:
        self._pool = pool
        self._io = io
        self._counters = counters
        self._store = store
        self._puts = _Puts(USUAL_DEPTH)
        self._former: WeakSet[_Puts] = WeakSet()  # of stores before; I/O thread only
        self._jobs: set[asyncio.Task[None]] = set()
        self._quiet_until_s = 0.0

    def take(self, *, leave: int = 0) -> Buffer | None:
        """A buffer for one block, or None if all but `leave` are in use. Scheduler thread."""
        return self._pool.take() if self._pool.free > leave else None

    def take_all(self, count: int) -> list[Buffer] | None:
        """So many buffers, or None if there are not enough. Scheduler thread."""
        taken: list[Buffer] = []
        while len(taken) < count and (buffer := self._pool.take()) is not None:
            taken.append(buffer)
        if len(taken) == count:
            return taken
        self.put_back(taken)
        return None

    def put_back(self, buffers: Sequence[Buffer]) -> None:
        """Return buffers that are not needed after all. Any thread."""
        for buffer in buffers:
            self._pool.give(buffer)

    def give_up(self, count: int) -> None:
        """So many blocks got no buffer, and are not stored."""
        if count:
            self._counters.add("unstored_blocks", count, label="queue_full")

    def offer(self, job: WriteJob) -> None:
        """Take over `job` and its buffers. Without a store, its blocks are counted as unstored.
        Scheduler thread."""
        self._io.post(self._accept, job, self._store, self._puts)

    def use(self, store: Store | None, depth: int = USUAL_DEPTH) -> None:
        """Set the store of later jobs; None: their blocks are not stored. Scheduler thread.

        Args: depth: how many reads at once its link needs.
        """
        self._io.post(self._former.add, self._puts)
        self._store = store
        self._puts = _Puts(depth)  # a store that hangs keeps its own

    async def drained(self, patience_s: float | None = None) -> None:
        """Return when all blocks that were offered before are stored or given up. I/O thread.

        Args: patience_s: after that, blocks that wait for stores before the present one are given
            up. A store that hangs keeps the buffers of the puts that have begun, and no others.
        """
        if self._jobs:
            former = list(self._former)
            _, late = await asyncio.wait(self._jobs, timeout=patience_s)
            for puts in former if late else ():
                puts.give_up()

    def _accept(self, job: WriteJob, store: Store | None, places: _Puts) -> None:
        task = asyncio.ensure_future(self._run(job, store, places))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _run(self, job: WriteJob, store: Store | None, places: _Puts) -> None:
        try:
            await asyncio.wrap_future(job.copied)
            keys = job.key_chain.of(job.tokens)
        except Exception:
            # E.g. the device is gone. Half-copied buffers must never be stored.
            logger.exception("the KV of %d blocks could not be copied", len(job.blocks))
            self._counters.add("unstored_blocks", len(job.blocks), label="internal")
            self.put_back(job.buffers)
            return
        if store is None:  # detached between a request's lookup and its last blocks
            self._counters.add("unstored_blocks", len(job.blocks), label="unavailable")
            self.put_back(job.buffers)
            return
        if job.facts is not None:
            try:
                with contextlib.suppress(StoreError):  # eviction works without the facts
                    await store.on_access(keys, job.facts)
            except Exception:
                logger.exception("a store broke its contract; it was not told of a request")
        put = functools.partial(self._put, store, places)
        if job.of_end:
            end_keys = job.key_chain.end_keys(keys[-1], len(job.buffers))
            await self._put_end(put, end_keys, job.buffers)
            return
        puts = [
            put(keys[block], buffer, first=block == 0)
            for block, buffer in zip(job.blocks, job.buffers, strict=True)
        ]
        await asyncio.gather(*puts)

    async def _put_end(
        self,
        put: Callable[[BlockKey, Buffer], Awaitable[bool]],
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
    ) -> None:
        """Put the first end block last, and only if the others are stored: a lookup that finds it
        may rely on the others."""
        pairs = zip(keys[1:], buffers[1:], strict=True)
        puts = [put(key, buffer) for key, buffer in pairs]
        if all(await asyncio.gather(*puts)):
            await put(keys[0], buffers[0])
        else:
            self._counters.add("unstored_blocks", label="unavailable")
            self._pool.give(buffers[0])

    async def _put(
        self,
        store: Store,
        places: _Puts,
        key: BlockKey,
        buffer: Buffer,
        *,
        first: bool = False,
    ) -> bool:
        """Returns whether the block is stored."""
        try:
            async with places:
                if places.given_up:
                    raise StoreUnavailable("the store was replaced, and took too long")
                put = store.put_first(key, buffer.view) if first else store.put(key, buffer.view)
                fresh = await put
            if fresh:
                self._counters.add("stored_blocks")
            return True
        except StoreError as error:
            known = error.reason in UNSTORED_REASONS
            self._counters.add("unstored_blocks", label=error.reason if known else "unavailable")
            self._warn(error)
        except Exception:
            self._counters.add("unstored_blocks", label="unavailable")
            logger.exception("a store broke its contract; a block was not stored")
        finally:
            self._pool.give(buffer)
        return False

    def _warn(self, error: StoreError) -> None:
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:  # a full disk fails every block: one warning is enough
            self._quiet_until_s = now_s + WARN_EVERY_S
            logger.warning("blocks are not stored: %s", error)
