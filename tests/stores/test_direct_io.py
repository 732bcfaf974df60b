"""Cold blocks are read past the page cache, and blocks behind a tier in memory are written past it,
where that can be done. They are the same either way."""

import asyncio
import contextlib
import errno
import fcntl
import os
import tempfile
import threading
from pathlib import Path

import pytest
from namespace_folder import NamespaceFolder
from system_calls import Held

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame, IncomingBlock
from sglang_cake.core.buffers import PAGE_BYTES, is_on_page, on_page
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreUnavailable
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.file.block_files import (
    IO_BYTES,
    FolderSettings,
    NewFile,
    is_cached,
    set_direct,
)
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.testing.store_contract import ProgressRecord, block_of, key_of

A = key_of("a")
SIZES = [
    1,
    511,
    4095,
    4096,
    4097,
    2 * IO_BYTES,
    2 * IO_BYTES + 4096,
    2 * IO_BYTES - 1,
    2 * IO_BYTES + 4097,
]


def layout_of(size):
    return BlockLayout.plain(layers=1, parts=(("kv", (size,)),), dtype="uint8", block_tokens=1)


class Stored:
    """A file store with one block, A."""

    def __init__(self, root, size, store, frame):
        self.data, self.store = bytes(block_of("a", layout_of(size))), store
        self.path = NamespaceFolder(root, frame.digest).block(A)

    async def read(self, out):
        await self.store.get_into(A, out)
        return bytes(out)

    def is_cached(self):
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return is_cached(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    async def make_cold(self):
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
            for _ in range(200):  # pages on their way in or out stay for a moment
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                if not self.is_cached():
                    return
                await asyncio.sleep(0.01)
        finally:
            os.close(fd)
        pytest.skip("this file system's files do not leave the page cache")


@contextlib.asynccontextmanager
async def stored_block(root, size):
    layout = layout_of(size)
    frame = BlockFrame(Namespace((("layout", layout.describe()),)), layout)
    store = FileStore(BlockFolder(FolderSettings(root)), frame, threads=2)
    try:
        await store.put(A, block_of("a", layout))
        yield Stored(root, size, store, frame)
    finally:
        await store.close()


class Reads:
    """Notes of every `os.preadv` whether it was direct; `before` may raise instead."""

    def __init__(self, monkeypatch, before=lambda direct: None):
        self._real, self._before = os.preadv, before
        self.direct = []
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd, views, at):
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.direct.append(direct)
        self._before(direct)
        return self._real(fd, views, at)


@pytest.fixture
def disk(tmp_path):
    """A folder whose file system does direct I/O."""
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(PAGE_BYTES))
        file.flush()
        try:
            assert set_direct(file.fileno(), direct=True)
            assert os.preadv(file.fileno(), [on_page(PAGE_BYTES)], 0) == PAGE_BYTES
        except (OSError, AssertionError):
            pytest.skip("the file system of the temporary folder does no direct I/O")
    return tmp_path


def beside_a_page(size):
    out = on_page(size + 1)[1:]
    assert not is_on_page(out)
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("new_out", [on_page, beside_a_page])
@pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "cached"])
async def test_file_store_read_of_any_size_and_alignment_is_bit_exact(
    tmp_path, size, new_out, is_cold
):
    async with stored_block(tmp_path, size) as stored:
        if is_cold:
            await stored.make_cold()
        assert await stored.read(new_out(size)) == stored.data


@pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "cached"])
async def test_store_progress_of_a_large_read_grows_piece_by_piece(tmp_path, is_cold):
    size = 3 * IO_BYTES + 100
    async with stored_block(tmp_path, size) as stored:
        if is_cold:
            await stored.make_cold()
        out = on_page(size)
        told = ProgressRecord(out, stored.data)
        await stored.store.get_into(A, out, told)
        assert told.wrong == []
        assert told.grew
        assert len(told.counts) >= 4, "0 and the end, and more than one between them"
        assert told.counts[-1] == size


async def test_direct_read_of_a_cold_block_stays_out_of_the_page_cache(disk, monkeypatch):
    async with stored_block(disk, 3 * IO_BYTES) as stored:
        await stored.make_cold()
        reads = Reads(monkeypatch)
        assert await stored.read(on_page(3 * IO_BYTES)) == stored.data
        assert reads.direct == [True] * 3
        assert not stored.is_cached()


async def test_direct_read_partial_last_page_is_read_buffered(disk, monkeypatch):
    async with stored_block(disk, 2 * IO_BYTES + 100) as stored:
        await stored.make_cold()
        reads = Reads(monkeypatch)
        assert await stored.read(on_page(2 * IO_BYTES + 100)) == stored.data
        assert reads.direct == [True, True, False]


