"""Policies from the literature: FIFO, LRU, LFU, GDFS, S3-FIFO, ARC."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from sglang_cake.stores.eviction.policy import Benefit, EvictionPolicy, Usage
from sglang_cake.stores.eviction.queues import BlockQueue, Rank

SMALL_SHARE: Final = 0.1  # of all blocks, the length of the small queue of a full S3-FIFO cache
MAX_FREQUENCY: Final = 3  # of S3-FIFO


class RankedPolicy(EvictionPolicy):
    """The block of the smallest rank is evicted first.

    Of equal ranks the block that was added or touched longest ago is first.
    """

    def __init__(self, rank: Callable[[int, Usage], Rank]) -> None:
        """Args: rank: `(block, usage)` gives the rank of a block, whenever its usage changes."""
        super().__init__()
        self._rank = rank
        self._queue = BlockQueue()

    def add(self, block: int, usage: Usage) -> None:
        self._usage[block] = usage
        self._queue.put(block, self._rank(block, usage))

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)
        self._queue.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        entry = self._queue.pop()
        return None if entry is None else (entry.block, self._usage.pop(entry.block))


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
        self._popped: dict[int, Rank] = {}  # by block, since the last new block

    def set_benefit(self, benefit: Benefit) -> None:
        self._benefit = benefit

    def add(self, block: int, usage: Usage) -> None:
        if block not in self._usage:
            self._popped.clear()
        super().add(block, usage)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        victim = self._queue.first()
        if victim is not None:
            self._popped[victim.block] = victim.rank
            self._clock = max(self._clock, victim.rank[0])
        return super().pop(now_s)

    def give_back(self, block: int, usage: Usage) -> None:
        rank = self._popped.pop(block, None)
        if rank is None:
            self.add(block, usage)
            return
        self._usage[block] = usage
        self._queue.put(block, rank)

    def _priority(self, block: int, usage: Usage) -> Rank:
        cost_s = self._benefit.compute_s(usage.context.position)
        value = (usage.uses + 1) * cost_s / max(1, usage.stored_bytes)
        return self._clock + value, usage.used_s


class S3FifoPolicy(EvictionPolicy):
    """S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

    New blocks enter a small queue. Blocks that were read more than once there move to the main
    queue, and others are evicted. A ghost queue holds the `ident` of blocks that were evicted from
    the small queue, as many as the main queue of a full cache holds blocks. If such a block is
    stored again, it enters the main queue.

    The paper assumes a fixed cache size. Here it is the largest number of blocks that were present
    at once.

    A `pop` moves blocks that were read until it finds one that was not: O(n) at worst. All
    evictions together move at most one block for each read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[int, int] = OrderedDict()  # block -> frequency
        self._main: OrderedDict[int, int] = OrderedDict()  # block -> frequency
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # ident
        self._size = 0
        # By block, since the last new block: the queue from which it was popped, its frequency.
        self._popped: dict[int, tuple[OrderedDict[int, int], int]] = {}

    def add(self, block: int, usage: Usage) -> None:
        if block in self._usage:
            self._update(block, usage)
            return
        self._popped.clear()
        while len(self._ghosts) > (1 - SMALL_SHARE) * self._size:
            self._ghosts.popitem(last=False)
        queue = self._small
        if usage.ident in self._ghosts:
            del self._ghosts[usage.ident]
            queue = self._main
        queue[block] = 0
        self._usage[block] = usage
        self._size = max(self._size, len(self._usage))

    def remove(self, block: int) -> None:
        if self._usage.pop(block, None) is not None:
            del self._queue_of(block)[block]

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        while self._usage:
            if len(self._small) / len(self._usage) >= SMALL_SHARE:
                block, frequency = self._small.popitem(last=False)
                if frequency > 1:
                    self._main[block] = 0
                    continue
                ident = self._usage[block].ident
                self._ghosts[ident] = None
                self._ghosts.move_to_end(ident)
                self._popped[block] = self._small, frequency
            else:
                block, frequency = self._main.popitem(last=False)
                if frequency > 0:
                    self._main[block] = frequency - 1
                    continue
                self._popped[block] = self._main, 0
            return block, self._usage.pop(block)
        return None

    def give_back(self, block: int, usage: Usage) -> None:
        if block not in self._popped:
            self.add(block, usage)
            return
        queue, frequency = self._popped.pop(block)
        queue[block] = frequency
        queue.move_to_end(block, last=False)
        if queue is self._small:
            self._ghosts.pop(usage.ident, None)
        self._usage[block] = usage

    def _update(self, block: int, usage: Usage) -> None:
        queue = self._queue_of(block)
        reads = usage.uses - self._usage[block].uses
        queue[block] = min(MAX_FREQUENCY, queue[block] + reads)
        self._usage[block] = usage

    def _queue_of(self, block: int) -> OrderedDict[int, int]:
        return self._small if block in self._small else self._main


class ArcPolicy(EvictionPolicy):
    """ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003).

    T1 holds blocks that were used once, T2 blocks that were used more often, both in LRU order. The
    ghost lists B1 and B2 hold the `ident` of blocks that were evicted from T1 and T2. A hit in B1
    raises the target length of T1, a hit in B2 lowers it.

    The paper assumes a fixed cache size c. Here c is the largest number of blocks that were present
    at once. The store evicts before it knows the new block, so a tie is evicted from T2.
    """

    def __init__(self) -> None:
        super().__init__()
        self._once = BlockQueue()  # T1
        self._often = BlockQueue()  # T2
        self._once_ghosts: OrderedDict[int, None] = OrderedDict()  # B1
        self._often_ghosts: OrderedDict[int, None] = OrderedDict()  # B2
        self._target = 0.0  # p
        self._size = 0  # c

    def add(self, block: int, usage: Usage) -> None:
        if block in self._usage:
            self._update(block, usage)
        else:
            self._trim_ghosts()
            self._insert(block, usage)

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
        return entry.block, usage

    def give_back(self, block: int, usage: Usage) -> None:
        for ghosts, order in (
            (self._once_ghosts, self._once),
            (self._often_ghosts, self._often),
        ):
            if usage.ident in ghosts:
                del ghosts[usage.ident]
                self._usage[block] = usage
                order.put(block, (usage.used_s, 0.0))
                return
        self.add(block, usage)

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
        order.put(block, (usage.used_s, 0.0))

    def _update(self, block: int, usage: Usage) -> None:
        is_used = usage.uses > self._usage[block].uses  # otherwise only its facts are new
        order = self._once if block in self._once and not is_used else self._often
        self._usage[block] = usage
        self._once.remove(block)
        order.put(block, (usage.used_s, 0.0))

    def _trim_ghosts(self) -> None:
        """Keep |T1| + |B1| <= c and |T1| + |T2| + |B1| + |B2| <= 2 c."""
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._size:
            self._once_ghosts.popitem(last=False)
        while self._often_ghosts and self._total() > 2 * self._size:
            self._often_ghosts.popitem(last=False)

    def _total(self) -> int:
        return len(self._usage) + len(self._once_ghosts) + len(self._often_ghosts)
