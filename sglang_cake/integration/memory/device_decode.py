"""Decoding with torch on the device that needs the KV: encoded bytes cross the bus, not blocks.

The values are those of the compiled loops of `codecs`, bit for bit: products and sums in float32,
each rounded to the nearest, ties to even. `catalogue.decodes_on_device` decides which chains are
decoded here, and `catalogue.prepare` checks that no index in them leads out of a block.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from sglang_cake.codecs.block_arrays import KEYS, Part, parts_of
from sglang_cake.codecs.catalogue import parse
from sglang_cake.codecs.codec_steps import Field, packed_bytes
from sglang_cake.codecs.groups import Groups
from sglang_cake.codecs.nonuniform import NonUniform
from sglang_cake.codecs.pipeline import RAW_CHAIN, Leading, Raw, split
from sglang_cake.codecs.rope import InverseRope, rotations
from sglang_cake.core.layout import BlockLayout

_HALF_MAX = 65504.0
# Types of the same size that torch can index with and copy: it supports little for unsigned numbers
# of more than 8 bits.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def decode_payload(layout: BlockLayout, payload: torch.Tensor, block: torch.Tensor) -> None:
    """Fill `block` (uint8 `[block_bytes]`, on a device) from the payload with which `payload`
    begins, in host memory.

    Only its encoded bytes are copied to the device, asynchronously: `payload` (uint8) must not
    change until the copy is done. It has passed `prepare`. Later launches on the current stream may
    reuse the device memory that this takes beside `block`.
    """
    text, body = split(payload.numpy())
    chain = parse(text)
    start = payload.numel() - len(body)
    size = chain.max_bytes(layout)
    if chain == RAW_CHAIN:
        block.copy_(payload[start : start + size], non_blocking=True)
        return
    source = payload[start : start + size].to(block.device, non_blocking=True)
    lead = chain.leading_bytes(layout)
    kept = source[:lead]
    source = source[lead:]
    if isinstance(chain.pack, Groups):
        restore_groups(layout, chain.pack, source, block)
    elif isinstance(chain.pack, NonUniform):
        restore_nonuniform(layout, chain.pack, source, block)
    else:
        assert isinstance(chain.pack, Raw), chain
        block.copy_(source)
    for step in reversed(chain.arrays):
        assert isinstance(step, InverseRope), step
        rotate_keys(layout, step, block)
    if chain.leading is not None:
        put_back_leading(layout, chain.leading, kept, block)


def restore_groups(
    layout: BlockLayout, pack: Groups, source: torch.Tensor, block: torch.Tensor
) -> None:
    """Fill `block` (uint8 `[block_bytes]`) as `Groups.decode` does, on the device of both."""
    at = 0
    for part in parts_of(layout):
        fields = pack.fields(part)
        powers, zeros, scales, codes = _arrays(source, at, fields)
        at += packed_bytes(fields)
        zeros, scales = (some.float() * powers.view(-1, 1, 1) for some in (zeros, scales))
        numbers = _codes(codes, pack.bits, part.tokens).float()
        dim, length = (1, part.tokens) if part.name == KEYS else (2, part.channels)
        for index, first in enumerate(range(0, length, pack.group)):
            some = numbers.narrow(dim, first, min(pack.group, length - first))
            some.mul_(scales.narrow(dim, index, 1)).add_(zeros.narrow(dim, index, 1))
        _write(layout, part, numbers, block)


def restore_nonuniform(
    layout: BlockLayout, pack: NonUniform, source: torch.Tensor, block: torch.Tensor
) -> None:
    """Fill `block` (uint8 `[block_bytes]`) as `NonUniform.decode` does, on the device of both."""
    at = 0
    for part in parts_of(layout):
        fields = pack.fields(part, layout)
        powers, levels, zeros, scales, kept, places, codes = _arrays(source, at, fields)
        at += packed_bytes(fields)
        coded = _bits(codes, part.tokens).int()
        coded += torch.arange(part.layers, device=coded.device).int().view(-1, 1, 1) << pack.bits
        numbers = levels.flatten().index_select(0, coded.flatten()).view(coded.shape)
        across = 2 - (part.name == KEYS)  # the vectors' dimension is the other one
        zero, scale = ((some.float() * powers[:, None]) for some in (zeros, scales))
        numbers.mul_(scale.unsqueeze(across)).add_(zero.unsqueeze(across))
        _write(layout, part, numbers, block)
        if kept.numel():
            if across == 1:
                kept = kept.transpose(1, 2)
                places = places.transpose(1, 2)
            mask = 2 ** (8 * places.element_size()) - 1
            _planes(layout, part, block).scatter_(across, places.long() & mask, kept)


def put_back_leading(
    layout: BlockLayout, step: Leading, kept: torch.Tensor, block: torch.Tensor
) -> None:
    """Fill the first rows of `block` (uint8 `[block_bytes]`) as `Leading.put_back` does, on the
    device of both."""
    (group,) = layout.groups
    words = kept[: step.tokens * group.row_bytes].view(_word(layout)).view(group.layers, -1)
    for part, rows in zip(
        parts_of(layout),
        words.split([step.tokens * part.channels for part in parts_of(layout)], dim=1),
        strict=True,
    ):
        planes = _planes(layout, part, block)[:, : step.tokens]
        planes.copy_(rows.reshape(planes.shape))


def rotate_keys(layout: BlockLayout, step: InverseRope, block: torch.Tensor) -> None:
    """Rotate the keys of `block` (uint8 `[block_bytes]`) as `InverseRope.decode` does, in place."""
    for part in parts_of(layout):
        if part.name == KEYS:
            pairs = _planes(layout, part, block).view(_dtype(layout)).float()
            pairs = pairs.unflatten(2, (-1, 2, step.head // 2))
            left, right = pairs.unbind(3)
            cos, sin = (some.unsqueeze(1) for some in _cos_sin(step, part.tokens, block.device))
            rotated = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=3)
            _write(layout, part, rotated.flatten(2), block)


@lru_cache(maxsize=8)
def _cos_sin(
    step: InverseRope, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 `[tokens, head / 2]`."""
    both = torch.from_numpy(np.stack(rotations(step.theta, step.head, tokens)))
    if device.type == "cuda":  # from pageable memory the host would wait for the stream
        both = both.pin_memory()
    cos, sin = both.to(device, non_blocking=True)
    return cos, sin


