"""KV-Runahead in a scheduler process: asks members to help with long prompts, and helps members.

SGLang's scheduler does not know of the owner's side. A shared step is a normal step for it: the
step has slots for all tokens, and all are computed when it returns. The forward computes the
owner's span only, while KV of earlier spans arrives in their slots, layer by layer. After a failure
the same forward computes the rest. After an abort of the request all members stop at the next
layer.
"""

import contextlib
import logging
import os
import time
import traceback
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.keys import Span
from sglang_cake.integration.boundary import BOUNDARY, OriginalFunction, guarded
from sglang_cake.integration.compat import abort_chunked_request, take_deferred_requests
from sglang_cake.integration.overlap.layer_gate import LayerGate, PoolRows
from sglang_cake.integration.overlap.partial_forward import cut_batch, drop_answer, run_forward
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.integration.request.request_keys import unkeyed_because
from sglang_cake.integration.request.request_metadata import reads_prompt
from sglang_cake.integration.runahead.runahead_helper import SpanRunner
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.planner import island_start
from sglang_cake.runahead.chain_plan import (
    PAYS,
    ChainCosts,
    ChainLimits,
    ChainPlan,
    StoredTail,
    forced_plan,
    plan_beside_loader,
    plan_chain,
)
from sglang_cake.runahead.member import MEMBER_SETTINGS, Member, MemberSettings, Outcome, Owned
from sglang_cake.runahead.messages import can_carry
from sglang_cake.runahead.partition import PARAMETER
from sglang_cake.runahead.partition_table import WatchedTable
from sglang_cake.runahead.zeromq import ZmqTransport

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger("sglang_cake")

# How long all members may hold their slots for a step that SGLang does not begin.
BEGIN_S = 3.0
HANDOVER_S = 0.02  # assumed until one was measured
BYTES_PER_S = 1e9
_NEWEST = 0.3  # weight of the newest chain in the handover time
_FADE = 0.02  # how far it returns to HANDOVER_S with each prompt that is computed alone
_WHATEVER = float("inf")
# Of prompts that are being loaded, so many get their first plan in one step. Beside these, one of
# the others is planned again, in turn: their facts change with each block, and the requests that
# decode wait for the plans.
_FIRST_PLANS = 4

_HOOK = "TpModelWorker.forward_batch_generation"

# A step is computed alone, waits for helpers, or is shared: up to which token, and how many tokens
# the helpers compute.
Verdict = Literal["alone", "wait"] | tuple[int, int]


class Aborted(RunaheadError):
    """The request was aborted."""

    reason = "aborted"


