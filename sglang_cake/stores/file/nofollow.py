"""File operations below the root of a store. No symbolic link below the root is followed.

The root itself may be a link, since the operator names it. `O_NOFOLLOW` covers only the last
component of a path, and the system call `openat2` all of them. Where a kernel or a sandbox does not
have it, every component is opened by itself, which takes longer: each call lets go of the GIL.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
# Whether a listing leaves out what gave an error. Args: the error; names from the root to the file
# or folder.
LeavesOut = Callable[[OSError, tuple[str, ...]], bool]
MOST_TRIES = 10  # of `in_folders`
_LASTING = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EUCLEAN,
    errno.EBADMSG,
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class _OpenHow(ctypes.Structure):
    """`struct open_how` of `linux/openat2.h`."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


OPENAT2 = 437  # the same number on all architectures
_AT_FDCWD = -100
_NO_SYMLINKS, _BENEATH = 0x04, 0x08
_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
_syscall.restype = ctypes.c_long


def open_folder(root: Path, *names: str) -> int:
    """A descriptor of the folder root/names[0]/names[1]/..., to be closed by the caller.

    Raises: FileNotFoundError; NotADirectoryError, also for a link; OSError.
    """
    return open_file(root, *names, flags=_FOLDER) if names else os.open(root, _FOLDER)


def open_file(root: Path, *names: str, flags: int) -> int:
    """A descriptor of the file root/names[0]/names[1]/..., to be closed by the caller.

    Raises: FileNotFoundError; NotADirectoryError, also for a link to a folder; OSError (ELOOP for
    a link at the end, unless `flags` have O_PATH).
    """
    flags |= os.O_NOFOLLOW
    path = "/".join(names)
    found = _openat2(_AT_FDCWD, f"{root}/{path}", flags, _NO_SYMLINKS)
    if found >= 0:
        return found
    folder = os.open(root, _FOLDER)
    try:
        found = _openat2(folder, path, flags, _NO_SYMLINKS | _BENEATH)
        if found >= 0:
            return found
        for name in names[:-1]:  # for an error that says what is wrong, too
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(names[-1], flags, dir_fd=folder)
    finally:
        os.close(folder)


def _openat2(folder: int, path: str, flags: int, resolve: int) -> int:
    """The system call; negative after an error."""
    how = _OpenHow(flags, 0, resolve)
    at, size = ctypes.addressof(how), ctypes.sizeof(how)
    return int(_syscall(OPENAT2, folder, os.fsencode(path), at, size))


@contextlib.contextmanager
def opened(root: Path, *names: str) -> Iterator[int]:
    """As `open_folder`, closed at the end."""
    folder = open_folder(root, *names)
    try:
        yield folder
    finally:
        os.close(folder)


def make_folder(root: Path, *names: str) -> None:
    """Make the folder root/names with mode 0700, unless it exists. Its parent must exist.

    Raises: OSError.
    """
    with opened(root, *names[:-1]) as above, contextlib.suppress(FileExistsError):
        os.mkdir(names[-1], 0o700, dir_fd=above)


def in_folders(root: Path, use: Callable[[], T], make: Callable[[], object]) -> T:
    """What `use` returns. Folders that it does not find are made before its next try: others may
    remove a folder as long as it is empty.

    The root is not made again: if it has vanished, a disk was unmounted. Raises: OSError.
    """
    for _ in range(MOST_TRIES):
        try:
            return use()
        except FileNotFoundError:
            os.stat(root)
            with contextlib.suppress(FileNotFoundError):
                make()
    return use()


def remove_empty(root: Path, *names: str) -> None:
    """Remove the folder root/names and its parents below names[0], as far as they are empty."""
    with contextlib.suppress(OSError):
        for depth in range(len(names), 1, -1):
            with opened(root, *names[: depth - 1]) as above:
                os.rmdir(names[depth - 1], dir_fd=above)


def file_bytes(root: Path, *names: str) -> int | None:
    """Size of a regular file; None if there is none. Raises: OSError."""
    status = status_of(root, *names)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def status_of(root: Path, *names: str) -> os.stat_result | None:
    """Status of a file, folder or link; None if there is none. Raises: OSError."""
    try:
        with opened(root, *names[:-1]) as folder:
            return os.stat(names[-1], dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):  # or a link instead of a folder
        return None


def is_lasting(error: OSError, names: tuple[str, ...]) -> bool:
    """Whether another try would give the error again: the file or folder is gone, another one or a
    link has replaced it, it may not be read, or the file system reports it as damaged."""
    return error.errno in _LASTING


def files_in(
    root: Path,
    *names: str,
    like: re.Pattern[str] | None = None,
    leaves_out: LeavesOut = is_lasting,
) -> Iterator[tuple[str, os.stat_result]]:
    """The regular files in a folder. Args: like: only those with such names.

    Raises: OSError, unless `leaves_out` tells to leave the file or the folder out.
    """
    with _left_out(leaves_out, *names), opened(root, *names) as folder:
        there = os.listdir(folder)
        for name in there if like is None else filter(like.fullmatch, there):
            with _left_out(leaves_out, *names, name):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield name, status


def folders_in(root: Path, *names: str, leaves_out: LeavesOut = is_lasting) -> list[str]:
    """The names of the folders in a folder, without links; none where it is left out. Args and
    errors as for `files_in`."""
    with _left_out(leaves_out, *names), opened(root, *names) as folder, os.scandir(folder) as found:
        return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
    return []


@contextlib.contextmanager
def _left_out(leaves_out: LeavesOut, *names: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not leaves_out(error, names):
            raise


def remove_file(root: Path, *names: str) -> None:
    """Remove a file, a link or an empty folder, if it exists. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError), opened(root, *names[:-1]) as folder:
        try:
            os.unlink(names[-1], dir_fd=folder)
        except IsADirectoryError:
            os.rmdir(names[-1], dir_fd=folder)


def remove_unread(root: Path, *names: str) -> bool:
    """Remove a file, unless a reader holds a lock on it; True if the file is gone.

    A file is also gone if a link has replaced its folder. Raises: OSError.
    """
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with gone, opened(root, *names[:-1]) as folder:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            fd = os.open(names[-1], flags, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            os.unlink(names[-1], dir_fd=folder)  # a link has no readers
            return True
        try:
            if not lock(fd, fcntl.LOCK_EX):
                return False
            os.unlink(names[-1], dir_fd=folder)
        finally:
            os.close(fd)
    return True


def lock(fd: int, kind: int) -> bool:
    """Try to lock an open file (LOCK_SH, LOCK_EX) until it is closed. False if another process or
    thread holds the lock; True also where the file system has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def open_private(path: Path) -> int:
    """Open a file to read and write, made as by `make_private`; the caller closes it."""
    make_private(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def make_private(path: Path) -> None:
    """Make an empty file with mode 0600, unless it exists: an existing file is not opened.

    Raises: OSError, also for anything that is no regular file, such as a link or a pipe.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, flags, 0o600))
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(path))
