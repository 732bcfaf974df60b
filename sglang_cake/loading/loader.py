"""Reads stored blocks into host memory, last block first, for all prompts over one link.

The scheduler thread says which prompts want which blocks (`begin`, `load_from`), which blocks are
computed (`fence`) and when a prompt needs no further block (`end`). The I/O thread goes on without
being asked again, so the link stays busy while the scheduler thread is in a prefill step. Events
come back through `drain`.
"""

import asyncio
import contextlib
import logging
import threading
import time
from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.core.counters import FAILURE_REASONS, LATE, Counters
from sglang_cake.core.errors import StoreError
from sglang_cake.core.io_thread import IoThread
from sglang_cake.core.keys import BlockKey, KeyChain
from sglang_cake.loading.cost_model import LEAST_LIMIT_S, LoadCost, LoadFits
from sglang_cake.loading.reading import Reading
from sglang_cake.stores.base import Store, report_access, sources_of
from sglang_cake.stores.request_facts import RequestFacts

logger = logging.getLogger(__name__)

IDLE_S = 0.001  # a link without reads for less than this was not idle


# ---- events ----


class StagedBlock:
    """A fetched block in a pool buffer, shared by every prompt that wants it. Thread-safe.

    It starts with one holder. The last release returns the buffer and calls `on_free`; `used` then
    says whether any holder used the bytes. If none did, the block was loaded in vain.
    """

    def __init__(
        self, buffer: Buffer, pool: BufferPool, on_free: Callable[["StagedBlock"], None]
    ) -> None:
        self.buffer = buffer
        self.used = False
        self.reason = "unused"
        self._pool = pool
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

    def release(self, *, used: bool, reason: str = "unused") -> None:
        """Stop being a holder. `reason` says why the bytes were not used, if they were not."""
        with self._lock:
            self.used |= used
            if not used:
                self.reason = reason
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._pool.give(self.buffer)
            self._on_free(self)


@dataclass(frozen=True, slots=True)
class Found:
    """The lookup has answered: which of a prompt's full blocks are stored."""

    load_id: str
    stored: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A block's checked bytes are in host memory. The receiver releases `staged` once."""

    load_id: str
    block: int
    staged: StagedBlock
    at_s: float  # `time.monotonic()`


@dataclass(frozen=True, slots=True)
class Lost:
    """A block could not be fetched: compute it."""

    load_id: str
    block: int
    reason: str


