"""Every codec keeps the contract of codecs."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.codecs.block_arrays import relative_error
from sglang_cake.codecs.catalogue import chain_of, decode
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES, HEADER_BYTES
from sglang_cake.codecs.pipeline import Chain
from sglang_cake.core.codec_names import CODECS
from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout
from sglang_cake.testing.codec_contract import CodecContract, as_bytes


class OwnCodec(CodecContract):
    codec: str
    rope_theta: float | None = None

    def chain(self, layout: BlockLayout) -> Chain:
        return chain_of(self.codec, layout, rope_theta=self.rope_theta)


class TestRaw(OwnCodec):
    codec = "raw"


class TestZstd(OwnCodec):
    codec = "zstd"


class TestInt8(OwnCodec):
    codec = "int8"
    max_error, odd_error = 0.01, 0.02


class TestInt4(OwnCodec):
    codec = "int4"
    max_error, odd_error = 0.12, 0.25


class TestKvquant3BeforeRope(OwnCodec):
    codec = "kvquant3"
    rope_theta = 10000.0
    max_error, odd_error = 0.25, 0.5


class TestCachegen1(OwnCodec):
    codec = "cachegen1"
    max_error, odd_error = 0.05, 0.08


class TestCachegen3(OwnCodec):
    codec = "cachegen3"
    max_error, odd_error = 0.25, 0.25


layouts = st.builds(
    BlockLayout.plain,
    layers=st.integers(1, 3),
    parts=st.sampled_from(
        [
            (("k", (1, 4)), ("v", (1, 4))),
            (("k", (3, 5)), ("v", (2, 9))),
            (("k", (2, 80)), ("v", (2, 80))),
            (("kv", (37,)),),
        ]
    ),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    block_tokens=st.sampled_from([1, 2, 7, 8, 33, 129, 140]),
)
several_groups = st.builds(
    lambda some, tokens: BlockLayout(tuple(one.groups[0] for one in some), tokens),
    st.lists(layouts, min_size=2, max_size=3),
    st.sampled_from([1, 7, 8, 33]),
)


@settings(max_examples=60)
@given(
    layout=layouts | several_groups,
    seed=st.integers(0, 2**32),
    codec=st.sampled_from(["raw", "zstd"]),
)
def test_lossless_codecs_random_bytes_return_bit_for_bit(
    layout: BlockLayout, seed: int, codec: str
) -> None:
    block = np.random.default_rng(seed).bytes(layout.block_bytes)
    assert _round_trip(layout, block, codec) == block


@settings(max_examples=60)
@given(
    layout=layouts,
    seed=st.integers(0, 2**32),
    codec=st.sampled_from([("int8", 255), ("int4", 15)]),
    exponent=st.integers(-30, 30),
)
def test_int_codecs_random_numbers_move_at_most_half_a_group_step(
    layout: BlockLayout, seed: int, codec: tuple[str, int], exponent: int
) -> None:
    """The bound of even grids, number by number, from the definition of a group."""
    name, steps = codec
    if layout.groups[0].dtype == "float16":
        exponent = max(-8, min(8, exponent))
    draw = np.random.default_rng(seed)
    count = layout.block_bytes // DTYPE_BYTES[layout.groups[0].dtype]
    numbers = draw.normal(size=count) * draw.choice([1, 1, 1, 30], size=count) * 2.0**exponent
    block = as_bytes(numbers, layout.groups[0].dtype)
    restored = _round_trip(layout, block, name)
    before, after = _numbers(layout, block), _numbers(layout, restored)
    unit = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}[layout.groups[0].dtype]
    for (part, exact), (_, found) in zip(before, after, strict=True):
        axis = 0 if part == "k" else 1
        for first in range(0, exact.shape[axis], 128):
            piece = (slice(first, first + 128), slice(None))
            piece = piece if axis == 0 else piece[::-1]
            group, got = exact[piece], found[piece]
            size = np.abs(exact).max()
            step = (group.max(axis) - group.min(axis)) / steps
            # float16 rounds the zero by 2^-10 of its size and the scale by 2^-24 of the plane.
            zero = np.abs(group).max(axis) * 2**-10
            bound = step * 0.51 + zero / steps + size * 2**-22
            bound = np.expand_dims(bound, axis) + np.abs(got) * unit
            assert (np.abs(got - group) <= bound).all()


def _numbers(layout: BlockLayout, block: bytes) -> list[tuple[str, np.ndarray]]:
    from sglang_cake.codecs.block_arrays import Block

    found = Block.over(layout, memoryview(block))
    return [
        (part.name, plane)
        for part in found.parts
        for plane in found.floats(part).astype(np.float64)
    ]


def _round_trip(layout: BlockLayout, block: bytes, codec: str) -> bytes:
    payload = memoryview(bytearray(layout.block_bytes + ENCODED_HEAD_BYTES))
    size = chain_of(codec, layout).encode(layout, memoryview(block), payload)
    out = bytearray(layout.block_bytes)
    decode(layout, payload[:size], memoryview(out))
    return bytes(out)


def test_relative_error_one_wrong_plane_is_the_rms_over_all_planes() -> None:
    layout = BlockLayout.plain(2, (("k", (1, 4)), ("v", (1, 4))), "float32", 2)
    exact = np.ones(32, np.float32)
    decoded = exact.copy()
    decoded[8:16] *= 1.5  # V of the first layer
    found = relative_error(layout, memoryview(exact.tobytes()), memoryview(decoded.tobytes()))
    assert found == pytest.approx(0.25)  # the root of a quarter of 0.5 ** 2


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_relative_error_number_that_is_not_finite_is_infinite(number: float) -> None:
    layout = BlockLayout.plain(2, (("k", (1, 4)), ("v", (1, 4))), "float32", 2)
    numbers = np.ones(32, np.float32)
    numbers[3] = number
    block = memoryview(numbers.tobytes())
    assert relative_error(layout, block, block) == np.inf


@settings(max_examples=80)
@given(
    layout=layouts,
    seed=st.integers(0, 2**32),
    codec=st.sampled_from(
        # The smallest blocks are the worst.
        [("kvquant3", 0.7), ("cachegen1", 0.1), ("cachegen2", 0.25)]
    ),
    exponent=st.integers(-30, 30),
)
def test_lossy_codecs_random_layouts_stay_within_their_error(
    layout: BlockLayout, seed: int, codec: tuple[str, float], exponent: int
) -> None:
    name, most = codec
    if layout.groups[0].dtype == "float16":
        exponent = max(-6, min(8, exponent))
    draw = np.random.default_rng(seed)
    count = layout.block_bytes // DTYPE_BYTES[layout.groups[0].dtype]
    block = as_bytes(draw.normal(size=count) * 2.0**exponent, layout.groups[0].dtype)
    restored = _round_trip(layout, block, name)
    assert relative_error(layout, memoryview(block), memoryview(restored)) <= most


def test_kvquant_outliers_are_restored_exactly() -> None:
    """KVQuant's dense-and-sparse: the few numbers farthest out keep every bit."""
    layout = BlockLayout.plain(1, (("k", (1, 4)), ("v", (1, 128))), "float32", 128)
    draw = np.random.default_rng(5)
    numbers = draw.normal(size=128 * 132).astype(np.float32)
    keys, values = numbers[: 128 * 4].reshape(128, 4), numbers[128 * 4 :].reshape(128, 128)
    keys[17, 2], values[90, 5] = 1234.5678, -777.7777
    block = numbers.tobytes()
    restored = np.frombuffer(_round_trip(layout, block, "kvquant3"), np.float32)
    assert restored[: 128 * 4].reshape(128, 4)[17, 2] == np.float32(1234.5678)
    assert restored[128 * 4 :].reshape(128, 128)[90, 5] == np.float32(-777.7777)
    others = np.delete(restored, 17 * 4 + 2)
    assert np.abs(others[others > -700]).max() < 6  # the range of the rest is its own


