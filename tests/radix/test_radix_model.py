"""CakeRadixCache behaves as SGLang's own tree, whose fixtures build both here."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.insert_walk import SegmentLockFuzzFixtures

from sglang_cake.adapter.coordinator import Coordinator
from sglang_cake.adapter.landing import Landing
from sglang_cake.adapter.pools import DeviceKV
from sglang_cake.adapter.restore import Restore
from sglang_cake.adapter.tree import CakeRadixCache
from sglang_cake.buffers import BufferPool
from sglang_cake.counters import Counters
from sglang_cake.keys import Digest, KeyChain, KeySeed
from sglang_cake.read.meet import Meet
from sglang_cake.read.staging import StagedBlock

CORES = ("python", "rust")
SLOTS = 96
BLOCK = 8
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
SETTINGS = settings(max_examples=25, stateful_step_count=40, deadline=None)


def build(cls: type, page: int, core: str, slots: int = SLOTS) -> tuple[Any, Any, Any]:
    """SGLang's fixture, for another class of tree: (tree, allocator, request pool)."""
    config = CacheConfig(page_size=page, kv_size=slots, num_layers=1, head_num=1, head_dim=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixtures, "UnifiedRadixCache", cls)
        try:
            return fixtures.build_fixture(config, tree_core_backend=core)
        except (ImportError, ModuleNotFoundError) as error:
            pytest.skip(f"the {core} core is not installed: {error}")


def key_of(tokens: list[int], extra: str | None = None) -> RadixKey:
    return RadixKey(array("q", tokens), extra_key=extra)


class _Side:
    """One tree with its slots."""

    def __init__(self, cls: type, page: int, core: str) -> None:
        self.tree, self.allocator, self.requests = build(cls, page, core)
        self.locks: list[tuple[Any, Any]] = []

    def insert(self, tokens: list[int], extra: str | None) -> Any:
        short = len(tokens) - self.allocator.available_size()
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        value = self.allocator.alloc(len(tokens))
        if value is None:
            return None
        result = self.tree.insert(InsertParams(key=key_of(tokens, extra), value=value))
        return result.prefix_len

    def match(self, tokens: list[int], extra: str | None) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=key_of(tokens, extra)))

    def books(self) -> tuple[int, int, int]:
        return (
            self.allocator.available_size(),
            self.tree.evictable_size(),
            self.tree.protected_size(),
        )


class TwoTrees(RuleBasedStateMachine):
    """The same calls on cake's tree and on SGLang's; they must answer alike."""

    page = 1
    core = "python"

    @initialize()
    def begin(self) -> None:
        self.sides = [_Side(cls, self.page, self.core) for cls in (CakeRadixCache, self.model())]
        self.sides[0].tree.coordinator = _idle_coordinator()

    @staticmethod
    def model() -> type:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        return UnifiedRadixCache

    def whole(self, tokens: list[int]) -> list[int]:
        """The tokens at page size 1; each as one page otherwise."""
        return [t for token in tokens for t in [token] * self.page][: SLOTS // 2 // self.page * self.page]

    @rule(tokens=TOKENS, extra=st.sampled_from([None, "x"]))
    def insert(self, tokens: list[int], extra: str | None) -> None:
        one, other = (side.insert(self.whole(tokens), extra) for side in self.sides)
        assert one == other

    @rule(tokens=TOKENS, extra=st.sampled_from([None, "x"]))
    def match(self, tokens: list[int], extra: str | None) -> None:
        one, other = (side.match(self.whole(tokens), extra) for side in self.sides)
        assert one.device_prefix_len == other.device_prefix_len

    @rule(tokens=TOKENS)
    def lock(self, tokens: list[int]) -> None:
        for side in self.sides:
            node = side.match(self.whole(tokens), None).last_device_node
            if not side.tree.tree_core.is_root(node):
                side.locks.append((node, side.tree.inc_lock_ref(node)))
        assert len({len(side.locks) for side in self.sides}) == 1

    @precondition(lambda self: getattr(self, "sides", None) and self.sides[0].locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.sides[0].locks) - 1))
        for side in self.sides:
            node, receipt = side.locks.pop(which)
            side.tree.dec_lock_ref(node, receipt.to_dec_params())

    @rule(tokens=st.integers(0, 40))
    def evict(self, tokens: int) -> None:
        one, other = (side.tree.evict(EvictParams(num_tokens=tokens)) for side in self.sides)
        assert one.num_tokens_evicted == other.num_tokens_evicted

    @precondition(lambda self: getattr(self, "sides", None) and not self.sides[0].locks)
    @rule()
    def reset(self) -> None:
        for side in self.sides:
            side.tree.reset()
            side.allocator.clear()

    @invariant()
    def the_books_agree(self) -> None:
        if getattr(self, "sides", None):
            cake, model = self.sides
            assert cake.books() == model.books()
            for side in self.sides:
                side.tree.sanity_check()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page", [1, 4])
