"""Accesses that requests report: they reach the index, eviction and other processes, and last."""

import asyncio
import contextlib
import json
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from filestore import A, B, evict, opened, until_room_is_made
from hypothesis import given
from hypothesis import strategies as st
from polling import until
from system_calls import Held
from test_capacity import DIGEST, STORED_BYTES, get, put, there
from test_capacity import opened as opened_folder

from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.simulator.request_traces import read_trace
from sglang_cake.stores.base import RequestFacts
from sglang_cake.stores.eviction.policy import UNKNOWN_CONTEXT, AccessContext, Benefit
from sglang_cake.stores.eviction.reuse_model import POOLED
from sglang_cake.stores.eviction.tenants import TenantRules
from sglang_cake.stores.file.index import BlockIndex, ScannedFile
from sglang_cake.stores.file.index_supervisor import RECORDED_AT_ONCE, TRIES_S
from sglang_cake.stores.reported_accesses import (
    MOST_NAMESPACES,
    MOST_REQUESTS,
    Access,
    ReportedAccesses,
)
from sglang_cake.stores.request_recording import RequestTraceFile
from sglang_cake.testing.store_contract import key_of

FACTS = RequestFacts("r1", 1000, "chat", 7, Benefit(load_s=0.5))


def booked(folder, names):
    """What the index has of stored blocks, once all reported accesses are written."""
    with folder.supervisor.open() as index:
        folder.supervisor.flush(index)
        rows = {row.key: row.usage for row in index.stored(0, 1000)}
    return [rows[key_of(name)] for name in names]


def keys(*names):
    return [key_of(name) for name in names]


def test_block_folder_request_facts_reach_stored_and_later_blocks(tmp_path):
    with contextlib.closing(opened_folder(tmp_path)) as folder:
        put(folder, 0)
        folder.on_access(DIGEST, keys(0, 1), FACTS)
        put(folder, 1)
        first, second = booked(folder, (0, 1))
        assert first.context == AccessContext("chat", 1, 0, 2, 7)
        assert second.context == AccessContext("chat", 1, 1, 2, 7)
        assert (first.uses, second.uses) == (1, 0)


def test_block_folder_extended_prompt_is_turn_two_after_a_restart(tmp_path):
    with contextlib.closing(opened_folder(tmp_path)) as folder:
        folder.on_access(DIGEST, keys(0, 1), FACTS)
        put(folder, 0)
        put(folder, 1)
    with contextlib.closing(opened_folder(tmp_path)) as folder:
        with folder.supervisor.open() as index:
            assert folder.evictor.learn(index, time.sleep)
        folder.on_access(DIGEST, keys(0, 1, 2), RequestFacts("r2", 1500, "chat", 7))
        assert [usage.context.turn for usage in booked(folder, (0, 1))] == [2, 2]


