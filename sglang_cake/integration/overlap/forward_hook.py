"""The hook around SGLang's forwards: it times steps on a GPU, and runs the overlapped last step and
KV-Runahead."""

from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_cake.core.errors import CakeError
from sglang_cake.integration.boundary import BOUNDARY, OriginalFunction, guarded, register
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.step_costs import CudaTimer

_HOOK = "TpModelWorker.forward_batch_generation"
_FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
# The same for models that generate no text.
_EMBEDDING = "sglang.srt.managers.tp_worker.BaseTpWorker.forward_batch_embedding"


# Its forwards run in this process, which has one scheduler.
running_tree: CakeRadixCache | None = None


def install() -> None:
    """Register the hook. Call while plugins are being loaded."""
    register(_FORWARD, _forward, HookType.AROUND)
    register(_EMBEDDING, _forward, HookType.AROUND)


def _forward(original: OriginalFunction, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    tree = running_tree
    if tree is None or args or getattr(worker, "is_draft_worker", False):
        return original(worker, batch, *args, **kwargs)
    if tree.overlap_runner is not None and tree.overlap_runner.is_due(batch):
        try:
            return tree.overlap_runner.forward(original, worker, batch, **kwargs)
        finally:
            tree.let_go()
    runahead = tree.runahead
    timer = _timer(tree) if runahead is None else None
    forward = original if runahead is None else partial(runahead.forward, original)
    try:
        result = forward(worker, batch, **kwargs)
    except Exception as error:
        if original.error is error and not isinstance(error, CakeError):
            raise
        BOUNDARY.failed(_HOOK, error)
        # The whole batch; it has slots for all its tokens.
        result = original(worker, batch, **kwargs)
    _launched(tree, timer)
    return result


@guarded(_HOOK, None)
def _timer(tree: CakeRadixCache) -> CudaTimer | None:
    coordinator = tree.coordinator
    return CudaTimer() if coordinator is not None and coordinator.step_costs.pipelined else None


@guarded(_HOOK)
def _launched(tree: CakeRadixCache, timer: CudaTimer | None) -> None:
    if timer is not None and tree.coordinator is not None:
        timer.stop()
        tree.coordinator.step_costs.step_launched(timer)
