"""SGLang's own scheduler on a virtual GPU: its queue, policy, priorities, preemption, admission,
chunks, retraction and aborts, with its tree, pools and batches, in virtual time.

Cake's hooks, tree, coordinator, loader, copies and writer are those of a server. `DeviceMemory` has
for each slot which KV it holds, so a row of another token is found whenever a forward reads it.
"""

import contextlib
import heapq
import itertools
import math
import pkgutil
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from kv_pools import allocator_of, mha
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from benchmarks.harness.virtual_tiers import virtual_tiers
from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import Buffer, TellBytes
from sglang_cake.core.errors import BlockMissing
from sglang_cake.core.keys import BlockKey
from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.scheduler import scheduler_hooks
from sglang_cake.integration.scheduler.waker import sleep_s
from sglang_cake.loading.cost_model import StepWork, work_of
from sglang_cake.loading.planner import Mode
from sglang_cake.simulator.hardware import PLAN_S
from sglang_cake.testing.scheduler_loop import POLL_S
from sglang_cake.testing.virtual_gpu import (
    BLOCK_TOKENS,
    GpuModel,
    VirtualCopy,
    VirtualKV,
    VirtualScheduler,
    VirtualStore,
    VirtualTimer,
)
from sglang_cake.testing.virtual_time import virtual_time

TOKEN, STOP = 1, 2  # of each answer, and its last one
LONGEST = 70_000
NOTHING = np.uint64(0)
Numbers = Any  # array of uint64: what a KV row holds


@dataclass(frozen=True)
class Prompt:
    """A request.

    Attributes:
        stored: numbers of blocks that the store has at the start.
        fast: numbers of blocks that the fast tier has then.
        unreadable: of these, blocks that no read gets.
        out: tokens of the answer.
        most_out: tokens that SGLang counts with.
        abort_s: after its arrival; None: it is not aborted.
    """

    at_s: float
    tokens: "array[int]"
    stored: Sequence[int] = ()
    fast: Sequence[int] = ()
    unreadable: Sequence[int] = ()
    out: int = 1
    most_out: int = 0
    priority: int | None = None
    abort_s: float | None = None


