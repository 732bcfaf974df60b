"""The transport over ZeroMQ: messages by CurveZMQ, KV by separate paths (`encrypted_kv.py`).

Each member binds two ROUTER sockets: one for messages, on its address among the peers, and one for
KV. A member sends only on these, to the peers whose DEALER sockets have connected; a DEALER only
receives. So each peer has a thread here that owns its two DEALER sockets (`Peer`), and a slow
peer delays no other one. What members may rely on:

- Messages from one member to another arrive in order, each at most once, or not at all. The same
  holds for parts of layers. Messages and parts are not ordered relative to each other.
- `send` never waits for the peer. `send_part` waits while the peer does not accept data: data in
  flight is bounded by one part and the buffers of the operating system.
- Arrived data was authenticated: a member of this group sent it.
- `on_gone` is called once for a peer that is gone, before the peer is reachable again.

Each of two members connects to the other, to receive. A connection has a number, its session. A
`Hello` contains the sender's own session, and the last session of the receiver that it knows. A
peer is reachable when each of the two has answered the other's session.

    away --connected--> listening --its Hello; the path for its KV is open: we answer-->
      ^                             it has answered too: reachable
      +---- after a pause ---- a connection ended, or delivered bytes that are no message

When a peer's session changes, messages to its old connection are lost. So the peer was gone. Our
own session stays, since otherwise both would disconnect and reconnect without end.
"""

import contextlib
import errno
import hashlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from sglang_cake.core.backoff import Backoff
from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.keys import Digest
from sglang_cake.loading.cost_model import DOUBT_S
from sglang_cake.runahead.encrypted_kv import (
    TAG_BYTES,
    EncryptedKvReceiver,
    EncryptedKvSender,
    SendingSocket,
)
from sglang_cake.runahead.messages import (
    MAX_MESSAGE_BYTES,
    MAX_PART_BYTES,
    VERSION,
    BadMessage,
    Hello,
    LayerPart,
    Message,
    PeerGone,
    ReceiveBuffer,
    decode,
    encode,
)

logger = logging.getLogger("sglang_cake")

_LOOK_MS = 1000  # how often an idle thread sends Hello again, and checks whether to end
_AGAIN_MS = 50  # how often it tries to send Hello to a peer that has not connected yet
_MESSAGES_AT_ONCE = 100  # that are read before other events
_LARGE_BYTES = 2**16
_NEWEST = 0.1  # weight of the newest part in the throughput of a link
_HUNG_UP = {errno.EPIPE, errno.ECONNRESET}  # the peer could not read our handshake
_ENDS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_CLOSED,
}

OTHER_SECRET = "its secret is another one: copy one secret file to every member"
OTHER_NAMESPACE = (
    "its namespace is another one: same model, weights, dtype and flags on every member"
)
OTHER_GROUP = (
    "it does not know this member: same --cake-runahead-peers, and another rank, on every one"
)
OTHER_VERSION = "it speaks another version"

