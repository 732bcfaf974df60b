"""Which block goes first when room is needed. Pure: no clock, no disk, no lock.

The same code decides in the file store and in `sglang-cake trace replay`. Not taken from a library:
those own the cache, its size and its lock, while a store must be able to pass over a block that is
being read, to lose blocks to other processes, and to begin anew from its books.
"""

from collections.abc import Callable
from typing import Final

from sglang_cake.store.eviction.arc import ArcPolicy
from sglang_cake.store.eviction.base import UNKNOWN_USE, EvictionPolicy, Usage, Use, ident_of
from sglang_cake.store.eviction.cake import CakePolicy, CakePrefixPolicy
from sglang_cake.store.eviction.gdfs import GdfsPolicy
from sglang_cake.store.eviction.ranked import fifo, lfu, lru
from sglang_cake.store.eviction.reuse import Fit, Fits
from sglang_cake.store.eviction.s3fifo import S3FifoPolicy
from sglang_cake.store.eviction.workload import WorkloadPolicy
from sglang_cake.store.eviction.worth import Worth

__all__ = [
    "POLICIES",
    "UNKNOWN_USE",
    "EvictionPolicy",
    "Fit",
    "Fits",
    "Usage",
    "Use",
    "Worth",
    "ident_of",
    "new_policy",
]

POLICIES: Final[dict[str, Callable[[Worth], EvictionPolicy]]] = {
    "fifo": lambda worth: fifo(),
    "lru": lambda worth: lru(),
    "lfu": lambda worth: lfu(),
    "gdfs": GdfsPolicy,
    "s3fifo": lambda worth: S3FifoPolicy(),
    "arc": lambda worth: ArcPolicy(),
    "workload": lambda worth: WorkloadPolicy(),
    "cake": CakePolicy,
    "cake-prefix": CakePrefixPolicy,
}


def new_policy(name: str, worth: Worth | None = None) -> EvictionPolicy:
    """The policy called `name`, a key of POLICIES, without blocks.

    Args: worth: what blocks save, for those that ask; by default a middling machine's.
    """
    return POLICIES[name](worth or Worth())
