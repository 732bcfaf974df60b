"""The interface of stores of blocks, and stores in front of another store: a base class of
wrappers, a wrapper that counts bytes, and a store that is opened by its first call.

Every implementation passes `testing.store_contract`.
"""

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, Final, Protocol

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.buffers import Buffer, TellBytes
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import ConfigError, StoreError, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.core.threads import run_in_own_thread
from sglang_cake.stores.eviction.policy import Benefit

MOST_ID: Final = 128  # characters
MOST_WORKLOAD: Final = 64  # characters
_TENANTS: Final = 2**63
_KINDS: Final = {"id": str, "tokens": int, "workload": str, "tenant": int}


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts about a request, without its prompt. Raises: ValueError for values out of bounds."""

    id: str  # unique; the same in all reports of the request
    tokens: int  # length of the prompt
    workload: str = ""  # purpose that the user declared
    tenant: int = 0  # hash of the tenant; 0: the request names none
    benefit: Benefit | None = None  # costs of the server that runs the request

    def __post_init__(self) -> None:
        if not 0 < len(self.id) <= MOST_ID or len(self.workload) > MOST_WORKLOAD:
            raise ValueError("an id has 1 to 128 characters, a workload at most 64")
        if not 0 <= self.tokens < 2**31 or not 0 <= self.tenant < _TENANTS:
            raise ValueError("tokens or tenant are out of bounds")
        # JSON may hold half a surrogate pair, which the index cannot: encoding it is a ValueError.
        (self.id + self.workload).encode()

    def to_json(self) -> str:
        """One line of ASCII."""
        fields = asdict(self)
        # Servers and clients of other versions call the benefit `worth`: a name of the protocol.
        fields["worth"] = fields.pop("benefit")
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "RequestFacts":
        """Raises: ValueError for text that `to_json` cannot have made."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.keys() != {*_KINDS, "worth"}:
            raise ValueError("unknown or missing fields")
        if any(type(fields[name]) is not kind for name, kind in _KINDS.items()):
            raise ValueError("a field has another type")
        benefit = fields.pop("worth")
        return cls(**fields, benefit=None if benefit is None else _benefit(benefit))


def _benefit(fields: object) -> Benefit:
    names = set(Benefit.__dataclass_fields__)
    if not isinstance(fields, dict) or fields.keys() != names:
        raise ValueError("unknown or missing fields of worth")
    if any(type(value) not in (int, float) for value in fields.values()):
        raise ValueError("worth has other values than numbers")
    if type(fields["block_tokens"]) is not int:
        raise ValueError("block_tokens has another type")
    return Benefit(**fields)


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

    @classmethod
    def total(cls, counts: Iterable["EvictionCounts"]) -> "EvictionCounts":
        return cls(*map(sum, zip(*map(astuple, counts), strict=True)))


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
    unused_bytes: int | None = None  # that puts take before blocks are evicted; None: unknown
    tiers: tuple[TierStats, ...] = ()  # fastest first; empty for a store without tiers


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