def test_the_tree_answers_as_sglangs_own(page: int, core: str) -> None:
    build(CakeRadixCache, page, core)  # skips without this core
    machine = type("Machine", (TwoTrees,), {"page": page, "core": core})
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_sglangs_lock_fuzz_passes(page: int, core: str, seed: int) -> None:
    build(CakeRadixCache, page, core)
    fuzz = SegmentLockFuzzFixtures()
    fuzz.cfg = CacheConfig(page_size=page, kv_size=256, num_layers=1, head_num=1, head_dim=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixtures, "UnifiedRadixCache", CakeRadixCache)
        patch.setattr(fixtures, "TREE_CORE_TEST_BACKEND", core)
        fuzz._run_seed(seed)


def _idle_coordinator() -> Any:
    """A coordinator of nobody."""
    return SimpleNamespace(
        held_tokens=0,
        reclaim=lambda tokens: 0,
        restore=lambda rid: None,
        end=lambda rid: None,
        emptied=lambda: None,
        step_s=0.0,
    )


# ---- slots that hold landed blocks ----


class _Holding:
    """A tree whose coordinator holds landed blocks, with cake's own Landing."""

    def __init__(self, page: int, core: str) -> None:
        self.tree, self.allocator, _ = build(CakeRadixCache, page, core)
        kv = DeviceKV(self.allocator.get_kvcache(), block_tokens=BLOCK)
        self.landing = Landing(kv, self.allocator, self.tree.evict_own, Counters())
        self.pool = BufferPool(SLOTS // BLOCK, kv.new_buffer)
        self.restores: list[Restore] = []
        self.tree.coordinator = SimpleNamespace(
            **vars(_idle_coordinator()), **{}
        )
        coordinator = self.tree.coordinator
        coordinator.reclaim = lambda tokens: self.landing.reclaim(self.restores, tokens)
        type(coordinator).held_tokens = property(lambda _: self.landing.held_tokens)
        del coordinator.__dict__["held_tokens"]

    def land(self, blocks: int) -> bool:
        """Have `blocks` blocks of a new prompt in device slots."""
        tokens = array("q", range(blocks * BLOCK + 1))
        meet = Meet(
            block_tokens=BLOCK, page_tokens=1, limit_tokens=len(tokens), prompt_tokens=len(tokens)
        )
        chain = KeyChain(KeySeed(Digest(bytes(32))), BLOCK)
        restore = Restore(rid=f"r{len(self.restores)}", tokens=tokens, chain=chain, meet=meet)
        meet.found([True] * blocks)
        self.restores.append(restore)
        for block in range(blocks):
            buffer = self.pool.take()
            if buffer is None:
                return False
            staged = StagedBlock(buffer, self.pool, lambda _: None)
            restore.meet.landed(block)
            restore.staged[block] = staged
        return self.landing.place(restore, range(blocks))

    @property
    def held(self) -> int:
        return self.landing.held_tokens
