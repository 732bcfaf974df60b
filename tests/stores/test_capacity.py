"""A folder of blocks never takes more than its capacity, whoever writes, and whenever one dies."""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import signal
import sqlite3
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import killed_writers
import pytest
from filestore import evict, files_below, folder_of, nobody_evicts, waiting_for_the_index
from killed_writers import FRAME
from namespace_folder import NamespaceFolder
from polling import PATIENCE_S, until
from system_calls import Disk, Held, failing, unlink_failing
from test_crash import SINCE, KilledWriters
from test_file_disk_faults import mounted

from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.stores.base import RequestFacts
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.eviction.tenants import TenantRules
from sglang_cake.stores.file import index
from sglang_cake.stores.file.block_folder import (
    MAX_SET_ASIDE,
    MOST_UNREADABLE,
    UNREADABLE_S,
)
from sglang_cake.stores.file.disk import REFUSED_S, Amount, FreeSpace
from sglang_cake.stores.file.evictor import MOST_UNREMOVED
from sglang_cake.stores.file.index import BlockIndex
from sglang_cake.stores.file.index_supervisor import KEEP_ASIDE_S
from sglang_cake.stores.file.nofollow import lock, open_private
from sglang_cake.testing.store_contract import block_of, key_of, read

CAPACITY_BYTES = 16 << 20
STORED_BYTES = FRAME.framed_bytes  # 260 KiB, a multiple of 4 KiB
DIGEST = FRAME.digest
LAST_PAUSE_S = 60.0  # the longest one after failed writes
NOW = threading.Event()  # never set: nothing is given up
FILLED = {name: block_of(name, killed_writers.LAYOUT) for name in killed_writers.FILL}


def du_bytes(root):
    """What is really taken on the disk."""
    total = 0
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile, in the background
                total += os.stat(path).st_blocks * 512
    return total


def opened(root, **options):
    folder = folder_of(root, **({"capacity_bytes": CAPACITY_BYTES} | options))
    folder.descriptions.check(DIGEST, FRAME.namespace.describe())
    folder.stats()  # waits for the index
    return folder


def put(folder, name):
    key, data = key_of(name), block_of(name, killed_writers.LAYOUT)
    with folder.writing(DIGEST, key, STORED_BYTES) as file:
        if file is None:
            return False
        file.append([memoryview(FRAME.header(key, data)), data], NOW)
        file.commit(NOW)
    return True


def get(folder, name):
    with folder.reading(DIGEST, key_of(name)) as (fd, _):
        assert os.pread(fd, STORED_BYTES, 4096) == block_of(name, killed_writers.LAYOUT)


def there(folder, names):
    found = folder.contains(DIGEST, [key_of(name) for name in names], STORED_BYTES, NOW)
    return [name for name, is_there in zip(names, found, strict=True) if is_there]


@pytest.fixture
def folder(tmp_path):
    it = opened(tmp_path)
    yield it
    it.close()


def test_block_folder_at_capacity_evicts_the_oldest_blocks(folder, tmp_path):
    for name in range(150):
        assert put(folder, name)
        assert du_bytes(tmp_path) <= CAPACITY_BYTES
    with nobody_evicts(folder):
        stats = folder.stats()
        left = there(folder, range(150))
        assert stats.blocks == len(left) == len(list(files_below(tmp_path))) - 1
    assert left == list(range(150 - len(left), 150))
    assert stats.evictions.evicted_bytes == (150 - len(left)) * STORED_BYTES
    assert du_bytes(tmp_path) <= stats.used_bytes <= stats.capacity_bytes == CAPACITY_BYTES
    assert len(left) * STORED_BYTES > CAPACITY_BYTES // 2  # and the room is used


def put_together(folder, monkeypatch, number, owner, name):
    """Each put learns by this call how much is missing before any block is evicted."""
    held, calls, call = Held(os.unlink), itertools.count(1), getattr(owner, name)
    all_know = threading.Event()

    def counted(*args):
        missing = call(*args)
        if next(calls) == number:
            all_know.set()
        return missing

    monkeypatch.setattr(os, "unlink", held)
    monkeypatch.setattr(owner, name, counted)
    with ThreadPoolExecutor(number) as pool:
        puts = [pool.submit(put, folder, 1000 + each) for each in range(number)]
        assert all_know.wait(60)
        held.go.set()
        assert all(each.result(60) for each in puts)


def test_block_folder_smaller_capacity_evicts_what_is_missing_once(tmp_path, monkeypatch):
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        for name in range(60):
            put(folder, name)
        used_bytes = folder.stats().used_bytes
    smaller = {"capacity_bytes": used_bytes - 20 * STORED_BYTES, "reads_count": False}
    with contextlib.closing(opened(tmp_path, **smaller, clock=lambda: 0.0)) as folder:
        put_together(folder, monkeypatch, 4, BlockIndex, "reserve")
        assert 20 <= folder.evictions().evicted_blocks <= 20 + 4 + 2  # and for folders


