"""When a block of a prompt is due: only while one is asked of the link."""

import time

import pytest
from kv_pools import record_of

from sglang_cake.integration.request.prompt_record import LoadUpdate, PromptRecord


def waiting() -> PromptRecord:
    """No block came for long; blocks 0 to 3 are wanted."""
    record = record_of(4, block=16)
    record.meet.found([True] * 4)
    record.agreed.lookup_done = True
    record.local.served_since_s = time.monotonic() - 1000.0
    record.agreed.elapsed_s = record.local_elapsed_s()
    return record


def test_restore_loads_wanted_again_restart_the_clock() -> None:
    record = waiting()
    record.agreed.load_from = 4  # what lies right of the meeting point has landed
    record.set_load_from(2)
    assert record.progress.since_s == 0.0
    assert record.local_elapsed_s() < 500.0
    assert record.agreed.load_from == 2


def test_restore_first_wanted_loads_start_the_clock() -> None:
    record = waiting()
    record.agreed.load_from = None
    assert not record.loading
    assert record.device_work.tokens == 64
    record.set_load_from(0)
    assert record.loading
    assert record.device_work.tokens == 0
    assert record.progress.since_s == 0.0
    assert record.local_elapsed_s() < 500.0


def test_restore_pending_read_keeps_the_clock() -> None:
    record = waiting()
    record.agreed.load_from = 3
    record.set_load_from(2)
    assert record.progress.since_s >= 1000.0
    assert record.local_elapsed_s() >= 1000.0


def test_prompt_record_clock_runs_only_while_the_link_serves_the_prompt_first() -> None:
    record = waiting()
    record.served_first(False)
    assert record.progress.since_s == 0.0
    with pytest.MonkeyPatch.context() as patch:
        later_s = time.monotonic() + 1000.0  # a long step
        patch.setattr("time.monotonic", lambda: later_s)
        assert record.local_elapsed_s() == 0.0  # what the next update says
        record.served_first(True)
        patch.setattr("time.monotonic", lambda: later_s + 1.0)
        assert record.local_elapsed_s() == 1.0
    record.agreed.lookup_done = False
    record.agreed.elapsed_s = 1000.0
    record.served_first(False)  # a lookup is for nobody else
    assert record.agreed.elapsed_s == 1000.0


def test_restore_link_whose_blocks_wait_for_the_poll_is_not_idle() -> None:
    """Between two steps a fast link fills all buffers, which are free after the poll."""
    record = waiting()
    for fetched in ((3,), ()):
        record.agreed.apply(LoadUpdate(None, fetched, (), 0.0, link_idle=True), 1.0)
        assert record.agreed.link_idle == (not fetched)
