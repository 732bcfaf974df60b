"""The server's blocks: sent from the page cache as they are, taken in only when they are right."""

import asyncio
import contextlib
import errno
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

from aiohttp import web

from sglang_cake.codecs.frame import HEADER_BYTES, Header, PayloadHasher, read_header
from sglang_cake.core.errors import BlockCorrupt, StoreFull
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.file.blockfile import NewFile
from sglang_cake.stores.file.folder import BlockFolder
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.block_answer import SentAnswer, block_fields, head_of
from sglang_cake.stores.http.request_body import (
    Refused,
    accept_body,
    read_pieces,
    wanted_slice,
    while_it_moves,
)
from sglang_cake.stores.http.sendfile import is_cached, read_in, send_at_once, send_rest
from sglang_cake.stores.http.shared_counters import Row
from sglang_cake.stores.threads import check_stop, run_stoppable

T = TypeVar("T")

MAX_BLOCK_BYTES = 1 << 30  # with header
MAX_PUTS = 8  # at once, in all processes; each holds about two pieces
READ_THREADS = 8
ASK_THREADS = 4  # of their own: a slow disk holds up no lookup
CHECK_BYTES = 1 << 20


class NotInMemory(Exception):
    """A header would have to be read from the disk."""


class PassingBlock:
    """Checks a framed block that passes by in pieces, and keeps none of it."""

    def __init__(self, digest: Digest, key: BlockKey, framed_bytes: int) -> None:
        self._digest, self._key, self._framed_bytes = digest, key, framed_bytes
        self._hashed = PayloadHasher()
        self._header: Header | None = None
        self._done = 0

    def feed(self, piece: memoryview) -> None:
        """The first piece has the whole header. Raises: BlockCorrupt."""
        self._done += len(piece)
        if self._header is None:
            self._header = self._check(bytes(piece[:HEADER_BYTES]))
            piece = piece[HEADER_BYTES:]
        self._hashed.update(piece)

    def _check(self, raw: bytes) -> Header:
        header = read_header(raw)
        if header.namespace != self._digest:
            raise BlockCorrupt(f"belongs to namespace {header.namespace.hex()}")
        if header.key != self._key:
            raise BlockCorrupt(f"holds another block, {header.key.hex()}")
        if header.payload_bytes + HEADER_BYTES != self._framed_bytes:
            raise BlockCorrupt(f"{self._framed_bytes} bytes, with a payload of another length")
        return header

    def finish(self) -> None:
        """Raises: BlockCorrupt."""
        if self._header is None or self._done != self._framed_bytes:
            raise BlockCorrupt(f"ends after {self._done} of {self._framed_bytes} bytes")
        if self._hashed.digest() != self._header.payload_checksum:
            raise BlockCorrupt("the payload's checksum does not match")


