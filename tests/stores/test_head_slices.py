"""Blocks in slices by KV heads: what one number of ranks stores, another one reads."""

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_files import write_private

from sglang_cake.codecs import codec_choice
from sglang_cake.codecs.codec_choice import AutoCodec
from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreUnavailable
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout, PlaneGroup
from sglang_cake.stores import open_store
from sglang_cake.stores.base import EvictionCounts, RequestFacts, Store, StoreStats, TierStats
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.stores.head_slices import HeadSliceStore
from sglang_cake.stores.link_speed import LinkSpeed
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.stores.tiers.tiered_store import COPY_BYTES, TieredStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import LAYOUT, StoreContract, block_of, key_of, read

KEY = key_of("block")


def namespaces(first: int, count: int) -> list[Namespace]:
    return [Namespace((("model", "m"), ("head_group", str(first + i)))) for i in range(count)]


def open_file(folder: Path, count: int = 2, **options: object) -> Store:
    return open_blocks(
        parse_sources(f"file://{folder}/kv?min_free=0{options.pop('url', '')}"),
        namespaces(0, count),
        LAYOUT,
        depth=2,
        **{"codec": "raw", **options},
    )


class SlicedContract(StoreContract):
    tells_progress = False
    can_list = False

    def test_store_payloads_of_any_stored_length_are_read_back(self, tmp_path: Path) -> None:
        """Blocks in slices all have one length, whatever is stored of them."""

        async def test(store: Store) -> None:
            for block in (memoryview(bytes(LAYOUT.block_bytes)), block_of("noise")):
                key = key_of(bytes(block))
                assert await store.put(key, block)
                out = bytearray(LAYOUT.block_bytes + 64)
                view = memoryview(out)[: LAYOUT.block_bytes]
                assert await store.get_into(key, view) == LAYOUT.block_bytes
                assert out == bytes(block) + bytes(64)

        self.run(tmp_path, test)

    def test_store_stats_that_are_known_grow_with_each_put(self, tmp_path: Path) -> None:
        """Statistics are those of all namespaces of a store, in which each slice is a block."""

        async def test(store: Store) -> None:
            before = await store.stats()
            for name in range(4):
                await store.put(key_of(name), block_of(name))
            after = await store.stats()
            assert (after.blocks or 0) - (before.blocks or 0) == 2 * 4
            assert (after.used_bytes or 0) - (before.used_bytes or 0) >= 4 * LAYOUT.block_bytes

        self.run(tmp_path, test)


class TestSlicedEncodedFiles(SlicedContract):
    def open(self, folder: Path) -> Store:
        return open_file(folder, codec="zstd")


class TestSlicedMemory(SlicedContract):
    def open(self, folder: Path) -> Store:
        sources = parse_sources("memory://1MB")
        return open_blocks(sources, namespaces(0, 2), LAYOUT, depth=2, codec="raw")


class ToldStore(MemoryStore):
    """A store with the statistics of a test."""

    def __init__(self, told: StoreStats) -> None:
        super().__init__()
        self.told = told

    async def stats(self) -> StoreStats:
        return self.told


async def stats_of_slices(*told: StoreStats) -> StoreStats:
    store = HeadSliceStore([*map(ToldStore, told)], LAYOUT, depth=1)
    stats = await store.stats()
    await store.close()
    return stats