class Store(ABC):
    """Async blocks by key, within one namespace.

    Every method is safe to cancel. A cancelled `put` leaves either the whole block or nothing
    visible. A cancelled `get_into` leaves `out` undefined and the store unchanged. Once it has
    returned, nothing writes `out`, which may have another owner then, or calls `progress`.
    """

    @abstractmethod
    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of `keys` are probably stored. A `get_into` may still find such a block missing.

        Raises: StoreUnavailable.
        """

    @abstractmethod
    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """Fill `out` (caller-owned, writable, of `frame.payload_bytes`) with checked bytes. No
        caller checks them again.

        Args:
            progress: called with the number of leading bytes of `out` that have arrived and are
                not checked yet: 0 when the transfer begins, then increasing numbers, and 0 again if
                the transfer starts over. A store that does not fill `out` from its start never
                calls it. Calls come from any thread, before the return, and must be quick.

        Returns the number of bytes: all of `out`, or fewer if the frame `varies`. The rest of `out`
        is undefined.
        Raises: BlockMissing, BlockCorrupt, StoreUnavailable; `out` is then undefined.
        """

    @abstractmethod
    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """Store one block; False if the block was stored already.

        Args:
            data: `frame.payload_bytes` bytes, or fewer if the frame `varies`. The store does not
                use it after the return.

        Raises: StoreFull; StoreUnavailable (for example read-only); nothing is visible then.
        """

    @abstractmethod
    async def delete(self, key: BlockKey) -> None:
        """Remove one block, if it is stored. Raises: StoreUnavailable."""

    @abstractmethod
    def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """The blocks of this namespace, in any order.

        Blocks that are put or deleted meanwhile may or may not be listed.
        Raises: StoreUnavailable, while iterating.
        """

    @abstractmethod
    async def stats(self) -> StoreStats:
        """How full the store is. Raises: StoreUnavailable."""

    @abstractmethod
    async def close(self) -> None:
        """Release files, connections and threads. Later calls raise StoreUnavailable."""

    # A store overrides these if it has a use for them.

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """Record that the prompt of a request begins with the blocks `keys`, stored or not.

        A request may be reported again with more keys. Only the further keys are new accesses.
        Raises: StoreUnavailable; the caller may ignore it.
        """
        return

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        """As `put`, for a block with the first token of a prompt. Codecs encode it in another way;
        stores below a codec only see `put`."""
        return await self.put(key, data)

    def lend(self, key: BlockKey) -> LentBlock | None:
        """A block in memory of this process, without a copy; None if `get_into` is to be called.

        None also if too many blocks are lent already: they are protected from eviction. Does no
        I/O.
        """
        return None

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        """The tier that each of `keys` would be read from now, as far as is known.

        Tier 0 is the fastest, and stands for blocks that no tier has. Does no I/O.
        """
        return [0] * len(keys)

    def events(self) -> Mapping[str, int]:
        """Number of events of each kind since the store was opened, by name.

        The set of names is constant. Does no I/O, so it also answers during an outage.
        """
        return {}

    async def remove_description(self) -> None:
        """Remove the description of the namespace, if that has no blocks. The next put writes it
        again. Raises: StoreUnavailable."""
        return


# ---- where a store is ----


USUAL_DEPTH = 4


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
    `describe() -> StoreLayer`, which does no I/O, and `depth`: how many reads at once its link
    needs, if that is not USUAL_DEPTH.
    """

    def check(self) -> None:
        """Check, before a model is loaded, whether the store can be used at all. Other tiers are
        checked at the same time, in other threads.

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


def depth_of(source: StoreSource) -> int:
    """How many reads at once the link of a source needs."""
    depth: int = getattr(source, "depth", USUAL_DEPTH)
    return depth


def puts_at_once(depth: int) -> int:
    """How many blocks are written to a store at once that reads `depth` at once."""
    return max(2, depth // 2)


def describe(source: StoreSource) -> StoreLayer:
    """The outermost layer of a source; of a source that describes none, only its class."""
    if not hasattr(source, "describe"):
        return StoreLayer(type(source).__name__)
    found: StoreLayer = source.describe()
    return found


CLOSE_S = 5.0  # how long the end of a store waits for a source that hangs when it is opened


class _PassingStore(Store):
    """Passes the calls that may wait to another store."""

    @abstractmethod
    async def _opened(self) -> Store: ...

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await (await self._opened()).contains(keys)

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        await (await self._opened()).on_access(keys, facts)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        return await (await self._opened()).get_into(key, out, progress)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        return await (await self._opened()).put(key, data)

    async def delete(self, key: BlockKey) -> None:
        await (await self._opened()).delete(key)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        async for block in (await self._opened()).list_blocks():
            yield block

    async def remove_description(self) -> None:
        await (await self._opened()).remove_description()

    async def stats(self) -> StoreStats:
        return await (await self._opened()).stats()


class WrapperStore(_PassingStore):
    """Implements `Store` by passing calls to `inner`, which is closed with it.

    A subclass overrides the calls that it changes. `lend` and `put_first` are not passed: a wrapper
    that changes bytes would not see them.

    Attributes:
        inner: the wrapped store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    async def _opened(self) -> Store:
        return self.inner

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return self.inner.sources(keys)

    def events(self) -> Mapping[str, int]:
        return self.inner.events()

    async def close(self) -> None:
        await self.inner.close()


