"""The header of a stored block: the one place that makes it and takes it apart.

The header is `HEADER_BYTES` long, so that the payload behind it starts on a page. Integers are
little-endian; what is not used is zero. Byte for byte in docs/format.md, which a test compares with
`FIELDS`.
"""

import struct
from dataclasses import dataclass
from functools import cached_property

import xxhash

from sglang_cake.core.buffers import TellBytes, is_on_page, on_page
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.namespace import Namespace

HEADER_BYTES = 4096
MAGIC = b"CAKEKV\0\1"
VERSION = 1
RAW = "raw"  # the payload is the block's bytes as they are

# (name, struct code) in file order. The layout's JSON follows; the header's own checksum is last.
FIELDS = (
    ("magic", "8s"),
    ("version", "I"),
    ("header_bytes", "I"),
    ("payload_bytes", "Q"),
    ("namespace", "32s"),
    ("key", "32s"),
    ("payload_checksum", "16s"),
    ("codec", "16s"),
    ("layout_bytes", "I"),
    ("reserved", "I"),
)
_FIXED = struct.Struct("<" + "".join(code for _, code in FIELDS))
CHECKSUM_BYTES = 16
_CHECKSUM_AT = HEADER_BYTES - CHECKSUM_BYTES
MAX_LAYOUT_BYTES = _CHECKSUM_AT - _FIXED.size

# 128 bits: at 64, the birthday bound of a large fleet's blocks over years is not out of sight.
# xxhash lets go of the GIL while it hashes a large buffer, also when given a memoryview (measured
# with 4.1.0: a second thread runs on within microseconds).
PayloadHasher = xxhash.xxh3_128


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says, once its own checksum is right."""

    namespace: Digest
    key: BlockKey
    layout: str  # `BlockLayout.describe()`
    codec: str
    payload_bytes: int
    payload_checksum: bytes  # CHECKSUM_BYTES


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """XXH3-128 of `payload`, CHECKSUM_BYTES long, most significant byte first."""
    return bytes(PayloadHasher(payload).digest())


def make_header(
    *,
    namespace: Digest,
    key: BlockKey,
    layout: BlockLayout,
    payload_bytes: int,
    checksum: bytes,
    codec: str = RAW,
) -> bytes:
    """The HEADER_BYTES to write in front of a payload.

    Args: checksum: `payload_checksum` of the payload.
    """
    name, shape = codec.encode("ascii"), layout.describe().encode()
    assert len(namespace) == 32, len(namespace)
    assert len(key) == 32, len(key)
    assert len(checksum) == CHECKSUM_BYTES, len(checksum)
    assert 0 < len(name) <= 16, codec
    assert len(shape) <= MAX_LAYOUT_BYTES, len(shape)
    fixed = _FIXED.pack(
        MAGIC, VERSION, HEADER_BYTES, payload_bytes, namespace, key, checksum, name, len(shape), 0
    )
    body = (fixed + shape).ljust(_CHECKSUM_AT, b"\0")
    return body + payload_checksum(body)


def read_header(raw: bytes | bytearray) -> Header:
    """Take a header apart. It is whole then; what it belongs to is for the caller to compare.

    Raises: BlockCorrupt, saying which check failed.
    """
    if len(raw) != HEADER_BYTES:
        raise BlockCorrupt(f"the header has {len(raw)} bytes, not {HEADER_BYTES}")
    names = (name for name, _ in FIELDS)
    found = dict(zip(names, _FIXED.unpack_from(raw), strict=True))
    # Magic and version come first: a file of another kind or version should be called by its name,
    # and where the checksum of another version lies is not known.
    if found["magic"] != MAGIC:
        raise BlockCorrupt(f"not a block file: it starts with {found['magic']!r}")
    if found["version"] != VERSION:
        raise BlockCorrupt(f"format version {found['version']}, this program reads {VERSION}")
    if raw[_CHECKSUM_AT:] != payload_checksum(bytes(raw[:_CHECKSUM_AT])):
        raise BlockCorrupt("the header's checksum does not match")
    if found["header_bytes"] != HEADER_BYTES:
        raise BlockCorrupt(f"header of {found['header_bytes']} bytes, not {HEADER_BYTES}")
    shape = bytes(raw[_FIXED.size : _CHECKSUM_AT][: found["layout_bytes"]])
    return Header(
        namespace=Digest(found["namespace"]),
        key=BlockKey(found["key"]),
        layout=shape.decode(errors="replace"),
        codec=found["codec"].rstrip(b"\0").decode("ascii", errors="replace"),
        payload_bytes=found["payload_bytes"],
        payload_checksum=found["payload_checksum"],
    )


def check_header(
    raw: bytes | bytearray,
    *,
    namespace: Digest,
    key: BlockKey,
    layout: BlockLayout,
    codec: str = RAW,
    payload_bytes: range | None = None,
) -> Header:
    """Take a header apart; whatever it returns belongs to `key` in `namespace`.

    Args: payload_bytes: what is possible; None: as many as the layout has.
    Raises: BlockCorrupt, saying which check failed.
    """
    size = layout.block_bytes
    possible = range(size, size + 1) if payload_bytes is None else payload_bytes
    header = read_header(raw)
    if header.namespace != namespace:
        raise BlockCorrupt(f"belongs to namespace {header.namespace.hex()}")
    if header.key != key:
        raise BlockCorrupt(f"holds another block, {header.key.hex()}")
    if header.layout != layout.describe():
        raise BlockCorrupt(f"has another layout, {header.layout}")
    if header.codec != codec:
        raise BlockCorrupt(f"has codec {header.codec!r}, this program reads {codec!r}")
    if header.payload_bytes not in possible:
        least, most = possible.start, possible.stop - 1
        allowed = f"{least}" if least == most else f"{least} to {most}"
        raise BlockCorrupt(f"payload of {header.payload_bytes} bytes, a block has {allowed}")
    return header


@dataclass(frozen=True)
class BlockFrame:
    """How the blocks of one namespace are framed: what every store does with them alike."""

    namespace: Namespace
    layout: BlockLayout
    codec: str = RAW  # what was done to the block's bytes
    added_bytes: int = 0  # by which that makes every payload longer than the block
    varies: bool = False  # whether payloads may also be shorter, each as it comes out

    @cached_property
    def digest(self) -> Digest:
        """Of the namespace."""
        return self.namespace.digest()

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes that `Store.put` takes and `Store.get_into` fills; at most, if that `varies`."""
        return self.layout.block_bytes + self.added_bytes

    @cached_property
    def framed_bytes(self) -> int:
        """Bytes of a block as it is stored, header and payload; at most, if that `varies`."""
        return HEADER_BYTES + self.payload_bytes

    @property
    def known_bytes(self) -> int | None:
        """Bytes of every block as it is stored; None if that `varies`."""
        return None if self.varies else self.framed_bytes

    def takes(self, payload_bytes: int) -> bool:
        """Whether a payload may have so many bytes."""
        return payload_bytes in self._possible

    def fits(self, framed_bytes: int) -> bool:
        """Whether a block as it is stored may have so many bytes."""
        return self.takes(framed_bytes - HEADER_BYTES)

    @cached_property
    def _possible(self) -> range:
        return range(1 if self.varies else self.payload_bytes, self.payload_bytes + 1)

    def header(self, key: BlockKey, payload: memoryview) -> bytes:
        """The HEADER_BYTES to store in front of `payload` ("B")."""
        return make_header(
            namespace=self.digest,
            key=key,
            layout=self.layout,
            payload_bytes=len(payload),
            checksum=payload_checksum(payload),
            codec=self.codec,
        )

    def check(self, raw: bytes | bytearray, key: BlockKey) -> Header:
        """Take apart the header of `key`. Raises: BlockCorrupt."""
        return check_header(
            raw,
            namespace=self.digest,
            key=key,
            layout=self.layout,
            codec=self.codec,
            payload_bytes=self._possible,
        )


