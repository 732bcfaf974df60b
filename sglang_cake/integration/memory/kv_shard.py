"""Which part of a model's KV a tensor-parallel rank holds, and which of its blocks it stores."""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_cake.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvShard:
    """The KV of one rank. Ranks that hold the same shard share a namespace, and divide the work of
    storing its blocks: each block is stored by one rank of each machine, and read by all.

    Attributes:
        index, count: shard `index` of `count` different ones.
        has_all_heads: all ranks hold the same KV, whatever their number.
        end_rank: `(rank, ranks)` of the end states. Where the ranks hold the same KV, and each has
            the recurrent states of its own heads, every rank stores its own end states.
        holder, holders: this rank is number `holder` of the `holders` ranks on this machine that
            hold the shard. Ranks on other machines may have other disks, so each machine stores
            every block.
    """

    index: int = 0
    count: int = 1
    holder: int = 0
    holders: int = 1
    has_all_heads: bool = False
    end_rank: tuple[int, int] = (0, 1)

    @classmethod
    def of_rank(
        cls,
        rank: int,
        machines: Sequence[float],
        *,
        replicated: bool,
        has_own_states: bool = False,
    ) -> "KvShard":
        """
        Args:
            rank: within the group that shares the attention of a request.
            machines: a number of each rank's machine, for all ranks of that group.
            replicated: all ranks of the group hold the same KV; else each holds its own heads.
            has_own_states: the ranks divide recurrent states by heads.
        """
        size = len(machines)
        if not replicated:
            return cls(rank, size)
        here = [each for each in range(size) if machines[each] == machines[rank]]
        end = (rank, size) if has_own_states else (0, 1)
        return cls(holder=here.index(rank), holders=len(here), has_all_heads=True, end_rank=end)

    def stores(self, block: int) -> bool:
        """Whether this rank stores a new block for all holders of the shard."""
        return block % self.holders == self.holder

    def stores_end(self, block: int) -> bool:
        """Whether this rank stores a new end state after a block."""
        return self.end_rank[1] > 1 or self.stores(block)

    def head_groups(self, groups: int | None) -> range | None:
        """The groups of KV heads that this rank holds, if the model's heads are divided into
        `groups` groups in order. None: blocks are stored whole. Servers with as many ranks read
        such blocks; with MLA, all servers do.

        Raises: ConfigError if the groups cannot be divided among the ranks.
        """
        if groups is None or self.has_all_heads:
            return None
        if groups % self.count:
            raise ConfigError(wrong_head_groups(groups, self.count))
        own = groups // self.count
        return range(self.index * own, (self.index + 1) * own)


def wrong_head_groups(groups: int, ranks: int) -> str:
    """The error for a number of head groups that so many ranks cannot divide."""
    return (
        f"--cake-head-groups {groups} is no multiple of the {ranks} tensor-parallel ranks that "
        f"share attention: set {ranks}, or a multiple of it"
    )


SOLE = KvShard()  # no other rank has a part of the KV
