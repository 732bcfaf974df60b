"""Parts from process to process by memory that the receiver lends: as between GPUs, without any."""

import multiprocessing
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest

pytest.importorskip("torch")

from host_ipc import HostIpc
from members import JOB, WAIT_S, MessageRecord, addresses, ring_group, ring_member, started
from polling import until
from system_calls import stop_child

from sglang_cake.integration.runahead.runahead_ipc import read, spelled
from sglang_cake.runahead.messages import (
    MAX_PART_BYTES,
    MAX_SESSION_CHARACTERS,
    LayerPart,
    PeerGone,
)
from sglang_cake.runahead.one_sided_transport import SECTIONS

HANDLE = (0, bytes(64), 2**24, 512, b"/torch_1_2_3", 7, bytes(range(64)), True)


def other_process(peers: list[tuple[str, int]], pipe: Connection) -> None:
    """Takes parts until it is told, and one a time."""
    record = MessageRecord()
    here = ring_member(1, peers, HostIpc(1))
    here.start(record)
    pipe.send("started")
    while True:
        wanted = pipe.recv()
        until(lambda wanted=wanted: len(record.heard) >= wanted, "parts")
        pipe.send([data[:4] for _, _, data in record.heard])
        record.open.clear()  # from now on nothing is taken


def test_ipc_transport_killed_process_ends_the_waiting_sender() -> None:
    peers = addresses(2)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=other_process, args=(peers, theirs), daemon=True
    )
    child.start()
    record = MessageRecord()
    here = ring_member(0, peers, HostIpc(1))
    try:
        assert ours.poll(4 * WAIT_S)
        assert ours.recv() == "started"
        here.start(record)  # so it dials at once, and not after pauses
        until(lambda: here.reachable() == {1}, "the other process is there")
        data = bytearray(MAX_PART_BYTES)
        for layer in range(5):
            data[:4] = bytes([layer]) * 4
            here.send_part(1, LayerPart(JOB, layer, 0, 1), memoryview(data))
        ours.send(5)
        assert ours.poll(WAIT_S)
        assert ours.recv() == [bytes([layer]) * 4 for layer in range(5)]
        assert child.pid is not None
        stop_child(child.pid)  # from now on no section is given back

        def send() -> None:
            for layer in range(SECTIONS + 1):
                here.send_part(1, LayerPart(JOB, layer, 0, 1), memoryview(data))

        threading.Timer(0.5, child.kill).start()
        with pytest.raises(PeerGone):
            send()
        until(lambda: record.gone == [1], "it is told as gone")
    finally:
        child.kill()
        here.close()


class Failing(HostIpc):
    """Its next operations fail, one after the other."""

    def __init__(self) -> None:
        super().__init__(1)
        self.fill_fails = self.write_fails = 0

    def fill(self, section: Any, data: Any) -> None:
        self.fill_fails -= 1
        if self.fill_fails >= 0:
            raise RuntimeError("a device says it")
        super().fill(section, data)

    def write(self, *arguments: Any) -> None:
        self.write_fails -= 1
        if self.write_fails >= 0:
            raise RuntimeError("an engine says it")
        super().write(*arguments)


def test_ipc_transport_raising_engine_loses_no_slot() -> None:
    engines = [Failing(), Failing()]
    members = ring_group(2, lambda rank: engines[rank])
    with started(*members) as records:
        until(lambda: all(each.reachable() for each in members), "both are there")
        part, data = LayerPart(JOB, 0, 0, 1), memoryview(bytes(64))
        engines[0].write_fails = SECTIONS + 1
        for _ in range(SECTIONS + 1):
            with pytest.raises(PeerGone):
                members[0].send_part(1, part, data)
        engines[0].fill_fails = SECTIONS + 1
        for _ in range(SECTIONS + 1):
            with pytest.raises(RuntimeError, match="a device says it"):
                members[0].send_part(1, part, data)
        members[0].send_part(1, part, data)
        until(lambda: len(records[1].heard) == 1, "the part")


def test_ipc_handle_round_trip_keeps_every_field() -> None:
    assert tuple(read(spelled(HANDLE))) == HANDLE
    assert len(spelled(HANDLE)) < MAX_SESSION_CHARACTERS


NONE = ["", "7", "[]", "[1", "[1,2,3,4,5,6,7,8]", "[1,[],3,4,5,6,7,8]"]


@pytest.mark.parametrize("text", [*NONE, spelled(HANDLE).replace("true", '"yes"')])
def test_ipc_handle_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no handle"):
        read(text)
