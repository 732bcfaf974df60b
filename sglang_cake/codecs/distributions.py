"""The distributions that `entropy` codes whole numbers by, and their integers for its decoder.

Normal ones at whole numbers, by class; twice as wide every two classes. `constriction` is given the
weights and makes integers of them, which it does not show. The decoder needs the same integers, so
they are made here in the same way (`from_floating_point_probabilities_fast`, the same since its
version 0.4); the tests compare them with those that its encoder uses.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LARGEST = 2**14  # of a number on its grid
CLASSES = 40
BITS = 24  # of the integers: those of a distribution add up to 2 ** BITS
NARROWEST = 2.0**-11  # what the most likely number's neighbour has of its weight, in class 0
LEAST = 2.0**-16  # of the largest weight: normal distributions end where numbers do not
TABLE_BITS = 11  # of a quantile, for which a table says where to look for its number


class Tables(NamedTuple):
    """All classes, one behind the other.

    The `i`th number of a class has the quantiles from `lefts[first + i]` to before
    `lefts[first + i + 1]`.
    """

    lefts: npt.NDArray[np.uint32]
    begins: npt.NDArray[np.int32]  # [classes, bins + 1]: what has the first quantile of a bin
    centres: npt.NDArray[np.int32]  # what stands for zero
    bin_bits: int  # 2 ** bin_bits quantiles are one bin


def width(kind: int) -> float:
    """The standard deviation of a class, nearly."""
    root = 1.4142135623730951 if kind % 2 else 1.0
    return float(np.ldexp(root, kind // 2 - 2))


def widest(kind: int) -> int:
    """The largest number that a class has room for."""
    return min(2 * LARGEST + 1, 8 + int(32 * width(kind)))


@lru_cache(maxsize=CLASSES)
def distribution(kind: int) -> Any:
    """The distribution of a class, for the library's encoder."""
    import constriction

    return constriction.stream.model.Categorical(_weights(kind), perfect=False)


@lru_cache(maxsize=1)
def tables() -> Tables:
    """What the decoder looks up: about 4 MB, made once."""
    lefts, begins, centres, first = [], [], [], 0
    bin_bits = BITS - TABLE_BITS
    borders = np.arange(2**TABLE_BITS + 1, dtype=np.uint32) << bin_bits
    for kind in range(CLASSES):
        lefts.append(_lefts(_weights(kind)))
        begins.append(first + np.searchsorted(lefts[-1], borders, side="right") - 1)
        centres.append(first + widest(kind))
        first += len(lefts[-1])
    whole = np.array(begins, np.int32), np.array(centres, np.int32)
    return Tables(np.concatenate(lefts), *whole, bin_bits)


def _weights(kind: int) -> npt.NDArray[np.float64]:
    """`exp(-number ** 2 / (2 * width ** 2))`, and never less than LEAST of the most.

    Only products and square roots, which every machine rounds alike.
    """
    ratio = NARROWEST  # exp(-1 / (2 * width ** 2)): its root is that of a class wider
    for _ in range(kind):
        ratio = math.sqrt(ratio)
    ratios = np.full(widest(kind), ratio * ratio)
    ratios[0] = ratio
    falling = np.multiply.accumulate(np.multiply.accumulate(ratios))
    falling = np.maximum(np.concatenate(([1.0], falling)), LEAST)
    return np.concatenate((falling[:0:-1], falling))


def _lefts(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
    """The first quantile of each number, and 2 ** BITS: one for each, the rest by weight.

    Sums must be made one by one, as the library does: NumPy's `sum` rounds otherwise.
    """
    sums = np.add.accumulate(np.concatenate(([0.0], weights)))
    scale = (2**BITS - len(weights)) / sums[-1]
    lefts: npt.NDArray[np.uint32] = (sums * scale).astype(np.uint32)
    lefts += np.arange(len(sums), dtype=np.uint32)
    lefts[-1] = 2**BITS
    return lefts
