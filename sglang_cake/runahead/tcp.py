"""The transport over TCP: two connections for each pair of members, one in each direction.

Threads: one for each peer, which dials it and writes; one that accepts; one for each connection
that was accepted, which reads. A reader has one buffer for parts, reused for all of them.
"""

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sglang_cake.keys import Digest
from sglang_cake.runahead import wire
from sglang_cake.runahead.handshake import Identity
from sglang_cake.runahead.messages import (
    PART_HEAD_BYTES,
    BadMessage,
    LayerPart,
    Message,
    decode,
    decode_part,
    encode,
    encode_part,
)
from sglang_cake.runahead.presence import Presence
from sglang_cake.runahead.strangers import Strangers
from sglang_cake.runahead.transport import MAX_PART_BYTES, Handler, PeerGone
from sglang_cake.runahead.wire import end

logger = logging.getLogger("sglang_cake")

PING_S = 0.25  # how often an idle connection says that it lives
SILENCE_S = 2.0  # after which a peer counts as gone
SEND_TIMEOUT_S = 5.0  # in which one part must be taken
FRAME_TIMEOUT_S = 10.0  # in which one must come: as long as its sender had, and buffers between
HANDSHAKE_TIMEOUT_S = 5.0  # in which all of one must be done
ACCEPT_PAUSE_S = 0.5  # after a connection could not be accepted
RETRY_S = (0.1, 2.0)  # between dials: first, and at most
MAX_QUEUE = 256  # messages that wait for one connection
SOCKET_BUFFER_BYTES = 4 * 2**20

_LARGE_BYTES = 2**16
_NEWEST = 0.1  # weight of the newest part in what a link is taken to carry

Address = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Item:
    """Something to be written: a frame in pieces."""

    pieces: tuple[bytes | memoryview, ...]
    written: threading.Event = field(default_factory=threading.Event)
    failed: bool = False


