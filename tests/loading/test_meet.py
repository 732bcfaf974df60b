"""The meet: a race of compute against a loader, played at random, and the cases worth naming."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)
from meet_race import MeetRace, plan

from sglang_cake.core.keys import Span
from sglang_cake.loading.meet import TRANSITIONS, BlockState, Event, Meet, View
from sglang_cake.loading.planner import StepPlan

S, E = BlockState, Event


def ahead(meet: Meet) -> list[tuple[int, BlockState]]:
    view = meet.view()
    return [(view.first + i, BlockState(state)) for i, state in enumerate(view.states)]


def states(meet: Meet) -> list[BlockState]:
    return [meet.state(b) for b in range(meet.block_count)]


class MeetMachine(MeetRace):
    """A model without end states: every block may be attached."""

    @initialize(
        page=st.sampled_from([1, 2, 4]),
        pages=st.integers(1, 4),
        prompt=st.integers(1, 70),
        chunk=st.integers(1, 30),
        short=st.integers(1, 9),
        device=st.floats(0, 1),
    )
    def begin(
        self, page: int, pages: int, prompt: int, chunk: int, short: int, device: float
    ) -> None:
        self.start(page, pages, prompt, chunk, short, device)

    def forget_computed(self) -> None:
        """What the loader does when it hears of `first_loadable`."""
        self.loading = {b for b in self.loading if b >= self.meet.first_loadable}

    def attach(self) -> None:
        while (span := self.meet.island()) is not None:
            assert span.start == self.meet.front == self.front_of_tokens()
            assert span.stop % self.page == 0
            assert span.stop <= self.meet.limit < self.prompt
            for b in self.meet.blocks_of(span):
                self.bytes_here.remove(b)
            self.cover(*span, "attached")
            self.meet.attach(span)
        self.forget_computed()

    def claim(self, stop: int) -> None:
        assert self.meet.front < stop <= self.prompt
        front = self.meet.front
        claimed = range(front // self.block, -(-stop // self.block))
        dropped = set(self.meet.claim(stop))
        assert dropped <= self.bytes_here
        self.bytes_here -= dropped
        assert not self.bytes_here & set(claimed)
        self.cover(front, stop, "computed")
        self.forget_computed()

    # ---- what may happen, in any order ----

    @precondition(lambda self: not self.found)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        full = self.prompt // self.block
        some = st.lists(st.booleans(), min_size=full, max_size=full)
        stored = data.draw(st.one_of(st.just([True] * full), some))
        first = self.meet.first_loadable
        self.found = True
        self.meet.found(stored)
        self.loading = {b for b in range(first, self.meet.block_count) if stored[b]}
        self.forget_not_wanted()

    def forget_not_wanted(self) -> None:
        for b in range(self.meet.block_count):
            if self.meet.state(b) is S.WANTED:
                assert b in self.loading, "waits for a block that nobody brings"

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        b = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(b)
        self.meet.lost(b)
        assert self.meet.state(b) in (S.GONE, S.CLAIMED)

    @precondition(lambda self: self.bytes_here)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        b = data.draw(st.sampled_from(sorted(self.bytes_here)))
        self.bytes_here.remove(b)
        self.meet.dropped(b)

    @precondition(lambda self: self.meet.front < self.prompt)
    @rule(data=st.data())
    def claim_anything_legal(self, data: st.DataObject) -> None:
        """As SGLang may, whatever has landed."""
        self.attach()
        edge = self.prompt
        if edge == self.meet.front:
            return
        # A step ends on a page or with the prompt.
        stop = data.draw(st.integers(self.meet.front + 1, edge))
        stop = max(self.page_floor(stop), min(edge, self.page_floor(self.meet.front) + self.page))
        self.claim(stop)

    def passed(self, front: int) -> None:
        here = {b for b in self.bytes_here if b * self.block < front}
        surplus = self.meet.advance(front)
        assert set(surplus) <= self.bytes_here
        # The block that the front stands in is kept: its rest may still be attached.
        assert here - set(surplus) <= {front // self.block}
        self.bytes_here -= set(surplus)
        self.forget_computed()

    # ---- what must hold at every moment ----

    @invariant()
    def states_agree(self) -> None:
        if not hasattr(self, "meet"):
            return
        meet = self.meet
        assert meet.front == self.front_of_tokens()
        landed = {b for b in range(meet.block_count) if meet.state(b) is S.LANDED}
        assert landed == self.bytes_here
        for b in range(meet.block_count):
            tokens = self.got[b * self.block : min((b + 1) * self.block, meet.limit)]
            if meet.state(b) is S.LANDED:
                assert "computed" not in tokens
            if meet.state(b) is S.ATTACHED:
                assert "" not in tokens

    @invariant()
    def nothing_awaited_in_vain(self) -> None:
        if hasattr(self, "meet"):
            self.forget_not_wanted()

    @invariant()
    def no_claimed_block_is_loadable(self) -> None:
        if hasattr(self, "meet"):
            meet = self.meet
            assert not any(
                meet.state(b) is S.CLAIMED for b in range(meet.first_loadable, meet.block_count)
            )
            assert not any(b < meet.first_loadable for b in self.loading)

    @invariant()
    def pending_means_a_block_is_to_come(self) -> None:
        if hasattr(self, "meet"):
            states_ahead = {state for _, state in ahead(self.meet)}
            if self.meet.front < self.meet.limit:
                assert self.meet.pending == bool(states_ahead & {S.WANTED, S.LANDED})
            else:
                assert not self.meet.pending


TestMeet = MeetMachine.TestCase
TestMeet.settings = settings(max_examples=250, stateful_step_count=30)


# ---- the table ----


def reachable(start: BlockState, without: set[Event]) -> set[BlockState]:
    """States that `start` can come to when some events never happen."""
    seen, todo = {start}, deque([start])
    while todo:
        state = todo.popleft()
        for (source, event), target in TRANSITIONS.items():
            if source is state and event not in without and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def test_meet_landed_and_attached_blocks_have_no_claim_transition() -> None:
    assert (S.LANDED, E.CLAIM) not in TRANSITIONS
    assert (S.ATTACHED, E.CLAIM) not in TRANSITIONS


def test_meet_claimed_block_without_eviction_stays_claimed() -> None:
    assert reachable(S.CLAIMED, without={E.EVICT}) == {S.CLAIMED}


def test_meet_gone_or_claimed_block_never_becomes_attached() -> None:
    assert S.ATTACHED not in reachable(S.GONE, without=set())
    assert S.ATTACHED not in reachable(S.CLAIMED, without=set())


def test_meet_attached_block_is_never_attached_again() -> None:
    assert (S.ATTACHED, E.ATTACH) not in TRANSITIONS
    assert reachable(S.ATTACHED, without={E.EVICT}) == {S.ATTACHED}
    after = {t for (s, _), t in TRANSITIONS.items() if s is S.ATTACHED} - {S.ATTACHED}
    assert all(S.ATTACHED not in reachable(state, without=set()) for state in after)


def test_meet_only_landed_blocks_become_attached() -> None:
    assert {s for (s, e), t in TRANSITIONS.items() if t is S.ATTACHED and s is not t} == {S.LANDED}
    assert {(s, e) for (s, e), t in TRANSITIONS.items() if t is S.LANDED and s is not t} == {
        (S.WANTED, E.LAND)
    }


def test_meet_every_state_has_a_transition_to_proceed() -> None:
    for state in S:
        exits = {e for (s, e), t in TRANSITIONS.items() if s is state}
        assert E.PASS in exits
        if state is S.LANDED:
            assert {E.ATTACH, E.DROP} <= exits
        elif state is not S.ATTACHED:
            assert TRANSITIONS[state, E.CLAIM] is S.CLAIMED


def test_meet_evict_turns_claimed_and_attached_blocks_into_gone() -> None:
    for state in S:
        target = TRANSITIONS[state, E.EVICT]
        assert target is (S.GONE if state in (S.CLAIMED, S.ATTACHED) else state)


@pytest.mark.parametrize("state", [S.CLAIMED, S.GONE])
def test_meet_late_events_leave_claimed_and_gone_blocks_unchanged(state: BlockState) -> None:
    for late in (E.FIND, E.LAND, E.LOSE):
        assert TRANSITIONS[state, late] is state


# ---- cases worth naming ----


def meet_of(blocks: float, *, page: int = 1, limit: int | None = None, front: int = 0) -> Meet:
    tokens = int(blocks * 64)
    return Meet(
        block_tokens=64,
        page_tokens=page,
        limit_tokens=tokens - 1 if limit is None else limit,
        prompt_tokens=tokens,
        front=front,
    )


def test_meet_prompt_shorter_than_a_block_has_no_blocks() -> None:
    meet = meet_of(0.9)
    meet.found([])
    assert meet.block_count == 0
    assert meet.island() is None
    assert not meet.pending
    assert plan(meet, 32) == StepPlan(32)
    assert meet.claim(57) == []
    assert meet.first_loadable == 0
    assert meet.front == 57


@pytest.mark.parametrize(("page", "attached"), [(1, 4 * 64 - 1), (16, 4 * 64 - 16), (64, 3 * 64)])
def test_meet_wholly_stored_prompt_leaves_its_last_page_to_compute(
    page: int, attached: int
) -> None:
    meet = meet_of(4, page=page)
    meet.found([True] * 4)
    assert meet.block_count == -(-attached // 64)  # with pages of a block the last one is of no use
    for b in reversed(range(meet.block_count)):
        assert meet.landed(b)
    assert meet.island() == Span(0, attached)
    meet.attach(Span(0, attached))
    assert meet.front == attached
    assert not meet.pending
    assert meet.island() is None
    assert plan(meet, 512) == StepPlan(256)
    meet.claim(256)
    assert meet.front == 256


def test_meet_hole_makes_two_islands_and_is_claimed_alone() -> None:
    meet = meet_of(6.5)
    meet.found([True] * 6)
    for b in (5, 4, 2):
        assert meet.landed(b)
    meet.lost(3)
    assert meet.island() is None
    meet.claim(128)
    assert meet.island() == Span(128, 192)
    meet.attach(Span(128, 192))
    assert meet.pending
    assert meet.island() is None
    assert plan(meet, 512) == StepPlan(256)  # up to the second island, however large the chunk
    assert meet.claim(256) == []
    assert meet.first_loadable == 4
    assert meet.island() == Span(256, 384)
    meet.attach(Span(256, 384))
    assert not meet.pending
    assert states(meet) == [S.CLAIMED, S.CLAIMED, S.ATTACHED, S.CLAIMED, S.ATTACHED, S.ATTACHED]


def test_meet_island_right_of_a_hole_waits_for_the_claim() -> None:
    meet = meet_of(4.5)
    meet.found([False, True, False, True])
    assert meet.landed(3)
    assert meet.landed(1)
    assert meet.island() is None
    meet.claim(64)
    meet.attach(Span(64, 128))
    assert meet.island() is None
    assert [b for b, _ in ahead(meet)] == [2, 3]
    meet.claim(192)
    assert meet.island() == Span(192, 256)


def test_meet_prefix_ending_inside_a_block_attaches_its_rest() -> None:
    meet = meet_of(3.5, page=16, front=80)
    assert meet.first_loadable == 1
    meet.found([True] * 3)
    assert states(meet) == [S.CLAIMED, S.WANTED, S.WANTED]
    assert meet.landed(1)
    assert meet.island() == Span(80, 128)
    meet.attach(Span(80, 128))
    assert meet.landed(2)
    assert meet.island() == Span(128, 192)


def test_meet_claim_inside_a_partial_block_rejects_its_load() -> None:
    meet = meet_of(3.5, page=16, front=80)
    meet.found([True] * 3)
    assert meet.claim(96) == []
    assert meet.first_loadable == 2
    assert not meet.landed(1)
    assert meet.island() is None


def test_meet_limit_inside_the_last_block_cuts_the_island() -> None:
    meet = meet_of(3, page=16, limit=170)
    meet.found([True] * 3)
    assert meet.limit == 160
    assert meet.block_count == 3
    meet.claim(128)
    assert meet.landed(2)
    assert meet.island() == Span(128, 160)
    meet.attach(Span(128, 160))
    assert not meet.pending


def test_meet_limit_at_a_block_border_leaves_the_block_out() -> None:
    meet = meet_of(3, limit=128)
    meet.found([True] * 3)
    assert meet.block_count == 2


def test_meet_front_past_the_limit_claims_every_block() -> None:
    meet = meet_of(3, limit=170)
    meet.found([True] * 3)
    assert meet.landed(2)
    assert meet.advance(170) == [2]
    assert states(meet) == [S.CLAIMED] * 3
    assert meet.first_loadable == 3
    assert not meet.pending


def test_meet_prefix_evicted_before_the_lookup_leaves_its_blocks_gone() -> None:
    """A slow lookup: the device prefix is evicted, and only then the store says what it has."""
    meet = meet_of(4.5, front=128)
    meet.advance(0)
    meet.found([True] * 4)
    # The loader was told to leave the first two alone.
    assert states(meet) == [S.GONE, S.GONE, S.WANTED, S.WANTED]


def test_meet_block_landing_after_its_prefix_was_evicted_is_rejected() -> None:
    meet = meet_of(4.5)
    meet.found([True] * 4)
    meet.advance(128)
    meet.advance(0)
    assert not meet.landed(1)
    meet.lost(0)
    assert states(meet)[:2] == [S.GONE, S.GONE]
    meet.claim(128)


def test_meet_evicted_attached_block_is_computed() -> None:
    meet = meet_of(2.5)
    meet.found([True] * 2)
    meet.landed(1)
    meet.landed(0)
    meet.attach(Span(0, 128))
    meet.advance(64)
    assert states(meet) == [S.ATTACHED, S.GONE]
    assert plan(meet, 160, 512) == StepPlan(160)


def test_meet_invalid_transition_raises() -> None:
    meet = meet_of(3.5)
    meet.found([True] * 3)
    meet.landed(1)
    with pytest.raises(KeyError):
        meet.landed(1)
    with pytest.raises(AssertionError):
        meet.attach(Span(0, 64))


def test_view_replaced_states_are_counted_anew() -> None:
    def counts(view: View) -> tuple[int, int, bool]:
        return view.wanted, view.attachable, view.pending

    view = View(0, 0, bytes([S.WANTED, S.LANDED, S.LANDED]), 4, 12, 11, end_blocks=0)
    assert counts(view) == (1, 2, True)
    assert counts(replace(view, end_blocks=2, end_wanted=2)) == (3, 0, True)
    assert counts(replace(view, states=bytes([S.LANDED]))) == (0, 1, True)
    assert counts(replace(view, states=bytes([S.GONE]))) == (0, 0, False)
