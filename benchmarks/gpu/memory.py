"""Launches while host memory is pinned, and the device memory of slots that wait."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.measuring import GB, Finding, Size, pinned
from benchmarks.gpu.stand_ins import SlotAllocator, make_pool
from sglang_cake.core.buffers import available_bytes
from sglang_cake.core.counters import Counters
from sglang_cake.integration.memory.copier import Copier
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.kv_pool import CudaKV

MOST_GAP = 0.1  # of the longest time between launches with one registration
LISTED_SLOTS = 800_000  # of a pool, on SGLang's list; only their numbers are used
RESERVATIONS = 200
MOST_KEPT = 4.0  # device memory of slots that wait, in sizes of their numbers


def pinning(size: Size, device: torch.device) -> Iterator[Finding]:
    """A thread launches kernels while another one pins host memory as a server does, and then all
    of it in one registration."""
    block_bytes = size.form.token_bytes * size.block_tokens
    blocks = min(size.pinned_bytes, available_bytes() // 4) // block_bytes
    size_bytes = blocks * block_bytes
    yield Finding("host memory", size_bytes / GB, "GB")
    gaps_s = []
    for way, sizes in (("in chunks", [block_bytes] * blocks), ("in one call", [size_bytes])):
        pinned_s, gap_s, unpinned_gap_s = _pinned_beside_launches(sizes, device)
        gaps_s.append(gap_s)
        yield Finding(f"allocated and pinned {way}", size_bytes / pinned_s / GB, "GB/s")
        yield Finding(f"longest time between launches, {way}", gap_s * 1e3, "ms")
        yield Finding(f"the same while it is unpinned, {way}", unpinned_gap_s * 1e3, "ms")
    ratio = gaps_s[0] / gaps_s[1]
    yield size.at_most(MOST_GAP, "longest time between launches, chunks to one call", ratio)


def _pinned_beside_launches(
    sizes_bytes: Sequence[int], device: torch.device
) -> tuple[float, float, float]:
    """Pin memory of these buffers and free it. Returns seconds: until it was pinned; the longest
    time between two launches meanwhile; and the longest one while it was freed."""
    held: list[Any] = []
    begun_s = time.perf_counter()
    gap_s = _longest_gap_s(lambda: held.append(pinned(sizes_bytes, device)), device)
    took_s = time.perf_counter() - begun_s
    return took_s, gap_s, _longest_gap_s(held.clear, device)


def _longest_gap_s(action: Callable[[], object], device: torch.device) -> float:
    """The longest time between two launches of another thread during `action`."""
    begun, ended = threading.Event(), threading.Event()

    number = torch.zeros(1, device=device)
    number.add_(1)  # the first launch loads the kernel

    def launch() -> float:
        longest_s, last_s = 0.0, time.perf_counter()
        begun.set()
        while not ended.is_set():
            number.add_(1)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        return longest_s

    with ThreadPoolExecutor(1) as pool:
        gap_s = pool.submit(launch)
        try:
            begun.wait()
            action()
        finally:
            ended.set()
        return gap_s.result()


def waiting_slots(size: Size, device: torch.device) -> Iterator[Finding]:
    """Slots are reserved for block after block, while others are freed. SGLang's list of free slots
    is another one each time."""
    kv = CudaKV(
        make_pool(size.form, size.block_tokens, device=device),
        block_tokens=size.block_tokens,
        forward_stream=None,
    )
    allocator = SlotAllocator(LISTED_SLOTS, device)
    record: Any = SimpleNamespace(memory=SimpleNamespace(slots={}))
    slots = DeviceSlots(kv, Copier(kv), allocator, lambda tokens: None, Counters())

    def taken_bytes() -> int:  # without the list itself
        return torch.cuda.memory_allocated(device) - 8 * allocator.available_size()

    before_bytes = taken_bytes()
    for block in range(RESERVATIONS):
        slots.reserve(record, [block])
        other = allocator.alloc(size.block_tokens)
        assert other is not None
        slots.free(other)
    del other
    kept_bytes = taken_bytes() - before_bytes
    own_bytes = sum(copy.slots.nbytes for copy in record.memory.slots.values())
    yield Finding("numbers of reserved slots", own_bytes / 2**20, "MiB")
    # PyTorch rounds each allocation up to 512 bytes.
    ratio = kept_bytes / (own_bytes + 512 * RESERVATIONS)
    yield size.at_most(MOST_KEPT, "device memory that they keep", ratio, "times as much")
