"""int8 and int4: groups of numbers on an even grid between the smallest and the largest.

Asymmetric, as in KIVI (arXiv 2402.02750, section 3): keys in groups along the tokens of one
channel, since a few channels of K are large for every token; everything else in groups along the
channels of one token. A group has a scale and a zero in float16, relative to a power of two of its
plane, so that neither the range of bfloat16 nor subnormal numbers are lost.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_cake.codecs.blocks import KEYS, KINDS, Block, Part, parts_of
from sglang_cake.codecs.steps import Bytes, Malformed, Unencodable, is_whole, taken
from sglang_cake.core.layout import BlockLayout

# A plane whose numbers are all smaller, or one of them larger, has scales or ranges that a float32
# does not hold well.
SMALLEST, LARGEST = 2.0**-100, 2.0**120
Floats = npt.NDArray[np.float32]
_ALIGN = 8


class Section(NamedTuple):
    """Where one part's numbers lie in the packed bytes."""

    stats: tuple[int, int, int]  # shape of zeros, and of scales
    codes: tuple[int, int, int]  # shape of the bytes that hold the codes
    size: int

    @property
    def stats_count(self) -> int:
        return self.stats[0] * self.stats[1] * self.stats[2]

    @property
    def codes_count(self) -> int:
        return self.codes[0] * self.codes[1] * self.codes[2]


@dataclass(frozen=True, slots=True)
class Groups:
    """Implements `PackStep`. For each part: the powers of two (float32, one a plane), the zeros
    and the scales (float16), the codes (4 bits: tokens in pairs, the first in the lower bits)."""

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
        if layout.dtype not in KINDS:
            raise Malformed(f"{layout.dtype} has no bits to lose")
        return sum(self.section(part).size for part in parts_of(layout))

    def section(self, part: Part) -> Section:
        """How one part is packed."""
        rows, columns = part.tokens, -(-part.channels // self.group)
        if part.name == KEYS:
            rows, columns = -(-part.tokens // self.group), part.channels
        coded_rows = part.tokens if self.bits == 8 else -(-part.tokens // 2)
        stats, codes = (part.layers, rows, columns), (part.layers, coded_rows, part.channels)
        size = 4 * part.layers + 4 * int(np.prod(stats)) + int(np.prod(codes))
        return Section(stats, codes, -(-size // _ALIGN) * _ALIGN)

    def encode(self, block: Block, out: Bytes) -> int:
        from sglang_cake.codecs import group_kernels as kernels
        from sglang_cake.codecs.kernels import all_finite

        if not all_finite(block.words, block.kind):
            raise Unencodable
        at = 0
        for part in block.parts:
            section = self.section(part)
            kind, along = block.kind, part.name == KEYS
            lows, highs = np.empty(section.stats, np.float32), np.empty(section.stats, np.float32)
            place = (block.words, part.start, part.stride, *_shape(part))
            kernels.extremes(*place, self.group, kind, along, lows, highs)
            powers, zeros, scales = grid(lows, highs, 2**self.bits - 1)
            out[at : at + section.size] = 0
            codes = _write(out, at, section, powers, zeros, scales)
            zero, scale = unpacked(powers, zeros, scales)
            with np.errstate(divide="ignore"):
                inverse = np.where(scale > 0, 1 / scale, 0).astype(np.float32)
            kernels.quantise(*place, self.group, kind, along, zero, inverse, self.bits, codes)
            at += section.size
        return at

    def decode(self, data: Bytes, block: Block) -> None:
        from sglang_cake.codecs import group_kernels as kernels

        if len(data) != self.max_bytes(block.layout):
            raise Malformed(f"{len(data)} bytes, {self.max_bytes(block.layout)} expected")
        at = 0
        for part in block.parts:
            section = self.section(part)
            powers, zeros, scales, codes = sections(data, at, section)
            zero, scale = unpacked(powers, zeros, scales)
            place = (block.words, part.start, part.stride, *_shape(part))
            restore = kernels.restore8 if self.bits == 8 else kernels.restore4
            restore(*place, self.group, block.kind, part.name == KEYS, zero, scale, codes)
            at += section.size


def _shape(part: Part) -> tuple[int, int, int]:
    return part.layers, part.tokens, part.channels


def grid(lows: Floats, highs: Floats, steps: int) -> tuple[Floats, Any, Any]:
    """Powers of two (float32 `[layers]`), zeros and scales (float16) that cover `lows` to `highs`.

    Raises: Unencodable for numbers too far from one.
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
    """Zeros and scales as the numbers are restored with, float32."""
    by_plane = powers[:, None, None]
    with np.errstate(all="ignore"):  # of bytes that no encoder made
        return zeros.astype(np.float32) * by_plane, scales.astype(np.float32) * by_plane


def sections(data: Bytes, at: int, section: Section) -> tuple[Any, Any, Any, Any]:
    """Powers, zeros, scales and codes of a part that begins at byte `at`. Raises: Malformed."""
    layers, count = section.stats[0], section.stats_count
    powers = taken(data, at, layers, np.float32)
    zeros = taken(data, at + 4 * layers, count, np.float16).reshape(section.stats)
    scales = taken(data, at + 4 * layers + 2 * count, count, np.float16).reshape(section.stats)
    codes_at = at + 4 * layers + 4 * count
    codes = taken(data, codes_at, section.codes_count, np.uint8).reshape(section.codes)
    return powers, zeros, scales, codes


def _write(out: Bytes, at: int, section: Section, powers: Any, zeros: Any, scales: Any) -> Any:
    """Write what is small; returns where the codes go."""
    for array in (powers, zeros, scales):
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        out[at : at + len(raw)] = raw
        at += len(raw)
    return out[at : at + section.codes_count].reshape(section.codes)
