"""The request that is being chunked: when it goes back to the queue, for whom, and when not."""

from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from test_coordinator import BLOCK, Desk, FakeReq, req_of

from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.scheduler import queue_order
from sglang_cake.integration.scheduler.prefill_adder import CakePrefillAdder
from sglang_cake.loading.cost_model import LoadCost

Make = Callable[..., FakeReq]
ROOM = queue_order.StepBudget(chunk_tokens=64, slots=100_000)


class Scheduler:
    """What a step's admission touches of SGLang's scheduler."""

    is_mixed_chunk = False
    max_queued_requests: int | None = None

    def __init__(self, *, priorities: bool = False, low_first: bool = False) -> None:
        self.waiting_queue: list[Any] = []
        self.rows = 8
        self.policy: Any = SimpleNamespace(
            enable_priority_scheduling=priorities, priority_sign=1 if low_first else -1
        )

    def get_num_allocatable_reqs(self, running: int, **_: Any) -> int:
        return self.rows


class Stand:
    """A desk, a queue, and admission as SGLang calls it; rows are not real."""

    def __init__(self, priority: str, **settings: bool) -> None:
        # In this mode a prompt waits until all that is stored has landed.
        self.desk = Desk(mode="load", priority=priority)
        self.scheduler = Scheduler(**settings)
        self.returns = 0
        self.full = False
        self.slots = ROOM.slots

    @property
    def queue(self) -> list[Any]:
        return self.scheduler.waiting_queue

    def req(self, rid: str, *, stored: bool = False, priority: int | None = None) -> Any:
        """A request that has arrived, with its lookup answered; `stored`: its blocks do not come
        until `land`."""
        number = len(self.desk.cake._restores)
        first = number * 1000
        req = FakeReq(rid, array("q", range(first, first + 4 * BLOCK + 8)))
        keys = self.desk.fill(req.origin_input_ids, set(range(4) if stored else ()))
        made: Any = req
        made.return_logprob, made.priority, made.keys = False, priority, keys
        self.desk.arrive(req)
        self.desk.cake.poll([req.rid])
        return made

    def land(self, req: Any) -> None:
        for _ in range(4):
            self.desk.open(*req.keys)
            self.desk.cake.poll([req.rid])
        assert not self.desk.cake.idle(req.rid, 64)

    def chunk(self, req: Any) -> Any:
        """One step of the chunked request; what SGLang takes for its chunked request after it."""
        tree = CakeRadixCache.__new__(CakeRadixCache)
        tree.coordinator = self.desk.cake
        adder: Any = CakePrefillAdder.__new__(CakePrefillAdder)
        adder._scheduler, adder.tree_cache = self.scheduler, tree
        adder.running_batch = SimpleNamespace(reqs=[], batch_is_full=self.full)
        adder.rem_chunk_tokens, adder.chunked_req_limit, adder.can_run_list = 64, None, []
        adder.memory_budget = SimpleNamespace(remaining_total=self.slots)
        left = adder.add_chunked_req(req)
        self.budget = adder.rem_chunk_tokens
        return left

    def turn(self, req: Any) -> None:
        """It is the turn of a waiting request that must wait for its loads."""
        step = self.desk.cake.plan(req, 64)
        assert step is not None
        assert step.wait


@pytest.fixture
def stands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stand]]:
    made: list[Stand] = []

    def release(req: Any, tree: Any, checkpoint: bool) -> None:
        made[-1].returns += 1
        req.kv = SimpleNamespace()

    def compute(adder: Any, req: Any) -> Any:
        req.extend_end = req.prefix_len + BLOCK
        return req

    monkeypatch.setattr(queue_order, "release_kv_cache", release)
    monkeypatch.setattr("sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req", compute)

    def make(priority: str = "adaptive", **settings: bool) -> Stand:
        made.append(Stand(priority, **settings))
        return made[-1]

    yield make
    for stand in made:
        stand.desk.cake.end_all()
        stand.desk.io.close()


