"""cachegen: neighbours' differences, coarser in later layers, arithmetic coding.

CacheGen (Liu et al., arXiv 2310.07240, section 5.2): tokens stand in groups of ten, and each is
coded as its difference to the first of its group; earlier layers, whose errors spread, are
quantised more finely; an arithmetic coder has a distribution for each channel of each layer. Where
this differs: numbers are first rounded to the grid of their plane, and the differences are between
whole numbers, so they add no error; a channel whose neighbours differ more than it does from its
mean is coded against the mean; distributions are two-sided geometric ones, of which a block names
one for each channel, instead of being measured on other prompts.

The coder (`constriction`, range coding) keeps the GIL, so it is called for a few thousand numbers
at a time.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_cake.codec.blocks import KINDS, Block, Part, parts_of
from sglang_cake.codec.steps import Bytes, Malformed, Unencodable, taken
from sglang_cake.layout import BlockLayout

Whole = npt.NDArray[np.int32]
TOKENS = 10  # of a group
LARGEST = 2**14  # of a number on its grid
AT_ONCE = 4096  # numbers that the coder is given: about 0.2 ms
CLASSES = 40  # of distributions: twice as wide every two
LAYERS = (0.5, 1.0, 1.5)  # steps of the first, the second, the last third of the layers
_HEAD = struct.Struct("<8sI")  # XXH3-64 of the differences, bytes of the coded words


@dataclass(frozen=True, slots=True)
class Entropy:
    """Implements `PackStep`. The head; for each part the steps (float32 `[layers]`), the first
    token or the mean (int16 `[layers, channels]`) and the class (uint8, the same shape; above it,
    bit 7: against the mean); the coded words.

    Args: step: of the grid, as a share of the root of the mean square of the plane.
    """

    step: float

    name: ClassVar[str] = "entropy"

    def __post_init__(self) -> None:
        if type(self.step) is not float or not 0.01 <= self.step <= 2:
            raise ValueError(f"a step of {self.step!r}")

    def max_bytes(self, layout: BlockLayout) -> int:
        if layout.dtype not in KINDS:
            raise Malformed(f"{layout.dtype} has no bits to lose")
        return (
            _HEAD.size + sum(_side_bytes(part) + 4 * part.count for part in parts_of(layout)) + 64
        )

    def encode(self, block: Block, out: Bytes) -> int:
        import constriction

        from sglang_cake.codec.kernels import all_finite

        if not all_finite(block.words, block.kind):
            raise Unencodable
        coder = constriction.stream.queue.RangeEncoder()
        hashed, at = xxhash.xxh3_64(), _HEAD.size
        for part in block.parts:
            steps, whole = self._rounded(block, part)
            bases, classes, gaps = _differences(whole)
            for array in (steps, bases.astype(np.int16), classes):
                raw = array.view(np.uint8).reshape(-1)
                out[at : at + len(raw)] = raw
                at += len(raw)
            for layer in range(part.layers):
                for some, kind in _runs(classes[layer]):
                    symbols = np.ascontiguousarray(gaps[layer][:, some].T).reshape(-1)
                    hashed.update(symbols.data)
                    for first in range(0, len(symbols), AT_ONCE):
                        piece = symbols[first : first + AT_ONCE] + widest(kind)
                        coder.encode(piece, distribution(kind))
        words = coder.get_compressed().view(np.uint8)
        if at + len(words) > len(out):
            raise Unencodable
        out[at : at + len(words)] = words
        _HEAD.pack_into(out.data, 0, hashed.digest(), len(words))
        return at + len(words)

    def decode(self, data: Bytes, block: Block) -> None:
        import constriction

        from sglang_cake.codec.entropy_kernels import restore

        at = _HEAD.size + sum(_side_bytes(part) for part in block.parts)
        if len(data) < at:
            raise Malformed(f"{len(data)} bytes, at least {at} expected")
        digest, count = _HEAD.unpack_from(data.data)
        if len(data) != at + count or count % 4:
            raise Malformed(f"{len(data)} bytes, {at + count} expected")
        coder = constriction.stream.queue.RangeDecoder(taken(data, at, count // 4, np.uint32))
        hashed = xxhash.xxh3_64()
        at = _HEAD.size
        for part in block.parts:
            rows = part.layers * part.channels
            steps = taken(data, at, part.layers, np.float32)
            bases = taken(data, at + 4 * part.layers, rows, np.int16).reshape(part.layers, -1)
            classes = taken(data, at + 4 * part.layers + 2 * rows, rows, np.uint8)
            classes = classes.reshape(part.layers, -1)
            if np.any((classes & 127) >= CLASSES):
                raise Malformed("a distribution that there is not")
            at += _side_bytes(part)
            gaps = np.empty((part.layers, part.channels, part.tokens), np.int32)
            for layer in range(part.layers):
                for some, kind in _runs(classes[layer]):
                    symbols = _decoded(coder, kind, len(some) * part.tokens)
                    hashed.update(symbols.data)
                    gaps[layer][some] = symbols.reshape(len(some), part.tokens)
            place = (block.words, part.start, part.stride, part.layers, part.tokens, part.channels)
            restore(*place, block.kind, TOKENS, steps, bases, classes, gaps)
        # The library may have changed since, or the distributions come out otherwise elsewhere.
        if hashed.digest() != digest:
            raise Malformed("the coded numbers are not those that were coded")

    def _rounded(self, block: Block, part: Part) -> tuple[Any, Whole]:
        """Steps, and the numbers in steps `[layers, tokens, channels]`."""
        numbers = block.floats(part)
        size = np.sqrt(np.mean(np.square(numbers, dtype=np.float64), axis=(1, 2)))
        thirds = np.array(LAYERS)[np.arange(part.layers) * len(LAYERS) // part.layers]
        steps = (size * thirds * self.step).astype(np.float32)
        steps[size == 0] = 1
        if not np.all((steps > 2.0**-100) & (steps < 2.0**100)):
            raise Unencodable
        numbers /= steps[:, None, None]
        if np.abs(numbers).max(initial=0) > LARGEST:
            raise Unencodable
        return steps, np.rint(numbers).astype(np.int32)


def _side_bytes(part: Part) -> int:
    return 4 * part.layers + 3 * part.layers * part.channels


def _differences(whole: Whole) -> tuple[Whole, npt.NDArray[np.uint8], Whole]:
    """Bases and classes `[layers, channels]`, differences as `whole`."""
    gaps = whole.copy()
    leaders = whole[:, ::TOKENS]
    gaps -= np.repeat(leaders, TOKENS, axis=1)[:, : whole.shape[1]]
    gaps[:, TOKENS::TOKENS] = np.diff(leaders, axis=1)
    gaps[:, 0] = 0
    bases = whole[:, 0].copy()
    means = np.rint(whole.mean(axis=1)).astype(np.int32)
    from_mean = whole - means[:, None]
    better = np.abs(from_mean).sum(axis=1) < np.abs(gaps).sum(axis=1)
    gaps = np.where(better[:, None], from_mean, gaps)
    bases = np.where(better, means, bases)
    width = np.abs(gaps).mean(axis=1)
    classes = np.clip(np.rint(2 * np.log2(width + 1e-9)) + 8, 0, CLASSES - 1)
    limits = np.array([widest(kind) for kind in range(CLASSES)])
    needed = np.searchsorted(limits, np.abs(gaps).max(axis=1))
    classes = np.maximum(classes, needed).astype(np.uint8)
    return bases, classes | (better.astype(np.uint8) << 7), gaps


def _runs(classes: npt.NDArray[np.uint8]) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """The channels of each class, in order of the classes."""
    kinds = classes & 127
    for kind in np.unique(kinds):
        yield np.flatnonzero(kinds == kind), int(kind)


def _decoded(coder: Any, kind: int, count: int) -> Whole:
    try:
        pieces = [
            coder.decode(distribution(kind), min(AT_ONCE, count - first))
            for first in range(0, count, AT_ONCE)
        ]
    except (AssertionError, ValueError) as error:
        raise Malformed(str(error)) from None
    return np.asarray(np.concatenate(pieces) - widest(kind), np.int32)


def widest(kind: int) -> int:
    """The largest difference that a class has room for."""
    return min(2 * LARGEST + 1, 8 + int(32 * _width(kind)))


@lru_cache(maxsize=CLASSES)
def distribution(kind: int) -> Any:
    """The distribution of a class: `ratio ** |difference|`, and never less than 2^-20 of the most.

    Only products, which every machine rounds alike.
    """
    import constriction

    width = _width(kind)
    falling = np.full(widest(kind) + 1, width / (1 + width))
    falling[0] = 1.0
    falling = np.maximum(np.multiply.accumulate(falling), 2.0**-20)
    both = np.concatenate((falling[:0:-1], falling))
    return constriction.stream.model.Categorical(both, perfect=False)


def _width(kind: int) -> float:
    root = 1.4142135623730951 if kind % 2 else 1.0
    return float(np.ldexp(root, kind // 2 - 4))
