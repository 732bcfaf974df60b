"""Which of a prompt's blocks are stored, found out with few questions.

For stores that answer for one key at a time. A prompt's blocks are usually stored from the first
to some last one, so a few keys far apart are asked at once, then only what lies between a yes and
a no. Between two answers that are the same, the same is assumed: a block that is missing between
two that are there is noticed when it is read. Up to `at_most` keys, every one is asked.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sglang_cake.core.keys import BlockKey

EXACT_KEYS = 16  # of so many, every one is asked, of every store


async def probe(
    keys: Sequence[BlockKey],
    has: Callable[[BlockKey], Coroutine[Any, Any, bool]],
    *,
    at_once: int,
    rounds: int,
) -> list[bool]:
    """Which of `keys` are stored, as far as `rounds` rounds of `at_once` questions show.

    Failed or cancelled, it leaves no question behind. Raises: what `has` raises.
    """
    known: dict[int, bool] = {}
    for _ in range(rounds):
        asked = next_probes(len(keys), known, at_once)
        if not asked:
            break
        answers = await _ask(has, [keys[position] for position in asked])
        known.update(zip(asked, answers, strict=True))
    return stored(len(keys), known)


async def _ask(
    has: Callable[[BlockKey], Coroutine[Any, Any, bool]], keys: Sequence[BlockKey]
) -> list[bool]:
    asking = [asyncio.ensure_future(has(key)) for key in keys]
    try:
        return await asyncio.gather(*asking)
    finally:
        for question in asking:  # one failed, or nobody wants to know any more
            question.cancel()
        await asyncio.wait(asking)


def next_probes(count: int, known: Mapping[int, bool], at_most: int) -> list[int]:
    """Which of the positions 0 to `count - 1` to ask next, ascending; empty when all is clear.

    Args: known: the answers so far; at_most: questions that may be open at once, at least 2.
    """
    if not known:
        return _spread(-1, count, at_most) if count <= at_most else _with_ends(count, at_most)
    gaps = [
        (left, right)
        for left, right in _neighbours(known)
        if known[left] != known[right] and right - left > 1
    ][:at_most]
    if sum(right - left - 1 for left, right in gaps) <= at_most:
        return [position for left, right in gaps for position in range(left + 1, right)]
    each = at_most // len(gaps)
    return [position for left, right in gaps for position in _spread(left, right, each)]


def stored(count: int, known: Mapping[int, bool]) -> list[bool]:
    """For every position: asked and there, or between two that are there."""
    found = [known.get(position, False) for position in range(count)]
    for left, right in _neighbours(known):
        if known[left] and known[right]:
            found[left:right] = [True] * (right - left)
    return found


def _neighbours(known: Mapping[int, bool]) -> Iterator[tuple[int, int]]:
    return pairwise(sorted(known))


def _with_ends(count: int, at_most: int) -> list[int]:
    """`at_most` positions, evenly, with the first and the last: a prompt that is stored wholly, or
    not at all, is then known after one round."""
    return [step * (count - 1) // (at_most - 1) for step in range(at_most)]


def _spread(left: int, right: int, at_most: int) -> list[int]:
    """At most `at_most` positions between `left` and `right`, evenly, without the two."""
    size = right - left - 1
    steps = min(at_most, size)
    return [left + step * (size + 1) // (steps + 1) for step in range(1, steps + 1)]
