"""The books of a folder of blocks: what is there, how much room it takes, when it was used.

One SQLite file, shared by all processes that have the folder open. It is the authority for how
much room is taken; what a block holds is for the block's own header and checksum to say. Order of
effects, so that a crash never makes the books too small: a block is booked before its file is
begun, and its file is removed before its booking is.
"""

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from sglang_cake.keys import BlockKey, Digest
from sglang_cake.store.eviction import Usage, ident_of
from sglang_cake.store.file.paths import create_private, this_process

SCHEMA_VERSION = 1
BUSY_S = 10.0  # how long one process waits for another's transaction, which take milliseconds
WAL_BYTES = 4 << 20  # the log is folded into the file when it is about as long
_SCHEMA = """
CREATE TABLE IF NOT EXISTS namespaces (
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE,
    blocks INTEGER NOT NULL DEFAULT 0, used_bytes INTEGER NOT NULL DEFAULT 0,
    folder_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS blocks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again, so that new ones are the larger
    namespace INTEGER NOT NULL REFERENCES namespaces(id),
    key BLOB,                  -- NULL when the file was set aside
    state INTEGER NOT NULL,    -- State
    stored_bytes INTEGER NOT NULL,  -- that the file takes, or may come to take, on the disk
    owner TEXT,                -- the process that writes it
    created_s REAL NOT NULL, used_s REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0,
    UNIQUE (namespace, key)
);
CREATE TABLE IF NOT EXISTS agreed (boot TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS unsettled ON blocks (state) WHERE state != 1;
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
"""


class State(IntEnum):
    WRITING = 0
    STORED = 1
    ASIDE = 2  # corrupt, kept for inspection


class Booked(NamedTuple):
    """A block as the books have it."""

    id: int
    namespace: Digest
    key: BlockKey
    owner: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Room:
    """What a reservation found."""

    id: int | None = None  # of the booking; None: there already, or no room
    short_bytes: int = 0  # how much room is missing


class Found(NamedTuple):
    """A file that was found on the disk."""

    key: BlockKey | None  # None: set aside
    stored_bytes: int
    changed_s: float
    used_s: float


class DamagedIndexError(sqlite3.DatabaseError):
    """What is in the file was not written by us, or was damaged."""


class ForeignIndexError(sqlite3.DatabaseError):
    """The file is in order, and not ours: nothing in it is believed, or changed."""


