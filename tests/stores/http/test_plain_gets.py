"""Plain GETs of blocks are answered without aiohttp, and anything else is still answered by it."""

import asyncio
import os
import socket
import threading

import pytest
from http_servers import BIG_FRAME, TOKEN, WAIT_S, A, framed, is_open, poll, write_token

from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.file.folder import BlockFolder
from sglang_cake.stores.http import request_body, worker
from sglang_cake.stores.http.auth import Access
from sglang_cake.stores.http.fast_path import MAX_BYTES, PlainGet, read_plain_get
from sglang_cake.stores.http.http_server import StoreServer
from sglang_cake.stores.http.prefork import CONNECTION, READY
from sglang_cake.stores.http.protocol import block_path
from sglang_cake.stores.http.shared_counters import SharedCounters
from sglang_cake.testing.store_contract import block_of, key_of

PATH = block_path(BIG_FRAME.digest, A)
BLOCK = framed("a", frame=BIG_FRAME)
ALLOWED = f"Authorization: Bearer {TOKEN}"


def request(*fields, path=PATH, first=None):
    lines = [first or f"GET {path} HTTP/1.1", *fields]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")


PLAIN = request("Host: x", ALLOWED)
BARE = request("Host: x")


def test_a_plain_get_is_recognised():
    def read(data, **different):
        expected = PlainGet(BIG_FRAME.digest, A, None, True, len(data))
        assert read_plain_get(data) == expected._replace(**different)

    read(BARE)
    fields = ("Accept: */*", "accept-encoding:identity", "User-Agent: a (b)", "HOST: [::1]:80")
    read(request(*fields, "Connection: keep-alive"))
    read(request("Host: x", "Authorization: Bearer t t"), authorization="Bearer t t")
    read(request("Host: x", "Cake-Use: no"), counts=False)
    for behind in (BARE, b"G", b"\0"):
        read(BARE + behind, size=len(BARE))


OTHERS = {
    "nothing": b"",
    "a part": PLAIN[:-1],
    "no host": request(),
    "a host twice": request("Host: x", "host: y"),
    "a range": request("Host: x", "Range: bytes=0-1"),
    "a body": request("Host: x", "Content-Length: 1"),
    "a chunked body": request("Host: x", "Transfer-Encoding: chunked"),
    "an expectation": request("Host: x", "Expect: 100-continue"),
    "the last one": request("Host: x", "Connection: close"),
    "an upgrade": request("Host: x", "Connection: Upgrade", "Upgrade: websocket"),
    "a folded field": request("Host: x", " y"),
    "a space before the colon": request("Host : x"),
    "no colon": request("Host: x", "Accept"),
    "an empty value": request("Host:"),
    "a control": request("Host: x", "Accept: \x01"),
    "no ASCII": request("Host: x", "Accept: \xe9"),
    "a line feed alone": PLAIN.replace(b"Host: x\r\n", b"Host: x\n"),
    "an empty line first": b"\r\n" + PLAIN,
    "HTTP/1.0": request("Host: x", first=f"GET {PATH} HTTP/1.0"),
    "another method": request("Host: x", first=f"HEAD {PATH} HTTP/1.1"),
    "a query": request("Host: x", path=PATH + "?a"),
    "a whole URL": request("Host: x", path="http://x" + PATH),
    "no block": request("Host: x", path="/health"),
    "upper case": request("Host: x", path=PATH.upper()),
    "another folder": request("Host: x", path=PATH[:-68] + "0" + PATH[-67:]),
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS.keys())
def test_anything_else_is_not(data):
    assert read_plain_get(data) is None


class Worker:
    """The answering part of a worker, in a thread of this process; the test deals connections."""

    def __init__(self, root, most_connections=100):
        self.counts = SharedCounters(1).rows[0]
        self._most = most_connections
        self._root, self._access = root, Access(write_token(root))
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setblocking(False)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self):
        self._thread.start()
        self._channel.settimeout(WAIT_S)
        assert self._channel.recv(1) == READY
        return self

    def __exit__(self, *_):
        self._channel.close()
        self._thread.join()
        self._theirs.close()
        self._listening.close()

    async def _serve(self):
        folder = BlockFolder(self._root)
        server = StoreServer(folder, self._access, self.counts)
        await worker.Dealt(server, self._theirs, asyncio.Event(), self._most).answer()
        server.close()
        folder.close()

    def connect(self, receive_bytes=None):
        """A connection with a buffer of so many bytes."""
        there = socket.socket()
        if receive_bytes:
            there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        there.settimeout(WAIT_S)
        there.connect(self._listening.getsockname())
        here, _ = self._listening.accept()
        with here:
            socket.send_fds(self._channel, [CONNECTION], [here.fileno()])
        return there


@pytest.fixture
def root(tmp_path):
    """With block A of BIG_FRAME."""

    async def fill():
        store = FileSource(tmp_path, min_free_bytes=0).open(BIG_FRAME, depth=1)
        await store.put(A, block_of("a", BIG_FRAME.layout))
        await store.close()

    asyncio.run(fill())
    return tmp_path


@pytest.fixture
def without_http(monkeypatch):
    """aiohttp gets nothing to do."""
    monkeypatch.setattr(worker._HttpServer, "__call__", None)


def answer(connection):
    """The next answer: its status and its body."""
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


