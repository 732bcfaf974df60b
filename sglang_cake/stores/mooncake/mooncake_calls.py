"""Calls that block, cannot be interrupted, and may take longer than anybody wants to wait."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.threads import Stopped

T = TypeVar("T")


class Hold:
    """A thread's `with hold:` around every use of its caller's memory.

    The caller may leave at any other time, and the thread then never gets in again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = self._left = False

    def __enter__(self) -> None:
        """Raises: Stopped if the caller has left."""
        with self._lock:
            if self._left:
                raise Stopped
            self._held = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises: Stopped if the caller wants to leave."""
        with self._lock:
            self._held = False
            if self._left and error is None:
                raise Stopped

    def leave(self) -> bool:
        """Whether the caller may go now; else the thread is about to end, and must be awaited."""
        with self._lock:
            self._left = True
            return not self._held


class Crew:
    """A few threads for calls that are abandoned after a while.

    A call that was abandoned keeps its thread until it returns. When all threads are in calls that
    take too long, further ones fail at once.
    """

    def __init__(self, name: str, threads: int, *, patience_s: float) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._threads, self._patience_s = threads, patience_s
        self._abandoned: dict[Future[Any], float] = {}  # and when they were made; at most `threads`

    async def call(self, work: Callable[[Hold], T]) -> T:
        """Run `work(hold)` in a thread and return what it returns.

        Raises: what `work` raises; StoreUnavailable when it takes too long, or after `shut`.
        Cancellation: returns at once, or once the thread has left the `with hold:` it is in.
        """
        now_s = time.monotonic()
        late = sum(now_s >= since_s + self._patience_s for since_s in self._abandoned.values())
        if late >= self._threads:
            raise StoreUnavailable(f"{late} calls wait for an answer that does not come")
        hold = Hold()
        try:
            queued = self._pool.submit(work, hold)
        except RuntimeError as error:  # shut down
            raise StoreUnavailable(f"the store is closed ({error})") from error
        running = asyncio.wrap_future(queued)
        try:
            await asyncio.wait((running,), timeout=self._patience_s)
        except asyncio.CancelledError:
            await self._abandon(queued, running, hold, now_s)
            raise
        if not running.done():
            await self._abandon(queued, running, hold, now_s)
            raise StoreUnavailable(f"no answer within {self._patience_s:g} s")
        if running.cancelled():
            raise StoreUnavailable("the store was closed while the call was waiting")
        return running.result()

    def shut(self) -> None:
        """Calls still queued fail; no further ones are taken."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def wait(self) -> None:
        """Blocks until the threads are gone, abandoned calls included."""
        self._pool.shutdown()

    async def _abandon(
        self, queued: "Future[Any]", running: "asyncio.Future[Any]", hold: Hold, since_s: float
    ) -> None:
        if not hold.leave():
            while not running.done():  # however often the task is cancelled meanwhile
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((running,))
        if queued.cancel():  # it had not begun
            return
        self._abandoned[queued] = since_s
        running.add_done_callback(lambda done: self._came_back(queued, done))

    def _came_back(self, queued: "Future[Any]", running: "asyncio.Future[Any]") -> None:
        del self._abandoned[queued]
        if not running.cancelled():
            running.exception()  # fetched, or asyncio would log it as forgotten
