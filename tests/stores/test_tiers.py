"""Several stores as one: the contract, lookups, reads, opening."""

import asyncio
import heapq
import itertools

import pytest
from faulty_stores import FaultyStore, SlowStore
from polling import PATIENCE_S, async_until
from storetools import flip, write_key_file
from tiering import BLOCK, Clock, Tiers, opened_tiers

from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreUnavailable,
)
from sglang_cake.loading.loader import BlockRead
from sglang_cake.stores.base import WrapperStore
from sglang_cake.stores.circuit_breaker import FIRST_S
from sglang_cake.stores.open_store import open_store, parse_sources
from sglang_cake.stores.tiers.tier import FAILURES_IN_A_ROW
from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, StoreContract, block_of, key_of, read

DOWN = StoreUnavailable("down")


def opened(sources, frame=FRAME, *, depth=2, **options):
    """Real stores. However busy their disks are, no tier is passed over for a late answer."""
    store = open_store(sources, frame, depth=depth, **options)
    assert isinstance(store, TieredStore)
    store.late_answer_s = 60.0
    return store


class TestTieredFileStores(StoreContract):
    """One of them is paced."""

    urls = (
        "file://{0}/a?min_free=0&bandwidth=100GB/s,file://{0}/b?min_free=0,file://{0}/c?min_free=0"
    )

    def open(self, folder):
        return opened(parse_sources(self.urls.format(folder)), self.frame)


class TestMemoryBeforeAFileStore(TestTieredFileStores):
    urls = "memory://1MB,file://{0}/slow?min_free=0"


class TestTieredMemoryStores(StoreContract):
    def open(self, folder):
        return TieredStore([MemoryStore(), MemoryStore()], block_bytes=self.frame.payload_bytes)


class TestTiersWithoutRoomForCopies(StoreContract):
    def open(self, folder):
        return TieredStore(
            [MemoryStore(), MemoryStore()], block_bytes=self.frame.payload_bytes, copy_bytes=0
        )


class TestTiersThatFail(StoreContract):
    """One tier down from the start: the others keep the contract, but for what cannot be known."""

    down, error = 0, DOWN
    # Whether the tier that is down has it, nobody knows: it is a StoreUnavailable (see below).
    test_store_get_into_of_an_unknown_key_raises_block_missing = None
    test_store_deleted_block_is_missing_and_can_be_put_again = None

    def open(self, folder):
        tiers = Tiers(3, block_bytes=self.frame.payload_bytes)
        tiers.outage[self.down].error = self.error
        tiers.outage[self.down].delete = tiers.memory[self.down].delete
        tiers.outage[self.down].list_blocks = tiers.memory[self.down].list_blocks
        return tiers.store


class TestTiersThatFailBelow(TestTiersThatFail):
    down = 2


class TestTiersThatFailInAnUnforeseenWay(TestTiersThatFail):
    error = ZeroDivisionError("a bug")


# ---- lookups ----


async def test_tiered_store_block_of_any_tier_is_contained():
    async with opened_tiers() as tiers:
        await tiers.fill(0, "a", "b")
        await tiers.fill(1, "b", "c")
        keys = [key_of(name) for name in "dcba"]
        assert await tiers.store.contains(keys) == [False, True, True, True]
        for name in "abc":
            await tiers.read(name)
        assert tiers.calls[0].keys_of("get").count(key_of("c")) == 0, "it said it lacks it"


async def test_tiered_store_lookup_counts_a_failing_tier_as_empty():
    async with opened_tiers() as tiers:
        await tiers.fill(0, "a")
        await tiers.fill(1, "b")
        tiers.outage[1].error = DOWN
        assert await tiers.store.contains([key_of("a"), key_of("b")]) == [True, False]
        tiers.outage[0].error = OSError("not one of ours")
        with pytest.raises(StoreUnavailable):
            await tiers.store.contains([key_of("a")])
        tiers.outage[0].error = None
        tiers.outage[1].error = None
        assert await tiers.store.contains([key_of("a"), key_of("b")]) == [True, True]


