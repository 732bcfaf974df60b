"""A helper's forward: a span of another member's prompt.

A helper's forward is no request of SGLang. It runs between two steps, in the scheduler's thread, on
its own slots. Before it returns, the slots are freed, or given to the tree if every layer is
complete.
"""

import contextlib
import logging
import time
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import RunaheadError
from sglang_cake.integration.overlap.layer_gate import LayerGate
from sglang_cake.integration.overlap.partial_forward import cut_batch, run_forward
from sglang_cake.runahead.chain_plan import ChainLimits
from sglang_cake.runahead.member import COLD, Helping, Member
from sglang_cake.runahead.messages import HelpOffer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger("sglang_cake")


class SpanRunner:
    """Computes spans for other members."""

    def __init__(
        self, member: Member, gate: LayerGate, counters: Counters, limits: ChainLimits
    ) -> None:
        self._member = member
        self._gate = gate
        self._counters = counters
        self._limits = limits

    def serve(self, scheduler: "Scheduler", offer: HelpOffer) -> None:
        """Accept or refuse an offer; compute and send. All resources are freed in any case."""
        began_s = time.monotonic()
        reason = self._unready(scheduler, offer)
        if reason is not None:
            self._member.refuse(offer, reason)
            return
        req = _request(offer)
        tree = scheduler.tree_cache
        req.init_next_round_input(tree)
        req.lock = tree.lock(req.last_node)
        reason = self._unfit(scheduler, offer, req)
        if reason is not None:
            tree.unlock(req.lock)
            self._member.refuse(offer, reason)
            return
        helping = None
        failure: str | None = None
        try:
            helping = self._member.accept(offer)
            self._compute(scheduler, helping, req)
        except RunaheadError as error:
            failure = str(error)
        except Exception as error:
            logger.exception("cake runahead: a span could not be computed")
            failure = repr(error)
        finally:
            if helping is not None:  # after this, no thread or device uses the slots
                self._member.end_helping(helping, failure)
                sender = helping.passing.sender
                assert sender is not None
                self._counters.add("runahead_sent_bytes", sender.bytes + sender.forwarded_bytes)
            self._give_back(tree, req, keep=failure is None)
        if failure is not None:
            logger.info("cake runahead: a span of member %d ended early: %s", offer.owner, failure)
            return
        logger.info(
            "cake runahead: served member %d with %d tokens in %.3f s",
            offer.owner,
            len(offer.tokens),
            time.monotonic() - began_s,
        )

    def _unready(self, scheduler: "Scheduler", offer: HelpOffer) -> str | None:
        """The reason why no such offer is accepted now."""
        if scheduler.weight_updater.offload_tags:  # a forward would touch memory that is unmapped
            return "its memory is released"
        if (
            scheduler.waiting_queue
            or scheduler.chunked_req is not None
            or any(not req.finished() for req in scheduler.collect_inflight_reqs())
        ):  # own requests would get no token during the whole span
            return "busy with its own requests"
        if max(offer.tokens) >= scheduler.model_config.vocab_size:
            return "tokens that this model does not have"
        if len(offer.tokens) >= scheduler.req_to_token_pool.req_to_token.shape[1]:
            return "a longer prompt than may be here"
        span = offer.partition.spans[offer.chain.index(self._member.rank)]
        if span.tokens > self._limits.step_tokens:
            return "a longer span than a step computes here"
        return None

    def _unfit(self, scheduler: "Scheduler", offer: HelpOffer, req: "Req") -> str | None:
        """The reason why this one is not accepted, once its prefix in the tree is known."""
        if req.prefix_len < offer.bounds[0]:
            return COLD
        need = len(offer.tokens) - req.prefix_len + self._limits.page_tokens
        allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        if need > allocator.available_size() + tree.evictable_size():
            return "not enough KV memory"
        if scheduler.req_to_token_pool.available_size() < 1:
            return "too many requests"
        return None

    def _compute(self, scheduler: "Scheduler", helping: Helping, req: "Req") -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        req.extend_end = len(req.full_untruncated_fill_ids)
        batch = ScheduleBatch.init_new(
            [req],
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            False,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_extend()
        passing, span = helping.passing, helping.span
        keep = req.prefix_len  # earlier slots are shared in the tree: they must not be written
        with forward_stream(scheduler):
            inputs, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu, None
            batch.input_ids = inputs.to(batch.device, non_blocking=True)
            row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx].to(torch.int64)
            passing.receiver.bind(row[keep : span.start], keep)
            assert passing.sender is not None
            passing.sender.bind(row[span.start : span.stop], span)
            with self._gate(passing):
                part = cut_batch(batch, max(keep, span.start), span.stop)
                run_forward(scheduler.tp_worker, part)
        passing.drain()

    def _give_back(self, tree: Any, req: "Req", *, keep: bool) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        if req.kv.holds_kv:
            release_kv_cache(req, tree, checkpoint=keep)
        else:
            tree.unlock(req.lock)
            req.lock = None


@contextlib.contextmanager
def forward_stream(scheduler: "Scheduler") -> Iterator[None]:
    """Launch in the stream of SGLang's forwards: after all work that the scheduler has launched,
    and before all that it launches next."""
    if not scheduler.enable_overlap:
        yield
        return
    with scheduler.forward_stream_ctx:
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        try:
            yield
        finally:
            scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def _request(offer: HelpOffer) -> "Req":
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    sampling.normalize(None)
    return Req(
        f"cake-runahead-{offer.job}",
        "",
        array("q", offer.tokens),
        sampling,
        extra_key=offer.extra_key,
        cache_salt=offer.cache_salt,
    )
