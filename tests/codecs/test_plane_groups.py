"""Blocks with more than K and V of equal layers: an index, or layers of several shapes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distributions import install

from sglang_cake.codecs.catalogue import chain_of, decode, prepare
from sglang_cake.codecs.codec_choice import AutoCodec
from sglang_cake.codecs.codec_steps import Malformed
from sglang_cake.codecs.entropy import Entropy
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.codecs.groups import Groups
from sglang_cake.codecs.nonuniform import NonUniform
from sglang_cake.codecs.pipeline import Chain, Forms, Leading, Raw, begin
from sglang_cake.codecs.rope import InverseRope
from sglang_cake.codecs.zstd import BytePlanes, Zstd
from sglang_cake.core.codec_names import AUTO, CODECS, LOSSLESS, LOSSY
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout, PlaneGroup
from sglang_cake.integration.memory.device_decode import decode_payload
from sglang_cake.stores.encoded import chains_of
from sglang_cake.testing.codec_contract import kv_like

KV = PlaneGroup(4, (("kv", (1, 576)),), "bfloat16")
INDEX = PlaneGroup(3, (("index", (8448,)),), "uint8", row_tokens=64)
LAYOUTS = {
    "an index in pages": BlockLayout((KV, INDEX), 128),
    "a number behind a page of odd size": BlockLayout(
        (PlaneGroup(1, (("page", (33,)),), "uint8", row_tokens=8), replace(KV, layers=1)), 8
    ),
    "8 bits beside 16": BlockLayout(
        (
            PlaneGroup(4, (("k", (2, 8)), ("v", (2, 8))), "float8_e4m3fn"),
            PlaneGroup(2, (("index_k", (1, 16)),), "bfloat16"),
        ),
        16,
    ),
    "two shapes of layers": BlockLayout(
        (
            PlaneGroup(2, (("k", (2, 64)), ("v", (2, 64))), "float16"),
            PlaneGroup(1, (("k", (1, 64)), ("v", (1, 32))), "float16"),
        ),
        32,
    ),
    "pages only": BlockLayout((replace(INDEX, row_tokens=128),), 128),
}
SPARSE = LAYOUTS["an index in pages"]


def block_of(layout: BlockLayout) -> bytes:
    """Numbers as KV has them, and any bytes in what is no number."""
    draw = np.random.default_rng(5)
    return b"".join(
        draw.bytes(size)
        if group.row_tokens > 1 or group.dtype.startswith("float8")
        else kv_like(BlockLayout((group,), layout.block_tokens))
        for group, size in zip(layout.groups, layout.group_bytes, strict=True)
    )


def encoded(chain: Chain, layout: BlockLayout, block: bytes) -> memoryview:
    payload = memoryview(bytearray(layout.block_bytes + ENCODED_HEAD_BYTES))
    return payload[: chain.encode(layout, memoryview(block), payload)]


def decoded(layout: BlockLayout, payload: memoryview) -> tuple[Chain, bytes]:
    out = bytearray(layout.block_bytes)
    return decode(layout, payload, memoryview(out)), bytes(out)


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_plane_groups_lossless_codecs_keep_every_bit(kind: str, codec: str) -> None:
    layout = LAYOUTS[kind]
    chain = chain_of(codec, layout, rope_theta=1e4)
    chain.warm_up(layout)
    for block in (block_of(layout), bytes(layout.block_bytes)):
        assert decoded(layout, encoded(chain.of_first(), layout, block))[1] == block


def test_plane_groups_zstd_shuffles_the_numbers_of_each_group() -> None:
    """Numbers behind or before an index are as small as without it."""
    chain = chain_of("zstd", SPARSE)
    alone = BlockLayout.plain(4, KV.parts, "bfloat16", 128)
    numbers = kv_like(alone)
    pages = bytes(SPARSE.block_bytes - alone.block_bytes)
    size = len(encoded(chain, alone, numbers))
    assert size < 0.9 * alone.block_bytes
    assert len(encoded(chain, SPARSE, numbers + pages)) < 1.01 * size
    shuffled = encoded(chain, SPARSE, numbers + pages)
    assert decoded(SPARSE, shuffled)[0] == Chain(BytePlanes(), compressors=(Zstd(1),))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("codec", LOSSY)
def test_plane_groups_lossy_codecs_are_refused_in_one_line(codec: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{codec}.*use raw or zstd") as error:
        chain_of(codec, LAYOUTS[kind], rope_theta=1e4)
    assert "\n" not in str(error.value)


def test_plane_groups_codecs_of_other_packages_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry_point = "own = sglang_cake.codecs.pipeline:RAW_CHAIN"
    install(tmp_path, "own_codec", "sglang_cake.codecs", entry_point)
    monkeypatch.syspath_prepend(tmp_path)
    assert chain_of("own", BlockLayout((KV,), 128)) == Chain(Raw())
    with pytest.raises(ConfigError, match="use raw or zstd"):
        chain_of("own", SPARSE)


@pytest.mark.parametrize(
    "chain",
    [
        Chain(Groups(8)),
        Chain(NonUniform(3)),
        Chain(Entropy(0.06, 2.0)),
        Chain(Raw(), leading=Leading()),
        Chain(Raw(), arrays=(InverseRope(1e4, 64),)),
    ],
    ids=lambda chain: chain.steps[0].name,
)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_plane_groups_payload_of_a_step_that_takes_none_is_malformed(
    kind: str, chain: Chain
) -> None:
    layout = LAYOUTS[kind]
    body_bytes = layout.block_bytes
    if chain.leading is not None:  # as many bytes as it would have, so that the length is right
        body_bytes += -(-layout.groups[0].row_bytes // 64) * 64
    payload = bytearray(body_bytes + ENCODED_HEAD_BYTES)
    size = begin(chain.describe(), np.frombuffer(payload, np.uint8)) + body_bytes
    with pytest.raises(Malformed):
        decoded(layout, memoryview(payload)[:size])
    with pytest.raises(Malformed):
        prepare(layout, memoryview(payload)[:size], memoryview(payload))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_plane_groups_auto_takes_lossless_codecs_only(kind: str) -> None:
    layout = LAYOUTS[kind]
    chains = chains_of(layout, AUTO, 1.0, 1e4)
    assert chains.keys() == {codec for codec in CODECS if codec in LOSSLESS and codec != "raw"}
    auto = AutoCodec(
        layout,
        chains,
        max_error=1.0,
        links=[lambda: 1e6],
        decode_threads=1,
        counters=Counters(),
    )
    block = block_of(layout)
    take = lambda: memoryview(bytearray(layout.block_bytes + ENCODED_HEAD_BYTES))  # noqa: E731
    payload = auto.encode(Forms(memoryview(block), True, take), 0)
    assert decoded(layout, payload)[1] == block


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_plane_groups_reach_the_device_as_they_are(kind: str, codec: str) -> None:
    layout = LAYOUTS[kind]
    block = block_of(layout)
    memory = bytearray(layout.block_bytes + ENCODED_HEAD_BYTES)
    payload = encoded(chain_of(codec, layout), layout, block)
    memory[: len(payload)] = payload
    prepare(layout, memoryview(memory)[: len(payload)], memoryview(memory))
    found = torch.empty(layout.block_bytes, dtype=torch.uint8)
    decode_payload(layout, torch.frombuffer(memory, dtype=torch.uint8), found)
    assert bytes(found.numpy()) == block
