"""The loader and prompts whose prefixes end only where an end state is stored."""

from array import array
from collections.abc import Iterator, Sequence

import pytest
from test_loader import (
    BLOCK,
    SEED,
    LoaderHarness,
    bytes_of,
    keys_of,
    looked_up,
    stats_of,
    tokens_of,
)

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import BlockKey, KeyChain, end_keys
from sglang_cake.loading.cost_model import TierLoads
from sglang_cake.loading.loader import Fetched, LoadRequest, Lost
from sglang_cake.stores.base import RequestFacts, WrapperStore
from sglang_cake.stores.lookup_rounds import EXACT_KEYS, look_up_in_rounds

ENDS = 2


class EndsHarness(LoaderHarness):
    """Prompts have end states of ENDS blocks, which belong to `end_rank`."""

    end_rank = (0, 1)

    def fill_end(self, keys: Sequence[BlockKey], target: int, *, without: int = -1) -> None:
        """Store the end behind `target` blocks."""
        ends = end_keys(keys[target - 1], ENDS, *self.end_rank)
        self.store({key: bytes_of(key) for n, key in enumerate(ends) if n != without})

    def begin_ends(
        self, rid: str, tokens: array, *, first: int = 0, load: bool = True
    ) -> list[BlockKey]:
        """Returns the key of every index."""
        keys = keys_of(tokens)
        own = [key for block in keys for key in end_keys(block, ENDS, *self.end_rank)]
        self.keys[rid] = keys + own
        self.usable: list[bool] = []

        def loads_now(usable: Sequence[bool], loads: TierLoads) -> bool:
            self.usable = list(usable)
            return load

        facts = RequestFacts(rid, len(tokens))
        chain = KeyChain(SEED, BLOCK, end_rank=self.end_rank)
        self.loader.begin(
            LoadRequest(
                rid, chain, tokens, len(keys), first, loads_now, facts=facts, end_blocks=ENDS
            )
        )
        return self.keys[rid]


@pytest.fixture
def harness() -> Iterator[EndsHarness]:
    with EndsHarness() as made:
        yield made


def ends(blocks: int, *targets: int) -> tuple[bool, ...]:
    return tuple(block + 1 in targets for block in range(blocks))


