"""Two ranks of a group, each with its own store and loader, of which one fails."""

import math
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from coordinator_harness import BLOCK, NAMESPACE, NO_MEMORY, CoordinatorHarness, FakeReq, req_of
from faults import Fault
from polling import until

from sglang_cake.integration.scheduler.coordinator import NEAR, RECONSIDERED
from sglang_cake.loading.cost_model import LoadCost, PrefillCost

PATIENCE_S = 60.0


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

    def reclaimable_tokens(self) -> list[int]:
        return [harness.coordinator.reclaimable_tokens for harness in self.harnesses]

    def agree(self, *rids: str) -> None:
        """Three polls, without an error."""
        for _ in range(3):
            assert self.poll(*rids) == [None, None]

    def close(self) -> None:
        self._pool.shutdown()
        for harness in self.harnesses:
            harness.coordinator.release_all()
            harness.close()


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
    ranks.agree("r")
    assert ranks.reclaimable_tokens() == [4 * BLOCK] * 2


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
    ranks.agree("other", "r")
    assert ranks.live() == [["other"], ["other"]]
    assert ranks.reclaimable_tokens() == [4 * BLOCK] * 2


@pytest.mark.parametrize(
    "where",
    [
        "loader.drain",
        "loader.link_idle",
        "device_slots.stage",
        "device_slots.place",
        "step_costs.next_landings",
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
    assert ranks.reclaimable_tokens() == [0, 0]


@pytest.mark.parametrize("where", ["loader.drain", "device_slots.place"])
def test_ranks_poll_failing_on_one_rank_leaves_the_same_requests_far(
    ranks: TwoRanks, where: str
) -> None:
    """What one rank has dropped changes no list that the ranks reduce."""
    reqs = stored(ranks)
    crowds = [[FakeReq(f"c{i}", array("q", [i])) for i in range(2 * NEAR)] for _ in range(2)]
    for pair in [reqs, *zip(*crowds, strict=True)]:
        for harness, req in zip(ranks.harnesses, pair, strict=True):
            harness.arrive(req)
    rids = ["r", *(req.rid for req in crowds[0])]
    part, name = where.split(".")
    working = getattr(getattr(ranks.harnesses[0], part), name)

    def fail(*args: Any, **rest: Any) -> None:
        setattr(getattr(ranks.harnesses[0], part), name, working)
        raise Fault(where)

    setattr(getattr(ranks.harnesses[0], part), name, fail)
    raised = []
    for _ in range(4):
        raised += ranks.poll(*rids)
        far = [
            [harness.coordinator.is_far(req) for req in crowd]
            for harness, crowd in zip(ranks.harnesses, crowds, strict=True)
        ]
        assert far == [[False] * (NEAR - 1) + [True] * (NEAR + 1)] * 2
    assert [type(each) for each in raised if each is not None] == [Fault]


def test_ranks_prompt_that_is_far_before_its_lookup_is_known_holds_no_buffer(
    ranks: TwoRanks,
) -> None:
    """One rank has its blocks by then, the other one none. Both load it once it is near again."""
    one, late = ranks.harnesses
    reqs = [req_of(4.5) for _ in ranks.harnesses]
    one.open(*one.fill(reqs[0].origin_input_ids, set(range(4))))
    keys = late.fill(reqs[1].origin_input_ids, set(range(4)))
    crowds = [[FakeReq(f"c{i}", array("q", [i])) for i in range(NEAR)] for _ in range(2)]
    for pair in [reqs, *zip(*crowds, strict=True)]:
        for harness, req in zip(ranks.harnesses, pair, strict=True):
            harness.arrive(req)
    assert len(late.slow.waiting) == 2
    rids = [req.rid for req in crowds[0]]
    ranks.agree(*rids, "r")
    assert [harness.staging.free for harness in ranks.harnesses] == [one.staging.capacity] * 2
    late.open(*keys)
    ranks.agree("r", *rids)
    assert ranks.reclaimable_tokens() == [4 * BLOCK] * 2


def without_memory(harness: CoordinatorHarness) -> None:
    harness.copier.errors |= {harness.block(number): NO_MEMORY for number in range(4)}


def test_ranks_block_without_device_memory_on_one_rank_ends_the_request_on_both(
    ranks: TwoRanks,
) -> None:
    """Before the step is decided, and without an error."""
    reqs = stored(ranks)

    without_memory(ranks.harnesses[1])
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    ranks.agree("r")
    assert ranks.live() == [[], []]
    assert ranks.reclaimable_tokens() == [0, 0]


def test_ranks_copy_without_device_memory_within_a_poll_ends_the_request_in_the_same_poll(
    ranks: TwoRanks,
) -> None:
    """The next thing to come is the step, for which the block would be missing on that rank."""
    reqs = stored(ranks)
    for harness in ranks.harnesses:
        harness.coordinator.spare_slots = 0  # landed blocks stay in host memory
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    ranks.agree("r")
    assert ranks.reclaimable_tokens() == [0, 0]

    without_memory(ranks.harnesses[1])
    for harness in ranks.harnesses:
        harness.coordinator.spare_slots = math.inf
    assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]
    assert ranks.reclaimable_tokens() == [0, 0]


def test_ranks_failed_copy_behind_a_hole_ends_the_request_on_both(ranks: TwoRanks) -> None:
    """Another request may compute the hole before the step, which then attaches the block."""
    reqs = [req_of(4.5, "r") for _ in ranks.harnesses]
    for harness, req in zip(ranks.harnesses, reqs, strict=True):
        harness.open(*harness.fill(req.origin_input_ids, {1, 2, 3}))

    without_memory(ranks.harnesses[1])
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    for _ in range(5):
        assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]


