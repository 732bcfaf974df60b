"""How the prompt was got, in the response: `meta_info["cake"]`, a plain dictionary."""

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.integration.boundary import register
from sglang_cake.integration.compat import is_hooked

_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"


def install() -> None:
    """Hook the process that answers requests; it knows that it does when plugins are long loaded.

    Responses without a story pass untouched.
    """
    if not is_hooked(_TARGET):
        register(_TARGET, _unwrap, HookType.AFTER)
        HookRegistry.apply_hooks()


def _unwrap(_: None, manager: Any, meta_info: dict[str, Any], state: Any, *args: Any) -> None:
    # SGLang carries extra information as lists that grow with the output; ours is one fact.
    story = state.customized_info_accumulated.get("cake")
    if story:
        meta_info["cake"] = story[0]
        # Not one item per output token: incremental streams must not slice it.
        state.customized_info_reported_keys.discard("cake")
