"""Encoding of blocks in front of another store."""

import asyncio
import functools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from sglang_cake.codecs.block_arrays import takes_lossy
from sglang_cake.codecs.codec_steps import Malformed
from sglang_cake.codecs.pipeline import RAW_HEAD_BYTES, Chain, Forms, is_raw
from sglang_cake.core.buffers import Buffer, TellBytes, on_page
from sglang_cake.core.codec_names import AUTO, CODECS, LOSSLESS, RAW
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import DaemonPool, check_stop, run_in_own_thread, run_stoppable
from sglang_cake.stores.base import LentBlock, Store, WrapperStore, count_read, count_written
from sglang_cake.stores.corrupt_reports import CorruptReports
from sglang_cake.stores.link_speed import LinkSpeed
from sglang_cake.stores.tiers.tiered_store import TieredStore

MAX_THREADS = 4  # for decoding; encoding has a thread of its own, so that no load waits for a write

# (encodings of a block so far, index of a tier) -> payload for this tier, which is then one of
# them. Called in a thread.
Encode = Callable[[Forms, int], memoryview]


def decode_threads(depth: int) -> int:
    """Number of threads that decode, for `depth` concurrent reads."""
    return max(1, min(MAX_THREADS, depth, len(os.sched_getaffinity(0)) // 2))


class CodecThreads:
    """The threads of one store, or of the slices of one, which are closed together.

    Attributes:
        decode, encode: pools.
    """

    def __init__(self, depth: int) -> None:
        """Args:
        depth: concurrent reads of the store.
        """
        self.decode = DaemonPool(decode_threads(depth), "cake-decode")
        self.encode = DaemonPool(1, "cake-encode")


class EncodedStore(WrapperStore):
    """Implements `Store`, except with `on_device`.

    A payload names its own codec, so any payload is decoded, whatever `encode` makes. A read uses a
    buffer of one payload. A write uses one for each encoding of its block, at most one per tier.
    """

    def __init__(
        self,
        inner: Store,
        layout: BlockLayout,
        encode: Encode,
        *,
        link: LinkSpeed,
        counters: Counters,
        payload_bytes: int,
        depth: int,
        on_device: bool = False,
        threads: CodecThreads | None = None,
    ) -> None:
        """Args:
        inner: holds encoded blocks; closed with this store.
        link: the speed of `inner` is recorded there.
        payload_bytes: limit for an encoded block.
        depth: concurrent reads, and concurrent writes; further ones wait.
        on_device: `get_into` fills memory of `payload_bytes` with a payload to be decoded by a
            device (`catalogue.prepare`), instead of a block.
        threads: end with this store; None: threads of its own.
        """
        super().__init__(inner)
        self._layout = layout
        self._encode = encode
        self._tiers = inner if isinstance(inner, TieredStore) else None
        self._link = link
        self._counters = counters
        self._payload_bytes = payload_bytes
        self._on_device = on_device
        self._reading = asyncio.Semaphore(depth)
        self._writing = asyncio.Semaphore(depth)
        self._idle: list[memoryview] = []
        self._reports = CorruptReports(inner.delete)
        self._threads = threads or CodecThreads(depth)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`, without progress.

        A block that passes its checksum and cannot be decoded is deleted, in the background.
        """
        async with self._reading, self._lent() as take:
            payload = out if self._on_device else take()
            try:
                size_bytes = await self._get(key, payload)
                work = functools.partial(self._decode, payload[:size_bytes], out)
                await run_stoppable(self._threads.decode, work)
            except Malformed as error:
                self._reports.begin(key)
                raise BlockCorrupt(f"{key.hex()}: {error}") from None
            return out.nbytes

    def lend(self, key: BlockKey) -> LentBlock | None:
        """As in `Store`: a block that lies in memory of the inner store as it is."""
        lent = self.inner.lend(key)
        if lent is None:
            return None
        if not is_raw(lent.buffer.view):
            lent.release()
            return None
        count_read(self._counters, RAW_HEAD_BYTES + self._layout.block_bytes)
        if self._on_device:
            return lent
        block = lent.buffer.view[RAW_HEAD_BYTES : RAW_HEAD_BYTES + self._layout.block_bytes]
        return LentBlock(Buffer(block), lent.release)

    async def _get(self, key: BlockKey, payload: memoryview) -> int:
        """Read a payload. One that the CPU decodes is decoded before it moves up to memory, and not
        at each read from there. Raises: also Malformed."""

        async def unpack(payload: memoryview, size_bytes: int) -> int:
            work = functools.partial(self._unpack, payload, size_bytes)
            return await run_stoppable(self._threads.decode, work)

        if self._tiers is not None:
            read_bytes, size_bytes = await self._tiers.get_unpacked(key, payload, unpack)
        else:
            begun_s = time.monotonic()
            read_bytes = size_bytes = await self.inner.get_into(key, payload)
            self._link.read.transferred(size_bytes, begun_s, time.monotonic())
        count_read(self._counters, read_bytes)
        return size_bytes

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        return await self._put_block(key, data, first=False)

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        return await self._put_block(key, data, first=True)

    async def _put_block(self, key: BlockKey, data: memoryview, *, first: bool) -> bool:
        assert data.nbytes == self._layout.block_bytes, data.nbytes
        await self._reports.end(key)
        async with self._writing, self._lent() as take:
            forms = Forms(data.cast("B"), first, take)
            form_of = functools.partial(self._form, forms)
            if self._tiers is not None:
                fresh = await self._tiers.put_forms(key, form_of)
            else:
                payload = await form_of(0)
                begun_s = time.monotonic()
                fresh = await self.inner.put(key, payload)
                if fresh:
                    self._link.written.transferred(payload.nbytes, begun_s, time.monotonic())
            for codec, payload in forms.payloads.items() if fresh else ():
                self._counters.add("encoded_blocks", label=RAW if is_raw(payload) else codec)
                count_written(self._counters, payload.nbytes)
            return fresh

    async def _form(self, forms: Forms, tier: int) -> memoryview:
        def work(stop: threading.Event) -> memoryview:
            check_stop(stop)
            return self._encode(forms, tier)

        return await run_stoppable(self._threads.encode, work)

    async def close(self) -> None:
        """Calls that have not reached the inner store fail."""
        await self._reports.end_all()
        for pool in (self._threads.decode, self._threads.encode):
            pool.shutdown(wait=False, cancel_futures=True)
        await self.inner.close()
        for pool in (self._threads.decode, self._threads.encode):
            await run_in_own_thread(pool.shutdown)

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[Callable[[], memoryview]]:
        """A thread-safe function that gives a buffer, which is returned at the end."""
        lent: list[memoryview] = []

        def take() -> memoryview:
            try:
                lent.append(self._idle.pop())
            except IndexError:
                lent.append(on_page(self._payload_bytes))
            return lent[-1]

        try:
            yield take
        finally:
            self._idle += lent

    def _unpack(self, out: memoryview, size_bytes: int, stop: threading.Event) -> int:
        from sglang_cake.codecs.catalogue import chain_in, decodes_on_device, unpack

        check_stop(stop)
        payload = out[:size_bytes]
        if is_raw(payload):
            stays = size_bytes == RAW_HEAD_BYTES + self._layout.block_bytes
        else:
            stays = self._on_device and decodes_on_device(chain_in(payload))
        if stays:
            return size_bytes
        return unpack(self._layout, payload, out)

    def _decode(self, payload: memoryview, out: memoryview, stop: threading.Event) -> None:
        from sglang_cake.codecs.catalogue import decode, prepare

        check_stop(stop)
        ready = prepare if self._on_device else decode
        ready(self._layout, payload, out.cast("B"))


def may_lose(layout: BlockLayout, codec: str, max_error: float, rope_theta: float | None) -> bool:
    """Whether blocks from the store may differ from those that were put into it.

    Raises: ConfigError if the codec cannot encode such blocks.
    """
    if codec == RAW:
        return False
    chains = chains_of(layout, codec, max_error, rope_theta)
    return any(chain.loses for chain in chains.values())


@functools.lru_cache(maxsize=8)
def chains_of(
    layout: BlockLayout, codec: str, max_error: float, rope_theta: float | None
) -> Mapping[str, Chain]:
    """Compiled chains of all codecs that may be used, by codec. A server asks once for those of its
    layout, and again for each store that it opens.

    Raises: ConfigError if a codec cannot encode such blocks.
    """
    from sglang_cake.codecs.catalogue import chain_of

    named: tuple[str, ...] = (codec,)
    if codec == AUTO:
        lossy = max_error > 0 and takes_lossy(layout)
        named = tuple(name for name in CODECS if name != RAW and (lossy or name in LOSSLESS))
    chains = {name: chain_of(name, layout, rope_theta) for name in named}
    for chain in chains.values():
        chain.warm_up(layout)
    return chains
