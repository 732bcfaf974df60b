"""A transport by one-sided writes: an engine writes parts directly into memory of the receiver.
Messages use the connections of `zeromq.py`.

    sender                                                             receiver
    send_part: waits for a free section, copies the part into it
               the engine writes it into the peer's section       -->  its memory
               PartWritten: part, section, size, checksum         ==>  checks, on_part(view of it)
               the section is free again                          <==  Credit

`==>` are messages on those connections. The connections also authenticate members, carry all other
messages in the same order, and detect members that are gone. Each member lends each peer a receive
buffer of SECTIONS sections, whose address (`ReceiveBuffer`) is in its `Hello`.

A section is not written again before its part was used, nor while a write may still be running: a
write that takes too long keeps its section until the engine returns. Nothing is encrypted.
"""

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.keys import Digest
from sglang_cake.runahead.messages import (
    MAX_PART_BYTES,
    BadMessage,
    Credit,
    LayerPart,
    Message,
    PartWritten,
    PeerGone,
    ReceiveBuffer,
)
from sglang_cake.runahead.zeromq import LINK_TIMES, Address, Handler, LinkTimes, ZmqTransport

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

    def write(self, session: str, source: int, destination: int, size_bytes: int) -> None:
        """Write from an own buffer into a peer's. Any thread. May block for long.

        Raises: OSError, RuntimeError, ValueError.
        """
        ...

    def checksum(self, data: PartBytes) -> int:
        """XXH3-64; 0 where bytes cannot change in transit."""
        ...


class _PeerBuffers:
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
        self.partings = 0
        self._used: set[int] = set()  # the peer's sections that hold a part, or are written
        self._writing: set[int] = set()  # sections whose write has not returned

    def part(self) -> None:
        """The peer is gone: if it comes back, it has read all sections."""
        with self._changed:
            self.partings += 1
            self._used = set(self._writing)
            self._changed.notify_all()

    def free(self, section: int) -> None:
        """The peer has read a section."""
        with self._changed:
            if section not in self._writing:
                self._used.discard(section)
            self._changed.notify_all()

    def put(
        self, find: Callable[[], ReceiveBuffer | None], data: PartBytes
    ) -> tuple[int, float] | None:
        """Write into a section of the peer's; returns the section and the seconds of the write.

        Waits for a free section, and for the engine. None if the write failed, or took too long.

        Args: find: gives the peer's receive buffer; None: it is gone.
        """
        with self._changed:
            partings, theirs = self.partings, find()
            ready = self._changed.wait_for(
                lambda: self.partings != partings or len(self._used) < SECTIONS, self._timeout_s
            )
            if not ready or self.partings != partings or theirs is None:
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
                self._engine.write(theirs.session, source, destination, len(data))
                ok = True
            except (OSError, RuntimeError, ValueError) as error:
                logger.warning("cake runahead: a part could not be written: %s", error)
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
            self._changed.wait_for(lambda: done or self.partings != partings, self._timeout_s)
            if not done:
                abandoned.set()
            return (section, time.perf_counter() - began_s) if done == [True] else None

    def close(self) -> None:
        """End all writes. Memory that a write still uses after CLOSE_TIMEOUT_S is never freed."""
        self.part()
        self._engine.free(self.buffer_address)
        with self._changed:
            if self._changed.wait_for(lambda: not self._writing, CLOSE_TIMEOUT_S):
                self._engine.free(self._source_address)


class OneSidedTransport(ZmqTransport):
    """A transport with the same guarantees. It is the handler of its own connections.

    Args:
        engine: the engine of this process; it lends memory for each peer.
    """

    _handler: Handler  # from `start` on

    def __init__(
        self,
        rank: int,
        peers: Sequence[Address],
        engine: WriteEngine,
        *,
        secret: bytes,
        namespace: Digest,
        times: LinkTimes = LINK_TIMES,
    ) -> None:
        others = [r for r in range(len(peers)) if r != rank]
        self._buffers = {r: _PeerBuffers(engine, times.send_s) for r in others}
        self._engine = engine
        try:
            super().__init__(rank, peers, secret=secret, namespace=namespace, times=times)
        except BaseException:
            for buffers in self._buffers.values():
                buffers.close()
            raise

    # ---- for `Member` ----

    def start(self, handler: Handler) -> None:
        self._handler = handler
        super().start(self)

    def send_part(self, rank: int, part: LayerPart, data: PartBytes) -> None:
        assert 0 < len(data) <= MAX_PART_BYTES
        if rank not in self.reachable():
            raise PeerGone(f"member {rank} cannot be reached")
        buffers = self._buffers[rank]
        found = buffers.put(lambda: self.buffer_of(rank), data)
        if found is None:
            raise PeerGone(f"member {rank} does not take what it is sent")
        section, took_s = found
        took_us = max(1, min(2**31 - 1, round(took_s * 1e6)))
        checksum = self._engine.checksum(data)
        try:
            self.send(rank, PartWritten(part, section, len(data), checksum, took_us))
        except PeerGone:
            buffers.free(section)
            raise

    def close(self) -> None:
        was_closed = self.closed.is_set()
        super().close()
        for buffers in () if was_closed else self._buffers.values():
            buffers.close()

    def own_buffer(self, rank: int) -> ReceiveBuffer:
        return ReceiveBuffer(self._engine.session, self._buffers[rank].buffer_address)

    # ---- `Handler`; the connections' threads ----

    def on_message(self, rank: int, message: Message) -> None:
        """Raises: BadMessage, which ends the connection."""
        if isinstance(message, Credit):
            self._buffers[rank].free(message.section)
        elif isinstance(message, PartWritten):
            self._part_written(rank, message)
        else:
            self._handler.on_message(rank, message)

    def on_part(self, rank: int, part: LayerPart, data: PartBytes) -> None:
        """Raises: BadMessage."""
        raise BadMessage("a part beside the engine")

    def on_gone(self, rank: int, reason: str) -> None:
        self._buffers[rank].part()
        self._handler.on_gone(rank, reason)

    def _part_written(self, rank: int, message: PartWritten) -> None:
        if message.section >= SECTIONS or not 0 < message.size <= MAX_PART_BYTES:
            raise BadMessage(f"{message.size} bytes in section {message.section}")
        buffers, start = self._buffers[rank], message.section * MAX_PART_BYTES
        partings = buffers.partings
        data = buffers.received[start : start + message.size]
        if self._engine.checksum(data) != message.checksum:
            raise BadMessage("the checksum of a part is wrong")
        self.measured(rank, message.size, message.took_us / 1e6)
        self._handler.on_part(rank, message.part, data)
        if buffers.partings != partings:  # it has left since, so its sections are free
            return
        with contextlib.suppress(PeerGone):
            self.send(rank, Credit(message.section))
