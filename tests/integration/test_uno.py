"""UNO: SGLang's worker makes drafts with an adapter, in the slots of the model's own KV."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kv_pools import since_0_5_23

WIDTH = 4  # a token that is not computed yet, and three drafts
START = 6  # tokens with KV before the step
VOCAB = 64


class Model:
    """It predicts the number of the next position. Drafts are wrong from the given one on.

    Attributes:
        rows: for each slot, who wrote it last: None: the model, else the adapter.
        writers: all of them.
    """

    def __init__(self, right: int) -> None:
        self.right = right
        self.rows: dict[int, str | None] = {}
        self.writers: set[str | None] = set()
        self._adapters: list[str | None] = []

    def reset_lora_batch(self) -> None:
        self._adapters = []

    def prepare_lora_token_segments(
        self, lora_ids: list[str | None], segment_lens: list[int]
    ) -> None:
        pairs = zip(lora_ids, segment_lens, strict=True)
        self._adapters = [adapter for adapter, rows in pairs for _ in range(rows)]

    def forward_batch_generation(self, *, forward_batch: Any, **_: Any) -> Any:
        slots = forward_batch.out_cache_loc.tolist()
        adapters = self._adapters or [None] * len(slots)
        self.rows |= dict(zip(slots, adapters, strict=True))
        self.writers |= set(adapters)
        found = forward_batch.positions + 1
        if self._adapters:
            found = torch.where(torch.arange(len(found)) > self.right, 0, found)
        logits = torch.nn.functional.one_hot(found, VOCAB).float()
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits),
            can_run_cuda_graph=False,
            routed_experts_output=None,
            indexer_topk_output=None,
        )


@pytest.fixture
def uno(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's module of the worker. It imports flashinfer for sampling, which a CPU lacks."""
    importlib.import_module("sglang.srt.speculative.eagle_worker_common")  # asks for flashinfer
    known = set(sys.modules)
    flashinfer = ModuleType("flashinfer")
    vars(flashinfer)["top_k"] = None
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    yield importlib.import_module("sglang.srt.speculative.uno_worker_v2")
    for name in set(sys.modules) - known:
        if "uno" in name:
            del sys.modules[name]


@since_0_5_23
@pytest.mark.parametrize("right", range(WIDTH))
def test_uno_accepted_tokens_have_the_kv_of_the_model_alone(uno: Any, right: int) -> None:
    model = Model(right)
    slots = torch.arange(100, 100 + START + WIDTH + 1)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=slots[None]),
        model_config=SimpleNamespace(vocab_size=VOCAB),
        kv_index_translator=SimpleNamespace(bind_own_plan=lambda batch: None),
        decode_cuda_graph_runner=None,
    )
    worker = uno.UnoWorkerV2.__new__(uno.UnoWorkerV2)
    vars(worker).update(
        _target_worker=model,
        model_runner=runner,
        lora_manager=model,
        uno_lora_id="drafts",
        device="cpu",
        tree_mode=False,
        forward_width=WIDTH,
        num_speculative_proposals=WIDTH - 1,
        tail_width=WIDTH + 1,
        _tail_offsets=torch.arange(WIDTH + 1),
    )
    lengths = torch.tensor([START])
    batch = SimpleNamespace(
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        req_pool_indices=torch.tensor([0]),
        sampling_info=SimpleNamespace(is_all_greedy=True),
        spec_info=uno.UnoDraftInput(torch.tensor([START]), lengths, WIDTH),
    )
    result = worker._forward_decode(batch, None)
    stop = int(result.new_seq_lens)
    assert stop == START + 2 + right
    assert [model.rows[slot] for slot in slots[START:stop].tolist()] == [None] * (2 + right)
    assert model.writers == {None, "drafts"}
