"""Replays a trace of requests against an eviction policy: the store's own, not a copy.

One tier of C blocks; requests in the order of the file, each at one instant:

1. its hit is as many leading blocks as are resident; islands are all that are resident;
2. its blocks are pinned;
3. others are evicted until the missing ones fit;
4. its blocks are inserted or touched, the last one first, so that the head is the most recent.

Only blocks of the input count; the cold start is included. `leaf`: only blocks whose children (the
next block of any prompt) are not resident may go; `block`: any may.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sglang_cake.simulator.request_traces import Trace, TraceRequest
from sglang_cake.simulator.ttft import SavedTime
from sglang_cake.stores.eviction.benefit import Benefit
from sglang_cake.stores.eviction.conversation import ConversationTracker
from sglang_cake.stores.eviction.policy import (
    ADMIT_ALL,
    AccessContext,
    AdmissionPolicy,
    EvictionPolicy,
    Usage,
)

BYTES_PER_TOKEN = 1  # every token's KV has the same size: only proportions matter


@dataclass(slots=True)
class Outcome:
    """What a replay counted."""

    refs: int = 0
    hits: int = 0  # leading resident blocks
    islands: int = 0  # all resident blocks
    tokens: int = 0
    hit_tokens: int = 0
    late_refs: int = 0  # of the second half of the requests
    late_hits: int = 0
    written: int = 0
    distinct_written: int = 0  # of these, blocks that were never written before
    evictions: int = 0
    evicting_s: float = 0.0
    saved_s: list[float] = field(default_factory=list)  # of each shape

    @property
    def hit_ratio(self) -> float:
        """Leading hits / references."""
        return self.hits / max(1, self.refs)

    @property
    def island_hit_ratio(self) -> float:
        """Resident blocks / references."""
        return self.islands / max(1, self.refs)

    @property
    def late_hit_ratio(self) -> float:
        """That of the second half of the requests."""
        return self.late_hits / max(1, self.late_refs)

    @property
    def byte_hit_ratio(self) -> float:
        """Leading hits, with a last block that is not full counting as much as is in it."""
        return self.hit_tokens / max(1, self.tokens)

    @property
    def write_amplification(self) -> float:
        """How often a block that was written at all had to be written; 0 without writes."""
        return self.written / self.distinct_written if self.written else 0.0

    @property
    def us_per_eviction(self) -> float:
        """What the policy takes to name one block; 0 without evictions."""
        return 1e6 * self.evicting_s / self.evictions if self.evictions else 0.0


class Replay:
    """One run of a trace.

    Args:
        clocks: what saved time is counted for.
        leaf: only blocks without resident children may go.
        told_turns: use the turns that the trace tells, where it does, not those that the server
            finds out.
        admission, benefit: which blocks are written at all, and what they save.
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
        admission: AdmissionPolicy = ADMIT_ALL,
        benefit: Benefit | None = None,
        head_last: bool = True,
    ) -> None:
        self._trace, self._policy, self._capacity = trace, policy, capacity_blocks
        self._clocks, self._leaf, self._told_turns = clocks, leaf, told_turns
        self._admission, self._benefit = admission, benefit or Benefit()
        self._head_last = head_last
        self._resident: dict[int, int] = {}  # the trace's id of a block -> the policy's
        self._idents: dict[int, int] = {}  # and back
        self._parent: dict[int, int] = {}  # of resident blocks, both by the trace's id
        self._children: dict[int, int] = {}  # how many are resident
        self._conversations = ConversationTracker()
        self._next_block = 0
        self._written: set[int] = set()
        self.outcome = Outcome(saved_s=[0.0] * len(clocks))

    def run(self) -> Outcome:
        """All of it."""
        for _ in self.steps():
            pass
        return self.outcome

    def steps(self) -> Iterator[int]:
        """One request at a time; yields how many are done."""
        half = len(self._trace.requests) // 2
        for index, request in enumerate(self._trace.requests):
            self._count(request, late=index >= half)
            self._serve(request)
            yield index + 1

    def _count(self, request: TraceRequest, *, late: bool) -> None:
        stored = [block in self._resident for block in request.blocks]
        hits = stored.index(False) if False in stored else len(stored)
        out = self.outcome
        out.refs += len(stored)
        out.hits += hits
        out.islands += sum(stored)
        out.tokens += request.tokens
        out.hit_tokens += min(request.tokens, hits * self._trace.block_tokens)
        if late:
            out.late_refs += len(stored)
            out.late_hits += hits
        if True in stored:
            for number, clock in enumerate(self._clocks):
                out.saved_s[number] += clock.saved_s(stored, request.tokens)

    def _serve(self, request: TraceRequest) -> None:
        self._policy.refresh(request.at_s)
        turn = self._conversations.turn_of(request.blocks)
        if self._told_turns and request.turn is not None:
            turn = request.turn
        self._conversations.record(request.blocks, turn)
        reach = len(request.blocks)
        missing = [block for block in request.blocks if block not in self._resident]
        first = self._usage(0, request.at_s, AccessContext(request.workload, turn, 0, reach))
        if not self._admission.admits(self._policy, first, self._benefit):
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
                self._insert(block, request.at_s, context)
                if self._leaf and position:
                    self._parent[block] = parent = request.blocks[position - 1]
                    self._children[parent] = self._children.get(parent, 0) + 1
        self.outcome.written += len(admitted)
        self._written |= admitted
        self.outcome.distinct_written = len(self._written)

    def _insert(self, block: int, at_s: float, context: AccessContext) -> None:
        number = self._next_block
        self._next_block += 1
        self._resident[block], self._idents[number] = number, block
        self._policy.add(number, self._usage(block, at_s, context))

    def _usage(self, block: int, at_s: float, context: AccessContext) -> Usage:
        return Usage(self._trace.block_tokens * BYTES_PER_TOKEN, at_s, at_s, 0, block, context)

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
            block = self._idents[popped[0]]
            if block in pinned or (self._leaf and self._children.get(block)):
                spared[block] = popped
                continue
            del self._resident[block], self._idents[popped[0]]
            self.outcome.evictions += 1
            blocks -= 1
            if self._leaf:
                self._orphan(block, pinned, spared)
        for number, usage in spared.values():
            self._policy.add(number, usage)
        self.outcome.evicting_s += time.perf_counter() - began_s

    def _orphan(self, block: int, pinned: set[int], spared: dict[int, tuple[int, Usage]]) -> None:
        """A block has gone; its parent may go now."""
        parent = self._parent.pop(block, None)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in spared and parent not in pinned:
                self._policy.add(*spared.pop(parent))