def test_ranks_error_of_a_copy_is_raised_once(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    for harness in ranks.harnesses:
        harness.coordinator.spare_slots = 0  # landed blocks stay in host memory
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    ranks.agree("r")

    one = ranks.harnesses[1]
    one.copier.errors[one.block(3)] = Fault("a copy")
    for harness in ranks.harnesses:
        harness.coordinator.spare_slots = math.inf
    raised = [each for _ in range(3) for each in ranks.poll("r") if each is not None]
    assert [str(each) for each in raised] == ["a copy"]
    assert ranks.live() == [[], []]


def test_ranks_rank_with_broken_facts_still_reduces_and_ends_the_request(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    one = ranks.harnesses[0].coordinator.live["r"]
    one.local.lost = 1  # type: ignore[assignment]
    raised = ranks.poll("r")
    assert isinstance(raised[0], TypeError)
    assert raised[1] is None
    one.local.lost = set()
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


@pytest.mark.parametrize("knows_namespace", [True, False])
def test_ranks_prompt_that_differs_on_one_rank_is_kept_out_of_the_trees_of_both(
    ranks: TwoRanks, knows_namespace: bool
) -> None:
    """The trees of ranks must be equal. One rank of the prefill server may not know its keys yet,
    and one of the decode server its namespace."""
    first, second = (harness.coordinator for harness in ranks.harnesses)
    digests = []
    for harness in ranks.harnesses:
        harness.arrive(req := req_of(2.5))
        digests.append(harness.coordinator.prompt_digest(req))
        harness.coordinator.release(req.rid)
    assert digests[0] == digests[1]
    if not knows_namespace:
        first.rebase(None, suspended=False)
    reqs: list[Any] = [FakeReq("r", array("q", range(2 * BLOCK + 8))) for _ in range(2)]
    for req in reqs:
        req.output_ids = array("q", [1])
        req.skip_radix_cache_insert = False
    first.save_answer(reqs[0], digests[0])
    second.save_answer(reqs[1], digests[1][:-1] + b"?")
    assert ranks.live() == [["r"] if knows_namespace else [], []]
    assert ranks.both(lambda harness, rank: harness.coordinator.on_everywhere()) == [None, None]
    assert [req.skip_radix_cache_insert for req in reqs] == [True, True]
    assert ranks.live() == [[], []]
    assert [first.off_everywhere, second.off_everywhere] == [False, False]
    before = ranks.reductions
    ranks.both(lambda harness, rank: harness.coordinator.on_everywhere())
    assert ranks.reductions == before + 1  # what was received is agreed on once


@pytest.mark.parametrize("second_knows", [True, False])
def test_ranks_evicted_prompt_is_looked_up_again_by_both(
    ranks: TwoRanks, second_knows: bool
) -> None:
    """Behind a failure, one tree alone may have evicted: the ranks agree, and go on alike."""
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank], matched=4 * BLOCK))
    assert ranks.poll("r") == [None, None]
    ranks.both(lambda harness, rank: harness.evict(reqs[rank]))
    ranks.harnesses[1].coordinator.tree_evicts = second_knows
    ranks.agree("r")
    assert ranks.reclaimable_tokens() == [4 * BLOCK] * 2


