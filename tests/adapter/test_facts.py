"""What the store learns of a request, and what it does not."""

from array import array
from types import SimpleNamespace

import pytest

from sglang_cake.adapter.facts import facts_of
from sglang_cake.read.cost import Costs, LoadCost, PrefillCost
from sglang_cake.store.eviction import Worth

COSTS = Costs(PrefillCost(0.01, 1e-4, 1e-9), LoadCost(0.0, 0.005, depth=1))


def facts(custom=None, salt=None, extra=None, costs=COSTS):
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom), cache_salt=salt, extra_key=extra
    )
    return facts_of(req, "r1", array("q", range(100)), costs, 16)


@pytest.mark.parametrize(
    ("custom", "workload"),
    [
        (None, ""),
        ({}, ""),
        ({"cake_workload": "agent"}, "agent"),
        ({"cake_workload": "x" * 100}, "x" * 64),
        ({"cake_workload": 7}, ""),
        ({"cake_workload": "a\ud800"}, "a?"),
        ({"other": "agent"}, ""),
    ],
)
def test_what_a_request_is_for_is_a_field_of_its_own(custom, workload):
    assert facts(custom).workload == workload


def test_tenants_are_told_apart_and_not_named():
    nobody, one, other = facts(), facts(salt="alice"), facts(extra="bob")
    assert nobody.tenant == 0
    assert len({nobody.tenant, one.tenant, other.tenant}) == 3
    assert facts(salt="alice").tenant == one.tenant
    assert "alice" not in one.to_json()


def test_what_blocks_save_is_what_was_measured():
    assert facts().worth == Worth(16, 1e-4, 1e-9, 0.005)
    assert facts().tokens == 100
    never = Costs(PrefillCost(0.01, 0.0, 0.0), LoadCost(0.0, 0.0, depth=1))
    assert facts(costs=never).worth is None
