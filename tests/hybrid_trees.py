"""A CakeRadixCache on SGLang's pools of each family of models, and a model for it.

The model's KV at a token, and its state behind it, are functions of all tokens up to there. Before
each step it reads what a real model would: all KV of full attention, the last window, and the
state. So it notices any wrong byte that a request would be computed on.
"""

import itertools
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import kv_pools
import numpy as np
import pytest
import torch
from kv_pools import (
    allocator_of,
    as_bytes,
    deepseek_v4,
    deepseek_v4_online,
    deepseek_v41,
    deepseek_v41_requests,
    dsa,
    minimax,
    rows_of,
)
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.model_executor import encoder_swa_replay
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig

from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.core.keys import Span
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.memory.copier import Copier
from sglang_cake.integration.memory.end_states import END_POOLS, EndSlots, EndStates
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.memory.pool_planes import DraftPools
from sglang_cake.integration.request.prompt_record import PromptRecord

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
BLOCK = 8
WINDOW = 12  # a window begins inside a block


def config_of(
    *components: ComponentType,
    page: int = 1,
    extra_buffer: bool = False,
    slots: int = 160,
    window: int = WINDOW,
    replays: bool = False,
) -> CacheConfig:
    return CacheConfig(
        page_size=page,
        components=(FULL, *components),
        num_layers=5,
        full_attention_layer_ids=(1, 4),
        sliding_window_size=window if SWA in components else None,
        decoder_swa_bounded_replay=replays,
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


KINDS = {
    "window": config_of(SWA),
    "window-pages": config_of(SWA, page=4),
    "window-unequal": config_of(SWA),
    "state": config_of(MAMBA),
    "state-extra-buffer": config_of(MAMBA, page=4, extra_buffer=True),
    "state-index": config_of(MAMBA, page=4, extra_buffer=True),
    "window-bigrams": replace(config_of(SWA), is_eagle=True),
    "window-bigrams-pages": replace(config_of(SWA, page=4), is_eagle=True),
    "window-state": config_of(SWA, MAMBA),
    "window-state-extra-buffer": config_of(SWA, MAMBA, page=4, extra_buffer=True),
}
# Gemma 4 and MiMo: windows have other heads than full attention, and V another width than K.
UNEQUAL = partial(
    fixtures.SWAKVPool, v_head_dim=3, swa_head_num=2, swa_head_dim=3, swa_v_head_dim=5
)
# Qwen4-Exp: one key of the index for each two tokens, and states of embeddings of three tokens.
INDEXED = partial(
    QSATokenToKVPool,
    qsa_index_kv_heads=1,
    qsa_index_head_dim=6,
    qsa_compress_ratio=2,
    qsa_token_topk=4,
    num_request_slots=16,
)
EMBEDDED = partial(
    fixtures.HybridReqToTokenPool,
    short_conv_layer_ids=[0, 2],
    short_conv_state_shape=(5, 3),
    ngram_context_len=2,
)
PARTS: dict[str, dict[str, Callable[..., Any]]] = {
    "window-unequal": {"SWAKVPool": UNEQUAL},
    "state-index": {
        "HybridLinearKVPool": INDEXED,
        "HybridReqToTokenPool": EMBEDDED,
        "TokenToKVPoolAllocator": lambda **given: allocator(4, **given),
    },
}


def tree_of(kind: str, core: str = "python", **options: Any) -> "HybridTree":
    """One of `KINDS`, empty."""
    return HybridTree(KINDS[kind], core, parts=PARTS.get(kind), **options)


def digests_of(tokens: Sequence[int]) -> torch.Tensor:
    """A number for each token, int64 `[len(tokens)]`, which all tokens up to there decide."""
    chain = itertools.accumulate(tokens, lambda digest, token: hash((digest, token)), initial=0)
    return torch.tensor([*chain][1:], dtype=torch.int64)


def stamp(digests: torch.Tensor, what: str, size: int) -> torch.Tensor:
    """The bytes of `what` behind each of some tokens, uint8 `[tokens, size]`."""
    words = np.arange(-(-size // 8), dtype=np.uint64) + np.uint64(zlib.crc32(what.encode()) << 32)
    mixed = digests.numpy().view(np.uint64)[:, None] ^ words * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return torch.from_numpy(mixed.view(np.uint8)[:, :size])


# Bytes `[.., *row]` of one plane, and where in it the memory of some slots is.
Place = tuple[str, torch.Tensor, tuple[torch.Tensor, ...]]


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
        state_chunk: int = BLOCK,
        parts: Mapping[str, Callable[..., Any]] | None = None,
        tree: type = CakeRadixCache,
    ) -> None:
        """Args:
        state_chunk: with extra buffers, so many tokens are between two states of a step.
        parts: in place of classes of SGLang that make pools and allocators, by their names.
        tree: its class.
        """
        self.cfg = cfg
        self.block = block
        self.state_chunk = state_chunk
        with pytest.MonkeyPatch.context() as patch:
            self._make_pools(patch, parts or {})
            patch.setattr(fixtures, "UnifiedRadixCache", tree)
            patch.setattr(fixtures, "get_device", lambda: "cpu")
            # The wheel has no Rust core that tells of its nodes, so a server's own is taken.
            inspector = SimpleNamespace(RustUnifiedTreeCoreInspector=RustUnifiedTreeCore)
            module = "sglang.test.kits.unified_radix_cache.rust_unified_tree_core_inspector"
            patch.setitem(sys.modules, module, inspector)
            patch.setattr(fixtures, "UnifiedTreeCoreInspectionInterface", object)
            self.tree, self.allocator, self.requests = fixtures.build_fixture(
                cfg, tree_core_backend=core, mamba_cache_chunk_size=state_chunk
            )
        pool = self.allocator.get_kvcache()
        self.full_pool = getattr(pool, "full_kv_pool", pool)
        apart = [getattr(pool, name, None) for name in END_POOLS]
        self.kv = DeviceKV(
            pool, block_tokens=block, apart=[each for each in apart if each is not None]
        )
        self.ends = self.tree.ends = EndStates.of(self.tree, self.kv, DraftPools())
        self.tail_tokens = 0 if self.ends is None else self.ends.tail_tokens
        self.tree.coordinator = Blocks(block)
        self.live: list[Any] = []
        self.waiting: list[Any] = []  # those that may hold a state, by a match
        self.arrived = 0
        self.store = Store()
        # Tokens behind an end that the tree must have too, with bigrams.
        self.behind = cfg.page_size if cfg.is_eagle else 0
        self.tree.coordinator.keys.next_tokens = int(cfg.is_eagle)

    def _make_pools(
        self, patch: pytest.MonkeyPatch, parts: Mapping[str, Callable[..., Any]]
    ) -> None:
        """Have SGLang's fixture make these pools."""
        for name, make in parts.items():
            patch.setattr(fixtures, name, make)
        if self.cfg.components == (FULL,):  # a server's allocator, which the fixture does not have
            make = partial(allocator, self.cfg.page_size)
            patch.setattr(fixtures, "TokenToKVPoolAllocator", make)

    @property
    def full_allocator(self) -> Any:
        """Of the slots of full attention."""
        return getattr(self.allocator, "full_attn_allocator", self.allocator)

    # ---- the model ----

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The memory of the state pool, as bytes `[slots, state]`."""
        cache = self.requests.mamba_pool.mamba_cache
        for name, tensor in (
            *((f"c{i}", c) for i, c in enumerate(cache.conv)),
            ("t", cache.temporal),
        ):
            for layer, plane in enumerate(tensor):
                yield f"{name}/{layer}", as_bytes(plane)
        if self.requests.ngram_pool.enabled:
            yield "n", as_bytes(self.requests.ngram_pool.context)
            for layer, plane in enumerate(self.requests.short_conv_pool.conv_state):
                yield f"s/{layer}", as_bytes(plane)

    def write_state(self, digest: torch.Tensor, slot: int) -> None:
        slot = self._state_row(slot)
        for name, rows in self._states():
            rows[slot] = stamp(digest, f"state {name}", rows.shape[1])[0]

    def _state_row(self, slot: int) -> int:
        return int(self.requests.translate_mamba_indices(torch.tensor([slot])))

    def has_state(self, digest: torch.Tensor, slot: int) -> bool:
        slot = self._state_row(slot)
        return all(
            torch.equal(rows[slot], stamp(digest, f"state {name}", rows.shape[1])[0])
            for name, rows in self._states()
        )

    def places(self, kind: str, slots: torch.Tensor) -> Iterator[Place]:
        """Where the KV of these slots is, of full attention or of windows ("full", "swa")."""
        pool = self.full_pool if kind == "full" else self.allocator.get_kvcache().swa_kv_pool
        for number, (buffer, _) in enumerate(rows_of(pool)):
            yield f"{kind}, plane {number}", as_bytes(buffer), (slots,)
        whole = self.allocator.get_kvcache()
        if kind == "full" and isinstance(whole, QSATokenToKVPool):
            for number, keys in enumerate(whole.qsa_compressed_k_buffer_pool):
                shares = as_bytes(keys).reshape(len(keys) * whole.qsa_compress_ratio, -1)
                yield f"index of layer {number}", shares, (slots,)  # a token has its share of a key

    def write(self, kind: str, digests: torch.Tensor, slots: torch.Tensor) -> None:
        """Have these slots hold the KV of these tokens."""
        for name, rows, index in self.places(kind, slots):
            size = rows.shape[-1]
            if len(index) > 1:
                rows[index] = stamp(digests, name, size)
            else:  # as above, but by rows and not by bytes
                [at] = index
                data = stamp(digests, name, size * at[:1].numel())
                rows.index_copy_(0, at.flatten(), data.reshape(-1, size))

    def wrong(self, kind: str, digests: torch.Tensor, slots: torch.Tensor) -> list[str]:
        """The planes in which these slots do not hold the KV of these tokens."""
        found = [] if bool((slots > 0).all()) else ["no slot"]
        for name, rows, index in self.places(kind, slots):
            have = rows[index].flatten(1)
            if not torch.equal(have, stamp(digests, name, have.shape[1])):
                found.append(name)
        return found

    def check_context(self, req: Any) -> None:
        """All that a step of this request reads is right."""
        digests = digests_of(req.full_untruncated_fill_ids[: req.prefix_len])
        row = self.requests.req_to_token[req.kv.req_pool_idx, : req.prefix_len].to(torch.int64)
        assert not (wrong := self.wrong("full", digests, row)), wrong
        if self.cfg.has_swa:
            start = max(0, req.prefix_len - self.tree.sliding_window_size)
            window = self.allocator.translate_loc_from_full_to_swa(row[start:])
            assert not (wrong := self.wrong("swa", digests[start:], window)), wrong
        if self.cfg.has_mamba and req.prefix_len:
            assert self.has_state(digests[-1:], int(req.kv.mamba_pool_idx)), "state"

    # ---- the life of a request, as SGLang's scheduler has it ----

    def arrive(self, tokens: Sequence[int]) -> Any:
        self.arrived += 1
        req = Req(
            rid=f"r{self.arrived}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        req.output_ids = array("q")
        req.init_next_round_input(self.tree)
        return req

    def start(self, tokens: Sequence[int], front: int = 0) -> Any:
        """A request that arrives, is admitted, and is computed up to `front`."""
        req = self.arrive(tokens)
        assert self.admit(req)
        assert not front or self.compute(req, front)
        return req

    def restore(self, tokens: Sequence[int], stop: int, front: int | None = None) -> Any:
        """A request that is admitted, and has what is stored up to `stop`.

        Args: front: it runs, and has computed so many tokens before; None: it waits.
        """
        req = self.arrive(tokens) if front is None else self.start(tokens, front)
        assert self.load(req, stop, running=front is not None)
        assert req.prefix_len == stop
        assert front is not None or self.admit(req)
        self.check_slots()
        return req

    def finish(self, req: Any) -> None:
        """The rest of a prompt is computed, for which what is before it has to be right, and the
        request ends."""
        assert self.compute(req, len(req.full_untruncated_fill_ids))
        self.check_slots()
        self.release(req)
        self.check_slots()

    def landed(self, tokens: Sequence[int], span: Span) -> torch.Tensor:
        """Slots with the KV of this span, as blocks bring it."""
        slots = self.full_allocator.alloc(span.tokens)
        self.write("full", digests_of(tokens)[span.start : span.stop], slots)
        return slots

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
            short = needed - self.free_states()
            if short > 0:
                self.tree.evict_for_alloc(EvictParams(mamba_num=short))
                short = needed - self.free_states()
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

    def free_states(self) -> int:
        return int(self.requests.mamba_allocator.available_size())

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
                            hf_text_config=SimpleNamespace(mamba_chunk_size=self.state_chunk)
                        ),
                        tree_cache=self.tree,
                        req_to_token_pool=self.requests,
                    ),
                    req,
                )
        self.check_context(req)
        assert start % page == 0, "steps compute whole pages, but for the last"
        slots = self.slots(count)[: stop - start].to(torch.int64)
        self.requests.write((req.kv.req_pool_idx, slice(start, stop)), slots)
        digests = digests_of(tokens)
        self.write("full", digests[start:stop], slots)
        if self.cfg.has_swa:
            window = self.allocator.translate_loc_from_full_to_swa(slots)
            self.write("swa", digests[start:stop], window)
        if self.cfg.has_mamba:
            self.write_state(digests[stop - 1 : stop], int(req.kv.mamba_pool_idx))
            if entry is not None and entry.track_mask:
                tracked = req.kv.mamba_last_track_seqlen
                slot = int(req.kv.mamba_ping_pong_track_buffer[entry.track_position])
                self.write_state(digests[tracked - 1 : tracked], slot)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = stop
        self.tree.checkpoint(req, up_to=stop)
        req.prefix_len = stop
        return True

    def decode(self, req: Any, tokens: Sequence[int]) -> None:
        """Steps that compute the last token and sample the next one, without a checkpoint. Of
        recurrent states, they keep none for the tree."""
        page, row = self.allocator.page_size, self.requests.req_to_token[req.kv.req_pool_idx]
        for token in tokens:
            req.output_ids.append(token)
            req.full_untruncated_fill_ids.append(token)
            position = req.seqlen - 2  # of the token that is computed
            if position < req.kv.kv_allocated_len:  # the first token is sampled by the prefill
                continue
            if self.cfg.has_swa and req.decode_batch_idx:  # before, the prefill may still run
                self.tree.evict_sliding_windows(req, req.seqlen - 1)
            req.decode_batch_idx += 1
            if position % page:
                slots = row[position - 1 : position].to(torch.int64) + 1
            else:
                assert self.room(page)
                slots = self.slots(page)[:1].to(torch.int64)
            self.requests.write((req.kv.req_pool_idx, slice(position, position + 1)), slots)
            digests = digests_of(req.full_untruncated_fill_ids[: position + 1])[-1:]
            self.write("full", digests, slots)
            if self.cfg.has_swa:
                self.write("swa", digests, self.allocator.translate_loc_from_full_to_swa(slots))
            if self.cfg.has_mamba:
                self.write_state(digests, int(req.kv.mamba_pool_idx))
            req.kv.kv_allocated_len = req.kv.kv_committed_len = position + 1

    def _prepare_state(self, req: Any) -> None:
        """What SGLang does with states before a forward: copies on write, and clears."""
        batch: Any = SimpleNamespace()
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, [req])
        pool, rows = self.requests.mamba_pool, self.requests.translate_mamba_indices
        if batch.mamba_cow_src_indices is not None:
            pool.copy_from(rows(batch.mamba_cow_src_indices), rows(batch.mamba_cow_dst_indices))
        if batch.mamba_clear_indices is not None:
            pool.clear_slots(rows(batch.mamba_clear_indices))

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
        slots = None if self.ends is None else self.tree.end_slots(req, stop)
        if self.ends is not None and slots is None:
            return False
        tokens = tuple(req.full_untruncated_fill_ids)
        row = self.requests.req_to_token[req.kv.req_pool_idx, :stop].to(torch.int64)
        for end in range(self.block, stop + 1, self.block):
            (buffer,) = self.buffers(1)
            self.kv.save(row[end - self.block : end], [buffer], ())
            self.store.blocks[tokens[:end]] = bytes(buffer.view)
        if self.ends is None:
            return True
        buffers = self.buffers(self.ends.count)
        self.ends.save(self.ends.prepare(slots), buffers, ())
        self.store.ends[tokens[:stop]] = [bytes(buffer.view) for buffer in buffers]
        return True

    def stored_end(self, tokens: Sequence[int], front: int) -> int | None:
        """The last stored end of a prompt that is right of the front."""
        block = self.block
        computed = max(1 + bool(self.behind), self.tail_tokens)
        last = (len(tokens) - computed) // block * block
        stored = self.store.blocks if self.ends is None else self.store.ends
        ends = [end for end in range(block, last + 1, block) if tuple(tokens[:end]) in stored]
        return ends[-1] if ends and ends[-1] > front else None

    def load(self, req: Any, stop: int, *, running: bool, aborts: bool = False) -> bool:
        """Attach what is stored up to `stop`; False: no memory.

        Args: aborts: the request is aborted before its front gets there.
        """
        tokens = tuple(req.full_untruncated_fill_ids)
        first = req.prefix_len // self.block * self.block
        allocator = self.full_allocator
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
            end = None
            if self.ends is not None:
                end = self.tree.allocate_end(req, Span(req.prefix_len, stop))
            if aborts or (self.ends is not None and end is None):
                allocator.free_segment(slots, start_pos=0)
                if end is not None:
                    self.tree.free_end(req, end)
                return False
            if end is not None:
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
        blocks = self.ends.blocks_of(self.ends.prepare(end))
        for (kv, slots), piece in zip(blocks, self.store.ends[tokens], strict=True):
            kv.load(held(piece), slots, ())

    def empty(self) -> None:
        """All pools and the tree are as those of a server that starts; the store stays."""
        self.tree.reset()
        self.allocator.clear()
        self.requests.clear()

    def scramble(self) -> None:
        """Other bytes everywhere, as another server has them."""
        for kind in ("full", "swa") if self.cfg.has_swa else ("full",):
            for _, rows, _ in self.places(kind, torch.arange(self.block)):
                rows.fill_(0x5A)
        if self.cfg.has_mamba:
            for _, rows in self._states():
                rows.fill_(0x5A)

    def overwrite_free_states(self) -> None:
        """As other requests would that get them."""
        slots = self.requests.mamba_allocator.alloc(self.free_states())
        if slots is not None:
            for _, rows in self._states():
                rows[self.requests.translate_mamba_indices(slots)] = 0x5A
            self.requests.mamba_allocator.free(slots)

    # ---- counts of slots ----

    def taken(self, allocator: Any) -> int:
        """How many slots it has given out."""
        return int(allocator.size - allocator.available_size())

    def check_slots(self) -> None:
        """Each slot of each pool is free, in the tree, or of one live request."""
        tree, page = self.tree, self.allocator.page_size
        tree.sanity_check()
        held_full = held_swa = 0
        held_states = sum(req.kv.holds_mamba for req in self.waiting) if self.cfg.has_mamba else 0
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
        own = tree.full_evictable_size() + tree.full_protected_size()
        assert own + held_full == self.taken(self.full_allocator)
        if self.cfg.has_swa:
            own = tree.swa_evictable_size() + tree.swa_protected_size()
            assert own + held_swa == self.taken(self.allocator.swa_attn_allocator)
        if self.cfg.has_mamba:
            states = self.requests.mamba_allocator
            own = tree.mamba_evictable_size() + tree.mamba_protected_size()
            assert states.available_size() + own + held_states == states.size


class UnifiedTree(HybridTree):
    """A hybrid whose pools are in one memory, where SGLang moves slots to other rows. It does so
    whenever `check_slots` is called. The test has `torch.cuda.current_stream` call `wait`."""

    def __init__(self, cfg: CacheConfig, core: str = "python", **options: Any) -> None:
        super().__init__(cfg, core, **options)
        members = ("full_attn_allocator", "swa_attn_allocator", "mamba_allocator")
        movers = [
            getattr(self.allocator, name) for name in members if hasattr(self.allocator, name)
        ]
        self.tree.copier = Copier(self.kv, movers=movers)
        self.moves = 0

    def _make_pools(
        self, patch: pytest.MonkeyPatch, parts: Mapping[str, Callable[..., Any]]
    ) -> None:
        made: list[Any] = []

        def requests(cache_params: Any, **options: Any) -> Any:
            made.append(unified_pools(self.cfg, cache_params))
            return made[0].req_to_token_pool

        def windows(**options: Any) -> Any:
            if not made:
                made.append(unified_pools(self.cfg))
            return made[0].token_to_kv_pool

        patch.setattr(fixtures, "HybridReqToTokenPool", requests)
        patch.setattr(fixtures, "SWAKVPool", windows)
        patch.setattr(fixtures, "HybridLinearKVPool", lambda **_: made[0].token_to_kv_pool)
        for name in ("SWATokenToKVPoolAllocator", "TokenToKVPoolAllocator"):
            patch.setattr(fixtures, name, lambda **_: made[0].token_to_kv_pool_allocator)

    def places(self, kind: str, slots: torch.Tensor) -> Iterator[Place]:
        rows = self.allocator.translate_kv_loc(slots) if kind == "full" else slots
        yield from super().places(kind, rows)

    def slots(self, tokens: int) -> torch.Tensor:
        slots: torch.Tensor = self.allocator.alloc(tokens)
        return slots

    def free_states(self) -> int:
        return int(self.requests.mamba_allocator.schedulable_available_size())

    def taken(self, allocator: Any) -> int:
        return int(allocator.allocated_count())

    def check_slots(self) -> None:
        self.moves += self.allocator.flush_opportunistic()
        assert not self.allocator.verify_byte_accounting()
        super().check_slots()


def unified_pools(cfg: CacheConfig, states: Any = None) -> Any:
    """What SGLang makes with `--enable-unified-memory`. Args: states: of a recurrent model."""
    layers = list(cfg.non_full_layer_ids)
    changes = {
        "kv_cache_dtype": cfg.dtype,
        "head_num": cfg.head_num,
        "head_dim": cfg.head_dim,
        "v_head_dim": cfg.head_dim,
        "end_layer": cfg.num_layers,
        "full_attention_layer_ids": list(cfg.full_attention_layer_ids),
        "swa_head_num": cfg.head_num,
        "swa_head_dim": cfg.head_dim,
        "swa_v_head_dim": cfg.head_dim,
        "swa_attention_layer_ids": layers,
        "mamba_layer_ids": layers,
        "mamba2_cache_params": states,
        "max_mamba_cache_size": cfg.mamba_cache_size,
        "model_context_len": cfg.max_context_len,
        "extra_max_context_len": 0,
        "max_num_reqs": cfg.max_num_reqs,
        "enable_mamba_extra_buffer": cfg.enable_mamba_extra_buffer,
        "sliding_window_size": cfg.sliding_window_size,
    }
    beside = "windows" if states is None else "both" if cfg.has_swa else "states"
    return kv_pools.unified_pools(cfg.kv_size, page=cfg.page_size, beside=beside, changes=changes)


# Pools of DeepSeek V4, and whether SGLang replays.
COMPRESSED: dict[str, tuple[Callable[..., Any], bool]] = {
    "v4": (deepseek_v4, False),
    "v4, sums of one row": (deepseek_v4_online, False),
    "v4.1": (deepseek_v41, False),
    "v4.1, replay": (deepseek_v41, True),
}


class CompressedTree(HybridTree):
    """DeepSeek V4. What belongs to a page of 256 tokens, which is a block, is written and read at
    its last token: all compressed KV of the page, the page of the window, and the sums of its last
    tokens, where SGLang's own addressing says.

    With bounded replay, the last layers write and read windows of the last tokens of a prompt
    alone. The request computes these tokens itself, behind all that is loaded or matched.
    """

    PAGE = 256
    SUMMED = 8  # tokens whose sums a page keeps
    LAST_LAYERS = 3  # the first of them

    def __init__(self, core: str = "python", *, kind: str = "v4", pages: int = 20) -> None:
        make, replays = COMPRESSED[kind]
        cfg = config_of(
            SWA,
            page=self.PAGE,
            slots=pages * self.PAGE,
            window=self.PAGE // 2,
            replays=replays,
        )
        parts = {"SWAKVPool": partial(made, make, cfg.kv_size)}
        super().__init__(cfg, core, block=self.PAGE, parts=parts)

    def admit(self, req: Any) -> bool:
        req.computes_from = req.prefix_len
        return super().admit(req)

    def load(self, req: Any, stop: int, *, running: bool, aborts: bool = False) -> bool:
        loaded = super().load(req, stop, running=running, aborts=aborts)
        req.computes_from = req.prefix_len
        return loaded

    def check_context(self, req: Any) -> None:
        super().check_context(req)
        last = len(req.full_untruncated_fill_ids) - self.tail_tokens
        assert not req.computes_from or req.computes_from <= last

    def places(self, kind: str, slots: torch.Tensor) -> Iterator[Place]:
        pool = self.allocator.get_kvcache()
        pages = (slots // self.PAGE,)
        if kind == "full":
            for number, (rows, tokens) in enumerate(rows_of(pool)):
                count = self.PAGE // tokens  # rows of a page
                whole = as_bytes(rows)[: len(rows) // count * count]
                yield f"full, plane {number}", whole.reshape(-1, count * whole.shape[1]), pages
            return
        for number, rows in enumerate(self.windows):
            yield f"swa, layer {number}", as_bytes(rows), pages
        last = slots[:, None] - torch.arange(self.SUMMED)
        for number, sums in enumerate(self.sums):
            at = sums.translate_from_swa_loc_to_state_loc(last)
            yield f"swa, sums {number}", as_bytes(sums.kv_score_buffer.kv_score), (at,)

    @property
    def windows(self) -> list[torch.Tensor]:
        """Of the layers that compute all tokens."""
        rows: list[torch.Tensor] = self.allocator.get_kvcache().swa_kv_pool.kv_buffer
        return rows[: self.LAST_LAYERS] if self.tail_tokens else rows

    @property
    def sums(self) -> list[Any]:
        """SGLang's pools of sums that belong to pages."""
        pool = self.allocator.get_kvcache()
        states = (*pool.compress_state_pools, *pool.indexer_compress_state_pools)
        return [each for each in states if each is not None and each.ratio == 4]

    def write(self, kind: str, digests: torch.Tensor, slots: torch.Tensor) -> None:
        last = slots % self.PAGE == self.PAGE - 1
        super().write(kind, digests[last], slots[last])

    def wrong(self, kind: str, digests: torch.Tensor, slots: torch.Tensor) -> list[str]:
        last = slots % self.PAGE == self.PAGE - 1
        return super().wrong(kind, digests[last], slots[last])


class RequestWindowTree(CompressedTree):
    """DeepSeek V4.1 where sliding windows belong to requests. SGLang computes the window of a
    request anew in the steps that `encoder_swa_reset` names, and goes on with it in all others."""

    def __init__(self, core: str = "python", *, pages: int = 20) -> None:
        cfg = config_of(page=self.PAGE, slots=pages * self.PAGE)
        parts = {"MHATokenToKVPool": partial(made, deepseek_v41_requests, cfg.kv_size)}
        HybridTree.__init__(self, cfg, core, block=self.PAGE, parts=parts)
        self.tree.joined = WeakSet()
        self.replays = 0  # steps that compute a window anew after loaded blocks

    def admit(self, req: Any) -> bool:
        req.window_stop = None
        return super().admit(req)

    def check_context(self, req: Any) -> None:
        super().check_context(req)
        begins = req.window_stop is None
        batch = SimpleNamespace(
            tree_cache=self.tree, reqs=[req], encoder_swa_reset=[begins], prefix_lens=[]
        )
        replayed = self.tree.replayed_tokens(req)
        self.tree.restart_windows(batch)
        batch.prefix_lens.append(req.prefix_len)
        batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx])
        resets: list[torch.Tensor] = []
        rows = encoder_swa_replay._reset_windows_and_collect_hits(
            batch=batch, window=SimpleNamespace(reset=resets.append)
        )
        if resets:
            [(_, start, stop)] = rows or [(0, 0, 0)]
            assert (start, stop) == (max(0, req.prefix_len - 128), req.prefix_len)
            assert begins or replayed == stop - start
            self.replays += not begins
        else:
            assert not replayed
            assert req.window_stop == req.prefix_len, "a window of other tokens"
        req.window_stop = req.extend_end


