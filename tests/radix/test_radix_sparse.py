"""DeepSeek V3.2 and MiniMax M3: SGLang's tree and paged allocator, over pools with an index.

The index of a token is part of its block. A prefix may end at every block, and needs no end state.
"""

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

import torch
from hybrid_machine import run_machine
from hybrid_trees import SPARSE, SparseTree, digests_of
from trees import CORES

PAGE, BLOCK = 64, 128
PROMPT = [*range(1000, 1454)]  # three blocks, a page, and six tokens
KINDS = pytest.mark.parametrize("kind", SPARSE)
BOTH_CORES = pytest.mark.parametrize("core", CORES)


def stored(kind: str, core: str = "python") -> SparseTree:
    """An empty tree, and a store with the blocks of the prompt."""
    side = SparseTree(SPARSE[kind], core)
    assert side.block == BLOCK
    req = side.start(PROMPT, 2 * BLOCK)
    assert side.compute(req, len(PROMPT))
    assert side.save(req, 3 * BLOCK)
    side.release(req)
    side.check_slots()
    side.empty()
    side.scramble()
    return side


@BOTH_CORES
@KINDS
@pytest.mark.parametrize("front", [None, 0, PAGE, BLOCK, 3 * PAGE])
def test_radix_sparse_blocks_attached_to_a_request_serve_the_rest(
    kind: str, core: str, front: int | None
) -> None:
    """To one that waits, and to one that runs: at the start, at a boundary of blocks, and inside a
    block."""
    side = stored(kind, core)
    other = side.start(range(5000, 5100), 100)  # takes the first pages
    req = side.restore(PROMPT, 3 * BLOCK, front)
    side.finish(req)  # it reads what was loaded, and finds it right
    side.release(other)
    side.check_slots()
    assert side.arrive(PROMPT).prefix_len == 3 * BLOCK + PAGE


@pytest.mark.parametrize("kind", [kind for kind in SPARSE if kind.startswith("dsa")])
def test_radix_sparse_index_of_a_token_is_where_sglang_moves_it(kind: str) -> None:
    """Inside of a page. The model of these tests writes and reads it there."""
    side = SparseTree(SPARSE[kind])
    digests, taken, given = digests_of(PROMPT), torch.arange(454) + PAGE, torch.arange(454) + 640
    side.write("full", digests, taken)
    wrong = side.wrong("full", digests, given)
    side.full_pool.index_key_cache.move(given.flip(0), taken.flip(0))
    moved = [name for name in wrong if "index" in name]
    assert len(moved) == 2 * sum(map(bool, map(len, side.full_pool.index_k_with_scale_buffer)))
    assert side.wrong("full", digests, given) == [name for name in wrong if "index" not in name]


def rows_in(side: SparseTree, block: bytearray, part: str) -> Iterator[np.ndarray]:
    """The rows of a stored block's tokens, uint8 `[tokens, row]`, in each plane of this name; of
    an index in pages, the keys."""
    planes = iter(side.kv.layout.planes)
    for group in side.kv.layout.groups:
        for name, _ in group.parts * group.layers:
            plane = next(planes)
            size = plane.rows * plane.row_bytes
            rows = np.frombuffer(block, np.uint8, size, plane.start).reshape(plane.rows, -1)
            if name == part and plane.row_tokens > 1:
                yield from (page[: PAGE * 128].reshape(PAGE, -1) for page in rows)
            elif name == part:
                yield rows


@pytest.mark.parametrize("front", [None, PAGE])
@pytest.mark.parametrize(
    ("kind", "part", "noticed"),
    [
        ("dsa", "index", "index keys of layer 0"),
        ("dsa", "kv", "KV of layer 0"),
        ("dsa, a layer without an index", "index", "index keys of layer 0"),
        ("minimax", "index_k", "index K of layer 1"),
        ("minimax", "index_v", "index V of layer 1"),
        ("minimax", "v", "V of layer 0"),
    ],
)
def test_radix_sparse_row_of_another_token_is_noticed(
    kind: str, part: str, noticed: str, front: int | None
) -> None:
    side = stored(kind)
    key = tuple(PROMPT[: 2 * BLOCK])
    block = bytearray(side.store.blocks[key])
    rows = next(rows_in(side, block, part))
    rows[[3, 40]] = rows[[40, 3]]
    side.store.blocks[key] = bytes(block)
    req = side.restore(PROMPT, 3 * BLOCK, front)
    with pytest.raises(AssertionError, match=rf"\['{noticed}'\]"):
        side.compute(req, len(PROMPT))


@BOTH_CORES
@KINDS
def test_radix_sparse_random_calls_keep_kv_and_slot_counts_right(kind: str, core: str) -> None:
    run_machine(lambda: SparseTree(SPARSE[kind], core))
