"""Simulated machines: true costs, speeds that change, links, shared stores, and a virtual clock."""

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sglang_cake.loading.cost_model import LoadCost, LoadFit, PrefillCost, PrefillFit, PromptCosts


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a shared device or link, piecewise constant: `values[i]` holds from `times_s[i]`
    on. 1 is the full speed. The last value is above 0, and holds until `repeat_s`, when the values
    begin again."""

    times_s: tuple[float, ...] = (0.0,)
    values: tuple[float, ...] = (1.0,)
    repeat_s: float = math.inf

    def __post_init__(self) -> None:
        grows = all(a < b for a, b in zip(self.times_s, self.times_s[1:], strict=False))
        if len(self.times_s) != len(self.values) or not self.times_s or not grows:
            raise ValueError("a speed needs a growing time for each value")
        if self.times_s[0] != 0 or min(self.values) < 0 or self.values[-1] <= 0:
            raise ValueError("a speed starts at time 0, is never negative, and ends above 0")
        if not self.repeat_s > self.times_s[-1]:
            raise ValueError("a speed repeats after its last time")

    def done_s(self, begin_s: float, work_s: float) -> float:
        """The end of work that begins at `begin_s` and takes `work_s` at full speed."""
        lap_s = begin_s - begin_s % self.repeat_s
        i = bisect_right(self.times_s, begin_s - lap_s) - 1
        stops = (*self.times_s[1:], self.repeat_s)
        now, left = begin_s, work_s
        while True:
            stop_s = lap_s + stops[i]
            possible = (stop_s - now) * self.values[i]
            if possible >= left:
                return now + left / self.values[i] if left > 0 else now
            left -= possible
            now = stop_s
            i += 1
            if i == len(self.times_s):
                i, lap_s = 0, stop_s

    def work_s(self, begin_s: float, end_s: float) -> float:
        """The work, in seconds at full speed, that fits into `[begin_s, end_s)`."""
        total, stops = 0.0, (*self.times_s[1:], self.repeat_s)
        lap_s = begin_s - begin_s % self.repeat_s
        while lap_s < end_s:
            for start_s, stop_s, value in zip(self.times_s, stops, self.values, strict=True):
                inside_s = min(lap_s + stop_s, end_s) - max(lap_s + start_s, begin_s)
                total += max(0.0, inside_s) * value
            lap_s += self.repeat_s
        return total


def layered_end_s(
    begin_s: float, work_s: float, layers: int, device: Speed, there_s: Callable[[float], float]
) -> float:
    """The end of a step that begins at `begin_s` while KV is on its way, layer by layer
    (docs/theory.md). A layer begins when the one before is computed and its own KV has arrived.

    Args:
        work_s: of all layers together, each the same, at the full speed of the device.
        there_s: `(share)` is when the first `share` of the KV has arrived; layer i of L needs the
            first (i + 1) / L.
    """
    at_s = begin_s
    for layer in range(layers):
        at_s = device.done_s(max(at_s, there_s((layer + 1) / layers)), work_s / layers)
    return at_s


class Clock:
    """Virtual time. Actions run in the order of their times, then in the order of the calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self._number = itertools.count()
        self._actions: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Run `action` at `when_s`, or now if that has passed."""
        heapq.heappush(self._actions, (max(when_s, self.now), next(self._number), action))

    def run(self) -> None:
        while self._actions:
            self.now, _, action = heapq.heappop(self._actions)
            action()


@dataclass(slots=True)
class SharedStore:
    """A store whose bandwidth several links share.

    Attributes:
        links: how many links it can feed at full speed. A block that begins while more are reading
            takes proportionally longer. Blocks under way keep their speed, which is right on
            average.
        active: links that are reading.
    """

    links: float
    active: int = 0

    @property
    def slowdown(self) -> float:
        return max(1.0, self.active / self.links)


@dataclass(frozen=True, slots=True)
class StoreLink:
    """A store and its link, with its true costs. One block crosses it at a time."""

    load: LoadCost
    speed: Speed = field(default_factory=Speed)
    shared_store: SharedStore | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The true costs of one server.

    Attributes:
        load, link: of its first store; `further` stores are read at the same time.
        noise: `(step)` is a factor on the time of the step of that number.
        others: `(step)` is how many tokens of the step's budget other users take. The device is
            never idle then: it steps for them while the simulated prompts wait. None: the device
            has only the simulated prompts.
        layers: of a model whose KV arrives layer by layer; 1: a step begins only when all KV that
            it reads has arrived.
        plan_s: with SGLang's overlap loop, the host's time to plan a step and launch it while the
            step before runs. No last step begins early then. None: a step is planned when the step
            before is over, and the host's time is a part of its cost.
        end_blocks: of one end state of the model; 0: it has none.
    """

    prefill: PrefillCost
    load: LoadCost
    device: Speed = field(default_factory=Speed)
    link: Speed = field(default_factory=Speed)
    noise: Callable[[int], float] = lambda step: 1.0
    others: Callable[[int], int] | None = None
    further: tuple[StoreLink, ...] = ()
    shared_store: SharedStore | None = None
    layers: int = 1
    plan_s: float | None = None
    end_blocks: int = 0

    @property
    def store_links(self) -> tuple[StoreLink, ...]:
        return (StoreLink(self.load, self.link, self.shared_store), *self.further)


@dataclass(slots=True)
class Knowledge:
    """The costs that the server has learned so far; serving adds to them."""

    prefill: PrefillFit
    load: LoadFit

    @classmethod
    def of(cls, machine: Machine) -> "Knowledge":
        """The knowledge of a server that has run on this machine for long, at full speed."""
        prefill, loads = machine.prefill, [store_link.load for store_link in machine.store_links]
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
    def costs(self) -> PromptCosts:
        return PromptCosts(self.prefill.cost, self.load.cost)
