"""`memory://64GB`: blocks in the host memory of this process, usually in front of other tiers.

The memory is private to its process and is freed when that ends, so a killed server leaves nothing
behind. Schedulers on one machine divide the capacity.
"""

import functools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.buffers import (
    Pin,
    TellBytes,
    available_bytes,
    copy_in_pieces,
    mib,
    whole_pages,
)
from sglang_cake.core.errors import BlockMissing, ConfigError, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.threads import DaemonPool, check_stop, run_in_own_thread, run_stoppable
from sglang_cake.stores.base import (
    BlockInfo,
    EvictionCounts,
    LentBlock,
    RequestFacts,
    Store,
    StoredNamespace,
    StoreLayer,
    StoreStats,
)
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.eviction.tenants import NO_TENANT_RULES, TenantRules
from sglang_cake.stores.memory.block_memory import BlockMemory, Unwritten
from sglang_cake.stores.url import DEFAULT_POLICY, StoreUrl, one_of, parse_quota, parse_size

MOST_THREADS: Final = 4  # for each direction: so many saturate the memory of one socket


class HostMemoryStore(Store):
    """One namespace of a `BlockMemory`."""

    def __init__(
        self,
        memory: BlockMemory,
        leave: Callable[[], None],
        frame: BlockFrame,
        *,
        threads: int,
        reads_count: bool = True,
    ) -> None:
        """Args:
        leave: called in a thread when this store is closed.
        threads: concurrent reads, and concurrent writes.
        reads_count: reads are accesses, for eviction.
        """
        self._leave = leave
        self._memory: BlockMemory | None = memory
        self._frame = frame
        self._reads_count = reads_count
        self._evictions = Counter[str]()
        self._deletes = 0
        self._readers = DaemonPool(threads, "cake-memory-read")
        self._writers = DaemonPool(threads, "cake-memory-write")

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._opened().has(self._frame.digest, keys)

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        memory = self._opened()
        await run_stoppable(
            self._writers, lambda stop: memory.on_access(self._frame.digest, keys, facts)
        )

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`. Cancellation: returns once the thread does not use `out` any more."""
        work = functools.partial(self._get, self._opened(), key, out, progress)
        return await run_stoppable(self._readers, work)

    def lend(self, key: BlockKey) -> LentBlock | None:
        """As in `Store`. Raises: StoreUnavailable once it is closed."""
        # A payload that is smaller than its block is still to be decoded.
        least_bytes = self._frame.layout.block_bytes
        return self._opened().lend(
            self._frame.digest, key, counts=self._reads_count, least_bytes=least_bytes
        )

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`. Cancellation: returns once the thread does not use `data` any more."""
        return await self._store(key, data, None)

    async def promote(self, key: BlockKey, data: memoryview) -> bool:
        """As `put`, for a block that was read from a store below. False as well if the eviction
        policy prefers the blocks that are there, or if a block is deleted meanwhile."""
        return await self._store(key, data, self._deletes)

    def keep(self, key: BlockKey) -> Unwritten | None:
        """A stored block, to be written to a store below; None if it is not there (any more).

        The caller releases it. Raises: StoreUnavailable.
        """
        return self._opened().keep(self._frame.digest, key)

    async def delete(self, key: BlockKey) -> None:
        memory = self._opened()
        self._deletes += 1  # before the delete: see `_put`
        memory.delete(self._frame.digest, key)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        for block in self._opened().list_blocks(self._frame.digest):
            yield block

    async def stats(self) -> StoreStats:
        return replace(self._opened().stats(), evictions=EvictionCounts(**self._evictions))

    async def close(self) -> None:
        """Calls that wait for a thread fail. The memory is freed with its last open store."""
        if self._memory is not None:
            self._memory = None
            for pool in (self._readers, self._writers):
                pool.shutdown(wait=False, cancel_futures=True)
            await run_in_own_thread(self._leave)

    def _opened(self) -> BlockMemory:
        if self._memory is None:
            raise StoreUnavailable("the store is closed")
        return self._memory

    async def _store(self, key: BlockKey, data: memoryview, deletes: int | None) -> bool:
        """Args: deletes: `_deletes` before a promotion; None: a put."""
        assert self._frame.takes(data.nbytes), data.nbytes
        work = functools.partial(self._put, self._opened(), key, data.cast("B"), deletes)
        return await run_stoppable(self._writers, work)

    # ---- in the threads ----

    def _get(
        self,
        memory: BlockMemory,
        key: BlockKey,
        out: memoryview,
        progress: TellBytes | None,
        stop: threading.Event,
    ) -> int:
        check_stop(stop)
        block = memory.use(self._frame.digest, key, counts=self._reads_count)
        if block is None:
            raise BlockMissing(key.hex())
        try:
            copy_in_pieces(out.cast("B"), block.data, lambda: check_stop(stop), progress)
        finally:
            memory.release(block)
        return block.size_bytes

    def _put(
        self,
        memory: BlockMemory,
        key: BlockKey,
        data: memoryview,
        deletes: int | None,
        stop: threading.Event,
    ) -> bool:
        check_stop(stop)
        block = memory.add(
            self._frame.digest,
            key,
            len(data),
            must_earn_place=deletes is not None,
            evictions=self._evictions,
        )
        if block is None:
            return False
        # A deleted block must not come back. A later delete finds the block.
        if deletes is not None and deletes != self._deletes:
            memory.release(block)
            return False
        try:
            copy_in_pieces(block.data, data, lambda: check_stop(stop))
        except BaseException:
            memory.release(block)
            raise
        return memory.commit(block, self._evictions)


@dataclass(frozen=True, slots=True)
class HostMemorySource:
    """Implements `StoreSource`. Equal sources of a process share one memory, as long as one of
    their stores is open. So a store that is opened for new weights, or attached again, finds the
    blocks.

    Attributes:
        capacity_bytes: limit for the memory of this machine.
        sharers: processes of this machine that open it. Each takes an equal part.
        pin: as for `BlockMemory`.
    """

    capacity_bytes: int
    policy: str = DEFAULT_POLICY
    reads_count: bool = True
    tenant_rules: TenantRules = NO_TENANT_RULES
    sharers: int = 1
    pin: Pin | None = field(default=None, compare=False)

    def check(self) -> None:
        self._check(self.capacity_bytes)

    def describe(self) -> StoreLayer:
        settings = {
            "capacity_bytes": self.capacity_bytes,
            "policy": self.policy,
            "tenant_quota_bytes": self.tenant_rules.quota_bytes,
            "fair": self.tenant_rules.fair,
        }
        return StoreLayer("HostMemoryStore", settings)

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        place = self, frame.payload_bytes
        with _lock:
            memory, stores = _open.get(place) or (self.new_memory(frame.payload_bytes), 0)
            _open[place] = memory, stores + 1
        leave = functools.partial(_leave, place)
        threads = max(1, min(depth, MOST_THREADS))
        return HostMemoryStore(memory, leave, frame, threads=threads, reads_count=self.reads_count)

    async def namespaces(self) -> list[StoredNamespace]:
        """None: a tool cannot read the memory of a server."""
        return []

    def check_block(self, block_bytes: int) -> None:
        """Check that the part of one process holds a block. Raises: ConfigError."""
        own_bytes = self.capacity_bytes // self.sharers
        if own_bytes < whole_pages(block_bytes):
            raise ConfigError(
                f"store URL memory://: {mib(own_bytes)} for each of {self.sharers} processes hold "
                f"no block, which has {mib(block_bytes)}: raise it"
            )

    def new_memory(self, block_bytes: int) -> BlockMemory:
        """The part of one process, for blocks of at most `block_bytes`. Raises: ConfigError."""
        self.check_block(block_bytes)
        own_bytes = self.capacity_bytes // self.sharers
        self._check(own_bytes)
        try:
            return BlockMemory(
                capacity_bytes=own_bytes,
                block_bytes=block_bytes,
                policy=self.policy,
                tenant_rules=self.tenant_rules.divided(self.sharers),
                pin=self.pin,
            )
        except OSError as error:
            raise ConfigError(
                f"store URL memory://: {mib(own_bytes)} cannot be allocated ({error.strerror}): "
                "lower it"
            ) from None

    def _check(self, size_bytes: int) -> None:
        left_bytes = available_bytes()
        if size_bytes > left_bytes:
            raise ConfigError(
                f"store URL memory://: {mib(size_bytes)} is more than the {mib(left_bytes)} that "
                "are available to this process: lower it"
            )


# The memories of equal sources in this process, and how many stores of each are open. The lock is
# held while one is made or freed, which can take tens of seconds.
_lock: Final = threading.Lock()
_open: Final[dict[tuple[HostMemorySource, int], tuple[BlockMemory, int]]] = {}


def _leave(place: tuple[HostMemorySource, int]) -> None:
    """One open store less; the last one closes the memory."""
    with _lock:
        memory, stores = _open.pop(place)
        if stores > 1:
            _open[place] = memory, stores - 1
        else:
            memory.close()


def parse(url: StoreUrl) -> HostMemorySource:
    """Raises: ConfigError."""
    try:
        capacity_bytes = parse_size(url.place)
    except ConfigError as error:
        raise url.error(f"{error}; the memory for all of this machine, as memory://64GB") from None
    source = HostMemorySource(
        capacity_bytes,
        policy=url.option("policy", one_of(*POLICIES), url.policy),
        reads_count=url.reads_count,
        tenant_rules=TenantRules(
            quota_bytes=url.option("tenant_quota", parse_quota, None),
            fair=url.option("fair", one_of("on", "off"), "off") == "on",
        ),
        sharers=url.sharers,
        pin=url.pin,
    )
    source.check_block(url.block_bytes)
    return source
