"""kvquant: few bits a number, and the largest numbers kept as they are.

KVQuant (Hooper et al., arXiv 2401.18079):

- Keys are normalised channel by channel, values token by token (section 3.1).
- About 1 % of each vector, the numbers farthest from its mean, are kept as they are. The rest gets
  a tighter range (dense-and-sparse, 3.4).
- The first token of a prompt (3.5): `pipeline.Leading`. Keys before RoPE (3.2): `rope`.

One difference: the paper learns the levels of a plane on calibration data, and weights errors by
gradients (nuqX, 3.3). A cache has neither. Levels that are fitted to the plane itself lose more
than even ones (benchmarks/reports/codecs.md#what-was-tried), so levels are even. The format has
them for each plane, though.
"""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_cake.codecs.block_arrays import KEYS, Block, Part, Words, parts_of
from sglang_cake.codecs.codec_steps import (
    Bytes,
    Field,
    Malformed,
    Unencodable,
    check_lossy,
    packed_arrays,
    packed_bytes,
)
from sglang_cake.codecs.groups import grid, unpacked
from sglang_cake.codecs.kernels import all_finite, compiled, word
from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout

OUTLIERS = 0.01  # share of the numbers of a vector that are kept as they are
MIN_VECTOR = 64  # shorter vectors keep none: one number would be a larger share


