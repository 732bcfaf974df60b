"""A server with many prompts on a virtual clock. The real server's own code decides.

`Meet`, `should_load`, `next_step`, `passing_tokens`, `overlap_span`, `look_ahead`, `QueueEntry.of`,
`order`, `PrefillFit` and `LoadFit` are the server's own. The clock, the device, the links and the
forming of a batch are models:

- A step has decoding requests first, then prompts in the order of the policy, until its token
  budget is used up (as in SGLang with mixed chunks).
- Blocks cross each link one after another, last block first. Of several links, a block crosses the
  one that brings it first, as in the server.
- A device that waits for loads decides again when a block lands, and once in a block's time. While
  a last step may begin early, it decides as often as a real one.
- With SGLang's overlap loop (`Machine.plan_s`), a step is planned when the one before begins, for
  the moment at which that one is predicted to end. A plan to wait is made again when it ends.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sglang_cake.core.keys import Span
from sglang_cake.loading.cost_model import PromptCosts, StepWork, work_of
from sglang_cake.loading.meet import BlockState, Meet
from sglang_cake.loading.planner import (
    LoadProgress,
    Mode,
    StepPlan,
    device_work,
    is_overdue,
    is_stalled,
    look_ahead,
    next_step,
    overlap_span,
    passing_tokens,
    should_load,
)
from sglang_cake.loading.priority import FcfsSchedule, QueueEntry, order
from sglang_cake.simulator.machine import Clock, Knowledge, Machine, StoreLink, layered_end_s

Policy = Literal["adaptive", "fcfs"]
POLL_S = 0.0005  # between two polls of a real server that only waits for a load


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request.

    Attributes:
        stored_blocks: so many of its first full blocks are stored; None: all. With end states, that
            of the last end among them is stored, and no other.
        new_tokens: to generate; the first one ends the prefill.
    """

    prompt_tokens: int
    arrive_s: float = 0.0
    stored_blocks: int | None = None
    new_tokens: int = 1
    rid: str = ""


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A prompt's part of one step: tokens `[start, stop)` at `[begin_s, end_s)`."""

    start: int
    stop: int
    begin_s: float
    end_s: float


