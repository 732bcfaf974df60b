"""Many requests through one chunked place, loads that come when they like: all come to their end,
and nobody goes back to the queue but for somebody who gets on in that very step."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from test_coordinator import BLOCK, PAGE, Desk, req_of

from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.request.restore import Restore
from sglang_cake.integration.scheduler import queue_order
from sglang_cake.integration.scheduler.prefill_adder import CakePrefillAdder
from sglang_cake.loading.meet import BlockState
from sglang_cake.loading.planner import Step

BUDGET, STEPS = 40, 400


class Floor:
    """A server's prefill: steps as SGLang forms them, over a tree that may forget who waits."""

    def __init__(self, seed: int, priority: str) -> None:
        self.chance = random.Random(seed)
        self.desk = Desk(slots=200 * BLOCK, mode="both", priority=priority)
        self.queue: list[Any] = []
        self.chunked: Any = None
        self.policy: Any = SimpleNamespace(
            enable_priority_scheduling=self.chance.random() < 0.5, priority_sign=-1
        )
        self.number = self.returns = self.progress = 0
        self.closed: list[Any] = []
        self.max_queued_requests = None

    def arrive(self, rid: str) -> None:
        req: Any = req_of(self.chance.choice((1.5, 4.5, 8.5)), rid)
        req.cache_salt = rid  # a prompt of its own
        req.return_logprob, req.priority = self.chance.random() < 0.1, self.chance.randrange(2)
        req.in_tree = 0
        self.desk.arrive(req)
        blocks = len(req.origin_input_ids) // BLOCK
        restore = self.desk.cake.restore(rid)
        assert restore is not None
        if self.chance.random() < 0.6:
            self.desk.cake.end(rid)
            keys = restore.chain.of(req.origin_input_ids)

            async def put() -> None:
                for b in range(blocks):
                    await self.desk.memory.put(keys[b], memoryview(self.desk.block(b)))

            self.desk.io.run(put(), 20.0)
            self.desk.arrive(req)
            self.closed += keys
        self.queue.append(req)

    def step(self) -> None:
        cake = self.desk.cake
        self.number += 1
        while self.closed and self.chance.random() < 0.4:
            self.desk.open(self.closed.pop(self.chance.randrange(len(self.closed))))
        cake.poll(queue_order.serving(self.chunked, self.queue, cake, self.policy, fits=True))
        queue_order.sort_queue(self.queue, cake, self.policy)
        tree = CakeRadixCache.__new__(CakeRadixCache)
        tree.coordinator = cake
        tree.attach_running = self.attach  # type: ignore[method-assign]
        adder: Any = CakePrefillAdder.__new__(CakePrefillAdder)
        adder.tree_cache, adder._scheduler = tree, self
        adder.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        adder.rem_chunk_tokens, adder.chunked_req_limit, adder.can_run_list = BUDGET, None, []
        adder.memory_budget = SimpleNamespace(remaining_total=100_000)
        if self.chunked is not None:
            req, self.chunked = self.chunked, adder.add_chunked_req(self.chunked)
            if req in adder.can_run_list:
                self.computed(req)
        for req in list(self.queue):
            if adder.rem_chunk_tokens > 0:
                self.admit(req, adder)

    def admit(self, req: Any, adder: Any) -> None:
        """What `add_one_req` does, without SGLang's memory."""
        cake = self.desk.cake
        if cake.hold(req):
            return
        req.prefix_len = req.in_tree
        restore = cake.restore(req.rid)
        if restore is not None and restore.meet.front > req.in_tree:
            self.progress += 1  # the tree forgot: whoever was put back for it could not know
        cake.settle(req, self.attach)
        req.in_tree = req.prefix_len
        step = cake.plan(req, adder.rem_chunk_tokens)
        total = len(req.origin_input_ids)
        stop = min(total, req.prefix_len + adder.rem_chunk_tokens)
        stop = stop if step is None else step.stop
        if stop < total:
            stop -= stop % PAGE
        if (step is not None and step.wait) or stop <= req.prefix_len:
            return
        if stop < total and self.chunked is not None:
            return
        req.extend_end = stop
        cake.claimed(req, stop)
        adder.rem_chunk_tokens -= stop - req.prefix_len
        self.queue.remove(req)
        self.computed(req)
        if stop < total:
            self.chunked = req

    def computed(self, req: Any) -> None:
        self.progress += 1
        req.prefix_len = req.in_tree = req.extend_end

    def attach(self, req: Any, slots: Any, stop: int) -> None:
        self.progress += 1
        self.desk.attach(req, slots, stop)

    def waits(self, restore: Restore) -> bool:
        """Half of the time a prompt that is being loaded has nothing better to do."""
        odd = random.Random(f"{self.number} {restore.rid}").random() < 0.5
        return odd and BlockState.WANTED in restore.meet.view().states

    # ---- what the adder asks of SGLang's scheduler ----

    @property
    def waiting_queue(self) -> list[Any]:
        return self.queue

    def get_num_allocatable_reqs(self, running: int, **_: Any) -> int:
        return 4


@pytest.mark.parametrize("priority", ["adaptive", "fair", "fcfs"])
@pytest.mark.parametrize("seed", range(4))
def test_all_come_to_their_end(monkeypatch: pytest.MonkeyPatch, seed: int, priority: str) -> None:
    floor = Floor(seed, priority)

    def release(req: Any, tree: Any, checkpoint: bool) -> None:
        floor.returns += 1
        req.kv, req.in_tree = SimpleNamespace(), req.prefix_len
        if floor.chance.random() < 0.2:  # the tree needed the memory
            req.in_tree -= floor.chance.randrange(req.in_tree // PAGE + 1) * PAGE

    def compute(adder: Any, req: Any) -> Any:
        total = len(req.origin_input_ids)
        limit = min(adder.rem_chunk_tokens, adder.chunked_req_limit or total)
        req.extend_end = min(total, req.prefix_len + limit)
        if req.extend_end < total:
            req.extend_end -= req.extend_end % PAGE
        adder.rem_chunk_tokens -= req.extend_end - req.prefix_len
        adder.can_run_list.append(req)
        return req if req.extend_end < total else None

    def next_step(restore: Restore, *args: Any) -> Step:
        view = restore.meet.view()
        if floor.waits(restore):
            return Step(view.front, wait=True, keep=view.first)
        return planned(restore, *args)

    planned = Restore.next_step
    monkeypatch.setattr(Restore, "next_step", next_step)
    monkeypatch.setattr(queue_order, "release_kv_cache", release)
    monkeypatch.setattr("sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req", compute)
    try:
        arrivals = [f"r{i}" for i in range(10)]
        for _ in range(STEPS):
            if arrivals and floor.chance.random() < 0.4:
                floor.arrive(arrivals.pop())
            before = floor.returns, floor.progress
            floor.step()
            assert floor.returns == before[0] or floor.progress > before[1]
            if not arrivals and not floor.queue and floor.chunked is None:
                break
        else:
            raise AssertionError("somebody does not get on")
    finally:
        floor.desk.cake.end_all()
        floor.desk.io.close()
