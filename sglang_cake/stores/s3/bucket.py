"""One bucket, or a part of it. Only this module calls botocore."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session
from botocore.exceptions import (
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    HTTPClientError,
    ReadTimeoutError,
)

from sglang_cake.core.errors import BlockMissing, StoreError, StoreFull, StoreUnavailable, one_line
from sglang_cake.stores.circuit_breaker import (
    READS,
    Circuits,
    Fault,
    RemoteCounters,
    RemoteError,
    TimeoutLimits,
)

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 10.0  # without a byte
ATTEMPTS = 2  # of one call, with botocore's own backoff between them
MAX_PAGE_BYTES = 2**24  # of a listing: 1000 names of 1024 characters, escaped, and their fields
MAX_WORDS_BYTES = 2**16  # of other answers that are read whole: errors, and answers to puts

_MISSING = {"NoSuchKey", "NotFound", "404"}  # a HEAD request has no body, and so only a status
_FULL = {"QuotaExceeded", "XMinioStorageFull"}


def _host(location: str) -> str:
    try:
        return urlsplit(location).hostname or ""
    except ValueError:
        return ""


class S3Error(RemoteError):
    """The service answered with an error."""

    def __init__(self, error: ClientError) -> None:
        said = error.response.get("Error", {})
        about = error.response.get("ResponseMetadata", {})
        self.code = str(said.get("Code", ""))
        self.status = int(about.get("HTTPStatusCode", 0))
        self.elsewhere = self._elsewhere(said, about.get("HTTPHeaders", {}))
        fault = Fault.REDIRECTS if self.elsewhere else Fault.STATUSES
        if self.status == 403 and not self.elsewhere:
            fault = Fault.FORBIDDEN
        super().__init__(fault, f"S3: {self.elsewhere or one_line(error)}")

    def _elsewhere(self, said: Any, headers: Any) -> str:
        """Message about a redirect to another endpoint or region; empty without one."""
        region = one_line(headers.get("x-amz-bucket-region") or said.get("Region") or "")
        endpoint = ""
        if 300 <= self.status < 400:
            # Only the host of the URL: the rest may be a signature.
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
        """The object does not exist."""
        return self.code in _MISSING

    @property
    def there_already(self) -> bool:
        """A conditional put found the object, or another put of it in progress."""
        return self.status in (409, 412)

    @property
    def full(self) -> bool:
        """The service has no space for the object."""
        return self.status == 507 or self.code in _FULL


@dataclass(frozen=True, slots=True)
class S3Place:
    """Where objects are. Credentials come from botocore's own chain."""

    bucket: str
    prefix: str = ""  # without slashes at its ends
    endpoint: str | None = None  # http(s)://host[:port]; None: from botocore's configuration
    region: str | None = None

    def __str__(self) -> str:
        place = f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket
        return f"s3://{place} at {self.endpoint or 'the configured S3 service'}"

    def name(self, *parts: str) -> str:
        """The name of an object or a folder of this place."""
        return "/".join((self.prefix, *parts) if self.prefix else parts)


class S3Bucket:
    """Calls to one bucket. For one event loop, that of the first call.

    Every call raises StoreUnavailable in addition to the errors that it names, also after `close`.
    A cancelled call drops its connection.
    """

    def __init__(
        self,
        place: S3Place,
        *,
        connections: int,
        limits: TimeoutLimits,
        clock: Callable[[], float] = time.monotonic,
        depth: int = 1,
        looks_for_corrupt: bool = False,
    ) -> None:
        """Args:
        connections: limit; further calls wait for one, within their time limit.
        limits, clock, looks_for_corrupt: as in `Circuits`.
        depth: concurrent reads, and concurrent writes.
        """
        self.place = place
        self._connections = connections
        self.counters = RemoteCounters()
        self._circuits = Circuits(
            str(place),
            self.counters,
            redial=self._redial,
            clock=clock,
            looks_for_corrupt=looks_for_corrupt,
        )
        self._lookups = self._circuits.add("lookups", limits)
        self._reads = self._circuits.add(READS, limits, depth)
        self._writes = self._circuits.add("writes", limits, depth)
        self._lists = self._circuits.add("lists", limits)
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._session: DirectSession | None = None  # of the client
        self._conditional = True  # until the service refuses conditional puts
        self._closed = False

    async def has(self, name: str) -> bool:
        """Whether there is such an object."""
        async with self._lookups.call():
            return await self._has(name)

    async def _has(self, name: str) -> bool:
        try:
            await self._call("head_object", Key=name)
        except S3Error as refused:
            if not refused.no_such_object:
                raise
            return False
        return True

    @asynccontextmanager
    async def reading(self, name: str, size_bytes: int) -> AsyncIterator[dict[str, Any]]:
        """A context for reading one object, with S3's answer: its "Body" gives the bytes as they
        arrive. The connection is used again only after a body was read to its end. A BlockCorrupt
        inside counts as in `Circuit.call`, an error of a library is a StoreUnavailable.

        Args:
            size_bytes: expected size.

        Raises: BlockMissing.
        """
        async with self._reads.call(size_bytes):
            try:
                answer = await self._call("get_object", Key=name)
            except S3Error as refused:
                if refused.no_such_object:
                    raise BlockMissing(str(refused)) from refused
                raise
            with contextlib.closing(answer["Body"]), _errors_translated():
                yield answer

    async def put_new(self, name: str, body: bytes) -> bool:
        """False if there is an object of that name. Raises: StoreFull."""
        async with self._writes.call(len(body)) as made:
            # The service may refuse an object that is there before it has read the body.
            made.transferred = await self._put_new(name, body)
            return made.transferred

    async def _put_new(self, name: str, body: bytes) -> bool:
        try:
            if self._conditional:
                await self._call("put_object", Key=name, Body=body, IfNoneMatch="*")
                return True
        except S3Error as refused:
            if refused.there_already:
                return False
            if refused.status != 501:
                raise _full_or_not(refused) from refused
            self._conditional = False  # not implemented: conditional puts
        if await self._has(name):
            return False
        try:
            await self._call("put_object", Key=name, Body=body)
        except S3Error as refused:
            raise _full_or_not(refused) from refused
        return True

    async def delete(self, name: str) -> None:
        """Forget an object, if there is one."""
        async with self._writes.call():
            try:
                await self._call("delete_object", Key=name)
            except S3Error as refused:
                if not refused.no_such_object:
                    raise

    async def page(self, prefix: str, **where: Any) -> dict[str, Any]:
        """One page of the names that begin with `prefix`, as in S3's answer.

        Args:
            where: further arguments of ListObjectsV2.
        """
        async with self._lists.call():
            return await self._call("list_objects_v2", Prefix=prefix, **where)

    async def pages(self, prefix: str, **where: Any) -> AsyncIterator[dict[str, Any]]:
        """All pages. Args: as for `page`."""
        while True:
            page = await self.page(prefix, **where)
            yield page
            following = page.get("NextContinuationToken")
            # A faulty service might give the same page forever.
            if not following or following == where.get("ContinuationToken"):
                return
            where["ContinuationToken"] = following

    async def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One operation of S3 on the bucket, with botocore's names.

        Raises: S3Error; TimeoutError at the end of the call's time limit.
        """
        with _errors_translated():
            call = getattr(await self._opened(), operation)
            answer: dict[str, Any] = await call(Bucket=self.place.bucket, **arguments)
            return answer

    async def close(self) -> None:
        """Drop all connections. Calls in flight fail."""
        self._closed = True
        self._circuits.close()
        async with self._opening:
            await self._stack.aclose()

    async def _opened(self) -> Any:
        # With the first call: a client belongs to the event loop that creates it.
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
        """Called by botocore after each request, to ask for a retry."""
        self.counters.requests += 1
        self.counters.retries += attempts > 1

    def _redial(self) -> None:
        if self._session is not None:
            self._session.redial()

    def _new_session(self, **settings: Any) -> "DirectSession":
        self._session = DirectSession(**settings)
        return self._session

    def _made(self) -> Any:
        place = self.place
        config = AioConfig(
            http_session_cls=self._new_session,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=self._connections,
            # A block has its own checksum. Other services often refuse botocore's trailing
            # checksums, and a SHA-256 of every block would block the event loop.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={
                "payload_signing_enabled": False,
                # bucket.host needs a DNS name, which only large services have.
                "addressing_style": "path" if place.endpoint else "auto",
            },
        )
        return get_session().create_client(
            "s3", region_name=place.region, endpoint_url=place.endpoint, config=config
        )


class DirectSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """A session that follows no redirects, and limits the length of answers.

    By default aiohttp follows ten redirects to any host, with the body and the session token, and
    reads an answer of any length.
    """

    _exit_stack: AsyncExitStack  # of the base class: open sessions

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._former: AsyncExitStack | None = None  # connections from before the last `redial`
        self._closing: asyncio.Future[None] | None = None
        self._ssl_contexts: dict[str | None, Any] = {}  # by proxy

    def _build_ssl_contexts(self, proxy_url: str | None) -> Any:
        # Once, not after each `redial`: on a busy machine, the certificates take longer to read
        # than a call may take.
        if proxy_url not in self._ssl_contexts:
            self._ssl_contexts[proxy_url] = super()._build_ssl_contexts(proxy_url)
        return self._ssl_contexts[proxy_url]

    def redial(self) -> None:
        """Make new connections from now on. Requests on current ones go on until the next call."""
        if self._sessions is None:  # closed
            return
        if self._former is not None:
            self._closing = asyncio.ensure_future(self._former.aclose())
        self._former = self._exit_stack
        self._exit_stack = AsyncExitStack()
        self._sessions.clear()

    async def __aexit__(self, *error: Any) -> None:
        if self._closing is not None:
            await self._closing
        if self._former is not None:
            await self._former.aclose()
        await super().__aexit__(*error)

    async def send(self, request: Any) -> Any:
        """As in `AIOHTTPSession`."""
        try:
            answer = await super().send(request)
        except HTTPClientError as error:
            if isinstance(error.__context__, StoreUnavailable):  # from `_BoundedAnswer.read`
                raise error.__context__ from None
            raise
        if not isinstance(answer.raw, _BoundedAnswer):
            raise RuntimeError("this aiobotocore sends requests in another way: use an older one")
        return answer

    async def _get_session(self, proxy_url: str | None) -> "_DirectRequests":
        return _DirectRequests(await super()._get_session(proxy_url))


class _DirectRequests:
    """The one method of an aiohttp session that `AIOHTTPSession.send` calls."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, method: str, **arguments: Any) -> "_BoundedAnswer":
        arguments["allow_redirects"] = False
        # `send` gives `url` as a keyword.
        answer = await self._session.request(method, **arguments)
        return _BoundedAnswer(answer, method)


