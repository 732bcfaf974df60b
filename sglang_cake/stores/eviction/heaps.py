"""Min-heaps of blocks: one with ranks that change, and one for values that change with time."""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sglang_cake.stores.eviction.reuse_model import RequestClass

Rank = tuple[float, ...]
Value = tuple[float, ...]


class Entry(NamedTuple):
    """Position of a block in the order. Entries compare by rank, then by tick."""

    rank: Rank
    tick: int  # order of insertion
    block: int


class BlockHeap:
    """Blocks by rank, smallest first. Of equal ranks the one that was put first comes first.

    `put` and `remove` leave outdated entries in the heap, and `first` drops those that it meets.
    The heap is rebuilt once outdated entries are the majority, so it has at most 64 entries plus
    about two per block.
    """

    def __init__(self, ticks: Iterator[int] | None = None) -> None:
        """Args:
        ticks: numbers the entries; heaps whose entries are compared share it.
        """
        self._heap: list[Entry] = []
        self._current: dict[int, Entry] = {}
        self._ticks = itertools.count() if ticks is None else ticks

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, block: int) -> bool:
        return block in self._current

    def put(self, block: int, rank: Rank) -> None:
        """Insert a block, or change its rank."""
        entry = Entry(rank, next(self._ticks), block)
        self._current[block] = entry
        if len(self._heap) > 64 + 2 * len(self._current):
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """Remove a block. Unknown blocks are ignored."""
        self._current.pop(block, None)

    def first(self) -> Entry | None:
        """The smallest entry, which stays in the heap. None: the heap is empty."""
        while self._heap:
            entry = self._heap[0]
            if self._current.get(entry.block) is entry:
                return entry
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Entry | None:
        """Remove and return the smallest entry. None: the heap is empty."""
        entry = self.first()
        if entry is not None:
            heapq.heappop(self._heap)
            del self._current[entry.block]
        return entry


class HeapKey(NamedTuple):
    """Properties that all blocks of a heap share."""

    request_class: RequestClass  # at their last access
    benefit_step: int  # logarithm of their benefit, rounded; 0 for policies without benefit


class ClassHeaps:
    """Blocks whose value changes with time, in one heap per group of comparable blocks.

    Each heap is ordered by the time of the last access. Within a heap the least recently used block
    has the smallest value at any time. So the block with the smallest value of all is the first one
    of a heap. Its choice costs O(heaps) for the first eviction at an instant, and O(log heaps) for
    further ones at the same instant.
    """

    def __init__(self, value: Callable[[HeapKey, int, float], Value]) -> None:
        """Args:
        value: `(heap key, block, now_s)` gives the value of a block; the smallest is popped.
        """
        self._value = value
        self._ticks = itertools.count()
        self._heaps: dict[HeapKey, BlockHeap] = {}
        # Millions of blocks share one object per key.
        self._interned: dict[HeapKey, HeapKey] = {}
        self._key_of: dict[int, HeapKey] = {}  # by block
        # Heap of the first entries of all heaps, with their values at `_valued_s`. Outdated entries
        # are dropped when `pop` meets them.
        self._firsts: list[tuple[Value, Entry, HeapKey]] = []
        self._valued_s: float | None = None

    def __len__(self) -> int:
        """Number of heaps."""
        return len(self._heaps)

    def put(self, block: int, key: HeapKey, used_s: float) -> None:
        """Insert a block into the heap `key`, or move it there."""
        key = self._interned.setdefault(key, key)
        before = self._key_of.get(block, key)
        if before != key:
            self._heaps[before].remove(block)
        self._key_of[block] = key
        heap = self._heaps.get(key)
        if heap is None:
            heap = BlockHeap(self._ticks)
            self._heaps[key] = heap
        heap.put(block, (used_s,))
        if self._valued_s is not None:
            first = heap.first()
            if first is not None and first.block == block:
                self._push_first(key, first, self._valued_s)

    def remove(self, block: int) -> None:
        """Remove a block. Unknown blocks are ignored."""
        key = self._key_of.pop(block, None)
        if key is not None:
            self._heaps[key].remove(block)

    def invalidate_values(self) -> None:
        """The function `value` gives other values from now on."""
        self._valued_s = None

    def pop(self, now_s: float) -> int | None:
        """Remove and return the block of the smallest value. None: no block is left.

        Of blocks with equal values the least recently used one is chosen.
        """
        if now_s != self._valued_s:
            self._value_all(now_s)
        while self._firsts:
            _, entry, key = heapq.heappop(self._firsts)
            heap = self._heaps[key]
            current = heap.first() is entry
            if current:
                heap.pop()
                del self._key_of[entry.block]
            first = heap.first()
            if first is not None:
                self._push_first(key, first, now_s)
            if current:
                return entry.block
        return None

    def _value_all(self, now_s: float) -> None:
        """Value the first block of every heap anew, and drop empty heaps."""
        self._valued_s = now_s
        self._firsts = []
        for key, heap in list(self._heaps.items()):
            first = heap.first()
            if first is None:
                del self._heaps[key]
                self._interned.pop(key, None)
            else:
                self._push_first(key, first, now_s)

    def _push_first(self, key: HeapKey, first: Entry, now_s: float) -> None:
        heapq.heappush(self._firsts, (self._value(key, first.block, now_s), first, key))
