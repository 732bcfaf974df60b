"""Pools in one memory, where SGLang moves slots to other rows (`--enable-unified-memory`)."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_pools import (
    Staging,
    as_bytes,
    buffers_for,
    mha,
    record_of,
    rows_of,
    since_0_5_23,
    unified,
    unified_draft,
    windows,
)

from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Span
from sglang_cake.integration.memory.copier import Copier, CopyThread, SlotCopy
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.end_states import END_POOLS
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.memory.pool_planes import DraftPools

BLOCK = 8
PATIENCE_S = 60.0
POOLS: dict[str, Callable[..., Any]] = {
    "windows": partial(unified, 160),
    "windows, pages": partial(unified, 160, page=4),
    "states": partial(unified, 160, beside="states"),
    "windows and states": partial(unified, 160, beside="both"),
    "states beside latent rows, pages": partial(unified, 160, page=4, beside="states", mla=True),
}


class OneMemory:
    """A pool of full attention in a memory that it shares.

    Args:
        translate: wraps what gives the rows of slots.
        draft: of a draft model: "beside" the rows of the model, or with a pool "of its own".
    """

    def __init__(
        self,
        kind: str,
        monkeypatch: pytest.MonkeyPatch,
        translate: Callable[..., Any] | None = None,
        draft: str | None = None,
    ) -> None:
        self.allocator = POOLS[kind](drafts=["full"] if draft == "beside" else [])
        self.full = self.allocator.full_attn_allocator
        pool = self.allocator.get_kvcache()
        self.pool = pool.full_kv_pool
        self.before_wait: Callable[[], object] = lambda: None
        # SGLang's allocators wait for transfers on the current stream, here without a GPU.
        self.stream = SimpleNamespace(wait_event=self._wait_event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        if translate is not None:
            own = self.pool.host_transfer_translate
            self.pool.host_transfer_translate = lambda slots: translate(own(slots))
        apart = [getattr(pool, name, None) for name in END_POOLS]
        models: list[Any] = []
        if draft == "beside":
            models = [unified_draft(self.allocator, runner) for runner in range(2)]
        elif draft == "of its own":  # SGLang gives it rows for all numbers of slots
            page = self.allocator.page_size
            models = [mha(-(-(self.full.max_slots - 1) // page) * page, page=page)]
        drafts = DraftPools.of(models, pool)
        assert drafts == DraftPools(rows=tuple(models))
        self.kv = DeviceKV(
            pool,
            block_tokens=BLOCK,
            apart=[each for each in apart if each is not None],
            drafts=drafts.rows,
        )
        # In block order, and whether SGLang moves its rows.
        self.planes = [
            (buffer, number == 0 or draft == "beside")
            for number, each in enumerate((self.pool, *models))
            for buffer, _ in rows_of(each)
        ]

    def _wait_event(self, event: Any) -> None:
        self.before_wait()
        event.wait(self.stream)

    def rows(self, slots: torch.Tensor, moves: bool = True) -> torch.Tensor:
        found: torch.Tensor = self.allocator.translate_kv_loc(slots) if moves else slots
        return found

    def fragmented(self) -> torch.Tensor:
        """Slots of three blocks, between holes."""
        slots = list(self.full.alloc(6 * BLOCK).split(BLOCK))
        for hole in slots[::2]:
            self.full.free_segment(hole, start_pos=0)
        return torch.cat(slots[1::2])

    def move(self, slots: torch.Tensor) -> None:
        """Have SGLang move slots, and other bytes in all rows but those where `slots` are now."""
        before = self.rows(slots)
        assert self.full.flush_for_allocation() > 0
        assert not torch.equal(self.rows(slots), before)
        for buffer, moves in self.planes:
            others = torch.ones(len(buffer), dtype=torch.bool)
            others[self.rows(slots, moves)] = False
            as_bytes(buffer)[others] = 0xEE

    def fill(self, slots: torch.Tensor) -> None:
        for number, (buffer, moves) in enumerate(self.planes):
            rows = as_bytes(buffer)
            values = torch.arange(len(slots) * rows.shape[1]).view(len(slots), -1) + number
            rows[self.rows(slots, moves)] = values.to(torch.uint8)

    def bytes_in(self, slots: torch.Tensor) -> list[bytes]:
        """The blocks that are in slots, plane by plane."""
        return [
            b"".join(as_bytes(b)[self.rows(part, m)].numpy().tobytes() for b, m in self.planes)
            for part in slots.split(BLOCK)
        ]


@pytest.mark.parametrize(
    "draft", [None, *(pytest.param(each, marks=since_0_5_23) for each in ("beside", "of its own"))]
)
@pytest.mark.parametrize(
    "kind",  # SGLang 0.5.22 moves latent rows with Triton
    [pytest.param(kind, marks=[since_0_5_23] * ("latent" in kind)) for kind in POOLS],
)
def test_unified_memory_blocks_keep_their_bytes_when_slots_move(
    kind: str, draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = OneMemory(kind, monkeypatch, draft=draft)
    assert side.kv.moves
    slots = side.fragmented()
    side.fill(slots)
    stored = buffers_for(side.kv, 3)
    side.kv.save(slots, stored, ())
    assert [bytes(each.view) for each in stored] == side.bytes_in(slots)
    side.move(slots)
    again = buffers_for(side.kv, 3)
    side.kv.save(slots, again, ())
    assert [bytes(each.view) for each in again] == [bytes(each.view) for each in stored]
    other = side.full.alloc(BLOCK)
    side.kv.load(stored[1], other, ())
    assert side.bytes_in(other) == [bytes(stored[1].view)]


def test_unified_memory_blocks_are_those_of_pools_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = windows(160)
    plain = DeviceKV(apart, block_tokens=BLOCK, apart=[apart.swa_kv_pool])
    assert OneMemory("windows", monkeypatch).kv.layout == plain.layout


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("way", ["load", "save"])
@pytest.mark.parametrize("kind", ["windows", "states"])
def test_unified_memory_slots_do_not_move_under_a_copy(
    kind: str, way: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy knows its rows when SGLang moves slots. With the control: an allocator that does not
    wait for the copier makes it read or write where its slots were."""
    knows_rows, goes_on = threading.Event(), threading.Event()

    def halting(rows: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            knows_rows.set()
            assert goes_on.wait(PATIENCE_S)
        return rows

    side = OneMemory(kind, monkeypatch, halting)
    side.before_wait = goes_on.set
    copier = CopyThread(side.kv, patience_s=60.0, movers=[side.full] if waits else [])
    try:
        slots = side.fragmented()
        side.fill(slots)
        wanted = side.bytes_in(slots)
        if way == "save":
            buffers = buffers_for(side.kv, 3)
            save = copier.save(lambda: side.kv.save(slots, buffers, ()))
        else:
            staging = Staging(side.kv)
            landed = [staging.fetch(number) for number in range(3)]
            wanted = [data for data, _ in landed]
            copies = [SlotCopy(side.kv, part, ()) for part in slots.split(BLOCK)]
            for copy, (_, staged) in zip(copies, landed, strict=True):
                assert copy.begin()
                copier.load(copy, staged)
        assert knows_rows.wait(PATIENCE_S)
        side.move(slots)
        goes_on.set()
        if way == "save":
            save.ended.result(PATIENCE_S)
            found = [bytes(each.view) for each in buffers]
        else:
            assert None not in copier.wait_launched([copy.launched for copy in copies])
            found = side.bytes_in(slots)
    finally:
        goes_on.set()
        copier.close()
    assert (found == wanted) == waits


def test_unified_memory_slots_are_given_to_blocks_that_have_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And to none before: their copies would begin while SGLang moves slots."""
    side = OneMemory("windows", monkeypatch)
    device = DeviceSlots(
        side.kv,
        Copier(side.kv, movers=[side.full]),
        side.full,
        lambda tokens: None,
        Counters(),
    )
    record = record_of(2, block=BLOCK)
    record.meet.found([True, True])
    device.reserve(record, range(2))
    assert not record.memory.slots
    earlier = side.full.alloc(2 * BLOCK)
    staging = Staging(side.kv)
    wanted = [staging.land(record, block) for block in range(2)]
    assert device.place(record, range(2))
    side.full.free_segment(earlier, start_pos=0)
    placed = torch.cat([record.memory.slots[block].slots for block in range(2)])
    side.move(placed)
    slots = device.take_slots(record, Span(0, 2 * BLOCK))
    assert torch.equal(slots, placed)
    assert side.bytes_in(slots) == wanted


@pytest.mark.parametrize("waits", [True, False])
def test_unified_memory_windows_between_two_pools_do_not_move_under_a_copy(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's allocator of such a pool waits for no transfer; it asks whether it may move. With
    the control."""
    knows_rows, goes_on = threading.Event(), threading.Event()

    def wait_event(event: Any) -> None:
        event.wait(stream)

    stream = SimpleNamespace(wait_event=wait_event)

    def current_stream() -> Any:
        goes_on.set()
        return stream

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    allocator = unified(160, beside="both")
    windows = allocator.swa_attn_allocator
    pool = allocator.get_kvcache().swa_kv_pool
    kv = DeviceKV(pool, block_tokens=BLOCK)
    slots = list(allocator.alloc(6 * BLOCK).split(BLOCK))
    kept = torch.cat(slots[1::2])
    rows = allocator.translate_loc_from_full_to_swa(kept)
    for number, (buffer, _) in enumerate(rows_of(pool)):
        as_bytes(buffer)[rows] = torch.arange(len(rows), dtype=torch.uint8)[:, None] + number
    buffers, wanted = buffers_for(kv, 3), buffers_for(kv, 3)
    kv.save(rows, wanted, ())
    copier = CopyThread(kv, patience_s=60.0, movers=[windows] if waits else [])

    def launch() -> Any:
        knows_rows.set()
        assert goes_on.wait(PATIENCE_S)
        return kv.save(rows, buffers, ())

    try:
        save = copier.save(launch)
        assert knows_rows.wait(PATIENCE_S)
        for hole in slots[::2]:
            allocator.free_segment(hole, start_pos=0)
        assert windows.compact_holes(retreat_side="high") + windows.compact_holes(
            retreat_side="low"
        )
        now = allocator.translate_loc_from_full_to_swa(kept)
        assert not torch.equal(now, rows)
        for buffer, _ in rows_of(pool):
            others = torch.ones(len(buffer), dtype=torch.bool)
            others[now] = False
            as_bytes(buffer)[others] = 0xEE
        goes_on.set()
        save.ended.result(PATIENCE_S)
    finally:
        goes_on.set()
        copier.close()
    found = [bytes(each.view) for each in buffers]
    assert (found == [bytes(each.view) for each in wanted]) == waits
