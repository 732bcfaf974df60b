"""Small KV pools and slot allocators of SGLang on a CPU, and records of prompts for them."""

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_cake.core.buffers import Buffer, BufferPool, on_page
from sglang_cake.core.keys import Digest, KeyChain, KeySeed
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.prompt_record import AgreedLoads, LocalLoads, PromptRecord
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.loader import StagedBlock
from sglang_cake.loading.meet import Meet
from sglang_cake.stores.request_facts import RequestFacts

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


def buffers_of(pool: Any) -> list[torch.Tensor]:
    if isinstance(pool, MLATokenToKVPool):
        return list(pool.kv_buffer)
    return [b for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for b in pair]


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8).view(buffer.shape[0], -1)


def scramble(pool: Any, seed: int) -> None:
    """Any bytes at all, NaNs among them: a copy must not care."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
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
    waited_s: float = 0.0,
) -> PromptRecord:
    """A record of a prompt of whole blocks and `extra_tokens` behind them that arrived `waited_s`
    ago."""
    tokens = array("q", range(blocks * block + extra_tokens))
    cost = LoadCost(0.0, 0.01, depth=4)
    arrived_s = time.monotonic() - waited_s
    return PromptRecord(
        rid=rid,
        load_id=rid,
        tokens=tokens,
        chain=KeyChain(SEED, block),
        facts=RequestFacts(rid, len(tokens)),
        meet=Meet(
            block_tokens=block,
            page_tokens=page,
            limit_tokens=blocks * block if limit is None else limit,
            prompt_tokens=len(tokens),
        ),
        local=LocalLoads(cost, served_since_s=arrived_s),
        agreed=AgreedLoads(cost),
        arrived_s=arrived_s,
    )


@dataclass
class Staging:
    """Host staging that remembers how each block ended."""

    kv: DeviceKV
    pool: BufferPool = field(init=False)
    freed: list[StagedBlock] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BufferPool(buffers_for(self.kv, 64))

    def fetch(self, block: int) -> tuple[bytes, StagedBlock]:
        """The bytes of `block`, in host memory."""
        buffer = self.pool.take()
        assert buffer is not None
        generator = torch.Generator().manual_seed(block)
        size = (len(buffer.view),)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        buffer.view[:] = raw.numpy().data
        return bytes(buffer.view), StagedBlock(buffer, self.pool, self.freed.append)

    def land(self, record: PromptRecord, block: int) -> bytes:
        """`block` is in host memory, wanted; returns its bytes."""
        data, staged = self.fetch(block)
        assert record.meet.landed(block)
        record.memory.staged[block] = staged
        return data
