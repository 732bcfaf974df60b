"""What killed writers left behind is removed, and nothing else."""

import os
import subprocess
import sys
import time

import pytest
from filestore import A, files_below, opened_store, path_of, put_a, read_a

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.file.block_files import new_tmp_name, this_host
from sglang_cake.stores.file.scan import STALE_S, is_stale, remove_stale
from sglang_cake.testing.store_contract import block_of, key_of


def ended_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_is_stale_zombie_writer_counts_as_dead():
    """A zombie keeps its number for as long as its parent does not ask."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = f"{this_host()}-{process.pid}"
    assert not is_stale(owner, time.time())
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_stale(owner, time.time())
    process.wait()


def test_remove_stale_removes_only_stale_temporary_files(tmp_path):
    folder = tmp_path / "ab" / "cd"
    folder.mkdir(parents=True)
    long_ago = 1_000_000_000
    dead, here, other_host = ended_pid(), this_host(), "0" * 16

    def tmp(host, pid, number, *, old=False):
        path = folder / f".tmp-{host}-{pid}-{number:016x}"
        path.write_bytes(b"x")
        if old:
            os.utime(path, (long_ago, long_ago))
        return path

    gone = [
        tmp(here, dead, 1),
        tmp(here, os.getpid(), 2, old=True),
        tmp(other_host, dead, 3, old=True),
    ]
    kept = [
        tmp(here, os.getpid(), 4),
        tmp(here, 1, 5),
        tmp(other_host, dead, 6),
        folder / new_tmp_name(),
        folder / ".tmp-of-somebody-else",
        folder / key_of("a").hex(),
    ]
    for path in kept[3:]:
        path.write_bytes(b"x")
    for path in kept[4:]:
        os.utime(path, (long_ago, long_ago))
    assert STALE_S == 3600
    removed, living = remove_stale(tmp_path, "ab", "cd")
    assert removed == len(gone)
    assert living == {f"{here}-{os.getpid()}", f"{here}-1", f"{other_host}-{dead}"}
    assert files_below(tmp_path) == sorted(kept)


async def test_index_rebuild_removes_files_of_dead_writers(tmp_path):
    async with opened_store(tmp_path) as store:
        await put_a(store)
    left = path_of(tmp_path, A).parent / f".tmp-{this_host()}-{ended_pid()}-{1:016x}"
    left.write_bytes(b"x")
    for path in tmp_path.glob("index.db*"):
        path.unlink()
    async with opened_store(tmp_path) as store:
        await store.stats()  # waits for the index
        assert not left.exists()
        assert await read_a(store) == block_of("a")


async def test_file_store_put_whose_file_was_removed_is_unavailable(tmp_path, monkeypatch):
    replace = os.replace

    def swept_then_replace(tmp, path, **folders):
        os.unlink(tmp, dir_fd=folders["src_dir_fd"])
        replace(tmp, path, **folders)

    async with opened_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", swept_then_replace)
            with pytest.raises(StoreUnavailable):
                await store.put(A, block_of("a"))
        assert await store.contains([A]) == [False]
