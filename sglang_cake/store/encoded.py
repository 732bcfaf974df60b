"""Blocks that lie encoded in another store, and how a server's store is opened with a codec."""

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from sglang_cake.buffers import on_page
from sglang_cake.codec.encoded import encoded_frame
from sglang_cake.codec.frame import BlockFrame
from sglang_cake.codec.names import RAW
from sglang_cake.codec.steps import Malformed
from sglang_cake.errors import BlockCorrupt, StoreError
from sglang_cake.keys import BlockKey
from sglang_cake.layout import BlockLayout
from sglang_cake.namespace import Namespace
from sglang_cake.store.base import BlockInfo, Store, StoreSource, StoreStats
from sglang_cake.store.open import open_store
from sglang_cake.store.threads import check_stop, run_stoppable

logger = logging.getLogger(__name__)
MAX_THREADS = 4  # of decoding; encoding has one, so that no load waits behind a write

# (block, out) -> bytes of the payload that `out` begins with then. Called in a thread.
Encode = Callable[[memoryview, memoryview], int]


class EncodedStore:
    """Implements `Store`. Every call has a buffer of one payload, at most `depth` for reads and
    `depth` for writes. What is read is decoded by what stands in front of it."""

    def __init__(
        self, inner: Store, layout: BlockLayout, encode: Encode, *, payload_bytes: int, depth: int
    ) -> None:
        """Args:
        inner: of encoded blocks; it is closed with this store.
        payload_bytes: of an encoded block, at most.
        depth: reads, and writes, at once; more of them wait.
        """
        self._inner, self._layout, self._encode = inner, layout, encode
        self._payload_bytes = payload_bytes
        self._reading, self._writing = asyncio.Semaphore(depth), asyncio.Semaphore(depth)
        self._idle: list[memoryview] = []
        readers = max(1, min(MAX_THREADS, depth, len(os.sched_getaffinity(0)) // 2))
        self._decoders = ThreadPoolExecutor(readers, "cake-decode")
        self._encoders = ThreadPoolExecutor(1, "cake-encode")

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._inner.contains(keys)

    async def get_into(self, key: BlockKey, out: memoryview) -> int:
        """As in `Store`. A block that passed its checksum and cannot be decoded is deleted."""
        async with self._buffer(self._reading) as payload:
            size_bytes = await self._inner.get_into(key, payload)
            try:
                work = functools.partial(self._decode, payload[:size_bytes], out)
                await run_stoppable(self._decoders, work)
            except Malformed as error:
                with contextlib.suppress(StoreError):  # it stays, and fails again
                    await self._inner.delete(key)
                raise BlockCorrupt(f"{key.hex()}: {error}") from None
            return self._layout.block_bytes

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        assert data.nbytes == self._layout.block_bytes, data.nbytes
        async with self._buffer(self._writing) as payload:

            def work(stop: threading.Event) -> int:
                check_stop(stop)
                return self._encode(data.cast("B"), payload)

            size_bytes = await run_stoppable(self._encoders, work)
            return await self._inner.put(key, payload[:size_bytes])

    async def delete(self, key: BlockKey) -> None:
        await self._inner.delete(key)

    def list_blocks(self) -> AsyncIterator[BlockInfo]:
        return self._inner.list_blocks()

    async def stats(self) -> StoreStats:
        return await self._inner.stats()

    async def close(self) -> None:
        """Calls that have not reached the inner store fail."""
        for pool in (self._decoders, self._encoders):
            pool.shutdown(wait=False, cancel_futures=True)
        await self._inner.close()
        for pool in (self._decoders, self._encoders):
            await asyncio.to_thread(pool.shutdown)

    @asynccontextmanager
    async def _buffer(self, places: asyncio.Semaphore) -> AsyncIterator[memoryview]:
        async with places:
            buffer = self._idle.pop() if self._idle else on_page(self._payload_bytes)
            try:
                yield buffer
            finally:
                self._idle.append(buffer)

    def _decode(self, payload: memoryview, out: memoryview, stop: threading.Event) -> None:
        from sglang_cake.codec.catalogue import decode

        check_stop(stop)
        decode(self._layout, payload, out.cast("B"))


def open_blocks(
    sources: list[StoreSource], namespace: Namespace, layout: BlockLayout, *, codec: str, depth: int
) -> Store:
    """Open a namespace whose blocks are encoded by `codec`; the caller closes it. Compiles what the
    codec needs, which takes seconds the first time.

    Args: namespace: it names the codec.
    Raises: StoreUnavailable; ConfigError, also if the codec cannot take such blocks.
    """
    if codec == RAW:
        return open_store(sources, BlockFrame(namespace, layout), depth=depth)
    from sglang_cake.codec.catalogue import chain_of

    chain = chain_of(codec, layout)
    chain.warm_up(layout)
    frame = encoded_frame(namespace, layout, codec)
    return EncodedStore(
        open_store(sources, frame, depth=depth),
        layout,
        functools.partial(chain.encode, layout),
        payload_bytes=frame.payload_bytes,
        depth=depth,
    )
