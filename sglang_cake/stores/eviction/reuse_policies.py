"""Eviction by the probability of reuse: `workload`, and `cake` and `cake-prefix` with benefits.

Sources: "KVCache Cache in the Wild" (arXiv 2506.02634), section 4.2, for `workload`;
docs/eviction.md derives the values of `cake` and `cake-prefix`.
"""

import contextlib
import math

from sglang_cake.stores.eviction.policy import Benefit, EvictionPolicy, Usage
from sglang_cake.stores.eviction.queues import ClassQueues, QueueKey
from sglang_cake.stores.eviction.reuse_model import (
    MAX_TURN,
    RequestClass,
    ReuseFits,
    ReuseModel,
    Unlocked,
)

# Benefits are rounded to powers of 1.25. Within a class and a power LRU decides, so an eviction
# compares one block of each.
LOG_BENEFIT_STEP = math.log(1.25)
PREFIX_BENEFIT_EXPONENT = 0.5  # 1 maximises seconds saved, 0 hits


class ReusePolicy(EvictionPolicy):
    """Evicts the block of the smallest `value`, which a subclass implements.

    Attributes:
        class_queues: an eviction at a new instant compares one block of each, since within a class
            the probability of an access falls with the time since the last one.
        life_s: an access counts if it is expected within this time; docs/eviction.md compares
            other values.
        class_weight: weight of the fit of a block's own class, from 0 to 1. The pooled fit has the
            rest: with few samples the own fit is often wrong, and the blocks of a class that it
            underestimates are lost.
    """

    life_s = 30.0
    class_weight = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.model = ReuseModel()
        self.class_queues = ClassQueues(self._block_value)

    @staticmethod
    def class_of(usage: Usage) -> RequestClass:
        """The paper's class (workload, turn), and whether the block was read since it was written.

        Blocks that were read, such as those of system prompts, are reused sooner than others of the
        same request (docs/eviction.md).
        """
        return usage.context.workload, min(usage.context.turn, MAX_TURN), min(usage.uses, 1)

    def benefit_step(self, usage: Usage) -> int:
        """Logarithm of the benefit of a block, rounded to steps; 0 for policies without benefit."""
        return 0

    def value(self, benefit_step: int, usage: Usage, log_reuse: float) -> tuple[float, ...]:
        """Value of a block. The smallest value is evicted first.

        Args:
            benefit_step: result of the method of this name at the last access.
            log_reuse: logarithm of the probability of an access within `life_s`.
        """
        raise NotImplementedError

    def add(self, block: int, usage: Usage) -> None:
        request_class = self._record_access(usage)
        self._usage[block] = usage
        key = QueueKey(request_class, self.benefit_step(usage))
        self.class_queues.put(block, key, usage.used_s)

    def remove(self, block: int) -> None:
        self._usage.pop(block, None)
        self.class_queues.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        block = self.class_queues.pop(now_s)
        return None if block is None else (block, self._usage.pop(block))

    def record_rejected(self, usage: Usage) -> None:
        self._record_access(usage)

    def reuse_probability(self, usage: Usage) -> float:
        request_class = self.model.class_for(self.class_of(usage), usage.context.tenant)
        return self._weighted(self.model.fit(request_class).share, self.model.pooled.share)

    def refresh(self, now_s: float, unlocked: Unlocked = contextlib.nullcontext) -> None:
        if self.model.refit(now_s, self.class_queues.classes, unlocked):
            self.class_queues.invalidate_values()

    def fits_to_save(self) -> ReuseFits:
        return self.model.fits_to_save()

    def resume(self, fits: ReuseFits, now_s: float) -> None:
        self.model.resume(fits, now_s)
        self.class_queues.invalidate_values()

    def _record_access(self, usage: Usage) -> RequestClass:
        """Returns its class."""
        request_class = self.model.class_for(self.class_of(usage), usage.context.tenant)
        self.model.record_access(usage.ident, request_class, usage.used_s)
        return request_class

    def _block_value(self, key: QueueKey, block: int, now_s: float) -> tuple[float, ...]:
        usage = self._usage[block]
        age_s = max(0.0, now_s - usage.used_s)
        own = self.model.fit(key.request_class).log_reuse(age_s, self.life_s)
        pooled = self.model.pooled.log_reuse(age_s, self.life_s)
        return self.value(key.benefit_step, usage, self._weighted(own, pooled))

    def _weighted(self, own: float, pooled: float) -> float:
        return self.class_weight * own + (1 - self.class_weight) * pooled


class WorkloadPolicy(ReusePolicy):
    """Evicts the block that is least likely to be accessed within `life_s`.

    The priority is the tuple (probability, -position in the prompt), as in the paper. The
    probability is that of the class, weighted with that of all blocks (`class_weight`). With one
    class this is LRU.
    """

    def value(self, benefit_step: int, usage: Usage, log_reuse: float) -> tuple[float, ...]:
        return log_reuse, -float(usage.context.position)


class CakePolicy(ReusePolicy):
    """Value = P(access within `life_s`) x seconds that the block then saves / bytes."""

    benefit_exponent = 1.0

    def __init__(self, benefit: Benefit) -> None:
        super().__init__()
        self.benefit = benefit

    def set_benefit(self, benefit: Benefit) -> None:
        self.benefit = benefit

    def log_benefit(self, usage: Usage) -> float:
        """Logarithm of the seconds per byte that an access to the block saves."""
        saved_s = self.benefit.saved_s(usage.context.position, usage.context.reach)
        return math.log(saved_s / max(1, usage.stored_bytes))

    def benefit_step(self, usage: Usage) -> int:
        # Relative to computing a first block: so a block that was ranked by the costs of a slower
        # or faster server, or by the defaults before a server reported its costs, compares with
        # other blocks.
        unit = self.benefit_exponent * math.log(self.benefit.compute_s(0))
        return round(self.log_benefit(usage) / LOG_BENEFIT_STEP) - round(unit / LOG_BENEFIT_STEP)

    def value(self, benefit_step: int, usage: Usage, log_reuse: float) -> tuple[float, ...]:
        return (log_reuse + benefit_step * LOG_BENEFIT_STEP,)


class CakePrefixPolicy(CakePolicy):
    """Evicts prompt by prompt, from the end, for systems that need unbroken prefixes.

    All blocks of a prompt have the mean benefit of its blocks, to the power of
    PREFIX_BENEFIT_EXPONENT.
    """

    benefit_exponent = PREFIX_BENEFIT_EXPONENT

    def log_benefit(self, usage: Usage) -> float:
        saved_s = self.benefit.mean_saved_s(usage.context.reach)
        return self.benefit_exponent * math.log(saved_s / max(1, usage.stored_bytes))
