"""Block keys: a key stands for every token before it and for whose they are."""

import hashlib
import itertools
from array import array
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_cake.core.keys import (
    KeyChain,
    KeySeed,
    Media,
    MediaItem,
    Namespace,
    block_keys,
    end_keys,
)

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


@given(TOKENS.filter(bool), BLOCK, st.integers(0, 3), st.data())
def test_block_keys_changed_token_changes_the_keys_that_cover_it_and_all_later_ones(
    tokens, block_tokens, next_tokens, data
):
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] ^= 1
    before, after = (
        block_keys(SEED, seq, block_tokens, next_tokens=next_tokens) for seq in (tokens, changed)
    )
    assert len(before) == max(0, len(tokens) - next_tokens) // block_tokens
    same = max(0, at - next_tokens) // block_tokens
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


@given(TOKENS, BLOCK, st.integers(0, 3), st.lists(st.integers(0, 12), max_size=4))
def test_key_chain_asked_in_any_order_has_a_key_for_each_of_its_blocks(
    tokens, block_tokens, next_tokens, stops
):
    chain = KeyChain(SEED, block_tokens, next_tokens=next_tokens)
    for stop in (*stops, len(tokens)):
        part = tokens[:stop]
        assert chain.of(part) == block_keys(SEED, part, block_tokens, next_tokens=next_tokens)
        assert len(chain.of(part)) == chain.block_count(len(part))


@given(TOKENS, TOKENS, BLOCK, st.integers(0, 2))
def test_key_chain_prefix_digests_are_equal_exactly_if_all_tokens_are(
    tokens, others, block_tokens, next_tokens
):
    """The tokens behind the last block count too."""
    chain = KeyChain(SEED, block_tokens, next_tokens=next_tokens)
    digest = chain.prefix_digest(tokens)
    assert (digest == chain.prefix_digest(others)) == (tokens == others)
    assert digest == chain.prefix_digest(list(tokens))
    if tokens:
        assert digest != chain.prefix_digest([*tokens[:-1], tokens[-1] ^ 1])
        assert digest != chain.prefix_digest(tokens[:-1])
    assert digest != KeyChain(KeySeed(NAMESPACE, "e"), block_tokens).prefix_digest(tokens)


def test_block_keys_image_that_begins_behind_a_block_changes_its_key_with_a_next_token():
    tokens = [*range(4), -5, -5]
    keys = {
        (next_tokens, digest): block_keys(
            SEED,
            tokens,
            4,
            media=Media((MediaItem(digest * 32, ((4, 6),)),)),
            next_tokens=next_tokens,
        )
        for next_tokens in (0, 1)
        for digest in (b"a", b"b")
    }
    assert keys[0, b"a"] == keys[0, b"b"]
    assert keys[1, b"a"] != keys[1, b"b"]


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


def test_block_keys_token_above_64_bits_raises():
    with pytest.raises(OverflowError):
        block_keys(SEED, [2**63], 1)


@given(TOKENS, TOKENS, BLOCK)
def test_end_keys_of_other_prompts_positions_and_indices_and_block_keys_are_all_different(
    tokens, others, block_tokens
):
    def ends(prompt):
        """Prefix and index of an end block, or None for the block itself -> its key."""
        return {
            (tuple(prompt[: (number + 1) * block_tokens]), index): key
            for number, block in enumerate(block_keys(SEED, prompt, block_tokens))
            for index, key in ((None, block), *enumerate(end_keys(block, 3)))
        }

    one, other = ends(tokens), ends(others)
    assert all(one[end] == other[end] for end in one.keys() & other.keys())
    both = one | other
    assert len(set(both.values())) == len(both)


def test_end_keys_fewer_are_the_first_of_more():
    block = block_keys(SEED, range(4), 4)[0]
    assert end_keys(block, 5)[:2] == end_keys(block, 2)
    assert end_keys(block, 0) == []


def test_end_keys_are_those_that_stores_have():
    """A change of the derivation loses all end states that are stored."""
    block = block_keys(SEED, range(4), 4)[0]
    expected = hashlib.sha256(b"sglang_cake end v1" + block + (1).to_bytes(8, "little")).digest()
    assert end_keys(block, 2)[1] == expected


