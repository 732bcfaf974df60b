"""The ideal meeting time: its closed form, its optimality, its limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.simulator.ideal_ttft import ideal_meet

chunks = st.lists(
    st.tuples(st.integers(1, 2048), st.floats(1e-4, 10, allow_subnormal=False)),
    min_size=1,
    max_size=30,
)
rates = st.floats(1e-7, 1e-1)


def measured_tokens(chunks: list[tuple[int, float]]) -> int:
    return sum(tokens for tokens, _ in chunks)


def compute_s(chunks: list[tuple[int, float]], tokens: float) -> float:
    """Time to compute so many leading tokens."""
    total_s = 0.0
    for size, chunk_s in chunks:
        total_s += chunk_s * min(1.0, tokens / size)
        tokens -= min(tokens, size)
    return total_s


@given(chunks=chunks, rate=rates, share=st.floats(0, 1) | st.sampled_from([0.0, 1.0]))
def test_ideal_meet_no_other_split_is_faster(
    chunks: list[tuple[int, float]], rate: float, share: float
) -> None:
    """Computing or loading alone are such splits."""
    stored = measured_tokens(chunks)
    other = share * stored
    ideal = ideal_meet(chunks, stored, rate)
    assert ideal.ttft_s <= max(compute_s(chunks, other), rate * (stored - other)) * (1 + 1e-9)


@given(chunks=chunks, rate=rates, cut=st.integers(0, 2048))
def test_ideal_meet_both_sides_end_together(
    chunks: list[tuple[int, float]], rate: float, cut: int
) -> None:
    stored = max(0, measured_tokens(chunks) - cut)
    ideal = ideal_meet(chunks, stored, rate)
    assert 0 <= ideal.meet_token <= stored
    assert math.isclose(
        compute_s(chunks, ideal.meet_token),
        rate * (stored - ideal.meet_token),
        rel_tol=1e-6,
        abs_tol=1e-9,
    )


@given(compute_s=st.floats(0.1, 100), load_s=st.floats(0.1, 100))
def test_ideal_meet_without_curvature_equals_the_harmonic_split(
    compute_s: float, load_s: float
) -> None:
    ideal = ideal_meet([(512, compute_s / 16)] * 16, 8192, load_s / 8192)
    assert ideal.ttft_s == pytest.approx(compute_s * load_s / (compute_s + load_s))


@given(chunks=chunks, rate=rates, faster=st.floats(0.01, 1))
def test_ideal_meet_with_a_faster_link_is_not_slower(
    chunks: list[tuple[int, float]], rate: float, faster: float
) -> None:
    stored = measured_tokens(chunks)
    slow, fast = ideal_meet(chunks, stored, rate), ideal_meet(chunks, stored, rate * faster)
    assert fast.ttft_s <= slow.ttft_s * (1 + 1e-9)
    assert fast.meet_token <= slow.meet_token + 1e-6 * stored


def test_ideal_meet_fixed_and_last_step_times_are_added() -> None:
    plain = ideal_meet([(100, 1.0)], 100, 0.01)
    full = ideal_meet([(100, 1.0)], 100, 0.01, last_step_s=0.2, fixed_s=0.3)
    assert plain.ttft_s == pytest.approx(0.5)
    assert full.ttft_s == pytest.approx(1.0)
    assert full.meet_token == plain.meet_token == pytest.approx(50)


def test_ideal_meet_with_nothing_stored_is_the_last_step() -> None:
    assert ideal_meet([(100, 1.0)], 0, 0.01, last_step_s=0.2).ttft_s == pytest.approx(0.2)


def test_ideal_meet_beyond_the_measured_tokens_raises() -> None:
    with pytest.raises(ValueError, match="100 were measured"):
        ideal_meet([(100, 1.0)], 101, 0.01)
