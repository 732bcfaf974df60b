"""The file of the index: its tables, whether a file is ours, damaged ones, and their bytes."""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from sglang_cake.stores.file.disk import ENTRY_BYTES, FOLDER_BYTES
from sglang_cake.stores.file.paths import DAMAGED, INDEX

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
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{index}{suffix}", f"{aside}{suffix}")
    return aside


def _aside_bytes(index: Path) -> int:
    """Bytes of damaged indexes on the disk."""
    taken_bytes = 0
    for aside in _asides(index):
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                taken_bytes += os.lstat(f"{aside}{suffix}").st_blocks * 512
    return taken_bytes


def _asides(index: Path) -> list[Path]:
    return [index.with_name(f"{DAMAGED}{number}") for number in range(1, MAX_PUT_ASIDE + 1)]


def overhead_bytes(root: Path) -> int:
    """Bytes of the files beside namespaces: the index with its largest log, and small files."""
    sizes = {"": 0, "-wal": 0, "-shm": 0}
    for suffix in sizes:
        with contextlib.suppress(FileNotFoundError):
            sizes[suffix] = os.lstat(root / f"{INDEX}{suffix}").st_blocks * 512
    index_bytes = sizes[""] + max(sizes["-wal"], WAL_BYTES) + sizes["-shm"]
    return index_bytes + _aside_bytes(root / INDEX) + SMALL_FILES_BYTES
