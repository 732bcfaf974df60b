"""A heap of blocks whose ranks change."""

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

Rank = tuple[float, ...]


class Entry(NamedTuple):
    """Where a block stands."""

    rank: Rank
    tick: int  # among equal ranks, the one that was put first
    block: int


class BlockHeap:
    """Blocks by rank. Outdated entries are passed over when they come up; the heap is made anew
    when they are the most of it, so it holds at most about twice as many entries as blocks."""

    def __init__(self, ticks: Iterator[int] | None = None) -> None:
        """Args: ticks: shared among heaps whose entries are compared."""
        self._heap: list[Entry] = []
        self._current: dict[int, Entry] = {}
        self._ticks = itertools.count() if ticks is None else ticks

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, block: int) -> bool:
        return block in self._current

    def put(self, block: int, rank: Rank) -> None:
        """Enter a block, or move it."""
        entry = self._current[block] = Entry(rank, next(self._ticks), block)
        if len(self._heap) > 64 + 2 * len(self._current):
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """An unknown block is passed over."""
        self._current.pop(block, None)

    def first(self) -> Entry | None:
        """The smallest, which stays."""
        heap, current = self._heap, self._current
        while heap and current.get(heap[0].block) is not heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def pop(self) -> Entry | None:
        """The smallest, which goes."""
        entry = self.first()
        if entry is not None:
            heapq.heappop(self._heap)
            del self._current[entry.block]
        return entry
