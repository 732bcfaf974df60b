"""The virtual GPU launches for a block what `CudaKV` and the copier launch for it.

The server's own run over a stub of a driver that counts calls. That the row kernel is one launch
for any number of blocks, `test_row_kernel.py` shows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.bench_copy_calls import BLOCK_TOKENS, FORMS, META, StubDriver, stubbed
from benchmarks.gpu.stand_ins import PoolForm, make_pool
from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.integration.memory import row_kernel
from sglang_cake.integration.memory.copier import Copier, CopyThread, SlotCopy
from sglang_cake.integration.memory.kv_pool import PIECE_BYTES, CudaKV
from sglang_cake.loading.loader import HostBlock
from sglang_cake.testing.virtual_gpu import DMA_BYTES_PER_S, VirtualCopier, VirtualGpu, VirtualKV
from sglang_cake.testing.virtual_time import virtual_time

# Blocks of 26 MiB, which are copied in pieces.
LARGE = {"above 24 MiB": PoolForm(layers=52, heads=8, dim=128, v_dim=128)}
LOADED = 3
SAVED = (1, 2, 5, 20)  # blocks of a save; no ring holds 20
KERNEL, DMA = "launches of a kernel", "copies to or from the host"
EVENT, WAIT = "events", "waits of a stream"


class CountedKernel:
    """In place of `RowKernel`, which compiles."""

    driver: StubDriver

    def __init__(self, planes: Sequence[torch.Tensor], layout: object) -> None:
        del planes, layout

    def compile(self, pieces: Sequence[object]) -> None:
        """Nothing: there is no kernel."""

    def scatter(self, *args: object) -> None:
        self.driver.called(KERNEL)

    gather = scatter


@dataclass
class Calls:
    """Of a driver, by the copier's thread: kernels with copies, and events with waits for them."""

    launches: int
    events: int


class Real:
    """The server's own copies."""

    def __init__(self, driver: StubDriver, form: PoolForm) -> None:
        self._driver = driver
        pool = make_pool(form, 64 * BLOCK_TOKENS, device=META)
        forward: Any = torch.cuda.Stream()
        self.kv: Any = CudaKV(pool, block_tokens=BLOCK_TOKENS, forward_stream=forward)
        self.copier: Copier = CopyThread(self.kv)

    def taken(self) -> Calls:
        calls = self._driver.calls.copy()
        self._driver.calls.clear()
        return Calls(calls[KERNEL] + calls[DMA], calls[EVENT] + calls[WAIT])

    step = taken  # of the scheduler's thread


class Virtual:
    """Those of the model."""

    def __init__(self, io: Any, layout: Any) -> None:
        self._gpu = VirtualGpu(io)
        self.kv: Any = VirtualKV(self._gpu, layout, DMA_BYTES_PER_S)
        self.copier: Copier = VirtualCopier(io, self.kv)

    def taken(self) -> Calls:
        host = self._gpu.copier
        found = Calls(host.launches, host.events)
        host.launches = host.events = 0
        return found

    def step(self) -> Calls:
        """The model counts each call of the scheduler's thread as a launch."""
        host = self._gpu.scheduler
        found = Calls(0, host.launches)
        host.launches = 0
        return found


@contextmanager
def both(monkeypatch: pytest.MonkeyPatch, form: PoolForm) -> Iterator[tuple[Real, Virtual]]:
    monkeypatch.setattr(row_kernel, "RowKernel", CountedKernel)
    with stubbed() as driver, virtual_time() as io:
        CountedKernel.driver = driver
        real = Real(driver, form)
        try:
            yield real, Virtual(io, real.kv.layout)
        finally:
            real.copier.close()


def loaded(bed: Real | Virtual, buffer: Buffer) -> list[Calls]:
    """Of loads into slots that were reserved before, each with its launch: the first of a fence,
    and others with the same."""
    slots = torch.empty(BLOCK_TOKENS, dtype=torch.int64, device=META)
    found = []
    for _ in range(2):
        fence = bed.kv.fence()
        bed.step()
        for _ in range(LOADED):
            copy = SlotCopy(bed.kv, slots, fence)
            assert copy.begin()
            bed.copier.load(copy, HostBlock(buffer, lambda given: None, lambda staged: None))
            assert None not in bed.copier.wait_launched([copy.launched])
            found.append(bed.taken())
    return found


def saved(bed: Real | Virtual, buffer: Buffer) -> list[Calls]:
    """Of saves of several blocks, two after each fence."""
    found = []
    for blocks in SAVED:
        slots = torch.empty(blocks * BLOCK_TOKENS, dtype=torch.int64, device=META)
        fence = bed.kv.fence()
        bed.step()
        for _ in range(2):
            save = bed.copier.save(partial(bed.kv.save, slots, [buffer] * blocks, fence))
            assert None not in bed.copier.wait_launched([save.launched])
            found.append(bed.taken())
    return found


@pytest.mark.parametrize("name", [*FORMS, *LARGE])
def test_virtual_kv_block_loaded_or_saved_takes_the_calls_that_the_server_makes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with both(monkeypatch, (FORMS | LARGE)[name]) as (real, virtual):
        buffer = Buffer(on_page(real.kv.load_buffer_bytes))
        assert (len(buffer.view) > PIECE_BYTES) == (name in LARGE)
        assert loaded(virtual, buffer) == loaded(real, buffer)
        assert saved(virtual, buffer) == saved(real, buffer)


def test_virtual_kv_step_takes_the_calls_of_the_scheduler_that_the_server_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fence, and a forward that waits for copies."""
    found = []
    (form, *_) = FORMS.values()
    with both(monkeypatch, form) as beds:
        for bed in beds:
            fence = bed.kv.fence()
            slots = torch.empty(BLOCK_TOKENS, dtype=torch.int64, device=META)
            buffer = Buffer(on_page(beds[0].kv.load_buffer_bytes))
            calls = [bed.step()]
            with bed.kv.here():
                copies = [bed.kv.load(buffer, slots, fence) for _ in range(LOADED)]
            bed.taken()
            bed.kv.order_forwards_after(copies)
            bed.kv.order_forwards_after([])
            found.append([*calls, bed.step()])
    assert found[0] == found[1] == [Calls(0, 2), Calls(0, 1)]
