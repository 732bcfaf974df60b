"""Which end states are saved, when, and under which keys."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_pools import record_of
from test_block_saving import BLOCK, PATIENCE_S, SavingHarness

from sglang_cake.core.buffers import Buffer
from sglang_cake.core.keys import end_keys
from sglang_cake.integration.memory.block_saving import END_SPACING, BlockSaving
from sglang_cake.integration.memory.copier import Copier, Save
from sglang_cake.integration.memory.end_states import EndSlots
from sglang_cake.integration.memory.kv_pool import Copy, Fence
from sglang_cake.integration.memory.kv_shard import SOLE, KvShard
from sglang_cake.integration.request.prompt_record import PromptRecord

COUNT = 2


class FakeEnds:
    """End states that are the number of their token."""

    count = COUNT
    tail_tokens = 0
    state_chunk_tokens = 1

    def __init__(self, window_tokens: int = 0) -> None:
        self.window_tokens = window_tokens
        self.at = 0

    def prepare(self, slots: EndSlots) -> EndSlots:
        return slots

    def save(self, slots: EndSlots, buffers: Sequence[Buffer], after: Fence) -> Copy:
        for index, buffer in enumerate(buffers):
            buffer.view[:] = end_block(self.at, index, len(buffer.view))
        return Copy()


def end_block(end: int, index: int, size: int) -> bytes:
    return f"{end}/{index} ".encode().ljust(size, b".")


class HeldCopier(Copier):
    """Copies that are launched, and end when the test says so."""

    held: "list[Save] | None" = None

    def save(self, launch: Callable[[], Copy]) -> Save:
        if self.held is None:
            return super().save(launch)
        save = Save()
        save.launched.set_result(launch())
        self.held.append(save)
        return save


class EndHarness(SavingHarness):
    def __init__(self, shard: KvShard = SOLE, *, alone: bool = True) -> None:
        super().__init__(buffers=4)
        self.ends: Any = FakeEnds()
        self.copier = HeldCopier(self.kv)
        self.saving = BlockSaving(self.kv, self.copier, self.writer, shard, self.ends, alone=alone)
        self.gone = False
        self.asked: list[int] = []

    def find(self, stop: int) -> EndSlots | None:
        self.asked.append(stop)
        self.ends.at = stop
        return None if self.gone else EndSlots()

    def tell(self, record: PromptRecord, upto: int, *, last: bool = False) -> None:
        """A checkpoint, and what is written because of it."""
        self.checkpointed(record, upto, last=last)
        self.io.run(self.writer.drained(), PATIENCE_S)

    def checkpointed(self, record: PromptRecord, upto: int, *, last: bool = False) -> None:
        tokens = record.tokens[:upto]
        row = self.row.repeat(-(-upto // len(self.row)))[:upto]
        self.saving.checkpointed(record, tokens, row, last=last, find_end=self.find)

    def stored_ends(self, record: PromptRecord) -> list[int]:
        """The ends that the store has; each has the right bytes."""
        keys = record.key_chain.of(record.tokens)
        size = self.kv.layout.block_bytes
        found = []
        for block, key in enumerate(keys):
            pieces = [self.memory.blocks.get(each) for each in end_keys(key, COUNT)]
            if any(pieces):
                end = (block + 1) * BLOCK
                assert pieces == [end_block(end, index, size) for index in range(COUNT)]
                found.append(end)
        return found


@pytest.fixture
def harness() -> Iterator[EndHarness]:
    with EndHarness() as made:
        yield made


def known(blocks: int, *ends: int, **settings: Any) -> PromptRecord:
    made = record_of(blocks, block=BLOCK, **settings)
    made.agreed.lookup_done = True
    made.agreed.stored = (False,) * blocks
    made.agreed.ends = tuple(block + 1 in ends for block in range(blocks))
    return made


def test_end_saving_stores_the_last_boundary_of_a_prompt(harness: EndHarness) -> None:
    record = known(6, extra_tokens=3)
    harness.tell(record, 3 * BLOCK)
    assert harness.stored_ends(record) == []
    harness.tell(record, 6 * BLOCK + 3)
    assert harness.stored_ends(record) == [6 * BLOCK]
    assert harness.buffers.free == harness.buffers.capacity


def test_end_saving_with_a_draft_model_waits_for_windows_and_not_for_states(
    harness: EndHarness,
) -> None:
    """A draft model's rows at an end depend on the token behind it, and so do keys."""
    record = known(6, extra_tokens=1, next_tokens=1)
    harness.tell(record, 6 * BLOCK)
    assert harness.stored_ends(record) == harness.asked == [6 * BLOCK]
    harness.ends.window_tokens = 8
    other = known(6, extra_tokens=1, next_tokens=1)
    harness.tell(other, 6 * BLOCK)
    assert harness.asked == [6 * BLOCK]
    harness.tell(other, 6 * BLOCK + 1)
    assert harness.asked == [6 * BLOCK, 6 * BLOCK]


