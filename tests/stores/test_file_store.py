"""What only the file store promises: names, modes, checks, and errors of the disk."""

import json
import os
import re
import shutil
import stat

import pytest
from filestore import A, B, files_below, opened, opened_store, path_of, put_a, read_a

from sglang_cake.codecs.frame import HEADER_BYTES
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, ConfigError
from sglang_cake.core.keys import Namespace
from sglang_cake.stores.file.block_folder import MAX_SET_ASIDE
from sglang_cake.testing.store_contract import (
    FRAME,
    LAYOUT,
    NAMESPACE,
    ProgressRecord,
    block_of,
    key_of,
    read,
)


async def test_file_store_files_have_documented_names_and_private_modes(tmp_path):
    old = os.umask(0)
    try:
        async with opened_store(tmp_path / "kv") as store:
            await put_a(store)
    finally:
        os.umask(old)
    folder = tmp_path / "kv" / NAMESPACE.digest().hex()
    assert files_below(tmp_path) == sorted([path_of(tmp_path / "kv", A), folder / "namespace.json"])
    assert {path.name for path in (tmp_path / "kv").iterdir()} >= {"index.db", "index.lock"}
    assert json.loads((folder / "namespace.json").read_text()) == NAMESPACE.describe()
    for path in (tmp_path / "kv").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


async def test_file_store_namespaces_in_one_root_share_no_blocks(tmp_path):
    async with opened_store(tmp_path) as store:
        await put_a(store)
    with pytest.raises(BlockMissing):
        async with opened_store(tmp_path, namespace=Namespace((("model", "other"),))) as store:
            await read_a(store)
    async with opened_store(tmp_path) as store:
        assert await read_a(store) == block_of("a")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "other"}'])
def test_file_store_wrong_namespace_description_is_refused_and_kept(tmp_path, text):
    description = tmp_path / NAMESPACE.digest().hex() / "namespace.json"
    description.parent.mkdir()
    description.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(description))) as error:
        opened(tmp_path)
    assert "\n" not in str(error.value)
    assert description.read_text() == text


async def spoiled(tmp_path, change):
    """Put block A, change its file's bytes, and return the path."""
    async with opened_store(tmp_path) as store:
        await put_a(store)
    path = path_of(tmp_path, A)
    path.write_bytes(change(path.read_bytes()))
    return path


def flipped(raw, at):
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: b"", "0 bytes"),
        (lambda raw: raw[:100], "100 bytes"),
        (lambda raw: raw[:HEADER_BYTES], "4096 bytes"),
        (lambda raw: raw[: HEADER_BYTES + 5], "4101 bytes"),
        (lambda raw: raw[:-1], "bytes, a block file has"),
        (lambda raw: raw + b"\0", "bytes, a block file has"),
        (lambda raw: flipped(raw, 0), "not a block file"),
        (lambda raw: flipped(raw, 200), "header's checksum"),
        (lambda raw: flipped(raw, HEADER_BYTES), "payload's checksum"),
        (lambda raw: flipped(raw, len(raw) - 1), "payload's checksum"),
        (lambda raw: bytes(len(raw)), "not a block file"),
        (lambda raw: raw[:HEADER_BYTES] + bytes(len(raw) - HEADER_BYTES), "payload's checksum"),
    ],
)
async def test_file_store_damaged_block_is_set_aside_and_can_be_put_again(tmp_path, change, reason):
    path = await spoiled(tmp_path, change)
    kept = path.read_bytes()
    async with opened_store(tmp_path) as store:
        with pytest.raises(BlockCorrupt, match=reason):
            await read_a(store)
        assert await store.contains([A]) == [False]
        with pytest.raises(BlockMissing):
            await read_a(store)
        await put_a(store)
        assert await read_a(store) == block_of("a")
    aside = tmp_path / NAMESPACE.digest().hex() / "corrupt" / A.hex()
    assert aside.read_bytes() == kept


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda raw: flipped(raw, 0), [0]),
        (lambda raw: flipped(raw, HEADER_BYTES - 1), [0]),
        (lambda raw: FRAME.header(B, block_of("a")) + bytes(block_of("a")), [0]),
        (lambda raw: flipped(raw, HEADER_BYTES), [0, LAYOUT.block_bytes]),
        (lambda raw: flipped(raw, len(raw) - 1), [0, LAYOUT.block_bytes]),
    ],
)
async def test_file_store_progress_is_reported_only_after_a_valid_header(tmp_path, change, counts):
    path = await spoiled(tmp_path, change)
    payload = path.read_bytes()[HEADER_BYTES:]
    async with opened_store(tmp_path) as store:
        out = bytearray(LAYOUT.block_bytes)
        told = ProgressRecord(out, payload)
        with pytest.raises(BlockCorrupt):
            await store.get_into(A, memoryview(out), told)
        assert told.counts == counts
        assert told.wrong == []


