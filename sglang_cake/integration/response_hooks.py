"""The report of a request in its response: `meta_info["cake"]`, a plain dictionary."""

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.integration.boundary import register
from sglang_cake.integration.compat import is_hooked

_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"


def install() -> None:
    """Hook the process that answers requests. Called late: a process learns that it does so after
    plugins were loaded.

    Responses without a report of cake stay as they are.
    """
    if not is_hooked(_TARGET):
        register(_TARGET, _unwrap, HookType.AFTER)
        HookRegistry.apply_hooks()


def _unwrap(_: None, manager: Any, meta_info: dict[str, Any], state: Any, *args: Any) -> None:
    # SGLang carries extra information as lists that grow with the output; this is one item.
    reports = state.customized_info_accumulated.get("cake")
    if reports:
        meta_info["cake"] = reports[0]
        # Incremental streams must not slice it, as they do with one item per output token.
        state.customized_info_reported_keys.discard("cake")