@pytest.mark.parametrize(("extra_tokens", "end"), [(0, 5), (7, 5), (8, 6)])
def test_end_saving_leaves_the_last_tokens_that_every_prompt_computes(
    harness: EndHarness, extra_tokens: int, end: int
) -> None:
    """Otherwise the same prompt could not load its own end."""
    harness.ends.window_tokens = harness.ends.tail_tokens = 8
    record = known(6, extra_tokens=extra_tokens)
    harness.tell(record, 4 * BLOCK)
    assert harness.asked == []
    harness.tell(record, 6 * BLOCK + extra_tokens)
    assert harness.stored_ends(record) == [end * BLOCK]
    record.agreed.stored = (True,) * 6
    assert harness.saving.branch(record) == end * BLOCK


def test_end_saving_never_stores_an_end_whose_key_is_not_known(harness: EndHarness) -> None:
    record = known(6, next_tokens=1)
    harness.tell(record, 6 * BLOCK, last=True)
    assert harness.asked == [5 * BLOCK]


def test_end_saving_of_a_prompt_shorter_than_its_end_state_stores_none(
    harness: EndHarness,
) -> None:
    record = known(COUNT - 1, extra_tokens=3)
    harness.tell(record, (COUNT - 1) * BLOCK + 3, last=True)
    assert harness.stored_ends(record) == harness.asked == []


def test_end_saving_inside_a_prompt_keeps_its_distance(harness: EndHarness) -> None:
    blocks = 3 * END_SPACING * COUNT
    record = known(blocks)
    for block in range(1, blocks):
        harness.tell(record, block * BLOCK)
    last = (blocks - 1) * BLOCK  # the last token is never loaded
    spacing = END_SPACING * COUNT * BLOCK
    assert harness.stored_ends(record) == [spacing, 2 * spacing, last]


@pytest.mark.parametrize("kept", [5, 6])
def test_end_saving_stores_the_last_end_of_a_prompt_at_which_a_step_keeps_a_state(
    harness: EndHarness, kept: int
) -> None:
    """State chunks of two blocks count from the start of a step, which may be at any block."""
    harness.ends.state_chunk_tokens = 2 * BLOCK
    record = known(6, extra_tokens=3)
    harness.tell(record, (kept - 2) * BLOCK)
    assert harness.asked == []
    harness.tell(record, kept * BLOCK)
    assert harness.stored_ends(record) == [kept * BLOCK]


@pytest.mark.parametrize("kept", [4, 5])
def test_end_saving_stores_the_last_end_before_prompts_diverge_at_which_a_step_keeps_a_state(
    harness: EndHarness, kept: int
) -> None:
    harness.ends.state_chunk_tokens = 2 * BLOCK
    record = known(20)
    record.agreed.stored = (True,) * 5 + (False,) * 15
    harness.tell(record, (kept - 2) * BLOCK)
    assert harness.asked == []
    harness.tell(record, kept * BLOCK)
    assert harness.stored_ends(record) == [kept * BLOCK]
    harness.tell(record, (kept + 2) * BLOCK)
    assert harness.asked == [kept * BLOCK]


def test_end_saving_counts_from_ends_that_are_stored(harness: EndHarness) -> None:
    record = known(6, 4, 6, extra_tokens=3)
    harness.tell(record, 6 * BLOCK + 3)
    assert harness.asked == []
    record = known(6, 5, extra_tokens=3)
    harness.tell(record, 6 * BLOCK + 3)
    assert harness.asked == []
    record = known(6, 6 - COUNT, extra_tokens=3)
    harness.tell(record, 6 * BLOCK + 3)
    assert harness.stored_ends(record) == [6 * BLOCK]


