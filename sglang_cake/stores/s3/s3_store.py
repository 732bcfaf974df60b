"""`s3://bucket/prefix?endpoint=http://host:9000&region=eu-central-1`: blocks in a bucket."""

import asyncio
import json
import math
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from botocore.exceptions import (
    ConfigParseError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)

from sglang_cake.codecs.frame import BlockFrame, IncomingBlock
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import (
    BlockCorrupt,
    ConfigError,
    StoreError,
    StoreUnavailable,
    one_line,
)
from sglang_cake.core.keys import DESCRIPTION, MAX_DESCRIPTION_BYTES, BlockKey, Digest, read_fields
from sglang_cake.core.threads import DaemonPool, IoThread, run_stoppable
from sglang_cake.stores.base import BlockInfo, Store, StoredNamespace, StoreLayer, StoreStats
from sglang_cake.stores.circuit_breaker import TimeoutLimits
from sglang_cake.stores.corrupt_reports import CorruptReports
from sglang_cake.stores.lookup_rounds import look_up_in_rounds
from sglang_cake.stores.s3.bucket import S3Bucket, S3Error, S3Place
from sglang_cake.stores.url import StoreUrl, matching

LOOKUPS_AT_ONCE = 32  # lookups in one round trip: 1024 blocks are known after two
MAX_ROUNDS = 4  # of a lookup; blocks that are open by then count as missing
READ_BYTES = 2**18
DESCRIBE_EVERY_S = 600.0
CHECK_S = 8.0  # limit for the check at start
MAX_NAMESPACES = 10_000
LIMITS = TimeoutLimits()
_UNREADABLE = ("AccessDenied", "InvalidObjectState")  # a policy keeps it back; it is archived
DESCRIPTION_TRIES = 3  # without a description, the blocks of a namespace are not counted
MAX_PREFIX_BYTES = 512  # a name may have 1024 bytes, and a block needs 136 of them

_NAME = re.compile(r"([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{60})")
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
# Mistakes of the operator: waiting does not help.
_MISTAKES = (
    ConfigParseError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)
# What reading the trusted certificates raises; botocore wraps it.
_UNUSABLE_CA = (FileNotFoundError, IsADirectoryError, PermissionError, ssl.SSLError)


