"""Imported by the fork server of `warm` alone: what every server would import."""

import gc
import os
import sys
import threading
from importlib import import_module
from types import ModuleType

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # SGLang looks at the platform when it is imported

for name in (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.constrained.xgrammar_backend",
    "sglang.srt.dllm.algorithm",
    "sglang.srt.entrypoints.openai.serving_responses",
    "uvicorn.protocols.http.auto",
):
    import_module(name)


class _SglangModules:
    """In place of `sys`: the modules that may have imported a function of SGLang."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: it for name, it in sys.modules.items() if name.startswith("sglang")}


# For each hook SGLang looks at all names of all modules (45 ms), which may have imported the hooked
# function. No module has imported a method, and nearly all hooks are on methods.
hook_registry = import_module("sglang.srt.plugins.hook_registry")
hook_registry.sys = _SglangModules()
_propagate = hook_registry._propagate_patch
hook_registry._propagate_patch = lambda original, wrapped, source: (
    0 if isinstance(source, type) else _propagate(original, wrapped, source)
)

assert threading.active_count() == 1, "a forked process would miss these threads"
assert "prometheus_client" not in sys.modules, "it takes its folder from the environment"

# SGLang collects garbage when it starts, and counts the objects that may be some: not these.
gc.collect()
gc.freeze()
