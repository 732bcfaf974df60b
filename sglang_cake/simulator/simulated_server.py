"""A server with many prompts on a virtual clock, decided by the very code that decides in the real
one.

`Meet`, `should_load`, `next_step`, `overlap_span`, `look_ahead`, `QueueEntry.of`, `order`,
`PrefillFit` and `LoadFit` are the server's own. Only the clock, the device, the links and the
forming of a batch are models: a step carries decoding requests first, then prompts in the order
that the policy gives, until its token budget is used up (as SGLang does with mixed chunks); blocks
cross each link one after another, last block first. A device that waits looks again when something
lands, and once in a block's time; as often as a real one while a last step may begin early.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from sglang_cake.loading.cost_model import Costs, StepWork, work_of
from sglang_cake.loading.meet import Meet
from sglang_cake.loading.planner import (
    Mode,
    Step,
    is_overdue,
    look_ahead,
    next_step,
    overlap_span,
    should_load,
)
from sglang_cake.loading.priority import QueueEntry, order
from sglang_cake.simulator.layered import layered_end_s
from sglang_cake.simulator.live_prompt import Crossing, Live
from sglang_cake.simulator.machine import Clock, Knowledge, Machine, Source
from sglang_cake.simulator.race_records import Lap, Prompt, Race, StepRecord

Policy = Literal["adaptive", "fcfs"]
NOTHING = StepWork(0, 0.0)
POLL_S = 0.0005  # how often a real server looks while nothing can run but a load is awaited


class Server:
    """One device and its links; hand it prompts, run the clock, look at `races` and `steps`.

    Args:
        chunk_tokens: budget of a step.
        policy: who gets the device and the links first; `fcfs` is the order of arrival.
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
        rule: Callable[..., Step] = next_step,
    ) -> None:
        self.races: list[Race] = []
        self.steps: list[StepRecord] = []
        self._machine = machine
        self._clock = clock
        self._chunk = chunk_tokens
        self._block = block_tokens
        self._mode: Mode = mode
        self._policy = policy
        self._rule = rule
        self._known = knowledge or Knowledge.of(machine)
        # As in the real server: the modes that benchmarks compare with do without.
        self._overlap = 1 - 1 / machine.layers if mode == "auto" else 0.0
        self._lives: list[Live] = []
        self._ranks: list[Live] = []
        self._links: list[tuple[Source, list[Crossing]]] = [(s, []) for s in machine.sources]
        self._landed_s = 0.0  # the last time that anything did
        self._busy = False
        self._free_s = 0.0  # when the step under way is predicted to be over
        self._poll_s = math.inf  # when it will look next

    def submit(self, prompt: Prompt) -> Race:
        """`prompt` will arrive at its time; its race fills in as the clock runs."""
        race = Race(prompt)
        self.races.append(race)
        self._clock.at(prompt.arrive_s, lambda: self._arrive(race))
        return race

    # ---- what happens ----

    def _arrive(self, race: Race) -> None:
        prompt = race.prompt
        meet = Meet(
            block_tokens=self._block,
            page_tokens=1,
            limit_tokens=prompt.prompt_tokens - 1,
            prompt_tokens=prompt.prompt_tokens,
        )
        count = meet.blocks if prompt.stored_blocks is None else prompt.stored_blocks
        live = Live(race, meet, count, self._clock.now + self._known_latency_s())
        stored = [b < count for b in range(meet.blocks)]
        if self._mode != "compute":
            meet.found(stored)
        self._lives.append(live)
        self._rank()
        self._revise([live])
        self._feed()
        self._step()

    def _known_latency_s(self) -> float:
        return min(source.load.latency_s for source in self._machine.sources)

    def _landed(self, link: int, crossing: Crossing) -> None:
        source, carried = self._links[link]
        if not carried or carried[0] is not crossing:
            return  # it was cancelled
        carried.clear()
        self._left(source)
        live, now = crossing.live, self._clock.now
        live.reading.discard(crossing.block)
        took_s = now - max(crossing.began_s, min(self._landed_s, now))
        if crossing.first:
            took_s = now - crossing.began_s + self._known_latency_s()
        self._known.load.fetched(took_s, first=crossing.first)
        self._landed_s = live.since_s = now
        live.begun = True
        live.race.landings.append((now, crossing.block))
        if not live.meet.landed(crossing.block):
            live.race.wasted_blocks += 1
        self._feed()
        self._step()

    def _stepped(self, work: StepWork, laps: Sequence[tuple[Live, Lap]], begin_s: float) -> None:
        now = self._clock.now
        self._busy = False
        self._known.prefill.observe(work, now - begin_s)
        for live in [x for x in self._lives if not x.in_prefill and x.decoded]:
            self._decoded(live)
        for live, lap in laps:
            live.race.laps.append(lap)
            if not live.in_prefill:
                live.race.first_token_s = now
                self._decoded(live)
        self._rank()
        self._feed()
        self._step()

    def _decoded(self, live: Live) -> None:
        live.decoded += 1
        if live.decoded == live.race.prompt.new_tokens:
            live.race.finish_s = self._clock.now
            self._lives.remove(live)

    def _polled(self, due_s: float) -> None:
        if due_s == self._poll_s:  # else it has looked earlier
            self._poll_s = math.inf
            self._step()

    # ---- what is decided ----

    def _own_costs(self, others: StepWork) -> Costs:
        """As they are for a prompt in a step that does `others` as well."""
        return self._costs.beside(others)

    @property
    def _costs(self) -> Costs:
        return replace(self._known.costs, overlap=self._overlap)

    def _revise(self, waiting: Sequence[Live]) -> None:
        """Whether to load what waits for its turn, given what goes before it."""
        now, number = self._clock.now, len(self.steps)
        taken = self._machine.others(number) if self._machine.others else 0
        others = StepWork(taken, 0.0, sum(1 for live in self._lives if live.decoded))
        chunk = max(1, self._chunk - taken - others.decodes)
        costs, ahead, changed = self._own_costs(others), StepWork(), False
        for live in self._ranks:
            if live in waiting and live.to_land:
                backlog_s = max(0.0, self._free_s - now) + costs.prefill.queue_s(ahead, chunk)
                loads = should_load(
                    live.meet.view(),
                    mode=self._mode,
                    chunk_tokens=chunk,
                    costs=replace(costs, backlog_s=backlog_s),
                    progress=live.progress(now),
                )
                if loads != (live.keep is not None):
                    changed = True
                    if loads:
                        live.keep = 0
                    else:
                        self._stop(
                            live, overdue=is_overdue(live.meet.view(), costs, live.progress(now))
                        )
            ahead += live.to_compute
        if changed:
            self._rank()

    def _stop(self, live: Live, *, overdue: bool) -> None:
        """Nothing of it is worth loading now; of a link that is late, nothing any more."""
        live.keep = None
        live.since_s = None
        if overdue:
            live.meet.give_up()
        self._cancel(live, live.meet.blocks)

    def _rank(self) -> None:
        """Who comes first, with the device and with the links."""
        now = self._clock.now
        waiting = [live for live in self._lives if live.in_prefill]
        if self._policy == "fcfs" or len(waiting) < 2:
            self._ranks = waiting
            return
        self._ranks = [waiting[i] for i in order([self._claimant(x, now) for x in waiting])]

    def _claimant(self, live: Live, now: float) -> QueueEntry:
        prompt, view = live.race.prompt, live.meet.view()
        waited_s = now - prompt.arrive_s
        if not live.stored:
            return QueueEntry(prompt.rid, None, waited_s)

        def remaining_s() -> float:
            return look_ahead(
                view,
                chunk_tokens=self._chunk,
                costs=self._costs,
                progress=live.progress(now),
            ).best_s

        return QueueEntry.of(
            prompt.rid,
            view,
            loads=live.keep is not None,
            remaining_s=remaining_s,
            waited_s=waited_s,
            begun=live.begun,
            chunk_tokens=self._chunk,
        )

    def _feed(self) -> None:
        """Every idle link begins the most urgent block that it has."""
        now = self._clock.now
        for number, (source, carried) in enumerate(self._links):
            if carried:
                continue
            first = True  # the link owes a block to the one that it works for first, to nobody else
            for live in self._ranks:
                block = live.wanted(source)
                if not live.reading and (block is None or not first):
                    live.since_s = None
                if block is None or carried:
                    continue
                if now >= live.ready_s:
                    self._read(number, source, live, block)
                else:
                    self._clock.at(live.ready_s, self._feed)
                    if first and live.since_s is None:
                        live.since_s = now
                first = False

    def _read(self, number: int, source: Source, live: Live, block: int) -> None:
        now = self._clock.now
        first = not live.begun and not live.reading
        live.reading.add(block)
        live.since_s = now if live.since_s is None else live.since_s
        work_s = source.load.block_s
        if source.hub is not None:
            source.hub.active += 1
            work_s *= source.hub.slowdown
        crossing = Crossing(live, block, source, now, work_s, first)
        self._links[number][1].append(crossing)
        self._clock.at(crossing.there_s(), lambda: self._landed(number, crossing))

    def _cancel(self, live: Live, below: int) -> None:
        """Its reads of blocks below that one end here."""
        for source, carried in self._links:
            if carried and carried[0].live is live and carried[0].block < below:
                live.reading.discard(carried[0].block)
                live.race.wasted_blocks += 1
                carried.clear()
                self._left(source)

    @staticmethod
    def _left(source: Source) -> None:
        if source.hub is not None:
            source.hub.active -= 1

    def _step(self) -> None:
        """Form the next batch and let the device begin it, unless it is at work."""
        if self._busy or not any(live.in_prefill or live.decoded for live in self._lives):
            return
        number = len(self.steps)
        decodes = sum(1 for live in self._lives if live.decoded)
        taken = self._machine.others(number) if self._machine.others else 0
        work = StepWork(taken, 0.0, decodes)
        parts: list[tuple[Live, int, int]] = []
        for live in list(self._ranks):
            live.planned = False
            left = self._chunk - decodes - work.tokens
            if not live.in_prefill:
                continue
            live.attach()
            start, stop = live.meet.front, self._decide(live, left, work) if left > 0 else 0
            if stop > start:
                parts.append((live, start, stop))
                work += work_of(start, stop)
        if not parts and not decodes and self._machine.others is None:
            if not self._begin_last_early(number):
                self._poll()
            self._feed()
            return
        self._begin(number, work, parts, taken)
        self._revise([live for live in self._ranks if not live.planned])
        self._rank()
        self._feed()

    def _decide(self, live: Live, left: int, work: StepWork) -> int:
        """How far this prompt computes in the step being formed."""
        now = self._clock.now
        step = self._rule(
            live.meet.view(),
            mode=self._mode,
            chunk_tokens=left,
            costs=self._own_costs(work),
            progress=live.progress(now),
        )
        live.planned = True
        if step.load_from is None:
            self._stop(live, overdue=step.overdue)
        live.keep = step.load_from
        live.waits(step.wait, now)
        return step.stop

    def _begin(
        self, number: int, work: StepWork, parts: Sequence[tuple[Live, int, int]], taken: int
    ) -> None:
        now = self._clock.now
        self._free_s = now + self._known.prefill.cost.work_s(work)
        took_s = self._machine.prefill.work_s(work) * self._machine.noise(number)
        end_s = self._machine.device.done_s(now, took_s)
        laps = []
        for live, start, stop in parts:
            self._claim(live, start, stop)
            laps.append((live, Lap(start, stop, now, end_s)))
        stored = sum(stop - start for live, start, stop in parts if live.stored)
        plain = sum(stop - start for live, start, stop in parts if not live.stored)
        self.steps.append(StepRecord(now, end_s, work.decodes, plain, stored, taken))
        self._busy = True
        self._clock.at(end_s, lambda: self._stepped(work, laps, now))

    def _claim(self, live: Live, start: int, stop: int) -> None:
        live.meet.claim(stop)
        live.race.computed_tokens += stop - start
        self._cancel(live, live.meet.fence)  # compute has claimed them

    def _begin_last_early(self, number: int) -> bool:
        """Begin the last step of a prompt that waits for its last blocks, if it is time for that.
        It holds the device, so nobody else may want it."""
        if not self._overlap or len(self._lives) > 1:
            return False
        (live,), machine, now = self._lives, self._machine, self._clock.now
        coming = {c.block: c for _, carried in self._links for c in carried}
        span = overlap_span(
            live.meet.view(),
            coming={block: crossing.to_come(now) for block, crossing in coming.items()},
            chunk_tokens=self._chunk,
            costs=self._own_costs(NOTHING),
        )
        if span is None:
            return False
        live.waits(False, now)
        tail = [c for c in coming.values() if c.block in live.meet.blocks_of(span)]
        start, stop = span.stop, live.race.prompt.prompt_tokens
        took_s = machine.prefill.work_s(work_of(start, stop)) * machine.noise(number)
        end_s = layered_end_s(
            now,
            took_s,
            machine.layers,
            machine.device,
            lambda share: max(crossing.there_s(share) for crossing in tail),
        )
        lap = Lap(start, stop, now, end_s)
        self.steps.append(StepRecord(now, end_s, 0, 0, stop - start))
        self._busy, self._free_s = True, end_s
        self._clock.at(end_s, lambda: self._overlapped(live, lap, [c.block for c in tail]))
        return True

    def _overlapped(self, live: Live, lap: Lap, tail: Sequence[int]) -> None:
        """The last step is over, which began while the blocks of `tail` were on their way."""
        before = live.meet.front
        live.attach()
        size, end = self._block, live.meet.front
        assert end == lap.start
        live.race.overlapped_tokens += sum(
            min(end, (block + 1) * size) - max(before, block * size) for block in tail
        )
        self._claim(live, lap.start, lap.stop)
        # It waited: what it took says nothing of other steps.
        self._stepped(StepWork(), [(live, lap)], lap.begin_s)

    def _poll(self) -> None:
        # As often as a real server only while a few ms matter: while a last step may begin early.
        alone = len(self._lives) == 1 and self._lives[0].to_land <= len(self._links)
        block_s = min(source.load.block_s for source in self._machine.sources)
        wait_s = 0.0 if self._overlap and alone else block_s
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
    rule: Callable[..., Step] = next_step,
) -> Server:
    """Serve `prompts` until all are finished; returns the server, with all that happened."""
    clock = Clock()
    server = Server(
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
