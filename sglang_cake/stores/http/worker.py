"""One process of a store server: answers on the connections that the parent deals to it."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket

from aiohttp import web

from sglang_cake.core.errors import CakeError, ConfigError
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.http.auth import Access
from sglang_cake.stores.http.connection import BlockConnection
from sglang_cake.stores.http.connection_places import Place, Places
from sglang_cake.stores.http.http_server import StoreServer
from sglang_cake.stores.http.prefork import CONNECTION, CUT_S, END_S, READY, STOP
from sglang_cake.stores.http.request_body import STUCK_S
from sglang_cake.stores.http.shared_counters import Row

logger = logging.getLogger(__name__)

KEEPALIVE_S = 75.0  # of a connection without a request
LINGER_S = 2.0  # how long the rest of an unwanted body is read, so that the answer arrives
HANDSHAKE_S = 10.0
READ_BYTES = 1 << 17  # of a body that wait in memory until they are looked at
BEAT_S = 1.0
REFRESH_S = 1.0  # until a token or certificate that was replaced is looked at
DEALT_AT_ONCE = 64  # connections taken before requests have their turn again
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)


async def work(
    channel: socket.socket,
    source: FileSource,
    access: Access,
    counts: Row,
    most_connections: int,
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
        await asyncio.to_thread(access.refresh)  # read before the first worker was forked
        folder = await asyncio.to_thread(source.folder)
    except CakeError as error:
        channel.send(str(error).encode()[:1000])
        return
    try:
        server = StoreServer(folder, access, counts, namespace_quota_bytes=namespace_quota_bytes)
        try:
            await Dealt(server, channel, stopping, most_connections).answer()
        finally:
            await asyncio.to_thread(server.close)
    finally:
        await asyncio.to_thread(folder.close)


class Dealt:
    """The connections that this process was dealt."""

    def __init__(
        self,
        server: StoreServer,
        channel: socket.socket,
        stopping: asyncio.Event,
        most_connections: int,
    ) -> None:
        self._server, self._channel = server, channel
        self._stopping, self._abandoned = stopping, False
        self._places = Places(most_connections)
        self._greeting: set[asyncio.Task[None]] = set()
        self._http = _HttpServer(server)
        self._reading: set[BlockConnection] = set()

    async def answer(self) -> None:
        """Until the end."""
        runner = web.ServerRunner(self._http, shutdown_timeout=CUT_S)
        await runner.setup()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel, self._heard)
        self._channel.send(READY)
        tasks = [asyncio.create_task(each) for each in (self._beat(), self._refresh())]
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
        for task in tasks:
            task.cancel()
        self._server.count_blocks()

    async def _beat(self) -> None:
        """Show the parent that this process goes on."""
        while True:
            self._server.counts["beats"] += 1
            self._server.count_blocks()
            await asyncio.sleep(BEAT_S)

    async def _refresh(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await asyncio.to_thread(self._server.access.refresh)
                said = ""
            except ConfigError as error:
                if said != str(error):
                    said = str(error)
                    logger.warning("%s; what it held before stays in force", said)

    def _heard(self) -> None:
        for _ in range(DEALT_AT_ONCE):
            try:
                said, sockets, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                said, sockets = b"", []
            if said == CONNECTION and not sockets:  # no descriptor was left for it
                self._server.counts["closed_connections"] += 1
            for fd in sockets:
                task = asyncio.create_task(self._greet(fd))
                self._greeting.add(task)  # asyncio itself holds no task
                task.add_done_callback(self._greeting.discard)
            if said in (STOP, b""):
                self._stopping.set()
                if said == b"":
                    self._abandoned = True
                    asyncio.get_running_loop().remove_reader(self._channel)
                return
            assert said == CONNECTION, said

    async def _greet(self, fd: int) -> None:
        connection = socket.socket(fileno=fd)
        connection.setblocking(False)
        # Also bytes that wait here while nobody handles the connection must leave some time.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STUCK_S))
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        place, dropped = self._places.take(task.cancel)
        if dropped is not None:
            self._server.counts["dropped_connections"] += 1
            self._server.counts["closed_connections"] += 1
            dropped.drop()
        if place is None:
            await loop.connect_accepted_socket(_Refusal, connection)
            self._server.counts["refused_connections"] += 1
            self._server.counts["closed_connections"] += 1
            return
        tls = self._server.access.tls
        protocol = self._http.protocol(place) if tls else self._new(place)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls else None,
            )
            place.drop = transport.abort
        except (OSError, asyncio.CancelledError):  # no TLS, gone again, or dropped for another
            self._http.forget(protocol)
            self._server.left(place)

    def _new(self, place: Place) -> BlockConnection:
        return BlockConnection(
            self._server, place, self._http.protocol, self._reading, idle_s=KEEPALIVE_S
        )


class _HttpServer(web.Server):
    """aiohttp's, which knows the places of its connections."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._places: dict[asyncio.BaseProtocol, Place] = {}
        super().__init__(
            self._answer,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            read_bufsize=READ_BYTES,
            logger=_count_bad_requests(server),
        )

    def protocol(self, place: Place) -> web.RequestHandler:
        """What answers on a connection."""
        handler = self()
        self._places[handler] = place
        return handler

    def forget(self, protocol: asyncio.BaseProtocol) -> None:
        """It was made for a connection that never began."""
        self._places.pop(protocol, None)

    def connection_lost(
        self,
        handler: web.RequestHandler,
        exc: BaseException | None = None,
    ) -> None:
        if (place := self._places.pop(handler, None)) is not None:
            self._server.left(place)
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        place = self._places.get(request.protocol)
        if place is None:
            raise ConnectionResetError(errno.ECONNRESET, "closed meanwhile")
        return await self._server.handle(request, place)


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
