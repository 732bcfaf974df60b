"""What a checkpoint sends to the store: new full blocks, once, with the right bytes and keys."""

from collections.abc import Iterator

import pytest
import torch
from kv_pools import as_bytes, buffers_of, mha, restore_of, scramble

from sglang_cake.core.buffers import BufferPool
from sglang_cake.core.counters import Counters
from sglang_cake.core.io_thread import IoThread
from sglang_cake.core.spans import Span
from sglang_cake.integration.memory.block_saving import BlockSaving
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.restore import Restore
from sglang_cake.stores.memory_store import MemoryStore
from sglang_cake.testing.faulty import RecordingStore
from sglang_cake.writeback.block_writer import Writer

BLOCK, PATIENCE_S = 16, 60.0


class Desk:
    def __init__(self, *, buffers: int = 8) -> None:
        self.pool = mha(256, dtype=torch.bfloat16)
        scramble(self.pool, 1)
        self.kv = DeviceKV(self.pool, block_tokens=BLOCK)
        self.memory = MemoryStore()
        self.store = RecordingStore(self.memory)
        self.io = IoThread("test-io")
        self.counters = Counters()
        self.buffers = BufferPool(buffers, self.kv.new_buffer)
        self.saving = BlockSaving(self.kv, Writer(self.store, self.buffers, self.io, self.counters))
        # SGLang's rows of slots are int32, and slots come in no order.
        order = torch.randperm(256, generator=torch.Generator().manual_seed(2)) + 1
        self.row = order.to(torch.int32)

    def checkpoint(self, restore: Restore, upto: int, *, last: bool = False) -> list[int]:
        """The blocks that were put because of it."""
        before = len(self.store.calls)
        self.saving.checkpointed(restore, restore.tokens[:upto], self.row[:upto], last=last)
        self.io.run(self.saving._writer.drained(), PATIENCE_S)
        keys = restore.chain.of(restore.tokens)
        assert self.buffers.free == self.buffers.capacity
        return sorted(keys.index(key) for _, key in self.store.calls[before:])

    def expect(self, restore: Restore, block: int) -> None:
        """The store holds the block's very bytes."""
        slots = self.row[block * BLOCK : (block + 1) * BLOCK].long()
        wanted = b"".join(bytes(as_bytes(b)[slots].numpy()) for b in buffers_of(self.pool))
        assert self.memory.blocks[restore.chain.of(restore.tokens)[block]] == wanted


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.io.close()


def known(blocks: int, *stored: int) -> Restore:
    made = restore_of(blocks, block=BLOCK)
    made.known, made.stored = True, tuple(b in stored for b in range(blocks))
    return made


def test_full_blocks_are_stored_as_they_are_completed(desk: Desk) -> None:
    restore = known(6)
    assert desk.checkpoint(restore, 2 * BLOCK + 5) == [0, 1]
    assert desk.checkpoint(restore, 2 * BLOCK + 9) == []
    assert desk.checkpoint(restore, 5 * BLOCK) == [2, 3, 4]
    assert desk.checkpoint(restore, 5 * BLOCK, last=True) == []
    for block in range(5):
        desk.expect(restore, block)
    assert len(desk.memory) == 5


def test_what_is_stored_is_not_stored_again(desk: Desk) -> None:
    restore = known(6, 1, 4)
    assert desk.checkpoint(restore, 6 * BLOCK) == [0, 2, 3, 5]


def test_what_was_loaded_is_not_stored_again(desk: Desk) -> None:
    restore = known(3)
    restore.meet.found([False, True, False])
    restore.meet.landed(1)
    restore.meet.claim(BLOCK)
    restore.meet.attach(Span(BLOCK, 2 * BLOCK))
    assert desk.checkpoint(restore, 3 * BLOCK) == [0, 2]


def test_an_unanswered_lookup_puts_storing_off_and_the_end_does_not(desk: Desk) -> None:
    restore = known(4)
    restore.known, restore.stored = False, ()
    assert desk.checkpoint(restore, 2 * BLOCK) == []
    restore.known, restore.stored = True, (True, False, False, False)
    assert desk.checkpoint(restore, 3 * BLOCK) == [1, 2]
    other = known(4)
    other.known, other.stored = False, ()
    assert desk.checkpoint(other, 4 * BLOCK, last=True) == [0, 1, 2, 3]


def test_output_tokens_make_blocks_beyond_the_prompt(desk: Desk) -> None:
    restore = restore_of(2, block=BLOCK)
    restore.known, restore.stored = True, (True, True)
    longer = restore_of(4, block=BLOCK)
    desk.saving.checkpointed(restore, longer.tokens, desk.row[: 4 * BLOCK], last=True)
    desk.io.run(desk.saving._writer.drained(), PATIENCE_S)
    keys = longer.chain.of(longer.tokens)
    assert set(desk.memory.blocks) == set(keys[2:])


def test_a_full_queue_skips_blocks_for_good() -> None:
    desk = Desk(buffers=2)
    try:
        restore = known(5)
        assert desk.checkpoint(restore, 4 * BLOCK) == [0, 1]
        assert desk.counters.snapshot()["unstored_blocks", "queue_full"] == 2
        assert desk.checkpoint(restore, 5 * BLOCK) == [4]
    finally:
        desk.io.close()


def test_slots_may_be_overwritten_as_soon_as_the_call_returns(desk: Desk) -> None:
    restore = known(2)
    desk.saving.checkpointed(restore, restore.tokens, desk.row[: 2 * BLOCK], last=True)
    slots = desk.row[: 2 * BLOCK].long()
    wanted = [as_bytes(b)[slots].clone() for b in buffers_of(desk.pool)]
    scramble(desk.pool, 9)
    desk.io.run(desk.saving._writer.drained(), PATIENCE_S)
    for b, old in zip(buffers_of(desk.pool), wanted, strict=True):
        as_bytes(b)[slots] = old
    desk.expect(restore, 0)
    desk.expect(restore, 1)
