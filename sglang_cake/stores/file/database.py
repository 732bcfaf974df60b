"""The SQLite file of a folder's books: connections, transactions, questions."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_cake.stores.file.paths import open_private
from sglang_cake.stores.file.schema import BUSY_S, PREPARE, any_text, check_ours, readable_errors

WAL_BYTES = 4 << 20  # the log is folded into the file when it is about as long


class Database:
    """Blocking and thread-safe: one connection writes, another one reads beside it."""

    def __init__(self, path: Path) -> None:
        """Open it, and make it when it is not there. Raises: sqlite3.Error; OSError."""
        os.close(open_private(path))
        check_ours(path)
        self._path = path
        self.inode = path.stat().st_ino
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        with readable_errors():
            self._writer, self._reader = self._connect(), self._connect()
            try:  # at once, or not at all: half of it would be taken for another program's
                self._writer.executescript(f"BEGIN IMMEDIATE; {PREPARE} COMMIT;")
            except BaseException:
                self.close()  # or it would keep others out
                raise

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
