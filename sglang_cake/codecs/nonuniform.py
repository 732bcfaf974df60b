"""kvquant: few bits on levels that are learned, and the few largest numbers beside them.

KVQuant (Hooper et al., arXiv 2401.18079): keys are normalised channel by channel and values token
by token (section 3.1); each plane has its own levels, which lie where its numbers do (nuqX, 3.3);
about 1 % of each vector, those farthest out, are kept as they are, and the rest gets a tighter
range (dense-and-sparse, 3.4). Where this differs: the paper learns levels on calibration data and
weights errors by gradients; here a plane's levels are fitted to the plane itself (Lloyd's rule,
unweighted), since a cache has neither. The first token of a prompt (3.5): see `leading`. Keys
before RoPE (3.2): see `rope`.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_cake.codecs.blocks import KEYS, KINDS, Block, Part, parts_of
from sglang_cake.codecs.groups import Floats, grid, unpacked
from sglang_cake.codecs.steps import Bytes, Malformed, Unencodable, taken
from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout

OUTLIERS = 0.01  # share of a vector that is kept as it is
MIN_VECTOR = 64  # shorter ones keep none: one number would be a larger share
BINS = 1024  # of the histogram that levels are fitted to
ROUNDS = 30
_ALIGN = 8


class Section(NamedTuple):
    """One part: how many vectors of how many numbers a plane has, and what is kept of each."""

    layers: int
    vectors: int
    numbers: int
    kept: int
    coded: tuple[int, int, int, int]  # layers, bits, bytes of eight tokens, channels
    index: Any  # dtype of a place in a vector
    word: Any  # dtype of a number that is kept as it is

    def fields(self) -> list[tuple[Any, tuple[int, ...]]]:
        """What is packed, in order: (dtype, shape)."""
        rows = (self.layers, self.vectors)
        return [
            (np.float32, (self.layers,)),  # powers of two
            (np.float32, (self.layers, 2 ** self.coded[1])),  # levels, of 0 to 1
            (np.float16, rows),  # zeros
            (np.float16, rows),  # scales
            (self.word, (*rows, self.kept)),
            (self.index, (*rows, self.kept)),
            (np.uint8, self.coded),
        ]

    @property
    def size(self) -> int:
        size: int = sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in self.fields())
        return -(-size // _ALIGN) * _ALIGN


@dataclass(frozen=True, slots=True)
class NonUniform:
    """Implements `PackStep`. For each part what `Section.fields` lists. Bit `t` of byte `i` of
    plane `b` of the codes is bit `b` of the code of token `8 * i + t`."""

    bits: int

    name: ClassVar[str] = "nonuniform"
    loses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 4:
            raise ValueError(f"{self.bits!r} bits")

    def max_bytes(self, layout: BlockLayout) -> int:
        if layout.dtype not in KINDS:
            raise Malformed(f"{layout.dtype} has no bits to lose")
        return sum(self.section(part, layout).size for part in parts_of(layout))

    def section(self, part: Part, layout: BlockLayout) -> Section:
        """How one part is packed."""
        vectors, numbers = part.tokens, part.channels
        if part.name == KEYS:
            vectors, numbers = numbers, vectors
        kept = max(1, round(OUTLIERS * numbers)) if numbers >= MIN_VECTOR else 0
        return Section(
            *(part.layers, vectors, numbers, kept),
            coded=(part.layers, self.bits, -(-part.tokens // 8), part.channels),
            index=np.uint8 if numbers <= 256 else np.uint32 if numbers > 65536 else np.uint16,
            word=np.uint32 if DTYPE_BYTES[layout.dtype] == 4 else np.uint16,
        )

    def encode(self, block: Block, out: Bytes) -> int:
        from sglang_cake.codecs import nonuniform_kernels as kernels
        from sglang_cake.codecs.kernels import all_finite

        if not all_finite(block.words, block.kind):
            raise Unencodable
        at = 0
        for part in block.parts:
            section = self.section(part, block.layout)
            powers, levels, zeros, scales, kept, places, codes = self._views(out, at, section)
            rows = (section.layers, section.vectors)
            numbers = np.empty((*rows, section.numbers), np.float32)
            lows, highs = np.empty(rows, np.float32), np.empty(rows, np.float32)
            place = (block.words, part.start, part.stride, part.layers, part.tokens, part.channels)
            along = part.name == KEYS
            kernels.gather(*place, block.kind, along, numbers)
            kernels.set_apart(numbers, places, lows, highs)
            kernels.keep(*place, along, places, kept)
            power, zero, scale = grid(lows[:, None], highs[:, None], 1)
            powers[:], zeros[:], scales[:] = power, zero[:, 0], scale[:, 0]
            zero, scale = unpacked(power, zero, scale)
            kernels.normalise(numbers, zero[:, 0], scale[:, 0])
            counts = np.zeros((section.layers, BINS), np.int64)
            kernels.count(numbers, counts)
            for layer in range(section.layers):
                levels[layer] = fitted(counts[layer], 2**self.bits)
            codes[:] = 0
            kernels.assign(numbers, (levels[:, 1:] + levels[:, :-1]) / 2, along, codes)
            at += section.size
        return at

    def decode(self, data: Bytes, block: Block) -> None:
        from sglang_cake.codecs import nonuniform_kernels as kernels

        if len(data) != self.max_bytes(block.layout):
            raise Malformed(f"{len(data)} bytes, {self.max_bytes(block.layout)} expected")
        self.check(block.layout, data)
        at = 0
        for part in block.parts:
            section = self.section(part, block.layout)
            powers, levels, zeros, scales, kept, places, codes = self._views(data, at, section)
            zero, scale = unpacked(powers, zeros[:, None], scales[:, None])
            place = (block.words, part.start, part.stride, part.layers, part.tokens, part.channels)
            along = part.name == KEYS
            kernels.restore(
                *(*place, block.kind, along, np.ascontiguousarray(levels)),
                *(zero[:, 0], scale[:, 0], codes),
            )
            kernels.put_back(*place, along, places, kept)
            at += section.size

    def check(self, layout: BlockLayout, data: Bytes) -> None:
        """Whether all places lie in their vectors. Raises: Malformed.

        Args: data: of `max_bytes`.
        """
        at = 0
        for part in parts_of(layout):
            section = self.section(part, layout)
            places = self._views(data, at, section)[5]
            if places.size and int(places.max()) >= section.numbers:
                raise Malformed("a number is kept for a place that there is not")
            at += section.size

    def _views(self, data: Bytes, at: int, section: Section) -> list[Any]:
        views = []
        for kind, shape in section.fields():
            views.append(taken(data, at, int(np.prod(shape)), kind).reshape(shape))
            at += views[-1].nbytes
        return views


def fitted(counts: npt.NDArray[np.int64], levels: int) -> Floats:
    """The levels, ascending in 0 to 1, that are nearest to what was counted (Lloyd, MacQueen).

    Args: counts: of bins of equal width.
    """
    middles = (np.arange(len(counts)) + 0.5) / len(counts)
    mass, moment = np.cumsum(counts), np.cumsum(counts * middles)
    if not mass[-1]:
        return np.linspace(0, 1, levels, dtype=np.float32)
    quantiles = (np.arange(levels) + 0.5) / levels * mass[-1]
    found = middles[np.searchsorted(mass, quantiles).clip(max=len(counts) - 1)]
    for _ in range(ROUNDS):
        borders = np.searchsorted(middles, (found[1:] + found[:-1]) / 2)
        borders = np.concatenate(([0], borders, [len(counts)]))
        masses = np.diff(np.concatenate(([0], mass))[borders])
        moments = np.diff(np.concatenate(([0.0], moment))[borders])
        found = np.where(masses > 0, moments / np.maximum(masses, 1), found)
    return np.asarray(np.sort(found), np.float32)
