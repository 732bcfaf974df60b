"""SGLang's KV pools as rows of bytes: the layout of a block, and copies in and out of the pool."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.core.buffers import Buffer
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout

# Row copies use the widest integer type that divides the row, whatever the dtype of the KV: there
# are no index kernels for float8.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class Copy:
    """A batch of copies that was launched.

    Attributes:
        event: recorded behind the copies; None: they are complete.
        keep: device memory that must live until the copies are complete.
        begin: recorded before the copies, if they are timed.
        took_s: time of copies that were complete at once.
    """

    event: torch.cuda.Event | None = None
    keep: tuple[torch.Tensor, ...] = ()
    begin: torch.cuda.Event | None = None
    took_s: float = 0.0

    def done(self) -> bool:
        """Whether the copies are complete, so that the host buffers may be reused."""
        return self.event is None or bool(self.event.query())

    def seconds(self) -> float:
        """How long the copies took, once they are done."""
        if self.event is None or self.begin is None:
            return self.took_s
        return float(self.begin.elapsed_time(self.event)) / 1e3

    def wait(self) -> None:
        """Block the calling thread until the copies are complete."""
        if self.event is not None:
            self.event.synchronize()


class DeviceKV:
    """Copies between blocks in host memory and slots of SGLang's KV pool, in CPU memory.

    Every copy is complete when the call returns.

    Args:
        pool: `MHATokenToKVPool` or `MLATokenToKVPool`. Raises: ConfigError for any other.
        encoded: `load` gets payloads, which are decoded on the device.
    """

    def __init__(self, pool: Any, *, block_tokens: int, encoded: bool = False) -> None:
        buffers, parts, dtype = _planes(pool)
        self.layout = BlockLayout(
            layers=len(buffers) // len(parts),
            parts=parts,
            dtype=str(dtype).removeprefix("torch."),
            block_tokens=block_tokens,
        )
        self.device = buffers[0].device
        self.encoded = encoded
        self._rows = [_as_words(buffer) for buffer in buffers]

    @property
    def rows(self) -> Sequence[torch.Tensor]:
        """The pool itself, in block order: the planes of each layer, each `[slots, words]`."""
        return self._rows

    @property
    def load_buffer_bytes(self) -> int:
        """Size of a buffer that `load` takes; those of `save` have the size of a block."""
        return self.layout.block_bytes + (ENCODED_HEAD_BYTES if self.encoded else 0)

    def load(self, blocks: Sequence[Buffer], slots: torch.Tensor) -> Copy:
        """Copy whole blocks into slots (int64 `[len(blocks) * block_tokens]`, on the device)."""
        started_s = time.perf_counter()
        self._scatter([self._fetched(block) for block in blocks], slots)
        return Copy(took_s=time.perf_counter() - started_s)

    def save(self, slots: torch.Tensor, blocks: Sequence[Buffer]) -> Copy:
        """Copy slots (int64 `[len(blocks) * block_tokens]`, on the device) into whole blocks.

        The slots may be reused as soon as this returns.
        """
        self._gather(slots, [_tensor(block) for block in blocks])
        return Copy()

    def order_after_copies(self) -> None:
        """Launches of the scheduler from now on start after the copies launched so far."""

    def _fetched(self, buffer: Buffer) -> torch.Tensor:
        """The block that a buffer holds (uint8 `[block_bytes]`), on the device."""
        if self.encoded:
            from sglang_cake.integration.memory.device_decode import decode_payload  # loads numba

            return decode_payload(self.layout, _tensor(buffer), self.device)
        return _tensor(buffer).to(self.device, non_blocking=True)

    def _scatter(self, blocks: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        for block, part in zip(blocks, self._parts(slots), strict=True):
            for rows, plane in zip(self._rows, self._planes_of(block), strict=True):
                rows.index_copy_(0, part, plane)

    def _gather(self, slots: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        for block, part in zip(blocks, self._parts(slots), strict=True):
            for rows, plane in zip(self._rows, self._planes_of(block), strict=True):
                torch.index_select(rows, 0, part, out=plane)

    def _parts(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        size = self.layout.block_tokens
        return (slots[i : i + size] for i in range(0, len(slots), size))

    def _planes_of(self, block: torch.Tensor) -> Iterator[torch.Tensor]:
        """The planes of a block (uint8 `[block_bytes]`), in the words of the pool's rows."""
        offset = 0
        for rows, token_bytes in zip(self._rows, self.layout.plane_token_bytes, strict=True):
            size = token_bytes * self.layout.block_tokens
            yield block[offset : offset + size].view(rows.dtype).view(-1, rows.shape[1])
            offset += size


