"""Policies whose rank depends on one block: FIFO, LRU, LFU, GDFS."""

from collections.abc import Callable

from sglang_cake.stores.eviction.benefit import Benefit
from sglang_cake.stores.eviction.heap import BlockHeap, Rank
from sglang_cake.stores.eviction.policy import BasePolicy, Usage


class RankedPolicy(BasePolicy):
    """Implements `EvictionPolicy`: the block of the smallest rank is evicted first.

    Of equal ranks the block that was added or touched longest ago is first.
    """

    def __init__(self, rank: Callable[[int, Usage], Rank]) -> None:
        """Args:
        rank: `(block, usage)` gives the rank of a block, whenever its usage changes.
        """
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
    """Least frequently used since it was written; of equal ones the least recently used."""
    return RankedPolicy(lambda block, usage: (usage.uses, usage.used_s))


class GdfsPolicy(RankedPolicy):
    """Greedy-Dual-Size-Frequency (Cherkasova, HP Laboratories, 1998).

    "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy": the priority
    of a block is Clock + Frequency x Cost / Size. Cost is the time to compute the block again. An
    eviction sets Clock to the priority of its victim, so that blocks age relative to new ones.
    """

    def __init__(self, benefit: Benefit) -> None:
        super().__init__(self._priority)
        self._benefit = benefit
        self._clock = 0.0

    def set_benefit(self, benefit: Benefit) -> None:
        self._benefit = benefit

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        victim = self._heap.first()
        if victim is not None:
            self._clock = victim.rank[0]
        return super().pop(now_s)

    def _priority(self, block: int, usage: Usage) -> Rank:
        cost_s = self._benefit.compute_s(usage.context.position)
        value = (usage.uses + 1) * cost_s / max(1, usage.stored_bytes)
        return self._clock + value, usage.used_s
