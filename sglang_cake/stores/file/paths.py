"""Names inside a file store (docs/format.md). Only this module makes and parses them."""

import functools
import hashlib
import os
import re
import secrets
from pathlib import Path

from sglang_cake.core.keys import BlockKey, Digest

INDEX = "index.db"
INDEX_LOCK = "index.lock"  # locked while a process opens or rebuilds the index
EVICTION_LOCK = "index.evict"  # locked by the process that holds the order of eviction
DAMAGED = f"{INDEX}.damaged-"
CORRUPT = "corrupt"
DIGEST_OR_KEY = re.compile(r"[0-9a-f]{64}")
SHARD = re.compile(r"[0-9a-f]{2}")
_OWNER = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})")
TMP = re.compile(r"\.tmp-([0-9a-f]{16}-[0-9]{1,10})-[0-9a-f]{16}")


def block_names(digest: Digest, key: BlockKey) -> tuple[str, str, str, str]:
    """The names of the folders from the root to the block, and of its file."""
    name = key.hex()
    return digest.hex(), name[:2], name[2:4], name


def this_boot() -> str:
    """The id of the machine's last start. An index of another one is not trusted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: every index is trusted
        return "unknown"


@functools.cache
def this_host() -> str:
    """16 hex digits that identify the processes among which a pid is unique.

    These are the processes of one boot and one pid namespace. A host name is not enough, since
    containers that share a folder may share it, and do not see each other's processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        scope = boot + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: a new host each time, so that files become stale by age only
        scope = secrets.token_hex(16)
    return hashlib.sha256(scope.encode()).hexdigest()[:16]


def new_tmp_name() -> str:
    """A unique file name, which differs from all names of blocks (64 hex digits)."""
    return f".tmp-{this_process()}-{secrets.token_hex(8)}"


def this_process() -> str:
    """Name of this process, for `owner_of`."""
    return f"{this_host()}-{os.getpid()}"


def owner_of(name: str) -> tuple[str, int] | None:
    """Host and pid of the process with this name; None for other text."""
    match = _OWNER.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def tmp_owner(name: str) -> str:
    """Name of the process (`this_process`) in a temporary file's name (`TMP`)."""
    match = TMP.fullmatch(name)
    assert match is not None, name
    return match[1]
