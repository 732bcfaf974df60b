"""A chain on GPUs, its streams and events in the right order: on a device that is made up."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, install
from kv_pools import as_bytes, buffers_of, mha

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.keys import Span
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.integration.overlap.layer_gate import CudaGate, CudaRows, LayersSkipped
from sglang_cake.runahead.kv_passing import (
    KvPassing,
    KvReceiver,
    KvSender,
    Late,
    Predecessor,
)
from sglang_cake.runahead.messages import LayerPart

LAYERS, TOKENS = 4, 96
JOB = "0123456789abcdef" * 2


class Rows(CudaRows):
    def buffer(self, size_bytes: int) -> PartBytes:
        if self._on_device:
            return super().buffer(size_bytes)
        return memoryview(bytearray(size_bytes))  # there is nothing to pin memory for


def truth(layer: int, plane: int, tokens: Sequence[int], width: int) -> torch.Tensor:
    """uint8 `[tokens, width]`."""
    base = torch.tensor(tokens).view(-1, 1) * 7 + layer * 31 + plane * 100
    return ((base + torch.arange(width)) % 251).to(torch.uint8)


class Worker:
    """One GPU: a pool, and forwards whose kernels only write and look."""

    def __init__(
        self, cuda: FakeCuda, span: Span, rows: type[CudaRows], on_device: bool = False
    ) -> None:
        self._cuda, self.span = cuda, span
        self.pool = mha(256, layers=LAYERS)
        self.planes = [as_bytes(each) for each in buffers_of(self.pool)]
        self.rows = rows(DeviceKV(self.pool, block_tokens=16), on_device=on_device)
        self.gate = CudaGate(self.pool, self.rows)
        self.slots = torch.randperm(250)[: span.stop] + 1
        self.wrong: list[str] = []
        self.launched = -1  # the layer that the host has come to
        self.computed = -1  # the layer that the device has come to
        self.ahead = 0

    def run(self, passing: KvPassing) -> None:
        """As FlashInfer: asks for K and for V, attends, and writes its own after that."""
        stream = self._cuda.current_stream()
        stream.launch(lambda: self.fill(range(self.span.stop), 3))  # whose slots these were
        passing.receiver.bind(self.slots[: self.span.start], 0)
        if passing.sender is not None:
            passing.sender.bind(self.slots[self.span.start :], self.span)
        with self.gate(passing):
            for layer in range(LAYERS):
                self.pool.get_key_buffer(layer)
                self.pool.get_value_buffer(layer)
                self.launched = layer
                self.ahead = max(self.ahead, layer - self.computed)
                stream.launch(lambda layer=layer: self.attend(layer))
                stream.launch(lambda layer=layer: self.write(layer))

    def end(self, passing: KvPassing) -> None:
        if passing.sender is not None:
            passing.drain()
        passing.close("done")
        # From here on the slots are somebody else's.
        self._cuda.current_stream().launch(lambda: self.fill(range(self.span.stop), 5))

    def attend(self, layer: int) -> None:
        self.computed = layer
        for plane in range(2):
            rows = self.planes[2 * layer + plane]
            found = rows[self.slots[: self.span.start]]
            if not torch.equal(found, truth(layer, plane, range(self.span.start), rows.shape[1])):
                self.wrong.append(f"layer {layer}: attention reads what is not there")

    def write(self, layer: int) -> None:
        for plane in range(2):
            rows = self.planes[2 * layer + plane]
            own = range(*self.span)
            rows[self.slots[self.span.start :]] = truth(layer, plane, own, rows.shape[1])

    def fill(self, tokens: Sequence[int], value: int) -> None:
        for rows in self.planes:
            rows[self.slots[list(tokens)]] = value


def chain(cuda: FakeCuda, rows: type[CudaRows] = Rows, on_device: bool = False) -> list[Worker]:
    """Three workers compute one prompt; who found something wrong says so."""
    spans = [Span(0, 40), Span(40, 72), Span(72, TOKENS)]
    workers = [Worker(cuda, span, rows, on_device) for span in spans]
    passings: list[KvPassing] = []

    def send_to(rank: int) -> Callable[[LayerPart, PartBytes], None]:
        landing = torch.empty(2**16, dtype=torch.uint8)  # the transport's, used again and again
        busy = threading.Lock()

        def send(part: LayerPart, data: PartBytes) -> None:
            with busy:
                landed = landing[: len(data)]
                landed[:] = data if on_device else torch.frombuffer(data, dtype=torch.uint8)
                passings[rank].on_part(part, landed if on_device else memoryview(landed.numpy()))
                landing[:] = 9

        return send

    for rank, worker in enumerate(workers):
        before = [Predecessor(r, spans[r]) for r in range(rank)]
        last = rank == len(workers) - 1
        sender = None
        if not last:  # several parts of each layer
            send = send_to(rank + 1)
            sender = KvSender(worker.rows, JOB, send, pytest.fail, part_bytes=1024)
        receiver = KvReceiver(worker.rows, before)
        passings.append(KvPassing(JOB, receiver, sender=sender, patience_s=20.0))

    def forward(worker: Worker, passing: KvPassing) -> None:
        try:
            worker.run(passing)
            worker.end(passing)
        except Exception as error:
            worker.wrong.append(repr(error))
            passing.break_off(repr(error))

    threads = [
        threading.Thread(target=forward, args=pair, daemon=True)
        for pair in zip(workers, passings, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    cuda.run_all()
    return workers


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_runahead_cuda_attention_reads_what_earlier_workers_wrote(
    monkeypatch: pytest.MonkeyPatch, seed: int, on_device: bool
) -> None:
    for worker in chain(install(monkeypatch, seed), on_device=on_device):
        assert worker.wrong == []
        assert worker.computed == LAYERS - 1
        assert worker.ahead <= 2  # the host: an abort ends a forward within that


class _NotAfterWriting(Rows):
    def wrote(self, layer: int) -> None:
        self._written[layer] = torch.cuda.Event()


class _NotWaitedFor(Rows):
    def write(self, *args: Any) -> Copy:
        super().write(*args)
        return Copy()


@pytest.mark.parametrize("rows", [_NotAfterWriting, _NotWaitedFor])
def test_cuda_order_control_dropped_wait_gives_wrong_kv(
    monkeypatch: pytest.MonkeyPatch, rows: type[CudaRows]
) -> None:
    """The control of the test above."""
    assert any(w.wrong for seed in range(12) for w in chain(install(monkeypatch, seed), rows))


class _UnderWay(Rows):
    """Nobody waits for copies but the forward."""

    def write(self, *args: Any) -> Copy:
        super().write(*args)
        return Copy()


class _NotAfterOthers(_UnderWay):
    def begin(self) -> None:
        pass


class _NotBeforeReading(_UnderWay):
    def follow(self, layer: int) -> None:
        pass


def _came_early(cuda: FakeCuda, rows: type[CudaRows]) -> list[str]:
    """All parts come while the device is still at the forward that had the slots before."""
    worker = Worker(cuda, Span(16, 32), rows)
    receiver = KvReceiver(worker.rows, [Predecessor(0, Span(0, 16))])
    cuda.current_stream().launch(lambda: worker.fill(range(32), 3))
    receiver.bind(worker.slots[:16], 0)
    width = worker.rows.token_bytes // 2
    parts = []
    for layer in range(LAYERS):
        planes = [truth(layer, plane, range(16), width).flatten() for plane in range(2)]
        parts.append(bytearray(torch.cat(planes).numpy().tobytes()))
        receiver.part(LayerPart(JOB, layer, 0, 16), memoryview(parts[-1]))
    passing = KvPassing(JOB, receiver, patience_s=20.0)
    with worker.gate(passing):
        for layer in range(LAYERS):
            worker.pool.get_kv_buffer(layer)
            cuda.current_stream().launch(lambda layer=layer: worker.attend(layer))
    cuda.run_all()
    return worker.wrong


def test_runahead_cuda_early_copies_run_between_old_forward_and_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rows in (Rows, _UnderWay):
        for seed in range(12):
            assert _came_early(install(monkeypatch, seed), rows) == []
    for without in (_NotAfterOthers, _NotBeforeReading):
        assert any(_came_early(install(monkeypatch, seed), without) for seed in range(12))


@pytest.mark.parametrize("on_device", [False, True])
def test_runahead_cuda_part_copied_during_a_capture_does_not_spoil_it(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    cuda = install(monkeypatch, 0)
    worker = Worker(cuda, Span(0, 16), Rows, on_device)
    worker.rows.begin()
    worker.rows.wrote(0)

    def carry() -> None:
        part = worker.rows.buffer(16 * worker.rows.token_bytes)
        worker.rows.read(0, worker.slots, part)
        worker.rows.write(1, worker.slots, part, 0).wait()

    thread = threading.Thread(target=carry)
    with cuda.graph(object()):
        thread.start()
        thread.join()


@pytest.mark.parametrize(
    ("asked", "says"), [([0, 2], "layer 2 after layer 0"), ([0, 1], "ended with layer 1")]
)
def test_runahead_cuda_skipped_layer_fails_the_forward(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], says: str
) -> None:
    worker = Worker(install(monkeypatch, 0), Span(0, 16), Rows)
    passing = KvPassing(JOB, KvReceiver(worker.rows, []), patience_s=20.0)

    def forward() -> None:
        with worker.gate(passing):
            for layer in asked:
                worker.pool.get_kv_buffer(layer)

    with pytest.raises(LayersSkipped, match=says):
        forward()


def test_runahead_cuda_device_work_is_not_counted_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part that does not come is waited for only once the device has nothing else to do."""
    cuda = install(monkeypatch, 0)
    worker = Worker(cuda, Span(16, 32), Rows)
    receiver = KvReceiver(worker.rows, [Predecessor(0, Span(0, 16))])
    passing = KvPassing(JOB, receiver, patience_s=0.05)
    receiver.bind(worker.slots[:16], 0)
    done = []
    cuda.current_stream().launch(lambda: done.append(receiver.waited_s))
    with pytest.raises(Late), worker.gate(passing):
        worker.pool.get_kv_buffer(0)
    assert done == [0.0]
    passing.close("done")
