"""Where foreign errors of files end."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from sglang_cake.core.errors import StoreFull, StoreUnavailable
from sglang_cake.stores.file.write_backoff import WriteBackoff

_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@contextlib.contextmanager
def foreign_errors(root: Path, pause: WriteBackoff | None = None) -> Iterator[None]:
    """Foreign errors end here: the message names the store, and keeps the system's words."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        failure = (StoreFull if full else StoreUnavailable)(f"{root}: {error}")
        if pause is not None and error.errno in _DISK_TROUBLE:
            pause.failed(failure)
        raise failure from error
