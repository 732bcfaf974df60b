"""The meet of a model with end states: played at random, and the cases worth naming."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)
from meet_race import MeetRace, plan

from sglang_cake.core.keys import Span
from sglang_cake.loading.meet import BlockState, Meet, best_run, end_indices, possible_runs
from sglang_cake.loading.planner import StepPlan

S = BlockState


def target_of(meet: Meet) -> int:
    """The target in tokens; 0: there is none."""
    return meet.run.stop * meet.block_tokens


class EndRace(MeetRace):
    """A model with end states: blocks are attached up to the target alone."""

    @initialize(
        page=st.sampled_from([1, 2, 4]),
        pages=st.integers(1, 3),
        prompt=st.integers(1, 90),
        chunk=st.integers(1, 30),
        short=st.integers(1, 9),
        device=st.floats(0, 1),
        end_blocks=st.integers(1, 4),
    )
    def begin(
        self,
        page: int,
        pages: int,
        prompt: int,
        chunk: int,
        short: int,
        device: float,
        end_blocks: int,
    ) -> None:
        self.start(page, pages, prompt, chunk, short, device, end_blocks=end_blocks)
        self.ends: set[int] = set()  # tokens
        self.asked: set[int] = set()  # indices that the loader was ever asked for
        self.lowest_target = prompt

    def surplus(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) <= self.bytes_here
        self.bytes_here -= set(blocks)
        self.tell_loader()

    def tell_loader(self) -> None:
        """What the loader does when it hears of the target."""
        wanted = {*self.meet.run, *self.meet.end_indices}
        self.loading = (self.loading & wanted) | (wanted - self.asked)
        self.loading -= {b for b in range(self.meet.block_count) if b < self.meet.first_loadable}
        self.asked |= wanted

    def attach(self) -> None:
        while (span := self.meet.island()) is not None:
            assert span.start == self.meet.front == self.front_of_tokens()
            assert span.stop == target_of(self.meet)
            assert span.stop in self.ends
            assert span.stop <= self.meet.limit < self.prompt
            used = {*self.meet.blocks_of(span), *self.meet.end_indices}
            assert len(self.meet.end_indices) == self.meet.end_blocks
            assert used <= self.bytes_here
            self.bytes_here -= used
            self.cover(*span, "attached")
            self.meet.attach(span)
        self.tell_loader()

    def claim(self, stop: int) -> None:
        assert self.meet.front < stop <= self.prompt
        front = self.meet.front
        self.surplus(self.meet.claim(stop))
        touched = range(front // self.block, -(-stop // self.block))
        assert not self.bytes_here & {b for b in touched if b < self.meet.block_count}
        self.cover(front, stop, "computed")
        self.tell_loader()

    # ---- what may happen, in any order ----

    @precondition(lambda self: not self.found)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        full = self.prompt // self.block
        some = st.lists(st.booleans(), min_size=full, max_size=full)
        stored = data.draw(st.one_of(st.just([True] * full), some))
        ends = data.draw(st.one_of(st.just([True] * full), some))
        self.found = True
        self.ends = {(b + 1) * self.block for b in range(full) if ends[b]}
        self.meet.found(stored, ends)
        self.tell_loader()

    @precondition(lambda self: self.loading)
    @rule()
    def land_all(self) -> None:
        for block in sorted(self.loading, reverse=True):
            self.land_block(block)

    @precondition(lambda self: self.found and self.asked - self.loading)
    @rule(data=st.data())
    def land_too_late(self, data: st.DataObject) -> None:
        """A block of a former target, or one that is computed."""
        late = [
            b
            for b in sorted(self.asked - self.loading)
            if self.meet.state(b) in (S.GONE, S.CLAIMED)
        ]
        if late:
            assert not self.meet.landed(data.draw(st.sampled_from(late)))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        b = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(b)
        self.surplus(self.meet.lost(b))
        assert self.meet.state(b) in (S.GONE, S.CLAIMED)

    @precondition(lambda self: self.bytes_here)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        b = data.draw(st.sampled_from(sorted(self.bytes_here)))
        self.bytes_here.remove(b)
        self.surplus(self.meet.dropped(b))

    @precondition(lambda self: self.found)
    @rule()
    def give_up(self) -> None:
        self.surplus(self.meet.give_up())
        self.loading = set()
        assert not self.meet.view().wanted

    @precondition(lambda self: self.meet.front < self.prompt)
    @rule(data=st.data())
    def claim_anything_legal(self, data: st.DataObject) -> None:
        """As SGLang may, whatever has landed."""
        self.attach()
        if self.meet.front == self.prompt:
            return
        stop = data.draw(st.integers(self.meet.front + 1, self.prompt))
        least = min(self.prompt, self.page_floor(self.meet.front) + self.page)
        self.claim(max(self.page_floor(stop), least))

    def passed(self, front: int) -> None:
        self.surplus(self.meet.advance(front))

    # ---- what must hold at every moment ----

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "meet"):
            landed = {b for b in self.meet.indices if self.meet.state(b) is S.LANDED}
            assert landed == self.bytes_here

    @invariant()
    def only_the_run_to_the_target_is_wanted(self) -> None:
        if not hasattr(self, "meet"):
            return
        meet = self.meet
        to_come = {b for b in range(meet.block_count) if meet.state(b) in (S.WANTED, S.LANDED)}
        assert to_come == set(meet.run)
        assert bool(target_of(meet)) == bool(to_come)
        for b in meet.indices:
            assert meet.state(b) is not S.WANTED or b in self.loading, "nobody brings it"

    @invariant()
    def target_only_falls(self) -> None:
        if hasattr(self, "meet") and self.found:
            assert target_of(self.meet) <= self.lowest_target
            self.lowest_target = target_of(self.meet)
            assert target_of(self.meet) == 0 or target_of(self.meet) in self.ends

    @invariant()
    def tokens_are_got_in_order(self) -> None:
        if hasattr(self, "meet"):
            assert self.meet.front == self.front_of_tokens()
            for b in self.bytes_here & set(range(self.meet.block_count)):
                assert "computed" not in self.got[b * self.block : (b + 1) * self.block]

    @invariant()
    def pending_means_a_block_is_to_come(self) -> None:
        if hasattr(self, "meet"):
            assert self.meet.pending == bool(target_of(self.meet))

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "meet"):
            assert not self.bytes_here


TestEndRace = EndRace.TestCase
TestEndRace.settings = settings(max_examples=300, stateful_step_count=30)


# ---- the choice of a target ----


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12),
    st.integers(0, 12),
)
def test_best_run_is_the_longest_unbroken_one_up_to_a_stored_end(
    blocks: list[tuple[bool, bool]], first: int
) -> None:
    stored, ends = [a for a, _ in blocks], [b for _, b in blocks]
    every = [
        range(start, stop)
        for stop in range(1, len(blocks) + 1)
        for start in range(first, stop)
        if ends[stop - 1] and all(stored[start:stop])
    ]
    longest = max(every, key=lambda run: (len(run), run.stop), default=range(0))
    assert best_run(stored, ends, first) == longest


def test_possible_runs_lists_the_longest_run_first() -> None:
    stored = [True, True, True, False, True, True]
    assert [run.stop for run in possible_runs(stored, 0)] == [3, 6, 2, 5, 1]
    assert possible_runs(stored, 2) == [range(4, 6), range(4, 5), range(2, 3)]


def test_end_indices_of_different_ends_have_no_index_in_common() -> None:
    every = [index for target in range(1, 6) for index in end_indices(5, 3, target)]
    assert every == list(range(5, 20))
    assert list(end_indices(5, 3, 0)) == []


# ---- cases worth naming ----


def meet_of(blocks: float, *, end_blocks: int = 2, front: int = 0) -> Meet:
    tokens = int(blocks * 64)
    return Meet(
        block_tokens=64,
        page_tokens=1,
        limit_tokens=tokens - 1,
        prompt_tokens=tokens,
        front=front,
        end_blocks=end_blocks,
    )


def ends_at(meet: Meet, *blocks: int) -> list[bool]:
    """Ends before these blocks."""
    return [b + 1 in blocks for b in range(meet.block_count)]


def land(meet: Meet, *blocks: int) -> None:
    for b in blocks:
        assert meet.landed(b)


def test_meet_without_a_stored_end_wants_nothing() -> None:
    meet = meet_of(4.5)
    meet.found([True] * 4, [False] * 4)
    assert target_of(meet) == 0
    assert not meet.pending
    assert plan(meet, 512) == StepPlan(288)


def test_meet_blocks_right_of_the_target_are_not_wanted() -> None:
    meet = meet_of(6.5)
    meet.found([True] * 6, ends_at(meet, 2, 4))
    assert target_of(meet) == 4 * 64
    assert meet.run == range(4)
    assert [meet.state(b) for b in (4, 5)] == [S.GONE] * 2
    assert meet.view().wanted == 4 + 2


def test_meet_front_jumps_only_when_the_end_has_landed() -> None:
    meet = meet_of(4.5)
    meet.found([True] * 4, ends_at(meet, 4))
    land(meet, 3, 2, 1, 0)
    assert meet.island() is None
    first, second = meet.end_indices
    land(meet, first)
    assert meet.island() is None
    land(meet, second)
    assert meet.island() == Span(0, 256)
    meet.attach(Span(0, 256))
    assert meet.front == 256
    assert not meet.pending


def test_meet_front_never_jumps_to_an_end_before_the_target() -> None:
    meet = meet_of(6.5)
    meet.found([True] * 6, [True] * 6)
    land(meet, *meet.end_indices, 2, 1, 0)
    assert meet.island() is None
    land(meet, 5, 4, 3)
    assert meet.island() == Span(0, 6 * 64)


def test_meet_limit_of_a_prompt_of_whole_blocks_is_the_block_before_its_last() -> None:
    meet = meet_of(4)
    assert meet.limit == 3 * 64
    meet.found([True] * 4, [True] * 4)
    assert target_of(meet) == 3 * 64


def test_meet_lost_block_keeps_the_run_right_of_it() -> None:
    meet = meet_of(8.5)
    meet.found([True] * 8, ends_at(meet, 8))
    land(meet, *meet.end_indices, 7, 6, 5, 3)
    assert meet.lost(4) == [3]  # nobody can jump over it any more
    assert meet.run == range(5, 8)
    assert meet.state(2) is S.GONE
    meet.claim(5 * 64)
    assert meet.island() == Span(5 * 64, 8 * 64)


def test_meet_lost_block_near_the_target_moves_it_to_a_lower_end() -> None:
    meet = meet_of(16.5)
    meet.found([True] * 16, ends_at(meet, 12, 16))
    old = meet.end_indices
    land(meet, *old, 15)
    assert sorted(meet.lost(14)) == [15, *old]
    assert target_of(meet) == 12 * 64
    assert not set(meet.end_indices) & set(old)
    assert meet.run == range(12)
    assert not meet.landed(old[0])


def test_meet_lower_end_that_saves_less_than_an_end_state_is_not_taken() -> None:
    meet = meet_of(8.5, end_blocks=3)
    meet.found([True] * 8, ends_at(meet, 4, 8))
    land(meet, *meet.end_indices, 7, 6, 5)
    assert meet.lost(4) == []
    assert target_of(meet) == 8 * 64  # three blocks against four, and another end state


def test_meet_lost_end_block_moves_the_target_to_the_next_lower_end() -> None:
    meet = meet_of(6.5)
    meet.found([True] * 6, ends_at(meet, 2, 4, 6))
    first, second = meet.end_indices
    land(meet, second, 5, 4, 3)
    assert sorted(meet.lost(first)) == [4, 5, second]
    assert target_of(meet) == 4 * 64
    assert meet.state(3) is S.LANDED  # it is of use before the lower end, too


def test_meet_lost_end_block_without_a_lower_end_gives_all_up() -> None:
    meet = meet_of(4.5)
    meet.found([True] * 4, ends_at(meet, 4))
    first, second = meet.end_indices
    land(meet, second, 3)
    assert sorted(meet.lost(first)) == [3, second]
    assert not meet.pending
    assert plan(meet, 512) == StepPlan(288)


def test_meet_give_up_asks_for_no_lower_end() -> None:
    meet = meet_of(4.5)
    meet.found([True] * 4, ends_at(meet, 2, 4))
    land(meet, 3, 2, 1, 0)
    assert meet.give_up() == [0, 1, 2, 3]
    assert target_of(meet) == 0
    assert meet.view().wanted == 0


def test_meet_give_up_keeps_landed_blocks_if_their_end_has_landed() -> None:
    meet = meet_of(4.5)
    meet.found([True] * 4, ends_at(meet, 2, 4))
    land(meet, *meet.end_indices, 3, 2)
    assert meet.give_up() == []
    meet.claim(2 * 64)
    assert meet.island() == Span(2 * 64, 4 * 64)


def test_meet_claim_of_landed_blocks_gives_them_up() -> None:
    meet = meet_of(4.5)
    meet.found([True] * 4, ends_at(meet, 4))
    land(meet, 0)
    assert meet.claim(64) == [0]
    assert meet.state(0) is S.CLAIMED


def test_meet_step_over_the_whole_run_gives_up_its_end() -> None:
    meet = meet_of(4.5)
    meet.found([True] * 4, ends_at(meet, 4))
    ends = list(meet.end_indices)
    land(meet, *ends, 3)
    assert sorted(meet.claim(288)) == [3, *ends]
    assert not meet.pending


def test_meet_hole_left_of_the_longest_run_is_computed_first() -> None:
    meet = meet_of(8.5)
    meet.found([True, True, False, True, True, True, True, True], ends_at(meet, 2, 8))
    assert meet.run == range(3, 8)
    assert meet.state(0) is S.GONE


def test_meet_longer_run_before_a_hole_is_the_target() -> None:
    meet = meet_of(8.5)
    meet.found([True] * 5 + [False, True, True], ends_at(meet, 5, 8))
    assert target_of(meet) == 5 * 64
