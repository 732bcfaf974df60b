"""`torch.cuda` without a GPU: streams whose copies happen later, in any order that events allow.

What is launched inside `torch.cuda.stream(...)` waits in that stream's queue until somebody waits
for an event; then queues run on, picked at random, until it has come. Memory is that of the CPU, so
that a copy which is not ordered after what it needs, or before what overwrites it, shows.
"""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_cake.core.layout import BlockLayout
from sglang_cake.integration.memory import kv_pool, row_kernel
from sglang_cake.integration.memory.pool_planes import Piece

GARBAGE = 0xEE
_aten = torch.ops.aten
_LATER = {_aten.copy_, _aten.index_copy_, _aten.index_select, _aten.floor_divide}


class FakeRecord:
    """One recording of an event."""

    done = False
    at_s = 0.0

    def set(self) -> None:
        self.at_s = time.monotonic()
        self.done = True


class FakeEvent:
    def __init__(self, **kwargs: object) -> None:
        self._cuda = FakeCuda.now
        self.last: FakeRecord | None = None

    def record(self, stream: "FakeStream | None" = None) -> None:
        record = self.last = FakeRecord()
        (stream or self._cuda.current_stream()).launch(record.set)

    def query(self) -> bool:
        """Some time passes while the host asks."""
        self._cuda.check_captures()
        self._cuda.run_some()
        return self.last is None or self.last.done

    def synchronize(self) -> None:
        self._cuda.check_captures()
        self._cuda.run_until(self.last)

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.last is not None
        assert end.last is not None
        assert self.last.done
        assert end.last.done
        return 1e3 * (end.last.at_s - self.last.at_s)


class FakeStream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._cuda = FakeCuda.now
        self.priority = priority
        self.device_index = 0
        self.queue: deque[tuple[FakeRecord | None, Callable[[], object]]] = deque()
        self._cuda.streams.append(self)

    def launch(self, work: Callable[[], object], after: FakeRecord | None = None) -> None:
        with self._cuda.lock:
            self.queue.append((after, work))
        if self._cuda.eager:
            self._cuda.run_all()

    def wait_event(self, event: FakeEvent) -> None:
        self.launch(lambda: None, after=event.last)

    def wait_stream(self, other: "FakeStream") -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)


class FakeCuda:
    """One at a time.

    Args:
        seed: of the order in which streams go on.
        eager: what is launched runs at once.
    """

    now: "FakeCuda"

    def __init__(self, seed: int, *, eager: bool = False) -> None:
        FakeCuda.now = self
        self.eager = eager
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self._random = random.Random(seed)
        self._here = threading.local()
        self._capturing = False  # a graph, in the mode of PyTorch's default
        self._spoiled = False

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, inside = self.current_stream(), self._here.inside
        self._here.inside = True
        self.set_stream(stream)
        try:
            yield
        finally:
            self._here.inside = inside
            self.set_stream(before)

    def set_stream(self, stream: FakeStream) -> None:
        """What this thread launches waits in `stream`. Outside of `with torch.cuda.stream(...)`,
        what it launches in its own stream runs at once."""
        here = self._here
        if here.mode is not None:
            here.mode.__exit__(None, None, None)
        here.mode, here.stream = None, stream
        if not self.eager and (here.inside or stream is not here.own):
            here.mode = _Later(stream)
            here.mode.__enter__()

    def current_stream(self, device: object = None) -> FakeStream:
        """Of this thread; one that has none gets its own."""
        if getattr(self._here, "stream", None) is None:
            self._here.stream = self._here.own = FakeStream()
            self._here.inside, self._here.mode = False, None
        found: FakeStream = self._here.stream
        return found

    @contextlib.contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        """As `torch.cuda.graph`; only for what is launched meanwhile in other streams."""
        self._capturing, self._spoiled = True, False
        try:
            yield
        finally:
            self._capturing = False
        if self._spoiled:
            raise RuntimeError("CUDA error: operation failed due to a previous error in capture")

    def exchange_capture_mode(self, mode: int) -> int:
        """Of this thread; 0 at first, in which it heeds captures of other threads."""
        before = getattr(self._here, "capture_mode", 0)
        self._here.capture_mode = mode
        return before

    def check_captures(self) -> None:
        if self._capturing and getattr(self._here, "capture_mode", 0) == 0:
            self._spoiled = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def run_until(self, record: FakeRecord | None, deadline_s: float = 60.0) -> None:
        end_s = time.monotonic() + deadline_s
        while record is not None and not record.done:
            if not self._step():
                assert time.monotonic() < end_s, "streams wait for each other"
                time.sleep(0.0005)

    def run_some(self) -> None:
        for _ in range(self._random.randrange(4)):
            self._step()

    def run_all(self, device: object = None) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        with self.lock:
            ready = [s for s in self.streams if s.queue and _is_free(s.queue[0][0])]
            if not ready:
                return False
            _, work = self._random.choice(ready).queue.popleft()
            with _disable_current_modes(), torch.inference_mode():
                work()
            return True


