"""From a user's URLs to one open store."""

import asyncio
import threading

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.stores.base import Store, StoreSource
from sglang_cake.stores.tiers.lazy_store import LazyStore
from sglang_cake.stores.tiers.tiered_store import TieredStore


def open_store(sources: list[StoreSource], frame: BlockFrame, *, depth: int) -> Store:
    """Open one namespace of the store; the caller closes it. May block on a disk for a moment.

    Several sources are the tiers of one store, fastest first. One of them that cannot be opened now
    is opened when it can; the first that can be opened is enough.

    Args: depth: calls of each kind that should be served at once.
    Raises: StoreUnavailable; ConfigError if what is there describes something else.
    """
    if len(sources) == 1:
        return sources[0].open(frame, depth=depth)
    stores: list[Store] = []
    failures: list[StoreUnavailable] = []
    try:
        for source in sources:
            try:
                stores.append(source.open(frame, depth=depth))
            except StoreUnavailable as error:
                failures.append(error)
                stores.append(LazyStore(source, frame, depth=depth))
        if len(failures) == len(sources):
            raise failures[0]
    except (ConfigError, StoreUnavailable):
        _close_all(stores)
        raise
    return TieredStore(stores, block_bytes=frame.payload_bytes)


def _close_all(stores: list[Store]) -> None:
    async def close() -> None:
        for store in stores:
            await store.close()

    # In a thread of its own: this one may be running an event loop.
    thread = threading.Thread(target=lambda: asyncio.run(close()), name="cake-close")
    thread.start()
    thread.join()
