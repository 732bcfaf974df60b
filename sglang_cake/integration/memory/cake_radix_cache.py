"""SGLang's radix tree, which calls cake where KV is computed, released or evicted."""

import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_cake.core.errors import OverlapError
from sglang_cake.integration.boundary import BOUNDARY, guarded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_cake.integration.identity.content import Files
    from sglang_cake.integration.identity.identity import Identity
    from sglang_cake.integration.memory.block_saving import BlockSaving
    from sglang_cake.integration.overlap.overlapped_step import OverlappedStep, OverlapRunner
    from sglang_cake.integration.runahead.runahead_scheduler import Runahead
    from sglang_cake.integration.scheduler.coordinator import Coordinator
    from sglang_cake.integration.scheduler.waker import Waker

logger = logging.getLogger("sglang_cake")


class Service(Protocol):
    """Cake in one scheduler process (`build.CakeService`), as hooks reach it through the tree."""

    setting: str | None
    waker: "Waker"

    @property
    def identity(self) -> "Identity":
        """The namespace of this process, and how it is found."""
        ...

    def weights_changing(self) -> None:
        """The server's weights are about to change."""
        ...

    def weights_changed(
        self, files: "Files | None", load_format: str | None, version: str | None, *, idle: bool
    ) -> None:
        """The server's weights have changed."""
        ...

    def attach_store(self, setting: str) -> None:
        """Use another store for new requests. Raises: ConfigError."""
        ...

    def detach_store(self) -> None:
        """Use no store."""
        ...


