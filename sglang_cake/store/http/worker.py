"""One process of a store server: answers on the connections that the parent deals to it."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable

from aiohttp import web

from sglang_cake.errors import CakeError
from sglang_cake.store.file.source import FileSource
from sglang_cake.store.http.auth import Gate
from sglang_cake.store.http.bodies import STUCK_S
from sglang_cake.store.http.connection import BlockConnection
from sglang_cake.store.http.crew import CONNECTION, CUT_S, END_S, READY, REFUSE, STOP
from sglang_cake.store.http.server import StoreServer
from sglang_cake.store.http.tally import Row

KEEPALIVE_S = 75.0  # of a connection without a request
LINGER_S = 2.0  # how long the rest of an unwanted body is read, so that the answer arrives
HANDSHAKE_S = 10.0
READ_BYTES = 1 << 17  # of a body that wait in memory until they are looked at
COUNT_EVERY_S = 1.0
DEALT_AT_ONCE = 64  # connections taken before requests have their turn again
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)


async def work(
    channel: socket.socket,
    source: FileSource,
    gate: Gate,
    counts: Row,
    tls: ssl.SSLContext | None,
    namespace_quota_bytes: int | None,
) -> None:
    """Answer until the parent says so over `channel`, or is gone, or SIGTERM or SIGINT comes.

    What is under way may then end, END_S at most; not if the parent is gone. `channel` stays open:
    that it closes tells the parent that this process has ended.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        folder = await asyncio.to_thread(source.folder)
    except CakeError as error:
        channel.send(str(error).encode()[:1000])
        return
    try:
        server = StoreServer(folder, gate, counts, namespace_quota_bytes=namespace_quota_bytes)
        try:
            await _Dealt(server, channel, tls, stopping).answer()
        finally:
            await asyncio.to_thread(server.close)
    finally:
        await asyncio.to_thread(folder.close)


class _Dealt:
    """The connections that this process was dealt."""

    def __init__(
        self,
        server: StoreServer,
        channel: socket.socket,
        tls: ssl.SSLContext | None,
        stopping: asyncio.Event,
    ) -> None:
        self._server, self._channel, self._tls = server, channel, tls
        self._stopping, self._abandoned = stopping, False
        self._greeting: set[asyncio.Task[None]] = set()
        self._http = _CountedServer(server, self._closed)
        self._reading: set[BlockConnection] = set()

    async def answer(self) -> None:
        """Until the end."""
        runner = web.ServerRunner(self._http, shutdown_timeout=CUT_S)
        await runner.setup()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel, self._heard)
        self._channel.send(READY)
        counting = asyncio.create_task(self._count())
        await self._stopping.wait()
        if not self._abandoned:
            self._channel.send(STOP)  # no more, please; what is on its way is answered
        # Before `cleanup`, which lets no more bytes of a body in.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._abandoned else END_S):
                await self._server.drained()
        loop.remove_reader(self._channel)
        for connection in list(self._reading):
            connection.abort()
        await runner.cleanup()
        counting.cancel()
        self._server.count_evicted()

    async def _count(self) -> None:
        while True:
            self._server.count_evicted()
            await asyncio.sleep(COUNT_EVERY_S)

    def _heard(self) -> None:
        for _ in range(DEALT_AT_ONCE):
            try:
                said, sockets, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                said, sockets = b"", []
            if said in (CONNECTION, REFUSE) and not sockets:  # no descriptor was left for it
                self._closed()
            for fd in sockets:
                task = asyncio.create_task(self._greet(fd, refuse=said == REFUSE))
                self._greeting.add(task)  # asyncio itself holds no task
                task.add_done_callback(self._greeting.discard)
            if said in (STOP, b""):
                self._stopping.set()
                if said == b"":
                    self._abandoned = True
                    asyncio.get_running_loop().remove_reader(self._channel)
                return
            assert said in (CONNECTION, REFUSE), said

    async def _greet(self, fd: int, *, refuse: bool) -> None:
        connection = socket.socket(fileno=fd)
        connection.setblocking(False)
        # Also bytes that wait here while nobody handles the connection must leave some time.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STUCK_S))
        made: Callable[[], asyncio.BaseProtocol] = self._http if self._tls else self._new
        if refuse:
            made = _Refusal
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                made,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
            )
        except OSError:  # no TLS, or gone again
            self._closed()
            return
        if refuse:
            self._server.counts["refused_connections"] += 1
            self._closed()

    def _new(self) -> BlockConnection:
        return BlockConnection(
            self._server, self._http, self._reading, self._closed, idle_s=KEEPALIVE_S
        )

    def _closed(self) -> None:
        self._server.counts["closed_connections"] += 1


class _CountedServer(web.Server):
    """Says when a connection has ended."""

    def __init__(self, server: StoreServer, closed: Callable[[], None]) -> None:
        super().__init__(
            server.handle,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            read_bufsize=READ_BYTES,
            logger=_count_bad_requests(server),
        )
        self._closed = closed

    def connection_lost(
        self,
        handler: web.RequestHandler,
        exc: BaseException | None = None,
    ) -> None:
        self._closed()
        super().connection_lost(handler, exc)


def _count_bad_requests(server: StoreServer) -> logging.Logger:
    """What aiohttp logs to: with a traceback for whatever is no HTTP, which anybody could fill a
    disk with. Errors in the handling of requests are logged by the server itself."""

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            server.counts["bad_requests"] += 1

    log = logging.Logger("sglang_cake.http.bad_requests", logging.ERROR)
    log.addHandler(Count())
    return log


class _Refusal(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(REFUSAL)
        transport.close()