async def test_head_slices_evictions_are_those_of_all_slices_in_whole_blocks() -> None:
    counts = EvictionCounts(4096, 1, 5, 0), EvictionCounts(8192, 2, 7, 3)
    stats = await stats_of_slices(*(StoreStats(blocks=9, evictions=each) for each in counts))
    total = EvictionCounts(4096 + 8192, (1 + 2) // 2, 5 + 7, (0 + 3) // 2)
    assert stats == StoreStats(blocks=9, evictions=total)


async def test_head_slices_tier_that_one_slice_leaves_out_is_left_out() -> None:
    """And its bytes are those of all slices, whose blocks are one."""
    held = StoreStats(blocks=4)
    first = TierStats(held, True, True, {"read_blocks": 3, "read_bytes": 300, "left_out": 0})
    other = TierStats(held, False, True, {"read_blocks": 2, "read_bytes": 200, "left_out": 1})
    stats = await stats_of_slices(StoreStats(tiers=(first,)), StoreStats(tiers=(other,)))
    counts = {"read_blocks": 3, "read_bytes": 300 + 200, "left_out": 0 + 1}
    assert stats.tiers == (TierStats(held, False, True, counts),)


async def test_head_slices_in_one_memory_count_each_eviction_once() -> None:
    layout = BlockLayout.plain(2, (("k", (2, 64)), ("v", (2, 64))), "bfloat16", 128)
    sources = parse_sources("memory://1MiB")
    store = open_blocks(sources, namespaces(0, 2), layout, depth=2, codec="raw")
    for name in range(20):
        await store.put(key_of(name), block_of(name, layout))
    stats = await store.stats()
    await store.close()
    assert stats.blocks == 16
    assert stats.evictions.evicted_blocks == 20 - 16 / 2


@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_head_slices_share_the_host_memory_for_copies_between_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    opened = Mock(side_effect=TieredStore)
    monkeypatch.setattr(open_store, "TieredStore", opened)
    layout = BlockLayout.plain(2, (("k", (4, 64)), ("v", (4, 64))), "bfloat16", 128)
    sources = parse_sources(f"memory://1MiB,file://{tmp_path}/kv?min_free=0")
    store = open_blocks(sources, namespaces(0, 4), layout, depth=2, codec=codec)
    await store.close()
    assert [call.kwargs["copy_bytes"] for call in opened.call_args_list] == [COPY_BYTES // 4] * 4


async def test_head_slices_share_the_threads_that_encode_and_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = set(threading.enumerate())

    def threads() -> list[str]:
        return sorted(
            thread.name
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith(("cake-decode", "cake-encode"))
        )

    layout = BlockLayout.plain(2, (("k", (4, 64)), ("v", (4, 64))), "bfloat16", 128)
    sources = parse_sources(f"file://{tmp_path}/kv?min_free=0")
    store = open_blocks(sources, namespaces(0, 4), layout, depth=8, codec="zstd")
    data = block_of("noise", layout)
    keys = [key_of(number) for number in range(4)]
    assert all(await asyncio.gather(*(store.put(key, data) for key in keys)))
    outs = [memoryview(bytearray(layout.block_bytes)) for _ in keys]
    await asyncio.gather(*(store.get_into(key, out) for key, out in zip(keys, outs, strict=True)))
    assert outs == [data] * 4
    assert threads() == ["cake-decode_0", "cake-encode_0"]
    await store.close()
    assert not threads()
    with pytest.raises(StoreUnavailable):
        await store.get_into(keys[0], outs[0])


async def test_head_slices_auto_compares_all_slices_of_the_link_with_the_threads_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codecs = Mock(side_effect=AutoCodec)
    monkeypatch.setattr(codec_choice, "AutoCodec", codecs)
    monkeypatch.setattr(LinkSpeed, "bytes_per_s", lambda _: 5e6)
    layout = BlockLayout.plain(2, (("k", (4, 64)), ("v", (4, 64))), "bfloat16", 128)
    one, other = (f"file://{tmp_path}/{name}?min_free=0" for name in ("one", "other"))
    for urls in (one, f"{one},{other}"):
        sources = parse_sources(urls)
        store = open_blocks(sources, namespaces(0, 4), layout, depth=2, codec="auto")
        await store.close()
    speeds = [[link() for link in call.kwargs["links"]] for call in codecs.call_args_list]
    assert speeds == [[2e7]] * 4 + [[2e7, 2e7]] * 4


def of_heads(layout: BlockLayout, heads: dict[str, np.ndarray], of: slice) -> bytes:
    """The block of the ranks with these shares of each part's heads, made without the code that is
    tested. Args: heads: [layers, tokens, heads, bytes of a head] by part."""
    block = b""
    for group in layout.groups:
        for layer in range(group.layers):
            for name, (count, _) in group.parts:
                mine = slice(of.start * count, of.start * count + count)
                block += heads[name][layer][:, mine].tobytes()
    return block


@st.composite
def fleets(draw: st.DrawFn) -> tuple[BlockLayout, int, int, int]:
    """The layout of a whole block, the number of head groups, and two that divide it."""
    groups = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    ranks = st.sampled_from([n for n in range(1, groups + 1) if groups % n == 0])
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    planes = []
    for prefix in draw(st.sampled_from([[""], ["", "draft_"]])):
        heads = groups * draw(st.integers(1, 2))
        parts = tuple((prefix + name, (heads, draw(st.integers(1, 5)))) for name in ("k", "v"))
        planes.append(PlaneGroup(draw(st.integers(1, 3)), parts, dtype))
    return BlockLayout(tuple(planes), draw(st.integers(1, 5))), groups, draw(ranks), draw(ranks)


@given(fleet=fleets(), seed=st.integers(0, 999))
async def test_head_slices_any_number_of_ranks_reads_what_any_other_stored(
    fleet: tuple[BlockLayout, int, int, int], seed: int
) -> None:
    layout, groups, writers, readers = fleet
    random = np.random.default_rng(seed)
    heads = {
        name: random.integers(
            0, 256, (group.layers, layout.block_tokens, count, dim * DTYPE_BYTES[group.dtype])
        ).astype(np.uint8)
        for group in layout.groups
        for name, (count, dim) in group.parts
    }
    stores = [MemoryStore() for _ in range(groups)]

    def of_rank(rank: int, ranks: int) -> tuple[BlockLayout, HeadSliceStore, bytes]:
        own = layout.sliced(ranks)
        each = groups // ranks
        mine = stores[rank * each : (rank + 1) * each]
        store = HeadSliceStore(mine, own, depth=1)
        return own, store, of_heads(own, heads, slice(rank, rank + 1))

    for rank in range(writers):
        _, store, block = of_rank(rank, writers)
        assert await store.put(KEY, memoryview(block))
    for rank in range(readers):
        own, store, block = of_rank(rank, readers)
        assert await store.contains([KEY]) == [True]
        assert await read(store, KEY, own) == block


async def test_head_slices_one_slice_missing_makes_the_block_missing_until_it_is_stored_again() -> (
    None
):
    stores = [MemoryStore() for _ in range(2)]
    block = block_of("block")
    store = HeadSliceStore(stores, LAYOUT, depth=1)
    assert await store.put(KEY, block)
    assert not await store.put(KEY, block)
    await stores[1].delete(KEY)
    assert await store.contains([KEY]) == [False]
    out = bytearray(LAYOUT.block_bytes)
    with pytest.raises(BlockMissing):
        await store.get_into(KEY, memoryview(out))
    assert out == bytes(LAYOUT.block_bytes)  # nothing of the other slice
    assert await store.put(KEY, block)
    assert await read(store, KEY) == block


@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_head_slices_one_corrupt_slice_makes_the_block_corrupt_and_then_missing(
    tmp_path: Path, codec: str
) -> None:
    def damage_one_slice() -> None:
        files = [path for path in tmp_path.rglob(KEY.hex()) if path.is_file()]
        assert len(files) == 2
        content = bytearray(files[0].read_bytes())
        content[HEADER_BYTES + 5] ^= 1
        files[0].write_bytes(content)

    store = open_file(tmp_path, codec=codec)
    await store.put(KEY, block_of("block"))
    damage_one_slice()
    with pytest.raises(BlockCorrupt):
        await read(store, KEY)
    with pytest.raises(BlockMissing):
        await read(store, KEY)
    assert await store.put(KEY, block_of("block"))
    assert await read(store, KEY) == block_of("block")
    await store.close()


@pytest.mark.parametrize("failing", [0, 1])
async def test_head_slices_failed_slice_of_a_put_leaves_no_block(failing: int) -> None:
    class Full(MemoryStore):
        async def put(self, key: object, data: memoryview) -> bool:
            raise StoreUnavailable("read-only")

    stores = [Full() if number == failing else MemoryStore() for number in range(2)]
    store = HeadSliceStore(stores, LAYOUT, depth=1)
    with pytest.raises(StoreUnavailable):
        await store.put(KEY, block_of("block"))
    assert await store.contains([KEY]) == [False]


async def test_head_slices_many_puts_at_once_are_never_more_than_depth() -> None:
    running = most = 0

    class Busy(MemoryStore):
        async def put(self, key: object, data: memoryview) -> bool:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await super().put(key, data)

    store = HeadSliceStore([Busy(), Busy()], LAYOUT, depth=3)
    keys = [key_of(str(number)) for number in range(8)]
    assert all(await asyncio.gather(*(store.put(key, block_of("block")) for key in keys)))
    assert await store.contains(keys) == [True] * 8
    assert most == 3


async def test_head_slices_block_counts_once_and_its_bytes_all(tmp_path: Path) -> None:
    counters = Counters()
    store = open_file(tmp_path, counters=counters)
    await store.put(KEY, block_of("block"))
    await read(store, KEY)
    await store.close()
    counts = counters.snapshot()
    assert counts["read_blocks", ""] == 1
    assert counts["read_bytes", ""] == LAYOUT.block_bytes + 2 * HEADER_BYTES
    assert counts["stored_bytes", ""] == LAYOUT.block_bytes + 2 * HEADER_BYTES
    assert counters.link_bytes(0) == LAYOUT.block_bytes + 2 * HEADER_BYTES


async def turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Hanging(MemoryStore):
    """Reads end some turns of the loop after they are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()
        self.ended = 0

    async def get_into(self, key: object, out: memoryview, progress: object = None) -> int:
        self.started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ending = asyncio.ensure_future(turns_of_the_loop(20))
            while not ending.done():  # as a thread that uses `out`, whatever is cancelled
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)
            self.ended += 1
        raise AssertionError


async def test_head_slices_cancelled_read_ends_in_every_slice_before_its_memory_is_used_again() -> (
    None
):
    stores = [Hanging(), Hanging()]
    store = HeadSliceStore(stores, LAYOUT, depth=1)
    reading = asyncio.ensure_future(read(store, KEY))
    for each in stores:
        await each.started.wait()
    for _ in range(2):  # cancelled again while it ends
        reading.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [each.ended for each in stores] == [1, 1]


async def test_head_slices_failed_read_of_one_slice_ends_the_others() -> None:
    hanging = Hanging()
    store = HeadSliceStore([MemoryStore(), hanging], LAYOUT, depth=1)
    with pytest.raises(BlockMissing):
        await read(store, KEY)
    assert hanging.ended == 1


class CountingStore(MemoryStore):
    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def events(self) -> dict[str, int]:
        return self.counts


@pytest.mark.parametrize("other", [{}, {"requests": 2, "retries": 0}])
@pytest.mark.parametrize("swap", [False, True])
def test_head_slices_events_are_the_sum_also_while_a_slice_is_not_open(
    other: dict[str, int], swap: bool
) -> None:
    stores = [CountingStore({"requests": 3, "retries": 0}), CountingStore(other)]
    store = HeadSliceStore(stores[::-1] if swap else stores, LAYOUT, depth=1)
    assert store.events() == {"requests": 3 + other.get("requests", 0), "retries": 0}


class AccessRecordingStore(MemoryStore):
    """A store with tiers that records accesses."""

    def __init__(self, tier: int) -> None:
        super().__init__()
        self.tier = tier
        self.seen: list[object] = []

    def sources(self, keys: Sequence[object]) -> list[int]:
        return [self.tier] * len(keys)

    async def on_access(self, keys: Sequence[object], facts: RequestFacts) -> None:
        self.seen += keys


async def test_head_slices_all_slices_hear_of_accesses_and_the_slowest_tier_counts() -> None:
    stores = [AccessRecordingStore(0), AccessRecordingStore(1)]
    store = HeadSliceStore(stores, LAYOUT, depth=1)
    await store.on_access([KEY], RequestFacts("r", 8))
    assert store.sources([KEY]) == [1]
    assert [each.seen for each in stores] == [[KEY], [KEY]]


@pytest.mark.parametrize(
    "group",
    [
        PlaneGroup(1, (("kv", (1, 8)),), "uint8"),
        PlaneGroup(1, (("k", (3, 8)), ("v", (3, 8))), "uint8"),
        PlaneGroup(1, (("k", (2, 8)), ("v", (1, 8))), "uint8"),
        PlaneGroup(1, (("page", (2, 8)),), "uint8", row_tokens=4),
        PlaneGroup(1, (("k", (16,)),), "uint8"),
    ],
)
def test_head_slices_layout_without_heads_to_divide_is_refused(group: PlaneGroup) -> None:
    layout = BlockLayout((group,), 8)
    assert layout.sliced(1) == layout
    with pytest.raises(ValueError, match="heads"):
        layout.sliced(2)


async def test_head_slices_of_encrypted_stores_are_read(tmp_path: Path) -> None:
    key_file = write_private(tmp_path / "key", "ab" * 32)
    store = open_file(tmp_path, url=f"&key_file={key_file}", codec="zstd")
    assert await store.put(KEY, block_of("block"))
    assert await read(store, KEY) == block_of("block")
    await store.close()


async def test_head_slices_whole_blocks_have_no_store_in_between(tmp_path: Path) -> None:
    store = open_file(tmp_path, count=1)
    assert not isinstance(store, HeadSliceStore)
    await store.close()


async def test_head_slices_of_one_folder_all_have_the_facts_of_a_request(tmp_path: Path) -> None:
    """As in a server of blocks, whose namespaces share a folder."""
    folder, cut = BlockFolder(FolderSettings(tmp_path)), LAYOUT.sliced(2)
    slices = [FileStore(folder, BlockFrame(each, cut), threads=1) for each in namespaces(0, 2)]
    store = HeadSliceStore(slices, LAYOUT, depth=2)
    keys, data = [key_of("first"), KEY], block_of("noise")
    await store.on_access(keys, RequestFacts("r1", 1000, "chat", 7))
    for key in keys:
        await store.put(key, data)
    await store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "index.db")) as index:
        query = "SELECT workload, turn, position, reach, tenant, count(*) FROM blocks GROUP BY key"
        assert {*index.execute(query)} == {("chat", 1, 0, 2, 7, 2), ("chat", 1, 1, 2, 7, 2)}
