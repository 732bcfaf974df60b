"""New blocks and end states: `BlockSaving` has them copied from device memory into write buffers,
and `Writer` puts them into the store, in the background, with bounded memory.

The scheduler thread takes a write buffer for a block, has the block copied into it, and offers it.
When the copy is complete, the I/O thread hashes the key and stores the block. If all buffers are in
use until the request ends, the block is not stored, and counted: serving never waits for the store.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch

from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.core.counters import UNSTORED_REASONS, Counters
from sglang_cake.core.errors import StoreError, StoreUnavailable
from sglang_cake.core.keys import BlockKey, KeyChain
from sglang_cake.core.threads import IoThread
from sglang_cake.integration.memory.copier import Copier, Save
from sglang_cake.integration.memory.end_states import EndSlots, EndStates
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.memory.kv_shard import SOLE, KvShard
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.loading.meet import BlockState
from sglang_cake.stores.base import USUAL_DEPTH, RequestFacts, Store, puts_at_once

logger = logging.getLogger(__name__)
WARN_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Some blocks of one request, in host buffers.

    Attributes:
        tokens: 'q': all tokens up to the end of the last block.
        copied: done when the copies into the buffers are complete; or the error of the copies.
        facts: of the request; the store gets them before the blocks.
        of_end: they are end blocks of the end at the last of `tokens`.
    """

    key_chain: KeyChain
    tokens: "array[int]"
    blocks: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    copied: "Future[None]"
    facts: RequestFacts | None = None
    of_end: bool = False


class _Puts(asyncio.Semaphore):
    """The puts into one store that are under way. For one event loop.

    Attributes: given_up: further puts are not made.
    """

    def __init__(self, depth: int) -> None:
        super().__init__(puts_at_once(depth))
        self.given_up = False

    def give_up(self) -> None:
        self.given_up = True
        self.release()  # a put that waits ends, and lets the next one in