def clock_with(step_s):
    """A clock that goes on by `step_s` at each look of this thread. Other threads do not move it:
    the background thread looks at it at any time."""
    now_s, own = 0.0, threading.get_ident()

    def look():
        nonlocal now_s
        if threading.get_ident() == own:
            now_s += step_s
        return now_s

    return look


def test_block_folder_much_smaller_capacity_put_gives_up_and_a_later_one_goes_on(tmp_path):
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        for name in range(130):
            put(folder, name)
        used_bytes = folder.stats().used_bytes
    smaller = {"capacity_bytes": used_bytes - 100 * STORED_BYTES, "reads_count": False}
    with contextlib.closing(opened(tmp_path, **smaller, clock=clock_with(0.5))) as folder:
        with pytest.raises(StoreFull, match="more must be evicted"):
            put(folder, 1000)
        assert 0 < folder.evictions().evicted_blocks < 100
        assert put(folder, 1000)
        assert 100 <= folder.evictions().evicted_blocks < 110


def test_block_folder_block_in_use_survives_a_long_eviction_in_the_background(
    tmp_path, monkeypatch
):
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        for name in range(130):
            put(folder, name)
        used_bytes = folder.stats().used_bytes
    removing = Held(os.unlink)
    monkeypatch.setattr(os, "unlink", removing)
    capacity_bytes = used_bytes - 100 * STORED_BYTES
    with contextlib.closing(opened(tmp_path, capacity_bytes=capacity_bytes)) as folder:
        assert removing.entered.wait(60)
        folder.on_access(DIGEST, [key_of(80)], RequestFacts("a request", 1000))
        removing.go.set()
        until(lambda: not there(folder, [90]), "there is room")
        assert there(folder, [70, 80, 90]) == [80]


def test_block_folder_block_in_use_survives_a_long_eviction_for_a_quota(tmp_path, monkeypatch):
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        for name in range(130):
            facts = RequestFacts(f"request {name}", 1000, tenant=7)
            folder.on_access(DIGEST, [key_of(name)], facts)
            put(folder, name)
    removing = Held(os.unlink)
    monkeypatch.setattr(os, "unlink", removing)
    rules = TenantRules(quota_bytes=30 * STORED_BYTES)
    folder = opened(tmp_path, capacity_bytes=None, tenant_rules=rules)
    with contextlib.closing(folder):
        assert removing.entered.wait(60)
        facts = RequestFacts("a request", 1000, tenant=7)
        folder.on_access(DIGEST, [key_of(80)], facts)
        removing.go.set()
        until(lambda: not there(folder, [90]), "the quota is kept")
        assert there(folder, [70, 80, 90]) == [80]


def test_block_folder_eviction_behind_the_puts_leaves_time_for_reuse_statistics(
    tmp_path, monkeypatch
):
    evicting, refreshed = threading.Event(), threading.Event()

    def free_ahead(index):
        evicting.set()
        return Amount(STORED_BYTES, 1)  # and others put as much meanwhile

    with contextlib.closing(opened(tmp_path)) as folder:
        monkeypatch.setattr(folder.evictor, "free_ahead", free_ahead)
        assert evicting.wait(PATIENCE_S)
        monkeypatch.setattr(folder.evictor, "refresh", lambda index: refreshed.set())
        assert refreshed.wait(20.0)


