"""The blocks of all namespaces below one folder. Blocking and thread-safe; no event loop here."""

import contextlib
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_cake.errors import (
    BlockCorrupt,
    BlockMissing,
    ConfigError,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.keys import BlockKey, Digest
from sglang_cake.namespace import Namespace
from sglang_cake.store.base import BlockInfo, EvictionCounts, StoredNamespace, StoreStats
from sglang_cake.store.eviction import Usage, ident_of
from sglang_cake.store.eviction.admission import ALL, Admission
from sglang_cake.store.eviction.tenants import EVERYBODY, Sharing
from sglang_cake.store.file.blockfile import NewFile, open_to_read, sync_folder, write_file
from sglang_cake.store.file.books import FOLDER_BYTES, Books
from sglang_cake.store.file.description import read_description
from sglang_cake.store.file.index import BlockIndex
from sglang_cake.store.file.paths import NamespaceFolder
from sglang_cake.store.file.pause import Pause
from sglang_cake.store.file.room import Room, lock
from sglang_cake.store.file.space import FreeSpace
from sglang_cake.store.file.sweep import folders_of, namespaces_in, remove_stale
from sglang_cake.store.file.touches import Touches
from sglang_cake.store.file.trouble import foreign_errors, is_whole
from sglang_cake.store.request import RequestFacts
from sglang_cake.store.threads import check_stop
from sglang_cake.store.url import DEFAULT_POLICY

MAX_SET_ASIDE = 16  # corrupt files a namespace keeps for whoever wants to know what happened
LIST_AT_ONCE = 1000  # blocks that a list fetches in one turn of a thread


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
        sharing: Sharing = EVERYBODY,
        admission: Admission = ALL,
    ) -> None:
        """Open (and make) the folder. Blocks on the disk for a moment.

        Args:
            sync: every block is on the disk when it becomes visible; otherwise that is left to the
                kernel: after a power cut, late blocks are missing or fail their check.
            min_free_bytes: of the file system; blocks make way for one that would leave less.
            capacity_bytes: on the disk, all files and folders below `root`; None: no bound.
            policy: who makes way, a key of `eviction.POLICIES`.
            sharing: what tenants owe each other.
            admission: which blocks are written at all.

        Raises: StoreUnavailable.
        """
        self._root, self._sync = root, sync
        self._claimed: dict[Digest, dict[str, str]] = {}
        self._pause = Pause()
        with foreign_errors():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._allocated_bytes = max(4096, os.statvfs(root).f_frsize)
        self._space = FreeSpace(root, min_free_bytes)
        self._touches = Touches()
        self._room = Room(
            root,
            capacity_bytes,
            policy,
            sharing=sharing,
            admission=admission,
            on_learned=self._touches.remember,
        )
        self._books = Books(root, self._room, self._allocated_bytes)

    def claim(self, digest: Digest, fields: Mapping[str, str]) -> None:
        """Make the namespace's folder with its description, or check the one that is there.

        The root itself is never made again: if it has gone, a disk was unmounted, and blocks would
        land on the one below it.
        Raises: StoreUnavailable; ConfigError if the description is another one.
        """
        place = NamespaceFolder(self._root, digest)
        self._claimed[digest] = dict(fields)
        with foreign_errors():
            place.folder.mkdir(mode=0o700, exist_ok=True)
            if not place.description.exists():
                # Always synced: an empty one after a power cut would lock the namespace.
                write_file(place.description, (json.dumps(dict(fields), indent=2) + "\n").encode())
                sync_folder(place.root)
        found = Namespace(tuple(read_description(place.description).items()))
        if found.digest() != Namespace(tuple(fields.items())).digest():
            raise ConfigError(
                f"{place.description} does not describe the namespace it is in: "
                "remove that folder, or choose another one for the store"
            )

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
        with contextlib.suppress(StoreUnavailable), self._books.open(wait=False) as index:
            return index.contains(digest, keys)
        place, found = NamespaceFolder(self._root, digest), []
        for key in keys:
            check_stop(stop)
            found.append(is_whole(place.block_name(key), framed_bytes))
        return found

    def touched(self, digest: Digest, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """As `Attentive.touched`. Waits for nothing: it is written down in the background."""
        if facts.worth is not None:
            self._room.worth(facts.worth)
        self._books.was_touched(digest, self._touches.told(keys, facts, time.time()))

    def has_file(self, digest: Digest, key: BlockKey) -> bool:
        """Whether the block has a file; the books are not asked. Blocks on the disk for a moment,
        if at all."""
        return os.path.exists(NamespaceFolder(self._root, digest).block_name(key))

    @contextlib.contextmanager
    def reading(self, digest: Digest, key: BlockKey, *, counts: bool = True) -> Iterator[int]:
        """The block's file, open for reading; it is not evicted meanwhile.

        A BlockCorrupt that the caller raises inside has the file set aside.

        Args: counts: as a use of the block, for eviction.
        Raises: BlockMissing, BlockCorrupt (no file at all), StoreUnavailable.
        """
        path = NamespaceFolder(self._root, digest).block_name(key)
        with foreign_errors():
            try:
                fd = open_to_read(path, counts=counts)
            except FileNotFoundError:
                self._forget(digest, key)
                raise BlockMissing(key.hex()) from None
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise BlockCorrupt("not a file")
                if not lock(fd, fcntl.LOCK_SH):
                    raise BlockMissing(f"{key.hex()} is being evicted")
                yield fd
                if counts and not self._touches.foretold(key, time.time()):
                    self._books.was_read(digest, key, counts=not self._touches.listening)
            except BlockCorrupt as error:
                self._set_aside(digest, key, os.fstat(fd).st_ino)
                raise BlockCorrupt(f"{path}: {error}") from None
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def writing(self, digest: Digest, key: BlockKey, framed_bytes: int) -> Iterator[NewFile | None]:
        """A file for `framed_bytes` bytes, to be appended to and committed; without a commit it
        leaves nothing. None if the block is there already, being written, or not worth it. The
        namespace must have been claimed. Other blocks may have to make room for it.

        Raises: StoreFull, StoreUnavailable.
        """
        left_s = self._pause.left_s()
        if left_s > 0:
            raise StoreUnavailable(f"writing rests for {left_s:.0f} s after {self._pause.reason}")
        stored_bytes = -(-framed_bytes // self._allocated_bytes) * self._allocated_bytes
        now_s = time.time()
        told = self._touches.use_of(key, now_s)
        usage = Usage(stored_bytes, now_s, told.at_s, 0, ident_of(key), told.use)
        with foreign_errors(self._pause):
            block = None
            if self._room.admits(usage):
                block = self._book(digest, key, usage)
            if block is None:
                yield None
                return
            file: NewFile | None = None
            try:
                file = self._new_file(digest, key)
                yield file
                if file.committed:
                    self._settle(block, usage, file)
            finally:
                if file is not None:
                    file.discard()
                if file is None or not file.committed:
                    self._unbook(block)

    def delete(self, digest: Digest, key: BlockKey) -> None:
        """Forget one block. Raises: StoreUnavailable."""
        with foreign_errors():
            NamespaceFolder(self._root, digest).block(key).unlink(missing_ok=True)
        self._forget(digest, key)

    def list_blocks(self, digest: Digest) -> Iterator[BlockInfo]:
        """The blocks of one namespace. Raises: StoreUnavailable."""
        after = 0
        while True:
            with self._books.open() as index:
                batch = index.stored_in(digest, after, LIST_AT_ONCE)
            if not batch:
                return
            for booked in batch:
                yield BlockInfo(booked.key, booked.usage.stored_bytes, booked.usage.used_s)
            after = batch[-1].id

    def namespaces(self) -> list[StoredNamespace]:
        """Every namespace that was claimed. Raises: StoreUnavailable."""
        with foreign_errors():
            return [
                StoredNamespace(
                    digest, read_description(NamespaceFolder(self._root, digest).description)
                )
                for digest in namespaces_in(self._root)
            ]

    def used_bytes(self, digest: Digest) -> int:
        """What one namespace takes on the disk. Raises: StoreUnavailable."""
        with self._books.open() as index:
            return index.totals(digest)[1]

    def stats(self) -> StoreStats:
        """How full it is. Raises: StoreUnavailable."""
        with self._books.open() as index:
            blocks, used_bytes = index.totals()
        return StoreStats(
            blocks=blocks,
            used_bytes=used_bytes + self._room.overhead_bytes(),
            capacity_bytes=self._room.capacity_bytes,
            policy=self._room.policy_name,
            evictions=self.evictions(),
        )

    def evictions(self) -> EvictionCounts:
        """What making room took since this folder was opened."""
        return EvictionCounts(**self._room.counts)

    def evict(self, bytes_wanted: int) -> int:
        """Evict blocks of so many bytes, those first that would go first anyway; returns how many
        bytes they were. Raises: StoreUnavailable."""
        with foreign_errors(), self._books.open() as index:
            self._books.flush(index)
            return self._room.make(index, bytes_wanted)

    def remove_stale(self) -> int:
        """Remove what killed writers left behind, in every folder; returns how many files."""
        places = [NamespaceFolder(self._root, digest) for digest in namespaces_in(self._root)]
        return sum(remove_stale(folder) for place in places for folder in folders_of(place))

    def remove_set_aside(self) -> int:
        """Remove the corrupt files that were kept; returns how many. Raises: StoreUnavailable."""
        removed = 0
        with foreign_errors(), self._books.open() as index:
            for digest in namespaces_in(self._root):
                place = NamespaceFolder(self._root, digest)
                for path in place.corrupt.glob("*"):
                    path.unlink(missing_ok=True)
                    removed += 1
                index.drop_aside(digest)
        return removed

    def close(self) -> None:
        """Stop what runs in the background. Blocks until it has."""
        self._books.close()

    # ---- booking ----

    def _book(self, digest: Digest, key: BlockKey, usage: Usage) -> int | None:
        """Book room for a block, evicting others if need be; None if it is there.

        Raises: StoreFull; StoreUnavailable; OSError.
        """
        path = NamespaceFolder(self._root, digest).block(key)
        with self._books.open() as index:
            block = self._reserve(index, digest, key, usage)
            if block is None and index.forget(digest, key, path):  # removed behind our back
                block = self._reserve(index, digest, key, usage)
            if block is None:
                return None
            try:
                self._take_space(index, usage.stored_bytes)
            except BaseException:
                index.drop(block)
                raise
        self._books.wake()
        return block

    def _reserve(
        self, index: BlockIndex, digest: Digest, key: BlockKey, usage: Usage
    ) -> int | None:
        while True:
            room = index.reserve(digest, key, usage, self._room.limit_bytes())
            if not room.short_bytes:
                return room.id
            self._books.flush(index)
            if not self._room.make(index, room.short_bytes):
                raise StoreFull(f"{self._root}: capacity={self._room.capacity_bytes} is taken")

    def _take_space(self, index: BlockIndex, stored_bytes: int) -> None:
        """Leave `min_free` bytes of the file system. Raises: StoreFull; OSError."""
        short_bytes = self._space.take(stored_bytes)
        if short_bytes:
            self._books.flush(index)
            self._space.freed(self._room.make(index, short_bytes))
            if self._space.take(stored_bytes):
                raise StoreFull(
                    f"{self._root}: {stored_bytes} more bytes would leave less than "
                    f"min_free={self._space.min_free_bytes} bytes free"
                )

    def _new_file(self, digest: Digest, key: BlockKey) -> NewFile:
        """Raises: OSError; StoreUnavailable."""
        path = NamespaceFolder(self._root, digest).block(key)
        try:
            return NewFile(path, sync=self._sync)
        except FileNotFoundError:  # the first block of its folder, or the folder was removed
            self._claim_again(digest)
            for made in (path.parent.parent, path.parent):
                with contextlib.suppress(FileExistsError):
                    made.mkdir(mode=0o700)
                    with self._books.open() as index:
                        index.add_folder(digest, FOLDER_BYTES)
            return NewFile(path, sync=self._sync)

    def _claim_again(self, digest: Digest) -> None:
        fields = self._claimed.get(digest) or read_description(
            NamespaceFolder(self._root, digest).description
        )
        if not fields:
            raise StoreUnavailable(f"namespace {digest.hex()} was never described")
        try:
            self.claim(digest, fields)
        except ConfigError as error:  # somebody else made it meanwhile, for something else
            raise StoreUnavailable(str(error)) from error

    def _settle(self, block: int, usage: Usage, file: NewFile) -> None:
        """Raises: StoreUnavailable."""
        self._pause.succeeded()
        with self._books.open() as index:
            if not index.settle(block, usage.stored_bytes):  # we were taken for dead
                file.path.unlink(missing_ok=True)
                raise StoreUnavailable(f"{file.path}: was written too slowly")
        self._room.stored(block, usage)

    def _unbook(self, block: int) -> None:
        # If that fails, the booking is taken away when this process has ended.
        with contextlib.suppress(StoreError), self._books.open() as index:
            index.drop(block)

    def _forget(self, digest: Digest, key: BlockKey) -> None:
        path = NamespaceFolder(self._root, digest).block(key)
        with contextlib.suppress(StoreError), self._books.open() as index:
            index.forget(digest, key, path)

    def _set_aside(self, digest: Digest, key: BlockKey, inode: int) -> None:
        """Keep a bad file for inspection, up to MAX_SET_ASIDE of them; delete any further one."""
        place = NamespaceFolder(self._root, digest)
        path = place.block(key)
        try:
            if os.stat(path).st_ino != inode:  # a new file took its place
                return
            place.corrupt.mkdir(mode=0o700, exist_ok=True)
            if len(os.listdir(place.corrupt)) < MAX_SET_ASIDE:
                os.replace(path, place.corrupt / path.name)
                with contextlib.suppress(StoreError), self._books.open() as index:
                    index.set_aside(digest, key)
            else:
                path.unlink()
                self._forget(digest, key)
        except OSError:
            pass  # read-only, or another reader was first: the block stays bad, and is never used
