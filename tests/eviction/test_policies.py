"""Who goes first under each policy, against plain models of all of them."""

import gc
import math
import tracemalloc
from collections import OrderedDict

import models
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.stores.eviction import POLICIES, classic, new_policy, queues
from sglang_cake.stores.eviction.policy import AccessContext, Benefit, Usage
from sglang_cake.stores.eviction.reuse_model import ReuseFit
from sglang_cake.stores.eviction.reuse_policies import (
    LOG_BENEFIT_STEP,
    CakePolicy,
    CakePrefixPolicy,
    WorkloadPolicy,
)

BENEFIT = Benefit(load_s=0.02)
LIFE_S = 7.0
FITS = {
    ("chat", 1, 0): ReuseFit(0.31, 1 / 17, 100),
    ("chat", 1, 1): ReuseFit(0.31, 1 / 17, 90),  # as likely as the first: offsets decide
    ("chat", 2, 0): ReuseFit(0.77, 1 / 5, 100),
    ("chat", 2, 1): ReuseFit(0.71, 1 / 7, 100),
    ("file", 1, 0): ReuseFit(0.53, 1 / 41, 100),
    ("file", 1, 1): ReuseFit(0.59, 1 / 101, 100),
    ("file", 2, 0): ReuseFit(0.53, 1 / 41, 90),
    ("file", 2, 1): ReuseFit(0.03, 1 / 3, 100),
}
POOLED = ReuseFit(0.47, 1 / 13, 800)
CONTEXTS = st.builds(
    lambda request_class, position, more: AccessContext(
        *request_class[:2], position, position + 1 + more
    ),
    st.sampled_from(sorted(FITS)),
    st.integers(0, 40),
    st.integers(0, 40),
)
# (step, ident, seconds since the last step, context); a block that comes back has a new number.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "touch", "touch", "remove", "pop", "pop"]),
        st.integers(0, 11),
        st.sampled_from([0.0, 0.0, 1.0, 3.0]),
        CONTEXTS,
    ),
    max_size=150,
)


def fitted(policy):
    policy.model.fits.update(FITS)
    policy.model.pooled = POOLED
    policy.life_s = LIFE_S
    return policy


def power(usage):
    saved_s = BENEFIT.saved_s(usage.context.position, usage.context.reach)
    return round(math.log(saved_s / usage.stored_bytes) / LOG_BENEFIT_STEP)


def prefix_power(usage):
    """The benefit of a whole prompt, block by block."""
    reach = usage.context.reach
    saved_s = sum(map(BENEFIT.compute_s, range(reach)))
    meet = BENEFIT.meeting_block(reach)
    saved_s -= sum(map(BENEFIT.compute_s, range(int(meet))))
    saved_s -= (meet % 1) * BENEFIT.compute_s(int(meet) - 0.5 + (meet % 1) / 2)
    return round(math.log(saved_s / reach / usage.stored_bytes) / 2 / LOG_BENEFIT_STEP)


PAIRS = {
    "fifo": lambda: (
        new_policy("fifo"),
        models.Ranked(lambda block, usage: (usage.created_s, block)),
    ),
    "lru": lambda: (new_policy("lru"), models.Ranked(lambda block, usage: (usage.used_s,))),
    "lfu": lambda: (
        new_policy("lfu"),
        models.Ranked(lambda block, usage: (usage.uses, usage.used_s)),
    ),
    "gdfs": lambda: (new_policy("gdfs", BENEFIT), models.Gdfs(BENEFIT)),
    "s3fifo": lambda: (new_policy("s3fifo"), models.S3Fifo()),
    "arc": lambda: (new_policy("arc"), models.Arc()),
    "workload": lambda: (
        fitted(WorkloadPolicy()),
        models.ByReuse(
            FITS, POOLED, LIFE_S, lambda usage, chance: (chance, -usage.context.position)
        ),
    ),
    "cake-prefix": lambda: (
        fitted(CakePrefixPolicy(BENEFIT)),
        models.ByReuse(
            FITS,
            POOLED,
            LIFE_S,
            lambda usage, chance: (chance + prefix_power(usage) * LOG_BENEFIT_STEP,),
        ),
    ),
    "cake": lambda: (
        fitted(CakePolicy(BENEFIT)),
        models.ByReuse(
            FITS,
            POOLED,
            LIFE_S,
            lambda usage, chance: (chance + power(usage) * LOG_BENEFIT_STEP,),
        ),
    ),
}


