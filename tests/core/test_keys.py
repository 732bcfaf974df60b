"""Block keys: a key stands for every token before it and for whose they are."""

import hashlib
import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.core.keys import KeyChain, KeySeed, block_keys, end_keys
from sglang_cake.core.namespace import Namespace

NAMESPACE = Namespace((("model", "m"),)).digest()
SEED = KeySeed(NAMESPACE)
TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
BLOCK = st.integers(1, 9)
NAMES = st.one_of(st.none(), st.text(max_size=3))


@given(TOKENS, BLOCK)
def test_block_keys_one_per_full_block_and_all_different(tokens, block_tokens):
    keys = block_keys(SEED, tokens, block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    assert all(len(key) == 32 for key in keys)
    assert len(set(keys)) == len(keys)


@given(TOKENS, BLOCK, st.integers(0, 40))
def test_block_keys_prefix_has_equal_keys(tokens, block_tokens, stop):
    whole = block_keys(SEED, tokens, block_tokens)
    start = block_keys(SEED, tokens[:stop], block_tokens)
    assert whole[: len(start)] == start


@given(TOKENS, BLOCK, st.data())
def test_block_keys_known_keys_change_nothing(tokens, block_tokens, data):
    keys = block_keys(SEED, tokens, block_tokens)
    known = data.draw(st.integers(0, len(keys)))
    assert block_keys(SEED, tokens, block_tokens, known=keys[:known]) == keys


@given(TOKENS.filter(bool), BLOCK, st.data())
def test_block_keys_changed_token_changes_its_key_and_all_later_ones(tokens, block_tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] ^= 1
    before, after = (block_keys(SEED, seq, block_tokens) for seq in (tokens, changed))
    same = at // block_tokens
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


@given(TOKENS, BLOCK)
def test_block_keys_of_an_array_equal_those_of_a_list(tokens, block_tokens):
    as_array = array("q", tokens)
    assert block_keys(SEED, as_array, block_tokens) == block_keys(SEED, tokens, block_tokens)


def test_block_keys_chain_equals_the_format_page():
    start = hashlib.sha256(b"sglang_cake key v1" + NAMESPACE + b"\xff" * 24).digest()
    tokens = b"".join(token.to_bytes(8, "little", signed=True) for token in (5, -1))
    first = hashlib.sha256(start + tokens).digest()
    assert block_keys(SEED, [5, -1, 7, 7, 7], 2)[0] == first
    assert block_keys(SEED, [5, -1, 7, 7, 7], 2)[1] == (
        hashlib.sha256(first + (7).to_bytes(8, "little") * 2).digest()
    )


PARTS = st.tuples(NAMES, NAMES, NAMES)  # extra_key, cache_salt, adapter


@given(PARTS, PARTS)
def test_key_seed_digests_are_equal_exactly_if_parts_are(parts, others):
    one, other = KeySeed(NAMESPACE, *parts), KeySeed(NAMESPACE, *others)
    assert (one.digest() == other.digest()) == (parts == others)


def test_key_seed_none_empty_and_shifted_names_are_all_different():
    names = (None, "", "a", "b", "ab", "a\0", "\xff")
    seeds = [KeySeed(NAMESPACE, *parts) for parts in itertools.product(names, repeat=3)]
    assert len({seed.digest() for seed in seeds}) == len(seeds)


def test_block_keys_of_two_namespaces_have_no_key_in_common():
    other = KeySeed(Namespace((("model", "n"),)).digest())
    one, two = (set(block_keys(seed, range(20), 2)) for seed in (SEED, other))
    assert not one & two


@given(TOKENS, BLOCK, st.lists(st.integers(0, 40), max_size=4))
def test_key_chain_asked_in_any_order_gives_equal_keys(tokens, block_tokens, stops):
    chain = KeyChain(SEED, block_tokens)
    for stop in stops:
        assert chain.of(tokens[:stop]) == block_keys(SEED, tokens[:stop], block_tokens)


def test_block_keys_token_above_64_bits_raises():
    with pytest.raises(OverflowError):
        block_keys(SEED, [2**63], 1)


def test_end_keys_differ_from_each_other_and_from_those_of_other_blocks():
    blocks = block_keys(SEED, range(40), 4)
    ends = [key for block in blocks for key in end_keys(block, 3)]
    assert len({*blocks, *ends}) == len(blocks) * 4


def test_end_keys_fewer_are_the_first_of_more():
    block = block_keys(SEED, range(4), 4)[0]
    assert end_keys(block, 5)[:2] == end_keys(block, 2)
    assert end_keys(block, 0) == []


def test_end_keys_are_those_that_stores_have():
    """A change of the derivation loses all end states that are stored."""
    block = block_keys(SEED, range(4), 4)[0]
    expected = hashlib.sha256(b"sglang_cake end v1" + block + (1).to_bytes(8, "little")).digest()
    assert end_keys(block, 2)[1] == expected
