"""SGLang's KV pools as rows of bytes: the layout of a block, and copies in and out of the pool."""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.core.buffers import PAGE_BYTES, Buffer
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout

RING_BLOCKS = 4  # blocks that one kernel moves out of the pool
RING_BYTES = 96 * 2**20  # at most, of device memory, for blocks on their way out
# Row copies use the widest integer type that divides every row, whatever the dtype of the KV: there
# are no index kernels for float8.
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


# A point of the device's work: events that are recorded at it. On a CPU there are none.
Fence = tuple[torch.cuda.Event, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies that were launched.

    Attributes:
        event: recorded behind the copies; None: they are complete.
        pool: recorded behind the last access to the KV pool; None: it is over.
        keep: device memory that must live until the copies are complete.
        begin: recorded before the copies, if they are timed.
        took_s: time of copies that were complete at once.
        number: copies in one direction are launched, and end, in the order of their numbers.
    """

    event: torch.cuda.Event | None = None
    pool: torch.cuda.Event | None = None
    keep: tuple[torch.Tensor, ...] = ()
    begin: torch.cuda.Event | None = None
    took_s: float = 0.0
    number: int = 0

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

    Every copy is complete when the call returns. The copier's thread calls `load` and `save`, and
    the scheduler thread the rest.

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
        word = WORDS[math.gcd(max(WORDS), *self.layout.plane_token_bytes)]
        self._rows = [buffer.view(len(buffer), -1).view(word) for buffer in buffers]

    @property
    def rows(self) -> Sequence[torch.Tensor]:
        """The pool itself, in block order: the planes of each layer, each `[slots, words]`."""
        return self._rows

    @property
    def load_buffer_bytes(self) -> int:
        """Size of a buffer that `load` takes; those of `save` have the size of a block."""
        return self.layout.block_bytes + (ENCODED_HEAD_BYTES if self.encoded else 0)

    def here(self) -> contextlib.AbstractContextManager[object]:
        """The context of a thread that calls `load` and `save`."""
        return torch.inference_mode()

    def fence(self) -> Fence:
        """The end of all work launched so far: slots that are free now may be written behind it,
        and hold the KV that was computed so far."""
        return ()

    def load(self, block: Buffer, slots: torch.Tensor, after: Fence) -> Copy:
        """Copy a whole block into slots (int64 `[block_tokens]`, on the device), behind `after`."""
        started_s = time.perf_counter()
        self._scatter([self._fetched(block)], slots)
        return Copy(took_s=time.perf_counter() - started_s)

    def save(self, slots: torch.Tensor, blocks: Sequence[Buffer], after: Fence) -> Copy:
        """Copy slots (int64 `[len(blocks) * block_tokens]`, on the device), as they are behind
        `after`, into whole blocks."""
        self._gather(slots, [_tensor(block) for block in blocks])
        return Copy()

    def order_forwards_after(self, copies: Sequence[Copy]) -> None:
        """Forwards that are launched from now on start after these copies, all in one direction,
        have left the KV pool."""

    def _fetched(self, buffer: Buffer) -> torch.Tensor:
        """The block that a buffer holds (uint8 `[block_bytes]`), on the device."""
        if self.encoded:
            from sglang_cake.integration.memory.device_decode import decode_payload  # loads numba

            return decode_payload(self.layout, _tensor(buffer), self.device)
        return _tensor(buffer).to(self.device, non_blocking=True)

    def _scatter(self, blocks: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        for block, part in zip(blocks, self._parts(slots), strict=True):
            planes = list(self._planes_of(block))
            if (run := _run_of(part)) is not None:
                torch._foreach_copy_([rows[run] for rows in self._rows], planes)
                continue
            for rows, plane in zip(self._rows, planes, strict=True):
                rows.index_copy_(0, part, plane)

    def _gather(self, slots: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        for block, part in zip(blocks, self._parts(slots), strict=True):
            planes = list(self._planes_of(block))
            if (run := _run_of(part)) is not None:
                torch._foreach_copy_(planes, [rows[run] for rows in self._rows])
                continue
            for rows, plane in zip(self._rows, planes, strict=True):
                torch.index_select(rows, 0, part, out=plane)

    def _parts(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        size = self.layout.block_tokens
        return (slots[i : i + size] for i in range(0, len(slots), size))

    def _planes_of(self, block: torch.Tensor) -> Iterator[torch.Tensor]:
        """The planes of a block (uint8 `[block_bytes]`), in the words of the pool's rows."""
        for rows, start, token_bytes in zip(
            self._rows, self.layout.plane_offsets, self.layout.plane_token_bytes, strict=True
        ):
            plane = block[start : start + token_bytes * self.layout.block_tokens]
            yield plane.view(rows.dtype).view(-1, rows.shape[1])


class CudaKV(DeviceKV):
    """The same on a GPU: copies run on two streams of their own, one each way, beside forwards.

    A block goes through a ring of blocks in device memory: one DMA between host and ring, and one
    kernel between ring and slots (`row_kernel.py`). The order of launches on a stream is the order
    in which its ring is used, so nothing waits for a free place. The host waits for
    a copy only if its buffer is not pinned.

    Args:
        forward_stream: the stream that forwards run on; None: the scheduler's current stream.
    """

    def __init__(
        self,
        pool: Any,
        *,
        block_tokens: int,
        forward_stream: torch.cuda.Stream | None,
        encoded: bool = False,
    ) -> None:
        from sglang_cake.integration.memory.row_kernel import RowKernel  # loads Triton

        super().__init__(pool, block_tokens=block_tokens, encoded=encoded)
        self._forward = forward_stream
        # Of high priority: PyTorch gives out the same few streams in turn, and SGLang's are of
        # normal priority. A kernel of ours is short, and waits for no block of a long one.
        self._in = torch.cuda.Stream(self.device, priority=-1)
        self._out = torch.cuda.Stream(self.device, priority=-1)
        stride = -(-self.layout.block_bytes // PAGE_BYTES) * PAGE_BYTES
        count = max(1, min(RING_BLOCKS, RING_BYTES // stride))
        self._ring_in = torch.empty((1, stride), dtype=torch.uint8, device=self.device)
        self._ring_out = torch.empty((count, stride), dtype=torch.uint8, device=self.device)
        self._index = torch.arange(count, device=self.device)
        self._numbers = itertools.count()
        self._kernel = RowKernel(self._rows, self.layout)

    def here(self) -> contextlib.AbstractContextManager[object]:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.cuda.device(self.device))
        return stack

    def fence(self) -> Fence:
        return tuple(_recorded(stream) for stream in self._launching)

    def load(self, block: Buffer, slots: torch.Tensor, after: Fence) -> Copy:
        with torch.cuda.stream(self._in):
            for event in after:
                self._in.wait_event(event)
            begin = _recorded(self._in, timed=True)
            if self.encoded:
                ring = self._fetched(block).unsqueeze(0)
            else:
                ring = self._ring_in
                ring[0, : self.layout.block_bytes].copy_(_tensor(block), non_blocking=True)
            self._kernel.scatter(ring, self._index[:1], slots)
            end = _recorded(self._in, timed=True)
            return Copy(end, end, (ring, slots), begin, number=next(self._numbers))

    def save(self, slots: torch.Tensor, blocks: Sequence[Buffer], after: Fence) -> Copy:
        tokens = self.layout.block_tokens
        count = len(self._ring_out)
        with torch.cuda.stream(self._out):
            for event in after:
                self._out.wait_event(event)
            for start in range(0, len(blocks), count):
                part = blocks[start : start + count]
                rows = slots[start * tokens : (start + len(part)) * tokens]
                self._kernel.gather(rows, self._ring_out, self._index[: len(part)])
                pool = _recorded(self._out)
                for block, place in zip(part, self._ring_out, strict=False):
                    source = place[: self.layout.block_bytes]
                    _tensor(block).copy_(source, non_blocking=True)
            return Copy(_recorded(self._out), pool, (slots,), number=next(self._numbers))

    def order_forwards_after(self, copies: Sequence[Copy]) -> None:
        if copies:
            last = max(copies, key=lambda copy: copy.number)
            assert last.pool is not None
            (self._forward or torch.cuda.current_stream(self.device)).wait_event(last.pool)

    @property
    def _launching(self) -> list[torch.cuda.Stream]:
        """The streams on which SGLang computes and allocates."""
        current = torch.cuda.current_stream(self.device)
        return [current] if self._forward is None else [current, self._forward]


def _recorded(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def _run_of(slots: torch.Tensor) -> slice | None:
    """Slots in CPU memory that lie one behind the other, as they do unless the pool is fragmented.

    One call copies such slots of all planes. It is faster than indexing, and lets go of the GIL
    once, and not once for each plane.
    """
    numbers = slots.numpy()
    first = int(numbers[0])
    run = slice(first, first + len(numbers))
    return run if (numbers == np.arange(run.start, run.stop)).all() else None


def _tensor(buffer: Buffer) -> torch.Tensor:
    """uint8, over the buffer's memory."""
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


def _planes(
    pool: Any,
) -> tuple[list[torch.Tensor], tuple[tuple[str, tuple[int, ...]], ...], torch.dtype]:
    """The pool's buffers in block order, the planes of a layer, and the dtype of the KV.

    Raises: ConfigError for a pool with anything else for each slot (scales, an index), or with
    buffers of another form.
    """
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    if (k_buffer := getattr(pool, "k_buffer", None)) and (v_buffer := pool.v_buffer):
        known = {"k_buffer", "v_buffer"}
        buffers = [buffer for pair in zip(k_buffer, v_buffer, strict=True) for buffer in pair]
        parts = (("k", _token_shape(k_buffer[0])), ("v", _token_shape(v_buffer[0])))
    elif kv_buffer := getattr(pool, "kv_buffer", None):
        known = {"kv_buffer"}
        buffers = list(kv_buffer)
        parts = (("kv", _token_shape(kv_buffer[0])),)
    else:
        raise ConfigError(
            f"cake cannot store a {type(pool).__name__}: it supports plain MHA, GQA and MLA pools"
        )
    slots = len(buffers[0])
    further = sorted(
        name
        for name, value in vars(pool).items()
        if name not in known and _is_of_slots(value, slots)
    )
    if further:
        raise ConfigError(
            f"cake cannot store a {type(pool).__name__}: it keeps {', '.join(further)} beside K "
            "and V; use another --kv-cache-dtype or model"
        )
    shapes = {_token_shape(b) for b in buffers[:: len(parts)]}
    if len(shapes) != 1 or any(b.dim() != 3 or not b.is_contiguous() for b in buffers):
        raise ConfigError("cake needs KV buffers of [slots, heads, dim] with equal layers")
    return buffers, parts, pool.dtype


def _is_of_slots(value: object, slots: int) -> bool:
    """Whether a member of a pool is memory with an entry for each slot, in one or all layers."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, torch.Tensor) and first.dim() > 1 and len(first) == slots


def _token_shape(buffer: torch.Tensor) -> tuple[int, ...]:
    return tuple(buffer.shape[1:])
