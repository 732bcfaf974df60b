"""LeCaR (Vietri et al., "Driving Cache Replacement with ML-based LeCaR", HotStorage 2018): a policy
that learns which of two experts is right. Measured, and not good enough to be in the store."""

import math
import random
from collections import OrderedDict
from collections.abc import Sequence

from sglang_cake.stores.eviction.policy import EvictionPolicy, Usage

LEARNING_RATE, DISCOUNT = 0.45, 0.005  # the paper's; the discount is taken to 1 / size


class LecarPolicy(EvictionPolicy):
    """There are two experts, LRU and LFU in the paper; each has a history of what was evicted on
    its advice, as long as the cache, and its weight falls when that comes back."""

    def __init__(self, experts: Sequence[EvictionPolicy]) -> None:
        super().__init__()
        self._experts = list(experts)
        self._weights = [0.5, 0.5]
        self._histories: list[OrderedDict[int, int]] = [OrderedDict(), OrderedDict()]
        self._evictions = self._size = 0
        self._random = random.Random(1)

    def add(self, block: int, usage: Usage) -> None:
        if block not in self._usage:
            for number, history in enumerate(self._histories):
                since = history.pop(usage.ident, None)
                if since is not None:
                    self._regret(number, self._evictions - since)
        self._usage[block] = usage
        self._size = max(self._size, len(self._usage))
        for expert in self._experts:
            expert.add(block, usage)

    def refresh(self, now_s: float) -> None:
        for expert in self._experts:
            expert.refresh(now_s)

    def _regret(self, number: int, evictions: int) -> None:
        """What an expert gave up came back after so many evictions."""
        loss = DISCOUNT ** (evictions / self._size)
        self._weights[1 - number] *= math.exp(LEARNING_RATE * loss)
        total = sum(self._weights)
        self._weights = [weight / total for weight in self._weights]

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)
        for expert in self._experts:
            expert.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        number = 0 if self._random.random() < self._weights[0] else 1
        popped = self._experts[number].pop(now_s)
        if popped is None:
            return None
        self.remove(popped[0])
        self._evictions += 1
        history = self._histories[number]
        history[popped[1].ident] = self._evictions
        if len(history) > self._size:
            history.popitem(last=False)
        return popped
