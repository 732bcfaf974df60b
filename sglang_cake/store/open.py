"""From a user's URLs to one open store."""

from sglang_cake.codec.frame import BlockFrame
from sglang_cake.store.base import Store, StoreSource


def open_store(sources: list[StoreSource], frame: BlockFrame, *, depth: int) -> Store:
    """Open one namespace of the store; the caller closes it. May block on a disk for a moment.

    Args: depth: calls of each kind that should be served at once.
    Raises: StoreUnavailable; ConfigError if what is there describes something else.
    """
    (source,) = sources
    return source.open(frame, depth=depth)
