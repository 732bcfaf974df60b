"""`torch.cuda` without a GPU: streams whose copies happen later, in any order that events allow.

What is launched inside `torch.cuda.stream(...)` waits in that stream's queue until somebody waits
for an event; then queues run on, picked at random, until it has come. Memory is that of the CPU, so
that a copy which is not ordered after what it needs, or before what overwrites it, shows.
"""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GARBAGE = 0xEE
_aten = torch.ops.aten
_LATER = {_aten.copy_, _aten.index_copy_, _aten.index_select}


class _Record:
    """One recording of an event."""

    done = False


class FakeEvent:
    def __init__(self, **kwargs: object) -> None:
        self._cuda = FakeCuda.now
        self.last: _Record | None = None

    def record(self, stream: "FakeStream") -> None:
        record = self.last = _Record()
        stream.launch(lambda: setattr(record, "done", True))

    def query(self) -> bool:
        return self.last is None or self.last.done

    def synchronize(self) -> None:
        self._cuda.run_until(self.last)


class FakeStream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._cuda = FakeCuda.now
        self.queue: deque[tuple[_Record | None, Callable[[], object]]] = deque()
        self._cuda.streams.append(self)

    def launch(self, work: Callable[[], object], after: _Record | None = None) -> None:
        with self._cuda.lock:
            self.queue.append((after, work))

    def wait_event(self, event: FakeEvent) -> None:
        self.launch(lambda: None, after=event.last)

    def wait_stream(self, other: "FakeStream") -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)


class FakeCuda:
    """One at a time. Args: seed: of the order in which streams go on."""

    now: "FakeCuda"

    def __init__(self, seed: int) -> None:
        FakeCuda.now = self
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self._random = random.Random(seed)
        self._here = threading.local()

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        self._here.stream = stream
        try:
            with _Later(stream):
                yield
        finally:
            self._here.stream = before

    def current_stream(self, device: object = None) -> FakeStream:
        """Of this thread; one that has none gets its own."""
        if getattr(self._here, "stream", None) is None:
            self._here.stream = FakeStream()
        found: FakeStream = self._here.stream
        return found

    def run_until(self, record: _Record | None, deadline_s: float = 60.0) -> None:
        end_s = time.monotonic() + deadline_s
        while record is not None and not record.done:
            if not self._step():
                assert time.monotonic() < end_s, "streams wait for each other"
                time.sleep(0.0005)

    def run_all(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        with self.lock:
            ready = [s for s in self.streams if s.queue and _is_free(s.queue[0][0])]
            if not ready:
                return False
            _, work = self._random.choice(ready).queue.popleft()
            with _disable_current_modes(), torch.inference_mode():
                work()
            return True


def _is_free(after: _Record | None) -> bool:
    return after is None or after.done


class _Later(TorchDispatchMode):
    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _LATER:
            self._stream.launch(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        if func.overloadpacket is _aten.empty:
            result.fill_(GARBAGE)
        return result


def install(monkeypatch: pytest.MonkeyPatch, seed: int) -> FakeCuda:
    """In place of what `sglang_cake` uses of `torch.cuda`."""
    cuda = FakeCuda(seed)
    for name, value in (
        ("Event", FakeEvent),
        ("Stream", FakeStream),
        ("stream", cuda.stream),
        ("current_stream", cuda.current_stream),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return cuda
