"""The blocks of all namespaces below one root. Blocking and thread-safe, for threads of a pool."""

import contextlib
import fcntl
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from sglang_cake.core.backoff import Backoff
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.core.threads import check_stop
from sglang_cake.stores.base import (
    BlockInfo,
    EvictionCounts,
    RequestFacts,
    StoredNamespace,
    StoreStats,
)
from sglang_cake.stores.eviction.policy import Usage, ident_of
from sglang_cake.stores.file import block_files, nofollow
from sglang_cake.stores.file.block_files import CORRUPT, FolderSettings, NewFile, block_names
from sglang_cake.stores.file.disk import (
    DAMAGE_ERRORS,
    Amount,
    on_disk_bytes,
    os_errors,
)
from sglang_cake.stores.file.evictor import Evictor
from sglang_cake.stores.file.index import BlockIndex, IndexedBlock, ScannedFile
from sglang_cake.stores.file.index_supervisor import IndexSupervisor
from sglang_cake.stores.file.namespace_descriptions import (
    NamespaceDescriptions,
    described_namespaces_in,
)
from sglang_cake.stores.file.scan import block_folders_in, namespaces_in, remove_stale
from sglang_cake.stores.reported_accesses import ReportedAccesses

logger = logging.getLogger(__name__)
LOG_EVERY_S = 10.0  # between two lines about corrupt blocks, since a failing disk has many
LIST_AT_ONCE = 1000  # blocks in one query of a listing
# Time in which a put makes room; with a much smaller capacity that would take minutes. HTTP clients
# wait for a put for two seconds or more.
MAKE_ROOM_S = 1.0
MOST_UNUSED = 64  # namespaces that are described and have no blocks
MAX_SET_ASIDE = 16  # corrupt files that are kept for inspection, in each namespace
MOST_UNREADABLE = 1024  # blocks of which an I/O error is remembered; of more, none is
# Time after which a further I/O error of a block shows that it is damaged. A disk that fails for a
# shorter time loses no block.
UNREADABLE_S = 60.0


