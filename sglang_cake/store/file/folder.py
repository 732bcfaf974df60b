"""The blocks of all namespaces below one folder. Blocking and thread-safe; no event loop here."""

import contextlib
import errno
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_cake.errors import BlockCorrupt, BlockMissing, ConfigError, StoreFull, StoreUnavailable
from sglang_cake.keys import BlockKey, Digest
from sglang_cake.store.base import BlockInfo, StoredNamespace, StoreStats
from sglang_cake.store.file.blockfile import NewFile, sync_folder, write_file
from sglang_cake.store.file.paths import NamespaceFolder
from sglang_cake.store.file.space import FreeSpace
from sglang_cake.store.file.sweep import sweep_stale
from sglang_cake.store.threads import check_stop

MAX_SET_ASIDE = 16  # corrupt files kept for whoever wants to know what happened


class BlockFolder:
    """Any number of processes of one machine may have the same folder open.

    Of two concurrent writers of one key both may succeed; the file is whole at every moment.
    """

    def __init__(self, root: Path, *, sync: bool, min_free_bytes: int) -> None:
        """Open (and make) the folder. Blocks on the disk for a moment.

        Args:
            sync: every block is on the disk when it becomes visible; otherwise that is left to the
                kernel: after a power cut, late blocks are missing or fail their check.
            min_free_bytes: of the file system; a block that would leave less is refused.

        Raises: StoreUnavailable.
        """
        self._root, self._sync = root, sync
        self._space = FreeSpace(root, min_free_bytes)
        self._claimed: dict[Digest, dict[str, str]] = {}
        with _foreign_errors():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._closing = threading.Event()
        # In the background: a large store has 65536 folders to look through.
        self._sweeper = threading.Thread(
            target=sweep_stale, args=(root, self._closing), name="cake-file-sweep", daemon=True
        )
        self._sweeper.start()

    def claim(self, digest: Digest, fields: Mapping[str, str]) -> None:
        """Make the namespace's folder with its description, or check the one that is there.

        The root itself is never made again: if it has gone, a disk was unmounted, and blocks would
        land on the one below it.
        Raises: StoreUnavailable; ConfigError if the description is another one.
        """
        place = NamespaceFolder(self._root, digest)
        self._claimed[digest] = dict(fields)
        with _foreign_errors():
            place.folder.mkdir(mode=0o700, exist_ok=True)
            if not place.description.exists():
                # Always synced: an empty one after a power cut would lock the namespace.
                write_file(place.description, (json.dumps(dict(fields), indent=2) + "\n").encode())
                sync_folder(place.root)
        if self._fields(place) != dict(fields):
            raise ConfigError(
                f"{place.description} does not describe the namespace it is in: "
                "remove that folder, or choose another one for the store"
            )

    def _claim_again(self, digest: Digest) -> None:
        try:
            self.claim(digest, self._claimed[digest])
        except ConfigError as error:  # somebody else made it meanwhile, for something else
            raise StoreUnavailable(str(error)) from error

    def _fields(self, place: NamespaceFolder) -> dict[str, str]:
        try:
            found = json.loads(place.description.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def contains(
        self, digest: Digest, keys: Sequence[BlockKey], framed_bytes: int, stop: threading.Event
    ) -> list[bool]:
        """Which keys have a file of the right size. One cut short (power cut) counts as absent,
        so that the next write of the same block heals it. Raises: StoreUnavailable; Stopped."""
        place, found = NamespaceFolder(self._root, digest), []
        for key in keys:
            check_stop(stop)
            found.append(_is_whole(place.block(key), framed_bytes))
        return found

    @contextlib.contextmanager
    def reading(self, digest: Digest, key: BlockKey) -> Iterator[int]:
        """The block's file, open for reading; it is not evicted meanwhile.

        A BlockCorrupt that the caller raises inside has the file set aside.
        Raises: BlockMissing, BlockCorrupt (no file at all), StoreUnavailable.
        """
        path = NamespaceFolder(self._root, digest).block(key)
        with _foreign_errors():
            try:
                # O_NONBLOCK does nothing to a file, and keeps a foreign pipe from hanging us.
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                raise BlockMissing(key.hex()) from None
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise BlockCorrupt("not a file")
                yield fd
            except BlockCorrupt as error:
                self.set_aside(digest, key)
                raise BlockCorrupt(f"{path}: {error}") from None
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def writing(self, digest: Digest, key: BlockKey, framed_bytes: int) -> Iterator[NewFile | None]:
        """A file for `framed_bytes` bytes, to be appended to and committed; without a commit it
        leaves nothing. None if the block is there already. The namespace must have been claimed.

        Raises: StoreFull, StoreUnavailable.
        """
        path = NamespaceFolder(self._root, digest).block(key)
        with _foreign_errors():
            if _is_whole(path, framed_bytes):
                yield None
                return
            self._space.take(framed_bytes)
            try:
                file = NewFile(path, sync=self._sync)
            except FileNotFoundError:  # the first block of its folder, or the folder was removed
                self._claim_again(digest)
                for made in (path.parent.parent, path.parent):
                    made.mkdir(mode=0o700, exist_ok=True)
                file = NewFile(path, sync=self._sync)
            try:
                yield file
            finally:
                file.discard()

    def set_aside(self, digest: Digest, key: BlockKey) -> None:
        """Keep a bad file for inspection, up to MAX_SET_ASIDE of them; delete any further one."""
        place = NamespaceFolder(self._root, digest)
        path = place.block(key)
        try:
            place.corrupt.mkdir(mode=0o700, exist_ok=True)
            if len(os.listdir(place.corrupt)) < MAX_SET_ASIDE:
                os.replace(path, place.corrupt / path.name)
            else:
                path.unlink()
        except OSError:
            pass  # read-only, or another reader was first: the block stays bad, and is never used

    def delete(self, digest: Digest, key: BlockKey) -> None:
        """Forget one block. Raises: StoreUnavailable."""
        with _foreign_errors():
            NamespaceFolder(self._root, digest).block(key).unlink(missing_ok=True)

    def list_blocks(self, digest: Digest) -> Iterator[BlockInfo]:
        """The blocks of one namespace. Raises: StoreUnavailable."""
        with _foreign_errors():
            for path in NamespaceFolder(self._root, digest).folder.glob("??/??/" + "?" * 64):
                with contextlib.suppress(FileNotFoundError, ValueError):
                    status = path.stat()
                    key = BlockKey(bytes.fromhex(path.name))
                    yield BlockInfo(key, status.st_size, status.st_atime)

    def namespaces(self) -> list[StoredNamespace]:
        """Every namespace that was claimed. Raises: StoreUnavailable."""
        with _foreign_errors():
            found = []
            for path in sorted(self._root.glob("?" * 64)):
                with contextlib.suppress(ValueError):
                    digest = Digest(bytes.fromhex(path.name))
                    fields = self._fields(NamespaceFolder(self._root, digest))
                    found.append(StoredNamespace(digest, fields))
            return found

    def stats(self) -> StoreStats:
        """How full it is. Raises: StoreUnavailable."""
        return StoreStats()

    def close(self) -> None:
        """Stop what runs in the background. Blocks until it has."""
        self._closing.set()
        self._sweeper.join()


def _is_whole(path: Path, framed_bytes: int) -> bool:
    with _foreign_errors():
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == framed_bytes


@contextlib.contextmanager
def _foreign_errors() -> Iterator[None]:
    """Foreign errors end here: the message keeps the path and the system's words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(str(error)) from error
        raise StoreUnavailable(str(error)) from error
