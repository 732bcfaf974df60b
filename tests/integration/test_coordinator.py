"""The coordinator, driven as SGLang drives it, with a store whose reads the test releases."""

import asyncio
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from coordinator_harness import (
    BLOCK,
    CHUNK,
    NAMESPACE,
    NO_MEMORY,
    PAGE,
    CoordinatorHarness,
    FakeReq,
    req_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from polling import until
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_cake.core.buffers import Buffer
from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.integration.metrics import Metrics
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.integration.scheduler import rank_consensus
from sglang_cake.integration.scheduler.coordinator import (
    FOLLOWED,
    NEAR,
    RECONSIDER_S,
    RECONSIDERED,
)
from sglang_cake.integration.scheduler.prompt_loads import MOST_IDLE_S
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, StepWork, work_of
from sglang_cake.loading.meet import BlockState
from sglang_cake.loading.planner import Outlook
from sglang_cake.loading.priority import ROUND_TOKENS
from sglang_cake.stores.base import LentBlock, Store, WrapperStore
from sglang_cake.testing.virtual_time import virtual_time


@pytest.fixture
def harness(stopped_clock: Any) -> Iterator[CoordinatorHarness]:
    with CoordinatorHarness() as made:
        yield made


@pytest.fixture
def two(stopped_clock: Any) -> Iterator[CoordinatorHarness]:
    """One of two ranks."""
    with CoordinatorHarness(ranks=True) as made:
        yield made


def test_coordinator_blocks_that_land_with_a_lookup_of_too_little_are_given_up() -> None:
    """The prompt was computed for a while without its lookup, so that less is left to load."""
    with CoordinatorHarness(min_load_tokens=2 * BLOCK) as harness:
        req = req_of(3.5)
        harness.open(*harness.fill(req.origin_input_ids, {0, 1, 2}))
        harness.arrive(req)  # the lookup and the reads end before the next poll
        req.prefix_len = 2 * BLOCK
        harness.coordinator.attach_islands(req, harness.attach)
        harness.poll(req)
        assert list(harness.coordinator.live) == [req.rid]
        assert not harness.coordinator.loading(req)
        harness.poll(req)
        assert harness.coordinator.reclaimable_tokens == 0
    wasted = harness.counters.snapshot()
    assert wasted["wasted_bytes", "overtaken"] == 3 * harness.kv.layout.block_bytes
    assert wasted["wasted_bytes", "peer"] == 0


@pytest.mark.parametrize(
    ("blocks", "matched"),
    [*itertools.product([1, 1.25, 4, 4.5], [0, 4, 12]), (0.5, 0), (0.5, 4)],
)
def test_coordinator_wholly_stored_prompt_is_loaded(
    harness: CoordinatorHarness, blocks: float, matched: int
) -> None:
    req = req_of(blocks)
    full = int(blocks)
    harness.open(*harness.fill(req.origin_input_ids, set(range(full))))
    harness.arrive(req, matched)
    harness.poll(req, times=3)
    assert harness.step(req)
    limit = (len(req.origin_input_ids) - 1) // PAGE * PAGE
    loaded = max(0, min(full * BLOCK, limit) - matched)
    [report] = req.customized_info["cake"]
    assert report["loaded_tokens"] == loaded
    assert report["matched_tokens"] == matched
    assert report["computed_tokens"] == len(req.origin_input_ids) - matched - loaded
    sides = harness.counters.snapshot()
    assert sides["fallback", "load"] == (loaded >= BLOCK)
    assert sides["fallback", "compute"] == 0


def test_coordinator_tokens_that_others_bring_between_two_steps_are_reported_as_matched(
    harness: CoordinatorHarness,
) -> None:
    """With a lossy codec they count as lossy: others may have loaded them."""
    req = req_of(4.5)
    harness.arrive(req)
    harness.poll(req)
    assert not harness.step(req)
    slots = harness.allocator.alloc(PAGE)
    assert slots is not None
    req.owned.append(slots)
    req.prefix_len += PAGE
    while not harness.step(req):
        harness.poll(req)
    check_report(req)
    assert req.customized_info["cake"][0]["matched_tokens"] == PAGE


@pytest.mark.parametrize("failing", [{0}, {2}, {1, 3}, {0, 1, 2, 3}])
def test_coordinator_blocks_without_device_memory_are_computed(
    harness: CoordinatorHarness, failing: set[int]
) -> None:
    """They are lost blocks: no error, however many there are."""
    harness.copier.errors |= {harness.block(number): NO_MEMORY for number in failing}
    req = harness.readable(4.5)
    harness.arrive(req)
    for _ in range(20):
        harness.poll(req)
        if harness.step(req):
            break
    [report] = req.customized_info["cake"]
    computed = report["computed_tokens"]
    assert report["loaded_tokens"] + computed == 4.5 * BLOCK
    assert len(failing) * BLOCK + BLOCK // 2 <= computed
    assert harness.counters.snapshot()["wasted_bytes", "memory"] > 0


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("next_tokens", [1, 3])
@pytest.mark.parametrize("blocks", [1, 1.25, 4, 4 + 1 / BLOCK, 4.5])
def test_coordinator_blocks_whose_keys_cover_next_tokens_are_loaded_up_to_those_before(
    blocks: float, next_tokens: int, ranks: bool
) -> None:
    with CoordinatorHarness(ranks=ranks, next_tokens=next_tokens) as harness:
        req = req_of(blocks)
        tokens = len(req.origin_input_ids)
        stored = (tokens - next_tokens) // BLOCK
        harness.open(*harness.fill(req.origin_input_ids, set(range(stored))))
        harness.arrive(req)
        harness.poll(req, times=3)
        assert harness.step(req)
        [report] = req.customized_info["cake"]
        limit = (tokens - 1 - next_tokens) // PAGE * PAGE
        assert report["loaded_tokens"] == min(stored * BLOCK, limit)


@pytest.mark.parametrize(
    ("data", "loaded"),
    [
        ({}, 4 * BLOCK - PAGE),
        ({"return_logprob": True, "logprob_start_len": 4 * BLOCK}, 4 * BLOCK - PAGE),
        ({"return_logprob": True, "logprob_start_len": 4 * BLOCK - 1}, 0),
        ({"return_hidden_states": "last"}, 4 * BLOCK - PAGE),
        ({"return_hidden_states": True}, 0),
    ],
)
def test_coordinator_prompt_is_loaded_up_to_its_last_window_unless_all_of_it_is_read(
    data: dict[str, Any], loaded: int
) -> None:
    with CoordinatorHarness(tail_tokens=PAGE) as harness:
        req = req_of(4)
        vars(req).update({"return_logprob": False, "return_hidden_states": False} | data)
        harness.open(*harness.fill(req.origin_input_ids, set(range(4))))
        harness.arrive(req)
        harness.poll(req, times=3)
        assert any(harness.step(req) for _ in range(2))
        [report] = req.customized_info["cake"]
        assert report["loaded_tokens"] == loaded


def test_coordinator_loads_that_never_land_leave_the_prompt_to_compute(
    harness: CoordinatorHarness,
) -> None:
    req = req_of(4.5)
    harness.fill(req.origin_input_ids, set(range(4)))
    harness.arrive(req)

    def is_computed() -> bool:
        harness.poll(req)
        return harness.step(req)

    until(is_computed, "its prefill is over")
    sides = harness.counters.snapshot()
    assert (sides["fallback", "compute"], sides["fallback", "load"]) == (1, 0)


def test_coordinator_computing_and_loading_meet_in_one_prompt(harness: CoordinatorHarness) -> None:
    req, keys = harness.stored(8.5)
    harness.arrive(req)
    harness.coordinator.poll([req.rid])
    assert not harness.step(req)
    assert req.prefix_len == 40  # the meet is far: a whole chunk
    harness.open(*keys)
    for _ in range(20):  # how far each side goes is decided by how quick it was
        harness.poll(req)
        if harness.step(req):
            break
    [report] = req.customized_info["cake"]
    assert report["computed_tokens"] + report["loaded_tokens"] == 136
    assert report["computed_tokens"] >= 40
    assert report["loaded_tokens"] >= BLOCK
    assert report["matched_tokens"] == 0
    assert report["meet_token"] == 136 - 8 - report["loaded_tokens"]
    sides = harness.counters.snapshot()
    assert sides["fallback", "compute"] == sides["fallback", "load"] == 0


def test_coordinator_prompt_planned_and_not_scheduled_is_loaded_wholly(
    harness: CoordinatorHarness,
) -> None:
    """SGLang found no memory for its step, so that nothing is computed for a while."""
    req, keys = harness.stored(8.5)
    harness.arrive(req)
    harness.coordinator.poll([req.rid])
    plan = harness.coordinator.plan(req, CHUNK)
    assert plan is not None
    assert plan.load_from is not None
    assert plan.load_from > 0
    harness.open(*keys)
    harness.poll(req, times=12)
    assert harness.coordinator.reclaimable_tokens == 8 * BLOCK


@pytest.fixture
def auto(stopped_clock: Any) -> Iterator[CoordinatorHarness]:
    """Four blocks and a half are computed in 0.072 s, before one is loaded."""
    load = LoadCost(0.08, 0.05, error=0.0, depth=2)
    with CoordinatorHarness(mode="auto", load=load) as made:
        yield made


def test_coordinator_waiting_prompt_is_loaded_once_the_link_is_fast(
    auto: CoordinatorHarness,
) -> None:
    req, keys = auto.stored(4.5)
    auto.arrive(req)
    auto.coordinator.poll([req.rid])
    assert auto.slow.waiting == []
    assert not auto.coordinator.loading(req)
    auto.loader.known_cost = LoadCost(0.0, 1e-4, error=0.0)
    auto.poll(req)
    assert auto.slow.waiting == [keys[3], keys[2]]


class Lender(WrapperStore):
    """Lends every block, as host memory does."""

    def lend(self, key: BlockKey) -> LentBlock | None:
        data = bytearray(self.inner.blocks[key])  # type: ignore[attr-defined]
        return LentBlock(Buffer(memoryview(data)), lambda: None)


@pytest.mark.parametrize("store", [None, Lender])
@pytest.mark.usefixtures("stopped_clock")
def test_coordinator_prompt_that_waits_for_device_memory_keeps_its_loads(
    store: Callable[[Store], Store] | None,
) -> None:
    """Its staging is full, or its lent blocks wait for their copies: no read is late."""
    load = LoadCost(0.0, 1e-3, error=0.0, depth=2)
    with CoordinatorHarness(mode="auto", load=load, slots=40 * BLOCK, store=store) as harness:
        harness.loader.known_cost = load
        harness.coordinator.spare_slots = 0  # running requests have all of it
        req, keys = harness.stored(20.5)
        harness.open(*keys)
        harness.arrive(req)
        record = harness.coordinator.live[req.rid]
        for _ in range(4):
            harness.poll(req)
            record.local.served_since_s -= 1000.0  # a long time passes
            record.local.last_fetched_s -= 1000.0
        assert 0 < record.meet.landed_blocks < 20
        harness.coordinator.spare_slots = math.inf
        harness.poll(req, times=20)
        assert record.meet.landed_blocks == 20


def other_of(blocks: float, rid: str) -> FakeReq:
    """A prompt that begins as no other one of these tests."""
    return FakeReq(rid, array("q", range(100_000, 100_000 + int(blocks * BLOCK))))


def prefill(harness: CoordinatorHarness, reqs: list[FakeReq]) -> None:
    """Poll and step until the prompts are prefilled. They are served in this order."""
    for _ in range(60):
        harness.poll(*reqs)
        reqs = [req for req in reqs if not harness.step(req)]
        if not reqs:
            return
    raise AssertionError([req.rid for req in reqs])


@pytest.mark.parametrize("mode", ["load", "both", "auto"])
def test_coordinator_prompt_that_passes_one_without_memory_gets_buffers(mode: str) -> None:
    with CoordinatorHarness(mode=mode, slots=60 * BLOCK) as harness:
        harness.coordinator.spare_slots = 0  # running requests have all of it
        long, short = req_of(20.5, "long"), other_of(10.5, "short")
        harness.open(*harness.fill(long.origin_input_ids, set(range(20))))
        harness.open(*harness.fill(short.origin_input_ids, set(range(10))))
        harness.arrive(long)
        harness.poll(long, times=6)
        landed = harness.coordinator.live["long"].meet.landed_blocks
        assert landed == harness.staging.capacity - harness.staging.free > 0
        harness.arrive(short)
        harness.coordinator.spare_slots = math.inf
        prefill(harness, [short, long])


@pytest.mark.parametrize("short_first", [False, True])
@pytest.mark.parametrize("mode", ["load", "both"])
def test_coordinator_prompt_that_lost_its_memory_gives_buffers_to_one_that_has_some(
    mode: str, short_first: bool, stopped_clock: Any
) -> None:
    """The two do not fit in device memory together."""
    with CoordinatorHarness(mode=mode, slots=24 * BLOCK, staging=8) as harness:
        coordinator, allocator = harness.coordinator, harness.allocator
        long, short = req_of(20.5, "long"), other_of(9.5, "short")
        keys = harness.fill(long.origin_input_ids, set(range(20)))
        harness.open(*harness.fill(short.origin_input_ids, set(range(9))))
        coordinator.spare_slots = 24 * BLOCK
        harness.arrive(long)
        harness.poll(long, times=2)
        record = coordinator.live["long"]
        assert record.reserved
        harness.open(*keys)
        until(lambda: not harness.staging.free, "blocks of a long step fill staging")
        coordinator.reclaim(harness.size)
        decoding = allocator.alloc(12 * BLOCK)
        coordinator.spare_slots = 12 * BLOCK
        harness.poll(long)
        assert len(record.memory.staged) == 8
        harness.arrive(short)
        harness.poll(long, short, times=2)
        assert coordinator.reclaimable_tokens == 9 * BLOCK
        allocator.free(decoding)
        waiting = [short, long] if short_first else [long, short]

        def prefilled() -> bool:
            stopped_clock.now_s += MOST_IDLE_S / 10
            coordinator.spare_slots = allocator.available_size() + coordinator.reclaimable_tokens
            harness.poll(*waiting)
            for req in [req for req in waiting if req.prefix_len][:1] or waiting.copy():
                if harness.step(req):
                    waiting.remove(req)
                    harness.leave(req)
                elif req.prefix_len:  # SGLang knows one chunked request
                    break
            return not waiting

        until(prefilled, "both are prefilled")


def test_coordinator_prompt_whose_blocks_have_landed_takes_no_buffers_of_others() -> None:
    with (
        virtual_time() as io,
        CoordinatorHarness(mode="load", slots=24 * BLOCK, staging=8, io=io) as harness,
    ):
        long, short = req_of(20.5, "long"), other_of(9.5, "short")
        harness.open(*harness.fill(long.origin_input_ids, set(range(20))))
        harness.open(*harness.fill(short.origin_input_ids, set(range(9))))
        harness.coordinator.spare_slots = 24 * BLOCK
        harness.arrive(short)
        harness.poll(short, times=2)
        harness.arrive(long)
        staged = harness.coordinator.live["long"].memory.staged
        for _ in range(20):
            harness.poll(short, long)
            io.now_s += MOST_IDLE_S / 10
        assert len(staged) == 6


@pytest.mark.usefixtures("stopped_clock")
def test_coordinator_late_reads_that_have_all_places_of_the_link_end_the_loads() -> None:
    """Those of a prompt before it: no block of this one is being read."""
    load = LoadCost(0.0, 1e-3, error=0.0, depth=2)
    with CoordinatorHarness(mode="auto", load=load) as harness:
        harness.loader.known_cost = load
        other, req = FakeReq("other", array("q", range(1000, 1072))), req_of(4.5)
        keys = [
            key
            for each in (other, req)
            for key in harness.fill(each.origin_input_ids, {0, 1, 2, 3})
        ]
        harness.arrive(other)
        harness.arrive(req)
        harness.poll(req, other)
        record = harness.coordinator.live[req.rid]
        assert len(harness.slow.waiting) == 2
        assert not set(harness.slow.waiting) & set(keys[4:])
        record.local.served_since_s -= 1000.0
        harness.poll(req, other)
        assert not harness.coordinator.loading(req)


def test_coordinator_prompt_that_the_link_does_not_serve_first_is_not_overdue_after_a_long_step(
    stopped_clock: SimpleNamespace,
) -> None:
    """Its blocks come once those of the first one are there."""
    load = LoadCost(0.0, 1e-3, error=0.0, depth=2)
    with CoordinatorHarness(mode="auto", load=load) as harness:
        harness.loader.known_cost = load
        reqs = [other_of(4.5, "other"), req_of(4.5)]
        keys = [harness.fill(req.origin_input_ids, {0, 1, 2, 3}) for req in reqs]
        for req in reqs:
            harness.arrive(req)
        harness.poll(*reqs)
        stopped_clock.now_s += 1.0  # in which a step ran
        harness.open(keys[0][3], keys[0][2])
        harness.poll(*reqs)
        assert all(harness.coordinator.loading(req) for req in reqs)


@pytest.mark.parametrize("has_keys", [True, False])
def test_coordinator_prompt_behind_others_is_loaded_until_they_leave(
    auto: CoordinatorHarness, has_keys: bool
) -> None:
    ahead, req = FakeReq("ahead", array("q", range(1000, 3000))), req_of(4.5)
    if not has_keys:
        ahead.session = object()
    keys = auto.fill(req.origin_input_ids, set(range(4)))
    auto.arrive(ahead)
    auto.arrive(req)
    assert auto.slow.waiting == [keys[3], keys[2]]  # at once, before the next poll
    auto.coordinator.poll(["ahead", req.rid])
    assert auto.coordinator.loading(req)
    assert (auto.coordinator.live.get("ahead") is not None) == has_keys
    auto.leave(ahead)
    auto.poll(req)
    assert not auto.coordinator.loading(req)
    assert auto.slow.waiting == []
    late = FakeReq("late", array("q", range(1000, 3000)))
    late.session = ahead.session
    auto.arrive(late)
    auto.coordinator.poll(["late", req.rid])  # a policy puts it first
    auto.settle()
    assert auto.slow.waiting == [keys[3], keys[2]]
    late.prefix_len = 1999
    auto.coordinator.claimed(late, 2000)  # its last step begins
    auto.poll(req)
    assert not auto.coordinator.loading(req)


def test_coordinator_poll_judges_more_waiting_prompts_after_a_longer_step(
    stopped_clock: Any, auto: CoordinatorHarness
) -> None:
    reqs = [req_of(4.5, str(i)) for i in range(3 * RECONSIDERED)]
    auto.fill(reqs[0].origin_input_ids, set(range(4)))
    for req in reqs:
        auto.arrive(req)
    rids = [req.rid for req in reqs]
    auto.coordinator.poll(rids)
    asked = auto.step_costs.judged
    counts = []
    for step_s in 0.0, 1.1 * RECONSIDER_S, 2.1 * RECONSIDER_S, 0.1:
        asked.clear()
        stopped_clock.now_s += step_s
        auto.coordinator.poll(rids)
        counts.append(len(asked))
    assert counts == [1, 1, 2, RECONSIDERED]
    asked.clear()
    for _ in range(3):
        stopped_clock.now_s += RECONSIDERED * RECONSIDER_S
        auto.coordinator.poll(rids)
    assert sorted(asked) == sorted(rids)


def crowd(harness: CoordinatorHarness, count: int, *, tokens: int = 16) -> list[FakeReq]:
    """So many prompts that wait, of which nothing is stored."""
    reqs = [FakeReq(f"ahead{i}", array("q", [5000 + i]) * tokens) for i in range(count)]
    for req in reqs:
        harness.arrive(req)
    return reqs


@pytest.mark.parametrize("has_keys", [True, False])
def test_coordinator_prompt_behind_many_is_loaded_once_it_is_near(
    auto: CoordinatorHarness, has_keys: bool
) -> None:
    ahead, req, last = crowd(auto, NEAR), req_of(4.5), req_of(3.5, "last")
    if not has_keys:
        last.session = object()
    keys = auto.fill(req.origin_input_ids, set(range(4)))
    auto.arrive(req)
    auto.arrive(last)
    auto.poll(*ahead, req, last, times=2)
    assert auto.slow.waiting == []
    assert [auto.coordinator.is_far(each) for each in (ahead[-1], req, last)] == [False, True, True]
    auto.leave(ahead[0])
    auto.poll(*ahead[1:], req, last)
    assert [auto.coordinator.is_far(each) for each in (req, last)] == [False, True]
    assert auto.slow.waiting == [keys[3], keys[2]]
    auto.leave(ahead[1])
    auto.poll(*ahead[2:], req, last)
    assert not auto.coordinator.is_far(last)


def test_coordinator_prompt_that_is_loaded_stays_near_behind_later_ones(
    harness: CoordinatorHarness,
) -> None:
    """Its blocks are in host memory, which others need."""
    req = req_of(4.5)
    keys = harness.fill(req.origin_input_ids, set(range(4)))
    harness.arrive(req)
    harness.poll(req, times=2)
    before = crowd(harness, 2 * NEAR)  # of a higher priority
    harness.poll(*before, req)
    assert not harness.coordinator.is_far(req)
    assert harness.coordinator.is_far(before[-1])
    harness.open(keys[3])
    harness.poll(*before, req, times=2)
    assert harness.coordinator.live[req.rid].meet.landed_blocks == 1


def test_coordinator_prompts_that_load_nothing_are_far_once_others_pass_them(
    auto: CoordinatorHarness,
) -> None:
    reqs = crowd(auto, 3 * NEAR)
    auto.poll(*reqs, times=2)
    auto.poll(*reversed(reqs), times=2)
    assert [auto.coordinator.is_far(req) for req in reqs] == [True] * 2 * NEAR + [False] * NEAR


def groups_of_near(harness: CoordinatorHarness, count: int) -> list[list[FakeReq]]:
    """So many groups of NEAR stored prompts."""
    groups = []
    for group in range(count):
        groups.append([FakeReq(f"{group}-{i}", array("q", [group, i] * 12)) for i in range(NEAR)])
        for req in groups[-1]:
            harness.fill(req.origin_input_ids, {0})
            harness.arrive(req)
    return groups


def test_coordinator_as_many_prompts_stay_near_as_are_near_and_others_give_all_back() -> None:
    with CoordinatorHarness(mode="load", staging=4) as harness:
        one, two, three = groups = groups_of_near(harness, 3)

        def far(group: list[FakeReq]) -> set[bool]:
            return {harness.coordinator.is_far(req) for req in group}

        harness.poll(*one, *two, *three, times=2)
        harness.poll(*two, *one, *three, times=2)
        assert [far(group) for group in groups] == [{False}, {False}, {True}]
        harness.poll(*three, *two, *one, times=2)
        assert [far(group) for group in groups] == [{True}, {False}, {False}]
        assert not any(harness.coordinator.loading(req) for req in one)
        harness.poll(*one, *two, *three, times=3)
        assert all(harness.coordinator.loading(req) for req in one)


def test_coordinator_prompts_that_give_all_back_after_the_store_is_detached_are_computed() -> None:
    with CoordinatorHarness(mode="load", staging=4) as harness:
        one, two, three = groups_of_near(harness, 3)
        harness.poll(*one, *two, *three, times=2)
        harness.poll(*two, *one, *three, times=2)
        arrivals = [harness.coordinator.queue_entry(req).arrival for req in one]
        harness.coordinator.store_detached = True
        harness.loader.use(None, [2])
        harness.poll(*three, *two, *one)
        harness.poll(*one, *two, *three, times=2)
        assert not any(harness.coordinator.loading(req) for req in one)
        assert not any(harness.coordinator.awaits_lookup(req) for req in one)
        assert all(harness.coordinator.loading(req) for req in two), "from the former store"
        assert [harness.coordinator.queue_entry(req).arrival for req in one] == arrivals
        while not harness.step(one[0]):
            harness.poll(*one, *two, *three)
        check_report(one[0])
        assert one[0].customized_info["cake"][0]["loaded_tokens"] == 0


class HeldLookups(WrapperStore):
    """Attributes: answers: until it is set, no lookup is answered."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.answers = asyncio.Event()
        self.answers.set()

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        await self.answers.wait()
        return await super().contains(keys)


@pytest.mark.parametrize("polls", [0, 1])
def test_coordinator_prompt_that_is_far_before_its_lookup_is_known_holds_no_buffer(
    polls: int,
) -> None:
    """Its reads began by themselves, and later prompts of a higher priority have passed it."""
    with CoordinatorHarness(store=HeldLookups) as harness:
        req = harness.readable(4.5)
        harness.io.post(harness.front.answers.clear)
        harness.arrive(req)
        harness.poll(req, times=polls)
        before = crowd(harness, NEAR)
        harness.poll(*before, req, times=1 - polls)
        harness.io.post(harness.front.answers.set)
        harness.settle()
        harness.poll(*before, req, times=2)
        assert harness.coordinator.is_far(req)
        assert harness.staging.free == harness.staging.capacity
        harness.poll(req, times=3)
        assert harness.coordinator.live[req.rid].meet.landed_blocks == 4


def test_coordinator_prompt_that_is_far_holds_no_block_that_came_as_its_loads_were_refused(
    harness: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    req, keys = harness.stored(4.5)

    def refuse(record: PromptRecord, *args: Any) -> bool:
        harness.open(keys[3])
        return False

    monkeypatch.setattr(harness.step_costs, "should_load", refuse)
    harness.arrive(req)
    harness.poll(req)
    assert harness.staging.free == harness.staging.capacity - 1
    before = crowd(harness, NEAR)
    harness.poll(*before, req)
    assert harness.coordinator.is_far(req)
    assert harness.staging.free == harness.staging.capacity


def test_coordinator_far_prompts_have_waited_since_their_first_poll(
    stopped_clock: Any,
) -> None:
    """Otherwise later prompts, without keys, would go before them once all are near."""
    with CoordinatorHarness(mode="auto") as harness:
        reqs = crowd(harness, 2 * NEAR)
        harness.poll(*reqs)
        stopped_clock.now_s += 5.0
        plain = FakeReq("plain", array("q", range(40)))
        plain.session = object()
        harness.arrive(plain)
        harness.poll(*reqs, plain)
        stopped_clock.now_s += 1.0
        harness.poll(*reqs, plain)
        waited_s = [harness.coordinator.queue_entry(req).waited_s for req in (reqs[-1], plain)]
        assert waited_s == pytest.approx([6.0, 1.0])


def test_coordinator_arrivals_between_two_polls_add_up_the_work_before_them(
    auto: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as the next poll counts, and each record is asked once."""
    auto.poll()
    asked: list[str] = []
    work = PromptRecord.device_work.fget
    assert work is not None
    monkeypatch.setattr(
        PromptRecord,
        "device_work",
        property(lambda record: (asked.append(record.rid), work(record))[1]),
    )
    told: list[StepWork] = []
    decide = auto.step_costs.decision_at_arrival
    monkeypatch.setattr(
        auto.step_costs,
        "decision_at_arrival",
        lambda record, config, ahead: (told.append(ahead), decide(record, config, ahead))[1],
    )
    reqs = crowd(auto, 3)
    plain = FakeReq("plain", array("q", range(40)))
    plain.session = object()
    auto.arrive(plain)
    last = req_of(4.5)
    auto.arrive(last)
    each = work_of(0, 16)
    assert told == [StepWork(), each, each + each, each + each + each + work_of(0, 40)]
    assert asked == [*(req.rid for req in reqs), last.rid]


def test_coordinator_step_without_changes_predicts_the_remaining_time(
    harness: CoordinatorHarness,
) -> None:
    """Of an unknown link nothing may come for long: a first guess must not be the last."""
    req = req_of(8.5)
    harness.fill(req.origin_input_ids, set(range(8)))
    harness.arrive(req)
    harness.coordinator.poll([req.rid])
    load = harness.coordinator.live[req.rid]
    load.queue.outlook = Outlook(99.0, 99.0, 99.0, 0)
    assert not harness.step(req)
    entry = harness.coordinator.queue_entry(req)
    assert entry.remaining_s is not None
    assert entry.remaining_s < 1  # 136 tokens at a millisecond each, at most


def test_coordinator_prompt_without_keys_has_waited_since_its_first_poll() -> None:
    """The queue is sorted only when a stored prompt is in it. One that came before would count as
    no older, and the stored one would go first once its loads are over."""
    with virtual_time() as io, CoordinatorHarness(io=io) as harness:
        plain, req = FakeReq("plain", array("q", range(1000, 1100))), harness.readable(4.5)
        plain.session = object()
        harness.arrive(plain)
        harness.coordinator.poll(["plain"])
        io.now_s += 10.0
        harness.arrive(req)
        harness.coordinator.poll(["plain", req.rid])
        waited_s = [harness.coordinator.queue_entry(each).waited_s for each in (plain, req)]
        assert waited_s == [10.0, 0.0]


@pytest.mark.usefixtures("stopped_clock")
def test_coordinator_link_serves_prompts_in_the_order_of_the_device() -> None:
    with CoordinatorHarness(mode="auto", load=LoadCost(0.0, 0.001)) as harness:
        reqs = [req_of(4.5, rid) for rid in "ab"]
        for req in reqs:
            harness.fill(req.origin_input_ids, set(range(4)))
            harness.arrive(req)
        for serving in ["a", "b"], ["b", "a"]:
            harness.coordinator.poll(serving)
            assert [load_id[0] for load_id in harness.loader.ordered] == serving


def test_coordinator_lost_block_is_a_change_once(harness: CoordinatorHarness) -> None:
    """Otherwise each poll would have the request planned and predicted anew."""
    req, keys = harness.stored(8.5)
    harness.faulty.lose(keys[7])
    harness.arrive(req)
    harness.coordinator.poll([req.rid])
    record = harness.coordinator.live[req.rid]
    harness.open(keys[7])
    harness.coordinator.poll([req.rid])
    assert record.loading
    assert record.meet.state(7) is BlockState.GONE
    record.queue.outlook = outlook = Outlook(99.0, 99.0, 99.0, 0)
    harness.coordinator.poll([req.rid])
    assert record.queue.outlook is outlook


def test_coordinator_time_that_a_prediction_is_compared_with_has_the_last_step(
    stopped_clock: Any,
) -> None:
    metrics = Mock(spec=Metrics)
    cost = PrefillCost(1.0, 1.0, 0.0, error=0.0)
    slow = LoadCost(0.0, 1e9, error=0.0)
    with CoordinatorHarness(mode="auto", prefill=cost, load=slow, metrics=metrics) as harness:
        req, _ = harness.stored(1.5)
        harness.arrive(req)
        harness.poll(req)
        stopped_clock.now_s += 0.5
        assert harness.step(req)
    step_s = 1.0 + 1.5 * BLOCK
    metrics.observe_prediction.assert_called_once_with(0.5 + step_s, 0.5 + step_s)


def test_coordinator_prediction_counts_the_running_step_and_no_work_beside_the_prompt(
    harness: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy_s = 100.0
    monkeypatch.setattr(StepCosts, "busy_s", busy_s)
    req, _ = harness.stored(4.5)
    harness.arrive(req)
    harness.coordinator.poll([req.rid])
    harness.coordinator.step_costs.claimed(0, 10**9)  # of another prompt, in this step alone
    assert harness.coordinator.plan(req, CHUNK) is not None
    predicted_s = harness.coordinator.live[req.rid].stats.predicted_s
    remaining_s = harness.coordinator.queue_entry(req).remaining_s
    assert predicted_s is not None
    assert busy_s < predicted_s < 2 * busy_s
    assert remaining_s is not None
    assert remaining_s < busy_s


def test_coordinator_unsettled_step_claims_its_span(harness: CoordinatorHarness) -> None:
    req, keys = harness.stored(4.5)
    harness.arrive(req)
    harness.coordinator.poll([req.rid])
    assert sorted(harness.slow.waiting) == sorted(keys[2:])
    req.prefix_len = 16
    harness.coordinator.claimed(req, 40)
    harness.settle()
    assert harness.slow.waiting == [keys[3]]  # compute has begun the third block
    req.prefix_len = 40
    harness.coordinator.claimed(req, 72)
    harness.settle()
    assert harness.slow.waiting == []


def test_coordinator_late_lookup_after_prefix_eviction_is_accepted(
    harness: CoordinatorHarness,
) -> None:
    req = req_of(4.5)
    harness.fill(req.origin_input_ids, set(range(4)))
    harness.arrive(req, matched=32)
    load = harness.coordinator.live[req.rid]
    req.prefix_len = 0
    harness.coordinator.attach_islands(
        req, harness.attach
    )  # the patience is over before the answer is taken in
    harness.coordinator.poll([req.rid])
    assert load.agreed.lookup_done


def test_coordinator_waiting_prompt_that_is_evicted_is_looked_up_again(
    harness: CoordinatorHarness,
) -> None:
    """The tree has nearly all of it at first, so that too little is left to load."""
    req, others = req_of(4.5), [req_of(0.5, str(i)) for i in range(2)]
    for each in (others[0], req, others[1]):
        harness.arrive(each, matched=64 if each is req else 0)
    harness.poll(others[0], req, others[1])
    former = harness.coordinator.live.get("r")
    harness.open(*harness.fill(req.origin_input_ids, set(range(4))))  # by another server
    harness.evict(req, kept=PAGE)
    for _ in range(3):
        harness.poll(others[0], req, others[1])
    record = harness.coordinator.live.get("r")
    assert former is not None
    assert record is not None
    assert record.arrived_s == former.arrived_s
    assert list(harness.coordinator.live) == ["0", "r", "1"]
    assert harness.step(req)
    [report] = req.customized_info["cake"]
    assert (report["matched_tokens"], report["loaded_tokens"]) == (PAGE, 60)
    assert harness.counters.snapshot()["repeated_lookups", ""] == 1


def test_coordinator_evicted_prompt_keeps_what_is_more_than_it_lost(
    harness: CoordinatorHarness,
) -> None:
    req = harness.readable(6.5)
    harness.arrive(req, matched=32)
    harness.poll(req)
    harness.poll(req)
    harness.evict(req)
    harness.poll(req)
    assert harness.counters.snapshot()["repeated_lookups", ""] == 0
    harness.step(req)
    while not harness.step(req):
        harness.poll(req)
    [report] = req.customized_info["cake"]
    assert (report["computed_tokens"], report["loaded_tokens"]) == (40, 64)


def test_coordinator_prompt_that_is_being_prefilled_is_not_looked_up_again(
    harness: CoordinatorHarness,
) -> None:
    """What it has is locked, and not in the tree as soon as it is scheduled."""
    req = req_of(4.5)
    harness.arrive(req, matched=64)
    harness.poll(req)
    harness.evict(req)
    harness.coordinator.poll([req.rid], req.rid)
    assert harness.counters.snapshot()["repeated_lookups", ""] == 0


def test_coordinator_waiting_prompt_follows_what_another_one_brings_into_the_tree(
    harness: CoordinatorHarness,
) -> None:
    req, keys = harness.stored(6.5)
    harness.arrive(req)
    harness.poll(req, times=2)
    before = harness.coordinator.queue_entry(req)
    harness.grow(req, 4 * BLOCK)
    harness.poll(req)
    after = harness.coordinator.queue_entry(req)
    assert before.remaining_s is not None
    assert after.remaining_s is not None
    assert after.remaining_s < before.remaining_s / 2
    harness.open(*keys[4:])
    harness.poll(req, times=2)
    assert harness.slow.waiting == []
    while not harness.step(req):
        harness.poll(req)
    [report] = req.customized_info["cake"]
    assert report["matched_tokens"] == 4 * BLOCK
    assert report["computed_tokens"] + report["loaded_tokens"] == 2.5 * BLOCK


@pytest.mark.usefixtures("stopped_clock")
def test_coordinator_prompt_that_follows_the_tree_gets_no_slack_for_it() -> None:
    """A server that computes all prompts would not compute these tokens either."""
    load = LoadCost(0.0, 0.01, error=0.0, depth=2)
    with CoordinatorHarness(mode="auto", load=load) as harness:
        req, _ = harness.stored(6.5)
        harness.arrive(req)
        harness.poll(req, times=2)
        before = harness.coordinator.queue_entry(req)
        harness.grow(req, 4 * BLOCK)
        harness.poll(req)
        after = harness.coordinator.queue_entry(req)
        assert after.compute_s < before.compute_s / 2
        assert after.slack_s == pytest.approx(before.slack_s)


@pytest.mark.parametrize("of", ["another salt", "another adapter", "other tokens", "less"])
def test_coordinator_waiting_prompt_is_not_matched_for_what_is_not_its_own(
    harness: CoordinatorHarness, of: str
) -> None:
    """A match costs a comparison of all tokens."""
    req = req_of(6.5)
    tokens, salt, extra_key = array("q", req.origin_input_ids), None, req.extra_key
    matches = []
    harness.coordinator.arrive(req, lambda *_: matches.append("match") or 0)  # type: ignore[arg-type, func-returns-value]
    harness.settle()
    harness.arrived.append(req)
    harness.poll(req)
    if of == "another salt":
        salt = "salt"
    elif of == "another adapter":
        extra_key = "adapter"
    elif of == "other tokens":
        tokens[BLOCK - 1] += 1
    else:
        del tokens[BLOCK - 1 :]
    harness.coordinator.inserted(RadixKey(tokens, extra_key, cache_salt=salt))
    harness.poll(req)
    assert matches == ["match"]  # at arrival


def test_coordinator_many_waiting_prompts_of_one_document_are_matched_a_few_at_a_time(
    harness: CoordinatorHarness,
) -> None:
    reqs = [req_of(4.5, str(number)) for number in range(FOLLOWED + 2)]
    for req in reqs:
        harness.arrive(req)
    harness.poll(*reqs)
    for req in reqs:
        req.prefix_len = 2 * BLOCK  # its slots are those of the first one
    harness.grow(reqs[0], 2 * BLOCK)
    fronts = []
    for _ in range(2):
        harness.poll(*reqs)
        fronts.append([each.meet.front for each in harness.coordinator.live.values()])
    assert fronts[0] == [2 * BLOCK] * FOLLOWED + [0, 0]
    assert fronts[1] == [2 * BLOCK] * (FOLLOWED + 2)


def test_coordinator_prompt_in_prefill_is_not_matched_between_two_chunks(
    harness: CoordinatorHarness,
) -> None:
    """What it has computed is in the tree only after its checkpoint."""
    req = req_of(6.5)
    harness.arrive(req)
    harness.poll(req)
    harness.step(req)
    front = harness.coordinator.live["r"].meet.front
    harness.coordinator.inserted(RadixKey(req.origin_input_ids, req.extra_key))
    req.prefix_len += BLOCK
    harness.coordinator.poll([req.rid], req.rid)
    req.prefix_len -= BLOCK
    assert harness.coordinator.live["r"].meet.front == front > 0


def test_coordinator_short_of_slots_computes_what_it_gives_back() -> None:
    with CoordinatorHarness(slots=5 * BLOCK) as harness:
        req = harness.readable(4.5)
        hog = harness.allocator.alloc(3 * BLOCK)
        harness.arrive(req)
        harness.poll(req, times=3)
        assert harness.coordinator.reclaimable_tokens == 2 * BLOCK
        assert harness.coordinator.reclaim(1) == BLOCK
        assert harness.coordinator.reclaimable_tokens == BLOCK
        harness.allocator.free(hog)
        while not harness.step(req):
            harness.coordinator.poll([req.rid])
        [report] = req.customized_info["cake"]
        assert report["computed_tokens"] + report["loaded_tokens"] == len(req.origin_input_ids)


def test_coordinator_block_landing_after_its_claim_is_wasted_as_overtaken(
    harness: CoordinatorHarness,
) -> None:
    req, keys = harness.stored(4.5)
    harness.arrive(req)
    harness.coordinator.poll([])
    harness.open(*keys)  # landed, and the coordinator does not know yet
    load = harness.coordinator.live[req.rid]
    load.meet.claim(2 * BLOCK)
    harness.coordinator.poll([])
    assert sorted(load.memory.staged) == [2, 3]
    harness.settle()
    assert (
        harness.counters.snapshot()["wasted_bytes", "overtaken"]
        == 2 * harness.kv.layout.block_bytes
    )


def test_coordinator_island_short_of_slots_is_attached_in_part() -> None:
    with CoordinatorHarness(slots=8 * BLOCK, staging=10) as harness:
        req = harness.readable(6.5)
        hog = harness.allocator.alloc(4 * BLOCK)
        harness.arrive(req)
        harness.poll(times=4)
        load = harness.coordinator.live[req.rid]
        assert sorted(load.memory.staged) == list(range(6))
        harness.coordinator.attach_islands(req, harness.attach)
        assert req.prefix_len == 0
        assert load.memory.staged == {}
        assert sorted(load.memory.slots) == [2, 3, 4, 5]
        assert harness.counters.snapshot()["wasted_bytes", "memory"] == (
            2 * harness.kv.layout.block_bytes
        )
        harness.allocator.free(hog)
        assert not harness.step(req)
        assert req.prefix_len == 32  # compute stops at what is left of the island
        assert harness.step(req)
        assert req.customized_info["cake"][0]["loaded_tokens"] == 64


@pytest.mark.parametrize(
    "strange",
    [
        {"input_embeds": 1},
        {"multimodal_inputs": 1},
        {"session": 1},
        {"positional_embed_overrides": 1},
        {"lora_id": "unknown"},
    ],
)
def test_coordinator_request_with_more_than_keys_cover_is_ignored(
    harness: CoordinatorHarness, strange: dict
) -> None:
    req = req_of(4.5)
    for name, value in strange.items():
        setattr(req, name, value)
    harness.arrive(req)
    assert harness.coordinator.record(req) is None
    assert not harness.coordinator.awaits_lookup(req)
    assert harness.coordinator.plan(req, CHUNK) is None
    harness.coordinator.attach_islands(req, harness.attach)
    harness.coordinator.claimed(req, 40)


def test_coordinator_request_whose_id_is_no_utf8_is_loaded(harness: CoordinatorHarness) -> None:
    """A client chooses it, and JSON lets it have half a surrogate pair."""
    req = harness.readable(4.5, "a\ud800")
    harness.arrive(req)
    harness.poll(req, times=3)
    assert harness.coordinator.reclaimable_tokens == 4 * BLOCK


def test_coordinator_record_shares_the_tokens_of_a_new_request(
    harness: CoordinatorHarness,
) -> None:
    """A copy of 100,000 tokens has 0.8 MB, as long as the request waits."""
    req = req_of(4.5)
    harness.arrive(req)
    assert harness.coordinator.live[req.rid].tokens is req.origin_input_ids
    prompt = array("q", req.origin_input_ids)
    req.output_ids.extend([7, 8])
    harness.arrive(req)  # retracted
    assert harness.coordinator.live[req.rid].tokens == prompt + array("q", [7, 8])
    assert req.origin_input_ids == prompt


def test_coordinator_two_live_requests_with_one_id_never_share_a_record(
    harness: CoordinatorHarness,
) -> None:
    """SGLang refuses that only within one of its tokenizer processes."""
    first, second, third = req_of(4.5), req_of(2.5), req_of(2.5)
    harness.arrive(first)
    record = harness.coordinator.live[first.rid]
    harness.arrive(second)
    assert harness.coordinator.record(first) is record
    assert harness.coordinator.record(second) is None
    assert harness.counters.snapshot()["unkeyed_requests", "id"] == 1
    harness.coordinator.attach_islands(second, harness.attach)
    assert harness.coordinator.plan(second, CHUNK) is None
    harness.coordinator.claimed(second, 40)
    assert record.stats.computed_tokens == 0
    first.finished = lambda: True
    harness.arrive(third)
    assert harness.coordinator.record(first) is None
    assert harness.coordinator.record(second) is None
    assert harness.coordinator.record(third) is not None


def test_coordinator_adapter_tenant_and_salt_seed_the_keys(harness: CoordinatorHarness) -> None:
    def first_key(**who: Any) -> BlockKey:
        req = req_of(1.5)
        for name, value in who.items():
            setattr(req, name, value)
        harness.arrive(req)
        load = harness.coordinator.live[req.rid]
        harness.coordinator.release(req.rid)
        return load.key_chain.of(load.tokens)[0]

    alike = [
        first_key(lora_id="l1", extra_key="tenant" + "l1"),
        first_key(lora_id="l2", extra_key="tenant" + "l2"),
        first_key(extra_key="tenant"),
        first_key(cache_salt="tenant"),
        first_key(),
    ]
    assert len(set(alike)) == 5
    assert first_key(cache_salt="") == first_key()
    # The same adapter under another name and path is the same adapter.
    names = ("l1@a", "l1@b")
    assert len({first_key(lora_id=name, extra_key=name) for name in names}) == 1


def test_coordinator_new_weights_change_the_keys_and_may_suspend(
    harness: CoordinatorHarness,
) -> None:
    req = req_of(2.5)
    harness.fill(req.origin_input_ids, {0, 1})
    harness.arrive(req)
    harness.coordinator.rebase(Digest(b"w" * 32), suspended=True)
    assert harness.coordinator.record(req) is None
    harness.arrive(req)
    assert harness.coordinator.record(req) is None
    harness.coordinator.emptied()
    harness.arrive(req)
    load = harness.coordinator.live[req.rid]
    harness.coordinator.poll([req.rid])
    assert load.agreed.stored == (False, False)


def test_coordinator_without_a_namespace_skips_and_counts_requests(
    harness: CoordinatorHarness,
) -> None:
    req = req_of(2.5)
    harness.fill(req.origin_input_ids, {0, 1})
    harness.coordinator.rebase(None, suspended=False)
    harness.arrive(req)
    harness.coordinator.poll([req.rid])
    assert harness.coordinator.record(req) is None
    assert harness.counters.snapshot()["unnamed_requests", ""] == 1
    harness.coordinator.rebase(NAMESPACE, suspended=False)
    harness.arrive(req)
    assert harness.coordinator.record(req) is not None


# ---- the end at every stage ----

STAGES = ["asked", "found", "reading", "in the outbox", "staged", "placed", "attached"]


@pytest.mark.parametrize("way", ["end", "flush", "again"])
@pytest.mark.parametrize("stage", STAGES)
def test_coordinator_request_ended_at_any_stage_leaks_nothing(
    harness: CoordinatorHarness, stage: str, way: str
) -> None:
    req, keys = harness.stored(4.5)
    harness.arrive(req)
    reached = STAGES.index(stage)
    if reached >= 1:
        harness.coordinator.poll([])
    if reached >= 3:
        harness.open(*keys)
    if reached >= 4:
        harness.coordinator.poll([])  # not served: stays on the host
        load = harness.coordinator.live[req.rid]
        assert sorted(load.memory.staged) == [0, 1, 2, 3]
        assert harness.staging.free == harness.staging.capacity - 4
    if reached >= 5:
        harness.coordinator.poll([req.rid])
        assert harness.coordinator.reclaimable_tokens == 4 * BLOCK
    if reached >= 6:
        harness.coordinator.attach_islands(req, harness.attach)
        assert req.prefix_len == 4 * BLOCK
    if way == "flush":
        harness.coordinator.emptied()
    elif way == "again":
        harness.arrive(req)  # retracted: comes back under its id
    harness.all_back()
    values = harness.counters.snapshot()
    wasted = {label: n for (name, label), n in values.items() if name == "wasted_bytes" and n}
    if stage in ("in the outbox", "staged", "placed"):
        # Who comes back in time finds the bytes that it left; else they are read again.
        whole = 4 * harness.kv.layout.block_bytes
        assert wasted["ended"] in ((whole, 2 * whole) if way == "again" else (whole,))


def test_coordinator_prefix_matched_meanwhile_frees_its_landed_blocks(
    harness: CoordinatorHarness,
) -> None:
    req = harness.readable(4.5)
    harness.arrive(req)
    harness.coordinator.poll([])
    harness.coordinator.poll([req.rid])
    assert harness.coordinator.reclaimable_tokens == 4 * BLOCK
    req.prefix_len = 40
    harness.coordinator.attach_islands(req, harness.attach)
    assert req.prefix_len == 64
    assert harness.coordinator.reclaimable_tokens == 0
    assert sum(len(s) for s in req.owned) == 24
    assert (
        harness.counters.snapshot()["wasted_bytes", "in_tree"] == 2 * harness.kv.layout.block_bytes
    )


# ---- another rank ----

# Where the 4 blocks of the only request stand in what is reduced.
LANDED_AT, KEPT_AT, STORED_AT = 116, 120, 124


def test_coordinator_block_missing_on_a_peer_waits_until_overtaken(
    two: CoordinatorHarness,
) -> None:
    req = two.readable(4.5)

    def lags(numbers: torch.Tensor) -> None:
        numbers[LANDED_AT : LANDED_AT + 4] = 0

    two.peer = lags
    two.arrive(req)
    for _ in range(3):
        two.coordinator.poll([req.rid])
    load = two.coordinator.live[req.rid]
    assert sorted(load.local.fetched) == [0, 1, 2, 3]
    assert load.reserved == [0, 1, 2, 3]
    two.coordinator.attach_islands(req, two.attach)
    two.coordinator.claimed(req, 32)
    req.prefix_len = 32
    assert sorted(load.local.fetched) == [2, 3]
    assert two.counters.snapshot()["wasted_bytes", "overtaken"] == 2 * two.kv.layout.block_bytes
    two.peer = None
    two.coordinator.poll([req.rid])
    assert sorted(load.memory.slots) == [2, 3]


def test_coordinator_block_missing_on_a_peer_is_freed_at_the_end(two: CoordinatorHarness) -> None:
    req = two.readable(4.5)

    def lags(numbers: torch.Tensor) -> None:
        numbers[LANDED_AT : LANDED_AT + 4] = 0

    two.peer = lags
    two.arrive(req)
    two.coordinator.poll([req.rid])
    two.coordinator.poll([req.rid])
    two.all_back()
    assert two.counters.snapshot()["wasted_bytes", "ended"] == 4 * two.kv.layout.block_bytes


def test_coordinator_block_lost_on_a_peer_is_computed(two: CoordinatorHarness) -> None:
    req = two.readable(4.5)

    def has_lost_the_second(numbers: torch.Tensor) -> None:
        if len(numbers) > KEPT_AT:
            numbers[LANDED_AT + 1] = numbers[KEPT_AT + 1] = 0

    two.peer = has_lost_the_second
    two.arrive(req)
    for _ in range(3):
        two.coordinator.poll([req.rid])
    assert two.counters.snapshot()["wasted_bytes", "peer"] == two.kv.layout.block_bytes
    assert not two.step(req)  # block 0 is attached, block 1 computed
    assert req.prefix_len == 32
    assert two.step(req)
    assert req.customized_info["cake"][0]["loaded_tokens"] == 48


def test_coordinator_block_that_comes_as_loads_stop_gives_its_buffer_back() -> None:
    with CoordinatorHarness(ranks=True, min_load_tokens=4 * BLOCK) as two:
        req, keys = two.stored(4.5)

        def lacks_a_block(numbers: torch.Tensor) -> None:
            if len(numbers) > STORED_AT:
                numbers[STORED_AT] = 0
                two.open(*keys)  # this rank has taken its events of this poll

        two.peer = lacks_a_block
        two.arrive(req)
        two.coordinator.poll([req.rid])
        two.coordinator.poll([req.rid])
        assert two.staging.free == two.staging.capacity


# ---- anything in any order ----

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "step", "step", "poll", "open", "fail", "leave", "reclaim", "evict", "flush"]
        ),
        st.integers(0, 2),
        st.integers(0, 6),
    ),
    min_size=5,
    max_size=50,
)