def test_block_folder_disk_filled_much_by_others_put_gives_up(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        for name in range(130):
            put(folder, name)
    disk.f_bavail = 0
    options = {"min_free_bytes": 100 * STORED_BYTES, "reads_count": False, "clock": clock_with(0.3)}
    with contextlib.closing(opened(tmp_path, capacity_bytes=None, **options)) as folder:
        with pytest.raises(StoreFull, match="more must be evicted"):
            put(folder, 1000)
        assert 0 < folder.evictions().evicted_blocks < 100


def test_block_folder_disk_filled_by_others_evicts_what_is_missing_once(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    options = {"capacity_bytes": None, "reads_count": False, "clock": lambda: 0.0}
    with contextlib.closing(opened(tmp_path, **options)) as folder:
        for name in range(60):
            put(folder, name)
    disk.f_bavail = 0
    options["min_free_bytes"] = 20 * STORED_BYTES
    with contextlib.closing(opened(tmp_path, **options)) as folder:
        put_together(folder, monkeypatch, 4, FreeSpace, "take")
        assert folder.evictions().evicted_blocks == 20 + 4


class Quota:
    """A limit on the files of blocks of which the file system does not tell, as for one user.

    Attributes:
        refused: writes beyond it.
    """

    def __init__(self, root, monkeypatch, most_blocks):
        self.root, self.most_blocks, self.refused = root, most_blocks, 0
        for module, name in ((os, "writev"), (os, "posix_fallocate"), (sqlite3, "connect")):
            monkeypatch.setattr(module, name, partial(self._write, getattr(module, name)))

    def blocks(self):
        return sum(len(path.name) == 64 for path in files_below(self.root))

    def _write(self, original, *args, **options):
        if self.blocks() < self.most_blocks:
            return original(*args, **options)
        self.refused += 1
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def fill(disk, folders, names):
    """Puts blocks into the folders in turn; each pause after a failed write is over at once.

    Returns the names of the blocks that were stored.
    """
    stored = []
    for name, folder in zip(names, itertools.cycle(folders), strict=False):
        try:
            assert put(folder, name)
        except StoreFull:
            disk.now_s += LAST_PAUSE_S
        else:
            stored.append(name)
    return stored


def test_block_folder_beyond_a_quota_of_the_disk_evicts_the_oldest_blocks(tmp_path, monkeypatch):
    disk, quota = Disk(monkeypatch), Quota(tmp_path, monkeypatch, 10)
    options = {"capacity_bytes": None, "reads_count": False, "clock": disk.clock}
    with contextlib.closing(opened(tmp_path, **options)) as folder:
        stored = fill(disk, [folder], range(40))
        assert there(folder, range(40)) == stored[-10:]
        assert (len(stored), quota.refused) == (39, 1)
        assert folder.evictions().evicted_blocks == 29
        quota.most_blocks = 20
        disk.now_s += REFUSED_S
        assert fill(disk, [folder], range(100, 110)) == list(range(100, 110))
        assert folder.evictions().evicted_blocks == 29
    assert quota.refused == 1


def test_block_folder_quota_used_up_at_start_makes_room_for_its_index(tmp_path, monkeypatch):
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        for name in range(30):
            put(folder, name)
    quota = Quota(tmp_path, monkeypatch, 20)
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        assert quota.blocks() == 19
        assert put(folder, 1000)


def test_block_folder_on_a_disk_without_a_size_removes_no_block_for_its_index(
    tmp_path, monkeypatch
):
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        for name in range(3):
            put(folder, name)
    Disk(monkeypatch).lose_its_size()
    real, failed = os.open, []

    def fail_once(path, *args, **options):
        if path == tmp_path / "index.lock" and not failed:
            failed.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", fail_once)
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        assert failed
        for name in range(3):
            get(folder, name)


def test_block_folder_beyond_a_quota_several_instances_evict_what_they_put(tmp_path, monkeypatch):
    disk, quota = Disk(monkeypatch), Quota(tmp_path, monkeypatch, 20)
    options = {"capacity_bytes": None, "reads_count": False, "clock": disk.clock}
    with contextlib.ExitStack() as ends:
        folders = [
            ends.enter_context(contextlib.closing(opened(tmp_path, **options))) for _ in range(4)
        ]
        stored = fill(disk, folders, range(100))
        evicted = sum(folder.evictions().evicted_blocks for folder in folders)
        assert quota.refused <= len(folders)  # each has learned of it
        assert len(stored) == 100 - quota.refused
        assert 20 - quota.refused <= len(stored) - evicted <= 20
        assert len(there(folders[0], range(100))) == len(stored) - evicted


def test_block_folder_on_a_disk_that_takes_no_block_evicts_one_for_each_try(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    options = {"capacity_bytes": None, "reads_count": False, "clock": disk.clock}
    with contextlib.closing(opened(tmp_path, **options)) as folder:
        for name in range(10):
            put(folder, name)
        Quota(tmp_path, monkeypatch, 0)
        assert fill(disk, [folder], range(100, 105)) == []
        assert folder.evictions().evicted_blocks == 4  # the first try was to show it
        assert there(folder, range(10)) == list(range(4, 10))


def test_block_folder_on_a_disk_without_any_room_makes_some_for_its_index(tmp_path):
    if not mounted(tmp_path, "-t", "tmpfs", "-o", "size=32m", "tmpfs"):
        pytest.skip("may not mount a tmpfs here")
    root, options = tmp_path / "kv", {"capacity_bytes": None}

    def free_bytes():
        disk = os.statvfs(root)
        return disk.f_bavail * disk.f_frsize

    try:
        with contextlib.closing(opened(root, **options)) as folder:
            for name in range(90):
                put(folder, name)
        with contextlib.suppress(OSError):
            (tmp_path / "others").write_bytes(bytes(free_bytes()))
        assert free_bytes() == 0
        with contextlib.closing(opened(root, **options)) as folder:
            assert free_bytes() > 0
            assert put(folder, 1000)
            assert folder.stats().blocks > 30
    finally:
        # Lazily: the captured log has the error, and that the descriptors of the failed try.
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_block_folder_read_blocks_survive_eviction_after_a_restart(folder, tmp_path):
    for name in range(10):
        put(folder, name)
    for name in (0, 1):
        get(folder, name)
    folder.close()
    again = opened(tmp_path)
    for name in range(100, 200):
        put(again, name)
        for kept in (0, 1):
            get(again, kept)
    assert there(again, range(10)) == [0, 1]
    again.close()


@pytest.mark.parametrize(("policy", "kept"), [("lru", 2), ("fifo", None), ("lfu", 1)])
def test_block_folder_eviction_follows_the_chosen_policy(tmp_path, policy, kept):
    folder = opened(tmp_path, policy=policy)
    for name in range(3):
        put(folder, name)
    for name in (1, 1, 0, 2):
        get(folder, name)
    put(folder, 3)
    assert evict(folder, 3 * STORED_BYTES) == 3 * STORED_BYTES
    # fifo keeps the youngest; lru what was used last, which is the one just put; lfu the oftest.
    assert there(folder, range(4)) == [3 if policy in ("fifo", "lru") else kept]
    folder.close()


def test_block_folder_two_instances_share_one_capacity(tmp_path):
    one, two = opened(tmp_path), opened(tmp_path)
    for name in range(60):
        assert put(one, ("one", name))
        assert put(two, ("two", name))
        assert du_bytes(tmp_path) <= CAPACITY_BYTES
    with nobody_evicts(one, two):
        assert one.stats().blocks == two.stats().blocks
    assert one.stats().evictions.evicted_bytes + two.stats().evictions.evicted_bytes > 0
    youngest = [("one", 59), ("two", 59)]
    assert there(one, youngest) == there(two, youngest) == youngest
    # One evicts what the other wrote, in the order of both.
    assert there(one, [("one", 0), ("two", 0)]) == []
    one.close()
    two.close()


def test_block_folder_read_in_another_instance_updates_the_order(tmp_path):
    one, two = opened(tmp_path), opened(tmp_path)
    for name in range(3):
        put(one, name)
    evict(one, 0)  # has learned the order of all three
    get(two, 0)
    two.close()  # writes down what was read
    evict(one, STORED_BYTES)
    assert there(one, range(3)) == [0, 2]
    one.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_block_folder_block_being_read_is_not_evicted(tmp_path, policy):
    folder = opened(tmp_path, policy=policy)
    for name in range(3):
        put(folder, name)
    other = opened(tmp_path)
    with folder.reading(DIGEST, key_of(0)), other.reading(DIGEST, key_of(1)):
        assert evict(folder, 10 * STORED_BYTES) == STORED_BYTES
        assert there(folder, range(3)) == [0, 1]
    assert evict(folder, 10 * STORED_BYTES) == 2 * STORED_BYTES
    evictions = folder.stats().evictions
    assert (evictions.evicted_blocks, evictions.evicted_bytes) == (3, 3 * STORED_BYTES)
    assert evictions.evicting_us > 0
    other.close()
    folder.close()


def test_block_folder_with_all_blocks_in_use_raises_store_full(tmp_path):
    folder = opened(tmp_path)
    with contextlib.ExitStack() as held:

        def put_and_hold():
            for name in itertools.count():
                put(folder, name)
                with contextlib.suppress(BlockMissing):  # made way, ahead, for the next one
                    held.enter_context(folder.reading(DIGEST, key_of(name)))

        with pytest.raises(StoreFull, match="is taken"):
            put_and_hold()
        assert du_bytes(tmp_path) <= CAPACITY_BYTES
    assert put(folder, "room again")
    folder.close()


@pytest.mark.parametrize("number", [errno.EUCLEAN, errno.EIO, errno.EPERM])
def test_block_folder_with_a_file_that_cannot_be_removed_evicts_other_blocks(
    tmp_path, monkeypatch, caplog, number
):
    monkeypatch.setattr(os, "unlink", unlink_failing(number, key_of(0).hex()))
    with contextlib.closing(opened(tmp_path, policy="lru")) as folder:
        for name in range(150):
            assert put(folder, name)
        with nobody_evicts(folder):
            left = there(folder, range(150))
        assert left == [0, *range(150 - len(left) + 1, 150)]
        assert du_bytes(tmp_path) <= CAPACITY_BYTES
    assert caplog.text.count("a file cannot be removed, and stays") == 1


def test_block_folder_that_can_remove_no_file_fails_to_evict_and_recovers(tmp_path, monkeypatch):
    with contextlib.closing(opened(tmp_path, policy="lru")) as folder:
        for name in range(2 * MOST_UNREMOVED):
            put(folder, name)
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", failing(errno.EIO))
            with pytest.raises(OSError, match="Input/output error"):
                evict(folder, STORED_BYTES)
            patch.setattr(os, "unlink", failing(errno.EROFS))
            with pytest.raises(OSError, match="Read-only file system"):
                evict(folder, STORED_BYTES)
        assert there(folder, range(2 * MOST_UNREMOVED)) == list(range(2 * MOST_UNREMOVED))
        every = 2 * MOST_UNREMOVED * STORED_BYTES
        assert evict(folder, every) == every


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_block_folder_short_of_descriptors_or_memory_keeps_the_order_of_eviction(
    tmp_path, monkeypatch, number
):
    with contextlib.closing(opened(tmp_path, policy="lru")) as folder:
        for name in range(10):
            put(folder, name)
        known_blocks = folder.evictor.known_blocks
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", failing(number))
            with pytest.raises(OSError, match=os.strerror(number)):
                evict(folder, STORED_BYTES)
        assert folder.evictor.known_blocks == known_blocks == 10
        assert evict(folder, 3 * STORED_BYTES) == 3 * STORED_BYTES
        assert there(folder, range(10)) == list(range(3, 10))


def test_block_folder_put_of_a_block_being_written_returns_false(folder):
    with folder.writing(DIGEST, key_of(0), STORED_BYTES) as file:
        assert file is not None
        assert put(folder, 0) is False
        assert there(folder, [0]) == []
    assert put(folder, 0) is True  # the other one gave up


def booked(folder):
    """Files that count against the capacity: stored, being written, or set aside."""
    with folder.supervisor.open() as index:
        return index.totals()[0]


def test_block_folder_corrupt_files_count_until_they_are_removed(folder, tmp_path):
    for name in range(MAX_SET_ASIDE + 3):
        put(folder, name)
        with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(name)):
            raise BlockCorrupt("as if")
    assert there(folder, range(MAX_SET_ASIDE + 3)) == []
    assert len(list(NamespaceFolder(tmp_path, DIGEST).corrupt.iterdir())) == MAX_SET_ASIDE
    assert booked(folder) == MAX_SET_ASIDE
    assert du_bytes(tmp_path) <= folder.stats().used_bytes
    assert folder.remove_set_aside() == MAX_SET_ASIDE
    assert folder.stats().blocks == 0


def test_block_folder_reader_killed_while_it_sets_a_block_aside_leaves_no_uncounted_file(tmp_path):
    with contextlib.closing(KilledWriters(tmp_path)) as readers:
        for at in itertools.count():
            readers.start(f"aside {at}")
            status = readers.ended()
            with contextlib.closing(opened(tmp_path)) as folder:
                with (
                    contextlib.suppress(BlockMissing, BlockCorrupt),
                    folder.reading(DIGEST, key_of(0)),
                ):
                    raise BlockCorrupt("too short")
                assert len(files_below(NamespaceFolder(tmp_path, DIGEST).corrupt)) == 1
                assert booked(folder) >= 1
                assert du_bytes(tmp_path) <= folder.stats().used_bytes
                assert folder.remove_set_aside() == 1
                assert booked(folder) == 0
            if status == 0:
                break
            assert status == signal.SIGKILL
        assert at > 3  # folder, move, two empty folders


def test_block_folder_corrupt_block_without_an_index_is_removed(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        put(folder, 0)
    held = open_private(tmp_path / "index.lock")
    try:
        assert lock(held, fcntl.LOCK_EX)  # as a process that rebuilds the index
        with (
            waiting_for_the_index(0.0),
            contextlib.closing(opened(tmp_path)) as folder,
            pytest.raises(BlockCorrupt),
            folder.reading(DIGEST, key_of(0)),
        ):
            raise BlockCorrupt("a flipped bit")
    finally:
        os.close(held)
    place = NamespaceFolder(tmp_path, DIGEST)
    assert files_below(tmp_path) == [place.description]


def test_block_folder_corrupt_file_that_cannot_be_moved_counts_once(folder, tmp_path, monkeypatch):
    put(folder, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(errno.EUCLEAN))
        with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(0)):
            raise BlockCorrupt("a flipped bit")
    assert NamespaceFolder(tmp_path, DIGEST).block(key_of(0)).exists()
    assert booked(folder) == 1


def test_block_folder_block_that_is_corrupt_again_counts_once(folder, tmp_path):
    for _ in range(3):
        put(folder, 0)
        with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(0)):
            raise BlockCorrupt("a bad sector")
    assert len(list(NamespaceFolder(tmp_path, DIGEST).corrupt.iterdir())) == 1
    assert booked(folder) == 1


def test_block_folder_corrupt_file_of_a_huge_size_counts_what_it_takes_on_the_disk(
    folder, tmp_path
):
    for name in range(3):
        put(folder, name)
    os.truncate(NamespaceFolder(tmp_path, DIGEST).block(key_of(0)), 1 << 40)  # as a flipped bit
    with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(0)):
        raise BlockCorrupt("too long")
    assert du_bytes(tmp_path) <= folder.stats().used_bytes < CAPACITY_BYTES
    assert put(folder, 3)
    assert there(folder, range(4)) == [1, 2, 3]


