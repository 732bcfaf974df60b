"""The transport over ZeroMQ against strangers, liars, other groups, silence and returns."""

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import zmq
import zmq.utils.monitor
from members import JOB, PATIENT, WAIT_S, MessageRecord, addresses, member, started
from polling import until

from benchmarks.harness.slow_link import SlowLink
from sglang_cake.core.keys import Digest
from sglang_cake.runahead import encrypted_kv
from sglang_cake.runahead.messages import Accept, Hello, LayerPart, Message
from sglang_cake.runahead.zeromq import LinkTimes, ZmqTransport

PART, DATA = LayerPart(JOB, 0, 0, 4), bytes(range(64))
FAST = 1e12  # bytes per second
TIMES = replace(PATIENT, ping_s=0.1)  # so that there is something to cut


class CountingTransport(ZmqTransport):
    """Attributes: made, heard: how many Hellos it made, sent or not, and how many it heard."""

    made = heard = 0

    def hello(self, *args: Any) -> Hello:
        self.made += 1
        return super().hello(*args)

    def problem(self, hello: Hello) -> str | None:
        self.heard += 1
        return super().problem(hello)


class Two:
    """Members 0 and 1, and what they hear; member 0 hears member 1 through a link."""

    def __init__(
        self,
        record: type[MessageRecord] = MessageRecord,
        kinds: tuple[type[CountingTransport], type[CountingTransport]] = (CountingTransport,) * 2,
        others: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        settings = {"times": TIMES, **settings}
        self.peers = addresses(2)
        self.link = SlowLink(self.peers[1][1], FAST)
        known = [self.peers[0], ("127.0.0.1", self.link.port)]
        self.records = [record(), record()]
        self.members = [
            member(0, known, kind=kinds[0], **settings),
            member(1, self.peers, kind=kinds[1], **settings | (others or {})),
        ]

    def start(self) -> "Two":
        for each, record in zip(self.members, self.records, strict=True):
            each.start(record)
        return self

    def meet(self) -> None:
        until(self.are_together, "both are there")

    def cut(self) -> None:
        """What member 0 hears member 1 by ends."""
        self.link.cut_after(0)
        until(lambda: self.link.is_cut, "the link is cut")

    def stay(self) -> None:
        """An idle link tells of its state in Hellos: a link that is half dead would part."""
        before = [each.heard for each in self.members]
        for each, heard in zip(self.members, before, strict=True):
            until(lambda: each.heard > heard + 1, "two Hellos more")  # noqa: B023
        assert self.are_together()

    def are_together(self) -> bool:
        return [each.reachable() for each in self.members] == [{1}, {0}]

    def close(self) -> None:
        for record in self.records:
            record.open.set()
        for each in self.members:
            each.close()
        self.link.close()


@pytest.fixture
def two() -> Iterator[Callable[..., Two]]:
    made: list[Two] = []

    def make(**settings: Any) -> Two:
        made.append(Two(**settings))
        return made[-1].start()

    yield make
    for each in made:
        each.close()


# ---- who is no member ----


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"secret": bytes(32)}, "its secret is another one"),
        ({"namespace": Digest(bytes(32))}, "its namespace is another one"),
    ],
    ids=["secret", "namespace"],
)
def test_zeromq_member_with_another_secret_or_namespace_is_left_out(
    two: Callable[..., Two], other: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = two(others=other)
    for rank in range(2):
        until(lambda rank=rank: f"member {rank} at 127" in caplog.text, "both say so")
    assert caplog.text.count(f"is left out: {why}") == 2
    assert [each.reachable() for each in pair.members] == [frozenset(), frozenset()]
    assert [record.heard for record in pair.records] == [[], []]


def test_zeromq_member_of_another_group_size_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    peers = addresses(3)
    own, other = member(0, peers[:2]), member(1, peers)
    with started(own, other):
        until(lambda: caplog.text.count("it does not know this member") == 2, "both say so")
        assert own.reachable() == other.reachable() == frozenset()


def test_zeromq_member_unknown_to_the_group_is_logged_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers, times = addresses(3), replace(PATIENT, connect_s=1.0)
    known, unknown = member(0, peers[:2], times=times), member(2, peers, times=times)
    with started(known, unknown):
        until(lambda: "it does not know this member" in caplog.text, "a line")
        assert known.reachable() == unknown.reachable() == frozenset()


class Later(CountingTransport):
    """Of a version to come."""

    def hello(self, *fields: Any) -> Hello:
        return msgspec.structs.replace(super().hello(*fields), version=99)


class Strange(CountingTransport):
    """What it says is no message of ours."""

    def put(self, rank: int, message: Message) -> None:
        with contextlib.suppress(encrypted_kv.PeerGone):
            self.messages.put(rank.to_bytes(2, "little"), b"\xc1")


@pytest.mark.parametrize("kind", [Later, Strange])
def test_zeromq_member_of_another_version_is_left_out(
    two: Callable[..., Two], kind: type[CountingTransport], caplog: pytest.LogCaptureFixture
) -> None:
    pair = two(kinds=(CountingTransport, kind))
    until(lambda: "it speaks another version" in caplog.text, "a line")
    assert pair.members[0].reachable() == frozenset()


class Closed(CountingTransport):
    """Its port for KV is behind a wall."""

    def hello(self, *fields: Any) -> Hello:
        return msgspec.structs.replace(super().hello(*fields), kv_port=1)


def test_zeromq_member_with_a_closed_kv_port_is_left_out(
    two: Callable[..., Two], caplog: pytest.LogCaptureFixture
) -> None:
    pair = two(kinds=(CountingTransport, Closed))
    until(lambda: "no KV can come from it: tcp://127.0.0.1:1 cannot" in caplog.text, "a line")
    assert pair.members[0].reachable() == frozenset()


# ---- strangers ----


def kv_port(of: ZmqTransport) -> int:
    return of.hello(0, 0, 0, b"", b"").kv_port


@pytest.mark.parametrize("of_kv", [False, True], ids=["messages", "kv"])
def test_zeromq_idle_strangers_are_disconnected_and_members_meet(
    of_kv: bool,
) -> None:
    pair = Two(times=replace(TIMES, handshake_s=1.0))
    port = kv_port(pair.members[1]) if of_kv else pair.peers[1][1]
    try:
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", port)
            strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
            for stranger in strangers[::2]:
                stranger.sendall(b"\xff")  # a greeting begins so
            pair.start()
            pair.meet()
            for stranger in strangers:
                until_closed(stranger)
            assert pair.are_together()
    finally:
        pair.close()


def until_closed(connection: socket.socket) -> None:
    """Raises: TimeoutError."""
    connection.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # ZMTP 3.0


@pytest.mark.parametrize("of_kv", [False, True], ids=["messages", "kv"])
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x05READY",
        GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32) + b"\x04\x08\x05HELLO\x01a\x01b",
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + bytes(194),
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\xff" * 8,
    ],
    ids=["http", "null", "plain", "curve", "huge"],
)
def test_zeromq_flood_of_a_stranger_takes_no_memory_and_ends_no_link(
    two: Callable[..., Two], said: bytes, of_kv: bool
) -> None:
    pair = two()
    pair.meet()
    port = kv_port(pair.members[1]) if of_kv else pair.peers[1][1]
    before_bytes = rss_bytes()
    frames = (b"\x01\xff" + bytes(255)) * 4096  # parts of a message that never ends
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(0.5)
        with contextlib.suppress(OSError):
            stranger.sendall(said)
            for _ in range(64):
                stranger.sendall(frames)
    assert rss_bytes() - before_bytes < 32 * 2**20  # of 64 MiB
    pair.members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: pair.records[1].heard, "the part of a member")
    assert [record.gone for record in pair.records] == [[], []]


