"""Slots of landed blocks are allocated, filled, and passed on or freed, with SGLang's allocator."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import install
from faults import FaultyCopier
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_pools import (
    Staging,
    allocator_of,
    as_bytes,
    buffers_of,
    dsa,
    mha,
    record_of,
    rows_of,
    scramble,
)

from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Span
from sglang_cake.integration.memory.copier import Copier
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.kv_pool import CudaKV, DeviceKV
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.loading.meet import BlockState

BLOCK = 64


class SlotsHarness:
    """Device slots on a pool of `blocks` blocks, beside a tree that can be evicted."""

    def __init__(
        self,
        *,
        blocks: int = 8,
        page: int = 16,
        block: int = BLOCK,
        make: Callable[..., Any] = mha,
    ) -> None:
        self.block, self.page = block, page
        self.size = blocks * block
        self.pool = make(self.size, page=page)
        scramble(self.pool, 1)
        self.allocator = allocator_of(self.pool, page)
        self.kv = DeviceKV(self.pool, block_tokens=block)
        self.staging = Staging(self.kv)
        self.counters = Counters()
        self.tree: list[torch.Tensor] = []
        self.asked: list[int] = []
        self.copier = FaultyCopier(self.kv)
        self.device_slots = DeviceSlots(
            self.kv, self.copier, self.allocator, self.evict, self.counters
        )

    def evict(self, tokens: int) -> None:
        self.asked.append(tokens)
        while tokens > 0 and self.tree:
            slots = self.tree.pop()
            self.allocator.free(slots)
            tokens -= len(slots)

    def record(self, blocks: int, *, limit: int | None = None, rid: str = "r") -> PromptRecord:
        made = record_of(blocks, block=self.block, page=self.page, limit=limit, rid=rid)
        made.meet.found([True] * blocks)
        return made

    def bytes_at(self, slots: torch.Tensor) -> bytes:
        """What the pool holds at `slots`, as a block of that many tokens."""
        return b"".join(bytes(as_bytes(b)[slots[::n] // n].numpy()) for b, n in rows_of(self.pool))

    def cut(self, data: bytes, start: int, stop: int) -> bytes:
        """Tokens [start, stop) of a block's bytes."""
        parts = []
        for plane in self.kv.layout.planes:
            first, last = (
                plane.start + at // plane.row_tokens * plane.row_bytes for at in (start, stop)
            )
            parts.append(data[first:last])
        return b"".join(parts)

    def wasted(self) -> dict[str, int]:
        values = self.counters.snapshot()
        return {label: n for (name, label), n in values.items() if name == "wasted_bytes" and n}

    @property
    def free(self) -> int:
        return int(self.allocator.available_size())


@pytest.mark.parametrize(
    ("make", "page", "block"),
    [(mha, 1, BLOCK), (mha, 16, BLOCK), (mha, 64, BLOCK), (dsa, 64, 3 * 64)],
)
@pytest.mark.parametrize(("offset", "cut"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 3)])
def test_device_slots_taken_span_has_its_bytes_and_frees_the_rest(
    make: Callable[..., Any], page: int, block: int, offset: int, cut: int
) -> None:
    harness = SlotsHarness(page=page, block=block, make=make)
    offset, cut = offset * page % block, cut * page % block
    record = harness.record(3, limit=3 * block - cut)
    data = {b: harness.staging.land(record, b) for b in (2, 1, 0)}
    before = [as_bytes(b).clone() for b, _ in rows_of(harness.pool)]
    assert harness.device_slots.place(record, [0, 1, 2])
    assert harness.free == harness.size - 3 * block
    assert harness.device_slots.reclaimable_tokens == 3 * block
    placed = torch.cat([copy.slots for copy in record.memory.slots.values()])
    assert harness.staging.pool.free == 64  # the copies are complete: staging is free again
    assert all(s.used for s in harness.staging.freed)
    record.meet.advance(offset)
    span = record.meet.island()
    assert span == Span(offset, 3 * block - cut)
    slots = harness.device_slots.take_slots(record, span)
    assert len(slots) == span.tokens == len(set(slots.tolist()))
    assert harness.free == harness.size - span.tokens
    assert harness.device_slots.reclaimable_tokens == 0
    assert record.memory.slots == {}
    for b in range(3):
        start, stop = max(span.start, b * block), min(span.stop, (b + 1) * block)
        there = harness.bytes_at(slots[start - span.start : stop - span.start])
        assert there == harness.cut(data[b], start - b * block, stop - b * block)
    others = torch.ones(harness.size + page, dtype=torch.bool)
    others[placed] = False
    for (buffer, tokens), old in zip(rows_of(harness.pool), before, strict=True):
        rows = others[::tokens]
        assert torch.equal(as_bytes(buffer)[rows], old[rows])
    harness.allocator.free(slots)
    assert harness.free == harness.size
    assert harness.wasted() == {}