class BlockService:
    """GET, HEAD, PUT and DELETE of one block of a folder."""

    def __init__(
        self,
        folder: BlockFolder,
        is_claimed: Callable[[Digest], bool],
        counts: Row,
        namespace_quota_bytes: int | None,
    ) -> None:
        """Args: is_claimed: whether the folder has the namespace; blocking."""
        self._folder, self._is_claimed, self._counts = folder, is_claimed, counts
        self._quota_bytes = namespace_quota_bytes
        self._readers = ThreadPoolExecutor(READ_THREADS, "cake-http-read")
        self.askers = ThreadPoolExecutor(ASK_THREADS, "cake-http-ask")
        self._writers = ThreadPoolExecutor(MAX_PUTS, "cake-http-write")

    def close(self) -> None:
        """Blocks until the threads are done."""
        for pool in (self._readers, self.askers):
            pool.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)

    def is_there(self, digest: Digest, key: BlockKey) -> bool:
        """Whether the block has a file, which may then be opened without a thread. Of one that has
        none, the books may have to be told, which can take its time."""
        return self._folder.has_file(digest, key)

    @contextlib.contextmanager
    def reading(
        self, digest: Digest, key: BlockKey, *, counts: bool, at_once: bool = False
    ) -> Iterator[int]:
        """As `BlockFolder.reading`, of a file that says of itself to be this block: nothing else
        is ever sent.

        Args: at_once: raise NotInMemory rather than wait for the disk to say so.
        """
        with self._folder.reading(digest, key, counts=counts) as fd:
            size = os.fstat(fd).st_size
            if size > MAX_BLOCK_BYTES:
                raise BlockCorrupt(f"{size} bytes are no block")
            PassingBlock(digest, key, size).feed(memoryview(_header(fd, at_once=at_once)))
            yield fd

    async def in_thread(self, work: Callable[[threading.Event], T]) -> T:
        """Have one of the threads for reads do `work`, as `run_stoppable` does."""
        return await run_stoppable(self._readers, work)

    async def bring_in(self, fd: int, start: int, stop: int) -> None:
        """Have bytes of a file in the page cache. Raises: OSError."""
        await self.in_thread(functools.partial(read_in, fd, start, stop))

    async def get(
        self, request: web.BaseRequest, digest: Digest, key: BlockKey
    ) -> web.StreamResponse:
        """Raises: BlockMissing, BlockCorrupt, StoreUnavailable."""
        told_so = request.headers.get(protocol.USE_HEADER) == protocol.NO_USE
        counts = request.method == "GET" and not told_so
        async with entered(self._readers, self.reading(digest, key, counts=counts)) as fd:
            size = os.fstat(fd).st_size
            status, start, stop, place = 200, 0, size, {}
            if (asked := wanted_slice(request)) is not None:
                start, stop, _ = asked.indices(size)
                if start >= stop:
                    raise Refused(416, "no such bytes", {"Content-Range": f"bytes */{size}"})
                status, place = 206, {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
            fields = block_fields(stop - start) | place
            if request.method == "HEAD" or start == stop:
                return web.StreamResponse(status=status, headers=fields)
            keep_alive = request.keep_alive
            head = head_of(status, fields, keep_alive=keep_alive)
            await self._send(request, head, fd, start, stop - start)
            return SentAnswer(status, keep_alive=keep_alive)

    async def _send(
        self, request: web.BaseRequest, head: bytes, fd: int, start: int, count: int
    ) -> None:
        """Whoever reads the bytes checks them. A send that fails ends the connection."""
        transport = request.transport
        if transport is None:
            return
        try:
            if not is_cached(fd, start, start + count):
                await self.bring_in(fd, start, start + count)
            drain = request.writer.drain
            if transport.get_write_buffer_size():  # of an answer that nobody takes
                async with while_it_moves():
                    await drain()
            sent = send_at_once(transport, head, fd, start, count)
            if sent < count:
                async with while_it_moves() as moved:
                    await send_rest(transport, fd, start + sent, count - sent, moved, drain)
            self._counts["sent_bytes"] += count
        except BaseException as error:  # whatever came after this would be taken for the block
            transport.abort()
            if not isinstance(error, OSError | RuntimeError):  # RuntimeError: it is closing
                raise

    async def put(self, request: web.BaseRequest, digest: Digest, key: BlockKey) -> web.Response:
        """Raises: Refused, StoreFull, StoreUnavailable; BlockCorrupt if the bytes are wrong."""
        size = request.content_length
        if size is None:
            raise Refused(411, "write the Content-Length")
        if not HEADER_BYTES < size <= MAX_BLOCK_BYTES:
            raise Refused(413, f"a block has {HEADER_BYTES + 1} to {MAX_BLOCK_BYTES} bytes")
        if self._counts.tally.total("puts") >= MAX_PUTS:
            raise Refused(503, "too many puts at once", {"Retry-After": "1"})
        self._counts["puts"] += 1
        try:
            async with entered(self._writers, self._writing(digest, key, size)) as file:
                if file is None:
                    return web.Response(status=204)
                await self._take(request, PassingBlock(digest, key, size), file)
            return web.Response(status=201)
        finally:
            self._counts["puts"] -= 1

    async def _take(self, request: web.BaseRequest, block: PassingBlock, file: NewFile) -> None:
        def keep(piece: bytearray, stop: threading.Event) -> None:
            block.feed(memoryview(piece))
            file.append([memoryview(piece)], stop)

        def commit(stop: threading.Event) -> None:
            block.finish()
            file.commit(stop)

        await accept_body(request)
        async with while_it_moves() as moved:
            async for piece in read_pieces(request, moved):
                self._counts["received_bytes"] += len(piece)
                await run_stoppable(self._writers, functools.partial(keep, piece))
        await run_stoppable(self._writers, commit)

    async def check(self, digest: Digest, key: BlockKey) -> web.Response:
        """Somebody found the block corrupt: read it, and set it aside if it is so here, too.

        Raises: BlockMissing, BlockCorrupt, StoreUnavailable.
        """
        await run_stoppable(self._readers, functools.partial(self._check, digest, key))
        return web.Response(status=204)

    async def delete(self, digest: Digest, key: BlockKey) -> web.Response:
        """Raises: StoreUnavailable."""
        await run_stoppable(self._writers, lambda stop: self._folder.delete(digest, key))
        return web.Response(status=204)

    # What follows runs in threads.

    def _check(self, digest: Digest, key: BlockKey, stop: threading.Event) -> None:
        with self._folder.reading(digest, key, counts=False) as fd:
            size = os.fstat(fd).st_size
            block, done = PassingBlock(digest, key, size), 0
            while done < size:
                check_stop(stop)
                piece = os.pread(fd, CHECK_BYTES, done)
                if not piece:
                    break
                block.feed(memoryview(piece))
                done += len(piece)
            block.finish()

    @contextlib.contextmanager
    def _writing(self, digest: Digest, key: BlockKey, size: int) -> Iterator[NewFile | None]:
        if not self._is_claimed(digest):
            raise Refused(409, "the namespace is not known here: PUT its namespace.json first")
        self._check_quota(digest, size)  # before others are evicted for it
        with self._folder.writing(digest, key, size) as file:
            if file is None:
                yield None
                return
            # Once more, with all that is being written: of two that fit alone one may not.
            self._check_quota(digest, 0)
            yield file

    def _check_quota(self, digest: Digest, more_bytes: int) -> None:
        """Raises: StoreFull, StoreUnavailable."""
        quota_bytes = self._quota_bytes
        if quota_bytes is None or self._folder.used_bytes(digest) + more_bytes <= quota_bytes:
            return
        raise StoreFull(f"the namespace's quota of {quota_bytes} bytes is used up")


def _header(fd: int, *, at_once: bool) -> bytes:
    """The first HEADER_BYTES of a file, or fewer. Raises: NotInMemory; OSError."""
    if not at_once:
        return os.pread(fd, HEADER_BYTES, 0)
    raw = bytearray(HEADER_BYTES)
    try:
        got = os.preadv(fd, [raw], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        raise NotInMemory from None
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return os.pread(fd, HEADER_BYTES, 0)  # as tmpfs, which is memory
    return bytes(raw[:got])


@contextlib.asynccontextmanager
async def entered(pool: ThreadPoolExecutor, context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a blocking context in `pool`.

    It is not told of exceptions inside: those are the client's, and none of the folder's business.
    """
    stack = contextlib.ExitStack()
    try:
        yield await run_stoppable(pool, lambda stop: stack.enter_context(context))
    finally:  # runs on when this is cancelled
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(pool, stack.close))
