"""A tree for draft models, whose key of a token is the token and the next one."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

from hybrid_trees import BLOCK, HybridTree, config_of
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from trees import CORES

from sglang_cake.core.keys import Span

TOKENS = list(range(100, 100 + 5 * BLOCK + 3))
STOP = 3 * BLOCK


@pytest.fixture(params=[(core, page) for core in CORES for page in (1, 4)], ids=str)
def tree(request: pytest.FixtureRequest) -> HybridTree:
    core, page = request.param
    return HybridTree(replace(config_of(page=page), is_eagle=True), core)


def finish(tree: HybridTree, req: Any) -> None:
    """Compute the rest of the prompt on right KV, and return all slots."""
    tree.finish(req)
    tree.tree.evict(EvictParams(num_tokens=tree.allocator.size))
    assert tree.allocator.available_size() == tree.allocator.size


def test_radix_bigrams_blocks_of_a_waiting_request_join_whole(tree: HybridTree) -> None:
    req = tree.arrive(TOKENS)
    tree.tree.attach_waiting(req, tree.landed(TOKENS, Span(0, STOP)), STOP)
    assert req.prefix_len == STOP
    assert tree.admit(req)
    tree.check_slots()
    finish(tree, req)


def test_radix_bigrams_blocks_of_a_running_request_join_its_row(tree: HybridTree) -> None:
    req = tree.start(TOKENS, BLOCK)
    tree.tree.attach_running(req, tree.landed(TOKENS, Span(BLOCK, STOP)), STOP)
    assert req.prefix_len == STOP
    tree.check_slots()
    finish(tree, req)


@pytest.mark.parametrize("limit", [0, BLOCK, 4 * BLOCK, len(TOKENS) - 2])
def test_radix_bigrams_matched_tokens_reach_the_limit(tree: HybridTree, limit: int) -> None:
    req = tree.arrive(TOKENS)
    assert tree.tree.matched_tokens(req, req.origin_input_ids, limit) == 0
    assert tree.admit(req)
    assert tree.compute(req, len(TOKENS))
    page = tree.tree.page_size
    matched = tree.tree.matched_tokens(req, req.origin_input_ids, limit)
    assert matched == limit // page * page
    tree.release(req)


def test_radix_bigrams_prompt_that_goes_on_otherwise_computes_the_last_token_again(
    tree: HybridTree,
) -> None:
    """That token has other KV in the draft model."""
    req = tree.start(TOKENS, len(TOKENS))
    tree.release(req)
    other = tree.arrive([*TOKENS[:STOP], 1, 2, 3])
    assert other.prefix_len == STOP - tree.tree.page_size
