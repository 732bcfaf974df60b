"""What tenants owe each other: a quota, and that none of them pushes out all others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sglang_cake.store.eviction.base import BasePolicy, EvictionPolicy, Usage
from sglang_cake.store.eviction.heap import BlockHeap
from sglang_cake.store.eviction.reuse import Fits
from sglang_cake.store.eviction.worth import Worth

MOST_TENANTS: Final = 1024  # further ones are taken together


@dataclass(frozen=True, slots=True)
class Sharing:
    """False if there are no rules."""

    quota_bytes: int | None = None  # that one tenant may have
    fair: bool = False  # who has more than an equal share makes way for the others

    def __bool__(self) -> bool:
        return self.fair or self.quota_bytes is not None


EVERYBODY: Final = Sharing()


class TenantPolicy(BasePolicy):
    """Implements `EvictionPolicy` by another one, which decides as long as no rule is broken.

    A tenant over its quota makes way first; with `fair`, then the one that has the most, if that is
    more than an equal share of what is there. Their least recently used block goes. So a tenant
    with less than an equal share loses nothing to one that floods the store.
    """

    def __init__(self, inner: EvictionPolicy, sharing: Sharing) -> None:
        super().__init__()
        self._inner, self._sharing = inner, sharing
        self._orders: dict[int, BlockHeap] = {}  # of each tenant, by last use
        self._bytes: dict[int, int] = {}

    def add(self, block: int, usage: Usage) -> None:
        self._enter(block, usage, self._inner.add)

    def touched(self, block: int, usage: Usage) -> None:
        before = self._usage[block]

        def touch(block: int, usage: Usage) -> None:
            self._inner.touch(block, usage.used_s, usage.uses - before.uses, usage.use)

        self._enter(block, usage, touch)

    def remove(self, block: int) -> None:
        self._leave(block)
        self._inner.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        tenant = self._owing()
        if tenant is None:
            popped = self._inner.pop(now_s)
            if popped is not None:
                self._leave(popped[0])
            return popped
        first = self._orders[tenant].first()
        assert first is not None  # a tenant without blocks has no bytes
        usage = self._usage[first.block]
        self.remove(first.block)
        return first.block, usage

    def over_bytes(self) -> int:
        quota = self._sharing.quota_bytes
        if quota is None:
            return 0
        return sum(max(0, taken - quota) for taken in self._bytes.values())

    def skipped(self, usage: Usage) -> None:
        self._inner.skipped(usage)

    def chance(self, usage: Usage) -> float:
        return self._inner.chance(usage)

    def refresh(self, now_s: float) -> None:
        self._inner.refresh(now_s)

    def fits(self) -> Fits:
        return self._inner.fits()

    def learned(self, fits: Fits, now_s: float) -> None:
        self._inner.learned(fits, now_s)

    def weigh(self, worth: Worth) -> None:
        self._inner.weigh(worth)

    def _owing(self) -> int | None:
        """Who makes way; None: whoever has the block that is worth least."""
        if not self._bytes:
            return None
        most = max(self._bytes, key=lambda tenant: (self._bytes[tenant], tenant))
        taken, quota = self._bytes[most], self._sharing.quota_bytes
        if quota is not None and taken > quota:
            return most
        share = sum(self._bytes.values()) / len(self._bytes)
        return most if self._sharing.fair and taken > share else None

    def _enter(self, block: int, usage: Usage, told: Callable[[int, Usage], None]) -> None:
        self._leave(block)
        tenant = usage.use.tenant
        if tenant not in self._bytes and len(self._bytes) >= MOST_TENANTS:
            tenant = 0
        self._usage[block] = usage
        self._orders.setdefault(tenant, BlockHeap()).put(block, (usage.used_s,))
        self._bytes[tenant] = self._bytes.get(tenant, 0) + usage.stored_bytes
        told(block, usage)

    def _leave(self, block: int) -> None:
        usage = self._usage.pop(block, None)
        if usage is None:
            return
        tenant = usage.use.tenant
        if tenant not in self._orders or block not in self._orders[tenant]:
            tenant = 0
        self._orders[tenant].remove(block)
        self._bytes[tenant] -= usage.stored_bytes
        if not len(self._orders[tenant]):
            del self._orders[tenant], self._bytes[tenant]