async def test_tiered_store_lookup_does_not_wait_for_a_hanging_tier():
    async with opened_tiers(late_answer_s=0.01) as tiers:
        await tiers.fill(0, "a")
        tiers.outage[1].hangs = True
        for _ in range(FAILURES_IN_A_ROW):
            assert await tiers.store.contains([key_of("a")]) == [True]
            await async_until(
                lambda: not tiers.store.given_up_calls
            )  # the call that was given up has ended
        counts = await tiers.counts(1)
        assert counts["late_answers"] == FAILURES_IN_A_ROW
        assert counts["left_out"] == 1
        asked = len(tiers.calls[1].keys_of("contains"))
        for _ in range(5):
            await tiers.store.contains([key_of("a")])
        assert len(tiers.calls[1].keys_of("contains")) == asked, "it is left out"


async def put_out(tiers, index):
    """Have lookups fail until the tier is left out; from then on it hangs."""
    tiers.outage[index].error = DOWN
    for _ in range(FAILURES_IN_A_ROW):
        await tiers.store.contains([key_of("a")])
    tiers.outage[index].error = None
    tiers.outage[index].hangs = True


async def test_tiered_store_lookup_does_not_wait_for_a_probe():
    async with opened_tiers(late_answer_s=3600) as tiers:
        await tiers.fill(0, "a")
        await put_out(tiers, 1)
        tiers.clock.now_s += FIRST_S
        async with asyncio.timeout(60):
            for _ in range(5):
                assert await tiers.store.contains([key_of("a")]) == [True]
        assert len(tiers.calls[1].keys_of("contains")) == FAILURES_IN_A_ROW + 1


async def test_tiered_store_hanging_probe_is_abandoned_and_backs_off():
    async with opened_tiers(late_answer_s=0.01) as tiers:
        await tiers.fill(0, "a")
        await put_out(tiers, 1)
        for wait_s in (1, 2, 4):
            assert not tiers.store.tiers[1].asking.may_call(tiers.clock.now_s + wait_s - 0.01)
            tiers.clock.now_s += wait_s
            await tiers.store.contains([key_of("a")])
            await async_until(lambda: not tiers.store.given_up_calls)
        assert tiers.store.tiers[1].counts.late_answers == 3


async def test_tiered_store_uncancellable_tier_is_asked_once():
    class Stuck(WrapperStore):
        """A thread in a system call that does not return."""

        def __init__(self, inner):
            super().__init__(inner)
            self.freed, self.asked = asyncio.Event(), 0

        async def contains(self, keys):
            self.asked += 1
            waiting = asyncio.ensure_future(self.freed.wait())
            while not waiting.done():
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    continue
            raise asyncio.CancelledError

    async with opened_tiers(late_answer_s=0.01) as tiers:
        stuck = Stuck(tiers.memory[1])
        tiers.store.tiers[1].store = stuck
        await tiers.fill(0, "a")
        for turn in range(10):
            tiers.clock.now_s += 1000.0 * turn  # any probe would be due
            assert await tiers.store.contains([key_of("a")]) == [True]
        assert stuck.asked == 1
        assert not (await tiers.store.stats()).tiers[1].reading, "left out, for the alert"
        stuck.freed.set()


async def test_tiered_store_cancelled_lookup_leaves_no_task():
    async with opened_tiers() as tiers:
        for outage in tiers.outage:
            outage.hangs = True
        lookup = asyncio.create_task(tiers.store.contains([key_of("a")]))
        await async_until(lambda: all(calls.calls for calls in tiers.calls))
        lookup.cancel()
        await asyncio.wait([lookup])
        assert lookup.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_tiered_store_lookup_answer_of_wrong_length_is_a_failure():
    class Short(WrapperStore):
        async def contains(self, keys):
            return [True]

    async with opened_tiers() as tiers:
        tiers.store.tiers[0].store = Short(tiers.memory[0])
        await tiers.fill(1, "b")
        assert await tiers.store.contains([key_of("a"), key_of("b")]) == [False, True]
        assert (await tiers.counts(0))["failed_calls"] == 1


# ---- reads ----


