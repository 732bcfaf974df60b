"""Bytes are counted as they cross the link, with every codec."""

import asyncio
import gc
import threading
from pathlib import Path

import pytest

from sglang_cake.core.codec_names import AUTO, CODECS, namespace_value
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import LazyStore
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.testing.codec_contract import kv_like
from sglang_cake.testing.store_contract import FRAME, key_of

LAYOUT = BlockLayout.plain(2, (("k", (2, 64)), ("v", (2, 64))), "bfloat16", 128)
KEYS = [BlockKey(bytes([turn]) * 32) for turn in range(3)]


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != AUTO])
async def test_counted_store_bytes_equal_the_file_sizes_with_every_codec(
    codec: str, tmp_path: Path
) -> None:
    counters = Counters()
    store = open_blocks(
        parse_sources(tmp_path.as_uri()),
        [Namespace((("layout", LAYOUT.describe()), ("codec", namespace_value(codec, 0.0))))],
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


class HangingSource:
    """It cannot be opened, and says so after `may_end`."""

    def __init__(self):
        self.may_end = threading.Event()

    def open(self, frame, *, depth):
        self.may_end.wait()
        raise ConfigError("the disk is gone")


async def test_lazy_store_calls_cancelled_while_it_opens_leave_one_task_and_no_log_line():
    source, unretrieved = HangingSource(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unretrieved.append(context))
    store, before = LazyStore(source, FRAME, depth=1), asyncio.all_tasks()
    for _ in range(20):
        lookup = asyncio.ensure_future(store.contains([key_of("a")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        lookup.cancel()
        await asyncio.wait([lookup])
    left = asyncio.all_tasks() - before
    count = len(left)
    source.may_end.set()
    await asyncio.wait(left)
    await store.close()
    del left, lookup, store
    gc.collect()
    assert count == 1
    assert unretrieved == []


class RefusedSource:
    """Code of another package, which raises what it likes."""

    def open(self, frame, *, depth):
        raise ConnectionRefusedError("nobody listens")


async def test_lazy_store_that_any_error_keeps_from_opening_is_unavailable():
    store = LazyStore(RefusedSource(), FRAME, depth=1)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="nobody listens"):
            await store.stats()
    await store.close()
