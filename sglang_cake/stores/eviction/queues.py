"""Queues of blocks: one with ranks that change, and one for values that change with time."""

import heapq
import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from sglang_cake.stores.eviction.reuse_model import RequestClass

Rank = tuple[float, ...]
Value = tuple[float, ...]
MAX_PART_ENTRIES: Final = 1024


class Entry(NamedTuple):
    """Position of a block in the order. Entries compare by rank, then by tick."""

    rank: Rank
    tick: int  # order of insertion
    block: int


class BlockQueue:
    """Blocks by rank, smallest first. Of equal ranks the one that was put first comes first.

    No call takes long, also with 10 million blocks. A heap of them would have to be rebuilt from
    time to time, and that takes seconds in which no other thread runs.
    """

    def __init__(
        self, ticks: Iterator[int] | None = None, *, most_in_part: int = MAX_PART_ENTRIES
    ) -> None:
        """Args:
        ticks: numbers the entries; queues whose entries are compared share it.
        most_in_part: a longer part of the sorted entries is divided.
        """
        self._most_in_part = most_in_part
        # Blocks that were put in order, as most are by the time of their last access.
        self._in_order: OrderedDict[int, Entry] = OrderedDict()
        self._others: dict[int, Entry] = {}
        self._parts: list[list[Entry]] = []  # the others, sorted; no part is empty
        self._lasts: list[Entry] = []  # of each part
        self._ticks = itertools.count() if ticks is None else ticks

    def __len__(self) -> int:
        return len(self._in_order) + len(self._others)

    def __contains__(self, block: int) -> bool:
        return block in self._in_order or block in self._others

    def put(self, block: int, rank: Rank) -> None:
        """Insert a block, or change its rank."""
        entry = Entry(rank, next(self._ticks), block)
        if not self._in_order or entry > next(reversed(self._in_order.values())):
            self._remove_other(block)
            self._in_order[block] = entry
            self._in_order.move_to_end(block)
            return
        self.remove(block)
        self._others[block] = entry
        if not self._parts:
            self._parts.append([entry])
            self._lasts.append(entry)
            return
        at = min(bisect_left(self._lasts, entry), len(self._lasts) - 1)
        part = self._parts[at]
        insort(part, entry)
        self._lasts[at] = part[-1]
        if len(part) > self._most_in_part:
            half = len(part) // 2
            self._parts[at : at + 1] = part[:half], part[half:]
            self._lasts.insert(at, part[half - 1])

    def remove(self, block: int) -> None:
        """Remove a block. Unknown blocks are ignored."""
        if self._in_order.pop(block, None) is None:
            self._remove_other(block)

    def first(self) -> Entry | None:
        """The smallest entry, which stays in the queue. None: the queue is empty."""
        firsts = [part[0] for part in self._parts[:1]]
        firsts += itertools.islice(self._in_order.values(), 1)
        return min(firsts, default=None)

    def pop(self) -> Entry | None:
        """Remove and return the smallest entry. None: the queue is empty."""
        entry = self.first()
        if entry is not None:
            self.remove(entry.block)
        return entry

    def _remove_other(self, block: int) -> None:
        entry = self._others.pop(block, None)
        if entry is None:
            return
        at = bisect_left(self._lasts, entry)
        part = self._parts[at]
        del part[bisect_left(part, entry)]
        if part:
            self._lasts[at] = part[-1]
        else:
            del self._parts[at], self._lasts[at]


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
        self._queues: dict[QueueKey, BlockQueue] = {}
        self._queue_of: dict[int, BlockQueue] = {}  # by block
        # Heap of the first entries of all queues, with their values at `_valued_s`. Outdated
        # entries are dropped when `pop` meets them.
        self._firsts: list[tuple[Value, Entry, QueueKey]] = []
        self._valued_s: float | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def classes(self) -> set[RequestClass]:
        return {key.request_class for key, queue in self._queues.items() if queue}

    def put(self, block: int, key: QueueKey, used_s: float) -> None:
        """Insert a block into the queue `key`, or move it there."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = BlockQueue(self._ticks)
        before = self._queue_of.get(block, queue)
        if before is not queue:
            before.remove(block)
        self._queue_of[block] = queue
        queue.put(block, (used_s,))
        if self._valued_s is not None:
            first = queue.first()
            if first is not None and first.block == block:
                self._push_first(key, first, self._valued_s)
                if len(self._firsts) > 64 + 2 * len(self._queues):
                    self.invalidate_values()  # many outdated ones, if nothing is popped for long

    def remove(self, block: int) -> None:
        """Remove a block. Unknown blocks are ignored."""
        queue = self._queue_of.pop(block, None)
        if queue is not None:
            queue.remove(block)

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
            queue = self._queues[key]
            current = queue.first() is entry
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
        for key, queue in list(self._queues.items()):
            first = queue.first()
            if first is None:
                del self._queues[key]
            else:
                self._push_first(key, first, now_s)

    def _push_first(self, key: QueueKey, first: Entry, now_s: float) -> None:
        heapq.heappush(self._firsts, (self._value(key, first.block, now_s), first, key))
