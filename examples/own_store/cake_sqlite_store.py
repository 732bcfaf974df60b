"""`--cake-store sqlite:///path/kv.db`: blocks in one SQLite database, as an example of a store."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from sglang_cake.codecs.frame import BlockFrame, IncomingBlock
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockMissing, ConfigError, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.base import BlockInfo, Store, StoredNamespace, StoreSource, StoreStats
from sglang_cake.stores.url import StoreUrl

SCHEMA = """
    CREATE TABLE IF NOT EXISTS namespaces (digest BLOB PRIMARY KEY, fields TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS blocks (
        namespace BLOB NOT NULL, key BLOB NOT NULL, framed BLOB NOT NULL,
        PRIMARY KEY (namespace, key)
    );
"""
Result = TypeVar("Result")


class SqliteStore(Store):
    """Implements `Store`. One thread owns the connection, so calls run one after another."""

    def __init__(self, path: Path, frame: BlockFrame) -> None:
        self._path = path
        self._frame = frame
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cake-sqlite")
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        query = "SELECT 1 FROM blocks WHERE namespace = ? AND key = ?"

        def work(db: sqlite3.Connection) -> list[bool]:
            found = (db.execute(query, (self._frame.digest, key)).fetchone() for key in keys)
            return [row is not None for row in found]

        return await self._run(work)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        query = "SELECT framed FROM blocks WHERE namespace = ? AND key = ?"
        row = await self._run(lambda db: db.execute(query, (self._frame.digest, key)).fetchone())
        if row is None:
            raise BlockMissing(key.hex())
        # Here and not in the thread: after a cancellation `out` is not ours any more.
        block = IncomingBlock(self._frame, key, out, progress)
        block.feed(row[0])  # checks the header; raises BlockCorrupt
        return block.finish()  # checks the payload

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        framed = self._frame.header(key, data.cast("B")) + bytes(data)
        insert = "INSERT OR IGNORE INTO blocks VALUES (?, ?, ?)"

        def work(db: sqlite3.Connection) -> bool:
            with db:  # one transaction: the whole block or nothing
                return db.execute(insert, (self._frame.digest, key, framed)).rowcount == 1

        return await self._run(work)

    async def delete(self, key: BlockKey) -> None:
        delete = "DELETE FROM blocks WHERE namespace = ? AND key = ?"

        def work(db: sqlite3.Connection) -> None:
            with db:
                db.execute(delete, (self._frame.digest, key))

        await self._run(work)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        query = "SELECT key, length(framed) FROM blocks WHERE namespace = ?"
        rows = await self._run(lambda db: db.execute(query, (self._frame.digest,)).fetchall())
        for key, stored_bytes in rows:
            yield BlockInfo(BlockKey(key), stored_bytes)

    async def stats(self) -> StoreStats:
        query = "SELECT count(*), total(length(framed)) FROM blocks"
        blocks, block_bytes = await self._run(lambda db: db.execute(query).fetchone())
        return StoreStats(blocks, int(block_bytes), self._path.stat().st_size)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True

        def work() -> None:
            if self._connection is not None:
                self._connection.close()

        await asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Raises: StoreUnavailable; SQLite's errors do not leave this class."""
        if self._closed:
            raise StoreUnavailable("the store is closed")

        def in_thread() -> Result:
            try:
                return work(self._connect())
            except sqlite3.Error as error:
                raise StoreUnavailable(f"{self._path}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, in_thread)

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.touch(mode=0o600)
            self._connection = sqlite3.connect(self._path, check_same_thread=False)
            self._connection.executescript(SCHEMA)
            fields = json.dumps(self._frame.namespace.describe())
            insert = "INSERT OR IGNORE INTO namespaces VALUES (?, ?)"
            with self._connection as db:
                db.execute(insert, (self._frame.digest, fields))
        return self._connection


class SqliteSource:
    """Implements `StoreSource`: what one URL says."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self) -> None:
        """Raises: ConfigError."""
        if not self._path.parent.is_dir():
            raise ConfigError(f"{self._path.parent} is no folder: create it")

    def open(self, frame: BlockFrame, *, depth: int) -> SqliteStore:
        return SqliteStore(self._path, frame)

    async def namespaces(self) -> list[StoredNamespace]:
        """For `sglang-cake store ls` and the other tools. Raises: StoreUnavailable."""

        def work() -> list[tuple[bytes, str]]:
            with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as db:
                return db.execute("SELECT digest, fields FROM namespaces").fetchall()

        try:
            rows = await asyncio.to_thread(work)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path}: {error}") from error
        return [StoredNamespace(Digest(digest), json.loads(fields)) for digest, fields in rows]


def parse(url: StoreUrl) -> StoreSource:
    """The entry point: `sqlite:///path/kv.db`, which has no options of its own."""
    path = Path(unquote(url.place))
    if not path.is_absolute():
        raise url.error("write the whole path of the database: sqlite:///path/kv.db")
    return SqliteSource(path)
