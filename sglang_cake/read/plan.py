"""How much the next prefill step computes, so that compute and load end together.

A running step cannot be aborted: what it overshoots past the meeting point is lost (theory: half a
step on average). So a step is a full chunk while the meeting point is far, and shrinks towards it.
The split itself is greedy: it is decided anew at every step from what has landed by then.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sglang_cake.read.meet import BlockState

Mode = Literal["auto", "both", "compute", "load"]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine has been seen to do lately; 0 means not measured yet."""

    compute_s_per_token: float = 0.0
    step_floor_s: float = 0.0  # the shortest prefill step seen: no step is quicker, however small
    load_s_per_block: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now: compute up to `stop` (a token position), or wait for the loader."""

    stop: int
    wait: bool = False


def next_step(
    ahead: Iterable[tuple[int, BlockState]],
    *,
    mode: Mode,
    front: int,
    limit: int,
    prompt_tokens: int,
    chunk_tokens: int,
    block_tokens: int,
    rates: Rates,
    waited_s: float,
) -> Step:
    """Decide the step that starts at `front`, which touches no island.

    Args:
        ahead: blocks from the front on, with their states.
        limit: no stored block is used past this token.
        chunk_tokens: what the scheduler would compute at most in this step.
        waited_s: how long this prompt has been waiting for the loader, in one piece, by now.
    """
    reach = min(front + chunk_tokens, prompt_tokens)
    states = [(b, s) for b, s in ahead if b * block_tokens < limit]
    wanted = [b for b, s in states if s is BlockState.WANTED]
    island = next((b * block_tokens for b, s in states if s is BlockState.LANDED), prompt_tokens)
    edge = min(reach, island)
    if not wanted:
        return Step(edge)
    if mode == "load":
        # The arm of load alone: whatever is still to come is waited for.
        return Step(front, wait=True)
    meeting = _meeting_token(wanted, front=front, block_tokens=block_tokens, rates=rates)
    smallest = min(edge, (front // block_tokens + 1) * block_tokens)
    if meeting == front and waited_s < _step_s(smallest - front, rates):
        # All loads should end before even the smallest step would. The wait is bounded by that
        # step: if the loader does not keep its promise, compute goes on.
        return Step(front, wait=True)
    stop = min(edge, max(meeting, smallest))
    if stop < island and stop < prompt_tokens and stop - stop % block_tokens > front:
        stop -= stop % block_tokens  # a block that is begun is a block that cannot be loaded
    return Step(stop)


def _meeting_token(wanted: list[int], *, front: int, block_tokens: int, rates: Rates) -> int:
    """Where compute and load would meet: C(x) = l (n - x), with the present rates (theory B).

    The best of the finitely many meeting points at block borders; `front` means that load alone is
    quickest.
    """
    load_s = rates.load_s_per_block
    if rates.compute_s_per_token <= 0 or load_s <= 0:
        # Nothing known yet: take both sides to be equally fast, and look again after this step.
        rates, load_s = Rates(compute_s_per_token=1.0), float(block_tokens)
    borders = [(max(front, b * block_tokens), len(wanted) - i) for i, b in enumerate(wanted)]
    borders.append(((wanted[-1] + 1) * block_tokens, 0))
    return min(borders, key=lambda b: max(_step_s(b[0] - front, rates), b[1] * load_s))[0]


def _step_s(tokens: int, rates: Rates) -> float:
    """Predicted time to compute `tokens` from the front on; none takes none."""
    return max(rates.step_floor_s, rates.compute_s_per_token * tokens) if tokens > 0 else 0.0
