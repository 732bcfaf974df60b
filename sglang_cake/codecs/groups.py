"""int8 and int4: groups of numbers on an even grid between the smallest and the largest.

Asymmetric, as in KIVI (arXiv 2402.02750, section 3). Keys form groups along the tokens of one
channel, since a few channels of K are large for every token. All other numbers form groups along
the channels of one token. A group has a scale and a zero in float16, relative to a power of two of
its plane, so that neither the range of bfloat16 nor subnormal numbers are lost.
"""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sglang_cake.codecs.block_arrays import KEYS, Block, Part, parts_of
from sglang_cake.codecs.codec_steps import (
    Bytes,
    Field,
    Malformed,
    Unencodable,
    check_lossy,
    is_whole,
    packed_arrays,
    packed_bytes,
)
from sglang_cake.codecs.kernels import all_finite, compiled, number, word
from sglang_cake.core.layout import BlockLayout

# The largest number of a plane must lie between these: otherwise float32 cannot hold its scales or
# ranges exactly enough.
SMALLEST, LARGEST = 2.0**-100, 2.0**120
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Groups:
    """Implements `PackStep`. For each part the arrays of `fields`. Of codes of 4 bits, two tokens
    share a byte: the first one has the lower bits."""

    bits: int
    group: int = 128  # tokens of a channel for keys, channels of a token for the others

    name: ClassVar[str] = "groups"
    loses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or type(self.bits) is not int:
            raise ValueError(f"{self.bits!r} bits")
        if not is_whole(self.group, 8, 65536):
            raise ValueError(f"groups of {self.group!r}")

    def max_bytes(self, layout: BlockLayout) -> int:
        check_lossy(layout)
        return sum(packed_bytes(self.fields(part)) for part in parts_of(layout))

    def fields(self, part: Part) -> list[Field]:
        """The packed arrays of a part."""
        rows, columns = part.tokens, -(-part.channels // self.group)
        if part.name == KEYS:
            rows, columns = -(-part.tokens // self.group), part.channels
        coded_rows = part.tokens if self.bits == 8 else -(-part.tokens // 2)
        return [
            (np.float32, (part.layers,)),  # powers of two
            (np.float16, (part.layers, rows, columns)),  # zeros
            (np.float16, (part.layers, rows, columns)),  # scales
            (np.uint8, (part.layers, coded_rows, part.channels)),  # codes
        ]

    def encode(self, block: Block, out: Bytes) -> int:
        if not all_finite(block.words, block.kind):
            raise Unencodable
        at = 0
        for part in block.parts:
            fields = self.fields(part)
            size = packed_bytes(fields)
            out[at : at + size] = 0
            powers, zeros, scales, codes = packed_arrays(out, at, fields)
            at += size
            kind, along = block.kind, part.name == KEYS
            lows, highs = np.empty(zeros.shape, np.float32), np.empty(zeros.shape, np.float32)
            place = (block.words, *part.place)
            extremes(*place, self.group, kind, along, lows, highs)
            powers[:], zeros[:], scales[:] = grid(lows, highs, 2**self.bits - 1)
            zero, scale = unpacked(powers, zeros, scales)
            with np.errstate(divide="ignore"):
                inverse = np.where(scale > 0, 1 / scale, 0).astype(np.float32)
            quantise(*place, self.group, kind, along, zero, inverse, self.bits, codes)
        return at

    def decode(self, data: Bytes, block: Block) -> None:
        if len(data) != self.max_bytes(block.layout):
            raise Malformed(f"{len(data)} bytes, {self.max_bytes(block.layout)} expected")
        at = 0
        for part in block.parts:
            fields = self.fields(part)
            powers, zeros, scales, codes = packed_arrays(data, at, fields)
            at += packed_bytes(fields)
            zero, scale = unpacked(powers, zeros, scales)
            along = part.name == KEYS
            place = (block.words, *part.place)
            restore(*place, self.group, block.kind, along, zero, scale, self.bits, codes)


def grid(lows: Floats, highs: Floats, steps: int) -> tuple[Floats, Any, Any]:
    """A grid of `steps` steps for each group, which covers `lows` to `highs`.

    Args: lows, highs: float32 `[layers, rows, columns]`.
    Returns: powers of two (float32 `[layers]`), zeros and scales (float16, of the shape of `lows`).
    Raises: Unencodable if the largest number of a plane is outside SMALLEST to LARGEST.
    """
    largest = np.maximum(np.abs(lows), np.abs(highs)).max(axis=(1, 2), initial=0)
    if not np.all((largest == 0) | (largest >= SMALLEST) & (largest <= LARGEST)):
        raise Unencodable
    powers = np.ones_like(largest)
    np.exp2(np.floor(np.log2(largest, where=largest > 0, out=powers)), out=powers)
    powers[largest == 0] = 1
    by_plane = powers[:, None, None]
    zeros = np.asarray(lows / by_plane).astype(np.float16)
    above = zeros.astype(np.float32) * by_plane > lows
    zeros = np.where(above, np.nextafter(zeros, np.float16(-np.inf)), zeros)
    wanted = (highs - zeros.astype(np.float32) * by_plane) / by_plane / steps
    scales = wanted.astype(np.float16)
    below = scales.astype(np.float32) < wanted
    scales = np.where(below, np.nextafter(scales, np.float16(np.inf)), scales)
    return powers, zeros, scales


def unpacked(powers: Floats, zeros: Any, scales: Any) -> tuple[Floats, Floats]:
    """Zeros and scales in float32, as decoding uses them."""
    by_plane = powers[:, None, None]
    with np.errstate(all="ignore"):  # hostile bytes may overflow
        return zeros.astype(np.float32) * by_plane, scales.astype(np.float32) * by_plane


@compiled
def extremes(words, start, stride, layers, tokens, channels, group, kind, along, lows, highs):
    """Smallest and largest of every group. All numbers are finite."""
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            row = words[at : at + channels]
            if along:
                low, high = lows[layer, token // group], highs[layer, token // group]
                if token % group == 0:
                    for c in range(channels):
                        low[c] = high[c] = number(row[c], kind)
                for c in range(channels):
                    x = number(row[c], kind)
                    low[c] = x if x < low[c] else low[c]
                    high[c] = x if x > high[c] else high[c]
            else:
                for first in range(0, channels, group):
                    some = row[first : first + group]
                    least = most = number(some[0], kind)
                    for i in range(len(some)):
                        x = number(some[i], kind)
                        least = x if x < least else least
                        most = x if x > most else most
                    lows[layer, token, first // group] = least
                    highs[layer, token, first // group] = most


@compiled
def quantise(
    words, start, stride, layers, tokens, channels, group, kind, along, zeros, inverses, bits, codes
):
    """The nearest code of every number. Two tokens share a byte when `bits` is 4."""
    zero, inverse = np.empty(channels, np.float32), np.empty(channels, np.float32)
    coded = np.empty(channels, np.uint8)
    most = np.float32(2**bits - 1)
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            source = words[at : at + channels]
            if along:
                zero[:] = zeros[layer, token // group]
                inverse[:] = inverses[layer, token // group]
            else:
                for first in range(0, channels, group):
                    zero[first : first + group] = zeros[layer, token, first // group]
                    inverse[first : first + group] = inverses[layer, token, first // group]
            for c in range(channels):
                x = (number(source[c], kind) - zero[c]) * inverse[c] + np.float32(0.5)
                x = min(max(x, np.float32(0)), most)
                coded[c] = np.uint8(np.int32(x))
            row = codes[layer, token if bits == 8 else token // 2]
            if bits == 8 or token % 2 == 0:
                row[:] = coded
            else:
                for c in range(channels):
                    row[c] |= coded[c] << 4


@compiled
def restore(
    words, start, stride, layers, tokens, channels, group, kind, along, zeros, scales, bits, codes
):
    """Numbers from their codes."""
    coded = np.empty(channels, np.uint8)
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            filled = words[at : at + channels]
            row = codes[layer, token if bits == 8 else token // 2]
            shift, mask = (0, 255) if bits == 8 else (4 * (token % 2), 15)
            for c in range(channels):
                coded[c] = (row[c] >> shift) & mask
            if along:
                zero, scale = zeros[layer, token // group], scales[layer, token // group]
                for c in range(channels):
                    filled[c] = word(np.float32(coded[c]) * scale[c] + zero[c], kind)
            else:
                for first in range(0, channels, group):
                    z, s = zeros[layer, token, first // group], scales[layer, token, first // group]
                    some, into = coded[first : first + group], filled[first : first + group]
                    for i in range(len(some)):
                        into[i] = word(np.float32(some[i]) * s + z, kind)