def test_ranks_waiting_prompt_follows_the_trees_on_both(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    assert ranks.poll("r") == [None, None]
    ranks.both(lambda harness, rank: harness.grow(reqs[rank], 2 * BLOCK))
    ranks.agree("r")
    fronts = [harness.coordinator.live["r"].meet.front for harness in ranks.harnesses]
    assert fronts == [2 * BLOCK] * 2
    assert ranks.reclaimable_tokens() == [2 * BLOCK] * 2


def test_ranks_waiting_prompt_that_one_rank_cannot_match_ends_on_both(ranks: TwoRanks) -> None:
    reqs = stored(ranks)
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    assert ranks.poll("r") == [None, None]
    ranks.both(lambda harness, rank: harness.grow(reqs[rank], 2 * BLOCK))
    reqs[0].prefix_len = "no number"  # type: ignore[assignment]
    raised = ranks.poll("r")
    reqs[0].prefix_len = 2 * BLOCK
    assert isinstance(raised[0], TypeError)
    assert raised[1] is None
    assert ranks.live() == [[], []]


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
    one = ranks.harnesses[0].coordinator.live["r"]
    one.stats.prefill_s = 1.0  # for this rank its prefill is over
    assert ranks.poll("r") == [None, None]
    assert ranks.live() == [[], []]


# ---- behind a failure on one rank ----


def fails(*args: Any) -> None:
    raise Fault("on one rank")


def fail_in_next_poll(ranks: TwoRanks, *rids: str) -> None:
    """One rank alone fails while it takes its events."""
    loader = ranks.harnesses[0].loader
    drain, loader.drain = loader.drain, fails  # type: ignore[assignment, method-assign]
    assert isinstance(ranks.poll(*rids)[0], Fault)
    loader.drain = drain  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["loader.drain", "a copy", "a hook", "arrive"])
def test_ranks_ask_their_trees_for_the_same_matches_when_one_fails(
    ranks: TwoRanks, where: str
) -> None:
    """A match marks nodes as recently used, and the next eviction would take others."""
    reqs = stored(ranks)
    asked: list[list[str]] = [[], []]

    def arrive(harness: CoordinatorHarness, rank: int) -> None:
        def matched(tokens: Any, limit: int) -> int:
            asked[rank].append("match")
            return 0

        harness.coordinator.arrive(reqs[rank], matched)  # type: ignore[arg-type]
        harness.settle()

    first = ranks.harnesses[0]
    if where == "arrive":
        first.adapter_error = Fault("adapter")
        reqs[0].lora_id = reqs[1].lora_id = "adapter@a"
    ranks.both(arrive)
    assert asked == [["match"], ["match"]]
    ranks.agree("r")
    for harness in ranks.harnesses:
        harness.coordinator.tree_evicts = True
    if where == "loader.drain":
        fail_in_next_poll(ranks, "r")
    elif where == "a copy":
        first.copier.error_under_way = Fault("a copy")
        assert isinstance(ranks.poll("r")[0], Fault)
    elif where == "a hook":
        first.coordinator.release("r")
        assert ranks.poll("r") == [None, None]
    assert asked[0] == asked[1]


@pytest.mark.usefixtures("stopped_clock")
def test_ranks_ask_the_same_waiting_prompts_after_one_failed() -> None:
    """More prompts wait than a poll asks."""
    with closing(TwoRanks(mode="auto")) as ranks:
        reqs = stored(ranks)
        slots = ranks.harnesses[0].device_slots
        stage, slots.stage = slots.stage, fails  # type: ignore[assignment, method-assign]
        ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
        raised = [error for _ in range(3) for error in ranks.poll("r") if error is not None]
        assert [type(error) for error in raised] == [Fault]
        slots.stage = stage  # type: ignore[method-assign]
        assert ranks.live() == [[], []]
        rids = [f"r{number}" for number in range(RECONSIDERED + 4)]
        for number, rid in enumerate(rids):
            made = []
            for harness in ranks.harnesses:
                made.append(FakeReq(rid, array("q", range(1000 * number, 1000 * number + 67))))
                harness.fill(made[-1].origin_input_ids, set(range(4)))
            ranks.both(lambda harness, rank, made=made: harness.arrive(made[rank]))
        assert ranks.poll(*rids) == [None, None]
        for _ in range(3):
            for harness in ranks.harnesses:
                harness.step_costs.judged.clear()
            assert ranks.poll(*rids) == [None, None]
            one, other = (sorted(harness.step_costs.judged) for harness in ranks.harnesses)
            assert one == other != []