def test_zeromq_kv_port_rejects_a_wrong_password(two: Callable[..., Two]) -> None:
    pair = two()
    pair.meet()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.plain_username, stranger.plain_password = b"member", b"a guess"
        with stranger.get_monitor_socket(zmq.EVENT_ALL) as monitor:
            stranger.connect(f"tcp://127.0.0.1:{kv_port(pair.members[1])}")
            seen: list[int] = []
            while zmq.EVENT_HANDSHAKE_FAILED_AUTH not in seen:
                assert monitor.poll(WAIT_S * 1000)
                seen.append(int(zmq.utils.monitor.recv_monitor_message(monitor)["event"]))
    assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen


def test_zeromq_member_without_free_descriptors_meets_the_other_later() -> None:
    """None is free, or fewer than a connection takes: it fails at each of its steps."""
    pair = Two(times=replace(TIMES, retry_s=(0.01, 0.01), connect_s=2.0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with socket.socket() as early:
            pair.members[1].start(pair.records[1])
            used = {int(name) for name in os.listdir("/proc/self/fd")}
            unused = sorted({*range(max(used) + 10)} - used)
            early.connect(pair.peers[1])
            for most in unused[:10]:  # 0 to 9 are free
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
                made = pair.members[1].made
                until(lambda: pair.members[1].made > made + 1, "it dials in vain")  # noqa: B023
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            pair.members[0].start(pair.records[0])
            pair.meet()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        pair.close()


# ---- lies ----


class Foreign(msgspec.Struct, tag=99):
    """No message of ours."""


def test_zeromq_invalid_message_makes_the_members_reconnect(
    two: Callable[..., Two],
) -> None:
    pair = two()
    pair.meet()
    pair.members[1].send(0, Foreign())  # type: ignore[arg-type]
    until(lambda: pair.records[0].gone == [1], "it is not talked to")
    pair.meet()
    assert pair.records[0].heard == []


class Captured:
    """In place of a port."""

    def __init__(self) -> None:
        self.sent: list[list[zmq.Frame]] = []

    def put(self, name: bytes, *frames: Any, track: bool) -> zmq.MessageTracker:
        self.sent.append([zmq.Frame(bytes(each)) for each in frames])
        return zmq.MessageTracker()


def sealed(receiver: encrypted_kv.EncryptedKvReceiver, parts: int) -> list[list[zmq.Frame]]:
    port, sender = Captured(), encrypted_kv.EncryptedKvSender(receiver.name, receiver.key, WAIT_S)
    for layer in range(parts):
        sender.send(port, LayerPart(JOB, layer, 0, 4), memoryview(DATA))  # type: ignore[arg-type]
    return port.sent


def receiver() -> encrypted_kv.EncryptedKvReceiver:
    return encrypted_kv.EncryptedKvReceiver(bytearray(2**22))


def test_encrypted_kv_sealed_parts_are_opened_in_order() -> None:
    there = receiver()
    for layer, frames in enumerate(sealed(there, 3)):
        assert DATA[:16] not in frames[1].bytes
        head, data = there.take(frames)
        assert head.part == LayerPart(JOB, layer, 0, 4)
        assert data == DATA


class Full(Captured):
    """Takes no part the first time."""

    def put(self, name: bytes, *frames: Any, track: bool) -> zmq.MessageTracker:
        if not self.sent:
            self.sent.append([])
            raise encrypted_kv.PeerGone("its queue is full")
        return super().put(name, *frames, track=track)


def test_encrypted_kv_path_that_lost_a_part_is_not_used_again() -> None:
    there, port = receiver(), Full()
    sender = encrypted_kv.EncryptedKvSender(there.name, there.key, WAIT_S)
    for _ in range(2):
        with pytest.raises(encrypted_kv.PeerGone):
            sender.send(port, PART, memoryview(DATA))  # type: ignore[arg-type]
    assert port.sent == [[]]  # it could not have been decrypted
    assert sender.over


def flipped(frames: list[zmq.Frame], frame: int, at: int) -> list[zmq.Frame]:
    spoilt = [bytearray(each.bytes) for each in frames]
    spoilt[frame][at] ^= 4
    return [zmq.Frame(bytes(each)) for each in spoilt]


SPOILT: dict[str, Callable[[list[list[zmq.Frame]]], list[zmq.Frame]]] = {
    "repeated": lambda sent: sent[0],
    "left out": lambda sent: sent[2],
    "data": lambda sent: flipped(sent[1], 1, 5),
    "tag": lambda sent: flipped(sent[1], 1, -1),
    "head": lambda sent: flipped(sent[1], 0, -4),
    "cut": lambda sent: [sent[1][0], zmq.Frame(sent[1][1].bytes[:-1])],
    "empty": lambda sent: [sent[1][0], zmq.Frame(bytes(16))],
    "no head": lambda sent: sent[1][1:],
    "more": lambda sent: [*sent[1], sent[1][0]],
    "long head": lambda sent: [zmq.Frame(bytes(2**16)), sent[1][1]],
    "other key": lambda sent: sealed(receiver(), 2)[1],
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_encrypted_kv_part_changed_or_out_of_order_is_bad(
    spoil: Callable[[list[list[zmq.Frame]]], list[zmq.Frame]],
) -> None:
    there = receiver()
    sent = sealed(there, 3)
    there.take(sent[0])
    with pytest.raises(encrypted_kv.BadMessage):
        there.take(spoil(sent))


class Spoiling:
    """A port for KV that changes a bit of every part."""

    def __init__(self, inner: encrypted_kv.SendingSocket) -> None:
        self._inner = inner

    def put(self, *frames: Any, track: bool) -> zmq.MessageTracker | None:
        frames[2][5] ^= 4
        return self._inner.put(*frames, track=track)

    def __getattr__(self, name: str) -> Any:  # other threads use it meanwhile
        return getattr(self._inner, name)


def test_runahead_transport_kv_changed_on_the_way_is_not_delivered(two: Callable[..., Two]) -> None:
    pair = two()
    pair.meet()
    sender = pair.members[0]
    port = sender.kv
    sender.kv = Spoiling(port)  # type: ignore[assignment]
    # The receiver may end it before the part is sent.
    with contextlib.suppress(encrypted_kv.PeerGone):
        sender.send_part(1, PART, memoryview(DATA))
    sender.kv = port
    until(lambda: pair.records[1].gone == [0], "the receiver ends it")
    pair.meet()
    pair.members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: pair.records[1].heard, "a good one")
    assert [kv for _, _, kv in pair.records[1].heard] == [DATA]


# ---- the throughput of a link ----


def test_zeromq_throughput_measured_long_ago_is_unknown(two: Callable[..., Two]) -> None:
    pair = two(times=replace(TIMES, doubt_s=0.1))
    pair.meet()
    pair.members[0].measured(1, 2**20, 60.0)
    until(lambda: pair.members[0].bytes_per_s(1) is None, "a slow moment is forgotten")


def test_zeromq_throughput_of_an_earlier_connection_is_unknown(two: Callable[..., Two]) -> None:
    pair = two()
    pair.meet()
    pair.members[0].measured(1, 2**20, 60.0)
    assert pair.members[0].bytes_per_s(1) == pytest.approx(2**20 / 60.0)
    pair.cut()
    until(lambda: pair.records[0].gone, "the connection has ended")
    assert pair.members[0].bytes_per_s(1) is None


# ---- silence, and returns ----


def other_process(peers: list[tuple[str, int]], pipe: Connection) -> None:
    here = member(1, peers, times=LinkTimes())
    here.start(MessageRecord())
    pipe.recv()


def test_zeromq_stopped_member_is_gone_until_it_resumes() -> None:
    peers, record, spawn = addresses(2), MessageRecord(), multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=other_process, args=(peers, theirs), daemon=True)
    child.start()
    assert child.pid is not None
    here = member(0, peers, times=replace(PATIENT, silence_s=1.0, retry_s=(0.05, 0.05)))
    here.start(record)
    try:
        until(lambda: here.reachable() == {1}, "the other process is there", 4 * WAIT_S)
        os.kill(child.pid, signal.SIGSTOP)  # on a busy machine it may have been gone before, too
        until(lambda: record.gone and not here.reachable(), "it says nothing")
        assert set(record.gone) == {1}
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: here.reachable() == {1}, "it is back")
    finally:
        child.kill()
        ours.close()
        here.close()