class CountedStore(WrapperStore):
    """Counts the bytes of blocks that cross the link, header and payload; blocks in memory that are
    lent count as well."""

    def __init__(self, inner: Store, counters: Counters) -> None:
        super().__init__(inner)
        self._counters = counters

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        size_bytes = await self.inner.get_into(key, out, progress)
        count_read(self._counters, size_bytes)
        return size_bytes

    def lend(self, key: BlockKey) -> LentBlock | None:
        lent = self.inner.lend(key)
        if lent is not None:
            count_read(self._counters, lent.buffer.view.nbytes)
        return lent

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        fresh = await self.inner.put(key, data)
        if fresh:
            count_written(self._counters, data.nbytes)
        return fresh


def count_read(counters: Counters, payload_bytes: int) -> None:
    counters.add("read_blocks")
    counters.add("read_bytes", HEADER_BYTES + payload_bytes)


def count_written(counters: Counters, payload_bytes: int) -> None:
    """Count one encoding of a block that was written."""
    counters.add("stored_bytes", HEADER_BYTES + payload_bytes)


class LazyStore(_PassingStore):
    """Implements `Store` by a store that the first call opens, for example when a disk is mounted
    later. Every call tries to open it, or waits for a try in progress, and raises StoreUnavailable
    if that fails. The caller decides how often to try.

    Attributes:
        opened: the store, if it is open.
    """

    def __init__(
        self, source: StoreSource, frame: BlockFrame, *, depth: int, close_s: float = CLOSE_S
    ) -> None:
        self._source = source
        self._frame = frame
        self._depth = depth
        self._close_s = close_s
        self._attempt: asyncio.Future[Store] | None = None  # the last one to open it
        self._given_up: asyncio.Future[Any] | None = None  # done when no call waits for that
        self.opened: Store | None = None
        self._closed = False

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return super().sources(keys) if self.opened is None else self.opened.sources(keys)

    def lend(self, key: BlockKey) -> LentBlock | None:
        return None if self.opened is None else self.opened.lend(key)

    def events(self) -> Mapping[str, int]:
        return {} if self.opened is None else self.opened.events()

    async def close(self) -> None:
        """Waits for an opening in progress, `close_s` at most. Calls that wait for it fail then. A
        store that opens later is closed."""
        self._closed = True
        if self._attempt is not None and not self._attempt.done():
            await asyncio.wait([self._attempt], timeout=self._close_s)
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)
        store = self.opened
        self.opened = None
        if store is not None:
            await store.close()

    async def _opened(self) -> Store:
        if self.opened is not None:
            return self.opened
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if self._given_up is None:
            self._given_up = asyncio.get_running_loop().create_future()
        if self._attempt is None or self._attempt.done():
            self._attempt = asyncio.ensure_future(self._open())
            # Retrieved here, since all callers may have been cancelled.
            self._attempt.add_done_callback(
                lambda attempt: attempt.cancelled() or attempt.exception()
            )
        attempt = self._attempt
        # A cancelled caller does not cancel it, which would leave an open store behind.
        await asyncio.wait([attempt, self._given_up], return_when=asyncio.FIRST_COMPLETED)
        if not attempt.done():
            raise StoreUnavailable("the store is closed")
        return attempt.result()

    async def _open(self) -> Store:
        try:
            store = await run_in_own_thread(self._source.open, self._frame, depth=self._depth)
        except StoreError:
            raise
        except Exception as error:  # the server runs already: the store stays left out
            words = str(error) if isinstance(error, ConfigError) else repr(error)
            raise StoreUnavailable(words) from error
        if self._closed:
            await store.close()
            raise StoreUnavailable("the store is closed")
        self.opened = store
        return store
