"""Eviction policies: which block a full store evicts next.

The policies have no clock, no disk and no lock. The file store and `sglang-cake trace replay` run
the same code. docs/eviction.md says why none is taken from a library.
"""

from collections.abc import Callable
from typing import Final

from sglang_cake.stores.eviction.classic import ArcPolicy, GdfsPolicy, RankedPolicy, S3FifoPolicy
from sglang_cake.stores.eviction.policy import Benefit, EvictionPolicy
from sglang_cake.stores.eviction.reuse_policies import CakePolicy, CakePrefixPolicy, WorkloadPolicy

POLICIES: Final[dict[str, Callable[[Benefit], EvictionPolicy]]] = {
    "fifo": lambda benefit: RankedPolicy(lambda block, usage: (usage.created_s, block)),
    "lru": lambda benefit: RankedPolicy(lambda block, usage: (usage.used_s, 0.0)),
    # Since a block was written; of equal ones the least recently used.
    "lfu": lambda benefit: RankedPolicy(lambda block, usage: (usage.uses, usage.used_s)),
    "gdfs": GdfsPolicy,
    "s3fifo": lambda benefit: S3FifoPolicy(),
    "arc": lambda benefit: ArcPolicy(),
    "workload": lambda benefit: WorkloadPolicy(),
    "cake": CakePolicy,
    "cake-prefix": CakePrefixPolicy,
}


def new_policy(name: str, benefit: Benefit | None = None) -> EvictionPolicy:
    """A policy without blocks.

    Args:
        name: a key of POLICIES.
        benefit: for policies that weigh what a block saves; None: the defaults of `Benefit`.

    Raises:
        KeyError: there is no such policy.
    """
    return POLICIES[name](benefit or Benefit())
