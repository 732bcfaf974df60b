"""Tensor-parallel ranks decide on the same facts in the same step.

Each rank has its own loader, and its own store entries unless ranks share a shard, so a block is
fetched at a different moment on each. Before a poll decides anything, MIN-reductions bring the
views of all ranks together:

- `everywhere`, first in each poll: whether Cake is on, on every rank.
- `vote`, then, again if a tree has evicted, and at the end of the poll: for each request, whether
  all ranks have it in one state, and whether a rank knows more of its blocks than all agreed on;
  whether a rank has failed; a clock.
- `agree`, if a request awaits the loader: a block has landed when every rank has fetched it, and is
  lost when one rank lost it. So the cost of loads from a tier is the largest of all ranks that read
  the tier lately, or of all ranks if none did. The time without progress is the longest of all
  ranks that lack a block. Clocks and costs of steps are the smallest. Each number is reduced by
  itself.

Decisions on the result are deterministic, so the ranks stay alike.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from typing import NamedTuple

import torch

from sglang_cake.config import NAMES, CakeConfig, as_flag
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.threads import DaemonPool
from sglang_cake.integration.request.prompt_record import LoadUpdate, PromptRecord
from sglang_cake.loading.cost_model import MOST_TIERS, LoadCost, PrefillCost
from sglang_cake.loading.meet import BlockState

# By then SGLang has loaded the model on all ranks: it waits for the slowest one before.
START_S = 300.0
_HEAD = 4  # numbers of a request before those of its blocks
_NO_RECORD = -1  # this rank has no record of the request
_NEUTRAL = math.inf  # leaves the numbers of the other ranks as they are

# Settings that no decision depends on, so that each machine may have its own: addresses, folders,
# files, and sizes of host memory. Of the stores, the number of tiers must be the same.
_OF_A_MACHINE = {
    "eviction_policy",
    "queue_depth",
    "record_trace",
    "staging_bytes",
    "store",
    "trace_file",
    "write_queue_bytes",
}


class SharedCosts(NamedTuple):
    """The costs that decisions about all prompts depend on.

    Attributes:
        prefill: the cost of steps.
        busy_s: time until the device is free.
        tiers: the cost of loads, by tier.
        silence_s: as in `TierLoads`.
        measured: by tier, whether this rank has read from it lately; empty: from all of them.
        decode_step_s: the time of a step that only decodes; 0: this rank has measured none.
    """

    prefill: PrefillCost
    busy_s: float
    tiers: tuple[LoadCost, ...]
    silence_s: tuple[float, ...] = (0.0,) * MOST_TIERS
    measured: tuple[bool, ...] = ()
    decode_step_s: float = 0.0


class Vote(NamedTuple):
    """What the ranks know of some requests together.

    Attributes:
        alike: for each request, whether it is in the same state on all ranks: all have a record of
            it in that state, or none has one.
        changed: for each request, whether a rank knows more of its blocks than the ranks have
            agreed on.
        failed: whether one of the ranks failed.
        evicts: whether a rank's tree was asked for slots since the last poll.
        now_s: a clock that all ranks share. Without requests, this rank's own clock.
    """

    alike: list[bool]
    changed: list[bool]
    failed: bool
    evicts: bool
    now_s: float


class RankConsensus:
    """Turns one rank's view into the common one.

    Args:
        reduce_min: in-place MIN over a float64 CPU tensor across the ranks; None for a single rank.
    """

    def __init__(self, reduce_min: Callable[[torch.Tensor], None] | None) -> None:
        self._reduce_min = reduce_min

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""
        return self._reduce_min is None

    def await_ranks(self, timeout_s: float = START_S) -> None:
        """Every rank must call this before it reduces anything else. A node that was started
        without cake does not, and its scheduler would be waited for until the group's own timeout,
        half an hour by default.

        Raises: ConfigError if a rank is not there in time; what the reduction raises.
        """
        if self._reduce_min is None:
            return
        waiting = DaemonPool(1, "cake-ranks")  # a reduction cannot be interrupted
        try:
            waiting.submit(self._reduce_min, torch.zeros(1, dtype=torch.float64)).result(timeout_s)
        except TimeoutError:
            raise ConfigError(
                f"another rank of this server has not started cake within {timeout_s:g} s: it "
                "hangs, or another node was started without --enable-cake: give it to every node"
            ) from None
        finally:
            waiting.shutdown(wait=False)

    def everywhere(self, here: bool) -> bool:
        """Whether something is so on every rank. Every rank must call this at the same point."""
        return self.all_of([here])[0]

    def all_of(self, here: Sequence[bool]) -> list[bool]:
        """`everywhere` for several facts, equally many on each rank."""
        if self._reduce_min is None:
            return list(here)
        tensor = torch.tensor(here, dtype=torch.float64)
        self._reduce_min(tensor)
        return [bool(number) for number in tensor.tolist()]

    def same(self, texts: Sequence[str]) -> list[bool]:
        """For each text, whether all ranks have the same one. Equally many on each rank."""
        if self._reduce_min is None:
            return [True] * len(texts)
        own = [_number(each) for each in texts]
        tensor = torch.tensor([*own, *(-each for each in own)], dtype=torch.float64)
        self._reduce_min(tensor)
        least, most = tensor.view(2, -1).tolist()
        return [low == -high for low, high in zip(least, most, strict=True)]

    def gathered(self, text: str, rank: int, ranks: int) -> list[float]:
        """A number for the text of each rank, the same for equal texts. Args: rank: this one."""
        tensor = torch.full((ranks,), _NEUTRAL, dtype=torch.float64)
        tensor[rank] = _number(text)
        if self._reduce_min is not None:
            self._reduce_min(tensor)
        numbers: list[float] = tensor.tolist()
        return numbers

    def check_settings(self, config: CakeConfig, *, tiers: int, version: str) -> None:
        """Each machine of a server reads settings of its own. Every rank must call this before it
        reduces anything that depends on them.

        Args:
            tiers: of the store.
            version: of this package.

        Raises: ConfigError, on all ranks, if the versions differ, or settings that decisions
            depend on.
        """
        # Versions by themselves: another version may have another number of settings.
        if not self.same([version])[0]:
            raise ConfigError(
                "the machines of this server have different versions of sglang_cake, here "
                f"{version}: install the same version on all of them"
            )
        shared = [name for name in NAMES if name not in _OF_A_MACHINE]
        texts = [f"{as_flag(name)} {getattr(config, name)}" for name in shared]
        texts.append(f"number of tiers {tiers}")
        found = zip(texts, self.same(texts), strict=True)
        if different := [text for text, is_same in found if not is_same]:
            raise ConfigError(
                "the machines of this server have different settings, here "
                f"{', '.join(different)}: set the same on all of them"
            )

    def vote(self, records: Sequence[PromptRecord | None], *, failed: bool, evicts: bool) -> Vote:
        """Keep ranks whose records differ from reducing different lists.

        Every rank must call this at the same point of the same step with the same requests.

        Args:
            records: for each request, this rank's record.
        """
        if self._reduce_min is None or not records:
            every = [True] * len(records)
            return Vote(every, every, failed, evicts, time.monotonic())
        own: list[float] = [_NO_RECORD if record is None else _state(record) for record in records]
        own += [record is not None and _has_changed(record) for record in records]
        own += [failed, evicts, time.monotonic()]
        tensor = torch.tensor([*own, *(-each for each in own)], dtype=torch.float64)
        self._reduce_min(tensor)
        least, most = tensor.view(2, -1).tolist()
        count = len(records)
        alike = [low == -high for low, high in zip(least[:count], most[:count], strict=True)]
        changed = [bool(number) for number in most[count:-3]]
        return Vote(alike, changed, bool(most[-3]), bool(most[-2]), least[-1])

    def agree(
        self,
        records: Sequence[PromptRecord],
        changed: Sequence[bool],
        shared: SharedCosts,
    ) -> tuple[list[LoadUpdate], SharedCosts]:
        """An update for each record, and the costs to decide on.

        Every rank must call this at the same point of the same step with the same requests. A rank
        that raises takes part in the reduction all the same, with neutral numbers.

        Args:
            changed: as in `Vote`. Only for these requests are numbers of their blocks reduced.
        """
        if self._reduce_min is None:
            return [_local_update(record) for record in records], shared
        own = _pack_shared(shared)
        sizes = [
            _HEAD + _blocks_size(record) * new_facts
            for record, new_facts in zip(records, changed, strict=True)
        ]
        tensor = torch.full((len(own) + sum(sizes),), _NEUTRAL, dtype=torch.float64)
        try:
            numbers = own.copy()
            for record, new_facts in zip(records, changed, strict=True):
                numbers += _pack_head(record)
                if new_facts:
                    numbers += _pack_blocks(record)
            tensor = torch.tensor(numbers, dtype=torch.float64)
        finally:
            self._reduce_min(tensor)
        numbers = tensor.tolist()
        updates = []
        position = len(own)
        for record, size in zip(records, sizes, strict=True):
            updates.append(_unpack(record, numbers[position : position + size]))
            position += size
        return updates, _unpack_shared(shared, numbers[: len(own)])


def _number(text: str) -> int:
    """Six bytes of a digest: a float64 has every bit of them."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _pack_shared(shared: SharedCosts) -> list[float]:
    """[time until the device is free, time of a decode step, cost of steps..., silence by tier...,
    measured cost of loads by tier..., cost of loads by tier...]. The last three kinds of numbers
    are negative, so that the largest one of all ranks counts."""
    numbers = [shared.busy_s, shared.decode_step_s, *shared.prefill.numbers]
    numbers += [-silence_s for silence_s in shared.silence_s]
    costs = [[-number for number in astuple(cost)] for cost in shared.tiers]
    measured = shared.measured or (True,) * len(costs)
    # A guess is no slow link. A rank that never reads from a tier would keep its guess for ever.
    for cost, counts in zip(costs, measured, strict=True):
        numbers += cost if counts else [_NEUTRAL] * len(cost)
    return numbers + [number for cost in costs for number in cost]