def test_eviction_policies_all_have_a_reference_model():
    assert PAIRS.keys() == POLICIES.keys()


def change(policies, there, numbers, step, ident, now_s, context):
    """Add a block to all policies, touch it or remove it. Args: there: their blocks, by ident."""
    if step == "add" and ident not in there:
        there[ident] = next(numbers)
        for each in policies:
            each.add(there[ident], Usage(100 + ident, now_s, now_s, 0, ident, context))
    elif step == "touch":
        for each in policies:
            each.touch(there.get(ident, -1), now_s, 1 + ident % 2, context)
    elif step == "remove":
        for each in policies:
            each.remove(there.get(ident, -1))
        there.pop(ident, None)


@pytest.mark.parametrize("name", PAIRS)
@given(steps=STEPS)
def test_eviction_policy_random_steps_match_its_reference_model(name, steps):
    """Those that go by reuse look at one block of each class, their model at all blocks. That is
    the same since requests touch their last block first: who breaks that within a class is given a
    later time."""
    policy, model = PAIRS[name]()
    numbers, there, now_s, last = iter(range(10_000)), {}, 100.0, {}
    for step, ident, later_s, context in steps:
        if step in ("add", "touch"):
            group = (context.workload, context.turn, step)
            later_s = later_s or 0.5 * (context.position >= last.get(group, math.inf))
            last = ({} if later_s else last) | {group: context.position}
        elif later_s:
            last = {}
        now_s += later_s
        change((policy, model), there, numbers, step, ident, now_s, context)
        if step == "pop":
            popped = policy.pop(now_s)
            assert popped == model.pop(now_s)
            if popped:
                del there[popped[1].ident]
        assert len(policy) == len(there)
    for _ in range(len(there)):
        assert policy.pop(now_s) == model.pop(now_s)
    assert policy.pop(now_s) is None


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS)
def test_eviction_policy_block_given_back_changes_no_later_decision(name, steps):
    policy, other = new_policy(name, BENEFIT), new_policy(name, BENEFIT)
    numbers, there = iter(range(10_000)), {}
    for now_s, (step, ident, _, context) in enumerate(steps, 100):
        change((policy, other), there, numbers, step, ident, now_s, context)
        if step == "pop" and there:
            other.give_back(*other.pop(now_s))
            popped = policy.pop(now_s)
            assert other.pop(now_s) == popped
            del there[popped[1].ident]
    for _ in there:
        assert policy.pop(1e3) == other.pop(1e3)


def left(name, touched):
    policy = new_policy(name)
    for now_s, block in enumerate("abc"):
        policy.add(ord(block), Usage(1, now_s, now_s, 0, ord(block)))
    for now_s, block in enumerate(touched, 10):
        policy.touch(ord(block), now_s)
    return "".join(chr(policy.pop(20.0)[0]) for _ in "abc")


def test_eviction_policies_fifo_lru_lfu_evict_in_their_defined_order():
    assert left("fifo", "aab") == "abc"
    assert left("lru", "aab") == "cab"
    assert left("lfu", "aab") == "cba"


@pytest.mark.parametrize("name", ["lru", "workload", "cake"])
def test_eviction_policy_touch_in_the_past_keeps_the_access_time(name):
    policy = new_policy(name)
    policy.add(1, Usage(1, 5.0, 5.0, 0, 1))
    policy.add(2, Usage(1, 6.0, 6.0, 0, 2))
    policy.touch(2, 1.0)
    assert policy.pop(7.0)[0] == 1


