"""When the request that is being chunked goes back to the queue, and for which request."""

import contextlib
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from adder_harness import BareTree, prefill_adder
from coordinator_harness import BLOCK, CoordinatorHarness, FakeReq, req_of
from registered_hooks import hooks_of
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.scheduler import Scheduler as SchedulerOfSGLang

from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.request.request_metadata import most_slots
from sglang_cake.integration.scheduler import queue_order, scheduler_hooks
from sglang_cake.integration.scheduler.coordinator import (
    NEAR,
    RECONSIDER_S,
    RECONSIDERED,
    Coordinator,
)
from sglang_cake.integration.scheduler.rank_consensus import SharedCosts
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.planner import Outlook, StepPlan
from sglang_cake.loading.priority import ROUND_TOKENS

Make = Callable[..., "ChunkedAdmission"]
PROMPT = 4 * BLOCK + 8  # tokens of each request
ROOM = queue_order.StepBudget(chunk_tokens=64, slots=100_000)


class Scheduler:
    """What a step's admission touches of SGLang's scheduler."""

    is_mixed_chunk = False
    max_queued_requests: int | None = None
    disagg_prefill_bootstrap_queue: Any = None
    min_free_slots_delayer: Any = None
    prefill_delayer: Any = None
    tp_worker: Any = None
    enable_lora = False
    lora_drainer: Any = None
    chunked_req: Any = None
    truncation_align_size: int | None = None

    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.free_rows = 8

    def get_num_allocatable_reqs(self, running: int, running_batch: Any) -> int:
        """As SGLang counts, with at most eight running requests."""
        return min(8 - running, self.free_rows)


class ChunkedAdmission:
    """A coordinator, a queue, and the admission of a chunked request as SGLang calls it. Rows are
    not real."""

    def __init__(
        self,
        priority: str,
        mode: str = "load",
        *,
        priorities: bool = False,
        low_first: bool = False,
    ) -> None:
        # In mode `load` a prompt waits until all that is stored has landed.
        self.base = CoordinatorHarness(mode=mode, priority=priority)
        self.coordinator: Any = self.base.coordinator
        self.coordinator.priority_sign = (1 if low_first else -1) * priorities
        self.scheduler = Scheduler()
        self.returns = 0
        self.arrived_s = 0.0  # the last request, on the shared clock
        self.full = False
        self.running: list[Any] = []  # requests that decode
        self.slots = ROOM.slots

    @property
    def queue(self) -> list[Any]:
        return self.scheduler.waiting_queue

    def req(self, rid: str, *, stored: bool = False, priority: int | None = None) -> Any:
        """A request that has arrived, with its lookup answered; `stored`: its blocks do not come
        until `land`."""
        number = len(self.base.coordinator.live)
        first = number * 1000
        req = FakeReq(rid, array("q", range(first, first + PROMPT)))
        keys = self.base.fill(req.origin_input_ids, set(range(4) if stored else ()))
        made: Any = req
        made.return_logprob = made.skip_radix_cache_insert = False
        made.priority = priority
        made.keys = keys
        self.base.arrive(req)
        self.base.coordinator.poll([req.rid])
        record = self.base.coordinator.live[rid]
        # On a busy machine seconds may pass between two arrivals, and a prompt that has waited for
        # so much longer goes first.
        self.arrived_s = (self.arrived_s or record.agreed.first_poll_s or 0.0) + 0.001
        record.agreed.first_poll_s = self.arrived_s
        return made

    def land(self, req: Any) -> None:
        for _ in range(4):
            self.base.open(*req.keys)
            self.base.coordinator.poll([req.rid])
        assert not self.base.coordinator.would_wait(req, 64)

    def chunk(self, req: Any, decoding: int = 0) -> Any:
        """One step of the chunked request; what SGLang takes for its chunked request after it.
        Args: decoding: tokens of the chunk that requests which decode have taken."""
        adder = prefill_adder(
            self.scheduler,
            BareTree(self.coordinator),
            chunk_tokens=64,
            slots=self.slots,
            batch_is_full=self.full,
            running=self.running,
        )
        adder.rem_chunk_tokens -= decoding
        left = adder.add_chunked_req(req)
        self.budget = adder.rem_chunk_tokens
        return left

    def wait(self, req: Any) -> None:
        """A step is planned for a waiting request, which must wait for its loads."""
        step = self.base.coordinator.plan(req, 64)
        assert step is not None
        assert step.wait
        assert 0 < self.base.coordinator.loads_over_in_s < math.inf


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[ChunkedAdmission] = []

    def release(req: Any, tree: Any, checkpoint: bool) -> None:
        made[-1].returns += 1
        req.kv = SimpleNamespace()

    def compute(adder: Any, req: Any) -> Any:
        req.extend_end = req.prefix_len + BLOCK
        return req

    monkeypatch.setattr(queue_order, "release_kv_cache", release)
    monkeypatch.setattr("sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req", compute)

    def make(priority: str = "adaptive", **settings: Any) -> ChunkedAdmission:
        made.append(ChunkedAdmission(priority, **settings))
        return made[-1]

    yield make
    for admission in made:
        admission.base.coordinator.release_all()
        admission.base.close()


@pytest.mark.parametrize("priority", ["adaptive", "fair", "fcfs"])
def test_chunked_request_waiting_for_loads_yields_to_others(
    admissions: Make, priority: str
) -> None:
    admission = admissions(priority)
    stored, other = admission.req("stored", stored=True), admission.req("other")
    admission.queue.append(other)
    assert admission.chunk(stored) is None
    assert admission.budget == 64  # for others, in this very step
    assert {req.rid for req in admission.queue} == {"stored", "other"}
    assert admission.queue[0].rid == ("stored" if priority == "fcfs" else "other")
    assert admission.base.coordinator.live.get("stored") is not None  # and its loads go on
    assert admission.returns == 1


