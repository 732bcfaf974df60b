"""What a store knows after a restart, and while it still learns the order of what it holds."""

import contextlib
import time

import pytest
from test_capacity import DIGEST, opened

from sglang_cake.store.eviction import Fit, Usage, Use, ident_of
from sglang_cake.store.eviction.admission import Admission
from sglang_cake.store.eviction.reuse import POOLED
from sglang_cake.store.request import RequestFacts
from sglang_cake.testing.store_contract import key_of


def book(folder, blocks, used_s):
    """Enter blocks in the books alone: no policy looks at a file before it evicts it."""
    with folder._books.open() as index:
        for number in range(blocks):
            key = key_of(("booked", number))
            use = Use("chat", 1, number, blocks)
            at_s = used_s + number
            usage = Usage(4096, at_s, at_s, 0, ident_of(key), use)
            assert index.settle(index.reserve(DIGEST, key, usage, None).id, 4096)


@pytest.mark.parametrize("policy", ["workload", "cake-prefix"])
def test_fits_outlive_a_restart_of_a_store_that_holds_blocks(tmp_path, policy):
    kept = {("chat", 1, 0): Fit(0.6, 0.01, 900), POOLED: Fit(0.5, 0.02, 4000)}
    with contextlib.closing(opened(tmp_path, policy=policy)) as folder:
        book(folder, 1000, time.time() - 1500.0)  # within the window that fits look at
        with folder._books.open() as index:
            index.keep_fits(kept)
    for _ in range(2):
        with contextlib.closing(opened(tmp_path, policy=policy)) as folder:
            with folder._books.open() as index:
                folder._room.learn(index)
                folder._room.refresh(index)  # as a second later
                assert len(folder._room._policy) == 1000
                assert index.fits() == kept
            assert folder._room._policy.fits() == kept


def test_a_class_that_was_refused_is_written_once_it_comes_back(tmp_path, monkeypatch):
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s)
    never = {("batch", turn, 0): Fit(1e-3, 0.05, 900) for turn in (1, 2, 3, 4)}
    kept = {**never, POOLED: Fit(0.1, 0.05, 4000)}
    options = {"policy": "workload", "admission": Admission(1.0), "capacity_bytes": None}
    keys = [key_of(("prompt", at)) for at in range(600)]
    with contextlib.closing(opened(tmp_path, **options)) as folder:
        room = folder._room
        room._policy.learned(kept, now_s)

        def written(number):
            """Of one more request for the same blocks, which takes none of them to the disk."""
            folder.touched(DIGEST, keys, RequestFacts(f"r{number}", 10_000, "batch"))
            return sum(is_written(folder, key) for key in keys)

        assert written(0) == 0
        assert room.counts["skipped_blocks"] == len(keys)
        for number in range(1, 30):
            now_s += 20.0
            if written(number):
                break
            with folder._books.open() as index:
                room.refresh(index)
        assert folder.stats().evictions.skipped_blocks == number * len(keys)
        assert written(number) == len(keys)  # what was begun above was not finished


def is_written(folder, key):
    with folder.writing(DIGEST, key, 4096) as file:
        return file is not None
