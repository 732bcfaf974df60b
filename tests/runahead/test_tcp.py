"""The TCP transport against strangers, liars, other groups, silence and returns."""

import contextlib
import resource
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from members import JOB, NAMESPACE, SECRET, WAIT_S, Ear, addresses, tcp_group, until

from sglang_cake.keys import Digest
from sglang_cake.runahead import handshake, tcp, wire
from sglang_cake.runahead.handshake import Identity, Pair
from sglang_cake.runahead.messages import (
    Accept,
    BadMessage,
    Cancel,
    Failed,
    LayerPart,
    Message,
    Offer,
    Refuse,
    decode,
    decode_part,
    encode,
    encode_part,
)
from sglang_cake.runahead.tcp import TcpTransport
from sglang_cake.runahead.wire import end


@pytest.fixture
def member() -> Iterator[tuple[TcpTransport, Ear, list[tuple[str, int]], socket.socket]]:
    """Member 0 of two; the listener of member 1 is the test's."""
    listeners, peers = addresses(2)
    own = TcpTransport(0, peers, secret=SECRET, namespace=NAMESPACE, listener=listeners[0])
    ear = Ear()
    own.start(ear)
    yield own, ear, peers, listeners[1]
    own.close()
    listeners[1].close()


Member = tuple[TcpTransport, Ear, list[tuple[str, int]], socket.socket]


def second(peers: list[tuple[str, int]], listener: socket.socket, **other: object) -> TcpTransport:
    settings: dict[str, object] = {"secret": SECRET, "namespace": NAMESPACE, **other}
    made = TcpTransport(1, peers, listener=listener, **settings)  # type: ignore[arg-type]
    made.start(Ear())
    return made