class Incoming:
    """One framed block on its way in: checked while it comes, wherever it comes from.

    Two ways to fill it: read up to `len` bytes into the views of `room` and say so by `advance`, or
    hand over bytes by `feed`. At the end `finish` says whether `out` may be used.
    """

    def __init__(
        self,
        frame: BlockFrame,
        key: BlockKey,
        out: memoryview,
        progress: TellBytes | None = None,
    ) -> None:
        """Args:
        out: writable, of `frame.payload_bytes`; undefined until `finish` has returned.
        progress: as in `Store.get_into`; of a header that was wrong it hears nothing more.
        """
        assert out.nbytes == frame.payload_bytes, out.nbytes
        self._frame, self._key = frame, key
        self._head, self._body = on_page(HEADER_BYTES), out.cast("B")
        self._hashed = PayloadHasher()
        self._header: Header | None = None
        self._progress = progress
        self.done = 0  # bytes that have come
        if progress is not None:
            progress(0)

    @property
    def is_on_pages(self) -> bool:
        """Whether header and payload both start on a page, so that a disk can write them itself."""
        return is_on_page(self._head) and is_on_page(self._body)

    def room(self, at_most: int) -> list[memoryview]:
        """Where the next bytes belong: the rest of the header, `at_most` bytes of the payload."""
        start = max(0, self.done - HEADER_BYTES)
        body = self._body[start : start + at_most]
        return [self._head[self.done :], body] if self.done < HEADER_BYTES else [body]

    def advance(self, count: int) -> None:
        """`count` more bytes are in `room`. Raises: BlockCorrupt as soon as the header is wrong."""
        # Hashed now, while it is in the CPU's cache: about three times as fast as later.
        self.check(self.came(count))

    def came(self, count: int) -> memoryview:
        """As `advance`, but the caller gives the payload that came to `check`, in this order and
        before `finish`; that may be in another thread, while more comes."""
        before, self.done = self.done, self.done + count
        if before < HEADER_BYTES <= self.done:
            self._header = self._frame.check(bytes(self._head), self._key)
        if self._progress is not None and self.done > HEADER_BYTES:
            self._progress(self.done - HEADER_BYTES)
        return self._body[max(0, before - HEADER_BYTES) : max(0, self.done - HEADER_BYTES)]

    def check(self, payload: memoryview) -> None:
        """Take the payload that came last into account."""
        self._hashed.update(payload)

    def feed(self, data: bytes | memoryview) -> None:
        """Copy `data` to where it belongs. Raises: BlockCorrupt; also if it is too much."""
        rest = memoryview(data)
        if self.done + len(rest) > self._frame.framed_bytes:
            raise BlockCorrupt(f"more than {self._frame.framed_bytes} bytes")
        for view in self.room(len(rest)):
            taken = min(len(view), len(rest))
            view[:taken] = rest[:taken]
            rest = rest[taken:]
            self.advance(taken)

    def finish(self) -> int:
        """The bytes of the payload, with which `out` begins.

        Raises: BlockCorrupt if bytes are missing, or too many, or not what was stored.
        """
        expected = self._frame.framed_bytes
        if self._header is not None:
            expected = HEADER_BYTES + self._header.payload_bytes
        if self.done != expected or self._header is None:
            raise BlockCorrupt(f"ends after {self.done} of {expected} bytes")
        if self._hashed.digest() != self._header.payload_checksum:
            raise BlockCorrupt("the payload's checksum does not match")
        return self._header.payload_bytes
