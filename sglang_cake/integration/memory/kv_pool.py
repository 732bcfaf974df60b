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
from sglang_cake.integration.memory.pool_planes import pool_planes

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
    the scheduler thread the rest. The slots of a block are those of whole pages, in order.

    Attributes:
        slots: the pool's, with those of the first page, which are never used.

    Args:
        pool: as `pool_planes` takes it. Raises: ConfigError for any other.
        encoded: `load` gets payloads, which are decoded on the device.
        apart: as for `pool_planes`.
        drafts: pools of draft models, which keep their KV of a token in the token's slot too.
    """

    def __init__(
        self,
        pool: Any,
        *,
        block_tokens: int,
        encoded: bool = False,
        apart: Sequence[object] = (),
        drafts: Sequence[Any] = (),
    ) -> None:
        found = pool_planes(pool, apart=apart)
        self.slots = min(each.slots for each in found)
        for draft in drafts:
            planes = pool_planes(draft, apart=apart, prefix="draft_")
            if min(each.slots for each in planes) < self.slots:
                raise ConfigError(
                    f"cake cannot store the KV of a draft model in a {type(draft).__name__}: it "
                    f"has no rows for {self.slots} slots"
                )
            found += planes
        for each in found:
            if block_tokens % each.group.row_tokens:
                raise ConfigError(
                    f"cake stores whole pages, and {block_tokens} tokens are no multiple of "
                    f"{each.group.row_tokens}: set --cake-block-tokens {each.group.row_tokens}"
                )
        self.layout = BlockLayout(tuple(each.group for each in found), block_tokens)
        self.device = found[0].buffers[0].device
        self.encoded = encoded
        word = WORDS[math.gcd(max(WORDS), *(plane.row_bytes for plane in self.layout.planes))]
        self._rows = [
            buffer.view(len(buffer), -1).view(word) for each in found for buffer in each.buffers
        ]

    @property
    def rows(self) -> Sequence[torch.Tensor]:
        """The pool itself, in block order: the planes of each layer, each `[rows, words]`. A row
        holds `row_tokens` slots of the layout's plane."""
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
            moves = list(self._planes_of(block, part))
            if (start := _start_of_run(part)) is not None:
                planes = [plane for _, _, plane in moves]
                torch._foreach_copy_([self._run(rows, start, p) for rows, _, p in moves], planes)
                continue
            for rows, index, plane in moves:
                rows.index_copy_(0, index, plane)

    def _gather(self, slots: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        for block, part in zip(blocks, self._parts(slots), strict=True):
            moves = list(self._planes_of(block, part))
            if (start := _start_of_run(part)) is not None:
                planes = [plane for _, _, plane in moves]
                torch._foreach_copy_(planes, [self._run(rows, start, p) for rows, _, p in moves])
                continue
            for rows, index, plane in moves:
                torch.index_select(rows, 0, index, out=plane)

    def _run(self, rows: torch.Tensor, start: int, plane: torch.Tensor) -> torch.Tensor:
        """The rows of one block whose slots begin at `start` and lie one behind the other."""
        first = start * len(plane) // self.layout.block_tokens
        return rows[first : first + len(plane)]

    def _parts(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        size = self.layout.block_tokens
        return (slots[i : i + size] for i in range(0, len(slots), size))

    def _planes_of(
        self, block: torch.Tensor, slots: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each plane: the pool's rows, which of them are those of `slots`, and the plane of a
        block (uint8 `[block_bytes]`) in the same words."""
        index = {1: slots}
        for rows, plane in zip(self._rows, self.layout.planes, strict=True):
            tokens = plane.row_tokens
            if tokens not in index:
                index[tokens] = slots[::tokens] // tokens
            data = block[plane.start : plane.start + plane.rows * plane.row_bytes]
            yield rows, index[tokens], data.view(rows.dtype).view(-1, rows.shape[1])


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
        apart: Sequence[object] = (),
        drafts: Sequence[Any] = (),
    ) -> None:
        from sglang_cake.integration.memory.row_kernel import RowKernel  # loads Triton

        super().__init__(
            pool, block_tokens=block_tokens, encoded=encoded, apart=apart, drafts=drafts
        )
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


def _start_of_run(slots: torch.Tensor) -> int | None:
    """The first of slots in CPU memory that lie one behind the other, as they do unless the pool is
    fragmented; None: these do not.

    One call copies such slots of all planes. It is faster than indexing, and lets go of the GIL
    once, and not once for each plane.
    """
    numbers = slots.numpy()
    first = int(numbers[0])
    return first if (numbers == np.arange(first, first + len(numbers))).all() else None


def _tensor(buffer: Buffer) -> torch.Tensor:
    """uint8, over the buffer's memory."""
    return torch.frombuffer(buffer.view, dtype=torch.uint8)
