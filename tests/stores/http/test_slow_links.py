"""A transfer may take as long as it likes while it moves; one that is stuck is given up."""

import asyncio
import contextlib
import socket
import threading

import pytest
from aiohttp import web
from http_servers import BIG_FRAME, WAIT_S, A, is_open, poll, read_status, start_put, start_request

from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.file.folder import BlockFolder
from sglang_cake.stores.http import request_body
from sglang_cake.stores.http.auth import Access, make_own_token
from sglang_cake.stores.http.connection_places import Places
from sglang_cake.stores.http.http_server import StoreServer
from sglang_cake.stores.http.protocol import block_path
from sglang_cake.stores.http.shared_counters import SharedCounters
from sglang_cake.testing.store_contract import block_of

PATH = block_path(BIG_FRAME.digest, A)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while there is something to do, and jumps to the next timer."""

    now_s = 0.0

    def time(self):
        return self.now_s

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0].when())
        super()._run_once()


def in_virtual_time(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def transfer(pieces, piece_bytes, every_s):
    async with request_body.while_it_moves() as moved:
        for _ in range(pieces):
            await asyncio.sleep(every_s)
            moved(piece_bytes)
    return asyncio.get_running_loop().time()


def test_a_slow_transfer_goes_on_for_hours():
    """64 MB at 10 KB/s: by a limit of 30 s and a second a MB, it could never be stored."""
    took_s = in_virtual_time(transfer(pieces=64_000, piece_bytes=1000, every_s=0.1))
    assert took_s == pytest.approx(6400)


@pytest.mark.parametrize(("piece_bytes", "every_s"), [(1, 1.0), (1000, 1.0), (1 << 20, 31.0)])
def test_a_transfer_that_hardly_moves_ends_soon(piece_bytes, every_s):
    with pytest.raises(TimeoutError):
        in_virtual_time(transfer(pieces=10**6, piece_bytes=piece_bytes, every_s=every_s))


class ImpatientServer:
    """Our server in a thread of this process, with next to no patience."""

    def __init__(self, root):
        self.counts = SharedCounters(1).rows[0]
        self._root, self._ready, self._stop = root, threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        folder = BlockFolder(self._root)
        server = StoreServer(folder, Access(make_own_token()), self.counts)
        place, _ = Places(1).take(lambda: None)
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        runner = web.ServerRunner(web.Server(lambda request: server.handle(request, place)))
        await runner.setup()
        await web.SockSite(runner, listening).start()
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()
        server.close()
        folder.close()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """It has block A of BIG_FRAME."""

    async def fill():
        store = FileSource(tmp_path, min_free_bytes=0).open(BIG_FRAME, depth=1)
        await store.put(A, block_of("a", BIG_FRAME.layout))
        await store.close()

    asyncio.run(fill())
    monkeypatch.setattr(request_body, "STUCK_S", 0.2)
    with ImpatientServer(tmp_path) as it:
        yield it


def test_a_put_that_is_stuck_gives_up_its_place(server, tmp_path):
    connection, _ = start_put(server, "b", BIG_FRAME, BIG_FRAME.framed_bytes // 2)
    assert read_status(connection) == 408
    poll(lambda: server.counts["puts"] == 0, "the place is free")
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_reader_that_reads_no_more_is_cut_off(server):
    connection = start_request(server, f"GET {PATH} HTTP/1.1\nHost: x\n")
    got = len(connection.recv(1000))
    poll(lambda: not is_open(A.hex()), "the block is let go")
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            got += len(piece)
    assert got < BIG_FRAME.framed_bytes
    assert server.counts["sent_bytes"] == 0
