"""The check that runs SGLang's copy kernels hands them the right rows.

PyTorch copies in place of both kernels: it follows the addresses, widths and numbers of rows that
they get. SGLang's own function checks the arguments of the kernel that it compiles.
"""

import ast
import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import install
from sglang.kernels.ops.kvcache import hicache

from benchmarks.gpu import check, sglang_kernels
from benchmarks.gpu.measuring import FULL, SMALL, Finding
from benchmarks.gpu.sglang_kernels import DEVICE, HOST, WAYS, Bed, MakeKernel, compiled
from benchmarks.gpu.stand_ins import PoolForm

CPU = torch.device("cpu")
FORMS = {
    "MHA": PoolForm(layers=3, heads=2, dim=32, v_dim=32),
    "MLA": PoolForm(layers=3, heads=1, dim=64, v_dim=0),
}
BLOCK_TOKENS = 128


def memory(address: int, size_bytes: int) -> torch.Tensor:
    """uint8, over memory at an address."""
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)


def copied(
    source: torch.Tensor,
    target: torch.Tensor,
    source_index: torch.Tensor,
    target_index: torch.Tensor,
    row_bytes: int,
    source_stride: int,
    target_stride: int,
) -> None:
    """What the kernels do with the planes of one part. The checks are those of the kernels."""
    assert source.dtype == target.dtype == torch.uint64
    assert source.shape == target.shape
    assert source_index.dtype == target_index.dtype == torch.int64
    assert source_index.shape == target_index.shape
    assert row_bytes % 128 == 0
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        rows = memory(one, (int(source_index.max()) + 1) * source_stride)
        into = memory(other, (int(target_index.max()) + 1) * target_stride)
        found = rows.view(-1, source_stride)[source_index, :row_bytes]
        into.view(-1, target_stride)[target_index, :row_bytes] = found


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
) -> None:
    """As that of `sgl_kernel`."""
    del block_quota
    assert len(src_k_layers) == len(src_v_layers) == num_layers
    for source, target in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        copied(source, target, src_indices, dst_indices, *[item_size] * 3)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
) -> None:
    """As that of `sgl_kernel`."""
    del block_quota
    assert len(src_layers) == num_layers
    copied(src_layers, dst_layers, src_indices, dst_indices, *[item_size] * 3)


class Compiled:
    """In place of the modules that SGLang compiles; the one of TMA also gets the width of a row."""

    def __init__(self, element_size: int | None = None) -> None:
        self._element_size = element_size

    def launch_all(
        self,
        k_target: torch.Tensor,
        v_target: torch.Tensor,
        target_index: torch.Tensor,
        k_source: torch.Tensor,
        v_source: torch.Tensor,
        source_index: torch.Tensor,
        *sizes: int,
    ) -> None:
        for source, target in ((k_source, k_target), (v_source, v_target)):
            self.launch_all_mla(target, target_index, source, source_index, *sizes)

    def launch_all_mla(
        self,
        target: torch.Tensor,
        target_index: torch.Tensor,
        source: torch.Tensor,
        source_index: torch.Tensor,
        source_stride: int,
        target_stride: int,
        row_bytes: int | None = None,
    ) -> None:
        size = row_bytes or self._element_size
        assert size is not None
        copied(source, target, source_index, target_index, size, source_stride, target_stride)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does at once what it is told."""
    install(monkeypatch, 0, eager=True)
    monkeypatch.setattr(sglang_kernels, "multiprocessors", lambda device: 132)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`sgl_kernel`, which is not installed."""
    module = ModuleType("sgl_kernel")
    kvcacheio: Any = ModuleType("sgl_kernel.kvcacheio")
    ops = {each.__name__: each for each in (transfer_kv_all_layer, transfer_kv_all_layer_mla)}
    vars(kvcacheio).update(ops)
    vars(module)["kvcacheio"] = kvcacheio
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    monkeypatch.setitem(sys.modules, "sgl_kernel.kvcacheio", kvcacheio)
    monkeypatch.setattr(torch.ops, "sgl_kernel", SimpleNamespace(**ops), raising=False)
    return module


