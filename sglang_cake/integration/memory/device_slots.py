"""The memory of landed blocks between host staging and the tree.

One prompt owns the slots of a landed block until the block joins the tree. The tree reports these
slots as evictable (`cake_radix_cache.py`), so SGLang may plan with that memory. When SGLang needs
it, `reclaim` frees slots, and their blocks are computed instead.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from sglang_cake.core.counters import Counters
from sglang_cake.core.token_span import Span
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.loading.loader import StagedBlock
from sglang_cake.loading.meet import BlockState


class DeviceSlots:
    """The only writer of `PromptRecord.memory`. The scheduler thread owns it.

    Args:
        allocator: SGLang's slot allocator (`alloc`, `free`, `available_size`).
        evict: `(tokens)` evicts that many tokens from the tree, if it can.
        copied: `(seconds)` is called with the time that the copy of a block took.
    """

    def __init__(
        self,
        kv: DeviceKV,
        allocator: Any,
        evict: Callable[[int], object],
        counters: Counters,
        copied: Callable[[float], object],
    ) -> None:
        self._kv = kv
        self._allocator = allocator
        self._evict = evict
        self._counters = counters
        self._copied = copied
        self._block_tokens = kv.layout.block_tokens
        self.block_bytes = kv.layout.block_bytes
        self._copies: deque[tuple[Copy, list[StagedBlock]]] = deque()
        self.placed_tokens = 0

    @property
    def link_bytes(self) -> int:
        """Bytes that a block takes on the link, on average."""
        return self._counters.link_bytes(self.block_bytes)

    # ---- from the loader to slots ----

    def stage(self, record: PromptRecord, block: int, staged: StagedBlock) -> None:
        """The block has landed: its host memory is the prompt's."""
        record.memory.staged[block] = staged

    def refuse(self, record: PromptRecord, staged: StagedBlock, reason: str) -> None:
        """The prompt has no use for a block that was loaded for it. Its bytes count as wasted."""
        record.memory.wasted_bytes += self.link_bytes
        staged.release(used=False, reason=reason)

    def place(self, record: PromptRecord, blocks: Iterable[int]) -> bool:
        """Allocate slots for staged `blocks` and launch the copies. False: not enough memory for
        all.

        Rightmost blocks come first, since they stay landed longest.
        """
        memory = record.memory
        todo = sorted((b for b in blocks if b not in memory.slots), reverse=True)
        placed = []
        for block in todo:
            slots = self._allocate(self._block_tokens)
            if slots is None:
                break
            memory.slots[block] = slots
            self.placed_tokens += len(slots)  # at once: the count is right if a later call raises
            placed.append(block)
        if placed:
            staged = [memory.staged[b] for b in placed]
            slots = torch.cat([memory.slots[b] for b in placed])
            self._copies.append((self._kv.load([s.buffer for s in staged], slots), staged))
            for block in placed:
                del memory.staged[block]
            self.release_copied()
        return len(placed) == len(todo)

    # ---- from slots to the tree ----

    def take(self, record: PromptRecord, span: Span) -> torch.Tensor:
        """Slots of `span`, all of whose blocks are placed. The caller owns them from now on.

        Slots of these blocks outside of the span are freed. The scheduler's next launches see the
        copies complete.
        """
        taken = {b: record.memory.slots[b] for b in self._blocks_of(span)}
        slots = self.trim(taken, span)
        for block in taken:
            del record.memory.slots[block]
        self.placed_tokens -= len(taken) * self._block_tokens
        return slots

    # ---- from slots to an overlapped last step, and back ----

    def lend(
        self, record: PromptRecord, span: Span, being_read: Collection[int]
    ) -> dict[int, torch.Tensor] | None:
        """Slots of the blocks of `span`, by block: those of landed blocks, and new ones for the
        blocks in `being_read`. The caller owns them until `trim` or `take_back`. None: not enough
        memory."""
        ready = [b for b in self._blocks_of(span) if b not in being_read]
        if not self.place(record, ready):
            return None
        fresh: dict[int, torch.Tensor] = {}
        for block in being_read:
            slots = self._allocate(self._block_tokens)
            if slots is None:
                self._free(list(fresh.values()))
                return None
            fresh[block] = slots
        self.placed_tokens -= len(ready) * self._block_tokens
        return fresh | {b: record.memory.slots.pop(b) for b in ready}

    def trim(self, lent: Mapping[int, torch.Tensor], span: Span) -> torch.Tensor:
        """Of lent slots, those of `span`; the others are freed. Ownership and order of copies are
        as with `take`."""
        slots = torch.cat([lent[b] for b in self._blocks_of(span)])
        self._kv.order_after_copies()
        offset = span.start % self._block_tokens
        self._free([slots[:offset], slots[offset + span.tokens :]])
        return slots[offset : offset + span.tokens]

    def take_back(
        self, record: PromptRecord, lent: dict[int, torch.Tensor], being_read: Collection[int]
    ) -> None:
        """Lent slots are not needed now: those of the blocks in `being_read` are freed."""
        self._free([slots for block, slots in lent.items() if block in being_read])
        ready = {block: slots for block, slots in lent.items() if block not in being_read}
        record.memory.slots |= ready
        self.placed_tokens += len(ready) * self._block_tokens

    def free(self, slots: torch.Tensor) -> None:
        """Free slots that `trim` returned. Copies may still be writing to them."""
        self._kv.order_after_copies()
        self._free([slots])

    # ---- giving up ----

    def discard(self, record: PromptRecord, blocks: Iterable[int], reason: str) -> None:
        """Give up landed blocks, staged or placed. Their bytes count as wasted."""
        blocks = set(blocks)
        memory = record.memory
        link_bytes = self.link_bytes
        slots = {b: memory.slots[b] for b in blocks if b in memory.slots}
        if slots:
            self._kv.order_after_copies()  # a copy may still be writing to them
            for block in slots:
                del memory.slots[block]
            self.placed_tokens -= len(slots) * self._block_tokens
            self._free(list(slots.values()))
            memory.wasted_bytes += len(slots) * link_bytes
            self._counters.add("wasted_bytes", len(slots) * link_bytes, label=reason)
        for block in blocks & memory.staged.keys():
            self.refuse(record, memory.staged.pop(block), reason)

    def reclaim(self, records: Sequence[PromptRecord], tokens: int) -> int:
        """Give up slots until `tokens` are freed: last request first, its leftmost block first.
        Returns the tokens freed.

        Computing would reach the leftmost landed block soonest.
        """
        freed = 0
        for record in reversed(records):
            for block in sorted(record.memory.slots):
                if freed >= tokens:
                    return freed
                self.discard(record, [block], "memory")
                if record.meet.state(block) is BlockState.LANDED:
                    record.meet.dropped(block)
                freed += self._block_tokens
        return freed

    def release_copied(self) -> None:
        """Return the host buffers whose copies are complete."""
        while self._copies and self._copies[0][0].done():
            copy, blocks = self._copies.popleft()
            self._copied(copy.seconds() / len(blocks))
            for staged in blocks:
                staged.release(used=True)

    def _blocks_of(self, span: Span) -> range:
        return range(span.start // self._block_tokens, -(-span.stop // self._block_tokens))

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        short = tokens - self._allocator.available_size()
        if short > 0:
            self._evict(short)
        slots: torch.Tensor | None = self._allocator.alloc(tokens)
        return slots

    def _free(self, slots: Sequence[torch.Tensor]) -> None:
        for part in slots:
            if len(part):
                self._allocator.free(part)
