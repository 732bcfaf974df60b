"""The names inside a folder of blocks (docs/format.md), and the file of one block: opening, reading
and writing it. Only this module makes and parses the names.

A file is read and written in pieces, between which the call can be cancelled.

A file that is not in the page cache is read by direct I/O into the caller's pages: without a copy,
and without pages in the cache. That takes a fraction of the CPU time and is at least as fast. A
cached file, above all a block that was written a moment ago, is copied from the cache. Behind a
tier in memory, which has the blocks that were just written, files are written by direct I/O too.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import re
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from sglang_cake.codecs.frame import IncomingBlock
from sglang_cake.core.buffers import PAGE_BYTES
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.core.threads import DaemonPool, check_stop, submit
from sglang_cake.stores.eviction.tenants import NO_TENANT_RULES, TenantRules
from sglang_cake.stores.file import nofollow
from sglang_cake.stores.url import DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class FolderSettings:
    """A folder, and how one process uses it. Others may use it with other settings."""

    path: Path  # absolute
    # `data`: a block is on the disk when it becomes visible. `off`: the kernel decides when; after
    # a power cut, recent blocks are missing or fail their check.
    fsync: str = "off"
    min_free_bytes: int = 0  # of the file system; blocks are evicted to keep that free
    capacity_bytes: int | None = None  # limit for all files and folders; None: no limit
    policy: str = DEFAULT_POLICY  # of eviction, a key of `eviction.POLICIES`
    # Reads are accesses, and this process may lead eviction. False for tools: they would hold all
    # blocks in memory, and keep servers from it.
    reads_count: bool = True
    tenant_rules: TenantRules = NO_TENANT_RULES
    min_benefit_ratio: float = 0.0  # which blocks are written at all (`eviction.policy.admits`)
    direct_writes: bool = False  # blocks are written past the page cache, where possible


INDEX = "index.db"
INDEX_LOCK = "index.lock"  # locked while a process opens or rebuilds the index
EVICTION_LOCK = "index.evict"  # locked by the process that holds the order of eviction
DAMAGED = f"{INDEX}.damaged-"
CORRUPT = "corrupt"
DIGEST_OR_KEY = re.compile(r"[0-9a-f]{64}")
FOLDER = re.compile(r"[0-9a-f]{2}")
_OWNER = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})")
TMP = re.compile(r"\.tmp-([0-9a-f]{16}-[0-9]{1,10})-[0-9a-f]{16}")


def block_names(digest: Digest, key: BlockKey) -> tuple[str, str, str, str]:
    """The names of the folders from the root to the block, and of its file."""
    name = key.hex()
    return digest.hex(), name[:2], name[2:4], name


def this_boot() -> str:
    """The id of the machine's last start. An index of another one is not trusted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: every index is trusted
        return "unknown"


@functools.cache
def this_host() -> str:
    """16 hex digits that identify the processes among which a pid is unique: those of one boot and
    one pid namespace. Containers that share a folder may share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        scope = boot + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: a new host each time, so that files become stale by age only
        scope = secrets.token_hex(16)
    return hashlib.sha256(scope.encode()).hexdigest()[:16]


def new_tmp_name() -> str:
    return f".tmp-{this_process()}-{secrets.token_hex(8)}"


def this_process() -> str:
    """Name of this process, for `owner_of`."""
    return f"{this_host()}-{os.getpid()}"


def owner_of(name: str) -> tuple[str, int] | None:
    """Host and pid of the process with this name; None for other text."""
    match = _OWNER.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def tmp_owner(name: str) -> str:
    """Name of the process (`this_process`) in a temporary file's name (`TMP`)."""
    match = TMP.fullmatch(name)
    assert match is not None, name
    return match[1]


