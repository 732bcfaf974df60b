"""Copies are launched when their bytes are there, by a thread of their own."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.integration.memory.copier import Copier, CopyThread, Save, SlotCopy
from sglang_cake.loading.loader import HostBlock

PATIENCE_S = 60.0
SLOTS = torch.arange(4)


class SlowKV:
    """Launches copies that go on until `let_end`."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.error: Exception | None = None  # of launches
        self.later_error: Exception | None = None  # of copies under way
        self.thread: threading.Thread | None = None
        self.changed = threading.Condition()
        self.ended: set[Any] = set()

    def here(self) -> AbstractContextManager[object]:
        self.thread = threading.current_thread()
        return nullcontext()

    def load(self, block: Any, slots: torch.Tensor, after: Any) -> Any:
        return self._launch(("load", block, after))

    def save(self, slots: torch.Tensor, blocks: Sequence[Any], after: Any) -> Any:
        return self._launch(("save", tuple(blocks), after))

    def _launch(self, what: Any) -> Any:
        if self.error is not None:
            raise self.error
        with self.changed:
            self.launched.append(what)
            self.changed.notify_all()
        return SlowCopy(self, what)

    def let_end(self, what: Any) -> None:
        with self.changed:
            self.ended.add(what)
            self.changed.notify_all()

    def wait_launched(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.launched) >= count, PATIENCE_S)


class SlowCopy:
    def __init__(self, kv: SlowKV, what: Any) -> None:
        self._kv = kv
        self.what = what

    def done(self) -> bool:
        if self._kv.later_error is not None:
            raise self._kv.later_error
        return self.what in self._kv.ended

    def seconds(self) -> float:
        return 0.25

    def wait(self) -> None:
        with self._kv.changed:
            assert self._kv.changed.wait_for(self.done, PATIENCE_S)


def slot_copy(kv: Any) -> SlotCopy:
    return SlotCopy(kv, SLOTS, ())


def host_bytes() -> Buffer:
    return Buffer(memoryview(bytearray(8)))