COUNTS = st.sampled_from([0, 1, 2**31, 2**63 - 1])
TIMES_S = st.sampled_from([-1.7e308, -1.0, 0.0, 1e9, 1.7e308])


@pytest.mark.parametrize("name", POLICIES)
@given(
    st.lists(
        st.builds(
            Usage,
            COUNTS,
            TIMES_S,
            TIMES_S,
            COUNTS,
            COUNTS,
            st.builds(
                AccessContext,
                st.just("a"),
                COUNTS,
                COUNTS,
                st.sampled_from([1, 2**63 - 1]),
                COUNTS,
            ),
        )
    )
)
def test_eviction_policy_orders_blocks_of_any_facts_that_an_index_can_hold(name, usages):
    policy = new_policy(name, BENEFIT)
    for block, usage in enumerate(usages):
        policy.add(block, usage)
    assert sum(policy.pop(1e9) is not None for _ in usages) == len(usages)


@pytest.mark.parametrize("name", POLICIES)
def test_eviction_policy_popped_block_added_again_is_popped_again(name):
    policy = new_policy(name)
    policy.add(1, Usage(1, 5.0, 5.0, 0, 1))
    policy.add(*policy.pop(6.0))
    assert len(policy) == 1
    assert policy.pop(7.0)[0] == 1


@pytest.mark.parametrize("name", ["lru", "gdfs", "workload", "cake"])
def test_eviction_policy_repeated_adds_keep_its_memory_bounded(name):
    policy = new_policy(name)
    policy.add(-1, Usage(1, 0.0, 0.0, 0, 201))
    policy.add(-2, Usage(1, 0.0, 0.0, 1, 202))
    policy.pop(0.0)
    tracemalloc.start()
    try:
        for now_s in range(1, 5_000):
            policy.add(now_s % 100, Usage(1, now_s, now_s, 0, now_s % 100))
            policy.touch(-2, now_s)  # the only block that was read
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 450_000  # with an entry for each add they are more


def visited():
    """Objects, and references in them, that a full garbage collection visits."""
    return sum(1 + len(gc.get_referents(each)) for each in gc.get_objects())


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"s3fifo"}))
def test_eviction_policy_many_blocks_make_no_longer_garbage_collection(name):
    policy, blocks = new_policy(name, BENEFIT), 10_000
    before = visited()
    for block in range(blocks):
        context = AccessContext("abcd"[block % 4], 1, block % 100, 100)
        policy.add(block, Usage(1, block, block, block % 3, block, context))
    for block in range(0, blocks, 100):
        policy.touch(block, block + 0.5)
    assert visited() - before < blocks  # the sample of `ReuseModel` has a block in eight


@given(steps=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([-1, 0, 1, 2])), max_size=400))
def test_block_queue_random_steps_match_a_sorted_list(steps):
    queue, plain = queues.BlockQueue(most_in_part=3), []
    for tick, (block, rank) in enumerate(steps):
        plain = [entry for entry in plain if entry[2] != block]
        if rank < 0:
            queue.remove(block)
        else:
            queue.put(block, (rank, 0.0))
            plain.append((rank, tick, block))
        plain.sort()
        assert len(queue) == len(plain)
        assert (block in queue) == (rank >= 0)
        first = queue.first()
        assert first is None if not plain else first.block == plain[0][2]
    assert [queue.pop().block for _ in plain] == [entry[2] for entry in plain]
    assert queue.pop() is None


def cached_hits(policy, idents, size):
    """Which accesses hit a cache of `size` blocks that evicts one block for each miss."""
    there, hits = {}, []
    for block, ident in enumerate(idents):
        hits.append(ident in there)
        if hits[-1]:
            policy.touch(there[ident], block)
            continue
        if len(policy) == size:
            del there[policy.pop(block)[1].ident]
        there[ident] = block
        policy.add(block, Usage(1, block, block, 0, ident))
    return hits


@given(idents=st.lists(st.integers(0, 30), max_size=300), size=st.integers(1, 21))
def test_s3fifo_policy_random_accesses_hit_as_the_papers_algorithm(idents, size):
    assert cached_hits(new_policy("s3fifo"), idents, size) == models.s3fifo_hits(idents, size)


