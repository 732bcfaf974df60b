"""Draft models whose layers have sliding windows: rows in the target's windows are of its end
states, and rows in its slots are of its blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from kv_pools import (
    as_bytes,
    deepseek_v4,
    hnd,
    hybrid,
    mha,
    mxfp8,
    qsa,
    rows_of,
    since_0_5_23,
    states_of,
    unified_draft,
    unified_pools,
    windows,
)
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.memory.end_states import (
    EndPart,
    EndSlots,
    EndStates,
    compressed_window,
    recurrent_states,
    window_rows,
)
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.memory.pool_planes import DraftPools

SLOTS, WINDOW, BLOCK_BYTES = 512, 12, 1 << 12
STATE = Mamba2StateShape.create(
    tp_world_size=1,
    intermediate_size=16,
    n_groups=1,
    num_heads=2,
    head_dim=8,
    state_size=4,
    conv_kernel=4,
)


def target() -> Any:
    """Of a model with sliding windows, as its allocator leaves it."""
    pool = windows(SLOTS)
    pool.register_mapping(torch.zeros(SLOTS + 1, dtype=torch.int64))
    return pool


def draft(of: Any, *, layers: Sequence[int] = (), **options: Any) -> Any:
    """An MTP layer of MiMo V2 or Step 3.5, which has a window; with these full layers too."""
    pool = windows(
        SLOTS, swa_attention_layer_ids=[0], full_attention_layer_ids=list(layers), **options
    )
    pool.register_mapping(of.full_to_swa_index_mapping)
    return pool


def test_draft_pools_windows_of_the_target_are_apart_from_its_slots() -> None:
    of = target()
    plain, mtp, both = mha(SLOTS), draft(of), draft(of, layers=[1])
    found = DraftPools.of([plain, mtp, both], of)
    assert found.rows == (plain, both.full_kv_pool)
    assert found.windows == (mtp.swa_kv_pool, both.swa_kv_pool)
    assert DraftPools.of([], of) == DraftPools()
    assert DraftPools.of([plain], mha(SLOTS)).rows == (plain,)


def test_draft_pools_of_a_hybrid_have_rows_beside_the_states_of_the_target() -> None:
    """SGLang gives a draft model of such a target the target's own states."""
    of, mtp = hybrid(SLOTS), hybrid(SLOTS)
    assert DraftPools.of([mtp], of) == DraftPools(rows=(mtp.full_kv_pool,))


def test_draft_pools_of_a_hybrid_with_an_index_have_it_in_blocks() -> None:
    of, mtp = qsa(SLOTS), qsa(SLOTS)
    found = DraftPools.of([mtp], of)
    assert found == DraftPools(rows=(mtp,))
    kv = DeviceKV(of, block_tokens=64, drafts=found.rows)
    assert [part for group in kv.layout.groups for part, _ in group.parts] == [
        *("k", "v", "index", "draft_k", "draft_v", "draft_index")
    ]


def test_draft_pools_windows_in_slots_of_the_target_are_rows_of_blocks() -> None:
    of = target()
    mtp = draft(of, size_swa=SLOTS)
    mtp.register_mapping(torch.arange(SLOTS + 1))
    mtp.swa_uses_full_indices = True
    found = DraftPools.of([mtp], of)
    assert found == DraftPools(rows=(mtp.swa_kv_pool,))
    kv = DeviceKV(of.full_kv_pool, block_tokens=16, drafts=found.rows)
    assert kv.layout.block_bytes > DeviceKV(of.full_kv_pool, block_tokens=16).layout.block_bytes


def test_draft_pools_windows_in_other_slots_are_refused() -> None:
    of = target()
    mtp = draft(of)
    mtp.register_mapping(of.full_to_swa_index_mapping.clone())
    for pool in (of, mha(SLOTS)):
        with pytest.raises(ConfigError, match=r"^cake does not support a draft model [^\n]+$"):
            DraftPools.of([mtp], pool)