@contextlib.contextmanager
def recording(folder, root):
    """What was reported is being written to the index, and waits for another process."""
    with contextlib.closing(sqlite3.connect(root / "index.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        folder.supervisor.wake()
        until(lambda: not folder.supervisor.pending, "it is being written")
        yield
        other.execute("ROLLBACK")


def test_block_folder_read_being_recorded_protects_its_block(tmp_path):
    folder = opened_folder(tmp_path, policy="lru")
    with ThreadPoolExecutor(1) as pool, contextlib.closing(folder):
        put(folder, 0)
        put(folder, 1)
        get(folder, 0)
        with recording(folder, tmp_path):
            eviction = pool.submit(evict, folder, STORED_BYTES)
            wait([eviction], 0.5)  # one that does not wait for the index has happened by then
        assert eviction.result(60) == STORED_BYTES
        assert there(folder, (0, 1)) == [0]


def test_block_folder_many_accesses_are_recorded_in_short_transactions(tmp_path, monkeypatch):
    """Puts of all processes wait for each: with all accesses in one, they failed after 10 s."""
    touch, sizes = BlockIndex.touch, []

    def counted(index, touches):
        sizes.append(len(touches))
        return touch(index, touches)

    monkeypatch.setattr(BlockIndex, "touch", counted)
    with contextlib.closing(opened_folder(tmp_path)) as folder:
        put(folder, 0)
        many = keys(*range(2 * RECORDED_AT_ONCE + 1))
        folder.on_access(DIGEST, many, FACTS)
        (first,) = booked(folder, (0,))
        assert first.uses == 1
        assert sum(sizes) >= len(many)
        assert max(sizes) <= RECORDED_AT_ONCE


def test_block_folder_learned_fits_are_restored_after_a_restart(tmp_path, monkeypatch):
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s)
    options = {"policy": "workload", "capacity_bytes": None}
    prompt = keys(*range(2000))
    folder = opened_folder(tmp_path, **options)
    with contextlib.closing(folder), folder.supervisor.open() as index:
        index.add_found(DIGEST, 0, (ScannedFile(key, 4096, now_s, now_s) for key in prompt))
        while not folder.evictor.learn(index, time.sleep):
            pass
        assert folder.evictor.fits == {}
        for number in range(3):
            now_s += 60.0
            folder.on_access(DIGEST, prompt, RequestFacts(f"r{number}", 10_000, "chat"))
            folder.supervisor.flush(index)
        folder.evictor.refresh(index)
        learned = dict(folder.evictor.fits)
    assert POOLED in learned
    with contextlib.closing(opened_folder(tmp_path, **options)) as folder:
        assert folder.evictor.fits == learned


def test_block_folder_blocks_below_admission_are_skipped_and_counted(tmp_path):
    options = {"policy": "cake", "min_benefit_ratio": 1.0}
    with contextlib.closing(opened_folder(tmp_path, **options)) as folder:
        folder.on_access(DIGEST, keys(0), FACTS)  # half a second to load, 13 ms to compute
        assert not put(folder, 0)
        assert put(folder, 1)  # of which nothing is known
        assert folder.stats().evictions.skipped_blocks == 1
        fast = RequestFacts("r2", 1000, benefit=Benefit(load_s=1e-6))
        folder.on_access(DIGEST, keys(2), fast)
        assert put(folder, 2)


def test_block_folder_admission_is_by_the_costs_of_the_server_that_reported_the_block(tmp_path):
    other = Digest(bytes(32))
    slow, fast = FACTS, RequestFacts("r2", 1000, "chat", 7, Benefit(load_s=1e-6))
    options = {"policy": "cake", "min_benefit_ratio": 1.0}
    with contextlib.closing(opened_folder(tmp_path, **options)) as folder:
        folder.on_access(DIGEST, keys(0), slow)
        folder.on_access(DIGEST, keys(1), fast)
        folder.on_access(other, keys(2), fast)
        assert not put(folder, 0)
        folder.on_access(other, keys(3), slow)
        assert put(folder, 1)
        assert folder.stats().evictions.skipped_blocks == 1


def test_block_folder_tenant_over_its_quota_is_evicted_down_to_it(tmp_path):
    tenant_rules = TenantRules(quota_bytes=5 * 300_000)
    with contextlib.closing(opened_folder(tmp_path, tenant_rules=tenant_rules)) as folder:
        for name in range(20):
            tenant = 1 if name < 4 else 2
            facts = RequestFacts(f"r{name}", 100, tenant=tenant)
            folder.on_access(DIGEST, keys(name), facts)
            put(folder, name)
        until_room_is_made(folder)
        with folder.supervisor.open() as index:
            left = [row.usage.context.tenant for row in index.stored(0, 1000)]
        assert left.count(1) == 4
        assert left.count(2) == 5


def test_block_folder_report_of_a_client_that_may_only_read_changes_no_report_of_others(tmp_path):
    with contextlib.closing(opened_folder(tmp_path)) as folder:
        folder.on_access(DIGEST, keys(0, 1), FACTS)
        folder.on_access(DIGEST, keys(0, 1), RequestFacts("r2", 9, "x", 8), may_write=False)
        folder.on_access(DIGEST, keys(0, 1, 2), RequestFacts("r3", 9, "x", 8), may_write=False)
        folder.on_access(DIGEST, keys(2), FACTS, may_write=False)
        put(folder, 0)
        folder.on_access(DIGEST, keys(0, 1, 2), RequestFacts("r3", 1500, "chat", 7))
        put(folder, 2)
        first, third = booked(folder, (0, 2))
        assert first.context == AccessContext("chat", 2, 0, 3, 7)
        assert third.context == AccessContext("chat", 2, 2, 3, 7)


@given(told=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=20))
def test_reported_accesses_of_repeated_requests_report_each_block_once(told):
    reported, longest = ReportedAccesses(), {}
    for request, length in told:
        facts = RequestFacts(f"r{request}", 10)
        accesses = reported.report(DIGEST, keys(*range(length)), facts, 5.0)
        before = longest.get(request, 0)
        assert [one.context.position for one in accesses] == list(range(length - 1, before - 1, -1))
        longest[request] = max(before, length)


