"""Replays a trace of requests against an eviction policy: the store's own, not a copy.

One tier has room for a fixed number of blocks. Requests come in the order of the file, each at one
instant:

1. Hits are counted: the leading resident blocks; islands are all resident blocks.
2. The request's blocks are pinned.
3. Other blocks are evicted until the missing ones fit.
4. The request's blocks are inserted or touched, the last one first, so that the head is the most
   recent.

Only blocks of the input count; the cold start is included. `BeladyPolicy` and `seconds_bound` are
limits that no policy can beat, since they know the future. With admission, which may leave blocks
out, only `seconds_bound` is one.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sglang_cake.loading.cost_model import PrefillCost
from sglang_cake.simulator.request_traces import Trace, TraceRequest, next_uses
from sglang_cake.stores.eviction.classic import RankedPolicy
from sglang_cake.stores.eviction.policy import AccessContext, Benefit, EvictionPolicy, Usage, admits
from sglang_cake.stores.eviction.reuse_model import Unlocked
from sglang_cake.stores.reported_accesses import ConversationTracker, KnownPrompt


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """A model on a machine with a link to its store."""

    prefill: PrefillCost
    load_s_per_token: float

    def benefit(self, block_tokens: int) -> Benefit:
        """The same costs for the `cake` policy."""
        return Benefit(
            block_tokens,
            self.prefill.token_s,
            self.prefill.pair_s,
            self.load_s_per_token * block_tokens,
        )


class SavedTime:
    """What stored blocks save of the time to first token, for prompts of one block size.

    The prompt is computed from the front, block by block, while its stored blocks land from the
    back. A landed block is skipped; a block that will land before it could be computed is waited
    for. Not included: the wait for other requests, the fixed part of a step, half a step lost at
    the meet.
    """

    def __init__(self, shape: ReplayShape, block_tokens: int) -> None:
        self._shape = shape
        self._block_tokens = block_tokens
        self._load_s = shape.load_s_per_token * block_tokens
        self._compute_s: list[float] = []

    def saved_s(self, stored: Sequence[bool], tokens: int) -> float:
        """Seconds. Args: stored: for each of the prompt's blocks; tokens: of the prompt."""
        compute_s = self.block_s(len(stored), tokens)
        left = sum(stored)
        now_s = 0.0
        for there, cost_s in zip(stored, compute_s, strict=True):
            if there:
                lands_s = left * self._load_s
                left -= 1
                if lands_s <= now_s + cost_s:
                    now_s = max(now_s, lands_s)
                    continue
            now_s += cost_s
        return sum(compute_s) - now_s

    def block_s(self, blocks: int, tokens: int) -> list[float]:
        """Seconds to compute each of the first `blocks` blocks of a prompt of `tokens`."""
        size = self._block_tokens
        while len(self._compute_s) < blocks:
            position = len(self._compute_s)
            self._compute_s.append(self._span_s(position * size, (position + 1) * size))
        costs = self._compute_s[:blocks]
        if costs:
            costs[-1] = self._span_s((blocks - 1) * size, min(tokens, blocks * size))
        return costs

    def _span_s(self, start: int, stop: int) -> float:
        step_s = self._shape.prefill.step_s(start, stop)
        return step_s - self._shape.prefill.fixed_s if stop > start else 0.0


def _dense(
    parameters: float, hidden: int, layers: int, *, flops: float, link_bytes_per_s: float
) -> ReplayShape:
    """A dense transformer with 8 KV heads of 128 numbers of 16 bits: 2 FLOPs per parameter and
    token, 4 x hidden per layer and pair. Args: flops: that prefill reaches, a second."""
    prefill = PrefillCost(0.0, 2 * parameters / flops, 4 * hidden * layers / flops)
    return ReplayShape(prefill, 2 * layers * 8 * 128 * 2 / link_bytes_per_s)


# Half of the peak of an A100 (312 TFLOP/s) in prefill.
SHAPES = {
    # Llama-3.1-8B on one A100, a 32 Gbit/s link: the Cake paper's middle setting.
    "8b": _dense(8e9, 4096, 32, flops=156e12, link_bytes_per_s=4e9),
    # Llama-3.1-70B on eight A100, a 10 Gbit/s link.
    "70b": _dense(70e9, 8192, 80, flops=8 * 140e12, link_bytes_per_s=1.25e9),
}