def moved(
    part: EndPart,
    other: EndPart,
    taken: EndSlots,
    given: EndSlots,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Save an end state of one side, and load it on the other."""
    source, sink = EndStates([part]), EndStates([other])
    assert source.describe() == sink.describe()
    buffers = [Buffer(on_page(block_bytes)) for _ in range(source.count)]
    source.save(source.prepare(taken), buffers, ()).wait()
    for (kv, slots), buffer in zip(sink.blocks_of(sink.prepare(given)), buffers, strict=True):
        kv.load(buffer, slots, ())


def windows_of(of: Any, drafts: Sequence[Any]) -> EndPart:
    return window_rows(
        *(DeviceKV, of.swa_kv_pool, BLOCK_BYTES, drafts), page_tokens=1, window_tokens=WINDOW
    )


def filled(buffers: Sequence[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        raw = as_bytes(buffer)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_draft_pools_end_state_brings_the_windows_of_all_draft_layers(layers: int) -> None:
    """With none, as a control, the rows of a draft stay behind."""
    sides = []
    for seed in (1, 2):
        of = target()
        mtps = [draft(of) for _ in range(max(1, layers))]
        buffers = [b for pool in (of, *mtps) for b, _ in rows_of(pool.swa_kv_pool)]
        filled(buffers, seed)
        drafts = DraftPools.of(mtps[:layers], of).windows
        sides.append((windows_of(of, drafts), buffers))
    (source, rows), (sink, given_rows) = sides
    taken, given = torch.arange(20, 20 + WINDOW), torch.arange(90, 90 + WINDOW)
    moved(source, sink, EndSlots(window=taken), EndSlots(window=given))
    equal = [
        torch.equal(as_bytes(b)[given], as_bytes(a)[taken])
        for a, b in zip(rows, given_rows, strict=True)
    ]
    own = len(rows) - 2 * max(1, layers)  # K and V of the target's layers
    assert all(equal[:own])
    assert equal[own:] == [layers > 0] * (2 * max(1, layers))


def layers_of(pools: Sequence[Any]) -> list[torch.Tensor]:
    """The states of each layer of some state pools."""
    return [
        layer
        for pool in pools
        for states in (*pool.mamba_cache.conv, pool.mamba_cache.temporal)
        for layer in states
    ]


@since_0_5_23
@pytest.mark.parametrize("has_full", [True, False])
def test_draft_pools_windows_in_the_memory_of_all_pools_are_of_end_states(has_full: bool) -> None:
    """SGLang puts them into the rows of the target's own windows, which move."""
    sides = []
    for seed in (1, 2):
        made = unified_pools(SLOTS, drafts=["full", "swa"] if has_full else ["swa"])
        allocator, of = made.token_to_kv_pool_allocator, made.token_to_kv_pool
        mtps = [unified_draft(allocator, runner) for runner in range(2)]
        drafts = DraftPools.of(mtps, of)
        assert drafts.windows == tuple(each.swa_kv_pool for each in mtps)
        assert drafts.rows == (tuple(each.full_kv_pool for each in mtps) if has_full else ())
        buffers = [b for pool in (of, *mtps) for b, _ in rows_of(pool.swa_kv_pool)]
        filled(buffers, seed)
        sides.append((windows_of(of, drafts.windows), buffers))
    (source, rows), (sink, given_rows) = sides
    taken, given = torch.arange(20, 20 + WINDOW), torch.arange(90, 90 + WINDOW)
    moved(source, sink, EndSlots(window=taken), EndSlots(window=given))
    for a, b in zip(rows, given_rows, strict=True):
        assert torch.equal(as_bytes(b)[given], as_bytes(a)[taken])


@since_0_5_23
@pytest.mark.parametrize("beside", ["states", "both"])
def test_draft_pools_states_in_the_memory_of_all_pools_are_of_end_states(beside: str) -> None:
    sides = []
    for seed in (1, 2):
        made = unified_pools(SLOTS, beside=beside, drafts=["full", "mamba"])
        of = made.req_to_token_pool
        mtps = [of.clone_for_fused_draft(layer_lanes={0: runner}) for runner in range(2)]
        pools = [of.mamba_pool, *(each.mamba_pool for each in mtps)]
        planes = layers_of(pools)
        filled(planes, seed)
        held = of.mamba_allocator.alloc(3)
        of.mamba_allocator.free(held[:1])
        part = recurrent_states(DeviceKV, of.mamba_pool, BLOCK_BYTES, pools[1:])
        sides.append((part, planes, held[1:2], of.mamba_allocator))
    (source, rows, taken, _), (sink, given_rows, given, allocator) = sides
    moved(source, sink, EndSlots(state=taken), EndSlots(state=given))
    where, came_from = allocator.translate(given), sides[0][3].translate(taken)
    for a, b in zip(rows, given_rows, strict=True):
        assert torch.equal(as_bytes(b)[where], as_bytes(a)[came_from])


@since_0_5_23
def test_draft_pools_states_of_their_own_beside_a_memory_of_all_pools_are_refused() -> None:
    """Their rows would be numbers of slots, and those of the target are not."""
    of = unified_pools(SLOTS, beside="states").req_to_token_pool
    own = states_of_draft(states(), slots=16).mamba_pool
    with pytest.raises(ConfigError, match=r"^cake does not support a draft model [^\n]+$"):
        recurrent_states(DeviceKV, of.mamba_pool, BLOCK_BYTES, [own])


@pytest.mark.parametrize("make", [mxfp8, hnd])
@pytest.mark.parametrize("pages_in_block", [1, 2, 5])
def test_window_rows_of_pages_are_moved_in_whole_pages(
    make: Callable[[int], Any], pages_in_block: int
) -> None:
    pools, parts = [make(1024), make(1024)], []
    page = pools[0].page_size
    size = DeviceKV(pools[0], block_tokens=page).layout.block_bytes
    for seed, pool in enumerate(pools):
        filled([b for b, _ in rows_of(pool)], seed)
        parts.append(
            window_rows(
                DeviceKV,
                pool,
                size * pages_in_block + 7,  # the rest is too small for a page
                page_tokens=page,
                window_tokens=3 * page,
            )
        )
    source, sink = parts
    assert EndStates([source]).count == -(-3 // min(pages_in_block, 3))
    before = [as_bytes(b).clone() for b, _ in rows_of(pools[1])]
    taken, given = torch.arange(3 * page) + page, torch.arange(3 * page) + 4 * page
    moved(source, sink, EndSlots(window=taken), EndSlots(window=given), size * pages_in_block + 7)
    everything = zip(rows_of(pools[0]), rows_of(pools[1]), before, strict=True)
    for (a, row_tokens), (b, _), old in everything:
        rows = page // row_tokens
        kept = [r for r in range(len(b)) if not 4 * rows <= r < 7 * rows]
        assert torch.equal(as_bytes(b)[4 * rows : 7 * rows], as_bytes(a)[rows : 4 * rows])
        assert torch.equal(as_bytes(b)[kept], old[kept])


def test_window_rows_of_a_page_larger_than_a_block_are_refused() -> None:
    pool = mxfp8(256)
    page = DeviceKV(pool, block_tokens=128).layout
    with pytest.raises(ConfigError, match=r"^cake stores .* 128 tokens of them take [^\n]+$"):
        window_rows(DeviceKV, pool, page.block_bytes - 1, page_tokens=128, window_tokens=128)


@since_0_5_23
def test_draft_pools_windows_of_deepseek_v4_are_pages_of_its_end_states() -> None:
    sides = []
    for seed in (1, 2):
        of, mtp = deepseek_v4(8 * 256), deepseek_v4(8 * 256, compression_ratios=[0], layer_num=1)
        mapping = torch.zeros(8 * 256, dtype=torch.int64)
        of.register_mapping(mapping)
        mtp.register_mapping(mapping)
        drafts = DraftPools.of([mtp], of)
        assert drafts == DraftPools(windows=(mtp.swa_kv_pool,))
        filled([*of.swa_kv_pool.kv_buffer, *mtp.swa_kv_pool.kv_buffer], seed)
        sides.append((compressed_window(DeviceKV, of, BLOCK_BYTES, drafts.windows), mtp))
    (source, mtp), (sink, other) = sides
    page = torch.arange(256)
    moved(source, sink, EndSlots(window=256 * 2 + page), EndSlots(window=256 * 4 + page))
    for a, b in zip(mtp.swa_kv_pool.kv_buffer, other.swa_kv_pool.kv_buffer, strict=True):
        assert torch.equal(as_bytes(b)[4], as_bytes(a)[2])
        assert not torch.equal(as_bytes(b)[3], as_bytes(a)[2])


def states(slots: int = 8) -> HybridReqToTokenPool:
    """Of two layers."""
    return HybridReqToTokenPool(
        size=4,
        mamba_size=slots,
        mamba_spec_state_size=4,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=STATE, layers=[0, 1]),
        mamba_layer_ids=[0, 1],
        enable_mamba_extra_buffer=False,
    )


def states_of_draft(of: HybridReqToTokenPool, slots: int = 8) -> HybridReqToTokenPool:
    """As SGLang makes them for one of several draft layers."""
    return of.clone_with_new_mamba(
        mamba_size=slots,
        mamba_spec_state_size=4,
        cache_params=Mamba2CacheParams(shape=STATE, layers=[0]),
        device="cpu",
        enable_mamba_extra_buffer=False,
        draft_model_idx=0,
    )


@pytest.mark.parametrize("drafts", [0, 2])
def test_draft_pools_end_state_brings_the_states_of_all_draft_layers(drafts: int) -> None:
    """With none, as a control, the states of a draft stay behind."""
    sides = []
    for seed in (1, 2):
        of = states()
        mtps = [states_of_draft(of) for _ in range(max(1, drafts))]
        pools = [of.mamba_pool, *(each.mamba_pool for each in mtps)]
        planes = layers_of(pools)
        filled(planes, seed)
        found = DraftPools.of([], mha(SLOTS), states=pools[1 : 1 + drafts])
        part = recurrent_states(DeviceKV, of.mamba_pool, BLOCK_BYTES, found.states)
        sides.append((part, planes))
    (source, rows), (sink, given_rows) = sides
    taken, given = torch.tensor([2]), torch.tensor([5])
    moved(source, sink, EndSlots(state=taken), EndSlots(state=given))
    equal = [
        torch.equal(as_bytes(b)[given], as_bytes(a)[taken])
        for a, b in zip(rows, given_rows, strict=True)
    ]
    own = len(rows) * 2 // (2 + max(1, drafts))  # a draft has one layer
    assert all(equal[:own])
    assert equal[own:] == [drafts > 0] * (len(rows) - own)


def test_draft_pools_without_rows_for_all_states_are_refused() -> None:
    of = states()
    small = states_of_draft(of, slots=4)
    with pytest.raises(ConfigError, match=r"^cake cannot store a draft model [^\n]+$"):
        recurrent_states(DeviceKV, of.mamba_pool, BLOCK_BYTES, [small.mamba_pool])


def test_draft_pools_of_deepseek_v4_that_compress_or_are_smaller_are_refused() -> None:
    of = deepseek_v4(8 * 256)
    mapping = torch.zeros(8 * 256, dtype=torch.int64)
    of.register_mapping(mapping)
    compressing = deepseek_v4(8 * 256)
    compressing.register_mapping(mapping)
    assert any(states_of(compressing)[1])
    with pytest.raises(ConfigError, match=r"^cake does not support a draft model [^\n]+$"):
        DraftPools.of([compressing], of)
    small = deepseek_v4(2 * 256, compression_ratios=[0], layer_num=1)
    with pytest.raises(ConfigError, match=r"^cake cannot store a draft model [^\n]+$"):
        compressed_window(DeviceKV, of, BLOCK_BYTES, [small.swa_kv_pool])
