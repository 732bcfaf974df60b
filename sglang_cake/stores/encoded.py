"""Blocks that lie encoded in another store, and how a server's store is opened with a codec."""

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from sglang_cake.codecs.blocks import takes_lossy
from sglang_cake.codecs.frame import BlockFrame, encoded_frame
from sglang_cake.codecs.pipeline import Chain, Forms, is_raw
from sglang_cake.codecs.steps import Malformed
from sglang_cake.core.buffers import TellBytes, on_page
from sglang_cake.core.codec_names import AUTO, CODECS, LOSSLESS, RAW
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt, StoreError
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.namespace import Namespace
from sglang_cake.stores.base import Store, StoreSource
from sglang_cake.stores.open_store import open_store
from sglang_cake.stores.per_tier_encoding import FormOf, LinkSpeed, PerTierEncoding
from sglang_cake.stores.threads import check_stop, run_stoppable
from sglang_cake.stores.wrapper_store import CountedStore, WrapperStore, count_read, count_written

MAX_THREADS = 4  # of decoding; encoding has one, so that no load waits behind a write

# (forms of a block so far, number of a tier) -> the payload that it gets, which is among them then.
# Called in a thread.
Encode = Callable[[Forms, int], memoryview]


def decode_threads(depth: int) -> int:
    """How many blocks are decoded at once, of `depth` that may be read at once."""
    return max(1, min(MAX_THREADS, depth, len(os.sched_getaffinity(0)) // 2))


class EncodedStore(WrapperStore):
    """Implements `Store`, but for what `on_device` says. What is read is decoded by what stands in
    front of it.

    Of at most `depth` reads and `depth` writes, a read has a buffer of one payload, and a write one
    for each form of its block: no more than there are tiers.
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
        by_tier: bool = False,
        on_device: bool = False,
    ) -> None:
        """Args:
        inner: of encoded blocks; it is closed with this store.
        link: is told how fast `inner` is.
        payload_bytes: of an encoded block, at most.
        depth: reads, and writes, at once; more of them wait.
        by_tier: if `inner` has tiers, `encode` is asked for each; if not, one form is for all.
        on_device: `get_into` fills memory of `payload_bytes` with a payload that a device is to
            decode (`catalogue.prepare`), and not with a block.
        """
        super().__init__(inner)
        self._layout, self._encode = layout, encode
        self._tiers = inner if by_tier and isinstance(inner, PerTierEncoding) else None
        self._link, self._counters = link, counters
        self._payload_bytes, self._on_device = payload_bytes, on_device
        self._reading, self._writing = asyncio.Semaphore(depth), asyncio.Semaphore(depth)
        self._idle: list[memoryview] = []
        self._decoders = ThreadPoolExecutor(decode_threads(depth), "cake-decode")
        self._encoders = ThreadPoolExecutor(1, "cake-encode")

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`, without progress. A block that passed its checksum and cannot be decoded
        is deleted."""
        async with self._reading, self._lent() as take:
            payload = out if self._on_device else take()
            begun_s = time.monotonic()
            size_bytes = await self._inner.get_into(key, payload)
            self._link.read.landed(size_bytes, begun_s, time.monotonic())
            count_read(self._counters, size_bytes)
            try:
                work = functools.partial(self._decode, payload[:size_bytes], out)
                await run_stoppable(self._decoders, work)
            except Malformed as error:
                with contextlib.suppress(StoreError):  # it stays, and fails again
                    await self._inner.delete(key)
                raise BlockCorrupt(f"{key.hex()}: {error}") from None
            return out.nbytes

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        return await self._put_block(key, data, first=False)

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        return await self._put_block(key, data, first=True)

    async def _put_block(self, key: BlockKey, data: memoryview, *, first: bool) -> bool:
        assert data.nbytes == self._layout.block_bytes, data.nbytes
        async with self._writing, self._lent() as take:
            forms = Forms(data.cast("B"), first, take)
            fresh = await self._put(key, functools.partial(self._form, forms))
            for codec, payload in forms.payloads.items() if fresh else ():
                self._counters.add("encoded_blocks", label=RAW if is_raw(payload) else codec)
                count_written(self._counters, payload.nbytes)
            return fresh

    async def _put(self, key: BlockKey, form_of: FormOf) -> bool:
        if self._tiers is not None:
            return await self._tiers.put_forms(key, form_of)
        payload = await form_of(0)
        begun_s = time.monotonic()
        fresh = await self._inner.put(key, payload)
        if fresh:
            self._link.written.landed(payload.nbytes, begun_s, time.monotonic())
        return fresh

    async def _form(self, forms: Forms, tier: int) -> memoryview:
        def work(stop: threading.Event) -> memoryview:
            check_stop(stop)
            return self._encode(forms, tier)

        return await run_stoppable(self._encoders, work)

    async def close(self) -> None:
        """Calls that have not reached the inner store fail."""
        for pool in (self._decoders, self._encoders):
            pool.shutdown(wait=False, cancel_futures=True)
        await self._inner.close()
        for pool in (self._decoders, self._encoders):
            await asyncio.to_thread(pool.shutdown)

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[Callable[[], memoryview]]:
        """Gives buffers, also to other threads, until it ends."""
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

    def _decode(self, payload: memoryview, out: memoryview, stop: threading.Event) -> None:
        from sglang_cake.codecs.catalogue import decode, prepare

        check_stop(stop)
        ready = prepare if self._on_device else decode
        ready(self._layout, payload, out.cast("B"))


def open_blocks(
    sources: list[StoreSource],
    namespace: Namespace,
    layout: BlockLayout,
    *,
    codec: str,
    depth: int,
    max_error: float = 0.0,
    rope_theta: float | None = None,
    counters: Counters | None = None,
    on_device: bool = False,
) -> Store:
    """Open a namespace whose blocks are encoded by `codec`; the caller closes it. Compiles what the
    codec needs, which takes seconds the first time.

    Args:
        namespace: it names the codec.
        max_error: of `auto`.
        rope_theta: see `catalogue.chain_of`.
        on_device: see `EncodedStore`; of blocks that are not encoded it says nothing.
    Raises: StoreUnavailable; ConfigError, also if the codec cannot take such blocks.
    """
    counters = counters or Counters()
    if codec == RAW:
        return CountedStore(
            open_store(sources, BlockFrame(namespace, layout), depth=depth), counters
        )
    from sglang_cake.codecs.encoders import BestCodec, OneCodec

    chains = _chains(layout, codec, max_error, rope_theta)
    frame = encoded_frame(namespace, layout, codec)
    inner, link = open_store(sources, frame, depth=depth), LinkSpeed()
    links = inner.links() if isinstance(inner, PerTierEncoding) else [link]
    encode = (
        OneCodec(layout, codec, chains[codec]).encode
        if codec != AUTO
        else BestCodec(
            layout,
            chains,
            max_error=max_error,
            links=[each.bytes_per_s for each in links],
            decode_threads=decode_threads(depth),
            counters=counters,
            on_device=on_device,
        ).encode
    )
    return EncodedStore(
        inner,
        layout,
        encode,
        link=link,
        counters=counters,
        payload_bytes=frame.payload_bytes,
        depth=depth,
        by_tier=codec == AUTO,
        on_device=on_device,
    )


def check_codec(
    layout: BlockLayout, codec: str, max_error: float, rope_theta: float | None
) -> None:
    """Raises: ConfigError if the codec cannot take such blocks."""
    if codec != RAW:
        _chains(layout, codec, max_error, rope_theta)


def _chains(
    layout: BlockLayout, codec: str, max_error: float, rope_theta: float | None
) -> dict[str, Chain]:
    """What may be chosen, by codec, compiled. Raises: ConfigError."""
    from sglang_cake.codecs.catalogue import chain_of

    named: tuple[str, ...] = (codec,)
    if codec == AUTO:
        may_lose = max_error > 0 and takes_lossy(layout)
        named = tuple(name for name in CODECS if name != RAW and (may_lose or name in LOSSLESS))
    chains = {name: chain_of(name, layout, rope_theta) for name in named}
    for chain in chains.values():
        chain.warm_up(layout)
    return chains
