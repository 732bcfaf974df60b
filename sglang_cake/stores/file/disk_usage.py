"""How much of a file system the store may still fill."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FRESH_S = 1.0  # how long one answer of the file system is used
FILES_PER_BLOCK = 3  # inodes: the block, and at most two new folders


class Amount(NamedTuple):
    """Of a file system. False if it is nothing."""

    bytes: int = 0
    files: int = 0  # inodes

    def __bool__(self) -> bool:
        return self.bytes > 0 or self.files > 0


class FreeSpace:
    """Keeps `min_free_bytes` of the file system of `folder` free, and the same share of its inodes,
    where it has a fixed number of them. Safe to share among threads."""

    def __init__(
        self, folder: Path, min_free_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self.min_free_bytes, self._clock = folder, min_free_bytes, clock
        self._lock = threading.Lock()
        self._asked_s: float | None = None
        self._usable_bytes = self._usable_files = 0

    def take(self, size_bytes: int) -> Amount:
        """Count a block of `size_bytes` as about to be written, if that leaves enough; else returns
        what is missing.

        Between two looks at the file system our own writes are subtracted, so that a fast burst
        cannot run past the bound; what others write is seen after FRESH_S.

        Raises: OSError if the folder cannot be asked.
        """
        with self._lock:
            missing = self._missing(size_bytes, FILES_PER_BLOCK)
            if not missing:
                self._usable_bytes -= size_bytes
                self._usable_files -= FILES_PER_BLOCK
            return missing

    def missing(self) -> Amount:
        """What should be given back now. Raises: OSError."""
        with self._lock:
            return self._missing(0, 0)

    def freed(self, amount: Amount) -> None:
        """So much was removed since the last look."""
        with self._lock:
            self._usable_bytes += amount.bytes
            self._usable_files += amount.files

    def _missing(self, size_bytes: int, files: int) -> Amount:
        now_s = self._clock()
        if self._asked_s is None or now_s - self._asked_s >= FRESH_S:
            self._look()
            self._asked_s = now_s
        return Amount(max(0, size_bytes - self._usable_bytes), max(0, files - self._usable_files))

    def _look(self) -> None:
        stat = os.statvfs(self._folder)
        self._usable_bytes = stat.f_bavail * stat.f_frsize - self.min_free_bytes
        if stat.f_files:
            share = self.min_free_bytes / (stat.f_blocks * stat.f_frsize)
            self._usable_files = stat.f_favail - int(stat.f_files * share)
        else:  # as btrfs: made as they are needed
            self._usable_files = 1 << 62
