"""Parts through Mooncake's engine: what is wrong, late, or of a peer that went and came back."""

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from members import JOB, WAIT_S, Ear, addresses, engine, member, ring_member, until

from sglang_cake.runahead import transport
from sglang_cake.runahead.messages import Credit, Landed, LayerPart, Ring
from sglang_cake.runahead.mooncake import MooncakeEngine
from sglang_cake.runahead.ring import SLOTS
from sglang_cake.runahead.transport import MAX_PART_BYTES, PeerGone

pytest.importorskip("mooncake.engine", exc_type=ImportError)
PART, DATA = LayerPart(JOB, 0, 0, 4), bytes(range(64))


@pytest.fixture
def peers() -> list[tuple[str, int]]:
    return addresses(2)


@pytest.fixture
def pair(peers: list[tuple[str, int]]) -> Iterator[tuple[list[Any], list[Ear]]]:
    members: list[Any] = [ring_member(rank, peers, engine(rank)) for rank in range(2)]
    ears = [Ear(), Ear()]
    for each, ear in zip(members, ears, strict=True):
        each.start(ear)
    until(lambda: all(len(m.reachable()) == 1 for m in members), "both are there")
    yield members, ears
    for ear in ears:
        ear.open.set()
    for each in members:
        each.close()


Pair = tuple[list[Any], list[Ear]]


def landed(**changes: int) -> Landed:
    fields: dict[str, int] = {"slot": 0, "size": 64, "checksum": 0, "took_us": 1}
    return Landed(PART, **fields | changes)


@pytest.mark.parametrize(
    "lie",
    [
        landed(),  # nothing of that checksum was written
        landed(slot=SLOTS),
        landed(size=0),
        landed(size=MAX_PART_BYTES + 1),
        Ring("127.0.0.1:1", 4096, SLOTS + 1),
    ],
    ids=["checksum", "slot", "nothing", "size", "ring"],
)
def test_a_lie_ends_the_connection_and_is_not_delivered(pair: Pair, lie: Landed | Ring) -> None:
    members, ears = pair
    members[0].send(1, lie)
    until(lambda: ears[1].gone == [0], "it is not talked to any more")
    assert ears[1].heard == []
    until(lambda: all(len(m.reachable()) == 1 for m in members), "they meet anew")
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: ears[1].heard, "and go on")
    assert ears[1].heard[0][2] == DATA


def test_kv_that_changed_on_the_way_is_not_delivered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, ears = pair
    write = MooncakeEngine.write

    def spoil(self: MooncakeEngine, *args: Any) -> bool:
        ok = write(self, *args)
        members[1]._links[0].landing[7] ^= 4
        return ok

    monkeypatch.setattr(MooncakeEngine, "write", spoil)
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: ears[1].gone, "the receiver ends it")
    assert ears[1].heard == []


def test_a_slot_that_the_engine_has_not_let_go_is_not_written_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, ears = pair
    monkeypatch.setattr(transport, "SEND_TIMEOUT_S", 0.05)
    let_go, slots = threading.Event(), []
    write = MooncakeEngine.write

    def slow(self: MooncakeEngine, session: str, source: int, target: int, size: int) -> bool:
        slots.append(target)
        let_go.wait(WAIT_S)
        return write(self, session, source, target, size)

    monkeypatch.setattr(MooncakeEngine, "write", slow)
    for _ in range(SLOTS + 2):
        with pytest.raises(PeerGone):
            members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: len(slots) >= SLOTS, "the engine has them")
    assert len(slots) == len(set(slots)) == SLOTS  # each once; then nobody wrote
    link = members[0]._links[1]
    members[1].send(0, Ring("127.0.0.1:1", 4096, SLOTS + 1))  # they part: the slots stay taken
    until(lambda: ears[0].gone, "they part")
    until(lambda: members[0].reachable(), "they meet")
    assert link.writing == set(range(SLOTS))
    let_go.set()
    until(lambda: not link.writing, "the engine returns")
    monkeypatch.undo()
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: ears[1].heard, "all is well")
    assert [payload for _, _, payload in ears[1].heard] == [DATA]  # what was late is nobody's


def test_a_peer_that_went_and_came_back_is_written_to_where_it_is_now(
    pair: Pair, peers: list[tuple[str, int]]
) -> None:
    members, ears = pair
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: ears[1].heard, "the part")
    members[1].close()
    until(lambda: ears[0].gone == [1], "it is gone")
    with pytest.raises(PeerGone):
        members[0].send_part(1, PART, memoryview(DATA))
    again, ear = ring_member(1, peers, engine(1)), Ear()
    again.start(ear)
    try:
        until(lambda: members[0].reachable() == {1}, "it is back")
        members[0].send_part(1, PART, memoryview(DATA))
        until(lambda: ear.heard, "the part")
        assert ear.heard[0][2] == DATA
    finally:
        again.close()


def test_members_with_another_transport_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    peers = addresses(2)
    plain, other = member(0, peers), ring_member(1, peers, engine(1))
    for each in (plain, other):
        each.start(Ear())
    try:
        until(lambda: caplog.text.count("its namespace is another one") >= 2, "both say so")
        assert plain.reachable() == other.reachable() == frozenset()
    finally:
        plain.close()
        other.close()


def test_credits_for_slots_that_do_not_exist_change_nothing(pair: Pair) -> None:
    members, ears = pair
    members[1].send(0, Credit(2**31 - 1))
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: ears[1].heard, "the part")
    assert ears[1].heard[0][2] == DATA


def test_the_engine_reaches_no_memory_but_its_slots(pair: Pair) -> None:
    members, _ = pair
    other = ctypes.create_string_buffer(DATA, MAX_PART_BYTES)
    source = members[0]._links[1]._source_address
    session = engine(1).session
    assert engine(0).write(session, source, members[1]._links[0].ring_address, 64)
    assert not engine(0).write(session, source, ctypes.addressof(other), 64)
    assert other.raw[:64] == DATA
    read = engine(0)._engine.transfer_sync_read
    assert read(session, source, ctypes.addressof(other), 64) != 0
