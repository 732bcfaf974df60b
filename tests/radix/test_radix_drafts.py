"""A draft layer beside recurrent states: its row of a token depends on the next one, and the tree's
keys do not have that one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

import torch
from hybrid_trees import BLOCK, END_POOLS, KINDS, HybridTree, Place, digests_of
from kv_pools import as_bytes, mha, rows_of
from trees import CORES

from sglang_cake.core.keys import Span
from sglang_cake.integration.memory.kv_pool import DeviceKV

PROMPT = [*range(100, 150)]  # six blocks and two tokens
STOP = 6 * BLOCK
LONG_WINDOW = 20  # 8 more than the window of the model


class DraftTree(HybridTree):
    """A tree of recurrent states, and a pool of a draft layer with the slots of the target."""

    def __init__(self, kind: str, core: str) -> None:
        super().__init__(KINDS[kind], core)
        self.draft = mha(self.cfg.kv_size, page=self.cfg.page_size, layers=1)
        apart = [getattr(self.full_pool, name, None) for name in END_POOLS]
        self.kv = DeviceKV(
            self.full_pool,
            block_tokens=BLOCK,
            apart=[each for each in apart if each is not None],
            drafts=[self.draft],
        )
        self.step: tuple[Sequence[int], Span] = ((), Span(0, 0))

    def places(self, kind: str, slots: torch.Tensor) -> Iterator[Place]:
        if kind != "draft":
            yield from super().places(kind, slots)
            return
        for number, (buffer, _) in enumerate(rows_of(self.draft)):
            yield f"draft, plane {number}", as_bytes(buffer), (slots,)

    def rows_right(self, req: Any) -> list[bool]:
        """Of each token before the request's front, whether the draft layer has its row."""
        found = []
        following = digests_of([*req.full_untruncated_fill_ids, 0])[1:]
        row = self.requests.req_to_token[req.kv.req_pool_idx, : req.prefix_len].to(torch.int64)
        for token, slot in enumerate(row):
            found.append(not self.wrong("draft", following[token : token + 1], slot[None]))
        return found

    def compute(self, req: Any, stop: int) -> bool:
        self.step = (list(req.full_untruncated_fill_ids), Span(req.prefix_len, stop))
        return super().compute(req, stop)

    def write(self, kind: str, digests: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(kind, digests, slots)
        tokens, span = self.step
        super().write("draft", digests_of([*tokens, 0])[span.start + 1 : span.stop + 1], slots)

    def scramble(self) -> None:
        super().scramble()
        for _, rows, _ in self.places("draft", torch.arange(1)):
            rows.fill_(0x5A)


@pytest.fixture(params=[(k, c) for k in ("state", "state-extra-buffer") for c in CORES], ids=str)
def side(request: pytest.FixtureRequest) -> DraftTree:
    """The prompt is stored, and memory has other bytes."""
    made = DraftTree(*request.param)
    req = made.start(PROMPT, STOP)
    assert made.save(req, STOP)
    assert made.compute(req, len(PROMPT))
    assert all(made.rows_right(req))
    made.release(req)
    made.empty()
    made.scramble()
    return made


@pytest.mark.parametrize("front", [None, BLOCK])
def test_radix_drafts_rows_of_a_loaded_prompt_are_those_of_computing(
    side: DraftTree, front: int | None
) -> None:
    req = side.restore(PROMPT, STOP, front)
    assert side.compute(req, len(PROMPT))
    assert all(side.rows_right(req))
    side.check_slots()
    side.release(req)
    side.check_slots()


def test_radix_drafts_rows_that_are_missing_in_a_block_are_noticed(side: DraftTree) -> None:
    """The control."""
    drafts = sum(rows[0].nbytes for rows, _ in rows_of(side.draft)) * BLOCK
    key = tuple(PROMPT[: 2 * BLOCK])
    side.store.blocks[key] = side.store.blocks[key][:-drafts] + bytes(drafts)
    req = side.restore(PROMPT, STOP)
    assert side.compute(req, len(PROMPT))  # the target's KV is right
    right = side.rows_right(req)
    assert [token for token, yes in enumerate(right) if not yes] == [*range(BLOCK, 2 * BLOCK)]


def test_radix_drafts_where_prompts_part_one_row_is_that_of_the_first(side: DraftTree) -> None:
    """SGLang's own tree does so: a hit ends at a state, behind which nothing is computed again."""
    one, other = ([*PROMPT[:STOP], token, 1, 2] for token in (7, 8))
    for ids in (one, other):
        req = side.start(ids)
        if ids is one:
            assert side.compute(req, STOP)
        assert req.prefix_len == STOP
        assert side.compute(req, len(ids))
        wrong = [token for token, yes in enumerate(side.rows_right(req)) if not yes]
        assert wrong == ([] if ids is one else [STOP - 1])
        side.release(req)


@pytest.mark.parametrize("front", [None, BLOCK])
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("kind", ["window-bigrams", "window-bigrams-pages"])
def test_radix_drafts_window_longer_than_the_models_is_loaded(
    kind: str, core: str, front: int | None
) -> None:
    """A draft model of SGLang may read more of the windows' slots than the model itself does."""
    side = HybridTree(replace(KINDS[kind], draft_swa_window=LONG_WINDOW), core)
    assert side.ends is not None
    assert side.ends.window_tokens == LONG_WINDOW
    req = side.start(PROMPT, 5 * BLOCK + side.behind)
    assert side.save(req, 5 * BLOCK)
    side.finish(req)
    side.empty()
    side.scramble()
    req = side.restore(PROMPT, 5 * BLOCK, front)
    side.finish(req)  # the tree checks the rows that the step reads
