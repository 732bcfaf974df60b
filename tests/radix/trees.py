"""Trees of any class, built as SGLang's unit kits build theirs."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from kv_pools import mha
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

CORES = ("python", "rust")
SLOTS = 96


def config_of(page: int, slots: int = SLOTS) -> Any:
    from sglang.test.kits.unified_radix_cache.config import CacheConfig

    return CacheConfig(page_size=page, kv_size=slots, num_layers=1, head_num=1, head_dim=2)


def build(cls: type, page: int, core: str) -> tuple[Any, Any, Any]:
    """(tree, allocator, request pool) as SGLang's fixture makes them, with a server's tree core."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page))
    requests = ReqToTokenPool(size=10, max_context_len=512, device="cpu", enable_memory_saver=False)
    pool = mha(SLOTS, page=page, heads=1, dim=2, layers=1)
    allocator = TokenToKVPoolAllocator(
        size=SLOTS, dtype=torch.float32, device="cpu", kvcache=pool, need_sort=False
    )
    params = CacheInitParams(
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=page,
        disable=False,
        tree_components=(ComponentType.FULL,),
    )
    with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(core):
        tree = cls(params=params)
    assert tree._tree_core_backend == core
    return tree, allocator, requests


def lock_fuzz(cls: type, cfg: Any, seed: int) -> list[int]:
    """Run the kit of SGLang that locks nodes of a tree with windows at random. It needs the Python
    core.

    Returns: free, evictable and locked memory of each component in the end.
    """
    from sglang.test.kits.unified_radix_cache import fixtures, insert_walk

    built = []

    def build_fixture(*args: Any, **kwargs: Any) -> Any:
        built.append(fixtures.build_fixture(*args, **kwargs))
        return built[-1]

    fuzz = insert_walk.SegmentLockFuzzFixtures()
    fuzz.cfg = cfg
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixtures, "UnifiedRadixCache", cls)
        patch.setattr(fixtures, "get_device", lambda: "cpu")
        patch.setattr(insert_walk, "build_fixture", build_fixture)
        fuzz._run_seed(seed)
    [(tree, allocator, requests)] = built
    return accounting_of(tree, allocator, requests)


def accounting_of(tree: Any, allocator: Any, requests: Any) -> list[int]:
    """Free, evictable and locked memory of each component."""
    full = getattr(allocator, "full_attn_allocator", allocator)
    sizes = [full.available_size(), tree.full_evictable_size(), tree.full_protected_size()]
    if tree.supports_swa():
        free = allocator.swa_attn_allocator.available_size()
        sizes += [free, tree.swa_evictable_size(), tree.swa_protected_size()]
    if tree.supports_mamba():
        free = requests.mamba_allocator.available_size()
        sizes += [free, tree.mamba_evictable_size(), tree.mamba_protected_size()]
    return sizes


def key_of(tokens: list[int], extra: str | None = None) -> RadixKey:
    return RadixKey(array("q", tokens), extra_key=extra)


class TreeWithSlots:
    """A tree with its allocator and request pool."""

    def __init__(self, cls: type, page: int, core: str) -> None:
        self.tree, self.allocator, self.requests = build(cls, page, core)
        self.locks: list[tuple[Any, Any]] = []

    def insert(self, tokens: list[int], extra: str | None = None) -> int | None:
        """How much of it was there; None if there are no slots for it."""
        short = len(tokens) - self.allocator.available_size()
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        value = self.allocator.alloc(len(tokens))
        if value is None:
            return None
        result = self.tree.insert(InsertParams(key=key_of(tokens, extra), value=value))
        return int(result.prefix_len)

    def match(self, tokens: list[int], extra: str | None = None) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=key_of(tokens, extra)))

    def is_root(self, node: Any) -> bool:
        return bool(node == self.tree.root_node_handle())

    def accounting(self) -> tuple[int, int, int]:
        tree = self.tree
        return self.allocator.available_size(), tree.evictable_size(), tree.protected_size()


class FakeCoordinator:
    """A coordinator without requests, or with those whose landed blocks a test holds."""

    def __init__(self) -> None:
        self.held: Callable[[], int] = lambda: 0
        self.reclaim: Callable[[int], int] = lambda tokens: 0

    @property
    def reclaimable_tokens(self) -> int:
        return self.held()

    def record(self, req: object) -> None:
        return None

    def inserted(self, key: object) -> None:
        pass

    def release(self, rid: str) -> None:
        pass

    def emptied(self) -> None:
        pass
