"""cachegen: neighbours' differences, coarser in later layers, arithmetic coding.

CacheGen (Liu et al., arXiv 2310.07240, section 5.2): tokens stand in groups of ten, and each is
coded as its difference to the first of its group; earlier layers, whose errors spread, are
quantised more finely; an arithmetic coder has a distribution for each channel of each layer. Where
this differs: numbers are first rounded to the grid of their plane, and the differences are between
whole numbers, so they add no error; a channel whose neighbours differ more than it does from its
mean is coded against the mean; distributions are two-sided geometric ones, of which a block names
one for each channel, instead of being measured on other prompts.

The encoder is a library's (`constriction`, range coding). It keeps the GIL, so it is called for a
few thousand numbers at a time; its decoder does too and is not used, since many threads decode.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_cake.codec.blocks import KINDS, Block, Part, parts_of
from sglang_cake.codec.distributions import CLASSES, LARGEST, distribution, tables, widest
from sglang_cake.codec.steps import Bytes, Malformed, Unencodable, taken
from sglang_cake.layout import BlockLayout

Whole = npt.NDArray[np.int32]
TOKENS = 10  # of a group
AT_ONCE = 4096  # numbers that the encoder is given: about 0.2 ms
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
        from sglang_cake.codec import entropy_kernels as kernels

        at = _HEAD.size + sum(_side_bytes(part) for part in block.parts)
        if len(data) < at:
            raise Malformed(f"{len(data)} bytes, at least {at} expected")
        digest, count = _HEAD.unpack_from(data.data)
        if len(data) != at + count or count % 4:
            raise Malformed(f"{len(data)} bytes, {at + count} expected")
        coded = taken(data, at, count // 4, np.uint32)
        coder = begun(coded)
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
            order = np.argsort(classes & 127, axis=1, kind="stable")  # as in `_runs`
            gaps = np.empty((part.layers, part.channels, part.tokens), np.int32)
            if not kernels.decode(coded, coder, order, classes, *tables(), gaps):
                raise Malformed("words that no encoder wrote")
            hashed.update(gaps.data)
            place = (block.words, part.start, part.stride, part.layers, part.tokens, part.channels)
            kernels.restore(*place, block.kind, TOKENS, steps, bases, classes, order, gaps)
        # The encoder may have changed since, or the distributions come out otherwise elsewhere.
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


def begun(coded: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """A decoder in front of the first number, see `entropy_kernels.decode`."""
    first = np.zeros(2, np.uint64)
    first[: len(coded[:2])] = coded[:2]
    return np.array([int(first[0]) << 32 | int(first[1]), 2**64 - 1, 2], np.uint64)
