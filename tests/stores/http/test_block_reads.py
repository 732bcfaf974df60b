"""GETs of blocks over one connection: one after another, in pieces, slow readers, cold files."""

import contextlib
import os
import socket
import ssl
import threading

import pytest
from http_servers import (
    BIG_FRAME,
    A,
    OurServer,
    ServerInProcess,
    ask,
    fill_root,
    framed,
    is_open,
    make_certificate,
    put_block,
    put_description,
    request_bytes,
)
from polling import until

from sglang_cake.core.threads import Stopped
from sglang_cake.stores.file.block_files import is_cached
from sglang_cake.stores.http.protocol import block_path
from sglang_cake.stores.http.server_blocks import read_into_cache
from sglang_cake.testing.store_contract import key_of

PATH = block_path(BIG_FRAME.digest, A)
BLOCK = framed("a", frame=BIG_FRAME)
DATA = os.urandom(3 << 20)


@pytest.fixture
def root(tmp_path):
    """With block A of BIG_FRAME."""
    fill_root(tmp_path, BIG_FRAME)
    return tmp_path


def answer(connection):
    """The next response: its status and its body."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        assert piece, f"closed after {head!r}"
        head += piece
    length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
    body, left = bytearray(), int(length.split(b":")[1])
    while len(body) < left:
        piece = connection.recv(min(1 << 20, left - len(body)))
        assert piece, f"closed after {len(body)} of {left} bytes"
        body += piece
    return int(head.split()[1]), bytes(body)


def test_fast_path_one_connection_gets_several_blocks(root):
    get = request_bytes(PATH)
    with ServerInProcess(root) as server:
        connection = server.connect()
        for _ in range(3):
            connection.sendall(get)
            assert answer(connection) == (200, BLOCK)
        connection.sendall(request_bytes(block_path(BIG_FRAME.digest, key_of("none"))))
        assert answer(connection)[0] == 404
        connection.sendall(get)
        assert answer(connection) == (200, BLOCK)

        def count(status):
            name = f'requests_total{{method="GET",status="{status}"}}'
            return server.metrics().get(name)

        until(lambda: count(200) == 4, "all are counted")
        assert count(404) == 1
        assert server.metrics()["sent_bytes_total"] == 4 * len(BLOCK)
        connection.close()
        until(lambda: server.metrics()["connections"] == 0, "it has ended")
        assert not is_open(A.hex())


def test_http_server_request_before_the_last_response_has_left_is_answered(root):
    get = request_bytes(PATH)
    with ServerInProcess(root) as server:
        connection = server.connect(receive_bytes=1 << 14)
        connection.sendall(get)
        connection.recv(1, socket.MSG_PEEK)
        connection.sendall(get)  # while some MB of the first are on their way
        assert answer(connection) == (200, BLOCK)
        assert answer(connection) == (200, BLOCK)
        connection.close()


@pytest.mark.parametrize("how", ["in two", "two at a time", "one and a part"])
def test_requests_may_come_in_any_pieces(root, how):
    get = request_bytes(PATH)
    pieces = {
        "in two": [get[:30], get[30:]],
        "two at a time": [get * 2],
        "one and a part": [get + get[:9], get[9:]],
    }[how]
    with ServerInProcess(root) as server:
        connection = server.connect()
        for piece in pieces:
            connection.sendall(piece)
        for _ in range(b"".join(pieces).count(b"GET ")):
            assert answer(connection) == (200, BLOCK)
        connection.close()


def test_fast_path_idle_connection_is_closed(root):
    with ServerInProcess(root, keepalive_s=0.2) as server:

        def answered():
            connection = server.connect()
            with contextlib.suppress(AssertionError, ConnectionError):  # closed before it asked
                connection.sendall(request_bytes(PATH))
                assert answer(connection) == (200, BLOCK)
                return connection

        connection, silent = until(answered, "an answer"), server.connect()
        assert connection.recv(1) == b""
        assert silent.recv(1) == b""
        until(lambda: server.metrics()["connections"] == 0, "both have ended")


def test_sendfile_slow_reader_gets_every_byte(root):
    with ServerInProcess(root) as server:
        connection = server.connect(receive_bytes=1 << 12)
        connection.sendall(request_bytes(PATH, "Range: bytes=7-3000000"))
        assert answer(connection) == (206, BLOCK[7:3000001])
        connection.close()


def test_sendfile_slow_reader_over_tls_gets_every_byte(root, tmp_path_factory):
    cert, key = make_certificate(tmp_path_factory.mktemp("tls"))
    trusting = ssl.create_default_context(cafile=cert)
    with ServerInProcess(root, tls=(cert, key)) as server:
        connection = trusting.wrap_socket(
            server.connect(receive_bytes=1 << 14), server_hostname="127.0.0.1"
        )
        for _ in range(2):
            connection.sendall(request_bytes(PATH))
            assert answer(connection) == (200, BLOCK)
        connection.sendall(request_bytes(PATH, "Range: bytes=7-3000000"))
        assert answer(connection) == (206, BLOCK[7:3000001])
        connection.close()


def test_http_server_reader_that_hangs_up_leaves_nothing_open(root):
    with ServerInProcess(root) as server:
        connection = server.connect(receive_bytes=1 << 12)
        connection.sendall(request_bytes(PATH))
        connection.recv(1000)
        until(lambda: is_open(A.hex()), "the block is being sent")
        connection.close()
        until(lambda: server.metrics()["connections"] == 0, "it has ended")
        assert not is_open(A.hex())
        assert server.metrics()["sent_bytes_total"] == 0


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA)
    os.sync()
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def make_cold(fd):
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(fd, len(DATA)):
        pytest.skip("this file system keeps what it was told to forget")


def test_reading_makes_a_cold_file_warm(fd):
    make_cold(fd)
    read_into_cache(fd, threading.Event())
    assert is_cached(fd, len(DATA))


def test_is_cached_file_of_which_only_the_ends_are_cached_is_false(fd):
    make_cold(fd)
    for at in (0, len(DATA) - 1):
        os.pread(fd, 1, at)
    assert not is_cached(fd, len(DATA))


def test_read_into_cache_with_stop_set_raises_stopped(fd):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        read_into_cache(fd, stop)


def test_store_serve_cold_block_is_sent_whole_and_as_a_range(tmp_path):
    server = OurServer(tmp_path / "root")
    put_description(server, BIG_FRAME)
    put_block(server, "a", BIG_FRAME)
    (file,) = until(lambda: list(tmp_path.rglob(A.hex())), "the file")
    os.sync()
    with file.open("rb") as block:
        os.posix_fadvise(block.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert ask(server, "GET", PATH)[2] == BLOCK
    ranged = ask(server, "GET", PATH, headers={"Range": "bytes=5-3000000"})
    assert ranged[2] == BLOCK[5:3000001]
    assert server.stop() == 0
