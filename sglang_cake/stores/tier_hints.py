"""Which part of a store that is made of several a block would be read from."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from sglang_cake.core.keys import BlockKey


@runtime_checkable
class TierHints(Protocol):
    """A store that is made of several, each with a speed of its own, or that is in front of one."""

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        """The number of the one that each of `keys` would be read from now, as far as is known; 0
        is the fastest, and stands for blocks that none has. Waits for nothing."""
        ...


def sources_of(store: object, keys: Sequence[BlockKey]) -> list[int]:
    """As `TierHints.sources`; of any other store, its only one. Raises: ValueError, and whatever
    else a store does that breaks its contract."""
    found = store.sources(keys) if isinstance(store, TierHints) else [0] * len(keys)
    if len(found) != len(keys):
        raise ValueError(f"{len(found)} answers to {len(keys)} keys")
    return found
