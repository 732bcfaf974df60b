"""The descriptions of namespaces: `namespace.json` in the folder of each.

A description is untrusted, and is checked when it is read.
"""

import contextlib
import json
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.core.keys import DESCRIPTION, Digest, digest_of, read_fields
from sglang_cake.stores.base import StoredNamespace
from sglang_cake.stores.file import nofollow
from sglang_cake.stores.file.block_files import write_file
from sglang_cake.stores.file.disk import ENTRY_BYTES, FOLDER_BYTES, on_disk_bytes, os_errors
from sglang_cake.stores.file.index import BlockIndex
from sglang_cake.stores.file.scan import namespaces_in, remove_empty_folders

MAX_BYTES = 1 << 20
MOST_KNOWN = 1024  # descriptions in memory; all are on the disk


class NamespaceDescriptions:
    """The descriptions of the namespaces below one root. Blocking and thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._known: OrderedDict[Digest, dict[str, str]] = OrderedDict()

    def check(self, digest: Digest, fields: Mapping[str, str]) -> bool:
        """Remember the description of a namespace; whether it is on the disk.

        Raises: ConfigError if another description is on the disk; StoreUnavailable.
        """
        with os_errors(self._root):
            there = read_description(self._root, digest)
        if there is not None and digest_of(there) != digest_of(fields):
            raise ConfigError(
                f"{self._root / digest.hex() / DESCRIPTION} does not describe the namespace it is "
                "in: remove that folder, or choose another one for the store"
            )
        self._remember(digest, dict(fields))
        return there is not None

    def read(self, digest: Digest) -> dict[str, str]:
        """Description of a namespace; empty if unknown. Raises: StoreUnavailable."""
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                return known
        return self.read_stored(digest)

    def read_stored(self, digest: Digest) -> dict[str, str]:
        """The description on the disk, which another process may have removed; empty if there is
        none. One that is remembered stays, for the next block. Raises: StoreUnavailable."""
        with os_errors(self._root):
            fields = read_description(self._root, digest)
        if fields:
            self._remember(digest, fields)
        return fields or {}

    def own_bytes(self, digest: Digest) -> int:
        """Bytes on the disk without blocks and their folders. Raises: OSError."""
        fields: dict[str, str] = {}
        with contextlib.suppress(StoreUnavailable):  # its folder may not be readable
            fields = self.read(digest)
        file_bytes = on_disk_bytes(self._root, len(_as_json(fields)))
        return 2 * FOLDER_BYTES + file_bytes + ENTRY_BYTES  # one folder is for corrupt files

    def write(self, digest: Digest) -> None:
        """Make the folder of a namespace, with its description, unless they exist.

        Raises: StoreUnavailable if the description is unknown; OSError.
        """
        name = digest.hex()
        fields = self.read(digest)
        if not fields:
            raise StoreUnavailable(f"{self._root}: namespace {name} was never described")

        def write() -> None:
            there = read_description(self._root, digest)
            if there is None:
                # Synced: the namespace could not be opened with an empty file after a power cut.
                write_file(nofollow.open_folder(self._root, name), DESCRIPTION, _as_json(fields))
                with nofollow.opened(self._root) as root:
                    os.fsync(root)
            elif digest_of(there) != digest_of(fields):  # written meanwhile by another process
                raise StoreUnavailable(f"{self._root}: {name} is described as something else")

        nofollow.in_folders(self._root, write, lambda: nofollow.make_folder(self._root, name))

    def remove_unused(
        self, index: BlockIndex, *, keep: int = 0, unless_younger_s: float = 0.0
    ) -> None:
        """Remove namespaces without blocks, the oldest first, as `remove`, and keep so many."""
        unused = index.unused()
        unused += [
            digest for digest in namespaces_in(self._root) if not index.has_namespace(digest)
        ]
        for digest in unused[: max(0, len(unused) - keep)]:
            self.remove(index, digest, unless_younger_s=unless_younger_s)

    def remove(
        self,
        index: BlockIndex,
        digest: Digest,
        *,
        unless_younger_s: float = 0.0,
        even_if_foreign: bool = False,
    ) -> None:
        """Remove a namespace that has no blocks, if its folder has only a description. The next
        block of the namespace writes both again.

        Args:
            unless_younger_s: a younger description stays, and so does a younger folder without one:
                a block may follow.
            even_if_foreign: remove a damaged description, or one of another namespace, too.

        Raises: sqlite3.Error; OSError.
        """
        remove_empty_folders(self._root, digest)  # may be many, so outside the transaction
        index.forget_namespace(
            digest, lambda: self._remove_folder(digest, unless_younger_s, even_if_foreign)
        )

    def _remove_folder(
        self, digest: Digest, unless_younger_s: float, even_if_foreign: bool
    ) -> bool:
        """As `remove`; whether the folder is gone."""
        name = digest.hex()
        try:
            with nofollow.opened(self._root, name) as folder:
                if set(os.listdir(folder)) - {DESCRIPTION}:
                    return False
                there = nofollow.status_of(self._root, name, DESCRIPTION)
                made_s = (there or os.fstat(folder)).st_mtime
                if abs(time.time() - made_s) < unless_younger_s:
                    return False
                if there is not None:
                    fields = read_description(self._root, digest) or {}
                    if digest_of(fields) != digest and not even_if_foreign:
                        return False
                    os.unlink(DESCRIPTION, dir_fd=folder)
            with nofollow.opened(self._root) as root:
                os.rmdir(name, dir_fd=root)
        except FileNotFoundError:
            return True
        except OSError:  # a block was written meanwhile, or the disk is read-only
            return False
        return True

    def _remember(self, digest: Digest, fields: dict[str, str]) -> None:
        with self._lock:
            self._known[digest] = fields
            self._known.move_to_end(digest)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)


def described_namespaces_in(root: Path) -> list[StoredNamespace]:
    """The namespaces that have a folder, with their descriptions; none without a root."""
    found = []
    for digest in namespaces_in(root) if root.exists() else ():
        fields = None
        with contextlib.suppress(OSError):  # the folder may not be readable
            fields = read_description(root, digest)
        found.append(StoredNamespace(digest, fields or {}))
    return found


def read_description(root: Path, digest: Digest) -> dict[str, str] | None:
    """Fields of the description of a namespace; empty if it is invalid, None if there is no file.

    Raises: OSError if the folder cannot be entered.
    """
    try:
        folder = nofollow.open_folder(root, digest.hex())
    except FileNotFoundError:
        return None
    # O_NONBLOCK has no effect on files. Without it, opening a pipe would block.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        fd = os.open(DESCRIPTION, flags, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return {}
            raw = os.read(fd, MAX_BYTES + 1)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError:
        return {}
    finally:
        os.close(folder)
    if len(raw) > MAX_BYTES:
        return {}
    return read_fields(raw) or {}


def _as_json(fields: Mapping[str, str]) -> bytes:
    return (json.dumps(dict(fields), indent=2) + "\n").encode()