def test_zeromq_cut_link_is_restored_once(two: Callable[..., Two]) -> None:
    pair = two()
    for cut in range(1, 4):
        pair.meet()
        pair.cut()
        until(lambda: all(len(e.gone) == cut for e in pair.records), "both have noticed")  # noqa: B023
    pair.meet()
    pair.stay()
    assert [len(record.gone) for record in pair.records] == [3, 3]


def test_zeromq_cut_link_with_a_busy_receiver_is_restored_once(
    two: Callable[..., Two],
) -> None:
    pair = two()
    pair.meet()
    busy = pair.records[0]
    busy.open.clear()
    pair.members[1].send_part(0, PART, memoryview(DATA))
    until(busy.holds.is_set, "it hears nothing else now")
    pair.cut()
    busy.open.set()
    until(lambda: all(record.gone for record in pair.records), "both have noticed")
    pair.meet()
    pair.stay()
    assert [record.gone for record in pair.records] == [[1], [0]]


def test_zeromq_peer_is_not_back_before_its_gone_event_was_handled(two: Callable[..., Two]) -> None:
    may_go_on = threading.Event()

    class Slow(MessageRecord):
        def on_gone(self, rank: int, reason: str) -> None:
            super().on_gone(rank, reason)
            if rank == 1:
                may_go_on.wait(WAIT_S)

    pair = two(record=Slow)
    pair.meet()
    pair.cut()
    until(lambda: pair.records[0].gone, "it has noticed")
    made = pair.members[1].made
    until(lambda: pair.members[1].made > made + 20, "the other one is ready to meet")
    assert not pair.members[0].reachable()
    may_go_on.set()
    pair.meet()


