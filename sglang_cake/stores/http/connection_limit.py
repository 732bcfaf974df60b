"""The connections of one process of the server: how many there may be, and which are kept.

A connection that has shown no valid token keeps its place only until another connection needs it.
When all places are taken, a new connection gets the place of

1. the oldest connection that has shown no token, or else
2. the connection whose last request was answered longest ago.

A connection is never dropped while its request is being answered. If all are, a new connection is
refused.
"""

import asyncio
import errno
import logging
from collections.abc import Callable

from aiohttp import web

from sglang_cake.stores.http.http_server import StoreServer

KEEPALIVE_S = 75.0  # of a connection without a request
LINGER_S = 2.0  # the rest of an unwanted body is read so long, so that the response arrives
READ_BYTES = 1 << 17  # of a body that are buffered before the socket is paused
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)


class Place:
    """The place of one connection. All methods may be called after it was left."""

    __slots__ = ("_among", "_places", "drop")

    def __init__(self, places: "Places", drop: Callable[[], object]) -> None:
        self._places = places
        self._among = places.unauthenticated
        self.drop = drop

    @property
    def is_known(self) -> bool:
        """Whether a request with a valid token has come over the connection."""
        return self._among is not self._places.unauthenticated

    def begin(self) -> None:
        """A request with a valid token has come."""
        self._move(self._places.busy)

    def end(self) -> None:
        """The request has been answered."""
        self._move(self._places.idle)

    def leave(self) -> bool:
        """The connection has ended; False if the place was left before."""
        return self._among.pop(self, False) is None

    def _move(self, there: "dict[Place, None]") -> None:
        if self.leave():
            there[self] = None
            self._among = there


class Places:
    """The places of a process. Each dict is in the order in which connections came into it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.unauthenticated: dict[Place, None] = {}  # no valid token so far
        self.idle: dict[Place, None] = {}
        self.busy: dict[Place, None] = {}

    def __len__(self) -> int:
        return len(self.unauthenticated) + len(self.idle) + len(self.busy)

    def take(self, drop: Callable[[], object]) -> tuple[Place | None, Place | None]:
        """A place for a new connection, and the place that was left for it, whose connection the
        caller has to drop. No place if all connections are busy.

        Args: drop: closes the new connection.
        """
        left = None
        if len(self) >= self._most:
            left = next(iter(self.unauthenticated or self.idle), None)
            if left is None:
                return None, None
            left.leave()
        place = Place(self, drop)
        self.unauthenticated[place] = None
        return place, left


class ConnectionServer(web.Server):
    """aiohttp's server, which gives every connection a place.

    An instance is the protocol factory of `loop.create_server`.
    """

    def __init__(self, server: StoreServer, keepalive_s: float = KEEPALIVE_S) -> None:
        self._server = server
        self._places = Places(server.most_connections)
        self._place_of: dict[asyncio.BaseProtocol, Place] = {}
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
        place, dropped = self._places.take(transport.abort)
        if dropped is not None:
            self._server.metrics.dropped_connections.inc()
            dropped.drop()
        if place is None:
            self._server.metrics.refused_connections.inc()
            transport.write(REFUSAL)
            transport.close()
            return
        self._server.metrics.connections.inc()
        self._place_of[handler] = place

    def connection_lost(
        self,
        handler: web.RequestHandler,
        exc: BaseException | None = None,
    ) -> None:
        place = self._place_of.pop(handler, None)
        if place is not None:
            place.leave()
            self._server.metrics.connections.dec()
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        place = self._place_of.get(request.protocol)
        if place is None:
            raise ConnectionResetError(errno.ECONNRESET, "the connection is closed")
        response = await self._server.handle(request, on_token=place.begin)
        if not place.is_known or response.status == 401:
            response.force_close()
        else:
            place.end()
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
