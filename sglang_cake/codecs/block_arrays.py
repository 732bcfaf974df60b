"""A block's bytes as numbers: where each plane of K and V lies in them.

A plane is one part (`k`, `v`, or `kv` of MLA) of one layer: `[tokens, channels]` numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout

Words = npt.NDArray[Any]  # uint8, uint16 or uint32: the bits of the numbers
BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2  # `kind` in compiled loops: how the words are read
KINDS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
KEYS = "k"  # the part in which a channel has about the same size for every token
VALUES = "v"


@dataclass(frozen=True, slots=True)
class Part:
    """The planes of one name. Plane `i` is `[tokens, channels]` words, row-major, and begins at
    word `start + i * stride`."""

    name: str
    start: int
    stride: int
    layers: int
    tokens: int
    channels: int  # heads times head size

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """The arguments of compiled loops after the words of a block."""
        return self.start, self.stride, self.layers, self.tokens, self.channels

    @property
    def count(self) -> int:
        """Numbers of all planes."""
        return self.layers * self.tokens * self.channels


@lru_cache(maxsize=64)
def parts_of(layout: BlockLayout) -> tuple[Part, ...]:
    """The parts of a block of one group, in the order of the layout."""
    (group,) = layout.groups
    rows = layout.block_tokens // group.row_tokens
    widths = [math.prod(shape) for _, shape in group.parts]
    parts, start = [], 0
    for (name, _), channels in zip(group.parts, widths, strict=True):
        stride = rows * sum(widths)
        parts.append(Part(name, start, stride, group.layers, rows, channels))
        start += rows * channels
    return tuple(parts)


def takes_lossy(layout: BlockLayout) -> bool:
    """Whether lossy codecs take such blocks: they know K and V of equal layers, not an index; and
    numbers of 8 bits have no bits to lose."""
    return layout.is_plain and layout.groups[0].dtype in KINDS


def _words(dtype: str) -> Any:
    return _WORDS[DTYPE_BYTES[dtype]]


@dataclass(frozen=True, slots=True)
class Block:
    """Numbers of a block in the caller's memory, whose length was checked."""

    layout: BlockLayout
    words: Words  # flat, contiguous; single bytes if the layout has several groups

    @classmethod
    def over(cls, layout: BlockLayout, view: memoryview) -> "Block":
        """Args: view: `layout.block_bytes` bytes, aligned to the size of a word."""
        assert view.nbytes == layout.block_bytes, view.nbytes
        words = _words(layout.groups[0].dtype) if len(layout.groups) == 1 else np.uint8
        return cls(layout, np.frombuffer(view, words))

    def by_group(self) -> Iterator["Block"]:
        """The planes of each group as a block of its own, over the same memory."""
        memory, start = self.words.view(np.uint8), 0
        for group, size in zip(self.layout.groups, self.layout.group_bytes, strict=True):
            words = memory[start : start + size].view(_words(group.dtype))
            yield Block(BlockLayout((group,), self.layout.block_tokens), words)
            start += size

    @property
    def kind(self) -> int:
        """How the words of a block that `takes_lossy` are read."""
        return KINDS[self.layout.groups[0].dtype]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a block that has one group of planes."""
        return parts_of(self.layout)

    def planes(self) -> Iterator[Words]:
        """Each plane in the order of the block, `[tokens, channels]`: views, not copies."""
        parts = self.parts
        for layer in range(parts[0].layers):
            for part in parts:
                at = part.start + layer * part.stride
                words = self.words[at : at + part.tokens * part.channels]
                yield words.reshape(part.tokens, part.channels)

    def words_of(self, part: Part) -> Words:
        """The part's words, `[layers, tokens, channels]`: a view, not a copy."""
        size = self.words.itemsize
        return np.lib.stride_tricks.as_strided(
            self.words[part.start :],
            (part.layers, part.tokens, part.channels),
            (part.stride * size, part.channels * size, size),
        )

    def floats(self, part: Part) -> npt.NDArray[np.float32]:
        """The part's numbers in float32, `[layers, tokens, channels]`. They are a copy, twice as
        large as 16-bit words."""
        planes = self.words_of(part)
        if self.kind == BFLOAT16:
            return (planes.astype(np.uint32) << 16).view(np.float32)
        if self.kind == FLOAT16:
            return np.ascontiguousarray(planes).view(np.float16).astype(np.float32)
        return planes.copy().view(np.float32)


def relative_error(layout: BlockLayout, exact: memoryview, decoded: memoryview) -> float:
    """How far a decoded block is from the encoded one: the measure of `--cake-max-error`.

    The root of the mean, over the planes of K and V of every layer, of |decoded - exact|² /
    |exact|², with the Euclidean norm over the plane. A plane without a difference counts as 0.
    Infinite if a block has a number that is not finite.

    The KL divergence of a model's answer goes with the square of this error: on a real model it is
    0.5 to 0.9 times the square (docs/codecs.md). The error of the worst plane predicts it less
    well, since errors of all layers add up.
    """
    one, other = Block.over(layout, exact), Block.over(layout, decoded)
    total, planes = 0.0, 0
    for part in one.parts:
        numbers = one.floats(part).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.square(numbers - other.floats(part)).sum(axis=(1, 2))
            size = np.square(numbers).sum(axis=(1, 2))
            total += float(np.where(gap == 0, 0.0, gap / size).sum())
        planes += part.layers
    return float(np.sqrt(total / planes)) if np.isfinite(total) else np.inf
