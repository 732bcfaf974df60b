"""A Mooncake Store as a source of stores."""

from dataclasses import dataclass

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.base import Store, StoredNamespace
from sglang_cake.stores.mooncake.mooncake_engine import MooncakePlace
from sglang_cake.stores.mooncake.mooncake_store import MooncakeStore


@dataclass(frozen=True, slots=True)
class MooncakeSource:
    """Implements `StoreSource`."""

    place: MooncakePlace

    def check(self) -> None:
        """Nothing to find out: that the library loads is known, and a master may come up later."""

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        return MooncakeStore(self.place, frame, depth=depth)

    async def namespaces(self) -> list[StoredNamespace]:
        """Raises: StoreUnavailable, always."""
        raise StoreUnavailable("Mooncake Store cannot list what it holds")
