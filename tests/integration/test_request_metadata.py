"""What the store learns of a request, and what it does not."""

from array import array
from types import SimpleNamespace

import pytest

from sglang_cake.core.keys import Digest, KeySeed
from sglang_cake.integration.request.request_metadata import facts_of, tenant_key
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, PromptCosts
from sglang_cake.stores.eviction.policy import Benefit

COSTS = PromptCosts(PrefillCost(0.01, 1e-4, 1e-9), LoadCost(0.0, 0.005, depth=1))


def facts(custom=None, salt=None, extra=None, costs=COSTS, load_id="r1"):
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom), cache_salt=salt, extra_key=extra
    )
    return facts_of(req, load_id, array("q", range(100)), costs, 16)


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
def test_request_metadata_workload_is_read_from_custom_params(custom, workload):
    assert facts(custom).workload == workload


def test_request_metadata_tenants_differ_and_are_not_named():
    nobody, one, other = facts(), facts(salt="alice"), facts(extra="bob")
    assert nobody.tenant == 0
    assert len({nobody.tenant, one.tenant, other.tenant}) == 3
    assert facts(salt="alice").tenant == one.tenant
    assert "alice" not in one.to_json()


def test_request_metadata_tenant_number_depends_on_the_users_key(tmp_path, monkeypatch):
    """Servers of one user agree on it; nobody without that user's key can compute it."""
    found = []
    for config in ("one", "one", "other"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / config))
        tenant_key.cache_clear()  # as in a process of its own
        found.append(facts(salt="alice").tenant)
    tenant_key.cache_clear()
    assert found[0] == found[1] != found[2]
    key = tmp_path / "one" / "sglang_cake" / "tenant-key"
    assert key.stat().st_mode & 0o777 == 0o600


def test_request_metadata_tenant_without_a_key_file_has_a_number(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    tenant_key.cache_clear()
    assert facts(salt="alice").tenant == facts(salt="alice").tenant > 0
    tenant_key.cache_clear()


def test_request_metadata_salts_with_surrogates_have_own_numbers_and_seeds():
    """`sglang.Engine` takes any Python string."""
    assert facts(salt="a\ud800").tenant != facts(salt="a\ud801").tenant
    seeds = {
        KeySeed(Digest(bytes(32)), None, salt).digest() for salt in ("a\ud800", "a\ud801", "a?")
    }
    assert len(seeds) == 3


def test_request_metadata_benefit_is_the_measured_cost():
    assert facts().benefit == Benefit(16, 1e-4, 1e-9, 0.005)
    assert facts().tokens == 100
    never = PromptCosts(PrefillCost(0.01, 0.0, 0.0), LoadCost(0.0, 0.0, depth=1))
    assert facts(costs=never).benefit is None
    assert facts(costs=None).benefit is None


def test_request_metadata_ids_with_surrogates_are_told_apart():
    """A client may choose the id of its request, and JSON can hold half a surrogate pair."""
    assert len({facts(load_id=rid).id for rid in ("r\ud800", "r\ud801", "r?")}) == 3
