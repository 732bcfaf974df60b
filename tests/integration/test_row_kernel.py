"""The row kernel copies what the plain path copies, bit for bit; here in Triton's interpreter."""

import gc
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import triton
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_pools import as_bytes, mha, mla, rows_of, scramble, slots_in_pages, unified
from test_kv_pool import CASES, PLAIN, Case
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.bench_copy_calls import StubDriver
from sglang_cake.core.buffers import Buffer
from sglang_cake.core.layout import BlockLayout, PlaneGroup
from sglang_cake.integration.memory import row_kernel
from sglang_cake.integration.memory.kv_pool import DeviceKV, pieces_of
from sglang_cake.integration.memory.row_kernel import RowKernel

SLOTS = 320
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
SOURCE = row_kernel.copy_rows.fn  # the Python function


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """The kernel is what it is under TRITON_INTERPRET=1, whatever has imported Triton before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kernel = triton.jit(SOURCE)
    with pytest.MonkeyPatch.context() as patch:  # Triton decides when the module is imported
        patch.setattr(row_kernel, "copy_rows", kernel)
        yield


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def check(
    make: Callable[[], Any],
    *,
    block_tokens: int,
    blocks: int = 2,
    gap_bytes: int = 0,
    seed: int = 0,
    page: int = 1,
    apart: Callable[[Any], tuple[object, ...]] = lambda pool: (),
) -> None:
    """Both ways, with two equal pools: one for the kernel, one for the plain path."""
    ours, plain = make(), make()
    scramble(ours, seed)
    scramble(plain, seed)
    kv = DeviceKV(plain, block_tokens=block_tokens, apart=apart(plain))
    of_ours = DeviceKV(ours, block_tokens=block_tokens, apart=apart(ours))
    kernel = RowKernel(of_ours.rows, kv.layout)
    random = torch.Generator().manual_seed(seed)
    memory = random_bytes(blocks + 2, kv.layout.block_bytes + gap_bytes, seed=seed)
    used = slice(blocks)

    def parts_of(memory: torch.Tensor) -> list[Buffer]:
        blocks = (row[: kv.layout.block_bytes] for row in memory[used])
        return [Buffer(block.numpy().data) for block in blocks]

    def slots() -> torch.Tensor:
        order = int(torch.randint(2**31, (), generator=random))
        return slots_in_pages(plain.size, page, order)[: blocks * block_tokens]

    def pools_are_equal() -> bool:
        pairs = zip(rows_of(ours), rows_of(plain), strict=True)
        return all(torch.equal(as_bytes(one), as_bytes(other)) for (one, _), (other, _) in pairs)

    before, given = memory.clone(), slots()
    kernel.scatter(memory[used], given)
    for part, its_slots in zip(parts_of(memory), given.split(block_tokens), strict=True):
        kv.load(part, its_slots, ())
    assert pools_are_equal()
    assert torch.equal(memory, before)

    wanted, taken = memory.clone(), slots()
    kv.save(taken, parts_of(wanted), ())
    kernel.gather(taken, memory[used])
    assert torch.equal(memory, wanted)
    assert pools_are_equal()


@st.composite
def pools(draw: st.DrawFn) -> Callable[[], Any]:
    sizes = st.integers(1, 40)
    make = partial(
        draw(st.sampled_from([mha, mla])),
        SLOTS,
        layers=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(DTYPES)),
        page=draw(st.sampled_from([1, 16])),
    )
    if make.func is mla:
        return partial(make, latent=draw(sizes), rope=draw(st.integers(1, 8)))
    heads = draw(st.integers(1, 4))
    return partial(make, heads=heads, dim=draw(sizes), v_dim=draw(st.none() | sizes))


@settings(max_examples=30)
@given(
    make=pools(),
    block_tokens=st.integers(1, 64),
    blocks=st.integers(1, 5),
    gap_bytes=st.sampled_from([0, 16, 4096]),
    seed=st.integers(0, 2**20),
)
# V has wider words than K, and begins where it could not be read in them.
@example(
    make=partial(mha, SLOTS, heads=1, dim=1, v_dim=2),
    block_tokens=3,
    blocks=2,
    gap_bytes=0,
    seed=0,
)
def test_row_kernel_copies_equal_those_of_the_plain_path(
    make: Callable[[], Any], **options: Any
) -> None:
    check(make, **options)


# Rows as real models have them, in bytes.
ROWS = {
    "2048": partial(mha, heads=8, dim=128, dtype=torch.bfloat16),
    "1152": partial(mla, latent=512, rope=64, dtype=torch.bfloat16),
    "576": partial(mla, latent=512, rope=64, dtype=torch.float8_e4m3fn),
    "384 and 256": partial(mha, heads=1, dim=192, v_dim=128, dtype=torch.bfloat16),
    "128": partial(mha, heads=1, dim=128, dtype=torch.float8_e5m2),
    "96": partial(mha, heads=1, dim=96, dtype=torch.float8_e5m2),
    "40": partial(mha, heads=1, dim=10, dtype=torch.float32),
}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS.keys())
def test_row_kernel_rows_of_every_width_are_bit_equal(make: Callable[..., Any]) -> None:
    check(partial(make, SLOTS, layers=1), block_tokens=36)


# Every other form of a pool, with one block of the fewest tokens.
FORMS = {
    kind: Case(case.make, case.page, 256 if "deepseek" in kind else case.block, case.apart)
    for kind, case in CASES.items()
    if kind not in PLAIN
} | {"rows of all layers in turn": Case(lambda: unified(SLOTS).get_kvcache().swa_kv_pool, 1, 32)}


@pytest.mark.parametrize("kind", FORMS)
def test_row_kernel_copies_of_every_pool_equal_those_of_the_plain_path(kind: str) -> None:
    case = FORMS[kind]
    check(
        case.make,
        block_tokens=case.block,
        blocks=1,
        gap_bytes=4096,
        page=case.page,
        apart=case.apart,
    )


def test_row_kernel_rows_that_programs_share_are_bit_equal() -> None:
    """States of recurrent layers: columns of wide rows, beside narrow ones."""
    widths = (70_000, 16, 33_008)
    layout = BlockLayout(
        tuple(PlaneGroup(1, (("state", (width,)),), "uint8") for width in widths), 1
    )
    pools = [random_bytes(5, width + 64, seed=width) for width in widths]
    planes = [pool[:, 48 : 48 + width] for pool, width in zip(pools, widths, strict=True)]
    kernel, memory = RowKernel(planes, layout), random_bytes(2, layout.block_bytes)
    before = [pool.clone() for pool in pools]
    kernel.scatter(memory, torch.tensor([3, 1]))
    for slot, block in zip((3, 1), memory, strict=True):
        for old, part in zip(before, block.split(widths), strict=True):
            old[slot, 48 : 48 + len(part)] = part
    assert all(torch.equal(*pair) for pair in zip(pools, before, strict=True))
    found = torch.zeros_like(memory)
    kernel.gather(torch.tensor([3, 1]), found)
    assert torch.equal(found, memory)


@pytest.mark.parametrize("kind", ["dsa", "minimax", "dsa, packed"])
def test_row_kernel_pieces_of_a_block_are_copied_like_all_of_it(kind: str) -> None:
    case = CASES[kind]
    whole, parted = case.make(), case.make()
    kv, of_parted = case.kv(whole), case.kv(parted)
    largest = max(plane.rows * plane.row_bytes for plane in kv.layout.planes)
    pieces = pieces_of(kv.layout, largest)
    assert len(pieces) > 1
    block, slots = random_bytes(1, kv.layout.block_bytes), slots_in_pages(whole.size, case.page, 1)
    slots = slots[: case.block].contiguous()
    RowKernel(kv.rows, kv.layout).scatter(block, slots)
    kernel = RowKernel(of_parted.rows, kv.layout)
    kernel.compile(pieces)  # copies nothing
    found = []
    for piece in pieces:
        part = block[:, piece.start : piece.start + piece.size_bytes].contiguous()
        kernel.scatter(part, slots, piece)
        found.append(torch.zeros_like(part))
        kernel.gather(slots, found[-1], piece)
    for one, other in zip(kv.rows, of_parted.rows, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.cat(found, dim=1), block)


def test_row_kernel_reaches_rows_and_blocks_beyond_2_gib() -> None:
    """Memory that is not touched costs nothing."""
    width = 2**12 + 1  # of bytes that are words
    layout = BlockLayout.plain(1, (("kv", (width,)),), "uint8", 1)
    pool = torch.empty((2**31 // width + 10, width), dtype=torch.uint8)
    memory = torch.empty((5, 2**29 + 2**12), dtype=torch.uint8)
    kernel = RowKernel([pool], layout)
    rows = random_bytes(2, width)
    slots = torch.tensor([0, 1, 2, 3, len(pool) - 1])
    memory[-1, :width] = rows[0]
    kernel.scatter(memory, slots)
    assert torch.equal(pool[-1], rows[0])
    pool[-1] = rows[1]
    kernel.gather(slots, memory)
    assert torch.equal(memory[-1, :width], rows[1])


class Launches:
    """A kernel that only notes its grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("blocks", [1, 64, 10_000])
