"""One namespace of blocks in a Mooncake Store."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame, Incoming
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockCorrupt, StoreError, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo, StoreStats
from sglang_cake.stores.mooncake.mooncake_calls import Crew, Hold
from sglang_cake.stores.mooncake.mooncake_engine import Engine, MooncakePlace, Slots

T = TypeVar("T")

PATIENCE_S = 5.0  # for an answer; the library itself waits for about 30
RETRY_S = 5.0  # between two attempts to join the store
PIECE_BYTES = 2**18  # copied and hashed at once: stays in the CPU's cache


class MooncakeStore:
    """Implements `Store`: one object a block, framed as in a file.

    The engine reads and writes slots of registered memory, one for each read and write at a time,
    so a block is copied once in this process, and hashed on the way. Callers never wait longer than
    PATIENCE_S, and a call that hangs holds a slot, never the caller's memory. A lookup is one round
    trip. An object with wrong bytes is removed by who reads it.
    """

    def __init__(self, place: MooncakePlace, frame: BlockFrame, *, depth: int) -> None:
        """Joins the store with the first call. Args: depth: reads, and writes, at once."""
        self._place, self._frame = place, frame
        self._slots = Slots(2 * depth, frame.framed_bytes)
        self._reads = Crew("cake-mooncake-read", depth, patience_s=PATIENCE_S)
        self._writes = Crew("cake-mooncake-write", depth, patience_s=PATIENCE_S)
        self._asks = Crew("cake-mooncake-ask", 1, patience_s=PATIENCE_S)
        self._joining: asyncio.Task[Engine] | None = None
        self._joining_since_s = 0.0
        self._closed = False

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        names = [self._name(key) for key in keys]
        return await self._call(self._asks, lambda engine, hold: engine.exist(names))

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        try:
            return await self._call(
                self._reads, lambda engine, hold: self._get(engine, key, out, progress, hold)
            )
        except BlockCorrupt:
            # If that fails, the next reader finds it again.
            with contextlib.suppress(StoreError):
                await self.delete(key)
            raise

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        assert self._frame.takes(data.nbytes), data.nbytes
        view = data.cast("B")
        return await self._call(
            self._writes, lambda engine, hold: self._put(engine, key, view, hold)
        )

    async def delete(self, key: BlockKey) -> None:
        name = self._name(key)
        await self._call(self._writes, lambda engine, hold: engine.remove(name))

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """Raises: StoreUnavailable, always."""
        raise StoreUnavailable("Mooncake Store cannot list what it holds")
        yield  # makes it an iterator

    async def stats(self) -> StoreStats:
        """Nothing: the engine tells its clients only about objects they name."""
        self._check_open()
        return StoreStats()

    async def close(self) -> None:
        """Waits for calls that are under way, for about 30 s where a peer hangs.

        What this process has lent to the store is gone then, and the blocks in it.
        """
        self._closed = True
        crews = (self._reads, self._writes, self._asks)
        for crew in crews:
            crew.shut()
        for crew in crews:
            await asyncio.to_thread(crew.wait)
        joining, self._joining = self._joining, None
        if joining is not None:
            with contextlib.suppress(StoreUnavailable):
                await asyncio.to_thread((await joining).close)

    async def _call(self, crew: Crew, work: Callable[[Engine, Hold], T]) -> T:
        engine = await self._joined()
        return await crew.call(lambda hold: work(engine, hold))

    async def _joined(self) -> Engine:
        """Raises: StoreUnavailable; while the store is being joined, after PATIENCE_S from then."""
        self._check_open()
        now_s = time.monotonic()
        failed = self._joining is not None and self._joining.done() and self._joining.exception()
        if self._joining is None or (failed and now_s >= self._joining_since_s + RETRY_S):
            self._joining_since_s = now_s
            joining = asyncio.to_thread(Engine, self._place, self._slots)
            self._joining = asyncio.create_task(joining)
        if not self._joining.done():
            left_s = max(0.0, self._joining_since_s + PATIENCE_S - now_s)
            await asyncio.wait((self._joining,), timeout=left_s)
            self._check_open()
        if not self._joining.done():
            raise StoreUnavailable(f"Mooncake's master at {self._place.host} does not answer")
        return self._joining.result()

    def _name(self, key: BlockKey) -> str:
        return f"{self._frame.digest.hex()}/{key.hex()}"

    # What follows runs in the crews' threads.

    def _get(
        self,
        engine: Engine,
        key: BlockKey,
        out: memoryview,
        progress: TellBytes | None,
        hold: Hold,
    ) -> int:
        with self._slots.one() as slot:
            count = engine.get_into(self._name(key), slot)
            if not self._frame.fits(count):
                raise BlockCorrupt(f"{count} bytes, a block has {self._frame.framed_bytes}")
            with hold:
                block = Incoming(self._frame, key, out, progress)
                for start in range(0, count, PIECE_BYTES):
                    block.feed(slot.view[start : min(start + PIECE_BYTES, count)])
                return block.finish()

    def _put(self, engine: Engine, key: BlockKey, data: memoryview, hold: Hold) -> bool:
        # The engine takes a second put of a name for done.
        if engine.exist([self._name(key)])[0]:
            return False
        with self._slots.one() as slot:
            with hold:
                slot.view[:HEADER_BYTES] = self._frame.header(key, data)
                slot.view[HEADER_BYTES : HEADER_BYTES + len(data)] = data
            return engine.put_new(self._name(key), slot, HEADER_BYTES + len(data))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")
