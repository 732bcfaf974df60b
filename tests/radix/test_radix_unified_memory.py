"""Pools in one memory, where SGLang moves slots: blocks and end states are saved from SGLang's tree
and pools, loaded, and attached, while slots move."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

import torch
from hybrid_machine import run_machine
from hybrid_trees import BLOCK, KINDS, Blocks, UnifiedTree
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from trees import CORES

PROMPT = [*range(100, 150)]  # six blocks and two tokens
UNIFIED = (
    "window",
    "window-pages",
    "state",
    "state-extra-buffer",
    "window-state",
    "window-state-extra-buffer",
)


@pytest.fixture(autouse=True)
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's allocators wait for transfers on the current stream, also on a CPU."""
    stream = SimpleNamespace(wait_event=lambda event: event.wait(None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def kinds() -> Any:
    return pytest.mark.parametrize("kind", UNIFIED)


def stored(kind: str, core: str = "python") -> UnifiedTree:
    """An empty tree, and a store with the prompt's ends at 16, 32 and 48."""
    side = UnifiedTree(KINDS[kind], core)
    other = side.start([*range(300, 340)], 40)  # its slots are freed, so that others move
    req = side.start(PROMPT)
    for end in (16, 32, 48):
        assert side.compute(req, end)
        assert side.save(req, end)
    side.release(other, checkpoint=False)
    side.tree.evict(EvictParams(num_tokens=40, swa_num_tokens=40, mamba_num=4))
    side.check_slots()
    side.finish(req)
    side.empty()
    return side


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("front", [None, 2 * BLOCK])
@kinds()
def test_radix_unified_memory_loaded_blocks_and_ends_serve_the_rest(
    kind: str, front: int | None, core: str
) -> None:
    side = stored(kind, core)
    other = side.start([*range(300, 340)], 40)
    req = side.restore(PROMPT, 48, front)
    side.release(other, checkpoint=False)
    side.tree.evict(EvictParams(num_tokens=40, swa_num_tokens=40, mamba_num=4))
    side.check_slots()
    assert side.moves
    side.finish(req)  # it reads what was loaded, and finds it right


class LandedBlocks(Blocks):
    """A coordinator that holds slots of landed blocks."""

    def __init__(self, allocator: Any, slots: torch.Tensor) -> None:
        super().__init__(BLOCK, reclaimable_tokens=len(slots))
        self._allocator = allocator
        self._slots = slots

    def reclaim(self, tokens: int) -> int:
        count = -(-tokens // BLOCK) * BLOCK
        self._allocator.free_segment(self._slots[:count], start_pos=0)
        self._slots = self._slots[count:]
        self.reclaimable_tokens = len(self._slots)
        return count


@pytest.mark.parametrize("kind", ["state", "window-state"])
def test_radix_unified_memory_states_get_the_memory_of_landed_blocks(kind: str) -> None:
    """What no step of SGLang's own tree could free."""
    side = UnifiedTree(KINDS[kind])
    full = side.full_allocator
    page = side.cfg.page_size
    landed = full.alloc(full.available_size() // page * page)
    side.tree.coordinator = LandedBlocks(full, landed)
    assert side.free_states() == 0
    side.tree.evict_for_alloc(EvictParams(mamba_num=2))
    assert side.free_states() >= 2
    assert 0 < side.tree.coordinator.reclaimable_tokens < len(landed)
    assert side.requests.mamba_allocator.alloc(2) is not None


def test_radix_unified_memory_state_of_a_slot_that_moved_is_noticed() -> None:
    """The control: the rows of a state are not its number."""
    side = stored("state")
    states = side.requests.mamba_allocator
    side.scramble()
    states.free(states.alloc(2)[:1])  # the next one gets another number, and this row
    ends = side.ends
    assert ends is not None
    ends.prepare = lambda end: [end.state] * ends.count  # type: ignore[method-assign, list-item]
    req = side.arrive(PROMPT)
    assert side.load(req, 48, running=False)
    assert side.admit(req)
    with pytest.raises(AssertionError, match="state"):
        side.compute(req, len(PROMPT))


@kinds()
def test_radix_unified_memory_random_calls_keep_kv_and_slot_counts_right(kind: str) -> None:
    run_machine(lambda: UnifiedTree(KINDS[kind]))
