"""Two ranks of a group, each with its own store and loader, of which one fails."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from faults import Fault
from test_coordinator import BLOCK, Desk, FakeReq, req_of

PATIENCE_S = 20.0


class Pair:
    """Runs the same on both ranks at once. Their reductions are real: each waits for the other."""

    def __init__(self) -> None:
        self.desks = [Desk(ranks=True), Desk(ranks=True)]
        self.said: list[torch.Tensor | None] = [None, None]
        self.reductions = 0
        self._barrier = threading.Barrier(2)
        self._pool = ThreadPoolExecutor(2)
        for rank, desk in enumerate(self.desks):
            desk.peer = lambda tensor, rank=rank: self._reduce(rank, tensor)

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

    def both(self, action: Callable[[Desk, int], Any]) -> list[BaseException | None]:
        """What each rank raised."""
        futures = [self._pool.submit(action, desk, rank) for rank, desk in enumerate(self.desks)]
        return [future.exception(PATIENCE_S) for future in futures]

    def poll(self, *rids: str) -> list[BaseException | None]:
        return self.both(lambda desk, rank: desk.cake.poll(list(rids)))

    def live(self) -> list[list[str]]:
        return [desk.cake.live for desk in self.desks]

    def close(self) -> None:
        self._pool.shutdown()
        for desk in self.desks:
            desk.cake.end_all()
            desk.io.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def stored(pair: Pair, rid: str = "r") -> list[FakeReq]:
    reqs = [req_of(4.5, rid) for _ in pair.desks]
    for desk, req in zip(pair.desks, reqs, strict=True):
        desk.open(*desk.fill(req.origin_input_ids, set(range(4))))
    return reqs


def test_both_ranks_land_a_prompt(pair: Pair) -> None:
    reqs = stored(pair)
    pair.both(lambda desk, rank: desk.arrive(reqs[rank]))
    for _ in range(3):
        assert pair.poll("r") == [None, None]
    assert [desk.cake.held_tokens for desk in pair.desks] == [4 * BLOCK] * 2


def test_a_request_that_one_rank_could_not_take_up_ends_on_both(pair: Pair) -> None:
    """As when its adapter's files cannot be read there."""
    reqs, other = stored(pair), stored(pair, "other")
    reqs[0].lora_id = reqs[1].lora_id = "adapter@a"
    pair.desks[0].cake._adapter = lambda lora_id: "".missing  # type: ignore[attr-defined]
    raised = pair.both(lambda desk, rank: desk.arrive(reqs[rank]))
    assert isinstance(raised[0], AttributeError)
    assert raised[1] is None
    pair.both(lambda desk, rank: desk.arrive(other[rank]))
    for _ in range(3):
        assert pair.poll("other", "r") == [None, None]
    assert pair.live() == [["other"], ["other"]]
    assert [desk.cake.held_tokens for desk in pair.desks] == [4 * BLOCK] * 2


@pytest.mark.parametrize(
    "where",
    [
        "inbox.take",
        "_device_slots.place",
        "step_costs.hear",
        "step_costs.remaining_s",
        "inbox.apply",
    ],
)
def test_a_poll_that_fails_on_one_rank_ends_its_requests_on_both_in_the_same_step(
    pair: Pair, where: str
) -> None:
    reqs = stored(pair)
    pair.both(lambda desk, rank: desk.arrive(reqs[rank]))
    part, name = where.split(".")

    def fail(*args: Any) -> None:
        raise Fault(where)

    setattr(getattr(pair.desks[0].cake, part), name, fail)
    raised: list[Any] = [None, None]
    for _ in range(3):
        if raised[0] is None:
            raised = pair.poll("r")
    assert isinstance(raised[0], Fault)
    assert raised[1] is None
    assert pair.live() == [[], []]
    assert [desk.cake.held_tokens for desk in pair.desks] == [0, 0]


def test_a_rank_that_cannot_say_what_it_knows_takes_part_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reqs = stored(pair)
    pair.both(lambda desk, rank: desk.arrive(reqs[rank]))
    one = pair.desks[0].cake.restore("r")
    assert one is not None
    one.failed = None  # type: ignore[assignment]
    raised = pair.poll("r")
    assert isinstance(raised[0], TypeError)
    assert raised[1] is None
    one.failed = set()
    assert pair.live() == [[], []]


def test_a_rank_that_is_switched_off_switches_off_the_others_once(pair: Pair) -> None:
    reqs = stored(pair)
    pair.both(lambda desk, rank: desk.arrive(reqs[rank]))
    pair.poll("r")
    pair.desks[0].cake.end("r")
    assert not pair.desks[0].cake.leave()  # the other does not know yet
    assert pair.poll("r") == [None, None]
    assert pair.live() == [[], []]  # one without a record ends it everywhere
    pair.both(lambda desk, rank: desk.arrive(reqs[rank]))
    assert pair.live() == [[], ["r"]]
    pair.both(lambda desk, rank: desk.cake.together())  # as every poll begins
    assert [desk.cake.left for desk in pair.desks] == [True, True]
    assert pair.live() == [[], []]
    before = pair.reductions
    pair.both(lambda desk, rank: desk.arrive(reqs[rank]))
    assert pair.live() == [[], []]
    pair.both(lambda desk, rank: desk.cake.together())
    assert pair.reductions == before  # nobody waits for anybody any more


def test_records_that_have_come_apart_end_before_anything_is_reduced(pair: Pair) -> None:
    reqs = stored(pair)
    pair.both(lambda desk, rank: desk.arrive(reqs[rank]))
    pair.poll("r")
    one = pair.desks[0].cake.restore("r")
    assert one is not None
    one.prefill_s = 1.0  # for this rank its prefill is over
    assert pair.poll("r") == [None, None]
    assert pair.live() == [[], []]
