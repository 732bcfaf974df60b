"""Small KV pools and slot allocators of SGLang on a CPU, and records of prompts for them."""

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_memory_pool import (
    init_unified_mamba_pools,
    init_unified_mamba_swa_pools,
    init_unified_swa_pools,
)
from sglang.srt.runtime_context import get_context

from sglang_cake.core.buffers import Buffer, BufferPool, on_page
from sglang_cake.core.keys import Digest, KeyChain, KeySeed
from sglang_cake.integration import compat
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.prompt_record import AgreedLoads, LocalLoads, PromptRecord
from sglang_cake.loading.loader import HostBlock
from sglang_cake.loading.meet import Meet
from sglang_cake.stores.base import RequestFacts

since_0_5_23 = pytest.mark.skipif(compat.INSTALLED == "0.5.22", reason="from SGLang 0.5.23 on")
SEED = KeySeed(Digest(b"n" * 32))


def mha(
    slots: int,
    *,
    page: int = 1,
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    dim: int = 4,
    v_dim: int | None = None,
    layers: int = 2,
) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=slots,
        page_size=page,
        dtype=dtype,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        v_head_dim=v_dim,
    )


def mla(
    slots: int,
    *,
    page: int = 1,
    dtype: torch.dtype = torch.float32,
    latent: int = 6,
    rope: int = 3,
    layers: int = 2,
) -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=slots,
        page_size=page,
        dtype=dtype,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def dsa(slots: int, *, page: int = 64, kind: type = DSATokenToKVPool, **options: Any) -> Any:
    """DeepSeek V3.2: MLA rows, and the pages of an index."""
    sizes = {
        "page_size": page,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "kv_cache_dim": 12,
        "index_head_dim": 128,
        "layer_num": 3,
    }
    with get_context().override_server_args(device="cpu"):
        return kind(size=slots, device="cpu", enable_memory_saver=False, **sizes | options)


def pooled_dsa(slots: int) -> Any:
    """GLM-5-next: a key of the index stands for two tokens; requests have incomplete ones."""
    options = {"index_kpool": 2, "index_kpool_compress": True, "max_running_requests": slots}
    return dsa(slots, page=128, **options)


def minimax(slots: int, **options: Any) -> MiniMaxSparseKVPool:
    """MiniMax M3: the index has K and V in one layer, K in two layers, and none in one."""
    sizes = {
        "page_size": 64,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 8,
        "idx_head_dim": 16,
        "dense_layer_ids": [0],
        "sparse_layer_ids": [1, 2, 3],
        "disable_value_sparse_layer_ids": [2, 3],
        "start_layer": 0,
        "end_layer": 4,
    }
    return MiniMaxSparseKVPool(size=slots, device="cpu", **sizes | options)


def nvfp4(slots: int) -> Any:
    """MiniMax M3 with four bits a number: pages of K, V and their scales."""
    module = pytest.importorskip("sglang.srt.mem_cache.minimax_m3_nvfp4_pool")  # from 0.5.23 on
    return module.MiniMaxM3Nvfp4KVPool(
        size=slots,
        page_size=128,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=128,
        idx_head_dim=128,
        dense_layer_ids=[],
        sparse_layer_ids=[0, 1],
        disable_value_sparse_layer_ids=[0, 1],
        start_layer=0,
        end_layer=2,
        device="cpu",
    )


def fp4(slots: int, *, mla: bool = False) -> Any:
    """Two numbers in a byte, and scales for each token (`--kv-cache-dtype fp4_mx_block16`)."""
    dtype = torch.float4_e2m1fn_x2
    if mla:
        return MLATokenToKVPoolFP4(slots, 1, dtype, 32, 32, 2, "cpu", False)
    return MHATokenToKVPoolFP4(slots, 1, dtype, 2, 32, 2, "cpu", False)


def mxfp8(slots: int, *, page: int = 128) -> MHATokenToKVPoolMXFP8:
    """8 bits and scales, which are in pages of 128 tokens (`--kv-cache-dtype mxfp8`)."""
    return MHATokenToKVPoolMXFP8(slots, page, torch.float8_e4m3fn, 2, 64, 2, "cpu", False)


def nvfp4_method(prefill: str) -> Any:
    """Of `--kv-cache-dtype nvfp4` on Blackwell. Args: prefill: its attention backend, which decides
    how scales are kept."""
    methods = pytest.importorskip("sglang.srt.layers.quantization.fp4_kv_cache_quant_method")
    method = methods.NVFP4KVCacheMethod(2, "cpu", 64, native_scale_layout=True)
    method.configure_attention_backends(prefill, "trtllm_mha")
    return method


