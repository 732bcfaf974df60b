"""Compute and load: a radix-cache extension of SGLang that restores stored KV from both ends.

docs/glossary.md defines the terms of all modules.

The public interface: the settings, and what a store of one's own implements. Everything else may
change with any version.
"""

from sglang_cake.config import CakeConfig
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    CakeError,
    ConfigError,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.stores.base import Store, StoreSource

__version__ = "0.2.0"

__all__ = [
    "BlockCorrupt",
    "BlockMissing",
    "CakeConfig",
    "CakeError",
    "ConfigError",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreSource",
    "StoreUnavailable",
    "__version__",
]
