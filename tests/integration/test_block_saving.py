"""A checkpoint stores new full blocks, once, with the right bytes and keys."""

from collections.abc import Iterator

import pytest
import torch
from kv_pools import as_bytes, buffers_for, buffers_of, load_of, mha, scramble

from sglang_cake.core.buffers import BufferPool
from sglang_cake.core.counters import Counters
from sglang_cake.core.io_thread import IoThread
from sglang_cake.core.spans import Span
from sglang_cake.integration.memory.block_saving import BlockSaving
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.prompt_load import PromptLoad
from sglang_cake.stores.memory_store import MemoryStore
from sglang_cake.testing.faulty import RecordingStore
from sglang_cake.writeback.block_writer import Writer

BLOCK, PATIENCE_S = 16, 60.0


class SavingHarness:
    def __init__(self, *, buffers: int = 8) -> None:
        self.pool = mha(256, dtype=torch.bfloat16)
        scramble(self.pool, 1)
        self.kv = DeviceKV(self.pool, block_tokens=BLOCK)
        self.memory = MemoryStore()
        self.store = RecordingStore(self.memory)
        self.io = IoThread("test-io")
        self.counters = Counters()
        self.buffers = BufferPool(buffers_for(self.kv, buffers))
        self.writer = Writer(self.store, self.buffers, self.io, self.counters)
        self.saving = BlockSaving(self.kv, self.writer)
        # SGLang's rows of slots are int32, and slots come in no order.
        order = torch.randperm(256, generator=torch.Generator().manual_seed(2)) + 1
        self.row = order.to(torch.int32)

    def checkpoint(self, load: PromptLoad, upto: int, *, last: bool = False) -> list[int]:
        """The blocks that were put because of it."""
        before = len(self.store.calls)
        self.saving.checkpointed(load, load.tokens[:upto], self.row[:upto], last=last)
        self.io.run(self.writer.drained(), PATIENCE_S)
        keys = load.chain.of(load.tokens)
        assert self.buffers.free == self.buffers.capacity
        return sorted(keys.index(key) for _, key in self.store.calls[before:])

    def expect(self, load: PromptLoad, block: int) -> None:
        """The store holds the block's very bytes."""
        slots = self.row[block * BLOCK : (block + 1) * BLOCK].long()
        wanted = b"".join(bytes(as_bytes(b)[slots].numpy()) for b in buffers_of(self.pool))
        assert self.memory.blocks[load.chain.of(load.tokens)[block]] == wanted


@pytest.fixture
def harness() -> Iterator[SavingHarness]:
    made = SavingHarness()
    yield made
    made.io.close()


def known(blocks: int, *stored: int) -> PromptLoad:
    made = load_of(blocks, block=BLOCK)
    made.agreed.lookup_done = True
    made.agreed.stored = tuple(b in stored for b in range(blocks))
    return made


def test_block_saving_full_blocks_are_stored_as_they_complete(harness: SavingHarness) -> None:
    load = known(6)
    assert harness.checkpoint(load, 2 * BLOCK + 5) == [0, 1]
    assert harness.checkpoint(load, 2 * BLOCK + 9) == []
    assert harness.checkpoint(load, 5 * BLOCK) == [2, 3, 4]
    assert harness.checkpoint(load, 5 * BLOCK, last=True) == []
    for block in range(5):
        harness.expect(load, block)
    assert len(harness.memory) == 5


def test_block_saving_stored_blocks_are_skipped(harness: SavingHarness) -> None:
    load = known(6, 1, 4)
    assert harness.checkpoint(load, 6 * BLOCK) == [0, 2, 3, 5]


def test_block_saving_loaded_blocks_are_skipped(harness: SavingHarness) -> None:
    load = known(3)
    load.meet.found([False, True, False])
    load.meet.landed(1)
    load.meet.claim(BLOCK)
    load.meet.attach(Span(BLOCK, 2 * BLOCK))
    assert harness.checkpoint(load, 3 * BLOCK) == [0, 2]


def test_block_saving_unanswered_lookup_defers_all_but_the_last_checkpoint(
    harness: SavingHarness,
) -> None:
    load = known(4)
    load.agreed.lookup_done = False
    load.agreed.stored = ()
    assert harness.checkpoint(load, 2 * BLOCK) == []
    load.agreed.lookup_done = True
    load.agreed.stored = (True, False, False, False)
    assert harness.checkpoint(load, 3 * BLOCK) == [1, 2]
    other = known(4)
    other.agreed.lookup_done = False
    other.agreed.stored = ()
    assert harness.checkpoint(other, 4 * BLOCK, last=True) == [0, 1, 2, 3]


def test_block_saving_output_tokens_make_blocks_beyond_the_prompt(harness: SavingHarness) -> None:
    load = load_of(2, block=BLOCK)
    load.agreed.lookup_done = True
    load.agreed.stored = (True, True)
    longer = load_of(4, block=BLOCK)
    harness.saving.checkpointed(load, longer.tokens, harness.row[: 4 * BLOCK], last=True)
    harness.io.run(harness.writer.drained(), PATIENCE_S)
    keys = longer.chain.of(longer.tokens)
    assert set(harness.memory.blocks) == set(keys[2:])


def test_block_saving_full_queue_skips_blocks_for_good() -> None:
    harness = SavingHarness(buffers=2)
    try:
        load = known(5)
        assert harness.checkpoint(load, 4 * BLOCK) == [0, 1]
        assert harness.counters.snapshot()["unstored_blocks", "queue_full"] == 2
        assert harness.checkpoint(load, 5 * BLOCK) == [4]
    finally:
        harness.io.close()


def test_block_saving_slots_overwritten_after_return_keep_the_stored_bytes(
    harness: SavingHarness,
) -> None:
    load = known(2)
    harness.saving.checkpointed(load, load.tokens, harness.row[: 2 * BLOCK], last=True)
    slots = harness.row[: 2 * BLOCK].long()
    wanted = [as_bytes(b)[slots].clone() for b in buffers_of(harness.pool)]
    scramble(harness.pool, 9)
    harness.io.run(harness.writer.drained(), PATIENCE_S)
    for b, old in zip(buffers_of(harness.pool), wanted, strict=True):
        as_bytes(b)[slots] = old
    harness.expect(load, 0)
    harness.expect(load, 1)