@dataclass(frozen=True, slots=True)
class NonUniform:
    """Implements `PackStep`. For each part the arrays of `fields`. Bit `t` of
    byte `i` of plane `b` of the codes is bit `b` of the code of token `8 * i + t`."""

    bits: int

    name: ClassVar[str] = "nonuniform"
    loses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 4:
            raise ValueError(f"{self.bits!r} bits")

    def max_bytes(self, layout: BlockLayout) -> int:
        check_lossy(layout)
        return sum(packed_bytes(self.fields(part, layout)) for part in parts_of(layout))

    def fields(self, part: Part, layout: BlockLayout) -> list[Field]:
        """The packed arrays of a part. A plane has `vectors` vectors of `numbers` numbers. Of each
        vector, `kept` numbers are kept as they are."""
        vectors, numbers = part.tokens, part.channels
        if part.name == KEYS:
            vectors, numbers = numbers, vectors
        kept = max(1, round(OUTLIERS * numbers)) if numbers >= MIN_VECTOR else 0
        place_type = np.uint8 if numbers <= 256 else np.uint32 if numbers > 65536 else np.uint16
        kept_type = np.uint32 if DTYPE_BYTES[layout.groups[0].dtype] == 4 else np.uint16
        return [
            (np.float32, (part.layers,)),  # powers of two
            (np.float32, (part.layers, 2**self.bits)),  # levels in 0 to 1
            (np.float16, (part.layers, vectors)),  # zeros
            (np.float16, (part.layers, vectors)),  # scales
            (kept_type, (part.layers, vectors, kept)),
            (place_type, (part.layers, vectors, kept)),  # their indices in the vector
            (np.uint8, (part.layers, self.bits, -(-part.tokens // 8), part.channels)),  # codes
        ]

    def encode(self, block: Block, out: Bytes) -> int:
        if not all_finite(block.words, block.kind):
            raise Unencodable
        at = 0
        for part in block.parts:
            fields = self.fields(part, block.layout)
            size = packed_bytes(fields)
            out[at : at + size] = 0  # also between the arrays
            powers, levels, zeros, scales, kept, places, codes = packed_arrays(out, at, fields)
            at += size
            along = part.name == KEYS
            numbers = np.ascontiguousarray(_vectors(block.floats(part), along))
            lows, highs = np.empty(zeros.shape, np.float32), np.empty(zeros.shape, np.float32)
            set_apart(numbers, places, lows, highs)
            kept[:] = np.take_along_axis(_vectors(block.words_of(part), along), places, axis=2)
            power, zero, scale = grid(lows[:, None], highs[:, None], 1)
            powers[:], zeros[:], scales[:] = power, zero[:, 0], scale[:, 0]
            zero, scale = unpacked(power, zero, scale)
            with np.errstate(divide="ignore"):
                inverse = np.where(scale > 0, 1 / scale, 0).astype(np.float32)
            numbers -= zero.swapaxes(1, 2)
            numbers *= inverse.swapaxes(1, 2)  # those that are not set apart lie in 0 to 1 now
            levels[:] = np.linspace(0, 1, 2**self.bits)
            assign(numbers, (levels[:, 1:] + levels[:, :-1]) / 2, along, codes)
        return at

    def decode(self, data: Bytes, block: Block) -> None:
        if len(data) != self.max_bytes(block.layout):
            raise Malformed(f"{len(data)} bytes, {self.max_bytes(block.layout)} expected")
        self.check(block.layout, data)
        at = 0
        for part in block.parts:
            fields = self.fields(part, block.layout)
            powers, levels, zeros, scales, kept, places, codes = packed_arrays(data, at, fields)
            at += packed_bytes(fields)
            zero, scale = unpacked(powers, zeros[:, None], scales[:, None])
            place = (block.words, *part.place)
            along = part.name == KEYS
            table = np.ascontiguousarray(levels)
            restore(*place, block.kind, along, table, zero[:, 0], scale[:, 0], codes)
            put_back(*place, along, places, kept)

    def check(self, layout: BlockLayout, data: Bytes) -> None:
        """Check that all places lie in their vectors: the compiled loops do not.

        Args: data: `max_bytes` bytes.
        Raises: Malformed.
        """
        at = 0
        for part in parts_of(layout):
            fields = self.fields(part, layout)
            places = packed_arrays(data, at, fields)[5]
            at += packed_bytes(fields)
            numbers = part.tokens if part.name == KEYS else part.channels
            if places.size and int(places.max()) >= numbers:
                raise Malformed("a number is kept for a place outside of its vector")


def _vectors(planes: Words, along: bool) -> Words:
    """Planes `[layers, tokens, channels]` as vectors: `along` the tokens of a channel, or else the
    channels of a token."""
    return planes.swapaxes(1, 2) if along else planes


@compiled
def set_apart(numbers, places, lows, highs):
    """Fill `places` with the numbers farthest from their vector's mean; `lows` and `highs` with the
    smallest and the largest of the others."""
    layers, vectors, count = numbers.shape
    kept = places.shape[2]
    for layer in range(layers):
        for v in range(vectors):
            vector = numbers[layer, v]
            mean = np.float32(0)
            for i in range(count):
                mean += vector[i] / np.float32(count)
            apart = np.zeros(count, np.bool_)
            for nth in range(kept):
                farthest, at = np.float32(-1), 0
                for i in range(count):
                    far = abs(vector[i] - mean)
                    if far > farthest and not apart[i]:
                        farthest, at = far, i
                apart[at] = True
                places[layer, v, nth] = at
            low, high = np.float32(np.inf), np.float32(-np.inf)
            for i in range(count):
                if not apart[i]:
                    low, high = min(low, vector[i]), max(high, vector[i])
            lows[layer, v], highs[layer, v] = low, high


@compiled
def put_back(words, start, stride, layers, tokens, channels, along, places, kept):
    """Words that were kept as they are, at their `places`."""
    for layer in range(layers):
        at = start + layer * stride
        for v in range(places.shape[1]):
            for nth in range(places.shape[2]):
                i = np.int64(places[layer, v, nth])
                words[at + (i * channels + v if along else v * channels + i)] = kept[layer, v, nth]


@compiled
def assign(numbers, borders, along, codes):
    """Fill `codes`: the code of a number is how many borders lie below it."""
    layers, vectors, length = numbers.shape
    bits = codes.shape[1]
    below = np.empty(length, np.uint8)
    for layer in range(layers):
        for v in range(vectors):
            vector = numbers[layer, v]
            below[:] = 0
            for b in range(borders.shape[1]):
                border = borders[layer, b]
                for i in range(length):
                    below[i] += vector[i] > border
            for i in range(length):
                token, c = (i, v) if along else (v, i)
                for bit in range(bits):
                    codes[layer, bit, token // 8, c] |= ((below[i] >> bit) & 1) << (token % 8)


@compiled
def restore(
    words, start, stride, layers, tokens, channels, kind, along, levels, zeros, scales, codes
):
    """Numbers from their codes. `put_back` then replaces the ones that were set apart."""
    bits = codes.shape[1]
    coded = np.empty(channels, np.uint8)
    for layer in range(layers):
        table = levels[layer]
        for token in range(tokens):
            at = start + layer * stride + token * channels
            filled, shift = words[at : at + channels], token % 8
            first = codes[layer, 0, token // 8]
            for c in range(channels):
                coded[c] = (first[c] >> shift) & 1
            for bit in range(1, bits):
                row = codes[layer, bit, token // 8]
                for c in range(channels):
                    coded[c] |= ((row[c] >> shift) & 1) << bit
            if along:
                zero, scale = zeros[layer], scales[layer]
                for c in range(channels):
                    filled[c] = word(table[coded[c]] * scale[c] + zero[c], kind)
            else:
                z, s = zeros[layer, token], scales[layer, token]
                for c in range(channels):
                    filled[c] = word(table[coded[c]] * s + z, kind)
