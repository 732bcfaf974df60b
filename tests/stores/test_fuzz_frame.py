"""Hostile bytes in front of the block parser: it says BlockCorrupt, or what it says is true."""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.codecs import frame as frames
from sglang_cake.codecs.frame import (
    HEADER_BYTES,
    SEALED_BYTES,
    IncomingBlock,
    payload_checksum,
    read_header,
    sealed_frame,
)
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.stores.encrypted import BlockCipher
from sglang_cake.testing.store_contract import FRAME, LAYOUT, ProgressRecord, block_of, key_of

MANY = settings(max_examples=3 * settings.default.max_examples)
KEY = key_of("a")
PAYLOAD = bytes(block_of("a"))
FRAMED = FRAME.header(KEY, memoryview(PAYLOAD)) + PAYLOAD
FORM = struct.Struct("<" + "".join(code for _, code in frames.FIELDS))
NAMES = [name for name, _ in frames.FIELDS]
RIGHT = dict(zip(NAMES, FORM.unpack_from(FRAMED), strict=True))
LAYOUT_JSON = LAYOUT.describe().encode()
SEALED_FRAME = sealed_frame(FRAME, "0123456789abcdef")


def values(code):
    """What a field of a header may hold."""
    if code.endswith("s"):
        return st.binary(max_size=int(code[:-1]))
    return st.one_of(st.integers(0, 2 ** (8 * struct.calcsize("<" + code)) - 1), st.integers(0, 40))


FIELDS = st.fixed_dictionaries({}, optional={name: values(code) for name, code in frames.FIELDS})


def made(fields, shape):
    """A header whose own checksum is right, whatever the fields say."""
    fixed = FORM.pack(*(RIGHT | fields).values())
    body = (fixed + shape).ljust(HEADER_BYTES - 16, b"\0")[: HEADER_BYTES - 16]
    return body + payload_checksum(body)


def verdict(check):
    """What `check` returns; None if it says the block is corrupt, in one line that is not long."""
    try:
        return check()
    except BlockCorrupt as error:
        assert len(str(error)) < 10_000  # noqa: PT017 - both ways are fine
        return None


@MANY
@given(st.one_of(st.binary(max_size=300), st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES)))
def test_read_header_of_random_bytes_is_corrupt(raw):
    assert verdict(lambda: read_header(raw)) is None


@MANY
@given(FIELDS, st.one_of(st.just(LAYOUT_JSON), st.binary(max_size=HEADER_BYTES)))
def test_read_header_with_a_valid_checksum_returns_the_fields(fields, shape):
    raw = made(fields, shape)
    header = verdict(lambda: read_header(raw))
    found = dict(zip(NAMES, FORM.unpack_from(raw), strict=True))
    ours = found["magic"] == frames.MAGIC and found["version"] == frames.VERSION
    assert (header is not None) == (ours and found["header_bytes"] == HEADER_BYTES)
    if header is not None:
        assert header.payload_bytes == found["payload_bytes"]
        assert header.namespace == found["namespace"]
        assert header.key == found["key"]


@MANY
@given(FIELDS, st.one_of(st.just(LAYOUT_JSON), st.binary(max_size=HEADER_BYTES)))
def test_block_frame_check_accepts_only_the_header_of_its_block(fields, shape):
    raw = made(fields, shape)
    for frame in (FRAME, SEALED_FRAME):
        found = dict(zip(NAMES, FORM.unpack_from(raw), strict=True))
        expected = {
            "magic": frames.MAGIC,
            "version": frames.VERSION,
            "header_bytes": HEADER_BYTES,
            "payload_bytes": frame.payload_bytes,
            "namespace": frame.digest,
            "key": KEY,
            "codec": frame.codec.encode().ljust(16, b"\0"),
            "layout_bytes": len(LAYOUT_JSON),
        }
        fits = expected.items() <= found.items()
        fits &= raw[FORM.size : FORM.size + len(LAYOUT_JSON)] == LAYOUT_JSON
        assert (verdict(lambda frame=frame: frame.check(raw, KEY)) is not None) == fits


@st.composite
def damaged(draw, whole=FRAMED):
    """The right bytes, or nearly: cut, lengthened, flipped, moved."""
    raw = bytearray(whole)
    for how in draw(st.lists(st.sampled_from("cefm"), max_size=3)):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        if how == "c":
            del raw[at:]
        elif how == "e":
            raw += draw(st.binary(max_size=40))
        elif how == "f" and raw:
            raw[at] ^= draw(st.integers(1, 255))
        else:
            raw[at:at] = draw(st.binary(max_size=3))
    return bytes(raw)


@MANY
@given(damaged(), st.lists(st.integers(0, 1500), max_size=30), st.data())
def test_incoming_block_pieces_of_any_size_give_the_block_or_corrupt(raw, cuts, data):
    around = bytearray(b"\x11" * (len(PAYLOAD) + 64))
    out = memoryview(around)[32:-32]
    told = ProgressRecord(out, raw[HEADER_BYTES:][: len(PAYLOAD)])
    block = IncomingBlock(FRAME, KEY, out, told)

    def fill():
        rest = memoryview(raw)
        for size in [*cuts, len(raw)]:
            piece, rest = rest[:size], rest[size:]
            if data.draw(st.booleans()):
                block.feed(piece)
                continue
            before = len(piece)
            for view in block.room(len(piece)):  # as `readv` would
                taken = min(len(view), len(piece))
                view[:taken] = piece[:taken]
                piece = piece[taken:]
            block.check(block.came(before - len(piece)))
            block.feed(piece)  # what there was no room for
        block.finish()
        return True

    assert (verdict(fill) is not None) == (raw == FRAMED)
    if raw == FRAMED:
        assert around[32:-32] == PAYLOAD
        assert told.counts[-1] == len(PAYLOAD)
    assert around[:32] == around[-32:] == b"\x11" * 32
    assert told.wrong == []
    assert told.counts == [0, *sorted(told.counts[1:])]
    assert 0 not in told.counts[1:], "it came once"
    if verdict(lambda: FRAME.check(raw[:HEADER_BYTES], KEY)) is None:
        assert told.counts == [0]


CIPHER = BlockCipher(bytes(32), SEALED_FRAME.digest)
SEALED = bytearray(len(PAYLOAD) + SEALED_BYTES)
CIPHER.encrypt(KEY, memoryview(PAYLOAD), memoryview(SEALED))


@MANY
@given(damaged(SEALED))
def test_sealer_open_accepts_only_the_unchanged_sealed_bytes(raw):
    out = bytearray(len(PAYLOAD))
    raw = raw[: len(SEALED)].ljust(len(SEALED), b"\0")  # the inner store sees to the length

    def opened():
        CIPHER.decrypt(KEY, memoryview(raw), memoryview(out))
        return True

    assert (verdict(opened) is not None) == (raw == SEALED)
    if raw == SEALED:
        assert out == PAYLOAD
