"""Host time and driver calls of the copies of a block to a GPU and back, without a GPU.

    python -m benchmarks copy_calls [--small] [--out FILE] [--docs]

`CudaKV`, the copier and the row kernel are the server's own, with the pools of the models of
`virtual_gpu`. Tensors of the device are PyTorch's `meta` tensors: every operation is dispatched,
and nothing moves. The kernel is compiled for an H100 and launched through Triton. In place of the
driver is a stub that counts calls. So the times are those of Python, PyTorch and Triton alone, and
each counted call would add the driver's own time.

Times are CPU time of the thread, the copier's or the scheduler's, for one block: the median of many
turns, and the 90th percentile.
"""

import contextlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks import facts
from benchmarks.command_line import parser_of
from benchmarks.documents import table, update
from benchmarks.gpu.stand_ins import PoolForm, make_pool
from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.integration.memory import kv_pool
from sglang_cake.integration.memory.copier import CopyThread, SlotCopy
from sglang_cake.integration.memory.kv_pool import CudaKV
from sglang_cake.loading.loader import HostBlock

META = torch.device("meta")
BLOCK_TOKENS = 128
LOADED = 8  # blocks that land at a time
SAVED = 16  # blocks of a save: more than the ring holds
FORMS = {
    "llama-3.1-8b": PoolForm(layers=32, heads=8, dim=128, v_dim=128),
    "llama-3.1-70b TP8": PoolForm(layers=80, heads=1, dim=128, v_dim=128),
    "deepseek-v3 TP8": PoolForm(layers=61, heads=1, dim=576, v_dim=0),
}


class StubDriver:
    """In place of a CUDA driver.

    Attributes:
        calls: by name.
        kernels: how many were compiled and loaded.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.kernels = 0
        # What Triton asks of a driver.
        self.utils = SimpleNamespace(
            load_binary=self._load,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        )

    def _load(self, *args: object) -> tuple[object, ...]:
        self.kernels += 1
        return object(), object(), 32, 0, 1024

    def called(self, name: str) -> None:
        self.calls[name] += 1

    # ---- Triton's interface ----

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *args: self.called("launches of a kernel")

    # ---- PyTorch's ----

    def stream_class(self) -> type:
        """In place of `torch.cuda.Stream`."""
        driver = self

        class Stream:
            device_index = 0

            def __init__(self, device: object = None, priority: int = 0) -> None:
                pass

            def wait_event(self, event: object) -> None:
                driver.called("waits of a stream")

        return Stream

    def event_class(self) -> type:
        """In place of `torch.cuda.Event`, which is made when it is recorded."""
        driver = self

        class Event:
            def __init__(self, **options: bool) -> None:
                pass

            def record(self, stream: object = None) -> None:
                driver.called("events")

            def query(self) -> bool:
                driver.called("queries of an event")
                return True

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: object) -> float:
                return 0.0

        return Event


@contextlib.contextmanager
def stubbed() -> Iterator[StubDriver]:
    """PyTorch and Triton with a stub of a driver, while this lasts."""
    driver = StubDriver()
    stream_class = driver.stream_class()
    current = stream_class()
    parts = {
        "Stream": stream_class,
        "Event": driver.event_class(),
        "current_stream": lambda device=None: current,
        "set_stream": lambda found: None,
        "device": lambda device: contextlib.nullcontext(),
    }
    copy_ = torch.Tensor.copy_

    def counted(target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        driver.called("copies to or from the host")
        # Nothing moves, whichever side is of the device.
        return copy_(target, *args, **kwargs) if target.is_meta else target

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **parts))
        stack.enter_context(mock.patch.object(torch.Tensor, "copy_", counted))
        stack.enter_context(mock.patch.object(kv_pool, "exchange_capture_mode", lambda mode: mode))
        triton.runtime.driver.set_active(driver)
        try:
            yield driver
        finally:
            # None: the next who asks finds the machine's own, if there is one.
            triton.runtime.driver._active = None


def measured(
    driver: StubDriver,
    thread: threading.Thread,
    action: Callable[[], object],
    blocks: int,
    *,
    turns: int,
) -> dict[str, Any]:
    """CPU time and calls of one block, where `action` has the thread move so many."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    for _ in range(20):  # fills the caches of PyTorch and Triton
        action()
    driver.calls.clear()
    action()
    calls = {name: count / blocks for name, count in driver.calls.items()}
    times_us = []
    for _ in range(turns):
        begun_s = time.clock_gettime(clock)
        action()
        times_us.append((time.clock_gettime(clock) - begun_s) * 1e6 / blocks)
    p90 = statistics.quantiles(times_us, n=10)[-1]
    return {
        "median_us": round(statistics.median(times_us), 1),
        "p90_us": round(p90, 1),
        "calls": calls,
    }


