"""The I/O thread and the clock of a scheduler in virtual time: no thread, and nothing waits."""

import asyncio
import contextlib
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

# Modules of these packages take their time from the virtual clock.
_PACKAGES = ("sglang_cake.integration.", "sglang_cake.loading.", "sglang_cake.writeback.")


class _Jumping(selectors.SelectSelector):
    """Where a loop would sleep, its clock jumps."""

    def __init__(self, io: "VirtualIo") -> None:
        super().__init__()
        self._io = io

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout:
            self._io.now_s += timeout
        return events


class VirtualIo:
    """Stands in for an `IoThread`. Its loop runs only inside `until` and `run`.

    Attributes:
        now_s: the virtual time.
    """

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.loop = asyncio.SelectorEventLoop(_Jumping(self))
        self.loop.time = lambda: self.now_s  # type: ignore[method-assign]
        self.loop.run_in_executor = self._in_executor  # type: ignore[method-assign,assignment]

    def post(self, action: Callable[..., object], *args: object) -> None:
        self.loop.call_soon(action, *args)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        del timeout_s
        return self.loop.run_until_complete(coroutine)

    def until(self, when_s: float) -> None:
        """Let everything happen that is due by then. No effect inside of the loop."""
        if not self.loop.is_running():
            self.loop.call_at(when_s, self.loop.stop)
            self.loop.run_forever()

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def _in_executor(
        self, executor: object, action: Callable[..., Any], *args: object
    ) -> "asyncio.Future[Any]":
        """Call `action` at once. If it returns a time, as a virtual wait does, the result comes
        then."""
        del executor
        future: asyncio.Future[Any] = self.loop.create_future()
        result = action(*args)
        due_s = result if isinstance(result, float) else self.now_s
        self.loop.call_at(due_s, lambda: future.done() or future.set_result(result))
        return future


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualIo]:
    """Integration, loader and writer live by the clock of the value."""
    io = VirtualIo()
    clock = SimpleNamespace(monotonic=lambda: io.now_s, perf_counter=lambda: io.now_s)
    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith(_PACKAGES) and getattr(module, "time", None) is time:
                patches.enter_context(mock.patch.object(module, "time", clock))
        yield io
        io.close()
