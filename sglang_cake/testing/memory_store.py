"""A store in a dict."""

from collections.abc import AsyncIterator, Sequence

from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockMissing, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo, Store, StoreStats


class MemoryStore(Store):
    """Implements `Store` without waiting. Unbounded.

    Attributes:
        blocks: payload by key.
    """

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, bytes] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self.blocks)

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._check_open()
        return [key in self.blocks for key in keys]

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        self._check_open()
        block = self.blocks.get(key)
        if block is None:
            raise BlockMissing(key.hex())
        if progress is not None:
            progress(0)
        out.cast("B")[: len(block)] = block
        if progress is not None:
            progress(len(block))
        return len(block)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        self._check_open()
        if key in self.blocks:
            return False
        self.blocks[key] = bytes(data)
        return True

    async def delete(self, key: BlockKey) -> None:
        self._check_open()
        self.blocks.pop(key, None)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        self._check_open()
        for key, block in list(self.blocks.items()):
            yield BlockInfo(key, len(block))

    async def stats(self) -> StoreStats:
        self._check_open()
        held_bytes = sum(map(len, self.blocks.values()))
        return StoreStats(len(self.blocks), held_bytes, held_bytes)

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")
