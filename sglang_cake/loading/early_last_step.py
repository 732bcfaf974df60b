"""The last step of a prompt may begin before its last loads are over (docs/theory.md).

The step computes what no store has, from the end of the stored part on. Its layer i needs KV of
layer i alone, and a block's bytes come layer by layer: so the step runs while the last blocks come,
and waits at each layer for what is not there yet. It holds the device meanwhile, so that is for who
is alone.
"""

from collections.abc import Mapping

from sglang_cake.core.spans import Span
from sglang_cake.loading.cost_model import Costs
from sglang_cake.loading.meet import BlockState, View


def early_last_step(
    view: View,
    *,
    coming: Mapping[int, float],
    chunk_tokens: int,
    costs: Costs,
) -> Span | None:
    """The stored tokens that the last step, were it to begin now, would find loaded or on their
    way, from the front on. None: it is no time for it yet, or there will not be any.

    It begins when the loads are predicted to be over before a step would be that began now: so it
    never holds the device for more than twice the time that it takes anyway.

    Args:
        coming: blocks whose bytes are coming, and the share of each that is still to come.
        chunk_tokens: what the step may compute at most.
    """
    there = (BlockState.LANDED, BlockState.WANTED)
    count = next((i for i, state in enumerate(view.states) if state not in there), len(view.states))
    if any(state in there for state in view.states[count:]):
        return None  # what lies between is computed first
    wanted = [view.first + i for i in range(count) if view.states[i] == BlockState.WANTED]
    stop = min((view.first + count) * view.block_tokens, view.limit)
    fits = stop > view.front and view.prompt_tokens - stop <= chunk_tokens
    if not wanted or not fits or not all(block in coming for block in wanted):
        return None
    left_s = costs.load.block_s * sum(coming[block] for block in wanted)
    step_s = costs.prefill.step_s(stop, view.prompt_tokens)
    return Span(view.front, stop) if left_s <= step_s else None
