"""The books of a folder of blocks: what is there, how much room it takes, when it was used.

One SQLite file, shared by all processes that have the folder open. It is the authority for how
much room is taken; what a block holds is for the block's own header and checksum to say. Order of
effects, so that a crash never makes the books too small: a block is booked before its file is
begun, and its file is removed before its booking is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from math import isfinite
from sys import intern
from typing import NamedTuple

from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.eviction import AccessContext, ReuseFit, ReuseFits, Usage, ident_of
from sglang_cake.stores.file.namespace_rows import (
    NamespaceRows,
    NoRoom,
    check_room,
    count_of,
    open_namespace,
)
from sglang_cake.stores.file.paths import this_process
from sglang_cake.stores.file.schema import DamagedIndexError

_SET_CONTEXT = "".join(f", {name} = ?" for name in AccessContext._fields)
_NAMESPACE = "namespace = (SELECT id FROM namespaces WHERE digest = ?)"
FOUND_AT_ONCE = (
    10_000  # files booked in one transaction: others get in between, the log stays short
)


class State(IntEnum):
    WRITING = 0
    STORED = 1
    ASIDE = 2  # corrupt, kept for inspection


# The other states are few, and have an index.
STORED_TOTALS = f"""SELECT
    (SELECT coalesce(sum(blocks), 0) FROM namespaces) - count(*),
    (SELECT coalesce(sum(used_bytes), 0) FROM namespaces) - coalesce(sum(stored_bytes), 0)