LoaderEvent = Found | Fetched | Lost


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What a loader holds: live prompts, reads under way, and fetched blocks with a holder."""

    prompts: int
    reads: int
    staged_blocks: int


# ---- the state of one prompt, and of one read ----


@dataclass(frozen=True, slots=True)
class Prompt:
    """The loader's view of a prompt.

    Attributes:
        load_id: names this load, never another one.
        tokens: 'q'; the loader only reads it.
        blocks: how many leading blocks may be loaded at all.
        first_block: blocks before this one are in the tree already.
        should_load: whether to load at once, given the stored blocks and the cost of loading them.
            `load_from` changes that decision later.
        facts: what the store is told about the request.
    """

    load_id: str
    chain: KeyChain
    tokens: "array[int]"
    blocks: int
    first_block: int
    should_load: Callable[[Sequence[bool], LoadCost], bool]
    facts: RequestFacts | None = None


@dataclass(slots=True, eq=False)
class _PromptQueue:
    """The blocks that one prompt still wants.

    Attributes:
        cost: average cost of its loads, as measured last. Written by the I/O thread.
        fence: blocks below it are computed. Written by the scheduler thread under the gate.
        load_from: no read of a block below it is worth starting. Written by the scheduler thread
            once the lookup has answered.
        todo: blocks to read, ascending; the loader takes from the end.
        sources: for each key, the source that the block will be read from.
        ahead: blocks still to come, by source.
        readings: reads under way, by block. Written by the I/O thread.
    """

    prompt: Prompt
    store: Store
    cost: LoadCost
    keys: list[BlockKey] = field(default_factory=list)
    fence: int = 0
    load_from: int = 0
    todo: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    ahead: Counter[int] = field(default_factory=Counter)
    readings: dict[int, Reading] = field(default_factory=dict)

    def count_ahead(self) -> None:
        """Count `ahead` again. Blocks that are being read count until they have come."""
        if len(self.ahead) > 1:  # with one source, the number of blocks makes no difference
            first = bisect_left(self.todo, max(self.fence, self.load_from))
            self.ahead = Counter(self.sources[b] for b in self.todo[first:]) or self.ahead


@dataclass(slots=True, eq=False)
class _Read:
    """One block being read, for every prompt that wants it."""

    key: BlockKey
    store: Store
    reading: Reading
    waiters: list[tuple[_PromptQueue, int]] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None

    def join(self, queue: _PromptQueue, block: int) -> None:
        self.waiters.append((queue, block))
        queue.readings[block] = self.reading

    def end(self, *, whole: bool) -> None:
        for queue, block in self.waiters:
            queue.readings.pop(block, None)
        self.reading.end(whole=whole)


class Loader:
    """Loads of all live prompts: one queue depth, one pool of buffers, one read per block.

    Args:
        store: None: no prompt may begin before `use`.
        staging: buffers of one block each; when they run out, loading pauses.
        queue_depth: the most reads under way at once.
        prior: cost of a store that nothing was read from yet.
        least_limit_s: every read may take that long.
    """

    def __init__(
        self,
        store: Store | None,
        staging: BufferPool,
        io: IoThread,
        counters: Counters,
        *,
        queue_depth: int,
        prior: LoadCost,
        least_limit_s: float = LEAST_LIMIT_S,
    ) -> None:
        self._store = store
        self._staging = staging
        self._io = io
        self._counters = counters
        self._depth = queue_depth
        self._gate = threading.Lock()  # makes "fenced" and "being read" exclude each other
        self._by_id: dict[str, _PromptQueue] = {}  # scheduler thread only
        self._queues: list[_PromptQueue] = []  # I/O thread only; in order of service
        self._reads: dict[BlockKey, _Read] = {}
        self._staged: dict[BlockKey, StagedBlock] = {}
        self._outbox: deque[LoaderEvent] = deque()  # bounded by the blocks of the live prompts
        self._closed = False
        self._order: tuple[str, ...] = ()  # scheduler thread only
        self._ranks: dict[str, int] = {}  # I/O thread only
        self._last_fetched_s = 0.0
        self._fits = LoadFits(prior, least_limit_s)  # I/O thread only

    # ---- scheduler thread ----

    def begin(self, prompt: Prompt) -> None:
        """Look the prompt up (answered by a Found) and load it at once, if it should be."""
        assert self._store is not None
        queue = _PromptQueue(prompt, self._store, self.cost, fence=prompt.first_block)
        self._by_id[prompt.load_id] = queue
        self._io.post(self._open, queue)

    @property
    def cost(self) -> LoadCost:
        """The cost of loads from the source that was read last, as measured. Any thread."""
        return self._fits.newest

    @property
    def costs(self) -> list[LoadCost | None]:
        """The costs of loads by source; None: not known. Any thread."""
        return self._fits.all

    def cost_of(self, load_id: str) -> LoadCost:
        """The average cost of the loads that the prompt has ahead of it."""
        queue = self._by_id.get(load_id)
        return self.cost if queue is None else queue.cost

    def recall(self, costs: Sequence[LoadCost | None]) -> None:
        """Start from the costs that an earlier process measured, by source."""
        self._io.post(self._fits.recall, costs, time.monotonic())

    def copied(self, took_s: float) -> None:
        """The copy of a block to the device took `took_s`."""
        self._io.post(self._fits.copied, took_s)

    def fence(self, load_id: str, block: int) -> None:
        """Blocks below `block` are computed: no read of them starts after this returns."""
        queue = self._by_id.get(load_id)
        if queue is not None and block > queue.fence:
            with self._gate:
                queue.fence = block
            self._io.post(self._trim, queue)

    def load_from(self, load_id: str, block: int | None) -> None:
        """Reads of blocks below `block` are not worth starting now: they will be computed before.
        None: no read is, and reads under way for this prompt alone end. No block is lost by it."""
        queue = self._by_id.get(load_id)
        if queue is None:
            return
        least = queue.prompt.blocks if block is None else block
        before = queue.load_from
        if least != before:
            queue.load_from = least
            if block is None:
                self._io.post(self._pause, queue)
            elif block < before:
                self._io.post(self._pump)

    def under_way(self, load_id: str) -> dict[int, Reading]:
        """The prompt's reads that have begun and are not over, by block."""
        queue = self._by_id.get(load_id)
        return {} if queue is None else queue.readings.copy()

    def order(self, load_ids: Sequence[str]) -> None:
        """The link serves these prompts in this order; the first may use every buffer."""
        order = tuple(load_ids)
        if order != self._order:
            self._order = order
            queues = [self._by_id[each] for each in order if each in self._by_id]
            self._io.post(self._reorder, queues)

    def end(self, load_id: str) -> None:
        """The prompt needs no further block; reads for it alone are cancelled."""
        queue = self._by_id.pop(load_id, None)
        if queue is not None:
            self._io.post(self._close, queue)

    @property
    def stats(self) -> LoaderStats:
        """What the loader holds now. Any thread."""
        return LoaderStats(len(self._queues), len(self._reads), len(self._staged))

    def close(self) -> None:
        """Start no more reads. The process is about to end or the I/O thread to stop."""
        self._closed = True

    def use(self, store: Store | None) -> None:
        """Prompts that begin from now on are served by `store`; None: none may begin."""
        self._store = store

    def drain(self) -> list[LoaderEvent]:
        """Events since the last call, in order. The caller releases every Fetched's `staged`."""
        events = []
        while self._outbox:
            events.append(self._outbox.popleft())
        return events

    # ---- I/O thread ----

    def _open(self, queue: _PromptQueue) -> None:
        self._queues.append(queue)
        lookup = asyncio.ensure_future(self._look_up(queue))
        lookup.add_done_callback(_log_failure)

    async def _look_up(self, queue: _PromptQueue) -> None:
        prompt = queue.prompt
        keys = prompt.chain.of(prompt.tokens)
        queue.keys = keys
        try:
            stored = await queue.store.contains(keys)
            queue.sources = sources_of(queue.store, keys)
        except Exception as error:
            if not isinstance(error, StoreError):
                logger.exception("a store broke its contract; the prompt will be computed")
            self._counters.add("load_failures", label="lookup")
            stored = [False] * len(keys)
        todo = [b for b in range(prompt.first_block, min(prompt.blocks, len(keys))) if stored[b]]
        queue.ahead = Counter(queue.sources[block] for block in todo)
        queue.cost = self._fits.of(queue.ahead, time.monotonic())
        if todo and queue in self._queues:
            queue.todo = todo
            if not prompt.should_load(stored, queue.cost):
                queue.load_from = prompt.blocks
        self._outbox.append(Found(prompt.load_id, tuple(stored)))
        self._pump()
        if prompt.facts is not None:
            with contextlib.suppress(StoreError):  # the store evicts without these facts
                await report_access(queue.store, keys, prompt.facts)

    def _pump(self) -> None:
        """Start reads until the queue depth is reached, the buffers are in use, or no block is
        left to read."""
        while len(self._reads) < self._depth and not self._closed:
            queue = self._next_queue()
            if queue is None:
                return
            with self._gate:
                if queue.todo[-1] < queue.fence:
                    queue.todo.clear()
                    continue
                if not self._start(queue, queue.todo[-1]):
                    return  # no buffer: `_forget` calls again when one comes back
                queue.todo.pop()

    def _next_queue(self) -> _PromptQueue | None:
        # Waiting prompts leave the last buffers to the one that is served first.
        scarce = self._staging.free <= self._staging.capacity // 4
        for queue in self._queues:
            if queue.todo and queue.todo[-1] >= queue.load_from:
                first = self._ranks.get(queue.prompt.load_id) == 0
                return queue if first or not scarce else None
        return None

    def _reorder(self, queues: Sequence[_PromptQueue]) -> None:
        self._ranks = {queue.prompt.load_id: rank for rank, queue in enumerate(queues)}
        last = len(queues)
        self._queues.sort(key=lambda queue: self._ranks.get(queue.prompt.load_id, last))
        self._pump()

    def _start(self, queue: _PromptQueue, block: int) -> bool:
        """Start to read one block for `queue`; False if there is no buffer for it."""
        key = queue.keys[block]
        staged = self._staged.get(key)
        if staged is not None and staged.hold():
            self._outbox.append(Fetched(queue.prompt.load_id, block, staged, time.monotonic()))
            return True
        read = self._reads.get(key)
        if read is not None:
            read.join(queue, block)
            return True
        buffer = self._staging.take()
        if buffer is None:
            return False
        read = _Read(key, queue.store, Reading(buffer))
        read.join(queue, block)
        self._reads[key] = read
        read.task = asyncio.ensure_future(self._fetch(read, buffer))
        read.task.add_done_callback(lambda task: self._done(read, buffer, task))
        return True

    async def _fetch(self, read: _Read, buffer: Buffer) -> None:
        with self._gate:
            wanted = any(block >= queue.fence for queue, block in read.waiters)
        if not wanted:  # fenced since the read was started
            self._retire(read)
            self._give_up(read, buffer, reason=None)
            return
        started_s = time.monotonic()
        try:
            (source,) = sources_of(read.store, [read.key])
            async with asyncio.timeout(self._fits.limit_s(source, started_s)):
                await read.store.get_into(read.key, buffer.view, read.reading.came)
        except TimeoutError:
            self._give_up(read, buffer, reason=LATE)
        except asyncio.CancelledError:
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
            self._fetched(read, buffer, started_s, source)
        finally:
            self._retire(read)

    def _done(self, read: _Read, buffer: Buffer, task: "asyncio.Task[None]") -> None:
        # Not in `_fetch`, which a task that is cancelled at once never enters.
        if task.cancelled():
            self._give_up(read, buffer, reason=None)
        self._retire(read)
        self._pump()

    def _fetched(self, read: _Read, buffer: Buffer, started_s: float, source: int) -> None:
        now_s = time.monotonic()
        idle_s = started_s - self._last_fetched_s
        took_s = now_s - max(self._last_fetched_s, started_s)
        self._last_fetched_s = now_s
        if self._fits.is_new(source):  # blocks of other sources came meanwhile: not its time alone
            took_s = max(took_s, (now_s - started_s) / self._depth)
        # A read that found the link idle for a while pays its latency.
        idle = idle_s > 2 * self._fits.of({source: 1}, now_s).block_s + IDLE_S
        came_s = read.reading.coming_s()
        self._fits.fetched(source, took_s, now_s, first=idle, came_s=came_s)
        for queue in self._queues:
            queue.count_ahead()
            queue.cost = self._fits.of(queue.ahead, now_s)
        staged = StagedBlock(buffer, self._staging, lambda block: self._freed(read.key, block))
        self._staged[read.key] = staged
        takers = [waiter for waiter in read.waiters if staged.hold()]
        # The read was the first holder; the prompts decide whether the bytes are used.
        staged.release(used=False, reason="cancelled")
        for queue, block in takers:
            self._outbox.append(Fetched(queue.prompt.load_id, block, staged, time.monotonic()))
        read.end(whole=True)

    def _give_up(self, read: _Read, buffer: Buffer, reason: str | None) -> None:
        if reason is not None:
            self._counters.add("load_failures", label=reason)
            for queue, block in read.waiters:
                lost = [block]
                if reason == LATE:  # the source is stuck: all blocks now, not one after another
                    lost += queue.todo
                    queue.todo = []
                self._outbox.extend(Lost(queue.prompt.load_id, each, reason) for each in lost)
        read.end(whole=False)  # before the buffer gets another owner
        self._staging.give(buffer)

    def _freed(self, key: BlockKey, staged: StagedBlock) -> None:
        """A staged block's buffer went back to the pool. Any thread."""
        if not staged.used:
            self._waste(staged.buffer, staged.reason)
        self._io.post(self._forget, key, staged)

    def _waste(self, buffer: Buffer, reason: str) -> None:
        size_bytes = self._counters.link_bytes(len(buffer.view))
        self._counters.add("wasted_bytes", size_bytes, label=reason)

    def _forget(self, key: BlockKey, staged: StagedBlock) -> None:
        if self._staged.get(key) is staged:
            del self._staged[key]
        self._pump()

    def _pause(self, queue: _PromptQueue) -> None:
        """Stop all reads of a prompt; they may begin again."""
        if queue.load_from >= queue.prompt.blocks:  # `load_from` may have changed since
            for block in queue.readings:
                insort(queue.todo, block)
            self._stop(queue, queue.prompt.blocks)

    def _trim(self, queue: _PromptQueue) -> None:
        """Stop reads of blocks that are computed."""
        self._stop(queue, queue.fence)

    def _stop(self, queue: _PromptQueue, below: int) -> None:
        """The prompt waits for no block below `below` any more."""
        for block in [b for b in queue.readings if b < below]:
            del queue.readings[block]
        for read in list(self._reads.values()):
            before = len(read.waiters)
            read.waiters = [(q, b) for q, b in read.waiters if q is not queue or b >= below]
            if before and not read.waiters and read.task is not None:
                self._retire(read)  # at once: no prompt may join a cancelled read
                read.task.cancel()
        self._pump()

    def _retire(self, read: _Read) -> None:
        if self._reads.get(read.key) is read:
            del self._reads[read.key]

    def _close(self, queue: _PromptQueue) -> None:
        self._queues.remove(queue)
        queue.todo.clear()
        with self._gate:
            queue.fence = queue.prompt.blocks
        self._trim(queue)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a lookup failed", exc_info=task.exception())
