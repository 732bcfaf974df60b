"""Who gets the device's budget and the link first, when several prompts want them.

Cake's adaptive scheduling (arXiv 2410.03065, section 4, part 3) with the order of theory C.5:

1. who has waited too long, longest first: nobody starves;
2. prompts whose loads are over and whose rest fits one step: they are nearly done;
3. prompts for which nothing is loaded, in SGLang's order;
4. prompts that are being loaded, the one with the smallest remaining T* first: they take what the
   others leave of a step's budget, down to nothing, while their loads go on.

The link goes to the prompts of 1 and 4 in the same order. Between tenants, when asked: within 2 to
4 all of a tenant that had less (`read/fair.py`) go before those of one that had more.

Bound: a prompt that is being loaded is overtaken by newer ones until it has waited PATIENCE_S plus
PATIENCE times its remaining T*; from then on only those that waited longer go before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE_S = 2.0
PATIENCE = 4.0


@dataclass(frozen=True, slots=True)
class Claimant:
    """A waiting prompt.

    Attributes:
        remaining_s: predicted rest of its T*, if it is being loaded; None: nothing is, or no more.
        waited_s: since it arrived.
        nearly_done: its loads are over, and the rest fits one step.
        turn: its tenant's, lowest first; all the same where tenants do not count.
    """

    rid: str
    remaining_s: float | None
    waited_s: float = 0.0
    nearly_done: bool = False
    turn: int = 0


def order(claimants: Sequence[Claimant]) -> list[int]:
    """Indices into `claimants`, who is served first first. Stable."""
    return sorted(range(len(claimants)), key=lambda i: _rank(claimants[i]))


def _rank(claimant: Claimant) -> tuple[bool, int, int, float]:
    rest_s, turn = claimant.remaining_s, claimant.turn
    if rest_s is not None and claimant.waited_s > PATIENCE_S + PATIENCE * rest_s:
        return False, 0, 0, -claimant.waited_s
    if rest_s is not None:
        return True, turn, 4, rest_s
    return True, turn, 2 if claimant.nearly_done else 3, 0.0