@dataclass(slots=True)
class ReplayCounts:
    refs: int = 0
    hits: int = 0  # leading resident blocks
    islands: int = 0  # all resident blocks
    tokens: int = 0
    hit_tokens: int = 0
    second_half_refs: int = 0  # of the second half of the requests
    second_half_hits: int = 0
    written: int = 0
    distinct_written: int = 0  # of these, blocks that were never written before
    evictions: int = 0
    evicting_s: float = 0.0
    saved_s: list[float] = field(default_factory=list)  # of each shape

    def figures(self) -> dict[str, float]:
        """As `trace replay --json` names them. A written block was written `write_amplification`
        times on average, and the policy takes `us_per_eviction` to choose one block."""
        return {
            "refs": self.refs,
            "hits": self.hits,
            "hit_ratio": self.hits / max(1, self.refs),
            "byte_hit_ratio": self.hit_tokens / max(1, self.tokens),
            "second_half_hit_ratio": self.second_half_hits / max(1, self.second_half_refs),
            "island_hit_ratio": self.islands / max(1, self.refs),
            "written_blocks": self.written,
            "write_amplification": self.written / max(1, self.distinct_written),
            "evictions": self.evictions,
            "us_per_eviction": 1e6 * self.evicting_s / self.evictions if self.evictions else 0.0,
        }


