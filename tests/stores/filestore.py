"""What the tests of the file store share."""

import contextlib
import time

import pytest
from polling import until

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.stores.file import index_supervisor
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.disk import Amount
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.testing.store_contract import LAYOUT, NAMESPACE, block_of, key_of, read

A, B = key_of("a"), key_of("b")


def folder_of(root, *, clock=time.monotonic, **options):
    return BlockFolder(FolderSettings(root, **options), clock)


def opened(root, *, namespace=NAMESPACE, fsync="off", threads=1, **options):
    folder = folder_of(root, fsync=fsync, **options)
    try:
        return FileStore(folder, BlockFrame(namespace, LAYOUT), threads=threads)
    except BaseException:
        folder.close()  # else its threads ask for free space in later tests
        raise


@contextlib.asynccontextmanager
async def closing(store):
    """The store, which is closed at the end."""
    try:
        yield store
    finally:
        await store.close()


def opened_store(root, **kwargs):
    """A store that is closed at the end."""
    return closing(opened(root, **kwargs))


def path_of(root, key):
    name = key.hex()
    return root / NAMESPACE.digest().hex() / name[:2] / name[2:4] / name


def files_below(folder):
    """All files but the index, which comes and goes in several."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not path.name.startswith("index."))


def until_room_is_made(folder):
    """The background has evicted what it should. Who did it here as well would evict it twice."""
    evictor = folder.evictor
    with folder.supervisor.open() as index:
        until(lambda: not evictor.ahead(index) and not evictor.over_quota_bytes(), "room is made")


def evict(folder, bytes_wanted):
    """Evicts blocks of `bytes_wanted` at once; returns the bytes freed."""
    with folder.supervisor.open() as index:
        folder.supervisor.flush(index)
        return folder.evictor.free(index, Amount(bytes_wanted)).bytes


@contextlib.contextmanager
def nobody_evicts(*folders):
    """What several questions find out fits together: the background makes no room meanwhile."""
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(folder.evictor.lock)
        yield


@contextlib.contextmanager
def waiting_for_the_index(seconds):
    """So long a call waits for an index that is being opened. No URL says how long, since nobody
    wants another time outside of tests: 5 s are little for a busy disk, and much for an index that
    never comes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_supervisor, "OPEN_WAIT_S", seconds)
        yield


async def put_a(store):
    assert await store.put(A, block_of("a"))


async def read_a(store):
    return await read(store, A)
