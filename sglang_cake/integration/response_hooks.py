"""`meta_info["cake"]` of a response: a dictionary with statistics of the request."""

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.integration.boundary import register
from sglang_cake.integration.compat import is_hooked

_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"


def install() -> None:
    """Install the hook in the process that answers requests. Called late: when plugins are loaded,
    a process does not know yet whether it answers requests."""
    if not is_hooked(_TARGET):
        register(_TARGET, _unwrap, HookType.AFTER)
        HookRegistry.apply_hooks()


def _unwrap(_: None, manager: Any, meta_info: dict[str, Any], state: Any, *args: Any) -> None:
    # SGLang transports extra information as a list with an item per output token. This one has a
    # single item.
    statistics = state.customized_info_accumulated.get("cake")
    if statistics:
        meta_info["cake"] = statistics[0]
        # Incremental streams must not slice the list by output tokens.
        state.customized_info_reported_keys.discard("cake")
