"""A checkpoint stores new full blocks, once, with the right bytes and keys."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from faulty_stores import RecordingStore
from kv_pools import as_bytes, buffers_for, buffers_of, mha, record_of, scramble

from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Span
from sglang_cake.core.threads import IoThread
from sglang_cake.integration.build import CakeService
from sglang_cake.integration.memory.block_saving import BlockSaving, Writer
from sglang_cake.integration.memory.copier import Copier, CopyThread, Save
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV, Fence
from sglang_cake.integration.memory.kv_shard import SOLE, KvShard
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.testing.memory_store import MemoryStore

BLOCK, PATIENCE_S = 16, 60.0


class ShortKV(DeviceKV):
    """Attributes: is_short: the device has no memory left."""

    is_short = False

    def fence(self) -> Fence:
        if self.is_short:
            raise torch.OutOfMemoryError("no device memory")
        return super().fence()


class SavingHarness:
    """As a context manager: everything is written at its end, and all buffers are free again."""

    def __init__(self, *, buffers: int = 8, shard: KvShard = SOLE) -> None:
        self.pool = mha(256, dtype=torch.bfloat16)
        scramble(self.pool, 1)
        self.kv = ShortKV(self.pool, block_tokens=BLOCK)
        self.memory = MemoryStore()
        self.store = RecordingStore(self.memory)
        self.io = IoThread()
        self.counters = Counters()
        self.buffers = BufferPool(buffers_for(self.kv, buffers))
        self.writer = Writer(self.store, self.buffers, self.io, self.counters)
        copier = Copier(self.kv)
        self.saving = BlockSaving(self.kv, copier, self.writer, shard)
        # SGLang's rows of slots are int32, and slots come in no order.
        order = torch.randperm(256, generator=torch.Generator().manual_seed(2)) + 1
        self.row = order.to(torch.int32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        try:
            if failure is None:
                self.io.run(self.writer.drained(), PATIENCE_S)
                assert self.buffers.free == self.buffers.capacity
        finally:
            self.io.close()

    def checkpoint(
        self, record: PromptRecord, upto: int, *, last: bool = False, held: int | None = None
    ) -> list[int]:
        """The blocks that were put because of it. Args: held: what the tree took; None: all."""
        before = len(self.store.calls)
        tokens, row = record.tokens[:upto], self.row[: upto if held is None else held]
        self.saving.checkpointed(record, tokens, row, last=last)
        self.io.run(self.writer.drained(), PATIENCE_S)
        keys = record.key_chain.of(record.tokens)
        assert self.buffers.free == self.buffers.capacity
        return sorted(keys.index(key) for _, key in self.store.calls[before:])

    def poll(self, record: PromptRecord, *, live: bool = True) -> list[int]:
        """The same of a poll."""
        before = len(self.store.calls)
        self.saving.polled(lambda each: live and each is record)
        self.io.run(self.writer.drained(), PATIENCE_S)
        keys = record.key_chain.of(record.tokens)
        return sorted(keys.index(key) for _, key in self.store.calls[before:])

    def expect(self, record: PromptRecord, block: int) -> None:
        """The store holds the block's very bytes."""
        slots = self.row[block * BLOCK : (block + 1) * BLOCK].long()
        wanted = b"".join(bytes(as_bytes(b)[slots].numpy()) for b in buffers_of(self.pool))
        assert self.memory.blocks[record.key_chain.of(record.tokens)[block]] == wanted


@pytest.fixture
def harness() -> Iterator[SavingHarness]:
    with SavingHarness() as made:
        yield made


def known(blocks: int, *stored: int, **settings: Any) -> PromptRecord:
    made = record_of(blocks, block=BLOCK, **settings)
    made.agreed.lookup_done = True
    made.agreed.stored = tuple(b in stored for b in range(blocks))
    return made