@dataclass(slots=True)
class PromptResult:
    """The result of one prompt; times are the clock's.

    Attributes:
        overlapped_tokens: loaded tokens that arrived while the last step ran.
        waited_s: how long it could have computed, and waited for its loads instead.
        landings: (time, block), discarded blocks included.
    """

    prompt: Prompt
    first_token_s: float = 0.0
    finish_s: float = 0.0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    overlapped_tokens: int = 0
    wasted_blocks: int = 0
    waited_s: float = 0.0
    steps: list[PromptStep] = field(default_factory=list)
    landings: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.prompt.arrive_s

    @property
    def kv_s(self) -> float:
        """From arrival until the KV of all loadable tokens was on the device.

        Papers that time the loading of a cache stop here: the step over the rest follows.
        """
        if not self.loaded_tokens:
            return self.ttft_s
        last = self.steps[-1]
        before = [step.end_s for step in self.steps if step.stop < last.stop]
        return max(0.0, *before, *(when_s for when_s, _ in self.landings)) - self.prompt.arrive_s


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the device, and its tokens by kind."""

    begin_s: float
    end_s: float
    decodes: int
    plain_tokens: int  # of prompts without stored blocks
    stored_tokens: int  # computed for prompts with stored blocks
    other_tokens: int = 0  # of `Machine.others`


@dataclass(slots=True, eq=False)
class LivePrompt:
    """A prompt that is not finished.

    Attributes:
        arrival: prompts are numbered as they arrive.
        ready_s: when its first block can begin to cross a link.
        load_from: blocks from this one on are worth loading; None: no block is.
        ever_asked: whether any block was ever worth loading.
        since_s: when its last block landed, or when a link began to serve it; None: no link serves
            it.
        reading: blocks that cross a link.
    """

    result: PromptResult
    meet: Meet
    stored: int
    arrival: int
    ready_s: float
    load_from: int | None = None
    ever_asked: bool = False
    planned: bool = False  # in the step being formed
    since_s: float | None = None
    any_landed: bool = False
    waits_since_s: float | None = None
    relied_from: int | None = None  # as in `LoadProgress`
    relied_since_s: float = 0.0
    decoded: int = 0
    reading: set[int] = field(default_factory=set)

    def progress(self, now: float) -> LoadProgress:
        since_s = 0.0 if self.since_s is None else now - self.since_s
        return LoadProgress(
            since_s,
            self.any_landed,
            self.load_from,
            relied_from=self.relied_from,
            relied_s=max(0.0, now - self.relied_since_s) if self.relied_from is not None else 0.0,
        )

    @property
    def in_prefill(self) -> bool:
        return self.meet.front < self.result.prompt.prompt_tokens

    @property
    def to_compute(self) -> StepWork:
        """The tokens that its loads leave to compute."""
        return device_work(self.meet.view(), self.load_from)

    @property
    def missing_blocks(self) -> int:
        """Blocks that it waits for."""
        return self.meet.view().wanted

    def wanted(self) -> Iterator[int]:
        """The blocks to read next, the last one first."""
        if self.load_from is None:
            return
        view = self.meet.view()
        for block in reversed(self.meet.end_indices):
            if self.meet.state(block) is BlockState.WANTED and block not in self.reading:
                yield block
        end = len(view.states)
        while (found := view.states.rfind(BlockState.WANTED, 0, end)) >= 0:
            block, end = view.first + found, found
            if block < self.load_from:
                return
            if block not in self.reading:
                yield block

    def waits(self, yes: bool, now: float) -> None:
        """Note whether it waits for its loads from now on, although it could compute."""
        if yes:
            self.waits_since_s = now if self.waits_since_s is None else self.waits_since_s
        elif self.waits_since_s is not None:
            self.result.waited_s += now - self.waits_since_s
            self.waits_since_s = None

    def attach(self) -> None:
        """Attach the blocks that have landed at the front."""
        while (span := self.meet.island()) is not None:
            self.result.loaded_tokens += span.tokens
            self.meet.attach(span)


@dataclass(slots=True, eq=False)
class Crossing:
    """A block that crosses a link."""

    live: LivePrompt
    block: int
    store_link: StoreLink
    began_s: float
    work_s: float  # its time at full speed
    first: bool

    def missing_share(self, now: float) -> float:
        """The share of its bytes that has not arrived."""
        return 1 - min(1.0, self.store_link.speed.work_s(self.began_s, now) / self.work_s)

    def there_s(self, share: float = 1.0) -> float:
        """When the first `share` of its bytes has arrived: they cross evenly."""
        return self.store_link.speed.done_s(self.began_s, self.work_s * share)


@dataclass(slots=True, eq=False)
class SimulatedLink:
    """A link, and the block that crosses it.

    Attributes:
        free_s: while another link chooses a block, the time at which this one can begin it.
    """

    store_link: StoreLink
    crossing: Crossing | None = None
    free_s: float = 0.0

    def brings(self, *, before_s: float) -> bool:
        """Whether one more block would land before that time; it is queued then."""
        done_s = self.free_s + self.store_link.load.block_s
        if done_s >= before_s:
            return False
        self.free_s = done_s
        return True

    def clear(self) -> None:
        """The block has landed, or was cancelled."""
        self.crossing = None
        if self.store_link.shared_store is not None:
            self.store_link.shared_store.active -= 1


class SimulatedServer:
    """One device and its links. `submit` prompts, run the clock, then read `results` and `steps`.

    Args:
        chunk_tokens: budget of a step.
        policy: the order of the prompts, on the device and on the links; `fcfs`: by arrival.
        rule: decides each step, as `next_step` does.
    """

    def __init__(
        self,
        machine: Machine,
        clock: Clock,
        *,
        chunk_tokens: int,
        block_tokens: int = 128,
        mode: Mode = "auto",
        policy: Policy = "adaptive",
        knowledge: Knowledge | None = None,
        rule: Callable[..., StepPlan] = next_step,
    ) -> None:
        self.results: list[PromptResult] = []
        self.steps: list[StepRecord] = []
        self._machine = machine
        self._clock = clock
        self._chunk = chunk_tokens
        self._block = block_tokens
        self._mode: Mode = mode
        self._policy = policy
        self._rule = rule
        self._known = knowledge or Knowledge.of(machine)
        # As in the real server: the modes for benchmarks do not overlap.
        early = mode == "auto" and machine.plan_s is None
        self._overlap_share = 1 - 1 / machine.layers if early else 0.0
        self._arrivals = itertools.count(1)
        self._lives: list[LivePrompt] = []
        self._queue: list[LivePrompt] = []
        self._links = [SimulatedLink(store_link) for store_link in machine.store_links]
        self._landed_s = 0.0  # when the last block landed
        self._launched = 0  # steps that are not over: one, or two with the overlap loop
        self._free_s = 0.0  # the predicted end of the last one
        self._fcfs = FcfsSchedule(lambda tokens: self._costs.prefill.span_s(*tokens, self._chunk))
        self._end_s = 0.0  # its true end
        self._poll_s = math.inf  # when it will decide next without an event

    def submit(self, prompt: Prompt) -> PromptResult:
        """Let `prompt` arrive at its time. The returned result is filled as the clock runs."""
        result = PromptResult(prompt)
        self.results.append(result)
        self._clock.at(prompt.arrive_s, lambda: self._arrive(result))
        return result

    # ---- events ----

    def _arrive(self, result: PromptResult) -> None:
        prompt = result.prompt
        meet = Meet(
            block_tokens=self._block,
            page_tokens=1,
            limit_tokens=prompt.prompt_tokens - 1,
            prompt_tokens=prompt.prompt_tokens,
            end_blocks=self._machine.end_blocks,
        )
        count = meet.block_count if prompt.stored_blocks is None else prompt.stored_blocks
        ready_s = self._clock.now + self._known_latency_s()
        live = LivePrompt(result, meet, count, next(self._arrivals), ready_s)
        stored = [b < count for b in range(meet.block_count)]
        if self._mode != "compute":
            meet.found(
                stored, [b + 1 == min(count, meet.block_count) for b in range(meet.block_count)]
            )
        self._lives.append(live)
        self._rank()
        self._revise([live])
        self._feed()
        self._step()

    def _known_latency_s(self) -> float:
        return min(store_link.load.latency_s for store_link in self._machine.store_links)

    def _landed(self, link: SimulatedLink, crossing: Crossing) -> None:
        if link.crossing is not crossing:
            return  # it was cancelled
        link.clear()
        live, now = crossing.live, self._clock.now
        live.reading.discard(crossing.block)
        took_s = now - max(crossing.began_s, min(self._landed_s, now))
        if crossing.first:
            took_s = now - crossing.began_s + self._known_latency_s()
        self._known.load.fetched(took_s, first=crossing.first)
        self._landed_s = live.since_s = now
        live.any_landed = True
        live.result.landings.append((now, crossing.block))
        if not live.meet.landed(crossing.block):
            live.result.wasted_blocks += 1
        self._feed()
        self._step()

    def _stepped(
        self, work: StepWork, steps: Sequence[tuple[LivePrompt, PromptStep]], begin_s: float
    ) -> None:
        now = self._clock.now
        self._launched -= 1
        self._known.prefill.observe(work, now - begin_s)
        for live in [x for x in self._lives if not x.in_prefill and x.decoded]:
            self._decoded(live)
        for live, step in steps:
            live.result.steps.append(step)
            if step.stop == live.result.prompt.prompt_tokens:
                live.result.first_token_s = now
                self._decoded(live)
        self._rank()
        self._feed()
        self._step()

    def _decoded(self, live: LivePrompt) -> None:
        live.decoded += 1
        if live.decoded == live.result.prompt.new_tokens:
            live.result.finish_s = self._clock.now
            self._lives.remove(live)

    def _polled(self, due_s: float) -> None:
        if due_s == self._poll_s:  # else it has looked earlier
            self._poll_s = math.inf
            self._step()

    # ---- decisions ----

    @property
    def _costs(self) -> PromptCosts:
        return replace(
            self._known.costs,
            pipelined=self._machine.plan_s is not None,
            overlap_share=self._overlap_share,
        )

    @property
    def _busy_s(self) -> float:
        """Predicted time until the device has run all steps launched so far."""
        return max(0.0, self._free_s - self._clock.now) if self._launched else 0.0

    def _revise(self, waiting: Sequence[LivePrompt]) -> None:
        """Decide for each waiting prompt whether to load it, given the prompts ahead of it."""
        now, number = self._clock.now, len(self.steps)
        taken = self._machine.others(number) if self._machine.others else 0
        others = StepWork(taken, 0.0, sum(1 for live in self._lives if live.decoded))
        chunk = max(1, self._chunk - taken - others.decodes)
        costs, ahead, changed = self._costs.beside(others), StepWork(), False
        for live in self._queue:
            if live in waiting and live.missing_blocks:
                backlog_s = self._busy_s + costs.prefill.queue_s(ahead, chunk)
                loads = should_load(
                    live.meet.view(),
                    mode=self._mode,
                    chunk_tokens=chunk,
                    costs=replace(costs, backlog_s=backlog_s),
                    progress=live.progress(now),
                )
                load_from = 0 if loads else None
                if load_from != live.load_from:
                    changed = True
                    if loads:
                        live.load_from = 0
                        live.ever_asked = True
                    else:
                        overdue = is_overdue(live.meet.view(), costs, live.progress(now))
                        self._stop(live, for_good=overdue)
            ahead += live.to_compute
        if changed:
            self._rank()

    def _stop(self, live: LivePrompt, *, for_good: bool) -> None:
        """Stop its loads, so that they may begin again, or for good."""
        live.load_from = None
        live.since_s = None
        if for_good:
            live.result.wasted_blocks += len(live.meet.give_up())
        self._cancel(live, all_reads=True)

    def _rank(self) -> None:
        """Order the prompts, for the device and the links."""
        now = self._clock.now
        waiting = [live for live in self._lives if live.in_prefill]
        self._fcfs.polled(
            now,
            waiting,
            rest=lambda live: Span(0, live.result.prompt.prompt_tokens),
            matched=lambda live: 0,
        )
        if self._policy == "fcfs" or len(waiting) < 2:
            self._queue = waiting
            return
        self._queue = [waiting[i] for i in order([self._queue_entry(x, now) for x in waiting])]

    def _queue_entry(self, live: LivePrompt, now: float) -> QueueEntry:
        prompt, view = live.result.prompt, live.meet.view()
        waited_s = now - prompt.arrive_s
        if not live.stored:
            rest_s = self._costs.prefill.span_s(live.meet.front, prompt.prompt_tokens, self._chunk)
            return QueueEntry(prompt.rid, None, waited_s, compute_s=rest_s, arrival=live.arrival)

        progress = live.progress(now)
        entry = QueueEntry.of(
            prompt.rid,
            view,
            loads=live.load_from is not None,
            stalled=is_stalled(view, self._costs, progress),
            outlook=lambda: look_ahead(
                view, chunk_tokens=self._chunk, costs=self._costs, progress=progress
            ),
            mode=self._mode,
            waited_s=waited_s,
            ever_asked=live.ever_asked,
            chunk_tokens=self._chunk,
        )
        if entry.remaining_s is None:
            compute_s = self._costs.prefill.queue_s(live.to_compute, self._chunk)
            entry = entry._replace(compute_s=compute_s)
        elif self._mode == "auto":
            entry = entry._replace(slack_s=self._fcfs.slack_s(live, entry.compute_s))
        return entry._replace(arrival=live.arrival)

    def _feed(self) -> None:
        """Every idle link begins the most urgent block that no other link brings sooner."""
        now = self._clock.now
        for link in self._links:
            if link.crossing is not None:
                continue
            for other in self._links:
                other.free_s = now if other.crossing is None else other.crossing.there_s()
            first = True  # a prompt waits for the link only if it is the first one it can serve
            for live in list(self._queue):
                block = self._next_block(live, link)
                if not live.reading and (block is None or not first):
                    live.since_s = None
                if block is None or link.crossing is not None:
                    continue
                if now >= live.ready_s:
                    self._read(link, live, block)
                else:
                    self._clock.at(live.ready_s, self._feed)
                    if first and live.since_s is None:
                        live.since_s = now
                first = False

    def _next_block(self, live: LivePrompt, link: SimulatedLink) -> int | None:
        """The most urgent block that `link` brings first. The blocks that others bring sooner are
        added to their queues."""
        lands_s = self._clock.now + link.store_link.load.block_s
        others = [other for other in self._links if other is not link]
        for block in live.wanted():
            if not any(other.brings(before_s=lands_s) for other in others):
                return block
        return None

    def _read(self, link: SimulatedLink, live: LivePrompt, block: int) -> None:
        now, store_link = self._clock.now, link.store_link
        first = not live.any_landed and not live.reading
        live.reading.add(block)
        live.since_s = now if live.since_s is None else live.since_s
        work_s = store_link.load.block_s
        if store_link.shared_store is not None:
            store_link.shared_store.active += 1
            work_s *= store_link.shared_store.slowdown
        link.crossing = crossing = Crossing(live, block, store_link, now, work_s, first)
        self._clock.at(crossing.there_s(), lambda: self._landed(link, crossing))

    def _cancel(self, live: LivePrompt, *, all_reads: bool = False) -> None:
        """Cancel its reads, or those of blocks that it does not want any more."""
        for link in self._links:
            crossing = link.crossing
            if crossing is None or crossing.live is not live:
                continue
            if all_reads or live.meet.state(crossing.block) is not BlockState.WANTED:
                live.reading.discard(crossing.block)
                live.result.wasted_blocks += 1
                link.clear()

    def _step(self) -> None:
        """Launch the next step, unless one is running."""
        if not self._launched:
            self._launch()

    def _launch(self) -> None:
        """Form the next batch. It begins when the device is free."""
        if not self._lives:
            return
        number = len(self.steps)
        decodes = sum(1 for live in self._lives if not live.in_prefill)
        taken = self._machine.others(number) if self._machine.others else 0
        work = StepWork(taken, 0.0, decodes)
        parts: list[tuple[LivePrompt, int, int]] = []
        passed = self._passed()
        for live in list(self._queue):
            live.planned = False
            left = self._chunk - decodes - work.tokens
            if not live.in_prefill:
                continue
            live.attach()
            most = self._passing_tokens(live, left, work, passed) if left > 0 else 0
            if most == 0:
                continue
            start, stop = live.meet.front, self._decide(live, left, work)
            stop = stop if most is None else min(stop, start + most)
            if stop > start:
                parts.append((live, start, stop))
                work += work_of(start, stop)
                if live.ever_asked and stop == live.result.prompt.prompt_tokens:
                    end_s = self._busy_s + self._known.prefill.cost.work_s(work)
                    passed.append((live.arrival, end_s))
        if not parts and not decodes and self._machine.others is None:
            if not self._begin_last_early(number):
                self._poll()
            self._feed()
            return
        self._begin(number, work, parts, taken)
        self._revise([live for live in self._queue if not live.planned])
        self._rank()
        self._feed()

    def _passed(self) -> list[tuple[int, float]]:
        """Of each prompt that the links serve: the number of its arrival, and the predicted time
        until its loads are over."""
        found, total_s, load = [], 0.0, self._known.load.cost
        for live in list(self._queue):
            if self._mode != "auto" or live.load_from is None or not live.missing_blocks:
                continue
            progress = live.progress(self._clock.now)
            rest_s = load.load_s(
                live.missing_blocks, since_s=progress.since_s, any_landed=progress.any_landed
            )
            total_s += rest_s
            found.append((live.arrival, total_s * (1 + load.error)))
        return found

    def _passing_tokens(
        self,
        live: LivePrompt,
        left: int,
        work: StepWork,
        passed: Sequence[tuple[int, float]],
    ) -> int | None:
        """How many of `left` tokens this prompt computes beside those that it passes."""
        prompt = live.result.prompt
        return passing_tokens(
            Span(live.meet.front, prompt.prompt_tokens),
            left,
            ends_s=[end_s for arrival, end_s in passed if arrival < live.arrival],
            waiting=len(self._queue) - 1,
            work=work,
            cost=self._known.prefill.cost,
            backlog_s=self._busy_s,
        )

    def _decide(self, live: LivePrompt, left: int, work: StepWork) -> int:
        """The token at which this prompt's part of the next step ends."""
        now = self._clock.now
        costs = self._costs.beside(work)
        step = self._rule(
            live.meet.view(),
            mode=self._mode,
            chunk_tokens=left,
            costs=replace(costs, backlog_s=self._busy_s, others_wait=len(self._queue) > 1),
            progress=live.progress(now),
        )
        live.planned = True
        front, total = live.meet.front, live.result.prompt.prompt_tokens
        if live.relied_from is None and step.stop < min(front + left, total):
            live.relied_from = front
            live.relied_since_s = now + self._busy_s
        if step.load_from is None:
            self._stop(live, for_good=step.ends_loads)
        live.load_from = step.load_from
        live.ever_asked |= step.load_from is not None
        live.waits(step.wait, max(now, self._end_s))
        return step.stop

    def _begin(
        self, number: int, work: StepWork, parts: Sequence[tuple[LivePrompt, int, int]], taken: int
    ) -> None:
        plan_s = self._machine.plan_s
        begin_s = max(self._end_s, self._clock.now + (plan_s or 0.0))
        self._free_s = begin_s + self._known.prefill.cost.work_s(work)
        took_s = self._machine.prefill.work_s(work) * self._machine.noise(number)
        self._end_s = end_s = self._machine.device.done_s(begin_s, took_s)
        steps = []
        for live, start, stop in parts:
            self._claim(live, start, stop)
            steps.append((live, PromptStep(start, stop, begin_s, end_s)))
        stored = sum(stop - start for live, start, stop in parts if live.stored)
        plain = sum(stop - start for live, start, stop in parts if not live.stored)
        self.steps.append(StepRecord(begin_s, end_s, work.decodes, plain, stored, taken))
        self._launched += 1
        if plan_s is not None:
            self._clock.at(begin_s, self._launch)
        self._clock.at(end_s, lambda: self._stepped(work, steps, begin_s))

    def _claim(self, live: LivePrompt, start: int, stop: int) -> None:
        live.result.wasted_blocks += len(live.meet.claim(stop))
        live.result.computed_tokens += stop - start
        if stop == live.result.prompt.prompt_tokens:
            self._fcfs.prefilled(live)
        self._cancel(live)  # compute has claimed them

    def _begin_last_early(self, number: int) -> bool:
        """Begin the last step of a prompt while its last blocks are on their way, if that is
        faster. The step holds the device, so there must be no other prompt."""
        if not self._overlap_share or len(self._lives) > 1:
            return False
        (live,), machine, now = self._lives, self._machine, self._clock.now
        crossings = {c.block: c for link in self._links if (c := link.crossing) is not None}
        span = overlap_span(
            live.meet.view(),
            missing_shares={
                block: crossing.missing_share(now) for block, crossing in crossings.items()
            },
            chunk_tokens=self._chunk,
            costs=self._costs.beside(StepWork()),
        )
        if span is None:
            return False
        live.waits(False, now)
        tail = [c for c in crossings.values() if c.block in live.meet.blocks_of(span)]
        start, stop = span.stop, live.result.prompt.prompt_tokens
        took_s = machine.prefill.work_s(work_of(start, stop)) * machine.noise(number)
        end_s = layered_end_s(
            now,
            took_s,
            machine.layers,
            machine.device,
            lambda share: max(crossing.there_s(share) for crossing in tail),
        )
        step = PromptStep(start, stop, now, end_s)
        self.steps.append(StepRecord(now, end_s, 0, 0, stop - start))
        self._launched += 1
        self._free_s = self._end_s = end_s
        self._clock.at(end_s, lambda: self._overlapped(live, step, [c.block for c in tail]))
        return True

    def _overlapped(self, live: LivePrompt, step: PromptStep, tail: Sequence[int]) -> None:
        """End a last step that began while the blocks of `tail` were on their way."""
        before = live.meet.front
        live.attach()
        size, end = self._block, live.meet.front
        assert end == step.start
        live.result.overlapped_tokens += sum(
            min(end, (block + 1) * size) - max(before, block * size) for block in tail
        )
        self._claim(live, step.start, step.stop)
        # It waited for KV: its time says nothing about other steps.
        self._stepped(StepWork(), [(live, step)], step.begin_s)

    def _poll(self) -> None:
        # As often as a real server only where a few ms matter: while a last step may begin early.
        alone = len(self._lives) == 1 and self._lives[0].missing_blocks <= len(self._links)
        block_s = min(store_link.load.block_s for store_link in self._machine.store_links)
        wait_s = 0.0 if self._overlap_share and alone else block_s
        due_s = self._clock.now + max(POLL_S, wait_s)
        if due_s < self._poll_s:
            self._poll_s = due_s
            self._clock.at(due_s, lambda: self._polled(due_s))


