"""Frames on a TCP connection that both ends have proved themselves on (`handshake.py`).

A connection carries one direction: the end that dialed sends. A frame is, all little-endian:

    "CKRA" version kind length checksum(8) body(length)

The checksum is XXH3-64 over kind, length and body. Nothing is encrypted, and frames are not signed:
the network between members must be one that nobody else writes to (docs/runahead.md).
"""

import contextlib
import math
import socket
import struct
import time
from dataclasses import dataclass
from typing import Final

import xxhash

from sglang_cake.runahead.messages import MAX_MESSAGE_BYTES, PART_HEAD_BYTES, BadMessage
from sglang_cake.runahead.transport import MAX_PART_BYTES

VERSION: Final = 3
MAGIC: Final = b"CKRA"
PING: Final = 0
PART: Final = 16
HEAD: Final = struct.Struct("<4sHHIQ")
_CHECKED: Final = struct.Struct("<HI")


def checksum(kind: int, *body: bytes | memoryview) -> int:
    """Of a frame whose body is these pieces, one after the other."""
    size = sum(len(piece) for piece in body)
    hashed = xxhash.xxh3_64(_CHECKED.pack(kind, size))
    for piece in body:
        hashed.update(piece)
    return int(hashed.intdigest())


def frame_head(kind: int, *body: bytes | memoryview) -> bytes:
    """What stands before a body."""
    size = sum(len(piece) for piece in body)
    return HEAD.pack(MAGIC, VERSION, kind, size, checksum(kind, *body))


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's head, judged: the length is one that its kind may have."""

    kind: int
    length: int
    checksum: int

    @classmethod
    def parse(cls, head: bytes | bytearray) -> "Frame":
        """Raises: BadMessage."""
        magic, version, kind, length, digest = HEAD.unpack(head)
        if magic != MAGIC or version != VERSION:
            raise BadMessage("not a frame of this version")
        largest = MAX_MESSAGE_BYTES
        if kind == PING:
            largest = 0
        elif kind == PART:
            largest = PART_HEAD_BYTES + MAX_PART_BYTES
        if length > largest or (kind == PART and length <= PART_HEAD_BYTES):
            raise BadMessage(f"a frame of {length} bytes")
        return cls(kind, length, digest)

    def check(self, body: bytes | bytearray | memoryview) -> None:
        """Raises: BadMessage if the body is not the one that was sent."""
        if checksum(self.kind, memoryview(body)) != self.checksum:
            raise BadMessage("the checksum of a frame is wrong")


def receive(
    connection: socket.socket, into: memoryview, end_s: float, silence_s: float = math.inf
) -> None:
    """Fill `into`.

    Args:
        end_s: when all of it must be there, by `time.monotonic`, however steadily bytes come.
        silence_s: how long no byte may come.

    Raises: TimeoutError; OSError; ConnectionError when the other end is closed.
    """
    got = 0
    while got < len(into):
        connection.settimeout(min(_left_s(end_s), silence_s))
        n = connection.recv_into(into[got:])
        if n == 0:
            raise ConnectionError("closed by the other end")
        got += n


def received(
    connection: socket.socket, size: int, end_s: float, silence_s: float = math.inf
) -> bytearray:
    """The next `size` bytes, as `receive` gets them."""
    buffer = bytearray(size)
    receive(connection, memoryview(buffer), end_s, silence_s)
    return buffer


def send(connection: socket.socket, end_s: float, *pieces: bytes | memoryview) -> None:
    """Send all pieces. Raises: TimeoutError when `end_s` (`time.monotonic`) is over; OSError."""
    for piece in pieces:
        connection.settimeout(_left_s(end_s))
        connection.sendall(piece)


def end(connection: socket.socket) -> None:
    """End it in both directions. The thread that reads or writes wakes, and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _left_s(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
