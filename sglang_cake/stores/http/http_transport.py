"""Requests to one server: pooled, timed, retried, counted, and given up when it is down."""

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

import aiohttp

from sglang_cake.core.errors import ConfigError, StoreFull, StoreUnavailable
from sglang_cake.stores.circuit import (
    MAX_TEXT_CHARS,
    Circuit,
    Fault,
    RemoteCounters,
    RemoteError,
    one_line,
)
from sglang_cake.stores.http import protocol
from sglang_cake.stores.timing import Hedging, TimeoutLimits

T = TypeVar("T")

TRIES = 3
RETRY_S = 0.05  # before the second try, doubled for each further one, times 0.5 to 1.5 by chance
MAX_RETRY_AFTER_S = 2.0  # how much of a server's Retry-After is granted
CONNECT_S = 5.0
KEEPALIVE_S = 60.0  # less than what our server grants
READ_BYTES = 1 << 20  # of a body that wait in memory until they are looked at
HEDGE_FLOOR_S = 0.005


@dataclass(slots=True)
class HttpCounters(RemoteCounters):
    """Requests are counted with retries and hedges, but without those that aiohttp itself sends
    once more when it finds a pooled connection closed."""

    hedges: int = 0
    hedges_won: int = 0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is and how to get in."""

    base: str  # URL without a slash at the end
    token: str | None = field(default=None, repr=False)
    ca: bytes = field(default=b"", repr=False)  # what `tls` was made of
    tls: ssl.SSLContext | None = field(default=None, compare=False)  # None: the system's
    reads_count: bool = True  # as use, for the server's eviction


class TryAgain(RemoteError):
    """The server cannot answer now."""

    def __init__(self, fault: Fault, message: str, after_s: float = 0.0) -> None:
        super().__init__(fault, message)
        self.after_s = after_s


class Renewed(Exception):
    """The server refused a token or showed a certificate that has been replaced meanwhile."""


class Wire:
    """Belongs to the event loop that first uses it. Holds no lock."""

    def __init__(
        self,
        locate: Callable[[], Endpoint],
        patience: TimeoutLimits,
        on_outage: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        locate: reads what says how to get in; called again, in a thread, when the server does not
            let us in.
        on_outage, clock: as in `Circuit`.

        Raises: ConfigError, of `locate`.
        """
        self._locate = locate
        self._endpoint = locate()
        # Reads have connections of their own: our server answers those that carry nothing else
        # without aiohttp (connection.py).
        self._reads: aiohttp.ClientSession | None = None
        self._others: aiohttp.ClientSession | None = None
        self._hedging = Hedging(floor_s=HEDGE_FLOOR_S)
        self.counters = HttpCounters()

        self._circuits: list[Circuit] = []

        def circuit(kind: str, patience: TimeoutLimits) -> Circuit:
            return Circuit(
                *(self._endpoint.base, kind, self.counters, patience),
                group=self._circuits,
                on_outage=on_outage,
                clock=clock,
            )

        self.lookups, self.reads = circuit("lookups", patience), circuit("reads", patience)
        self.writes = circuit("writes", patience)
        # Our server brings a description to its disk before it answers: however small it is, and
        # however fast the last one was, that takes as long as the disk takes.
        floor_s = max(patience.first_s, patience.floor_s)
        self.descriptions = circuit("descriptions", replace(patience, floor_s=floor_s))

    async def close(self) -> None:
        for circuit in self._circuits:
            circuit.close()
        for session in (self._reads, self._others):
            if session is not None:
                await session.close()

    async def call(
        self, circuit: Circuit, size_bytes: int, attempt: Callable[[], Awaitable[T]]
    ) -> T:
        """Run `attempt`, which makes one request, until one is answered; TRIES times at most.

        Args: size_bytes: what the request moves, at least 1.
        Raises: StoreUnavailable; any StoreError of `attempt`, which is then not tried again.
        Cancellation goes to `attempt`, whose connection is closed.
        """
        for number in range(TRIES):
            last = number + 1 == TRIES
            try:
                async with circuit.call(size_bytes):
                    return await self._told(attempt)
            except Renewed as error:
                if last:
                    raise StoreUnavailable(f"{self._endpoint.base}: {error}") from error
                self.counters.retries += 1
            except RemoteError as error:
                if last or not isinstance(error, TryAgain):
                    raise RemoteError(error.fault, f"{self._endpoint.base}: {error}") from error
                self.counters.retries += 1
                usual_s = RETRY_S * 2**number * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(usual_s, min(error.after_s, MAX_RETRY_AFTER_S)))
        raise AssertionError("no tries")

    async def _told(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Its errors as ours; a TimeoutError is the circuit's to judge."""
        try:
            return await attempt()
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            words = one_line(error) or type(error).__name__
            raise TryAgain(Fault.DISCONNECTS, words) from error

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


async def refuse(response: aiohttp.ClientResponse, why: str = "") -> NoReturn:
    """Turn an answer that was not hoped for into the error that it is.

    Raises: StoreFull, RemoteError; TryAgain for what may pass.
    """
    text = one_line((await response.content.read(MAX_TEXT_CHARS)).decode(errors="replace"))
    status = response.status
    redirected = 300 <= status < 400
    why = "a redirect, which is not followed" if redirected else why
    message = f"{response.method} was answered {status}: {why or text}"
    if status == 507:
        raise StoreFull(message)
    if redirected:
        raise RemoteError(Fault.REDIRECTS, message)
    if status == 403:
        raise RemoteError(Fault.FORBIDDEN, message)
    if status >= 500 and status != 501:
        raise TryAgain(Fault.STATUSES, message, _retry_after_s(response))
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


async def read_lines(
    response: aiohttp.ClientResponse, at_most: int, patience: TimeoutLimits
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
        raise StoreUnavailable(f"an answer broke off: {one_line(error)}") from error
    if rest:
        raise StoreUnavailable("an answer broke off within a line")
