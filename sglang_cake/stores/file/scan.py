"""What is on the disk: for books that were lost, and what killed writers left behind."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.file import folder_tree
from sglang_cake.stores.file.index import Found
from sglang_cake.stores.file.paths import CORRUPT, owner_of, this_host, tmp_owner

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
    os.stat(root)  # one that cannot be looked into is not empty
    names = sorted(filter(_HEX32.fullmatch, folder_tree.folders_in(root)))
    return [Digest(bytes.fromhex(name)) for name in names]


def blocks_in(root: Path, digest: Digest, allocated_bytes: int) -> Iterator[Found]:
    """Every block file of a namespace, and those set aside; stale temporary files and empty folders
    are removed.

    Files and folders that vanish meanwhile, or that may not be read, are passed over.

    Args: allocated_bytes: sizes are rounded up to multiples of it.
    """

    def found(key: BlockKey | None, status: os.stat_result) -> Found:
        size = -(-status.st_size // allocated_bytes) * allocated_bytes
        return Found(key, size, status.st_mtime, max(status.st_atime, status.st_mtime))

    for shard in shards_of(root, digest):
        remove_stale(root, *shard)
        for name, status in folder_tree.files_in(root, *shard):
            if _HEX32.fullmatch(name):
                yield found(BlockKey(bytes.fromhex(name)), status)
        folder_tree.remove_empty(root, *shard)
    for _, status in folder_tree.files_in(root, digest.hex(), CORRUPT):
        yield found(None, status)


def shards_of(root: Path, digest: Digest) -> Iterator[tuple[str, str, str]]:
    """The folders for blocks of a namespace, as names from the root on."""
    name = digest.hex()
    for first in filter(_is_shard, folder_tree.folders_in(root, name)):
        for second in filter(_is_shard, folder_tree.folders_in(root, name, first)):
            yield name, first, second
        folder_tree.remove_empty(root, name, first)


def remove_empty_folders(root: Path, digest: Digest) -> None:
    """Those of a namespace, but for its own."""
    for shard in shards_of(root, digest):
        folder_tree.remove_empty(root, *shard)
    folder_tree.remove_empty(root, digest.hex(), CORRUPT)


def _is_shard(name: str) -> bool:
    return len(name) == 2


def remove_stale(root: Path, *names: str) -> tuple[int, set[str]]:
    """Remove what dead writers left in one folder; returns how many files, and whose (this_process)
    are left: they are being written."""
    removed, living = 0, set[str]()
    for name, status in folder_tree.files_in(root, *names):
        owner = tmp_owner(name)
        if owner is None:  # nobody's we know of: not ours to remove
            continue
        if is_stale(owner, status.st_mtime):
            with contextlib.suppress(OSError):
                folder_tree.remove_file(root, *names, name)
                removed += 1
        else:
            living.add(owner)
    return removed, living
