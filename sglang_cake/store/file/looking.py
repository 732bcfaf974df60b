"""What a folder of blocks holds, for who only looks: nothing is made, moved, changed or removed."""

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sglang_cake.keys import BlockKey, Digest
from sglang_cake.store.base import BlockInfo, StoredNamespace
from sglang_cake.store.file import sweep
from sglang_cake.store.file.description import read_description
from sglang_cake.store.file.index import State
from sglang_cake.store.file.ownership import INDEX
from sglang_cake.store.file.paths import NamespaceFolder
from sglang_cake.store.file.schema import check_ours, connect_to_read

_SHARD, _BLOCK = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{64}")
_QUERY = f"""SELECT key, stored_bytes, used_s FROM blocks WHERE state = {State.STORED}
AND namespace = (SELECT id FROM namespaces WHERE digest = ?)"""


def namespaces_in(root: Path) -> list[StoredNamespace]:
    """Every namespace that has a folder."""
    with contextlib.suppress(FileNotFoundError):
        return [
            StoredNamespace(digest, read_description(NamespaceFolder(root, digest).description))
            for digest in sweep.namespaces_in(root)
        ]
    return []


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
    """Raises: sqlite3.Error, OSError, ValueError for one that is absent, damaged or not ours."""
    if not index.stat().st_size:
        raise FileNotFoundError(index)
    check_ours(index)
    with contextlib.closing(connect_to_read(index)) as books:
        return [
            BlockInfo(BlockKey(bytes(key)), int(stored_bytes), float(used_s))
            for key, stored_bytes, used_s in books.execute(_QUERY, (digest,))
        ]


def _files(root: Path, digest: Digest) -> Iterator[BlockInfo]:
    above = root / digest.hex()
    for first in _folders(above):
        for second in _folders(first):
            for entry in os.scandir(second):
                if _BLOCK.fullmatch(entry.name):
                    with contextlib.suppress(OSError):  # evicted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        yield BlockInfo(
                            BlockKey(bytes.fromhex(entry.name)),
                            status.st_blocks * 512,
                            max(status.st_atime, status.st_mtime),
                        )


def _folders(above: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [
            Path(entry.path)
            for entry in os.scandir(above)
            if _SHARD.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []
