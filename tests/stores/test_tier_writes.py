"""Several stores as one: writing, write-down, moving up, deleting, closing."""

import asyncio

import pytest
from faulty_stores import FaultyStore, HeldDeletes, SlowStore
from tiering import BLOCK, opened_tiers

from sglang_cake.core.errors import (
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.threads import wait_uncancelled
from sglang_cake.stores.base import WrapperStore
from sglang_cake.stores.tiers.tier import FAILURES_IN_A_ROW
from sglang_cake.stores.tiers.tiered_store import REREAD_S
from sglang_cake.testing.store_contract import block_of, key_of, read

DOWN = StoreUnavailable("down")


async def test_tiered_store_put_reaches_the_first_tier_and_then_the_others():
    async with opened_tiers(count=3) as tiers:
        await tiers.put("a")
        assert await tiers.holds(0, "a"), "before the put returns"
        await tiers.until_holds(1, "a")
        await tiers.until_holds(2, "a")
        assert not await tiers.store.put(key_of("a"), block_of("a"))
        for index in (1, 2):
            counts = await tiers.counts(index)
            assert counts["put_blocks"] == 1
            assert counts["moved_up_blocks"] == 0


@pytest.mark.parametrize("error", [StoreFull("full"), DOWN, OSError("not one of ours")])
async def test_tiered_store_put_with_a_failed_first_tier_goes_to_the_second(error):
    async with opened_tiers(count=3) as tiers:
        tiers.outage[0].error = error
        for name in range(5):
            await tiers.put(name)
            assert await tiers.holds(1, name), "before the put returns"
            await tiers.until_holds(2, name)
        tiers.outage[0].error = None
        assert len(tiers.memory[0]) == 0
        counts = await tiers.counts(0)
        assert counts["full_blocks"] == (5 if isinstance(error, StoreFull) else 0)
        assert counts["left_out"] == (0 if isinstance(error, StoreFull) else 1)


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([StoreFull("0"), StoreFull("1")], StoreFull),
        ([DOWN, StoreFull("1")], StoreFull),
        ([StoreFull("0"), DOWN], StoreFull),
        ([DOWN, DOWN], StoreUnavailable),
    ],
)
async def test_tiered_store_put_that_every_tier_refuses_raises(errors, told):
    async with opened_tiers() as tiers:
        for outage, error in zip(tiers.outage, errors, strict=True):
            outage.error = error
        for _ in range(2 * FAILURES_IN_A_ROW):
            with pytest.raises(told):
                await tiers.store.put(key_of("a"), block_of("a"))


class Gated(WrapperStore):
    """Puts wait until the test opens the gate."""

    def __init__(self, inner):
        super().__init__(inner)
        self.gate = asyncio.Event()

    async def put(self, key, data):
        await self.gate.wait()
        return await super().put(key, data)


async def test_tiered_store_copies_beyond_the_bound_are_dropped_and_counted():
    async with opened_tiers(copy_bytes=3 * BLOCK) as tiers:
        gated = tiers.store.tiers[1].store = Gated(tiers.memory[1])
        await tiers.put(*range(10))
        assert len(tiers.memory[0]) == 10, "the first tier never waits for the second"
        assert (await tiers.counts(1))["queue_full_blocks"] == 7
        gated.gate.set()
        await tiers.quiet()
        assert len(tiers.memory[1]) == 3
        await tiers.put(*range(10, 13))
        await tiers.quiet()
        assert len(tiers.memory[1]) == 6, "room that was given back is used again"


async def test_tiered_store_copy_has_the_bytes_at_the_time_of_the_put():
    async with opened_tiers() as tiers:
        data = bytearray(block_of("a"))
        await tiers.store.put(key_of("a"), memoryview(data))
        data[:] = bytes(len(data))  # the caller's again
        await tiers.until_holds(1, "a")
        assert await read(tiers.memory[1], key_of("a")) == block_of("a")


async def test_tiered_store_deleted_block_is_not_restored_by_a_queued_copy():
    async with opened_tiers() as tiers:
        gated = tiers.store.tiers[1].store = Gated(tiers.memory[1])
        await tiers.put(*range(4))
        for name in range(4):
            await tiers.store.delete(key_of(name))
        gated.gate.set()
        await tiers.quiet()
        assert len(tiers.memory[1]) == 0
        await tiers.put("b")
        await tiers.until_holds(1, "b")


