"""Several processes on one folder: reservations, dead writers, and eviction."""

import contextlib
import copy
import fcntl
import functools
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from filestore import until_room_is_made
from polling import until
from system_calls import Disk
from test_capacity import (
    CAPACITY_BYTES,
    DIGEST,
    STORED_BYTES,
    du_bytes,
    files_below,
    get,
    opened,
    put,
    there,
)

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.eviction.policy import Usage
from sglang_cake.stores.file import disk as disk_module
from sglang_cake.stores.file.disk import FILES_PER_BLOCK, FRESH_S, LATE_S, Amount, FreeSpace
from sglang_cake.stores.file.evictor import ahead_bytes
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.file.index import MAX_PUT_ASIDE
from sglang_cake.stores.file.nofollow import lock, open_private
from sglang_cake.stores.file.scan import STALE_S
from sglang_cake.testing.store_contract import key_of

NOW = threading.Event()  # never set: nothing is given up


def exchange_index(root):
    """As a process does that has found damage; others have not heard of it yet."""
    for path in root.glob("index.db*"):
        path.unlink()
    with contextlib.closing(opened(root)) as other:
        return other.stats()


# ---- the index is exchanged under a writer ----


def test_file_index_lost_with_a_reservation_leaves_no_file_behind(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:

        def put_mine():
            with begun(folder, "mine") as file:
                exchange_index(tmp_path)
                file.commit(NOW)

        with pytest.raises(StoreUnavailable):
            put_mine()
        until(lambda: is_open(folder), "the index is made anew")
        assert put(folder, "later")
        blocks = [path for path in files_below(tmp_path) if path.name != "namespace.json"]
        assert [path.name for path in blocks] == [key_of("later").hex()]
        assert folder.stats().blocks == 1


@contextlib.contextmanager
def begun(folder, name):
    with folder.writing(DIGEST, key_of(name), STORED_BYTES) as file:
        file.append([memoryview(b"x" * STORED_BYTES)], NOW)
        yield file


def is_open(folder):
    return folder.stats().blocks is not None


@pytest.mark.parametrize("ends", ["committed", "given up"])
def test_file_index_reservation_of_a_lost_index_changes_no_other(tmp_path, ends):
    """Its number may be another block's by now."""
    with contextlib.closing(opened(tmp_path)) as folder:
        with folder.supervisor.open() as index:
            for name in ("earlier", "mine"):  # a stored block has its second number
                reservation = index.reserve(DIGEST, 0, key_of(name), usage(), None)[0]
        for path in tmp_path.glob("index.db*"):
            path.unlink()
        with contextlib.closing(opened(tmp_path)) as other:
            put(other, "theirs")
            with other.supervisor.open() as anew:
                (theirs,) = anew.stored(0, 10)
                assert theirs.id == reservation.id
                if ends == "committed":
                    assert anew.commit(reservation) is None
                else:
                    anew.drop(reservation)
                assert anew.stored(0, 10) == [theirs]


def test_index_damage_that_several_instances_find_is_set_aside_once(tmp_path, caplog):
    """As ranks that make the same lookup at the same moment."""
    with contextlib.ExitStack() as ends:
        folders = [
            ends.enter_context(contextlib.closing(opened(tmp_path)))
            for _ in range(MAX_PUT_ASIDE + 1)
        ]
        put(folders[0], "a")
        held = open_private(tmp_path / "index.lock")
        assert lock(held, fcntl.LOCK_EX)  # so that none rebuilds it before all have found it
        with contextlib.closing(sqlite3.connect(tmp_path / "index.db")) as index, index:
            index.execute("UPDATE blocks SET uses = 'often'")
        for folder in folders:
            with pytest.raises(StoreUnavailable, match="makes no sense"):
                list(folder.list_blocks(DIGEST))
        os.close(held)
        for number, folder in enumerate(folders):
            until(functools.partial(is_open, folder), "the index is open")
            assert put(folder, number)
            assert there(folder, ["a", number]) == ["a", number]
    assert [path.name for path in tmp_path.glob("*damaged*")] == ["index.db.damaged-1"]
    assert caplog.text.count("beginning anew") == 1


def usage():
    return Usage(STORED_BYTES, time.time(), time.time(), 0, 1)


def test_index_settle_with_an_outdated_id_finds_the_block(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        put(folder, "mine")
        with folder.supervisor.open() as index:
            (booked,) = index.stored(0, 10)
            moved = booked._replace(id=booked.id + 7)
            assert index.commit(moved) == booked.id


# ---- a process that opens the folder twice, as for slices of heads ----

READS_AND_ENDS = """
import sqlite3, sys
index = sqlite3.connect(sys.argv[1])
print(*index.execute("SELECT count(*) FROM blocks WHERE state = 1").fetchone())
index.close()
"""


def blocks_seen_by_another_process(root):
    program = [sys.executable, "-c", READS_AND_ENDS, str(root / "index.db")]
    return int(subprocess.run(program, capture_output=True, check=True, timeout=60).stdout)


@pytest.mark.parametrize("again", ["opened", "opened and closed", "checked"])
def test_file_store_opened_again_still_shares_its_index_with_other_processes(tmp_path, again):
    """A process that ends the last use of an index removes its log: not while it is in use."""
    source = FileSource(tmp_path, min_free_bytes=0)
    with contextlib.ExitStack() as held:
        folder = held.enter_context(contextlib.closing(opened(tmp_path)))
        assert put(folder, "before")
        if again == "checked":
            source.check()
        else:
            other = held.enter_context(contextlib.closing(source.folder()))
            assert other.stats().blocks == 1
            if again == "opened and closed":
                other.close()
        assert blocks_seen_by_another_process(tmp_path) == 1
        assert put(folder, "after")
        assert blocks_seen_by_another_process(tmp_path) == 2


# ---- a writer that takes long ----


def begun_long_ago(root):
    with contextlib.closing(sqlite3.connect(root / "index.db")) as index, index:
        index.execute("UPDATE blocks SET created_s = created_s - ?", (2 * STALE_S,))


def test_index_supervisor_slow_live_writer_keeps_its_reservation(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        with begun(folder, "slow") as file:
            begun_long_ago(tmp_path)
            with folder.supervisor.open() as index:
                folder.supervisor.reclaim(index)
                assert index.totals()[0] == 1
            file.commit(NOW)
        assert there(folder, ["slow"]) == ["slow"]


def test_index_supervisor_writer_silent_for_an_hour_fails(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:

        def put_slowly():
            with begun(folder, "slow") as file:
                begun_long_ago(tmp_path)
                (written,) = tmp_path.rglob(".tmp-*")
                os.utime(written, (1e9, 1e9))
                with folder.supervisor.open() as index:
                    folder.supervisor.reclaim(index)
                file.commit(NOW)

        with pytest.raises(StoreUnavailable):
            put_slowly()
        assert folder.stats().blocks == 0


# ---- one process keeps the order ----


def test_evictor_lead_passes_to_another_instance_after_close(tmp_path):
    one, two = opened(tmp_path, capacity_bytes=None), opened(tmp_path, capacity_bytes=None)
    for name in range(20):
        put(two, name)
    with one.supervisor.open() as index:
        until(
            lambda: one.evictor.learn(index, time.sleep) and one.evictor.known_blocks == 20,
            "one process knows all blocks",
        )
    assert two.evictor.known_blocks == 0
    one.close()
    until(lambda: two.evictor.known_blocks == 20, "so does the other")
    two.close()


@pytest.mark.parametrize("policy", ["lru", "cake-prefix"])
def test_evictor_without_the_lead_still_keeps_the_capacity(tmp_path, policy):
    lead = os.open(tmp_path / "index.evict", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lead, fcntl.LOCK_EX)  # as a process that hangs
    with contextlib.closing(opened(tmp_path, policy=policy)) as folder:
        for name in range(150):
            assert put(folder, name)
            assert du_bytes(tmp_path) <= CAPACITY_BYTES
        left = there(folder, range(150))
        if policy == "lru":  # it looks at all blocks, as long as there are few
            assert left == list(range(150 - len(left), 150))
        get(folder, left[0])
        assert folder.evictor.known_blocks == 0
    os.close(lead)


# ---- free space ----


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_block_folder_low_free_space_evicts_without_a_put(tmp_path, disk):
    options = {"capacity_bytes": None, "min_free_bytes": 1000, "clock": disk.clock}
    with contextlib.closing(opened(tmp_path, **options)) as folder:
        for name in range(10):
            put(folder, name)
        disk.f_bavail = 1000 - 3 * STORED_BYTES + 1  # others fill the disk
        disk.now_s = FRESH_S
        until(lambda: folder.stats().blocks == 7, "7 blocks are left")
        until_room_is_made(folder)
        assert there(folder, range(10)) == list(range(3, 10))


class NoPageForReads(sqlite3.Connection):
    """A full disk, with no page for the accesses of reads."""

    def execute(self, sql, *values):
        if sql.startswith("UPDATE blocks SET used_s"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(sql, *values)


def test_block_folder_full_disk_evicts_while_blocks_are_read(tmp_path, disk, monkeypatch):
    connect = functools.partial(sqlite3.connect, factory=NoPageForReads)
    monkeypatch.setattr(sqlite3, "connect", connect)
    with contextlib.closing(opened(tmp_path, capacity_bytes=None, min_free_bytes=1000)) as folder:
        for name in range(10):
            put(folder, name)
        disk.f_bavail = 1000 - 3 * STORED_BYTES + 1

        def has_evicted():
            get(folder, 9)
            return folder.stats().blocks < 10

        until(has_evicted, "blocks are evicted")


def test_evictor_of_four_instances_exactly_one_leads(tmp_path, disk):
    options = {"capacity_bytes": None, "min_free_bytes": 1000, "clock": disk.clock}
    with contextlib.ExitStack() as held:
        folders = [
            held.enter_context(contextlib.closing(opened(tmp_path, **options))) for _ in range(4)
        ]
        for name in range(10):
            put(folders[0], name)
        disk.f_bavail = 1000 - 2 * STORED_BYTES + 1
        disk.now_s = FRESH_S
        until(lambda: folders[0].stats().blocks == 8, "8 blocks are left")
        until_room_is_made(folders[0])
        assert [folder.evictions().evicted_blocks for folder in folders] == [2, 0, 0, 0]
        assert [folder.evictor.leads for folder in folders] == [True, False, False, False]


def test_evictor_of_a_tool_leaves_the_lead_to_a_server(tmp_path):
    with contextlib.closing(FileSource(tmp_path, reads_count=False).folder()) as tool:
        tool.stats()  # waits for the index
        with contextlib.closing(FileSource(tmp_path).folder()) as server:
            server.stats()
            assert [folder.evictor.leads for folder in (tool, server)] == [False, True]


def test_free_space_inodes_are_limited_like_bytes(tmp_path, disk):
    space = FreeSpace(tmp_path, disk.f_blocks // 100, clock=disk.clock)
    disk.f_favail = disk.f_files // 100 + 4
    assert space.take(1000) == Amount()
    assert space.take(1000) == Amount(0, 2)
    space.freed(Amount(0, 2))
    assert space.take(1000) == Amount()
    disk.now_s, disk.f_favail = 10.0, 0
    assert space.missing() == Amount(0, disk.f_files // 100)
    disk.f_files = 0  # as btrfs, which has no fixed number
    disk.now_s = 20.0
    assert space.missing() == Amount()


def test_free_space_that_another_process_has_taken_within_a_second_is_missing(
    tmp_path, disk, monkeypatch
):
    monkeypatch.setattr(disk_module, "file_system_type", lambda folder: EXT4)
    disk.f_bavail = 1000 + 100
    one, other = (FreeSpace(tmp_path, 1000, clock=disk.clock) for _ in range(2))
    assert [space.missing() for space in (one, other)] == [Amount(), Amount()]
    assert not one.take(80)
    disk.f_bavail -= 80
    assert other.take(80) == Amount(60)
    other.freed(Amount(60))  # and a third process takes 50 of them
    disk.f_bavail += 10
    assert other.take(80) == Amount(50)
    other.freed(Amount(50))
    disk.f_bavail += 50
    assert not other.take(80)


def test_free_space_of_a_file_system_without_a_size_is_unlimited(tmp_path, disk):
    disk.lose_its_size()
    space = FreeSpace(tmp_path, 1000, clock=disk.clock)
    assert space.missing() == Amount()
    disk.now_s, disk.f_favail = FRESH_S, FILES_PER_BLOCK
    assert space.take(1000) == Amount()
    assert space.take(1000) == Amount(0, FILES_PER_BLOCK)


@pytest.mark.parametrize(
    ("options", "limit_bytes"),
    [
        ({"min_free_bytes": 10**11, "capacity_bytes": None}, None),
        ({"min_free_bytes": 2 * 10**12, "capacity_bytes": None}, None),
        ({"min_free_bytes": 10**11, "capacity_bytes": 10**9}, 10**9 - ahead_bytes(10**9)),
        ({"min_free_bytes": 10**11, "capacity_bytes": 10**13}, None),
    ],
)
def test_block_folder_unused_bytes_are_those_before_the_capacity_or_the_disk_is_full(
    tmp_path, disk, options, limit_bytes
):
    with contextlib.closing(opened(tmp_path, clock=disk.clock, **options)) as folder:
        stats = folder.stats()
        expected_bytes = max(0, 10**12 - options["min_free_bytes"])
        if limit_bytes is not None:
            expected_bytes = limit_bytes - stats.used_bytes
        assert stats.unused_bytes == expected_bytes


def test_block_folder_unused_bytes_follow_other_processes_and_inodes(tmp_path, disk):
    with contextlib.closing(opened(tmp_path, clock=disk.clock, capacity_bytes=None)) as folder:
        assert folder.stats().unused_bytes == 10**12
        disk.f_bavail = 10**6  # another process has written, less than FRESH_S ago
        assert folder.stats().unused_bytes == 10**6
        disk.f_favail, disk.now_s = FILES_PER_BLOCK - 1, FRESH_S
        assert folder.stats().unused_bytes == 0


class LateDisk(Disk):
    """Tells of freed space `late_s` after the test added it to `freed`.

    Attributes:
        freed: times and bytes.
    """

    def __init__(self, monkeypatch, kind, late_s):
        super().__init__(monkeypatch)
        monkeypatch.setattr(disk_module, "file_system_type", lambda folder: kind)
        self.freed, self.late_s = [], late_s
        self.f_bavail = 0

    def _ask(self, folder):
        answer = copy.copy(super()._ask(folder))
        told = (freed for at_s, freed in self.freed if self.now_s >= at_s + self.late_s)
        answer.f_bavail = self.f_bavail + sum(told)
        return answer


def evict_what_is_missing(space, disk):
    missing = space.missing()
    if missing:
        disk.freed.append((disk.now_s, missing.bytes))
        space.freed(missing)
    return missing.bytes


BTRFS, ZFS, EXT4, NFS = 0x9123683E, 0x2FC12FC1, 0xEF53, 0x6969


@pytest.mark.parametrize("kind", [BTRFS, NFS])
def test_free_space_of_a_disk_that_reports_late_counts_what_is_freed(tmp_path, monkeypatch, kind):
    disk = LateDisk(monkeypatch, kind, late_s=10)
    space = FreeSpace(tmp_path, 1000, clock=disk.clock)
    assert evict_what_is_missing(space, disk) == 1000
    assert space.take(300).bytes == 300
    space.freed(Amount(300))
    assert not space.take(300)


@pytest.mark.parametrize("kind", [BTRFS, ZFS])
def test_free_space_of_a_disk_that_frees_late_misses_it_once(tmp_path, monkeypatch, kind):
    disk = LateDisk(monkeypatch, kind, late_s=10)
    space = FreeSpace(tmp_path, 1000, clock=disk.clock)
    missed = []
    for disk.now_s in range(60):
        missed.append(evict_what_is_missing(space, disk))
        if disk.now_s == 5:  # others write, before the first bytes are free
            disk.f_bavail -= 70
    assert missed == [1000, *[0] * 5, 70, *[0] * 53]


def test_free_space_of_a_disk_that_frees_late_has_less_after_a_put(tmp_path, monkeypatch):
    disk = LateDisk(monkeypatch, BTRFS, late_s=10)
    space = FreeSpace(tmp_path, 1000, clock=disk.clock)
    disk.f_bavail = 500
    assert evict_what_is_missing(space, disk) == 500
    for disk.now_s in range(40):
        assert space.take(300).bytes == 300
        disk.freed.append((disk.now_s, 300))
        space.freed(Amount(300))
        assert space.take(300) == Amount()
        disk.f_bavail -= 300
        assert space.missing() == Amount()


def test_free_space_of_a_disk_that_frees_late_beside_other_writers_lacks_what_they_write_in_30_s(
    tmp_path, monkeypatch
):
    written_bytes = 20  # by others, in each second
    disk = LateDisk(monkeypatch, ZFS, late_s=0)
    disk.f_bavail = 1000
    space = FreeSpace(tmp_path, 1000, clock=disk.clock)
    unreported_bytes = 0
    lacking = []
    for disk.now_s in range(1, 3600):
        disk.f_bavail -= written_bytes
        if disk.now_s % 5 == 0:  # the file system commits
            disk.f_bavail += unreported_bytes
            unreported_bytes = 0
        missing = space.missing()
        if missing:
            space.freed(missing)
            unreported_bytes += missing.bytes
        lacking.append(1000 - disk.f_bavail - unreported_bytes)
    assert max(lacking) <= (LATE_S + 5) * written_bytes


def test_free_space_of_a_disk_that_frees_late_counts_no_byte_twice(tmp_path, monkeypatch):
    disk = LateDisk(monkeypatch, BTRFS, late_s=10)
    space = FreeSpace(tmp_path, 1000, clock=disk.clock)
    assert evict_what_is_missing(space, disk) == 1000
    disk.now_s = 10
    assert space.missing() == Amount()
    disk.now_s, disk.f_bavail = 11, -400  # others write, after the bytes are free
    assert space.missing().bytes == 400


def test_free_space_of_removed_files_that_the_disk_never_tells_of_is_missing_again(
    tmp_path, monkeypatch
):
    disk = LateDisk(monkeypatch, BTRFS, late_s=math.inf)
    space = FreeSpace(tmp_path, 1000, clock=disk.clock)
    missed = []
    for disk.now_s in range(int(LATE_S) + 3):
        missed.append(evict_what_is_missing(space, disk))
    assert missed == [1000, *[0] * int(LATE_S), 1000, 0]


def test_free_space_of_a_disk_that_frees_at_once_is_what_it_tells(tmp_path, monkeypatch):
    disk = LateDisk(monkeypatch, EXT4, late_s=0)
    space = FreeSpace(tmp_path, 1000, clock=disk.clock)
    assert evict_what_is_missing(space, disk) == 1000
    disk.now_s, disk.f_bavail = 1, -400  # others write within the second
    assert evict_what_is_missing(space, disk) == 400


def test_block_folder_low_free_inodes_evict_blocks(tmp_path, disk):
    options = {"min_free_bytes": disk.f_blocks // 100, "clock": disk.clock}
    with contextlib.closing(opened(tmp_path, capacity_bytes=None, **options)) as folder:
        for name in range(10):
            put(folder, name)
        disk.f_favail = disk.f_files // 100 - 3
        disk.now_s = FRESH_S
        until(lambda: folder.stats().blocks == 7, "7 blocks are left")
