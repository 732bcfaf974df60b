"""What the link owes a prompt: only while something is asked of it."""

import time

from kv_pools import restore_of

from sglang_cake.integration.request.restore import Restore


def waiting() -> Restore:
    """The link was last heard long ago; blocks 0 to 3 are to come."""
    restore = restore_of(4, block=16)
    restore.meet.found([True] * 4)
    restore.known = True
    restore.served_since_s = time.monotonic() - 1000.0
    restore.elapsed_s = restore.local_elapsed_s()
    return restore


def test_time_in_which_nothing_was_asked_of_the_link_is_not_owed() -> None:
    restore = waiting()
    restore.keep = 4  # what lies right of the meeting point has landed
    restore.keep_from(2)
    assert restore.progress.since_s == 0.0
    assert restore.local_elapsed_s() < 500.0
    assert restore.keep == 2


def test_what_is_not_loaded_is_owed_from_when_it_is() -> None:
    restore = waiting()
    restore.keep = None
    assert not restore.racing
    assert restore.to_compute.tokens == 64
    restore.keep_from(0)
    assert restore.racing
    assert restore.to_compute.tokens == 0
    assert restore.progress.since_s == 0.0
    assert restore.local_elapsed_s() < 500.0


def test_a_block_that_is_being_read_stays_owed() -> None:
    restore = waiting()
    restore.keep = 3
    restore.keep_from(2)
    assert restore.progress.since_s >= 1000.0
    assert restore.local_elapsed_s() >= 1000.0


def test_who_is_second_on_the_link_is_owed_nothing() -> None:
    restore = waiting()
    restore.not_served()
    assert restore.progress.since_s == 0.0
    restore.known, restore.elapsed_s = False, 1000.0
    restore.not_served()  # a lookup is for nobody else
    assert restore.elapsed_s == 1000.0
