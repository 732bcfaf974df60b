"""The transport whose parts are written into memory that the receiver lends, by an engine, beside
the connections of `zeromq.py`.

    sender                                                         receiver
    send_part: waits for a free slot, copies the part into it
               the engine writes it into the peer's slot    -->    its memory
               Landed: which part, which slot, its checksum  ==>   checks, on_part(view of the slot)
               the slot is free again                       <==    Credit

`==>` are messages on those connections, which also prove who is a member, carry all other
messages in the same order, and notice who is gone. Each member lends its peers a ring of SLOTS
slots each, and tells where they are (`Ring`) when they meet.

A slot is not written again before its part was used, nor while a write of it may still be under
way: one that takes too long keeps its slot until the engine returns. Nothing is encrypted.
"""

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from sglang_cake.core.keys import Digest
from sglang_cake.runahead import transport
from sglang_cake.runahead.messages import (
    BadMessage,
    Credit,
    Landed,
    LayerPart,
    Message,
    Ring,
)
from sglang_cake.runahead.transport import MAX_PART_BYTES, Handler, Payload, PeerGone
from sglang_cake.runahead.zeromq import ZmqTransport

logger = logging.getLogger("sglang_cake")

SLOTS = 2  # of each ring: one is written while the other is used
RING_BYTES = SLOTS * MAX_PART_BYTES
CLOSE_TIMEOUT_S = 5.0  # for writes under way


def apart(namespace: Digest, transport: str) -> Digest:
    """The namespace for handshakes: members with another transport are refused."""
    return Digest(hashlib.sha256(transport.encode() + namespace).digest())


class Engine(Protocol):
    """Memory that peers write into, and how to write into theirs."""

    @property
    def session(self) -> str:
        """How a peer's engine finds the memory that this one lends."""
        ...

    def lend(self) -> tuple[int, Payload]:
        """Address and bytes of a new ring of slots. Raises: OSError."""
        ...

    def take_back(self, address: int) -> None:
        """A ring is used no more: peers that write to it fail. Not while it is written from."""
        ...

    def fill(self, slot: Payload, payload: Payload) -> None:
        """Copy a payload into as many bytes of a ring of our own."""
        ...

    def write(self, session: str, source: int, target: int, size_bytes: int) -> bool:
        """From a ring of our own to one of a peer's; whether it is there. Any thread. Blocks,
        maybe for long."""
        ...

    def checksum(self, payload: Payload) -> int:
        """XXH3-64; 0 where bytes cannot change on their way."""
        ...


class _Link:
    """One peer: where its parts land here, and where ours go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ring_address, self.landing = engine.lend()
        self._source_address, self._source = engine.lend()
        self._changed = threading.Condition()
        self.meetings = 0
        self._theirs: Ring | None = None
        self._used: set[int] = set()  # slots whose part is there, or on its way
        self.writing: set[int] = set()  # slots that the engine has not let go

    @property
    def known(self) -> bool:
        """Whether the peer has said where parts may go."""
        return self._theirs is not None

    def met(self, ring: Ring | None) -> None:
        """The peer's slots, all free; None: it is gone."""
        with self._changed:
            self._theirs = ring
            self.meetings += 1
            self._used = set(self.writing)
            self._changed.notify_all()

    def free(self, slot: int) -> None:
        """The peer is done with a slot."""
        with self._changed:
            if slot not in self.writing:
                self._used.discard(slot)
            self._changed.notify_all()

    def put(self, payload: Payload) -> tuple[int, float] | None:
        """Write into a slot of the peer's; the slot, and seconds that it took; None if it failed.

        Waits for a free slot, and for the engine.
        """
        with self._changed:
            ready = self._changed.wait_for(
                lambda: self._theirs is None or len(self._used) < SLOTS, transport.SEND_TIMEOUT_S
            )
            ring = self._theirs
            if not ready or ring is None:
                return None
            slot = min(set(range(SLOTS)) - self._used)
            self._used.add(slot)
            self.writing.add(slot)
        offset = slot * MAX_PART_BYTES
        done: list[bool] = []
        abandoned = threading.Event()

        def end(ok: bool) -> None:
            with self._changed:
                self.writing.discard(slot)
                if not ok or abandoned.is_set():  # the peer never hears of it
                    self._used.discard(slot)
                done.append(ok)
                self._changed.notify_all()

        def write() -> None:
            source, target = self._source_address + offset, ring.address + offset
            ok = False
            try:
                ok = self._engine.write(ring.session, source, target, len(payload))
            except Exception:
                logger.exception("cake runahead: a part could not be written")
            finally:
                end(ok)

        try:
            self._engine.fill(self._source[offset : offset + len(payload)], payload)
            began_s = time.perf_counter()
            threading.Thread(target=write, name="cake-runahead-write", daemon=True).start()
        except BaseException:
            end(False)
            raise
        with self._changed:
            self._changed.wait_for(
                lambda: done or self._theirs is not ring, transport.SEND_TIMEOUT_S
            )
            if not done:
                abandoned.set()
            return (slot, time.perf_counter() - began_s) if done == [True] else None

    def close(self) -> None:
        """Nothing is written any more; memory that the engine has not let go by then stays."""
        self.met(None)
        self._engine.take_back(self.ring_address)
        with self._changed:
            if self._changed.wait_for(lambda: not self.writing, CLOSE_TIMEOUT_S):
                self._engine.take_back(self._source_address)


