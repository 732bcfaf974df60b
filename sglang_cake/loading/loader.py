"""Brings stored blocks to host memory, last block first, for all prompts over one link.

The scheduler thread says which prompts want what (`begin`), what compute has taken (`fence`) and
when a prompt needs nothing more (`end`); the I/O thread works on without being asked again, so the
link stays busy while the scheduler thread sits in a prefill step. News comes back through `drain`.
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
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.load_events import Found, Landed, LoaderEvent, Lost
from sglang_cake.loading.load_fits import LoadFits
from sglang_cake.loading.reading import Reading
from sglang_cake.loading.staging import StagedBlock
from sglang_cake.stores.base import Store, report_access, sources_of
from sglang_cake.stores.request_info import RequestFacts

logger = logging.getLogger(__name__)

IDLE_S = 0.001  # a link that had nothing to do for less than this was not idle


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the loader must know of a prompt."""

    rid: str  # names this load, never another one
    chain: KeyChain
    tokens: "array[int]"  # 'q'; the loader reads it only
    blocks: int  # how many leading blocks may be loaded at all
    first_block: int  # blocks before this one are in the tree already
    # Whether to load at once, given which blocks are stored and what loads of them cost; `keep`
    # says what becomes of it.
    worth: Callable[[Sequence[bool], LoadCost], bool]
    facts: RequestFacts | None = None  # what the store is told


@dataclass(slots=True, eq=False)
class _Lane:
    """One prompt's loads."""

    prompt: Prompt
    store: Store
    cost: LoadCost  # what its loads cost on average, as measured last; written by the I/O thread
    keys: list[BlockKey] = field(default_factory=list)
    fence: int = 0  # written by the scheduler thread under the gate
    keep: int = 0  # no read of a block below this one is worth starting; scheduler thread, once
    # the lookup has answered
    todo: list[int] = field(default_factory=list)  # ascending; the loader takes from the end
    sources: list[int] = field(default_factory=list)  # of `keys`: where each will be read from
    ahead: Counter[int] = field(default_factory=Counter)  # blocks still to come, by source
    readings: dict[int, Reading] = field(default_factory=dict)  # under way; I/O thread writes

    def look_ahead(self) -> None:
        """Count `ahead` anew; the last ones count until they have landed."""
        if len(self.ahead) > 1:  # of one source it makes no difference how many there are
            first = bisect_left(self.todo, max(self.fence, self.keep))
            self.ahead = Counter(self.sources[b] for b in self.todo[first:]) or self.ahead


@dataclass(slots=True, eq=False)
class _Flight:
    """One block being read, for every lane that wants it."""

    key: BlockKey
    store: Store
    reading: Reading
    waiters: list[tuple[_Lane, int]] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None

    def board(self, lane: _Lane, block: int) -> None:
        self.waiters.append((lane, block))
        lane.readings[block] = self.reading

    def end(self, *, whole: bool) -> None:
        for lane, block in self.waiters:
            lane.readings.pop(block, None)
        self.reading.end(whole=whole)