@pytest.mark.parametrize("room", [0, 4], ids=["copied", "kept in memory"])
async def test_tiered_store_block_deleted_during_its_put_is_in_no_tier(room):
    async with opened_tiers(room=room) as tiers:
        data, begun, go = block_of("a"), asyncio.Event(), asyncio.Event()

        async def form_of(tier):
            if tier == 1:
                begun.set()
                await go.wait()
            return data

        putting = asyncio.create_task(tiers.store.put_forms(key_of("a"), form_of))
        await begun.wait()
        await tiers.store.delete(key_of("a"))
        go.set()
        assert await putting
        await tiers.quiet()
        assert [len(memory) for memory in tiers.memory] == [0, 0]
        assert (await tiers.counts(1))["dropped_blocks"] == 1


class LateAnswers(WrapperStore):
    """Puts are done at once, and answered when the test sets `go`."""

    def __init__(self, inner):
        super().__init__(inner)
        self.done, self.go = asyncio.Event(), asyncio.Event()

    async def put(self, key, data):
        fresh = await super().put(key, data)
        self.done.set()
        await self.go.wait()
        return fresh


async def test_tiered_store_block_deleted_before_its_put_is_answered_is_not_copied():
    async with opened_tiers() as tiers:
        late = tiers.store.tiers[0].store = LateAnswers(tiers.memory[0])
        putting = asyncio.create_task(tiers.store.put(key_of("a"), block_of("a")))
        await late.done.wait()
        await tiers.store.delete(key_of("a"))
        late.go.set()
        assert await putting
        await tiers.quiet()
        assert [len(memory) for memory in tiers.memory] == [0, 0]


async def test_tiered_store_delete_with_a_failed_tier_clears_others_and_raises():
    async with opened_tiers() as tiers:
        await tiers.put("a")
        await tiers.quiet()
        tiers.outage[1].error = DOWN
        with pytest.raises(StoreUnavailable):
            await tiers.store.delete(key_of("a"))
        tiers.outage[1].error = None
        assert not await tiers.holds(0, "a")
        assert await tiers.store.contains([key_of("a")]) == [True], "it is still below"
        await tiers.store.delete(key_of("a"))
        assert await tiers.store.contains([key_of("a")]) == [False]


async def test_tiered_store_close_writes_queued_copies():
    async with opened_tiers() as tiers:
        await tiers.put(*range(20))
        await tiers.store.close()
        assert len(tiers.memory[1]) == 20


async def test_tiered_store_close_drops_copies_of_a_hanging_tier():
    async with opened_tiers(drain_s=0.05) as tiers:
        await tiers.put("a")
        await tiers.quiet()
        tiers.outage[1].hangs = True
        await tiers.put("b", "c")
        await tiers.store.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert tiers.store.tiers[1].counts.dropped_blocks == 2
        with pytest.raises(StoreUnavailable):
            await tiers.memory[1].contains([])


class HungStore(WrapperStore):
    """Puts do not end before `answered`, also if they are cancelled: a thread waits for a disk."""

    def __init__(self, inner):
        super().__init__(inner)
        self.begun, self.answered = asyncio.Event(), asyncio.Event()

    async def put(self, key, data):
        self.begun.set()
        await wait_uncancelled(asyncio.ensure_future(self.answered.wait()))
        raise StoreUnavailable("too late")


@pytest.mark.parametrize("room", [0, 4], ids=["copied", "kept in memory"])
async def test_tiered_store_close_does_not_wait_for_a_write_that_cannot_be_cancelled(room):
    async with opened_tiers(drain_s=0.05, room=room) as tiers:
        hung = tiers.store.tiers[1].store = HungStore(tiers.memory[1])
        await tiers.put("a")
        await hung.begun.wait()
        await tiers.store.close()
        assert tiers.store.tiers[1].counts.dropped_blocks == 1
        for store in (tiers.calls[0], tiers.memory[1]):
            with pytest.raises(StoreUnavailable):
                await store.contains([])
        hung.answered.set()
        await tiers.quiet()