class Replay:
    """One run of a trace.

    Args:
        clocks: saved time is counted for each of them.
        leaf: evict only blocks without a resident child (the next block of any prompt).
        told_turns: use the conversation turns that the trace states, where it does, instead of
            those that the server detects.
        min_benefit_ratio: which blocks are written, as for `admits`.
        benefit: costs from which the saved time of a block follows.
        head_last: the head is the most recent of a request's blocks; otherwise its tail is.
    """

    def __init__(
        self,
        trace: Trace,
        policy: EvictionPolicy,
        capacity_blocks: int,
        *,
        clocks: Sequence[SavedTime] = (),
        leaf: bool = False,
        told_turns: bool = False,
        min_benefit_ratio: float = 0.0,
        benefit: Benefit | None = None,
        head_last: bool = True,
    ) -> None:
        self._trace = trace
        self._policy = policy
        self._capacity = capacity_blocks
        self._clocks = clocks
        self._leaf = leaf
        self._told_turns = told_turns
        self._min_benefit_ratio = min_benefit_ratio
        self._benefit = benefit or Benefit()
        self._head_last = head_last
        self._resident: dict[int, int] = {}  # the trace's id of a block -> the policy's
        self._parent: dict[int, int] = {}  # of resident blocks, both by the trace's id
        self._children: dict[int, int] = {}  # how many are resident
        self._conversations = ConversationTracker()
        self._next_block = 0
        self._written: set[int] = set()
        self.outcome = ReplayCounts(saved_s=[0.0] * len(clocks))

    def run(self) -> ReplayCounts:
        for _ in self.steps():
            pass
        return self.outcome

    def steps(self) -> Iterator[int]:
        """Replay one request at a time; yields how many are done."""
        half = len(self._trace.requests) // 2
        for index, request in enumerate(self._trace.requests):
            self._count(request, second_half=index >= half)
            self._serve(request)
            yield index + 1

    def _count(self, request: TraceRequest, *, second_half: bool) -> None:
        stored = [block in self._resident for block in request.blocks]
        hits = stored.index(False) if False in stored else len(stored)
        out = self.outcome
        out.refs += len(stored)
        out.hits += hits
        out.islands += sum(stored)
        out.tokens += request.tokens
        out.hit_tokens += min(request.tokens, hits * self._trace.block_tokens)
        if second_half:
            out.second_half_refs += len(stored)
            out.second_half_hits += hits
        if True in stored:
            for number, clock in enumerate(self._clocks):
                out.saved_s[number] += clock.saved_s(stored, request.tokens)

    def _serve(self, request: TraceRequest) -> None:
        self._policy.refresh(request.at_s)
        full_blocks = request.blocks[: request.tokens // self._trace.block_tokens]
        turn = self._conversations.turn_of(full_blocks)
        if self._told_turns and request.turn is not None:
            turn = request.turn
        reach = len(request.blocks)
        self._conversations.record(full_blocks, KnownPrompt(turn, len(full_blocks)))
        missing = [block for block in request.blocks if block not in self._resident]
        first = self._usage(0, request.at_s, AccessContext(request.workload, turn, 0, reach))
        ratio = self._min_benefit_ratio
        if ratio and not admits(self._policy, first, self._benefit, ratio):
            for block in missing:  # its blocks are of one class and of one prompt
                self._policy.record_rejected(replace(first, ident=block))
            missing = []
        self._evict(len(self._resident) + len(missing) - self._capacity, request)
        room = self._capacity - len(self._resident)
        admitted = set(missing[:room])  # all, but of a prompt that is longer than the cache
        for position in reversed(range(reach)) if self._head_last else range(reach):
            block = request.blocks[position]
            context = AccessContext(request.workload, turn, position, reach)
            if block in self._resident:
                self._policy.touch(self._resident[block], request.at_s, 1, context)
            elif block in admitted:
                self._resident[block] = self._next_block
                self._policy.add(self._next_block, self._usage(block, request.at_s, context))
                self._next_block += 1
                if self._leaf and position:
                    self._parent[block] = parent = request.blocks[position - 1]
                    self._children[parent] = self._children.get(parent, 0) + 1
        self.outcome.written += len(admitted)
        self._written |= admitted
        self.outcome.distinct_written = len(self._written)

    def _usage(self, block: int, at_s: float, context: AccessContext) -> Usage:
        # A byte a token: only proportions matter.
        return Usage(self._trace.block_tokens, at_s, at_s, 0, block, context)

    def _evict(self, blocks: int, request: TraceRequest) -> None:
        if blocks <= 0:
            return
        pinned = set(request.blocks)
        spared: dict[int, tuple[int, Usage]] = {}
        began_s = time.perf_counter()
        while blocks > 0:
            popped = self._policy.pop(request.at_s)
            if popped is None:
                break
            block = popped[1].ident
            if block in pinned or (self._leaf and self._children.get(block)):
                spared[block] = popped
                continue
            del self._resident[block]
            self.outcome.evictions += 1
            blocks -= 1
            if self._leaf:
                self._orphan(block, pinned, spared)
        for number, usage in spared.values():
            self._policy.give_back(number, usage)
        self.outcome.evicting_s += time.perf_counter() - began_s

    def _orphan(self, block: int, pinned: set[int], spared: dict[int, tuple[int, Usage]]) -> None:
        """A block was evicted: its parent may be evicted now if it has no other child."""
        parent = self._parent.pop(block, None)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in spared and parent not in pinned:
                self._policy.give_back(*spared.pop(parent))


class BeladyPolicy(RankedPolicy):
    """Evicts the block whose next use is farthest (Belady, "A study of replacement algorithms for a
    virtual-storage computer", 1966); of the blocks of one request, the last one.

    Blocks have one size and every missing block must be inserted, so no policy has more resident
    blocks at their uses. A prefix is used whenever its continuation is, and so is evicted after it:
    the leading hits are the same blocks.

    Each call of `refresh` is the beginning of the next request.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(lambda block, usage: (-self._next[usage.ident], -usage.context.position))
        self._coming = zip(trace.requests, next_uses(trace), strict=True)
        self._next: dict[int, int] = {}  # by block, the number of the next request that uses it

    def refresh(self, now_s: float, unlocked: Unlocked = contextlib.nullcontext) -> None:
        request, uses = next(self._coming)
        self._next.update(zip(request.blocks, uses, strict=True))


def seconds_bound(trace: Trace, capacity_blocks: int, clock: SavedTime) -> float:
    """An upper bound of the seconds that any policy can save: the smaller of two relaxations.

    - A block saves at most its computing time, and for its next use it must stay resident since the
      last one. Capacity bounds only the average over the trace, and a block may stay in part (a
      fractional knapsack: PFOO-L of Berger et al., "Practical bounds on optimal caching with
      variable object sizes", 2018, with these weights).
    - No request saves more than with all earlier blocks stored. Without the last one it may save
      more, if the prompt fills that block in part: the load may take longer than its few tokens.
    """
    intervals: list[tuple[float, int, float]] = []  # (seconds per room, room, seconds)
    at_best_s = 0.0
    costs = [clock.block_s(len(r.blocks), r.tokens) for r in trace.requests]
    places = [{block: i for i, block in enumerate(r.blocks)} for r in trace.requests]
    seen: set[int] = set()
    for index, later in enumerate(next_uses(trace)):
        request = trace.requests[index]
        earlier = [block in seen for block in request.blocks]
        without_last = [*earlier[:-1], False]
        at_best_s += max(clock.saved_s(s, request.tokens) for s in (earlier, without_last))
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
