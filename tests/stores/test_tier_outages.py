"""Several stores as one: a tier that fails is left out, and comes back."""

import asyncio
import logging

import pytest
from polling import PATIENCE_S, async_until
from tiering import opened_tiers

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.base import WrapperStore
from sglang_cake.stores.circuit_breaker import FIRST_S, LAST_S, LATE_S
from sglang_cake.stores.tiers.tier import FAILURES_IN_A_ROW, UNKNOWN_S
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
        await async_until(lambda: tiers.store.tiers[down].serves)
        stats = await tiers.store.stats()
        assert [tier.reading for tier in stats.tiers] == [True, True]
        assert stats.tiers[down].counts["left_out"] == 1


@pytest.mark.parametrize("other", ["hangs", "fails"])
@pytest.mark.parametrize("at_once", [1, 10])
async def test_tiered_store_tier_that_hangs_is_left_out_although_no_other_answers(other, at_once):
    """It is tried again after the first pause, also if many lookups were late."""
    async with opened_tiers(late_answer_s=0.001) as tiers:
        await tiers.fill(0, "a")
        tiers.outage[0].hangs = True
        tiers.outage[1].hangs = other == "hangs"
        tiers.outage[1].error = DOWN if other == "fails" else None
        while tiers.store.tiers[0].serves:
            lookups = [tiers.store.contains([key_of("a")]) for _ in range(at_once)]
            failed = await asyncio.wait_for(
                asyncio.gather(*lookups, return_exceptions=True), PATIENCE_S
            )
            assert {*map(type, failed)} == {StoreUnavailable}
            await async_until(lambda: not tiers.store.given_up_calls)
        asked = [len(calls.keys_of("contains")) for calls in tiers.calls]
        assert asked == [max(at_once, FAILURES_IN_A_ROW)] * 2
        with pytest.raises(StoreUnavailable):
            await tiers.store.contains([key_of("a")])
        assert [len(calls.keys_of("contains")) for calls in tiers.calls] == asked
        assert [tier.reading for tier in (await tiers.store.stats()).tiers] == [False, False]

        tiers.outage[0].hangs = False
        tiers.clock.now_s += FIRST_S
        assert await tiers.store.contains([key_of("a")]) == [True]
        assert tiers.store.tiers[0].serves


@pytest.mark.parametrize("late_s", [LATE_S, UNKNOWN_S], ids=["measured", "unknown"])
async def test_tiered_store_tier_whose_reads_are_given_up_is_left_out(late_s):
    """Its lookups answer, and prompts cancel reads before any limit ends them."""

    class Hung(WrapperStore):
        async def get_into(self, key, out, progress=None):
            hung.set()
            await asyncio.Event().wait()

    async with opened_tiers() as tiers:
        for tier in (0, 1):
            await tiers.fill(tier, "a")
        await tiers.store.contains([key_of("a")])
        if late_s == LATE_S:
            await tiers.read("a")  # how long that takes is known now
        tiers.store.tiers[0].store = Hung(tiers.calls[0])
        for turn in range(2 * FAILURES_IN_A_ROW):
            hung = asyncio.Event()
            reading = asyncio.create_task(read(tiers.store, key_of("a")))
            await hung.wait()
            tiers.clock.now_s += late_s / 2 if turn % 2 else 2 * late_s
            reading.cancel()
            await asyncio.wait((reading,))
            assert reading.cancelled()
            if not tiers.store.tiers[0].serves:
                break
        assert turn == 2 * (FAILURES_IN_A_ROW - 1)
        await tiers.read("a")
        assert len(tiers.calls[1].keys_of("get")) == 1


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


