"""What a store knows after a restart, and while it still learns the order of what it holds."""

import contextlib
import threading
import time

import pytest
from filestore import until_room_is_made
from test_capacity import DIGEST, STORED_BYTES, opened, put, there

from sglang_cake.stores.eviction import AccessContext, ReuseFit, Usage, ident_of
from sglang_cake.stores.eviction.policy import AdmissionPolicy
from sglang_cake.stores.eviction.reuse_model import POOLED
from sglang_cake.stores.file import evictor as evictor_module
from sglang_cake.stores.file import index_supervisor
from sglang_cake.stores.file.disk import Amount
from sglang_cake.stores.file.index import BlockIndex
from sglang_cake.stores.request_facts import RequestFacts
from sglang_cake.testing.store_contract import key_of


def book(folder, blocks, used_s):
    """Enter blocks in the index alone: no policy looks at a file before it evicts it."""
    with folder.supervisor.open() as index:
        for number in range(blocks):
            key = key_of(("booked", number))
            use = AccessContext("chat", 1, number, blocks)
            at_s = used_s + number
            usage = Usage(4096, at_s, at_s, 0, ident_of(key), use)
            assert index.commit(index.reserve(DIGEST, 0, key, usage, None).reservation, 4096)


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
    options = {"policy": "workload", "admission": AdmissionPolicy(1.0), "capacity_bytes": None}
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


@pytest.fixture
def gate(monkeypatch):
    """Holds the background at its second portion, in the midst of reading the index."""
    go, held, real = threading.Event(), threading.Event(), BlockIndex.stored

    def stored(index, after, at_most):
        if after and threading.current_thread().name == "cake-file-index":
            held.set()
            go.wait(30)
        return real(index, after, at_most)

    monkeypatch.setattr(evictor_module, "LEARN_AT_ONCE", 5)
    monkeypatch.setattr(BlockIndex, "stored", stored)
    yield held, go
    go.set()


@pytest.mark.parametrize("policy", ["lru", "cake-prefix"])
def test_block_folder_put_while_learning_evicts_the_oldest_blocks(tmp_path, policy, gate):
    held, go = gate
    go.set()
    with contextlib.closing(opened(tmp_path, policy=policy, capacity_bytes=None)) as folder:
        for name in range(100):
            put(folder, name)
    held.clear()
    go.clear()
    options = {"policy": policy, "capacity_bytes": 16 << 20}  # less than is there
    with contextlib.closing(opened(tmp_path, **options)) as folder:
        assert held.wait(30)
        assert put(folder, "new")
        assert not go.is_set()
        # What it knew: 10 blocks for a start, and then as many more as it had to.
        left = there(folder, range(100))
        assert left == list(range(100 - len(left), 100))
        evicted = 100 - len(left)
        assert evicted * STORED_BYTES > (100 * STORED_BYTES) - (16 << 20)
        assert folder.evictor.known_blocks < len(left) // 2
        go.set()
        deadline_s = time.monotonic() + 60
        while folder.evictor.known_blocks < folder.stats().blocks:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_evictor_eviction_while_learning_reads_one_portion(tmp_path, gate):
    held, go = gate
    go.set()
    with contextlib.closing(opened(tmp_path)) as folder:
        for name in range(30):
            put(folder, name)
    held.clear()
    go.clear()
    with contextlib.closing(opened(tmp_path)) as folder:
        assert held.wait(30)
        assert folder.evictor.known_blocks == 5
        with folder.supervisor.open() as index:
            wanted = Amount(2 * STORED_BYTES)
            assert folder.evictor.free(index, wanted) == Amount(2 * STORED_BYTES, 2)
        assert folder.evictor.known_blocks == 8
        assert there(folder, range(4)) == [2, 3]
        go.set()


def test_evictor_learning_pauses_between_portions_and_stops_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(evictor_module, "LEARN_AT_ONCE", 10)
    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        book(folder, 95, 1e9)
        folder.supervisor.close()  # nobody learns beside us
        evictor, index = folder.evictor, BlockIndex(tmp_path / "index.db")
        with contextlib.closing(index):
            evictor.restart(index, leads=True)
            known = []

            def rest(seconds):
                assert seconds == evictor_module.REST_S
                assert evictor.lock.acquire(blocking=False)  # others get in between
                evictor.lock.release()
                known.append(evictor.known_blocks)
                return len(known) == 4

            assert not evictor.learn(index, rest)
            assert known == [10, 20, 30, 40]
            assert evictor.learn(index, rest)
            assert known == [10, 20, 30, 40, 50, 60, 70, 80, 90]
            assert evictor.known_blocks == 95
            monkeypatch.setattr(evictor_module, "LEARN_MOST", 30)
            evictor.restart(index, leads=True)
            assert not evictor.learn(index, lambda seconds: False)
            assert evictor.known_blocks == 30


def test_evictor_advance_eviction_frees_its_lock_between_portions(tmp_path, monkeypatch):
    real, asked = evictor_module.Evictor.free, []

    def make(evictor, index, wanted):
        assert evictor.lock.acquire(timeout=30)  # nobody holds it from one portion to the next
        evictor.lock.release()
        asked.append(wanted.bytes)
        return real(evictor, index, wanted)

    with contextlib.closing(opened(tmp_path, capacity_bytes=None)) as folder:
        for name in range(35):
            put(folder, name)
    monkeypatch.setattr(evictor_module, "AHEAD_SHARE", 0.5)
    monkeypatch.setattr(index_supervisor, "FREE_AT_ONCE", Amount(2 * STORED_BYTES, 1000))
    monkeypatch.setattr(evictor_module.Evictor, "free", make)
    with contextlib.closing(opened(tmp_path)) as folder:
        until_room_is_made(folder)
        left = there(folder, range(35))
    assert left == list(range(35 - len(left), 35))
    assert max(asked) == 2 * STORED_BYTES
    assert 2 * len(asked) >= 35 - len(left) > 10
