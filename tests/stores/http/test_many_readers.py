"""Many readers at once: who stays gets its block, and the server's memory knows little of them."""

import contextlib
import re
from pathlib import Path

import xxhash
from http_servers import BIG_FRAME, A, OurServer, framed, put_block, put_description, start_request
from polling import until

from sglang_cake.stores.http.protocol import block_path

READERS = 256
# For each: its request, and a tail of its block of 64 KiB at most.
MEMORY_A_READER_BYTES = 100_000


def peak_bytes(server):
    states = [Path(f"/proc/{pid}/status").read_text() for pid in server.workers()]
    return sum(int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024 for text in states)


def read_rest(connection, got, buffer):
    """The checksum of the answer's body, of which `got` came with the head."""
    head, _, first = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    body, left = xxhash.xxh3_128(first), BIG_FRAME.framed_bytes - len(first)
    while left:
        count = connection.recv_into(buffer)
        assert 0 < count <= left
        body.update(buffer[:count])
        left -= count
    return body.digest()


def test_store_serve_256_parallel_readers_use_little_memory(tmp_path):
    server = OurServer(tmp_path / "root")
    put_description(server, BIG_FRAME)
    put_block(server, "a", BIG_FRAME)
    asked = f"GET {block_path(BIG_FRAME.digest, A)} HTTP/1.1\nHost: x\n"
    expected = xxhash.xxh3_128_digest(framed("a", frame=BIG_FRAME))
    buffer = memoryview(bytearray(1 << 20))
    connection = start_request(server, asked)  # what the first one brings with it is not counted
    assert read_rest(connection, connection.recv(4096), buffer) == expected
    connection.close()

    before = peak_bytes(server)
    connections = [start_request(server, asked) for _ in range(READERS)]
    begun = [connection.recv(4096) for connection in connections]
    # All are under way now: no connection takes a block as a whole that nobody reads.
    assert sum(map(open_blocks, server.workers())) == READERS
    for number, (connection, got) in enumerate(zip(connections, begun, strict=True)):
        if number % 4 == 0:  # the others hang up
            assert read_rest(connection, got, buffer) == expected
        connection.close()
    more = peak_bytes(server) - before
    assert more < READERS * MEMORY_A_READER_BYTES < READERS * BIG_FRAME.framed_bytes / 10
    until(lambda: not sum(map(open_blocks, server.workers())), "every block is let go")
    assert server.stop() == 0


def open_blocks(pid):
    """How often a process has block A open."""
    names = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(str(fd.readlink()))
    return sum(A.hex() in name for name in names)
