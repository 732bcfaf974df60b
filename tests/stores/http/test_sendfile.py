"""Files from disk to socket, warm and cold."""

import asyncio
import os
import socket
import ssl
import threading

import pytest
from bad_server import until
from http_servers import (
    BIG_FRAME,
    OurServer,
    ask,
    claim,
    framed,
    make_certificate,
    poll,
    put_block,
)

from sglang_cake.stores.http.protocol import block_path
from sglang_cake.stores.http.sendfile import is_cached, read_in, send_at_once, send_rest
from sglang_cake.stores.threads import Stopped
from sglang_cake.testing.store_contract import key_of

DATA = os.urandom(3 << 20)
HEAD = b"the head\r\n\r\n"


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
    if is_cached(fd, 0, len(DATA)):
        pytest.skip("this file system keeps what it was told to forget")


def test_reading_in_makes_a_cold_file_warm(fd):
    make_cold(fd)
    read_in(fd, 0, len(DATA), threading.Event())
    assert is_cached(fd, 0, len(DATA))
    read_in(fd, 0, 2 * len(DATA), threading.Event())  # ends where the file does


def test_reading_in_stops_when_told_to(fd):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        read_in(fd, 0, len(DATA), stop)


async def no_drain():
    raise AssertionError("nothing of the block waits in the transport")


def test_a_slow_reader_over_tls_gets_every_byte(fd, tmp_path):
    cert, key = make_certificate(tmp_path)
    here, there = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    here.load_cert_chain(cert, key)
    there.load_verify_locations(cert)
    moved = []

    async def send(reader, writer):
        assert send_at_once(writer.transport, HEAD, fd, 0, len(DATA)) == 0
        await send_rest(writer.transport, fd, 0, len(DATA), moved.append, writer.drain)
        writer.close()

    async def main():
        server = await asyncio.start_server(send, "127.0.0.1", 0, ssl=here)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=there, limit=1 << 12)
        got = bytearray()
        while piece := await reader.read(1 << 14):
            got += piece
            await asyncio.sleep(0)  # the sender is never waited for: it fills all there is
        writer.close()
        server.close()
        return got

    assert asyncio.run(main()) == HEAD + DATA
    assert 0 < sum(moved) <= len(DATA)


@pytest.mark.parametrize(("start", "count"), [(0, len(DATA)), (4097, 1 << 20), (7, 1)])
def test_a_slow_reader_gets_every_byte(fd, start, count):
    """More than a socket takes at once, so that both ways of sending have their part."""
    got, moved = bytearray(), []

    class Sink(asyncio.Protocol):
        def connection_made(self, transport):
            transport.pause_reading()
            asyncio.get_running_loop().call_later(0.05, transport.resume_reading)

        def data_received(self, data):
            got.extend(data)

    async def main():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Sink, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
        sent = send_at_once(transport, HEAD, fd, start, count)
        if sent < count:
            await send_rest(transport, fd, start + sent, count - sent, moved.append, no_drain)
        await until(lambda: len(got) >= len(HEAD) + count)
        transport.close()
        server.close()

    asyncio.run(main())
    assert got == HEAD + DATA[start : start + count]
    assert sum(moved) <= count


@pytest.mark.parametrize("how", ["hangs up", "is given up"])
def test_a_send_that_ends_early_leaves_nothing_open(fd, how):
    """The peer closes, or the sender is cancelled, while the connection takes no more."""

    class Sink(asyncio.Protocol):
        def connection_made(self, transport):
            transport.pause_reading()
            peers.append(transport)

    async def main():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Sink, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
        await until(lambda: peers)
        # So little that it waits for room, whatever the machine's settings.
        to = transport.get_extra_info("socket")
        to.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        peers[0].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        open_before = len(os.listdir("/proc/self/fd"))
        sent = send_at_once(transport, HEAD, fd, 0, len(DATA))
        rest = send_rest(transport, fd, sent, len(DATA) - sent, lambda count: None, no_drain)
        sending = asyncio.create_task(rest)
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == open_before + 1
        if how == "hangs up":
            peers[0].abort()
            with pytest.raises(ConnectionError):
                await sending
        else:
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            peers[0].abort()
            await until(transport.is_closing)
        transport.abort()
        await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before - 2)
        server.close()

    peers = []
    asyncio.run(main())


def test_a_cold_block_is_sent_whole(tmp_path):
    server = OurServer(tmp_path / "root")
    claim(server, BIG_FRAME)
    put_block(server, "a", BIG_FRAME)
    path = block_path(BIG_FRAME.digest, key_of("a"))
    (file,) = poll(lambda: list(tmp_path.rglob(key_of("a").hex())), "the file")
    os.sync()
    with file.open("rb") as block:
        os.posix_fadvise(block.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    expected = framed("a", frame=BIG_FRAME)
    assert ask(server, "GET", path)[2] == expected
    ranged = ask(server, "GET", path, headers={"Range": "bytes=5-3000000"})
    assert ranged[2] == expected[5:3000001]
    assert server.stop() == 0
