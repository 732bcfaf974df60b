"""Who gets the device's budget and the link first, when several prompts want them.

Cake's adaptive scheduling (arXiv 2410.03065, section 4, part 3) with the order of docs/theory.md:

1. prompts for which nothing is loaded, or nothing more, in SGLang's order; of equal age those first
   whose rest fits one step;
2. prompts that are being loaded, the one with the smallest remaining T* first: they take what the
   others leave of a step's budget, down to nothing, while their loads go on.

Nobody starves: whoever waits ages, and a second of waiting is worth AGEING seconds of T*. So the
order is that of `remaining T* - AGEING x waited`, where a prompt of 1 has no T*: what is being
loaded gives way to whoever comes within `T* / AGEING` after it, and to nobody who comes later. All
age alike: the order of two changes only with what is left of them.

Priorities, where they count, come before all of that; then, when asked, tenants: all of one that
had less (`loading/fair_queueing.py`) go before those of one that had more. A prompt that is being
computed in chunks is interrupted between two of them: see `preempts`. The link goes to prompts in
the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sglang_cake.loading.meet import BlockState, View

# More is nearer to first come, first served; less, nearer to the least mean (docs/scheduling.md).
AGEING = 1 / 3

Rank = tuple[int, int, float, bool]


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A waiting prompt.

    Attributes:
        remaining_s: predicted rest of its T*, if it is being loaded; None: nothing is, or no more.
        waited_s: since it arrived, by a clock that all share.
        nearly_done: its loads are over, and the rest fits one step.
        turn: its tenant's, lowest first; all the same where tenants do not count.
        level: its priority's, lowest first; all the same where priorities do not count.
        yielded: the device was its own, and it left it to others since loading was as quick.
    """

    rid: str
    remaining_s: float | None
    waited_s: float = 0.0
    nearly_done: bool = False
    turn: int = 0
    level: int = 0
    yielded: bool = False

    @classmethod
    def of(
        cls,
        rid: str,
        view: View,
        *,
        loads: bool,
        remaining_s: Callable[[], float],
        waited_s: float,
        begun: bool,
        chunk_tokens: int,
    ) -> "QueueEntry":
        """A prompt of which something is stored, as it is now.

        Args:
            loads: whether what is to come is being loaded now.
            remaining_s: predicts the rest of its T*; asked only if it is being loaded.
            begun: whether it has had something from the store.
            chunk_tokens: what one step computes at most.
        """
        if loads and BlockState.WANTED in view.states:
            return cls(rid, remaining_s(), waited_s)
        landed_tokens = view.states.count(BlockState.LANDED) * view.block_tokens
        rest_tokens = view.prompt_tokens - view.front - landed_tokens
        return cls(rid, None, waited_s, nearly_done=begun and rest_tokens <= chunk_tokens)

    @property
    def only_computed(self) -> bool:
        """Whether nothing of it is loaded, and its end is not near."""
        return self.remaining_s is None and not self.nearly_done


def order(claimants: Sequence[QueueEntry]) -> list[int]:
    """Indices into `claimants`, who is served first first. Stable.

    Prompts that are only computed stay in the order in which they are given: none counts as older
    than the one before it, or a prompt that is loaded would give way to newer ones for an old one
    which that order puts last.
    """
    youngest_s: dict[tuple[int, int], float] = {}

    def rank(each: QueueEntry) -> Rank:
        if not each.only_computed:
            return _rank(each)
        group = each.level, each.turn
        youngest_s[group] = min(youngest_s.get(group, each.waited_s), each.waited_s)
        return _rank(replace(each, waited_s=youngest_s[group]))

    ranks = [rank(each) for each in claimants]
    return sorted(range(len(claimants)), key=ranks.__getitem__)


def preempts(waiting: QueueEntry, running: QueueEntry) -> bool:
    """Whether a waiting prompt that could use the device now goes before the one being chunked.

    One that is only computed is interrupted by who is one step from its end, or has aged further as
    `order` sees the two alone, or has a higher priority and stood aside; never by another that is
    only computed, nor for another tenant's turn. One that is being loaded gives way to whoever
    `order` puts first.
    """
    first = _rank(waiting) < _rank(running)
    if running.remaining_s is not None:
        return first
    if waiting.level != running.level:
        return first and waiting.yielded
    if waiting.only_computed or running.nearly_done:
        return False
    if waiting.nearly_done:
        return waiting.turn <= running.turn
    return first and waiting.turn == running.turn


def _rank(claimant: QueueEntry) -> Rank:
    aged_s = (claimant.remaining_s or 0.0) - AGEING * claimant.waited_s
    return claimant.level, claimant.turn, aged_s, not claimant.nearly_done
