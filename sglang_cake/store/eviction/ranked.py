"""Orders that are a function of one block's usage: FIFO, LRU, LFU."""

from collections.abc import Callable

from sglang_cake.store.eviction.base import BasePolicy, Usage
from sglang_cake.store.eviction.heap import BlockHeap, Rank


class RankedPolicy(BasePolicy):
    """Implements `EvictionPolicy`: the smallest rank goes first; of equal ones, the one that was
    added or touched longest ago."""

    def __init__(self, rank: Callable[[int, Usage], Rank]) -> None:
        super().__init__()
        self._rank = rank
        self._heap = BlockHeap()

    def add(self, block: int, usage: Usage) -> None:
        self._usage[block] = usage
        self._heap.put(block, self._rank(block, usage))

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)
        self._heap.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        entry = self._heap.pop()
        return None if entry is None else (entry.block, self._usage.pop(entry.block))


def fifo() -> RankedPolicy:
    """First in, first out."""
    return RankedPolicy(lambda block, usage: (usage.created_s, block))


def lru() -> RankedPolicy:
    """Least recently used."""
    return RankedPolicy(lambda block, usage: (usage.used_s,))


def lfu() -> RankedPolicy:
    """Least frequently used while it was there, then least recently."""
    return RankedPolicy(lambda block, usage: (usage.uses, usage.used_s))
