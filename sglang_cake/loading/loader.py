"""Reads stored blocks into host memory, last block first, for all prompts of a server.

The scheduler thread says which prompts want which blocks (`begin`, `set_load_from`), which blocks
are computed (`set_first_loadable`) and when a prompt needs no further block (`cancel`). The I/O
thread goes on without being asked again, so the link stays busy while the scheduler thread is in a
prefill step. Events come back through `drain`.
"""

import asyncio
import contextlib
import logging
import threading
import time
from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.core.counters import FAILURE_REASONS, LATE, Counters
from sglang_cake.core.errors import StoreError
from sglang_cake.core.keys import BlockKey, KeyChain
from sglang_cake.core.threads import IoThread
from sglang_cake.loading.cost_model import (
    LEAST_LIMIT_S,
    MOST_TIERS,
    LoadCost,
    LoadFits,
    TierLoads,
)
from sglang_cake.loading.meet import best_run, end_indices, possible_runs
from sglang_cake.stores.base import RequestFacts, Store, read_until_s
from sglang_cake.stores.lookup_rounds import EXACT_KEYS

logger = logging.getLogger(__name__)

IDLE_S = 0.001  # a shorter time without reads is no idle time of a link
# A prompt takes no further lent block while the copies of the lent blocks that it has take so long.
LENT_AHEAD_S = 0.01
# A lookup goes on for so long after its prompt has ended. Late answers show that a tier is slow. If
# each lookup were cancelled with its prompt, there would be no late answers.
ENDED_LOOKUP_S = 5.0


# ---- events ----


