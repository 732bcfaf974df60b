"""A store whose blocks are encoded: the contract of stores, and every kind of inner store."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from faulty_stores import HeldDeletes
from private_files import write_private

from sglang_cake.cli import main
from sglang_cake.codecs.block_arrays import Block
from sglang_cake.codecs.catalogue import chain_of
from sglang_cake.codecs.codec_choice import FixedCodec
from sglang_cake.codecs.frame import (
    ENCODED_HEAD_BYTES,
    HEADER_BYTES,
    BlockFrame,
    encoded_frame,
    frame_of,
    payload_checksum,
    read_header,
)
from sglang_cake.codecs.pipeline import Chain, Forms, is_raw
from sglang_cake.core.codec_names import CHOICES, CODECS, LOSSLESS, LOSSY, namespace_value
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt, ConfigError
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import RequestFacts, Store
from sglang_cake.stores.encoded import EncodedStore, may_lose
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.link_speed import LinkSpeed
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.testing.codec_contract import kv_like
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import LAYOUT as CONTRACT
from sglang_cake.testing.store_contract import StoreContract, block_of, key_of

LAYOUT = BlockLayout.plain(2, (("k", (2, 64)), ("v", (2, 64))), "bfloat16", 128)
BLOCK = kv_like(LAYOUT)
KEY = BlockKey(bytes(range(32)))


class TestZstdFiles(StoreContract):
    """The contract's blocks are any bytes, so that only what keeps every bit can keep it."""

    codec, options, tells_progress = "zstd", "", False

    def open(self, folder: Path) -> Store:
        return open_blocks(
            parse_sources(f"file://{folder}/kv?min_free=0{self.options}"),
            *([self.frame.namespace], self.frame.layout),
            codec=self.codec,
            depth=2,
        )

    def test_store_payloads_of_any_stored_length_are_read_back(self, tmp_path: Path) -> None:
        """Blocks do not: they all have one length, whatever theirs below."""
        zeros = memoryview(bytes(CONTRACT.block_bytes))
        blocks = {"zeros": zeros, "noise": block_of("noise", CONTRACT)}

        async def test(store: Store) -> None:
            for name, block in blocks.items():
                assert await store.put(key_of(name), block)
                out = bytearray(CONTRACT.block_bytes + 64)
                view = memoryview(out)[: CONTRACT.block_bytes]
                assert await store.get_into(key_of(name), view) == CONTRACT.block_bytes
                assert out == bytes(block) + bytes(64)

        self.run(tmp_path, test)
        zeros_bytes, noise_bytes = (
            next(tmp_path.rglob(key_of(name).hex())).stat().st_size for name in blocks
        )
        assert zeros_bytes < noise_bytes - CONTRACT.block_bytes // 2


class TestZstdOverALink(TestZstdFiles):
    options = "&bandwidth=1GB/s"


@pytest.mark.parametrize("codec", CODECS)
async def test_encoded_store_first_block_keeps_the_first_token_exact(
    tmp_path: Path, codec: str
) -> None:
    store = open_blocks(
        parse_sources(f"file://{tmp_path}/kv?min_free=0&bandwidth=100MB/s"),
        *([namespace(codec)], LAYOUT),
        codec=codec,
        depth=1,
    )
    rows = {}
    for name, put in (("first", store.put_first), ("other", store.put)):
        assert await put(key_of(name), memoryview(BLOCK))
        out = memoryview(bytearray(LAYOUT.block_bytes))
        await store.get_into(key_of(name), out)
        found, exact = (Block.over(LAYOUT, view).planes() for view in (out, memoryview(BLOCK)))
        pairs = zip(found, exact, strict=True)
        rows[name] = [(restored[0] == kept[0]).all() for restored, kept in pairs]
    await store.close()
    assert all(rows["first"])
    assert all(rows["other"]) == (codec in LOSSLESS)


def namespace(codec: str) -> Namespace:
    return Namespace(
        (("model", "m"), ("layout", LAYOUT.describe()), ("codec", namespace_value(codec, 0.0)))
    )