Address = tuple[str, int]
MAX_QUEUE = 256  # messages that wait for one peer
_SOCKETS = 4096  # a group of 256 needs more than ZeroMQ's default
_ROUTER_BYTES = 1024  # of a message to a ROUTER: only handshakes, which are smaller
_MESSAGES: Final = 1  # ZeroMQ's I/O threads, as bits: KV does not delay messages
_KV: Final = 2
# Authentication domains, in ZeroMQ's terms.
_MESSAGES_DOMAIN: Final = "messages"
_KV_DOMAIN: Final = "kv"
_KV_USER: Final = "member"


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Times of the connections between members, in seconds."""

    send_s: float = 5.0  # in which a peer must accept a part
    silence_s: float = 2.0  # after which a peer counts as gone
    ping_s: float = 0.5  # period of heartbeats
    connect_s: float = 10.0  # in which a connection must be made, and then deliver something
    handshake_s: float = 5.0  # in which a new connection must authenticate
    retry_s: tuple[float, float] = (0.1, 2.0)  # between attempts to connect: at first, at most
    # A throughput that was measured longer ago is unknown. Otherwise a link that was slow, so that
    # no prompt is shared over it, would never be known to be fast again.
    doubt_s: float = DOUBT_S


LINK_TIMES: Final = LinkTimes()


class Handler(Protocol):
    """Receives messages and parts: from the thread of each peer, one at a time."""

    def on_message(self, rank: int, message: Message) -> None:
        """A message arrived. Must not block."""
        ...

    def on_part(self, rank: int, part: LayerPart, data: PartBytes) -> None:
        """A part arrived. `data` belongs to the transport, and is valid until this returns.

        Blocking here delays the sender, and its other parts for this member.
        """
        ...

    def on_gone(self, rank: int, reason: str) -> None:
        """The peer is no longer reachable. Must not block."""
        ...


class LeftOut(RunaheadError):
    """A peer is no member of this group; the message says why."""


class Peer:
    """One peer: see the module. Its own thread does all but `send_part` and `measured`."""

    _handler: Handler  # from `start` on

    def __init__(self, owner: "ZmqTransport", rank: int, address: Address) -> None:
        self._owner = owner
        self._rank = rank
        self._address = address
        self._poller = zmq.Poller()
        self._host = ""  # the numeric address of the connection
        self._dials = 0
        self._times = owner.times
        self._backoff = Backoff(*self._times.retry_s)
        self._said = ""
        self._session = 0  # 0: not connected
        self._heard = False  # whether anything arrived on this connection
        self.theirs: Hello | None = None
        self._sent_hello: Hello | None = None  # our newest Hello that was sent
        self._kv: _KvPath | None = None
        self._kv_sender: EncryptedKvSender | None = None
        self._bytes_per_s: float | None = None  # of KV from it on this connection
        self._measured_s = 0.0  # when
        self.is_here = False

    def start(self, handler: Handler) -> None:
        self._handler = handler
        threading.Thread(target=self._run, name=f"cake-runahead-{self._rank}", daemon=True).start()

    # ---- any thread ----

    @property
    def bytes_per_s(self) -> float | None:
        """As `ZmqTransport.bytes_per_s`."""
        is_recent = time.monotonic() - self._measured_s <= self._times.doubt_s
        return self._bytes_per_s if is_recent else None

    def send_part(self, part: LayerPart, data: memoryview) -> None:
        """As `ZmqTransport.send_part`. Raises: PeerGone."""
        sender = self._kv_sender
        if not self.is_here or sender is None:
            raise PeerGone(f"member {self._rank} cannot be reached")
        try:
            sender.send(self._owner.kv, part, data)
        except PeerGone as error:
            raise PeerGone(f"member {self._rank}: {error}") from None

    def measured(self, size_bytes: int, took_s: float) -> None:
        """Record the time of a part from this peer."""
        if size_bytes >= _LARGE_BYTES:  # smaller parts measure latency
            rate = size_bytes / max(took_s, 1e-6)
            before = self.bytes_per_s or rate
            self._bytes_per_s = before + _NEWEST * (rate - before)
            self._measured_s = time.monotonic()

    # ---- its own thread ----

    def _run(self) -> None:
        while not self._owner.closed.is_set():
            reason = "closed"
            try:
                self._listen()
            except LeftOut as error:
                reason = str(error)
                self._complain(reason)
            except (RunaheadError, zmq.ZMQError, OSError) as error:
                reason = str(error)
            except Exception as error:
                logger.exception("cake runahead: member %d could not be heard", self._rank)
                reason = repr(error)
            self._session = 0
            self._heard = False
            self._forget(reason)
            self._greet()
            now_s = time.monotonic()
            self._backoff.start(now_s)
            self._owner.closed.wait(self._backoff.left_s(now_s))

    def _listen(self) -> None:
        """One connection, to its end. Raises: RunaheadError, zmq.ZMQError, OSError."""
        found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        self._host = str(found[self._dials % len(found)][4][0])
        self._dials += 1
        address = endpoint(self._host, self._address[1])
        listener = self._owner.listener()
        dialed = _Connection(listener, address, self._poller, self._times.connect_s)
        try:
            while not self._owner.closed.is_set():
                self._look(dialed)
        finally:
            dialed.close()

    def _look(self, dialed: "_Connection") -> None:
        is_settled = self._sent_hello is not None or not self._session
        ready = dict(self._poller.poll(_LOOK_MS if is_settled else _AGAIN_MS))
        dialed.judge(ready)
        if dialed.is_up and not self._session:
            self._session = secrets.randbits(61) + 1
        if dialed.socket in ready:
            self._hear(dialed.socket)
        if self._kv is not None:
            self._kv.connection.judge(ready)
            if self._kv.connection.socket in ready:
                self._take(self._kv)
        if self._kv_sender is not None and self._kv_sender.over:
            raise RunaheadError("it does not take KV")
        self._greet(again=not ready)
        if dialed.is_late and not self._heard:
            self._complain(OTHER_GROUP)

    def _hear(self, messages: "zmq.Socket[bytes]") -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                body = messages.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = True
            try:
                message = decode(body)
            except BadMessage:
                if self.is_here:
                    raise
                raise LeftOut(OTHER_VERSION) from None
            if isinstance(message, Hello):
                self._on_hello(message)
            elif self.is_here:
                self._handler.on_message(self._rank, message)

    def _on_hello(self, hello: Hello) -> None:
        problem = self._owner.problem(hello)
        if problem is not None:
            raise LeftOut(problem)
        if self.theirs is not None and self.theirs.session != hello.session:
            self._forget("it dialed anew")
        if not hello.session:
            return
        self.theirs = hello
        if self._kv is None:
            receiver = EncryptedKvReceiver(self._owner.new_buffer(MAX_PART_BYTES))
            listener = self._owner.kv_listener(receiver.name, hello.kv_password)
            address = endpoint(self._host, hello.kv_port)
            connect_s = self._times.connect_s
            connection = _Connection(listener, address, self._poller, connect_s, of_kv=True)
            self._kv = _KvPath(connection, receiver)
        is_known = self._kv_sender is not None and self._kv_sender.name == hello.path
        if hello.heard == self._session != 0 and not is_known:
            self._kv_sender = EncryptedKvSender(hello.path, hello.key, self._times.send_s)
        self._judge("")

    def _take(self, kv: "_KvPath") -> None:
        head, data = kv.receiver.take(kv.connection.socket.recv_multipart(copy=False))
        if head.before_us:
            self.measured(head.before_bytes, head.before_us / 1e6)
        self._handler.on_part(self._rank, head.part, data)

    def _greet(self, *, again: bool = False) -> None:
        """Send Hello if it has changed and the peer has connected.

        Args: again: send it in any case. A Hello to a connection that was about to end is lost.
        """
        heard, path, key = 0, b"", b""
        if self.theirs is not None and self._kv is not None and self._kv.connection.is_up:
            heard = self.theirs.session
            path, key = self._kv.receiver.name, self._kv.receiver.key
        hello = self._owner.hello(self._rank, self._session, heard, path, key)
        if again or hello != self._sent_hello:
            reason = ""
            try:
                self._owner.put(self._rank, hello)
                self._sent_hello = hello
            except PeerGone as error:
                reason = str(error)
                self._sent_hello = None
            self._judge(reason)

    def _forget(self, reason: str) -> None:
        """Discard the state of the peer's connection."""
        if self._kv is not None:
            self._kv.connection.close()
        if self._kv_sender is not None:
            self._kv_sender.over = True
        self._kv = None
        self._kv_sender = None
        self.theirs = None
        self._sent_hello = None
        self._bytes_per_s = None
        self._judge(reason)

    def _judge(self, reason: str) -> None:
        theirs, sent = self.theirs, self._sent_hello
        has_answered = theirs is not None and theirs.heard == self._session != 0
        here = has_answered and sent is not None and sent.heard != 0
        if here == self.is_here:
            return
        self.is_here = here
        if here:
            self._backoff.reset()
            self._said = ""
            logger.info("cake runahead: member %d is here", self._rank)
        elif not self._owner.closed.is_set():
            logger.warning("cake runahead: member %d is gone: %s", self._rank, reason)
            try:
                self._handler.on_gone(self._rank, reason)
            except Exception:  # it must not end this thread
                logger.exception("cake runahead: the clean-up after member %d failed", self._rank)

    def _complain(self, problem: str) -> None:
        # A member that has not started yet is not logged; one that refuses is, once.
        if problem != self._said:
            logger.error(
                "cake runahead: member %d at %s:%d is left out: %s",
                self._rank,
                *self._address,
                problem,
            )
        self._said = problem


