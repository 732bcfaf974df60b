"""From the page cache to a socket, without the bytes ever coming into this process."""

import asyncio
import contextlib
import errno
import io
import os
import socket
import threading
from collections.abc import Iterator

from sglang_cake.store.threads import check_stop

COLD_PIECE_BYTES = 1 << 20
TAIL_BYTES = 1 << 16  # of a block, that may be copied and wait in memory


@contextlib.contextmanager
def in_one_go(transport: asyncio.BaseTransport | None) -> Iterator[None]:
    """What is sent inside leaves in whole packets. A header that goes ahead of its block would wake
    the reader for nothing."""
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None or not hasattr(socket, "TCP_CORK"):  # not Linux
        yield
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # closed
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)


def send_at_once(transport: asyncio.Transport, fd: int, start: int, count: int) -> int:
    """Send as many of `count` bytes of the file as the connection takes now; often all. None over
    TLS, or while others wait to be sent.

    `loop.sendfile`, which takes care of all that, costs more than sending 1 MiB.
    Raises: OSError.
    """
    if transport.get_extra_info("sslcontext") or transport.get_write_buffer_size():
        return 0
    try:
        return os.sendfile(transport.get_extra_info("socket").fileno(), fd, start, count)
    except BlockingIOError:
        return 0


async def send_rest(transport: asyncio.Transport, fd: int, start: int, count: int) -> None:
    """Send `count` bytes of the file; over TLS they do come by, to be encrypted.

    A connection often takes all of a block at once but for a few KB. These are copied and left to
    the transport: to wait for room, and to send them from the file, takes longer.
    Raises: OSError, RuntimeError when the connection ends before.
    """
    if count <= TAIL_BYTES:
        tail = os.pread(fd, count, start)
        if len(tail) < count:
            raise OSError(errno.EIO, "the file was cut short")
        transport.write(tail)
        return
    with io.FileIO(fd, closefd=False) as file:
        await asyncio.get_running_loop().sendfile(transport, file, start, count)


def is_cached(fd: int, start: int, stop: int) -> bool:
    """Whether the first and the last byte are in the page cache, and most likely all between."""
    try:
        for at in (start, stop - 1):
            os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot tell
        return True
    return True


def read_in(fd: int, start: int, stop_at: int, stop: threading.Event) -> None:
    """Bring bytes into the page cache, so that sending them never holds up an event loop.

    Raises: OSError; Stopped.
    """
    piece = bytearray(COLD_PIECE_BYTES)
    while start < stop_at:
        check_stop(stop)
        got = os.preadv(fd, [memoryview(piece)[: stop_at - start]], start)
        if not got:
            return
        start += got
