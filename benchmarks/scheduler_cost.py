"""What Cake's decisions cost the scheduler thread, in microseconds per step, without a server.

`race`: one race over a long prompt, all of it stored: in every step some blocks land at the end,
and a chunk is computed at the front, until they meet. `queue`: many prompts that wait, every second
one of them stored, beside a full device that decodes: each step polls and sorts, and computes none
of them.

`Coordinator`, `Meet`, `next_step` and
`RankConsensus` are the product's; the loader and the device are replaced by stubs that do nothing,
so copies, keys and the tree are not in these numbers.
"""

import itertools
import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from sglang_cake.config import CakeConfig
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Digest
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.integration.request.request_keys import RequestKeys
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.integration.scheduler.queue_order import sort_queue
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import MOST_TIERS, LoadCost, PrefillCost
from sglang_cake.loading.loader import Fetched, LoaderEvent, LookedUp
from sglang_cake.loading.planner import Mode
from sglang_cake.testing.scheduler_loop import LoopRequest
from sglang_cake.testing.virtual_time import clock

BLOCK_TOKENS = 128
LOAD_S = 0.01  # what the stub loader claims a block takes
CHUNK_TOKENS = 512
DECODE_STEP_S = 0.015  # between two polls of a queue
PHASES = ("poll", "attach_islands", "plan", "claimed")


class _Staged:
    """A landed block without bytes."""

    buffer = SimpleNamespace(view=b"")

    def release(self, *, used: bool, reason: str = "") -> None: ...


class _Loader:
    """Brings what it is told to."""

    cost = LoadCost(0.0, LOAD_S)
    tier_costs = (cost,) * MOST_TIERS
    tier_silence_s = (0.0,) * MOST_TIERS
    measured_tiers = (True,) * MOST_TIERS

    def __init__(self) -> None:
        self.events: list[LoaderEvent] = []
        self.load_ids: list[str] = []

    def drain(self) -> list[LoaderEvent]:
        events, self.events = self.events, []
        return events

    def link_idle(self, load_id: str) -> bool:
        return False

    def begin(self, prompt: Any) -> None:
        self.load_ids.append(prompt.load_id)

    def set_first_loadable(self, load_id: str, block: int) -> None: ...
    def set_load_from(self, load_id: str, block: int | None) -> None: ...
    def order(self, load_ids: Any, *, may_use_all_buffers: Any) -> None: ...
    def cancel(self, load_id: str) -> None: ...


