"""From the page cache to a socket, without the bytes ever coming into this process."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Awaitable, Callable

from sglang_cake.stores.threads import check_stop

COLD_PIECE_BYTES = 1 << 20
TAIL_BYTES = 1 << 16  # of a block, that may be copied and wait in memory
TLS_PIECE_BYTES = 1 << 18  # encrypted in one go, and seen as progress when it has left
CUT_SHORT = "the file was cut short"


def send_at_once(transport: asyncio.Transport, head: bytes, fd: int, start: int, count: int) -> int:
    """Send `head`, and as many of `count` bytes of the file as the connection takes now; returns
    how many, often all. None over TLS, or while others wait to be sent.

    Raises: OSError.
    """
    if transport.is_closing():
        raise ConnectionResetError(errno.ECONNRESET, "closed meanwhile")
    if transport.get_extra_info("sslcontext") or transport.get_write_buffer_size():
        transport.write(head)
        return 0
    to = transport.get_extra_info("socket").fileno()
    left = head[_send_more(to, head) :]
    if left:
        transport.write(left)
        return 0
    try:
        return os.sendfile(to, fd, start, count)
    except BlockingIOError:
        return 0


def _send_more(to: int, head: bytes) -> int:
    """Send what waits for the bytes behind it: a packet of its own would wake the reader for
    nothing. Returns how many bytes. Raises: OSError."""
    # Asyncio hands out no socket that sends; of one of our own, the descriptor is only lent.
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, to)
    try:
        return connection.send(head, socket.MSG_MORE)
    except BlockingIOError:
        return 0
    finally:
        connection.detach()


async def send_rest(
    transport: asyncio.Transport,
    fd: int,
    start: int,
    count: int,
    moved: Callable[[int], None],
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Send `count` bytes of the file, which are in the page cache; over TLS they do come by, to be
    encrypted.

    A connection often takes all of a block at once but for a few KB. These are copied and left to
    the transport: to wait for room, and to send them from the file, takes longer.

    Args: moved: told of bytes that have left; drain: waits until the transport takes more.
    Raises: OSError, RuntimeError when the connection ends before.
    """
    if transport.get_extra_info("sslcontext") or transport.get_write_buffer_size():
        while count > TAIL_BYTES:
            piece = _read_exactly(fd, start, min(count, TLS_PIECE_BYTES))
            transport.write(piece)
            await drain()
            moved(len(piece))
            start, count = start + len(piece), count - len(piece)
    elif count > TAIL_BYTES:
        sent = await _send_as_room_comes(transport, fd, start, count, moved)
        start, count = start + sent, count - sent
    if count:
        transport.write(_read_exactly(fd, start, count))


async def _send_as_room_comes(
    transport: asyncio.Transport, fd: int, start: int, count: int, moved: Callable[[int], None]
) -> int:
    """Send all but TAIL_BYTES at most; returns how many bytes.

    `loop.sendfile` has the event loop watch the connection anew for every piece.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    sent = 0

    def send() -> None:
        nonlocal sent
        if ended.done():  # given up a moment ago
            return
        try:
            piece = os.sendfile(to, fd, start + sent, count - sent)
            if not piece:
                raise OSError(errno.EIO, CUT_SHORT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            loop.remove_writer(to)
            ended.set_exception(error)
            return
        sent += piece
        moved(piece)
        if count - sent <= TAIL_BYTES:
            loop.remove_writer(to)
            ended.set_result(None)

    # A descriptor of our own: the transport's is watched by itself, and closed at its pleasure.
    to = os.dup(transport.get_extra_info("socket").fileno())
    try:
        loop.add_writer(to, send)
        await ended
    finally:
        loop.remove_writer(to)
        os.close(to)
    return sent


def _read_exactly(fd: int, start: int, count: int) -> bytes:
    data = os.pread(fd, count, start)
    if len(data) < count:
        raise OSError(errno.EIO, CUT_SHORT)
    return data


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
