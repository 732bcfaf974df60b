"""Whose a folder is. What somebody else put there is never opened, changed or removed."""

import contextlib
import os
import re
import sqlite3
import stat
from pathlib import Path

from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.file.schema import ForeignIndexError, check_ours

INDEX, LOCK = "index.db", "index.lock"
MAX_PUT_ASIDE = 2  # damaged indexes that are kept: the first one and the last
SUFFIXES = ("-wal", "-shm", "")  # of the files of an index
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_OF_THE_DISK = {"lost+found"}  # in a file system that was just made
_SQLITE = b"SQLite format 3\0"


def check_folder(root: Path) -> None:
    """The folder is absent, empty, or a store. Only reads.

    A namespace's folder, an empty `index.lock` or an index of ours says that it is a store; an
    index that is in order and another program's says that it is none, whatever else there is.

    Raises: ConfigError; OSError if the folder cannot be read.
    """
    try:
        names = set(os.listdir(root))
    except FileNotFoundError:
        return
    if names <= _OF_THE_DISK:
        return
    is_store = _size_bytes(root / LOCK) == 0 or any(map(_NAMESPACE.fullmatch, names))
    index = root / INDEX
    if _size_bytes(index):
        with index.open("rb") as file:
            is_database = file.read(len(_SQLITE)) == _SQLITE
        if is_database:
            # Twice: another process may be making it.
            if _is_foreign(index) and _is_foreign(index):
                raise ConfigError(
                    f"store folder {root} has an index.db of another program, or of another "
                    "version of sglang-cake: choose another folder"
                )
            return
    if not is_store:
        raise ConfigError(
            f"store folder {root} is neither empty nor a store: choose another folder"
        )


def put_aside(index: Path) -> Path:
    """Give a damaged index another name, its log first: a log beside another index than its own
    would be taken for that one's. Returns the new name. Raises: OSError."""
    free = (path for path in _asides(index) if not os.path.lexists(path))
    aside = next(free, _asides(index)[-1])
    for suffix in SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{index}{suffix}", f"{aside}{suffix}")
    return aside


def aside_bytes(index: Path) -> int:
    """What the indexes that were put aside take on the disk."""
    taken_bytes = 0
    for aside in _asides(index):
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                taken_bytes += os.lstat(f"{aside}{suffix}").st_blocks * 512
    return taken_bytes


def _asides(index: Path) -> list[Path]:
    return [
        index.with_name(f"{index.name}.damaged-{number}") for number in range(1, MAX_PUT_ASIDE + 1)
    ]


def _size_bytes(path: Path) -> int | None:
    """Of a file; None of anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _is_foreign(index: Path) -> bool:
    try:
        check_ours(index)
    except ForeignIndexError:
        return True
    except sqlite3.Error:  # damaged, or being written: who opens it to write judges that
        return False
    return False
