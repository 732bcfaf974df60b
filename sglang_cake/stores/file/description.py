"""`namespace.json`: what a namespace stands for. Anybody may have written the one that is there."""

import contextlib
import json
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.core.keys import Digest
from sglang_cake.core.namespace import Namespace
from sglang_cake.stores.file import folder_tree
from sglang_cake.stores.file.blockfile import write_file
from sglang_cake.stores.file.os_errors import foreign_errors
from sglang_cake.stores.file.paths import DESCRIPTION, NamespaceFolder

MAX_BYTES = 1 << 20
MOST_TRIES = 10  # to make what others may be removing because it is empty
MOST_KNOWN = 1024  # descriptions that a process remembers; the disk has the others
FOLDER_BYTES = 4096  # what an almost empty folder takes on the disk
ENTRY_BYTES = 256  # what a name adds to its folder: 105 to 150 measured on ext4
_SURROGATE = re.compile("[\ud800-\udfff]")


class Descriptions:
    """The descriptions of the namespaces below one root. Blocking and thread-safe."""

    def __init__(self, root: Path, allocated_bytes: int) -> None:
        """Args: allocated_bytes: files take multiples of it on the disk."""
        self._root, self._allocated_bytes = root, allocated_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[Digest, dict[str, str]] = OrderedDict()

    def check(self, digest: Digest, fields: Mapping[str, str]) -> bool:
        """Remember what a namespace stands for; whether its description is on the disk.

        Raises: ConfigError if that is another one; StoreUnavailable.
        """
        with foreign_errors(self._root):
            there = read_description(self._root, digest)
        if there is not None and _digest(there) != _digest(fields):
            raise ConfigError(
                f"{NamespaceFolder(self._root, digest).description} does not describe the "
                "namespace it is in: remove that folder, or choose another one for the store"
            )
        self._remember(digest, dict(fields))
        return there is not None

    def read(self, digest: Digest) -> dict[str, str]:
        """What a namespace stands for; empty if nobody said so. Raises: StoreUnavailable."""
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                return known
        with foreign_errors(self._root):
            fields = read_description(self._root, digest)
        if fields:
            self._remember(digest, fields)
        return fields or {}

    def own_bytes(self, digest: Digest) -> int:
        """What a namespace takes on the disk beside its blocks and their folders: its folder, the
        one for corrupt files, its description, its name in the root."""
        fields: dict[str, str] = {}
        with contextlib.suppress(StoreUnavailable):  # it may not be entered
            fields = self.read(digest)
        size = len(_as_json(fields))
        file_bytes = -(-size // self._allocated_bytes) * self._allocated_bytes
        return 2 * FOLDER_BYTES + file_bytes + ENTRY_BYTES

    def write(self, digest: Digest) -> None:
        """Make the namespace's folder with its description, unless they are there.

        The root itself is never made again: if it has gone, a disk was unmounted, and blocks would
        land on the one below it.
        Raises: StoreUnavailable if nobody said what the namespace stands for; OSError.
        """
        name, fields = digest.hex(), self.read(digest)
        if not fields:
            raise StoreUnavailable(f"{self._root}: namespace {name} was never described")
        for tries_left in reversed(range(MOST_TRIES)):
            try:
                self._write(digest, name, fields)
                return
            except FileNotFoundError:  # removed meanwhile, being empty
                os.stat(self._root)
                if not tries_left:
                    raise

    def _write(self, digest: Digest, name: str, fields: Mapping[str, str]) -> None:
        folder_tree.make_folder(self._root, name)
        there = read_description(self._root, digest)
        if there is None:
            # Always synced: an empty one after a power cut would lock the namespace.
            write_file(folder_tree.open_folder(self._root, name), DESCRIPTION, _as_json(fields))
            with folder_tree.opened(self._root) as root:
                os.fsync(root)
        elif _digest(there) != _digest(
            fields
        ):  # somebody else made it meanwhile, for something else
            raise StoreUnavailable(f"{self._root}: {name} is described as something else")

    def remove(self, digest: Digest, *, unless_younger_s: float) -> bool:
        """Remove a namespace's folder with its description, if nothing else is in it; whether it is
        gone. Whoever uses it writes both again with the next block. A file that does not describe
        the namespace is somebody else's, and stays.

        Args: unless_younger_s: a younger description stays, and a younger folder without one.
        """
        name = digest.hex()
        try:
            with folder_tree.opened(self._root, name) as folder:
                if set(os.listdir(folder)) - {DESCRIPTION}:
                    return False
                there = folder_tree.status_of(self._root, name, DESCRIPTION)
                made_s = (there or os.fstat(folder)).st_mtime
                if abs(time.time() - made_s) < unless_younger_s:
                    return False
                if there is not None:
                    fields = read_description(self._root, digest) or {}
                    if _digest(fields) != digest:
                        return False
                    os.unlink(DESCRIPTION, dir_fd=folder)
            with folder_tree.opened(self._root) as root:
                os.rmdir(name, dir_fd=root)
        except FileNotFoundError:
            return True
        except OSError:  # somebody is describing it anew; or the disk is read-only
            return False
        return True

    def _remember(self, digest: Digest, fields: dict[str, str]) -> None:
        with self._lock:
            self._known[digest] = fields
            self._known.move_to_end(digest)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)


def read_description(root: Path, digest: Digest) -> dict[str, str] | None:
    """The fields that a namespace's description names; empty if it is not one, None if there is no
    file. Raises: OSError if its folder cannot be entered."""
    try:
        folder = folder_tree.open_folder(root, digest.hex())
    except FileNotFoundError:
        return None
    # O_NONBLOCK does nothing to a file, and keeps a foreign pipe from hanging us.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        fd = os.open(DESCRIPTION, flags, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return {}
            raw = os.read(fd, MAX_BYTES + 1)
        finally:
            os.close(fd)
        fields = json.loads(raw) if len(raw) <= MAX_BYTES else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(folder)
    return fields if isinstance(fields, dict) and _is_text(fields) else {}


def _digest(fields: Mapping[str, str]) -> Digest:
    """Labels are not in it, and may differ."""
    return Namespace(tuple(fields.items())).digest()


def _as_json(fields: Mapping[str, str]) -> bytes:
    return (json.dumps(dict(fields), indent=2) + "\n").encode()


def _is_text(fields: dict[str, object]) -> bool:
    """Whether all of it is text that has bytes, which half a surrogate pair has not."""
    text = [part for field in fields.items() for part in field]
    return all(isinstance(part, str) and not _SURROGATE.search(part) for part in text)
