"""The contract of `Store` as pytest tests.

Use: subclass `StoreContract` under a name that starts with `Test`, and define `open`. No plugin is
needed; each test runs its own event loop.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import BlockMissing, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import Store

LAYOUT = BlockLayout.plain(
    layers=2, parts=(("k", (2, 8)), ("v", (2, 8))), dtype="bfloat16", block_tokens=8
)
NAMESPACE = Namespace((("model", "contract"), ("dtype", "bfloat16"), ("layout", LAYOUT.describe())))
FRAME = BlockFrame(NAMESPACE, LAYOUT)
VARYING = BlockFrame(
    Namespace((*NAMESPACE.fields, ("codec", "int8"))),
    LAYOUT,
    codec="int8",
    added_bytes=1024,
    varies=True,
)  # as with a codec


def key_of(name: object) -> BlockKey:
    """A key that differs for every name."""
    return BlockKey(hashlib.sha256(repr(name).encode()).digest())


def block_of(name: object, layout: BlockLayout = LAYOUT) -> memoryview:
    """One block of bytes that differ for every name."""
    return memoryview(hashlib.shake_128(repr(name).encode()).digest(layout.block_bytes))


async def read(store: Store, key: BlockKey, layout: BlockLayout = LAYOUT) -> bytes:
    """The block of `key`, read into fresh memory."""
    out = bytearray(layout.block_bytes)
    await store.get_into(key, memoryview(out))
    return bytes(out)


class ProgressRecord:
    """A `TellBytes` of a read of `block` into `out`: records each count, and whether `out` has that
    many bytes at that moment. Any thread."""

    def __init__(self, out: bytearray | memoryview, block: bytes | memoryview) -> None:
        self._out = memoryview(out)
        self._block = bytes(block)
        self.counts: list[int] = []
        self.wrong: list[int] = []  # counts whose bytes had not all arrived

    def __call__(self, count: int) -> None:
        self.counts.append(count)
        if count > len(self._block) or bytes(self._out[:count]) != self._block[:count]:
            self.wrong.append(count)

    @property
    def grew(self) -> bool:
        """Whether the counts began with 0 and grew strictly."""
        return self.counts[:1] == [0] and self.counts == sorted(set(self.counts))


def on_fresh_store(
    test: Callable[[Any, Store], Coroutine[Any, Any, None]],
) -> Callable[[Any, Path], None]:
    """Make a test of pytest from a coroutine function."""

    def run(self: Any, tmp_path: Path) -> None:
        self.run(tmp_path, lambda store: test(self, store))

    # Not `functools.wraps`: pytest would ask for a fixture `store`.
    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


class StoreContract:
    """Subclass it, and define `open`."""

    frame = FRAME  # of the store to be opened

    can_list = True  # False: the server cannot; `list_blocks` then raises StoreUnavailable

    tells_progress = True  # False: it does not fill `out` from its start as bytes come

    def open(self, folder: Path) -> Store:
        """An empty store of blocks of `self.frame`; `folder` is its own, if it wants one."""
        raise NotImplementedError

    def run(self, folder: Path, test: Callable[[Store], Awaitable[None]]) -> None:
        """Run one test on a fresh store."""

        async def main() -> None:
            store = self.open(folder)
            assert isinstance(store, Store), "a subclass of `Store`"
            try:
                await test(store)
            finally:
                await store.close()

        asyncio.run(main())

    @on_fresh_store
    async def test_store_get_into_after_puts_reads_the_same_bytes(self, store: Store) -> None:
        for name in range(3):
            assert await store.put(key_of(name), block_of(name))
        for name in (2, 0, 1):
            assert await read(store, key_of(name)) == block_of(name)

    def test_store_payloads_of_any_stored_length_are_read_back(self, tmp_path: Path) -> None:
        self.frame = VARYING
        most = VARYING.payload_bytes
        block = (bytes(block_of("a")) * 4)[:most]

        async def test(store: Store) -> None:
            sizes = (1, 700, LAYOUT.block_bytes, most)
            for size in sizes:
                assert await store.put(key_of(size), memoryview(block)[:size])
                assert not await store.put(key_of(size), memoryview(block)[:size])
            assert all(await store.contains([key_of(size) for size in sizes]))
            for size in sizes:
                out = bytearray(most + 64)
                progress = ProgressRecord(out, block[:size])
                assert await store.get_into(key_of(size), memoryview(out)[:most], progress) == size
                assert out[:size] == block[:size]
                assert out[most:] == bytes(64)
                self._check(progress)

        self.run(tmp_path, test)

    @on_fresh_store
    async def test_store_second_put_returns_false_and_keeps_the_block(self, store: Store) -> None:
        assert await store.put(key_of("a"), block_of("a")) is True
        assert await store.put(key_of("a"), block_of("a")) is False
        assert await read(store, key_of("a")) == block_of("a")

    @on_fresh_store
    async def test_store_contains_answers_in_the_order_of_the_keys(self, store: Store) -> None:
        await store.put(key_of("a"), block_of("a"))
        asked = [key_of("b"), key_of("a"), key_of("c"), key_of("a")]
        assert await store.contains(asked) == [False, True, False, True]
        assert await store.contains([]) == []

    @on_fresh_store
    async def test_store_get_into_of_an_unknown_key_raises_block_missing(
        self, store: Store
    ) -> None:
        with pytest.raises(BlockMissing):
            await read(store, key_of("a"))

    @on_fresh_store
    async def test_store_deleted_block_is_missing_and_can_be_put_again(self, store: Store) -> None:
        await store.put(key_of("a"), block_of("a"))
        await store.delete(key_of("a"))
        await store.delete(key_of("a"))
        assert await store.contains([key_of("a")]) == [False]
        with pytest.raises(BlockMissing):
            await read(store, key_of("a"))
        assert await store.put(key_of("a"), block_of("a")) is True
        assert await read(store, key_of("a")) == block_of("a")

    @on_fresh_store
    async def test_store_list_blocks_yields_the_stored_blocks_or_is_unavailable(
        self, store: Store
    ) -> None:
        if not self.can_list:
            with pytest.raises(StoreUnavailable):
                await anext(aiter(store.list_blocks()))
            return
        assert [block async for block in store.list_blocks()] == []
        for name in range(4):
            await store.put(key_of(name), block_of(name))
        await store.delete(key_of(2))
        listed = {block.key: block async for block in store.list_blocks()}
        assert listed.keys() == {key_of(0), key_of(1), key_of(3)}
        assert all(block.stored_bytes >= LAYOUT.block_bytes for block in listed.values())

    @on_fresh_store
    async def test_store_stats_that_are_known_grow_with_each_put(self, store: Store) -> None:
        before = await store.stats()
        for name in range(4):
            await store.put(key_of(name), block_of(name))
        after = await store.stats()
        if before.blocks is not None and after.blocks is not None:
            assert after.blocks - before.blocks == 4
        if before.used_bytes is not None and after.used_bytes is not None:
            assert after.used_bytes - before.used_bytes >= 4 * LAYOUT.block_bytes
        if after.capacity_bytes is not None and after.used_bytes is not None:
            assert after.used_bytes <= after.capacity_bytes

    @on_fresh_store
    async def test_store_put_data_overwritten_afterwards_leaves_the_block_intact(
        self, store: Store
    ) -> None:
        data = bytearray(block_of("a"))
        await store.put(key_of("a"), memoryview(data))
        data[:] = bytes(len(data))
        assert await read(store, key_of("a")) == block_of("a")

    @on_fresh_store
    async def test_store_get_into_writes_only_inside_its_buffer(self, store: Store) -> None:
        await store.put(key_of("a"), block_of("a"))
        size = LAYOUT.block_bytes
        staging = bytearray(b"\x11" * (3 * size))
        await store.get_into(key_of("a"), memoryview(staging)[size : 2 * size])
        assert staging == b"\x11" * size + bytes(block_of("a")) + b"\x11" * size

    @on_fresh_store
    async def test_store_progress_of_parallel_reads_counts_only_bytes_present(
        self, store: Store
    ) -> None:
        async def progress_of(name: int) -> tuple[ProgressRecord, int]:
            out = bytearray(LAYOUT.block_bytes)
            progress = ProgressRecord(out, block_of(name))
            await store.get_into(key_of(name), memoryview(out), progress)
            return progress, len(progress.counts)

        names = range(8)
        for name in names:
            await store.put(key_of(name), block_of(name))
        reads = await asyncio.gather(*(progress_of(name) for name in names))
        assert [await read(store, key_of(n)) for n in names] == [block_of(n) for n in names]
        for progress, count in reads:
            self._check(progress)
            assert len(progress.counts) == count, "told after the call had returned"

    def _check(self, progress: ProgressRecord) -> None:
        """Of a read without failures."""
        assert progress.wrong == []
        if self.tells_progress:
            assert progress.grew, progress.counts
        else:
            assert progress.counts == []

    @on_fresh_store
    async def test_store_progress_of_a_missing_block_is_never_reported(self, store: Store) -> None:
        out = bytearray(LAYOUT.block_bytes)
        progress = ProgressRecord(out, block_of("a"))
        with pytest.raises((BlockMissing, StoreUnavailable)):
            await store.get_into(key_of("a"), memoryview(out), progress)
        assert progress.counts == []

    @on_fresh_store
    async def test_store_forty_parallel_puts_and_reads_all_succeed(self, store: Store) -> None:
        names = range(40)
        fresh = await asyncio.gather(*(store.put(key_of(n), block_of(n)) for n in names))
        assert all(fresh)
        got = await asyncio.gather(*(read(store, key_of(n)) for n in names))
        assert got == [block_of(n) for n in names]

    @on_fresh_store
    async def test_store_parallel_puts_of_one_key_leave_a_whole_block(self, store: Store) -> None:
        fresh = await asyncio.gather(*(store.put(key_of("a"), block_of("a")) for _ in range(8)))
        assert any(fresh)
        assert await read(store, key_of("a")) == block_of("a")

    @on_fresh_store
    async def test_store_cancelled_calls_leave_blocks_and_buffers_intact(
        self, store: Store
    ) -> None:
        for steps in range(6):  # how far each call gets before it is cancelled
            key, out = key_of(steps), bytearray(LAYOUT.block_bytes)
            progress = ProgressRecord(out, block_of("old"))
            await store.put(key_of("old"), block_of("old"))
            calls: list[asyncio.Task[object]] = [
                asyncio.create_task(store.put(key, block_of(steps))),
                asyncio.create_task(store.get_into(key_of("old"), memoryview(out), progress)),
                asyncio.create_task(store.contains([key])),
            ]
            for _ in range(steps):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            counts = list(progress.counts)
            out[:] = bytes(len(out))
            assert await read(store, key_of("old")) == block_of("old")
            if (await store.contains([key]))[0]:
                assert await read(store, key) == block_of(steps)
            assert bytes(out) == bytes(len(out)), "written after the call had returned"
            assert progress.counts == counts, "told after the call had returned"
            assert progress.wrong == []

    @on_fresh_store
    async def test_store_closed_raises_store_unavailable_on_every_call(self, store: Store) -> None:
        await store.put(key_of("a"), block_of("a"))
        await store.close()
        await store.close()
        for call in (
            store.contains([key_of("a")]),
            read(store, key_of("a")),
            store.put(key_of("b"), block_of("b")),
            store.delete(key_of("a")),
            store.stats(),
            anext(aiter(store.list_blocks())),
        ):
            with pytest.raises(StoreUnavailable):
                await call