def serve(
    machine: Machine,
    prompts: Sequence[Prompt],
    *,
    chunk_tokens: int,
    block_tokens: int = 128,
    mode: Mode = "auto",
    policy: Policy = "adaptive",
    knowledge: Knowledge | None = None,
    rule: Callable[..., StepPlan] = next_step,
) -> SimulatedServer:
    """Serve `prompts` until all are finished; returns the server with its results."""
    clock = Clock()
    server = SimulatedServer(
        machine,
        clock,
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        mode=mode,
        policy=policy,
        knowledge=knowledge,
        rule=rule,
    )
    for prompt in prompts:
        server.submit(prompt)
    clock.run()
    return server


def simulate_prompt(
    machine: Machine,
    prompt_tokens: int,
    *,
    chunk_tokens: int,
    block_tokens: int = 128,
    mode: Mode = "auto",
    stored_blocks: int | None = None,
    knowledge: Knowledge | None = None,
    rule: Callable[..., StepPlan] = next_step,
) -> PromptResult:
    """Serve one prompt on an idle server. Its first `stored_blocks` full blocks (None: all) are
    stored."""
    server = serve(
        machine,
        [Prompt(prompt_tokens, stored_blocks=stored_blocks)],
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        mode=mode,
        knowledge=knowledge,
        rule=rule,
    )
    return server.results[0]