def test_reported_accesses_of_a_growing_request_cost_only_its_further_keys():
    class Prompt(list):
        """Keys that may be asked for one by one, and from `first` on."""

        def __getitem__(self, at):
            assert (at.start if isinstance(at, slice) else at) >= first
            return super().__getitem__(at)

        def __iter__(self):
            raise AssertionError("all keys were looked at")

    reported, first = ReportedAccesses(), 0
    reported.report(DIGEST, Prompt(keys(0, 1, 2)), FACTS, 5.0)
    first = 3
    further = reported.report(DIGEST, Prompt(keys(0, 1, 2, 3)), FACTS, 5.0)
    assert [(one.key, one.context.position) for one in further] == [(key_of(3), 3)]


def test_reported_accesses_of_a_growing_request_count_all_blocks_for_the_next_turn():
    reported = ReportedAccesses()

    def turn(number, *names):
        return reported.report(DIGEST, keys(*names), RequestFacts(number, 10), 5.0)[0].context.turn

    for length in range(2, 7):
        assert turn("r1", *range(length)) == 1
    assert turn("leaves early", 0, 1, "other") == 1
    assert turn("goes on", *range(6), "more") == 2


def test_reported_accesses_is_announced_during_a_report_answers_at_once():
    class SlowKeys(list):
        def __len__(self):  # the report asks for it
            asked.set()
            assert go.wait(60)
            return super().__len__()

    asked, go = threading.Event(), threading.Event()
    reported = ReportedAccesses()
    reported.report(DIGEST, keys(0), FACTS, 5.0)
    with ThreadPoolExecutor(2) as pool:
        report = pool.submit(
            reported.report, DIGEST, SlowKeys(keys(1)), RequestFacts("r2", 10), 6.0
        )
        assert asked.wait(60)
        try:
            assert pool.submit(reported.is_announced, DIGEST, key_of(0), 5.0).result(60)
            assert not report.done()
        finally:
            go.set()


async def test_file_store_report_does_not_hold_the_event_loop(tmp_path, monkeypatch):
    held = Held(ReportedAccesses.report)
    monkeypatch.setattr(ReportedAccesses, "report", lambda *given: held(*given))
    store = opened(tmp_path)
    reporting = asyncio.create_task(store.on_access([A], FACTS))
    await asyncio.to_thread(held.entered.wait, 60)
    assert await store.contains([A]) == [False]
    assert not reporting.done()
    held.go.set()
    await reporting
    await store.close()


def test_reported_accesses_of_many_requests_keep_a_bounded_memory():
    reported = ReportedAccesses()

    def report(number):
        key = BlockKey(number.to_bytes(32, "big"))
        return reported.report(DIGEST, [key], RequestFacts(str(number), 1), 5.0)

    for number in range(MOST_REQUESTS + 10):
        assert report(number)
    assert not report(10), "it is remembered"
    assert report(9), "it is forgotten, and told anew"
    never = key_of("never told of")
    assert reported.access_for_put(DIGEST, never, 7.0) == Access(never, UNKNOWN_CONTEXT, 7.0)