def _dtype(layout: BlockLayout) -> torch.dtype:
    """Of a layout that lossy codecs take."""
    (group,) = layout.groups
    found = getattr(torch, group.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _word(layout: BlockLayout) -> torch.dtype:
    return _SAME_SIZE[_dtype(layout).itemsize]


def _planes(layout: BlockLayout, part: Part, block: torch.Tensor) -> torch.Tensor:
    """The part's numbers in a block, as whole numbers of their bits, `[layers, tokens,
    channels]`."""
    words = block.view(_word(layout))
    shape = (part.layers, part.tokens, part.channels)
    return words.as_strided(shape, (part.stride, part.channels, 1), part.start)


def _write(layout: BlockLayout, part: Part, numbers: torch.Tensor, block: torch.Tensor) -> None:
    """Round float32 `[layers, tokens, channels]` into their places. `numbers` is used up."""
    dtype = _dtype(layout)
    if dtype == torch.float16:
        numbers.clamp_(-_HALF_MAX, _HALF_MAX)
    _planes(layout, part, block).view(dtype).copy_(numbers)


def _arrays(source: torch.Tensor, at: int, fields: Sequence[Field]) -> list[torch.Tensor]:
    """As `packed_arrays`; whole numbers by their bits."""
    arrays = []
    for kind, shape in fields:
        dtype = np.dtype(kind)
        count = dtype.itemsize * math.prod(shape)
        raw = source[at : at + count]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        same = getattr(torch, dtype.name) if dtype.kind == "f" else _SAME_SIZE[dtype.itemsize]
        arrays.append(raw.view(same).view(shape))
        at += count
    return arrays


def _codes(codes: torch.Tensor, bits: int, tokens: int) -> torch.Tensor:
    """uint8 `[layers, tokens, channels]`."""
    if bits == 8:
        return codes
    both = torch.stack((codes & 15, codes >> 4), dim=2)
    return both.flatten(1, 2)[:, :tokens]


def _bits(codes: torch.Tensor, tokens: int) -> torch.Tensor:
    """uint8 `[layers, tokens, channels]` of planes of bits `[layers, bits, bytes, channels]`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device).view(8, 1)
    layers, bits, rows, channels = codes.shape
    coded = codes.new_zeros((layers, rows, 8, channels))
    for bit in range(bits):
        coded |= ((codes[:, bit].unsqueeze(2) >> shifts) & 1) << bit
    return coded.flatten(1, 2)[:, :tokens]
