"""One member of a group: asks others to help, and helps others, one job at a time.

    idle --propose--> asking --all accept--> owning --finish--> idle
      |                  +--one refuses, is late or gone: cancel--> idle
      +--accept an offer--> helping --finish--> idle

A member that asks, owns or helps refuses offers. So no two members ever wait for each other, and no
offer waits in a queue: a busy member refuses at once, and the owner computes alone.

A member that failed is left out for a while, longer each time, until it has helped once. Other
members of the same chain are not: the report of a failure names the culprit, and missing parts show
which member is late. A member that fails as an owner asks nobody for a while, by the same rule.

A member that refused or did not answer is left out too, for shorter times, until it accepts.
Otherwise one busy member would end every chain, though others are idle. One that refused as `COLD`
is left out of chains for prompts of which the owner has a front.
"""

import logging
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sglang_cake.core.backoff import Backoff
from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.keys import Span
from sglang_cake.runahead.kv_passing import (
    KvPassing,
    KvReceiver,
    KvSender,
    Predecessor,
    Rows,
)
from sglang_cake.runahead.messages import (
    MAX_PART_BYTES,
    Accept,
    Cancel,
    Failed,
    HelpOffer,
    LayerPart,
    Message,
    PeerGone,
    Refuse,
    TransportMessage,
    new_job,
)
from sglang_cake.runahead.partition import Partition
from sglang_cake.runahead.zeromq import ZmqTransport

logger = logging.getLogger("sglang_cake")

# Of an own job: all KV arrived; it failed here or at a helper; it is not needed, or never began.
Outcome = Literal["done", "failed", "cancelled"]

MAX_OVER = 256  # ended jobs that are remembered
# The refusal of a member that may be idle: it could help with a prompt that is new to its owner.
COLD = "it has less of this prompt than its owner"
HELPER_PATIENCE_S = 60.0  # an upper bound: a helper waits as long as its owner does


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """Times of a member in seconds, and the size of its parts."""

    answer_s: float = 0.05  # how long a request waits for answers; an idle member needs one step
    left_out_s: tuple[float, float] = (2.0, 120.0)  # after the first failure, and at most
    busy_s: tuple[float, float] = (0.25, 8.0)  # after the first refusal, and at most
    first_wait_s: float = 1.0  # how long a part waits whose offer was not accepted yet
    part_bytes: int = MAX_PART_BYTES  # as of `KvSender`


MEMBER_SETTINGS: Final = MemberSettings()


@dataclass(slots=True, eq=False)
class Owned:
    """A job of this member. Attributes: request: what it is for; only its owner looks at it."""

    passing: KvPassing
    chain: tuple[int, ...]
    partition: Partition
    namespace: str  # in which helpers were asked
    request: Any
    began_s: float  # of the clock of the member
    accepted: set[int] = field(default_factory=set)
    refused: str | None = None

    @property
    def helpers(self) -> tuple[int, ...]:
        """All workers but this member."""
        return self.chain[:-1]

    @property
    def agreed(self) -> bool:
        return self.accepted == set(self.helpers)

    @property
    def span(self) -> Span:
        """The tokens that the chain computes."""
        return Span(self.partition.bounds[0], self.partition.bounds[-1])

    @property
    def split(self) -> int:
        """Where this member's own span begins."""
        return self.partition.bounds[-2]


@dataclass(slots=True, eq=False)
class Helping:
    """A job of another member that this one accepted."""

    passing: KvPassing
    offer: HelpOffer
    span: Span  # of this member