@pytest.mark.parametrize("priority", ["adaptive", "fair", "fcfs"])
def test_who_only_waits_for_loads_leaves_the_device_to_others(
    stands: Callable[..., Stand], priority: str
) -> None:
    stand = stands(priority)
    stored, other = stand.req("stored", stored=True), stand.req("other")
    stand.queue.append(other)
    assert stand.chunk(stored) is None
    assert stand.budget == 64  # for others, in this very step
    assert {req.rid for req in stand.queue} == {"stored", "other"}
    assert stand.queue[0].rid == ("stored" if priority == "fcfs" else "other")
    assert stand.desk.cake.restore("stored") is not None  # and its loads go on
    assert stand.returns == 1


@pytest.mark.parametrize("priority", ["adaptive", "fcfs"])
def test_nobody_goes_back_for_nothing(stands: Callable[..., Stand], priority: str) -> None:
    stand = stands(priority)
    stored, like = (stand.req(rid, stored=True) for rid in ("stored", "like"))
    unknown = req_of(4.5, "unknown")
    stand.desk.cake.arrive(unknown, lambda tokens, limit: 0)  # its lookup has not been taken in
    for queue in ([], [like], [like, unknown]):
        stand.queue[:] = queue
        assert stand.chunk(stored) is stored
        assert stored.extend_end == stored.prefix_len  # parked
        assert stand.budget == 0
    assert stand.returns == 0