class BlockFolder:
    """A file store with all its namespaces.

    Any number of processes of one machine may have the same folder open. They share its index
    (index.py), so that the folder never holds more than its capacity.

    Attributes:
        descriptions: of the namespaces. One that `check` takes is written with the first block.
        corrupt_blocks: corrupt blocks that were set aside or removed since the folder was opened.
    """

    def __init__(
        self, settings: FolderSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open the folder, and make it if it is absent. Blocks on the disk for a moment.

        Args: clock: seconds, monotonic.
        Raises: StoreUnavailable.
        """
        self.settings = settings
        self._root = root = settings.path
        self._clock = clock
        self._writing_rests = Backoff()  # after the disk refused a write
        self._refusal: StoreError = StoreUnavailable()
        with os_errors(root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.descriptions = NamespaceDescriptions(root)
        self._accesses = ReportedAccesses()
        # Of clients that may only read. Apart, so that they change neither the context of a block
        # nor the turns and ids of other requests.
        self._reader_accesses = ReportedAccesses()
        self._counting = threading.Lock()
        self._evicting = threading.Lock()  # two threads would free the same missing space twice
        self._logged_s = -math.inf  # time of the last line about a corrupt block
        self._unreadable: dict[tuple[Digest, BlockKey], float] = {}  # times of first I/O errors
        self._read_s = -math.inf  # time of the last read without an error
        self.corrupt_blocks = 0
        self.evictor = Evictor(settings, self._accesses.restore, clock)
        self.supervisor = IndexSupervisor(settings, self.evictor, self.descriptions)

    def write_description(self, digest: Digest, fields: Mapping[str, str]) -> None:
        """Write the description of a namespace now, for other processes, and not with its first
        block.

        Of more than MOST_UNUSED namespaces without blocks the oldest are removed.
        Raises: StoreFull; StoreUnavailable; ConfigError.
        """
        if self.descriptions.check(digest, fields):
            return
        with os_errors(self._root, self._write_failed), self.supervisor.open() as index:
            own_bytes = self.descriptions.own_bytes(digest)
            self.descriptions.remove_unused(index, keep=MOST_UNUSED - 1)
            self._evict_until(
                index,
                lambda: index.reserve_namespace(digest, own_bytes, self.evictor.limit_bytes()),
                f"capacity={self.settings.capacity_bytes} is taken",
            )
            self.descriptions.write(digest)

    def contains(
        self,
        digest: Digest,
        keys: Sequence[BlockKey],
        framed_bytes: int | None,
        stop: threading.Event,
    ) -> list[bool]:
        """Which keys are stored, by the index, or by the files while there is no index.

        Args:
            framed_bytes: size of the files; None: any size.

        Raises: StoreUnavailable; Stopped.
        """
        with contextlib.suppress(StoreUnavailable), self.supervisor.open(wait=False) as index:
            return index.contains(digest, keys)
        found = []
        for key in keys:
            check_stop(stop)
            with os_errors(self._root):
                size = nofollow.file_bytes(self._root, *block_names(digest, key))
            found.append(size is not None and framed_bytes in (None, size))
        return found

    def on_access(
        self,
        digest: Digest,
        keys: Sequence[BlockKey],
        facts: RequestFacts,
        *,
        may_write: bool = True,
    ) -> None:
        """As `Store.on_access`. The index is updated in the background.

        Args:
            may_write: of the client. The report of one that may only read counts as use of the
                blocks alone: with a tenant above its quota it would delete them.
        """
        reported = self._accesses if may_write else self._reader_accesses
        accesses = reported.report(digest, keys, facts, time.time())
        if may_write and facts.benefit is not None:
            self.evictor.set_benefit(facts.benefit)
        self.supervisor.was_touched(digest, accesses, with_context=may_write)

    @contextlib.contextmanager
    def reading(
        self, digest: Digest, key: BlockKey, *, counts: bool = True
    ) -> Iterator[tuple[int, int]]:
        """A context with the descriptor of the block's file, which is not evicted meanwhile, and
        the size of the file in bytes.

        If the caller raises BlockCorrupt inside, the file is set aside. So it is after an I/O error
        (DAMAGE_ERRORS), if the block had one UNREADABLE_S before, and other blocks were read since.

        Args:
            counts: the read is an access, for eviction, unless those of this process never are.

        Raises: BlockMissing; BlockCorrupt, also for anything that is no file; StoreUnavailable.
        """
        counts = counts and self.settings.reads_count
        with os_errors(self._root):
            try:
                fd = block_files.open_to_read(self._root, block_names(digest, key), counts=counts)
            except FileNotFoundError:
                self._forget(digest, key)
                raise BlockMissing(key.hex()) from None
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise BlockCorrupt("not a file, or a link")
                if not nofollow.lock(fd, fcntl.LOCK_SH):
                    raise BlockMissing(f"{key.hex()} is being evicted")
                try:
                    yield fd, status.st_size
                except OSError as error:
                    if error.errno in DAMAGE_ERRORS and self._stays_unreadable((digest, key)):
                        raise BlockCorrupt(f"again: {error.strerror}") from None
                    raise
                with self._counting:
                    self._unreadable.pop((digest, key), None)
                    self._read_s = self._clock()
                now_s = time.time()
                reported = (self._accesses, self._reader_accesses)
                if counts and not any(each.is_announced(digest, key, now_s) for each in reported):
                    has_reports = any(each.has_reports for each in reported)
                    self.supervisor.was_read(digest, key, counts=not has_reports)
            except BlockCorrupt as error:
                path = self._root.joinpath(*block_names(digest, key))
                corrupt = BlockCorrupt(f"{path}: {error}")
                self._set_aside(digest, key, status, corrupt)
                raise corrupt from None
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def writing(self, digest: Digest, key: BlockKey, framed_bytes: int) -> Iterator[NewFile | None]:
        """A context with a new file for a block, to be appended to and committed.

        Without a commit, the file is removed. None if the block is stored already, being written,
        or rejected by admission. Other blocks may be evicted. Call `descriptions.check` before.

        Args:
            framed_bytes: size of the file.

        Raises: StoreFull, StoreUnavailable.
        """
        if left_s := self._writing_rests.left_s(self._clock()):
            refusal = f"writing rests for {left_s:.0f} s after {self._refusal}"
            raise type(self._refusal)(refusal)
        now_s = time.time()
        access = self._accesses.access_for_put(digest, key, now_s)
        with os_errors(self._root, self._write_failed):
            stored_bytes = on_disk_bytes(self._root, framed_bytes)
            usage = Usage(stored_bytes, now_s, access.at_s, 0, ident_of(key), access.context)
            row = None
            if self.evictor.admits(usage, access.benefit):
                row = self._reserve(digest, key, usage)
            if row is None:
                yield None
                return
            file: NewFile | None = None
            try:
                file = self._new_file(digest, key)
                yield file
                if file.committed:
                    self._commit(row, file)
            finally:
                if file is not None:
                    file.discard()
                if file is None or not file.committed:
                    self._release(row)

    def disk_errors(self) -> AbstractContextManager[None]:
        """A context for writes to a file of `writing`, if their errors do not reach that: it turns
        them into StoreFull or StoreUnavailable, and writing pauses."""
        return os_errors(self._root, self._write_failed)

    def delete(self, digest: Digest, key: BlockKey) -> None:
        """Remove one block. Raises: StoreUnavailable."""
        with os_errors(self._root):
            nofollow.remove_file(self._root, *block_names(digest, key))
        self._forget(digest, key)

    def list_blocks(self, digest: Digest) -> Iterator[BlockInfo]:
        """The blocks of one namespace, by key. Raises: StoreUnavailable."""
        after = b""
        while True:
            with self.supervisor.open() as index:
                batch = index.stored_in(digest, after, LIST_AT_ONCE)
            if not batch:
                return
            for block in batch:
                yield BlockInfo(block.key, block.usage.stored_bytes, block.usage.used_s)
            after = batch[-1].key

    def namespaces(self) -> list[StoredNamespace]:
        """Every namespace that has a folder. Raises: StoreUnavailable."""
        with os_errors(self._root):
            os.stat(self._root)
            return described_namespaces_in(self._root)

    def used_bytes(self, digest: Digest) -> int:
        """Bytes of one namespace on the disk. Raises: StoreUnavailable."""
        with self.supervisor.open() as index:
            return index.taken_bytes(digest)

    def stats(self) -> StoreStats:
        """How full it is. Without an index the totals are unknown."""
        found = StoreStats()
        with contextlib.suppress(StoreUnavailable), self.supervisor.open() as index:
            found = index.stats()
        unused_bytes = None
        with contextlib.suppress(OSError):  # of a disk in trouble; its reads and writes say so
            unused_bytes = self.evictor.unused_bytes(found.used_bytes)
        return replace(
            found,
            unused_bytes=unused_bytes,
            capacity_bytes=self.settings.capacity_bytes,
            policy=self.settings.policy,
            evictions=self.evictions(),
        )

    def evictions(self) -> EvictionCounts:
        return EvictionCounts(**self.evictor.counts)

    def remove_namespace(self, digest: Digest) -> None:
        """Remove a namespace that has no blocks. Raises: StoreUnavailable."""
        with os_errors(self._root), self.supervisor.open() as index:
            self.descriptions.remove(index, digest)

    def clear_namespace(self, digest: Digest, *, even_if_foreign: bool = False) -> int:
        """Remove the blocks of a namespace, its corrupt files that were set aside, and the
        namespace. Files of other programs stay, and so does the namespace that has some.

        Args:
            even_if_foreign: as for `NamespaceDescriptions.remove`.

        Returns the number of blocks. Raises: StoreUnavailable.
        """
        removed = 0
        for block in self.list_blocks(digest):
            self.delete(digest, block.key)
            removed += 1
        with os_errors(self._root), self.supervisor.open() as index:
            self.evictor.remove_aside(index, only=digest)
            self.descriptions.remove(index, digest, even_if_foreign=even_if_foreign)
        return removed

    def remove_stale(self) -> int:
        """Remove files of killed writers, empty folders, and namespaces without blocks.

        Returns the number of files. Raises: StoreUnavailable.
        """
        removed = 0
        with os_errors(self._root):
            for digest in namespaces_in(self._root):
                removed += remove_stale(self._root, digest.hex())[0]
                for folder_names in block_folders_in(self._root, digest, remove_empty=True):
                    removed += remove_stale(self._root, *folder_names)[0]
            with self.supervisor.open() as index:
                self.descriptions.remove_unused(index)
        return removed

    def remove_set_aside(self) -> int:
        """Remove the corrupt files; returns their number. Raises: StoreUnavailable."""
        with os_errors(self._root), self.supervisor.open() as index:
            return self.evictor.remove_aside(index).files

    def close(self) -> None:
        """Stop the background thread. Blocks until it has ended."""
        self.supervisor.close()

    # ---- space and index ----

    def _write_failed(self, failure: StoreError) -> None:
        now_s = self._clock()
        if not self._writing_rests.left_s(now_s):  # writes that began before extend no pause
            self._writing_rests.start(now_s)
            self._refusal = failure
        if isinstance(failure, StoreFull):
            self.evictor.space.refused()

    def _reserve(self, digest: Digest, key: BlockKey, usage: Usage) -> IndexedBlock | None:
        """Reserve space for a block, and evict others if needed; None if the block is there.

        Raises: StoreFull; StoreUnavailable; OSError.
        """
        own_bytes = self.descriptions.own_bytes(digest)
        space = self.evictor.space
        taken = f"capacity={self.settings.capacity_bytes} is taken"
        row: IndexedBlock | None = None

        def missing_in_index() -> Amount:
            nonlocal row
            limit_bytes = self.evictor.limit_bytes()
            row, missing = index.reserve(digest, own_bytes, key, usage, limit_bytes)
            return missing

        with self.supervisor.open() as index:
            self._evict_until(index, missing_in_index, taken)
            if row is None and self._forget_in(index, digest, key):
                # Another program had removed the file.
                self._evict_until(index, missing_in_index, taken)
            if row is None:
                return None
            try:
                self._evict_until(
                    index,
                    lambda: space.take(usage.stored_bytes),
                    f"{usage.stored_bytes} more bytes would leave less than min_free="
                    f"{self.settings.min_free_bytes} bytes free, or that share of the inodes",
                )
            except BaseException:
                index.drop(row)
                raise
        self.supervisor.wake()
        return row

    def _evict_until(self, index: BlockIndex, missing: Callable[[], Amount], full: str) -> None:
        """Evict until `missing` returns nothing.

        Raises: StoreFull with the text `full` if nothing more can be evicted, and after
        MAKE_ROOM_S: later puts and the background thread go on; OSError.
        """
        if not missing():
            return
        until_s = self._clock() + MAKE_ROOM_S
        with self._evicting:
            has_more = True
            while wanted := missing():
                if not has_more:
                    raise StoreFull(f"{self._root}: {full}")
                if self._clock() >= until_s:
                    raise StoreFull(f"{self._root}: more must be evicted than a put waits for")
                self.supervisor.flush(index)
                has_more = bool(self.evictor.free(index, wanted))

    def _commit(self, row: IndexedBlock, file: NewFile) -> None:
        """Mark the block as stored, or remove its file. Raises: StoreUnavailable; OSError."""
        self._writing_rests.reset()
        stored = None
        try:
            with self.supervisor.open() as index:
                stored = index.commit(row)
            if stored is None:
                raise StoreUnavailable(f"{self._root}: the index was replaced meanwhile")
        finally:
            if stored is None:
                file.withdraw()
        self.evictor.stored(stored, row.usage)

    def _release(self, row: IndexedBlock) -> None:
        self._remove_folders(row.namespace, row.key)
        # If that fails, the row is removed after the end of this process.
        with contextlib.suppress(StoreError), self.supervisor.open() as index:
            index.drop(row)

    def _forget(self, digest: Digest, key: BlockKey) -> None:
        with contextlib.suppress(StoreError), self.supervisor.open() as index:
            self._forget_in(index, digest, key)

    def _forget_in(self, index: BlockIndex, digest: Digest, key: BlockKey) -> bool:
        """As `BlockIndex.forget`."""
        return index.forget(digest, key, lambda: self._is_gone(digest, key))

    def _stays_unreadable(self, block: tuple[Digest, BlockKey]) -> bool:
        """Record an I/O error of a block; whether the block is at fault, and not the whole disk."""
        now_s = self._clock()
        with self._counting:
            if len(self._unreadable) == MOST_UNREADABLE and block not in self._unreadable:
                self._unreadable.clear()
            first_s = self._unreadable.setdefault(block, now_s)
            is_at_fault = first_s < self._read_s and now_s - first_s >= UNREADABLE_S
            if is_at_fault:
                del self._unreadable[block]
            return is_at_fault

    def _set_aside(
        self, digest: Digest, key: BlockKey, bad: os.stat_result, error: BlockCorrupt
    ) -> None:
        """Move a corrupt file to the folder `corrupt`, or remove it if that folder is full, or has
        one of the same block, or if no index can count it.

        Args: bad: status of the corrupt file. Another file in its place stays.
        """
        *folder_names, name = block_names(digest, key)

        def is_there() -> bool:
            there = nofollow.status_of(self._root, *folder_names, name)
            return there is not None and os.path.samestat(there, bad)

        def move() -> bool:
            nofollow.make_folder(self._root, folder_names[0], CORRUPT)
            with (
                nofollow.opened(self._root, *folder_names) as folder,
                nofollow.opened(self._root, folder_names[0], CORRUPT) as aside,
            ):
                asides = os.listdir(aside)
                if name in asides or len(asides) >= MAX_SET_ASIDE or not is_there():
                    return False
                os.replace(name, name, src_dir_fd=folder, dst_dir_fd=aside)
            return True

        # On a read-only disk the corrupt file stays, and every read of it fails.
        with contextlib.suppress(OSError):
            # A damaged inode may have any size.
            taken_bytes = on_disk_bytes(self._root, bad.st_blocks * 512)
            file = ScannedFile(None, taken_bytes, bad.st_mtime, bad.st_mtime)
            own_bytes = self.descriptions.own_bytes(digest)
            kept = False
            # Without an index nothing is kept: no process would count or remove the file.
            with contextlib.suppress(StoreError), self.supervisor.open() as index:
                kept = index.move_aside(index.reserve_aside(digest, own_bytes, file), move)
            if not kept:
                if not is_there():
                    return
                nofollow.remove_file(self._root, *folder_names, name)
            self._remove_folders(digest, key)
            self._log_corrupt(error, "set aside" if kept else "removed")
            self._forget(digest, key)

    def _log_corrupt(self, error: BlockCorrupt, done: str) -> None:
        with self._counting:
            self.corrupt_blocks += 1
            now_s = time.monotonic()
            if now_s - self._logged_s < LOG_EVERY_S:
                return
            self._logged_s = now_s
            count = self.corrupt_blocks
        logger.warning("a corrupt block was %s, %d so far: %s", done, count, error)

    # ---- files and folders of blocks; no link is followed ----

    def _new_file(self, digest: Digest, key: BlockKey) -> NewFile:
        """A new file for the block. Missing folders are made.

        Raises: OSError; StoreUnavailable if the description of the namespace is unknown.
        """
        *folder_names, name = block_names(digest, key)

        def create() -> NewFile:
            folder = nofollow.open_folder(self._root, *folder_names)
            sync = self.settings.fsync == "data"
            return NewFile(folder, name, sync=sync, direct=self.settings.direct_writes)

        def make_folders() -> None:
            self.descriptions.write(digest)
            for depth in range(2, len(folder_names) + 1):
                nofollow.make_folder(self._root, *folder_names[:depth])

        return nofollow.in_folders(self._root, create, make_folders)

    def _remove_folders(self, digest: Digest, key: BlockKey) -> None:
        nofollow.remove_empty(self._root, *block_names(digest, key)[:-1])

    def _is_gone(self, digest: Digest, key: BlockKey) -> bool:
        """Whether the block has no file; its empty folders are removed then. Raises: OSError."""
        if nofollow.status_of(self._root, *block_names(digest, key)) is not None:
            return False
        self._remove_folders(digest, key)
        return True
