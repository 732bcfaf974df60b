"""A prompt that a simulated server works on, and the blocks that cross links for it."""

from dataclasses import dataclass, field

from sglang_cake.loading.cost_model import StepWork
from sglang_cake.loading.meet import BlockState, Meet
from sglang_cake.loading.planner import Progress, device_work
from sglang_cake.simulator.machine import Source
from sglang_cake.simulator.race_records import Race


@dataclass(slots=True, eq=False)
class Live:
    """A prompt that is not finished."""

    race: Race
    meet: Meet
    stored: int
    ready_s: float  # when its first block can begin to cross a link
    keep: int | None = None
    planned: bool = False  # in the step being formed
    since_s: float | None = None  # since when the link owes it a block; None: is not being served
    begun: bool = False
    waits_since_s: float | None = None
    decoded: int = 0
    reading: set[int] = field(default_factory=set)

    def progress(self, now: float) -> Progress:
        since_s = 0.0 if self.since_s is None else now - self.since_s
        return Progress(since_s, self.begun, self.keep)

    @property
    def in_prefill(self) -> bool:
        return self.meet.front < self.race.prompt.prompt_tokens

    @property
    def to_compute(self) -> StepWork:
        """What it computes, as far as its loads let it."""
        return device_work(self.meet.view(), self.keep)

    @property
    def to_land(self) -> int:
        """Blocks that it waits for."""
        return self.meet.view().states.count(BlockState.WANTED)

    def wanted(self, source: Source) -> int | None:
        """The block to read next, the last one first."""
        if self.keep is None:
            return None
        view = self.meet.view()
        end = len(view.states)
        while (found := view.states.rfind(BlockState.WANTED, 0, end)) >= 0:
            block, end = view.first + found, found
            if block < self.keep:
                return None
            held = source.holds is None or block < source.holds
            if block not in self.reading and held:
                return block
        return None

    def waits(self, yes: bool, now: float) -> None:
        """Whether it waits for its loads from now on, though its turn has come."""
        if yes:
            self.waits_since_s = now if self.waits_since_s is None else self.waits_since_s
        elif self.waits_since_s is not None:
            self.race.waited_s += now - self.waits_since_s
            self.waits_since_s = None

    def attach(self) -> None:
        """What has landed at the front joins the tree."""
        while (span := self.meet.island()) is not None:
            self.race.loaded_tokens += span.tokens
            self.meet.attach(span)


@dataclass(slots=True, eq=False)
class Crossing:
    """A block that crosses a link."""

    live: Live
    block: int
    source: Source
    began_s: float
    work_s: float  # what it takes at full speed
    first: bool

    def to_come(self, now: float) -> float:
        """The share of its bytes that is not there."""
        return 1 - min(1.0, self.source.speed.work_s(self.began_s, now) / self.work_s)

    def there_s(self, share: float = 1.0) -> float:
        """When the first `share` of its bytes is there: they cross evenly."""
        return self.source.speed.done_s(self.began_s, self.work_s * share)
