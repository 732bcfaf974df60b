"""The interface of stores of blocks. Every implementation passes `testing.store_contract`.

`Store` is required, and `StoreSource` for a store that a URL names. The other protocols are
optional: `AccessListener`, `KnowsFirst`, `Counting`, `Describing`, `Lending` for any store,
`TierHints` and `PerTierEncoding` for a store that is composed of tiers, `InMemory` for a tier. For
each one but `PerTierEncoding` and `InMemory` there is a function that takes any store and uses the
protocol if the store implements it.
"""

import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, Final, Protocol, cast, runtime_checkable

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.buffers import Buffer, TellBytes
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.link_speed import LinkSpeed
from sglang_cake.stores.request_facts import RequestFacts

# `time.monotonic()` at which the caller of `Store.get_into` stops waiting, if it does. HTTP and S3
# stores end such a read a little earlier, with an error that says so.
read_until_s: ContextVar[float] = ContextVar("read_until_s", default=math.inf)


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One stored block, as listed by `Store.list_blocks`."""

    key: BlockKey
    stored_bytes: int  # with its header
    used_s: float | None = None  # last put or read, seconds since 1970; None: unknown


@dataclass(frozen=True, slots=True)
class TierStats:
    """State of one tier of a store."""

    stats: "StoreStats | None"  # None: the tier did not answer
    reading: bool  # False: the tier is left out of reads until it answers again
    writing: bool  # the same, for writes
    counts: Mapping[str, int]  # events since the tier was opened, by name


@dataclass(frozen=True, slots=True)
class EvictionCounts:
    """Evictions by this process since it opened the store."""

    evicted_bytes: int = 0
    evicted_blocks: int = 0
    evicting_us: int = 0  # time in which the policy chose these blocks
    skipped_blocks: int = 0  # blocks that admission rejected


EVICTION_COUNTS: Final = tuple(field.name for field in fields(EvictionCounts))


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How full a store is, over all namespaces that share its capacity."""

    blocks: int | None = None  # None: unknown
    block_bytes: int | None = None  # sum of `BlockInfo.stored_bytes`
    used_bytes: int | None = None  # all that counts against the capacity: also index and folders
    capacity_bytes: int | None = None  # None: the store has no limit of its own
    evictions: EvictionCounts = EvictionCounts()
    policy: str = ""  # name of the eviction policy
    tiers: tuple[TierStats, ...] = ()  # fastest first; empty for a store without tiers


