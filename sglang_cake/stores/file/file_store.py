"""One namespace of a folder of blocks, for an event loop."""

import asyncio
import functools
import logging
import os
import threading
from collections.abc import AsyncIterator, Sequence
from itertools import islice

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame, Incoming
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo, StoreStats
from sglang_cake.stores.file.blockfile import read_framed
from sglang_cake.stores.file.folder import LIST_AT_ONCE, BlockFolder
from sglang_cake.stores.file.index_supervisor import CLOSE_S
from sglang_cake.stores.request_info import RequestFacts
from sglang_cake.stores.threads import DaemonPool, check_stop, run_stoppable

logger = logging.getLogger(__name__)
ASKERS = 2  # threads


class FileStore:
    """Implements `Store`. Reads and writes have a pool of `threads` each, and what only asks has
    its own, so that none of them waits behind the others on a slow disk."""

    def __init__(
        self, folder: BlockFolder, frame: BlockFrame, *, threads: int, reads_count: bool = True
    ) -> None:
        """Open the namespace in `folder`, which is closed with this store.

        Args: reads_count: as use, for eviction.
        Raises: StoreUnavailable; ConfigError if the folder describes another namespace.
        """
        self._folder, self._frame, self._reads_count = folder, frame, reads_count
        folder.claim(frame.digest, frame.namespace.describe())
        self._readers = DaemonPool(threads, "cake-file-read")
        self._writers = DaemonPool(threads, "cake-file-write")
        self._askers = DaemonPool(ASKERS, "cake-file-ask")
        self._checkers = DaemonPool(threads, "cake-file-check")  # for the readers

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await run_stoppable(self._askers, functools.partial(self._contains, list(keys)))

    async def touched(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """As in `AccessListener`; waits for nothing."""
        self._folder.touched(self._frame.digest, keys, facts)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`. Cancelled, it returns once its thread has let go of `out`."""
        return await run_stoppable(self._readers, functools.partial(self._get, key, out, progress))

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`. Cancelled, it returns once its thread has let go of `data`."""
        assert self._frame.takes(data.nbytes), data.nbytes
        work = functools.partial(self._put, key, data.cast("B"))
        return await run_stoppable(self._writers, work)

    async def delete(self, key: BlockKey) -> None:
        await run_stoppable(self._writers, functools.partial(self._delete, key))

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        blocks = self._folder.list_blocks(self._frame.digest)
        while batch := await run_stoppable(
            self._askers, lambda stop: list(islice(blocks, LIST_AT_ONCE))
        ):
            for block in batch:
                yield block

    async def remove_description(self) -> None:
        """As in `Describing`; the namespace's folder goes with it."""
        digest = self._frame.digest
        await run_stoppable(self._writers, lambda stop: self._folder.remove_namespace(digest))

    async def stats(self) -> StoreStats:
        return await run_stoppable(self._askers, lambda stop: self._folder.stats())

    async def close(self) -> None:
        """Calls still queued fail; those that run end as they would have. What a broken disk
        holds for longer than CLOSE_S is left behind."""
        for pool in (self._readers, self._writers, self._askers):
            pool.shutdown(wait=False, cancel_futures=True)
        for last in (self._readers, self._writers, self._askers, self._checkers):
            last.shutdown(wait=False)
            if not await asyncio.to_thread(last.join, CLOSE_S):
                logger.warning("a disk did not answer within %.0f s; left as it is", CLOSE_S)
        await asyncio.to_thread(self._folder.close)

    # What follows runs in the pools' threads.

    def _contains(self, keys: list[BlockKey], stop: threading.Event) -> list[bool]:
        frame = self._frame
        return self._folder.contains(frame.digest, keys, frame.known_bytes, stop)

    def _get(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None, stop: threading.Event
    ) -> int:
        with self._folder.reading(self._frame.digest, key, counts=self._reads_count) as fd:
            size = os.fstat(fd).st_size
            if not self._frame.fits(size):
                raise BlockCorrupt(f"{size} bytes, a block file has {self._frame.framed_bytes}")
            block = Incoming(self._frame, key, out, progress)
            return read_framed(fd, block, size, stop, self._checkers)

    def _put(self, key: BlockKey, data: memoryview, stop: threading.Event) -> bool:
        frame = self._frame
        with self._folder.writing(frame.digest, key, HEADER_BYTES + len(data)) as file:
            if file is None:
                return False
            file.append([memoryview(frame.header(key, data)), data], stop)
            file.commit(stop)
            return True

    def _delete(self, key: BlockKey, stop: threading.Event) -> None:
        check_stop(stop)
        self._folder.delete(self._frame.digest, key)
