"""Making room in a folder of blocks: how much there may be, and who has to go."""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from sglang_cake.store.base import EVICTION_COUNTS
from sglang_cake.store.eviction import EvictionPolicy, Usage, Use, Worth, new_policy
from sglang_cake.store.eviction.admission import Admission
from sglang_cake.store.eviction.tenants import Sharing, TenantPolicy
from sglang_cake.store.file.index import WAL_BYTES, BlockIndex, Booked, Touch
from sglang_cake.store.file.ownership import aside_bytes
from sglang_cake.store.file.paths import NamespaceFolder

# What lies in the folder beside blocks and their folders: descriptions of namespaces, the lock.
SMALL_FILES_BYTES = 256 << 10
# Blocks that are learned of without a rest: some milliseconds, which a put may have to wait for,
# and in which other threads of the process compete for the interpreter.
LEARN_AT_ONCE = 100
REST_S = 0.005
LEARN_A_TURN = 10_000
# Room that is made ahead in the background, so that a put seldom has to wait for it.
AHEAD_SHARE, AHEAD_MOST_BYTES = 0.02, 1 << 30


class Room:
    """Evicts by a policy. The policy lives in memory and learns from the books what is there: after
    a start in the background, and of other processes' blocks also when room is needed. What they
    have read in the meantime it learns block by block, before it evicts one. As long as it does not
    know all blocks, those go that are worth least among the ones it knows. Thread-safe."""

    def __init__(
        self,
        root: Path,
        capacity_bytes: int | None,
        policy: str,
        *,
        sharing: Sharing,
        admission: Admission,
        on_learned: Callable[[int, Use], None],
    ) -> None:
        """Args:
        sharing: what tenants owe each other.
        admission: which blocks are written at all.
        on_learned: is called with what the books know of each block, `ident` and last use.
        """
        self._root, self.capacity_bytes, self.policy_name = root, capacity_bytes, policy
        self._sharing, self._admission, self._on_learned = sharing, admission, on_learned
        self._lock = threading.Lock()
        self._worth = self._told_worth = Worth()
        self._policy = self._new_policy()
        self._kept = self._policy.fits()  # as the books have them
        self._seen = 0  # blocks with a larger id are not in the policy yet
        self._choosing_ns = 0
        self.counts = dict.fromkeys(EVICTION_COUNTS, 0)

    def overhead_bytes(self) -> int:
        """What the books and other small files take, or may come to take."""
        sizes = {"": 0, "-wal": 0, "-shm": 0}
        for suffix in sizes:
            with contextlib.suppress(FileNotFoundError):
                sizes[suffix] = os.stat(self._root / f"index.db{suffix}").st_blocks * 512
        index_bytes = sizes[""] + max(sizes["-wal"], WAL_BYTES) + sizes["-shm"]
        return index_bytes + aside_bytes(self._root / "index.db") + SMALL_FILES_BYTES

    def limit_bytes(self) -> int | None:
        """How much blocks and their folders may take in all."""
        if self.capacity_bytes is None:
            return None
        return self.capacity_bytes - self.overhead_bytes()

    def ahead_bytes(self, index: BlockIndex) -> int:
        """How much should be evicted now, so that later puts find room."""
        with self._lock:
            over_bytes = self._policy.over_bytes()
        limit_bytes = self.limit_bytes()
        if limit_bytes is None:
            return over_bytes
        ahead_bytes = min(int(limit_bytes * AHEAD_SHARE), AHEAD_MOST_BYTES)
        return max(over_bytes, index.totals()[1] + ahead_bytes - limit_bytes)

    def make(self, index: BlockIndex, bytes_wanted: int) -> int:
        """Evict blocks of `bytes_wanted` bytes in all, or as many as there are; returns their
        bytes. Raises: sqlite3.Error; OSError."""
        freed_bytes, now_s, pinned = 0, time.time(), dict[int, Usage]()  # pinned: being read
        self._learn_some(index)
        with self._lock:
            try:
                while freed_bytes < bytes_wanted:
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
                        freed_bytes += booked.usage.stored_bytes
                        self.counts["evicted_bytes"] += booked.usage.stored_bytes
                        self.counts["evicted_blocks"] += 1
                    else:
                        pinned[block] = booked.usage
            finally:
                for block, usage in pinned.items():
                    self._policy.add(block, usage)
        return freed_bytes

    def admits(self, usage: Usage) -> bool:
        """Whether a block that is used like this is worth writing; counted if it is not."""
        if not self._admission.least:
            return True
        with self._lock:
            admitted = self._admission.admits(self._policy, usage, self._worth)
            if not admitted:
                self.counts["skipped_blocks"] += 1
                self._policy.skipped(usage)
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
        with self._lock:
            self._policy.add(booked_id, usage)

    def touched(self, touches: Sequence[tuple[int, Touch]]) -> None:
        """Blocks were used here, as the books have it."""
        with self._lock:
            for block, touch in touches:
                self._policy.touch(block, touch.at_s, touch.uses, touch.use)

    def worth(self, worth: Worth) -> None:
        """What blocks save where requests run. Waits for nothing: `refresh` takes it up."""
        self._told_worth = worth

    def refresh(self, index: BlockIndex) -> None:
        """Let the policy learn from what it saw, and keep what it learned."""
        with self._lock:
            if self._worth != self._told_worth:
                self._worth = self._told_worth
                self._policy.weigh(self._worth)
            self._policy.refresh(time.time())
            fits = dict(self._policy.fits())
        if fits != self._kept:
            index.keep_fits(fits)
            self._kept = fits

    def begin_anew(self, index: BlockIndex) -> None:
        """The books are others now."""
        with self._lock:
            self._policy = self._new_policy()
            self._policy.learned(index.fits(), time.time())
            self._kept = dict(self._policy.fits())
            self._seen = 0

    def _new_policy(self) -> EvictionPolicy:
        policy = new_policy(self.policy_name, self._worth)
        return TenantPolicy(policy, self._sharing) if self._sharing else policy

    def _learn_some(self, index: BlockIndex) -> bool:
        """One portion; returns whether there may be more. The lock is not held while the books are
        asked."""
        with self._lock:
            policy, seen = self._policy, self._seen
        batch = index.stored(seen, LEARN_AT_ONCE)
        with self._lock:
            if (policy, seen) == (self._policy, self._seen):  # nobody else was quicker
                self._take_up(batch)
        return len(batch) == LEARN_AT_ONCE

    def _take_up(self, batch: Sequence[Booked]) -> None:
        for booked in batch:
            self._policy.add(booked.id, booked.usage)
            self._on_learned(booked.usage.ident, booked.usage.use)
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
                self._take_up(batch)
                for block in pinned:
                    self._policy.remove(block)
                popped = self._pop(now_s)
                if popped is not None:
                    return popped
        return None

    def _evict(self, index: BlockIndex, booked: Booked) -> bool:
        """Remove a block's file and then its booking; False if it is being read."""
        path = NamespaceFolder(self._root, booked.namespace).block(booked.key)
        if not remove_unread(path):
            return False
        index.drop(booked.id)
        return True


def remove_unread(path: Path) -> bool:
    """Remove a file unless somebody holds a lock on it; True if it is gone. Raises: OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    try:
        if not lock(fd, fcntl.LOCK_EX):
            return False
        os.unlink(path)
    except FileNotFoundError:
        pass
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
