"""Eviction in a file store: how much space blocks may take, and which blocks are removed."""

import errno
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from sglang_cake.core.keys import Digest
from sglang_cake.stores.base import EVICTION_COUNTS
from sglang_cake.stores.eviction import new_policy
from sglang_cake.stores.eviction.policy import (
    UNKNOWN_TENANT,
    AccessContext,
    Benefit,
    EvictionPolicy,
    Usage,
    admits,
)
from sglang_cake.stores.eviction.reuse_model import ReuseFits
from sglang_cake.stores.eviction.tenants import TenantPolicy
from sglang_cake.stores.file import nofollow
from sglang_cake.stores.file.block_files import CORRUPT, FolderSettings, block_names
from sglang_cake.stores.file.disk import Amount, FreeSpace
from sglang_cake.stores.file.index import BlockIndex, IndexedBlock, Touch, overhead_bytes
from sglang_cake.stores.reported_accesses import CLOCK_BACK_S, ConversationTracker

logger = logging.getLogger(__name__)
# Rows that are read from the index without a pause. That takes some milliseconds, for which a put
# may have to wait, and in which other threads compete for the interpreter.
LEARN_AT_ONCE = 100
REST_S = 0.005
LEARN_MOST = 10_000  # rows in one call of `learn`
UNKNOWN_MOST = 500  # rows of unknown tenants that are read again in a second
UNKNOWN_HELD = 1 << 20  # of these rows; of more, the newest
# Space that is freed ahead in the background, so that a put seldom waits for an eviction.
AHEAD_SHARE = 0.02
AHEAD_MOST_BYTES = 1 << 30
# Space freed in one step. Between two steps, callers ask again how much is missing, since other
# threads and processes free space for the same reason, and puts can run.
FREE_AT_ONCE = Amount(16 << 20, 1000)
# Blocks that free nothing in one step: other processes deleted or used them. There may be millions
# in a row, as after `store clear`.
MOST_PASSED = 1000
MOST_UNREMOVED = 16  # files that an eviction cannot remove before it fails
# Errors that say nothing about the file: of the whole file system, of the process, of the machine.
_NOT_OF_THE_FILE = frozenset((errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM))


def ahead_bytes(limit_bytes: int) -> int:
    """Bytes of a store's limit that its leader keeps free."""
    return min(int(limit_bytes * AHEAD_SHARE), AHEAD_MOST_BYTES)