@pytest.fixture(params=["registers", "TMA"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of `nvcc`."""
    tma = request.param == "TMA"
    monkeypatch.setattr(hicache, "can_use_hicache_jit_kernel", lambda **sizes: True)
    monkeypatch.setattr(hicache, "use_hicache_tma_kernel", lambda **sizes: tma)
    monkeypatch.setattr(hicache, "_jit_hicache_tma_module", lambda **sizes: Compiled())
    monkeypatch.setattr(
        hicache, "_jit_hicache_module", lambda *, element_size, **sizes: Compiled(element_size)
    )


def check_copies(make: MakeKernel, form: str, page: int, place: str) -> None:
    bed = Bed(FORMS[form], BLOCK_TOKENS, page, CPU)
    kernel = make(bed.row_bytes, page, None if place == HOST else 132)
    assert bed.wrong(kernel, place) == ""

    def shifted(source: Any, target: Any) -> None:
        kernel(source._replace(index=source.index.roll(1)), target)

    assert bed.wrong(shifted, place) == f"{WAYS[0]}: differs"


cases = pytest.mark.parametrize(
    ("form", "page", "place"),
    [(form, page, place) for form in FORMS for page in (1, 64) for place in (HOST, DEVICE)],
)


@cases
def test_sglang_kernels_of_the_library_get_the_rows_of_block_and_pool(
    device: None, library: ModuleType, form: str, page: int, place: str
) -> None:
    check_copies(sglang_kernels.of_libraries(), form, page, place)


@cases
def test_sglang_kernels_that_are_compiled_get_the_rows_of_block_and_pool(
    device: None, compiler: None, form: str, page: int, place: str
) -> None:
    check_copies(compiled(), form, page, place)


@pytest.mark.parametrize("pool", ["mha", "mla"])
def test_sglang_kernels_of_the_library_are_called_as_hicache_calls_them(pool: str) -> None:
    """SGLang has no types for them where they are not installed."""
    package = Path(hicache.__file__).parents[3]
    source = (package / "srt/mem_cache/pool_host" / f"{pool}.py").read_text()
    stand_in = transfer_kv_all_layer if pool == "mha" else transfer_kv_all_layer_mla
    calls = [
        {each.arg for each in node.keywords}
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == stand_in.__name__
    ]
    names = {*stand_in.__annotations__} - {"return", "block_quota"}
    assert calls
    assert all(call == names for call in calls)


# ---- the step ----


def found_by(name: str, findings: list[Finding]) -> Mapping[str, Finding]:
    return {each.what: each for each in findings if name in each.what}


def test_sglang_kernels_step_compares_all_kernels_with_cake(
    device: None, library: ModuleType, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_kernels, "MLA", FORMS["MLA"])
    findings = list(sglang_kernels.sglang_kernels(SMALL, CPU))
    assert {each.ok for each in findings} == {None, True}
    for name in sglang_kernels.KERNELS:
        found = found_by(name, findings)
        assert sum(each.value == "equal" for each in found.values()) == 8
        for way in WAYS:
            cell = f"MLA, page 16, host memory, {way}: {name}"
            assert {f"{cell} to Cake", f"{cell}, host time of a block"} <= {*found}
            assert {f"{cell}, device idle", f"{cell}, beside products"} <= {*found}
    assert found_by("8B, page 1, device memory, out of the pool: Cake, device idle", findings)


def test_sglang_kernels_step_without_them_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.kvcache", None)
    found = [*sglang_kernels.sglang_kernels(FULL, CPU)]
    assert [(each.what, each.value) for each in found] == [
        (check.NOT_RUN, "sgl_kernel is not installed"),
        (check.NOT_RUN, "sglang.kernels.ops.kvcache is not installed"),
    ]


def test_sglang_kernels_step_says_why_a_kernel_does_not_load(
    device: None, library: ModuleType, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "sgl_kernel", SimpleNamespace())
    monkeypatch.setattr(sglang_kernels, "MLA", FORMS["MLA"])
    monkeypatch.setattr(hicache, "can_use_hicache_jit_kernel", lambda **sizes: False)
    findings = list(sglang_kernels.sglang_kernels(SMALL, CPU))
    reasons = [str(each.value) for each in findings if each.what == check.NOT_RUN]
    assert reasons[0] == "sgl_kernel cannot be imported: ImportError: its libraries are not loaded"
    assert len(reasons) == 1 + 8
    assert all("SGLang cannot compile its kernel" in each for each in reasons[1:])
    assert found_by(": Cake, device idle", findings)