# Between two pieces a thread asks for the interpreter, which the scheduler thread needs: blocks of
# 16 MiB in the page cache take 0.9 of the processor time that they take in pieces of 2 MiB. The
# disk idles between pieces of direct I/O, which has no read-ahead. A cancelled caller waits for a
# few milliseconds.
IO_BYTES = 8 << 20
# Errors of file systems and drivers that cannot read directly into this memory.
_NOT_DIRECTLY = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)
# Its calls keep the GIL. None of them waits for the disk (`is_cached`), and with many threads each
# hand-over takes longer.
_libc = ctypes.PyDLL(None)
_libc.fcntl.argtypes = 3 * (ctypes.c_int,)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def open_to_read(root: Path, names: Sequence[str], *, counts: bool) -> int:
    """A descriptor of a block's file, or of anything else of this name. That of a link cannot be
    read. No link is followed.

    Args:
        counts: the read is an access, and changes the access time of the file. Eviction uses that
            time if the index is lost.

    Raises: OSError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # without it, opening a pipe would block
    try:
        if not counts and hasattr(os, "O_NOATIME"):
            with contextlib.suppress(PermissionError):  # a file of another user
                return nofollow.open_file(root, *names, flags=flags | os.O_NOATIME)
        return nofollow.open_file(root, *names, flags=flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return nofollow.open_file(root, *names, flags=os.O_PATH | os.O_CLOEXEC)


# ---- reading ----


def read_framed(
    fd: int, block: IncomingBlock, framed_bytes: int, stop: threading.Event, checkers: DaemonPool
) -> int:
    """Fill `block` from the start of the file and check it; returns the bytes of the payload.

    Args:
        framed_bytes: size of the file.
        stop: ends the call between two pieces.
        checkers: hash what direct I/O has read, while the next piece is read. `block` is unused
            after the return.

    Raises: BlockCorrupt; StoreUnavailable without a thread to hash; OSError; Stopped.
    """
    file = _Pieces(fd, direct=block.is_on_pages and not is_cached(fd, framed_bytes))
    checked: Future[None] | None = None
    try:
        while block.done < framed_bytes:
            check_stop(stop)
            got = file.read(block)
            if got == 0:
                break
            payload = block.came(got)
            if checked is not None:
                checked.result()
            if file.direct and block.done < framed_bytes:
                checked = submit(checkers, block.check, payload)
            else:
                block.check(payload)
    finally:
        if checked is not None:
            wait((checked,))
    return block.finish()


class _Pieces:
    """A file that is read from its start, by direct I/O as long as possible."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self.direct = direct and set_direct(fd, direct=True)

    def read(self, block: IncomingBlock) -> int:
        """Read the next piece; returns how many bytes it has, 0 at the end. Raises: OSError."""
        pages = _whole_pages(block.room(IO_BYTES), block.done) if self.direct else []
        if pages:
            try:
                return os.preadv(self._fd, pages, block.done)
            except OSError as error:
                if error.errno not in _NOT_DIRECTLY:
                    raise
        if self.direct:  # refused, or the part after the last whole page
            self.direct = not set_direct(self._fd, direct=False)
        return os.preadv(self._fd, block.room(IO_BYTES), block.done)