def test_zeromq_raising_handler_makes_the_members_reconnect(two: Callable[..., Two]) -> None:
    class Raises(MessageRecord):
        def on_gone(self, rank: int, reason: str) -> None:
            super().on_gone(rank, reason)
            raise ValueError("of a handler")

        def on_message(self, rank: int, message: Message) -> None:
            super().on_message(rank, message)
            raise ValueError("of a handler")

    pair = two(record=Raises)
    pair.meet()
    pair.cut()
    until(lambda: all(len(record.gone) == 1 for record in pair.records), "both have noticed")
    pair.meet()
    pair.members[0].send(1, Accept(JOB))
    until(lambda: all(len(record.gone) == 2 for record in pair.records), "the link is made anew")
    pair.meet()


def test_zeromq_peer_that_takes_no_kv_is_gone_after_the_timeout(two: Callable[..., Two]) -> None:
    pair = two(times=replace(TIMES, send_s=0.5))
    pair.meet()
    pair.records[1].open.clear()
    data = memoryview(bytes(2**22))

    def send_many() -> None:
        for _ in range(100):
            pair.members[0].send_part(1, PART, data)

    with pytest.raises(encrypted_kv.PeerGone, match="does not take KV"):
        send_many()
    pair.records[1].open.set()
    until(lambda: all(record.gone for record in pair.records), "they part")

    def sent() -> bool:
        with contextlib.suppress(encrypted_kv.PeerGone):  # `send_s` is little on a busy machine
            pair.members[0].send_part(1, PART, data)
            return True
        return False

    until(sent, "they go on")


