"""Patch 0004: layers of a sliding-window pool are read by the slots of that pool."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_copy import Copies, cut_out  # noqa: E402

BACKEND = "sglang/srt/layers/attention/torch_native_backend.py"
METHODS = {"init_forward_metadata", "_req_to_token_of"}
FULL, WINDOW = SimpleNamespace(layer_id=0), SimpleNamespace(layer_id=1)
TABLE = torch.tensor([[9, 9, 9], [3, 5, 6], [7, 0, 0]], dtype=torch.int32)
WINDOW_SLOTS = torch.arange(10).flip(0)  # of each slot of the full pool


@pytest.fixture
def backend(copies: Copies) -> SimpleNamespace:
    names: dict[str, Any] = {"torch": torch}
    methods = cut_out(copies.repaired[BACKEND], METHODS, names)
    pool = SimpleNamespace(
        layers_mapping={0: (0, False), 1: (0, True)},
        translate_loc_from_full_to_swa=lambda slots: WINDOW_SLOTS[slots],
    )
    backend = SimpleNamespace(
        device="cpu",
        use_sliding_window_kv_pool=True,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=TABLE),
    )
    for name, method in vars(methods).items():
        setattr(backend, name, method.__get__(backend))
    return backend


def batch(rows: list[int], lengths: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        seq_lens=torch.tensor(lengths, dtype=torch.int64),
        out_cache_loc=torch.arange(len(rows)),
    )


def slots(backend: SimpleNamespace, layer: Any, running: SimpleNamespace) -> list[list[int]]:
    """The slots that the backend reads, request by request."""
    table, rows = backend._req_to_token_of(layer, running)
    lengths = running.seq_lens.tolist()
    return [table[row, :n].tolist() for row, n in zip(rows.tolist(), lengths, strict=True)]


def test_patch_window_layer_reads_translated_slots_of_its_requests(
    backend: SimpleNamespace,
) -> None:
    running = batch([2, 1], [1, 3])
    backend.init_forward_metadata(running)
    assert slots(backend, WINDOW, running) == [[2], [6, 4, 3]]


def test_patch_full_layer_reads_the_slots_of_the_table(backend: SimpleNamespace) -> None:
    running = batch([2, 1], [1, 3])
    backend.init_forward_metadata(running)
    assert slots(backend, FULL, running) == [[7], [3, 5, 6]]


def test_patch_model_without_window_pool_reads_the_slots_of_the_table(
    backend: SimpleNamespace,
) -> None:
    backend.use_sliding_window_kv_pool = False
    running = batch([1], [2])
    backend.init_forward_metadata(running)
    assert slots(backend, WINDOW, running) == [[3, 5]]


def test_patch_batch_without_requests_has_an_empty_table(backend: SimpleNamespace) -> None:
    running = batch([], [])
    backend.init_forward_metadata(running)
    assert slots(backend, WINDOW, running) == []
