"""Servers with different numbers of ranks and one store."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from live import BLOCK, TOLERANCE, Live, Start, assert_same, description_of, distance, falsify

Make = Callable[[int], list[int]]
BLOCKS = 12
GROUPS = 2


def flags(ranks: int) -> tuple[str, ...]:
    return (
        *("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "load"),
        *("--cake-head-groups", str(GROUPS), "--tp", str(ranks)),
    )


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank needs a core")
def test_head_groups_one_rank_loads_what_two_stored_and_the_other_way_round(
    start: Start, models: dict[str, Path], folder: Path, plain: Live, prompt: Make
) -> None:
    store = folder / "store-head-groups"
    of_two, of_one = prompt(BLOCKS * BLOCK + 5), prompt(BLOCKS * BLOCK + 7)
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with (
        start(models["first"], flags(2), store=store, env=env) as two,
        start(models["first"], flags(1), store=store) as one,
    ):
        for live in (two, one):
            live.store.ranks = GROUPS  # namespaces
        assert_same(two.ask(of_two), plain.reference(of_two))
        files = two.store.until_stored(of_two)
        assert len(files) == GROUPS * BLOCKS
        answer = one.ask(of_two)
        assert answer.loaded == BLOCKS * BLOCK
        assert_same(answer, plain.reference(of_two))
        assert_same(one.ask(of_one), plain.reference(of_one))
        one.store.until_stored(of_one)
        assert len(one.store.namespaces()) == GROUPS
        answer = two.ask(of_one)
        assert answer.loaded == BLOCKS * BLOCK
        assert_same(answer, plain.reference(of_one))
        for file in files:  # the control: wrong KV of one group of heads
            if description_of(file)["head_group"] == "1":
                falsify(file)
        lie = one.ask_flushed(of_two)
        assert lie.loaded == BLOCKS * BLOCK
        assert distance(lie.logprobs, plain.reference(of_two).logprobs) > 20 * TOLERANCE
