"""Parts through Mooncake's engine: what is wrong, late, or of a peer that went and came back."""

import contextlib
import ctypes
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from members import JOB, WAIT_S, MessageRecord, addresses, engine, member, ring_member, started
from polling import until

from sglang_cake.runahead.messages import MAX_PART_BYTES, Credit, LayerPart, PartWritten, PeerGone
from sglang_cake.runahead.mooncake_engine import MooncakeEngine
from sglang_cake.runahead.one_sided_transport import SECTIONS, OneSidedTransport

pytest.importorskip("mooncake.engine", exc_type=ImportError)
PART, DATA = LayerPart(JOB, 0, 0, 4), bytes(range(64))


class WatchedEngine:
    """A Mooncake engine whose writes a test may change, and whose buffers it knows."""

    def __init__(self, inner: MooncakeEngine) -> None:
        self._inner = inner
        self.buffers: list[int] = []  # addresses, in the order of `allocate`
        self.freed: list[int] = []
        self.on_write: Callable[..., None] = inner.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allocate(self) -> tuple[int, Any]:
        address, memory = self._inner.allocate()
        self.buffers.append(address)
        return address, memory

    def free(self, address: int) -> None:
        self._inner.free(address)
        self.freed.append(address)

    def write(self, session: str, source: int, destination: int, size_bytes: int) -> None:
        self.on_write(session, source, destination, size_bytes)


Pair = tuple[list[OneSidedTransport], list[MessageRecord]]


@pytest.fixture
def engines() -> list[WatchedEngine]:
    return [WatchedEngine(engine(rank)) for rank in range(2)]


@pytest.fixture
def peers(engines: list[WatchedEngine]) -> list[tuple[str, int]]:
    return addresses(len(engines))  # the engines listen, so their ports are not free


@pytest.fixture
def timeout_s() -> float:
    return WAIT_S


@pytest.fixture
def pair(
    peers: list[tuple[str, int]], engines: list[WatchedEngine], timeout_s: float
) -> Iterator[Pair]:
    members = [
        ring_member(rank, peers, engines[rank], timeout_s)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    records = [MessageRecord(), MessageRecord()]
    for each, record in zip(members, records, strict=True):
        each.start(record)
    until(lambda: all(len(m.reachable()) == 1 for m in members), "both are there")
    yield members, records
    for record in records:
        record.open.set()
    for each in members:
        each.close()


def part_written(**changes: int) -> PartWritten:
    fields: dict[str, int] = {"section": 0, "size": 64, "checksum": 0, "took_us": 1}
    return PartWritten(PART, **fields | changes)


@pytest.mark.parametrize(
    "lie",
    [
        part_written(),  # nothing of that checksum was written
        part_written(section=SECTIONS),
        part_written(size=0),
        part_written(size=MAX_PART_BYTES + 1),
    ],
    ids=["checksum", "section", "nothing", "size"],
)
def test_mooncake_transport_invalid_message_reconnects_undelivered(
    pair: Pair, lie: PartWritten
) -> None:
    members, records = pair
    members[0].send(1, lie)
    until(lambda: records[1].gone == [0], "it is not talked to any more")
    assert records[1].heard == []
    until(lambda: all(len(m.reachable()) == 1 for m in members), "they meet anew")
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: records[1].heard, "and go on")
    assert records[1].heard[0][2] == DATA


def test_runahead_transport_kv_changed_on_the_way_is_not_delivered(
    pair: Pair, engines: list[WatchedEngine]
) -> None:
    members, records = pair

    def spoil(session: str, source: int, destination: int, size_bytes: int) -> None:
        engine(0).write(session, source, destination, size_bytes)
        (ctypes.c_ubyte * size_bytes).from_address(destination)[7] ^= 4  # both are this process

    engines[0].on_write = spoil
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: records[1].gone, "the receiver ends it")
    assert records[1].heard == []


