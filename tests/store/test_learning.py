"""What a store knows after a restart, and while it still learns the order of what it holds."""

import contextlib
import time

import pytest
from test_capacity import DIGEST, opened

from sglang_cake.store.eviction import Fit, Usage, Use, ident_of
from sglang_cake.store.eviction.reuse import POOLED
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
