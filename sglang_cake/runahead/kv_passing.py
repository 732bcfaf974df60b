"""Point-to-point KV passing: the KV that one worker of a chain receives and sends, layer by layer.

    worker before --parts--> KvReceiver: into the pool's slots --wait(layer)--> the forward
                               | same bytes, at once                              |
                               +-----------------------> KvSender <--ready(layer)-+
                                                           +--parts--> worker after

The forward calls `reach(layer)` when K and V of its own tokens of that layer are in the pool, and
before it reads any K and V. Then the own part may be sent, and missing parts are waited for. A
failed job raises there, so that a forward ends within a layer.

Threads: the forward's; the transport's readers, which write parts into slots that belong to the
forward's request alone; one for each `KvSender`. After `close`, neither a thread nor a device reads
or writes the slots: they may be reused.

A failure names a culprit where there is one: the worker that is to be left out. It may be another
worker than the one that noticed the failure.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.keys import Span
from sglang_cake.runahead.messages import MAX_PART_BYTES, LayerPart

logger = logging.getLogger("sglang_cake")

_LOOK_S = 0.05  # how often a waiting thread checks whether it should go on waiting
# How long a part that has arrived waits for the slots. A paused scheduler gives none.
BIND_S = 30.0


# Rows of the pool, one per token. Only `Rows` reads them; other code slices them by tokens.
Slots = Any


class Rows(Protocol):
    """The KV pool as a chain uses it: rows of a layer are read and written, maybe while a device
    runs a forward."""

    @property
    def layers(self) -> int:
        """How many layers there are."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all planes."""
        ...

    def buffer(self, size_bytes: int) -> PartBytes:
        """Memory for parts, of the kind that the transport sends best. Any thread."""
        ...

    def begin(self) -> None:
        """Order all later writes after the work that the calling thread has launched so far: other
        requests may have used the slots until then. The forward's thread."""
        ...

    def read(self, layer: int, slots: Slots, out: PartBytes) -> None:
        """Copy slots into `out`, plane after plane, each `[tokens, bytes]`. Any thread."""
        ...

    def write(self, layer: int, slots: Slots, data: PartBytes, skip: int) -> Any:
        """Copy `data` without its first `skip` tokens into slots. Any thread.

        `data` and `slots` must not change until `wait()` of what this returns has returned. A
        forward may continue before that.
        """
        ...


