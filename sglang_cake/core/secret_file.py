"""Files that hold a secret, which only their owner may read and write. A group may read those that
root made for other users."""

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.local_files import atomic_write, user_folder

_KEY = re.compile(rb"[0-9a-fA-F]{64}\s*")
_MAX_KEY_FILE_BYTES = 256  # 64 digits, and room for white space after them


def read_secret_file(path: Path, *, name: str, most_bytes: int, hint: str) -> bytes:
    """The whole file. A part of it may look like another secret.

    Args:
        most_bytes: a longer file is an error.
        name: what error messages call it.
        hint: what to do if it cannot be read.

    Raises: ConfigError, one line that says nothing of the file's content.
    """
    try:
        # O_NONBLOCK does nothing to a file, and keeps a pipe from hanging us.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{name} {path} is not a file")
            # Kubernetes mounts a secret as a file of root that the pod's group may read.
            shared = status.st_uid == 0 != os.geteuid()
            if status.st_mode & (0o037 if shared else 0o077):
                raise ConfigError(f"{name} {path} is open to others: chmod 600 {path}")
            content = os.read(fd, most_bytes + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; {hint}") from None
    if len(content) > most_bytes:
        raise ConfigError(f"{name} {path} is too long: write at most {most_bytes} bytes")
    return content


def own_secret_path(name: str, *, hint: str) -> Path:
    """`$XDG_CONFIG_HOME/sglang_cake/NAME`, or the same in `~/.config`.

    Args: hint: what to do if there is no home folder.
    Raises: ConfigError if there is none.
    """
    try:
        return user_folder("XDG_CONFIG_HOME", ".config") / name
    except RuntimeError:
        raise ConfigError(f"there is no home folder for the file {name}: {hint}") from None


def make_secret_file(path: Path, *, name: str, hint: str) -> None:
    """Write 64 random hex digits to a new file, unless there is one.

    Several processes may do so at once: the file of the first one stays.

    Args: name, hint: as in `read_secret_file`.
    Raises: ConfigError, one line.
    """
    if os.path.exists(path):  # unlike Path.exists, False without permission to look
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = secrets.token_hex(32).encode() + b"\n"
        with contextlib.suppress(FileExistsError):
            atomic_write(path, content, durable=True, replaces=False)
    except OSError as error:
        words = error.strerror or error
        raise ConfigError(f"{name} {path} cannot be made: {words}; {hint}") from None


def read_key(path: Path, *, name: str, hint: str) -> bytes:
    """The 32 bytes that the file holds as 64 hex digits.

    Args:
        name: what error messages call the file.
        hint: how to make one.

    Raises: ConfigError, one line that says nothing of the file's content.
    """
    text = read_secret_file(path, name=name, most_bytes=_MAX_KEY_FILE_BYTES, hint=hint)
    if not _KEY.fullmatch(text):
        raise ConfigError(f"{name} {path} does not hold 64 hex digits; {hint}")
    return bytes.fromhex(text.decode().strip())