async def test_encoded_store_of_a_checked_codec_opens_without_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store is attached while the scheduler thread has requests."""
    layout = BlockLayout.plain(1, (("k", (1, 16)), ("v", (1, 16))), "bfloat16", 48)
    warmed: list[Chain] = []
    warm_up = Chain.warm_up

    def counted(chain: Chain, layout: BlockLayout) -> None:
        warmed.append(chain)
        warm_up(chain, layout)

    monkeypatch.setattr(Chain, "warm_up", counted)
    assert may_lose(layout, "auto", 0.1, None)
    once = len(warmed)
    for _ in range(2):
        sources = parse_sources(f"file://{tmp_path}/kv?min_free=0")
        store = open_blocks(
            sources, [namespace("auto")], layout, codec="auto", depth=1, max_error=0.1
        )
        await store.close()
    assert len(warmed) == once > 1


@pytest.mark.parametrize("codec", CHOICES)
def test_codec_loses_what_its_chains_lose(codec: str) -> None:
    assert may_lose(LAYOUT, codec, 0.0, None) == (codec in LOSSY)
    assert may_lose(LAYOUT, codec, 0.1, None) == (codec in (*LOSSY, "auto"))


def test_codec_auto_with_a_bound_loses_nothing_of_numbers_of_8_bits() -> None:
    layout = BlockLayout.plain(1, (("k", (1, 16)), ("v", (1, 16))), "float8_e4m3fn", 48)
    assert not may_lose(layout, "auto", 0.1, None)


def opened(url: str, codec: str) -> Store:
    return open_blocks(parse_sources(url), [namespace(codec)], LAYOUT, codec=codec, depth=2)


def encoded(inner: Store) -> EncodedStore:
    return EncodedStore(
        *(inner, LAYOUT, FixedCodec(LAYOUT, "int8", chain_of("int8", LAYOUT)).encode),
        link=LinkSpeed(),
        counters=Counters(),
        payload_bytes=LAYOUT.block_bytes + ENCODED_HEAD_BYTES,
        depth=1,
    )


async def round_trip(store: Store) -> bytes:
    assert await store.put(KEY, memoryview(BLOCK))
    assert not await store.put(KEY, memoryview(BLOCK))
    assert await store.contains([KEY]) == [True]
    out = bytearray(LAYOUT.block_bytes)
    assert await store.get_into(KEY, memoryview(out)) == LAYOUT.block_bytes
    return bytes(out)


def stored_file(root: Path) -> Path:
    (file,) = (f for f in root.glob("*/*/*/*") if len(f.name) == 64)
    return file


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("how", ["plain", "sealed", "tiers", "paced"])
async def test_encoded_store_over_plain_sealed_tiers_and_paced_returns_blocks(
    tmp_path: Path, codec: str, how: str
) -> None:
    write_private(tmp_path / "key", bytes(range(32)).hex())
    url = (tmp_path / "store").as_uri()
    if how == "sealed":
        url += f"?key_file={tmp_path / 'key'}"
    if how == "tiers":
        url += f",{(tmp_path / 'second').as_uri()}"
    if how == "paced":
        url += "?bandwidth=100MB/s"

    store = opened(url, codec)
    try:
        found = await round_trip(store)
    finally:
        await store.close()
    assert (found == BLOCK) == (codec in LOSSLESS)
    sizes = [stored_file(tmp_path / "store").stat().st_size]
    if how == "tiers":  # the copy is as short as the original
        sizes.append(stored_file(tmp_path / "second").stat().st_size)
    assert len(set(sizes)) == 1
    assert (sizes[0] < LAYOUT.block_bytes) == (codec != "raw")


@pytest.mark.parametrize("codec", CHOICES)
async def test_open_blocks_every_codec_with_model_facts_round_trips(
    tmp_path: Path, codec: str
) -> None:
    """With what it knows of the model: heads, and how positions turn them."""
    store = open_blocks(
        parse_sources((tmp_path / "store").as_uri()),
        [namespace(codec)],
        LAYOUT,
        codec=codec,
        depth=2,
        max_error=0.5,
        rope_theta=10000.0,
    )
    try:
        found = await round_trip(store)
    finally:
        await store.close()
    assert len(found) == LAYOUT.block_bytes
    assert codec not in LOSSLESS or found == BLOCK


def test_encoded_store_without_a_codec_loads_no_compiler() -> None:
    code = (
        "import importlib, sys\n"
        "import sglang_cake.cli, sglang_cake.codecs.registered_codecs, sglang_cake.stores.encoded\n"
        "for name in sglang_cake.cli.MODULES.values():\n"
        "    importlib.import_module(f'sglang_cake.cli.{name}')\n"
        "assert not {'numba', 'constriction'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_encoded_store_raw_file_is_header_and_plain_block(tmp_path: Path) -> None:
    store = opened(tmp_path.as_uri(), "raw")
    await round_trip(store)
    await store.close()
    raw = stored_file(tmp_path).read_bytes()
    assert raw[HEADER_BYTES:] == BLOCK
    assert raw[:HEADER_BYTES] == BlockFrame(namespace("raw"), LAYOUT).header(KEY, memoryview(BLOCK))


async def test_encoded_store_int8_file_names_its_codec_and_chain(tmp_path: Path) -> None:
    store = opened(tmp_path.as_uri(), "int8")
    await round_trip(store)
    await store.close()
    raw = stored_file(tmp_path).read_bytes()
    header = read_header(raw[:HEADER_BYTES])
    assert header.codec == "int8"
    assert header.payload_bytes == len(raw) - HEADER_BYTES
    count = int.from_bytes(raw[HEADER_BYTES : HEADER_BYTES + 4], "little")
    text = raw[HEADER_BYTES + 4 : HEADER_BYTES + 4 + count]
    assert json.loads(text) == [["groups", {"bits": 8, "group": 128}]]


def test_namespace_value_codecs_and_bounds_are_all_different() -> None:
    values = [namespace_value(codec, 0.0) for codec in CHOICES]
    values += [namespace_value("auto", 0.01), namespace_value("auto", 0.1)]
    assert len({namespace(codec).digest() for codec in CODECS}) == len(CODECS)
    assert len(set(values)) == len(values)


async def test_encoded_store_undecodable_payload_is_corrupt_then_deleted(tmp_path: Path) -> None:
    """The checksums are right: somebody else's program wrote it."""
    store = opened(tmp_path.as_uri(), "int8")
    frame = encoded_frame(namespace("int8"), LAYOUT, "int8")
    inner = parse_sources(tmp_path.as_uri())[0].open(frame, depth=1)
    text = b'[["groups",{"bits":8,"group":128}]]'
    payload = (len(text).to_bytes(4, "little") + text).ljust(64, b"\0") + b"too short"
    await inner.put(KEY, memoryview(payload))
    out = bytearray(LAYOUT.block_bytes)
    with pytest.raises(BlockCorrupt):
        await store.get_into(KEY, memoryview(out))
    await round_trip(store)
    await inner.close()
    await store.close()


