"""The scheduler thread does not wait for the device in loads, attaching, saves and aborts."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

from fake_cuda import FakeEvent, install
from hybrid_trees import tree_of
from kv_pools import Staging, allocator_of, as_bytes, buffers_for, buffers_of, mha, record_of

from sglang_cake.core.buffers import BufferPool
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Span
from sglang_cake.core.threads import IoThread
from sglang_cake.integration.memory.block_saving import BlockSaving, Writer
from sglang_cake.integration.memory.copier import CopyThread
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.kv_pool import CudaKV
from sglang_cake.testing.memory_store import MemoryStore

BLOCK, BLOCKS, PATIENCE_S = 64, 12, 60.0
# What waits for the device if it is given memory of it.
SYNCS: tuple[tuple[Any, str], ...] = (
    *((torch.Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__")),
    *((torch, name) for name in ("unique", "nonzero")),
    *((FakeEvent, "synchronize"), (torch.cuda, "synchronize")),
)


class HostSync(Exception):
    """The scheduler thread waited for the device."""


def forbid_syncs(patch: pytest.MonkeyPatch) -> None:
    """From now on they raise in the calling thread."""
    scheduler = threading.get_ident()

    def forbidden(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == scheduler:
                raise HostSync(name)
            return original(*args, **kwargs)

        return call

    for owner, name in SYNCS:
        patch.setattr(owner, name, forbidden(getattr(owner, name), name))
    plain = torch.Tensor.__getitem__
    masked = forbidden(plain, "mask")

    def take(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        """The rows of a mask are counted first."""
        mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
        found: torch.Tensor = (masked if mask else plain)(tensor, index)
        return found

    patch.setattr(torch.Tensor, "__getitem__", take)


class Server:
    """What a scheduler process has, on a `FakeCuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
        self.cuda = install(monkeypatch, 0)
        self.pool = mha(BLOCKS * BLOCK, page=page)
        self.page = page
        self.allocator = allocator_of(self.pool, page)
        self.kv = CudaKV(self.pool, block_tokens=BLOCK, forward_stream=torch.cuda.Stream())
        self.copier = CopyThread(self.kv, patience_s=PATIENCE_S)
        self.counters = Counters()
        self.slots = DeviceSlots(
            self.kv, self.copier, self.allocator, lambda tokens: None, self.counters
        )
        self.io, self.store = IoThread(), MemoryStore()
        buffers = BufferPool(buffers_for(self.kv, BLOCKS))
        self.writer = Writer(self.store, buffers, self.io, self.counters)
        self.saving = BlockSaving(self.kv, self.copier, self.writer)
        self.staging = Staging(self.kv)

    def serve(self, *, blocks: int = 4) -> tuple[torch.Tensor, list[bytes]]:
        """Load a prompt, attach it but for the last page, save what it computes, and abort another
        prompt in the middle of its loads. Returns the slots of the tree, and what was loaded."""
        record, other = (record_of(blocks, block=BLOCK, page=self.page, rid=rid) for rid in "ab")
        fetched = [self.staging.fetch(block) for block in range(blocks)]
        aborted = [self.staging.fetch(block) for block in range(blocks)]
        span = Span(0, blocks * BLOCK - self.page)
        with pytest.MonkeyPatch.context() as patch:
            forbid_syncs(patch)
            for each in (record, other):
                each.meet.found([True] * blocks)
                self.slots.reserve(each, reversed(range(1, blocks)))
            for each, whole in ((record, fetched), (other, aborted)):
                for block in reversed(range(blocks)):
                    staged = whole[block][1]
                    taken = self.slots.take_bytes(each, block, staged)
                    assert each.meet.landed(block)
                    self.slots.stage(each, block, None if taken else staged)
            assert self.slots.place(record, range(blocks))
            assert self.slots.uncopied(record, range(blocks)) == []
            row = self.slots.take_slots(record, span)
            self.slots.discard_all(other, "ended")
            self.slots.check_copies()
            new = record_of(blocks, block=BLOCK, page=self.page, rid="c")
            new.agreed.lookup_done = True
            self.saving.checkpointed(new, new.tokens[: len(row)], row.to(torch.int32), last=True)
            self.saving.polled(lambda record: False)
            self.saving.before_slots_are_freed(lambda record: False)
            self.slots.free(row[-self.page :])
        self.io.run(self.writer.drained(), PATIENCE_S)
        self.cuda.run_all()
        return row, [data for data, _ in fetched]

    def close(self) -> None:
        self.copier.close()
        self.io.close()


@pytest.fixture(params=[1, 16], ids=["page 1", "page 16"])
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(monkeypatch, request.param)
    yield made
    made.close()


def test_host_syncs_there_are_none_from_a_load_to_the_tree_in_a_save_or_an_abort(
    server: Server,
) -> None:
    free = server.allocator.available_size()
    row, loaded = server.serve()
    for block, data in enumerate(loaded[:-1]):
        part = row[block * BLOCK : (block + 1) * BLOCK]
        assert b"".join(bytes(as_bytes(b)[part].numpy()) for b in buffers_of(server.pool)) == data
    assert len(server.store) == 3  # the whole blocks of what is attached
    assert server.allocator.available_size() == free - len(row) + server.page
    assert server.slots.reclaimable_tokens == 0


@pytest.mark.parametrize("server", [16], indirect=True)
def test_host_syncs_freeing_slots_by_number_is_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(
        server.allocator, "free_segment", lambda slots, start_pos: server.allocator.free(slots)
    )
    with pytest.raises(HostSync, match="unique"):
        server.serve()


@pytest.mark.parametrize("held", [0, 8], ids=["new window", "window with rows of the tree"])
@pytest.mark.parametrize("kind", ["window-pages", "window-state-extra-buffer"])
def test_host_syncs_there_are_none_where_slots_of_an_end_state_come_and_go(
    kind: str, held: int
) -> None:
    """As where its blocks are given up."""
    side = tree_of(kind)
    req, windows = SimpleNamespace(), side.allocator.swa_attn_allocator
    windows.debug_mode = False  # in which SGLang itself waits for the device
    before = side.taken(windows)
    with pytest.MonkeyPatch.context() as patch:
        forbid_syncs(patch)
        end = side.tree.allocate_end(req, Span(held, held + 4))
        assert end is not None
        side.ends.prepare(end)
        side.tree.free_end(req, end)
    assert side.taken(windows) == before
