"""The index: no query reads all of its rows, and implausible numbers count as damage."""

import re
import sqlite3
import tracemalloc
from contextlib import closing, suppress
from functools import partial
from itertools import islice

import pytest
from filestore import waiting_for_the_index
from polling import until
from test_capacity import CAPACITY_BYTES, opened, put

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import Digest
from sglang_cake.stores.base import StoreStats
from sglang_cake.stores.eviction.policy import AccessContext, Usage
from sglang_cake.stores.file.block_files import FolderSettings, block_names, this_boot
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.index import (
    BlockIndex,
    DamagedIndexError,
    IndexedBlock,
    IndexReader,
    ScannedFile,
    Touch,
)
from sglang_cake.stores.file.scan import LIST_AT_ONCE, listed_blocks_in, stats_in
from sglang_cake.testing.store_contract import key_of

DIGEST, OTHER = Digest(b"\1" * 32), Digest(b"\2" * 32)
A, B = key_of("a"), key_of("b")
USAGE = Usage(4096, 1e9, 1e9, 0, 5)
BEGUN = IndexedBlock(2, DIGEST, B, "", USAGE)
ASIDE = ScannedFile(None, 4096, 1e9, 1e9)
TOUCHES = [
    Touch(DIGEST, A, 2e9, 1),
    Touch(DIGEST, A, 2e9, 1, AccessContext("chat")),
    Touch(DIGEST, B, 0.0, 1, AccessContext("chat")),
]
CALLS = {
    "close": lambda index: None,
    "reserve_namespace": lambda index: index.reserve_namespace(OTHER, 4096, 1 << 30),
    "unused": lambda index: index.unused(),
    "has_namespace": lambda index: index.has_namespace(DIGEST),
    "forget_namespace": lambda index: index.forget_namespace(OTHER, lambda: True),
    "taken_bytes": lambda index: index.taken_bytes(DIGEST),
    "contains": lambda index: index.contains(DIGEST, [A, B]),
    "reserve": lambda index: index.reserve(DIGEST, 4096, key_of("c"), USAGE, 1 << 30),
    "commit": lambda index: index.commit(BEGUN),
    "drop": lambda index: index.drop(BEGUN),
    "forget": lambda index: index.forget(DIGEST, A, lambda: True),
    "with_aside": lambda index: index.with_aside(),
    "reserve_aside": lambda index: index.reserve_aside(DIGEST, 4096, ASIDE),
    "move_aside": lambda index: index.move_aside(3, lambda: False),
    "clear_aside": lambda index: index.clear_aside(DIGEST, lambda: 1),
    "touch": lambda index: index.touch(TOUCHES),
    "limit_times": lambda index: index.limit_times([1, 2], 5e8),
    "find": lambda index: index.find(1),
    "find_all": lambda index: index.find_all([1, 2]),
    "last": lambda index: index.last(),
    "stored": lambda index: index.stored(0, 100),
    "stored_in": lambda index: index.stored_in(DIGEST, b"", 100),
    "sample": lambda index: index.sample(100),
    "writing": lambda index: index.writing(),
    "totals": lambda index: index.totals(),
    "stats": lambda index: index.stats(),
    "check": lambda index: index.check(),
    "check_sums": lambda index: index.check_sums(),
    "fits": lambda index: index.fits(),
    "save_fits": lambda index: index.save_fits({}),
    "clean_boot_id": lambda index: index.clean_boot_id(),
    "mark_clean": lambda index: index.mark_clean("boot"),
    "clear": lambda index: index.clear(),
    "add_found": lambda index: index.add_found(DIGEST, 4096, [ASIDE]),
}
READ_ONLY = {
    "stats_in": stats_in,
    "listed_blocks_in": lambda root: list(listed_blocks_in(root, DIGEST)),
}
LONG_PLAN = re.compile(r"SCAN blocks|USE TEMP|.* blocks .*\(namespace=\?\)")
# Plans that read many rows, or sort them.
LONG = {
    "clear": {"SCAN blocks"},  # before a rebuild, which nobody else uses
    "check_sums": {"SCAN blocks"},  # once, in the background, and without a lock
    "stats": {"SCAN blocks USING INDEX unsettled"},  # of these there are few
    "stats_in": {"SCAN blocks USING INDEX unsettled"},
    "with_aside": {"USE TEMP B-TREE FOR GROUP BY"},
}


