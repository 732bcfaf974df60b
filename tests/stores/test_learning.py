"""What a store knows after a restart, and while it still learns the order of what it holds."""

import contextlib
import random
import sqlite3
import time

import pytest
from filestore import until_room_is_made
from test_capacity import DIGEST, opened, there

from sglang_cake.stores.base import RequestFacts
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.eviction.policy import AccessContext, Usage, ident_of
from sglang_cake.stores.eviction.reuse_model import POOLED, ReuseFit
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.disk import Amount
from sglang_cake.stores.file.evictor import (
    FREE_AT_ONCE,
    LEARN_AT_ONCE,
    LEARN_MOST,
    MOST_PASSED,
    REST_S,
    Evictor,
)
from sglang_cake.stores.file.index import BlockIndex, ScannedFile, Touch
from sglang_cake.stores.reported_accesses import ConversationTracker
from sglang_cake.testing.store_contract import key_of


def book(folder, blocks, used_s):
    """Enter blocks in the index alone: no policy looks at a file before it evicts it."""
    with folder.supervisor.open() as index:
        for number in range(blocks):
            key = key_of(("booked", number))
            use = AccessContext("chat", 1, number, blocks)
            at_s = used_s + number
            usage = Usage(4096, at_s, at_s, 0, ident_of(key), use)
            assert index.commit(index.reserve(DIGEST, 0, key, usage, None)[0])


@pytest.mark.parametrize("policy", ["workload", "cake-prefix"])
def test_block_folder_with_blocks_keeps_its_fits_over_restarts(tmp_path, policy):
    kept = {("chat", 1, 0): ReuseFit(0.6, 0.01, 900), POOLED: ReuseFit(0.5, 0.02, 4000)}
    with contextlib.closing(opened(tmp_path, policy=policy)) as folder:
        book(folder, 1000, time.time() - 1500.0)  # within the window that fits look at
        with folder.supervisor.open() as index:
            index.save_fits(kept)
    for _ in range(2):
        with contextlib.closing(opened(tmp_path, policy=policy)) as folder:
            with folder.supervisor.open() as index:
                while not folder.evictor.learn(index, time.sleep):
                    pass
                folder.evictor.refresh(index)  # as a second later
                assert folder.evictor.known_blocks == 1000
                assert index.fits() == kept
            assert folder.evictor.fits == kept


def test_block_folder_refused_class_is_admitted_once_it_is_reused(tmp_path, monkeypatch):
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s)
    never = {("batch", turn, 0): ReuseFit(1e-3, 0.05, 900) for turn in (1, 2, 3, 4)}
    kept = {**never, POOLED: ReuseFit(0.1, 0.05, 4000)}
    options = {"policy": "workload", "min_benefit_ratio": 1.0, "capacity_bytes": None}
    keys = [key_of(("prompt", at)) for at in range(600)]
    folder = opened(tmp_path, **options)
    with contextlib.closing(folder), folder.supervisor.open() as index:
        index.save_fits(kept)
    with contextlib.closing(opened(tmp_path, **options)) as folder:
        evictor = folder.evictor
        assert evictor.fits == kept

        def written(number):
            """Of one more request for the same blocks, which takes none of them to the disk."""
            folder.on_access(DIGEST, keys, RequestFacts(f"r{number}", 10_000, "batch"))
            return sum(is_written(folder, key) for key in keys)

        assert written(0) == 0
        assert evictor.counts["skipped_blocks"] == len(keys)
        for number in range(1, 30):
            now_s += 20.0
            if written(number):
                break
            with folder.supervisor.open() as index:
                evictor.refresh(index)
        skipped = folder.stats().evictions.skipped_blocks
        assert number * len(keys) <= skipped < (number + 1) * len(keys)
        assert written(number) == len(keys)  # what was begun above was not finished


def is_written(folder, key):
    with folder.writing(DIGEST, key, 4096) as file:
        return file is not None


# ---- room is needed before all is learned ----

BYTES = 4096  # of a block that is in the index alone: no policy looks at a file