class SparseTree(HybridTree):
    """A model whose layers read the KV of those tokens that an index chooses: DeepSeek V3.2, or
    MiniMax M3. Memory is where SGLang's accessors say."""

    PAGE = 64

    def __init__(self, make: Callable[[int], Any], core: str = "python") -> None:
        cfg = config_of(page=self.PAGE, slots=40 * self.PAGE)
        parts = {"MHATokenToKVPool": partial(made, make, cfg.kv_size)}
        super().__init__(cfg, core, block=2 * self.PAGE, parts=parts)

    def places(self, kind: str, slots: torch.Tensor) -> Iterator[Place]:
        pool = self.full_pool
        if isinstance(pool, MiniMaxSparseKVPool):
            for layer in range(pool.layer_num):
                yield f"K of layer {layer}", as_bytes(pool.get_key_buffer(layer)), (slots,)
                yield f"V of layer {layer}", as_bytes(pool.get_value_buffer(layer)), (slots,)
            for layer in pool.sparse_layer_id_mapping:
                rows = pool.get_index_k_buffer(layer)
                yield f"index K of layer {layer}", as_bytes(rows), (slots,)
            for layer in pool.index_kv_layer_id_mapping:
                rows = pool.get_index_kv_buffer(layer)[1]
                yield f"index V of layer {layer}", as_bytes(rows), (slots,)
            return
        place = (slots // self.PAGE, slots % self.PAGE)
        keys_bytes = self.PAGE * pool.index_head_dim
        for layer in range(pool.layer_num):
            yield f"KV of layer {layer}", as_bytes(pool.get_key_buffer(layer)), (slots,)
            pages = pool.get_index_k_with_scale_buffer(layer)
            if len(pages):  # the others choose the tokens of the layer before
                for name, part in (
                    ("keys", pages[:, :keys_bytes]),
                    ("scales", pages[:, keys_bytes:]),
                ):
                    rows = part.unflatten(1, (self.PAGE, -1))
                    yield f"index {name} of layer {layer}", rows, place

    def wrong(self, kind: str, digests: torch.Tensor, slots: torch.Tensor) -> list[str]:
        found = super().wrong(kind, digests, slots)
        pages = slots[:: self.PAGE] // self.PAGE * self.PAGE  # an index is read by pages
        whole = (pages[:, None] + torch.arange(self.PAGE)).flatten()[: len(slots)]
        return found if torch.equal(slots, whole) else [*found, "pages"]


SPARSE: dict[str, Callable[[int], Any]] = {
    "dsa": dsa,
    "dsa, a layer without an index": partial(dsa, skip_topk_layers=[False, True, False]),
    "minimax": minimax,
}


@dataclass(slots=True)
class Blocks:
    """What the tree asks of a coordinator: a block's size, its keys, and the records that a test
    gives. There are other ranks."""

    block_tokens: int
    alone: bool = False
    store_detached: bool = False
    reclaimable_tokens: int = 0
    keys: Any = field(default_factory=lambda: SimpleNamespace(next_tokens=0))
    step_costs: Any = field(default_factory=lambda: SimpleNamespace(chunk_tokens=2 * BLOCK))
    tree_evicts: bool = False
    records: dict[str, PromptRecord] = field(default_factory=dict)

    def record(self, req: Any) -> PromptRecord | None:
        record = self.records.get(req.rid)
        return record if record is not None and record.req is req else None

    def inserted(self, key: Any) -> None:
        pass

    def release(self, rid: str) -> None:
        self.records.pop(rid, None)

    def emptied(self) -> None:
        self.records.clear()

    def timed(self) -> AbstractContextManager[None]:
        return nullcontext()


def allocator(page: int, *, kvcache: Any, **_: Any) -> Any:
    """SGLang's own for pages of this size."""
    return allocator_of(kvcache, page)


def made(make: Callable[[int], Any], slots: int, **_: Any) -> Any:
    """A pool, whatever the fixture says of its form."""
    return make(slots)


def held(data: bytes) -> Buffer:
    """A buffer that holds a stored block."""
    buffer = Buffer(on_page(len(data)))
    buffer.view[:] = data
    return buffer
