"""Sealed blocks: nothing of them can be read without the key, and no forged one is believed."""

import asyncio
import hashlib
import hmac
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from faulty_stores import FaultyStore, HeldDeletes
from filestore import closing
from polling import async_until
from private_files import write_private

from sglang_cake.codecs.frame import (
    HEADER_BYTES,
    NONCE_BYTES,
    SEALED_BYTES,
    BlockFrame,
    frame_of,
    payload_checksum,
    read_header,
    sealed_frame,
)
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, ConfigError, StoreUnavailable
from sglang_cake.core.keys import Namespace
from sglang_cake.stores.base import StoredNamespace
from sglang_cake.stores.encrypted import (
    BlockCipher,
    EncryptedSource,
    EncryptedStore,
    MasterKey,
    read_key_file,
)
from sglang_cake.stores.open_store import open_store, parse_sources
from sglang_cake.stores.throttled import ThrottledStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import (
    FRAME,
    LAYOUT,
    NAMESPACE,
    StoreContract,
    block_of,
    key_of,
    read,
)

A, B = key_of("a"), key_of("b")
SECRET = bytes(range(32))


def url_of(folder, secret=SECRET, options=""):
    name = f"key-{hashlib.sha256(secret).hexdigest()[:8]}"
    key_file = write_private(folder / name, secret.hex())
    return f"file://{folder}/kv?min_free=0&key_file={key_file}{options}"


def opened(folder, secret=SECRET, frame=FRAME):
    return open_store(parse_sources(url_of(folder, secret)), frame, depth=2)


def sealed_memory(inner=None, secret=SECRET, depth=2, frame=FRAME):
    master = MasterKey(secret)
    digest = sealed_frame(frame, master.name).digest
    cipher = BlockCipher(master.block_key(digest), digest)
    inner = MemoryStore() if inner is None else inner
    return EncryptedStore(inner, cipher, block_bytes=frame.payload_bytes, depth=depth)


class TestSealedFileStore(StoreContract):
    options, tells_progress = "", False

    def open(self, folder):
        (source,) = parse_sources(url_of(folder, options=self.options))
        store = source.open(self.frame, depth=2)
        assert isinstance(store, EncryptedStore)
        return store


class TestSealedPacedFileStore(TestSealedFileStore):
    options = "&bandwidth=100GB/s"

    def open(self, folder):
        store = super().open(folder)
        assert isinstance(store.inner, ThrottledStore)
        return store


class TestSealedMemoryStoreOneAtATime(StoreContract):
    tells_progress = False

    def open(self, folder):
        return sealed_memory(depth=1, frame=self.frame)


async def put_a(store):
    assert await store.put(A, block_of("a"))


async def read_a(store):
    return await read(store, A)


