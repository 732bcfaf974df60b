"""Servers that stop, are killed and come back."""

import asyncio
import itertools
import json
import random

import pytest
from http_servers import (
    BIG_FRAME,
    FRAMED_BYTES,
    A,
    OurServer,
    ServerInProcess,
    ask,
    connects,
    framed,
    metrics,
    opened,
    opened_client,
    put_block,
    put_description,
    read_status,
    start_put,
    start_request,
)
from polling import async_answer, async_until, until

from sglang_cake.cli import main
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreError, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.http.protocol import block_path, contains_path
from sglang_cake.testing.store_contract import FRAME, block_of, key_of, read

BIG_PATH = block_path(BIG_FRAME.digest, A)


def test_store_serve_stopped_finishes_its_open_requests(tmp_path):
    server = OurServer(tmp_path / "root")
    put_description(server, BIG_FRAME)
    put_block(server, "a", BIG_FRAME)
    expected = framed("a", frame=BIG_FRAME)
    idle = start_request(server, "GET /health HTTP/1.1\nHost: x\n")
    assert read_status(idle) == 200
    reading = start_request(server, f"GET {BIG_PATH} HTTP/1.1\nHost: x\n")
    got = reading.recv(100_000)
    writing, rest = start_put(server, "b", BIG_FRAME, BIG_FRAME.framed_bytes // 2)
    server.process.terminate()
    until(lambda: not connects(server.port), "no more connections are taken")
    writing.sendall(rest)
    assert read_status(writing) == 201
    while piece := reading.recv(1 << 20):
        got += piece
    assert got.partition(b"\r\n\r\n")[2] == expected
    assert server.ended() == 0
    again = OurServer(tmp_path / "root")
    path = block_path(BIG_FRAME.digest, key_of("b"))
    assert ask(again, "GET", path)[2] == framed("b", frame=BIG_FRAME)
    assert again.stop() == 0


def test_store_serve_killed_during_a_put_stores_no_block(tmp_path):
    server = OurServer(tmp_path / "root")
    put_description(server, BIG_FRAME)
    connection, _ = start_put(server, "a", BIG_FRAME, BIG_FRAME.framed_bytes - 1)

    def is_being_written():
        return any(path.stat().st_size > 1 << 20 for path in tmp_path.rglob(".tmp-*"))

    until(is_being_written, "the block is being written")
    server.kill()
    connection.close()
    with OurServer(tmp_path / "root") as server:
        contains = contains_path(BIG_FRAME.digest, BIG_FRAME.framed_bytes)
        assert ask(server, "GET", BIG_PATH)[0] == 404
        assert ask(server, "POST", contains, A)[2] == b"\0"
        until(lambda: not list(tmp_path.rglob(".tmp-*")), "what was begun is swept away")
        assert put_block(server, "a", BIG_FRAME) == 201
        assert ask(server, "GET", BIG_PATH)[2] == framed("a", frame=BIG_FRAME)


async def test_store_serve_killed_at_random_keeps_all_acknowledged_blocks(tmp_path):
    moments, stored = random.Random(11), set()

    async def write(store, turn):
        for n in range(10_000):
            name = (turn, n)
            try:
                await store.put(key_of(name), block_of(name))
            except StoreError:
                return
            stored.add(name)

    for turn in range(4):
        server = OurServer(tmp_path / "root")
        store = opened(server.base)
        writing = asyncio.create_task(write(store, turn))
        await async_until(lambda turn=turn: (turn, 0) in stored)
        await asyncio.sleep(moments.uniform(0, 0.1))  # random moments are the point of this test
        await asyncio.to_thread(server.kill)
        await writing
        await store.close()
    server = OurServer(tmp_path / "root")
    async with opened_client(server.base) as store:
        names = sorted(stored)
        assert all(await store.contains([key_of(name) for name in names]))
        for name in names:
            assert await read(store, key_of(name)) == block_of(name)
        async for block in store.list_blocks():  # also those whose answer was lost
            path = block_path(FRAME.digest, block.key)
            body = await asyncio.to_thread(lambda path=path: ask(server, "GET", path)[2])
            assert len(body) == FRAMED_BYTES
    assert server.stop() == 0


async def test_http_store_list_is_whole_after_its_server_has_stopped(tmp_path):
    """A reader who works on each block takes minutes, and the server limits its waiting."""
    count = 200_000  # of more bytes than the buffers of the connection

    class Many(BlockFolder):
        def list_blocks(self, digest):
            return (BlockInfo(BlockKey(i.to_bytes(32, "big")), 9, 1.0) for i in range(count))

    with ServerInProcess(tmp_path / "root", make_folder=Many) as server:
        async with opened_client(f"http://127.0.0.1:{server.port}") as store:
            blocks = store.list_blocks()
            first = await anext(blocks)
            await asyncio.to_thread(server.stop)
            keys = {first.key} | {block.key async for block in blocks}
    assert len(keys) == count


async def test_http_store_list_without_end_is_an_error_beyond_a_bound(tmp_path):
    class Endless(BlockFolder):
        def list_blocks(self, digest):
            return (BlockInfo(BlockKey(i.to_bytes(32, "big")), 9, 1.0) for i in itertools.count())

    with ServerInProcess(tmp_path / "root", make_folder=Endless) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with opened_client(url, max_list_bytes=1 << 20) as store:
            with pytest.raises(StoreUnavailable, match="a list of more than 1048576 bytes"):
                [block async for block in store.list_blocks()]


async def test_http_store_after_server_restarts_reads_and_puts_again(tmp_path):
    server = OurServer(tmp_path / "root")
    port = server.port
    store = opened(server.base)
    assert await store.put(A, block_of("a"))
    for stop in (OurServer.stop, OurServer.kill):
        await asyncio.to_thread(stop, server)
        while not store.counters.refused:  # until the breaker is open
            with pytest.raises(StoreUnavailable):
                await read(store, A)
        with pytest.raises(StoreUnavailable):
            await store.put(key_of("b"), block_of("b"))
        server = await asyncio.to_thread(lambda: OurServer(tmp_path / "root", port=port))
        assert await async_answer(lambda: read(store, A)) == block_of("a")
        store.counters.refused = 0
    assert store.counters.breaker_openings >= 2
    assert store.counters.corrupt == 0
    assert await store.put(key_of("b"), block_of("b"))
    await store.close()
    assert server.stop() == 0


async def test_http_store_server_with_a_new_empty_folder_is_filled_again(tmp_path):
    server = OurServer(tmp_path / "root")
    store = opened(server.base)
    assert await store.put(A, block_of("a"))
    await asyncio.to_thread(server.stop)
    server = OurServer(tmp_path / "other root", port=server.port)
    with pytest.raises(BlockMissing):
        await read(store, A)
    assert await store.put(A, block_of("a"))  # the namespace is told once more
    assert await read(store, A) == block_of("a")
    await store.close()
    assert server.stop() == 0


async def test_store_serve_corrupt_block_is_set_aside_logged_and_counted(tmp_path):
    server = OurServer(tmp_path)
    name = A.hex()
    path = tmp_path / FRAME.digest.hex() / name[:2] / name[2:4] / name
    async with opened_client(server.base) as store:
        await store.put(A, block_of("a"))
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        with pytest.raises(BlockCorrupt):
            await read(store, A)
        await async_until(lambda: not path.exists())
        assert (tmp_path / FRAME.digest.hex() / "corrupt" / name).exists()
        assert await store.contains([A]) == [False]
        assert await store.put(A, block_of("a")) is True
        assert await read(store, A) == block_of("a")
    assert ask(server, "POST", block_path(FRAME.digest, A))[0] == 204  # whole: left where it is
    assert ask(server, "POST", block_path(FRAME.digest, key_of("nobody")))[0] == 404
    assert path.exists()
    until(lambda: metrics(server)["corrupt_blocks_total"] == 1, "it is counted")
    assert server.stop() == 0
    (line,) = (line for line in server.stderr().splitlines() if "WARNING" in line)
    assert "a corrupt block was set aside, 1 so far: " in line
    assert f"{path}: the payload's checksum does not match" in line


def test_store_serve_reads_of_tools_leave_access_times_unchanged(tmp_path):
    server = OurServer(tmp_path / "root")
    put_description(server)
    for name in ("looked at", "used", "asked for"):
        put_block(server, name)
    listing = f"/{FRAME.digest.hex()}/"

    def times():
        lines = ask(server, "GET", listing)[2].splitlines()
        return {block["key"]: block["used_s"] for block in map(json.loads, lines)}

    before = times()

    def path(name):
        return block_path(FRAME.digest, key_of(name))

    assert ask(server, "GET", path("looked at"), headers={"Cake-Use": "no"})[0] == 200
    assert ask(server, "POST", path("looked at"))[0] == 204
    assert ask(server, "HEAD", path("asked for"))[0] == 200
    assert main(["store", "verify", server.base]) == 0
    assert ask(server, "GET", path("used"))[0] == 200
    assert server.stop() == 0  # by now it is written down
    server = OurServer(tmp_path / "root")
    changed = {key for key, used_s in times().items() if used_s != before[key]}
    assert changed == {key_of("used").hex()}
    assert server.stop() == 0
