"""The files of the index of a store: their names, their bytes, and damaged ones."""

import contextlib
import errno
import os
from pathlib import Path

from sglang_cake.stores.file.index import WAL_BYTES

INDEX = "index.db"
LOCK = "index.lock"
MAX_PUT_ASIDE = 8  # damaged indexes that are kept
SMALL_FILES_BYTES = 128 << 10  # of other files in the root: locks, descriptions being written
_SUFFIXES = ("-wal", "-shm", "")  # of the files of an index


def put_aside(index: Path) -> Path:
    """Rename a damaged index; returns its new path. None is ever deleted.

    The log is renamed first, since SQLite would use it for the next index.

    Raises: OSError: also if `MAX_PUT_ASIDE` are kept.
    """
    aside = next((path for path in _asides(index) if not os.path.lexists(path)), None)
    if aside is None:
        raise FileExistsError(
            errno.EEXIST,
            f"{MAX_PUT_ASIDE} damaged indexes ({index.name}.damaged-*) are kept, and this one is "
            "damaged too: see to the disk, and move them away",
            str(index),
        )
    for suffix in _SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{index}{suffix}", f"{aside}{suffix}")
    return aside


def _aside_bytes(index: Path) -> int:
    """Bytes of damaged indexes on the disk."""
    taken_bytes = 0
    for aside in _asides(index):
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                taken_bytes += os.lstat(f"{aside}{suffix}").st_blocks * 512
    return taken_bytes


def _asides(index: Path) -> list[Path]:
    return [
        index.with_name(f"{index.name}.damaged-{number}") for number in range(1, MAX_PUT_ASIDE + 1)
    ]


def overhead_bytes(root: Path) -> int:
    """Bytes of the files beside namespaces: the index with its largest log, and small files."""
    sizes = {"": 0, "-wal": 0, "-shm": 0}
    for suffix in sizes:
        with contextlib.suppress(FileNotFoundError):
            sizes[suffix] = os.lstat(root / f"{INDEX}{suffix}").st_blocks * 512
    index_bytes = sizes[""] + max(sizes["-wal"], WAL_BYTES) + sizes["-shm"]
    return index_bytes + _aside_bytes(root / INDEX) + SMALL_FILES_BYTES
