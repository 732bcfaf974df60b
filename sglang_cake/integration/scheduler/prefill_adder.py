"""The admission of prompts to each step: SGLang's own, extended to attach landed blocks and to
leave other blocks to the loader.

Each method that SGLang calls decides in a guarded part (`Run`, `Share`, `OverlapLastStep`,
`Requeue`, `Park` or `Skip`), acts on it around one call of SGLang's own method, and updates cake's
records in a guarded part. If a part fails, the request is computed as SGLang would.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_cake.core.keys import Span
from sglang_cake.integration.boundary import BOUNDARY, guarded
from sglang_cake.integration.compat import lock_node
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.request.request_metadata import most_slots
from sglang_cake.integration.scheduler import queue_order
from sglang_cake.integration.scheduler.coordinator import NEAR

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_cake.integration.scheduler.coordinator import Coordinator

_CHUNKED = "CakePrefillAdder.add_chunked_req"
_WAITING = "CakePrefillAdder.add_one_req"
# Of prompts that wait for their loads, so many are planned again in each step: each costs a
# prediction. Polls decide on the others in rotation, and each of those is planned in the next step.
_PLANNED = 8


# ---- decisions ----


@dataclass(frozen=True, slots=True)
class Run:
    """The request is computed up to token `stop`; None: as far as SGLang would."""

    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """Members of a KV-Runahead group compute up to `stop` together, `helped_tokens` of it
    elsewhere."""

    stop: int
    helped_tokens: int


@dataclass(frozen=True, slots=True)
class OverlapLastStep:
    """The last step begins while the last of the stored tokens `span` are being read."""

    span: Span


@dataclass(frozen=True, slots=True)
class Requeue:
    """The chunked request goes back to the queue: after `preemptor`, or to the front."""

    preemptor: "Req | None"


@dataclass(frozen=True, slots=True)
class Park:
    """The chunked request computes nothing in this step, and stays SGLang's chunked request."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The waiting request is not admitted in this step."""

    result: AddReqResult


AS_SGLANG = Run()


# ---- admission ----


