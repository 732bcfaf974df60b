"""Two ranks of a group, each with its own store and loader, of which one fails."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from coordinator_harness import BLOCK, CoordinatorHarness, FakeReq, req_of
from faults import Fault

PATIENCE_S = 20.0


class TwoRanks:
    """Runs the same on both ranks at once. Their reductions are real: each waits for the other."""

    def __init__(self, **options: Any) -> None:
        """Args: options: of both harnesses."""
        self.harnesses = [CoordinatorHarness(ranks=True, **options) for _ in range(2)]
        self.said: list[torch.Tensor | None] = [None, None]
        self.reductions = 0
        self._barrier = threading.Barrier(2)
        self._pool = ThreadPoolExecutor(2)
        for rank, harness in enumerate(self.harnesses):
            harness.peer = lambda tensor, rank=rank: self._reduce(rank, tensor)

    def _reduce(self, rank: int, tensor: torch.Tensor) -> None:
        self.said[rank] = tensor.clone()
        self._barrier.wait(PATIENCE_S)
        one, other = self.said
        assert one is not None
        assert other is not None
        assert one.shape == other.shape, "ranks reduce different lists"
        self._barrier.wait(PATIENCE_S)
        tensor.copy_(torch.minimum(one, other))
        self.reductions += rank == 0

    def both(self, action: Callable[[CoordinatorHarness, int], Any]) -> list[BaseException | None]:
        """What each rank raised."""
        futures = [
            self._pool.submit(action, each, rank) for rank, each in enumerate(self.harnesses)
        ]
        return [future.exception(PATIENCE_S) for future in futures]

    def poll(self, *rids: str) -> list[BaseException | None]:
        """A poll on both, and the work of their I/O threads after it."""
        raised = self.both(lambda harness, rank: harness.coordinator.poll(list(rids)))
        for harness in self.harnesses:
            harness.settle()
        return raised

    def live(self) -> list[list[str]]:
        return [list(harness.coordinator.live) for harness in self.harnesses]

    def close(self) -> None:
        self._pool.shutdown()
        for harness in self.harnesses:
            harness.coordinator.release_all()
            harness.io.close()


@pytest.fixture
def ranks() -> Iterator[TwoRanks]:
    made = TwoRanks()
    yield made
    made.close()


def stored(ranks: TwoRanks, rid: str = "r") -> list[FakeReq]:
    reqs = [req_of(4.5, rid) for _ in ranks.harnesses]
    for harness, req in zip(ranks.harnesses, reqs, strict=True):
        harness.open(*harness.fill(req.origin_input_ids, set(range(4))))
    return reqs


def test_ranks_stored_prompt_lands_on_both(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    for _ in range(3):
        assert ranks.poll("r") == [None, None]
    assert [harness.coordinator.placed_tokens for harness in ranks.harnesses] == [4 * BLOCK] * 2


def test_ranks_request_that_came_after_the_poll_is_not_scheduled_yet(ranks: TwoRanks) -> None:
    """One rank may have failed to take it, which no poll has told the others."""
    reqs = stored(ranks)
    ranks.poll()
    ranks.harnesses[0].adapter_error = Fault("adapter")
    reqs[0].lora_id = reqs[1].lora_id = "adapter@a"
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))

    def awaits() -> list[bool]:
        pairs = zip(ranks.harnesses, reqs, strict=True)
        return [harness.coordinator.awaits_lookup(req) for harness, req in pairs]  # type: ignore[arg-type]

    assert awaits() == [True, True]
    ranks.poll("r")
    assert awaits() == [False, False]
    assert ranks.live() == [[], []]


def test_ranks_request_rejected_by_one_rank_ends_on_both(ranks: TwoRanks) -> None:
    """As when its adapter's files cannot be read there."""
    reqs, other = stored(ranks), stored(ranks, "other")
    reqs[0].lora_id = reqs[1].lora_id = "adapter@a"
    ranks.harnesses[0].adapter_error = Fault("adapter")
    raised = ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    assert isinstance(raised[0], Fault)
    assert raised[1] is None
    ranks.both(lambda harness, rank: harness.arrive(other[rank]))
    for _ in range(3):
        assert ranks.poll("other", "r") == [None, None]
    assert ranks.live() == [["other"], ["other"]]
    assert [harness.coordinator.placed_tokens for harness in ranks.harnesses] == [4 * BLOCK] * 2


@pytest.mark.parametrize(
    "where",
    [
        "loader.drain",
        "loader.cost_of",
        "device_slots.stage",
        "device_slots.place",
        "step_costs.blocks_ahead",
    ],
)
def test_ranks_poll_failing_on_one_rank_ends_requests_on_both(ranks: TwoRanks, where: str) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    part, name = where.split(".")

    def fail(*args: Any) -> None:
        raise Fault(where)

    setattr(getattr(ranks.harnesses[0], part), name, fail)
    raised: list[Any] = [None, None]
    for _ in range(3):
        if raised[0] is None:
            raised = ranks.poll("r")
    assert isinstance(raised[0], Fault)
    assert raised[1] is None
    assert ranks.live() == [[], []]
    assert [harness.coordinator.placed_tokens for harness in ranks.harnesses] == [0, 0]


