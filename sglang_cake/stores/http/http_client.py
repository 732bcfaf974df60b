"""One namespace of a store behind HTTP: ours, or any server with GET, HEAD, PUT and DELETE."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import aiohttp

from sglang_cake.codecs.frame import BlockFrame, Incoming
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo, StoreStats
from sglang_cake.stores.circuit import Circuit
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.http_transport import (
    Endpoint,
    HttpCounters,
    Renewed,
    Wire,
    read_lines,
    read_whole,
    refuse,
)
from sglang_cake.stores.probing import EXACT_KEYS, probe
from sglang_cake.stores.request_info import RequestFacts
from sglang_cake.stores.timing import TimeoutLimits

T = TypeVar("T")

REPORT_S = 5.0  # how long the server may take to look at a block
HEADS_AT_ONCE = EXACT_KEYS  # lookups in flight where there is no `contains`
HEAD_ROUNDS = 3  # of a lookup there: enough for 4,000 blocks that are stored from the first on
PIECE_BYTES = 1 << 18  # of a block on its way out
NOT_OURS = frozenset((404, 405, 501))  # how a server that has no `contains` answers one


class HttpStore:
    """Implements `Store`. Does nothing before its first call; belongs to that call's event loop.

    What kind of server it talks to is found out by asking for `contains`, and again after an
    outage: the server may have come back as another one.
    """

    def __init__(
        self,
        locate: Callable[[], Endpoint],
        frame: BlockFrame,
        *,
        depth: int,
        patience: TimeoutLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        locate: as in `Wire`.
        depth: reads, and writes, in flight at most.
        clock: as in `Circuit`.

        Raises: ConfigError, of `locate`.
        """
        self._frame = frame
        self._patience = patience or TimeoutLimits()
        self._wire = Wire(locate, self._patience, self._forget_server, clock)
        self._reading = asyncio.Semaphore(depth)
        self._writing = asyncio.Semaphore(depth)
        self._asking = asyncio.Semaphore(HEADS_AT_ONCE)
        self._plain: bool | None = None  # None: not known yet
        self._claimed = False

    @property
    def counters(self) -> HttpCounters:
        """What happened so far."""
        return self._wire.counters

    def events(self) -> dict[str, int]:
        """As in `Counting`."""
        return self._wire.counters.events()

    def _forget_server(self) -> None:
        self._plain, self._claimed = None, False

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As in `Store`: one round trip, or HEAD_ROUNDS for few of the keys (`probing`) where the
        server is not ours."""
        found: list[bool] = []
        for start in range(0, max(1, len(keys)), protocol.MAX_CONTAINS_KEYS):
            some = keys[start : start + protocol.MAX_CONTAINS_KEYS]
            if not self._plain:
                answers = await self._ask(some)
                if answers is not None:
                    found += answers
                    continue
            found += await probe(some, self._has, at_once=HEADS_AT_ONCE, rounds=HEAD_ROUNDS)
        return found

    async def touched(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """As in `AccessListener`, where the server is ours; of a longer prompt the first blocks."""
        if self._plain:
            return
        body = b"".join(keys[: protocol.MAX_CONTAINS_KEYS])
        path = protocol.touched_path(self._frame.digest)
        headers = {protocol.FACTS_HEADER: facts.to_json()}

        async def attempt() -> None:
            async with self._wire.request("POST", path, data=body, headers=headers) as response:
                if response.status != 204 and response.status not in NOT_OURS:
                    await refuse(response)

        async with self._asking:
            await self._wire.call(self._wire.lookups, max(1, len(body)), attempt)

    async def _ask(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """Which keys are stored; None if the server is none of ours, which is then known."""
        path = protocol.contains_path(self._frame.digest, self._frame.known_bytes)

        async def attempt() -> list[bool] | None:
            async with self._wire.request("POST", path, data=b"".join(keys)) as response:
                if response.status in NOT_OURS:
                    return None
                if response.status != 200:
                    await refuse(response)
                return protocol.read_answers(await read_whole(response, len(keys)), len(keys))

        async with self._asking:
            size_bytes = max(1, len(keys)) * protocol.KEY_BYTES
            answers = await self._wire.call(self._wire.lookups, size_bytes, attempt)
        self._plain = answers is None
        return answers

    async def _has(self, key: BlockKey) -> bool:
        async with self._asking:
            return await self._wire.call(
                self._wire.lookups, protocol.KEY_BYTES, lambda: self._head(key)
            )

    async def _head(self, key: BlockKey) -> bool:
        path = protocol.block_path(self._frame.digest, key)
        async with self._wire.request("HEAD", path) as response:
            if response.status in (404, 410):
                return False
            if response.status != 200:
                await refuse(response)
            # One cut short counts as absent, so that the next write heals it.
            return self._may_be(response.content_length)

    def _may_be(self, framed_bytes: int | None) -> bool:
        return framed_bytes is None or self._frame.fits(framed_bytes)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`. Only this call's own task writes `out`, and it is done when this returns
        or raises, cancelled or not."""
        try:
            async with self._reading:
                return await self._wire.call(
                    self._wire.reads,
                    self._frame.framed_bytes,
                    lambda: self._get(key, out, progress),
                )
        except BlockCorrupt:
            await self._report(key)
            raise

    async def _report(self, key: BlockKey) -> None:
        """Have our server look at a block that came corrupt: it may be so only on the wire.

        Past the circuit, which must not take an answer to this for a server that is well.
        """
        if self._plain:
            return
        path = protocol.block_path(self._frame.digest, key)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, Renewed):
            async with asyncio.timeout(REPORT_S), self._wire.request("POST", path):
                pass  # whatever it says: the block is computed now

    async def _get(self, key: BlockKey, out: memoryview, progress: TellBytes | None) -> int:
        async with self._wire.hedged_get(protocol.block_path(self._frame.digest, key)) as response:
            if response.status in (404, 410):
                raise BlockMissing(key.hex())
            if response.status != 200:
                await refuse(response)
            length = response.content_length
            if not self._may_be(length):
                raise BlockCorrupt(f"{length} bytes, a block has {self._frame.framed_bytes}")
            block = Incoming(self._frame, key, out, progress)
            async for piece in response.content.iter_any():
                self.counters.received_bytes += len(piece)
                block.feed(piece)
            return block.finish()

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`. Nothing reads `data` once this returns or raises, cancelled or not."""
        assert self._frame.takes(data.nbytes), data.nbytes
        body = data.cast("B")
        async with self._writing:
            if self._plain is None:
                await self._ask(())
            header = self._frame.header(key, body)
            for _ in range(2):
                if not self._claimed:
                    await self._claim()
                fresh = await self._wire.call(
                    self._wire.writes,
                    len(header) + len(body),
                    lambda: self._put(key, header, body),
                )
                if fresh is not None:
                    return fresh
                self._claimed = False  # the server lost the namespace; tell it once more
        raise StoreUnavailable("the server forgets the namespace as soon as it is told")

    async def _put(self, key: BlockKey, header: bytes, body: memoryview) -> bool | None:
        """Whether the block is new; None if the server does not know the namespace."""

        async def pieces() -> AsyncIterator[bytes]:
            yield header
            for start in range(0, len(body), PIECE_BYTES):
                # A copy: what a transport buffers must not be the caller's memory.
                piece = bytes(body[start : start + PIECE_BYTES])
                self.counters.sent_bytes += len(piece)
                yield piece

        async with self._wire.request(
            "PUT",
            protocol.block_path(self._frame.digest, key),
            data=pieces(),
            headers={
                "Content-Length": str(len(header) + len(body)),
                "Content-Type": protocol.BLOCK_TYPE,
            },
            # Ours may say no before megabytes are on their way; others may not know how to.
            expect100=self._plain is False,
        ) as response:
            if response.status == 409 and not self._plain:
                return None
            if response.status not in (200, 201, 204):
                await refuse(response)
            return response.status == 201

    async def _claim(self) -> None:
        """Have the server hold namespace.json. Raises: StoreUnavailable, StoreFull."""
        fields = self._frame.namespace.describe()
        path = protocol.description_path(self._frame.digest)

        async def look() -> dict[str, str] | None:
            async with self._wire.request("GET", path) as response:
                if response.status == 404:
                    return None
                if response.status != 200:
                    await refuse(response)
                body = await read_whole(response, protocol.MAX_DESCRIPTION_BYTES)
                return protocol.read_fields(body) or {}

        async def tell() -> None:
            body = (json.dumps(fields, indent=2) + "\n").encode()
            async with self._wire.request("PUT", path, data=body) as response:
                if response.status not in (200, 201, 204):
                    await refuse(response)

        found = await self._small(look)
        if found is None:
            await self._small(tell, self._wire.descriptions)
        elif not protocol.describes(found, self._frame.digest):
            raise StoreUnavailable(f"{path} on the server describes another namespace")
        self._claimed = True

    async def delete(self, key: BlockKey) -> None:
        async def attempt() -> None:
            path = protocol.block_path(self._frame.digest, key)
            async with self._wire.request("DELETE", path) as response:
                if response.status not in (200, 202, 204, 404, 410):
                    await refuse(response)

        await self._small(attempt, self._wire.writes)

    async def remove_description(self) -> None:
        """As in `Describing`. A server that is not ours does not look whether there are blocks."""

        async def attempt() -> None:
            path = protocol.description_path(self._frame.digest)
            async with self._wire.request("DELETE", path) as response:
                if response.status not in (200, 202, 204, 404, 405, 410):
                    await refuse(response)

        await self._small(attempt, self._wire.descriptions)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """As in `Store`. Raises: StoreUnavailable; always, where the server is not ours."""

        async def attempt() -> aiohttp.ClientResponse:
            async with self._wire.request("GET", path, keep=True) as response:
                if response.content_type != protocol.LIST_TYPE:
                    await refuse(response, "this server cannot list blocks")
                return response

        path = protocol.list_path(self._frame.digest)
        response = await self._small(attempt)
        try:
            async for line in read_lines(response, protocol.MAX_LIST_LINE_BYTES, self._patience):
                yield protocol.read_block_line(line)
        finally:
            response.close()

    async def stats(self) -> StoreStats:
        """As in `Store`; where the server is not ours, nothing is known."""

        async def attempt() -> StoreStats:
            async with self._wire.request("GET", protocol.STATS) as response:
                if response.status in NOT_OURS:
                    return StoreStats()
                if response.status != 200:
                    await refuse(response)
                return protocol.read_stats(await read_whole(response, protocol.MAX_ANSWER_BYTES))

        return await self._small(attempt)

    async def close(self) -> None:
        await self._wire.close()

    async def _small(
        self, attempt: Callable[[], Awaitable[T]], circuit: Circuit | None = None
    ) -> T:
        async with self._asking:
            circuit = circuit or self._wire.lookups
            return await self._wire.call(circuit, protocol.KEY_BYTES, attempt)
