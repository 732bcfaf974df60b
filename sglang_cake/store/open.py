"""From a URL to the store it names."""

from sglang_cake.layout import BlockLayout
from sglang_cake.namespace import Namespace
from sglang_cake.store.base import Store
from sglang_cake.store.file import FileStore
from sglang_cake.store.paced import PacedStore
from sglang_cake.store.url import StoreUrl


def open_store(url: StoreUrl, namespace: Namespace, layout: BlockLayout, *, threads: int) -> Store:
    """Open the store; the caller closes it. Blocks on the disk for a moment.

    Args: threads: of each of the store's two pools, for reads and for writes.
    Raises: StoreUnavailable; ConfigError if the folder describes another namespace.
    """
    assert url.scheme == "file", url.scheme
    store = FileStore(
        url.path,
        namespace,
        layout,
        fsync=url.fsync,
        min_free_bytes=url.min_free_bytes,
        threads=threads,
    )
    if url.bandwidth_bytes_per_s is None:
        return store
    return PacedStore(store, bytes_per_s=url.bandwidth_bytes_per_s, block_bytes=layout.block_bytes)