def test_block_saving_full_blocks_are_stored_as_they_complete(harness: SavingHarness) -> None:
    record = known(6)
    assert harness.checkpoint(record, 2 * BLOCK + 5) == [0, 1]
    assert harness.checkpoint(record, 2 * BLOCK + 9) == []
    assert harness.checkpoint(record, 5 * BLOCK) == [2, 3, 4]
    assert harness.checkpoint(record, 5 * BLOCK, last=True) == []
    for block in range(5):
        harness.expect(record, block)
    assert len(harness.memory) == 5


def test_block_saving_block_waits_for_the_token_that_its_key_covers(
    harness: SavingHarness,
) -> None:
    record = known(3, next_tokens=1)
    assert harness.checkpoint(record, 2 * BLOCK) == [0]
    assert harness.checkpoint(record, 2 * BLOCK + 1) == [1]
    assert harness.checkpoint(record, 3 * BLOCK, last=True) == []
    for block in range(2):
        harness.expect(record, block)


def test_block_saving_block_that_another_prompt_went_on_from_is_not_stored(
    harness: SavingHarness,
) -> None:
    """The tree has one token behind what it matches, and several draft layers need more."""
    for next_tokens, behind, put in (
        (0, 0, [0, 1, 2]),
        (1, 0, [0, 2]),
        (1, 1, [0, 1, 2]),
        (3, 2, [0, 2]),
        (3, 3, [0, 1, 2]),
    ):
        record = known(4, next_tokens=next_tokens)
        record.stats.matched_tokens = 2 * BLOCK + behind
        assert harness.checkpoint(record, 3 * BLOCK + 3) == put


def test_block_saving_blocks_wait_until_the_tree_has_them(harness: SavingHarness) -> None:
    """A request's own slots are freed with it."""
    record = known(6)
    assert harness.checkpoint(record, 4 * BLOCK, held=2 * BLOCK + 3) == [0, 1]
    assert harness.checkpoint(record, 5 * BLOCK) == [2, 3, 4]
    assert harness.checkpoint(record, 6 * BLOCK, held=5 * BLOCK, last=True) == []


def test_block_saving_stored_blocks_are_skipped(harness: SavingHarness) -> None:
    record = known(6, 1, 4)
    assert harness.checkpoint(record, 6 * BLOCK) == [0, 2, 3, 5]


def test_block_saving_loaded_blocks_are_skipped(harness: SavingHarness) -> None:
    record = known(3)
    record.meet.found([False, True, False])
    record.meet.landed(1)
    record.meet.claim(BLOCK)
    record.meet.attach(Span(BLOCK, 2 * BLOCK))
    assert harness.checkpoint(record, 3 * BLOCK) == [0, 2]


def test_block_saving_unanswered_lookup_defers_all_but_the_last_checkpoint(
    harness: SavingHarness,
) -> None:
    record = known(4)
    record.agreed.lookup_done = False
    record.agreed.stored = ()
    assert harness.checkpoint(record, 2 * BLOCK) == []
    record.agreed.lookup_done = True
    record.agreed.stored = (True, False, False, False)
    assert harness.checkpoint(record, 3 * BLOCK) == [1, 2]
    other = known(4)
    other.agreed.lookup_done = False
    other.agreed.stored = ()
    assert harness.checkpoint(other, 4 * BLOCK, last=True) == [0, 1, 2, 3]


def test_block_saving_output_tokens_make_blocks_beyond_the_prompt(harness: SavingHarness) -> None:
    record = record_of(2, block=BLOCK)
    record.agreed.lookup_done = True
    record.agreed.stored = (True, True)
    longer = record_of(4, block=BLOCK)
    harness.saving.checkpointed(record, longer.tokens, harness.row[: 4 * BLOCK], last=True)
    harness.io.run(harness.writer.drained(), PATIENCE_S)
    keys = longer.key_chain.of(longer.tokens)
    assert set(harness.memory.blocks) == set(keys[2:])