async def test_encoded_store_reader_does_not_wait_until_an_undecodable_block_is_deleted() -> None:
    inner = HeldDeletes(MemoryStore())
    store = encoded(inner)
    await inner.put(KEY, memoryview(b"no payload"))
    with pytest.raises(BlockCorrupt):
        await store.get_into(KEY, memoryview(bytearray(LAYOUT.block_bytes)))
    await inner.begun.wait()
    assert await store.contains([KEY]) == [True]
    again = asyncio.create_task(store.put(KEY, memoryview(BLOCK)))
    inner.go.set()
    assert await again is True
    await store.close()


@pytest.mark.parametrize("change", ["cut", "longer", "flipped"])
async def test_encoded_store_damaged_file_raises_block_corrupt(tmp_path: Path, change: str) -> None:
    store = opened(tmp_path.as_uri(), "zstd")
    await round_trip(store)
    file = stored_file(tmp_path)
    raw = bytearray(file.read_bytes())
    if change == "cut":
        raw = raw[:-1]
    elif change == "longer":
        raw += b"\0"
    else:
        raw[HEADER_BYTES + 300] ^= 1
    file.write_bytes(raw)
    with pytest.raises(BlockCorrupt):
        await store.get_into(KEY, memoryview(bytearray(LAYOUT.block_bytes)))
    await store.close()


async def test_encoded_store_without_index_finds_blocks_of_any_length(tmp_path: Path) -> None:
    store = opened(tmp_path.as_uri(), "zstd")
    await round_trip(store)
    await store.close()
    for path in tmp_path.glob("index.db*"):
        path.unlink()
    (tmp_path / "index.db").write_text("another program's file")
    digest = namespace("zstd").digest()
    assert frame_of(namespace("zstd"), LAYOUT).known_bytes is None
    with closing(BlockFolder(FolderSettings(tmp_path))) as folder:
        assert folder.contains(digest, [KEY], None, threading.Event()) == [True]
        assert folder.contains(digest, [KEY], 5, threading.Event()) == [False]


