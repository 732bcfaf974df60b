"""Tenants take turns by what they had, and nobody saves turns up."""

import random

from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.loading.priority import MOST_TENANTS, ROUND_TOKENS, QueueEntry, TenantTokens, order


def test_fair_queueing_fewer_tokens_go_first_and_ties_go_by_length() -> None:
    tenants = TenantTokens()
    for tenant in (1, 2):
        tenants.arrives(tenant)
    tenants.charge(1, 3 * ROUND_TOKENS)
    big, other = (QueueEntry(str(t), 1.0, tenant_round=tenants.round_of(t)) for t in (1, 2))
    assert order([big, other]) == [1, 0]
    tenants.charge(2, 3 * ROUND_TOKENS + 1)
    long, short = (
        QueueEntry("1", 9.0, tenant_round=tenants.round_of(1)),
        QueueEntry("2", 1.0, tenant_round=tenants.round_of(2)),
    )
    assert order([long, short]) == [1, 0]


def test_fair_queueing_returning_tenant_starts_level_with_the_others() -> None:
    tenants = TenantTokens()
    tenants.arrives(1)
    tenants.charge(1, 50 * ROUND_TOKENS)
    tenants.arrives(2)
    assert tenants.round_of(2) == tenants.round_of(1) == 50
    tenants.leaves(2)
    tenants.charge(1, 10 * ROUND_TOKENS)
    assert tenants.round_of(2) == tenants.round_of(3) == 60  # as if they came now
    tenants.arrives(2)
    assert tenants.round_of(2) == 60


def test_fair_queueing_leaving_keeps_the_charged_tokens() -> None:
    tenants = TenantTokens()
    for tenant in (1, 2):
        tenants.arrives(tenant)
    tenants.charge(1, 50 * ROUND_TOKENS)
    tenants.leaves(1)
    tenants.arrives(1)
    assert (tenants.round_of(1), tenants.round_of(2)) == (50, 0)


def test_fair_queueing_number_of_tenants_is_bounded() -> None:
    tenants = TenantTokens()
    tenants.arrives(0)
    for tenant in range(1, 2 * MOST_TENANTS):
        tenants.arrives(tenant)
        tenants.leaves(tenant)
    assert len(tenants) <= MOST_TENANTS + 1
    assert tenants.round_of(0) == 0


@given(st.integers(2, 5), st.integers(0, 2**32))
def test_fair_queueing_always_waiting_tenants_get_nearly_equal_tokens(
    count: int, seed: int
) -> None:
    """Each round serves the first in order: no two tenants are further apart than a turn allows."""
    draw, tenants, had = random.Random(seed), TenantTokens(), [0] * count
    for tenant in range(count):
        tenants.arrives(tenant)
    largest = 1
    for _ in range(200):
        waiting = [
            QueueEntry(str(t), draw.uniform(0, 9), tenant_round=tenants.round_of(t))
            for t in range(count)
        ]
        first = order(waiting)[0]
        tokens = draw.randint(1, 4000)
        largest = max(largest, tokens)
        tenants.charge(first, tokens)
        had[first] += tokens
    assert max(had) - min(had) <= 2 * ROUND_TOKENS + largest
