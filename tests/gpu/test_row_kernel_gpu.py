"""The row kernel on a GPU copies what plain indexing copies, bit for bit. It needs no SGLang."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from sglang_cake.core.layout import BlockLayout, PlaneGroup
from sglang_cake.integration.memory.pool_planes import Piece
from sglang_cake.integration.memory.row_kernel import RowKernel

SLOTS = 4096


def _random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def _rows_of(block: torch.Tensor, layout: BlockLayout) -> list[torch.Tensor]:
    """The planes of a block, `[block_tokens, bytes]` each."""
    sizes = [plane.rows * plane.row_bytes for plane in layout.planes]
    parts = block[: layout.block_bytes].split(sizes)
    return [part.view(layout.block_tokens, -1) for part in parts]


def _mha(k: int, v: int, dtype: str, layers: int = 3) -> tuple[object, ...]:
    return layers, (("k", (1, k)), ("v", (1, v))), dtype


def _mla(width: int, dtype: str) -> tuple[object, ...]:
    return 3, (("kv", (1, width)),), dtype


KINDS = {
    "rows of 2048 bytes": _mha(1024, 1024, "bfloat16", layers=32),
    "rows of 1152 bytes": _mla(576, "bfloat16"),
    "rows of 576 bytes": _mla(576, "float8_e4m3fn"),
    "rows of 384 and 256 bytes": _mha(192, 128, "bfloat16"),
    "rows of 128 bytes": _mha(128, 128, "float8_e5m2"),
    "rows of 96 bytes": _mha(96, 96, "float8_e5m2"),
    "rows of 40 bytes": _mha(10, 10, "float32"),
    "rows of 36 and 12 bytes": _mha(9, 3, "float32"),
    "rows of 6 and 10 bytes": _mha(3, 5, "float16"),
    "rows of 7 bytes": _mla(7, "float8_e4m3fn"),
    "rows that programs share": _mla(40_976, "float8_e4m3fn"),
}


def _pages(count: int, tokens: int) -> torch.Tensor:
    """The slots of `count` pages of `tokens`, in any order."""
    pages = torch.randperm(SLOTS // tokens, device="cuda")[:count]
    return (pages[:, None] * tokens + torch.arange(tokens, device="cuda")).flatten()


@pytest.mark.parametrize("block_tokens", [64, 128, 256])
@pytest.mark.parametrize("page_bytes", [8448, 8449, 132])
def test_row_kernel_rows_of_pages_equal_plain_indexing(page_bytes: int, block_tokens: int) -> None:
    kv = PlaneGroup(3, (("kv", (1, 576)),), "bfloat16")
    index = PlaneGroup(2, (("index", (page_bytes,)),), "uint8", row_tokens=64)
    layout = BlockLayout((kv, index), block_tokens)
    planes = [_random_bytes(SLOTS // p.row_tokens, p.row_bytes) for p in layout.planes]
    kernel, memory = RowKernel(planes, layout), _random_bytes(4, -(-layout.block_bytes // 16) * 16)
    which = slice(1, 4)
    slots = _pages(3 * block_tokens // 64, 64)
    wanted = [plane.clone() for plane in planes]
    for block, part in zip(memory[which], slots.view(3, -1), strict=True):
        for plane, its in zip(wanted, layout.planes, strict=True):
            rows = block[its.start : its.start + its.rows * its.row_bytes]
            plane[part[:: its.row_tokens] // its.row_tokens] = rows.view(its.rows, -1)
    kernel.scatter(memory[which], slots)
    assert all(torch.equal(one, other) for one, other in zip(planes, wanted, strict=True))
    out = memory.clone()
    out[which] = 0
    kernel.gather(slots, out[which])
    assert torch.equal(out[which, : layout.block_bytes], memory[which, : layout.block_bytes])


@pytest.mark.parametrize("compiled", [False, True], ids=["first copies", "compiled"])
@pytest.mark.parametrize("block_tokens", [1, 100, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_row_kernel_copies_on_a_gpu_equal_plain_indexing(
    kind: str, block_tokens: int, compiled: bool
) -> None:
    layout = BlockLayout.plain(*KINDS[kind], block_tokens)
    planes = [_random_bytes(SLOTS, plane.row_bytes) for plane in layout.planes]
    kernel = RowKernel(planes, layout)
    if compiled:
        kernel.compile([Piece(slice(None), 0, layout.block_bytes)])
    memory = _random_bytes(8, layout.block_bytes + 4096)
    used = slice(5)

    def slots() -> torch.Tensor:
        return torch.randperm(SLOTS, device="cuda")[: 5 * block_tokens]

    wanted, before, given = [plane.clone() for plane in planes], memory.clone(), slots()
    for block, part in zip(memory[used], given.view(5, -1), strict=True):
        for plane, rows in zip(wanted, _rows_of(block, layout), strict=True):
            plane[part] = rows
    kernel.scatter(memory[used], given)
    assert all(torch.equal(one, other) for one, other in zip(planes, wanted, strict=True))
    assert torch.equal(memory, before)

    out, taken = memory.clone(), slots()
    for block, part in zip(out[used], taken.view(5, -1), strict=True):
        for plane, rows in zip(planes, _rows_of(block, layout), strict=True):
            rows.copy_(plane[part])
    kernel.gather(taken, memory[used])
    assert torch.equal(memory, out)
    assert all(torch.equal(one, other) for one, other in zip(planes, wanted, strict=True))


def test_row_kernel_reaches_rows_and_blocks_beyond_2_gib_on_a_gpu() -> None:
    width = 2**12 + 1  # of bytes that are words
    layout = BlockLayout.plain(1, (("kv", (width,)),), "uint8", 1)
    pool = torch.zeros((2**31 // width + 10, width), dtype=torch.uint8, device="cuda")
    memory = torch.zeros((5, 2**29 + 2**12), dtype=torch.uint8, device="cuda")
    kernel = RowKernel([pool], layout)
    slots = torch.tensor([0, 1, 2, 3, len(pool) - 1], device="cuda")
    memory[-1] = 7
    kernel.scatter(memory, slots)
    assert bool((pool[-1] == 7).all())
    assert not pool[:-1].any()
    pool[-1] = 9
    kernel.gather(slots, memory)
    assert bool((memory[-1, :width] == 9).all())
    assert bool((memory[-1, width:] == 7).all())


def test_row_kernel_runs_on_the_current_stream_in_order() -> None:
    layout = BlockLayout.plain(*KINDS["rows of 2048 bytes"], 128)
    planes = [torch.zeros(SLOTS, width, dtype=torch.uint8, device="cuda") for width in (2048,) * 64]
    kernel = RowKernel(planes, layout)
    memory, busy = _random_bytes(2, layout.block_bytes), torch.randn(4096, 4096, device="cuda")
    slots = torch.arange(128, device="cuda")
    kernel.scatter(memory[:0], slots[:0])  # compiles it
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            busy = busy @ busy.clamp(-1, 1)
        memory.fill_(3)
        kernel.scatter(memory[1:], slots)
        assert not side.query()  # nobody waited
        memory.fill_(4)
    side.synchronize()
    assert all(bool((plane[:128] == 3).all()) for plane in planes)
    assert not any(plane[128:].any() for plane in planes)
