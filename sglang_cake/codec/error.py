"""How far a decoded block is from the one that was encoded: the measure of `--cake-max-error`."""

import numpy as np

from sglang_cake.codec.blocks import Block
from sglang_cake.layout import BlockLayout


def relative_error(layout: BlockLayout, exact: memoryview, decoded: memoryview) -> float:
    """The largest, over the planes of K and V of every layer, of |decoded - exact| / |exact|, with
    the Euclidean norm over the plane; 0 if both are zero. Both blocks are finite."""
    one, other = Block.over(layout, exact), Block.over(layout, decoded)
    worst = 0.0
    for part in one.parts:
        planes = one.floats(part).astype(np.float64)
        gap = np.linalg.norm(planes - other.floats(part), axis=(1, 2))
        size = np.linalg.norm(planes, axis=(1, 2))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(gap == 0, 0.0, gap / size)
        worst = max(worst, float(shares.max(initial=0)))
    return worst
