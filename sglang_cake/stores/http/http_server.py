"""The HTTP store's server: what every path and method does, over a folder of blocks."""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from urllib.parse import parse_qs

from aiohttp import web

from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.base import EVICTION_COUNTS, BlockInfo, EvictionCounts, StoreStats
from sglang_cake.stores.file.folder import LIST_AT_ONCE, BlockFolder
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.auth import Access
from sglang_cake.stores.http.connection_places import Place
from sglang_cake.stores.http.error_responses import refusal_of
from sglang_cake.stores.http.protocol import Kind, Target
from sglang_cake.stores.http.request_body import STUCK_S, Refused, read_body
from sglang_cake.stores.http.server_blocks import BlockService
from sglang_cake.stores.http.server_metrics import metrics_text
from sglang_cake.stores.http.shared_counters import Row
from sglang_cake.stores.request_info import RequestFacts
from sglang_cake.stores.threads import run_stoppable

logger = logging.getLogger(__name__)

LOOKUPS_AT_ONCE = 8
METHODS = {
    Kind.HEALTH: ("GET", "HEAD"),
    Kind.STATS: ("GET",),
    Kind.METRICS: ("GET",),
    Kind.NAMESPACES: ("GET",),
    Kind.DESCRIPTION: ("GET", "PUT", "DELETE"),
    Kind.CONTAINS: ("POST",),
    Kind.TOUCHED: ("POST",),
    Kind.LIST: ("GET",),
    Kind.BLOCK: ("GET", "HEAD", "PUT", "POST", "DELETE"),
}
WRITING = ("PUT", "DELETE")  # what a token for reading does not allow