class _DeviceSlots:
    """Slots without a device."""

    block_bytes = 1
    reclaimable_tokens = 0

    def take_bytes(self, record: PromptRecord, block: int, host_block: Any) -> bool:
        return False

    def reserve(self, record: PromptRecord, blocks: Any) -> None: ...
    def discard_all(self, record: PromptRecord, reason: str) -> None: ...
    def check_copies(self) -> bool:
        return False

    def stage(self, record: PromptRecord, block: int, host_block: Any) -> None:
        record.memory.staged[block] = host_block

    def refuse(self, record: PromptRecord, host_block: Any, reason: str) -> None: ...
    def free(self, slots: torch.Tensor) -> None: ...

    def place(self, record: PromptRecord, blocks: Any, *, reclaim_from: Any = ()) -> bool:
        for block in blocks:
            if record.memory.staged.pop(block, None) is not None:
                record.memory.slots[block] = torch.empty(0)
        return True

    def uncopied(self, record: PromptRecord, blocks: Any) -> list[int]:
        return [block for block in blocks if block not in record.memory.slots]

    def take_slots(self, record: PromptRecord, span: Any) -> torch.Tensor:
        for block in range(span.start // BLOCK_TOKENS, -(-span.stop // BLOCK_TOKENS)):
            record.memory.slots.pop(block)
        return torch.empty(0)

    def take_end(self, record: PromptRecord, blocks: Any) -> list[Any]:
        return []

    def discard(self, record: PromptRecord, blocks: Any, reason: str) -> None:
        for block in list(blocks):
            record.memory.staged.pop(block, None)
            record.memory.slots.pop(block, None)


def race(prompt_tokens: int, chunk_tokens: int, landing_per_step: int) -> list[dict[str, float]]:
    """Seconds per phase, for each step of one race."""
    loader = _Loader()
    coordinator = _coordinator(loader, "both")
    prompt = array("q", range(prompt_tokens))
    req = LoopRequest("r", prompt, retracted_stain=True)  # SGLang counts no cached tokens of it
    blocks = prompt_tokens // BLOCK_TOKENS
    coordinator.arrive(req, lambda tokens, limit: 0)
    (load_id,) = loader.load_ids
    loader.events.append(LookedUp(load_id, (True,) * blocks, (), bytes(blocks)))
    steps: list[dict[str, float]] = []
    last = blocks  # blocks from here on have landed
    while req.prefix_len < prompt_tokens:
        first = max(req.prefix_len // BLOCK_TOKENS, last - landing_per_step)
        for block in range(last - 1, first - 1, -1):
            loader.events.append(Fetched(load_id, block, _Staged(), 0.0))  # type: ignore[arg-type]
        last = min(last, first)
        marks = [time.perf_counter()]
        coordinator.poll(["r"])
        marks.append(time.perf_counter())
        coordinator.attach_islands(req, _attach)
        marks.append(time.perf_counter())
        step = coordinator.plan(req, chunk_tokens)
        marks.append(time.perf_counter())
        stop = step.stop if step else min(req.prefix_len + chunk_tokens, prompt_tokens)
        if not (step and step.wait):
            coordinator.claimed(req, stop)
            req.prefix_len = stop
        marks.append(time.perf_counter())
        times = (b - a for a, b in itertools.pairwise(marks))
        steps.append(dict(zip(PHASES, times, strict=True)))
    return steps


def queue(waiting: int, prompt_tokens: int = 4_000, polls: int = 20) -> dict[str, float]:
    """Median CPU seconds of one arrival, of a poll, and of sorting the queue."""
    loader = _Loader()
    coordinator = _coordinator(loader, "auto")
    reqs = [LoopRequest(f"r{i}", array("q", [i]) * prompt_tokens) for i in range(waiting)]
    arrivals = [_cpu_s(partial(coordinator.arrive, req, lambda tokens, limit: 0)) for req in reqs]
    blocks = prompt_tokens // BLOCK_TOKENS
    for number, load_id in enumerate(loader.load_ids):
        stored = (number % 2 == 0,) * blocks
        loader.events.append(LookedUp(load_id, stored, (), bytes(blocks)))
    took: dict[str, list[float]] = {"poll": [], "sort": []}
    began_s = time.monotonic()
    for number in range(polls):
        with clock(lambda now_s=began_s + number * DECODE_STEP_S: now_s):
            rids = [req.rid for req in reqs]
            took["poll"].append(_cpu_s(partial(coordinator.poll, rids)))
            took["sort"].append(_cpu_s(partial(sort_queue, cast(Any, reqs), coordinator)))
    return {
        "arrival": statistics.median(arrivals),
        **{phase: statistics.median(times) for phase, times in took.items()},
    }


def _cpu_s(call: Callable[[], object]) -> float:
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


def _attach(
    req: Any, slots: torch.Tensor, stop: int, end: Any, taken: Callable[[], object]
) -> None:
    taken()
    req.prefix_len = stop


def _coordinator(loader: _Loader, mode: Mode) -> Coordinator:
    coordinator = Coordinator(
        loader,  # type: ignore[arg-type]
        _DeviceSlots(),  # type: ignore[arg-type]
        config=CakeConfig(block_tokens=BLOCK_TOKENS, mode=mode),
        page_tokens=1,
        step_costs=StepCosts(
            loader,  # type: ignore[arg-type]
            PrefillCost.prior(hidden=4096, on_gpu=False),
            chunk_tokens=CHUNK_TOKENS,
            pipelined=False,
        ),
        keys=RequestKeys(BLOCK_TOKENS, str, Counters()),
        consensus=RankConsensus(None),
        counters=Counters(),
        reporter=RequestReporter(None, writes=True, metrics=None),
    )
    coordinator.rebase(Digest(bytes(32)), suspended=False)
    return coordinator