def index_blocks(index, blocks, stored_bytes=BYTES):
    """Enter blocks in the order of their last use, as a scan does."""
    found = (
        ScannedFile(key_of(number), stored_bytes, 1e9 + number, 1e9 + number)
        for number in range(blocks)
    )
    index.add_found(DIGEST, 0, found)


def indexed(index):
    """The numbers of the blocks that are left."""
    names = {key_of(number): number for number in range(20_000)}
    return [names[block.key] for block in index.stored(0, 20_000)]


@contextlib.contextmanager
def leading(root, blocks, policy="lru"):
    """An evictor that knows none of so many blocks, and the index; nobody learns beside it."""
    with contextlib.closing(opened(root, capacity_bytes=None, policy=policy)) as folder:
        folder.supervisor.close()
        with contextlib.closing(BlockIndex(root / "index.db")) as index:
            index_blocks(index, blocks)
            folder.evictor.restart(index, leads=True)
            yield folder.evictor, index


def stop(seconds):
    return True


@pytest.mark.parametrize("policy", ["lru", "cake-prefix"])
def test_evictor_eviction_while_learning_takes_the_oldest_blocks(tmp_path, policy):
    blocks, evicted = 10 * LEARN_AT_ONCE, 3 * LEARN_AT_ONCE + 50
    with leading(tmp_path, blocks, policy) as (evictor, index):
        assert not evictor.learn(index, stop)
        assert evictor.free(index, Amount(evicted * BYTES)) == Amount(evicted * BYTES, evicted)
        assert indexed(index) == list(range(evicted, blocks))
        assert evictor.known_blocks == 50  # it has learned no more than it had to
        while not evictor.learn(index, lambda seconds: None):
            pass
        assert evictor.known_blocks == blocks - evicted


def test_evictor_eviction_while_learning_reads_one_portion(tmp_path):
    with leading(tmp_path, 5 * LEARN_AT_ONCE) as (evictor, index):
        assert not evictor.learn(index, stop)
        assert evictor.known_blocks == LEARN_AT_ONCE
        assert evictor.free(index, Amount(2 * BYTES)) == Amount(2 * BYTES, 2)
        assert evictor.known_blocks == 2 * LEARN_AT_ONCE - 2
        assert indexed(index)[:3] == [2, 3, 4]


def test_evictor_learning_pauses_between_portions_and_stops_on_request(tmp_path):
    with leading(tmp_path, LEARN_MOST + 5) as (evictor, index):
        known = []

        def rest(seconds):
            assert seconds == REST_S
            assert evictor.lock.acquire(blocking=False)  # others get in between
            evictor.lock.release()
            known.append(evictor.known_blocks)
            return len(known) == 4

        assert not evictor.learn(index, rest)
        assert known == [LEARN_AT_ONCE * portions for portions in (1, 2, 3, 4)]
        assert evictor.learn(index, rest)
        assert evictor.known_blocks == LEARN_MOST + 5
        evictor.restart(index, leads=True)
        assert not evictor.learn(index, lambda seconds: False)
        assert evictor.known_blocks == LEARN_MOST


def test_index_sample_of_blocks_with_gaps_between_ids_is_fair(tmp_path):
    random.seed(1)
    with leading(tmp_path, 2000) as (_, index):
        for block in index.stored(0, 1000)[1:]:  # of the older half one is left
            index.drop(block)
        firsts = [index.sample(1) for _ in range(100)]
        assert sum(block.usage.used_s == 1e9 for (block,) in firsts) < 5
        ids = sorted(block.id for block in index.sample(100))
        assert len(ids) == 100 < ids[-1] - ids[0]
        assert len(index.sample(2000)) == 1001


def test_index_sample_of_an_empty_index_is_empty(tmp_path):
    with leading(tmp_path, 0) as (_, index):
        assert index.sample(100) == []


def test_evictor_without_the_lead_takes_old_blocks(tmp_path):
    random.seed(1)
    with leading(tmp_path, 2000) as (evictor, index):
        evictor.restart(index, leads=False)
        for _ in range(20):
            assert evictor.free(index, Amount(BYTES)).files == 1
        assert len([number for number in indexed(index) if number < 200]) <= 182


