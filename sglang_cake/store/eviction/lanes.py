"""Blocks in lanes: within a lane the least recently used is worth least, between lanes a value
that changes with time decides. An eviction looks at the first of each lane, O(lanes), and further
ones at the same instant at O(log lanes)."""

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from sglang_cake.store.eviction.heap import BlockHeap, Entry

Lane = TypeVar("Lane", bound=Hashable)
Value = tuple[float, ...]


class Lanes(Generic[Lane]):
    """Args: value: of a lane's block at a time; the smallest goes first."""

    def __init__(self, value: Callable[[Lane, int, float], Value]) -> None:
        self._value = value
        self._ticks = itertools.count()
        self._heaps: dict[Lane, BlockHeap] = {}
        self._known: dict[Lane, Lane] = {}  # one object for each lane: there are many blocks
        self._lane: dict[int, Lane] = {}  # of each block
        # The first of each lane; outdated ones are found out when they come up.
        self._firsts: list[tuple[Value, Entry, Lane]] = []
        self._now_s: float | None = None  # when these values were

    def __len__(self) -> int:
        """How many lanes there are."""
        return len(self._heaps)

    def put(self, block: int, lane: Lane, used_s: float) -> None:
        """Enter a block, or move it."""
        lane = self._known.setdefault(lane, lane)
        before = self._lane.get(block, lane)
        if before != lane:
            self._heaps[before].remove(block)
        self._lane[block] = lane
        heap = self._heaps.get(lane)
        if heap is None:
            heap = self._heaps[lane] = BlockHeap(self._ticks)
        heap.put(block, (used_s,))
        if self._now_s is not None:
            first = heap.first()
            if first is not None and first.block == block:
                self._offer(lane, first, self._now_s)

    def remove(self, block: int) -> None:
        """An unknown block is passed over."""
        if block in self._lane:
            self._heaps[self._lane.pop(block)].remove(block)

    def forget_values(self) -> None:
        """They are others now."""
        self._now_s = None

    def pop(self, now_s: float) -> int | None:
        """The block of the smallest value, which goes; of equal ones the least recently used."""
        if now_s != self._now_s:
            self._rank(now_s)
        while self._firsts:
            _, entry, lane = heapq.heappop(self._firsts)
            heap = self._heaps[lane]
            goes = heap.first() is entry
            if goes:
                heap.pop()
                del self._lane[entry.block]
            first = heap.first()
            if first is not None:
                self._offer(lane, first, now_s)
            if goes:
                return entry.block
        return None

    def _rank(self, now_s: float) -> None:
        self._now_s = now_s
        self._firsts = []
        for lane, heap in list(self._heaps.items()):
            first = heap.first()
            if first is None:
                del self._heaps[lane]
                self._known.pop(lane, None)
            else:
                self._offer(lane, first, now_s)

    def _offer(self, lane: Lane, first: Entry, now_s: float) -> None:
        heapq.heappush(self._firsts, (self._value(lane, first.block, now_s), first, lane))
