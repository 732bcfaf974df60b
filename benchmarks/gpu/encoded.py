"""Blocks that are decoded on the device: the values, and the time.

These steps need numba, as servers do for codecs; no other step does.
"""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu.measuring import (
    GB,
    Finding,
    Size,
    bytes_of,
    device_s,
    host_s,
    no_waiting,
    pinned,
)
from sglang_cake.codecs.catalogue import chain_of, decode
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.core.buffers import Buffer
from sglang_cake.core.layout import BlockLayout
from sglang_cake.integration.memory.device_decode import decode_payload

CODECS = ("raw", "int8", "int4", "kvquant3")
ROPE_THETA = 500_000.0
LAYOUTS = {
    "MHA": (("k", (2, 16)), ("v", (2, 16))),
    "K and V of other sizes": (("k", (3, 8)), ("v", (1, 20))),
    "MLA": (("kv", (36,)),),
}


def encoded(size: Size, device: torch.device) -> Iterator[Finding]:
    """Decoding on the device beside decoding on the CPU."""
    for codec in CODECS:
        for name, parts in LAYOUTS.items():
            for dtype in ("bfloat16", "float16", "float32"):
                layout = BlockLayout.plain(2, parts, dtype, 64)
                wrong = decoded(layout, codec, device)
                yield Finding(f"{codec}, {name}, {dtype}", wrong or "equal", ok=not wrong)


def decoded(layout: BlockLayout, codec: str, device: torch.device) -> str:
    """What differs; nothing if all is right."""
    payload, size = encode(layout, codec, device)
    wanted = bytearray(layout.block_bytes)
    decode(layout, payload.view[:size], memoryview(wanted))
    found = torch.empty(layout.block_bytes, dtype=torch.uint8, device=device)
    with no_waiting():  # the copier's thread launches other copies meanwhile
        decode_payload(layout, bytes_of(payload), found)
    return "" if found.cpu().numpy().tobytes() == bytes(wanted) else "differs"


def encode(layout: BlockLayout, codec: str, device: torch.device) -> tuple[Buffer, int]:
    """A payload in pinned memory, and its bytes."""
    (payload,) = pinned([layout.block_bytes + ENCODED_HEAD_BYTES], device)
    draw = np.random.default_rng(0)
    values = torch.from_numpy(
        draw.standard_normal(layout.block_bytes // _itemsize(layout), dtype=np.float32)
    ).to(getattr(torch, layout.groups[0].dtype))
    block = memoryview(values.view(torch.uint8).numpy()).cast("B")
    chain = chain_of(codec, layout, rope_theta=ROPE_THETA)
    return payload, chain.encode(layout, block, payload.view)


def decoding(size: Size, device: torch.device) -> Iterator[Finding]:
    """Blocks decoded on the device; bytes are those of the decoded block."""
    form = size.form
    token = (("k", (form.heads, form.dim)), ("v", (form.heads, form.v_dim)))
    layout = BlockLayout.plain(form.layers, token, "bfloat16", size.block_tokens)
    for codec in CODECS:
        payload, encoded_bytes = encode(layout, codec, device)
        source = bytes_of(payload)
        block = torch.empty(layout.block_bytes, dtype=torch.uint8, device=device)
        took_s = device_s(lambda n, s=source, b=block: decode_payload(layout, s, b), repeats=10)
        yield Finding(f"{codec}, on the device", layout.block_bytes / took_s / GB, "GB/s")
        took_s = host_s(lambda n, s=source, b=block: decode_payload(layout, s, b), repeats=10)
        yield Finding(f"{codec}, host time of a block", took_s * 1e6, "us")
        yield Finding(f"{codec}, size", encoded_bytes / layout.block_bytes, "of a block")


def _itemsize(layout: BlockLayout) -> int:
    return int(getattr(torch, layout.groups[0].dtype).itemsize)