def test_block_saving_blocks_without_a_buffer_are_saved_at_later_checkpoints_and_polls() -> None:
    with SavingHarness(buffers=2) as harness:
        record = known(6)
        assert harness.checkpoint(record, 4 * BLOCK) == [0, 1]
        assert harness.checkpoint(record, 5 * BLOCK) == [2, 3]
        assert harness.poll(record) == [4]
        assert harness.poll(record) == []
        assert harness.checkpoint(record, 6 * BLOCK, last=True) == [5]
        for block in range(6):
            harness.expect(record, block)
        assert not harness.counters.snapshot()["unstored_blocks", "queue_full"]


def test_block_saving_poll_looks_only_at_requests_with_blocks_left() -> None:
    """A thousand requests may decode. What was saved of them is known at their next checkpoint."""
    with SavingHarness(buffers=2) as harness:
        saved, short = known(4), known(6)
        assert harness.checkpoint(saved, 2 * BLOCK) == [0, 1]
        assert harness.checkpoint(short, 6 * BLOCK) == [0, 1]
        looks: list[list[PromptRecord]] = []
        for _ in range(4):
            looks.append([])
            harness.saving.polled(lambda each: looks[-1].append(each) or True)
            harness.io.run(harness.writer.drained(), PATIENCE_S)
        assert looks[1:] == [[short], [], []]
        assert len(harness.memory) == 6
        assert harness.checkpoint(saved, 4 * BLOCK, last=True) == [2, 3]


def test_block_saving_request_that_ends_unnoticed_is_forgotten(harness: SavingHarness) -> None:
    record = known(2)
    assert harness.checkpoint(record, 2 * BLOCK) == [0, 1]
    for _ in range(2):
        harness.saving.polled(lambda each: True)
    harness.saving.before_slots_are_freed(lambda each: True)  # its copies are over
    gone = weakref.ref(record)
    del record
    assert gone() is None


def test_block_saving_without_device_memory_is_tried_again(harness: SavingHarness) -> None:
    record = known(4)
    harness.kv.is_short = True
    with pytest.raises(torch.OutOfMemoryError):
        harness.checkpoint(record, 4 * BLOCK)
    harness.kv.is_short = False
    assert harness.buffers.free == harness.buffers.capacity
    assert harness.poll(record) == [0, 1, 2, 3]


def test_block_saving_blocks_without_a_buffer_at_the_end_are_given_up_and_counted() -> None:
    with SavingHarness(buffers=2) as harness:
        record = known(5)
        assert harness.checkpoint(record, 5 * BLOCK, last=True) == [0, 1]
        assert harness.counters.snapshot()["unstored_blocks", "queue_full"] == 3
        assert harness.poll(record) == []
        released = known(5)
        assert harness.checkpoint(released, 5 * BLOCK) == [0, 1]
        harness.saving.released(released)
        assert harness.counters.snapshot()["unstored_blocks", "queue_full"] == 6
        assert harness.poll(released) == []


def test_block_saving_blocks_that_were_given_up_are_stored_by_the_next_request_with_them() -> None:
    with SavingHarness(buffers=2) as harness:
        first, again = known(5), known(5, 0, 1)
        assert harness.checkpoint(first, 5 * BLOCK, last=True) == [0, 1]
        again.stats.matched_tokens = 4 * BLOCK  # the tree still has the prompt
        assert harness.checkpoint(again, 5 * BLOCK) == [2, 3]
        assert harness.poll(again) == [4]
        for block in range(5):
            harness.expect(again, block)


def test_block_saving_blocks_of_a_requeued_request_are_offered_once() -> None:
    """Its slots may be freed until its next checkpoint, which may have fewer tokens."""
    with SavingHarness(buffers=2) as harness:
        record = known(6, next_tokens=1)
        assert harness.checkpoint(record, 4 * BLOCK + 1) == [0, 1]
        harness.saving.released(record, requeued=True)
        assert harness.poll(record) == []
        assert harness.checkpoint(record, 3 * BLOCK) == []
        assert harness.checkpoint(record, 3 * BLOCK + 1) == [2]
        assert harness.poll(record) == []
        assert harness.checkpoint(record, 5 * BLOCK + 1) == [3, 4]
        assert not harness.counters.snapshot()["unstored_blocks", "queue_full"]
        for block in range(5):
            harness.expect(record, block)


