"""A transport by one-sided writes: an engine writes parts directly into memory of the receiver.
Messages use the connections of `zeromq.py`.

    sender                                                             receiver
    send_part: waits for a free section, copies the part into it
               the engine writes it into the peer's section       -->  its memory
               PartWritten: part, section, size, checksum         ==>  checks, on_part(view of it)
               the section is free again                          <==  Credit

`==>` are messages on those connections. The connections also authenticate members, carry all other
messages in the same order, and detect members that are gone. Each member lends each peer a receive
buffer of SECTIONS sections, and sends its address (`ReceiveBuffer`) when they connect.

A section is not written again before its part was used, nor while a write may still be running: a
write that takes too long keeps its section until the engine returns. Nothing is encrypted.
"""

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.keys import Digest
from sglang_cake.runahead.messages import (
    BadMessage,
    Credit,
    LayerPart,
    Message,
    PartWritten,
    ReceiveBuffer,
)
from sglang_cake.runahead.transport import (
    LINK_TIMES,
    MAX_PART_BYTES,
    Handler,
    PeerGone,
)
from sglang_cake.runahead.zeromq import ZmqTransport

logger = logging.getLogger("sglang_cake")

SECTIONS = 2  # of each buffer: one is written while the other one is read
BUFFER_BYTES = SECTIONS * MAX_PART_BYTES
CLOSE_TIMEOUT_S = 5.0  # for running writes


def apart(namespace: Digest, transport: str) -> Digest:
    """The namespace for handshakes, so that members with another transport are refused."""
    return Digest(hashlib.sha256(transport.encode() + namespace).digest())


class WriteEngine(Protocol):
    """Allocates memory that peers write into, and writes into theirs."""

    @property
    def session(self) -> str:
        """The address by which a peer's engine finds this one."""
        ...

    def allocate(self) -> tuple[int, PartBytes]:
        """Address and bytes of a new buffer of SECTIONS sections. Raises: OSError."""
        ...

    def free(self, address: int) -> None:
        """Free a buffer: writes of peers to it fail. No write from it may be running."""
        ...

    def fill(self, section: PartBytes, data: PartBytes) -> None:
        """Copy data into `section`, bytes of an own buffer of the same length."""
        ...

    def write(self, session: str, source: int, destination: int, size_bytes: int) -> bool:
        """Write from an own buffer into a peer's; returns whether that succeeded. Any thread. May
        block for long."""
        ...

    def checksum(self, data: PartBytes) -> int:
        """XXH3-64; 0 where bytes cannot change in transit."""
        ...