def test_s3fifo_policy_loop_longer_than_the_cache_hits():
    hits = cached_hits(new_policy("s3fifo"), [*range(150)] * 10, 100)
    assert sum(hits) > 500
    assert hits == models.s3fifo_hits([*range(150)] * 10, 100)


class CountedDict(OrderedDict):
    """Counts the blocks that leave the front of a queue."""

    taken = 0

    def popitem(self, last=True):
        CountedDict.taken += 1
        return super().popitem(last)


@given(reads=st.lists(st.integers(0, 59), max_size=300))
def test_s3fifo_policy_evictions_move_at_most_one_block_for_each_read(reads):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classic, "OrderedDict", CountedDict)
        policy = new_policy("s3fifo")
    for block in range(60):
        policy.add(block, Usage(1, 0.0, 0.0, 0, block))
    CountedDict.taken = 0
    for step, block in enumerate(reads):
        policy.touch(block, 1.0)
        if step % 5 == 0:
            policy.pop(2.0)
    evicted = 60 - len(policy)
    assert CountedDict.taken <= evicted + len(reads)


def test_arc_policy_readded_evicted_block_grows_the_recency_list():
    policy = new_policy("arc")
    for block in range(4):
        policy.add(block, Usage(1, 0.0, 0.0, 0, block))
    assert policy.pop(1.0)[0] == 0
    policy.add(4, Usage(1, 2.0, 2.0, 0, 0))  # what was block 0
    assert [policy.pop(3.0)[0] for _ in range(4)] == [1, 2, 4, 3]


def test_arc_policy_touch_without_a_use_is_no_second_use():
    policy = new_policy("arc")
    for block in range(3):
        policy.add(block, Usage(1, block, block, 0, block))
    policy.touch(0, 0.0, 0, AccessContext("summaries", 1, 0, 4))
    assert [policy.pop(10.0)[0] for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("blocks", [[(1, 3), (2, 9)], [(2, 9), (1, 3)]])
def test_workload_policy_equal_likelihood_evicts_the_later_position(blocks):
    policy, model = PAIRS["workload"]()
    for block, (turn, position) in enumerate(blocks):
        usage = Usage(1, 10.0, 10.0, 0, block, AccessContext("file", turn, position, 10))
        for each in (policy, model):
            each.add(block, usage)
    popped = policy.pop(12.0)
    assert popped == model.pop(12.0)
    assert popped[1].context.position == 9


def test_cake_policy_slow_link_evicts_the_head_of_the_prompt_first():
    slow = Benefit(load_s=1.0)
    policy = fitted(CakePolicy(slow))
    for position in range(100):
        policy.add(
            position, Usage(1, 0.0, 0.0, 0, position, AccessContext("chat", 1, position, 100))
        )
    meet = slow.meeting_block(100)
    assert 50 < meet < 100
    gone = {policy.pop(1.0)[0] for _ in range(int(meet) - 1)}
    assert gone == set(range(int(meet) - 1))


@pytest.mark.parametrize("name", ["cake", "cake-prefix"])
@pytest.mark.parametrize("factor", [0.03, 0.1, 10.0])
def test_cake_policy_costs_of_another_server_evict_the_least_recent_block_first(name, factor):
    """After a restart, blocks are ranked by the default costs until a server reports its own."""
    policy = new_policy(name, BENEFIT)
    costs = [cost * factor for cost in (BENEFIT.token_s, BENEFIT.pair_s, BENEFIT.load_s)]
    blocks = [(number, 300.0 * number) for number in range(4)]
    for block, used_s in blocks:
        context = AccessContext("chat", 1, 30, 40)
        policy.add(block, Usage(1, used_s, used_s, 0, block, context))
        if block == 1:
            policy.set_benefit(Benefit(BENEFIT.block_tokens, *costs))
    assert [policy.pop(1000.0)[0] for _ in blocks] == [0, 1, 2, 3]
