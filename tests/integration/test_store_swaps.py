"""Another store for a running server, without a server."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from adder_harness import BareTree
from registered_hooks import hooks_of

from sglang_cake.integration.build import CakeService
from sglang_cake.integration.scheduler import scheduler_hooks

URL = "memory://1GB,file:///kv"


def test_attach_store_without_memory_for_it_is_refused_and_changes_nothing() -> None:
    """A prompt would be looked up, and no store is there."""

    def no_memory(*args: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    coordinator: Any = SimpleNamespace(store_detached=True)
    service: Any = SimpleNamespace(
        setting="file:///before",
        coordinator=coordinator,
        _namespace=object(),
        _config=SimpleNamespace(eviction_policy="lru"),
        _open=no_memory,
        _use=lambda store: None,
    )
    service.attach_store = lambda setting: CakeService.attach_store(service, setting)
    tree = BareTree(coordinator)
    tree.service = service
    scheduler = SimpleNamespace(tree_cache=tree)
    attach = hooks_of(scheduler_hooks.install)["attach_hicache_storage_wrapped"]
    sglangs = SimpleNamespace(success=False, message="Hierarchical cache is not enabled.")
    request = SimpleNamespace(hicache_storage_backend=URL)
    answer = attach(lambda *args: sglangs, scheduler, request)
    assert not answer.success
    assert "Cannot allocate memory" in answer.message
    assert service.setting == "file:///before"
    assert coordinator.store_detached
