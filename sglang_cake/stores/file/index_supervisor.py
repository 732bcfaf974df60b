"""The background thread of a file store: it opens, builds and repairs the index, records accesses,
elects the process that leads eviction, and evicts ahead of the need."""

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_cake.core.backoff import Backoff
from sglang_cake.core.errors import StoreFull, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.file import nofollow
from sglang_cake.stores.file.block_files import (
    EVICTION_LOCK,
    INDEX,
    INDEX_LOCK,
    FolderSettings,
    block_names,
    this_boot,
)
from sglang_cake.stores.file.disk import DAMAGE_ERRORS, free_bytes
from sglang_cake.stores.file.evictor import REST_S, Evictor
from sglang_cake.stores.file.index import (
    WAL_BYTES,
    BlockIndex,
    DamagedIndexError,
    IndexedBlock,
    Touch,
    put_aside,
)
from sglang_cake.stores.file.namespace_descriptions import NamespaceDescriptions
from sglang_cake.stores.file.nofollow import LeavesOut, is_lasting, lock, open_private
from sglang_cake.stores.file.scan import (
    is_stale,
    listed_blocks_in,
    namespaces_in,
    remove_stale,
    scanned_files_in,
)
from sglang_cake.stores.reported_accesses import CLOCK_BACK_S, Access

logger = logging.getLogger(__name__)
TICK_S = 1.0
# Errors of files and folders that are there: what a rebuilding leaves out for them is in the log.
_UNREADABLE = DAMAGE_ERRORS | {errno.EACCES, errno.EPERM}
OPEN_WAIT_S = 5.0  # limit for waiting for an index that is being opened
RECLAIM_EVERY_S = 60.0
ROOM_BYTES = 2 * WAL_BYTES  # free space with which an index can be opened and changed
CLOSE_S = 10.0  # limit for waiting at the end for a disk that does not answer
KEEP_ASIDE_S = 86_400.0  # corrupt files of a namespace are kept so long after the last one
# Delays after which an access is written to the index. For blocks that were not stored, a report is
# applied again: another process may have put them since.
TRIES_S = (0.0, 10.0, 60.0)
MOST_WAITING = (65_536, 16_384, 16_384)  # blocks that wait for each; older ones are dropped
REPORTED_AT_ONCE = 4096  # blocks that are tried again in one tick
# Accesses in one transaction. Puts of all processes wait for it, some tens of milliseconds in an
# index of a million blocks.
RECORDED_AT_ONCE = 500
# SQLITE_ERROR is an error in a query, for which intact tables give no reason.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_PRIMARY = 0xFF  # of a code that tells more, such as SQLITE_CORRUPT_INDEX


