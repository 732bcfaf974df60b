"""The shuffle in front of zstd: bytes that look alike lie side by side.

zstd finds nothing in floating-point numbers as they are, since every other byte is noise. Here the
sign first moves behind the mantissa (a rotation by one bit), so that the uppermost byte of a number
is its whole exponent; then all uppermost bytes come first, then all second ones, and so on.
"""

from dataclasses import dataclass
from typing import ClassVar

from sglang_cake.codecs.blocks import Block
from sglang_cake.codecs.steps import Bytes, Malformed
from sglang_cake.core.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class Planes:
    """Implements `PackStep`, without loss. For each part the uppermost bytes of all its numbers,
    layer after layer, token after token; then the next bytes."""

    name: ClassVar[str] = "planes"
    loses: ClassVar[bool] = False

    def max_bytes(self, layout: BlockLayout) -> int:
        return layout.block_bytes

    def encode(self, block: Block, out: Bytes) -> int:
        from sglang_cake.codecs.plane_kernels import take_apart

        at = 0
        for part in block.parts:
            size = part.count * block.words.itemsize
            place = (block.words, part.start, part.stride, part.layers, part.tokens, part.channels)
            take_apart(*place, out[at : at + size].reshape(-1, part.count))
            at += size
        return at

    def decode(self, data: Bytes, block: Block) -> None:
        from sglang_cake.codecs.plane_kernels import put_together

        if len(data) != block.layout.block_bytes:
            raise Malformed(f"{len(data)} bytes, a block has {block.layout.block_bytes}")
        at = 0
        for part in block.parts:
            size = part.count * block.words.itemsize
            place = (block.words, part.start, part.stride, part.layers, part.tokens, part.channels)
            put_together(*place, data[at : at + size].reshape(-1, part.count))
            at += size