def test_inverse_rope_rotated_equal_keys_become_equal_again() -> None:
    """What RoPE did to a constant channel pair is undone up to one turn for the whole block."""
    from sglang_cake.codecs.block_arrays import Block
    from sglang_cake.codecs.rope import InverseRope

    layout = BlockLayout.plain(1, (("k", (2, 8)), ("v", (2, 8))), "float32", 64)
    position, half = 1000 + np.arange(64)[:, None, None], 4
    angle = position * 500.0 ** (-np.arange(0, 8, 2) / 8)
    before = np.random.default_rng(2).normal(size=(2, 8))
    left, right = before[:, :half], before[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    turned = np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=2)
    block = np.concatenate((turned.reshape(-1), np.arange(64 * 16))).astype(np.float32)
    out = np.empty_like(block)
    step = InverseRope(500.0, 8)
    source = Block.over(layout, memoryview(block.tobytes()))
    target = Block.over(layout, memoryview(out).cast("B"))
    step.encode(source, target)
    keys = out[: 64 * 16].reshape(64, 16)
    assert np.abs(keys - keys[0]).max() < 1e-5
    assert (out[64 * 16 :] == block[64 * 16 :]).all()
    back = np.empty_like(block)
    step.decode(target, Block.over(layout, memoryview(back).cast("B")))
    assert np.abs(back - block).max() < 1e-5