class _Connection:
    """A socket that connects once, and the state of its connection.

    Raises: zmq.ZMQError, and closes the socket.
    """

    def __init__(
        self,
        dealer: "zmq.Socket[bytes]",
        address: str,
        poller: zmq.Poller,
        timeout_s: float,
        *,
        of_kv: bool = False,
    ) -> None:
        """Args: timeout_s: of connecting. ZeroMQ does not report all failures."""
        self.socket = dealer
        self.is_up = False
        self._address = address
        self._of_kv = of_kv
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._poller = poller
        try:
            self.monitor = _monitor(dealer)
        except zmq.ZMQError:
            dealer.close()
            raise
        for each in (self.socket, self.monitor):
            poller.register(each, zmq.POLLIN)
        try:
            dealer.ipv6 = "[" in address
            dealer.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def judge(self, ready: dict[Any, int]) -> None:
        """Handle an event of the monitor, if the poller has found one.

        Raises: RunaheadError if the connection has ended, or was not made in time.
        """
        why = "no connection in time" if self.is_late and not self.is_up else ""
        hung_up = False
        if self.monitor in ready:
            event = recv_monitor_message(self.monitor)
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up = True
                self._end_s = time.monotonic() + self._timeout_s
                return
            hung_up = kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and event["value"] in _HUNG_UP
            why = "closed by the other end" if kind in _ENDS else why
        if why and self._of_kv and not self.is_up:
            raise LeftOut(f"no KV can come from it: {self._address} cannot be reached")
        if hung_up:
            raise LeftOut(OTHER_SECRET)
        if why:
            raise RunaheadError(why)

    @property
    def is_late(self) -> bool:
        """Whether it is not made in time, or was made as long ago."""
        return time.monotonic() > self._end_s

    def close(self) -> None:
        """Close it, also while it connects."""
        for each in (self.socket, self.monitor):
            self._poller.unregister(each)
        # Before the socket is closed, or descriptors of the monitor stay open.
        with contextlib.suppress(zmq.ContextTerminated):
            self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()