class Writer:
    """The write pipeline. The capacity of the pool bounds the waiting blocks."""

    def __init__(
        self, store: Store | None, pool: BufferPool, io: IoThread, counters: Counters
    ) -> None:
        self._pool = pool
        self._io = io
        self._counters = counters
        self._store = store
        self._puts = _Puts(USUAL_DEPTH)
        self._former: WeakSet[_Puts] = WeakSet()  # of stores before; I/O thread only
        self._jobs: set[asyncio.Task[None]] = set()
        self._quiet_until_s = 0.0

    def take(self, *, leave: int = 0) -> Buffer | None:
        """A buffer for one block, or None if all but `leave` are in use. Scheduler thread."""
        return self._pool.take() if self._pool.free > leave else None

    def take_all(self, count: int) -> list[Buffer] | None:
        """So many buffers, or None if there are not enough. Scheduler thread."""
        taken: list[Buffer] = []
        while len(taken) < count and (buffer := self._pool.take()) is not None:
            taken.append(buffer)
        if len(taken) == count:
            return taken
        self.put_back(taken)
        return None

    def put_back(self, buffers: Sequence[Buffer]) -> None:
        """Return buffers that are not needed after all. Any thread."""
        for buffer in buffers:
            self._pool.give(buffer)

    def give_up(self, count: int) -> None:
        """So many blocks got no buffer, and are not stored."""
        if count:
            self._counters.add("unstored_blocks", count, label="queue_full")

    def offer(self, job: WriteJob) -> None:
        """Take over `job` and its buffers. Without a store, its blocks are counted as unstored.
        Scheduler thread."""
        self._io.post(self._accept, job, self._store, self._puts)

    def use(self, store: Store | None, depth: int = USUAL_DEPTH) -> None:
        """Set the store of later jobs; None: their blocks are not stored. Scheduler thread.

        Args: depth: how many reads at once its link needs.
        """
        self._io.post(self._former.add, self._puts)
        self._store = store
        self._puts = _Puts(depth)  # a store that hangs keeps its own

    async def drained(self, patience_s: float | None = None) -> None:
        """Return when all blocks that were offered before are stored or given up. I/O thread.

        Args: patience_s: after that, blocks that wait for stores before the present one are given
            up. A store that hangs keeps the buffers of the puts that have begun, and no others.
        """
        if self._jobs:
            former = list(self._former)
            _, late = await asyncio.wait(self._jobs, timeout=patience_s)
            for puts in former if late else ():
                puts.give_up()

    def _accept(self, job: WriteJob, store: Store | None, places: _Puts) -> None:
        task = asyncio.ensure_future(self._run(job, store, places))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _run(self, job: WriteJob, store: Store | None, places: _Puts) -> None:
        try:
            await asyncio.wrap_future(job.copied)
            keys = job.key_chain.of(job.tokens)
        except Exception:
            # E.g. the device is gone. Half-copied buffers must never be stored.
            logger.exception("the KV of %d blocks could not be copied", len(job.blocks))
            self._counters.add("unstored_blocks", len(job.blocks), label="internal")
            self.put_back(job.buffers)
            return
        if store is None:  # detached between a request's lookup and its last blocks
            self._counters.add("unstored_blocks", len(job.blocks), label="unavailable")
            self.put_back(job.buffers)
            return
        if job.facts is not None:
            try:
                with contextlib.suppress(StoreError):  # eviction works without the facts
                    await store.on_access(keys, job.facts)
            except Exception:
                logger.exception("a store broke its contract; it was not told of a request")
        put = functools.partial(self._put, store, places)
        if job.of_end:
            end_keys = job.key_chain.end_keys(keys[-1], len(job.buffers))
            await self._put_end(put, end_keys, job.buffers)
            return
        puts = [
            put(keys[block], buffer, first=block == 0)
            for block, buffer in zip(job.blocks, job.buffers, strict=True)
        ]
        await asyncio.gather(*puts)

    async def _put_end(
        self,
        put: Callable[[BlockKey, Buffer], Awaitable[bool]],
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
    ) -> None:
        """Put the first end block last, and only if the others are stored: a lookup that finds it
        may rely on the others."""
        pairs = zip(keys[1:], buffers[1:], strict=True)
        puts = [put(key, buffer) for key, buffer in pairs]
        if all(await asyncio.gather(*puts)):
            await put(keys[0], buffers[0])
        else:
            self._counters.add("unstored_blocks", label="unavailable")
            self._pool.give(buffers[0])

    async def _put(
        self,
        store: Store,
        places: _Puts,
        key: BlockKey,
        buffer: Buffer,
        *,
        first: bool = False,
    ) -> bool:
        """Returns whether the block is stored."""
        try:
            async with places:
                if places.given_up:
                    raise StoreUnavailable("the store was replaced, and took too long")
                put = store.put_first(key, buffer.view) if first else store.put(key, buffer.view)
                fresh = await put
            if fresh:
                self._counters.add("stored_blocks")
            return True
        except StoreError as error:
            known = error.reason in UNSTORED_REASONS
            self._counters.add("unstored_blocks", label=error.reason if known else "unavailable")
            self._warn(error)
        except Exception:
            self._counters.add("unstored_blocks", label="unavailable")
            logger.exception("a store broke its contract; a block was not stored")
        finally:
            self._pool.give(buffer)
        return False

    def _warn(self, error: StoreError) -> None:
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:  # a full disk fails every block: one warning is enough
            self._quiet_until_s = now_s + WARN_EVERY_S
            logger.warning("blocks are not stored: %s", error)


# Inside a prompt, an end state of n end blocks is saved only if at least n * END_SPACING blocks lie
# between it and the previous one; at the end of a prompt, n blocks.
END_SPACING = 8

FindEnd = Callable[[int], EndSlots | None]
"""`(stop)`: where the tree has the end state at that token; None: it has not."""


