"""A virtual store that fails after its first reads."""

import asyncio
from collections.abc import Sequence

from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockMissing, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.testing.virtual_gpu import VirtualStore


class FailingStore(VirtualStore):
    """Attributes:
    fault: of all reads but the first 10.
    pause_s: with the fault "paused", reads that begin in this time end after it.
    lookups_hang: lookups do not end.
    """

    fault = ""
    reads = 0
    pause_s = (0.0, 0.0)
    lookups_hang = False

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self.lookups_hang:
            await asyncio.Event().wait()
        return await super().contains(keys)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        self.reads += 1
        if self.fault and self.reads > 10:
            if self.fault == "silent":
                await asyncio.Event().wait()
            if self.fault == "paused":
                begin_s, end_s = self.pause_s
                if begin_s <= self._io.now_s:
                    await asyncio.sleep(end_s - self._io.now_s)
                return await super().get_into(key, out, progress)
            raise BlockMissing("evicted") if self.fault == "lost" else StoreUnavailable("broken")
        return await super().get_into(key, out, progress)
