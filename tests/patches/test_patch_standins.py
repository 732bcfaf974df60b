"""Patch 0002: the stand-ins do what a plain loop over the kernel's definition does."""

import ctypes
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from sglang_copy import Copies, cut_out  # noqa: E402

ROWS = 12
BACKEND = "sglang/srt/layers/attention/torch_native_backend.py"


@pytest.fixture(scope="session")
def standins(copies: Copies) -> SimpleNamespace:
    def load(path: str, name: str) -> object:
        namespace = {"torch": torch, "ctypes": ctypes}
        return getattr(cut_out(copies.repaired[path], {name}, namespace), name)

    return SimpleNamespace(
        copy=load("sglang/kernels/ops/kvcache/cache_move.py", "_copy_all_layer_kv_cache_torch"),
        assign=load("sglang/srt/mem_cache/allocation.py", "_assign_req_to_token_pool_torch"),
    )


def pool() -> list[torch.Tensor]:
    """Keys and values of two layers, of different widths and element types."""
    generator = torch.Generator().manual_seed(1)
    shapes = [((ROWS, 2, 4), torch.float32), ((ROWS, 2, 6), torch.bfloat16)] * 2
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in shapes]


def move(
    standins: SimpleNamespace, buffers: list[torch.Tensor], pairs: list[tuple[int, int]]
) -> None:
    standins.copy(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers]),
        torch.tensor([target for target, _ in pairs], dtype=torch.int64),
        torch.tensor([source for _, source in pairs], dtype=torch.int64),
    )


# A target is written once: what two sources for one slot give is undefined in the kernel as well.
MOVES = st.lists(
    st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)), unique_by=lambda pair: pair[0]
)


@given(pairs=MOVES)
def test_patch_standin_move_copies_slots_in_every_layer(
    standins: SimpleNamespace, pairs: list[tuple[int, int]]
) -> None:
    buffers, expected = pool(), pool()
    for before, after in zip(pool(), expected, strict=True):
        for target, source in pairs:
            after[target] = before[source]
    move(standins, buffers, pairs)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


def test_patch_standin_move_of_a_rotation_reads_before_it_writes(standins: SimpleNamespace) -> None:
    buffers = pool()
    move(standins, buffers, [(0, 1), (1, 2), (2, 0)])
    for before, after in zip(pool(), buffers, strict=True):
        assert torch.equal(after[:3], before[[1, 2, 0]])


@given(
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=5),
    index_type=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_patch_standin_assign_gives_requests_their_slots_in_order(
    standins: SimpleNamespace,
    spans: list[tuple[int, int]],
    index_type: torch.dtype,
    data: st.DataObject,
) -> None:
    rows = data.draw(st.permutations(range(6)))[: len(spans)]
    total = sum(length for _, length in spans)
    slots = torch.arange(100, 100 + total)
    table = torch.full((6, 16), -1, dtype=torch.int32)
    expected, taken = table.clone(), 0
    for row, (start, length) in zip(rows, spans, strict=True):
        for position in range(start, start + length):
            expected[row, position] = slots[taken]
            taken += 1
    standins.assign(
        torch.tensor(rows, dtype=torch.int64),
        table,
        torch.tensor([start for start, _ in spans], dtype=index_type),
        torch.tensor([start + length for start, length in spans], dtype=index_type),
        slots,
        16,
    )
    assert torch.equal(table, expected)


def test_patch_standin_imports_catch_only_a_missing_module(copies: Copies) -> None:
    """A module that is there stays in use, and one that is there and broken stays an error."""
    guarded = [path for path in copies.released if path != BACKEND]
    for path in guarded:
        added = copies.repaired[path].count(b"except ModuleNotFoundError:")
        assert added - copies.released[path].count(b"except ModuleNotFoundError:") == 1
        assert copies.repaired[path].count(b"except") == copies.released[path].count(b"except") + 1
