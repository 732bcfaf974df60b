"""Blocking work in threads that a cancelled caller never leaves running behind its back."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeVar

from sglang_cake.errors import StoreUnavailable

T = TypeVar("T")


class Stopped(Exception):
    """Raised inside a thread that saw its stop flag; no caller ever sees it."""


def check_stop(stop: threading.Event) -> None:
    """A point where work may be given up. Raises: Stopped."""
    if stop.is_set():
        raise Stopped


async def run_stoppable(pool: Executor, work: Callable[[threading.Event], T]) -> T:
    """Run `work(stop)` in `pool` and return what it returns.

    Raises: what `work` raises; StoreUnavailable if the pool is shut down.
    Cancellation: work still queued never starts. Work that runs is told through `stop`, and the
    cancellation is held back until its thread is done, because the caller will reuse the memory
    that the thread reads or writes. So `work` should look at `stop` about every millisecond.
    """
    stop = threading.Event()
    try:
        queued = pool.submit(work, stop)
    except RuntimeError as error:  # shut down
        raise StoreUnavailable(f"the store is closed ({error})") from error
    try:
        await _end_of(queued)
    except asyncio.CancelledError:
        stop.set()
        queued.cancel()
        while not queued.done():  # however often the task is cancelled meanwhile
            with contextlib.suppress(asyncio.CancelledError):
                await _end_of(queued)
        raise
    try:
        return queued.result()
    except CancelledError:
        raise StoreUnavailable("the store was closed while the call was waiting") from None


def _end_of(queued: "Future[Any]") -> "asyncio.Future[None]":
    """Done when `queued` is; to cancel it changes nothing for `queued`.

    A call of the loop, once: `asyncio.wrap_future` and `wait` cost several times that, which is
    much of what reading a small block takes.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell(_: "Future[Any]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(wake)

    queued.add_done_callback(tell)
    return ended
