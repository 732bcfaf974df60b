"""The TCP transport against strangers, liars, other groups, silence and returns."""

import contextlib
import socket
import struct
import time
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from members import JOB, NAMESPACE, SECRET, Ear, addresses, tcp_group, until

from sglang_cake.keys import Digest
from sglang_cake.runahead import tcp, wire
from sglang_cake.runahead.messages import (
    Accept,
    BadMessage,
    Cancel,
    Failed,
    LayerPart,
    Offer,
    Refuse,
    decode,
    decode_part,
    encode,
    encode_part,
)
from sglang_cake.runahead.tcp import TcpTransport


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
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "other", [{"secret": b"another secret of the group"}, {"namespace": Digest(bytes(32))}]
)
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


def test_a_recorded_proof_opens_nothing(member: Member) -> None:
    _, ear, peers, _ = member
    replayed = socket.create_connection(peers[0])
    hello = wire.HELLO.pack(wire.MAGIC, wire.VERSION, 1, 2, NAMESPACE, bytes(16))
    replayed.sendall(hello)
    answer = wire.ANSWER.unpack(wire.received(replayed, wire.ANSWER.size))
    pair = wire.Pair(1, 0, 2, NAMESPACE)
    replayed.sendall(pair.proof(SECRET, b"dialer", bytes(16), answer[3]))
    assert wire.received(replayed, 1) == wire.WELCOME
    again = socket.create_connection(peers[0])
    again.sendall(hello)
    wire.received(again, wire.ANSWER.size)
    again.sendall(pair.proof(SECRET, b"dialer", bytes(16), answer[3]))  # of another nonce
    assert is_closed(again)
    replayed.close()
    assert ear.heard == []


def test_the_answer_of_one_who_does_not_know_the_secret_is_not_believed(member: Member) -> None:
    own, _, _, listener = member
    listener.listen()
    connection, _ = listener.accept()  # member 0 dials its peer
    wire.received(connection, wire.HELLO.size)
    connection.sendall(wire.ANSWER.pack(wire.MAGIC, wire.VERSION, 0, bytes(16), bytes(32)))
    assert is_closed(connection)
    assert own.reachable() == frozenset()


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "SILENCE_S", 0.3)
    monkeypatch.setattr(tcp, "PING_S", 0.05)
    listeners, peers = addresses(2)
    ear = Ear()
    own = TcpTransport(0, peers, secret=SECRET, namespace=NAMESPACE, listener=listeners[0])
    own.start(ear)
    other = second(peers, listeners[1])
    try:
        until(lambda: own.reachable() == {1}, "it is there")
        monkeypatch.setattr(tcp._Outgoing, "_write", lambda self, connection: own.closed.wait(5))
        # What is written already goes on; a new connection is silent, as a stopped process is.
        other._outgoing[0].close()
        until(lambda: ear.gone, "it is silent")
        assert own.reachable() == frozenset()
        monkeypatch.undo()
        other.close()
        again = second(peers, socket.create_server(peers[1]))
        try:
            until(lambda: own.reachable() == {1}, "it is back")
            own.send(1, Cancel(JOB, "x"))
        finally:
            again.close()
    finally:
        own.close()
        other.close()


def test_a_cut_link_comes_back_once_and_stays() -> None:
    """A dead connection that nobody has written to yet is none of the new pair."""
    listeners, peers = addresses(2)
    ears = [Ear(), Ear()]
    members = [
        TcpTransport(rank, peers, secret=SECRET, namespace=NAMESPACE, listener=listeners[rank])
        for rank in range(2)
    ]
    try:
        for member, ear in zip(members, ears, strict=True):
            member.start(ear)
        together = [frozenset({1}), frozenset({0})]
        for cut in range(1, 4):
            until(lambda: [m.reachable() for m in members] == together, "both are there")
            tcp._end(members[0]._incoming[1])
            until(lambda: all(len(e.gone) == cut for e in ears), "both have noticed")  # noqa: B023
        until(lambda: [m.reachable() for m in members] == together, "both are there")
        time.sleep(4 * tcp.PING_S)  # in which every dead connection would be found out
        assert [len(ear.gone) for ear in ears] == [3, 3]
        assert [m.reachable() for m in members] == together
    finally:
        for member in members:
            member.close()


def test_strangers_that_say_nothing_are_few(member: Member) -> None:
    own, _, peers, listener = member
    idle = [socket.create_connection(peers[0]) for _ in range(12)]
    assert any(is_closed(connection) for connection in idle[6:])
    for connection in idle:
        connection.close()
    late = second(peers, listener)
    try:
        until(lambda: own.reachable() == {1}, "members get in when strangers are gone")
    finally:
        late.close()


def test_an_address_that_is_taken_is_said_at_once() -> None:
    listeners, peers = addresses(1)
    listeners[0].listen()
    with pytest.raises(OSError, match="in use"):
        TcpTransport(0, peers, secret=SECRET, namespace=NAMESPACE)


def test_close_leaves_no_thread() -> None:
    import threading

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