def test_evictor_without_the_lead_that_needs_more_than_a_sample_spares_the_newest_blocks(tmp_path):
    random.seed(2)
    with leading(tmp_path, 20_000) as (evictor, index):
        evictor.restart(index, leads=False)
        assert evictor.free(index, Amount(4 * LEARN_AT_ONCE * BYTES)).files == 4 * LEARN_AT_ONCE
        assert len([number for number in indexed(index) if number >= 19_900]) > 80


def test_evictor_without_the_lead_that_needs_more_than_a_sample_spares_old_blocks_in_use(tmp_path):
    random.seed(2)
    with leading(tmp_path, 5_000) as (evictor, index):
        index.touch([Touch(DIGEST, key_of(number), time.time(), 1) for number in range(300)])
        evictor.restart(index, leads=False)
        assert evictor.free(index, Amount(4 * LEARN_AT_ONCE * BYTES)).files == 4 * LEARN_AT_ONCE
        assert len([number for number in indexed(index) if number < 300]) > 200


@pytest.mark.parametrize("leads", [True, False])
def test_evictor_without_the_lead_reads_the_newest_blocks_only(tmp_path, leads):
    with leading(tmp_path, 20) as (_, index):
        with contextlib.closing(sqlite3.connect(tmp_path / "index.db")) as db, db:
            gap = 2 * ConversationTracker.max_blocks
            db.execute("UPDATE sqlite_sequence SET seq = ?", (gap + 10,))
        _, usage = put_now(index, "new")
        read = []
        settings = FolderSettings(tmp_path, policy="lru")
        evictor = Evictor(settings, lambda ident, context: read.append(ident))
        evictor.restart(index, leads=leads)
        assert evictor.learn(index, stop)
        idents = [ident_of(key_of(number)) for number in range(20)] + [usage.ident]
        assert read == (idents if leads else idents[12:])


def without_the_oldest(index, blocks):
    """Another process deletes them."""
    for block in index.stored(0, blocks):
        index.drop(block)


@pytest.mark.parametrize("by_others", ["deleted", "used"])
def test_evictor_passes_blocks_that_others_deleted_or_used_in_steps(tmp_path, by_others):
    blocks = MOST_PASSED + 50
    with leading(tmp_path, 2 * blocks) as (evictor, index):
        assert evictor.learn(index, lambda seconds: None)
        if by_others == "deleted":
            without_the_oldest(index, blocks)
        else:
            index.touch([Touch(DIGEST, key_of(number), 2e9, 1) for number in range(blocks)])
        assert evictor.free(index, Amount(BYTES)) == Amount(passed=MOST_PASSED)
        assert evictor.free(index, Amount(BYTES)) == Amount(BYTES, 1, 50)
        assert blocks not in indexed(index)


def test_evictor_most_of_whose_blocks_others_deleted_forgets_them(tmp_path):
    with leading(tmp_path, 1000) as (evictor, index):
        assert evictor.learn(index, lambda seconds: None)
        without_the_oldest(index, 700)
        assert evictor.learn(index, lambda seconds: None)
        assert evictor.known_blocks == 300


# ---- a clock that was ahead ----

AHEAD_S = 3 * 86_400.0


def put_now(index, number):
    """Enter a block that is used now; returns its row."""
    key, at_s = key_of(number), time.time()
    usage = Usage(BYTES, at_s, at_s, 0, ident_of(key))
    return index.commit(index.reserve(DIGEST, 0, key, usage, None)[0]), usage


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("policy", ["lru", "fifo", "cake-prefix"])
def test_evictor_blocks_with_times_in_the_future_are_evicted_before_new_ones(
    tmp_path, monkeypatch, policy, leads
):
    with leading(tmp_path, 20, policy) as (evictor, index):
        monkeypatch.setattr("time.time", lambda: 1e9 - AHEAD_S)  # that of a block is 1e9 or later
        put_now(index, "new")
        evictor.restart(index, leads=leads)
        assert evictor.free(index, Amount(20 * BYTES)).files == 20
        (left,) = index.stored(0, 100)
        assert left.key == key_of("new")


