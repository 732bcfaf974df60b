"""A transfer may take as long as it likes while it moves; one that is stuck is given up."""

import asyncio
import contextlib
import os
import socket
import stat
import time

import pytest
from filestore import closing
from http_servers import (
    BIG_FRAME,
    FRAMED_BYTES,
    A,
    ServerInProcess,
    ask,
    fill_root,
    framed,
    is_open,
    opened,
    put_description,
    read_status,
    request_bytes,
    start_put,
    start_request,
)
from polling import until

from sglang_cake.stores.http.protocol import block_path, contains_path
from sglang_cake.stores.http.request_body import STUCK_S, read_pieces
from sglang_cake.stores.http.server_blocks import MAX_PUTS
from sglang_cake.testing.store_contract import FRAME
from sglang_cake.testing.virtual_time import in_virtual_time

PATH = block_path(BIG_FRAME.digest, A)


class SlowBody:
    """A request of so many pieces, each of which comes after a while."""

    def __init__(self, pieces, piece_bytes, every_s):
        self.content, self.pieces = self, pieces
        self.piece_bytes, self.every_s = piece_bytes, every_s

    async def readany(self):
        if not self.pieces:
            return b""
        self.pieces -= 1
        await asyncio.sleep(self.every_s)
        return bytes(self.piece_bytes)


async def transfer(pieces, piece_bytes, every_s):
    body = SlowBody(pieces, piece_bytes, every_s)
    whole = b"".join([piece async for piece in read_pieces(body, STUCK_S)])
    assert len(whole) == pieces * piece_bytes
    return asyncio.get_running_loop().time()


def test_request_body_steady_slow_transfer_never_times_out():
    """64 MB at 10 KB/s: by a limit of 30 s and a second a MB, it could never be stored."""
    took_s = in_virtual_time(transfer(pieces=64_000, piece_bytes=1000, every_s=0.1))
    assert took_s == pytest.approx(6400)


@pytest.mark.parametrize(("piece_bytes", "every_s"), [(1, 1.0), (1000, 1.0), (1 << 20, 31.0)])
def test_request_body_nearly_stalled_transfer_times_out(piece_bytes, every_s):
    with pytest.raises(TimeoutError):
        in_virtual_time(transfer(pieces=10**6, piece_bytes=piece_bytes, every_s=every_s))


@pytest.fixture
def server(tmp_path):
    """It has block A of BIG_FRAME, and gives up early."""
    fill_root(tmp_path, BIG_FRAME)
    with ServerInProcess(tmp_path, stuck_s=0.2) as it:
        yield it


def test_store_serve_stuck_put_is_ended_with_408(server, tmp_path):
    connection, _ = start_put(server, "b", BIG_FRAME, 1 << 16)  # the system takes it all
    assert read_status(connection) == 408
    until(lambda: server.metrics()["puts_in_progress"] == 0, "the place is free")
    assert not list(tmp_path.rglob(".tmp-*"))


def test_store_serve_put_does_not_wait_for_uploads_that_hardly_move(tmp_path):
    with ServerInProcess(tmp_path, stuck_s=10.0) as server:
        put_description(server)
        slow = [start_put(server, n, FRAME, 1) for n in range(MAX_PUTS)]
        until(lambda: server.metrics()["puts_in_progress"] == MAX_PUTS, "all have begun")
        assert ask(server, "PUT", block_path(FRAME.digest, A), framed("a"))[0] == 201
        for connection, rest in slow:
            connection.sendall(rest)
            assert read_status(connection) == 201
            connection.close()


def test_store_serve_uploads_that_hardly_move_take_half_of_the_connections(tmp_path):
    with ServerInProcess(tmp_path, most_connections=4 * MAX_PUTS) as server:
        put_description(server)
        slow = [start_put(server, n, FRAME, 1)[0] for n in range(2 * MAX_PUTS)]
        until(lambda: server.metrics()["puts_in_progress"] == 2 * MAX_PUTS, "all have begun")
        path = block_path(FRAME.digest, A)
        status, headers, _ = ask(server, "PUT", path, framed("a"))
        assert (status, headers["retry-after"]) == (503, "1")
        assert ask(server, "GET", path)[0] == 404
        for connection in slow:
            connection.close()


async def test_store_serve_lookups_that_stop_in_their_body_hold_no_other_up(tmp_path):
    path = contains_path(FRAME.digest, FRAMED_BYTES)
    head = f"POST {path} HTTP/1.1\nHost: x\nContent-Length: 32000\nExpect: 100-continue\n"
    with ServerInProcess(tmp_path) as server, contextlib.ExitStack() as held:
        for _ in range(20):
            connection = held.enter_context(start_request(server, head))
            assert read_status(connection) == 100  # the server waits for the body
        async with closing(opened(f"http://127.0.0.1:{server.port}")) as store:
            assert await store.contains([A]) == [False]


def test_store_serve_reader_that_stops_reading_is_disconnected(server):
    connection = start_request(server, f"GET {PATH} HTTP/1.1\nHost: x\n")
    got = len(connection.recv(1000))
    until(lambda: not is_open(A.hex()), "the block is let go")
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            got += len(piece)
    assert got < BIG_FRAME.framed_bytes
    assert server.metrics()["sent_bytes_total"] == 0


def test_http_server_slow_reader_is_cut_off(tmp_path):
    """It takes some bytes all the time, so that the system never gives it up."""
    fill_root(tmp_path, BIG_FRAME)
    with ServerInProcess(tmp_path, stuck_s=0.05) as server:
        connection = server.connect(receive_bytes=1 << 14)
        connection.sendall(request_bytes(PATH))
        got = len(connection.recv(1 << 10))
        with contextlib.suppress(ConnectionResetError):
            while server.metrics()["connections"]:
                got += len(connection.recv(1 << 10))
                time.sleep(0.005)  # 0.2 MB/s: 40 s for the block, which may take 1.65 s
            while piece := connection.recv(1 << 20):  # what the system holds
                got += len(piece)
        assert got < BIG_FRAME.framed_bytes


def end_of_server(connection):
    """The server's end of a connection: the server is in this process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:  # not connected
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found = held.enter_context(socket.socket(fileno=os.dup(fd)))
                if found.getpeername() == connection.getsockname():
                    held.pop_all()
                    return found
    raise AssertionError("it has none")


def test_fast_path_unread_last_bytes_hold_no_file_and_no_connection(tmp_path):
    """The whole response has left the server. Its last 32 KiB wait in the system until the reader
    has space, which never comes."""
    fill_root(tmp_path, BIG_FRAME)
    with ServerInProcess(tmp_path) as server:
        connection = server.connect(receive_bytes=1 << 12)
        connection.sendall(request_bytes(PATH))
        left = BIG_FRAME.framed_bytes - (1 << 15)
        while left > 0:
            piece = connection.recv(min(left, 1 << 12))
            assert piece
            left -= len(piece)
        sent = BIG_FRAME.framed_bytes
        until(lambda: server.metrics()["sent_bytes_total"] == sent, "all has left")
        until(lambda: not is_open(A.hex()), "the block is let go")
        with end_of_server(connection) as end:  # the time until then is the machine's
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000)
        until(lambda: server.metrics()["connections"] == 0, "the connection is given up")
        connection.close()
