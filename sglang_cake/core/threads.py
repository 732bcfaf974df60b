"""The I/O thread, an asyncio loop that loader and writer share, and blocking work in other threads
for its coroutines, which may be cancelled."""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, TypeVarTuple

from sglang_cake.core.errors import StoreUnavailable

logger = logging.getLogger(__name__)
Args = TypeVarTuple("Args")
Result = TypeVar("Result")


class IoThread:
    """A daemon thread that runs an event loop from construction to `close`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cake-io", daemon=True)
        self._thread.start()

    def post(self, action: Callable[[*Args], object], *args: *Args) -> None:
        """Schedule `action(*args)` in the thread; from any thread. Ignored after `close`."""
        try:
            self.loop.call_soon_threadsafe(action, *args)
        except RuntimeError:  # the loop is closed: the process is ending
            logger.debug("dropped %r: the I/O thread is closed", action)

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Run a coroutine in the thread and wait for it, from another thread.

        Raises: TimeoutError (the coroutine is then cancelled), and the errors of the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all tasks, stop the loop, and join the thread (at most 5 s)."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.close()


T = TypeVar("T")
CLOSED = "the store was closed while the call was waiting"


class Stopped(Exception):
    """Raised inside a thread that saw its stop flag. Callers never get it."""


def check_stop(stop: threading.Event) -> None:
    """A point where work may end early. Raises: Stopped."""
    if stop.is_set():
        raise Stopped


class DaemonPool(Executor):
    """A `ThreadPoolExecutor` with daemon threads.

    So a system call that hangs on a broken disk does not keep the process from ending.
    """

    def __init__(self, most: int, name: str) -> None:
        """Args:
        most: number of threads, each started when it is first needed.
        """
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        # `Queue` and `Semaphore` are in Python: with them a call took twice the processor time.
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._idle = 0  # threads that wait, less jobs that none of them has taken yet
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Raises: RuntimeError once it is shut down, or if the system refuses a thread. The work
        never runs then."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("shut down")
            if self._idle > 0:
                self._idle -= 1
            elif len(self._threads) < self._most:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._jobs.put((future, functools.partial(work, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As `Executor.shutdown`, but what waits fails, with StoreUnavailable."""
        with self._lock:
            with contextlib.suppress(queue.Empty):
                while cancel_futures:
                    waiting = self._jobs.get_nowait()
                    if waiting is not None and waiting[0].set_running_or_notify_cancel():
                        waiting[0].set_exception(StoreUnavailable(CLOSED))
            if not self._closed or cancel_futures:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)
        if wait:
            self.join(None)

    def join(self, at_most_s: float | None) -> bool:
        """Wait for the threads after `shutdown`. True if all have ended."""
        until_s = None if at_most_s is None else time.monotonic() + at_most_s
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():  # not cancelled
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, work  # with the buffers that they refer to
            with self._lock:
                self._idle += 1


def submit(pool: DaemonPool, work: Callable[..., T], *args: Any) -> "Future[T]":
    """Queue `work(*args)` in `pool`.

    Raises: StoreUnavailable if the pool is shut down or gets no thread. The work never runs then.
    """
    try:
        return pool.submit(work, *args)
    except RuntimeError as error:
        raise StoreUnavailable(f"no thread runs the call ({error})") from error


async def run_in_own_thread(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """As `asyncio.to_thread`, but a call that hangs, as on a dead disk, does not keep the process
    from ending.

    Raises: the errors of `work`; StoreUnavailable if the system refuses a thread.
    Cancellation: returns at once; the call goes on.
    """
    pool = DaemonPool(1, "cake-call")
    called = submit(pool, functools.partial(work, *args, **kwargs))
    pool.shutdown(wait=False)
    return await asyncio.wrap_future(called)


async def run_stoppable(pool: DaemonPool, work: Callable[[threading.Event], T]) -> T:
    """Run `work(stop)` in `pool` and return what it returns.

    Raises: the errors of `work`; StoreUnavailable as in `submit`.
    Cancellation: queued work never starts. For running work, `stop` is set, and the cancellation
    waits for the end of the work, since the caller will reuse the memory that the thread uses. So
    `work` should check `stop` about every millisecond.
    """
    stop = threading.Event()
    todo = [work]
    queued = submit(pool, lambda: todo.pop()(stop))
    try:
        return await asyncio.wrap_future(queued)
    except asyncio.CancelledError:
        stop.set()
        if queued.cancel():  # the pool keeps it until a thread is free, maybe never: without `work`
            todo.clear()
        await wait_uncancelled(asyncio.wrap_future(queued))
        raise


class LimitedThreads:
    """Threads for the coroutines of one event loop, which wait for them in the order they came.

    A coroutine that is cancelled while it waits leaves nothing behind. In the queue of an executor
    its work would stay until a thread is free, which may be never if a disk hangs.

    Attributes: pool: the threads, for work that has to run after a cancellation too.
    """

    def __init__(self, most: int, name: str) -> None:
        """Args:
        most: number of threads.
        """
        self.pool = DaemonPool(most, name)
        self._free = asyncio.Semaphore(most)

    async def run(self, work: Callable[[threading.Event], T]) -> T:
        """As `run_stoppable`."""
        async with self._free:
            return await run_stoppable(self.pool, work)

    def close(self) -> None:
        """Blocks until the threads are done. Waiting work is not begun."""
        self.pool.shutdown(cancel_futures=True)


async def wait_uncancelled(future: "asyncio.Future[Any]") -> None:
    """Wait until it is done, also if the task is cancelled meanwhile. asyncio does not log its
    error."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((future,))
    if not future.cancelled():
        future.exception()  # retrieved
