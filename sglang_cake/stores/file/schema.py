"""The tables of a folder's books, and whether a file has them."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from sglang_cake.stores.file.description import ENTRY_BYTES, FOLDER_BYTES

APPLICATION_ID = 0x63616B65  # "cake"
SCHEMA_VERSION = 3
BUSY_S = 10.0  # how long one process waits for another's transaction, which take milliseconds
# What the folders for `blocks` blocks take at most: one block needs two of them, which it may have
# to itself, and is an entry of one.
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
# Changes nothing in an index that has all of it.
PREPARE = f"""
PRAGMA application_id = {APPLICATION_ID};
{SCHEMA}
INSERT OR IGNORE INTO total
    SELECT 1, coalesce(sum(blocks), 0), coalesce(sum(taken_bytes), 0) FROM namespaces;
PRAGMA user_version = {SCHEMA_VERSION};
"""


class DamagedIndexError(sqlite3.DatabaseError):
    """What is in the file was not written by us, or was damaged."""


class ForeignIndexError(sqlite3.DatabaseError):
    """The file is in order, and not ours: nothing in it is believed, or changed."""


_EARLIER = {"namespaces", "blocks", "agreed"}  # which had no application id


def check_ours(path: Path) -> None:
    """An index of this version, or one that is still to be made. Raises: sqlite3.Error.

    To the letter: with somebody else's views and triggers, what we ask might never end. Three
    things say whose it is: the application id, the version and the tables. Of a file that was
    damaged in one place two still do: it is ours, and made anew. What fewer than two say is ours is
    somebody else's, or a later version's, and left alone.
    """
    with readable_errors(), closing(connect_to_read(path)) as found:
        found.text_factory = any_text
        application_id = found.execute("PRAGMA application_id").fetchone()[0]
        version = found.execute("PRAGMA user_version").fetchone()[0]
        tables = _tables(found)
    if version == 0 and not tables:
        return
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(SCHEMA)
        ours = _tables(made)
    agree = (application_id == APPLICATION_ID) + (version == SCHEMA_VERSION) + (tables == ours)
    if agree == 3:
        return
    if agree == 2:
        raise DamagedIndexError(f"{path} was damaged")
    if application_id == 0 and version in (1, 2) and {n for _, n, *_ in tables} >= _EARLIER:
        raise DamagedIndexError(f"{path} is of an earlier version")
    raise ForeignIndexError(f"{path} is not an index of this version: remove it")


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


def _tables(books: sqlite3.Connection) -> set[tuple[str, ...]]:
    query = "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"
    return set(books.execute(query))
