"""Calls of one kind to a remote store (`Circuit`): their time limit (`AdaptiveTimeout`), their
circuit breaker (`Breaker`), counters and log lines.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from sglang_cake.core.backoff import Backoff
from sglang_cake.core.counters import LATE
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
    one_line,
)
from sglang_cake.stores.base import USUAL_DEPTH, read_until_s

logger = logging.getLogger(__name__)

READS = "reads"  # a kind of calls
# A read ends after this share of the time that its caller waits (`base.read_until_s`). It counts as
# late then. Otherwise the caller would cancel it first, and the breaker would never open. A read
# that begins with less time left than `TimeoutLimits.floor_s` does not count.
READ_SHARE = 0.9
# A call that its caller cancels counts as late after SLACK times its expected duration, and after
# this: prompts are computed, and their reads cancelled, long before any limit ends a read.
LATE_S = 0.25
SLACK = 8.0
FAILURES = 5  # in a row, until the breaker opens
FIRST_S = 1.0  # first pause of an open breaker
LAST_S = 60.0  # its longest pause
FORBIDDEN_EVERY_S = 600.0  # between two log lines about forbidden calls
MOST_BACKOFF = 1024.0
SLOWEST_BYTES_PER_S = 64 * 1024  # slower links are not waited for
# A part of a call's time does not depend on its bytes, and counts as the time of so many. Otherwise
# the rate of a call of few bytes would allow minutes to a large one.
CALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TimeoutLimits:
    """Bounds of a time limit."""

    first_s: float = 20.0  # before the first measurement; less than the loader waits
    floor_s: float = 2.0
    ceiling_s: float = 600.0  # large bodies may take longer, by SLOWEST_BYTES_PER_S


class AdaptiveTimeout:
    """Time limit for requests of one kind, similar to TCP's retransmission timer (RFC 6298).

    The limit is SLACK times the expected duration of a request of this size, by the mean and the
    deviation of the measured time per byte. Each request counts CALL_BYTES more than it transfers.
    That rate says little about a request of more than twice the size of any before: it allows at
    most `first_s`, or as long as for twice the size.
    The more than USUAL_DEPTH requests are made at once, the longer the limit: they share the link.
    Each timeout doubles later limits, up to the ceiling, until a request has transferred its bytes.
    So after a link became slow, some requests fail, and later ones get enough time.
    """

    GAIN = 0.2  # weight of the newest measurement

    def __init__(self, limits: TimeoutLimits, at_once: int = USUAL_DEPTH) -> None:
        """Args: at_once: the most requests that share the link."""
        self._limits = limits
        self._slack = SLACK * max(1.0, at_once / USUAL_DEPTH)
        self._mean_s: float | None = None  # per byte
        self._deviation_s = 0.0
        self._most_bytes = 0  # of a request that was answered
        self.backoff = 1.0  # factor of every limit

    def timeout_s(self, size_bytes: int) -> float:
        """Limit for a request that transfers `size_bytes`."""
        limits = self._limits
        limit_s = self._within_s(size_bytes, self._slack, limits.first_s)
        most_s = max(limits.ceiling_s, size_bytes / SLOWEST_BYTES_PER_S)
        return min(max(limit_s, limits.floor_s) * self.backoff, most_s)

    def usual_s(self, size_bytes: int) -> float:
        """A request that transfers `size_bytes` rarely takes longer."""
        return self._within_s(size_bytes, SLACK, self._limits.floor_s)

    def _within_s(self, size_bytes: int, slack: float, unknown_s: float) -> float:
        """`slack` times the expected duration. Args: unknown_s: before the first measurement."""
        if self._mean_s is None:
            return unknown_s
        per_byte_s = slack * (self._mean_s + 4 * self._deviation_s)
        known_bytes = min(size_bytes, 2 * self._most_bytes)
        return max(
            (CALL_BYTES + known_bytes) * per_byte_s,
            min((CALL_BYTES + size_bytes) * per_byte_s, self._limits.first_s),
        )

    def answered(self, size_bytes: int, took_s: float) -> None:
        """Record a request that transferred `size_bytes` in `took_s`."""
        per_byte_s = took_s / (CALL_BYTES + size_bytes)
        self.backoff = 1.0
        self._most_bytes = max(self._most_bytes, size_bytes)
        if self._mean_s is None:
            self._mean_s = per_byte_s
            self._deviation_s = per_byte_s / 2
            return
        error_s = per_byte_s - self._mean_s
        self._deviation_s += self.GAIN * (abs(error_s) - self._deviation_s)
        self._mean_s += self.GAIN * error_s

    def was_late(self, backoff: float) -> None:
        """Record a timeout. Of concurrent requests only the first one counts. Args: backoff: its
        value when the request started."""
        if backoff == self.backoff:
            self.backoff = min(2 * backoff, MOST_BACKOFF)


class Breaker:
    """Circuit breaker. Closed: every call may go. Open: none may. Half open: a probe may.

                     failures in a row
        CLOSED ---------------------------> OPEN for a pause
          ^             success              |  |  ^
          +----------------------------------+  +--+ failed probe: the pause doubles

    A caller begins every call, and reports its result with the ticket that it got. Reports with a
    ticket from before the last change of state are outdated, and ignored. Times are seconds of any
    monotonic clock.

    Attributes:
        ticket: the ticket of calls that begin now.
    """

    def __init__(self, *, failures: int, calls_may_hang: bool = False) -> None:
        """Args:
        failures: in a row, until the breaker opens.
        calls_may_hang: no time limit ends a call. A probe that has not returned after another
            pause of the same length is then followed by the next one, and not awaited. Any success
            closes the breaker, an outdated one too: probes may all take longer than a pause.
        """
        self._limit = failures
        self._backoff = Backoff(FIRST_S, LAST_S)
        self._calls_may_hang = calls_may_hang
        self.ticket = 0
        self._failures = 0
        self._given_up_s = -math.inf
        self._probing = False  # the next probe waits for the end of this one
        self.is_closed = True
        self.openings = 0

    def may_call(self, now_s: float) -> bool:
        """Whether the breaker is closed, or a probe is due."""
        return self.is_closed or not (self._probing or self._backoff.left_s(now_s))

    def begin(self, now_s: float) -> int:
        """The ticket of a call that starts now. While the breaker is open, it is a probe."""
        if not self.is_closed:
            if self._calls_may_hang:
                self._backoff.repeat(now_s)
            else:
                self._probing = True
        return self.ticket

    def succeeded(self, ticket: int) -> None:
        if ticket != self.ticket and not self._calls_may_hang:
            return
        self._failures = 0
        if not self.is_closed:
            self.is_closed = True
            self._probing = False
            self._backoff.reset()
            self.ticket += 1

    def failed(self, ticket: int, now_s: float) -> None:
        """The call was not answered, or with a useless answer."""
        if ticket != self.ticket:
            return
        self._failures += 1
        if not self.is_closed or self._failures >= self._limit:
            self.is_closed = False
            self._failures = 0
            self._probing = False
            self._backoff.start(now_s)
            self.ticket += 1
            self.openings += 1

    def given_up(self, started_s: float, now_s: float, usual_s: float) -> bool:
        """A call was cancelled that rarely takes longer than `usual_s`. Returns whether that is a
        failure: it took longer. Of calls that were under way at the same time, one counts."""
        late = now_s - started_s > max(LATE_S, usual_s) and started_s >= self._given_up_s
        if late:
            self._given_up_s = now_s
        return late

    def may_be_back(self) -> None:
        """Other calls to the same server succeed again: the next call is a probe."""
        self._backoff.skip()

    def abandoned(self, ticket: int) -> None:
        """The call was cancelled. If it was the probe, the next call is the probe."""
        if ticket == self.ticket and self._probing:
            self._probing = False
            self.ticket += 1


class Fault(StrEnum):
    """Cause of a failed call. The name is that of a counter, the value is for messages."""

    TIMEOUTS = "timed out"
    CORRUPT = "corrupt"
    REDIRECTS = "redirected"
    STATUSES = "status"
    DISCONNECTS = "connection"
    ERRORS = "error"  # no valid answer, or an error of a library
    FORBIDDEN = "forbidden"  # no failure: the server answers other calls


class RemoteError(StoreUnavailable):
    """A remote store gave no answer, or a wrong one."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        if fault is Fault.TIMEOUTS:
            self.reason = LATE  # the loader then gives up the rest of the prompt