def test_index_rebuilt_beside_a_file_of_a_huge_size_evicts_nothing_for_it(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        for name in range(3):
            put(folder, name)
    os.truncate(NamespaceFolder(tmp_path, DIGEST).block(key_of(0)), 1 << 40)
    (tmp_path / "index.db").unlink()
    with contextlib.closing(opened(tmp_path)) as folder:
        assert du_bytes(tmp_path) <= folder.stats().used_bytes < CAPACITY_BYTES
        assert put(folder, 3)
        assert there(folder, [1, 2, 3]) == [1, 2, 3]


def test_block_folder_corrupt_file_that_cannot_be_removed_keeps_no_index_closed(
    tmp_path, monkeypatch
):
    folder = opened(tmp_path)
    for name in range(2):
        put(folder, name)
        with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(name)):
            raise BlockCorrupt("a bad sector")
    folder.close()
    later_s = time.time() + KEEP_ASIDE_S + 1
    monkeypatch.setattr("time.time", lambda: later_s)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_failing(errno.EUCLEAN, key_of(0).hex()))
        with contextlib.closing(opened(tmp_path)) as again:
            assert put(again, 2)
            assert booked(again) == 3
            assert du_bytes(tmp_path) <= again.stats().used_bytes
            assert evict(again, 2 * STORED_BYTES) == STORED_BYTES
            with pytest.raises(StoreUnavailable, match="Structure needs cleaning"):
                again.remove_set_aside()
    with contextlib.closing(opened(tmp_path)) as again:
        assert booked(again) == 0
        assert list(NamespaceFolder(tmp_path, DIGEST).corrupt.glob("*")) == []


