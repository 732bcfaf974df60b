"""The tables of a folder's books, and whether a file has them."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

SCHEMA_VERSION = 2
BUSY_S = 10.0  # how long one process waits for another's transaction, which take milliseconds
SCHEMA = """
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
    -- What the last request said that touched it (eviction.base.Use).
    workload TEXT NOT NULL DEFAULT '', turn INTEGER NOT NULL DEFAULT 1,
    position INTEGER NOT NULL DEFAULT 0, reach INTEGER NOT NULL DEFAULT 1,
    tenant INTEGER NOT NULL DEFAULT 0,
    UNIQUE (namespace, key)
);
CREATE TABLE IF NOT EXISTS agreed (boot TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS fits (  -- what the policy learned of each class (eviction.reuse.Fit)
    workload TEXT NOT NULL, turn INTEGER NOT NULL, was_read INTEGER NOT NULL,
    share REAL NOT NULL, rate_per_s REAL NOT NULL, samples INTEGER NOT NULL,
    PRIMARY KEY (workload, turn, was_read)
);
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


class DamagedIndexError(sqlite3.DatabaseError):
    """What is in the file was not written by us, or was damaged."""


class ForeignIndexError(sqlite3.DatabaseError):
    """The file is in order, and not ours: nothing in it is believed, or changed."""


_NAMES_1 = {"namespaces", "blocks", "agreed", "unsettled", "added", "removed", "resized"}


def check_ours(path: Path) -> None:
    """An index of this version, or one that is still to be made. Raises: sqlite3.Error.

    To the letter: with somebody else's views and triggers, what we ask might never end.
    """
    with readable_errors(), closing(connect_to_read(path)) as found:
        found.text_factory = any_text
        version = found.execute("PRAGMA user_version").fetchone()[0]
        schema = _schema(found)
    if version == 0 and not schema:
        return
    if version == 1 and {name for _, name, *_ in schema} == _NAMES_1:
        # Ours, and knew less: it is made anew from the files.
        raise DamagedIndexError(f"{path} is of an earlier version")
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(SCHEMA)
        ours = _schema(made)
    if version == 0 and schema < ours:
        # Who made it, before that was done at once, was killed in the middle.
        raise DamagedIndexError(f"{path} was never finished")
    if version != SCHEMA_VERSION:
        raise ForeignIndexError(f"{path} has version {version}: remove it")
    if schema != ours:
        raise ForeignIndexError(f"{path} is not an index of blocks: remove it")


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing but, beside a log, where SQLite notes who reads.

    Raises: sqlite3.Error.
    """
    # Without a log the file is all there is, and SQLite would make one even to read.
    immutable = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    url = f"file:{quote(str(path.absolute()))}?mode=ro{immutable}"
    return sqlite3.connect(url, uri=True, timeout=BUSY_S)


def any_text(text: bytes) -> str:
    """A `text_factory`: text in a damaged file need not be UTF-8, and then is no text of ours."""
    return text.decode(errors="replace")


@contextmanager
def readable_errors() -> Iterator[None]:
    """SQLite's message may quote a damaged file, and then Python cannot read the message."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DamagedIndexError(f"an error whose message is no text: {error.object!r}") from error


def _schema(books: sqlite3.Connection) -> set[tuple[str, ...]]:
    query = "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"
    return set(books.execute(query))
