"""Requests to one server: pooled, timed, retried, counted, and given up when it is down."""

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import NoReturn, TypeVar

import aiohttp

from sglang_cake.errors import BlockCorrupt, ConfigError, StoreError, StoreFull, StoreUnavailable
from sglang_cake.store.http import protocol
from sglang_cake.store.http.breaker import Breaker
from sglang_cake.store.http.outage import Outage
from sglang_cake.store.http.timing import Hedging, Pace, Patience

T = TypeVar("T")

TRIES = 3
RETRY_S = 0.05  # before the second try, doubled for each further one, times 0.5 to 1.5 by chance
MAX_RETRY_AFTER_S = 2.0  # how much of a server's Retry-After is granted
CONNECT_S = 5.0
KEEPALIVE_S = 60.0  # less than what our server grants
READ_BYTES = 1 << 20  # of a body that wait in memory until they are looked at
MAX_TEXT_CHARS = 300  # of what a server says about an error
HEDGE_FLOOR_S = 0.005


@dataclass(slots=True)
class HttpCounters:
    """What happened, since the store was opened."""

    # Sent, with retries and hedges; but for what aiohttp itself sends once more when it finds a
    # pooled connection closed.
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    timeouts: int = 0
    failures: int = 0  # tries that were not answered, or with a server error; timeouts as well
    breaker_openings: int = 0
    refused: int = 0  # calls that failed at once because the breaker was open
    corrupt: int = 0
    sent_bytes: int = 0  # of blocks
    received_bytes: int = 0  # of blocks

    def events(self) -> dict[str, int]:
        """All of it but the bytes."""
        return {name: n for name, n in asdict(self).items() if not name.endswith("_bytes")}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is and how to get in."""

    base: str  # URL without a slash at the end
    token: str | None = field(default=None, repr=False)
    ca: bytes = field(default=b"", repr=False)  # what `tls` was made of
    tls: ssl.SSLContext | None = field(default=None, compare=False)  # None: the system's
    reads_count: bool = True  # as use, for the server's eviction


class TryAgain(Exception):
    """The server says that it cannot answer now."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Forbidden(StoreUnavailable):
    """Our token does not allow this. The server is well: others of our requests are answered."""


class Renewed(TryAgain):
    """The server refused a token or showed a certificate that has been replaced meanwhile."""