def _is_free(after: FakeRecord | None) -> bool:
    return after is None or after.done


class _Later(TorchDispatchMode):
    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _LATER:
            self._stream.launch(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        if func.overloadpacket is _aten.clone:
            made = torch.empty_like(args[0]).fill_(GARBAGE)
            self._stream.launch(lambda: made.copy_(args[0]))
            return made
        result = func(*args, **kwargs)
        if func.overloadpacket is _aten.empty:
            result.fill_(GARBAGE)
        return result


class PlainRowKernel:
    """In place of `RowKernel`, which needs a GPU."""

    def __init__(self, planes: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        self._planes = planes
        self._layout = layout

    def compile(self, pieces: Sequence[Piece]) -> None:
        """Nothing: PyTorch is compiled."""

    def scatter(
        self, blocks: torch.Tensor, slots: torch.Tensor, piece: Piece | None = None
    ) -> None:
        for plane, index, rows in self._parts(blocks, slots, piece):
            plane.index_copy_(0, index, rows)

    def gather(self, slots: torch.Tensor, blocks: torch.Tensor, piece: Piece | None = None) -> None:
        for plane, index, rows in self._parts(blocks, slots, piece):
            torch.index_select(plane, 0, index, out=rows)

    def _parts(
        self, blocks: torch.Tensor, slots: torch.Tensor, piece: Piece | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        layout = self._layout
        piece = piece or Piece(slice(None), 0, layout.block_bytes)
        pairs = list(zip(self._planes, layout.planes, strict=True))[piece.planes]
        for block, part in zip(blocks, slots.split(layout.block_tokens), strict=True):
            for pool, plane in pairs:
                start = plane.start - piece.start
                rows = block[start : start + plane.rows * plane.row_bytes]
                index = part
                if plane.row_tokens > 1:
                    index = torch.empty(plane.rows, dtype=part.dtype)
                    torch.floor_divide(part[:: plane.row_tokens], plane.row_tokens, out=index)
                yield pool, index, rows.view(pool.dtype).view(plane.rows, -1)


class _Cudart:
    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def install(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    *,
    eager: bool = False,
    kernel: type[PlainRowKernel] = PlainRowKernel,
) -> FakeCuda:
    """In place of what `sglang_cake` and its benchmarks use of `torch.cuda`."""
    cuda = FakeCuda(seed, eager=eager)
    for name, value in (
        ("Event", FakeEvent),
        ("Stream", FakeStream),
        ("stream", cuda.stream),
        ("set_stream", cuda.set_stream),
        ("current_stream", cuda.current_stream),
        ("synchronize", cuda.run_all),
        ("device", lambda device: contextlib.nullcontext()),
        ("cudart", _Cudart),
        ("CUDAGraph", object),
        ("graph", cuda.graph),
        ("set_sync_debug_mode", lambda mode: None),
        ("memory_allocated", lambda device: 0),
        ("max_memory_allocated", lambda device: 0),
        ("reset_peak_memory_stats", lambda device: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    # They need a GPU. Parameters would go through every maker of a `CudaKV`.
    monkeypatch.setattr(row_kernel, "RowKernel", kernel)
    monkeypatch.setattr(kv_pool, "exchange_capture_mode", cuda.exchange_capture_mode)
    return cuda