def test_block_folder_block_put_while_a_corrupt_one_is_set_aside_stays(tmp_path, monkeypatch):
    one, two = opened(tmp_path), opened(tmp_path)
    with contextlib.closing(one), contextlib.closing(two):
        put(one, 0)
        rmdir = os.rmdir

        def put_before(*args, **folder):  # after the file was moved
            monkeypatch.undo()
            assert put(two, 0)
            rmdir(*args, **folder)

        monkeypatch.setattr(os, "rmdir", put_before)
        with pytest.raises(BlockCorrupt), one.reading(DIGEST, key_of(0)):
            raise BlockCorrupt("a flipped bit")
        assert there(one, [0]) == [0]
        get(one, 0)
        before = one.stats()
        assert before.block_bytes == STORED_BYTES
        assert du_bytes(tmp_path) <= before.used_bytes
        assert one.remove_set_aside() == 1
        assert before.used_bytes - one.stats().used_bytes >= STORED_BYTES


def test_block_folder_corrupt_files_cleared_while_one_is_set_aside_it_counts(
    folder, tmp_path, monkeypatch
):
    put(folder, 0)
    with monkeypatch.context() as patch:
        patch.setattr(index, "BUSY_S", 0.0)
        other = opened(tmp_path)
    with contextlib.closing(other):
        replace = os.replace

        def clear_before(*args, **folders):
            monkeypatch.setattr(os, "replace", replace)
            with contextlib.suppress(StoreUnavailable):  # the index is busy
                other.remove_set_aside()
            replace(*args, **folders)

        monkeypatch.setattr(os, "replace", clear_before)
        with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(0)):
            raise BlockCorrupt("a flipped bit")
        corrupt = NamespaceFolder(tmp_path, DIGEST).corrupt
        assert booked(folder) == len(files_below(corrupt)) == 1
        assert folder.remove_set_aside() == 1
        assert booked(folder) == len(files_below(corrupt)) == 0