class Store(Protocol):
    """Async blocks by key, within one namespace.

    Every method is safe to cancel: a cancelled `put` leaves either the whole block or nothing
    visible, a cancelled `get_into` leaves `out` undefined and the store unchanged.
    """

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of `keys` are probably stored. A `get_into` may still find such a block missing.

        Raises: StoreUnavailable.
        """
        ...

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """Fill `out` (caller-owned, writable, of `frame.payload_bytes`) with checked bytes.

        Args:
            progress: called with the number of leading bytes of `out` that have arrived and are
                not checked yet: 0 when the transfer begins, then increasing numbers, and 0 again if
                the transfer starts over. A store that does not fill `out` from its start never
                calls it. Calls come from any thread, before the return, and must be quick.

        Returns the number of bytes: all of `out`, or fewer if the frame `varies`. The rest of `out`
        is undefined.
        Raises: BlockMissing, BlockCorrupt, StoreUnavailable; `out` is then undefined.
        """
        ...

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """Store one block; False if the block was stored already.

        Args:
            data: `frame.payload_bytes` bytes, or fewer if the frame `varies`. The store does not
                use it after the return.

        Raises: StoreFull; StoreUnavailable (for example read-only); nothing is visible then.
        """
        ...

    async def delete(self, key: BlockKey) -> None:
        """Remove one block, if it is stored. Raises: StoreUnavailable."""
        ...

    def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """The blocks of this namespace, in any order.

        Blocks that are put or deleted meanwhile may or may not be listed.
        Raises: StoreUnavailable, while iterating.
        """
        ...

    async def stats(self) -> StoreStats:
        """How full the store is. Raises: StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Release files, connections and threads. Later calls raise StoreUnavailable."""
        ...


# ---- optional: any store ----


def _implements(store: object, protocol: Any) -> bool:
    """`isinstance`, which takes Python 20 us for a protocol, once for each class of stores."""
    kind: Any = type(store)
    return _class_implements(kind, protocol)


@functools.cache
def _class_implements(kind: type, protocol: Any) -> bool:
    return issubclass(kind, protocol)


@runtime_checkable
class AccessListener(Protocol):
    """A store whose eviction depends on what requests access, or a wrapper of one."""

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """Record that the prompt of a request begins with the blocks `keys`, stored or not.

        A request may be reported again with more keys. Only the further keys are new accesses.
        Raises: StoreUnavailable; the caller may ignore it.
        """
        ...


async def report_access(store: object, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
    """Call `AccessListener.on_access`, if the store has it. Raises: StoreUnavailable."""
    if isinstance(store, AccessListener):
        await store.on_access(keys, facts)


@runtime_checkable
class KnowsFirst(Protocol):
    """A store that treats the first block of a prompt specially, or a wrapper of one."""

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        """As `Store.put`, for a block with the first token of a prompt."""
        ...


async def put_first(store: Store, key: BlockKey, data: memoryview) -> bool:
    """Put a block that begins with the first token of a prompt. Raises: as `Store.put`."""
    if isinstance(store, KnowsFirst):
        return await store.put_first(key, data)
    return await store.put(key, data)


@runtime_checkable
class Counting(Protocol):
    """A store that counts events, or a wrapper of one."""

    def events(self) -> Mapping[str, int]:
        """Number of events of each kind since the store was opened, by name.

        The set of names is constant. Does no I/O, so it also answers during an outage.
        """
        ...


def events_of(store: object) -> Mapping[str, int]:
    """The result of `Counting.events`, or nothing."""
    return store.events() if isinstance(store, Counting) else {}


@runtime_checkable
class Describing(Protocol):
    """A store that keeps a description of its namespace, or a wrapper of one."""

    async def remove_description(self) -> None:
        """Remove the description if the namespace has no blocks. The next put writes it again.

        Raises: StoreUnavailable.
        """
        ...


async def remove_description(store: object) -> None:
    """Call `Describing.remove_description`, if the store has it. Raises: StoreUnavailable."""
    if isinstance(store, Describing):
        await store.remove_description()


@dataclass(frozen=True, slots=True)
class LentBlock:
    """A block where the store keeps it, in memory of this process. It stays until `release`.

    Attributes:
        buffer: begins with the checked payload, which is at least as large as a block. It must not
            be written.
        release: to be called once, from any thread, when the bytes are not used any more.
    """

    buffer: Buffer
    release: Callable[[], object]


@runtime_checkable
class Lending(Protocol):
    """A store that has blocks in memory of this process, or a wrapper of one."""

    def lend(self, key: BlockKey) -> LentBlock | None:
        """A block, without a copy; None if `get_into` is to be called. Does no I/O.

        None also if too many blocks are lent already: they are protected from eviction.
        """
        ...


def lend(store: object, key: BlockKey) -> LentBlock | None:
    """The result of `Lending.lend`; None for other stores."""
    return cast(Lending, store).lend(key) if _implements(store, Lending) else None


# ---- optional: stores that are composed of tiers ----


@runtime_checkable
class TierHints(Protocol):
    """A store with tiers of different speed, or a wrapper of one."""

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        """The tier that each of `keys` would be read from now, as far as is known.

        Tier 0 is the fastest, and stands for blocks that no tier has. Does no I/O.
        """
        ...


def tiers_of(store: object, keys: Sequence[BlockKey]) -> list[int]:
    """The result of `TierHints.sources`; tier 0 for a store without tiers.

    Raises: ValueError for an answer of another length, and anything that a faulty store raises.
    """
    if _implements(store, TierHints):
        found = cast(TierHints, store).sources(keys)
    else:
        found = [0] * len(keys)
    if len(found) != len(keys):
        raise ValueError(f"{len(found)} answers to {len(keys)} keys")
    return found


# Index of a tier -> payload for this tier. The payload stays valid until the put has ended.
FormOf = Callable[[int], Awaitable[memoryview]]
# (memory of `frame.payload_bytes`, size of the payload at its start) -> size of the payload that is
# there now.
Unpack = Callable[[memoryview, int], Awaitable[int]]


@runtime_checkable
class PerTierEncoding(Protocol):
    """A store with tiers that can hold different encodings of a block."""

    def links(self) -> Sequence[LinkSpeed]:
        """Measured speed of each tier; always the same objects."""
        ...

    async def get_unpacked(self, key: BlockKey, out: memoryview, unpack: Unpack) -> int:
        """As `Store.get_into`.

        Args:
            unpack: changes a payload that was read from a tier below before it moves up to one in
                memory. `out` begins with the changed payload then, and its size is returned.

        Raises: as `Store.get_into`, and what `unpack` raises.
        """
        ...

    async def put_forms(self, key: BlockKey, form_of: FormOf) -> bool:
        """As `Store.put`, with a payload for each tier.

        Args:
            form_of: called when a payload is needed, for one tier at a time, and at most once for
                each. It is not called for tiers that take no block now.

        Raises: as `Store.put`; the error of `form_of`, if no tier has the block then.
        """
        ...


class KeptBlock(Protocol):
    """A block of a store in memory that a store below is yet to get. It may be evicted meanwhile,
    but other blocks come first."""

    def pin(self) -> memoryview | None:
        """The payload, which stays until `release`; None: it was evicted or deleted."""
        ...

    def release(self) -> None:
        """The store below has the block, or will not get it. Called once."""
        ...


@runtime_checkable
class InMemory(Lending, Protocol):
    """A store in the memory of this process, in front of slower tiers."""

    def keep(self, key: BlockKey) -> KeptBlock | None:
        """A stored block, to be written to a store below; None if it is not there (any more).

        The caller releases it. Raises: StoreUnavailable.
        """
        ...

    async def promote(self, key: BlockKey, data: memoryview) -> bool:
        """As `Store.put`, for a block that was read from a store below. False as well if the
        eviction policy prefers the blocks that are there."""
        ...


# ---- where a store is ----


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace that has blocks in a store."""

    digest: Digest
    fields: dict[str, str]  # from `Namespace.describe`; empty if the description is unreadable


