"""ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003)."""

from collections import OrderedDict

from sglang_cake.store.eviction.base import BasePolicy, Usage

Order = OrderedDict[int, None]


class ArcPolicy(BasePolicy):
    """Implements `EvictionPolicy`.

    Two LRU lists, of blocks used once (T1) and more often (T2), and of those evicted from each (B1,
    B2), by `ident`. A hit in B1 says that T1 was too short, one in B2 that T2 was: `_target` is the
    length that T1 should have. The paper's fixed cache size c is here the most blocks that were
    ever there at once; as room is made before it is known for whom, a tie goes to T2.
    """

    def __init__(self) -> None:
        super().__init__()
        self._once: Order = OrderedDict()  # T1
        self._often: Order = OrderedDict()  # T2
        self._once_gone: Order = OrderedDict()  # B1
        self._often_gone: Order = OrderedDict()  # B2
        self._target = 0.0  # p
        self._size = 0  # c

    def add(self, block: int, usage: Usage) -> None:
        if block in self._usage:
            self.touched(block, usage)
            return
        self._usage[block] = usage
        self._size = max(self._size, len(self._usage))
        once, often = len(self._once_gone), len(self._often_gone)
        if usage.ident in self._once_gone:
            self._target = min(self._size, self._target + max(1.0, often / once))
            del self._once_gone[usage.ident]
            self._often[block] = None
        elif usage.ident in self._often_gone:
            self._target = max(0.0, self._target - max(1.0, once / often))
            del self._often_gone[usage.ident]
            self._often[block] = None
        else:
            self._once[block] = None

    def touched(self, block: int, usage: Usage) -> None:
        self._usage[block] = usage
        self._once.pop(block, None)
        self._often[block] = None
        self._often.move_to_end(block)

    def remove(self, block: int) -> None:
        if self._usage.pop(block, None) is not None:
            self._once.pop(block, None)
            self._often.pop(block, None)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        if not self._usage:
            return None
        from_once = bool(self._once) and (len(self._once) > self._target or not self._often)
        block, _ = (self._once if from_once else self._often).popitem(last=False)
        usage = self._usage.pop(block)
        gone = self._once_gone if from_once else self._often_gone
        gone[usage.ident] = None
        gone.move_to_end(usage.ident)
        while self._once_gone and len(self._once) + len(self._once_gone) > self._size:
            self._once_gone.popitem(last=False)
        while self._often_gone and self._all() > 2 * self._size:
            self._often_gone.popitem(last=False)
        return block, usage

    def _all(self) -> int:
        return len(self._usage) + len(self._once_gone) + len(self._often_gone)
