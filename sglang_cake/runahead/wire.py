"""Frames on a TCP connection, and how its two ends prove that they know the group's secret.

A connection carries one direction: who dials, sends. First the handshake (all little-endian):

    dials    "CKRA" version rank size namespace(32) nonce(16)
    answers  "CKRA" version refusal nonce(16) proof(32)     refusal 0, or why not: the end
    dials    proof(32)
    answers  1 byte, 1

A proof is HMAC-SHA256 over who proves, both ranks, the size of the group, the namespace and both
nonces, so that it says nothing about the secret and serves for no other connection. Then frames:

    "CKRA" version kind length checksum(8) body(length)

The checksum is XXH3-64 over kind, length and body. Nothing is encrypted, and frames are not signed:
the network between members must be one that nobody else writes to (docs/runahead.md).
"""

import contextlib
import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from sglang_cake.keys import Digest
from sglang_cake.runahead.messages import MAX_MESSAGE_BYTES, PART_HEAD_BYTES, BadMessage
from sglang_cake.runahead.transport import MAX_PART_BYTES

VERSION: Final = 2
MAGIC: Final = b"CKRA"
PING: Final = 0
PART: Final = 16
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
HELLO: Final = struct.Struct(f"<4sHHH32s{NONCE_BYTES}s")
ANSWER: Final = struct.Struct(f"<4sHH{NONCE_BYTES}s{PROOF_BYTES}s")
WELCOME: Final = b"\x01"
HEAD: Final = struct.Struct("<4sHHIQ")
_CHECKED: Final = struct.Struct("<HI")

REFUSALS: Final = {
    1: "it speaks another version",
    2: "its namespace is another one: same model, weights, dtype and flags on every member",
    3: "it does not know this member: same --cake-runahead-peers, and another rank, on every one",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """The two ends of a connection, as both of them know it."""

    dialer: int
    answerer: int
    size: int
    namespace: Digest

    def proof(self, secret: bytes, role: bytes, dialer_nonce: bytes, answer_nonce: bytes) -> bytes:
        """What `role` ("dialer" or "answerer") sends to show that it knows the secret."""
        said = struct.pack("<HHHH", VERSION, self.dialer, self.answerer, self.size)
        text = b"cake runahead " + role + said + self.namespace + dialer_nonce + answer_nonce
        return hmac.digest(secret, text, hashlib.sha256)


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


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises: OSError, ConnectionError when the other end is closed."""
    got = 0
    while got < len(into):
        n = connection.recv_into(into[got:])
        if n == 0:
            raise ConnectionError("closed by the other end")
        got += n


def received(connection: socket.socket, size: int) -> bytearray:
    """The next `size` bytes."""
    buffer = bytearray(size)
    receive(connection, memoryview(buffer))
    return buffer


def end(connection: socket.socket) -> None:
    """Close it, and wake whoever reads or writes."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
