"""CudaKV: blocks go to the device and back unharmed, beside forwards that run meanwhile."""

from typing import Any

import pytest

from sglang_cake.core.host_memory import HostArena

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

SLOTS, LAYERS, BLOCK = 4096, 8, 64


def _kv(dtype: Any, forward: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_cake.integration.memory.kv_pool import CudaKV

    pool = MHATokenToKVPool(
        size=SLOTS,
        page_size=1,
        dtype=dtype,
        head_num=4,
        head_dim=64,
        layer_num=LAYERS,
        device="cuda",
        enable_memory_saver=False,
    )
    return CudaKV(pool, block_tokens=BLOCK, forward_stream=forward)


@pytest.mark.parametrize("codec", ["raw", "int8", "int4", "kvquant3"])
def test_device_decode_on_cuda_gives_the_values_of_the_cpu(codec: str) -> None:
    from sglang_cake.codecs.catalogue import chain_of, decode
    from sglang_cake.integration.memory.device_decode import decode_payload
    from sglang_cake.testing.codec_contract import LAYOUTS, kv_like

    for layout in LAYOUTS:
        payload = torch.empty(layout.block_bytes + 1024, dtype=torch.uint8, pin_memory=True)
        block, view = kv_like(layout), memoryview(payload.numpy())
        size = chain_of(codec, layout, rope_theta=10000.0).encode(layout, memoryview(block), view)
        wanted = bytearray(layout.block_bytes)
        decode(layout, view[:size], memoryview(wanted))
        found = decode_payload(layout, payload, torch.device("cuda"))
        assert found.cpu().numpy().tobytes() == bytes(wanted), layout


def _buffers(kv: Any, count: int) -> Any:
    from sglang_cake.integration.memory.host_pools import pin

    arena = HostArena([kv.layout.block_bytes] * count, prefault=True)
    assert pin(arena, kv.device)
    return arena.buffers


def _tensor(buffer: Any) -> Any:
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


def _fill(buffer: Any) -> Any:
    tensor = _tensor(buffer)
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    return tensor.clone()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_cuda_kv_blocks_return_bit_for_bit_beside_forwards(dtype: str) -> None:
    forward = torch.cuda.Stream()
    kv = _kv(getattr(torch, dtype), forward)
    busy = torch.randn(4096, 4096, device="cuda")
    order = (torch.randperm(SLOTS) + 1).to("cuda", torch.int64)
    expected, loads = [], []
    for turn in range(16):
        blocks = _buffers(kv, 2)
        expected.append([_fill(block) for block in blocks])
        slots = order[turn * 2 * BLOCK : (turn + 1) * 2 * BLOCK]
        after = kv.fence()
        parts = zip(blocks, slots.split(BLOCK), strict=True)
        loads.append(([kv.load(block, part, after) for block, part in parts], slots))
        with torch.cuda.stream(forward):
            for _ in range(4):
                busy = busy @ busy.clamp(-1, 1)
    saves = []
    for copies, slots in loads:
        kv.order_forwards_after(copies)
        blocks = _buffers(kv, 2)
        saves.append((kv.save(slots, blocks, kv.fence()), blocks))
    for (copy, blocks), wanted in zip(saves, expected, strict=True):
        copy.wait()
        assert copy.done()
        for block, bytes_ in zip(blocks, wanted, strict=True):
            assert torch.equal(_tensor(block), bytes_)


def test_cuda_kv_save_copies_rows_as_the_forward_before_it_left_them() -> None:
    """Forwards behind `order_forwards_after` may write to the slots."""
    forward = torch.cuda.Stream()
    kv = _kv(torch.float32, forward)
    slots = torch.arange(1, BLOCK + 1, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(forward):
        for _ in range(20):
            busy = busy @ busy.clamp(-1, 1)
        for rows in kv.rows:
            rows[1 : BLOCK + 1] = 7
    with torch.cuda.stream(forward):
        (block,) = _buffers(kv, 1)
        copy = kv.save(slots, [block], kv.fence())
        kv.order_forwards_after([copy])
        for rows in kv.rows:
            rows[1 : BLOCK + 1] = 9
    copy.wait()
    words = _tensor(block).view(kv.rows[0].dtype)
    assert bool((words == 7).all())


def test_host_arena_is_pinned_until_its_memory_is_freed() -> None:
    kv = _kv(torch.float16, torch.cuda.Stream())
    for _ in range(2):  # the second may lie where the first was
        tensors = [_tensor(buffer) for buffer in _buffers(kv, 3)]
        assert all(tensor.is_pinned() for tensor in tensors)


def test_failed_pinning_is_one_line_and_the_next_launch_works(caplog: Any) -> None:
    from sglang_cake.integration.memory.host_pools import pin

    kv = _kv(torch.float16, torch.cuda.Stream())
    arena = HostArena([kv.layout.block_bytes], prefault=True)
    assert pin(arena, kv.device)
    assert not pin(arena, kv.device)  # it is registered already
    (record,) = caplog.records
    assert "cannot be pinned" in record.getMessage()
    assert torch.ones(8, device="cuda").sum().item() == 8
