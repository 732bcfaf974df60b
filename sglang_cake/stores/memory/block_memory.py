"""Blocks of all namespaces in host memory of one process, within a capacity."""

import contextlib
import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_cake.core.buffers import Buffer, HostArena, Pin, whole_pages
from sglang_cake.core.errors import StoreFull
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.base import BlockInfo, LentBlock, RequestFacts, StoreStats
from sglang_cake.stores.eviction import new_policy
from sglang_cake.stores.eviction.policy import UNKNOWN_TENANT, Benefit, Usage, ident_of
from sglang_cake.stores.eviction.tenants import TenantPolicy, TenantRules
from sglang_cake.stores.reported_accesses import ReportedAccesses

REFRESH_S: Final = 1.0
# An eviction passes over at most so many blocks that are not written below yet, or are another
# tenant's, in search of a better one. The bound limits the time of an eviction.
MOST_PASSED: Final = 64
# Blocks of a prompt that are touched without a pause for calls of an event loop (`lend`): about
# a millisecond. A prompt may have thousands.
TOUCHED_AT_ONCE: Final = 100
# Blocks that are lent at once, as a share of all: others can always be evicted.
LENT_SHARE: Final = 0.5


@dataclass(slots=True, eq=False)
class HeldBlock:
    """One block. The memory changes all fields under its lock.

    Attributes:
        ident: its number in the eviction policy.
        users: reads, leases, and the write that fills it. A block in use is not evicted.
        unwritten: number of lower tiers that do not have the block yet (`BlockMemory.keep`).
        whole: all bytes are there.
        gone: evicted or deleted; its buffer is free when `users` is 0.
    """

    ident: int
    namespace: Digest
    key: BlockKey
    buffer: Buffer
    size_bytes: int
    users: int = 1
    unwritten: int = 0
    whole: bool = False
    gone: bool = False

    @property
    def data(self) -> memoryview:
        return self.buffer.view[: self.size_bytes]


