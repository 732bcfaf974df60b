"""Requests to one HTTP server: connection pools, time limits, retries, hedges and counters."""

import asyncio
import contextlib
import math
import random
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

import aiohttp

from sglang_cake.core.errors import (
    MAX_TEXT_CHARS,
    ConfigError,
    StoreFull,
    StoreUnavailable,
    one_line,
)
from sglang_cake.stores.circuit_breaker import (
    READS,
    Circuit,
    Circuits,
    Fault,
    RemoteCounters,
    RemoteError,
    TimeoutLimits,
)
from sglang_cake.stores.http import protocol

T = TypeVar("T")

TRIES = 3
RETRY_S = 0.05  # pause before the second try; doubles with each try, times a random 0.5 to 1.5
MAX_RETRY_AFTER_S = 2.0  # longer values of Retry-After are shortened to this
CONNECT_S = 5.0
KEEPALIVE_S = 60.0  # shorter than the keep-alive of `sglang-cake store serve`
READ_BYTES = 1 << 20  # of a body that are buffered before the socket is paused
HEDGE_FLOOR_S = 0.005


@dataclass(slots=True)
class HttpCounters(RemoteCounters):
    """Counters of one store.

    `requests` includes retries and hedges. It excludes the requests that aiohttp itself repeats
    after it finds a pooled connection closed.
    """

    hedges: int = 0
    hedges_won: int = 0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server, and the credentials for it."""

    base: str  # URL without a slash at the end
    token: str | None = field(default=None, repr=False)
    ca: bytes = field(default=b"", repr=False)  # PEM text from which `tls` was made
    tls: ssl.SSLContext | None = field(default=None, compare=False)  # None: system certificates
    # Whether the server counts a GET as a use of the block. False: of a tool, to whose circuits a
    # corrupt block is an answer.
    reads_count: bool = True


class TryAgain(RemoteError):
    """A request failed for a reason that may pass; `after_s` is the server's Retry-After."""

    def __init__(self, fault: Fault, message: str, after_s: float = 0.0) -> None:
        super().__init__(fault, message)
        self.after_s = after_s


class Busy(StoreFull):
    """The server has too many puts at once, and may have a place in `after_s`."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


class Hedging:
    """When to send a second request for an answer that takes long, and how often at most.

    The delay is a quantile of recent latencies. At most SHARE of the requests are hedged, in bursts
    of at most BURST, so that hedging does not overload a server that is slow for all requests.
    """

    QUANTILE = 0.95
    WINDOW = 128
    ENOUGH = 32  # latencies, for a useful quantile
    SHARE = 0.05
    BURST = 2.0

    def __init__(self, *, floor_s: float) -> None:
        """Args:
        floor_s: shortest delay.
        """
        self._floor_s = floor_s
        self._recent: deque[float] = deque(maxlen=self.WINDOW)
        self._credit = 0.0

    def answered(self, latency_s: float) -> None:
        """Record the latency of a request, from the first of its two."""
        self._recent.append(latency_s)
        self._credit = min(self._credit + self.SHARE, self.BURST)

    def delay_s(self) -> float | None:
        """Delay of the second request; None: send none."""
        if len(self._recent) < self.ENOUGH or self._credit < 1:
            return None
        at = math.ceil(self.QUANTILE * len(self._recent)) - 1
        return max(sorted(self._recent)[at], self._floor_s)

    def take(self) -> bool:
        """Whether a second request may be sent now; counts it as sent."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True


