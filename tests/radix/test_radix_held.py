"""Slots that hold landed blocks count as evictable, and all of them are given back, last of all."""

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
from kv_pools import Staging, record_of
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from trees import CORES, SLOTS, FakeCoordinator, TreeWithSlots

from sglang_cake.core.counters import Counters
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.memory.copier import Copier
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.prompt_record import PromptRecord

BLOCK = 8


class TreeWithLandedBlocks(TreeWithSlots):
    """A tree whose coordinator holds landed blocks, by cake's own DeviceSlots."""

    def __init__(self, core: str) -> None:
        super().__init__(CakeRadixCache, 1, core)
        kv = DeviceKV(self.allocator.get_kvcache(), block_tokens=BLOCK)
        self.device_slots = DeviceSlots(
            kv,
            Copier(kv),
            self.allocator,
            self.tree.evict_own,
            Counters(),
        )
        self.staging = Staging(kv)
        self.records: list[PromptRecord] = []
        self.tree.coordinator = FakeCoordinator()
        self.tree.coordinator.held = lambda: self.device_slots.reclaimable_tokens
        self.tree.coordinator.reclaim = lambda n: self.device_slots.reclaim(self.records, n)

    def land(self, blocks: int) -> bool:
        """Have `blocks` blocks of a new prompt in device slots; False: no memory for all."""
        record = record_of(blocks, block=BLOCK, rid=f"r{len(self.records)}", extra_tokens=1)
        record.meet.found([True] * blocks)
        self.records.append(record)
        for block in range(blocks):
            self.staging.land(record, block)
        return self.device_slots.place(record, list(record.memory.staged))

    def drop(self, index: int) -> None:
        record = self.records.pop(index)
        self.device_slots.discard_all(record, "ended")

    @property
    def held(self) -> int:
        return self.device_slots.reclaimable_tokens

    def own_evictable(self) -> int:
        return int(UnifiedRadixCache.evictable_size(self.tree))


class LandedBlocksMachine(RuleBasedStateMachine):
    core = "python"

    @initialize()
    def begin(self) -> None:
        self.side = TreeWithLandedBlocks(self.core)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=24))
    def insert(self, tokens: list[int]) -> None:
        self.side.insert(tokens)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=24))
    def lock(self, tokens: list[int]) -> None:
        tree = self.side.tree
        node = self.side.match(tokens).last_device_node
        if not self.side.is_root(node):
            self.side.locks.append((node, tree.inc_lock_ref(node)))

    @precondition(lambda self: self.side.locks)
    @rule()
    def unlock(self) -> None:
        node, receipt = self.side.locks.pop()
        self.side.tree.dec_lock_ref(node, receipt.to_dec_params())

    @precondition(lambda self: len(self.side.records) < 12)  # staging has 64 buffers
    @rule(blocks=st.integers(1, 5))
    def land(self, blocks: int) -> None:
        self.side.land(blocks)

    @precondition(lambda self: self.side.records)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.side.drop(data.draw(st.integers(0, len(self.side.records) - 1)))

    @rule(tokens=st.integers(1, 60))
    def evict(self, tokens: int) -> None:
        side = self.side
        own, held, free = side.own_evictable(), side.held, side.allocator.available_size()
        result = side.tree.evict(EvictParams(num_tokens=tokens))
        freed = side.allocator.available_size() - free
        assert freed == result.num_tokens_evicted
        assert freed >= min(tokens, own + held)
        if tokens <= own:
            assert side.held == held  # landed blocks go last

    @rule(tokens=st.integers(1, 60))
    def evict_for_alloc(self, tokens: int) -> None:
        side = self.side
        promised = side.allocator.available_size() + side.tree.evictable_size()
        side.tree.evict_for_alloc(EvictParams(num_tokens=tokens))
        assert side.allocator.available_size() >= min(tokens, promised)

    @invariant()
    def no_slot_is_lost(self) -> None:
        side = self.side
        free, evictable, protected = side.accounting()
        assert free + evictable + protected == SLOTS
        assert evictable == side.own_evictable() + side.held
        assert side.tree.full_evictable_size() == evictable
        copies = [copy for r in side.records for copy in r.memory.slots.values()]
        assert side.held == sum(len(copy.slots) for copy in copies)
        side.tree.sanity_check()


@pytest.mark.parametrize("core", CORES)
def test_radix_cache_random_calls_lose_no_held_slot(core: str) -> None:
    machine = type("Machine", (LandedBlocksMachine,), {"core": core})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=40))


@pytest.mark.parametrize("core", CORES)
def test_radix_cache_landing_evicts_the_tree_but_no_landed_block(core: str) -> None:
    side = TreeWithLandedBlocks(core)
    assert side.land(6)
    side.insert(list(range(100, 140)))
    assert side.land(5)  # 8 slots are free, 32 come from the tree
    assert side.held == 11 * BLOCK
    assert not side.land(2)  # there is room for one
    assert side.held == 12 * BLOCK
    assert len(side.records[0].memory.slots) == 6
