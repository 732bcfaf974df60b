"""What the tests of tiered stores share."""

import asyncio

from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.faulty import OutageStore, RecordingStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import LAYOUT, block_of, key_of, read

BLOCK = LAYOUT.block_bytes


async def until(condition):
    """Poll; the bound is only there to fail instead of hanging."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is polled for has no event
            await asyncio.sleep(0.001)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Tiers:
    """A tiered store over memory stores that a test can look into, break and heal."""

    def __init__(self, count=2, **options):
        self.memory = [MemoryStore() for _ in range(count)]
        self.outage = [OutageStore(store) for store in self.memory]
        self.calls = [RecordingStore(store) for store in self.outage]
        self.clock = Clock()
        options = {"late_answer_s": 30.0, "clock": self.clock, "block_bytes": BLOCK} | options
        self.store = TieredStore(self.calls, **options)

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
            await until(lambda name=name: key_of(name) in self.memory[tier].blocks)

    async def quiet(self):
        """Copies in the background are done."""
        await until(lambda: not any(tier.copies.pending for tier in self.store.tiers))

    async def counts(self, tier):
        return (await self.store.stats()).tiers[tier].counts


def run(test, count=2, **options):
    """Run `test(tiers)` in a loop of its own; the store is closed afterwards."""

    async def main():
        tiers = Tiers(count, **options)
        try:
            return await test(tiers)
        finally:
            await tiers.store.close()

    return asyncio.run(main())