class Wire:
    """Belongs to the event loop that first uses it. Holds no lock."""

    def __init__(
        self, locate: Callable[[], Endpoint], patience: Patience, on_outage: Callable[[], None]
    ) -> None:
        """Args:
        locate: reads what says how to get in; called again, in a thread, when the server does not
            let us in.
        on_outage: called when the breaker opens; the server may come back as another.

        Raises: ConfigError, of `locate`.
        """
        self._locate, self._on_outage = locate, on_outage
        self._endpoint = locate()
        # Reads have connections of their own: our server answers those that carry nothing else
        # without aiohttp (connection.py).
        self._reads: aiohttp.ClientSession | None = None
        self._others: aiohttp.ClientSession | None = None
        self._closed = False
        self._breaker = Breaker(failures=5, first_s=1.0, last_s=60.0)
        self._outage = Outage()
        self.lookups, self.reads, self.writes = Pace(patience), Pace(patience), Pace(patience)
        self._hedging = Hedging(floor_s=HEDGE_FLOOR_S)
        self.counters = HttpCounters()

    async def close(self) -> None:
        self._closed = True
        for session in (self._reads, self._others):
            if session is not None:
                await session.close()

    async def call(
        self, pace: Pace, size_bytes: int, attempt: Callable[[], Awaitable[T]], tries: int = TRIES
    ) -> T:
        """Run `attempt`, which makes one request, until one is answered; `tries` times at most.

        Args: size_bytes: what the request moves, at least 1.
        Raises: StoreUnavailable; any StoreError of `attempt`, which is then not tried again.
        Cancellation goes to `attempt`, whose connection is closed.
        """
        for number in range(tries):
            try:
                return await self._once(pace, size_bytes, attempt)
            except TryAgain as error:
                if number + 1 == tries:
                    raise StoreUnavailable(self._message(error)) from error
                self.counters.retries += 1
                if isinstance(error, Renewed):
                    continue
                usual_s = RETRY_S * 2**number * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(usual_s, min(error.after_s, MAX_RETRY_AFTER_S)))
        raise AssertionError("no tries")

    async def _once(self, pace: Pace, size_bytes: int, attempt: Callable[[], Awaitable[T]]) -> T:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        ticket = self._breaker.ask(time.monotonic())
        if ticket is None:
            self.counters.refused += 1
            raise StoreUnavailable(
                f"{self._endpoint.base} is left alone since {self._outage.fault}"
            )
        started_s, backoff = time.monotonic(), pace.backoff
        try:
            async with asyncio.timeout(pace.timeout_s(size_bytes)):
                result = await attempt()
        except TimeoutError as error:
            pace.was_late(backoff)
            self.counters.timeouts += 1
            self._failed(ticket, "no answer in time")
            raise StoreUnavailable(self._message(error)) from error
        except Forbidden:
            self._breaker.succeeded(ticket)
            raise
        except Renewed:
            self._breaker.abandoned(ticket)
            raise
        except (aiohttp.ClientError, OSError, TryAgain) as error:
            self._failed(ticket, _words(error))
            again = error if isinstance(error, TryAgain) else TryAgain(_words(error))
            raise again from error
        except (BlockCorrupt, StoreUnavailable) as error:
            # Answered, but not with anything of use: a server that only does that is left alone.
            self.counters.corrupt += isinstance(error, BlockCorrupt)
            self._failed(ticket, f"{error.reason}: {_words(error)}")
            raise
        except StoreError:
            self._breaker.succeeded(ticket)
            raise
        except BaseException as error:
            self._breaker.abandoned(ticket)
            if self._closed and isinstance(error, RuntimeError):  # aiohttp's, for a closed session
                raise StoreUnavailable("the store is closed") from error
            raise
        self._breaker.succeeded(ticket)
        if self._breaker.is_closed:
            self._outage.ended(self._endpoint.base)
        pace.answered(size_bytes, max(time.monotonic() - started_s, 1e-6))
        return result

    def _failed(self, ticket: int, fault: str) -> None:
        self.counters.failures += 1
        self._outage.fault = fault
        self._breaker.failed(ticket, time.monotonic())
        if self._breaker.openings > self.counters.breaker_openings:
            self.counters.breaker_openings = self._breaker.openings
            self._outage.began(self._endpoint.base)
            self._on_outage()

    def _message(self, error: BaseException) -> str:
        return f"{self._endpoint.base}: {_words(error)}"

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        data: object = None,
        headers: Mapping[str, str] | None = None,
        expect100: bool = False,
        keep: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request. A body that is not read to its end costs the connection.

        Args: keep: the response goes on to live after the block; whoever keeps it closes it.
        """
        if self._others is None:
            self._others = self._session()
        response = await self._send(self._others, method, path, data, headers, expect100)
        try:
            yield response
        except BaseException:
            response.close()
            raise
        if expect100 and response.status != 201:
            response.close()  # it was answered before its body was asked for
        if not keep:
            response.release()

    @contextlib.asynccontextmanager
    async def hedged_get(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """One GET, or two when the first takes unusually long to be answered; the first to be
        answered goes on, the other is given up before anything of its body was read."""
        started_s = time.monotonic()
        if self._reads is None:
            self._reads = self._session()
        response = await self._first_answer(self._reads, path)
        self._hedging.answered(time.monotonic() - started_s)
        try:
            yield response
        except BaseException:
            response.close()
            raise
        response.release()

    async def _first_answer(
        self, session: aiohttp.ClientSession, path: str
    ) -> aiohttp.ClientResponse:
        delay_s = self._hedging.delay_s()
        if delay_s is None:
            return await self._send(session, "GET", path)
        asked = [asyncio.ensure_future(self._send(session, "GET", path))]
        winner: asyncio.Task[aiohttp.ClientResponse] | None = None
        try:
            await asyncio.wait(asked, timeout=delay_s)
            if not asked[0].done() and self._hedging.take():
                self.counters.hedges += 1
                asked.append(asyncio.ensure_future(self._send(session, "GET", path)))
            winner = await _first_good(asked)
            self.counters.hedges_won += winner is not asked[0]
            return winner.result()
        finally:
            for task in asked:
                if task is not winner:
                    task.cancel()
                    task.add_done_callback(_discard)

    async def _send(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        data: object = None,
        headers: Mapping[str, str] | None = None,
        expect100: bool = False,
    ) -> aiohttp.ClientResponse:
        self.counters.requests += 1
        endpoint, headers = self._endpoint, dict(headers or {})
        if endpoint.token is not None:
            headers["Authorization"] = f"Bearer {endpoint.token}"
        try:
            response = await session.request(
                method,
                endpoint.base + path,
                data=data,
                headers=headers,
                expect100=expect100,
                allow_redirects=False,  # a token goes to nobody else
                ssl=True if endpoint.tls is None else endpoint.tls,
            )
        except aiohttp.ClientConnectorCertificateError as error:
            if await self._is_renewed(endpoint):
                raise Renewed("the certificates to trust were replaced") from error
            raise
        if response.status == 401 and await self._is_renewed(endpoint):
            response.close()
            raise Renewed("the token was replaced")
        return response

    async def _is_renewed(self, used: Endpoint) -> bool:
        """Whether there is another token or certificate than those that did not let us in."""
        if self._endpoint is used:
            try:
                found = await asyncio.to_thread(self._locate)
            except ConfigError:  # what the server said is more to the point
                return False
            if self._endpoint is used and found != used:
                self._endpoint = found
        return self._endpoint is not used

    def _session(self) -> aiohttp.ClientSession:
        headers = {"Accept-Encoding": "identity"}
        if not self._endpoint.reads_count:
            headers[protocol.USE_HEADER] = protocol.NO_USE
        return aiohttp.ClientSession(
            # No limit of its own: whoever calls has one for each kind of request, so that a lookup
            # never waits for a connection behind reads.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=headers,
            read_bufsize=READ_BYTES,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


async def _first_good(
    asked: "list[asyncio.Task[aiohttp.ClientResponse]]",
) -> "asyncio.Task[aiohttp.ClientResponse]":
    """The first of the tasks that succeeds; the last that failed if none does."""
    pending = set(asked)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        good = [task for task in asked if task in done and task.exception() is None]
        if good or not pending:
            return (good or list(done))[0]


def _discard(task: "asyncio.Task[aiohttp.ClientResponse]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _words(error: BaseException) -> str:
    return _one_line(str(error)) or type(error).__name__


def _one_line(text: str) -> str:
    """Anybody's text made fit for a log: short, and without what could move a cursor."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_TEXT_CHARS]).strip()


