"""Blocking work in threads that a cancelled caller never leaves running behind its back."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeVar

from sglang_cake.core.errors import StoreUnavailable

T = TypeVar("T")


class Stopped(Exception):
    """Raised inside a thread that saw its stop flag; no caller ever sees it."""


def check_stop(stop: threading.Event) -> None:
    """A point where work may be given up. Raises: Stopped."""
    if stop.is_set():
        raise Stopped


class DaemonPool(Executor):
    """As `ThreadPoolExecutor`, whose threads keep the process from ending for as long as a system
    call on a broken disk takes; these do not."""

    def __init__(self, most: int, name: str) -> None:
        """Args: most: threads, each started when it is first needed."""
        self._most, self._name = most, name
        self._lock = threading.Lock()
        self._jobs: queue.Queue[tuple[Future[Any], Callable[[], None]] | None] = queue.Queue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Raises: RuntimeError once it is shut down."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError("shut down")
            self._jobs.put((future, job))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As `Executor.shutdown`."""
        with self._lock:
            while cancel_futures and not self._jobs.empty():
                waiting = self._jobs.get()
                if waiting is not None:
                    waiting[0].cancel()
            if not self._closed or cancel_futures:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)
        if wait:
            self.join(None)

    def join(self, at_most_s: float | None) -> bool:
        """Wait for the threads of a pool that was shut down; whether all have ended."""
        until_s = None if at_most_s is None else time.monotonic() + at_most_s
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job[1]()
            del job  # and what it refers to
            self._idle.release()


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
