"""The shipped fakes do what tests of others rely on."""

import asyncio

import pytest
from faulty_stores import FaultyStore, SlowStore

from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreUnavailable
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import LAYOUT, block_of, key_of, read


async def filled(*names):
    store = MemoryStore()
    for name in names:
        await store.put(key_of(name), block_of(name))
    return store


async def test_slow_store_held_reads_complete_one_by_one_when_released():
    store = SlowStore(await filled("a", "b"))
    first = asyncio.create_task(read(store, key_of("a")))
    second = asyncio.create_task(read(store, key_of("b")))
    await store.until_waiting(2)
    assert store.waiting == [key_of("a"), key_of("b")]
    store.release(key_of("b"))
    assert await second == block_of("b")
    assert not first.done()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    assert store.waiting == []
    store.release(key_of("a"))
    assert await read(store, key_of("a")) == block_of("a")


@pytest.mark.parametrize("error", [BlockMissing("x"), BlockCorrupt("x"), StoreUnavailable("x")])
async def test_faulty_store_chosen_key_raises_its_error_and_leaves_garbage(error):
    store = FaultyStore(await filled("a", "b"))
    store.fail(key_of("a"), error)
    out = bytearray(LAYOUT.block_bytes)
    with pytest.raises(type(error)):
        await store.get_into(key_of("a"), memoryview(out))
    assert out not in (block_of("a"), bytes(len(out)))
    with pytest.raises(type(error)):
        await store.put(key_of("a"), block_of("a"))
    assert await read(store, key_of("b")) == block_of("b")


async def test_faulty_store_lost_block_is_contained_but_missing():
    store = FaultyStore(await filled("a"))
    store.lose(key_of("a"))
    assert await store.contains([key_of("a")]) == [True]
    with pytest.raises(BlockMissing):
        await read(store, key_of("a"))


async def test_faulty_store_flipped_block_differs_in_one_bit():
    store = FaultyStore(await filled("a"))
    store.flip(key_of("a"))
    got = await read(store, key_of("a"))
    wrong = [x ^ y for x, y in zip(got, block_of("a"), strict=True) if x != y]
    assert wrong == [1]