class HostBlock:
    """A fetched block, shared by every prompt that wants it. Thread-safe.

    It starts with one holder. The last release returns the buffer with `give` (to a pool, or to
    the store that lent it) and calls `on_free`.

    Attributes:
        used: whether any holder used the bytes. If none did, the block was loaded in vain.
        reason: why they were not used.
        copy_s: how long a copy to the device took; 0: not known.
    """

    def __init__(
        self,
        buffer: Buffer,
        give: Callable[[Buffer], object],
        on_free: Callable[["HostBlock"], object],
    ) -> None:
        self.buffer = buffer
        self.used = False
        self.reason = ""
        self.copy_s = 0.0
        self._give = give
        self._on_free = on_free
        self._lock = threading.Lock()
        self._holders = 1

    def hold(self) -> bool:
        """Become one more holder; False if the last one has just released it."""
        with self._lock:
            if self._holders == 0:
                return False
            self._holders += 1
            return True

    def release(self, *, used: bool, reason: str = "", copy_s: float = 0.0) -> None:
        """Stop being a holder. Args: used: whether this holder used the bytes."""
        with self._lock:
            self.used |= used
            self.copy_s = copy_s or self.copy_s
            if not used:
                self.reason = reason
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._give(self.buffer)
            self._on_free(self)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The lookup has answered: which of a prompt's full blocks are stored, and after which of them
    an end state is stored. `ends` has at least the end of the best run. Ends of shorter runs may be
    missing. For a model without end states it is empty. `tiers` has the number of the tier that
    each full block will be read from."""

    load_id: str
    stored: tuple[bool, ...]
    ends: tuple[bool, ...]
    tiers: bytes


@dataclass(frozen=True, slots=True)
class Fetched:
    """A block's checked bytes are in host memory. The receiver releases `host_block` once; None: it
    was taken over (`LoadRequest.take_over`)."""

    load_id: str
    block: int
    host_block: HostBlock | None
    at_s: float  # `time.monotonic()`


@dataclass(frozen=True, slots=True)
class Lost:
    """A block could not be fetched: compute it."""

    load_id: str
    block: int
    reason: str


LoaderEvent = LookedUp | Fetched | Lost


# ---- the state of one read, and of one prompt ----


class BlockRead:
    """The read of one block, for a thread that uses its first bytes before the rest. Thread-safe:
    the store reports how far it is, the loader when it is over, and one other thread waits.

    Bytes are not checked until all have arrived. A thread that uses them before must wait for the
    end of the read, and must be able to undo what it did with them.
    """

    def __init__(self, buffer: Buffer, changed: threading.Condition | None = None) -> None:
        """
        Args:
            buffer: filled by the read, from its start. Its bytes are valid after
                `end(whole=True)`; after `end(whole=False)` the buffer belongs to another read.
            changed: guards the state, and is notified of its changes.
        """
        self.buffer = buffer
        self._changed = threading.Condition() if changed is None else changed
        self._bytes = 0
        self._starts = 0  # how often the read started from its first byte
        self._started_s = 0.0  # when it did so last
        self._used: int | None = None  # `_starts` when bytes were first used
        self._whole: bool | None = None  # None: under way

    def received(self, count: int) -> None:
        """`count` leading bytes have arrived, unchecked (a `TellBytes`). 0: the read starts."""
        with self._changed:
            if count == 0:
                self._starts += 1
                self._started_s = time.monotonic()
            self._bytes = count
            self._changed.notify_all()

    def end(self, *, whole: bool) -> None:
        """The read is over; the first call counts. Args: whole: all bytes have arrived and passed
        the check."""
        with self._changed:
            if self._whole is None:
                self._whole = whole
            self._changed.notify_all()

    @property
    def is_coming(self) -> bool:
        """Whether the read is under way, and the store reports its progress."""
        with self._changed:
            return self._starts > 0 and self._whole is None

    @property
    def missing_share(self) -> float:
        """The share of the bytes that has not arrived."""
        with self._changed:
            return 0.0 if self._whole else 1 - self._bytes / len(self.buffer.view)

    @property
    def is_over(self) -> bool:
        """Whether the read has ended, well or not."""
        with self._changed:
            return self._whole is not None

    def coming_s(self) -> float:
        """Time since the first byte arrived; 0 if the store does not report its progress."""
        with self._changed:
            return time.monotonic() - self._started_s if self._starts else 0.0

    def has(self, count: int) -> bool:
        """Whether `count` leading bytes have arrived."""
        with self._changed:
            return self._has(count)

    def wait(self, count: int, until_s: float) -> bool:
        """Block until `count` leading bytes have arrived, which the caller uses at once. Returns
        False if the read failed, if it restarted after bytes had been used, or at `until_s`
        (monotonic).
        """
        with self._changed:
            while not self._has(count) and self._whole is None and self._tick(until_s):
                pass
            return self._has(count) and self._use()

    def wait_whole(self, until_s: float) -> bool:
        """Block until the read is over. Returns whether all bytes passed the check, and all bytes
        that had been used are among them. False also at `until_s` (monotonic)."""
        with self._changed:
            while self._whole is None and self._tick(until_s):
                pass
            return self._whole is True and self._use()

    def _tick(self, until_s: float) -> bool:
        return self._changed.wait(until_s - time.monotonic())

    def _has(self, count: int) -> bool:
        return self._whole is True or (self._whole is None and self._bytes >= count > 0)

    def _use(self) -> bool:
        if self._used is None:
            self._used = self._starts
        return self._used == self._starts


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The request to look up, and to read, the blocks of one prompt.

    Attributes:
        load_id: names this request, never another one.
        tokens: 'q'; the loader only reads it.
        block_count: how many leading blocks may be loaded at all.
        first_block: blocks before this one are in the tree already.
        loads_now: the first decision whether to load, made on the I/O thread when the lookup has
            answered. Its arguments say which blocks are stored and of use, and in which tiers they
            are. `set_load_from` changes the decision later.
        facts: about the request, for the store.
        take_over: called with each block whose checked bytes are in host memory, on the I/O thread
            and before its `Fetched`. It must be quick. It returns whether it takes the block over;
            then it releases it once, and the `Fetched` has no bytes.
        end_blocks: blocks of one end state. Those of the target are read before all others; their
            indices are those of `meet.end_indices`.
    """

    load_id: str
    key_chain: KeyChain
    tokens: "array[int]"
    block_count: int
    first_block: int
    loads_now: Callable[[Sequence[bool], TierLoads], bool]
    facts: RequestFacts | None = None
    take_over: Callable[[int, HostBlock], bool] | None = None
    end_blocks: int = 0

    @property
    def index_count(self) -> int:
        """Every block and every end block has a lower index."""
        return self.block_count * (1 + self.end_blocks)


@dataclass(slots=True, eq=False)
class _StoreReads:
    """A store, and its reads under way, which the I/O thread writes.

    Attributes:
        depths: as for `LoadFits`.
        reads: the reads under way, by key.
        counts: how many reads are under way, by tier.
        full: the tiers that have all their reads under way.
        since_s: by tier, when the last block arrived, or when the reads under way started if that
            was later.
        last_fetched_s: when the last block arrived, by the tier that had it when its read began.
    """

    store: Store
    depths: Sequence[int]
    reads: "dict[BlockKey, _SharedRead]" = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    full: set[int] = field(default_factory=set)
    since_s: dict[int, float] = field(default_factory=dict)
    last_fetched_s: dict[int, float] = field(default_factory=dict)

    def depth(self, tier: int) -> int:
        """The most reads of a tier under way at once."""
        return self.depths[min(tier, len(self.depths) - 1)]

    def add(self, read: "_SharedRead") -> None:
        """The read starts."""
        self.reads[read.key] = read
        if not self.counts[read.tier]:
            self.since_s[read.tier] = time.monotonic()
        self.counts[read.tier] += 1
        if self.counts[read.tier] >= self.depth(read.tier):
            self.full.add(read.tier)

    def discard(self, read: "_SharedRead") -> None:
        """The read is over, or no prompt may join it any more. May be called again."""
        if self.reads.get(read.key) is read:
            del self.reads[read.key]
            self.counts[read.tier] -= 1
            if self.counts[read.tier] < self.depth(read.tier):
                self.full.discard(read.tier)