def test_one_connection_gets_block_after_block(root, without_http):
    with Worker(root) as it:
        connection = it.connect()
        for _ in range(3):
            connection.sendall(PLAIN)
            assert answer(connection) == (200, BLOCK)
        connection.sendall(
            request("Host: x", ALLOWED, path=block_path(BIG_FRAME.digest, key_of("none")))
        )
        assert answer(connection)[0] == 404
        connection.sendall(PLAIN)
        assert answer(connection) == (200, BLOCK)
        poll(lambda: dict_of(it)[200] == 4, "all are counted")
        assert dict_of(it)[404] == 1
        assert it.counts["sent_bytes"] == 4 * len(BLOCK)
        connection.close()
        poll(lambda: it.counts["closed_connections"] == 1, "it has ended")
        assert not is_open(A.hex())


def dict_of(it):
    return {status: count for _, status, count in it.counts.tally.answers()}


def test_a_cold_block_is_brought_in_and_sent(root, without_http):
    with Worker(root) as it:
        (file,) = root.rglob(A.hex())
        os.sync()
        with file.open("rb") as block:
            os.posix_fadvise(block.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        connection = it.connect()
        connection.sendall(PLAIN)
        assert answer(connection) == (200, BLOCK)
        connection.close()


def test_a_request_may_come_before_the_answer_to_the_last_has_left(root, without_http):
    with Worker(root) as it:
        connection = it.connect(receive_bytes=1 << 14)
        connection.sendall(PLAIN)
        connection.recv(1)
        connection.sendall(PLAIN)  # while some MB of the first are on their way
        body = b""
        while len(body) < len(BLOCK):
            body += connection.recv(1 << 20)
        rest = body[body.index(b"\r\n\r\n") + 4 :]
        while len(rest) < len(BLOCK):
            rest += connection.recv(1 << 20)
        assert rest[: len(BLOCK)] == BLOCK
        again = rest[len(BLOCK) :]
        while not again.endswith(BLOCK[-100:]):
            again += connection.recv(1 << 20)
        assert again.startswith(b"HTTP/1.1 200 OK\r\n")
        assert again.endswith(b"\r\n\r\n" + BLOCK)
        connection.close()


def test_who_says_that_no_more_requests_come_gets_what_it_asked_for(root, without_http):
    with Worker(root) as it:
        connection = it.connect(receive_bytes=1 << 14)
        connection.sendall(PLAIN)
        connection.recv(1, socket.MSG_PEEK)
        connection.shutdown(socket.SHUT_WR)
        assert answer(connection) == (200, BLOCK)
        assert connection.recv(1) == b""
        connection.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [PLAIN[:30], PLAIN[30:]],
        [PLAIN * 2],
        [PLAIN + PLAIN[:9], PLAIN[9:]],
        [request("Host: x", ALLOWED, f"Accept: {'x' * MAX_BYTES}")],
    ],
    ids=["in two", "two at once", "one and a part", "long"],
)
def test_requests_that_come_otherwise_are_answered_by_aiohttp(root, pieces):
    with Worker(root) as it:
        connection = it.connect()
        connection.sendall(PLAIN)
        assert answer(connection) == (200, BLOCK)
        for piece in pieces:
            connection.sendall(piece)
            poll(lambda: True, "")
        for _ in range(b"".join(pieces).count(b"GET ")):
            assert answer(connection) == (200, BLOCK)
        connection.sendall(request("Host: x", ALLOWED, first="POST /health HTTP/1.1"))
        assert answer(connection)[0] in (200, 405)
        connection.sendall(PLAIN)
        assert answer(connection) == (200, BLOCK)
        connection.close()
        poll(lambda: it.counts["closed_connections"] == 1, "it has ended")


def test_a_token_is_asked_for(root):
    with Worker(root) as it:
        for wrong in (BARE, request("Host: x", "Authorization: Bearer " + "x" * 20)):
            connection = it.connect()
            connection.sendall(PLAIN)
            assert answer(connection) == (200, BLOCK)
            connection.sendall(wrong)
            assert answer(connection)[0] == 401
            assert connection.recv(1) == b""
            connection.close()


def test_a_connection_without_a_request_ends(root, monkeypatch, without_http):
    monkeypatch.setattr(worker, "KEEPALIVE_S", 3.0)  # the request comes well before
    with Worker(root) as it:
        connection = it.connect()
        connection.sendall(PLAIN)
        assert answer(connection) == (200, BLOCK)
        assert connection.recv(1) == b""
        poll(lambda: it.counts["closed_connections"] == 1, "it has ended")
        connection.close()


def test_a_reader_that_reads_no_more_is_cut_off(root, monkeypatch, without_http):
    monkeypatch.setattr(request_body, "STUCK_S", 0.2)
    with Worker(root) as it:
        connection = it.connect(receive_bytes=1 << 14)
        connection.sendall(PLAIN)
        connection.recv(1000)
        poll(lambda: it.counts["closed_connections"] == 1, "it is cut off")
        assert not is_open(A.hex())
        assert it.counts["sent_bytes"] == 0
        assert dict_of(it) == {408: 1}
        connection.close()


def test_a_reader_that_leaves_the_last_bytes_holds_nothing(root, monkeypatch, without_http):
    """All of the answer has left the worker, and its last 32 KiB wait in the system for room at
    the reader's, which never comes."""
    monkeypatch.setattr(worker, "STUCK_S", 3.0)  # what the system is told; also while we read
    with Worker(root) as it:
        connection = it.connect(receive_bytes=1 << 12)
        connection.sendall(PLAIN)
        left = len(BLOCK) - (1 << 15)
        while left > 0:
            left -= len(connection.recv(min(left, 1 << 12)))
        poll(lambda: it.counts["sent_bytes"] == len(BLOCK), "all has left")
        assert not is_open(A.hex())
        poll(lambda: it.counts["closed_connections"] == 1, "the connection is given up")
        connection.close()