def test_chunked_request_that_fails_to_return_is_given_up_at_its_end(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = admissions()
    stored = admission.req("stored", stored=True)
    tree = BareTree(admission.coordinator)

    def fail(req: Any, tree: Any, checkpoint: bool) -> None:
        raise RuntimeError("no row")

    monkeypatch.setattr(queue_order, "release_kv_cache", fail)
    with pytest.raises(RuntimeError, match="no row"):
        queue_order.requeue(stored, [], tree, admission.coordinator)
    tree.on_release(stored, checkpointed=True)
    assert admission.coordinator.live.get("stored") is None


def test_chunked_request_stays_for_a_beam_search_that_needs_several_rows(admissions: Make) -> None:
    admission = admissions()
    stored, other = admission.req("stored", stored=True), admission.req("other")
    admission.queue.append(other)
    other.beam_group = SimpleNamespace(beam_width=4)
    assert admission.chunk(stored) is stored
    other.beam_group = None
    assert admission.chunk(stored) is None


def test_chunked_request_of_a_prefill_server_keeps_the_row_that_is_sent(admissions: Make) -> None:
    admission = admissions()
    admission.scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
    stored, other = admission.req("stored", stored=True), admission.req("other")
    admission.queue.append(other)
    assert admission.chunk(stored) is stored
    assert [req.rid for req in admission.queue] == ["other"]
    assert admission.returns == 0


@pytest.mark.parametrize("priority", ["adaptive", "fcfs"])
def test_chunked_request_without_computable_others_stays(admissions: Make, priority: str) -> None:
    admission = admissions(priority)
    stored, like = (admission.req(rid, stored=True) for rid in ("stored", "like"))
    unknown = req_of(4.5, "unknown")
    admission.base.coordinator.arrive(
        unknown, lambda tokens, limit: 0
    )  # its lookup has not been taken in
    for queue in ([], [like], [like, unknown]):
        admission.queue[:] = queue
        assert admission.chunk(stored) is stored
        assert stored.extend_end == stored.prefix_len  # parked
        assert admission.budget == 0
    assert admission.returns == 0


class CountingCoordinator:
    """A coordinator. Attributes: asked: the requests of which it was asked whether they wait."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.asked: list[str] = []

    def would_wait(self, req: Any, chunk_tokens: int) -> bool:
        self.asked.append(req.rid)
        return self._coordinator.would_wait(req, chunk_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)


def test_chunked_request_checks_only_eight_loading_requests(admissions: Make) -> None:
    admission = admissions("fcfs")
    stored = admission.req("stored", stored=True)
    admission.queue.extend(admission.req(f"like-{i}", stored=True) for i in range(20))
    counting = admission.coordinator = CountingCoordinator(admission.base.coordinator)
    assert admission.chunk(stored) is stored
    assert len(counting.asked) == 8
    admission.queue.append(admission.req("other"))
    assert admission.chunk(stored) is None  # found all the same


def test_chunked_request_that_could_not_return_stays(
    admissions: Make,
) -> None:
    admission = admissions()
    stored = admission.req("stored", stored=True)
    admission.queue.append(admission.req("other"))
    admission.scheduler.free_rows = 0  # only its own
    assert admission.chunk(stored) is stored
    admission.scheduler.free_rows, admission.full = 8, True
    assert admission.chunk(stored) is stored
    admission.full, stored.return_logprob = False, True
    assert admission.chunk(stored) is stored
    stored.return_logprob = False
    stored.skip_radix_cache_insert = True  # the tree has none of its chunks
    assert admission.chunk(stored) is stored
    stored.skip_radix_cache_insert = False
    admission.scheduler.prefill_delayer = object()  # SGLang would have it wait for others
    assert admission.chunk(stored) is stored
    admission.scheduler.prefill_delayer = None
    admission.slots = (
        len(admission.queue[0].origin_input_ids) + 8
    )  # there would be no memory for it
    assert admission.chunk(stored) is stored
    admission.slots = ROOM.slots
    admission.scheduler.max_queued_requests = 4  # SGLang might drop who is put back
    assert admission.chunk(stored) is stored
    admission.scheduler.max_queued_requests = None
    assert admission.chunk(stored) is None


def test_chunked_request_stays_if_its_adapter_could_lose_its_place(admissions: Make) -> None:
    """Requests of that adapter may decode for long."""
    admission = admissions()
    scheduler = admission.scheduler
    manager = SimpleNamespace(validate_lora_batch=lambda adapters: len(adapters) <= 2)
    scheduler.enable_lora = True
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    stored = admission.req("stored", stored=True)
    others = admission.req("other"), admission.req("last")
    stored.lora_id, others[0].lora_id, others[1].lora_id = "a", "b", "c"
    admission.queue.extend(others)
    assert admission.chunk(stored) is stored
    del admission.queue[1]
    others[1].sampling_params.ignore_eos = True
    admission.running = [others[1]]
    assert admission.chunk(stored) is stored
    others[1].lora_id = "a"
    scheduler.lora_drainer = object()  # SGLang could hold it back for the others
    assert admission.chunk(stored) is stored
    scheduler.lora_drainer = None
    assert admission.chunk(stored) is None


@pytest.mark.parametrize("beside_steps", [False, True])
def test_waiting_request_that_is_held_back_takes_no_place_of_an_adapter(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, beside_steps: bool
) -> None:
    def admit(adder: Any, req: Any, *args: Any) -> AddReqResult:
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}._lock_node", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(f"{sglangs}.add_one_req", admit)
    before_adapter = hooks_of(scheduler_hooks.install)["can_schedule_lora_req"]
    admission = admissions()
    tree: Any = BareTree(admission.coordinator)
    tree.attach_waiting = admission.base.attach

    def fits(adapters: set[str | None]) -> bool:
        return len(adapters) <= 2

    scheduler: Any = admission.scheduler
    scheduler.tree_cache = tree
    scheduler.enable_lora_overlap_loading = beside_steps
    scheduler.lora_overlap_loader = SimpleNamespace(
        try_overlap_load_lora=lambda adapter, running: fits({adapter} | running)
    )
    manager = SimpleNamespace(validate_lora_batch=fits)
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))

    def admitted(running: set[str | None]) -> list[str]:
        """The loop of SGLang's `_get_new_batch_prefill_raw`."""
        adder = prefill_adder(scheduler, tree, chunk_tokens=64)
        for req in admission.queue:
            before_adapter(scheduler, req, running)
            if SchedulerOfSGLang.can_schedule_lora_req(scheduler, req, running):
                assert adder.add_one_req(req, False, None) == AddReqResult.CONTINUE
                running.add(req.lora_id)
        return [req.rid for req in adder.can_run_list]

    for rid, adapter in zip("pqrstuv", ("a", "b", "a", None, "b", "c", None), strict=True):
        req = admission.req(rid, stored=rid in "pqu")
        req.lora_id, req.last_node = adapter, None
        req.full_untruncated_fill_ids = req.origin_input_ids
        admission.queue.append(req)
    if beside_steps:  # SGLang has loaded the adapters of the first two
        assert admitted(set()) == ["r", "t"]
        return
    assert admitted(set()) == ["r", "s", "v"]
    assert admitted({"a"}) == ["r", "s", "v"]
    assert admitted({"b"}) == ["r", "t"]
    assert admitted({"b", "c"}) == ["t"]
    held_back = [req for req in admission.queue if req.rid in "pqu"]
    admission.base.open(*(key for req in held_back for key in req.keys))
    admission.base.poll(*held_back, times=8)
    assert admitted({"b"}) == ["p", "q", "r", "t"]


def test_chunked_request_with_loads_landing_within_the_step_stays(admissions: Make) -> None:
    admission = admissions("fcfs")
    stored, other = admission.req("stored", stored=True), admission.req("other")
    admission.queue.append(other)
    other.return_logprob = True  # longer than a step, and would not let go
    assert admission.chunk(stored) is stored
    other.origin_input_ids = other.origin_input_ids[:64]
    assert admission.chunk(stored) is None
    # What is still to come is here before a step would end.
    admission.queue[:] = [other]
    load = admission.base.coordinator.live["stored"]
    costs = admission.base.step_costs
    costs.agree(SharedCosts(costs.agreed, costs.busy_s, (LoadCost(0.0, 0.015),)))
    load.agreed.elapsed_s = 0.0
    assert admission.chunk(stored) is stored
    other.origin_input_ids = other.origin_input_ids[:32]  # but not before a shorter one does
    assert admission.chunk(stored) is None


def test_chunked_request_in_fcfs_yields_to_an_earlier_landed_request(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = admissions("fcfs")
    earlier, stored = admission.req("earlier"), admission.req("stored", stored=True)
    running = admission.req("running")
    admission.queue.append(stored)
    admission.land(stored)
    assert admission.chunk(running) is running  # it had its turn while nobody asked for it
    admission.base.coordinator.release("stored")
    stored = admission.req("stored again", stored=True)
    later = admission.req("later")
    admission.queue[:] = [stored]
    admission.wait(stored)
    assert admission.chunk(later) is later  # still waits
    admission.land(stored)
    assert admission.chunk(earlier) is earlier  # was there before it
    attached: list[Any] = []
    monkeypatch.setattr(
        admission.coordinator, "attach_islands", lambda req, *args: attached.append(req)
    )
    assert admission.chunk(later) is None
    assert not attached  # nothing is done for a step that it does not get
    assert [req.rid for req in admission.queue] == ["stored again", "later"]
    assert admission.returns == 1


def test_chunked_request_yields_to_a_prompt_one_step_from_its_end(
    admissions: Make,
) -> None:
    admission = admissions()
    stored, running = admission.req("stored", stored=True), admission.req("running")
    admission.queue.append(stored)
    assert admission.chunk(running) is running
    admission.land(stored)
    assert admission.chunk(running) is None
    assert [req.rid for req in admission.queue] == ["stored", "running"]


def test_chunked_request_yields_to_an_earlier_prompt_whose_loads_have_ended(
    admissions: Make,
) -> None:
    """More than a step of it is left, and as a miss it would have been computed first."""
    admission = admissions()
    earlier, running = admission.req("earlier", stored=True), admission.req("running")
    later = admission.req("later", stored=True)
    admission.queue.extend([earlier, later])
    assert admission.chunk(running) is running
    for req in (earlier, later):
        record = admission.base.coordinator.live[req.rid]
        admission.base.coordinator.prompt_loads.set_load_from(record, None)
    assert admission.chunk(running) is None
    assert [req.rid for req in admission.queue] == ["earlier", "running", "later"]


def test_chunked_request_goes_back_behind_those_that_have_waited_longer(
    admissions: Make,
) -> None:
    """Behind the preemptor alone, the requests that go back one after another would be served in
    the opposite order, and the first of them last."""
    admission = admissions()
    oldest, older, running, younger = (
        admission.req(rid) for rid in ("oldest", "older", "running", "younger")
    )
    stored = admission.req("stored", stored=True)
    admission.land(stored)
    arrived_s = {"oldest": 0.0, "older": 1.0, "running": 2.0, "younger": 3.0, "stored": 4.0}
    for rid, at_s in arrived_s.items():
        record = admission.base.coordinator.live[rid]
        record.agreed.first_poll_s = at_s
    admission.queue[:] = [oldest, older, younger, stored]
    assert admission.chunk(running) is None
    assert admission.queue == [stored, oldest, older, running, younger]


def test_chunked_request_stays_if_memory_is_short_of_it_and_the_other(admissions: Make) -> None:
    admission = admissions()
    stored, running = admission.req("stored", stored=True), admission.req("running")
    admission.queue.append(stored)
    admission.land(stored)
    both = sum(most_slots(req) for req in (stored, running)) - running.prefix_len
    admission.slots = both
    assert admission.chunk(running) is running
    admission.slots = both + 1
    assert admission.chunk(running) is None


def test_chunked_request_where_sglang_does_not_chunk_is_computed_to_its_end(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cake has shortened its step before. Other prompts are still admitted whole."""
    admission = admissions()
    running = admission.req("running")
    running.full_untruncated_fill_ids = running.origin_input_ids
    limits = []

    def compute(adder: Any, req: Any) -> Any:
        limits.append(adder.rem_chunk_tokens)
        req.extend_end = len(req.full_untruncated_fill_ids)
        adder.can_run_list.append(req)

    monkeypatch.setattr("sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req", compute)
    tree = BareTree(admission.coordinator)
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=None)
    assert adder.add_chunked_req(running) is None
    assert limits == [len(running.full_untruncated_fill_ids)]
    assert adder.rem_chunk_tokens is None


@pytest.mark.usefixtures("stopped_clock")
def test_chunked_request_without_tokens_in_the_step_is_left_to_sglang(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With mixed chunks, requests that decode may take all tokens of a step."""
    admission = admissions(mode="auto")
    req = admission.req("chunked", stored=True)
    parked: list[Any] = []
    monkeypatch.setattr(PrefillAdder, "add_chunked_req", lambda adder, req: parked.append(req))
    failures = BOUNDARY.counts.copy()
    admission.chunk(req, decoding=64)
    assert parked == [req]
    assert failures == BOUNDARY.counts


@pytest.mark.parametrize("other", ["loads", "has landed", "is computed"])
@pytest.mark.parametrize("decoding", [64, 66])
@pytest.mark.usefixtures("stopped_clock")
def test_chunked_request_without_tokens_in_the_step_yields_to_no_other(
    admissions: Make, other: str, decoding: int
) -> None:
    """The other one would compute nothing in its place."""
    admission = admissions(mode="auto")
    waiting = admission.req("other", stored=other != "is computed")
    chunked = admission.req("chunked")
    if other == "has landed":
        admission.land(waiting)
    admission.coordinator.live["other"].agreed.ever_asked = True
    admission.queue.append(waiting)
    assert admission.chunk(chunked, decoding=decoding) is chunked
    assert admission.queue == [waiting]
    assert not BOUNDARY.counts


@pytest.mark.parametrize(
    ("planned", "saved_end", "passing", "limit"),
    [
        (None, None, None, None),
        (48, None, None, 48),
        (None, 32, None, 32),
        (48, 32, None, 32),
        (16, 32, None, 16),
        (None, None, 40, 40),
        (32, None, 40, 32),
    ],
)
def test_chunked_request_step_ends_at_the_first_of_its_stops(
    admissions: Make,
    monkeypatch: pytest.MonkeyPatch,
    planned: int | None,
    saved_end: int | None,
    passing: int | None,
    limit: int | None,
) -> None:
    """Args: passing: as many tokens as it may compute before another one that loads."""
    admission = admissions()
    step = None if planned is None else StepPlan(planned, wait=False)
    monkeypatch.setattr(admission.coordinator, "plan", lambda req, chunk_tokens: step)
    monkeypatch.setattr(admission.coordinator, "passing_tokens", lambda req, chunk_tokens: passing)
    admission.queue.append(admission.req("other", stored=True))
    tree = BareTree(admission.coordinator)
    tree.saved_end = saved_end
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64)
    adder.add_chunked_req(admission.req("running"))
    assert adder.chunked_req_limit == limit


@pytest.mark.parametrize(
    ("planned", "chunk_tokens", "align", "shorter", "limit"),
    [
        (None, 64, None, None, 60),  # where SGLang would cut it
        (64, 64, None, None, 60),
        (33, 64, None, None, 30),
        (None, 60, None, None, None),
        (None, 64, 16, None, None),  # chunks of one length
        (None, None, None, None, None),  # SGLang does not chunk
        (64, None, None, None, 60),
        (None, 64, None, 57, 50),
        (33, 64, None, 57, 30),
    ],
)
def test_chunked_request_step_is_cut_where_later_steps_keep_states(
    admissions: Make,
    monkeypatch: pytest.MonkeyPatch,
    planned: int | None,
    chunk_tokens: int | None,
    align: int | None,
    shorter: int | None,
    limit: int | None,
) -> None:
    """With `shortest-prefill-first`, SGLang leaves a part of the step to shorter prompts."""
    admission = admissions()
    admission.scheduler.truncation_align_size = align
    step = None if planned is None else StepPlan(planned, wait=False)
    monkeypatch.setattr(admission.coordinator, "plan", lambda req, chunk_tokens: step)
    monkeypatch.setattr(PrefillAdder, "add_chunked_req", lambda adder, req: req)
    tree = BareTree(admission.coordinator)
    tree.state_chunk_tokens = 10
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=chunk_tokens)
    adder.chunked_req_limit = shorter
    req = admission.req("running")
    req.full_untruncated_fill_ids = req.origin_input_ids
    adder.add_chunked_req(req)
    assert adder.chunked_req_limit == limit


def test_chunked_request_without_a_part_in_the_step_is_parked_if_others_can_take_its_place(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = admissions()
    monkeypatch.setattr(admission.coordinator, "passing_tokens", lambda req, chunk_tokens: 0)
    other = admission.req("other", stored=True)
    req = admission.req("running")
    admission.queue.append(other)
    admission.coordinator.poll([other.rid, req.rid], req.rid)
    assert admission.chunk(req) is req
    assert admission.budget == 0
    assert admission.coordinator.waiting
    assert admission.coordinator.loads_over_in_s < math.inf
    admission.full = True  # nobody could be admitted in its place
    admission.chunk(req)
    assert admission.budget > 0 or req.extend_end > req.prefix_len


@dataclass
class Admission:
    """What SGLang decides about a waiting request."""

    prefix_len: int
    extend_len: int
    is_chunked: bool = False
    max_new_tokens: int = 1


def admitted_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each admission adds its tokens. SGLang admits whole prompts; the adder
    shortens them."""
    admitted: list[int] = []

    def admit(adder: Any, req: Any, has_chunked_req: bool, align: int | None) -> AddReqResult:
        found = adder._select_prefill_admission(
            req, total_tokens=PROMPT, has_chunked_req=has_chunked_req
        )
        admitted.append(found.extend_len)
        return AddReqResult.CONTINUE

    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}._lock_node", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(f"{sglangs}.add_one_req", admit)
    monkeypatch.setattr(
        f"{sglangs}._select_prefill_admission", lambda *args, **kwargs: Admission(0, PROMPT)
    )
    return admitted


@pytest.mark.parametrize(
    ("planned", "saved_end", "chunked", "computed"),
    [
        (None, None, None, PROMPT),
        (None, 32, None, 32),
        (48, None, None, 48),
        (48, 32, None, 32),
        (48, None, "before", None),  # it would be a second chunked request
        (48, None, "in this step", None),
        (PROMPT, None, "before", PROMPT),
        (PROMPT, None, "in this step", PROMPT),
        (None, 32, "before", PROMPT),
    ],
)
def test_waiting_request_step_ends_at_the_first_of_its_stops(
    admissions: Make,
    monkeypatch: pytest.MonkeyPatch,
    planned: int | None,
    saved_end: int | None,
    chunked: str | None,
    computed: int | None,
) -> None:
    """None: it is not admitted."""
    admitted = admitted_tokens(monkeypatch)
    admission = admissions()
    step = None if planned is None else StepPlan(planned, wait=False)
    monkeypatch.setattr(admission.coordinator, "plan", lambda req, chunk_tokens: step)
    req = admission.req("waiting")
    req.last_node = None
    req.full_untruncated_fill_ids = req.origin_input_ids
    tree = BareTree(admission.coordinator)
    tree.saved_end = saved_end
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64)
    if chunked == "in this step":
        adder.new_chunked_req = object()
    assert adder.add_one_req(req, chunked == "before", None) == AddReqResult.CONTINUE
    assert admitted == ([] if computed is None else [computed])


@pytest.mark.parametrize(
    ("chunk_tokens", "chunked", "computed"),
    [(64, False, 60), (None, False, PROMPT), (64, True, PROMPT)],
)
def test_waiting_request_step_is_cut_where_later_steps_keep_states(
    admissions: Make,
    monkeypatch: pytest.MonkeyPatch,
    chunk_tokens: int | None,
    chunked: bool,
    computed: int,
) -> None:
    """Beside a chunked request, SGLang decides whether it is admitted whole."""
    admitted = admitted_tokens(monkeypatch)
    admission = admissions()
    monkeypatch.setattr(admission.coordinator, "plan", lambda req, chunk_tokens: None)
    req = admission.req("waiting")
    req.last_node = None
    req.full_untruncated_fill_ids = req.origin_input_ids
    tree = BareTree(admission.coordinator)
    tree.state_chunk_tokens = 10
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=chunk_tokens)
    assert adder.add_one_req(req, chunked, None) == AddReqResult.CONTINUE
    assert admitted == [computed]


@pytest.mark.parametrize(
    ("passing", "planned", "chunk_tokens", "align", "computed"),
    [
        (40, None, 64, None, 40),
        (40, 32, 64, None, 32),
        (40, 48, 64, None, 40),
        (0, None, 64, None, None),
        (40, None, None, None, PROMPT),  # SGLang does not chunk
        (0, None, None, None, None),
        (40, None, 64, 16, PROMPT),  # chunks of one length
    ],
)
def test_waiting_request_that_passes_others_computes_no_more_than_its_limit(
    admissions: Make,
    monkeypatch: pytest.MonkeyPatch,
    passing: int,
    planned: int | None,
    chunk_tokens: int | None,
    align: int | None,
    computed: int | None,
) -> None:
    """None: it is not admitted."""
    admitted = admitted_tokens(monkeypatch)
    admission = admissions()
    admission.scheduler.truncation_align_size = align
    step = None if planned is None else StepPlan(planned, wait=False)
    monkeypatch.setattr(admission.coordinator, "plan", lambda req, chunk_tokens: step)
    monkeypatch.setattr(admission.coordinator, "passing_tokens", lambda req, chunk_tokens: passing)
    req = admission.req("waiting")
    req.last_node = None
    req.full_untruncated_fill_ids = req.origin_input_ids
    adder = prefill_adder(
        admission.scheduler, BareTree(admission.coordinator), chunk_tokens=chunk_tokens
    )
    assert adder.add_one_req(req, False, None) == AddReqResult.CONTINUE
    assert admitted == ([] if computed is None else [computed])
    assert admission.coordinator.waiting == (computed is None)


def test_chunked_request_that_is_interrupted_does_not_lose_its_place_to_others(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no part in the last step of the one that goes first. Another one that began in that
    step would be the chunked request, and have the device to its end."""
    admission = admissions()
    chunked, other = admission.req("chunked"), admission.req("other")
    monkeypatch.setattr(admission.coordinator, "passing_tokens", lambda req, chunk_tokens: 0)
    for interrupted, result in ((False, AddReqResult.CONTINUE), (True, AddReqResult.OTHER)):
        if interrupted:
            admission.coordinator.requeued(chunked)
        adder = prefill_adder(admission.scheduler, BareTree(admission.coordinator), chunk_tokens=64)
        assert adder.add_one_req(chunked, False, None) == result
        assert adder.add_one_req(other, False, None) == AddReqResult.CONTINUE
    admission.coordinator.poll(["chunked", "other"])  # for the next step
    assert adder.add_one_req(chunked, False, None) == AddReqResult.CONTINUE


def test_shortened_step_admits_no_request_that_the_rest_of_the_prompt_has_no_slots_for(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = admissions()
    running = admission.req("running")
    admits = SimpleNamespace(prefix_len=0, extend_len=BLOCK, is_chunked=False)
    monkeypatch.setattr(
        "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission",
        lambda *args, **kwargs: admits,
    )

    def admitted(total_tokens: int, *, chunked: bool) -> bool:
        adder = prefill_adder(
            admission.scheduler,
            BareTree(admission.base.coordinator),
            chunk_tokens=64,
            slots=admission.slots,
        )
        if chunked:
            adder.can_run_list.append(running)
            assert adder.add_chunked_req(running) is running
            assert adder.rem_chunk_tokens > 0
        found = adder._select_prefill_admission(req_of(1.5, "other"), total_tokens=total_tokens)
        return found is admits

    rest = most_slots(running) - BLOCK
    admission.slots = rest + 100
    assert not admitted(100, chunked=True)
    assert admitted(99, chunked=True)
    assert admitted(100, chunked=False)


@pytest.mark.parametrize(
    ("mode", "prefill_due", "kept"),
    [("auto", True, True), ("auto", False, False), ("load", True, False)],
)
def test_request_that_waits_for_its_loads_keeps_its_memory_from_others(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, mode: str, prefill_due: bool, kept: bool
) -> None:
    """Otherwise it would wait until the answers of those are complete."""
    admission = admissions(mode=mode)
    stored, other = admission.req("stored", stored=True), admission.req("other")
    record = admission.coordinator.live["stored"]
    record.set_load_from(0)
    record.queue.prefill_due = prefill_due
    admission.queue[:] = [other, stored]
    admits = SimpleNamespace(prefix_len=0, extend_len=BLOCK, is_chunked=False)
    monkeypatch.setattr(
        "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission",
        lambda *args, **kwargs: admits,
    )
    adder = prefill_adder(
        admission.scheduler,
        BareTree(admission.coordinator),
        chunk_tokens=64,
        slots=most_slots(stored) + 100,
    )
    refused = AddReqResult.CONTINUE if kept else admits  # `stored` stands after it
    assert adder._select_prefill_admission(other, total_tokens=100) is refused
    assert adder._select_prefill_admission(other, total_tokens=99) is admits
    assert adder._select_prefill_admission(stored, total_tokens=100) is admits


@pytest.mark.usefixtures("stopped_clock")
def test_requests_that_wait_and_do_not_fit_together_leave_memory_for_the_first_one(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each was refused for the other one, neither would keep its memory in the next step."""
    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}._lock_node", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(f"{sglangs}.add_one_req", lambda *args: AddReqResult.NO_TOKEN)
    admission = admissions(mode="auto")
    one, two = admission.req("one", stored=True), admission.req("two", stored=True)
    for record in admission.coordinator.live.values():
        record.set_load_from(0)
        record.queue.prefill_due = True
    admission.queue[:] = [one, two]
    slots = most_slots(one) + 50
    tree: Any = BareTree(admission.coordinator)
    tree.attach_waiting = admission.base.attach
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64, slots=slots)
    for req in (one, two):
        req.last_node = None
        adder.add_one_req(req, False, None)
    live = admission.coordinator.live
    assert [live[rid].queue.has_memory for rid in ("one", "two")] == [True, False]


@pytest.mark.parametrize("chunked", ["before", "in the step", "none"])
def test_running_request_is_not_preempted_for_one_that_would_be_the_second_chunked_request(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, chunked: str
) -> None:
    """It would be left in the queue, and the one that was preempted for it admitted again, to be
    preempted again in the next step."""
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda adder, req: True)
    admission = admissions(mode="both")
    other, stored = admission.req("other"), admission.req("stored", stored=True)
    if chunked == "before":
        admission.scheduler.chunked_req = other
    adder = prefill_adder(admission.scheduler, BareTree(admission.coordinator), chunk_tokens=64)
    if chunked == "in the step":
        adder.new_chunked_req = other
    assert adder.preempt_to_schedule(stored) == (chunked == "none")
    assert adder.preempt_to_schedule(other)


@pytest.mark.parametrize(
    ("passing", "chunk_tokens", "chunked", "admits"),
    [
        (40, 64, False, True),
        (40, 64, True, False),  # its step ends before its prompt does
        (0, 64, False, False),
        (None, 64, True, True),
        (40, None, True, True),  # SGLang does not chunk: the step is whole
    ],
)
def test_running_request_is_not_preempted_for_one_whose_limit_beside_others_leaves_no_step(
    admissions: Make,
    monkeypatch: pytest.MonkeyPatch,
    passing: int | None,
    chunk_tokens: int | None,
    chunked: bool,
    admits: bool,
) -> None:
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda adder, req: True)
    admission = admissions()
    monkeypatch.setattr(admission.coordinator, "passing_tokens", lambda req, chunk_tokens: passing)
    if chunked:
        admission.scheduler.chunked_req = admission.req("chunked")
    tree = BareTree(admission.coordinator)
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=chunk_tokens)
    assert adder.preempt_to_schedule(admission.req("other")) == admits


@pytest.mark.parametrize("mode", ["auto", "both"])
@pytest.mark.parametrize("waiting", ["loads", "has landed", "is computed"])
@pytest.mark.parametrize("chunked", ["goes on", "begins"])
@pytest.mark.usefixtures("stopped_clock")
def test_running_request_is_not_preempted_for_one_that_the_step_has_no_tokens_for(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, mode: str, waiting: str, chunked: str
) -> None:
    """SGLang asks, since it looks at memory before tokens, and would not admit it."""
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda adder, req: True)
    admission = admissions(mode=mode)
    other, req = admission.req("other"), admission.req("waiting", stored=waiting != "is computed")
    if waiting == "has landed":
        admission.land(req)
    if chunked == "goes on":
        admission.scheduler.chunked_req = other
    for chunk_tokens in (64, None):
        adder = prefill_adder(
            admission.scheduler, BareTree(admission.coordinator), chunk_tokens=chunk_tokens
        )
        if chunk_tokens is None:
            adder.rem_input_tokens = 0
        else:
            adder.rem_chunk_tokens = 0
        adder.can_run_list.append(other)
        if chunked == "begins":
            adder.new_chunked_req = other
        assert not adder.preempt_to_schedule(req)
    assert not BOUNDARY.counts


@pytest.mark.parametrize("decoding", [64, 66])
@pytest.mark.parametrize("landed", [True, False])
def test_running_request_is_preempted_where_those_that_decode_have_all_tokens_of_a_step(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, decoding: int, landed: bool
) -> None:
    """With mixed chunks. The next step has tokens for it, unless it waits for its loads."""
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda adder, req: True)
    admission = admissions(mode="load")
    req = admission.req("waiting", stored=True)
    if landed:
        admission.land(req)
    adder = prefill_adder(admission.scheduler, BareTree(admission.coordinator), chunk_tokens=64)
    adder.rem_chunk_tokens -= decoding
    assert adder.preempt_to_schedule(req) == landed
    assert not BOUNDARY.counts


def test_queue_order_link_serves_the_shorter_rest_first(
    admissions: Make,
) -> None:
    admission = admissions()
    coordinator = admission.base.coordinator
    long, short = (admission.req(rid, stored=True) for rid in ("long", "short"))
    other = admission.req("other")
    coordinator.live.get("long").queue.outlook = Outlook(2.0, 2.0, 2.0, 0)
    coordinator.live.get("short").queue.outlook = Outlook(1.0, 1.0, 1.0, 0)
    queue = [other, short]
    assert (
        queue_order.find_preemptor(long, [short], coordinator, ROOM) is None
    )  # it waits for loads
    assert queue_order.serving(long, queue, coordinator, fits=True) == [
        "short",
        "long",
        "other",
    ]
    assert queue_order.serving(long, queue, coordinator, fits=False) == [
        "long",
        "other",
        "short",
    ]
    long.return_logprob = True  # it keeps the device: then the link is its own as well
    assert queue_order.serving(long, queue, coordinator, fits=True) == [
        "long",
        "other",
        "short",
    ]
    long.return_logprob = False
    got = queue_order.serving(short, [other, long], coordinator, fits=True)
    assert got == ["short", "other", "long"]
    assert queue_order.serving(other, [long], coordinator, fits=True) == ["other", "long"]
    assert queue_order.serving(None, [long, short], coordinator, fits=True) == [
        "long",
        "short",
    ]


def test_coordinator_link_serving_another_prompt_is_not_silent(
    admissions: Make,
) -> None:
    admission = admissions()
    coordinator = admission.base.coordinator
    first, second = (admission.req(rid, stored=True) for rid in ("first", "second"))
    coordinator.poll([first.rid, second.rid])
    loads = [coordinator.record(req) for req in (first, second)]
    for load in loads:
        assert load is not None
        load.local.served_since_s -= 1000.0
    coordinator.poll([first.rid, second.rid])
    assert [load.progress.since_s >= 1000.0 for load in loads if load] == [True, False]
    assert [load.local_elapsed_s() >= 1000.0 for load in loads if load] == [True, False]


def test_coordinator_newly_served_prompt_restarts_its_clock(
    admissions: Make,
) -> None:
    admission = admissions()
    coordinator = admission.base.coordinator
    first, second = (admission.req(rid, stored=True) for rid in ("first", "second"))
    coordinator.poll([first.rid, second.rid])
    late = coordinator.live.get("second")
    assert late is not None
    late.local.served_since_s -= 1000.0
    coordinator.poll([second.rid, first.rid])
    assert late.progress.since_s < 1000.0


@pytest.mark.parametrize("low_first", [False, True])
def test_queue_order_lower_priority_never_preempts_a_higher_one(
    admissions: Make, low_first: bool
) -> None:
    admission = admissions(priorities=True, low_first=low_first)
    high, low = (1, 5) if low_first else (5, 1)
    stored = admission.req("stored", stored=True, priority=high)
    # In `load` mode it would be parked anyway: what is asked is who is put before it.
    coordinator = admission.base.coordinator
    below = admission.req("below", priority=low)
    assert queue_order.find_preemptor(stored, [below], coordinator, ROOM) is None
    equal = admission.req("equal", priority=high)
    assert queue_order.find_preemptor(stored, [below, equal], coordinator, ROOM) is equal
    stored.priority = low
    above = admission.req("above", priority=high)
    assert queue_order.find_preemptor(stored, [above], coordinator, ROOM) is above
    admission.queue[:] = [above, below]  # as it is sorted when a step is planned
    assert admission.chunk(stored) is None
    assert admission.queue[0] is above
    # Whatever a request says: without the flag, priorities do not count.
    coordinator.priority_sign = 0
    stored.priority = high
    assert queue_order.find_preemptor(stored, [below], coordinator, ROOM) is below


@pytest.mark.parametrize("priority", ["adaptive", "fair", "fcfs"])
@pytest.mark.parametrize("chunked", [False, True])
def test_queue_order_prompt_that_let_others_go_first_keeps_its_place_against_higher_priorities(
    admissions: Make, priority: str, chunked: bool
) -> None:
    """With enough requests of a higher priority it would never be served, though it had the device
    before any of them came."""
    admission = admissions(priority, priorities=True)
    stored = admission.req("stored", stored=True, priority=0)
    admission.coordinator.poll(["stored"])
    if chunked:
        admission.queue.append(admission.req("other", priority=0))
        assert admission.chunk(stored) is None
    else:
        admission.wait(stored)
    admission.land(stored)
    admission.queue[:] = [admission.req("urgent", priority=5), stored]  # in SGLang's order
    queue_order.sort_queue(admission.queue, admission.base.coordinator)
    assert [req.rid for req in admission.queue] == ["stored", "urgent"]


@pytest.mark.parametrize("priority", ["adaptive", "fair"])
def test_queue_order_long_queue_is_sorted_as_far_as_requests_are_near(
    admissions: Make, priority: str
) -> None:
    admission = admissions(priority)
    stored = admission.req("stored", stored=True)
    near = [FakeReq(f"near{i}", array("q", [i])) for i in range(NEAR)]
    far = FakeReq("far", array("q", [0]))
    admission.coordinator.poll(["stored"])
    admission.queue[:] = [stored, *near, far]
    queue_order.sort_queue(admission.queue, admission.base.coordinator)
    assert [*admission.queue] == [*near[:-1], stored, near[-1], far]


def test_queue_order_tenant_whose_round_it_is_comes_near(admissions: Make) -> None:
    admission = admissions("fair")
    many = [FakeReq(f"a{i}", array("q", [i])) for i in range(2 * NEAR)]
    one = FakeReq("b", array("q", [0]))
    one.cache_salt = "b"
    for req in (*many, one):
        req.session = object()  # without keys
        admission.base.arrive(req)
    admission.coordinator.poll([req.rid for req in (*many, one)])
    admission.coordinator.claimed(many[0], ROUND_TOKENS + 1)
    admission.queue[:] = [*many, one]
    queue_order.sort_queue(admission.queue, admission.base.coordinator)
    assert admission.queue[0] is one


def test_queue_order_prefill_that_is_due_comes_near_among_higher_priorities(
    admissions: Make,
) -> None:
    admission = admissions(priorities=True)
    stored = admission.req("stored", stored=True, priority=0)
    admission.coordinator.poll(["stored"])
    admission.wait(stored)
    admission.land(stored)
    urgent = [FakeReq(f"urgent{i}", array("q", [i])) for i in range(2 * NEAR)]
    for each in urgent:
        each.priority = 5
    admission.queue[:] = [*urgent, stored]  # in SGLang's order
    queue_order.sort_queue(admission.queue, admission.base.coordinator)
    assert admission.queue[0] is stored


@pytest.mark.parametrize("mode", ["both", "load"])
def test_far_request_is_admitted_unless_one_that_is_near_waits(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """SGLang asks no request that is near if the adapters of all of them have no place."""
    admitted = admitted_tokens(monkeypatch)
    admission = admissions(mode=mode)
    stored = admission.req("stored", stored=True)
    far = [FakeReq(f"r{i}", array("q", range(PROMPT))) for i in range(2 * NEAR)]
    for req in far:
        req.session = object()  # without keys
        admission.base.arrive(req)
    admission.coordinator.poll([stored.rid, *(req.rid for req in far)])

    def adder() -> Any:
        return prefill_adder(
            admission.scheduler, BareTree(admission.coordinator), chunk_tokens=64, slots=ROOM.slots
        )

    now = adder()
    asked = [now.add_one_req(req, False, None) for req in far[NEAR:]]
    assert asked == [AddReqResult.CONTINUE] * (NEAR - 1) + [AddReqResult.OTHER]
    assert admission.coordinator.waiting
    assert admitted == []
    admission.land(stored)
    admission.base.leave(stored)
    admission.coordinator.poll([req.rid for req in far])
    assert adder().add_one_req(far[-1], False, None) == AddReqResult.CONTINUE
    assert admitted == [PROMPT]


def test_queue_order_prefill_of_prompts_that_wait_beyond_a_chunk_is_not_due(
    admissions: Make,
) -> None:
    """Without loads, the first two would fill the step."""
    admission = admissions(priorities=True)
    waiting = [admission.req(rid, stored=True, priority=0) for rid in "abc"]
    admission.coordinator.poll(["a", "b", "c"])
    for req in waiting:
        assert admission.coordinator.plan(req, PROMPT + 1).wait
    assert [admission.coordinator.prefill_due(req) for req in waiting] == [True, True, False]
    admission.coordinator.poll(["a", "b", "c"])  # the first two are not planned again
    assert [admission.coordinator.waits_still(req) for req in waiting[:2]] == [True, True]
    assert admission.coordinator.plan(waiting[2], PROMPT + 1).wait
    assert not admission.coordinator.prefill_due(waiting[2])
    admission.coordinator.poll(["a", "b", "c"])
    assert admission.coordinator.plan(waiting[2], PROMPT + 1).wait
    assert admission.coordinator.prefill_due(waiting[2])


@pytest.mark.usefixtures("stopped_clock")
def test_coordinator_prompt_with_due_prefill_is_not_passed_by_whole_steps_of_a_higher_priority(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = admissions(mode="auto", priorities=True)
    coordinator = admission.coordinator
    admission.req("stored", stored=True, priority=0)
    urgent = admission.req("urgent", priority=5)
    passed: list[list[float]] = []
    monkeypatch.setattr(
        coordinator.step_costs,
        "passing_tokens",
        lambda rest, most, ends_s, *others: passed.append(ends_s),
    )
    monkeypatch.setattr(coordinator.step_costs, "loads_s", lambda record: 0.1)
    coordinator.poll(["stored", "urgent"])
    coordinator.passing_tokens(urgent, 64)
    coordinator.live["stored"].queue.prefill_due = True
    coordinator.passing_tokens(urgent, 64)
    error = coordinator.step_costs.costs_alone(coordinator.live["stored"]).load.error
    assert passed == [[], [0.1 * (1 + error)]]


@pytest.mark.parametrize("waits", [False, True])
def test_request_with_due_prefill_that_gets_no_row_does_not_hold_up_higher_priorities(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(PrefillAdder, "preempt_to_schedule", lambda adder, req: req.priority > 0)
    admission = admissions(priorities=True)
    stored = admission.req("stored", stored=True, priority=0)
    urgent = admission.req("urgent", priority=5)
    adder = prefill_adder(admission.scheduler, BareTree(admission.coordinator), chunk_tokens=64)
    if not waits:
        admission.land(stored)
    assert not adder.preempt_to_schedule(stored)  # SGLang admits none after it
    admission.coordinator.live["stored"].queue.prefill_due = True
    assert adder.preempt_to_schedule(stored)
    assert adder.add_one_req(stored, False, None) is AddReqResult.CONTINUE
    assert adder.can_run_list == []
    assert adder.preempt_to_schedule(urgent)


@pytest.mark.parametrize("lacks", ["row", "memory"])
@pytest.mark.usefixtures("stopped_clock")
def test_request_that_others_stand_behind_and_that_is_not_admitted_returns_its_state(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """SGLang goes on with the next one, and takes back what a match gave to the last one alone. The
    tree may evict the state that would be copied, before the request is matched again."""
    admission = admissions(mode="auto", priorities=True)
    stored, other = admission.req("stored", stored=True, priority=0), admission.req("other")
    admission.coordinator.live["stored"].queue.prefill_due = True
    admission.coordinator.live["stored"].set_load_from(0)
    admission.queue[:] = [stored, other]
    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}.preempt_to_schedule", lambda *args: False)
    monkeypatch.setattr(
        f"{sglangs}.add_one_req",
        lambda adder, req, *args: adder._select_prefill_admission(req, total_tokens=100),
    )
    returned: list[Any] = []
    tree = BareTree(admission.coordinator)
    monkeypatch.setattr(tree, "drop_state", returned.append)
    slots = most_slots(stored) + 100
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64, slots=slots)
    admission.coordinator.new_adapters = {"its own"}
    if lacks == "row":
        assert adder.preempt_to_schedule(stored)
    req = stored if lacks == "row" else other
    assert adder.add_one_req(req, False, None) is AddReqResult.CONTINUE
    assert returned == [req]
    assert admission.coordinator.held_adapters == {"its own"}


def test_request_that_sglang_refuses_returns_its_state(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes it back too, but not that of a request in a session."""
    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}.add_one_req", lambda *args: AddReqResult.NO_TOKEN)
    admission = admissions()
    req = admission.req("other")
    returned: list[Any] = []
    tree = BareTree(admission.coordinator)
    monkeypatch.setattr(tree, "drop_state", returned.append)
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64, slots=1000)
    assert adder.add_one_req(req, False, None) is AddReqResult.NO_TOKEN
    assert returned == [req]


def test_coordinator_prompt_without_memory_to_its_end_stays_in_host_memory(
    admissions: Make,
) -> None:
    admission = admissions()
    coordinator = admission.base.coordinator
    coordinator.spare_slots = 0
    stored = admission.req("stored", stored=True)
    record = coordinator.record(stored)
    assert record is not None
    admission.land(stored)
    assert sorted(record.memory.staged) == [0, 1, 2, 3]
    assert coordinator.reclaimable_tokens == 0
    coordinator.spare_slots = math.inf
    coordinator.poll([stored.rid])
    assert not record.memory.staged
    assert coordinator.reclaimable_tokens == 4 * BLOCK


def test_waiting_request_without_memory_to_its_end_attaches_nothing(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it attached could be evicted before it is admitted, and so could its prefix, for slots
    that it would get in a poll."""
    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}._lock_node", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(f"{sglangs}.add_one_req", lambda *args: AddReqResult.NO_TOKEN)
    admission = admissions()
    coordinator = admission.base.coordinator
    coordinator.spare_slots = 0
    stored = admission.req("stored", stored=True)
    admission.land(stored)
    stored.last_node = None
    stored.full_untruncated_fill_ids = stored.origin_input_ids
    tree: Any = BareTree(coordinator)
    tree.attach_waiting = admission.base.attach
    needed = most_slots(stored)
    for slots, attached in ((needed, 0), (needed + 1, 4 * BLOCK)):
        adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64, slots=slots)
        adder.add_one_req(stored, False, None)
        assert stored.prefix_len == attached
        coordinator.poll([stored.rid])
        assert coordinator.reclaimable_tokens == 0
    record = coordinator.record(stored)
    assert record is not None
    assert record.stats.loaded_tokens == 4 * BLOCK


@pytest.mark.parametrize("mode", ["auto", "both"])
@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("tokens", [0, -2])
@pytest.mark.usefixtures("stopped_clock")
def test_waiting_request_that_the_step_has_no_tokens_for_attaches_nothing(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, mode: str, landed: bool, tokens: int
) -> None:
    """SGLang asks where windows or states lack memory, and refuses it. What it attached could be
    evicted before it is admitted."""
    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}._lock_node", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(f"{sglangs}._replay_len", lambda *args: 0, raising=False)
    monkeypatch.setattr(
        f"{sglangs}._check_prefill_budget", lambda adder, req, **kwargs: (True, tokens)
    )
    admission = admissions(mode=mode)
    stored = admission.req("stored", stored=True)
    if landed:
        admission.land(stored)
    stored.last_node = None
    stored.full_untruncated_fill_ids = stored.origin_input_ids
    tree: Any = BareTree(admission.coordinator)
    tree.attach_waiting = admission.base.attach
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64)
    adder.rem_chunk_tokens = tokens
    monkeypatch.setattr(
        f"{sglangs}.add_one_req",
        lambda adder, req, has_chunked_req, align: adder._select_prefill_admission(
            req,
            total_tokens=PROMPT,
            host_hit_length=0,
            swa_host_hit_length=0,
            truncation_align_size=align,
            has_chunked_req=has_chunked_req,
        ),
    )
    assert adder.add_one_req(stored, False, None) is AddReqResult.OTHER
    assert stored.prefix_len == 0
    assert not BOUNDARY.counts


@pytest.mark.parametrize("has_record", [True, False])
def test_waiting_request_without_memory_to_its_end_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, has_record: bool
) -> None:
    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}._lock_node", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(f"{sglangs}.add_one_req", lambda *args: AddReqResult.NO_TOKEN)
    base = CoordinatorHarness()
    base.coordinator.store_detached = not has_record
    req: Any = FakeReq("new", array("q", range(PROMPT)))
    req.last_node = None
    req.full_untruncated_fill_ids = req.origin_input_ids
    base.arrive(req)
    base.coordinator.poll([req.rid])
    assert (base.coordinator.record(req) is not None) == has_record
    asked: list[str] = []
    tree: Any = BareTree(base.coordinator)
    tree.runahead = SimpleNamespace(consider=lambda req, *, alone: asked.append(req.rid) or "wait")
    needed = most_slots(req)
    for slots, answer in ((needed, AddReqResult.NO_TOKEN), (needed + 1, AddReqResult.OTHER)):
        assert not asked
        adder = prefill_adder(Scheduler(), tree, chunk_tokens=64, slots=slots)
        assert adder.add_one_req(req, False, None) == answer
    assert asked == ["new"]
    base.close()


def test_step_plans_a_few_of_the_prompts_that_wait_and_all_of_them_in_turn(
    stopped_clock: Any, admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}._lock_node", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(f"{sglangs}.add_one_req", lambda *args: AddReqResult.NO_TOKEN)
    admission = admissions()
    coordinator = admission.base.coordinator
    tree: Any = BareTree(coordinator)
    read_first, *others = [admission.req(f"r{number}", stored=True) for number in range(12)]
    reqs = [*others, read_first]
    for req in reqs:
        req.last_node = None
        req.full_untruncated_fill_ids = req.origin_input_ids

    def planned() -> list[int]:
        """The places in the queue of those that are planned in the next step."""
        stopped_clock.now_s += RECONSIDERED * RECONSIDER_S
        coordinator.poll([req.rid for req in reqs])
        adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64)
        results = [adder.add_one_req(req, False, None) for req in reqs]
        assert results == [AddReqResult.CONTINUE] * 12
        live = coordinator.live
        return [place for place, req in enumerate(reqs) if live[req.rid].queue.planned]

    assert planned() == [*range(12)]
    assert planned() == [*range(8)]
    assert planned() == [*range(12)], "the poll has decided on the others"
    reqs[9].prefix_len = 4  # the tree has a part of it
    admission.base.open(read_first.keys[3])  # it lands
    assert planned() == [*range(8), 9, 11]


def test_step_admits_a_prompt_whose_loads_are_lost_behind_many_that_wait(
    admissions: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglangs = "sglang.srt.managers.schedule_policy.PrefillAdder"
    monkeypatch.setattr(f"{sglangs}._lock_node", lambda *args: contextlib.nullcontext())
    asked = []

    def admit(adder: Any, req: FakeReq, *args: Any) -> AddReqResult:
        asked.append(req.rid)
        return AddReqResult.NO_TOKEN

    monkeypatch.setattr(f"{sglangs}.add_one_req", admit)
    admission = admissions("fcfs")
    base = admission.base
    last = FakeReq("last", array("q", range(90_000, 90_000 + PROMPT)))
    last.return_logprob = last.skip_radix_cache_insert = False
    last.priority = None
    keys = base.fill(last.origin_input_ids, {1, 2})
    base.arrive(last)
    reqs = [*[admission.req(f"r{number}", stored=True) for number in range(10)], last]
    for req in reqs:
        req.last_node = None
        req.full_untruncated_fill_ids = req.origin_input_ids

    def step() -> None:
        base.poll(*reqs)
        adder = prefill_adder(admission.scheduler, BareTree(base.coordinator), chunk_tokens=64)
        for req in reqs:
            adder.add_one_req(req, False, None)

    step()
    assert asked == []

    async def delete() -> None:
        for key in keys:
            await base.memory.delete(key)

    base.io.run(delete(), 60)
    base.open(*keys)
    step()
    step()
    assert "last" in asked


def test_coordinator_waiting_prompt_gets_no_slots_in_place_of_its_own_prefix() -> None:
    """SGLang counts a prefix as memory that can be evicted while its prompt waits, and locks it to
    admit the prompt."""
    with CoordinatorHarness(mode="load", slots=20 * BLOCK) as harness:
        coordinator = harness.coordinator
        req = req_of(14.5)
        req.prefix_len = 8 * BLOCK
        harness.open(*harness.fill(req.origin_input_ids, set(range(14))))
        coordinator.arrive(req, lambda tokens, limit: req.prefix_len)
        harness.settle()
        coordinator.spare_slots = (4 + 8) * BLOCK  # free ones, and those of the prefix
        for _ in range(3):
            harness.poll(req)
        record = coordinator.live[req.rid]
        assert record.meet.landed_blocks == 5
        assert coordinator.reclaimable_tokens == 0
        coordinator.memory_checked(req, False)
        coordinator.spare_slots = (
            20 * BLOCK
        )  # the prompt is not asked, since another one goes first
        harness.poll(req)
        assert coordinator.reclaimable_tokens == 0
        coordinator.memory_checked(req, True)
        coordinator.spare_slots = 12 * BLOCK  # other running requests have locked the prefix
        harness.poll(req)
        assert coordinator.reclaimable_tokens == 6 * BLOCK
        harness.leave(req)


def test_coordinator_admitted_prompt_takes_slots_of_one_that_waits(admissions: Make) -> None:
    admission = admissions()
    coordinator, allocator = admission.base.coordinator, admission.base.allocator
    admission.land(admission.req("waits", stored=True))
    assert coordinator.reclaimable_tokens == 4 * BLOCK
    coordinator.spare_slots = 0
    admitted = admission.req("admitted", stored=True)
    admission.land(admitted)
    assert allocator.alloc(allocator.available_size()) is not None
    coordinator.attach_islands(admitted, admission.base.attach, admission.base)
    assert admitted.prefix_len == 4 * BLOCK
    assert coordinator.reclaimable_tokens == 0


def test_requeued_request_that_lost_a_part_of_a_page_counts_all_its_loads_as_cached(
    admissions: Make,
) -> None:
    admission = admissions()
    req = admission.req("first", stored=True)
    req.prefix_len = req.already_computed = BLOCK + 3
    other = admission.req("other")
    admission.queue.append(other)
    admission.wait(req)
    assert admission.chunk(req) is None  # it went back to the queue
    req.prefix_len = BLOCK  # whole pages are in the tree
    admission.base.coordinator.attach_islands(req, lambda *args: None)
    assert req.already_computed == BLOCK


@pytest.mark.parametrize("off", [False, True])
def test_requeued_request_without_its_record_and_its_kv_counts_no_token_as_cached(
    admissions: Make, monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    """As after a pause in which the tree was flushed, or if cake is off since then."""
    prepare = hooks_of(scheduler_hooks.install)["prepare_for_extend"]
    admitted = admitted_tokens(monkeypatch)
    admission = admissions()
    req = admission.req("first", stored=True)
    req.prefix_len = req.already_computed = BLOCK
    admission.queue.append(admission.req("other"))
    admission.wait(req)
    assert admission.chunk(req) is None  # it went back to the queue
    admission.coordinator.release_all()
    req.last_node = None
    tree = BareTree(admission.coordinator)
    if off:
        admission.coordinator.switch_off()
        tree.let_go()
    adder = prefill_adder(admission.scheduler, tree, chunk_tokens=64)
    adder.add_one_req(req, False, None)
    assert admitted == [PROMPT]
    cached: list[int] = []

    def count(batch: Any) -> None:
        cached.extend(each.prefix_len - each.already_computed for each in batch.reqs)

    prepare(count, SimpleNamespace(tree_cache=tree, reqs=[req]))
    assert cached == [0]