def kv_rows(tokens: Sequence[int]) -> Numbers:
    """A number for the KV of each token, which depends on all tokens before it."""
    mixed = np.asarray(tokens, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ np.arange(len(mixed), dtype=np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    return np.cumsum(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


# ---- what memory holds ----


class DeviceMemory:
    """The rows of the KV pool, and what the device does with them, in the order of its time.

    Attributes: wrong: forwards that read other rows than those of their tokens.
    """

    def __init__(self, slots: int) -> None:
        self.rows = np.zeros(slots + 1024, np.uint64)
        self.wrong: list[str] = []
        self._due: list[tuple[float, int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def write(self, begin_s: float, end_s: float, slots: Any, rows: Numbers) -> None:
        self._at(begin_s, 1, lambda: self.rows.__setitem__(slots, NOTHING))
        self._at(end_s, 0, lambda: self.rows.__setitem__(slots, rows))

    def expect(self, end_s: float, slots: Any, rows: Numbers, what: str) -> None:
        """A forward that ends then has read these rows."""

        def check() -> None:
            if not np.array_equal(self.rows[slots], rows):
                self.wrong.append(what)

        self._at(end_s, -1, check)

    def read(self, end_s: float, slots: Any, take: Callable[[Numbers], object]) -> None:
        self._at(end_s, -1, lambda: take(self.rows[slots]))

    def until(self, now_s: float) -> None:
        """Let everything happen that is over by then."""
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[-1]()

    def _at(self, when_s: float, turn: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when_s, turn, next(self._numbers), action))


class HostBlocks:
    """What buffers and stored blocks hold, by the eight bytes that stand for each of them."""

    def __init__(self) -> None:
        self._held: list[Numbers] = [np.zeros(BLOCK_TOKENS, np.uint64)]

    def put(self, rows: Numbers) -> bytes:
        self._held.append(rows)
        return (len(self._held) - 1).to_bytes(8, "little")

    def get(self, data: Any) -> Numbers:
        return self._held[int.from_bytes(data, "little")]


class KV(VirtualKV):
    """Copies rows."""

    memory: DeviceMemory
    blocks: HostBlocks

    def load(self, block: Any, slots: torch.Tensor, after: tuple[float, ...]) -> VirtualCopy:
        copy = super().load(block, slots, after)
        rows = self.blocks.get(block.view)
        self.memory.write(copy.end_s - copy.took_s, copy.end_s, slots.numpy(), rows)
        return copy

    def save(
        self, slots: torch.Tensor, blocks: Sequence[Any], after: tuple[float, ...]
    ) -> VirtualCopy:
        copy = super().save(slots, blocks, after)

        def take(buffer: Buffer, rows: Numbers) -> None:
            buffer.view[:] = self.blocks.put(rows)

        for block, part in zip(blocks, slots.split(BLOCK_TOKENS), strict=True):
            self.memory.read(copy.pool_s, part.numpy().copy(), lambda rows, b=block: take(b, rows))
        return copy


class Blocks(VirtualStore):
    """Stores what buffers hold.

    Attributes:
        data: what stands for each stored block.
        unreadable: blocks that no read gets.
    """

    memory: DeviceMemory

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data: dict[BlockKey, bytes] = {}
        self.unreadable: set[BlockKey] = set()

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        if key in self.unreadable:
            raise BlockMissing(key.hex())
        size = await super().get_into(key, out, progress)
        out[:] = self.data[key]
        return size

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        self.memory.until(self._io.now_s)
        new = await super().put(key, data)
        if new:
            self.data[key] = bytes(data)
        return new


# ---- SGLang's scheduler ----


@contextlib.contextmanager
def installed_hooks() -> Iterator[None]:
    """A context in which SGLang has the hooks of `scheduler_hooks`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HookRegistry, "_hooks", defaultdict(list))
        patch.setattr(HookRegistry, "_patched", set())
        patch.setattr(hook_registry, "_propagate_patch", lambda *args: 0)
        scheduler_hooks.install()
        for target in HookRegistry._hooks:
            patch.setattr(target, pkgutil.resolve_name(target))  # it is put back at the end
        HookRegistry.apply_hooks()
        assert HookRegistry._patched == HookRegistry._hooks.keys()
        yield


# Parts of SGLang that are off.
OFF = (
    "abort_on_priority_when_disabled",
    "chunked_req",
    "decode_offload_manager",
    "disagg_prefill_bootstrap_queue",
    "dllm_config",
    "dynamic_chunk_sizer",
    "enable_continuous_input_polling",
    "enable_hicache_storage",
    "enable_hierarchical_cache",
    "enable_hisparse",
    "enable_lmcache",
    "enable_lora",
    "enable_metrics",
    "enable_unified_cache_external_linker",
    "hisparse_coordinator",
    "is_hybrid_ssm",
    "is_hybrid_swa",
    "last_batch",
    "lora_drainer",
    "max_queued_requests",
    "min_free_slots_delayer",
    "mm_receiver",
    "_pending_chunked_abort_req",
    "prefill_delayer",
    "require_mlp_sync",
    "scheduler_stage_metrics",
    "truncation_align_size",
)


class VirtualSGLang(Scheduler):
    """Serves requests as `event_loop_overlap` does.

    Args:
        loop: of its own loop, nothing is used; it has the device, the store and the clock.
        fast: a tier before the store of `loop`; without one, it has no blocks.

    Attributes:
        first_token_s, end_s: by id, of each request, from its arrival.
        retracted, preempted: how often requests went back to the queue.
    """

    def __init__(
        self,
        loop: VirtualScheduler,
        tree: CakeRadixCache,
        args: ServerArgs,
        fast: Blocks,
        policy: str,
    ) -> None:
        for name in OFF:
            setattr(self, name, None)
        self.retracted = self.preempted = 0
        self.first_token_s: dict[str, float] = {}
        self.end_s: dict[str, float] = {}
        self._arrived_s: dict[str, float] = {}
        self._rows: dict[str, Numbers] = {}
        self._prompts: dict[str, Prompt] = {}
        self._unseen: set[str] = set()
        self.loop = loop
        self.fast = fast
        self.tree_cache: Any = tree
        self.req_to_token_pool = tree.req_to_token_pool
        self.token_to_kv_pool_allocator = loop.allocator
        self.page_size = tree.page_size
        self.chunked_prefill_size = args.chunked_prefill_size
        self.is_mixed_chunk = args.enable_mixed_chunk
        self.max_running_requests = self.req_to_token_pool.size
        self.max_prefill_tokens = 16_384
        self.max_prefill_bs = 0
        priorities = args.enable_priority_scheduling
        self.policy = SchedulePolicy(policy, tree, False, priorities, False)
        self.enable_priority_scheduling = priorities
        loop.coordinator.priority_sign = -1 if priorities else 0
        loop.coordinator.by_prefix = policy in ("lpm", "dfs-weight")
        self.enable_priority_preemption = priorities
        self.priority_scheduling_preemption_threshold = 10
        # It expects short answers, and long ones for ten steps after a retraction.
        self.new_token_ratio_tracker = NewTokenRatioTracker(
            init=1.0, min=0.0, decay=0.1, current=0.0
        )
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.result_queue: deque[Any] = deque()
        self.enable_overlap = self.enable_skip_finishing_decode = True
        self.prefill_decode_interval = self._prefill_decode_interval_remaining = 0
        self.prefill_decode_interval_min_bs = 0
        self.processed_tokens_counter = self.forward_ct = 0
        self.device = "cpu"
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.disaggregation_mode = DisaggregationMode.NULL
        self.model_config: Any = SimpleNamespace(
            is_encoder_decoder=False, vocab_size=LONGEST, hidden_size=8, is_multimodal=False
        )
        self.tp_worker = SimpleNamespace(
            model_runner=SimpleNamespace(attn_backend=None, prefill_aware_swa=False)
        )
        self.dp_attn_adapter: Any = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        self.ngram_embedding_manager: Any = SimpleNamespace(
            prepare_for_forward=lambda batch, chunked_req=None: batch
        )
        self.grammar_manager: Any = SimpleNamespace(
            has_waiting_grammars=lambda: False, abort_requests=lambda request: None
        )
        self.beam_coordinator: Any = SimpleNamespace(
            pending_member_rows=lambda batch: 0, retire_group=lambda req: None
        )
        self.load_inquirer: Any = SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct: 0)
        self.metrics_reporter: Any = SimpleNamespace(num_retracted_reqs=0, enable_metrics=False)

    # ---- what a server does elsewhere ----

    def _set_or_validate_priority(self, req: Req) -> bool:
        return True

    def _abort_on_queued_limit(self, recv_req: Req) -> bool:
        return False

    def _prefetch_kvcache(self, req: Req, *args: Any) -> None: ...

    def send_abort_output(self, request: AbortReq, req: Req) -> None:
        req.finished_reason = req.finished_reason or FINISH_ABORT()

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if req.rid in self._arrived_s:
            self.retracted += is_retracted
            self.preempted += not is_retracted
        self._arrived_s.setdefault(req.rid, self.loop.io.now_s)
        super()._add_request_to_queue(req, is_retracted)

    # ---- requests ----

    def serve(self, prompts: Sequence[Prompt], *, most_steps: int = 20_000) -> list[Req]:
        """Serve requests to their ends. Their ids are their numbers."""
        io = self.loop.io
        reqs = [self._request(str(number), prompt) for number, prompt in enumerate(prompts)]
        events: list[tuple[float, int, Callable[[], object]]] = []
        for number, (prompt, req) in enumerate(zip(prompts, reqs, strict=True)):
            at_s = io.now_s + prompt.at_s
            heapq.heappush(events, (at_s, number, partial(self._add_request_to_queue, req)))
            if prompt.abort_s is not None:
                abort = partial(self.abort_request, AbortReq(rid=req.rid))
                heapq.heappush(events, (at_s + prompt.abort_s, len(prompts) + number, abort))
        for _ in range(most_steps):
            while events and events[0][0] <= io.now_s:
                heapq.heappop(events)[-1]()
            if not self._step(events[0][0] if events else math.inf):
                if all(req.finished() for req in reqs):
                    return reqs
                if not (self.waiting_queue or self.chunked_req or self.running_batch.reqs):
                    io.until(events[0][0])
        raise AssertionError(f"{[req.rid for req in reqs if not req.finished()]} do not end")

    def _request(self, rid: str, prompt: Prompt) -> Req:
        params = SamplingParams(
            max_new_tokens=prompt.most_out or prompt.out,
            stop_token_ids=[STOP],
            ignore_eos=not prompt.most_out,
        )
        params.normalize(None)
        req = Req(rid, "", prompt.tokens, params, priority=prompt.priority, vocab_size=LONGEST)
        store, kv = self.loop.store, self.loop.kv
        self._prompts[rid] = prompt
        self._rows[rid] = kv_rows([*prompt.tokens, *[TOKEN] * prompt.out])
        keys = self.loop.keys(prompt.tokens)
        for place, blocks in ((store, prompt.stored), (self.fast, prompt.fast)):
            for block in blocks:
                rows = self._rows[rid][block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
                place.keys.add(keys[block])
                place.data[keys[block]] = kv.blocks.put(rows)
            place.unreadable |= {keys[block] for block in prompt.unreadable}
        return req

    # ---- one iteration of the loop ----

    def _step(self, until_s: float) -> bool:
        """False: there was nothing to compute, and no result."""
        io = self.loop.io
        awake_since_s = io.now_s
        plan = self.get_next_batch_to_run(self.running_batch, self.last_batch)
        self.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            self.result_queue.append((batch.copy(), self._launch(batch)))
        if self.last_batch:
            self._process(*self.result_queue.popleft())
        elif batch is None:
            coordinator = self.loop.coordinator
            pause_s = POLL_S
            if coordinator.waiting:
                awake_s = io.now_s - awake_since_s
                pause_s = max(POLL_S, sleep_s(awake_s, coordinator.loads_over_in_s))
            self.loop.pause(min(io.now_s + pause_s, max(until_s, io.now_s + POLL_S)))
        idle = not self.last_batch and batch is None
        self.last_batch = batch
        return not idle

    def _launch(self, batch: ScheduleBatch) -> VirtualTimer:
        loop, memory = self.loop, self.loop.kv.memory
        extends = batch.forward_mode.is_extend()
        decoding = {req.rid for req in (batch.decoding_reqs or ())} if extends else None
        work, parts = StepWork(), []
        for index, (req, stop) in enumerate(zip(batch.reqs, batch.seq_lens_cpu, strict=True)):
            stop = int(stop)
            decodes = decoding is None or req.rid in decoding
            start = stop - 1 if decodes else stop - batch.extend_lens[index]
            work += StepWork(decodes=1) if decodes else work_of(start, stop)
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :stop].numpy().copy()
            parts.append((req.rid, start, stop, row))
        self.forward_ct += 1
        loop.io.until(loop.io.now_s + PLAN_S)
        memory.until(loop.io.now_s)
        end_s = loop.gpu.forward(loop.model.prefill.work_s(work))
        timer = VirtualTimer(loop.io, *loop.gpu.forwards[-1])
        loop.gpu.schedule.wait(end_s)
        loop.step_costs.step_launched(timer)
        for rid, start, stop, row in parts:
            rows = self._rows[rid][:stop]
            what = f"request {rid} from {start} to {stop}"
            memory.expect(end_s, row[:start], rows[:start], what)
            # After the last token of an answer, the loop computes one more.
            memory.write(timer.begin_s, end_s, row[start : len(rows)], rows[start:])
        return timer

    def _process(self, batch: ScheduleBatch, timer: VirtualTimer) -> None:
        """As `BatchResultProcessor`."""
        io = self.loop.io
        io.until(max(timer.end_s, io.now_s))
        extends = batch.forward_mode.is_extend()
        self.token_to_kv_pool_allocator.free_group_begin()
        for req in batch.reqs:
            middle = extends and req.inflight_middle_chunks > 0
            if req.is_retracted or (req.finished() and not middle):
                continue
            if middle:
                req.inflight_middle_chunks -= 1
                continue
            answered = len(req.output_ids) + 1
            req.output_ids.append(STOP if answered >= self._prompts[req.rid].out else TOKEN)
            took_s = io.now_s - self._arrived_s[req.rid]
            self.first_token_s.setdefault(req.rid, took_s)
            req.update_finish_state()
            if req.finished():
                self.end_s[req.rid] = took_s
                release_kv_cache(req, self.tree_cache, checkpoint=True)
            elif extends and req not in (batch.decoding_reqs or ()):
                checkpoint_kv_cache(req, self.tree_cache)
        self.token_to_kv_pool_allocator.free_group_end()

    # ---- what is left ----

    def check_ends(self) -> None:
        """After all requests have ended: nothing is held, no forward read a wrong row, no hook
        failed, and the store has what was computed."""
        loop, tree = self.loop, self.tree_cache
        loop.coordinator.poll([])
        loop.settle()
        loop.io.until(loop.io.now_s + 1e4)
        loop.kv.memory.until(math.inf)
        loop.saving.polled(lambda record: False)
        assert not BOUNDARY.counts, BOUNDARY.counts
        assert not loop.kv.memory.wrong, loop.kv.memory.wrong
        assert not loop.coordinator.live, loop.coordinator.live
        assert loop.coordinator.reclaimable_tokens == 0
        assert tree.protected_size() == 0
        assert loop.staging.free == loop.staging.capacity
        assert loop.write_queue.free == loop.write_queue.capacity
        assert self.req_to_token_pool.available_size() == self.req_to_token_pool.size
        tree.evict(EvictParams(num_tokens=loop.allocator.size))
        assert loop.allocator.available_size() == loop.allocator.size
        for rid, rows in self._rows.items():
            tokens = self._prompts[rid].tokens + array("q", [TOKEN] * self._prompts[rid].out)
            for block, key in enumerate(loop.keys(tokens)):
                for place in (loop.store, self.fast):
                    if key in place.keys:
                        kept = loop.kv.blocks.get(place.data[key])
                        part = rows[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
                        assert np.array_equal(kept, part), f"block {block} of request {rid}"


@contextlib.contextmanager
def virtual_sglang(
    model: GpuModel,
    *,
    link_bytes_per_s: float,
    mode: Mode = "auto",
    pool_tokens: int = 400_000,
    rows: int = 64,
    page: int = 1,
    priorities: bool = False,
    mixed: bool = False,
    retract_every: int = 0,
    fast_bytes_per_s: float | None = None,
    policy: str = "fcfs",
    knows_costs: bool = True,
    config: CakeConfig | None = None,
) -> Iterator[VirtualSGLang]:
    """A scheduler that lives in virtual time inside the context.

    Args:
        pool_tokens, rows: device memory, and requests that may have some at a time.
        priorities: with preemption.
        retract_every: after so many steps SGLang retracts a request, as if memory were short; 0:
            only if it is.
        fast_bytes_per_s: of a tier before the store; None: there is none.
        policy: SGLang's `--schedule-policy`.
        knows_costs: it has run for long.
    """
    args = ServerArgs(model_path="dummy", page_size=page)
    args.chunked_prefill_size = model.chunk_tokens
    args.enable_mixed_chunk = mixed
    args.enable_priority_scheduling = priorities
    args.pp_max_micro_batch_size = rows
    set_global_server_args_for_scheduler(args)
    allocator = allocator_of(mha(pool_tokens, page=page, heads=1, dim=1, layers=1), page)
    params = CacheInitParams(
        req_to_token_pool=ReqToTokenPool(rows, LONGEST, "cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=allocator,
        page_size=page,
        disable=False,
        tree_components=(ComponentType.FULL,),
    )
    tree = CakeRadixCache(params=params)
    with (
        installed_hooks(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.ExitStack() as tiers,
        virtual_time() as io,
    ):
        patch.setattr(scheduler, "TEST_RETRACT", retract_every > 0)
        patch.setattr(scheduler, "TEST_RETRACT_INTERVAL", retract_every)
        loop = VirtualScheduler(
            io,
            model,
            link_bytes_per_s=link_bytes_per_s,
            mode=mode,
            config=config,
            pool_tokens=pool_tokens,
            page_tokens=page,
            allocator=allocator,
            evict=tree.evict_own,
            kv=KV,
            store=Blocks,
        )
        loop.kv.memory = loop.store.memory = DeviceMemory(pool_tokens)
        loop.kv.blocks = HostBlocks()
        if knows_costs:
            loop.knows_costs()
        fast = Blocks(io, model.layout.block_bytes, fast_bytes_per_s or math.inf, 0.0)
        fast.memory = loop.kv.memory
        if fast_bytes_per_s:
            tiers.enter_context(virtual_tiers(loop, [fast, loop.store], [4]))
            if knows_costs:
                loop.step_costs.recall(loop.step_costs.own.prefill, [fast.cost, loop.store.cost])
        tree.coordinator = loop.coordinator
        tree.saving = loop.saving
        BOUNDARY.set_handler(tree, None)
        yield VirtualSGLang(loop, tree, args, fast, policy)
