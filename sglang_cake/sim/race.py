"""One prompt on a virtual clock, decided by the very code that decides in the server.

`Meet`, `next_step`, `PrefillFit` and `LoadFit` are the server's own; only the clock, the device and
the link are models: a step takes what its true cost says at the present speed, blocks cross the
link one after another, last block first, down to where the plan says that loading is worth it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_cake.read.cost import Costs, LoadCost, LoadFit, PrefillCost, PrefillFit, work_of
from sglang_cake.read.meet import BlockState, Meet
from sglang_cake.read.plan import Mode, Progress, next_step, worth_loading
from sglang_cake.sim.trace import Speed

POLL_S = 0.0005  # how soon a waiting scheduler looks again


@dataclass(frozen=True, slots=True)
class Machine:
    """The true costs.

    Attributes:
        noise: `(step)` is a factor on the time of the step of that number.
        meet_s: what becoming part of the tree costs, per attach.
    """

    prefill: PrefillCost
    load: LoadCost
    device: Speed = field(default_factory=Speed)
    link: Speed = field(default_factory=Speed)
    noise: Callable[[int], float] = lambda step: 1.0
    meet_s: float = 0.0


@dataclass(slots=True)
class Knowledge:
    """What the server has learned so far; a race adds to it."""

    prefill: PrefillFit
    load: LoadFit

    @classmethod
    def of(cls, machine: Machine) -> "Knowledge":
        """Of a server that has seen this machine for long, at full speed."""
        prefill, load = machine.prefill, machine.load
        known = cls(
            PrefillFit(PrefillCost(*_numbers(prefill), error=0.02)),
            LoadFit(LoadCost(load.latency_s, load.block_s, load.copy_s, 0.02, load.depth)),
        )
        known.load.measured = True
        return known

    @property
    def costs(self) -> Costs:
        return Costs(self.prefill.cost, self.load.cost)


@dataclass(frozen=True, slots=True)
class Lap:
    """One step of a race: tokens `[start, stop)` at `[begin_s, end_s)`."""

    start: int
    stop: int
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Race:
    """What happened."""

    ttft_s: float = 0.0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    wasted_blocks: int = 0
    waited_s: float = 0.0
    laps: list[Lap] = field(default_factory=list)
    landings: list[tuple[float, int]] = field(default_factory=list)


class _Link:
    """Blocks of one prompt crossing the link, last one first."""

    def __init__(self, machine: Machine, knowledge: Knowledge) -> None:
        self._machine = machine
        self._fit = knowledge.load
        self._reading: tuple[int, float, float] | None = None  # block, began, done
        self._last_s = 0.0
        self._first = True
        self.keep: int | None = 0
        self.since_s = 0.0

    def until(self, now: float, meet: Meet, race: Race) -> None:
        """Let the link work up to `now`."""
        while True:
            if self._reading is None:
                block = _next_wanted(meet, self.keep)
                if block is None:
                    self._last_s = now
                    return
                work_s = self._machine.load.block_s + (
                    self._machine.load.latency_s if self._first else 0.0
                )
                done_s = self._machine.link.done_s(self._last_s, work_s)
                self._reading = (block, self._last_s, done_s)
            block, began_s, done_s = self._reading
            if done_s > now + 1e-12:
                return
            self._reading, self._last_s = None, done_s
            self._fit.landed(done_s - began_s, first=self._first)
            self._first = False
            self.since_s = done_s
            race.landings.append((done_s, block))
            if not meet.landed(block):
                race.wasted_blocks += 1

    def fence(self, fence: int, now: float, race: Race) -> None:
        """Compute owns the blocks below `fence`."""
        if self._reading is not None and self._reading[0] < fence:
            race.wasted_blocks += 1
            self._reading, self._last_s = None, now

    @property
    def progress(self) -> Callable[[float], Progress]:
        return lambda now: Progress(now - self.since_s, not self._first, self.keep or 0)


def run_race(
    machine: Machine,
    prompt_tokens: int,
    *,
    chunk_tokens: int,
    block_tokens: int = 128,
    mode: Mode = "auto",
    stored_blocks: int | None = None,
    knowledge: Knowledge | None = None,
) -> Race:
    """Restore a prompt of which the first `stored_blocks` full blocks (None: all) are stored."""
    known = knowledge or Knowledge.of(machine)
    meet = Meet(
        block_tokens=block_tokens,
        page_tokens=1,
        limit_tokens=prompt_tokens - 1,
        prompt_tokens=prompt_tokens,
    )
    count = prompt_tokens // block_tokens if stored_blocks is None else stored_blocks
    loads = mode != "compute" and count > 0
    if loads and mode == "auto":
        loads = worth_loading(
            meet.view(), [b < count for b in range(meet.blocks)], chunk_tokens, known.costs
        )
    if loads:
        meet.found([b < count for b in range(meet.blocks)])
    race, link, now = Race(), _Link(machine, known), 0.0
    while meet.front < prompt_tokens:
        link.until(now, meet, race)
        while (span := meet.island()) is not None:
            race.loaded_tokens += span.tokens
            meet.attach(span)
            now += machine.meet_s
        step = next_step(
            meet.view(),
            mode=mode,
            chunk_tokens=chunk_tokens,
            costs=known.costs,
            progress=link.progress(now),
        )
        link.keep = step.keep
        if step.keep is None:
            meet.give_up()
        if step.wait:
            pause_s = max(POLL_S, machine.load.block_s / 16)
            now, race.waited_s = now + pause_s, race.waited_s + pause_s
            continue
        begin, end_s = meet.front, _step_end(machine, meet.front, step.stop, now, len(race.laps))
        race.laps.append(Lap(begin, step.stop, now, end_s))
        race.computed_tokens += step.stop - begin
        link.fence(meet.claim(step.stop), now, race)
        known.prefill.observe(work_of(begin, step.stop), end_s - now)
        now = end_s
    race.ttft_s = now
    return race


def _step_end(machine: Machine, start: int, stop: int, now: float, number: int) -> float:
    work_s = machine.prefill.step_s(start, stop) * machine.noise(number)
    return machine.device.done_s(now, work_s)


def _next_wanted(meet: Meet, keep: int | None) -> int | None:
    if keep is None:
        return None
    view = meet.view()
    found = view.states.rfind(BlockState.WANTED)
    return view.first + found if found >= 0 and view.first + found >= keep else None


def _numbers(cost: PrefillCost) -> tuple[float, float, float, float]:
    return cost.fixed_s, cost.token_s, cost.pair_s, cost.decode_s
