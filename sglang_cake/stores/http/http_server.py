"""Requests to `sglang-cake store serve`: every path and method, over a folder of blocks."""

import asyncio
import errno
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from urllib.parse import parse_qs

from aiohttp import web

from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    ConfigError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.keys import MAX_DESCRIPTION_BYTES, BlockKey, digest_of, read_fields
from sglang_cake.core.threads import LimitedThreads
from sglang_cake.stores.base import BlockInfo, RequestFacts, StoredNamespace, StoreStats
from sglang_cake.stores.file.block_folder import LIST_AT_ONCE, BlockFolder
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.auth import ServerCredentials
from sglang_cake.stores.http.connection_limit import ConnectionState, Places
from sglang_cake.stores.http.protocol import Kind, Resource
from sglang_cake.stores.http.request_body import STUCK_S, RefusedRequest, read_body
from sglang_cake.stores.http.server_blocks import BlockService
from sglang_cake.stores.http.server_metrics import ServerMetrics

logger = logging.getLogger(__name__)
Handler = Callable[[web.BaseRequest, Resource], Awaitable[web.StreamResponse]]

ASK_THREADS = 4  # for lookups, so that they do not wait behind reads from a slow disk
WRITING = ("PUT", "DELETE")  # methods that a read-only token does not allow


KEEPALIVE_S = 75.0  # of a connection without a request
LINGER_S = 2.0  # the rest of an unwanted body is read so long, so that the response arrives
READ_BYTES = 1 << 17  # of a body that are buffered before the socket is paused
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)


