"""The contract of a store: bytes by key. Every implementation passes `testing.store_contract`."""

from collections.abc import Sequence
from typing import Protocol

from sglang_cake.keys import BlockKey


class Store(Protocol):
    """Async blocks by key, within one namespace.

    Every method is safe to cancel: a cancelled `put` leaves either the whole block or nothing
    visible, a cancelled `get_into` leaves `out` undefined and the store unchanged.
    """

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of `keys` are probably stored. A yes may still turn out missing on `get_into`.

        Raises: StoreUnavailable.
        """
        ...

    async def get_into(self, key: BlockKey, out: memoryview) -> None:
        """Fill `out` (caller-owned, writable, exactly one block long) with checked bytes.

        Raises: BlockMissing, BlockCorrupt, StoreUnavailable; `out` is then undefined.
        """
        ...

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """Store one block; False if it was there already. `data` is not kept after the return.

        Raises: StoreUnavailable (full, read-only, gone); nothing is visible then.
        """
        ...

    async def delete(self, key: BlockKey) -> None:
        """Forget one block; forgetting an unknown one is no error. Raises: StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Release files and threads. Later calls raise StoreUnavailable."""
        ...
