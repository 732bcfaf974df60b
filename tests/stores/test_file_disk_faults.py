"""Disks that fail, fill up or vanish under a file store."""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import threading

import pytest
from filestore import (
    A,
    B,
    files_below,
    opened,
    opened_store,
    path_of,
    put_a,
    read_a,
    waiting_for_the_index,
)
from hostile import SHORT_WAIT_S
from polling import async_answer, async_until
from system_calls import Disk, failing

from sglang_cake.codecs.frame import HEADER_BYTES
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import UNREADABLE_S, BlockFolder
from sglang_cake.stores.file.disk import FRESH_S, NEAR_BYTES, REFUSED_S, Amount, FreeSpace
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.testing.store_contract import FRAME, LAYOUT, NAMESPACE, block_of, key_of, read

FAILURES = [
    ("writev", errno.ENOSPC, "full"),
    ("writev", errno.EDQUOT, "full"),
    ("writev", errno.EIO, "unavailable"),
    ("fdatasync", errno.EIO, "unavailable"),
    ("replace", errno.EIO, "unavailable"),
    ("fsync", errno.EIO, "unavailable"),
]


@pytest.mark.parametrize(("call", "number", "reason"), FAILURES)
async def test_file_store_failed_put_leaves_no_file_and_pauses_writing(
    tmp_path, monkeypatch, call, number, reason
):
    now_s = 0.0
    async with opened_store(tmp_path, fsync="data", clock=lambda: now_s) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(number))
            with pytest.raises(StoreError) as error:
                await store.put(A, block_of("a"))
        assert error.value.reason == reason
        assert await store.contains([A]) == [False]
        assert {path.name for path in files_below(tmp_path)} <= {"namespace.json"}
        with pytest.raises(StoreError, match="writing rests for 1 s after") as error:
            await put_a(store)
        assert error.value.reason == reason  # a full disk stays full in the metrics
        assert str(tmp_path) in str(error.value)
        now_s += 1.0
        await put_a(store)


async def test_file_store_repeated_write_errors_double_the_pause(tmp_path, monkeypatch):
    now_s, tried = 1000.0, 0

    def writev(*args):
        nonlocal tried
        tried += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opening = opened_store(tmp_path, clock=lambda: now_s)
    async with opening as store, contextlib.AsyncExitStack() as ends:
        await put_a(store)
        other = ends.enter_context(contextlib.closing(BlockFolder(FolderSettings(tmp_path))))
        ends.enter_context(other.reading(NAMESPACE.digest(), A))  # so that it is not evicted

        async def fails(rest_s):
            nonlocal now_s
            with monkeypatch.context() as patch:
                patch.setattr(os, "writev", writev)
                with pytest.raises(StoreFull):
                    await store.put(B, block_of("b"))
                before = tried
                for part in (0.0, 0.5, 0.49):
                    now_s += part * rest_s
                    with pytest.raises(StoreFull, match="writing rests for"):
                        await store.put(B, block_of("b"))
                    assert await read_a(store) == block_of("a")
                    assert await store.contains([A, B]) == [True, False]
                assert tried == before  # the disk was left alone
            now_s += 0.02 * rest_s

        for rest_s in (1, 2, 4, 8, 16, 32, 60, 60):
            await fails(rest_s)
        assert await store.put(B, block_of("b"))
        await store.delete(B)
        for rest_s in (1, 2):
            await fails(rest_s)
    assert tried == 10


async def test_file_store_on_a_read_only_file_system_writes_are_unavailable(tmp_path, monkeypatch):
    async with opened_store(tmp_path) as store:
        await put_a(store)
        real_open = os.open

        def read_only_open(path, flags, *args, **kwargs):
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real_open(path, flags, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", read_only_open)
            with pytest.raises(StoreUnavailable, match="Read-only"):
                await store.put(B, block_of("b"))
            assert await read_a(store) == block_of("a")
            with monkeypatch.context() as deeper:
                deeper.setattr(os, "unlink", failing(errno.EROFS))
                with pytest.raises(StoreUnavailable, match="Read-only"):
                    await store.delete(A)


async def test_file_store_read_error_is_unavailable_and_keeps_the_file(tmp_path, monkeypatch):
    async with opened_store(tmp_path) as store:
        await put_a(store)

    async with opened_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing(errno.EIO))
            with pytest.raises(StoreUnavailable):
                await read_a(store)
        assert await read_a(store) == block_of("a")


async def test_file_store_write_that_finds_a_damaged_file_does_not_pause_writing(
    tmp_path, monkeypatch
):
    async with opened_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing(errno.EUCLEAN))
            with pytest.raises(StoreUnavailable, match=os.strerror(errno.EUCLEAN)):
                await put_a(store)
        assert await store.put(B, block_of("b"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.EUCLEAN])