@dataclass(slots=True, eq=False)
class _Unsaved:
    """The blocks of a request that may still have to be saved.

    Attributes:
        tokens: the request's leading tokens whose KV is complete, as of the last checkpoint.
        row: device slot of each of those that the tree holds.
        full: blocks before this one can be saved; 0 while the request is in the queue again.
        next_block: blocks before this one were looked at.
        blocks: blocks that are new to the store, and had no buffer yet, ascending.
        end: the last block boundary whose end state was looked at, in tokens.
        find_end: finds the slots of an end state that is new to the store and had no buffers yet;
            None: there is no such end state.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    row: torch.Tensor | None = None
    full: int = 0
    next_block: int = 0
    blocks: list[int] = field(default_factory=list)
    end: int = 0
    find_end: FindEnd | None = None


class BlockSaving:
    """Copies the full blocks that checkpoints complete and the store lacks, as far as this rank is
    the one that stores them, and end states. Scheduler thread.

    A block that gets no buffer is tried again at each poll and each checkpoint, while the request
    keeps its KV in the tree. Once the request has ended it is given up, and counted. An end state
    is given up earlier, if a later one takes its place or the tree has evicted it.

    Args: alone: no other rank has a tree that must stay like this one's.
    Attributes: kv: the pool that it copies from.
    """

    def __init__(
        self,
        kv: DeviceKV,
        copier: Copier,
        writer: Writer,
        shard: KvShard = SOLE,
        ends: EndStates | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self._alone = alone
        self.kv = kv
        self._shard = shard
        self._ends = ends
        self._left_to_ends = 0 if alone or ends is None else ends.count  # buffers
        self._copier = copier
        self._writer = writer
        self._block_tokens = kv.layout.block_tokens
        # While a record lives, so that no block of it is saved twice.
        self._requests: WeakKeyDictionary[PromptRecord, _Unsaved] = WeakKeyDictionary()
        self._waiting: dict[PromptRecord, _Unsaved] = {}  # those that polls look at
        # Copies that may still read slots, with the record of the request that keeps these slots
        # from being freed; None: the tree may free them.
        self._saves: list[tuple[PromptRecord | None, Save]] = []

    def checkpointed(
        self,
        record: PromptRecord,
        tokens: "array[int]",
        row: torch.Tensor,
        *,
        last: bool,
        find_end: FindEnd | None = None,
    ) -> None:
        """The tree holds more of a request.

        Args:
            tokens: the request's leading tokens whose KV is complete.
            row: device slot of each leading token whose KV the tree holds, at most `[len(tokens)]`.
                The request frees all others when it ends, so they are not read. With end states,
                the tree may hold less than is complete: nothing can be loaded after its last end.
            last: no further checkpoint of this request will come.
            find_end: for a model with end states.
        """
        if not record.agreed.lookup_done and not last:
            return  # it is not known which blocks are stored; the next checkpoint looks again
        unsaved = self._requests.setdefault(record, _Unsaved())
        self._waiting[record] = unsaved
        held = len(row) // self._block_tokens
        full = min(record.key_chain.block_count(len(tokens)), held)
        new = range(unsaved.next_block, full)
        unsaved.blocks += [block for block in new if self._is_new(record, block)]
        unsaved.next_block = max(unsaved.next_block, full)
        unsaved.tokens = tokens
        unsaved.row = row
        unsaved.full = full
        if self._ends is not None:
            known = max(len(tokens), len(record.tokens))
            if not self._ends.window_tokens:
                # States do not depend on the next tokens, as draft models' rows in windows do. So a
                # key is enough.
                full = record.key_chain.block_count(known)
            full = min(full, record.key_chain.block_count(known - self._ends.tail_tokens))
        end = min(held, full) * self._block_tokens
        if find_end is not None and self.wants_end(record, end, last=last):
            unsaved.end = end
            unsaved.find_end = find_end
        if unsaved.find_end is not None:  # first, since it is the shortest-lived
            self._save_end(record, unsaved)
        if last or not self._end_waits():
            self._save_blocks(record, unsaved)
        if last:
            self._give_up(unsaved)

    def wants_end(self, record: PromptRecord, end: int, *, last: bool = False) -> bool:
        """Whether the end state at this block boundary is worth its place in the store.

        Args: last: the request computes nothing after it.
        """
        assert self._ends is not None
        unsaved = self._requests.get(record)
        seen = 0 if unsaved is None else unsaved.end
        size = self._block_tokens
        agreed = record.agreed
        stored = {block for block, yes in enumerate(agreed.ends) if yes} - agreed.lost_ends
        known = [block * size + size for block in stored]
        since = max([seen, *(each for each in known if each <= end)])
        # Where a state chunk has several blocks, steps keep no state at some of their boundaries.
        grid = math.lcm(size, self._ends.state_chunk_tokens)
        last |= end + grid > self._last_block(record) * size
        last |= 0 <= self.branch(record) - end < grid
        return end > seen and (end - since) // size >= self._ends.count * (
            1 if last else END_SPACING
        )

    def branch(self, record: PromptRecord) -> int:
        """The block boundary up to which blocks of other prompts are stored, without a gap; 0: none
        are. Prompts that begin alike diverge there: the next one will need this end."""
        stored = record.agreed.stored
        run = stored.index(False) if False in stored else len(stored)
        return min(run, self._last_block(record)) * self._block_tokens

    def _last_block(self, record: PromptRecord) -> int:
        """How many blocks of the prompt may come from a cache."""
        computed = 1 if self._ends is None else max(1, self._ends.tail_tokens)
        return max(0, len(record.tokens) - computed) // self._block_tokens

    def polled(self, is_live: Callable[[PromptRecord], bool]) -> None:
        """Call before a step is scheduled. Blocks that found no buffer before are saved, as far as
        there are buffers now. Blocks of requests that have ended are given up.

        Args: is_live: whether the request still has its slots.
        """
        for record, unsaved in list(self._waiting.items()):
            if not is_live(record):
                self.released(record)
            elif unsaved.find_end is not None:
                self._save_end(record, unsaved)
        if not self._end_waits():
            for record, unsaved in self._waiting.items():
                self._save_blocks(record, unsaved)
        # A request that decodes has nothing left, and costs nothing until its next checkpoint.
        self._waiting = {
            record: unsaved
            for record, unsaved in self._waiting.items()
            if unsaved.blocks or unsaved.find_end is not None
        }

    def released(self, record: PromptRecord, *, requeued: bool = False) -> None:
        """The request ends, or goes back to the queue: the tree may free its slots from now on.

        Args: requeued: what it has not saved waits for its next checkpoint.
        """
        self._saves = [(None if of is record else of, save) for of, save in self._saves]
        unsaved = self._requests.get(record)
        if unsaved is not None and requeued:
            unsaved.full = 0
        elif unsaved is not None:
            self._give_up(unsaved)
            del self._requests[record]
            self._waiting.pop(record, None)

    def before_slots_are_freed(self, is_live: Callable[[PromptRecord], bool]) -> None:
        """The tree is about to free slots. Forwards that are launched from now on wait for the
        copies that still read them. The scheduler thread waits until these copies are launched, and
        where other servers write to slots, until they are over; a save that is late is given up.

        Args: is_live: whether a request still locks its slots in the tree. It never locks the end
            states that it has passed.
        """
        self._saves = [each for each in self._saves if not each[1].ended.done()]
        due = [save.launched for of, save in self._saves if of is None or not is_live(of)]
        copies = self._copier.wait_launched(due)
        self.kv.order_writes_after([copy for copy in copies if copy is not None])

    def wait_launched(self) -> None:
        """Wait until the copies of all saves are launched; a save that is late is given up."""
        self._copier.wait_launched([save.launched for _, save in self._saves])

    def _give_up(self, unsaved: _Unsaved) -> None:
        self._writer.give_up(len(unsaved.blocks))
        unsaved.blocks.clear()
        if unsaved.find_end is not None and self._ends is not None:
            self._writer.give_up(self._ends.count)
            unsaved.find_end = None

    def _save_end(self, record: PromptRecord, unsaved: _Unsaved) -> None:
        """Save the end state, if this rank is the one that stores it, there are buffers for all of
        it, and the tree still has it. The other ranks ask their trees too, and at once, with
        buffers or without: a match cuts a node at the end and marks it as recently used, and the
        trees must stay alike."""
        assert self._ends is not None
        assert unsaved.find_end is not None
        is_own = self._shard.stores_end(unsaved.end // self._block_tokens - 1)
        buffers = self._writer.take_all(self._ends.count if is_own else 0)
        if buffers is None and self._alone:
            return
        find_end, unsaved.find_end = unsaved.find_end, None
        with self._put_back_after_error(buffers or []):
            slots = find_end(unsaved.end)
            if buffers is None:
                self._writer.give_up(self._ends.count)
                return
            if slots is None or not is_own:
                self._writer.put_back(buffers)
                return
            prepared = self._ends.prepare(slots)
            launch = partial(self._ends.save, prepared, buffers, self.kv.fence())
            save = self._copier.save(launch)
        tokens = max(unsaved.tokens, record.tokens, key=len)  # a key may cover the next ones
        self._saves.append((None, save))
        self._writer.offer(
            WriteJob(
                key_chain=record.key_chain,
                tokens=tokens[: unsaved.end + record.key_chain.next_tokens],
                blocks=tuple(range(self._ends.count)),
                buffers=tuple(buffers),
                copied=save.ended,
                of_end=True,
            )
        )

    def _end_waits(self) -> bool:
        """Whether an end state waits for buffers, which it needs all at once. Blocks get none then:
        without end states they are of no use."""
        if self._ends is None:
            return False
        return any(each.find_end is not None for each in self._waiting.values())

    def _save_blocks(self, record: PromptRecord, unsaved: _Unsaved) -> None:
        blocks: list[int] = []
        buffers: list[Buffer] = []
        for block in unsaved.blocks:
            if block >= unsaved.full:
                break  # the request was requeued, and the tree may have evicted the block
            buffer = self._writer.take(leave=self._left_to_ends)
            if buffer is None:
                break
            blocks.append(block)
            buffers.append(buffer)
        if not blocks:
            return
        size = self._block_tokens
        row = unsaved.row
        assert row is not None
        with self._put_back_after_error(buffers):
            slots = torch.cat([row[b * size : (b + 1) * size] for b in blocks]).to(torch.int64)
            save = self._copier.save(partial(self.kv.save, slots, buffers, self.kv.fence()))
        del unsaved.blocks[: len(blocks)]
        self._saves = [each for each in self._saves if not each[1].ended.done()]
        self._saves.append((record, save))
        end = (blocks[-1] + 1) * size + record.key_chain.next_tokens
        self._writer.offer(
            WriteJob(
                key_chain=record.key_chain,
                tokens=unsaved.tokens[:end],
                blocks=tuple(blocks),
                buffers=tuple(buffers),
                copied=save.ended,
                # The lookup told the store of the prompt's blocks; later blocks are new to it.
                facts=record.facts if end > len(record.tokens) else None,
            )
        )

    @contextlib.contextmanager
    def _put_back_after_error(self, buffers: Sequence[Buffer]) -> Iterator[None]:
        """The context in which a copy into these buffers is launched; device memory may be short
        for what it needs."""
        try:
            yield
        except BaseException:
            self._writer.put_back(buffers)
            raise

    def _is_new(self, record: PromptRecord, block: int) -> bool:
        loadable = block < record.meet.block_count  # otherwise, an end block may have its index
        if loadable and block in record.local.lost:
            return True  # the store could not deliver it: put it there again
        if not self._shard.stores(block):
            return False
        if loadable and record.meet.state(block) is BlockState.ATTACHED:
            return False
        tokens_after = record.stats.matched_tokens - (block + 1) * self._block_tokens
        if 0 <= tokens_after < record.key_chain.next_tokens:
            # Another prompt computed this block, perhaps with other next tokens. Its last tokens'
            # KV in draft models depends on those, so it is not stored for this prompt.
            return False
        stored = record.agreed.stored
        return not (block < len(stored) and stored[block])
