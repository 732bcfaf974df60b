"""Blocks as files in a folder. Names are in `paths`, bytes in `codec.frame` and docs/format.md."""

import asyncio
import errno
import functools
import json
import os
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from sglang_cake.codec.frame import HEADER_BYTES, check_header, make_header, payload_checksum
from sglang_cake.errors import BlockCorrupt, BlockMissing, ConfigError, StoreUnavailable
from sglang_cake.keys import BlockKey
from sglang_cake.layout import BlockLayout
from sglang_cake.namespace import Namespace
from sglang_cake.store.blockfile import read_framed, sync_folder, write_atomically
from sglang_cake.store.paths import NamespaceFolder
from sglang_cake.store.space import FreeSpace, store_full
from sglang_cake.store.sweep import sweep_stale
from sglang_cake.store.threads import check_stop, run_stoppable

Fsync = Literal["off", "data"]
MAX_SET_ASIDE = 16  # corrupt files kept for whoever wants to know what happened


class FileStore:
    """Implements `Store` on a folder that any number of processes may share.

    Reads and writes have a pool of `threads` each, so that neither waits behind the other. Of two
    concurrent puts of one key both may return True; the file is whole at every moment.
    """

    def __init__(
        self,
        root: Path,
        namespace: Namespace,
        layout: BlockLayout,
        *,
        fsync: Fsync,
        min_free_bytes: int,
        threads: int,
    ) -> None:
        """Open (and make) the namespace's folder. Blocks on the disk for a moment.

        Args:
            fsync: "data" has every block on the disk when `put` returns; "off" leaves that to the
                kernel: after a power cut, late blocks are missing or fail their check.
            min_free_bytes: of the file system; a put that would leave less is refused.
            threads: of each of the two pools.

        Raises: StoreUnavailable; ConfigError if the folder describes another namespace.
        """
        self._digest = namespace.digest()
        self._place = NamespaceFolder(root, self._digest)
        self._namespace, self._layout, self._sync = namespace, layout, fsync == "data"
        self._space = FreeSpace(root, min_free_bytes)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _claim(self._place, namespace)
        except OSError as error:
            raise _unavailable(error) from error
        self._readers = ThreadPoolExecutor(threads, "cake-file-read")
        self._writers = ThreadPoolExecutor(threads, "cake-file-write")
        self._closing = threading.Event()
        # In the background: a large store has 65536 folders to look through.
        self._sweeper = threading.Thread(
            target=sweep_stale,
            args=(self._place.folder, self._closing),
            name="cake-file-sweep",
            daemon=True,
        )
        self._sweeper.start()

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await run_stoppable(self._readers, functools.partial(self._contains, list(keys)))

    async def get_into(self, key: BlockKey, out: memoryview) -> None:
        """As in `Store`. Cancelled, it returns once its thread has let go of `out`."""
        assert out.nbytes == self._layout.block_bytes, out.nbytes
        await run_stoppable(self._readers, functools.partial(self._get, key, out.cast("B")))

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`. Cancelled, it returns once its thread has let go of `data`."""
        assert data.nbytes == self._layout.block_bytes, data.nbytes
        work = functools.partial(self._put, key, data.cast("B"))
        return await run_stoppable(self._writers, work)

    async def delete(self, key: BlockKey) -> None:
        await run_stoppable(self._writers, functools.partial(self._delete, key))

    async def close(self) -> None:
        """Calls still queued fail; those that run end as they would have."""
        self._closing.set()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        for wait in (self._readers.shutdown, self._writers.shutdown, self._sweeper.join):
            await asyncio.to_thread(wait)

    # What follows runs in the pools' threads.

    def _contains(self, keys: list[BlockKey], stop: threading.Event) -> list[bool]:
        found = []
        for key in keys:
            check_stop(stop)
            found.append(self._is_whole(self._place.block(key)))
        return found

    def _is_whole(self, path: Path) -> bool:
        """A file of the right size is there. One cut short (power cut) counts as absent, so that
        the next put of the same block heals it."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unavailable(error) from error
        return stat.S_ISREG(status.st_mode) and status.st_size == self._file_bytes

    @property
    def _file_bytes(self) -> int:
        return HEADER_BYTES + self._layout.block_bytes

    def _get(self, key: BlockKey, out: memoryview, stop: threading.Event) -> None:
        path = self._place.block(key)
        try:
            # O_NONBLOCK does nothing to a file, and keeps a foreign pipe from hanging the thread.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise BlockMissing(key.hex()) from None
        except OSError as error:
            raise _unavailable(error) from error
        try:
            self._read_checked(fd, key, out, stop)
        except BlockCorrupt as error:
            self._set_aside(path)
            raise BlockCorrupt(f"{path}: {error}") from None
        except OSError as error:
            raise _unavailable(error) from error
        finally:
            os.close(fd)

    def _read_checked(self, fd: int, key: BlockKey, out: memoryview, stop: threading.Event) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BlockCorrupt("not a file")
        if status.st_size != self._file_bytes:
            raise BlockCorrupt(f"{status.st_size} bytes, a block file has {self._file_bytes}")
        raw = bytearray(HEADER_BYTES)
        checksum = read_framed(fd, raw, out, stop)
        header = check_header(raw, namespace=self._digest, key=key, layout=self._layout)
        if header.payload_checksum != checksum:
            raise BlockCorrupt("the payload's checksum does not match")

    def _set_aside(self, path: Path) -> None:
        """Keep a bad file for inspection, up to MAX_SET_ASIDE of them; delete any further one."""
        try:
            self._place.corrupt.mkdir(mode=0o700, exist_ok=True)
            if len(os.listdir(self._place.corrupt)) < MAX_SET_ASIDE:
                os.replace(path, self._place.corrupt / path.name)
            else:
                path.unlink()
        except OSError:
            pass  # read-only, or another reader was first: the block stays bad, and is never used

    def _put(self, key: BlockKey, data: memoryview, stop: threading.Event) -> bool:
        path = self._place.block(key)
        if self._is_whole(path):
            return False
        try:
            self._space.take(self._file_bytes)
            header = make_header(
                namespace=self._digest,
                key=key,
                layout=self._layout,
                payload_bytes=len(data),
                checksum=payload_checksum(data),
            )
            write: Callable[[], None] = functools.partial(
                write_atomically, path, header, data, sync=self._sync, stop=stop
            )
            try:
                write()
            except FileNotFoundError:  # the first block of its folder, or the folder was removed
                self._make_shard(path.parent)
                write()
        except OSError as error:
            raise _unavailable(error) from error
        return True

    def _make_shard(self, folder: Path) -> None:
        # The root itself is never made again: if it has gone, a disk was unmounted, and blocks
        # would land on the one below it.
        try:
            _claim(self._place, self._namespace)
        except ConfigError as error:
            raise StoreUnavailable(str(error)) from error
        for made in (folder.parent, folder):
            made.mkdir(mode=0o700, exist_ok=True)

    def _delete(self, key: BlockKey, stop: threading.Event) -> None:
        check_stop(stop)
        try:
            self._place.block(key).unlink(missing_ok=True)
        except OSError as error:
            raise _unavailable(error) from error


def _claim(place: NamespaceFolder, namespace: Namespace) -> None:
    """Make the namespace's folder with its description, or check the one that is there.

    Raises: OSError; ConfigError if the description is another one.
    """
    place.folder.mkdir(mode=0o700, exist_ok=True)
    try:
        found = place.description.read_bytes()
    except FileNotFoundError:
        text = json.dumps(namespace.describe(), indent=2) + "\n"
        # Always synced: an empty description after a power cut would lock the namespace.
        payload = memoryview(text.encode())
        write_atomically(place.description, b"", payload, sync=True, stop=threading.Event())
        sync_folder(place.root)
        return
    try:
        same = json.loads(found) == namespace.describe()
    except ValueError:
        same = False
    if not same:
        raise ConfigError(
            f"{place.description} does not describe the namespace it is in: "
            "remove that folder, or choose another one for the store"
        )


def _unavailable(error: OSError) -> StoreUnavailable:
    """Foreign errors end here: the message keeps the path and the system's words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return store_full(str(error))
    return StoreUnavailable(str(error))
