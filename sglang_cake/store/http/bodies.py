"""What requests bring to the server, within bounds of size and time."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

PIECE_BYTES = 1 << 20
# A transfer may take this long, and a second for each of these bytes. Slower ones would hold
# connections, and puts their places, for ever.
GRACE_S = 30.0
SLOWEST_BYTES_PER_S = 10**6


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def time_limit_s(size_bytes: int) -> float:
    """How long `size_bytes` may take to come or go."""
    return GRACE_S + size_bytes / SLOWEST_BYTES_PER_S


def wanted_slice(request: web.BaseRequest) -> slice | None:
    """What the Range header asks for; None for everything. Raises: Refused."""
    try:
        wanted = request.http_range
    except ValueError:
        raise Refused(416, "the Range is none, or several") from None
    return None if wanted.start is None and wanted.stop is None else wanted


async def accept_body(request: web.BaseRequest) -> None:
    """Let a client that waits for it send the body. Raises: Refused."""
    expected = request.headers.get("Expect")
    if expected is None:
        return
    if expected.lower() != "100-continue":
        raise Refused(417, "only 100-continue can be expected")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def read_pieces(request: web.BaseRequest) -> AsyncIterator[bytearray]:
    """The body, in pieces of PIECE_BYTES or a little more; only the last is shorter."""
    piece = bytearray()
    async for data in request.content.iter_any():
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
    async with asyncio.timeout(time_limit_s(size)):
        return await request.content.read()
