"""When a block of a prompt is due: only while one is asked of the link."""

import time

from kv_pools import load_of

from sglang_cake.integration.request.prompt_record import PromptRecord


def waiting() -> PromptRecord:
    """No block came for long; blocks 0 to 3 are wanted."""
    load = load_of(4, block=16)
    load.meet.found([True] * 4)
    load.agreed.lookup_done = True
    load.local.served_since_s = time.monotonic() - 1000.0
    load.agreed.elapsed_s = load.local_elapsed_s()
    return load


def test_restore_loads_wanted_again_restart_the_clock() -> None:
    load = waiting()
    load.agreed.load_from = 4  # what lies right of the meeting point has landed
    load.set_load_from(2)
    assert load.progress.since_s == 0.0
    assert load.local_elapsed_s() < 500.0
    assert load.agreed.load_from == 2


def test_restore_first_wanted_loads_start_the_clock() -> None:
    load = waiting()
    load.agreed.load_from = None
    assert not load.loading
    assert load.device_work.tokens == 64
    load.set_load_from(0)
    assert load.loading
    assert load.device_work.tokens == 0
    assert load.progress.since_s == 0.0
    assert load.local_elapsed_s() < 500.0


def test_restore_pending_read_keeps_the_clock() -> None:
    load = waiting()
    load.agreed.load_from = 3
    load.set_load_from(2)
    assert load.progress.since_s >= 1000.0
    assert load.local_elapsed_s() >= 1000.0


def test_restore_prompt_not_served_restarts_the_clock() -> None:
    load = waiting()
    load.link_serves_others_first()
    assert load.progress.since_s == 0.0
    load.agreed.lookup_done = False
    load.agreed.elapsed_s = 1000.0
    load.link_serves_others_first()  # a lookup is for nobody else
    assert load.agreed.elapsed_s == 1000.0
