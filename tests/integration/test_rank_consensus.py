"""Ranks with different views, which must decide alike."""

import copy
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from kv_pools import record_of

from sglang_cake.config import CakeConfig
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.request.prompt_record import LoadUpdate, PromptRecord
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus, SharedCosts, Vote
from sglang_cake.loading.cost_model import LoadCost, PrefillCost

BLOCK = 4


ANY = PrefillCost(0.01, 1e-4, 1e-9, 0.0, 0.1)


def reduced(
    ranks: list[list[PromptRecord]], action: Callable[[RankConsensus, int], Any]
) -> list[Any]:
    """The result of each rank. A first call collects the numbers of all, a second reduces them."""
    said: list[torch.Tensor] = []
    for rank in range(len(ranks)):
        action(RankConsensus(lambda tensor: said.append(tensor.clone())), rank)
    assert len({len(tensor) for tensor in said}) <= 1, "ranks reduce tensors of different length"
    least = torch.stack(said).min(dim=0).values if said else None

    def reduce_min(tensor: torch.Tensor) -> None:
        assert least is not None
        tensor.copy_(least)

    return [action(RankConsensus(reduce_min), rank) for rank in range(len(ranks))]


def on_gloo(action: Callable[[RankConsensus, int], Any], ranks: int) -> list[Any]:
    """The result of each rank. The reductions are those of a real group."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        consensus = RankConsensus(lambda tensor: group.allreduce([tensor], options).wait())
        return action(consensus, rank)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))


def checked_settings(*ranks: tuple[CakeConfig, int, str]) -> list[str]:
    """What each rank with these settings, tiers and version raises, or ""."""

    def check(consensus: RankConsensus, rank: int) -> str:
        config, tiers, version = ranks[rank]
        try:
            consensus.check_settings(config, tiers=tiers, version=version)
        except ConfigError as error:
            return str(error)
        return ""

    return on_gloo(check, len(ranks))


def vote(ranks: list[list[PromptRecord]]) -> list[Vote]:
    """The result of each rank."""
    return reduced(
        ranks, lambda consensus, rank: consensus.vote(ranks[rank], failed=False, evicts=False)
    )


def agree(
    ranks: list[list[PromptRecord]],
    own: list[PrefillCost],
    tiers: Sequence[tuple[LoadCost, ...]] = (),
) -> list[tuple[list[LoadUpdate], SharedCosts]]:
    """The result of each rank, after a vote."""
    votes = vote(ranks)
    return reduced(
        ranks,
        lambda consensus, rank: consensus.agree(
            ranks[rank],
            votes[rank].changed,
            SharedCosts(own[rank], 0.5, tiers[rank] if tiers else ()),
        ),
    )


def record(
    blocks: int,
    *,
    arrived: tuple[int, ...] = (),
    failed: tuple[int, ...] = (),
    answer: tuple[bool, ...] | None = None,
    known: bool = False,
    extra: int = 0,
    waited_s: float = 0.0,
    next_tokens: int = 0,
) -> PromptRecord:
    made = record_of(
        blocks, block=BLOCK, extra_tokens=extra, waited_s=waited_s, next_tokens=next_tokens
    )
    made.local.fetched = dict.fromkeys(arrived)  # type: ignore[assignment]
    made.local.lost = set(failed)
    made.local.stored = answer
    made.local.tiers = bytes(len(answer or ()))
    made.agreed.lookup_done = known
    if known:
        made.meet.found((True,) * blocks)
    return made


def test_rank_consensus_landed_needs_all_ranks_and_lost_any_rank() -> None:
    yes = (True,) * 4
    ranks = [
        [record(4, arrived=(0, 2, 3), answer=yes)],
        [record(4, arrived=(2, 3), failed=(1,), answer=yes)],
        [record(4, arrived=(3, 0), answer=yes)],
    ]
    results = agree(ranks, [ANY] * 3)
    for facts, *_ in results:
        assert facts[0].fetched == (3,)
        assert facts[0].lost == (1,)
        assert facts[0].stored == (True,) * 4


def test_rank_consensus_lookup_needs_an_answer_of_every_rank() -> None:
    quick, slow = record(2, answer=(True, True)), record(2)
    for facts, *_ in agree([[quick], [slow]], [ANY] * 2):
        assert facts[0].stored is None
    slow.local.stored = (True, False)
    slow.local.tiers = bytes(2)
    for facts, *_ in agree([[quick], [slow]], [ANY] * 2):
        assert facts[0].stored == (True, False)


def test_rank_consensus_block_without_a_key_has_no_answer_on_any_rank() -> None:
    quick, slow = record(2, answer=(True,), next_tokens=1), record(2, next_tokens=1)
    for facts, *_ in agree([[quick], [slow]], [ANY] * 2):
        assert facts[0].stored is None
    slow.local.stored = (True,)
    slow.local.tiers = bytes(1)
    for facts, *_ in agree([[quick], [slow]], [ANY] * 2):
        assert facts[0].stored == (True,)


def test_rank_consensus_known_answer_is_not_given_again() -> None:
    told = record(2, answer=(True, True), known=True)
    for facts, *_ in agree([[told]], [ANY]):
        assert facts[0].stored is None


def test_rank_consensus_costs_are_the_minimum_of_all_ranks() -> None:
    one = PrefillCost(0.3, 2e-5, 5e-9, 0.0, 1e-300)
    two = PrefillCost(0.1, 3e-5, 4e-9, 1.0, 1e300)
    least = PrefillCost(0.1, 2e-5, 4e-9, 0.0, 1e-300)
    shared = SharedCosts(least, 0.5, ())
    assert [agreed for _, agreed in agree([[], []], [one, two])] == [shared, shared]


def test_rank_consensus_single_rank_gets_its_own_facts() -> None:
    one = record(3, arrived=(1,), failed=(2,), answer=(True, True, True), extra=3)
    shared = SharedCosts(ANY, 0.0, ())
    facts, agreed = RankConsensus(None).agree([one], [True], shared)
    assert (facts[0].stored, facts[0].fetched, facts[0].lost) == ((True,) * 3, (1,), (2,))
    assert agreed == shared


def test_rank_consensus_wait_is_the_longest_and_the_clock_the_least_of_all_ranks() -> None:
    before_s = time.monotonic()
    ranks = [[record(1, waited_s=5000.0)], [record(1, waited_s=2000.0)]]
    one, other = (updates[0] for updates, *_ in agree(ranks, [ANY] * 2))
    assert one.elapsed_s == other.elapsed_s
    assert 5000.0 <= one.elapsed_s < 6000.0
    voted = vote(ranks)
    assert voted[0].now_s == voted[1].now_s
    assert int(before_s) <= voted[0].now_s <= time.monotonic()


def test_rank_consensus_rank_that_has_all_blocks_leaves_the_wait_to_the_others() -> None:
    answer = (True, True, True)
    has_all = record(3, arrived=(1, 2), answer=answer, known=True, waited_s=5000.0)
    lacks_one = record(3, arrived=(2,), answer=answer, known=True, waited_s=2000.0)
    for each in (has_all, lacks_one):
        each.agreed.load_from = 1  # block 0 is not worth loading
    for updates, *_ in agree([[has_all], [lacks_one]], [ANY] * 2):
        assert 2000.0 <= updates[0].elapsed_s < 3000.0
        assert updates[0].fetched == (2,)


def test_rank_consensus_link_is_idle_if_that_of_each_rank_that_lacks_a_block_is() -> None:
    """Otherwise a rank without a buffer would wait for ever: it does not count as waiting."""
    answer = (True, True, True)
    has_all = record(3, arrived=(1, 2), answer=answer, known=True, waited_s=1000.0)
    lacks_one = record(3, arrived=(2,), answer=answer, known=True, waited_s=2000.0)
    for each in (has_all, lacks_one):
        each.agreed.load_from = 1  # so the link of a rank that has all may not count as idle
    for idle in (True, False):
        lacks_one.local.link_idle = idle
        for updates, *_ in agree([[has_all], [lacks_one]], [ANY] * 2):
            assert updates[0].link_idle is idle
    for updates, *_ in agree([[has_all], [copy.deepcopy(has_all)]], [ANY] * 2):
        assert not updates[0].link_idle  # their links have no block to bring
    lacks_one.local.link_idle = True
    for each in (has_all, lacks_one):
        each.agreed.load_from = None
    for updates, *_ in agree([[has_all], [lacks_one]], [ANY] * 2):
        assert not updates[0].link_idle  # no block is worth a buffer


def test_rank_consensus_rank_whose_link_is_idle_leaves_the_wait_to_the_others() -> None:
    """It may be idle since its buffers have the blocks that another rank's link does not bring."""
    idle, waiting = record(1, waited_s=1000.0), record(1, waited_s=2000.0)
    idle.local.link_idle = True
    for facts, *_ in agree([[idle], [waiting]], [ANY] * 2):
        assert facts[0].elapsed_s >= 2000.0
        assert not facts[0].link_idle
    for facts, *_ in agree([[idle], [idle]], [ANY] * 2):
        assert facts[0].elapsed_s == 0.0
        assert facts[0].link_idle