class _Link:
    """The buffers between this member and one peer."""

    def __init__(self, engine: WriteEngine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        buffer_address, received = engine.allocate()
        self.buffer_address = buffer_address
        self.received = received
        source_address, source = engine.allocate()
        self._source_address = source_address
        self._source = source
        self._changed = threading.Condition()
        self.meetings = 0
        self._theirs: ReceiveBuffer | None = None
        self._used: set[int] = set()  # the peer's sections that hold a part, or are written
        self._writing: set[int] = set()  # sections whose write has not returned

    @property
    def known(self) -> bool:
        """Whether the peer's receive buffer is known."""
        return self._theirs is not None

    def met(self, theirs: ReceiveBuffer | None) -> None:
        """Set the peer's receive buffer, with all sections free; None: the peer is gone."""
        with self._changed:
            self._theirs = theirs
            self.meetings += 1
            self._used = set(self._writing)
            self._changed.notify_all()

    def free(self, section: int) -> None:
        """The peer has read a section."""
        with self._changed:
            if section not in self._writing:
                self._used.discard(section)
            self._changed.notify_all()

    def put(self, data: PartBytes) -> tuple[int, float] | None:
        """Write into a section of the peer's; returns the section and the seconds of the write.

        Waits for a free section, and for the engine. None if the write failed, or took too long.
        """
        with self._changed:
            ready = self._changed.wait_for(
                lambda: self._theirs is None or len(self._used) < SECTIONS, self._timeout_s
            )
            theirs = self._theirs
            if not ready or theirs is None:
                return None
            section = min(set(range(SECTIONS)) - self._used)
            self._used.add(section)
            self._writing.add(section)
        offset = section * MAX_PART_BYTES
        done: list[bool] = []
        abandoned = threading.Event()

        def end(ok: bool) -> None:
            with self._changed:
                self._writing.discard(section)
                if not ok or abandoned.is_set():  # the peer is not told of this part
                    self._used.discard(section)
                done.append(ok)
                self._changed.notify_all()

        def write() -> None:
            source, destination = self._source_address + offset, theirs.address + offset
            ok = False
            try:
                ok = self._engine.write(theirs.session, source, destination, len(data))
            except Exception:
                logger.exception("cake runahead: a part could not be written")
            finally:
                end(ok)

        try:
            self._engine.fill(self._source[offset : offset + len(data)], data)
            began_s = time.perf_counter()
            threading.Thread(target=write, name="cake-runahead-write", daemon=True).start()
        except BaseException:
            end(False)
            raise
        with self._changed:
            self._changed.wait_for(lambda: done or self._theirs is not theirs, self._timeout_s)
            if not done:
                abandoned.set()
            return (section, time.perf_counter() - began_s) if done == [True] else None

    def close(self) -> None:
        """End all writes. Memory that a write still uses after CLOSE_TIMEOUT_S is never freed."""
        self.met(None)
        self._engine.free(self.buffer_address)
        with self._changed:
            if self._changed.wait_for(lambda: not self._writing, CLOSE_TIMEOUT_S):
                self._engine.free(self._source_address)


class OneSidedTransport:
    """Implements `Transport`, with its guarantees, and is the handler of the connections.

    Args:
        connect: makes the connections, given the function that makes the greeting of a member.
        ranks: of the other members.
        engine: of this process; it lends memory for each of them.
        timeout_s: in which a peer must accept a part.
    """

    _handler: Handler  # from `start` on

    def __init__(
        self,
        connect: Callable[[Callable[[int], Message]], ZmqTransport],
        ranks: frozenset[int],
        engine: WriteEngine,
        timeout_s: float = LINK_TIMES.send_s,
    ) -> None:
        self._links = {rank: _Link(engine, timeout_s) for rank in ranks}
        self._engine = engine
        try:
            self._members = connect(self._receive_buffer)
        except BaseException:
            for link in self._links.values():
                link.close()
            raise

    # ---- `Transport` ----

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

    def send_part(self, rank: int, part: LayerPart, data: PartBytes) -> None:
        assert 0 < len(data) <= MAX_PART_BYTES
        if rank not in self.reachable():
            raise PeerGone(f"member {rank} cannot be reached")
        link = self._links[rank]
        found = link.put(data)
        if found is None:
            raise PeerGone(f"member {rank} does not take what it is sent")
        section, took_s = found
        took_us = max(1, min(2**31 - 1, round(took_s * 1e6)))
        checksum = self._engine.checksum(data)
        written = PartWritten(part, section, len(data), checksum, took_us)
        try:
            self._members.send(rank, written)
        except PeerGone:
            link.free(section)
            raise

    def close(self) -> None:
        if self._members.closed.is_set():
            return
        self._members.close()
        for link in self._links.values():
            link.close()

    # ---- `Handler` of the connections; their threads ----

    def on_message(self, rank: int, message: Message) -> None:
        """Raises: BadMessage, which ends the connection."""
        if isinstance(message, ReceiveBuffer):
            if message.sections != SECTIONS:
                raise BadMessage(f"a receive buffer of {message.sections} sections")
            self._links[rank].met(message)
        elif isinstance(message, Credit):
            self._links[rank].free(message.section)
        elif isinstance(message, PartWritten):
            self._part_written(rank, message)
        else:
            self._handler.on_message(rank, message)

    def on_part(self, rank: int, part: LayerPart, data: PartBytes) -> None:
        """Raises: BadMessage."""
        raise BadMessage("a part beside the engine")

    def on_gone(self, rank: int, reason: str) -> None:
        known = self._links[rank].known
        self._links[rank].met(None)
        if known:
            self._handler.on_gone(rank, reason)

    # ---- inside ----

    def _receive_buffer(self, rank: int) -> Message:
        return ReceiveBuffer(self._engine.session, self._links[rank].buffer_address, SECTIONS)

    def _part_written(self, rank: int, message: PartWritten) -> None:
        if message.section >= SECTIONS or not 0 < message.size <= MAX_PART_BYTES:
            raise BadMessage(f"{message.size} bytes in section {message.section}")
        link, start = self._links[rank], message.section * MAX_PART_BYTES
        meetings = link.meetings
        data = link.received[start : start + message.size]
        if self._engine.checksum(data) != message.checksum:
            raise BadMessage("the checksum of a part is wrong")
        self._members.measured(rank, message.size, message.took_us / 1e6)
        self._handler.on_part(rank, message.part, data)
        if link.meetings != meetings:  # it has reconnected since, and its sections are free
            return
        with contextlib.suppress(PeerGone):
            self._members.send(rank, Credit(message.section))
