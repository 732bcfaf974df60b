"""Bodies of requests, within limits of size and time."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

RECEIVE_BYTES = 1 << 20
# A transfer may take any time while FLOOR_BYTES of it, or all that is left, move in STUCK_S. Below
# that (9 KB/s) it would hold its connection almost for nothing.
STUCK_S = 30.0
FLOOR_BYTES = 1 << 18


class RefusedRequest(Exception):
    """A request to be answered with an error: status, text and headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def wanted_slice(request: web.BaseRequest) -> slice | None:
    """The bytes that the Range header asks for; None for all. Raises: RefusedRequest."""
    try:
        wanted = request.http_range
    except ValueError:
        raise RefusedRequest(416, "the Range is malformed, or several ranges") from None
    if wanted.start is None and wanted.stop is None:
        return None
    # aiohttp parses `bytes=-0`, the last 0 bytes, like `bytes=0-`.
    is_suffix = request.headers["Range"].partition("=")[2].strip().startswith("-")
    return slice(0, 0) if is_suffix and wanted.start == 0 else wanted


async def accept_body(request: web.BaseRequest) -> None:
    """Ask for the body if the client waits for that (Expect: 100-continue).

    Raises: RefusedRequest.
    """
    expected = request.headers.get("Expect")
    if expected is None:
        return
    if expected.lower() != "100-continue":
        raise RefusedRequest(417, "only 100-continue can be expected")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def read_pieces(request: web.BaseRequest, stuck_s: float) -> AsyncIterator[bytearray]:
    """The body, in pieces of RECEIVE_BYTES or a little more; only the last is shorter.

    Raises: TimeoutError if FLOOR_BYTES, or all that is left, do not come within `stuck_s`.
    """
    loop = asyncio.get_running_loop()
    piece = bytearray()
    moved_bytes, until_s = 0, loop.time() + stuck_s
    while True:
        async with asyncio.timeout_at(until_s):
            data = await request.content.readany()
        if not data:
            break
        piece += data
        moved_bytes += len(data)
        if len(piece) >= RECEIVE_BYTES:
            yield piece
            piece = bytearray()
        if moved_bytes >= FLOOR_BYTES:
            moved_bytes, until_s = 0, loop.time() + stuck_s
    if piece:
        yield piece


async def read_body(request: web.BaseRequest, at_most: int, stuck_s: float) -> bytes:
    """A small body as a whole. Raises: RefusedRequest, TimeoutError."""
    size = request.content_length
    if size is None:
        raise RefusedRequest(411, "write the Content-Length")
    if size > at_most:
        raise RefusedRequest(413, f"at most {at_most} bytes")
    await accept_body(request)
    return b"".join([bytes(piece) async for piece in read_pieces(request, stuck_s)])