def test_rank_consensus_blocks_without_changes_are_not_reduced() -> None:
    """A poll with many waiting prompts would take longer than a step."""
    known, lost = record(4, known=True), record(4, known=True, failed=(2,))
    ranks = [
        [known, record(4), record(4, known=True), record(4, known=True)],
        [known, record(4, answer=(True,) * 4), record(4, known=True, arrived=(1,)), known],
        [known, record(4), record(4, known=True), lost],
    ]
    assert [each.changed for each in vote(ranks)] == [[False, True, True, True]] * 3
    lost.meet.lost(2)  # as all ranks know then
    assert [each.changed for each in vote(ranks)] == [[False, True, True, False]] * 3
    sizes: list[int] = []
    for changed in ([False], [True]):
        consensus = RankConsensus(lambda tensor: sizes.append(len(tensor)))
        consensus.agree([known], changed, SharedCosts(ANY, 0.5, ()))
    assert sizes[1] == sizes[0] + 2 * 4


@st.composite
def views(draw: st.DrawFn) -> list[list[PromptRecord]]:
    """The same requests as several ranks see them."""
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=4)
    )
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        rank = []
        for blocks, extra, known in shapes:
            state = draw(st.lists(st.sampled_from("wlf"), min_size=blocks, max_size=blocks))
            stored = tuple(draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)))
            answer = stored if known or draw(st.booleans()) else None
            rank.append(
                record(
                    blocks,
                    arrived=tuple(b for b, s in enumerate(state) if s == "l"),
                    failed=tuple(b for b, s in enumerate(state) if s == "f"),
                    answer=answer,
                    known=known,
                    extra=extra,
                )
            )
        ranks.append(rank)
    return ranks


