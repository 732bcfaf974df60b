"""Whether a folder is a store, and the files of its index. Other programs' files are left alone."""

import contextlib
import os
import re
import sqlite3
import stat
from pathlib import Path

from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.file.index import WAL_BYTES
from sglang_cake.stores.file.schema import ForeignIndexError, check_ours

INDEX = "index.db"
LOCK = "index.lock"
MAX_PUT_ASIDE = 2  # damaged indexes that are kept: the first one and the last one
SMALL_FILES_BYTES = 128 << 10  # of other files in the root: locks, descriptions being written
SUFFIXES = ("-wal", "-shm", "")  # of the files of an index
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_OF_THE_DISK = {"lost+found"}  # in a new file system
_SQLITE = b"SQLite format 3\0"


def check_folder(root: Path) -> None:
    """Check that a folder is absent, empty, or a store. Changes nothing.

    A store has the folder of a namespace, an empty `index.lock`, or an index. A folder with a valid
    `index.db` of another program is no store, whatever else is in it.

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
            # Twice, since another process may be creating the index.
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
    """Rename a damaged index; returns its new path. Raises: OSError.

    The log is renamed first, since SQLite would use it for the next index.
    """
    free = (path for path in _asides(index) if not os.path.lexists(path))
    aside = next(free, _asides(index)[-1])
    for suffix in SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{index}{suffix}", f"{aside}{suffix}")
    return aside


def aside_bytes(index: Path) -> int:
    """Bytes of damaged indexes on the disk."""
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
    """Size of a regular file; None for anything else."""
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
    except sqlite3.Error:  # damaged, or being written: decided when it is opened to write
        return False
    return False


def overhead_bytes(root: Path) -> int:
    """Bytes of the files beside namespaces: the index with its largest log, and small files."""
    sizes = {"": 0, "-wal": 0, "-shm": 0}
    for suffix in sizes:
        with contextlib.suppress(FileNotFoundError):
            sizes[suffix] = os.lstat(root / f"index.db{suffix}").st_blocks * 512
    index_bytes = sizes[""] + max(sizes["-wal"], WAL_BYTES) + sizes["-shm"]
    return index_bytes + aside_bytes(root / "index.db") + SMALL_FILES_BYTES