@dataclass(slots=True, eq=False)
class _PromptReads:
    """The blocks that one prompt still wants.

    Attributes:
        first_loadable: blocks below it are computed. Written by the scheduler thread.
        load_from: blocks from this one on are worth loading. Written by the scheduler thread
            once the lookup has answered.
        todo: blocks to read, ascending, by the tier that they will be read from; the loader takes
            the last one whose tier may be read.
        tiers: for each key, the tier that the block will be read from.
        reads: reads under way, by block. Written by the I/O thread.
        run: with end states, the blocks to load up to the target. Written by the I/O thread until
            the lookup has answered, and by the scheduler thread from then on.
        end_keys: keys of the target's end blocks. They are taken to be in the tier of the block
            before them.
        ever_wanted: with end states, all indices that were ever in `todo`.
        lookup: the task of the lookup, until the store has answered.
        lent: how many blocks the store lends that are not copied to the device yet.
        lender: the tier that has the lent blocks.
    """

    request: LoadRequest
    link: _StoreReads
    keys: list[BlockKey] = field(default_factory=list)
    first_loadable: int = 0
    load_from: int = 0
    todo: dict[int, list[int]] = field(default_factory=dict)
    tiers: list[int] = field(default_factory=list)
    reads: "dict[int, _SharedRead]" = field(default_factory=dict)
    run: range = range(0)
    end_keys: list[BlockKey] = field(default_factory=list)
    ever_wanted: set[int] = field(default_factory=set)
    lookup: "asyncio.Task[None] | None" = None
    lent: int = 0
    lender: int = 0

    def key(self, block: int) -> BlockKey:
        """The key of a block, or of an end block of the target."""
        first = self.request.block_count
        if block < first:
            return self.keys[block]
        return self.end_keys[(block - first) % self.request.end_blocks]

    def tier(self, block: int) -> int:
        """The tier that a block, or an end block of the target, will be read from."""
        return self.tiers[block if block < self.request.block_count else self.run.stop - 1]

    def want(self, run: range) -> list[int]:
        """From now on the blocks of `run` and the end after it are wanted, and nothing else.
        Returns their indices, ascending. What was asked for once is not asked for again."""
        request = self.request
        ends = end_indices(request.block_count, request.end_blocks, run.stop)
        self.end_keys = []
        if run:
            self.end_keys = request.key_chain.end_keys(self.keys[run.stop - 1], request.end_blocks)
        wanted = [*run, *ends]
        todo = {block for blocks in self.todo.values() for block in blocks}
        self.ask(block for block in wanted if block in todo or block not in self.ever_wanted)
        self.ever_wanted.update(wanted)
        return wanted

    def ask(self, blocks: Iterable[int]) -> None:
        """These blocks are to be read, and no others. Args: blocks: ascending."""
        todo: dict[int, list[int]] = {}
        for block in blocks:
            todo.setdefault(self.tier(block), []).append(block)
        self.todo = todo

    @property
    def last(self) -> int:
        """The last block that is to be read; -1: there is none. Any thread."""
        last = -1
        for blocks in list(self.todo.values()):  # the I/O thread may add a tier meanwhile
            for block in blocks[-1:]:
                last = max(last, block)
        return last

    @property
    def has_next(self) -> bool:
        """Whether a block that is not being read is worth loading. Any thread."""
        return self.last >= self.load_from


@dataclass(slots=True, eq=False)
class _SharedRead:
    """One block being read, for every prompt that wants it."""

    key: BlockKey
    link: _StoreReads
    tier: int  # it counts as a read of this tier
    block_read: BlockRead
    waiters: list[tuple[_PromptReads, int]] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None

    def join(self, queue: _PromptReads, block: int) -> None:
        self.waiters.append((queue, block))
        queue.reads[block] = self

    def end(self, *, whole: bool) -> None:
        for queue, block in self.waiters:
            queue.reads.pop(block, None)
        self.block_read.end(whole=whole)