async def test_direct_read_block_in_the_page_cache_is_read_buffered(disk, monkeypatch):
    async with stored_block(disk, IO_BYTES) as stored:
        assert stored.is_cached()  # it was just written
        reads = Reads(monkeypatch)
        assert await stored.read(on_page(IO_BYTES)) == stored.data
        assert reads.direct == [False]


async def test_direct_read_unaligned_buffer_is_filled_buffered(disk, monkeypatch):
    async with stored_block(disk, IO_BYTES) as stored:
        await stored.make_cold()
        reads = Reads(monkeypatch)
        assert await stored.read(beside_a_page(IO_BYTES)) == stored.data
        assert not any(reads.direct)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
async def test_direct_read_refused_by_the_disk_falls_back_to_buffered(disk, monkeypatch, number):
    def refuse(direct):
        if direct:
            raise OSError(number, "not like this")

    async with stored_block(disk, 3 * IO_BYTES) as stored:
        await stored.make_cold()
        reads = Reads(monkeypatch, refuse)
        assert await stored.read(on_page(3 * IO_BYTES)) == stored.data
        assert reads.direct == [True] + [False] * 3


async def test_direct_read_disk_error_is_unavailable_without_a_retry(disk, monkeypatch):
    def fail(direct):
        raise OSError(errno.EIO, "broken")

    async with stored_block(disk, 3 * IO_BYTES) as stored:
        await stored.make_cold()
        reads = Reads(monkeypatch, fail)
        with pytest.raises(StoreUnavailable):
            await stored.read(on_page(3 * IO_BYTES))
        assert reads.direct == [True]


