"""Folders that are somebody else's, and indexes that are damaged: nothing is lost of either."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from filestore import opened_store, put_a, read_a, waiting_for_the_index
from storetools import ALICE, file_of, fill, held, store, told, url_of

from sglang_cake.cli import main
from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.stores.file.index import MAX_PUT_ASIDE
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import block_of


@pytest.fixture(autouse=True)
def _own_config(monkeypatch, tmp_path_factory):
    """Where `store serve` makes its token."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


def everything(root):
    """Each file and folder below it, with its bytes and when it was last changed."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mtime_ns,
            path.lstat().st_ino,
            path.read_bytes() if path.is_file() else None,
        )
        for path in (root, *root.rglob("*"))
        if path.name != "index.db-shm"  # where SQLite notes who reads
    }


def text_index(root):
    (root / "index.db").write_text("a friend's notes\n")


def database(root, script):
    with closing(sqlite3.connect(root / "index.db")) as made:
        made.executescript(script)


def sqlite_index(root):
    database(root, "CREATE TABLE songs (name TEXT); INSERT INTO songs VALUES ('x');")


def sqlite_index_with_a_log(root):
    database(root, "PRAGMA journal_mode = WAL; CREATE TABLE songs (name TEXT);")


def other_files(root):
    (root / "thesis.tex").write_text("\\section{}")


def folders_of_others(root):
    (root / "Documents").mkdir()


FOREIGN = [text_index, sqlite_index, sqlite_index_with_a_log, other_files, folders_of_others]


@pytest.mark.parametrize("make", FOREIGN)
@pytest.mark.parametrize(
    "command",
    [
        ("ls",),
        ("ls", "--json"),
        ("stat",),
        ("verify",),
        ("gc",),
        ("clear", "--yes"),
        ("serve",),
        ("bench",),
    ],
    ids=" ".join,
)
def test_store_tool_on_a_foreign_folder_refuses_and_changes_no_file(
    tmp_path, capsys, make, command
):
    make(tmp_path)
    before = everything(tmp_path)
    name, *options = command
    where = ["--root", str(tmp_path), "--port", "0"] if name == "serve" else [url_of(tmp_path)]
    assert main(["store", name, *where, *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"store folder {tmp_path} " in said
    assert "choose another folder" in said
    assert everything(tmp_path) == before


@pytest.mark.parametrize("make", FOREIGN)
def test_file_source_foreign_folder_is_refused_and_unchanged(tmp_path, make):
    make(tmp_path)
    before = everything(tmp_path)
    (source,) = parse_sources(url_of(tmp_path))
    for call in (source.check, lambda: source.open(ALICE, depth=1)):
        with pytest.raises(ConfigError, match="choose another folder"):
            call()
    assert everything(tmp_path) == before


def test_store_cp_from_or_to_a_foreign_folder_is_refused(tmp_path, capsys):
    kv, other = tmp_path / "kv", tmp_path / "other"
    fill(kv, ALICE, "a")
    other.mkdir()
    other_files(other)
    before = everything(other)
    for pair in ((kv, other), (other, kv)):
        assert store("cp", *map(url_of, pair)) == 2
        assert "choose another folder" in capsys.readouterr().err
    assert everything(other) == before


@pytest.mark.parametrize("there", ["nothing", "lost+found", "blocks", "blocks and other files"])
def test_file_source_empty_folder_or_store_is_accepted(tmp_path, there):
    root = tmp_path / "kv"
    root.mkdir()
    if there == "lost+found":
        (root / there).mkdir()
    if there.startswith("blocks"):
        fill(root, ALICE, "a")
        for path in root.glob("index.*"):
            path.unlink()
    if there.endswith("files"):
        (root / "README").write_text("the KV of our models")
    (source,) = parse_sources(url_of(root))
    source.check()
    fill(root, ALICE, "b")
    assert len(held(root, ALICE)) == 1 + there.startswith("blocks")


@pytest.mark.parametrize("index", ["whole", "absent", "empty", "damaged", "zeros", "with a log"])
def test_store_ls_with_any_index_state_lists_all_without_writing(tmp_path, capsys, index):
    root = tmp_path / "kv"
    fill(root, ALICE, "a", "b", "c")
    path = root / "index.db"
    if index == "absent":
        path.unlink()
    if index == "empty":
        path.write_bytes(b"")
    if index == "damaged":
        path.write_bytes(path.read_bytes()[:100] + os.urandom(3996))
    if index == "zeros":
        path.write_bytes(bytes(8192))
    with contextlib.ExitStack() as held_open:
        if index == "with a log":
            connection = held_open.enter_context(closing(sqlite3.connect(path)))
            connection.execute("UPDATE blocks SET used_s = used_s + 1")
            connection.commit()
            assert (root / "index.db-wal").stat().st_size
        before = everything(root)
        (answer,) = told(capsys, "ls", url_of(root))["stores"]
        (namespace,) = answer["namespaces"]
        assert namespace["blocks"] == 3
        assert namespace["bytes"] == 3 * file_of(root, ALICE, "a").stat().st_blocks * 512
        assert store("ls", url_of(root), ALICE.digest.hex()) == 0
        assert capsys.readouterr().out.count("\n") == 4
        assert everything(root) == before


def test_store_ls_of_an_empty_folder_creates_no_file(tmp_path, capsys):
    assert store("ls", url_of(tmp_path)) == 0
    assert "empty" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


async def test_index_damaged_files_are_kept_under_other_names(tmp_path, caplog):
    """And no more than some: one more stays where it is, and the store without an index."""
    async with opened_store(tmp_path) as store:
        await put_a(store)
    index, damage = tmp_path / "index.db", []
    for number in range(3, MAX_PUT_ASIDE + 1):
        (tmp_path / f"index.db.damaged-{number}").touch()

    for number in (1, 2):
        damage.append(os.urandom(8192))
        index.write_bytes(damage[-1])
        async with opened_store(tmp_path) as store:
            async for _ in store.list_blocks():  # waits for the index
                pass
            assert await read_a(store) == block_of("a")
        asides = [tmp_path / f"index.db.damaged-{n}" for n in range(1, number + 1)]
        assert [path.read_bytes() for path in asides] == damage
        assert f"kept as {asides[-1].name}" in caplog.text
    damage.append(os.urandom(8192))
    index.write_bytes(damage[-1])
    with waiting_for_the_index(0.5):
        async with opened_store(tmp_path) as store:
            with pytest.raises(StoreUnavailable):
                await put_a(store)
            assert await read_a(store) == block_of("a")
    assert "damaged too: see to the disk" in caplog.text
    assert index.read_bytes() == damage[-1]
    assert [path.read_bytes() for path in asides] == damage[:2]


def test_store_command_on_a_foreign_folder_exits_with_status_2(tmp_path):
    text_index(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_cake", "store", "ls", f"file://{tmp_path}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "index.db").read_text() == "a friend's notes\n"