def _unpack_shared(shared: SharedCosts, numbers: list[float]) -> SharedCosts:
    """Args: shared: of this rank."""
    prefill_end = 2 + len(shared.prefill.numbers)
    loads = [-number for number in numbers[prefill_end:]]
    silence_s = tuple(loads[: len(shared.silence_s)])
    size = len(fields(LoadCost))
    costs = [loads[at : at + size] for at in range(len(silence_s), len(loads), size)]
    count = len(shared.tiers)
    tiers = (
        some if math.isfinite(some[0]) else guesses
        for some, guesses in zip(costs[:count], costs[count:], strict=True)
    )
    return SharedCosts(
        prefill=shared.prefill.with_numbers(numbers[2:prefill_end]),
        busy_s=numbers[0],
        decode_step_s=numbers[1],
        tiers=tuple(LoadCost(a, b, c, d, e, int(depth)) for a, b, c, d, e, depth in tiers),
        silence_s=silence_s,
    )


def _local_update(record: PromptRecord) -> LoadUpdate:
    """The update of a single rank."""
    local, meet = record.local, record.meet
    return LoadUpdate(
        stored=None if record.agreed.lookup_done else local.stored,
        ends=local.ends,
        tiers=local.tiers,
        fetched=tuple(sorted(b for b in local.fetched if meet.has(b))),
        lost=tuple(sorted(b for b in local.lost if meet.has(b))),
        elapsed_s=record.local_elapsed_s(),
        link_idle=local.link_idle,
    )


