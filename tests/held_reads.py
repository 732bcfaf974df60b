"""A store in memory whose reads a test holds and opens, and the I/O thread that calls it."""

import asyncio
from collections.abc import Mapping
from typing import Any

from faulty_stores import FaultyStore, SlowStore

from sglang_cake.core.keys import BlockKey
from sglang_cake.core.threads import IoThread
from sglang_cake.testing.memory_store import MemoryStore

PATIENCE_S = 60.0


class HeldReads:
    """Attributes:
    io: the I/O thread.
    memory, slow, faulty: the blocks, the store that holds reads of them, and the one in front of
        it that fails for chosen keys.
    """

    def __init__(self, io: Any = None) -> None:
        """Args: io: in place of a thread of its own."""
        self.io = io or IoThread()
        self.memory = MemoryStore()
        self.slow = SlowStore(self.memory)
        self.faulty = FaultyStore(self.slow)

    def store(self, blocks: Mapping[BlockKey, bytes]) -> None:
        async def put() -> None:
            for key, block in blocks.items():
                await self.memory.put(key, memoryview(block))

        self.io.run(put(), PATIENCE_S)

    def settle(self) -> None:
        """Return when nothing more happens in the I/O thread by itself."""

        async def quiet() -> None:
            for _ in range(30):
                await asyncio.sleep(0)

        self.io.run(quiet(), PATIENCE_S)

    def open(self, *keys: BlockKey) -> None:
        """Let the reads of these keys go on, the waiting ones and later ones."""

        async def release() -> None:
            self.slow.release(*keys)

        self.io.run(release(), PATIENCE_S)
        self.settle()
