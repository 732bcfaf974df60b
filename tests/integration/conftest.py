"""Failures of one test do not count in the next. Algorithms of plug-ins are those of one test. The
clock can stand still."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def calm_boundary() -> Iterator[None]:
    """The boundary is reset after each test: no tree, no failures."""
    pytest.importorskip("sglang")
    from sglang_cake.integration.boundary import BOUNDARY, Boundary

    yield
    BOUNDARY.__dict__.update({**Boundary().__dict__, "hooks": BOUNDARY.hooks})


@pytest.fixture
def register_algorithm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers an algorithm of speculative decoding as a plug-in does."""
    from sglang.srt.speculative import spec_registry

    algorithms: dict[str, Any] = {}
    monkeypatch.setattr(spec_registry, "_REGISTRY", algorithms)

    def register(
        name: str, *, has_draft_kv: bool = True, factory: Callable[..., Any] = lambda args: object
    ) -> None:
        algorithms.pop(name, None)
        members = {"has_draft_kv": lambda algorithm: has_draft_kv}
        made = type("Mine", (spec_registry.CustomSpecAlgo,), members)
        spec_registry.register_algorithm(name, spec_class=made)(factory)

    return register


@pytest.fixture
def stopped_clock() -> Iterator[SimpleNamespace]:
    """The clock of integration, loader and writer. It moves only when a test sets its `now_s`: on a
    busy machine a decision could come seconds after the one before it, and loads be overdue."""
    from sglang_cake.testing.virtual_time import clock

    stopped = SimpleNamespace(now_s=1000.0)
    with clock(lambda: stopped.now_s):
        yield stopped
