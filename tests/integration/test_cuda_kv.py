"""Copies of blocks are ordered with forwards on a GPU, whatever order the streams run in, and take
no more device memory than they may."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeEvent, FakeRecord, PlainRowKernel, install
from hypothesis import given
from hypothesis import strategies as st
from kv_pools import as_bytes, buffers_for, buffers_of, mha, record_of, since_0_5_23, unified
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.server_args import ServerArgs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_cake.codecs.catalogue import chain_of
from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import PAGE_BYTES, Buffer, BufferPool, on_page
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import IoThread
from sglang_cake.integration.build import device_kv
from sglang_cake.integration.memory.block_saving import BlockSaving, Writer
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.memory.copier import CopyThread
from sglang_cake.integration.memory.end_states import (
    EndPart,
    EndSlots,
    EndStates,
    recurrent_states,
    window_rows,
)
from sglang_cake.integration.memory.kv_pool import (
    COPY_BYTES,
    PIECE_BYTES,
    Copy,
    CopyMemory,
    CopyStreams,
    CudaKV,
    capture_mode_exchange,
    exchange_capture_mode,
    pieces_of,
)
from sglang_cake.integration.overlap.layer_gate import CudaRows
from sglang_cake.testing.memory_store import MemoryStore

BLOCK, SEEDS = 16, range(12)
PLACE_BYTES = 4096  # of which a block takes several


class GpuHarness:
    """A `CudaKV`, and forwards that write to slots and read them.

    Args: place_bytes: of a place for copies; None: its own choice.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seed: int,
        pool: Any = None,
        kernel: type[PlainRowKernel] = PlainRowKernel,
        place_bytes: int | None = None,
        drafts: Sequence[Any] = (),
    ) -> None:
        self.cuda: FakeCuda = install(monkeypatch, seed, kernel=kernel)
        self.pool = mha(12 * BLOCK) if pool is None else pool
        self.forward: Any = torch.cuda.Stream()
        streams = None
        if place_bytes is not None:
            memory = CopyMemory(place_bytes, in_places=2, out_places=1)
            streams = CopyStreams(torch.device("cpu"), memory, self.forward)
        self.kv = CudaKV(
            self.pool,
            block_tokens=BLOCK,
            forward_stream=self.forward,
            streams=streams,
            drafts=drafts,
        )
        order = torch.randperm(12 * BLOCK, generator=torch.Generator().manual_seed(seed)) + 1
        self.slots = list(order.split(BLOCK))

    def build(self, args: ServerArgs) -> None:
        """Have the `CudaKV` of a server with these settings."""
        ctx: Any = SimpleNamespace(
            server_args=args,
            params=SimpleNamespace(page_size=1),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(forward_stream=self.forward)),
        )
        self.kv = device_kv(ctx, self.pool, CakeConfig(block_tokens=BLOCK), (), (), sliced=False)

    def fill(self, slots: torch.Tensor, value: int) -> None:
        """A forward that writes to `slots`."""

        def write() -> None:
            for buffer in buffers_of(self.pool):
                as_bytes(buffer)[slots] = value

        self.forward.launch(write)

    def read(self, slots: torch.Tensor) -> list[bytes]:
        """A forward that reads `slots`; the result is there when it has run."""
        seen: list[bytes] = []

        def look() -> None:
            seen.append(b"".join(bytes(as_bytes(b)[slots].numpy()) for b in buffers_of(self.pool)))

        self.forward.launch(look)
        return seen

    def block(self, value: int) -> Buffer:
        buffer = Buffer(on_page(self.kv.layout.block_bytes))
        buffer.view[:] = bytes([value]) * len(buffer.view)
        return buffer

    def run(self) -> None:
        self.cuda.run_all()

    def wrong_loads(self, *, fenced: bool = True, ordered: bool = True) -> int:
        """How many of 6 blocks a forward reads wrongly whose slots another forward used before."""
        seen = []
        for number, slots in enumerate(self.slots[:6]):
            self.fill(slots, 0xAA)  # a step that still runs when the slots are free
            after = self.kv.fence() if fenced else ()
            copy = self.kv.load(self.block(number), slots, after)
            if ordered:
                self.kv.order_forwards_after([copy])
            seen.append(self.read(slots))
        self.run()
        whole = self.kv.layout.block_bytes
        return sum(found != [bytes([n]) * whole] for n, found in enumerate(seen))

    def wrong_saves(self, *, fenced: bool = True, ordered: bool = True) -> int:
        """How many of 6 blocks are saved wrongly whose slots are written before and after."""
        slots = self.slots[:6]
        for number, part in enumerate(slots):
            self.fill(part, number)
        buffers = buffers_for(self.kv, 6)
        copy = self.kv.save(torch.cat(slots), buffers, self.kv.fence() if fenced else ())
        if ordered:
            self.kv.order_forwards_after([copy])
        for part in slots:
            self.fill(part, 0xBB)
        self.run()
        assert copy.done()
        return sum(bytes(b.view) != bytes([n]) * len(b.view) for n, b in enumerate(buffers))


