"""Partitions: even, balanced, beside a loader, scaled. Against brute force where it is small."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chain_model import with_loader
from sglang_cake.core.keys import Span
from sglang_cake.runahead.partition import (
    Partition,
    StepSeconds,
    balanced,
    even,
    scaled,
)

COSTS = st.tuples(
    st.floats(0, 1e-2), st.floats(1e-7, 1e-3), st.floats(0, 1e-7)
)  # fixed, per token, per pair


def step(costs: tuple[float, float, float]) -> StepSeconds:
    fixed, token, pair = costs

    def step_s(start: int, stop: int) -> float:
        tokens = stop - start
        return fixed + token * tokens + pair * tokens * (start + tokens / 2)

    return step_s


def slowest(partition: Partition, step_s: StepSeconds) -> float:
    return max(step_s(*span) for span in partition.spans)


@pytest.mark.parametrize(
    ("workers", "time_share", "sent_prompts"),
    [(2, 0.382, 0.62), (4, 0.161, 1.89), (8, 0.072, 4.48)],
)
def test_partition_balanced_of_attention_alone_takes_and_sends_what_theory_says(
    workers: int, time_share: float, sent_prompts: float
) -> None:
    """docs/theory.md: times of one worker's, and prompts whose KV crosses all links together."""

    def attention_s(start: int, stop: int) -> float:
        return float((stop - start) * stop)

    tokens = 100_000
    found = balanced(Span(0, tokens), workers, attention_s)
    assert slowest(found, attention_s) / tokens**2 == pytest.approx(time_share, abs=6e-4)
    assert sum(found.bounds[1:-1]) / tokens == pytest.approx(sent_prompts, abs=6e-3)


@st.composite
def spans(draw: st.DrawFn, page_tokens: int) -> Span:
    start = draw(st.integers(0, 20)) * page_tokens
    return Span(start, start + draw(st.integers(1, 2000)))


@given(st.data(), st.sampled_from([1, 16, 64]), st.integers(1, 9), COSTS)
def test_partition_random_splits_cover_the_span_in_whole_pages(
    data: st.DataObject, page_tokens: int, workers: int, costs: tuple[float, float, float]
) -> None:
    span = data.draw(spans(page_tokens))
    shares = data.draw(st.lists(st.floats(0.01, 1), min_size=workers, max_size=workers))
    for found in (
        even(span, workers, page_tokens=page_tokens),
        balanced(span, workers, step(costs), page_tokens=page_tokens),
        scaled(span, shares, page_tokens=page_tokens),
    ):
        assert (found.bounds[0], found.bounds[-1]) == span
        assert all(bound % page_tokens == 0 for bound in found.bounds[1:-1])
        assert found.workers == max(1, min(workers, span.tokens // page_tokens))
        assert sum(found.fractions) == pytest.approx(1)


@given(st.sampled_from([1, 16, 64]), st.integers(1, 9), st.integers(1, 40), st.data())
def test_partition_even_span_of_all_steps_has_no_longer_span_than_a_step(
    page_tokens: int, workers: int, step_pages: int, data: st.DataObject
) -> None:
    step_tokens = step_pages * page_tokens
    tokens = data.draw(st.integers(workers * page_tokens, workers * step_tokens))
    found = even(Span(0, tokens), workers, page_tokens=page_tokens)
    assert max(span.tokens for span in found.spans) <= step_tokens


@settings(max_examples=60)
@given(st.integers(0, 3), st.integers(2, 14), st.integers(1, 4), COSTS)
def test_partition_balanced_equals_the_best_by_brute_force(
    start: int, tokens: int, workers: int, costs: tuple[float, float, float]
) -> None:
    span, step_s = Span(start, start + tokens), step(costs)
    workers = min(workers, tokens)
    best = min(
        slowest(Partition((span.start, *inner, span.stop)), step_s)
        for inner in combinations(range(span.start + 1, span.stop), workers - 1)
    )
    assert slowest(balanced(span, workers, step_s), step_s) == pytest.approx(best, rel=1e-6)


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(100, 4000),
    COSTS,
    st.floats(1e-7, 1e-2),
    st.sampled_from([1, 64]),
)
def test_partition_with_loader_is_near_the_best_meeting_point(
    workers: int,
    tokens: int,
    costs: tuple[float, float, float],
    load_token_s: float,
    block_tokens: int,
) -> None:
    step_s = step(costs)
    plan = with_loader(Span(0, tokens), workers, step_s, load_token_s, block_tokens=block_tokens)
    meet = plan.partition.bounds[-1]
    assert meet % block_tokens == 0 or meet == tokens

    def finish(x: int) -> float:
        front = balanced(Span(0, x), workers, step_s)
        return max(slowest(front, step_s), load_token_s * (tokens - x))

    assert plan.finish_s == pytest.approx(finish(meet))
    # No other meeting point is better by more than what rounding to blocks and tokens costs.
    slack = block_tokens * load_token_s + step_s(0, block_tokens) + 2 * step_s(tokens - 1, tokens)
    others = range(block_tokens, tokens + 1, max(block_tokens, tokens // 40))
    assert plan.finish_s <= min(finish(x) for x in others) + slack


def test_partition_with_free_loader_computes_one_block() -> None:
    plan = with_loader(Span(0, 1000), 2, step((0, 1e-3, 0)), 0.0, block_tokens=128)
    assert plan.partition.bounds[-1] == 128


def test_partition_with_loader_equals_the_theory_page() -> None:
    """LongAlpaca-13B on an A100, 32 Gbps: the balance of docs/theory.md."""
    chunk, a, b = 512, 0.0803, 0.00156
    step_s = step((0, (a - b / 2) / chunk, b / chunk / chunk))
    load_token_s = (13.1072e9 / 4e9 + 0.155) / 16384
    span = Span(0, 16384)
    found = [with_loader(span, p, step_s, load_token_s, page_tokens=16) for p in (1, 2, 4, 8)]
    assert [round(f.finish_s, 2) for f in found] == pytest.approx(
        [1.60, 1.07, 0.65, 0.36], abs=0.015
    )
    assert [round(f.partition.bounds[-1] / 16384, 2) for f in found] == pytest.approx(
        [0.54, 0.69, 0.81, 0.90], abs=0.011
    )
    assert [round(share, 2) for share in found[2].partition.fractions] == pytest.approx(
        [0.29, 0.26, 0.23, 0.22], abs=0.01
    )


def test_partition_balanced_shares_equal_the_theory_page() -> None:
    """Theory D: 16k on 2, 10k on 4; a kernel that computes what is masked too."""

    def step_s(start: int, stop: int) -> float:
        c = (stop - start) / 1024
        return 0.0786 * c + 0.0208 * c * stop / 1024

    two = balanced(Span(0, 16384), 2, step_s).fractions
    four = balanced(Span(0, 10240), 4, step_s).fractions
    assert two[0] == pytest.approx(0.597, abs=0.001)
    assert four == pytest.approx((0.348, 0.257, 0.212, 0.183), abs=0.001)


@pytest.mark.parametrize("bounds", [(), (1,), (0, 0), (5, 3), (-1, 3)])
def test_partition_invalid_bounds_raise(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bounds"):
        Partition(bounds)
