"""The handshake of a new connection: both ends prove that they know the group's secret.

All numbers are little-endian. The end that dialed proves itself first:

    dials    "CKRA" version rank size namespace(32) nonce(16)
    answers  "CKRA" version nonce(16)
    dials    proof(32)
    answers  refusal proof(32)                  refusal 0, or why not: the end

A proof is HMAC-SHA256 over the role, both ranks, the size of the group, the namespace and both
nonces, so it serves for no other connection. Only a member gets a proof from the end that answers,
and only a member learns why it is refused.
"""

import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Final

from sglang_cake.keys import Digest
from sglang_cake.runahead import wire
from sglang_cake.runahead.messages import BadMessage

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
HELLO: Final = struct.Struct(f"<4sHHH32s{NONCE_BYTES}s")
ANSWER: Final = struct.Struct(f"<4sH{NONCE_BYTES}s")
VERDICT: Final = struct.Struct(f"<H{PROOF_BYTES}s")

REFUSALS: Final = {
    1: "its secret is another one: copy one secret file to every member",
    2: "its namespace is another one: same model, weights, dtype and flags on every member",
    3: "it does not know this member: same --cake-runahead-peers, and another rank, on every one",
}
_OTHER_VERSION: Final = "it speaks another version"


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ends of one connection, as both of them know it."""

    dialer: int
    answerer: int
    size: int
    namespace: Digest
    dialer_nonce: bytes
    answerer_nonce: bytes

    def proof(self, secret: bytes, role: bytes) -> bytes:
        """What `role` ("dialer" or "answerer") sends to show that it knows the secret."""
        said = struct.pack("<HHHH", wire.VERSION, self.dialer, self.answerer, self.size)
        text = b"cake runahead " + role + said + self.namespace
        return hmac.digest(secret, text + self.dialer_nonce + self.answerer_nonce, hashlib.sha256)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a member proves: its place in a group, whose KV the group has, and the secret.

    Args:
        size: members of the group.
        secret: 32 bytes that all members know.
    """

    rank: int
    size: int
    namespace: Digest
    secret: bytes = field(repr=False)

    def dial(self, connection: socket.socket, rank: int, end_s: float) -> None:
        """Prove ourselves to the member `rank`, then judge it.

        Args:
            end_s: when the whole handshake must be over, by `time.monotonic`.

        Raises: OSError, also when the time is over; BadMessage.
        """
        nonce = os.urandom(NONCE_BYTES)
        hello = HELLO.pack(wire.MAGIC, wire.VERSION, self.rank, self.size, self.namespace, nonce)
        wire.send(connection, end_s, hello)
        magic, version, other = ANSWER.unpack(wire.received(connection, ANSWER.size, end_s))
        if magic != wire.MAGIC or version != wire.VERSION:
            raise BadMessage(_OTHER_VERSION)
        pair = Pair(self.rank, rank, self.size, self.namespace, nonce, other)
        wire.send(connection, end_s, pair.proof(self.secret, b"dialer"))
        refusal, proof = VERDICT.unpack(wire.received(connection, VERDICT.size, end_s))
        if refusal:
            raise BadMessage(REFUSALS.get(refusal, "it refuses"))
        if not hmac.compare_digest(proof, pair.proof(self.secret, b"answerer")):
            raise BadMessage("it does not know the group's secret")

    def answer(self, connection: socket.socket, end_s: float) -> int:
        """Judge the member that dialed, then prove ourselves; its rank.

        Args:
            end_s: when the whole handshake must be over, by `time.monotonic`.

        Raises: OSError, also when the time is over; BadMessage.
        """
        hello = HELLO.unpack(wire.received(connection, HELLO.size, end_s))
        magic, version, rank, size, namespace, nonce = hello
        if magic != wire.MAGIC:
            raise BadMessage("it is no member of a group")
        own = os.urandom(NONCE_BYTES)
        wire.send(connection, end_s, ANSWER.pack(wire.MAGIC, wire.VERSION, own))
        if version != wire.VERSION:
            raise BadMessage(_OTHER_VERSION)
        pair = Pair(rank, self.rank, size, Digest(namespace), nonce, own)
        proof = wire.received(connection, PROOF_BYTES, end_s)
        refusal = 0
        if not hmac.compare_digest(proof, pair.proof(self.secret, b"dialer")):
            refusal = 1
        elif size != self.size or rank == self.rank or rank >= size:
            refusal = 3
        elif namespace != self.namespace:
            refusal = 2
        own_proof = bytes(PROOF_BYTES) if refusal else pair.proof(self.secret, b"answerer")
        wire.send(connection, end_s, VERDICT.pack(refusal, own_proof))
        if refusal:
            raise BadMessage(f"member {rank}: {REFUSALS[refusal]}")
        return int(rank)