def test_device_slots_short_of_memory_places_the_rightmost_blocks() -> None:
    harness = SlotsHarness(blocks=2)
    record = harness.record(4)
    for b in range(4):
        harness.staging.land(record, b)
    assert not harness.device_slots.place(record, range(4))
    assert sorted(record.memory.slots) == [2, 3]
    assert sorted(record.memory.staged) == [0, 1]
    assert harness.free == 0
    assert not harness.device_slots.place(record, range(4))
    assert harness.device_slots.reclaimable_tokens == 2 * BLOCK
    harness.device_slots.discard(record, range(4), "ended")
    assert harness.free == harness.size
    assert harness.device_slots.reclaimable_tokens == 0
    assert harness.staging.pool.free == 64
    # Staged bytes are counted by whoever frees the staging, slots here; the request counts both.
    assert harness.wasted() == {"ended": 2 * harness.device_slots.block_bytes}
    assert record.memory.wasted_bytes == 4 * harness.device_slots.block_bytes
    assert [s.used for s in harness.staging.freed] == [True, True, False, False]
    # Encoded blocks, of which two were read: what crossed the link counts.
    harness.counters.add("read_blocks", 2)
    harness.counters.add("read_bytes", 600)
    assert harness.device_slots.link_bytes == 300
    assert {s.reason for s in harness.staging.freed if not s.used} == {"ended"}


