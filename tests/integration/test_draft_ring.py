"""DSPARK's draft model keeps its window in a ring of the request (DeepSeek V4.1 with
`--enable-encoder-swa-bounded-replay`), which has no rows for loaded tokens."""

import contextlib
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

import torch
from kv_pools import deepseek_v4, mha, windows
from sglang.kernels.ops.speculative.dspark.dspark_attn_metadata import (
    BuildDsparkSwaRingIndices,
    swa_ring_rows,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.memory.pool_planes import belongs_to_requests

SLOT, PROPOSED = 2, 4


class Request:
    """One of a scheduler's."""


class DraftRing:
    """A draft model's pool, and for each of its rows the token that wrote it. SGLang's own worker
    runs the steps, with stand-ins for the models."""

    def __init__(self) -> None:
        server = {
            "enable_encoder_swa_bounded_replay": True,
            "chunked_prefill_size": 512,
            "speculative_algorithm": "DSPARK",
            "speculative_num_draft_tokens": PROPOSED,
        }
        self.pool = deepseek_v4(
            2048, server=server, compression_ratios=[0], layer_num=1, is_draft_worker=True
        )
        self.tokens = torch.full((self.pool.num_req_slots * self.pool.swa_req_ring_size,), -1)
        self.req = Request()
        self.tree: Any = SimpleNamespace(joined=WeakSet())

    def prefill(self, start: int, stop: int, *, begins: bool = False) -> None:
        """A step of the request, which begins with it or goes on with it."""
        batch: Any = SimpleNamespace(
            reqs=[self.req],
            encoder_swa_reset=[begins],
            forward_mode=ForwardMode.EXTEND,
            prefix_lens=[start],
            seq_lens=torch.tensor([stop]),
            req_pool_indices=torch.tensor([SLOT]),
        )
        CakeRadixCache.restart_windows(self.tree, batch)
        positions = torch.arange(start, stop)

        def inject(*_: object, **__: object) -> None:
            last = positions[-self.pool.sliding_window :]
            rows = swa_ring_rows(torch.full_like(last, SLOT), last, self.pool.swa_req_ring_size)
            self.tokens[rows] = last

        hidden = SimpleNamespace(
            hidden_states=torch.ones(1), hidden_states_token_indices=torch.zeros(1)
        )
        result = SimpleNamespace(logits_output=hidden, next_token_ids=torch.zeros(1))
        worker: Any = SimpleNamespace(
            _deferred_commit=lambda: None,
            _draft_context=contextlib.nullcontext,
            _tp_sync=SimpleNamespace(sync=lambda *_: None),
            _target_hidden_projection_enabled=False,
            _kv_injector=SimpleNamespace(
                place_prefill=lambda _: SimpleNamespace(positions=positions),
                draft_model_runner=SimpleNamespace(token_to_kv_pool=self.pool),
                inject_prefill=inject,
            ),
            target_worker=SimpleNamespace(forward_batch_generation=lambda *_, **__: result),
        )
        DSparkWorkerV2._forward_prefill(worker, batch, None)

    def seen(self, tokens: int) -> list[int]:
        """The tokens that the draft model sees after so many."""
        indices, _ = BuildDsparkSwaRingIndices.torch(
            seq_lens_casual=tokens + 1 + torch.arange(PROPOSED),
            req_pool_indices_repeated=torch.full((PROPOSED,), SLOT),
            valid_from=self.pool.swa_valid_from,
            ring_size=self.pool.swa_req_ring_size,
            block_size=PROPOSED,
            swa_window=self.pool.sliding_window,
            page_index_aligned_size=64,
        )
        rows = indices[0][indices[0] >= 0].to(torch.int64)[:-PROPOSED]
        found: list[int] = self.tokens[rows].tolist()
        return found


def test_draft_ring_alone_is_no_part_of_blocks_and_end_states() -> None:
    assert belongs_to_requests(DraftRing().pool)
    paged = deepseek_v4(2048, compression_ratios=[0], layer_num=1)
    assert not any(map(belongs_to_requests, (paged, windows(64), mha(64))))


@pytest.mark.parametrize("joined", [True, False])
def test_draft_ring_after_loaded_blocks_has_rows_of_the_same_tokens_alone(joined: bool) -> None:
    """With the control: SGLang goes on with a request that has no other tokens."""
    ring = DraftRing()
    ring.prefill(0, 300, begins=True)
    assert ring.seen(300) == [*range(172, 300)]
    if joined:  # blocks up to token 512
        ring.tree.joined.add(ring.req)
    ring.prefill(512, 560)
    assert (ring.seen(560) == [*range(512, 560)]) == joined
    ring.prefill(560, 700)
    assert ring.seen(700) == [*range(572, 700)]
