"""KV from one member to another, encrypted: bulk data, for which CurveZMQ is too slow.

KV has a path of its own. Each member has a second port, chosen by the system. `Hello` contains the
port, and a password that connections need. The password crosses the network in plain text, so it
stops only hosts that cannot read the network. KV is protected by encryption: each part is encrypted
with AES-256-GCM, by a key that the receiver made for this path and sent on the CurveZMQ connection.
The nonce counts parts, so that a changed, repeated, missing or reordered part is detected.
docs/runahead.md#the-link-between-two-members says why CurveZMQ does not carry KV.

    [path] [PartHead] [KV of the part, sealed; its tag]
"""

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Final

import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sglang_cake.runahead.messages import (
    KEY_BYTES,
    MAX_PART_BYTES,
    PATH_BYTES,
    BadMessage,
    LayerPart,
    PartHead,
    PeerGone,
    decode_head,
    encode,
)

TAG_BYTES: Final = 16
_HEAD_BYTES = 256
_LOOK_S = 0.05  # how often a waiting sender checks whether the peer is still there


class EncryptedKvSender:
    """The sender's end of a path. Any thread; one part at a time.

    Args:
        name, key: from the receiver's Hello.
        timeout_s: in which the receiver must accept a part.
    """

    def __init__(self, name: bytes, key: bytes, timeout_s: float) -> None:
        self.name: Final = name
        self._timeout_s = timeout_s
        self.over = False  # the receiver is gone, or has another path
        self._lock = threading.Lock()
        self._cipher = AESGCM(key)
        self._nonces = _nonces()
        self._sealed = bytearray(0)
        self._before = (0, 0)

    def send(self, server: "SendingSocket", part: LayerPart, data: memoryview) -> None:
        """Send a part; `data` may be reused when this returns. Raises: PeerGone."""
        with self._lock:
            if self.over:
                raise PeerGone("it does not take KV")
            end_s = time.monotonic() + self._timeout_s
            if len(self._sealed) < len(data) + TAG_BYTES:
                self._sealed = bytearray(MAX_PART_BYTES + TAG_BYTES)
            sealed = memoryview(self._sealed)[: len(data) + TAG_BYTES]
            head = encode(PartHead(part, *self._before))
            self._cipher.encrypt_into(next(self._nonces), data, head, sealed)
            began_s = time.perf_counter()
            try:
                taken = server.put(self.name, head, sealed, track=True)
            except PeerGone:
                self.over = True  # the receiver would take the next part for a changed one
                raise
            assert taken is not None
            while not taken.done:
                # ZeroMQ reads the memory until it is sent, so this path never uses it again.
                self.over = self.over or time.monotonic() > end_s
                if self.over:
                    raise PeerGone("it does not take KV")
                with contextlib.suppress(zmq.NotDone):
                    taken.wait(_LOOK_S)
            took_us = round((time.perf_counter() - began_s) * 1e6)
            self._before = (len(data), max(1, took_us))


class EncryptedKvReceiver:
    """The receiver's end of a path. One thread."""

    def __init__(self, buffer: bytearray | memoryview) -> None:
        self.name: Final = secrets.token_bytes(PATH_BYTES)
        self.key: Final = os.urandom(KEY_BYTES)
        self._cipher = AESGCM(self.key)
        self._nonces = _nonces()
        self._buffer = memoryview(buffer)

    def take(self, frames: list[zmq.Frame]) -> tuple[PartHead, memoryview]:
        """The head and the KV of a part, in memory that the next call overwrites.

        Raises: BadMessage.
        """
        if len(frames) != 2 or len(frames[0]) > _HEAD_BYTES or len(frames[1]) <= TAG_BYTES:
            raise BadMessage("no part of a layer")
        head, sealed = frames[0].bytes, frames[1].buffer
        data = self._buffer[: len(sealed) - TAG_BYTES]
        try:
            self._cipher.decrypt_into(next(self._nonces), sealed, head, data)
        except InvalidTag:
            raise BadMessage("KV that is not what the member sent") from None
        return decode_head(head), data


def _nonces() -> Iterator[bytes]:
    """One for each part, in their order. A key serves one path in one direction."""
    return (count.to_bytes(12, "little") for count in itertools.count(1))


class SendingSocket:
    """A port that only sends, to those who have connected. Any thread. Args: socket: a bound
    ROUTER."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._lock = threading.Lock()  # one thread at a time may use a socket
        self._socket = socket
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        socket.copy_threshold = 0  # small parts are tracked too

    def put(
        self, name: bytes, *frames: bytes | memoryview, track: bool = False
    ) -> zmq.MessageTracker | None:
        """Queue frames for a receiver. Raises: PeerGone.

        Args: track: the frames are not copied: ZeroMQ reads them until the tracker is done.
        """
        try:
            with self._lock:
                return self._socket.send_multipart(
                    (name, *frames), zmq.NOBLOCK, copy=not track, track=track
                )
        except zmq.ZMQError as error:  # it takes no more, has disconnected, or this end is closed
            raise PeerGone(f"it cannot be sent to: {error.strerror}") from None

    def close(self) -> None:
        with self._lock:
            self._socket.close()