def test_block_folder_corrupt_old_file_leaves_its_replacement_in_place(folder):
    put(folder, 0)

    def read_slowly():
        with folder.reading(DIGEST, key_of(0)):
            folder.delete(DIGEST, key_of(0))
            put(folder, 0)
            raise BlockCorrupt("what the first file held")

    with pytest.raises(BlockCorrupt):
        read_slowly()
    get(folder, 0)


def test_block_folder_many_unreadable_blocks_are_all_set_aside(tmp_path):
    now_s = 0.0
    with contextlib.closing(opened(tmp_path, capacity_bytes=None, clock=lambda: now_s)) as folder:
        for name in range(101):
            put(folder, name)

        def fails(name):
            with pytest.raises(StoreError) as error, folder.reading(DIGEST, key_of(name)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return type(error.value)

        assert {fails(name) for name in range(100)} == {StoreUnavailable}
        now_s += UNREADABLE_S
        get(folder, 100)
        assert {fails(name) for name in range(100)} == {BlockCorrupt}


def test_block_folder_more_unreadable_blocks_than_are_remembered_are_all_forgotten(tmp_path):
    now_s = 0.0
    names = range(MOST_UNREADABLE + 1)
    with contextlib.closing(opened(tmp_path, capacity_bytes=None, clock=lambda: now_s)) as folder:
        for name in (*names, len(names)):
            put(folder, name)

        def fails(name):
            with pytest.raises(StoreError) as error, folder.reading(DIGEST, key_of(name)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return type(error.value)

        assert {fails(name) for name in names} == {StoreUnavailable}
        now_s += UNREADABLE_S
        get(folder, len(names))
        assert fails(names[-1]) is BlockCorrupt
        assert fails(names[-2]) is StoreUnavailable, "its error before was forgotten"


# ---- the index is lost, damaged, or of another program ----


def wreck(tmp_path, how):
    db = tmp_path / "index.db"
    if how == "absent":
        for path in tmp_path.glob("index.db*"):
            path.unlink()
    elif how == "garbage":
        db.write_bytes(b"no database at all, but longer than a header of one" * 100)
    elif how == "page":
        raw = bytearray(db.read_bytes())
        for start in range(4096, len(raw), 4096):
            raw[start : start + 100] = b"\xff" * 100
        db.write_bytes(raw)
    else:
        db.write_bytes(b"")


@pytest.mark.parametrize("how", ["absent", "garbage", "page", "empty"])
def test_index_lost_or_damaged_is_rebuilt_from_the_files(tmp_path, how):
    folder = opened(tmp_path)
    for name in range(20):
        put(folder, name)
    with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(19)):
        raise BlockCorrupt("as if")
    before = folder.stats()
    folder.close()
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"index.db{suffix}").unlink(missing_ok=True)
    wreck(tmp_path, how)
    again = opened(tmp_path)
    assert there(again, range(20)) == list(range(19))
    after = again.stats()
    assert (after.blocks, after.capacity_bytes) == (before.blocks, before.capacity_bytes)
    assert du_bytes(tmp_path) <= after.used_bytes
    for name in range(100, 160):
        put(again, name)
    assert du_bytes(tmp_path) <= CAPACITY_BYTES
    again.close()