class BlockMemory:
    """A fixed number of buffers for blocks, and the eviction policy that decides which stay.

    Thread-safe; no call waits for anything but the lock. A page of memory is allocated when it is
    first used. Blocks were checked before they came here. Times are of the monotonic clock.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        block_bytes: int,
        policy: str,
        tenant_rules: TenantRules,
        pin: Pin | None = None,
    ) -> None:
        """Args:
            capacity_bytes: limit for all buffers; at least one.
            block_bytes: limit for a payload.
            policy: a key of `eviction.POLICIES`.
            pin: lets a device copy from the memory, which allocates it at once. None: no device
                reads it.

        Raises: OSError if the system does not map so much.
        """
        self._stride_bytes = whole_pages(block_bytes)
        self._capacity_bytes = capacity_bytes
        count = capacity_bytes // self._stride_bytes
        arena = HostArena([block_bytes] * count, prefault=False)
        # A device copies from pinned memory only without making the host wait.
        lendable = count if pin is None else pin(arena)
        self._pageable = frozenset(arena.buffers[lendable:])
        self._most_lent = int(lendable * LENT_SHARE)
        self._lent = 0
        self._free = arena.buffers[::-1]  # those that can be lent are used first
        self._policy_name = policy
        order = new_policy(policy)
        self._tenants = TenantPolicy(order, tenant_rules) if tenant_rules else None
        self._policy = order if self._tenants is None else self._tenants
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._by_number: dict[int, HeldBlock] = {}
        self._blocks: dict[tuple[Digest, BlockKey], HeldBlock] = {}
        self._whole_blocks = 0  # of `_blocks`
        self._accesses = ReportedAccesses()
        self._benefit: Benefit | None = None
        self._refreshed_s = time.monotonic()
        self._closed = False

    def close(self) -> None:
        """Drop all blocks. The memory is freed when the last of them is not used any more."""
        with self._lock:
            self._closed = True
            self._free.clear()
            for block in list(self._blocks.values()):
                self._remove(block)

    def has(self, digest: Digest, keys: Sequence[BlockKey]) -> list[bool]:
        # Without the lock: an event loop would wait while the reuse of blocks is fitted.
        found = [self._blocks.get((digest, key)) for key in keys]
        return [block is not None and block.whole for block in found]

    def on_access(self, digest: Digest, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """As `Store.on_access`."""
        accesses = self._accesses.report(digest, keys, facts, time.monotonic())
        for start in range(0, len(accesses), TOUCHED_AT_ONCE):
            with self._lock:
                for access in accesses[start : start + TOUCHED_AT_ONCE]:
                    block = self._blocks.get((digest, access.key))
                    if block is not None:
                        self._policy.touch(block.ident, access.at_s, 1, access.context)
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._refreshed_s >= REFRESH_S:
                self._refreshed_s = now_s
                if facts.benefit is not None and facts.benefit != self._benefit:
                    self._benefit = facts.benefit
                    self._policy.set_benefit(facts.benefit)
                self._policy.refresh(now_s, self._unlocked)

    # ---- blocks; each is used between a call that returns it and `release` ----

    def use(
        self,
        digest: Digest,
        key: BlockKey,
        *,
        counts: bool,
        least_bytes: int = 0,
        to_lend: bool = False,
    ) -> HeldBlock | None:
        """A stored block, to be read; None if there is none.

        Args:
            counts: the read is an access, for eviction.
            least_bytes: None as well if the payload has fewer.
            to_lend: None as well if its memory is not pinned for the device.
        """
        now_s = time.monotonic()
        with self._lock:
            block = self._blocks.get((digest, key))
            if block is None or not block.whole or block.size_bytes < least_bytes:
                return None
            if to_lend and block.buffer in self._pageable:
                return None
            block.users += 1
            if counts and not self._accesses.is_announced(digest, key, now_s):
                self._policy.touch(block.ident, now_s, 0 if self._accesses.has_reports else 1)
            return block

    def lend(
        self, digest: Digest, key: BlockKey, *, counts: bool, least_bytes: int = 0
    ) -> LentBlock | None:
        """As `use`. None also if LENT_SHARE of the blocks that can be lent are lent, or if this
        one's memory is not pinned for the device."""
        with self._lock:
            if self._lent >= self._most_lent:
                return None
            self._lent += 1
        block = self.use(digest, key, counts=counts, least_bytes=least_bytes, to_lend=True)
        if block is not None:
            return LentBlock(block.buffer, functools.partial(self._take_back, block))
        with self._lock:
            self._lent -= 1
        return None

    def add(
        self,
        digest: Digest,
        key: BlockKey,
        size_bytes: int,
        *,
        must_earn_place: bool,
        evictions: Counter[str] | None = None,
    ) -> HeldBlock | None:
        """A new block, to be filled and then committed. None if there is one already, or one that
        is being filled. Others may be evicted.

        Args:
            must_earn_place: None as well if the policy would evict this block before others, or
                only blocks that are not written below could be evicted for it.
            evictions: counts the evictions for it, as in `EvictionCounts`.

        Raises: StoreFull if all blocks that could be evicted for it are in use.
        """
        now_s = time.monotonic()
        evictions = Counter() if evictions is None else evictions
        if (digest, key) in self._blocks:
            return None
        # Without the lock, since it waits for a long report.
        access = self._accesses.access_for_put(digest, key, now_s)
        with self._lock:
            if (digest, key) in self._blocks or self._closed:
                return None
            usage = Usage(
                self._stride_bytes,
                now_s,
                access.at_s,
                int(must_earn_place),  # such a block was read a moment ago
                ident_of(key),
                access.context,
            )
            number = next(self._numbers)
            if must_earn_place and not self._free:
                self._policy.add(number, usage)
                if not self._evict(now_s, evictions, own=access.context.tenant, before=number):
                    self._policy.remove(number)
                    return None
            elif not self._free and not self._evict(now_s, evictions, own=access.context.tenant):
                raise StoreFull("all blocks of the memory that may be evicted are in use")
            block = HeldBlock(number, digest, key, self._free.pop(), size_bytes)
            self._by_number[number] = self._blocks[digest, key] = block
            self._policy.add(number, usage)
            return block

    def commit(self, block: HeldBlock, evictions: Counter[str] | None = None) -> bool:
        """The block has all its bytes; False if it was deleted meanwhile. Args: evictions: as in
        `add`."""
        evictions = Counter() if evictions is None else evictions
        with self._lock:
            block.whole = not block.gone
            self._whole_blocks += block.whole
            self._leave(block)
            now_s = time.monotonic()
            while self._policy.over_quota_bytes() and self._evict(now_s, evictions, in_order=True):
                pass
            return block.whole

    def release(self, block: HeldBlock) -> None:
        """The caller uses the block no more. A block without all its bytes is removed."""
        with self._lock:
            if not block.whole:
                self._remove(block)
            self._leave(block)

    def delete(self, digest: Digest, key: BlockKey) -> None:
        """Remove a block, if it is there."""
        with self._lock:
            block = self._blocks.get((digest, key))
            if block is not None:
                self._remove(block)

    def keep(self, digest: Digest, key: BlockKey) -> "Unwritten | None":
        """A stored block that a store below is yet to get; None if there is none."""
        with self._lock:
            block = self._blocks.get((digest, key))
            if block is None or not block.whole:
                return None
            block.unwritten += 1
            return Unwritten(self, block)

    def pin(self, block: HeldBlock) -> bool:
        """Use a kept block; False if it was evicted or deleted."""
        with self._lock:
            block.users += not block.gone
            return not block.gone

    def written(self, block: HeldBlock) -> None:
        """A store below has a kept block, or never will."""
        with self._lock:
            block.unwritten -= 1

    def _take_back(self, block: HeldBlock) -> None:
        with self._lock:
            self._lent -= 1
            self._leave(block)

    # ---- listing ----

    def list_blocks(self, digest: Digest) -> list[BlockInfo]:
        """The blocks of one namespace."""
        with self._lock:
            return [
                BlockInfo(block.key, self._stride_bytes)
                for block in self._blocks.values()
                if block.whole and block.namespace == digest
            ]

    def stats(self) -> StoreStats:
        """How full it is. Each store has the evictions for its blocks."""
        with self._lock:
            used_bytes = len(self._by_number) * self._stride_bytes
            return StoreStats(
                blocks=self._whole_blocks,
                block_bytes=self._whole_blocks * self._stride_bytes,
                used_bytes=used_bytes,
                capacity_bytes=self._capacity_bytes,
                policy=self._policy_name,
            )

    # ---- with the lock held ----

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        """The context in which others use the memory: the fit of the reuse times takes tens of
        milliseconds, and the scheduler thread would wait to be lent a block."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def _evict(
        self,
        now_s: float,
        evictions: Counter[str],
        *,
        own: int | None = None,
        before: int | None = None,
        in_order: bool = False,
    ) -> bool:
        """Evict one block; False if none can be.

        Blocks in use are passed over; a put looks on until it finds one that is not in use. Blocks
        that no lower tier has are passed over if there is another one among the first MOST_PASSED.
        With tenant rules, only one tenant loses a block: the one that breaks a rule, or else that
        of the first block that is not in use. So a tenant that stores faster than the disk writes
        costs no other tenant a block. If all blocks of that tenant that were looked at are in use,
        a put of another tenant takes one of any tenant.

        Args:
            own: the tenant that the block is evicted for, which may lose one, too.
            before: a block in the policy only. Evicted is only a block that comes before it in the
                order, and that a lower tier has.
            in_order: evict a block that is not written as readily as another one.
        """
        began_ns = time.perf_counter_ns()
        passed: list[tuple[int, Usage]] = []
        victim: HeldBlock | None = None
        unwritten: HeldBlock | None = None  # the first that was passed over
        foreign: HeldBlock | None = None  # the first that was passed over for its tenant alone
        in_use = 0  # of those that were passed over
        bound = self._tenants is not None and self._tenants.breaks_rule
        tenant: int | None = None
        while victim is None and (popped := self._policy.pop(now_s)) is not None:
            passed.append(popped)
            number, usage = popped
            if number == before:
                break
            block = self._by_number[number]
            owner = usage.context.tenant
            # A tenant above its share loses blocks of unknown tenants, too, which break no rule.
            may_lose = owner != UNKNOWN_TENANT if bound else not block.users
            if self._tenants is not None and tenant is None and may_lose:
                tenant = owner
            same = tenant is None or owner in (tenant, own)
            if same and not block.users and (in_order or not block.unwritten):
                victim = block
            elif same and not block.users:
                unwritten = unwritten or block
            elif not block.users and not block.unwritten and own not in (None, tenant):
                foreign = foreign or block
            in_use += block.users > 0
            must_find = before is None and unwritten is None
            if len(passed) - (in_use if must_find else 0) >= MOST_PASSED:
                break
        if victim is None and before is None:
            victim = unwritten or foreign
        for number, usage in passed:
            if number != before and (victim is None or number != victim.ident):
                self._policy.give_back(number, usage)
        if victim is not None:
            self._remove(victim)
            evictions["evicted_blocks"] += 1
            evictions["evicted_bytes"] += self._stride_bytes
        evictions["evicting_us"] += round((time.perf_counter_ns() - began_ns) / 1000)
        return victim is not None

    def _remove(self, block: HeldBlock) -> None:
        if not block.gone:
            block.gone = True
            self._whole_blocks -= block.whole
            self._policy.remove(block.ident)
            del self._blocks[block.namespace, block.key]
            self._free_if_unused(block)

    def _leave(self, block: HeldBlock) -> None:
        block.users -= 1
        self._free_if_unused(block)

    def _free_if_unused(self, block: HeldBlock) -> None:
        if block.gone and not block.users:
            del self._by_number[block.ident]
            if not self._closed:
                self._free.append(block.buffer)


class Unwritten:
    """A block that a store below is yet to get. It may be evicted meanwhile, but other blocks come
    first."""

    def __init__(self, memory: BlockMemory, block: HeldBlock) -> None:
        self._memory = memory
        self._block = block
        self._pinned = False

    def pin(self) -> memoryview | None:
        """The payload, which stays until `release`; None: it was evicted or deleted."""
        self._pinned = self._memory.pin(self._block)
        return self._block.data if self._pinned else None

    def release(self) -> None:
        """The store below has the block, or will not get it. Called once."""
        self._memory.written(self._block)
        if self._pinned:
            self._memory.release(self._block)
