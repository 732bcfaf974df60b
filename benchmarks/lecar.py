"""LeCaR (Vietri et al., "Driving Cache Replacement with ML-based LeCaR", HotStorage 2018): a policy
that learns which of two experts is right. Measured, and not good enough to be in the store."""

import contextlib
import math
import random
from collections import OrderedDict
from collections.abc import Sequence

from sglang_cake.stores.eviction.policy import EvictionPolicy, Usage
from sglang_cake.stores.eviction.reuse_model import Unlocked

LEARNING_RATE, DISCOUNT = 0.45, 0.005  # the paper's; the discount is taken to 1 / size


class LecarPolicy(EvictionPolicy):
    """There are two experts, LRU and LFU in the paper; each has a history of what was evicted on
    its advice alone, as long as the cache, and its weight falls when that comes back. As in the
    authors' code, time is counted in accesses, and no weight is below 0.01. Unlike there, LFU
    counts uses from zero when a block comes back: that is how `lfu` is defined here."""

    def __init__(self, experts: Sequence[EvictionPolicy]) -> None:
        super().__init__()
        self._experts = list(experts)
        self._weight = 0.5  # of the first expert
        self._histories: list[OrderedDict[int, int]] = [OrderedDict(), OrderedDict()]
        self._accesses = self._size = 0
        self._random = random.Random(1)

    def add(self, block: int, usage: Usage) -> None:
        self._accesses += 1
        if block not in self._usage:
            for number, history in enumerate(self._histories):
                since = history.pop(usage.ident, None)
                if since is not None:
                    self._regret(number, self._accesses - since)
        self._usage[block] = usage
        self._size = max(self._size, len(self._usage))
        for expert in self._experts:
            expert.add(block, usage)

    def give_back(self, block: int, usage: Usage) -> None:
        for history in self._histories:
            history.pop(usage.ident, None)
        self._usage[block] = usage
        for expert in self._experts:
            expert.give_back(block, usage)

    def refresh(self, now_s: float, unlocked: Unlocked = contextlib.nullcontext) -> None:
        for expert in self._experts:
            expert.refresh(now_s, unlocked)

    def _regret(self, number: int, accesses: int) -> None:
        """What an expert gave up came back after so many accesses."""
        weights = [self._weight, 1 - self._weight]
        weights[number] *= math.exp(-LEARNING_RATE * DISCOUNT ** (accesses / self._size))
        self._weight = min(0.99, max(0.01, weights[0] / sum(weights)))

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)
        for expert in self._experts:
            expert.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        choices = [expert.pop(now_s) for expert in self._experts]
        number = 0 if self._random.random() < self._weight else 1
        popped, other = choices[number], choices[1 - number]
        if popped is None or other is None:
            return None
        if other[0] != popped[0]:
            self._experts[1 - number].give_back(*other)
            self._experts[1 - number].remove(popped[0])
            history = self._histories[number]
            history[popped[1].ident] = self._accesses
            if len(history) > self._size:
                history.popitem(last=False)
        del self._usage[popped[0]]
        return popped
