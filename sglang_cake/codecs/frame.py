"""The header of a stored block: the only place that writes and reads it.

The header is `HEADER_BYTES` long, so that the payload after it starts on a page. Integers are
little-endian; unused bytes are zero. Byte for byte in docs/format.md, which a test compares with
`FIELDS`. Payloads may be encoded (`pipeline`), then encrypted (`stores/encrypted.py`); frames of
both are here too, and need none of the packages that encoding and encryption need.
"""

import struct
from dataclasses import dataclass, replace
from functools import cached_property

import xxhash

from sglang_cake.core.buffers import TellBytes, is_on_page, on_page
from sglang_cake.core.codec_names import RAW, codec_in
from sglang_cake.core.errors import BlockCorrupt, ConfigError
from sglang_cake.core.keys import BlockKey, Digest, Namespace
from sglang_cake.core.layout import BlockLayout

HEADER_BYTES = 4096
MAGIC = b"CAKEKV\0\1"
VERSION = 1

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

# 128 bits: with 64, a large fleet's blocks over years come near the birthday bound. xxhash releases
# the GIL while it hashes a large buffer, also a memoryview (measured with 4.1.0: a second thread
# continues within microseconds).
PayloadHasher = xxhash.xxh3_128


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header whose own checksum is right."""

    namespace: Digest
    key: BlockKey
    layout: str  # `BlockLayout.describe()`
    codec: str
    payload_bytes: int
    payload_checksum: bytes  # CHECKSUM_BYTES


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """XXH3-128 of `payload`, CHECKSUM_BYTES long, most significant byte first."""
    return bytes(PayloadHasher(payload).digest())


def read_header(raw: bytes | bytearray) -> Header:
    """Read a header and check its checksum. The caller compares the fields with what it expects.

    Raises: BlockCorrupt, which names the failed check.
    """
    if len(raw) != HEADER_BYTES:
        raise BlockCorrupt(f"the header has {len(raw)} bytes, not {HEADER_BYTES}")
    names = (name for name, _ in FIELDS)
    found = dict(zip(names, _FIXED.unpack_from(raw), strict=True))
    # Magic and version come first: the message should name a file of another kind or version, and
    # another version may have its checksum in another place.
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


@dataclass(frozen=True)
class BlockFrame:
    """How the blocks of one namespace are framed, in every store alike."""

    namespace: Namespace
    layout: BlockLayout
    codec: str = RAW  # of the payload; `+aesgcm` after it if it is encrypted
    added_bytes: int = 0  # how many bytes a payload may be longer than the block
    varies: bool = False  # whether payloads may also be shorter

    @cached_property
    def digest(self) -> Digest:
        """The digest of the namespace."""
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

    def header(self, key: BlockKey, payload: memoryview | bytes) -> bytes:
        """The HEADER_BYTES to store in front of `payload`, which is bytes or a view "B"."""
        name, shape = self.codec.encode("ascii"), self.layout.describe().encode()
        assert len(key) == 32, len(key)
        assert 0 < len(name) <= 16, self.codec
        assert len(shape) <= MAX_LAYOUT_BYTES, len(shape)
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            len(payload),
            self.digest,
            key,
            payload_checksum(payload),
            name,
            len(shape),
            0,
        )
        body = (fixed + shape).ljust(_CHECKSUM_AT, b"\0")
        return body + payload_checksum(body)

    def check(self, raw: bytes | bytearray, key: BlockKey) -> Header:
        """Read a header and check that it belongs to the block of this key.

        Raises: BlockCorrupt, which names the failed check.
        """
        header = read_header(raw)
        if header.namespace != self.digest:
            raise BlockCorrupt(f"belongs to namespace {header.namespace.hex()}")
        if header.key != key:
            raise BlockCorrupt(f"holds another block, {header.key.hex()}")
        if header.layout != self.layout.describe():
            raise BlockCorrupt(f"has another layout, {header.layout}")
        if header.codec != self.codec:
            raise BlockCorrupt(f"has codec {header.codec!r}, this program reads {self.codec!r}")
        if not self.takes(header.payload_bytes):
            least, most = self._possible.start, self._possible.stop - 1
            allowed = f"{least}" if least == most else f"{least} to {most}"
            raise BlockCorrupt(f"payload of {header.payload_bytes} bytes, a block has {allowed}")
        return header


class IncomingBlock:
    """One framed block that is being received: checked while its bytes arrive, from any source.

    There are two ways to fill it: read bytes into the views of `room`, call `came` with their
    number, and `check` with what that returns; or pass bytes to `feed`. At the end `finish` tells
    whether `out` may be used.
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
        progress: as in `Store.get_into`; it is not called again after a wrong header.
        """
        assert out.nbytes == frame.payload_bytes, out.nbytes
        self._frame = frame
        self._key = key
        self._head = on_page(HEADER_BYTES)
        self._body = out.cast("B")
        self._hashed = PayloadHasher()
        self._header: Header | None = None
        self._progress = progress
        self.done = 0  # bytes that have arrived
        if progress is not None:
            progress(0)

    @property
    def is_on_pages(self) -> bool:
        """Whether header and payload both start on a page, as direct I/O needs it."""
        return is_on_page(self._head) and is_on_page(self._body)

    def room(self, at_most: int) -> list[memoryview]:
        """Views for the next bytes: the rest of the header, and `at_most` bytes of the payload."""
        start = max(0, self.done - HEADER_BYTES)
        body = self._body[start : start + at_most]
        return [self._head[self.done :], body] if self.done < HEADER_BYTES else [body]

    def came(self, count: int) -> memoryview:
        """`count` more bytes are in `room`. Returns those of the payload, which the caller passes
        to `check`, in this order and before `finish`, from any thread. While they are in the CPU's
        cache, that is about three times as fast as later.

        Raises: BlockCorrupt if the header is wrong.
        """
        before = self.done
        self.done += count
        if before < HEADER_BYTES <= self.done:
            self._header = self._frame.check(bytes(self._head), self._key)
        if self._progress is not None and self.done > HEADER_BYTES:
            self._progress(self.done - HEADER_BYTES)
        return self._body[max(0, before - HEADER_BYTES) : max(0, self.done - HEADER_BYTES)]

    def check(self, payload: memoryview) -> None:
        """Hash bytes that `came` returned."""
        self._hashed.update(payload)

    def feed(self, data: bytes | memoryview) -> None:
        """Copy `data` into header and payload. Raises: BlockCorrupt, also if it is too long."""
        rest = memoryview(data)
        if self.done + len(rest) > self._frame.framed_bytes:
            raise BlockCorrupt(f"more than {self._frame.framed_bytes} bytes")
        for view in self.room(len(rest)):
            taken = min(len(view), len(rest))
            view[:taken] = rest[:taken]
            rest = rest[taken:]
            self.check(self.came(taken))

    def finish(self) -> int:
        """Bytes of the payload, with which `out` begins.

        Raises: BlockCorrupt if there are too few or too many bytes, or a checksum does not match.
        """
        expected = self._frame.framed_bytes
        if self._header is not None:
            expected = HEADER_BYTES + self._header.payload_bytes
        if self.done != expected or self._header is None:
            raise BlockCorrupt(f"ends after {self.done} of {expected} bytes")
        if self._hashed.digest() != self._header.payload_checksum:
            raise BlockCorrupt("the payload's checksum does not match")
        return self._header.payload_bytes


ENCODED_HEAD_BYTES = 1024  # how many bytes an encoded payload may be longer than the block
CODEC_FIELD = "codec"  # of the namespace
NONCE_BYTES, TAG_BYTES = 12, 16
SEALED_BYTES = NONCE_BYTES + TAG_BYTES  # how many bytes a sealed payload is longer
SEALED_FIELD = "sealed"  # of the namespace: which key the blocks are sealed with
_SEALED_CODEC = "+aesgcm"


def encoded_frame(namespace: Namespace, layout: BlockLayout, codec: str) -> BlockFrame:
    """How blocks of a codec are framed."""
    if codec == RAW:
        return BlockFrame(namespace, layout)
    return BlockFrame(namespace, layout, codec=codec, added_bytes=ENCODED_HEAD_BYTES, varies=True)


def sealed_frame(frame: BlockFrame, key_name: str) -> BlockFrame:
    """How the blocks of `frame` are framed once they are sealed with the key of that name.

    A sealed payload is the nonce, the ciphertext (as long as the payload) and the tag, in this
    order. Blocks of different keys, or of none, have different namespaces.

    Raises: ConfigError if the blocks are sealed already.
    """
    return _sealed(replace(frame, namespace=sealed_namespace(frame.namespace, key_name)))


def sealed_namespace(namespace: Namespace, key_name: str) -> Namespace:
    """The namespace of the sealed blocks of `namespace`.

    Raises: ConfigError if those are sealed already.
    """
    if SEALED_FIELD in namespace.describe():
        raise ConfigError("these blocks are sealed already: name their store without key_file")
    return Namespace((*namespace.fields, (SEALED_FIELD, key_name)))


def frame_of(namespace: Namespace, layout: BlockLayout) -> BlockFrame:
    """How the blocks of a namespace that was found in a store are framed, by its fields."""
    fields = namespace.describe()
    frame = encoded_frame(namespace, layout, codec_in(fields.get(CODEC_FIELD, RAW)))
    return _sealed(frame) if SEALED_FIELD in fields else frame


def _sealed(frame: BlockFrame) -> BlockFrame:
    return replace(
        frame,
        codec=frame.codec + _SEALED_CODEC,
        added_bytes=frame.added_bytes + SEALED_BYTES,
    )
