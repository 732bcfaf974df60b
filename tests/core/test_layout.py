"""Block layouts: sizes and the canonical text."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout, PlaneGroup

ROW_TOKENS = [1, 4, 12]
GROUPS = st.builds(
    PlaneGroup,
    layers=st.integers(1, 8),
    parts=st.lists(
        st.tuples(st.text(max_size=3), st.lists(st.integers(1, 9), max_size=3).map(tuple)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    row_tokens=st.sampled_from(ROW_TOKENS),
)
PLAIN = st.builds(
    lambda group, tokens: BlockLayout((replace(group, row_tokens=1),), tokens),
    GROUPS,
    st.integers(1, 300),
)
LAYOUTS = PLAIN | st.builds(
    BlockLayout,
    groups=st.lists(GROUPS, min_size=1, max_size=3).map(tuple),
    block_tokens=st.integers(1, 25).map(lambda pages: pages * max(ROW_TOKENS)),
)
# What stores hold: these texts must never change.
GOLDEN = {
    "MHA": (
        BlockLayout.plain(32, (("k", (8, 128)), ("v", (8, 128))), "bfloat16", 128),
        '{"layers":32,"parts":[["k",[8,128]],["v",[8,128]]],"dtype":"bfloat16","block_tokens":128}',
    ),
    "MLA": (
        BlockLayout.plain(61, (("kv", (1, 576)),), "float8_e4m3fn", 64),
        '{"layers":61,"parts":[["kv",[1,576]]],"dtype":"float8_e4m3fn","block_tokens":64}',
    ),
    "DSA": (
        BlockLayout(
            (
                PlaneGroup(61, (("kv", (1, 576)),), "bfloat16"),
                PlaneGroup(60, (("index", (8448,)),), "uint8", row_tokens=64),
            ),
            128,
        ),
        '{"groups":[{"layers":61,"parts":[["kv",[1,576]]],"dtype":"bfloat16","row_tokens":1},'
        '{"layers":60,"parts":[["index",[8448]]],"dtype":"uint8","row_tokens":64}],'
        '"block_tokens":128}',
    ),
}


def test_block_layout_of_llama_3_8b_has_the_expected_sizes():
    # Llama 3 8B: 32 layers, 8 KV heads of 128, bf16: 128 KiB a token.
    parts = (("k", (8, 128)), ("v", (8, 128)))
    layout = BlockLayout.plain(layers=32, parts=parts, dtype="bfloat16", block_tokens=128)
    assert [plane.row_bytes for plane in layout.planes] == [2048] * 64
    assert layout.groups[0].row_bytes == 128 * 1024
    assert layout.block_bytes == 16 * 1024 * 1024


def test_block_layout_planes_of_unequal_parts_are_in_layer_order():
    layout = BlockLayout.plain(2, (("latent", (512,)), ("rope", (64,))), "bfloat16", 4)
    assert [plane.row_bytes for plane in layout.planes] == [1024, 128, 1024, 128]
    assert [plane.start for plane in layout.planes] == [0, 4096, 4608, 8704]


def test_block_layout_further_groups_lie_behind_the_first_in_rows_of_their_pages():
    layout = GOLDEN["DSA"][0]
    kv, index = layout.planes[:61], layout.planes[61:]
    assert {(plane.rows, plane.row_bytes, plane.row_tokens) for plane in kv} == {(128, 1152, 1)}
    assert {(plane.rows, plane.row_bytes, plane.row_tokens) for plane in index} == {(2, 8448, 64)}
    assert index[0].start == 61 * 128 * 1152
    assert layout.block_bytes == index[0].start + 60 * 2 * 8448


@given(LAYOUTS)
def test_block_layout_block_bytes_are_the_sum_of_the_planes(layout):
    planes = layout.planes
    assert len(planes) == sum(group.layers * len(group.parts) for group in layout.groups)
    ends = [*(plane.start for plane in planes[1:]), layout.block_bytes]
    assert [plane.start + plane.rows * plane.row_bytes for plane in planes] == ends
    assert all(plane.rows * plane.row_tokens == layout.block_tokens for plane in planes)
    for group, size in zip(layout.groups, layout.group_bytes, strict=True):
        numbers = group.layers * sum(math.prod(shape) for _, shape in group.parts)
        rows = layout.block_tokens // group.row_tokens
        assert size == rows * numbers * DTYPE_BYTES[group.dtype]


@given(LAYOUTS, LAYOUTS)
def test_block_layout_descriptions_are_equal_exactly_if_layouts_are(one, other):
    assert (one.describe() == other.describe()) == (one == other)


@given(PLAIN)
def test_block_layout_description_of_a_plain_one_holds_every_field(layout):
    found = json.loads(layout.describe())
    parts = tuple((name, tuple(shape)) for name, shape in found.pop("parts"))
    assert BlockLayout.plain(parts=parts, **found) == layout


@pytest.mark.parametrize("kind", GOLDEN)
def test_block_layout_text_is_the_one_that_stores_hold(kind):
    layout, text = GOLDEN[kind]
    assert layout.describe() == text
    assert BlockLayout.parse(text) == layout


def test_block_layout_unknown_dtype_raises():
    with pytest.raises(KeyError):
        _ = BlockLayout.plain(1, (("k", (1,)),), "int3", 1).block_bytes


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


PAGED = GOLDEN["DSA"][1]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('"row_tokens":64', '"row_tokens":0'),
        ('"row_tokens":64', '"row_tokens":true'),
        ('"row_tokens":64', '"row_tokens":65'),  # a block would end inside of a row
        ('"row_tokens":64', '"row_tokens":256'),
        ('"row_tokens":64', '"row_tokens":64,"more":1'),
        (',"row_tokens":64', ""),
        ('"layers":60', '"layers":4097'),
        ("uint8", "int3"),
        ("[8448]", f"[{2**34}]"),
        (PAGED, '{"groups":[],"block_tokens":128}'),
        (PAGED, '{"groups":{},"block_tokens":128}'),
        (PAGED, '{"groups":[1],"block_tokens":128}'),
        (PAGED, '{"groups":null,"block_tokens":128}'),
        (PAGED, '"groups"'),
        (PAGED, '["groups"]'),
        # A plain layout has one text only.
        (PAGED, '{"groups":[{"layers":1,"parts":[["k",[2]]],"dtype":"uint8","row_tokens":1}],'
                '"block_tokens":128}'),
    ],
)  # fmt: skip
def test_block_layout_other_text_of_groups_is_refused_in_one_line(good, bad):
    assert good in PAGED
    with pytest.raises(ValueError, match="not a block layout") as error:
        BlockLayout.parse(PAGED.replace(good, bad))
    assert "\n" not in str(error.value)


@given(
    st.one_of(
        st.text(),
        st.builds(
            lambda text, i, c: text[:i] + c + text[i + 1 :],
            st.sampled_from([GOOD, PAGED]),
            st.integers(0, len(PAGED)),
            st.characters(),
        ),
    )
)
def test_block_layout_random_text_parses_or_raises_value_error(text):
    try:
        layout = BlockLayout.parse(text)
    except ValueError:
        return
    assert layout.describe() == text
