"""The order of copies of an overlapped last step on a GPU, on a simulated device."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, install
from test_runahead_cuda import LAYERS, Rows, Worker, truth

from sglang_cake.core.buffers import Buffer
from sglang_cake.core.errors import OverlapError
from sglang_cake.core.token_span import Span
from sglang_cake.integration.memory.kv_pool import Copy
from sglang_cake.integration.overlap.overlapped_step import StreamedBlock, StreamedBlocks
from sglang_cake.loading.loader import BlockRead

BLOCK, PATIENCE_S = 16, 60.0
PREFIX = 2 * BLOCK


class Coming:
    """Two blocks that come a layer at a time, into a worker whose own tokens follow them."""

    def __init__(self, cuda: FakeCuda, rows: type[Rows]) -> None:
        self.cuda, self.worker = cuda, Worker(cuda, Span(PREFIX, PREFIX + 8), rows)
        width = self.worker.rows.token_bytes // 2
        self.pieces, self.data = [], []
        for block in range(2):
            tokens = range(block * BLOCK, (block + 1) * BLOCK)
            planes = [truth(i // 2, i % 2, tokens, width).flatten() for i in range(2 * LAYERS)]
            self.data.append(torch.cat(planes))
            buffer = Buffer(memoryview(bytearray(b"\x09" * len(self.data[-1]))))
            slots = self.worker.slots[block * BLOCK : (block + 1) * BLOCK]
            self.pieces.append(StreamedBlock(block, BlockRead(buffer), slots, 0))
        until_s = time.monotonic() + PATIENCE_S
        self.tail = StreamedBlocks(
            self.worker.rows, self.pieces, block_tokens=BLOCK, until_s=until_s
        )

    def bring(self, *, whole: bool) -> None:
        """As a store and the loader do, in their thread."""
        size = len(self.data[0]) // LAYERS
        for piece in self.pieces:
            piece.block_read.received(0)
        for layer in range(LAYERS):
            for piece, data in zip(self.pieces, self.data, strict=True):
                part = slice(layer * size, (layer + 1) * size)
                piece.block_read.buffer.view[part] = data[part].numpy().data
                piece.block_read.received((layer + 1) * size)
        for piece in self.pieces:
            piece.block_read.end(whole=whole)

    def forward(self) -> None:
        """As FlashInfer: asks for K and for V, attends, and writes its own after that."""
        worker, stream = self.worker, self.cuda.current_stream()
        stream.launch(lambda: worker.fill(range(worker.span.stop), 3))  # whose slots these were
        worker.rows.begin()
        with worker.gate(self.tail):
            for layer in range(LAYERS):
                worker.pool.get_key_buffer(layer)
                worker.pool.get_value_buffer(layer)
                stream.launch(lambda layer=layer: worker.attend(layer))
                stream.launch(lambda layer=layer: worker.write(layer))

    def reuse(self) -> None:
        """The buffers are somebody else's."""
        for piece in self.pieces:
            piece.block_read.buffer.view[:] = b"\x09" * len(piece.block_read.buffer.view)


def run(cuda: FakeCuda, rows: type[Rows] = Rows, *, before: bool = False) -> Sequence[str]:
    """Args: before: all has come when the forward begins."""
    coming = Coming(cuda, rows)
    store = threading.Thread(target=coming.bring, kwargs={"whole": True}, daemon=True)
    store.start()
    if before:
        store.join(PATIENCE_S)
    coming.forward()
    coming.tail.finish()
    coming.reuse()
    cuda.run_all()
    store.join(PATIENCE_S)
    assert coming.worker.computed == LAYERS - 1
    return coming.worker.wrong


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_overlap_cuda_attention_reads_the_loaded_blocks(
    monkeypatch: pytest.MonkeyPatch, seed: int, before: bool
) -> None:
    assert run(install(monkeypatch, seed), before=before) == []


class _NotWaitedFor(Rows):
    def write(self, *args: Any) -> Copy:
        super().write(*args)
        return Copy()


class _NotBeforeReading(Rows):
    def follow(self, layer: int) -> None:
        pass


class _NotAfterOthers(Rows):
    def begin(self) -> None:
        pass


@pytest.mark.parametrize("rows", [_NotWaitedFor, _NotBeforeReading, _NotAfterOthers])
def test_cuda_order_control_dropped_wait_gives_wrong_kv(
    monkeypatch: pytest.MonkeyPatch, rows: type[Rows]
) -> None:
    """The control of the test above."""
    assert any(run(install(monkeypatch, seed), rows, before=True) for seed in range(12))


@pytest.mark.parametrize("seed", range(12))
def test_overlap_cuda_failed_block_does_not_overwrite_its_computed_kv(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    cuda = install(monkeypatch, seed)
    coming = Coming(cuda, Rows)
    coming.bring(whole=False)
    with pytest.raises(OverlapError):
        coming.forward()
    first, second = coming.pieces
    coming.tail.settle()
    first.block_read.buffer.view[:] = coming.data[0].numpy().data
    coming.tail.write_whole([first])
    coming.reuse()
    stream, worker = cuda.current_stream(), coming.worker

    def compute() -> None:
        for layer in range(LAYERS):
            for plane in range(2):
                rows = worker.planes[2 * layer + plane]
                tokens = range(BLOCK, 2 * BLOCK)
                rows[second.slots] = truth(layer, plane, tokens, rows.shape[1])

    stream.launch(compute)
    cuda.run_all()
    for layer in range(LAYERS):
        stream.launch(lambda layer=layer: worker.attend(layer))
    cuda.run_all()
    assert worker.wrong == []
