"""`sglang-cake store` over HTTP and S3: what it leaves behind, and to which size it shrinks."""

import asyncio
import os
import time

import pytest
from filestore import closing
from http_servers import OurServer, ServerInProcess
from moto_process import moto
from storetools import ALICE, BOB, file_of, flip, held, store, told, url_of
from system_calls import Disk
from test_s3 import credentials  # noqa: F401 - a fixture

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.circuit_breaker import FAILURES
from sglang_cake.stores.http import protocol
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.stores.s3.s3_store import DESCRIBE_EVERY_S, S3Source, S3Store
from sglang_cake.testing.store_contract import block_of, key_of, read

BENCH = ("--sizes", "8KiB", "--depths", "1,3", "--bytes", "64KiB")


@pytest.fixture(scope="module")
def s3():
    with moto() as server:
        yield server


@pytest.fixture(params=["http", "s3"])
def url(request, tmp_path):
    """Of an empty store."""
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        yield server.url(server.make_bucket())
    else:
        server = OurServer(tmp_path / "root")
        yield server.base
        assert server.stop() == 0


def opened_store(url, frame, clock=time.monotonic):
    """Args: clock: of a store in S3."""
    (source,) = parse_sources(url)
    if isinstance(source, S3Source):
        return closing(S3Store(source.place, frame, depth=4, limits=source.limits, clock=clock))
    return closing(source.open(frame, depth=4))


def fill(url, frame, names):
    async def main():
        async with opened_store(url, frame) as store:
            for name in names:
                await store.put(key_of(name), block_of(name, frame.layout))

    asyncio.run(main())


def listed(capsys, url):
    (answer,) = told(capsys, "ls", url)["stores"]
    return {each["namespace"]: each["blocks"] for each in answer["namespaces"]}


def test_store_bench_and_clear_of_a_remote_store_leave_no_namespace(url, capsys):
    fill(url, ALICE, "ab")
    fill(url, BOB, "c")
    told(capsys, "bench", url, *BENCH)
    assert listed(capsys, url) == {ALICE.digest.hex(): 2, BOB.digest.hex(): 1}
    told(capsys, "clear", url, "--yes", "--namespace", ALICE.digest.hex())
    assert listed(capsys, url) == {BOB.digest.hex(): 1}
    told(capsys, "clear", url, "--yes")
    assert listed(capsys, url) == {}


async def test_remote_store_namespace_cleared_while_open_takes_new_puts(url, capsys):
    now_s = 0.0
    async with opened_store(url, ALICE, clock=lambda: now_s) as store:
        await store.put(key_of("a"), block_of("a"))
        await asyncio.to_thread(told, capsys, "clear", url, "--yes")
        now_s += DESCRIBE_EVERY_S
        assert await store.contains([key_of("a")]) == [False]
        assert await store.put(key_of("b"), block_of("b")) is True
        assert await read(store, key_of("b")) == block_of("b")
    assert await asyncio.to_thread(listed, capsys, url) == {ALICE.digest.hex(): 1}


def test_store_gc_of_a_remote_store_shrinks_it_to_the_given_size(url, capsys):
    fill(url, ALICE, range(12))
    fill(url, BOB, range(12))
    (before,) = told(capsys, "stat", url)["stores"]
    to_bytes = before["used_bytes"] - before["block_bytes"] // 3
    (answer,) = told(capsys, "gc", url, "--to", to_bytes)["stores"]
    (after,) = told(capsys, "stat", url)["stores"]
    assert after["used_bytes"] <= to_bytes
    assert 0 < after["blocks"] == before["blocks"] - answer["evicted_blocks"]


@pytest.fixture
def spoil(url, request, tmp_path):
    """Flips a bit of a block of ALICE."""

    def of_server(name):
        flip(file_of(tmp_path / "root", ALICE, name))

    def of_bucket(name):
        path = url.removeprefix("s3://").partition("?")[0] + protocol.block_path(
            ALICE.digest, key_of(name)
        )
        s3 = request.getfixturevalue("s3")
        raw = bytearray(s3.read(path))
        raw[-1] ^= 1
        s3.write(path, bytes(raw))

    return of_bucket if url.startswith("s3:") else of_server


@pytest.mark.parametrize("tool", ["verify", "cp"])
def test_store_verify_and_cp_of_a_remote_store_pass_many_corrupt_blocks(
    url, spoil, tool, tmp_path, capsys
):
    names = sorted(range(3 * FAILURES), key=key_of)  # as they are listed
    fill(url, ALICE, names)
    for name in names[: 2 * FAILURES]:
        spoil(name)
    if tool == "cp":
        other = tmp_path / "other"
        answer = told(capsys, "cp", url, url_of(other), "--depth", "1", status=1)
        assert held(other, ALICE) == {key_of(name) for name in names[2 * FAILURES :]}
    else:
        (answer,) = told(capsys, "verify", url, "--depth", "1", status=1)["stores"]
        assert (answer["ok"], answer["unanswered"]) == (FAILURES, 0)
    assert answer["corrupt"] == 2 * FAILURES


LARGE = BlockLayout.plain(1, (("k", (1 << 20,)),), "uint8", 1)
LARGE_FRAME = BlockFrame(Namespace((("layout", LARGE.describe()),)), LARGE)


@pytest.fixture
def filling(tmp_path, monkeypatch):
    """A server without a capacity, on a disk that has room for 30 MB more than it holds at first:
    its URL, and its folder."""
    root = tmp_path / "root"

    class Filling(Disk):
        f_blocks = 10**9
        room_bytes = 10**9  # for all files of the server

        def _ask(self, folder):
            folders = os.walk(root)
            files = (os.path.join(where, name) for where, _, names in folders for name in names)
            taken_bytes = sum(os.stat(file).st_size for file in files if os.path.exists(file))
            self.f_bavail = max(0, self.room_bytes - taken_bytes)
            return super()._ask(folder)

    disk = Filling(monkeypatch)
    with ServerInProcess(root) as server:
        base = f"http://127.0.0.1:{server.port}"
        fill(base, BOB, range(60))
        disk.room_bytes = 10**9 - os.statvfs(root).f_bavail + 30 * 10**6
        yield base, root


def test_store_cp_and_bench_to_a_server_without_capacity_evict_no_block(filling, tmp_path, capsys):
    url, root = filling
    fill(url_of(tmp_path / "from"), LARGE_FRAME, range(40))
    answer = told(capsys, "cp", url_of(tmp_path / "from"), url, status=1)
    assert answer["full"]
    assert 0 < answer["copied"] == len(held(root, LARGE_FRAME)) < 30
    assert store("bench", url, "--sizes", "1MiB", "--depths", "8", "--bytes", "8MiB") == 2
    assert "more would evict blocks of the store" in capsys.readouterr().err
    assert len(held(root, LARGE_FRAME)) == answer["copied"]
    assert len(held(root, BOB)) == 60


def test_store_cp_and_bench_to_a_server_that_does_not_tell_its_room_are_refused(
    filling, tmp_path, capsys, monkeypatch
):
    """As one of 0.1.0."""
    usual = protocol.write_stats

    def write_stats(stats):
        fields = usual(stats)
        del fields["unused_bytes"]
        return fields

    monkeypatch.setattr(protocol, "write_stats", write_stats)
    url, root = filling
    fill(url_of(tmp_path / "from"), LARGE_FRAME, range(3))
    for tool in (["cp", url_of(tmp_path / "from"), url], ["bench", url, *BENCH]):
        assert store(*tool) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "does not tell how much room it has" in line
    assert held(root, LARGE_FRAME) == set()
    assert store("bench", url, *BENCH, "--evict") == 0
