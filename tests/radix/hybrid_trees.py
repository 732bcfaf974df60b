"""A CakeRadixCache on SGLang's pools for sliding windows and recurrent states, and a model for it.

The model's KV at a token, and its state behind it, are functions of all tokens up to there. Before
each step it reads what a real model would: all KV of full attention, the last window, and the
state. So it notices any wrong byte that a request would be computed on.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig

from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.core.token_span import Span
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.memory.end_states import (
    END_POOLS,
    CompressedWindow,
    EndPart,
    EndSlots,
    EndStates,
    RecurrentStates,
    WindowRows,
    is_compressed,
)
from sglang_cake.integration.memory.kv_pool import DeviceKV

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
BLOCK = 8
WINDOW = 12  # a window begins inside a block


def config_of(
    *components: ComponentType,
    page: int = 1,
    extra_buffer: bool = False,
    slots: int = 160,
    window: int = WINDOW,
) -> CacheConfig:
    return CacheConfig(
        page_size=page,
        components=(FULL, *components),
        num_layers=5,
        full_attention_layer_ids=(1, 4),
        sliding_window_size=window if SWA in components else None,
        enable_mamba_extra_buffer=extra_buffer,
        mamba_cache_size=24,
        mamba_intermediate_size=16,
        mamba_num_heads=2,
        mamba_head_dim=8,
        mamba_state_size=4,
        kv_size=slots,
        max_context_len=max(512, slots),
        head_num=1,
        head_dim=4,
        dtype=torch.float32,
    )


def stamp(tokens: Sequence[int], what: str, size: int) -> torch.Tensor:
    """The bytes of `what` behind `tokens`, uint8 `[size]`."""
    digest = hashlib.sha256(f"{what} {list(tokens)}".encode()).digest()
    return torch.frombuffer(bytearray((digest * -(-size // 32))[:size]), dtype=torch.uint8)


def rows_of(pool: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The memory of a KV pool, as bytes `[slots, row]`."""
    for kind, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
        for layer, buffer in enumerate(buffers):
            yield f"{kind}{layer}", buffer.view(torch.uint8).view(len(buffer), -1)


@dataclass
class Store:
    """What was stored, by the tokens before its end."""

    blocks: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    ends: dict[tuple[int, ...], list[bytes]] = field(default_factory=dict)