def _state(record: PromptRecord) -> int:
    """A code for what decides how many numbers a request adds to a reduction. It must be the same
    on all ranks."""
    return record.awaits_loader + 2 * record.agreed.lookup_done


def _has_changed(record: PromptRecord) -> bool:
    local = record.local
    if not record.agreed.lookup_done:
        return local.stored is not None or bool(local.fetched) or bool(local.lost)
    return bool(local.fetched) or record.meet.wants_any(local.lost)


def _full_blocks(record: PromptRecord) -> int:
    return record.key_chain.block_count(len(record.tokens))


def _blocks_size(record: PromptRecord) -> int:
    full = 0 if record.agreed.lookup_done else _full_blocks(record)
    return 2 * len(record.meet.indices) + full * (3 if record.meet.end_blocks else 2)


def _pack_head(record: PromptRecord) -> list[float]:
    """[-elapsed_s, answered, done_or_idle, -idle], where `done` is: this rank lacks no block, and
    `idle`: it lacks one, and its link is idle. Two numbers are negative, so that the minimum over
    the ranks is the largest elapsed time, and whether any rank is idle."""
    local = record.local
    done = not _awaits_block(record)
    idle = local.link_idle and not done
    elapsed_s = _NEUTRAL if idle or done else -record.local_elapsed_s()
    return [elapsed_s, local.stored is not None, idle or done, -idle]


