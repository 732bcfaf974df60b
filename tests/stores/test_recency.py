"""Among the blocks of one request the last one goes first, whenever and in whatever order they were
stored, before a restart and after it."""

import contextlib

import pytest
from filestore import A, B, evict, until_room_is_made
from hypothesis import given
from hypothesis import strategies as st
from test_capacity import DIGEST, STORED_BYTES, get, opened, put, there

from sglang_cake.stores.base import RequestFacts
from sglang_cake.stores.eviction.tenants import TenantRules
from sglang_cake.stores.reported_accesses import MOST_ANNOUNCED, READ_SOON_S, ReportedAccesses
from sglang_cake.testing.store_contract import key_of

BY_RECENCY = ["lru", "lfu", "arc", "workload", "cake-prefix"]


def keys(prompt, blocks):
    return [key_of((prompt, at)) for at in range(blocks)]


def tell(folder, prompt, blocks):
    folder.on_access(DIGEST, keys(prompt, blocks), RequestFacts(prompt, 1000))


def store(folder, prompt, blocks):
    """As a server does: from the front."""
    for at in range(blocks):
        assert put(folder, (prompt, at))


def left(folder, prompt, blocks):
    return [at for _, at in there(folder, [(prompt, at) for at in range(blocks)])]


def evict_blocks(folder, blocks):
    assert evict(folder, blocks * STORED_BYTES) == blocks * STORED_BYTES


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("policy", BY_RECENCY)
def test_block_folder_just_stored_prompt_is_evicted_from_its_tail(tmp_path, policy, reopened):
    folder = opened(tmp_path, policy=policy)
    tell(folder, "first", 4)
    tell(folder, "second", 4)
    store(folder, "second", 4)
    store(folder, "first", 4)  # later, and yet the less recent request's
    if reopened:
        folder.close()
        folder = opened(tmp_path, policy=policy)
    with contextlib.closing(folder):
        evict_blocks(folder, 2)
        assert (left(folder, "first", 4), left(folder, "second", 4)) == ([0, 1], [0, 1, 2, 3])
        evict_blocks(folder, 4)
        assert (left(folder, "first", 4), left(folder, "second", 4)) == ([], [0, 1])


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("policy", BY_RECENCY)
def test_block_folder_reused_prompt_is_evicted_from_its_tail(tmp_path, policy, reopened):
    folder = opened(tmp_path, policy=policy)
    tell(folder, "one", 4)
    store(folder, "one", 4)
    folder.on_access(DIGEST, keys("one", 4), RequestFacts("again", 1000))
    for at in (3, 2, 1):  # what it loads; the head is computed
        get(folder, ("one", at))
    if reopened:
        folder.close()
        folder = opened(tmp_path, policy=policy)
    with contextlib.closing(folder):
        evict_blocks(folder, 1)
        assert left(folder, "one", 4) == [0, 1, 2]
        evict_blocks(folder, 2)
        assert left(folder, "one", 4) == [0]


def test_block_folder_tenant_over_its_quota_loses_prompt_tails(tmp_path):
    tenant_rules = TenantRules(quota_bytes=2 * STORED_BYTES)
    with contextlib.closing(opened(tmp_path, tenant_rules=tenant_rules)) as folder:
        tell(folder, "one", 4)
        store(folder, "one", 4)
        until_room_is_made(folder)
        assert left(folder, "one", 4) == [0, 1]


def test_block_folder_generated_blocks_are_evicted_before_the_prompt(tmp_path):
    with contextlib.closing(opened(tmp_path)) as folder:
        tell(folder, "one", 2)
        store(folder, "one", 2)
        tell(folder, "one", 4)  # when it has ended
        for at in (2, 3):
            put(folder, ("one", at))
        evict_blocks(folder, 2)
        assert left(folder, "one", 4) == [0, 1]


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([-1.0, 0.0, 0.0, 1e-5, 2.0])), max_size=20
    )
)
def test_reported_accesses_times_rise_by_request_and_from_the_tail(requests):
    reported, now_s, times = ReportedAccesses(), 1.8e9, []
    for number, (blocks, later_s) in enumerate(requests):
        now_s += later_s  # clocks are also put back
        facts = RequestFacts(str(number), 10)
        accesses = reported.report(DIGEST, keys(number, blocks), facts, now_s)
        assert [told.context.position for told in accesses] == list(range(blocks - 1, -1, -1))
        times += [told.at_s for told in accesses]
    assert times == sorted(set(times))


