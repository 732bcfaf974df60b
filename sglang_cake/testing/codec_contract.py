"""The contract of codecs as tests: subclass `CodecContract`, also for codecs of other packages."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from sglang_cake.codecs.block_arrays import Block, relative_error
from sglang_cake.codecs.catalogue import decode, parse
from sglang_cake.codecs.codec_steps import Malformed
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.codecs.pipeline import Chain
from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout

MHA = (("k", (2, 16)), ("v", (2, 16)))
UNEQUAL = (("k", (3, 8)), ("v", (1, 20)))  # K and V of different sizes, no multiples of a group
MLA = (("kv", (36,)),)
LAYOUTS = [
    BlockLayout.plain(layers, parts, dtype, tokens)
    for layers, parts, tokens in (
        (2, MHA, 64),
        (1, UNEQUAL, 19),
        (3, MLA, 16),
        (2, MHA, 1),  # one token
        (1, (("k", (1, 1)), ("v", (1, 1))), 1),  # one number
        (2, MHA, 200),  # more than a group of tokens
        (2, MHA, 0),  # no token
    )
    for dtype in ("bfloat16", "float16", "float32")
]
EACH_LAYOUT = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda a: f"{a.groups[0].dtype}-{a.block_tokens}"
)
SMOOTH = LAYOUTS[0]
TINY = {"bfloat16": 1e-39, "float16": 6e-8, "float32": 1e-40}  # subnormal
LARGE = {"bfloat16": 3e38, "float16": 65504.0, "float32": 3.4e38}


def as_bytes(numbers: npt.NDArray[np.float64], dtype: str) -> bytes:
    """The numbers as a KV cache of `dtype` holds them (bfloat16 cut, not rounded)."""
    if dtype == "float16":
        return numbers.astype(np.float16).tobytes()
    single = numbers.astype(np.float32)
    if dtype == "float32":
        return single.tobytes()
    return (single.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def kv_like(layout: BlockLayout, seed: int = 0) -> bytes:
    """Like real keys and values: smooth along tokens, with a few large channels in K."""
    draw = np.random.default_rng(seed)
    planes = []
    (group,) = layout.groups
    for _ in range(group.layers):
        for name, shape in group.parts:
            channels = int(np.prod(shape))
            walk = draw.normal(size=(layout.block_tokens, channels)).cumsum(axis=0) * 0.1
            walk += draw.normal(size=channels) * (4.0 if name == "k" else 0.2)
            if name == "k":
                walk[:, :: max(1, channels // 3)] *= 20
            planes.append(walk.reshape(-1))
    return as_bytes(np.concatenate(planes), layout.groups[0].dtype)


def odd_blocks(layout: BlockLayout) -> Iterator[tuple[str, bytes]]:
    """Extreme blocks, which any model may make."""
    dtype = layout.groups[0].dtype
    count = layout.block_bytes // DTYPE_BYTES[dtype]
    draw = np.random.default_rng(1)
    noise = draw.normal(size=count)
    yield "zeros", bytes(layout.block_bytes)
    if not count:
        return
    yield "one value", as_bytes(np.full(count, -3.0), dtype)
    yield "negative zeros", as_bytes(np.full(count, -0.0), dtype)
    yield "subnormal", as_bytes(noise * TINY[dtype], dtype)
    with np.errstate(over="ignore"):
        yield (
            "large",
            as_bytes(np.clip(noise, -1, 1) * LARGE[dtype], dtype),
        )
    spiked = noise.copy()
    spiked[:: max(1, count // 7)] *= 1000
    yield "outliers", as_bytes(spiked, dtype)
    for name, value in (("nan", np.nan), ("infinity", np.inf), ("-infinity", -np.inf)):
        broken = noise.copy()
        broken[count // 2] = value
        yield name, as_bytes(broken, dtype)
    yield "any bits", draw.bytes(layout.block_bytes)


class CodecContract:
    """Subclass it and implement `chain`."""

    max_error = 0.0  # `relative_error` of `kv_like` blocks; 0: every bit is kept
    odd_error = 0.0  # `relative_error` of the finite `odd_blocks`

    def chain(self, layout: BlockLayout) -> Chain:
        """The codec under test."""
        raise NotImplementedError

    def round_trip(self, layout: BlockLayout, block: bytes) -> tuple[bytes, bytes]:
        """The payload, and the decoded block. Memory behind both must not be written."""
        payload = bytearray(b"\xa5" * (layout.block_bytes + ENCODED_HEAD_BYTES + 64))
        view = memoryview(payload)[: layout.block_bytes + ENCODED_HEAD_BYTES]
        size = self.chain(layout).encode(layout, memoryview(block), view)
        assert 0 < size <= len(view)
        assert payload[len(view) :] == b"\xa5" * 64
        out = bytearray(b"\x5a" * (layout.block_bytes + 64))
        chain = decode(layout, view[:size], memoryview(out)[: layout.block_bytes])
        assert chain in (self.chain(layout), Chain())
        assert out[layout.block_bytes :] == b"\x5a" * 64
        return bytes(view[:size]), bytes(out[: layout.block_bytes])

    @EACH_LAYOUT
    def test_codec_block_round_trip_is_within_its_error(self, layout: BlockLayout) -> None:
        block = kv_like(layout)
        _, restored = self.round_trip(layout, block)
        if self.max_error == 0:
            assert restored == block
        assert relative_error(layout, memoryview(block), memoryview(restored)) <= self.max_error

    @EACH_LAYOUT
    def test_codec_odd_blocks_round_trip_within_the_odd_error(self, layout: BlockLayout) -> None:
        for name, block in odd_blocks(layout):
            _, restored = self.round_trip(layout, block)
            before = Block.over(layout, memoryview(block))
            whole = all(np.isfinite(before.floats(part)).all() for part in before.parts)
            if self.max_error == 0 or not whole:
                assert restored == block, name
            else:
                error = relative_error(layout, memoryview(block), memoryview(restored))
                assert error <= self.odd_error, (name, error)

    @EACH_LAYOUT
    def test_codec_first_token_of_a_prompt_is_restored_exactly(self, layout: BlockLayout) -> None:
        """It is a sink with large numbers, which must not raise the error of other tokens."""
        whole = memoryview(bytearray(kv_like(layout)))
        source = Block.over(layout, whole)
        for plane in source.planes():
            plane[:1] = plane[:1] ^ plane.dtype.type(1 << (4 * plane.itemsize))
        chain = self.chain(layout).of_first()
        payload = memoryview(bytearray(layout.block_bytes + ENCODED_HEAD_BYTES))
        size = chain.encode(layout, whole, payload)
        out = memoryview(bytearray(layout.block_bytes))
        assert decode(layout, payload[:size], out) in (chain, Chain())
        found = Block.over(layout, out)
        for exact, restored in zip(source.planes(), found.planes(), strict=True):
            assert (exact[:1] == restored[:1]).all()
        assert relative_error(layout, whole, out) <= self.max_error

    def test_codec_payload_names_its_own_chain(self) -> None:
        chain = self.chain(SMOOTH)
        assert parse(chain.describe().encode()) == chain
        payload, _ = self.round_trip(SMOOTH, kv_like(SMOOTH))
        assert chain.describe().encode() in payload

    @EACH_LAYOUT
    def test_codec_equal_blocks_give_equal_payloads(self, layout: BlockLayout) -> None:
        """Whatever was encoded before: it may be another tenant's."""
        block = kv_like(layout)
        first = self.round_trip(layout, block)
        for other in LAYOUTS:
            self.round_trip(other, kv_like(other, seed=7))
        assert self.round_trip(layout, block) == first

    def test_codec_concurrent_threads_give_equal_results(self) -> None:
        blocks = [kv_like(SMOOTH, seed) for seed in range(8)]
        alone = [self.round_trip(SMOOTH, block) for block in blocks]
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda b: self.round_trip(SMOOTH, b), blocks)) == alone

    def test_codec_spoiled_payload_is_decoded_or_raises_malformed(self) -> None:
        draw = np.random.default_rng(3)
        payload, _ = self.round_trip(SMOOTH, kv_like(SMOOTH))
        out = memoryview(bytearray(SMOOTH.block_bytes))
        for size in {0, 1, 63, 64, len(payload) // 2, len(payload) - 1}:
            with pytest.raises(Malformed):
                decode(SMOOTH, memoryview(payload[:size]), out)
        for _ in range(300):
            spoiled = bytearray(payload)
            for at in draw.integers(len(payload), size=3):
                spoiled[at] ^= 1 << int(draw.integers(8))
            with np.errstate(all="ignore"):
                try:
                    decode(SMOOTH, memoryview(spoiled), out)
                except Malformed:
                    continue
