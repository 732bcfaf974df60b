"""What a pool keeps for a slot is found completely, or the pool is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_pools import (
    deepseek_v4,
    deepseek_v41,
    deepseek_v41_requests,
    dsa,
    fp4,
    hnd,
    hybrid,
    mha,
    minimax,
    mla,
    mxfp8,
    nvfp4,
    nvfp4_method,
    nvfp4_rows,
    pooled_dsa,
    qsa,
    rows_of,
    states_of,
    unified,
    windows,
)
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import PlaneGroup
from sglang_cake.integration.memory.pool_planes import pool_planes

SLOTS = 256
FP8 = torch.float8_e4m3fn
KV = PlaneGroup(3, (("kv", (1, 12)),), "bfloat16")
INDEX = PlaneGroup(3, (("index", (64 * (128 + 4),)),), "uint8", row_tokens=64)
K_AND_V = PlaneGroup(4, (("k", (2, 8)), ("v", (2, 8))), "bfloat16")
INDEX_K_AND_V = PlaneGroup(1, (("index_k", (1, 16)), ("index_v", (1, 16))), "bfloat16")
NATIVE_SCALES = (("k_native_scale", (2, 64, 4)), ("v_native_scale", (2, 64, 4)))
INDEX_K = PlaneGroup(2, (("index_k", (1, 16)),), "bfloat16")
V41 = [
    PlaneGroup(1, (("kv", (149760,)),), "uint8", row_tokens=256),
    PlaneGroup(1, (("kv", (74880,)),), "uint8", row_tokens=256),
    PlaneGroup(1, (("index", (64 * (64 + 4),)),), "uint8", row_tokens=64),
    PlaneGroup(1, (("index", (64 * (64 + 4),)),), "uint8", row_tokens=128),
]

# Pools that are stored: how they are made, and their planes.
STORED: dict[str, tuple[Callable[[], Any], list[PlaneGroup]]]
STORED = {
    "mha": (
        lambda: mha(SLOTS, v_dim=3),
        [PlaneGroup(2, (("k", (2, 4)), ("v", (2, 3))), "float32")],
    ),
    "mla": (lambda: mla(SLOTS), [PlaneGroup(2, (("kv", (1, 9)),), "float32")]),
    "dsa": (lambda: dsa(SLOTS), [KV, INDEX]),
    "dsa, a layer without an index": (
        lambda: dsa(SLOTS, skip_topk_layers=[False, True, False]),
        [KV, PlaneGroup(2, INDEX.parts, "uint8", row_tokens=64)],
    ),
    "dsa, KV packed with its scales": (
        lambda: dsa(SLOTS, dtype=FP8, kv_cache_dim=24),
        [PlaneGroup(3, (("kv", (1, 24)),), "uint8"), INDEX],
    ),
    "dsa, a pooled index": (
        lambda: pooled_dsa(SLOTS),
        [KV, PlaneGroup(3, INDEX.parts, "uint8", row_tokens=128)],
    ),
    "minimax": (lambda: minimax(SLOTS), [K_AND_V, INDEX_K_AND_V, INDEX_K]),
    "minimax, 8 bits beside 16": (
        lambda: minimax(SLOTS, dtype=FP8, index_dtype=torch.bfloat16),
        [PlaneGroup(4, K_AND_V.parts, "float8_e4m3fn"), INDEX_K_AND_V, INDEX_K],
    ),
    "minimax, 4 bits": (
        lambda: nvfp4(SLOTS),
        [
            PlaneGroup(2, (("page", (2 * 2 * 128 * 72,)),), "uint8", row_tokens=128),
            PlaneGroup(2, (("index_page", (128 * 72,)),), "uint8", row_tokens=128),
        ],
    ),
    "4 bits with scales": (
        lambda: fp4(SLOTS),
        [
            PlaneGroup(2, (("k", (2, 16)), ("v", (2, 16))), "uint8"),
            PlaneGroup(2, (("k_scale", (4,)), ("v_scale", (4,))), "uint8"),
        ],
    ),
    "4 bits with scales, mla": (
        lambda: fp4(SLOTS, mla=True),
        [
            PlaneGroup(2, (("kv", (1, 32)),), "uint8"),
            PlaneGroup(2, (("kv_scale", (4,)),), "uint8"),
        ],
    ),
    "4 bits with scales in pages": (
        lambda: nvfp4_rows(SLOTS, prefill="trtllm_mha"),
        [
            PlaneGroup(2, (("k", (2, 32)), ("v", (2, 32))), "uint8"),
            PlaneGroup(2, NATIVE_SCALES, "uint8", row_tokens=64),
        ],
    ),
    "4 bits with scales in rows and in pages": (
        lambda: nvfp4_rows(SLOTS, prefill="flashinfer"),
        [
            PlaneGroup(2, (("k", (2, 32)), ("v", (2, 32))), "uint8"),
            PlaneGroup(2, (("k_scale", (2, 4)), ("v_scale", (2, 4))), "uint8"),
            PlaneGroup(2, NATIVE_SCALES, "uint8", row_tokens=64),
        ],
    ),
    "8 bits with scales": (
        lambda: mxfp8(SLOTS, page=64),
        [
            PlaneGroup(2, (("k", (2, 64)), ("v", (2, 64))), "float8_e4m3fn"),
            PlaneGroup(2, (("k_scale", (2, 2)), ("v_scale", (2, 2))), "uint8"),
        ],
    ),
    "8 bits with scales in pages": (
        lambda: mxfp8(SLOTS),
        [
            PlaneGroup(2, (("k", (2, 64)), ("v", (2, 64))), "float8_e4m3fn"),
            PlaneGroup(
                2,
                (("k_scale", (2, 32, 4, 2)), ("v_scale", (2, 32, 4, 2))),
                "uint8",
                row_tokens=128,
            ),
        ],
    ),
    "pages of heads": (
        lambda: hnd(SLOTS),
        [PlaneGroup(2, (("k", (2, 16, 4)), ("v", (2, 16, 4))), "bfloat16", row_tokens=16)],
    ),
    "deepseek v4": (
        lambda: deepseek_v4(1024),
        [
            PlaneGroup(2, (("kv", (37440,)),), "uint8", row_tokens=256),
            PlaneGroup(1, (("kv", (1728,)),), "uint8", row_tokens=256),
            PlaneGroup(2, (("index", (64 * (128 + 4),)),), "uint8", row_tokens=256),
        ],
    ),
    "deepseek v4.1": (
        lambda: deepseek_v41(1024),
        V41,
    ),
    "deepseek v4.1, windows of requests": (
        lambda: deepseek_v41_requests(1024),
        V41,
    ),
    "full attention beside windows": (
        lambda: windows(SLOTS),
        [PlaneGroup(2, (("k", (2, 8)), ("v", (2, 4))), "bfloat16")],
    ),
    "windows": (
        lambda: windows(SLOTS).swa_kv_pool,
        [PlaneGroup(2, (("k", (4, 6)), ("v", (4, 5))), "bfloat16")],
    ),
    "full attention in one memory with windows": (
        lambda: unified(SLOTS).get_kvcache(),
        [PlaneGroup(2, (("k", (2, 8)), ("v", (2, 4))), "bfloat16")],
    ),
    "windows in one memory with full attention": (
        lambda: unified(SLOTS, page=4).get_kvcache().swa_kv_pool,
        [PlaneGroup(2, (("k", (4, 8)), ("v", (4, 4))), "bfloat16")],
    ),
    "full attention in one memory with states": (
        lambda: unified(SLOTS, page=4, beside="states").get_kvcache(),
        [PlaneGroup(2, K_AND_V.parts, "bfloat16")],
    ),
    "latent rows in one memory with states": (
        lambda: unified(SLOTS, beside="states", mla=True).get_kvcache(),
        [PlaneGroup(2, (("kv", (1, 16)),), "bfloat16")],
    ),
    "full attention beside states": (
        lambda: hybrid(SLOTS),
        [PlaneGroup(2, K_AND_V.parts, "bfloat16")],
    ),
    "4 bits with scales beside states": (
        lambda: hybrid(
            SLOTS,
            dtype=torch.float4_e2m1fn_x2,
            head_dim=64,
            quant_method=nvfp4_method("flashinfer"),
        ),
        [
            PlaneGroup(2, (("k", (2, 32)), ("v", (2, 32))), "uint8"),
            PlaneGroup(2, (("k_scale", (2, 4)), ("v_scale", (2, 4))), "uint8"),
            PlaneGroup(2, NATIVE_SCALES, "uint8", row_tokens=64),
        ],
    ),
    "qsa": (
        lambda: qsa(SLOTS),
        [
            PlaneGroup(2, K_AND_V.parts, "bfloat16"),
            PlaneGroup(2, (("index", (1, 16)),), "bfloat16", row_tokens=4),
        ],
    ),
    "qsa, 8 bits": (
        lambda: qsa(SLOTS, qsa_indexer_dtype=FP8),
        [
            PlaneGroup(2, K_AND_V.parts, "bfloat16"),
            PlaneGroup(2, (("index", (1, 16)),), "float8_e4m3fn", row_tokens=4),
        ],
    ),
    "dsa beside states": (
        lambda: hybrid(
            SLOTS,
            use_mla=True,
            use_dsa=True,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            index_head_dim=128,
            kv_cache_dim=12,
        ),
        [
            PlaneGroup(2, KV.parts, "bfloat16"),
            PlaneGroup(2, INDEX.parts, "uint8", row_tokens=64),
        ],
    ),
}
# What of a pool is stored otherwise.
APART: dict[str, Callable[[Any], tuple[object, ...]]] = {
    "deepseek v4": states_of,
    "deepseek v4.1": states_of,
    "deepseek v4.1, windows of requests": states_of,
    "full attention beside windows": lambda pool: (pool.swa_kv_pool,),
    "full attention in one memory with windows": lambda pool: (pool.swa_kv_pool,),
    "full attention in one memory with states": lambda pool: (pool.mamba_pool,),
    "latent rows in one memory with states": lambda pool: (pool.mamba_pool,),
}


def made(kind: str) -> tuple[Any, tuple[object, ...]]:
    """A pool of `STORED`, and what of it is stored otherwise."""
    pool = STORED[kind][0]()
    return pool, APART[kind](pool) if kind in APART else ()


@pytest.mark.parametrize("kind", STORED)
def test_pool_planes_of_a_pool_are_all_of_its_buffers(kind: str) -> None:
    pool, apart = made(kind)
    found = pool_planes(pool, apart=apart)
    assert [each.group for each in found] == STORED[kind][1]
    planes = [(b, each.group.row_tokens) for each in found for b in each.buffers]
    assert [(b.data_ptr(), tokens) for b, tokens in planes] == [
        (b.data_ptr(), tokens) for b, tokens in rows_of(pool)
    ]
    assert all(each.slots >= pool.size + pool.page_size for each in found)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in STORED
        if not kind.startswith(("deepseek", "qsa"))
        and "in one memory" not in kind
        # SGLang counts no scales there, and with these the memory of a step.
        and kind != "4 bits with scales, mla"
        and not kind.startswith(("4 bits with scales in rows", "4 bits with scales beside"))
    ],
)
def test_pool_planes_have_the_bytes_that_sglang_counts(kind: str) -> None:
    pool, apart = made(kind)
    found = pool_planes(pool, apart=apart)
    counted = getattr(pool, "full_kv_pool", pool).get_kv_size_bytes()
    total = sum(counted) if isinstance(counted, tuple) else counted
    assert sum(b.nbytes for each in found for b in each.buffers) == total


@pytest.mark.skipif(
    not hasattr(MHATokenToKVPool, "get_device_pool_infos"),
    reason="SGLang has an inventory of its pools from 0.5.23 on",
)
@pytest.mark.parametrize(
    "kind",
    [
        *("mha", "mla", "dsa", "windows", "pages of heads"),
        *("4 bits with scales", "4 bits with scales, mla", "8 bits with scales in pages"),
    ],
)
def test_pool_planes_begin_with_those_of_sglangs_own_inventory(kind: str) -> None:
    pool = STORED[kind][0]()
    (info,) = pool.get_device_pool_infos()
    found, buffers = pool_planes(pool), info.buffer_info.buffers
    known = [buffers if isinstance(buffers, tuple) else (*buffers.k, *buffers.v)]
    if (scales := getattr(info.buffer_info, "scales", None)) is not None:
        known.append(scales if isinstance(scales, tuple) else (*scales.k, *scales.v))
    for mine, its in zip(found, known, strict=kind != "dsa"):  # an index has another inventory
        assert {b.data_ptr() for b in mine.buffers} == {b.data_ptr() for b in its}
    assert found[0].group.layers == len(info.layer_ids)


def test_pool_planes_of_unequal_layers_are_one_group_for_each_shape() -> None:
    pool = mha(32, layers=4)
    rows = len(pool.k_buffer[0])
    for layer in (1, 3):
        pool.k_buffer[layer] = torch.zeros(rows, 2, 5)
    first, second = pool_planes(pool)
    assert first.group == PlaneGroup(2, (("k", (2, 4)), ("v", (2, 4))), "float32")
    assert second.group == PlaneGroup(2, (("k", (2, 5)), ("v", (2, 4))), "float32")
    assert [b is pool.k_buffer[1] for b in second.buffers] == [True, False, False, False]
    assert second.buffers[2] is pool.k_buffer[3]


def _with_more(pool: Any) -> Any:
    pool.more = torch.zeros(SLOTS, 2, 2)
    return pool


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: object(), "cannot store a object: it has no K and V"),
    "translated slots": (
        lambda: dsa(SLOTS, kind=HiSparseDSATokenToKVPool),
        "HiSparseDSATokenToKVPool: its slots are not rows",
    ),
    "translated slots inside": (
        lambda: minimax(SLOTS, enable_hisparse=True),
        "HiSparseMHAMainPool: its slots are not rows",
    ),
    "pooled index, with more for each request": (
        lambda: _with_more(pooled_dsa(SLOTS)),
        "it keeps more beside K and V",
    ),
    "windows": (lambda: windows(SLOTS), "it keeps swa_kv_pool beside K and V"),
    "deepseek v4 with its states": (
        lambda: deepseek_v4(1024),
        "it keeps compress_state_pools, indexer_compress_state_pools, swa_kv_pool beside",
    ),
    "an index, with more for each request": (
        lambda: _with_more(qsa(SLOTS)),
        "it keeps more beside",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_pool_planes_of_a_pool_with_anything_else_are_refused_in_one_line(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(ConfigError, match=reason) as error:
        pool_planes(make())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["translate_loc_to_hisparse_device", "layer_shard_enabled", "shard_spec"]
)
def test_pool_planes_of_a_pool_whose_slots_are_no_rows_are_refused(name: str) -> None:
    pool = mla(32)
    setattr(pool, name, True)
    with pytest.raises(ConfigError, match="not rows of its buffers"):
        pool_planes(pool)


@pytest.mark.parametrize("name", ["k_zero_buffer", "k_residual", "index_k_buffer"])
def test_pool_planes_of_a_pool_with_more_than_k_and_v_are_refused(name: str) -> None:
    pool = mha(32)
    setattr(pool, name, [torch.zeros(33, 2, 1)] * 2)
    with pytest.raises(ConfigError, match=name):
        pool_planes(pool)


@pytest.mark.parametrize(
    ("k_buffer", "reason"),
    [
        (torch.zeros(32, 2, 4), "no rows of 33 slots"),  # one row too few
        (torch.zeros(33, 4, 2).mT, "no rows of 33 slots"),  # not contiguous
        (torch.zeros(3, 2, 16, 4), r"\[slots, heads, dim\]"),  # a layout that the pool has not
        (torch.zeros(33, 2, 4, dtype=torch.int16), "cannot store KV of float32"),
    ],
)
def test_pool_planes_of_buffers_of_another_form_are_refused(
    k_buffer: torch.Tensor, reason: str
) -> None:
    pool = mha(32)
    pool.k_buffer[0] = k_buffer
    with pytest.raises(ConfigError, match=reason):
        pool_planes(pool)


def test_pool_planes_of_an_unknown_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot store KV of float64"):
        pool_planes(mha(32, dtype=torch.float64))
