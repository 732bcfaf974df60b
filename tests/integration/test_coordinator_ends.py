"""A coordinator whose model has end states: over a store whose reads a test releases."""

import math
import random
import time
from array import array
from collections.abc import Iterator
from contextlib import closing

import pytest
from coordinator_harness import BLOCK, CoordinatorHarness, FakeReq, req_of
from held_reads import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ranks import TwoRanks

from sglang_cake.core.errors import BlockCorrupt, BlockMissing
from sglang_cake.core.keys import BlockKey
from sglang_cake.loading.cost_model import LoadCost, PrefillCost

ENDS = 2


@pytest.fixture
def harness() -> Iterator[CoordinatorHarness]:
    with CoordinatorHarness(end_blocks=ENDS, staging=12) as made:
        yield made


def prompt_with_an_end(harness: CoordinatorHarness) -> FakeReq:
    """Six blocks of it, and the end behind them, are stored, and are read at once."""
    req = req_of(6.5)
    tokens = req.origin_input_ids
    harness.open(*harness.fill(tokens, set(range(6))), *harness.fill_end(tokens, 6 * BLOCK))
    return req


def run(harness: CoordinatorHarness, req: FakeReq, steps: int = 30) -> dict[str, int]:
    """Until prefill is over; the report."""
    for _ in range(steps):
        harness.poll(req, times=2)
        if harness.step(req):
            [report] = req.customized_info["cake"]
            return report
    raise AssertionError("no progress")


def test_coordinator_missing_end_block_falls_back_to_the_lower_end(
    harness: CoordinatorHarness,
) -> None:
    req = req_of(6.5)
    tokens = req.origin_input_ids
    keys = harness.fill(tokens, set(range(6)))
    lower, upper = harness.fill_end(tokens, 2 * BLOCK), harness.fill_end(tokens, 6 * BLOCK)
    harness.faulty.fail(upper[0], BlockCorrupt("bad"))
    harness.open(*keys, *lower, *upper)
    harness.arrive(req)
    harness.poll(req, times=4)
    report = run(harness, req)
    assert report["loaded_tokens"] == 2 * BLOCK


def test_coordinator_end_that_never_lands_leaves_the_prompt_to_compute(
    harness: CoordinatorHarness,
) -> None:
    req = req_of(6.5)
    tokens = req.origin_input_ids
    keys = harness.fill(tokens, set(range(6)))
    ends = harness.fill_end(tokens, 6 * BLOCK)
    harness.open(*keys, ends[1])
    harness.arrive(req)
    assert run(harness, req, steps=1_000_000)["loaded_tokens"] == 0


@pytest.mark.parametrize("taken_blocks", [2, 6])
def test_coordinator_slots_that_sglang_takes_back_shorten_the_run_or_give_up_the_end(
    harness: CoordinatorHarness, taken_blocks: int
) -> None:
    req = prompt_with_an_end(harness)
    harness.arrive(req)
    harness.poll(req, times=4)
    assert harness.coordinator.reclaimable_tokens == 6 * BLOCK
    assert harness.coordinator.reclaim(taken_blocks * BLOCK) == taken_blocks * BLOCK
    harness.settle()
    in_staging = ENDS if taken_blocks < 6 else 0
    assert harness.staging.free == harness.staging.capacity - in_staging
    assert run(harness, req)["loaded_tokens"] == (6 - taken_blocks) * BLOCK


def test_coordinator_lost_end_frees_the_slots_that_were_reserved(
    harness: CoordinatorHarness,
) -> None:
    req = req_of(6.5)
    tokens = req.origin_input_ids
    harness.fill(tokens, set(range(6)))
    ends = harness.fill_end(tokens, 6 * BLOCK)
    harness.arrive(req)
    harness.poll(req, times=4)
    assert harness.coordinator.reclaimable_tokens > 0
    harness.io.run(harness.memory.delete(ends[0]), PATIENCE_S)
    harness.open(*ends)
    harness.poll(req, times=4)
    assert harness.coordinator.reclaimable_tokens == 0
    assert harness.slow.waiting == []


def test_coordinator_prompts_that_pass_others_get_buffers_for_their_ends() -> None:
    """One prompt waits for device memory with three quarters of the buffers, and the one that has
    passed it has its end in the last quarter when the third one comes."""
    with CoordinatorHarness(mode="load", slots=99 * BLOCK, end_blocks=3, staging=16) as harness:
        harness.coordinator.spare_slots = 0  # running requests have all of it
        prompts = {
            rid: FakeReq(rid, array("q", range(start, start + int(blocks * BLOCK))))
            for rid, start, blocks in (
                ("first", 0, 30.5),
                ("next", 10**5, 20.5),
                ("last", 2 * 10**5, 20.5),
            )
        }
        keys = {}
        for rid, req in prompts.items():
            count = len(req.origin_input_ids) // BLOCK
            keys[rid] = harness.fill(req.origin_input_ids, set(range(count)))
            harness.open(*harness.fill_end(req.origin_input_ids, count * BLOCK))
        first, following, last = prompts.values()
        harness.open(*keys["first"], *keys["last"])
        harness.arrive(first)
        harness.poll(first, times=4)
        harness.coordinator.spare_slots = math.inf
        harness.arrive(following)
        harness.poll(following, first, times=4)
        assert harness.staging.free == 0
        harness.arrive(last)
        harness.poll(last, following, first)
        harness.open(*keys["next"])
        left = [last, following, first]
        until_s = time.monotonic() + PATIENCE_S
        while left and time.monotonic() < until_s:
            harness.poll(*left)
            left = [req for req in left if not harness.step(req)]
        assert not left
        assert last.customized_info["cake"][0]["loaded_tokens"] == 20 * BLOCK


