"""The base class of eviction policies, admission, and the facts about a block behind both: its
last access, and the prefill time that it saves."""

import contextlib
import math
import struct
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from sglang_cake.stores.eviction.reuse_model import ReuseFits, Unlocked


class AccessContext(NamedTuple):
    """Facts about the last request that accessed a block.

    The SQLite index has a column for each field, under the field's name.
    """

    workload: str = ""  # purpose that the request declared
    turn: int = 1  # turn of its conversation; 1: no earlier prompt is a prefix of it
    position: int = 0  # index of the block in the prompt
    reach: int = 1  # blocks of the prompt
    tenant: int = 0  # hash of the tenant; 0: the request names none


# Tenant of a block that was put without a report, or that a scan found on the disk, until a request
# reports the block. No request has this tenant.
UNKNOWN_TENANT: Final = 2**63 - 1
UNKNOWN_CONTEXT: Final = AccessContext(tenant=UNKNOWN_TENANT)


# A block left of the meeting point saves nothing while all other blocks are stored. It keeps this
# share of its compute time as benefit: a later request may need less of the prompt.
HEAD_SHARE: Final = 0.1
MAX_BLOCK_TOKENS: Final = 65_536
_MIN_SAVED_S: Final = 1e-12  # over a slow link the difference of two large numbers may round to 0


@dataclass(frozen=True, slots=True)
class Benefit:
    """Compute and load costs, from which the benefit of a block follows by its position: the
    prefill time that it saves a prompt that is computed and loaded at once (docs/eviction.md
    derives the formulas).

    Eviction compares benefits, so only their ratios matter. The defaults describe a dense model
    with hidden size 4096, where a (query, key) pair costs 1 / (6 x 4096) of a token. Their link
    loads a block in a third of the time that computing the first block of a prompt takes.

    Attributes:
        block_tokens: tokens of a block, from 1 to MAX_BLOCK_TOKENS.
        token_s: seconds of prefill per token, without attention.
        pair_s: seconds of prefill per (query, key) pair, causal.
        load_s: seconds of loading per block.

    Raises:
        ValueError: a cost is outside the range of real machines.
    """

    block_tokens: int = 128
    token_s: float = 1e-4
    pair_s: float = 1e-4 / (6 * 4096)
    load_s: float = 128 * 1e-4 / 3

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS or not 1e-12 <= self.token_s <= 10:
            raise ValueError("block_tokens or token_s is out of bounds")
        if not 0 <= self.pair_s <= 1 or not 1e-9 <= self.load_s <= 1e4:
            raise ValueError("pair_s or load_s is out of bounds")

    def compute_s(self, position: float) -> float:
        """Seconds that computing the block at `position` takes, with all blocks before it cached. A
        fraction interpolates."""
        tokens = self.block_tokens
        pairs = tokens * tokens * (position + 0.5)
        return self.token_s * tokens + self.pair_s * pairs

    def meeting_block(self, prompt_blocks: int) -> float:
        """Block at which computing from the front and loading from the back finish together, with
        all blocks stored: solves (compute time of m blocks) = (prompt_blocks - m) x load_s for m.
        """
        square = self.pair_s * self.block_tokens**2 / 2
        linear = self.token_s * self.block_tokens + self.load_s
        root = math.sqrt(linear**2 + 4 * square * prompt_blocks * self.load_s)
        return 2 * prompt_blocks * self.load_s / (linear + root)

    def saved_s(self, position: int, prompt_blocks: int) -> float:
        """Seconds that the block at `position` saves the next request for its prompt.

        Assumes that the next request needs the same `prompt_blocks` blocks as the last request.
        """
        share = 1.0 if position + 1 > self.meeting_block(prompt_blocks) else HEAD_SHARE
        return share * self.compute_s(position)

    def mean_saved_s(self, prompt_blocks: int) -> float:
        """Seconds that a prompt of `prompt_blocks` stored blocks saves, divided by its blocks."""
        meet = self.meeting_block(prompt_blocks)
        all_s = prompt_blocks * self.compute_s((prompt_blocks - 1) / 2)
        computed_s = meet * self.compute_s((meet - 1) / 2)
        return max(_MIN_SAVED_S, (all_s - computed_s) / prompt_blocks)


@dataclass(frozen=True, slots=True)
class Usage:
    """Facts about a block. Times are seconds of the store's clock."""

    stored_bytes: int
    created_s: float
    used_s: float  # last write or access
    uses: int  # accesses since the block was written
    ident: int  # survives eviction: a block that is stored again has the same `ident`
    context: AccessContext = UNKNOWN_CONTEXT


# All fields but the workload, which comes behind them.
_USAGE: Final = struct.Struct("=QddQQQQQQ")


