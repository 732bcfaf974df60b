"""Costs of steps and loads: measured in this process, agreed on by all ranks, and asked with
`planner`: whether to load, which blocks are next, what is overdue.

On a CPU a step is over when the next one is planned. On a GPU with SGLang's overlap scheduler, a
step is planned and launched while the one before runs. Then a `StepTimer` (CUDA events around the
forward) measures each step, and a plan is made for the moment at which the device will be free.

With `--prefill-decode-interval`, decode steps follow each step that prefills. The time between two
polls is that of a decode step if only such steps run.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from sglang_cake.config import CakeConfig
from sglang_cake.core.keys import Span
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.integration.scheduler.rank_consensus import SharedCosts
from sglang_cake.loading.cost_model import (
    LoadCost,
    PrefillCost,
    PrefillFit,
    PromptCosts,
    StepWork,
    TierLoads,
    work_of,
)
from sglang_cake.loading.loader import Loader
from sglang_cake.loading.planner import (
    LoadProgress,
    Mode,
    Outlook,
    is_overdue,
    is_stalled,
    loads_s,
    look_ahead,
    next_landings,
    passing_tokens,
    should_load,
    with_loads,
)

# Weight of the newest decode step in the time of one.
_NEWEST_SHARE = 0.1
# The known time of a decode step is at most so many times that of the newest one.
_MOST_TIMES_NEWEST = 4.0


class StepTimer(Protocol):
    """When the device ran one forward."""

    def done(self) -> bool:
        """Whether the forward is over. Never waits."""
        ...

    def seconds(self) -> float:
        """How long the device took, once the forward is over."""
        ...


class CudaTimer:
    """A `StepTimer`: events around the launches on the current stream between construction and
    `stop`."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def done(self) -> bool:
        return bool(self._end.query())

    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3


@dataclass(slots=True)
class _LaunchedStep:
    """A step whose forward is not known to be over.

    Attributes:
        began_s: it began at this time or later: when it was launched, or when the step before it
            was seen to be over.
    """

    work: StepWork
    timer: StepTimer
    began_s: float


