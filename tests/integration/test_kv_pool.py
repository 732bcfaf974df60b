"""Blocks in and out of SGLang's own pools, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_pools import as_bytes, buffers_for, buffers_of, mha, mla, scramble

from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.memory.kv_pool import DeviceKV

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
POOLS: dict[str, Callable[..., Any]] = {
    "mha": lambda **k: mha(96, heads=4, dim=8, **k),
    "gqa": lambda **k: mha(96, heads=1, dim=8, **k),
    "odd": lambda **k: mha(96, heads=1, dim=3, layers=3, **k),
    "v_dim": lambda **k: mha(96, heads=2, dim=6, v_dim=4, **k),
    "mla": lambda **k: mla(96, **k),
}
BLOCK = 16
SCATTERED = (torch.randperm(96, generator=torch.Generator().manual_seed(3)) + 1).tolist()
# The slots of four blocks: two to save, two to load.
SLOTS = {
    "scattered": SCATTERED[: 4 * BLOCK],
    "in_runs": [*range(3, 3 + BLOCK), *range(60, 60 + BLOCK), *range(20, 20 + 2 * BLOCK)],
    "swapped": [3, 5, 4, *range(6, 3 + 2 * BLOCK), 50, 51, 53, 52, *range(54, 50 + 2 * BLOCK)],
    "backwards": [*range(4 * BLOCK, 0, -1)],
}


@pytest.mark.parametrize("order", SLOTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", POOLS)
def test_kv_pool_block_round_trip_is_bit_exact_and_changes_no_other_slot(
    kind: str, dtype: torch.dtype, order: str
) -> None:
    source, target = POOLS[kind](dtype=dtype), POOLS[kind](dtype=dtype)
    scramble(source, 1)
    scramble(target, 2)
    before = [as_bytes(b).clone() for b in buffers_of(target)]
    kv_out, kv_in = DeviceKV(source, block_tokens=BLOCK), DeviceKV(target, block_tokens=BLOCK)
    assert kv_out.layout == kv_in.layout
    taken, given = torch.tensor(SLOTS[order]).split(2 * BLOCK)
    blocks = buffers_for(kv_out, 2)
    saved = kv_out.save(taken, blocks, kv_out.fence())
    saved.wait()
    assert saved.done()
    for block, part in zip(blocks, given.split(BLOCK), strict=True):
        assert kv_in.load(block, part, kv_in.fence()).done()
    others = torch.ones(97, dtype=torch.bool)
    others[given] = False
    for a, b, old in zip(buffers_of(source), buffers_of(target), before, strict=True):
        assert torch.equal(as_bytes(b)[given], as_bytes(a)[taken])
        assert torch.equal(as_bytes(b)[others], old[others])


@pytest.mark.parametrize("kind", POOLS)
def test_kv_pool_layout_describes_the_bytes_of_a_block(kind: str) -> None:
    pool = POOLS[kind](dtype=torch.bfloat16)
    scramble(pool, 1)
    kv = DeviceKV(pool, block_tokens=BLOCK)
    (block,) = buffers_for(kv, 1)
    assert kv.layout.dtype == "bfloat16"
    assert len(block.view) == kv.layout.block_bytes
    slots = torch.arange(5, 5 + BLOCK)
    kv.save(slots, [block], ()).wait()
    # Planes one after the other, each row by row: as `layout` promises to every reader.
    planes = [bytes(as_bytes(b)[slots].numpy()) for b in buffers_of(pool)]
    assert bytes(block.view) == b"".join(planes)
    assert [len(p) for p in planes] == [n * BLOCK for n in kv.layout.plane_token_bytes]


def test_kv_pool_fp8_layout_keeps_its_dtype_name() -> None:
    pool = mha(32, dtype=torch.float8_e4m3fn)
    assert pool.k_buffer[0].dtype is torch.uint8
    assert DeviceKV(pool, block_tokens=BLOCK).layout.dtype == "float8_e4m3fn"


@pytest.mark.parametrize("name", ["k_scale_buffer", "native_k_scale_buffer", "index_k_buffer"])
def test_kv_pool_with_more_than_k_and_v_for_a_slot_is_refused(name: str) -> None:
    pool = mha(32)
    setattr(pool, name, [torch.zeros(33, 2, 1)] * 2)
    with pytest.raises(ConfigError, match=name):
        DeviceKV(pool, block_tokens=BLOCK)


def test_kv_pool_without_known_buffers_is_refused() -> None:
    with pytest.raises(ConfigError, match="object"):
        DeviceKV(object(), block_tokens=BLOCK)


def test_kv_pool_unequal_layers_are_refused() -> None:
    pool = mha(32)
    pool.k_buffer[1] = torch.zeros(33, 2, 5)
    with pytest.raises(ConfigError, match="equal layers"):
        DeviceKV(pool, block_tokens=BLOCK)
