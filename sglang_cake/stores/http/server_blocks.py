"""Requests for one block: GET, HEAD, PUT, POST (check) and DELETE.

A GET sends the block's file as it is, by the kernel (`loop.sendfile`); the client checks the bytes.
A PUT checks the block before it becomes visible.
"""

import asyncio
import contextlib
import errno
import functools
import io
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from aiohttp import web

from sglang_cake.codecs.frame import HEADER_BYTES, Header, PayloadHasher, read_header
from sglang_cake.core.errors import BlockCorrupt, StoreFull
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.core.threads import LimitedThreads, check_stop
from sglang_cake.stores.file.block_files import NewFile, is_cached
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.request_body import (
    FLOOR_BYTES,
    RefusedRequest,
    accept_body,
    read_pieces,
    wanted_slice,
)
from sglang_cake.stores.http.server_metrics import ServerMetrics

T = TypeVar("T")

MAX_BLOCK_BYTES = 1 << 30  # with header
MAX_PUTS = 8  # at a time, in each process; each holds about two pieces in memory
# An upload of which a piece takes longer goes on without its place, as slow clients would stop the
# puts of others. It holds about a piece in memory, less than a lookup may.
PLACE_S = 1.0
READ_THREADS = 8
COPY_BYTES = 1 << 20  # read from the disk at a time
TLS_BYTES = 1 << 18  # read, encrypted and sent at a time, so that a slow reader holds little memory


