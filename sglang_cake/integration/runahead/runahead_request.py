"""A request in a chain: whether it may be shared, its parameter, and its abort."""

from typing import TYPE_CHECKING, Any

from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.token_span import Span
from sglang_cake.integration.compat import abort_chunked_request, take_deferred_requests
from sglang_cake.integration.overlap.partial_forward import drop_answer
from sglang_cake.runahead.messages import can_carry
from sglang_cake.runahead.partition import PARAMETER

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


class Aborted(RunaheadError):
    """The request was aborted."""

    reason = "aborted"


def is_plain(req: "Req") -> bool:
    """Whether the request needs nothing but KV of the tokens that helpers would compute, and an
    offer can describe it."""
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
        and can_carry(req.extra_key)
        and can_carry(req.cache_salt)
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
    """The PARAMETER of the request; None if it has none."""
    given = req.sampling_params.custom_params
    return given.get(PARAMETER) if isinstance(given, dict) else None


def check_abort(scheduler: "Scheduler", req: "Req") -> None:
    """Look for an abort of `req` among new messages, in the middle of its step.

    All new messages are kept in order among the scheduler's deferred ones. The scheduler handles
    them after the step. Scheduler thread. Raises: Aborted.
    """
    from sglang.srt.managers.io_struct import AbortReq

    for each in take_deferred_requests(scheduler):
        if isinstance(each, AbortReq) and (each.abort_all or req.rid.startswith(each.rid)):
            raise Aborted("its request is aborted")


def give_up(scheduler: "Scheduler", req: "Req") -> None:
    """End the current step of `req` without the KV that it was to compute.

    As SGLang ends a step whose KV could not be loaded (`run_batch`): sampled tokens are dropped,
    the request's KV does not join the tree, and its slots are freed.
    """
    drop_answer(req)
    abort_chunked_request(scheduler, req)
