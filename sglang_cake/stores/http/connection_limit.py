"""The connections of one process of the server: how many there may be, and which are kept.

A connection that has shown no valid token keeps its place only until another connection needs it.
When all places are taken, a new connection gets the place of

1. the oldest connection that has shown no token, or else
2. the connection whose last request was answered longest ago.

A connection is never dropped while its request is being answered. If all are, a new connection is
refused.
"""

import asyncio
import enum
import errno
import logging
from typing import Generic, TypeVar

from aiohttp import web

from sglang_cake.stores.http.http_server import StoreServer

Connection = TypeVar("Connection")
KEEPALIVE_S = 75.0  # of a connection without a request
LINGER_S = 2.0  # the rest of an unwanted body is read so long, so that the response arrives
READ_BYTES = 1 << 17  # of a body that are buffered before the socket is paused
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)


class State(enum.Enum):
    """Of a connection."""

    UNAUTHENTICATED = enum.auto()  # no valid token so far
    IDLE = enum.auto()
    BUSY = enum.auto()  # a request with a valid token is being answered


class Places(Generic[Connection]):
    """The places of a process, and the states of the connections that have them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: dict[Connection, State] = {}  # in the order of their last changes

    def __len__(self) -> int:
        return len(self._states)

    def take(self, connection: Connection) -> Connection | None:
        """Give a new connection a place, unless all are busy. Returns the connection that has lost
        its place for that, which the caller has to drop."""
        dropped = None
        if len(self._states) >= self._most:
            dropped = self._first(State.UNAUTHENTICATED) or self._first(State.IDLE)
            if dropped is None:
                return None
            self.leave(dropped)
        self._states[connection] = State.UNAUTHENTICATED
        return dropped

    def state_of(self, connection: Connection) -> State | None:
        """None: the connection has no place."""
        return self._states.get(connection)

    def change(self, connection: Connection, state: State) -> None:
        """A request has come or has been answered; nothing if the connection has no place."""
        if self._states.pop(connection, None) is not None:
            self._states[connection] = state

    def leave(self, connection: Connection) -> None:
        """The connection has ended."""
        self._states.pop(connection, None)

    def _first(self, wanted: State) -> Connection | None:
        return next((one for one, state in self._states.items() if state is wanted), None)


class ConnectionServer(web.Server):
    """aiohttp's server, which gives every connection a place.

    An instance is the protocol factory of `loop.create_server`.
    """

    def __init__(self, server: StoreServer, keepalive_s: float = KEEPALIVE_S) -> None:
        self._server = server
        self._places: Places[web.RequestHandler] = Places(server.most_connections)
        super().__init__(
            self._answer,
            # A connection that is closed leaves its place. Its request would hold a thread, or the
            # place of a thread, beyond the limit of connections.
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=keepalive_s,
            lingering_time=LINGER_S,
            read_bufsize=READ_BYTES,
            logger=_count_bad_requests(server),
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        metrics = self._server.metrics
        dropped = self._places.take(handler)
        if dropped is not None:
            metrics.dropped_connections.inc()
            if dropped.transport is not None:
                dropped.transport.abort()
        if self._places.state_of(handler) is None:
            metrics.refused_connections.inc()
            transport.write(REFUSAL)
            transport.close()
        metrics.connections.set(len(self._places))

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        self._places.leave(handler)
        self._server.metrics.connections.set(len(self._places))
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        if self._places.state_of(handler) is None:
            raise ConnectionResetError(errno.ECONNRESET, "the connection is closed")
        response = await self._server.handle(
            request, on_token=lambda: self._places.change(handler, State.BUSY)
        )
        if self._places.state_of(handler) is State.UNAUTHENTICATED or response.status == 401:
            response.force_close()
        else:
            self._places.change(handler, State.IDLE)
        return response


def _count_bad_requests(server: StoreServer) -> logging.Logger:
    """A logger for aiohttp, which logs a traceback for every request that is not valid HTTP.

    Those are only counted, because any client could fill a disk with them. The server itself logs
    errors in the handling of requests.
    """

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            server.metrics.bad_requests.inc()

    log = logging.Logger("sglang_cake.http.bad_requests", logging.ERROR)
    log.addHandler(Count())
    return log