class IndexSupervisor:
    """Keeps the index of one store open, in one process.

    Without an index, blocks can be looked up and read by their files, and none can be written.

    Attributes:
        unreadable_files: files and folders that rebuildings in this process left out.
    """

    def __init__(
        self, settings: FolderSettings, evictor: Evictor, descriptions: NamespaceDescriptions
    ) -> None:
        """Start the background thread."""
        self._root = root = settings.path
        self._path = root / INDEX
        self._evictor = evictor
        self._descriptions = descriptions
        self._may_lead = settings.reads_count
        self._was_mounted = _is_mounted(root)
        self._lead: int | None = None  # a descriptor: the process that locks it is the leader
        self._index: BlockIndex | None = None
        self._opened = threading.Event()
        self._tried = threading.Event()  # the index was opened, or that has failed
        self._closing = threading.Event()
        self._wake = threading.Event()
        # Accesses with their time (`time.monotonic`), for each of TRIES_S.
        self._waiting = [deque[tuple[float, Touch]](maxlen=most) for most in MOST_WAITING]
        self._flushing = threading.Lock()  # taken before the locks of the index and the evictor
        self._wait_until_s = time.monotonic() + OPEN_WAIT_S
        self._reclaim_at_s = time.monotonic() + RECLAIM_EVERY_S
        self._complained = ""
        self._damaged: os.stat_result | None = None  # the file in which damage was found during use
        self._has_checked_sums = False
        self.unreadable_files = 0
        self._rebuilding = Backoff()  # since each rebuild reads the whole folder
        self._thread = threading.Thread(target=self._run, name="cake-file-index", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def open(self, *, wait: bool = True) -> Iterator[BlockIndex]:
        """A context with the index.

        Args:
            wait: wait while the index is opened for the first time, up to OPEN_WAIT_S in all.

        Raises: StoreUnavailable if there is no index, or if it fails inside; StoreFull.
        """
        if wait and self._index is None:
            self._opened.wait(max(0.0, self._wait_until_s - time.monotonic()))
        index = self._index
        if index is None or not self._is_there(index.file):
            self._drop_index(index)
            being_opened = f"{self._root}: the index is being opened or rebuilt"
            raise StoreUnavailable(self._complained or being_opened)
        try:
            yield index
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise StoreFull(f"{self._root}: index: {error}") from error
            if code != sqlite3.SQLITE_BUSY:
                self._note_damage(error, index)
                self._drop_index(index)
            raise StoreUnavailable(f"{self._root}: index: {error}") from error

    def wait(self) -> None:
        """Blocks until the index is open or cannot be opened, however long that takes.

        For tools: what their process has rebuilt is lost if it ends before.
        """
        if not self._tried.wait(max(0.0, self._wait_until_s - time.monotonic())):
            logger.warning("store %s: waiting while its index is being rebuilt", self._root)
            self._tried.wait()

    def was_read(self, digest: Digest, key: BlockKey, *, counts: bool) -> None:
        """Record a read. It is in the index within about TICK_S. Args: counts: it is an access."""
        self._waiting[0].append((time.monotonic(), Touch(digest, key, time.time(), int(counts))))

    def was_touched(
        self, digest: Digest, accesses: Sequence[Access], *, with_context: bool
    ) -> None:
        """As `was_read`, for a request. Args: with_context: the blocks get its context."""
        now_s = time.monotonic()
        self._waiting[0].extend(
            (now_s, Touch(digest, a.key, a.at_s, 1, a.context if with_context else None))
            for a in accesses
        )

    @property
    def pending(self) -> tuple[Touch, ...]:
        """Accesses that are not in the index yet."""
        return tuple(touch for _, touch in self._waiting[0])

    def wake(self) -> None:
        """Space was taken: the background thread may have to free some."""
        self._wake.set()

    def flush(self, index: BlockIndex, *, again: bool = False) -> None:
        """Write pending accesses to the index, after a flush in another thread: so the next
        eviction knows every access.

        Args: again: also due reports of blocks that were not stored before.
        """
        with self._flushing:
            now_s = time.monotonic()
            for tries in reversed(range(len(TRIES_S) if again else 1)):
                waiting = self._waiting[tries]
                at_most = REPORTED_AT_ONCE if tries else len(waiting)
                due: list[tuple[float, Touch]] = []
                while waiting and len(due) < at_most and waiting[0][0] <= now_s - TRIES_S[tries]:
                    due.append(waiting.popleft())
                self._record(index, due, tries)

    def _record(self, index: BlockIndex, reads: list[tuple[float, Touch]], tries: int) -> None:
        """Write accesses to the index and the policy. Reports of blocks that are not stored wait
        for the next try, if there is one. Args: tries: how often they were tried before."""
        for start in range(0, len(reads), RECORDED_AT_ONCE):
            if start:
                self._closing.wait(REST_S)  # SQLite wakes no process that waits
            some = reads[start : start + RECORDED_AT_ONCE]
            now_s = time.time()
            found = index.touch(
                [  # the clock may have been set back since
                    read if read.at_s <= now_s + CLOCK_BACK_S else read._replace(at_s=now_s)
                    for _, read in some
                ]
            )
            self._evictor.touched([touched for touched in found if touched is not None])
            if tries + 1 < len(TRIES_S):
                self._waiting[tries + 1].extend(
                    first
                    for first, touched in zip(some, found, strict=True)
                    if touched is None and first[1].context is not None
                )

    def close(self) -> None:
        """Blocks until the thread has ended, or for CLOSE_S."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _release_lead(self) -> None:
        if self._lead is not None:
            os.close(self._lead)
            self._lead = None

    def _is_there(self, file: os.stat_result) -> bool:
        """Whether the index is this file: another process may have replaced a damaged one."""
        try:
            return os.path.samestat(os.stat(self._path), file)
        except OSError:
            return False

    def _note_damage(self, error: BaseException, index: BlockIndex) -> None:
        if _is_damage(error, self._path):
            self._damaged = index.file

    def _drop_index(self, index: BlockIndex | None) -> None:
        if index is not None and index is self._index:
            self._index = None
            index.close()
        self._wake.set()

    # ---- background thread ----

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._tick()
            except (sqlite3.Error, OSError, StoreUnavailable, StoreFull) as error:
                self._complain(error)
                # Also with pending calls: a broken disk needs a pause.
                self._closing.wait(max(TICK_S, self._rebuilding.left_s(time.monotonic())))
            except Exception:  # a bug; the thread must go on, or nothing could be written
                logger.exception("store %s: index", self._root)
                self._closing.wait(TICK_S)
            else:
                self._wake.wait(TICK_S)
                self._wake.clear()
        with (
            contextlib.suppress(sqlite3.Error, StoreUnavailable, StoreFull),
            self.open(wait=False) as index,
        ):
            self.flush(index)
        self._drop_index(self._index)
        self._release_lead()

    def _complain(self, error: Exception) -> None:
        """Log an error, unless it is the same as the last one."""
        if str(error) != self._complained:
            logger.warning("store %s: index: %s", self._root, error)
        self._complained = str(error)

    def _tick(self) -> None:
        if self._index is None:
            try:
                self._open()
            except (sqlite3.Error, OSError):
                self._make_room()
                raise
            finally:
                self._tried.set()
            self._complained = ""
        with self.open(wait=False) as index:
            with _unless_full():
                self.flush(index, again=True)
            if not self._evictor.leads and self._try_to_lead():
                self._evictor.restart(index, leads=True)
            if time.monotonic() >= self._reclaim_at_s:
                self._reclaim_at_s = time.monotonic() + RECLAIM_EVERY_S
                self.reclaim(index)
            if self._evictor.leads and not self._has_checked_sums:
                index.check_sums()
                self._has_checked_sums = True
            knows_all = self._evictor.learn(index, self._closing.wait)
            with _unless_full():
                self._evictor.refresh(index)
            if not knows_all:
                self._wake.set()  # to go on at once; no space is freed ahead until then
            elif self._evictor.leads:
                self._free_ahead(index)

    def _try_to_lead(self) -> bool:
        """Whether this process is the leader now, until it ends. So one process holds all blocks in
        memory, and no two free the same space ahead."""
        return self._lead is not None and lock(self._lead, fcntl.LOCK_EX)

    def _free_ahead(self, index: BlockIndex) -> None:
        # It may take minutes, or as long as others put faster than this evicts, and no block in use
        # is to be evicted.
        until_s = time.monotonic() + TICK_S
        while time.monotonic() < until_s:
            with _unless_full():
                self.flush(index)
            if self._closing.is_set() or not self._evictor.free_ahead(index):
                return
        self._wake.set()  # to go on after the rest of a tick

    def _open(self) -> None:
        """Raises: OSError; sqlite3.Error; StoreUnavailable if the disk or the folder is gone."""
        if self._was_mounted and not _is_mounted(self._root):
            raise StoreUnavailable(f"{self._root}: its disk was unmounted")
        if not self._root.exists():
            raise StoreUnavailable(f"{self._root}: the folder is gone: make it again")
        held = open_private(self._root / INDEX_LOCK)
        try:
            while not lock(held, fcntl.LOCK_EX):  # another process rebuilds the index
                if self._closing.wait(0.05):
                    return
            index = self._open_undamaged()
            try:
                if index.clean_boot_id() != this_boot():
                    self._rebuild(index)
                self.reclaim(index)
                # Opened again, since the root may have been removed and made again.
                self._release_lead()
                if self._may_lead:
                    self._lead = open_private(self._root / EVICTION_LOCK)
                self._evictor.restart(index, leads=self._try_to_lead())
            except BaseException as error:
                self._note_damage(error, index)
                index.close()
                raise
        finally:
            os.close(held)
        self._has_checked_sums = False
        self._rebuilding.reset()
        self._index = index
        self._opened.set()

    def _make_room(self) -> None:
        """Remove blocks from a disk that has no room even for the files of SQLite: without an
        index, nothing would be evicted. Which blocks those are cannot be chosen."""
        with contextlib.suppress(OSError):
            blocks = (
                block_names(digest, block.key)
                for digest in namespaces_in(self._root)
                for block in listed_blocks_in(self._root, digest)
            )
            while self._may_lead and not (self._closing.is_set() or _has_room(self._root)):
                if (block := next(blocks, None)) is None:
                    return
                nofollow.remove_unread(self._root, *block)

    def _open_undamaged(self) -> BlockIndex:
        path = self._path
        try:
            # Several processes may find the same damage. The first one of them renames the file and
            # makes a new one, which the others keep. The new file has another inode, since the
            # renamed one exists. If an administrator removes that file, and later another index
            # gets its inode, that index is set aside too, and rebuilt.
            if self._damaged is not None and self._is_there(self._damaged):
                raise DamagedIndexError("found during use")
            index = BlockIndex(path)
            index.check()
        except sqlite3.Error as error:
            if not _is_damage(error, path):
                raise
            aside = put_aside(path)
            logger.warning(
                "store %s: the index is damaged (%s), kept as %s, beginning anew",
                self._root,
                error,
                aside.name,
            )
            index = BlockIndex(path)
        self._damaged = None
        return index

    def _rebuild(self, index: BlockIndex) -> None:
        """Fill the index from the files.

        A bad sector (DAMAGE_ERRORS) ends the first try, since the error may be one of a moment. The
        second one leaves it out. Both belong to one call, after which a tool ends.
        Raises: OSError; sqlite3.Error.
        """
        left_out = dict[tuple[str, ...], OSError]()

        again = False

        def leaves_out(error: OSError, names: tuple[str, ...]) -> bool:
            if not is_lasting(error, names) and not (again and error.errno in DAMAGE_ERRORS):
                return False
            if error.errno in _UNREADABLE:
                left_out[names] = error
            return True

        started_s = time.monotonic()
        try:
            try:
                added = self._add_files(index, leaves_out)
            except OSError as error:
                if error.errno not in DAMAGE_ERRORS:
                    raise
                self._complain(error)
                if self._closing.wait(TICK_S):
                    return
                again = True
                left_out.clear()
                added = self._add_files(index, leaves_out)
        except (OSError, sqlite3.Error):
            self._rebuilding.start(time.monotonic())
            raise
        if not added:
            return
        if left_out:
            self.unreadable_files += len(left_out)
            names, failure = next(iter(left_out.items()))
            logger.warning(
                "store %s: index: left out %d files or folders that cannot be read, such as %s: %s",
                self._root,
                len(left_out),
                self._root.joinpath(*names),
                failure.strerror,
            )
        blocks, used_bytes = index.totals()
        logger.info(
            "store %s: indexed %d blocks, %.3f GB, in %.1f s",
            self._root,
            blocks,
            used_bytes / 1e9,
            time.monotonic() - started_s,
        )

    def _add_files(self, index: BlockIndex, leaves_out: LeavesOut) -> bool:
        """Replace all rows by those of the files; False if the store is closed meanwhile."""
        index.clear()
        for digest in namespaces_in(self._root):
            if self._closing.is_set():
                return False
            own_bytes = self._descriptions.own_bytes(digest)
            index.add_found(digest, own_bytes, scanned_files_in(self._root, digest, leaves_out))
        index.mark_clean(this_boot())
        return True

    def reclaim(self, index: BlockIndex) -> None:
        """Complete or remove the blocks of dead writers, and remove what is unused.

        What fails is tried again by the next call. It keeps no index closed, since all that is left
        goes on counting.
        """
        with self._complaining():
            for digest in namespaces_in(self._root):  # descriptions that were being written
                with self._complaining():
                    remove_stale(self._root, digest.hex())
        for block in index.writing():
            if is_stale(block.owner, block.usage.created_s):
                with self._complaining():
                    self._reclaim_block(index, block)
        with self._complaining():
            self._evictor.remove_aside(index, KEEP_ASIDE_S)
        with self._complaining():
            self._descriptions.remove_unused(index, unless_younger_s=RECLAIM_EVERY_S)

    def _reclaim_block(self, index: BlockIndex, block: IndexedBlock) -> None:
        *folder_names, name = block_names(block.namespace, block.key)
        _, living = remove_stale(self._root, *folder_names)
        if block.owner in living:  # a slow writer
            return
        if nofollow.file_bytes(self._root, *folder_names, name) is not None:
            index.commit(block)
        else:
            nofollow.remove_empty(self._root, *folder_names)
            index.drop(block)

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._complain(error)


def _has_room(root: Path) -> bool:
    """Whether files of ROOM_BYTES fit. A quota of a user is seen only by making one."""
    free = free_bytes(os.statvfs(root))
    if free is not None and free < ROOM_BYTES:
        return False
    try:
        with tempfile.TemporaryFile(dir=root) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    return True


def _is_mounted(root: Path) -> bool:
    """Whether a disk is mounted at the root itself, which may be a link to it."""
    return os.path.ismount(os.path.realpath(root))


@contextlib.contextmanager
def _unless_full() -> Iterator[None]:
    """A context for what is left out on a full disk, so that the evictions that free it go on."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
            raise


def _is_damage(error: BaseException, path: Path) -> bool:
    """Whether the index at `path` can be used no more. SQLite also takes a file for read-only if
    the version in its header is not one of its own."""
    code = getattr(error, "sqlite_errorcode", None)
    unknown_version = code == sqlite3.SQLITE_READONLY and os.access(path, os.W_OK)
    damaged = code is not None and code & _PRIMARY in _DAMAGED
    return isinstance(error, DamagedIndexError) or damaged or unknown_version
