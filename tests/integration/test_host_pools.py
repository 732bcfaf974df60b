"""Host memory of a scheduler process: its pools, and its registration with a GPU."""

import contextlib
import gc
import logging
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_pools import mha
from system_calls import is_allocated, is_mapped

from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import PAGE_BYTES, HostArena, address_of
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import server_check
from sglang_cake.integration.memory import kv_pool
from sglang_cake.integration.memory.host_pools import PIN_BYTES, host_pools, pin
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.stores.base import StoreSource
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import FRAME, block_of, key_of, read

BLOCK, CPU = 16, torch.device("cpu")
THREAD_LOCAL = 1  # of the modes of captures
FREE_BYTES = 2**36


class FakeCudart:
    """Args:
        code, end_code: what registering and unregistering end with.
        most_bytes: what is registered before `code`.

    Attributes:
        on_call: called before each call.
        unregistered: addresses, each with the device and the mode of captures of the thread at that
            moment.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        code: int = 0,
        *,
        end_code: int = 0,
        most_bytes: int = 0,
    ) -> None:
        self._code = code
        self._most_bytes = most_bytes
        self._end_code = end_code
        self._device: torch.device | None = None
        self._mode = 0
        self.registered: list[tuple[int, int, int]] = []
        self.on_call: Callable[[], object] = lambda: None
        self.unregistered: list[tuple[int, torch.device | None, int]] = []
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self.on_device)
        monkeypatch.setattr(kv_pool, "exchange_capture_mode", self.exchange_capture_mode)

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self._device = device
        yield
        self._device = None

    def exchange_capture_mode(self, mode: int) -> int:
        before, self._mode = self._mode, mode
        return before

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.registered.append((address, size_bytes, flags))
        self.on_call()
        return self._code if sum(each[1] for each in self.registered) > self._most_bytes else 0

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address)
        self.on_call()
        self.unregistered.append((address, self._device, self._mode))
        return self._end_code

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


def kv_of(slots: int = 2048) -> DeviceKV:
    return DeviceKV(mha(slots, heads=4, dim=16), block_tokens=BLOCK)


# ---- pinning ----


def test_pin_registers_the_whole_arena_once_until_it_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart(monkeypatch)
    arena = HostArena([PAGE_BYTES, 100, 10_000], prefault=True)
    address, last = arena.address, arena.buffers[-1]
    assert pin(arena, CPU) == 3
    assert cudart.registered == [(address, 5 * PAGE_BYTES, 0)]
    del arena
    gc.collect()
    assert cudart.unregistered == []
    del last
    gc.collect()
    assert cudart.unregistered == [(address, CPU, THREAD_LOCAL)]


def test_pin_registers_and_unregisters_chunks_of_whole_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart(monkeypatch)
    arena = HostArena([PIN_BYTES // 3 + 1] * 10, prefault=False)
    starts = [address_of(arena.buffers[number].view) for number in (0, 3, 6, 9)]
    sizes = [stop - start for start, stop in pairwise([*starts, arena.address + arena.size_bytes])]
    assert pin(arena, CPU) == 10
    assert cudart.registered == [(*chunk, 0) for chunk in zip(starts, sizes, strict=True)]
    del arena
    gc.collect()
    assert cudart.unregistered == [(start, CPU, THREAD_LOCAL) for start in starts]


def test_pin_allocates_each_chunk_between_the_calls_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart(monkeypatch)
    arena = HostArena([PIN_BYTES] * 3, prefault=False)
    allocated: list[list[bool]] = []
    cudart.on_call = lambda: allocated.append(
        [is_allocated(address_of(each.view), PIN_BYTES) for each in arena.buffers]
    )
    assert pin(arena, CPU) == 3
    assert allocated == [[True, False, False], [True, True, False], [True, True, True]]


def test_pin_is_undone_with_pauses_for_other_calls_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, pauses_s = [0.0], list[float]()
    cudart = FakeCudart(monkeypatch)
    arena = HostArena([PIN_BYTES] * 2, prefault=False)
    assert pin(arena, CPU) == 2
    monkeypatch.setattr("time.perf_counter", lambda: clock_s[-1])
    monkeypatch.setattr("time.sleep", pauses_s.append)
    cudart.on_call = lambda: clock_s.append(clock_s[-1] + 3.0)
    del arena
    gc.collect()
    assert pauses_s == [3.0, 3.0]


def test_pin_of_memory_of_other_sizes_leaves_no_buffer_in_two_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart(monkeypatch)
    arena = HostArena([PIN_BYTES - 1, 100, PIN_BYTES + 1, 100, 100], prefault=False)
    assert pin(arena, CPU) == 5
    assert [size for _, size, _ in cudart.registered] == [
        *(PIN_BYTES, PAGE_BYTES + PIN_BYTES + PAGE_BYTES),
        2 * PAGE_BYTES,
    ]


def test_pin_refused_for_a_chunk_keeps_those_before_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = FakeCudart(monkeypatch, code=2, most_bytes=2 * PIN_BYTES)
    arena = HostArena([PIN_BYTES // 2] * 8, prefault=False)
    assert pin(arena, CPU) == 4
    assert len(cudart.registered) == 3
    (record,) = caplog.records
    assert f"{2 * PIN_BYTES // 2**20} MiB of host memory cannot be pinned" in record.getMessage()
    del arena
    gc.collect()
    assert [each[0] for each in cudart.unregistered] == [each[0] for each in cudart.registered[:2]]


def test_can_pin_registers_as_a_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart(monkeypatch, code=2, most_bytes=2 * PIN_BYTES)
    assert server_check.can_pin(2 * PIN_BYTES)
    assert [size for _, size, _ in cudart.registered] == [PIN_BYTES] * 2
    gc.collect()
    assert len(cudart.unregistered) == 2
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    assert not server_check.can_pin(2 * PIN_BYTES)


def test_pin_that_cannot_be_undone_is_one_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCudart(monkeypatch, end_code=2)
    arena = HostArena([2**20], prefault=True)
    assert pin(arena, CPU)
    del arena
    gc.collect()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "cake: 1 MiB of host memory cannot be unpinned (error 2)"


def test_pin_refused_is_one_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**20, 2**20))
    cudart = FakeCudart(monkeypatch, code=2)
    arena = HostArena([2**20], prefault=True)
    assert not pin(arena, CPU)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    for part in ("1 MiB", "error 2", "ulimit -l", "--ulimit memlock=-1", "--cake-staging-bytes"):
        assert part in record.getMessage()
    del arena
    gc.collect()
    assert cudart.unregistered == []


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, PIN_BYTES - 1])
def test_pin_refused_beyond_the_limit_of_locked_memory_does_not_blame_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    """A process may lock more than its limit, with the right to do so."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    FakeCudart(monkeypatch, code=2, most_bytes=PIN_BYTES)
    assert pin(HostArena([PIN_BYTES] * 2, prefault=False), CPU) == 1
    (record,) = caplog.records
    assert "lower --cake-staging-bytes" in record.getMessage()
    assert "ulimit" not in record.getMessage()


