"""A client of Mooncake Store: the only place that talks to its C++ library."""

import ctypes
import mmap
import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mooncake.store import MooncakeDistributedStore

from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

CONNECT_TIMEOUT_S = 2.0
LOCAL_BUFFER_BYTES = 2**24  # the library's own, which no call of ours uses

# What the library's calls return beside a count of bytes (its types.h).
OK, NO_ROOM, TOO_LONG, NOT_READY, NOT_FOUND, EXISTS = 0, -200, -600, -703, -704, -705


@dataclass(frozen=True, slots=True)
class MooncakePlace:
    """Where a Mooncake Store is, and what this process adds to it."""

    host: str  # of the master
    port: int
    segment_bytes: int  # memory that this process lends to the store; 0: none
    metadata: str = "P2PHANDSHAKE"  # or a metadata server's URL
    protocol: str = "tcp"
    device: str = ""  # RDMA devices, separated by commas; empty: the library chooses
    local_hostname: str | None = None  # how others reach this process; None: as the master does


@dataclass(frozen=True, slots=True)
class Slot:
    """Registered memory for one framed block."""

    address: int
    view: memoryview


class Slots:
    """Memory for a few framed blocks, which the engine reads and writes directly.

    It stays mapped as long as this lives: after a failed transfer the engine may still use it. A
    block that is damaged by that is noticed, since it is checked where it was copied to.
    """

    def __init__(self, count: int, framed_bytes: int) -> None:
        stride = -(-framed_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, count * stride)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.bytes = len(self._memory)
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for start in range(0, self.bytes, stride):
            view = memoryview(self._memory)[start : start + framed_bytes]
            self._free.put(Slot(self.address + start, view))

    @contextmanager
    def one(self) -> Iterator[Slot]:
        """A slot for the time being; waits for one."""
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)


class Engine:
    """One client. All calls block, release the GIL, and end after about 30 s at the latest.

    They may be made from any thread, but never during `close` or after it: the library crashes.
    """

    def __init__(self, place: MooncakePlace, slots: Slots) -> None:
        """Join the store. Raises: StoreUnavailable."""
        # The library would try for minutes.
        try:
            with socket.create_connection((place.host, place.port), CONNECT_TIMEOUT_S) as probe:
                reached_from = str(probe.getsockname()[0])
        except OSError as error:
            raise StoreUnavailable(
                f"Mooncake's master at {place.host}:{place.port}: {error}"
            ) from error
        self._client: Any = MooncakeDistributedStore()
        code = self._client.setup(
            place.local_hostname or reached_from,
            place.metadata,
            place.segment_bytes,
            LOCAL_BUFFER_BYTES,
            place.protocol,
            place.device,
            f"{place.host}:{place.port}",
        )
        if code == OK:
            code = self._client.register_buffer(slots.address, slots.bytes)
        if code != OK:
            self._client.close()
            raise StoreUnavailable(f"Mooncake: joining the store failed with {code}")

    def exist(self, names: list[str]) -> list[bool]:
        """Which objects there are, in one round trip. Raises: StoreUnavailable."""
        answers: list[int] = self._client.batch_is_exist(names)
        for answer in answers:
            if answer < 0:
                raise failure("asking for blocks", answer)
        return [answer == 1 for answer in answers]

    def get_into(self, name: str, slot: Slot) -> int:
        """Fill `slot`; returns the bytes. Raises: BlockMissing, BlockCorrupt, StoreUnavailable."""
        code = int(self._client.get_into(name, slot.address, len(slot.view)))
        if code < 0:
            raise failure("reading a block", code)
        return code

    def put_new(self, name: str, slot: Slot, size_bytes: int) -> bool:
        """Store the start of `slot`. False: there was an object of that name, which stays.

        Not always noticed when two put it at once. Raises: StoreFull, StoreUnavailable.
        """
        code = int(self._client.put_from(name, slot.address, size_bytes))
        if code == NO_ROOM:
            raise StoreFull("Mooncake has no memory for the block")
        if code not in (OK, EXISTS):
            raise StoreUnavailable(f"Mooncake: storing a block failed with {code}")
        return code == OK

    def remove(self, name: str) -> None:
        """Forget an object, if there is one, also while others read it."""
        code = int(self._client.remove(name, True))
        if code not in (OK, NOT_FOUND):
            raise StoreUnavailable(f"Mooncake: forgetting a block failed with {code}")

    def close(self) -> None:
        """Leave the store, and take away what this process has lent to it."""
        self._client.close()


def failure(doing: str, code: int) -> StoreError:
    """The error that a code of the library means."""
    if code in (NOT_FOUND, NOT_READY):  # the latter is being put
        return BlockMissing(f"Mooncake: {code}")
    if code == TOO_LONG:
        return BlockCorrupt("Mooncake: the object is longer than a block")
    return StoreUnavailable(f"Mooncake: {doing} failed with {code}")
