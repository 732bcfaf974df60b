"""The decoder of `cachegen` reads what `constriction`'s encoder writes, as its decoder would."""

import subprocess
import sys
from pathlib import Path

import constriction
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_cake.codecs import entropy
from sglang_cake.codecs.catalogue import chain_of, decode
from sglang_cake.codecs.codec_steps import Malformed
from sglang_cake.codecs.distributions import BITS, CLASSES, distribution, tables, widest
from sglang_cake.codecs.entropy import decode_numbers, decoder
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.core.layout import BlockLayout
from sglang_cake.testing.codec_contract import kv_like

queue = constriction.stream.queue
LAYOUT = BlockLayout.plain(2, (("k", (2, 32)), ("v", (2, 32))), "bfloat16", 64)
ONES = 2**32 - 1


@pytest.mark.parametrize("kind", range(CLASSES))
def test_entropy_tables_intervals_equal_those_of_constriction(kind):
    """The encoder's state after one number says where its quantiles begin and how many they are.

    Of every other number, and of the last: they border on all others.
    """
    lefts, _, centres, _ = tables()
    scale, count = (2**64 - 1) >> BITS, 2 * widest(kind) + 1
    first = centres[kind] - widest(kind)
    for i in (*range(0, count, 2), count - 1):
        encoder = queue.RangeEncoder()
        encoder.encode(i, distribution(kind))
        _, (lower, size) = encoder.pos()
        assert lower == int(lefts[first + i]) * scale
        assert lower + size == int(lefts[first + i + 1]) * scale


