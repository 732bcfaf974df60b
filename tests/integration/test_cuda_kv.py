"""Copies of blocks are ordered with forwards on a GPU, whatever order the streams run in."""

from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, install
from kv_pools import as_bytes, buffers_for, buffers_of, mha

from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.integration.memory.kv_pool import RING_BLOCKS, Copy, CudaKV

BLOCK, SEEDS = 16, range(12)


class GpuHarness:
    """A `CudaKV`, and forwards that write to slots and read them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.cuda: FakeCuda = install(monkeypatch, seed)
        self.pool = mha(12 * BLOCK)
        self.forward: Any = torch.cuda.Stream()
        self.kv = CudaKV(self.pool, block_tokens=BLOCK, forward_stream=self.forward)
        order = torch.randperm(12 * BLOCK, generator=torch.Generator().manual_seed(seed)) + 1
        self.slots = list(order.split(BLOCK))

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
    assert RING_BLOCKS < 6  # so that the ring is used again
    assert GpuHarness(monkeypatch, seed).wrong_saves() == 0


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