def test_reported_accesses_of_equal_keys_in_two_namespaces_are_equal_and_apart():
    reported, other, (key,) = ReportedAccesses(), Digest(bytes(32)), keys(0)
    first, second = (reported.report(digest, [key], FACTS, 5.0) for digest in (DIGEST, other))
    assert first == second == [Access(key, AccessContext("chat", 1, 0, 1, 7), 5.0, FACTS.benefit)]
    assert not reported.report(other, [key], FACTS, 6.0)
    assert reported.access_for_put(DIGEST, key, 7.0) == first[0]
    assert not reported.is_announced(DIGEST, key, 7.0)
    assert reported.is_announced(other, key, 7.0)
    assert reported.access_for_put(other, key, 7.0) == first[0]


def test_reported_accesses_of_one_request_in_many_namespaces_keep_a_bounded_memory():
    reported = ReportedAccesses()
    digests = [Digest(number.to_bytes(32)) for number in range(MOST_NAMESPACES + 1)]
    for digest in digests:
        assert reported.report(digest, keys(0), FACTS, 5.0)
    assert not reported.report(digests[0], keys(0), FACTS, 5.0)
    assert reported.report(digests[-1], keys(0), FACTS, 5.0), "it was not remembered"


@given(
    st.builds(
        RequestFacts,
        st.text(min_size=1, max_size=128),
        st.integers(0, 2**31 - 1),
        st.text(max_size=64),
        st.integers(0, 2**63 - 1),
        st.none() | st.builds(Benefit, load_s=st.floats(1e-6, 1e4)),
    )
)
def test_request_facts_json_round_trip_gives_equal_facts(facts):
    text = facts.to_json()
    assert text.isascii()
    assert "\n" not in text
    assert RequestFacts.from_json(text) == facts


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": True},
        {"tenant": 2**63},
        {"workload": "x" * 65},
        {"id": ""},
        {"id": "\ud800"},
        {"workload": "\udfff"},
        {"worth": {}},
        {"worth": {**json.loads(FACTS.to_json())["worth"], "load_s": "1"}},
        {"worth": {**json.loads(FACTS.to_json())["worth"], "load_s": float("nan")}},
        {"worth": {**json.loads(FACTS.to_json())["worth"], "token_s": -1.0}},
        {"worth": {**json.loads(FACTS.to_json())["worth"], "block_tokens": 0}},
        {"worth": {**json.loads(FACTS.to_json())["worth"], "pair_s": 1e300}},
        {"worth": {**json.loads(FACTS.to_json())["worth"], "block_tokens": 1.5}},
        {"more": 1},
    ],
)
def test_request_facts_from_invalid_json_raise_value_error(change):
    with pytest.raises(ValueError, match=r"bounds|fields|type|characters|numbers|worth|surrogates"):
        RequestFacts.from_json(json.dumps(json.loads(FACTS.to_json()) | change))


