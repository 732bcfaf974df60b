"""cachegen: whole steps, and arithmetic coding by channel.

CacheGen (Liu et al., arXiv 2310.07240, section 5.2): numbers are rounded to steps, and an
arithmetic coder has a distribution for each channel of each layer. Three things are done
otherwise, each because it gives a real model less KL at equal bytes (docs/codecs.md):

- A number is coded as its difference to its channel's mean in the block, and not to a token nearby:
  neighbours are hardly alike (correlation 0.2), so their difference is the larger one. Keys are
  taken before RoPE (`rope`), where a channel has a mean.
- Steps are the same share of the size of a plane in every layer, and twice as large for values: the
  later two thirds of the layers are not the ones that matter less.
- Distributions are normal ones, of which a block names one for each channel, instead of being
  measured on other prompts. What names them is coded too.

The encoder is a library's (`constriction`, range coding). It keeps the GIL, so it is called for a
few thousand numbers at a time; its decoder does too and is not used, since many threads decode.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_cake.codecs.blocks import KINDS, VALUES, Block, Part, parts_of
from sglang_cake.codecs.distributions import (
    CLASSES,
    LARGEST,
    distribution,
    tables,
    widest,
    width,
)
from sglang_cake.codecs.steps import Bytes, Malformed, Unencodable, taken
from sglang_cake.core.layout import BlockLayout

Whole = npt.NDArray[np.int32]
Classes = npt.NDArray[np.uint8]
AT_ONCE = 4096  # numbers that the encoder is given: about 0.2 ms
OF_CLASSES = 6  # the class by which classes are coded: they differ by 2 within a plane
_HEAD = struct.Struct("<8sI")  # XXH3-64 of the coded numbers, bytes of the coded words


class Coded(NamedTuple):
    """One part, as it is coded."""

    steps: npt.NDArray[np.float32]  # [layers]
    middles: Classes  # [layers]: the class to which those of the channels are told
    mean_classes: Classes  # [layers]: by which the means are coded
    classes: Classes  # [layers, channels]: by which the numbers are
    means: Whole  # [layers, channels]
    gaps: Whole  # [layers, tokens, channels]: number less mean


@dataclass(frozen=True, slots=True)
class Entropy:
    """Implements `PackStep`. The head; for each part the steps (float32 `[layers]`), the middle
    classes and those of the means (uint8 `[layers]`); the coded words, of each part: every
    channel's class less the middle one, the means, the numbers less their mean.

    Args:
        step: of the grid, as a share of the root of the mean square of the plane.
        values: how many times as large it is for values.
    """

    step: float
    values: float

    name: ClassVar[str] = "entropy"
    loses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.step) is not float or not 0.01 <= self.step <= 2:
            raise ValueError(f"a step of {self.step!r}")
        if type(self.values) is not float or not 0.1 <= self.values <= 10:
            raise ValueError(f"steps {self.values!r} times as large")

    def max_bytes(self, layout: BlockLayout) -> int:
        if layout.dtype not in KINDS:
            raise Malformed(f"{layout.dtype} has no bits to lose")
        sizes = (
            _side_bytes(part) + 8 * part.layers * part.channels + 4 * part.count
            for part in parts_of(layout)
        )
        return _HEAD.size + sum(sizes) + 64

    def encode(self, block: Block, out: Bytes) -> int:
        import constriction

        from sglang_cake.codecs.kernels import all_finite

        if not all_finite(block.words, block.kind):
            raise Unencodable
        coder = constriction.stream.queue.RangeEncoder()
        hashed, at = xxhash.xxh3_64(), _HEAD.size
        for part in block.parts:
            coded = self._coded(block, part)
            for array in (coded.steps, coded.middles, coded.mean_classes):
                raw = array.view(np.uint8)
                out[at : at + len(raw)] = raw
                at += len(raw)
            for symbols, kind in _in_turn(coded):
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
        from sglang_cake.codecs import entropy_kernels as kernels

        at = _HEAD.size + sum(_side_bytes(part) for part in block.parts)
        if len(data) < at:
            raise Malformed(f"{len(data)} bytes, at least {at} expected")
        digest, count = _HEAD.unpack_from(data.data)
        if len(data) != at + count or count % 4:
            raise Malformed(f"{len(data)} bytes, {at + count} expected")
        coded = taken(data, at, count // 4, np.uint32)
        coder, hashed = begun(coded), xxhash.xxh3_64()

        def numbers(order: Any, classes: Classes, tokens: int) -> Whole:
            """`[layers, rows in order, tokens]`, next in the words."""
            found = np.empty((*classes.shape, tokens), np.int32)
            if not kernels.decode(coded, coder, order, classes, *tables(), found):
                raise Malformed("words that no encoder wrote")
            hashed.update(found.data)
            return found

        at = _HEAD.size
        for part in block.parts:
            steps = taken(data, at, part.layers, np.float32)
            at += 4 * part.layers
            middles, mean_classes = taken(data, at, 2 * part.layers, np.uint8).reshape(2, -1, 1)
            at += 2 * part.layers
            one = np.zeros((part.layers, 1), np.int64)
            told = numbers(one, np.full_like(middles, OF_CLASSES), part.channels)[:, 0]
            told += middles
            if max(mean_classes.max(initial=0), told.max(initial=0)) >= CLASSES or told.min() < 0:
                raise Malformed("a distribution that there is not")
            classes = told.astype(np.uint8)
            means = numbers(one, mean_classes, part.channels)[:, 0]
            order = np.argsort(classes, axis=1, kind="stable")  # as in `_in_turn`
            gaps = numbers(order, classes, part.tokens)
            place = (block.words, part.start, part.stride, part.layers, part.tokens, part.channels)
            kernels.restore(*place, block.kind, steps, means, order, gaps)
        # The encoder may have changed since, or the distributions come out otherwise elsewhere.
        if hashed.digest() != digest:
            raise Malformed("the coded numbers are not those that were coded")

    def _coded(self, block: Block, part: Part) -> Coded:
        numbers = block.floats(part)
        size = np.sqrt(np.mean(np.square(numbers, dtype=np.float64), axis=(1, 2)))
        share = self.step * self.values if part.name == VALUES else self.step
        steps = (size * share).astype(np.float32)
        steps[size == 0] = 1
        if not np.all((steps > 2.0**-100) & (steps < 2.0**100)):
            raise Unencodable
        numbers /= steps[:, None, None]
        if np.abs(numbers).max(initial=0) > LARGEST:
            raise Unencodable
        whole = np.rint(numbers).astype(np.int32)
        means = np.rint(whole.mean(axis=1)).astype(np.int32)
        gaps = whole - means[:, None]
        classes = _classes(gaps, 1)
        middles = np.rint(np.median(classes, axis=1)).astype(np.uint8)
        return Coded(steps, middles, _classes(means, 1), classes, means, gaps)


def _side_bytes(part: Part) -> int:
    return 6 * part.layers


def _classes(numbers: Whole, axis: int) -> Classes:
    """The class by which numbers along an axis are coded: as wide as they are, and with room for
    each of them."""
    spread = np.sqrt(np.mean(np.square(numbers, dtype=np.float64), axis=axis))
    nearest = np.rint(2 * np.log2(spread / width(0) + 1e-9))
    limits = np.array([widest(kind) for kind in range(CLASSES)])
    needed = np.searchsorted(limits, np.abs(numbers).max(axis=axis))
    found: Classes = np.maximum(np.clip(nearest, 0, CLASSES - 1), needed).astype(np.uint8)
    return found


def _in_turn(coded: Coded) -> Iterator[tuple[Whole, int]]:
    """Numbers and their class, in the order in which they are coded; those of the channels by
    their classes, so that the encoder is called for many at once."""
    for row in coded.classes.astype(np.int32) - coded.middles[:, None]:
        yield row, OF_CLASSES
    for row, kind in zip(coded.means, coded.mean_classes, strict=True):
        yield row, int(kind)
    for kinds, gaps in zip(coded.classes, coded.gaps, strict=True):
        for kind in np.unique(kinds):
            yield np.ascontiguousarray(gaps[:, kinds == kind].T).reshape(-1), int(kind)


def begun(coded: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """A decoder in front of the first number, see `entropy_kernels.decode`."""
    first = np.zeros(2, np.uint64)
    first[: len(coded[:2])] = coded[:2]
    return np.array([int(first[0]) << 32 | int(first[1]), 2**64 - 1, 2], np.uint64)
