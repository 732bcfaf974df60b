"""ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003)."""

from collections import OrderedDict

from sglang_cake.store.eviction.base import BasePolicy, Usage
from sglang_cake.store.eviction.heap import BlockHeap


class ArcPolicy(BasePolicy):
    """Implements `EvictionPolicy`.

    Two orders by last use, of blocks used once (T1) and more often (T2), and lists of those evicted
    from each (B1, B2), by `ident`. A hit in B1 says that T1 was too short, one in B2 that T2 was:
    `_target` is the length that T1 should have. The paper's fixed cache size c is here the most
    blocks that were ever there at once; as room is made before it is known for whom, a tie goes to
    T2.
    """

    def __init__(self) -> None:
        super().__init__()
        self._once = BlockHeap()  # T1
        self._often = BlockHeap()  # T2
        self._once_gone: OrderedDict[int, None] = OrderedDict()  # B1
        self._often_gone: OrderedDict[int, None] = OrderedDict()  # B2
        self._target = 0.0  # p
        self._size = 0  # c

    def add(self, block: int, usage: Usage) -> None:
        known = self._usage.get(block)
        if known is not None:
            if usage.uses > known.uses:
                self.touched(block, usage)
            else:  # heard of again: no use
                self._usage[block] = usage
                order = self._once if block in self._once else self._often
                order.put(block, (usage.used_s,))
            return
        self._usage[block] = usage
        self._size = max(self._size, len(self._usage))
        once, often = len(self._once_gone), len(self._often_gone)
        if usage.ident in self._once_gone:
            self._target = min(self._size, self._target + max(1.0, often / once))
            del self._once_gone[usage.ident]
            self._often.put(block, (usage.used_s,))
        elif usage.ident in self._often_gone:
            self._target = max(0.0, self._target - max(1.0, once / often))
            del self._often_gone[usage.ident]
            self._often.put(block, (usage.used_s,))
        else:
            self._once.put(block, (usage.used_s,))

    def touched(self, block: int, usage: Usage) -> None:
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
        once, often = len(self._once), len(self._often)
        from_once = once > 0 and (once > self._target or not often)
        entry = (self._once if from_once else self._often).pop()
        assert entry is not None  # that order is not empty
        usage = self._usage.pop(entry.block)
        gone = self._once_gone if from_once else self._often_gone
        gone[usage.ident] = None
        gone.move_to_end(usage.ident)
        while self._once_gone and len(self._once) + len(self._once_gone) > self._size:
            self._once_gone.popitem(last=False)
        while self._often_gone and self._all() > 2 * self._size:
            self._often_gone.popitem(last=False)
        return entry.block, usage

    def _all(self) -> int:
        return len(self._usage) + len(self._once_gone) + len(self._often_gone)
