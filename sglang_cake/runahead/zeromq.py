"""The transport over ZeroMQ: messages by CurveZMQ, KV by separate paths (`encrypted_kv.py`).

Each member binds two ROUTER sockets: one for messages, on its address among the peers, and one for
KV. A member sends only on these, to the peers whose DEALER sockets have connected; a DEALER only
receives. So each peer has a thread here that owns its two DEALER sockets (`peer.py`), and a slow
peer delays no other one. Guarantees: `transport.py`.
"""

import hashlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from sglang_cake.core.keys import Digest
from sglang_cake.runahead.encrypted_kv import TAG_BYTES, KvServer
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
from sglang_cake.runahead.transport import (
    LINK_TIMES,
    MAX_PART_BYTES,
    Handler,
    LinkTimes,
    PeerGone,
)

MAX_QUEUE = 256  # messages that wait for one peer
_SOCKETS = 4096  # a group of 256 needs more than ZeroMQ's default
_ROUTER_BYTES = 1024  # of a message to a ROUTER: only handshakes, which are smaller
_MESSAGES: Final = 1  # ZeroMQ's I/O threads, as bits: KV does not delay messages
_KV: Final = 2
# Authentication domains, in ZeroMQ's terms.
_MESSAGES_DOMAIN: Final = "messages"
_KV_DOMAIN: Final = "kv"
_KV_USER: Final = "member"


