"""A link of a stated bandwidth in front of another store."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import Store
from sglang_cake.stores.wrapper_store import WrapperStore

# By what bytes are told to cross the link: so many, or what crosses it in so long, if that is more.
PIECE_BYTES, PIECE_S = 1 << 16, 0.002


class ThrottledStore(WrapperStore):
    """Implements `Store`: reads go one after another, first come first served.

    A read has the link for at least its bytes divided by `bytes_per_s`. One that is cancelled
    while it waits for the link costs the others nothing; one that is cancelled in the middle gives
    the link back at once, and so does one that ended without a block having crossed the link.
    Everything but reads goes straight through.
    """

    def __init__(
        self,
        inner: Store,
        *,
        bytes_per_s: float,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Args:
        block_bytes: how many crossed the link for a block that was corrupt, at most.
        clock, sleep: seconds; tests pass their own, which go together.
        """
        assert bytes_per_s > 0, bytes_per_s
        super().__init__(inner)
        self._clock, self._sleep = clock, sleep
        self._bytes_per_s, self._block_bytes = bytes_per_s, block_bytes
        self._piece_bytes = max(PIECE_BYTES, int(bytes_per_s * PIECE_S))
        self._link = asyncio.Lock()  # hands itself on in the order of asking

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        async with self._link:
            begun_s = self._clock()
            try:
                size_bytes = await self._inner.get_into(key, out)
            except BlockCorrupt:  # found out only after the bytes had come over
                await self._keep_link(begun_s + self._block_bytes / self._bytes_per_s)
                raise
            if progress is not None:
                for at_bytes in range(0, size_bytes, self._piece_bytes):
                    await self._keep_link(begun_s + at_bytes / self._bytes_per_s)
                    progress(at_bytes)
            await self._keep_link(begun_s + size_bytes / self._bytes_per_s)
            return size_bytes

    async def _keep_link(self, until_s: float) -> None:
        left_s = until_s - self._clock()
        if left_s > 0:
            await self._sleep(left_s)
