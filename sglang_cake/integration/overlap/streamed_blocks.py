"""Blocks that come while a forward runs: each layer of them goes to its slots before attention
reads it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_cake.core.errors import OverlapError
from sglang_cake.integration.memory.kv_pool import Copy, HostBuffer
from sglang_cake.integration.overlap.layer_gate import PoolRows
from sglang_cake.loading.reading import Reading

LAYERS = "layers"  # the reason why a model cannot do this


@dataclass(frozen=True, slots=True)
class StreamedBlock:
    """A block that is on its way."""

    block: int
    reading: Reading
    slots: torch.Tensor  # int64, of those of its tokens that are needed
    skip: int  # tokens before these


class StreamedBlocks:
    """A `Passage`: what one forward finds on its way. The forward's thread.

    Args:
        block_tokens: of a whole block.
        until_s: monotonic; what has not come by then is not waited for.
    """

    def __init__(
        self, rows: PoolRows, pieces: Sequence[StreamedBlock], *, block_tokens: int, until_s: float
    ) -> None:
        self._rows, self.pieces, self._until_s = rows, pieces, until_s
        self._layer_bytes = rows.token_bytes * block_tokens
        self._written = 0  # layers
        self.waited_s = 0.0  # by the forward, so far
        self._copies: list[Copy] = []

    def reach(self, layer: int) -> None:
        self.wait(layer)

    def check(self) -> None:
        pass  # who waits looks

    def wrote(self, layer: int) -> None:
        pass  # nobody else wants them

    def has(self, layer: int) -> bool:
        if self._is_last(layer):
            return all(piece.reading.is_whole for piece in self.pieces)
        come_bytes = (layer + 1) * self._layer_bytes
        return all(piece.reading.has(come_bytes) for piece in self.pieces)

    def wait(self, layer: int) -> None:
        """Until the layer is there, and in its slots; at the last one, until every byte has passed
        the check, so that nothing is sampled from what has not. Raises: OverlapError."""
        if layer < self._written:
            return
        if layer > self._written:
            raise OverlapError(f"attention skipped layer {self._written}", LAYERS)
        began_s = time.monotonic()
        for piece in self.pieces:
            if not self._came(piece.reading, layer):
                late = time.monotonic() >= self._until_s
                what = "did not come in time" if late else "did not come, or came anew"
                raise OverlapError(f"block {piece.block} {what}", "late" if late else "lost")
        self.waited_s += time.monotonic() - began_s
        self._write(self.pieces, layer)
        self._written += 1

    def finish(self) -> None:
        """The forward has run. Raises: OverlapError if it used what has not passed its check."""
        if self._written != self._rows.layers:
            raise OverlapError(f"attention ended before layer {self._written}", LAYERS)
        self.settle()

    def settle(self) -> None:
        """Until nothing is copied any more: buffers may be reused, and slots written by others."""
        while self._copies:
            self._copies.pop().wait()

    def write_whole(self, pieces: Sequence[StreamedBlock]) -> None:
        """Copy pieces whose reads have ended well, whatever was copied of them before."""
        for layer in range(self._rows.layers):
            self._write(pieces, layer)
        self.settle()

    def _write(self, pieces: Sequence[StreamedBlock], layer: int) -> None:
        size = self._layer_bytes
        for piece in pieces:
            buffer = piece.reading.buffer
            assert isinstance(buffer, HostBuffer)
            part = buffer.view[layer * size : (layer + 1) * size]
            self._copies.append(self._rows.write(layer, piece.slots, part, piece.skip))

    def _came(self, reading: Reading, layer: int) -> bool:
        if self._is_last(layer):
            return reading.wait_whole(self._until_s)
        return reading.wait((layer + 1) * self._layer_bytes, self._until_s)

    def _is_last(self, layer: int) -> bool:
        return layer == self._rows.layers - 1