def test_entropy_tables_each_bin_points_to_the_interval_of_its_start():
    lefts, begins, centres, _ = tables()
    bins = begins.shape[1] - 1
    for kind in range(CLASSES):
        first, stop = centres[kind] - widest(kind), centres[kind] + widest(kind) + 1
        assert lefts[first] == 0
        assert lefts[stop] == 2**BITS
        assert (np.diff(lefts[first : stop + 1].astype(np.int64)) > 0).all()
        quantiles, inside = np.arange(bins) * (2**BITS // bins), begins[kind, :-1]
        assert ((inside >= first) & (inside < stop)).all()
        assert (lefts[inside] <= quantiles).all()
        assert (quantiles < lefts[inside + 1]).all()
        assert begins[kind, -1] == stop


def in_turn(classes):
    """Layer, class and how many channels it has, as they are coded."""
    for layer, row in enumerate(classes):
        for kind, count in zip(*np.unique(row, return_counts=True), strict=True):
            yield layer, int(kind), int(count)


def written(classes, tokens, draw):
    """Words of the library's encoder, and the numbers they stand for."""
    encoder, numbers = queue.RangeEncoder(), [np.empty(0, np.int32)]
    for _, kind, count in in_turn(classes):
        most, size = widest(kind), count * tokens
        some = np.rint(draw.laplace(scale=max(0.1, most / 32), size=size))
        far = draw.integers(-most, most + 1, size)
        ends = draw.choice([-most, most], size)
        mixed = np.choose(draw.choice(3, size, p=[0.8, 0.1, 0.1]), [some, far, ends])
        numbers.append(np.clip(mixed, -most, most).astype(np.int32))
        encoder.encode(numbers[-1] + most, distribution(kind))
    return encoder.get_compressed(), np.concatenate(numbers)


def ours(words, classes, tokens):
    """The numbers that words stand for; None if no encoder wrote them."""
    gaps = np.empty((*classes.shape, tokens), np.int32)
    order = np.argsort(classes, axis=1, kind="stable")
    if decode_numbers(words, decoder(words), order, classes, *tables(), gaps):
        return gaps.reshape(-1)
    return None


def theirs(words, classes, tokens):
    decoder, numbers = queue.RangeDecoder(words), [np.empty(0, np.int32)]
    try:
        for _, kind, count in in_turn(classes):
            numbers.append(decoder.decode(distribution(kind), count * tokens) - widest(kind))
    except AssertionError:
        return None
    return np.concatenate(numbers)


def check(words, classes, tokens):
    found, expected = ours(words, classes, tokens), theirs(words, classes, tokens)
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", range(CLASSES))
def test_entropy_decoder_every_class_returns_the_encoded_numbers(kind):
    classes = np.full((2, 3), kind, np.uint8)
    words, numbers = written(classes, 500, np.random.default_rng(kind))
    np.testing.assert_array_equal(ours(words, classes, 500), numbers)
    check(words, classes, 500)


@st.composite
def shapes(draw):
    """Classes `[layers, channels]` and tokens."""
    layers, channels = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    kinds = st.integers(0, CLASSES - 1)
    drawn = draw(st.lists(kinds, min_size=layers * channels, max_size=layers * channels))
    tokens = draw(st.sampled_from([0, 1, 2, 17, 100]))
    return np.array(drawn, np.uint8).reshape(layers, channels), tokens


@given(shapes(), st.integers(0, 2**32 - 1))
def test_entropy_decoder_random_shapes_return_the_encoded_numbers(shape, seed):
    classes, tokens = shape
    words, numbers = written(classes, tokens, np.random.default_rng(seed))
    np.testing.assert_array_equal(ours(words, classes, tokens), numbers)
    check(words, classes, tokens)
    for size in {0, 1, 2, len(words) // 2, max(0, len(words) - 1)}:
        check(words[:size], classes, tokens)


WORDS = st.one_of(
    st.lists(st.sampled_from([0, 1, 2**31, ONES - 1, ONES]), max_size=20),
    st.lists(st.integers(0, ONES), max_size=20),
)


@given(shapes(), WORDS)
@example((np.full((1, 2), 9, np.uint8), 100), [])
@example((np.full((1, 2), 9, np.uint8), 100), [0] * 9)
@example((np.full((1, 2), 9, np.uint8), 100), [ONES] * 9)
def test_entropy_decoder_random_words_decode_as_the_library_does(shape, words):
    check(np.array(words, np.uint32), *shape)


def test_entropy_decoder_words_past_the_last_quantile_are_refused():
    """There is what rounding leaves of an interval: the encoder never goes there."""
    assert ours(np.full(9, ONES, np.uint32), np.zeros((1, 1), np.uint8), 1) is None


def payload_of(layout):
    payload = memoryview(bytearray(layout.block_bytes + ENCODED_HEAD_BYTES))
    size = chain_of("cachegen2", layout).encode(layout, memoryview(kv_like(layout)), payload)
    return payload[:size]


def test_cachegen_decode_spoiled_payload_raises_malformed():
    payload, out = payload_of(LAYOUT), memoryview(bytearray(LAYOUT.block_bytes))
    for words in (b"\0", b"\xff", b"\x5a"):
        spoiled = bytearray(payload)
        spoiled[-400:] = words * 400
        with pytest.raises(Malformed):
            decode(LAYOUT, memoryview(spoiled), out)


def test_cachegen_decode_needs_no_gil_and_no_constriction(monkeypatch):
    payload = payload_of(LAYOUT)
    monkeypatch.setitem(sys.modules, "constriction", None)
    decode(LAYOUT, payload, memoryview(bytearray(LAYOUT.block_bytes)))
    for loop in (decode_numbers, entropy.restore):
        assert loop.targetoptions["nogil"]


WARM = """
from test_entropy import LAYOUT, chain_of, decode, decode_numbers, entropy, payload_of

loops = (decode_numbers, entropy.restore)
chain = chain_of("cachegen2", LAYOUT)
chain.warm_up(LAYOUT)
print([len(loop.signatures) for loop in loops])
assert decode(LAYOUT, payload_of(LAYOUT), memoryview(bytearray(LAYOUT.block_bytes))) == chain
print([len(loop.signatures) for loop in loops])
"""


def test_cachegen_warm_up_compiles_all_loops_before_the_first_block():
    """In a process of its own, which has compiled nothing."""
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", WARM], cwd=here, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split("\n") == ["[1, 1]", "[1, 1]", ""]