@settings(max_examples=120)
@given(
    actions=ACTIONS,
    mode=st.sampled_from(["auto", "both", "compute", "load"]),
    staging=st.integers(3, 6),
    tight=st.booleans(),
    stored=st.one_of(st.just(set(range(6))), st.sets(st.integers(0, 5))),
    quick=st.booleans(),
    blocks=st.tuples(*[st.sampled_from([0.5, 2, 4.25, 6])] * 3),
)
def test_coordinator_random_actions_leak_nothing_and_fill_every_token(
    actions: list,
    mode: str,
    staging: int,
    tight: bool,
    stored: set[int],
    quick: bool,
    blocks: tuple,
) -> None:
    slots = (9 if tight else 24) * BLOCK
    with CoordinatorHarness(slots=slots, staging=staging, mode=mode) as harness:
        drive_coordinator(harness, actions, stored, quick, blocks)


def drive_coordinator(
    harness: CoordinatorHarness, actions: list, stored: set[int], quick: bool, blocks: tuple
) -> None:
    reqs = [req_of(n, rid=str(i)) for i, n in enumerate(blocks)]
    longest = array("q", range(6 * BLOCK))
    keys = harness.fill(longest, stored)
    if quick:
        harness.open(*keys)
    live: list[FakeReq] = []
    running: FakeReq | None = None
    for action, who, number in actions:
        req = reqs[who]
        if action == "arrive" and req not in live:
            total = len(req.origin_input_ids)
            matched = min(number * PAGE, (total - 1) // PAGE * PAGE)
            if harness.allocator.available_size() < matched:
                continue
            req.customized_info = None
            live.append(req)
            harness.arrive(req, matched)
        elif action == "step" and live:
            # SGLang prefills one chunked request at a time.
            running = running if running in live else live[0]
            if running.customized_info is None and harness.step(running):
                check_report(running)
                live.remove(running)
                harness.leave(running)
        elif action == "poll":
            chunked = running.rid if running in live else None
            harness.coordinator.poll([r.rid for r in live], chunked)
        elif action == "evict" and req in live and req is not running:
            harness.evict(req, min(number * PAGE, req.prefix_len))
        elif action == "open" and number < 6:
            harness.open(keys[number])
        elif action == "fail" and number < 6:
            harness.faulty.lose(keys[number])
        elif action == "leave" and req in live:
            live.remove(req)
            harness.leave(req)
        elif action == "reclaim":
            before = harness.allocator.available_size()
            freed = harness.coordinator.reclaim(number * PAGE)
            assert harness.allocator.available_size() == before + freed
        elif action == "flush" and number == 0:
            harness.coordinator.emptied()
            while live:
                harness.leave(live.pop())
        owned = sum(len(s) for r in reqs for s in r.owned)
        assert (
            harness.allocator.available_size() + harness.coordinator.reclaimable_tokens + owned
            == harness.size
        )
    harness.open(*keys)
    for req in list(live):
        for _ in range(200):
            harness.coordinator.poll([r.rid for r in live])
            if harness.step(req):
                check_report(req)
                break
            harness.settle()
        else:
            raise AssertionError("a request does not get on")
        live.remove(req)
        harness.leave(req)


def check_report(req: FakeReq) -> None:
    [report] = (req.customized_info or {})["cake"]
    got = report["computed_tokens"] + report["loaded_tokens"] + report["matched_tokens"]
    assert got == len(req.origin_input_ids)


def test_coordinator_request_that_failed_to_arrive_is_no_request_of_its_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant that comes anew begins with the lowest count of those that have requests."""
    with CoordinatorHarness(priority="fair") as harness:
        one, failed, new = req_of(4.5, "one"), req_of(4.5, "failed"), req_of(4.5, "new")
        one.cache_salt, failed.cache_salt, new.cache_salt = "a", "b", "c"
        harness.arrive(one)
        with monkeypatch.context() as patch:
            patch.setattr(PromptRecord, "device_work", property(lambda record: 1 / 0))
            with pytest.raises(ZeroDivisionError):
                harness.arrive(failed)
        harness.coordinator.claimed(one, ROUND_TOKENS + 1)
        assert harness.coordinator.queue_entry(new).tenant_round == 1


@pytest.mark.parametrize("why", ["embeddings", "store", "namespace", "id"])
def test_coordinator_fair_priority_charges_prompts_without_keys(why: str) -> None:
    with CoordinatorHarness(priority="fair") as harness:
        coordinator = harness.coordinator
        same: Any = req_of(4.5, "same")
        same.finished = lambda: False
        harness.arrive(same)
        coordinator.store_detached = why == "store"
        if why == "namespace":
            coordinator.rebase(None, suspended=False)
        poor = req_of(4.5, "poor")
        poor.cache_salt = "poor"
        rich: Any = req_of(4.5, "same" if why == "id" else "rich")
        rich.cache_salt = "rich"
        if why == "embeddings":
            rich.input_embeds = [[0.0]]
        for req in (poor, rich):
            harness.arrive(req)
        harness.poll(same, poor, rich)
        coordinator.claimed(rich, ROUND_TOKENS + 1)
        assert coordinator.record(rich) is None
        assert coordinator.queue_entry(rich).tenant_round == 1
        assert coordinator.queue_entry(poor).tenant_round == 0
        coordinator.claimed(poor, 2 * ROUND_TOKENS)
        harness.leave(same)
        harness.poll(poor)  # the prefill of the other one is over
        new = req_of(4.5, "new")
        new.cache_salt = "new"
        assert coordinator.queue_entry(new).tenant_round == 2, "as the one tenant that is left"


def test_coordinator_fair_priority_charges_the_tenant_that_computed() -> None:
    with CoordinatorHarness(priority="fair") as harness:
        one, other = req_of(4.5, "one"), req_of(4.5, "other")
        one.cache_salt, other.cache_salt = "a", "b"
        for req in (one, other):
            harness.arrive(req)
        rounds = [harness.coordinator.queue_entry(req).tenant_round for req in (one, other)]
        assert rounds[0] == rounds[1]
        one.prefix_len = 0
        harness.coordinator.claimed(one, ROUND_TOKENS + 1)
        rounds = [harness.coordinator.queue_entry(req).tenant_round for req in (one, other)]
        assert rounds[0] > rounds[1]


# ---- prompts that pass ----


class Passing(CoordinatorHarness):
    """A step of 64 tokens takes 641 s. Two blocks of the prompt `loaded` are loaded in 200 s, in
    which a step has time for 19 tokens: four pages."""

    def __init__(self, *, block_s: float = 100.0, **settings: Any) -> None:
        load = LoadCost(0.0, block_s)
        cost = PrefillCost(1.0, 10.0, 0.0, error=0.02)
        super().__init__(**{"mode": "auto", **settings}, prefill=cost, load=load)
        self.loader.recall([replace(load, error=0.0)])
        self.loaded, self.keys = self.stored(2.5, "loaded")
        self.other = FakeReq("other", array("q", range(5000, 5080)))

    def limit(self, *arrivals: FakeReq) -> int | None:
        """Of the other one, in a step after these arrivals."""
        for req in arrivals:
            self.arrive(req)
            self.poll(*self.arrived)
        return self.coordinator.passing_tokens(self.other, 64)


def test_coordinator_later_prompt_has_a_limit_while_an_earlier_one_is_loaded() -> None:
    with Passing() as harness:
        assert harness.limit(harness.loaded, harness.other) == 4 * PAGE
        assert harness.coordinator.passing_tokens(harness.loaded, 64) is None
        harness.coordinator.memory_checked(harness.loaded, False)
        harness.poll(*harness.arrived)
        assert harness.limit() is None, "it could not be admitted when its loads are over"


def test_coordinator_prompt_that_a_decode_server_is_not_ready_for_limits_no_other() -> None:
    """It could not be admitted when its loads are over."""
    with Passing() as harness:
        for req in harness.loaded, harness.other:
            harness.arrive(req)
        rids = ["other", "loaded"]
        for _ in range(3):
            harness.coordinator.poll(rids, handshaking={"loaded"})
            harness.settle()
        assert harness.limit() is None
        assert not harness.coordinator.keeps_far_waiting
        harness.coordinator.poll(rids)
        assert harness.limit() == 4 * PAGE
        assert harness.coordinator.keeps_far_waiting


def test_coordinator_scheduler_sleeps_no_longer_for_a_prompt_without_a_part_than_loads_take() -> (
    None
):
    with Passing() as harness:
        harness.limit(harness.loaded, harness.other)
        assert harness.coordinator.loads_over_in_s == math.inf
        harness.coordinator.held_back()
        assert harness.coordinator.waiting
        assert 0 < harness.coordinator.loads_over_in_s < 300.0
        harness.poll(*harness.arrived)
        assert harness.coordinator.loads_over_in_s == math.inf


def test_coordinator_requeued_prompt_has_no_limit_for_loads_of_a_later_one() -> None:
    with Passing() as harness:
        assert harness.limit(harness.other, harness.loaded) is None
        harness.coordinator.requeued(harness.other)
        assert harness.limit() is None


@pytest.mark.parametrize("mode", ["auto", "both", "load"])
@pytest.mark.parametrize("landed", [(0,), (0, 1), (0, 2), (2,), (0, 1, 2, 3)])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.usefixtures("stopped_clock")
def test_coordinator_prompt_would_wait_as_planned_once_its_island_has_joined_the_tree(
    mode: str, landed: tuple[int, ...], whole: bool
) -> None:
    load = LoadCost(0.0, 0.01, error=0.0, depth=4)
    with CoordinatorHarness(mode=mode, load=load) as harness:
        req, keys = harness.stored(4.5)
        harness.arrive(req)
        harness.poll(req)
        harness.open(*(keys[block] for block in landed))
        harness.poll(req, times=2)
        would_wait = harness.coordinator.would_wait(req, CHUNK, whole=whole)
        harness.coordinator.attach_islands(req, harness.attach)
        assert (req.prefix_len > 0) == (landed[0] == 0)
        step = harness.coordinator.plan(req, CHUNK)
        total = len(req.origin_input_ids)
        stop = min(total, req.prefix_len + CHUNK) if step is None else step.stop
        assert would_wait == (stop == req.prefix_len or (whole and stop < total))


def test_coordinator_prompt_whose_limit_is_less_than_a_page_would_wait() -> None:
    for block_s, limit_tokens in ((100.0, 4 * PAGE), (15.0, 0)):  # time for 19 tokens, and for 2
        with Passing(block_s=block_s) as harness:
            assert harness.limit(harness.loaded, harness.other) == limit_tokens
            assert harness.coordinator.would_wait(harness.other, 64) == (limit_tokens == 0)


def test_coordinator_no_limit_in_another_mode() -> None:
    with Passing(mode="load") as harness:
        assert harness.limit(harness.loaded, harness.other) is None


def test_coordinator_later_prompt_has_a_limit_while_loads_are_overdue() -> None:
    with Passing(block_s=1e-9) as harness:
        assert harness.limit(harness.loaded, harness.other) == 0


def test_coordinator_earlier_prompt_has_no_limit() -> None:
    with Passing() as harness:
        assert harness.limit(harness.other, harness.loaded) is None


def test_coordinator_later_prompt_whose_blocks_have_landed_keeps_the_device_from_none(
    stopped_clock: Any,
) -> None:
    cost, load = PrefillCost(1.0, 10.0, 0.0, error=0.0), LoadCost(0.0, 15.0, error=0.0, depth=8)
    with CoordinatorHarness(mode="auto", prefill=cost, load=load, staging=12) as harness:
        coordinator = harness.coordinator
        harness.loader.recall([load])
        earlier, _ = harness.stored(2.5, "earlier")
        later = other_of(4.5, "later")
        keys = harness.fill(later.origin_input_ids, {0, 1, 2, 3})
        for req in (earlier, later):
            harness.arrive(req)
        harness.poll(earlier, later)
        step = coordinator.plan(earlier, 64)
        assert step is not None
        assert step.wait
        assert coordinator.keeps_device(later, BLOCK)
        harness.open(*keys)
        harness.poll(earlier, later)
        coordinator.plan(earlier, 64)
        assert coordinator.live["later"].meet.landed_blocks == 4
        assert not coordinator.keeps_device(later, BLOCK)


def test_coordinator_prompts_that_were_aborted_leave_no_slack_to_later_ones() -> None:
    with Passing() as harness:
        long, behind = FakeReq("long", array("q", range(9000))), FakeReq("x", array("q", range(64)))
        for req in long, behind:
            harness.arrive(req)
        harness.poll(long, behind)
        harness.leave(long)
        harness.arrive(harness.loaded)
        harness.poll(behind, harness.loaded, times=3)
        behind_s = 64 * 10.0 + 1.0  # to compute what is still before it
        assert harness.coordinator.queue_entry(harness.loaded).slack_s == pytest.approx(behind_s)


def test_coordinator_prompts_with_one_prefix_give_no_slack_for_what_the_tree_has_by_then() -> None:
    with Passing() as harness:
        tokens = array("q", range(1000, 1400))
        first, same = (FakeReq(rid, tokens) for rid in ("first", "same"))
        for req in first, same:
            harness.arrive(req)
        harness.poll(first, same, times=3)
        same.prefix_len = 396
        harness.coordinator.attach_islands(same, harness.attach)
        harness.arrive(harness.loaded)
        harness.poll(first, same, harness.loaded, times=3)
        works = work_of(0, 400), work_of(396, 400)
        before_s = sum(map(harness.step_costs.queue_s, works))
        slack_s = harness.coordinator.queue_entry(harness.loaded).slack_s
        assert slack_s == pytest.approx(before_s)


def test_coordinator_prompts_that_a_decode_server_is_not_ready_for_give_no_slack() -> None:
    with Passing() as harness:
        early = FakeReq("early", array("q", range(9000)))
        harness.arrive(early)
        harness.arrive(harness.loaded)
        for _ in range(3):
            harness.coordinator.poll(["loaded", "early"], handshaking={"early"})
            harness.settle()
        assert harness.coordinator.queue_entry(harness.loaded).slack_s == pytest.approx(0.0)
        harness.poll(harness.loaded, early)
        harness.arrive(harness.other)
        harness.poll(harness.loaded, early, harness.other)
        assert harness.coordinator.queue_entry(harness.loaded).slack_s == pytest.approx(0.0)


def test_coordinator_slack_is_the_same_on_ranks_whose_own_clocks_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without prompts, ranks share no clock. Those of two machines differ by years."""
    vote = RankConsensus.vote
    slacks_s = []
    for own_s in 1e-3, 1e8 / 3:
        shared_s = itertools.count(100.0, 0.1)

        def known(
            *args: Any, now_s: float = own_s, shared: Any = shared_s, **facts: bool
        ) -> rank_consensus.Vote:
            found = vote(*args, **facts)
            return found._replace(now_s=next(shared) if found.alike else now_s)

        monkeypatch.setattr(RankConsensus, "vote", known)
        with Passing(ranks=True) as harness:
            harness.arrive(harness.other)
            harness.poll(harness.other)
            harness.coordinator.held_back()
            harness.poll()
            harness.arrive(harness.loaded)
            for _ in range(3):
                harness.poll(harness.loaded)
                harness.coordinator.held_back()
            entry = harness.coordinator.queue_entry(harness.loaded)
            assert entry.waits_for_loads
            slacks_s.append(entry.slack_s)
    assert slacks_s[0] == slacks_s[1]


def test_coordinator_priority_that_does_not_count_gives_no_prompt_a_longer_step() -> None:
    """SGLang takes priorities of clients also where it does not schedule by them."""
    with Passing() as harness:
        harness.other.priority = 1
        assert harness.limit(harness.loaded, harness.other) == 4 * PAGE


def test_coordinator_prompt_of_another_priority_or_turn_has_no_limit() -> None:
    with Passing() as harness:
        harness.coordinator.priority_sign = -1
        harness.other.priority = 1
        assert harness.limit(harness.loaded, harness.other) is None
    with Passing(priority="fair") as harness:
        harness.other.cache_salt = "another tenant"
        assert harness.limit(harness.loaded, harness.other) is None


@pytest.mark.parametrize("preempted", [False, True])
def test_coordinator_last_step_of_a_loaded_prompt_is_not_longer_for_others(
    preempted: bool,
) -> None:
    """For one that came later, or an earlier one that it preempted in this step."""
    with Passing() as harness:
        harness.open(*harness.keys)
        arrivals = (harness.loaded, harness.other)
        assert harness.limit(*(reversed(arrivals) if preempted else arrivals)) is None
        harness.poll(*harness.arrived, times=3)
        harness.coordinator.step_costs.scheduling(decodes=0)
        if preempted:
            harness.coordinator.requeued(harness.other)
        assert harness.step(harness.loaded)
        assert harness.limit() == 0
        harness.poll(*harness.arrived)
        assert harness.limit() is None, "that was the last step"


def test_coordinator_what_another_prompt_brought_and_lost_again_is_not_reported() -> None:
    with CoordinatorHarness(mode="compute") as harness:
        req = req_of(8.5)
        harness.arrive(req)
        harness.poll(req)
        harness.step(req)
        computed = req.prefix_len
        harness.coordinator.requeued(req)
        harness.grow(req, 6 * BLOCK)
        harness.poll(req)
        harness.evict(req, kept=computed)
        harness.poll(req)
        while not harness.step(req):
            harness.poll(req)
        [report] = req.customized_info["cake"]
        assert report["matched_tokens"] == 0
        assert report["computed_tokens"] == 8.5 * BLOCK