def copies_of(form: PoolForm, driver: StubDriver, *, turns: int) -> dict[str, dict[str, Any]]:
    """Of loads and saves by the copier, and of the scheduler thread's part."""
    pool = make_pool(form, 64 * BLOCK_TOKENS, device=META)
    forward: Any = torch.cuda.Stream()
    kv = CudaKV(pool, block_tokens=BLOCK_TOKENS, forward_stream=forward)
    copier = CopyThread(kv)
    (copying,) = (each for each in threading.enumerate() if each.name == "cake-copy")
    slots = torch.empty(BLOCK_TOKENS, dtype=torch.int64, device=META)
    many = torch.empty(SAVED * BLOCK_TOKENS, dtype=torch.int64, device=META)
    buffer = Buffer(on_page(kv.load_buffer_bytes))
    fence = kv.fence()

    def load() -> None:
        over = threading.Event()
        left = iter(range(LOADED - 1))

        def give(given: Buffer) -> None:
            if next(left, None) is None:
                over.set()

        for _ in range(LOADED):
            copy = SlotCopy(kv, slots, fence)
            copy.begin()
            copier.load(copy, HostBlock(buffer, give, lambda staged: None))
        over.wait()

    def save() -> None:
        copier.save(lambda: kv.save(many, [buffer] * SAVED, fence)).ended.result()

    def schedule() -> None:  # once for all blocks that a forward has to wait for
        kv.order_forwards_after([copy])
        kv.fence()

    compiled = driver.kernels
    try:
        cells = {
            "a block loaded, copier's thread": measured(driver, copying, load, LOADED, turns=turns),
            "a block saved, copier's thread": measured(driver, copying, save, SAVED, turns=turns),
        }
        with kv.here():
            copy = kv.load(buffer, slots, fence)
            here = threading.current_thread()
            cells["a step, scheduler thread"] = measured(driver, here, schedule, 1, turns=turns)
    finally:
        copier.close()
    assert 0 < compiled == driver.kernels, "no copy waits for the compiler"
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    parser = parser_of("bench_copy_calls", __doc__)
    parser.add_argument("--small", action="store_true", help="one model, few turns")
    parser.add_argument("--docs", action="store_true", help="put the table into the report")
    parser.add_argument("--out", type=Path, default=facts.RESULTS / "copy-calls.json")
    args = parser.parse_args(argv)
    turns = 20 if args.small else 2000
    forms = dict(list(FORMS.items())[:1]) if args.small else FORMS
    with stubbed() as driver:
        cells = {name: copies_of(form, driver, turns=turns) for name, form in forms.items()}
    settings = {"block_tokens": BLOCK_TOKENS, "turns": turns, "triton": triton.__version__}
    facts.write(args.out, {**facts.header("copy_calls", **settings), "cells": cells})
    rows = [
        [
            f"{model}: {what}",
            f"{found['median_us']:.1f}",
            f"{found['p90_us']:.1f}",
            ", ".join(f"{count:g} {name}" for name, count in found["calls"].items()),
        ]
        for model, cell in cells.items()
        for what, found in cell.items()
    ]
    text = table(["model: what", "us", "90 % below", "calls of the driver"], rows)
    print(text)
    if args.docs:
        update({"calls": text}, facts.REPORTS / "gpu.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