def test_end_saving_without_buffers_is_tried_again(harness: EndHarness) -> None:
    record = known(6, extra_tokens=3)
    taken = [harness.writer.take() for _ in range(3)]
    harness.tell(record, 6 * BLOCK + 3)
    assert harness.stored_ends(record) == harness.asked == []
    assert harness.buffers.free == 1
    for buffer in taken:
        assert buffer is not None
        harness.buffers.give(buffer)
    for _ in range(3):
        harness.saving.polled(lambda each: each is record)
        harness.io.run(harness.writer.drained(), PATIENCE_S)
    assert harness.stored_ends(record) == [6 * BLOCK]
    assert harness.asked == [6 * BLOCK]


def test_end_saving_gets_buffers_that_come_back_one_by_one_before_blocks(
    harness: EndHarness,
) -> None:
    """As from a store that is slower than prefill: blocks would take each of them."""
    harness.copier.held = []
    record, other = known(6, extra_tokens=3), known(6)
    taken = [harness.writer.take() for _ in range(harness.buffers.capacity)]
    harness.checkpointed(record, 6 * BLOCK + 3)
    harness.checkpointed(other, 2 * BLOCK)
    for buffer in taken[:COUNT]:
        assert buffer is not None
        harness.buffers.give(buffer)
        harness.saving.polled(lambda each: True)
    assert harness.asked == [6 * BLOCK]
    for buffer in taken[COUNT:]:
        assert buffer is not None
        harness.buffers.give(buffer)
        harness.saving.polled(lambda each: True)
    assert harness.buffers.free == 0  # blocks have them
    for save in harness.copier.held:
        save.ended.set_result(None)


def test_end_saving_that_waits_at_the_end_leaves_free_buffers_to_blocks(
    harness: EndHarness,
) -> None:
    record = known(6, extra_tokens=3)
    taken = [harness.writer.take() for _ in range(3)]
    harness.tell(record, 6 * BLOCK + 3, last=True)
    assert harness.stored_ends(record) == []
    assert len(harness.memory) == 1
    for buffer in taken:
        assert buffer is not None
        harness.buffers.give(buffer)


def test_end_saving_with_several_ranks_finds_buffers_that_blocks_have_left() -> None:
    """As beside a store that is slower than prefill. There is no second try."""
    with EndHarness(alone=False) as harness:
        harness.copier.held = []
        record, other = known(6, extra_tokens=3), known(6)
        harness.checkpointed(other, 4 * BLOCK)
        assert harness.buffers.free == COUNT
        harness.checkpointed(record, 6 * BLOCK + 3)
        assert harness.buffers.free == 0
        for save in harness.copier.held:
            save.ended.set_result(None)
        harness.io.run(harness.writer.drained(), PATIENCE_S)
        assert harness.asked == [6 * BLOCK]


def test_end_saving_with_several_ranks_asks_the_tree_with_buffers_and_without() -> None:
    """The question changes the tree, and other ranks may have had buffers for it."""
    with EndHarness(alone=False) as harness:
        record = known(6, extra_tokens=3)
        taken = [harness.writer.take() for _ in range(3)]
        harness.tell(record, 6 * BLOCK + 3)
        assert harness.asked == [6 * BLOCK]
        assert harness.counters.snapshot()["unstored_blocks", "queue_full"] == COUNT
        for buffer in taken:
            assert buffer is not None
            harness.buffers.give(buffer)
        harness.saving.polled(lambda each: each is record)
        harness.io.run(harness.writer.drained(), PATIENCE_S)
        assert harness.asked == [6 * BLOCK]
        assert harness.stored_ends(record) == []


def test_end_saving_of_an_evicted_end_gives_its_buffers_back(harness: EndHarness) -> None:
    record = known(6, extra_tokens=3)
    harness.gone = True
    harness.tell(record, 6 * BLOCK + 3)
    assert harness.asked == [6 * BLOCK]
    assert harness.stored_ends(record) == []
    assert harness.buffers.free == harness.buffers.capacity


def test_end_saving_without_device_memory_gives_its_buffers_back(harness: EndHarness) -> None:
    record = known(6, 0, extra_tokens=3)
    record.agreed.stored = (True,) * 6
    harness.kv.is_short = True
    with pytest.raises(torch.OutOfMemoryError):
        harness.tell(record, 6 * BLOCK + 3)
    assert harness.buffers.free == harness.buffers.capacity


