"""What each step prefills: SGLang's admission, which attaches what has landed and leaves the rest
to the loader.

Each method that SGLang calls has a guarded part before, which decides, SGLang's own method, and a
guarded part after, which keeps the books. If a part fails, the request is computed as SGLang would.
"""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_cake.core.spans import Span
from sglang_cake.integration.boundary import BOUNDARY, guarded
from sglang_cake.integration.compat import lock_node
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.scheduler import queue_order

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_cake.integration.overlap.overlapped_step import LastStep
    from sglang_cake.integration.scheduler.coordinator import Coordinator

_CHUNKED, _WAITING = "CakePrefillAdder.add_chunked_req", "CakePrefillAdder.add_one_req"


@dataclass(slots=True)
class Decision:
    """What becomes of a request in this step. As made: what SGLang would do."""

    aside: bool = False  # the chunked request is back in the queue
    parked: bool = False  # it waits, and stays SGLang's chunked request
    result: AddReqResult | None = None  # a waiting request is not admitted
    early: Span | None = None  # its last step begins, over these tokens
    shared: bool = False  # others compute a part of the step ...
    helped_tokens: int = 0  # ... of so many tokens


class CakePrefillAdder(PrefillAdder):
    """It only ever shortens a step or leaves a request where it is; budgets stay SGLang's."""

    rem_chunk_tokens: int
    new_chunked_req: "Req | None"
    chunked_req_limit: int | None
    _stop: int | None = None  # where the step of the request being admitted must end

    def __init__(self, scheduler: "Scheduler", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scheduler = scheduler
        # With mixed chunks, requests that decode share the step.
        self._decodes = len(self.running_batch.reqs) if scheduler.is_mixed_chunk else 0
        self._begin()

    def add_chunked_req(self, req: "Req") -> "Req | None":
        decision = Decision()
        self._decide_chunked(decision, req)
        if decision.aside:
            return None
        if decision.parked:
            # Parked as SGLang parks it (extend_end stays at prefix_len). Nobody else is admitted in
            # this step: a batch without the chunked request would miscount its chunks.
            req.extend_end = req.prefix_len
            self.rem_chunk_tokens = 0
            return req
        if decision.early is not None:
            return self._overlap_running(req, decision.early)
        rest = super().add_chunked_req(req)
        if req in self.can_run_list:
            self._claimed(req)
        return rest

    def add_one_req(
        self, req: "Req", has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        self._stop, decision = None, Decision()
        if not self._decide_waiting(decision, req, has_chunked_req):
            self._stop, decision = None, Decision()
        if decision.result is not None:
            return decision.result
        if decision.early is not None:
            return self._overlap_waiting(req, decision.early, truncation_align_size)
        self.rem_chunk_tokens += decision.helped_tokens  # computed elsewhere
        result: AddReqResult = super().add_one_req(req, has_chunked_req, truncation_align_size)
        return self._alone(result) if decision.shared else result

    def _select_prefill_admission(self, req: "Req", **kwargs: Any) -> Any:
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        return self._shorten(req, admission, kwargs.get("has_chunked_req", False)) or admission

    def _commit_prefill_admission(self, req: "Req", admission: Any, *args: Any) -> None:
        super()._commit_prefill_admission(req, admission, *args)
        self._claimed(req)

    # ---- before ----

    @guarded("CakePrefillAdder.__init__")
    def _begin(self) -> None:
        cake = self._cake()[1]
        if cake is not None:
            cake.step_costs.scheduling(decodes=self._decodes)

    @guarded(_CHUNKED)
    def _decide_chunked(self, decision: Decision, req: "Req") -> None:
        tree, cake = self._cake()
        if cake is None:
            return
        started_s = time.perf_counter()
        scheduler = self._scheduler
        queue, policy = scheduler.waiting_queue, scheduler.policy
        room = step = first = None
        if (
            queue
            and queue_order.may_requeue(req, cake)
            and others_fit(scheduler, self.running_batch)
        ):
            room = queue_order.StepBudget(self.rem_chunk_tokens, self.rem_total_tokens)
            first = queue_order.find_preemptor(req, queue, cake, policy, room)
        if first is None:
            cake.settle(req, tree.attach_running)
            step = cake.plan(req, self.rem_chunk_tokens)
        waits = step is not None and step.wait
        early = self._early(req) if waits else None
        aside = first is not None
        if waits and early is None and room is not None:
            aside = queue_order.may_yield(req, queue, cake, room)
        if aside:
            queue_order.requeue(req, queue, tree, first)
            decision.aside = True
            cake.requeued(req.rid)
            if first is None:  # else they are in order: who overtakes, then who is overtaken
                queue_order.sort_queue(queue, cake, policy)
        elif step is not None and not waits:
            limit = step.stop - req.prefix_len
            self.chunked_req_limit = min(limit, self.chunked_req_limit or limit)
        cake.step_s += time.perf_counter() - started_s
        decision.early = early
        decision.parked = waits and early is None and not aside

    @guarded(_WAITING, False)
    def _decide_waiting(self, decision: Decision, req: "Req", has_chunked_req: bool) -> bool:
        tree, cake = self._cake()
        if cake is None:
            return True
        if cake.hold(req):
            decision.result = AddReqResult.CONTINUE  # stays in the queue; the next one may go
            return True
        restored = cake.restore(req.rid) is not None
        started_s = time.perf_counter()
        if restored:
            with lock_node(self, req.last_node):
                cake.settle(req, tree.attach_waiting)
        self._share(decision, req, has_chunked_req)
        if decision.shared or decision.result is not None or not restored:
            return True
        step = cake.plan(req, self.rem_chunk_tokens)
        if step is not None and step.wait and not has_chunked_req:
            with lock_node(self, req.last_node):
                decision.early = self._early(req)
        cake.step_s += time.perf_counter() - started_s
        if step is not None and decision.early is None:
            # To end before the prompt ends is to be chunked, and SGLang knows one such request.
            taken = has_chunked_req or self.new_chunked_req is not None
            if step.wait or (taken and step.stop < len(req.full_untruncated_fill_ids)):
                decision.result = AddReqResult.CONTINUE
            else:
                self._stop = step.stop
        return True

    def _share(self, decision: Decision, req: "Req", has_chunked_req: bool) -> None:
        """Whether others compute a part of this step."""
        tree, cake = self._cake()
        if tree.runahead is None or cake is None:
            return
        alone = not (has_chunked_req or self.can_run_list or self._decodes)
        verdict = tree.runahead.consider(req, alone=alone)
        if verdict == "wait":
            cake.waiting = True
            decision.result = AddReqResult.OTHER  # for the answers, at most; nobody goes first
        elif verdict == "share":
            extent = tree.runahead.extent(req.rid)
            assert extent is not None
            decision.helped_tokens = tree.runahead.helped_tokens(req.rid)
            self._stop, decision.shared = extent.stop, True

    def _early(self, req: "Req") -> Span | None:
        """What counts as there of a request that waits for its loads, if its last step begins now.
        That holds the device, so nobody else may want it."""
        last, scheduler = self._cake()[0].last_step, self._scheduler
        if last is None or self.can_run_list or self._decodes:
            return None
        if any(other is not req for other in scheduler.waiting_queue):
            return None
        if any(not other.finished() for other in self.running_batch.reqs):
            return None
        return last.begin(req, self.rem_chunk_tokens)

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
            # A shortened step leaves budget over, which SGLang never meets: no second one for it.
            return AddReqResult.OTHER
        return admission

    # ---- a last step that begins early ----

    def _overlap_running(self, req: "Req", early: Span) -> "Req | None":
        """Admit the last step of the chunked request."""
        tree, cake = self._cake()
        req.prefix_len = early.stop
        rest = super().add_chunked_req(req)
        if not self._keep(req, lend_from=early.start):
            req.prefix_len = req.extend_end = early.start
            self._not_now(req, tree.last_step, cake)
            rest = req
        self.rem_chunk_tokens = 0  # nobody joins this step
        return rest

    def _overlap_waiting(
        self, req: "Req", early: Span, truncation_align_size: int | None
    ) -> AddReqResult:
        """Admit the last step of a request from the queue."""
        tree, cake = self._cake()
        req.prefix_len = early.stop
        result: AddReqResult = super().add_one_req(req, False, truncation_align_size)
        admitted = req in self.can_run_list
        if self._keep(req):
            return self._alone(result)
        req.prefix_len = early.start
        if not admitted:
            self._not_now(req, tree.last_step, cake)
            return result
        tree.unlock(req.lock)
        req.lock = req.extend_end = None
        self._not_now(req, tree.last_step, cake)
        return self._alone(result)

    @guarded(_CHUNKED, False)
    def _keep(self, req: "Req", lend_from: int | None = None) -> bool:
        """Whether the step is scheduled, and has its slots."""
        tree, cake = self._cake()
        if req not in self.can_run_list or tree.last_step is None or cake is None:
            return False
        slots = tree.last_step.keep(req)
        if lend_from is not None:
            tree.lend_running(req, slots, lend_from)
            cake.claimed(req, req.extend_end)
        return True

    def _not_now(self, req: "Req", last: "LastStep | None", cake: "Coordinator | None") -> None:
        """The last step does not begin. If SGLang had admitted it, cake has failed: the request is
        taken out of the step, and computed without cake from the next one on."""
        if req not in self.can_run_list:
            self._give_up(req)
            return
        self.can_run_list.remove(req)
        if self.new_chunked_req is req:
            self.new_chunked_req = None
        try:
            if last is not None and cake is not None:
                last.abandon(req)
                cake.end(req.rid)
        except Exception as error:
            BOUNDARY.failed(_WAITING, error, unsafe=True)
        self._cake()[0].let_go()

    @guarded(_WAITING)
    def _give_up(self, req: "Req") -> None:
        last = self._cake()[0].last_step
        if last is not None:
            last.give_up(req)

    # ---- after ----

    def _alone(self, result: AddReqResult) -> AddReqResult:
        """Nobody joins this step."""
        self.rem_chunk_tokens = 0
        return result if result != AddReqResult.CONTINUE else AddReqResult.OTHER

    @guarded("CakePrefillAdder._commit_prefill_admission")
    def _claimed(self, req: "Req") -> None:
        cake = self._cake()[1]
        if cake is not None:
            cake.claimed(req, req.extend_end)

    def _cake(self) -> "tuple[CakeRadixCache, Coordinator | None]":
        tree = self.tree_cache
        assert isinstance(tree, CakeRadixCache)
        return tree, tree.coordinator


def others_fit(scheduler: "Scheduler", running: "ScheduleBatch") -> bool:
    """Whether somebody of the queue could be admitted beside the chunked request, were it put back
    and then admitted again: there are rows for both, and SGLang drops nobody from its queue for
    having waited too long, or among too many."""
    dropped = scheduler.max_queued_requests is not None or envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0
    if running.batch_is_full or dropped:
        return False
    rows = scheduler.get_num_allocatable_reqs(
        len(running.reqs), running_batch=running, num_held_rows=1
    )
    return bool(rows >= 2)