@pytest.mark.parametrize("seed", SEEDS)
def test_cuda_kv_load_is_behind_the_forward_before_and_before_the_forward_behind(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    assert GpuHarness(monkeypatch, seed).wrong_loads() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_cuda_kv_save_takes_what_the_forward_before_wrote(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    assert GpuHarness(monkeypatch, seed).wrong_saves() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_cuda_kv_places_are_used_again_when_they_have_been_read(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """There are fewer of them than blocks."""
    size = PAGE_BYTES
    assert GpuHarness(monkeypatch, seed, place_bytes=size).wrong_loads() == 0
    harness = GpuHarness(monkeypatch, seed, place_bytes=size)
    assert pieces_of(harness.kv.layout, size) == pieces_of(harness.kv.layout)
    assert harness.wrong_saves() == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("overlaps", [True, False])
def test_cuda_kv_is_ordered_with_forwards_on_the_stream_that_sglang_runs_them_on(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool, seed: int
) -> None:
    """SGLang turns the overlap schedule off for some models, whatever the user gave."""
    args = ServerArgs(model_path="m")
    declare_resolution(args, "of the model", disable_overlap_schedule=not overlaps)
    for wrong in (GpuHarness.wrong_loads, GpuHarness.wrong_saves):
        harness = GpuHarness(monkeypatch, seed)
        harness.build(args)
        if not overlaps:
            harness.forward = torch.cuda.current_stream()
        assert wrong(harness) == 0


@pytest.mark.parametrize("what", ["fenced", "ordered"])
@pytest.mark.parametrize("way", ["wrong_loads", "wrong_saves"])
def test_cuda_kv_each_of_its_waits_is_needed(
    monkeypatch: pytest.MonkeyPatch, way: str, what: str
) -> None:
    """The control: without one of them, some order of the streams gives wrong bytes."""
    found = [getattr(GpuHarness(monkeypatch, seed), way)(**{what: False}) for seed in SEEDS]
    assert any(found)


def test_cuda_kv_forwards_wait_for_the_last_of_several_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in SEEDS:
        harness = GpuHarness(monkeypatch, seed)
        copies: list[Copy] = [
            harness.kv.load(harness.block(n), slots, harness.kv.fence())
            for n, slots in enumerate(harness.slots[:5])
        ]
        harness.kv.order_forwards_after(copies[::-1])
        seen = [harness.read(slots) for slots in harness.slots[:5]]
        harness.run()
        whole = harness.kv.layout.block_bytes
        assert seen == [[bytes([n]) * whole] for n in range(5)]


@pytest.mark.parametrize("waits", [True, False])
def test_cuda_kv_memory_of_the_pool_goes_behind_all_copies(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """With the control: without the wait, copies are under way when the host goes on."""
    wrong = 0
    for seed in SEEDS:
        harness = GpuHarness(monkeypatch, seed)
        loaded, stored = harness.slots[:2]
        harness.fill(stored, 2)
        harness.run()
        load = harness.kv.load(harness.block(1), loaded, ())
        (buffer,) = buffers_for(harness.kv, 1)
        save = harness.kv.save(stored, [buffer], ())
        if waits:
            harness.kv.wait_for_copies()
        for rows in buffers_of(harness.pool):
            as_bytes(rows).fill_(0xBB)
        harness.run()
        assert load.done()
        assert save.done()
        written = any(bool((as_bytes(rows) != 0xBB).any()) for rows in buffers_of(harness.pool))
        wrong += written or bytes(buffer.view) != b"\2" * len(buffer.view)
    assert bool(wrong) != waits


@pytest.mark.parametrize("waits", [True, False])
def test_cuda_kv_moves_of_slots_are_behind_all_copies(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """With the control: without the wait, some order of the streams moves other bytes."""
    wrong = 0
    for seed in SEEDS:
        harness = GpuHarness(monkeypatch, seed)
        whole = harness.kv.layout.block_bytes
        loaded, stored = harness.slots[:2]
        harness.fill(stored, 2)
        harness.run()
        harness.kv.load(harness.block(1), loaded, ())
        (buffer,) = buffers_for(harness.kv, 1)
        harness.kv.save(stored, [buffer], ())
        moves = harness.cuda.current_stream()
        if waits:
            harness.kv.before_moves(moves)
        harness.forward = moves
        seen = harness.read(loaded)
        harness.fill(stored, 0xBB)
        harness.run()
        wrong += seen != [bytes([1]) * whole] or bytes(buffer.view) != bytes([2]) * whole
    assert bool(wrong) != waits


# ---- slots that other servers write to ----


class BusyGpu(GpuHarness):
    """A step runs, and ends when the host waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, 0)
        self.step = FakeRecord()
        wait = FakeEvent.synchronize

        def synchronize(event: FakeEvent) -> None:
            self.step.set()
            wait(event)

        monkeypatch.setattr(FakeEvent, "synchronize", synchronize)
        self.forward.launch(lambda: None, after=self.step)

    def write(self, slots: torch.Tensor, value: int, *others: torch.Tensor) -> None:
        """As another server does: at once, in no stream."""
        for rows in (*map(as_bytes, buffers_of(self.pool)), *others):
            rows[slots] = value

    def run(self) -> None:
        self.step.set()
        super().run()


@pytest.mark.parametrize("waits", [True, False])
def test_block_saving_has_read_slots_when_another_server_may_write_to_them(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A decode server gives freed slots to transfers, which are in no stream. With the control."""
    gpu = BusyGpu(monkeypatch)
    gpu.kv.remote_writes = waits
    states = torch.zeros((BLOCK + 1, 400), dtype=torch.uint8)
    found = SimpleNamespace(conv=[], temporal=states[None], extra_checkpoint_buffers=[])
    pool: Any = SimpleNamespace(get_device_pool_infos=lambda: (SimpleNamespace(buffer_info=found),))
    size = gpu.kv.layout.block_bytes
    ends = EndStates([recurrent_states(gpu.kv.beside, pool, size)])
    assert ends.count == 1
    copier, io, store = CopyThread(gpu.kv), IoThread(), MemoryStore()
    writer = Writer(store, BufferPool(buffers_for(gpu.kv, 2)), io, Counters())
    saving = BlockSaving(gpu.kv, copier, writer, ends=ends)
    record = record_of(1, block=BLOCK)
    record.agreed.lookup_done = True
    row = torch.arange(BLOCK) + 1
    gpu.write(row, 0x11, states)
    saving.checkpointed(
        record, record.tokens, row, last=True, find_end=lambda stop: EndSlots(state=row[:1])
    )
    saving.released(record)
    saving.before_slots_are_freed(lambda record: False)
    gpu.write(row, 0xEE, states)
    gpu.run()
    io.run(writer.drained(), 60.0)
    copier.close()
    io.close()
    value = 0x11 if waits else 0xEE
    of_end = bytes([value]) * 400
    assert sorted(store.blocks.values()) == sorted(
        [bytes([value]) * size, of_end.ljust(size, b"\0")]
    )


@pytest.mark.parametrize(
    ("mode", "changes_roles", "waits"),
    [
        ("null", False, False),
        ("prefill", False, False),
        ("prefill", True, True),
        ("decode", False, True),
    ],
)
def test_cuda_kv_of_a_server_that_may_decode_for_others_expects_their_writes(
    monkeypatch: pytest.MonkeyPatch, mode: str, changes_roles: bool, waits: bool
) -> None:
    harness = GpuHarness(monkeypatch, 0)
    args = ServerArgs(model_path="m")
    args.disaggregation_mode = mode
    args.enable_pd_role_switch = changes_roles
    harness.build(args)
    assert harness.kv.remote_writes == waits


@pytest.mark.parametrize("waits", [True, False])
def test_cuda_kv_has_read_rows_that_slots_leave_when_another_server_may_write_to_them(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """With the control."""
    gpu = BusyGpu(monkeypatch)
    gpu.kv.remote_writes = waits
    slots = gpu.slots[0]
    gpu.write(slots, 0x11)
    (buffer,) = buffers_for(gpu.kv, 1)
    gpu.kv.save(slots, [buffer], gpu.kv.fence())
    gpu.kv.before_moves(gpu.cuda.current_stream())
    gpu.write(slots, 0xEE)
    gpu.run()
    assert set(buffer.view) == {0x11 if waits else 0xEE}


def _fails() -> None:
    raise OSError("fails")


@pytest.mark.parametrize(
    ("how", "emptied"), [("_emptied", lambda: None), ("_emptied", _fails), ("let_go", _fails)]
)
def test_tree_that_is_emptied_or_lets_cake_go_has_no_copy_under_way(
    monkeypatch: pytest.MonkeyPatch, how: str, emptied: Callable[[], None]
) -> None:
    """Transfers read the slots of loaded blocks, and in another role of the server write to those
    of withdrawn ones, in no stream."""
    gpu = BusyGpu(monkeypatch)
    tree: Any = CakeRadixCache.__new__(CakeRadixCache)
    tree.service = SimpleNamespace(kv=gpu.kv)
    tree.coordinator = SimpleNamespace(off_everywhere=True, emptied=emptied)
    copy = gpu.kv.load(gpu.block(0x11), gpu.slots[0], gpu.kv.fence())
    getattr(tree, how)()
    assert all((as_bytes(rows)[gpu.slots[0]] == 0x11).all() for rows in buffers_of(gpu.pool))
    gpu.run()
    assert copy.done()


# ---- slots that move ----


@pytest.mark.parametrize("moves", [True, False])
def test_cuda_kv_slots_that_move_get_other_owners_behind_copies_into_them(
    monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """The scheduler thread's stream zeroes slots, and copies states into others."""
    wrong = 0
    for seed in SEEDS:
        pool = unified(12 * BLOCK).get_kvcache().swa_kv_pool if moves else None
        harness = GpuHarness(monkeypatch, seed, pool)
        assert harness.kv.moves == moves
        slots = harness.slots[0]
        copy = harness.kv.load(harness.block(1), slots, ())
        harness.kv.order_forwards_after([copy])
        harness.forward = harness.cuda.current_stream()
        harness.fill(slots, 0)
        seen = harness.read(slots)
        harness.run()
        wrong += any(seen[0]) or any(as_bytes(b)[slots].any() for b in buffers_of(harness.pool))
    assert bool(wrong) != moves


@since_0_5_23
@pytest.mark.parametrize("place_bytes", [None, PLACE_BYTES])
@pytest.mark.parametrize("seed", SEEDS)
def test_cuda_kv_rows_of_a_draft_model_stay_where_those_of_the_model_move(
    monkeypatch: pytest.MonkeyPatch, seed: int, place_bytes: int | None
) -> None:
    """The draft model has a pool of its own beside a memory of all other pools."""
    allocator = unified(12 * BLOCK)
    full = allocator.full_attn_allocator
    target, draft = allocator.get_kvcache().full_kv_pool, mha(full.max_slots)
    harness = GpuHarness(monkeypatch, seed, target, place_bytes=place_bytes, drafts=[draft])
    assert harness.kv.moves
    parts = list(full.alloc(6 * BLOCK).split(BLOCK))
    for hole in parts[::2]:
        full.free_segment(hole, start_pos=0)
    assert full.flush_for_allocation() > 0
    slots, other = parts[1], parts[3]
    rows = allocator.translate_kv_loc(slots)
    assert not torch.equal(rows, slots)
    for number, (buffer, where) in enumerate(
        [(b, rows) for b in buffers_of(target)] + [(b, slots) for b in buffers_of(draft)]
    ):
        as_bytes(buffer)[where] = number + 1
    (buffer,) = buffers_for(harness.kv, 1)
    harness.kv.save(slots, [buffer], ())
    harness.run()
    planes = harness.kv.layout.planes
    held = [set(buffer.view[p.start : p.start + p.rows * p.row_bytes]) for p in planes]
    assert held == [{number + 1} for number in range(len(planes))]
    harness.kv.load(buffer, other, ())
    harness.run()
    now = allocator.translate_kv_loc(other)
    for plane, where in [(b, now) for b in buffers_of(target)] + [
        (b, other) for b in buffers_of(draft)
    ]:
        own = rows if where is now else slots
        assert torch.equal(as_bytes(plane)[where], as_bytes(plane)[own])


def test_cuda_streams_of_copies_have_another_priority_than_those_of_sglang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch gives out the same few streams of a priority in turn."""
    harness = GpuHarness(monkeypatch, 0)
    before = len(harness.cuda.streams)
    CudaKV(harness.pool, block_tokens=BLOCK, forward_stream=harness.forward)
    CudaRows(harness.kv)
    priorities = [stream.priority for stream in harness.cuda.streams[before:]]
    assert priorities == [-1] * 5
    assert harness.forward.priority == 0


# ---- device memory ----

MHA = (("k", (8, 128)), ("v", (8, 128)))


@given(block_bytes=st.integers(1, 2**34), encoded=st.booleans())
def test_copy_memory_of_blocks_of_any_size_is_within_its_bound(
    block_bytes: int, encoded: bool
) -> None:
    memory = CopyMemory.of_blocks(block_bytes, encoded=encoded)
    assert memory.all_bytes <= COPY_BYTES == 128 * 2**20
    assert (memory.decoding_bytes > 0) <= encoded
    assert memory.piece_bytes >= min(block_bytes, PIECE_BYTES)
    assert min(memory.in_places, memory.out_places) >= (1 if memory.decoding_bytes else 2)


def test_copy_memory_blocks_of_16_mib_are_decoded_on_the_device_and_larger_ones_are_not() -> None:
    assert CopyMemory.of_blocks(16 * 2**20, encoded=True).decoding_bytes
    assert not CopyMemory.of_blocks(24 * 2**20, encoded=True).decoding_bytes


@given(layers=st.integers(1, 200), tokens=st.integers(1, 2048), width=st.integers(1, 6144))
def test_pieces_of_a_block_are_its_planes_in_order(layers: int, tokens: int, width: int) -> None:
    layout = BlockLayout.plain(layers, (("k", (width,)), ("v", (2 * width,))), "uint8", tokens)
    pieces = pieces_of(layout)
    numbers = [n for piece in pieces for n in range(*piece.planes.indices(2 * layers))]
    assert numbers == list(range(2 * layers))
    assert max(piece.size_bytes for piece in pieces) <= PIECE_BYTES
    starts = [layout.planes[piece.planes.start].start for piece in pieces]
    assert starts == [piece.start for piece in pieces]
    assert sum(piece.size_bytes for piece in pieces) == layout.block_bytes


def test_pieces_of_a_plane_that_is_too_large_raises_what_to_do() -> None:
    layout = BlockLayout.plain(1, MHA, "bfloat16", 2**14)
    with pytest.raises(ConfigError, match="lower --cake-block-tokens"):
        pieces_of(layout)


class LiveBytes(TorchDispatchMode):
    """Counts the memory that tensors take which are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_address(each) for each in tree_leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if _address(each) not in before and isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, storage.nbytes())
        return result

    def _drop(self, size_bytes: int) -> None:
        self.now -= size_bytes


def _address(each: Any) -> int | None:
    return each.untyped_storage().data_ptr() if isinstance(each, torch.Tensor) else None


@pytest.mark.parametrize("codec", [None, "raw", "int8", "int4", "kvquant3"])
def test_cuda_kv_takes_no_more_device_memory_than_it_says(
    monkeypatch: pytest.MonkeyPatch, codec: str | None
) -> None:
    install(monkeypatch, 0, eager=True)
    tokens, layers = 64, 4
    pool = mha(2 * tokens, heads=8, dim=128, layers=layers, dtype=torch.bfloat16)
    layout = BlockLayout.plain(layers, MHA, "bfloat16", tokens)
    block = Buffer(on_page(layout.block_bytes + 2**16))
    if codec is not None:
        values = torch.randn(layout.block_bytes // 2).to(torch.bfloat16).view(torch.uint8).numpy()
        chain_of(codec, layout, rope_theta=5e5).encode(layout, values.data, block.view)
    slots = torch.arange(tokens) + 1
    row, kept = slots.repeat(4), []
    with LiveBytes() as live:
        kv = CudaKV(pool, block_tokens=tokens, forward_stream=None, encoded=codec is not None)
        memory = CopyMemory.of_blocks(layout.block_bytes, encoded=codec is not None)
        buffers = buffers_for(kv, 4)
        loaded = block if codec is not None else Buffer(block.view[: layout.block_bytes])
        for _ in range(8):
            kept.append(kv.load(loaded, slots, ()))
            kept.append(kv.save(row, buffers, ()))
        assert (memory.decoding_bytes > 0) == (codec is not None)
        assert memory.all_bytes - memory.decoding_bytes <= live.peak
        assert live.peak <= memory.all_bytes + 2**14  # and small tables


@pytest.mark.parametrize(("dtype", "encoded"), [("bfloat16", True), ("float8_e4m3fn", False)])
def test_cuda_kv_that_no_lossy_codec_takes_has_all_places_for_copies(
    monkeypatch: pytest.MonkeyPatch, dtype: str, encoded: bool
) -> None:
    """`auto` with a bound may be set, and uses codecs that a CPU decodes."""
    install(monkeypatch, 0)
    pool = mha(2 * BLOCK, dtype=getattr(torch, dtype))
    kv = CudaKV(pool, block_tokens=BLOCK, forward_stream=None, encoded=True)
    assert kv.encoded == encoded
    memory = CopyMemory.of_blocks(kv.layout.block_bytes, encoded=encoded)
    places = [next(kv.streams.places) for _ in range(2 * memory.in_places)]
    assert len({id(place) for place in places}) == memory.in_places


@pytest.mark.parametrize("seed", SEEDS)
def test_cuda_kv_block_of_several_pieces_is_ordered_like_one(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    pool = mha(12 * BLOCK, heads=2, dim=16)
    harness = GpuHarness(monkeypatch, seed, pool, place_bytes=PLACE_BYTES)
    assert len(pieces_of(harness.kv.layout, PLACE_BYTES)) > 1
    assert harness.wrong_loads() == 0
    assert GpuHarness(monkeypatch, seed, pool, place_bytes=PLACE_BYTES).wrong_saves() == 0


def test_cuda_kv_pools_share_streams_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        harness = GpuHarness(monkeypatch, seed)
        other = mha(6 * BLOCK, layers=1)
        with LiveBytes() as live:
            beside: Any = harness.kv.beside(other, block_tokens=BLOCK)
        assert live.peak < harness.kv.layout.block_bytes
        one, two = harness.block(1), Buffer(harness.block(2).view[: beside.layout.block_bytes])
        slots = harness.slots[0]
        loads = [
            kv.load(b, s, kv.fence())
            for kv, b, s in ((harness.kv, one, slots), (beside, two, torch.arange(BLOCK) + 1))
        ]
        beside.order_forwards_after(loads[1:])
        seen = harness.read(slots)  # behind the other one's copy, and so behind its own
        harness.run()
        assert seen == [bytes([1]) * len(one.view)]
        assert all((as_bytes(b)[1 : BLOCK + 1] == 2).all() for b in buffers_of(other))


def test_cuda_kv_failed_launch_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a load that fails are free at once."""
    for seed in SEEDS:
        pool = mha(12 * BLOCK, heads=2, dim=16)
        harness = GpuHarness(monkeypatch, seed, pool, Failing, PLACE_BYTES)
        block = harness.block(1)
        with pytest.raises(torch.OutOfMemoryError):
            harness.kv.load(block, harness.slots[0], ())
        harness.fill(harness.slots[0], 0xCC)
        seen = harness.read(harness.slots[0])
        harness.run()
        assert seen == [bytes([0xCC]) * len(block.view)]


class Failing(PlainRowKernel):
    """Copies the first piece of a block, and fails at the second one."""

    def scatter(self, blocks: Any, slots: Any, piece: Any = None) -> None:
        if piece.start:
            raise torch.OutOfMemoryError("no memory")
        super().scatter(blocks, slots, piece)


# ---- recurrent states ----


@pytest.mark.parametrize("place_bytes", [96, 4096])
def test_recurrent_states_go_through_the_rings_in_pieces(
    monkeypatch: pytest.MonkeyPatch, place_bytes: int
) -> None:
    for seed in SEEDS:
        cuda = install(monkeypatch, seed)
        forward: Any = torch.cuda.Stream()
        memory = CopyMemory(place_bytes, in_places=2, out_places=1)
        streams = CopyStreams(torch.device("cpu"), memory, forward)
        random = torch.Generator().manual_seed(seed)
        planes = [torch.randn((2, 4, 5, width), generator=random) for width in (3, 4)]
        before = [plane.clone() for plane in planes]
        buffers = SimpleNamespace(conv=[planes[0]], temporal=planes[1], extra_checkpoint_buffers=[])
        pool = SimpleNamespace(
            get_device_pool_infos=lambda found=buffers: (SimpleNamespace(buffer_info=found),)
        )
        make = partial(CudaKV, forward_stream=forward, streams=streams)
        states = EndStates([recurrent_states(make, pool, 128)])
        assert states.count > 2
        saved = [Buffer(on_page(128)) for _ in range(states.count)]
        save = states.save(states.prepare(EndSlots(state=torch.tensor([1]))), saved, ())
        save.wait()
        target = states.prepare(EndSlots(state=torch.tensor([3])))
        blocks = zip(states.blocks_of(target), saved, strict=True)
        loads = [kv.load(buffer, slots, ()) for (kv, slots), buffer in blocks]
        states.parts[0].copies[0][0].order_forwards_after(loads)
        cuda.run_all()
        for plane, old in zip(planes, before, strict=True):
            assert torch.equal(plane[:, 3], old[:, 1])
            assert torch.equal(plane[:, :3], old[:, :3])


@pytest.mark.parametrize("seed", SEEDS)
def test_end_states_forwards_wait_for_the_copies_of_all_parts(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    harness = GpuHarness(monkeypatch, seed)
    kv, pool = harness.kv, mha(2 * BLOCK, layers=1)
    states = torch.zeros((6, 400), dtype=torch.uint8)
    found = SimpleNamespace(conv=[], temporal=states[None], extra_checkpoint_buffers=[])
    of_states: Any = SimpleNamespace(
        get_device_pool_infos=lambda: (SimpleNamespace(buffer_info=found),)
    )
    parts: list[EndPart] = [
        window_rows(kv.beside, pool, 256, page_tokens=1, window_tokens=BLOCK),
        recurrent_states(kv.beside, of_states, 256),
    ]
    ends = EndStates(parts)
    kv.also_scheduler = True
    assert min(EndStates([part]).count for part in parts) > 1

    def rows(end: EndSlots) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert end.window is not None
        assert end.state is not None
        return [*((as_bytes(each), end.window) for each in buffers_of(pool)), (states, end.state)]

    def forward(end: EndSlots, value: int) -> None:
        def write() -> None:
            for plane, index in rows(end):
                plane[index] = value

        harness.forward.launch(write)

    taken = EndSlots(torch.arange(BLOCK) + 1, torch.tensor([1]))
    given = EndSlots(torch.arange(BLOCK) + 1 + BLOCK, torch.tensor([3]))
    buffers = [Buffer(on_page(256)) for _ in range(ends.count)]
    forward(taken, 1)
    save = ends.save(ends.prepare(taken), buffers, kv.fence())
    assert len(save.keep) == 3  # the slots of the window, and those of each block of the state
    kv.order_forwards_after([save])
    forward(taken, 2)
    save.wait()
    forward(given, 3)
    after, target = kv.fence(), ends.prepare(given)
    blocks = zip(ends.blocks_of(target), buffers, strict=True)
    loads = [its_kv.load(buffer, slots, after) for (its_kv, slots), buffer in blocks]
    kv.order_forwards_after(loads[::-1])
    seen: list[bool] = []
    harness.forward.launch(
        lambda: seen.extend(bool((plane[index] == 1).all()) for plane, index in rows(given))
    )
    harness.run()
    assert len(seen) == 3
    assert all(seen)


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_capture_mode_without_the_library_of_the_driver_is_left_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hip: str | None
) -> None:
    """As on a machine whose ROCm is elsewhere: captures may fail, and nothing else."""

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    capture_mode_exchange.cache_clear()
    assert [exchange_capture_mode(mode) for mode in (1, 0)] == [1, 0]
    (line,) = caplog.messages
    assert ("libc10_hip.so" if hip else "libcuda.so.1") in line
    capture_mode_exchange.cache_clear()