class Broken(RunaheadError):
    """The job cannot go on at this worker; the message says why.

    Args:
        culprit: rank of the worker that is to blame; None if it is no other worker.
    """

    reason = "broken"

    def __init__(self, message: str, culprit: int | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit


class Late(Broken):
    """Data did not arrive in time. `culprit` is the worker that is waited for."""

    reason = "late"


class Predecessor(NamedTuple):
    """An earlier worker of the chain, and its span."""

    rank: int
    span: Span


class KvReceiver:
    """The KV that one worker receives: all layers of all spans of `predecessors`.

    Args:
        predecessors: the workers before this one, first of the chain first; their spans touch. The
            first worker of a chain has none, and receives nothing.
        bind_s: how long a part that has arrived waits for `bind`.
    """

    def __init__(
        self, rows: Rows, predecessors: Sequence[Predecessor], *, bind_s: float = BIND_S
    ) -> None:
        self._rows = rows
        self._bind_s = bind_s
        self._predecessors = tuple(predecessors)
        spans = [each.span for each in predecessors] or [Span(0, 0)]
        self._span = span = Span(spans[0].start, spans[-1].stop)
        self.before = predecessors[-1].rank if predecessors else None  # the previous worker
        self._held_s = dict.fromkeys((each.rank for each in predecessors), 0.0)  # waited for each
        self._changed = threading.Condition()
        self._slots: Slots = None
        self._keep = span.start
        self._got: list[list[Span]] = [[] for _ in range(rows.layers)]
        self._missing = [span.tokens] * rows.layers
        self._closed = False
        self._writing = 0
        self.waited_s = 0.0  # by the forward, so far
        self.bytes = 0

    def bind(self, slots: Slots, keep: int) -> None:
        """Allow parts to be written: `slots` are those of tokens `[keep, span.stop)`.

        Tokens before `keep` are in the pool already. The forward's thread.
        """
        self._rows.begin()
        with self._changed:
            self._slots = slots
            self._keep = keep
            self._changed.notify_all()

    def part(self, part: LayerPart, data: PartBytes) -> None:
        """Write a part that arrived; returns when it is in its slots. Waits for `bind`, and the
        sender meanwhile. Raises: Broken, also if the forward does not begin in time."""
        span = Span(part.start, part.stop)
        inside = self._span.start <= span.start and span.stop <= self._span.stop
        if not inside or part.layer >= self._rows.layers:
            raise Broken(f"an unexpected part: layer {part.layer}, {span}", self.before)
        if len(data) != span.tokens * self._rows.token_bytes:
            raise Broken(f"a part of {len(data)} bytes for {span.tokens} tokens", self.before)
        with self._changed:
            begun = self._changed.wait_for(
                lambda: self._slots is not None or self._closed, self._bind_s
            )
            if self._closed or not begun:
                raise Broken("the forward has ended, or did not begin")
            if self._got_of(part.layer, span):
                raise Broken("a part that came before", self.before)
            self._got[part.layer].append(span)
            self._writing += 1
            slots, keep = self._slots, self._keep
        try:
            first, copy = max(span.start, keep), None
            if first < span.stop:
                own = slots[first - keep : span.stop - keep]
                copy = self._rows.write(part.layer, own, data, first - span.start)
            with self._changed:
                self.bytes += len(data)
                self._missing[part.layer] -= span.tokens
                self._changed.notify_all()  # the forward's work is ordered after the copy
            if copy is not None:
                copy.wait()
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def has(self, layer: int) -> bool:
        """Whether the whole layer has arrived."""
        with self._changed:
            return not self._missing[layer]

    def wait(self, layer: int, patience_s: float, look: Callable[[], None]) -> None:
        """Wait until the whole layer has arrived.

        Waiting time is summed for each worker that is waited for. The worker with the largest sum
        is the culprit, not the one whose part is missing in the end: a slow worker makes all later
        workers late.

        Args:
            patience_s: how long all waits of this job may take together.
            look: called repeatedly; raises if waiting is of no use any more.

        Raises: Late, and the errors of `look`.
        """
        began_s = time.monotonic()
        try:
            with self._changed:
                while self._missing[layer]:
                    look()
                    left_s = patience_s - self.waited_s - (time.monotonic() - began_s)
                    if left_s <= 0:
                        held_s = self._held_s
                        late = max(held_s, key=held_s.__getitem__)
                        if not held_s[late]:  # the time is over before the first wait
                            late = self._holder(layer)
                        raise Late(
                            f"layer {layer} did not come in {patience_s:.2f} s of waiting, most of "
                            f"all for member {late}",
                            late,
                        )
                    holder, since_s = self._holder(layer), time.monotonic()
                    self._changed.wait(min(left_s, _LOOK_S))
                    self._held_s[holder] += time.monotonic() - since_s
        finally:
            self.waited_s += time.monotonic() - began_s

    def _got_of(self, layer: int, span: Span) -> int:
        """How many tokens of `span` have arrived."""
        return sum(
            max(0, min(got.stop, span.stop) - max(got.start, span.start))
            for got in self._got[layer]
        )

    def _holder(self, layer: int) -> int:
        """The worker that is waited for: the last one whose own part has not arrived.

        Later workers have sent theirs. Missing parts of earlier workers would come through this
        one, so they cannot be blamed while its own part is missing.
        """
        for rank, span in reversed(self._predecessors):
            if self._got_of(layer, span) < span.tokens:
                return rank
        return self._predecessors[0].rank  # all parts have arrived, and are being written

    def close(self) -> None:
        """No slot is written after this returns. The forward's thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._writing == 0)


class KvSender:
    """The KV that one worker sends: its own part of each layer, and the parts that it received.

    Args:
        send: to the next worker, see `ZmqTransport.send_part`.
        failed: called if sending failed, from the sender's thread.
        part_bytes: most bytes of an own part.
    """

    def __init__(
        self,
        rows: Rows,
        job: str,
        send: Callable[[LayerPart, PartBytes], None],
        failed: Callable[[Exception], None],
        *,
        part_bytes: int = MAX_PART_BYTES,
    ) -> None:
        self._rows = rows
        self._job = job
        self._send = send
        self._failed = failed
        self._part_tokens = max(1, part_bytes // rows.token_bytes)
        self._changed = threading.Condition()
        self._slots: Slots = None
        self._span = Span(0, 0)
        self._ready = -1  # layers up to this one are in the pool
        self._sent = -1
        self._closed = False
        self._reading = threading.Lock()
        self.bytes = 0
        self.forwarded_bytes = 0

    def bind(self, slots: Slots, span: Span) -> None:
        """Start the sender: of each layer it sends `slots`, those of `span`."""
        self._slots = slots
        self._span = span
        threading.Thread(target=self._run, name="cake-runahead-send", daemon=True).start()

    def ready(self, layer: int) -> None:
        """K and V of this layer are in the pool, for all tokens of the own span."""
        with self._changed:
            self._ready = max(self._ready, layer)
            self._changed.notify_all()

    def forward(self, part: LayerPart, data: PartBytes) -> None:
        """Send a received part on, from the thread that received it. Raises: PeerGone."""
        if not self._closed:
            self._send(part, data)
            self.forwarded_bytes += len(data)

    def drain(self, look: Callable[[], None]) -> None:
        """Wait until every layer is sent. `send` bounds the time of each part.

        Raises: the errors of `look`.
        """
        with self._changed:
            while self._sent + 1 < self._rows.layers:
                look()
                self._changed.wait(_LOOK_S)

    def close(self) -> None:
        """No slot is read after this returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._reading:
            pass

    def _run(self) -> None:
        try:
            buffer = self._rows.buffer(self._part_tokens * self._rows.token_bytes)
            for layer in range(self._rows.layers):
                with self._changed:
                    while not self._closed and self._ready < layer:
                        self._changed.wait()
                for start in range(self._span.start, self._span.stop, self._part_tokens):
                    span = Span(start, min(start + self._part_tokens, self._span.stop))
                    data = buffer[: span.tokens * self._rows.token_bytes]
                    with self._reading:
                        if self._closed:
                            return
                        first = self._span.start
                        own = self._slots[span.start - first : span.stop - first]
                        self._rows.read(layer, own, data)
                    self._send(LayerPart(self._job, layer, *span), data)
                    self.bytes += len(data)
                with self._changed:
                    self._sent = layer
                    self._changed.notify_all()
        except RunaheadError as error:
            self._failed(error)
        except Exception as error:
            logger.exception("cake runahead: a layer could not be sent")
            self._failed(error)


@dataclass(slots=True, eq=False)
class KvPassing:
    """The KV passing of one job at one worker.

    Attributes:
        patience_s: how long the forward may wait for incoming KV, in all.
        sender: to the worker `after`; None for the last of the chain.
        watch: called by the forward's thread at each layer, and repeatedly while it waits there. It
            raises a RunaheadError if the job is not needed any more.
    """

    job: str
    receiver: KvReceiver
    patience_s: float
    after: int | None = None
    sender: KvSender | None = None
    watch: Callable[[], None] | None = None
    _broken: tuple[str, int | None] | None = None

    @property
    def broken(self) -> str | None:
        """Why it cannot go on, if it cannot."""
        return None if self._broken is None else self._broken[0]

    @property
    def culprit(self) -> int | None:
        """Rank of the worker that is to blame; None if it is no other worker."""
        return None if self._broken is None else self._broken[1]

    def break_off(self, reason: str, culprit: int | None = None) -> None:
        """Make the forward stop at its next layer. Any thread; does not block.

        The first reason stays.
        """
        self._broken = self._broken or (reason, culprit)

    def check(self) -> None:
        """Called by the forward's thread. Raises: Broken, and the errors of `watch`."""
        if self._broken is not None:
            raise Broken(*self._broken)
        if self.watch is not None:
            self.watch()

    def on_part(self, part: LayerPart, data: PartBytes) -> None:
        """A part of this job arrived. A transport's thread."""
        if self._broken is not None:
            return
        try:
            if self.sender is not None:
                self.sender.forward(part, data)
            self.receiver.part(part, data)
        except Broken as error:
            self.break_off(str(error), error.culprit)
        except RunaheadError as error:  # from sending it on
            self.break_off(str(error), self.after)
        except Exception as error:
            logger.exception("cake runahead: a part could not be taken")
            self.break_off(repr(error))

    def reach(self, layer: int) -> None:
        """The forward has written K and V of its own tokens of `layer`, and will read all.

        Raises: RunaheadError if it must not go on.
        """
        self.check()
        self.wrote(layer)
        self.wait(layer)

    def wrote(self, layer: int) -> None:
        """K and V of the own tokens of `layer` may be sent."""
        if self.sender is not None:
            self.sender.ready(layer)

    def has(self, layer: int) -> bool:
        """Whether KV of `layer` has arrived for all tokens before the own ones."""
        return self.receiver.has(layer)

    def wait(self, layer: int) -> None:
        """Wait for it. Raises: RunaheadError if the forward must not go on."""
        try:
            self.receiver.wait(layer, self.patience_s, self.check)
        except Late as error:
            self.break_off(str(error), error.culprit)
            raise

    def drain(self) -> None:
        """Wait until every layer is sent. Raises: RunaheadError if it must not go on."""
        assert self.sender is not None
        self.sender.drain(self.check)

    def close(self, reason: str) -> None:
        """End it. The forward's thread, after success and after a failure."""
        self.break_off(reason)
        if self.sender is not None:
            self.sender.close()
        self.receiver.close()
