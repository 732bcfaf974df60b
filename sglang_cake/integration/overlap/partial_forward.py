"""Forwards over a part of a scheduled batch, and the end of a request whose forward lacks KV."""

import copy
from array import array
from typing import TYPE_CHECKING, Any

import torch

from sglang_cake.core.keys import Span

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def cut_batch(batch: Any, start: int, stop: int) -> Any:
    """A batch of one request that computes tokens `[start, stop)` of those of `batch`."""
    (first,), (tokens,) = batch.prefix_lens, batch.extend_lens
    assert first <= start < stop <= first + tokens
    cut = slice(start - first, stop - first)
    part = _part(batch, Span(start, stop), batch.input_ids[cut], batch.out_cache_loc[cut])
    if batch.extend_logprob_start_lens is not None:
        part.extend_logprob_start_lens = [
            max(0, batch.extend_logprob_start_lens[0] - (start - first))
        ]
    return part


def preceding_batch(batch: Any, tokens: "array[int]", slots: torch.Tensor, span: Span) -> Any:
    """A batch of one request that computes `span`, which lies before the tokens of `batch`.

    Args:
        tokens: token ids of the span.
        slots: slots of these tokens.
    """
    inputs = torch.tensor(tokens, dtype=batch.input_ids.dtype).to(batch.input_ids.device)
    part = _part(batch, span, inputs, slots.to(batch.out_cache_loc.dtype))
    if batch.extend_logprob_start_lens is not None:
        part.extend_logprob_start_lens = [0]
    return part


def _part(batch: Any, span: Span, input_ids: torch.Tensor, slots: torch.Tensor) -> Any:
    """A batch that computes `span`, and shares sampling and all else with `batch`. If it ends
    before `batch`, it returns no logprobs."""
    part = copy.copy(batch)
    part.input_ids = input_ids
    part.out_cache_loc = slots
    part.prefix_lens = [span.start]
    part.extend_lens = [span.tokens]
    part.extend_num_tokens = span.tokens
    if span.stop < batch.prefix_lens[0] + batch.extend_lens[0]:
        part.seq_lens = torch.full_like(batch.seq_lens, span.stop)
        part.seq_lens_cpu = torch.full_like(batch.seq_lens_cpu, span.stop)
        part.seq_lens_sum = span.stop
        part.return_logprob = False
        part.extend_input_logprob_token_ids = None
    return part


def run_forward(worker: Any, part: Any) -> None:
    """Run the forward alone: KV is written, and no token is sampled."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    forward = ForwardBatch.init_new(
        part, worker.model_runner, return_hidden_states_before_norm=False
    )
    worker.model_runner.forward(forward)


def drop_answer(req: "Req") -> None:
    """Drop the tokens that the current step samples for `req`, and its KV: the request ends as
    aborted. Not for a beam search: SGLang would never free the rows of its beams."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.skip_radix_cache_insert = True
    req.discard_output_reason = FINISH_ABORT()
