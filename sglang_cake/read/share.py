"""Who gets the device's budget and the link first, when several prompts want them.

Cake's adaptive scheduling (arXiv 2410.03065, section 4, part 3) with the order of theory C.5:

1. who has waited too long, longest first: nobody starves;
2. prompts whose loads are over and whose rest fits one step: they are nearly done;
3. prompts for which nothing is loaded, in SGLang's order;
4. prompts that are being loaded, the one with the smallest remaining T* first: they take what the
   others leave of a step's budget, down to nothing, while their loads go on.

Priorities, where they count, come before all of that. A prompt that is being computed in chunks is
interrupted between two of them: see `overtakes`.

The link goes to the prompts of 1 and 4 in the same order. Between tenants, when asked: within 2 to
4 all of a tenant that had less (`read/fair.py`) go before those of one that had more.

Bound: a prompt that is being loaded is overtaken by newer ones until it has waited PATIENCE_S plus
PATIENCE times its remaining T*; from then on only those that waited longer go before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_cake.read.meet import BlockState, View

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
        level: its priority's, lowest first; all the same where priorities do not count.
        stood_aside: the device was its own, and it left it to others since loading was as quick.
    """

    rid: str
    remaining_s: float | None
    waited_s: float = 0.0
    nearly_done: bool = False
    turn: int = 0
    level: int = 0
    stood_aside: bool = False

    @classmethod
    def of(
        cls,
        rid: str,
        view: View,
        *,
        remaining_s: Callable[[], float],
        waited_s: float,
        begun: bool,
        chunk_tokens: int,
    ) -> "Claimant":
        """A prompt of which something is stored, as it is now.

        Args:
            remaining_s: predicts the rest of its T*; asked only if it is being loaded.
            begun: whether it has had something from the store.
            chunk_tokens: what one step computes at most.
        """
        if BlockState.WANTED in view.states:
            return cls(rid, remaining_s(), waited_s)
        landed_tokens = view.states.count(BlockState.LANDED) * view.block_tokens
        rest_tokens = view.prompt_tokens - view.front - landed_tokens
        return cls(rid, None, waited_s, nearly_done=begun and rest_tokens <= chunk_tokens)

    @property
    def overdue(self) -> bool:
        """Whether it is being loaded and was overtaken for long enough."""
        rest_s = self.remaining_s
        return rest_s is not None and self.waited_s > PATIENCE_S + PATIENCE * rest_s


def order(claimants: Sequence[Claimant]) -> list[int]:
    """Indices into `claimants`, who is served first first. Stable."""
    return sorted(range(len(claimants)), key=lambda i: _rank(claimants[i]))


def overtakes(waiting: Claimant, running: Claimant) -> bool:
    """Whether a waiting prompt that could use the device now goes before the one being chunked.

    One that is being loaded gives way to all that `order` puts before it. One that is only computed
    gives way to nobody that is only computed; and to a stored one only if that is overdue, or one
    step from its end, or has a higher priority and stood aside: so no two take turns for long.
    """
    if running.remaining_s is not None:
        return _rank(waiting) < _rank(running)
    if waiting.level != running.level:
        return waiting.level < running.level and waiting.stood_aside
    if waiting.overdue:
        return True
    return waiting.nearly_done and not running.nearly_done and waiting.turn <= running.turn


def _rank(claimant: Claimant) -> tuple[int, bool, int, int, float]:
    level, turn = claimant.level, claimant.turn
    if claimant.overdue:
        return level, False, 0, 0, -claimant.waited_s
    if claimant.remaining_s is not None:
        return level, True, turn, 4, claimant.remaining_s
    return level, True, turn, 2 if claimant.nearly_done else 3, 0.0