def test_index_deleted_while_open_is_rebuilt(folder, tmp_path):
    put(folder, 0)
    wreck(tmp_path, "absent")

    def puts_again():
        assert there(folder, [0]) == [0]  # with an index or without
        with contextlib.suppress(StoreUnavailable):
            return put(folder, 1)

    until(puts_again, "it puts again")
    assert folder.stats().blocks == 2


def test_index_from_before_a_reboot_is_rebuilt_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = opened(tmp_path)
    put(folder, 0)
    folder.close()
    db = sqlite3.connect(tmp_path / "index.db")
    db.execute("DELETE FROM blocks")  # as if the last seconds had not reached the disk
    db.execute("UPDATE agreed SET boot = 'an earlier one'")
    db.commit()
    db.close()
    caplog.clear()
    for _ in range(2):
        again = opened(tmp_path)
        assert there(again, [0]) == [0]
        again.close()
        assert caplog.text.count("indexed 1 blocks") == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize(("call", "at"), [("scandir", 0), ("scandir", 1), ("listdir", 1)])
def test_index_rebuilt_despite_an_error_of_a_moment_counts_all_blocks(
    tmp_path, monkeypatch, call, at, number
):
    with contextlib.closing(opened(tmp_path)) as folder:
        for name in range(3):
            put(folder, name)
    wreck(tmp_path, "absent")
    calls, real = itertools.count(), getattr(os, call)

    def fail_once(*args):
        if next(calls) == at:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, call, fail_once)
    with contextlib.closing(opened(tmp_path)) as folder:
        until(lambda: folder.stats().blocks is not None, "the index is open")
        assert folder.stats().blocks == 3
        assert du_bytes(tmp_path) <= folder.stats().used_bytes


@pytest.mark.parametrize("number", [errno.EUCLEAN, errno.EBADMSG, errno.EACCES])
def test_index_rebuilt_beside_a_damaged_folder_counts_the_other_blocks(
    tmp_path, monkeypatch, caplog, number
):
    with contextlib.closing(opened(tmp_path)) as folder:
        for name in range(3):
            put(folder, name)
    wreck(tmp_path, "absent")
    bad = NamespaceFolder(tmp_path, DIGEST).block(key_of(0)).parent
    damaged, listdir = bad.stat(), os.listdir

    def fail_for_one(folder):
        if os.path.samestat(os.stat(folder), damaged):
            raise OSError(number, os.strerror(number))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", fail_for_one)
    with contextlib.closing(opened(tmp_path)) as folder:
        assert folder.stats().blocks == 2
        assert put(folder, 3)
        assert folder.supervisor.unreadable_files == 1
    assert caplog.text.count("left out") == 1
    assert f"left out 1 files or folders that cannot be read, such as {bad}: " in caplog.text


@pytest.mark.parametrize("call", ["stat", "listdir", "scandir"])
def test_index_rebuilt_beside_a_bad_sector_leaves_out_what_cannot_be_read(
    tmp_path, monkeypatch, caplog, call
):
    with contextlib.closing(opened(tmp_path)) as folder:
        for name in range(3):
            put(folder, name)
    wreck(tmp_path, "absent")
    bad = NamespaceFolder(tmp_path, DIGEST).block(key_of(0))
    bad = {"stat": bad, "listdir": bad.parent, "scandir": bad.parent.parent}[call]
    damaged, stat, real = bad.stat(), os.stat, getattr(os, call)

    def fail_for_one(path, **options):
        if os.path.samestat(stat(path, **options), damaged):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **options)

    monkeypatch.setattr(os, call, fail_for_one)
    with contextlib.closing(opened(tmp_path)) as folder:
        until(lambda: folder.stats().blocks is not None, "the index is open")
        assert folder.stats().blocks == 2
        assert put(folder, 3)
    assert caplog.text.count("left out") == 1
    assert f"left out 1 files or folders that cannot be read, such as {bad}: " in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EBADMSG])
