"""The I/O thread and the clock of a scheduler in virtual time: no thread, and nothing waits."""

import asyncio
import contextlib
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

Result = TypeVar("Result")
# Modules of these packages take their time from the virtual clock.
_PACKAGES = ("sglang_cake.integration.", "sglang_cake.loading.")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps where the loop would sleep.

    Attributes:
        now_s: its clock, which stands still while there is something to do.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout:
            self._loop.now_s += timeout
        return events


def in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualIo:
    """Stands in for an `IoThread`. Its loop runs only inside `until` and `run`."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(1000.0)

    @property
    def now_s(self) -> float:
        return self.loop.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.loop.now_s = now_s

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
        """Another call has no effect."""
        if self.loop.is_closed():
            return
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@contextlib.contextmanager
def clock(now_s: Callable[[], float]) -> Iterator[None]:
    """A context in which integration, loader and writer take the time from `now_s`."""
    stand_in = SimpleNamespace(monotonic=now_s, perf_counter=now_s)
    with contextlib.ExitStack() as patches:
        for name, module in sys.modules.copy().items():
            if name.startswith(_PACKAGES) and getattr(module, "time", None) is time:
                patches.enter_context(mock.patch.object(module, "time", stand_in))
        yield


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualIo]:
    """A context in which integration, loader and writer use the clock of the `VirtualIo`."""
    io = VirtualIo()
    with clock(lambda: io.now_s):
        yield io
        io.close()
