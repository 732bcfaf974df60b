"""Stores that are closed when the process ends (`atexit`), as a scheduler process does."""

import subprocess
import sys

import pytest

CLOSES = """
import atexit, sys
from sglang_cake.core.keys import Namespace
from sglang_cake.core.threads import IoThread
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.testing.store_contract import block_of, key_of
from sglang_cake.core.layout import BlockLayout

io = IoThread()
codec, slices, urls = sys.argv[1], int(sys.argv[2]), sys.argv[3]
layout = BlockLayout.plain(
    layers=2, parts=(("k", (2, 8)), ("v", (2, 8))), dtype="bfloat16", block_tokens=16
)
namespaces = [Namespace((("slice", str(number)),)) for number in range(slices)]

async def opened():
    store = open_blocks(parse_sources(urls), namespaces, layout, codec=codec)
    assert await store.put(key_of("a"), memoryview(bytes(layout.block_bytes)))
    return store

def close():
    io.run(store.close(), 60)
    io.close()
    print("closed")

store = io.run(opened(), 60)
atexit.register(close)
"""


@pytest.mark.parametrize(
    ("codec", "slices", "urls"),
    [
        ("raw", 1, "file://{folder}/kv?min_free=0"),
        ("raw", 1, "memory://1MiB"),
        ("zstd", 2, "memory://1MiB,file://{folder}/kv?min_free=0&key_file={folder}/key"),
    ],
)
def test_store_closed_at_the_end_of_the_process_is_closed_whole(tmp_path, codec, slices, urls):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    arguments = [codec, str(slices), urls.format(folder=tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-c", CLOSES, *arguments], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr
    assert not ended.stderr
