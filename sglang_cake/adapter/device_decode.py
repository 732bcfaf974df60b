"""Decoding with torch, where KV is wanted: encoded bytes cross the bus, not whole blocks.

The same values as the compiled loops of `codec`, bit for bit: products and sums in float32, each
rounded, then to the nearest, ties to even. Which chains come here:
`catalogue.left_to_device`.
"""

import torch

from sglang_cake.codec.blocks import KEYS, parts_of
from sglang_cake.codec.groups import Groups
from sglang_cake.layout import BlockLayout

_HALF_MAX = 65504.0


def decode_payload(
    layout: BlockLayout, payload: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """The block (uint8 `[block_bytes]`, on `device`) that a payload in host memory begins with.

    Only its encoded bytes are copied to the device, without waiting for it: `payload` (uint8) must
    stay as it is until that is done. Its chain is one that `left_to_device` takes.
    """
    from sglang_cake.codec.catalogue import parse
    from sglang_cake.codec.chain import Raw, split

    text, body = split(payload.numpy())
    pack = parse(text).pack
    start, size = payload.numel() - len(body), pack.max_bytes(layout)
    source = payload[start : start + size].to(device, non_blocking=True)
    if isinstance(pack, Raw):
        return source
    assert isinstance(pack, Groups), pack
    block = torch.empty(layout.block_bytes, dtype=torch.uint8, device=device)
    restore_groups(layout, pack, source, block)
    return block


def restore_groups(
    layout: BlockLayout, pack: Groups, source: torch.Tensor, block: torch.Tensor
) -> None:
    """Fill `block` (uint8 `[block_bytes]`) as `Groups.decode` does, on the device of both."""
    words = block.view(getattr(torch, layout.dtype))
    at = 0
    for part in parts_of(layout):
        section = pack.section(part)
        layers, count = part.layers, section.stats_count
        powers = source[at : at + 4 * layers].view(torch.float32).view(-1, 1, 1)
        stats = source[at + 4 * layers : at + 4 * layers + 4 * count].view(torch.float16)
        codes_at = at + 4 * layers + 4 * count
        codes = source[codes_at : codes_at + section.codes_count].view(section.codes)
        zeros, scales = (half.view(section.stats).float() * powers for half in stats.view(2, -1))
        numbers = _codes(codes, pack.bits, part.tokens).float()
        dim, length = (1, part.tokens) if part.name == KEYS else (2, part.channels)
        for turn, first in enumerate(range(0, length, pack.group)):
            some = numbers.narrow(dim, first, min(pack.group, length - first))
            some.mul_(scales.narrow(dim, turn, 1)).add_(zeros.narrow(dim, turn, 1))
        if layout.dtype == "float16":
            numbers.clamp_(-_HALF_MAX, _HALF_MAX)
        shape = (layers, part.tokens, part.channels)
        words.as_strided(shape, (part.stride, part.channels, 1), part.start).copy_(numbers)
        at += section.size


def _codes(codes: torch.Tensor, bits: int, tokens: int) -> torch.Tensor:
    """uint8 `[layers, tokens, channels]`."""
    if bits == 8:
        return codes
    both = torch.stack((codes & 15, codes >> 4), dim=2)
    return both.flatten(1, 2)[:, :tokens]