def shaken(peers: list[tuple[str, int]]) -> socket.socket:
    """A connection to member 0 that has proved to be member 1; the test speaks on it."""
    listeners, _ = addresses(1)
    dialer = TcpTransport(1, peers, secret=SECRET, namespace=NAMESPACE, listener=listeners[0])
    connection = dialer.dial(0, peers[0])
    dialer.close()
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("other", [{"secret": bytes(32)}, {"namespace": Digest(bytes(32))}])
def test_others_are_left_out(
    member: Member, other: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    own, ear, peers, listener = member
    stranger = second(peers, listener, **other)
    try:
        until(lambda: caplog.text.count("is left out") >= 2, "both sides say so")
        assert own.reachable() == stranger.reachable() == frozenset()
        assert ear.heard == []
    finally:
        stranger.close()


def test_a_group_of_another_size_is_left_out(member: Member) -> None:
    own, _, peers, listener = member
    stranger = second([*peers, ("127.0.0.1", 1)], listener)
    try:
        with pytest.raises(BadMessage, match="does not know this member"):
            stranger.dial(0, peers[0])
        assert own.reachable() == frozenset()
    finally:
        stranger.close()


def hello(connection: socket.socket, namespace: bytes = NAMESPACE) -> Pair:
    """What member 1 says first, and what member 0 answers."""
    nonce = bytes(handshake.NONCE_BYTES)
    connection.sendall(handshake.HELLO.pack(wire.MAGIC, wire.VERSION, 1, 2, namespace, nonce))
    answer = handshake.ANSWER.unpack(read(connection, handshake.ANSWER.size))
    assert answer[:2] == (wire.MAGIC, wire.VERSION)
    return Pair(1, 0, 2, Digest(namespace), nonce, answer[2])


def read(connection: socket.socket, size: int) -> bytes:
    return bytes(wire.received(connection, size, time.monotonic() + WAIT_S))


def test_recorded_proof_on_another_connection_is_refused(member: Member) -> None:
    _, ear, peers, _ = member
    with socket.create_connection(peers[0]) as first, socket.create_connection(peers[0]) as again:
        proof = hello(first).proof(SECRET, b"dialer")
        first.sendall(proof)
        assert read(first, handshake.VERDICT.size)[:2] == bytes(2)
        hello(again)
        again.sendall(proof)  # of another nonce
        assert read(again, handshake.VERDICT.size)[:2] != bytes(2)
        assert is_closed(again)
    assert ear.heard == []


@pytest.mark.parametrize("namespace", [NAMESPACE, bytes(32)])
def test_stranger_without_the_secret_gets_no_proof_and_no_reason(
    member: Member, namespace: bytes
) -> None:
    """With a proof, it could guess a secret without asking anybody."""
    _, _, peers, _ = member
    with socket.create_connection(peers[0]) as stranger:
        stranger.sendall(hello(stranger, namespace).proof(b"a guess", b"dialer"))
        refusal, proof = handshake.VERDICT.unpack(read(stranger, handshake.VERDICT.size))
        assert (refusal, proof) == (1, bytes(handshake.PROOF_BYTES))
        assert is_closed(stranger)


def test_member_of_another_version_hears_the_version_and_is_refused(member: Member) -> None:
    _, _, peers, _ = member
    with socket.create_connection(peers[0]) as other:
        sent = handshake.HELLO.pack(wire.MAGIC, wire.VERSION + 1, 1, 2, NAMESPACE, bytes(16))
        other.sendall(sent)
        answer = handshake.ANSWER.unpack(read(other, handshake.ANSWER.size))
        assert answer[:2] == (wire.MAGIC, wire.VERSION)
        assert is_closed(other)


def test_answer_of_a_stranger_without_the_secret_is_not_believed(member: Member) -> None:
    own, _, _, listener = member
    connection, _ = listener.accept()  # member 0 dials its peer
    read(connection, handshake.HELLO.size)
    connection.sendall(handshake.ANSWER.pack(wire.MAGIC, wire.VERSION, bytes(16)))
    read(connection, handshake.PROOF_BYTES)
    connection.sendall(handshake.VERDICT.pack(0, bytes(32)))
    assert is_closed(connection)
    assert own.reachable() == frozenset()


def test_bytes_that_trickle_end_at_the_deadline() -> None:
    """However steadily they come: each of these is there at once."""

    class Trickle(socket.socket):
        def recv_into(self, view: Any, *args: Any) -> int:
            there.send(b"x")
            return super().recv_into(view[:1], *args)

    near, there = socket.socketpair()
    with there, Trickle(fileno=near.detach()) as here, pytest.raises(TimeoutError):
        wire.received(here, 2**22, time.monotonic() + 0.2)


def test_handshake_whose_time_is_over_fails_though_all_bytes_are_there() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(bytes(handshake.HELLO.size))
        identity, over_s = Identity(0, 2, NAMESPACE, SECRET), time.monotonic()
        with pytest.raises(TimeoutError):
            identity.answer(here, over_s)
        with pytest.raises(TimeoutError):
            identity.dial(here, 1, over_s)


HEADS = [
    wire.HEAD.pack(b"HTTP", wire.VERSION, 2, 0, 0),
    wire.HEAD.pack(wire.MAGIC, 99, 2, 0, 0),
    wire.HEAD.pack(wire.MAGIC, wire.VERSION, wire.PART, 2**31, 0),
    wire.HEAD.pack(wire.MAGIC, wire.VERSION, 2, 2**31, 0),
    wire.HEAD.pack(wire.MAGIC, wire.VERSION, wire.PING, 5, 0),
    wire.HEAD.pack(wire.MAGIC, wire.VERSION, wire.PART, 1, 0) + b"x",
    wire.frame_head(77, b""),
    wire.frame_head(2, b"no json") + b"no json",
    wire.frame_head(2, encode(Accept(JOB, 1)))[:-1] + b"\0" + encode(Accept(JOB, 1)),
]


@pytest.mark.parametrize("sent", HEADS, ids=range(len(HEADS)))
def test_what_is_no_frame_ends_the_connection(member: Member, sent: bytes) -> None:
    _, ear, peers, _ = member
    connection = shaken(peers)
    connection.sendall(sent)
    assert is_closed(connection)
    assert ear.heard == []


def test_a_flipped_bit_in_a_part_is_not_delivered(member: Member) -> None:
    _, ear, peers, _ = member
    connection = shaken(peers)
    head, payload = encode_part(LayerPart(JOB, 0, 0, 4)), bytes(64)
    frame = wire.frame_head(wire.PART, head, payload) + head + payload
    connection.sendall(frame)
    until(lambda: len(ear.heard) == 1, "the good one")
    spoilt = bytearray(frame)
    spoilt[-5] ^= 4
    connection.sendall(spoilt)
    assert is_closed(connection)
    assert len(ear.heard) == 1


def test_silence_is_absence_and_who_returns_is_there_again(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ear, peers, listener = member
    mute = TcpTransport(1, peers, secret=SECRET, namespace=NAMESPACE, listener=listener)
    incoming, _ = listener.accept()
    Identity(1, 2, NAMESPACE, SECRET).answer(incoming, time.monotonic() + WAIT_S)
    until(own._outgoing[1].is_alive, "one direction is up")
    monkeypatch.setattr(tcp, "SILENCE_S", 0.3)
    outgoing = mute.dial(0, peers[0])  # and the other one; both stay open
    until(lambda: ear.gone == [1], "it came and said nothing")
    assert own.reachable() == frozenset()
    monkeypatch.undo()
    again = second(peers, listener)
    try:
        until(lambda: own.reachable() == {1}, "it is back")
        own.send(1, Cancel(JOB, "x"))
    finally:
        again.close()
        incoming.close()
        outgoing.close()


class Two:
    """Members that know each other, and what they hear; not started."""

    def __init__(self, ear: type[Ear] = Ear, greeting: Message | None = None) -> None:
        listeners, peers = addresses(2)
        self.ears = [ear(), ear()]
        greet = None if greeting is None else lambda rank: greeting
        self.members = [
            TcpTransport(
                rank, peers, secret=SECRET, namespace=NAMESPACE, listener=each, greeting=greet
            )
            for rank, each in enumerate(listeners)
        ]

    def start(self) -> None:
        for member, ear in zip(self.members, self.ears, strict=True):
            member.start(ear)

    def cut(self, rank: int) -> None:
        """A member finds that it can read no more."""
        presence = self.members[rank]._presence[1 - rank]
        connection = until(lambda: presence._incoming, "a connection")
        end(connection)
        until(lambda: presence._incoming is not connection, "it has found out")

    def meet(self) -> None:
        until(self._are_together, "both are there")

    def stay(self) -> None:
        time.sleep(4 * tcp.PING_S)  # in which every dead connection would be found out
        assert self._are_together()

    def _are_together(self) -> bool:
        return [member.reachable() for member in self.members] == [{1}, {0}]


@pytest.fixture
def two() -> Iterator[Callable[..., Two]]:
    made: list[Two] = []

    def make(**settings: Any) -> Two:
        made.append(Two(**settings))
        return made[-1]

    yield make
    for each in made:
        for ear in each.ears:
            ear.open.set()
        for member in each.members:
            member.close()


def test_a_cut_link_comes_back_once_and_stays(two: Callable[..., Two]) -> None:
    """A dead connection that nobody has written to yet is none of the new pair."""
    pair = two()
    pair.start()
    for cut in range(1, 4):
        pair.meet()
        pair.cut(0)
        until(lambda: all(len(e.gone) == cut for e in pair.ears), "both have noticed")  # noqa: B023
    pair.meet()
    pair.stay()
    assert [len(ear.gone) for ear in pair.ears] == [3, 3]


def test_a_cut_link_comes_back_once_though_one_side_is_busy_with_a_part(
    two: Callable[..., Two],
) -> None:
    """Who is dialed anew parts from what was before, and not from the new connection."""
    pair = two()
    pair.start()
    pair.meet()
    busy = pair.ears[1]
    busy.open.clear()
    pair.members[0].send_part(1, LayerPart(JOB, 0, 0, 4), memoryview(bytes(64)))
    until(busy.holds.is_set, "it reads nothing else now")
    pair.cut(0)
    until(lambda: all(ear.gone for ear in pair.ears), "both have noticed")
    busy.open.set()
    pair.meet()
    pair.stay()
    assert [ear.gone for ear in pair.ears] == [[1], [0]]


def test_what_ended_before_its_pair_was_there_is_half_of_none(
    two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, may_dial, dial = two(), threading.Event(), TcpTransport.dial

    def later(self: TcpTransport, *peer: Any) -> socket.socket:
        if self is pair.members[1]:
            may_dial.wait(WAIT_S)
        return dial(self, *peer)

    monkeypatch.setattr(TcpTransport, "dial", later)
    pair.start()
    until(pair.members[0]._outgoing[1].is_alive, "one direction is up")
    pair.cut(1)
    may_dial.set()
    pair.meet()
    pair.stay()
    assert [ear.gone for ear in pair.ears] == [[], []]


def test_a_return_is_told_after_the_parting(two: Callable[..., Two]) -> None:
    told: list[str] = []
    may_tell = threading.Event()

    class Slow(Ear):
        def on_message(self, rank: int, message: Message) -> None:
            if self is pair.ears[0]:
                told.append("is greeted")

        def on_gone(self, rank: int, reason: str) -> None:
            super().on_gone(rank, reason)
            if self is pair.ears[0]:
                may_tell.wait(WAIT_S)
                told.append("is told")

    pair = two(ear=Slow, greeting=Cancel(JOB, "welcome"))
    pair.start()
    pair.meet()
    until(lambda: told == ["is greeted"], "the greeting")
    pair.cut(0)
    until(lambda: all(ear.gone for ear in pair.ears), "both have noticed")
    until(pair.members[1]._outgoing[0].is_alive, "the other one has dialed anew")
    time.sleep(2 * tcp.PING_S)  # in which it would be greeted again
    may_tell.set()
    until(lambda: len(told) == 3, "they meet")
    assert told == ["is greeted", "is told", "is greeted"]


def test_strangers_that_trickle_are_few_and_keep_no_member_out(member: Member) -> None:
    _, _, peers, _ = member
    strangers = [socket.create_connection(peers[0]) for _ in range(12)]
    for stranger in strangers[-6:]:  # as many as there are places
        stranger.send(b"C")
    with shaken(peers):  # which was the last to come
        assert all(is_closed(stranger) for stranger in strangers[:7])
    for stranger in strangers:
        stranger.close()


def test_addresses_of_members_lose_their_places_last() -> None:
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.2", 0))
    peers = [ours.getsockname(), theirs.getsockname()]
    own = TcpTransport(0, peers, secret=SECRET, namespace=NAMESPACE, listener=ours)
    own.start(Ear())
    strangers = []
    try:
        theirs.accept()  # it has looked up where its peer is
        early = socket.create_connection(peers[0], source_address=("127.0.0.2", 0))
        for _ in range(12):
            stranger = socket.create_connection(peers[0], source_address=("127.0.0.3", 0))
            strangers.append(stranger)
        assert all(is_closed(stranger) for stranger in strangers[:7])  # five are left, and `early`
        early.sendall(hello(early).proof(SECRET, b"dialer"))
        assert read(early, handshake.VERDICT.size)[:2] == bytes(2)
    finally:
        own.close()
        for connection in (theirs, *strangers):
            connection.close()


def no_descriptors(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Descriptors are used up: a limit below those that are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def no_threads(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As Python says it. A real limit would be for all processes of this user."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)
    return patch.undo


@pytest.mark.parametrize("used_up", [no_descriptors, no_threads])
def test_member_that_could_not_accept_a_connection_accepts_the_next(
    member: Member,
    used_up: Callable[[pytest.MonkeyPatch], Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, _, peers, listener = member
    with socket.socket() as early:
        restore = used_up(monkeypatch)
        try:
            early.connect(peers[0])
            until(lambda: "cannot accept a connection" in caplog.text, "a line in the log")
        finally:
            restore()
        late = second(peers, listener)
        try:
            until(lambda: own.reachable() == {1}, "the member is there")
        finally:
            late.close()


def test_handler_that_raises_ends_no_dialing(two: Callable[..., Two]) -> None:
    class Raises(Ear):
        def on_gone(self, rank: int, reason: str) -> None:
            super().on_gone(rank, reason)
            raise ValueError("of a handler")

    pair = two(ear=Raises)
    pair.start()
    for cut in range(1, 3):
        pair.meet()
        pair.cut(cut % 2)
        until(lambda: all(len(e.gone) == cut for e in pair.ears), "both have noticed")  # noqa: B023
    pair.meet()


def test_member_listens_on_an_address_of_ip_version_6() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IP version 6 here: {error}")
    port = listener.getsockname()[1]
    listener.close()
    TcpTransport(0, [("::1", port), ("::1", 1)], secret=SECRET, namespace=NAMESPACE).close()


def test_an_address_that_is_taken_is_said_at_once() -> None:
    listeners, peers = addresses(1)
    listeners[0].listen()
    with pytest.raises(OSError, match="in use"):
        TcpTransport(0, peers, secret=SECRET, namespace=NAMESPACE)


def test_close_leaves_no_thread() -> None:
    before = threading.active_count()
    members = tcp_group(3)
    for member in members:
        member.start(Ear())
    until(lambda: all(len(m.reachable()) == 2 for m in members), "all are there")
    for member in members:
        member.close()
    until(lambda: threading.active_count() <= before, "threads end")


TEXT = st.text(max_size=40)
MESSAGES = st.one_of(
    st.builds(Accept, st.just(JOB), st.integers(0, 2**31 - 1)),
    st.builds(Refuse, st.just(JOB), TEXT),
    st.builds(Cancel, st.just(JOB), TEXT),
    st.builds(Failed, st.just(JOB), st.integers(0, 255), TEXT),
    st.builds(
        lambda tokens, salt: Offer(
            JOB, (2, 0), (0, len(tokens), len(tokens) + 5), "ab", None, salt, array("i", tokens)
        ),
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
        st.none() | TEXT,
    ),
)


@given(MESSAGES)
def test_a_message_is_read_as_it_was_written(message: Accept) -> None:
    assert decode(message.kind, encode(message)) == message


@settings(max_examples=300)
@given(st.integers(0, 20), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_bad(kind: int, body: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(kind, body)


@settings(max_examples=300)
@given(MESSAGES, st.data())
def test_a_spoilt_message_is_a_message_or_bad(message: Accept, data: st.DataObject) -> None:
    body = bytearray(encode(message))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadMessage):
        decode(message.kind, bytes(body))


@given(st.binary(min_size=28, max_size=28))
def test_any_head_is_a_part_or_bad(head: bytes) -> None:
    try:
        part = decode_part(head)
    except BadMessage:
        return
    assert encode_part(part) == head
    assert part.start < part.stop


@pytest.mark.parametrize(
    ("bounds", "tokens"),
    [((0, 5, 5), 5), ((0, 5), 5), ((0, 5, 9, 12), 5), ((0, 5, 9), 9), ((0, 5, 9), 4)],
)
def test_an_offer_whose_parts_disagree_is_bad(bounds: tuple[int, ...], tokens: int) -> None:
    offer = Offer(JOB, (0, 1), bounds, "ab", None, None, array("i", range(tokens)))
    with pytest.raises(BadMessage):
        decode(Offer.kind, encode(offer))


def test_half_a_token_and_a_negative_one_are_bad() -> None:
    whole = encode(Offer(JOB, (0, 1), (0, 2, 3), "ab", None, None, array("i", [1, 2])))
    for spoilt in (whole[:-1], whole[:-4] + struct.pack("<i", -1)):
        with pytest.raises(BadMessage):
            decode(Offer.kind, spoilt)
