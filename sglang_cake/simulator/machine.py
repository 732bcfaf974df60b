"""What the simulated machines are made of: true costs, links, stores that many share, a clock."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sglang_cake.loading.cost_model import Costs, LoadCost, LoadFit, PrefillCost, PrefillFit
from sglang_cake.simulator.speed_trace import Speed


class Clock:
    """Virtual time: acts happen in the order of their instants, then in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._number = itertools.count()
        self._acts: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        """Let `act` happen at `when_s`, at once if that has passed."""
        heapq.heappush(self._acts, (max(when_s, self.now), next(self._number), act))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._acts:
            self.now, _, act = heapq.heappop(self._acts)
            act()


@dataclass(slots=True)
class Hub:
    """A store that several links read from: together they get no more than it can give.

    Attributes:
        links: how many links it can feed at full speed. A block that begins while more are reading
            takes proportionally longer; those under way keep their pace, which is right on average.
    """

    links: float
    active: int = 0

    @property
    def slowdown(self) -> float:
        return max(1.0, self.active / self.links)


@dataclass(frozen=True, slots=True)
class Source:
    """Where blocks come from, and what that truly costs. One block crosses it at a time.

    Attributes:
        holds: how many of a prompt's stored blocks, from the first one on, are there; None: all.
    """

    load: LoadCost
    speed: Speed = field(default_factory=Speed)
    hub: Hub | None = None
    holds: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The true costs of one server.

    Attributes:
        load, link: of its first source; `further` are read at the same time as that one.
        noise: `(step)` is a factor on the time of the step of that number.
        others: `(step)` is how many tokens of the budget of the step of that number other users
            take. The device never rests then: it steps for them while the simulated prompts wait.
            None: the device has only the simulated prompts.
        layers: of the model whose KV comes layer by layer; 1: a step begins only when all that it
            reads is there.
    """

    prefill: PrefillCost
    load: LoadCost
    device: Speed = field(default_factory=Speed)
    link: Speed = field(default_factory=Speed)
    noise: Callable[[int], float] = lambda step: 1.0
    others: Callable[[int], int] | None = None
    further: tuple[Source, ...] = ()
    hub: Hub | None = None
    layers: int = 1

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.load, self.link, self.hub), *self.further)


@dataclass(slots=True)
class Knowledge:
    """What the server has learned so far; serving adds to it."""

    prefill: PrefillFit
    load: LoadFit

    @classmethod
    def of(cls, machine: Machine) -> "Knowledge":
        """Of a server that has seen this machine for long, at full speed."""
        prefill, loads = machine.prefill, [source.load for source in machine.sources]
        block_s = 1 / sum(1 / load.block_s for load in loads)
        latency_s = min(load.latency_s for load in loads)
        known = cls(
            PrefillFit(replace(prefill, error=0.02)),
            LoadFit(
                LoadCost(
                    latency_s,
                    block_s,
                    machine.load.copy_s,
                    error=0.02,
                    coming_s=max(load.block_s for load in loads),
                    depth=machine.load.depth,
                )
            ),
        )
        known.load.measured = True
        return known

    @property
    def costs(self) -> Costs:
        return Costs(self.prefill.cost, self.load.cost)
