"""Which block goes first when room is needed. Pure: no clock, no disk, no lock."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class Usage:
    """What a policy may know of a block."""

    stored_bytes: int
    created_s: float  # seconds since 1970, as are all times here
    used_s: float  # last put or read
    uses: int  # reads since it was put


class EvictionPolicy(Protocol):
    """An order among blocks, which are integers here. Every call is O(log n) or better."""

    def __len__(self) -> int: ...

    def add(self, block: int, usage: Usage) -> None:
        """A block is there; one that was there already is known better now."""
        ...

    def touch(self, block: int, at_s: float, uses: int = 1) -> None:
        """A block was read, the last time at `at_s`; an unknown one is passed over."""
        ...

    def remove(self, block: int) -> None:
        """A block has gone; an unknown one is passed over."""
        ...

    def pop(self) -> tuple[int, Usage] | None:
        """Remove and return the block to evict next, as it was known; None when none is left.

        One that cannot be evicted now, because it is being read, is given back by `add`.
        """
        ...


Rank = Callable[[Usage], tuple[float, ...]]


class RankedPolicy:
    """Implements `EvictionPolicy` for any order that is a function of a block's usage.

    A heap whose outdated entries are passed over when they come up; it is made anew when they are
    the most of it, so it holds at most about twice as many entries as there are blocks.
    """

    def __init__(self, rank: Rank) -> None:
        """Args: rank: the block with the smallest goes first."""
        self._rank = rank
        self._usage: dict[int, Usage] = {}
        self._heap: list[tuple[tuple[float, ...], int]] = []

    def __len__(self) -> int:
        return len(self._usage)

    def add(self, block: int, usage: Usage) -> None:
        self._usage[block] = usage
        if len(self._heap) > 64 + 2 * len(self._usage):
            self._heap = [(self._rank(known), block) for block, known in self._usage.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (self._rank(usage), block))

    def touch(self, block: int, at_s: float, uses: int = 1) -> None:
        usage = self._usage.get(block)
        if usage is not None:
            at_s = max(at_s, usage.used_s)
            self.add(block, replace(usage, used_s=at_s, uses=usage.uses + uses))

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)

    def pop(self) -> tuple[int, Usage] | None:
        while self._heap:
            rank, block = heapq.heappop(self._heap)
            usage = self._usage.get(block)
            if usage is not None and self._rank(usage) == rank:
                del self._usage[block]
                return block, usage
        return None


RANKS: Final[dict[str, Rank]] = {
    "lru": lambda usage: (usage.used_s,),
    "fifo": lambda usage: (usage.created_s,),
    "lfu": lambda usage: (usage.uses, usage.used_s),
}


def new_policy(name: str) -> EvictionPolicy:
    """The policy called `name`, a key of RANKS, without blocks."""
    return RankedPolicy(RANKS[name])
