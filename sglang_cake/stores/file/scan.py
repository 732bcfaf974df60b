"""The files and folders below the root of a store: for a new index, to remove what killed writers
left, and to list a store without a change."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.base import BlockInfo, StoreStats
from sglang_cake.stores.file import nofollow
from sglang_cake.stores.file.block_files import (
    CORRUPT,
    DIGEST_OR_KEY,
    FOLDER,
    INDEX,
    TMP,
    owner_of,
    this_boot,
    this_host,
    tmp_owner,
)
from sglang_cake.stores.file.disk import on_disk_bytes
from sglang_cake.stores.file.index import IndexReader, ScannedFile
from sglang_cake.stores.file.nofollow import LeavesOut, is_lasting

STALE_S = 3600.0  # a live writer appends to its file far more often
LIST_AT_ONCE = 10_000  # blocks that a listing holds in memory


def namespaces_in(root: Path) -> list[Digest]:
    """The namespaces that have a folder. Raises: OSError, also if there is no root, and if it is
    damaged: without it, a store would count as empty."""
    found = nofollow.folders_in(root, leaves_out=lambda *_: False)
    names = sorted(filter(DIGEST_OR_KEY.fullmatch, found))
    return [Digest(bytes.fromhex(name)) for name in names]


def block_folders_in(
    root: Path,
    digest: Digest,
    *,
    remove_empty: bool = False,
    leaves_out: LeavesOut = is_lasting,
) -> Iterator[tuple[str, str, str]]:
    """The folders of a namespace's blocks, as names below the root.

    Args: remove_empty: remove each folder that is empty after the caller has used it.
    Raises: as `nofollow.files_in`.
    """
    name = digest.hex()
    for first in filter(FOLDER.fullmatch, nofollow.folders_in(root, name, leaves_out=leaves_out)):
        inner = nofollow.folders_in(root, name, first, leaves_out=leaves_out)
        for second in filter(FOLDER.fullmatch, inner):
            yield name, first, second
            if remove_empty:
                nofollow.remove_empty(root, name, first, second)
        if remove_empty:
            nofollow.remove_empty(root, name, first)


# ---- without a change ----


def stats_in(root: Path, *, even_if_old: bool = False) -> StoreStats:
    """Totals of all namespaces, from the index; empty if it cannot be read.

    Args:
        even_if_old: also from an index of an earlier start of the machine, but not from one whose
            rebuilding has not ended, which lacks blocks.
    """
    with (
        contextlib.suppress(sqlite3.Error, OSError),
        contextlib.closing(IndexReader(root / INDEX)) as index,
    ):
        boot = index.clean_boot_id()
        if boot == this_boot() or (even_if_old and boot):
            return index.stats()
    return StoreStats()


def block_bytes_in(root: Path) -> int:
    """Bytes of all blocks on the disk, from the files, as far as these can be read.

    Raises: OSError if the root cannot be listed.
    """

    def leaves_out(error: OSError, names: tuple[str, ...]) -> bool:
        return True

    return sum(
        status.st_blocks * 512
        for digest in namespaces_in(root)
        for folder_names in block_folders_in(root, digest, leaves_out=leaves_out)
        for _, status in _block_files(root, folder_names, leaves_out)
    )


def listed_blocks_in(root: Path, digest: Digest) -> Iterator[BlockInfo]:
    """The blocks of one namespace, from the index by key, or from the files if it cannot be read or
    is to be rebuilt.

    Raises: OSError.
    """
    after = b""
    with contextlib.suppress(sqlite3.Error, OSError):
        while True:
            with contextlib.closing(IndexReader(root / INDEX)) as index:
                if index.clean_boot_id() != this_boot():
                    break
                batch = index.stored_in(digest, after, LIST_AT_ONCE)
            if not batch:
                return
            for block in batch:
                yield BlockInfo(block.key, block.usage.stored_bytes, block.usage.used_s)
            after = batch[-1].key
    for folder_names in block_folders_in(root, digest):
        for key, status in _block_files(root, folder_names):
            if key > after:
                used_s = max(status.st_atime, status.st_mtime)
                yield BlockInfo(key, status.st_blocks * 512, used_s)


def _block_files(
    root: Path, folder_names: tuple[str, str, str], leaves_out: LeavesOut = is_lasting
) -> Iterator[tuple[BlockKey, os.stat_result]]:
    for name, status in nofollow.files_in(
        root, *folder_names, like=DIGEST_OR_KEY, leaves_out=leaves_out
    ):
        yield BlockKey(bytes.fromhex(name)), status


# ---- for a new index ----


def scanned_files_in(root: Path, digest: Digest, leaves_out: LeavesOut) -> Iterator[ScannedFile]:
    """Every block file of a namespace, and those that were set aside. Stale temporary files and
    empty folders are removed. Raises: as `nofollow.files_in`."""

    def found(key: BlockKey | None, status: os.stat_result) -> ScannedFile:
        # A damaged inode may have any size.
        taken_bytes = on_disk_bytes(root, status.st_blocks * 512)
        return ScannedFile(key, taken_bytes, status.st_mtime, max(status.st_atime, status.st_mtime))

    for folder_names in block_folders_in(root, digest, remove_empty=True, leaves_out=leaves_out):
        remove_stale(root, *folder_names, leaves_out=leaves_out)
        for key, status in _block_files(root, folder_names, leaves_out):
            yield found(key, status)
    for _, status in nofollow.files_in(root, digest.hex(), CORRUPT, leaves_out=leaves_out):
        yield found(None, status)


# ---- what killed writers left ----


def remove_stale(
    root: Path, *names: str, leaves_out: LeavesOut = is_lasting
) -> tuple[int, set[str]]:
    """Remove temporary files of dead writers in one folder.

    Returns the number of removed files, and the writers (`this_process`) whose files are left.
    Raises: as `nofollow.files_in`.
    """
    removed = 0
    living = set[str]()
    for name, status in nofollow.files_in(root, *names, like=TMP, leaves_out=leaves_out):
        owner = tmp_owner(name)
        if is_stale(owner, status.st_mtime):
            with contextlib.suppress(OSError):
                nofollow.remove_file(root, *names, name)
                removed += 1
        else:
            living.add(owner)
    return removed, living


def remove_empty_folders(root: Path, digest: Digest) -> None:
    """Remove the empty folders inside of the folder of a namespace, as far as that is possible."""
    with contextlib.suppress(OSError):
        for _ in block_folders_in(root, digest, remove_empty=True):
            pass
    nofollow.remove_empty(root, digest.hex(), CORRUPT)


def is_stale(owner: str, touched_s: float) -> bool:
    """Whether a writer is dead: its process has ended on this host, or it wrote nothing for
    STALE_S. If it is alive after all, its put fails.

    Args:
        owner: name of the writer (`this_process`).
        touched_s: time of its last write, seconds since 1970.
    """
    host, pid = owner_of(owner) or ("", 0)
    if host == this_host() and not _is_alive(pid):
        return True
    return time.time() - touched_s > STALE_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    # A zombie still has its number. It stays one where the first process of a container is no init.
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True