def _whole_pages(views: list[memoryview], at: int) -> list[memoryview]:
    """The parts of `views` that direct I/O at file offset `at` can fill."""
    if at % PAGE_BYTES:
        return []
    cut = (view[: len(view) // PAGE_BYTES * PAGE_BYTES] for view in views)
    return [view for view in cut if len(view)]


def set_direct(fd: int, *, direct: bool) -> bool:
    """Switch direct I/O of an open file on or off; False if the file system cannot do that."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def is_cached(fd: int, file_bytes: int) -> bool:
    """Whether an open file is in the page cache, with all of its pages.

    Unlike a read with RWF_NOWAIT, `mincore` brings nothing into the cache. A file of another user
    counts as cached, since the kernel does not tell. `mmap` would write the access time with the
    address space of the process locked: on a disk that hangs, every thread that maps would wait.
    """
    flags = _libc.fcntl(fd, fcntl.F_GETFL, 0)
    if _libc.fcntl(fd, fcntl.F_SETFL, flags | os.O_NOATIME):  # a file of another user, or a link
        return True
    start = _libc.mmap(None, file_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0)
    _libc.fcntl(fd, fcntl.F_SETFL, flags)
    if start == _MAP_FAILED:  # it cannot be mapped, or is empty
        return True
    resident = ctypes.create_string_buffer(-(-file_bytes // PAGE_BYTES))
    failed = _libc.mincore(start, file_bytes, resident)
    _libc.munmap(start, file_bytes)
    return bool(failed) or b"\0" not in resident.raw


# ---- writing ----


class NewFile:
    """A file that is written under a temporary name, and renamed by `commit`. Not thread-safe.

    Mode 0600. After a crash at any point, the file `name` has its old content or the whole new one.
    A temporary file may be left.
    """

    def __init__(self, folder: int, name: str, *, sync: bool, direct: bool = False) -> None:
        """Args:
            folder: a descriptor, closed with this file, also after an error.
            sync: content and name are on the disk when `commit` returns.
            direct: whole pages go past the page cache, if the file system can do that and they lie
                on pages of memory.

        Raises: OSError; FileNotFoundError if the folder was removed meanwhile.
        """
        self._folder = folder
        self._name = name
        self._sync = sync
        self.committed = False
        self._tmp: str | None = new_tmp_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(self._tmp, flags, 0o600, dir_fd=folder)
        except BaseException:
            os.close(folder)
            raise
        self._direct = direct and set_direct(self._fd, direct=True)

    def append(self, views: Sequence[memoryview], stop: threading.Event) -> None:
        """Write all of `views` ("B"). Raises: OSError; Stopped."""
        rest = [view for view in views if len(view)]
        while rest:
            check_stop(stop)
            try:
                written = self._write([*rest[:-1], rest[-1][:IO_BYTES]])
            except OSError as error:  # of a descriptor: it names no file
                error.filename = self._name
                raise
            if written == 0:
                raise OSError(errno.EIO, "the file takes no more bytes")
            rest = _after(rest, written)

    def _write(self, views: list[memoryview]) -> int:
        if self._direct:
            pages = _whole_pages(views, 0)  # as long as it is direct, it stays on pages
            if len(pages) == len(views) and pages[:-1] == views[:-1]:  # nothing is left out between
                try:
                    return os.writev(self._fd, pages)
                except OSError as error:
                    if error.errno not in _NOT_DIRECTLY:
                        raise
            # Refused, not on a page, or the part after the last whole page.
            self._direct = not set_direct(self._fd, direct=False)
        return os.writev(self._fd, views)

    def commit(self, stop: threading.Event) -> None:
        """Rename the file to `name`, and replace an existing one.

        Raises: OSError; Stopped; nothing is visible then.
        """
        assert self._tmp is not None
        if self._sync:
            os.fdatasync(self._fd)
        self._close()  # before the rename: a full network file system may report it only now
        check_stop(stop)
        os.replace(self._tmp, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._tmp = None
        self.committed = True
        if self._sync:
            try:
                os.fsync(self._folder)
            except OSError:
                self.withdraw()
                raise

    def withdraw(self) -> None:
        """Remove the committed file. Raises: OSError."""
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            os.unlink(self._name, dir_fd=self._folder)
        self.committed = False

    def discard(self) -> None:
        """Remove the file, unless it was committed. May be called several times."""
        with contextlib.suppress(OSError):
            self._close()
        if self._tmp is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._tmp, dir_fd=self._folder)
            self._tmp = None
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _close(self) -> None:
        if self._fd >= 0:
            fd = self._fd
            self._fd = -1
            os.close(fd)


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    while views and done >= len(views[0]):
        done -= len(views[0])
        views = views[1:]
    return [views[0][done:], *views[1:]] if views else []


def write_file(folder: int, name: str, data: bytes) -> None:
    """Write `data` to the file `name`, atomically and to the disk; closes `folder`.

    Raises: OSError.
    """
    stop = threading.Event()
    file = NewFile(folder, name, sync=True)
    try:
        file.append([memoryview(data)], stop)
        file.commit(stop)
    finally:
        file.discard()
