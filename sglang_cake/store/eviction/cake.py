"""Expected seconds saved per byte: the order of a system that computes and loads at once.
docs/eviction.md has the derivation."""

import math
from collections.abc import Callable, Hashable

from sglang_cake.store.eviction.base import Usage
from sglang_cake.store.eviction.reuse import Kind, ReuseModel
from sglang_cake.store.eviction.workload import LIFE_S, ReusePolicy, kind_of
from sglang_cake.store.eviction.worth import Worth

STEP = math.log(1.25)


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
    ) -> None:
        super().__init__(model, life_s, kind_of)
        self.worth = worth

    def lane(self, usage: Usage, kind: Kind) -> tuple[Hashable, ...]:
        saved_s = self.worth.saved_s(usage.use.position, usage.use.reach)
        return (*kind, round(math.log(saved_s / max(1, usage.stored_bytes)) / STEP))

    def value(
        self, lane: tuple[Hashable, ...], usage: Usage, log_reuse: float
    ) -> tuple[float, ...]:
        power = lane[-1]
        assert isinstance(power, int)
        return (log_reuse + power * STEP,)