class CopierHarness:
    """A `CopyThread` over copies that end when the test says."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.kv = SlowKV()
        self.pool = BufferPool([host_bytes() for _ in range(8)])
        self.freed = threading.Semaphore(0)
        self.reasons: list[tuple[bool, str]] = []
        self.copy_s: list[float] = []
        kv: Any = self.kv
        self.copier = CopyThread(kv, patience_s=patience_s)

    def staged(self) -> HostBlock:
        buffer = self.pool.take()
        assert buffer is not None
        return HostBlock(buffer, self.pool.give, self._freed)

    def _freed(self, staged: HostBlock) -> None:
        self.reasons.append((staged.used, staged.reason))
        self.copy_s.append(staged.copy_s)
        self.freed.release()

    def save(self) -> Save:
        return self.copier.save(lambda: self.kv.save(SLOTS, [host_bytes()], ()))

    def wait_freed(self) -> None:
        assert self.freed.acquire(timeout=PATIENCE_S)


@pytest.fixture
def harness() -> Iterator[CopierHarness]:
    made = CopierHarness()
    yield made
    for what in list(made.kv.launched):
        made.kv.let_end(what)
    made.copier.close()


def test_copier_block_leaves_host_memory_when_its_copy_is_complete(harness: CopierHarness) -> None:
    copy, staged = slot_copy(harness.kv), harness.staged()
    assert copy.begin()
    assert not copy.begin()
    harness.copier.load(copy, staged)
    (launched,) = harness.copier.wait_launched([copy.launched])
    assert launched.what == ("load", staged.buffer, ())  # type: ignore[union-attr]
    assert harness.pool.free == 7
    harness.kv.let_end(harness.kv.launched[0])
    harness.wait_freed()
    assert harness.reasons == [(True, "")]
    assert harness.copy_s == [0.25]
    assert harness.kv.thread is not threading.current_thread()


def test_copier_slow_save_holds_no_later_load_back(harness: CopierHarness) -> None:
    save = harness.save()
    assert save.launched.result(PATIENCE_S) is not None
    copy, staged = slot_copy(harness.kv), harness.staged()
    assert copy.begin()
    harness.copier.load(copy, staged)
    harness.kv.wait_launched(2)
    harness.kv.let_end(harness.kv.launched[1])
    harness.wait_freed()
    assert not save.ended.done()
    harness.kv.let_end(harness.kv.launched[0])
    assert save.ended.result(PATIENCE_S) is None


def test_copier_withdrawn_slots_are_not_written(harness: CopierHarness) -> None:
    copy, staged = slot_copy(harness.kv), harness.staged()
    assert copy.begin()
    assert copy.withdraw() is None
    harness.copier.load(copy, staged)
    harness.wait_freed()
    assert harness.kv.launched == []
    assert harness.reasons == [(False, "cancelled")]
    harness.copier.check()


def test_copier_withdrawn_after_the_launch_gives_the_copy(harness: CopierHarness) -> None:
    copy, staged = slot_copy(harness.kv), harness.staged()
    assert copy.begin()
    harness.copier.load(copy, staged)
    harness.kv.wait_launched(1)
    assert [copy.withdraw()] == harness.copier.wait_launched([copy.launched])


def test_copier_cancel_leaves_slots_of_a_begun_copy_alone() -> None:
    waiting, begun = slot_copy(SlowKV()), slot_copy(SlowKV())
    assert begun.begin()
    assert not begun.cancel()
    assert waiting.cancel()
    assert not waiting.begin()


def test_copier_failed_load_is_raised_once_and_frees_host_memory(harness: CopierHarness) -> None:
    harness.kv.error = RuntimeError("the device is gone")
    copy, staged = slot_copy(harness.kv), harness.staged()
    assert copy.begin()
    harness.copier.load(copy, staged)
    harness.wait_freed()
    assert harness.copier.wait_launched([copy.launched]) == [None]
    assert copy.failed
    with pytest.raises(RuntimeError, match="gone"):
        harness.copier.check()
    harness.copier.check()


def test_copier_load_without_device_memory_is_no_copy_and_no_error(harness: CopierHarness) -> None:
    harness.kv.error = torch.OutOfMemoryError("no memory")
    copy, staged = slot_copy(harness.kv), harness.staged()
    assert copy.begin()
    harness.copier.load(copy, staged)
    harness.wait_freed()
    assert harness.copier.wait_launched([copy.launched]) == [None]
    harness.copier.check()
    harness.kv.error = None
    assert harness.save().launched.result(PATIENCE_S)  # it goes on


def test_copier_error_of_a_copy_under_way_is_raised_and_later_copies_are_launched(
    harness: CopierHarness,
) -> None:
    harness.kv.later_error = RuntimeError("the device is gone")
    first, second = slot_copy(harness.kv), slot_copy(harness.kv)
    for copy in (first, second):
        assert copy.begin()
        harness.copier.load(copy, harness.staged())
        assert None not in harness.copier.wait_launched([copy.launched])
    harness.copier.close()  # it returns when no copy is under way
    with pytest.raises(RuntimeError, match="gone"):
        harness.copier.check()
    assert harness.pool.free == harness.pool.capacity - 2  # the device may still read them


def test_copier_failed_save_is_told_to_the_writer(harness: CopierHarness) -> None:
    harness.kv.error = RuntimeError("the device is gone")
    save = harness.save()
    with pytest.raises(RuntimeError, match="gone"):
        save.ended.result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="gone"):
        save.launched.result(PATIENCE_S)
    harness.copier.check()


def test_copier_late_copies_are_given_up_and_never_launched() -> None:
    """The copier's thread is held up by another copy for longer than anybody waits."""
    harness = CopierHarness(patience_s=0.01)
    go_on = threading.Event()

    def held_up() -> Any:
        assert go_on.wait(PATIENCE_S)
        return harness.kv.save(SLOTS, [], ())

    harness.copier.save(held_up)
    copy, staged = slot_copy(harness.kv), harness.staged()
    assert copy.begin()
    harness.copier.load(copy, staged)
    save = harness.save()
    assert harness.copier.wait_launched([copy.launched]) == [None]
    assert harness.copier.wait_launched([save.launched]) == [None]
    assert harness.copier.wait_launched([save.launched]) == [None]  # asked again
    go_on.set()
    harness.wait_freed()
    with pytest.raises(TimeoutError):
        save.ended.result(PATIENCE_S)
    assert len(harness.kv.launched) == 1
    harness.copier.check()
    harness.kv.let_end(harness.kv.launched[0])
    harness.copier.close()


def test_copier_save_whose_launch_has_begun_is_waited_for() -> None:
    harness = CopierHarness(patience_s=0.01)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return harness.kv.save(SLOTS, [], ())

    save = harness.copier.save(slow)
    assert begun.wait(PATIENCE_S)
    threading.Timer(0.05, go_on.set).start()
    assert None not in harness.copier.wait_launched([save.launched])
    harness.kv.let_end(harness.kv.launched[0])
    harness.copier.close()


def test_copier_close_completes_what_it_was_given() -> None:
    harness = CopierHarness()
    save = harness.save()
    harness.kv.wait_launched(1)
    harness.kv.let_end(harness.kv.launched[0])
    harness.copier.close()
    assert save.ended.done()
    assert harness.kv.thread is not None
    assert not harness.kv.thread.is_alive()


def test_copier_whose_thread_cannot_use_the_device_is_not_made() -> None:
    kv: Any = SlowKV()

    def here() -> None:
        raise RuntimeError("no such device")

    kv.here = here
    with pytest.raises(RuntimeError, match="no such device"):
        CopyThread(kv)


def test_copier_of_the_same_thread_completes_at_once() -> None:
    kv: Any = SlowKV()
    staged_pool = BufferPool([host_bytes()])
    buffer = staged_pool.take()
    assert buffer is not None
    staged = HostBlock(buffer, staged_pool.give, lambda _: None)
    kv.ended.add(("load", buffer, ()))
    copy = slot_copy(kv)
    assert copy.begin()
    Copier(kv).load(copy, staged)
    assert staged_pool.free == 1
