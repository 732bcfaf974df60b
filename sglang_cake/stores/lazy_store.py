"""A store that is opened by its first call, for example when its disk is mounted later."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import (
    BlockInfo,
    LentBlock,
    Store,
    StoreSource,
    StoreStats,
)
from sglang_cake.stores.request_facts import RequestFacts


class LazyStore(Store):
    """Implements `Store`. Every call tries to open the store, and raises StoreUnavailable if that
    fails. The caller decides how often to try."""

    def __init__(self, source: StoreSource, frame: BlockFrame, *, depth: int) -> None:
        self._source = source
        self._frame = frame
        self._depth = depth
        self._opening = asyncio.Lock()
        self._store: Store | None = None
        self._closed = False

    @property
    def opened(self) -> Store | None:
        """The store, if it is open."""
        return self._store

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await (await self._opened()).contains(keys)

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        await (await self._opened()).on_access(keys, facts)

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return super().sources(keys) if self._store is None else self._store.sources(keys)

    def lend(self, key: BlockKey) -> LentBlock | None:
        return None if self._store is None else self._store.lend(key)

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

    def events(self) -> Mapping[str, int]:
        return {} if self._store is None else self._store.events()

    async def stats(self) -> StoreStats:
        return await (await self._opened()).stats()

    async def close(self) -> None:
        """Waits for an opening in progress."""
        self._closed = True
        async with self._opening:
            store = self._store
            self._store = None
        if store is not None:
            await store.close()

    async def _opened(self) -> Store:
        # Shielded, since a cancelled caller must not leave an open store behind.
        if self._store is not None:
            return self._store
        return await asyncio.shield(asyncio.ensure_future(self._open()))

    async def _open(self) -> Store:
        async with self._opening:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            if self._store is None:
                try:
                    self._store = await asyncio.to_thread(
                        self._source.open, self._frame, depth=self._depth
                    )
                except ConfigError as error:  # the server runs already: the store stays left out
                    raise StoreUnavailable(str(error)) from error
            return self._store
