"""Medians, ratios of paired runs, and how sure they are."""

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

BOOTSTRAPS = 2000


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median, smallest and largest."""
    rounded = (statistics.median(values), min(values), max(values))
    return dict(zip(("median", "min", "max"), (round(v, digits) for v in rounded), strict=True))


def sigma(both_s: float, load_s: float, compute_s: float) -> float:
    """1/s_io + 1/s_c: 1 if both resources are used to the full and all chunks cost the same.

    Less is possible where late chunks cost more than early ones, as with attention; more than 1 is
    waste, whatever the cost of a chunk.
    """
    return both_s / load_s + both_s / compute_s


def paired_ratio(rounds: Sequence[Sequence[tuple[float, float]]], seed: int = 0) -> dict[str, Any]:
    """The median ratio of pairs, with a 95 % interval.

    Args:
        rounds: for each round the pairs (with, without) that were measured close together. The
            bootstrap draws rounds, then pairs within them: pairs of one round are not independent.
    """
    logs = [[math.log(a / b) for a, b in pairs] for pairs in rounds if pairs]
    if not logs:
        raise ValueError("no pairs to compare")
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(
            value
            for pairs in draw.choices(logs, k=len(logs))
            for value in draw.choices(pairs, k=len(pairs))
        )
        for _ in range(BOOTSTRAPS)
    )
    low, high = medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS) - 1]
    middle = statistics.median(value for pairs in logs for value in pairs)
    return {
        "ratio": round(math.exp(middle), 5),
        "low": round(math.exp(low), 5),
        "high": round(math.exp(high), 5),
        "pairs": sum(map(len, logs)),
    }


def numbers(text: str) -> list[float]:
    """`0.5,1,2` as numbers. Raises: ValueError for nothing, for text, and below or at zero."""
    found = [float(part) for part in text.split(",") if part.strip()]
    if not found or any(not math.isfinite(number) or number <= 0 for number in found):
        raise ValueError(f"{text!r} is no list of positive numbers")
    return found


def whole_numbers(text: str) -> list[int]:
    """`256,512` as whole numbers. Raises: ValueError."""
    found = numbers(text)
    if any(number != int(number) for number in found):
        raise ValueError(f"{text!r} is no list of whole numbers")
    return [int(number) for number in found]
