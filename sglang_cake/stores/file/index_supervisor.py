"""Keeps the books of a folder open: makes, rebuilds and repairs them, in the background."""

import contextlib
import fcntl
import functools
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_cake.core.errors import StoreFull, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.file import folder_tree
from sglang_cake.stores.file.access_log import Told
from sglang_cake.stores.file.description import Descriptions
from sglang_cake.stores.file.disk_usage import Amount
from sglang_cake.stores.file.evictor import Evictor, lock
from sglang_cake.stores.file.index import BlockIndex, Touch
from sglang_cake.stores.file.ownership import put_aside
from sglang_cake.stores.file.paths import NamespaceFolder, open_private
from sglang_cake.stores.file.scan import (
    blocks_in,
    is_stale,
    namespaces_in,
    remove_empty_folders,
    remove_stale,
)
from sglang_cake.stores.file.schema import DamagedIndexError

logger = logging.getLogger(__name__)
TICK_S = 1.0
OPEN_WAIT_S = 5.0  # how long who needs them waits for books that were just opened
RECLAIM_EVERY_S = 60.0
CLOSE_S = 10.0  # how long who closes a store waits for a disk that does not answer
# Of room made ahead; then puts that wait for the policy get in between.
AHEAD_AT_ONCE = Amount(16 << 20, 1000)
KEEP_ASIDE_S = 86_400.0  # files that were set aside as corrupt, of a namespace, after the last one
MAX_UNWRITTEN_READS = 65_536  # reads that the books have not been told of; older ones are forgotten
# The last one is an error in what we ask: our own tables gave no cause for one when it was opened.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


