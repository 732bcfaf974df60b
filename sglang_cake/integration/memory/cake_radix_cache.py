"""SGLang's radix tree, which calls cake where KV is computed, released or evicted."""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_cake.core.errors import OverlapError
from sglang_cake.core.keys import Span
from sglang_cake.integration.boundary import BOUNDARY, guarded
from sglang_cake.integration.compat import has_tracked_state
from sglang_cake.integration.memory.end_states import EndSlots, EndStates

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_cake.integration.memory.block_saving import BlockSaving
    from sglang_cake.integration.memory.copier import Copier
    from sglang_cake.integration.overlap.overlapped_step import OverlappedStep, OverlapRunner
    from sglang_cake.integration.runahead.runahead_scheduler import Runahead
    from sglang_cake.integration.scheduler.coordinator import Coordinator

logger = logging.getLogger("sglang_cake")

SCARCE_WINDOWS = 1 / 8  # of their pool: if less is free or held by the tree alone, it is scarce
CUT_SHARE = 1 / 16  # a step gives up at most so much of its tokens for end states of later steps


class CakeRadixCache(UnifiedRadixCache):
    """The default tree of SGLang; matching, locking and eviction stay its own.

    Slots that are reserved, or hold landed blocks, count as evictable: SGLang may plan with that
    memory, and `evict*` gives them up after everything else. So SGLang's accounting balances at
    every moment. Slots of end states are allocated when their prefix joins the tree, so they are
    never held.

    Attributes: set by `build`, and None where cake, or that part of it, is off.
        ends: the end states of the model; None: a prefix may end at every block.
        copier: the copier of a pool whose slots SGLang moves; None: they stay where they are.
        joined: where sliding windows belong to requests, and not to the tree, the requests that
            loaded blocks have joined since their last step; else None (`restart_windows`).
        releasing: id of a request that gives its row back and returns to the queue
            (`queue_order.requeue`).
    """

    coordinator: "Coordinator | None" = None
    saving: "BlockSaving | None" = None
    service: Any = None  # the `CakeService`, whose module imports this one
    runahead: "Runahead | None" = None
    overlap_runner: "OverlapRunner | None" = None
    ends: EndStates | None = None
    copier: "Copier | None" = None
    joined: "WeakSet[Req] | None" = None
    releasing: str | None = None
    decode_tokens: int = 2  # SGLang reserves as many slots of a request for a step that decodes
    _window_start: int | None = None  # the checkpoint under way keeps windows from this token on

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
        self._window_start = self._last_window_start(up_to)
        try:
            super().checkpoint(req, up_to=up_to, **kwargs)
        finally:
            self._window_start = None
        self._save(req, up_to)

    def swa_retain_floor(self, req: "Req") -> int | None:
        own = super().swa_retain_floor(req)
        floors = (own, self._window_start, self._answer_window_start(req))
        return min((floor for floor in floors if floor is not None), default=None)

    def on_release(self, req: "Req", *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._released(req)

    def release_aborted_request(self, request: Any) -> None:
        super().release_aborted_request(request)
        self._aborted(request)

    def reset(self) -> None:
        self._emptied()
        super().reset()

    def insert(self, params: InsertParams) -> InsertResult:
        if self.coordinator is not None:
            self.coordinator.inserted(params.key)
        if self.ends is None:
            return super().insert(params)
        # It may free slots of the tree. KV whose window has gone gets new ones. States above
        # `--mamba-max-states-per-path` are evicted, and only that makes a match shorter.
        self._before_slots_are_freed(evicts=False)
        states = self._states_in_tree()
        result = super().insert(params)
        added = self.supports_mamba() and not result.mamba_exist
        if self.coordinator is not None and self._states_in_tree() < states + added:
            self.coordinator.tree_evicts = True
        return result

    def release_swa(self, lock: Any) -> None:
        # SGLang may ask in each step of a request that decodes. It frees slots once.
        if lock is not None and not lock.swa_released:
            self._before_slots_are_freed()
        super().release_swa(lock)

    def evictable_size(self) -> int:
        return int(super().evictable_size()) + self._reclaimable_tokens()

    def full_evictable_size(self) -> int:
        return int(super().full_evictable_size()) + self._reclaimable_tokens()

    def evict(self, params: EvictParams) -> EvictResult:
        self._before_slots_are_freed()
        result = super().evict(params)
        result.num_tokens_evicted += self._reclaim(params.num_tokens - result.num_tokens_evicted)
        return result

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        self._before_slots_are_freed()
        target = self.free_tokens() + params.num_tokens
        states = self._free_states() + params.mamba_num
        result = super().evict_for_alloc(params, **kwargs)
        satisfied = kwargs.get("allocation_reclaim_satisfied")
        if satisfied is None or not satisfied():
            missing = max(target - self.free_tokens(), self._tokens_of(states))
            result.num_tokens_evicted += self._reclaim(missing)
        return result

    # ---- what the boundary calls ----

    def forget(self, rid: str | None) -> None:
        """Cake failed: compute this request without it, and return all that it holds. None: so with
        every request."""
        if self.coordinator is not None:
            self.coordinator.failed = True
        if rid is None:
            self.give_up_all()
        else:
            self._give_up(rid)

    def _give_up(self, rid: str) -> None:
        """Return all that a request holds. If its overlapped last step is scheduled, that happens
        after the step."""
        if self.overlap_runner is not None and not self.overlap_runner.leave(rid):
            return
        if self.coordinator is not None:
            self.coordinator.release(rid)
        if self.runahead is not None:
            self.runahead.release(rid)

    def give_up_all(self) -> None:
        """Return all that requests hold: they are computed without cake."""
        for rid in [] if self.coordinator is None else self.coordinator.live:
            self._give_up(rid)

    def switch_off(self) -> None:
        """From now on this process does nothing for any request. With several ranks, cake takes
        part in the reductions until all ranks know (`let_go`)."""
        saving, runahead = self.saving, self.runahead
        self.saving = None
        self.runahead = None
        try:
            if runahead is not None:
                runahead.close()  # or other members would ask this one in vain
        except Exception:
            logger.exception("cake: the group could not be left")
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
                logger.exception("cake: request %r could not be given up", rid)
        if coordinator.switch_off():
            self.let_go()

    def let_go(self) -> None:
        """Drop cake, if all ranks know that it is off and no overlapped step is under way."""
        busy = self.overlap_runner is not None and self.overlap_runner.due
        if self.coordinator is not None and self.coordinator.off_everywhere and not busy:
            self._wait_for_copies()
            self.coordinator = None
            self.service = None
            self.overlap_runner = None

    # ---- what cake calls ----

    def free_tokens(self) -> int:
        """Slots that are free for full attention."""
        allocator = self.token_to_kv_pool_allocator
        free = allocator.full_available_size if self.supports_swa() else allocator.available_size
        return int(free())

    def evict_own(self, tokens: int, *, window_tokens: int = 0, states: int = 0) -> None:
        """Evict from the tree alone, never landed blocks. Not guarded: the boundary would end
        requests, and the caller is allocating slots for one. Its errors go to the caller."""
        self._order_after_saves()
        super().evict_for_alloc(
            EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens, mamba_num=states)
        )

    def matched_tokens(self, req: "Req", tokens: Any, limit: int) -> int:
        """How many leading tokens the tree holds, up to `limit`."""
        return int(self._match(req, tokens, limit).device_prefix_len)

    def _match(self, req: "Req", tokens: Any, limit: int) -> Any:
        limit += self.next_tokens
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        return self.match_prefix(MatchPrefixParams(key=key))

    def end_slots(self, req: "Req", stop: int) -> EndSlots | None:
        """Where the tree has the end state of the request's first `stop` tokens; None: it has not.

        The tree is asked for a match of these tokens, as for any request. So an end is stored only
        if SGLang itself would go on from it.
        """
        assert self.ends is not None
        match = self._match(req, req.full_untruncated_fill_ids, stop)
        if match.device_prefix_len != stop:
            return None
        window = state = None
        if self.supports_swa():
            slots = self.path_device_indices(match.last_device_node)[-self.ends.window_tokens :]
            window = self.token_to_kv_pool_allocator.translate_loc_from_full_to_swa(slots)
        if self.supports_mamba():
            node = match.last_device_node
            state = self.tree_core.get_component_device_value(node, ComponentType.MAMBA)
            if state is None:
                return None
        return EndSlots(window, state)

    def allocate_end(self, req: "Req", span: Span) -> EndSlots | None:
        """Slots for the end state at the end of `span`, which joins the tree next. None: not enough
        memory. The caller gives them to `attach_*` or to `free_end`.

        The tree has the rows of the window that are left of the span.
        """
        assert self.ends is not None
        window = state = None
        new = 0
        if self.supports_swa():
            allocator = self.token_to_kv_pool_allocator
            rows = min(self.ends.window_tokens, span.stop)
            new = min(rows, span.tokens)
            if (short := new - allocator.swa_available_size()) > 0:
                self.evict_own(0, window_tokens=short)
            windows = allocator.swa_attn_allocator
            slots = (windows.alloc if self.copier is None else windows.alloc_physical)(new)
            if slots is None:
                return None
            window = torch.cat([slots.new_zeros(rows - new), slots]).to(torch.int64)
        if self.supports_mamba():
            state = self._allocate_state()
            if state is None:
                self.free_end(req, EndSlots(window, new_rows=new))
                return None
        return EndSlots(window, state, new)

    def drop_state(self, req: "Req") -> None:
        """Take back the recurrent state that a match gave to a request that is not admitted now.

        The match has set two fields, a slot and the slot to copy from, and both are cleared.
        Nothing locks the source before the request is admitted, and a later match that finds
        nothing leaves both fields as they are. SGLang does the same with a request that it refuses,
        unless it is in a session: streaming sessions, which cake does not support, own their slots.
        In any other session, the slot is the request's own.
        """
        if not self.supports_mamba():
            return
        kv = req.kv
        kv.mamba_cow_src_index = None
        kv.mamba_needs_clear = False
        if kv.holds_mamba:
            self.req_to_token_pool.mamba_allocator.free(kv.mamba_pool_idx.reshape(1))
            kv.mamba_pool_idx = None

    def free_end(self, req: "Req", end: EndSlots) -> None:
        """Free slots that `allocate_end` gave, and that nothing writes to."""
        if end.window is not None:
            window = end.window[len(end.window) - end.new_rows :]
            windows = self.token_to_kv_pool_allocator.swa_attn_allocator
            if self.copier is None:  # not `free`, as in `DeviceSlots.free`
                windows.free_segment(window, start_pos=0)
            else:
                windows.cancel_physical_reservation(window)
        if end.state is not None:
            self.req_to_token_pool.mamba_allocator.free(end.state)

    def attach_running(
        self,
        req: "Req",
        slots: torch.Tensor,
        stop: int,
        end: EndSlots | None = None,
        taken: Callable[[], object] = lambda: None,
    ) -> None:
        """Give slots to the row of a request between two chunks, and with the row to the tree, and
        move `req.prefix_len` to `stop`.

        Args:
            slots: hold the KV of `[req.prefix_len, stop)`.
            end: slots that hold the end state at `stop`.
            taken: called when `slots` and `end` are about to be the request's or the tree's. After
                an error before that, the caller frees them.
        """
        self.give_running(req, slots, req.prefix_len)
        taken()
        if end is not None and end.window is not None:
            self._adopt_window(req, slots, stop, end.window)
        if end is not None and end.state is not None:
            self._adopt_state(req, stop, end.state)
        if self.joined is not None:
            self.joined.add(req)
        req.kv.kv_allocated_len = stop
        req.kv.kv_committed_len = stop
        req.extend_end = stop
        self.checkpoint(req, up_to=stop)
        req.prefix_len = stop
        if end is not None and end.state is not None and self.enable_mamba_extra_buffer:
            # SGLang copies it into the request's own state before the next chunk. Until then it is
            # locked, which a checkpoint omits with SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.
            lock = self.lock(req.last_node)
            self.unlock(req.lock)
            req.lock = lock
            req.kv.mamba_cow_src_index = self.tree_core.get_component_device_value(
                req.last_node, ComponentType.MAMBA
            )

    def give_running(self, req: "Req", slots: torch.Tensor, start: int) -> None:
        """Give `slots` to the row of a request between two chunks, from token `start` on. The
        request owns them; they join the tree with the tokens that it computes next."""
        row = (req.kv.req_pool_idx, slice(start, start + len(slots)))
        self.req_to_token_pool.write(row, slots.to(torch.int32))

    def attach_waiting(
        self,
        req: "Req",
        slots: torch.Tensor,
        stop: int,
        end: EndSlots | None = None,
        taken: Callable[[], object] = lambda: None,
    ) -> None:
        """Give slots to the tree, below the prefix that a waiting request has matched, and have the
        request match again.

        Args: as for `attach_running`.
        """
        prefix = self.prefix_device_indices(req)
        params = InsertParams(
            key=RadixKey(
                req.full_untruncated_fill_ids[: stop + self.next_tokens],
                req.extra_key,
                cache_salt=req.cache_salt,
            ),
            value=torch.cat([prefix.to(torch.int64), slots]),
            prev_prefix_len=req.prefix_len,
            inserted_len=req.prefix_len,
            priority=req.priority or 0,
        )
        taken()
        if end is not None and end.window is not None:
            self._map_window(slots, end.window)
            params.set_evicted_seqlen(ComponentType.SWA, stop - len(end.window))
        if end is not None:
            params.mamba_value = end.state
        result = self.insert(params)
        if end is not None and end.state is not None and result.mamba_exist:
            self.req_to_token_pool.mamba_allocator.free(end.state)
        req.init_next_round_input(self)

    @property
    def next_tokens(self) -> int:
        """With EAGLE and its like, the tree's key of a token is the token and the next one. So this
        many tokens after those whose KV is meant belong to a key."""
        return int(self.tree_core.is_eagle)

    # ---- windows of requests: DeepSeek V4.1 with `--enable-encoder-swa-bounded-replay` ----

    def replayed_tokens(self, req: "Req") -> int:
        """How many tokens before its next step's own a request computes again, since blocks joined
        it between two chunks: its window has the tokens before these blocks."""
        if self.joined is None or req not in self.joined:
            return 0
        from sglang.srt.model_executor.encoder_swa_replay import replay_len  # not in 0.5.22

        return int(replay_len(req.prefix_len))

    def restart_windows(self, batch: Any) -> None:
        """Have SGLang compute the windows of the requests of a batch again that blocks have joined,
        as of a new request behind a prefix of the tree."""
        if self.joined is not None:
            batch.encoder_swa_reset = [
                resets or req in self.joined
                for req, resets in zip(batch.reqs, batch.encoder_swa_reset, strict=True)
            ]
            self.joined.difference_update(batch.reqs)

    # ---- end states ----

    def step_stop(self, req: "Req") -> int | None:
        """Where the next step of a request must stop, if it gets there, so that the tree gets an
        end state that is to be saved; None: anywhere. A draft model's rows in a window need the
        next tokens, so the step has these too."""
        if self.ends is None or self.coordinator is None or self.saving is None:
            return None
        record = self.coordinator.record(req)
        if record is None:
            return None
        branch = self.saving.branch(record)
        if self.enable_mamba_extra_buffer:
            branch = self._kept_end(req.prefix_len, branch)
        stops = [branch]
        if self.supports_mamba() and not self.enable_mamba_extra_buffer:
            last = len(req.full_untruncated_fill_ids) - 1
            stops.append(last - last % self.coordinator.block_tokens)
        tokens_after = 0 if self.supports_mamba() else self.coordinator.keys.next_tokens
        tokens_after += -tokens_after % int(self.page_size)
        for stop in stops:
            if stop + tokens_after > req.prefix_len and self.saving.wants_end(record, stop):
                return stop + tokens_after
        return None

    def cut_stop(self, req: "Req", cut: int) -> int:
        """Where a step that would be cut at token `cut` of a prompt ends.

        The next step should start at a multiple of the state chunk, to keep states at block
        boundaries. So the cut is moved down to one, if the step gives up at most CUT_SHARE of its
        tokens, or if the next step is the prompt's last one, and if it has tokens left.
        """
        if self.ends is None or self.coordinator is None:
            return cut
        grid = math.gcd(self.ends.state_chunk_tokens, self.coordinator.block_tokens)
        stop, tokens = cut - cut % grid, cut - req.prefix_len
        left = len(req.full_untruncated_fill_ids) - stop
        if cut - stop >= min(tokens, left):  # nothing is left of the step, or of the prompt
            return cut
        return stop if left <= tokens or cut - stop <= CUT_SHARE * tokens else cut

    def track_end(self, req: "Req") -> None:
        """With SGLang's extra buffers, have the forward of the scheduled step keep the state at the
        last block boundary that it can before its end, or before the point where SGLang found the
        prompt to diverge from others. SGLang sets that point once, and it stays for later steps."""
        if self.ends is None or self.coordinator is None or not self.enable_mamba_extra_buffer:
            return
        keyed = len(req.full_untruncated_fill_ids) - self.coordinator.keys.next_tokens
        last = min(req.extend_end, keyed)
        branch = req.mamba_branching_seqlen or 0
        if branch > req.extend_end:
            return
        stop = min(last, branch if branch > req.prefix_len else last)
        if end := self._kept_end(req.prefix_len, stop):
            req.mamba_branching_seqlen = end

    def _kept_end(self, start: int, stop: int) -> int:
        """The last block boundary up to `stop` whose state SGLang's extra buffers keep in a step
        that begins at `start`; 0: there is none."""
        assert self.ends is not None
        assert self.coordinator is not None
        size = self.coordinator.block_tokens
        ends = range(stop - stop % size, start, -size)
        chunk = self.ends.state_chunk_tokens
        return next((end for end in ends if (end - start) % chunk == 0), 0)

    def _last_window_start(self, up_to: int) -> int | None:
        """Where the window begins that belongs to the last block before `up_to`."""
        if self.ends is None or not self.ends.window_tokens or self.coordinator is None:
            return None
        up_to -= self.coordinator.keys.next_tokens + self.ends.tail_tokens
        return up_to - up_to % self.coordinator.block_tokens - self.ends.window_tokens

    def _answer_window_start(self, req: "Req") -> int | None:
        """Where the window begins that belongs to the last block of an answer, if it ended now. A
        request that decodes keeps its window from there on, if its answer may be stored, unless the
        pool gets scarce: then SGLang would retract requests for it, or admit no prompt."""
        # The last token has no KV yet.
        start = self._last_window_start(req.seqlen - 1) if req.decode_batch_idx else None
        coordinator = self.coordinator
        if start is None or coordinator is None or coordinator.store_detached:
            return None
        # Of several ranks, one may have lost a record. Their pools must stay alike.
        if coordinator.alone and coordinator.record(req) is None:
            return None
        assert self.ends is not None
        allocator, rows = self.token_to_kv_pool_allocator, self.req_to_token_pool
        free = allocator.swa_available_size() + self.swa_evictable_size()
        # For a prompt: a chunk, or a window if that is larger, the window that its match locks, and
        # a page. For each live request, the pages for its next tokens and drafts, since those that
        # decode take some before the prompt is admitted.
        live, page_tokens = rows.size - rows.available_size(), int(self.page_size)
        pages = 1 + live * -(-self.decode_tokens // page_tokens)
        window_tokens = self.ends.window_tokens
        needed = max(coordinator.step_costs.chunk_tokens, window_tokens) + window_tokens
        needed += pages * page_tokens
        return None if free < max(needed, allocator.size_swa * SCARCE_WINDOWS) else start

    def _map_window(self, slots: torch.Tensor, window: torch.Tensor) -> None:
        """The last of `slots` have these rows of the window; rows in slot 0 were there before."""
        new = min(len(window), len(slots))
        allocator = self.token_to_kv_pool_allocator
        allocator.set_full_to_swa_mapping(slots[-new:], window[-new:])
        if self.copier is not None:  # they may move from now on, after the copies into them
            key = ("cake", "load")
            allocator.swa_attn_allocator.set_hicache_transfer_done_event(key, self.copier)

    def _adopt_window(
        self, req: "Req", slots: torch.Tensor, stop: int, window: torch.Tensor
    ) -> None:
        """The window of a request between two chunks ends at `stop` now."""
        start = stop - len(window)
        assert self.ends is not None
        self.evict_sliding_windows(req, min(req.prefix_len, start) + self.ends.window_tokens)
        evicted = max(req.kv.get_evicted_seqlen(ComponentType.SWA), start)
        req.kv.set_evicted_seqlen(ComponentType.SWA, evicted)
        req.swa_branching_seqlen = None  # it is passed: the tree must get all up to `stop`
        self._map_window(slots, window)

    def _allocate_state(self) -> torch.Tensor | None:
        """A slot for a loaded state, int64 `[1]`; None: not enough memory. It is no request's: a
        state that is loaded in part is dropped, and its request computed from its own."""
        pool = self.req_to_token_pool
        state: torch.Tensor | None = pool.mamba_allocator.alloc(1)
        if state is None:
            self.evict_own(0, states=1)
            state = pool.mamba_allocator.alloc(1)
        if state is not None and pool.mamba_pool.replayssm_write_pos is not None:
            # ReplaySSM: the slot's ring has no tokens that the state lacks.
            pool.mamba_pool.replayssm_write_pos[pool.translate_mamba_indices(state)] = 0
        return state

    def _adopt_state(self, req: "Req", stop: int, state: torch.Tensor) -> None:
        """The checkpoint that follows gives the tree this state of a request between two chunks."""
        kv = req.kv
        kv.mamba_cow_src_index = None
        kv.mamba_needs_clear = False
        pool = self.req_to_token_pool
        if not self.enable_mamba_extra_buffer:
            # The checkpoint copies the request's own state. SGLang gives the row the new slot
            # before the next chunk.
            pool.mamba_allocator.free(kv.mamba_pool_idx.reshape(1))
            kv.mamba_pool_idx = state[0]
            return
        place = pool.get_mamba_ping_pong_keep_idx(req)
        if has_tracked_state(kv, place):
            pool.mamba_allocator.free(kv.mamba_ping_pong_track_buffer[place : place + 1].clone())
        pool.set_mamba_ping_pong_slot(req, place, state[0])
        kv.mamba_last_track_seqlen = stop

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
        text = f"the step of {req.rid!r} ran past cake, without all of its KV"
        error = OverlapError(text, "lost")
        BOUNDARY.failed("CakeRadixCache.checkpoint", error, unsafe=True)

    def _overlapped_step(self, req: "Req") -> "OverlappedStep | None":
        return None if self.overlap_runner is None else self.overlap_runner.step_of(req)

    @guarded("CakeRadixCache.checkpoint")
    def _save(self, req: "Req", up_to: int) -> None:
        if self.coordinator is None or self.saving is None:
            return
        if self.runahead is not None and self.runahead.measures(req):
            return  # a search's prompts would take the place of others, and never be read
        record = self.coordinator.record(req)
        if record is not None and req.kv.holds_kv:
            with self.coordinator.timed():
                held = req.kv.cache_protected_len
                self.saving.checkpointed(
                    record,
                    req.full_untruncated_fill_ids[:up_to],
                    self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :held],
                    last=req.finished(),
                    find_end=None if self.ends is None else partial(self.end_slots, req),
                )

    @guarded("CakeRadixCache.evict")
    def _before_slots_are_freed(self, *, evicts: bool = True) -> None:
        self._order_after_saves(evicts=evicts)

    def _order_after_saves(self, *, evicts: bool = True) -> None:
        """Args: evicts: the tree may be about to evict what a waiting request matched."""
        coordinator = self.coordinator
        if coordinator is not None and evicts:
            coordinator.tree_evicts = True
        if self.saving is not None:
            self.saving.before_slots_are_freed(
                lambda record: coordinator is not None and coordinator.record(record.req) is record
            )

    @guarded("CakeRadixCache.on_release")
    def _released(self, req: "Req") -> None:
        record = None if self.coordinator is None else self.coordinator.record(req)
        if self.coordinator is not None and record is not None:
            requeued = req.rid == self.releasing
            if self.saving is not None:
                self.saving.released(record, requeued=requeued)
            if not requeued:
                self.coordinator.release(req.rid)
        if self.runahead is not None:
            self.runahead.release(req.rid)

    @guarded("CakeRadixCache.release_aborted_request")
    def _aborted(self, request: Any) -> None:
        self._give_up(request.rid)

    @guarded("CakeRadixCache.reset")
    def _emptied(self) -> None:
        try:
            self._before_slots_are_freed()
            if self.coordinator is not None:
                self.coordinator.emptied()
        finally:
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """No copy is under way any more. In another role of the server, SGLang's transfers read and
        write slots from now on, in no stream; without a coordinator, they read them at once."""
        if self.service is not None:
            self.service.kv.wait_for_copies()

    def _states_in_tree(self) -> int:
        """How many recurrent states the tree has; 0 for models without."""
        return int(self.mamba_evictable_size() + self.mamba_protected_size())

    def _free_states(self) -> int:
        """How many states there is memory for, where states and KV share it; else 0."""
        if self.copier is None or not self.supports_mamba():
            return 0
        return int(self.req_to_token_pool.mamba_allocator.schedulable_available_size())

    def _tokens_of(self, states: int) -> int:
        """The tokens whose memory is missing for so many free states."""
        missing = states - self._free_states()
        if missing <= 0 or self.copier is None or not self.supports_mamba():
            return 0
        allocator = self.token_to_kv_pool_allocator
        missing_bytes = missing * int(allocator.mamba_allocator.entry_bytes_per_page)
        return -(-missing_bytes // int(allocator.full_attn_allocator.entry_bytes))

    def _reclaimable_tokens(self) -> int:
        return 0 if self.coordinator is None else self.coordinator.reclaimable_tokens

    @guarded("CakeRadixCache.evict", 0)
    def _reclaim(self, missing: int) -> int:
        """Free slots of landed blocks. Returns the tokens freed."""
        if missing <= 0 or self.coordinator is None or not self.coordinator.reclaimable_tokens:
            return 0
        return self.coordinator.reclaim(missing)
