"""A client's connection: plain GETs of blocks are answered here, all else by aiohttp.

aiohttp takes two tasks and three turns of the event loop for a request, which for a block of 1 MiB
in the page cache costs as much as sending it. Here the block leaves in the turn in which its
request came, as far as the connection takes it.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

from sglang_cake.stores.http.block_answer import block_fields, head_of, plain_answer
from sglang_cake.stores.http.connection_places import Place
from sglang_cake.stores.http.error_responses import refusal_of
from sglang_cake.stores.http.fast_path import MAX_BYTES, PlainGet, read_plain_get
from sglang_cake.stores.http.http_server import StoreServer
from sglang_cake.stores.http.request_body import while_it_moves
from sglang_cake.stores.http.sendfile import is_cached, send_at_once, send_rest
from sglang_cake.stores.http.server_blocks import NotInMemory


@dataclass(slots=True)
class _Block:
    """A block that is being sent."""

    fd: int
    size: int
    head: bytes
    sent: int | None = None  # bytes of the block; None: nor has the head


class BlockConnection(asyncio.BufferedProtocol):
    """Without TLS. As soon as anything else than a plain GET comes, aiohttp has the connection for
    good: up to there every byte belonged to a request that has its answer, so none is pending."""

    def __init__(
        self,
        server: StoreServer,
        place: Place,
        new_http: Callable[[Place], asyncio.Protocol],
        here: "set[BlockConnection]",
        idle_s: float,
    ) -> None:
        """Args: place: the connection's. new_http: makes who takes over. here: connections that
        are not taken over, for as long as they are open. idle_s: how long it may be without a
        request."""
        self._server, self._place, self._new_http = server, place, new_http
        self._here, self._idle_s = here, idle_s
        self._loop = asyncio.get_running_loop()
        self._room = memoryview(bytearray(MAX_BYTES))
        self._held = 0  # bytes of the next request that have come
        self._task: asyncio.Task[None] | None = None  # of an answer that takes longer
        self._left: asyncio.Future[None] | None = None  # while bytes wait in the transport
        self._ending = False  # no more requests come
        self._used_s = self._loop.time()

    # ---- as asyncio calls it ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(0)  # so that we hear when nothing waits any more
        self._timer = self._loop.call_later(self._idle_s, self._look)
        self._here.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self.resume_writing()
        self._server.left(self._place)

    def eof_received(self) -> bool:
        self._ending = True
        return self._task is not None  # what was asked for is still sent

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room[self._held :]

    def buffer_updated(self, nbytes: int) -> None:
        self._held += nbytes
        if self._task is None:
            self._take()
        else:  # the next request, before this one's answer has left
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._left = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._left is not None and not self._left.done():
            self._left.set_result(None)
        self._left = None

    # ---- the connection ----

    def abort(self) -> None:
        """End it, whatever is under way."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()

    def _look(self) -> None:
        left_s = self._used_s + self._idle_s - self._loop.time()
        if self._task is None and left_s <= 0:
            self._transport.close()
        else:
            self._timer = self._loop.call_later(max(left_s, 1.0), self._look)

    def _leave(self) -> None:
        self._timer.cancel()
        self._here.discard(self)

    def _take(self) -> None:
        data = bytes(self._room[: self._held])
        get = read_plain_get(data)
        if get is not None and self._server.lets_pass(get.authorization):
            self._held -= get.size
            self._room[: self._held] = data[get.size :]
            self._place.begin()
            self._answer(get)
            return
        if self._ending:  # half a request
            self._transport.close()
            return
        self._leave()
        http, transport = self._new_http(self._place), self._transport
        transport.set_write_buffer_limits()
        transport.set_protocol(http)
        http.connection_made(transport)
        if self._left is not None:  # of an error's text
            http.pause_writing()
        http.data_received(data)

    # ---- answers ----

    def _answer(self, get: PlainGet) -> None:
        blocks, held, block = self._server.blocks, contextlib.ExitStack(), None
        try:
            # A file that is there is opened at once: the way to a thread and back takes longer. A
            # block that is not may have to be struck from the books, which can take its time.
            if self._left is None and blocks.is_there(get.digest, get.key):
                with contextlib.suppress(NotInMemory):
                    block = self._open(get, held, at_once=True)
                    if is_cached(block.fd, 0, block.size):
                        self._begin(block)
        except Exception as error:
            self._failed(held, block, error)
        else:
            if block is not None and block.sent == block.size:
                self._answered(held, block)
            else:
                self._task = self._loop.create_task(self._go_on(get, held, block))

    async def _go_on(self, get: PlainGet, held: contextlib.ExitStack, block: _Block | None) -> None:
        """What of an answer cannot be done at once."""
        blocks = self._server.blocks
        try:
            with self._server.under_way():
                if block is None:
                    async with while_it_moves():  # an answer that nobody takes
                        await self._has_left()
                    block = await blocks.in_thread(lambda stop: self._open(get, held))
                if block.sent is None:
                    await blocks.bring_in(block.fd, 0, block.size)
                    self._begin(block)
                await self._send_rest(held, block)
        except Exception as error:
            self._failed(held, block, error)
        except BaseException:  # cancelled
            held.close()
            self._transport.abort()
            raise
        else:
            self._answered(held, block)

    def _open(self, get: PlainGet, held: contextlib.ExitStack, *, at_once: bool = False) -> _Block:
        """Raises: StoreError; NotInMemory if it is to be done `at_once`."""
        reading = self._server.blocks.reading
        fd = held.enter_context(reading(get.digest, get.key, counts=get.counts, at_once=at_once))
        size = os.fstat(fd).st_size
        return _Block(fd, size, head_of(200, block_fields(size), keep_alive=True))

    def _begin(self, block: _Block) -> None:
        """Raises: OSError."""
        block.sent = 0  # whatever happens now, something may have left
        block.sent = send_at_once(self._transport, block.head, block.fd, 0, block.size)

    async def _send_rest(self, held: contextlib.ExitStack, block: _Block) -> None:
        """Raises: OSError, RuntimeError, TimeoutError."""
        assert block.sent is not None
        async with while_it_moves() as moved:
            rest = block.size - block.sent
            await send_rest(self._transport, block.fd, block.sent, rest, moved, self._has_left)
            held.close()  # the last bytes are copied
            await self._has_left()

    async def _has_left(self) -> None:
        """Wait until nothing waits in the transport. Raises: ConnectionResetError."""
        if self._left is not None:
            await self._left
        if self._transport.is_closing():  # it forgot what waited
            raise ConnectionResetError(errno.ECONNRESET, "closed meanwhile")

    def _answered(self, held: contextlib.ExitStack, block: _Block) -> None:
        held.close()
        self._server.counts["sent_bytes"] += block.size
        self._ended(200)

    def _failed(self, held: contextlib.ExitStack, block: _Block | None, error: Exception) -> None:
        held.close()
        if self._transport.is_closing():
            error = ConnectionResetError(errno.ECONNRESET, "closed meanwhile")
        refused = refusal_of(error, "GET", "of a block")
        if block is None or block.sent is None:
            self._transport.write(plain_answer(refused.status, f"{refused}\n"))
        else:  # whatever came now would be taken for the block
            self._transport.abort()
        self._ended(refused.status)

    def _ended(self, status: int) -> None:
        self._server.counts.answered("GET", status)
        self._task, self._used_s = None, self._loop.time()
        self._place.end()
        if self._server.is_stopping or (self._ending and not self._held):
            self._transport.close()
        elif self._held and not self._transport.is_closing():
            self._transport.resume_reading()
            self._take()