async def test_tiered_store_log_names_the_calls_that_a_tier_is_left_out_of_and_back_in(caplog):
    caplog.set_level(logging.INFO, "sglang_cake")
    async with opened_tiers() as tiers:
        tiers.outage[1].error = DOWN
        for name in range(FAILURES_IN_A_ROW):
            await tiers.put(name)
            await tiers.store.contains([key_of("a")])
        await async_until(lambda: len(caplog.messages) == 2)
        tiers.outage[1].error = None
        tiers.clock.now_s += FIRST_S
        await tiers.store.contains([key_of("a")])
        await async_until(lambda: "tier 2 is back for lookups" in caplog.messages)
    lines = sorted(line for line in caplog.messages if "left out" in line)
    assert [line.split(" until")[0] for line in lines] == [
        "tier 2 is left out of lookups",
        "tier 2 is left out of writes",
    ]


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
        await async_until(lambda: len(tiers.calls[0].keys_of("put")) == asked + 1)


class FailingReads(WrapperStore):
    """Lookups work. Reads fail while `fails`."""

    def __init__(self, inner):
        super().__init__(inner)
        self.fails = True
        self.reads = 0

    async def get_into(self, key, out, progress=None):
        self.reads += 1
        if self.fails:
            raise StoreUnavailable("no reads")
        return await super().get_into(key, out, progress)


async def prompts_of(tiers, count):
    """Lookups each second, and reads of what they announce; how many reads failed."""
    failed = 0
    for _ in range(count):
        tiers.clock.now_s += FIRST_S
        await tiers.store.stats()
        keys = [key_of("a"), key_of("b")]
        for key, there in zip(keys, await tiers.store.contains(keys), strict=True):
            if there:
                try:
                    await read(tiers.store, key)
                except StoreUnavailable:
                    failed += 1
        await async_until(lambda: not tiers.store.given_up_calls)
    return failed


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_tiered_store_tier_whose_reads_fail_is_left_out_although_lookups_work(elsewhere):
    async with opened_tiers() as tiers:
        await tiers.fill(0, "a", "b")
        if elsewhere:
            await tiers.fill(1, "a", "b")
        failing = FailingReads(tiers.calls[0])
        tiers.store.tiers[0].store = failing
        failed = await prompts_of(tiers, 300)
        assert failed == (0 if elsewhere else 4), "those of two prompts"
        assert failing.reads < 20, "only probes, of doubling pauses"
        assert not (await tiers.store.stats()).tiers[0].reading
        assert (await tiers.store.stats()).tiers[0].stats is not None
        assert (await tiers.store.contains([key_of("a")])) == [elsewhere]

        failing.fails = False
        assert await prompts_of(tiers, 61) == 0
        assert (await tiers.store.stats()).tiers[0].reading
        before = failing.reads
        await tiers.store.contains([key_of("a")])
        await tiers.read("a")
        assert failing.reads > before


async def test_tiered_store_probe_of_reads_that_hangs_delays_nothing():
    async with opened_tiers(drain_s=0.0) as tiers:
        await tiers.fill(0, "a", "b")
        await tiers.fill(1, "a", "b")
        failing = FailingReads(tiers.outage[0])
        tiers.store.tiers[0].store = failing
        assert await prompts_of(tiers, FAILURES_IN_A_ROW) == 0
        assert not tiers.store.tiers[0].reading.is_closed

        async def hang(key, out, progress=None):
            failing.reads += 1
            await asyncio.get_running_loop().create_future()

        failing.get_into = hang
        before = failing.reads
        for _ in range(5):
            tiers.clock.now_s += LAST_S
            assert await tiers.store.contains([key_of("a")]) == [True]
            await tiers.read("a")
            await async_until(lambda: failing.reads == before + 1)
        await async_until(lambda: tiers.store.given_up_calls == 1)
    assert tiers.store.tiers[0].copies.buffers.free == tiers.store.tiers[0].copies.buffers.capacity


async def test_tiered_store_two_lookups_that_hang_in_one_tier_end_without_an_error():
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, facts: errors.append(facts))
    async with opened_tiers(late_answer_s=0.01) as tiers:
        await tiers.fill(0, "a")
        tiers.outage[1].hangs = True
        lookups = [tiers.store.contains([key_of("a")]) for _ in range(2)]
        assert await asyncio.gather(*lookups) == [[True], [True]]
        await async_until(lambda: not tiers.store.given_up_calls)
        await asyncio.sleep(0)
    assert errors == []
