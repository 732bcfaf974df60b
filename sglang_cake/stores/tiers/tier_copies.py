"""Blocks on their way to one tier in the background: written down after a put, moved up after a
read. Bounded by its buffers: when all are in use, a block is not copied, and that is counted.

The bytes are copied when they are offered and not read back from the tier that has them: they are
in memory now, while a read later would take the link from loads that somebody waits for, and might
find the block evicted.
"""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

import numpy as np

from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.threads import check_stop, run_stoppable

WRITES_AT_ONCE = 2
PIECE_BYTES = 1 << 20  # a cancelled caller waits for at most one


class PlainBuffer:
    """One block of ordinary memory. Implements `Buffer`."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = bytearray(size_bytes)

    @property
    def view(self) -> memoryview:
        return memoryview(self._memory)


class CopyQueue:
    """Copies for one tier. Belongs to one event loop, and starts nothing before it is used."""

    def __init__(
        self,
        write: Callable[[BlockKey, memoryview], Awaitable[object]],
        buffers: BufferPool,
        threads: Executor,
    ) -> None:
        """Args: write: stores one block in the tier; it must not raise."""
        self._write, self._buffers, self._threads = write, buffers, threads
        self._turn = asyncio.Semaphore(WRITES_AT_ONCE)
        self._coming: set[BlockKey] = set()  # being made, or copied into a buffer
        self._jobs: dict[BlockKey, asyncio.Task[None]] = {}

    async def offer(self, key: BlockKey, form: Callable[[], Awaitable[memoryview]]) -> bool:
        """Have the block written some time soon; False if there is no room for it.

        Args: form: gives the payload; asked only if there is room.
        The payload is not used after the return; cancelled, it returns once that is let go.
        Raises: what `form` raises; StoreUnavailable once the threads are shut down.
        """
        if key in self._jobs or key in self._coming:
            return True
        buffer = self._buffers.take()
        if buffer is None:
            return False
        self._coming.add(key)
        try:
            data = await form()
            await run_stoppable(self._threads, functools.partial(_copy, buffer.view, data))
            wanted = key in self._coming
        except BaseException:
            self._buffers.give(buffer)
            raise
        finally:
            self._coming.discard(key)
        if not wanted:
            self._buffers.give(buffer)
            return True
        task = asyncio.ensure_future(self._run(key, buffer, data.nbytes))
        self._jobs[key] = task
        task.add_done_callback(lambda task: self._done(key, buffer))
        return True

    async def forget(self, key: BlockKey) -> None:
        """When it returns, no copy of the block is waiting or being written any more."""
        self._coming.discard(key)
        task = self._jobs.get(key)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self, patience_s: float) -> int:
        """Write what is waiting for up to `patience_s`; how many blocks were then given up."""
        if self._jobs:
            await asyncio.wait(self._jobs.values(), timeout=patience_s)
        left = list(self._jobs.values())
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        return len(left)

    async def _run(self, key: BlockKey, buffer: Buffer, size_bytes: int) -> None:
        async with self._turn:
            await self._write(key, buffer.view[:size_bytes])

    def _done(self, key: BlockKey, buffer: Buffer) -> None:
        # Here and not in `_run`, which a task that is cancelled at once never enters.
        del self._jobs[key]
        self._buffers.give(buffer)


def _copy(target: memoryview, source: memoryview, stop: threading.Event) -> None:
    # NumPy lets go of the GIL while it copies; a plain assignment would stop every other thread.
    of = np.frombuffer(source, np.uint8)
    into = np.frombuffer(target, np.uint8)[: len(of)]
    for start in range(0, len(of), PIECE_BYTES):
        check_stop(stop)
        piece = slice(start, start + PIECE_BYTES)
        np.copyto(into[piece], of[piece])
