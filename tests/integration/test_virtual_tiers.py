"""Prompts whose blocks are in a fast tier and in a slow one: the real tiers in virtual time."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockMissing, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.loading.planner import Mode
from sglang_cake.stores.tiers import tier
from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.scheduler_loop import prompt
from sglang_cake.testing.virtual_gpu import (
    LLAMA_8B,
    VirtualScheduler,
    VirtualStore,
    virtual_scheduler,
)

MODEL = replace(LLAMA_8B, chunk_tokens=2048)
TOKENS = 16000
COMPUTED_S = MODEL.prefill.span_s(0, TOKENS, MODEL.chunk_tokens)
LAST_STEP_S = MODEL.prefill.step_s(TOKENS - MODEL.chunk_tokens, TOKENS)


class FailingStore(VirtualStore):
    """Attributes: fault: of all reads but the first 10."""

    fault = ""
    reads = 0

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        self.reads += 1
        if self.fault and self.reads > 10:
            if self.fault == "silent":
                await asyncio.Event().wait()
            raise BlockMissing("evicted") if self.fault == "lost" else StoreUnavailable("broken")
        return await super().get_into(key, out, progress)


async def in_this_thread(pool: Any, work: Callable[[threading.Event], Any]) -> Any:
    """Copies of small blocks, which no clock waits for."""
    del pool
    return work(threading.Event())


@contextmanager
def two_tiers(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> Iterator[tuple[VirtualScheduler, list[FailingStore]]]:
    """The fast one is 10 times as fast as the device computes, the slow one as fast as it."""
    monkeypatch.setattr(tier, "run_stoppable", in_this_thread)
    with virtual_scheduler(MODEL, link_bytes_per_s=1.0, mode=mode) as loop:
        size_bytes = MODEL.layout.block_bytes
        link = TOKENS // MODEL.layout.block_tokens * size_bytes / COMPUTED_S
        stores = [
            FailingStore(loop.io, size_bytes, 10 * link, 0.0005),
            FailingStore(loop.io, size_bytes, link, 0.02),
        ]
        tiers = TieredStore(stores, block_bytes=8, copy_bytes=64, clock=lambda: loop.io.now_s)
        loop.loader.use(tiers, [4])
        loop.loader.forget_costs()
        loop.writer.use(tiers)
        costs = replace(MODEL.prefill, error=0.02)
        loop.step_costs.recall(costs, [store.cost for store in stores])
        loop.io.until(loop.io.now_s)
        yield loop, stores


def ttft_s(
    monkeypatch: pytest.MonkeyPatch,
    tier_of: Callable[[float], int],
    mode: Mode = "auto",
    faults: tuple[str, str] = ("", ""),
) -> float:
    """Args: tier_of: the tier of a block, by its place in the prompt from 0 to 1."""
    with two_tiers(monkeypatch, mode) as (loop, stores):
        req = prompt(0, TOKENS)
        keys = loop.keys(req.origin_input_ids)
        for number, key in enumerate(keys):
            stores[tier_of(number / len(keys))].keys.add(key)
        for store, fault in zip(stores, faults, strict=True):
            store.fault = fault
        (run,) = loop.serve([(0.0, req)])
        loop.io.until(loop.io.now_s + 60)
        assert loop.staging.free == loop.staging.capacity
        return run.ttft_s


@pytest.mark.parametrize("fast", ["first half", "last half"])
def test_virtual_tiers_half_in_the_fast_one_saves_time(
    monkeypatch: pytest.MonkeyPatch, fast: str
) -> None:
    """The loads from both tiers overlap, whichever half is in the fast one."""
    slow_s = ttft_s(monkeypatch, lambda place: 1)
    half_s = ttft_s(monkeypatch, lambda place: int((place < 0.5) == (fast == "last half")))
    assert half_s <= 0.85 * slow_s


@pytest.mark.parametrize("fault", ["silent", "broken", "lost"])
@pytest.mark.parametrize("faulty", [0, 1])
def test_virtual_tiers_one_that_fails_makes_no_prompt_later_than_computing(
    monkeypatch: pytest.MonkeyPatch, faulty: int, fault: str
) -> None:
    faults = (fault, "") if faulty == 0 else ("", fault)
    assert ttft_s(monkeypatch, lambda place: int(place >= 0.5), faults=faults) <= (
        ttft_s(monkeypatch, lambda place: 1, "compute") + LAST_STEP_S
    )