def test_end_saving_given_up_at_the_end_is_counted(harness: EndHarness) -> None:
    record = known(6, 0, extra_tokens=3)
    record.agreed.stored = (True,) * 6
    taken = [harness.writer.take() for _ in range(4)]
    assert all(taken)
    harness.tell(record, 6 * BLOCK + 3, last=True)
    assert harness.counters.snapshot()["unstored_blocks", "queue_full"] == COUNT
    harness.saving.released(record)
    assert harness.counters.snapshot()["unstored_blocks", "queue_full"] == COUNT
    for buffer in taken:
        harness.buffers.give(buffer)


def test_end_saving_is_ordered_before_slots_are_freed_also_of_live_requests(
    harness: EndHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request locks the window and the state that it has now, not those that it has passed."""
    record = known(6, extra_tokens=3)
    record.agreed.stored = (True,) * 6
    harness.copier.held = []
    ordered: list[Copy] = []
    monkeypatch.setattr(harness.kv, "order_forwards_after", ordered.extend)
    harness.checkpointed(record, 6 * BLOCK + 3)
    harness.saving.before_slots_are_freed(lambda each: True)
    assert len(ordered) == 1
    [save] = harness.copier.held
    save.ended.set_result(None)
    harness.io.run(harness.writer.drained(), PATIENCE_S)
    harness.saving.before_slots_are_freed(lambda each: True)
    assert len(ordered) == 1


@pytest.mark.parametrize(
    ("last", "end", "wanted"), [(False, 6, True), (False, 5, False), (True, 5, True)]
)
def test_end_saving_wants_the_last_end_of_a_prompt_or_of_its_answer(
    harness: EndHarness, last: bool, end: int, wanted: bool
) -> None:
    record = known(6, extra_tokens=3)
    assert harness.saving.wants_end(record, end * BLOCK, last=last) == wanted


@pytest.mark.parametrize(
    ("stored", "branch", "wanted"),
    [
        ((True,) * 4 + (False,) * 8, 4, True),
        ((True,) * 4 + (False,) + (True,) * 7, 4, True),  # a hole
        ((True,) * (COUNT - 1) + (False,) * 9, COUNT - 1, False),  # sooner computed than loaded
        ((False,) * 12, 0, False),
        ((), 0, False),  # no lookup yet
        ((True,) * 12, 11, True),  # the last token is never loaded
    ],
)
def test_end_saving_wants_the_end_where_prompts_part(
    harness: EndHarness, stored: tuple[bool, ...], branch: int, wanted: bool
) -> None:
    record = known(12)
    record.agreed.stored = stored
    assert harness.saving.branch(record) == branch * BLOCK
    assert harness.saving.wants_end(record, branch * BLOCK) == wanted
    assert not harness.saving.wants_end(record, 5 * BLOCK)


def test_end_saving_where_prompts_part_is_done_once(harness: EndHarness) -> None:
    record = known(12, 4)
    record.agreed.stored = (True,) * 4 + (False,) * 8
    assert not harness.saving.wants_end(record, 4 * BLOCK)  # it is stored
    record = known(12)
    record.agreed.stored = (True,) * 4 + (False,) * 8
    harness.tell(record, 4 * BLOCK)
    assert harness.stored_ends(record) == [4 * BLOCK]
    assert not harness.saving.wants_end(record, 4 * BLOCK)


def test_end_saving_ranks_with_the_same_kv_store_each_end_once() -> None:
    """They all ask their trees, so that these evict the same ends; later ends keep their
    distance."""
    blocks = 3 * END_SPACING * COUNT
    stored, asked = [], []
    for turn in range(2):
        with EndHarness(KvShard(holder=turn, holders=2, has_all_heads=True)) as harness:
            record = known(blocks)
            for block in range(1, blocks):
                harness.tell(record, block * BLOCK)
            stored.append(harness.stored_ends(record))
            asked.append(harness.asked)
    spacing, last = END_SPACING * COUNT * BLOCK, (blocks - 1) * BLOCK
    assert asked == [[spacing, 2 * spacing, last]] * 2
    assert stored == [[last], [spacing, 2 * spacing]]  # behind an even block, and odd ones


def test_end_saving_ranks_that_divide_states_store_each_end_of_their_own() -> None:
    blocks, stored = 3 * END_SPACING * COUNT, []
    for rank in range(2):
        shard = KvShard.of_rank(rank, [0, 0], replicated=True, has_own_states=True)
        with EndHarness(shard) as harness:
            record = known(blocks)
            harness.tell(record, (blocks - 1) * BLOCK)
            stored.append(harness.stored_ends(record))
    assert stored == [[(blocks - 1) * BLOCK]] * 2