class BlockIndex:
    """Blocking and thread-safe; every method raises sqlite3.Error when the file is damaged, gone
    or busy for longer than BUSY_S."""

    def __init__(self, path: Path) -> None:
        """Open it, and make it when it is not there. Raises: sqlite3.Error; OSError."""
        create_private(path)
        _check_ours(path)
        self._path = path
        self.inode = path.stat().st_ino
        self._writer, self._reader = self._connect(), self._connect()
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._writer.executescript(_SCHEMA + f"PRAGMA user_version = {SCHEMA_VERSION};")
        self._namespaces: dict[Digest, int] = {}

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        return connection

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            self._writer.close()
            self._reader.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")

    def _ask(self, sql: str, *values: object) -> list[Any]:
        with self._read_lock:
            return self._reader.execute(sql, values).fetchall()

    def namespace(self, digest: Digest) -> int:
        """The short name of a namespace, made if need be."""
        found = self._namespaces.get(digest)
        if found is None:
            with self._transaction() as books:
                books.execute("INSERT OR IGNORE INTO namespaces (digest) VALUES (?)", (digest,))
                (found,) = books.execute(
                    "SELECT id FROM namespaces WHERE digest = ?", (digest,)
                ).fetchone()
            self._namespaces[digest] = found
        return found

    def contains(self, digest: Digest, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of `keys` are stored."""
        name, found = self.namespace(digest), set[object]()
        for start in range(0, len(keys), 500):
            some = keys[start : start + 500]
            rows = self._ask(
                f"SELECT key FROM blocks WHERE namespace = ? AND state = {State.STORED} "
                f"AND key IN ({','.join('?' * len(some))})",
                name,
                *some,
            )
            found.update(key for (key,) in rows)
        return [key in found for key in keys]

    def reserve(
        self, digest: Digest, key: BlockKey, stored_bytes: int, limit_bytes: int | None
    ) -> Room:
        """Book a block that is about to be written, if it is not there and the room is."""
        name, now_s = self.namespace(digest), time.time()
        with self._transaction() as books:
            if books.execute(
                "SELECT 1 FROM blocks WHERE namespace = ? AND key = ?", (name, key)
            ).fetchone():
                return Room()
            if limit_bytes is not None:
                short_bytes = _used_bytes(books) + stored_bytes - limit_bytes
                if short_bytes > 0:
                    return Room(short_bytes=short_bytes)
            cursor = books.execute(
                "INSERT INTO blocks (namespace, key, state, stored_bytes, owner, created_s, used_s)"
                f" VALUES (?, ?, {State.WRITING}, ?, ?, ?, ?)",
                (name, key, stored_bytes, this_process(), now_s, now_s),
            )
            return Room(cursor.lastrowid)

    def settle(self, block: int, stored_bytes: int) -> bool:
        """The booked block is stored; False if its booking was taken away meanwhile."""
        with self._transaction() as books:
            return bool(
                books.execute(
                    f"UPDATE blocks SET state = {State.STORED}, owner = NULL, stored_bytes = ? "
                    "WHERE id = ?",
                    (stored_bytes, block),
                ).rowcount
            )

    def drop(self, block: int) -> None:
        """Take a booking away: its file is gone, or was never finished."""
        with self._transaction() as books:
            books.execute("DELETE FROM blocks WHERE id = ?", (block,))

    def forget(self, digest: Digest, key: BlockKey, path: Path) -> int | None:
        """Take the booking of a stored block away if its file is gone; returns which it was."""
        name = self.namespace(digest)
        with self._transaction() as books:
            row = books.execute(
                f"SELECT id FROM blocks WHERE namespace = ? AND key = ? AND state = {State.STORED}",
                (name, key),
            ).fetchone()
            # Here, where nobody else can book it: a file that is not there now stays away.
            if row is None or path.exists():
                return None
            books.execute("DELETE FROM blocks WHERE id = ?", row)
            return int(row[0])

    def set_aside(self, digest: Digest, key: BlockKey) -> None:
        """The block's file lies elsewhere, for inspection; its room stays booked."""
        name = self.namespace(digest)
        with self._transaction() as books:
            books.execute(
                f"UPDATE blocks SET state = {State.ASIDE}, key = NULL "
                f"WHERE namespace = ? AND key = ? AND state = {State.STORED}",
                (name, key),
            )

    def drop_aside(self, digest: Digest) -> None:
        """The files of a namespace that were set aside are gone."""
        name = self.namespace(digest)
        with self._transaction() as books:
            books.execute(
                f"DELETE FROM blocks WHERE namespace = ? AND state = {State.ASIDE}", (name,)
            )

    def add_folder(self, digest: Digest, stored_bytes: int) -> None:
        """A folder was made, which takes room of its own."""
        name = self.namespace(digest)
        with self._transaction() as books:
            books.execute(
                "UPDATE namespaces SET folder_bytes = folder_bytes + ? WHERE id = ?",
                (stored_bytes, name),
            )

    def touch(self, used: Iterable[tuple[Digest, BlockKey, float, int]]) -> None:
        """Blocks were read: (namespace, key, last time, how often)."""
        rows = [(at_s, uses, self.namespace(digest), key) for digest, key, at_s, uses in used]
        with self._transaction() as books:
            books.executemany(
                "UPDATE blocks SET used_s = max(used_s, ?), uses = uses + ? "
                "WHERE namespace = ? AND key = ?",
                rows,
            )

    def find(self, block: int) -> Booked | None:
        """One stored block."""
        for found in self._booked(f"state = {State.STORED} AND blocks.id = ?", block):
            return found
        return None

    def stored(self, after: int, at_most: int) -> list[Booked]:
        """Stored blocks of all namespaces with an id above `after`, in that order."""
        return self._booked(
            f"state = {State.STORED} AND blocks.id > ? ORDER BY blocks.id LIMIT {at_most}", after
        )

    def stored_in(self, digest: Digest, after: int, at_most: int) -> list[Booked]:
        """Stored blocks of one namespace with an id above `after`, in that order."""
        return self._booked(
            f"state = {State.STORED} AND namespace = ? AND blocks.id > ? "
            f"ORDER BY blocks.id LIMIT {at_most}",
            self.namespace(digest),
            after,
        )

    def writing(self) -> list[Booked]:
        """Blocks that somebody writes, or was writing when he died."""
        return self._booked(f"state = {State.WRITING}")

    def _booked(self, where: str, *values: object) -> list[Booked]:
        rows = self._ask(
            "SELECT blocks.id, digest, key, coalesce(owner, ''), stored_bytes, created_s, used_s, "
            "uses "
            "FROM blocks JOIN namespaces ON namespaces.id = namespace WHERE " + where,
            *values,
        )
        if not all(map(_is_sound, rows)):  # SQLite itself takes any value in any column
            raise DamagedIndexError(f"{self._path}: a row of blocks makes no sense")
        return [
            Booked(block, digest, key, owner, Usage(size, created_s, used_s, uses, ident_of(key)))
            for block, digest, key, owner, size, created_s, used_s, uses in rows
        ]

    def totals(self, digest: Digest | None = None) -> tuple[int, int]:
        """(blocks, booked bytes) of one namespace, or of all."""
        with self._read_lock:
            blocks, used_bytes = self._reader.execute(
                "SELECT coalesce(sum(blocks), 0), coalesce(sum(used_bytes + folder_bytes), 0) "
                "FROM namespaces WHERE digest = coalesce(?, digest)",
                (digest,),
            ).fetchone()
        return _count(blocks), _count(used_bytes)

    def check(self) -> None:
        """Look for damage, quickly. Raises: sqlite3.DatabaseError."""
        self._ask("SELECT count(*) FROM namespaces")
        self._ask("SELECT * FROM blocks ORDER BY id DESC LIMIT 1")

    def boot(self) -> str:
        """The boot of the machine at which the books were last known to agree with the disk; ""
        when they never were."""
        rows = self._ask("SELECT boot FROM agreed")
        return str(rows[0][0]) if rows else ""

    def agreed(self, boot: str) -> None:
        """The books agree with the disk from now on, until the machine loses its power."""
        with self._transaction() as books:
            books.execute("DELETE FROM agreed")
            books.execute("INSERT INTO agreed VALUES (?)", (boot,))

    def clear(self) -> None:
        """Begin anew."""
        with self._transaction() as books:
            books.execute("DELETE FROM agreed")
            books.execute("DELETE FROM blocks")
            books.execute("UPDATE namespaces SET blocks = 0, used_bytes = 0, folder_bytes = 0")

    def found(self, digest: Digest, blocks: Iterable[Found]) -> None:
        """Book what was found on the disk in one namespace."""
        name = self.namespace(digest)
        with self._transaction() as books:
            books.executemany(
                "INSERT INTO blocks (namespace, key, state, stored_bytes, created_s, used_s) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (
                        name,
                        block.key,
                        State.ASIDE if block.key is None else State.STORED,
                        block.stored_bytes,
                        block.changed_s,
                        block.used_s,
                    )
                    for block in blocks
                ),
            )


