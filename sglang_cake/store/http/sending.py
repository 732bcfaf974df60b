"""From the page cache to a socket, without the bytes ever coming into this process."""

import asyncio
import io
import os
import threading

from sglang_cake.store.threads import check_stop

COLD_PIECE_BYTES = 1 << 20


async def send_file(transport: asyncio.Transport, fd: int, start: int, count: int) -> None:
    """Send `count` bytes of the file; over TLS they do come by, to be encrypted.

    Raises: OSError, RuntimeError when the connection ends before.
    """
    sent = _send_at_once(transport, fd, start, count)
    if sent < count:
        with io.FileIO(fd, closefd=False) as file:
            loop = asyncio.get_running_loop()
            await loop.sendfile(transport, file, start + sent, count - sent)


def _send_at_once(transport: asyncio.Transport, fd: int, start: int, count: int) -> int:
    """As much as the socket takes now, often all: `loop.sendfile` costs more than sending 1 MiB."""
    if transport.get_extra_info("sslcontext") or transport.get_write_buffer_size():
        return 0
    try:
        return os.sendfile(transport.get_extra_info("socket").fileno(), fd, start, count)
    except BlockingIOError:
        return 0


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
