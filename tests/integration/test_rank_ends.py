"""End states of a rank's own, behind blocks that all ranks share."""

from pathlib import Path
from typing import Any

import pytest

from sglang_cake.core.errors import BlockMissing
from sglang_cake.core.keys import end_keys
from sglang_cake.integration.memory.rank_ends import RankEndStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import StoreContract, block_of, key_of, read


class TestRankEndStore(StoreContract):
    def open(self, folder: Path) -> Any:
        return RankEndStore(MemoryStore(), 1, 2)


async def test_rank_end_store_blocks_are_those_of_all_ranks_and_ends_the_ranks_own() -> None:
    shared = MemoryStore()
    ranks = [RankEndStore(shared, rank, 2) for rank in range(2)]
    block = key_of("block")
    (end,) = end_keys(block, 1)
    assert await ranks[0].put_first(block, block_of("block"))
    assert not await ranks[1].put(block, block_of("block"))
    assert await ranks[0].put(end, block_of("first"))
    assert await ranks[1].contains([block, end]) == [True, False]
    with pytest.raises(BlockMissing):
        await read(ranks[1], end)
    assert await ranks[1].put(end, block_of("second"))
    for rank, name in zip(ranks, ("first", "second"), strict=True):
        assert await read(rank, end) == bytes(block_of(name))
        assert await read(rank, block) == bytes(block_of("block"))
    await ranks[0].delete(end)
    assert [await rank.contains([end]) for rank in ranks] == [[False], [True]]
