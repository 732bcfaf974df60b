"""The data path before it was built for a GPU, finding by finding: the control of the virtual GPU.

Each finding of the review (`reports/gpu.md`) is a change of today's code that brings its fault
back. Nothing of a server uses it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from sglang_cake.core.buffers import BufferCounts
from sglang_cake.integration.memory.block_saving import BlockSaving, Writer
from sglang_cake.integration.memory.copier import Copier
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.step_costs import StepCosts, StepTimer
from sglang_cake.testing import scheduler_loop, virtual_gpu
from sglang_cake.testing.scheduler_loop import SchedulerLoop
from sglang_cake.testing.virtual_gpu import (
    KERNEL_S,
    LAUNCH_S,
    VirtualCopier,
    VirtualCopy,
    VirtualKV,
    VirtualScheduler,
)

WRITE_QUEUE_BYTES = 2**28
PIN_S = 5e-3  # to pin one buffer: an estimate of the review


def _wrap(stack: contextlib.ExitStack, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """`owner.name` becomes `wrapper(original, *args)`."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    stack.enter_context(patch.object(owner, name, call))


def _skips_blocks(stack: contextlib.ExitStack) -> None:
    """A1: a queue of 256 MiB, and no second try."""

    def counts(original: Callable[..., BufferCounts], **options: Any) -> BufferCounts:
        return original(**options | {"write_queue_bytes": WRITE_QUEUE_BYTES})

    def checkpointed(original: Any, saving: Any, record: Any, *args: Any, **options: Any) -> None:
        original(saving, record, *args, **options)
        if (unsaved := saving._requests.get(record)) is not None:
            saving._give_up(unsaved)

    _wrap(stack, virtual_gpu, "buffer_counts", counts)
    _wrap(stack, BlockSaving, "checkpointed", checkpointed)


def _holds_staging(stack: contextlib.ExitStack) -> None:
    """A2: blocks are copied at polls, behind the running forward, and host memory is free again at
    the poll after the copy."""

    def load(original: Any, copier: Any, *args: Any) -> Any:
        begun = original(copier, *args)
        if begun is None:
            return None
        ended = vars(copier).setdefault("ended", [])
        return type(begun)(begun.copy, partial(ended.append, begun.end))

    def sleep_s(awake_s: float, _: float) -> float:
        return min(9 * awake_s, 5e-3)  # copies at polls need frequent polls

    def iterate(original: Any, scheduler: Any) -> Any:
        ended = vars(scheduler.copier).setdefault("ended", [])
        while ended:
            ended.pop(0)()
        return original(scheduler)

    stack.enter_context(patch.object(DeviceSlots, "reserve", lambda *args: None))
    stack.enter_context(patch.object(scheduler_loop, "sleep_s", sleep_s))
    _wrap(stack, Copier, "_load", load)
    _wrap(stack, VirtualScheduler, "_iterate", iterate)


@dataclass(slots=True)
class _TimerBefore:
    """Ends with its own step, and has the time of the step before."""

    own: StepTimer
    before: StepTimer

    def done(self) -> bool:
        return self.own.done()

    def seconds(self) -> float:
        return self.before.seconds()


def _measures_the_step_before(stack: contextlib.ExitStack) -> None:
    """A3, of steps that follow one another."""

    def launched(original: Any, costs: StepCosts, timer: StepTimer) -> None:
        before: StepTimer = vars(costs).get("last_timer", timer)
        original(costs, timer if before.done() else _TimerBefore(timer, before))
        vars(costs)["last_timer"] = timer

    _wrap(stack, StepCosts, "step_launched", launched)


def _plans_for_now(stack: contextlib.ExitStack) -> None:
    """A4: the device counts as free."""
    stack.enter_context(patch.object(StepCosts, "busy_s", 0.0))


def _launches_planes(stack: contextlib.ExitStack) -> None:
    """A5: the scheduler thread launches a DMA for each block and a kernel for each plane, in one
    stream."""

    def launch(kv: Any, blocks: int) -> float:
        """Returns the time of the kernels."""
        planes = len(kv.layout.planes)
        kernels_s: float = max(planes * KERNEL_S, kv._kernel_s)
        took_s = blocks * (1 + planes) * LAUNCH_S
        kv.gpu.launch(blocks * (1 + planes), took_s)
        kv.gpu.kernels_s += blocks * kernels_s
        return kernels_s

    def load(kv: Any, block: Any, slots: torch.Tensor, after: tuple[float, ...]) -> VirtualCopy:
        kernels_s = launch(kv, 1)
        begin_s = max(kv._in.tail_s, kv.gpu.io.now_s, *after)
        kv._in.tail_s = kv.gpu.to_device.run(begin_s, kv._dma_s) + kernels_s
        return VirtualCopy(kv.gpu, kv._in.tail_s, kv._in.tail_s, kv._in.tail_s - begin_s)

    def save(
        kv: Any, slots: torch.Tensor, blocks: Sequence[Any], after: tuple[float, ...]
    ) -> VirtualCopy:
        kernels_s = launch(kv, len(blocks))
        begin_s = max(kv._in.tail_s, kv.gpu.io.now_s, *after)
        pool_s = begin_s + len(blocks) * kernels_s
        kv._in.tail_s = kv.gpu.to_host.run(pool_s, len(blocks) * kv._dma_s)
        return VirtualCopy(kv.gpu, kv._in.tail_s, pool_s, kv._in.tail_s - begin_s)

    def launch_all(copier: Any) -> None:
        while copier._jobs:
            if (begun := copier._jobs.popleft()()) is not None:
                copier._io.loop.call_at(begun.copy.end_s, begun.end)

    def after_launches(original: Any, scheduler: Any, *args: Any) -> Any:
        launch_all(scheduler.copier)
        return original(scheduler, *args)

    def wait(copier: Any, launched: Callable[[], bool]) -> None:
        launch_all(copier)

    stack.enter_context(patch.object(VirtualKV, "load", load))
    stack.enter_context(patch.object(VirtualKV, "save", save))
    stack.enter_context(
        patch.object(VirtualCopier, "_post", lambda copier, begin: copier._jobs.append(begin))
    )
    stack.enter_context(patch.object(VirtualCopier, "_wait", wait))
    _wrap(stack, SchedulerLoop, "_iterate", after_launches)
    for name in ("launch", "settle"):
        _wrap(stack, VirtualScheduler, name, after_launches)