@dataclass(frozen=True, slots=True)
class StoreLayer:
    """One layer of a store, and the layers below it. Holds no passwords, tokens or keys."""

    layer: str  # name of the class
    settings: Mapping[str, object] = field(default_factory=dict)  # units in names: `capacity_bytes`
    inner: tuple["StoreLayer", ...] = ()  # several: tiers, fastest first


class StoreSource(Protocol):
    """Where a store is: the contents of one URL. Created by the `parse` function of its scheme.

    Creating one does no I/O. A third party registers its own `parse(url: StoreUrl) -> StoreSource`
    in the entry-point group `sglang_cake.stores`, under its scheme. A source may also have
    `describe() -> StoreLayer`, which does no I/O.
    """

    def check(self) -> None:
        """Check, before a model is loaded, whether the store can be used at all.

        Faults that may be temporary (a server that is down) are not reported.
        Raises: ConfigError, one line that says what to do.
        """
        ...

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        """Open one namespace; the caller closes it. May block on a disk for a moment.

        Args:
            depth: calls of each kind that the store should be able to serve at once.

        Raises: StoreUnavailable; ConfigError if the namespace that is there is another one.
        """
        ...

    async def namespaces(self) -> list[StoredNamespace]:
        """Namespaces that have blocks in the store, for tools. Raises: StoreUnavailable."""
        ...


def describe(source: StoreSource) -> StoreLayer:
    """The outermost layer of a source; of a source that describes none, only its class."""
    if not hasattr(source, "describe"):
        return StoreLayer(type(source).__name__)
    found: StoreLayer = source.describe()
    return found
