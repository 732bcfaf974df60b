"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023)."""

from collections import OrderedDict
from typing import Final

from sglang_cake.store.eviction.base import BasePolicy, Usage

SMALL_SHARE: Final = 0.1  # of the blocks, for those that are new
MOST_FREQUENCY: Final = 3


class S3FifoPolicy(BasePolicy):
    """Implements `EvictionPolicy`.

    New blocks pass through a small queue, and only those read more than once there get into the
    main one; what left the small queue is remembered, as many as the main queue is long, and goes
    to the main one when it comes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[int, int] = OrderedDict()  # block -> frequency
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # by `ident`

    def add(self, block: int, usage: Usage) -> None:
        if block not in self._usage:
            came_back = usage.ident in self._ghosts
            self._ghosts.pop(usage.ident, None)
            (self._main if came_back else self._small)[block] = 0
        self._usage[block] = usage

    def touched(self, block: int, usage: Usage) -> None:
        queue = self._small if block in self._small else self._main
        queue[block] = min(MOST_FREQUENCY, queue[block] + usage.uses - self._usage[block].uses)
        self._usage[block] = usage

    def remove(self, block: int) -> None:
        if self._usage.pop(block, None) is not None:
            (self._small if block in self._small else self._main).pop(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        while self._usage:
            if len(self._small) > SMALL_SHARE * len(self._usage) or not self._main:
                block, frequency = self._small.popitem(last=False)
                if frequency > 1:
                    self._main[block] = 0
                    continue
                self._remember(self._usage[block].ident)
            else:
                block, frequency = self._main.popitem(last=False)
                if frequency > 0:
                    self._main[block] = frequency - 1
                    continue
            return block, self._usage.pop(block)
        return None

    def _remember(self, ident: int) -> None:
        self._ghosts[ident] = None
        self._ghosts.move_to_end(ident)
        while len(self._ghosts) > max(1, len(self._main)):
            self._ghosts.popitem(last=False)