@pytest.mark.parametrize("looked_up", [True, False])
@pytest.mark.parametrize(
    "error", [BlockMissing("gone"), BlockCorrupt("bad"), DOWN, OSError("not one of ours")]
)
async def test_tiered_store_failed_read_continues_with_the_next_tier(error, looked_up):
    async with opened_tiers() as tiers:
        await tiers.fill(0, "a")
        await tiers.fill(1, "a")
        if looked_up:
            await tiers.store.contains([key_of("a")])
        tiers.outage[0].error = error
        await tiers.read("a")
        assert [len(calls.keys_of("get")) for calls in tiers.calls] == [1, 1]


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([BlockMissing("0"), BlockMissing("1")], BlockMissing),
        ([BlockMissing("0"), StoreUnavailable("1")], StoreUnavailable),
        ([StoreUnavailable("0"), BlockMissing("1")], StoreUnavailable),
        ([BlockCorrupt("0"), StoreUnavailable("1")], BlockCorrupt),
        ([BlockMissing("0"), BlockCorrupt("1")], BlockCorrupt),
        ([OSError("0"), OSError("1")], StoreUnavailable),
    ],
)
async def test_tiered_store_read_failing_in_all_tiers_raises_the_worst_error(errors, told):
    async with opened_tiers() as tiers:
        for outage, error in zip(tiers.outage, errors, strict=True):
            outage.error = error
        with pytest.raises(told):
            await read(tiers.store, key_of("a"))


