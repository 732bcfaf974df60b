"""A block's bytes as numbers: where each plane of K and V lies in them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout

Words = npt.NDArray[Any]  # uint8, uint16 or uint32: the bits of the numbers
BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2  # how kernels are told what the words mean
KINDS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
KEYS = "k"  # the part whose channels keep their size from token to token
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
    def count(self) -> int:
        """Numbers of all planes."""
        return self.layers * self.tokens * self.channels


@lru_cache(maxsize=64)
def parts_of(layout: BlockLayout) -> tuple[Part, ...]:
    """The parts of a block, in the order of the layout."""
    tokens = layout.block_tokens
    widths = [math.prod(shape) for _, shape in layout.parts]
    parts, start = [], 0
    for (name, _), channels in zip(layout.parts, widths, strict=True):
        stride = tokens * sum(widths)
        parts.append(Part(name, start, stride, layout.layers, tokens, channels))
        start += tokens * channels
    return tuple(parts)


def takes_lossy(layout: BlockLayout) -> bool:
    """Whether the numbers have bits to lose."""
    return layout.dtype in KINDS


@dataclass(frozen=True, slots=True)
class Block:
    """Numbers of a block in the caller's memory, whose length was checked."""

    layout: BlockLayout
    words: Words  # flat, contiguous

    @classmethod
    def over(cls, layout: BlockLayout, view: memoryview) -> "Block":
        """Args: view: of `layout.block_bytes`, and at home on the word's size."""
        assert view.nbytes == layout.block_bytes, view.nbytes
        return cls(layout, np.frombuffer(view, _WORDS[DTYPE_BYTES[layout.dtype]]))

    @property
    def kind(self) -> int:
        """What the words mean. Raises: KeyError for numbers that lossy steps do not take."""
        return KINDS[self.layout.dtype]

    @property
    def parts(self) -> tuple[Part, ...]:
        return parts_of(self.layout)

    def planes(self) -> Iterator[Words]:
        """Each plane in the order of the block, `[tokens, channels]`; the block's own memory."""
        at, tokens = 0, self.layout.block_tokens
        for _ in range(self.layout.layers):
            for part in self.parts:
                yield self.words[at : at + tokens * part.channels].reshape(tokens, part.channels)
                at += tokens * part.channels

    def floats(self, part: Part) -> npt.NDArray[np.float32]:
        """The part's numbers in float32, `[layers, tokens, channels]`: a copy, for small things."""
        planes = np.lib.stride_tricks.as_strided(
            self.words[part.start :],
            (part.layers, part.tokens, part.channels),
            (
                part.stride * self.words.itemsize,
                part.channels * self.words.itemsize,
                self.words.itemsize,
            ),
        )
        if self.kind == BFLOAT16:
            return (planes.astype(np.uint32) << 16).view(np.float32)
        if self.kind == FLOAT16:
            return np.ascontiguousarray(planes).view(np.float16).astype(np.float32)
        return planes.copy().view(np.float32)
