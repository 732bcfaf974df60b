"""The distributions by which `entropy` codes integers, and their tables for its decoder.

A class is a normal distribution over integers; the width doubles every two classes. `constriction`
computes integer quantiles from these weights, and does not expose them. The decoder needs the same
quantiles, so they are computed here in the same way (`from_floating_point_probabilities_fast`,
unchanged since version 0.4). Tests compare them with the ones that its encoder uses.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LARGEST = 2**14  # the largest number on a grid
CLASSES = 40
BITS = 24  # a distribution has 2 ** BITS quantiles
NARROWEST = 2.0**-11  # weight of 1 over weight of 0, in class 0
LEAST = 2.0**-16  # least weight over the largest: the tails of real numbers are heavier
TABLE_BITS = 11  # leading bits of a quantile that index the table of bins


class Tables(NamedTuple):
    """All classes, one after the other.

    The `i`th number of a class has the quantiles `lefts[first + i]` to `lefts[first + i + 1] - 1`.
    """

    lefts: npt.NDArray[np.uint32]
    begins: npt.NDArray[np.int32]  # [classes, bins + 1]: index of the first quantile of a bin
    centres: npt.NDArray[np.int32]  # [classes]: index of zero
    bin_bits: int  # a bin has 2 ** bin_bits quantiles


def width(kind: int) -> float:
    """The standard deviation of a class, approximately."""
    root = 1.4142135623730951 if kind % 2 else 1.0
    return float(np.ldexp(root, kind // 2 - 2))


def widest(kind: int) -> int:
    """The largest number that a class can code."""
    return min(2 * LARGEST + 1, 8 + int(32 * width(kind)))


@lru_cache(maxsize=CLASSES)
def distribution(kind: int) -> Any:
    """The distribution of a class, for the encoder of `constriction`."""
    import constriction

    return constriction.stream.model.Categorical(_weights(kind), perfect=False)


@lru_cache(maxsize=1)
def tables() -> Tables:
    """The tables of the decoder: about 4 MB, computed once."""
    lefts, begins, centres, first = [], [], [], 0
    bin_bits = BITS - TABLE_BITS
    borders = np.arange(2**TABLE_BITS + 1, dtype=np.uint32) << bin_bits
    for kind in range(CLASSES):
        lefts.append(_lefts(_weights(kind)))
        begins.append(first + np.searchsorted(lefts[-1], borders, side="right") - 1)
        centres.append(first + widest(kind))
        first += len(lefts[-1])
    return Tables(
        np.concatenate(lefts), np.array(begins, np.int32), np.array(centres, np.int32), bin_bits
    )


def _weights(kind: int) -> npt.NDArray[np.float64]:
    """`max(LEAST, exp(-number ** 2 / (2 * width ** 2)))`, for all numbers of a class.

    Only products and square roots are used, which every machine rounds alike.
    """
    ratio = NARROWEST  # exp(-1 / (2 * width ** 2)); the next class has its square root
    for _ in range(kind):
        ratio = math.sqrt(ratio)
    ratios = np.full(widest(kind), ratio * ratio)
    ratios[0] = ratio
    falling = np.multiply.accumulate(np.multiply.accumulate(ratios))
    falling = np.maximum(np.concatenate(([1.0], falling)), LEAST)
    return np.concatenate((falling[:0:-1], falling))


def _lefts(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
    """The first quantile of each number, and 2 ** BITS. Every number has one quantile, and a share
    of the rest by weight.

    Sums are made one by one, as `constriction` does: NumPy's `sum` rounds differently.
    """
    sums = np.add.accumulate(np.concatenate(([0.0], weights)))
    scale = (2**BITS - len(weights)) / sums[-1]
    lefts: npt.NDArray[np.uint32] = (sums * scale).astype(np.uint32)
    lefts += np.arange(len(sums), dtype=np.uint32)
    lefts[-1] = 2**BITS
    return lefts