class CakePrefillAdder(PrefillAdder):
    """It only shortens a step or leaves a request where it is; budgets stay SGLang's.

    Where SGLang does not chunk, a prompt with stored blocks is still computed in several steps, of
    at most `--max-prefill-tokens`: they end where loaded blocks begin, and the loads have an end.
    """

    rem_chunk_tokens: int | None  # None: SGLang does not chunk
    rem_input_tokens: int
    new_chunked_req: "Req | None"
    chunked_req_limit: int | None
    _stop: int | None = None  # where the step of the request being admitted must end
    # Slots that the chunked request still needs. SGLang reserves none: its chunked request takes
    # all of a step, so it admits no other request beside it. Cake does.
    _kept_slots: int = 0
    # By id, the slots of prompts that wait for their loads while their prefill is due. Computed
    # alone, they would have these slots. Prompts get them in order; a prompt that does not fit gets
    # none.
    _waiting_slots: dict[str, int]
    _waiting: int = 0  # prompts that were planned in this step and wait for their loads
    _far: int = 0  # requests that are far, and were held back in this step
    _without_row: "Req | None" = None  # its prefill is due, and there is no row for it

    def __init__(self, scheduler: "Scheduler", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scheduler = scheduler
        self._waiting_slots = {}
        # With mixed chunks, requests that decode share the step.
        self._decodes = len(self.running_batch.reqs) if scheduler.is_mixed_chunk else 0
        self._decode_steps = decode_steps_between(scheduler, self.running_batch)
        self._begin()

    def add_chunked_req(self, req: "Req") -> "Req | None":
        decision = self._decide_chunked(req)
        match decision:
            case Requeue(preemptor):
                self._requeue(req, preemptor)
                if any(each is req for each in self._scheduler.waiting_queue):
                    return None
            case Park():
                # As SGLang parks it. Other requests are not admitted in this step: a batch without
                # the chunked request would miscount its chunks.
                req.extend_end = req.prefix_len
                self.rem_chunk_tokens = 0
                return req
            case OverlapLastStep(span):
                return self._overlap_chunked(req, span)
            case Run(stop) if stop is not None:
                limit = stop - req.prefix_len
                self.chunked_req_limit = min(limit, self.chunked_req_limit or limit)
        rest = self._go_on(req)
        if req in self.can_run_list:
            self._replays(req)
            self._keep_slots(req)
            self._claimed(req)
        return rest

    def _go_on(self, req: "Req") -> "Req | None":
        """SGLang's `add_chunked_req`, which needs a number of tokens."""
        given = self.rem_chunk_tokens
        if given is None:
            self.rem_chunk_tokens = len(req.full_untruncated_fill_ids)
        try:
            rest: Req | None = super().add_chunked_req(req)
        finally:
            if given is None:
                self.rem_chunk_tokens = None
        return rest

    def add_one_req(
        self, req: "Req", has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        if req is self._without_row:
            self._left_waiting(req)
            return AddReqResult.CONTINUE
        self._stop = None
        decision = self._decide_waiting(req, has_chunked_req)
        match decision:
            case Skip(skipped):
                self._left_waiting(req)
                return skipped
            case OverlapLastStep(span):
                return self._overlap_waiting(req, span, truncation_align_size)
            case Share(stop, helped_tokens):
                self._stop = stop
                if self.rem_chunk_tokens is not None:
                    self.rem_chunk_tokens += helped_tokens
            case Run(stop):
                self._stop = stop
        result: AddReqResult = super().add_one_req(req, has_chunked_req, truncation_align_size)
        if req not in self.can_run_list:
            if result is AddReqResult.CONTINUE:
                self._left_waiting(req)
            else:  # SGLang refuses it, and leaves its state to it if it is in a session
                self.tree_cache.drop_state(req)
        return self._alone(result) if isinstance(decision, Share) else result

    def _left_waiting(self, req: "Req") -> None:
        """The request stays in the queue: drop its state. SGLang does so too with a request that it
        refuses, but not before it asks for the next request."""
        self.tree_cache.drop_state(req)
        self._hold_back()

    def preempt_to_schedule(self, req: "Req") -> bool:
        """SGLang asks when no request row is free, and retracts running requests for one of a
        higher priority. After False it admits no further request in this step.

        | situation | returned |
        |---|---|
        | The request does not wait, and SGLang has retracted others. | True |
        | It waits, or none could be retracted; its prefill is not due. | False |
        | The same, and its prefill is due. | True, and `add_one_req` leaves it in the queue |

        A request waits for its own loads, for the loads of a request that it passes, because it
        would be the second chunked request, or because other prompts have all tokens of the step.
        Requests that were retracted for it would come back, and be retracted again. A request whose
        prefill is due is first for that reason alone. So requests of higher priorities after it may
        take rows that its own priority does not give it.
        """
        if not self._waits(req) and super().preempt_to_schedule(req):
            return True
        self._without_row = req if self._prefill_due(req) else None
        return self._without_row is not None

    def _select_prefill_admission(self, req: "Req", **kwargs: Any) -> Any:
        if self._kept_slots and kwargs["total_tokens"] >= self.rem_total_tokens - self._kept_slots:
            return AddReqResult.OTHER
        kept = self._kept_slots + self._slots_of_others(req)
        if kept and kwargs["total_tokens"] >= self.rem_total_tokens - kept:
            return AddReqResult.CONTINUE  # requests that keep slots may stand after it
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        return self._shorten(req, admission, kwargs.get("has_chunked_req", False)) or admission

    @property
    def _step_tokens(self) -> int:
        """The most that a prompt with stored blocks computes in this step. With mixed chunks,
        SGLang's number is below 0 if more requests decode than a chunk has tokens."""
        given = self.rem_chunk_tokens
        return max(0, self.rem_input_tokens if given is None else given)

    def _commit_prefill_admission(self, req: "Req", admission: Any, *args: Any) -> None:
        super()._commit_prefill_admission(req, admission, *args)
        self._keep_slots(req)
        self._claimed(req)

    def _replays(self, req: "Req") -> None:
        """The tokens that a chunked request computes again count in the step. SGLang expects such
        tokens of new requests only."""
        replayed = self._cake()[0].replayed_tokens(req)
        self.rem_input_tokens -= replayed
        if replayed and self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens = max(0, self.rem_chunk_tokens - replayed)

    def _slots_of_others(self, req: "Req") -> int:
        """The slots that are kept for prompts before the request; if none are kept for the request
        itself, those of all prompts."""
        rids = itertools.takewhile(lambda rid: rid != req.rid, self._waiting_slots)
        return sum(self._waiting_slots[rid] for rid in rids)

    def _keep_slots(self, req: "Req") -> None:
        self._waiting_slots.pop(req.rid, None)
        if req.extend_end < len(req.origin_input_ids) + len(req.output_ids):
            self._kept_slots = most_slots(req) - req.extend_end

    # ---- guarded parts before SGLang's own method ----

    @guarded("CakePrefillAdder.__init__")
    def _begin(self) -> None:
        coordinator = self._cake()[1]
        if coordinator is not None:
            coordinator.new_adapters = coordinator.held_adapters = set()
            coordinator.step_costs.scheduling(
                decodes=self._decodes, decode_steps=self._decode_steps
            )
            coordinator.spare_slots = self.rem_total_tokens
            # With what the tree has of them, which is not locked.
            left = self.rem_total_tokens
            for req in self._scheduler.waiting_queue:
                if not coordinator.keeps_memory(req):
                    continue
                slots = most_slots(req)
                if slots < left:
                    self._waiting_slots[req.rid] = slots
                    left -= slots

    @guarded(_CHUNKED, AS_SGLANG)
    def _decide_chunked(self, req: "Req") -> Requeue | Run | OverlapLastStep | Park:
        tree, coordinator = self._cake()
        if coordinator is None:
            return AS_SGLANG
        with coordinator.timed():
            if not self._step_tokens:
                return AS_SGLANG  # requests that decode take the whole step
            queue = self._scheduler.waiting_queue
            budget = self._budget_for_others(req, coordinator)
            if budget is not None:
                preemptor = queue_order.find_preemptor(req, queue, coordinator, budget)
                if preemptor is not None:
                    return Requeue(preemptor)
            # Requests that it passes go first only in its place.
            most = None if budget is None else self._passing_tokens(req)
            if most == 0:
                coordinator.held_back()
                return Park()
            coordinator.attach_islands(req, tree.attach_running, tree)
            step = coordinator.plan(req, self._step_tokens)
            if step is not None and step.wait:
                if (span := self._begin_overlap(req)) is not None:
                    return OverlapLastStep(span)
                yields = budget is not None and queue_order.may_yield(
                    req, queue, coordinator, budget
                )
                return Requeue(None) if yields else Park()
            stops = [None if step is None else step.stop]
            if most is not None:
                stops.append(req.prefix_len + most)
            if self.chunked_req_limit is not None:  # of `shortest-prefill-first`
                stops.append(req.prefix_len + self.chunked_req_limit)
            if replayed := tree.replayed_tokens(req):  # they share the chunk with the new tokens
                rest = self._step_tokens - replayed
                stops.append(req.prefix_len + max(rest - rest % self.page_size, self.page_size))
            return self._run(req, stops)

    def _budget_for_others(
        self, req: "Req", coordinator: "Coordinator"
    ) -> queue_order.StepBudget | None:
        """The tokens and slots that waiting requests could have of this step, if the chunked
        request goes on after it. None: the chunked request keeps its place."""
        scheduler = self._scheduler
        if not scheduler.waiting_queue or not queue_order.may_requeue(req, coordinator):
            return None
        if not others_fit(scheduler, self.running_batch, req):
            return None
        slots = self.rem_total_tokens - (most_slots(req) - req.prefix_len)
        return queue_order.StepBudget(self._step_tokens, slots)

    @guarded(_CHUNKED)
    def _requeue(self, req: "Req", preemptor: "Req | None") -> None:
        tree, coordinator = self._cake()
        assert coordinator is not None
        with coordinator.timed():
            queue = self._scheduler.waiting_queue
            queue_order.requeue(req, queue, tree, coordinator, preemptor)
            coordinator.requeued(req)
            slots = {req.rid: most_slots(req)}
            self._waiting_slots = slots | self._waiting_slots
            if preemptor is None:  # otherwise the two stand in order
                queue_order.sort_queue(queue, coordinator)

    @guarded(_WAITING, AS_SGLANG)
    def _decide_waiting(
        self, req: "Req", has_chunked_req: bool
    ) -> Run | Share | OverlapLastStep | Skip:
        tree, coordinator = self._cake()
        if coordinator is None:
            return AS_SGLANG
        if coordinator.is_far(req):  # nothing is decided on it, and its record may differ on ranks
            if not coordinator.keeps_far_waiting:
                return AS_SGLANG
            coordinator.held_back()
            self._far += 1
            # One that SGLang has sorted to the front may stand before requests that are near.
            return Skip(AddReqResult.CONTINUE if self._far < NEAR else AddReqResult.OTHER)
        if coordinator.awaits_lookup(req):
            return Skip(AddReqResult.CONTINUE)  # it stays in the queue; the next request may go
        with coordinator.timed():
            recorded = coordinator.record(req) is not None
            if self._waiting >= _PLANNED and tree.runahead is None and coordinator.waits_still(req):
                return Skip(AddReqResult.CONTINUE)
            if (most := self._passing_tokens(req)) == 0 or self._keeps_device(req):
                coordinator.held_back()
                # A request after it could become the chunked request, and have the device to the
                # end of its prefill.
                lost_place = coordinator.lost_place(req)
                return Skip(AddReqResult.OTHER if lost_place else AddReqResult.CONTINUE)
            if recorded or tree.runahead is not None:
                with lock_node(self, req.last_node):
                    has_memory = self._has_memory_for(req)
                    if recorded:
                        coordinator.memory_checked(req, has_memory)
                    # SGLang looks at memory first, so it asks in steps without tokens, too.
                    if not has_memory or not self._step_tokens:
                        # SGLang refuses it, as below. What has landed must not join the tree yet:
                        # it could be evicted before the request is admitted. Helpers would compute
                        # KV that has no slots here.
                        return AS_SGLANG
                    coordinator.attach_islands(req, tree.attach_waiting, tree)
            shared = self._decide_share(req, has_chunked_req)
            if shared is not None:
                return shared
            if not recorded:
                return AS_SGLANG
            step = coordinator.plan(req, self._step_tokens)
            if step is not None and step.wait:
                self._waiting += 1
                span = None
                if not has_chunked_req:
                    with lock_node(self, req.last_node):
                        span = self._begin_overlap(req)
                return Skip(AddReqResult.CONTINUE) if span is None else OverlapLastStep(span)
            stop = None if step is None else step.stop
            if most is not None:
                stop = _first([stop, req.prefix_len + most])
            if not has_chunked_req and self.new_chunked_req is None:
                return self._run(req, [stop])
            # SGLang knows one chunked request. A step that ends before the prompt does would make
            # this one the second.
            if stop is not None and stop < len(req.full_untruncated_fill_ids):
                return Skip(AddReqResult.CONTINUE)
            return Run(stop)

    def _run(self, req: "Req", stops: Iterable[int | None]) -> Run:
        """Run the request up to the first of `stops`, of the stop for an end state, and of the end
        of the chunk. If that is inside the prompt, the step ends where later steps keep their end
        states."""
        tree = self._cake()[0]
        stop = cut = _first([*stops, tree.step_stop(req)])
        # With an alignment, SGLang's chunks have one length.
        if self.rem_chunk_tokens is not None and not self._scheduler.truncation_align_size:
            cut = _first([cut, req.prefix_len + self.rem_chunk_tokens])
        moved = None if cut is None else tree.cut_stop(req, cut)
        return Run(stop if moved == cut else moved)

    def _passing_tokens(self, req: "Req") -> int | None:
        """How many tokens a request computes in this step beside earlier ones that wait for their
        loads. None: there is no limit."""
        tree, coordinator = self._cake()
        if coordinator is None or tree.runahead is not None:
            return None  # the members of a KV-Runahead group share steps
        tokens = coordinator.passing_tokens(req, self._step_tokens)
        if tokens and (self.rem_chunk_tokens is None or self._scheduler.truncation_align_size):
            return None  # it has no chunks, or chunks of one length
        return tokens

    def _keeps_device(self, req: "Req") -> bool:
        """Whether a waiting request would become a chunked one that cannot go back, and delay an
        earlier one that waits."""
        tree, coordinator = self._cake()
        if coordinator is None or tree.runahead is not None:
            return False
        if not coordinator.keeps_device(req, self._step_tokens):
            return False
        return not queue_order.may_requeue(req, coordinator) or not others_fit(
            self._scheduler, self.running_batch, req
        )

    def _has_memory_for(self, req: "Req") -> bool:
        """Whether a waiting request, whose prefix is locked, may have memory to its end. SGLang
        asks for a little more, so it admits no request for which this is false."""
        needed = most_slots(req) - req.prefix_len
        kept = self._kept_slots + self._slots_of_others(req)
        return bool(needed < self.rem_total_tokens - kept)

    def _decide_share(self, req: "Req", has_chunked_req: bool) -> Share | Skip | None:
        """Whether other members of a KV-Runahead group compute a part of this step; None: no."""
        tree, coordinator = self._cake()
        if coordinator is None or tree.runahead is None:
            return None
        alone = not (has_chunked_req or self.can_run_list or self._decodes)
        match tree.runahead.consider(req, alone=alone):
            case "wait":
                coordinator.waiting = True
                return Skip(AddReqResult.OTHER)  # no later request is admitted before it
            case (stop, helped_tokens):
                return Share(stop, helped_tokens)
        return None

    def _begin_overlap(self, req: "Req") -> Span | None:
        """Begin an overlapped last step of a request that waits for its loads, if it is time for
        that. The step holds the device, so no other request may want it."""
        runner = self._cake()[0].overlap_runner
        if runner is None or self.can_run_list or self._decodes:
            return None
        if req.beam_group is not None:
            return None  # if the step ended without an answer, the rows of its beams would stay
        if any(other is not req for other in self._scheduler.waiting_queue):
            return None
        if any(not other.finished() for other in self.running_batch.reqs):
            return None
        return runner.begin(req, self._step_tokens)

    @guarded("CakePrefillAdder._select_prefill_admission")
    def _shorten(self, req: "Req", admission: Any, has_chunked_req: bool) -> Any:
        if self._stop is not None and admission.prefix_len + admission.extend_len > self._stop:
            admission = replace(
                admission,
                extend_len=self._stop - admission.prefix_len,
                is_chunked=True,
                max_new_tokens=0,
            )
        if admission.is_chunked and (has_chunked_req or self.new_chunked_req is not None):
            # A shortened step leaves budget over, which SGLang does not expect: it would admit a
            # second chunked request.
            return AddReqResult.OTHER
        return admission

    # ---- an overlapped last step ----

    def _overlap_chunked(self, req: "Req", span: Span) -> "Req | None":
        """Admit the overlapped last step of the chunked request."""
        req.prefix_len = span.stop
        rest = self._go_on(req)
        if not self._confirm_overlap(req, give_from=span.start):
            req.prefix_len = span.start
            req.extend_end = span.start
            self._undo_overlap(req)
            rest = req
        self.rem_chunk_tokens = 0  # no other request joins this step
        return rest

    def _overlap_waiting(
        self, req: "Req", span: Span, truncation_align_size: int | None
    ) -> AddReqResult:
        """Admit the overlapped last step of a request from the queue."""
        tree = self._cake()[0]
        req.prefix_len = span.stop
        result: AddReqResult = super().add_one_req(req, False, truncation_align_size)
        admitted = req in self.can_run_list
        if self._confirm_overlap(req):
            return self._alone(result)
        req.prefix_len = span.start
        if not admitted:
            self._undo_overlap(req)
            return result
        tree.unlock(req.lock)
        req.lock = None
        req.extend_end = None
        self._undo_overlap(req)
        return self._alone(result)

    @guarded(_CHUNKED, False)
    def _confirm_overlap(self, req: "Req", give_from: int | None = None) -> bool:
        """Whether the step is scheduled and has its slots.

        Args: give_from: of the chunked request, the first token whose slot goes into its row.
        """
        tree, coordinator = self._cake()
        runner = tree.overlap_runner
        if req not in self.can_run_list or runner is None or coordinator is None:
            return False
        slots = runner.confirm(req)
        if give_from is not None:
            tree.give_running(req, slots, give_from)
            coordinator.claimed(req, req.extend_end, overlapped=True)
        return True

    def _undo_overlap(self, req: "Req") -> None:
        """The overlapped step does not begin. If SGLang had admitted it, cake has failed: the
        request is taken out of the step, and computed without cake from the next one on."""
        tree, coordinator = self._cake()
        admitted = req in self.can_run_list
        if admitted:
            self.can_run_list.remove(req)
        if self.new_chunked_req is req:
            self.new_chunked_req = None
        try:
            if tree.overlap_runner is not None and coordinator is not None:
                tree.overlap_runner.give_up(req)
                if admitted:
                    coordinator.release(req.rid)
        except Exception as error:
            BOUNDARY.failed(_WAITING, error, rid=req.rid, unsafe=admitted)
        if admitted:
            tree.let_go()

    # ---- after SGLang's own method ----

    def _alone(self, result: AddReqResult) -> AddReqResult:
        """No other request joins this step."""
        self.rem_chunk_tokens = 0
        return result if result != AddReqResult.CONTINUE else AddReqResult.OTHER

    @guarded(_WAITING)
    def _hold_back(self) -> None:
        coordinator = self._cake()[1]
        if coordinator is not None:
            coordinator.held_adapters = coordinator.new_adapters

    @guarded("CakePrefillAdder.preempt_to_schedule", False)
    def _waits(self, req: "Req") -> bool:
        _, coordinator = self._cake()
        if coordinator is None:
            return False
        if coordinator.is_far(req):
            return coordinator.keeps_far_waiting
        chunked = self._scheduler.chunked_req is not None or self.new_chunked_req is not None
        if not self._step_tokens and (chunked or self.can_run_list):
            return True
        most = self._passing_tokens(req)
        if most == 0 or (chunked and most is not None) or self._keeps_device(req):
            return True
        # If those that decode have all tokens, the next step has some: fewer decode in it.
        tokens = max(1, self._step_tokens)
        return coordinator.awaits_lookup(req) or coordinator.would_wait(req, tokens, whole=chunked)

    @guarded("CakePrefillAdder.preempt_to_schedule", False)
    def _prefill_due(self, req: "Req") -> bool:
        _, coordinator = self._cake()
        return coordinator is not None and coordinator.prefill_due(req)

    @guarded("CakePrefillAdder._commit_prefill_admission")
    def _claimed(self, req: "Req") -> None:
        tree, coordinator = self._cake()
        if coordinator is not None:
            runner = tree.overlap_runner
            overlapped = runner is not None and runner.step_of(req) is not None
            coordinator.claimed(req, req.extend_end, overlapped=overlapped)
            coordinator.spare_slots = self.rem_total_tokens
            tree.track_end(req)

    def _cake(self) -> "tuple[CakeRadixCache, Coordinator | None]":
        tree = self.tree_cache
        assert isinstance(tree, CakeRadixCache)
        return tree, tree.coordinator


def _first(stops: Iterable[int | None]) -> int | None:
    """The first token of these at which a step must end; None: there is none."""
    return min((stop for stop in stops if stop is not None), default=None)


def decode_steps_between(scheduler: "Scheduler", running: "ScheduleBatch") -> int:
    """How many decode steps SGLang runs between two steps that prefill. If nothing decodes, they
    take no time. With DP attention, a rank has a batch while others decode."""
    decode_steps = int(getattr(scheduler, "prefill_decode_interval", 0))
    least = getattr(scheduler, "prefill_decode_interval_min_bs", 0)  # not in SGLang 0.5.22
    if not decode_steps or len(running.reqs) < least:
        return 0
    others_decode = scheduler.require_mlp_sync and scheduler.last_batch is not None
    return decode_steps if running.reqs or others_decode else 0


def others_fit(scheduler: "Scheduler", running: "ScheduleBatch", chunked: "Req") -> bool:
    """Whether a waiting request could be admitted beside the chunked request, if that went back to
    the queue and was admitted again. There must be rows for both, and SGLang must drop no request
    for its time in the queue, or for the length of the queue, and delay none: it delays no chunked
    one. On a prefill server, a request keeps its row: its KV is being sent from there."""
    if scheduler.disagg_prefill_bootstrap_queue is not None:
        return False
    if scheduler.min_free_slots_delayer is not None or scheduler.prefill_delayer is not None:
        return False
    dropped = scheduler.max_queued_requests is not None or envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0
    if running.batch_is_full or dropped:
        return False
    if scheduler.enable_lora and not _adapters_fit(scheduler, running, chunked):
        return False
    # Beside the chunked request, which has a row.
    rows = scheduler.get_num_allocatable_reqs(len(running.reqs) + 1, running_batch=running)
    return bool(rows >= 1)


def _adapters_fit(scheduler: "Scheduler", running: "ScheduleBatch", chunked: "Req") -> bool:
    """Whether there is memory for the LoRA adapters of all requests at once. Otherwise one from the
    queue could take the place of the chunked request's, for as long as its request decodes. With a
    drainer, SGLang holds requests back for adapters of others, but no chunked one."""
    if scheduler.lora_drainer is not None:
        return False
    reqs = (chunked, *running.reqs, *scheduler.waiting_queue)
    adapters = {req.lora_id for req in reqs}
    manager = scheduler.tp_worker.model_runner.lora_manager
    return bool(manager.validate_lora_batch(adapters))