def test_ranks_have_the_same_turns_of_tenants_after_one_failed() -> None:
    with closing(TwoRanks(priority="fair")) as ranks:
        reqs = [req_of(400, "r") for _ in ranks.harnesses]
        ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
        for _ in range(2):
            assert ranks.poll("r") == [None, None]
        first = ranks.harnesses[0].coordinator
        first.release("r")  # as the boundary does, where a hook fails for it
        first.failed = True
        ranks.both(lambda harness, rank: harness.coordinator.claimed(reqs[rank], 5000))  # type: ignore[arg-type]
        assert ranks.poll("r") == [None, None]
        later = [harness.coordinator.queue_entry(req_of(2, "l")) for harness in ranks.harnesses]  # type: ignore[arg-type]
        assert later[0].tenant_round == later[1].tenant_round


def test_ranks_have_the_same_clock_after_one_failed(ranks: TwoRanks) -> None:
    """It counts how long requests without keys have waited."""
    reqs = stored(ranks)
    loads = ranks.harnesses[0].coordinator.prompt_loads
    apply, loads.apply = loads.apply, fails  # type: ignore[assignment, method-assign]
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    assert isinstance(ranks.poll("r")[0], Fault)
    loads.apply = apply  # type: ignore[method-assign]

    plain = [req_of(4, "plain") for _ in ranks.harnesses]
    more = stored(ranks, "more")
    pairs = list(zip(ranks.harnesses, plain, strict=True))
    for harness, req in pairs:
        harness.coordinator.queue_entry(req)  # type: ignore[arg-type]
    ranks.both(lambda harness, rank: harness.arrive(more[rank]))
    assert ranks.poll("more", "plain") == [None, None]
    one, other = (harness.coordinator.queue_entry(req).waited_s for harness, req in pairs)  # type: ignore[arg-type]
    assert one == other


def test_ranks_forget_decoding_requests_alike_after_one_failed(ranks: TwoRanks) -> None:
    """No vote names them. The ranks agree with the next prompt."""
    reqs, other = stored(ranks), stored(ranks, "other")
    ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
    ranks.agree("r")
    assert ranks.both(lambda harness, rank: harness.step(reqs[rank])) == [None, None]
    fail_in_next_poll(ranks)
    ranks.both(lambda harness, rank: harness.arrive(other[rank]))
    assert ranks.poll("other") == [None, None]
    assert ranks.live() == [[], []]


@pytest.mark.usefixtures("stopped_clock")
def test_ranks_have_the_same_slack_after_each_recalled_its_own_costs() -> None:
    """They agree on costs only while a prompt with keys is live. Before that, prompts without keys
    are scheduled, and what is predicted then counts for prompts after them."""
    load, prefill = LoadCost(0.1, 0.3, error=0.0, depth=2), PrefillCost(1e-3, 1e-3, 1e-9, error=0.1)
    with closing(TwoRanks(mode="auto", load=load, prefill=prefill, slots=4000)) as ranks:
        for harness, factor in zip(ranks.harnesses, (1.0, 1.3), strict=True):
            harness.step_costs.recall(replace(prefill, token_s=factor * 1e-3), [None])
            harness.coordinator.rebase(None, suspended=False)  # not known yet
        before = [FakeReq("before", array("q", range(10000, 12000))) for _ in ranks.harnesses]
        ranks.both(lambda harness, rank: harness.arrive(before[rank]))
        assert ranks.poll("before") == [None, None]
        reqs = [req_of(40.5, "r") for _ in ranks.harnesses]
        for harness, req in zip(ranks.harnesses, reqs, strict=True):
            harness.coordinator.rebase(NAMESPACE, suspended=False)
            harness.fill(req.origin_input_ids, set(range(4, 40)))
        ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
        ranks.agree("before", "r")
        pairs = zip(ranks.harnesses, reqs, strict=True)
        one, other = (harness.coordinator.queue_entry(req) for harness, req in pairs)  # type: ignore[arg-type]
        assert one.waits_for_loads
        assert one == other