class Runahead:
    """One scheduler process as a member of a group. The scheduler thread owns it.

    Args:
        namespace: hex digest; None while the tree also holds KV of another namespace.
        record_of: `(req)` gives the live record of a request, if it has one.
        loads_only: prompts that are being loaded are not computed.
        least_tokens: shorter spans are not shared.
        limits: the limits of one forward, here and on every member, without a table.
        member_settings: for tests.
    """

    def __init__(
        self,
        rank: int,
        transport: ZmqTransport,
        rows: PoolRows,
        gate: LayerGate,
        *,
        step_costs: StepCosts,
        counters: Counters,
        namespace: Callable[[], str | None],
        record_of: Callable[["Req"], PromptRecord | None],
        loads_only: bool,
        least_tokens: int,
        limits: ChainLimits,
        table: WatchedTable,
        member_settings: MemberSettings = MEMBER_SETTINGS,
    ) -> None:
        self._gate = gate
        self._step_costs = step_costs
        self._counters = counters
        self._namespace = namespace
        self._record_of = record_of
        self._loads_only = loads_only
        self._limits = limits
        self._least_tokens = least_tokens
        self._token_bytes = rows.layers * rows.token_bytes
        self._table = table
        self._handover_s = HANDOVER_S
        self._answer_s = member_settings.answer_s
        self._owned: Owned | None = None  # the own prompt that helpers compute, or were asked to
        self._asked: set[str] = set()  # requests for which helpers were asked
        # For which no chain pays, with what that depends on: they are looked at before each step.
        # The one that was planned last is the last.
        self._unpaid: dict[str, object] = {}
        self._loading: set[str] = set()  # requests being loaded that were looked at in this step
        self._planned_again: str | None = None  # the one of them that this step may plan again
        self._first_plans = 0  # of requests being loaded, in this step
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes an idle scheduler
        self._poller: Any = None
        self._scheduler: Scheduler | None = None  # known from the first poll on
        self.member = Member(rank, transport, rows, self._wake, settings=member_settings)
        self._runner = SpanRunner(self.member, gate, counters, limits)

    # ---- once a step ----

    def poll(self, scheduler: "Scheduler") -> None:
        """Serve the offers of other members. Call between two steps."""
        self._scheduler = scheduler
        self._planned_again = next((rid for rid in self._unpaid if rid in self._loading), None)
        self._loading.clear()
        self._first_plans = 0
        self._listen(scheduler)
        if self._owned is not None and time.monotonic() - self._owned.began_s > BEGIN_S:
            self._drop("the step did not begin")
        offer = self.member.next_offer()
        if offer is None:
            return
        if offer.namespace != self._namespace():
            self.member.refuse(offer, "its KV means something else")
        else:
            self._runner.serve(scheduler, offer)

    # ---- an own request that is about to begin ----

    def consider(self, req: "Req", *, alone: bool) -> Verdict:
        """Whether the step of `req` from `req.prefix_len`, which touches no island, is shared.

        Args:
            alone: no other request is in this step.
        Returns the answer; "wait": helpers were asked, and have not answered yet.
        """
        tail = self._stored_tail(req)
        stop = len(req.full_untruncated_fill_ids) if tail is None else island_start(tail.view)
        owned = self._owned
        if owned is not None and owned.request is req:
            return self._answered(owned, req, stop, alone=alone)
        if owned is not None or not alone or req.rid in self._asked:
            return "alone"
        if not _is_plain(req) or self._namespace() is None:
            return "alone"
        plan = self._plan(req, Span(req.prefix_len, stop), tail)
        if plan is None:
            return "alone"
        self._asked.add(req.rid)
        return "wait" if self._propose(req, plan) else "alone"

    def measures(self, req: "Req") -> bool:
        """Whether the request is to be split in a certain way, as those of a search are."""
        return _asked_for(req) not in (None, "alone")

    def release(self, rid: str) -> None:
        """The request has ended, or was aborted or retracted: end its chain."""
        self._asked.discard(rid)
        if self._unpaid.pop(rid, None) is not None:  # otherwise one slow chain would be the last
            self._handover_s += _FADE * (HANDOVER_S - self._handover_s)
        if self._owned is not None and self._owned.request.rid == rid:
            self._drop("the request is over", label="aborted")

    # ---- the forward ----

    def forward(self, original: OriginalFunction, worker: Any, batch: Any, **kwargs: Any) -> Any:
        """AROUND a worker's `forward_batch_generation`. If the chain fails, all is computed here.

        Raises: errors of SGLang.
        """
        owned = self._owned
        if owned is None or batch is None or owned.request not in batch.reqs:
            return original(worker, batch, **kwargs)
        span, scheduler, req = owned.span, self._scheduler, batch.reqs[0]
        if not _computes(batch, span):
            self._drop("the step became another one")
            return original(worker, batch, **kwargs)
        if not owned.agreed or owned.namespace != self._namespace():
            self._drop("the weights have changed" if owned.agreed else "no answer")
            return self._forward_alone(original, worker, batch, span, kwargs)
        began_s = time.monotonic()
        try:
            assert scheduler is not None
            owned.passing.watch = lambda: _check_abort(scheduler, req)
            slots = batch.out_cache_loc[: owned.split - span.start].long()
            owned.passing.receiver.bind(slots, span.start)
            self._step_costs.do_not_measure()
            with self._gate(owned.passing):
                result = original(worker, cut_batch(batch, owned.split, span.stop), **kwargs)
        except Aborted as error:
            self._counters.add("runahead_failures", label=error.reason)
            self._end(owned, "cancelled", str(error))
            assert scheduler is not None
            _give_up(scheduler, req)
            # The least that a step may compute; its result is dropped.
            return original(worker, cut_batch(batch, span.stop - 1, span.stop), **kwargs)
        except RunaheadError as error:
            logger.warning("cake runahead: computing alone: %s", error)
            self._counters.add("runahead_failures", label=error.reason)
            self._end(owned, "failed", str(error))  # after this, no part is written here
            traceback.clear_frames(error.__traceback__)  # they hold the memory of the forward
            return self._forward_alone(original, worker, batch, span, kwargs)
        except Exception as error:
            if original.error is error:
                raise
            self._end(owned, "failed", repr(error))
            BOUNDARY.failed(_HOOK, error, rid=req.rid)
            traceback.clear_frames(error.__traceback__)
            return self._forward_alone(original, worker, batch, span, kwargs)
        self._shared(req, owned, time.monotonic() - began_s)
        return result

    def close(self) -> None:
        """Leave the group. Wake-ups end no sleep of the scheduler any more. May be called twice."""
        if self._poller is not None:
            self._poller.unregister(self._woken)
            self._poller = None
        if self._owned is not None:
            self._drop("it leaves the group")
        self.member.close()

    # ---- inside ----

    def _stored_tail(self, req: "Req") -> StoredTail | None:
        record = self._record_of(req)
        if record is None or not record.loading:
            return None
        cost = self._step_costs.costs_alone(record).load
        return StoredTail(record.meet.view(), record.progress, cost)

    def _plan(self, req: "Req", span: Span, tail: StoredTail | None) -> ChainPlan | None:
        helpers = self.member.helpers(span.start)
        if not helpers or (tail is not None and self._loads_only):
            return None
        costs = ChainCosts(
            self._step_costs.agreed,
            self._handover_s,
            self.member.bytes_per_s() or BYTES_PER_S,
            self._token_bytes,
        )
        limits = replace(self._limits, table=self._table.read(time.monotonic()))
        asked = _asked_for(req)
        if asked == "alone" or (asked is None and span.tokens < self._least_tokens):
            return None
        if asked == "closed":
            limits = replace(limits, table=None)
        elif asked not in (None, "table"):
            return forced_plan(asked, span, helpers, limits)
        pays = PAYS if asked is None else _WHATEVER
        if tail is not None and not self._may_plan(req.rid):
            return None
        facts = (span, helpers, costs, limits, None if tail is None else tail.facts)
        plan = None
        if self._unpaid.pop(req.rid, None) != facts:
            if tail is not None:
                plan = plan_beside_loader(tail, helpers, costs, limits, pays=pays)
            else:
                plan = plan_chain(span, helpers, costs, limits, pays=pays)
        if plan is None:
            self._unpaid[req.rid] = facts
        return plan

    def _may_plan(self, rid: str) -> bool:
        """Whether a request that is being loaded is planned in this step."""
        self._loading.add(rid)
        if rid in self._unpaid:
            return rid == self._planned_again
        self._first_plans += 1
        return self._first_plans <= _FIRST_PLANS

    def _propose(self, req: "Req", plan: ChainPlan) -> bool:
        namespace = self._namespace()
        assert namespace is not None
        bounds = plan.partition.bounds
        alone_s = self._step_costs.agreed.step_s(bounds[0], bounds[-2])
        try:
            self._owned = self.member.propose(
                (*plan.helpers, self.member.rank),
                plan.partition,
                array("i", req.full_untruncated_fill_ids[: bounds[-2]]),
                namespace=namespace,
                extra_key=req.extra_key,
                cache_salt=req.cache_salt,
                # The time to compute it: waiting in vain at most doubles that.
                patience_s=max(alone_s, 10 * self._answer_s),
                request=req,
            )
        except RunaheadError as error:
            self._counters.add("runahead_failures", label=error.reason)
            return False
        return True

    def _answered(self, owned: Owned, req: "Req", stop: int, *, alone: bool) -> Verdict:
        why = owned.refused or owned.passing.broken
        if req.prefix_len != owned.span.start or stop < owned.span.stop or not alone:
            why = "the step became another one"
        elif owned.namespace != self._namespace():
            why = "the weights have changed"
        elif why is None and not owned.agreed and time.monotonic() - owned.began_s > self._answer_s:
            why = "no answer"
        if why is not None:
            logger.info("cake runahead: request %r alone: %s", req.rid, why)
            self._drop(why)
            return "alone"
        return (owned.span.stop, owned.split - owned.span.start) if owned.agreed else "wait"

    def _drop(self, reason: str, label: str = "refused") -> None:
        assert self._owned is not None
        if self._owned.passing.broken is not None:
            label = "broken"
        self._counters.add("runahead_failures", label=label)
        self._end(self._owned, "cancelled", reason)

    def _end(self, owned: Owned, outcome: Outcome, reason: str = "") -> None:
        self._owned = None
        self.member.end_owned(owned, outcome, reason)

    def _forward_alone(
        self, original: OriginalFunction, worker: Any, batch: Any, span: Span, kwargs: Any
    ) -> Any:
        """Compute the whole span here, in forwards of at most `step_tokens`."""
        start, step_tokens = span.start, self._limits.step_tokens
        while span.stop - start > step_tokens:
            run_forward(worker, cut_batch(batch, start, start + step_tokens))
            start += step_tokens
        return original(worker, cut_batch(batch, start, span.stop), **kwargs)

    @guarded(_HOOK)
    def _shared(self, req: "Req", owned: Owned, took_s: float) -> None:
        self._learn(owned)
        logger.info(
            "cake runahead: request %r shared as %s: %.3f s, of which waited %.3f s",
            req.rid,
            owned.partition.bounds,
            took_s,
            owned.passing.receiver.waited_s,
        )
        self._end(owned, "done")
        self._tell(req, owned)

    def _learn(self, owned: Owned) -> None:
        if self._step_costs.measured:
            prefill = self._step_costs.agreed
            slowest_s = max(prefill.step_s(*span) for span in owned.partition.spans)
            lost_s = max(0.0, time.monotonic() - owned.began_s - slowest_s)
            self._handover_s += _NEWEST * (lost_s - self._handover_s)

    def _tell(self, req: "Req", owned: Owned) -> None:
        """Report the part of the other members, in counters and in the response."""
        receiver = owned.passing.receiver
        helped_tokens = owned.split - owned.span.start
        self._counters.add("runahead_hops", len(owned.helpers))
        self._counters.add("helped_tokens", helped_tokens)
        self._counters.add("runahead_bytes", receiver.bytes)
        record = self._record_of(req)
        if record is None:
            return
        record.helped.clear()
        record.helped["helped_tokens"] = helped_tokens
        if _asked_for(req) is not None:  # a search or a benchmark
            record.helped.update(
                bounds=list(owned.partition.bounds),
                received_bytes=receiver.bytes,
                waited_s=round(receiver.waited_s, 6),
                table=None if self._table.path is None else self._table.path.name,
            )
        if req.customized_info and "cake" in req.customized_info:  # told before the forward
            req.customized_info["cake"] = [record.report()]

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _listen(self, scheduler: "Scheduler") -> None:
        """Let `_wake` end the sleep of an idle scheduler, from now on."""
        sleeper = getattr(scheduler, "idle_sleeper", None)
        poller = getattr(sleeper, "poller", None)
        if poller is not None and poller is not self._poller:
            import zmq

            poller.register(self._woken, zmq.POLLIN)
            self._poller = poller
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)


