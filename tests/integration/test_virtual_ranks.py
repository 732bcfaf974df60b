"""Two ranks whose links differ, in virtual time. `Lockstep` checks that they decide alike."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from failing_store import FailingStore
from virtual_ranks import virtual_ranks

from sglang_cake.core.keys import BlockKey
from sglang_cake.loading.planner import Mode
from sglang_cake.testing.scheduler_loop import prompt
from sglang_cake.testing.virtual_gpu import LLAMA_70B, VirtualStore

MODEL = replace(LLAMA_70B, chunk_tokens=2048)
TOKENS = 16384
STEP_S = MODEL.prefill.step_s(TOKENS - MODEL.chunk_tokens, TOKENS)


def ttft_s(
    links: tuple[float, float],
    *,
    mode: Mode = "auto",
    known: bool = True,
    overlap: bool = True,
    faulty: int = 0,
    fault: str = "",
) -> float:
    """Args: known: costs are known. Otherwise the prompt is the third one."""
    with virtual_ranks(MODEL, links, mode=mode, overlap=overlap, store=FailingStore) as loop:
        if known:
            loop.knows_costs()
        (loop.other if faulty else loop).store.fault = fault
        for number in range(1 if known else 3):
            req = prompt(number, TOKENS)
            loop.store_on_both(req)
            (run,) = loop.serve([(0.0, req)])
        return run.ttft_s


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("link", [1e9, 4e9])
def test_virtual_ranks_one_with_a_slower_link_is_near_its_optimum(
    link: float, share: float, known: bool
) -> None:
    assert ttft_s((link, link * share), known=known) <= 1.06 * MODEL.ideal_s(TOKENS, link * share)


class OneTier(VirtualStore):
    """Attributes: tier: that all blocks are in."""

    tier = 0

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        return [self.tier] * len(keys)


def test_virtual_ranks_one_that_never_reads_from_a_tier_leaves_its_cost_to_the_other() -> None:
    link = 4e9  # a tier that nothing was read from counts with 1e9
    with virtual_ranks(MODEL, (link, link), store=OneTier) as loop:
        loop.other.store.tier = 1
        for number in range(3):
            req = prompt(number, TOKENS)
            loop.store_on_both(req)
            (run,) = loop.serve([(0.0, req)])
    assert run.ttft_s <= 1.06 * MODEL.ideal_s(TOKENS, link)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", ["silent", "broken", "lost"])
@pytest.mark.parametrize("faulty", [0, 1])
def test_virtual_ranks_store_failing_on_one_rank_makes_no_prompt_later_than_computing(
    faulty: int, fault: str, overlap: bool
) -> None:
    links = (2e9, 1e9)
    computed_s = ttft_s(links, mode="compute", overlap=overlap)
    took_s = ttft_s(links, faulty=faulty, fault=fault, overlap=overlap)
    assert took_s <= computed_s + STEP_S


@pytest.mark.parametrize("seed", range(6))
def test_virtual_ranks_random_prompts_are_decided_alike_and_return_all_memory(seed: int) -> None:
    draw = random.Random(seed)
    links = (draw.choice([1e9, 4e9]), draw.choice([3e8, 1e9, 4e9]))
    with virtual_ranks(MODEL, links, overlap=draw.random() < 0.7, store=FailingStore) as loop:
        (loop.other if draw.random() < 0.5 else loop).store.fault = draw.choice(
            ["", "silent", "broken", "lost"]
        )
        prompts = []
        for number in range(8):
            req = prompt(number, draw.randrange(500, 20000))
            if draw.random() < 0.7:
                loop.store_on_both(req)
            prompts.append((draw.random(), req))
        loop.serve(sorted(prompts, key=lambda each: each[0]))
        loop.io.until(loop.io.now_s + 60)
        for rank in (loop, loop.other):
            assert not rank.loader._queues
            assert rank.staging.free == rank.staging.capacity
