"""The blocks of all namespaces below one folder. Blocking and thread-safe; no event loop here."""

import contextlib
import fcntl
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.base import BlockInfo, EvictionCounts, StoredNamespace, StoreStats
from sglang_cake.stores.eviction import Usage, ident_of
from sglang_cake.stores.eviction.policy import ADMIT_ALL, AdmissionPolicy
from sglang_cake.stores.eviction.tenants import NO_TENANT_RULES, TenantRules
from sglang_cake.stores.file import folder_tree
from sglang_cake.stores.file.access_log import AccessLog
from sglang_cake.stores.file.blockfile import NewFile
from sglang_cake.stores.file.description import Descriptions
from sglang_cake.stores.file.disk_usage import Amount
from sglang_cake.stores.file.evictor import Evictor, lock, overhead_bytes
from sglang_cake.stores.file.files import BlockFiles
from sglang_cake.stores.file.index import BlockIndex, Booking, Reserved
from sglang_cake.stores.file.index_supervisor import IndexSupervisor
from sglang_cake.stores.file.os_errors import foreign_errors
from sglang_cake.stores.file.paths import NamespaceFolder
from sglang_cake.stores.file.scan import namespaces_in, remove_stale, shards_of
from sglang_cake.stores.file.write_backoff import WriteBackoff
from sglang_cake.stores.request_info import RequestFacts
from sglang_cake.stores.threads import check_stop
from sglang_cake.stores.url import DEFAULT_POLICY

logger = logging.getLogger(__name__)
TELL_EVERY_S = 10.0  # of corrupt blocks: a disk that rots has many
LIST_AT_ONCE = 1000  # blocks that a list fetches in one turn of a thread
MOST_UNUSED = 64  # namespaces that were described and have no block yet


