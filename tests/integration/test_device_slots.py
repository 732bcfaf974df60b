"""Slots of landed blocks: found, filled, given on or given back. SGLang's allocator judges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_pools import Staging, allocator_of, as_bytes, buffers_of, mha, restore_of, scramble

from sglang_cake.core.counters import Counters
from sglang_cake.core.spans import Span
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.restore import Restore
from sglang_cake.loading.meet import BlockState

BLOCK = 64


class Desk:
    """A landing on a pool of `blocks` blocks, beside a tree that can give `evictable` tokens."""

    def __init__(self, *, blocks: int = 8, page: int = 16, block: int = BLOCK) -> None:
        self.block, self.page = block, page
        self.size = blocks * block
        self.pool = mha(self.size, page=page)
        scramble(self.pool, 1)
        self.allocator = allocator_of(self.pool, page)
        self.kv = DeviceKV(self.pool, block_tokens=block)
        self.staging = Staging(self.kv)
        self.counters = Counters()
        self.tree: list[torch.Tensor] = []
        self.asked: list[int] = []
        self.took_s: list[float] = []
        self.device_slots = DeviceSlots(
            self.kv, self.allocator, self.evict, self.counters, lambda took_s: None
        )

    def evict(self, tokens: int) -> None:
        self.asked.append(tokens)
        while tokens > 0 and self.tree:
            slots = self.tree.pop()
            self.allocator.free(slots)
            tokens -= len(slots)

    def restore(self, blocks: int, *, limit: int | None = None, rid: str = "r") -> Restore:
        made = restore_of(blocks, block=self.block, page=self.page, limit=limit, rid=rid)
        made.meet.found([True] * blocks)
        return made

    def bytes_at(self, slots: torch.Tensor) -> bytes:
        """What the pool holds at `slots`, as a block of that many tokens."""
        return b"".join(bytes(as_bytes(b)[slots].numpy()) for b in buffers_of(self.pool))

    def cut(self, data: bytes, start: int, stop: int) -> bytes:
        """Tokens [start, stop) of a block's bytes."""
        planes, at = [], 0
        for size in self.kv.layout.plane_token_bytes:
            planes.append(data[at + start * size : at + stop * size])
            at += size * self.block
        return b"".join(planes)

    def wasted(self) -> dict[str, int]:
        values = self.counters.snapshot()
        return {label: n for (name, label), n in values.items() if name == "wasted_bytes" and n}

    @property
    def free(self) -> int:
        return int(self.allocator.available_size())


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(("offset", "cut"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 3)])
def test_a_span_gets_its_bytes_and_the_rest_of_its_slots_go_back(
    page: int, offset: int, cut: int
) -> None:
    desk = Desk(page=page)
    offset, cut = offset * page % BLOCK, cut * page % BLOCK
    restore = desk.restore(3, limit=3 * BLOCK - cut)
    data = {b: desk.staging.land(restore, b) for b in (2, 1, 0)}
    before = [as_bytes(b).clone() for b in buffers_of(desk.pool)]
    assert desk.device_slots.place(restore, [0, 1, 2])
    assert desk.free == desk.size - 3 * BLOCK
    assert desk.device_slots.held_tokens == 3 * BLOCK
    placed = torch.cat(list(restore.slots.values()))
    assert desk.staging.pool.free == 64  # the copies are complete: staging is free again
    assert all(s.used for s in desk.staging.freed)
    restore.meet.advance(offset)
    span = restore.meet.island()
    assert span == Span(offset, 3 * BLOCK - cut)
    slots = desk.device_slots.take(restore, span)
    assert len(slots) == span.tokens == len(set(slots.tolist()))
    assert desk.free == desk.size - span.tokens
    assert desk.device_slots.held_tokens == 0
    assert restore.slots == {}
    for b in range(3):
        start, stop = max(span.start, b * BLOCK), min(span.stop, (b + 1) * BLOCK)
        there = desk.bytes_at(slots[start - span.start : stop - span.start])
        assert there == desk.cut(data[b], start - b * BLOCK, stop - b * BLOCK)
    others = torch.ones(desk.size + page, dtype=torch.bool)
    others[placed] = False
    for buffer, old in zip(buffers_of(desk.pool), before, strict=True):
        assert torch.equal(as_bytes(buffer)[others], old[others])
    desk.allocator.free(slots)
    assert desk.free == desk.size
    assert desk.wasted() == {}


def test_without_memory_for_all_the_rightmost_are_placed() -> None:
    desk = Desk(blocks=2)
    restore = desk.restore(4)
    for b in range(4):
        desk.staging.land(restore, b)
    assert not desk.device_slots.place(restore, range(4))
    assert sorted(restore.slots) == [2, 3]
    assert sorted(restore.staged) == [0, 1]
    assert desk.free == 0
    assert not desk.device_slots.place(restore, range(4))
    assert desk.device_slots.held_tokens == 2 * BLOCK
    desk.device_slots.discard(restore, range(4), "ended")
    assert desk.free == desk.size
    assert desk.device_slots.held_tokens == 0
    assert desk.staging.pool.free == 64
    # Staged bytes are counted by whoever frees the staging, slots here; the request counts both.
    assert desk.wasted() == {"ended": 2 * desk.device_slots.block_bytes}
    assert restore.wasted_bytes == 4 * desk.device_slots.block_bytes
    assert [s.used for s in desk.staging.freed] == [True, True, False, False]
    # Encoded blocks, of which two were read: what crossed the link counts.
    desk.counters.add("read_blocks", 2)
    desk.counters.add("read_bytes", 600)
    assert desk.device_slots.link_bytes == 300
    assert {s.reason for s in desk.staging.freed if not s.used} == {"ended"}


