"""The division of a prompt among the workers of a chain (KV-Runahead, arXiv 2405.05329).

Worker j of a chain computes span j on top of all earlier tokens. So a later span costs more per
token, and the spans of an even split (KVR-E) end at different times. The splits here:

- `even`: as many tokens for each worker (KVR-E);
- `scaled`: given shares, for example interpolated ones (KVR-P);
- `balanced`: all workers need the same time (docs/theory.md).

All are pure, and every bound but the last is on a page.

The cost of a span is a function `step_s(start, stop)`: seconds to compute tokens `[start, stop)` on
top of `start` tokens whose KV is in memory. It may not fall when `stop` grows.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sglang_cake.core.keys import Span

StepSeconds = Callable[[int, int], float]
# A field of `sampling_params.custom_params`, for searches and benchmarks: "alone"; "closed" or
# "table", whether or not that is predicted to be faster; or a list of tokens, the end of each
# worker's span.
PARAMETER = "cake_runahead"
_HALVINGS = 22  # of a bisection: to one part in 4 million, less than the time of a page


@dataclass(frozen=True, slots=True)
class Partition:
    """Adjacent spans, one a worker: worker j has `bounds[j]` to `bounds[j + 1]`.

    Raises: ValueError if there is no span, or an empty one.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] < 0:
            raise ValueError(f"{self.bounds} are no bounds of spans")
        if any(a >= b for a, b in pairwise(self.bounds)):
            raise ValueError(f"bounds must grow, got {self.bounds}")

    @property
    def workers(self) -> int:
        return len(self.bounds) - 1

    @property
    def spans(self) -> tuple[Span, ...]:
        """One span a worker, first worker first."""
        return tuple(Span(a, b) for a, b in pairwise(self.bounds))

    @property
    def fractions(self) -> tuple[float, ...]:
        """The share of each worker; they add up to 1."""
        whole = self.bounds[-1] - self.bounds[0]
        return tuple((b - a) / whole for a, b in pairwise(self.bounds))


def even(span: Span, workers: int, *, page_tokens: int = 1) -> Partition:
    """As many tokens for each worker (KVR-E), with inner bounds rounded up to pages.

    So no span is longer than a step, if all steps together (of whole pages) hold the tokens.
    """
    workers = max(1, min(workers, span.tokens // page_tokens))
    inner = (-(-span.tokens * i // (workers * page_tokens)) for i in range(1, workers))
    return Partition((span.start, *(span.start + n * page_tokens for n in inner), span.stop))


def scaled(span: Span, fractions: Sequence[float], *, page_tokens: int = 1) -> Partition:
    """Spans in these proportions, each at least a page. Fewer workers if there are fewer pages."""
    workers = max(1, min(len(fractions), span.tokens // page_tokens))
    shares = fractions[:workers]
    whole = sum(shares)
    inner, reached = [], 0.0
    for share in shares[:-1]:
        reached += share / whole * span.tokens
        inner.append(span.start + reached)
    return _aligned(span, inner, page_tokens)


def balanced(span: Span, workers: int, step_s: StepSeconds, *, page_tokens: int = 1) -> Partition:
    """All workers need the same time, to a page: the slowest needs as little as possible.

    docs/theory.md: `c_j` such that `step_s(S_j, S_j + c_j) = T`, with T bisected until they cover
    the span. Links between workers are not included; `benchmarks/chain_model.py` models them. With
    slow links, measure partitions (`grid_search.py`).
    """
    workers = max(1, min(workers, span.tokens // page_tokens))
    low_s, high_s = 0.0, step_s(span.start, span.stop)  # the latter is surely enough
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        is_enough = _fill(span, workers, middle_s, step_s, page_tokens)[-1] >= span.stop
        low_s, high_s = (low_s, middle_s) if is_enough else (middle_s, high_s)
    bounds = _fill(span, workers, high_s, step_s, page_tokens)
    # The last worker gets the rest, which may be empty after rounding up to pages.
    return _aligned(span, [float(b) for b in bounds[1:-1]], page_tokens)


def _fill(
    span: Span, workers: int, time_s: float, step_s: StepSeconds, page_tokens: int
) -> list[int]:
    """Bounds when each worker in turn takes as many pages as it can compute in `time_s`."""
    bounds = [span.start]
    for _ in range(workers):
        start = bounds[-1]

        def took_s(pages: int, start: int = start) -> float:
            return step_s(start, min(start + pages * page_tokens, span.stop))

        counts = range(1, -(-(span.stop - start) // page_tokens) + 1)
        pages = bisect_right(counts, time_s, key=took_s)
        bounds.append(min(start + pages * page_tokens, span.stop))
    return bounds


def _aligned(span: Span, inner: Sequence[float], page_tokens: int) -> Partition:
    """Inner bounds on the nearest pages, growing. The last page may be partial."""
    assert span.start % page_tokens == 0, "a span starts on a page"
    bounds = [span.start]
    for i, bound in enumerate(inner):
        lowest = bounds[-1] // page_tokens + 1
        highest = (span.stop - 1) // page_tokens - (len(inner) - 1 - i)
        page = min(max(round(bound / page_tokens), lowest), highest)
        bounds.append(page * page_tokens)
    return Partition((*bounds, span.stop))
