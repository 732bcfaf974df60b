"""CudaKV on a GPU, without SGLang: blocks go to the device and back unharmed, beside forwards."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.gpu import encoded, exact, stand_ins  # noqa: E402
from benchmarks.gpu.measuring import SMALL, Load, bytes_of, pinned  # noqa: E402
from sglang_cake.core.buffers import HostArena  # noqa: E402
from sglang_cake.core.layout import BlockLayout  # noqa: E402
from sglang_cake.integration.memory.host_pools import pin  # noqa: E402
from sglang_cake.integration.memory.kv_pool import CudaKV  # noqa: E402


def _device() -> Any:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(("form", "page"), exact.CASES)
def test_cuda_kv_copies_equal_plain_indexing_beside_forwards(form: str, page: int) -> None:
    load = Load(SMALL, torch.cuda.Stream(), _device())
    assert exact.copies_of(exact.FORMS[form], page, load, _device()) == ""


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_cuda_kv_slots_that_change_hands_hold_what_was_written_last(
    seed: int, own_stream: bool
) -> None:
    load = Load(SMALL, torch.cuda.Stream(), _device()) if own_stream else None
    kv = CudaKV(
        stand_ins.make_pool(exact.MHA, exact.SLOTS, device=_device()),
        block_tokens=exact.BLOCK_TOKENS,
        forward_stream=load.stream if load else None,
    )
    wrong, checked = exact.reuse(kv, 200, load, seed=seed)
    assert wrong == 0
    assert checked > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("parts", encoded.LAYOUTS)
@pytest.mark.parametrize("codec", encoded.CODECS)
def test_device_decode_on_cuda_gives_the_values_of_the_cpu(
    codec: str, parts: str, dtype: str
) -> None:
    layout = BlockLayout.plain(2, encoded.LAYOUTS[parts], dtype, 64)
    assert encoded.decoded(layout, codec, _device()) == ""


def test_host_arena_is_pinned_until_its_memory_is_freed() -> None:
    for _ in range(2):  # the second may lie where the first was
        tensors = [bytes_of(buffer) for buffer in pinned([4096] * 3, _device())]
        assert all(tensor.is_pinned() for tensor in tensors)


def test_failed_pinning_is_one_line_and_the_next_launch_works(caplog: Any) -> None:
    arena = HostArena([4096], prefault=True)
    assert pin(arena, _device())
    assert not pin(arena, _device())  # it is registered already
    (record,) = caplog.records
    assert "cannot be pinned" in record.getMessage()
    assert torch.ones(8, device="cuda").sum().item() == 8
