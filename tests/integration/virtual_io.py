"""The I/O thread and the clock of a scheduler in virtual time: no thread, and nothing waits."""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_loop import VirtualLoop

# What is in these packages lives by the virtual clock.
_PACKAGES = ("sglang_cake.integration.", "sglang_cake.loading.")


class VirtualIo:
    """Stands in for an `IoThread`; its loop runs only inside `until` and `run`."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(1000.0)

    def post(self, action: Callable[..., object], *args: object) -> None:
        self.loop.call_soon(action, *args)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        del timeout_s
        return self.loop.run_until_complete(coroutine)

    def until(self, when_s: float) -> None:
        """Let everything happen that is due by then."""
        self.loop.call_at(when_s, self.loop.stop)
        self.loop.run_forever()

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@contextmanager
def virtual_time() -> Iterator[VirtualIo]:
    """The adapter and the loader live by the clock of the value."""
    io = VirtualIo()
    clock = SimpleNamespace(monotonic=lambda: io.loop.now_s, perf_counter=lambda: io.loop.now_s)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(_PACKAGES) and getattr(module, "time", None) is time:
                patch.setattr(module, "time", clock)
        yield io
        io.close()
