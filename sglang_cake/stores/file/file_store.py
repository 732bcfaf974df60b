"""`file:///abs/path?capacity=500GB&min_free=20GB&fsync=off`: blocks in a folder."""

import asyncio
import dataclasses
import errno
import fcntl
import functools
import logging
import os
import pwd
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame, IncomingBlock
from sglang_cake.core.buffers import TellBytes, on_page
from sglang_cake.core.errors import BlockCorrupt, ConfigError
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.core.local_files import cache_folder
from sglang_cake.core.threads import DaemonPool, run_in_own_thread, run_stoppable, submit
from sglang_cake.stores.base import (
    BlockInfo,
    RequestFacts,
    Store,
    StoredNamespace,
    StoreLayer,
    StoreStats,
)
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.eviction.tenants import TenantRules
from sglang_cake.stores.file import scan
from sglang_cake.stores.file.block_files import (
    DIGEST_OR_KEY,
    INDEX,
    INDEX_LOCK,
    FolderSettings,
    read_framed,
)
from sglang_cake.stores.file.block_folder import LIST_AT_ONCE, BlockFolder
from sglang_cake.stores.file.disk import free_bytes, os_errors, shared_file_system
from sglang_cake.stores.file.index import ForeignIndexError, check_ours
from sglang_cake.stores.file.index_supervisor import CLOSE_S
from sglang_cake.stores.file.namespace_descriptions import described_namespaces_in
from sglang_cake.stores.file.nofollow import lock
from sglang_cake.stores.url import DEFAULT_POLICY, StoreUrl, one_of, parse_quota, parse_size

logger = logging.getLogger(__name__)
LOOKUP_THREADS = 2
DEFAULT_MIN_FREE_BYTES = 10**9  # a store never fills a disk completely
# Shares of the file system, for the default store.
DEFAULT_SHARE = 0.5
DEFAULT_MIN_FREE_SHARE = 0.2
LEAST_CAPACITY_BYTES = 16 << 20  # the index alone may take 5 MiB
_OF_THE_DISK = {"lost+found"}  # in a new file system


