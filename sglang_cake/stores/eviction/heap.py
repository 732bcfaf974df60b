"""Min-heap of blocks whose rank can change."""

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

Rank = tuple[float, ...]


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
