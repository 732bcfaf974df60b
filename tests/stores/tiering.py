"""What the tests of tiered stores share."""

import contextlib
from collections.abc import MutableMapping

from faulty_stores import OutageStore, RecordingStore
from polling import async_until

from sglang_cake.core.buffers import PAGE_BYTES
from sglang_cake.stores.eviction.tenants import NO_TENANT_RULES
from sglang_cake.stores.memory.block_memory import BlockMemory
from sglang_cake.stores.memory.host_memory_store import HostMemoryStore
from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, LAYOUT, block_of, key_of, read

BLOCK = LAYOUT.block_bytes


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class HeldBlocks(MutableMapping):
    """The blocks of a `BlockMemory`, as those of a `MemoryStore`."""

    def __init__(self, memory):
        self.memory = memory

    def __getitem__(self, key):
        block = self.memory.use(FRAME.digest, key, counts=False)
        if block is None:
            raise KeyError(key)
        try:
            return bytes(block.data)
        finally:
            self.memory.release(block)

    def __delitem__(self, key):
        self.memory.delete(FRAME.digest, key)

    def __iter__(self):
        return iter([block.key for block in self.memory.list_blocks(FRAME.digest)])

    def __len__(self):
        return self.memory.stats().blocks

    def __setitem__(self, key, data):
        raise NotImplementedError

    def held(self):
        """The blocks that somebody reads, or that a tier below is yet to get."""
        found = [self.memory.use(FRAME.digest, key, counts=False) for key in self]
        for block in found:
            self.memory.release(block)
        return [block.key for block in found if block.users or block.unwritten]


class Tiers:
    """A tiered store over memory stores that a test can look into, break and heal.

    With `room`, the first one is host memory for so many blocks, which cannot be broken.
    """

    def __init__(
        self, count=2, room=0, *, late_answer_s=30.0, drain_s=TieredStore.drain_s, **options
    ):
        self.memory = [MemoryStore() for _ in range(count)]
        self.outage = [OutageStore(store) for store in self.memory]
        self.calls = [RecordingStore(store) for store in self.outage]
        if room:
            memory = BlockMemory(
                capacity_bytes=room * PAGE_BYTES,
                block_bytes=BLOCK,
                policy="lru",
                tenant_rules=NO_TENANT_RULES,
            )
            self.calls[0] = HostMemoryStore(memory, memory.close, FRAME, threads=2)
            self.memory[0].blocks = HeldBlocks(memory)
        self.clock = Clock()
        options = {"clock": self.clock, "block_bytes": BLOCK} | options
        self.store = TieredStore(self.calls, **options)
        self.store.late_answer_s, self.store.drain_s = late_answer_s, drain_s

    async def put(self, *names):
        for name in names:
            assert await self.store.put(key_of(name), block_of(name))

    async def fill(self, tier, *names):
        for name in names:
            await self.memory[tier].put(key_of(name), block_of(name))

    async def read(self, name):
        """Read one block, with or without a lookup before: the answer must be its own."""
        assert await read(self.store, key_of(name)) == block_of(name)

    async def holds(self, tier, name):
        return (await self.memory[tier].contains([key_of(name)]))[0]

    async def until_holds(self, tier, *names):
        for name in names:
            await async_until(lambda name=name: key_of(name) in self.memory[tier].blocks)

    async def quiet(self):
        """Copies in the background are done."""
        await async_until(lambda: not any(tier.copies.pending for tier in self.store.tiers))

    async def counts(self, tier):
        return (await self.store.stats()).tiers[tier].counts


@contextlib.asynccontextmanager
async def opened_tiers(count=2, **options):
    """Tiers whose store is closed at the end."""
    tiers = Tiers(count, **options)
    try:
        yield tiers
    finally:
        await tiers.store.close()
