"""End states of DeepSeek V4 and V4.1: their own pools, behind SGLang's tree and allocator."""

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

from hybrid_machine import run_machine
from hybrid_trees import COMPRESSED, CompressedTree
from trees import CORES

PAGE = CompressedTree.PAGE
PROMPT = [*range(1000, 1680)]  # two pages, and a part of one
both = pytest.mark.parametrize(("core", "kind"), [(c, k) for c in CORES for k in COMPRESSED])


def stored(core: str = "python", kind: str = "v4") -> CompressedTree:
    """An empty tree, and a store with the end of the prompt's second page."""
    side = CompressedTree(core, kind=kind)
    req = side.start(PROMPT, 2 * PAGE)
    assert side.save(req, 2 * PAGE)
    side.finish(req)
    side.empty()
    side.scramble()
    return side


@both
@pytest.mark.parametrize("front", [None, 0, PAGE])
def test_radix_compressed_end_attached_to_a_request_serves_the_rest(
    core: str, kind: str, front: int | None
) -> None:
    """To one that waits, and to one that runs."""
    side = stored(core, kind)
    other = side.start(range(5000, 5300), 300)  # takes the first pages
    req = side.restore(PROMPT, 2 * PAGE, front)
    side.finish(req)  # it reads what was loaded, and finds it right
    side.release(other)
    side.check_slots()
    assert side.arrive(PROMPT).prefix_len == 2 * PAGE


@pytest.mark.parametrize("kind", COMPRESSED)
def test_radix_compressed_end_has_the_bytes_of_one_page(kind: str) -> None:
    side = stored(kind=kind)
    window = sum(rows[0].nbytes for rows in side.windows)
    sums = sum(each.kv_score_buffer.kv_score[: each.ring_size].nbytes for each in side.sums)
    blocks = side.store.ends[tuple(PROMPT[: 2 * PAGE])]
    raw = b"".join(blocks)
    assert len(blocks) == side.ends.count == -(-(window + sums) // len(blocks[0])) > 1
    assert not any(raw[window + sums :])
    assert raw[: window + sums].count(0) < (window + sums) // 8


@pytest.mark.parametrize("kind", COMPRESSED)
def test_radix_compressed_sums_of_a_request_are_empty_where_a_block_ends(kind: str) -> None:
    """As SGLang says itself, when a prefill server sends them: they are no part of an end."""
    pool = stored(kind=kind).allocator.get_kvcache()
    own = [each for each in pool.compress_state_pools if each is not None and each.request_scoped]
    assert own
    for each in own:
        assert len(each.transfer_indices(1, PAGE - 1)) == 1
        assert not len(each.transfer_indices(1, PAGE))
    assert any(each.online for each in own) == (kind == "v4, sums of one row")


@pytest.mark.parametrize("index", [0, -1])  # of the window; of sums
def test_radix_compressed_wrong_end_is_noticed(index: int) -> None:
    side = stored()
    key = tuple(PROMPT[: 2 * PAGE])
    blocks = side.store.ends[key]
    blocks[index] = bytes(255 - byte for byte in blocks[index])
    req = side.restore(PROMPT, 2 * PAGE)
    with pytest.raises(AssertionError, match="swa"):
        side.compute(req, len(PROMPT))


def test_radix_compressed_prompt_computes_the_last_window_of_a_replay() -> None:
    """The control: what `CompressedTree` asserts, for a load that ends too near to the end."""
    side = stored(kind="v4.1, replay")
    for behind, allowed in ((127, False), (128, True)):
        req = side.arrive(PROMPT[: 2 * PAGE + behind])
        assert (side.stored_end(req.full_untruncated_fill_ids, 0) == 2 * PAGE) == allowed
        slots = side.slots(2 * PAGE)
        side.tree.attach_waiting(req, slots, 2 * PAGE)
        assert (req.prefix_len == 2 * PAGE) == allowed, "SGLang's own match"
        side.empty()


def test_radix_compressed_load_for_a_retracted_request_frees_its_rows_before_the_window() -> None:
    """The tree takes none of these rows: it stops where others' windows have gone. The loaded end
    is after the last one that an answer of this length would have."""
    side = CompressedTree(kind="v4.1, replay")
    tokens = [*range(1000, 1000 + 4 * PAGE + side.tail_tokens)]
    first = side.start([*tokens, 1], 4 * PAGE)
    assert side.save(first, 4 * PAGE)
    side.release(first, checkpoint=False)
    side.empty()
    side.scramble()
    req = side.arrive(tokens)
    req.origin_input_ids, req.output_ids = req.origin_input_ids[:-20], req.origin_input_ids[-20:]
    assert side.admit(req)
    req.swa_branching_seqlen = PAGE  # as SGLang's match finds it
    assert side.compute(req, 3 * PAGE)
    assert req.kv.cache_protected_len == PAGE
    assert side.load(req, 4 * PAGE, running=True)
    side.check_slots()
    side.finish(req)


@pytest.mark.parametrize(
    ("core", "kind"), [*((core, "v4") for core in CORES), ("python", "v4.1, replay")]
)
def test_radix_compressed_random_calls_keep_kv_and_slot_counts_right(core: str, kind: str) -> None:
    run_machine(lambda: CompressedTree(core, kind=kind))