@dataclass(slots=True)
class RemoteCounters:
    """Events since the store was opened."""

    requests: int = 0  # sent, retries included
    retries: int = 0
    timeouts: int = 0
    corrupt: int = 0
    redirects: int = 0
    statuses: int = 0
    disconnects: int = 0
    errors: int = 0
    failures: int = 0  # sum of the six causes above
    forbidden: int = 0
    breaker_openings: int = 0
    refused: int = 0  # calls that failed because the breaker was open

    def events(self) -> dict[str, int]:
        return asdict(self)

    def count(self, fault: Fault) -> None:
        name = fault.name.lower()
        setattr(self, name, getattr(self, name) + 1)


@dataclass(slots=True, eq=False)
class Circuits:
    """The circuits of one server. For one event loop.

    Lookups, reads and writes have a circuit each: a server that refuses writes may still serve
    reads, and a server with wrong bytes may still answer lookups.
    """

    where: str  # name of the server in messages, without passwords
    counters: RemoteCounters
    # Called when a breaker opens because calls take too long: later calls then make new
    # connections. Idle ones may be dead without a sign, and each would cost a probe.
    redial: Callable[[], None]
    on_outage: Callable[[], None] = lambda: None  # called when a breaker opens
    clock: Callable[[], float] = time.monotonic
    # For tools: a corrupt block is an answer. They count these blocks, and go on.
    looks_for_corrupt: bool = False
    are_closed: bool = False
    all: list["Circuit"] = field(default_factory=list)

    def add(self, kind: str, limits: TimeoutLimits, at_once: int = USUAL_DEPTH) -> "Circuit":
        self.all.append(Circuit(self, kind, limits, at_once))
        return self.all[-1]

    def close(self) -> None:
        """Calls fail from now on, also those in flight. That does not count as a failure."""
        self.are_closed = True


