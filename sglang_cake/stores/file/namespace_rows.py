"""The namespaces in a folder's books, and how much room all of them take."""

import sqlite3
from collections.abc import Callable

from sglang_cake.core.keys import Digest
from sglang_cake.stores.file.database import Database
from sglang_cake.stores.file.schema import DamagedIndexError


class NoRoom(Exception):
    """Has a transaction leave nothing."""


class NamespaceRows(Database):
    """As `BlockIndex`, which is one. Who writes makes a row; who asks makes none."""

    def reserve_namespace(self, digest: Digest, own_bytes: int, limit_bytes: int | None) -> int:
        """Book what a namespace takes beside its blocks; returns how much room is missing, 0 when
        it is booked."""
        try:
            with self._transaction() as books:
                open_namespace(books, digest, own_bytes)
                check_room(books, limit_bytes)
        except NoRoom as missing:
            return int(missing.args[0])
        return 0

    def unused(self) -> list[Digest]:
        """Namespaces without any block, the oldest first."""
        return [
            Digest(digest)
            for (digest,) in self._ask("SELECT digest FROM namespaces WHERE blocks = 0 ORDER BY id")
        ]

    def has_namespace(self, digest: Digest) -> bool:
        return bool(self._ask("SELECT 1 FROM namespaces WHERE digest = ?", digest))

    def forget_namespace(self, digest: Digest, remove: Callable[[], bool]) -> None:
        """Take a namespace without blocks out of the books, if its folder is gone.

        Args: remove: removes the folder, and says whether it is gone. Nobody books a block
            meanwhile.
        """
        with self._transaction() as books:
            used = "SELECT 1 FROM namespaces WHERE digest = ? AND blocks > 0"
            if not books.execute(used, (digest,)).fetchone() and remove():
                books.execute("DELETE FROM namespaces WHERE digest = ?", (digest,))

    def taken_bytes(self, digest: Digest) -> int:
        """What one namespace takes on the disk."""
        rows = self._ask("SELECT taken_bytes FROM namespaces WHERE digest = ?", digest)
        return count_of(rows[0][0]) if rows else 0


def open_namespace(books: sqlite3.Connection, digest: Digest, own_bytes: int) -> int:
    """The id of a namespace, which is booked if it was not."""
    books.execute(
        "INSERT OR IGNORE INTO namespaces (digest, own_bytes) VALUES (?, ?)", (digest, own_bytes)
    )
    found = books.execute("SELECT id FROM namespaces WHERE digest = ?", (digest,)).fetchone()
    return int(found[0])


def check_room(books: sqlite3.Connection, limit_bytes: int | None) -> None:
    """Raises: NoRoom, with how many bytes are booked too many."""
    if limit_bytes is not None:
        row = books.execute("SELECT taken_bytes FROM total").fetchone()
        short_bytes = count_of(row and row[0]) - limit_bytes
        if short_bytes > 0:
            raise NoRoom(short_bytes)


def count_of(value: object) -> int:
    """A number that is one. Raises: DamagedIndexError."""
    if isinstance(value, int) and value >= 0:
        return value
    raise DamagedIndexError("the totals make no sense")