def _awaits_block(record: PromptRecord) -> bool:
    """Whether this rank has not fetched all blocks that are worth loading."""
    if not record.agreed.lookup_done:
        return True
    view, fetched = record.meet.view(), record.local.fetched
    least = record.agreed.load_from
    if least is None:
        return False
    at = len(view.states)
    while (at := view.states.rfind(BlockState.WANTED, max(0, least - view.first), at)) >= 0:
        if view.first + at not in fetched:
            return True
    ends = (block for block in record.meet.end_indices if block not in fetched)
    return view.end_wanted > 0 and record.meet.wants_any(ends)


def _pack_blocks(record: PromptRecord) -> list[float]:
    """[fetched..., not lost..., stored..., tiers..., ends...]. Once the lookup is done, only the
    first two kinds are sent. Tiers are negative, so that the slowest tier counts."""
    local = record.local
    blocks = record.meet.indices
    numbers: list[float] = [b in local.fetched for b in blocks]
    numbers += [b not in local.lost for b in blocks]
    if not record.agreed.lookup_done:
        numbers += local.stored or [0] * _full_blocks(record)
        numbers += [-tier for tier in local.tiers] or [0] * _full_blocks(record)
        if record.meet.end_blocks:
            numbers += local.ends or [0] * _full_blocks(record)
    return numbers


def _unpack(record: PromptRecord, numbers: list[float]) -> LoadUpdate:
    elapsed_s, answered, all_idle, one_idle = numbers[:_HEAD]
    blocks = record.meet.indices if len(numbers) > _HEAD else ()
    count, full = len(blocks), _full_blocks(record)
    fetched = numbers[_HEAD : _HEAD + count]
    not_lost = numbers[_HEAD + count : _HEAD + 2 * count]
    found = numbers[_HEAD + 2 * count :]
    looked_up = answered and not record.agreed.lookup_done
    return LoadUpdate(
        stored=tuple(map(bool, found[:full])) if looked_up else None,
        tiers=bytes(-int(tier) for tier in found[full : 2 * full]),
        ends=tuple(map(bool, found[2 * full :])),
        fetched=tuple(b for b, yes in zip(blocks, fetched, strict=True) if yes),
        lost=tuple(b for b, yes in zip(blocks, not_lost, strict=True) if not yes),
        elapsed_s=0.0 if elapsed_s == _NEUTRAL else -elapsed_s,
        link_idle=bool(all_idle and one_idle),
    )
