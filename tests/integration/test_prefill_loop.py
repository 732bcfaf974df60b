"""Many requests, one chunked request at a time, and loads that end at random: every prefill ends,
and a request goes back to the queue only if another one computes in the same step."""

import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

pytest.importorskip("sglang")

from adder_harness import BareTree, prefill_adder
from coordinator_harness import BLOCK, PAGE, CoordinatorHarness, req_of
from kv_pools import since_0_5_23
from registered_hooks import hooks_of
from sglang.srt.mem_cache import registry

from sglang_cake.config import CHILD_OF_CAKE, ENABLED_ENV
from sglang_cake.integration import plugin
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.integration.scheduler import queue_order
from sglang_cake.integration.scheduler.prefill_adder import decode_steps_between
from sglang_cake.loading.cost_model import PrefillCost, PromptCosts

BUDGET, STEPS, WINDOW = 40, 400, 24
FOR_EVER = PrefillCost(1e9, 1e9, 0.0, error=0.0)


class PrefillLoop:
    """Prefill steps as SGLang forms them, over a tree that may evict parts of waiting prompts."""

    def __init__(self, seed: int, priority: str) -> None:
        self.chance = random.Random(seed)
        self.base = CoordinatorHarness(slots=200 * BLOCK, mode="both", priority=priority)
        self.queue: list[Any] = []
        self.chunked: Any = None
        self.truncation_align_size = None
        self.base.coordinator.priority_sign = -1 if self.chance.random() < 0.5 else 0
        self.number = self.returns = self.progress = 0
        self.closed: list[Any] = []
        self.known_costs = self.base.step_costs.costs
        self.base.step_costs.costs = self.costs  # type: ignore[method-assign]
        self.max_queued_requests = None
        self.disagg_prefill_bootstrap_queue = None
        self.min_free_slots_delayer = self.prefill_delayer = None
        self.enable_lora = False
        self.is_mixed_chunk = False
        self.joined: WeakSet[Any] | None = None  # as in a tree
        self.replayed_tokens = 0
        self.stored = 1.0  # share of a prompt

    def arrive(self, rid: str) -> None:
        req: Any = req_of(self.chance.choice((1.5, 4.5, 8.5)), rid)
        req.cache_salt = rid  # a prompt of its own
        req.return_logprob, req.priority = self.chance.random() < 0.1, self.chance.randrange(2)
        req.skip_radix_cache_insert = False
        req.in_tree = 0
        self.base.arrive(req)
        blocks = int(len(req.origin_input_ids) // BLOCK * self.stored)
        load = self.base.coordinator.live[rid]
        if self.chance.random() < 0.6:
            self.base.coordinator.release(rid)
            keys = load.key_chain.of(req.origin_input_ids)
            self.base.store({keys[b]: self.base.block(b) for b in range(blocks)})
            self.base.arrive(req)
            self.closed += keys
        self.queue.append(req)

    def step(self) -> None:
        coordinator = self.base.coordinator
        self.number += 1
        while self.closed and self.chance.random() < 0.4:
            self.base.open(self.closed.pop(self.chance.randrange(len(self.closed))))
        coordinator.poll(queue_order.serving(self.chunked, self.queue, coordinator, fits=True))
        queue_order.sort_queue(self.queue, coordinator)
        tree = BareTree(coordinator)
        tree.attach_running = self.attach  # type: ignore[method-assign]
        tree.joined = self.joined
        adder = prefill_adder(self, tree, chunk_tokens=BUDGET)
        if self.chunked is not None:
            req = self.chunked
            self.chunked = adder.add_chunked_req(req)
            if req in adder.can_run_list:
                if self.joined is not None and req in self.joined:
                    again = min(req.prefix_len, WINDOW)
                    self.replayed_tokens += again
                    assert again + req.extend_end - req.prefix_len <= max(BUDGET, again + PAGE)
                    # No other request gets them either.
                    rest = BUDGET - again - (req.extend_end - req.prefix_len)
                    assert adder.rem_chunk_tokens == max(0, rest)
                    self.joined.remove(req)  # as a step does
                self.computed(req)
        for req in list(self.queue):
            if adder.rem_chunk_tokens > 0:
                self.admit(req, adder)

    def admit(self, req: Any, adder: Any) -> None:
        """What `add_one_req` does, without SGLang's memory."""
        coordinator = self.base.coordinator
        if coordinator.awaits_lookup(req):
            return
        req.prefix_len = req.in_tree
        load = coordinator.record(req)
        if load is not None and load.meet.front > req.in_tree:
            self.progress += 1  # the tree forgot: whoever was put back for it could not know
        coordinator.attach_islands(req, self.attach)
        req.in_tree = req.prefix_len
        step = coordinator.plan(req, adder.rem_chunk_tokens)
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
        coordinator.claimed(req, stop)
        adder.rem_chunk_tokens -= stop - req.prefix_len
        self.queue.remove(req)
        self.computed(req)
        if stop < total:
            self.chunked = req

    def computed(self, req: Any) -> None:
        self.progress += 1
        req.prefix_len = req.in_tree = req.extend_end

    def attach(self, req: Any, slots: Any, stop: int, end: Any, taken: Any) -> None:
        self.progress += 1
        self.base.attach(req, slots, stop, end, taken)
        if self.joined is not None and req is self.chunked:
            self.joined.add(req)

    def costs(self, load: PromptRecord) -> PromptCosts:
        """Most of the time a prompt that is being loaded has nothing better to do than to wait."""
        costs = self.known_costs(load)
        waits = random.Random(f"{self.number} {load.rid}").random() < 0.7
        return replace(costs, prefill=FOR_EVER) if waits else costs

    # ---- what the adder asks of SGLang's scheduler ----

    @property
    def waiting_queue(self) -> list[Any]:
        return self.queue

    def get_num_allocatable_reqs(self, running: int, **_: Any) -> int:
        return 4


@pytest.mark.parametrize("priority", ["adaptive", "fair", "fcfs"])
def test_queue_order_random_loads_every_request_finishes(
    monkeypatch: pytest.MonkeyPatch, priority: str
) -> None:
    assert sum(returns_in(PrefillLoop(seed, priority), monkeypatch) for seed in range(10)) > 0


@since_0_5_23
def test_prefill_adder_window_that_is_computed_again_counts_in_the_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang.srt.model_executor.encoder_swa_replay.replay_len", replay_len)
    again = 0
    for seed in range(10):
        loop = PrefillLoop(seed, "fcfs")
        loop.joined = WeakSet()
        loop.stored = 0.5
        returns_in(loop, monkeypatch)
        again += loop.replayed_tokens
    assert again > 0


def test_window_replay_plugin_restarts_windows_of_requests_that_blocks_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENABLED_ENV, CHILD_OF_CAKE)
    monkeypatch.setattr(registry, "register_radix_cache_backend", lambda *args: None)
    monkeypatch.delitem(sys.modules, "sglang.srt.entrypoints.engine", raising=False)
    prepare = hooks_of(plugin.register)["prepare_for_extend"]
    tree = BareTree(CoordinatorHarness().coordinator)
    first, joined, other = (req_of(1.5, rid) for rid in ("first", "joined", "other"))
    batch = SimpleNamespace(tree_cache=tree, reqs=[first, joined, other])
    for requests, restarted in ((None, [True, False, False]), ([joined], [True, True, False])):
        tree.joined = None if requests is None else WeakSet(requests)
        batch.encoder_swa_reset = [True, False, False]
        prepare(lambda batch: None, batch)
        assert batch.encoder_swa_reset == restarted
    assert not tree.joined