# ---- moving up ----


async def test_tiered_store_second_read_promotes_the_block():
    async with opened_tiers(count=3) as tiers:
        await tiers.fill(2, "a", "b")
        await tiers.read("a")
        await tiers.read("b")
        await tiers.quiet()
        assert len(tiers.memory[0]) == len(tiers.memory[1]) == 0, "read once: not worth a place"
        await tiers.read("a")
        await tiers.until_holds(0, "a")
        await tiers.until_holds(1, "a")
        assert not await tiers.holds(0, "b")
        below = len(tiers.calls[2].keys_of("get"))
        await tiers.read("a")
        assert len(tiers.calls[2].keys_of("get")) == below
        assert await read(tiers.memory[0], key_of("a")) == block_of("a")
        assert (await tiers.counts(0))["moved_up_blocks"] == 1


async def test_tiered_store_reads_far_apart_promote_no_block():
    async with opened_tiers() as tiers:
        await tiers.fill(1, "a")
        for _ in range(4):
            await tiers.read("a")
            tiers.clock.now_s += REREAD_S + 1
        await tiers.quiet()
        assert len(tiers.memory[0]) == 0


async def test_tiered_store_full_fast_tier_does_not_disturb_reads():
    async with opened_tiers() as tiers:
        await tiers.fill(1, "a")
        full = FaultyStore(tiers.memory[0])
        full.fail(key_of("a"), StoreFull("full"))
        full.get_into = tiers.memory[0].get_into
        tiers.store.tiers[0].store = full
        for _ in range(6):
            await tiers.read("a")
            await tiers.quiet()
        assert (await tiers.counts(0))["full_blocks"] == 3


async def test_tiered_store_block_deleted_during_a_read_is_not_promoted():
    async with opened_tiers() as tiers:
        await tiers.fill(1, "a")
        await tiers.read("a")
        slow = SlowStore(tiers.memory[1])
        tiers.store.tiers[1].store = slow
        reading = asyncio.create_task(read(tiers.store, key_of("a")))
        await slow.until_waiting(1)
        await tiers.store.delete(key_of("a"))
        await tiers.fill(1, "a")  # so that the read succeeds
        slow.release(key_of("a"))
        await reading
        await tiers.quiet()
        assert not await tiers.holds(0, "a")


async def test_tiered_store_read_during_a_delete_moves_no_block_up():
    async with opened_tiers(room=4) as tiers:
        await tiers.fill(1, "a")
        held = tiers.store.tiers[1].store = HeldDeletes(tiers.memory[1])
        deleting = asyncio.create_task(tiers.store.delete(key_of("a")))
        await held.begun.wait()
        await tiers.read("a")
        held.go.set()
        await deleting
        assert [len(memory) for memory in tiers.memory] == [0, 0]


async def test_tiered_store_read_from_a_delete_until_after_it_moves_no_block_up():
    async with opened_tiers(room=4) as tiers:
        await tiers.fill(1, "a")
        held = HeldDeletes(tiers.memory[1])
        slow = tiers.store.tiers[1].store = SlowStore(held)
        deleting = asyncio.create_task(tiers.store.delete(key_of("a")))
        await held.begun.wait()
        reading = asyncio.create_task(tiers.read("a"))
        await slow.until_waiting(1)
        held.go.set()
        await deleting
        await tiers.fill(1, "a")  # so that the read succeeds
        slow.release(key_of("a"))
        await reading
        assert not await tiers.holds(0, "a")


async def test_tiered_store_block_deleted_while_it_is_decoded_does_not_move_up():
    async with opened_tiers(room=4) as tiers:
        await tiers.fill(1, "a")
        begun, go = asyncio.Event(), asyncio.Event()

        async def unpack(payload, size_bytes):
            begun.set()
            await go.wait()
            return size_bytes

        out = memoryview(bytearray(BLOCK))
        reading = asyncio.create_task(tiers.store.get_unpacked(key_of("a"), out, unpack))
        await begun.wait()
        await tiers.store.delete(key_of("a"))
        go.set()
        assert await reading == (BLOCK, BLOCK)
        assert out == block_of("a")
        assert [len(memory) for memory in tiers.memory] == [0, 0]
