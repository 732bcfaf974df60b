"""The paced link, on a clock that the test moves."""

import asyncio
import heapq
import itertools

import pytest

from sglang_cake.errors import BlockCorrupt, BlockMissing
from sglang_cake.store.memory import MemoryStore
from sglang_cake.store.paced import PacedStore
from sglang_cake.testing.faulty import FaultyStore, SlowStore
from sglang_cake.testing.store_contract import LAYOUT, block_of, key_of, read

READ_S = 2.0  # what one block takes on the link of these tests


class ManualClock:
    def __init__(self):
        self.now_s = 0.0
        self._sleepers, self._order = [], itertools.count()

    def time(self):
        return self.now_s

    async def sleep(self, delay_s):
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + delay_s, next(self._order), woken))
        await woken

    async def advance(self, delay_s):
        """Let `delay_s` pass, waking every sleeper at its own time."""
        await settle()
        end_s = self.now_s + delay_s
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self.now_s, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self.now_s = end_s


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def paced(inner, clock):
    return PacedStore(
        inner,
        bytes_per_s=LAYOUT.block_bytes / READ_S,
        block_bytes=LAYOUT.block_bytes,
        clock=clock.time,
        sleep=clock.sleep,
    )


def run(test):
    """Run `test(inner, clock, start)`; `start(name)` starts a read that notes when it ended."""

    async def main():
        clock, inner, ended = ManualClock(), MemoryStore(), {}
        for name in range(4):
            await inner.put(key_of(name), block_of(name))

        def start(store, name):
            async def one():
                try:
                    return await read(store, key_of(name))
                finally:
                    ended[name] = clock.now_s

            return asyncio.create_task(one())

        await test(inner, clock, start, ended)

    asyncio.run(main())


def test_reads_take_turns_in_the_order_they_were_asked():
    async def test(inner, clock, start, ended):
        store = paced(inner, clock)
        tasks = [start(store, name) for name in (2, 0, 1)]
        await clock.advance(10)
        assert ended == {2: READ_S, 0: 2 * READ_S, 1: 3 * READ_S}
        assert [await task for task in tasks] == [block_of(name) for name in (2, 0, 1)]

    run(test)


def test_an_idle_link_saves_nothing_up():
    async def test(inner, clock, start, ended):
        store = paced(inner, clock)
        await clock.advance(100)
        start(store, 0)
        start(store, 1)
        await clock.advance(10)
        assert ended == {0: 100 + READ_S, 1: 100 + 2 * READ_S}

    run(test)


def test_time_that_the_store_itself_takes_counts():
    async def test(inner, clock, start, ended):
        slow = SlowStore(inner)
        store = paced(slow, clock)
        for name in (0, 1):
            start(store, name)
        await slow.until_waiting(1)
        await clock.advance(READ_S / 2)
        slow.release(key_of(0))
        await clock.advance(READ_S)  # read 0 ends at READ_S, not half a READ_S later
        assert ended == {0: READ_S}
        await clock.advance(READ_S * 2)
        slow.release(key_of(1))  # slower than the link: no further wait
        await settle()
        assert ended[1] == clock.now_s

    run(test)


def test_a_read_cancelled_in_the_queue_costs_nothing():
    async def test(inner, clock, start, ended):
        store = paced(inner, clock)
        start(store, 0)
        second = start(store, 1)
        start(store, 2)
        await clock.advance(READ_S / 2)
        second.cancel()
        await clock.advance(10)
        assert ended == {0: READ_S, 1: READ_S / 2, 2: 2 * READ_S}

    run(test)


def test_a_read_cancelled_in_the_middle_gives_the_link_back_at_once():
    async def test(inner, clock, start, ended):
        store = paced(inner, clock)
        first = start(store, 0)
        start(store, 1)
        await clock.advance(READ_S / 2)
        first.cancel()
        await clock.advance(10)
        assert ended == {0: READ_S / 2, 1: READ_S * 1.5}

    run(test)


@pytest.mark.parametrize(
    ("error", "cost_s"), [(BlockMissing("x"), 0.0), (BlockCorrupt("x"), READ_S)]
)
def test_only_bytes_that_crossed_the_link_cost_time(error, cost_s):
    async def test(inner, clock, start, ended):
        faulty = FaultyStore(inner)
        faulty.fail(key_of(0), error)
        store = paced(faulty, clock)
        failed = start(store, 0)
        start(store, 1)
        await clock.advance(10)
        assert ended == {0: cost_s, 1: cost_s + READ_S}
        with pytest.raises(type(error)):
            await failed

    run(test)


def test_puts_and_lookups_are_not_paced():
    async def test(inner, clock, start, ended):
        store = paced(inner, clock)
        start(store, 0)
        await settle()
        assert await store.put(key_of("new"), block_of("new"))
        assert await store.contains([key_of("new")]) == [True]
        await store.delete(key_of("new"))
        assert clock.now_s == 0.0
        assert ended == {}
        await clock.advance(READ_S)

    run(test)