class ZmqTransport:
    """Implements `Transport`.

    Args:
        rank: this member's place in `peers`.
        peers: address of every member, by rank; this one binds its own.
        secret: 32 bytes that all members know.
        namespace: of all members' KV; members of another one are refused.
        greeting: makes the first message to a member that becomes reachable.
        new_buffer: `(size in bytes)` makes the memory that parts are received into.
        times: timeouts and periods.

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
        times: LinkTimes = LINK_TIMES,
    ) -> None:
        self._rank = rank
        self._size = len(peers)
        self._namespace = namespace
        self.greeting = greeting
        self.new_buffer = new_buffer
        self.times = times
        self.closed = threading.Event()
        self._curve = Curve(secret)
        self._kv_password = secrets.token_hex(16)
        self._peers = {r: Peer(self, r, peers[r]) for r in range(len(peers)) if r != rank}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        self._context.max_sockets = _SOCKETS
        self._lock = threading.Lock()  # one thread at a time may use a socket
        self._authenticator = self._curve.admit(self._context, self._kv_password)
        try:
            # Bound here, so that the server does not start if the address is taken.
            host, port = socket.getaddrinfo(*peers[rank], type=socket.SOCK_STREAM)[0][4][:2]
            host, port = str(host), int(port)
            self._router = self._server(_MESSAGES, host)
            self._curve.serve(self._router)
            self._router.router_handover = True  # a new connection of a peer replaces its old one
            self._router.bind(endpoint(host, port))
            kv = self._server(_KV, host)
            serve_kv(kv)
            kv.bind(endpoint(host, "*"))
            self.kv = KvServer(kv)
        except (zmq.ZMQError, OSError) as error:
            self._authenticator.stop()
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from None

    # ---- `Transport` ----

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
        self._authenticator.stop()
        # `term` returns when the threads of all peers have ended, which may wait for the handler.
        threading.Thread(target=self._context.term, name="cake-runahead-end", daemon=True).start()

    # ---- for peers ----

    def measured(self, rank: int, size_bytes: int, took_s: float) -> None:
        """Record a part of that peer that another transport delivered. Any thread."""
        self._peers[rank].measured(size_bytes, took_s)

    def put(self, rank: int, message: Message) -> None:
        """Queue a message for the connection of this peer. Any thread. Raises: PeerGone."""
        body = encode(message)
        try:
            with self._lock:
                self._router.send_multipart([_name(rank), body], zmq.NOBLOCK)
        except zmq.Again:
            raise PeerGone(f"member {rank} does not take what it is sent") from None
        except zmq.ZMQError as error:
            raise PeerGone(f"member {rank} cannot be reached: {error.strerror}") from None

    def hello(self, session: int, heard: int, path: bytes, key: bytes) -> Hello:
        """This member's description of itself."""
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
        """Why its sender is no member of this group; None if it is one."""
        if hello.version != VERSION:
            return OTHER_VERSION
        if hello.size != self._size:
            return OTHER_GROUP
        return None if hello.namespace == self._namespace else OTHER_NAMESPACE

    def listener(self) -> "zmq.Socket[bytes]":
        """An unconnected socket that receives a peer's messages. Raises: zmq.ZMQError."""
        made = self._dealer(_MESSAGES, MAX_MESSAGE_BYTES)
        self._curve.dial(made)
        made.routing_id = _name(self._rank)
        made.rcvhwm = MAX_QUEUE
        made.heartbeat_ivl = _ms(self.times.ping_s)
        made.heartbeat_timeout = _ms(self.times.silence_s)
        made.heartbeat_ttl = _ms(self.times.silence_s)  # the other end also closes the connection
        return made

    def kv_listener(self, path: bytes, password: str) -> "zmq.Socket[bytes]":
        """An unconnected socket that receives KV. Raises: zmq.ZMQError."""
        made = self._dealer(_KV, MAX_PART_BYTES + TAG_BYTES)
        dial_kv(made, password)
        made.routing_id = path
        made.rcvhwm = 1  # bounds data in flight
        return made

    def _dealer(self, io_thread: int, most_bytes: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(zmq.DEALER)
        made.affinity = io_thread
        made.linger = 0
        made.maxmsgsize = most_bytes
        made.reconnect_ivl = -1  # a new connection is a new socket
        made.connect_timeout = _ms(self.times.handshake_s)
        made.handshake_ivl = _ms(self.times.handshake_s)
        return made

    def _server(self, io_thread: int, host: str) -> "zmq.Socket[bytes]":
        made = self._context.socket(zmq.ROUTER)
        made.affinity = io_thread
        made.ipv6 = ":" in host
        made.linger = 0
        made.router_mandatory = True  # sending to an unconnected peer fails
        made.maxmsgsize = _ROUTER_BYTES
        made.sndhwm = MAX_QUEUE
        made.handshake_ivl = _ms(self.times.handshake_s)
        return made


def _name(rank: int) -> bytes:
    return rank.to_bytes(2, "little")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class Curve:
    """Authentication: CurveZMQ (rfc.zeromq.org/spec/26) with two key pairs.

    A member shows the group's server key to connections, and the client key when it connects. Both
    secret keys are derived from the group's secret, so only members can connect, in either role.
    Each connection is encrypted with fresh keys, which cannot be computed from a recording and the
    secret. The port for KV has a password, which is sent on these connections
    (`encrypted_kv.py`).

    Args: secret: 32 bytes that all members know.
    """

    def __init__(self, secret: bytes) -> None:
        server_public, server_secret = _pair(secret, b"server")
        self._server_public = server_public
        self._server_secret = server_secret
        client_public, client_secret = _pair(secret, b"client")
        self._client_public = client_public
        self._client_secret = client_secret

    def admit(
        self, context: "zmq.Context[zmq.Socket[bytes]]", kv_password: str
    ) -> ThreadAuthenticator:
        """Start the thread that checks keys and passwords of new connections. The caller stops it.

        Raises: RuntimeError if no thread can be started.
        """
        # It logs passwords, so its log is discarded.
        log = logging.Logger("none", logging.CRITICAL)
        authenticator = ThreadAuthenticator(context, log=log)
        authenticator.start()
        authenticator.configure_curve_callback(_MESSAGES_DOMAIN, credentials_provider=self)
        authenticator.configure_plain(_KV_DOMAIN, {_KV_USER: kv_password})
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key` is the group's client key. pyzmq's authenticator calls it."""
        return key == self._client_public

    def serve(self, router: "zmq.Socket[bytes]") -> None:
        """Set the keys of a ROUTER, before `bind`."""
        router.curve_server = True
        router.curve_publickey = self._server_public
        router.curve_secretkey = self._server_secret
        _require_authentication(router, _MESSAGES_DOMAIN)

    def dial(self, dealer: "zmq.Socket[bytes]") -> None:
        """Set the keys of a DEALER, before `connect`."""
        dealer.curve_serverkey = self._server_public
        dealer.curve_publickey = self._client_public
        dealer.curve_secretkey = self._client_secret


def serve_kv(router: "zmq.Socket[bytes]") -> None:
    """Require the password on the port for KV, before `bind`."""
    router.plain_server = True
    _require_authentication(router, _KV_DOMAIN)


def dial_kv(dealer: "zmq.Socket[bytes]", password: str) -> None:
    """Set the password of a DEALER for KV, before `connect`."""
    dealer.plain_username = _KV_USER.encode()
    dealer.plain_password = password.encode()


def _require_authentication(router: "zmq.Socket[bytes]", domain: str) -> None:
    router.zap_domain = domain.encode()
    router.zap_enforce_domain = True  # without an authenticator, nothing may connect


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """Public and secret key, in Z85. `secret` is uniformly random, so one hash derives a key."""
    key = hashlib.blake2b(key=secret, person=b"cake-ra " + role, digest_size=32).digest()
    secret_key = z85.encode(key)
    return zmq.curve_public(secret_key), secret_key
