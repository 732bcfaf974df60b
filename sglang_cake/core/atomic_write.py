"""A file that is replaced whole."""

import contextlib
import os
import tempfile
from pathlib import Path


def atomic_write(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Make or replace a file of mode 0600. Readers see the old content or the new, also after this
    process was killed; the folder exists already.

    Args: durable: also after a power cut, at the price of a flush of the disk.
    Raises: OSError; the old file is left then.
    """
    fd, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
