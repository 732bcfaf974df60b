"""Files that hold a secret, which nobody but their owner may read or write."""

import os
import re
import stat
from pathlib import Path

from sglang_cake.errors import ConfigError

_KEY = re.compile(rb"[0-9a-fA-F]{64}\s*")
_MAX_KEY_FILE_BYTES = 256  # 64 digits, and room for white space behind them


def read_secret_file(path: Path, *, name: str, most_bytes: int, hint: str) -> bytes:
    """The first `most_bytes` of the file.

    Args:
        name: what error messages call it.
        hint: what to do about one that cannot be read.

    Raises: ConfigError, one line that says nothing of the file's content.
    """
    try:
        # O_NONBLOCK does nothing to a file, and keeps a pipe from hanging us.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{name} {path} is not a file")
            if status.st_mode & 0o077:
                raise ConfigError(f"{name} {path} is open to others: chmod 600 {path}")
            return os.read(fd, most_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; {hint}") from None


def read_key(path: Path, *, name: str, hint: str) -> bytes:
    """The 32 bytes that the file holds as 64 hex digits.

    Args:
        name: what error messages call the file.
        hint: how to make one.

    Raises: ConfigError, one line that says nothing of the file's content.
    """
    text = read_secret_file(path, name=name, most_bytes=_MAX_KEY_FILE_BYTES + 1, hint=hint)
    if len(text) > _MAX_KEY_FILE_BYTES or not _KEY.fullmatch(text):
        raise ConfigError(f"{name} {path} does not hold 64 hex digits; {hint}")
    return bytes.fromhex(text.decode().strip())
