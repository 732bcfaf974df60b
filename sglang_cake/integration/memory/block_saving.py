"""New blocks and end states, copied from device memory into the write pipeline."""

import contextlib
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from sglang_cake.core.buffers import Buffer
from sglang_cake.integration.memory.copier import Copier, Save
from sglang_cake.integration.memory.end_states import EndSlots, EndStates
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.memory.kv_shard import SOLE, KvShard
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.loading.meet import BlockState
from sglang_cake.writeback.block_writer import WriteJob, Writer

# Inside a prompt, an end state is saved only if this many times as many blocks as it has end blocks
# lie between it and the previous one. At the end of a prompt, as many are enough.
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
    is given up earlier, if a later one takes its place or the tree has evicted it. While one waits
    for its buffers, blocks get none. With several ranks it is not tried again: blocks leave as many
    buffers free as it needs.

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
        self._requests: dict[PromptRecord, _Unsaved] = {}
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
        for record, unsaved in list(self._requests.items()):
            if not is_live(record):
                self.released(record)
            elif unsaved.find_end is not None:
                self._save_end(record, unsaved)
        if not self._end_waits():
            for record, unsaved in self._requests.items():
                self._save_blocks(record, unsaved)

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
        return any(each.find_end is not None for each in self._requests.values())

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