@given(ranks=views(), numbers=st.lists(st.floats(0, 10), min_size=20, max_size=20))
def test_rank_consensus_random_views_give_equal_and_true_facts(
    ranks: list[list[PromptRecord]], numbers: list[float]
) -> None:
    own = [PrefillCost(*numbers[5 * n : 5 * n + 5]) for n in range(len(ranks))]
    results = agree(copy.copy(ranks), own)
    plain = [[(f.stored, f.fetched, f.lost) for f in facts] for facts, *_ in results]
    assert all(p == plain[0] for p in plain)
    assert len({agreed for _, agreed in results}) == 1
    for n, (stored, landed, lost) in enumerate(plain[0]):
        views_of_it = [rank[n] for rank in ranks]
        assert set(landed) == set.intersection(*(set(r.local.fetched) for r in views_of_it))
        assert set(lost) == set.union(*(r.local.lost for r in views_of_it))
        answers = [r.local.stored for r in views_of_it]
        if views_of_it[0].agreed.lookup_done or None in answers:
            assert stored is None
        else:
            assert stored == tuple(
                all(column) for column in zip(*(a for a in answers if a), strict=True)
            )


def test_rank_consensus_costs_of_tiers_are_the_largest_of_all_ranks() -> None:
    one = (LoadCost(0.125, 0.5, 0.0, 0.5, depth=16), LoadCost(0.5, 2.0, 0.25, depth=4))
    two = (LoadCost(0.25, 0.25, 0.0, 0.5, depth=16), LoadCost(0.5, 3.0, 0.125, depth=4))
    most = (LoadCost(0.25, 0.5, 0.0, 0.5, depth=16), LoadCost(0.5, 3.0, 0.25, depth=4))
    found = [shared.tiers for _, shared in agree([[], []], [ANY] * 2, [one, two])]
    assert found == [most, most]


def test_rank_consensus_silence_of_a_tier_is_the_longest_of_all_ranks() -> None:
    """A block lands when every rank has its part of it."""
    costs, silences = (LoadCost(0.1, 0.2),), [(0.0, 5.0, 3.0), (1.0, 0.5, 4.0)]
    found = reduced(
        [[], []],
        lambda consensus, rank: consensus.agree(
            [], [], SharedCosts(ANY, 0.5, costs, silences[rank])
        ),
    )
    assert [shared for _, shared in found] == [SharedCosts(ANY, 0.5, costs, (1.0, 5.0, 4.0))] * 2


def test_rank_consensus_time_of_a_decode_step_is_the_smallest_of_all_ranks() -> None:
    found = reduced(
        [[], []],
        lambda consensus, rank: consensus.agree(
            [], [], SharedCosts(ANY, 0.5, (), decode_step_s=(0.02, 0.03)[rank])
        ),
    )
    assert [shared.decode_step_s for _, shared in found] == [0.02] * 2


def test_rank_consensus_block_counts_in_the_slowest_tier_that_a_rank_reads_it_from() -> None:
    ranks = [[record(4, answer=(True,) * 4)] for _ in range(2)]
    for (made,), tiers in zip(ranks, ((0, 1, 2, 0), (1, 0, 2, 0)), strict=True):
        made.local.tiers = bytes(tiers)
    for (update,), _ in agree(ranks, [ANY] * 2):
        assert update.tiers == bytes((1, 1, 2, 0))


