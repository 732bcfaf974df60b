"""SGLang's scheduler loop over the real coordinator, without SGLang.

With overlap, iteration k polls, plans and launches step k, and then waits for step k - 1
(`Scheduler.event_loop_overlap` of SGLang 0.5.23). Otherwise it waits for step k.

Coordinator, loader, device slots, costs and writer are the server's own. A subclass has the device,
the store and the clock: a virtual GPU (`virtual_gpu.py`) or a real one (`benchmarks/gpu`).
"""

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import BufferPool
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import BlockKey, Digest, KeyChain, KeySeed
from sglang_cake.integration.memory.block_saving import BlockSaving, Writer
from sglang_cake.integration.memory.copier import Copier
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.request.request_keys import RequestKeys
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.scheduler.waker import sleep_s
from sglang_cake.integration.step_costs import StepCosts, StepTimer
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, StepWork, work_of
from sglang_cake.loading.loader import Loader
from sglang_cake.loading.priority import order
from sglang_cake.stores.base import USUAL_DEPTH

NAMESPACE = Digest(b"n" * 32)
POLL_S = 0.0005  # the least pause while only loads are awaited


@dataclass(eq=False)
class LoopRequest:
    """The part of SGLang's request that the coordinator uses."""

    rid: str
    origin_input_ids: "array[int]"
    prefix_len: int = 0
    output_ids: "array[int]" = field(default_factory=lambda: array("q"))
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    input_embeds: Any = None
    positional_embed_overrides: Any = None
    multimodal_inputs: Any = None
    session: Any = None
    priority: int | None = None
    sampling_params: Any = field(
        default_factory=lambda: SimpleNamespace(custom_params=None, max_new_tokens=1)
    )
    customized_info: dict[str, Any] | None = None
    retracted_stain: bool = False
    already_computed: int = 0
    cached_tokens: int = 0
    cached_tokens_storage: int = 0
    storage_hit_length: int = 0
    storage_hit_start: int | None = None
    _cache_breakdown_computed: bool = False
    row: list[torch.Tensor] = field(default_factory=list)

    def _compute_max_prefix_len(self, tokens: int) -> int:
        return max(0, tokens - 1)

    def finished(self) -> bool:
        return False


@dataclass(slots=True)
class PromptRun:
    """The results of one prompt."""

    req: LoopRequest
    arrive_s: float
    ttft_s: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    predictions: list[tuple[float, float]] = field(default_factory=list)  # (predicted, true)


