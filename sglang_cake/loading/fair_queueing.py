"""What each tenant was given, so that turns can go to the one that had least.

The virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024,
section 4): a tenant pays for every prompt token that is computed or loaded for it. One that comes
back after a pause is lifted to the least of those that are there: turns cannot be saved up. No
clock: all ranks of a group count alike.
"""

from collections import Counter

MOST_TENANTS = 4096
# Tenants whose counts fall into the same span of this many tokens have an equal turn, in which the
# shortest goes first. Less would have them change places at every step.
TURN_TOKENS = 4096


class TenantTokens:
    """Counters of prompt tokens by tenant. Not thread-safe."""

    def __init__(self) -> None:
        self._had: dict[int, int] = {}
        self._live: Counter[int] = Counter()  # requests
        self._last = 0  # count of the last tenant that left nobody behind

    def arrives(self, tenant: int) -> None:
        """A request of `tenant` is there."""
        self._had[tenant] = self._count(tenant)
        self._live[tenant] += 1

    def leaves(self, tenant: int) -> None:
        """A request that had arrived is over."""
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        del self._live[tenant]
        if not self._live:
            self._last = self._had[tenant]
        if len(self._had) > MOST_TENANTS:
            gone = [each for each in self._had if each not in self._live]
            del self._had[min(gone, key=self._had.__getitem__)]

    def charge(self, tenant: int, tokens: int) -> None:
        """A tenant whose request is there was given `tokens`."""
        self._had[tenant] += tokens

    def turn(self, tenant: int) -> int:
        """Lowest first. Of a tenant that is not there: what it would be if it came now."""
        return self._count(tenant) // TURN_TOKENS

    def _count(self, tenant: int) -> int:
        had = self._had.get(tenant, 0)
        if tenant in self._live:
            return had
        return max(had, min((self._had[other] for other in self._live), default=self._last))