def test_block_saving_blocks_of_an_aborted_request_are_given_up_and_counted_at_the_next_poll() -> (
    None
):
    """However the request ended: nobody told the saving."""
    with SavingHarness(buffers=2) as harness:
        record = known(5)
        assert harness.checkpoint(record, 5 * BLOCK) == [0, 1]
        assert harness.poll(record, live=False) == []
        assert harness.counters.snapshot()["unstored_blocks", "queue_full"] == 3
        assert harness.poll(record) == []


def test_block_saving_slots_overwritten_after_return_keep_the_stored_bytes(
    harness: SavingHarness,
) -> None:
    record = known(2)
    harness.saving.checkpointed(record, record.tokens, harness.row[: 2 * BLOCK], last=True)
    slots = harness.row[: 2 * BLOCK].long()
    wanted = [as_bytes(b)[slots].clone() for b in buffers_of(harness.pool)]
    scramble(harness.pool, 9)
    harness.io.run(harness.writer.drained(), PATIENCE_S)
    for b, old in zip(buffers_of(harness.pool), wanted, strict=True):
        as_bytes(b)[slots] = old
    harness.expect(record, 0)
    harness.expect(record, 1)


@pytest.fixture(params=[0, 1])
def one_of_two(request: pytest.FixtureRequest) -> Iterator[tuple[int, SavingHarness]]:
    """One of two ranks that hold the same KV, with its number."""
    with SavingHarness(buffers=1, shard=KvShard(holder=request.param, holders=2)) as made:
        yield request.param, made


def test_block_saving_ranks_with_the_same_kv_take_turns(
    one_of_two: tuple[int, SavingHarness],
) -> None:
    turn, harness = one_of_two
    record = known(6, 4)
    assert harness.checkpoint(record, 4 * BLOCK) == [turn]
    assert harness.poll(record) == [turn + 2]
    assert harness.checkpoint(record, 6 * BLOCK, last=True) == ([] if turn == 0 else [5])
    assert not harness.counters.snapshot()["unstored_blocks", "queue_full"]


def test_block_saving_block_that_a_rank_could_not_read_is_stored_by_that_rank(
    one_of_two: tuple[int, SavingHarness],
) -> None:
    turn, harness = one_of_two
    record = known(2, 0, 1)
    record.local.lost = {1 - turn}
    assert harness.checkpoint(record, 2 * BLOCK) == [1 - turn]
    harness.expect(record, 1 - turn)


def test_block_saving_lost_end_block_is_not_taken_for_the_block_behind_those_of_the_lookup(
    one_of_two: tuple[int, SavingHarness],
) -> None:
    """Indices of end blocks begin there."""
    _, harness = one_of_two
    record = known(4, 0, 1, 2, 3, limit=2 * BLOCK)
    record.local.lost = {2, 3}
    assert harness.checkpoint(record, 4 * BLOCK) == []


def test_block_saving_blocks_of_another_ranks_turn_are_not_counted_as_given_up(
    one_of_two: tuple[int, SavingHarness],
) -> None:
    turn, harness = one_of_two
    record = known(6)
    assert harness.checkpoint(record, 6 * BLOCK, last=True) == [turn]
    assert harness.counters.snapshot()["unstored_blocks", "queue_full"] == 2


class SlowCopier(Copier):
    """Launches copies that take until the test ends them."""

    def __init__(self, kv: DeviceKV) -> None:
        super().__init__(kv)
        self.saves: list[Save] = []

    def save(self, launch: object) -> Save:
        save = Save()
        save.launched.set_result(Copy(number=len(self.saves)))
        self.saves.append(save)
        return save


class OrderedKV(DeviceKV):
    """Notes after which copies the last forward has to start."""

    ordered: Sequence[Copy] = ()

    def order_forwards_after(self, copies: Sequence[Copy]) -> None:
        self.ordered = copies


