"""The I/O thread: an asyncio loop that loader and writer share."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

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
