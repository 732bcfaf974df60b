"""What a store is: blocks by key. Every implementation passes `testing.store_contract`."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, Protocol, runtime_checkable

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.keys import BlockKey, Digest


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One stored block, as `Store.list_blocks` names it."""

    key: BlockKey
    stored_bytes: int  # with header, as it lies there
    used_s: float | None = None  # when it was last put or read, seconds since 1970; None: unknown


@dataclass(frozen=True, slots=True)
class TierStats:
    """How one of several tiers is doing."""

    stats: "StoreStats | None"  # None: it did not say
    reading: bool  # False: left out of reads until it heals
    writing: bool
    counts: Mapping[str, int]  # what happened there since it was opened, by name


@dataclass(frozen=True, slots=True)
class EvictionCounts:
    """What making room took since this process opened the store."""

    evicted_bytes: int = 0
    evicted_blocks: int = 0
    evicting_us: int = 0  # that the policy took to choose these blocks
    skipped_blocks: int = 0  # that were not worth writing


EVICTION_COUNTS: Final = tuple(field.name for field in fields(EvictionCounts))


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How full a store is; over all namespaces that share its room."""

    blocks: int | None = None  # None: the store cannot tell
    block_bytes: int | None = None  # of the blocks alone, as `BlockInfo.stored_bytes`
    used_bytes: int | None = None  # with all that counts against the capacity: index, folders
    capacity_bytes: int | None = None  # None: no bound of its own
    evictions: EvictionCounts = EvictionCounts()
    policy: str = ""  # what decides who is evicted
    tiers: tuple[TierStats, ...] = ()  # fastest first, if it is made of several stores


class Store(Protocol):
    """Async blocks by key, within one namespace.

    Every method is safe to cancel: a cancelled `put` leaves either the whole block or nothing
    visible, a cancelled `get_into` leaves `out` undefined and the store unchanged.
    """

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of `keys` are probably stored. A yes may still turn out missing on `get_into`.

        Raises: StoreUnavailable.
        """
        ...

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """Fill `out` (caller-owned, writable, of `frame.payload_bytes`) with checked bytes.

        Args:
            progress: of a store that fills `out` from its start, it is told how many leading bytes
                are there that nobody has checked yet: 0 when the bytes begin to come, then more and
                more; 0 once more if they come anew, from wherever. A store that does not fill it so
                tells nothing. In any thread, before the return; it is quick.

        Returns how many: all of `out`, unless the frame `varies`; what is behind them is undefined.
        Raises: BlockMissing, BlockCorrupt, StoreUnavailable; `out` is then undefined.
        """
        ...

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """Store one block; False if it was there already. `data` is not kept after the return.
        It has `frame.payload_bytes`, or less if the frame `varies`.

        Raises: StoreFull; StoreUnavailable (read-only, gone); nothing is visible then.
        """
        ...

    async def delete(self, key: BlockKey) -> None:
        """Forget one block; forgetting an unknown one is no error. Raises: StoreUnavailable."""
        ...

    def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """The blocks of this namespace, in no order; what changes meanwhile may be in it or not.

        Raises: StoreUnavailable, while iterating.
        """
        ...

    async def stats(self) -> StoreStats:
        """How full the store is. Raises: StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Release files, connections and threads. Later calls raise StoreUnavailable."""
        ...


@runtime_checkable
class Describing(Protocol):
    """A store that keeps a description of its namespace, or that is in front of one."""

    async def remove_description(self) -> None:
        """Forget the namespace, if it has no blocks; whoever puts one describes it again.

        Raises: StoreUnavailable.
        """
        ...


async def remove_description(store: object) -> None:
    """As in `Describing`, of any store. Raises: StoreUnavailable."""
    if isinstance(store, Describing):
        await store.remove_description()


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace that a store holds blocks of."""

    digest: Digest
    fields: dict[str, str]  # as `Namespace.describe` gave them; empty if that cannot be read


class StoreSource(Protocol):
    """Where a store is: what one URL says. Made by the `parse` function of its scheme.

    Making one does no I/O. A third party names its own `parse(url: StoreUrl) -> StoreSource` in
    the entry-point group `sglang_cake.stores`, under its scheme.
    """

    def check(self) -> None:
        """Find out now, before a model is loaded, whether the store can be used at all.

        What may heal by itself (a server that is down) is no reason to refuse.
        Raises: ConfigError, one line that says what to do.
        """
        ...

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        """Open one namespace of it; the caller closes it. May block on a disk for a moment.

        Args: depth: calls of each kind that the store should be able to serve at once.
        Raises: StoreUnavailable; ConfigError if what is there describes something else.
        """
        ...

    async def namespaces(self) -> list[StoredNamespace]:
        """What the store holds blocks of, for tools. Raises: StoreUnavailable."""
        ...