def test_encoded_store_block_with_nan_is_stored_raw() -> None:
    broken = np.frombuffer(BLOCK, np.uint16).copy()
    broken[77] = 0x7FC0  # not a number
    int8 = FixedCodec(LAYOUT, "int8", chain_of("int8", LAYOUT))

    def payload_of(block: bytes) -> memoryview:
        room = memoryview(bytearray(LAYOUT.block_bytes + ENCODED_HEAD_BYTES))
        return int8.encode(Forms(memoryview(block), False, lambda: room), 0)

    assert not is_raw(payload_of(BLOCK))
    payload = payload_of(broken.tobytes())
    assert is_raw(payload)
    assert b'[["raw",{}]]' in bytes(payload[:64])
    assert LAYOUT.block_bytes < len(payload) <= LAYOUT.block_bytes + 64


@pytest.mark.parametrize("codec", LOSSY)
def test_codec_chain_lossy_codec_on_fp8_raises_config_error(codec: str) -> None:
    fp8 = BlockLayout.plain(1, (("k", (1, 8)), ("v", (1, 8))), "float8_e4m3fn", 16)
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        chain_of(codec, fp8)
    chain_of("zstd", fp8)


def test_codec_name_with_seal_suffix_fits_the_header() -> None:
    assert all(len(f"{codec}+aesgcm") <= 16 for codec in CHOICES)


async def test_encoded_store_checksum_covers_the_stored_payload(tmp_path: Path) -> None:
    store = opened(tmp_path.as_uri(), "int4")
    await round_trip(store)
    await store.close()
    raw = stored_file(tmp_path).read_bytes()
    assert read_header(raw[:HEADER_BYTES]).payload_checksum == payload_checksum(raw[HEADER_BYTES:])


async def test_encoded_store_cancelled_read_stops_writing_to_its_buffer(tmp_path: Path) -> None:
    """When the caller has its memory back, no thread writes to it any more."""

    async def round_trip_again(store: Store) -> bytes:
        out = bytearray(LAYOUT.block_bytes)
        await store.get_into(KEY, memoryview(out))
        return bytes(out)

    store = opened(tmp_path.as_uri(), "zstd")
    await round_trip(store)
    for delay in range(8):
        out = bytearray(LAYOUT.block_bytes)
        read = asyncio.create_task(store.get_into(KEY, memoryview(out)))
        for _ in range(delay):
            await asyncio.sleep(0)
        read.cancel()
        await asyncio.wait([read])
        before = bytes(out)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(lambda: None).result()
        assert bytes(out) == before
    assert await round_trip_again(store) == BLOCK
    await store.close()


async def test_encoded_store_request_facts_and_sources_reach_the_inner_store() -> None:
    class Listening(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[tuple[list[BlockKey], RequestFacts]] = []

        async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
            self.told.append((list(keys), facts))

        def sources(self, keys: Sequence[BlockKey]) -> list[int]:
            return [3] * len(keys)

    inner, facts = Listening(), RequestFacts("r1", 300)
    store = encoded(inner)
    await store.on_access([KEY], facts)
    assert store.sources([KEY]) == [3]
    await store.close()
    assert inner.told == [([KEY], facts)]


@pytest.mark.parametrize(("codec", "options"), [("zstd", ""), ("int4", "&key_file={0}/key")])
def test_store_cp_encoded_and_sealed_blocks_are_copied_byte_for_byte(
    tmp_path: Path, codec: str, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_private(tmp_path / "key", bytes(range(32)).hex())
    here, there = (
        f"{(tmp_path / name).as_uri()}?min_free=0{options.format(tmp_path)}" for name in ("a", "b")
    )

    async def filled() -> None:
        store = opened(here, codec)
        await round_trip(store)
        await store.close()

    async def read() -> bytes:
        store = opened(there, codec)
        out = bytearray(LAYOUT.block_bytes)
        await store.get_into(KEY, memoryview(out))
        await store.close()
        return bytes(out)

    asyncio.run(filled())
    plain = [url.replace(options.format(tmp_path), "") for url in (here, there)]
    assert main(["store", "cp", *plain]) == 0  # without the key: sealed blocks stay sealed
    assert main(["store", "verify", plain[1]]) == 0
    capsys.readouterr()
    assert (asyncio.run(read()) == BLOCK) == (codec in LOSSLESS)
    assert stored_file(tmp_path / "b").read_bytes() == stored_file(tmp_path / "a").read_bytes()