def test_index_of_a_root_that_cannot_be_listed_is_not_rebuilt_until_it_can(
    tmp_path, monkeypatch, number
):
    with contextlib.closing(opened(tmp_path)) as folder:
        for name in range(3):
            put(folder, name)
    wreck(tmp_path, "absent")
    root, scandir, failed = tmp_path.stat(), os.scandir, []

    def fail_for_the_root(folder):
        if os.path.samestat(os.stat(folder), root):
            failed.append(folder)
            raise OSError(number, os.strerror(number))
        return scandir(folder)

    def tried_twice_or_open():
        return len(failed) > 1 or folder.stats().blocks is not None

    with contextlib.ExitStack() as ends:
        with monkeypatch.context() as patch, waiting_for_the_index(0.0):
            patch.setattr(os, "scandir", fail_for_the_root)
            folder = ends.enter_context(contextlib.closing(opened(tmp_path)))
            until(tried_twice_or_open, "the rebuild has failed, or the index is open")
            assert folder.stats().blocks is None
        until(lambda: folder.stats().blocks is not None, "the index is open")
        assert folder.stats().blocks == 3


@pytest.mark.parametrize("failing_part", ["files", "database"])
def test_index_that_cannot_be_rebuilt_is_tried_after_growing_pauses(
    tmp_path, monkeypatch, failing_part
):
    opened(tmp_path).close()
    wreck(tmp_path, "absent")
    wait, pauses, tried = threading.Event.wait, [], threading.Event()

    def short_wait(event, timeout=None):
        if threading.current_thread().name != "cake-file-index":
            return wait(event, timeout)
        pauses.append(timeout)
        if len(pauses) == 9:
            tried.set()
        return wait(event, 0.0)

    def full(index):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    if failing_part == "files":
        monkeypatch.setattr(os, "scandir", failing(errno.EMFILE))
    else:
        monkeypatch.setattr(BlockIndex, "clear", full)
    monkeypatch.setattr(threading.Event, "wait", short_wait)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    with waiting_for_the_index(0.0), contextlib.closing(opened(tmp_path)) as folder:
        assert wait(tried, 60)
        assert folder.stats().blocks is None
    assert pauses[:9] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_block_folder_corrupt_files_that_cannot_be_listed_go_on_counting(folder, monkeypatch):
    put(folder, 0)
    with pytest.raises(BlockCorrupt), folder.reading(DIGEST, key_of(0)):
        raise BlockCorrupt("a flipped bit")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", failing(errno.EMFILE))
        with pytest.raises(StoreUnavailable, match=os.strerror(errno.EMFILE)):
            folder.remove_set_aside()
    assert booked(folder) == 1
    assert folder.remove_set_aside() == 1


def test_block_folder_during_index_rebuild_reads_and_refuses_writes(tmp_path):
    folder = opened(tmp_path)
    put(folder, 0)
    folder.close()
    wreck(tmp_path, "absent")
    held = open_private(tmp_path / "index.lock")
    assert lock(held, fcntl.LOCK_EX)  # as a process that rebuilds it
    with waiting_for_the_index(0.0):
        again = folder_of(tmp_path)
    assert there(again, [0, 1]) == [0]
    get(again, 0)
    with pytest.raises(StoreUnavailable, match="is being opened or rebuilt"):
        put(again, 1)
    os.close(held)

    def puts():
        with contextlib.suppress(StoreUnavailable):
            return put(again, 1)

    until(puts, "the index is open")
    again.close()


def test_index_reservation_of_a_dead_writer_is_released(tmp_path):
    folder = opened(tmp_path)
    with contextlib.closing(KilledWriters(tmp_path)) as writers:
        writers.start("half")
        assert writers.ended() == signal.SIGKILL
    assert booked(folder) == 1
    assert put(folder, 0) is False
    with folder.supervisor.open() as index:
        folder.supervisor.reclaim(index)  # as every minute
    assert booked(folder) == 0
    assert list(files_below(tmp_path)) == [NamespaceFolder(tmp_path, DIGEST).description]
    assert put(folder, 0) is True
    folder.close()


# ---- killed ----


async def test_file_store_evicting_writers_killed_lose_no_finished_block(tmp_path):
    """No lie, nothing lost that was finished, the capacity kept, and every file booked, after each
    of many kills, whatever policy decides."""
    with contextlib.closing(KilledWriters(tmp_path)) as writers:
        for turn in range(75):
            pid = writers.start(f"fill {list(POLICIES)[turn % len(POLICIES)]}")
            writers.kill(pid, 0.002 * (turn % 25), since=SINCE[turn // len(POLICIES) % 3])
            assert du_bytes(tmp_path) <= CAPACITY_BYTES
            await audit(tmp_path)
        assert len(killed_writers.promised(tmp_path)) > 10  # or nothing was shown


async def audit(root):
    store = killed_writers.opened(root)  # without a capacity: it evicts nothing
    listed = {block.key async for block in store.list_blocks()}
    shards = NamespaceFolder(root, DIGEST).folder.glob("??/??/*")
    on_disk = {bytes.fromhex(path.name) for path in shards if not path.name.startswith(".")}
    assert on_disk <= listed  # a booking may outlive its file, never the other way round
    promised = killed_writers.promised(root)
    for name, block in FILLED.items():
        try:
            assert await read(store, key_of(name), killed_writers.LAYOUT) == block
        except BlockMissing:
            assert key_of(name) not in promised
    assert du_bytes(root) <= (await store.stats()).used_bytes <= CAPACITY_BYTES
    await store.close()