class CudaKV(DeviceKV):
    """The same on a GPU: copies run on a side stream, beside the forwards.

    `load` and `save` order their copies after all launches so far; `order_after_copies` orders
    later launches after the copies. The host waits for a copy only if its buffer is not pinned.

    Args:
        forward_stream: the stream that forwards run on.
    """

    def __init__(
        self,
        pool: Any,
        *,
        block_tokens: int,
        forward_stream: torch.cuda.Stream,
        encoded: bool = False,
    ) -> None:
        super().__init__(pool, block_tokens=block_tokens, encoded=encoded)
        self._forward = forward_stream
        self._side = torch.cuda.Stream(self.device)

    def load(self, blocks: Sequence[Buffer], slots: torch.Tensor) -> Copy:
        with self._beside():
            begin = torch.cuda.Event(enable_timing=True)
            begin.record(self._side)
            sources = [self._fetched(block) for block in blocks]
            self._scatter(sources, slots)
            return self._launched(*sources, slots, begin=begin)

    def save(self, slots: torch.Tensor, blocks: Sequence[Buffer]) -> Copy:
        launcher = torch.cuda.current_stream(self.device)
        with self._beside():
            targets = [torch.empty_like(_tensor(b), device=self.device) for b in blocks]
            self._gather(slots, targets)
            launcher.wait_stream(self._side)  # for the gather, not for the copy to the host
            for block, target in zip(blocks, targets, strict=True):
                _tensor(block).copy_(target, non_blocking=True)
            return self._launched(*targets, slots)

    def order_after_copies(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        self._side.wait_stream(self._forward)
        return torch.cuda.stream(self._side)

    def _launched(self, *keep: torch.Tensor, begin: torch.cuda.Event | None = None) -> Copy:
        event = torch.cuda.Event(enable_timing=begin is not None)
        event.record(self._side)
        return Copy(event, keep, begin)


def _tensor(buffer: Buffer) -> torch.Tensor:
    """uint8, over the buffer's memory."""
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


def _planes(
    pool: Any,
) -> tuple[list[torch.Tensor], tuple[tuple[str, tuple[int, ...]], ...], torch.dtype]:
    """The pool's buffers in block order, the planes of a layer, and the dtype of the KV."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    # Exactly these classes: subclasses have scales, indexes or other layouts beside the buffers.
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    if type(pool) is MHATokenToKVPool:
        pairs = zip(pool.k_buffer, pool.v_buffer, strict=True)
        buffers = [buffer for pair in pairs for buffer in pair]
        parts = (("k", _token_shape(pool.k_buffer[0])), ("v", _token_shape(pool.v_buffer[0])))
    elif type(pool) is MLATokenToKVPool:
        buffers = list(pool.kv_buffer)
        parts = (("kv", _token_shape(pool.kv_buffer[0])),)
    else:
        raise ConfigError(
            f"cake cannot store a {type(pool).__name__}: it supports plain MHA, GQA and MLA pools"
        )
    shapes = {_token_shape(b) for b in buffers[:: len(parts)]}
    if len(shapes) != 1 or any(b.dim() != 3 or not b.is_contiguous() for b in buffers):
        raise ConfigError("cake needs KV buffers of [slots, heads, dim] with equal layers")
    return buffers, parts, pool.dtype


def _token_shape(buffer: torch.Tensor) -> tuple[int, ...]:
    return tuple(buffer.shape[1:])


def _as_words(buffer: torch.Tensor) -> torch.Tensor:
    """`[slots, words]` over the same memory."""
    rows = buffer.view(torch.uint8).view(buffer.shape[0], -1)
    for size, word in _WORDS:
        if rows.shape[1] % size == 0:
            return rows.view(word)
    raise AssertionError("one byte divides everything")