def public_methods(cls):
    return {name for name, it in vars(cls).items() if callable(it) and not name.startswith("_")}


def test_index_queries_of_every_public_method_are_checked():
    assert set(CALLS) == public_methods(BlockIndex) | public_methods(IndexReader)


class Traced(sqlite3.Connection):
    """Records what it runs."""

    def __init__(self, *args, statements, **options):
        super().__init__(*args, **options)
        self.set_trace_callback(statements.append)


def plans_of(path, statements):
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            # Not those of a trigger, which have a row's id, and not one that makes a trigger.
            if not statement.startswith(("--", "CREATE")):
                for *_, step in db.execute(f"EXPLAIN QUERY PLAN {statement}"):
                    yield step


def test_index_file_to_be_set_aside_whose_row_was_cleared_is_not_moved(tmp_path):
    path, moves = tmp_path / "index.db", []
    with closing(BlockIndex(path)) as index, closing(BlockIndex(path)) as other:
        row = index.reserve_aside(DIGEST, 4096, ASIDE)
        assert other.clear_aside(DIGEST, lambda: 0) == 0
        assert not index.move_aside(row, lambda: not moves.append(row))
        row = index.reserve_aside(DIGEST, 4096, ASIDE)
        assert other.clear_aside(DIGEST, lambda: None) is None
        assert index.move_aside(row, lambda: not moves.append(row))
        assert moves == [row]
        assert index.totals()[0] == 1


def test_index_clear_writes_little_into_the_log(tmp_path):
    """A full disk has no room for more, and without an index nothing is evicted."""
    path, log = tmp_path / "index.db", tmp_path / "index.db-wal"
    with closing(BlockIndex(path)) as index:
        found = (ScannedFile(key_of(n), 4096, 1e9, 1e9) for n in range(20_000))
        index.add_found(DIGEST, 4096, found)
    with closing(BlockIndex(path)) as index:
        index.clear()
        assert log.stat().st_size < path.stat().st_size / 10
        assert index.totals() == (0, 0)
        index.add_found(DIGEST, 4096, [ScannedFile(A, 4096, 1e9, 1e9)])
        assert index.totals()[0] == 1
        assert index.forget(DIGEST, A, lambda: True)
        assert index.totals()[0] == 0
    with closing(BlockIndex(path)) as index:  # it still is an index of ours
        index.check_sums()


@pytest.mark.parametrize("name", [*CALLS, *READ_ONLY])
def test_index_query_of_a_method_reads_no_whole_table(tmp_path, monkeypatch, name):
    path, statements = tmp_path / "index.db", []
    monkeypatch.setattr(
        sqlite3, "connect", partial(sqlite3.connect, factory=partial(Traced, statements=statements))
    )
    with closing(BlockIndex(path)) as index:
        index.commit(index.reserve(DIGEST, 4096, A, USAGE, None)[0])
        index.reserve(DIGEST, 4096, B, USAGE, None)
        index.reserve_namespace(OTHER, 4096, None)
        index.mark_clean(this_boot())
        statements.clear()
        if name in CALLS:
            CALLS[name](index)
        else:
            READ_ONLY[name](tmp_path)
    monkeypatch.undo()
    assert statements or name == "close"
    long = {step for step in plans_of(path, statements) if LONG_PLAN.match(step)}
    assert long == LONG.get(name, set())


def test_index_stored_in_gives_every_block_of_its_namespace_once(tmp_path):
    keys = sorted(key_of(number) for number in range(25))
    with closing(BlockIndex(tmp_path / "index.db")) as index:
        for digest, of_it in ((DIGEST, keys), (OTHER, keys[:5])):
            index.add_found(digest, 0, [ScannedFile(key, 4096, 1e9, 1e9) for key in of_it[::-1]])
        index.add_found(DIGEST, 0, [ASIDE])
        after, found = b"", []
        while batch := index.stored_in(DIGEST, after, 10):
            assert len(batch) <= 10
            found += [block.key for block in batch]
            after = found[-1]
    assert found == keys


