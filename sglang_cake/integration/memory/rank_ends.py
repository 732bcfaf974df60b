"""End states of a rank's own, behind blocks that all ranks share."""

from collections.abc import Sequence

from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.keys import BlockKey, EndKey, rank_end_key
from sglang_cake.stores.base import LentBlock, Store, lend, put_first
from sglang_cake.stores.request_facts import RequestFacts
from sglang_cake.stores.wrapper_store import WrapperStore


class RankEndStore(WrapperStore):
    """Gives the end blocks of a rank keys of its own. All other blocks keep theirs.

    With MLA beside recurrent layers, KV is the same on all ranks, and each rank has the states of
    its own heads.
    """

    def __init__(self, inner: Store, rank: int, ranks: int) -> None:
        super().__init__(inner)
        self._rank = rank
        self._ranks = ranks

    def _own(self, key: BlockKey) -> BlockKey:
        return rank_end_key(key, self._rank, self._ranks) if isinstance(key, EndKey) else key

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await super().contains([self._own(key) for key in keys])

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        return await super().get_into(self._own(key), out, progress)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        return await super().put(self._own(key), data)

    async def delete(self, key: BlockKey) -> None:
        await super().delete(self._own(key))

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """As in `AccessListener`."""
        await super().on_access([self._own(key) for key in keys], facts)

    def sources(self, keys: Sequence[BlockKey]) -> list[int]:
        """As in `TierHints`."""
        return super().sources([self._own(key) for key in keys])

    def lend(self, key: BlockKey) -> LentBlock | None:
        """As in `Lending`."""
        return lend(self.inner, self._own(key))

    async def put_first(self, key: BlockKey, data: memoryview) -> bool:
        """As in `KnowsFirst`."""
        return await put_first(self.inner, key, data)
