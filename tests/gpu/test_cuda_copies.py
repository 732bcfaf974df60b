"""CudaKV: blocks go to the device and back unharmed, beside forwards that run meanwhile."""

from typing import Any

import pytest

from sglang_cake.core.buffers import is_on_page

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


def _fill(buffer: Any) -> Any:
    buffer.tensor.copy_(torch.randint(0, 256, buffer.tensor.shape, dtype=torch.uint8))
    return buffer.tensor.clone()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_cuda_kv_blocks_return_bit_for_bit_beside_forwards(dtype: str) -> None:
    forward = torch.cuda.Stream()
    kv = _kv(getattr(torch, dtype), forward)
    busy = torch.randn(4096, 4096, device="cuda")
    order = (torch.randperm(SLOTS) + 1).to("cuda", torch.int64)
    expected, loads = [], []
    for turn in range(16):
        blocks = [kv.new_buffer(), kv.new_buffer()]
        expected.append([_fill(block) for block in blocks])
        slots = order[turn * 2 * BLOCK : (turn + 1) * 2 * BLOCK]
        loads.append((kv.load(blocks, slots), blocks, slots))
        with torch.cuda.stream(forward):
            for _ in range(4):
                busy = busy @ busy.clamp(-1, 1)
    kv.order_after_copies()
    saves = []
    for _, _, slots in loads:
        blocks = [kv.new_buffer(), kv.new_buffer()]
        saves.append((kv.save(slots, blocks), blocks))
    for (copy, blocks), wanted in zip(saves, expected, strict=True):
        copy.wait()
        assert copy.done()
        for block, bytes_ in zip(blocks, wanted, strict=True):
            assert torch.equal(block.tensor, bytes_)


def test_cuda_kv_save_copies_rows_as_the_forward_before_it_left_them() -> None:
    """Slots may be reused as soon as `save` has returned."""
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
        block = kv.new_buffer()
        copy = kv.save(slots, [block])
        for rows in kv.rows:
            rows[1 : BLOCK + 1] = 9
    copy.wait()
    words = block.tensor.view(kv.rows[0].dtype)
    assert bool((words == 7).all())


def test_cuda_kv_host_buffers_are_pinned_and_page_aligned() -> None:
    buffer = _kv(torch.float16, torch.cuda.Stream()).new_buffer()
    assert buffer.tensor.is_pinned()
    assert is_on_page(buffer.view)
