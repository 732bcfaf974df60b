"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023)."""

from collections import OrderedDict
from typing import Final

from sglang_cake.stores.eviction.policy import BasePolicy, Usage

SMALL_SHARE: Final = 0.1  # of all blocks, the target length of the small queue
MAX_FREQUENCY: Final = 3


class S3FifoPolicy(BasePolicy):
    """Implements `EvictionPolicy`.

    New blocks enter a small queue. Blocks that were read more than once there move to the main
    queue, and others are evicted. A ghost queue, as long as the main queue, holds the `ident` of
    blocks that were evicted from the small queue. If such a block is stored again, it enters the
    main queue.
    """

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[int, int] = OrderedDict()  # block -> frequency
        self._main: OrderedDict[int, int] = OrderedDict()  # block -> frequency
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # ident

    def add(self, block: int, usage: Usage) -> None:
        if block not in self._usage:
            queue = self._small
            if usage.ident in self._ghosts:
                del self._ghosts[usage.ident]
                queue = self._main
            queue[block] = 0
        self._usage[block] = usage

    def on_touch(self, block: int, usage: Usage) -> None:
        queue = self._queue_of(block)
        reads = usage.uses - self._usage[block].uses
        queue[block] = min(MAX_FREQUENCY, queue[block] + reads)
        self._usage[block] = usage

    def remove(self, block: int) -> None:
        if self._usage.pop(block, None) is not None:
            del self._queue_of(block)[block]

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        while self._usage:
            if len(self._small) > SMALL_SHARE * len(self._usage) or not self._main:
                block, frequency = self._small.popitem(last=False)
                if frequency > 1:
                    self._main[block] = 0
                    continue
                self._add_ghost(self._usage[block].ident)
            else:
                block, frequency = self._main.popitem(last=False)
                if frequency > 0:
                    self._main[block] = frequency - 1
                    continue
            return block, self._usage.pop(block)
        return None

    def _queue_of(self, block: int) -> OrderedDict[int, int]:
        return self._small if block in self._small else self._main

    def _add_ghost(self, ident: int) -> None:
        self._ghosts[ident] = None
        self._ghosts.move_to_end(ident)
        while len(self._ghosts) > max(1, len(self._main)):
            self._ghosts.popitem(last=False)
