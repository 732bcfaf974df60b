"""One bucket, or a part of it: the only place that talks to botocore."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import (
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    HTTPClientError,
    ReadTimeoutError,
)

from sglang_cake.core.errors import BlockMissing, StoreError, StoreFull, StoreUnavailable
from sglang_cake.stores.circuit import Circuit, Fault, RemoteCounters, RemoteError, one_line
from sglang_cake.stores.s3.s3_session import DirectSession
from sglang_cake.stores.timing import TimeoutLimits

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 10.0  # without a byte
ATTEMPTS = 2  # of one call, with botocore's own back-off between them
NAMES_AT_ONCE = 1000  # the most that one page of a listing may hold
ASKED_BYTES = 1  # what a call counts as that moves no block: each takes about as long as the next

_MISSING = {"NoSuchKey", "NotFound", "404"}  # a HEAD has no body, so nothing but its status
_FULL = {"QuotaExceeded", "XMinioStorageFull"}


def _host(location: str) -> str:
    try:
        return urlsplit(location).hostname or ""
    except ValueError:
        return ""


class Refused(RemoteError):
    """The service answered, and not with what it was asked for."""

    def __init__(self, error: ClientError) -> None:
        said, about = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        self.code = str(said.get("Code", ""))
        self.status = int(about.get("HTTPStatusCode", 0))
        self.elsewhere = self._elsewhere(said, about.get("HTTPHeaders", {}))
        fault = Fault.REDIRECTS if self.elsewhere else Fault.STATUSES
        if self.status == 403 and not self.elsewhere:
            fault = Fault.FORBIDDEN
        super().__init__(fault, f"S3: {self.elsewhere or one_line(error)}")

    def _elsewhere(self, said: Any, headers: Any) -> str:
        """Where the service wants the request to be sent instead; empty if it does not say so."""
        region = one_line(headers.get("x-amz-bucket-region") or said.get("Region") or "")
        endpoint = ""
        if 300 <= self.status < 400:
            # Of a URL the host alone: the rest may be a signature.
            endpoint = one_line(said.get("Endpoint") or _host(headers.get("location", "")))
        elif not region:
            return ""
        names = [
            f"{what} {value!r}"
            for what, value in (("endpoint", endpoint), ("region", region))
            if value
        ]
        return (
            f"the service answers {self.status} and wants the requests elsewhere "
            f"({', '.join(names) or 'it does not say where'}), and no redirect is followed: "
            "write the bucket's own endpoint= and region= into the store's URL"
        )

    @property
    def no_such_object(self) -> bool:
        """It has everything but the object."""
        return self.code in _MISSING

    @property
    def there_already(self) -> bool:
        """A conditional put found an object, or another put of it under way."""
        return self.status in (409, 412)

    @property
    def full(self) -> bool:
        """No room for the object."""
        return self.status == 507 or self.code in _FULL


@dataclass(frozen=True, slots=True)
class S3Place:
    """Where objects are. Who may have them is for botocore's own chain to find out."""

    bucket: str
    prefix: str = ""  # without slashes at its ends
    endpoint: str | None = None  # http(s)://host[:port]; None: what botocore is configured with
    region: str | None = None

    def __str__(self) -> str:
        place = f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket
        return f"s3://{place} at {self.endpoint or 'the configured S3 service'}"

    def name(self, *parts: str) -> str:
        """The name of an object or a folder of this place."""
        return "/".join((self.prefix, *parts) if self.prefix else parts)


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of a listing."""

    folders: list[str]
    objects: list[dict[str, Any]]  # as S3 describes them: Key, Size, LastModified


class S3Bucket:
    """Calls to one bucket, with errors as ours. Lives on the event loop of its first call.

    Every call raises StoreUnavailable beside what it names, also once closed. A cancelled one drops
    its connection.
    """

    def __init__(
        self,
        place: S3Place,
        *,
        connections: int,
        patience: TimeoutLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        connections: open at most; further calls wait for one, and their time runs.
        clock: as in `Circuit`.
        """
        self.place, self._connections = place, connections
        self.counters = RemoteCounters()
        self._circuits: list[Circuit] = []

        def circuit(kind: str) -> Circuit:
            return Circuit(
                *(str(place), kind, self.counters, patience), group=self._circuits, clock=clock
            )

        self._lookups, self._reads, self._writes = map(circuit, ("lookups", "reads", "writes"))
        self._lists = circuit("lists")
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._conditional = True  # until the service turns out not to know it
        self._closed = False

    async def has(self, name: str) -> bool:
        """Whether there is such an object."""
        async with self._lookups.call(ASKED_BYTES):
            return await self._has(name)

    async def _has(self, name: str) -> bool:
        try:
            await self._call("head_object", Key=name)
        except Refused as refused:
            if not refused.no_such_object:
                raise
            return False
        return True

    @asynccontextmanager
    async def reading(self, name: str, size_bytes: int) -> AsyncIterator["ObjectBody"]:
        """One object, on its way. A BlockCorrupt that is raised inside counts as the service's.

        Args: size_bytes: what is about to be read.
        Raises: BlockMissing.
        """
        async with self._reads.call(size_bytes):
            try:
                answer = await self._call("get_object", Key=name)
            except Refused as refused:
                if refused.no_such_object:
                    raise BlockMissing(str(refused)) from refused
                raise
            body = ObjectBody(answer["Body"], answer.get("ContentLength"), self.counters)
            try:
                yield body
            finally:
                body.close()

    async def put_new(self, name: str, body: bytes) -> bool:
        """False if there is an object of that name. Raises: StoreFull."""
        async with self._writes.call(len(body)):
            return await self._put_new(name, body)

    async def _put_new(self, name: str, body: bytes) -> bool:
        try:
            if self._conditional:
                await self._call("put_object", Key=name, Body=body, IfNoneMatch="*")
                self.counters.sent_bytes += len(body)
                return True
        except Refused as refused:
            if refused.there_already:
                return False
            if refused.status != 501:
                raise _full_or_not(refused) from refused
            self._conditional = False  # it does not know conditions
        if await self._has(name):
            return False
        try:
            await self._call("put_object", Key=name, Body=body)
        except Refused as refused:
            raise _full_or_not(refused) from refused
        self.counters.sent_bytes += len(body)
        return True

    async def delete(self, name: str) -> None:
        """Forget an object, if there is one."""
        async with self._writes.call(ASKED_BYTES):
            try:
                await self._call("delete_object", Key=name)
            except Refused as refused:
                if not refused.no_such_object:
                    raise

    async def page(self, prefix: str, **where: Any) -> dict[str, Any]:
        """One page of what is named `prefix` and something, as S3 answers it. Args: where: further
        arguments of ListObjectsV2."""
        async with self._lists.call(ASKED_BYTES):
            return await self._call("list_objects_v2", Prefix=prefix, **where)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Listed]:
        """Everything whose name starts with `prefix`; with a delimiter, folders are not entered."""
        where: dict[str, Any] = {"MaxKeys": NAMES_AT_ONCE}
        if delimiter:
            where["Delimiter"] = delimiter
        while True:
            page = await self.page(prefix, **where)
            folders = [folder["Prefix"] for folder in page.get("CommonPrefixes", ())]
            yield Listed(folders, page.get("Contents", []))
            following = page.get("NextContinuationToken")
            # The same page again and again would never end.
            if not following or following == where.get("ContinuationToken"):
                return
            where["ContinuationToken"] = following

    async def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One operation of S3 on the bucket, with botocore's names. Raises: Refused; TimeoutError,
        if the time of the call is over."""
        try:
            client = await self._opened()
            answer: dict[str, Any] = await getattr(client, operation)(
                Bucket=self.place.bucket, **arguments
            )
        except StoreError:
            raise
        except ClientError as error:
            raise Refused(error) from error
        except Exception as error:  # of botocore, aiohttp, or of parsers fed by a hostile server
            raise _foreign(error) from error
        return answer

    async def close(self) -> None:
        """Drop all connections; calls that wait for an answer fail."""
        self._closed = True
        for circuit in self._circuits:
            circuit.close()
        async with self._opening:
            await self._stack.aclose()

    async def _opened(self) -> Any:
        # Not earlier: a client belongs to the loop that runs when it is made.
        async with self._opening:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            if self._client is None:
                client = await self._stack.enter_async_context(self._made())
                client.meta.events.register("before-call.s3", _stay)
                client.meta.events.register("needs-retry.s3", self._count_request)
                self._client = client
        return self._client

    def _count_request(self, attempts: int, **_: Any) -> None:
        """botocore asks after each request whether there is to be another one."""
        self.counters.requests += 1
        self.counters.retries += attempts > 1

    def _made(self) -> Any:
        place = self.place
        config = AioConfig(
            http_session_cls=DirectSession,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=self._connections,
            # A block carries its own checksum. Services that only resemble S3 often refuse
            # botocore's trailing ones, and a SHA-256 of every block would hold up the loop.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={
                "payload_signing_enabled": False,
                # bucket.host needs a name in the DNS, which only the large services have.
                "addressing_style": "path" if place.endpoint else "auto",
            },
        )
        return get_session().create_client(
            "s3", region_name=place.region, endpoint_url=place.endpoint, config=config
        )


class ObjectBody:
    """The bytes of one object, on their way."""

    def __init__(self, stream: Any, length_bytes: int | None, counters: RemoteCounters) -> None:
        self._stream, self.length_bytes, self._counters = stream, length_bytes, counters

    async def read(self, at_most: int) -> bytes:
        """What has come by now, but at least a byte; nothing at the end. Raises: StoreUnavailable.

        Only a body that is read to its end leaves its connection to others.
        """
        try:
            data: bytes = await self._stream.read(at_most)
        except Exception as error:
            raise _foreign(error) from error
        self._counters.received_bytes += len(data)
        return data

    def close(self) -> None:
        """Drop what has not come yet."""
        self._stream.close()


def _stay(context: dict[str, Any], **_: Any) -> None:
    """botocore sends a request once more to whatever region an answer names, unless it has done so
    already: which this pretends."""
    context["s3_redirect"]["redirected"] = True


def _foreign(error: Exception) -> RemoteError:
    """An error of a library as one of ours."""
    fault = Fault.ERRORS
    if isinstance(error, ReadTimeoutError | ConnectTimeoutError | TimeoutError):
        fault = Fault.TIMEOUTS
    elif isinstance(error, HTTPClientError | ConnectionError | aiohttp.ClientError | OSError):
        fault = Fault.DISCONNECTS
    return RemoteError(fault, f"S3: {type(error).__name__}: {one_line(error)}")


def _full_or_not(refused: Refused) -> StoreError:
    return StoreFull(str(refused)) if refused.full else refused
