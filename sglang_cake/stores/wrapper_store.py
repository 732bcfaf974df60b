"""Stores in front of another store: a base class of wrappers, a wrapper that counts bytes, and a
store that is opened by its first call."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import ConfigError, StoreError, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo, LentBlock, Store, StoreSource, StoreStats
from sglang_cake.stores.request_facts import RequestFacts
from sglang_cake.stores.threads import run_in_own_thread

CLOSE_S = 5.0  # how long the end of a store waits for a source that hangs when it is opened


class _PassingStore(Store):
    """Passes the calls that may wait to another store."""

    @abstractmethod
    async def _opened(self) -> Store: ...

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await (await self._opened()).contains(keys)

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        await (await self._opened()).on_access(keys, facts)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        return await (await self._opened()).get_into(key, out, progress)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        return await (await self._opened()).put(key, data)

    async def delete(self, key: BlockKey) -> None:
        await (await self._opened()).delete(key)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        async for block in (await self._opened()).list_blocks():
            yield block

    async def remove_description(self) -> None:
        await (await self._opened()).remove_description()

    async def stats(self) -> StoreStats:
        return await (await self._opened()).stats()


class WrapperStore(_PassingStore):
    """Implements `Store` by passing calls to `inner`, which is closed with it.

    A subclass overrides the calls that it changes. `lend` and `put_first` are not passed: a wrapper
    that changes bytes would not see them.

    Attributes:
        inner: the wrapped store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    async def _opened(self) -> Store:
        return self.inner

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return self.inner.sources(keys)

    def events(self) -> Mapping[str, int]:
        return self.inner.events()

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


class LazyStore(_PassingStore):
    """Implements `Store` by a store that the first call opens, for example when a disk is mounted
    later. Every call tries to open it, or waits for a try in progress, and raises StoreUnavailable
    if that fails. The caller decides how often to try.

    Attributes:
        opened: the store, if it is open.
    """

    def __init__(
        self, source: StoreSource, frame: BlockFrame, *, depth: int, close_s: float = CLOSE_S
    ) -> None:
        self._source = source
        self._frame = frame
        self._depth = depth
        self._close_s = close_s
        self._attempt: asyncio.Future[Store] | None = None  # the last one to open it
        self._given_up: asyncio.Future[Any] | None = None  # done when no call waits for that
        self.opened: Store | None = None
        self._closed = False

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return super().sources(keys) if self.opened is None else self.opened.sources(keys)

    def lend(self, key: BlockKey) -> LentBlock | None:
        return None if self.opened is None else self.opened.lend(key)

    def events(self) -> Mapping[str, int]:
        return {} if self.opened is None else self.opened.events()

    async def close(self) -> None:
        """Waits for an opening in progress, `close_s` at most. Calls that wait for it fail then. A
        store that opens later is closed."""
        self._closed = True
        if self._attempt is not None and not self._attempt.done():
            await asyncio.wait([self._attempt], timeout=self._close_s)
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)
        store = self.opened
        self.opened = None
        if store is not None:
            await store.close()

    async def _opened(self) -> Store:
        if self.opened is not None:
            return self.opened
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if self._given_up is None:
            self._given_up = asyncio.get_running_loop().create_future()
        if self._attempt is None or self._attempt.done():
            self._attempt = asyncio.ensure_future(self._open())
            # Retrieved here, since all callers may have been cancelled.
            self._attempt.add_done_callback(
                lambda attempt: attempt.cancelled() or attempt.exception()
            )
        attempt = self._attempt
        # A cancelled caller does not cancel it, which would leave an open store behind.
        await asyncio.wait([attempt, self._given_up], return_when=asyncio.FIRST_COMPLETED)
        if not attempt.done():
            raise StoreUnavailable("the store is closed")
        return attempt.result()

    async def _open(self) -> Store:
        try:
            store = await run_in_own_thread(self._source.open, self._frame, depth=self._depth)
        except StoreError:
            raise
        except Exception as error:  # the server runs already: the store stays left out
            words = str(error) if isinstance(error, ConfigError) else repr(error)
            raise StoreUnavailable(words) from error
        if self._closed:
            await store.close()
            raise StoreUnavailable("the store is closed")
        self.opened = store
        return store
