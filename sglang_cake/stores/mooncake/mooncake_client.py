"""A client of Mooncake Store. Only this module calls its C++ library."""

import socket
from dataclasses import dataclass
from typing import Any

from sglang_cake.core.buffers import HostArena, address_of
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

CONNECT_TIMEOUT_S = 2.0
LOCAL_BUFFER_BYTES = 2**24  # of the library itself; unused by these calls

# Results of the library (its types.h). Other results are errors, or numbers of bytes.
OK = 0
NO_ROOM = -200
TOO_LONG = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705


@dataclass(frozen=True, slots=True)
class MooncakePlace:
    """Where a Mooncake Store is, and what this process adds to it."""

    host: str  # of the master
    port: int
    segment_bytes: int  # memory that this process lends to the store; 0: none
    metadata: str = "P2PHANDSHAKE"  # or a metadata server's URL
    protocol: str = "tcp"
    device: str = ""  # RDMA devices, separated by commas; empty: chosen by the library
    local_hostname: str | None = None  # for peers; None: as seen by the master


class MooncakeClient:
    """One client of the store. Thread-safe, except `close`.

    All calls block, release the GIL, and end after about 30 s at the latest. A call during or after
    `close` crashes the library.
    """

    def __init__(self, place: MooncakePlace, memory: HostArena) -> None:
        """Join the store.

        Args: memory: of the views below. The library may still use it after a failed transfer.
        Raises: StoreUnavailable.
        """
        # Tested first, since the library would try for minutes.
        try:
            with socket.create_connection((place.host, place.port), CONNECT_TIMEOUT_S) as probe:
                reached_from = str(probe.getsockname()[0])
        except OSError as error:
            raise StoreUnavailable(
                f"Mooncake's master at {place.host}:{place.port}: {error}"
            ) from error
        from mooncake.store import MooncakeDistributedStore  # needs libibverbs

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
            code = self._client.register_buffer(memory.address, memory.size_bytes)
        if code != OK:
            self._client.close()
            raise StoreUnavailable(f"Mooncake: joining the store failed with {code}")

    def exist(self, names: list[str]) -> list[bool]:
        """Which objects exist, in one round trip. Raises: StoreUnavailable."""
        answers: list[int] = self._client.batch_is_exist(names)
        for answer in answers:
            if answer < 0:
                raise failure("asking for blocks", answer)
        return [answer == 1 for answer in answers]

    def get_into(self, name: str, view: memoryview) -> int:
        """Fill registered memory; returns the number of bytes.

        Raises: BlockMissing, BlockCorrupt, StoreUnavailable.
        """
        code = int(self._client.get_into(name, address_of(view), len(view)))
        if code < 0:
            raise failure("reading a block", code)
        return code

    def put_new(self, name: str, view: memoryview) -> bool:
        """Store registered memory. False: an object of that name exists, and stays.

        Of two concurrent puts of a name both may return True. Raises: StoreFull, StoreUnavailable.
        """
        code = int(self._client.put_from(name, address_of(view), len(view)))
        if code == NO_ROOM:
            raise StoreFull("Mooncake has no memory for the block")
        if code not in (OK, EXISTS):
            raise StoreUnavailable(f"Mooncake: storing a block failed with {code}")
        return code == OK

    def remove(self, name: str) -> None:
        """Remove an object, if it exists, also while others read it."""
        code = int(self._client.remove(name, True))
        if code not in (OK, NOT_FOUND):
            raise StoreUnavailable(f"Mooncake: forgetting a block failed with {code}")

    def close(self) -> None:
        """Leave the store, and take back the memory that this process lent to it."""
        self._client.close()


def failure(doing: str, code: int) -> StoreError:
    """The error for a result of the library."""
    if code in (NOT_FOUND, NOT_READY):  # the latter: the put has not ended
        return BlockMissing(f"Mooncake: {code}")
    if code == TOO_LONG:
        return BlockCorrupt("Mooncake: the object is longer than a block")
    return StoreUnavailable(f"Mooncake: {doing} failed with {code}")