def test_row_kernel_any_number_of_blocks_is_one_launch(
    monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    layout = BlockLayout.plain(32, (("k", (8, 128)), ("v", (8, 128))), "bfloat16", 128)
    planes = [torch.empty(1, plane.row_bytes, dtype=torch.uint8) for plane in layout.planes]
    kernel, launches = RowKernel(planes, layout), Launches()
    # The interpreter would take minutes for the largest grid, and tells nobody of launches.
    monkeypatch.setattr(row_kernel, "copy_rows", launches)
    memory = torch.empty((1, layout.block_bytes), dtype=torch.uint8).expand(blocks, -1)
    slots = torch.zeros(blocks * 128, dtype=torch.int64)
    kernel.scatter(memory, slots)
    kernel.gather(slots, memory)
    assert len(launches.grids) == 2
    for programs, planes_of_grid, shares in launches.grids:  # the limits of CUDA
        assert 0 < programs < 2**31
        assert shares == 1
        assert planes_of_grid == 64 < 2**16


class NotedLaunches(StubDriver):
    """Notes grids, addresses, numbers and constants of launches."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[Any, ...]] = []

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            grid, what = args[:3], args[9:]  # behind what profilers are told
            values = (arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in what)
            self.launched.append((*grid, *values))

        return launch


def test_row_kernel_later_launches_equal_the_first_one_that_triton_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = BlockLayout.plain(3, (("k", (24,)), ("v", (8,))), "bfloat16", 4)
    planes = [torch.zeros(9, plane.row_bytes, dtype=torch.uint8) for plane in layout.planes]
    pieces = pieces_of(layout, layout.block_bytes // 3)
    memory = torch.zeros((2, layout.block_bytes), dtype=torch.uint8)
    slots = torch.arange(8)
    driver = NotedLaunches()
    triton.runtime.driver.set_active(driver)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(row_kernel, "copy_rows", triton.JITFunction(SOURCE))
            kernel = RowKernel(planes, layout)
            for piece in [*pieces, None]:
                for _ in range(2):
                    kernel.scatter(memory, slots, piece)
                for _ in range(2):
                    kernel.gather(slots, memory, piece)
        del kernel
        gc.collect()  # compiled kernels are unloaded by the driver that has loaded them
    finally:
        triton.runtime.driver._active = None
    firsts, laters = driver.launched[::2], driver.launched[1::2]
    assert firsts == laters
    assert len(set(firsts)) == len(firsts) == 2 * (len(pieces) + 1)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("into_pool", [False, True])
@pytest.mark.parametrize(
    ("unit", "word", "access"),
    [
        (16, "i64", "v2.b64"),
        (8, "i64", "b64"),
        (4, "i32", "b32"),
        (2, "i16", "b16"),
        (1, "u8", "b8"),
    ],
)
def test_row_kernel_compiles_for_a_gpu_with_accesses_of_one_unit(
    unit: int, word: str, access: str, into_pool: bool, paged: bool
) -> None:
    """The interpreter accepts more than the compiler does."""
    compiled = triton.compile(
        ASTSource(
            triton.JITFunction(SOURCE),
            signature={
                "blocks": f"*{word}",
                **dict.fromkeys(("slots", "planes"), "*i64"),
                "stride": "i32",
                "first": "i32",
            }
            | dict.fromkeys(
                (
                    *("BLOCK_TOKENS", "UNIT_BYTES", "UNIT_WORDS", "TOKENS", "COLUMNS"),
                    *("PAGED", "INTO_POOL"),
                ),
                "constexpr",
            ),
            constexprs={
                "BLOCK_TOKENS": 128,
                "UNIT_BYTES": unit,
                "UNIT_WORDS": 2 if unit == 16 else 1,
                "TOKENS": 32,
                "COLUMNS": 64,
                "PAGED": paged,
                "INTO_POOL": into_pool,
            },
            attrs={(0,): [["tt.divisibility", 16]]},
        ),
        target=GPUTarget("cuda", 90, 32),
    )
    copies = re.findall(r"(ld|st)\.global\.(\S+)", compiled.asm["ptx"])
    assert ("ld", access) in copies
    assert {kind for what, kind in copies if what == "st"} == {access}
