"""A KV pool of plain arrays, and forwards that are nothing but writing and looking."""

import threading
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np
from members import WAIT_S

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.errors import RunaheadError
from sglang_cake.runahead.member import COLD, Helping, Member, MemberSettings, Owned

PLANES, TOKEN = 2, 12  # bytes of a token in each plane
SETTINGS = MemberSettings(first_wait_s=WAIT_S)  # two slow cores


class Done:
    """A copy that was complete at once."""

    def wait(self) -> None:
        pass


class FakeRows:
    """`layers` layers of two planes; a row holds what token, layer and plane say, or garbage."""

    def __init__(self, layers: int, slots: int = 4096) -> None:
        self.layers = layers
        self.token_bytes = PLANES * TOKEN
        self.pool = np.full((layers, PLANES, slots, TOKEN), 255, np.uint8)
        self.writes = 0
        self.read_fails = False
        self.buffer_fails = False
        self._free = list(np.random.default_rng(layers).permutation(slots))

    def alloc(self, tokens: int) -> list[int]:
        taken, self._free = self._free[:tokens], self._free[tokens:]
        return [int(slot) for slot in taken]

    def buffer(self, size_bytes: int) -> memoryview:
        if self.buffer_fails:
            raise MemoryError("nothing to copy it to")
        return memoryview(bytearray(size_bytes))

    def begin(self) -> None:
        pass

    def read(self, layer: int, slots: Sequence[int], out: memoryview) -> None:
        if self.read_fails:
            raise MemoryError("nothing to copy it to")
        out[:] = self.pool[layer][:, list(slots)].tobytes()

    def write(self, layer: int, slots: Sequence[int], data: PartBytes, skip: int) -> Done:
        planes = np.asarray(data).reshape(PLANES, -1, TOKEN)
        self.pool[layer][:, list(slots)] = planes[:, skip:]
        self.writes += 1
        return Done()

    def put(self, layer: int, slots: Sequence[int], tokens: Sequence[int]) -> None:
        self.pool[layer][:, list(slots)] = truth(layer, tokens)

    def holds(self, layer: int, slots: Sequence[int], tokens: Sequence[int]) -> bool:
        return bool((self.pool[layer][:, list(slots)] == truth(layer, tokens)).all())


def truth(layer: int, tokens: Sequence[int]) -> np.ndarray:
    """What K and V of these tokens are: `[planes, tokens, bytes]`."""
    base = np.array(tokens, np.int64)[None, :, None] * 7 + layer * 31
    return ((base + np.arange(PLANES)[:, None, None] * 100 + np.arange(TOKEN)) % 251).astype(
        np.uint8
    )


class Worker:
    """A member with a pool; `serve` is its scheduler: it looks for an offer and computes."""

    def __init__(
        self,
        rank: int,
        transport: object,
        layers: int = 5,
        settings: MemberSettings = SETTINGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = FakeRows(layers)
        self.woken = threading.Event()
        self.member = Member(
            rank,
            transport,  # type: ignore[arg-type]
            self.rows,
            self.woken.set,
            settings=settings,
            clock=clock,
        )
        self.helping: Helping | None = None  # the newest job that was accepted
        self.cached = 0  # leading tokens that this worker has in its tree
        self.dies_at: int | None = None  # a layer
        self.raises_at: int | None = None  # a layer
        self.slow_s = 0.0  # a layer takes that long
        self.pause = threading.Event()
        self.pause_reached = threading.Event()
        self.pause.set()
        self.errors: list[str] = []
        self.computed: list[tuple[int, int]] = []

    def serve(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if (offer := self.member.next_offer()) is None:
                self.woken.wait(0.01)
                self.woken.clear()
                continue
            if self.cached < offer.bounds[0]:
                self.member.refuse(offer, COLD)
                continue
            try:
                self.helping = helping = self.member.accept(offer)
            except RunaheadError:
                continue
            failure = None
            try:
                span = self._help(helping)
            except Exception as error:
                failure = str(error)
            self.member.end_helping(helping, failure)
            # Tests take it for a sign that this worker has time again.
            if failure is None:
                self.computed.append(span)
            else:
                self.errors.append(failure)

    def _help(self, helping: Helping) -> tuple[int, int]:
        tokens, first = helping.offer.tokens, helping.offer.bounds[0]
        keep = max(first, min(self.cached, helping.span.stop - 1))
        start = max(keep, helping.span.start)
        slots = self.rows.alloc(len(tokens))
        for layer in range(self.rows.layers):
            self.rows.put(layer, slots[:keep], tokens[:keep])
        sender = helping.passing.sender
        assert sender is not None
        sender.bind(slots[start:], type(helping.span)(start, helping.span.stop))
        if start > helping.span.start:
            raise AssertionError("tests keep what is cached below the span")
        helping.passing.receiver.bind(slots[keep : helping.span.start], keep)
        self._forward(helping.passing, slots, tokens, start, helping.span.stop)
        helping.passing.drain()
        return start, helping.span.stop

    def own(self, owned: Owned, tokens: "array[int]") -> list[int]:
        """The owner's forward; returns the slots of all tokens. Raises: RunaheadError."""
        slots = self.bind(owned, tokens)
        self.compute(owned, slots, tokens)
        return slots

    def bind(self, owned: Owned, tokens: "array[int]") -> list[int]:
        """Parts come from now on; the slots of all tokens."""
        first, split = owned.partition.bounds[0], owned.split
        slots = self.rows.alloc(len(tokens))
        for layer in range(self.rows.layers):
            self.rows.put(layer, slots[:first], tokens[:first])
        owned.passing.receiver.bind(slots[first:split], first)
        return slots

    def compute(self, owned: Owned, slots: list[int], tokens: "array[int]") -> None:
        """Raises: RunaheadError."""
        self._forward(owned.passing, slots, tokens, owned.split, len(tokens))

    def _forward(self, passing, slots, tokens, start, stop) -> None:  # type: ignore[no-untyped-def]
        for layer in range(self.rows.layers):
            if layer == self.dies_at:
                self.pause.clear()
                self.pause_reached.set()
            self.pause.wait(WAIT_S)
            time.sleep(self.slow_s)
            if layer == self.raises_at:
                raise MemoryError("no memory for this layer")
            self.rows.put(layer, slots[start:stop], tokens[start:stop])
            passing.reach(layer)
            assert self.rows.holds(layer, slots[:stop], tokens[:stop]), "attention reads garbage"