def _is_plain(req: "Req") -> bool:
    """Whether the request needs nothing but KV of the tokens that helpers would compute, and an
    offer can describe it."""
    return (
        not reads_prompt(req)
        and unkeyed_because(req) is None
        and not req.return_hidden_states
        and not req.return_routed_experts
        and not req.return_indexer_topk
        and req.lora_id is None
        and req.multimodal_inputs is None
        # SGLang gives its beams request rows after an aborted step too, and never frees those.
        and req.beam_group is None
        and not req.output_ids
        and can_carry(req.extra_key)
        and can_carry(req.cache_salt)
    )


def _computes(batch: Any, span: Span) -> bool:
    """Whether the batch is a step of one request that computes this span."""
    return bool(
        batch.forward_mode.is_extend()
        and not batch.forward_mode.is_mixed()
        and len(batch.reqs) == 1
        and (batch.prefix_lens[0], batch.prefix_lens[0] + batch.extend_lens[0]) == span
    )


def _asked_for(req: "Req") -> object:
    """The PARAMETER of the request; None if it has none."""
    given = req.sampling_params.custom_params
    return given.get(PARAMETER) if isinstance(given, dict) else None


def _check_abort(scheduler: "Scheduler", req: "Req") -> None:
    """Look for an abort of `req` among new messages, in the middle of its step.

    All new messages are kept in order among the scheduler's deferred ones. The scheduler handles
    them after the step. Scheduler thread. Raises: Aborted.
    """
    from sglang.srt.managers.io_struct import AbortReq

    for each in take_deferred_requests(scheduler):
        if isinstance(each, AbortReq) and (each.abort_all or req.rid.startswith(each.rid)):
            raise Aborted("its request is aborted")


def _give_up(scheduler: "Scheduler", req: "Req") -> None:
    """End the current step of `req` without the KV that it was to compute.

    As SGLang ends a step whose KV could not be loaded (`run_batch`): sampled tokens are dropped,
    the request's KV does not join the tree, and its slots are freed.
    """
    drop_answer(req)
    abort_chunked_request(scheduler, req)
