"""A lookup with few questions: exact for a stored prefix, and never an invented yes at its ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.stores.lookup_rounds import next_lookups, stored


def look_up(there, at_most, rounds=50):
    """The answer, and how many questions each round had."""
    known, asked = {}, []
    for _ in range(rounds):
        lookups = next_lookups(len(there), known, at_most)
        if not lookups:
            break
        assert len(lookups) <= at_most
        assert lookups == sorted(set(lookups) - known.keys()), "asked twice, or out of order"
        asked.append(len(lookups))
        known |= {position: there[position] for position in lookups}
    return stored(len(there), known), asked


@given(st.lists(st.booleans(), max_size=32), st.integers(32, 40))
def test_lookup_rounds_few_keys_are_all_asked_in_one_round(there, at_most):
    found, asked = look_up(there, at_most)
    assert found == there
    assert asked == ([len(there)] if there else [])


@given(st.integers(0, 3000), st.data(), st.integers(2, 40))
def test_lookup_rounds_stored_prefix_is_found_exactly(count, data, at_most):
    length = data.draw(st.integers(0, count))
    there = [True] * length + [False] * (count - length)
    assert look_up(there, at_most)[0] == there


@given(st.lists(st.booleans(), max_size=400), st.integers(2, 40))
def test_lookup_rounds_keys_with_holes_ends_and_assumes_only_inner_keys(there, at_most):
    found, asked = look_up(there, at_most)
    assert sum(asked) <= len(there)
    for position, found_there in enumerate(found):
        if found_there and not there[position]:  # assumed: between two that are there
            assert any(there[:position])
            assert any(there[position:])


@pytest.mark.parametrize("length", [0, 1024])
def test_lookup_rounds_1024_keys_all_or_none_take_one_round(length):
    there = [True] * length + [False] * (1024 - length)
    assert look_up(there, 32) == (there, [32])


def test_lookup_rounds_1024_keys_of_any_prefix_take_at_most_two_rounds():
    for length in range(1, 1024):
        there = [True] * length + [False] * (1024 - length)
        found, asked = look_up(there, 32)
        assert found == there
        assert len(asked) <= 2
        assert sum(asked) <= 64


def test_lookup_rounds_stopped_early_counts_unknown_keys_as_missing():
    there = [True] * 700 + [False] * 300
    found, _ = look_up(there, 4, rounds=2)
    assert not any(found[700:])
    assert 0 < sum(found) <= 700
