"""Which blocks of a prompt are stored, for stores that look up one key per request.

The stored blocks of a prompt are usually its first ones. So the first round looks up a few keys far
apart, and each further round looks up keys between a stored one and a missing one. Between two
equal answers the same answer is assumed; a missing block between two stored ones is noticed when it
is read. If there are at most `at_once` keys, every key is looked up.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sglang_cake.core.keys import BlockKey

EXACT_KEYS = 16  # up to so many keys, every store looks up every key


async def look_up_in_rounds(
    keys: Sequence[BlockKey],
    has: Callable[[BlockKey], Coroutine[Any, Any, bool]],
    *,
    at_once: int,
    rounds: int,
) -> list[bool]:
    """Which of `keys` are stored, by at most `rounds` rounds of `at_once` lookups.

    Raises: an error of `has`, when all lookups of the round have ended: behind an open circuit
        breaker one of them is the probe, and the others fail at once.
    Cancellation: no lookup goes on.
    """
    known: dict[int, bool] = {}
    for _ in range(rounds):
        asked = next_lookups(len(keys), known, at_once)
        if not asked:
            break
        answers = await asyncio.gather(
            *(has(keys[position]) for position in asked), return_exceptions=True
        )
        for position, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            known[position] = answer
    return stored(len(keys), known)


def next_lookups(count: int, known: Mapping[int, bool], at_most: int) -> list[int]:
    """Positions from 0 to `count - 1` to look up next, ascending; empty when nothing is open.

    Args:
        known: answers so far, by position.
        at_most: limit for one round, at least 2.
    """
    if not known:
        if count <= at_most:
            return list(range(count))
        # With both ends: one round is enough for a prompt that is stored wholly or not at all.
        return [0, *_spread(0, count - 1, at_most - 2), count - 1]
    gaps = [
        (left, right)
        for left, right in pairwise(sorted(known))
        if known[left] != known[right] and right - left > 1
    ][:at_most]
    if sum(right - left - 1 for left, right in gaps) <= at_most:
        return [position for left, right in gaps for position in range(left + 1, right)]
    each = at_most // len(gaps)
    return [position for left, right in gaps for position in _spread(left, right, each)]


def stored(count: int, known: Mapping[int, bool]) -> list[bool]:
    """For every position: known to be stored, or between two that are."""
    found = [known.get(position, False) for position in range(count)]
    for left, right in pairwise(sorted(known)):
        if known[left] and known[right]:
            found[left:right] = [True] * (right - left)
    return found


def _spread(left: int, right: int, at_most: int) -> list[int]:
    """At most `at_most` positions at equal distances between `left` and `right`."""
    size = right - left - 1
    steps = min(at_most, size)
    return [left + step * (size + 1) // (steps + 1) for step in range(1, steps + 1)]
