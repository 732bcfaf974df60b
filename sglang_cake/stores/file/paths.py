"""Names inside a file store: this module alone makes and parses them (see docs/format.md).

<root>/index.db                     the index (index.py)
<root>/index.lock                   locked by who opens or rebuilds them
<root>/index.evict                  locked by the process that keeps the order of eviction
<root>/<namespace digest>/          one namespace
    namespace.json                  what the digest stands for
    ab/cd/<key>                     one block; ab and cd are the first bytes of its key
    ab/cd/.tmp-<host>-<pid>-<random>    a block being written
    corrupt/<key>                   a block that failed a check
"""

import errno
import functools
import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_cake.core.keys import BlockKey, Digest

DESCRIPTION, CORRUPT = "namespace.json", "corrupt"
TMP_PREFIX = ".tmp-"
_OWNER = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})")
_TMP = re.compile(r"\.tmp-([0-9a-f]{16}-[0-9]{1,10})-[0-9a-f]{16}")


class Owner(NamedTuple):
    """A process that writes."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class NamespaceFolder:
    """Where the files of one namespace are."""

    root: Path
    digest: Digest

    @property
    def folder(self) -> Path:
        return self.root / self.digest.hex()

    @property
    def description(self) -> Path:
        return self.folder / DESCRIPTION

    @property
    def corrupt(self) -> Path:
        return self.folder / CORRUPT

    def shard(self, key: BlockKey) -> tuple[str, str, str]:
        """The folders that lead from the root to the block, one by one."""
        name = key.hex()
        return self.digest.hex(), name[:2], name[2:4]

    def block(self, key: BlockKey) -> Path:
        return self.root.joinpath(*self.shard(key), key.hex())


@functools.cache
def this_host() -> str:
    """16 hex digits for the set of processes among which a pid means something.

    The host name would not do: containers that share a folder may share that too, and a pid of one
    would look dead to the other. Boot and pid namespace together say it exactly.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        scope = boot + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: never the same host twice, so that only age tells what is stale
        scope = secrets.token_hex(16)
    return hashlib.sha256(scope.encode()).hexdigest()[:16]


def new_tmp_name() -> str:
    """A file name that nobody else uses and that is never taken for a block's (64 hex digits)."""
    return f"{TMP_PREFIX}{this_process()}-{secrets.token_hex(8)}"


def this_process() -> str:
    """A name that `owner_of` takes apart."""
    return f"{this_host()}-{os.getpid()}"


def owner_of(name: str) -> Owner | None:
    """Who is called so by `this_process`; None if nobody is."""
    match = _OWNER.fullmatch(name)
    return Owner(match[1], int(match[2])) if match else None


def tmp_owner(name: str) -> str | None:
    """Whose (`this_process`) temporary name this is; None if it is not one."""
    match = _TMP.fullmatch(name)
    return match[1] if match else None


def open_private(path: Path) -> int:
    """Open a file, made with mode 0600 if it is not there; the caller closes it. Raises: OSError;
    also for a link, a pipe or whatever else is there and is not a file of this folder."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return fd