def test_reported_accesses_clock_set_back_an_hour_is_followed():
    reported = ReportedAccesses()
    reported.report(DIGEST, keys(0, 3), RequestFacts("before", 10), 1.8e9)
    (told,) = reported.report(DIGEST, keys(1, 1), RequestFacts("after", 10), 1.8e9 - 3600)
    assert told.at_s == 1.8e9 - 3600


def test_reported_accesses_request_from_before_the_clock_was_set_back_is_of_now():
    reported, facts = ReportedAccesses(), RequestFacts("goes on", 10)
    reported.report(DIGEST, keys(0, 3), facts, 1.8e9)
    (told,) = reported.report(DIGEST, keys(0, 4), facts, 1.8e9 - 3600)
    assert told.at_s == pytest.approx(1.8e9 - 3600, abs=1e-3)


def test_reported_accesses_block_put_after_the_clock_was_set_back_is_used_now():
    reported = ReportedAccesses()
    (first, *_) = keys(0, 3)
    (*_, told) = reported.report(DIGEST, keys(0, 3), RequestFacts("before", 10), 1.8e9)
    put = reported.access_for_put(DIGEST, first, 1.8e9 - 3600)
    assert put == told._replace(at_s=1.8e9 - 3600)


# ---- reads of announced blocks ----


def waiting(folder):
    """Accesses that are not in the index yet."""
    return [(touch.key, touch.uses) for touch in folder.supervisor.pending]


def test_block_folder_read_announced_by_a_request_is_recorded_once(tmp_path, monkeypatch):
    now_s = 2e9
    monkeypatch.setattr("time.time", lambda: now_s)
    folder = opened(tmp_path)
    put(folder, ("one", 0))
    put(folder, ("other", 0))
    folder.supervisor.close()  # nobody writes down what is waiting
    get(folder, ("one", 0))
    assert waiting(folder) == [(keys("one", 1)[0], 1)]  # nobody tells anything: it is a use
    tell(folder, "one", 1)
    told = waiting(folder)
    get(folder, ("one", 0))
    assert waiting(folder) == told
    get(folder, ("other", 0))  # of which nobody told: its time is accesses, and it is no use
    assert waiting(folder) == [*told, (keys("other", 1)[0], 0)]
    now_s += READ_SOON_S + 1
    get(folder, ("one", 0))
    assert waiting(folder)[-1] == (keys("one", 1)[0], 0)


def test_block_folder_read_announced_by_a_client_that_may_only_read_is_recorded_once(tmp_path):
    folder = opened(tmp_path)
    store(folder, "one", 2)
    folder.supervisor.close()  # nobody writes down what is waiting
    folder.on_access(DIGEST, keys("one", 2), RequestFacts("one", 1000), may_write=False)
    told = waiting(folder)
    assert told == [(key, 1) for key in reversed(keys("one", 2))]
    assert [touch.context for touch in folder.supervisor.pending] == [None, None]
    get(folder, ("one", 1))
    assert waiting(folder) == told


def test_block_folder_list_blocks_gives_the_time_of_the_last_use(tmp_path, monkeypatch):
    now_s = 2e9
    monkeypatch.setattr("time.time", lambda: now_s)
    with contextlib.closing(opened(tmp_path)) as folder:
        for prompt in ("one", "other"):
            put(folder, (prompt, 0))

        def used_s():
            with folder.supervisor.open() as index:
                folder.supervisor.flush(index)
            used = {block.key: block.used_s for block in folder.list_blocks(DIGEST)}
            return [used[keys(prompt, 1)[0]] - 2e9 for prompt in ("one", "other")]

        now_s += 100
        tell(folder, "one", 1)
        get(folder, ("one", 0))
        get(folder, ("other", 0))
        assert used_s() == [100, 100]
        now_s += 100
        get(folder, ("one", 0))
        assert used_s() == [200, 100]


def test_reported_accesses_many_expected_reads_keep_a_bounded_table():
    reported = ReportedAccesses()
    assert not reported.is_announced(DIGEST, A, 0.0)
    reported.report(DIGEST, [A], RequestFacts("first", 10), 0.0)
    assert reported.is_announced(DIGEST, A, 1.0)
    for number in range(2):
        some = [key_of((number, at)) for at in range(MOST_ANNOUNCED // 2)]
        reported.report(DIGEST, [*some, B], RequestFacts(str(number), 10), 0.0)
    assert not reported.is_announced(DIGEST, A, 1.0)
    assert reported.is_announced(DIGEST, B, 1.0)