class Member:
    """Proposes and accepts jobs in the scheduler's thread; receives in the transport's threads.

    Args:
        wake: called after an offer, an answer or a failure, for the scheduler. Any thread.
    """

    def __init__(
        self,
        rank: int,
        transport: ZmqTransport,
        rows: Rows,
        wake: Callable[[], None],
        *,
        settings: MemberSettings = MEMBER_SETTINGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._settings = settings
        self._clock = clock
        self._transport = transport
        self._rows = rows
        self._wake = wake
        self._lock = threading.Condition()  # notified when a job begins or ends here
        self._owned: Owned | None = None
        self._helping: Helping | None = None
        self._offer: HelpOffer | None = None  # that waits for the scheduler
        # When a rank may be asked again: after failures, after refusals, and after those as COLD.
        self._failures = defaultdict[int, Backoff](lambda: Backoff(*settings.left_out_s))
        self._refusals = defaultdict[int, Backoff](lambda: Backoff(*settings.busy_s))
        self._cold = defaultdict[int, Backoff](lambda: Backoff(*settings.busy_s))
        self._over: deque[str] = deque(maxlen=MAX_OVER)  # ended jobs
        transport.start(self)

    # ---- the owner ----

    def helpers(self, front_tokens: int = 0) -> tuple[int, ...]:
        """Ranks that may be asked now; none while this member is busy, or after its own failure.

        Args: front_tokens: of the prompt, in the tree of this member.
        """
        now_s = self._clock()
        with self._lock:
            if self._is_busy or self._offer is not None:
                return ()
            if self._failures[self.rank].left_s(now_s):
                return ()
            pauses = [self._failures, self._refusals]
            if front_tokens:
                pauses.append(self._cold)
            return tuple(
                rank
                for rank in sorted(self._transport.reachable())
                if not any(each[rank].left_s(now_s) for each in pauses)
            )

    def bytes_per_s(self) -> float | None:
        """Throughput of the slowest link to this member; None if none was measured."""
        known = [self._transport.bytes_per_s(rank) for rank in self._transport.reachable()]
        return min((rate for rate in known if rate is not None), default=None)

    def propose(
        self,
        chain: tuple[int, ...],
        partition: Partition,
        tokens: "array[int]",
        *,
        namespace: str,
        extra_key: str | None,
        cache_salt: str | None,
        patience_s: float,
        request: Any = None,
    ) -> Owned:
        """Send offers to the helpers of `chain`, which ends with this member.

        Raises: RunaheadError if a helper cannot be reached. After any error, sent offers are
        cancelled.
        """
        assert chain[-1] == self.rank
        job = new_job()
        receiver = self._receiver(chain, partition, len(chain) - 1)
        passing = KvPassing(job, receiver, patience_s=patience_s)
        owned = Owned(passing, chain, partition, namespace, request, self._clock())
        with self._lock:
            assert not self._is_busy
            self._owned = owned
        try:
            for rank, stop in zip(chain[:-1], partition.bounds[1:], strict=False):
                offer = HelpOffer(
                    job, chain, partition.bounds, namespace, extra_key, cache_salt, tokens[:stop]
                )
                self._transport.send(rank, offer)
        except Exception as error:
            passing.break_off(str(error), rank if isinstance(error, PeerGone) else None)
            self.end_owned(owned, "failed", str(error))
            raise
        return owned

    def end_owned(self, owned: Owned, outcome: Outcome, reason: str = "") -> None:
        """End an own job.

        After this returns, the bound slots are not used. A member that is to blame is left out; if
        the job failed and no other member is to blame, that is this one.
        """
        with self._lock:
            if self._owned is owned:
                self._owned = None
            self._end(owned.passing.job)
        culprit = owned.passing.culprit
        if culprit is None and outcome == "failed":
            culprit = self.rank
        owned.passing.close(reason or outcome)
        now_s = self._clock()
        is_late = now_s - owned.began_s >= self._settings.answer_s
        for rank in owned.accepted:
            self._refusals.pop(rank, None)
            if owned.partition.bounds[0]:
                self._cold.pop(rank, None)
        for rank in owned.chain:
            if outcome == "done":
                self._failures.pop(rank, None)
                continue
            if rank == culprit:
                self._leave_out(rank)
            if rank == self.rank:
                continue
            self._tell(rank, Cancel(owned.passing.job, (reason or outcome)[:200]))
            is_silent = is_late and owned.refused is None and rank not in owned.accepted
            if is_silent and rank != culprit:
                self._refusals[rank].start(now_s)

    # ---- the helper ----

    def next_offer(self) -> HelpOffer | None:
        """An offer that the caller accepts or refuses at once. A busy member refuses it here."""
        with self._lock:
            offer, self._offer = self._offer, None
            busy = self._is_busy
        if offer is not None and busy:
            self.refuse(offer, "busy")
            return None
        return offer

    def accept(self, offer: HelpOffer) -> Helping:
        """Accept an offer. Raises: PeerGone if the owner cannot be reached any more."""
        place = offer.chain.index(self.rank)
        after = offer.chain[place + 1]
        receiver = self._receiver(offer.chain, offer.partition, place)
        passing = KvPassing(offer.job, receiver, patience_s=HELPER_PATIENCE_S, after=after)
        passing.sender = KvSender(
            self._rows,
            offer.job,
            lambda part, data: self._transport.send_part(after, part, data),
            lambda error: passing.break_off(
                str(error) or repr(error), after if isinstance(error, RunaheadError) else None
            ),
            part_bytes=self._settings.part_bytes,
        )
        helping = Helping(passing, offer, offer.partition.spans[place])
        with self._lock:
            assert not self._is_busy
            self._helping = helping
            if offer.job in self._over:
                passing.break_off("cancelled")
            self._lock.notify_all()
        try:
            self._transport.send(offer.owner, Accept(offer.job))
        except PeerGone:
            self.end_helping(helping, None)
            raise
        return helping

    def refuse(self, offer: HelpOffer, reason: str) -> None:
        with self._lock:
            self._end(offer.job)
        self._tell(offer.owner, Refuse(offer.job, reason[:200]))

    def end_helping(self, helping: Helping, failure: str | None) -> None:
        """End an accepted job; a failure and its culprit are reported to the owner."""
        culprit = helping.passing.culprit
        with self._lock:
            if self._helping is helping:
                self._helping = None
            cancelled = helping.offer.job in self._over
            self._end(helping.offer.job)
        helping.passing.close(failure or "done")
        if failure is not None and not cancelled:
            blamed = self.rank if culprit is None else culprit
            self._tell(helping.offer.owner, Failed(helping.offer.job, blamed, failure[:200]))

    def close(self) -> None:
        self._transport.close()

    # ---- `Handler`; the transport's threads ----

    def on_message(self, rank: int, message: Message) -> None:
        if isinstance(message, HelpOffer):
            self._offered(rank, message)
            return
        if isinstance(message, TransportMessage):  # from another kind of transport
            return
        with self._lock:
            owned = self._owned
            mine = owned if owned is not None and owned.passing.job == message.job else None
            if isinstance(message, Cancel):
                self._end(message.job)
                if self._offer is not None and self._offer.job == message.job:
                    self._offer = None
                if self._helping is not None and self._helping.offer.job == message.job:
                    self._helping.passing.break_off(f"cancelled: {message.reason}")
            elif mine is None or rank not in mine.helpers:
                return
            elif isinstance(message, Accept):
                mine.accepted.add(rank)
            elif isinstance(message, Refuse):
                mine.refused = f"member {rank} refuses: {message.reason}"
                pauses = self._cold if message.reason == COLD else self._refusals
                pauses[rank].start(self._clock())
            else:
                # Never this member itself: then no member would be left out.
                blamed = message.culprit if message.culprit in mine.helpers else rank
                mine.passing.break_off(f"member {rank}: {message.reason}", blamed)
        self._wake()

    def on_part(self, rank: int, part: LayerPart, data: memoryview) -> None:
        with self._lock:
            # A part of the previous worker may arrive before the offer of the owner.
            self._lock.wait_for(
                lambda: part.job in self._over or self._passing(part.job),
                self._settings.first_wait_s,
            )
            passing = self._passing(part.job)
            if passing is None or passing.receiver.before != rank:  # the job has ended
                return
            # Its answer may come after its first part, and this thread takes that answer too.
            if self._owned is not None and self._owned.passing is passing:
                self._owned.accepted.add(rank)
        self._wake()
        passing.on_part(part, data)

    def on_gone(self, rank: int, reason: str) -> None:
        with self._lock:
            if self._offer is not None and self._offer.owner == rank:
                self._offer = None
            if self._owned is not None and rank in self._owned.helpers:
                self._owned.passing.break_off(f"member {rank} is gone: {reason}", rank)
            if self._helping is not None and rank in self._helping.offer.chain:
                self._helping.passing.break_off(f"member {rank} is gone: {reason}", rank)
        self._wake()

    # ---- inside ----

    def _offered(self, rank: int, offer: HelpOffer) -> None:
        if offer.owner != rank or self.rank not in offer.chain[:-1]:
            self._tell(rank, Refuse(offer.job, "this offer is not for me"))
            return
        reason = None
        with self._lock:
            if len(offer.tokens) != offer.bounds[offer.chain.index(self.rank) + 1]:
                reason = "these tokens are not of my span"
            elif self._is_busy or self._offer is not None:
                reason = "busy"
            else:
                self._offer = offer
        if reason is None:
            self._wake()
        else:
            self.refuse(offer, reason)

    @property
    def _is_busy(self) -> bool:
        return self._owned is not None or self._helping is not None

    def _receiver(self, chain: tuple[int, ...], partition: Partition, place: int) -> KvReceiver:
        """Of the KV of the workers before this place of the chain."""
        before = [Predecessor(*each) for each in zip(chain[:place], partition.spans, strict=False)]
        return KvReceiver(self._rows, before)

    def _passing(self, job: str) -> KvPassing | None:
        for each in (self._owned, self._helping):
            if each is not None and each.passing.job == job:
                return each.passing
        return None

    def _end(self, job: str) -> None:
        self._over.append(job)
        self._lock.notify_all()

    def _leave_out(self, rank: int) -> None:
        now_s = self._clock()
        with self._lock:
            self._failures[rank].start(now_s)
            pause_s = self._failures[rank].left_s(now_s)
        if rank == self.rank:
            logger.warning("cake runahead: no member is asked for help for %.0f s", pause_s)
        else:
            logger.warning("cake runahead: member %d is left out for %.0f s", rank, pause_s)

    def _tell(self, rank: int, message: Message) -> None:
        try:
            self._transport.send(rank, message)
        except RunaheadError as error:
            logger.debug("cake runahead: member %d was not told %s: %s", rank, message, error)