def _takes_scratch(stack: contextlib.ExitStack) -> None:
    """A6: each copy has device memory of its own."""

    def init(original: Any, kv: Any, gpu: Any, *args: Any) -> None:
        original(kv, gpu, *args)
        gpu.peak_scratch_bytes = gpu.scratch_bytes = 0

    def load(original: Any, kv: Any, *args: Any) -> VirtualCopy:
        copy: VirtualCopy = original(kv, *args)
        kv.gpu.hold(copy, kv.layout.block_bytes)
        return copy

    def save(original: Any, kv: Any, slots: Any, blocks: Any, after: Any) -> VirtualCopy:
        copy: VirtualCopy = original(kv, slots, blocks, after)
        kv.gpu.hold(copy, len(blocks) * kv.layout.block_bytes)
        return copy

    _wrap(stack, VirtualKV, "__init__", init)
    _wrap(stack, VirtualKV, "load", load)
    _wrap(stack, VirtualKV, "save", save)


def _shares_a_stream(stack: contextlib.ExitStack) -> None:
    """A7: loads and saves in one stream. Forwards that follow a save, or need any copy, wait for
    all that was launched before."""

    def init(original: Any, kv: Any, *args: Any) -> None:
        original(kv, *args)
        kv._out = kv._in

    def save(original: Any, kv: Any, *args: Any) -> VirtualCopy:
        copy: VirtualCopy = original(kv, *args)
        kv.gpu.follow(copy.pool_s)
        return copy

    def order_forwards_after(original: Any, kv: Any, copies: Sequence[VirtualCopy]) -> None:
        original(kv, copies)
        if copies:
            kv.gpu.follow(kv._in.tail_s)

    _wrap(stack, VirtualKV, "__init__", init)
    _wrap(stack, VirtualKV, "save", save)
    _wrap(stack, VirtualKV, "order_forwards_after", order_forwards_after)


def _frees_by_number(stack: contextlib.ExitStack) -> None:
    """A8: `free`, which waits for the device if pages have several tokens."""

    def free(slots_of: Any, slots: torch.Tensor) -> None:
        if len(slots):
            slots_of._allocator.free(slots)

    stack.enter_context(patch.object(DeviceSlots, "free", free))


def _pins_late(stack: contextlib.ExitStack) -> None:
    """A9: buffers of a power of two, each pinned when it is first used. In this bed only those of
    writes take time, of the scheduler thread."""

    def counts(original: Callable[..., BufferCounts], **options: Any) -> BufferCounts:
        for name in ("load_bytes", "write_bytes"):
            options[name] = 2 ** math.ceil(math.log2(options[name]))
        return original(**options)

    def init(original: Any, scheduler: Any, *args: Any, **options: Any) -> None:
        original(scheduler, *args, **options)
        vars(scheduler.writer).update(gpu=scheduler.gpu, pinned=set())

    def take(original: Any, writer: Any, **options: Any) -> Any:
        buffer = original(writer, **options)
        if buffer is not None and id(buffer) not in writer.pinned:
            writer.pinned.add(id(buffer))
            writer.gpu.sync(writer.gpu.io.now_s + PIN_S)
        return buffer

    _wrap(stack, virtual_gpu, "buffer_counts", counts)
    _wrap(stack, VirtualScheduler, "__init__", init)
    _wrap(stack, Writer, "take", take)


FINDINGS: dict[str, Callable[[contextlib.ExitStack], None]] = {
    "A1": _skips_blocks,
    "A2": _holds_staging,
    "A3": _measures_the_step_before,
    "A4": _plans_for_now,
    "A5": _launches_planes,
    "A6": _takes_scratch,
    "A7": _shares_a_stream,
    "A8": _frees_by_number,
    "A9": _pins_late,
}


@contextlib.contextmanager
def former_path(*findings: str) -> Iterator[None]:
    """A context in which these findings hold, by default all but A7."""
    with contextlib.ExitStack() as stack:
        for finding in findings or (each for each in FINDINGS if each != "A7"):
            FINDINGS[finding](stack)
        yield
