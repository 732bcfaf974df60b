"""Sliding windows that belong to requests, and not to the tree: DeepSeek V4.1 with
`--enable-encoder-swa-bounded-replay`.

Where a request begins after a prefix of the tree, SGLang computes the last window of the prefix
again, in the same step. Loaded blocks may also join a prompt between two chunks. Its window then
has the tokens before these blocks. So its next step begins as that of a new request:
`CakeRadixCache.joined` has the requests that blocks have joined since their last step.

DSPARK's draft model keeps its window in a ring of the request. In a step that begins a request,
SGLang notes that the ring has nothing of the tokens before it. So the draft model sees less than a
window at first, as after any hit in SGLang's own tree.
"""

from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_cake.integration.boundary import register
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"


def install() -> None:
    """Register the hook. Call while plugins are being loaded."""
    register(f"{_BATCH}.prepare_for_extend", _prepared, HookType.AFTER, unsafe=True)


def replayed_tokens(tree: CakeRadixCache, req: "Req") -> int:
    """How many tokens before its next step's own a request computes again, since blocks joined it
    between two chunks."""
    if tree.joined is None or req not in tree.joined:
        return 0
    from sglang.srt.model_executor.encoder_swa_replay import replay_len  # not in 0.5.22

    return int(replay_len(req.prefix_len))


def restart_windows(tree: CakeRadixCache, batch: Any) -> None:
    """Have SGLang compute the windows of the requests of a batch again that blocks have joined."""
    if tree.joined is not None:
        batch.encoder_swa_reset = [
            resets or req in tree.joined
            for req, resets in zip(batch.reqs, batch.encoder_swa_reset, strict=True)
        ]
        tree.joined.difference_update(batch.reqs)


def _prepared(_: None, batch: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(batch.tree_cache, CakeRadixCache):
        restart_windows(batch.tree_cache, batch)
