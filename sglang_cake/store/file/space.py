"""How much of a file system the store may still fill."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

FRESH_S = 1.0  # how long one answer of the file system is used


class FreeSpace:
    """Keeps `min_free_bytes` of the file system of `folder` free. Safe to share among threads."""

    def __init__(
        self, folder: Path, min_free_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self.min_free_bytes, self._clock = folder, min_free_bytes, clock
        self._lock = threading.Lock()
        self._asked_s: float | None = None
        self._usable_bytes = 0

    def take(self, size_bytes: int) -> int:
        """Count `size_bytes` as about to be written, if that leaves enough; else returns how many
        bytes are missing.

        Between two looks at the file system our own writes are subtracted, so that a fast burst
        cannot run past the bound; what others write is seen after FRESH_S.

        Raises: OSError if the folder cannot be asked.
        """
        with self._lock:
            now_s = self._clock()
            if self._asked_s is None or now_s - self._asked_s >= FRESH_S:
                stat = os.statvfs(self._folder)
                self._usable_bytes = stat.f_bavail * stat.f_frsize - self.min_free_bytes
                self._asked_s = now_s
            if size_bytes > self._usable_bytes:
                return size_bytes - self._usable_bytes
            self._usable_bytes -= size_bytes
            return 0

    def freed(self, size_bytes: int) -> None:
        """So much was removed since the last look."""
        with self._lock:
            self._usable_bytes += size_bytes