def block_files(folder):
    """By key, the files of all blocks below a folder. Unlike `rglob`, `os.walk` goes on if a folder
    is removed meanwhile."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return {path.name: path for path in files if re.fullmatch("[0-9a-f]{64}", path.name)}


def path_of(folder, key):
    return block_files(folder)[key.hex()]


# ---- what an attacker finds ----


async def test_encrypted_store_disk_has_neither_block_bytes_nor_the_secret(tmp_path):
    block = bytes(block_of("a"))
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
    plain = tmp_path / "plain"
    plain.mkdir()
    async with closing(
        open_store(parse_sources(f"file://{plain}?min_free=0"), FRAME, depth=1)
    ) as store:
        await put_a(store)

    def holders(folder):
        """Files that hold any 16 bytes in a row of the block."""
        pieces = {block[at : at + 16] for at in range(len(block) - 15)}
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) >= 3
        return [path.name for path in files if any(p in path.read_bytes() for p in pieces)]

    assert holders(plain) == [A.hex()]  # so the search finds what is there
    assert holders(tmp_path / "kv") == []
    kept = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert SECRET not in kept
    assert SECRET.hex().encode() not in kept


async def test_encrypted_store_equal_blocks_have_different_ciphertexts(tmp_path):
    async with closing(opened(tmp_path)) as store:
        found = []
        for _ in range(2):
            await put_a(store)
            found.append(path_of(tmp_path, A).read_bytes()[HEADER_BYTES:])
            await store.delete(A)
    first, second = found
    assert first[:NONCE_BYTES] != second[:NONCE_BYTES]
    assert first[NONCE_BYTES:] != second[NONCE_BYTES:]


async def test_encrypted_store_another_key_or_none_finds_no_blocks(tmp_path):
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
    plain = open_store(parse_sources(f"file://{tmp_path}/kv?min_free=0"), FRAME, depth=1)
    for other in (opened(tmp_path, bytes(32)), plain):
        async with closing(other):
            assert await other.contains([A]) == [False]
            with pytest.raises(BlockMissing):
                await read_a(other)
            assert [block async for block in other.list_blocks()] == []
            await put_a(other)
            assert await read_a(other) == block_of("a")
    async with closing(opened(tmp_path)) as store:
        assert await read_a(store) == block_of("a")


def forge(path, change):
    """Change the payload of a block file, and give it a header whose checksums fit."""
    raw = path.read_bytes()
    payload = change(raw[HEADER_BYTES:])
    head = bytearray(raw[: HEADER_BYTES - 16])
    head[88:104] = payload_checksum(payload)
    path.write_bytes(bytes(head) + payload_checksum(bytes(head)) + payload)


def flipped(raw, at):
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


FORGERIES = {
    "nonce": lambda raw: flipped(raw, 0),
    "first byte": lambda raw: flipped(raw, NONCE_BYTES),
    "last byte": lambda raw: flipped(raw, len(raw) - 17),
    "tag": lambda raw: flipped(raw, len(raw) - 1),
    "zeros": lambda raw: bytes(len(raw)),
    "no seal at all": lambda raw: bytes(block_of("a")) + bytes(SEALED_BYTES),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_encrypted_store_forged_block_is_corrupt_and_deleted(tmp_path, forgery):
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
        forge(path_of(tmp_path, A), FORGERIES[forgery])
        with pytest.raises(BlockCorrupt, match="was not encrypted"):
            await read_a(store)
        await async_until(lambda: block_files(tmp_path) == {})
        assert await store.put(A, block_of("a")) is True
        assert await read_a(store) == block_of("a")


async def test_file_store_forged_block_without_encryption_is_accepted(tmp_path):
    plain = open_store(parse_sources(f"file://{tmp_path}/kv?min_free=0"), FRAME, depth=1)
    async with closing(plain):
        await put_a(plain)
        forge(path_of(tmp_path, A), lambda raw: flipped(raw, 3))
        assert await read_a(plain) == flipped(bytes(block_of("a")), 3)


async def test_encrypted_store_swapped_payloads_are_corrupt(tmp_path):
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
        await store.put(B, block_of("b"))
        payloads = {k: path_of(tmp_path, k).read_bytes()[HEADER_BYTES:] for k in (A, B)}
        forge(path_of(tmp_path, A), lambda raw: payloads[B])
        forge(path_of(tmp_path, B), lambda raw: payloads[A])
        for key in (A, B):
            with pytest.raises(BlockCorrupt, match="was not encrypted"):
                await read(store, key)


async def test_encrypted_store_payload_of_another_namespace_is_corrupt(tmp_path):
    other = BlockFrame(Namespace((("model", "other"),)), LAYOUT)
    async with closing(opened(tmp_path, frame=other)) as store:
        await put_a(store)
    theirs = path_of(tmp_path, A).read_bytes()[HEADER_BYTES:]
    path_of(tmp_path, A).unlink()
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
        forge(path_of(tmp_path, A), lambda raw: theirs)
        with pytest.raises(BlockCorrupt, match="was not encrypted"):
            await read_a(store)


async def test_encrypted_store_truncated_file_is_corrupt(tmp_path):
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
        os.truncate(path_of(tmp_path, A), HEADER_BYTES + LAYOUT.block_bytes)
        with pytest.raises(BlockCorrupt, match="bytes, a block file has"):
            await read_a(store)
        assert await store.contains([A]) == [False]


async def test_encrypted_store_reader_does_not_wait_until_a_forged_block_is_deleted():
    inner = HeldDeletes(MemoryStore())
    async with closing(sealed_memory(inner)) as store:
        await inner.put(A, memoryview(bytes(LAYOUT.block_bytes + SEALED_BYTES)))
        with pytest.raises(BlockCorrupt):
            await read_a(store)
        await inner.begun.wait()
        assert await store.contains([A]) == [True]
        again = asyncio.create_task(store.put(A, block_of("a")))
        inner.go.set()
        assert await again is True


class UndeletableStore(FaultyStore):
    async def delete(self, key):
        raise StoreUnavailable("read-only")


async def test_encrypted_store_undeletable_forged_block_stays_corrupt():
    inner = UndeletableStore(MemoryStore())
    async with closing(sealed_memory(inner)) as store:
        await put_a(store)
        inner.flip(A)
        for _ in range(2):
            with pytest.raises(BlockCorrupt):
                await read_a(store)


# ---- the namespace and the header ----


async def test_encrypted_store_namespace_names_the_key_without_its_secret(tmp_path):
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
    (plain,) = parse_sources(f"file://{tmp_path}/kv?min_free=0")
    (stored,) = await plain.namespaces()
    name = MasterKey(SECRET).name
    assert stored.fields == NAMESPACE.describe() | {"sealed": name}
    assert re.fullmatch("[0-9a-f]{16}", name)
    assert name != MasterKey(bytes(32)).name
    assert SECRET.hex()[:8] not in name
    header = read_header(path_of(tmp_path, A).read_bytes()[:HEADER_BYTES])
    assert header.codec == "raw+aesgcm"
    assert header.payload_bytes == LAYOUT.block_bytes + 28


async def test_file_source_without_the_key_checks_sealed_blocks(tmp_path):
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
    (plain,) = parse_sources(f"file://{tmp_path}/kv?min_free=0")
    (stored,) = await plain.namespaces()
    frame = frame_of(Namespace(tuple(stored.fields.items())), LAYOUT)
    assert frame == sealed_frame(FRAME, MasterKey(SECRET).name)
    assert frame_of(NAMESPACE, LAYOUT) == FRAME
    async with closing(open_store([plain], frame, depth=1)) as store:
        out = bytearray(frame.payload_bytes)
        await store.get_into(A, memoryview(out))
        assert block_of("a") not in out
        forge(path_of(tmp_path, A), lambda raw: raw[:-1])
        with pytest.raises(BlockCorrupt):
            await store.get_into(A, memoryview(out))


async def test_encrypted_source_namespaces_are_those_of_its_key(tmp_path):
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
    async with closing(opened(tmp_path, bytes(32))) as store:
        await put_a(store)
    plain = open_store(parse_sources(f"file://{tmp_path}/kv?min_free=0"), FRAME, depth=1)
    async with closing(plain) as store:
        await put_a(store)
    (source,) = parse_sources(url_of(tmp_path))
    (stored,) = await source.namespaces()
    assert stored == StoredNamespace(NAMESPACE.digest(), NAMESPACE.describe())


@dataclass
class Hostile:
    """A source whose descriptions hold anything."""

    stored: list[StoredNamespace]

    async def namespaces(self):
        return self.stored


@pytest.mark.parametrize(
    "fields", [{}, {"sealed": 3}, {"model": None, "sealed": "x"}, {"a": "\ud800"}, {"a": ["b"]}]
)
async def test_encrypted_source_malformed_descriptions_have_no_fields(tmp_path, fields):
    source = EncryptedSource(
        Hostile([StoredNamespace(bytes(32), fields)]), write_private(tmp_path / "key", SECRET.hex())
    )
    assert await source.namespaces() == [StoredNamespace(bytes(32), {})]


def hkdf(info, length):
    """RFC 5869 with SHA-256 and no salt, for at most 32 bytes."""
    prk = hmac.digest(bytes(32), SECRET, "sha256")
    return hmac.digest(prk, info + b"\1", "sha256")[:length]


async def test_encrypted_store_file_is_decrypted_as_documented(tmp_path):
    async with closing(opened(tmp_path)) as store:
        await put_a(store)
    path = path_of(tmp_path, A)
    namespace = bytes.fromhex(path.parts[-4])
    name = hkdf(b"sglang_cake seal v1 name", 8).hex()
    assert namespace == Namespace((*NAMESPACE.fields, ("sealed", name))).digest()
    payload = path.read_bytes()[4096:]
    key = hkdf(b"sglang_cake seal v1 blocks" + namespace, 32)
    assert AESGCM(key).decrypt(payload[:12], payload[12:], namespace + A) == block_of("a")


# ---- the store ----


async def test_encrypted_store_second_put_leaves_the_stored_bytes():
    store = sealed_memory()
    async with closing(store):
        await put_a(store)
        before = dict(store.inner.blocks)
        assert await store.put(A, block_of("b")) is False
        assert store.inner.blocks == before


async def test_encrypted_store_many_calls_make_a_bounded_number_of_buffers():
    made = {}

    class SeenBuffers(MemoryStore):
        async def put(self, key, data):
            made[id(data.obj)] = data.obj
            return await super().put(key, data)

        async def get_into(self, key, out, progress=None):
            made[id(out.obj)] = out.obj
            return await super().get_into(key, out, progress)

    async with closing(sealed_memory(SeenBuffers(), depth=3)) as store:
        for _ in range(3):
            await asyncio.gather(*(store.put(key_of(n), block_of(n)) for n in range(20)))
            got = await asyncio.gather(*(read(store, key_of(n)) for n in range(20)))
            assert got == [block_of(n) for n in range(20)]
            assert 0 < len(made) <= 2 * 3


async def test_encrypted_store_parallel_large_blocks_are_read_back():
    layout = replace(LAYOUT, block_tokens=2**15)
    cipher = BlockCipher(bytes(32), NAMESPACE.digest())
    store = EncryptedStore(MemoryStore(), cipher, block_bytes=layout.block_bytes, depth=4)
    assert layout.block_bytes >= 2**21
    names = range(6)
    async with closing(store):
        blocks = [block_of(name, layout) for name in names]
        for _ in range(3):
            await asyncio.gather(*(store.put(key_of(n), blocks[n]) for n in names))
            got = await asyncio.gather(*(read(store, key_of(n), layout) for n in names))
            assert got == blocks
            for name in names:
                await store.delete(key_of(name))


# ---- what the user may get wrong ----


def spoil(path, how):
    if how == "missing":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir(mode=0o700)
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif how == "group may read":
        path.chmod(0o640)
    elif how == "all may write":
        path.chmod(0o602)
    else:
        path.write_bytes(how)


WRONG = {
    "missing": r"cannot be read: No such file or directory; make one by: \(umask 077; openssl",
    "folder": "is not a file",
    "pipe": "is not a file",
    "group may read": "is open to others: chmod 600 /",
    "all may write": "is open to others",
    b"": "does not hold 64 hex digits",
    SECRET: "does not hold 64 hex digits",
    SECRET.hex()[:-1].encode(): "does not hold 64 hex digits",
    SECRET.hex().encode() + b"0": "does not hold 64 hex digits",
    SECRET.hex().encode() + b"\n" * 1000: "is too long: write at most 256 bytes",
    b"g" * 64: "does not hold 64 hex digits",
}


@pytest.mark.parametrize("how", WRONG)
def test_key_file_invalid_is_one_error_line_without_the_secret(tmp_path, how):
    path = write_private(tmp_path / "key", SECRET.hex() + "\n")
    (source,) = parse_sources(f"file://{tmp_path}/kv?key_file={path}")
    spoil(path, how)
    for call in (source.check, lambda: source.open(FRAME, depth=1)):
        with pytest.raises(ConfigError, match=WRONG[how]) as error:
            call()
        assert f"key file {path} " in str(error.value)
        assert "\n" not in str(error.value)
        assert SECRET.hex()[:16] not in str(error.value)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("text", [SECRET.hex(), SECRET.hex() + "\n", SECRET.hex().upper() + " \n"])
def test_key_file_with_hex_digits_gives_the_master_key(tmp_path, text):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o400)
    assert read_key_file(path) == MasterKey(SECRET)
    (source,) = parse_sources(f"file://{tmp_path}/kv?key_file={path}")
    source.check()


def test_master_key_repr_hides_the_secret():
    text = repr(MasterKey(SECRET))
    assert SECRET.hex() not in text
    assert repr(SECRET)[2:12] not in text


@pytest.mark.parametrize("value", ["", "key", "~/key", "/a%00b"])
def test_key_file_option_without_an_absolute_path_is_refused(value):
    with pytest.raises(ConfigError, match=r"'key_file': '.*' is not an absolute path"):
        parse_sources(f"file:///a?key_file={value}")


def test_parse_sources_key_file_option_opens_no_file():
    (source,) = parse_sources("file:///a?key_file=/nowhere/key&fsync=data")
    assert source.key_file == Path("/nowhere/key")
    assert source.inner.fsync == "data"
