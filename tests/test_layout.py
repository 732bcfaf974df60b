"""Block layouts: sizes and the canonical text."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.layout import DTYPE_BYTES, BlockLayout

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


def test_sizes_of_a_known_model():
    # Llama 3 8B: 32 layers, 8 KV heads of 128, bf16: 128 KiB a token.
    parts = (("k", (8, 128)), ("v", (8, 128)))
    layout = BlockLayout(layers=32, parts=parts, dtype="bfloat16", block_tokens=128)
    assert layout.plane_token_bytes == (2048,) * 64
    assert layout.token_bytes == 128 * 1024
    assert layout.block_bytes == 16 * 1024 * 1024


def test_planes_of_unequal_parts_are_in_layer_order():
    layout = BlockLayout(2, (("latent", (512,)), ("rope", (64,))), "bfloat16", 4)
    assert layout.plane_token_bytes == (1024, 128, 1024, 128)


@given(LAYOUTS)
def test_a_block_is_its_planes(layout):
    assert len(layout.plane_token_bytes) == layout.layers * len(layout.parts)
    assert layout.token_bytes == sum(layout.plane_token_bytes)
    assert layout.block_bytes == layout.block_tokens * layout.token_bytes
    one_layer = sum(math.prod(shape) for _, shape in layout.parts) * DTYPE_BYTES[layout.dtype]
    assert layout.token_bytes == layout.layers * one_layer


@given(LAYOUTS, LAYOUTS)
def test_descriptions_are_equal_exactly_if_layouts_are(one, other):
    assert (one.describe() == other.describe()) == (one == other)


@given(LAYOUTS)
def test_a_description_says_everything(layout):
    found = json.loads(layout.describe())
    parts = tuple((name, tuple(shape)) for name, shape in found.pop("parts"))
    assert BlockLayout(parts=parts, **found) == layout


def test_an_unknown_dtype_has_no_size():
    with pytest.raises(KeyError):
        _ = BlockLayout(1, (("k", (1,)),), "int3", 1).token_bytes
