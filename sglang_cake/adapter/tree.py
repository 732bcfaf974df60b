"""SGLang's radix tree with a door to the store."""

import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_cake.adapter.build import Engine
    from sglang_cake.adapter.coordinator import Coordinator
    from sglang_cake.adapter.last_step import LastStep
    from sglang_cake.adapter.runahead import Runahead
    from sglang_cake.adapter.saving import Saving


class CakeRadixCache(UnifiedRadixCache):
    """The default tree of SGLang; matching, locking and eviction stay its own.

    Slots that hold landed blocks count as evictable: SGLang may plan with that memory, and `evict*`
    gives them up after everything else. So its books balance at every moment.
    """

    coordinator: "Coordinator | None" = None
    saving: "Saving | None" = None
    engine: "Engine | None" = None
    runahead: "Runahead | None" = None
    last_step: "LastStep | None" = None
    releasing: str | None = None  # gives its row back and goes on waiting (`turns.put_back`)

    # ---- what SGLang calls ----

    def prefix_device_indices(self, req: "Req") -> torch.Tensor:
        restore = None if self.coordinator is None else self.coordinator.restore(req.rid)
        if restore is None or (overlap := restore.overlap) is None or overlap.slots is None:
            own: torch.Tensor = super().prefix_device_indices(req)
            return own
        prefix_len, req.prefix_len = req.prefix_len, overlap.span.start
        matched = super().prefix_device_indices(req)
        req.prefix_len = prefix_len
        return torch.cat([matched, overlap.slots])

    def checkpoint(self, req: "Req", *, up_to: int, **kwargs: Any) -> None:
        restore = None if self.coordinator is None else self.coordinator.restore(req.rid)
        if restore is not None and restore.overlap is not None:
            raise RuntimeError(f"the step of {req.rid} ran past cake, without all of its KV")
        super().checkpoint(req, up_to=up_to, **kwargs)
        if self.coordinator is None or self.saving is None:
            return
        if restore is not None and req.kv.holds_kv:
            started_s = time.perf_counter()
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
            tokens = req.full_untruncated_fill_ids[:up_to]
            self.saving.checkpointed(restore, tokens, row, last=req.finished())
            self.coordinator.step_s += time.perf_counter() - started_s

    def on_release(self, req: "Req", *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        if self.coordinator is not None and req.rid != self.releasing:
            self.coordinator.end(req.rid)
        if self.runahead is not None:
            self.runahead.end(req.rid)

    def release_aborted_request(self, request: Any) -> None:
        super().release_aborted_request(request)
        if self.coordinator is not None:
            self.coordinator.end(request.rid)
        if self.runahead is not None:
            self.runahead.end(request.rid)

    def reset(self) -> None:
        if self.coordinator is not None:
            self.coordinator.emptied()
        super().reset()

    def evictable_size(self) -> int:
        return int(super().evictable_size()) + self._held_tokens()

    def full_evictable_size(self) -> int:
        return int(super().full_evictable_size()) + self._held_tokens()

    def evict(self, params: EvictParams) -> EvictResult:
        result = super().evict(params)
        return self._reclaim(result, params.num_tokens - result.num_tokens_evicted)

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        target = self.token_to_kv_pool_allocator.available_size() + params.num_tokens
        result = super().evict_for_alloc(params, **kwargs)
        return self._reclaim(result, target - self.token_to_kv_pool_allocator.available_size())

    # ---- what cake calls ----

    def evict_own(self, tokens: int) -> None:
        """Evict from the tree alone, never landed blocks."""
        super().evict_for_alloc(EvictParams(num_tokens=tokens))

    def matched_tokens(self, req: "Req", tokens: Any, limit: int) -> int:
        """How many leading tokens the device holds."""
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        return int(self.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)

    def attach_running(self, req: "Req", slots: torch.Tensor, stop: int) -> None:
        """Give `slots` to the row of a request between two chunks, and so to the tree."""
        row = (req.kv.req_pool_idx, slice(req.prefix_len, stop))
        self.req_to_token_pool.write(row, slots.to(torch.int32))
        req.kv.kv_allocated_len = stop
        req.kv.kv_committed_len = stop
        req.extend_end = stop
        self.checkpoint(req, up_to=stop)
        req.prefix_len = stop

    def lend_running(self, req: "Req", slots: torch.Tensor, start: int) -> None:
        """Give `slots` to the row of a request between two chunks, from token `start` on: they are
        its own, and join the tree with what it computes next."""
        row = (req.kv.req_pool_idx, slice(start, start + len(slots)))
        self.req_to_token_pool.write(row, slots.to(torch.int32))

    def attach_waiting(self, req: "Req", slots: torch.Tensor, stop: int) -> None:
        """Give `slots` to the tree, below the prefix that a waiting request has matched."""
        prefix = self.prefix_device_indices(req)
        self.insert(
            InsertParams(
                key=RadixKey(
                    req.full_untruncated_fill_ids[:stop],
                    req.extra_key,
                    cache_salt=req.cache_salt,
                ),
                value=torch.cat([prefix.to(torch.int64), slots]),
                prev_prefix_len=req.prefix_len,
                inserted_len=req.prefix_len,
                priority=req.priority or 0,
            )
        )
        req.init_next_round_input(self)

    def _held_tokens(self) -> int:
        return 0 if self.coordinator is None else self.coordinator.held_tokens

    def _reclaim(self, result: EvictResult, missing: int) -> EvictResult:
        if missing > 0 and self._held_tokens() and self.coordinator is not None:
            result.num_tokens_evicted += self.coordinator.reclaim(missing)
        return result
