"""Eviction by expected seconds saved per byte, for servers that compute and load at once.

docs/eviction.md has the derivation.
"""

import math
from collections.abc import Callable

from sglang_cake.stores.eviction.benefit import Benefit
from sglang_cake.stores.eviction.policy import Usage
from sglang_cake.stores.eviction.reuse import RequestClass, ReuseModel
from sglang_cake.stores.eviction.workload import CLASS_WEIGHT, LIFE_S, ReusePolicy, class_of

# Benefits are rounded to powers of 1.25. Within a class and a power LRU decides, so an eviction
# compares one block of each.
LOG_BENEFIT_STEP = math.log(1.25)
PREFIX_BENEFIT_EXPONENT = 0.5  # 1 maximises seconds saved, 0 hits


class CakePolicy(ReusePolicy):
    """Value = P(access within `life_s`) x seconds that the block then saves / bytes."""

    def __init__(
        self,
        benefit: Benefit,
        model: ReuseModel | None = None,
        life_s: float = LIFE_S,
        class_of: Callable[[Usage], RequestClass] = class_of,
        class_weight: float = CLASS_WEIGHT,
    ) -> None:
        """Args:
        benefit: gives the seconds that a block saves.
        model, life_s, class_of, class_weight: see `ReusePolicy`.
        """
        super().__init__(model, life_s, class_of, class_weight)
        self.benefit = benefit

    def set_benefit(self, benefit: Benefit) -> None:
        self.benefit = benefit

    def log_benefit(self, usage: Usage) -> float:
        """Logarithm of the seconds per byte that an access to the block saves."""
        saved_s = self.benefit.saved_s(usage.context.position, usage.context.reach)
        return math.log(saved_s / max(1, usage.stored_bytes))

    def benefit_step(self, usage: Usage) -> int:
        return round(self.log_benefit(usage) / LOG_BENEFIT_STEP)

    def value(self, benefit_step: int, usage: Usage, log_reuse: float) -> tuple[float, ...]:
        return (log_reuse + benefit_step * LOG_BENEFIT_STEP,)


class CakePrefixPolicy(CakePolicy):
    """Evicts prompt by prompt, from the end, for systems that need unbroken prefixes.

    All blocks of a prompt have the mean benefit of its blocks, to the power of
    PREFIX_BENEFIT_EXPONENT.
    """

    def log_benefit(self, usage: Usage) -> float:
        saved_s = self.benefit.mean_saved_s(usage.context.reach)
        return PREFIX_BENEFIT_EXPONENT * math.log(saved_s / max(1, usage.stored_bytes))
