"""Messages between members: read as they were written, or refused."""

import contextlib
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from members import JOB

from sglang_cake.runahead.messages import (
    Accept,
    BadMessage,
    Cancel,
    Failed,
    Hello,
    HelpOffer,
    LayerPart,
    Message,
    PartHead,
    PartWritten,
    ReceiveBuffer,
    Refuse,
    can_carry,
    decode,
    decode_head,
    encode,
)

TEXT = st.text(max_size=40)
COUNT = st.integers(0, 2**31 - 1)
PARTS = st.builds(
    lambda layer, start, tokens: LayerPart(JOB, layer, start, start + tokens),
    st.integers(0, 4095),
    st.integers(0, 2**30 - 1),
    st.integers(1, 2**30),
)
MESSAGES = st.one_of(
    st.builds(Accept, st.just(JOB)),
    st.builds(Refuse, st.just(JOB), TEXT),
    st.builds(Cancel, st.just(JOB), TEXT),
    st.builds(Failed, st.just(JOB), st.integers(0, 255), TEXT),
    st.builds(PartWritten, PARTS, COUNT, COUNT, st.integers(0, 2**64 - 1), COUNT),
    st.builds(
        lambda heard, buffer: Hello(
            *(4, 2, bytes(32), 7, heard, 1, "x"),
            *((bytes(16), bytes(32)) if heard else (b"", b"")),
            buffer,
        ),
        st.integers(0, 2**62 - 1),
        st.none() | st.builds(ReceiveBuffer, st.just("ab" * 2000) | TEXT, st.integers(0, 2**63)),
    ),
    st.builds(
        lambda tokens, salt: HelpOffer(
            JOB, (2, 0), (0, len(tokens), len(tokens) + 5), "ab", None, salt, array("i", tokens)
        ),
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
        st.none() | TEXT,
    ),
)


@given(MESSAGES)
def test_runahead_message_round_trip_is_equal(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.text(st.characters()) | st.integers(500, 520).map("s".__mul__))
def test_runahead_message_text_that_can_be_carried_arrives_equal(text: str) -> None:
    if can_carry(text):
        assert decode(encode(Refuse(JOB, text))) == Refuse(JOB, text)
    else:
        with pytest.raises((BadMessage, UnicodeEncodeError)):
            decode(encode(Refuse(JOB, text)))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_runahead_message_random_bytes_decode_or_raise_bad_message(body: bytes) -> None:
    for read in (decode, decode_head):
        with contextlib.suppress(BadMessage):
            read(body)


@settings(max_examples=300)
@given(MESSAGES, st.data())
def test_runahead_message_with_a_changed_byte_decodes_or_raises_bad_message(
    message: Message, data: st.DataObject
) -> None:
    body = bytearray(encode(message))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadMessage):
        decode(bytes(body))


@given(PARTS, COUNT, COUNT)
def test_runahead_part_head_round_trip_is_equal(part: LayerPart, size: int, took: int) -> None:
    assert decode_head(encode(PartHead(part, size, took))) == PartHead(part, size, took)


def plain(message: Message) -> dict[str, object]:
    """What is sent of it, to be spoilt."""
    fields = msgspec.msgpack.decode(encode(message))
    assert isinstance(fields, dict)
    return fields


OFFER = HelpOffer(JOB, (0, 1), (0, 5, 9), "ab", None, None, array("i", range(5)))


@pytest.mark.parametrize(
    "spoilt",
    [
        {"bounds": [0, 5, 5]},
        {"bounds": [0, 5]},
        {"bounds": [0, 5, 9, 12]},
        {"bounds": [0, 4, 9]},
        {"bounds": [0, 9, 5]},
        {"bounds": [-1, 5, 9]},
        {"bounds": list(range(300))},
        {"chain": [0, 0]},
        {"chain": [0, 256]},
        {"tokens": array("i", range(9)).tobytes()},
        {"tokens": array("i", range(5)).tobytes()[:-1]},
        {"tokens": array("i", [0, 1, 2, 3, -1]).tobytes()},
        {"tokens": [0, 1, 2, 3, 4]},
        {"job": "0" * 31},
        {"job": "0" * 32 + "\n"},
        {"job": "G" * 32},
        {"cache_salt": "x" * 513},
        {"namespace": None},
        {"more": 1},
        {"type": 99},
    ],
    ids=str,
)
def test_runahead_message_offer_with_a_wrong_field_is_bad(spoilt: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        decode(msgspec.msgpack.encode(plain(OFFER) | spoilt))


def test_runahead_message_without_a_field_is_bad() -> None:
    fields = plain(Accept(JOB))
    del fields["job"]
    with pytest.raises(BadMessage, match="job"):
        decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("spoilt", [{"layer": 4096}, {"stop": 3}, {"start": -1}], ids=str)
def test_runahead_part_head_with_invalid_layer_or_span_is_bad(spoilt: dict[str, int]) -> None:
    fields = {"job": JOB, "layer": 0, "start": 3, "stop": 4} | spoilt
    with pytest.raises(BadMessage):
        decode_head(msgspec.msgpack.encode([list(fields.values()), 0, 0]))
