"""Queues of blocks: one with ranks that change, and one for values that change with time.

Python's garbage collector visits every container of the process, and no thread runs meanwhile. With
containers for each block it would take a second for a million blocks. So the blocks are numbers and
bytes, in arrays and in dictionaries of nothing else, which it does not visit.
"""

import heapq
import itertools
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from sglang_cake.stores.eviction.reuse_model import RequestClass

Rank = tuple[float, float]
Value = tuple[float, ...]
MAX_PART_BLOCKS: Final = 1024


class Entry(NamedTuple):
    """Position of a block in the order. Entries compare by rank, then by tick."""

    rank: Rank
    tick: int  # order of insertion
    block: int


_PLACE: Final = struct.Struct("=ddq")  # rank and tick
_Place = tuple[float, float, int]


class _QueuePart(NamedTuple):
    ranks: "array[float]"  # the first number of each block's rank
    blocks: "array[int]"


class BlockQueue:
    """Blocks by rank, smallest first. Of equal ranks the one that was put first comes first.

    No call takes long, also with 10 million blocks. A heap of them would have to be rebuilt from
    time to time, and that takes seconds in which no other thread runs.
    """

    def __init__(
        self, ticks: Iterator[int] | None = None, *, most_in_part: int = MAX_PART_BLOCKS
    ) -> None:
        """Args:
        ticks: numbers the entries; queues whose entries are compared share it.
        most_in_part: a longer part of the sorted blocks is divided.
        """
        self._most_in_part = most_in_part
        self._places: dict[int, bytes] = {}  # by block
        self._parts: list[_QueuePart] = []  # the blocks, sorted by their places; no part is empty
        self._lasts: list[_Place] = []  # of each part
        self._ticks = itertools.count() if ticks is None else ticks

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def put(self, block: int, rank: Rank) -> None:
        """Insert a block, or change its rank."""
        self.remove(block)
        place = (float(rank[0]), float(rank[1]), next(self._ticks))
        self._places[block] = _PLACE.pack(*place)
        if not self._lasts or place > self._lasts[-1]:
            # As most blocks are put, by the time of their last access: full parts stay full.
            if not self._parts or len(self._parts[-1].blocks) >= self._most_in_part:
                self._parts.append(_QueuePart(array("d"), array("q")))
                self._lasts.append(place)
            self._parts[-1].ranks.append(place[0])
            self._parts[-1].blocks.append(block)
            self._lasts[-1] = place
            return
        at = bisect_left(self._lasts, place)
        ranks, blocks = self._parts[at]
        index = self._index_in(self._parts[at], place)
        ranks.insert(index, place[0])
        blocks.insert(index, block)
        if len(blocks) > self._most_in_part:
            half = len(blocks) // 2
            self._parts[at : at + 1] = (
                _QueuePart(ranks[:half], blocks[:half]),
                _QueuePart(ranks[half:], blocks[half:]),
            )
            self._lasts.insert(at, self._place_of(blocks[half - 1]))

    def remove(self, block: int) -> None:
        """Remove a block. Unknown blocks are ignored."""
        if block not in self._places:
            return
        place = self._place_of(block)
        at = bisect_left(self._lasts, place)
        ranks, blocks = self._parts[at]
        index = self._index_in(self._parts[at], place)
        del ranks[index], blocks[index], self._places[block]
        if not blocks:
            del self._parts[at], self._lasts[at]
        elif index == len(blocks):
            self._lasts[at] = self._place_of(blocks[-1])

    def first(self) -> Entry | None:
        """The smallest entry, which stays in the queue. None: the queue is empty."""
        if not self._parts:
            return None
        block = self._parts[0].blocks[0]
        first, second, tick = self._place_of(block)
        return Entry((first, second), tick, block)

    def pop(self) -> Entry | None:
        """Remove and return the smallest entry. None: the queue is empty."""
        entry = self.first()
        if entry is not None:
            self.remove(entry.block)
        return entry

    def _index_in(self, part: _QueuePart, place: _Place) -> int:
        """Index of the first block of a part that is not before `place`."""
        low = bisect_left(part.ranks, place[0])
        high = bisect_right(part.ranks, place[0], low)
        return bisect_left(part.blocks, place, low, high, key=self._place_of)

    def _place_of(self, block: int) -> _Place:
        first, second, tick = _PLACE.unpack(self._places[block])
        return first, second, tick


