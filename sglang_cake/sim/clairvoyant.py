"""The shortest time to first token that anybody could reach who knew device and links beforehand.

What can be loaded, the first `stored` tokens, is computed on `[0, x)` and loaded on `[x, stored)`;
then one more part of a step, or several, computes the rest, at least the last token. Both sides run
without a pause, chunks and blocks are divisible, and a step's fixed cost is shared out among the
tokens that a full step holds. Where KV comes layer by layer (`Machine.layers`), the loads may go on
until the last layer of the step after them begins, all of them layer by layer: C(x) + S (1 - 1/L) =
l (n - x) (theory C.2). So no schedule of whole chunks and blocks is faster, whatever the speeds of
device and links do meanwhile (`Machine.noise` must not be below 1). Exact: only the instant at
which both sides meet is found by bisection.
"""

from bisect import bisect_right
from collections.abc import Callable
from math import sqrt

from sglang_cake.read.cost import PrefillCost, StepWork, work_of
from sglang_cake.sim.ideal import Ideal
from sglang_cake.sim.machine import Machine

BISECTIONS = 100


def clairvoyant(
    machine: Machine,
    prompt_tokens: int,
    *,
    chunk_tokens: int,
    block_tokens: int = 128,
    stored_tokens: int | None = None,
) -> Ideal:
    """The optimum for one prompt that arrives at time 0.

    Args:
        stored_tokens: None: all but the last one. What a source does not hold counts as held.
    """
    limit = prompt_tokens - 1
    stored = limit if stored_tokens is None else min(stored_tokens, limit)
    computed = _compute_progress(machine, prompt_tokens, chunk_tokens)
    last = _Last(machine, chunk_tokens)
    ahead_s = last.ahead_s(stored, prompt_tokens)

    def meets(when_s: float) -> bool:  # the device is through with its part at `when_s`
        load_s = machine.device.done_s(when_s, ahead_s)
        return computed(when_s) + _loaded(machine, load_s, block_tokens) >= stored

    meet_s = _first(meets)
    split_s = last.done_s(meet_s, stored, prompt_tokens)
    alone_s = _first(lambda when_s: computed(when_s) >= prompt_tokens)
    if alone_s <= split_s:
        return Ideal(float(stored), alone_s)
    return Ideal(min(computed(meet_s), float(stored)), split_s)


class _Last:
    """The steps after everything else is there."""

    def __init__(self, machine: Machine, chunk_tokens: int) -> None:
        self._machine = machine
        self._chunk = chunk_tokens

    def ahead_s(self, start: int, stop: int) -> float:
        """Of the first step's work, what may be done before the loads are over."""
        if self._machine.others is not None:
            return 0.0  # the device does not wait for one among others
        first_s = self._machine.prefill.step_s(start, min(stop, start + self._chunk))
        return first_s * (1 - 1 / self._machine.layers)

    def done_s(self, begin_s: float, start: int, stop: int) -> float:
        if self._machine.others is None:
            work = self._machine.prefill.span_s(start, stop, self._chunk)
            return self._machine.device.done_s(begin_s, work)
        # Nobody knows which steps these are: as few others as there ever are.
        taken = min(self._machine.others(number) for number in range(64))
        cost = self._machine.prefill.beside(StepWork(taken))
        return self._machine.device.done_s(begin_s, cost.span_s(start, stop, self._chunk - taken))


def _first(holds: Callable[[float], bool]) -> float:
    """The first instant from which on `holds` is true."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _loaded(machine: Machine, when_s: float, block_tokens: int) -> float:
    """Tokens that all links together can have brought by then."""
    sources = machine.sources
    begin_s = min(source.load.latency_s for source in sources)
    if when_s <= begin_s:
        return 0.0
    return sum(
        block_tokens * source.speed.work_s(begin_s, when_s) / source.load.block_s
        for source in sources
    )


def _compute_progress(
    machine: Machine, prompt_tokens: int, chunk_tokens: int
) -> Callable[[float], float]:
    """Tokens that can have been computed by an instant."""
    if machine.others is not None:
        return _among_others(machine, prompt_tokens, chunk_tokens)
    cost = machine.prefill
    linear = cost.fixed_s / chunk_tokens + cost.token_s + cost.pair_s / 2

    def computed(when_s: float) -> float:
        return _solve(linear, cost.pair_s / 2, machine.device.work_s(0.0, when_s))

    return computed


def _solve(linear: float, square: float, total: float) -> float:
    """The x >= 0 with linear * x + square * x^2 = total."""
    if square * total <= 1e-15 * linear * linear:
        return total / linear
    return (sqrt(linear * linear + 4 * square * total) - linear) / (2 * square)


def _among_others(
    machine: Machine, prompt_tokens: int, chunk_tokens: int
) -> Callable[[float], float]:
    """As above, beside other users: every step takes what they leave, from the first one on."""
    assert machine.others is not None
    cost: PrefillCost = machine.prefill
    times, fronts, number = [0.0], [0.0], 0
    while fronts[-1] < prompt_tokens:
        start = int(fronts[-1])
        taken = machine.others(number)
        stop = min(prompt_tokens, start + max(0, chunk_tokens - taken))
        took_s = cost.work_s(StepWork(taken) + work_of(start, stop))
        times.append(machine.device.done_s(times[-1], took_s))
        fronts.append(float(stop))
        number += 1

    def computed(when_s: float) -> float:
        i = min(bisect_right(times, when_s) - 1, len(times) - 2)
        share = min(1.0, (when_s - times[i]) / (times[i + 1] - times[i]))
        return fronts[i] + share * (fronts[i + 1] - fronts[i])

    return computed
