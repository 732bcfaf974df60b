"""The header of a stored block: the one place that makes it and takes it apart.

The header is `HEADER_BYTES` long, so that the payload behind it starts on a page. Integers are
little-endian; what is not used is zero. Byte for byte in docs/format.md, which a test compares with
`FIELDS`.
"""

import struct
from dataclasses import dataclass

import xxhash

from sglang_cake.errors import BlockCorrupt
from sglang_cake.keys import BlockKey, Digest
from sglang_cake.layout import BlockLayout

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
    """What a checked header says about the payload behind it."""

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


def check_header(
    raw: bytes | bytearray, *, namespace: Digest, key: BlockKey, layout: BlockLayout
) -> Header:
    """Take a header apart; whatever it returns belongs to `key` in `namespace`.

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
    # From here on the header is what somebody wrote; is it about this block?
    if found["header_bytes"] != HEADER_BYTES:
        raise BlockCorrupt(f"header of {found['header_bytes']} bytes, not {HEADER_BYTES}")
    if found["namespace"] != namespace:
        raise BlockCorrupt(f"belongs to namespace {found['namespace'].hex()}")
    if found["key"] != key:
        raise BlockCorrupt(f"holds another block, {found['key'].hex()}")
    shape = bytes(raw[_FIXED.size : _CHECKSUM_AT][: found["layout_bytes"]])
    if shape != layout.describe().encode():
        raise BlockCorrupt(f"has another layout, {shape.decode(errors='replace')}")
    codec = found["codec"].rstrip(b"\0").decode("ascii", errors="replace")
    if codec != RAW:
        raise BlockCorrupt(f"has codec {codec!r}, this program reads {RAW!r}")
    payload_bytes = found["payload_bytes"]
    if payload_bytes != layout.block_bytes:
        raise BlockCorrupt(f"payload of {payload_bytes} bytes, a block has {layout.block_bytes}")
    return Header(
        codec=codec, payload_bytes=payload_bytes, payload_checksum=found["payload_checksum"]
    )