async def test_direct_read_unsupported_by_the_file_system_is_buffered(disk, monkeypatch):
    real = fcntl.fcntl

    def refuse(fd, command, *args):
        if command == fcntl.F_SETFL and args[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads")
        return real(fd, command, *args)

    async with stored_block(disk, IO_BYTES) as stored:
        await stored.make_cold()
        monkeypatch.setattr(fcntl, "fcntl", refuse)
        reads = Reads(monkeypatch)
        assert await stored.read(on_page(IO_BYTES)) == stored.data
        assert reads.direct == [False]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs here")
@pytest.mark.parametrize("size", [IO_BYTES, IO_BYTES + 1])
@pytest.mark.parametrize("new_out", [on_page, beside_a_page])
async def test_file_store_on_tmpfs_block_is_read_back(size, new_out):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        async with stored_block(Path(root), size) as stored:
            assert await stored.read(new_out(size)) == stored.data


@pytest.mark.parametrize(
    "at", [100, HEADER_BYTES, HEADER_BYTES + IO_BYTES, HEADER_BYTES + 2 * IO_BYTES]
)
async def test_direct_read_flipped_byte_is_corrupt_and_then_missing(disk, monkeypatch, at):
    async with stored_block(disk, 3 * IO_BYTES) as stored:
        with stored.path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        await stored.make_cold()
        reads = Reads(monkeypatch)
        with pytest.raises(BlockCorrupt):
            await stored.read(on_page(3 * IO_BYTES))
        assert all(reads.direct)
        with pytest.raises(BlockMissing):
            await stored.read(on_page(3 * IO_BYTES))


async def test_direct_read_file_truncated_meanwhile_is_corrupt(disk, monkeypatch):
    async with stored_block(disk, 3 * IO_BYTES) as stored:
        await stored.make_cold()
        reads = Reads(monkeypatch, lambda direct: os.truncate(stored.path, HEADER_BYTES + 100))
        with pytest.raises(BlockCorrupt, match="ends after"):
            await stored.read(on_page(3 * IO_BYTES))
        assert reads.direct[0]


async def test_direct_read_cancelled_waits_for_the_disk_and_stops(disk, monkeypatch):
    held = Held(lambda direct: None)
    async with stored_block(disk, 3 * IO_BYTES) as stored:
        await stored.make_cold()
        reads, out = Reads(monkeypatch, held), on_page(3 * IO_BYTES)
        task = asyncio.create_task(stored.read(out))
        await asyncio.to_thread(held.entered.wait)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done(), "returned while the disk could still write"
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reads.direct == [True], "went on reading"
        out[:] = bytes(len(out))
        assert await stored.read(on_page(3 * IO_BYTES)) == stored.data
        assert bytes(out) == bytes(len(out))


async def test_direct_read_cancelled_waits_for_the_running_checksum(disk, monkeypatch):
    held = Held(IncomingBlock.check)
    async with stored_block(disk, 3 * IO_BYTES) as stored:
        await stored.make_cold()
        # A checksum calls nothing of the system that could be held.
        monkeypatch.setattr(IncomingBlock, "check", lambda *args: held(*args))
        task = asyncio.create_task(stored.read(on_page(3 * IO_BYTES)))
        await asyncio.to_thread(held.entered.wait)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done(), "returned while a thread still used the memory"
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_is_cached_leaves_the_access_time_and_the_flags_as_they_are(tmp_path):
    """Who writes the access time waits for the disk. That is for the read itself."""
    place = tmp_path / "block"
    place.write_bytes(bytes(PAGE_BYTES))
    os.utime(place, (1, 2))  # older than the last write: also with relatime, an access is recorded
    with place.open("rb") as file:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        assert is_cached(file.fileno(), PAGE_BYTES)
        assert place.stat().st_atime == 1
        assert fcntl.fcntl(file, fcntl.F_GETFL) == flags


def test_is_cached_empty_file_and_pipe_count_as_cached(tmp_path):
    place = tmp_path / "empty"
    place.touch()
    with place.open("rb") as file:
        assert is_cached(file.fileno(), 0)
    pipe = os.pipe()
    try:
        assert is_cached(pipe[0], PAGE_BYTES)
    finally:
        for end in pipe:
            os.close(end)


def test_on_page_new_memory_is_page_aligned_and_of_its_size():
    for size in (1, PAGE_BYTES, PAGE_BYTES + 1):
        out = on_page(size)
        assert is_on_page(out)
        assert len(out) == size


# ---- writes ----


class Writes:
    """Notes of every `os.writev` whether it was direct; `before` may raise instead."""

    def __init__(self, monkeypatch, before=lambda direct: None):
        self._real, self._before = os.writev, before
        self.direct = []
        monkeypatch.setattr(os, "writev", self)

    def __call__(self, fd, views):
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if views[0][:1] != b"{":  # of a block, not of the description of its namespace
            self.direct.append(direct)
            self._before(direct)
        return self._real(fd, views)


async def written(root, size, new_data=on_page, **options):
    """The content of the file of a block that was put."""
    layout = layout_of(size)
    frame = BlockFrame(Namespace((("layout", layout.describe()),)), layout)
    data = new_data(size)
    data[:] = block_of("a", layout)

    store = FileStore(BlockFolder(FolderSettings(root, **options)), frame, threads=1)
    try:
        assert await store.put(A, data)
        out = on_page(size)
        await store.get_into(A, out)
        assert out == data
    finally:
        await store.close()
    return NamespaceFolder(root, frame.digest).block(A).read_bytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("new_data", [on_page, beside_a_page])
async def test_file_store_direct_write_of_any_size_and_alignment_is_the_same_file(
    tmp_path, size, new_data
):
    direct = await written(tmp_path / "direct", size, new_data, direct_writes=True)
    assert direct == await written(tmp_path / "cached", size, new_data)


@pytest.mark.parametrize(
    "sizes", [(5000, 8192), (4096, 5000, 4096), (8192, 100, IO_BYTES + 900), (1,)]
)
def test_new_file_direct_write_of_odd_parts_leaves_nothing_out(tmp_path, sizes):
    parts = [on_page(size) for size in sizes]
    for number, part in enumerate(parts, 1):
        part[:] = bytes([number]) * len(part)
    file = NewFile(os.open(tmp_path, os.O_RDONLY), "name", sync=False, direct=True)
    try:
        file.append(parts, threading.Event())
        file.append(parts[:1], threading.Event())
        file.commit(threading.Event())
    finally:
        file.discard()
    assert (tmp_path / "name").read_bytes() == b"".join([*parts, parts[0]])


async def test_file_store_direct_writes_put_all_but_the_last_page_past_the_cache(disk, monkeypatch):
    writes = Writes(monkeypatch)
    await written(disk, 3 * IO_BYTES, direct_writes=True)
    assert writes.direct
    assert all(writes.direct)
    writes.direct.clear()
    await written(disk / "tail", 3 * IO_BYTES + 100, direct_writes=True)
    assert writes.direct == [True] * (len(writes.direct) - 1) + [False]


async def test_file_store_writes_go_through_the_cache_unless_asked(disk, monkeypatch):
    writes = Writes(monkeypatch)
    await written(disk, 3 * IO_BYTES)
    assert writes.direct
    assert not any(writes.direct)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("after", [0, 1])
async def test_file_store_refused_direct_write_continues_through_the_cache(
    disk, monkeypatch, code, after
):
    def refuse(direct):
        if direct and len(writes.direct) > after:
            raise OSError(code, "refused")

    writes = Writes(monkeypatch, refuse)
    await written(disk, 3 * IO_BYTES, direct_writes=True)
    assert writes.direct == sorted(writes.direct, reverse=True)
    assert writes.direct.count(True) == after + 1


async def test_file_store_disk_error_of_a_direct_write_is_not_tried_again(disk, monkeypatch):
    def fail(direct):
        raise OSError(errno.EIO, "a disk")

    writes = Writes(monkeypatch, fail)
    with pytest.raises(StoreUnavailable):
        await written(disk, 3 * IO_BYTES, direct_writes=True)
    assert writes.direct == [True]
