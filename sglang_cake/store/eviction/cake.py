"""Expected seconds saved per byte: the order of a system that computes and loads at once.
docs/eviction.md has the derivation."""

import math
from collections.abc import Callable, Hashable

from sglang_cake.store.eviction.base import Usage
from sglang_cake.store.eviction.reuse import Kind, ReuseModel
from sglang_cake.store.eviction.workload import LIFE_S, TRUST, ReusePolicy, kind_of
from sglang_cake.store.eviction.worth import Worth

STEP = math.log(1.25)
PREFIX_WEIGHT = 0.5


class CakePolicy(ReusePolicy):
    """Value = P(use within the coming life) x seconds saved then / bytes.

    Worth is rounded to powers of 1.25: within a class and a power the order is that of the last
    access, and an eviction looks at one block of each.
    """

    def __init__(
        self,
        worth: Worth,
        model: ReuseModel | None = None,
        life_s: float = LIFE_S,
        kind_of: Callable[[Usage], Kind] = kind_of,
        trust: float = TRUST,
    ) -> None:
        super().__init__(model, life_s, kind_of, trust)
        self.worth = worth

    def weigh(self, worth: Worth) -> None:
        self.worth = worth

    def lane(self, usage: Usage, kind: Kind) -> tuple[Hashable, ...]:
        return (*kind, round(self.log_worth(usage) / STEP))

    def log_worth(self, usage: Usage) -> float:
        """Logarithm of the seconds saved per byte, should the block be used."""
        saved_s = self.worth.saved_s(usage.use.position, usage.use.reach)
        return math.log(saved_s / max(1, usage.stored_bytes))

    def value(
        self, lane: tuple[Hashable, ...], usage: Usage, log_reuse: float
    ) -> tuple[float, ...]:
        power = lane[-1]
        assert isinstance(power, int)
        return (log_reuse + power * STEP,)


class CakePrefixPolicy(CakePolicy):
    """The same for who needs unbroken prefixes: the blocks of a prompt have one worth, its mean, so
    that prompts go one after the other and from their ends.

    The worth counts by its square root, half way between seconds (1) and hits (0).
    """

    def log_worth(self, usage: Usage) -> float:
        saved_s = self.worth.mean_saved_s(usage.use.reach)
        return PREFIX_WEIGHT * math.log(saved_s / max(1, usage.stored_bytes))
