"""Random calls, outages, losses: a tiered store finds what a healthy tier has, and never lies."""

import asyncio

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from polling import async_until
from tiering import BLOCK, Tiers

from sglang_cake.core.errors import BlockMissing, StoreUnavailable
from sglang_cake.stores.circuit_breaker import LAST_S
from sglang_cake.testing.store_contract import block_of, key_of, read

NAMES = st.integers(0, 4)
TIERS = st.integers(0, 2)


class Machine(RuleBasedStateMachine):
    @initialize(room=st.sampled_from([0, 3 * BLOCK, 100 * BLOCK]))
    def open(self, room):
        self.loop = asyncio.new_event_loop()
        self.tiers = Tiers(3, copy_bytes=room)

    def call(self, awaitable):
        self.tiers.clock.now_s += LAST_S + 1  # a probe is due wherever one is needed
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, 60))

    def up(self):
        return [i for i in range(3) if self.tiers.outage[i].error is None]

    def holders(self, name, among):
        return [i for i in among if key_of(name) in self.tiers.memory[i].blocks]

    @rule(name=NAMES)
    def put(self, name):
        before = self.holders(name, range(3))
        try:
            fresh = self.call(self.tiers.store.put(key_of(name), block_of(name)))
        except StoreUnavailable:
            assert not self.up()
        else:
            assert self.holders(name, self.up())
            assert fresh or before

    @rule(name=NAMES)
    def get(self, name):
        findable = self.holders(name, self.up())
        try:
            got = self.call(read(self.tiers.store, key_of(name)))
        except (BlockMissing, StoreUnavailable):
            assert not findable
        else:
            assert got == block_of(name)
            assert findable

    @rule(names=st.lists(NAMES, max_size=6))
    def look_up(self, names):
        keys = [key_of(name) for name in names]
        waited_for = [i for i in self.up() if self.tiers.store.tiers[i].serves]
        try:
            found = self.call(self.tiers.store.contains(keys))
        except StoreUnavailable:  # a tier that was left out is tried, and not waited for
            assert not waited_for
            self.call(async_until(lambda: not self.tiers.store.given_up_calls))
            return
        for name, there in zip(names, found, strict=True):
            assert self.holders(name, self.up()) or not there
        self.call(async_until(lambda: not self.tiers.store.given_up_calls))
        for tier in self.tiers.store.tiers:
            assert tier.asking.is_closed or tier.index not in self.up()
        serving = [i for i in self.up() if self.tiers.store.tiers[i].serves]
        for i in set(self.up()) - set(serving):  # reads failed, and there was nothing to try
            assert not any(self.holders(name, [i]) for name in names)
        if serving:
            found = self.call(self.tiers.store.contains(keys))
            assert found == [bool(self.holders(name, self.up())) for name in names]

    @rule(name=NAMES)
    def delete(self, name):
        try:
            self.call(self.tiers.store.delete(key_of(name)))
        except StoreUnavailable:
            assert len(self.up()) < 3
        else:
            assert len(self.up()) == 3
        self.call(self.tiers.quiet())
        assert not self.holders(name, self.up())

    @rule(name=NAMES, tier=TIERS)
    def lose(self, name, tier):
        """Evicted, behind our back."""
        self.tiers.memory[tier].blocks.pop(key_of(name), None)

    @rule(tier=TIERS, error=st.sampled_from([StoreUnavailable("down"), RuntimeError("a bug")]))
    def break_down(self, tier, error):
        self.tiers.outage[tier].error = error

    @rule(tier=TIERS)
    def heal(self, tier):
        self.tiers.outage[tier].error = None

    @rule(name=NAMES, ticks=st.integers(0, 4), what=st.sampled_from(["put", "get", "delete"]))
    def cancel(self, name, ticks, what):
        async def start_and_cancel():
            store, out = self.tiers.store, bytearray(BLOCK)
            task = asyncio.ensure_future(
                {
                    "put": lambda: store.put(key_of(name), block_of(name)),
                    "get": lambda: store.get_into(key_of(name), memoryview(out)),
                    "delete": lambda: store.delete(key_of(name)),
                }[what]()
            )
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()

        self.call(start_and_cancel())

    @rule()
    def settle(self):
        self.call(self.tiers.quiet())

    @invariant()
    def what_is_kept_is_what_was_put(self):
        for memory in self.tiers.memory:
            for name in range(5):
                assert memory.blocks.get(key_of(name), block_of(name)) == block_of(name)

    @invariant()
    def links_know_that_nothing_is_under_way(self):
        assert [tier.link.bytes_under_way for tier in self.tiers.store.tiers] == [0, 0, 0]

    def teardown(self):
        self.call(self.tiers.store.close())
        for tier in self.tiers.store.tiers:
            assert tier.copies.buffers.free == tier.copies.buffers.capacity
        self.loop.close()


class BehindMemory(Machine):
    """The first tier is host memory for three blocks, so what was put is evicted all the time."""

    @initialize()
    def open(self):
        self.loop = asyncio.new_event_loop()
        self.tiers = Tiers(3, room=3, copy_bytes=0)

    @rule(tier=st.integers(1, 2), error=st.sampled_from([StoreUnavailable("down")]))
    def break_down(self, tier, error):
        self.tiers.outage[tier].error = error

    @invariant()
    def memory_has_at_most_three_blocks(self):
        assert len(self.tiers.memory[0].blocks) <= 3

    def teardown(self):
        self.call(self.tiers.quiet())
        assert self.tiers.memory[0].blocks.held() == []
        super().teardown()


SETTINGS = settings(
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestTiers = Machine.TestCase
TestTiers.settings = SETTINGS
TestTiersBehindMemory = BehindMemory.TestCase
TestTiersBehindMemory.settings = SETTINGS
