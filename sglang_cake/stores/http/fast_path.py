"""The one request that is answered without aiohttp: a plain GET of a whole block.

Recognised only where nothing can be meant but that: no other header fields than these, each once
and of printable ASCII. So there is no body, and what comes behind it is the next request. Anything
else is left to aiohttp.
"""

import re
from typing import NamedTuple

from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.http import protocol

MAX_BYTES = 4096  # of such a request
_REQUEST = re.compile(
    rb"GET (/[0-9a-f/]+) HTTP/1\.1\r\n((?:[A-Za-z-]+:[ \t]*[!-~](?:[ -~]*[!-~])?\r\n)+)\r\n"
)
_FIELDS = frozenset(
    ("host", "accept", "accept-encoding", "user-agent", "connection", "authorization", "cake-use")
)
_KEEPS = ("keep-alive", "Keep-Alive")


class PlainGet(NamedTuple):
    """A request for a whole block, on a connection that stays open."""

    digest: Digest
    key: BlockKey
    authorization: str | None
    counts: bool  # as use of the block, for eviction
    size: int  # bytes of the request


def read_plain_get(data: bytes) -> PlainGet | None:
    """The request that `data` begins with, whole; None if that is anything else."""
    request = _REQUEST.match(data)
    if request is None:
        return None
    target = protocol.parse_path(request[1].decode())
    if target is None or target.kind is not protocol.Kind.BLOCK:
        return None
    lines = request[2].decode().split("\r\n")[:-1]
    named = (line.partition(":") for line in lines)
    fields = {name.lower(): value.strip() for name, _, value in named}
    if len(fields) < len(lines) or not fields.keys() <= _FIELDS or "host" not in fields:
        return None
    if fields.get("connection", _KEEPS[0]) not in _KEEPS:
        return None
    counts = fields.get(protocol.USE_HEADER.lower()) != protocol.NO_USE
    return PlainGet(target.digest, target.key, fields.get("authorization"), counts, request.end())
