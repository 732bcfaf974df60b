"""A tier in memory behind a codec: what moves up is decoded once, and lent from then on."""

from pathlib import Path

import pytest
from polling import until_deleted

from sglang_cake.codecs.catalogue import chain_of, decode, decodes_on_device
from sglang_cake.codecs.frame import HEADER_BYTES, encoded_frame
from sglang_cake.codecs.pipeline import RAW_CHAIN, RAW_HEAD_BYTES, is_raw
from sglang_cake.core.buffers import on_page
from sglang_cake.core.codec_names import CODECS, LOSSLESS, namespace_value
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt, BlockMissing
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import Store
from sglang_cake.stores.link_speed import LinkSpeed
from sglang_cake.stores.open_store import open_blocks, open_store, parse_sources
from sglang_cake.testing.codec_contract import kv_like
from sglang_cake.testing.store_contract import key_of

LAYOUT = BlockLayout.plain(2, (("k", (2, 64)), ("v", (2, 64))), "bfloat16", 128)
BLOCK = kv_like(LAYOUT)
KEY = key_of("a")
ENCODED = [codec for codec in CODECS if codec != "raw"]


def namespace(codec: str) -> Namespace:
    return Namespace((("model", "m"), ("codec", namespace_value(codec, 0.0))))


def files(folder: Path, name: str = "files") -> str:
    return f"{(folder / name).as_uri()}?min_free=0"


def opened(url: str, codec: str, counters: Counters | None = None, device: bool = False) -> Store:
    return open_blocks(
        parse_sources(url),
        [namespace(codec)],
        LAYOUT,
        codec=codec,
        depth=2,
        counters=counters,
        on_device=device,
    )


async def put_below(folder: Path, codec: str) -> bytes:
    """A block that another server stored, and what a read of it gives."""
    store = opened(files(folder), codec)
    await store.put(KEY, memoryview(BLOCK))
    block = await read(store)
    await store.close()
    return block


async def read(store: Store, size_bytes: int = LAYOUT.block_bytes) -> bytes:
    assert await store.contains([KEY]) == [True]
    out = on_page(size_bytes)
    await store.get_into(KEY, out)
    return bytes(out)


def stored_file(folder: Path) -> Path:
    (file,) = (f for f in folder.rglob("*") if len(f.name) == 64 and f.is_file())
    return file


@pytest.mark.parametrize("codec", ENCODED)
async def test_memory_encoded_block_is_decoded_once_as_it_moves_up_and_then_lent(
    tmp_path: Path, codec: str
) -> None:
    expected = await put_below(tmp_path, codec)
    assert (expected == BLOCK) == (codec in LOSSLESS)
    crossed_bytes = stored_file(tmp_path).stat().st_size
    counters = Counters()
    store = opened(f"memory://4MB,{files(tmp_path)}", codec, counters)
    assert store.lend(KEY) is None
    assert await read(store) == expected
    assert counters.snapshot()["read_bytes", ""] == crossed_bytes, "not those of the block"
    stored_file(tmp_path).unlink()
    lent = store.lend(KEY)
    assert lent is not None
    assert lent.buffer.view == expected
    lent.release()
    assert counters.snapshot()["read_blocks", ""] == 2
    assert await read(store) == expected
    await store.close()


@pytest.mark.parametrize("codec", ENCODED)
async def test_memory_in_front_of_a_device_keeps_what_the_device_decodes(
    tmp_path: Path, codec: str
) -> None:
    """Fewer bytes cross the bus then."""
    payload_bytes = encoded_frame(namespace(codec), LAYOUT, codec).payload_bytes
    expected = await put_below(tmp_path, codec)
    store = opened(f"memory://4MB,{files(tmp_path)}", codec, device=True)
    block = on_page(LAYOUT.block_bytes)
    for _ in range(2):
        payload = memoryview(await read(store, payload_bytes))
        stays = decodes_on_device(chain_of(codec, LAYOUT))
        assert is_raw(payload) != stays
        if stays:
            size_bytes = stored_file(tmp_path).stat().st_size - HEADER_BYTES
        else:
            size_bytes = RAW_HEAD_BYTES + LAYOUT.block_bytes
        decode(LAYOUT, payload[:size_bytes], block)
        assert block == expected
    lent = store.lend(KEY)
    assert (lent is None) == stays
    if lent is not None:
        assert lent.buffer.view.nbytes == payload_bytes, "as a buffer of staging"
        assert lent.buffer.view[:size_bytes] == payload[:size_bytes]
        lent.release()
    await store.close()


