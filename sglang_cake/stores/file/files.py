"""The files of blocks below a root; the books are none of their business."""

import errno
import os
import stat
from pathlib import Path

from sglang_cake.core.errors import BlockMissing
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.file import folder_tree
from sglang_cake.stores.file.blockfile import NewFile, open_to_read
from sglang_cake.stores.file.description import MOST_TRIES, Descriptions
from sglang_cake.stores.file.paths import CORRUPT, NamespaceFolder

MAX_SET_ASIDE = 16  # corrupt files a namespace keeps for whoever wants to know what happened


class BlockFiles:
    """Blocking and thread-safe. No link is followed."""

    def __init__(self, root: Path, descriptions: Descriptions, *, sync: bool) -> None:
        """Args: sync: as for `NewFile`."""
        self._root, self._descriptions, self._sync = root, descriptions, sync

    def is_there(self, digest: Digest, key: BlockKey) -> bool:
        """Whether something has the block's name: a hint, by path."""
        return os.path.lexists("/".join((str(self._root), *self._names(digest, key))))

    def size_bytes(self, digest: Digest, key: BlockKey) -> int | None:
        """Of the block's file; None if there is none. Raises: OSError."""
        status = folder_tree.status_of(self._root, *self._names(digest, key))
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def open_to_read(self, digest: Digest, key: BlockKey, *, counts: bool) -> int:
        """A descriptor of whatever has the block's name; of a link, one that cannot be read.

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
        """A file for the block, to be written. Its folders are made if need be, and made again if
        somebody removes them, empty as they are, before the file is in them.

        Raises: OSError; StoreUnavailable if nobody said what the namespace stands for.
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
            os.stat(self._root)  # if the root has gone, a disk was unmounted: no further try

    def remove(self, digest: Digest, key: BlockKey) -> None:
        """Remove the block's file, if there is one. Raises: OSError."""
        folder_tree.remove_file(self._root, *self._names(digest, key))

    def remove_folders(self, digest: Digest, key: BlockKey) -> None:
        """Remove the folders that lead to the block, as far as they are empty."""
        folder_tree.remove_empty(self._root, *self._names(digest, key)[:-1])

    def is_gone(self, digest: Digest, key: BlockKey) -> bool:
        """Whether the block has no file; then its folders go, too, if they are empty.
        Raises: OSError."""
        if folder_tree.status_of(self._root, *self._names(digest, key)) is not None:
            return False
        self.remove_folders(digest, key)
        return True

    def set_aside(self, digest: Digest, key: BlockKey, bad: os.stat_result) -> bool | None:
        """Keep a bad file for inspection, up to MAX_SET_ASIDE of them; remove any further one.
        Returns whether it was kept; None if another file has taken its place.

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