async def test_memory_store_of_a_gpu_is_registered_once_with_all_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart(monkeypatch)
    (source,) = parse_sources("memory://64KiB", pin=partial(pin, device=CPU))
    await pinned_for_a_while(source, lends=True)
    ((address, size_bytes, _),) = cudart.registered
    gc.collect()
    assert size_bytes == 2**16
    assert cudart.unregistered == [(address, CPU, THREAD_LOCAL)]


async def test_memory_store_that_cannot_be_pinned_lends_nothing_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart(monkeypatch, code=2)
    (source,) = parse_sources("memory://64KiB", pin=partial(pin, device=CPU))
    await pinned_for_a_while(source, lends=False)
    assert len(cudart.registered) == 1


async def pinned_for_a_while(source: StoreSource, *, lends: bool) -> None:
    store, other = source.open(FRAME, depth=1), source.open(FRAME, depth=1)
    await store.put(key_of("a"), block_of("a"))
    lent = store.lend(key_of("a"))
    assert (lent is not None) is lends
    if lent is not None:
        assert lent.buffer.view == block_of("a")
        lent.release()
    assert await read(store, key_of("a")) == block_of("a")
    await store.close()
    await other.close()


def test_pin_refused_clears_the_error_that_the_next_launch_would_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        launches.append(args)
        raise RuntimeError("CUDA error: out of memory")

    launches: list[Any] = []
    FakeCudart(monkeypatch, code=2)
    monkeypatch.setattr(torch, "zeros", fail)
    assert not pin(HostArena([1], prefault=True), CPU)
    assert len(launches) == 1


# ---- the pools of a process ----


def test_host_pools_have_the_sizes_of_their_blocks() -> None:
    kv = kv_of()
    kv.encoded = True
    config = CakeConfig(block_tokens=BLOCK, staging_bytes=2**21, write_queue_bytes=2**20)
    loads, writes = host_pools(kv, config, chunk_tokens=64, free_bytes=FREE_BYTES, reads=4)
    assert kv.load_buffer_bytes > kv.layout.block_bytes == 4 * PAGE_BYTES
    assert loads.capacity == loads.free == 2**21 // (5 * PAGE_BYTES)
    assert writes.capacity == writes.free == 2**20 // (4 * PAGE_BYTES)
    load, write = loads.take(), writes.take()
    assert load is not None
    assert write is not None
    assert len(load.view) == kv.load_buffer_bytes
    assert len(write.view) == kv.layout.block_bytes


def test_host_pools_are_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_cake")
    kv = kv_of()
    loads, writes = host_pools(
        kv, CakeConfig(block_tokens=BLOCK), chunk_tokens=64, free_bytes=FREE_BYTES, reads=4
    )
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    message = record.getMessage()
    assert "pageable" in message
    assert "huge pages" in message
    assert f"{loads.capacity} blocks being loaded and {writes.capacity} being stored" in message
    assert "a step computes up to 4" in message  # of 16 tokens


def test_host_pools_of_a_machine_with_little_memory_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = kv_of()
    few_bytes = 40 * kv.layout.block_bytes
    loads, writes = host_pools(
        kv, CakeConfig(block_tokens=BLOCK), chunk_tokens=64, free_bytes=few_bytes, reads=4
    )
    assert loads.capacity + writes.capacity <= 20
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "less than the default" in record.getMessage()
    large = CakeConfig(block_tokens=BLOCK, staging_bytes=2**20)
    with pytest.raises(ConfigError, match="--cake-staging-bytes"):
        host_pools(kv, large, chunk_tokens=64, free_bytes=few_bytes, reads=4)


def test_host_pools_that_cannot_be_mapped_are_a_config_error() -> None:
    kv, config = kv_of(), CakeConfig(block_tokens=BLOCK, staging_bytes=2**30)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 2**28, hard))
    try:
        with pytest.raises(ConfigError, match=r"MiB .*Cannot allocate memory.*--cake-staging-byte"):
            host_pools(kv, config, chunk_tokens=64, free_bytes=FREE_BYTES, reads=4)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
