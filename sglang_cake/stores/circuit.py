"""Calls of one kind to a remote store: timed, counted, left out while they fail, and told of."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

from sglang_cake.core.counters import LATE
from sglang_cake.core.errors import BlockCorrupt, StoreError, StoreUnavailable
from sglang_cake.stores.breaker import Breaker
from sglang_cake.stores.timing import AdaptiveTimeout, TimeoutLimits

logger = logging.getLogger(__name__)

FAILURES = 5  # in a row, until no call is made any more
FIRST_S, LAST_S = 1.0, 60.0  # until one is made again: at first, and at most
FORBIDDEN_EVERY_S = 600.0  # between two lines about what the server does not allow
MAX_TEXT_CHARS = 300  # of what a server says


class Fault(StrEnum):
    """What was wrong with a call. The name is that of a counter, the value is for people."""

    TIMEOUTS = "timed out"
    CORRUPT = "corrupt"
    REDIRECTS = "redirected"
    STATUSES = "status"
    DISCONNECTS = "connection"
    ERRORS = "error"  # an answer that is none, or a library that cannot ask
    FORBIDDEN = "forbidden"  # the server is well: others of our calls are answered


class RemoteError(StoreUnavailable):
    """A remote store did not answer, or not with what it was asked for."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        if fault is Fault.TIMEOUTS:
            self.reason = LATE  # to a loader: further blocks of the prompt would be as late


@dataclass(slots=True)
class RemoteCounters:
    """What happened, since the store was opened."""

    requests: int = 0  # sent, with those that were tried again
    retries: int = 0
    timeouts: int = 0
    corrupt: int = 0
    redirects: int = 0
    statuses: int = 0
    disconnects: int = 0
    errors: int = 0
    failures: int = 0  # the sum of the six above
    forbidden: int = 0
    breaker_openings: int = 0
    refused: int = 0  # calls that failed at once because the breaker was open
    sent_bytes: int = 0  # of blocks
    received_bytes: int = 0  # of blocks

    def events(self) -> dict[str, int]:
        """All of it but the bytes."""
        return {name: n for name, n in asdict(self).items() if not name.endswith("_bytes")}

    def count(self, fault: Fault) -> None:
        """One more of them."""
        name = fault.name.lower()
        setattr(self, name, getattr(self, name) + 1)