class QueueKey(NamedTuple):
    """Properties that all blocks of a queue share."""

    request_class: RequestClass  # at their last access
    benefit_step: int  # logarithm of their benefit, rounded; 0 for policies without benefit


class ClassQueues:
    """Blocks whose value changes with time, in one queue per group of comparable blocks.

    Within a queue the least recently used block has the smallest value at any time. So the block
    with the smallest value of all is the first one of a queue. Its choice costs O(queues) for the
    first eviction at an instant, and O(log queues) for further ones at the same instant.
    """

    def __init__(self, value: Callable[[QueueKey, int, float], Value]) -> None:
        """Args: value: `(queue key, block, now_s)` gives the value of a block."""
        self._value = value
        self._ticks = itertools.count()
        self._numbers = itertools.count()
        self._number_of: dict[QueueKey, int] = {}  # numbers of queues
        self._queues: dict[int, BlockQueue] = {}  # by number
        self._queue_of: dict[int, int] = {}  # by block, the number of its queue
        # Heap of the first entries of all queues, with their values at `_valued_s`. Outdated
        # entries are dropped when `pop` meets them.
        self._firsts: list[tuple[Value, Entry, QueueKey]] = []
        self._valued_s: float | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def classes(self) -> set[RequestClass]:
        return {
            key.request_class for key, number in self._number_of.items() if self._queues[number]
        }

    def put(self, block: int, key: QueueKey, used_s: float) -> None:
        """Insert a block into the queue `key`, or move it there."""
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = next(self._numbers)
            self._queues[number] = BlockQueue(self._ticks)
        if self._queue_of.get(block) != number:
            self.remove(block)
        self._queue_of[block] = number
        queue = self._queues[number]
        queue.put(block, (used_s, 0.0))
        if self._valued_s is not None:
            first = queue.first()
            if first is not None and first.block == block:
                self._push_first(key, first, self._valued_s)
                if len(self._firsts) > 64 + 2 * len(self._queues):
                    self.invalidate_values()  # many outdated ones, if nothing is popped for long

    def remove(self, block: int) -> None:
        """Remove a block. Unknown blocks are ignored."""
        number = self._queue_of.pop(block, None)
        if number is not None:
            self._queues[number].remove(block)

    def invalidate_values(self) -> None:
        """The function `value` gives other values from now on."""
        self._valued_s = None
        self._firsts.clear()

    def pop(self, now_s: float) -> int | None:
        """Remove and return the block of the smallest value. None: no block is left.

        Of blocks with equal values the least recently used one is chosen.
        """
        if now_s != self._valued_s:
            self._value_all(now_s)
        while self._firsts:
            _, entry, key = heapq.heappop(self._firsts)
            queue = self._queues[self._number_of[key]]
            current = queue.first() == entry
            if current:
                queue.pop()
                del self._queue_of[entry.block]
            first = queue.first()
            if first is not None:
                self._push_first(key, first, now_s)
            if current:
                return entry.block
        return None

    def _value_all(self, now_s: float) -> None:
        """Value the first block of every queue anew, and drop empty queues."""
        self._valued_s = now_s
        self._firsts = []
        for key, number in list(self._number_of.items()):
            first = self._queues[number].first()
            if first is None:
                del self._number_of[key], self._queues[number]
            else:
                self._push_first(key, first, now_s)

    def _push_first(self, key: QueueKey, first: Entry, now_s: float) -> None:
        heapq.heappush(self._firsts, (self._value(key, first.block, now_s), first, key))
