"""Limits on the share of a store that one tenant can take: a quota and fair sharing."""

import contextlib
from dataclasses import dataclass
from typing import Final

from sglang_cake.stores.eviction.policy import UNKNOWN_TENANT, Benefit, EvictionPolicy, Usage
from sglang_cake.stores.eviction.queues import BlockQueue
from sglang_cake.stores.eviction.reuse_model import ReuseFits, Unlocked

MAX_TENANTS: Final = 1024  # further tenants are counted as tenant 0


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Rules among the tenants of a store; false if there are none."""

    quota_bytes: int | None = None  # limit for each tenant
    fair: bool = False  # blocks of tenants above an equal share are evicted first

    def __bool__(self) -> bool:
        return self.fair or self.quota_bytes is not None

    def divided(self, parts: int) -> "TenantRules":
        """The rules of one of several stores that a tenant's blocks are spread over evenly."""
        quota_bytes = None if self.quota_bytes is None else self.quota_bytes // parts
        return TenantRules(quota_bytes, self.fair)


NO_TENANT_RULES: Final = TenantRules()


class TenantPolicy(EvictionPolicy):
    """Tenant rules in front of another policy.

    The least recently used block of a tenant above its quota is evicted first. With `fair`, the
    tenant with the most bytes comes next, if these exceed an equal share of all bytes. So a tenant
    below an equal share loses nothing to a tenant that floods the store. While no rule is broken,
    the inner policy decides.

    Blocks of UNKNOWN_TENANT count for no quota. A tenant above an equal share of all bytes, theirs
    included, loses its own blocks and these, the least recently used one first.

    Attributes:
        used_bytes: by tenant, without UNKNOWN_TENANT.
    """

    def __init__(self, inner: EvictionPolicy, rules: TenantRules) -> None:
        """Args: inner: owned by this policy from here on, and empty."""
        super().__init__()
        self._inner = inner
        self._rules = rules
        self._lru: dict[int, BlockQueue] = {}  # by tenant
        self.used_bytes: dict[int, int] = {}
        self._unknown = BlockQueue()
        self._unknown_bytes = 0

    def add(self, block: int, usage: Usage) -> None:
        self._uncount(block)
        self._count(block, usage)
        self._inner.add(block, usage)

    def remove(self, block: int) -> None:
        self._uncount(block)
        self._inner.remove(block)

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        tenant = self._tenant_to_evict()
        if tenant is None:
            popped = self._inner.pop(now_s)
            if popped is not None:
                self._uncount(popped[0])
            return popped
        first = self._lru[tenant].first()
        assert first is not None  # tenants without blocks are not in `used_bytes`
        if not self._is_over_quota(tenant):
            unknown = self._unknown.first()
            if unknown is not None and unknown.rank < first.rank:
                first = unknown
        usage = self._usage[first.block]
        self.remove(first.block)
        return first.block, usage

    def give_back(self, block: int, usage: Usage) -> None:
        self._count(block, usage)
        self._inner.give_back(block, usage)

    @property
    def breaks_rule(self) -> bool:
        """Whether a tenant breaks a rule: `pop` takes its blocks first."""
        return self._tenant_to_evict() is not None

    def over_quota_bytes(self) -> int:
        quota_bytes = self._rules.quota_bytes
        if quota_bytes is None:
            return 0
        return sum(max(0, used_bytes - quota_bytes) for used_bytes in self.used_bytes.values())

    def record_rejected(self, usage: Usage) -> None:
        self._inner.record_rejected(usage)

    def reuse_probability(self, usage: Usage) -> float:
        return self._inner.reuse_probability(usage)

    def refresh(self, now_s: float, unlocked: Unlocked = contextlib.nullcontext) -> None:
        self._inner.refresh(now_s, unlocked)

    def fits_to_save(self) -> ReuseFits:
        return self._inner.fits_to_save()

    def resume(self, fits: ReuseFits, now_s: float) -> None:
        self._inner.resume(fits, now_s)

    def set_benefit(self, benefit: Benefit) -> None:
        self._inner.set_benefit(benefit)

    def _tenant_to_evict(self) -> int | None:
        """Tenant that breaks a rule. None: no tenant does."""
        if not self.used_bytes:
            return None
        largest = max(self.used_bytes, key=lambda tenant: (self.used_bytes[tenant], tenant))
        if self._is_over_quota(largest):
            return largest
        all_bytes = sum(self.used_bytes.values()) + self._unknown_bytes
        is_above = self.used_bytes[largest] > all_bytes / len(self.used_bytes)
        return largest if self._rules.fair and is_above else None

    def _is_over_quota(self, tenant: int) -> bool:
        quota_bytes = self._rules.quota_bytes
        return quota_bytes is not None and self.used_bytes[tenant] > quota_bytes

    def _count(self, block: int, usage: Usage) -> None:
        tenant = usage.context.tenant
        self._usage[block] = usage
        if tenant == UNKNOWN_TENANT:
            self._unknown.put(block, (usage.used_s, 0.0))
            self._unknown_bytes += usage.stored_bytes
            return
        if tenant not in self.used_bytes and len(self.used_bytes) >= MAX_TENANTS:
            tenant = 0
        self._lru.setdefault(tenant, BlockQueue()).put(block, (usage.used_s, 0.0))
        self.used_bytes[tenant] = self.used_bytes.get(tenant, 0) + usage.stored_bytes

    def _uncount(self, block: int) -> None:
        usage = self._usage.pop(block, None)
        if usage is None:
            return
        tenant = usage.context.tenant
        if tenant == UNKNOWN_TENANT:
            self._unknown.remove(block)
            self._unknown_bytes -= usage.stored_bytes
            return
        if tenant not in self._lru or block not in self._lru[tenant]:
            tenant = 0
        self._lru[tenant].remove(block)
        self.used_bytes[tenant] -= usage.stored_bytes
        if not len(self._lru[tenant]):
            del self._lru[tenant]
            del self.used_bytes[tenant]