@pytest.mark.usefixtures("stopped_clock")
def test_coordinator_end_slower_than_computing_is_not_loaded() -> None:
    """Six blocks are computed in 0.1 s; they would be loaded in 0.06 s, and their end in 0.1 s."""
    with CoordinatorHarness(
        end_blocks=10,
        staging=48,
        mode="auto",
        prefill=PrefillCost(0.0, 1e-3, 1e-9, error=0.0),
        load=LoadCost(0.0, 0.01, error=0.0, depth=2),
    ) as harness:
        req = req_of(6.5)
        tokens = req.origin_input_ids
        harness.fill(tokens, set(range(6)))
        harness.fill_end(tokens, 6 * BLOCK)
        harness.arrive(req)
        harness.coordinator.poll([req.rid])
        assert harness.slow.waiting == []
        long = req_of(30.5, "long")
        harness.fill(long.origin_input_ids, set(range(30)))
        harness.fill_end(long.origin_input_ids, 30 * BLOCK)
        harness.arrive(long)
        harness.coordinator.poll([req.rid, "long"])
        harness.settle()
        assert harness.slow.waiting != []


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_coordinator_random_faults_and_steps_return_everything(seed: int) -> None:
    """Bytes that are attached are checked by the harness; here: progress, and nothing is kept."""
    dice = random.Random(seed)
    with CoordinatorHarness(
        end_blocks=dice.randint(1, 3),
        staging=dice.choice([16, 24]),
        slots=dice.choice([10, 20]) * BLOCK,
        mode=dice.choice(["both", "auto"]),
    ) as harness:
        reqs = [req_of(dice.randint(2, 9) + 0.5, f"r{n}") for n in range(2)]
        keys: list[BlockKey] = []
        for req in reqs:  # the second prompt begins like the first
            tokens = req.origin_input_ids
            blocks = len(tokens) // BLOCK
            keys += harness.fill(tokens, {b for b in range(blocks) if dice.random() < 0.9})
            for block in range(1, blocks + 1):
                if dice.random() < 0.4:
                    keys += harness.fill_end(tokens, block * BLOCK)
        for key in keys:
            if dice.random() < 0.1:
                harness.faulty.fail(key, dice.choice([BlockMissing, BlockCorrupt])("x"))
        waiting = list(reqs)
        for req in reqs:
            harness.arrive(req)
        for _ in range(20000):
            if not waiting:
                break
            if dice.random() < 0.5:
                harness.open(*dice.sample(keys, min(len(keys), 4)))
            harness.coordinator.poll([req.rid for req in waiting])
            if dice.random() < 0.1:
                harness.coordinator.reclaim(BLOCK)
            if harness.step(waiting[0]) or dice.random() < 0.01:
                harness.leave(waiting.pop(0))
            elif dice.random() < 0.2:
                waiting.reverse()
        assert not waiting, "no progress"


def test_ranks_that_hold_different_ends_agree_on_the_highest_that_both_have() -> None:
    with closing(TwoRanks(end_blocks=ENDS, staging=12)) as ranks:
        reqs = [req_of(6.5) for _ in ranks.harnesses]
        for rank, (harness, req) in enumerate(zip(ranks.harnesses, reqs, strict=True)):
            tokens = req.origin_input_ids
            keys = harness.fill(tokens, set(range(6)))
            for target in (3, 6) if rank else (3, 5):
                keys += harness.fill_end(tokens, target * BLOCK)
            harness.open(*keys)
        ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
        for _ in range(5):
            assert ranks.poll("r") == [None, None]
            for harness in ranks.harnesses:
                harness.settle()
        for harness in ranks.harnesses:
            record = harness.coordinator.live["r"]
            assert record.meet.run.stop == 3
            assert record.meet.island() is not None
            assert set(record.memory.staged) == set(record.meet.end_indices)
            harness.settle()
            assert harness.staging.free == harness.staging.capacity - ENDS


def test_coordinator_end_state_without_memory_leaves_the_prompt_to_compute(
    harness: CoordinatorHarness,
) -> None:
    req = prompt_with_an_end(harness)
    harness.no_end_memory = True
    harness.arrive(req)
    harness.poll(req, times=4)
    assert run(harness, req)["loaded_tokens"] == 0