class BlockCheck:
    """Checks a framed block piece by piece, without keeping it."""

    def __init__(self, digest: Digest, key: BlockKey, framed_bytes: int) -> None:
        self._digest = digest
        self._key = key
        self._framed_bytes = framed_bytes
        self._hashed = PayloadHasher()
        self._header: Header | None = None
        self._done = 0

    def feed(self, piece: memoryview) -> None:
        """Args: piece: the first one has the whole header. Raises: BlockCorrupt."""
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
    """Requests for the blocks of a folder, which stays the caller's.

    A request is cancelled when its client closes the connection. If it waits for a thread, it ends.
    If it has a thread, a read ends; a delete, a check and the commit of a put are completed.
    """

    def __init__(
        self,
        folder: BlockFolder,
        metrics: ServerMetrics,
        *,
        most_connections: int,
        namespace_quota_bytes: int | None,
        stuck_s: float,
    ) -> None:
        """Args:
        most_connections: to this process. A put that waits holds one, and lookups need some too.
        stuck_s: time limit of a transfer that hardly moves (see `request_body`), and of a put that
            waits for others.
        """
        self._folder = folder
        self._metrics = metrics
        self._quota_bytes = namespace_quota_bytes
        self._stuck_s = stuck_s
        # Also those that wait, and slow ones.
        self._most_puts = max(MAX_PUTS + 1, most_connections // 2)
        self._puts = 0
        self._put_places = asyncio.Semaphore(MAX_PUTS)
        self._readers = LimitedThreads(READ_THREADS, "cake-http-read")
        self._writers = LimitedThreads(MAX_PUTS, "cake-http-write")

    def close(self) -> None:
        """Blocks until the threads are done."""
        for threads in (self._readers, self._writers):
            threads.close()

    async def get(self, request: web.BaseRequest, block: protocol.Resource) -> web.StreamResponse:
        """GET and HEAD. Raises: BlockMissing, BlockCorrupt, StoreUnavailable; RefusedRequest."""
        is_use = request.headers.get(protocol.USE_HEADER) != protocol.NO_USE
        is_get = request.method == "GET"
        # `closing`: errors about the client do not reach the folder's context. Those of a read do.
        with contextlib.closing(contextlib.ExitStack()) as held:

            def open_block(stop: threading.Event) -> int:
                reading = self._reading(block, counts=is_get and is_use, in_cache=is_get, stop=stop)
                return held.enter_context(reading)

            fd = await self._readers.run(open_block)
            size = os.fstat(fd).st_size
            start, stop = 0, size
            response = web.StreamResponse(headers={"Accept-Ranges": "bytes"})
            response.content_type = protocol.BLOCK_TYPE
            if (asked := wanted_slice(request)) is not None:
                start, stop, _ = asked.indices(size)
                if start >= stop:
                    raise RefusedRequest(416, "no such bytes", {"Content-Range": f"bytes */{size}"})
                response.set_status(206)
                response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            response.content_length = stop - start
            if is_get:
                await self._send(request, response, fd, start, stop - start)
            return response

    async def _send(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        fd: int,
        start: int,
        count: int,
    ) -> None:
        """Send the headers and `count` bytes of the file. A failure closes the connection.

        The system drops a reader that takes nothing (TCP_USER_TIMEOUT); the time limit here drops a
        reader that is too slow.

        Raises: OSError, TimeoutError.
        """
        transport = request.transport
        if transport is None:
            raise ConnectionResetError(errno.ECONNRESET, "the connection is closed")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._stuck_s * (1 + count / FLOOR_BYTES)):
                await response.prepare(request)
                try:
                    file = io.FileIO(fd, closefd=False)
                    sent = await loop.sendfile(transport, file, start, count, fallback=False)
                except RuntimeError:  # before the first byte: not possible, as over TLS, or closed
                    sent = await self._copy(response, fd, start, count)
                if sent < count:
                    raise OSError(errno.EIO, "the file was truncated")
                await response.write_eof()
        except BaseException:
            transport.abort()  # the client would take an error's text for the block
            raise
        self._metrics.sent_bytes.inc(count)

    async def _copy(self, response: web.StreamResponse, fd: int, start: int, count: int) -> int:
        """Send bytes of the file through this process; returns how many there were."""
        sent = 0

        def read(_: threading.Event) -> bytes:
            return os.pread(fd, min(TLS_BYTES, count - sent), start + sent)

        while sent < count and (piece := await self._readers.run(read)):
            await response.write(piece)
            sent += len(piece)
        return sent

    async def put(self, request: web.BaseRequest, block: protocol.Resource) -> web.Response:
        """Raises: RefusedRequest; StoreFull; StoreUnavailable; BlockCorrupt for wrong bytes."""
        digest, key, size = block.digest, block.key, request.content_length
        if size is None:
            raise RefusedRequest(411, "write the Content-Length")
        if not HEADER_BYTES < size <= MAX_BLOCK_BYTES:
            raise RefusedRequest(413, f"a block has {HEADER_BYTES + 1} to {MAX_BLOCK_BYTES} bytes")
        async with self._put_place() as place:
            with self._metrics.puts.track_inprogress():
                async with entered(self._writers, self._writing(digest, key, size)) as file:
                    if file is None:
                        return web.Response(status=204)
                    await self._receive(request, BlockCheck(digest, key, size), file, place.close)
                return web.Response(status=201)

    @contextlib.asynccontextmanager
    async def _put_place(self) -> AsyncIterator[contextlib.ExitStack]:
        """Wait for one of the MAX_PUTS places, before the body is asked for. Closing the result
        leaves the place early.

        Raises: RefusedRequest if there are too many puts, or if no place becomes free in time.
        """
        busy = RefusedRequest(503, "too many puts at once", {"Retry-After": "1"})
        if self._puts >= self._most_puts:
            raise busy
        self._puts += 1
        try:
            try:
                async with asyncio.timeout(self._stuck_s):
                    await self._put_places.acquire()
            except TimeoutError:
                raise busy from None
            with contextlib.ExitStack() as place:
                place.callback(self._put_places.release)
                yield place
        finally:
            self._puts -= 1

    async def _receive(
        self,
        request: web.BaseRequest,
        check: BlockCheck,
        file: NewFile,
        leave_place: Callable[[], None],
    ) -> None:
        def keep(piece: bytearray, stop: threading.Event) -> None:
            check.feed(memoryview(piece))
            with self._folder.disk_errors():
                file.append([memoryview(piece)], stop)

        def commit(_: threading.Event) -> None:
            # The whole block is here. A client whose time limit ended would send all of it again,
            # so the commit is completed without the client.
            check.finish()
            with self._folder.disk_errors():
                file.commit(threading.Event())

        await accept_body(request)
        pieces = read_pieces(request, self._stuck_s)
        while True:
            # The time of the disk does not count: more puts would not help a slow disk.
            leaving = asyncio.get_running_loop().call_later(PLACE_S, leave_place)
            try:
                piece = await anext(pieces, None)
            finally:
                leaving.cancel()
            if piece is None:
                break
            self._metrics.received_bytes.inc(len(piece))
            await self._writers.run(functools.partial(keep, piece))
        await self._writers.run(commit)

    async def check(self, _: web.BaseRequest, block: protocol.Resource) -> web.Response:
        """A client received the block corrupt: check the file, and set it aside if it is corrupt.

        Raises: BlockMissing, BlockCorrupt, StoreUnavailable.
        """
        await self._readers.run(functools.partial(self._check, block.digest, block.key))
        return web.Response(status=204)

    async def delete(self, _: web.BaseRequest, block: protocol.Resource) -> web.Response:
        """Raises: StoreUnavailable."""
        await self._writers.run(lambda stop: self._folder.delete(block.digest, block.key))
        return web.Response(status=204)

    # The following methods run in threads.

    @contextlib.contextmanager
    def _reading(
        self, block: protocol.Resource, *, counts: bool, in_cache: bool, stop: threading.Event
    ) -> Iterator[int]:
        """As `BlockFolder.reading`, for a file whose header names this block. `in_cache`: the file
        is read into the page cache first. Raises: also Stopped."""
        digest, key = block.digest, block.key
        with self._folder.reading(digest, key, counts=counts) as (fd, size):
            if size > MAX_BLOCK_BYTES:
                raise BlockCorrupt(f"{size} bytes are no block")
            BlockCheck(digest, key, size).feed(memoryview(os.pread(fd, HEADER_BYTES, 0)))
            if in_cache and not is_cached(fd, size):
                read_into_cache(fd, stop)
            yield fd

    def _check(self, digest: Digest, key: BlockKey, _: threading.Event) -> None:
        # Completed without the client, whose time limit is short: the next reader would get the
        # same corrupt block.
        with self._folder.reading(digest, key, counts=False) as (fd, size):
            check = BlockCheck(digest, key, size)
            done = 0
            while piece := os.pread(fd, COPY_BYTES, done):
                check.feed(memoryview(piece))
                done += len(piece)
            check.finish()

    @contextlib.contextmanager
    def _writing(self, digest: Digest, key: BlockKey, size: int) -> Iterator[NewFile | None]:
        if not self._folder.descriptions.read(digest):
            raise RefusedRequest(
                409, "the namespace is not known here: PUT its namespace.json first"
            )
        self._check_quota(digest, size)  # before blocks are evicted for this one
        with self._folder.writing(digest, key, size) as file:
            if file is None:
                yield None
                return
            # Again, with all blocks that are being written: two blocks may fit one by one only.
            self._check_quota(digest, 0)
            yield file

    def _check_quota(self, digest: Digest, more_bytes: int) -> None:
        """Raises: StoreFull, StoreUnavailable."""
        quota_bytes = self._quota_bytes
        if quota_bytes is None or self._folder.used_bytes(digest) + more_bytes <= quota_bytes:
            return
        raise StoreFull(f"the namespace's quota of {quota_bytes} bytes is used up")


@contextlib.asynccontextmanager
async def entered(threads: LimitedThreads, context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a blocking context in `threads`.

    Exceptions inside do not reach the context: they are about the client, not the folder.
    """
    stack = contextlib.ExitStack()
    try:
        yield await threads.run(lambda stop: stack.enter_context(context))
    finally:  # also after a cancellation
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(threads.pool, stack.close))


def read_into_cache(fd: int, stop: threading.Event) -> None:
    """Read a file into the page cache, so that sending it never blocks the event loop.

    Raises: OSError; Stopped.
    """
    piece = bytearray(COPY_BYTES)
    done = 0
    while got := os.preadv(fd, [piece], done):
        check_stop(stop)
        done += got