class HybridTree:
    """The tree, its pools and its model. Requests go through SGLang's own functions."""

    def __init__(
        self,
        cfg: CacheConfig,
        core: str = "python",
        *,
        block: int = BLOCK,
        make_pool: Callable[..., Any] = fixtures.SWAKVPool,
        kind: type = CakeRadixCache,
    ) -> None:
        """Args: make_pool: the pool of a model with windows. kind: of the tree."""
        self.cfg = cfg
        self.block = block
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fixtures, "SWAKVPool", make_pool)
            patch.setattr(fixtures, "UnifiedRadixCache", kind)
            patch.setattr(fixtures, "get_device", lambda: "cpu")
            # The wheel has no Rust core that tells of its nodes, so a server's own is taken.
            inspector = SimpleNamespace(RustUnifiedTreeCoreInspector=RustUnifiedTreeCore)
            module = "sglang.test.kits.unified_radix_cache.rust_unified_tree_core_inspector"
            patch.setitem(sys.modules, module, inspector)
            patch.setattr(fixtures, "UnifiedTreeCoreInspectionInterface", object)
            self.tree, self.allocator, self.requests = fixtures.build_fixture(
                cfg, tree_core_backend=core, mamba_cache_chunk_size=BLOCK
            )
        pool = self.allocator.get_kvcache()
        self.full_pool = getattr(pool, "full_kv_pool", pool)
        apart = [getattr(self.full_pool, name, None) for name in END_POOLS]
        self.kv = DeviceKV(
            self.full_pool, block_tokens=block, apart=[each for each in apart if each is not None]
        )
        parts: list[EndPart] = []
        self.window_tokens = 0
        if cfg.has_swa:
            window, page = cfg.sliding_window_size or 0, cfg.page_size
            self.window_tokens = -(-window // page) * page
        if is_compressed(pool):
            parts.append(CompressedWindow(pool, block_bytes=self.kv.layout.block_bytes))
        elif cfg.has_swa:
            row = DeviceKV(pool.swa_kv_pool, block_tokens=1).layout.block_bytes
            parts.append(
                WindowRows(
                    lambda tokens: DeviceKV(pool.swa_kv_pool, block_tokens=tokens),
                    token_bytes=row,
                    window_tokens=self.window_tokens,
                    block_bytes=self.kv.layout.block_bytes,
                )
            )
        if cfg.has_mamba:
            states = RecurrentStates(
                self.requests.mamba_pool, block_bytes=self.kv.layout.block_bytes
            )
            parts.append(states)
        self.ends = EndStates(parts, window_tokens=self.window_tokens)
        self.tree.ends = self.ends
        self.tree.coordinator = Blocks(block)
        self.live: list[Any] = []
        self.store = Store()
        # Tokens behind an end that the tree must have too, with bigrams.
        self.behind = cfg.page_size if cfg.is_eagle else 0
        self.tree.coordinator.next_tokens = int(cfg.is_eagle)

    # ---- the model ----

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The memory of the state pool, as bytes `[slots, state]`."""
        cache = self.requests.mamba_pool.mamba_cache
        for name, tensor in (
            *((f"c{i}", c) for i, c in enumerate(cache.conv)),
            ("t", cache.temporal),
        ):
            for layer, plane in enumerate(tensor):
                yield f"{name}/{layer}", plane.view(len(plane), -1).view(torch.uint8)

    def write_state(self, tokens: Sequence[int], slot: int) -> None:
        for name, rows in self._states():
            rows[slot] = stamp(tokens, f"state {name}", rows.shape[1])

    def has_state(self, tokens: Sequence[int], slot: int) -> bool:
        return all(
            torch.equal(rows[slot], stamp(tokens, f"state {name}", rows.shape[1]))
            for name, rows in self._states()
        )

    def has_rows(self, pool: Any, kind: str, tokens: Sequence[int], at: int, slot: int) -> bool:
        return slot > 0 and all(
            torch.equal(rows[slot], stamp(tokens[: at + 1], f"{kind} {name}", rows.shape[1]))
            for name, rows in rows_of(pool)
        )

    def write_rows(self, pool: Any, kind: str, tokens: Sequence[int], at: int, slot: int) -> None:
        for name, rows in rows_of(pool):
            rows[slot] = stamp(tokens[: at + 1], f"{kind} {name}", rows.shape[1])

    def check_context(self, req: Any) -> None:
        """All that a step of this request reads is right."""
        tokens = list(req.full_untruncated_fill_ids)
        row = self.requests.req_to_token[req.kv.req_pool_idx, : req.prefix_len].to(torch.int64)
        for at, slot in enumerate(row.tolist()):
            assert self.has_rows(self.full_pool, "full", tokens, at, slot), (at, "full")
        if self.cfg.has_swa:
            start = max(0, req.prefix_len - WINDOW)
            window = self.allocator.translate_loc_from_full_to_swa(row[start:])
            pool = self.allocator.get_kvcache().swa_kv_pool
            for at, slot in enumerate(window.tolist(), start):
                assert self.has_rows(pool, "swa", tokens, at, slot), (at, "window")
        if self.cfg.has_mamba and req.prefix_len:
            slot = int(req.kv.mamba_pool_idx)
            assert self.has_state(tokens[: req.prefix_len], slot), "state"

    # ---- the life of a request, as SGLang's scheduler has it ----

    def arrive(self, tokens: Sequence[int]) -> Any:
        req = Req(
            rid=f"r{len(self.live)}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        req.output_ids = array("q")
        req.init_next_round_input(self.tree)
        return req

    def room(self, tokens: int) -> bool:
        """Have slots for so many tokens free, in each pool."""
        self.allocator.evict_to_free_tokens(self.tree, tokens)
        return int(self.allocator.available_size()) >= tokens

    def slots(self, tokens: int) -> torch.Tensor:
        if not self.cfg.has_swa:
            slots: torch.Tensor = self.allocator.alloc(tokens)
            return slots
        full = self.allocator.full_attn_allocator.alloc(tokens)
        self.allocator.set_full_to_swa_mapping(
            full, self.allocator.swa_attn_allocator.alloc(tokens)
        )
        return full

    def admit(self, req: Any) -> bool:
        """Give it a row; False: there is none, or no state."""
        req.lock = self.tree.lock(req.last_node)
        needed = 0
        if self.cfg.has_mamba:
            needed = (not req.kv.holds_mamba) + 2 * self.cfg.enable_mamba_extra_buffer
            short = needed - self.requests.mamba_allocator.available_size()
            if short > 0:
                self.tree.evict_for_alloc(EvictParams(mamba_num=short))
                short = needed - self.requests.mamba_allocator.available_size()
            if short > 0:
                self.drop(req)
                return False
        if self.requests.alloc([req]) is None:
            self.drop(req)
            return False
        prefix = self.tree.prefix_device_indices(req)
        self.requests.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix)
        req.kv.cache_protected_len = req.prefix_len
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.prefix_len
        req.extend_end = req.prefix_len
        self.live.append(req)
        return True

    def drop(self, req: Any) -> None:
        """A waiting request is not admitted, and goes."""
        self.tree.unlock(req.lock)
        req.lock = None
        if self.cfg.has_mamba and req.kv.holds_mamba:
            self.requests.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(0))
            req.kv.mamba_pool_idx = None

    def compute(self, req: Any, stop: int) -> bool:
        """One step of prefill, and its checkpoint; False: no memory."""
        tokens = list(req.full_untruncated_fill_ids)
        start = req.prefix_len
        page = self.allocator.page_size
        count = -(-stop // page) * page - -(-start // page) * page
        if not self.room(count + page):
            return False
        req.extend_end = stop
        entry = None
        if self.cfg.has_mamba:
            self._prepare_state(req)
            if self.cfg.enable_mamba_extra_buffer:
                entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(
                    SimpleNamespace(
                        model_config=SimpleNamespace(
                            hf_text_config=SimpleNamespace(mamba_chunk_size=BLOCK)
                        ),
                        tree_cache=self.tree,
                        req_to_token_pool=self.requests,
                    ),
                    req,
                )
        self.check_context(req)
        assert start % page == 0, "steps compute whole pages, but for the last"
        slots = self.slots(count)[: stop - start]
        self.requests.write((req.kv.req_pool_idx, slice(start, stop)), slots)
        for at, slot in enumerate(slots.tolist(), start):
            self.write_rows(self.full_pool, "full", tokens, at, slot)
        if self.cfg.has_swa:
            pool = self.allocator.get_kvcache().swa_kv_pool
            window = self.allocator.translate_loc_from_full_to_swa(slots.to(torch.int64))
            for at, slot in enumerate(window.tolist(), start):
                self.write_rows(pool, "swa", tokens, at, slot)
        if self.cfg.has_mamba:
            self.write_state(tokens[:stop], int(req.kv.mamba_pool_idx))
            if entry is not None and entry.track_mask:
                tracked = req.kv.mamba_last_track_seqlen
                slot = int(req.kv.mamba_ping_pong_track_buffer[entry.track_position])
                self.write_state(tokens[:tracked], slot)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = stop
        self.tree.checkpoint(req, up_to=stop)
        req.prefix_len = stop
        return True

    def _prepare_state(self, req: Any) -> None:
        """What SGLang does with states before a forward: copies on write, and clears."""
        batch: Any = SimpleNamespace()
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, [req])
        pool = self.requests.mamba_pool
        if batch.mamba_cow_src_indices is not None:
            pool.copy_from(batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices)
        if batch.mamba_clear_indices is not None:
            pool.clear_slots(batch.mamba_clear_indices)

    def release(self, req: Any, *, checkpoint: bool = True) -> None:
        if not req.kv.kv_allocated_len:  # SGLang has no such request: admission is for a step
            self.tree.unlock(req.lock)
            if self.cfg.has_mamba:
                self.requests.free_mamba_cache(req)
            self.requests.free(req)
            self.live.remove(req)
            return
        req.finished_reason = FINISH_LENGTH(length=0)
        if self.behind and req.prefix_len == req.kv.cache_protected_len:
            checkpoint = False  # SGLang has none of these either, and asserts it with bigrams
        release_kv_cache(req, self.tree, checkpoint=checkpoint)
        self.live.remove(req)

    # ---- what cake does ----

    def buffers(self, count: int) -> list[Buffer]:
        found = [Buffer(on_page(self.kv.layout.block_bytes)) for _ in range(count)]
        for buffer in found:
            buffer.view[:] = b"\xa5" * len(buffer.view)  # of another block
        return found

    def save(self, req: Any, stop: int) -> bool:
        """Store the blocks and the end at `stop`; False: the tree has no end there."""
        slots = self.tree.end_slots(req, stop)
        if slots is None:
            return False
        tokens = tuple(req.full_untruncated_fill_ids)
        row = self.requests.req_to_token[req.kv.req_pool_idx, :stop].to(torch.int64)
        for end in range(self.block, stop + 1, self.block):
            (buffer,) = self.buffers(1)
            self.kv.save(row[end - self.block : end], [buffer], ())
            self.store.blocks[tokens[:end]] = bytes(buffer.view)
        buffers = self.buffers(self.ends.count)
        self.ends.save(self.ends.prepare(slots), buffers, ())
        self.store.ends[tokens[:stop]] = [bytes(buffer.view) for buffer in buffers]
        return True

    def stored_end(self, tokens: Sequence[int], front: int) -> int | None:
        """The last stored end of a prompt that is right of the front."""
        block = self.block
        last = (len(tokens) - 1 - bool(self.behind)) // block * block
        ends = [
            end for end in range(block, last + 1, block) if tuple(tokens[:end]) in self.store.ends
        ]
        return ends[-1] if ends and ends[-1] > front else None

    def load(self, req: Any, stop: int, *, running: bool) -> bool:
        """Attach what is stored up to `stop`; False: no memory."""
        tokens = tuple(req.full_untruncated_fill_ids)
        first = req.prefix_len // self.block * self.block
        allocator = getattr(self.allocator, "full_attn_allocator", self.allocator)
        lock = self.tree.lock(req.last_node)
        try:
            short = stop - first - allocator.available_size()
            if short > 0:
                self.tree.evict_own(short)
            slots = allocator.alloc(stop - first)
            if slots is None:
                return False
            for at in range(first, stop, self.block):
                block = self.store.blocks[tokens[: at + self.block]]
                self.kv.load(held(block), slots[at - first : at - first + self.block], ())
            end = self.tree.allocate_end(req, Span(req.prefix_len, stop))
            if end is None:
                allocator.free(slots)
                return False
            self.load_end(tokens[:stop], end)
            surplus = req.prefix_len - first
            if surplus:
                allocator.free_segment(slots[:surplus], start_pos=0)
            attach = self.tree.attach_running if running else self.tree.attach_waiting
            attach(req, slots[surplus:], stop, end)
        finally:
            self.tree.unlock(lock)
        return True

    def load_end(self, tokens: tuple[int, ...], end: EndSlots) -> None:
        end = self.ends.prepare(end)
        for index, piece in enumerate(self.store.ends[tokens]):
            self.ends.load(index, held(piece), end, ())

    # ---- the books ----

    def check_books(self) -> None:
        """Each slot of each pool is free, in the tree, or of one live request."""
        tree, page = self.tree, self.allocator.page_size
        tree.sanity_check()
        held_full = held_swa = held_states = 0
        for req in self.live:
            kv = req.kv
            allocated = -(-kv.kv_allocated_len // page) * page
            held_full += allocated - kv.cache_protected_len
            dead = max(0, kv.get_evicted_seqlen(SWA) - kv.swa_dead_lo(page))
            held_swa += allocated - kv.cache_protected_len - dead
            if self.cfg.has_mamba and kv.holds_mamba:
                held_states += 1
                if self.cfg.enable_mamba_extra_buffer:
                    held_states += kv.mamba_ping_pong_empty.count(False)
        full = getattr(self.allocator, "full_attn_allocator", self.allocator)
        own = tree.full_evictable_size() + tree.full_protected_size()
        assert full.available_size() + own + held_full == full.size
        if self.cfg.has_swa:
            swa = self.allocator.swa_attn_allocator
            own = tree.swa_evictable_size() + tree.swa_protected_size()
            assert swa.available_size() + own + held_swa == swa.size
        if self.cfg.has_mamba:
            states = self.requests.mamba_allocator
            own = tree.mamba_evictable_size() + tree.mamba_protected_size()
            assert states.available_size() + own + held_states == states.size


@dataclass(slots=True)
class Blocks:
    """What the tree asks of a coordinator, without records: all that it needs is a block's size."""

    block_tokens: int
    placed_tokens: int = 0
    next_tokens: int = 0
    tree_evicts: bool = False

    def record(self, rid: str) -> None:
        return None

    def end(self, rid: str) -> None:
        pass

    def emptied(self) -> None:
        pass


def held(data: bytes) -> Buffer:
    """A buffer that holds a stored block."""
    buffer = Buffer(on_page(len(data)))
    buffer.view[:] = data
    return buffer