@given(
    blocks=st.integers(1, 12),
    arrived=st.sets(st.integers(0, 11)),
    failed=st.sets(st.integers(0, 11)),
    answered=st.booleans(),
    known=st.booleans(),
    seed=st.randoms(),
)
def test_rank_consensus_single_rank_equals_a_reduction_among_equals(
    blocks: int,
    arrived: set[int],
    failed: set[int],
    answered: bool,
    known: bool,
    seed: random.Random,
) -> None:
    order = [b for b in arrived if b < blocks]
    seed.shuffle(order)
    stored = tuple(b % 3 != 0 for b in range(blocks))
    alone = record(
        blocks,
        arrived=tuple(order),
        failed=tuple(b for b in failed if b < blocks),
        answer=stored if answered else None,
        known=known,
    )
    [voted] = vote([[alone]])
    shared = SharedCosts(ANY, 0.0, (LoadCost(0.1, 0.2), LoadCost(0.3, 0.4, depth=7)))
    own, agreed = RankConsensus(None).agree([alone], [True], shared)
    among, agreed_among = RankConsensus(lambda tensor: None).agree([alone], voted.changed, shared)
    assert agreed == agreed_among == shared
    for field in ("stored", "fetched", "lost"):
        assert getattr(own[0], field) == getattr(among[0], field), field


@pytest.mark.parametrize(
    ("other", "tiers", "texts"),
    [
        ({"block_tokens": 256}, 1, ["--cake-block-tokens 128", "--cake-block-tokens 256"]),
        ({"mode": "load"}, 1, ["--cake-mode auto", "--cake-mode load"]),
        (
            {"min_load_tokens": 0, "priority": "fcfs"},
            1,
            [
                "--cake-min-load-tokens 256, --cake-priority adaptive",
                "--cake-min-load-tokens 0, --cake-priority fcfs",
            ],
        ),
        ({}, 2, ["number of tiers 1", "number of tiers 2"]),
    ],
)
def test_rank_consensus_different_settings_are_one_error_on_all_ranks(
    other: dict[str, Any], tiers: int, texts: list[str]
) -> None:
    """Else ranks reduce different lists, or decide differently and wait for each other."""
    config = CakeConfig(block_tokens=128)
    most = (config, 1, "0.2.0")
    errors = checked_settings(most, most, (replace(config, **other), tiers, "0.2.0"))
    assert errors == [
        f"the machines of this server have different settings, here {each}: "
        "set the same on all of them"
        for each in (texts[0], texts[0], texts[1])
    ]


def test_rank_consensus_different_versions_are_one_error_on_all_ranks() -> None:
    """Even with the same settings, of which another version may have more."""
    errors = checked_settings((CakeConfig(), 1, "0.2.0"), (CakeConfig(), 1, "0.3.0"))
    assert errors == [
        f"the machines of this server have different versions of sglang_cake, here {version}: "
        "install the same version on all of them"
        for version in ("0.2.0", "0.3.0")
    ]


def test_rank_consensus_settings_of_a_machine_may_differ() -> None:
    own = CakeConfig(
        store="file:///other/nvme",
        eviction_policy="lru",
        record_trace="requests.jsonl",
        trace_file="events.jsonl",
        staging_bytes=1 << 30,
        write_queue_bytes=1 << 30,
        queue_depth=8,
    )
    assert checked_settings((CakeConfig(), 1, "0.2.0"), (own, 1, "0.2.0")) == ["", ""]


def test_rank_consensus_rank_without_cake_is_an_error_that_names_the_switch() -> None:
    """That rank goes on to other collective operations of SGLang."""
    ended = threading.Event()
    with pytest.raises(ConfigError, match="another node was started without --enable-cake"):
        RankConsensus(lambda tensor: bool(ended.wait())).await_ranks(timeout_s=0.0)
    ended.set()


def test_rank_consensus_ranks_that_all_have_cake_go_on() -> None:
    on_gloo(lambda consensus, rank: consensus.await_ranks(), 2)
    RankConsensus(None).await_ranks(timeout_s=0.0)


def test_rank_consensus_group_that_fails_while_ranks_are_awaited_is_its_error() -> None:
    def fail(tensor: torch.Tensor) -> None:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        RankConsensus(fail).await_ranks()


def test_rank_consensus_single_rank_has_no_settings_to_compare() -> None:
    RankConsensus(None).check_settings(CakeConfig(), tiers=1, version="0.2.0")


def test_rank_consensus_gathered_numbers_are_equal_for_equal_texts() -> None:
    texts = ["machine a", "machine b", "machine a"]
    first, *others = on_gloo(lambda one, rank: one.gathered(texts[rank], rank, 3), 3)
    assert others == [first] * 2
    assert first[0] == first[2] != first[1]
    assert RankConsensus(None).gathered("machine a", 0, 1) == first[:1]