class TcpTransport:
    """See `transport.py` for what it promises.

    Args:
        rank: this member's place in `peers`.
        peers: address of every member, by rank; this one listens on its own.
        secret: 32 bytes that all members know.
        namespace: of all members' KV; others are not talked to.
        listener: a bound socket to listen on, instead of the own address.
        greeting: made for each member that comes, and sent to it.
        new_buffer: `(size in bytes)` makes the memory that parts are received into.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Address],
        *,
        secret: bytes,
        namespace: Digest,
        listener: socket.socket | None = None,
        greeting: Callable[[int], Message] | None = None,
        new_buffer: Callable[[int], bytearray | memoryview] = bytearray,
    ) -> None:
        self._rank, self._peers = rank, list(peers)
        self._identity = Identity(rank, len(peers), namespace, secret)
        self._greeting = greeting
        self._new_buffer = new_buffer
        # Bound here, so that an address that is taken fails the start of the server.
        self._listener = listener or _listening(peers[rank])
        self._outgoing = {r: _Outgoing(self, r, peers[r]) for r in range(len(peers)) if r != rank}
        self._presence = {
            r: Presence(outgoing, partial(self._came, r), partial(self._went, r))
            for r, outgoing in self._outgoing.items()
        }
        self._rates: dict[int, float] = {}  # bytes per second; each reader writes its own
        self._handler: Handler | None = None
        self._strangers = Strangers(2 * len(peers) + 2)
        # Addresses of each peer when it was last dialed; each dialing thread writes its own.
        self._hosts: dict[int, frozenset[str]] = dict.fromkeys(self._outgoing, frozenset())
        self.closed = threading.Event()

    # ---- what the interface promises ----

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._listener.listen()
        _thread("cake-runahead-accept", self._accept)
        for outgoing in self._outgoing.values():
            _thread(f"cake-runahead-to-{outgoing.rank}", outgoing.run)

    def reachable(self) -> frozenset[int]:
        return frozenset(rank for rank, presence in self._presence.items() if presence.is_here)

    def bytes_per_s(self, rank: int) -> float | None:
        return self._rates.get(rank)

    def send(self, rank: int, message: Message) -> None:
        self._check_presence(rank)
        self._outgoing[rank].put(_framed(message.kind, encode(message)), message=True)

    def send_part(self, rank: int, part: LayerPart, payload: memoryview) -> None:
        assert 0 < len(payload) <= MAX_PART_BYTES
        self._check_presence(rank)
        item = _framed(wire.PART, encode_part(part), payload)
        self._outgoing[rank].put(item, message=False)
        item.written.wait()
        if item.failed:
            raise PeerGone(f"member {rank} does not take what it is sent")

    def close(self) -> None:
        self.closed.set()
        with contextlib.suppress(OSError):  # wakes `accept`
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._strangers.close()
        for presence in self._presence.values():
            presence.close()

    # ---- presence ----

    def _check_presence(self, rank: int) -> None:
        if rank not in self.reachable():
            raise PeerGone(f"member {rank} cannot be reached")

    def judge(self, rank: int, reason: str) -> None:
        """The connection to this peer came up, or went down."""
        self._presence[rank].judge(reason)

    def _came(self, rank: int) -> None:
        logger.info("cake runahead: member %d is here", rank)
        if self._greeting is not None:
            with contextlib.suppress(PeerGone):
                self.send(rank, self._greeting(rank))

    def _went(self, rank: int, reason: str) -> None:
        if not self.closed.is_set():
            logger.warning("cake runahead: member %d is gone: %s", rank, reason)
            assert self._handler is not None
            try:
                self._handler.on_gone(rank, reason)
            except Exception:  # it must not end the thread that dials this peer
                logger.exception("cake runahead: member %d is gone, and that failed", rank)

    # ---- the side that dials ----

    def dial(self, rank: int, address: Address) -> socket.socket:
        """A connection to a peer that proved itself. Raises: OSError, BadMessage."""
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        self._hosts[rank] = frozenset(str(each[4][0]) for each in found)
        connection = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
        try:
            _prepare(connection)
            self._identity.dial(connection, rank, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        except BaseException:
            connection.close()
            raise
        return connection

    # ---- the side that answers ----

    def _accept(self) -> None:
        said = ""
        while not self.closed.is_set():
            try:
                connection, address = self._listener.accept()
                self._admit(connection, address[0])
                said = ""
            except (OSError, RuntimeError) as error:
                # Descriptors, memory or threads are used up, which passes, or the caller has gone.
                if not self.closed.is_set() and str(error) != said:
                    said = str(error)
                    logger.warning("cake runahead: cannot accept a connection: %s", said)
                self.closed.wait(ACCEPT_PAUSE_S)

    def _admit(self, connection: socket.socket, host: str) -> None:
        """Raises: RuntimeError if there can be no thread for it."""
        from_member = any(host in hosts for hosts in self._hosts.values())
        try:
            if not self._strangers.admit(connection, from_member=from_member):
                connection.close()
                return
            _thread("cake-runahead-from", self._serve, connection)
        except BaseException:
            self._strangers.leave(connection)
            connection.close()
            raise

    def _serve(self, connection: socket.socket) -> None:
        try:
            try:
                _prepare(connection)
                end_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
                rank = self._identity.answer(connection, end_s)
            finally:
                self._strangers.leave(connection)
        except (OSError, BadMessage) as error:
            logger.debug("cake runahead: refused a connection: %s", error)
            connection.close()
            return
        reason = "closed"
        try:
            self._presence[rank].answered(connection)
            self._read(rank, connection)
        except (OSError, BadMessage) as error:
            reason = "silent" if isinstance(error, TimeoutError) else str(error)
        finally:
            connection.close()
            self._presence[rank].ended(connection, reason)

    def _read(self, rank: int, connection: socket.socket) -> None:
        assert self._handler is not None
        # So that a payload starts on a word, as copies into the pool want it.
        pad = -PART_HEAD_BYTES % 16
        parts = memoryview(self._new_buffer(pad + PART_HEAD_BYTES + MAX_PART_BYTES))[pad:]
        while not self.closed.is_set():
            # A peer that has nothing to say sends a frame each PING_S.
            head = wire.received(connection, wire.HEAD.size, time.monotonic() + SILENCE_S)
            frame, end_s = wire.Frame.parse(head), time.monotonic() + FRAME_TIMEOUT_S
            if frame.kind == wire.PART:
                body = parts[: frame.length]
                began_s = time.perf_counter()
                wire.receive(connection, body, end_s, SILENCE_S)
                self.measured(rank, len(body), time.perf_counter() - began_s)
                frame.check(body)
                part = decode_part(body[:PART_HEAD_BYTES])
                self._handler.on_part(rank, part, body[PART_HEAD_BYTES:])
            else:
                said = wire.received(connection, frame.length, end_s, SILENCE_S)
                frame.check(said)
                if frame.kind != wire.PING:
                    self._handler.on_message(rank, decode(frame.kind, said))

    def measured(self, rank: int, size_bytes: int, took_s: float) -> None:
        """A part came over this peer's link. The thread that reads from it."""
        # Small parts say more about latency. What waited in a buffer came at memory's speed: then
        # the link is not what anybody waits for.
        if size_bytes >= _LARGE_BYTES:
            rate = size_bytes / max(took_s, 1e-6)
            before = self._rates.get(rank, rate)
            self._rates[rank] = before + _NEWEST * (rate - before)


