"""When a last step may begin before its last loads are over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.core.keys import Span
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, PromptCosts
from sglang_cake.loading.meet import BlockState, View
from sglang_cake.loading.planner import overlap_span

WANTED, LANDED, GONE, ABSENT, CLAIMED = (
    BlockState.WANTED,
    BlockState.LANDED,
    BlockState.GONE,
    BlockState.ABSENT,
    BlockState.CLAIMED,
)
BLOCK = 10


def early(
    states: list[BlockState],
    coming: set[int],
    *,
    rest: int = 5,
    front: int = 0,
    chunk: int = 100,
    block_s: float = 1.0,
    step_s: float = 100.0,
    missing_share: float = 1.0,
) -> Span | None:
    """`states` are those of all blocks, from the first one of the prompt."""
    first, total = front // BLOCK, len(states) * BLOCK + rest
    return overlap_span(
        View(front, first, bytes(states[first:]), BLOCK, total, limit=total - 1),
        missing_shares=dict.fromkeys(coming, missing_share),
        chunk_tokens=chunk,
        costs=PromptCosts(
            PrefillCost(step_s, 0.0, 0.0, error=0.0), LoadCost(0.0, block_s, error=0.0)
        ),
    )


def test_early_last_step_coming_and_landed_blocks_are_in_its_span() -> None:
    assert early([WANTED, WANTED, LANDED], {0, 1}) == (0, 30)
    assert early([LANDED, WANTED, LANDED], {1}) == (0, 30)
    assert early([CLAIMED, WANTED, LANDED], {1}, front=10) == (10, 30)
    assert early([WANTED, LANDED], {0}, front=4) == (4, 20)
    assert early([WANTED, LANDED, GONE], {0}) == (0, 20)  # the end is nobody's


@pytest.mark.parametrize(
    "states",
    [
        [LANDED, LANDED],  # nothing is on its way: it is attached as ever
        [CLAIMED, WANTED],  # compute is in the middle of the first block
        [GONE, WANTED],  # what is missing at the front is computed first
        [WANTED, GONE, LANDED],  # and so is a hole
        [WANTED, ABSENT, WANTED],
        [GONE, ABSENT],
        [],
    ],
)
def test_early_last_step_with_holes_or_nothing_coming_does_not_begin(
    states: list[BlockState],
) -> None:
    assert early(states, {0, 1, 2}) is None


def test_early_last_step_needs_every_wanted_block_to_be_coming() -> None:
    assert early([WANTED, WANTED, LANDED], {1}) is None
    assert early([WANTED, WANTED, LANDED], set()) is None


def test_early_last_step_needs_the_rest_to_fit_one_chunk() -> None:
    assert early([WANTED], {0}, rest=100) == (0, 10)
    assert early([WANTED], {0}, rest=101) is None


def test_early_last_step_begins_only_if_loads_end_within_its_step() -> None:
    two = [WANTED, WANTED]
    assert early(two, {0, 1}, block_s=1.0, step_s=2.0) == (0, 20)
    assert early(two, {0, 1}, block_s=1.0, step_s=1.9) is None
    # As much as is still to come of each, one after the other or side by side.
    assert early(two, {0, 1}, block_s=1.0, step_s=1.0, missing_share=0.5) == (0, 20)
    assert early(two, {0, 1}, block_s=1.0, step_s=0.9, missing_share=0.5) is None


def test_early_last_step_of_whole_blocks_leaves_one_token_to_compute() -> None:
    """Of a prompt of whole blocks: the last token is computed in any case."""
    view = View(0, 0, bytes([WANTED, LANDED]), BLOCK, 2 * BLOCK, limit=2 * BLOCK - 1)
    span = overlap_span(
        view,
        missing_shares={0: 1.0},
        chunk_tokens=1,
        costs=PromptCosts(PrefillCost(1.0, 0.0, 0.0), LoadCost(0.0, 0.1)),
    )
    assert span == (0, 19)


@given(
    states=st.lists(st.sampled_from(list(BlockState)), max_size=6),
    coming=st.sets(st.integers(0, 6)),
    rest=st.integers(1, 120),
    step_s=st.floats(0, 4),
)
def test_early_last_step_random_states_span_only_landed_or_coming_blocks(
    states: list[BlockState], coming: set[int], rest: int, step_s: float
) -> None:
    span = early(states, coming, rest=rest, step_s=step_s)
    if span is None:
        return
    inside, behind = states[: span.stop // BLOCK], states[span.stop // BLOCK :]
    assert span.start == 0
    assert set(inside) <= {WANTED, LANDED}
    assert {i for i, state in enumerate(inside) if state == WANTED} <= coming
    assert not {WANTED, LANDED} & set(behind)
    assert len(states) * BLOCK + rest - span.stop <= 100
    assert inside.count(WANTED) * 1.0 <= step_s
