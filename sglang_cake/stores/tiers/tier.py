"""One of several stores behind one: how it is doing, what came of its calls."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from sglang_cake.core.buffers import BufferPool, TellBytes
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import Store, StoreStats
from sglang_cake.stores.per_tier_encoding import LinkSpeed
from sglang_cake.stores.tiers.tier_copies import CopyQueue
from sglang_cake.stores.tiers.tier_health import TierHealth

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class TierCounts:
    """What happened in one tier since it was opened."""

    read_blocks: int = 0
    read_bytes: int = 0  # of them, payload
    missing_blocks: int = 0  # reads of blocks that were not there
    corrupt_blocks: int = 0
    failed_calls: int = 0  # did not answer, or wrongly
    late_answers: int = 0  # to lookups; not waited for any longer
    put_blocks: int = 0  # new ones, by a put or in the background
    put_bytes: int = 0  # of them, payload
    moved_up_blocks: int = 0  # of them, because they were read from a lower tier
    full_blocks: int = 0  # refused by the tier: no room
    queue_full_blocks: int = 0  # not copied to it in the background: no buffer
    left_out_blocks: int = 0  # not copied to it: it was left out
    dropped_blocks: int = 0  # not copied to it: the store was closed, or the block deleted
    left_out: int = 0  # times that it was


class TellOfTries:
    """A `TellBytes` of a block that is read from one tier after another, some of which may tell
    nothing."""

    def __init__(self, progress: TellBytes) -> None:
        self._progress, self._begun = progress, False

    def __call__(self, count: int) -> None:
        self._begun = True
        self._progress(count)

    def broke_off(self) -> None:
        """What was told of is not what comes next."""
        if self._begun:
            self._begun = False
            self._progress(0)


class Tier:
    """A store with its health, its link and its queue of copies. Belongs to one event loop.

    Reading (lookups, too) and writing have a health of their own: a disk that is full or read-only
    goes on serving reads.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        buffers: BufferPool,
        threads: Executor,
        clock: Callable[[], float],
        copied: Callable[["Tier", BlockKey], None],
    ) -> None:
        """Args: index: its place among the tiers, 0 is the fastest; clock: seconds; copied: called
        when the tier has a block that was copied to it in the background."""
        self.store, self.index, self._clock, self._copied = store, index, clock, copied
        self.reading, self.writing = TierHealth(), TierHealth()
        self.speed, self.counts = LinkSpeed(clock), TierCounts()
        self.link = self.speed.read
        self.copies = CopyQueue(self._write_copy, buffers, threads)

    @property
    def bit(self) -> int:
        """This tier in a set of tiers."""
        return 1 << self.index

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As in `Store`, but any failure is a StoreUnavailable."""
        found = await self._watched(self.reading, self.store.contains(keys))
        if len(found) != len(keys):
            raise self._broken(self.reading, f"{len(found)} answers to {len(keys)} keys")
        return found

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`; any other failure is a StoreUnavailable."""
        started_s = self._clock()
        self.link.started(out.nbytes)
        try:
            size_bytes = await self._watched(self.reading, self.store.get_into(key, out, progress))
        except BlockMissing:
            self.counts.missing_blocks += 1
            raise
        except BlockCorrupt:
            self.counts.corrupt_blocks += 1
            raise
        finally:
            self.link.ended(out.nbytes)
        self.link.landed(size_bytes, started_s, self._clock())
        self.counts.read_blocks += 1
        self.counts.read_bytes += size_bytes
        return size_bytes

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`; any other failure is a StoreUnavailable."""
        started_s = self._clock()
        try:
            fresh = await self._watched(self.writing, self.store.put(key, data))
        except StoreFull:
            self.counts.full_blocks += 1
            raise
        if fresh:
            self.speed.written.landed(data.nbytes, started_s, self._clock())
            self.counts.put_blocks += 1
            self.counts.put_bytes += data.nbytes
        return fresh

    async def delete(self, key: BlockKey) -> None:
        """As in `Store`; any other failure is a StoreUnavailable."""
        await self._watched(self.writing, self.store.delete(key))

    async def stats(self) -> StoreStats:
        """As in `Store`; any other failure is a StoreUnavailable."""
        return await self._watched(self.reading, self.store.stats())

    async def _write_copy(self, key: BlockKey, data: memoryview) -> None:
        if not self.writing.may_try(self._clock()):  # it went out while the block was waiting
            self.counts.left_out_blocks += 1
            return
        # A failure is counted; this tier does not have the block then, which is no harm.
        with contextlib.suppress(StoreError):
            await self.put(key, data)
            self._copied(self, key)

    def late(self) -> None:
        """A question was given up because the others had answered long ago."""
        self.counts.late_answers += 1
        self._failed(self.reading, "it answers too late", trial=not self.reading.is_well)

    async def _watched(self, health: TierHealth, call: Awaitable[T]) -> T:
        was_well, trial = health.is_well, health.begin(self._clock())
        try:
            result = await call
        except (BlockMissing, StoreFull):  # an answer
            health.succeeded()
            raise
        except StoreError as error:
            self._failed(health, str(error), trial=trial)
            raise
        except Exception as error:
            logger.exception("tier %d broke the contract of stores", self.index + 1)
            self._failed(health, repr(error), trial=trial)
            raise StoreUnavailable(f"tier {self.index + 1}: {error!r}") from error
        health.succeeded()
        if not was_well:
            logger.info("tier %d is back", self.index + 1)
        return result

    def _broken(self, health: TierHealth, message: str) -> StoreUnavailable:
        self._failed(health, message, trial=False)
        return StoreUnavailable(f"tier {self.index + 1}: {message}")

    def _failed(self, health: TierHealth, why: str, *, trial: bool) -> None:
        self.counts.failed_calls += 1
        if health.failed(self._clock(), trial=trial):
            self.counts.left_out += 1
            logger.warning("tier %d is left out until it answers again: %s", self.index + 1, why)