def test_end_keys_of_other_ranks_and_numbers_of_ranks_are_all_different():
    ranks = [(0, 1), (0, 2), (1, 2), (1, 3)]
    found = [
        key
        for block in block_keys(SEED, range(8), 4)
        for rank in ranks
        for key in KeyChain(SEED, 4, end_rank=rank).end_keys(block, 2)
    ]
    assert len(set(found)) == len(found) == 2 * len(ranks) * 2


def test_end_keys_of_a_rank_are_those_that_stores_have():
    """A change of the derivation loses all end states of such ranks."""
    block = block_keys(SEED, range(4), 4)[0]
    numbers = b"".join(number.to_bytes(8, "little") for number in (0, 1, 2))
    expected = hashlib.sha256(b"sglang_cake end v1" + block + numbers).digest()
    assert end_keys(block, 1, 1, 2) == [expected]


# ---- images, videos and audio ----

LENGTH = 30
INDEX = array("q", range(LENGTH))
PADS = st.lists(st.integers(10**6, 2**63 - 1), min_size=LENGTH, max_size=LENGTH)


@st.composite
def medias(draw, positions=(False, True), least_items=1):
    """`Media` of a prompt of LENGTH tokens: one or two items, with M-RoPE positions or without."""
    places = st.lists(st.integers(0, LENGTH), min_size=2 * least_items, max_size=9, unique=True)
    bounds = draw(places.map(sorted))
    spans = tuple(zip(bounds[::2], bounds[1::2], strict=False))
    cut = draw(st.integers(1, len(spans) - (least_items - 1)))
    digest = st.binary(min_size=32, max_size=32)
    items = tuple(MediaItem(draw(digest), part) for part in (spans[:cut], spans[cut:]) if part)
    rows = ()
    if draw(st.sampled_from(positions)):
        row = st.lists(st.integers(0, 50), min_size=LENGTH - 8, max_size=LENGTH - 8)
        rows = tuple(array("q", draw(row)) for _ in range(3))
    return Media(items, rows, draw(st.integers(-9, 9)))


def keys_of(tokens, media, block_tokens=4):
    return block_keys(SEED, tokens, block_tokens, media=media)


def padded(media, numbers):
    """A prompt with `numbers` in the place of the items."""
    places = {at for item in media.items for span in item.spans for at in range(*span)}
    return [numbers[at] if at in places else at for at in range(LENGTH)]


@given(medias(), PADS, PADS, BLOCK)
def test_block_keys_of_media_do_not_depend_on_the_numbers_in_their_place(
    media, ones, others, block_tokens
):
    prompts = [padded(media, pads) for pads in (ones, others)]
    one, other = (keys_of(prompt, media, block_tokens) for prompt in prompts)
    assert one == other
    assert len(set(one)) == LENGTH // block_tokens
    chain = KeyChain(SEED, block_tokens, media)
    assert chain.prefix_digest(prompts[0]) == chain.prefix_digest(prompts[1])


def assert_differ_from(at, media, changed, block_tokens):
    """The keys of the two prompts are equal before the block of token `at`, and from there on no
    key of one is a key of the other."""
    tokens = list(range(LENGTH))
    before, after = (keys_of(tokens, each, block_tokens) for each in (media, changed))
    same = at // block_tokens
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])
    one, other = (KeyChain(SEED, block_tokens, each) for each in (media, changed))
    assert one.prefix_digest(tokens) != other.prefix_digest(tokens)


@given(medias(), BLOCK, st.data())
def test_block_keys_of_other_content_differ_from_its_first_token_on(media, block_tokens, data):
    at = data.draw(st.integers(0, len(media.items) - 1))
    bit = data.draw(st.integers(0, 255))
    flipped = int.from_bytes(media.items[at].digest) ^ 1 << bit
    items = list(media.items)
    items[at] = replace(items[at], digest=flipped.to_bytes(32))
    changed = replace(media, items=tuple(items))
    assert_differ_from(items[at].spans[0][0], media, changed, block_tokens)


@given(medias(least_items=2), BLOCK)
def test_block_keys_of_items_in_another_order_differ(media, block_tokens):
    digests = [item.digest for item in media.items]
    assume(digests[0] != digests[1])
    items = zip(media.items, reversed(digests), strict=True)
    changed = replace(media, items=tuple(replace(item, digest=each) for item, each in items))
    assert_differ_from(media.items[0].spans[0][0], media, changed, block_tokens)


