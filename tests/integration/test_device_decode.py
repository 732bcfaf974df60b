"""Decoding with torch gives what the compiled loops give, bit for bit; here on the CPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_pools import as_bytes, buffers_for, buffers_of, mha, mla

from sglang_cake.codecs.block_arrays import Block, parts_of
from sglang_cake.codecs.catalogue import chain_of, decode, decodes_on_device, prepare
from sglang_cake.codecs.codec_steps import Malformed, PackStep
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.codecs.groups import Groups
from sglang_cake.codecs.nonuniform import NonUniform
from sglang_cake.codecs.pipeline import Chain, Raw, begin, split
from sglang_cake.codecs.rope import InverseRope
from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.core.codec_names import CODECS, ON_DEVICE, RAW
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.integration.memory.device_decode import decode_payload
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.testing.codec_contract import LAYOUTS, SMOOTH, kv_like, odd_blocks

CPU = torch.device("cpu")


def encoded(chain: Chain, layout: BlockLayout, block: bytes) -> tuple[bytearray, int]:
    """Memory as the loader has it, and how much of it is payload."""
    memory = bytearray(b"\xa5" * (layout.block_bytes + ENCODED_HEAD_BYTES))
    return memory, chain.encode(layout, memoryview(block), memoryview(memory))


def by_loops(layout: BlockLayout, payload: memoryview) -> bytes:
    out = bytearray(layout.block_bytes)
    decode(layout, payload, memoryview(out))
    return bytes(out)


def by_torch(layout: BlockLayout, memory: bytearray) -> bytes:
    block = torch.empty(layout.block_bytes, dtype=torch.uint8)
    decode_payload(layout, torch.frombuffer(memory, dtype=torch.uint8), block)
    assert block.dtype == torch.uint8
    assert block.shape == (layout.block_bytes,)
    return block.numpy().tobytes()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda a: f"{a.groups[0].dtype}-{a.block_tokens}")
def test_device_decode_groups_equal_the_cpu_loops(layout: BlockLayout, bits: int) -> None:
    for name, block in [("smooth", kv_like(layout)), *odd_blocks(layout)]:
        memory, size = encoded(Chain(Groups(bits)), layout, block)
        wanted = by_loops(layout, memoryview(memory)[:size])
        assert by_torch(layout, memory) == wanted, name


@pytest.mark.parametrize("pack", [NonUniform(3), Groups(8), Groups(4)], ids=lambda a: f"{a}")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda a: f"{a.groups[0].dtype}-{a.block_tokens}")
def test_device_decode_exact_first_token_equals_the_cpu_loops(
    layout: BlockLayout, pack: PackStep
) -> None:
    memory, size = encoded(Chain(pack).of_first(), layout, kv_like(layout))
    assert by_torch(layout, memory) == by_loops(layout, memoryview(memory)[:size])


WIDE = BlockLayout.plain(2, (("k", (2, 64)), ("v", (3, 64))), "bfloat16", 128)  # numbers are kept
LONG = BlockLayout.plain(1, (("k", (1, 2)), ("v", (1, 2))), "float16", 70000)  # places of 32 bits


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("layout", [*LAYOUTS, WIDE, LONG], ids=lambda a: a.describe()[-24:])
def test_device_decode_nonuniform_levels_equal_the_cpu_loops(
    layout: BlockLayout, bits: int
) -> None:
    blocks = [("smooth", kv_like(layout))]
    blocks += odd_blocks(layout) if layout is not LONG else []
    for name, block in blocks:
        memory, size = encoded(Chain(NonUniform(bits)), layout, block)
        wanted = by_loops(layout, memoryview(memory)[:size])
        assert by_torch(layout, memory) == wanted, name


@pytest.mark.parametrize("pack", [NonUniform(3), Groups(8), Raw()], ids=lambda a: a.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_device_decode_rotated_keys_equal_the_cpu_loops(pack: PackStep, dtype: str) -> None:
    layout = BlockLayout((replace(WIDE.groups[0], dtype=dtype),), WIDE.block_tokens)
    for arrays in ((InverseRope(500000.0, 64),), (InverseRope(10000.0, 64), InverseRope(3.0, 2))):
        chain = Chain(pack, arrays)
        assert decodes_on_device(chain)
        memory = bytearray(layout.block_bytes + ENCODED_HEAD_BYTES)
        size = begin(chain.describe(), np.frombuffer(memory, np.uint8))
        body = np.frombuffer(memory, np.uint8)[size:]
        block = Block.over(layout, memoryview(kv_like(layout)))
        size += pack.encode(block, body)  # as if the turned keys were these
        wanted = by_loops(layout, memoryview(memory)[:size])
        prepare(layout, memoryview(memory)[:size], memoryview(memory))
        assert by_torch(layout, memory) == wanted
        assert wanted != by_loops_without_turns(layout, pack, memory)


def by_loops_without_turns(layout: BlockLayout, pack: PackStep, memory: bytearray) -> bytes:
    _, body = split(np.frombuffer(memory, np.uint8))
    out = bytearray(layout.block_bytes)
    pack.decode(body[: pack.max_bytes(layout)], Block.over(layout, memoryview(out)))
    return bytes(out)


def test_device_decode_outlier_index_out_of_range_raises_malformed() -> None:
    """There it would be an index out of bounds, which ends the process."""
    memory, size = encoded(Chain(NonUniform(3)), WIDE, kv_like(WIDE))
    body_at = size - NonUniform(3).max_bytes(WIDE)
    fields = NonUniform(3).fields(parts_of(WIDE)[0], WIDE)
    places_at = body_at + sum(np.dtype(kind).itemsize * int(np.prod(n)) for kind, n in fields[:5])
    assert memory[places_at] < 128
    memory[places_at] = 128  # of 128 tokens
    for decoding in (decode, prepare):
        out = bytearray(memory)
        with pytest.raises(Malformed, match="place"):
            decoding(WIDE, memoryview(out)[:size], memoryview(out)[: WIDE.block_bytes])


@given(
    layout=st.sampled_from(LAYOUTS),
    bits=st.sampled_from([4, 8]),
    group=st.one_of(st.integers(8, 300), st.just(65536)),
    seed=st.integers(0, 1000),
)
def test_device_decode_any_group_size_equals_the_cpu_loops(
    layout: BlockLayout, bits: int, group: int, seed: int
) -> None:
    memory, size = encoded(Chain(Groups(bits, group)), layout, kv_like(layout, seed))
    assert by_torch(layout, memory) == by_loops(layout, memoryview(memory)[:size])


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_device_decode_unsupported_chain_is_decoded_by_prepare(codec: str, first: bool) -> None:
    chain = chain_of(codec, SMOOTH)
    chain = chain.of_first() if first else chain
    memory, size = encoded(chain, SMOOTH, kv_like(SMOOTH))
    wanted, before = by_loops(SMOOTH, memoryview(memory)[:size]), bytes(memory[:size])
    prepare(SMOOTH, memoryview(memory)[:size], memoryview(memory))
    assert (bytes(memory[:size]) == before) == decodes_on_device(chain)
    assert by_torch(SMOOTH, memory) == wanted


@pytest.mark.parametrize("rope_theta", [None, 10000.0])
def test_device_decode_codec_list_equals_the_supported_chains(rope_theta: float | None) -> None:
    found = [codec for codec in CODECS if decodes_on_device(chain_of(codec, SMOOTH, rope_theta))]
    assert found == [RAW, *ON_DEVICE]


def test_device_decode_payload_of_wrong_length_raises_malformed() -> None:
    memory, size = encoded(chain_of("int8", SMOOTH), SMOOTH, kv_like(SMOOTH))
    for wrong in (0, 63, size - 1, size + 1):
        with pytest.raises(Malformed):
            prepare(SMOOTH, memoryview(memory)[:wrong], memoryview(memory))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", [mha, mla])
async def test_device_decode_stored_blocks_reach_the_pool_as_decoded_on_cpu(
    tmp_path: Path, codec: str, kind: object
) -> None:
    pool, block_tokens = kind(96, dtype=torch.bfloat16), 16  # type: ignore[operator]
    kv = DeviceKV(pool, block_tokens=block_tokens)
    kv.encoded = codec != RAW
    for buffer in buffers_of(pool):
        buffer.copy_(torch.randn(buffer.shape))
    slots = torch.randperm(96)[: 2 * block_tokens] + 1
    namespace = Namespace((("layout", kv.layout.describe()), ("codec", codec)))
    keys = [BlockKey(bytes([n]) * 32) for n in range(2)]

    async def go(on_device: bool) -> list[Buffer]:
        store = open_blocks(
            parse_sources(tmp_path.as_uri()),
            *([namespace], kv.layout),
            codec=codec,
            depth=2,
            on_device=on_device,
        )
        saved = buffers_for(kv, len(keys))
        kv.save(slots, saved, ()).wait()
        size = kv.load_buffer_bytes if on_device else kv.layout.block_bytes
        loaded = [Buffer(on_page(size)) for _ in keys]
        for key, source, target in zip(keys, saved, loaded, strict=True):
            await store.put(key, source.view)
            assert await store.get_into(key, target.view) == len(target.view)
        await store.close()
        return loaded

    blocks = [torch.frombuffer(b.view, dtype=torch.uint8) for b in await go(on_device=False)]
    wanted = torch.cat([torch.cat([*kv_rows(kv, block)], 1) for block in blocks])
    for pool_buffer in buffers_of(pool):
        pool_buffer.zero_()
    buffers = await go(on_device=True)
    for buffer, part in zip(buffers, slots.split(kv.layout.block_tokens), strict=True):
        if codec != RAW:  # as `CudaKV.load`
            block = torch.empty(kv.layout.block_bytes, dtype=torch.uint8)
            decode_payload(kv.layout, torch.frombuffer(buffer.view, dtype=torch.uint8), block)
            buffer = Buffer(block.numpy().data)
        assert kv.load(buffer, part, ()).done()
    found = torch.cat([as_bytes(b)[slots].view(len(slots), -1) for b in buffers_of(pool)], 1)
    assert torch.equal(found, wanted)


def kv_rows(kv: DeviceKV, block: torch.Tensor) -> list[torch.Tensor]:
    """The planes of a block, `[block_tokens, bytes]` each."""
    sizes = [plane.rows * plane.row_bytes for plane in kv.layout.planes]
    return [p.view(kv.layout.block_tokens, -1) for p in block.split(sizes)]
