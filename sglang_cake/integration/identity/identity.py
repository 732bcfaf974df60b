"""The facts of the namespace: what the server computes KV with, read from it and from its files.

The digest of the weights is computed in the background, if that takes more than a moment; nothing
is loaded or stored before it is known. If it cannot be known, the namespace is this process's own.
"""

import hashlib
import inspect
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.namespace import LABEL, Namespace
from sglang_cake.integration.identity import kv_facts
from sglang_cake.integration.identity.content import Files
from sglang_cake.integration.identity.searches import (
    LOADED,
    PRIVATE,
    WEIGHTS,
    Facts,
    ModelPlace,
    Search,
    Searches,
    adapter_search,
    model_search,
    private_name,
    update_search,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

MAX_ADAPTERS = 4096  # whose digests are remembered


def server_facts(ctx: "TreeCacheBuildContext", layout: BlockLayout, *, codec: str) -> Facts:
    """All facts but those about content.

    Args: layout: of this rank's pool. codec: the blocks' encoding.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    values, model, defaults = resolving_view(ctx.server_args), ctx.model_config, _defaults(ctx)
    parallel, served = get_parallel(), type(ctx.tp_worker.model_runner.model)
    facts: dict[str, object] = {
        LABEL: os.path.basename(os.path.normpath(model.model_path)),
        "format": kv_facts.file_format(values.load_format),
        "implementation": _implementation(served),
        "weight_version": values.weight_version,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "layout": layout.describe(),
        "page_tokens": ctx.params.page_size,
        "tp_rank": parallel.attn_tp_rank,
        "tp_size": parallel.attn_tp_size,
        "codec": codec,
    }
    if "context_len" in _source(served):  # few models read it, for their RoPE
        facts["context_length"] = model.context_len
    if values.enable_deterministic_inference:  # equal to the last bit, or not at all
        from sglang.version import __version__

        facts["software"] = f"sglang {__version__}, torch {torch.__version__}"
        facts["device"] = _device_name(ctx)
    facts |= kv_facts.counted_arguments(values, defaults)
    facts |= kv_facts.counted_environment(os.environ)
    return {name: str(value) for name, value in facts.items()}


def rope_theta(config: Any) -> float | None:
    """The base of the model's RoPE; None if it has none, or turns only a part of each head."""
    found = getattr(config, "rope_parameters", None) or {}
    theta = found.get("rope_theta", getattr(config, "rope_theta", None))
    share = found.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if isinstance(theta, int | float) and theta > 1 and share in (None, 1):
        return float(theta)
    return None


def _device_name(ctx: "TreeCacheBuildContext") -> str:
    runner = ctx.tp_worker.model_runner
    return torch.cuda.get_device_name() if runner.device == "cuda" else str(runner.device)


def _implementation(model: type) -> str:
    """The model's class; with a digest of its code if SGLang did not bring it."""
    name, module = model.__name__, model.__module__
    if module.split(".")[0] == "sglang":
        return name
    file = inspect.getsourcefile(model)
    code = sorted(Path(file).parent.glob("*.py")) if file is not None else []
    if not code:
        return f"{name} {uuid.uuid4().hex}"
    digest = hashlib.sha256(b"".join(hashlib.sha256(each.read_bytes()).digest() for each in code))
    return f"{name} {digest.hexdigest()}"


def _source(model: type) -> str:
    try:
        return inspect.getsource(sys.modules[model.__module__])
    except (OSError, TypeError):
        return "context_len"  # it cannot be seen: count it


class Identity:
    """Keeps the namespace true: what it names is what this process computes with now.

    The scheduler thread owns it; all ranks of a group call it alike.
    """

    def __init__(
        self,
        ctx: "TreeCacheBuildContext",
        facts: Facts,
        *,
        reduce_min: Callable[[torch.Tensor], None] | None,
        on_known: Callable[[Namespace], None],
    ) -> None:
        """Args:
        facts: of the server, as `server_facts` gives them.
        reduce_min: see `Searches`.
        on_known: called by `poll` when content became known.
        """
        from sglang.srt.arg_groups.overrides import resolving_view

        self._facts, self._on_known = facts, on_known
        self._values = resolving_view(ctx.server_args)
        self._defaults = _defaults(ctx)
        self._searches = Searches(reduce_min)
        self._tensors: frozenset[str] | None = None
        self._adapters: dict[str, str] = {}
        self._model = ctx.model_config.model_path
        self._revision = ctx.model_config.revision

    @property
    def keeps_weights(self) -> bool:
        """Whether SGLang keeps a copy of weights while their memory is released."""
        return bool(self._values.enable_weights_cpu_backup)

    @property
    def is_private(self) -> bool:
        """Whether no other process can have KV of this one's namespace."""
        return self._facts["weights"].startswith(PRIVATE)

    def wait(self) -> None:
        """Return when all searches have ended."""
        self._searches.wait()
        self.poll()

    def start(self) -> None:
        """Begin the searches for the weights and adapters that SGLang has loaded by now."""
        place = ModelPlace(self._model, self._revision, self._values.download_dir)
        self._begin(model_search(place, self._values, self._defaults))
        LOADED.on_adapter = self.adapter_loaded
        for lora_id in LOADED.adapters:
            self.adapter_loaded(lora_id)

    def place_of(self, path: str) -> ModelPlace:
        """Where an update of weights loads from: SGLang asks the default cache of Hugging Face."""
        return ModelPlace(path, self._revision)

    def weights_changing(self) -> None:
        """Other weights are about to be loaded: end the search for the present ones."""
        self._searches.end(WEIGHTS)

    def weights_changed(
        self, files: Files | None, load_format: str | None, version: str | None
    ) -> None:
        """Other weights were loaded: from `files`; None: not known.

        Args: version: the user's name for them; None: that of the start.
        """
        self._facts["weight_version"] = version or str(self._values.weight_version)
        known = None if load_format is None else kv_facts.file_format(load_format)
        if known is None:
            files = None
        else:
            self._facts["format"] = known
        self._begin(update_search(files, self._tensors))

    def adapter_loaded(self, lora_id: str) -> None:
        """SGLang has loaded a LoRA adapter."""
        self._adapters.pop(lora_id, None)
        settings = kv_facts.adapter_settings(self._values, self._defaults)
        self._begin(adapter_search(lora_id, LOADED.adapters[lora_id], settings))

    def adapter(self, lora_id: str) -> str | None:
        """What stands for the adapter in keys; None while that is not known."""
        return self._adapters.get(lora_id)

    def poll(self) -> None:
        """Learn what was found. Once a step, on all ranks."""
        for search in self._searches.ended():
            if search.adapter is not None:
                self._adapters[search.adapter] = (search.facts or {}).get("adapter", private_name())
                if len(self._adapters) > MAX_ADAPTERS:
                    del self._adapters[next(iter(self._adapters))]
                continue
            self._tensors = search.tensors or self._tensors
            self._facts |= search.facts or {"weights": private_name()}
            if (
                "config" not in self._facts
            ):  # and it will not be: how the weights are used is not known
                self._facts["weights"] = private_name()
            self._on_known(Namespace(tuple(self._facts.items())))

    def close(self) -> None:
        """Look for nothing any more."""
        LOADED.on_adapter = None
        self._searches.close()

    def _begin(self, begun: tuple[Search, int]) -> None:
        search, size_bytes = begun
        self._searches.begin(search, size_bytes=size_bytes)
        if self._searches.alone:  # ranks learn in their next step, if all of them are on then
            self.poll()  # what was short is known at once


def _defaults(ctx: "TreeCacheBuildContext") -> dict[str, object]:
    from sglang.srt.arg_groups.arg_utils import record_fields

    return {each.name: each.default for each in record_fields(type(ctx.server_args))}
