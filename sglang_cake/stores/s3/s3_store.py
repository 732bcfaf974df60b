"""One namespace of blocks in an S3 bucket."""

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sglang_cake.codecs.frame import BlockFrame, Incoming
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockCorrupt, StoreError, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo, StoreStats
from sglang_cake.stores.probing import probe
from sglang_cake.stores.s3.bucket import S3Bucket, S3Place
from sglang_cake.stores.threads import run_stoppable
from sglang_cake.stores.timing import TimeoutLimits

PROBES_AT_ONCE = 32  # blocks that a lookup asks for in one round trip: 1024 are known after two
MAX_ROUNDS = 4  # of a lookup; blocks that are not clear by then count as missing
READ_BYTES = 2**18
DESCRIBE_EVERY_S = 600.0
DESCRIPTION = "namespace.json"
_NAME = re.compile(r"([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{60})")


class S3Store:
    """Implements `Store`: one object a block, framed as in a file.

    `contains` asks in rounds, see `probing`. A put sends the block without asking first, and the
    service refuses what it has (`If-None-Match`); a service that cannot is asked before. It holds
    one copy of the block meanwhile. An object with wrong bytes is deleted by who reads it.
    """

    def __init__(
        self,
        place: S3Place,
        frame: BlockFrame,
        *,
        depth: int,
        patience: TimeoutLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        depth: reads, and writes, at once.
        clock: as in `Circuit`.
        """
        self._frame, self._place = frame, place
        # A lookup never waits behind reads.
        connections = 2 * depth + PROBES_AT_ONCE
        self._bucket = S3Bucket(place, connections=connections, patience=patience, clock=clock)
        self._reading, self._writing = asyncio.Semaphore(depth), asyncio.Semaphore(depth)
        self._asking = asyncio.Semaphore(PROBES_AT_ONCE)
        self._framer = ThreadPoolExecutor(1, "cake-s3-frame")
        self._clock, self._describe_s = clock, -math.inf  # when to describe the namespace
        self._closed = False

    def events(self) -> dict[str, int]:
        """As in `Counting`."""
        return self._bucket.counters.events()

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As in `Store`; at most MAX_ROUNDS round trips."""
        found = await probe(keys, self._has, at_once=PROBES_AT_ONCE, rounds=MAX_ROUNDS)
        self._check_open()
        return found

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        try:
            async with self._reading:
                return await self._read(key, out, progress)
        except BlockCorrupt:
            # Where that is not allowed either, the next reader finds it again.
            with contextlib.suppress(StoreError):
                await self.delete(key)
            raise

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        assert self._frame.takes(data.nbytes), data.nbytes
        view = data.cast("B")
        async with self._writing:
            await self._describe()
            body = await run_stoppable(
                self._framer, lambda stop: b"".join((self._frame.header(key, view), view))
            )
            return await self._bucket.put_new(self._name(key), body)

    async def delete(self, key: BlockKey) -> None:
        async with self._asking:
            await self._bucket.delete(self._name(key))

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """As in `Store`, a thousand a round trip; `used_s` is when the block was put."""
        start = self._place.name(self._frame.digest.hex(), "")
        async for page in self._bucket.pages(start):
            for found in page.objects:
                if match := _NAME.fullmatch(found.get("Key", "").removeprefix(start)):
                    put = found.get("LastModified")
                    yield BlockInfo(
                        BlockKey(bytes.fromhex(match[3])),
                        found.get("Size", 0),
                        put.timestamp() if put else None,
                    )

    async def remove_description(self) -> None:
        """As in `Describing`."""
        start = self._place.name(self._frame.digest.hex(), "")
        found = await self._bucket.page(start, MaxKeys=2)
        if {each.get("Key") for each in found.get("Contents", [])} <= {start + DESCRIPTION}:
            await self._bucket.delete(start + DESCRIPTION)

    async def stats(self) -> StoreStats:
        """Nothing: S3 does not tell, and counting would be a listing of everything."""
        self._check_open()
        return StoreStats()

    async def close(self) -> None:
        """Reads and puts that are under way fail."""
        self._closed = True
        self._framer.shutdown(wait=False, cancel_futures=True)
        await self._bucket.close()

    def _name(self, key: BlockKey) -> str:
        name = key.hex()
        return self._place.name(self._frame.digest.hex(), name[:2], name[2:4], name)

    async def _has(self, key: BlockKey) -> bool:
        async with self._asking:
            return await self._bucket.has(self._name(key))

    async def _read(self, key: BlockKey, out: memoryview, progress: TellBytes | None) -> int:
        async with self._bucket.reading(self._name(key), self._frame.framed_bytes) as body:
            if body.length_bytes is None:
                # Then one that was cut off looks like one that is too short.
                raise StoreUnavailable("S3: an answer without Content-Length")
            if not self._frame.fits(body.length_bytes):
                raise BlockCorrupt(
                    f"{body.length_bytes} bytes, a block has {self._frame.framed_bytes}"
                )
            block = Incoming(self._frame, key, out, progress)
            while data := await body.read(READ_BYTES):
                block.feed(data)
            return block.finish()

    async def _describe(self) -> None:
        """Say, for people, what the namespace stands for; again now and then, since somebody may
        have cleared the store."""
        if self._clock() >= self._describe_s:
            fields = json.dumps(self._frame.namespace.describe(), indent=2).encode()
            await self._bucket.put_new(
                self._place.name(self._frame.digest.hex(), DESCRIPTION), fields
            )
            self._describe_s = self._clock() + DESCRIBE_EVERY_S

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")
