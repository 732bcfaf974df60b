"""The settings of a file store, as the options of its URL say them."""

from dataclasses import dataclass
from pathlib import Path

from sglang_cake.stores.eviction.tenants import NO_TENANT_RULES, TenantRules
from sglang_cake.stores.url import DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class FolderSettings:
    """A folder, and how one process uses it. Others may use it with other settings."""

    path: Path  # absolute
    # `data`: a block is on the disk when it becomes visible. `off`: the kernel decides when; after
    # a power cut, recent blocks are missing or fail their check.
    fsync: str = "off"
    min_free_bytes: int = 0  # of the file system; blocks are evicted to keep that free
    capacity_bytes: int | None = None  # limit for all files and folders; None: no limit
    policy: str = DEFAULT_POLICY  # of eviction, a key of `eviction.POLICIES`
    # Reads are accesses, and this process may lead eviction. False for tools: they would hold all
    # blocks in memory, and keep servers from it.
    reads_count: bool = True
    tenant_rules: TenantRules = NO_TENANT_RULES
    min_benefit_ratio: float = 0.0  # which blocks are written at all (`eviction.policy.admits`)
    direct_writes: bool = False  # blocks are written past the page cache, where possible
