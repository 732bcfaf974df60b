"""zstd: a shuffle of bytes, then zstd over all of them (RFC 8878, by the `zstandard` package).

zstd finds nothing in floating-point numbers as they are, since every other byte is noise. The
shuffle first moves the sign after the mantissa (a rotation by one bit), so that the uppermost byte
of a number is its whole exponent. Then it writes all uppermost bytes, then all second ones, and so
on, so that similar bytes lie side by side.
"""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import zstandard

from sglang_cake.codecs.block_arrays import Block, Part, Words
from sglang_cake.codecs.codec_steps import Bytes, Malformed, is_whole
from sglang_cake.codecs.kernels import compiled
from sglang_cake.core.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class BytePlanes:
    """The shuffle. Implements `PackStep`, without loss. For each part of each group the uppermost
    bytes of all its numbers, layer after layer, token after token; then the next bytes."""

    name: ClassVar[str] = "planes"
    loses: ClassVar[bool] = False

    def max_bytes(self, layout: BlockLayout) -> int:
        return layout.block_bytes

    def encode(self, block: Block, out: Bytes) -> int:
        at = 0
        for words, part in _parts(block):
            size = part.count * words.itemsize
            place = (words, *part.place)
            shuffle(*place, out[at : at + size].reshape(-1, part.count))
            at += size
        return at

    def decode(self, data: Bytes, block: Block) -> None:
        if len(data) != block.layout.block_bytes:
            raise Malformed(f"{len(data)} bytes, a block has {block.layout.block_bytes}")
        at = 0
        for words, part in _parts(block):
            size = part.count * words.itemsize
            place = (words, *part.place)
            unshuffle(*place, data[at : at + size].reshape(-1, part.count))
            at += size


def _parts(block: Block) -> Iterator[tuple[Words, Part]]:
    """The parts of all groups, with the words of their group."""
    for group in block.by_group():
        for part in group.parts:
            yield group.words, part


@dataclass(frozen=True, slots=True)
class Zstd:
    """Implements `BytesStep`. One frame, which says its length."""

    level: int = 1
    long: bool = False  # search for repeats in the whole block, not only in the last 100 kB or so

    name: ClassVar[str] = "zstd"

    def __post_init__(self) -> None:
        if not is_whole(self.level, -50, 22) or type(self.long) is not bool:
            raise ValueError(f"zstd of level {self.level!r}, long {self.long!r}")

    def max_bytes(self, size_bytes: int) -> int:
        return size_bytes + size_bytes // 255 + 64  # ZSTD_compressBound, rounded up

    def encode(self, data: Bytes, out: Bytes) -> int:
        params = zstandard.ZstdCompressionParameters.from_level(
            self.level, enable_ldm=self.long, write_content_size=1
        )
        # A new context, since none is thread-safe: it takes some microseconds.
        context = zstandard.ZstdCompressor(compression_params=params)
        compressed = np.frombuffer(context.compress(data.data), np.uint8)
        np.copyto(out[: len(compressed)], compressed)
        return len(compressed)

    def decode(self, data: Bytes, out: Bytes) -> int:
        # A frame of long mode needs a window as large as the block.
        context = zstandard.ZstdDecompressor(max_window_size=2**31)
        try:
            size = zstandard.frame_content_size(data.data)
            if not 0 <= size <= len(out):
                raise Malformed(f"a zstd frame of {size} bytes, at most {len(out)} expected")
            found = np.frombuffer(context.decompress(data.data), np.uint8)
        except zstandard.ZstdError as error:
            raise Malformed(str(error)) from None
        if len(found) != size:
            raise Malformed(f"a zstd frame has {len(found)} of {size} bytes")
        out[:size] = found
        return size


@compiled
def shuffle(words, start, stride, layers, tokens, channels, out):
    """Fill `out`, `[bytes of a number, numbers]`: row `p` has byte `p` of every number, the
    uppermost first."""
    count, size = len(out), tokens * channels
    top = 8 * count - 1
    for layer in range(layers):
        source = words[start + layer * stride : start + layer * stride + size]
        for plane in range(count):
            shift = 8 * (count - 1 - plane)
            into = out[plane, layer * size : (layer + 1) * size]
            for i in range(size):
                into[i] = ((source[i] << 1 | source[i] >> top) >> shift) & 255


@compiled
def unshuffle(words, start, stride, layers, tokens, channels, planes):
    """The inverse of `shuffle`."""
    count, size = len(planes), tokens * channels
    top = 8 * count - 1
    for layer in range(layers):
        filled = words[start + layer * stride : start + layer * stride + size]
        first, last = layer * size, (layer + 1) * size
        if count == 2:
            high, low = planes[0, first:last], planes[1, first:last]
            for i in range(size):
                w = high[i] << 8 | low[i]
                filled[i] = w >> 1 | (w & 1) << 15
        else:
            for i in range(size):
                w = 0
                for plane in range(count):
                    w = w << 8 | planes[plane, first + i]
                filled[i] = w >> 1 | (w & 1) << top
