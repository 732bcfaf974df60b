"""cachegen: numbers rounded to steps, and arithmetic coding by channel.

CacheGen (Liu et al., arXiv 2310.07240, section 5.2): numbers are rounded to steps, and an
arithmetic coder has a distribution for each channel of each layer. Three things differ from the
paper, each because it gives a real model less KL at equal bytes
(benchmarks/reports/codecs.md#what-was-tried):

- A number is coded as its difference to its channel's mean in the block, and not to a nearby token.
  In most planes, neighbouring tokens are hardly alike, so their difference is the larger one.
  Keys are taken before RoPE (`rope`), where a channel has a mean.
- Steps are the same share of the size of a plane in every layer, and twice as large for values. The
  later two thirds of the layers do not matter less.
- Distributions are normal ones. A block names one for each channel, instead of measuring them on
  other prompts. The names are coded too.

The encoder is that of `constriction` (range coding). It holds the GIL, so it is called for a few
thousand numbers at a time. Its decoder holds the GIL too, and many threads decode: `decode_numbers`
replaces it.
"""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_cake.codecs.block_arrays import VALUES, Block, Part, parts_of
from sglang_cake.codecs.codec_steps import Bytes, Malformed, Unencodable, check_lossy, packed_arrays
from sglang_cake.codecs.distributions import (
    BITS,
    CLASSES,
    LARGEST,
    distribution,
    tables,
    widest,
    width,
)
from sglang_cake.codecs.kernels import all_finite, compiled, word
from sglang_cake.core.layout import BlockLayout

Whole = npt.NDArray[np.int32]
Classes = npt.NDArray[np.uint8]
AT_ONCE = 4096  # numbers of one call of the encoder: about 0.2 ms
OF_CLASSES = 6  # the class by which classes are coded: they differ by 2 within a plane
_HEAD = struct.Struct("<8sI")  # XXH3-64 of the coded numbers, bytes of the coded words


class Coded(NamedTuple):
    """The numbers that are coded for one part."""

    steps: npt.NDArray[np.float32]  # [layers]
    middles: Classes  # [layers]: the median class of the channels
    mean_classes: Classes  # [layers]: by which the means are coded
    classes: Classes  # [layers, channels]: by which the differences are coded
    means: Whole  # [layers, channels]
    gaps: Whole  # [layers, tokens, channels]: number less mean


