"""This user's files: the cache folder, and files that are replaced atomically."""

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/sglang_cake`, or the same in `~/.cache`. It is not created here.

    Raises: RuntimeError if there is no home folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # unset, or relative: the XDG specification ignores that
        cache = Path.home() / ".cache"
    return cache / "sglang_cake"


def atomic_write(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Create or replace a file of mode 0600 in an existing folder. Readers see the old content or
    the new, also if this process is killed.

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