class FileStore(Store):
    """Implements `Store`: one namespace of a `BlockFolder`.

    Reads, writes and lookups have thread pools of their own, so that none of them waits for the
    others on a slow disk.
    """

    def __init__(self, folder: BlockFolder, frame: BlockFrame, *, threads: int) -> None:
        """Open the namespace.

        Args:
            folder: closed with this store.
            threads: concurrent reads, and concurrent writes.

        Raises: StoreUnavailable; ConfigError if the folder describes another namespace.
        """
        self._folder = folder
        self._frame = frame
        folder.descriptions.check(frame.digest, frame.namespace.describe())
        self._readers = DaemonPool(threads, "cake-file-read")
        self._writers = DaemonPool(threads, "cake-file-write")
        self._lookups = DaemonPool(LOOKUP_THREADS, "cake-file-ask")
        self._checkers = DaemonPool(threads, "cake-file-check")  # for the readers

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        frame, keys = self._frame, list(keys)
        return await run_stoppable(
            self._lookups,
            lambda stop: self._folder.contains(frame.digest, keys, frame.known_bytes, stop),
        )

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        digest, keys = self._frame.digest, list(keys)
        # In a thread: thousands of keys take longer than other calls should wait.
        await run_stoppable(self._lookups, lambda stop: self._folder.on_access(digest, keys, facts))

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`. Cancellation: returns once the thread does not use `out` any more."""
        return await run_stoppable(self._readers, functools.partial(self._get, key, out, progress))

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`. Cancellation: returns once the thread does not use `data` any more."""
        assert self._frame.takes(data.nbytes), data.nbytes
        work = functools.partial(self._put, key, data.cast("B"))
        return await run_stoppable(self._writers, work)

    async def delete(self, key: BlockKey) -> None:
        digest = self._frame.digest
        await run_stoppable(self._writers, lambda stop: self._folder.delete(digest, key))

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        blocks = self._folder.list_blocks(self._frame.digest)
        while batch := await run_stoppable(
            self._lookups, lambda stop: list(islice(blocks, LIST_AT_ONCE))
        ):
            for block in batch:
                yield block

    async def remove_description(self) -> None:
        """As in `Store`. The folder of the namespace is removed too."""
        digest = self._frame.digest
        await run_stoppable(self._writers, lambda stop: self._folder.remove_namespace(digest))

    def events(self) -> dict[str, int]:
        """As in `Store`."""
        return {"unreadable": self._folder.supervisor.unreadable_files}

    async def stats(self) -> StoreStats:
        return await run_stoppable(self._lookups, lambda stop: self._folder.stats())

    async def close(self) -> None:
        """Queued calls fail, running calls end normally. What hangs on a broken disk is abandoned
        after CLOSE_S in all."""
        until_s = time.monotonic() + CLOSE_S
        for pool in (self._readers, self._writers, self._lookups):
            pool.shutdown(wait=False, cancel_futures=True)
        have_ended = True
        for pool in (self._readers, self._writers, self._lookups, self._checkers):
            pool.shutdown(wait=False)
            have_ended &= await run_in_own_thread(pool.join, max(0.0, until_s - time.monotonic()))
        closer = DaemonPool(1, "cake-file-close")  # last: the calls need the folder
        closed = submit(closer, self._folder.close)
        closer.shutdown(wait=False)
        have_ended &= await run_in_own_thread(closer.join, max(0.0, until_s - time.monotonic()))
        if closed.done():
            closed.result()
        if not have_ended:
            logger.warning("a disk did not answer within %.0f s; left as it is", CLOSE_S)

    # ---- in the threads ----

    def _get(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None, stop: threading.Event
    ) -> int:
        with self._folder.reading(self._frame.digest, key) as (fd, size):
            if not self._frame.fits(size):
                raise BlockCorrupt(f"{size} bytes, a block file has {self._frame.framed_bytes}")
            block = IncomingBlock(self._frame, key, out, progress)
            return read_framed(fd, block, size, stop, self._checkers)

    def _put(self, key: BlockKey, data: memoryview, stop: threading.Event) -> bool:
        frame = self._frame
        with self._folder.writing(frame.digest, key, HEADER_BYTES + len(data)) as file:
            if file is None:
                return False
            header = on_page(HEADER_BYTES)  # where direct I/O takes it from
            header[:] = frame.header(key, data)
            file.append([header, data], stop)
            file.commit(stop)
            return True


@dataclass(frozen=True, slots=True)
class FileSource(FolderSettings):
    """Implements `StoreSource`."""

    min_free_bytes: int = DEFAULT_MIN_FREE_BYTES

    def check(self) -> None:
        try:
            _check_folder(self.path)
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"probe")
                probe.flush()
            shared = shared_file_system(self.path)
        except OSError as error:
            raise ConfigError(
                f"store folder {self.path} cannot be made or written: {error.strerror}"
            ) from None
        if shared:
            raise ConfigError(
                f"store folder {self.path} is on {shared}, over which processes of several "
                "machines cannot share the index: take a folder on a disk of this machine, or an "
                "http:// URL of `sglang-cake store serve` on the machine that has the disk"
            )

    def describe(self) -> StoreLayer:
        settings = {
            "path": self.path,
            "capacity_bytes": self.capacity_bytes,
            "min_free_bytes": self.min_free_bytes,
            "policy": self.policy,
            "fsync": self.fsync,
            "tenant_quota_bytes": self.tenant_rules.quota_bytes,
            "fair": self.tenant_rules.fair,
            "admit": self.min_benefit_ratio,
            "direct_writes": self.direct_writes or None,
        }
        return StoreLayer("FileStore", settings)

    def check_ours(self) -> None:
        """Check that the folder is absent, empty, or a store. Changes nothing.

        Raises: ConfigError; StoreUnavailable if the folder cannot be read.
        """
        with os_errors(self.path):
            _check_folder(self.path)

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        folder = self.folder()
        try:
            return FileStore(folder, frame, threads=depth)
        except BaseException:
            folder.close()
            raise

    async def namespaces(self) -> list[StoredNamespace]:
        """Changes nothing. Raises: ConfigError; StoreUnavailable."""
        self.check_ours()
        with os_errors(self.path):
            return await asyncio.to_thread(described_namespaces_in, self.path)

    def blocks_in(self, digest: Digest) -> Iterator[BlockInfo]:
        """The blocks of one namespace. Changes nothing. Raises: ConfigError; StoreUnavailable."""
        self.check_ours()
        with os_errors(self.path):
            yield from scan.listed_blocks_in(self.path, digest)

    def stats(self) -> StoreStats:
        """Totals of all namespaces. Changes nothing."""
        self.check_ours()
        found = scan.stats_in(self.path)
        return dataclasses.replace(found, capacity_bytes=self.capacity_bytes, policy=self.policy)

    def folder(self) -> BlockFolder:
        """All namespaces, for tools; the caller closes the folder. A tool waits for the index.

        Raises: StoreUnavailable; ConfigError if the folder is neither empty nor a store, or for a
            tool of root if it belongs to another user.
        """
        self.check_ours()
        if not self.reads_count:
            with os_errors(self.path):
                _check_user(self.path)
        folder = BlockFolder(self)
        if not self.reads_count:
            folder.supervisor.wait()
        return folder

    def is_being_rebuilt(self) -> bool:
        """Whether a process opens or rebuilds the index now. Changes nothing."""
        try:
            with (self.path / INDEX_LOCK).open("rb") as file:
                return not lock(file.fileno(), fcntl.LOCK_SH)
        except OSError:
            return False


def _check_user(root: Path) -> None:
    """Check that files which a tool makes in a store do not lock its user out. Servers may be root
    in a container. Raises: ConfigError if this is root, and the store is another user's."""
    if os.geteuid() != 0:
        return
    made = root / INDEX_LOCK  # by the first process that used the store
    owner = (made if os.path.lexists(made) else root).lstat().st_uid
    if owner == 0:
        return
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = f"#{owner}"  # as sudo takes it
    raise ConfigError(
        f"store folder {root} belongs to {user}, whom files of root would lock out: run this as "
        f"that user (sudo -u '{user}'); if the server runs as root, too, start it first"
    )