class S3Store(Store):
    """Implements `Store`: one object per block, framed as in a file.

    A lookup runs in rounds, see `lookup_rounds`. A put sends the block at once, and the service
    refuses an existing object (`If-None-Match`); services without that condition get a HEAD request
    first. A put holds a copy of the block. A reader deletes an object with wrong bytes.
    """

    def __init__(
        self,
        place: S3Place,
        frame: BlockFrame,
        *,
        depth: int,
        limits: TimeoutLimits,
        clock: Callable[[], float] = time.monotonic,
        looks_for_corrupt: bool = False,
    ) -> None:
        """Args:
        depth: concurrent reads, and concurrent writes.
        limits: bounds of the time limits.
        clock: seconds, monotonic.
        looks_for_corrupt: as in `Circuits`.
        """
        self._frame = frame
        self._place = place
        connections = 2 * depth + LOOKUPS_AT_ONCE  # enough that lookups do not wait for reads
        self._bucket = S3Bucket(
            place,
            connections=connections,
            limits=limits,
            clock=clock,
            depth=depth,
            looks_for_corrupt=looks_for_corrupt,
        )
        self._reading = asyncio.Semaphore(depth)
        self._writing = asyncio.Semaphore(depth)
        self._asking = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._reports = CorruptReports(self.delete)
        self._framer = DaemonPool(1, "cake-s3-frame")
        self._clock = clock
        self._describe_s = -math.inf  # time to write the description again
        self._closed = False

    def events(self) -> dict[str, int]:
        return self._bucket.counters.events()

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As in `Store`; at most MAX_ROUNDS round trips."""
        # Before the requests: an answer may be older than the end of a report.
        reported = self._reports.among(keys)
        found = await look_up_in_rounds(keys, self._has, at_once=LOOKUPS_AT_ONCE, rounds=MAX_ROUNDS)
        self._check_open()
        return [there and key not in reported for key, there in zip(keys, found, strict=True)]

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        with self._reports.reading(key):
            async with self._reading:
                return await self._read(key, out, progress)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        assert self._frame.takes(data.nbytes), data.nbytes
        view = data.cast("B")
        await self._reports.end(key)
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
        """As in `Store`, 1000 blocks per round trip; `used_s` is the time of the put."""
        start = self._place.name(self._frame.digest.hex(), "")
        async for page in self._bucket.pages(start):
            for found in page.get("Contents", ()):
                if match := _NAME.fullmatch(found.get("Key", "").removeprefix(start)):
                    put = found.get("LastModified")
                    yield BlockInfo(
                        BlockKey(bytes.fromhex(match[3])),
                        found.get("Size", 0),
                        put.timestamp() if put else None,
                    )

    async def remove_description(self) -> None:
        start = self._place.name(self._frame.digest.hex(), "")
        found = await self._bucket.page(start, MaxKeys=2)
        if {each.get("Key") for each in found.get("Contents", [])} <= {start + DESCRIPTION}:
            await self._bucket.delete(start + DESCRIPTION)

    async def stats(self) -> StoreStats:
        """Empty: S3 has no totals, and counting would list everything."""
        self._check_open()
        return StoreStats()

    async def close(self) -> None:
        """Reads and puts in flight fail."""
        await self._reports.end_all()
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
        async with self._bucket.reading(self._name(key), self._frame.framed_bytes) as answer:
            length = answer.get("ContentLength")
            if length is None:
                # Without it a cut-off answer cannot be told from a short object.
                raise StoreUnavailable("S3: an answer without Content-Length")
            if not self._frame.fits(length):
                raise BlockCorrupt(f"{length} bytes, a block has {self._frame.framed_bytes}")
            block = IncomingBlock(self._frame, key, out, progress)
            while data := await answer["Body"].read(READ_BYTES):
                block.feed(data)
            return block.finish()

    async def _describe(self) -> None:
        """Write the description of the namespace, for tools.

        It is written again every DESCRIBE_EVERY_S, since the store may have been cleared.
        """
        if self._clock() >= self._describe_s:
            fields = json.dumps(self._frame.namespace.describe(), indent=2).encode()
            await self._bucket.put_new(
                self._place.name(self._frame.digest.hex(), DESCRIPTION), fields
            )
            self._describe_s = self._clock() + DESCRIBE_EVERY_S

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")


@dataclass(frozen=True, slots=True)
class S3Source:
    """Implements `StoreSource`."""

    # AWS carries 85 to 90 MB/s on one connection: 1.4 GB/s on all.
    depth: ClassVar[int] = 16

    place: S3Place
    limits: TimeoutLimits = LIMITS
    most_namespaces: int = MAX_NAMESPACES  # a longer listing is an error
    check_s: float = CHECK_S
    reads_count: bool = True  # False: for tools, to whose circuits a corrupt block is an answer

    def check(self) -> None:
        """Lists one name. A missing answer, or a server's error, is not reported."""
        io = IoThread()  # this thread may run an event loop
        try:
            io.run(self._ask(), self.check_s)
        except TimeoutError:
            pass
        except StoreError as error:
            if mistake := self._mistake(error):
                raise ConfigError(mistake) from None
        finally:
            io.close()

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        """Connects with the first call. The description of the namespace is not compared, since
        every block names its namespace."""
        return S3Store(
            self.place,
            frame,
            depth=depth,
            limits=self.limits,
            looks_for_corrupt=not self.reads_count,
        )

    async def namespaces(self) -> list[StoredNamespace]:
        start = self.place.name("")
        bucket = S3Bucket(self.place, connections=1, limits=self.limits)
        try:
            digests: list[str] = []
            async for page in bucket.pages(start, Delimiter="/"):
                folders = (folder.get("Prefix", "") for folder in page.get("CommonPrefixes", ()))
                names = (folder.removeprefix(start).rstrip("/") for folder in folders)
                digests += filter(_NAMESPACE.fullmatch, names)
                if len(digests) > self.most_namespaces:
                    raise StoreUnavailable(
                        f"S3: a listing of more than {self.most_namespaces} folders"
                    )
            return [
                StoredNamespace(Digest(bytes.fromhex(name)), await self._fields(bucket, name))
                for name in digests
            ]
        finally:
            await bucket.close()

    def describe(self) -> StoreLayer:
        return StoreLayer("S3Store", asdict(self.place))

    async def _ask(self) -> None:
        bucket = S3Bucket(self.place, connections=1, limits=self.limits)
        try:
            await bucket.page(self.place.name(""), MaxKeys=1)
        finally:
            await bucket.close()

    def _mistake(self, error: StoreError) -> str:
        """Why the bucket can never be used as configured; empty if it may be later."""
        where = self.place.endpoint or "the configured S3 service"
        which = f"bucket {self.place.bucket!r} at {where}"
        if isinstance(error, S3Error):
            if error.elsewhere:
                return f"{which}: {error.elsewhere}"
            if error.code == "NoSuchBucket":
                return f"{which} does not exist: make it first"
            if error.status in (400, 401, 403):
                said = one_line(error.code)
                return f"{which}: {said}; check the credentials, their policy, and the region"
        failure = error.__cause__
        raw = failure.kwargs.get("error") if isinstance(failure, HTTPClientError) else None
        if isinstance(failure, SSLError) or isinstance(raw, _UNUSABLE_CA):
            return (
                f"{which}: {one_line(failure)}; it needs a certificate that is valid now, "
                "for this host, and from a CA of this machine or of the file that the environment "
                "variable AWS_CA_BUNDLE names"
            )
        if isinstance(failure, _MISTAKES):
            return f"{which}: {one_line(failure)}"
        return ""

    async def _fields(self, bucket: S3Bucket, name: str) -> dict[str, str]:
        """The description of a namespace; empty if it has none. Raises: StoreUnavailable."""
        place = self.place.name(name, DESCRIPTION)
        for left in reversed(range(DESCRIPTION_TRIES)):
            raw = b""
            try:
                async with bucket.reading(place, MAX_DESCRIPTION_BYTES) as answer:
                    body = answer["Body"]
                    while len(raw) <= MAX_DESCRIPTION_BYTES and (data := await body.read(2**14)):
                        raw += data
            except StoreUnavailable as error:
                if isinstance(error, S3Error) and error.code in _UNREADABLE:
                    return {}
                if not left:  # after a timeout, the next try has twice the time
                    raise
            except StoreError:
                return {}
            else:
                break
        return read_fields(raw[:MAX_DESCRIPTION_BYTES]) or {}