def test_block_saving_slots_of_an_ended_request_are_freed_behind_its_copies() -> None:
    """However the request ended: its record alone decides, and nobody told the saving."""
    kv = OrderedKV(mha(256, dtype=torch.bfloat16), block_tokens=BLOCK)
    copier, io, buffers = SlowCopier(kv), IoThread(), BufferPool(buffers_for(kv, 8))
    writer = Writer(MemoryStore(), buffers, io, Counters())
    saving = BlockSaving(kv, copier, writer)
    first, second = known(2), known(2)
    row = torch.arange(1, 2 * BLOCK + 1)
    saving.checkpointed(first, first.tokens, row, last=False)
    saving.checkpointed(second, second.tokens, row + 2 * BLOCK, last=False)

    saving.before_slots_are_freed(lambda record: True)
    assert not kv.ordered
    saving.before_slots_are_freed(lambda record: record is second)
    assert [copy.number for copy in kv.ordered] == [0]
    saving.before_slots_are_freed(lambda record: False)
    assert [copy.number for copy in kv.ordered] == [0, 1]

    saving.released(second, requeued=True)  # it lives, and locks nothing
    saving.before_slots_are_freed(lambda record: True)
    assert [copy.number for copy in kv.ordered] == [1]

    for save in copier.saves:
        save.ended.set_result(None)
    kv.ordered = ()
    saving.before_slots_are_freed(lambda record: False)
    assert not kv.ordered
    io.run(writer.drained(), PATIENCE_S)
    io.close()


class HeldKV(DeviceKV):
    """Begins to copy a block into host memory when the test says."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool, block_tokens=BLOCK)
        self.go = threading.Event()

    def save(self, slots: torch.Tensor, blocks: Sequence[Buffer], after: Fence) -> Copy:
        assert self.go.wait(PATIENCE_S)
        return super().save(slots, blocks, after)


class WaitedCopier(CopyThread):
    """Goes on when it is waited for."""

    def wait_launched(self, launches: "Sequence[Future[Copy]]") -> list[Copy | None]:
        self._kv.go.set()  # type: ignore[attr-defined]
        return super().wait_launched(launches)


@pytest.mark.parametrize("late", [False, True])
def test_block_saving_pool_that_goes_leaves_whole_blocks_or_none(late: bool) -> None:
    """SGLang releases the memory of the pool. A save that does not begin in time is dropped."""
    pool = mha(256, dtype=torch.bfloat16)
    scramble(pool, 1)
    kv = HeldKV(pool)
    copier = CopyThread(kv, patience_s=0.0) if late else WaitedCopier(kv, patience_s=PATIENCE_S)
    io, buffers, memory, counters = (
        IoThread(),
        BufferPool(buffers_for(kv, 8)),
        MemoryStore(),
        Counters(),
    )
    writer = Writer(memory, buffers, io, counters)
    saving = BlockSaving(kv, copier, writer)
    blocked = torch.arange(1, BLOCK + 1), buffers_for(kv, 1), ()
    blocker = copier.save(lambda: kv.save(*blocked))
    record = known(1)
    row = torch.arange(1, BLOCK + 1)
    saving.checkpointed(record, record.tokens, row, last=False)
    before = b"".join(bytes(as_bytes(b)[row].numpy()) for b in buffers_of(pool))
    forgotten: list[str] = []
    tree = SimpleNamespace(give_up_all=lambda: forgotten.append("all"))
    service: Any = SimpleNamespace(_tree=tree, saving=saving, kv=kv)
    CakeService.pool_going(service)
    scramble(pool, 2)
    kv.go.set()
    blocker.ended.result(PATIENCE_S)
    io.run(writer.drained(), PATIENCE_S)
    copier.close()
    io.close()
    assert forgotten == ["all"]
    assert list(memory.blocks.values()) == ([] if late else [before])
    assert buffers.free == buffers.capacity