def no_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("no memory")


def test_ranks_block_without_device_memory_on_one_rank_ends_the_request_on_both(
    ranks: TwoRanks,
) -> None:
    """Before the step is decided, and without an error."""
    reqs = stored(ranks)

    ranks.harnesses[1].kv.load = no_memory  # type: ignore[assignment]
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    for _ in range(3):
        assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]
    assert [harness.coordinator.placed_tokens for harness in ranks.harnesses] == [0, 0]


def test_ranks_copy_without_device_memory_within_a_poll_ends_the_request_in_the_same_poll(
    ranks: TwoRanks,
) -> None:
    """The next thing to come is the step, for which the block would be missing on that rank."""
    reqs = stored(ranks)
    for harness in ranks.harnesses:
        harness.coordinator.spare_slots = 0  # landed blocks stay in host memory
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    for _ in range(3):
        assert ranks.poll("r") == [None, None]
    assert [harness.coordinator.placed_tokens for harness in ranks.harnesses] == [0, 0]

    ranks.harnesses[1].kv.load = no_memory  # type: ignore[assignment]
    for harness in ranks.harnesses:
        harness.coordinator.spare_slots = math.inf
    assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]
    assert [harness.coordinator.placed_tokens for harness in ranks.harnesses] == [0, 0]


def test_ranks_failed_copy_behind_a_hole_ends_the_request_on_both(ranks: TwoRanks) -> None:
    """Another request may compute the hole before the step, which then attaches the block."""
    reqs = [req_of(4.5, "r") for _ in ranks.harnesses]
    for harness, req in zip(ranks.harnesses, reqs, strict=True):
        harness.open(*harness.fill(req.origin_input_ids, {1, 2, 3}))

    ranks.harnesses[1].kv.load = no_memory  # type: ignore[assignment]
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    for _ in range(5):
        assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]


def test_ranks_error_of_a_copy_is_raised_once(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    load = ranks.harnesses[1].kv.load
    for harness in ranks.harnesses:
        harness.coordinator.spare_slots = 0  # landed blocks stay in host memory
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    for _ in range(3):
        assert ranks.poll("r") == [None, None]

    def failing(*args: object) -> None:
        ranks.harnesses[1].kv.load = load  # type: ignore[assignment]
        raise Fault("a copy")

    ranks.harnesses[1].kv.load = failing  # type: ignore[assignment]
    for harness in ranks.harnesses:
        harness.coordinator.spare_slots = math.inf
    raised = [each for _ in range(3) for each in ranks.poll("r") if each is not None]
    assert [str(each) for each in raised] == ["a copy"]
    assert ranks.live() == [[], []]


def test_ranks_rank_with_broken_facts_still_reduces_and_ends_the_request(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    one = ranks.harnesses[0].coordinator.live.get("r")
    assert one is not None
    one.local.failed = None  # type: ignore[assignment]
    raised = ranks.poll("r")
    assert isinstance(raised[0], TypeError)
    assert raised[1] is None
    one.local.failed = set()
    assert ranks.live() == [[], []]


def test_ranks_switched_off_rank_switches_off_the_other_once(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    ranks.poll("r")
    ranks.harnesses[0].coordinator.release("r")
    assert not ranks.harnesses[0].coordinator.switch_off()  # the other does not know yet
    assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]  # one without a record ends it everywhere
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    assert ranks.live() == [[], ["r"]]
    ranks.both(lambda harness, rank: harness.coordinator.on_everywhere())  # as every poll begins
    assert [harness.coordinator.off_everywhere for harness in ranks.harnesses] == [True, True]
    assert ranks.live() == [[], []]
    before = ranks.reductions
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    assert ranks.live() == [[], []]
    ranks.both(lambda harness, rank: harness.coordinator.on_everywhere())
    assert ranks.reductions == before  # nobody waits for anybody any more


def test_ranks_evicted_prompt_is_looked_up_again_by_both(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank], matched=4 * BLOCK))
    assert ranks.poll("r") == [None, None]
    ranks.both(lambda harness, rank: harness.evict(reqs[rank]))
    for _ in range(3):
        assert ranks.poll("r") == [None, None]
    assert [harness.coordinator.placed_tokens for harness in ranks.harnesses] == [4 * BLOCK] * 2


def test_ranks_prompt_looked_up_again_by_one_rank_ends_on_both(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank], matched=4 * BLOCK))
    assert ranks.poll("r") == [None, None]
    ranks.harnesses[0].evict(reqs[0])
    assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]


def test_ranks_diverged_records_end_on_both(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    ranks.poll("r")
    one = ranks.harnesses[0].coordinator.live.get("r")
    assert one is not None
    one.stats.prefill_s = 1.0  # for this rank its prefill is over
    assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]
