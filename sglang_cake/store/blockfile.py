"""Moving a header and a payload between memory and one file, in pieces that can be given up."""

import contextlib
import errno
import os
import threading
from pathlib import Path

from sglang_cake.codec.frame import HEADER_BYTES, PayloadHasher
from sglang_cake.errors import BlockCorrupt
from sglang_cake.store.paths import new_tmp_name
from sglang_cake.store.threads import check_stop

# Large enough that the system calls cost nothing, small enough that a cancelled caller waits for
# less than a millisecond or so, and that a piece is still in the CPU's cache when it is hashed.
PIECE_BYTES = 1 << 20


def _next_piece(head: memoryview, body: memoryview, done: int) -> list[memoryview]:
    """What is to be moved next of `head` and `body` when `done` bytes of both are."""
    start = max(0, done - len(head))
    piece = body[start : start + PIECE_BYTES]
    return [head[done:], piece] if done < len(head) else [piece]


def read_framed(fd: int, header: bytearray, payload: memoryview, stop: threading.Event) -> bytes:
    """Fill both from the start of the file and return the checksum of the payload.

    Args: payload: bytes ("B"), writable.
    Raises: BlockCorrupt if the file ends early; OSError; Stopped.
    """
    head, hashed, done = memoryview(header), PayloadHasher(), 0
    while done < len(head) + len(payload):
        check_stop(stop)
        got = os.preadv(fd, _next_piece(head, payload, done), done)
        if got == 0:
            raise BlockCorrupt(f"the file ends after {done} bytes")
        fresh = payload[max(0, done - HEADER_BYTES) : max(0, done + got - HEADER_BYTES)]
        hashed.update(fresh)  # now, while it is in the cache: about three times as fast
        done += got
    return bytes(hashed.digest())


def _write_framed(fd: int, header: bytes, payload: memoryview, stop: threading.Event) -> None:
    head, done = memoryview(header), 0
    while done < len(head) + len(payload):
        check_stop(stop)
        put = os.writev(fd, _next_piece(head, payload, done))
        if put == 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        done += put


def write_atomically(
    path: Path, header: bytes, payload: memoryview, *, sync: bool, stop: threading.Event
) -> None:
    """Make `path` hold header and payload, mode 0600; what was there before is replaced.

    A crash at any point leaves either nothing new at `path` or all of it, and at most a temporary
    file beside it. With `sync` the bytes and the name are on the disk when this returns.

    Raises: OSError; Stopped. The temporary file is gone and nothing new is at `path` then.
    """
    tmp = made = path.parent / new_tmp_name()
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _write_framed(fd, header, payload, stop)
            if sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)  # before the rename: a network file system may only now say it was full
        check_stop(stop)
        os.replace(tmp, path)
        made = path
        if sync:
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk. Raises: OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