@pytest.mark.parametrize(("codec", "least"), [("int8", 1.9), ("int4", 3.7), ("kvquant3", 4.5)])
@pytest.mark.parametrize(("layers", "heads"), [(32, 8), (40, 40), (80, 1)])
def test_codecs_known_model_layouts_reach_their_compression(
    codec: str, least: float, layers: int, heads: int
) -> None:
    """Llama-3.1-8B, LongAlpaca-13B, a rank of eight of Llama-3.1-70B; these sizes are fixed."""
    layout = BlockLayout.plain(layers, (("k", (heads, 128)), ("v", (heads, 128))), "bfloat16", 128)
    chain = chain_of(codec, layout, rope_theta=500000.0)
    stored_bytes = HEADER_BYTES + 192 + chain.max_bytes(layout)
    assert layout.block_bytes / stored_bytes >= least


def test_codec_chain_description_is_shorter_than_188_bytes() -> None:
    layout = BlockLayout.plain(1, (("k", (1, 128)), ("v", (1, 128))), "bfloat16", 128)
    assert all(len(chain_of(codec, layout, 500000.0).describe()) < 188 for codec in CODECS)


WARM = """
import numpy as np
from sglang_cake.codecs import nonuniform
from sglang_cake.codecs.catalogue import chain_of, decode
from sglang_cake.core.layout import BlockLayout

loops = [each for each in vars(nonuniform).values() if hasattr(each, "signatures")]
for block_tokens in (128, 512):
    layout = BlockLayout.plain(2, (("k", (2, 32)), ("v", (2, 32))), "bfloat16", block_tokens)
    chain = chain_of("kvquant3", layout, 10000.0)
    chain.warm_up(layout)
    print([len(each.signatures) for each in loops])
    block = np.random.default_rng(0).normal(size=layout.block_bytes // 4).astype(np.float32)
    block = memoryview((block.view(np.uint32) >> 16).astype(np.uint16).tobytes() * 2)
    out = memoryview(bytearray(layout.block_bytes + 1024))
    size = chain.of_first().encode(layout, block, out)
    assert size < layout.block_bytes
    decode(layout, out[:size], memoryview(bytearray(layout.block_bytes)))
    print([len(each.signatures) for each in loops])
"""


def test_kvquant_warm_up_compiles_all_loops_before_the_first_block() -> None:
    """In a process of its own, which has compiled nothing. Of longer blocks, the places of the
    numbers that are kept have another type."""
    done = subprocess.run([sys.executable, "-c", WARM], stdout=subprocess.PIPE, text=True)
    warm, used, warm_of_longer, used_of_longer, end = done.stdout.split("\n")
    assert (warm, warm_of_longer, end) == (used, used_of_longer, "")
    assert warm != warm_of_longer
