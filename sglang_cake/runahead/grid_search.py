"""Hierarchical grid search for the partition with the lowest TTFT (KVR-S, paper 4.2, Figure 6).

A level measures a grid of partitions around the best one so far: `points` values for each inner
bound, `stride` tokens apart. The next level does the same around the new best one with half the
stride, or with the same stride if the best one lies on the border of the grid. A full grid is
`points ** (workers - 1)` measurements a level. (The paper's appendix D says `(workers - 1) **
points`, which is too few.)

The search is deterministic: with the measurements of a search that was stopped, it goes on there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from sglang_cake.runahead.partition import Partition

# `(partitions) -> seconds of each`: measured, or taken from the model of the chain.
Measure = Callable[[Sequence[Partition]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Searched:
    """The best partition found, its TTFT, and how many partitions were measured for it."""

    partition: Partition
    ttft_s: float
    measured: int


def grid_search(
    start: Partition,
    measure: Measure,
    *,
    stride_tokens: int,
    min_stride_tokens: int,
    page_tokens: int = 1,
    points: int = 5,
    step_tokens: int | None = None,
) -> Searched:
    """Search around `start`. A partition is measured once.

    Args:
        stride_tokens: the stride of the first level; it is halved down to `min_stride_tokens`, in
            whole pages.
        points: values for each inner bound in a level, odd.
        step_tokens: partitions with a longer span are left out; `start` has none. None: no limit.
    """
    if points < 3 or points % 2 == 0:
        raise ValueError(f"a grid has an odd number of points from 3 on, not {points}")
    known: dict[Partition, float] = {}
    best = start
    stride = stride_tokens
    while True:
        step = max(page_tokens, stride - stride % page_tokens)
        level = [
            each
            for each in dict.fromkeys(_grid(best, step, points))
            if step_tokens is None or max(span.tokens for span in each.spans) <= step_tokens
        ]
        new = [partition for partition in level if partition not in known]
        known.update(zip(new, measure(new), strict=True))
        before = best
        best = min([best, *level], key=lambda partition: (known[partition], partition.bounds))
        farthest = max(abs(a - b) for a, b in zip(before.bounds, best.bounds, strict=True))
        if farthest == points // 2 * step:
            continue  # on the border of the grid: extend it before refining it
        if stride <= max(min_stride_tokens, page_tokens):
            return Searched(best, known[best], len(known))
        stride //= 2


def _grid(around: Partition, step: int, points: int) -> Iterator[Partition]:
    first, *inner, last = around.bounds
    reach = range(-(points // 2), points // 2 + 1)
    for offsets in product(reach, repeat=len(inner)):
        bounds = [first, *(b + o * step for b, o in zip(inner, offsets, strict=True)), last]
        if all(a < b for a, b in pairwise(bounds)):
            yield Partition(tuple(bounds))