def nvfp4_rows(slots: int, *, prefill: str) -> MHATokenToKVPool:
    """K and V of that. Args: prefill: as for `nvfp4_method`."""
    method = nvfp4_method(prefill)
    return MHATokenToKVPool(
        slots, 64, torch.float4_e2m1fn_x2, 2, 64, 2, "cpu", False, quant_method=method
    )


def hnd(slots: int) -> MHATokenToKVPool:
    """A page is a row with the tokens of one head after those of another
    (`SGLANG_USE_HND_KVCACHE`)."""
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        return mha(slots, page=16, dtype=torch.bfloat16)


def deepseek_v4(
    slots: int, *, server: Mapping[str, Any] | None = None, **options: Any
) -> DeepSeekV4TokenToKVPool:
    """Pages of 256 tokens, compressed 4 and 128 times, and an index of the former.

    Args: server: arguments of it.
    """
    layers = {"layer_num": 4, "compression_ratios": [0, 4, 128, 4]} | options
    with get_context().override_server_args(device="cpu", **server or {}):
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=4,
            swa_size=slots,
            c4_size=slots // 4,
            c128_size=slots // 128,
            c4_state_pool_size=slots // 256 * 8,
            c128_state_pool_size=32,
            page_size=256,
            swa_page_size=256,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            device="cpu",
            enable_memory_saver=False,
            start_layer=0,
            end_layer=layers["layer_num"],
            **layers,
        )


def deepseek_v4_online(slots: int, **options: Any) -> DeepSeekV4TokenToKVPool:
    """As SGLANG_OPT_USE_ONLINE_COMPRESS makes it: a request has one row of sums over 128 tokens."""
    with mock.patch("sglang.srt.mem_cache.deepseek_v4_memory_pool.ONLINE_C128", new=True):
        return deepseek_v4(slots, **options)


def deepseek_v41(slots: int, **options: Any) -> DeepSeekV4TokenToKVPool:
    """Layers that read the KV of layer 1, of two tokens each, or that of layer 3, and layers of
    windows alone."""
    ratios = [0, 2, 2, 1, 1, 0]
    sources = {"kv_source_layers": [1, 3], "full_size": slots}
    return deepseek_v4(slots, layer_num=6, compression_ratios=ratios, **sources | options)


def deepseek_v41_requests(slots: int) -> DeepSeekV4TokenToKVPool:
    """The same where sliding windows belong to requests."""
    server = {"enable_encoder_swa_bounded_replay": True, "chunked_prefill_size": 512}
    return deepseek_v41(slots, server=server)


def states_of(pool: DeepSeekV4TokenToKVPool) -> tuple[object, ...]:
    """What it keeps for the end of a prompt."""
    names = ("compress_state_pools", "indexer_compress_state_pools", "request_window")
    return pool.swa_kv_pool, *(getattr(pool, name, None) for name in names)


def windows(slots: int, **options: Any) -> SWAKVPool:
    """Two layers of full attention, and two of sliding windows with other heads."""
    sizes = {"head_num": 2, "head_dim": 8, "v_head_dim": 4}
    sizes |= {"swa_head_num": 4, "swa_head_dim": 6, "swa_v_head_dim": 5, "size_swa": slots // 2}
    layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1, 3]}
    return SWAKVPool(
        size=slots,
        page_size=1,
        dtype=torch.bfloat16,
        device="cpu",
        **layers | sizes | options,
    )


def hybrid(slots: int, *, kind: type = HybridLinearKVPool, **options: Any) -> Any:
    """Two layers of full attention among those of linear attention."""
    sizes = {"page_size": 64, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 8}
    sizes |= {"full_attention_layer_ids": [1, 3], "mamba_pool": None}
    with get_context().override_server_args(device="cpu"):
        return kind(size=slots, device="cpu", **sizes | options)


def qsa(slots: int, **options: Any) -> QSATokenToKVPool:
    """Qwen4-Exp: the same, and a key of the index for each four tokens."""
    sizes = {"qsa_index_kv_heads": 1, "qsa_index_head_dim": 16, "qsa_compress_ratio": 4}
    sizes |= {"qsa_token_topk": 16, "num_request_slots": 8}
    made: QSATokenToKVPool = hybrid(slots, kind=QSATokenToKVPool, **sizes | options)
    return made


def unified(slots: int, **options: Any) -> Any:
    """The allocator of `unified_pools`."""
    return unified_pools(slots, **options).token_to_kv_pool_allocator


