"""Tensor-parallel ranks act on the same facts in the same step.

Each rank has its own store entries and its own loader, so blocks land at different moments. Before
the scheduler decides anything, every rank contributes what it knows to one MIN-reduction: a block
counts as landed when it has landed everywhere, as lost when it was lost anywhere, and clocks and
costs are the smallest of all. What follows from that is deterministic, so the ranks stay alike.
"""

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from sglang_cake.integration.request.restore import Restore
from sglang_cake.loading.cost_model import LoadCost, PrefillCost

_NS = 1e9
_LOAD_NUMBERS = 5  # of LoadCost: all but the depth, which is a setting
_HEAD = 3 + _LOAD_NUMBERS  # what of a restore comes before its blocks
_GONE = -1  # a rank has no record of a request
_NOTHING = 2**63 - 1  # leaves what the other ranks say


@dataclass(frozen=True, slots=True)
class Facts:
    """What all ranks know of one restore."""

    stored: tuple[bool, ...] | None  # None: not every rank's lookup has answered
    landed: tuple[int, ...]
    lost: tuple[int, ...]
    elapsed_s: float
    now_s: float  # a clock that all ranks share
    cost: LoadCost  # of the loads ahead of it


class RankConsensus:
    """Turns one rank's view into the common one.

    Args:
        reduce_min: in-place MIN over an int64 CPU tensor across the ranks; None for a single rank.
    """

    def __init__(self, reduce_min: Callable[[torch.Tensor], None] | None) -> None:
        self._reduce_min = reduce_min

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""
        return self._reduce_min is None

    def on(self, here: bool) -> bool:
        """Whether cake is on, on every rank. Every rank must call this in every poll."""
        if self._reduce_min is None:
            return here
        tensor = torch.tensor([here], dtype=torch.int64)
        self._reduce_min(tensor)
        return bool(tensor.item())

    def vote(self, views: Sequence[Restore | None]) -> list[bool]:
        """Of each request, whether all ranks have a record of it in the same state. So ranks whose
        records have come apart never reduce different lists.

        Every rank must call this at the same point of the same step with the same requests.

        Args:
            views: of each request, this rank's record.
        """
        if self._reduce_min is None or not views:
            return [view is not None for view in views]
        own = [_GONE if view is None else int(view.contending) for view in views]
        tensor = torch.tensor([*own, *(-each for each in own)], dtype=torch.int64)
        self._reduce_min(tensor)
        least, most = tensor.view(2, -1).tolist()
        return [low == -high != _GONE for low, high in zip(least, most, strict=True)]

    def reach(
        self, restores: Sequence[Restore], prefill: PrefillCost
    ) -> tuple[list[Facts], PrefillCost]:
        """Facts per restore, and the costs of steps to decide by.

        Every rank must call this at the same point of the same step with the same restores. A rank
        that fails to say what it knows takes part in the reduction all the same, and says nothing.
        """
        if self._reduce_min is None:
            return [_own(restore) for restore in restores], prefill
        shared = len(astuple(prefill))
        sizes = [_size(restore) for restore in restores]
        tensor = torch.full((shared + sum(sizes),), _NOTHING, dtype=torch.int64)
        try:
            numbers = _bits(*astuple(prefill))
            for restore in restores:
                numbers += _pack(restore)
            tensor = torch.tensor(numbers, dtype=torch.int64)
        finally:
            self._reduce_min(tensor)
        numbers = tensor.tolist()
        agreed = PrefillCost(*_floats(numbers[:shared]))
        facts, position = [], shared
        for restore, size in zip(restores, sizes, strict=True):
            facts.append(_unpack(restore, numbers[position : position + size]))
            position += size
        return facts, agreed


def _own(restore: Restore) -> Facts:
    blocks = restore.meet.blocks
    return Facts(
        stored=None if restore.known else restore.answer,
        landed=tuple(sorted(b for b in restore.arrived if b < blocks)),
        lost=tuple(sorted(b for b in restore.failed if b < blocks)),
        elapsed_s=restore.local_elapsed_s(),
        now_s=time.monotonic(),
        cost=restore.load,
    )


def _pack_load(cost: LoadCost) -> list[int]:
    return _bits(*astuple(cost)[:_LOAD_NUMBERS])


def _unpack_load(numbers: Sequence[int], own: LoadCost) -> LoadCost:
    latency_s, block_s, copy_s, error, coming_s = _floats(numbers)
    return LoadCost(latency_s, block_s, copy_s, error, coming_s, own.depth)


def _bits(*values: float) -> list[int]:
    """Numbers that are never negative are in the order of their bits."""
    return list(struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values)))


def _floats(bits: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}q", *bits))


def _full_blocks(restore: Restore) -> int:
    return len(restore.tokens) // restore.meet.block_tokens


def _size(restore: Restore) -> int:
    return _HEAD + 2 * restore.meet.blocks + (0 if restore.known else _full_blocks(restore))


def _pack(restore: Restore) -> list[int]:
    """[elapsed, now, answered, cost of loads, landed..., not lost..., stored...]; what is stored
    only until it is known."""
    answered = restore.answer is not None
    clocks = [int(s * _NS) for s in (restore.local_elapsed_s(), time.monotonic())]
    numbers = [*clocks, answered, *_pack_load(restore.load)]
    numbers += [b in restore.arrived for b in range(restore.meet.blocks)]
    numbers += [b not in restore.failed for b in range(restore.meet.blocks)]
    if not restore.known:
        numbers += restore.answer or [0] * _full_blocks(restore)
    return [int(n) for n in numbers]


def _unpack(restore: Restore, numbers: list[int]) -> Facts:
    elapsed, now, answered = numbers[:3]
    blocks = restore.meet.blocks
    landed, kept = numbers[_HEAD : _HEAD + blocks], numbers[_HEAD + blocks : _HEAD + 2 * blocks]
    stored = tuple(bool(n) for n in numbers[_HEAD + 2 * blocks :])
    return Facts(
        stored=stored if answered and not restore.known else None,
        landed=tuple(b for b in range(blocks) if landed[b]),
        lost=tuple(b for b in range(blocks) if not kept[b]),
        elapsed_s=elapsed / _NS,
        now_s=now / _NS,
        cost=_unpack_load(numbers[3:_HEAD], restore.load),
    )
