"""Making room in a folder of blocks: how much there may be, and who has to go."""

import contextlib
import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from sglang_cake.stores.base import EVICTION_COUNTS
from sglang_cake.stores.eviction import AccessContext, Benefit, EvictionPolicy, Usage, new_policy
from sglang_cake.stores.eviction.policy import AdmissionPolicy
from sglang_cake.stores.eviction.tenants import TenantPolicy, TenantRules
from sglang_cake.stores.file import folder_tree
from sglang_cake.stores.file.database import WAL_BYTES
from sglang_cake.stores.file.disk_usage import Amount, FreeSpace
from sglang_cake.stores.file.index import BlockIndex, Booked, Touch
from sglang_cake.stores.file.ownership import aside_bytes
from sglang_cake.stores.file.paths import CORRUPT, NamespaceFolder

# What lies in the root beside namespaces and the index: locks, a description that is being written.
SMALL_FILES_BYTES = 128 << 10
# Blocks that are learned of without a rest: some milliseconds, which a put may have to wait for,
# and in which other threads of the process compete for the interpreter.
LEARN_AT_ONCE = 100
REST_S = 0.005
LEARN_A_TURN = 10_000
# Room that is made ahead in the background, so that a put seldom has to wait for it.
AHEAD_SHARE, AHEAD_MOST_BYTES = 0.02, 1 << 30
TAKE_UP_FITS_EVERY_S = 60.0


