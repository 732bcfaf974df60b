"""Namespaces: equal digests mean equal fields."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.core.keys import Namespace

FIELDS = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=4).map(
    lambda fields: tuple(fields.items())
)


@given(FIELDS, FIELDS)
def test_namespace_digests_are_equal_exactly_if_fields_are(one, other):
    assert (Namespace(one).digest() == Namespace(other).digest()) == (one == other)


def test_namespace_moved_field_boundary_changes_the_digest():
    variants = [
        (("ab", "c"),),
        (("a", "bc"),),
        (("abc", ""),),
        (("", "abc"),),
        (("a", "b"), ("c", "")),
        (("a", ""), ("b", "c")),
        (("c", ""), ("a", "b")),
        (),
    ]
    assert len({Namespace(fields).digest() for fields in variants}) == len(variants)


def test_namespace_digest_equals_the_format_page():
    def sized(text):
        return len(text.encode()).to_bytes(8, "little") + text.encode()

    raw = b"sglang_cake namespace v2" + sized("dtype") + sized("é")
    assert Namespace((("name", "m"), ("dtype", "é"))).digest() == hashlib.sha256(raw).digest()


def test_namespace_name_field_does_not_change_the_digest():
    one, other = (Namespace((("name", m), ("dtype", "bfloat16"))) for m in ("a", "b"))
    assert one.digest() == other.digest()
    assert one.describe() != other.describe()


def test_namespace_description_keeps_names_values_and_order():
    fields = (("model", "m"), ("dtype", "bfloat16"), ("a", "1"))
    assert tuple(Namespace(fields).describe().items()) == fields


def test_namespace_duplicate_field_is_refused():
    with pytest.raises(ValueError, match="once"):
        Namespace((("a", "1"), ("a", "2")))
