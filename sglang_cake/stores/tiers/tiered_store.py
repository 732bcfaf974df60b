"""Several stores as one, fastest first: `file:///nvme/kv,http://kv-host:8700`.

- A lookup asks all tiers at once; a block is there if any has it.
- A read takes the tier that should have the block here first (`choice`); if that one fails,
  the next that has it.
- A put goes to the first tier that takes it, and from there to the others in the background
  (`copies`); so does a block that was read from a lower tier twice (`memory`).
- A tier that fails again and again is left out, and tried again now and then (`health`).
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple
from typing import Any, TypeVar

from sglang_cake.core.buffers import BufferPool, TellBytes
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo, EvictionCounts, Store, StoreStats, TierStats
from sglang_cake.stores.event_counts import events_of
from sglang_cake.stores.per_tier_encoding import FormOf, LinkSpeed, same
from sglang_cake.stores.request_info import RequestFacts, tell
from sglang_cake.stores.tiers.tier import TellOfTries, Tier
from sglang_cake.stores.tiers.tier_choice import quickest, soonest
from sglang_cake.stores.tiers.tier_copies import PlainBuffer
from sglang_cake.stores.tiers.tier_memory import Known, PromoteOnSecondRead, TierLocations

logger = logging.getLogger(__name__)
T = TypeVar("T")
_Answer = tuple[Tier, T]

COPY_BYTES = 128 * 2**20  # host memory for each tier's copies in the background, if ever needed
MIN_COPY_BLOCKS = 2
LATE_ANSWER_S = 1.0  # how long a lookup waits for the other tiers when one has answered
DRAIN_S = 10.0  # how long `close` goes on copying

# Of several errors, the one to show: bad bytes are news, and who did not answer may have the block.
_TELLING = (StoreFull, BlockCorrupt, StoreUnavailable, BlockMissing)


class TieredStore:
    """Implements `Store`. Owns its tiers, which are closed with it. For one event loop."""

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        block_bytes: int,
        copy_bytes: int = COPY_BYTES,
        late_answer_s: float = LATE_ANSWER_S,
        drain_s: float = DRAIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: stores: fastest first; block_bytes: of one payload, at most; clock: seconds."""
        self._clock, self._late_answer_s, self._drain_s = clock, late_answer_s, drain_s
        self._block_bytes = block_bytes
        self._threads = ThreadPoolExecutor(1, "cake-tier-copy")
        blocks = max(MIN_COPY_BLOCKS, copy_bytes // block_bytes)
        self._tiers = [
            Tier(
                store,
                index,
                BufferPool(blocks, lambda: PlainBuffer(block_bytes)),
                self._threads,
                clock,
                self._copied,
            )
            for index, store in enumerate(stores)
        ]
        self._where, self._rereads = TierLocations(), PromoteOnSecondRead()
        self._strays: dict[int, asyncio.Task[Any]] = {}  # by tier; see _leave_behind
        self._deletes = 0
        self._closed = False

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._check_open()
        answers = await self._ask_all(lambda tier: tier.contains(keys))
        asked = sum(tier.bit for tier, _ in answers)
        havings = [0] * len(keys)
        for tier, found in answers:
            for place, there in enumerate(found):
                havings[place] |= tier.bit if there else 0
        for key, having in zip(keys, havings, strict=True):
            self._where.learn(key, asked=asked, having=having)
        return [having > 0 for having in havings]

    async def touched(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """Tell every tier that is well, and learn nothing of it: what a tier that listens to nobody
        does here says nothing about its health."""
        self._check_open()

        async def told(tier: Tier) -> None:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(self._late_answer_s):
                    await tell(tier.store, keys, facts)

        await asyncio.gather(*(told(tier) for tier in self._tiers if tier.reading.is_well))

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        """As `TierHints.sources`: the tiers, in their order. Of one block: the tier that a read
        takes now; of more: where they are read from when no other reads are under way."""
        queued = len(keys) == 1
        found: dict[Known, int] = {}
        for known in {self._where.of(key) for key in keys}:
            left = [tier for tier in self._tiers if not tier.bit & known.lacking]
            tier = self._next_to_read(left, known, self._block_bytes, queued=queued)
            found[known] = tier.index if tier else 0
        return [found[self._where.of(key)] for key in keys]

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        self._check_open()
        known, deletes = self._where.of(key), self._deletes
        left = [tier for tier in self._tiers if not tier.bit & known.lacking]
        told = None if progress is None else TellOfTries(progress)
        errors: list[StoreError] = []
        while left:
            tier = self._next_to_read(left, known, out.nbytes)
            if tier is None:
                errors.append(StoreUnavailable("the tiers that may have it are left out"))
                break
            left.remove(tier)
            try:
                size_bytes = await tier.get_into(key, out, told)
            except StoreError as error:
                errors.append(error)
                if told is not None:
                    told.broke_off()
                if isinstance(error, BlockMissing | BlockCorrupt):
                    self._where.learn(key, asked=tier.bit, having=0)
                continue
            self._where.learn(key, asked=tier.bit, having=tier.bit)
            if deletes == self._deletes:  # a deleted block must not come back from below
                await self._move_up(key, out[:size_bytes], tier)
            return size_bytes
        raise _most_telling(errors)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`, of the first tier that takes it. The others get it in the background."""
        return await self.put_forms(key, same(data))

    def links(self) -> list[LinkSpeed]:
        """As in `PerTierEncoding`."""
        return [tier.speed for tier in self._tiers]

    async def put_forms(self, key: BlockKey, form_of: FormOf) -> bool:
        """As in `PerTierEncoding`, and as `put`."""
        self._check_open()
        now_s = self._clock()
        usable = [tier for tier in self._tiers if tier.writing.may_try(now_s)]
        usable.sort(key=lambda tier: not tier.writing.is_well)  # a trial must not delay the put
        errors: list[StoreError] = []
        for turn, tier in enumerate(usable):
            data = await form_of(tier.index)
            try:
                fresh = await tier.put(key, data)
            except StoreError as error:
                errors.append(error)
                continue
            self._where.learn(key, asked=tier.bit, having=tier.bit)
            if fresh:
                tried = usable[: turn + 1]
                await self._copy(key, form_of, [t for t in self._tiers if t not in tried])
            return fresh
        raise _most_telling(errors or [StoreUnavailable("all tiers are left out")])

    async def delete(self, key: BlockKey) -> None:
        """As in `Store`. Goes to every tier, left out or not; fails if one of them does."""
        self._check_open()
        self._deletes += 1
        for tier in self._tiers:
            await tier.copies.forget(key)
        self._where.forget(key)
        results = await asyncio.gather(
            *(tier.delete(key) for tier in self._tiers), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """As in `Store`; a block of several tiers is listed once, as the fastest has it. If a tier
        fails, what the others have is listed before the StoreUnavailable."""
        self._check_open()
        seen: set[BlockKey] = set()
        failure: StoreError | None = None
        for tier in self._tiers:
            try:
                async for block in tier.store.list_blocks():
                    if block.key not in seen:
                        seen.add(block.key)
                        yield block
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure

    def events(self) -> Mapping[str, int]:
        """As in `Counting`, summed over the tiers."""
        total: Counter[str] = Counter()
        for tier in self._tiers:
            total.update(events_of(tier.store))
        return total

    async def stats(self) -> StoreStats:
        """Bytes are summed over the tiers that know them. How many blocks that makes is unknown:
        most are in several tiers."""
        self._check_open()
        answers = await self._ask_all(lambda tier: tier.stats())
        stats = [stats for _, stats in answers]
        by_index = {tier.index: stats for tier, stats in answers}
        used = [s.used_bytes for s in stats if s.used_bytes is not None]
        capacity = [s.capacity_bytes for s in stats if s.capacity_bytes is not None]
        counts = [astuple(s.evictions) for s in stats]
        bounded = len(capacity) == len(self._tiers)
        return StoreStats(
            used_bytes=sum(used) if used else None,
            capacity_bytes=sum(capacity) if bounded else None,
            policy=next((s.policy for s in stats if s.policy), ""),
            evictions=EvictionCounts(*map(sum, zip(*counts, strict=True))),
            tiers=tuple(
                TierStats(
                    by_index.get(tier.index),
                    tier.reading.is_well,
                    tier.writing.is_well,
                    asdict(tier.counts),
                )
                for tier in self._tiers
            ),
        )

    async def close(self) -> None:
        """Copies that wait are written for at most `drain_s`; then every tier is closed."""
        if self._closed:
            return
        self._closed = True
        try:
            copies = (tier.copies.close(self._drain_s) for tier in self._tiers)
            for tier, dropped in zip(self._tiers, await asyncio.gather(*copies), strict=True):
                tier.counts.dropped_blocks += dropped
            strays = list(self._strays.values())
            for stray in strays:
                stray.cancel()
            if strays:
                await asyncio.wait(strays, timeout=self._drain_s)
        finally:
            closing = (tier.store.close() for tier in self._tiers)
            for result in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(result, Exception):
                    logger.error("a tier could not be closed: %r", result)
            self._threads.shutdown(wait=False)

    def _next_to_read(
        self, left: list[Tier], known: Known, size_bytes: int, *, queued: bool = True
    ) -> Tier | None:
        now_s = self._clock()
        well = [tier for tier in left if tier.reading.is_well]
        having = [tier for tier in well if tier.bit & known.having]
        if having and not queued:
            return having[quickest([tier.link for tier in having], now_s)]
        if having:
            return having[soonest([tier.link for tier in having], size_bytes, now_s)]
        due = [tier for tier in left if tier.reading.may_try(now_s)]
        return next(iter(well or due), None)

    async def _move_up(self, key: BlockKey, data: memoryview, tier: Tier) -> None:
        above = [t for t in self._tiers[: tier.index] if not t.bit & self._where.of(key).having]
        if above and self._rereads.read(key, self._clock()):
            for target in await self._copy(key, same(data), above):
                target.counts.moved_up_blocks += 1

    async def _copy(self, key: BlockKey, form_of: FormOf, targets: list[Tier]) -> list[Tier]:
        """Have `targets` get the block in the background; those that will."""
        copied, deletes = [], self._deletes
        for target in targets:
            if not target.writing.may_try(self._clock()):
                target.counts.left_out_blocks += 1
                continue
            try:
                if deletes != self._deletes:  # it may be this block that must not come back
                    target.counts.dropped_blocks += 1
                elif await target.copies.offer(key, functools.partial(form_of, target.index)):
                    copied.append(target)
                else:
                    target.counts.queue_full_blocks += 1
            except StoreUnavailable:  # the store is being closed; another tier has the block
                target.counts.dropped_blocks += 1
        return copied

    def _copied(self, tier: Tier, key: BlockKey) -> None:
        self._where.learn(key, asked=tier.bit, having=tier.bit)

    async def _ask_all(
        self, question: Callable[[Tier], Coroutine[Any, Any, T]]
    ) -> list[_Answer[T]]:
        """What the tiers that are not left out answer, in order. When one has answered, the others
        have `late_answer_s` left: a tier that hangs must not hold back what a fast one has.

        A tier whose trial is due is asked beside them, and nobody waits for it.
        Raises: StoreUnavailable if none answers.
        """
        now_s = self._clock()
        usable = [
            tier
            for tier in self._tiers
            if tier.reading.may_try(now_s) and tier.index not in self._strays
        ]
        well = [tier for tier in usable if tier.reading.is_well]
        for tier in usable if well else ():
            if not tier.reading.is_well:
                trial = asyncio.wait_for(question(tier), self._late_answer_s)
                self._leave_behind(tier, asyncio.ensure_future(trial))
        asked = well or usable
        tasks = [asyncio.ensure_future(question(tier)) for tier in asked]
        await _until_answered(tasks, self._late_answer_s)
        answers: list[_Answer[T]] = []
        for tier, task in zip(asked, tasks, strict=True):
            if not task.done():
                tier.late()
                self._leave_behind(tier, task)
                task.cancel()
            elif task.exception() is None:
                answers.append((tier, task.result()))
            elif not isinstance(task.exception(), StoreError):
                task.result()  # a bug of ours: it raises
        if not answers:
            raise StoreUnavailable("no tier answers")
        return answers

    def _leave_behind(self, tier: Tier, task: "asyncio.Task[Any]") -> None:
        """Nobody waits for `task` any more, and the tier is asked nothing until it is done."""

        def done(task: "asyncio.Task[Any]") -> None:
            del self._strays[tier.index]
            if not task.cancelled() and isinstance(task.exception(), TimeoutError):
                tier.late()  # of a trial: a tier's own TimeoutError is a StoreUnavailable by now

        self._strays[tier.index] = task
        task.add_done_callback(done)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")


async def _until_answered(tasks: list["asyncio.Task[T]"], patience_s: float) -> None:
    """Return when all are done, or `patience_s` after the first that did not fail.

    Cancelled, it returns once all are.
    """
    pending = set(tasks)
    try:
        while pending and all(_failed(task) for task in tasks if task not in pending):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=patience_s)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            _failed(task)  # fetched, or asyncio would log it as forgotten
        raise


def _failed(task: "asyncio.Task[T]") -> bool:
    return task.cancelled() or task.exception() is not None


def _most_telling(errors: Sequence[StoreError]) -> StoreError:
    for kind in _TELLING:
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]
