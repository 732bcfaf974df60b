"""Quotas and fairness: what tenants owe each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.stores.eviction import POLICIES, new_policy
from sglang_cake.stores.eviction.policy import UNKNOWN_TENANT, AccessContext, Usage
from sglang_cake.stores.eviction.tenants import (
    MAX_TENANTS,
    NO_TENANT_RULES,
    TenantPolicy,
    TenantRules,
)


def usage(block, tenant, now_s=0.0, size=10):
    return Usage(size, now_s, now_s, 0, block, AccessContext(tenant=tenant))


def flooded(rules, name="lru"):
    """A quiet tenant's five blocks, then a hundred of a loud one; twenty have to go."""
    policy = TenantPolicy(new_policy(name), rules)
    for block in range(105):
        policy.add(block, usage(block, 1 if block < 5 else 2, float(block)))
    return policy, [policy.pop(200.0)[1].context.tenant for _ in range(20)]


@pytest.mark.parametrize("name", POLICIES)
def test_tenant_policy_fair_evicts_from_the_largest_tenant(name):
    policy, gone = flooded(TenantRules(fair=True), name)
    assert gone == [2] * 20
    assert len(policy) == 85


def test_tenant_policy_without_rules_evicts_the_oldest_blocks():
    assert flooded(NO_TENANT_RULES)[1] == [1] * 5 + [2] * 15
    assert not NO_TENANT_RULES


def test_tenant_policy_fair_equal_shares_follow_the_inner_policy():
    policy = TenantPolicy(new_policy("lru"), TenantRules(fair=True))
    for block in range(10):
        policy.add(block, usage(block, block % 2, float(block)))
    assert [policy.pop(20.0)[0] for _ in range(4)] == [0, 1, 2, 3]


def test_tenant_policy_tenant_over_its_quota_is_evicted_first():
    policy, gone = flooded(TenantRules(quota_bytes=900))
    assert gone == [2] * 10 + [1] * 5 + [2] * 5
    assert policy.over_quota_bytes() == 0


def test_tenant_policy_over_quota_bytes_sum_over_all_tenants():
    policy = TenantPolicy(new_policy("lru"), TenantRules(quota_bytes=25))
    for block in range(6):
        policy.add(block, usage(block, block % 2))
    assert policy.over_quota_bytes() == 10
    assert new_policy("lru").over_quota_bytes() == 0


def test_tenant_policy_blocks_of_unknown_tenants_count_for_no_quota():
    policy = TenantPolicy(new_policy("lru"), TenantRules(quota_bytes=25))
    for block in range(6):
        policy.add(block, usage(block, UNKNOWN_TENANT))
    assert policy.over_quota_bytes() == 0
    for block in range(3):
        policy.touch(block, 1.0, 1, AccessContext(tenant=1))
    assert policy.over_quota_bytes() == 5
    assert policy.pop(2.0)[0] == 0
    assert not policy.breaks_rule


def test_tenant_policy_fair_blocks_of_unknown_tenants_are_no_tenant():
    policy = TenantPolicy(new_policy("lru"), TenantRules(fair=True))
    for block in range(6):
        policy.add(block, usage(block, UNKNOWN_TENANT, float(block)))
    policy.add(10, usage(10, 1, 0.5))
    policy.add(11, usage(11, 2, 10.0))
    assert not policy.breaks_rule
    for block in range(20, 28):
        policy.add(block, usage(block, 2, float(block)))
    assert policy.breaks_rule
    assert policy.pop(40.0)[0] == 0, "an older block that may be of tenant 2"
    assert policy.pop(40.0)[0] == 1, "and none of tenant 1"
    for block in range(2, 6):
        policy.remove(block)
    assert policy.pop(40.0)[0] == 11


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "remove", "pop"]), st.integers(0, 9), st.integers(0, 3)
    ),
    max_size=80,
)


@given(steps=STEPS, fair=st.booleans(), quota=st.none() | st.integers(0, 60))
def test_tenant_policy_random_steps_keep_counts_and_evict_the_largest(steps, fair, quota):
    policy, there = TenantPolicy(new_policy("workload"), TenantRules(quota, fair)), {}
    for now_s, (step, block, tenant) in enumerate(steps):
        if step == "add":
            policy.add(block, usage(block, tenant, now_s, size=10 + tenant))
            there[block] = tenant, 10 + tenant
        elif step == "touch":
            policy.touch(block, now_s, 1, AccessContext(tenant=tenant))
            if block in there:
                there[block] = tenant, there[block][1]
        elif step == "remove":
            policy.remove(block)
            there.pop(block, None)
        else:
            taken = {}
            for owner, size in there.values():
                taken[owner] = taken.get(owner, 0) + size
            popped = policy.pop(now_s)
            assert (popped is None) == (not there)
            if popped is None:
                continue
            owner = there.pop(popped[0])[0]
            assert popped[1].context.tenant == owner
            most = max(taken.values())
            over_quota = quota is not None and most > quota
            if over_quota or (fair and most * len(taken) > sum(taken.values())):
                assert taken[owner] == most
        assert len(policy) == len(there)
        taken = {}
        for owner, size in there.values():
            taken[owner] = taken.get(owner, 0) + size
        assert policy.used_bytes == taken


def test_tenant_policy_many_tenants_keep_a_bounded_table():
    policy = TenantPolicy(new_policy("lru"), TenantRules(fair=True))
    for tenant in range(1, 2 * MAX_TENANTS):
        policy.add(tenant, usage(tenant, tenant))
    assert len(policy.used_bytes) <= MAX_TENANTS + 1
    for _ in range(1, 2 * MAX_TENANTS):
        policy.pop(1.0)
    assert not policy.used_bytes
