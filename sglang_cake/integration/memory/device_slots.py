"""Device slots of blocks that are loaded, from their reservation to the tree.

Slots are reserved before the bytes are there, except where SGLang moves slots. One prompt owns the
slots of a block until the block joins the tree. The tree reports them as evictable
(`cake_radix_cache.py`): when SGLang needs the memory, `reclaim` frees slots, and their blocks are
computed instead.

With several ranks, slots are allocated and freed at the same moment on each, since each decides on
what all ranks know. Copies are of one rank: a block whose slots are withdrawn may still be under
way, so the forwards that follow wait for its copy on the device.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Span
from sglang_cake.integration.memory.copier import Copier, SlotCopy
from sglang_cake.integration.memory.end_states import EndSlots, EndStates
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.loading.loader import HostBlock
from sglang_cake.loading.meet import BlockState


class DeviceSlots:
    """The only writer of `PromptRecord.memory`. The scheduler thread owns it, but for `take_bytes`.

    Args:
        allocator: SGLang's slot allocator (`alloc`, `free_segment`, `available_size`).
        evict: `(tokens)` evicts that many tokens from the tree, if it can.
        ends: the end states of the model, if it needs any. Their blocks get no slots, and stay
            staged until `load_end`.
    """

    def __init__(
        self,
        kv: DeviceKV,
        copier: Copier,
        allocator: Any,
        evict: Callable[[int], object],
        counters: Counters,
        ends: EndStates | None = None,
    ) -> None:
        self._kv = kv
        self._copier = copier
        self._allocator = allocator
        self._evict = evict
        self._counters = counters
        self._ends = ends
        self._block_tokens = kv.layout.block_tokens
        self._taken: list[Copy] = []  # into slots that the tree has now; those that may still run
        self.block_bytes = kv.layout.block_bytes
        self.reclaimable_tokens = 0  # tokens of reserved slots, and of landed blocks

    @property
    def link_bytes(self) -> int:
        """Bytes that a block takes on the link, on average."""
        return self._counters.link_bytes(self.block_bytes)

    # ---- from the loader to slots ----

    def reserve(self, record: PromptRecord, blocks: Iterable[int]) -> None:
        """Reserve slots for `blocks`, which are to be loaded, in this order, as far as there is
        memory. None of them is an end block."""
        if self._kv.moves:
            return
        self._give(record, [b for b in blocks if b not in record.memory.slots])

    def take_bytes(self, record: PromptRecord, block: int, host_block: HostBlock) -> bool:
        """The bytes of a block are in host memory of this rank: copy them, if slots are reserved.
        I/O thread. Returns whether `host_block` was taken over."""
        copy = record.memory.slots.get(block)
        if copy is None or not copy.begin():
            return False
        self._copier.load(copy, host_block)
        return True

    def stage(self, record: PromptRecord, block: int, host_block: HostBlock | None) -> None:
        """The block has landed: every rank has its part of it.

        Args: host_block: the bytes; None: they are being copied into the reserved slots.
        """
        copy = record.memory.slots.get(block)
        if copy is None:
            assert host_block is not None
            record.memory.staged[block] = host_block
        elif host_block is not None:  # the slots were reserved after the bytes had come
            copy.begin()
            self._copier.load(copy, host_block)

    def refuse(self, record: PromptRecord, host_block: HostBlock | None, reason: str) -> None:
        """The prompt has no use for a block that was loaded for it. Its bytes count as wasted.

        Args: host_block: None: the copier has them; `discard` counts them.
        """
        if host_block is not None:
            record.memory.wasted_bytes += self.link_bytes
            host_block.release(used=False, reason=reason)

    def place(
        self,
        record: PromptRecord,
        blocks: Iterable[int],
        *,
        reclaim_from: Sequence[PromptRecord] = (),
    ) -> bool:
        """Allocate slots for staged `blocks`, none of them an end block, and copy them. False: not
        enough memory for all.

        Args: reclaim_from: other prompts, whose slots may be taken.

        Rightmost blocks come first, since they stay landed longest.
        """
        memory = record.memory
        todo = sorted((b for b in blocks if b not in memory.slots), reverse=True)
        for block, copy in self._give(record, todo, reclaim_from).items():
            copy.begin()
            self._copier.load(copy, memory.staged[block])
            del memory.staged[block]
        return all(block in memory.slots for block in todo)

    def check_copies(self) -> None:
        """Raises: the first error of a copy since the last call, unless it lacked device memory."""
        self._taken = [copy for copy in self._taken if not copy.done()]
        self._copier.check()

    def copy_failed(self, record: PromptRecord, awaited: Iterable[int]) -> bool:
        """Whether a copy of a landed block has failed. Args: awaited: blocks of which that is to be
        known: their launches are waited for."""
        for block in awaited:
            if (copy := record.memory.slots.get(block)) is not None:
                copy.wait_settled()
        return any(copy.failed for copy in record.memory.slots.values())

    def uncopied(self, record: PromptRecord, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that have landed and are not on the device: without slots, or with a
        copy that found no device memory or is late. A copy that was launched counts as made. Waits
        for launches, as long as the copier allows. Raises: the error of a copy."""
        slots = record.memory.slots
        copies = {b: slots[b] for b in blocks if b in slots}
        found = dict(zip(copies, self._wait_launched(copies.values()), strict=True))
        return [b for b in blocks if found.get(b) is None]

    # ---- from slots to the tree ----

    def take_slots(self, record: PromptRecord, span: Span) -> torch.Tensor:
        """Slots of `span`, none of whose blocks is `uncopied`. The caller owns them from now on.

        Slots of these blocks outside of the span are freed. The forwards that follow see the copies
        complete.
        """
        blocks = span.blocks(self._block_tokens)
        copies = {b: record.memory.slots[b] for b in blocks}
        self._taken += self._order_forwards_after(copies.values())
        slots = self.trim(copies, span)
        for block in blocks:
            del record.memory.slots[block]
        self.reclaimable_tokens -= len(copies) * self._block_tokens
        return slots

    @property
    def copying(self) -> bool:
        """Whether a copy into slots that `take_slots` gave away is still under way."""
        return not all(copy.done() for copy in self._taken)

    def load_end(self, record: PromptRecord, blocks: Sequence[int], end: EndSlots) -> bool:
        """Copy the end state that has landed. The forwards that follow see the copies complete.
        False: there was no device memory, or the copier is late.

        Args: blocks: of the record's row, its end blocks in order. Raises: the error of a copy.
        """
        assert self._ends is not None
        slots = self._ends.prepare(end)
        after = self._kv.fence()
        copies = [SlotCopy(kv, rows, after) for kv, rows in self._ends.blocks_of(slots)]
        try:
            for block, copy in zip(blocks, copies, strict=True):
                self._copier.load(copy, record.memory.staged.pop(block))
            return None not in self._wait_launched(copies)
        finally:  # the slots may get another owner
            self._withdraw(copies)

    # ---- from slots to an overlapped last step, and back ----

    def hand_out(
        self, record: PromptRecord, span: Span, being_read: Collection[int]
    ) -> dict[int, SlotCopy] | None:
        """Slots of the blocks of `span`, by block: those of landed blocks, and others for blocks
        in `being_read`, which the caller fills. The caller owns them until `trim` or `take_back`.
        None: not now. There is not enough memory, a copy is late, or a block of `being_read` has
        come."""
        blocks = span.blocks(self._block_tokens)
        landed = [b for b in blocks if b not in being_read]
        if not self.place(record, landed) or self.uncopied(record, landed):
            return None
        for block in being_read:
            reserved = record.memory.slots.get(block)
            if reserved is not None and not reserved.cancel():
                return None  # it has come since: it will have landed at the next poll
            self.discard(record, [block], "cancelled")  # the slots alone, without bytes
        copies = {b: record.memory.slots[b] for b in landed}
        self._order_forwards_after(copies.values())
        fresh = self._allocate(being_read)
        if len(fresh) < len(being_read):
            for copy in fresh.values():
                self.free(copy.slots)
            return None
        for block in landed:
            del record.memory.slots[block]
        self.reclaimable_tokens -= len(landed) * self._block_tokens
        return fresh | copies

    def trim(self, handed_out: Mapping[int, SlotCopy], span: Span) -> torch.Tensor:
        """Of slots that were handed out, those of `span`, which the caller owns from now on. The
        others are freed."""
        slots = torch.cat([handed_out[b].slots for b in span.blocks(self._block_tokens)])
        offset = span.start % self._block_tokens
        stop = offset + span.tokens
        self.free(torch.cat([slots[:offset], slots[stop:]]))
        return slots[offset:stop]

    def take_back(
        self, record: PromptRecord, handed_out: dict[int, SlotCopy], being_read: Collection[int]
    ) -> None:
        """Slots handed out are not needed now: those of blocks in `being_read` are freed."""
        landed = {b: copy for b, copy in handed_out.items() if b not in being_read}
        if being_read:
            self.free(torch.cat([handed_out[b].slots for b in being_read]))
        record.memory.slots |= landed
        self.reclaimable_tokens += len(landed) * self._block_tokens

    def free(self, slots: torch.Tensor) -> None:
        """Free slots that nothing writes to. They begin and end with a page."""
        if len(slots):
            # Not `free`, which waits for the device if a page has several tokens.
            self._allocator.free_segment(slots, start_pos=0)
            self._kv.freed()

    # ---- giving up ----

    def discard(self, record: PromptRecord, blocks: Iterable[int], reason: str) -> None:
        """Give up what the prompt has of these blocks: reserved slots, and landed blocks. Bytes
        that are there count as wasted. All ranks do this for the same blocks in the same step, even
        where only one has their bytes."""
        blocks = set(blocks)
        memory = record.memory
        copies = {block: memory.slots[block] for block in memory.slots.keys() & blocks}
        if copies:
            self._withdraw(copies.values())
            self.free(torch.cat([copy.slots for copy in copies.values()]))
            for block in copies:
                del memory.slots[block]
            self.reclaimable_tokens -= len(copies) * self._block_tokens
            wasted_bytes = sum(copy.begun for copy in copies.values()) * self.link_bytes
            memory.wasted_bytes += wasted_bytes
            self._counters.add("wasted_bytes", wasted_bytes, label=reason)
        for block in blocks & memory.staged.keys():
            self.refuse(record, memory.staged.pop(block), reason)

    def drop(self, record: PromptRecord, block: int, reason: str) -> None:
        """Give up a landed block, which may be an end block, and all landed blocks that are of no
        use without it."""
        self.discard(record, [block], reason)
        if record.meet.state(block) is BlockState.LANDED:
            self.discard(record, record.meet.dropped(block), reason)

    def discard_all(self, record: PromptRecord, reason: str) -> None:
        """Give up all that the prompt has here."""
        self.discard(record, {*record.memory.staged, *record.memory.slots}, reason)

    def reclaim(self, records: Sequence[PromptRecord], tokens: int) -> int:
        """Give up slots until `tokens` are freed: last request first, its leftmost block first, and
        reserved slots before those of landed blocks. Returns the tokens freed.

        Computing would reach the leftmost block soonest.
        """
        before = self.reclaimable_tokens
        for record in reversed(records):
            for block in record.reserved:
                if before - self.reclaimable_tokens >= tokens:
                    break
                self.discard(record, [block], "memory")
                if record.meet.state(block) is BlockState.WANTED:
                    self.discard(record, record.meet.lost(block), "memory")
            for block in sorted(record.memory.slots):
                if before - self.reclaimable_tokens >= tokens:
                    break
                self.drop(record, block, "memory")
        return before - self.reclaimable_tokens

    # ---- inside ----

    def _wait_launched(self, copies: Iterable[SlotCopy]) -> list[Copy | None]:
        """As `Copier.wait_launched`. Raises: the error of a launch, but for want of memory."""
        launches = [copy.launched for copy in copies]
        found = self._copier.wait_launched(launches)
        for launched, copy in zip(launches, found, strict=True):
            if copy is None and not launched.cancelled():
                error = launched.exception()
                if error is not None and not isinstance(error, torch.OutOfMemoryError):
                    raise error
        return found

    def _withdraw(self, copies: Iterable[SlotCopy]) -> None:
        """No copy is launched from now on, and what was launched is over before the next forward
        starts."""
        launched = [copy.withdraw() for copy in copies]
        self._kv.order_forwards_after([copy for copy in launched if copy is not None])

    def _order_forwards_after(self, copies: Iterable[SlotCopy]) -> list[Copy]:
        found = self._wait_launched(copies)
        launched = [copy for copy in found if copy is not None]
        self._kv.order_forwards_after(launched)
        return launched

    def _give(
        self,
        record: PromptRecord,
        blocks: Collection[int],
        reclaim_from: Sequence[PromptRecord] = (),
    ) -> dict[int, SlotCopy]:
        """Allocate slots for these blocks of a prompt, as far as there is memory."""
        copies = self._allocate(blocks, reclaim_from)
        record.memory.slots |= copies
        self.reclaimable_tokens += len(copies) * self._block_tokens
        return copies

    def _allocate(
        self, blocks: Collection[int], reclaim_from: Sequence[PromptRecord] = ()
    ) -> dict[int, SlotCopy]:
        """Slots for these blocks, in this order, as far as there is memory."""
        size = self._block_tokens
        short = len(blocks) * size - self._allocator.available_size()
        if short > 0:
            self._evict(short)
            self.reclaim(reclaim_from, len(blocks) * size - self._allocator.available_size())
        count = min(len(blocks), self._allocator.available_size() // size)
        if not count:
            return {}
        slots = self._allocator.alloc(count * size)
        if slots is None:
            return {}
        try:
            # A copy, since slots of single tokens are a view of SGLang's list of all free slots.
            # Each allocation may have another list, and would keep it as long as its blocks wait.
            parts = slots.clone().split(size)
            # Behind the allocation: with larger pages, the device computes the slots' numbers. And
            # behind the copy of them, which runs on the calling thread's stream: other streams read
            # it after the fence alone.
            after = self._kv.fence()
            return {
                b: SlotCopy(self._kv, part, after) for b, part in zip(blocks, parts, strict=False)
            }
        except BaseException:
            self.free(slots)
            raise
