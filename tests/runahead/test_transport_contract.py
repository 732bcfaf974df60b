"""What every transport promises (runahead/zeromq.py)."""

import threading
from array import array
from collections.abc import Iterator

import pytest
from members import GROUPS, JOB, WAIT_S, MessageRecord
from polling import until

from sglang_cake.runahead.messages import (
    MAX_PART_BYTES,
    Accept,
    Cancel,
    HelpOffer,
    LayerPart,
    Message,
    PeerGone,
    new_job,
)
from sglang_cake.runahead.zeromq import ZmqTransport


@pytest.fixture(params=GROUPS)
def group(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[list[ZmqTransport], list[MessageRecord]]]:
    members = GROUPS[request.param](3)
    records = [MessageRecord() for _ in members]
    for member, record in zip(members, records, strict=True):
        member.start(record)
    for rank, member in enumerate(members):
        others = frozenset(range(3)) - {rank}
        until(lambda m=member, o=others: m.reachable() == o, "everybody is there")
    yield members, records
    for record in records:
        record.open.set()
    for member in members:
        member.close()


Group = tuple[list[ZmqTransport], list[MessageRecord]]


def test_transport_messages_arrive_equal_and_in_order(group: Group) -> None:
    members, records = group
    sent: list[Message] = [
        HelpOffer(JOB, (0, 1), (0, 64, 128), "00" * 32, None, "salt", array("i", range(64))),
        Accept(JOB),
        *(Cancel(new_job(), f"reason {i}") for i in range(50)),
    ]
    for message in sent:
        members[0].send(1, message)
    until(lambda: len(records[1].heard) == len(sent), "all messages")
    assert [(rank, message) for rank, message, _ in records[1].heard] == [(0, m) for m in sent]
    assert records[0].heard == records[2].heard == []


def test_transport_parts_arrive_whole_and_in_order_beside_messages(group: Group) -> None:
    members, records = group
    buffer = bytearray(1000)
    for layer in range(20):
        buffer[:] = bytes([layer]) * 1000
        members[2].send_part(0, LayerPart(JOB, layer, 0, 10), memoryview(buffer))
        buffer[:] = bytes(1000)  # ours again as soon as it has returned
        members[2].send(0, Cancel(JOB, str(layer)))
    until(lambda: len(records[0].heard) == 40, "everything")
    parts = [(said, kv) for _, said, kv in records[0].heard if isinstance(said, LayerPart)]
    wanted = [(LayerPart(JOB, layer, 0, 10), bytes([layer]) * 1000) for layer in range(20)]
    assert parts == wanted
    messages = [said for _, said, _ in records[0].heard if not isinstance(said, LayerPart)]
    assert messages == [Cancel(JOB, str(layer)) for layer in range(20)]


def test_transport_largest_part_arrives_whole(group: Group) -> None:
    members, records = group
    data = bytes(range(256)) * (MAX_PART_BYTES // 256)
    members[0].send_part(2, LayerPart(JOB, 0, 5, 6), memoryview(data))
    until(lambda: records[2].heard, "the part")
    assert records[2].heard[0][2] == data


def test_transport_blocked_peer_bounds_the_parts_in_flight(group: Group) -> None:
    members, records = group
    records[1].open.clear()
    sent = []

    def send() -> None:
        data = memoryview(bytes(MAX_PART_BYTES))
        for layer in range(12):
            members[0].send_part(1, LayerPart(JOB, layer, 0, 1), data)
            sent.append(layer)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()  # the peer takes nothing: the sender is held up
    assert len(sent) < 12
    members[0].send(2, Cancel(JOB, "to another peer"))  # which holds nobody else up
    until(lambda: records[2].heard, "the message")
    records[1].open.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    until(lambda: len(records[1].heard) == 12, "all parts")


def test_transport_closed_member_is_reported_gone_once(group: Group) -> None:
    members, records = group
    for _ in range(2):
        members[1].close()
    until(lambda: 1 not in members[0].reachable() and records[0].gone, "it is gone")
    assert records[0].gone == [1]
    assert members[0].reachable() == {2}
    with pytest.raises(PeerGone):
        members[0].send(1, Accept(JOB))
    with pytest.raises(PeerGone):
        members[0].send_part(1, LayerPart(JOB, 0, 0, 1), memoryview(b"x"))
    members[0].send(2, Accept(JOB))
    until(lambda: records[2].heard, "the others go on")


def test_transport_waiting_sender_gets_peer_gone(group: Group) -> None:
    members, records = group
    records[1].open.clear()
    ended: list[Exception] = []

    def send() -> None:
        try:
            while True:
                members[0].send_part(1, LayerPart(JOB, 0, 0, 1), memoryview(bytes(MAX_PART_BYTES)))
        except PeerGone as error:
            ended.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(0.3)
    members[1].close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert len(ended) == 1
