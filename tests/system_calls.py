"""Calls of the operating system that fail, wait, or answer as a test says."""

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_cake.stores.file import disk


def failing(number: int) -> Callable[..., Any]:
    """A call that always fails. Args: number: the `errno`."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def is_mapped(address: int) -> bool:
    """Whether this process has memory at the address."""
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def is_allocated(address: int, size_bytes: int) -> bool:
    """Whether all pages of this memory are there. Args: address: the start of a page."""
    pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    call = ctypes.CDLL(None).mincore
    assert call(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), pages) == 0
    return all(page & 1 for page in pages)


def unlink_failing(number: int, name: str) -> Callable[..., None]:
    """An `os.unlink` that removes no file of this name, as that of a damaged or immutable one.

    Args:
        number: the `errno`.
    """
    unlink = os.unlink

    def fail_for_one(path: str, **kwargs: Any) -> None:
        if path == name:
            raise OSError(number, os.strerror(number), path)
        unlink(path, **kwargs)

    return fail_for_one


def stop_child(pid: int) -> None:
    """Stop a child of this process; returns once none of its threads runs.

    On a busy machine that takes the kernel up to 10 ms, in which a thread may still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "it has ended"


class Held:
    """Wraps a call so that every use waits until the test lets it go.

    Attributes:
        calls: how many there were.
        entered: set by the first one.
        go: set by the test.
    """

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real
        self.calls = 0
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.entered.set()
        self.go.wait(60)  # bounded, so that a test that fails does not hang
        return self.real(*args, **kwargs)


class Disk:
    """What `os.statvfs` says of every file system. It is FUSE, so that blocks that were evicted
    count as free though the answers stay as they are.

    Attributes:
        asked: the folders, in order.
        now_s: of `clock`, by which a store knows when to ask again.
    """

    f_frsize = 1
    f_blocks, f_files = 10**12, 10**6
    now_s = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.f_bavail, self.f_favail = 10**12, 10**6
        self.asked: list[object] = []
        monkeypatch.setattr(os, "statvfs", self._ask)
        monkeypatch.setattr(disk, "file_system_type", lambda folder: 0x65735546)

    def lose_its_size(self) -> None:
        """From now on the size is not fixed, as that of a tmpfs with `size=0`."""
        self.f_blocks = self.f_bavail = 0

    def clock(self) -> float:
        return self.now_s

    def _ask(self, folder: object) -> "Disk":
        self.asked.append(folder)
        return self


def reads_of_this_process(
    monkeypatch: pytest.MonkeyPatch, fetched_bytes: Callable[[], int | None]
) -> None:
    """From now on the system says that it has fetched so many bytes from disks; None: it does not
    say."""
    real = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if path != Path("/proc/self/io"):
            return real(path, *args, **kwargs)
        count = fetched_bytes()
        if count is None:
            raise PermissionError(path)
        return f"read_bytes: {count}\n"

    monkeypatch.setattr(Path, "read_text", read_text)
