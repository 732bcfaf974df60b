"""Bytes are counted as they cross the link, with every codec."""

from pathlib import Path

import pytest

from sglang_cake.core.codec_names import AUTO, CODECS, namespace_value
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.namespace import Namespace
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.testing.codec_contract import kv_like

LAYOUT = BlockLayout.plain(2, (("k", (2, 64)), ("v", (2, 64))), "bfloat16", 128)
KEYS = [BlockKey(bytes([turn]) * 32) for turn in range(3)]


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != AUTO])
async def test_counted_store_bytes_equal_the_file_sizes_with_every_codec(
    codec: str, tmp_path: Path
) -> None:
    counters = Counters()
    store = open_blocks(
        parse_sources(tmp_path.as_uri()),
        Namespace((("layout", LAYOUT.describe()), ("codec", namespace_value(codec, 0.0)))),
        LAYOUT,
        codec=codec,
        depth=2,
        rope_theta=10000.0,
        counters=counters,
    )
    out = memoryview(bytearray(LAYOUT.block_bytes))
    for turn, key in enumerate(KEYS):
        assert await store.put(key, memoryview(kv_like(LAYOUT, turn)))
        assert not await store.put(key, memoryview(kv_like(LAYOUT, turn)))
        await store.get_into(key, out)
    await store.close()
    names = {key.hex() for key in KEYS}
    files = [path for path in tmp_path.rglob("*") if any(name in path.name for name in names)]
    lengths = sum(path.stat().st_size for path in files)
    assert len(files) == len(KEYS)
    found = counters.snapshot()
    assert found["read_blocks", ""] == len(KEYS)
    assert found["stored_bytes", ""] == found["read_bytes", ""] == lengths