def test_request_trace_file_has_one_line_per_request_and_no_keys(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = RequestTraceFile(path, 128)
    trace.write([A, B], FACTS)
    trace.write([], RequestFacts("r2", 127))
    trace.write([A], RequestFacts("r3", 128))
    trace.close()
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [len(line["hash_ids"]) for line in lines] == [2, 1]
    assert lines[0]["hash_ids"][0] == lines[1]["hash_ids"][0]
    assert (lines[0]["workload"], lines[0]["block_tokens"]) == ("chat", 128)
    assert A.hex()[:16] not in text
    assert str(int.from_bytes(A[:8]) >> 1) not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_request_trace_files_of_several_processes_have_one_limit(tmp_path, caplog):
    path = tmp_path / "trace.jsonl"
    traces = [RequestTraceFile(path, 128, most_bytes=10_000) for _ in range(4)]
    for request in range(100):
        for number, trace in enumerate(traces):
            trace.write([A, B], RequestFacts(f"{number}-{request}", 256))
    assert 9_000 < path.stat().st_size <= 10_000
    assert len(caplog.records) == 4, "one line in the log of each process"
    for trace in traces:
        trace.close()


def test_request_trace_file_request_that_is_looked_up_again_has_one_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = RequestTraceFile(path, 128, most_requests=2)
    for request in ("r1", "r2", "r1", "r2", "r3", "r3", "r1"):
        trace.write([A], RequestFacts(request, 128))
    trace.close()
    assert len(path.read_text().splitlines()) == 4, "r1 is forgotten after two others"


def test_request_trace_file_after_a_part_of_a_line_begins_a_new_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    before = RequestTraceFile(path, 128)
    before.write([A], RequestFacts("r1", 128))
    part = path.read_bytes()[:-20]  # as a full disk leaves it
    path.write_bytes(path.read_bytes() + part)
    trace = RequestTraceFile(path, 128)
    for number in range(2, 4):
        trace.write([A, B], RequestFacts(f"r{number}", 256))
        before.write([A], RequestFacts(f"q{number}", 128))
    before.close()
    trace.close()
    read = read_trace(path)
    assert [len(request.blocks) for request in read.requests] == [1, 2, 1, 2, 1]
    assert read.broken_off == (2,)


def test_request_trace_file_on_a_full_disk_ends_with_one_line_in_the_log(caplog):
    trace = RequestTraceFile(Path("/dev/full"), 128)
    for _ in range(3):
        trace.write([A], FACTS)
    trace.close()
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


async def test_file_store_takes_request_facts(tmp_path):
    store = opened(tmp_path)
    await store.on_access([A], FACTS)
    await store.close()


def test_block_folder_rebuilt_index_quota_counts_blocks_from_their_next_report(tmp_path):
    rules = TenantRules(quota_bytes=2 * STORED_BYTES)
    with contextlib.closing(opened_folder(tmp_path)) as folder:
        for name in range(10):
            put(folder, name)
    with contextlib.closing(sqlite3.connect(tmp_path / "index.db")) as index, index:
        index.execute("UPDATE agreed SET boot = 'an earlier one'")
    with contextlib.closing(opened_folder(tmp_path, tenant_rules=rules)) as folder:
        with folder.supervisor.open() as index:
            assert folder.evictor.learn(index, time.sleep)
        assert evict(folder, 0) == 0
        until_room_is_made(folder)
        assert there(folder, range(10)) == list(range(10))
        folder.on_access(DIGEST, keys(0, 1, 2), RequestFacts("r1", 100, tenant=1))
        folder.on_access(DIGEST, keys(9), RequestFacts("r2", 100, tenant=2**63 - 1))
        assert [usage.context.tenant for usage in booked(folder, (0, 1, 9))] == [1, 1, 0]
        until_room_is_made(folder)
        assert there(folder, range(10)) == [0, 1, *range(3, 10)]


def test_block_folder_blocks_put_without_a_report_count_for_no_quota(tmp_path):
    rules = TenantRules(quota_bytes=2 * STORED_BYTES)
    with contextlib.closing(opened_folder(tmp_path, tenant_rules=rules)) as folder:
        folder.on_access(DIGEST, keys(20, 21), RequestFacts("r0", 100, tenant=3))
        for name in (*range(10), 20, 21):
            assert put(folder, name)
        until_room_is_made(folder)
        assert folder.evictor.over_quota_bytes() == 0
        assert there(folder, range(22)) == [*range(10), 20, 21]
        folder.on_access(DIGEST, keys(0, 1, 2), RequestFacts("r1", 100))  # names no tenant
        # Block 2 may be evicted by now.
        assert [usage.context.tenant for usage in booked(folder, (0, 1))] == [0, 0]
        until_room_is_made(folder)
        assert there(folder, range(22)) == [0, 1, *range(3, 10), 20, 21]


def test_block_folder_tenants_reported_to_another_process_count_for_their_quota(tmp_path):
    rules = TenantRules(quota_bytes=2 * STORED_BYTES)
    with (
        contextlib.closing(opened_folder(tmp_path, tenant_rules=rules)) as leader,
        contextlib.closing(opened_folder(tmp_path, tenant_rules=rules)) as other,
    ):
        for name in range(10):
            assert put(leader, name)
        with leader.supervisor.open() as index:
            assert leader.evictor.learn(index, time.sleep)
        other.on_access(DIGEST, keys(0, 1, 2), RequestFacts("r1", 100, tenant=1))
        booked(other, ())
        until(lambda: there(leader, range(10)) == [0, 1, *range(3, 10)], "its quota is applied")


@pytest.mark.parametrize("reporter_leads", [False, True])
def test_block_folder_put_in_another_process_gets_the_reported_facts(
    tmp_path, monkeypatch, reporter_leads
):
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s)
    rules = TenantRules(quota_bytes=5 * STORED_BYTES)
    with (
        contextlib.closing(opened_folder(tmp_path, tenant_rules=rules)) as leader,
        contextlib.closing(opened_folder(tmp_path, tenant_rules=rules)) as other,
    ):
        reporter, writer = (leader, other) if reporter_leads else (other, leader)

        def stored(number, names, tenant):
            """Blocks that are put before the report of their request reaches the index."""
            nonlocal now_s
            now_s += 2.0
            for name in names:
                put(writer, name)
            put_s, now_s = now_s, now_s - 1.0
            reporter.on_access(DIGEST, keys(*names), RequestFacts(number, 9, "chat", tenant))
            now_s = put_s
            usages = booked(reporter, names)
            assert {(usage.used_s, usage.uses) for usage in usages} == {(put_s, 0)}
            # The turn is 2 if the reporter learned the rows before, as of an earlier prompt.
            assert [usage.context._replace(turn=1) for usage in usages] == [
                AccessContext("chat", 1, at, len(names), tenant) for at in range(len(names))
            ]

        def left():
            with leader.supervisor.open() as index:
                assert leader.evictor.learn(index, time.sleep)
            until_room_is_made(leader)
            return there(leader, range(40))

        stored("r1", range(4), 1)
        stored("r2", range(10, 14), 2)
        assert left() == [*range(4), *range(10, 14)]
        stored("r3", range(20, 22), 2)
        stored("r4", range(30, 35), 3)
        # A leader that got no report reads the tenants again, each second.
        until(lambda: len(left()) == 14, "tenant 2 has its quota")
        assert {*range(4), 20, 21, *range(30, 35)} <= {*left()}


