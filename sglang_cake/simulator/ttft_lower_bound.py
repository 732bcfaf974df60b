"""A lower bound, T*, of the time to first token of one prompt, if all speeds were known beforehand.

Let t be the time at which the first step begins that reads all loaded KV. By then the device has
computed at most C(t) tokens, and the links have brought L(t). A gap between the two is left, and
the tail that no store has; computing both takes R(t) more seconds. T* is the least t + R(t) over
all t, or the time to compute everything. The bound assumes the best:

- Chunks and blocks are divisible, and both sides run without a pause.
- The gap has the cheapest tokens possible, and is computed in the same steps as the tail, as few as
  can hold both.
- Beside other users, steps start at time 0. The bound may pick any step that has begun by t, as if
  all earlier steps were for others alone, and takes the best choice.
- Where KV arrives layer by layer (`Machine.layers`) and no other user is on the device, the loads
  go on until the last layer of the step at t begins, all of them layer by layer:
  C(x) + S (1 - 1/L) = l (n - x) (docs/theory.md).

So no schedule of whole chunks and blocks is faster, however the speeds of device and links change
(`Machine.noise` must not be below 1). C(t) is exact: full steps, and the completed part of the step
at t. The minimum is found by branch and bound, from below, to TOLERANCE.

Padding to the sizes of graphs is left out. A step over [a, b) pays p a for its prefix
(`PrefillCost.prefix_s`, p). Only the prefix of the last step is charged, and the larger of two
bounds is kept, for a prompt of n tokens and chunks of c:

- It begins at n - c at the earliest, so it pays at least p (n - c).
- It pays p n less p for each of its tokens. If all tokens cost p less, p n is added.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace

from sglang_cake.loading.cost_model import PrefillCost, StepWork, pairs
from sglang_cake.simulator.ideal_ttft import Ideal
from sglang_cake.simulator.machine import Machine, Speed

TOLERANCE = 2e-4
BISECTIONS = 40
MOST_STEPS = 100_000  # that are considered


def ttft_lower_bound(
    machine: Machine,
    prompt_tokens: int,
    *,
    chunk_tokens: int,
    block_tokens: int = 128,
    stored_blocks: int | None = None,
) -> Ideal:
    """The bound for one prompt that arrives at time 0, and how far it computes before that t.

    Args:
        stored_blocks: how many of its first full blocks are stored, in every store; None: all.
    """
    blocks = prompt_tokens // block_tokens
    count = blocks if stored_blocks is None else min(stored_blocks, blocks)
    stored = min(count * block_tokens, prompt_tokens - 1)
    if machine.end_blocks:
        stored -= stored % block_tokens
    prefix_s = machine.prefill.prefix_s
    plain = replace(machine.prefill, prefix_s=0.0, graph_tokens=())

    def bound(cost: PrefillCost, prefix_tokens: int) -> Ideal:
        here = replace(machine, prefill=cost)
        ideal = _lower_bound(here, prompt_tokens, chunk_tokens, block_tokens, stored)
        steady = machine.device == Speed()  # otherwise the last step may be quicker
        return replace(ideal, ttft_s=ideal.ttft_s + steady * prefix_s * prefix_tokens)

    if not prefix_s:
        return bound(plain, 0)
    cheaper = replace(plain, token_s=plain.token_s - prefix_s)
    bounds = bound(plain, max(0, prompt_tokens - chunk_tokens)), bound(cheaper, prompt_tokens)
    return max(bounds, key=lambda ideal: ideal.ttft_s)


def _lower_bound(
    machine: Machine, prompt_tokens: int, chunk_tokens: int, block_tokens: int, stored: int
) -> Ideal:
    device = _Device(machine, prompt_tokens, chunk_tokens)
    early = 1 - 1 / machine.layers if machine.others is None and not machine.end_blocks else 0.0

    def bound_s(begin_s: float, end_s: float) -> float:
        """A lower bound for all t between these."""
        computed = min(device.computed(end_s), float(stored))

        def missing(gap: float) -> float:
            """Tokens still missing when the last layer begins of the step that computes the gap."""
            ahead_s = early * device.first_s(gap, stored) if early else 0.0
            load_s = machine.device.done_s(end_s, ahead_s)
            return stored - computed - _loaded(machine, load_s, block_tokens)

        most = stored - computed
        if missing(most) == most:
            return device.alone_s  # nothing is loaded
        # The more that step computes, the longer the loads go on.
        gap = _least(missing, most) if early else max(0.0, missing(0.0))
        work_s = device.rest_s(computed, gap, stored, end_s)
        return min(device.alone_s, machine.device.done_s(begin_s, work_s))

    best_s = 0.0
    least_s = device.alone_s
    parts = [(bound_s(0.0, least_s), 0.0, least_s)]
    while parts[0][0] < least_s * (1 - TOLERANCE):
        _, begin_s, end_s = heapq.heappop(parts)
        middle_s = (begin_s + end_s) / 2
        least_s, best_s = min((least_s, best_s), (bound_s(middle_s, middle_s), middle_s))
        for part in ((begin_s, middle_s), (middle_s, end_s)):
            heapq.heappush(parts, (bound_s(*part), *part))
    computed = device.computed(best_s) if best_s else stored
    return Ideal(min(computed, float(stored)), min(parts[0][0], least_s))


class _Device:
    """The prompt's tokens that the device can compute by a time, in steps as full as others leave
    them, and the completed part of the last step.

    Attributes:
        alone_s: when all tokens are computed, without loads.
    """

    def __init__(self, machine: Machine, prompt_tokens: int, chunk_tokens: int) -> None:
        self._machine = machine
        self._prompt = prompt_tokens
        self._chunk = chunk_tokens
        # Sums over the first i steps:
        self._budget_tokens = [0]  # tokens of the budgets that others leave
        self._bare_s = [0.0]  # time without tokens of the prompt
        self._full_s = [0.0]  # time with as many of its tokens as fit
        while self._budget_tokens[-1] < prompt_tokens:
            self._extend()
            start, stop = (min(tokens, prompt_tokens) for tokens in self._budget_tokens[-2:])
            overhead_s = self._bare_s[-1] - self._bare_s[-2]
            self._full_s.append(self._full_s[-1] + overhead_s + self.tokens_s(start, stop))
        self.alone_s = machine.device.done_s(0.0, self._full_s[-1])

    def computed(self, when_s: float) -> float:
        """Tokens of the prompt that can have been computed by then."""
        work_s = self._machine.device.work_s(0.0, when_s)
        i = min(bisect_right(self._full_s, work_s), len(self._full_s) - 1) - 1
        overhead_s = self._bare_s[i + 1] - self._bare_s[i]
        inside_s = work_s - self._full_s[i] - overhead_s
        start, stop = self._budget_tokens[i : i + 2]
        return min(start + self._tokens_in(inside_s, start), float(stop), float(self._prompt))

    def rest_s(self, computed: float, gap: float, stored: int, when_s: float) -> float:
        """Work that is left at `when_s`: the gap after the computed tokens, and the tail."""
        tokens_s = self.tokens_s(computed, computed + gap) + self.tokens_s(stored, self._prompt)
        tokens = gap + self._prompt - stored
        return tokens_s + min(self._overhead_s(i, tokens) for i in self._steps_by(when_s))

    def first_s(self, gap: float, stored: int) -> float:
        """Work of the first step over gap and tail, at most."""
        tokens = min(float(self._chunk), gap + self._prompt - stored)
        return self._machine.prefill.fixed_s + self.tokens_s(self._prompt - tokens, self._prompt)

    def tokens_s(self, start: float, stop: float) -> float:
        """Work of these tokens, without the fixed costs of steps."""
        cost = self._machine.prefill
        return cost.token_s * (stop - start) + cost.pair_s * pairs(start, stop)

    def _tokens_in(self, work_s: float, start: int) -> float:
        """The x >= 0 with tokens_s(start, start + x) = work_s."""
        cost = self._machine.prefill
        linear, square = cost.token_s + cost.pair_s * (start + 0.5), cost.pair_s / 2
        if work_s <= 0 or square * work_s <= 1e-15 * linear * linear:
            return max(0.0, work_s) / linear
        return (math.sqrt(linear * linear + 4 * square * work_s) - linear) / (2 * square)

    def _steps_by(self, when_s: float) -> range:
        """Numbers of steps that may have begun by then, if earlier ones were for others alone."""
        if self._machine.others is None:
            return range(1)  # the device is idle until it is needed; all steps are alike
        work_s = self._machine.device.work_s(0.0, when_s)
        while self._bare_s[-1] <= work_s and len(self._bare_s) < MOST_STEPS:
            self._extend()
        return range(bisect_right(self._bare_s, work_s))

    def _overhead_s(self, first: int, tokens: float) -> float:
        """Fixed work of the steps from number `first` on that can hold `tokens`."""
        while self._budget_tokens[-1] - self._budget_tokens[first] < tokens:
            self._extend()
        last = bisect_left(self._budget_tokens, self._budget_tokens[first] + tokens)
        return self._bare_s[last] - self._bare_s[first]

    def _extend(self) -> None:
        taken = self._machine.others(len(self._budget_tokens) - 1) if self._machine.others else 0
        self._budget_tokens.append(self._budget_tokens[-1] + max(0, self._chunk - taken))
        self._bare_s.append(self._bare_s[-1] + self._machine.prefill.work_s(StepWork(taken)))


def _least(missing: Callable[[float], float], most: float) -> float:
    """The x in [0, most] with missing(x) = x, from below. Args: missing: falls with x."""
    if missing(0.0) <= 0:
        return 0.0
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if missing(middle) <= middle else (middle, high)
    return low


def _loaded(machine: Machine, when_s: float, block_tokens: int) -> float:
    """Tokens that all links together can have delivered by then, after the end state."""
    store_links = machine.store_links
    begin_s = min(store_link.load.latency_s for store_link in store_links)
    if when_s <= begin_s:
        return 0.0
    blocks = sum(
        store_link.speed.work_s(begin_s, when_s) / store_link.load.block_s
        for store_link in store_links
    )
    return block_tokens * max(0.0, blocks - machine.end_blocks)