class StepCosts:
    """Costs of steps and loads, and what `planner` decides on them. The scheduler thread owns it.

    Args:
        chunk_tokens: the most that a prompt computes in one step.
        alone: no other rank has to decide the same.

    Attributes:
        pipelined: steps are launched while the one before runs, and `step_launched` times each.
        overlap_share: share of a last step that may run before the loads are over.
    """

    def __init__(
        self,
        loader: Loader,
        prior: PrefillCost,
        *,
        chunk_tokens: int,
        pipelined: bool,
        alone: bool = True,
    ) -> None:
        self._loader = loader
        self._alone = alone
        self.chunk_tokens = chunk_tokens
        self._fit = PrefillFit(prior)
        self.pipelined = pipelined
        self._began_s = 0.0
        self._work = StepWork()  # of the step being scheduled or under way
        self._launched: deque[_LaunchedStep] = deque()  # a few: polls take out those that are over
        self._decodes = 0  # requests that decode in steps that prefill
        self._decode_steps = 0  # decode steps after each step that prefills
        self._decode_step_s = 0.0  # of a decode step; 0: none was measured
        self._decoded_s: float | None = None  # time of the last poll, if the step before it decoded
        self._agreed = SharedCosts(prior, 0.0, ())
        self._least_stall_s = 0.0  # no loads stall before that
        self.overlap_share = 0.0

    # ---- measuring ----

    @property
    def own(self) -> PromptCosts:
        """The costs that this rank has measured, with those of the tier that was read last."""
        return PromptCosts(self._fit.cost, self._loader.cost)

    @property
    def known(self) -> PromptCosts | None:
        """`own`; None: a part of it is a guess, as on a decode server, which does not prefill."""
        own = self.own
        return own if self.measured and own.load in self._loader.costs else None

    @property
    def measured(self) -> bool:
        """Whether a step was measured here; otherwise costs are guessed or remembered."""
        return self._fit.measured

    @property
    def learned(self) -> tuple[PrefillCost, list[LoadCost | None]]:
        """The arguments of `recall`."""
        return self._fit.cost, self._loader.costs

    def recall(self, prefill: PrefillCost, loads: Sequence[LoadCost | None]) -> None:
        """Start from the costs that an earlier process measured. Those of steps that this process
        has measured stay, as agreed on by all ranks: only the store is another one.

        Each rank has measured its own. With several ranks, the prior counts until they agree."""
        self._loader.recall(loads)
        if not self.measured:
            self._fit.recall(prefill)
            if self._alone:
                self._agreed = self._agreed._replace(prefill=self._fit.cost)

    @property
    def measured_here(self) -> SharedCosts:
        """What this rank has measured, for the ranks to agree on (`agree`)."""
        loader = self._loader
        return SharedCosts(
            self._fit.cost,
            self.busy_s,
            loader.tier_costs,
            loader.tier_silence_s,
            loader.measured_tiers,
            self._decode_step_s,
        )

    def agree(self, shared: SharedCosts) -> None:
        """Decide on these numbers of all ranks."""
        self._agreed = shared
        loads = list(zip(shared.tiers, shared.silence_s, strict=False))
        stalled = any(cost.is_stalled(silent_s) for cost, silent_s in loads)
        least_s = min((cost.stall_s for cost, _ in loads), default=0.0)
        self._least_stall_s = 0.0 if stalled else least_s

    @property
    def agreed(self) -> PrefillCost:
        """The ranks' common cost of steps."""
        return self._agreed.prefill

    @property
    def busy_s(self) -> float:
        """Predicted time until the device has run all steps launched so far."""
        free_s = 0.0
        for step in self._launched:
            known = step.work != StepWork()
            free_s = max(free_s, step.began_s) + (self._fit.cost.work_s(step.work) if known else 0)
        return max(0.0, free_s - time.monotonic())

    @property
    def step_end_s(self) -> float:
        """Predicted time until the step being scheduled is over, as the ranks agreed."""
        return self._agreed.busy_s + self.agreed.work_s(self._work)

    def scheduling(self, *, decodes: int, decode_steps: int = 0) -> None:
        """A step is being scheduled, in which `decodes` requests decode. If it prefills,
        `decode_steps` follow before another step may."""
        self._work = StepWork(decodes=decodes)
        self._decodes = decodes
        self._decode_steps = decode_steps

    def claimed(self, start: int, stop: int) -> None:
        """The step being scheduled prefills `[start, stop)` of a request."""
        if not self._work.tokens:
            self._began_s = time.monotonic()
        self._work += work_of(start, stop)

    def waited(self, took_s: float) -> None:
        """The step under way waited that long for KV, which other steps do not."""
        self._began_s += took_s

    def do_not_measure(self) -> None:
        """The time of the step under way is not that of an ordinary step."""
        self._work = StepWork()

    def step_launched(self, timer: StepTimer) -> None:
        """The forward of the step being scheduled was launched, on a device that runs it later."""
        self._launched.append(_LaunchedStep(self._work, timer, time.monotonic()))

    def ran(self, *, decode: bool) -> None:
        """The next poll is about to begin. Args: decode: the step before it only decodes."""
        now_s = time.monotonic()
        if decode and self._decoded_s is not None:
            took_s = now_s - self._decoded_s
            # The first one may have compiled kernels, and SGLang may have paused before others.
            known_s = min(self._decode_step_s or took_s, _MOST_TIMES_NEWEST * took_s)
            newest_s = min(took_s, 2 * known_s)
            self._decode_step_s = known_s + _NEWEST_SHARE * (newest_s - known_s)
        self._decoded_s = now_s if decode else None

    def polled(self) -> None:
        """The next step is about to be scheduled. Measure the steps that are over."""
        now_s = time.monotonic()
        if self.pipelined:
            while self._launched and self._launched[0].timer.done():
                step = self._launched.popleft()
                if step.work.tokens:
                    self._fit.observe(step.work, step.timer.seconds())
                if self._launched:
                    self._launched[0].began_s = now_s
        elif self._work.tokens:
            self._fit.observe(self._work, now_s - self._began_s)
        self._work = StepWork()

    # ---- deciding ----

    def costs(self, record: PromptRecord) -> PromptCosts:
        """The agreed costs of a request's next part in the step being scheduled, which begins when
        the device is free."""
        return self._from_now(record).beside(self._work, self.pause_s)

    def costs_when_free(self, record: PromptRecord) -> PromptCosts:
        """The agreed costs of a request that has the device to itself after the running step."""
        return self._from_now(record).beside(StepWork(), self.pause_s)

    @property
    def pause_s(self) -> float:
        """Predicted time between a step that prefills and the next one that may."""
        return self._decode_steps * self._agreed.decode_step_s

    def decision_at_arrival(
        self, record: PromptRecord, config: CakeConfig, ahead: StepWork
    ) -> Callable[[Sequence[bool], TierLoads], bool]:
        """A function that decides whether a new request's blocks are loaded at once. The I/O thread
        calls it with the stored blocks that are of use, and their tiers.

        Args:
            ahead: the work of the device before this request.
        """
        view = record.meet.view()
        waiting = self._waiting(record, ahead, self.busy_s)
        chunk_tokens = self._waiting_chunk_tokens

        def decide(usable: Sequence[bool], tiers: TierLoads) -> bool:
            found = view.found(usable)
            return config.allows_loading(usable[view.first :], view.block_tokens) and should_load(
                found,
                mode=config.mode,
                chunk_tokens=chunk_tokens,
                costs=with_loads(waiting, found, tiers),
                progress=LoadProgress(),
            )

        return decide

    def should_load(self, record: PromptRecord, mode: Mode, ahead: StepWork) -> bool:
        """The same decision for a request whose lookup is done, on what all ranks know."""
        return should_load(
            record.meet.view(),
            mode=mode,
            chunk_tokens=self._waiting_chunk_tokens,
            costs=self._waiting(record, ahead, self._agreed.busy_s),
            progress=record.progress,
        )

    def loads_s(self, record: PromptRecord) -> float:
        """Predicted time until all wanted blocks of the request have landed."""
        return loads_s(record.meet.view(), self.costs_alone(record), record.progress)

    def next_landings(self, record: PromptRecord) -> list[int]:
        """The blocks of the request that land next, the first one first: as many as the link brings
        in two steps. Slots that are reserved in one step can be written in the next."""
        least = record.agreed.load_from
        if least is None:
            return []
        view = record.meet.view()
        step_s = self.agreed.step_s(view.front, view.front + self.chunk_tokens)
        landings = next_landings(view, self.costs_alone(record), record.progress, 2 * step_s)
        return [block for block in landings if block >= least]

    def is_overdue(self, record: PromptRecord) -> bool:
        """Whether a block of the request should have landed by now."""
        return is_overdue(record.meet.view(), self.costs_alone(record), record.progress)

    def is_stalled(self, record: PromptRecord) -> bool:
        """Whether the loads of the request have stalled. Asked of all waiting requests, so the
        usual cases cost little: nothing is loaded, or no tier has stalled, and the link serves
        another request first."""
        agreed = record.agreed
        if agreed.load_from is None or agreed.elapsed_s < self._least_stall_s:
            return False
        return is_stalled(record.meet.view(), self.costs_alone(record), record.progress)

    def passing_tokens(
        self,
        rest: Span,
        chunk_tokens: int,
        ends_s: Sequence[float],
        last_ends_s: Sequence[float],
        waiting: int,
    ) -> int | None:
        """`planner.passing_tokens` of a prompt's `rest` in the step being scheduled."""
        return passing_tokens(
            rest,
            chunk_tokens,
            ends_s=ends_s,
            last_ends_s=last_ends_s,
            waiting=waiting,
            work=self._work,
            cost=self.agreed,
            backlog_s=self._agreed.busy_s,
            pause_s=self.pause_s,
        )

    def queue_s(self, work: StepWork) -> float:
        """Predicted time of the fewest steps that do `work`."""
        return self.agreed.queue_s(work, self.chunk_tokens)

    def look_ahead(self, record: PromptRecord, costs: PromptCosts) -> Outlook:
        """The prediction for the rest of the request's prefill, at these costs."""
        return look_ahead(
            record.meet.view(),
            chunk_tokens=self.chunk_tokens,
            costs=costs,
            progress=record.progress,
        )

    def _from_now(self, record: PromptRecord) -> PromptCosts:
        alone = self.costs_alone(record)
        return replace(alone, backlog_s=self._agreed.busy_s, pipelined=self.pipelined)

    def _waiting(self, record: PromptRecord, ahead: StepWork, busy_s: float) -> PromptCosts:
        """The agreed costs of a request in the queue: the device computes `ahead` before it, and
        requests that decode now go on."""
        costs = self.costs_alone(record)
        costs = costs.beside(StepWork(decodes=self._decodes), self.pause_s)
        queue_s = costs.prefill.queue_s(ahead, self._waiting_chunk_tokens)
        return replace(costs, backlog_s=busy_s + queue_s, pipelined=self.pipelined)

    @property
    def _waiting_chunk_tokens(self) -> int:
        return max(1, self.chunk_tokens - self._decodes)

    def costs_alone(self, record: PromptRecord) -> PromptCosts:
        """The agreed costs of a request that has the device to itself."""
        agreed = record.agreed
        load = self._loader.cost  # until its lookup is done, nothing is decided on it
        silence_s = 0.0
        if agreed.tiers and agreed.tier is not None:  # the usual case
            load = self._agreed.tiers[agreed.tier]
            silence_s = self._agreed.silence_s[agreed.tier]
        share = self.overlap_share if record.may_overlap else 0.0
        costs = PromptCosts(self.agreed, load, silence_s=silence_s, overlap_share=share)
        if agreed.tier is not None:
            return costs
        loads = TierLoads(agreed.tiers, self._agreed.tiers, self._agreed.silence_s)
        return with_loads(costs, record.meet.view(), loads)