async def test_file_store_block_with_read_errors_is_set_aside_if_others_are_read(
    tmp_path, monkeypatch, number
):
    now_s, preadv = 0.0, os.preadv
    async with opened_store(tmp_path, clock=lambda: now_s) as store:
        await put_a(store)
        await store.put(B, block_of("b"))
        damaged = path_of(tmp_path, A).stat()

        def fail_for_one(fd, *args):
            if os.path.samestat(os.fstat(fd), damaged):
                raise OSError(number, os.strerror(number))
            return preadv(fd, *args)

        async def fails_for_now():
            with pytest.raises(StoreUnavailable):
                await read_a(store)
            assert await store.contains([A]) == [True]

        monkeypatch.setattr(os, "preadv", fail_for_one)
        assert await read(store, B) == block_of("b")
        await fails_for_now()
        now_s += UNREADABLE_S
        await fails_for_now()  # as of a disk that answers nothing since
        assert await read(store, B) == block_of("b")
        with pytest.raises(BlockCorrupt, match=f"again: {os.strerror(number)}"):
            await read_a(store)
        assert await store.contains([A, B]) == [False, True]
        await put_a(store)
        assert await read_a(store) == block_of("a")


async def test_file_store_read_error_of_a_moment_keeps_all_blocks(tmp_path, monkeypatch):
    """Blocks in the page cache are read meanwhile."""
    now_s = 0.0
    async with opened_store(tmp_path, clock=lambda: now_s) as store:
        await put_a(store)
        await store.put(B, block_of("b"))
        for _ in range(3):
            now_s += UNREADABLE_S - 1
            for _ in range(2):
                with monkeypatch.context() as patch:
                    patch.setattr(os, "preadv", failing(errno.EIO))
                    with pytest.raises(StoreUnavailable):
                        await read_a(store)
                now_s += 0.5
                assert await read(store, B) == block_of("b")
            assert await read_a(store) == block_of("a")


async def test_file_store_error_while_it_closes_reaches_the_caller(tmp_path):
    class Failing(BlockFolder):
        def close(self):
            super().close()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = FileStore(Failing(FolderSettings(tmp_path)), FRAME, threads=1)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        await store.close()


async def test_file_store_mount_point_without_its_disk_stays_empty(tmp_path, monkeypatch, caplog):
    root, disk = tmp_path / "nvme", tmp_path / "disk"
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(root) and not disk.exists())
    root.mkdir()
    async with opened_store(root) as store:
        await put_a(store)
        root.rename(disk)
        root.mkdir()
        with pytest.raises(StoreUnavailable):
            await store.put(B, block_of("b"))
        await async_until(lambda: "its disk was unmounted" in caplog.text)
        assert list(root.iterdir()) == []
        root.rmdir()
        disk.rename(root)
        assert await read_a(store) == block_of("a")


async def test_file_store_removed_folder_says_what_helps_until_it_is_made_again(tmp_path, caplog):
    root = tmp_path / "kv"
    async with opened_store(root) as store:
        await put_a(store)
        shutil.rmtree(root)
        with pytest.raises(StoreUnavailable):
            await store.put(B, block_of("b"))
        await async_until(lambda: "make it again" in caplog.text)
        with pytest.raises(StoreUnavailable, match="make it again"):
            await store.put(B, block_of("b"))
        root.mkdir()
        assert await async_answer(lambda: store.put(B, block_of("b")))


def test_file_store_root_that_is_a_file_is_unavailable(tmp_path):
    (tmp_path / "kv").write_text("")
    with pytest.raises(StoreUnavailable):
        opened(tmp_path / "kv")


async def test_file_store_file_in_place_of_a_folder_is_unavailable(tmp_path):
    (tmp_path / NAMESPACE.digest().hex()).mkdir()
    (tmp_path / NAMESPACE.digest().hex() / A.hex()[:2]).write_text("")
    async with opened_store(tmp_path) as store:
        for call in (read_a(store), store.put(A, block_of("a"))):
            with pytest.raises(StoreUnavailable):
                await call


async def test_file_store_removed_namespace_folder_is_created_again(tmp_path):
    async with opened_store(tmp_path) as store:
        await put_a(store)
        for forgotten in (False, True):
            shutil.rmtree(tmp_path / NAMESPACE.digest().hex())
            if forgotten:
                with pytest.raises(BlockMissing):
                    await read_a(store)
                assert await store.contains([A]) == [False]
            await put_a(store)
        assert await read_a(store) == block_of("a")
    assert (tmp_path / NAMESPACE.digest().hex() / "namespace.json").exists()