class SchedulerLoop(ABC):
    """One rank. A subclass that has more ranks calls the coordinators of all of them alike.

    Args:
        io: the I/O thread, which also has the clock: `now_s`, and `until`, which waits.
        allocator, evict: of slots, as `DeviceSlots` has them.
        copier: makes the copier.
        staging, write_queue: host memory for blocks.
        prior: cost of steps before any was measured.
        overlap: SGLang's overlap scheduler; otherwise it waits for each step before the next.
        decodes: other requests, which decode one token in every step while there are prompts.
        consensus: of the ranks.

    Attributes:
        polls: iterations of the loop.
    """

    def __init__(
        self,
        io: Any,
        kv: Any,
        allocator: Any,
        store: Any,
        *,
        copier: Callable[[], Copier],
        staging: BufferPool,
        write_queue: BufferPool,
        prior: PrefillCost,
        chunk_tokens: int,
        config: CakeConfig,
        evict: Callable[[int], object] = lambda tokens: None,
        page_tokens: int = 1,
        overlap: bool = True,
        decodes: int = 0,
        consensus: RankConsensus | None = None,
    ) -> None:
        self.io = io
        self.kv = kv
        self.allocator = allocator
        self.store = store
        self.config = config
        self.overlap = overlap
        self.staging = staging
        self.write_queue = write_queue
        self.counters = Counters()
        depth = config.queue_depth or USUAL_DEPTH
        self.loader = Loader(
            store,
            staging,
            io,
            self.counters,
            depths=[depth],
            prior=LoadCost(0.0, kv.layout.block_bytes / 1e9),
            wake=self._wake,
        )
        self._woken = False
        self.writer = Writer(store, write_queue, io, self.counters)
        self.copier = copier()
        self.saving = BlockSaving(kv, self.copier, self.writer)
        self.step_costs = StepCosts(
            self.loader, prior, chunk_tokens=chunk_tokens, pipelined=overlap
        )
        slots = DeviceSlots(kv, self.copier, allocator, evict, self.counters)
        self.coordinator = Coordinator(
            self.loader,
            slots,
            config=config,
            page_tokens=page_tokens,
            step_costs=self.step_costs,
            keys=RequestKeys(kv.layout.block_tokens, lambda lora_id: None, self.counters),
            consensus=consensus or RankConsensus(None),
            counters=self.counters,
            reporter=RequestReporter(None, writes=False, metrics=None),
        )
        self.coordinator.rebase(NAMESPACE, suspended=False)
        self.polls = 0
        self._chunk_tokens = chunk_tokens
        self._decodes = decodes
        self._live: list[PromptRun] = []
        self._in_flight: deque[tuple[StepTimer, list[PromptRun]]] = deque()
        self._chunked: list[PromptRun] = []  # of the step launched last

    # ---- the device ----

    @abstractmethod
    def launch(self, work: StepWork, batch: Sequence["PromptRun"]) -> StepTimer:
        """Launch the forward of a step. Of each prompt, it computes the slots that were added to
        the row last."""

    @abstractmethod
    def wait(self, step: Any) -> None:
        """Wait for a step that was launched."""

    @abstractmethod
    def release(self, run: "PromptRun") -> None:
        """The prompt has ended: free its slots."""

    # ---- prompts ----

    def keys(self, tokens: "array[int]") -> list[BlockKey]:
        return KeyChain(KeySeed(NAMESPACE), self.kv.layout.block_tokens).of(tokens)

    def serve(self, prompts: Sequence[tuple[float, LoopRequest]]) -> list[PromptRun]:
        """Serve prompts, each with its arrival from now, to their first tokens."""
        begun_s = self.io.now_s
        coming = deque(PromptRun(req, begun_s + at_s) for at_s, req in prompts)
        runs = list(coming)
        while coming or self._live or self._in_flight:
            while coming and coming[0].arrive_s <= self.io.now_s:
                self._arrive(coming.popleft())
            awake_since_s = self.io.now_s
            if not self._iterate() and not self._in_flight:
                loads_over_in_s = self.coordinator.loads_over_in_s
                pause_s = max(POLL_S, sleep_s(self.io.now_s - awake_since_s, loads_over_in_s))
                if coming and not self._live:
                    pause_s = max(POLL_S, coming[0].arrive_s - self.io.now_s)
                self.pause(self.io.now_s + pause_s)
        return runs

    def _wake(self) -> None:
        self._woken = True

    def pause(self, until_s: float) -> None:
        """Wait, as a server's scheduler thread does while it only waits for loads."""
        self.io.until(min(until_s, self.io.now_s + POLL_S))
        while self.io.now_s < until_s and not self._woken:
            self.io.until(min(until_s, self.io.now_s + POLL_S))
        self._woken = False

    def settle(self) -> None:
        """Let all writes end."""
        self.io.run(self.writer.drained(), 1e9)

    # ---- one iteration of the loop ----

    def _arrive(self, run: PromptRun) -> None:
        self._live.append(run)
        req: Any = run.req
        self.coordinator.arrive(req, lambda tokens, limit: run.req.prefix_len)

    def _iterate(self) -> bool:
        """Plan and launch a step, and process the one before. False: no step was launched."""
        self.polls += 1
        with self.coordinator.timed():
            self.coordinator.poll([run.req.rid for run in self._live])
            self.saving.polled(lambda record: self.coordinator.record(record.req) is record)
        if len(self._live) > 1 and self.coordinator.adaptive:
            reqs: list[Any] = [run.req for run in self._live]
            entries = [self.coordinator.queue_entry(req) for req in reqs]
            self._live = [self._live[i] for i in order(entries)]
        for run in self._chunked:
            self._checkpoint(run, last=False)
        self._chunked = []
        work, batch = self._form()
        launched = work != StepWork()
        if launched:
            step = self.launch(work, batch)
            self.step_costs.step_launched(step)
            self._in_flight.append((step, [run for run in batch if _prefilled(run)]))
            self._live = [run for run in self._live if not _prefilled(run)]
            self._chunked = [run for run in batch if not _prefilled(run)]
        if self._in_flight and (len(self._in_flight) > 1 or not launched or not self.overlap):
            self._process()
        return launched

    def _form(self) -> tuple[StepWork, list[PromptRun]]:
        decodes = self._decodes if self._live else 0
        work = StepWork(decodes=decodes)
        batch = []
        self.step_costs.scheduling(decodes=decodes)
        for run in self._live:
            req: Any = run.req
            left = self._chunk_tokens - work.tokens - decodes
            if left <= 0 or self.coordinator.awaits_lookup(req):
                continue
            most = self.coordinator.passing_tokens(req, left)
            if most == 0:
                continue
            self.coordinator.attach_islands(req, self._attach)
            step = self.coordinator.plan(req, left)
            total = len(req.origin_input_ids)
            stop = req.prefix_len + left if step is None else step.stop
            stop = min(stop, total, total if most is None else req.prefix_len + most)
            if stop <= req.prefix_len:
                continue
            slots = self.allocator.alloc(stop - req.prefix_len)
            assert slots is not None, "the KV pool is too small"
            req.row.append(slots)
            part = work_of(req.prefix_len, stop)
            self.coordinator.claimed(req, stop)
            req.prefix_len = stop
            work += part
            batch.append(run)
        return work, batch

    def _process(self) -> None:
        step, ended = self._in_flight.popleft()
        self.wait(step)
        for run in ended:
            run.ttft_s = self.io.now_s - run.arrive_s
            self._checkpoint(run, last=True)
            run.report = (run.req.customized_info or {}).get("cake", [{}])[0]
            self.coordinator.release(run.req.rid)
            self.release(run)
            run.req.row.clear()

    def _checkpoint(self, run: PromptRun, *, last: bool) -> None:
        record = self.coordinator.record(run.req)
        if record is not None:
            tokens = run.req.origin_input_ids[: run.req.prefix_len]
            self.saving.checkpointed(record, tokens, torch.cat(run.req.row), last=last)

    def _attach(
        self, req: Any, slots: torch.Tensor, stop: int, end: object, taken: Callable[[], object]
    ) -> None:
        taken()
        req.row.append(slots)
        req.prefix_len = stop


def _prefilled(run: PromptRun) -> bool:
    return run.req.prefix_len == len(run.req.origin_input_ids)


def prompt(number: int, tokens: int) -> LoopRequest:
    """A request whose first token, and so no key, another number has."""
    return LoopRequest(str(number), array("q", [number, *range(1, tokens)]))
