"""The hook around SGLang's forward, for those that have a hand in it, and the gate inside of it."""

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.adapter.last_step import LastStep
from sglang_cake.adapter.layers import LayerGate, PoolRows
from sglang_cake.adapter.layers_cuda import CudaGate, CudaRows
from sglang_cake.adapter.pools import DeviceKV
from sglang_cake.adapter.runahead import Runahead

_FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"


class Here:
    """Who has a hand in the forwards of this process. One scheduler runs in it."""

    runahead: Runahead | None = None
    last_step: LastStep | None = None


def install() -> None:
    """Register the hook. Call while plugins are being loaded."""
    HookRegistry.register(_FORWARD, _forward, HookType.AROUND)


def gated(kv: DeviceKV, pool: Any, *, on_device: bool) -> tuple[PoolRows, LayerGate]:
    """Layers of a pool, and its gate: a pool has one.

    Args: on_device: on a GPU, what comes and goes does so in its memory.
    """
    if kv.device.type == "cpu":
        return PoolRows(kv), LayerGate(pool)
    rows = CudaRows(kv, on_device=on_device)
    return rows, CudaGate(pool, rows)


def _forward(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if args or getattr(worker, "is_draft_worker", False):
        return original(worker, batch, *args, **kwargs)
    last_step, runahead = Here.last_step, Here.runahead
    if last_step is not None and last_step.is_due(batch):
        return last_step.forward(original, worker, batch, **kwargs)
    if runahead is not None:
        return runahead.forward(original, worker, batch, **kwargs)
    return original(worker, batch, **kwargs)
