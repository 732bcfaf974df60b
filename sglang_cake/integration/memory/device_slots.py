"""Landed blocks between host staging and the tree: device slots for them, and back.

Slots that hold landed blocks are owned by exactly one restore until they join the tree. The tree
reports them as evictable (`cake_radix_cache.py`), so SGLang may count on that memory; when it
really needs it, `reclaim` gives slots up, and their blocks are computed instead.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from sglang_cake.core.counters import Counters
from sglang_cake.core.spans import Span
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.integration.request.restore import Restore
from sglang_cake.loading.meet import BlockState
from sglang_cake.loading.staging import StagedBlock


class DeviceSlots:
    """Device slots of landed blocks. The scheduler thread owns it.

    Args:
        allocator: SGLang's slot allocator (`alloc`, `free`, `available_size`).
        evict: `(tokens)` evicts that many tokens from the tree, if it can.
        copied: `(seconds)` is told what the copy of a block took.
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
        self.held_tokens = 0

    @property
    def link_bytes(self) -> int:
        """What a block took on its way over the link, on average."""
        return self._counters.link_bytes(self.block_bytes)

    def place(self, restore: Restore, blocks: Iterable[int]) -> bool:
        """Find slots for staged `blocks` and launch the copies. False: not enough memory for all.

        Rightmost blocks first: they stay landed longest.
        """
        todo = sorted((b for b in blocks if b not in restore.slots), reverse=True)
        placed = []
        for block in todo:
            slots = self._allocate(self._block_tokens)
            if slots is None:
                break
            restore.slots[block] = slots
            self.held_tokens += len(slots)  # at once: the books are right whatever fails below
            placed.append(block)
        if placed:
            staged = [restore.staged[b] for b in placed]
            slots = torch.cat([restore.slots[b] for b in placed])
            self._copies.append((self._kv.load([s.buffer for s in staged], slots), staged))
            for block in placed:
                del restore.staged[block]
            self.release_copied()
        return len(placed) == len(todo)

    def take(self, restore: Restore, span: Span) -> torch.Tensor:
        """Slots that hold `span`, which from now on are the caller's; all its blocks are placed.

        What the blocks hold beside the span is freed. Whatever the scheduler launches next sees
        the copies complete.
        """
        lent = {b: restore.slots[b] for b in self._blocks_of(span)}
        slots = self.keep(lent, span)
        for block in lent:
            del restore.slots[block]
        self.held_tokens -= len(lent) * self._block_tokens
        return slots

    def lend(
        self, restore: Restore, span: Span, coming: Collection[int]
    ) -> dict[int, torch.Tensor] | None:
        """Slots of the blocks of `span`, by block: those of what has landed, and new ones for what
        is `coming`. They are the caller's until `keep` or `take_back`. None: not enough memory."""
        blocks = self._blocks_of(span)
        landed = [b for b in blocks if b not in coming]
        if not self.place(restore, landed):
            return None
        fresh: dict[int, torch.Tensor] = {}
        for block in coming:
            slots = self._allocate(self._block_tokens)
            if slots is None:
                self._free(list(fresh.values()))
                return None
            fresh[block] = slots
        self.held_tokens -= len(landed) * self._block_tokens
        return fresh | {b: restore.slots.pop(b) for b in landed}

    def keep(self, lent: Mapping[int, torch.Tensor], span: Span) -> torch.Tensor:
        """As `take`, of slots that were lent."""
        slots = torch.cat([lent[b] for b in self._blocks_of(span)])
        self._kv.order_after_copies()
        offset = span.start % self._block_tokens
        self._free([slots[:offset], slots[offset + span.tokens :]])
        return slots[offset : offset + span.tokens]

    def take_back(
        self, restore: Restore, lent: dict[int, torch.Tensor], coming: Collection[int]
    ) -> None:
        """What was lent is not needed now."""
        self._free([slots for block, slots in lent.items() if block in coming])
        landed = {block: slots for block, slots in lent.items() if block not in coming}
        restore.slots |= landed
        self.held_tokens += len(landed) * self._block_tokens

    def free(self, slots: torch.Tensor) -> None:
        """Slots that were kept and are of no use; copies may still be writing to them."""
        self._kv.order_after_copies()
        self._free([slots])

    def discard(self, restore: Restore, blocks: Iterable[int], reason: str) -> None:
        """Give up landed blocks, wherever they are; their bytes count as wasted."""
        blocks = set(blocks)
        link_bytes = self.link_bytes
        slots = {b: restore.slots[b] for b in blocks if b in restore.slots}
        if slots:
            self._kv.order_after_copies()  # a copy may still be writing to them
            for block in slots:
                del restore.slots[block]
            self.held_tokens -= len(slots) * self._block_tokens
            self._free(list(slots.values()))
            restore.wasted_bytes += len(slots) * link_bytes
            self._counters.add("wasted_bytes", len(slots) * link_bytes, label=reason)
        for block in blocks & restore.staged.keys():
            restore.wasted_bytes += link_bytes
            restore.staged.pop(block).release(used=False, reason=reason)

    def reclaim(self, restores: Sequence[Restore], tokens: int) -> int:
        """Give up slots until `tokens` are freed: last request first, its leftmost block first.

        The leftmost landed block is the one that compute would reach soonest.
        """
        freed = 0
        for restore in reversed(restores):
            for block in sorted(restore.slots):
                if freed >= tokens:
                    return freed
                self.discard(restore, [block], "memory")
                if restore.meet.state(block) is BlockState.LANDED:
                    restore.meet.dropped(block)
                freed += self._block_tokens
        return freed

    def release_copied(self) -> None:
        """Let go of the host buffers whose copies are complete."""
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
