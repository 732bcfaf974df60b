"""What requests bring to the server, within bounds of size and time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web

PIECE_BYTES = 1 << 20
# A transfer may take as long as it likes, if so many bytes of it (or what is left) move within so
# many seconds: below 9 KB/s, connections and places of puts would be held for next to nothing.
STUCK_S = 30.0
FLOOR_BYTES = 1 << 18


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


@contextlib.asynccontextmanager
async def while_it_moves() -> AsyncIterator[Callable[[int], None]]:
    """A time limit of STUCK_S for what is inside, put off whenever FLOOR_BYTES more have moved; it
    is told of bytes that did. Raises: TimeoutError."""
    loop = asyncio.get_running_loop()
    moved_bytes = 0

    def moved(count: int) -> None:
        nonlocal moved_bytes
        moved_bytes += count
        if moved_bytes >= FLOOR_BYTES:
            moved_bytes = 0
            if not limit.expired():
                limit.reschedule(loop.time() + STUCK_S)

    async with asyncio.timeout(STUCK_S) as limit:
        yield moved


def wanted_slice(request: web.BaseRequest) -> slice | None:
    """What the Range header asks for; None for everything. Raises: Refused."""
    try:
        wanted = request.http_range
    except ValueError:
        raise Refused(416, "the Range is none, or several") from None
    if wanted.start is None and wanted.stop is None:
        return None
    # aiohttp says the same of the last 0 bytes as of all from the first on.
    is_suffix = request.headers["Range"].partition("=")[2].strip().startswith("-")
    return slice(0, 0) if is_suffix and wanted.start == 0 else wanted


async def accept_body(request: web.BaseRequest) -> None:
    """Let a client that waits for it send the body. Raises: Refused."""
    expected = request.headers.get("Expect")
    if expected is None:
        return
    if expected.lower() != "100-continue":
        raise Refused(417, "only 100-continue can be expected")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def read_pieces(
    request: web.BaseRequest, moved: Callable[[int], None]
) -> AsyncIterator[bytearray]:
    """The body, in pieces of PIECE_BYTES or a little more; only the last is shorter.

    Args: moved: told of bytes that have come.
    """
    piece = bytearray()
    async for data in request.content.iter_any():
        moved(len(data))
        piece += data
        if len(piece) >= PIECE_BYTES:
            yield piece
            piece = bytearray()
    if piece:
        yield piece


async def read_body(request: web.BaseRequest, at_most: int) -> bytes:
    """The whole of a small body. Raises: Refused."""
    size = request.content_length
    if size is None:
        raise Refused(411, "write the Content-Length")
    if size > at_most:
        raise Refused(413, f"at most {at_most} bytes")
    await accept_body(request)
    async with while_it_moves() as moved:
        return b"".join([bytes(piece) async for piece in read_pieces(request, moved)])
