"""Several stores as one: a tier that fails is left out, and comes back."""

import asyncio

import pytest
from tiering import opened_tiers, until

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.circuit_breaker import FIRST_S
from sglang_cake.stores.tiers.tier import FAILURES_IN_A_ROW
from sglang_cake.stores.wrapper_store import WrapperStore
from sglang_cake.testing.store_contract import key_of, read

DOWN = StoreUnavailable("down")


@pytest.mark.parametrize("down", [0, 1])
async def test_tiered_store_failing_tier_is_left_out_until_it_recovers(down):
    async with opened_tiers() as tiers:
        up = 1 - down
        tiers.outage[down].error = DOWN
        await tiers.fill(0, "a")
        await tiers.fill(1, "a")
        for _ in range(10):
            await tiers.store.contains([key_of("a")])
        assert len(tiers.calls[down].keys_of("contains")) == FAILURES_IN_A_ROW
        await tiers.read("a")
        assert tiers.calls[down].keys_of("get") == []
        assert len(tiers.calls[up].keys_of("get")) == 1

        tiers.outage[down].error = None
        await tiers.store.contains([key_of("a")])
        assert len(tiers.calls[down].keys_of("contains")) == FAILURES_IN_A_ROW, "not yet"
        tiers.clock.now_s += FIRST_S
        await tiers.store.contains([key_of("a")])
        await until(lambda: tiers.store.tiers[down].reading.is_closed)
        stats = await tiers.store.stats()
        assert [tier.reading for tier in stats.tiers] == [True, True]
        assert stats.tiers[down].counts["left_out"] == 1


async def test_tiered_store_only_holder_of_a_block_is_tried_after_backoff():
    async with opened_tiers() as tiers:
        await tiers.fill(1, "a")
        await tiers.store.contains([key_of("a")])
        tiers.outage[1].error = DOWN
        for _ in range(FAILURES_IN_A_ROW + 2):
            with pytest.raises(StoreUnavailable):
                await read(tiers.store, key_of("a"))
        assert len(tiers.calls[1].keys_of("get")) == FAILURES_IN_A_ROW
        tiers.outage[1].error = None
        tiers.clock.now_s += FIRST_S
        await tiers.read("a")


async def test_tiered_store_tier_that_refuses_writes_is_still_read():
    async with opened_tiers() as tiers:

        class ReadOnly(WrapperStore):
            async def put(self, key, data):
                raise StoreUnavailable("read-only")

        await tiers.fill(0, "old")
        tiers.store.tiers[0].store = ReadOnly(tiers.calls[0])
        for name in range(2 * FAILURES_IN_A_ROW):
            await tiers.put(name)
        stats = await tiers.store.stats()
        assert not stats.tiers[0].writing
        assert stats.tiers[0].reading
        assert await tiers.store.contains([key_of("old")]) == [True]
        await tiers.read("old")


async def test_tiered_store_tier_with_the_wrong_number_of_answers_is_left_out():
    async with opened_tiers() as tiers:

        class Short(WrapperStore):
            async def contains(self, keys):
                return (await super().contains(keys))[1:]

        await tiers.fill(1, "a")
        tiers.store.tiers[0].store = Short(tiers.calls[0])
        for _ in range(FAILURES_IN_A_ROW):
            assert await tiers.store.contains([key_of("a")]) == [True]
        stats = await tiers.store.stats()
        assert [tier.reading for tier in stats.tiers] == [False, True]


async def test_tiered_store_failed_lower_tier_gets_no_copies_until_healed():
    async with opened_tiers() as tiers:
        tiers.outage[1].error = DOWN
        for name in range(FAILURES_IN_A_ROW):
            await tiers.put(name)
            await tiers.quiet()
        await tiers.put("while out")
        assert (await tiers.counts(1))["left_out_blocks"] == 1
        tiers.outage[1].error = None
        tiers.clock.now_s += FIRST_S
        await tiers.put("after")
        await tiers.until_holds(1, "after")
        assert not await tiers.holds(1, "while out")


async def test_tiered_store_put_does_not_wait_for_a_probe():
    async with opened_tiers(drain_s=0.0) as tiers:
        tiers.outage[0].error = DOWN
        for name in range(FAILURES_IN_A_ROW):
            await tiers.put(name)
        tiers.outage[0].error = None
        tiers.outage[0].hangs = True
        tiers.clock.now_s += FIRST_S
        asked = len(tiers.calls[0].keys_of("put"))
        await asyncio.wait_for(tiers.put("a"), 60)
        await until(lambda: len(tiers.calls[0].keys_of("put")) == asked + 1)
