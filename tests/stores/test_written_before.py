"""File stores that an earlier version wrote are read: format of blocks, keys, namespaces, index.

`written_before/index-2.tar.xz` is of commit 534a73c, the oldest one with today's namespaces. Its
index has schema 2. `index-3.tar.xz` is of commit 838c257. Each has three blocks of one prompt in
each namespace. A new format gets a file of its own beside them.
"""

import hashlib
import tarfile
from array import array
from pathlib import Path

import pytest
from polling import async_answer

from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey, KeySeed, Namespace, block_keys
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import Store
from sglang_cake.stores.open_store import open_blocks, parse_sources

FILES = sorted(Path(__file__).with_name("written_before").glob("*.tar.xz"))
LAYOUT = BlockLayout.plain(
    layers=2, parts=(("k", (2, 8)), ("v", (2, 8))), dtype="bfloat16", block_tokens=8
)
TOKENS = array("q", range(100, 128))  # three blocks, and four tokens
BLOCKS = [
    hashlib.shake_128(f"block {number}".encode()).digest(LAYOUT.block_bytes // 2) * 2
    for number in range(3)
]


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="tar")
    return tmp_path


class Stored:
    """One of the stores, opened as a server opens it."""

    def __init__(self, root: Path, codec: str, *, encrypted: bool = False) -> None:
        fields = (("weights", "toy"), ("dtype", "bfloat16"), ("layout", LAYOUT.describe()))
        self.namespace = Namespace((*fields, ("codec", codec)))
        self.folder = root / ("sealed" if encrypted else "kv")
        option = f"&key_file={root}/key" if encrypted else ""
        self._url = f"file://{self.folder}?min_free=0&capacity=1GB{option}"
        self._codec = codec

    def open(self) -> Store:
        sources = parse_sources(self._url)
        return open_blocks(sources, [self.namespace], LAYOUT, codec=self._codec, depth=2)

    def keys(self, salt: str = "alice") -> list[BlockKey]:
        return block_keys(KeySeed(self.namespace.digest(), None, salt), TOKENS, 8)


@pytest.fixture(params=["raw", "zstd", "encrypted"])
def stored(request: pytest.FixtureRequest, root: Path) -> Stored:
    if request.param == "encrypted":
        return Stored(root, "raw", encrypted=True)
    return Stored(root, request.param)


async def until_indexed(store: Store, keys: list[BlockKey]) -> None:
    """An index of another schema is made anew in the background, from the files."""

    async def indexed() -> bool:
        return all(await store.contains(keys))

    await async_answer(indexed)


async def test_file_store_of_an_earlier_version_is_found_and_read(stored: Stored) -> None:
    store = stored.open()
    await until_indexed(store, stored.keys())
    assert await store.contains(stored.keys(salt="bob")) == [False] * 3
    for key, block in zip(stored.keys(), BLOCKS, strict=True):
        out = bytearray(LAYOUT.block_bytes)
        assert await store.get_into(key, memoryview(out)) == LAYOUT.block_bytes
        assert out == block
        assert not await store.put(key, memoryview(block))  # it is there
    await store.close()


async def test_file_store_of_an_earlier_version_takes_new_blocks(stored: Stored) -> None:
    store = stored.open()
    (key, *_) = stored.keys(salt="bob")
    assert await store.put(key, memoryview(BLOCKS[0]))
    await store.close()
    again = stored.open()
    await until_indexed(again, [key, *stored.keys()])
    await again.close()


async def test_file_store_of_an_earlier_version_wrong_byte_is_noticed(stored: Stored) -> None:
    first, second, _ = stored.keys()
    (path,) = stored.folder.rglob(first.hex())
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    store = stored.open()
    await until_indexed(store, stored.keys())
    out = bytearray(LAYOUT.block_bytes)
    with pytest.raises(BlockCorrupt):
        await store.get_into(first, memoryview(out))
    await store.get_into(second, memoryview(out))
    await store.close()