def _is_sound(row: Sequence[object]) -> bool:
    _, digest, key, owner, *numbers = row
    names = all(isinstance(name, bytes) and len(name) == 32 for name in (digest, key))
    return names and isinstance(owner, str) and all(isinstance(n, int | float) for n in numbers)


def _check_ours(path: Path) -> None:
    """An index of this version, or one that is still to be made. Raises: sqlite3.Error.

    To the letter: with somebody else's views and triggers, what we ask might never end.
    """
    with closing(sqlite3.connect(path, timeout=BUSY_S)) as found:
        version = found.execute("PRAGMA user_version").fetchone()[0]
        schema = _schema(found)
    if version == 0 and not schema:
        return
    if version != SCHEMA_VERSION:
        raise ForeignIndexError(f"{path} has version {version}: remove it")
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(_SCHEMA)
        if schema != _schema(made):
            raise ForeignIndexError(f"{path} is not an index of blocks: remove it")


def _schema(books: sqlite3.Connection) -> set[object]:
    query = "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"
    return set(books.execute(query))


def _used_bytes(books: sqlite3.Connection) -> int:
    (used_bytes,) = books.execute(
        "SELECT coalesce(sum(used_bytes + folder_bytes), 0) FROM namespaces"
    ).fetchone()
    return _count(used_bytes)


def _count(value: object) -> int:
    if isinstance(value, int) and value >= 0:
        return value
    raise DamagedIndexError("the totals make no sense")
