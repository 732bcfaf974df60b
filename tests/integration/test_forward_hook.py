"""Steps on a GPU are measured by events around SGLang's forward."""

from types import SimpleNamespace
from unittest.mock import Mock

import fake_cuda
import pytest
from registered_hooks import hooks_of

from sglang_cake.integration.overlap import forward_hook
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import LoadCost, PrefillCost


@pytest.mark.parametrize("kind", ["generation", "embedding"])
def test_forward_hook_step_of_any_kind_of_model_is_measured(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cuda = fake_cuda.install(monkeypatch, seed=0)
    loader = Mock(cost=LoadCost(0.0, 0.05))
    step_costs = StepCosts(loader, PrefillCost(0.01, 1e-3, 0.0), chunk_tokens=64, pipelined=True)
    coordinator = SimpleNamespace(step_costs=step_costs)
    tree = SimpleNamespace(coordinator=coordinator, overlap_runner=None, runahead=None)
    monkeypatch.setattr(forward_hook, "running_tree", tree)
    forward = hooks_of(forward_hook.install)[f"forward_batch_{kind}"]
    step_costs.claimed(0, 64)
    assert forward(lambda worker, batch: batch, object(), "the result") == "the result"
    cuda.run_all()
    step_costs.polled()
    assert step_costs.measured