class Evictor:
    """Evicts by a policy. Thread-safe.

    One of the processes that have the store open leads (see `IndexSupervisor`):

    - The leader's policy holds all blocks. It is filled from the index in the background, and
      before an eviction with the new blocks of other processes.
    - Before evicting a block, its last access is read again from the index, since another process
      may have used it, or received the report of its request.
    - With tenant rules, blocks of unknown tenants are read again in the background, for the same
      reason: no quota would ever apply to them while the store is not full.
    - Until the policy holds all blocks, victims are chosen among the blocks that it holds.

    Other processes hold no blocks in memory. If the leader did not free enough space in time, they
    evict the least valuable of LEARN_AT_ONCE random blocks.

    Methods with an index raise its errors (sqlite3.Error), and the OSError of a disk.

    Attributes:
        lock: held while the policy is used, and during evictions.
        counts: see `EvictionCounts`.
    """

    def __init__(
        self,
        settings: FolderSettings,
        on_learned: Callable[[int, AccessContext], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: on_learned: called with `ident` and last access of each block that is read from the
        index: all blocks in the leader, the newest ones in other processes."""
        self._root = settings.path
        self._settings = settings
        self._on_learned = on_learned
        self.lock = threading.Lock()
        self._benefit = Benefit()
        self._policy = self._new_policy({})
        self._seen = 0  # blocks with a larger id were not read from the index yet
        self._learned_s = 0.0  # time of the last call of `learn`
        # Blocks that may be of unknown tenants.
        self._unknown: deque[int] = deque(maxlen=UNKNOWN_HELD)
        self._clock = clock
        self._unknown_read_s = -math.inf  # time at which some of these were read again
        self.leads = False
        self.space = FreeSpace(settings.path, settings.min_free_bytes, clock)
        self._choosing_ns = 0
        self._has_damaged_files = False
        self.counts = dict.fromkeys(EVICTION_COUNTS, 0)

    @property
    def known_blocks(self) -> int:
        return len(self._policy)

    @property
    def fits(self) -> ReuseFits:
        """Reuse statistics that the policy decides by and a restart should keep."""
        return dict(self._policy.fits_to_save())

    def limit_bytes(self) -> int | None:
        """Limit for all blocks and their folders; None: no limit."""
        if self._settings.capacity_bytes is None:
            return None
        return self._settings.capacity_bytes - overhead_bytes(self._root)

    def ahead(self, index: BlockIndex) -> Amount:
        """Space that should be freed now, for later puts and `min_free_bytes`."""
        wanted_bytes = 0
        limit_bytes = self.limit_bytes()
        if limit_bytes is not None:
            taken_bytes = index.totals()[1] + ahead_bytes(limit_bytes)
            wanted_bytes = max(wanted_bytes, taken_bytes - limit_bytes)
        missing = self.space.missing()
        return Amount(max(wanted_bytes, missing.bytes), missing.files)

    def unused_bytes(self, used_bytes: int | None) -> int | None:
        """Bytes that puts may take before blocks are evicted; None: unknown.

        Args: used_bytes: of the capacity; None: unknown.
        Raises: OSError.
        """
        unused = self.space.unused_bytes()
        capacity_bytes = self._settings.capacity_bytes
        if capacity_bytes is None:
            return unused
        if used_bytes is None:
            return None
        return max(0, min(unused, capacity_bytes - ahead_bytes(capacity_bytes) - used_bytes))

    def free(self, index: BlockIndex, wanted: Amount) -> Amount:
        """Evict blocks until `wanted`, or FREE_AT_ONCE, is freed, and then remove files that were
        set aside.

        Returns the space that was freed, less than that if there is no more, or after MOST_PASSED.
        """
        wanted = wanted.at_most(FREE_AT_ONCE)
        if self.leads:
            self._learn_some(index)
        with self.lock:
            freed = self._evict_first(index, wanted)
        if wanted.exceeds(freed) and freed.passed < MOST_PASSED:
            try:
                aside = self.remove_aside(index)
                freed = _with(freed, aside.bytes, aside.files)
            except OSError as error:
                self._complain_of_file(error)
        self.space.freed(freed)
        return freed

    def over_quota_bytes(self) -> int:
        """Bytes that tenants hold above their quota, as far as the policy has their blocks."""
        with self.lock:
            return self._policy.over_quota_bytes()

    def free_ahead(self, index: BlockIndex) -> Amount:
        """One step of what the leader evicts without a put: blocks of tenants above their quota,
        until none is, and then what `ahead` tells. Returns the space that was freed."""
        if self.over_quota_bytes():
            with self.lock:
                step = Amount(FREE_AT_ONCE.bytes)
                freed = self._evict_first(index, step, only_over_quota=True)
            if freed:
                self.space.freed(freed)
                return freed
        wanted = self.ahead(index)
        return self.free(index, wanted) if wanted else Amount()

    def _evict_first(
        self, index: BlockIndex, wanted: Amount, *, only_over_quota: bool = False
    ) -> Amount:
        freed = Amount()
        unremoved = 0
        policy = self._policy if self.leads else self._new_policy(self.fits)
        further = self._further_blocks(index)
        # Popped blocks that stay: they are being read, or an exception ends the eviction.
        kept: dict[int, Usage] = {}
        now_s = time.time()
        try:
            while wanted.exceeds(freed) and freed.passed < MOST_PASSED:
                # Blocks whose tenant the index has changed may leave no tenant above its quota.
                if only_over_quota and not policy.over_quota_bytes():
                    break
                popped = self._pop(policy, now_s)
                if popped is None:
                    batch = next(further, None)
                    if batch is None:
                        break
                    for found in batch:
                        if found.id not in kept:
                            policy.add(found.id, found.usage)
                    continue
                block, usage = popped
                kept[block] = usage
                stored = index.find(block)
                if stored is None:
                    del kept[block]
                    freed = _with(freed, passed=1)
                    continue
                if stored.usage.used_s > usage.used_s or stored.usage.context != usage.context:
                    del kept[block]
                    policy.give_back(block, usage)
                    policy.add(block, stored.usage)
                    freed = _with(freed, passed=1)
                    continue
                try:
                    evicted = self._evict(index, stored)
                except OSError as error:
                    if error.errno in _NOT_OF_THE_FILE:
                        raise
                    del kept[block]  # a damaged file stays, and the next leader tries it again
                    self._complain_of_file(error)
                    unremoved += 1
                    if unremoved == MOST_UNREMOVED:
                        raise
                    continue
                if evicted:
                    del kept[block]
                    freed = _with(freed, stored.usage.stored_bytes, 1)
                    self.counts["evicted_bytes"] += stored.usage.stored_bytes
                    self.counts["evicted_blocks"] += 1
        finally:
            for block, usage in kept.items():
                policy.give_back(block, usage)
        return freed

    def _further_blocks(self, index: BlockIndex) -> Iterator[list[IndexedBlock]]:
        """Batches of blocks that the policy may not have: new ones, or samples in processes that do
        not lead, and then all, since those of a sample may be in use."""
        tried: set[int] = set()
        while not self.leads:
            sample = _with_past_times(index, index.sample(LEARN_AT_ONCE))
            sample = [block for block in sample if block.id not in tried]
            if not sample:
                break
            tried.update(block.id for block in sample)
            yield sample
        for after in (self._seen, 0) if self.leads else (0,):
            while batch := _read_batch(index, after):
                yield batch
                after = batch[-1].id

    def remove_aside(
        self, index: BlockIndex, older_than_s: float = 0.0, only: Digest | None = None
    ) -> Amount:
        """Remove the corrupt files of all namespaces, or of one, that got none for `older_than_s`.

        Returns the space that was freed. Raises: OSError, after all namespaces were tried.
        """
        removed = Amount()
        failure: OSError | None = None
        for digest, stored_bytes in index.with_aside():
            if only not in (None, digest):
                continue
            remove = partial(self._remove_aside_of, digest, older_than_s)
            try:
                files = index.clear_aside(digest, remove)
            except OSError as error:
                failure = error
                continue
            if files is not None:
                removed = Amount(removed.bytes + stored_bytes, removed.files + files)
        if failure is not None:
            raise failure
        return removed

    def _remove_aside_of(self, digest: Digest, older_than_s: float) -> int | None:
        place = (digest.hex(), CORRUPT)
        found = list(nofollow.files_in(self._root, *place))
        last_s = max((status.st_ctime for _, status in found), default=0.0)
        if time.time() - last_s < older_than_s:
            return None
        for name, _ in found:
            nofollow.remove_file(self._root, *place, name)
        return len(found)

    def admits(self, usage: Usage, benefit: Benefit | None) -> bool:
        """Whether to write a block with this usage. Rejected blocks are counted.

        Args:
            benefit: costs of the server that reported the block; None: the defaults.
        """
        ratio = self._settings.min_benefit_ratio
        if not ratio:
            return True
        with self.lock:
            admitted = admits(self._policy, usage, benefit or Benefit(), ratio)
            if not admitted:
                self.counts["skipped_blocks"] += 1
                self._policy.record_rejected(usage)
        return admitted

    def learn(self, index: BlockIndex, rest: Callable[[float], object]) -> bool:
        """Read at most LEARN_MOST blocks from the index into the policy; whether these were all.

        Args: rest: waits for some seconds; a true result ends the call.
        """
        now_s = time.time()
        # The clock was set back. Blocks that were used before would stay the newest ones until it
        # has caught up: read them again, which limits their times.
        is_back = now_s < self._learned_s - CLOCK_BACK_S
        # Others have deleted most blocks, whose facts fill the memory.
        are_gone = len(self._policy) > 2 * index.totals()[0] + LEARN_AT_ONCE
        if is_back or are_gone:
            self.restart(index, leads=self.leads)
        self._learned_s = now_s
        for _ in range(LEARN_MOST // LEARN_AT_ONCE):
            if not self._learn_some(index):
                self._learn_tenants(index, rest)
                return True
            if rest(REST_S):
                break
        return False

    def stored(self, block: int, usage: Usage) -> None:
        """This process stored a block."""
        if self.leads:
            with self.lock:
                self._policy.add(block, usage)

    def touched(self, touches: Sequence[tuple[int, Touch]]) -> None:
        """Record accesses by this process, which are in the index."""
        with self.lock:
            for block, touch in touches:
                self._policy.touch(block, touch.at_s, touch.uses, touch.context)

    def set_benefit(self, benefit: Benefit) -> None:
        """Set the costs of the server that runs requests. The policy has them from `refresh` on."""
        self._benefit = benefit

    def refresh(self, index: BlockIndex) -> None:
        """Update the reuse statistics: the leader fits and saves them, others load them."""
        with self.lock:
            self._policy.set_benefit(self._benefit)
            if self.leads:
                self._policy.refresh(time.time())
            fits = self.fits
        saved = index.fits()
        if self.leads:
            if fits and fits != saved:
                index.save_fits(fits)
        elif fits != saved:
            with self.lock:
                self._policy = self._new_policy(saved)

    def restart(self, index: BlockIndex, *, leads: bool) -> None:
        """Start with an empty policy, for a new index, a new leader, or new times."""
        fits = index.fits()
        # Without a policy, the newest blocks are enough, for `on_learned`. Each has taken two ids.
        seen = 0 if leads else max(0, index.last() - 2 * ConversationTracker.max_blocks)
        with self.lock:
            self.leads = leads
            self._seen = seen
            self._unknown.clear()
            self._policy = self._new_policy(fits)

    def _new_policy(self, fits: ReuseFits) -> EvictionPolicy:
        policy = new_policy(self._settings.policy, self._benefit)
        if self._settings.tenant_rules:
            policy = TenantPolicy(policy, self._settings.tenant_rules)
        policy.resume(fits, time.time())
        return policy

    def _learn_some(self, index: BlockIndex) -> bool:
        """Read one batch; returns whether there may be more. The lock is free meanwhile."""
        with self.lock:
            policy = self._policy
            seen = self._seen
        batch = _read_batch(index, seen)
        with self.lock:
            if policy is self._policy and seen == self._seen:  # no other thread was faster
                for block in batch:
                    if self.leads:
                        policy.add(block.id, block.usage)
                        is_unknown = block.usage.context.tenant == UNKNOWN_TENANT
                        if is_unknown and self._settings.tenant_rules:
                            self._unknown.append(block.id)
                    self._on_learned(block.usage.ident, block.usage.context)
                    self._seen = block.id
        return len(batch) == LEARN_AT_ONCE

    def _learn_tenants(self, index: BlockIndex, rest: Callable[[float], object]) -> None:
        """Read blocks of unknown tenants again, in turn, UNKNOWN_MOST each second."""
        if self._clock() < self._unknown_read_s + 1.0:
            return
        self._unknown_read_s = self._clock()
        with self.lock:
            count = min(len(self._unknown), UNKNOWN_MOST)
            blocks = [self._unknown.popleft() for _ in range(count)]
        for start in range(0, count, LEARN_AT_ONCE):
            found = index.find_all(blocks[start : start + LEARN_AT_ONCE])
            with self.lock:
                for block in found:
                    usage = block.usage
                    if usage.context.tenant == UNKNOWN_TENANT:
                        self._unknown.append(block.id)
                    else:
                        self._policy.touch(block.id, usage.used_s, 0, usage.context)
            rest(REST_S)

    def _complain_of_file(self, error: OSError) -> None:
        if not self._has_damaged_files:
            logger.error("store %s: a file cannot be removed, and stays: %s", self._root, error)
        self._has_damaged_files = True

    def _pop(self, policy: EvictionPolicy, now_s: float) -> tuple[int, Usage] | None:
        began_ns = time.perf_counter_ns()
        popped = policy.pop(now_s)
        self._choosing_ns += time.perf_counter_ns() - began_ns
        self.counts["evicting_us"] = self._choosing_ns // 1000
        return popped

    def _evict(self, index: BlockIndex, block: IndexedBlock) -> bool:
        """Remove the file of a block, its empty folders, and last its row; False if it is read."""
        *folder_names, name = block_names(block.namespace, block.key)
        if not nofollow.remove_unread(self._root, *folder_names, name):
            return False
        nofollow.remove_empty(self._root, *folder_names)
        index.drop(block)
        return True


def _with(freed: Amount, more_bytes: int = 0, files: int = 0, passed: int = 0) -> Amount:
    return Amount(freed.bytes + more_bytes, freed.files + files, freed.passed + passed)


def _read_batch(index: BlockIndex, after: int) -> list[IndexedBlock]:
    return _with_past_times(index, index.stored(after, LEARN_AT_ONCE))


def _with_past_times(index: BlockIndex, batch: list[IndexedBlock]) -> list[IndexedBlock]:
    """The blocks, with times that are not in the future.

    The clock may have been ahead when blocks were used. The index is changed too, since an eviction
    compares its times with the policy's. Reported accesses may be CLOCK_BACK_S ahead.
    """
    now_s = time.time()
    ahead = [
        block.id
        for block in batch
        if max(block.usage.created_s, block.usage.used_s) > now_s + CLOCK_BACK_S
    ]
    if not ahead:
        return batch
    index.limit_times(ahead, now_s)
    return sorted(index.find_all([block.id for block in batch]))