class StoreServer:
    """Answers requests; whoever makes it listens (see `serving`). The folder stays the caller's."""

    def __init__(
        self,
        folder: BlockFolder,
        access: Access,
        counts: Row,
        *,
        namespace_quota_bytes: int | None = None,
    ) -> None:
        """Args: counts: this process's, of all that answer for the same server."""
        self._folder, self.access, self.counts = folder, access, counts
        # By who had this row earlier.
        self._before = {name: counts[name] for name in (*EVICTION_COUNTS, "corrupt_blocks")}
        self.blocks = BlockService(folder, self._is_claimed, counts, namespace_quota_bytes)
        self._lookups = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._under_way = 0
        self.is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """Once no request is under way any more. Blocks until the threads are done."""
        self.blocks.close()

    async def drained(self) -> None:
        """From now on every connection ends with its request; return when none is under way."""
        self.is_stopping = True
        await self._idle.wait()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """While a request is being answered, and cannot be cut off."""
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    def lets_pass(self, authorization: str | None) -> bool:
        """Whether this `Authorization` header names a valid token."""
        return self.access.gate.lets_pass(authorization)

    def left(self, place: Place) -> None:
        """A connection has ended; may be said twice."""
        self.counts["closed_connections"] += place.leave()

    async def handle(self, request: web.BaseRequest, place: Place) -> web.StreamResponse:
        """Answer one request, whatever it is. Args: place: of its connection."""
        response: web.StreamResponse
        with self.under_way():
            try:
                response = await self._answer(request, place)
            except Exception as error:
                refused = refusal_of(error, request.method, request.path)
                response = web.Response(status=refused.status, text=f"{refused}\n")
                response.headers.update(refused.headers or {})
        if not place.is_known or response.status == 401:
            response.force_close()  # nobody holds a place without a token
        else:
            place.end()
        if self.is_stopping:
            request.protocol.close()
        self.counts.answered(request.method, response.status)
        return response

    async def _answer(self, request: web.BaseRequest, place: Place) -> web.StreamResponse:
        target = protocol.parse_path(request.rel_url.raw_path)
        if target is not None and target.kind is Kind.HEALTH:  # for whoever watches, without token
            return web.Response(text="ok\n")
        authorization = request.headers.get("Authorization")
        if not self.lets_pass(authorization):
            raise Refused(401, "a token is needed", {"WWW-Authenticate": "Bearer"})
        place.begin()
        if request.method in WRITING and not self.access.gate.may_write(authorization):
            raise Refused(403, "this token may only read")
        if target is None:
            raise Refused(404, "no such path")
        allowed = METHODS[target.kind]
        if request.method not in allowed:
            raise Refused(405, "not possible here", {"Allow": ", ".join(allowed)})
        if target.kind is Kind.BLOCK:
            return await self._block(request, target)
        if target.kind is Kind.CONTAINS:
            return await self._contains(request, target.digest)
        if target.kind is Kind.TOUCHED:
            return await self._touched(request, target.digest)
        if target.kind is Kind.LIST:
            return await self._list(request, target.digest)
        if target.kind is Kind.DESCRIPTION:
            return await self._description(request, target.digest)
        return await self._about(target.kind)

    async def _block(self, request: web.BaseRequest, target: Target) -> web.StreamResponse:
        if request.method == "PUT":
            return await self.blocks.put(request, target.digest, target.key)
        if request.method == "POST":
            return await self.blocks.check(target.digest, target.key)
        if request.method == "DELETE":
            return await self.blocks.delete(target.digest, target.key)
        return await self.blocks.get(request, target.digest, target.key)

    async def _contains(self, request: web.BaseRequest, digest: Digest) -> web.Response:
        sizes = parse_qs(request.query_string).get("bytes", [])
        if len(sizes) != 1 or not sizes[0].isascii() or not sizes[0].isdigit():
            raise Refused(400, "ask with ?bytes= and the bytes of a block")
        framed_bytes = int(sizes[0][:20]) or None  # 0: each as it comes
        async with self._lookups:
            keys = await _read_keys(request)
            found = await run_stoppable(
                self.blocks.askers,
                lambda stop: self._folder.contains(digest, keys, framed_bytes, stop),
            )
        return web.Response(body=bytes(found), content_type=protocol.BLOCK_TYPE)

    async def _touched(self, request: web.BaseRequest, digest: Digest) -> web.Response:
        try:
            facts = RequestFacts.from_json(request.headers.get(protocol.FACTS_HEADER, ""))
        except (ValueError, RecursionError):
            raise Refused(400, f"{protocol.FACTS_HEADER} does not say what a request is") from None
        self._folder.touched(digest, await _read_keys(request), facts)
        return web.Response(status=204)

    async def _list(self, request: web.BaseRequest, digest: Digest) -> web.StreamResponse:
        blocks = self._folder.list_blocks(digest)

        def some(stop: threading.Event) -> list[BlockInfo]:
            return list(itertools.islice(blocks, LIST_AT_ONCE))

        batch = await run_stoppable(self.blocks.askers, some)
        response = web.StreamResponse()
        response.content_type = protocol.LIST_TYPE
        await response.prepare(request)
        try:
            while batch:
                async with asyncio.timeout(STUCK_S):
                    await response.write(b"".join(map(protocol.write_block_line, batch)))
                batch = await run_stoppable(self.blocks.askers, some)
        except (StoreUnavailable, OSError) as error:
            # Too late for a status. Without the last chunk no client takes it for whole.
            logger.warning("a list broke off: %s", error)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _description(self, request: web.BaseRequest, digest: Digest) -> web.Response:
        if request.method == "GET":
            fields = await run_stoppable(
                self.blocks.askers, lambda stop: self._folder.description(digest)
            )
            if not fields:
                raise Refused(404, "no such namespace")
            return web.json_response(fields)
        if request.method == "DELETE":
            await run_stoppable(
                self.blocks.askers, lambda stop: self._folder.remove_namespace(digest)
            )
            return web.Response(status=204)
        told = protocol.read_fields(await read_body(request, protocol.MAX_DESCRIPTION_BYTES))
        if told is None or not protocol.describes(told, digest):
            raise Refused(400, "does not describe this namespace")

        try:
            await run_stoppable(
                self.blocks.askers, lambda stop: self._folder.describe(digest, told)
            )
        except ConfigError:
            raise Refused(409, "the namespace.json that is here says something else") from None
        return web.Response(status=204)

    async def _about(self, kind: Kind) -> web.Response:
        if kind is Kind.NAMESPACES:
            spaces = await run_stoppable(self.blocks.askers, lambda stop: self._folder.namespaces())
            return web.json_response(protocol.write_namespaces(spaces))
        stats = await self._stats()
        if kind is Kind.STATS:
            return web.json_response(protocol.write_stats(stats))
        tally = self.counts.tally
        text = metrics_text(stats, tally, len(tally.rows))
        return web.Response(text=text, content_type="text/plain")

    async def _stats(self) -> StoreStats:
        stats = await run_stoppable(self.blocks.askers, lambda stop: self._folder.stats())
        self.count_blocks()
        total = self.counts.tally.total
        evictions = EvictionCounts(*(total(name) for name in EVICTION_COUNTS))
        return replace(stats, evictions=evictions)

    def count_blocks(self) -> None:
        """Take up what became of blocks in the background. To be called every second or so."""
        counts = asdict(self._folder.evictions()) | {"corrupt_blocks": self._folder.corrupt_blocks}
        for name, count in counts.items():
            self.counts[name] = self._before[name] + count

    # What follows runs in threads.

    def _is_claimed(self, digest: Digest) -> bool:
        """Whether somebody said, now or earlier, what the namespace is: blocks of it may come."""
        return bool(self._folder.description(digest))


async def _read_keys(request: web.BaseRequest) -> list[BlockKey]:
    """Raises: Refused."""
    body = await read_body(request, protocol.MAX_CONTAINS_KEYS * protocol.KEY_BYTES)
    keys = protocol.split_keys(body)
    if keys is None:
        raise Refused(400, f"the body is no list of keys of {protocol.KEY_BYTES} bytes")
    return keys
