"""SGLang's KV pools as rows of bytes: the layout of a block, and copies in and out of the pool."""

import contextlib
import ctypes
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_cake.codecs.block_arrays import takes_lossy
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.core.buffers import PAGE_BYTES, Buffer, mib
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout
from sglang_cake.integration.memory.pool_planes import (
    WORDS,
    Piece,
    moves_slots,
    pool_planes,
    translation_of,
)

logger = logging.getLogger("sglang_cake")

COPY_BYTES = 128 * 2**20  # at most, of device memory, for the copies of a process
PIECE_BYTES = 24 * 2**20  # of a block, at most, that one DMA and one kernel move
IN_BYTES = 64 * 2**20  # of device memory, at most, for blocks on their way in
OUT_BYTES = 56 * 2**20  # for blocks on their way out
MOST_PLACES = 16  # of one direction
# Device memory that decoding takes beside the block itself, in sizes of the block (5.1 at most, of
# what is decoded on a device).
DECODING_BLOCKS = 5.5

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: CUDA checks only captures of this thread

# A point of the device's work: events that are recorded at it. On a CPU there are none.
Fence = tuple[torch.cuda.Event, ...]
MakeKV = Callable[..., "DeviceKV"]  # as `DeviceKV.beside`


def pieces_of(
    layout: BlockLayout, piece_bytes: int = PIECE_BYTES, moving: Sequence[bool] | None = None
) -> list[Piece]:
    """A piece is copied at a time: as many planes as `piece_bytes` hold.

    Args: moving: for each plane, whether SGLang moves its rows; None: those of all or of none.

    Raises: ConfigError if `piece_bytes` do not hold one plane.
    """
    moving = moving or [False] * len(layout.planes)
    pieces: list[Piece] = []
    first = start = 0
    for number, plane in enumerate(layout.planes):
        stop = plane.start + plane.rows * plane.row_bytes
        if stop - plane.start > piece_bytes:
            raise ConfigError(
                f"a block of {layout.block_tokens} tokens has {mib(stop - plane.start)} of one "
                f"layer, and cake copies at most {mib(piece_bytes)} at a time: lower "
                "--cake-block-tokens"
            )
        if stop - start > piece_bytes or moving[number] != moving[first]:
            pieces.append(Piece(slice(first, number), start, plane.start - start, moving[first]))
            first, start = number, plane.start
    last = layout.block_bytes - start
    return [*pieces, Piece(slice(first, len(layout.planes)), start, last, moving[first])]


