"""Moving framed blocks between memory and files, in pieces that can be given up."""

import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait

from sglang_cake.codecs.frame import Incoming
from sglang_cake.core.buffers import PAGE_BYTES
from sglang_cake.stores.file.direct import is_cached, set_direct
from sglang_cake.stores.file.paths import new_tmp_name
from sglang_cake.stores.threads import check_stop

# Large enough that the system calls cost nothing, small enough that a cancelled caller waits for
# less than a millisecond or so, and that a piece is still in the CPU's cache when it is hashed.
PIECE_BYTES = 1 << 20
# Past the page cache nobody reads ahead, and what comes is in no CPU's cache: every piece costs the
# disk a pause. A millisecond of a fast disk.
DIRECT_PIECE_BYTES = 2 << 20
# What a disk or file system that is more particular says, or a driver whose memory it cannot reach.
_NOT_DIRECTLY = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


def read_framed(
    fd: int, block: Incoming, framed_bytes: int, stop: threading.Event, checkers: Executor
) -> int:
    """Fill `block` from the start of the file and check it; returns the bytes of the payload.

    What comes from the disk itself is hashed in `checkers` while more comes. When this returns or
    raises, nobody uses `block` any more.
    Raises: BlockCorrupt; OSError; Stopped.
    """
    file = _Pieces(fd, direct=block.is_on_pages and not is_cached(fd))
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
                checked = checkers.submit(block.check, payload)
            else:
                block.check(payload)
    finally:
        if checked is not None:
            wait((checked,))
    return block.finish()


def open_to_read(folder: int, name: str, *, counts: bool) -> int:
    """Open a block's file in an open folder. Args: counts: False: nor does the file's own time of
    use change, which is what eviction knows when the books are lost. Raises: OSError (ELOOP for a
    link)."""
    # O_NONBLOCK does nothing to a file, and keeps a foreign pipe from hanging us.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    if not counts and hasattr(os, "O_NOATIME"):
        with contextlib.suppress(PermissionError):  # somebody else's file
            return os.open(name, flags | os.O_NOATIME, dir_fd=folder)
    return os.open(name, flags, dir_fd=folder)


class _Pieces:
    """A file that is read from its start, past the page cache for as long as that can be done."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self.direct = direct and set_direct(fd, direct=True)

    def read(self, block: Incoming) -> int:
        """Read the next piece; returns how many bytes it has, 0 at the end. Raises: OSError."""
        pages = _whole_pages(block.room(DIRECT_PIECE_BYTES), block.done) if self.direct else []
        if pages:
            try:
                return os.preadv(self._fd, pages, block.done)
            except OSError as error:
                if error.errno not in _NOT_DIRECTLY:
                    raise
        if self.direct:  # refused, or the end of a payload that does not end with a page
            self.direct = not set_direct(self._fd, direct=False)
        return os.preadv(self._fd, block.room(PIECE_BYTES), block.done)


def _whole_pages(views: list[memoryview], at: int) -> list[memoryview]:
    """What a disk can write itself of the bytes that begin `at` the file's start."""
    if at % PAGE_BYTES:
        return []
    cut = (view[: len(view) // PAGE_BYTES * PAGE_BYTES] for view in views)
    return [view for view in cut if len(view)]


class NewFile:
    """A file that is written under a temporary name and then becomes visible at once, or never.

    Mode 0600. A crash at any point leaves either nothing new under `name` or all of it, and at most
    a temporary file beside it. Not thread-safe.
    """

    def __init__(self, folder: int, name: str, *, sync: bool) -> None:
        """Args:
            folder: a descriptor, closed with this file (also if this raises).
            sync: bytes and name are on the disk when `commit` returns.

        Raises: OSError; FileNotFoundError if the folder was removed meanwhile.
        """
        self._folder, self._name, self._sync = folder, name, sync
        self.committed = False
        self._tmp: str | None = new_tmp_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(self._tmp, flags, 0o600, dir_fd=folder)
        except BaseException:
            os.close(folder)
            raise

    def append(self, views: Sequence[memoryview], stop: threading.Event) -> None:
        """Write all of `views` ("B"). Raises: OSError; Stopped."""
        rest = [view for view in views if len(view)]
        while rest:
            check_stop(stop)
            put = os.writev(self._fd, [*rest[:-1], rest[-1][:PIECE_BYTES]])
            if put == 0:
                raise OSError(errno.EIO, "the file takes no more bytes")
            rest = _after(rest, put)

    def commit(self, stop: threading.Event) -> None:
        """Make it visible, replacing what was there. Raises: OSError; Stopped; nothing is then."""
        assert self._tmp is not None
        if self._sync:
            os.fdatasync(self._fd)
        self._close()  # before the rename: a network file system may only now say it was full
        check_stop(stop)
        os.replace(self._tmp, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._tmp, self.committed = None, True
        if self._sync:
            try:
                os.fsync(self._folder)
            except OSError:
                self.withdraw()
                raise

    def withdraw(self) -> None:
        """Take a committed file away again. Raises: OSError."""
        with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
            os.unlink(self._name, dir_fd=self._folder)
        self.committed = False

    def discard(self) -> None:
        """Leave nothing of it, unless it was committed. Harmless afterwards."""
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
            fd, self._fd = self._fd, -1
            os.close(fd)


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    while views and done >= len(views[0]):
        done -= len(views[0])
        views = views[1:]
    return [views[0][done:], *views[1:]] if views else []


def write_file(folder: int, name: str, data: bytes) -> None:
    """Make `name` hold `data`, atomically and on the disk. `folder` is closed. Raises: OSError."""
    stop = threading.Event()
    file = NewFile(folder, name, sync=True)
    try:
        file.append([memoryview(data)], stop)
        file.commit(stop)
    finally:
        file.discard()
