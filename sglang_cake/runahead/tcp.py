"""The transport over TCP: two connections for each pair of members, one in each direction.

Threads: one for each peer, which dials it and writes; one that accepts; one for each connection
that was accepted, which reads. A reader has one buffer for parts, reused for all of them.
"""

import contextlib
import hmac
import logging
import os
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
from sglang_cake.runahead.transport import MAX_PART_BYTES, Handler, PeerGone
from sglang_cake.runahead.wire import end

logger = logging.getLogger("sglang_cake")

PING_S = 0.25  # how often an idle connection says that it lives
SILENCE_S = 2.0  # after which a peer counts as gone
SEND_TIMEOUT_S = 5.0  # in which one part must be taken
HANDSHAKE_TIMEOUT_S = 5.0
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
        secret: at least 16 bytes that all members know.
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
        self._secret, self._namespace, self._greeting = secret, namespace, greeting
        self._new_buffer = new_buffer
        # Bound here, so that an address that is taken fails the start of the server.
        self._listener = listener or socket.create_server(peers[rank], reuse_port=False)
        self._outgoing = {r: _Outgoing(self, r, peers[r]) for r in range(len(peers)) if r != rank}
        self._presence = {
            r: Presence(outgoing, partial(self._came, r), partial(self._went, r))
            for r, outgoing in self._outgoing.items()
        }
        self._rates: dict[int, float] = {}  # bytes per second; each reader writes its own
        self._handler: Handler | None = None
        self._strangers = threading.BoundedSemaphore(2 * len(peers) + 2)  # handshakes at once
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
            self._handler.on_gone(rank, reason)

    # ---- the side that dials ----

    def dial(self, rank: int, address: Address) -> socket.socket:
        """A connection to a peer that proved itself. Raises: OSError, BadMessage."""
        connection = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
        try:
            _prepare(connection)
            pair = wire.Pair(self._rank, rank, len(self._peers), self._namespace)
            nonce = os.urandom(wire.NONCE_BYTES)
            connection.sendall(
                wire.HELLO.pack(
                    wire.MAGIC, wire.VERSION, pair.dialer, pair.size, pair.namespace, nonce
                )
            )
            answer = wire.received(connection, wire.ANSWER.size)
            magic, version, refusal, other, proof = wire.ANSWER.unpack(answer)
            if magic != wire.MAGIC or version != wire.VERSION:
                raise BadMessage(wire.REFUSALS[1])
            if refusal:
                raise BadMessage(wire.REFUSALS.get(refusal, "it refuses"))
            expected = pair.proof(self._secret, b"answerer", nonce, other)
            if not hmac.compare_digest(proof, expected):
                raise BadMessage("it does not know the group's secret")
            connection.sendall(pair.proof(self._secret, b"dialer", nonce, other))
            if wire.received(connection, 1) != wire.WELCOME:
                raise BadMessage("it refuses")
            connection.settimeout(SEND_TIMEOUT_S)
        except BaseException:
            connection.close()
            raise
        return connection

    # ---- the side that answers ----

    def _accept(self) -> None:
        while not self.closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self._strangers.acquire(blocking=False):
                _thread("cake-runahead-from", self._serve, connection)
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            try:
                rank = self._answer(connection)
            finally:
                self._strangers.release()
        except (OSError, BadMessage) as error:
            logger.debug("cake runahead: refused a connection: %s", error)
            connection.close()
            return
        self._presence[rank].answered(connection)
        reason = "closed"
        try:
            self._read(rank, connection)
        except (OSError, BadMessage) as error:
            reason = "silent" if isinstance(error, TimeoutError) else str(error)
        finally:
            connection.close()
            self._presence[rank].ended(connection, reason)

    def _answer(self, connection: socket.socket) -> int:
        """The rank of whoever dialed. Raises: OSError, BadMessage."""
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        _prepare(connection)
        hello = wire.received(connection, wire.HELLO.size)
        magic, version, rank, size, namespace, nonce = wire.HELLO.unpack(hello)
        refusal = 0
        if magic != wire.MAGIC or version != wire.VERSION:
            refusal = 1
        elif size != len(self._peers) or rank not in self._outgoing:
            refusal = 3
        elif namespace != self._namespace:
            refusal = 2
        own = os.urandom(wire.NONCE_BYTES)
        pair = wire.Pair(rank, self._rank, size, Digest(namespace))
        proof = bytes(wire.PROOF_BYTES)
        if not refusal:
            proof = pair.proof(self._secret, b"answerer", nonce, own)
        connection.sendall(wire.ANSWER.pack(wire.MAGIC, wire.VERSION, refusal, own, proof))
        if refusal:
            raise BadMessage(f"member {rank}: {wire.REFUSALS[refusal]}")
        expected = pair.proof(self._secret, b"dialer", nonce, own)
        if not hmac.compare_digest(wire.received(connection, wire.PROOF_BYTES), expected):
            raise BadMessage(f"who says to be member {rank} does not know the group's secret")
        connection.sendall(wire.WELCOME)
        return int(rank)

    def _read(self, rank: int, connection: socket.socket) -> None:
        assert self._handler is not None
        connection.settimeout(SILENCE_S)
        # So that a payload starts on a word, as copies into the pool want it.
        pad = -PART_HEAD_BYTES % 16
        parts = memoryview(self._new_buffer(pad + PART_HEAD_BYTES + MAX_PART_BYTES))[pad:]
        while not self.closed.is_set():
            frame = wire.Frame.parse(wire.received(connection, wire.HEAD.size))
            if frame.kind == wire.PART:
                body = parts[: frame.length]
                began_s = time.perf_counter()
                wire.receive(connection, body)
                self.measured(rank, len(body), time.perf_counter() - began_s)
                frame.check(body)
                part = decode_part(body[:PART_HEAD_BYTES])
                self._handler.on_part(rank, part, body[PART_HEAD_BYTES:])
            else:
                said = wire.received(connection, frame.length)
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
                self._connection = self._owner.dial(self.rank, self._address)
            except (OSError, BadMessage) as error:
                self._complain(error)
                self._owner.closed.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_S[1])
                continue
            pause_s, self._said = RETRY_S[0], ""
            self.up = True
            self._owner.judge(self.rank, "")
            reason = "closed"
            try:
                self._write(self._connection)
            except OSError as error:
                reason = str(error)
            self._drop_queued()
            self._connection.close()
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
                connection.sendall(ping[0])
                continue
            try:
                for piece in item.pieces:
                    connection.sendall(piece)
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


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


def _thread(name: str, target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()  # type: ignore[arg-type]
