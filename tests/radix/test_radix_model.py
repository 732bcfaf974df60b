"""CakeRadixCache behaves as SGLang's own tree, under the same calls."""

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

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
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures
from trees import CORES, SLOTS, FakeCoordinator, TreeWithSlots, config_of, lock_fuzz

from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
SETTINGS = settings(max_examples=15, stateful_step_count=40)


class TwoTrees(RuleBasedStateMachine):
    """The same calls on cake's tree and on SGLang's; they must answer alike."""

    page = 1
    core = "python"

    @initialize()
    def begin(self) -> None:
        self.sides = [
            TreeWithSlots(cls, self.page, self.core) for cls in (CakeRadixCache, UnifiedRadixCache)
        ]
        self.sides[0].tree.coordinator = FakeCoordinator()

    def whole(self, tokens: list[int]) -> list[int]:
        """The tokens at page size 1; each as one page otherwise."""
        room = SLOTS // 2 // self.page
        return [token for token in tokens[:room] for _ in range(self.page)]

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
            if not side.is_root(node):
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
    def the_states_agree(self) -> None:
        if getattr(self, "sides", None):
            coordinator, model = self.sides
            assert coordinator.accounting() == model.accounting()
            for side in self.sides:
                side.tree.sanity_check()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page", [1, 4])
def test_radix_cache_random_calls_answer_as_sglangs_tree(page: int, core: str) -> None:
    machine = type("Machine", (TwoTrees,), {"page": page, "core": core})
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("seed", range(4))
def test_radix_cache_lock_fuzz_of_sglang_leaves_the_slot_counts_of_its_tree(seed: int) -> None:
    components = (ComponentType.FULL, ComponentType.SWA)
    cfg = CacheConfig(page_size=1, components=components, sliding_window_size=4)
    assert lock_fuzz(CakeRadixCache, cfg, seed) == lock_fuzz(UnifiedRadixCache, cfg, seed)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page", [1, 4])
def test_radix_cache_checkpoints_give_the_same_tree_as_sglang(page: int, core: str) -> None:
    """Chunk by chunk, with locks that move along, on both trees."""
    kit = UnifiedRadixCacheFixtures()
    kit.cfg = config_of(page)
    seen = []
    for cls in (CakeRadixCache, UnifiedRadixCache):
        side = TreeWithSlots(cls, page, core)
        if cls is CakeRadixCache:
            side.tree.coordinator = FakeCoordinator()
        ids = [token for token in range(12) for _ in range(page)][:40]
        side.insert(ids[: 4 * page])
        req, _ = kit._make_inflight_req(
            side.tree, side.allocator, side.requests, ids, allocated=True
        )
        steps = []
        for stop in (2 * page, 6 * page, len(ids)):
            side.tree.checkpoint(req, up_to=stop)
            side.tree.sanity_check()
            steps.append((side.accounting(), side.match(ids).device_prefix_len))
        seen.append(steps)
    assert seen[0] == seen[1]