class Loader:
    """Loads of all live prompts: one pool of buffers, one read per block. Prompts that began before
    `use` go on reading from the former store. These reads do not count against those of the new
    store, since the former one may hang.

    Args:
        store: None: no prompt may begin before `use`.
        staging: buffers of one block each; when they run out, loading pauses. With end states,
            they must hold at least one end state and one block.
        depths: as for `LoadFits`.
        prior: the cost of a store before anything is read from it.
        least_limit_s: every read may take that long.
        wake: called when a lookup has answered, and when a prompt's last block that is worth
            loading has arrived or is lost. I/O thread.
        record: called when a lookup has answered, with the blocks of the prompt and its facts; once
            for each lookup of a prompt. Must not raise. I/O thread.
    """

    def __init__(
        self,
        store: Store | None,
        staging: BufferPool,
        io: IoThread,
        counters: Counters,
        *,
        depths: Sequence[int],
        prior: LoadCost,
        least_limit_s: float = LEAST_LIMIT_S,
        wake: Callable[[], object] = lambda: None,
        record: Callable[[Sequence[BlockKey], RequestFacts], object] | None = None,
    ) -> None:
        self._link = None if store is None else _StoreReads(store, depths)
        self._staging = staging
        self._io = io
        self._counters = counters
        self._depths = depths
        self._by_id: dict[str, _PromptReads] = {}  # scheduler thread only
        self._queues: set[_PromptReads] = set()  # I/O thread only; of all live prompts
        # Those of `order`, and those whose blocks may be read since, in order of service. All other
        # prompts cost a read nothing, however many wait. I/O thread only.
        self._served: dict[_PromptReads, None] = {}
        self._reading: set[_StoreReads] = set()  # stores with reads under way; I/O thread only
        self._host_blocks: dict[BlockKey, HostBlock] = {}
        # One call for each block whose memory came back. The I/O thread makes them before it starts
        # another read.
        self._freed: deque[Callable[[], object]] = deque()
        # Whether a buffer that comes back must wake the I/O thread. So it is if a read waits for a
        # buffer, or if no read is under way, since the end of a read looks for freed buffers.
        self._awaits_memory = True
        self._outbox: deque[LoaderEvent] = deque()  # bounded by the blocks of the live prompts
        self._wake = wake
        self._record = record
        self._closed = False
        self._order: tuple[str | None, ...] = ()  # scheduler thread only
        self._may_use_all_buffers: str | None = None  # I/O thread only
        self._prior = prior
        self._least_limit_s = least_limit_s
        self._fits = LoadFits(prior, least_limit_s, depths)  # `forget_costs` replaces it

    # ---- scheduler thread ----

    def begin(self, request: LoadRequest) -> None:
        """Look the prompt up (answered by a LookedUp) and load it at once, if it should be."""
        assert self._link is not None
        queue = _PromptReads(request, self._link, first_loadable=request.first_block)
        self._by_id[request.load_id] = queue
        self._io.post(self._begin, queue)

    @property
    def cost(self) -> LoadCost:
        """The cost of loads from the tier that was read last, as measured. Any thread."""
        return self._fits.newest

    @property
    def costs(self) -> list[LoadCost | None]:
        """The costs of loads by tier; None: not known. Any thread."""
        return self._fits.all

    @property
    def tier_costs(self) -> tuple[LoadCost, ...]:
        """What a load from each tier is predicted to cost now. Any thread."""
        return self._fits.by_tier(time.monotonic())

    @property
    def measured_tiers(self) -> tuple[bool, ...]:
        """For each tier, whether its cost was measured lately. Any thread."""
        return self._fits.measured_lately(time.monotonic())

    @property
    def tier_silence_s(self) -> tuple[float, ...]:
        """For each of MOST_TIERS tiers, how long no block has arrived from it while blocks were
        being read. Any thread."""
        silence_s = [0.0] * MOST_TIERS
        if (link := self._link) is None:
            return tuple(silence_s)
        now_s = time.monotonic()
        for tier in list(link.counts):  # the I/O thread may add one meanwhile
            if link.counts[tier]:
                counted = min(tier, MOST_TIERS - 1)
                since_s = link.since_s.get(tier, now_s)
                silence_s[counted] = max(silence_s[counted], now_s - since_s)
        return tuple(silence_s)

    def recall(self, costs: Sequence[LoadCost | None]) -> None:
        """Start from the costs that an earlier process measured, by tier."""
        self._io.post(self._fits.recall, costs, time.monotonic())

    def forget_costs(self) -> None:
        """Start from the prior again, since the store is another one. Call it after `use`: blocks
        of former stores are not measured any more."""
        self._fits = LoadFits(self._prior, self._least_limit_s, self._depths)

    def set_first_loadable(self, load_id: str, block: int) -> None:
        """Blocks below `block` are computed: no further read of them starts for this prompt, and
        reads for it alone end, one that is just starting included."""
        queue = self._by_id.get(load_id)
        if queue is not None and block > queue.first_loadable:
            queue.first_loadable = block
            self._io.post(self._trim, queue)

    def set_load_from(self, load_id: str, block: int | None) -> None:
        """Reads of blocks below `block` are not worth starting now: they will be computed before.
        None: no read is worth starting, and reads under way for this prompt alone end. No block is
        lost by it."""
        queue = self._by_id.get(load_id)
        if queue is None:
            return
        least = queue.request.index_count if block is None else block
        before = queue.load_from
        if least != before:
            queue.load_from = least
            if block is None:
                self._io.post(self._pause, queue)
            elif block < before:
                self._io.post(self._resume, queue)

    def set_run(self, load_id: str, run: range) -> None:
        """Only the blocks of `run`, and the end after it, are still wanted of a prompt whose model
        has end states. Called after its lookup has answered."""
        queue = self._by_id.get(load_id)
        if queue is not None and run != queue.run:
            queue.run = run
            self._io.post(self._set_run, queue, run)

    def under_way(self, load_id: str) -> dict[int, BlockRead]:
        """The prompt's reads that have started and are not over, by block."""
        queue = self._by_id.get(load_id)
        reads = {} if queue is None else queue.reads.copy()
        return {block: read.block_read for block, read in reads.items()}

    def link_idle(self, load_id: str) -> bool:
        """Whether no block of the prompt is being read, and the loader will start no read now: all
        blocks have been read, there is no buffer, or enough lent blocks wait for their copies."""
        queue = self._by_id.get(load_id)
        if queue is None or queue.reads:
            return False
        last = queue.last
        return last < 0 or (queue.tier(last) not in queue.link.full and queue.has_next)

    def order(self, load_ids: Sequence[str], *, may_use_all_buffers: str | None) -> None:
        """The link serves these prompts in this order. Only the prompt `may_use_all_buffers` may
        use every buffer: its blocks leave the buffers as they land. None: no prompt may."""
        order = (*load_ids, may_use_all_buffers)
        if order != self._order:
            self._order = order
            queues = [self._by_id[each] for each in load_ids if each in self._by_id]
            self._io.post(self._reorder, queues, may_use_all_buffers)

    def cancel(self, load_id: str) -> None:
        """The prompt needs no further block; reads for it alone are cancelled."""
        queue = self._by_id.pop(load_id, None)
        if queue is not None:
            self._io.post(self._cancel, queue)

    def close(self) -> None:
        """Start no more reads. The process is about to end or the I/O thread to stop."""
        self._closed = True

    def use(self, store: Store | None, depths: Sequence[int]) -> None:
        """Prompts that begin from now on are served by `store`; None: no prompt may begin. Args:
        depths: as for the constructor."""
        self._link = None if store is None else _StoreReads(store, depths)
        self._depths = depths

    def drain(self) -> list[LoaderEvent]:
        """Events since the last call, in order. The caller releases the bytes of every Fetched."""
        events = []
        while self._outbox:
            events.append(self._outbox.popleft())
        return events

    # ---- I/O thread ----

    def _begin(self, queue: _PromptReads) -> None:
        self._queues.add(queue)
        queue.lookup = asyncio.ensure_future(self._look_up(queue))
        queue.lookup.add_done_callback(_log_failure)

    async def _look_up(self, queue: _PromptReads) -> None:
        request, store = queue.request, queue.link.store
        keys = request.key_chain.of(request.tokens)
        queue.keys = keys
        ends: list[bool] = []
        try:
            stored = await store.contains(keys)
            queue.tiers = store.sources(keys)
            if len(queue.tiers) != len(keys):
                raise ValueError(f"{len(queue.tiers)} sources of {len(keys)} keys")
            tiers = bytes(min(tier, MOST_TIERS - 1) for tier in queue.tiers)
            if request.end_blocks:
                ends = await self._look_up_ends(queue, stored)
                queue.run = best_run(stored[: request.block_count], ends, request.first_block)
                todo = queue.want(queue.run)
            else:
                last = min(request.block_count, len(keys))
                todo = [b for b in range(request.first_block, last) if stored[b]]
        except Exception as error:
            if not isinstance(error, StoreError):
                logger.exception("a store broke its contract; the prompt will be computed")
            self._counters.add("load_failures", label="lookup")
            stored = [False] * len(keys)
            tiers = bytes(len(keys))
            queue.tiers = [*tiers]
            ends = []
            todo = []
            queue.run = range(0)
        queue.lookup = None
        queue.ask(todo if queue in self._queues else ())
        if queue.todo:
            usable = [b in queue.run for b in range(len(keys))] if request.end_blocks else stored
            loads = TierLoads(tiers, self.tier_costs, self.tier_silence_s)
            if not request.loads_now(usable, loads):
                queue.load_from = request.index_count
        self._outbox.append(LookedUp(request.load_id, tuple(stored), tuple(ends), tiers))
        self._resume(queue)  # before the scheduler wakes: blocks that are lent are there at once
        self._wake()
        if request.facts is not None:
            if self._record is not None:
                self._record(keys, request.facts)
            with contextlib.suppress(StoreError):  # the store evicts without these facts
                # The end counts as used before the blocks: without them it is of no use, and they
                # may belong to other ends.
                if queue.run:
                    facts = replace(request.facts, id=f"{request.facts.id} end")
                    await store.on_access(queue.end_keys, facts)
                await store.on_access(keys, request.facts)

    async def _look_up_ends(self, queue: _PromptReads, stored: Sequence[bool]) -> list[bool]:
        """After which blocks an end state is stored. The search stops at the best end."""
        request = queue.request
        ends = [False] * len(stored)
        runs = possible_runs(stored[: request.block_count], request.first_block)
        blocks = [run.stop - 1 for run in runs]
        # Ends are far apart, so stores must not look at some keys and infer the others.
        for start in range(0, len(blocks), EXACT_KEYS):
            some = blocks[start : start + EXACT_KEYS]
            keys = [request.key_chain.end_keys(queue.keys[b], 1)[0] for b in some]
            found = await queue.link.store.contains(keys)
            for block, yes in zip(some, found, strict=True):
                ends[block] = yes
            if any(found):
                break
        return ends

    def _start_reads(self) -> None:
        """Take the blocks that the store has in memory, and start reads, until the queue depth is
        reached, the buffers are in use, or no block is left to read."""
        self._awaits_memory = False
        while True:
            self._take_freed()
            while not self._closed and self._start_next():
                pass
            self._reading = {link for link in self._reading if link.reads}
            if not self._reading:
                self._awaits_memory = True
            if not self._freed:
                break

    def _start_next(self) -> bool:
        """Whether there may be another block to start."""
        found = self._next_block()
        if found is None:
            return False
        queue, blocks = found
        if blocks[-1] < queue.first_loadable:
            for each in queue.todo.values():
                del each[: bisect_left(each, queue.first_loadable)]
        elif self._start(queue, blocks[-1]):
            blocks.pop()
        else:
            self._awaits_memory = True
            return False
        if not (queue.reads or queue.has_next):  # its last block was in memory
            self._wake()
        return True

    def _next_block(self) -> tuple[_PromptReads, list[int]] | None:
        """The prompt that is served next, and those of its `todo` of which the last one starts."""
        # Only one prompt may use the last quarter of the buffers.
        for queue in self._served:
            tiers = queue.todo.keys() - queue.link.full
            if not (tiers or queue.lent) or not queue.has_next:
                continue
            may_use_all_buffers = queue.request.load_id == self._may_use_all_buffers
            ends = 0
            if queue.end_keys:  # they stay in their buffers until the front has reached the end
                first = queue.request.block_count
                ends = sum(len(each) - bisect_left(each, first) for each in queue.todo.values())
            left = self._staging.free - ends
            has_buffers = may_use_all_buffers or left > self._staging.capacity // 4
            blocks = self._next_in(queue, tiers) if has_buffers else None
            if blocks is not None:
                return queue, blocks
            if queue.lent or not has_buffers:
                self._awaits_memory = True
        return None

    def _next_in(self, queue: _PromptReads, tiers: set[int]) -> list[int] | None:
        """Those blocks in the `todo` of a prompt of which the last one is to be read next: it is
        the last block in these tiers, which may be read. None: there is no such block.

        While enough lent blocks wait for their copies, no further block is taken from memory.
        Without this bound, all blocks in memory would be fetched at once, and the device would wait
        for their copies instead of computing.
        """
        todo, last = queue.todo, queue.last
        if last >= queue.request.block_count:
            # End blocks are not copied before the last of them is there, and nothing goes before.
            return next((todo[tier] for tier in tiers if todo[tier][-1:] == [last]), None)
        ahead = LENT_AHEAD_S / (self.cost.copy_s or LENT_AHEAD_S)
        is_ahead = queue.lent >= max(queue.link.depth(queue.lender), ahead)
        if is_ahead:
            tiers = tiers - {queue.lender}
        while True:
            lasts = ((todo[tier][-1], tier) for tier in tiers if todo[tier])
            block, tier = max(lasts, default=(-1, 0))
            if block < queue.load_from:
                return None
            if block < last or is_ahead:
                with contextlib.suppress(Exception):  # the read fails as well, and says why
                    (found,) = queue.link.store.sources([queue.keys[block]])
                    if found != tier:  # it has moved up
                        queue.tiers[block] = found
                        insort(todo.setdefault(found, []), todo[tier].pop())
                    tier = found
            if tier not in queue.link.full and not (is_ahead and tier == queue.lender):
                return todo[tier]

    def _reorder(self, queues: Sequence[_PromptReads], may_use_all_buffers: str | None) -> None:
        self._may_use_all_buffers = may_use_all_buffers
        others = (queue for queue in self._served if queue.has_next)
        self._served = dict.fromkeys([*queues, *others])
        self._start_reads()

    def _resume(self, queue: _PromptReads) -> None:
        """Blocks of the prompt may be worth loading now."""
        if queue.has_next and queue in self._queues:
            self._served.setdefault(queue)
        self._start_reads()

    def _start(self, queue: _PromptReads, block: int) -> bool:
        """Start to read one block for `queue`; False if there is no buffer for it."""
        key = queue.key(block)
        host_block = self._host_blocks.get(key)
        if host_block is not None and host_block.hold():
            self._arrived(queue, block, host_block)
            return True
        read = queue.link.reads.get(key)
        if read is not None:
            read.join(queue, block)
            return True
        if self._borrow(queue, block):
            return True
        buffer = self._staging.take()
        if buffer is None:
            return False
        read = _SharedRead(key, queue.link, queue.tier(block), BlockRead(buffer))
        read.join(queue, block)
        queue.link.add(read)
        self._reading.add(queue.link)
        read.task = asyncio.ensure_future(self._fetch(read, buffer))
        read.task.add_done_callback(lambda task: self._done(read, buffer, task))
        return True

    def _borrow(self, queue: _PromptReads, block: int) -> bool:
        """Take a block that the store has in memory. False: it is to be read."""
        key = queue.key(block)
        started_s = time.monotonic()
        try:
            (tier,) = queue.link.store.sources([key])
            lent = queue.link.store.lend(key)
        except Exception:  # the read fails as well, and says why
            return False
        if lent is None:
            return False

        counted = block < queue.request.block_count
        queue.lent += counted
        queue.lender = tier

        def back(host_block: HostBlock) -> None:
            queue.lent -= counted
            self._forget(key, host_block)

        host_block = HostBlock(
            lent.buffer,
            lambda _: lent.release(),
            lambda host_block: self._give_back(back, host_block),
        )
        self._host_blocks[key] = host_block
        self._arrived(queue, block, host_block)
        now_s = queue.link.last_fetched_s[tier] = time.monotonic()
        # Such blocks wait only for their copies to the device, one after another. 0: no copy was
        # measured yet.
        if (copy_s := self.cost.copy_s) and queue.link is self._link:
            self._fits.fetched(tier, max(now_s - started_s, copy_s), now_s, first=False)
        return True

    async def _fetch(self, read: _SharedRead, buffer: Buffer) -> None:
        started_s = time.monotonic()
        try:
            wanted = any(block >= queue.first_loadable for queue, block in read.waiters)
            if not wanted:  # computed since the read was started
                self._give_up(read, buffer, reason=None)
                return
            (tier,) = read.link.store.sources([read.key])
            limit_s = self._fits.limit_s(tier, started_s)
            read_until_s.set(started_s + limit_s)  # in this task
            limit = asyncio.get_running_loop().call_later(limit_s, self._late, read)
            try:
                await read.link.store.get_into(read.key, buffer.view, read.block_read.received)
            finally:
                limit.cancel()
        except asyncio.CancelledError:
            if not read.block_read.is_over:  # it is not late
                # An upper bound: how much of the block had been read is not known here.
                self._waste(buffer, "cancelled")
            raise
        except StoreError as error:
            known = error.reason in FAILURE_REASONS
            self._give_up(read, buffer, reason=error.reason if known else "unavailable")
        except Exception:
            logger.exception("a store broke its contract; the block will be computed")
            self._give_up(read, buffer, reason="internal")
        else:
            self._fetched(read, buffer, started_s, tier)
        finally:
            self._over(read)  # and not in `_done`, which the event loop calls in its next iteration

    def _done(self, read: _SharedRead, buffer: Buffer, task: "asyncio.Task[None]") -> None:
        # Not in `_fetch`, which a task that is cancelled at once never enters.
        if task.cancelled():
            self._give_up(read, buffer, reason=None)
            self._over(read)

    def _late(self, read: _SharedRead) -> None:
        """The time limit of a read has passed. Its buffer comes back when the store has let go of
        it: on a disk that hangs, a cancellation takes as long as the read."""
        if not read.waiters:  # it is cancelled already
            return
        assert read.task is not None
        read.task.cancel()
        self._lose(read, LATE)
        self._over(read)
        read.waiters = []  # they have been told

    def _over(self, read: _SharedRead) -> None:
        read.link.discard(read)
        self._start_reads()
        if not all(queue.reads or queue.has_next for queue, _ in read.waiters):
            self._wake()

    def _fetched(self, read: _SharedRead, buffer: Buffer, started_s: float, tier: int) -> None:
        self._take_freed()  # now no entry of an earlier load is left under this key
        now_s = time.monotonic()
        last_s = read.link.last_fetched_s.get(tier, 0.0)
        idle_s = started_s - last_s
        took_s = now_s - max(last_s, started_s)
        read.link.last_fetched_s[tier] = now_s
        read.link.since_s[read.tier] = now_s
        # A read that found the link idle for a while pays its latency.
        idle = idle_s > 2 * self._fits.cost(tier, now_s).block_s + IDLE_S
        coming_s = read.block_read.coming_s()
        if read.link is self._link:  # otherwise `_fits` has the costs of a later store
            self._fits.fetched(tier, took_s, now_s, first=idle, coming_s=coming_s)
        host_block = HostBlock(buffer, self._staging.give, partial(self._came_back, read.key))
        self._host_blocks[read.key] = host_block
        takers = [waiter for waiter in read.waiters if host_block.hold()]
        # The read was the first holder; the prompts decide whether the bytes are used.
        host_block.release(used=False, reason="cancelled")
        for queue, block in takers:
            self._arrived(queue, block, host_block)
        read.end(whole=True)

    def _arrived(self, queue: _PromptReads, block: int, host_block: HostBlock) -> None:
        request = queue.request
        taken = request.take_over is not None and request.take_over(block, host_block)
        event = Fetched(request.load_id, block, None if taken else host_block, time.monotonic())
        self._outbox.append(event)

    def _give_up(self, read: _SharedRead, buffer: Buffer, reason: str | None) -> None:
        """As `_lose`, and the buffer is free."""
        self._lose(read, reason)
        self._staging.give(buffer)

    def _lose(self, read: _SharedRead, reason: str | None) -> None:
        """The read ends without the block. Args: reason: None: no prompt wants the block."""
        if reason is not None:
            self._counters.add("load_failures", label=reason)
            for queue, block in read.waiters:
                lost = [block]
                if reason == LATE:  # all blocks of the tier now, not one after another
                    lost += queue.todo.pop(read.tier, [])
                self._outbox.extend(Lost(queue.request.load_id, each, reason) for each in lost)
        read.end(whole=False)  # before the buffer gets another owner

    def _came_back(self, key: BlockKey, host_block: HostBlock) -> None:
        """The buffer of a block in host memory went back to the pool. Any thread."""
        if not host_block.used:
            self._waste(host_block.buffer, host_block.reason)
        self._give_back(self._forget, key, host_block)

    def _give_back(self, forget: Callable[..., object], *args: object) -> None:
        """Have the I/O thread call `forget(*args)` before it starts another read. Any thread. It is
        woken only if it must be: a wake-up takes the interpreter from the scheduler thread."""
        self._freed.append(partial(forget, *args))
        if self._awaits_memory:
            self._awaits_memory = False  # once is enough
            self._io.post(self._start_reads)

    def _take_freed(self) -> None:
        while self._freed:
            self._freed.popleft()()

    def _waste(self, buffer: Buffer, reason: str) -> None:
        size_bytes = self._counters.link_bytes(len(buffer.view))
        self._counters.add("wasted_bytes", size_bytes, label=reason)

    def _forget(self, key: BlockKey, host_block: HostBlock) -> None:
        if self._host_blocks.get(key) is host_block:
            del self._host_blocks[key]
        if host_block.copy_s:
            self._fits.copied(host_block.copy_s)

    def _pause(self, queue: _PromptReads) -> None:
        """Stop all reads of a prompt; they may begin again."""
        if queue.load_from >= queue.request.index_count:  # `load_from` may have changed since
            for block in queue.reads:
                insort(queue.todo.setdefault(queue.tier(block), []), block)
            self._keep_reads(queue, ())

    def _trim(self, queue: _PromptReads) -> None:
        """Stop reads of blocks that are computed."""
        self._keep_reads(queue, range(queue.first_loadable, queue.request.index_count))

    def _set_run(self, queue: _PromptReads, run: range) -> None:
        """Stop reads of blocks that are not wanted any more, and start others."""
        if queue in self._queues:
            wanted = queue.want(run)
            self._served.setdefault(queue)
            self._keep_reads(queue, wanted)

    def _keep_reads(self, queue: _PromptReads, blocks: Container[int]) -> None:
        """From now on the prompt waits only for reads of `blocks`."""
        for block in [b for b in queue.reads if b not in blocks]:
            read = queue.reads.pop(block)
            read.waiters.remove((queue, block))
            if not read.waiters and read.task is not None:
                read.link.discard(read)  # at once: no prompt may join a cancelled read
                read.task.cancel()
        self._start_reads()

    def _cancel(self, queue: _PromptReads) -> None:
        self._queues.remove(queue)
        self._served.pop(queue, None)
        if queue.lookup is not None:  # a disk that hangs would keep it, and answer it first
            asyncio.get_running_loop().call_later(ENDED_LOOKUP_S, queue.lookup.cancel)
        queue.todo.clear()
        self._keep_reads(queue, ())


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a lookup failed", exc_info=task.exception())