@given(medias(), BLOCK, st.data())
def test_block_keys_of_items_at_other_places_differ(media, block_tokens, data):
    at = data.draw(st.integers(0, len(media.items) - 1))
    start, stop = media.items[at].spans[-1]
    assume(stop < LENGTH)
    moved = data.draw(st.sampled_from([(start, stop + 1), (start + 1, stop + 1)]))
    items = list(media.items)
    items[at] = replace(items[at], spans=(*items[at].spans[:-1], moved))
    first = items[at].spans[0][0] if len(items[at].spans) > 1 else start
    assert_differ_from(first, media, replace(media, items=tuple(items)), block_tokens)


@given(medias(positions=(True,)), BLOCK, st.data())
def test_block_keys_of_another_position_differ_from_its_token_on(media, block_tokens, data):
    row, at = data.draw(st.integers(0, 2)), data.draw(st.integers(0, LENGTH - 1))
    rows = [array("q", each) for each in media.positions]
    shift = media.shift
    if at < LENGTH - 8:
        rows[row][at] += 1
    else:
        at, shift = LENGTH - 8, shift + 1
    changed = replace(media, positions=tuple(rows), shift=shift)
    assert_differ_from(at, media, changed, block_tokens)


@given(medias(positions=(False,)), BLOCK)
def test_block_keys_before_the_first_item_are_those_of_text(media, block_tokens):
    tokens = list(range(LENGTH))
    same = media.items[0].spans[0][0] // block_tokens
    text = block_keys(SEED, tokens, block_tokens)
    assert keys_of(tokens, media, block_tokens)[:same] == text[:same]
    assert not set(keys_of(tokens, media, block_tokens)[same:]) & set(text[same:])
    indices = replace(media, positions=(INDEX, INDEX, INDEX), shift=0)
    assert keys_of(tokens, indices, block_tokens) == keys_of(tokens, media, block_tokens)


def test_key_chain_prefix_digests_of_other_content_behind_the_last_block_differ():
    medias = [Media((MediaItem(digest * 32, ((25, 29),)),)) for digest in (b"a", b"b")]
    chains = [KeyChain(SEED, 20, media) for media in (*medias, Media())]
    digests = [chain.prefix_digest(range(LENGTH)) for chain in chains]
    assert len(set(digests)) == 3
    assert len({chain.of(range(LENGTH))[0] for chain in chains}) == 1


@given(medias(), BLOCK, st.lists(st.integers(0, LENGTH), max_size=4))
def test_key_chain_with_media_asked_in_any_order_gives_equal_keys(media, block_tokens, stops):
    tokens = array("q", range(LENGTH))
    chain = KeyChain(SEED, block_tokens, media)
    whole = keys_of(tokens, media, block_tokens)
    for stop in stops:
        assert chain.of(tokens[:stop]) == whole[: stop // block_tokens]


def test_block_keys_chain_with_media_equals_the_format_page():
    def numbers(*values):
        return b"".join(value.to_bytes(8, "little", signed=True) for value in values)

    item = MediaItem(b"d" * 32, ((1, 3), (4, 5)))
    media = Media((item,), (array("q", [0, 1, 1, 2]), array("q", [0, 1, 2, 2])), shift=-1)
    start = hashlib.sha256(b"sglang_cake key v1" + NAMESPACE + b"\xff" * 24).digest()
    beside = numbers(1, 2) + b"d" * 32 + numbers(4, 1, 3, 4, 5) + numbers(0, 1, 1, 0, 1, 2)
    extra = hashlib.sha256(b"sglang_cake media v1" + beside).digest()
    first = hashlib.sha256(start + numbers(7, -1, -1) + extra).digest()
    beside = numbers(0, 2) + numbers(2, 3, 4, 2, 3, 4)
    extra = hashlib.sha256(b"sglang_cake media v1" + beside).digest()
    second = hashlib.sha256(first + numbers(7, -1, 7) + extra).digest()
    assert keys_of([7, 8, 8, 7, 8, 7], media, 3) == [first, second]
