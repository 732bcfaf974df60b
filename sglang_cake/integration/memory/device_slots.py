"""Device slots of blocks that are loaded, from their reservation to the tree.

Slots are reserved before the bytes are there, so that a block can be copied to the device when it
lands, while a forward runs. One prompt owns the slots of a block until the block joins the tree.
The tree reports these slots as evictable (`cake_radix_cache.py`), so SGLang may plan with that
memory. When SGLang needs it, `reclaim` frees slots, and their blocks are computed instead.

With several ranks, slots are allocated and freed at the same moment on each, since each decides on
what all ranks know. Copies are of one rank: a block whose slots are withdrawn may still be under
way, so the forwards that follow wait for its copy on the device.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from sglang_cake.core.counters import Counters
from sglang_cake.core.spans import Span
from sglang_cake.integration.memory.copier import Copier, SlotCopy
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.prompt_load import PromptLoad
from sglang_cake.loading.loader import StagedBlock
from sglang_cake.loading.meet import BlockState


class DeviceSlots:
    """The only writer of `PromptLoad.landed`. The scheduler thread owns it, but for `arrived`.

    Args:
        allocator: SGLang's slot allocator (`alloc`, `free_segment`, `available_size`).
        evict: `(tokens)` evicts that many tokens from the tree, if it can.
    """

    def __init__(
        self,
        kv: DeviceKV,
        copier: Copier,
        allocator: Any,
        evict: Callable[[int], object],
        counters: Counters,
    ) -> None:
        self._kv = kv
        self._copier = copier
        self._allocator = allocator
        self._evict = evict
        self._counters = counters
        self._block_tokens = kv.layout.block_tokens
        self.block_bytes = kv.layout.block_bytes
        self.held_tokens = 0  # of reserved slots, and of slots that hold landed blocks

    @property
    def link_bytes(self) -> int:
        """Bytes that a block takes on the link, on average."""
        return self._counters.link_bytes(self.block_bytes)

    # ---- from the loader to slots ----

    def reserve(self, load: PromptLoad, blocks: Iterable[int]) -> None:
        """Reserve slots for `blocks`, which are to be loaded, in this order, as far as there is
        memory."""
        landed = load.landed
        todo = [b for b in blocks if b not in landed.reserved and b not in landed.slots]
        landed.reserved |= self._allocate(todo)

    def arrived(self, load: PromptLoad, block: int, staged: StagedBlock) -> None:
        """The bytes of a block are in host memory of this rank: copy them, if slots are reserved.
        I/O thread. The caller is a holder of `staged`."""
        copy = load.landed.reserved.get(block)
        if copy is not None and copy.claim():
            staged.hold()
            self._copier.load(copy, staged)

    def stage(self, load: PromptLoad, block: int, staged: StagedBlock) -> None:
        """The block has landed: it is in host memory of every rank, and belongs to the prompt."""
        copy = load.landed.reserved.pop(block, None)
        if copy is None:
            load.landed.staged[block] = staged
            return
        load.landed.slots[block] = copy
        if copy.claim():  # the slots were reserved after the bytes had come
            self._copier.load(copy, staged)
        else:
            staged.release(used=True)

    def refuse(self, load: PromptLoad, staged: StagedBlock, reason: str) -> None:
        """The prompt has no use for a block that was loaded for it. Its bytes count as wasted."""
        load.landed.wasted_bytes += self.link_bytes
        staged.release(used=False, reason=reason)

    def unreserve(self, load: PromptLoad, blocks: Iterable[int]) -> None:
        """These blocks will not land, or have come in vain: free slots that are reserved for
        them."""
        reserved = load.landed.reserved
        self._free([reserved.pop(block) for block in blocks if block in reserved])

    def place(self, load: PromptLoad, blocks: Iterable[int]) -> bool:
        """Allocate slots for staged `blocks` and copy them. False: not enough memory for all.

        Rightmost blocks come first, since they stay landed longest.
        """
        landed = load.landed
        todo = sorted((b for b in blocks if b not in landed.slots), reverse=True)
        for block, copy in self._allocate(todo).items():
            landed.slots[block] = copy
            copy.claim()
            self._copier.load(copy, landed.staged.pop(block))
        return all(block in landed.slots for block in todo)

    def check_copies(self) -> None:
        """Raises: the first error of a copy since the last call."""
        self._copier.check()

    # ---- from slots to the tree ----

    def take(self, load: PromptLoad, span: Span) -> torch.Tensor:
        """Slots of `span`, all of whose blocks are placed. The caller owns them from now on.

        Slots of these blocks outside of the span are freed. The forwards that follow see the copies
        complete. Raises: the error of a copy.
        """
        blocks = self._blocks_of(span)
        copies = {b: load.landed.slots[b] for b in blocks}
        for copy in copies.values():
            self._kv.order_forwards_after(copy.launched())
        for block in blocks:
            del load.landed.slots[block]
        self.held_tokens -= len(copies) * self._block_tokens
        return self.keep({b: copy.slots for b, copy in copies.items()}, span)

    # ---- from slots to an overlapped last step, and back ----

    def lend(
        self, load: PromptLoad, span: Span, coming: Collection[int]
    ) -> dict[int, torch.Tensor] | None:
        """Slots of the blocks of `span`, by block: those of landed blocks, and others for blocks
        that are `coming`, which the caller fills. The caller owns them until `keep` or `take_back`.
        None: not enough memory."""
        blocks = self._blocks_of(span)
        landed = [b for b in blocks if b not in coming]
        if not self.place(load, landed):
            return None
        self.unreserve(load, coming)
        fresh = self._allocate(coming)
        self.held_tokens -= len(fresh) * self._block_tokens
        if len(fresh) < len(coming):
            for copy in fresh.values():
                self.free(copy.slots)
            return None
        copies = {b: load.landed.slots[b] for b in landed}
        for copy in copies.values():
            self._kv.order_forwards_after(copy.launched())
        for block in landed:
            del load.landed.slots[block]
        self.held_tokens -= len(landed) * self._block_tokens
        return {b: copy.slots for b, copy in (fresh | copies).items()}

    def keep(self, lent: Mapping[int, torch.Tensor], span: Span) -> torch.Tensor:
        """Of lent slots, those of `span`, which the caller owns from now on; the others are
        freed."""
        slots = torch.cat([lent[b] for b in self._blocks_of(span)])
        offset = span.start % self._block_tokens
        self.free(slots[:offset])
        self.free(slots[offset + span.tokens :])
        return slots[offset : offset + span.tokens]

    def take_back(
        self, load: PromptLoad, lent: dict[int, torch.Tensor], coming: Collection[int]
    ) -> None:
        """Lent slots are not needed now: those of blocks that are `coming` are freed."""
        for block, slots in lent.items():
            if block in coming:
                self.free(slots)
            else:
                load.landed.slots[block] = SlotCopy.complete(slots)
                self.held_tokens += len(slots)

    def free(self, slots: torch.Tensor) -> None:
        """Free slots that nothing writes to. They begin and end with a page."""
        if len(slots):
            # Not `free`, which waits for the device if a page has several tokens.
            self._allocator.free_segment(slots, start_pos=0)

    # ---- giving up ----

    def discard(self, load: PromptLoad, blocks: Iterable[int], reason: str) -> None:
        """Give up landed blocks, staged or placed. Their bytes count as wasted."""
        blocks = set(blocks)
        landed = load.landed
        link_bytes = self.link_bytes
        copies = [landed.slots.pop(b) for b in blocks & landed.slots.keys()]
        self._free(copies)
        if copies:
            landed.wasted_bytes += len(copies) * link_bytes
            self._counters.add("wasted_bytes", len(copies) * link_bytes, label=reason)
        for block in blocks & landed.staged.keys():
            self.refuse(load, landed.staged.pop(block), reason)

    def discard_all(self, load: PromptLoad, reason: str) -> None:
        """Give up all that the prompt has here."""
        self.unreserve(load, list(load.landed.reserved))
        self.discard(load, {*load.landed.staged, *load.landed.slots}, reason)

    def reclaim(self, loads: Sequence[PromptLoad], tokens: int) -> int:
        """Give up slots until `tokens` are freed: last request first, its leftmost block first, and
        reserved slots before those of landed blocks. Returns the tokens freed.

        Computing would reach the leftmost block soonest.
        """
        freed = 0
        for load in reversed(loads):
            for block in sorted(load.landed.reserved):
                if freed >= tokens:
                    return freed
                self.unreserve(load, [block])
                freed += self._block_tokens
            for block in sorted(load.landed.slots):
                if freed >= tokens:
                    return freed
                self.discard(load, [block], "memory")
                if load.meet.state(block) is BlockState.LANDED:
                    load.meet.dropped(block)
                freed += self._block_tokens
        return freed

    # ---- inside ----

    def _blocks_of(self, span: Span) -> range:
        return range(span.start // self._block_tokens, -(-span.stop // self._block_tokens))

    def _allocate(self, blocks: Collection[int]) -> dict[int, SlotCopy]:
        """Slots for these blocks, in this order, as far as there is memory."""
        size = self._block_tokens
        short = len(blocks) * size - self._allocator.available_size()
        if short > 0:
            self._evict(short)
        count = min(len(blocks), self._allocator.available_size() // size)
        slots = self._allocator.alloc(count * size) if count else None
        if slots is None:
            return {}
        self.held_tokens += len(slots)
        after = self._kv.fence()
        return {
            block: SlotCopy(part, after)
            for block, part in zip(blocks, slots.split(size), strict=False)
        }

    def _free(self, copies: Sequence[SlotCopy]) -> None:
        """Free slots. A copy that has been launched is over before the next forward starts."""
        for copy in copies:
            launched = copy.withdraw()
            if launched is not None:
                self._kv.order_forwards_after(launched)
            self.held_tokens -= len(copy.slots)
            self.free(copy.slots)
