"""Calls that nobody waits for any more: when they may go, and what happens to their memory."""

import asyncio
import contextlib
import threading

import pytest
from polling import async_until

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.threads import Stopped
from sglang_cake.stores.mooncake.mooncake_store import CallThreads, Hold


class Stuck:
    """Work that waits until the test lets it go, outside of its hold or inside."""

    def __init__(self, *, holding):
        self.holding = holding
        self.entered, self.go = threading.Event(), threading.Event()
        self.ended = None

    def __call__(self, hold):
        try:
            if self.holding:
                with hold:
                    self.wait()
            else:
                self.wait()
                with hold:
                    self.ended = "touched"
        except Stopped:
            self.ended = "stopped"
            raise

    def wait(self):
        self.entered.set()
        assert self.go.wait(60)


@contextlib.asynccontextmanager
async def call_threads(*, patience_s, count=1):
    threads = CallThreads("test", count, patience_s=patience_s)
    try:
        yield threads
    finally:
        threads.shut()
        await asyncio.to_thread(threads.wait)
        await asyncio.sleep(0)


async def ticks(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_mooncake_call_cancelled_outside_its_hold_returns_and_never_enters():
    async with call_threads(patience_s=60) as threads:
        stuck = Stuck(holding=False)
        call = asyncio.create_task(threads.call(stuck))
        await asyncio.to_thread(stuck.entered.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert stuck.ended is None
        stuck.go.set()
        assert await threads.call(lambda hold: stuck.ended) == "stopped"


async def test_mooncake_call_cancelled_inside_its_hold_is_waited_for():
    async with call_threads(patience_s=60) as threads:
        stuck = Stuck(holding=True)
        call = asyncio.create_task(threads.call(stuck))
        await asyncio.to_thread(stuck.entered.wait)
        for _ in range(3):  # impatient callers change nothing
            call.cancel()
            await ticks()
            assert not call.done()
        stuck.go.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert stuck.ended == "stopped"


async def test_mooncake_calls_with_all_threads_late_fail_until_one_returns():
    async with call_threads(patience_s=0.5) as threads:
        stuck = Stuck(holding=False)
        with pytest.raises(StoreUnavailable, match="no answer within"):
            await threads.call(stuck)
        with pytest.raises(StoreUnavailable, match="1 calls wait"):
            await threads.call(lambda hold: "never")
        stuck.go.set()
        await async_until(lambda: not threads.abandoned)
        threads.patience_s = 60
        assert await threads.call(lambda hold: "again") == "again"


async def test_mooncake_call_after_a_just_cancelled_call_waits_and_is_served():
    async with call_threads(patience_s=60) as threads:
        stuck = Stuck(holding=False)
        call = asyncio.create_task(threads.call(stuck))
        await asyncio.to_thread(stuck.entered.wait)
        call.cancel()
        await asyncio.wait([call])
        following = asyncio.create_task(threads.call(lambda hold: "served"))
        await ticks()
        assert not following.done()
        stuck.go.set()
        assert await following == "served"


async def test_queued_calls_fail_when_the_threads_are_shut():
    async with call_threads(patience_s=60) as threads:
        stuck = Stuck(holding=False)
        first = asyncio.create_task(threads.call(stuck))
        await asyncio.to_thread(stuck.entered.wait)
        second = asyncio.create_task(threads.call(lambda hold: "never"))
        await ticks()
        threads.shut()
        with pytest.raises(StoreUnavailable):
            await second
        with pytest.raises(StoreUnavailable):
            await threads.call(lambda hold: "never")
        stuck.go.set()
        await first


def test_mooncake_hold_entered_after_leave_raises_stopped():
    hold = Hold()
    with hold:
        pass
    assert hold.leave()
    with pytest.raises(Stopped):
        hold.__enter__()
