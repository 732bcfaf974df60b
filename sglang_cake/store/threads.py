"""Blocking work in threads that a cancelled caller never leaves running behind its back."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor
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
    running = asyncio.wrap_future(queued)
    try:
        # `wait` and not a plain `await`, which would cancel `running` and lose sight of the thread.
        await asyncio.wait((running,))
    except asyncio.CancelledError:
        stop.set()
        queued.cancel()
        await _until_done(running)
        raise
    if running.cancelled():
        raise StoreUnavailable("the store was closed while the call was waiting")
    return running.result()


async def _until_done(running: "asyncio.Future[Any]") -> None:
    """Wait for the thread however often the task is cancelled meanwhile."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((running,))
    if not running.cancelled():
        running.exception()  # fetched, or asyncio would log it as forgotten