def _check_folder(root: Path) -> None:
    """Check that a folder is absent, empty, or a store, and that its index is no other program's.
    Changes nothing. Raises: ConfigError; OSError if the folder cannot be read."""
    try:
        names = set(os.listdir(root))
    except FileNotFoundError:
        return
    if names <= _OF_THE_DISK:
        return
    is_store = _size_bytes(root / INDEX_LOCK) == 0 or any(map(DIGEST_OR_KEY.fullmatch, names))
    index = root / INDEX
    if _size_bytes(index):
        if not os.access(index, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(index))
        try:
            check_ours(index)
        except ForeignIndexError:
            raise ConfigError(
                f"store folder {root} has an {INDEX} of another program, or of another "
                "version of sglang-cake: choose another folder"
            ) from None
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_NOTADB:
                return  # damaged or being written: decided when it is opened to write
        else:
            return
    if not is_store:
        raise ConfigError(
            f"store folder {root} is neither empty nor a store: choose another folder"
        )


def _size_bytes(path: Path) -> int | None:
    """Size of a regular file; None for anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def parse(url: StoreUrl) -> FileSource:
    """Raises: ConfigError."""
    return FileSource(
        path=_path(url),
        fsync=url.option("fsync", one_of("off", "data"), "off"),
        min_free_bytes=url.option("min_free", parse_size, DEFAULT_MIN_FREE_BYTES),
        capacity_bytes=url.option("capacity", _parse_capacity, None),
        policy=url.option("policy", one_of(*POLICIES), url.policy),
        reads_count=url.reads_count,
        tenant_rules=TenantRules(
            quota_bytes=url.option("tenant_quota", parse_quota, None),
            fair=url.option("fair", one_of("on", "off"), "off") == "on",
        ),
        min_benefit_ratio=url.option("admit", _parse_benefit_ratio, 0.0),
        direct_writes=url.behind_memory,
    )


def _parse_benefit_ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1e6:
        raise ConfigError(f"{text!r} is not possible, write a number from 0 on, as 0.3")
    return ratio


def _parse_capacity(text: str) -> int | None:
    size_bytes = parse_size(text)
    if size_bytes < LEAST_CAPACITY_BYTES:
        raise ConfigError(f"{text!r} is too small, at least {LEAST_CAPACITY_BYTES} bytes")
    return size_bytes


def _path(url: StoreUrl) -> Path:
    if "#" in url.place:
        raise url.error("write a '#' that belongs to the path as %23")
    path = unquote(url.place)
    if "~" in path.split("/") or "$" in path or path.startswith("~"):
        raise url.error("'~' and '$' are not expanded, write the absolute path")
    if not path.startswith("/"):
        raise url.error("the path is not absolute, write file:///absolute/path")
    if "\0" in path or not path.strip("/"):
        raise url.error("names no folder, write file:///absolute/path")
    # `Path` keeps a double slash at the start, which may have another meaning in POSIX.
    return Path("/" + path.lstrip("/"))


def default_source(policy: str = DEFAULT_POLICY) -> FileSource:
    """The store without `--cake-store`: in the user's cache folder.

    Of the disk's space that is free or its own now, it takes at most half, and keeps a fifth free.
    Without a whole index, that reads the whole folder: with the blocks counted as space of others,
    half of them would be evicted.
    Raises: ConfigError if there is no home folder, its disk has no known size, or the folder cannot
        be listed.
    """
    try:
        path = cache_folder() / "store"
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        free = free_bytes(os.statvfs(there))
        if free is None:
            raise OSError(f"the file system of {there} has no fixed size")
        own_bytes = scan.stats_in(path, even_if_old=True).used_bytes
        if own_bytes is None:
            own_bytes = scan.block_bytes_in(path) if there == path else 0
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"no default store ({error}): name one, as file:///nvme/kv") from None
    room_bytes = free + own_bytes
    return FileSource(
        path,
        min_free_bytes=int(room_bytes * DEFAULT_MIN_FREE_SHARE),
        capacity_bytes=int(room_bytes * DEFAULT_SHARE),
        policy=policy,
    )
