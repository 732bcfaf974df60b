"""What a folder of blocks holds, for who only looks: nothing is made, moved, changed or removed."""

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.base import BlockInfo, StoredNamespace, StoreStats
from sglang_cake.stores.file import folder_tree
from sglang_cake.stores.file.description import read_description
from sglang_cake.stores.file.evictor import overhead_bytes
from sglang_cake.stores.file.index import STORED_TOTALS, State
from sglang_cake.stores.file.ownership import INDEX
from sglang_cake.stores.file.schema import check_ours, connect_to_read

_SHARD, _BLOCK = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{64}")
_QUERY = f"""SELECT key, stored_bytes, used_s FROM blocks WHERE state = {State.STORED}
AND namespace = (SELECT id FROM namespaces WHERE digest = ?)"""


def namespaces_in(root: Path) -> list[StoredNamespace]:
    """Every namespace that has a folder."""
    return [
        StoredNamespace(Digest(bytes.fromhex(name)), _fields(root, Digest(bytes.fromhex(name))))
        for name in sorted(filter(_BLOCK.fullmatch, folder_tree.folders_in(root)))
    ]


def stats_in(root: Path) -> StoreStats:
    """Totals of all namespaces, as the index says; nothing if there is none to be read."""
    try:
        with _reading(root / INDEX) as books:
            (blocks, block_bytes), (taken_bytes,) = (
                books.execute(query).fetchone()
                for query in (STORED_TOTALS, "SELECT taken_bytes FROM total")
            )
    except (sqlite3.Error, OSError, ValueError, TypeError):
        return StoreStats()
    used_bytes = int(taken_bytes) + overhead_bytes(root)
    return StoreStats(blocks=int(blocks), block_bytes=int(block_bytes), used_bytes=used_bytes)


def blocks_in(root: Path, digest: Digest) -> Iterator[BlockInfo]:
    """The blocks of one namespace: as the index says or, if there is none to be read, as their
    files say."""
    try:
        found = _indexed(root / INDEX, digest)
    except (sqlite3.Error, OSError, ValueError):
        yield from _files(root, digest)
        return
    yield from found


def _indexed(index: Path, digest: Digest) -> list[BlockInfo]:
    """Raises: as `_reading`; ValueError."""
    with _reading(index) as books:
        return [
            BlockInfo(BlockKey(bytes(key)), int(stored_bytes), float(used_s))
            for key, stored_bytes, used_s in books.execute(_QUERY, (digest,))
        ]


@contextlib.contextmanager
def _reading(index: Path) -> Iterator[sqlite3.Connection]:
    """Raises: sqlite3.Error, OSError for one that is absent, damaged or not ours."""
    if not index.stat().st_size:
        raise FileNotFoundError(index)
    check_ours(index)
    with contextlib.closing(connect_to_read(index)) as books:
        yield books


def _files(root: Path, digest: Digest) -> Iterator[BlockInfo]:
    name = digest.hex()
    for first in filter(_SHARD.fullmatch, folder_tree.folders_in(root, name)):
        for second in filter(_SHARD.fullmatch, folder_tree.folders_in(root, name, first)):
            for key, status in folder_tree.files_in(root, name, first, second):
                if _BLOCK.fullmatch(key):
                    yield BlockInfo(
                        BlockKey(bytes.fromhex(key)),
                        status.st_blocks * 512,
                        max(status.st_atime, status.st_mtime),
                    )


def _fields(root: Path, digest: Digest) -> dict[str, str]:
    with contextlib.suppress(OSError, StoreUnavailable):  # it may not be entered
        return read_description(root, digest) or {}
    return {}
