"""Block layouts: sizes and the canonical text."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout

LAYOUTS = st.builds(
    BlockLayout,
    layers=st.integers(1, 8),
    parts=st.lists(
        st.tuples(st.text(max_size=3), st.lists(st.integers(1, 9), max_size=3).map(tuple)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    block_tokens=st.integers(1, 300),
)


def test_block_layout_of_llama_3_8b_has_the_expected_sizes():
    # Llama 3 8B: 32 layers, 8 KV heads of 128, bf16: 128 KiB a token.
    parts = (("k", (8, 128)), ("v", (8, 128)))
    layout = BlockLayout(layers=32, parts=parts, dtype="bfloat16", block_tokens=128)
    assert layout.plane_token_bytes == (2048,) * 64
    assert layout.token_bytes == 128 * 1024
    assert layout.block_bytes == 16 * 1024 * 1024


def test_block_layout_planes_of_unequal_parts_are_in_layer_order():
    layout = BlockLayout(2, (("latent", (512,)), ("rope", (64,))), "bfloat16", 4)
    assert layout.plane_token_bytes == (1024, 128, 1024, 128)
    assert layout.plane_offsets == (0, 4096, 4608, 8704)


@given(LAYOUTS)
def test_block_layout_block_bytes_are_the_sum_of_the_planes(layout):
    assert len(layout.plane_token_bytes) == layout.layers * len(layout.parts)
    assert layout.token_bytes == sum(layout.plane_token_bytes)
    sizes = [n * layout.block_tokens for n in layout.plane_token_bytes]
    ends = [*layout.plane_offsets[1:], layout.block_bytes]
    assert [start + size for start, size in zip(layout.plane_offsets, sizes, strict=True)] == ends
    assert layout.block_bytes == layout.block_tokens * layout.token_bytes
    one_layer = sum(math.prod(shape) for _, shape in layout.parts) * DTYPE_BYTES[layout.dtype]
    assert layout.token_bytes == layout.layers * one_layer


@given(LAYOUTS, LAYOUTS)
def test_block_layout_descriptions_are_equal_exactly_if_layouts_are(one, other):
    assert (one.describe() == other.describe()) == (one == other)


@given(LAYOUTS)
def test_block_layout_description_holds_every_field(layout):
    found = json.loads(layout.describe())
    parts = tuple((name, tuple(shape)) for name, shape in found.pop("parts"))
    assert BlockLayout(parts=parts, **found) == layout


def test_block_layout_unknown_dtype_raises():
    with pytest.raises(KeyError):
        _ = BlockLayout(1, (("k", (1,)),), "int3", 1).token_bytes


@given(LAYOUTS)
def test_block_layout_description_parses_to_an_equal_layout(layout):
    assert BlockLayout.parse(layout.describe()) == layout


GOOD = '{"layers":1,"parts":[["k",[2]],["v",[2]]],"dtype":"float16","block_tokens":2}'


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('{"layers"', '{ "layers"'),
        ('"layers":1', '"layers":0'),
        ('"layers":1', '"layers":-1'),
        ('"layers":1', '"layers":1000000000000'),
        ('"layers":1', '"layers":true'),
        ('"layers":1', '"layers":1.0'),
        ('"layers":1', '"layers":"1"'),
        ('"layers":1,', ""),
        ('"layers":1', '"layers":1,"layers":1'),
        ('"block_tokens":2', '"block_tokens":2,"more":1'),
        ('"block_tokens":2', '"block_tokens":' + "9" * 20),
        ('"block_tokens":2', '"block_tokens":' + "9" * 5000),
        ("float16", "int3"),
        ('[["k",[2]],["v",[2]]]', "[]"),
        ('[["k",[2]],["v",[2]]]', '[["k",[0]]]'),
        ('[["k",[2]],["v",[2]]]', '[["k",2]]'),
        ('[["k",[2]],["v",[2]]]', '["kv"]'),
        ('[["k",[2]],["v",[2]]]', '{"k":[2]}'),
        ('[["k",[2]],["v",[2]]]', "[[1,[2]]]"),
        (GOOD, "null"),
        (GOOD, "[]"),
        (GOOD, ""),
        (GOOD, "[" * 100_000),
        (GOOD, GOOD + " "),
    ],
)
def test_block_layout_other_text_is_refused_in_one_line(good, bad):
    assert BlockLayout.parse(GOOD).describe() == GOOD
    with pytest.raises(ValueError, match="not a block layout") as error:
        BlockLayout.parse(GOOD.replace(good, bad))
    assert "\n" not in str(error.value)


@given(
    st.one_of(
        st.text(),
        st.builds(
            lambda i, c: GOOD[:i] + c + GOOD[i + 1 :], st.integers(0, len(GOOD)), st.characters()
        ),
    )
)
def test_block_layout_random_text_parses_or_raises_value_error(text):
    try:
        layout = BlockLayout.parse(text)
    except ValueError:
        return
    assert layout.describe() == text