class Circuit:
    """Belongs to one event loop. Lookups, reads and writes have a circuit each: a server that takes
    no blocks may still give them, and one that gives wrong bytes may still answer lookups."""

    def __init__(
        self,
        where: str,
        kind: str,
        counters: RemoteCounters,
        patience: TimeoutLimits,
        *,
        group: "list[Circuit]",
        on_outage: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        where: the server, for people; without passwords.
        kind: of the calls, in the plural.
        group: the circuits of the same server, of which this becomes one. When calls of one kind
            work again, those of the others are tried at once.
        on_outage: called when calls are not made any more; the server may come back as another.
        clock: steady, seconds.
        """
        self._where, self._kind, self._counters = where, kind, counters
        self._on_outage, self._clock = on_outage, clock
        self._pace = AdaptiveTimeout(patience)
        self._breaker = Breaker(failures=FAILURES, first_s=FIRST_S, last_s=LAST_S)
        self._fault = ""  # what failed last
        self._failing_since_s: float | None = None
        self._forbidden_s: float | None = None  # when that was said
        self._closed = False
        self._group = group
        group.append(self)

    def close(self) -> None:
        """Calls fail from now on, also those under way, which says nothing of the server."""
        self._closed = True

    @contextlib.asynccontextmanager
    async def call(self, size_bytes: int) -> AsyncIterator[None]:
        """What is done inside is one call. BlockCorrupt and StoreUnavailable, raised inside, are
        failures; any other StoreError is an answer; what is no StoreError says nothing.

        Args: size_bytes: what the call moves, at least 1.
        Raises: StoreUnavailable, at once while calls are left out; RemoteError for a call that took
            too long, or that ended with a TimeoutError.
        """
        if self._closed:
            raise StoreUnavailable("the store is closed")
        started_s, backoff = self._clock(), self._pace.backoff
        ticket = self._breaker.ask(started_s)
        if ticket is None:
            self._counters.refused += 1
            raise StoreUnavailable(f"{self._where} is left alone since {self._fault}")
        try:
            async with self._limited(size_bytes, backoff):
                yield
        except Exception as error:
            is_answer = isinstance(error, StoreError) and not _is_failure(error)
            if self._closed and not is_answer:
                self._breaker.abandoned(ticket)
                raise StoreUnavailable("the store is closed") from error
            self._ended(ticket, error)
            raise
        except BaseException:  # cancelled
            self._breaker.abandoned(ticket)
            raise
        self._succeeded(ticket)
        self._pace.answered(size_bytes, max(self._clock() - started_s, 1e-6))

    @contextlib.asynccontextmanager
    async def _limited(self, size_bytes: int, backoff: float) -> AsyncIterator[None]:
        limit_s = self._pace.timeout_s(size_bytes)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            self._pace.was_late(backoff)
            raise RemoteError(Fault.TIMEOUTS, f"no whole answer in {limit_s:.1f} s") from error

    def _ended(self, ticket: int, error: Exception) -> None:
        """A call ended with an error."""
        if not isinstance(error, StoreError):
            self._breaker.abandoned(ticket)
        elif not _is_failure(error):
            self._succeeded(ticket)
        elif fault_of(error) is Fault.FORBIDDEN:
            self._breaker.succeeded(ticket)
            self._was_forbidden(error)
        else:
            self._failed(ticket, error)

    def _succeeded(self, ticket: int) -> None:
        self._breaker.succeeded(ticket)
        if self._breaker.is_closed and self._failing_since_s is not None:
            now_s = self._clock()
            away_s, self._failing_since_s = now_s - self._failing_since_s, None
            logger.warning("%s: %s work again after %.0f s", self._where, self._kind, away_s)
            for circuit in self._group:
                circuit._breaker.may_be_back(now_s)

    def _failed(self, ticket: int, error: StoreError) -> None:
        fault, openings = fault_of(error), self._breaker.openings
        self._counters.count(fault)
        self._counters.failures += 1
        self._fault = f"{fault}: {one_line(error)}"
        self._breaker.failed(ticket, self._clock())
        if self._breaker.openings == openings:
            return
        self._counters.breaker_openings += 1
        self._on_outage()
        if self._failing_since_s is None:  # probes that fail say nothing more
            self._failing_since_s = self._clock()
            logger.warning(
                "%s: %s fail (%s) and are left out; one is tried every %.0f to %.0f s",
                *(self._where, self._kind, self._fault, FIRST_S, LAST_S),
            )

    def _was_forbidden(self, error: StoreError) -> None:
        self._counters.count(Fault.FORBIDDEN)
        now_s = self._clock()
        if self._forbidden_s is None or now_s - self._forbidden_s >= FORBIDDEN_EVERY_S:
            self._forbidden_s = now_s
            logger.warning(
                "%s: %s are forbidden (%s) and are tried again each time",
                *(self._where, self._kind, one_line(error)),
            )


def fault_of(error: StoreError) -> Fault:
    """What was wrong with a call that ended so."""
    if isinstance(error, RemoteError):
        return error.fault
    return Fault.CORRUPT if isinstance(error, BlockCorrupt) else Fault.ERRORS


def one_line(error: object) -> str:
    """Anybody's text made fit for a log: short, and without what could move a cursor."""
    text = " ".join(str(error)[: 4 * MAX_TEXT_CHARS].split())
    return "".join(letter for letter in text if letter.isprintable())[:MAX_TEXT_CHARS]


def _is_failure(error: StoreError) -> bool:
    return isinstance(error, BlockCorrupt | StoreUnavailable)