@pytest.mark.parametrize("other_rank", ["has a record", "failed"])
@pytest.mark.usefixtures("stopped_clock")
def test_ranks_decide_alike_behind_a_request_without_keys_on_one_of_them(other_rank: str) -> None:
    """Work ahead of a prompt that is counted by one rank alone would make another step there."""
    with closing(TwoRanks(mode="auto", load=LoadCost(0.08, 0.05, error=0.0, depth=2))) as ranks:
        ahead = [FakeReq("ahead", array("q", range(1000, 3000))) for _ in ranks.harnesses]
        ahead[0].lora_id = "unknown"
        ahead[1].lora_id = "adapter@a"
        if other_rank == "failed":
            ranks.harnesses[1].adapter_error = Fault("adapter")
        reqs = [req_of(4.5, "r") for _ in ranks.harnesses]
        for harness, req in zip(ranks.harnesses, reqs, strict=True):
            harness.fill(req.origin_input_ids, set(range(4)))

        def arrive(harness: CoordinatorHarness, rank: int) -> None:
            try:
                harness.arrive(ahead[rank])
            except Fault:  # as the boundary does
                harness.coordinator.failed = True
                harness.coordinator.release("ahead")

        assert ranks.both(arrive) == [None, None]
        assert ranks.poll("ahead") == [None, None]
        ranks.both(lambda harness, rank: harness.arrive(reqs[rank]))
        ranks.agree("ahead", "r")
        pairs = list(zip(ranks.harnesses, reqs, strict=True))
        one, other = (harness.coordinator.queue_entry(req) for harness, req in pairs)  # type: ignore[arg-type]
        assert one.remaining_s == other.remaining_s
        loading = [harness.coordinator.loading(req) for harness, req in pairs]  # type: ignore[arg-type]
        assert loading[0] == loading[1]


def test_ranks_prompt_that_one_rank_has_read_gets_buffers_on_the_other() -> None:
    """The prompt before it has lost its device memory, and fills staging on that rank alone."""
    with closing(TwoRanks(mode="load", slots=24 * BLOCK, staging=8)) as ranks:
        longs, keys = [req_of(20.5, "long") for _ in range(2)], []
        tokens = range(10**5, 10**5 + 9 * BLOCK + 8)
        shorts = [FakeReq("short", array("q", tokens)) for _ in range(2)]
        for harness, long, short in zip(ranks.harnesses, longs, shorts, strict=True):
            keys.append(harness.fill(long.origin_input_ids, set(range(20))))
            harness.open(*harness.fill(short.origin_input_ids, set(range(9))))

        def spare(slots: int) -> None:
            for harness in ranks.harnesses:
                harness.coordinator.spare_slots = slots

        spare(24 * BLOCK)
        ranks.both(lambda harness, rank: harness.arrive(longs[rank]))
        for _ in range(2):
            ranks.poll("long")
        slow, fast = ranks.harnesses
        fast.open(*keys[1])
        until(lambda: not fast.staging.free, "blocks of a long step fill staging")
        ranks.both(lambda harness, rank: harness.coordinator.reclaim(harness.size))
        spare(0)
        ranks.poll("long")
        slow.open(*keys[0])
        for _ in range(2):
            ranks.poll("long")
        assert [harness.staging.free for harness in ranks.harnesses] == [2, 0]
        spare(12 * BLOCK)
        ranks.both(lambda harness, rank: harness.arrive(shorts[rank]))

        def landed() -> bool:
            assert ranks.poll("long", "short") == [None, None]
            records = [harness.coordinator.live["short"] for harness in ranks.harnesses]
            return all(record.meet.landed_blocks == 9 for record in records)

        until(landed, "all blocks have landed")


@pytest.mark.parametrize("evicts", [False, True])
def test_ranks_waiting_prompts_are_matched_on_both_when_one_fails_in_between(
    ranks: TwoRanks, evicts: bool
) -> None:
    """A match changes the order of eviction in the tree."""
    reqs = {rid: stored(ranks, rid) for rid in ("a", "b")}
    matches: list[list[str]] = [[], []]

    def arrive(harness: CoordinatorHarness, rank: int) -> None:
        for rid, pair in reqs.items():

            def matched(tokens: Any, limit: int, rid: str = rid, req: FakeReq = pair[rank]) -> int:
                matches[rank].append(rid)
                return min(limit, req.prefix_len)

            harness.coordinator.arrive(pair[rank], matched)  # type: ignore[arg-type]
        harness.settle()

    ranks.both(arrive)
    assert ranks.poll("a", "b") == [None, None]

    def grow(harness: CoordinatorHarness, rank: int) -> None:
        for pair in reqs.values():
            harness.grow(pair[rank], 2 * BLOCK)
        harness.coordinator.tree_evicts = evicts

    ranks.both(grow)

    def fail(*args: Any) -> None:
        raise Fault("advance")

    ranks.harnesses[0].coordinator._advance = fail  # type: ignore[method-assign]
    raised = ranks.poll("a", "b")
    assert isinstance(raised[0], Fault)
    assert raised[1] is None
    assert matches[0] == matches[1]
