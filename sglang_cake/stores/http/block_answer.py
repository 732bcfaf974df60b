"""An answer whose head is written here, since its body does not come by (`sendfile`)."""

import functools
import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus

from aiohttp import web

from sglang_cake.stores.http.protocol import BLOCK_TYPE


class SentAnswer(web.StreamResponse):
    """What aiohttp is told of an answer that has left already, all of it."""

    def __init__(self, status: int, *, keep_alive: bool) -> None:
        super().__init__(status=status)
        self._keeps = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._keeps

    async def prepare(self, request: web.BaseRequest) -> None:
        """It has left."""

    async def write_eof(self, data: bytes | bytearray | memoryview = b"") -> None:
        """It has left."""


def block_fields(count: int) -> dict[str, str]:
    """The header fields of an answer with `count` bytes of a block."""
    return {
        "Accept-Ranges": "bytes",
        "Content-Type": BLOCK_TYPE,
        "Content-Length": str(count),
    }


def plain_answer(status: int, text: str) -> bytes:
    """A whole answer, for people."""
    body = text.encode()
    fields = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
    return head_of(status, fields, keep_alive=True) + body


def head_of(status: int, fields: Mapping[str, str], *, keep_alive: bool) -> bytes:
    """Status line and header. Args: fields: with Content-Length; printable ASCII."""
    said = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
    # That it stays open is said, too: it is what HTTP/1.0 would not expect.
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{said}"
        f"Date: {_date(int(time.time()))}\r\n"
        f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    ).encode("ascii")


@functools.lru_cache(1)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)
