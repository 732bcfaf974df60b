"""A hostile index beside good blocks: what is read stays right, nothing hangs, and no other file is
touched. Writing may rest; where the index is plainly not ours it is made anew."""

import sqlite3
from contextlib import closing, suppress
from functools import partial

import pytest
from filestore import A, B, opened_store, put_a, read_a, waiting_for_the_index
from hostile import (
    SHORT_WAIT_S,
    anything,
    changes_of_bytes,
    folder_with_blocks,
    put_in_place,
    rewrite,
    use,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from polling import async_answer

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.file.index import APPLICATION_ID, SCHEMA_VERSION, BlockIndex
from sglang_cake.testing.store_contract import block_of, key_of, read

FEW = settings(max_examples=max(1, settings.default.max_examples * 3 // 10))
FILES = st.sampled_from(["index.db", "index.db-wal", "index.db-shm", "index.lock"])


@FEW
@given(st.lists(st.tuples(FILES, anything | changes_of_bytes()), min_size=1, max_size=3))
async def test_file_store_hostile_index_files_give_right_blocks_or_errors(damages):
    def damage(root, outside):
        for name, what in damages:
            path = root / name
            if callable(what):
                rewrite(path, what)
            else:
                put_in_place(path, outside, what)

    async with folder_with_blocks(damage) as root:
        await use(root)


VALUES = st.sampled_from(
    ["NULL", "''", "'text'", "x''", "x'00'", "-1", "9e999", "9223372036854775807", "1.5"]
)
CHANGES = st.one_of(
    st.tuples(
        st.sampled_from(["key", "state", "stored_bytes", "owner", "created_s", "used_s", "uses"]),
        VALUES,
    ).map(lambda change: "UPDATE blocks SET {} = {} WHERE id = 2".format(*change)),
    st.tuples(st.sampled_from(["digest", "blocks", "used_bytes", "own_bytes"]), VALUES).map(
        lambda change: "UPDATE OR IGNORE namespaces SET {} = {}".format(*change)
    ),
    st.just("DELETE FROM namespaces"),
    VALUES.map(lambda value: f"INSERT INTO agreed VALUES (coalesce({value}, 0))"),
    VALUES.map(lambda value: f"UPDATE agreed SET boot = coalesce({value}, 0)"),
)


@FEW
@given(st.lists(CHANGES, min_size=1, max_size=3))
async def test_file_store_hostile_index_rows_give_right_blocks_or_errors(changes):
    def damage(root, outside):
        with closing(sqlite3.connect(root / "index.db")) as index, index:
            for change in changes:
                with suppress(sqlite3.IntegrityError):
                    index.execute(change)

    async with folder_with_blocks(damage) as root:
        await use(root)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
FOREIGN = {
    "another program's": "CREATE TABLE blocks (name TEXT); INSERT INTO blocks VALUES ('theirs')",
    "another program's, of our version": (
        f"CREATE TABLE notes (t TEXT); PRAGMA user_version = {SCHEMA_VERSION}"
    ),
    "another program's, of an earlier version": (
        "CREATE TABLE notes (t TEXT); PRAGMA user_version = 1"
    ),
    "a later version": (
        f"PRAGMA application_id = {APPLICATION_ID}; CREATE TABLE blocks (key BLOB);"
        f"PRAGMA user_version = {SCHEMA_VERSION + 1}"
    ),
    "a view that never ends": (
        f"CREATE VIEW blocks AS {ENDLESS}; PRAGMA user_version = {SCHEMA_VERSION}"
    ),
}


@pytest.mark.parametrize("script", FOREIGN)
async def test_file_store_foreign_index_is_kept_and_blocks_are_read(tmp_path, script, caplog):
    async with opened_store(tmp_path) as store:
        await put_a(store)
    index = tmp_path / "index.db"
    for path in tmp_path.glob("index.db*"):
        path.unlink()
    with closing(sqlite3.connect(index)) as made:
        made.executescript(FOREIGN[script])
    before = index.read_bytes()
    with waiting_for_the_index(SHORT_WAIT_S):
        async with opened_store(tmp_path) as store:
            assert await store.contains([A, B]) == [True, False]
            assert await read_a(store) == block_of("a")
            with pytest.raises(StoreUnavailable):
                await store.put(B, block_of("b"))
    assert index.read_bytes() == before
    assert f"{index} " in caplog.text
    assert "remove it" in caplog.text


class Failing(sqlite3.Connection):
    """Fails at the end of what creates the tables."""

    def executescript(self, script):
        return super().executescript(script.replace("COMMIT", "CREATE TABLE this is no SQL"))


def test_index_creation_that_fails_leaves_no_tables(tmp_path, monkeypatch):
    path, connect = tmp_path / "index.db", sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(connect, factory=Failing))
        with pytest.raises(sqlite3.Error):
            BlockIndex(path)
    with closing(sqlite3.connect(path)) as found:
        assert found.execute("SELECT name FROM sqlite_schema").fetchall() == []
    BlockIndex(path).close()


class RolledBack(sqlite3.Connection):
    """Fails as on a disk with errors: SQLite rolls the transaction back itself."""

    failing = ""

    def execute(self, sql, *values):
        if self.failing and sql.startswith(self.failing):
            super().execute("ROLLBACK")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return super().execute(sql, *values)


@pytest.mark.parametrize("statement", ["DELETE FROM fits", "COMMIT"])
def test_index_transaction_that_sqlite_rolled_back_raises_its_cause(
    tmp_path, monkeypatch, statement
):
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=RolledBack))
    with closing(BlockIndex(tmp_path / "index.db")) as index:
        with monkeypatch.context() as patch:
            patch.setattr(RolledBack, "failing", statement)
            with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
                index.save_fits({})
        index.save_fits({})