def test_the_tree_gives_way_only_as_far_as_needed() -> None:
    desk = Desk(blocks=3)
    desk.tree = [desk.allocator.alloc(BLOCK), desk.allocator.alloc(BLOCK)]
    restore = desk.restore(2)
    desk.staging.land(restore, 1)
    assert desk.device_slots.place(restore, [1])
    assert desk.asked == []
    desk.staging.land(restore, 0)
    assert desk.device_slots.place(restore, [0])
    assert desk.asked == [BLOCK]
    assert len(desk.tree) == 1
    assert desk.device_slots.place(restore, [0, 1])  # both are placed: nothing to do
    assert desk.free == 0


def test_reclaim_takes_the_last_request_first_and_its_leftmost_block() -> None:
    desk = Desk(blocks=6)
    first, last = desk.restore(3, rid="first"), desk.restore(3, rid="last")
    for restore in (first, last):
        for b in range(3):
            desk.staging.land(restore, b)
        assert desk.device_slots.place(restore, range(3))
    assert desk.free == 0
    assert desk.device_slots.reclaim([first, last], 1) == BLOCK
    assert desk.free == BLOCK
    assert sorted(last.slots) == [1, 2]
    assert last.meet.state(0) is BlockState.GONE
    assert desk.device_slots.reclaim([first, last], 2 * BLOCK + 1) == 3 * BLOCK
    assert last.slots == {}
    assert sorted(first.slots) == [1, 2]
    assert desk.device_slots.reclaim([first, last], 100 * BLOCK) == 2 * BLOCK
    assert desk.free == desk.size
    assert desk.device_slots.held_tokens == 0
    assert desk.wasted() == {"memory": 6 * desk.device_slots.block_bytes}


class Unfinished:
    """A copy that the device has not completed."""

    complete = False

    def done(self) -> bool:
        return self.complete

    def seconds(self) -> float:
        return 0.5


def test_staging_is_held_until_the_copy_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    copies: list[Unfinished] = []
    load: Callable[..., Any] = desk.kv.load

    def slow(*args: Any) -> Unfinished:
        load(*args)
        copies.append(Unfinished())
        return copies[-1]

    monkeypatch.setattr(desk.kv, "load", slow)
    restore = desk.restore(3)
    for b in (2, 1):
        desk.staging.land(restore, b)
        assert desk.device_slots.place(restore, [b])
    assert desk.staging.pool.free == 62
    desk.device_slots.discard(restore, [2], "overtaken")  # slots go back; the host bytes later
    assert desk.free == desk.size - BLOCK
    assert desk.staging.pool.free == 62
    copies[1].complete = True
    desk.device_slots.release_copied()
    assert desk.staging.pool.free == 62  # copies complete in order
    copies[0].complete = True
    desk.device_slots.release_copied()
    assert desk.staging.pool.free == 64


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    page=st.sampled_from([1, 4, 16]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["land", "place", "take", "discard", "reclaim", "advance"]),
            st.integers(0, 1),
            st.integers(0, 5),
        ),
        max_size=40,
    ),
)
def test_slots_are_free_or_held_or_given_on(page: int, actions: list[tuple[str, int, int]]) -> None:
    desk = Desk(blocks=7, page=page, block=16)
    restores = [desk.restore(6, rid=str(n), limit=6 * 16 - 1) for n in range(2)]
    given_on = 0
    for action, who, number in actions:
        restore = restores[who]
        meet, device_slots = restore.meet, desk.device_slots
        if action == "land" and number < meet.blocks:
            if meet.state(number) is BlockState.WANTED:
                desk.staging.land(restore, number)
        elif action == "place":
            device_slots.place(restore, list(restore.staged))
        elif action == "take" and (span := meet.island()) is not None:
            if device_slots.place(restore, meet.blocks_of(span)):
                given_on += len(device_slots.take(restore, span))
                meet.attach(span)
        elif action == "discard":
            here = [b for b in (number,) if b in restore.staged or b in restore.slots]
            device_slots.discard(restore, here, "memory")
            for b in here:
                meet.dropped(b)
        elif action == "reclaim":
            device_slots.reclaim(restores, number * 5)
        elif action == "advance":
            front = min(meet.front + number * page, meet.limit)
            device_slots.discard(restore, meet.advance(front), "in_tree")
        held = sum(len(s) for r in restores for s in r.slots.values())
        assert device_slots.held_tokens == held
        assert desk.free == desk.size - held - given_on
        in_staging = sum(len(r.staged) for r in restores)
        assert desk.staging.pool.free == 64 - in_staging
    for restore in restores:
        desk.device_slots.discard(restore, {*restore.staged, *restore.slots}, "ended")
    assert desk.device_slots.held_tokens == 0
    assert desk.free == desk.size - given_on
    assert desk.staging.pool.free == 64