async def test_memory_put_of_a_block_that_moved_up_gives_the_tier_below_its_encoded_form(
    tmp_path: Path,
) -> None:
    await put_below(tmp_path, "zstd")
    encoded = stored_file(tmp_path).read_bytes()
    store = opened(f"memory://4MB,{files(tmp_path)}", "zstd")
    await read(store)
    below = opened(files(tmp_path), "zstd")
    await below.delete(KEY)  # as another server does that evicts it
    await below.close()
    assert await store.contains([KEY]) == [True], "memory has it"
    assert not await store.put(KEY, memoryview(BLOCK)), "as another rank does with MLA"
    await store.close()
    assert stored_file(tmp_path).read_bytes() == encoded


@pytest.mark.parametrize("below", [False, True])
async def test_memory_lends_a_put_block_that_auto_leaves_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: bool
) -> None:
    """However long writes take, which wait for threads. The tier below gets a smaller payload."""
    monkeypatch.setattr(LinkSpeed, "bytes_per_s", lambda link: 50e3)
    counters = Counters()
    store = opened(f"memory://4MB,{files(tmp_path)}" if below else "memory://4MB", "auto", counters)
    assert await store.contains([KEY]) == [False]  # it is open
    await store.put(KEY, memoryview(BLOCK))
    lent = store.lend(KEY)
    assert lent is not None
    assert lent.buffer.view == BLOCK
    lent.release()
    await store.close()
    counts = counters.snapshot()
    assert (counts["encoded_blocks", "raw"], counts["encoded_blocks", "zstd"]) == (1, below)


async def test_memory_tier_between_files_gets_the_block_and_the_files_its_payload(
    tmp_path: Path,
) -> None:
    await put_below(tmp_path, "zstd")
    payload = stored_file(tmp_path).read_bytes()[HEADER_BYTES:]
    store = opened(f"memory://512KB,{files(tmp_path, 'upper')},{files(tmp_path)}", "zstd")
    assert await read(store) == BLOCK
    for other in "bcdefgh":  # until memory has evicted the block
        await store.put(key_of(other), memoryview(BLOCK))
    assert store.lend(KEY) is None
    assert await read(store) == BLOCK
    await store.close()
    (copy,) = (tmp_path / "upper").rglob(KEY.hex())
    assert copy.read_bytes()[HEADER_BYTES:] == payload, "moved up at the second read"


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("text", "text_bytes", "block"),
    [
        ('[["groups",{"bits":8,"group":128}]]', 35, BLOCK[:-1]),
        (RAW_CHAIN.describe(), 12, BLOCK[:-1]),
        (RAW_CHAIN.describe(), 13, BLOCK),
        (RAW_CHAIN.describe(), 2**32 - 1, BLOCK),
    ],
)
async def test_memory_undecodable_block_does_not_move_up(
    tmp_path: Path, text: str, text_bytes: int, block: bytes, device: bool
) -> None:
    """The checksums are right: somebody else's program wrote it."""
    frame = encoded_frame(namespace("int8"), LAYOUT, "int8")
    below = open_store(parse_sources(files(tmp_path)), frame, depth=1)
    head = text_bytes.to_bytes(4, "little") + text.encode()
    payload = head.ljust(-(-len(head) // 64) * 64, b"\0") + block
    await below.put(KEY, memoryview(payload))
    store = opened(f"memory://4MB,{files(tmp_path)}", "int8", device=device)
    assert await store.contains([KEY]) == [True]
    out = on_page(frame.payload_bytes if device else LAYOUT.block_bytes)
    with pytest.raises(BlockCorrupt):
        await store.get_into(KEY, out)
    assert store.lend(KEY) is None
    await until_deleted(below, KEY)
    with pytest.raises(BlockMissing):
        await store.get_into(KEY, out)
    assert store.lend(KEY) is None
    await below.close()
    await store.close()
