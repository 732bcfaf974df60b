"""Copies of blocks between host memory and the KV pool, in a thread of their own, beside a running
forward (docs/architecture.md#copies)."""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV, Fence
from sglang_cake.loading.loader import HostBlock

logger = logging.getLogger("sglang_cake")

# How often the thread looks for complete copies while no other is to be launched. Each look needs
# the interpreter; a block of 16 MiB takes 0.7 ms at 25 GB/s.
_LOOK_S = 0.002
# How long the scheduler thread waits for the launch of copies. It gives up those that are not
# launched then. Other copies are launched before them, for 64 blocks in a few ms.
PATIENCE_S = 2.0
CLOSE_S = 5.0  # how long the end of the process may wait for copies


class SlotCopy:
    """The copy of one block into device slots, from the reservation of the slots on. Thread-safe.

    Attributes:
        kv: the pool that the slots are in.
        slots: int64 `[block_tokens]`, on the device.
        after: the slots may be written after this point.
        launched: the copy, once it is launched; the error of a launch that failed. Cancelled: the
            slots are withdrawn.
        begun: whether the copier has the copy, or had it.
    """

    def __init__(self, kv: DeviceKV, slots: torch.Tensor, after: Fence) -> None:
        self.kv = kv
        self.slots = slots
        self.after = after
        self.launched: Future[Copy] = Future()
        self.begun = False
        self._lock = threading.Lock()  # a copy is not begun and withdrawn at once

    def begin(self) -> bool:
        """The bytes are there: whether the caller must hand the copy to the copier. False: another
        thread has done so, or the slots are withdrawn."""
        with self._lock:
            first = not (self.begun or self.launched.cancelled())
            self.begun |= first
            return first

    @property
    def failed(self) -> bool:
        """Whether the launch has failed."""
        launched = self.launched
        return launched.done() and not launched.cancelled() and launched.exception() is not None

    def wait_settled(self) -> None:
        """Wait until the copy, which the copier has, is launched, has failed, or is withdrawn."""
        with contextlib.suppress(CancelledError):
            self.launched.exception()

    def cancel(self) -> bool:
        """Withdraw the slots, unless the bytes have come. Returns whether it did."""
        with self._lock:
            return not self.begun and self.launched.cancel()

    def withdraw(self) -> Copy | None:
        """As `withdraw` of its launch: the slots get another owner."""
        with self._lock:
            self.launched.cancel()
        return withdraw(self.launched)


def withdraw(launched: "Future[Copy]") -> Copy | None:
    """Give up a launch whose memory gets another owner. Returns the copy that was launched, which
    may still be under way; None: none was, and none will be. Waits for a launch that has begun."""
    if launched.cancel() or launched.exception() is not None:
        return None
    return launched.result()


@dataclass(frozen=True, slots=True)
class Save:
    """Slots that are being copied into host memory.

    Attributes:
        launched: the copy, once it is launched. The slots may be written again after
            `DeviceKV.order_writes_after` it. Cancelled: it was given up before.
        ended: done when the host memory is whole. Raises: what the launch raised.
    """

    launched: "Future[Copy]" = field(default_factory=Future)
    ended: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    copy: Copy
    end: Callable[[], object]  # called when the copy is complete


class Copier:
    """The base of all copiers. This class itself copies at once, in the calling thread, for tests.
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

    def load(self, copy: SlotCopy, host_block: HostBlock) -> None:
        """Copy a block into its slots, and then stop being a holder of `host_block`."""
        self._post(lambda: self._load(copy, host_block))
        self._hold_moves()

    def save(self, launch: Callable[[], Copy]) -> Save:
        """Copy slots into host memory. Args: launch: does so, as `DeviceKV.save`."""
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

    def wait_launched(self, launches: Sequence["Future[Copy]"]) -> list[Copy | None]:
        """The copies of these launches, which the copier was given. None: the launch failed, or it
        was late and is given up. A launch that has begun is waited for."""
        # To `wait`, what was given up before is not over until the thread comes to it.
        wait([each for each in launches if not each.cancelled()], self._patience_s)
        return [withdraw(launched) for launched in launches]

    def check(self) -> None:
        """Raises: the first error since the last call, of a load or of a copy under way. A load
        without device memory is no error."""
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Complete what was asked for, and end."""

    # ---- inside ----

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

    def _load(self, copy: SlotCopy, host_block: HostBlock) -> _UnderWay | None:
        if not copy.launched.set_running_or_notify_cancel():
            host_block.release(used=False, reason="cancelled")
            return None
        try:
            made = copy.kv.load(host_block.buffer, copy.slots, copy.after)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                logger.warning("a block is computed: no device memory to copy it (%s)", error)
            else:
                logger.exception("a block could not be copied to the device")
                self._failure = self._failure or error
            copy.launched.set_exception(error)
            host_block.release(used=False, reason="cancelled")
            return None
        copy.launched.set_result(made)
        return _UnderWay(made, lambda: host_block.release(used=True, copy_s=made.seconds()))

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
    """The same in a thread of its own, which never waits for one copy while another could start.

    Raises: what `DeviceKV.here` raises in that thread.
    """

    def __init__(
        self,
        kv: DeviceKV,
        *,
        patience_s: float | None = PATIENCE_S,
        movers: Sequence[Any] = (),
    ) -> None:
        super().__init__(kv, patience_s=patience_s, movers=movers)
        self._jobs: queue.SimpleQueue[Callable[[], _UnderWay | None] | None] = queue.SimpleQueue()
        began: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(began,), name="cake-copy", daemon=True
        )
        self._thread.start()
        began.result()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    def _post(self, begin: Callable[[], _UnderWay | None]) -> None:
        self._jobs.put(begin)

    def _run(self, began: "Future[None]") -> None:
        under_way: deque[_UnderWay] = deque()
        closing = False
        with contextlib.ExitStack() as ends:
            try:
                ends.enter_context(self._kv.here())
            except BaseException as error:
                began.set_exception(error)
                return
            began.set_result(None)
            while under_way or not closing:
                begin: Callable[[], _UnderWay | None] | None = None
                with contextlib.suppress(queue.Empty):
                    begin = self._jobs.get(timeout=_LOOK_S if under_way else None)
                    closing |= begin is None
                try:
                    self._advance(under_way, begin)
                except Exception as error:  # the scheduler thread waits for this one
                    logger.exception("a copy between host and device failed")
                    self._failure = self._failure or error

    def _advance(
        self, under_way: deque[_UnderWay], begin: Callable[[], _UnderWay | None] | None
    ) -> None:
        """Begin a copy, and end those that are complete. A copy that raises is forgotten: the
        device may still use its host memory, which has no other user from then on."""
        if begin is not None and (begun := begin()) is not None:
            under_way.append(begun)
        for _ in range(len(under_way)):
            each = under_way.popleft()
            if each.copy.done():
                each.end()
            else:
                under_way.append(each)
