"""Greedy-Dual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories, 1998)."""

from sglang_cake.store.eviction.base import BasePolicy, Usage
from sglang_cake.store.eviction.heap import BlockHeap
from sglang_cake.store.eviction.worth import Worth


class GdfsPolicy(BasePolicy):
    """Implements `EvictionPolicy`.

    Priority = Clock + Frequency x Cost / Size, the smallest goes first, and the Clock is set to its
    priority: what is not used is overtaken in time. Cost: seconds to compute the block again.
    """

    def __init__(self, worth: Worth) -> None:
        super().__init__()
        self._worth = worth
        self._heap = BlockHeap()
        self._clock = 0.0

    def add(self, block: int, usage: Usage) -> None:
        self._usage[block] = usage
        cost = self._worth.compute_s(usage.use.position)
        value = (usage.uses + 1) * cost / max(1, usage.stored_bytes)
        self._heap.put(block, (self._clock + value, usage.used_s))

    def weigh(self, worth: Worth) -> None:
        self._worth = worth

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)
        self._heap.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        entry = self._heap.pop()
        if entry is None:
            return None
        self._clock = entry.rank[0]
        return entry.block, self._usage.pop(entry.block)