def test_evictor_blocks_used_within_a_minute_ahead_keep_their_times(tmp_path, monkeypatch):
    """Reported accesses may be so far ahead, and their times are the order of the blocks."""
    with leading(tmp_path, 20) as (evictor, index):
        monkeypatch.setattr("time.time", lambda: 1e9 - 30.0)
        assert evictor.learn(index, stop)
        used_s = [block.usage.used_s for block in index.stored(0, 100)]
        assert used_s == [1e9 + number for number in range(20)]


@pytest.mark.parametrize("policy", ["lru", "cake-prefix"])
def test_evictor_clock_set_back_while_running_evicts_blocks_used_before(
    tmp_path, monkeypatch, policy
):
    now_s = 1e9 + 1000.0
    monkeypatch.setattr("time.time", lambda: now_s)
    with leading(tmp_path, 20, policy) as (evictor, index):
        assert evictor.learn(index, stop)
        now_s -= AHEAD_S
        evictor.stored(*put_now(index, "new"))
        assert evictor.learn(index, stop)
        assert evictor.known_blocks == 21
        now_s += 1.0
        (touched,) = index.touch([Touch(DIGEST, key_of(0), now_s, 1)])
        evictor.touched([touched])  # it counts again
        assert evictor.free(index, Amount(19 * BYTES)).files == 19
        assert {block.key for block in index.stored(0, 100)} == {key_of(0), key_of("new")}


# ---- an index that fails ----


@pytest.mark.parametrize("name", ["find", "drop"])
@pytest.mark.parametrize("policy", POLICIES)
def test_evictor_block_whose_row_stays_is_evicted_by_a_later_call(
    tmp_path, monkeypatch, policy, name
):
    def fail(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with leading(tmp_path, 20, policy) as (evictor, index):
        assert evictor.learn(index, stop)
        with monkeypatch.context() as patch:
            patch.setattr(index, name, fail)
            for _ in range(3):
                with pytest.raises(sqlite3.OperationalError):
                    evictor.free(index, Amount(BYTES))
        assert evictor.known_blocks == 20
        assert evictor.free(index, Amount(20 * BYTES)).files == 20
        assert evictor.known_blocks == 0


def test_evictor_advance_eviction_frees_its_lock_between_portions(tmp_path, monkeypatch):
    real, portions = Evictor.free, []

    def make(evictor, index, wanted):
        assert evictor.lock.acquire(timeout=30)  # nobody holds it from one portion to the next
        evictor.lock.release()
        freed = real(evictor, index, wanted)
        portions.append(freed.bytes)
        return freed

    blocks, stored_bytes = 100, FREE_AT_ONCE.bytes // 4
    with (
        contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder,
        folder.supervisor.open() as index,
    ):
        index_blocks(index, blocks, stored_bytes)
    # Only between two portions can it be seen that the lock is free.
    monkeypatch.setattr(Evictor, "free", make)
    with contextlib.closing(opened(tmp_path, capacity_bytes=blocks * stored_bytes // 2)) as folder:
        until_room_is_made(folder)
        left = there(folder, range(blocks))
    assert left == list(range(blocks - len(left), blocks))
    assert max(portions) == FREE_AT_ONCE.bytes
    assert 4 * len(portions) >= blocks - len(left) > blocks // 2


# ---- blocks that other processes write ----


def test_evictor_block_that_another_process_wrote_slowly_is_evicted_in_its_turn(tmp_path):
    with leading(tmp_path, 0) as (evictor, index):
        key = key_of("slow")
        usage = Usage(BYTES, 1e9 - 1, 1e9 - 1, 0, ident_of(key))
        slow = index.reserve(DIGEST, 0, key, usage, None)[0]
        index_blocks(index, 3)
        assert evictor.learn(index, stop)
        assert index.commit(slow)
        assert evictor.learn(index, stop)
        assert evictor.known_blocks == 4
        assert evictor.free(index, Amount(BYTES)).files == 1
        assert indexed(index) == [0, 1, 2]
