"""Opening: a store that cannot be opened yet, and one that must not be."""

import asyncio
import threading

import pytest
from polling import PATIENCE_S, async_until

from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.stores.base import LazyStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, StoreContract, block_of, key_of, read


class Source:
    """Opens as the test says."""

    def __init__(self, error=None, kind=MemoryStore):
        self.error, self.asked, self.stores, self.kind = error, 0, [], kind
        self.gate = threading.Event()
        self.gate.set()

    def check(self):
        pass

    def open(self, frame, *, depth):
        self.asked += 1
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.stores.append(self.kind())
        return self.stores[-1]

    async def namespaces(self):
        return []


class TestLateStore(StoreContract):
    def open(self, folder):
        return LazyStore(Source(), self.frame, depth=1)


@pytest.mark.parametrize("error", [StoreUnavailable("not mounted"), ConfigError("of another")])
async def test_lazy_store_before_its_source_opens_is_unavailable(error):
    source = Source(error)
    store = LazyStore(source, FRAME, depth=1)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=str(error)):
            await store.put(key_of("a"), block_of("a"))
    source.error = None
    assert await store.put(key_of("a"), block_of("a"))
    assert await read(store, key_of("a")) == block_of("a")
    assert source.asked == 3
    await store.close()


class TieredMemoryStore(MemoryStore):
    def sources(self, keys):
        return [1] * len(keys)


async def test_lazy_store_names_the_tiers_of_the_store_that_it_opened():
    store = LazyStore(Source(kind=TieredMemoryStore), FRAME, depth=1)
    assert store.sources([key_of("a")]) == [0]
    await store.contains([])
    assert store.sources([key_of("a"), key_of("b")]) == [1, 1]
    await store.close()


async def test_lazy_store_parallel_first_calls_open_the_source_once():
    source = Source()
    store = LazyStore(source, FRAME, depth=1)
    assert await asyncio.gather(*(store.contains([]) for _ in range(5))) == [[]] * 5
    assert source.asked == 1
    await store.close()


async def test_lazy_store_cancelled_opening_leaves_no_open_store():
    source = Source()
    source.gate.clear()
    store = LazyStore(source, FRAME, depth=1)
    call = asyncio.create_task(store.contains([]))
    await async_until(lambda: source.asked)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    source.gate.set()
    await closing
    (opened,) = source.stores
    with pytest.raises(StoreUnavailable):
        await opened.contains([])
    with pytest.raises(StoreUnavailable):
        await store.contains([])
    assert source.asked == 1


class ClosableStore(MemoryStore):
    is_closed = False

    async def close(self):
        self.is_closed = True


async def test_lazy_store_close_ends_calls_that_wait_for_an_opening_that_hangs():
    source = Source(kind=ClosableStore)
    source.gate.clear()
    store = LazyStore(source, FRAME, depth=1, close_s=0.001)
    call = asyncio.create_task(store.contains([]))
    await async_until(lambda: source.asked)
    await store.close()
    for late in (call, store.contains([])):
        with pytest.raises(StoreUnavailable, match="is closed"):
            await asyncio.wait_for(late, PATIENCE_S)
    source.gate.set()
    await async_until(lambda: source.stores and source.stores[0].is_closed)
