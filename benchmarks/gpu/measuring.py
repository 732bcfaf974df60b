"""What a step finds, and how it measures time, rates and memory of a GPU."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.stand_ins import PoolForm
from sglang_cake.core.buffers import Buffer, BufferPool, HostArena
from sglang_cake.integration.memory.host_pools import pin

GB = 1e9
LLAMA_8B = PoolForm(layers=32, heads=8, dim=128, v_dim=128)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report. Attributes: ok: whether it is as it must be; None: a figure alone."""

    what: str
    value: float | str
    unit: str = ""
    ok: bool | None = None


def not_run(reason: str) -> Finding:
    """In place of figures: what the machine lacks. A step that finds nothing else is skipped."""
    return Finding("NOT RUN", reason)


@dataclass(frozen=True, slots=True)
class Size:
    """How large the steps are.

    Attributes:
        pool_bytes: of the KV pool of the overlap loop, at most.
        gemm: rows and columns of the matrices of the load beside copies.
        gemms: how many of them are one load.
        blocks: how many of them a measurement of copies moves, or twice as many.
        turns: of the check of reused slots.
        pinned_bytes: host memory that is pinned beside launches, at most.
        has_goals: figures must reach the goals. Where everything is tiny, fixed times rule.
    """

    form: PoolForm
    block_tokens: int
    chunk_tokens: int
    prompts: tuple[int, ...]
    question_tokens: int
    links_gb_per_s: tuple[float, ...]
    repeats: int
    pool_bytes: int
    gemm: int
    gemms: int
    blocks: int
    turns: int
    pinned_bytes: int
    has_goals: bool

    def at_most(self, limit: float, what: str, value: float, unit: str = "") -> Finding:
        """A figure with a goal."""
        return Finding(what, value, unit, value <= limit if self.has_goals else None)

    def at_least(self, limit: float, what: str, value: float, unit: str = "") -> Finding:
        """A figure with a goal."""
        return Finding(what, value, unit, value >= limit if self.has_goals else None)


FULL = Size(
    form=LLAMA_8B,
    block_tokens=128,
    chunk_tokens=8192,
    prompts=(16384, 32768),
    question_tokens=100,
    links_gb_per_s=(2.0, 8.0, 25.0),
    repeats=3,
    pool_bytes=20 * 10**9,
    gemm=8192,
    gemms=300,
    blocks=48,
    turns=240,
    pinned_bytes=16 * 10**9,
    has_goals=True,
)
SMALL = Size(
    form=PoolForm(layers=4, heads=2, dim=32, v_dim=32),
    block_tokens=16,
    chunk_tokens=128,
    prompts=(512,),
    question_tokens=5,
    links_gb_per_s=(0.05,),
    repeats=1,
    pool_bytes=10**6,
    gemm=128,
    gemms=20,
    blocks=6,
    turns=60,
    pinned_bytes=2 * 10**8,
    has_goals=False,
)


def pinned(sizes_bytes: Sequence[int], device: torch.device) -> list[Buffer]:
    """Host memory as a server has it: one mapping, registered with CUDA. Raises: RuntimeError."""
    arena = HostArena(sizes_bytes, prefault=False)
    if pin(arena, device) < len(arena.buffers):
        raise RuntimeError("host memory cannot be pinned: see the log")
    return arena.buffers


def pinned_pool(count: int, size_bytes: int, device: torch.device) -> BufferPool:
    """Buffers of one size."""
    return BufferPool(pinned([size_bytes] * count, device))


def pinned_by_torch(size_bytes: int) -> torch.Tensor:
    """uint8, as PyTorch's own allocator pins it."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def bytes_of(buffer: Buffer) -> torch.Tensor:
    """uint8, over the buffer's memory."""
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


def random_bytes(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    """uint8."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)


def device_s(action: Callable[[int], object], *, repeats: int, warm: int = 2) -> float:
    """Seconds of the device for one call of `action(number)`, which launches on the current
    stream."""
    for number in range(warm):
        action(number)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for number in range(repeats):
        action(number)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def host_s(action: Callable[[int], object], *, repeats: int, warm: int = 2) -> float:
    """Seconds of the calling thread for one call of `action(number)`, while the device is idle
    before."""
    for number in range(warm):
        action(number)
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    for number in range(repeats):
        action(number)
    took_s = time.perf_counter() - begun_s
    torch.cuda.synchronize()
    return took_s / repeats


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """PyTorch raises where a call inside would wait for the device. It holds for all threads."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Load:
    """Matrix products on a stream, as a model's forward keeps the device busy."""

    def __init__(self, size: Size, stream: torch.cuda.Stream, device: torch.device) -> None:
        self.stream = stream
        self.device = device
        self._count = size.gemms
        shape = (size.gemm, size.gemm)
        self._left = torch.randn(shape, device=device, dtype=torch.bfloat16)
        self._right = torch.randn(shape, device=device, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._left)
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.launch(1)  # the first product sets up the library
        self.seconds()

    def launch(self, count: int | None = None) -> None:
        """Launch all products, or `count`."""
        with torch.cuda.stream(self.stream):
            self.begin.record()
            for _ in range(self._count if count is None else count):
                torch.matmul(self._left, self._right, out=self._out)
            self.end.record()

    def is_over(self) -> bool:
        return bool(self.end.query())

    def seconds(self) -> float:
        """How long the last ones took; waits for them."""
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1e3