class BreaksOff(WrapperStore):
    """Half of a block comes, told of, and none of it is right."""

    def __init__(self, inner, error):
        super().__init__(inner)
        self.error = error

    async def get_into(self, key, out, progress=None):
        progress(0)
        out[: BLOCK // 2] = bytes(BLOCK // 2)
        progress(BLOCK // 2)
        raise self.error


class TellsNothing(WrapperStore):
    """As one whose blocks are sealed."""

    async def get_into(self, key, out, progress=None):
        return await super().get_into(key, out)


def reading_of(tiers, name):
    """A block's read as the loader makes it; `await read()` ends it."""
    buffer = Buffer(on_page(BLOCK))
    reading = BlockRead(buffer)

    async def read():
        size_bytes = await tiers.store.get_into(key_of(name), buffer.view, reading.received)
        assert buffer.view[:size_bytes] == block_of(name)
        reading.end(whole=True)

    return reading, read


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("error", [BlockCorrupt("bad"), DOWN, OSError("not one of ours")])
async def test_tiered_store_read_continued_after_used_bytes_is_not_whole(error, silent, used):
    class Looked(BreaksOff):
        """Somebody uses the first bytes as soon as they are there."""

        async def get_into(self, key, out, progress=None):
            try:
                return await super().get_into(key, out, progress)
            finally:
                if used:
                    assert reading.wait(BLOCK // 2, 0.0)

    reading = None
    async with opened_tiers() as tiers:
        await tiers.fill(1, "a")
        tiers.store.tiers[0].store = Looked(tiers.memory[0], error)
        if silent:
            tiers.store.tiers[1].store = TellsNothing(tiers.memory[1])
        reading, read = reading_of(tiers, "a")
        await read()
        assert reading.wait_whole(0.0) is not used


@pytest.mark.parametrize("silent", [True, False])
async def test_tiered_store_progress_restarts_with_the_next_tier(silent):
    async with opened_tiers(count=3) as tiers:
        await tiers.fill(2, "a")
        tiers.store.tiers[0].store = BreaksOff(tiers.memory[0], DOWN)
        if silent:
            tiers.store.tiers[2].store = TellsNothing(tiers.memory[2])
        counts = []
        await tiers.store.get_into(key_of("a"), memoryview(bytearray(BLOCK)), counts.append)
        anew = counts.index(0, 1)
        assert counts[:anew] == [0, BLOCK // 2]
        assert sorted(set(counts[anew:])) == ([0] if silent else [0, BLOCK])
        assert counts[anew:] == sorted(counts[anew:])


async def test_tiered_store_used_corrupt_bytes_make_a_sealed_read_not_whole(tmp_path):
    """A sealed store tells nothing of its bytes: only that they begin to come anew is said."""
    key_file = write_key_file(tmp_path)
    urls = f"file://{tmp_path}/a?min_free=0,file://{tmp_path}/b?min_free=0&key_file={key_file}"
    buffer = Buffer(on_page(BLOCK))
    reading = BlockRead(buffer)
    taken = []

    def came(count):
        reading.received(count)
        if reading.wait(BLOCK, 0.0):
            taken.append(bytes(buffer.view))

    tiers = opened(parse_sources(urls))
    assert await tiers.put(key_of("a"), block_of("a"))
    await async_until(lambda: not any(tier.copies.pending for tier in tiers.tiers))
    (path,) = (tmp_path / "a").rglob(key_of("a").hex())
    flip(path)
    assert await tiers.get_into(key_of("a"), buffer.view, came) == BLOCK
    reading.end(whole=True)
    await tiers.close()
    assert buffer.view == block_of("a")
    assert len(taken) == 1
    assert taken != [block_of("a")]
    assert not reading.wait_whole(0.0)


async def test_tiered_store_tiers_without_the_block_report_no_progress():
    async with opened_tiers(count=3) as tiers:
        await tiers.fill(2, "a")
        tiers.outage[1].error = DOWN
        tiers.store.tiers[2].store = TellsNothing(tiers.memory[2])
        counts = []
        await tiers.store.get_into(key_of("a"), memoryview(bytearray(BLOCK)), counts.append)
        assert counts == []


async def test_tiered_store_read_over_three_tiers_has_one_writer_at_a_time():
    class Watched(WrapperStore):
        async def get_into(self, key, out, progress=None):
            inside.append(self)
            assert len(inside) == 1
            try:
                await asyncio.sleep(0)
                return await super().get_into(key, out, progress)
            finally:
                inside.remove(self)

    inside = []
    async with opened_tiers(count=3) as tiers:
        for tier in tiers.store.tiers:
            tier.store = Watched(FaultyStore(tier.store))
        await tiers.fill(2, "a")
        for index in (0, 1):
            await tiers.fill(index, "a")
            tiers.store.tiers[index].store.inner.fail(key_of("a"), BlockCorrupt("bad"))
        await tiers.store.contains([key_of("a")])
        await tiers.read("a")


async def test_tiered_store_cancelled_read_frees_its_link():
    async with opened_tiers() as tiers:
        slow = SlowStore(tiers.memory[0])
        tiers.store.tiers[0].store = slow
        await tiers.fill(0, "a")
        task = asyncio.create_task(read(tiers.store, key_of("a")))
        await slow.until_waiting(1)
        assert tiers.store.tiers[0].link.bytes_under_way == BLOCK
        task.cancel()
        await asyncio.wait([task])
        assert tiers.store.tiers[0].link.bytes_under_way == 0
        assert slow.waiting == []


async def test_tiered_store_parallel_reads_add_up_both_links():
    """Two links of 1 and 3 blocks a second, four reads under way, in virtual time."""

    class Link(WrapperStore):
        def __init__(self, inner, clock, block_s):
            super().__init__(inner)
            self.clock, self.block_s, self.free_s, self.served = clock, block_s, 0.0, 0

        async def get_into(self, key, out, progress=None):
            self.free_s = max(self.free_s, self.clock.now_s) + self.block_s
            self.served += 1
            await self.clock.until(self.free_s)
            return await super().get_into(key, out, progress)

    async with opened_tiers() as tiers:
        clock, names = tiers.clock, range(80)
        sleeping, order = [], itertools.count()

        async def until(at_s):
            woken = asyncio.get_running_loop().create_future()
            heapq.heappush(sleeping, (at_s, next(order), woken))
            await woken

        clock.until = until
        links = [Link(tiers.memory[0], clock, 1 / 3), Link(tiers.memory[1], clock, 1.0)]
        for index, made in enumerate(links):
            tiers.store.tiers[index].store = made
            await tiers.fill(index, *names)
        await tiers.store.contains([key_of(name) for name in names])
        left = list(names)

        async def reader():
            while left:
                await tiers.read(left.pop())

        readers = [asyncio.create_task(reader()) for _ in range(4)]
        while not all(task.done() for task in readers):
            for _ in range(10):
                await asyncio.sleep(0)
            if sleeping:
                clock.now_s, _, woken = heapq.heappop(sleeping)
                woken.set_result(None)
        assert sum(made.served for made in links) == len(names)
        took_s, served = clock.now_s, [made.served for made in links]
    assert took_s == pytest.approx(80 / 4, rel=0.15), "80 blocks at 3 + 1 a second"
    assert served[0] == pytest.approx(60, abs=6)


async def test_tiered_store_sources_name_the_tier_of_each_block():
    async with opened_tiers(late_answer_s=0.01) as tiers:
        await tiers.fill(0, "a", "b")
        await tiers.fill(1, "b", "c")
        keys = [key_of(name) for name in "abcd"]
        assert tiers.store.sources(keys) == [0] * 4, "nothing is known yet"
        await tiers.store.contains(keys)
        assert tiers.store.sources(keys) == [0, 0, 1, 0]
        await put_out(tiers, 0)
        assert tiers.store.sources(keys)[1] == 1, "the first tier is left out"


async def test_tiered_store_idle_faster_tier_serves_all_reads():
    async with opened_tiers() as tiers:
        for index in (0, 1):
            await tiers.fill(index, *range(20))
        await tiers.store.contains([key_of(name) for name in range(20)])
        for name in range(20):
            await tiers.read(name)
        assert len(tiers.calls[0].keys_of("get")) == 20


async def test_tiered_store_block_lost_by_a_tier_is_copied_back():
    async with opened_tiers() as tiers:
        await tiers.put("a")
        await tiers.quiet()
        del tiers.memory[0].blocks[key_of("a")]  # evicted
        await tiers.read("a")
        asked = len(tiers.calls[0].keys_of("get"))
        await tiers.read("a")
        assert len(tiers.calls[0].keys_of("get")) == asked
        await tiers.until_holds(0, "a")


async def test_tiered_store_tier_that_lacks_the_block_is_not_read():
    async with opened_tiers() as tiers:
        await tiers.fill(1, "a")
        await tiers.store.contains([key_of("a")])
        tiers.outage[1].error = BlockMissing("evicted meanwhile")
        with pytest.raises(BlockMissing):
            await read(tiers.store, key_of("a"))
        assert tiers.calls[0].keys_of("get") == []


# ---- all of them together ----


async def test_tiered_store_listing_names_blocks_once_and_raises_on_failure():
    async with opened_tiers() as tiers:
        await tiers.fill(0, "a", "b")
        await tiers.fill(1, "b", "c")
        listed = [block.key async for block in tiers.store.list_blocks()]
        assert sorted(listed) == sorted(key_of(name) for name in "abc")
        tiers.outage[0].error = DOWN
        listed = []

        async def list_all():
            async for block in tiers.store.list_blocks():
                listed.append(block.key)

        with pytest.raises(StoreUnavailable):
            await list_all()
        assert sorted(listed) == sorted(key_of(name) for name in "bc")


async def test_tiered_store_stats_sum_known_values_and_list_each_tier():
    async with opened_tiers() as tiers:
        await tiers.fill(0, "a")
        await tiers.fill(1, "a", "b")
        stats = await tiers.store.stats()
        assert stats.used_bytes == 3 * BLOCK
        assert stats.blocks is None
        assert stats.capacity_bytes is None
        assert [tier.stats.blocks for tier in stats.tiers] == [1, 2]
        tiers.outage[1].error = DOWN
        stats = await tiers.store.stats()
        assert stats.used_bytes == BLOCK
        assert stats.tiers[1].stats is None


async def test_tiered_store_stats_while_no_tier_answers_tell_that_all_are_left_out():
    """An alert is made of them."""
    async with opened_tiers() as tiers:
        for outage in tiers.outage:
            outage.error = DOWN
        for _ in range(FAILURES_IN_A_ROW):
            stats = await tiers.store.stats()
            assert [tier.stats for tier in stats.tiers] == [None, None]
            assert (stats.used_bytes, stats.capacity_bytes) == (None, None)
        stats = await tiers.store.stats()
        assert not any(tier.reading for tier in stats.tiers)
        assert all(tier.counts["left_out"] == 1 for tier in stats.tiers)


async def test_tiered_store_stats_while_one_tier_hangs_tell_that_the_other_is_left_out():
    async with opened_tiers(late_answer_s=0.001) as tiers:
        tiers.outage[1].error = DOWN
        for _ in range(FAILURES_IN_A_ROW):
            await tiers.store.contains([key_of("a")])
        tiers.outage[0].hangs = True
        stats = await asyncio.wait_for(tiers.store.stats(), PATIENCE_S)
        assert not stats.tiers[1].reading


class Untold(WrapperStore):
    """Blocks are looked up and read, but there are no statistics."""

    def __init__(self, inner, how):
        super().__init__(inner)
        self.how, self.asked = how, 0

    async def stats(self):
        self.asked += 1
        if self.how == "hangs":
            await asyncio.Event().wait()
        raise StoreUnavailable("no index") if self.how == "fails" else ValueError("a bug")


@pytest.mark.parametrize("how", ["fails", "hangs", "has a bug"])
async def test_tiered_store_tier_without_statistics_stays_in_use(how, caplog):
    """As a file store without its index, which serves reads."""
    async with opened_tiers(late_answer_s=0.001) as tiers:
        await tiers.fill(1, "a")
        untold = Untold(tiers.calls[1], how)
        tiers.store.tiers[1].store = untold
        for _ in range(2 * FAILURES_IN_A_ROW):
            stats = await tiers.store.stats()
            assert [tier.stats is None for tier in stats.tiers] == [False, True]
            assert all(tier.reading for tier in stats.tiers)
        assert stats.tiers[1].counts["failed_calls"] == 0
        assert await tiers.store.contains([key_of("a")]) == [True]
        assert untold.asked == (1 if how == "hangs" else 2 * FAILURES_IN_A_ROW)
    assert caplog.text.count("broke the contract") == (how == "has a bug")


class ServesNothing(WrapperStore):
    """A folder on a dead disk: without keys, there is nothing to look up on it."""

    async def contains(self, keys):
        if keys:
            raise DOWN
        return []


async def test_tiered_store_stats_of_a_tier_whose_lookups_fail_leave_it_out():
    async with opened_tiers() as tiers:
        tiers.store.tiers[1].store = ServesNothing(tiers.memory[1])
        for _ in range(FAILURES_IN_A_ROW):
            stats = await tiers.store.stats()
        assert [tier.reading for tier in stats.tiers] == [True, False]
        assert stats.tiers[1].counts["left_out"] == 1


# ---- opening ----


async def test_tiered_store_tier_that_opens_late_is_used_from_then_on(tmp_path):
    clock = Clock()
    sources = parse_sources(f"file://{tmp_path}/kv?min_free=0,file://{tmp_path}/a/kv?min_free=0")
    (tmp_path / "a").write_text("in the way of the folder")
    store = opened(sources, depth=1, clock=clock)
    assert await store.put(key_of("a"), block_of("a"))
    for _ in range(FAILURES_IN_A_ROW):
        assert await store.contains([key_of("a")]) == [True]
    assert not (await store.stats()).tiers[1].reading
    (tmp_path / "a").unlink()
    clock.now_s += FIRST_S
    await store.contains([key_of("a")])
    await async_until(lambda: store.tiers[1].serves)
    assert await store.put(key_of("b"), block_of("b"))
    await store.close()
    below = sources[1].open(FRAME, depth=1)
    assert await read(below, key_of("b")) == block_of("b")
    await below.close()


async def test_tiered_store_shared_lower_tier_passes_blocks_between_servers(tmp_path):
    def server(name):
        urls = f"file://{tmp_path}/{name}?min_free=0,file://{tmp_path}/shared?min_free=0"
        return opened(parse_sources(urls))

    one, other = server("one"), server("other")
    await one.put(key_of("a"), block_of("a"))
    await one.close()  # what was on its way down is there now
    assert await other.contains([key_of("a"), key_of("b")]) == [True, False]
    for _ in range(3):
        assert await read(other, key_of("a")) == block_of("a")
    await other.close()
    own = parse_sources(f"file://{tmp_path}/other?min_free=0")[0].open(FRAME, depth=1)
    assert await read(own, key_of("a")) == block_of("a")
    await own.close()