def a_retry_later():
    """The clock, when reports are applied again."""
    clock = time.monotonic
    return lambda: clock() + TRIES_S[1]


def test_block_folder_block_put_elsewhere_long_after_a_report_gets_its_facts(tmp_path, monkeypatch):
    with (
        contextlib.closing(opened_folder(tmp_path)) as reporter,
        contextlib.closing(opened_folder(tmp_path)) as writer,
    ):
        reporter.on_access(DIGEST, keys(0, 1), FACTS)
        booked(reporter, ())
        put(writer, 0)
        monkeypatch.setattr("time.monotonic", a_retry_later())

        def has_facts():
            reporter.supervisor.wake()
            return booked(reporter, (0,))[0].context != UNKNOWN_CONTEXT

        until(has_facts, "the facts of its block")
        (usage,) = booked(reporter, (0,))
        assert usage.context == AccessContext("chat", 1, 0, 2, 7)
        assert usage.uses == 0


def test_block_folder_report_from_before_the_clock_was_set_back_is_recorded_as_of_now(
    tmp_path, monkeypatch
):
    now_s = 2e9
    monkeypatch.setattr("time.time", lambda: now_s)
    with contextlib.closing(opened_folder(tmp_path)) as folder:
        folder.on_access(DIGEST, keys(0), FACTS)
        booked(folder, ())
        now_s -= 86_400.0
        with folder.supervisor.open() as index:
            assert folder.evictor.learn(index, time.sleep)  # finds that the clock was set back
            put(folder, 0)
            assert folder.evictor.learn(index, time.sleep)  # and corrects no times from now on
        monkeypatch.setattr("time.monotonic", a_retry_later())

        def is_used():
            folder.supervisor.wake()
            return booked(folder, (0,))[0].uses

        until(is_used, "a use of its block")
        (usage,) = booked(folder, (0,))
        assert (usage.created_s, usage.used_s) == (now_s, now_s)