def test_device_slots_error_of_a_copy_is_raised_to_its_waiter_and_to_the_next_poll() -> None:
    harness = SlotsHarness()
    record = harness.record(2)
    for b in range(2):
        harness.copier.errors[harness.staging.land(record, b)] = RuntimeError("the device is gone")
    assert harness.device_slots.place(record, range(2))
    assert harness.device_slots.copy_failed(record, range(2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            harness.device_slots.uncopied(record, range(2))
    with pytest.raises(RuntimeError, match="gone"):
        harness.device_slots.check_copies()
    harness.device_slots.check_copies()
    harness.device_slots.discard_all(record, "ended")
    assert harness.free == harness.size
    assert harness.staging.pool.free == 64


def test_device_slots_evict_the_tree_only_as_far_as_needed() -> None:
    harness = SlotsHarness(blocks=3)
    harness.tree = [harness.allocator.alloc(BLOCK), harness.allocator.alloc(BLOCK)]
    record = harness.record(2)
    harness.staging.land(record, 1)
    assert harness.device_slots.place(record, [1])
    assert harness.asked == []
    harness.staging.land(record, 0)
    assert harness.device_slots.place(record, [0])
    assert harness.asked == [BLOCK]
    assert len(harness.tree) == 1
    assert harness.device_slots.place(record, [0, 1])  # both are placed: nothing to do
    assert harness.free == 0


def test_device_slots_reclaim_takes_the_last_requests_leftmost_block() -> None:
    harness = SlotsHarness(blocks=6)
    first, last = harness.record(3, rid="first"), harness.record(3, rid="last")
    for record in (first, last):
        for b in range(3):
            harness.staging.land(record, b)
        assert harness.device_slots.place(record, range(3))
    assert harness.free == 0
    assert harness.device_slots.reclaim([first, last], 1) == BLOCK
    assert harness.free == BLOCK
    assert sorted(last.memory.slots) == [1, 2]
    assert last.meet.state(0) is BlockState.GONE
    assert harness.device_slots.reclaim([first, last], 2 * BLOCK + 1) == 3 * BLOCK
    assert last.memory.slots == {}
    assert sorted(first.memory.slots) == [1, 2]
    assert harness.device_slots.reclaim([first, last], 100 * BLOCK) == 2 * BLOCK
    assert harness.free == harness.size
    assert harness.device_slots.reclaimable_tokens == 0
    assert harness.wasted() == {"memory": 6 * harness.device_slots.block_bytes}


# ---- slots that are reserved before the bytes come ----


def test_device_slots_reserved_block_is_copied_when_its_bytes_come() -> None:
    harness = SlotsHarness()
    record = harness.record(4)
    harness.device_slots.reserve(record, [3, 2])
    assert record.reserved == [2, 3]
    assert harness.device_slots.reclaimable_tokens == 2 * BLOCK
    data, staged = harness.staging.fetch(3)
    assert harness.device_slots.take_bytes(record, 3, staged)
    assert harness.staging.pool.free == 64  # its host memory is free before the block lands
    assert record.meet.landed(3)
    harness.device_slots.stage(record, 3, None)
    assert record.reserved == [2]
    assert harness.bytes_at(record.memory.slots[3].slots) == data
    _, other = harness.staging.fetch(1)
    assert not harness.device_slots.take_bytes(record, 1, other)  # no slots for it
    harness.device_slots.refuse(record, other, "overtaken")
    harness.device_slots.discard_all(record, "ended")
    assert harness.free == harness.size
    assert harness.device_slots.reclaimable_tokens == 0
    # Block 2 never came, and counts for nothing. Staged bytes are counted by the loader.
    assert harness.wasted() == {"ended": harness.device_slots.block_bytes}


def test_device_slots_reserved_after_the_bytes_came_is_copied_when_it_lands() -> None:
    harness = SlotsHarness()
    record = harness.record(2)
    data, staged = harness.staging.fetch(1)
    assert not harness.device_slots.take_bytes(record, 1, staged)
    harness.device_slots.reserve(record, [1])
    assert record.meet.landed(1)
    harness.device_slots.stage(record, 1, staged)
    assert harness.staging.pool.free == 64
    assert harness.bytes_at(record.memory.slots[1].slots) == data


def test_device_slots_reserve_takes_what_memory_there_is_in_the_given_order() -> None:
    harness = SlotsHarness(blocks=3)
    harness.tree = [harness.allocator.alloc(BLOCK)]
    record = harness.record(6)
    harness.device_slots.reserve(record, [5, 4, 3, 2])
    assert record.reserved == [3, 4, 5]
    assert harness.asked == [2 * BLOCK]
    harness.device_slots.reserve(record, [5, 4, 3, 2])
    assert record.reserved == [3, 4, 5]
    harness.device_slots.discard(record, [4, 5, 9], "overtaken")
    assert record.reserved == [3]
    assert harness.free == 2 * BLOCK
    assert harness.wasted() == {}


@pytest.mark.parametrize("page", [1, 16])
def test_device_slots_that_wait_keep_no_memory_but_their_own(page: int) -> None:
    harness = SlotsHarness(blocks=64, page=page)
    record = harness.record(3)
    harness.device_slots.reserve(record, [2])
    harness.device_slots.reserve(record, [1, 0])
    copies = record.memory.slots.values()
    kept = {s.data_ptr(): s.nbytes() for s in (c.slots.untyped_storage() for c in copies)}
    assert sum(kept.values()) == sum(copy.slots.nbytes for copy in copies)


def test_device_slots_reclaim_takes_reserved_slots_first_and_computes_their_blocks() -> None:
    harness = SlotsHarness()
    record = harness.record(4)
    harness.staging.land(record, 3)
    assert harness.device_slots.place(record, [3])
    harness.device_slots.reserve(record, [2, 1])
    assert harness.device_slots.reclaim([record], 1) == BLOCK
    assert record.meet.state(1) is BlockState.GONE  # its bytes may have been copied on one rank
    assert harness.device_slots.reclaim([record], 2 * BLOCK) == 2 * BLOCK
    assert record.meet.state(3) is BlockState.GONE
    assert harness.free == harness.size
    assert harness.device_slots.reclaimable_tokens == 0


def test_device_slots_block_that_comes_after_its_slots_are_withdrawn_is_not_copied() -> None:
    harness = SlotsHarness()
    record = harness.record(2)
    harness.device_slots.reserve(record, [1])
    copy = record.memory.slots[1]
    harness.device_slots.discard(record, [1], "overtaken")
    assert copy.withdraw() is None
    before = [as_bytes(b).clone() for b in buffers_of(harness.pool)]
    _, staged = harness.staging.fetch(1)
    assert not harness.device_slots.take_bytes(record, 1, staged)
    for buffer, old in zip(buffers_of(harness.pool), before, strict=True):
        assert torch.equal(as_bytes(buffer), old)


@settings(max_examples=60)
@given(
    page=st.sampled_from([1, 4, 16]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(
                ["reserve", "come", "land", "place", "take", "discard", "reclaim", "advance"]
            ),
            st.integers(0, 1),
            st.integers(0, 5),
        ),
        max_size=40,
    ),
)
def test_device_slots_random_actions_lose_no_slot(
    page: int, actions: list[tuple[str, int, int]]
) -> None:
    harness = SlotsHarness(blocks=7, page=page, block=16)
    records = [harness.record(6, rid=str(n), limit=6 * 16 - 1) for n in range(2)]
    given_on = 0
    for action, who, number in actions:
        record = records[who]
        meet, device_slots = record.meet, harness.device_slots
        wanted = number < meet.block_count and meet.state(number) is BlockState.WANTED
        if action == "reserve" and wanted:
            device_slots.reserve(record, [number])
        elif action == "come" and wanted:
            _, staged = harness.staging.fetch(number)
            taken = device_slots.take_bytes(record, number, staged)
            assert meet.landed(number)
            device_slots.stage(record, number, None if taken else staged)
        elif action == "land" and wanted and number not in record.memory.slots:
            harness.staging.land(record, number)
        elif action == "place":
            device_slots.place(record, list(record.memory.staged))
        elif action == "take" and (span := meet.island()) is not None:
            if device_slots.place(record, meet.blocks_of(span)):
                given_on += len(device_slots.take_slots(record, span))
                meet.attach(span)
        elif action == "discard":
            here = [number] if meet.state(number) is BlockState.LANDED else []
            device_slots.discard(record, here, "memory")
            for b in here:
                meet.dropped(b)
        elif action == "reclaim":
            device_slots.reclaim(records, number * 5)
        elif action == "advance":
            front = min(meet.front + number * page, meet.limit)
            device_slots.discard(record, meet.advance(front), "in_tree")
            computed = [b for b in record.reserved if b < meet.first_loadable]
            device_slots.discard(record, computed, "overtaken")
        held = sum(len(copy.slots) for r in records for copy in r.memory.slots.values())
        assert device_slots.reclaimable_tokens == held
        assert harness.free == harness.size - held - given_on
        in_staging = sum(len(r.memory.staged) for r in records)
        assert harness.staging.pool.free == 64 - in_staging
    for record in records:
        harness.device_slots.discard_all(record, "ended")
    assert harness.device_slots.reclaimable_tokens == 0
    assert harness.free == harness.size - given_on
    assert harness.staging.pool.free == 64


@pytest.mark.parametrize("seed", range(8))
def test_device_slots_copies_start_when_the_device_knows_the_slots(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With pages of several tokens, SGLang's allocator computes them on the device."""
    install(monkeypatch, seed)
    pool, stream = mha(2 * BLOCK), torch.cuda.current_stream()
    numbers = torch.arange(BLOCK, 2 * BLOCK)

    def alloc(tokens: int) -> torch.Tensor:
        slots = torch.zeros(tokens, dtype=torch.int64)
        with torch.cuda.stream(stream):
            for _ in range(20):
                slots.copy_(slots)
            return slots.copy_(numbers[:tokens])

    kv = CudaKV(pool, block_tokens=BLOCK, forward_stream=None)
    staging = Staging(kv)
    allocator: Any = SimpleNamespace(alloc=alloc, available_size=lambda: BLOCK)
    device_slots = DeviceSlots(kv, Copier(kv), allocator, lambda tokens: None, Counters())
    record = record_of(1, block=BLOCK)
    record.meet.found([True])
    data = staging.land(record, 0)
    with torch.cuda.stream(stream):
        assert device_slots.place(record, [0])
    torch.cuda.synchronize()
    found = b"".join(bytes(as_bytes(b)[numbers].numpy()) for b in buffers_of(pool))
    assert found == data


def test_device_slots_freed_in_a_forward_are_on_the_list_that_the_scheduler_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a failure of cake there. Elsewhere the host does not wait."""
    install(monkeypatch, seed=0)
    forward: Any = torch.cuda.Stream()
    free: list[torch.Tensor] = []

    def free_segment(slots: torch.Tensor, start_pos: int) -> None:
        current: Any = torch.cuda.current_stream()
        current.launch(lambda: free.append(slots))

    kv = CudaKV(mha(2 * BLOCK), block_tokens=BLOCK, forward_stream=forward)
    allocator: Any = SimpleNamespace(free_segment=free_segment)
    device_slots = DeviceSlots(kv, Copier(kv), allocator, lambda tokens: None, Counters())
    with torch.cuda.stream(forward):
        device_slots.free(torch.arange(BLOCK))
    assert len(free) == 1
    device_slots.free(torch.arange(BLOCK))
    assert len(free) == 1
