"""Copies of blocks between host memory and the KV pool, in a thread of their own.

The scheduler thread reserves slots and says which blocks are saved. The copier launches a copy when
its bytes are there, in the middle of a running forward. So the memory of a block that was loaded is
free again as soon as its copy is complete, and not at the end of the step.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_cake.core.buffers import Buffer
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV, Fence
from sglang_cake.loading.loader import StagedBlock

logger = logging.getLogger("sglang_cake")

_LOOK_S = 0.0005  # while copies are under way, the thread looks so often for complete ones
# The scheduler thread waits so long for copies that the copier has been given, and gives up those
# that are not launched then. Other copies are launched before them, for 64 blocks in a few ms.
PATIENCE_S = 2.0
CLOSE_S = 5.0  # how long the end of the process may wait for copies


class SlotCopy:
    """The copy of one block into device slots, from the reservation of the slots on. Thread-safe.

    Attributes:
        slots: int64 `[block_tokens]`, on the device; set once, when they are reserved.
        after: the slots may be written after this point.
    """

    slots: torch.Tensor

    def __init__(self, after: Fence) -> None:
        self.after = after
        self._changed = threading.Condition()
        self._begun = False
        self._withdrawn = False
        self._copy: Copy | None = None
        self._error: Exception | None = None

    @classmethod
    def complete(cls, slots: torch.Tensor) -> "SlotCopy":
        """Of slots that hold their block."""
        copy = cls(())
        copy.slots = slots
        copy._begun = True
        copy._copy = Copy()
        return copy

    def begin(self) -> bool:
        """The bytes are there: whether the caller must hand the copy to the copier. False: another
        thread has done so, or the slots are withdrawn."""
        with self._changed:
            first = not (self._begun or self._withdrawn)
            self._begun |= first
            return first

    @property
    def begun(self) -> bool:
        """Whether the copier has the copy, or had it."""
        with self._changed:
            return self._begun

    @property
    def failed(self) -> bool:
        """Whether the launch has failed."""
        return self._error is not None

    @property
    def settled(self) -> bool:
        """Whether the copy is launched, or failed."""
        return self._copy is not None or self._error is not None

    def wait_settled(self) -> None:
        """Wait until the copy, which the copier has, is launched or has failed."""
        if not self.settled:  # without the lock: polls ask this of every landed block
            with self._changed:
                self._changed.wait_for(lambda: self.settled)

    def start(self, launch: Callable[[], Copy]) -> Copy | None:
        """Launch the copy; None if the slots are withdrawn. Copier. Raises: as `launch`."""
        with self._changed:
            if not self._withdrawn:
                try:
                    self._copy = launch()
                except Exception as error:
                    self._error = error
                    raise
                finally:
                    self._changed.notify_all()
            return self._copy

    def wait_launched(self, timeout_s: float | None) -> Copy | None:
        """Wait until the copy is launched. None: it found no device memory, or it was not launched
        within `timeout_s`, and the slots are withdrawn. Raises: what else the launch raised."""
        with self._changed:
            assert self._begun
            self._withdrawn |= not self._changed.wait_for(lambda: self.settled, timeout_s)
            if self._error is not None and not isinstance(self._error, torch.OutOfMemoryError):
                raise self._error
            return self._copy

    def cancel(self) -> bool:
        """Withdraw the slots, unless the bytes have come. Returns whether it did."""
        with self._changed:
            self._withdrawn |= not self._begun
            return not self._begun

    def withdraw(self) -> Copy | None:
        """The slots get another owner. Returns the copy that was launched, which may still write to
        them; None: none was, and none will be."""
        with self._changed:
            self._withdrawn = True
            return self._copy


@dataclass(frozen=True, slots=True)
class Save:
    """Slots that are being copied into host memory.

    Attributes:
        launched: the copy, once it is launched. The slots may be written again after
            `DeviceKV.order_forwards_after` it. Cancelled: it was given up before.
        ended: done when the host memory is whole. Raises: what the launch raised.
    """

    launched: "Future[Copy]" = field(default_factory=Future)
    ended: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    copy: Copy
    end: Callable[[], object]  # called when the copy is complete


class Copier:
    """What all copiers share. This class itself copies at once, in the calling thread, for tests.
    Servers, also those on a CPU, use `CopyThread`.

    Args:
        patience_s: how long the scheduler thread waits for a launch; None: as long as it takes.
        movers: allocators of SGLang that move slots. They do so in the scheduler thread, which
            alone asks for copies then, and after all copies that were asked for.
    """

    def __init__(
        self,
        kv: DeviceKV,
        *,
        patience_s: float | None = PATIENCE_S,
        movers: Sequence[Any] = (),
    ) -> None:
        self._kv = kv
        self._patience_s = patience_s
        self._movers = movers
        self._unordered = False  # whether a copy was asked for since slots could move last
        for mover in movers:
            if hasattr(mover, "make_room"):  # between two pools: it asks a gate, and does not wait
                mover.host_transfer_move_gate = self._may_move
        self._failure: Exception | None = None

    # ---- any thread; these return at once ----

    def load(self, copy: SlotCopy, staged: StagedBlock) -> None:
        """Copy a block into its slots, and then stop being a holder of `staged`."""
        self.launch_load(copy, staged, lambda: self._kv.load(staged.buffer, copy.slots, copy.after))

    def launch_load(self, copy: SlotCopy, staged: StagedBlock, launch: Callable[[], Copy]) -> None:
        """The same with another copy, such as that of an end block."""
        self._post(lambda: self._load(copy, staged, launch))
        self._hold_moves()

    def save(self, slots: torch.Tensor, buffers: Sequence[Buffer], after: Fence) -> Save:
        """Copy slots (int64 `[len(buffers) * block_tokens]`, on the device) into whole blocks.

        Args: after: what the slots hold after this point is copied.
        """
        return self.launch_save(lambda: self._kv.save(slots, buffers, after))

    def launch_save(self, launch: Callable[[], Copy]) -> Save:
        """The same with another copy, such as that of an end state."""
        save = Save()
        self._post(lambda: self._save(save, launch))
        self._hold_moves()
        return save

    def wait(self, stream: Any) -> None:
        """Launch what was asked for, and have what comes next on `stream` start after it.

        A mover calls it, as it would call an event of HiCache's transfers: slots are about to move
        on `stream`.
        """
        launched = threading.Event()
        self._post(launched.set)
        launched.wait()
        self._kv.before_moves(stream)
        self._unordered = False

    def wait_launched(self, copies: Sequence[SlotCopy]) -> list[Copy | None]:
        """As `SlotCopy.wait_launched`, for all of these copies, which the copier was given."""
        since_s = time.monotonic()
        return [copy.wait_launched(self._patience_left_s(since_s)) for copy in copies]

    def wait_saves_launched(self, saves: Sequence[Save]) -> list[Copy]:
        """The copies of these saves. A save that is late is given up, and left out, as one that
        failed."""
        since_s = time.monotonic()
        copies = []
        for save in saves:
            with contextlib.suppress(TimeoutError, CancelledError):
                save.launched.exception(self._patience_left_s(since_s))
            if not save.launched.cancel() and save.launched.exception() is None:
                copies.append(save.launched.result())
        return copies

    def check(self) -> None:
        """Raises: the first error of a load since the last call, but for want of device memory."""
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Complete what was asked for, and end."""

    # ---- inside ----

    def _patience_left_s(self, since_s: float) -> float | None:
        if self._patience_s is None:
            return None
        return self._patience_s - (time.monotonic() - since_s)

    def _hold_moves(self) -> None:
        self._unordered = True
        for mover in self._movers:  # it waits once, before its next move
            mover.set_hicache_transfer_done_event("cake", self)

    def _may_move(self) -> bool:
        if self._unordered:
            self.wait(torch.cuda.current_stream())
        return True

    def _post(self, begin: Callable[[], "_UnderWay | None"]) -> None:
        with self._kv.here():
            begun = begin()
        if begun is not None:
            begun.copy.wait()
            begun.end()

    def _load(
        self, copy: SlotCopy, staged: StagedBlock, launch: Callable[[], Copy]
    ) -> _UnderWay | None:
        try:
            launched = copy.start(launch)
        except torch.OutOfMemoryError as error:
            logger.warning("a block is computed: no device memory to copy it (%s)", error)
            launched = None
        except Exception as error:
            logger.exception("a block could not be copied to the device")
            self._failure = self._failure or error
            launched = None
        if launched is None:
            staged.release(used=False, reason="cancelled")
            return None

        return _UnderWay(launched, lambda: staged.release(used=True, copy_s=launched.seconds()))

    def _save(self, save: Save, launch: Callable[[], Copy]) -> _UnderWay | None:
        if not save.launched.set_running_or_notify_cancel():
            save.ended.set_exception(TimeoutError("the copier was late"))
            return None
        try:
            copy = launch()
        except Exception as error:
            save.launched.set_exception(error)
            save.ended.set_exception(error)
            return None
        save.launched.set_result(copy)
        return _UnderWay(copy, lambda: save.ended.set_result(None))


class CopyThread(Copier):
    """The same in a thread of its own, which never waits for one copy while another could start."""

    def __init__(
        self,
        kv: DeviceKV,
        *,
        patience_s: float | None = PATIENCE_S,
        movers: Sequence[Any] = (),
    ) -> None:
        super().__init__(kv, patience_s=patience_s, movers=movers)
        self._jobs: queue.SimpleQueue[Callable[[], _UnderWay | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cake-copy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    def _post(self, begin: Callable[[], _UnderWay | None]) -> None:
        self._jobs.put(begin)

    def _run(self) -> None:
        under_way: list[_UnderWay] = []
        closing = False
        with self._kv.here():
            while under_way or not closing:
                with contextlib.suppress(queue.Empty):
                    begin = self._jobs.get(timeout=_LOOK_S if under_way else None)
                    closing |= begin is None
                    if begin is not None and (begun := begin()) is not None:
                        under_way.append(begun)
                for each in [each for each in under_way if each.copy.done()]:
                    under_way.remove(each)
                    each.end()