def parse(url: StoreUrl) -> S3Source:
    """Raises: ConfigError."""
    bucket, _, prefix = url.place.partition("/")
    if "@" in bucket:
        raise url.error(
            "credentials do not belong there: name them in the environment or in ~/.aws, "
            "or use an instance role"
        )
    if not _BUCKET.fullmatch(bucket):
        raise url.error(f"{bucket!r} is not a bucket, write s3://bucket/prefix")
    endpoint = url.option("endpoint", _endpoint, "") or None
    read_region = matching(_REGION, "not a region: write for example eu-central-1")
    region = url.option("region", read_region, "") or None
    place = S3Place(bucket, _prefix(url, prefix), endpoint, region)
    return S3Source(place, reads_count=url.reads_count)


def _prefix(url: StoreUrl, text: str) -> str:
    prefix = unquote(text).strip("/")
    if (
        "" in prefix.split("/")[1:]
        or not prefix.isprintable()
        or {".", ".."} & {*prefix.split("/")}
    ):
        raise url.error("the prefix is made of names with single slashes between them")
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise url.error(f"the prefix is longer than {MAX_PREFIX_BYTES} bytes")
    return prefix


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.port != 0  # raises ValueError for text that is no port
    except ValueError:
        good = False
    if not good or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{text!r} is not an endpoint: write for example http://10.0.0.7:9000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError("an endpoint is only http(s)://host:port, without credentials")
    return text