class RingTransport:
    """See `transport.py` for what it promises.

    Args:
        connect: makes the connections; gets what to tell each member when it comes.
        ranks: of the other members.
        engine: of this process; it lends memory for each of them.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[int], Message]], ZmqTransport],
        ranks: frozenset[int],
        engine: Engine,
    ) -> None:
        self._links = {rank: _Link(engine) for rank in ranks}
        self._engine = engine
        self._members = connect(self._ring)
        self._handler: Handler | None = None

    # ---- what the interface promises ----

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._members.start(self)

    def reachable(self) -> frozenset[int]:
        return frozenset(rank for rank in self._members.reachable() if self._links[rank].known)

    def bytes_per_s(self, rank: int) -> float | None:
        return self._members.bytes_per_s(rank)

    def send(self, rank: int, message: Message) -> None:
        if not self._links[rank].known:
            raise PeerGone(f"member {rank} cannot be reached")
        self._members.send(rank, message)

    def send_part(self, rank: int, part: LayerPart, payload: Payload) -> None:
        assert 0 < len(payload) <= MAX_PART_BYTES
        if rank not in self.reachable():
            raise PeerGone(f"member {rank} cannot be reached")
        link = self._links[rank]
        found = link.put(payload)
        if found is None:
            raise PeerGone(f"member {rank} does not take what it is sent")
        slot, took_s = found
        took_us = max(1, min(2**31 - 1, round(took_s * 1e6)))
        checksum = self._engine.checksum(payload)
        landed = Landed(part, slot, len(payload), checksum, took_us)
        try:
            self._members.send(rank, landed)
        except PeerGone:
            link.free(slot)
            raise

    def close(self) -> None:
        self._members.close()
        for link in self._links.values():
            link.close()

    # ---- what the connections say; their threads ----

    def on_message(self, rank: int, message: Message) -> None:
        """Raises: BadMessage, which ends the connection."""
        assert self._handler is not None
        if isinstance(message, Ring):
            if message.slots != SLOTS:
                raise BadMessage(f"a ring of {message.slots} slots")
            self._links[rank].met(message)
        elif isinstance(message, Credit):
            self._links[rank].free(message.slot)
        elif isinstance(message, Landed):
            self._landed(rank, message)
        else:
            self._handler.on_message(rank, message)

    def on_part(self, rank: int, part: LayerPart, payload: Payload) -> None:
        """Raises: BadMessage."""
        raise BadMessage("a part beside the engine")

    def on_gone(self, rank: int, reason: str) -> None:
        assert self._handler is not None
        known = self._links[rank].known
        self._links[rank].met(None)
        if known:
            self._handler.on_gone(rank, reason)

    # ---- inside ----

    def _ring(self, rank: int) -> Message:
        return Ring(self._engine.session, self._links[rank].ring_address, SLOTS)

    def _landed(self, rank: int, message: Landed) -> None:
        assert self._handler is not None
        if message.slot >= SLOTS or not 0 < message.size <= MAX_PART_BYTES:
            raise BadMessage(f"{message.size} bytes in slot {message.slot}")
        link, start = self._links[rank], message.slot * MAX_PART_BYTES
        meetings = link.meetings
        payload = link.landing[start : start + message.size]
        if self._engine.checksum(payload) != message.checksum:
            raise BadMessage("the checksum of a part is wrong")
        self._members.measured(rank, message.size, message.took_us / 1e6)
        self._handler.on_part(rank, message.part, payload)
        if link.meetings != meetings:  # it has gone and come since, and its slots are free
            return
        with contextlib.suppress(PeerGone):
            self._members.send(rank, Credit(message.slot))