class IndexSupervisor:
    """The books of one folder in one process. Without them, what is stored can be read and asked
    for, file by file, and nothing can be written."""

    def __init__(
        self, root: Path, room: Evictor, descriptions: Descriptions, allocated_bytes: int
    ) -> None:
        """Start the background thread.

        Args: allocated_bytes: files take multiples of it on the disk.
        """
        self._root, self._evictor, self._allocated_bytes = root, room, allocated_bytes
        self._descriptions = descriptions
        self._lead: int | None = None  # a descriptor; whoever holds the lock on it leads
        self._index: BlockIndex | None = None
        self._opened, self._closing = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._reads: deque[Touch] = deque(maxlen=MAX_UNWRITTEN_READS)
        self._flushing = threading.Lock()  # taken before the locks of the index and the room
        self._wait_until_s = time.monotonic() + OPEN_WAIT_S
        self._reclaim_at_s = time.monotonic() + RECLAIM_EVERY_S
        self._complained, self._damaged = "", False
        self.rebuilt = 0  # how often the books were made from the files
        self._thread = threading.Thread(target=self._run, name="cake-file-books", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def open(self, *, wait: bool = True) -> Iterator[BlockIndex]:
        """The books, to read and write in. With `wait`, those that are just being opened for the
        first time are waited for, up to OPEN_WAIT_S in all.

        Raises: StoreUnavailable while there are none, and when they fail inside; StoreFull.
        """
        if wait and self._index is None:
            self._opened.wait(max(0.0, self._wait_until_s - time.monotonic()))
        index = self._index
        if index is None or not self._is_current(index):
            self._give_up(index)
            raise StoreUnavailable(f"{self._root}: the index is being opened or rebuilt")
        try:
            yield index
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise StoreFull(f"{self._root}: index: {error}") from error
            if code != sqlite3.SQLITE_BUSY:
                self._damaged |= _is_damage(error)
                self._give_up(index)
            raise StoreUnavailable(f"{self._root}: index: {error}") from error

    def was_read(self, digest: Digest, key: BlockKey, *, counts: bool) -> None:
        """A block was read; written down within TICK_S or so. Args: counts: it is one more use."""
        self._reads.append(Touch(digest, key, time.time(), int(counts)))

    def was_touched(self, digest: Digest, news: Sequence[Told]) -> None:
        """A request has these blocks, last one first; written down within TICK_S or so."""
        self._reads.extend(Touch(digest, told.key, told.at_s, 1, told.context) for told in news)

    def wake(self) -> None:
        """Room was taken: there may have to be made some ahead."""
        self._wake.set()

    def flush(self, index: BlockIndex) -> None:
        """Write down what was read. Returns when what somebody else took to write down is written
        as well: who evicts next must not take a block that was just used."""
        with self._flushing:
            reads = [self._reads.popleft() for _ in range(len(self._reads))]
            if not reads:
                return
            try:
                self._evictor.touched(index.touch(reads))
            except (ValueError, OverflowError):  # one cannot be written: the others' still are
                logger.exception("store %s: index", self._root)
                for read in reads:
                    with contextlib.suppress(ValueError, OverflowError):
                        self._evictor.touched(index.touch([read]))

    def close(self) -> None:
        """Blocks until the thread has ended, or for CLOSE_S."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _give_up_lead(self) -> None:
        if self._lead is not None:
            os.close(self._lead)
            self._lead = None

    def _is_current(self, index: BlockIndex) -> bool:
        """Whether the file is still the one we opened: another process may have begun anew."""
        try:
            return os.stat(self._root / "index.db").st_ino == index.inode
        except OSError:
            return False

    def _give_up(self, index: BlockIndex | None) -> None:
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
                self._damaged |= _is_damage(error)
                self._complain(error)
                self._closing.wait(TICK_S)  # whatever is asked meanwhile, a broken disk rests
            except Exception:  # a mistake of ours; without this thread nothing could be written
                logger.exception("store %s: index", self._root)
                self._closing.wait(TICK_S)
            self._wake.wait(TICK_S)
            self._wake.clear()
        with (
            contextlib.suppress(sqlite3.Error, StoreUnavailable, StoreFull),
            self.open(wait=False) as index,
        ):
            self.flush(index)
        self._give_up(self._index)
        self._give_up_lead()

    def _complain(self, error: Exception) -> None:
        """Say what is wrong, once."""
        if str(error) != self._complained:
            logger.warning("store %s: index: %s", self._root, error)
        self._complained = str(error)

    def _tick(self) -> None:
        if self._index is None:
            self._open()
            self._complained = ""
        with self.open(wait=False) as index:
            self.flush(index)
            if not self._evictor.leads and self._takes_the_lead():
                self._evictor.begin_anew(index, leads=True)
            if time.monotonic() >= self._reclaim_at_s:
                self._reclaim_at_s = time.monotonic() + RECLAIM_EVERY_S
                self._reclaim(index)
            knows_all = self._evictor.learn(index, self._closing.wait)
            self._evictor.refresh(index)
            if not knows_all:
                self._wake.set()  # to go on at once; until then no room is made ahead
            elif self._evictor.leads:
                self._make_ahead(index)

    def _takes_the_lead(self) -> bool:
        """Whether this process makes the room ahead from now on, until it ends. One of all does: it
        alone needs the order of all blocks in memory, and no two free the same room twice."""
        return self._lead is not None and lock(self._lead, fcntl.LOCK_EX)

    def _make_ahead(self, index: BlockIndex) -> None:
        wanted = self._evictor.ahead(index)
        while wanted and not self._closing.is_set():
            freed = self._evictor.make(index, Amount(*map(min, wanted, AHEAD_AT_ONCE)))
            if not freed:
                return
            wanted = Amount(wanted.bytes - freed.bytes, wanted.files - freed.files)

    def _open(self) -> None:
        """Raises: OSError; sqlite3.Error."""
        held = open_private(self._root / "index.lock")
        try:
            while not lock(held, fcntl.LOCK_EX):  # somebody rebuilds
                if self._closing.wait(0.05):
                    return
            index = self._open_undamaged()
            try:
                if index.boot() != _this_boot():
                    self._rebuild(index)
                self._reclaim(index)
                # Below a root that was removed and made again, the lead is another file.
                self._give_up_lead()
                self._lead = open_private(self._root / "index.evict")
            except BaseException:
                index.close()
                raise
        finally:
            os.close(held)
        self._evictor.begin_anew(index, leads=self._takes_the_lead())
        self._index = index
        self._opened.set()

    def _open_undamaged(self) -> BlockIndex:
        path = self._root / "index.db"
        try:
            if self._damaged:
                raise DamagedIndexError("found out while it was used")
            index = BlockIndex(path)
            index.check()
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
            aside = put_aside(path)
            logger.warning(
                "store %s: the index is damaged (%s), kept as %s, beginning anew",
                *(self._root, error, aside.name),
            )
            index = BlockIndex(path)
        self._damaged = False
        return index

    def _rebuild(self, index: BlockIndex) -> None:
        started_s = time.monotonic()
        self.rebuilt += 1
        index.clear()
        for digest in namespaces_in(self._root):
            if self._closing.is_set():
                return
            own_bytes = self._descriptions.own_bytes(digest)
            index.found(digest, own_bytes, blocks_in(self._root, digest, self._allocated_bytes))
        index.agreed(_this_boot())
        blocks, used_bytes = index.totals()
        logger.info(
            "store %s: indexed %d blocks, %.3f GB, in %.1f s",
            *(self._root, blocks, used_bytes / 1e9, time.monotonic() - started_s),
        )

    def _reclaim(self, index: BlockIndex) -> None:
        """Finish what dead writers began: their block is whole and counts, or never was. Then
        remove what nobody uses."""
        for digest in namespaces_in(self._root):  # one who died while he described it
            remove_stale(self._root, digest.hex())
        for booked in index.writing():
            if not is_stale(booked.owner, booked.usage.created_s):
                continue
            shard = NamespaceFolder(self._root, booked.namespace).shard(booked.key)
            _, living = remove_stale(self._root, *shard)
            if booked.owner in living:  # for longer than that, and not in vain
                continue
            if folder_tree.has_file(self._root, *shard, booked.key.hex()):
                index.settle(booked, booked.usage.stored_bytes)
            else:
                folder_tree.remove_empty(self._root, *shard)
                index.drop(booked)
        self._evictor.remove_aside(index, KEEP_ASIDE_S)
        self.remove_unused(index, unless_younger_s=RECLAIM_EVERY_S)

    def remove_unused(
        self, index: BlockIndex, *, unless_younger_s: float, at_most: int | None = None
    ) -> None:
        """Remove namespaces without blocks, the oldest first.

        Args: unless_younger_s: of which the description is younger: a block may be on its way.
        Raises: sqlite3.Error; OSError.
        """
        unused = index.unused()
        unused += [
            digest for digest in namespaces_in(self._root) if not index.has_namespace(digest)
        ]
        for digest in unused[:at_most]:
            self.remove_namespace(index, digest, unless_younger_s=unless_younger_s)

    def remove_namespace(
        self, index: BlockIndex, digest: Digest, *, unless_younger_s: float
    ) -> None:
        """As `remove_unused`, one namespace. Raises: sqlite3.Error; OSError."""
        remove_empty_folders(self._root, digest)  # may be many: not while others wait
        remove = functools.partial(
            self._descriptions.remove, digest, unless_younger_s=unless_younger_s
        )
        index.forget_namespace(digest, remove)


def _is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, DamagedIndexError) or code in _DAMAGED


def _this_boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: the books are believed
        return "unknown"
