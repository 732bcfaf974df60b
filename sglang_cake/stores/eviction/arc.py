"""ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003)."""

from collections import OrderedDict

from sglang_cake.stores.eviction.heap import BlockHeap
from sglang_cake.stores.eviction.policy import BasePolicy, Usage


class ArcPolicy(BasePolicy):
    """Implements `EvictionPolicy`.

    T1 holds blocks that were used once, T2 blocks that were used more often, both in LRU order. The
    ghost lists B1 and B2 hold the `ident` of blocks that were evicted from T1 and T2. A hit in B1
    raises the target length of T1, a hit in B2 lowers it.

    The paper assumes a fixed cache size c. Here c is the largest number of blocks that were present
    at once. The store evicts before it knows the new block, so a tie is evicted from T2.
    """

    def __init__(self) -> None:
        super().__init__()
        self._once = BlockHeap()  # T1
        self._often = BlockHeap()  # T2
        self._once_ghosts: OrderedDict[int, None] = OrderedDict()  # B1
        self._often_ghosts: OrderedDict[int, None] = OrderedDict()  # B2
        self._target = 0.0  # p
        self._size = 0  # c

    def add(self, block: int, usage: Usage) -> None:
        known = self._usage.get(block)
        if known is None:
            self._insert(block, usage)
        elif usage.uses > known.uses:
            self.on_touch(block, usage)
        else:  # the same accesses, reported again
            self._usage[block] = usage
            order = self._once if block in self._once else self._often
            order.put(block, (usage.used_s,))

    def on_touch(self, block: int, usage: Usage) -> None:
        self._usage[block] = usage
        self._once.remove(block)
        self._often.put(block, (usage.used_s,))

    def remove(self, block: int) -> None:
        if self._usage.pop(block, None) is not None:
            self._once.remove(block)
            self._often.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        if not self._usage:
            return None
        from_once = len(self._once) > 0 and (len(self._once) > self._target or not len(self._often))
        entry = (self._once if from_once else self._often).pop()
        assert entry is not None  # the chosen list has blocks
        usage = self._usage.pop(entry.block)
        ghosts = self._once_ghosts if from_once else self._often_ghosts
        ghosts[usage.ident] = None
        ghosts.move_to_end(usage.ident)
        self._trim_ghosts()
        return entry.block, usage

    def _insert(self, block: int, usage: Usage) -> None:
        self._usage[block] = usage
        self._size = max(self._size, len(self._usage))
        once_ghosts = len(self._once_ghosts)
        often_ghosts = len(self._often_ghosts)
        order = self._often
        if usage.ident in self._once_ghosts:
            self._target = min(self._size, self._target + max(1.0, often_ghosts / once_ghosts))
            del self._once_ghosts[usage.ident]
        elif usage.ident in self._often_ghosts:
            self._target = max(0.0, self._target - max(1.0, once_ghosts / often_ghosts))
            del self._often_ghosts[usage.ident]
        else:
            order = self._once
        order.put(block, (usage.used_s,))

    def _trim_ghosts(self) -> None:
        """Keep |T1| + |B1| <= c and |T1| + |T2| + |B1| + |B2| <= 2 c."""
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._size:
            self._once_ghosts.popitem(last=False)
        while self._often_ghosts and self._total() > 2 * self._size:
            self._often_ghosts.popitem(last=False)

    def _total(self) -> int:
        return len(self._usage) + len(self._once_ghosts) + len(self._often_ghosts)