FROM blocks WHERE state != {State.STORED}"""


class Booking(NamedTuple):
    """Room that was booked for a block. The id alone would not do: an index that is made anew, of
    which this process has not heard yet, gives it to somebody else's block."""

    id: int
    namespace: Digest
    key: BlockKey


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
    context: AccessContext | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a reservation found."""

    booking: Booking | None = None  # None: there already, or no room
    short_bytes: int = 0  # how much room is missing


class Found(NamedTuple):
    """A file that was found on the disk."""

    key: BlockKey | None  # None: set aside
    stored_bytes: int
    changed_s: float
    used_s: float


class BlockIndex(NamespaceRows):
    """Blocking and thread-safe; every method raises sqlite3.Error when the file is damaged, gone
    or busy for longer than BUSY_S."""

    def contains(self, digest: Digest, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of `keys` are stored."""
        found = set[object]()
        for start in range(0, len(keys), 500):
            some = keys[start : start + 500]
            rows = self._ask(
                f"SELECT key FROM blocks WHERE {_NAMESPACE} AND state = {State.STORED} "
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
    ) -> Reserved:
        """Book a block that is about to be written, if it is not there and the room is.

        Args: own_bytes: what its namespace takes beside its blocks.
        """
        try:
            with self._transaction() as books:
                namespace = open_namespace(books, digest, own_bytes)
                there = "SELECT 1 FROM blocks WHERE namespace = ? AND key = ?"
                if books.execute(there, (namespace, key)).fetchone():
                    return Reserved()
                cursor = books.execute(
                    "INSERT INTO blocks "
                    "(namespace, key, state, stored_bytes, owner, created_s, used_s, "
                    f"{', '.join(AccessContext._fields)}) "
                    f"VALUES (?, ?, {State.WRITING}, ?, ?, ?, ?{', ?' * len(usage.context)})",
                    (
                        *(namespace, key, usage.stored_bytes, this_process()),
                        *(usage.created_s, usage.used_s, *usage.context),
                    ),
                )
                check_room(books, limit_bytes)
                assert cursor.lastrowid is not None
                return Reserved(Booking(cursor.lastrowid, digest, key))
        except NoRoom as missing:
            return Reserved(short_bytes=int(missing.args[0]))

    def settle(self, booking: Booking | Booked, stored_bytes: int) -> int | None:
        """The booked block is stored; returns its id, which is another one if the index was made
        anew meanwhile and the file was found. None if its booking was taken away."""
        with self._transaction() as books:
            books.execute(
                f"UPDATE blocks SET state = {State.STORED}, owner = NULL, stored_bytes = ? "
                f"WHERE id = ? AND {_NAMESPACE} AND key = ?",
                (stored_bytes, *booking[:3]),
            )
            row = books.execute(
                f"SELECT id FROM blocks WHERE {_NAMESPACE} AND key = ? AND state = {State.STORED}",
                (booking.namespace, booking.key),
            ).fetchone()
            return None if row is None else int(row[0])

    def drop(self, booking: Booking | Booked) -> None:
        """Take a booking away: its file is gone, or was never finished."""
        with self._transaction() as books:
            books.execute(
                f"DELETE FROM blocks WHERE id = ? AND {_NAMESPACE} AND key = ?", booking[:3]
            )

    def forget(self, digest: Digest, key: BlockKey, is_gone: Callable[[], bool]) -> bool:
        """Take the booking of a stored block away if its file is gone; whether that was done."""
        stored = f"{_NAMESPACE} AND key = ? AND state = {State.STORED}"
        if not self._ask(f"SELECT 1 FROM blocks WHERE {stored}", digest, key):
            return False
        with self._transaction() as books:
            # Here, where nobody else can book it: a file that is not there now stays away.
            gone = is_gone()
            if gone:
                books.execute(f"DELETE FROM blocks WHERE {stored}", (digest, key))
            return gone

    def set_aside(self, digest: Digest, key: BlockKey) -> None:
        """The block's file lies elsewhere, for inspection; its room stays booked."""
        with self._transaction() as books:
            books.execute(
                f"UPDATE blocks SET state = {State.ASIDE}, key = NULL "
                f"WHERE {_NAMESPACE} AND key = ? AND state = {State.STORED}",
                (digest, key),
            )

    def with_aside(self) -> list[tuple[Digest, int]]:
        """The namespaces of which files were set aside, and how many bytes these are."""
        rows = self._ask(
            "SELECT digest, sum(stored_bytes) FROM blocks JOIN namespaces ON namespaces.id = "
            f"namespace WHERE state = {State.ASIDE} GROUP BY digest"
        )
        return [(Digest(digest), count_of(stored_bytes)) for digest, stored_bytes in rows]

    def drop_aside(self, digest: Digest) -> None:
        """The files of a namespace that were set aside are gone."""
        with self._transaction() as books:
            books.execute(
                f"DELETE FROM blocks WHERE {_NAMESPACE} AND state = {State.ASIDE}", (digest,)
            )

    def touch(self, touches: Iterable[Touch]) -> list[tuple[int, Touch]]:
        """Blocks were used; returns those that are there, by id, in the same order. What was used
        before it was stored is not meant."""
        there = []
        with self._transaction() as books:
            for touch in touches:
                facts = "" if touch.context is None else _SET_CONTEXT
                found = books.execute(
                    f"UPDATE blocks SET used_s = max(used_s, ?), uses = uses + ?{facts} "
                    f"WHERE {_NAMESPACE} AND key = ? AND created_s <= ? RETURNING id",
                    (
                        *(touch.at_s, touch.uses, *(touch.context or ())),
                        *(touch.namespace, touch.key, touch.at_s),
                    ),
                ).fetchone()
                if found is not None:
                    there.append((int(found[0]), touch))
        return there

    def find(self, block: int) -> Booked | None:
        """One stored block."""
        for found in self._booked(f"state = {State.STORED} AND blocks.id = ?", block):
            return found
        return None

    def last(self) -> int:
        """The largest id that there is."""
        rows = self._ask("SELECT max(id) FROM blocks")
        return count_of(rows[0][0] or 0)

    def stored(self, after: int, at_most: int) -> list[Booked]:
        """Stored blocks of all namespaces with an id above `after`, in that order."""
        return self._booked(
            f"state = {State.STORED} AND blocks.id > ? ORDER BY blocks.id LIMIT {at_most}", after
        )

    def stored_in(self, digest: Digest, after: int, at_most: int) -> list[Booked]:
        """Stored blocks of one namespace with an id above `after`, in that order."""
        return self._booked(
            f"state = {State.STORED} AND {_NAMESPACE} AND blocks.id > ? "
            f"ORDER BY blocks.id LIMIT {at_most}",
            digest,
            after,
        )

    def writing(self) -> list[Booked]:
        """Blocks that somebody writes, or was writing when he died."""
        return self._booked(f"state = {State.WRITING}")

    def _booked(self, where: str, *values: object) -> list[Booked]:
        rows = self._ask(
            "SELECT blocks.id, digest, key, coalesce(owner, ''), stored_bytes, created_s, used_s, "
            f"uses, {', '.join(AccessContext._fields)} "
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

    def totals(self) -> tuple[int, int]:
        """(blocks, booked bytes) of all namespaces."""
        rows = self._ask("SELECT blocks, taken_bytes FROM total")
        blocks, taken_bytes = rows[0] if rows else (None, None)
        return count_of(blocks), count_of(taken_bytes)

    def stored_totals(self) -> tuple[int, int]:
        """(blocks, their bytes) of all namespaces: only what is stored, as a list has it."""
        ((blocks, size_bytes),) = self._ask(STORED_TOTALS)
        return count_of(blocks), count_of(size_bytes)

    def check(self) -> None:
        """Look for damage, quickly. Raises: sqlite3.DatabaseError."""
        self._ask("SELECT count(*) FROM namespaces")
        self._ask("SELECT * FROM blocks ORDER BY id DESC LIMIT 1")

    def fits(self) -> ReuseFits:
        """What a policy learned."""
        rows = self._ask("SELECT workload, turn, was_read, share, rate_per_s, samples FROM fits")
        return {(w, t, r): ReuseFit(*fit) for w, t, r, *fit in rows if _is_fit(w, t, r, *fit)}

    def keep_fits(self, fits: ReuseFits) -> None:
        """In place of those that were kept before."""
        with self._transaction() as books:
            books.execute("DELETE FROM fits")
            rows = [
                (*request_class, fit.share, fit.rate_per_s, fit.samples)
                for request_class, fit in fits.items()
            ]
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
            for table in ("agreed", "blocks", "namespaces", "total"):
                books.execute(f"DELETE FROM {table}")
            books.execute("INSERT INTO total VALUES (1, 0, 0)")

    def found(self, digest: Digest, own_bytes: int, blocks: Iterable[Found]) -> None:
        """Book a namespace that was found on the disk, with what is in it."""
        files = iter(blocks)
        while True:
            some = list(islice(files, FOUND_AT_ONCE))  # the disk is looked at between transactions
            with self._transaction() as books:
                namespace = open_namespace(books, digest, own_bytes)
                # What somebody else booked meanwhile is booked.
                books.executemany(
                    "INSERT OR IGNORE INTO blocks "
                    "(namespace, key, state, stored_bytes, created_s, used_s) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        (
                            namespace,
                            block.key,
                            State.ASIDE if block.key is None else State.STORED,
                            block.stored_bytes,
                            block.changed_s,
                            block.used_s,
                        )
                        for block in some
                    ),
                )
            if len(some) < FOUND_AT_ONCE:
                return


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