class UsageTable(MutableMapping[int, Usage]):
    """Usage by block, in bytes: Python's garbage collector visits none of them (see `queues`).
    Numbers have 64 bits and, times excepted, no sign."""

    def __init__(self) -> None:
        self._rows: dict[int, bytes] = {}

    def __getitem__(self, block: int) -> Usage:
        row = self._rows[block]
        numbers = _USAGE.unpack_from(row)
        stored_bytes, created_s, used_s, uses, ident = numbers[:5]
        context = AccessContext(row[_USAGE.size :].decode(), *numbers[5:])
        return Usage(stored_bytes, created_s, used_s, uses, ident, context)

    def __setitem__(self, block: int, usage: Usage) -> None:
        workload, *context = usage.context
        numbers = (usage.stored_bytes, usage.created_s, usage.used_s, usage.uses, usage.ident)
        self._rows[block] = _USAGE.pack(*numbers, *context) + workload.encode()

    def __delitem__(self, block: int) -> None:
        del self._rows[block]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def ident_of(key: bytes) -> int:
    """`Usage.ident` of the block with this key: 63 bits of the key."""
    return int.from_bytes(key[:8]) >> 1


class EvictionPolicy:
    """Order of blocks. A block is an integer, and gets a new one each time that it is stored.

    This class holds the usage of every block. A subclass implements `add`, `remove` and `pop`.

    A policy is not thread-safe: the caller holds a lock. A call costs at most O(log n) for n
    blocks, plus O(c) for c request classes; for `S3FifoPolicy.pop` that holds only on average.
    `refresh` may cost more, and runs in the background.
    """

    def __init__(self) -> None:
        self._usage = UsageTable()

    def __len__(self) -> int:
        return len(self._usage)

    def add(self, block: int, usage: Usage) -> None:
        """Insert a block, or replace the usage of a block that is present."""
        raise NotImplementedError

    def touch(
        self, block: int, at_s: float, uses: int = 1, context: AccessContext | None = None
    ) -> None:
        """Record accesses to a block. Unknown blocks are ignored.

        The blocks of one request are touched from last to first, so that its first block is the
        most recently used one.

        Args:
            at_s: time of the last of these accesses.
            uses: how many accesses.
            context: facts about the request; None keeps those of the request before it.
        """
        usage = self._usage.get(block)
        if usage is None:
            return
        touched = Usage(
            usage.stored_bytes,
            usage.created_s,
            max(at_s, usage.used_s),
            usage.uses + uses,
            usage.ident,
            usage.context if context is None else context,
        )
        self.add(block, touched)

    def remove(self, block: int) -> None:
        """Remove a block that is no longer stored. Unknown blocks are ignored."""
        raise NotImplementedError

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        """Remove and return the block to evict next, with its usage. None: no block is left. One
        that stays after all goes to `give_back`."""
        raise NotImplementedError

    def give_back(self, block: int, usage: Usage) -> None:
        """Insert a block again that `pop` returned with this usage, in its old place. If others
        were added since, the policy may take this one for a new block."""
        self.add(block, usage)

    def record_rejected(self, usage: Usage) -> None:
        """Record an access to a block that admission rejected, so that the statistics of its class
        stay current, and it can be admitted again."""

    def reuse_probability(self, usage: Usage) -> float:
        """Probability that a block with this usage is ever accessed again; 1 if unknown."""
        return 1.0

    def refresh(self, now_s: float, unlocked: Unlocked = contextlib.nullcontext) -> None:
        """Update the reuse statistics. The store calls it about once a second. Args: unlocked: see
        `reuse_model.Unlocked`."""

    def over_quota_bytes(self) -> int:
        """Bytes that tenants hold above their quota. To be evicted in any case."""
        return 0

    def set_benefit(self, benefit: Benefit) -> None:
        """Replace the costs. A block has its new benefit from its next access on."""

    def fits_to_save(self) -> ReuseFits:
        """Reuse statistics that a restart should keep; empty while nothing was learned."""
        return {}

    def resume(self, fits: ReuseFits, now_s: float) -> None:
        """Continue with the statistics of before a restart at `now_s`. Blocks are added only
        afterwards."""


def admits(
    policy: EvictionPolicy, usage: Usage, benefit: Benefit, min_benefit_ratio: float
) -> bool:
    """Whether to write a block with this usage: the seconds that it is expected to save are at
    least `min_benefit_ratio` times those that loading it takes (docs/eviction.md#admission). A
    block without context is always admitted.
    """
    if usage.context is UNKNOWN_CONTEXT:
        return True
    expected_s = policy.reuse_probability(usage) * benefit.mean_saved_s(usage.context.reach)
    return expected_s >= min_benefit_ratio * benefit.load_s
