"""Tensor-parallel ranks act on the same facts in the same step.

Each rank has its own store entries and its own loader, so blocks land at different moments. Before
the scheduler decides anything, every rank contributes what it knows to one MIN-reduction: a block
counts as landed when it has landed everywhere, as lost when it was lost anywhere, and clocks and
rates are the smallest of all. What follows from that is deterministic, so the ranks stay alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_cake.adapter.restore import Restore
from sglang_cake.read.plan import Rates

_NS = 1e9


@dataclass(frozen=True, slots=True)
class Facts:
    """What all ranks know of one restore."""

    stored: tuple[bool, ...] | None  # None: not every rank's lookup has answered
    load: bool
    landed: tuple[int, ...]
    lost: tuple[int, ...]
    elapsed_s: float


class Agreement:
    """Turns one rank's view into the common one.

    Args:
        reduce_min: in-place MIN over an int64 CPU tensor across the ranks; None for a single rank.
    """

    def __init__(self, reduce_min: Callable[[torch.Tensor], None] | None) -> None:
        self._reduce_min = reduce_min

    def reach(self, restores: Sequence[Restore], rates: Rates) -> tuple[list[Facts], Rates]:
        """Facts per restore, and the rates to decide by.

        Every rank must call this at the same point of the same step with the same restores.
        """
        if self._reduce_min is None:
            return [_own(restore) for restore in restores], rates
        numbers = [int(r * _NS) for r in (*_rates(rates),)]
        for restore in restores:
            numbers += _pack(restore)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._reduce_min(tensor)
        numbers = tensor.tolist()
        agreed = Rates(*(n / _NS for n in numbers[:3]))
        facts, position = [], 3
        for restore in restores:
            size = _size(restore)
            facts.append(_unpack(restore, numbers[position : position + size]))
            position += size
        return facts, agreed


def _own(restore: Restore) -> Facts:
    stored, load = restore.answer or (None, False)
    blocks = restore.meet.blocks
    return Facts(
        stored=None if stored is None or restore.known else tuple(stored),
        load=load,
        landed=tuple(sorted(b for b in restore.arrived if b < blocks)),
        lost=tuple(sorted(b for b in restore.failed if b < blocks)),
        elapsed_s=restore.local_elapsed_s(),
    )


def _rates(rates: Rates) -> tuple[float, float, float]:
    return rates.compute_s_per_token, rates.step_floor_s, rates.load_s_per_block


def _full_blocks(restore: Restore) -> int:
    return len(restore.tokens) // restore.meet.block_tokens


def _size(restore: Restore) -> int:
    return 3 + 2 * restore.meet.blocks + (0 if restore.known else _full_blocks(restore))


def _pack(restore: Restore) -> list[int]:
    """[elapsed, answered, load, landed..., not lost..., stored... (until known)]."""
    stored, load = restore.answer or ((), False)
    numbers = [int(restore.local_elapsed_s() * _NS), restore.answer is not None, load]
    numbers += [b in restore.arrived for b in range(restore.meet.blocks)]
    numbers += [b not in restore.failed for b in range(restore.meet.blocks)]
    if not restore.known:
        numbers += list(stored) if restore.answer else [0] * _full_blocks(restore)
    return [int(n) for n in numbers]


def _unpack(restore: Restore, numbers: list[int]) -> Facts:
    elapsed, answered, load = numbers[:3]
    blocks = restore.meet.blocks
    landed, kept = numbers[3 : 3 + blocks], numbers[3 + blocks : 3 + 2 * blocks]
    stored = tuple(bool(n) for n in numbers[3 + 2 * blocks :])
    return Facts(
        stored=stored if answered and not restore.known else None,
        load=bool(load),
        landed=tuple(b for b in range(blocks) if landed[b]),
        lost=tuple(b for b in range(blocks) if not kept[b]),
        elapsed_s=elapsed / _NS,
    )
