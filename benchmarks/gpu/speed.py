"""How fast copies are: the device's own, the row kernel, and `CudaKV` beside matrix products."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from benchmarks.gpu.measuring import (
    GB,
    Finding,
    Load,
    Size,
    bytes_of,
    device_s,
    host_s,
    pinned,
    pinned_by_torch,
    pinned_pool,
)
from benchmarks.gpu.stand_ins import make_pool
from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.integration.memory.copier import CopyThread, SlotCopy
from sglang_cake.integration.memory.kv_pool import COPY_BYTES, CudaKV, Fence
from sglang_cake.loading.loader import HostBlock

STAGED = 8  # buffers of loads and of saves that take turns
SAVED = 4  # blocks of a save
NAP_S = 20e-6
MOST_HOST_US = 60.0  # of a thread, for the copies of a block
LEAST_GB_PER_S = 0.9 * 25  # of loads beside matrix products


def memcpy(size: Size, device: torch.device) -> Iterator[Finding]:
    """The device's own copies of whole blocks between host and device, one way and both ways."""
    block_bytes = size.form.token_bytes * size.block_tokens
    yield Finding("a block", block_bytes / 2**20, "MiB")
    own = [pinned_by_torch(block_bytes) for _ in range(size.blocks)]
    mapped = [bytes_of(buffer) for buffer in pinned([block_bytes] * size.blocks, device)]
    for name, host in (("memory of PyTorch", own), ("registered memory", mapped)):
        there = [torch.empty(block_bytes, dtype=torch.uint8, device=device) for _ in range(4)]
        ways = {
            "to the device": lambda n, h=host, t=there: t[n % 4].copy_(
                h[n % len(h)], non_blocking=True
            ),
            "to the host": lambda n, h=host, t=there: h[n % len(h)].copy_(
                t[n % 4], non_blocking=True
            ),
        }
        for way, copy in ways.items():
            took_s = device_s(copy, repeats=len(host))
            yield Finding(f"{way}, {name}", block_bytes / took_s / GB, "GB/s")
    yield Finding("both ways, registered memory", _both_ways(mapped, device), "GB/s in all")


