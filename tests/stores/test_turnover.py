"""What a store makes beside its blocks goes with them: it can be filled anew for ever."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from filestore import evict
from namespace_folder import NamespaceFolder
from test_capacity import CAPACITY_BYTES, DIGEST, STORED_BYTES, du_bytes, opened, put, there

from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreFull, StoreUnavailable
from sglang_cake.core.keys import Namespace
from sglang_cake.stores.file import nofollow
from sglang_cake.stores.file.block_files import FolderSettings, new_tmp_name
from sglang_cake.stores.file.block_folder import MOST_UNUSED, BlockFolder
from sglang_cake.stores.file.index_supervisor import KEEP_ASIDE_S, RECLAIM_EVERY_S
from sglang_cake.testing.store_contract import NAMESPACE, key_of

NO_SYSTEM_CALL = 100_000  # the kernel answers ENOSYS, as one without `openat2`
NOW = threading.Event()  # never set: nothing is given up
SPACES = [Namespace((("weights", f"version {n}"),)) for n in range(100)]


def folders_below(root):
    return sorted(path for path in root.rglob("*") if path.is_dir())


def put_small(folder, namespace, name, booked_bytes):
    """A block that is booked with more bytes than it has: the disk has less to do."""
    digest = namespace.digest()
    with folder.writing(digest, key_of(name), booked_bytes) as file:
        assert file is not None
        file.append([memoryview(b"x" * 5000)], NOW)
        file.commit(NOW)


def reclaim(folder):
    """As the background does every minute."""
    with folder.supervisor.open() as index:
        folder.supervisor.reclaim(index)


def as_if_older(root, by_s):
    for path in (*root.glob("*/namespace.json"), *root.glob("*/")):
        os.utime(path, (time.time() - by_s,) * 2)


def test_block_folder_refilled_two_hundred_times_keeps_its_bounds(tmp_path):
    """Over a hundred namespaces, of which nobody has more than one block."""
    booked_bytes, held = 2 << 20, 5  # blocks
    with contextlib.closing(
        BlockFolder(FolderSettings(tmp_path, capacity_bytes=CAPACITY_BYTES))
    ) as folder:
        for namespace in SPACES:
            folder.descriptions.check(namespace.digest(), namespace.describe())
        folder.stats()  # waits for the index
        for number in range(200 * held):
            put_small(folder, SPACES[number % len(SPACES)], number, booked_bytes)
        stats = folder.stats()
        assert 0 < stats.blocks <= held
        assert du_bytes(tmp_path) <= stats.used_bytes <= CAPACITY_BYTES
        # Of a namespace its own folder, and two for each of its blocks.
        assert len(folders_below(tmp_path)) <= len(SPACES) + 2 * (stats.blocks + 1)


@pytest.mark.parametrize("how", ["deleted", "evicted", "given up", "set aside", "lost"])
def test_block_folder_last_block_removed_removes_its_folders(tmp_path, how):
    with contextlib.closing(opened(tmp_path)) as folder:
        own = NamespaceFolder(tmp_path, DIGEST).folder
        if how == "given up":
            with folder.writing(DIGEST, key_of(0), STORED_BYTES) as file:
                file.append([memoryview(b"x")], NOW)
                assert len(folders_below(own)) == 2
        else:
            put(folder, 0)
            assert len(folders_below(own)) == 2
        if how == "deleted":
            folder.delete(DIGEST, key_of(0))
        elif how == "evicted":
            assert evict(folder, 1) == STORED_BYTES
        elif how == "set aside":
            with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(0)):
                raise BlockCorrupt("as if")
            folder.remove_set_aside()
            (own / "corrupt").rmdir()
        elif how == "lost":
            NamespaceFolder(tmp_path, DIGEST).block(key_of(0)).unlink()
            with pytest.raises(BlockMissing), folder.reading(DIGEST, key_of(0)):
                pass
        assert folders_below(own) == []
        assert folder.stats().blocks == 0


def test_block_folder_shard_with_another_file_is_kept(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        put(folder, 0)
        shard = NamespaceFolder(tmp_path, DIGEST).block(key_of(0)).parent
        written = shard / new_tmp_name()
        written.write_bytes(b"x")
        folder.delete(DIGEST, key_of(0))
        assert shard.is_dir()
        written.unlink()
        put(folder, 0)
        folder.delete(DIGEST, key_of(0))
        assert not shard.exists()


@pytest.mark.parametrize("times", [1, 5])
def test_block_folder_put_whose_new_folder_vanishes_creates_it_again(tmp_path, monkeypatch, times):
    """Between its making and the file in it, it is empty, and others remove what is empty."""
    mkdir, left = os.mkdir, times

    def mkdir_in_vain(name, mode=0o777, *, dir_fd=None):
        nonlocal left
        mkdir(name, mode, dir_fd=dir_fd)
        if left and len(str(name)) == 2:
            left -= 1
            os.rmdir(name, dir_fd=dir_fd)

    with contextlib.closing(opened(tmp_path)) as folder:
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", mkdir_in_vain)
            assert put(folder, 0)
        assert left == 0
        assert there(folder, [0]) == [0]


def test_store_gc_removes_empty_folders(tmp_path):
    """As versions before this one left them."""
    with contextlib.closing(opened(tmp_path)) as folder:
        put(folder, 0)
    for digest in (DIGEST, SPACES[0].digest()):
        for n in range(300):
            (tmp_path / digest.hex() / f"{n % 256:02x}" / f"{n // 7:02x}").mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "sglang_cake", "store", "gc", f"file://{tmp_path}?min_free=0"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert len(folders_below(tmp_path)) == 3
    with contextlib.closing(opened(tmp_path)) as folder:
        assert there(folder, [0]) == [0]


def test_block_folder_empty_namespace_is_removed_and_written_again(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        put(folder, 0)
        folder.delete(DIGEST, key_of(0))
        reclaim(folder)
        assert NamespaceFolder(tmp_path, DIGEST).description.exists()
        as_if_older(tmp_path, RECLAIM_EVERY_S + 1)
        empty_bytes = folder.stats().used_bytes
        reclaim(folder)
        assert folders_below(tmp_path) == []
        assert folder.stats().used_bytes < empty_bytes
        assert put(folder, 0)
        assert NamespaceFolder(tmp_path, DIGEST).description.exists()
        as_if_older(tmp_path, RECLAIM_EVERY_S + 1)
        reclaim(folder)
        assert there(folder, [0]) == [0]


def test_block_folder_claimed_namespaces_use_no_space(tmp_path):
    with contextlib.closing(
        BlockFolder(FolderSettings(tmp_path, capacity_bytes=CAPACITY_BYTES))
    ) as folder:
        before = folder.stats().used_bytes
        for namespace in SPACES:
            folder.descriptions.check(namespace.digest(), namespace.describe())
        assert folders_below(tmp_path) == []
        assert folder.stats().used_bytes == before


def test_block_folder_unused_descriptions_are_counted_and_bounded(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        put(folder, 0)
        for n in range(3 * MOST_UNUSED):
            long = Namespace((("weights", f"{n}"), ("note", "x" * 60_000)))
            folder.write_description(long.digest(), long.describe())
            assert folder.descriptions.read(long.digest()) == long.describe()
        assert len(folders_below(tmp_path)) <= MOST_UNUSED + 3
        assert 60_000 * MOST_UNUSED < du_bytes(tmp_path) <= folder.stats().used_bytes
        assert folder.stats().used_bytes <= CAPACITY_BYTES
        assert there(folder, [0]) == [0]


def test_block_folder_description_beyond_capacity_raises_store_full(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        huge = Namespace((("weights", "x" * CAPACITY_BYTES),))
        with pytest.raises(StoreFull):
            folder.write_description(huge.digest(), huge.describe())
        assert folders_below(tmp_path) == []


def rows(root, table):
    with contextlib.closing(sqlite3.connect(root / "index.db")) as index:
        return index.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_block_folder_lookups_of_unknown_blocks_write_no_data(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        put(folder, 0)
        log = tmp_path / "index.db-wal"
        before = (log.stat().st_size, log.stat().st_mtime_ns)
        for namespace in SPACES:
            digest = namespace.digest()
            assert folder.contains(digest, [key_of(0)], None, NOW) == [False]
            with pytest.raises(BlockMissing), folder.reading(digest, key_of(0)):
                pass
            assert list(folder.list_blocks(digest)) == []
            assert folder.used_bytes(digest) == 0
            assert folder.descriptions.read(digest) == {}
        with pytest.raises(BlockMissing), folder.reading(DIGEST, key_of(1)):
            pass
        assert (log.stat().st_size, log.stat().st_mtime_ns) == before
        assert rows(tmp_path, "namespaces") == 1


def test_block_folder_corrupt_files_are_evicted_for_new_blocks(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        big_bytes = 2 << 20
        for name in range(4):
            put_small(folder, NAMESPACE, name, big_bytes)
            with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(name)):
                raise BlockCorrupt("as if")
        with folder.supervisor.open() as index:
            assert index.totals()[0] == 4
        put_small(folder, NAMESPACE, "large", 9 << 20)
        assert there(folder, ["large"]) == ["large"]
        assert folder.stats().blocks == 1


def test_block_folder_corrupt_files_are_removed_after_a_day(tmp_path, monkeypatch):
    with contextlib.closing(opened(tmp_path)) as folder:
        put(folder, 0)
        with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(0)):
            raise BlockCorrupt("as if")
        reclaim(folder)
        assert len(list(NamespaceFolder(tmp_path, DIGEST).corrupt.iterdir())) == 1
        later_s = time.time() + KEEP_ASIDE_S + 1
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: later_s)
            reclaim(folder)
        as_if_older(tmp_path, RECLAIM_EVERY_S + 1)
        reclaim(folder)
        assert folders_below(tmp_path) == []
        assert folder.stats().blocks == 0


# ---- links ----


@pytest.mark.parametrize("kernel", ["with openat2", "without"])
@pytest.mark.parametrize("place", ["block", "cd", "ab", "namespace"])
def test_block_folder_symlinks_are_never_followed(tmp_path, monkeypatch, place, kernel):
    """Neither read, nor written through, nor looked into when the index is built again."""
    if kernel == "without":
        monkeypatch.setattr(nofollow, "OPENAT2", NO_SYSTEM_CALL)
    root, outside = tmp_path / "kv", tmp_path / "outside"
    with contextlib.closing(opened(root)) as folder:
        put(folder, 0)
    block = NamespaceFolder(root, DIGEST).block(key_of(0))
    linked = {
        "block": block,
        "cd": block.parent,
        "ab": block.parent.parent,
        "namespace": block.parents[2],
    }[place]
    linked.rename(outside)
    linked.symlink_to(outside)
    before = sorted(outside.rglob("*")), outside.stat().st_mtime_ns
    shutil.copytree(root, tmp_path / "copy", symlinks=True)
    for path in (tmp_path / "copy").glob("index.*"):
        path.unlink()
    for place_of_it in (root, tmp_path / "copy"):
        with contextlib.closing(BlockFolder(FolderSettings(place_of_it))) as folder:
            folder.stats()
            error = BlockCorrupt if place == "block" else StoreUnavailable
            with contextlib.suppress(error, BlockMissing), folder.reading(DIGEST, key_of(0)):
                pytest.fail("it was opened")
            with contextlib.suppress(StoreUnavailable):
                put(folder, 0)
            with contextlib.suppress(StoreUnavailable):
                folder.delete(DIGEST, key_of(0))
            folder.remove_stale()
            evict(folder, 1 << 40)
    assert (sorted(outside.rglob("*")), outside.stat().st_mtime_ns) == before


@pytest.mark.parametrize("kernel", ["with openat2", "without"])
def test_block_folder_root_that_is_a_symlink_is_followed(tmp_path, monkeypatch, kernel):
    if kernel == "without":
        monkeypatch.setattr(nofollow, "OPENAT2", NO_SYSTEM_CALL)
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    with contextlib.closing(opened(tmp_path / "link")) as folder:
        put(folder, 0)
        block = NamespaceFolder(tmp_path / "kv", DIGEST).block(key_of(0))
        with folder.reading(DIGEST, key_of(0)) as (_, file_bytes):
            assert file_bytes == block.stat().st_size


def test_block_folder_description_that_is_a_symlink_is_not_read(tmp_path):
    root, outside = tmp_path / "kv", tmp_path / "outside"
    with contextlib.closing(opened(root)) as folder:
        put(folder, 0)
    description = NamespaceFolder(root, DIGEST).description
    description.rename(outside)
    description.symlink_to(outside)
    with contextlib.closing(BlockFolder(FolderSettings(root))) as folder:
        assert [space.fields for space in folder.namespaces()] == [{}]
        assert folder.descriptions.read(DIGEST) == {}
