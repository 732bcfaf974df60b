"""This user's files: the cache folder, files that are replaced atomically, temporary folders."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/sglang_cake`, or the same in `~/.cache`. It is not created here.

    Raises: RuntimeError if there is no home folder.
    """
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, default: str) -> Path:
    """`$variable/sglang_cake`, or the same in `~/default`. It is not created here.

    Raises: RuntimeError if there is no home folder.
    """
    above = Path(os.environ.get(variable, ""))
    if not above.is_absolute():  # unset, or relative: the XDG specification ignores that
        above = Path.home() / default
    return above / "sglang_cake"


def atomic_write(
    path: Path, content: bytes, *, durable: bool = False, replaces: bool = True
) -> None:
    """Create or replace a file of mode 0600 in an existing folder. Readers see the old content or
    the new, also if this process is killed.

    Args:
        durable: also after a power cut, at the price of a flush of the disk.
        replaces: False to raise FileExistsError if there is a file.

    Raises: OSError; the old file is left then.
    """
    fd, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        (os.replace if replaces else os.link)(draft, path)
    finally:
        with contextlib.suppress(OSError):  # it was renamed
            os.unlink(draft)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A context with a new folder of mode 0700, which is removed at the end.

    A process locks its folder, and those that it forks hold the lock as well. So folders with the
    same prefix whose processes were killed are known by their free locks. They are removed first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, of another user, or gone
            _remove_unlocked(left)
    folder, held = _locked_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_unlocked(folder: Path) -> None:
    """Raises: OSError, also if it is locked."""
    held = os.open(folder, _FOLDER)
    try:
        if os.fstat(held).st_uid == os.geteuid():
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(held)


def _locked_folder(prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        with contextlib.suppress(FileNotFoundError):
            held = os.open(folder, _FOLDER)
            fcntl.flock(held, fcntl.LOCK_EX)
            if folder.exists():  # not removed by another process before it was locked
                return folder, held
            os.close(held)