@dataclass(frozen=True, slots=True)
class CopyMemory:
    """Device memory that the copies of a process take, one way and the other.

    Attributes:
        piece_bytes: of a place, for a block or a piece of one.
        in_places, out_places: how many places the rings have.
        decoding_bytes: at most, beside the rings. 0: blocks are not encoded, or so large that a CPU
            decodes them.
    """

    piece_bytes: int
    in_places: int
    out_places: int
    decoding_bytes: int = 0

    @classmethod
    def of_blocks(cls, block_bytes: int, *, encoded: bool = False) -> "CopyMemory":
        """For blocks of this size, and for smaller ones. Args: encoded: loads come encoded."""
        piece = min(-(-block_bytes // PAGE_BYTES) * PAGE_BYTES, PIECE_BYTES)
        decoding = math.ceil(DECODING_BLOCKS * block_bytes)
        if encoded and block_bytes <= PIECE_BYTES and 2 * piece + decoding <= COPY_BYTES:
            return cls(piece, 1, 1, decoding)
        return cls(piece, min(MOST_PLACES, IN_BYTES // piece), min(MOST_PLACES, OUT_BYTES // piece))

    @property
    def all_bytes(self) -> int:
        return (self.in_places + self.out_places) * self.piece_bytes + self.decoding_bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies that were launched.

    Attributes:
        event: recorded after the copies; None: they are complete.
        pool: recorded after the last access to the KV pool; None: it is over.
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


class SlotRows(NamedTuple):
    """Where slots are in the pools, int64 `[slots]` each.

    Attributes:
        fixed: the slots, which are rows of the planes that SGLang does not move.
        moved: rows of the other planes.
    """

    fixed: torch.Tensor
    moved: torch.Tensor

    def of(self, moves: bool) -> torch.Tensor:
        return self.moved if moves else self.fixed

    def part(self, start: int, stop: int) -> "SlotRows":
        return SlotRows(self.fixed[start:stop], self.moved[start:stop])


class DeviceKV:
    """Copies between blocks in host memory and slots of SGLang's KV pools, in CPU memory.

    Every copy is complete when the call returns. The copier's thread calls `load` and `save`, and
    the scheduler thread the rest. The slots of a block fill whole pages, and slot `i` of them has
    its token `i`.

    Attributes:
        slots: the pool's, with those of the first page, which are never used.
        moves: SGLang moves slots to other rows. `before_moves` orders copies with that.
        also_scheduler: what the scheduler's stream does in the pools, as forwards do, waits for
            copies too.
        remote_writes: another server writes to slots that SGLang has allocated, in no stream.
        encoded: `load` gets payloads, and decodes them.
        rows: the pool itself, in block order: the planes of each layer, each `[rows, words]`. A row
            holds `row_tokens` slots of the layout's plane.
        streams: the streams that copies run on; None: they run in the calling thread.
        beside: `(pool, block_tokens=, drafts=)` makes the same for blocks of another pool, which
            are not larger, and not encoded.

    Args:
        pool: as `pool_planes` takes it, or planes whose rows are slots. Raises: ConfigError for any
            other.
        apart: as for `pool_planes`.
        drafts: pools of draft models, which keep their KV of a token in the token's slot too.
    """

    encoded = False
    streams: "CopyStreams | None" = None

    def __init__(
        self,
        pool: Any,
        *,
        block_tokens: int,
        apart: Sequence[object] = (),
        drafts: Sequence[Any] = (),
    ) -> None:
        self.beside: MakeKV = DeviceKV
        found = [*pool] if isinstance(pool, list) else pool_planes(pool, apart=apart)
        self.slots = min(each.slots for each in found)
        self.moves = moves_slots(pool)
        # SGLang moves slots on the scheduler thread's stream, and zeroes those it gives out.
        self.also_scheduler = self.moves
        self.remote_writes = False
        moving = [self.moves] * len(found)
        for draft in drafts:
            planes = pool_planes(draft, apart=apart, prefix="draft_")
            if min(each.slots for each in planes) < self.slots:
                raise ConfigError(
                    f"cake cannot store the KV of a draft model in a {type(draft).__name__}: it "
                    f"has no rows for {self.slots} slots"
                )
            found += planes
            # A draft model may have a pool of its own beside a memory of all other pools.
            moving += [moves_slots(draft)] * len(planes)
        for each in found:
            if block_tokens % each.group.row_tokens:
                raise ConfigError(
                    f"cake stores whole pages, and {block_tokens} tokens are no multiple of "
                    f"{each.group.row_tokens}: set --cake-block-tokens {each.group.row_tokens}"
                )
        self.layout = BlockLayout(tuple(each.group for each in found), block_tokens)
        self.device = found[0].buffers[0].device
        self._translate = translation_of(pool)
        self._moving = [
            moves for each, moves in zip(found, moving, strict=True) for _ in each.buffers
        ]
        all_rows = [buffer.view(len(buffer), -1) for each in found for buffer in each.buffers]
        word_bytes = math.gcd(max(WORDS), *(plane.row_bytes for plane in self.layout.planes))
        for rows in all_rows:  # a plane may be some columns of a tensor
            begin, stride = rows.storage_offset(), rows.stride(0)
            word_bytes = math.gcd(word_bytes, begin * rows.itemsize, stride * rows.itemsize)
        word = WORDS[word_bytes]
        self.rows = [rows.view(word) for rows in all_rows]
        self._word = str(word).removeprefix("torch.")  # as NumPy names it
        # Rows of one plane lie one after the other, unless pools share their memory.
        self._dense = not self.moves and all(rows.is_contiguous() for rows in self.rows)
        self._plane_words = [
            plane.rows * rows.shape[1]
            for plane, rows in zip(self.layout.planes, self.rows, strict=True)
        ]

    @property
    def load_buffer_bytes(self) -> int:
        """Size of a buffer that `load` takes; those of `save` have the size of a block."""
        return self.layout.block_bytes + (ENCODED_HEAD_BYTES if self.encoded else 0)

    def here(self) -> contextlib.AbstractContextManager[object]:
        """The context of a thread that calls `load` and `save`."""
        return torch.inference_mode()

    def fence(self) -> Fence:
        """The end of all work launched so far: slots that are free now may be written after it,
        and hold the KV that was computed so far."""
        return ()

    def load(self, block: Buffer, slots: torch.Tensor, after: Fence) -> Copy:
        """Copy a whole block into slots (int64 `[block_tokens]`, on the device), once `after` is
        reached."""
        started_s = time.perf_counter()
        where = self._rows_of(slots)
        if (start := self._start_of_run(where.fixed)) is not None:
            torch._foreach_copy_(self._run(start), self._planes_of(block))
        else:
            for rows, index, plane in self._indexed(block, where):
                rows.index_copy_(0, index, plane)
        return Copy(took_s=time.perf_counter() - started_s)

    def save(self, slots: torch.Tensor, blocks: Sequence[Buffer], after: Fence) -> Copy:
        """Copy slots (int64 `[len(blocks) * block_tokens]`, on the device), as they are once
        `after` is reached, into whole blocks."""
        all_rows = self._rows_of(slots)
        tokens = self.layout.block_tokens
        for number, block in enumerate(blocks):
            where = all_rows.part(number * tokens, (number + 1) * tokens)
            if (start := self._start_of_run(where.fixed)) is not None:
                torch._foreach_copy_(self._planes_of(block), self._run(start))
                continue
            for rows, index, plane in self._indexed(block, where):
                torch.index_select(rows, 0, index, out=plane)
        return Copy()

    def order_forwards_after(self, copies: Sequence[Copy]) -> None:
        """Forwards that are launched from now on start after these copies, all in one direction,
        have left the KV pool."""

    def order_writes_after(self, copies: Sequence[Copy]) -> None:
        """As `order_forwards_after`, before the slots of these copies are freed. Where other
        servers write to slots, the calling thread waits for the copies."""
        self.order_forwards_after(copies)

    def wait_for_copies(self) -> None:
        """Wait until all copies launched so far have left the KV pool."""

    def freed(self) -> None:
        """SGLang's allocator has freed slots. If a forward is being launched, wait until the device
        has listed them: SGLang's scheduler reads the list in another stream. Scheduler thread."""

    def before_moves(self, stream: Any) -> None:
        """Work that is launched on `stream` from now on starts after all copies launched so far."""

    def _rows_of(self, slots: torch.Tensor) -> SlotRows:
        """Where slots are now: in whole pages, as they are given."""
        return SlotRows(slots, slots if self._translate is None else self._translate(slots))

    def _start_of_run(self, slots: torch.Tensor) -> int | None:
        """The first of slots in CPU memory that lie one after the other, as they do unless the
        pool is fragmented; None: these do not.

        One call copies such slots of all planes. It is faster than indexing, and lets go of the GIL
        once, and not once for each plane.
        """
        numbers = slots.numpy()
        first = int(numbers[0])
        in_a_row = self._dense and (numbers == np.arange(first, first + len(numbers))).all()
        return first if in_a_row else None

    @cached_property
    def _pool_words(self) -> list[np.ndarray]:
        """The words of each plane of the pool. A view that NumPy makes keeps the GIL. One that
        PyTorch makes lets go of it, and another thread may take it meanwhile: for a block of 20
        planes that took longer than its copy."""
        return [rows.view(-1).numpy() for rows in self.rows]

    def _planes_of(self, block: Buffer) -> list[torch.Tensor]:
        """The planes of a block, `[words]` each."""
        words = np.frombuffer(block.view, np.uint8)[: self.layout.block_bytes].view(self._word)
        stops = itertools.accumulate(self._plane_words)
        return [
            torch.from_numpy(words[stop - size : stop])
            for stop, size in zip(stops, self._plane_words, strict=True)
        ]

    def _run(self, start: int) -> list[torch.Tensor]:
        """The same words in the pool, of a block whose slots begin at `start` and lie one after
        the other."""
        tokens = self.layout.block_tokens
        return [
            torch.from_numpy(words[(first := start * size // tokens) : first + size])
            for words, size in zip(self._pool_words, self._plane_words, strict=True)
        ]

    def _indexed(
        self, block: Buffer, where: SlotRows
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each plane: the pool's rows, which of them are those of a block's slots, and the rows
        of the block."""
        index: dict[tuple[bool, int], torch.Tensor] = {}
        blocks = self._planes_of(block)
        planes = zip(self.rows, self.layout.planes, self._moving, blocks, strict=True)
        for rows, plane, moves, words in planes:
            key = moves, (tokens := plane.row_tokens)
            if key not in index:
                of_slots = where.of(moves)
                index[key] = of_slots if tokens == 1 else of_slots[::tokens] // tokens
            yield rows, index[key], words.view(-1, rows.shape[1])


@dataclass(eq=False, slots=True)
class RingPlace:
    """Device memory for a piece of a block on its way into the pool.

    Attributes:
        memory: uint8 `[1, piece_bytes]`.
        fetched: recorded in the stream `fetching`, after the last DMA into the memory.
        read: recorded in the stream `into`, after what read the memory last. Copies have it too.
    """

    memory: torch.Tensor
    fetched: torch.cuda.Event
    read: torch.cuda.Event


class CopyStreams:
    """The streams that copies run on, and the device memory that bytes go through: a ring of places
    each way (docs/architecture.md#copies). All pools of a process share them.

    Events order the streams with the use of places. The host never waits for a free one.

    Attributes:
        into: the stream that writes into pools.
        fetching: the stream of DMAs from host memory into places.
        out: the stream out of pools.
        piece_bytes: of a place.
        places: of the ring into pools, again and again.
        ring_out: uint8 `[places, piece_bytes]`.
        numbers: the numbers of copies, in the order of their launches.

    Args:
        forward: the stream that forwards run on; None: the scheduler's current stream.
    """

    def __init__(
        self, device: torch.device, memory: CopyMemory, forward: torch.cuda.Stream | None
    ) -> None:
        self._device = device
        self.forward = forward
        # Of high priority: PyTorch gives out the same few streams in turn, and SGLang's are of
        # normal priority. A kernel of ours is short, and starts before blocks of others that have
        # not begun.
        self.into = torch.cuda.Stream(device, priority=-1)
        self.fetching = torch.cuda.Stream(device, priority=-1)
        self.out = torch.cuda.Stream(device, priority=-1)
        self.piece_bytes = memory.piece_bytes
        ring = partial(torch.empty, dtype=torch.uint8, device=device)
        self.ring_out = ring((memory.out_places, memory.piece_bytes))
        places = [
            RingPlace(each, torch.cuda.Event(), torch.cuda.Event())
            for each in ring((memory.in_places, memory.piece_bytes)).split(1)
        ]
        self.places = itertools.cycle(places)
        self._waited: dict[torch.cuda.Stream, Fence] = {}  # what a stream has waited for last
        self.numbers = itertools.count()

    @contextlib.contextmanager
    def launching(self, stream: torch.cuda.Stream, after: Fence) -> Iterator[None]:
        """Launch copies in `stream`, to run once `after` is reached. If that fails, what was
        launched is over before the error is raised: its slots and buffers get other owners then."""
        with _current(stream):
            if after is not self._waited.get(stream):  # slots of many blocks have one fence
                for event in after:
                    stream.wait_event(event)
                self._waited[stream] = after
            try:
                yield
            except BaseException:
                _recorded(self.fetching).synchronize()
                _recorded(stream).synchronize()
                raise

    @property
    def of_sglang(self) -> list[torch.cuda.Stream]:
        """The streams on which SGLang computes and allocates: the scheduler's, and that of forwards
        if it is another one. Scheduler thread."""
        current = torch.cuda.current_stream(self._device)
        return [current] if self.forward is None else [current, self.forward]

    def fetch(self, source: torch.Tensor, place: RingPlace) -> None:
        """Copy host memory (uint8) into a place, for copies in `into`."""
        self.fetching.wait_event(place.read)
        with _current(self.fetching):
            place.memory[0, : source.numel()].copy_(source, non_blocking=True)
        place.fetched.record(self.fetching)
        self.into.wait_event(place.fetched)


class CudaKV(DeviceKV):
    """The same on a GPU: copies run on streams of their own beside forwards. The host waits for one
    only if its buffer is not pinned.

    Args:
        forward_stream: as for `CopyStreams`.
        encoded: blocks come encoded; they are decoded on the device unless they are too large.
        streams: the streams of another pool of the process; None: new streams.
    """

    streams: CopyStreams

    def __init__(
        self,
        pool: Any,
        *,
        block_tokens: int,
        forward_stream: torch.cuda.Stream | None,
        encoded: bool = False,
        apart: Sequence[object] = (),
        drafts: Sequence[Any] = (),
        streams: CopyStreams | None = None,
    ) -> None:
        from sglang_cake.integration.memory.row_kernel import RowKernel  # loads Triton

        super().__init__(pool, block_tokens=block_tokens, apart=apart, drafts=drafts)
        # A block that is decoded is moved in one piece. A device decodes lossy codecs only.
        encoded = encoded and len(set(self._moving)) == 1 and takes_lossy(self.layout)
        memory = CopyMemory.of_blocks(self.layout.block_bytes, encoded=encoded)
        self.encoded = memory.decoding_bytes > 0
        self.streams = streams or CopyStreams(self.device, memory, forward_stream)
        self.beside = partial(CudaKV, forward_stream=forward_stream, streams=self.streams)
        self._pieces = pieces_of(self.layout, self.streams.piece_bytes, self._moving)
        self._kernel = RowKernel(self.rows, self.layout)
        self._kernel.compile(self._pieces)

    def here(self) -> contextlib.AbstractContextManager[object]:
        return copying_thread(self.device)

    def fence(self) -> Fence:
        return tuple(_recorded(stream) for stream in self.streams.of_sglang)

    def load(self, block: Buffer, slots: torch.Tensor, after: Fence) -> Copy:
        streams = self.streams
        with streams.launching(streams.into, after):
            begin = _recorded(streams.into, timed=True)
            rows = self._rows_of(slots)
            for piece in self._pieces:
                place = next(streams.places)
                if self.encoded:  # a block of one piece
                    from sglang_cake.integration.memory import device_decode  # loads numba

                    into = place.memory[0, : piece.size_bytes]
                    device_decode.decode_payload(self.layout, memory_of(block), into)
                else:
                    streams.fetch(_part(block, piece), place)
                self._kernel.scatter(place.memory, rows.of(piece.moves), piece)
                end = place.read = _recorded(streams.into, timed=True)
            return Copy(end, end, (slots,), begin, number=next(streams.numbers))

    def save(self, slots: torch.Tensor, blocks: Sequence[Buffer], after: Fence) -> Copy:
        streams = self.streams
        tokens = self.layout.block_tokens
        ring = streams.ring_out
        with streams.launching(streams.out, after):
            all_rows = self._rows_of(slots)
            for start in range(0, len(blocks), len(ring)):
                some = blocks[start : start + len(ring)]
                rows = all_rows.part(start * tokens, (start + len(some)) * tokens)
                for piece in self._pieces:
                    self._kernel.gather(rows.of(piece.moves), ring[: len(some)], piece)
                    pool = _recorded(streams.out)
                    for block, place in zip(some, ring, strict=False):
                        target = _part(block, piece)
                        target.copy_(place[: piece.size_bytes], non_blocking=True)
            return Copy(_recorded(streams.out), pool, (slots,), number=next(streams.numbers))

    def order_forwards_after(self, copies: Sequence[Copy]) -> None:
        if copies:
            left = _left_pool(copies)
            of_sglang = self.streams.of_sglang
            for stream in of_sglang if self.also_scheduler else of_sglang[-1:]:
                stream.wait_event(left)

    def order_writes_after(self, copies: Sequence[Copy]) -> None:
        super().order_writes_after(copies)
        if copies and self.remote_writes:
            _left_pool(copies).synchronize()

    def wait_for_copies(self) -> None:
        _recorded(self.streams.into).synchronize()
        _recorded(self.streams.out).synchronize()

    def freed(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream == self.streams.forward:
            _recorded(stream).synchronize()

    def before_moves(self, stream: Any) -> None:
        stream.wait_stream(self.streams.into)
        stream.wait_stream(self.streams.out)
        if self.remote_writes:  # another server may get the rows that the slots leave
            self.wait_for_copies()


@contextlib.contextmanager
def copying_thread(device: torch.device) -> Iterator[None]:
    """The calling thread copies on `device`, and heeds captures of CUDA graphs of its own alone:
    else its calls would spoil those of SGLang's scheduler."""
    with torch.inference_mode(), torch.cuda.device(device):
        before = exchange_capture_mode(_THREAD_LOCAL)
        try:
            yield
        finally:
            exchange_capture_mode(before)


def exchange_capture_mode(mode: int) -> int:
    """Set which captures CUDA checks in calls of this thread, and return the former mode.
    Raises: RuntimeError."""
    given = ctypes.c_int(mode)
    exchange = capture_mode_exchange()
    error = exchange(ctypes.byref(given)) if exchange else 0
    if error:
        raise RuntimeError(f"the mode of captures could not be set: error {error} of the driver")
    return given.value


@cache
def capture_mode_exchange() -> Callable[[Any], int] | None:
    """The function of the driver, which PyTorch has for C++ alone; None: it was not found."""
    try:
        if torch.version.hip is None:
            return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        # The name of ROCm's library has a version. It is found by a library that depends on it.
        library = Path(torch.__file__).parent / "lib" / "libc10_hip.so"
        return ctypes.CDLL(str(library)).hipThreadExchangeStreamCaptureMode
    except (OSError, AttributeError) as error:
        logger.warning("a graph that is captured while blocks are copied may fail: %s", error)
        return None


@contextlib.contextmanager
def _current(stream: torch.cuda.Stream) -> Iterator[None]:
    """The calling thread launches on `stream`, of the thread's device.

    `torch.cuda.stream` looks the device up each time, for which it asks for the driver: 14 us.
    """
    before = torch.cuda.current_stream(stream.device_index)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def _left_pool(copies: Sequence[Copy]) -> torch.cuda.Event:
    """Recorded when the last of these copies, all in one direction, leaves the KV pool."""
    event = max(copies, key=lambda copy: copy.number).pool
    assert event is not None
    return event


def _recorded(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def _part(block: Buffer, piece: Piece) -> torch.Tensor:
    """uint8 `[size_bytes]`, over the buffer's memory."""
    return torch.frombuffer(
        block.view, dtype=torch.uint8, count=piece.size_bytes, offset=piece.start
    )


def memory_of(buffer: Buffer) -> torch.Tensor:
    """uint8, over the buffer's memory."""
    return torch.frombuffer(buffer.view, dtype=torch.uint8)
