"""Files from disk to socket, warm and cold."""

import asyncio
import os
import threading

import pytest
from bad_server import until
from http_servers import BIG_FRAME, OurServer, ask, claim, framed, poll, put_block

from sglang_cake.store.http.protocol import block_path
from sglang_cake.store.http.sending import is_cached, read_in, send_at_once, send_rest
from sglang_cake.store.threads import Stopped
from sglang_cake.testing.store_contract import key_of

DATA = os.urandom(3 << 20)


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


@pytest.mark.parametrize(("start", "count"), [(0, len(DATA)), (4097, 1 << 20), (7, 1)])
def test_a_slow_reader_gets_every_byte(fd, start, count):
    """More than a socket takes at once, so that both ways of sending have their part."""
    got = bytearray()

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
        sent = send_at_once(transport, fd, start, count)
        if sent < count:
            await send_rest(transport, fd, start + sent, count - sent)
        await until(lambda: len(got) >= count)
        transport.close()
        server.close()

    asyncio.run(main())
    assert got == DATA[start : start + count]


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