class FullAtTheEnd(sqlite3.Connection):
    """Cannot commit, and leaves the transaction open."""

    is_full = False

    def execute(self, sql, *values):
        if self.is_full and sql == "COMMIT":
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, *values)


def test_index_commit_that_fails_leaves_no_open_transaction(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=FullAtTheEnd))
    with closing(BlockIndex(tmp_path / "index.db")) as index:
        with monkeypatch.context() as patch:
            patch.setattr(FullAtTheEnd, "is_full", True)
            with pytest.raises(sqlite3.OperationalError, match="is full"):
                index.mark_clean("boot")
        assert index.clean_boot_id() == ""
        index.save_fits({})


DAMAGE = {
    "a schema that is no text, so that SQLite's message is none": b"CREATE TABLE blocks",
    "a comment in the schema that is no text": b"never used again",
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE)
async def test_index_schema_with_invalid_text_is_rebuilt(tmp_path, text, caplog):
    async with opened_store(tmp_path) as store:
        await put_a(store)
    rewrite(
        tmp_path / "index.db", lambda bytes_: bytes_.replace(text, text[:2] + b"\xdc" + text[3:])
    )
    await is_made_anew(tmp_path, caplog)


async def is_made_anew(tmp_path, caplog):
    async with opened_store(tmp_path) as store:
        assert await read_a(store) == block_of("a")
        await store.put(B, block_of("b"))
        assert await store.contains([A, B]) == [True, True]
    assert "beginning anew" in caplog.text


OURS_BUT_FOR = {
    "a trigger of its own": f"CREATE TRIGGER t DELETE ON blocks BEGIN {ENDLESS}; END",
    "the version": f"PRAGMA user_version = {SCHEMA_VERSION + 256}",
    "the application id": f"PRAGMA application_id = {APPLICATION_ID + 256}",
}


@pytest.mark.parametrize("script", OURS_BUT_FOR.values(), ids=OURS_BUT_FOR)
async def test_index_with_one_foreign_mark_is_rebuilt(tmp_path, script, caplog):
    async with opened_store(tmp_path) as store:
        await put_a(store)
    with closing(sqlite3.connect(tmp_path / "index.db")) as index:
        index.executescript(script)
    await is_made_anew(tmp_path, caplog)


@FEW
@example(18, 0)  # the version that SQLite writes: it takes others for read-only
@example(20, 0)  # bytes at the end of each page that SQLite leaves free: the first write fails
@example(2750, 5)  # an index of the database: puts fail with SQLITE_CORRUPT_INDEX
@given(st.integers(0, 4095), st.integers(0, 7))
async def test_index_flipped_bit_in_its_first_page_still_allows_puts(at, bit):
    """Damage that opening the index does not find fails the first call that meets it."""

    def damage(root, outside):
        def flip(raw):
            return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]

        rewrite(root / "index.db", flip)

    async with folder_with_blocks(damage) as root:
        with waiting_for_the_index(60.0):  # it is made anew
            async with opened_store(root) as store:
                await async_answer(lambda: store.put(key_of("new"), block_of("new")))
                assert await read(store, key_of("new")) == block_of("new")


async def test_index_row_with_invalid_text_still_allows_reads_and_puts(tmp_path):
    async with opened_store(tmp_path) as store:
        await put_a(store)
        with closing(sqlite3.connect(tmp_path / "index.db")) as index, index:
            index.execute("UPDATE blocks SET workload = CAST(x'dcdc' AS TEXT)")
            index.execute("UPDATE agreed SET boot = CAST(x'dcdc' AS TEXT)")
    async with opened_store(tmp_path) as store:
        assert await read_a(store) == block_of("a")
        await store.put(B, block_of("b"))
        assert await store.contains([A, B]) == [True, True]


async def test_index_damage_found_in_use_is_rebuilt(tmp_path):
    async with opened_store(tmp_path) as store:
        await put_a(store)
        with closing(sqlite3.connect(tmp_path / "index.db")) as index, index:
            index.execute("UPDATE blocks SET uses = 'often'")

        async def put_and_list():
            await store.put(B, block_of("b"))
            return {block.key async for block in store.list_blocks()} == {A, B}

        await async_answer(put_and_list)
        assert await read_a(store) == block_of("a")


@pytest.mark.parametrize("name", ["index.db", "index.lock"])
@pytest.mark.parametrize("there", [False, True])
async def test_index_that_is_a_symlink_is_not_followed(tmp_path, name, there):
    root, target = tmp_path / "kv", tmp_path / "elsewhere"
    async with opened_store(root) as store:
        await put_a(store)
    if there:
        (root / name).rename(target)
    for path in root.glob("index.*"):
        path.unlink()
    (root / name).symlink_to(target)
    before = target.read_bytes() if there else None
    with waiting_for_the_index(SHORT_WAIT_S):
        async with opened_store(root) as store:
            assert await read_a(store) == block_of("a")
            with pytest.raises(StoreUnavailable):
                await store.put(B, block_of("b"))
    assert target.exists() == there
    assert there is False or target.read_bytes() == before
