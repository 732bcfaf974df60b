"""Prompts whose blocks are in a fast tier and in a slow one: the real tiers in virtual time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from failing_store import FailingStore

from benchmarks.harness.virtual_tiers import virtual_tiers
from sglang_cake.loading.planner import Mode
from sglang_cake.testing.scheduler_loop import prompt
from sglang_cake.testing.virtual_gpu import (
    LLAMA_8B,
    VirtualScheduler,
    virtual_scheduler,
)

MODEL = replace(LLAMA_8B, chunk_tokens=2048)
TOKENS = 16000
COMPUTED_S = MODEL.prefill.span_s(0, TOKENS, MODEL.chunk_tokens)
SPEEDS = 10.0, 1.0  # of the fast tier and of the slow one, as shares of that of the device
LATENCIES_S = 0.0005, 0.02
READS = 4  # at once, of each tier
BLOCK_COMPUTED_S = COMPUTED_S * MODEL.layout.block_tokens / TOKENS
BLOCK_S = [  # a read occupies its place for its latency, too
    max(BLOCK_COMPUTED_S / speed, (latency_s + BLOCK_COMPUTED_S / speed) / READS)
    for speed, latency_s in zip(SPEEDS, LATENCIES_S, strict=True)
]
LAST_STEP_S = MODEL.prefill.step_s(TOKENS - MODEL.chunk_tokens, TOKENS)


@contextmanager
def two_tiers(mode: Mode) -> Iterator[tuple[VirtualScheduler, list[FailingStore]]]:
    with virtual_scheduler(MODEL, link_bytes_per_s=1.0, mode=mode) as loop:
        size_bytes = MODEL.layout.block_bytes
        link = TOKENS // MODEL.layout.block_tokens * size_bytes / COMPUTED_S
        stores = [
            FailingStore(loop.io, size_bytes, speed * link, latency_s)
            for speed, latency_s in zip(SPEEDS, LATENCIES_S, strict=True)
        ]
        costs = replace(MODEL.prefill, error=0.02)
        known = zip(stores, BLOCK_S, strict=True)
        with virtual_tiers(loop, stores, [READS]):
            loop.loader.forget_costs()
            loop.step_costs.recall(costs, [replace(store.cost, block_s=s) for store, s in known])
            loop.io.until(loop.io.now_s)
            yield loop, stores


def ttft_s(
    tier_of: Callable[[float], int],
    mode: Mode = "auto",
    faults: tuple[str, str] = ("", ""),
) -> float:
    """Args: tier_of: the tier of a block, by its place in the prompt from 0 to 1."""
    with two_tiers(mode) as (loop, stores):
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


def least_s(tier_of: Callable[[float], int]) -> float:
    """A lower bound of the time to the first token: each tier brings its last blocks meanwhile, the
    device computes the others in any order and without steps, and then the tokens after them."""
    size = MODEL.layout.block_tokens
    count = TOKENS // size
    ends_s = [MODEL.prefill.span_s(0, number * size, MODEL.chunk_tokens) for number in range(126)]
    tiers = [tier_of(number / count) for number in range(count)]
    places = [[number for number in range(count) if tiers[number] == tier] for tier in (0, 1)]

    def enough(until_s: float) -> bool:
        computed_s = 0.0
        for of_tier, each_s, latency_s in zip(places, BLOCK_S, LATENCIES_S, strict=True):
            brought = max(0, int((until_s - latency_s) / each_s))
            left = of_tier[: max(0, len(of_tier) - brought)]
            computed_s += sum(ends_s[number + 1] - ends_s[number] for number in left)
        return computed_s <= until_s

    last_s = MODEL.prefill.step_s(count * size, TOKENS)
    return last_s + next(s for s in (COMPUTED_S * n / 1000 for n in range(1001)) if enough(s))


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        ("fast first", 1.35),
        ("fast last", 1.2),
        ("every other eight", 1.5),
    ],
)
def test_virtual_tiers_prompt_in_both_is_near_the_least_time(layout: str, most: float) -> None:
    tier_of: Callable[[float], int] = {
        "fast first": lambda place: int(place >= 0.5),
        "fast last": lambda place: int(place < 0.5),
        "every other eight": lambda place: round(place * 125) // 8 % 2,
    }[layout]
    took_s = ttft_s(tier_of)
    assert took_s <= most * least_s(tier_of)


@pytest.mark.parametrize("fast", ["first half", "last half"])
def test_virtual_tiers_half_in_the_fast_one_saves_time(fast: str) -> None:
    """The loads from both tiers overlap, whichever half is in the fast one."""
    slow_s = ttft_s(lambda place: 1)
    half_s = ttft_s(lambda place: int((place < 0.5) == (fast == "last half")))
    assert half_s <= 0.85 * slow_s


@pytest.mark.parametrize("fault", ["silent", "broken", "lost"])
@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("blocks", [4, 63])
def test_virtual_tiers_one_that_fails_makes_no_prompt_later_than_computing(
    blocks: int, faulty: int, fault: str
) -> None:
    """Args: blocks: so many in one tier, then so many in the other, and so on."""
    faults = (fault, "") if faulty == 0 else ("", fault)
    assert ttft_s(lambda place: round(place * 125) // blocks % 2, faults=faults) <= (
        ttft_s(lambda place: 1, "compute") + LAST_STEP_S
    )
