"""Hooks into SGLang's scheduler: when requests arrive, what each step prefills."""

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.adapter import turns
from sglang_cake.adapter.tree import CakeRadixCache
from sglang_cake.errors import CakeError
from sglang_cake.spans import Span

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_cake.adapter.coordinator import Coordinator

# While nothing can run but a load is awaited, the scheduler polls; this leaves the interpreter to
# the loader in between.
_POLL_PAUSE_S = 0.0005
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"


class CakePrefillAdder(PrefillAdder):
    """SGLang's prefill admission, which attaches what has landed and leaves the rest to the loader.

    It only ever shortens a step or leaves a request where it is; budgets stay SGLang's.
    """

    rem_chunk_tokens: int
    chunked_req_limit: int | None
    _stop: int | None = None  # where the step of the request being admitted must end

    def __init__(self, scheduler: "Scheduler", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scheduler = scheduler
        # With mixed chunks, requests that decode share the step.
        self._decodes = len(self.running_batch.reqs) if scheduler.is_mixed_chunk else 0
        self._cake()[1].pace.scheduling(decodes=self._decodes)

    def add_chunked_req(self, req: "Req") -> "Req | None":
        tree, cake = self._cake()
        started_s = time.perf_counter()
        scheduler = self._scheduler
        queue, policy = scheduler.waiting_queue, scheduler.policy
        room = step = first = None
        if queue and turns.may_go_back(req, cake) and others_fit(scheduler, self.running_batch):
            room = turns.Room(self.rem_chunk_tokens, self.rem_total_tokens)
            first = turns.who_overtakes(req, queue, cake, policy, room)
        if first is None:
            cake.settle(req, tree.attach_running)
            step = cake.plan(req, self.rem_chunk_tokens)
        waits = step is not None and step.wait
        early = self._early(req) if waits else None
        if early is not None:
            cake.step_s += time.perf_counter() - started_s
            return self._overlap_running(req, early)
        aside = first is not None
        if waits and room is not None:
            aside = turns.may_stand_aside(req, queue, cake, room)
        if aside:
            turns.put_back(req, queue, tree, first)
            cake.gave_way(req.rid)
            if first is None:  # else they are in order: who overtakes, then who is overtaken
                turns.take_turns(queue, cake, policy)
        cake.step_s += time.perf_counter() - started_s
        if aside:
            return None
        if waits:
            # Parked as SGLang parks it (extend_end stays at prefix_len). Nobody else is admitted in
            # this step: a batch without the chunked request would miscount its chunks.
            req.extend_end = req.prefix_len
            self.rem_chunk_tokens = 0
            return req
        if step is not None:
            limit = step.stop - req.prefix_len
            self.chunked_req_limit = min(limit, self.chunked_req_limit or limit)
        rest = super().add_chunked_req(req)
        if req in self.can_run_list:
            cake.claimed(req, req.extend_end)
        return rest

    def add_one_req(
        self, req: "Req", has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        tree, cake = self._cake()
        if cake.hold(req):
            return AddReqResult.CONTINUE  # stays in the queue; the next request may go
        self._stop = None
        restored = cake.restore(req.rid) is not None
        started_s = time.perf_counter()
        if restored:
            with self._lock_node(req.last_node):
                cake.settle(req, tree.attach_waiting)
        shared = self._share(req, has_chunked_req, truncation_align_size)
        if shared is not None:
            return shared
        if not restored:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)
        step = cake.plan(req, self.rem_chunk_tokens)
        early = None
        if step is not None and step.wait and not has_chunked_req:
            with self._lock_node(req.last_node):
                early = self._early(req)
        cake.step_s += time.perf_counter() - started_s
        if early is not None:
            return self._overlap_waiting(req, early, truncation_align_size)
        if step is not None:
            # To end before the prompt ends is to be chunked, and SGLang knows one such request.
            taken = has_chunked_req or self.new_chunked_req is not None
            if step.wait or (taken and step.stop < len(req.full_untruncated_fill_ids)):
                return AddReqResult.CONTINUE
            self._stop = step.stop
        return super().add_one_req(req, has_chunked_req, truncation_align_size)

    def _share(
        self, req: "Req", has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult | None:
        """Admit a step of which others compute a part; None: nobody helps with this request."""
        tree, cake = self._cake()
        if tree.runahead is None:
            return None
        alone = not (has_chunked_req or self.can_run_list or self._decodes)
        verdict = tree.runahead.consider(req, alone=alone)
        if verdict == "alone":
            return None
        if verdict == "wait":
            cake.waiting = True
            return AddReqResult.OTHER  # for the answers, at most; nobody goes first meanwhile
        extent = tree.runahead.extent(req.rid)
        assert extent is not None
        self._stop = extent.stop
        self.rem_chunk_tokens += tree.runahead.helped_tokens(req.rid)  # computed elsewhere
        result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        self.rem_chunk_tokens = 0  # nobody joins this step
        return result if result != AddReqResult.CONTINUE else AddReqResult.OTHER

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

    def _overlap_running(self, req: "Req", early: Span) -> "Req | None":
        """Admit the last step of the chunked request."""
        tree, cake = self._cake()
        assert tree.last_step is not None
        req.prefix_len = early.stop
        rest = super().add_chunked_req(req)
        if req not in self.can_run_list:
            tree.last_step.give_up(req)
            req.prefix_len = req.extend_end = early.start
        else:
            tree.lend_running(req, tree.last_step.keep(req), early.start)
            cake.claimed(req, req.extend_end)
        self.rem_chunk_tokens = 0  # nobody joins this step
        return rest

    def _overlap_waiting(
        self, req: "Req", early: Span, truncation_align_size: int | None
    ) -> AddReqResult:
        """Admit the last step of a request from the queue."""
        last = self._cake()[0].last_step
        assert last is not None
        req.prefix_len = early.stop
        result = super().add_one_req(req, False, truncation_align_size)
        if req not in self.can_run_list:
            last.give_up(req)
            req.prefix_len = early.start
            return result
        last.keep(req)
        self.rem_chunk_tokens = 0  # nobody joins this step
        return result if result != AddReqResult.CONTINUE else AddReqResult.OTHER

    def _select_prefill_admission(self, req: "Req", **kwargs: Any) -> Any:
        admission = super()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        if self._stop is not None and admission.prefix_len + admission.extend_len > self._stop:
            admission = replace(
                admission,
                extend_len=self._stop - admission.prefix_len,
                is_chunked=True,
                max_new_tokens=0,
            )
        taken = kwargs.get("has_chunked_req", False) or self.new_chunked_req is not None
        if admission.is_chunked and taken:
            # A shortened step leaves budget over, which SGLang never meets: no second one for it.
            return AddReqResult.OTHER
        return admission

    def _commit_prefill_admission(self, req: "Req", admission: Any, *args: Any) -> None:
        super()._commit_prefill_admission(req, admission, *args)
        self._cake()[1].claimed(req, req.extend_end)

    def _cake(self) -> "tuple[CakeRadixCache, Coordinator]":
        tree = self.tree_cache
        assert isinstance(tree, CakeRadixCache)
        assert tree.coordinator is not None
        return tree, tree.coordinator


def install() -> None:
    """Register the scheduler hooks. Call while plugins are being loaded."""
    HookRegistry.register(f"{_POLICY}.calc_priority", _prioritized, HookType.AFTER)
    hooks = {
        "get_prefill_adder_class": _adder_class,
        "_process_hicache_events": _poll,
        "_add_request_to_queue": _arrived,
        "on_idle": _idle,
    }
    for name, hook in hooks.items():
        HookRegistry.register(f"{_SCHEDULER}.{name}", hook, HookType.AFTER)
    for name, around in {"attach": _attach, "detach": _detach}.items():
        target = f"{_SCHEDULER}.{name}_hicache_storage_wrapped"
        HookRegistry.register(target, around, HookType.AROUND)


def _coordinator(scheduler: "Scheduler") -> "Coordinator | None":
    return getattr(scheduler.tree_cache, "coordinator", None)


def _adder_class(original: Any, scheduler: "Scheduler") -> Any:
    return original if _coordinator(scheduler) is None else partial(CakePrefillAdder, scheduler)


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


def _prioritized(_: None, policy: Any, queue: "list[Req]", *args: Any, **kwargs: Any) -> None:
    coordinator = getattr(policy.tree_cache, "coordinator", None)
    if coordinator is not None:
        started_s = time.perf_counter()
        turns.take_turns(queue, coordinator, policy)
        coordinator.step_s += time.perf_counter() - started_s


def _poll(_: None, scheduler: "Scheduler", *args: Any, **kwargs: Any) -> None:
    coordinator = _coordinator(scheduler)
    if coordinator is not None:
        chunked, queue = scheduler.chunked_req, scheduler.waiting_queue
        started_s = time.perf_counter()
        scheduler.tree_cache.engine.identity.poll()
        asked = chunked is not None and bool(queue)
        fits = asked and others_fit(scheduler, scheduler.running_batch)
        coordinator.poll(turns.serving(chunked, queue, coordinator, scheduler.policy, fits=fits))
        coordinator.step_s += time.perf_counter() - started_s
        if scheduler.tree_cache.runahead is not None:
            scheduler.tree_cache.runahead.poll(scheduler)


def _arrived(_: None, scheduler: "Scheduler", req: "Req", *args: Any, **kwargs: Any) -> None:
    coordinator = _coordinator(scheduler)
    queue = scheduler.waiting_queue
    if coordinator is not None and queue and queue[-1] is req:  # else it was refused
        tree = scheduler.tree_cache
        coordinator.arrive(req, lambda tokens, limit: tree.matched_tokens(req, tokens, limit))


def _idle(_: None, scheduler: "Scheduler") -> None:
    coordinator = _coordinator(scheduler)
    if coordinator is not None and coordinator.waiting:
        time.sleep(_POLL_PAUSE_S)


def _attach(original: Any, scheduler: "Scheduler", request: Any) -> Any:
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    tree = scheduler.tree_cache
    if not isinstance(tree, CakeRadixCache) or tree.engine is None:
        return original(scheduler, request)
    try:
        tree.engine.attach(request.hicache_storage_backend)
    except CakeError as error:
        return AttachHiCacheStorageReqOutput(success=False, message=str(error))
    return AttachHiCacheStorageReqOutput(success=True, message="")


def _detach(original: Any, scheduler: "Scheduler", request: Any) -> Any:
    from sglang.srt.managers.io_struct import DetachHiCacheStorageReqOutput

    tree = scheduler.tree_cache
    if not isinstance(tree, CakeRadixCache) or tree.engine is None:
        return original(scheduler, request)
    tree.engine.detach()
    return DetachHiCacheStorageReqOutput(success=True, message="")