async def refuse(response: aiohttp.ClientResponse, why: str = "") -> NoReturn:
    """Turn an answer that was not hoped for into the error that it is.

    Raises: StoreFull, Forbidden, StoreUnavailable; TryAgain for what may pass.
    """
    text = _one_line((await response.content.read(MAX_TEXT_CHARS)).decode(errors="replace"))
    why = "a redirect, which is not followed" if 300 <= response.status < 400 else why
    message = f"{response.method} was answered {response.status}: {why or text}"
    if response.status == 507:
        raise StoreFull(message)
    if response.status >= 500 and response.status != 501:
        raise TryAgain(message, _retry_after_s(response))
    if response.status == 403:
        raise Forbidden(message)
    raise StoreUnavailable(message)


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


async def read_lines(
    response: aiohttp.ClientResponse, at_most: int, patience: Patience
) -> AsyncIterator[bytes]:
    """The lines of the body, each of `at_most` bytes. However long the reader takes; the server
    may take `patience.first_s` for each piece.

    Raises: StoreUnavailable.
    """
    rest = b""
    try:
        while True:
            async with asyncio.timeout(patience.first_s):
                piece = await response.content.readany()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
            if not piece:
                break
            if len(rest) > at_most:
                raise StoreUnavailable(f"a line of more than {at_most} bytes")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise StoreUnavailable(f"an answer broke off: {_words(error)}") from error
    if rest:
        raise StoreUnavailable("an answer broke off within a line")
