"""The transport over ZeroMQ: messages by CurveZMQ, KV by paths of its own (`kv_path.py`).

Each member binds two ROUTER sockets, one on its address among the peers, for messages, and one for
KV. All that a member says, it says there, to the peer whose DEALER socket has dialed it; a DEALER
only listens. So each peer has a thread here that owns the two sockets by which it is heard
(`peer.py`), and what one peer does holds nobody else up. See `transport.py` for what is promised.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from sglang_cake.core.keys import Digest
from sglang_cake.runahead.curve import Curve, dial_kv, serve_kv
from sglang_cake.runahead.kv_path import TAG_BYTES, KvServer
from sglang_cake.runahead.messages import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Hello,
    LayerPart,
    Message,
    encode,
)
from sglang_cake.runahead.peer import (
    OTHER_GROUP,
    OTHER_NAMESPACE,
    OTHER_VERSION,
    Address,
    Peer,
    endpoint,
)
from sglang_cake.runahead.transport import MAX_PART_BYTES, Handler, PeerGone

SILENCE_S = 2.0  # after which a peer counts as gone
PING_S = 0.5  # how often ZeroMQ asks it whether it lives
MAX_QUEUE = 256  # messages that wait for one peer
HANDSHAKE_S = 5.0  # in which a new connection must prove itself
_SOCKETS = 4096  # a group of 256 takes more than ZeroMQ's default
_UNSAID_BYTES = 1024  # of a message to a ROUTER: handshakes take less, and nobody says more
_MESSAGES: Final = 1  # ZeroMQ's I/O threads, as bits: KV holds no message up
_KV: Final = 2


class ZmqTransport:
    """See `transport.py` for what it promises.

    Args:
        rank: this member's place in `peers`.
        peers: address of every member, by rank; this one binds its own.
        secret: 32 bytes that all members know.
        namespace: of all members' KV; others are not talked to.
        greeting: made for each member that comes, and sent to it.
        new_buffer: `(size in bytes)` makes the memory that parts are received into.

    Raises: OSError if the address is taken, or is not of this machine.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Address],
        *,
        secret: bytes,
        namespace: Digest,
        greeting: Callable[[int], Message] | None = None,
        new_buffer: Callable[[int], bytearray | memoryview] = bytearray,
    ) -> None:
        self._rank = rank
        self._size = len(peers)
        self._namespace = namespace
        self.greeting = greeting
        self.new_buffer = new_buffer
        self.closed = threading.Event()
        self._curve = Curve(secret)
        self._kv_password = secrets.token_hex(16)
        self._peers = {r: Peer(self, r, peers[r]) for r in range(len(peers)) if r != rank}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        self._context.max_sockets = _SOCKETS
        self._lock = threading.Lock()  # a socket is for one thread at a time
        self._doorman = self._curve.admit(self._context, self._kv_password)
        try:
            # Bound here, so that an address that is taken fails the start of the server.
            host, port = socket.getaddrinfo(*peers[rank], type=socket.SOCK_STREAM)[0][4][:2]
            host, port = str(host), int(port)
            self._router = self._server(_MESSAGES, host)
            self._curve.serve(self._router)
            self._router.router_handover = True  # who dials anew replaces what is left of itself
            self._router.bind(endpoint(host, port))
            kv = self._server(_KV, host)
            serve_kv(kv)
            kv.bind(endpoint(host, "*"))
            self.kv = KvServer(kv)
        except (zmq.ZMQError, OSError) as error:
            self._doorman.stop()
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from None

    # ---- what the interface promises ----

    def start(self, handler: Handler) -> None:
        for peer in self._peers.values():
            peer.start(handler)

    def reachable(self) -> frozenset[int]:
        return frozenset(rank for rank, peer in self._peers.items() if peer.is_here)

    def bytes_per_s(self, rank: int) -> float | None:
        return self._peers[rank].bytes_per_s

    def send(self, rank: int, message: Message) -> None:
        if not self._peers[rank].is_here:
            raise PeerGone(f"member {rank} cannot be reached")
        self.put(rank, message)

    def send_part(self, rank: int, part: LayerPart, payload: memoryview) -> None:
        assert 0 < len(payload) <= MAX_PART_BYTES
        self._peers[rank].send_part(part, payload)

    def close(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        with self._lock:
            self._router.close()
        self.kv.close()
        self._doorman.stop()
        # It returns when the threads of all peers have ended, which may wait for the handler.
        threading.Thread(target=self._context.term, name="cake-runahead-end", daemon=True).start()

    # ---- for peers ----

    def measured(self, rank: int, size_bytes: int, took_s: float) -> None:
        """A part came from that peer by another way than ours. Any thread."""
        self._peers[rank].measured(size_bytes, took_s)

    def put(self, rank: int, message: Message) -> None:
        """Queue a message for whoever has dialed as this peer. Any thread. Raises: PeerGone."""
        body = encode(message)
        try:
            with self._lock:
                self._router.send_multipart([_name(rank), body], zmq.NOBLOCK)
        except zmq.Again:
            raise PeerGone(f"member {rank} does not take what it is sent") from None
        except zmq.ZMQError as error:
            raise PeerGone(f"member {rank} cannot be reached: {error.strerror}") from None

    def hello(self, session: int, heard: int, path: bytes, key: bytes) -> Hello:
        """What this member says of itself."""
        return Hello(
            version=VERSION,
            size=self._size,
            namespace=self._namespace,
            session=session,
            heard=heard,
            kv_port=self.kv.port,
            kv_password=self._kv_password,
            path=path,
            key=key,
        )

    def problem(self, hello: Hello) -> str | None:
        """Why its sender is no member of this group; None if it is."""
        if hello.version != VERSION:
            return OTHER_VERSION
        if hello.size != self._size:
            return OTHER_GROUP
        return None if hello.namespace == self._namespace else OTHER_NAMESPACE

    def listener(self) -> "zmq.Socket[bytes]":
        """A socket to hear a peer's messages by, to be connected. Raises: zmq.ZMQError."""
        made = self._dealer(_MESSAGES, MAX_MESSAGE_BYTES)
        self._curve.dial(made)
        made.routing_id = _name(self._rank)
        made.rcvhwm = MAX_QUEUE
        made.heartbeat_ivl = _ms(PING_S)
        made.heartbeat_timeout = _ms(SILENCE_S)
        made.heartbeat_ttl = _ms(SILENCE_S)  # the other end lets the connection go, too
        return made

    def kv_listener(self, path: bytes, password: str) -> "zmq.Socket[bytes]":
        """A socket to get KV by. Raises: zmq.ZMQError."""
        made = self._dealer(_KV, MAX_PART_BYTES + TAG_BYTES)
        dial_kv(made, password)
        made.routing_id = path
        made.rcvhwm = 1  # what is in flight is bounded
        return made

    def _dealer(self, io_thread: int, most_bytes: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(zmq.DEALER)
        made.affinity = io_thread
        made.linger = 0
        made.maxmsgsize = most_bytes
        made.reconnect_ivl = -1  # a new connection is a new socket
        made.connect_timeout = _ms(HANDSHAKE_S)
        made.handshake_ivl = _ms(HANDSHAKE_S)
        return made

    def _server(self, io_thread: int, host: str) -> "zmq.Socket[bytes]":
        made = self._context.socket(zmq.ROUTER)
        made.affinity = io_thread
        made.ipv6 = ":" in host
        made.linger = 0
        made.router_mandatory = True  # sending to one that is not there fails
        made.maxmsgsize = _UNSAID_BYTES
        made.sndhwm = MAX_QUEUE
        made.handshake_ivl = _ms(HANDSHAKE_S)
        return made


def _name(rank: int) -> bytes:
    return rank.to_bytes(2, "little")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
