"""The index of a file store: which blocks are stored, their size, and when they were used.

One SQLite file, shared by all processes that have the store open. The index decides how much space
is taken. The content of a block is checked by its own header and checksum. The order of operations
ensures that a crash never leaves a file without a row: a block is inserted before its file is
created, and its file is removed before its row. The row of a file that is set aside is inserted
before the file is moved.

Only SQLite opens an existing file. Its locks are POSIX locks: a process that closes a descriptor of
the file loses all of them, and the next process that closes the index removes the log in use.
"""

import errno
import os
import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from enum import IntEnum
from itertools import islice
from math import isfinite
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple
from urllib.parse import quote

from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.base import StoreStats
from sglang_cake.stores.eviction.policy import (
    UNKNOWN_CONTEXT,
    UNKNOWN_TENANT,
    AccessContext,
    Usage,
    ident_of,
)
from sglang_cake.stores.eviction.reuse_model import ReuseFit, ReuseFits
from sglang_cake.stores.file.block_files import DAMAGED, INDEX, this_process
from sglang_cake.stores.file.disk import ENTRY_BYTES, FOLDER_BYTES, Amount
from sglang_cake.stores.file.nofollow import make_private

APPLICATION_ID = 0x63616B65  # "cake"
SCHEMA_VERSION = 3
BUSY_S = 10.0  # limit for waiting for the transaction of another process; these take milliseconds
WAL_BYTES = 4 << 20  # size at which SQLite folds its log into the file
MAX_PUT_ASIDE = 8  # damaged indexes that are kept
SMALL_FILES_BYTES = 128 << 10  # of other files in the root: locks, descriptions being written
_SUFFIXES = ("-wal", "-shm", "")  # of the files of an index
# Upper bound for the folders of `blocks` blocks: each block may need two folders of its own, and
# has one entry.
_FOLDERS = f"{FOLDER_BYTES} * (min(blocks, 256) + min(blocks, 65536)) + {ENTRY_BYTES} * blocks"
# Part of the format, comments included: `check_ours` compares the text. Where it says
# `eviction.base.Use` and `eviction.reuse.Fit`, the classes are `AccessContext` and `ReuseFit`.
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS namespaces (
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE,
    own_bytes INTEGER NOT NULL,  -- its folder and its description
    blocks INTEGER NOT NULL DEFAULT 0, used_bytes INTEGER NOT NULL DEFAULT 0,
    taken_bytes INTEGER NOT NULL AS (own_bytes + used_bytes + {_FOLDERS})
);
CREATE TABLE IF NOT EXISTS blocks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again, so that new ones are the larger
    namespace INTEGER NOT NULL REFERENCES namespaces(id),
    key BLOB,                  -- NULL when the file was set aside
    state INTEGER NOT NULL,    -- State
    stored_bytes INTEGER NOT NULL,  -- that the file takes, or may come to take, on the disk
    owner TEXT,                -- the process that writes it
    created_s REAL NOT NULL, used_s REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0,
    -- What the last request said that touched it (eviction.base.Use).
    workload TEXT NOT NULL DEFAULT '', turn INTEGER NOT NULL DEFAULT 1,
    position INTEGER NOT NULL DEFAULT 0, reach INTEGER NOT NULL DEFAULT 1,
    tenant INTEGER NOT NULL DEFAULT 0,
    UNIQUE (namespace, key)
);
CREATE TABLE IF NOT EXISTS total (  -- over all namespaces, in one row
    id INTEGER PRIMARY KEY, blocks INTEGER NOT NULL, taken_bytes INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS agreed (boot TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS fits (  -- what the policy learned of each class (eviction.reuse.Fit)
    workload TEXT NOT NULL, turn INTEGER NOT NULL, was_read INTEGER NOT NULL,
    share REAL NOT NULL, rate_per_s REAL NOT NULL, samples INTEGER NOT NULL,
    PRIMARY KEY (workload, turn, was_read)
);
CREATE INDEX IF NOT EXISTS unsettled ON blocks (state) WHERE state != 1;
CREATE INDEX IF NOT EXISTS unused ON namespaces (id) WHERE blocks = 0;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON blocks BEGIN
    UPDATE namespaces SET blocks = blocks + 1, used_bytes = used_bytes + NEW.stored_bytes
    WHERE id = NEW.namespace;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON blocks BEGIN
    UPDATE namespaces SET blocks = blocks - 1, used_bytes = used_bytes - OLD.stored_bytes
    WHERE id = OLD.namespace;
END;
CREATE TRIGGER IF NOT EXISTS resized AFTER UPDATE OF stored_bytes ON blocks BEGIN
    UPDATE namespaces SET used_bytes = used_bytes + NEW.stored_bytes - OLD.stored_bytes
    WHERE id = NEW.namespace;
END;
CREATE TRIGGER IF NOT EXISTS opened AFTER INSERT ON namespaces BEGIN
    UPDATE total SET blocks = blocks + NEW.blocks, taken_bytes = taken_bytes + NEW.taken_bytes;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE ON namespaces BEGIN
    UPDATE total SET blocks = blocks + NEW.blocks - OLD.blocks,
        taken_bytes = taken_bytes + NEW.taken_bytes - OLD.taken_bytes;
END;
CREATE TRIGGER IF NOT EXISTS closed AFTER DELETE ON namespaces BEGIN
    UPDATE total SET blocks = blocks - OLD.blocks, taken_bytes = taken_bytes - OLD.taken_bytes;
END;
"""
# Changes nothing in a complete index.
PREPARE = f"""
PRAGMA application_id = {APPLICATION_ID};
{SCHEMA}
INSERT OR IGNORE INTO total
    SELECT 1, coalesce(sum(blocks), 0), coalesce(sum(taken_bytes), 0) FROM namespaces;
PRAGMA user_version = {SCHEMA_VERSION};
"""


# ---- the file: whether it is ours, damaged ones, and bytes on the disk ----


class DamagedIndexError(sqlite3.DatabaseError):
    """The file is damaged, or was not written by this version."""


class ForeignIndexError(sqlite3.DatabaseError):
    """The file is a valid database of another program. It is neither used nor changed."""


_EARLIER = {"namespaces", "blocks", "agreed"}  # tables of versions without an application id


def check_ours(path: Path) -> None:
    """Check that a file is an index of this version, or empty. Raises: sqlite3.Error.

    Compared are the application id, the version, and the exact text of tables, views and triggers,
    since queries on unknown views or triggers might never end:

    - all three match: the index is used;
    - two match: DamagedIndexError, and the index is built again from the files;
    - an index of an earlier version: DamagedIndexError;
    - otherwise: ForeignIndexError, and the file is left alone.
    """
    with readable_errors(), closing(connect_to_read(path)) as found:
        found.text_factory = any_text
        found.execute("BEGIN")  # another process may be creating it
        application_id = found.execute("PRAGMA application_id").fetchone()[0]
        version = found.execute("PRAGMA user_version").fetchone()[0]
        tables = _tables(found)
    if version == 0 and not tables:
        return
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(SCHEMA)
        ours = _tables(made)
    matches = (application_id == APPLICATION_ID) + (version == SCHEMA_VERSION) + (tables == ours)
    if matches == 3:
        return
    if matches == 2:
        raise DamagedIndexError(f"{path} was damaged")
    if application_id == 0 and version in (1, 2) and {n for _, n, *_ in tables} >= _EARLIER:
        raise DamagedIndexError(f"{path} is of an earlier version")
    raise ForeignIndexError(f"{path} is not an index of this version: remove it")


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A read-only connection. If there is a log, SQLite records the reader in its shared memory.

    Raises: sqlite3.Error.
    """
    # Without a log the file is complete. SQLite would create a log even for reading.
    immutable = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    url = f"file:{quote(str(path.absolute()))}?mode=ro{immutable}"
    return sqlite3.connect(url, uri=True, timeout=BUSY_S)


def any_text(text: bytes) -> str:
    """A `text_factory` for damaged files, whose text may not be UTF-8."""
    return text.decode(errors="replace")


@contextmanager
def readable_errors() -> Iterator[None]:
    """A context for errors whose message quotes a damaged file and cannot be decoded."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DamagedIndexError(f"an error whose message is no text: {error.object!r}") from error


def _tables(db: sqlite3.Connection) -> set[tuple[str, ...]]:
    query = "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"
    return set(db.execute(query))


def put_aside(index: Path) -> Path:
    """Rename a damaged index; returns its new path. None is ever deleted.

    The log is renamed first, since SQLite would use it for the next index.

    Raises: OSError: also if `MAX_PUT_ASIDE` are kept.
    """
    aside = next((path for path in _asides(index) if not os.path.lexists(path)), None)
    if aside is None:
        raise FileExistsError(
            errno.EEXIST,
            f"{MAX_PUT_ASIDE} damaged indexes ({DAMAGED}*) are kept, and this one is damaged too: "
            "see to the disk, and move them away",
            str(index),
        )
    for suffix in _SUFFIXES:
        with suppress(FileNotFoundError):
            os.replace(f"{index}{suffix}", f"{aside}{suffix}")
    return aside


def _asides(index: Path) -> list[Path]:
    return [index.with_name(f"{DAMAGED}{number}") for number in range(1, MAX_PUT_ASIDE + 1)]


def overhead_bytes(root: Path) -> int:
    """Bytes of the files beside namespaces: the index with its largest log, and small files."""
    index = root / INDEX
    aside_bytes = sum(
        _disk_bytes(f"{aside}{suffix}") for aside in _asides(index) for suffix in _SUFFIXES
    )
    log_bytes = max(_disk_bytes(f"{index}-wal"), WAL_BYTES)
    index_bytes = _disk_bytes(f"{index}") + log_bytes + _disk_bytes(f"{index}-shm")
    return index_bytes + aside_bytes + SMALL_FILES_BYTES


def _disk_bytes(path: str) -> int:
    with suppress(FileNotFoundError):
        return os.lstat(path).st_blocks * 512
    return 0


# ---- its rows ----


ROWS_AT_ONCE = 10_000  # of found files in one transaction, so that others wait briefly
_SET_CONTEXT = "".join(f", {name} = ?" for name in AccessContext._fields)
_HAS_CONTEXT = "".join(f" AND {name} = ?" for name in AccessContext._fields)
_NAMESPACE = "namespace = (SELECT id FROM namespaces WHERE digest = ?)"


class RowState(IntEnum):
    WRITING = 0
    STORED = 1
    ASIDE = 2  # corrupt, kept for inspection


# Rows in the other states are few, and have an index of their own. SQLite uses it for queries with
# this very condition, and for no others.
_UNSETTLED = f"state != {RowState.STORED}"
_STORED_TOTALS = f"""SELECT
    (SELECT coalesce(sum(blocks), 0) FROM namespaces) - count(*),
    (SELECT coalesce(sum(used_bytes), 0) FROM namespaces) - coalesce(sum(stored_bytes), 0)
FROM blocks WHERE {_UNSETTLED}"""


class IndexedBlock(NamedTuple):
    """A row of blocks.

    It is found again by id, namespace and key: another process may have replaced a damaged index,
    and a new index file counts its ids from the start.
    """

    id: int
    namespace: Digest
    key: BlockKey
    owner: str  # the process that writes it; empty for a stored block
    usage: Usage


class Touch(NamedTuple):
    """Accesses to a block: reads, or prompts with the block."""

    namespace: Digest
    key: BlockKey
    at_s: float
    uses: int
    context: AccessContext | None = None


class ScannedFile(NamedTuple):
    """A file that a scan found on the disk."""

    key: BlockKey | None  # None: a corrupt file that was set aside
    stored_bytes: int
    changed_s: float
    used_s: float


class IndexReader:
    """An index that is only read, as by tools, which change nothing. Blocking and thread-safe.

    Every method raises sqlite3.Error if the file is damaged, gone, or busy for longer than BUSY_S.
    """

    def __init__(self, path: Path) -> None:
        check_ours(path)
        self._path = path
        self._read_lock = threading.Lock()
        self._reader = self._connect()

    def _connect(self) -> sqlite3.Connection:
        return connect_to_read(self._path)

    def close(self) -> None:
        with self._read_lock:
            self._reader.close()

    def totals(self) -> tuple[int, int]:
        """(blocks, bytes on the disk) of all namespaces, reserved ones included."""
        rows = self._select("SELECT blocks, taken_bytes FROM total")
        blocks, taken_bytes = rows[0] if rows else (None, None)
        return _count(blocks), _count(taken_bytes)

    def stats(self) -> StoreStats:
        """Totals of all namespaces. Blocks that are being written count in `used_bytes` only."""
        ((blocks, block_bytes),) = self._select(_STORED_TOTALS)
        used_bytes = self.totals()[1] + overhead_bytes(self._path.parent)
        return StoreStats(_count(blocks), _count(block_bytes), used_bytes)

    def clean_boot_id(self) -> str:
        """Boot of the machine in which index and files were last known to match; "" if never."""
        rows = self._select("SELECT boot FROM agreed")
        return str(rows[0][0]) if rows else ""

    def stored_in(self, digest: Digest, after: bytes, at_most: int) -> list[IndexedBlock]:
        """Stored blocks of one namespace with a key above `after`, in that order."""
        return self._blocks(
            f"state = {RowState.STORED} AND {_NAMESPACE} AND key > ? ORDER BY key LIMIT {at_most}",
            digest,
            after,
        )

    def _select(self, sql: str, *values: object) -> list[Any]:
        with self._read_lock, readable_errors():
            return self._reader.execute(sql, values).fetchall()

    def _blocks(self, where: str, *values: object) -> list[IndexedBlock]:
        rows = self._select(
            "SELECT blocks.id, digest, key, coalesce(owner, ''), stored_bytes, created_s, used_s, "
            f"uses, {', '.join(AccessContext._fields)} "
            "FROM blocks JOIN namespaces ON namespaces.id = namespace WHERE " + where,
            *values,
        )
        if not all(map(_is_sound, rows)):  # SQLite accepts any type in any column
            raise DamagedIndexError(f"{self._path}: a row of blocks makes no sense")
        return [
            IndexedBlock(
                block,
                digest,
                key,
                owner,
                Usage(
                    size,
                    created_s,
                    used_s,
                    uses,
                    ident_of(key),
                    AccessContext(intern(workload), *context),
                ),
            )
            for block, digest, key, owner, size, created_s, used_s, uses, workload, *context in rows
        ]


class BlockIndex(IndexReader):
    """The open index. One connection writes, another one reads.

    Attributes:
        file: status of the file when it was opened, which tells it from others of its name.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Raises: sqlite3.Error; OSError."""
        make_private(path)
        with readable_errors():
            super().__init__(path)
            self.file = path.stat()
            self._write_lock = threading.Lock()
            self._writer = self._connect()
            try:  # in one transaction: a part of the tables would look like another program's
                self._writer.executescript(f"BEGIN IMMEDIATE; {PREPARE} COMMIT;")
            except BaseException:
                self.close()  # releases the lock of the file
                raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = any_text
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        # Freed pages are not overwritten, which some builds of SQLite do in the log.
        connection.execute("PRAGMA secure_delete = FAST")
        return connection

    def close(self) -> None:
        with self._write_lock:
            self._writer.close()
        super().close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock, readable_errors():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                if self._writer.in_transaction:  # the caller may have rolled it back
                    self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # SQLite rolls back itself after an I/O error
                    self._writer.execute("ROLLBACK")
                raise

    # ---- namespaces ----

    def reserve_namespace(self, digest: Digest, own_bytes: int, limit_bytes: int | None) -> Amount:
        """Reserve the space of a namespace without its blocks, unless some is missing, which is
        returned."""
        with self._transaction() as db:
            _namespace_id(db, digest, own_bytes)
            return _unless_over(db, limit_bytes)

    def unused(self) -> list[Digest]:
        """Namespaces without blocks, the oldest first."""
        rows = self._select("SELECT digest FROM namespaces WHERE blocks = 0 ORDER BY id")
        return [Digest(digest) for (digest,) in rows]

    def has_namespace(self, digest: Digest) -> bool:
        return bool(self._select("SELECT 1 FROM namespaces WHERE digest = ?", digest))

    def forget_namespace(self, digest: Digest, remove: Callable[[], bool]) -> None:
        """Remove the row of a namespace without blocks, if `remove` has removed its folder. That is
        called within the transaction, so that no process reserves a block meanwhile."""
        with self._transaction() as db:
            used = "SELECT 1 FROM namespaces WHERE digest = ? AND blocks > 0"
            if not db.execute(used, (digest,)).fetchone() and remove():
                db.execute("DELETE FROM namespaces WHERE digest = ?", (digest,))

    def taken_bytes(self, digest: Digest) -> int:
        """Bytes of one namespace on the disk."""
        rows = self._select("SELECT taken_bytes FROM namespaces WHERE digest = ?", digest)
        return _count(rows[0][0]) if rows else 0

    # ---- blocks ----

    def contains(self, digest: Digest, keys: Sequence[BlockKey]) -> list[bool]:
        found = set[object]()
        for start in range(0, len(keys), 500):
            some = keys[start : start + 500]
            rows = self._select(
                f"SELECT key FROM blocks WHERE {_NAMESPACE} AND state = {RowState.STORED} "
                f"AND key IN ({','.join('?' * len(some))})",
                digest,
                *some,
            )
            found.update(key for (key,) in rows)
        return [key in found for key in keys]

    def reserve(
        self,
        digest: Digest,
        own_bytes: int,
        key: BlockKey,
        usage: Usage,
        limit_bytes: int | None,
    ) -> tuple[IndexedBlock | None, Amount]:
        """Insert a block that will be written, unless it is there or space is missing.

        Args:
            own_bytes: bytes of its namespace without its blocks.
            limit_bytes: limit for all namespaces; None: no limit.

        Returns its row, or None, and the missing space.
        """
        owner = this_process()
        with self._transaction() as db:
            namespace = _namespace_id(db, digest, own_bytes)
            there = "SELECT 1 FROM blocks WHERE namespace = ? AND key = ?"
            if db.execute(there, (namespace, key)).fetchone():
                return None, Amount()
            cursor = db.execute(
                "INSERT INTO blocks "
                "(namespace, key, state, stored_bytes, owner, created_s, used_s, "
                f"{', '.join(AccessContext._fields)}) "
                f"VALUES (?, ?, {RowState.WRITING}, ?, ?, ?, ?{', ?' * len(usage.context)})",
                (
                    namespace,
                    key,
                    usage.stored_bytes,
                    owner,
                    usage.created_s,
                    usage.used_s,
                    *usage.context,
                ),
            )
            if missing := _unless_over(db, limit_bytes):
                return None, missing
            assert cursor.lastrowid is not None
            return IndexedBlock(cursor.lastrowid, digest, key, owner, usage), Amount()

    def commit(self, block: IndexedBlock) -> int | None:
        """Mark a block as stored; returns its id, a new one. None if its row was removed.

        So the ids of stored blocks are in the order in which they were stored, whichever process
        took longer to write. A reader of all ids up to one has missed no block that was stored
        before.
        """
        with self._transaction() as db:
            db.execute("UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'blocks'")
            db.execute(
                "UPDATE blocks SET id = (SELECT seq FROM sqlite_sequence WHERE name = 'blocks'), "
                f"state = {RowState.STORED}, owner = NULL "
                f"WHERE id = ? AND {_NAMESPACE} AND key = ?",
                (block.id, block.namespace, block.key),
            )
            row = db.execute(
                "SELECT id FROM blocks "
                f"WHERE {_NAMESPACE} AND key = ? AND state = {RowState.STORED}",
                (block.namespace, block.key),
            ).fetchone()
            return None if row is None else int(row[0])

    def drop(self, block: IndexedBlock) -> None:
        """Remove the row of a block whose file is gone, or was never finished."""
        with self._transaction() as db:
            db.execute(
                f"DELETE FROM blocks WHERE id = ? AND {_NAMESPACE} AND key = ?",
                (block.id, block.namespace, block.key),
            )

    def forget(self, digest: Digest, key: BlockKey, is_gone: Callable[[], bool]) -> bool:
        """Remove the row of a stored block if its file is gone; whether that was done."""
        stored = f"{_NAMESPACE} AND key = ? AND state = {RowState.STORED}"
        if not self._select(f"SELECT 1 FROM blocks WHERE {stored}", digest, key):
            return False
        with self._transaction() as db:
            # Within the transaction, so that no other process writes the file meanwhile.
            gone = is_gone()
            if gone:
                db.execute(f"DELETE FROM blocks WHERE {stored}", (digest, key))
            return gone

    def with_aside(self) -> list[tuple[Digest, int]]:
        """Namespaces with files that were set aside, and the bytes of these files."""
        rows = self._select(
            "SELECT digest, sum(stored_bytes) FROM blocks JOIN namespaces ON namespaces.id = "
            f"namespace WHERE state = {RowState.ASIDE} AND {_UNSETTLED} GROUP BY digest"
        )
        return [(Digest(digest), _count(stored_bytes)) for digest, stored_bytes in rows]

    def reserve_aside(self, digest: Digest, own_bytes: int, file: ScannedFile) -> int:
        """Insert the row of a corrupt file, before `move_aside`; returns its id.

        Args:
            own_bytes: as for `reserve`.
            file: without a key.
        """
        with self._transaction() as db:
            namespace = _namespace_id(db, digest, own_bytes)
            row = db.execute(_ADD_FOUND, _found_row(namespace, file)).lastrowid
            assert row is not None
            return row

    def move_aside(self, row: int, move: Callable[[], bool]) -> bool:
        """Whether `move` has moved the corrupt file of a row. Otherwise the row is removed.

        It is called within a transaction, and only if `clear_aside` has not removed the row.
        """
        aside = f"id = ? AND state = {RowState.ASIDE}"
        moved = False
        try:
            with self._transaction() as db:
                there = db.execute(f"SELECT 1 FROM blocks WHERE {aside}", (row,)).fetchone()
                moved = there is not None and move()
        finally:
            if not moved:
                with self._transaction() as db:
                    db.execute(f"DELETE FROM blocks WHERE {aside}", (row,))
        return moved

    def clear_aside(self, digest: Digest, remove: Callable[[], int | None]) -> int | None:
        """Remove the rows of a namespace's files that were set aside, with these files.

        Args:
            remove: removes the files; returns their number, or None if they are to stay. Called
                within the transaction: a file that is moved there meanwhile would lose its row.

        Returns what `remove` returned.
        """
        with self._transaction() as db:
            removed = remove()
            if removed is not None:
                db.execute(
                    "DELETE FROM blocks "
                    f"WHERE {_NAMESPACE} AND state = {RowState.ASIDE} AND {_UNSETTLED}",
                    (digest,),
                )
            return removed

    def touch(self, touches: Iterable[Touch]) -> list[tuple[int, Touch] | None]:
        """Record accesses; returns for each the id of its block, and what was recorded. None for a
        block that is not stored.

        Accesses before a block was stored are ignored, except for their context: a block without
        one was put by another process than the one that received the report, and gets it.
        """
        found: list[tuple[int, Touch] | None] = []
        with self._transaction() as db:
            for touch in touches:
                context = touch.context
                set_context = "" if context is None else _SET_CONTEXT
                row = db.execute(
                    f"UPDATE blocks SET used_s = max(used_s, ?), uses = uses + ?{set_context} "
                    f"WHERE {_NAMESPACE} AND key = ? AND created_s <= ? RETURNING id",
                    (
                        touch.at_s,
                        touch.uses,
                        *(context or ()),
                        touch.namespace,
                        touch.key,
                        touch.at_s,
                    ),
                ).fetchone()
                if row is None and context is not None:
                    row = db.execute(
                        f"UPDATE blocks SET {_SET_CONTEXT.removeprefix(', ')} "
                        f"WHERE {_NAMESPACE} AND key = ? AND created_s > ?{_HAS_CONTEXT} "
                        "RETURNING id",
                        (*context, touch.namespace, touch.key, touch.at_s, *UNKNOWN_CONTEXT),
                    ).fetchone()
                    touch = touch._replace(uses=0)
                found.append(None if row is None else (int(row[0]), touch))
        return found

    def limit_times(self, blocks: Iterable[int], now_s: float) -> None:
        """Set the times of blocks that are after `now_s` to `now_s`."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE blocks SET created_s = min(created_s, ?1), used_s = min(used_s, ?1) "
                "WHERE id = ?2",
                ((now_s, block) for block in blocks),
            )

    def find(self, block: int) -> IndexedBlock | None:
        """One stored block."""
        return next(iter(self.find_all([block])), None)

    def find_all(self, blocks: Sequence[int]) -> list[IndexedBlock]:
        """Those of some blocks that are stored."""
        some = f"blocks.id IN ({','.join('?' * len(blocks))})"
        return self._blocks(f"state = {RowState.STORED} AND {some}", *blocks)

    def last(self) -> int:
        """The largest id, or 0."""
        rows = self._select("SELECT max(id) FROM blocks")
        return _count(rows[0][0] or 0)

    def stored(self, after: int, at_most: int) -> list[IndexedBlock]:
        """Stored blocks of all namespaces with an id above `after`, in that order."""
        return self._blocks(
            f"state = {RowState.STORED} AND blocks.id > ? ORDER BY blocks.id LIMIT {at_most}", after
        )

    def sample(self, at_most: int) -> list[IndexedBlock]:
        """Random stored blocks, by id; all of them if one namespace has all, and few enough.

        By keys, which are hashes: neighbours by id were stored together, and ids of old blocks have
        gaps, so that a random id would mostly hit the same few.
        """
        rows = self._select("SELECT digest, blocks FROM namespaces WHERE blocks > 0")
        sizes = {digest: _count(blocks) for digest, blocks in rows}
        chosen = Counter(random.choices([*sizes], [*sizes.values()], k=at_most) if sizes else ())
        found: list[IndexedBlock] = []
        for digest, count in chosen.items():
            some = self.stored_in(digest, random.randbytes(32), count)
            found += some + self.stored_in(digest, b"", count - len(some))
        return sorted({block.id: block for block in found}.values())

    def writing(self) -> list[IndexedBlock]:
        """Blocks that a process is writing, or was writing when it ended."""
        return self._blocks(f"state = {RowState.WRITING} AND {_UNSETTLED}")

    def check(self) -> None:
        """Quick check for damage. Raises: sqlite3.DatabaseError."""
        ((agree,),) = self._select(
            "SELECT (SELECT blocks, taken_bytes FROM total) = "
            "(coalesce(sum(blocks), 0), coalesce(sum(taken_bytes), 0)) FROM namespaces"
        )
        if not agree:
            raise DamagedIndexError(f"{self._path}: the total is not that of its namespaces")
        self._select("SELECT * FROM blocks WHERE id = (SELECT max(id) FROM blocks)")

    def check_sums(self) -> None:
        """Check what namespaces take against all of their blocks.

        On a connection of its own, since others would wait: that takes 0.3 s per million blocks.
        Raises: sqlite3.DatabaseError.
        """
        with readable_errors(), closing(self._connect()) as db:
            ((agree,),) = db.execute(
                "SELECT (count(*), coalesce(sum(stored_bytes), 0)) = (SELECT "
                "coalesce(sum(blocks), 0), coalesce(sum(used_bytes), 0) FROM namespaces) "
                "FROM blocks"
            )
        if not agree:
            raise DamagedIndexError(f"{self._path}: namespaces do not take what their blocks take")

    def fits(self) -> ReuseFits:
        """Reuse statistics that were saved. Invalid rows are skipped."""
        rows = self._select("SELECT workload, turn, was_read, share, rate_per_s, samples FROM fits")
        return {(w, t, r): ReuseFit(*fit) for w, t, r, *fit in rows if _is_fit(w, t, r, *fit)}

    def save_fits(self, fits: ReuseFits) -> None:
        """Save reuse statistics, in place of the earlier ones."""
        with self._transaction() as db:
            db.execute("DELETE FROM fits")
            rows = ((*known, fit.share, fit.rate_per_s, fit.samples) for known, fit in fits.items())
            db.executemany("INSERT INTO fits VALUES (?, ?, ?, ?, ?, ?)", rows)

    def mark_clean(self, boot: str) -> None:
        """Index and files match, at least until the next boot."""
        with self._transaction() as db:
            db.execute("DELETE FROM agreed")
            db.execute("INSERT INTO agreed VALUES (?)", (boot,))

    def clear(self) -> None:
        """Remove all rows, except reuse statistics."""
        with self._transaction() as db:
            # Without the trigger, SQLite frees the pages of all blocks at once. With it, the log
            # would become as large as the index, for which a full disk has no room.
            ((removed,),) = db.execute("SELECT sql FROM sqlite_schema WHERE name = 'removed'")
            db.execute("DROP TRIGGER removed")
            for table in ("agreed", "blocks", "namespaces", "total"):
                db.execute(f"DELETE FROM {table}")
            db.execute(removed)
            db.execute("INSERT INTO total VALUES (1, 0, 0)")

    def add_found(self, digest: Digest, own_bytes: int, blocks: Iterable[ScannedFile]) -> None:
        """Insert a namespace that a scan found, with its blocks. Existing rows stay.

        The tenant of a found block is UNKNOWN_TENANT until a request reports the block.
        """
        files = iter(blocks)
        while True:
            some = list(islice(files, ROWS_AT_ONCE))  # reads the disk, so outside the transaction
            with self._transaction() as db:
                namespace = _namespace_id(db, digest, own_bytes)
                db.executemany(_ADD_FOUND, (_found_row(namespace, block) for block in some))
            if len(some) < ROWS_AT_ONCE:
                return


_ADD_FOUND = (
    "INSERT OR IGNORE INTO blocks "
    "(namespace, key, state, stored_bytes, created_s, used_s, tenant) VALUES (?, ?, ?, ?, ?, ?, ?)"
)


def _found_row(namespace: int, file: ScannedFile) -> tuple[object, ...]:
    """Values for `_ADD_FOUND`."""
    state = RowState.ASIDE if file.key is None else RowState.STORED
    times = (file.changed_s, file.used_s)
    return namespace, file.key, state, file.stored_bytes, *times, UNKNOWN_TENANT


def _namespace_id(db: sqlite3.Connection, digest: Digest, own_bytes: int) -> int:
    db.execute(
        "INSERT OR IGNORE INTO namespaces (digest, own_bytes) VALUES (?, ?)", (digest, own_bytes)
    )
    found = db.execute("SELECT id FROM namespaces WHERE digest = ?", (digest,)).fetchone()
    return int(found[0])


def _unless_over(db: sqlite3.Connection, limit_bytes: int | None) -> Amount:
    """Roll the transaction back if more than `limit_bytes` are taken; returns how much more."""
    if limit_bytes is None:
        return Amount()
    row = db.execute("SELECT taken_bytes FROM total").fetchone()
    missing = Amount(max(0, _count(row and row[0]) - limit_bytes))
    if missing:
        db.rollback()
    return missing


def _count(value: object) -> int:
    """`value`, which must be a count. Raises: DamagedIndexError."""
    if isinstance(value, int) and value >= 0:
        return value
    raise DamagedIndexError("the totals make no sense")


def _is_sound(row: Sequence[object]) -> bool:
    _, digest, key, owner, size, created_s, used_s, uses, *context = row
    workload, turn, position, reach, tenant = context
    names = all(isinstance(name, bytes) and len(name) == 32 for name in (digest, key))
    times = all(isinstance(n, int | float) and isfinite(n) for n in (created_s, used_s))
    counts = all(isinstance(n, int) and n >= 0 for n in (size, uses, turn, position, reach, tenant))
    texts = isinstance(owner, str) and isinstance(workload, str)
    return names and times and counts and texts and reach != 0  # benefits are divided by it


def _is_fit(
    workload: object, turn: object, read: object, share: object, rate: object, samples: object
) -> bool:
    return (
        isinstance(workload, str)
        and isinstance(turn, int)
        and isinstance(read, int)
        and isinstance(samples, int)
        and isinstance(share, float)
        and isinstance(rate, float)
        and 0 < share < 1
        and 0 < rate < 1e9
    )