class _BoundedAnswer:
    """An aiohttp response whose `read` is limited. Blocks are read through `content`."""

    def __init__(self, answer: aiohttp.ClientResponse, method: str) -> None:
        self._answer = answer
        listing = method == "GET" and answer.status == 200
        self._at_most = MAX_PAGE_BYTES if listing else MAX_WORDS_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answer, name)

    async def read(self) -> bytes:
        """The whole body. Raises: StoreUnavailable if it is longer than the limit."""
        body = bytearray()
        async for piece in self._answer.content.iter_any():
            body += piece
            if len(body) > self._at_most:
                self._answer.close()
                raise StoreUnavailable(f"S3: an answer of more than {self._at_most} bytes")
        return bytes(body)


def _stay(context: dict[str, Any], **_: Any) -> None:
    """Keep botocore from following a redirect to another region, by marking it as done."""
    context["s3_redirect"]["redirected"] = True


@contextlib.contextmanager
def _errors_translated() -> Iterator[None]:
    """Errors of libraries become StoreErrors."""
    try:
        yield
    except StoreError:
        raise
    except ClientError as error:
        raise S3Error(error) from error
    except Exception as error:  # of botocore, aiohttp, or a parser with a hostile answer
        fault = Fault.ERRORS
        if isinstance(error, ReadTimeoutError | ConnectTimeoutError | TimeoutError):
            fault = Fault.TIMEOUTS
        elif isinstance(error, HTTPClientError | ConnectionError | aiohttp.ClientError | OSError):
            fault = Fault.DISCONNECTS
        raise RemoteError(fault, f"S3: {type(error).__name__}: {one_line(error)}") from error


def _full_or_not(refused: S3Error) -> StoreError:
    return StoreFull(str(refused)) if refused.full else refused