async def test_file_store_removed_root_is_not_created_again(tmp_path):
    root = tmp_path / "mount" / "kv"
    async with opened_store(root) as store:
        await put_a(store)
        root.rename(tmp_path / "elsewhere")
        root.parent.rmdir()
        with pytest.raises(BlockMissing):
            await read_a(store)
        with pytest.raises(StoreUnavailable):
            await store.put(A, block_of("a"))
        assert not (tmp_path / "mount").exists()


STORED_BYTES = 2 * 4096  # what a block takes on the disk


async def test_file_store_below_min_free_evicts_old_blocks(tmp_path, monkeypatch):
    Disk(monkeypatch).f_bavail = 1000 + 2 * STORED_BYTES - 1
    # Within a second: asked again, the file system would name what is free for the first time.
    async with opened_store(tmp_path, min_free_bytes=1000, clock=lambda: 0.0) as store:
        await put_a(store)
        assert await store.put(B, block_of("b")) is True
        assert await store.contains([A, B]) == [False, True]
        assert not path_of(tmp_path, A).exists()


async def test_file_store_below_min_free_with_blocks_in_use_refuses_puts_only(
    tmp_path, monkeypatch
):
    async with opened_store(tmp_path) as store:
        await put_a(store)
    Disk(monkeypatch).f_bavail = 1000 + STORED_BYTES - 1
    async with opened_store(tmp_path, min_free_bytes=1000) as store:
        other = contextlib.closing(BlockFolder(FolderSettings(tmp_path, min_free_bytes=0)))
        with other as folder, folder.reading(NAMESPACE.digest(), A):  # so that it cannot make way
            with pytest.raises(StoreFull, match="min_free=1000") as error:
                await store.put(B, block_of("b"))
            assert error.value.reason == "full"
            assert await store.put(A, block_of("a")) is False
            assert await read_a(store) == block_of("a")
        assert await store.contains([B]) == [False]


def test_free_space_within_a_second_is_estimated_from_own_writes(tmp_path, monkeypatch):
    now, disk = 0.0, Disk(monkeypatch)
    disk.f_bavail = 100
    free_space = FreeSpace(tmp_path, 40, clock=lambda: now)
    assert [free_space.take(n).bytes for n in (30, 30, 3)] == [0, 0, 3]
    free_space.freed(Amount(2))
    assert [free_space.take(n).bytes for n in (3, 2, 1)] == [1, 0, 1]
    disk.f_bavail, now = 41, FRESH_S
    assert not free_space.take(1)


def test_free_space_far_from_its_limit_is_asked_for_once_a_second(tmp_path, monkeypatch):
    now, disk = 0.0, Disk(monkeypatch)
    disk.f_bavail = NEAR_BYTES + 1000
    free_space = FreeSpace(tmp_path, 40, clock=lambda: now)
    assert [free_space.take(n).bytes for n in (30, 30)] == [0, 0]
    assert disk.asked == [tmp_path]
    now = FRESH_S
    assert not free_space.take(30)
    assert disk.asked == [tmp_path] * 2


def test_free_space_of_a_disk_that_refused_a_block_is_what_was_freed_since(tmp_path, monkeypatch):
    now, disk = 0.0, Disk(monkeypatch)
    free_space = FreeSpace(tmp_path, 40, clock=lambda: now)
    assert not free_space.take(30)
    free_space.refused()
    assert not free_space.missing()  # nothing is evicted without a put
    assert free_space.take(30).bytes == 30
    free_space.freed(Amount(50))
    assert [free_space.take(n).bytes for n in (30, 30, 20)] == [0, 10, 0]
    free_space.freed(Amount())  # there is nothing to evict
    assert not free_space.take(30)
    free_space.refused()
    disk.f_bavail, now = 39, FRESH_S  # the file system tells of the limit
    assert free_space.missing().bytes == 1
    disk.f_bavail, now = 1000, 2 * FRESH_S
    assert not free_space.take(30)
    free_space.refused()
    now += REFUSED_S
    assert not free_space.take(30)


async def test_file_store_index_rebuilt_beside_an_unreadable_folder_counts_it(
    tmp_path, monkeypatch
):
    async with opened_store(tmp_path) as store:
        await put_a(store)
        assert store.events() == {"unreadable": 0}
    (tmp_path / "index.db").unlink()
    damaged, listdir = path_of(tmp_path, A).parent.stat(), os.listdir

    def fail_for_one(folder):
        if os.path.samestat(os.stat(folder), damaged):
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", fail_for_one)
    async with opened_store(tmp_path) as store:
        assert (await store.stats()).blocks == 0
        assert store.events() == {"unreadable": 1}


