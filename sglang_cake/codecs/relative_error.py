"""How far a decoded block is from the one that was encoded: the measure of `--cake-max-error`."""

import numpy as np

from sglang_cake.codecs.blocks import Block
from sglang_cake.core.layout import BlockLayout


def relative_error(layout: BlockLayout, exact: memoryview, decoded: memoryview) -> float:
    """The root of the mean, over the planes of K and V of every layer, of
    |decoded - exact|² / |exact|², with the Euclidean norm over the plane; 0 for a plane that came
    back as it was. Both blocks are finite.

    What a model's answer loses goes with the square of it: on a real model KL is 0.5 to 1.4 times
    the square (docs/codecs.md). The worst plane alone says less: errors of all layers add up.
    """
    one, other = Block.over(layout, exact), Block.over(layout, decoded)
    total, planes = 0.0, 0
    for part in one.parts:
        numbers = one.floats(part).astype(np.float64)
        gap = np.square(numbers - other.floats(part)).sum(axis=(1, 2))
        size = np.square(numbers).sum(axis=(1, 2))
        with np.errstate(divide="ignore", invalid="ignore"):
            total += float(np.where(gap == 0, 0.0, gap / size).sum())
        planes += part.layers
    return float(np.sqrt(total / planes))
