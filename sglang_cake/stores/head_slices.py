"""A block in slices by KV heads, each of them a block of a store of its own."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from sglang_cake.core.buffers import TellBytes, on_page
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import DaemonPool, check_stop, run_in_own_thread, run_stoppable
from sglang_cake.stores.base import (
    BlockInfo,
    EvictionCounts,
    RequestFacts,
    Store,
    StoreStats,
    TierStats,
)

T = TypeVar("T")
MAX_THREADS = 4  # that copy between blocks and slices
_Put = Callable[[BlockKey, memoryview], Coroutine[Any, Any, bool]]
_COUNTED_ALL = ("read_bytes", "stored_bytes")


class SliceCounters(Counters):
    """Counters of a further slice: its bytes count in `whole`, and its block does not, since the
    first slice counts it."""

    def __init__(self, whole: Counters) -> None:
        super().__init__()
        self._whole = whole

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """As in `Counters`."""
        if name in _COUNTED_ALL:
            self._whole.add(name, amount, label)


class HeadSliceStore(Store):
    """Implements `Store`. Each row of a block is cut into equal runs of heads. Slice `i` has run
    `i` of every row.

    A block without one of its slices is missing; a put stores the slices that are missing. Memory
    of a block is used for each concurrent read, and for each concurrent write.
    """

    def __init__(self, stores: Sequence[Store], layout: BlockLayout, *, depth: int) -> None:
        """Args:
        stores: of the slices, in the order of heads; closed with this store. Their blocks have
            the layout `layout.sliced(len(stores))`.
        layout: the layout of whole blocks.
        depth: concurrent reads of blocks, and concurrent writes of slices; further ones wait.
        """
        self._stores = tuple(stores)
        self._layout = layout
        self._slice = layout.sliced(len(stores))
        self._reading = asyncio.Semaphore(depth)
        self._writing = asyncio.Semaphore(depth)
        self._putting = asyncio.Semaphore(depth)
        self._idle: list[list[memoryview]] = []
        self._threads = DaemonPool(min(MAX_THREADS, 2 * depth), "cake-slice")

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        found = await _all(store.contains(keys) for store in self._stores)
        return [all(each) for each in zip(*found, strict=True)]

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        await _all(store.on_access(keys, facts) for store in self._stores)

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        """As in `Store`: the slowest tier that has a slice."""
        found = [store.sources(keys) for store in self._stores]
        return [max(each) for each in zip(*found, strict=True)]

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`, without progress."""
        assert out.nbytes == self._layout.block_bytes, out.nbytes
        async with self._buffers(self._reading) as slices:
            reads = zip(self._stores, slices, strict=True)
            await _all(store.get_into(key, part) for store, part in reads)
            # Only now: bytes of a block that lacks a slice are never in `out`.
            await self._copy(out, slices, to_slices=False)
        return out.nbytes

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        return await self._put(key, data, [store.put for store in self._stores])

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        return await self._put(key, data, [store.put_first for store in self._stores])

    async def _put(self, key: BlockKey, data: memoryview, puts: Sequence[_Put]) -> bool:
        assert data.nbytes == self._layout.block_bytes, data.nbytes

        async def put_in_turn(put: _Put, part: memoryview) -> bool:
            async with self._putting:  # a store takes as many puts as of whole blocks
                return await put(key, part)

        async with self._buffers(self._writing) as slices:
            await self._copy(data, slices, to_slices=True)
            fresh = await _all(map(put_in_turn, puts, slices))
            return any(fresh)

    async def delete(self, key: BlockKey) -> None:
        await _all(store.delete(key) for store in self._stores)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """Raises: StoreUnavailable, always."""
        raise StoreUnavailable("the slices of blocks are in namespaces that are listed one by one")
        yield  # makes it an iterator

    def events(self) -> Mapping[str, int]:
        """As in `Store`: the sum over all slices."""
        total: Counter[str] = Counter()
        for store in self._stores:  # those of a slice that is not open have no names yet
            total.update(store.events())
        return total

    async def stats(self) -> StoreStats:
        """The stats of the first slice's store, whose capacity all slices share. Each slice's store
        evicts and calls its tiers by itself, so these counts are sums. As many evicted slices as a
        block has count as one evicted block."""
        found = await _all(store.stats() for store in self._stores)
        total = EvictionCounts.total(each.evictions for each in found)
        return replace(
            found[0],
            evictions=replace(
                total,
                evicted_blocks=total.evicted_blocks // len(found),
                skipped_blocks=total.skipped_blocks // len(found),
            ),
            tiers=tuple(map(_tier, zip(*(each.tiers for each in found), strict=True))),
        )

    async def close(self) -> None:
        """Calls that have not reached the slices fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(store.close() for store in self._stores))
        await run_in_own_thread(self._threads.shutdown)

    @asynccontextmanager
    async def _buffers(self, places: asyncio.Semaphore) -> AsyncIterator[list[memoryview]]:
        """A buffer for each slice."""
        async with places:
            size_bytes = self._slice.block_bytes
            slices = self._idle.pop() if self._idle else [on_page(size_bytes) for _ in self._stores]
            try:
                yield slices
            finally:
                self._idle.append(slices)

    async def _copy(self, block: memoryview, slices: list[memoryview], *, to_slices: bool) -> None:
        def run(stop: threading.Event) -> None:
            whole = np.frombuffer(block, np.uint8)
            parts = [np.frombuffer(each, np.uint8) for each in slices]
            planes = zip(self._layout.planes, self._slice.planes, strict=True)
            for plane, cut in planes:
                check_stop(stop)
                stop_byte = plane.start + plane.rows * plane.row_bytes
                rows = whole[plane.start : stop_byte].reshape(plane.rows, len(parts), cut.row_bytes)
                for number, part in enumerate(parts):
                    own = part[cut.start : cut.start + cut.rows * cut.row_bytes]
                    in_block, in_slice = rows[:, number], own.reshape(cut.rows, cut.row_bytes)
                    if to_slices:
                        in_slice[:] = in_block
                    else:
                        in_block[:] = in_slice

        await run_stoppable(self._threads, run)


def _tier(slices: tuple[TierStats, ...]) -> TierStats:
    """One tier, of all slices. Of their blocks, only those of the first slice count."""
    first = slices[0]
    counts = {
        name: count if name.endswith("_blocks") else sum(each.counts[name] for each in slices)
        for name, count in first.counts.items()
    }
    reading = all(each.reading for each in slices)
    writing = all(each.writing for each in slices)
    return TierStats(first.stats, reading, writing, counts)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls that run side by side. If one fails, the others are cancelled. All have
    ended when this returns, since the caller will reuse the memory. Raises: the first error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