def test_loader_reads_the_end_first_and_nothing_right_of_it(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(6)
    harness.fill_end(keys, 4)
    every = harness.begin_ends("a", tokens)
    assert harness.news() == [looked_up("a", (True,) * 6, ends(6, 4))]
    harness.open(*every)
    assert harness.read_keys() == [every[6 + 3 * ENDS + 1], every[6 + 3 * ENDS], *keys[3::-1]]
    assert harness.usable == [True] * 4 + [False] * 2
    indices = [event.block for event in harness.news() if isinstance(event, Fetched)]
    assert sorted(indices) == [0, 1, 2, 3, 12, 13]


def test_loader_reads_the_end_of_its_own_rank(harness: EndsHarness) -> None:
    """Ranks share the blocks of a prompt, and each has end states of its own."""
    tokens, keys = harness.stored(6)
    for harness.end_rank, target in (((1, 2), 3), ((0, 2), 5)):
        harness.fill_end(keys, target)
    harness.end_rank = (1, 2)
    harness.begin_ends("a", tokens)
    own = end_keys(keys[2], ENDS, 1, 2)
    harness.open(*own, *keys)
    assert harness.read_keys() == [*reversed(own), *keys[2::-1]]
    assert harness.news()[0] == looked_up("a", (True,) * 6, ends(6, 3))


def test_loader_prompt_without_a_stored_end_reads_nothing(harness: EndsHarness) -> None:
    tokens = tokens_of(0, 6)
    harness.fill(tokens)
    harness.begin_ends("a", tokens)
    assert harness.news() == [looked_up("a", (True,) * 6, (False,) * 6)]
    assert harness.waiting() == []


def test_loader_run_that_a_hole_cuts_is_not_read_left_of_it(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(6, without=[1])
    harness.fill_end(keys, 6)
    harness.open(*harness.begin_ends("a", tokens))
    assert harness.read_keys()[ENDS:] == keys[5:1:-1]


def test_loader_run_counts_from_the_first_block_that_the_tree_lacks(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(7, without=[4])
    for target in (4, 7):
        harness.fill_end(keys, target)
    harness.open(*harness.begin_ends("a", tokens, first=3))
    assert harness.read_keys()[ENDS:] == [keys[6], keys[5]]  # two blocks, and not one


class SparseLookups(WrapperStore):
    """As a store that asks for one key per request: of many keys, it looks some up."""

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        async def has(key: BlockKey) -> bool:
            return (await self.inner.contains([key]))[0]

        return await look_up_in_rounds(keys, has, at_once=EXACT_KEYS, rounds=3)


@pytest.mark.parametrize("target", [2, 23, 24, 41, 79])
def test_loader_single_end_of_a_long_prompt_is_found_by_a_store_that_infers(
    harness: EndsHarness, target: int
) -> None:
    tokens = tokens_of(0, 5 * EXACT_KEYS)
    keys = harness.fill(tokens)
    harness.fill_end(keys, target)
    harness.loader = harness.new_loader(SparseLookups(harness.recorded))
    harness.begin_ends("a", tokens)
    [answer] = harness.news()
    assert answer == looked_up("a", (True,) * len(keys), ends(len(keys), target))


def test_loader_ends_behind_blocks_that_are_not_stored_are_not_looked_up(
    harness: EndsHarness,
) -> None:
    tokens, keys = harness.stored(6, without=[0, 5])
    harness.begin_ends("a", tokens, first=2)
    harness.news()
    asked = harness.recorded.keys_of("contains")
    assert asked == [*keys, *(end_keys(keys[b], 1)[0] for b in (4, 3, 2))]


def test_loader_new_target_stops_reads_of_the_old_one(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(6)
    for target in (3, 6):
        harness.fill_end(keys, target)
    every = harness.begin_ends("a", tokens)
    harness.news()
    assert harness.waiting() == [every[6 + 5 * ENDS + 1], every[6 + 5 * ENDS]]
    harness.loader.set_run("a", range(3))
    assert harness.waiting() == [every[6 + 2 * ENDS + 1], every[6 + 2 * ENDS]]
    harness.open(*every)
    assert sorted(harness.landed()) == [("a", b) for b in (0, 1, 2, 10, 11)]


def test_loader_block_that_was_read_is_not_read_for_the_next_target(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(4)
    for target in (3, 4):
        harness.fill_end(keys, target)
    every = harness.begin_ends("a", tokens)
    harness.open(every[4 + 3 * ENDS], every[4 + 3 * ENDS + 1], keys[3], keys[2])
    harness.news()
    harness.release()
    harness.loader.set_run("a", range(3))
    harness.open(*every)
    harness.news()
    assert harness.read_keys().count(keys[2]) == 1
    assert set(harness.read_keys()) == {*keys, *end_keys(keys[3], ENDS), *end_keys(keys[2], ENDS)}


def test_loader_empty_run_stops_all_reads(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(4)
    harness.fill_end(keys, 4)
    harness.begin_ends("a", tokens)
    harness.news()
    harness.loader.set_run("a", range(0))
    assert harness.waiting() == []
    assert stats_of(harness.loader).reads == 0
    assert harness.pool.free == harness.pool.capacity


def test_loader_missing_end_block_is_lost(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(4)
    harness.fill_end(keys, 4, without=1)
    every = harness.begin_ends("a", tokens)
    harness.open(*every)
    news = harness.news()
    assert Lost("a", 4 + 3 * ENDS + 1, "missing") in news


def test_loader_failed_lookup_of_ends_counts_as_a_failed_lookup(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(4)

    class NoEnds(WrapperStore):
        async def contains(self, asked: Sequence[BlockKey]) -> list[bool]:
            if not set(asked) <= set(keys):
                raise StoreUnavailable("gone")
            return await super().contains(asked)

    harness.loader = harness.new_loader(NoEnds(harness.recorded))
    harness.begin_ends("a", tokens)
    assert harness.news() == [looked_up("a", (False,) * 4)]
    assert harness.failures() == {"lookup": 1}


def test_loader_pause_and_resume_reads_the_end_again(harness: EndsHarness) -> None:
    tokens, keys = harness.stored(4)
    harness.fill_end(keys, 4)
    every = harness.begin_ends("a", tokens)
    harness.news()
    first = harness.waiting()
    assert first == [every[4 + 3 * ENDS + 1], every[4 + 3 * ENDS]]
    harness.loader.set_load_from("a", None)
    assert harness.waiting() == []
    harness.loader.set_load_from("a", 0)
    assert harness.waiting() == first


def test_loader_waiting_prompt_reads_an_end_only_if_it_leaves_a_quarter_of_the_buffers(
    harness: EndsHarness,
) -> None:
    """8 buffers: an end of 2 and a quarter of 2 are free as long as 3 are not in use."""
    names = {"a": tokens_of(0, 1), "b": tokens_of(1, 1)}
    others = [harness.pool.take() for _ in range(4)]
    for name, tokens in names.items():
        harness.fill_end(harness.fill(tokens), 1)
        harness.begin_ends(name, tokens)
    harness.news()
    assert harness.waiting() == []
    harness.loader.order(["b", "a"], may_use_all_buffers="b")
    assert harness.waiting() == [*end_keys(keys_of(names["b"])[0], ENDS)][::-1]
    for buffer in others:
        assert buffer is not None
        harness.pool.give(buffer)


def test_loader_end_is_reported_to_the_store_before_its_blocks(harness: EndsHarness) -> None:
    touched: list[tuple[str, list[BlockKey]]] = []

    class Listening(WrapperStore):
        async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
            touched.append((facts.id, list(keys)))

    tokens, keys = harness.stored(4)
    harness.fill_end(keys, 3)
    harness.loader = harness.new_loader(Listening(harness.recorded))
    harness.begin_ends("a", tokens, load=False)
    harness.news()
    assert touched == [("a end", end_keys(keys[2], ENDS)), ("a", keys)]
