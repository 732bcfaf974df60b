"""Cake's part of responses: `meta_info["cake"]`, a dictionary with statistics of the request, and
loaded tokens in SGLang's own statistics, where they count as `storage`, like those of HiCache.

SGLang counts the tokens before the first one that a step computes as cached (`Req.cached_tokens`),
and splits them by where they were. Responses, their streams, OpenAI's `sglext` and
`sglang:cached_tokens_total` all take the split from `get_cached_tokens_details`.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_cake.core.keys import Span
from sglang_cake.integration.boundary import register, register_and_apply
from sglang_cake.integration.compat import has_split_cached_tokens
from sglang_cake.stores.url import split_urls

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_META_INFO = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"
_STATISTICS = "cake_statistics"  # attribute of SGLang's `ReqState`
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"


def install_meta_info() -> None:
    """Install the hook in the process that answers requests. Called when the process is known to be
    that one, which it is not while plugins are loaded."""
    register_and_apply(_META_INFO, _unwrap, HookType.AFTER)


def install() -> None:
    """Register the hooks of a child. Call while plugins are being loaded."""
    register(_META_INFO, _unwrap, HookType.AFTER)
    register(f"{_STREAMER}.get_cached_tokens_details", _details, HookType.AFTER)


def starts_at_prefix(req: "Req") -> None:
    """The request goes on after `req.prefix_len`. SGLang would subtract from its cached tokens
    those that it computed after that, and lost while it was in the queue again."""
    req.already_computed = min(req.already_computed, req.prefix_len)


def loaded(req: "Req", span: Span) -> None:
    """The tokens of `span`, which SGLang counts as cached, came from the store."""
    if req.retracted_stain:  # SGLang does not count a request again after a retraction
        return
    if has_split_cached_tokens(req):
        req.cached_tokens_storage += span.tokens
    else:  # SGLang splits what its first step finds by these two
        req.storage_hit_length += span.tokens
        req.storage_hit_start = span.stop - req.storage_hit_length


def computed(req: "Req", tokens: int) -> None:
    """Tokens that SGLang counted as cached when it scheduled an overlapped step were computed."""
    if not req.retracted_stain:
        req.cached_tokens -= tokens


def _unwrap(_: None, manager: Any, meta_info: dict[str, Any], state: Any, *args: Any) -> None:
    # SGLang transports extra information as a list with an item per output token, and slices and
    # joins such lists in streams. This one has a single item, so it is taken out.
    parts = state.customized_info_accumulated.pop("cake", None)
    if parts and parts[0] is not None and not hasattr(state, _STATISTICS):
        setattr(state, _STATISTICS, parts[0])
    meta_info.pop("cake", None)
    if hasattr(state, _STATISTICS):
        meta_info["cake"] = getattr(state, _STATISTICS)


def _details(found: Any, streamer: Any, req: "Req") -> dict[str, Any] | None:
    service = getattr(streamer.tree_cache, "service", None)
    if found is None or (service is None and not req.cached_tokens_storage):
        return None
    storage = min(req.cached_tokens_storage, req.cached_tokens)
    return {
        "device": req.cached_tokens - storage,
        "host": 0,
        "storage": storage,
        "storage_backend": "none" if service is None else _schemes(service.setting),
    }


@lru_cache(maxsize=1)
def _schemes(setting: str | None) -> str:
    """The schemes of a `--cake-store`, fastest first."""
    return "file" if setting is None else ",".join(url.scheme for url in split_urls(setting))