@dataclass(frozen=True, slots=True)
class Entropy:
    """Implements `PackStep`. The head; for each part the steps (float32 `[layers]`), the middle
    classes and those of the means (uint8 `[layers]`); the coded words, for each part: every
    channel's class less the middle one, the means, the numbers less their mean.

    Args:
        step: the step of the grid, as a share of the root of the mean square of the plane.
        values: how many times as large the step is for values.
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
        check_lossy(layout)
        sizes = (
            _side_bytes(part) + 8 * part.layers * part.channels + 4 * part.count
            for part in parts_of(layout)
        )
        return _HEAD.size + sum(sizes) + 64

    def encode(self, block: Block, out: Bytes) -> int:
        import constriction

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
            for symbols, kind in _in_coded_order(coded):
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
        at = _HEAD.size + sum(_side_bytes(part) for part in block.parts)
        if len(data) < at:
            raise Malformed(f"{len(data)} bytes, at least {at} expected")
        digest, count = _HEAD.unpack_from(data.data)
        if len(data) != at + count or count % 4:
            raise Malformed(f"{len(data)} bytes, {at + count} expected")
        (coded,) = packed_arrays(data, at, [(np.uint32, (count // 4,))])
        coder, hashed = decoder(coded), xxhash.xxh3_64()

        def numbers(order: Any, classes: Classes, tokens: int) -> Whole:
            """`[layers, rows in order, tokens]`, next in the words."""
            found = np.empty((*classes.shape, tokens), np.int32)
            if not decode_numbers(coded, coder, order, classes, *tables(), found):
                raise Malformed("words that no encoder wrote")
            hashed.update(found.data)
            return found

        at = _HEAD.size
        for part in block.parts:
            one_class = (np.uint8, (part.layers, 1))
            fields = [(np.float32, (part.layers,)), one_class, one_class]
            steps, middles, mean_classes = packed_arrays(data, at, fields)
            at += _side_bytes(part)
            one_row = np.zeros((part.layers, 1), np.int64)
            relative = np.full_like(middles, OF_CLASSES)
            channel_classes = numbers(one_row, relative, part.channels)[:, 0] + middles
            largest = max(mean_classes.max(initial=0), channel_classes.max(initial=0))
            if largest >= CLASSES or channel_classes.min() < 0:
                raise Malformed("a class of distributions that does not exist")
            classes = channel_classes.astype(np.uint8)
            means = numbers(one_row, mean_classes, part.channels)[:, 0]
            order = np.argsort(classes, axis=1, kind="stable")  # as in `_in_coded_order`
            gaps = numbers(order, classes, part.tokens)
            place = (block.words, *part.place)
            restore(*place, block.kind, steps, means, order, gaps)
        # Another version of the encoder, or another machine's arithmetic, could have used other
        # distributions: the numbers would be wrong then.
        if hashed.digest() != digest:
            raise Malformed("the decoded numbers are not the ones that were coded")

    def share(self, part: Part) -> float | npt.NDArray[np.float64]:
        """The step of the planes of a part, or of each, as a share of their size."""
        return self.step * self.values if part.name == VALUES else self.step

    def _coded(self, block: Block, part: Part) -> Coded:
        numbers = block.floats(part)
        size = np.sqrt(np.mean(np.square(numbers, dtype=np.float64), axis=(1, 2)))
        steps = (size * self.share(part)).astype(np.float32)
        steps[size == 0] = 1
        if not np.all((steps > 2.0**-100) & (steps < 2.0**100)):
            raise Unencodable
        numbers /= steps[:, None, None]
        if np.abs(numbers).max(initial=0) > LARGEST:
            raise Unencodable
        whole = np.rint(numbers).astype(np.int32)
        means = np.rint(whole.mean(axis=1)).astype(np.int32)
        gaps = whole - means[:, None]
        classes = _classes(gaps)
        middles = np.rint(np.median(classes, axis=1)).astype(np.uint8)
        return Coded(steps, middles, _classes(means), classes, means, gaps)


def _side_bytes(part: Part) -> int:
    return 6 * part.layers


def _classes(numbers: Whole) -> Classes:
    """The class by which numbers along the second axis are coded: the nearest in width of those
    whose range holds each of them."""
    spread = np.sqrt(np.mean(np.square(numbers, dtype=np.float64), axis=1))
    nearest = np.rint(2 * np.log2(spread / width(0) + 1e-9))
    limits = np.array([widest(kind) for kind in range(CLASSES)])
    needed = np.searchsorted(limits, np.abs(numbers).max(axis=1))
    found: Classes = np.maximum(np.clip(nearest, 0, CLASSES - 1), needed).astype(np.uint8)
    return found


def _in_coded_order(coded: Coded) -> Iterator[tuple[Whole, int]]:
    """Numbers and their class, in the order in which they are coded. Channels are sorted by class,
    so that one call of the encoder has many numbers."""
    for row in coded.classes.astype(np.int32) - coded.middles[:, None]:
        yield row, OF_CLASSES
    for row, kind in zip(coded.means, coded.mean_classes, strict=True):
        yield row, int(kind)
    for kinds, gaps in zip(coded.classes, coded.gaps, strict=True):
        for kind in np.unique(kinds):
            yield np.ascontiguousarray(gaps[:, kinds == kind].T).reshape(-1), int(kind)


def decoder(coded: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """The state `far`, `size`, `read` of `decode_numbers` before the first number."""
    first = np.zeros(2, np.uint64)
    first[: len(coded[:2])] = coded[:2]
    return np.array([int(first[0]) << 32 | int(first[1]), 2**64 - 1, 2], np.uint64)


# A sum or a shift of uint64 and a plain integer would become another type.
_BITS, _WORD, _LEAST = np.uint64(BITS), np.uint64(32), np.uint64(2**32)


@compiled
def decode_numbers(coded, coder, order, classes, lefts, begins, centres, bin_bits, gaps):
    """Fill `gaps`, `[layers, rows in order, tokens]`, from range-coded words, whatever these are.

    Returns False where no encoder made the words. It does what the decoder of `constriction` does,
    without the GIL. Two numbers are followed: how large the interval is in which the encoder still
    was, and how far into it the words point. `far < size` holds throughout, and `size >= 2 ** 32`
    at every number, so that no division is by zero. Zeros follow the last word.

    Args:
        coder: `far`, `size` and how many words were read; left as the next call needs it.
        order: the rows of each layer as they were coded.
        lefts, begins, centres, bin_bits: `distributions.Tables`.
    """
    far, size, read = coder[0], coder[1], np.int64(coder[2])
    layers, channels, tokens = gaps.shape
    for layer in range(layers):
        for row in range(channels):
            kind = classes[layer, order[layer, row]]
            table, centre = begins[kind], centres[kind]
            for token in range(tokens):
                scale = size >> _BITS
                quantile = far // scale
                if quantile >> _BITS:
                    return False
                at = np.int64(quantile >> np.uint64(bin_bits))
                low, high = table[at], table[at + 1]
                while low < high:  # seldom: most bins lie in one number's quantiles
                    middle = (low + high + 1) >> 1
                    if lefts[middle] <= quantile:
                        low = middle
                    else:
                        high = middle - 1
                left = np.uint64(lefts[low])
                far -= scale * left
                size = scale * (np.uint64(lefts[low + 1]) - left)
                if size < _LEAST:
                    size, far = size << _WORD, far << _WORD
                    if read < len(coded):
                        far |= np.uint64(coded[read])
                        read += 1
                gaps[layer, row, token] = low - centre
    coder[0], coder[1], coder[2] = far, size, read
    return True


@compiled
def restore(words, start, stride, layers, tokens, channels, kind, steps, means, order, gaps):
    """Numbers from the differences `[layers, channels in order, tokens]`, whatever these are."""
    for layer in range(layers):
        step = steps[layer]
        for row in range(channels):
            c = order[layer, row]
            mean = np.int64(means[layer, c])
            for token in range(tokens):
                at = start + layer * stride + token * channels + c
                words[at] = word(np.float32(mean + gaps[layer, row, token]) * step, kind)
