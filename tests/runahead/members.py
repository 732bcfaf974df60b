"""Groups of members for tests, and a handler that records messages and parts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from sglang_cake.core.keys import Digest
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.runahead.messages import LayerPart, Message
from sglang_cake.runahead.mooncake_engine import MooncakeEngine
from sglang_cake.runahead.one_sided_transport import OneSidedTransport, WriteEngine, apart
from sglang_cake.runahead.zeromq import LinkTimes, ZmqTransport

SECRET = bytes(range(100, 132))
NAMESPACE = Digest(bytes(range(32)))
WAIT_S = 60.0  # for what takes milliseconds; generous, for machines that are busy
JOB = "0123456789abcdef" * 2
PATIENT = LinkTimes(silence_s=WAIT_S, send_s=WAIT_S)  # two slow cores


class MessageRecord:
    """Records everything; while `open` is cleared, it blocks parts."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Message | LayerPart, bytes]] = []
        self.gone: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.holds = threading.Event()  # a part waits, or has waited

    def on_message(self, rank: int, message: Message) -> None:
        self.heard.append((rank, message, b""))

    def on_part(self, rank: int, part: LayerPart, data: memoryview) -> None:
        if not self.open.is_set():
            self.holds.set()
        self.open.wait(WAIT_S)
        self.heard.append((rank, part, np.asarray(data).tobytes()))

    def on_gone(self, rank: int, reason: str) -> None:
        self.gone.append(rank)


def addresses(size: int) -> list[tuple[str, int]]:
    return [("127.0.0.1", free_port()) for _ in range(size)]


def member(
    rank: int,
    peers: list[tuple[str, int]],
    kind: type[ZmqTransport] = ZmqTransport,
    **changes: Any,
) -> ZmqTransport:
    settings: dict[str, Any] = {"secret": SECRET, "namespace": NAMESPACE, "times": PATIENT}
    return kind(rank, peers, **settings | changes)


@contextmanager
def started(*members: ZmqTransport) -> Iterator[list[MessageRecord]]:
    """What each of these members hears; at the end they are closed."""
    records = [MessageRecord() for _ in members]
    for each, record in zip(members, records, strict=True):
        each.start(record)
    try:
        yield records
    finally:
        for each in members:
            each.close()


def zeromq_group(size: int) -> list[ZmqTransport]:
    peers = addresses(size)
    return [member(rank, peers) for rank in range(size)]


@cache
def engine(rank: int) -> MooncakeEngine:
    """As of a process of its own; ending one takes a second, so they last."""
    return MooncakeEngine("127.0.0.1")


def mooncake_group(size: int) -> list[ZmqTransport]:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    return ring_group(size, engine)


def ring_group(size: int, engine_of: Callable[[int], WriteEngine]) -> list[ZmqTransport]:
    engines = [engine_of(rank) for rank in range(size)]  # they listen, so their ports are not free
    peers = addresses(size)
    return [ring_member(rank, peers, engines[rank]) for rank in range(size)]


def ring_member(
    rank: int, peers: list[tuple[str, int]], engine: WriteEngine, timeout_s: float = WAIT_S
) -> OneSidedTransport:
    return OneSidedTransport(
        rank,
        peers,
        engine,
        secret=SECRET,
        namespace=apart(NAMESPACE, "one-sided"),
        times=replace(PATIENT, send_s=timeout_s),
    )


def ipc_group(size: int) -> list[ZmqTransport]:
    pytest.importorskip("torch")
    from host_ipc import HostIpc

    return ring_group(size, lambda rank: HostIpc(size - 1))


GROUPS = {
    "tcp": zeromq_group,
    "mooncake": mooncake_group,
    "ipc": ipc_group,
}
