"""The block header: made, checked, and no wrong byte in it goes unseen."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.codecs import frame
from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame, IncomingBlock, payload_checksum
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.testing.store_contract import FRAME, LAYOUT, NAMESPACE, block_of, key_of

KEY = key_of("a")
HEADER = FRAME.header(KEY, block_of("a"))


def check(raw, namespace=NAMESPACE, key=KEY, layout=LAYOUT):
    return BlockFrame(namespace, layout).check(raw, key)


def sealed(**changed):
    """HEADER with fields changed and a checksum that fits: a header of somebody else."""
    names = [name for name, _ in frame.FIELDS]
    form = struct.Struct("<" + "".join(code for _, code in frame.FIELDS))
    fields = dict(zip(names, form.unpack_from(HEADER), strict=True)) | changed
    body = form.pack(*fields.values()) + HEADER[form.size : HEADER_BYTES - frame.CHECKSUM_BYTES]
    return body + payload_checksum(body)


def test_block_header_made_from_a_block_has_its_fields():
    header = check(HEADER)
    assert header.codec == "raw"
    assert header.payload_bytes == LAYOUT.block_bytes
    assert header.payload_checksum == payload_checksum(block_of("a"))
    assert len(HEADER) == HEADER_BYTES == 4096


@given(
    layers=st.integers(1, 200),
    shapes=st.lists(st.lists(st.integers(1, 256), max_size=3).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8"]),
    key=st.binary(min_size=32, max_size=32),
    fields=st.dictionaries(st.text(), st.text(), max_size=4),
    payload=st.binary(min_size=1, max_size=64),
)
def test_block_header_of_any_layout_round_trips(layers, shapes, dtype, key, fields, payload):
    layout = BlockLayout.plain(layers, tuple((f"p{i}", s) for i, s in enumerate(shapes)), dtype, 16)
    any_size = BlockFrame(Namespace(tuple(fields.items())), layout, added_bytes=64, varies=True)
    header = any_size.check(any_size.header(key, payload), key)
    assert header.payload_checksum == payload_checksum(payload)
    assert header.payload_bytes == len(payload)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_block_header_with_any_changed_byte_is_corrupt(mask):
    raw = bytearray(HEADER)
    for at in range(HEADER_BYTES):
        raw[at] ^= mask
        with pytest.raises(BlockCorrupt):
            check(raw)
        raw[at] ^= mask
    check(raw)


@given(at=st.integers(0, LAYOUT.block_bytes - 1), mask=st.integers(1, 255))
def test_payload_checksum_of_a_changed_byte_differs(at, mask):
    payload = bytearray(block_of("a"))
    payload[at] ^= mask
    assert payload_checksum(payload) != check(HEADER).payload_checksum


@pytest.mark.parametrize("size", [0, 1, 8, 127, 128, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_block_header_of_wrong_length_is_corrupt(size):
    with pytest.raises(BlockCorrupt, match=f"{size} bytes"):
        check((HEADER * 2)[:size])


def told_of(raw, pieces):
    """What is told of `raw`, fed in so many pieces, and what comes of it."""
    counts = []
    block = IncomingBlock(FRAME, KEY, memoryview(bytearray(LAYOUT.block_bytes)), counts.append)
    size = -(-len(raw) // pieces)
    try:
        for start in range(0, len(raw), size):
            block.feed(raw[start : start + size])
        return counts, block.finish()
    except BlockCorrupt as error:
        return counts, str(error)


@pytest.mark.parametrize("pieces", [1, 7, HEADER_BYTES])
def test_incoming_block_progress_is_reported_before_the_checksum(pieces):
    raw = FRAME.header(KEY, block_of("a")) + bytes(block_of("a"))
    counts, size_bytes = told_of(raw, pieces)
    assert size_bytes == LAYOUT.block_bytes
    assert counts[0] == 0
    assert counts[-1] == LAYOUT.block_bytes
    assert counts == sorted(set(counts))
    assert pieces == 1 or len(counts) > 2
    wrong = FRAME.header(KEY, block_of("b")) + bytes(block_of("a"))
    assert told_of(wrong, pieces) == (counts, "the payload's checksum does not match")


@pytest.mark.parametrize("pieces", [1, 7, HEADER_BYTES])
@pytest.mark.parametrize("header", [bytes(HEADER_BYTES), FRAME.header(key_of("b"), block_of("a"))])
def test_incoming_block_wrong_header_reports_no_payload(header, pieces):
    assert told_of(header + bytes(block_of("a")), pieces)[0] == [0]


OTHER_LAYOUT = BlockLayout.plain(2, (("k", (8, 2)), ("v", (8, 2))), "bfloat16", 8)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\x7fELF".ljust(HEADER_BYTES, b"\0"), "not a block file"),
        (bytes(HEADER_BYTES), "not a block file"),
        (sealed(version=2), "format version 2"),
        (sealed(header_bytes=8192), "header of 8192 bytes"),
        (sealed(namespace=bytes(32)), "namespace 0000"),
        (sealed(key=bytes(32)), "another block, 0000"),
        (sealed(layout_bytes=3), "another layout"),
        (sealed(layout_bytes=2**32 - 1), "another layout"),
        (sealed(codec=b"zstd"), "codec 'zstd'"),
        (sealed(payload_bytes=1), "payload of 1 bytes"),
        (HEADER[:-1] + b"\0", "header's checksum"),
    ],
)
def test_block_header_invalid_field_is_named_in_the_error(raw, reason):
    with pytest.raises(BlockCorrupt, match=reason):
        check(raw)


def test_block_header_of_another_block_is_corrupt():
    check(sealed())
    with pytest.raises(BlockCorrupt, match="namespace"):
        check(HEADER, namespace=Namespace((("model", "other"),)))
    with pytest.raises(BlockCorrupt, match="another block"):
        check(HEADER, key=key_of("b"))
    assert OTHER_LAYOUT.block_bytes == LAYOUT.block_bytes
    with pytest.raises(BlockCorrupt, match="another layout"):
        check(HEADER, layout=OTHER_LAYOUT)
