"""Reading past the page cache.

A cold block comes by direct I/O into the caller's pages: no copy, no pages to find and to throw out
for it. It costs a fraction of the CPU time, and is at least as fast. A block that the page cache
still has, above all one that was written a moment ago, is copied from there.
"""

import ctypes
import fcntl
import mmap
import os

from sglang_cake.core.buffers import PAGE_BYTES

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_RESIDENT = 1


def set_direct(fd: int, *, direct: bool) -> bool:
    """Have reads of an open file go past the page cache, or no longer; False where a file system
    cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def is_cached(fd: int) -> bool:
    """Whether the page cache has an open file, judged by its first, middle and last page.

    Unlike a read with RWF_NOWAIT, asking brings nothing into the cache. The kernel says yes where
    it does not tell, as for the file of another user.
    """
    try:
        with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as pages:
            first = ctypes.c_char.from_buffer(pages)  # never touched
            start, last = ctypes.addressof(first), (len(pages) - 1) // PAGE_BYTES
            del first  # or the mapping could not be closed
            return all(_is_resident(start + at * PAGE_BYTES) for at in (0, last // 2, last))
    except (OSError, ValueError):  # no mappings here, or the file is empty
        return True


def _is_resident(address: int) -> bool:
    answer = ctypes.create_string_buffer(1)
    if _mincore(address, PAGE_BYTES, answer):
        raise OSError(ctypes.get_errno(), "mincore")
    return bool(answer.raw[0] & _RESIDENT)