async def test_file_store_swapped_files_are_corrupt(tmp_path):
    async with opened_store(tmp_path) as store:
        await put_a(store)
        await store.put(B, block_of("b"))
        one, other, spare = path_of(tmp_path, A), path_of(tmp_path, B), tmp_path / "spare"
        one.rename(spare)
        other.rename(one)
        spare.rename(other)
        for key in (A, B):
            with pytest.raises(BlockCorrupt, match="another block"):
                await read(store, key)


async def test_file_store_file_of_another_namespace_is_corrupt(tmp_path):
    other = Namespace((("model", "other"),))
    async with opened_store(tmp_path, namespace=other) as store:
        await put_a(store)
    async with opened_store(tmp_path) as store:
        await put_a(store)
    theirs = tmp_path / other.digest().hex() / A.hex()[:2] / A.hex()[2:4] / A.hex()
    shutil.copyfile(theirs, path_of(tmp_path, A))
    with pytest.raises(BlockCorrupt, match="namespace"):
        async with opened_store(tmp_path) as store:
            await read_a(store)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo])
async def test_file_store_folder_or_pipe_in_place_of_a_block_is_corrupt(tmp_path, make):
    path = path_of(tmp_path, A)
    path.parent.mkdir(parents=True)
    make(path)

    async with opened_store(tmp_path) as store:
        assert await store.contains([A]) == [False]
        with pytest.raises(BlockCorrupt, match="not a file"):
            await read_a(store)
        await put_a(store)
        assert await read_a(store) == block_of("a")


async def test_file_store_many_corrupt_files_are_kept_up_to_a_bound(tmp_path):
    async with opened_store(tmp_path) as store:
        for name in range(MAX_SET_ASIDE + 3):
            await store.put(key_of(name), block_of(name))
            os.truncate(path_of(tmp_path, key_of(name)), 10)
            with pytest.raises(BlockCorrupt):
                await read(store, key_of(name))
    folder = tmp_path / NAMESPACE.digest().hex()
    assert len(files_below(folder / "corrupt")) == MAX_SET_ASIDE
    assert len(files_below(folder)) == MAX_SET_ASIDE + 1  # and namespace.json


async def test_file_store_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    readv, writev = os.preadv, os.writev

    def first_bytes(buffers):
        return [memoryview(buffers[0])[:1000]]

    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: readv(fd, first_bytes(buffers), at))
    monkeypatch.setattr(os, "writev", lambda fd, buffers: writev(fd, first_bytes(buffers)))

    async with opened_store(tmp_path) as store:
        await put_a(store)
        assert await read_a(store) == block_of("a")


async def test_file_store_file_truncated_during_a_read_is_corrupt(tmp_path, monkeypatch):
    async with opened_store(tmp_path) as store:
        await put_a(store)
    readv = os.preadv

    def cut_then_read(fd, buffers, at):
        os.truncate(path_of(tmp_path, A), HEADER_BYTES + 300)
        return readv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    with pytest.raises(BlockCorrupt, match="ends after"):
        async with opened_store(tmp_path) as store:
            await read_a(store)
