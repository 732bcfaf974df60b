"""End states of DeepSeek V4: its own pool, behind SGLang's tree and allocator.

The model writes a page of 256 tokens when it has its last token: all compressed KV of the page, and
the page of the window. Sums of the last tokens are where SGLang's own addressing says.
"""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

import torch
from hybrid_trees import SWA, HybridTree, config_of, stamp
from kv_pools import deepseek_v4, rows_of
from trees import CORES

PAGE = 256
SUMMED = 8  # tokens whose sums a page keeps
PROMPT = [*range(1000, 1600)]  # two pages, and a part of one


class CompressedTree(HybridTree):
    """What belongs to a page is written and checked at the last token of it."""

    def __init__(self, core: str = "python") -> None:
        cfg = config_of(SWA, page=PAGE, slots=8 * PAGE, window=PAGE // 2)
        super().__init__(cfg, core, block=PAGE, make_pool=lambda **_: deepseek_v4(8 * PAGE))

    def _rows(self, pool: Any, kind: str, slot: int) -> list[torch.Tensor]:
        """The memory that belongs to a page, of which `slot` is the last one."""
        page = slot // PAGE
        if kind == "full":
            return [rows[page] for rows, _ in rows_of(pool)]
        whole = self.allocator.get_kvcache()
        slots = torch.arange(slot - SUMMED + 1, slot + 1)
        found = [rows[page] for rows in whole.swa_kv_pool.kv_buffer]
        for each in (*whole.compress_state_pools, *whole.indexer_compress_state_pools):
            if each is not None and each.ratio == 4:
                at = each.translate_from_swa_loc_to_state_loc(slots)
                found += [each.kv_score_buffer.kv_score[i] for i in at.tolist()]
        return found

    def _stamps(
        self, pool: Any, kind: str, tokens: Sequence[int], at: int, slot: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if (at + 1) % PAGE:
            return []
        assert slot % PAGE == PAGE - 1
        rows = [row.view(torch.uint8).view(-1) for row in self._rows(pool, kind, slot)]
        page = tokens[: at + 1]
        return [(row, stamp(page, f"{kind} {i}", len(row))) for i, row in enumerate(rows)]

    def write_rows(self, pool: Any, kind: str, tokens: Sequence[int], at: int, slot: int) -> None:
        for row, data in self._stamps(pool, kind, tokens, at, slot):
            row[:] = data

    def has_rows(self, pool: Any, kind: str, tokens: Sequence[int], at: int, slot: int) -> bool:
        stamps = self._stamps(pool, kind, tokens, at, slot)
        return slot > 0 and all(torch.equal(row, data) for row, data in stamps)

    def scramble(self) -> None:
        """Other bytes everywhere, as another server has them."""
        whole = self.allocator.get_kvcache()
        states = (*whole.compress_state_pools, *whole.indexer_compress_state_pools)
        for rows in (
            *(rows for rows, _ in rows_of(whole)),
            *whole.swa_kv_pool.kv_buffer,
            *(each.kv_score_buffer.kv_score for each in states if each is not None),
        ):
            rows.view(torch.uint8).fill_(0x5A)


def stored(core: str = "python") -> CompressedTree:
    """An empty tree, and a store with the end of the prompt's second page."""
    side = CompressedTree(core)
    req = side.arrive(PROMPT)
    assert side.admit(req)
    assert side.compute(req, 2 * PAGE)
    assert side.save(req, 2 * PAGE)
    assert side.compute(req, len(PROMPT))
    side.release(req)
    side.check_books()
    side.tree.reset()
    side.allocator.clear()
    side.requests.clear()
    side.scramble()
    return side


@pytest.mark.parametrize("core", CORES)
def test_radix_compressed_end_attached_to_waiting_request_serves_the_rest(core: str) -> None:
    side = stored(core)
    other = side.arrive(range(5000, 5300))  # takes the first pages
    assert side.admit(other)
    assert side.compute(other, 300)
    req = side.arrive(PROMPT)
    assert side.load(req, 2 * PAGE, running=False)
    assert req.prefix_len == 2 * PAGE
    assert side.admit(req)
    side.check_books()
    assert side.compute(req, len(PROMPT))  # it reads what was loaded, and finds it right
    side.release(req)
    side.release(other)
    side.check_books()
    assert side.arrive(PROMPT).prefix_len == 2 * PAGE


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("front", [0, PAGE])
def test_radix_compressed_end_attached_to_running_request_serves_the_rest(
    core: str, front: int
) -> None:
    side = stored(core)
    req = side.arrive(PROMPT)
    assert side.admit(req)
    assert not front or side.compute(req, front)
    assert side.load(req, 2 * PAGE, running=True)
    assert req.prefix_len == 2 * PAGE
    side.check_books()
    assert side.compute(req, len(PROMPT))
    side.release(req)
    side.check_books()


def test_radix_compressed_end_has_the_bytes_of_one_page() -> None:
    side = stored()
    whole = side.allocator.get_kvcache()
    window = sum(rows[0].nbytes for rows in whole.swa_kv_pool.kv_buffer)
    sums = sum(
        each.kv_score_buffer.kv_score[: each.ring_size].nbytes
        for each in (*whole.compress_state_pools, *whole.indexer_compress_state_pools)
        if each is not None and each.ratio == 4
    )
    blocks = side.store.ends[tuple(PROMPT[: 2 * PAGE])]
    raw = b"".join(blocks)
    assert len(blocks) == side.ends.count == -(-(window + sums) // len(blocks[0])) > 1
    assert not any(raw[window + sums :])
    assert raw[window : window + sums].count(0) < sums // 8


@pytest.mark.parametrize("index", [0, -1])  # of the window; of sums
def test_radix_compressed_wrong_end_is_noticed(index: int) -> None:
    side = stored()
    key = tuple(PROMPT[: 2 * PAGE])
    blocks = side.store.ends[key]
    blocks[index] = bytes(255 - byte for byte in blocks[index])
    req = side.arrive(PROMPT)
    assert side.load(req, 2 * PAGE, running=False)
    assert side.admit(req)
    with pytest.raises(AssertionError, match="window"):
        side.compute(req, len(PROMPT))