def test_only_the_first_loads_of_a_long_queue_are_looked_at(
    stands: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = stands("fcfs")
    stored = stand.req("stored", stored=True)
    stand.queue.extend(stand.req(f"like-{i}", stored=True) for i in range(20))
    asked: list[str] = []
    idle = stand.desk.cake.idle

    def counted(rid: str, chunk_tokens: int) -> bool:
        asked.append(rid)
        return idle(rid, chunk_tokens)

    monkeypatch.setattr(stand.desk.cake, "idle", counted)
    assert stand.chunk(stored) is stored
    assert len(asked) == 8
    stand.queue.append(stand.req("other"))
    assert stand.chunk(stored) is None  # found all the same


def test_nobody_goes_back_whose_row_would_be_gone(stands: Callable[..., Stand]) -> None:
    stand = stands()
    stored = stand.req("stored", stored=True)
    stand.queue.append(stand.req("other"))
    stand.scheduler.rows = 1  # its own
    assert stand.chunk(stored) is stored
    stand.scheduler.rows, stand.full = 8, True
    assert stand.chunk(stored) is stored
    stand.full, stored.return_logprob = False, True
    assert stand.chunk(stored) is stored
    stored.return_logprob = False
    stand.slots = len(stand.queue[0].origin_input_ids) + 8  # there would be no memory for it
    assert stand.chunk(stored) is stored
    stand.slots = ROOM.slots
    stand.scheduler.max_queued_requests = 4  # SGLang might drop who is put back
    assert stand.chunk(stored) is stored
    stand.scheduler.max_queued_requests = None
    assert stand.chunk(stored) is None


def test_nobody_stands_aside_who_would_be_late(stands: Callable[..., Stand]) -> None:
    stand = stands("fcfs")
    stored, other = stand.req("stored", stored=True), stand.req("other")
    stand.queue.append(other)
    other.return_logprob = True  # longer than a step, and would not let go
    assert stand.chunk(stored) is stored
    other.origin_input_ids = other.origin_input_ids[:64]
    assert stand.chunk(stored) is None
    # What is still to come is here before a step would end.
    stand.queue[:] = [other]
    restore = stand.desk.cake.restore("stored")
    assert restore is not None
    restore.load = LoadCost(0.0, 0.015)
    restore.elapsed_s = 0.0
    assert stand.chunk(stored) is stored
    other.origin_input_ids = other.origin_input_ids[:32]  # but not before a shorter one does
    assert stand.chunk(stored) is None


def test_in_sglangs_order_the_device_goes_back_to_who_left_it(
    stands: Callable[..., Stand],
) -> None:
    stand = stands("fcfs")
    earlier, stored = stand.req("earlier"), stand.req("stored", stored=True)
    running = stand.req("running")
    stand.queue.append(stored)
    stand.land(stored)
    assert stand.chunk(running) is running  # it had its turn while nobody asked for it
    stand.desk.cake.end("stored")
    stored = stand.req("stored again", stored=True)
    later = stand.req("later")
    stand.queue[:] = [stored]
    stand.turn(stored)
    assert stand.chunk(later) is later  # still waits
    stand.land(stored)
    assert stand.chunk(earlier) is earlier  # was there before it
    assert stand.chunk(later) is None
    assert [req.rid for req in stand.queue] == ["stored again", "later"]
    assert stand.returns == 1


def test_a_prompt_one_step_from_its_end_is_not_held_up_by_a_long_one(
    stands: Callable[..., Stand],
) -> None:
    stand = stands()
    stored, running = stand.req("stored", stored=True), stand.req("running")
    stand.queue.append(stored)
    assert stand.chunk(running) is running
    stand.land(stored)
    assert stand.chunk(running) is None
    assert [req.rid for req in stand.queue] == ["stored", "running"]


def test_the_link_goes_to_the_shorter_rest_though_the_device_does_not(
    stands: Callable[..., Stand],
) -> None:
    stand = stands()
    cake, policy = stand.desk.cake, stand.scheduler.policy
    long, short = (stand.req(rid, stored=True) for rid in ("long", "short"))
    other = stand.req("other")
    cake.restore("long").remaining_s, cake.restore("short").remaining_s = 2.0, 1.0
    queue = [other, short]
    assert (
        queue_order.find_preemptor(long, [short], cake, policy, ROOM) is None
    )  # it waits for loads
    assert queue_order.serving(long, queue, cake, policy, fits=True) == ["short", "long", "other"]
    assert queue_order.serving(long, queue, cake, policy, fits=False) == ["long", "other", "short"]
    long.return_logprob = True  # it keeps the device: then the link is its own as well
    assert queue_order.serving(long, queue, cake, policy, fits=True) == ["long", "other", "short"]
    long.return_logprob = False
    got = queue_order.serving(short, [other, long], cake, policy, fits=True)
    assert got == ["short", "other", "long"]
    assert queue_order.serving(other, [long], cake, policy, fits=True) == ["other", "long"]
    assert queue_order.serving(None, [long, short], cake, policy, fits=True) == ["long", "short"]


def test_a_link_that_works_for_another_is_not_silent(stands: Callable[..., Stand]) -> None:
    stand = stands()
    cake = stand.desk.cake
    first, second = (stand.req(rid, stored=True) for rid in ("first", "second"))
    cake.poll([first.rid, second.rid])
    restores = [cake.restore(req.rid) for req in (first, second)]
    for restore in restores:
        assert restore is not None
        restore.served_since_s -= 1000.0
    cake.poll([first.rid, second.rid])
    assert [restore.progress.since_s >= 1000.0 for restore in restores if restore] == [True, False]


def test_who_gets_the_link_owes_nothing_for_the_time_before(stands: Callable[..., Stand]) -> None:
    stand = stands()
    cake = stand.desk.cake
    first, second = (stand.req(rid, stored=True) for rid in ("first", "second"))
    cake.poll([first.rid, second.rid])
    late = cake.restore("second")
    assert late is not None
    late.served_since_s -= 1000.0
    cake.poll([second.rid, first.rid])
    assert late.progress.since_s < 1000.0


@pytest.mark.parametrize("low_first", [False, True])
def test_a_higher_priority_goes_first_and_a_lower_one_does_not(
    stands: Callable[..., Stand], low_first: bool
) -> None:
    stand = stands(priorities=True, low_first=low_first)
    high, low = (1, 5) if low_first else (5, 1)
    stored = stand.req("stored", stored=True, priority=high)
    # In `load` mode it would be parked anyway: what is asked is who is put before it.
    cake, policy = stand.desk.cake, stand.scheduler.policy
    below = stand.req("below", priority=low)
    assert queue_order.find_preemptor(stored, [below], cake, policy, ROOM) is None
    equal = stand.req("equal", priority=high)
    assert queue_order.find_preemptor(stored, [below, equal], cake, policy, ROOM) is equal
    stored.priority = low
    above = stand.req("above", priority=high)
    assert queue_order.find_preemptor(stored, [above], cake, policy, ROOM) is above
    stand.queue[:] = [above, below]  # as it is sorted when a step is planned
    assert stand.chunk(stored) is None
    assert stand.queue[0] is above
    # Whatever a request says: without the flag, priorities do not count.
    stand.scheduler.policy.enable_priority_scheduling = False
    stored.priority = high
    assert queue_order.find_preemptor(stored, [below], cake, policy, ROOM) is below