class HttpTransport:
    """Sends requests to one server. Belongs to the event loop that first uses it; takes no lock."""

    def __init__(
        self,
        locate: Callable[[], Endpoint],
        limits: TimeoutLimits,
        hedging: Hedging | None = None,
        on_outage: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        depth: int = 1,
    ) -> None:
        """Args:
        locate: reads the address and the credentials. After a 401 or a certificate error it is
            called again, in a thread.
        limits: bounds of the time limits of all requests.
        hedging: decides when a GET is sent a second time.
        on_outage, clock: as in `Circuits`.
        depth: concurrent reads, and concurrent writes.

        Raises: ConfigError, from `locate`.
        """
        self._locate = locate
        self._endpoint = locate()
        self.base = self._endpoint.base  # URL of the server, without a slash at the end
        self._session: aiohttp.ClientSession | None = None
        self._former: aiohttp.ClientSession | None = None  # from before the last `_redial`
        self._closing: asyncio.Future[None] | None = None
        self._hedging = hedging or Hedging(floor_s=HEDGE_FLOOR_S)
        self.counters = HttpCounters()

        self._circuits = Circuits(
            self.base,
            self.counters,
            self._redial,
            on_outage,
            clock,
            looks_for_corrupt=not self._endpoint.reads_count,
        )
        self.lookups = self._circuits.add("lookups", limits)
        self.reads = self._circuits.add(READS, limits, depth)
        self.writes = self._circuits.add("writes", limits, depth)
        # The server writes a description to its disk before it answers. The time for that depends
        # on the disk, not on the few bytes of the request, so the limit never shrinks.
        floor_s = max(limits.first_s, limits.floor_s)
        self.descriptions = self._circuits.add("descriptions", replace(limits, floor_s=floor_s))
        # A server may have none now, and answer lookups.
        self.statistics = self._circuits.add("statistics", limits)

    async def close(self) -> None:
        self._circuits.close()
        if self._closing is not None:
            await self._closing
        for session in (self._former, self._session):
            if session is not None:
                await session.close()

    def _redial(self) -> None:
        """Make new connections from now on. Requests on current ones go on until the next call."""
        if self._former is not None:
            self._closing = asyncio.ensure_future(self._former.close())
        self._former = self._session
        self._session = None

    async def call(
        self,
        circuit: Circuit,
        size_bytes: int,
        attempt: Callable[[], Awaitable[T]],
        transferred: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Run `attempt`, which makes one request, until it succeeds; TRIES times at most.

        Args:
        size_bytes: bytes that the request moves.
        transferred: whether it moved them, by the result of `attempt`.

        Raises: StoreUnavailable; any other StoreError of `attempt`, without another try.
        Cancellation reaches `attempt`, which closes its connection.
        """
        for number in range(1, TRIES + 1):
            try:
                async with circuit.call(size_bytes) as made:
                    result = await _translated(attempt)
                    made.transferred = transferred(result)
                    return result
            except Busy as error:
                if number == TRIES:
                    raise
                pause_s = error.after_s
            except RemoteError as error:
                if number == TRIES or not isinstance(error, TryAgain):
                    raise RemoteError(error.fault, f"{self.base}: {error}") from error
                usual_s = RETRY_S * 2 ** (number - 1) * random.uniform(0.5, 1.5)
                pause_s = max(usual_s, min(error.after_s, MAX_RETRY_AFTER_S))
            self.counters.retries += 1
            await asyncio.sleep(pause_s)
        raise AssertionError("no tries")

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        accepted: Collection[int] | None,
        *,
        data: Callable[[], object] = lambda: None,
        headers: Mapping[str, str] | None = None,
        expect100: bool = False,
        hedged: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request. If the body is not read to its end, the connection is closed.

        Args:
        accepted: statuses that the caller handles; others are refused (`refuse`). None: all.
        data: makes the body; called again if the request is repeated with another token.
        expect100: send `Expect: 100-continue`, and the body only after the server asks for it.
        hedged: a GET without a body; a second one is sent if the first is not answered within the
            delay of `Hedging`. The first response is used, and the other request is cancelled
            before its body is read.
        """
        if hedged:
            response = await self._hedged_get(path)
        else:
            response = await self.send(method, path, data, headers, expect100)
        try:
            if accepted is not None and response.status not in accepted:
                await refuse(response)
            yield response
        except BaseException:
            response.close()
            raise
        if expect100 and response.status != 201:
            response.close()  # the server answered without reading the body
        response.release()

    async def _hedged_get(self, path: str) -> aiohttp.ClientResponse:
        started_s = time.monotonic()
        asked = [asyncio.ensure_future(self.send("GET", path))]
        winner: asyncio.Task[aiohttp.ClientResponse] | None = None
        try:
            await asyncio.wait(asked, timeout=self._hedging.delay_s())
            if not asked[0].done() and self._hedging.take():
                self.counters.hedges += 1
                asked.append(asyncio.ensure_future(self.send("GET", path)))
            winner = await _first_good(asked)
            self.counters.hedges_won += winner is not asked[0]
            response = winner.result()
        finally:
            for task in asked:
                if task is not winner:
                    task.cancel()
                    task.add_done_callback(_discard)
        self._hedging.answered(time.monotonic() - started_s)
        return response

    async def send(
        self,
        method: str,
        path: str,
        data: Callable[[], object] = lambda: None,
        headers: Mapping[str, str] | None = None,
        expect100: bool = False,
    ) -> aiohttp.ClientResponse:
        """Send a request, and again if its token or CA file was outdated. The caller closes the
        response."""
        while True:
            self.counters.requests += 1
            if self._session is None:
                self._session = self._new_session()
            endpoint = self._endpoint
            token = {} if endpoint.token is None else {"Authorization": f"Bearer {endpoint.token}"}
            try:
                response = await self._session.request(
                    method,
                    endpoint.base + path,
                    data=data(),
                    headers={**(headers or {}), **token},
                    expect100=expect100,
                    allow_redirects=False,  # the token is for this server only
                    ssl=True if endpoint.tls is None else endpoint.tls,
                )
            except aiohttp.ClientConnectorCertificateError:
                if not await self._is_renewed(endpoint):
                    raise
            else:
                if response.status != 401 or not await self._is_renewed(endpoint):
                    return response
                response.close()
            self.counters.retries += 1

    async def _is_renewed(self, used: Endpoint) -> bool:
        """Whether the token or the CA file has changed since `used`, which the server refused."""
        if self._endpoint is used:
            try:
                found = await asyncio.to_thread(self._locate)
            except ConfigError:  # the error of the server says more
                return False
            if self._endpoint is used and found != used:
                self._endpoint = found
        return self._endpoint is not used

    def _new_session(self) -> aiohttp.ClientSession:
        headers = {"Accept-Encoding": "identity"}
        if not self._endpoint.reads_count:
            headers[protocol.USE_HEADER] = protocol.NO_USE
        return aiohttp.ClientSession(
            # No limit here. `HttpStore` limits each kind of request by itself, so that a lookup
            # never waits for a connection behind reads.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=headers,
            read_bufsize=READ_BYTES,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


async def _translated(attempt: Callable[[], Awaitable[T]]) -> T:
    """Run `attempt`, with connection errors as TryAgain. A TimeoutError passes, for the circuit."""
    try:
        return await attempt()
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        words = one_line(error) or type(error).__name__
        raise TryAgain(Fault.DISCONNECTS, words) from error


async def _first_good(
    asked: "list[asyncio.Task[aiohttp.ClientResponse]]",
) -> "asyncio.Task[aiohttp.ClientResponse]":
    """The first task that succeeds; if none does, a task that failed."""
    pending = set(asked)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        good = [task for task in asked if task in done and task.exception() is None]
        if good or not pending:
            return (good or list(done))[0]


def _discard(task: "asyncio.Task[aiohttp.ClientResponse]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def refuse(response: aiohttp.ClientResponse, why: str = "") -> NoReturn:
    """Close an unexpected response, and raise the error that it stands for.

    Args: why: replaces the body's text in the message.
    Raises: StoreFull, RemoteError; TryAgain after a 5xx, except 501 and 507.
    """
    with contextlib.closing(response):
        text = one_line((await response.content.read(MAX_TEXT_CHARS)).decode(errors="replace"))
    status = response.status
    redirected = 300 <= status < 400
    why = "a redirect, which is not followed" if redirected else why
    message = f"{response.method} was answered {status}: {why or text}"
    if status == 401:
        message += "; name a file with one by ?token_file=/path in the URL"
    after_s = _retry_after_s(response)
    if status == 507:
        raise StoreFull(message)
    if status == 503 and response.method == "PUT" and 0 < after_s <= MAX_RETRY_AFTER_S:
        raise Busy(message, after_s)
    if redirected:
        raise RemoteError(Fault.REDIRECTS, message)
    if status == 403:
        raise RemoteError(Fault.FORBIDDEN, message)
    if status >= 500 and status != 501:
        raise TryAgain(Fault.STATUSES, message, after_s)
    raise RemoteError(Fault.STATUSES, message)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


async def read_whole(response: aiohttp.ClientResponse, at_most: int) -> bytes:
    """The body. Raises: StoreUnavailable if it is longer than `at_most` bytes."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > at_most:
            raise StoreUnavailable(f"an answer of more than {at_most} bytes")
    return bytes(body)