class _KvPath(NamedTuple):
    """The path of KV from a peer."""

    connection: _Connection
    receiver: EncryptedKvReceiver


def _monitor(dealer: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """A socket that receives the events of another one, as pyzmq's `get_monitor_socket`.

    Without free file descriptors, pyzmq's function leaves a name that blocks the next attempt, and
    a socket that holds the GIL for ever when it is closed.

    Raises: zmq.ZMQError.
    """
    name = f"inproc://{secrets.token_hex(16)}"
    listener: zmq.Socket[bytes] = dealer.context.socket(zmq.PAIR)
    try:
        dealer.monitor(name, zmq.EVENT_ALL)
        listener.connect(name)
    except zmq.ZMQError:
        listener.close()
        raise
    return listener


def endpoint(host: str, port: int | str) -> str:
    """A numeric address as ZeroMQ writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class ZmqTransport:
    """One member's connections to all others.

    Args:
        rank: this member's place in `peers`.
        peers: address of every member, by rank; this one binds its own.
        secret: 32 bytes that all members know.
        namespace: the namespace of all members' KV; members of another one are refused.
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
        new_buffer: Callable[[int], bytearray | memoryview] = bytearray,
        times: LinkTimes = LINK_TIMES,
    ) -> None:
        self._rank = rank
        self._size = len(peers)
        self._namespace = namespace
        self.new_buffer = new_buffer
        self.times = times
        self.closed = threading.Event()
        self._curve = Curve(secret)
        self._kv_password = secrets.token_hex(16)
        self._peers = {r: Peer(self, r, peers[r]) for r in range(len(peers)) if r != rank}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        self._context.max_sockets = _SOCKETS
        self._authenticator = self._curve.admit(self._context, self._kv_password)
        try:
            # Bound here, so that the server does not start if the address is taken.
            host, port = socket.getaddrinfo(*peers[rank], type=socket.SOCK_STREAM)[0][4][:2]
            host, port = str(host), int(port)
            messages = self._server(_MESSAGES, host)
            self._curve.serve(messages)
            messages.router_handover = True  # a new connection of a peer replaces its old one
            messages.bind(endpoint(host, port))
            self.messages = SendingSocket(messages)
            kv = self._server(_KV, host)
            kv.plain_server = True
            _require_authentication(kv, _KV_DOMAIN)
            kv.bind(endpoint(host, "*"))
            self.kv = SendingSocket(kv)
        except (zmq.ZMQError, OSError) as error:
            self._authenticator.stop()
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from None

    # ---- for `Member`; any thread ----

    def start(self, handler: Handler) -> None:
        """Begin to connect to the others, and to accept their connections."""
        for peer in self._peers.values():
            peer.start(handler)

    def reachable(self) -> frozenset[int]:
        """Ranks of connected members, from which something was received a moment ago."""
        return frozenset(rank for rank, peer in self._peers.items() if peer.is_here)

    def bytes_per_s(self, rank: int) -> float | None:
        """Recent throughput of the link from a peer, while it carried parts; None if none was
        measured on this connection lately."""
        return self._peers[rank].bytes_per_s

    def send(self, rank: int, message: Message) -> None:
        """Queue a message. Raises: PeerGone."""
        if not self._peers[rank].is_here:
            raise PeerGone(f"member {rank} cannot be reached")
        self.put(rank, message)

    def send_part(self, rank: int, part: LayerPart, data: PartBytes) -> None:
        """Send at most MAX_PART_BYTES; when this returns, `data` may be reused.

        Raises: PeerGone.
        """
        assert 0 < len(data) <= MAX_PART_BYTES
        self._peers[rank].send_part(part, data)

    def close(self) -> None:
        """End all connections and threads. Another call has no effect."""
        if self.closed.is_set():
            return
        self.closed.set()
        self.messages.close()
        self.kv.close()
        self._authenticator.stop()
        # `term` returns when the threads of all peers have ended, which may wait for the handler.
        threading.Thread(target=self._context.term, name="cake-runahead-end", daemon=True).start()

    # ---- for peers ----

    def measured(self, rank: int, size_bytes: int, took_s: float) -> None:
        """Record the time of a part that this peer wrote into our memory. Any thread."""
        self._peers[rank].measured(size_bytes, took_s)

    def put(self, rank: int, message: Message) -> None:
        """Queue a message for the connection of this peer. Any thread. Raises: PeerGone."""
        try:
            self.messages.put(_name(rank), encode(message))
        except PeerGone as error:
            raise PeerGone(f"member {rank}: {error}") from None

    def own_buffer(self, rank: int) -> ReceiveBuffer | None:
        """The memory that this peer writes KV into; None: it sends KV."""
        return None

    def buffer_of(self, rank: int) -> ReceiveBuffer | None:
        """The memory of this peer, likewise. Any thread."""
        theirs = self._peers[rank].theirs
        return None if theirs is None else theirs.buffer

    def hello(self, rank: int, session: int, heard: int, path: bytes, key: bytes) -> Hello:
        """This member's description of itself, for a peer."""
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
            buffer=self.own_buffer(rank),
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
        made.plain_username = _KV_USER.encode()
        made.plain_password = password.encode()
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


def _require_authentication(router: "zmq.Socket[bytes]", domain: str) -> None:
    router.zap_domain = domain.encode()
    router.zap_enforce_domain = True  # without an authenticator, nothing may connect


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """Public and secret key, in Z85. `secret` is uniformly random, so one hash derives a key."""
    key = hashlib.blake2b(key=secret, person=b"cake-ra " + role, digest_size=32).digest()
    secret_key = z85.encode(key)
    return zmq.curve_public(secret_key), secret_key