def replay_len(prefix_tokens: int) -> int:
    return min(prefix_tokens, WINDOW)


def returns_in(loop: PrefillLoop, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a request went back to the queue until all have ended."""

    def release(req: Any, tree: Any, checkpoint: bool) -> None:
        loop.returns += 1
        req.kv, req.in_tree = SimpleNamespace(), req.prefix_len
        if loop.chance.random() < 0.2:  # the tree needed the memory
            req.in_tree -= loop.chance.randrange(req.in_tree // PAGE + 1) * PAGE

    def compute(adder: Any, req: Any) -> Any:
        total = len(req.origin_input_ids)
        limit = min(adder.rem_chunk_tokens, adder.chunked_req_limit or total)
        req.extend_end = min(total, req.prefix_len + limit)
        if req.extend_end < total:
            req.extend_end -= req.extend_end % PAGE
        adder.rem_chunk_tokens -= req.extend_end - req.prefix_len
        adder.can_run_list.append(req)
        return req if req.extend_end < total else None

    monkeypatch.setattr(queue_order, "release_kv_cache", release)
    monkeypatch.setattr("sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req", compute)
    try:
        arrivals = [f"r{i}" for i in range(10)]
        for _ in range(STEPS):
            if arrivals and loop.chance.random() < 0.4:
                loop.arrive(arrivals.pop())
            before = loop.returns, loop.progress
            loop.step()
            assert loop.returns == before[0] or loop.progress > before[1]
            if not arrivals and not loop.queue and loop.chunked is None:
                break
        else:
            raise AssertionError("somebody does not get on")
    finally:
        loop.base.coordinator.release_all()
        loop.base.close()
    return loop.returns


@pytest.mark.parametrize(
    ("running", "synced", "last_batch", "expected"),
    [
        (2, False, None, 22),
        (1, False, None, 0),  # fewer than the least
        (0, True, "idle", 22),
        (0, True, None, 0),  # no rank decodes
        (0, False, "prefill", 0),
    ],
)
def test_prefill_decode_interval_counts_decode_steps_in_which_a_rank_has_a_batch(
    running: int, synced: bool, last_batch: str | None, expected: int
) -> None:
    scheduler: Any = SimpleNamespace(
        prefill_decode_interval=22,
        prefill_decode_interval_min_bs=2 if running else 0,
        require_mlp_sync=synced,
        last_batch=last_batch,
    )
    assert decode_steps_between(scheduler, SimpleNamespace(reqs=[None] * running)) == expected  # type: ignore[arg-type]