def unified_pools(
    slots: int,
    *,
    page: int = 1,
    beside: str = "windows",
    mla: bool = False,
    drafts: Sequence[str] = (),
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Pools in one memory, as `--enable-unified-memory` makes them: of full attention, as in
    `windows` or `hybrid`, and of "windows", "states" or "both". `slots`: about so many of each.
    `drafts`: pools in which two draft models have a layer each, of "full", "swa" and "mamba"; the
    model then verifies four tokens at a time. `changes`: of SGLang's arguments."""
    options: dict[str, Any] = {
        "device": "cpu",
        "kv_cache_dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 8,
        "v_head_dim": 8 if beside == "states" else 4,
        "page_size": page,
        "start_layer": 0,
        "end_layer": 4,
        "full_attention_layer_ids": [1, 3],
        "enable_memory_saver": False,
        "need_sort": False,
        "lazy_compaction": True,
    }
    windows = {
        "swa_head_num": 4,
        "swa_head_dim": 8,
        "swa_v_head_dim": 4,
        "swa_attention_layer_ids": [0, 2],
        "full_max_total_num_tokens": slots,
        "swa_max_total_num_tokens": slots,
    }
    recurrent = {
        "mamba_layer_ids": [0, 2],
        "mamba2_cache_params": SimpleNamespace(
            shape=SimpleNamespace(conv=[(3, 8)], temporal=(1, 4, 8)),
            dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
            layers=[0, 2],
        ),
        "model_context_len": slots,
        "extra_max_context_len": 1,
        "max_mamba_cache_size": 8,
        "max_num_reqs": 4,
        "enable_mamba_extra_buffer": False,
        "enable_mamba_extra_buffer_lazy": False,
        "speculative_num_draft_tokens": 4 if drafts else None,
        "disable_overlap_schedule": True,
    }
    alone = {
        "is_draft_worker": False,
        "use_mla_backend": mla,
        "kv_lora_rank": 8 if mla else None,
        "qk_rope_head_dim": 8 if mla else None,
        "max_total_num_tokens": slots,
    }
    for part in (options, windows, recurrent):
        part |= {name: value for name, value in changes.items() if name in part}
    if beside == "states" and compat.INSTALLED == "0.5.22":
        del options["v_head_dim"]
    if drafts:
        options["fused_draft"] = _placement(drafts)
    with get_context().override_server_args(device="cpu"):
        match beside:
            case "windows":
                return init_unified_swa_pools(**options | windows)
            case "states":
                return init_unified_mamba_pools(**options | recurrent | alone)
            case _:
                window = {"sliding_window_size": changes.get("sliding_window_size")}
                return init_unified_mamba_swa_pools(**options | windows | recurrent | window)


def _placement(pools: Sequence[str]) -> Any:
    """Where SGLang puts the layers of two draft models."""
    from sglang.srt.mem_cache.layout import fused_draft

    rows = fused_draft.DenseDraftRegion(
        lane_num=2, head_num=2, head_dim=16, store_dtype=torch.bfloat16
    )
    state = fused_draft.DraftStateGeometry(
        conv_state_shapes=((3, 8),),
        conv_dtype=torch.bfloat16,
        temporal_state_shape=(1, 4, 8),
        temporal_dtype=torch.float32,
    )
    states = fused_draft.DraftStateRegion(lane_num=2, state=state)
    return fused_draft.FusedDraftPlacement.from_counts(
        counts={name: [1, 1] for name in pools},
        regions={name: states if name == "mamba" else rows for name in pools},
    )


def unified_draft(allocator: Any, runner: int) -> Any:
    """The KV pool that SGLang gives one of the draft models of `unified_pools`."""
    from sglang.srt.mem_cache import unified_draft_pool

    buffer, page = allocator.unified_buffer, allocator.page_size
    placement = buffer.fused_draft
    full, swa = (dict(enumerate(placement.lanes_for(runner, name))) for name in ("full", "swa"))
    if not swa:
        return unified_draft_pool.UnifiedDraftKVPool(
            unified_buffer=buffer,
            host_sub_pool_name="full",
            host_allocator=allocator,
            layer_lanes=full,
            page_size=page,
        )
    return unified_draft_pool.UnifiedDraftSWAKVPool(
        unified_buffer=buffer,
        host_allocator=allocator,
        page_size=page,
        full_layer_lanes=full,
        swa_layer_lanes={len(full) + number: lane for number, lane in swa.items()},
    )


def buffers_of(pool: Any) -> list[torch.Tensor]:
    """Of a pool with a row for each slot, in block order."""
    if isinstance(pool, MLATokenToKVPool):
        return list(pool.kv_buffer)
    return [b for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for b in pair]


def rows_of(pool: Any) -> list[tuple[torch.Tensor, int]]:
    """All that a pool has for a slot, and the slots of a row, in block order."""
    match pool:
        case DSATokenToKVPool():
            index = pool.index_k_with_scale_buffer
            pages = [(each, pool.page_size) for each in index if len(each)]
            return [*((each, 1) for each in pool.kv_buffer), *pages]
        case _ if type(pool).__name__ == "MiniMaxM3Nvfp4KVPool":
            slabs = (pool.main_pool.slab, pool.index_k_pool.slab)
            return [(rows, 128) for slab in slabs for rows in slab]
        case MiniMaxSparseKVPool():
            found = [*buffers_of(pool.main_pool), *buffers_of(pool.index_kv_pool)]
            return [(each, 1) for each in (*found, *pool.index_k_pool.k_buffer)]
        case DeepSeekV4TokenToKVPool():
            pages = [(b, 256) for inner in pool.kv_pools.values() for b in inner.kv_buffer]
            return pages + [
                (b, inner.page_size * ratio)
                for ratio, inner in pool.index_pools.items()
                for b in inner.index_k_with_scale_buffer
            ]
        case QSATokenToKVPool():
            index = pool.qsa_compressed_k_buffer_pool
            return rows_of(pool.full_kv_pool) + [(each, pool.qsa_compress_ratio) for each in index]
        case SWAKVPool() | HybridLinearKVPool():
            return rows_of(pool.full_kv_pool)
        case MLATokenToKVPoolFP4():
            return [(each, 1) for each in (*pool.kv_buffer, *pool.kv_scale_buffer)]
    found = buffers_of(pool)
    for kind in ("", "native_"):
        k, v = (getattr(pool, f"{kind}{name}_scale_buffer", None) or () for name in "kv")
        found += [each for pair in zip(k, v, strict=True) for each in pair]
    return [(each, pool.page_size if each.dim() > 3 else 1) for each in found]


def slots_in_pages(slots: int, page: int, seed: int) -> torch.Tensor:
    """All slots of a pool, page by page in any order."""
    pages = torch.randperm(slots // page, generator=torch.Generator().manual_seed(seed)) + 1
    return (pages[:, None] * page + torch.arange(page)).flatten()


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8).view(buffer.shape[0], -1)


def scramble(pool: Any, seed: int) -> None:
    """Any bytes at all, NaNs among them: a copy must not care."""
    generator = torch.Generator().manual_seed(seed)
    for buffer, _ in rows_of(pool):
        raw = as_bytes(buffer)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def allocator_of(pool: Any, page: int) -> Any:
    if page == 1:
        return TokenToKVPoolAllocator(pool.size, pool.dtype, "cpu", pool, need_sort=False)
    return PagedTokenToKVPoolAllocator(pool.size, page, pool.dtype, "cpu", pool, need_sort=False)


def buffers_for(kv: DeviceKV, count: int) -> list[Buffer]:
    """Host memory to save blocks into."""
    return [Buffer(on_page(kv.layout.block_bytes)) for _ in range(count)]


def record_of(
    blocks: int,
    *,
    block: int,
    page: int = 1,
    rid: str = "r",
    limit: int | None = None,
    extra_tokens: int = 0,
    next_tokens: int = 0,
    waited_s: float = 0.0,
) -> PromptRecord:
    """A record of a prompt of whole blocks and `extra_tokens` behind them that arrived `waited_s`
    ago."""
    tokens = array("q", range(blocks * block + extra_tokens))
    arrived_s = time.monotonic() - waited_s
    return PromptRecord(
        req=SimpleNamespace(rid=rid),
        load_id=rid,
        tokens=tokens,
        key_chain=KeyChain(SEED, block, next_tokens=next_tokens),
        facts=RequestFacts(rid, len(tokens)),
        meet=Meet(
            block_tokens=block,
            page_tokens=page,
            limit_tokens=blocks * block if limit is None else limit,
            prompt_tokens=len(tokens),
        ),
        local=LocalLoads(served_since_s=arrived_s),
        agreed=AgreedLoads(),
        matched_tokens=lambda: 0,
        arrival=0,
        arrived_s=arrived_s,
    )


@dataclass
class Staging:
    """Host staging that remembers how each block ended."""

    kv: DeviceKV
    pool: BufferPool = field(init=False)
    freed: list[HostBlock] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BufferPool(buffers_for(self.kv, 64))

    def fetch(self, block: int) -> tuple[bytes, HostBlock]:
        """The bytes of `block`, in host memory."""
        buffer = self.pool.take()
        assert buffer is not None
        generator = torch.Generator().manual_seed(block)
        size = (len(buffer.view),)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        buffer.view[:] = raw.numpy().data
        return bytes(buffer.view), HostBlock(buffer, self.pool.give, self.freed.append)

    def land(self, record: PromptRecord, block: int) -> bytes:
        """`block` is in host memory, wanted; returns its bytes."""
        data, staged = self.fetch(block)
        assert record.meet.landed(block)
        record.memory.staged[block] = staged
        return data