@pytest.mark.parametrize("timeout_s", [0.05])
def test_mooncake_transport_slot_still_being_written_is_not_reused(
    pair: Pair, engines: list[WatchedEngine]
) -> None:
    members, records = pair
    let_go = threading.Event()
    sections: list[int] = []

    def sent() -> bool:
        with contextlib.suppress(PeerGone):  # `timeout_s` is little on a busy machine
            members[0].send_part(1, PART, memoryview(DATA))
            return True
        return False

    def slow(session: str, source: int, destination: int, size_bytes: int) -> None:
        sections.append(destination)
        let_go.wait(WAIT_S)
        engine(0).write(session, source, destination, size_bytes)

    engines[0].on_write = slow
    for _ in range(SECTIONS + 2):
        with pytest.raises(PeerGone):
            members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: len(sections) >= SECTIONS, "the engine has them")
    assert len(sections) == len(set(sections)) == SECTIONS  # each once; then nobody wrote
    # They part: the sections stay taken.
    members[1].send(0, part_written(section=SECTIONS))
    until(lambda: records[0].gone, "they part")
    until(lambda: members[0].reachable(), "they meet")
    with pytest.raises(PeerGone):
        members[0].send_part(1, PART, memoryview(DATA))
    assert len(sections) == SECTIONS
    let_go.set()
    engines[0].on_write = engine(0).write
    until(sent, "it goes on")
    until(lambda: records[1].heard, "all is well")
    assert [data for _, _, data in records[1].heard] == [DATA]  # what was late is nobody's


def test_mooncake_transport_restarted_peer_receives_at_its_new_address(
    pair: Pair, peers: list[tuple[str, int]]
) -> None:
    members, records = pair
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: records[1].heard, "the part")
    members[1].close()
    until(lambda: records[0].gone == [1], "it is gone")
    with pytest.raises(PeerGone):
        members[0].send_part(1, PART, memoryview(DATA))
    with started(ring_member(1, peers, engine(1))) as (record,):
        until(lambda: members[0].reachable() == {1}, "it is back")
        members[0].send_part(1, PART, memoryview(DATA))
        until(lambda: record.heard, "the part")
        assert record.heard[0][2] == DATA


def test_mooncake_transport_member_with_another_transport_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = addresses(2)
    plain, other = member(0, peers), ring_member(1, peers, engine(1))
    with started(plain, other):
        until(lambda: caplog.text.count("its namespace is another one") >= 2, "both say so")
        assert plain.reachable() == other.reachable() == frozenset()


def test_mooncake_transport_credit_for_an_unknown_slot_is_ignored(pair: Pair) -> None:
    members, records = pair
    members[1].send(0, Credit(2**31 - 1))
    members[0].send_part(1, PART, memoryview(DATA))
    until(lambda: records[1].heard, "the part")
    assert records[1].heard[0][2] == DATA


@pytest.mark.usefixtures("pair")
def test_mooncake_engine_reaches_no_memory_but_its_slots(engines: list[WatchedEngine]) -> None:
    other = ctypes.create_string_buffer(DATA, MAX_PART_BYTES)
    _, source = engines[0].buffers  # parts are copied there before they are written
    received, _ = engines[1].buffers
    session = engine(1).session
    engine(0).write(session, source, received, 64)
    with pytest.raises(OSError, match="cannot write"):
        engine(0).write(session, source, ctypes.addressof(other), 64)
    assert other.raw[:64] == DATA
    read = engine(0).engine.transfer_sync_read
    assert read(session, source, ctypes.addressof(other), 64) != 0


def test_mooncake_transport_that_cannot_listen_gives_its_memory_back(
    engines: list[WatchedEngine], peers: list[tuple[str, int]]
) -> None:
    """Else the engine refuses later memory at the same address."""
    with socket.create_server(peers[0]), pytest.raises(OSError, match="in use"):
        ring_member(0, peers, engines[0])  # type: ignore[arg-type]
    assert engines[0].buffers
    assert sorted(engines[0].freed) == sorted(engines[0].buffers)
