"""Trace replay: its definitions, against a plain simulation, and the bounds beside it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.loading.cost_model import PrefillCost
from sglang_cake.simulator.eviction_replay import (
    SHAPES,
    BeladyPolicy,
    Replay,
    ReplayShape,
    SavedTime,
    seconds_bound,
)
from sglang_cake.simulator.request_traces import Trace, TraceRequest, next_uses
from sglang_cake.stores.eviction import POLICIES, new_policy
from sglang_cake.stores.eviction.policy import AccessContext, Benefit, Usage, admits
from sglang_cake.stores.eviction.reuse_policies import WorkloadPolicy

SIZE = 4  # tokens of a block


@st.composite
def traces(draw, most=25, longest=6):
    """Prompts that begin like earlier ones, as `hash_ids` do: equal ids have equal prefixes."""
    paths, requests, now_s = [()], [], 0.0
    names = itertools.count()
    for _ in range(draw(st.integers(1, most))):
        base = draw(st.sampled_from(paths))
        start = base[: draw(st.integers(0, len(base)))]
        more = draw(st.integers(0 if start else 1, max(0, longest - len(start)) or 0))
        path = (*start, *(next(names) for _ in range(more)))
        if not path:
            continue
        paths.append(path)
        now_s += draw(st.sampled_from([0.0, 1.0, 30.0]))
        workload = draw(st.sampled_from(["", "chat"]))
        tokens = SIZE * len(path) - draw(st.integers(0, SIZE - 1))
        requests.append(TraceRequest(now_s, tokens, path, workload))
    return Trace(SIZE, tuple(requests))


def plain_lru(trace, capacity, leaf):
    """The definitions of replay.py once more; returns (hits, islands, what was evicted)."""
    order, hits, islands, gone = [], 0, 0, []  # order: least recent first
    parent = {}
    for request in trace.requests:
        for first, second in itertools.pairwise(request.blocks):
            parent[second] = first
        there = [block in order for block in request.blocks]
        hits += next((i for i, yes in enumerate(there) if not yes), len(there))
        islands += sum(there)
        missing = [b for b, yes in zip(request.blocks, there, strict=True) if not yes]
        while len(order) + len(missing) > capacity:
            for block in order:
                if block in request.blocks:
                    continue
                if leaf and any(parent.get(other) == block for other in order):
                    continue
                break
            else:
                break
            order.remove(block)
            gone.append(block)
        missing = missing[: capacity - len(order)]
        for block in reversed(request.blocks):
            if block in order:
                order.remove(block)
            elif block not in missing:
                continue
            order.append(block)
    return hits, islands, gone


class RecordingPolicy:
    """A policy whose victims are written down."""

    def __init__(self, policy):
        self._policy, self.popped = policy, []

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def pop(self, now_s):
        popped = self._policy.pop(now_s)
        self.popped.append(popped and popped[1].ident)
        return popped


@given(trace=traces(), capacity=st.integers(1, 12), leaf=st.booleans())
def test_replay_lru_on_random_traces_matches_a_plain_simulation(trace, capacity, leaf):
    outcome = Replay(trace, new_policy("lru"), capacity, leaf=leaf).run()
    hits, islands, gone = plain_lru(trace, capacity, leaf)
    assert (outcome.hits, outcome.islands, outcome.evictions) == (hits, islands, len(gone))
    assert outcome.refs == trace.refs


@given(trace=traces(most=60), capacity=st.integers(1, 15))
def test_workload_policy_with_one_class_evicts_exactly_as_lru(trace, capacity):
    lru = RecordingPolicy(new_policy("lru"))
    of_one_class = WorkloadPolicy()
    of_one_class.class_of = lambda usage: ("", 1, 0)
    one = RecordingPolicy(of_one_class)
    by_lru, by_one = Replay(trace, lru, capacity).run(), Replay(trace, one, capacity).run()
    assert one.popped == lru.popped
    assert (by_one.hits, by_one.islands) == (by_lru.hits, by_lru.islands)


@given(trace=traces(), capacity=st.integers(1, 12), leaf=st.booleans(), data=st.data())
def test_replay_any_policy_stays_within_capacity_and_offline_optimum(trace, capacity, leaf, data):
    name = data.draw(st.sampled_from(sorted(POLICIES)))
    clocks = [SavedTime(shape, SIZE) for shape in SHAPES.values()]
    policy = new_policy(name)
    replay = Replay(trace, policy, capacity, clocks=clocks, leaf=leaf)
    for _ in replay.steps():
        assert len(policy) <= capacity
    longest = max(len(request.blocks) for request in trace.requests)
    outcome = replay.outcome
    assert outcome.hits <= outcome.islands
    if longest <= capacity:  # a longer prompt is cut, and by whom is not Belady's to say
        best = Replay(trace, BeladyPolicy(trace), capacity).run()
        assert outcome.islands <= best.islands
        assert best.hits == best.islands
    for clock, saved_s in zip(clocks, outcome.saved_s, strict=True):
        assert 0 <= saved_s <= seconds_bound(trace, capacity, clock) * (1 + 1e-9)


def best_islands(trace, capacity, index=0, resident=frozenset()):
    """By trying every choice."""
    if index == len(trace.requests):
        return 0
    blocks = frozenset(trace.requests[index].blocks)
    others, room = resident - blocks, capacity - len(blocks)
    kept = [frozenset(some) for some in itertools.combinations(others, min(room, len(others)))]
    later = max(best_islands(trace, capacity, index + 1, blocks | some) for some in kept)
    return len(resident & blocks) + later


@settings(max_examples=60)
@given(trace=traces(most=6, longest=3), capacity=st.integers(3, 6))
def test_belady_policy_on_small_traces_matches_exhaustive_search(trace, capacity):
    assert Replay(trace, BeladyPolicy(trace), capacity).run().islands == best_islands(
        trace, capacity
    )


def test_replay_prompt_longer_than_the_capacity_keeps_its_head():
    trace = Trace(SIZE, (TraceRequest(0.0, 20, (1, 2, 3, 4, 5)), TraceRequest(1.0, 8, (1, 2))))
    outcome = Replay(trace, new_policy("lru"), 3).run()
    assert (outcome.hits, outcome.written, outcome.evictions) == (2, 3, 0)


def test_replay_partial_last_block_counts_only_its_tokens():
    trace = Trace(SIZE, (TraceRequest(0.0, 5, (1, 2)), TraceRequest(1.0, 5, (1, 2))))
    outcome = Replay(trace, new_policy("lru"), 3).run()
    assert outcome.figures()["byte_hit_ratio"] == 5 / 10
    assert outcome.figures()["second_half_hit_ratio"] == 1.0


def test_seconds_bound_partial_last_block_that_takes_long_to_load_is_left_out():
    """A cache without the last block saves more than one with it."""
    trace = Trace(
        SIZE, tuple(TraceRequest(float(i), 8 * SIZE + 1, tuple(range(9))) for i in range(3))
    )
    slow = clock(load_s=2.0)
    without, whole = (
        Replay(trace, new_policy("lru"), capacity, clocks=[slow]).run().saved_s[0]
        for capacity in (8, 9)
    )
    assert without > whole
    for capacity in (8, 9):
        assert without <= seconds_bound(trace, capacity, slow) * (1 + 1e-9)


def test_next_uses_of_a_trace_are_the_next_requests_of_each_block():
    trace = Trace(SIZE, tuple(TraceRequest(0.0, 8, blocks) for blocks in ((1, 2), (3,), (1, 3))))
    assert list(next_uses(trace)) == [(2, 3), (2,), (3, 3)]


LINK = st.sampled_from([1e-6, 0.5, 1.0, 3.0, 1e6])


def usages(policy):
    """Usage of every block, which is evicted."""
    popped = []
    while (block := policy.pop(0.0)) is not None:
        popped.append(block[1])
    return popped


def clock(load_s, pair_s=0.01):
    return SavedTime(ReplayShape(PrefillCost(7.0, 0.2, pair_s), load_s / SIZE), SIZE)


@given(stored=st.lists(st.booleans(), max_size=12), load_s=LINK)
def test_saved_time_of_any_stored_set_is_between_zero_and_its_compute(stored, load_s):
    one = clock(load_s)
    costs = one.block_s(len(stored), SIZE * len(stored))
    saved_s = one.saved_s(stored, SIZE * len(stored))
    there = sum(cost for cost, yes in zip(costs, stored, strict=True) if yes)
    assert -1e-9 <= saved_s <= there + 1e-9
    if load_s < 1e-5:
        assert saved_s == pytest.approx(there, abs=1e-3)
    if load_s > 1e5:
        assert saved_s == 0


@given(blocks=st.integers(1, 12), load_s=LINK)
def test_saved_time_of_a_fully_stored_prompt_uses_the_best_meeting_point(blocks, load_s):
    one = clock(load_s)
    costs = one.block_s(blocks, SIZE * blocks)
    best_s = min(max(sum(costs[:m]), (blocks - m) * load_s) for m in range(blocks + 1))
    took_s = sum(costs) - one.saved_s([True] * blocks, SIZE * blocks)
    assert took_s == pytest.approx(best_s)


def test_saved_time_hole_at_the_end_costs_its_own_compute():
    one = clock(1e-9)
    costs = one.block_s(3, 3 * SIZE)
    assert one.saved_s([True, True, False], 3 * SIZE) == pytest.approx(costs[0] + costs[1])
    assert costs[0] < costs[1] < costs[2]
    assert one.block_s(3, 2 * SIZE + 1)[2] < costs[0]  # one token of it


def test_replay_admission_refused_class_is_admitted_after_reuse():
    def request(at_s, blocks, workload):
        return TraceRequest(float(at_s), SIZE * len(blocks), tuple(blocks), workload)

    requests = []
    for at_s in range(0, 4000, 4):  # "batch" comes once, for as long as a window; "chat" again
        if at_s < 2000:
            requests.append(request(at_s, (10 * at_s, 10 * at_s + 1), "batch"))
        else:  # and now every 40 s
            requests.append(request(at_s, (3_000_000 + at_s % 40, 4_000_000 + at_s % 40), "batch"))
        requests.append(request(at_s, (1_000_000 + at_s % 40, 2_000_000 + at_s % 40), "chat"))
    policy = WorkloadPolicy()
    replay = Replay(Trace(SIZE, tuple(requests)), policy, 10_000, min_benefit_ratio=1.0)
    refused = [
        not admits(policy, Usage(1, 0.0, 0.0, 0, 0, AccessContext("batch")), Benefit(), 1.0)
        for _ in replay.steps()
    ]
    half = len(refused) // 2
    assert sum(refused[: half // 2]) > 0  # found out from what it saw
    assert all(refused[half // 2 : half])
    assert refused[half]
    assert not refused[-1]  # found out, though none of it was stored
    assert replay.outcome.hits > 0


@pytest.mark.parametrize(("told", "turns"), [(False, [1, 1, 2]), (True, [3, 1, 7])])
def test_replay_turns_inferred_or_given_reach_the_policy(told, turns):
    trace = Trace(
        16,
        (
            TraceRequest(1.0, 16, (1,), "chat", 3),
            TraceRequest(2.0, 16, (2,), "chat", None),  # of this one it tells nothing
            TraceRequest(3.0, 32, (1, 3), "chat", 7),
        ),
    )
    policy = new_policy("lru")
    Replay(trace, policy, 10, told_turns=told).run()
    found = {usage.ident: usage.context.turn for usage in usages(policy)}
    assert [found[2], found[3]] == turns[1:]
    Replay(Trace(16, trace.requests[:1]), policy := new_policy("lru"), 10, told_turns=told).run()
    assert [usage.context.turn for usage in usages(policy)] == turns[:1]


def test_replay_prompt_whose_last_block_becomes_full_is_the_next_turn():
    requests = (TraceRequest(1.0, 40, (1, 2, 3)), TraceRequest(2.0, 60, (1, 2, 4, 5)))
    policy = new_policy("lru")
    Replay(Trace(16, requests), policy, 10).run()
    assert {usage.ident: usage.context.turn for usage in usages(policy)} == {
        1: 2,
        2: 2,
        3: 1,
        4: 2,
        5: 2,
    }
