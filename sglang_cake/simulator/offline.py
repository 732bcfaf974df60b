"""What no policy can beat, because it would have to know the future."""

from bisect import bisect_right

from sglang_cake.simulator.request_traces import Trace, next_uses
from sglang_cake.simulator.ttft import SavedTime
from sglang_cake.stores.eviction.heaps import BlockHeap
from sglang_cake.stores.eviction.policy import BasePolicy, Usage


class BeladyPolicy(BasePolicy):
    """The block whose next use is farthest goes first (Belady, "A study of replacement algorithms
    for a virtual-storage computer", 1966); of those of one request, the last one.

    Blocks have one size and every missing block must be inserted, so no policy has more resident
    blocks at their uses. Prefixes are used whenever what follows them is, and so go after it: the
    leading hits are the same blocks.

    It counts requests by the calls of `refresh`.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._uses: dict[int, list[int]] = {}
        for index, request in enumerate(trace.requests):
            for block in request.blocks:
                self._uses.setdefault(block, []).append(index)
        self._never = len(trace.requests)
        self._request = -1
        self._heap = BlockHeap()

    def refresh(self, now_s: float) -> None:
        self._request += 1

    def add(self, block: int, usage: Usage) -> None:
        self._usage[block] = usage
        uses = self._uses[usage.ident]
        later = bisect_right(uses, self._request)
        next_use = uses[later] if later < len(uses) else self._never
        self._heap.put(block, (-next_use, -usage.context.position))

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)
        self._heap.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        entry = self._heap.pop()
        return None if entry is None else (entry.block, self._usage.pop(entry.block))


def seconds_bound(trace: Trace, capacity_blocks: int, clock: SavedTime) -> float:
    """Seconds that no policy can save more than, as the smaller of two relaxations:

    - a block saves at most what computing it costs, and to be there for its next use it must stay
      from the last one on; capacity is asked for on average over the trace only, and a block may
      stay in part (a fractional knapsack: PFOO-L of Berger et al., "Practical bounds on optimal
      caching with variable object sizes", 2018, with these weights);
    - no request saves more than with everything stored.
    """
    intervals: list[tuple[float, int, float]] = []  # (seconds per room, room, seconds)
    at_best_s = 0.0
    costs = [clock.block_s(len(r.blocks), r.tokens) for r in trace.requests]
    places = [{block: i for i, block in enumerate(r.blocks)} for r in trace.requests]
    seen: set[int] = set()
    for index, later in enumerate(next_uses(trace)):
        request = trace.requests[index]
        at_best_s += clock.saved_s([block in seen for block in request.blocks], request.tokens)
        seen.update(request.blocks)
        for block, then in zip(request.blocks, later, strict=True):
            if then < len(costs):
                saved_s = costs[then][places[then][block]]
                intervals.append((saved_s / (then - index), then - index, saved_s))
    intervals.sort(reverse=True)
    room = capacity_blocks * (len(costs) - 1)
    knapsack_s = 0.0
    for _, taken, saved_s in intervals:
        if taken > room:
            knapsack_s += saved_s * room / taken
            break
        room -= taken
        knapsack_s += saved_s
    return min(knapsack_s, at_best_s)