def _both_ways(host: Sequence[torch.Tensor], device: torch.device) -> float:
    half = len(host) // 2
    there = [torch.empty_like(host[0], device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    for number in range(half):
        with torch.cuda.stream(streams[0]):
            there[0].copy_(host[number], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[half + number].copy_(there[1], non_blocking=True)
    torch.cuda.synchronize()
    return 2 * half * host[0].numel() / (time.perf_counter() - begun_s) / GB


def row_kernel(size: Size, device: torch.device) -> Iterator[Finding]:
    """The kernel alone, four blocks a launch, beside a copy of as many bytes within the device.
    Bytes count once; each is read and written."""
    from sglang_cake.integration.memory.row_kernel import RowKernel  # imports Triton

    slots = 16 * 4 * size.block_tokens
    pool = make_pool(size.form, slots, device=device)
    kv = CudaKV(pool, block_tokens=size.block_tokens, forward_stream=None)
    kernel, layout = RowKernel(kv.rows, kv.layout), kv.layout
    ring = torch.zeros((8, layout.block_bytes), dtype=torch.uint8, device=device)
    moved_bytes = 4 * layout.block_bytes
    # Blocks and slots change from launch to launch, so that no cache holds them.
    halves = ring.split(4)
    orders = {
        "slots in order": torch.arange(1, slots + 1, device=device),
        "slots at random": torch.randperm(slots, device=device) + 1,
    }
    for order, all_slots in orders.items():
        parts = all_slots.split(4 * size.block_tokens)
        launches: dict[str, Callable[[int], None]] = {
            "into the pool": lambda n, p=parts: kernel.scatter(halves[n % 2], p[n % 16]),
            "out of the pool": lambda n, p=parts: kernel.gather(p[n % 16], halves[n % 2]),
        }
        for way, launch in launches.items():
            took_s = device_s(launch, repeats=64)
            yield Finding(f"{way}, {order}", moved_bytes / took_s / GB, "GB/s")
    one, two = halves
    took_s = device_s(lambda n: (one, two)[n % 2].copy_((two, one)[n % 2]), repeats=64)
    yield Finding("memcpy within the device", moved_bytes / took_s / GB, "GB/s")
    took_s = host_s(lambda n: kernel.scatter(halves[0], parts[0]), repeats=64)
    yield Finding("host time of a launch", took_s * 1e6, "us")


class Copying:
    """Loads and saves of whole blocks as a server does them, by a `CopyThread`, as fast as it can.

    Its slots are reserved before the load on the device is launched, as in a server.
    """

    def __init__(self, size: Size, device: torch.device, forward: torch.cuda.Stream) -> None:
        slots = 4 * SAVED * size.block_tokens
        pool = make_pool(size.form, slots, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        self._before_bytes = torch.cuda.memory_allocated(device)
        self.kv = CudaKV(pool, block_tokens=size.block_tokens, forward_stream=forward)
        self.block_bytes = self.kv.layout.block_bytes
        order = torch.randperm(slots, device=device) + 1
        self.into, self.out = (part.contiguous() for part in order.split(slots // 2))
        self.staging = pinned_pool(STAGED, self.block_bytes, device)
        self.queue = pinned_pool(STAGED, self.block_bytes, device)
        self.copier = CopyThread(self.kv)
        self.fence: Fence = ()
        self._saves: list[tuple[Future[None], list[Buffer]]] = []

    @property
    def peak_bytes(self) -> int:
        """Device memory that copies have taken at most."""
        return torch.cuda.max_memory_allocated(self.kv.device) - self._before_bytes

    def run(self, enough: Callable[[int], bool], *, loads: bool, saves: bool) -> float:
        """Copy until `enough(blocks so far)`. Returns bytes per second."""
        parts = self.into.split(self.kv.layout.block_tokens)
        blocks = 0
        begun_s = time.perf_counter()
        while not enough(blocks):
            before = blocks
            if loads and (buffer := self.staging.take()) is not None:
                self.load(buffer, parts[blocks % len(parts)])
                blocks += 1
            if saves:
                self._take_back()
                if self.queue.free >= SAVED:
                    self.save()
                    blocks += SAVED
            if blocks == before:
                time.sleep(NAP_S)
        while self.staging.free < self.staging.capacity or self._saves:
            self._take_back()
            time.sleep(NAP_S)
        return blocks * self.block_bytes / (time.perf_counter() - begun_s)

    def load(self, buffer: Buffer, slots: torch.Tensor) -> None:
        copy = SlotCopy(self.kv, slots, self.fence)
        copy.begin()
        self.copier.load(copy, HostBlock(buffer, self.staging.give, lambda staged: None))

    def save(self) -> None:
        buffers = [_taken(self.queue) for _ in range(SAVED)]
        slots = self.out[: SAVED * self.kv.layout.block_tokens]
        save = self.copier.save(partial(self.kv.save, slots, buffers, self.fence))
        self._saves.append((save.ended, buffers))

    def _take_back(self) -> None:
        for save in [each for each in self._saves if each[0].done()]:
            self._saves.remove(save)
            save[0].result()
            for buffer in save[1]:
                self.queue.give(buffer)


def cake_copies(size: Size, device: torch.device) -> Iterator[Finding]:
    """What `CudaKV` and `CopyThread` reach, on an idle device and beside matrix products."""
    forward = torch.cuda.Stream(device)
    load = Load(size, forward, device)  # first: its memory is none of the copies'
    copying = Copying(size, device, forward)
    kv, tokens = copying.kv, copying.kv.layout.block_tokens
    try:
        for way, loads, saves in WAYS:
            copying.run(lambda blocks: blocks >= 2 * SAVED, loads=loads, saves=saves)
            rate = copying.run(lambda blocks: blocks >= 2 * size.blocks, loads=loads, saves=saves)
            yield Finding(f"{way}, device idle", rate / GB, "GB/s")
        load.launch()
        load.seconds()
        load.launch()
        alone_s = load.seconds()
        yield Finding("products alone", _tflops(size, alone_s), "TFLOP/s")
        for way, loads, saves in WAYS:
            copying.fence = kv.fence()
            load.launch()
            rate = copying.run(lambda blocks: load.is_over(), loads=loads, saves=saves)
            least = LEAST_GB_PER_S if loads and not saves else 0.0
            yield size.at_least(least, f"{way}, beside products", rate / GB, "GB/s")
            yield Finding(f"products beside {way}", load.seconds() / alone_s, "x the time alone")
        copying.fence = kv.fence()
        torch.cuda.synchronize()
        buffers = [_taken(copying.staging) for _ in range(SAVED)]
        slots = copying.into[:tokens]
        row = copying.out[: SAVED * tokens]
        with kv.here():
            load_s = host_s(lambda n: kv.load(buffers[n % SAVED], slots, ()), repeats=64)
            save_s = host_s(lambda n: kv.save(row, buffers, ()), repeats=16) / SAVED
            fence_s = host_s(lambda n: kv.fence(), repeats=64)
        yield size.at_most(MOST_HOST_US, "host time of a loaded block", load_s * 1e6, "us")
        yield size.at_most(MOST_HOST_US, "host time of a saved block", save_s * 1e6, "us")
        yield Finding("host time of a fence", fence_s * 1e6, "us")
        peak_mib, most_mib = copying.peak_bytes / 2**20, COPY_BYTES / 2**20
        yield size.at_most(most_mib, "device memory of copies, peak", peak_mib, "MiB")
    finally:
        copying.copier.close()


WAYS = (("loads", True, False), ("saves", False, True), ("loads and saves", True, True))


def launches(size: Size, device: torch.device) -> Iterator[Finding]:
    """What the driver is asked to launch for a block, as PyTorch's profiler counts it."""
    copying = Copying(size, device, torch.cuda.Stream(device))
    kv, tokens = copying.kv, copying.kv.layout.block_tokens
    buffers = [_taken(copying.staging) for _ in range(SAVED)]
    slots = copying.into[:tokens]
    row = copying.out[: SAVED * tokens]
    copying.copier.close()
    with kv.here():
        kv.load(buffers[0], slots, ()).wait()
        kv.save(row, buffers, ()).wait()
        load = _counted(lambda: [kv.load(buffer, slots, ()) for buffer in buffers])
        save = _counted(lambda: kv.save(row, buffers, ()))
    for name, count in (("a loaded block", load), ("a saved block", save)):
        known = f"{count / SAVED:g}" if count else "the profiler counts nothing here"
        yield Finding(name, known, "launches and memcpys")


def _counted(action: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        action()
        torch.cuda.synchronize()
    asked = ("LaunchKernel", "Memcpy")
    return sum(
        event.count
        for event in found.key_averages()
        if event.key.startswith("cu") and any(word in event.key for word in asked)
    )


def _taken(pool: BufferPool) -> Buffer:
    buffer = pool.take()
    assert buffer is not None
    return buffer


def _tflops(size: Size, took_s: float) -> float:
    return 2 * size.gemm**3 * size.gemms / took_s / 1e12
