"""The order in which blocks go, against a plain model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.store.eviction import RANKS, RankedPolicy, Usage, new_policy

BLOCKS = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), BLOCKS),
        st.tuples(st.just("touch"), BLOCKS),
        st.tuples(st.just("remove"), BLOCKS),
        st.tuples(st.just("pop"), st.just(0)),
    ),
    max_size=200,
)


@pytest.mark.parametrize("name", RANKS)
@given(steps=STEPS)
def test_the_smallest_rank_goes_first(name, steps):
    policy, model = new_policy(name), {}

    def rank(item):
        return RANKS[name](item[1]), item[0]

    for now_s, (step, block) in enumerate(steps, 1):
        if step == "add":
            policy.add(block, usage := Usage(100, now_s, now_s, 0))
            model[block] = usage
        elif step == "touch":
            policy.touch(block, now_s)
            if block in model:
                old = model[block]
                model[block] = Usage(100, old.created_s, now_s, old.uses + 1)
        elif step == "remove":
            policy.remove(block)
            model.pop(block, None)
        else:
            expected = min(model.items(), key=rank, default=None)
            assert policy.pop() == expected
            if expected:
                del model[expected[0]]
        assert len(policy) == len(model)
    order = sorted(model.items(), key=rank)
    assert [policy.pop() for _ in order] == order
    assert policy.pop() is None


def used(order, steps):
    policy = new_policy(order)
    for now_s, block in enumerate("abc"):
        policy.add(ord(block), Usage(1, now_s, now_s, 0))
    for now_s, block in enumerate(steps, 10):
        policy.touch(ord(block), now_s)
    return "".join(chr(policy.pop()[0]) for _ in "abc")


def test_what_the_orders_mean():
    assert used("fifo", "aab") == "abc"
    assert used("lru", "aab") == "cab"
    assert used("lfu", "aab") == "cba"


def test_a_touch_in_the_past_changes_no_time():
    policy = new_policy("lru")
    policy.add(1, Usage(1, 5.0, 5.0, 0))
    policy.add(2, Usage(1, 6.0, 6.0, 0))
    policy.touch(2, 1.0)
    assert policy.pop()[0] == 1


def test_outdated_entries_do_not_pile_up():
    policy = RankedPolicy(RANKS["lru"])
    for now_s in range(100_000):
        policy.add(now_s % 100, Usage(1, now_s, now_s, 0))
    assert len(policy._heap) <= 64 + 2 * 100 + 1