def indexed(root, count):
    """A store of `count` blocks, as far as its index tells; returns their keys in order."""
    root.mkdir(exist_ok=True)
    keys = sorted(key_of(number) for number in range(count))
    with closing(BlockIndex(root / "index.db")) as index:
        index.add_found(DIGEST, 0, [ScannedFile(key, 4096, 1e9, 1e9) for key in keys[::-1]])
        index.mark_clean(this_boot())
    return keys


def test_index_listing_holds_a_part_of_the_blocks_in_memory(tmp_path):
    def peak_bytes(root):
        tracemalloc.start()
        for _ in listed_blocks_in(root, DIGEST):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few, many = tmp_path / "few", tmp_path / "many"
    indexed(few, LIST_AT_ONCE)
    keys = indexed(many, 4 * LIST_AT_ONCE + 7)
    assert [block.key for block in listed_blocks_in(many, DIGEST)] == keys
    assert peak_bytes(many) < 2.5 * peak_bytes(few)  # while the next part is read, two are held


def test_index_listing_goes_on_with_the_files_if_the_index_vanishes(tmp_path):
    keys = indexed(tmp_path, LIST_AT_ONCE + 7)
    for key in (keys[0], keys[-1]):
        path = tmp_path.joinpath(*block_names(DIGEST, key))
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    listed = listed_blocks_in(tmp_path, DIGEST)
    first = list(islice(listed, LIST_AT_ONCE))
    for path in tmp_path.glob("index.db*"):
        path.unlink()
    assert [block.key for block in first] == keys[:LIST_AT_ONCE]
    assert [block.key for block in listed] == [keys[-1]]


DAMAGES = {
    "UPDATE blocks SET reach = 0": lambda index: index.stored(0, 100),
    "UPDATE total SET taken_bytes = 9000000000000000": lambda index: index.check(),
    "UPDATE total SET blocks = blocks + 1": lambda index: index.check(),
    "UPDATE namespaces SET used_bytes = 0": lambda index: index.check_sums(),
    "UPDATE namespaces SET blocks = 0": lambda index: index.check_sums(),
    "UPDATE namespaces SET blocks = 'many'": lambda index: index.sample(100),
}


@pytest.mark.parametrize("script", DAMAGES)
def test_index_with_an_implausible_number_counts_as_damaged(tmp_path, script):
    with closing(BlockIndex(tmp_path / "index.db")) as index:
        for digest in (DIGEST, OTHER):
            index.commit(index.reserve(digest, 4096, A, USAGE, None)[0])
        index.check()
        index.check_sums()
        with closing(sqlite3.connect(tmp_path / "index.db")) as other:
            other.executescript(script)
        with pytest.raises(DamagedIndexError):
            DAMAGES[script](index)


@pytest.mark.parametrize("script", DAMAGES)
def test_block_folder_with_an_implausible_number_in_its_index_counts_anew(tmp_path, caplog, script):
    with closing(opened(tmp_path)) as folder:
        for name in range(10):
            assert put(folder, name)
        before = folder.stats()
    with closing(sqlite3.connect(tmp_path / "index.db")) as index:
        index.executescript(script)
    with closing(BlockFolder(FolderSettings(tmp_path, capacity_bytes=CAPACITY_BYTES))) as folder:
        until(lambda: "beginning anew" in caplog.text and is_open(folder), "a new index")
        after = folder.stats()
        assert (after.blocks, after.block_bytes) == (before.blocks, before.block_bytes)
        assert before.used_bytes <= after.used_bytes <= CAPACITY_BYTES  # with the damaged index
        assert put(folder, "new")


def test_block_folder_without_an_index_lacks_its_totals_only(tmp_path):
    (tmp_path / "index.db").mkdir()
    with (
        waiting_for_the_index(0.0),
        closing(BlockFolder(FolderSettings(tmp_path, capacity_bytes=10**9))) as folder,
    ):
        assert folder.stats() == StoreStats(capacity_bytes=10**9, policy=folder.settings.policy)


def is_open(folder):
    with suppress(StoreUnavailable), folder.supervisor.open():
        return True
    return False
