"""A read as the thread sees it that uses its first bytes before the rest has come."""

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.loading.loader import BlockRead

BYTES, PATIENCE_S = 64, 60.0
NOW_S = 0.0  # long ago: who waits until then does not wait


class WatchedCondition(threading.Condition):
    """Shows that a thread waits for it. That thread holds the lock from then on until it really
    waits, so a change by another thread comes after that."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_for.set()
        return super().wait(timeout)


class WatchedReading(BlockRead):
    def __init__(self) -> None:
        self.condition = WatchedCondition()
        super().__init__(Buffer(on_page(BYTES)), self.condition)


def new_reading() -> WatchedReading:
    return WatchedReading()


class Waiter:
    """A thread that waits for a reading, and the result."""

    def __init__(self, reading: WatchedReading, wait: Callable[[float], bool]) -> None:
        """Returns when the thread waits."""
        self.answer: bool | None = None
        reading.condition.waited_for.clear()
        self._thread = threading.Thread(target=self._run, args=(wait,), daemon=True)
        self._thread.start()
        assert reading.condition.waited_for.wait(PATIENCE_S)

    def _run(self, wait: Callable[[float], bool]) -> None:
        # As good as never: a wake-up that is lost must not look like one that came.
        self.answer = wait(time.monotonic() + 1000 * PATIENCE_S)

    def ended(self) -> bool:
        """What it was answered, once it was."""
        self._thread.join(PATIENCE_S)
        assert self.answer is not None, "nobody woke it"
        return self.answer

    @property
    def still_waits(self) -> bool:
        return self._thread.is_alive()


def waiter(reading: WatchedReading, count: int) -> Waiter:
    return Waiter(reading, lambda until_s: reading.wait(count, until_s))


def whole_waiter(reading: WatchedReading) -> Waiter:
    return Waiter(reading, reading.wait_whole)


# ---- bytes as they come ----


def test_block_read_wait_returns_once_the_bytes_have_come() -> None:
    reading = new_reading()
    first = waiter(reading, 16)
    reading.received(0)
    reading.received(15)
    assert first.still_waits
    reading.received(16)
    assert first.ended()
    second = waiter(reading, 17)
    reading.received(64)
    assert second.ended()
    assert reading.wait(64, NOW_S), "it is there already"
    whole = whole_waiter(reading)
    reading.end(whole=True)
    assert whole.ended()


def test_block_read_without_progress_reports_wait_returns_at_the_end() -> None:
    reading = new_reading()
    assert not reading.is_coming
    one = waiter(reading, 1)
    reading.end(whole=True)
    assert one.ended()
    assert reading.has(BYTES)
    assert reading.wait_whole(NOW_S)


def test_block_read_has_and_is_coming_follow_the_bytes_that_came() -> None:
    reading = new_reading()
    assert (reading.is_coming, reading.has(1)) == (False, False)
    reading.received(0)
    assert (reading.is_coming, reading.has(1)) == (True, False)
    reading.received(10)
    assert (reading.is_coming, reading.has(10), reading.has(11)) == (True, True, False)
    reading.received(0)
    assert (reading.is_coming, reading.has(1)) == (True, False)
    reading.end(whole=True)
    assert (reading.is_coming, reading.has(BYTES)) == (False, True)


def test_block_read_that_failed_has_no_bytes() -> None:
    reading = new_reading()
    reading.received(0)
    reading.received(BYTES)
    reading.end(whole=False)
    assert (reading.is_coming, reading.has(1)) == (False, False)
    assert not reading.wait(1, NOW_S)
    assert not reading.wait_whole(NOW_S)


@pytest.mark.parametrize("count", [None, 1, BYTES])
def test_block_read_failure_wakes_waiting_threads_with_false(count: int | None) -> None:
    reading = new_reading()
    one = whole_waiter(reading) if count is None else waiter(reading, count)
    reading.end(whole=False)
    assert not one.ended()


@pytest.mark.parametrize("come", [0, 15])
def test_block_read_wait_returns_false_at_its_deadline(come: int) -> None:
    reading = new_reading()
    reading.received(0)
    reading.received(come)
    for until_s in (NOW_S, time.monotonic() + 0.01):
        assert not reading.wait(16, until_s)
        assert not reading.wait_whole(until_s)
    reading.received(16)
    assert reading.wait(16, NOW_S), "to have waited in vain is no harm"
    reading.end(whole=True)
    assert reading.wait_whole(NOW_S)


# ---- bytes that come anew ----


def test_block_read_restarted_after_use_is_never_valid() -> None:
    reading = new_reading()
    reading.received(0)
    reading.received(32)
    assert reading.wait(16, NOW_S)
    reading.received(0)
    reading.received(BYTES)
    for count in (1, 16, BYTES):
        assert not reading.wait(count, NOW_S)
    reading.end(whole=True)
    assert not reading.wait(BYTES, NOW_S)
    assert not reading.wait_whole(NOW_S)


def test_block_read_restarted_during_a_wait_after_use_is_never_valid() -> None:
    reading = new_reading()
    reading.received(0)
    reading.received(16)
    assert reading.wait(16, NOW_S)
    more = waiter(reading, 32)
    reading.received(0)
    reading.received(32)
    assert not more.ended()
    whole = whole_waiter(reading)
    reading.end(whole=True)
    assert not whole.ended()


def test_block_read_that_was_given_up_stays_failed() -> None:
    reading = new_reading()
    reading.end(whole=False)
    reading.end(whole=True)
    assert not reading.wait_whole(NOW_S)


@pytest.mark.parametrize("waits", [True, False])
def test_block_read_restarted_before_use_is_valid(waits: bool) -> None:
    reading = new_reading()
    reading.received(0)
    reading.received(32)
    assert reading.has(16), "to look at it is not to use it"
    assert not reading.wait(33, NOW_S)
    one = waiter(reading, BYTES) if waits else None
    reading.received(0)
    reading.received(BYTES)
    assert one is None or one.ended()
    assert reading.wait(BYTES, NOW_S)
    reading.end(whole=True)
    assert reading.wait_whole(NOW_S)


# ---- whatever happens ----


class Uses(RuleBasedStateMachine):
    """A read into real memory, each turn of bytes its own, and somebody who copies what he is told
    is there, at once or a while later: if `wait_whole` says yes, he has what passed the check."""

    @initialize()
    def begin(self) -> None:
        self.buffer = Buffer(on_page(BYTES))
        self.reading = BlockRead(self.buffer)
        self.turn = self.come = 0
        self.whole: bool | None = None
        self.used: set[int] = set()  # the turns of which bytes were to be used
        self.pending: list[int] = []  # counts, to be copied
        self.copied: list[bytes] = []

    def _fill(self, start: int, stop: int) -> None:
        self.buffer.view[start:stop] = bytes([self.turn % 256]) * (stop - start)

    def _is_under_way(self) -> bool:
        return self.whole is None

    @precondition(_is_under_way)
    @rule()
    def comes_anew(self) -> None:
        self.turn, self.come = self.turn + 1, 0
        self.reading.received(0)

    @precondition(lambda self: self._is_under_way() and self.turn and self.come < BYTES)
    @rule(data=st.data())
    def comes(self, data: st.DataObject) -> None:
        before, self.come = self.come, data.draw(st.integers(self.come + 1, BYTES))
        self._fill(before, self.come)
        self.reading.received(self.come)

    @precondition(_is_under_way)
    @rule()
    def ends_well(self) -> None:
        self._fill(self.come, BYTES)  # the last bytes are not told of, nor any if none were
        self.whole = True
        self.reading.end(whole=True)

    @precondition(_is_under_way)
    @rule()
    def fails(self) -> None:
        self.whole = False
        self.reading.end(whole=False)
        self.turn = -1
        self._fill(0, BYTES)  # it is somebody else's now

    @rule(count=st.integers(1, BYTES))
    def waits(self, count: int) -> None:
        there = self.whole is True or (self.whole is None and self.come >= count)
        expected = there and self.used <= {self.turn}
        assert self.reading.wait(count, NOW_S) is expected
        if expected:
            self.used.add(self.turn)
            self.pending.append(count)

    @rule()
    def copies(self) -> None:
        self.copied += [bytes(self.buffer.view[:count]) for count in self.pending]
        self.pending = []

    @rule()
    def waits_for_all(self) -> None:
        self.copies()
        expected = self.whole is True and self.used <= {self.turn}
        assert self.reading.wait_whole(NOW_S) is expected
        if expected:
            self.used.add(self.turn)
            whole = bytes(self.buffer.view)
            assert all(whole.startswith(copy) for copy in self.copied)

    @invariant()
    def says_what_is_there(self) -> None:
        if not hasattr(self, "reading"):
            return
        under_way = self._is_under_way()
        assert self.reading.is_coming is (under_way and self.turn > 0)
        for count in (1, self.come, self.come + 1):
            there = self.whole is True or (under_way and self.come >= count > 0)
            assert self.reading.has(count) is there


TestUses = Uses.TestCase