class CakeRadixCache(UnifiedRadixCache):
    """The default tree of SGLang; matching, locking and eviction stay its own.

    Slots that hold landed blocks count as evictable: SGLang may plan with that memory, and `evict*`
    gives them up after everything else. So SGLang's accounting balances at every moment.

    Attributes: set by `build`, and None where cake, or that part of it, is off.
        releasing: id of a request that gives its row back and returns to the queue
            (`queue_order.requeue`).
    """

    coordinator: "Coordinator | None" = None
    saving: "BlockSaving | None" = None
    service: Service | None = None
    runahead: "Runahead | None" = None
    overlap_runner: "OverlapRunner | None" = None
    releasing: str | None = None

    # ---- what SGLang calls: each method calls SGLang's own once, outside of the guarded part ----

    def prefix_device_indices(self, req: "Req") -> torch.Tensor:
        step = self._overlapped_step(req)
        if step is None or step.slots is None:
            own: torch.Tensor = super().prefix_device_indices(req)
            return own
        prefix_len = req.prefix_len
        req.prefix_len = step.span.start
        matched = super().prefix_device_indices(req)
        req.prefix_len = prefix_len
        return torch.cat([matched, step.slots])

    def checkpoint(self, req: "Req", *, up_to: int, **kwargs: Any) -> None:
        if self._overlapped_step(req) is not None:
            self._ran_past(req)
            return
        super().checkpoint(req, up_to=up_to, **kwargs)
        self._save(req, up_to)

    def on_release(self, req: "Req", *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._released(req)

    def release_aborted_request(self, request: Any) -> None:
        super().release_aborted_request(request)
        self._aborted(request)

    def reset(self) -> None:
        self._emptied()
        super().reset()

    def evictable_size(self) -> int:
        return int(super().evictable_size()) + self._placed_tokens()

    def full_evictable_size(self) -> int:
        return int(super().full_evictable_size()) + self._placed_tokens()

    def evict(self, params: EvictParams) -> EvictResult:
        self._before_slots_are_freed()
        result = super().evict(params)
        result.num_tokens_evicted += self._reclaim(params.num_tokens - result.num_tokens_evicted)
        return result

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        self._before_slots_are_freed()
        target = self.token_to_kv_pool_allocator.available_size() + params.num_tokens
        result = super().evict_for_alloc(params, **kwargs)
        missing = target - self.token_to_kv_pool_allocator.available_size()
        result.num_tokens_evicted += self._reclaim(missing)
        return result

    # ---- what the boundary calls ----

    def forget(self, rid: str) -> None:
        """Compute this request without cake, and return all that it holds. If its overlapped last
        step is scheduled, that happens after the step."""
        if self.overlap_runner is not None and not self.overlap_runner.leave(rid):
            return
        if self.coordinator is not None:
            self.coordinator.end(rid)
        if self.runahead is not None:
            self.runahead.end(rid)

    def forget_all(self) -> None:
        """The same for every request."""
        for rid in [] if self.coordinator is None else self.coordinator.live:
            self.forget(rid)

    def switch_off(self) -> None:
        """From now on this process does nothing for any request. With several ranks, cake takes
        part in the reductions until all ranks know (`let_go`)."""
        saving = self.saving
        self.saving = None
        self.runahead = None
        if saving is not None:
            try:
                saving.before_slots_are_freed(lambda record: False)
            except Exception:
                logger.exception("cake: blocks could not be saved")
        coordinator = self.coordinator
        if coordinator is None:
            return
        for rid in coordinator.live:
            try:
                self.forget(rid)
            except Exception:
                logger.exception("cake: request %s could not be given up", rid)
        if coordinator.switch_off():
            self.let_go()

    def let_go(self) -> None:
        """Drop cake, if all ranks know that it is off and no overlapped step is under way."""
        busy = self.overlap_runner is not None and self.overlap_runner.due
        if self.coordinator is not None and self.coordinator.off_everywhere and not busy:
            self.coordinator = None
            self.service = None
            self.overlap_runner = None

    # ---- what cake calls ----

    def evict_own(self, tokens: int) -> None:
        """Evict from the tree alone, never landed blocks. Its errors are those of the caller: no
        request may end while slots are allocated for it."""
        self._order_after_saves()
        super().evict_for_alloc(EvictParams(num_tokens=tokens))

    def matched_tokens(self, req: "Req", tokens: Any, limit: int) -> int:
        """How many leading tokens the tree holds."""
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        return int(self.match_prefix(MatchPrefixParams(key=key)).device_prefix_len)

    def attach_running(self, req: "Req", slots: torch.Tensor, stop: int) -> None:
        """Give `slots` to the row of a request between two chunks, and with the row to the tree."""
        row = (req.kv.req_pool_idx, slice(req.prefix_len, stop))
        self.req_to_token_pool.write(row, slots.to(torch.int32))
        req.kv.kv_allocated_len = stop
        req.kv.kv_committed_len = stop
        req.extend_end = stop
        self.checkpoint(req, up_to=stop)
        req.prefix_len = stop

    def lend_running(self, req: "Req", slots: torch.Tensor, start: int) -> None:
        """Give `slots` to the row of a request between two chunks, from token `start` on. The
        request owns them; they join the tree with the tokens that it computes next."""
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

    # ---- the guarded parts of what SGLang calls ----

    def _ran_past(self, req: "Req") -> None:
        """SGLang ran an overlapped step without cake, so KV was missing. The request ends without
        an answer, and its KV is dropped."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        reason = FINISH_ABORT("its last step ran without all of its KV")
        req.skip_radix_cache_insert = True
        if req.finished():
            req.finished_reason = reason
        else:
            req.to_finish = reason
        if self.overlap_runner is not None:
            self.overlap_runner.due = None
        error = OverlapError(f"the step of {req.rid} ran past cake, without all of its KV", "lost")
        BOUNDARY.failed("CakeRadixCache.checkpoint", error, unsafe=True)

    def _overlapped_step(self, req: "Req") -> "OverlappedStep | None":
        return None if self.overlap_runner is None else self.overlap_runner.step_of(req.rid)

    @guarded("CakeRadixCache.checkpoint")
    def _save(self, req: "Req", up_to: int) -> None:
        if self.coordinator is None or self.saving is None:
            return
        record = self.coordinator.record(req.rid)
        if record is not None and req.kv.holds_kv:
            with self.coordinator.timed():
                row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
                tokens = req.full_untruncated_fill_ids[:up_to]
                self.saving.checkpointed(record, tokens, row, last=req.finished())

    @guarded("CakeRadixCache.evict")
    def _before_slots_are_freed(self) -> None:
        self._order_after_saves()

    def _order_after_saves(self) -> None:
        coordinator = self.coordinator
        if self.saving is not None:
            self.saving.before_slots_are_freed(
                lambda record: coordinator is not None and coordinator.record(record.rid) is record
            )

    @guarded("CakeRadixCache.on_release")
    def _released(self, req: "Req") -> None:
        if self.coordinator is not None and self.saving is not None:
            record = self.coordinator.record(req.rid)
            if record is not None:
                self.saving.released(record)
        if self.coordinator is not None and req.rid != self.releasing:
            self.coordinator.end(req.rid)
        if self.runahead is not None:
            self.runahead.end(req.rid)

    @guarded("CakeRadixCache.release_aborted_request")
    def _aborted(self, request: Any) -> None:
        self.forget(request.rid)

    @guarded("CakeRadixCache.reset")
    def _emptied(self) -> None:
        self._before_slots_are_freed()
        if self.coordinator is not None:
            self.coordinator.emptied()

    def _placed_tokens(self) -> int:
        return 0 if self.coordinator is None else self.coordinator.placed_tokens

    @guarded("CakeRadixCache.evict", 0)
    def _reclaim(self, missing: int) -> int:
        """Free slots of landed blocks. Returns the tokens freed."""
        if missing <= 0 or self.coordinator is None or not self.coordinator.placed_tokens:
            return 0
        return self.coordinator.reclaim(missing)
