"""What a request is to a chain: whether it may be shared, how it asks to be, and its abort."""

from typing import TYPE_CHECKING, Any

from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.spans import Span
from sglang_cake.integration.compat import abort_chunked_request, take_deferred_requests

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

# A request may say how it is to be computed, in `sampling_params.custom_params`: "alone"; "closed"
# or "table", whether or not that is predicted to pay; or where each worker's span ends, as a list
# of tokens. That is how a search and a benchmark measure.
PARAMETER = "cake_runahead"


class Aborted(RunaheadError):
    """Nobody wants the answer any more."""

    reason = "aborted"


def is_plain(req: "Req") -> bool:
    """Whether nothing is wanted of the tokens that others would compute but their KV."""
    wants_logprobs = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    return (
        not wants_logprobs
        and not req.return_hidden_states
        and not req.return_routed_experts
        and not req.return_indexer_topk
        and req.lora_id is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and req.multimodal_inputs is None
        and req.session is None
        and not req.output_ids
    )


def computes(batch: Any, span: Span) -> bool:
    """Whether the batch is a step of one request that computes this span."""
    return bool(
        batch.forward_mode.is_extend()
        and not batch.forward_mode.is_mixed()
        and len(batch.reqs) == 1
        and (batch.prefix_lens[0], batch.prefix_lens[0] + batch.extend_lens[0]) == span
    )


def asked_for(req: "Req") -> object:
    """How the request asks to be computed; None if it does not."""
    given = req.sampling_params.custom_params
    return given.get(PARAMETER) if isinstance(given, dict) else None


def check_abort(scheduler: "Scheduler", req: "Req") -> None:
    """In the middle of a step of `req`: look for its abort among what has come from outside.

    All that has come is kept for the scheduler, in order, where it keeps what it defers itself; it
    deals with it after the step. Scheduler thread. Raises: Aborted.
    """
    from sglang.srt.managers.io_struct import AbortReq

    for each in take_deferred_requests(scheduler):
        if isinstance(each, AbortReq) and (each.abort_all or req.rid.startswith(each.rid)):
            raise Aborted("its request is aborted")


def give_up(scheduler: "Scheduler", req: "Req") -> None:
    """The step of `req` that is under way ends without the KV that it is taken to compute.

    As SGLang ends a step whose KV could not be loaded (`run_batch`): what the step samples is
    dropped, nothing of the request joins the tree any more, and its slots are freed.
    """
    drop_answer(req)
    abort_chunked_request(scheduler, req)


def drop_answer(req: "Req") -> None:
    """Nothing that the step under way samples for `req` is its answer, and nothing of it is kept:
    the request ends as aborted."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.skip_radix_cache_insert = True
    req.discard_output_reason = FINISH_ABORT()
