"""The books of a folder of blocks: what is there, how much room it takes, when it was used.

One SQLite file, shared by all processes that have the folder open. It is the authority for how
much room is taken; what a block holds is for the block's own header and checksum to say. Order of
effects, so that a crash never makes the books too small: a block is booked before its file is
begun, and its file is removed before its booking is.
"""

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from sglang_cake.keys import BlockKey, Digest
from sglang_cake.store.eviction import Fit, Fits, Usage, Use, ident_of
from sglang_cake.store.file.paths import create_private, this_process
from sglang_cake.store.file.schema import (
    BUSY_S,
    SCHEMA,
    SCHEMA_VERSION,
    DamagedIndexError,
    any_text,
    check_ours,
    readable_errors,
)

_SET_USE = "".join(f", {name} = ?" for name in Use._fields)
WAL_BYTES = 4 << 20  # the log is folded into the file when it is about as long


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


class Touch(NamedTuple):
    """A block was used: read, or part of a prompt."""

    namespace: Digest
    key: BlockKey
    at_s: float
    uses: int
    use: Use | None = None


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


class BlockIndex:
    """Blocking and thread-safe; every method raises sqlite3.Error when the file is damaged, gone
    or busy for longer than BUSY_S."""

    def __init__(self, path: Path) -> None:
        """Open it, and make it when it is not there. Raises: sqlite3.Error; OSError."""
        create_private(path)
        check_ours(path)
        self._path = path
        self.inode = path.stat().st_ino
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        with readable_errors():
            self._writer, self._reader = self._connect(), self._connect()
            try:  # at once, or not at all: half of it would be taken for another program's
                self._writer.executescript(
                    f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
            except BaseException:
                self.close()  # or it would keep others out
                raise
        self._namespaces: dict[Digest, int] = {}

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = any_text
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
        with self._write_lock, readable_errors():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")

    def _ask(self, sql: str, *values: object) -> list[Any]:
        with self._read_lock, readable_errors():
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

    def reserve(self, digest: Digest, key: BlockKey, usage: Usage, limit_bytes: int | None) -> Room:
        """Book a block that is about to be written, if it is not there and the room is."""
        name, stored_bytes = self.namespace(digest), usage.stored_bytes
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
                "INSERT INTO blocks "
                "(namespace, key, state, stored_bytes, owner, created_s, used_s, "
                f"{', '.join(Use._fields)}) "
                f"VALUES (?, ?, {State.WRITING}, ?, ?, ?, ?{', ?' * len(usage.use)})",
                (
                    *(name, key, stored_bytes, this_process()),
                    *(usage.created_s, usage.used_s, *usage.use),
                ),
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

    def touch(self, touches: Iterable[Touch]) -> list[tuple[int, Touch]]:
        """Blocks were used; returns those that are there, by id, in the same order. What was used
        before it was stored is not meant."""
        rows = [(touch, self.namespace(touch.namespace)) for touch in touches]
        there = []
        with self._transaction() as books:
            for touch, name in rows:
                facts = "" if touch.use is None else _SET_USE
                found = books.execute(
                    f"UPDATE blocks SET used_s = max(used_s, ?), uses = uses + ?{facts} "
                    "WHERE namespace = ? AND key = ? AND created_s <= ? RETURNING id",
                    (touch.at_s, touch.uses, *(touch.use or ()), name, touch.key, touch.at_s),
                ).fetchone()
                if found is not None:
                    there.append((int(found[0]), touch))
        return there

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
            f"uses, {', '.join(Use._fields)} "
            "FROM blocks JOIN namespaces ON namespaces.id = namespace WHERE " + where,
            *values,
        )
        if not all(map(_is_sound, rows)):  # SQLite itself takes any value in any column
            raise DamagedIndexError(f"{self._path}: a row of blocks makes no sense")
        return [
            Booked(
                block,
                digest,
                key,
                owner,
                Usage(size, created_s, used_s, uses, ident_of(key), Use(*use)),
            )
            for block, digest, key, owner, size, created_s, used_s, uses, *use in rows
        ]

    def totals(self, digest: Digest | None = None) -> tuple[int, int]:
        """(blocks, booked bytes) of one namespace, or of all."""
        ((blocks, used_bytes),) = self._ask(
            "SELECT coalesce(sum(blocks), 0), coalesce(sum(used_bytes + folder_bytes), 0) "
            "FROM namespaces WHERE digest = coalesce(?, digest)",
            digest,
        )
        return _count(blocks), _count(used_bytes)

    def check(self) -> None:
        """Look for damage, quickly. Raises: sqlite3.DatabaseError."""
        self._ask("SELECT count(*) FROM namespaces")
        self._ask("SELECT * FROM blocks ORDER BY id DESC LIMIT 1")

    def fits(self) -> Fits:
        """What a policy learned."""
        rows = self._ask("SELECT workload, turn, was_read, share, rate_per_s, samples FROM fits")
        return {(w, t, r): Fit(*fit) for w, t, r, *fit in rows if _is_fit(w, t, r, *fit)}

    def keep_fits(self, fits: Fits) -> None:
        """In place of those that were kept before."""
        with self._transaction() as books:
            books.execute("DELETE FROM fits")
            rows = [(*kind, fit.share, fit.rate_per_s, fit.samples) for kind, fit in fits.items()]
            books.executemany("INSERT INTO fits VALUES (?, ?, ?, ?, ?, ?)", rows)

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
    _, digest, key, owner, size, created_s, used_s, uses, workload, *use = row
    names = all(isinstance(name, bytes) and len(name) == 32 for name in (digest, key))
    times = all(isinstance(n, int | float) and isfinite(n) for n in (created_s, used_s))
    counts = all(isinstance(n, int) and n >= 0 for n in (size, uses, *use))
    return names and times and counts and isinstance(owner, str) and isinstance(workload, str)


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


def _used_bytes(books: sqlite3.Connection) -> int:
    (used_bytes,) = books.execute(
        "SELECT coalesce(sum(used_bytes + folder_bytes), 0) FROM namespaces"
    ).fetchone()
    return _count(used_bytes)


def _count(value: object) -> int:
    if isinstance(value, int) and value >= 0:
        return value
    raise DamagedIndexError("the totals make no sense")
