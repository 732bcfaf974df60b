"""The ideal meeting time: its closed form, its optimality, its limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.simulator.ideal_ttft import ComputeCurve, ideal_meet

chunks = st.lists(
    st.tuples(st.integers(1, 2048), st.floats(1e-4, 10, allow_subnormal=False)),
    min_size=1,
    max_size=30,
)
rates = st.floats(1e-7, 1e-1)


@given(chunks=chunks, rate=rates, share=st.floats(0, 1))
def test_ideal_meet_no_other_split_is_faster(
    chunks: list[tuple[int, float]], rate: float, share: float
) -> None:
    curve = ComputeCurve.from_chunks(chunks)
    stored = int(curve.tokens[-1])
    other = share * stored
    ideal = ideal_meet(curve, stored, rate)
    assert ideal.ttft_s <= max(curve.at(other), rate * (stored - other)) * (1 + 1e-9)


@given(chunks=chunks, rate=rates, cut=st.integers(0, 2048))
def test_ideal_meet_both_sides_end_together(
    chunks: list[tuple[int, float]], rate: float, cut: int
) -> None:
    curve = ComputeCurve.from_chunks(chunks)
    stored = max(0, int(curve.tokens[-1]) - cut)
    ideal = ideal_meet(curve, stored, rate)
    assert 0 <= ideal.meet_token <= stored
    assert math.isclose(
        curve.at(ideal.meet_token), rate * (stored - ideal.meet_token), rel_tol=1e-6, abs_tol=1e-9
    )


@given(chunks=chunks, rate=rates)
def test_ideal_meet_is_not_slower_than_one_side_alone(
    chunks: list[tuple[int, float]], rate: float
) -> None:
    curve = ComputeCurve.from_chunks(chunks)
    stored = int(curve.tokens[-1])
    alone = min(curve.seconds[-1], rate * stored)
    assert ideal_meet(curve, stored, rate).ttft_s <= alone * (1 + 1e-9)


@given(compute_s=st.floats(0.1, 100), load_s=st.floats(0.1, 100))
def test_ideal_meet_without_curvature_equals_the_harmonic_split(
    compute_s: float, load_s: float
) -> None:
    curve = ComputeCurve.from_chunks([(512, compute_s / 16)] * 16)
    ideal = ideal_meet(curve, 8192, load_s / 8192)
    assert ideal.ttft_s == pytest.approx(compute_s * load_s / (compute_s + load_s))


@given(chunks=chunks, rate=rates, faster=st.floats(0.01, 1))
def test_ideal_meet_with_a_faster_link_is_not_slower(
    chunks: list[tuple[int, float]], rate: float, faster: float
) -> None:
    curve = ComputeCurve.from_chunks(chunks)
    stored = int(curve.tokens[-1])
    slow, fast = ideal_meet(curve, stored, rate), ideal_meet(curve, stored, rate * faster)
    assert fast.ttft_s <= slow.ttft_s * (1 + 1e-9)
    assert fast.meet_token <= slow.meet_token + 1e-6 * stored


def test_ideal_meet_fixed_and_last_step_times_are_added() -> None:
    curve = ComputeCurve.from_chunks([(100, 1.0)])
    plain = ideal_meet(curve, 100, 0.01)
    full = ideal_meet(curve, 100, 0.01, last_step_s=0.2, fixed_s=0.3)
    assert plain.ttft_s == pytest.approx(0.5)
    assert full.ttft_s == pytest.approx(1.0)
    assert full.meet_token == plain.meet_token == pytest.approx(50)


def test_ideal_meet_with_nothing_stored_is_the_last_step() -> None:
    curve = ComputeCurve.from_chunks([(100, 1.0)])
    assert ideal_meet(curve, 0, 0.01, last_step_s=0.2).ttft_s == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [((0.0,), (0.0,)), ((1.0, 2.0), (0.0, 1.0)), ((0.0, 2.0), (0.0, -1.0)), ((0.0, 0.0), (0.0, 1))],
)
def test_compute_curve_invalid_points_are_refused(
    tokens: tuple[float, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=r"curve|time"):
        ComputeCurve(tokens, seconds)


def test_compute_curve_beyond_its_last_point_raises() -> None:
    with pytest.raises(ValueError, match="measured up to 100"):
        ComputeCurve.from_chunks([(100, 1.0)]).at(101)