class Evictor:
    """Evicts by a policy. Thread-safe.

    Of the processes that have a folder open, one leads (`IndexSupervisor` decides which). Its
    policy holds the order of all blocks in memory: it learns from the index, after a start in the
    background, and of other processes' blocks also when room is needed. What they have read in the
    meantime it learns block by block, before it evicts one. As long as it does not know all blocks,
    those go that are worth least among the ones it knows.

    The others hold no order. Room that the leader has not made in time they make themselves: of
    LEARN_AT_ONCE blocks, from a random one on, those go that are worth least.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int | None,
        policy: str,
        *,
        min_free_bytes: int,
        tenant_rules: TenantRules,
        admission: AdmissionPolicy,
        on_learned: Callable[[int, AccessContext], None],
    ) -> None:
        """Args:
        tenant_rules: quota and fair sharing among tenants.
        admission: which blocks are written at all.
        on_learned: is called with what the books know of each block, `ident` and last use.
        """
        self._root, self.capacity_bytes, self.policy_name = root, capacity_bytes, policy
        self._tenant_rules, self._admission, self._on_learned = tenant_rules, admission, on_learned
        self._lock = threading.Lock()
        self._benefit = self._reported_benefit = Benefit()
        self._policy = self._new_policy()
        self._kept = self._policy.fits_to_save()  # as the books have them
        self._seen = 0  # blocks with a larger id are not in the policy yet
        self._took_up_fits_s = 0.0
        self.leads = False
        self.space = FreeSpace(root, min_free_bytes)
        self._choosing_ns = 0
        self.counts = dict.fromkeys(EVICTION_COUNTS, 0)

    def limit_bytes(self) -> int | None:
        """How much blocks and their folders may take in all."""
        if self.capacity_bytes is None:
            return None
        return self.capacity_bytes - overhead_bytes(self._root)

    def ahead(self, index: BlockIndex) -> Amount:
        """How much should be evicted now: so that later puts find room, and that the file system
        keeps what it should, also where nothing is put. Raises: sqlite3.Error; OSError."""
        with self._lock:
            wanted_bytes = self._policy.over_quota_bytes()
        limit_bytes = self.limit_bytes()
        if limit_bytes is not None:
            ahead_bytes = min(int(limit_bytes * AHEAD_SHARE), AHEAD_MOST_BYTES)
            wanted_bytes = max(wanted_bytes, index.totals()[1] + ahead_bytes - limit_bytes)
        missing = self.space.missing()
        return Amount(max(wanted_bytes, missing.bytes), missing.files)

    def make(self, index: BlockIndex, wanted: Amount) -> Amount:
        """Evict as much as is `wanted`, or as much as there is; returns how much that was. Files
        that were set aside go after all blocks. Raises: sqlite3.Error; OSError."""
        if self.leads:
            self._learn_some(index)
        with self._lock, self._order(index):
            freed = self._evict_first(index, wanted)
        if freed.bytes < wanted.bytes or freed.files < wanted.files:
            aside = self.remove_aside(index)
            freed = Amount(freed.bytes + aside.bytes, freed.files + aside.files)
        self.space.freed(freed)
        return freed

    def _evict_first(self, index: BlockIndex, wanted: Amount) -> Amount:
        freed, pinned, now_s = Amount(), dict[int, Usage](), time.time()  # pinned: being read
        try:
            while freed.bytes < wanted.bytes or freed.files < wanted.files:
                popped = self._pop(now_s) or self._pop_forgotten(index, now_s, pinned)
                if popped is None:
                    break
                block, usage = popped
                booked = index.find(block)
                if booked is None:
                    continue
                if booked.usage.used_s > usage.used_s:  # another process has read it
                    self._policy.add(block, booked.usage)
                elif self._evict(index, booked):
                    freed = Amount(freed.bytes + booked.usage.stored_bytes, freed.files + 1)
                    self.counts["evicted_bytes"] += booked.usage.stored_bytes
                    self.counts["evicted_blocks"] += 1
                else:
                    pinned[block] = booked.usage
        finally:
            for block, usage in pinned.items():
                self._policy.add(block, usage)
        return freed

    @contextlib.contextmanager
    def _order(self, index: BlockIndex) -> Iterator[None]:
        """Without the lead: the order of some blocks, for a moment."""
        if self.leads:
            yield
            return
        kept = self._policy, self._seen
        try:
            self._policy, self._seen = self._new_policy(), random.randrange(index.last() + 1)
            self._policy.resume(self._kept, time.time())
            batch = index.stored(self._seen, LEARN_AT_ONCE)
            if len(batch) < LEARN_AT_ONCE:
                batch = index.stored(0, LEARN_AT_ONCE - len(batch)) + batch
            self._take_up(batch, order=True)
            yield
        finally:
            self._policy, self._seen = kept

    def remove_aside(self, index: BlockIndex, older_than_s: float = 0.0) -> Amount:
        """Remove the files that were set aside as corrupt, of namespaces where the last one was so
        long ago; returns how much that was. Raises: sqlite3.Error; OSError."""
        removed = Amount()
        for digest, stored_bytes in index.with_aside():
            place = (digest.hex(), CORRUPT)
            found = list(folder_tree.files_in(self._root, *place))
            last_s = max((status.st_ctime for _, status in found), default=0.0)
            if time.time() - last_s < older_than_s:
                continue
            for name, _ in found:
                folder_tree.remove_file(self._root, *place, name)
            index.drop_aside(digest)
            removed = Amount(removed.bytes + stored_bytes, removed.files + len(found))
        return removed

    def admits(self, usage: Usage) -> bool:
        """Whether a block that is used like this is worth writing; counted if it is not."""
        if not self._admission.min_benefit_ratio:
            return True
        with self._lock:
            admitted = self._admission.admits(self._policy, usage, self._benefit)
            if not admitted:
                self.counts["skipped_blocks"] += 1
                self._policy.record_rejected(usage)
        return admitted

    def learn(self, index: BlockIndex, rest: Callable[[float], object]) -> bool:
        """Take up what the books know, up to LEARN_A_TURN blocks; returns whether that was all.

        Args: rest: waits for so many seconds, in which others get at the policy and at the
            interpreter; what it returns says whether to stop.
        Raises: sqlite3.Error.
        """
        for _ in range(LEARN_A_TURN // LEARN_AT_ONCE):
            if not self._learn_some(index):
                return True
            if rest(REST_S):
                break
        return False

    def stored(self, booked_id: int, usage: Usage) -> None:
        """A block was stored here."""
        if self.leads:
            with self._lock:
                self._policy.add(booked_id, usage)

    def touched(self, touches: Sequence[tuple[int, Touch]]) -> None:
        """Blocks were used here, as the books have it."""
        with self._lock:
            for block, touch in touches:
                self._policy.touch(block, touch.at_s, touch.uses, touch.context)

    def set_benefit(self, benefit: Benefit) -> None:
        """What blocks save where requests run. Waits for nothing: `refresh` takes it up."""
        self._reported_benefit = benefit

    def refresh(self, index: BlockIndex) -> None:
        """Let the policy learn from what it saw, and keep what it learned; without the lead, take
        up what the leader has learned."""
        now_s = time.time()
        with self._lock:
            if self._benefit != self._reported_benefit:
                self._benefit = self._reported_benefit
                self._policy.set_benefit(self._benefit)
            if self.leads:
                self._policy.refresh(now_s)
                fits = dict(self._policy.fits_to_save())
        if not self.leads:
            if abs(now_s - self._took_up_fits_s) >= TAKE_UP_FITS_EVERY_S:
                self._take_up_fits(index, leads=False)
        elif fits != self._kept:
            index.keep_fits(fits)
            self._kept = fits

    def begin_anew(self, index: BlockIndex, *, leads: bool) -> None:
        """The books are others now, or the lead is."""
        self._seen = 0
        self._take_up_fits(index, leads=leads)

    def _take_up_fits(self, index: BlockIndex, *, leads: bool) -> None:
        fits, now_s = index.fits(), time.time()
        with self._lock:
            self._policy, self.leads = self._new_policy(), leads
            self._policy.resume(fits, now_s)
            self._kept, self._took_up_fits_s = dict(self._policy.fits_to_save()), now_s

    def _new_policy(self) -> EvictionPolicy:
        policy = new_policy(self.policy_name, self._benefit)
        return TenantPolicy(policy, self._tenant_rules) if self._tenant_rules else policy

    def _learn_some(self, index: BlockIndex) -> bool:
        """One portion; returns whether there may be more. The lock is not held while the books are
        asked."""
        with self._lock:
            policy, seen = self._policy, self._seen
        batch = index.stored(seen, LEARN_AT_ONCE)
        with self._lock:
            if (policy, seen) == (self._policy, self._seen):  # nobody else was quicker
                self._take_up(batch, order=self.leads)
        return len(batch) == LEARN_AT_ONCE

    def _take_up(self, batch: Sequence[Booked], *, order: bool) -> None:
        for booked in batch:
            if order:
                self._policy.add(booked.id, booked.usage)
            self._on_learned(booked.usage.ident, booked.usage.context)
            self._seen = booked.id

    def _pop(self, now_s: float) -> tuple[int, Usage] | None:
        began_ns = time.perf_counter_ns()
        popped = self._policy.pop(now_s)
        self._choosing_ns += time.perf_counter_ns() - began_ns
        self.counts["evicting_us"] = self._choosing_ns // 1000
        return popped

    def _pop_forgotten(
        self, index: BlockIndex, now_s: float, pinned: Collection[int]
    ) -> tuple[int, Usage] | None:
        # Further ones, and then those that others were still writing when later ones were learned.
        for anew in (False, True):
            self._seen = 0 if anew else self._seen
            while batch := index.stored(self._seen, LEARN_AT_ONCE):
                self._take_up(batch, order=True)
                for block in pinned:
                    self._policy.remove(block)
                popped = self._pop(now_s)
                if popped is not None:
                    return popped
        return None

    def _evict(self, index: BlockIndex, booked: Booked) -> bool:
        """Remove a block's file, its folders if they are empty then, and last its booking; False if
        it is being read."""
        shard = NamespaceFolder(self._root, booked.namespace).shard(booked.key)
        if not remove_unread(self._root, *shard, booked.key.hex()):
            return False
        folder_tree.remove_empty(self._root, *shard)
        index.drop(booked)
        return True


def overhead_bytes(root: Path) -> int:
    """What the books and other small files take, or may come to take."""
    sizes = {"": 0, "-wal": 0, "-shm": 0}
    for suffix in sizes:
        with contextlib.suppress(FileNotFoundError):
            sizes[suffix] = os.lstat(root / f"index.db{suffix}").st_blocks * 512
    index_bytes = sizes[""] + max(sizes["-wal"], WAL_BYTES) + sizes["-shm"]
    return index_bytes + aside_bytes(root / "index.db") + SMALL_FILES_BYTES


def remove_unread(root: Path, *names: str) -> bool:
    """Remove a file unless somebody holds a lock on it; True if it is gone, as it is where a link
    has taken the place of its folder. Raises: OSError."""
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with gone, folder_tree.opened(root, *names[:-1]) as folder:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            fd = os.open(names[-1], flags, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            os.unlink(names[-1], dir_fd=folder)  # a link: nobody reads that
            return True
        try:
            if not lock(fd, fcntl.LOCK_EX):
                return False
            os.unlink(names[-1], dir_fd=folder)
        finally:
            os.close(fd)
    return True


def lock(fd: int, kind: int) -> bool:
    """Try to lock an open file until it is closed; True where a file system has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