class StoreServer(web.Server):
    """Answers requests. The folder stays the caller's.

    An instance is the protocol factory of `loop.create_server`.
    """

    def __init__(
        self,
        folder: BlockFolder,
        credentials: ServerCredentials,
        metrics: ServerMetrics,
        *,
        most_connections: int,
        workers: int = 1,
        namespace_quota_bytes: int | None = None,
        stuck_s: float = STUCK_S,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """Args:
        metrics: the metrics of this process.
        most_connections: to this process (see `connection_limit`); puts of blocks may take half of
            them.
        workers: number of processes that answer for this server.
        stuck_s: time limit of a transfer that hardly moves (see `request_body`).
        """
        super().__init__(
            self._handle,
            # A connection that is closed leaves its place. Its request would hold a thread, or the
            # place of a thread, beyond the limit of connections.
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=keepalive_s,
            lingering_time=LINGER_S,
            read_bufsize=READ_BYTES,
            logger=_count_bad_requests(metrics),
        )
        self._folder = folder
        self._credentials = credentials
        self._metrics = metrics
        self._places: Places[web.RequestHandler] = Places(most_connections)
        self._workers = workers
        self._stuck_s = stuck_s
        self._askers = LimitedThreads(ASK_THREADS, "cake-http-ask")
        self._blocks = BlockService(
            folder,
            metrics,
            most_connections=most_connections,
            namespace_quota_bytes=namespace_quota_bytes,
            stuck_s=stuck_s,
        )
        self._handlers: dict[Kind, dict[str, Handler]] = {
            Kind.STATS: {"GET": self._get_stats},
            Kind.METRICS: {"GET": self._get_metrics},
            Kind.NAMESPACES: {"GET": self._get_namespaces},
            Kind.DESCRIPTION: {
                "GET": self._get_description,
                "PUT": self._put_description,
                "DELETE": self._delete_description,
            },
            Kind.CONTAINS: {"POST": self._contains},
            Kind.TOUCHED: {"POST": self._touched},
            Kind.LIST: {"GET": self._list},
            Kind.BLOCK: {
                "GET": self._blocks.get,
                "HEAD": self._blocks.get,
                "PUT": self._blocks.put,
                "POST": self._blocks.check,
                "DELETE": self._blocks.delete,
            },
        }
        self._in_progress = 0
        self._is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """To be called once no request is in progress. Blocks until the threads are done."""
        self._blocks.close()
        self._askers.close()

    async def drained(self) -> None:
        """From now on, every connection is closed after its request. Returns when no request is in
        progress."""
        self._is_stopping = True
        await self._idle.wait()

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        dropped = self._places.take(handler)
        if dropped is not None:
            self._metrics.dropped_connections.inc()
            if dropped.transport is not None:
                dropped.transport.abort()
        if self._places.state_of(handler) is None:
            self._metrics.refused_connections.inc()
            transport.write(REFUSAL)
            transport.close()
        self._metrics.connections.set(len(self._places))

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        self._places.leave(handler)
        self._metrics.connections.set(len(self._places))
        super().connection_lost(handler, exc)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; errors become responses."""
        connection = request.protocol
        if self._places.state_of(connection) is None:
            raise ConnectionResetError(errno.ECONNRESET, "the connection is closed")
        response: web.StreamResponse
        self._in_progress += 1
        self._idle.clear()
        try:
            response = await self._answer(request)
        except Exception as error:
            refused = _refusal_of(error, request.method, request.path)
            response = web.Response(
                status=refused.status, text=f"{refused}\n", headers=refused.headers
            )
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._idle.set()
        if self._is_stopping:
            connection.close()
        self._metrics.answered(request.method, response.status)
        state = self._places.state_of(connection)
        if state is ConnectionState.UNAUTHENTICATED or response.status == 401:
            response.force_close()
        else:
            self._places.change(connection, ConnectionState.IDLE)
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Raises: RefusedRequest, StoreError and others (see `_refusal_of`)."""
        resource = protocol.parse_path(request.rel_url.raw_path)
        if resource is not None and resource.kind is Kind.HEALTH:  # needs no token
            return web.Response(text="ok\n")
        authorization = request.headers.get("Authorization")
        tokens = self._credentials.tokens
        if not tokens.may_read(authorization):
            why = "no token, or not one of this server's"
            raise RefusedRequest(401, why, {"WWW-Authenticate": "Bearer"})
        self._places.change(request.protocol, ConnectionState.BUSY)
        if request.method in WRITING and not tokens.may_write(authorization):
            raise RefusedRequest(403, "this token may only read")
        if resource is None:
            raise RefusedRequest(404, "no such path")
        handlers = self._handlers[resource.kind]
        if request.method not in handlers:
            raise RefusedRequest(405, "not possible here", {"Allow": ", ".join(handlers)})
        return await handlers[request.method](request, resource)

    async def _contains(self, request: web.BaseRequest, resource: Resource) -> web.Response:
        sizes = parse_qs(request.query_string).get("bytes", [])
        if len(sizes) != 1 or not sizes[0].isascii() or not sizes[0].isdigit():
            raise RefusedRequest(400, "ask with ?bytes= and the bytes of a block")
        framed_bytes = int(sizes[0][:20]) or None  # 0: each as it comes
        keys = await self._read_keys(request)
        found = await self._askers.run(
            lambda stop: self._folder.contains(resource.digest, keys, framed_bytes, stop),
        )
        return web.Response(body=bytes(found), content_type=protocol.BLOCK_TYPE)

    async def _touched(self, request: web.BaseRequest, resource: Resource) -> web.Response:
        try:
            facts = RequestFacts.from_json(request.headers.get(protocol.FACTS_HEADER, ""))
        except (ValueError, RecursionError):
            raise RefusedRequest(400, f"the header {protocol.FACTS_HEADER} is malformed") from None
        may_write = self._credentials.tokens.may_write(request.headers.get("Authorization"))
        keys = await self._read_keys(request)
        # In a thread: thousands of keys take longer than other requests should wait.
        await self._askers.run(
            lambda stop: self._folder.on_access(resource.digest, keys, facts, may_write=may_write)
        )
        return web.Response(status=204)

    async def _list(self, request: web.BaseRequest, resource: Resource) -> web.StreamResponse:
        blocks = self._folder.list_blocks(resource.digest)

        def some(stop: threading.Event) -> list[BlockInfo]:
            return list(itertools.islice(blocks, LIST_AT_ONCE))

        batch = await self._askers.run(some)
        response = web.StreamResponse()
        response.content_type = protocol.LIST_TYPE
        await response.prepare(request)
        try:
            while batch:
                async with asyncio.timeout(self._stuck_s):
                    await response.write(b"".join(map(protocol.write_block_line, batch)))
                batch = await self._askers.run(some)
        except (StoreUnavailable, OSError) as error:
            # The status has been sent. Without the last chunk, clients see that the list broke off.
            logger.warning("a list broke off: %s", error)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _get_description(self, _: web.BaseRequest, resource: Resource) -> web.Response:
        stored = await self._askers.run(
            lambda stop: self._folder.descriptions.read_stored(resource.digest)
        )
        if not stored:
            raise RefusedRequest(404, "no such namespace")
        return web.json_response(stored)

    async def _put_description(self, request: web.BaseRequest, resource: Resource) -> web.Response:
        fields = read_fields(await read_body(request, MAX_DESCRIPTION_BYTES, self._stuck_s))
        if fields is None or digest_of(fields) != resource.digest:
            raise RefusedRequest(400, "does not describe this namespace")
        try:
            await self._askers.run(
                lambda stop: self._folder.write_description(resource.digest, fields)
            )
        except ConfigError:
            raise RefusedRequest(409, "the namespace has another namespace.json here") from None
        return web.Response(status=204)

    async def _delete_description(self, _: web.BaseRequest, resource: Resource) -> web.Response:
        await self._askers.run(lambda stop: self._folder.remove_namespace(resource.digest))
        return web.Response(status=204)

    async def _get_namespaces(self, request: web.BaseRequest, _: Resource) -> web.Response:
        after = parse_qs(request.query_string, keep_blank_values=True).get("after")

        def page(stop: threading.Event) -> tuple[list[StoredNamespace], bool]:
            found = self._folder.namespaces()
            # A client of 0.1.0 does not ask for a page.
            return (found, False) if after is None else protocol.page_of(found, after[0])

        spaces, has_more = await self._askers.run(page)
        headers = {protocol.MORE_HEADER: protocol.MORE} if has_more else None
        return web.json_response(protocol.write_namespaces(spaces), headers=headers)

    async def _get_stats(self, *_: object) -> web.Response:
        return web.json_response(protocol.write_stats(await self._stats()))

    async def _get_metrics(self, *_: object) -> web.Response:
        stats = await self._stats()
        gauges = {
            "workers": self._workers,
            "blocks": stats.blocks,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
        }
        return web.Response(body=self._metrics.text(gauges), content_type="text/plain")

    async def _stats(self) -> StoreStats:
        stats = await self._askers.run(lambda stop: self._folder.stats())
        self.count_blocks()
        return replace(stats, evictions=self._metrics.evictions())

    def count_blocks(self) -> None:
        """Count evictions, corrupt blocks and unreadable files. To be called about every second."""
        self._metrics.count_blocks(
            {
                **asdict(self._folder.evictions()),
                "corrupt_blocks": self._folder.corrupt_blocks,
                "unreadable_files": self._folder.supervisor.unreadable_files,
            }
        )

    async def _read_keys(self, request: web.BaseRequest) -> list[BlockKey]:
        """Raises: RefusedRequest."""
        most_bytes = protocol.MAX_CONTAINS_KEYS * protocol.KEY_BYTES
        keys = protocol.split_keys(await read_body(request, most_bytes, self._stuck_s))
        if keys is None:
            raise RefusedRequest(400, f"the body is no list of keys of {protocol.KEY_BYTES} bytes")
        return keys


def _refusal_of(error: Exception, method: str, path: str) -> RefusedRequest:
    """The response to an error. Errors of the server are logged."""
    if isinstance(error, RefusedRequest):
        return error
    if isinstance(error, BlockCorrupt) and method == "PUT":
        return RefusedRequest(400, f"the block {error}")
    if isinstance(error, BlockMissing | BlockCorrupt):
        return RefusedRequest(404, "no such block")
    if isinstance(error, StoreFull):
        return RefusedRequest(507, str(error))
    if isinstance(error, TimeoutError):
        return RefusedRequest(408, "too slow")
    if isinstance(error, web.RequestPayloadError):
        return RefusedRequest(400, "the body broke off")
    if isinstance(error, ConnectionError):
        return RefusedRequest(400, "the connection broke off")
    if isinstance(error, StoreUnavailable | OSError):  # the latter from a disk that cannot be read
        logger.warning("%s %s: %s", method, path, error)
        return RefusedRequest(503, str(error))
    logger.error("%s %s failed", method, path, exc_info=error)
    return RefusedRequest(500, "the server failed; its log says how")


def _count_bad_requests(metrics: ServerMetrics) -> logging.Logger:
    """A logger for aiohttp, which logs a traceback for every request that is not valid HTTP.

    Those are only counted, because any client could fill a disk with them. The server itself logs
    errors in the handling of requests.
    """

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            metrics.bad_requests.inc()

    log = logging.Logger("sglang_cake.http.bad_requests", logging.ERROR)
    log.addHandler(Count())
    return log
