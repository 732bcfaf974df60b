"""What is on the disk: for books that were lost, and what killed writers left behind."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from sglang_cake.keys import BlockKey, Digest
from sglang_cake.store.file.index import Found
from sglang_cake.store.file.paths import (
    TMP_PREFIX,
    NamespaceFolder,
    owner_of,
    this_host,
    tmp_owner,
)

STALE_S = 3600.0  # a writer touches its file every PIECE_BYTES; none is silent that long
_HEX32 = re.compile(r"[0-9a-f]{64}")


def is_stale(owner: str, touched_s: float) -> bool:
    """Whether a writer has died: its process is gone (told only for processes of this host), or it
    was silent for STALE_S. Should it live after all, its put fails, and nothing wrong is seen."""
    known = owner_of(owner)
    if known is not None and known.host == this_host() and not _is_alive(known.pid):
        return True
    return time.time() - touched_s > STALE_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    # One that ended and that nobody has waited for, as under a container's first process that is no
    # init, still has its number, and writes nothing any more.
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True


def namespaces_in(root: Path) -> list[Digest]:
    """The namespaces that have a folder. Raises: OSError."""
    with os.scandir(root) as entries:
        names = sorted(e.name for e in entries if _HEX32.fullmatch(e.name) and e.is_dir())
    return [Digest(bytes.fromhex(name)) for name in names]


def blocks_in(place: NamespaceFolder, allocated_bytes: int) -> Iterator[Found]:
    """Every block file of a namespace, and those set aside; stale temporary files are removed.

    Files and folders that vanish meanwhile, or that may not be read, are passed over.

    Args: allocated_bytes: sizes are rounded up to multiples of it.
    """
    for folder in _shards(place.folder):
        for entry in _entries(folder):
            if _HEX32.fullmatch(entry.name):
                yield from _found(entry, BlockKey(bytes.fromhex(entry.name)), allocated_bytes)
            elif entry.name.startswith(TMP_PREFIX):
                remove_if_stale(entry)
    for entry in _entries(place.corrupt):
        yield from _found(entry, None, allocated_bytes)


def shard_count(place: NamespaceFolder) -> int:
    """How many folders there are for blocks."""
    return sum(1 for _ in _shards(place.folder)) + sum(1 for _ in _hex_folders(place.folder))


def remove_if_stale(entry: "os.DirEntry[str]") -> bool:
    """Remove a temporary file whose writer has died; whether that was done."""
    owner = tmp_owner(entry.name)
    if owner is None:  # nobody's we know of: not ours to remove
        return False
    with contextlib.suppress(OSError):
        if is_stale(owner, entry.stat(follow_symlinks=False).st_mtime):
            os.unlink(entry.path)
            return True
    return False


def remove_stale(folder: Path) -> int:
    """Remove what dead writers left in one folder; returns how many files."""
    return sum(remove_if_stale(entry) for entry in _entries(folder))


def folders_of(place: NamespaceFolder) -> Iterator[Path]:
    """Where writers write."""
    yield place.folder
    yield from _shards(place.folder)


def remove_tmp_of(folder: Path, owner: str) -> None:
    """Remove what a dead writer left in one folder."""
    for entry in _entries(folder):
        if tmp_owner(entry.name) == owner:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def _shards(folder: Path) -> Iterator[Path]:
    for first in _hex_folders(folder):
        yield from _hex_folders(first)


def _hex_folders(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _found(
    entry: "os.DirEntry[str]", key: BlockKey | None, allocated_bytes: int
) -> Iterator[Found]:
    with contextlib.suppress(OSError):
        if entry.is_file(follow_symlinks=False):
            status = entry.stat(follow_symlinks=False)
            size = -(-status.st_size // allocated_bytes) * allocated_bytes
            yield Found(key, size, status.st_mtime, max(status.st_atime, status.st_mtime))
