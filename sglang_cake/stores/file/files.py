"""The files of namespaces and blocks: descriptions (`namespace.json`), and block files.

The index knows nothing of these classes, nor they of the index. A description may have been written
by anybody, and is checked when it is read.
"""

import contextlib
import errno
import json
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from sglang_cake.core.errors import BlockMissing, ConfigError, StoreUnavailable
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.core.namespace import Namespace
from sglang_cake.stores.file import folder_tree
from sglang_cake.stores.file.blockfile import NewFile, open_to_read, write_file
from sglang_cake.stores.file.disk import os_errors
from sglang_cake.stores.file.paths import CORRUPT, DESCRIPTION, NamespaceFolder

MAX_BYTES = 1 << 20
MOST_TRIES = 10  # to make a folder that others may be removing because it is empty
MOST_KNOWN = 1024  # descriptions in memory; all are on the disk
FOLDER_BYTES = 4096  # of an almost empty folder on the disk
ENTRY_BYTES = 256  # of a name in its folder: 105 to 150 measured on ext4
MAX_SET_ASIDE = 16  # corrupt files that are kept for inspection, in each namespace
_SURROGATE = re.compile("[\ud800-\udfff]")


class Descriptions:
    """The descriptions of the namespaces below one root. Blocking and thread-safe."""

    def __init__(self, root: Path, allocated_bytes: int) -> None:
        """Args:
        allocated_bytes: files take multiples of it on the disk.
        """
        self._root = root
        self._allocated_bytes = allocated_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[Digest, dict[str, str]] = OrderedDict()

    def check(self, digest: Digest, fields: Mapping[str, str]) -> bool:
        """Remember the description of a namespace; whether it is on the disk.

        Raises: ConfigError if another description is on the disk; StoreUnavailable.
        """
        with os_errors(self._root):
            there = read_description(self._root, digest)
        if there is not None and _digest(there) != _digest(fields):
            raise ConfigError(
                f"{NamespaceFolder(self._root, digest).description} does not describe the "
                "namespace it is in: remove that folder, or choose another one for the store"
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
        with os_errors(self._root):
            fields = read_description(self._root, digest)
        if fields:
            self._remember(digest, fields)
        return fields or {}

    def own_bytes(self, digest: Digest) -> int:
        """Bytes of a namespace on the disk without its blocks and their folders.

        These are its folder, the folder for corrupt files, its description, and its name in the
        root.
        """
        fields: dict[str, str] = {}
        with contextlib.suppress(StoreUnavailable):  # its folder may not be readable
            fields = self.read(digest)
        size = len(_as_json(fields))
        file_bytes = -(-size // self._allocated_bytes) * self._allocated_bytes
        return 2 * FOLDER_BYTES + file_bytes + ENTRY_BYTES

    def write(self, digest: Digest) -> None:
        """Make the folder of a namespace, with its description, unless they exist.

        The root is not made again. If it has vanished, a disk was unmounted, and blocks would be
        written to the disk below the mount point.
        Raises: StoreUnavailable if the description is unknown; OSError.
        """
        name = digest.hex()
        fields = self.read(digest)
        if not fields:
            raise StoreUnavailable(f"{self._root}: namespace {name} was never described")
        for tries_left in reversed(range(MOST_TRIES)):
            try:
                self._write(digest, name, fields)
                return
            except FileNotFoundError:  # the empty folder was removed meanwhile
                os.stat(self._root)
                if not tries_left:
                    raise

    def _write(self, digest: Digest, name: str, fields: Mapping[str, str]) -> None:
        folder_tree.make_folder(self._root, name)
        there = read_description(self._root, digest)
        if there is None:
            # Synced, since the namespace could not be opened with an empty file after a power cut.
            write_file(folder_tree.open_folder(self._root, name), DESCRIPTION, _as_json(fields))
            with folder_tree.opened(self._root) as root:
                os.fsync(root)
        elif _digest(there) != _digest(fields):  # written meanwhile by another process
            raise StoreUnavailable(f"{self._root}: {name} is described as something else")

    def remove(self, digest: Digest, *, unless_younger_s: float) -> bool:
        """Remove the folder of a namespace if it has only a description; whether it is gone.

        The next block of the namespace writes both again. A description of another namespace
        stays.

        Args:
            unless_younger_s: a younger description stays, and so does a younger folder without one.
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
        except OSError:  # a block was written meanwhile, or the disk is read-only
            return False
        return True

    def _remember(self, digest: Digest, fields: dict[str, str]) -> None:
        with self._lock:
            self._known[digest] = fields
            self._known.move_to_end(digest)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)


class BlockFiles:
    """The block files below one root. Blocking and thread-safe. No link is followed."""

    def __init__(self, root: Path, descriptions: Descriptions, *, sync: bool) -> None:
        """Args:
        sync: as for `NewFile`.
        """
        self._root = root
        self._descriptions = descriptions
        self._sync = sync

    def is_there(self, digest: Digest, key: BlockKey) -> bool:
        """Whether the path of the block exists, as a hint."""
        return os.path.lexists("/".join((str(self._root), *self._names(digest, key))))

    def size_bytes(self, digest: Digest, key: BlockKey) -> int | None:
        """Size of the block's file; None if there is none. Raises: OSError."""
        status = folder_tree.status_of(self._root, *self._names(digest, key))
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def open_to_read(self, digest: Digest, key: BlockKey, *, counts: bool) -> int:
        """A descriptor of the block's file, or of anything else of this name.

        The descriptor of a link cannot be read.

        Raises: BlockMissing; OSError.
        """
        *shard, name = self._names(digest, key)
        try:
            with folder_tree.opened(self._root, *shard) as folder:
                try:
                    return open_to_read(folder, name, counts=counts)
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise
                    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
                    return os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            raise BlockMissing(name) from None

    def new(self, digest: Digest, key: BlockKey) -> NewFile:
        """A new file for the block.

        Missing folders are made, and made again if another process removes the empty folders before
        the file is in them.
        Raises: OSError; StoreUnavailable if the description of the namespace is unknown.
        """
        *shard, name = self._names(digest, key)
        for tries_left in reversed(range(MOST_TRIES)):
            try:
                return NewFile(folder_tree.open_folder(self._root, *shard), name, sync=self._sync)
            except FileNotFoundError:
                if not tries_left:
                    raise
                self._make_folders(digest, shard)
        raise AssertionError("the last try returns or raises")

    def _make_folders(self, digest: Digest, shard: list[str]) -> None:
        try:
            self._descriptions.write(digest)
            for depth in range(2, len(shard) + 1):
                folder_tree.make_folder(self._root, *shard[:depth])
        except FileNotFoundError:
            os.stat(self._root)  # without the root, a disk was unmounted: no further try

    def remove(self, digest: Digest, key: BlockKey) -> None:
        """Remove the block's file, if there is one. Raises: OSError."""
        folder_tree.remove_file(self._root, *self._names(digest, key))

    def remove_folders(self, digest: Digest, key: BlockKey) -> None:
        """Remove the folders of the block, as far as they are empty."""
        folder_tree.remove_empty(self._root, *self._names(digest, key)[:-1])

    def is_gone(self, digest: Digest, key: BlockKey) -> bool:
        """Whether the block has no file. Then its folders are removed, as far as they are empty.

        Raises: OSError.
        """
        if folder_tree.status_of(self._root, *self._names(digest, key)) is not None:
            return False
        self.remove_folders(digest, key)
        return True

    def set_aside(self, digest: Digest, key: BlockKey, bad: os.stat_result) -> bool | None:
        """Move a corrupt file to the folder `corrupt`, or remove it if that folder is full.

        Args:
            bad: status of the corrupt file.

        Returns whether the file was kept; None if another file has replaced it.
        Raises: OSError.
        """
        *shard, name = self._names(digest, key)
        folder_tree.make_folder(self._root, shard[0], CORRUPT)
        with (
            folder_tree.opened(self._root, *shard) as folder,
            folder_tree.opened(self._root, shard[0], CORRUPT) as aside,
        ):
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if (there.st_dev, there.st_ino) != (bad.st_dev, bad.st_ino):
                return None
            kept = len(os.listdir(aside)) < MAX_SET_ASIDE
            if kept:
                os.replace(name, name, src_dir_fd=folder, dst_dir_fd=aside)
        if not kept:
            self.remove(digest, key)
        self.remove_folders(digest, key)
        return kept

    def _names(self, digest: Digest, key: BlockKey) -> tuple[str, str, str, str]:
        return *NamespaceFolder(self._root, digest).shard(key), key.hex()


def read_description(root: Path, digest: Digest) -> dict[str, str] | None:
    """Fields of the description of a namespace; empty if it is invalid, None if there is no file.

    Raises: OSError if the folder cannot be entered.
    """
    try:
        folder = folder_tree.open_folder(root, digest.hex())
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
        fields = json.loads(raw) if len(raw) <= MAX_BYTES else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(folder)
    return fields if isinstance(fields, dict) and _is_text(fields) else {}


def _digest(fields: Mapping[str, str]) -> Digest:
    """Digest of a description. Labels are not part of it."""
    return Namespace(tuple(fields.items())).digest()


def _as_json(fields: Mapping[str, str]) -> bytes:
    return (json.dumps(dict(fields), indent=2) + "\n").encode()


def _is_text(fields: dict[str, object]) -> bool:
    """Whether all names and values are text that can be encoded, so without surrogates."""
    text = [part for field in fields.items() for part in field]
    return all(isinstance(part, str) and not _SURROGATE.search(part) for part in text)