class Loader:
    """Loads of all live prompts: a shared queue depth, shared buffers, one read per block.

    Args:
        store: None: no prompt may begin before `use`.
        staging: buffers of one block each; when they run out, loading pauses.
        queue_depth: reads in flight at most.
        prior: what is taken for granted of a store that nothing was read from yet.
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
    ) -> None:
        self._store = store
        self._staging = staging
        self._io = io
        self._counters = counters
        self._depth = queue_depth
        self._gate = threading.Lock()  # makes "fenced" and "being read" exclude each other
        self._by_rid: dict[str, _Lane] = {}  # scheduler thread only
        self._lanes: list[_Lane] = []  # I/O thread only; in order of arrival
        self._flights: dict[BlockKey, _Flight] = {}
        self._staged: dict[BlockKey, StagedBlock] = {}
        self._outbox: deque[LoaderEvent] = deque()  # bounded by the blocks of the live prompts
        self._closed = False
        self._order: tuple[str, ...] = ()  # scheduler thread only
        self._ranks: dict[str, int] = {}  # I/O thread only
        self._last_landing_s = 0.0
        self._fits = LoadFits(prior)  # I/O thread only

    # ---- scheduler thread ----

    def begin(self, prompt: Prompt) -> None:
        """Look the prompt up (answered by a Found) and, if it is worth it, load at once."""
        assert self._store is not None
        lane = _Lane(prompt, self._store, self.cost, fence=prompt.first_block)
        self._by_rid[prompt.rid] = lane
        self._io.post(self._open, lane)

    @property
    def cost(self) -> LoadCost:
        """What loads from the source that was read last cost, as measured. Any thread."""
        return self._fits.newest

    @property
    def costs(self) -> list[LoadCost | None]:
        """What loads cost, by source; None: nothing is known. Any thread."""
        return self._fits.all

    def cost_of(self, rid: str) -> LoadCost:
        """What the loads that the prompt has ahead of it cost on average."""
        lane = self._by_rid.get(rid)
        return self.cost if lane is None else lane.cost

    def recall(self, costs: Sequence[LoadCost | None]) -> None:
        """Start from what an earlier process measured, by source."""
        self._io.post(self._fits.recall, costs, time.monotonic())

    def copied(self, took_s: float) -> None:
        """A block's copy to the device took that long."""
        self._io.post(self._fits.copied, took_s)

    def fence(self, rid: str, block: int) -> None:
        """Compute owns the blocks below `block`: no read of them starts after this returns."""
        lane = self._by_rid.get(rid)
        if lane is not None and block > lane.fence:
            with self._gate:
                lane.fence = block
            self._io.post(self._trim, lane)

    def keep(self, rid: str, block: int | None) -> None:
        """Reads of blocks below `block` are not worth starting now: compute will be there first.
        None: no read is, and those under way for this prompt alone end. Nothing of it is lost."""
        lane = self._by_rid.get(rid)
        if lane is None:
            return
        least = lane.prompt.blocks if block is None else block
        if least != lane.keep:
            lane.keep, before = least, lane.keep
            if block is None:
                self._io.post(self._pause, lane)
            elif block < before:
                self._io.post(self._pump)

    def under_way(self, rid: str) -> dict[int, Reading]:
        """The prompt's reads that have begun and are not over, by block."""
        lane = self._by_rid.get(rid)
        return {} if lane is None else lane.readings.copy()

    def order(self, rids: Sequence[str]) -> None:
        """The link works for these prompts in this order; the first may use every buffer."""
        turns = tuple(rids)
        if turns != self._order:
            self._order = turns
            self._io.post(
                self._reorder, [self._by_rid[rid] for rid in turns if rid in self._by_rid]
            )

    def end(self, rid: str) -> None:
        """The prompt needs nothing more; what is in flight for it alone is cancelled."""
        lane = self._by_rid.pop(rid, None)
        if lane is not None:
            self._io.post(self._close, lane)

    def close(self) -> None:
        """Start no more reads. The process is about to end or the I/O thread to stop."""
        self._closed = True

    def use(self, store: Store | None) -> None:
        """Prompts that begin from now on are served by `store`; None: none may begin."""
        self._store = store

    def drain(self) -> list[LoaderEvent]:
        """News since the last call, in order. The caller releases every Landed's `staged`."""
        events = []
        while self._outbox:
            events.append(self._outbox.popleft())
        return events

    # ---- I/O thread ----

    def _open(self, lane: _Lane) -> None:
        self._lanes.append(lane)
        lookup = asyncio.ensure_future(self._look_up(lane))
        lookup.add_done_callback(_log_failure)

    async def _look_up(self, lane: _Lane) -> None:
        prompt = lane.prompt
        keys = lane.keys = prompt.chain.of(prompt.tokens)
        try:
            stored = await lane.store.contains(keys)
            lane.sources = sources_of(lane.store, keys)
        except Exception as error:
            if not isinstance(error, StoreError):
                logger.exception("a store broke its contract; the prompt will be computed")
            self._counters.add("load_failures", label="lookup")
            stored = [False] * len(keys)
        todo = [b for b in range(prompt.first_block, min(prompt.blocks, len(keys))) if stored[b]]
        lane.ahead = Counter(lane.sources[block] for block in todo)
        lane.cost = self._fits.of(lane.ahead, time.monotonic())
        if todo and lane in self._lanes:
            lane.todo = todo
            if not prompt.worth(stored, lane.cost):
                lane.keep = prompt.blocks
        self._outbox.append(Found(prompt.rid, tuple(stored)))
        self._pump()
        if prompt.facts is not None:
            with contextlib.suppress(StoreError):  # what to keep is decided without
                await report_access(lane.store, keys, prompt.facts)

    def _pump(self) -> None:
        """Start reads until the queue is full, the buffers are, or nothing is left to read."""
        while len(self._flights) < self._depth and not self._closed:
            lane = self._next_lane()
            if lane is None:
                return
            with self._gate:
                if lane.todo[-1] < lane.fence:
                    lane.todo.clear()
                    continue
                if not self._start(lane, lane.todo[-1]):
                    return  # no buffer: goes on when one comes back
                lane.todo.pop()

    def _next_lane(self) -> _Lane | None:
        # Waiting prompts leave buffers to the one that is being served.
        scarce = self._staging.free <= self._staging.capacity // 4
        for lane in self._lanes:
            if lane.todo and lane.todo[-1] >= lane.keep:
                return lane if not scarce or self._ranks.get(lane.prompt.rid) == 0 else None
        return None

    def _reorder(self, lanes: Sequence[_Lane]) -> None:
        self._ranks = {lane.prompt.rid: rank for rank, lane in enumerate(lanes)}
        last = len(lanes)
        self._lanes.sort(key=lambda lane: self._ranks.get(lane.prompt.rid, last))
        self._pump()

    def _start(self, lane: _Lane, block: int) -> bool:
        """Get one block under way for `lane`; False if there is no buffer for it."""
        key = lane.keys[block]
        staged = self._staged.get(key)
        if staged is not None and staged.hold():
            self._outbox.append(Landed(lane.prompt.rid, block, staged, time.monotonic()))
            return True
        flight = self._flights.get(key)
        if flight is not None:
            flight.board(lane, block)
            return True
        buffer = self._staging.take()
        if buffer is None:
            return False
        flight = _Flight(key, lane.store, Reading(buffer))
        flight.board(lane, block)
        self._flights[key] = flight
        flight.task = asyncio.ensure_future(self._fetch(flight, buffer))
        flight.task.add_done_callback(lambda task: self._done(flight, buffer, task))
        return True

    async def _fetch(self, flight: _Flight, buffer: Buffer) -> None:
        with self._gate:
            wanted = any(block >= lane.fence for lane, block in flight.waiters)
        if not wanted:  # fenced since it was taken up
            self._retire(flight)
            self._give_up(flight, buffer, reason=None)
            return
        started_s = time.monotonic()
        try:
            (source,) = sources_of(flight.store, [flight.key])
            async with asyncio.timeout(self._fits.limit_s(source, started_s)):
                await flight.store.get_into(flight.key, buffer.view, flight.reading.came)
        except TimeoutError:
            self._give_up(flight, buffer, reason=LATE)
        except asyncio.CancelledError:
            # An upper bound: how much of the block had been read is not known here.
            self._waste(buffer, "cancelled")
            raise
        except StoreError as error:
            known = error.reason in FAILURE_REASONS
            self._give_up(flight, buffer, reason=error.reason if known else "unavailable")
        except Exception:
            logger.exception("a store broke its contract; the block will be computed")
            self._give_up(flight, buffer, reason="internal")
        else:
            self._land(flight, buffer, started_s, source)
        finally:
            self._retire(flight)

    def _done(self, flight: _Flight, buffer: Buffer, task: "asyncio.Task[None]") -> None:
        # Here and not in `_fetch`, which a task that is cancelled at once never enters.
        if task.cancelled():
            self._give_up(flight, buffer, reason=None)
        self._retire(flight)
        self._pump()

    def _land(self, flight: _Flight, buffer: Buffer, started_s: float, source: int) -> None:
        now_s = time.monotonic()
        idle_s = started_s - self._last_landing_s
        took_s = now_s - max(self._last_landing_s, started_s)
        self._last_landing_s = now_s
        if self._fits.is_new(source):  # what other reads landed meanwhile says nothing of it
            took_s = max(took_s, (now_s - started_s) / self._depth)
        # A read that found the link idle for a while pays its latency.
        idle = idle_s > 2 * self._fits.of({source: 1}, now_s).block_s + IDLE_S
        came_s = flight.reading.coming_s()
        self._fits.landed(source, took_s, now_s, first=idle, came_s=came_s)
        for lane in self._lanes:
            lane.look_ahead()
            lane.cost = self._fits.of(lane.ahead, now_s)
        staged = StagedBlock(buffer, self._staging, lambda s: self._freed(flight.key, s))
        self._staged[flight.key] = staged
        takers = [waiter for waiter in flight.waiters if staged.hold()]
        # The read itself was the first holder; whether the bytes serve is up to the others.
        staged.release(used=False, reason="cancelled")
        for lane, block in takers:
            self._outbox.append(Landed(lane.prompt.rid, block, staged, time.monotonic()))
        flight.end(whole=True)

    def _give_up(self, flight: _Flight, buffer: Buffer, reason: str | None) -> None:
        if reason is not None:
            self._counters.add("load_failures", label=reason)
            for lane, block in flight.waiters:
                lost = [block, *lane.todo] if reason == LATE else [block]  # not one after another
                self._outbox.extend(Lost(lane.prompt.rid, each, reason) for each in lost)
                lane.todo = [] if reason == LATE else lane.todo
        flight.end(whole=False)  # before the buffer is anybody else's
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

    def _pause(self, lane: _Lane) -> None:
        """Stop all of its reads; they may begin again."""
        if lane.keep >= lane.prompt.blocks:  # still
            for block in lane.readings:
                insort(lane.todo, block)
            self._stop(lane, lane.prompt.blocks)

    def _trim(self, lane: _Lane) -> None:
        """Stop what compute has overtaken."""
        self._stop(lane, lane.fence)

    def _stop(self, lane: _Lane, below: int) -> None:
        """It waits for no block below that one any more."""
        for block in [b for b in lane.readings if b < below]:
            del lane.readings[block]
        for flight in list(self._flights.values()):
            before = len(flight.waiters)
            flight.waiters = [(w, b) for w, b in flight.waiters if w is not lane or b >= below]
            if before and not flight.waiters and flight.task is not None:
                self._retire(flight)  # at once: nobody may board a cancelled flight
                flight.task.cancel()
        self._pump()

    def _retire(self, flight: _Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _close(self, lane: _Lane) -> None:
        self._lanes.remove(lane)
        lane.todo.clear()
        with self._gate:
            lane.fence = lane.prompt.blocks
        self._trim(lane)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a lookup failed", exc_info=task.exception())
