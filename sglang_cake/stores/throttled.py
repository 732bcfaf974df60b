"""A limit on the bandwidth of reads, in front of another store."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.threads import wait_uncancelled
from sglang_cake.stores.base import (
    Store,
    StoredNamespace,
    StoreLayer,
    StoreSource,
    WrapperStore,
    depth_of,
    describe,
)

# Progress is reported in pieces of LEAST_PIECE_BYTES, or of the bytes of PIECE_S if that is more.
LEAST_PIECE_BYTES = 1 << 16
PIECE_S = 0.002


class ThrottledLink:
    """A lock that the reads of one event loop hold one after another."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # fair: in order of arrival
        self.free_s = -math.inf  # when the last read gave the link back


ThrottledLinks = dict[asyncio.AbstractEventLoop, ThrottledLink]


class ThrottledStore(WrapperStore):
    """Implements `Store`: reads hold a link one after another, in order of arrival.

    A read holds the link for at least its bytes divided by `bytes_per_s`, and until the inner store
    has answered. All reads that were asked for run in the inner store meanwhile. A cancelled read
    releases the link at once, and so does a read of a missing block. Other calls are not delayed.
    """

    def __init__(
        self,
        inner: Store,
        *,
        bytes_per_s: float,
        block_bytes: int,
        links: ThrottledLinks | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Args:
        block_bytes: bytes that are charged for a corrupt block.
        links: shared with other stores of the source; None: own links.
        """
        assert bytes_per_s > 0, bytes_per_s
        super().__init__(inner)
        self._clock = clock
        self._sleep = sleep
        self._bytes_per_s = bytes_per_s
        self._block_bytes = block_bytes
        self._piece_bytes = max(LEAST_PIECE_BYTES, int(bytes_per_s * PIECE_S))
        self._links = {} if links is None else links

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        asked_s = self._clock()
        link = self._links.setdefault(asyncio.get_running_loop(), ThrottledLink())
        reading = asyncio.ensure_future(self.inner.get_into(key, out))
        try:
            async with link.lock:
                begun_s = max(asked_s, link.free_s)
                try:
                    size_bytes, link.free_s = await self._cross(reading, begun_s, progress)
                except BaseException:
                    link.free_s = self._clock()
                    raise
                return size_bytes
        finally:
            reading.cancel()
            await wait_uncancelled(reading)

    async def _cross(
        self, reading: "asyncio.Future[int]", begun_s: float, progress: TellBytes | None
    ) -> tuple[int, float]:
        """Returns the size in bytes, and when the link was free again."""
        try:
            size_bytes = await reading
        except BlockCorrupt:  # found only after the bytes had crossed the link
            await self._keep_link(begun_s + self._block_bytes / self._bytes_per_s)
            raise
        if progress is not None:
            for at_bytes in range(0, size_bytes, self._piece_bytes):
                await self._keep_link(begun_s + at_bytes / self._bytes_per_s)
                progress(at_bytes)
        return size_bytes, await self._keep_link(begun_s + size_bytes / self._bytes_per_s)

    async def _keep_link(self, until_s: float) -> float:
        """Returns when the link is free: `until_s`, or now if that is later. A sleep ends late: the
        next read does not begin later by that."""
        now_s = self._clock()
        if now_s < until_s:
            await self._sleep(until_s - now_s)
        return max(now_s, until_s)


@dataclass(frozen=True, slots=True)
class ThrottledSource:
    """Implements `StoreSource`: another source, whose stores share a limited bandwidth, as those of
    a block's slices."""

    inner: StoreSource
    bytes_per_s: float
    links: ThrottledLinks = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def depth(self) -> int:
        return depth_of(self.inner)

    def check(self) -> None:
        self.inner.check()

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        return ThrottledStore(
            self.inner.open(frame, depth=depth),
            bytes_per_s=self.bytes_per_s,
            block_bytes=frame.payload_bytes,
            links=self.links,
        )

    async def namespaces(self) -> list[StoredNamespace]:
        return await self.inner.namespaces()

    def describe(self) -> StoreLayer:
        settings = {"bandwidth_bytes_per_s": self.bytes_per_s}
        return StoreLayer("ThrottledStore", settings, (describe(self.inner),))
