"""Base class of stores that wrap another store, and a wrapper that counts bytes."""

from collections.abc import AsyncIterator, Mapping, Sequence

from sglang_cake.codecs.frame import HEADER_BYTES
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import (
    BlockInfo,
    LentBlock,
    Store,
    StoreStats,
)
from sglang_cake.stores.request_facts import RequestFacts


class WrapperStore(Store):
    """Implements `Store` by passing every call to `inner`, which is closed with it.

    A subclass overrides the calls that it changes.

    Attributes:
        inner: the wrapped store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self.inner.contains(keys)

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        await self.inner.on_access(keys, facts)

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return self.inner.sources(keys)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        return await self.inner.get_into(key, out, progress)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        return await self.inner.put(key, data)

    async def delete(self, key: BlockKey) -> None:
        await self.inner.delete(key)

    def list_blocks(self) -> AsyncIterator[BlockInfo]:
        return self.inner.list_blocks()

    def events(self) -> Mapping[str, int]:
        return self.inner.events()

    async def remove_description(self) -> None:
        await self.inner.remove_description()

    async def stats(self) -> StoreStats:
        return await self.inner.stats()

    async def close(self) -> None:
        await self.inner.close()


class CountedStore(WrapperStore):
    """Counts the bytes of blocks that cross the link, header and payload; blocks in memory that are
    lent count as well."""

    def __init__(self, inner: Store, counters: Counters) -> None:
        super().__init__(inner)
        self._counters = counters

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        size_bytes = await self.inner.get_into(key, out, progress)
        count_read(self._counters, size_bytes)
        return size_bytes

    def lend(self, key: BlockKey) -> LentBlock | None:
        lent = self.inner.lend(key)
        if lent is not None:
            count_read(self._counters, lent.buffer.view.nbytes)
        return lent

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        fresh = await self.inner.put(key, data)
        if fresh:
            count_written(self._counters, data.nbytes)
        return fresh


def count_read(counters: Counters, payload_bytes: int) -> None:
    """Count one block that was read."""
    counters.add("read_blocks")
    counters.add("read_bytes", HEADER_BYTES + payload_bytes)


def count_written(counters: Counters, payload_bytes: int) -> None:
    """Count one encoding of a block that was written."""
    counters.add("stored_bytes", HEADER_BYTES + payload_bytes)