@dataclass(slots=True)
class Call:
    """One call of a `Circuit`."""

    transferred: bool = True  # False: answered without its bytes, so its time says nothing of them


class Circuit:
    """Guards calls of one kind to a server."""

    def __init__(
        self, server: Circuits, kind: str, limits: TimeoutLimits, at_once: int = USUAL_DEPTH
    ) -> None:
        """Args:
        kind: in the plural, for messages; READS also end before `read_until_s`.
        at_once: the most calls that are made at once.
        """
        self._server = server
        self._kind = kind
        self._timeout = AdaptiveTimeout(limits, at_once)
        self._floor_s = limits.floor_s
        self.breaker = Breaker(failures=FAILURES)
        self._fault = ""  # last failure, for messages
        self._failing_since_s: float | None = None
        self._forbidden_s: float | None = None  # time of the last log line about it

    @contextlib.asynccontextmanager
    async def call(self, size_bytes: int = 0) -> AsyncIterator[Call]:
        """A context for one call. Errors inside it count as follows:

        - BlockMissing, StoreFull; BlockCorrupt if it is looked for: an answer.
        - any other StoreError: a failure.
        - a cancellation: a failure if the call has taken longer than usual.
        - any other exception: neither.

        Args:
            size_bytes: bytes that the call transfers.

        Raises: StoreUnavailable at once while the breaker is open; RemoteError if the call takes
            too long, or ends with a TimeoutError.
        """
        if self._server.are_closed:
            raise StoreUnavailable("the store is closed")
        started_s = self._server.clock()
        backoff = self._timeout.backoff
        if not self.breaker.may_call(started_s):
            self._server.counters.refused += 1
            raise StoreUnavailable(f"{self._server.where} is left alone since {self._fault}")
        ticket = self.breaker.begin(started_s)
        made = Call()
        try:
            async with self._limited(size_bytes, backoff):
                yield made
        except Exception as error:
            is_found = self._server.looks_for_corrupt and isinstance(error, BlockCorrupt)
            if is_found or isinstance(error, BlockMissing | StoreFull):
                self._succeeded(ticket)
            elif self._server.are_closed:
                self.breaker.abandoned(ticket)
                raise StoreUnavailable("the store is closed") from error
            elif not isinstance(error, StoreError):
                self.breaker.abandoned(ticket)
            elif fault_of(error) is Fault.FORBIDDEN:
                self.breaker.succeeded(ticket)
                self._was_forbidden(error)
            else:
                self._failed(ticket, error)
            raise
        except BaseException:  # cancelled
            now_s = self._server.clock()
            usual_s = self._timeout.usual_s(size_bytes)
            if not self._server.are_closed and self.breaker.given_up(started_s, now_s, usual_s):
                text = f"given up after {now_s - started_s:.1f} s"
                self._failed(ticket, RemoteError(Fault.TIMEOUTS, text))
            else:
                self.breaker.abandoned(ticket)
            raise
        self._succeeded(ticket)
        if made.transferred:
            self._timeout.answered(size_bytes, max(self._server.clock() - started_s, 1e-6))

    @contextlib.asynccontextmanager
    async def _limited(self, size_bytes: int, backoff: float) -> AsyncIterator[None]:
        limit_s = self._timeout.timeout_s(size_bytes)
        if self._kind == READS:
            callers_s = READ_SHARE * (read_until_s.get() - self._server.clock())
            limit_s = limit_s if callers_s < self._floor_s else min(limit_s, callers_s)
        if not self.breaker.is_closed:  # a probe; the next one must not wait for longer
            limit_s = min(limit_s, LAST_S)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            self._timeout.was_late(backoff)
            raise RemoteError(Fault.TIMEOUTS, f"no whole answer in {limit_s:.1f} s") from error

    def _succeeded(self, ticket: int) -> None:
        self.breaker.succeeded(ticket)
        if self.breaker.is_closed and self._failing_since_s is not None:
            now_s = self._server.clock()
            away_s = now_s - self._failing_since_s
            self._failing_since_s = None
            logger.warning("%s: %s work again after %.0f s", self._server.where, self._kind, away_s)
            for circuit in self._server.all:  # the other kinds are tried at once
                circuit.breaker.may_be_back()

    def _failed(self, ticket: int, error: StoreError) -> None:
        fault = fault_of(error)
        openings = self.breaker.openings
        self._server.counters.count(fault)
        self._server.counters.failures += 1
        self._fault = f"{fault}: {one_line(error)}"
        self.breaker.failed(ticket, self._server.clock())
        if self.breaker.openings == openings:
            return
        self._server.counters.breaker_openings += 1
        self._server.on_outage()
        if fault is Fault.TIMEOUTS:
            self._server.redial()
        if self._failing_since_s is None:  # logged once, not for each failed probe
            self._failing_since_s = self._server.clock()
            logger.warning(
                "%s: %s fail (%s) and are left out; one is tried every %.0f to %.0f s",
                self._server.where,
                self._kind,
                self._fault,
                FIRST_S,
                LAST_S,
            )

    def _was_forbidden(self, error: StoreError) -> None:
        self._server.counters.count(Fault.FORBIDDEN)
        now_s = self._server.clock()
        if self._forbidden_s is None or now_s - self._forbidden_s >= FORBIDDEN_EVERY_S:
            self._forbidden_s = now_s
            logger.warning(
                "%s: %s are forbidden (%s) and are tried again each time",
                self._server.where,
                self._kind,
                one_line(error),
            )


def fault_of(error: StoreError) -> Fault:
    if isinstance(error, RemoteError):
        return error.fault
    return Fault.CORRUPT if isinstance(error, BlockCorrupt) else Fault.ERRORS
