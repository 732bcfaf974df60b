"""Hooks where SGLang loads weights and adapters. They record the files as they are at that time.
Another one is where SGLang releases memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.boundary import register
from sglang_cake.integration.compat import weights_are_being_pushed
from sglang_cake.integration.identity.content import Files
from sglang_cake.integration.identity.identity import LOADED, LoadedDraft, LoadedFiles, ModelSource
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.request.media import forget_embeddings
from sglang_cake.integration.support_matrix import has_draft_kv

if TYPE_CHECKING:
    from sglang_cake.integration.build import CakeService

_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_LORA = "sglang.srt.lora.lora_manager.LoRAManager"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

# With so many records, a new one takes the place of the oldest of an adapter that is not loaded.
MAX_ADAPTERS = 4096


def install(loaded: LoadedFiles = LOADED) -> None:
    """Register the hooks. Call while plugins are being loaded.

    Args: loaded: where they record what SGLang loads.
    """
    around: dict[str, Callable[..., Any]] = {
        f"{_WORKER}._init_model_config": partial(_read_config, loaded),
        f"{_RUNNER}.load_model": partial(_load_model, loaded),
        f"{_LORA}._load_lora_adapter": partial(_load_adapter, loaded),
        f"{_LORA}._load_lora_adapter_from_tensors": partial(_push_adapter, loaded),
        f"{_UPDATER}.update_weights_from_disk": _update_from_disk,
        # Weights are pushed between begin and end, or by update_weights_from_ipc alone.
        f"{_UPDATER}.begin_weight_update": _begin_update,
        f"{_UPDATER}.end_weight_update": _end_update,
        f"{_UPDATER}.update_weights_from_ipc": _push,
        f"{_UPDATER}.check_weights": _check,
        f"{_UPDATER}.release_memory_occupation": _release,
        f"{_UPDATER}.resume_memory_occupation": _resume,
    }
    for function, hook in around.items():
        # After a failure the meaning of KV is unknown, so nothing may be loaded or stored.
        register(function, hook, HookType.AROUND, unsafe=True)


def _read_config(loaded: LoadedFiles, original: Any, worker: Any) -> Any:
    """SGLang reads config.json here. The load of the weights begins later."""
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(worker.server_args)
    path, revision = view.model_path, view.revision
    if worker.is_draft_worker:
        path = view.speculative_draft_model_path or path
        revision = view.speculative_draft_model_revision or revision
    loaded.reads(ModelSource(path, revision, view.download_dir), view)
    return original(worker)


def _load_model(loaded: LoadedFiles, original: Any, runner: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(runner.server_args)
    source = ModelSource.of(runner.model_config, view.download_dir)
    loaded.reads(source, view)  # for a worker that reads its configuration in another way
    if not runner.is_draft_worker:
        loaded.weights = source.weights_or_none()
        loaded.model_recorded = True
    elif has_draft_kv(view):
        loaded.drafts.append(LoadedDraft(runner, source, source.weights_or_none()))
    return original(runner)


def _load_adapter(loaded: LoadedFiles, original: Any, manager: Any, ref: Any) -> Any:
    before = _adapter_files(ref.lora_path)
    result = original(manager, ref)
    if result.success:
        _copy_out_of_files(manager.loras[ref.lora_id])
        after = _adapter_files(ref.lora_path)
        if before is None and not Path(ref.lora_path).exists():  # the load has downloaded it
            before = after
        # SGLang's tree has KV under the LoRA id. An id that is loaded again from other files must
        # have no digest.
        earlier = loaded.adapters.get(ref.lora_id, after)
        _record_adapter(loaded, manager, ref.lora_id, after if before == after == earlier else None)
    else:  # it may have been loaded on other ranks
        _record_adapter(loaded, manager, ref.lora_id, None)
    return result


def _push_adapter(
    loaded: LoadedFiles, original: Any, manager: Any, ref: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(manager, ref, *args, **kwargs)
    # Also after a failure: other ranks may have it.
    _record_adapter(loaded, manager, ref.lora_id, None)
    return result


def _copy_out_of_files(adapter: Any) -> None:
    """Copy tensors that may be a mapped file. Writing to the file would change them."""
    for layer in adapter.layers:
        _clone_all(layer.weights)
    _clone_all(adapter.embedding_layers)
    _clone_all(adapter.added_tokens_embeddings)


def _clone_all(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensors[name] = tensor.clone()


def _adapter_files(path: str) -> Files | None:
    source = ModelSource(path)
    try:
        return source.weights() | source.configuration(code=False)
    except (ConfigError, OSError):
        return None


def _record_adapter(loaded: LoadedFiles, manager: Any, lora_id: str, files: Files | None) -> None:
    if len(loaded.adapters) >= MAX_ADAPTERS:
        unloaded = (each for each in loaded.adapters if each not in manager.loras)
        loaded.adapters.pop(next(unloaded, ""), None)
    loaded.adapters[lora_id] = files
    if loaded.on_adapter is not None:  # else there is no tree yet, and `Identity.start` reads it
        loaded.on_adapter(lora_id)


def _service(updater: Any) -> "CakeService | None":
    tree = updater.scheduler.tree_cache
    service: CakeService | None = tree.service if isinstance(tree, CakeRadixCache) else None
    return service


def _update_from_disk(original: Any, updater: Any, request: Any) -> Any:
    service = _service(updater)
    if service is None:
        return original(updater, request)
    source = service.identity.update_source(request.model_path)
    before = source.weights_or_none()
    was_local = source.is_local
    service.weights_changing()
    files: Files | None = None
    try:
        result = original(updater, request)
        after = source.weights_or_none()
        if result.success and (before == after or (before is None and not was_local)):
            files = after  # after a failed update, a part of the weights may have changed
    finally:
        _changed(service, updater, request, files, request.load_format)
    return result


def _changed(
    service: "CakeService",
    updater: Any,
    request: Any,
    files: Files | None,
    load_format: str | None,
) -> None:
    if weights_are_being_pushed(updater):  # more may come, of which no hook tells: until the end
        return
    forget_embeddings()
    # A running request adds KV of the old weights to the tree, even if the tree is empty now.
    idle = updater.is_fully_idle(ignore_waiting=True)
    version = getattr(request, "weight_version", None)
    service.weights_changed(files, load_format, version, idle=idle)


def _begin_update(original: Any, updater: Any, request: Any) -> Any:
    service = _service(updater)
    if service is not None and not weights_are_being_pushed(updater):  # else SGLang refuses it
        service.weights_changing()
    return original(updater, request)


def _end_update(original: Any, updater: Any, request: Any) -> Any:
    if not weights_are_being_pushed(updater):  # SGLang refuses it, and changes nothing
        return original(updater, request)
    return _push(original, updater, request)


def _push(original: Any, updater: Any, request: Any) -> Any:
    service = _service(updater)
    if service is None:
        return original(updater, request)
    service.weights_changing()
    try:
        return original(updater, request)
    finally:
        _changed(service, updater, request, None, None)


def _check(original: Any, updater: Any, request: Any) -> Any:
    """One action writes random numbers into the weights, and into tensors that no file has."""
    service = _service(updater)
    if service is None or request.action != "reset_tensors":
        return original(updater, request)
    service.identity.tensors_lost()
    return _push(original, updater, request)


def _release(original: Any, updater: Any, request: Any) -> Any:
    """SGLang empties the tree only after the memory of the pool has gone."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    service = _service(updater)
    if service is not None and (not request.tags or GPU_MEMORY_TYPE_KV_CACHE in request.tags):
        service.pool_going()
    return original(updater, request)


def _resume(original: Any, updater: Any, request: Any) -> Any:
    """Weights whose memory was released have unknown values, unless SGLang kept a copy. So have
    tensors that no file has: SGLang restores buffers alone."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    service = _service(updater)
    lost = not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags
    if service is None or not lost or service.identity.keeps_weights:
        return original(updater, request)
    service.identity.tensors_lost()
    return _push(original, updater, request)
