"""Models that embed the tokens before a token: a loaded prefix is a prefix hit, and SGLang reads
the tokens before a step from the request.

All is SGLang's own but the kernel that writes the table, which runs on GPUs only.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

from hybrid_trees import BLOCK, HybridTree, config_of
from sglang.srt.layers.engram import EngramHasher, EngramLayout, build_compressed_token_map
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner_components import ngram_embedding_manager
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trees import CORES

from sglang_cake.core.keys import Span

TOKENS = [11 * at % 250 for at in range(1, 5 * BLOCK + 4)]
STOP = 3 * BLOCK
STALE = 255  # a token of requests before
N = 3


def write_table(
    ne_token_table: torch.Tensor,
    tokens: torch.Tensor,
    row_indices: torch.Tensor,
    column_starts: torch.Tensor,
    req_lens: torch.Tensor,
    ignore_tokens: object,
) -> None:
    """The kernel `update_token_table`."""
    first = 0
    places = zip(row_indices.tolist(), column_starts.tolist(), req_lens.tolist(), strict=True)
    for row, column, count in places:
        ne_token_table[row, column : column + count] = tokens[first : first + count]
        first += count


class Ngrams:
    """The n-grams of the requests of a tree: the table of LongCat-Flash-Lite, and the hashes of
    DeepSeek V4.1. At first, all rows have tokens of other requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        monkeypatch.setattr(ngram_embedding_manager, "update_token_table", write_table)
        words = WordLevel({f"w{token}": token for token in range(256)}, unk_token="w0")
        tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Tokenizer(words)
        )
        primes = (((101, 103), (107, 109)),)  # of a layer: for pairs, and for triples
        layout = EngramLayout(N, (1,), (420,), primes, n_heads=2, head_dim=32)
        hashed = build_compressed_token_map(tokenizer)[1]
        self.hasher = EngramHasher(layout, tokenizer, 0, hashed)
        self.hasher.init_history(rows, "cpu")
        assert self.hasher.history is not None
        self.hasher.history.fill_(STALE)
        self.manager = ngram_embedding_manager.NgramEmbeddingManager(
            enabled=True,
            table=torch.full((rows, 512), STALE, dtype=torch.int32),
            n=N,
            engram_hasher=self.hasher,
        )

    def prepared(self, req: Any, stop: int, mode: ForwardMode = ForwardMode.EXTEND) -> Any:
        """The batch of the request's next step, up to `stop`, as SGLang prepares it."""
        batch = SimpleNamespace(
            forward_mode=mode,
            reqs=[req],
            prefix_lens=[req.prefix_len],
            extend_lens=[stop - req.prefix_len],
            req_pool_indices=torch.tensor([req.kv.req_pool_idx]),
            engram_history=None,
        )
        self.manager.prepare_for_forward(batch, chunked_req=None)
        return batch

    def hashes(self, batch: Any, ids: Sequence[int]) -> list[Any]:
        """Of the tokens of a step, as its forward hashes them."""
        step: Any = SimpleNamespace(
            forward_mode=batch.forward_mode,
            req_pool_indices=batch.req_pool_indices,
            positions=torch.arange(batch.prefix_lens[0], batch.prefix_lens[0] + len(ids)),
            extend_seq_lens=torch.tensor([len(ids)]),
            extend_seq_lens_cpu=[len(ids)],
            extend_start_loc=torch.tensor([0]),
            engram_history=batch.engram_history,
            out_cache_loc=torch.ones(len(ids), dtype=torch.int64),
        )
        found: list[Any] = self.hasher(torch.tensor(ids), step).tolist()
        return found

    def table(self, req: Any, start: int, stop: int) -> list[int]:
        """What the table has for the n-grams of these tokens."""
        assert self.manager.table is not None
        row: list[int] = self.manager.table[req.kv.req_pool_idx].tolist()
        return row[max(0, start - N + 1) : stop]


@pytest.fixture(params=[(core, page) for core in CORES for page in (1, 4)], ids=str)
def tree(request: pytest.FixtureRequest) -> HybridTree:
    core, page = request.param
    made = HybridTree(config_of(page=page), core)
    made.tree.ends = None
    return made


@pytest.fixture
def grams(tree: HybridTree, monkeypatch: pytest.MonkeyPatch) -> Ngrams:
    return Ngrams(monkeypatch, len(tree.requests.req_to_token))


def whole(tree: HybridTree, grams: Ngrams) -> list[Any]:
    """The hashes of the prompt and of one more token, computed in one step."""
    req = tree.start([*TOKENS, 7])
    found = grams.hashes(grams.prepared(req, len(TOKENS) + 1), [*TOKENS, 7])
    tree.release(req)
    return found


def step(tree: HybridTree, grams: Ngrams, req: Any, stop: int) -> list[Any]:
    """Compute the request up to `stop`, on the right n-grams; their hashes."""
    start = req.prefix_len
    found = grams.hashes(grams.prepared(req, stop), TOKENS[start:stop])
    assert grams.table(req, start, stop) == TOKENS[max(0, start - N + 1) : stop]
    assert tree.compute(req, stop)
    return found


def decode(grams: Ngrams, req: Any) -> list[Any]:
    """The hashes of the token that follows the prompt."""
    batch = grams.prepared(req, req.prefix_len + 1, ForwardMode.DECODE)
    assert grams.table(req, req.prefix_len, req.prefix_len) == TOKENS[-N + 1 :]
    return grams.hashes(batch, [7])


@pytest.mark.parametrize("chunk", [1, 2, 2 * BLOCK + 3])
def test_radix_ngrams_loaded_prefix_of_a_waiting_request_gives_the_ngrams_of_computing(
    tree: HybridTree, grams: Ngrams, chunk: int
) -> None:
    """With a last step of one token, all but one token of its n-gram are loaded."""
    expected = whole(tree, grams)
    req = tree.arrive(TOKENS[: STOP + chunk])
    tree.tree.attach_waiting(req, tree.landed(TOKENS, Span(0, STOP)), STOP)
    assert tree.admit(req)
    assert req.prefix_len == STOP
    assert step(tree, grams, req, STOP + chunk) == expected[STOP : STOP + chunk]
    if STOP + chunk == len(TOKENS):
        assert decode(grams, req) == expected[-1:]


@pytest.mark.parametrize("first", [BLOCK, 2 * BLOCK])
def test_radix_ngrams_loaded_part_between_two_chunks_gives_the_ngrams_of_computing(
    tree: HybridTree, grams: Ngrams, first: int
) -> None:
    expected = whole(tree, grams)
    req = tree.start(TOKENS)
    found = step(tree, grams, req, first)
    assert found == expected[:first]
    tree.tree.attach_running(req, tree.landed(TOKENS, Span(first, STOP)), STOP)
    assert step(tree, grams, req, STOP + BLOCK) == expected[STOP : STOP + BLOCK]
    assert step(tree, grams, req, len(TOKENS)) == expected[STOP + BLOCK : len(TOKENS)]
    assert decode(grams, req) == expected[-1:]


@pytest.mark.parametrize("mode", ["MIXED", "PREBUILT", "TARGET_VERIFY"])
def test_radix_ngrams_table_is_stale_in_the_steps_that_are_refused(
    tree: HybridTree, grams: Ngrams, mode: str
) -> None:
    """If this fails, a later SGLang fills the table in these steps too."""
    req = tree.start(TOKENS)
    grams.prepared(req, BLOCK, ForwardMode[mode])
    assert set(grams.table(req, 0, BLOCK)) == {STALE}
