"""Where foreign errors of files end."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from sglang_cake.errors import StoreFull, StoreUnavailable
from sglang_cake.store.file.pause import Pause

_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def is_whole(path: str, framed_bytes: int | None) -> bool:
    """Whether a file is there, and has so many bytes; None: any."""
    with foreign_errors():
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and framed_bytes in (None, status.st_size)


@contextlib.contextmanager
def foreign_errors(pause: Pause | None = None) -> Iterator[None]:
    """Foreign errors end here: the message keeps the path and the system's words."""
    try:
        yield
    except OSError as error:
        if pause is not None and error.errno in _DISK_TROUBLE:
            pause.failed(str(error))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(str(error)) from error
        raise StoreUnavailable(str(error)) from error