class _Outgoing:
    """One peer as a receiver: dials it, over and over, and writes what is queued."""

    def __init__(self, owner: TcpTransport, rank: int, address: Address) -> None:
        self.rank = rank
        self._owner, self._address = owner, address
        self._queue: queue.Queue[_Item] = queue.Queue(MAX_QUEUE)
        self._state = threading.Lock()  # nothing is queued once the connection is down
        self._connection: socket.socket | None = None
        self.up = False
        self._said = ""

    def put(self, item: _Item, *, message: bool) -> None:
        with self._state:
            if not self.up:
                raise PeerGone(f"member {self.rank} cannot be reached")
            try:
                self._queue.put_nowait(item)
            except queue.Full:
                raise PeerGone(f"member {self.rank} does not take what it is sent") from None

    def run(self) -> None:
        pause_s = RETRY_S[0]
        while not self._owner.closed.is_set():
            try:
                connection = self._owner.dial(self.rank, self._address)
            except (OSError, BadMessage) as error:
                self._complain(error)
                self._owner.closed.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_S[1])
                continue
            pause_s, self._said = RETRY_S[0], ""
            self._carry(connection)

    def _carry(self, connection: socket.socket) -> None:
        """One connection, from its handshake to its end."""
        with self._state:
            self._connection, self.up = connection, True
        reason = "closed"
        try:
            self._owner.judge(self.rank, "")
            self._write(connection)
        except OSError as error:
            reason = str(error)
        finally:
            self._drop_queued()
            connection.close()
        self._owner.judge(self.rank, reason)

    def is_alive(self) -> bool:
        with self._state:
            if not self.up or self._connection is None:
                return False
            # Whoever writes notices an end two pings later. But the peer says nothing here: what
            # can be read is the end.
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            return not poll.poll(0)

    def close(self) -> None:
        with self._state:
            self.up = False
        if self._connection is not None:
            end(self._connection)

    def _write(self, connection: socket.socket) -> None:
        ping = _framed(wire.PING).pieces
        while not self._owner.closed.is_set():
            try:
                item = self._queue.get(timeout=PING_S)
            except queue.Empty:
                wire.send(connection, time.monotonic() + SEND_TIMEOUT_S, *ping)
                continue
            try:
                wire.send(connection, time.monotonic() + SEND_TIMEOUT_S, *item.pieces)
            except BaseException:
                item.failed = True
                raise
            finally:
                item.written.set()

    def _drop_queued(self) -> None:
        with self._state:
            self.up = False
            while not self._queue.empty():
                item = self._queue.get_nowait()
                item.failed = True
                item.written.set()

    def _complain(self, error: Exception) -> None:
        # A member that is not up yet is nothing to tell; one that refuses is, once.
        said = str(error)
        if isinstance(error, BadMessage) and said != self._said:
            logger.error(
                "cake runahead: member %d at %s:%d is left out: %s", self.rank, *self._address, said
            )
        self._said = said


def _framed(kind: int, *body: bytes | memoryview) -> _Item:
    head = wire.frame_head(kind, *body)
    if len(body) < 2:
        return _Item((head + b"".join(body),))
    return _Item((head + bytes(body[0]), *body[1:]))


def _listening(address: Address) -> socket.socket:
    """Raises: OSError if the address is taken, or is not of this machine."""
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(address, family=family)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


def _thread(name: str, target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()  # type: ignore[arg-type]