# ---- addresses ----


class Lagging(CountingTransport):
    """It looks at a connection only when the other end has greeted it on this connection."""

    def listener(self) -> Any:
        made = super().listener()
        connect = made.connect

        def connect_and_lag(address: str) -> None:
            connect(address)
            made.poll(WAIT_S * 1e3)

        made.connect = connect_and_lag
        return made


def test_zeromq_greeting_that_is_there_before_the_connection_was_looked_at_is_heard(
    two: Callable[..., Two], caplog: pytest.LogCaptureFixture
) -> None:
    two(kinds=(CountingTransport, Lagging)).meet()
    assert "could not be heard" not in caplog.text


def test_zeromq_members_meet_on_ip_version_6_addresses() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IP version 6 here: {error}")
    _meet([("::1", port) for _, port in addresses(2)])


def test_zeromq_members_meet_on_host_names() -> None:
    _meet([("localhost", port) for _, port in addresses(2)])


def _meet(peers: list[tuple[str, int]]) -> None:
    members = [member(rank, peers) for rank in range(2)]
    with started(*members) as records:
        until(lambda: all(each.reachable() for each in members), "they meet")
        members[0].send_part(1, PART, memoryview(DATA))
        until(lambda: records[1].heard, "a part")


def test_zeromq_address_in_use_raises_at_once() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(OSError, match="in use"):
        member(0, [taken.getsockname()[:2], ("127.0.0.1", 1)])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_zeromq_repeated_failed_dials_leak_no_descriptors() -> None:
    dials = 0

    class Counting(ZmqTransport):
        def listener(self) -> "zmq.Socket[bytes]":
            nonlocal dials
            dials += 1
            return super().listener()

    times = replace(PATIENT, retry_s=(0.01, 0.01))
    with started(member(0, addresses(2), kind=Counting, times=times)):
        until(lambda: dials >= 5, "it dials")
        before, least = descriptors(), dials + 40
        until(lambda: dials >= least, "and dials")
        # Each dial takes three, or more. ZeroMQ closes those of the last ones in the background.
        until(lambda: descriptors() < before + 20, "they are closed")


def test_zeromq_close_leaves_no_thread_and_no_descriptor() -> None:
    peers = addresses(3)  # before the count: they keep descriptors
    before, open_before = threading.active_count(), descriptors()
    members = [member(rank, peers) for rank in range(3)]
    for each in members:
        each.start(MessageRecord())
    until(lambda: all(len(m.reachable()) == 2 for m in members), "all are there")
    for each in members:
        each.close()
    until(lambda: threading.active_count() <= before, "threads end")
    until(lambda: descriptors() <= open_before, "descriptors are closed")