async def test_file_store_full_file_system_raises_store_full_and_recovers(tmp_path, monkeypatch):
    file_bytes = HEADER_BYTES + LAYOUT.block_bytes
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs here")

    now_s, stored = 0.0, []

    async def fill(store):
        for name in range((16 << 20) // file_bytes):
            await store.put(key_of(name), block_of(name))
            stored.append(name)

    try:
        Disk(monkeypatch)  # tells of more space than there is
        async with opened_store(tmp_path, clock=lambda: now_s) as store:
            with pytest.raises(StoreFull) as error:
                await fill(store)
            assert error.value.reason == "full"
            assert not list(tmp_path.rglob(".tmp-*"))
            for name in stored:
                assert await read(store, key_of(name)) == block_of(name)
            await store.delete(key_of(0))
            now_s += 10.0
            assert await store.put(key_of(0), block_of(0))
        assert len(stored) > 5
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def mounted(folder, *options):
    """Whether `folder` is a tmpfs now."""
    mount = ["mount", *options, str(folder)]
    return shutil.which("mount") and not subprocess.run(mount, capture_output=True).returncode


async def test_file_store_mounted_read_only_reads_and_refuses_writes(tmp_path):
    if not mounted(tmp_path, "-t", "tmpfs", "-o", "size=32m", "tmpfs"):
        pytest.skip("may not mount a tmpfs here")
    names = range(3)
    keys = [key_of(name) for name in names]
    try:
        async with opened_store(tmp_path) as store:
            for name in names:
                await store.put(key_of(name), block_of(name))
        assert mounted(tmp_path, "-o", "remount,ro")
        with waiting_for_the_index(SHORT_WAIT_S):
            async with opened_store(tmp_path) as store:
                before = files_below(tmp_path)
                for _ in range(2):
                    assert await store.contains([*keys, A]) == [True, True, True, False]
                    for name in names:
                        assert await read(store, key_of(name)) == block_of(name)
                    with pytest.raises(StoreUnavailable):
                        await put_a(store)
                    with pytest.raises(StoreUnavailable, match="Read-only"):
                        await store.delete(keys[0])
                assert files_below(tmp_path) == before
                assert mounted(tmp_path, "-o", "remount,rw")  # somebody has mended it
                await async_answer(lambda: store.put(A, block_of("a")))
                assert await store.contains([*keys, A]) == [True] * 4
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture
def slow(monkeypatch):
    """Holds every read and write of A's file in the disk until `go` is set."""
    folder = f"/{A.hex()[:2]}/{A.hex()[2:4]}/"
    held, go = threading.Event(), threading.Event()

    def slowed(real):
        def call(fd, *args):
            if folder in os.readlink(f"/proc/self/fd/{fd}"):
                held.set()
                go.wait(60)
            return real(fd, *args)

        return call

    for name in ("preadv", "writev"):
        monkeypatch.setattr(os, name, slowed(getattr(os, name)))
    yield held, go
    go.set()


async def test_file_store_reads_held_by_a_slow_disk_delay_no_other_call(tmp_path, slow):
    held, go = slow
    async with opened_store(tmp_path, threads=2) as store:
        go.set()
        await put_a(store)
        await store.put(B, block_of("b"))
        go.clear()
        held.clear()
        reading = asyncio.create_task(read_a(store))
        assert await asyncio.to_thread(held.wait, 60)
        assert await read(store, B) == block_of("b")
        more = [asyncio.create_task(read_a(store)) for _ in range(3)]  # every thread that reads
        assert await store.contains([A, B, key_of("c")]) == [True, True, False]
        assert await store.put(key_of("c"), block_of("c"))
        assert (await store.stats()).blocks == 3
        assert len([block async for block in store.list_blocks()]) == 3
        assert not go.is_set()
        go.set()
        for task in (reading, *more):
            assert await task == block_of("a")


async def test_file_store_write_held_by_a_slow_disk_delays_no_other_call(tmp_path, slow):
    held, go = slow
    async with opened_store(tmp_path, threads=2) as store:
        await store.put(B, block_of("b"))
        writing = asyncio.create_task(store.put(A, block_of("a")))
        assert await asyncio.to_thread(held.wait, 60)
        assert await store.contains([A, B]) == [False, True]
        assert await read(store, B) == block_of("b")
        assert await store.put(key_of("c"), block_of("c"))
        assert not go.is_set()
        go.set()
        assert await writing
        assert await read_a(store) == block_of("a")


async def test_index_supervisor_exception_in_a_tick_is_logged_and_survived(
    tmp_path, monkeypatch, caplog
):
    flock, mistakes = fcntl.flock, []

    def once(*args):
        if not mistakes:
            mistakes.append(args)
            raise KeyError("a mistake")
        return flock(*args)

    monkeypatch.setattr(fcntl, "flock", once)
    async with opened_store(tmp_path) as store:
        await put_a(store)
    assert mistakes
    async with opened_store(tmp_path) as store:
        await read_a(store)
    assert "KeyError: 'a mistake'" in caplog.text
