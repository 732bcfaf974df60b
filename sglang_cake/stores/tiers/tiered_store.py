"""Several stores as one, fastest first: `file:///nvme/kv,http://kv-host:8700`.

- A lookup asks all tiers at once. A block is stored if any tier has it.
- A read goes to a tier in memory that has the block, or else to the tier that should deliver the
  block first (`link_speed`). After a failure it goes to the next tier that has the block.
- A put goes to the first tier that takes the block, and to the others in the background
  (`tier.CopyQueue`). If memory has the block already, it goes to the others that lack it.
- A block that a tier missed, since it was full or down or its queue was full, is written there once
  it takes writes and no other copy waits, if memory still has the block.
- A block that is read from a lower tier is copied to the tiers above: to a tier in memory if its
  eviction policy prefers the block to a stored one, to other tiers at the second read
  (`PromoteOnSecondRead`).
- A tier that fails repeatedly is left out for a while (`circuit_breaker.Breaker`). A tier whose
  reads fail is not asked for blocks either, since it would report blocks that cannot be read. In
  the background the tier is asked, and one block is read, until that works.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from sglang_cake.core.buffers import BufferPool, HostArena, TellBytes
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.threads import DaemonPool
from sglang_cake.stores.base import (
    USUAL_DEPTH,
    BlockInfo,
    EvictionCounts,
    LentBlock,
    RequestFacts,
    Store,
    StoreStats,
    TierStats,
)
from sglang_cake.stores.link_speed import quickest, soonest
from sglang_cake.stores.tiers.tier import Tier

logger = logging.getLogger(__name__)
T = TypeVar("T")
_Answer = tuple[Tier, T]
# Index of a tier -> payload for this tier. The payload stays valid until the put has ended.
FormOf = Callable[[int], Awaitable[memoryview]]
# (memory of `frame.payload_bytes`, size of the payload at its start) -> size of the payload that is
# there now.
Unpack = Callable[[memoryview, int], Awaitable[int]]

# A lookup without any answer is late after so many times `late_answer_s`. That is before it is
# cancelled (`loader.ENDED_LOOKUP_S`).
NO_ANSWER = 3
COPY_BYTES = 128 * 2**20  # host memory for the copies of each tier, allocated when first used
MIN_COPY_BLOCKS, MAX_COPY_BLOCKS = 2, 4096
MAX_KEYS = 1 << 16  # about 20 MB
REREAD_S = 600.0
# Missed blocks that are looked for in memory at a time. After a long outage most were evicted, and
# the event loop must not look for all of them at once.
MOST_SOUGHT = 64

# Precedence of errors. A tier that did not answer may have the block, so a block is missing only if
# no other error occurred.
_PRECEDENCE = (StoreFull, BlockCorrupt, StoreUnavailable, BlockMissing)


class Known(NamedTuple):
    """Tiers that have a block, and tiers that lack it, with tier `i` as bit `i`. One in neither set
    was not asked, or did not answer."""

    having: int
    lacking: int


_UNKNOWN = Known(0, 0)
_NO_BLOCK = BlockKey(bytes(32))  # no hash of tokens


class _Stored(NamedTuple):
    """A tier that has a block, and its payload."""

    tier: Tier
    data: memoryview


class TierLocations:
    """Which tiers have which block, by their last answers. Blocks in no tier are not held. Bounded:
    a block that was dropped costs one more lookup."""

    max_keys = MAX_KEYS

    def __init__(self) -> None:
        self._known: OrderedDict[BlockKey, Known] = OrderedDict()

    def of(self, key: BlockKey) -> Known:
        return self._known.get(key, _UNKNOWN)

    def learn(self, key: BlockKey, *, asked: int, having: int) -> None:
        """Record which tiers answered, and which of these have the block."""
        before = self._known.pop(key, _UNKNOWN)
        now_having = before.having & ~asked | having
        if now_having:
            self._known[key] = Known(now_having, before.lacking & ~asked | asked & ~having)
            if len(self._known) > self.max_keys:
                self._known.popitem(last=False)

    def forget(self, key: BlockKey) -> None:
        self._known.pop(key, None)


class PromoteOnSecondRead:
    """Promotion rule: a block moves up at its second read within REREAD_S. So prompts that are read
    once evict nothing from the fast tier."""

    max_keys = MAX_KEYS

    def __init__(self) -> None:
        self._read_s: OrderedDict[BlockKey, float] = OrderedDict()

    def read(self, key: BlockKey, now_s: float) -> bool:
        """Record a read from a lower tier. True if the block should move up now."""
        before_s = self._read_s.pop(key, None)
        if before_s is not None and now_s - before_s <= REREAD_S:
            return True
        self._read_s[key] = now_s
        if len(self._read_s) > self.max_keys:
            self._read_s.popitem(last=False)
        return False


class TieredStore(Store):
    """Implements `Store`. For one event loop.

    Attributes:
        tiers: fastest first; closed with this store.
        late_answer_s: time that other tiers have for a lookup after the first answer. All tiers
            have NO_ANSWER times as long for the first answer.
        drain_s: time that `close` goes on copying.
    """

    late_answer_s = 1.0
    drain_s = 10.0

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        depths: Sequence[int] = (),
        block_bytes: int,
        copy_bytes: int = COPY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        stores: fastest first.
        depths: how many reads at once the link of each store needs; USUAL_DEPTH if left out.
        block_bytes: limit for a payload.
        copy_bytes: see COPY_BYTES.
        clock: seconds, monotonic.
        """
        self._clock = clock
        self._block_bytes = block_bytes
        self._threads = DaemonPool(1, "cake-tier-copy")
        blocks = min(max(MIN_COPY_BLOCKS, copy_bytes // block_bytes), MAX_COPY_BLOCKS)
        self.tiers = [
            Tier(
                store,
                index,
                BufferPool(HostArena([block_bytes] * blocks, prefault=False).buffers),
                self._threads,
                clock,
                self._copied,
                self._missed,
                depth,
            )
            for index, (store, depth) in enumerate(
                zip(stores, depths or [USUAL_DEPTH] * len(stores), strict=True)
            )
        ]
        self._locations = TierLocations()
        self._rereads = PromoteOnSecondRead()
        self._deleting: list[BlockKey] = []
        self._deletes = 0  # that have ended
        self._closed = False

    @property
    def given_up_calls(self) -> int:
        """Number of running calls whose result is not awaited any more."""
        return sum(len(tier.given_up) for tier in self.tiers)

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._check_open()
        now_s = self._clock()
        usable = [tier for tier in self.tiers if tier.may_serve(now_s)]
        well = [tier for tier in usable if tier.serves]
        for tier in usable if well else ():
            if not tier.serves:
                self._give_up(tier, asyncio.ensure_future(self._probe(tier, keys)))
        answers = await self._ask(well or usable, lambda tier: tier.contains(keys))
        asked = sum(tier.bit for tier, _ in answers)
        havings = [0] * len(keys)
        for tier, found in answers:
            for place, there in enumerate(found):
                havings[place] |= tier.bit if there else 0
        for key, having in zip(keys, havings, strict=True):
            self._locations.learn(key, asked=asked, having=having)
        return [having > 0 for having in havings]

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """As in `Store`, for every tier that is not left out. Failures do not count."""
        self._check_open()

        async def report(tier: Tier) -> None:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(self.late_answer_s):
                    await tier.store.on_access(keys, facts)

        await asyncio.gather(*(report(tier) for tier in self.tiers if tier.asking.is_closed))

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        """As in `Store`. One key: the tier for a read now. Several keys: the tiers for reads on
        idle links."""
        queued = len(keys) == 1
        found: dict[Known, int] = {}
        for known in {self._locations.of(key) for key in keys}:
            left = [tier for tier in self.tiers if not tier.bit & known.lacking]
            tier = self._next_to_read(left, known, self._block_bytes, queued=queued)
            found[known] = tier.index if tier else 0
        return [found[self._locations.of(key)] for key in keys]

    def lend(self, key: BlockKey) -> LentBlock | None:
        """As in `Store`, from the first tier in memory that has the block."""
        having = self._locations.of(key).having
        for tier in self.tiers:
            if tier.bit & having and (lent := tier.lend(key)) is not None:
                return lent
        return None

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        return (await self._get(key, out, progress, None))[1]

    async def get_unpacked(self, key: BlockKey, out: memoryview, unpack: Unpack) -> tuple[int, int]:
        """As `get_into`.

        Args:
            unpack: changes a payload that was read from a lower tier, before it moves up to a tier
                in memory. `out` begins with the changed payload then.

        Returns the number of bytes that were read, and of the payload.
        Raises: as `get_into`, and what `unpack` raises.
        """
        return await self._get(key, out, None, unpack)

    async def _get(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None, unpack: Unpack | None
    ) -> tuple[int, int]:
        self._check_open()
        known = self._locations.of(key)
        deletes = self._deletes
        left = [tier for tier in self.tiers if not tier.bit & known.lacking]
        has_begun = False

        def tell(count: int) -> None:
            nonlocal has_begun
            has_begun = True
            if progress is not None:
                progress(count)

        errors: list[StoreError] = []
        while left:
            tier = self._next_to_read(left, known, out.nbytes)
            if tier is None:
                errors.append(StoreUnavailable("the tiers that may have it are left out"))
                break
            left.remove(tier)
            try:
                read_bytes = await tier.get_into(key, out, progress and tell)
            except StoreError as error:
                errors.append(error)
                if has_begun:  # the next tier may report none
                    tell(0)
                    has_begun = False
                if isinstance(error, BlockMissing | BlockCorrupt):
                    self._locations.learn(key, asked=tier.bit, having=0)
                continue
            self._locations.learn(key, asked=tier.bit, having=tier.bit)
            if self._may_be_deleted(key, deletes):
                return read_bytes, read_bytes
            return read_bytes, await self._move_up(key, out, read_bytes, tier, unpack, deletes)
        raise _first_by_precedence(errors)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`: first tier that takes the block now, other tiers in the background. If
        memory has it already: those other tiers that the last lookup did not find it in."""
        return await self.put_forms(key, _same_for_all(data))

    async def put_forms(self, key: BlockKey, form_of: FormOf) -> bool:
        """As `put`, with a payload for each tier.

        Args:
            form_of: called when a payload is needed, for one tier at a time, and at most once for
                each tier. It is not called for tiers that take no block now.

        Raises: as `put`; the error of `form_of`, if no tier has the block then.
        """
        self._check_open()
        now_s = self._clock()
        usable = [tier for tier in self.tiers if tier.writing.may_call(now_s)]
        usable.sort(key=lambda tier: not tier.writing.is_closed)  # probes last: they may hang
        errors: list[StoreError] = []
        for tried, tier in enumerate(usable, 1):
            data = await form_of(tier.index)
            deletes = self._deletes
            try:
                fresh = await tier.put(key, data)
            except StoreError as error:
                errors.append(error)
                continue
            lacking = self._locations.of(key).lacking
            self._locations.learn(key, asked=tier.bit, having=tier.bit)
            others = [t for t in self.tiers if t not in usable[:tried]]
            if not fresh:
                # Another process that needs the block does not find it in memory of this one.
                lacking = 0 if tier.memory is None else lacking
                others = [t for t in others if t.bit & lacking]
            # A block that memory had before may have another form there: decoded, when it moved up.
            stored = _Stored(tier, data) if fresh else None
            await self._copy(key, form_of, others, deletes, stored)
            return fresh
        raise _first_by_precedence(errors or [StoreUnavailable("all tiers are left out")])

    async def delete(self, key: BlockKey) -> None:
        """As in `Store`, in every tier, left out or not. Fails if one tier fails."""
        self._check_open()
        self._deleting.append(key)
        try:
            for tier in self.tiers:
                await tier.copies.forget(key)
            self._locations.forget(key)
            results = await asyncio.gather(
                *(tier.delete(key) for tier in self.tiers), return_exceptions=True
            )
        finally:
            self._deleting.remove(key)
            self._deletes += 1
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """As in `Store`. A block in several tiers is listed once, as the fastest of them lists it.

        If a tier fails, the blocks of the other tiers are listed before the StoreUnavailable.
        """
        self._check_open()
        seen: set[BlockKey] = set()
        failure: StoreError | None = None
        for tier in self.tiers:
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
        """As in `Store`, summed over the tiers."""
        total: Counter[str] = Counter()
        for tier in self.tiers:
            total.update(tier.store.events())
        return total

    async def stats(self) -> StoreStats:
        """As in `Store`. Bytes are summed over the tiers that know them. The number of blocks is
        unknown, since most are in several tiers. If no tier answers, the stats have only the states
        and counts of the tiers.

        A lookup of one key that no block has tells which tiers answer: their states are known also
        if there are no requests, and tiers that are left out come back."""
        self._check_open()
        now_s = self._clock()
        asked = [tier for tier in self.tiers if tier.may_ask(now_s)]
        answers: list[_Answer[list[bool]]] = []
        with contextlib.suppress(StoreUnavailable):
            answers = await self._ask(asked, lambda tier: tier.contains([_NO_BLOCK]))
        told = await asyncio.gather(*(tier.stats(self.late_answer_s) for tier, _ in answers))
        by_index = {tier.index: stats for (tier, _), stats in zip(answers, told, strict=True)}
        stats = [each for each in told if each is not None]
        used = [s.used_bytes for s in stats if s.used_bytes is not None]
        capacity = [s.capacity_bytes for s in stats if s.capacity_bytes is not None]
        bounded = len(capacity) == len(self.tiers)
        return StoreStats(
            used_bytes=sum(used) if used else None,
            capacity_bytes=sum(capacity) if bounded else None,
            policy=next((s.policy for s in stats if s.policy), ""),
            evictions=EvictionCounts.total(s.evictions for s in stats),
            tiers=tuple(
                TierStats(
                    by_index.get(tier.index),
                    tier.serves,
                    tier.writing.is_closed,
                    asdict(tier.counts),
                )
                for tier in self.tiers
            ),
        )

    async def close(self) -> None:
        """Write pending copies for at most `drain_s`, then close every tier."""
        if self._closed:
            return
        self._closed = True
        try:
            copies = (tier.copies.close(self.drain_s) for tier in self.tiers)
            for tier, dropped in zip(self.tiers, await asyncio.gather(*copies), strict=True):
                tier.counts.dropped_blocks += dropped
            given_up = [task for tier in self.tiers for task in tier.given_up]
            given_up += [tier.stats_call for tier in self.tiers if tier.stats_call is not None]
            for task in given_up:
                task.cancel()
            if given_up:
                await asyncio.wait(given_up, timeout=self.drain_s)
        finally:
            closing = (tier.store.close() for tier in self.tiers)
            for result in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(result, Exception):
                    logger.error("a tier could not be closed: %r", result)
            self._threads.shutdown(wait=False)

    def _next_to_read(
        self, left: list[Tier], known: Known, size_bytes: int, *, queued: bool = True
    ) -> Tier | None:
        now_s = self._clock()
        well = [tier for tier in left if tier.serves]
        having = [tier for tier in well if tier.bit & known.having]
        # If memory has the block, reading it from another tier would cost more processor time than
        # waiting for memory.
        having = [tier for tier in having if tier.memory is not None][:1] or having
        if having and not queued:
            return having[quickest([tier.link for tier in having], now_s)]
        if having:
            return having[soonest([tier.link for tier in having], size_bytes, now_s)]
        due = [tier for tier in left if tier.may_serve(now_s)]
        return next(iter(well or due), None)

    def _may_be_deleted(self, key: BlockKey, deletes: int) -> bool:
        """Whether a copy of the block could bring it back after a delete. Args: deletes: `_deletes`
        before the block was read or put. A delete that has ended since may be of another block."""
        return key in self._deleting or deletes != self._deletes

    async def _move_up(
        self,
        key: BlockKey,
        out: memoryview,
        size_bytes: int,
        tier: Tier,
        unpack: Unpack | None,
        deletes: int,
    ) -> int:
        """Move up the payload at the start of `out`, which `unpack` may change. Returns its size
        afterwards."""
        above = [t for t in self.tiers[: tier.index] if not t.bit & self._locations.of(key).having]
        slow = [upper for upper in above if upper.memory is None]
        if slow and self._rereads.read(key, self._clock()):
            for upper in await self._copy(key, _same_for_all(out[:size_bytes]), slow, deletes):
                upper.counts.moved_up_blocks += 1
        fast = [(upper, memory) for upper in above if (memory := upper.memory) is not None]
        fast = [each for each in fast if each[0].writing.may_call(self._clock())]
        if fast and unpack is not None:
            size_bytes = await unpack(out, size_bytes)
        for upper, memory in fast:
            if self._may_be_deleted(key, deletes):
                break
            with contextlib.suppress(StoreError):  # the tier counts it; the read has its bytes
                if await upper.promote(memory, key, out[:size_bytes]):
                    upper.counts.moved_up_blocks += 1
        return size_bytes

    async def _copy(
        self,
        key: BlockKey,
        form_of: FormOf,
        tiers: list[Tier],
        deletes: int,
        stored: _Stored | None = None,
    ) -> list[Tier]:
        """Queue the block for `tiers`; returns the tiers that took it.

        Args:
            deletes: see `_may_be_deleted`.
            stored: where this payload of the block is already.
        """

        async def form(index: int) -> memoryview:
            data = await form_of(index)
            if self._may_be_deleted(key, deletes):  # after the wait; `CopyQueue` sees later ones
                raise StoreUnavailable("the block was deleted")
            return data

        copied = []
        for tier in tiers:
            if not tier.writing.may_call(self._clock()):
                tier.counts.left_out_blocks += 1
                self._missed(tier, key)
                continue
            try:
                if await self._queue(key, functools.partial(form, tier.index), tier, stored):
                    copied.append(tier)
                else:
                    tier.counts.queue_full_blocks += 1
                    self._missed(tier, key)
            except StoreUnavailable:  # the block was deleted, or the store is being closed
                tier.counts.dropped_blocks += 1
        return copied

    async def _queue(
        self,
        key: BlockKey,
        form: Callable[[], Awaitable[memoryview]],
        tier: Tier,
        stored: _Stored | None,
    ) -> bool:
        """Queue the block for one tier. A payload that a tier in memory has is not copied first.

        Returns False if the queue is full. Raises: as `CopyQueue.offer`.
        """
        memory = None if stored is None else stored.tier.memory
        if stored is None or memory is None:
            return await tier.copies.offer(key, form)
        data = await form()
        kept = memory.keep(key) if data is stored.data else None
        if kept is not None:
            return tier.copies.keep(key, kept)
        return await tier.copies.offer(key, functools.partial(_same_for_all(data), tier.index))

    def _copied(self, tier: Tier, key: BlockKey) -> None:
        self._locations.learn(key, asked=tier.bit, having=tier.bit)
        tier.missed.pop(key, None)
        if not (tier.copies.waiting or self._closed):
            self._write_missed(tier)

    def _missed(self, tier: Tier, key: BlockKey) -> None:
        if any(other.memory is not None for other in self.tiers if other is not tier):
            tier.missed[key] = None
            tier.missed.move_to_end(key)
            if len(tier.missed) > MAX_KEYS:
                tier.missed.popitem(last=False)

    def _write_missed(self, tier: Tier) -> None:
        """Queue the first block that the tier missed and memory still has. One waits at a time,
        so that new blocks hardly wait for these."""
        memories = [each.memory for each in self.tiers if each is not tier]
        for _ in range(min(len(tier.missed), MOST_SOUGHT)):
            key, _ = tier.missed.popitem(last=False)
            for memory in memories if key not in self._deleting else ():
                if memory is not None and (kept := memory.keep(key)) is not None:
                    if not tier.copies.keep(key, kept):
                        self._missed(tier, key)
                    return

    async def _probe(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Ask a tier that is left out. If its reads have failed, read a block."""
        async with asyncio.timeout(self.late_answer_s):
            found = await tier.contains(keys)
        if True in found and not tier.reading.is_closed:
            await tier.probe(keys[found.index(True)])

    async def _ask(
        self, tiers: Sequence[Tier], question: Callable[[Tier], Coroutine[Any, Any, T]]
    ) -> list[_Answer[T]]:
        """The answers of some tiers, in order. A tier that hangs does not delay a fast one, and is
        left out in the end, whether others answer or not (`late_answer_s`).

        Raises: StoreUnavailable if none answers.
        """
        tickets = [tier.asking.ticket for tier in tiers]
        tasks = [asyncio.ensure_future(question(tier)) for tier in tiers]
        await _until_answered(tasks, self.late_answer_s)
        answers: list[_Answer[T]] = []
        for tier, ticket, task in zip(tiers, tickets, tasks, strict=True):
            if not task.done():
                tier.late(ticket)
                self._give_up(tier, task)
                task.cancel()
            elif task.exception() is None:
                answers.append((tier, task.result()))
            elif not isinstance(task.exception(), StoreError):
                task.result()  # a bug: raises
        if not answers:
            raise StoreUnavailable("no tier answers")
        return answers

    def _give_up(self, tier: Tier, task: "asyncio.Task[Any]") -> None:
        """Stop waiting for a call. The tier gets no further lookup until the call has ended."""

        def done(task: "asyncio.Task[Any]") -> None:
            tier.given_up.discard(task)
            if not task.cancelled() and isinstance(task.exception(), TimeoutError):
                tier.late(ticket)  # the call was a probe

        ticket = tier.asking.ticket
        tier.given_up.add(task)
        task.add_done_callback(done)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")


async def _until_answered(tasks: list["asyncio.Task[T]"], patience_s: float) -> None:
    """Return when all tasks are done, or `patience_s` after the first task that succeeded; if no
    task has succeeded, NO_ANSWER times as long after the start.

    Cancellation: returns once all tasks are done.
    """
    pending = set(tasks)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((NO_ANSWER - 1) * patience_s):
                while pending and all(_failed(task) for task in tasks if task not in pending):
                    _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=patience_s)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            _failed(task)  # retrieves the exception, which asyncio would log otherwise
        raise


def _failed(task: "asyncio.Task[T]") -> bool:
    return task.cancelled() or task.exception() is not None


def _first_by_precedence(errors: Sequence[StoreError]) -> StoreError:
    for kind in _PRECEDENCE:
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]


def _same_for_all(data: memoryview) -> FormOf:
    """One payload for all tiers."""

    async def form_of(_: int) -> memoryview:
        return data

    return form_of