class BlockFolder:
    """Any number of processes of one machine may have the same folder open; they share the books
    (index.py), by which the folder never holds more than its capacity."""

    def __init__(
        self,
        root: Path,
        *,
        sync: bool = False,
        min_free_bytes: int = 0,
        capacity_bytes: int | None = None,
        policy: str = DEFAULT_POLICY,
        tenant_rules: TenantRules = NO_TENANT_RULES,
        admission: AdmissionPolicy = ADMIT_ALL,
    ) -> None:
        """Open (and make) the folder. Blocks on the disk for a moment.

        Args:
            sync: every block is on the disk when it becomes visible; otherwise that is left to the
                kernel: after a power cut, late blocks are missing or fail their check.
            min_free_bytes: of the file system; blocks make way for one that would leave less.
            capacity_bytes: on the disk, all files and folders below `root`; None: no bound.
            policy: who makes way, a key of `eviction.POLICIES`.
            tenant_rules: quota and fair sharing among tenants.
            admission: which blocks are written at all.

        Raises: StoreUnavailable.
        """
        self._root = root
        self._pause = WriteBackoff()
        with foreign_errors(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._allocated_bytes = max(4096, os.statvfs(root).f_frsize)
        self._descriptions = Descriptions(root, self._allocated_bytes)
        self._files = BlockFiles(root, self._descriptions, sync=sync)
        self._touches = AccessLog()
        self._telling = threading.Lock()
        self._told_s = -math.inf  # when a corrupt block was last told of
        self.corrupt_blocks = 0  # that were set aside or removed since this folder was opened
        self._evictor = Evictor(
            root,
            capacity_bytes,
            policy,
            min_free_bytes=min_free_bytes,
            tenant_rules=tenant_rules,
            admission=admission,
            on_learned=self._touches.remember,
        )
        self._supervisor = IndexSupervisor(
            root, self._evictor, self._descriptions, self._allocated_bytes
        )

    def claim(self, digest: Digest, fields: Mapping[str, str]) -> None:
        """Say what a namespace stands for; its first block has that written down.

        Raises: StoreUnavailable; ConfigError if its folder describes something else.
        """
        self._descriptions.check(digest, fields)

    def describe(self, digest: Digest, fields: Mapping[str, str]) -> None:
        """As `claim`, and written down now, for processes that were not told. Of more than
        MOST_UNUSED namespaces without blocks the oldest are forgotten.

        Raises: StoreFull; StoreUnavailable; ConfigError.
        """
        if self._descriptions.check(digest, fields):
            return
        own_bytes = self._descriptions.own_bytes(digest)
        with foreign_errors(self._root, self._pause), self._supervisor.open() as index:
            unused = len(index.unused())
            if unused >= MOST_UNUSED:
                at_most = unused - MOST_UNUSED + 1
                self._supervisor.remove_unused(index, unless_younger_s=0.0, at_most=at_most)
            self._make_room(
                index,
                lambda: index.reserve_namespace(digest, own_bytes, self._evictor.limit_bytes()),
            )
            self._descriptions.write(digest)

    def description(self, digest: Digest) -> dict[str, str]:
        """What a namespace stands for; empty if nobody said so. Raises: StoreUnavailable."""
        return self._descriptions.read(digest)

    def contains(
        self,
        digest: Digest,
        keys: Sequence[BlockKey],
        framed_bytes: int | None,
        stop: threading.Event,
    ) -> list[bool]:
        """Which keys are booked; while there are no books, which have a file of the right size
        (None: of any).

        Raises: StoreUnavailable; Stopped.
        """
        with contextlib.suppress(StoreUnavailable), self._supervisor.open(wait=False) as index:
            return index.contains(digest, keys)
        found = []
        for key in keys:
            check_stop(stop)
            with foreign_errors(self._root):
                size = self._files.size_bytes(digest, key)
            found.append(size is not None and framed_bytes in (None, size))
        return found

    def touched(self, digest: Digest, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """As `AccessListener.touched`. Waits for nothing: it is written down in the background."""
        if facts.benefit is not None:
            self._evictor.set_benefit(facts.benefit)
        self._supervisor.was_touched(digest, self._touches.told(keys, facts, time.time()))

    def has_file(self, digest: Digest, key: BlockKey) -> bool:
        """Whether something has the block's name; the books are not asked. Blocks on the disk for a
        moment, if at all."""
        return self._files.is_there(digest, key)

    @contextlib.contextmanager
    def reading(self, digest: Digest, key: BlockKey, *, counts: bool = True) -> Iterator[int]:
        """The block's file, open for reading; it is not evicted meanwhile.

        A BlockCorrupt that the caller raises inside has the file set aside.

        Args: counts: as a use of the block, for eviction.
        Raises: BlockMissing, BlockCorrupt (no file at all, or a link), StoreUnavailable.
        """
        with foreign_errors(self._root):
            try:
                fd = self._files.open_to_read(digest, key, counts=counts)
            except BlockMissing:
                self._forget(digest, key)
                raise
            try:
                bad = os.fstat(fd)
                if not stat.S_ISREG(bad.st_mode):
                    raise BlockCorrupt("not a file, or a link")
                if not lock(fd, fcntl.LOCK_SH):
                    raise BlockMissing(f"{key.hex()} is being evicted")
                yield fd
                if counts and not self._touches.foretold(key, time.time()):
                    self._supervisor.was_read(digest, key, counts=not self._touches.listening)
            except BlockCorrupt as error:
                path = NamespaceFolder(self._root, digest).block(key)
                corrupt = BlockCorrupt(f"{path}: {error}")
                self._set_aside(digest, key, bad, corrupt)
                raise corrupt from None
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def writing(self, digest: Digest, key: BlockKey, framed_bytes: int) -> Iterator[NewFile | None]:
        """A file for `framed_bytes` bytes, to be appended to and committed; without a commit it
        leaves nothing. None if the block is there already, being written, or not worth it. The
        namespace must have been claimed. Other blocks may have to make room for it.

        Raises: StoreFull, StoreUnavailable.
        """
        self._pause.check()
        stored_bytes = -(-framed_bytes // self._allocated_bytes) * self._allocated_bytes
        now_s = time.time()
        told = self._touches.use_of(key, now_s)
        usage = Usage(stored_bytes, now_s, told.at_s, 0, ident_of(key), told.context)
        with foreign_errors(self._root, self._pause):
            booking = None
            if self._evictor.admits(usage):
                booking = self._book(digest, key, usage)
            if booking is None:
                yield None
                return
            file: NewFile | None = None
            try:
                file = self._files.new(digest, key)
                yield file
                if file.committed:
                    self._settle(booking, usage, file)
            finally:
                if file is not None:
                    file.discard()
                if file is None or not file.committed:
                    self._unbook(booking)

    def delete(self, digest: Digest, key: BlockKey) -> None:
        """Forget one block. Raises: StoreUnavailable."""
        with foreign_errors(self._root):
            self._files.remove(digest, key)
        self._forget(digest, key)

    def list_blocks(self, digest: Digest) -> Iterator[BlockInfo]:
        """The blocks of one namespace. Raises: StoreUnavailable."""
        after = 0
        while True:
            with self._supervisor.open() as index:
                batch = index.stored_in(digest, after, LIST_AT_ONCE)
            if not batch:
                return
            for booked in batch:
                yield BlockInfo(booked.key, booked.usage.stored_bytes, booked.usage.used_s)
            after = batch[-1].id

    def namespaces(self) -> list[StoredNamespace]:
        """Every namespace that has a folder. Raises: StoreUnavailable."""
        found = []
        with foreign_errors(self._root):
            for digest in namespaces_in(self._root):
                fields: dict[str, str] = {}
                with contextlib.suppress(StoreUnavailable):  # it may not be entered
                    fields = self._descriptions.read(digest)
                found.append(StoredNamespace(digest, fields))
        return found

    def used_bytes(self, digest: Digest) -> int:
        """What one namespace takes on the disk. Raises: StoreUnavailable."""
        with self._supervisor.open() as index:
            return index.taken_bytes(digest)

    def stats(self) -> StoreStats:
        """How full it is. Raises: StoreUnavailable."""
        with self._supervisor.open() as index:
            (_, taken_bytes), (blocks, block_bytes) = index.totals(), index.stored_totals()
        return StoreStats(
            blocks=blocks,
            block_bytes=block_bytes,
            used_bytes=taken_bytes + overhead_bytes(self._root),
            capacity_bytes=self._evictor.capacity_bytes,
            policy=self._evictor.policy_name,
            evictions=self.evictions(),
        )

    def evictions(self) -> EvictionCounts:
        """What making room took since this folder was opened."""
        return EvictionCounts(**self._evictor.counts)

    def evict(self, bytes_wanted: int) -> int:
        """Evict blocks of so many bytes, those first that would go first anyway; returns how many
        bytes they were. Raises: StoreUnavailable."""
        with foreign_errors(self._root), self._supervisor.open() as index:
            self._supervisor.flush(index)
            return self._evictor.make(index, Amount(bytes_wanted)).bytes

    def remove_namespace(self, digest: Digest) -> None:
        """Remove a namespace that has no blocks. Raises: StoreUnavailable."""
        with foreign_errors(self._root), self._supervisor.open() as index:
            self._supervisor.remove_namespace(index, digest, unless_younger_s=0.0)

    def remove_stale(self) -> int:
        """Remove what killed writers left behind, empty folders, and namespaces without blocks;
        returns how many files. Raises: StoreUnavailable."""
        removed = 0
        with foreign_errors(self._root):
            for digest in namespaces_in(self._root):
                for names in ((digest.hex(),), *shards_of(self._root, digest)):
                    removed += remove_stale(self._root, *names)[0]
                    folder_tree.remove_empty(self._root, *names)
            with self._supervisor.open() as index:
                self._supervisor.remove_unused(index, unless_younger_s=0.0)
        return removed

    def remove_set_aside(self) -> int:
        """Remove the corrupt files that were kept; returns how many. Raises: StoreUnavailable."""
        with foreign_errors(self._root), self._supervisor.open() as index:
            return self._evictor.remove_aside(index).files

    def close(self) -> None:
        """Stop what runs in the background. Blocks until it has."""
        self._supervisor.close()

    # ---- booking ----

    def _book(self, digest: Digest, key: BlockKey, usage: Usage) -> Booking | None:
        """Book room for a block, evicting others if need be; None if it is there.

        Raises: StoreFull; StoreUnavailable; OSError.
        """
        own_bytes, found = self._descriptions.own_bytes(digest), Reserved()

        def reserve() -> int:
            nonlocal found
            limit_bytes = self._evictor.limit_bytes()
            found = index.reserve(digest, own_bytes, key, usage, limit_bytes)
            return found.short_bytes

        with self._supervisor.open() as index:
            self._make_room(index, reserve)
            if found.booking is None and self._forget_in(index, digest, key):  # removed by others
                self._make_room(index, reserve)
            if found.booking is None:
                return None
            try:
                self._take_space(index, usage.stored_bytes)
            except BaseException:
                index.drop(found.booking)
                raise
        self._supervisor.wake()
        return found.booking

    def _make_room(self, index: BlockIndex, reserve: Callable[[], int]) -> None:
        """Args: reserve: returns how many bytes are short. Raises: StoreFull; OSError."""
        while short_bytes := reserve():
            self._supervisor.flush(index)
            if not self._evictor.make(index, Amount(short_bytes)):
                raise StoreFull(f"{self._root}: capacity={self._evictor.capacity_bytes} is taken")

    def _take_space(self, index: BlockIndex, stored_bytes: int) -> None:
        """Leave `min_free` bytes of the file system. Raises: StoreFull; OSError."""
        space = self._evictor.space
        missing = space.take(stored_bytes)
        if missing:
            self._supervisor.flush(index)
            self._evictor.make(index, missing)
            if space.take(stored_bytes):
                raise StoreFull(
                    f"{self._root}: {stored_bytes} more bytes would leave less than "
                    f"min_free={space.min_free_bytes} bytes free, or that share of the inodes"
                )

    def _settle(self, booking: Booking, usage: Usage, file: NewFile) -> None:
        """A file that is not in the books must not stay. Raises: StoreUnavailable; OSError."""
        self._pause.succeeded()
        stored = None
        try:
            with self._supervisor.open() as index:
                stored = index.settle(booking, usage.stored_bytes)
            if stored is None:
                raise StoreUnavailable(f"{self._root}: the index was made anew meanwhile")
        finally:
            if stored is None:
                file.withdraw()
        self._evictor.stored(stored, usage)

    def _unbook(self, booking: Booking) -> None:
        self._files.remove_folders(booking.namespace, booking.key)
        # If that fails, the booking is taken away when this process has ended.
        with contextlib.suppress(StoreError), self._supervisor.open() as index:
            index.drop(booking)

    def _forget(self, digest: Digest, key: BlockKey) -> None:
        with contextlib.suppress(StoreError), self._supervisor.open() as index:
            self._forget_in(index, digest, key)

    def _forget_in(self, index: BlockIndex, digest: Digest, key: BlockKey) -> bool:
        """Take the booking of a block away if its file is gone; whether that was done."""
        return index.forget(digest, key, lambda: self._files.is_gone(digest, key))

    def _set_aside(
        self, digest: Digest, key: BlockKey, bad: os.stat_result, error: BlockCorrupt
    ) -> None:
        # Read-only, or another reader was first: the block stays bad, and is never used.
        with contextlib.suppress(OSError):
            kept = self._files.set_aside(digest, key, bad)
            if kept is None:
                return
            self._tell_corrupt(error, "set aside" if kept else "removed")
            with contextlib.suppress(StoreError), self._supervisor.open() as index:
                if kept:
                    index.set_aside(digest, key)
                else:
                    self._forget_in(index, digest, key)

    def _tell_corrupt(self, error: BlockCorrupt, done: str) -> None:
        with self._telling:
            self.corrupt_blocks += 1
            now_s = time.monotonic()
            if now_s - self._told_s < TELL_EVERY_S:
                return
            self._told_s = now_s
            count = self.corrupt_blocks
        logger.warning("a corrupt block was %s, %d so far: %s", done, count, error)
