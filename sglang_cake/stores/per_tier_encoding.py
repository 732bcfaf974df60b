"""A store that is made of several, each of which may get a form of a block that suits its link."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import Store
from sglang_cake.stores.tiers.tier_choice import TierLink

# The number of one of the stores -> the payload that it gets, which stays until the put is over.
FormOf = Callable[[int], Awaitable[memoryview]]


class LinkSpeed:
    """How fast a store gives blocks, as far as that is known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.read, self.written = TierLink(), TierLink()
        self._clock = clock
        self._known: float | None = None

    def bytes_per_s(self) -> float | None:
        """Of reads; while there were none, of writes. What was known once stays known."""
        now_s = self._clock()
        fresh = self.read.s_per_byte(now_s)
        if fresh is None and self._known is None:
            fresh = self.written.s_per_byte(now_s)
            return None if fresh is None else 1 / max(fresh, 1e-15)
        if fresh is not None:
            self._known = 1 / max(fresh, 1e-15)
        return self._known


@runtime_checkable
class KnowsFirst(Protocol):
    """A store that treats blocks that begin with a prompt's first token otherwise than others, or
    that is in front of one."""

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        """As `Store.put`, of such a block."""
        ...


async def put_first(store: Store, key: BlockKey, data: memoryview) -> bool:
    """Store a block that begins with a prompt's first token. Raises: as `Store.put`."""
    if isinstance(store, KnowsFirst):
        return await store.put_first(key, data)
    return await store.put(key, data)


@runtime_checkable
class PerTierEncoding(Protocol):
    """A store that is made of several, each with a link of its own."""

    def links(self) -> Sequence[LinkSpeed]:
        """How fast each is, as it is measured; always the same objects."""
        ...

    async def put_forms(self, key: BlockKey, form_of: FormOf) -> bool:
        """As `Store.put`. `form_of` is asked when the payload is needed, for one store at a time
        and once for each at most; it is not asked for those that take nothing now.

        Raises: as `Store.put`; what `form_of` raises, if no store has the block then.
        """
        ...


def same(data: memoryview) -> FormOf:
    """One payload for all."""

    async def form_of(_: int) -> memoryview:
        return data

    return form_of
