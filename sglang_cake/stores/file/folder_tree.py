"""Folders below a store's root, by descriptor: no symbolic link below the root is ever followed.

The root itself may be a link, or lie behind one: its owner named it. `O_NOFOLLOW` covers only the
last component of a path, so every component is opened by itself, 9 us a block in all.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_folder(root: Path, *names: str) -> int:
    """A descriptor of the folder root/names[0]/names[1]/..., the caller's to close.

    Raises: FileNotFoundError; NotADirectoryError, also for a link; OSError.
    """
    folder = os.open(root, _FOLDER)
    for name in names:
        try:
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


@contextlib.contextmanager
def opened(root: Path, *names: str) -> Iterator[int]:
    """As `open_folder`, closed at the end."""
    folder = open_folder(root, *names)
    try:
        yield folder
    finally:
        os.close(folder)


def make_folder(root: Path, *names: str) -> None:
    """Make root/names, mode 0700, unless it is there. Raises: OSError, also without its parent."""
    with opened(root, *names[:-1]) as above, contextlib.suppress(FileExistsError):
        os.mkdir(names[-1], 0o700, dir_fd=above)


def remove_empty(root: Path, *names: str) -> None:
    """Remove root/names if it is empty, then its parent if that is empty then, and so on; names[0]
    stays. A folder that cannot be removed is left, as is all above it."""
    with contextlib.suppress(OSError):
        for depth in range(len(names), 1, -1):
            with opened(root, *names[: depth - 1]) as above:
                os.rmdir(names[depth - 1], dir_fd=above)


def has_file(root: Path, *names: str) -> bool:
    """Whether there is a regular file. Raises: OSError."""
    status = status_of(root, *names)
    return status is not None and stat.S_ISREG(status.st_mode)


def status_of(root: Path, *names: str) -> os.stat_result | None:
    """Of what is called so, be it a link; None if nothing is. Raises: OSError."""
    try:
        with opened(root, *names[:-1]) as folder:
            return os.stat(names[-1], dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):  # behind a link is nothing of ours
        return None


def files_in(root: Path, *names: str) -> Iterator[tuple[str, os.stat_result]]:
    """The regular files in a folder; none if it cannot be looked into. What vanishes meanwhile is
    passed over."""
    with contextlib.suppress(OSError), opened(root, *names) as folder:
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield name, status


def folders_in(root: Path, *names: str) -> list[str]:
    """The names of the folders in a folder, of which a link is none; none if it cannot be looked
    into."""
    with contextlib.suppress(OSError), opened(root, *names) as folder, os.scandir(folder) as found:
        return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
    return []


def remove_file(root: Path, *names: str) -> None:
    """Remove a file, or a link, or an empty folder. Raises: OSError; not if there is none."""
    with contextlib.suppress(FileNotFoundError), opened(root, *names[:-1]) as folder:
        try:
            os.unlink(names[-1], dir_fd=folder)
        except IsADirectoryError:
            os.rmdir(names[-1], dir_fd=folder)
