"""End states of sliding windows and recurrent layers: saved from SGLang's tree and pools, loaded,
and attached to waiting and running requests."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

import torch
from hybrid_machine import run_machine
from hybrid_trees import (
    BLOCK,
    KINDS,
    MAMBA,
    PARTS,
    SWA,
    WINDOW,
    HybridTree,
    config_of,
    digests_of,
    tree_of,
)
from kv_pools import buffers_for, record_of
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs
from sglang.srt.session.session_controller import Session
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from trees import CORES, accounting_of, lock_fuzz

from sglang_cake.core.buffers import BufferPool
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Span
from sglang_cake.core.threads import IoThread
from sglang_cake.integration.memory.block_saving import BlockSaving, Writer
from sglang_cake.integration.memory.cake_radix_cache import CUT_SHARE, CakeRadixCache
from sglang_cake.integration.memory.copier import Copier, Save
from sglang_cake.integration.memory.end_states import EndSlots, EndStates
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.integration.scheduler import queue_order
from sglang_cake.testing.memory_store import MemoryStore

PROMPT = [*range(100, 150)]  # six blocks and two tokens


def kinds() -> Any:
    return pytest.mark.parametrize("kind", KINDS)


def cores() -> Any:
    return pytest.mark.parametrize("core", CORES)


def stored(kind: str, core: str = "python", *ends: int) -> HybridTree:
    """An empty tree, and a store with the ends of the prompt at these tokens (default: 48)."""
    side = tree_of(kind, core)
    req = side.start(PROMPT)
    for end in ends or (48,):
        assert side.compute(req, min(end + side.behind, len(PROMPT)))
        assert side.save(req, end)
    assert req.prefix_len == len(PROMPT) or side.compute(req, len(PROMPT))
    side.release(req)
    side.check_slots()
    side.empty()
    return side


# ---- attach ----


@cores()
@kinds()
@pytest.mark.parametrize("front", [None, 0, 20, 44])
def test_radix_ends_attached_to_a_request_serve_the_rest(
    kind: str, core: str, front: int | None
) -> None:
    """To one that waits, and to one that runs: left of the window, and inside it."""
    side = stored(kind, core)
    req = side.restore(PROMPT, 48, front)
    side.finish(req)  # it reads what was loaded, and finds it right
    again = side.arrive(PROMPT)  # the tree has the end
    assert again.prefix_len == (
        48
        if KINDS[kind].has_mamba or side.behind
        else 49 // side.cfg.page_size * side.cfg.page_size
    )


@pytest.mark.parametrize("running", [False, True])
def test_radix_ends_of_replayssm_have_no_later_tokens_in_their_ring(
    monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    """With `--enable-linear-replayssm`, the tokens since a state in the pool are in a ring."""
    make = partial(fixtures.HybridReqToTokenPool, enable_linear_replayssm=True)
    monkeypatch.setattr(fixtures, "HybridReqToTokenPool", make)
    side = stored("state")
    req = side.start(PROMPT, BLOCK) if running else side.arrive(PROMPT)
    ring = side.requests.mamba_pool.replayssm_write_pos
    ring.fill_(3)  # as requests that decoded have left it
    assert side.load(req, 48, running=running)
    in_tree = side.tree.tree_core.get_component_device_value(req.last_node, MAMBA)
    assert ring[in_tree].tolist() == [0]
    if not running:
        assert side.admit(req)
    assert side.compute(req, len(PROMPT))
    assert int(ring[req.kv.mamba_pool_idx]) == 0
    side.release(req)
    side.check_slots()


@pytest.mark.parametrize("session", [None, Session(0)], ids=["alone", "session"])
@cores()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].has_mamba])
def test_radix_ends_skipped_request_forgets_the_state_that_it_matched(
    kind: str, core: str, session: Session | None
) -> None:
    """What it matched may be evicted before it is admitted, and its slot given to another state."""
    side = stored(kind, core)
    first = side.arrive(PROMPT)
    assert side.load(first, 48, running=False)
    side.tree.drop_state(first)
    req = side.arrive(PROMPT)
    assert req.prefix_len == 48
    assert req.kv.mamba_cow_src_index is not None  # SGLang sets it before it asks for admission
    req.session = session
    side.tree.drop_state(req)
    side.check_slots()
    side.tree.evict_for_alloc(EvictParams(num_tokens=48, mamba_num=side.cfg.mamba_cache_size))
    side.overwrite_free_states()
    req.init_next_round_input(side.tree)
    assert req.prefix_len == 0
    assert req.kv.mamba_cow_src_index is None
    assert side.admit(req)
    assert req.kv.mamba_needs_clear  # it begins with an empty state
    side.finish(req)


@pytest.mark.parametrize("skips", [False, True])
@cores()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].has_mamba])
def test_radix_ends_state_stays_until_the_next_chunk_has_copied_it(
    kind: str, core: str, skips: bool
) -> None:
    """Also with SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK: a checkpoint locks no states."""
    side = stored(kind, core)
    with envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.override(skips):
        req = side.restore(PROMPT, 48, BLOCK)
        other = side.arrive([*PROMPT[:48], *range(BLOCK)])
        assert other.prefix_len == 48
        assert side.admit(other)
        assert side.compute(other, 48 + BLOCK)
        side.release(other)
        side.tree.evict_for_alloc(EvictParams(mamba_num=side.cfg.mamba_cache_size))
        side.overwrite_free_states()
        side.check_slots()
        assert side.compute(req, len(PROMPT))
        side.release(req)
    side.check_slots()
    assert not side.tree.mamba_protected_size()
    assert not side.tree.full_protected_size()


@kinds()
def test_radix_ends_of_a_prompt_shorter_than_a_window_are_attached(kind: str) -> None:
    assert WINDOW > BLOCK
    side = stored(kind, "python", 8)
    side.finish(side.restore(PROMPT[:10], 8))


@cores()
@kinds()
def test_radix_ends_where_the_tree_has_kv_alone_are_attached(kind: str, core: str) -> None:
    """The tree has lost the windows and states, and still has the KV of full attention."""
    side = stored(kind, core)
    req = side.start(PROMPT, 40)
    side.release(req)
    other = side.arrive([*PROMPT[:40], 1, 2, 3])
    assert side.admit(other)  # so that the tree does not drop the leaf with its window
    side.tree.evict(EvictParams(swa_num_tokens=100, mamba_num=20))
    side.release(other, checkpoint=False)
    side.tree.evict(EvictParams(swa_num_tokens=100, mamba_num=20))
    side.finish(side.restore(PROMPT, 48))


@kinds()
def test_radix_ends_allocation_without_memory_leaks_no_slot(kind: str) -> None:
    side = stored(kind)
    req = side.start(PROMPT, 8)
    taken: list[Any] = []
    if SWA in side.cfg.components:
        swa = side.allocator.swa_attn_allocator
        taken.append((swa, swa.alloc(swa.available_size())))
    if MAMBA in side.cfg.components:
        states = side.requests.mamba_allocator
        taken.append((states, states.alloc(states.available_size())))
    assert side.tree.allocate_end(req, Span(8, 48)) is None
    for allocator, slots in taken:
        allocator.free(slots)
    side.check_slots()
    side.release(req)
    side.check_slots()


def test_radix_ends_loaded_state_of_a_running_request_is_in_its_row_in_the_next_step() -> None:
    """SGLang's next step reads the slot there."""
    side = stored("state")
    req = side.start(PROMPT, 8)
    former = int(req.kv.mamba_pool_idx)
    assert side.load(req, 48, running=True)
    assert int(req.kv.mamba_pool_idx) != former
    side.requests.alloc([req])  # as for each chunk
    row = side.requests.get_mamba_indices(torch.tensor([req.kv.req_pool_idx]))
    assert row.tolist() == [int(req.kv.mamba_pool_idx)]
    side.release(req, checkpoint=False)
    side.check_slots()


# ---- save ----


@cores()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].has_mamba])
def test_radix_ends_inside_the_last_chunk_keep_their_window(kind: str, core: str) -> None:
    """SGLang frees the rows that leave the window; those of the last block boundary are kept."""
    side = tree_of(kind, core)
    req = side.start(PROMPT, len(PROMPT))
    assert side.save(req, 48)
    assert not side.save(req, 32)
    side.release(req)
    side.check_slots()
    side.empty()
    side.finish(side.restore(PROMPT, 48))


@kinds()
def test_radix_ends_that_the_tree_cannot_go_on_from_are_not_saved(kind: str) -> None:
    side = tree_of(kind)
    req = side.start(PROMPT, 32 + side.behind)
    assert side.save(req, 32)
    assert not side.save(req, 8)
    assert not side.save(req, 40)
    side.tree.unlock(req.lock)
    req.lock = side.tree.lock(side.tree.root_node_handle())
    side.tree.evict(EvictParams(swa_num_tokens=100, mamba_num=20))
    assert not side.save(req, 32)


@cores()
@pytest.mark.parametrize("steps", [(60,), (32, 60), (32, 64, 92), (32, 52, 60)])
def test_radix_ends_extra_buffer_keeps_the_state_of_the_last_block_in_each_step(
    core: str, steps: tuple[int, ...]
) -> None:
    """SGLang's states are half a block apart, as with its kernels and the default block."""
    side = HybridTree(KINDS["state-extra-buffer"], core, block=2 * BLOCK)
    req = side.start([*range(100)])
    for stop in steps:
        req.extend_end = stop
        side.tree.track_end(req)
        assert side.compute(req, stop)
    assert side.save(req, steps[-1] - steps[-1] % side.block)


def step(side: HybridTree, req: Any, cut: int) -> None:
    """A step that SGLang would end at token `cut`, as the prefill adder has it."""
    req.extend_end = side.tree.cut_stop(req, cut)
    side.tree.track_end(req)
    assert side.compute(req, req.extend_end)


@cores()
@pytest.mark.parametrize("cuts", [(20, 60, 91), (4, 53, 91), (20, 23, 60, 91), (50, 91)])
def test_radix_ends_extra_buffer_keeps_the_last_state_of_a_prompt_after_a_cut_at_any_token(
    core: str, cuts: tuple[int, ...]
) -> None:
    """As of the second prompt in a chunk, which has what the first one has left. SGLang counts its
    state chunks from the start of a step."""
    side = HybridTree(replace(KINDS["state-extra-buffer"], page_size=1), core, block=2 * BLOCK)
    req = side.start([*range(91)])
    for cut in cuts:
        step(side, req, cut)
    assert side.save(req, 80)
    side.release(req)
    again = side.arrive([*range(86), 7, 7, 7])
    assert again.prefix_len == 80  # its own steps begin at a state chunk, too


@pytest.mark.parametrize(
    ("length", "cut", "stop"),
    [
        (1000, 40, 40),
        (1000, 137, 136),
        (1000, 159, 152),  # it gives up 7 of 139 tokens
        (1000, 79, 79),  # it would give up 7 of 59 tokens
        (100, 79, 72),  # the next step is the last one
        (100, 23, 23),  # it would have no tokens left
        (100, 99, 96),
        (100, 100, 100),
    ],
)
def test_radix_ends_extra_buffer_step_is_cut_between_state_chunks(
    length: int, cut: int, stop: int
) -> None:
    side = HybridTree(replace(KINDS["state-extra-buffer"], page_size=1), block=2 * BLOCK)
    req = side.start([*range(length)], 20)
    assert side.tree.cut_stop(req, cut) == stop


@given(st.integers(64, 600), st.integers(2, 300), st.data())
def test_radix_ends_extra_buffer_cuts_between_state_chunks_give_up_few_tokens(
    length: int, chunk_tokens: int, data: st.DataObject
) -> None:
    """Requests that decode take part of each step."""
    side = HybridTree(replace(KINDS["state-extra-buffer"], page_size=1), block=2 * BLOCK)
    req = SimpleNamespace(prefix_len=0, full_untruncated_fill_ids=range(length))
    given_tokens = 0
    while req.prefix_len < length:
        given = chunk_tokens - data.draw(st.integers(0, chunk_tokens // 8))
        cut = min(req.prefix_len + given, length)
        req.prefix_len = side.tree.cut_stop(req, cut)
        given_tokens += given
    assert given_tokens * (1 - CUT_SHARE) <= length + 3 * chunk_tokens


def test_radix_ends_no_buffer_step_is_cut_anywhere() -> None:
    """It keeps a state where it ends."""
    side = tree_of("state")
    assert side.tree.cut_stop(side.start(PROMPT), 21) == 21


@cores()
@pytest.mark.parametrize("steps", [(), (8,), (8, 24)])
@pytest.mark.parametrize("length", [40, 41, 47, 48, 50, 56])
def test_radix_ends_extra_buffer_with_state_chunks_of_two_blocks_keeps_the_last_state_that_it_can(
    core: str, steps: tuple[int, ...], length: int
) -> None:
    """As of a Granite 4, whose state chunks have 256 tokens, with blocks of 128."""
    side = HybridTree(KINDS["state-extra-buffer"], core, state_chunk=2 * BLOCK)
    req = side.start([*range(length)])
    for cut in (*steps, length):
        step(side, req, cut)
    first = steps[-1] if steps else 0
    assert side.save(req, length - (length - first) % side.state_chunk)


def test_radix_ends_extra_buffer_state_before_prompts_diverge_is_counted_from_the_steps_start() -> (
    None
):
    """SGLang's match found block 4, which is no state chunk of a step that begins at block 1."""
    side = HybridTree(KINDS["state-extra-buffer"], state_chunk=2 * BLOCK)
    req = side.start([*range(50)], BLOCK)
    req.mamba_branching_seqlen = 4 * BLOCK
    req.extend_end = 50
    side.tree.track_end(req)
    assert req.mamba_branching_seqlen == 3 * BLOCK


@pytest.mark.parametrize(("front", "stop"), [(0, 10), (4, 10), (5, 11), (11, None)])
def test_radix_ends_extra_buffer_step_stops_at_the_last_state_before_prompts_diverge(
    front: int, stop: int | None
) -> None:
    """In blocks; prompts diverge after 11 of them."""
    side = HybridTree(KINDS["state-extra-buffer"], state_chunk=2 * BLOCK)
    io = IoThread()
    writer = Writer(MemoryStore(), BufferPool(buffers_for(side.kv, 1)), io, Counters())
    side.tree.saving = BlockSaving(side.kv, Copier(side.kv), writer, ends=side.ends)
    record = record_of(16, block=BLOCK)
    record.agreed.stored = (True,) * 11 + (False,) * 5
    req = side.start(record.tokens, front * BLOCK)
    side.tree.coordinator.records[req.rid] = replace(record, req=req)
    found = side.tree.step_stop(req)
    io.close()
    assert found == (None if stop is None else stop * BLOCK)


@cores()
def test_radix_ends_extra_buffer_keeps_the_state_where_prompts_diverge_in_a_later_step(
    core: str,
) -> None:
    side = HybridTree(KINDS["state-extra-buffer"], core, block=2 * BLOCK)
    shared = [*range(48)]
    first = side.start([*shared, *range(900, 950)], 98)
    side.release(first)
    req = side.start([*shared, *range(800, 850)])
    assert req.mamba_branching_seqlen == len(shared)
    for stop in (32, 64, 98):
        req.extend_end = stop
        side.tree.track_end(req)
        assert side.compute(req, stop)
    side.release(req)
    assert side.arrive([*shared, *range(700, 720)]).prefix_len == len(shared)


@cores()
@pytest.mark.parametrize("kind", ["window", "window-unequal"])
@pytest.mark.parametrize("answer", [3, 7, 17, 22])
def test_radix_ends_last_block_of_an_answer_keeps_its_window(
    kind: str, core: str, answer: int
) -> None:
    """Wherever the answer ends, while SGLang frees rows that have left the window."""
    side = tree_of(kind, core)
    req = side.start(PROMPT, len(PROMPT))
    side.decode(req, range(200, 200 + answer))
    side.check_slots()
    computed = len(PROMPT) + answer - 1
    req.prefix_len = computed
    side.tree.checkpoint(req, up_to=computed)
    assert side.save(req, computed // BLOCK * BLOCK)
    side.release(req)
    side.check_slots()


def test_radix_ends_scarce_windows_are_not_kept_for_answers() -> None:
    side = tree_of("window")
    req = side.start(PROMPT, len(PROMPT))
    windows = side.allocator.swa_attn_allocator
    taken = windows.alloc(windows.available_size() - 12)
    side.decode(req, range(200, 219))
    assert side.tree.swa_retain_floor(req) is None
    windows.free(taken)
    assert side.tree.swa_retain_floor(req) == 64 - WINDOW


@pytest.mark.parametrize("chunk_tokens", [700, 800, 900, 960, 1000])
def test_radix_ends_windows_kept_for_answers_leave_room_for_a_chunk(chunk_tokens: int) -> None:
    """SGLang admits a prompt before each decode step, as without cake."""
    cfg = replace(config_of(SWA, slots=1600), max_num_reqs=24)
    side = HybridTree(cfg, block=16)
    side.tree.coordinator.step_costs.chunk_tokens = chunk_tokens
    requests = [side.start(range(1000 * number, 1000 * number + 16), 16) for number in range(24)]
    tokens = chunk_tokens + WINDOW  # its match would lock a window
    kept, admitted = set(), []
    for token in range(40):
        budget = SWAPrefillBudget(side.allocator, side.tree)
        fits, _ = budget.check_prefill(
            extend_input_len=tokens,
            total_tokens=1,  # the pool of full attention has room
            max_new_tokens=100,
            input_tokens=tokens,
            swa_host_hit_length=0,
            chunk_limit=tokens,
        )
        admitted.append(fits)
        for req in requests:
            side.decode(req, [token])
            kept.add(side.tree.swa_retain_floor(req) is not None)
    assert all(admitted)
    assert kept == {True, False}


@pytest.mark.parametrize("chunk_tokens", [16, 32, 64])
def test_radix_ends_windows_kept_for_answers_leave_room_for_a_window(chunk_tokens: int) -> None:
    """SGLang asks for a window for the answer of a prompt, also if the chunk is smaller."""
    window = 64
    cfg = replace(config_of(SWA, slots=640, window=window), max_num_reqs=24)
    side = HybridTree(cfg, block=32)
    side.tree.coordinator.step_costs.chunk_tokens = chunk_tokens
    requests = [side.start(range(1000 * number, 1000 * number + 16), 16) for number in range(6)]
    kept, admitted = set(), []
    for token in range(86):
        budget = SWAPrefillBudget(side.allocator, side.tree)
        budget.swa_offset = window  # the match of the prompt has locked a window
        fits, _ = budget.check_prefill(
            extend_input_len=3 * window,
            total_tokens=1,
            max_new_tokens=4096,
            input_tokens=4 * window,
            swa_host_hit_length=0,
            chunk_limit=chunk_tokens,
        )
        admitted.append(fits)
        for req in requests:
            side.decode(req, [token])
            kept.add(side.tree.swa_retain_floor(req) is not None)
    assert all(admitted)
    assert kept == {True, False}


@pytest.mark.parametrize("page", [1, 16])
def test_radix_ends_windows_kept_for_answers_leave_room_for_drafts(page: int) -> None:
    """SGLang retracts requests if the pool lacks slots for the drafts of all, also in the step
    after it has admitted a prompt."""
    side = HybridTree(config_of(SWA, slots=1600, page=page), block=64)
    chunk_tokens, draft_tokens = 896, 32
    side.tree.coordinator.step_costs.chunk_tokens = chunk_tokens
    side.tree.decode_tokens = draft_tokens
    requests = [side.start(range(1000 * number, 1000 * number + 16), 16) for number in range(8)]
    windows, kept, fits = side.allocator.swa_attn_allocator, set(), []
    for token in range(80):
        prompt = windows.alloc(chunk_tokens)
        fits.append(
            side.allocator.check_decode_capacity(
                num_tokens=len(requests) * draft_tokens, tree_cache=side.tree
            )
        )
        windows.free(prompt)
        for req in requests:
            side.decode(req, [token])
            kept.add(side.tree.swa_retain_floor(req) is not None)
    assert all(fits)
    assert kept == {True, False}


def test_radix_ends_windows_are_not_kept_for_answers_that_are_not_stored() -> None:
    side = tree_of("window")
    coordinator, floor = side.tree.coordinator, side.tree.swa_retain_floor
    req = side.start(PROMPT, len(PROMPT))
    side.decode(req, range(200, 219))
    assert floor(req) == 64 - WINDOW
    coordinator.store_detached = True
    assert floor(req) is None
    coordinator.store_detached = False
    coordinator.alone = True  # otherwise another rank may have a record
    assert floor(req) is None
    coordinator.records[req.rid] = replace(record_of(6, block=BLOCK), req=req)
    assert floor(req) == 64 - WINDOW


# ---- what the coordinator is told ----


@cores()
@pytest.mark.parametrize("kind", ["window", "window-pages", "window-state"])
def test_radix_ends_window_released_again_reports_no_eviction(kind: str, core: str) -> None:
    """With SGLANG_OPT_RELEASE_PREFILL_SWA, SGLang asks for it in each step of a request."""
    side = tree_of(kind, core)
    req = side.start(PROMPT, len(PROMPT))
    reported = []
    for _ in range(3):
        side.tree.coordinator.tree_evicts = False
        side.tree.release_swa_prefix_lock(req)
        reported.append(side.tree.coordinator.tree_evicts)
    assert reported == [True, False, False]
    side.tree.release_swa(None)
    assert not side.tree.coordinator.tree_evicts


@cores()
@kinds()
def test_radix_ends_checkpoint_that_frees_no_state_reports_no_eviction(
    kind: str, core: str
) -> None:
    side = tree_of(kind, core)
    requests = [side.start(PROMPT) for _ in range(2)]
    for stop in (16, 32, 48):
        for req in requests:  # of the second one, the tree has all
            assert side.compute(req, stop)
    assert not side.tree.coordinator.tree_evicts


@cores()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].has_mamba])
def test_radix_ends_checkpoint_that_frees_a_state_reports_an_eviction(kind: str, core: str) -> None:
    """With `--mamba-max-states-per-path`, a state gives way to a later one of its path. A prompt
    that waits for its next step may have matched it."""
    capped = partial(ServerArgs, mamba_max_states_per_path=1)
    side = HybridTree(KINDS[kind], core, parts={**PARTS.get(kind, {}), "ServerArgs": capped})
    req = side.start(PROMPT, 16)
    assert side.arrive(PROMPT[:20]).prefix_len == 16
    assert not side.tree.coordinator.tree_evicts
    assert side.compute(req, 32)
    assert side.compute(req, 48)
    assert side.arrive(PROMPT[:20]).prefix_len == 0
    assert side.tree.coordinator.tree_evicts


class LateCopier(Copier):
    """Launches no save before `wait_launched` asks for it, or the test for all."""

    def __init__(self, kv: DeviceKV) -> None:
        super().__init__(kv)
        self._late: dict[int, tuple[Save, Callable[[], Copy]]] = {}

    def save(self, launch: Callable[[], Copy]) -> Save:
        save = Save()
        self._late[id(save.launched)] = (save, launch)
        return save

    def wait_launched(self, launches: Sequence[Future[Copy]]) -> list[Copy | None]:
        self.launch([id(each) for each in launches if id(each) in self._late])
        return super().wait_launched(launches)

    def launch_all(self) -> None:
        self.launch(list(self._late))

    def launch(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            save, launch = self._late.pop(number)
            save.launched.set_result(launch())
            save.ended.set_result(None)


@pytest.mark.parametrize(
    ("kind", "end", "blocks"),
    [
        ("window", "aborted", [0, 1]),
        ("window-pages", "aborted", [0, 1]),
        ("state-extra-buffer", "finished", [0, 1, 2, 3, 4, 5]),
        ("window-state-extra-buffer", "finished", [0, 1, 2, 3, 4, 5]),
        ("window", "requeued", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_radix_ends_stored_blocks_are_right_after_their_slots_are_reused(
    kind: str, end: str, blocks: list[int]
) -> None:
    """The tree takes a request up to where others' windows have gone, or up to its last state. What
    is behind that is freed with the request. What it takes of a request that goes back to the queue
    may be evicted.
    """
    side = tree_of(kind)
    copier, io, memory = LateCopier(side.kv), IoThread(), MemoryStore()
    writer = Writer(memory, BufferPool(buffers_for(side.kv, 32)), io, Counters())
    side.tree.saving = BlockSaving(side.kv, copier, writer, ends=side.ends)
    record = record_of(6, block=BLOCK)
    record.agreed.lookup_done = True
    req = side.arrive(record.tokens)
    record = replace(record, req=req)
    side.tree.coordinator.records[req.rid] = record
    assert side.admit(req)
    if end == "aborted":
        req.swa_branching_seqlen = 16  # as SGLang's match finds it
    assert side.compute(req, 48)
    if end == "aborted":
        side.release(req, checkpoint=False)
    elif end == "finished":
        side.decode(req, range(200, 220))
        side.release(req)
    else:
        queue_order.requeue(req, [], side.tree, side.tree.coordinator)
        side.tree.evict(EvictParams(num_tokens=48, swa_num_tokens=48))

    free = side.full_allocator.alloc(side.full_allocator.available_size())
    side.write("full", digests_of(range(1000, 1000 + len(free))), free.to(torch.int64))
    copier.launch_all()
    io.run(writer.drained(), 60.0)
    io.close()

    tokens = req.full_untruncated_fill_ids
    slots = torch.arange(1, BLOCK + 1)
    stored, right = [], []
    for block, key in enumerate(record.key_chain.of(tokens)):
        if key in memory.blocks:
            side.write("full", digests_of(tokens)[block * BLOCK :][:BLOCK], slots)
            (buffer,) = side.buffers(1)
            side.kv.save(slots, [buffer], ())
            stored.append(block)
            right += [block] * (bytes(buffer.view) == memory.blocks[key])
    assert right == stored == blocks


# ---- negative controls ----


@pytest.mark.parametrize("kind", ["window", "window-pages", "window-unequal", "window-state"])
def test_radix_ends_window_shifted_by_a_page_is_noticed(kind: str) -> None:
    side = stored(kind)
    page = side.cfg.page_size
    save, rows = EndStates(side.ends.parts[:1]), side.ends.window_tokens
    req = side.start(PROMPT)
    for stop in (40, 48 if side.cfg.has_mamba else len(PROMPT)):
        assert side.compute(req, stop)
    good = side.tree.end_slots(req, 48)
    row = side.requests.req_to_token[req.kv.req_pool_idx, :48].to(torch.int64)
    row = side.allocator.translate_loc_from_full_to_swa(row)
    assert torch.equal(good.window, row[-rows:])
    buffers = side.buffers(save.count)
    wrong = EndSlots(row[-rows - page : -page], good.state)
    save.save(save.prepare(wrong), buffers, ())
    side.store.ends[tuple(PROMPT[:48])][: save.count] = [bytes(b.view) for b in buffers]
    side.release(req, checkpoint=False)
    side.empty()
    req = side.restore(PROMPT, 48)
    with pytest.raises(AssertionError, match="swa"):
        side.compute(req, len(PROMPT))


@pytest.mark.parametrize("kind", ["state", "state-extra-buffer", "window-state"])
@pytest.mark.parametrize("front", [None, BLOCK])
def test_radix_ends_wrong_state_is_noticed(kind: str, front: int | None) -> None:
    side = stored(kind)
    pieces = side.store.ends[tuple(PROMPT[:48])]
    piece = bytearray(pieces[-1])
    piece[3] ^= 1
    pieces[-1] = bytes(piece)
    req = side.restore(PROMPT, 48, front)
    with pytest.raises(AssertionError, match="state"):
        side.compute(req, len(PROMPT))


@kinds()
def test_end_blocks_have_zeros_behind_their_bytes(kind: str) -> None:
    """Buffers are used again: no byte of another block may be stored."""
    side = stored(kind)
    needed = sum(len(rows[0]) for name, rows in (side._states() if side.cfg.has_mamba else ()))
    pieces = side.store.ends[tuple(PROMPT[:48])]
    size = side.kv.layout.block_bytes
    assert all(len(piece) == size for piece in pieces)
    if side.cfg.has_mamba:
        states = EndStates(side.ends.parts[-1:]).count
        assert pieces[-1][needed - (states - 1) * size :].strip(b"\0") == b""
    again = tree_of(kind)
    req = again.start(PROMPT, min(48 + again.behind, len(PROMPT)))
    assert again.save(req, 48)
    assert again.store.ends == side.store.ends


def test_end_states_of_other_forms_have_other_descriptions() -> None:
    texts = [tree_of(kind).ends.describe() for kind in KINDS]
    # Windows, of two shapes, states, of two kinds, both: not pages and buffers.
    assert len(set(texts)) == 5
    wider = replace(KINDS["window"], sliding_window_size=WINDOW + 1)
    larger = replace(KINDS["state"], mamba_state_size=8)
    layers = replace(KINDS["window"], full_attention_layer_ids=(1, 2, 4))
    assert len({*texts, *(HybridTree(cfg).ends.describe() for cfg in (wider, larger, layers))}) == 8


# ---- random calls ----


@cores()
@kinds()
def test_radix_ends_random_calls_keep_kv_and_slot_counts_right(kind: str, core: str) -> None:
    run_machine(lambda: tree_of(kind, core))


# ---- beside SGLang's own tree ----


def accounting(side: HybridTree) -> list[int]:
    return accounting_of(side.tree, side.allocator, side.requests)


@pytest.mark.parametrize("seed", range(2))
@cores()
@kinds()
def test_radix_cache_random_requests_leave_the_slot_counts_of_sglangs_tree(
    kind: str, core: str, seed: int
) -> None:
    """With windows, cake's tree keeps more of them if it saves ends, so it saves none here."""
    cfg, draw = KINDS[kind], random.Random(f"{kind} {seed}")
    sides = [tree_of(kind, core, tree=tree) for tree in (CakeRadixCache, UnifiedRadixCache)]
    if cfg.has_swa:
        sides[0].tree.ends = None
    for _ in range(60):
        live = range(len(sides[0].live))
        call = draw.choice(["arrive", "arrive", "compute", "compute", "release", "evict"])
        if call == "arrive" and len(live) < 4:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(2, 40))]
            found = []
            for side in sides:
                req = side.arrive(tokens)
                found.append((req.prefix_len, side.admit(req)))
            assert found[0] == found[1]
        elif call == "compute" and live:
            which = draw.choice(live)
            req = sides[0].live[which]
            length = len(req.full_untruncated_fill_ids)
            stop = draw.randint(req.prefix_len, length)
            if stop < length:
                stop -= stop % cfg.page_size
            if stop > req.prefix_len:
                assert len({side.compute(side.live[which], stop) for side in sides}) == 1
        elif call == "release" and live:
            which = draw.choice(live)
            for side in sides:
                side.release(side.live[which])
        elif call == "evict":
            params = EvictParams(*(draw.randrange(most) for most in (60, 60, 4)))
            evicted = [side.tree.evict(params).num_tokens_evicted for side in sides]
            assert evicted[0] == evicted[1]
        assert accounting(sides[0]) == accounting(sides[1])
        for side in sides:
            side.check_slots()


# ---- SGLang's own fuzz ----


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["window", "window-state"])
def test_radix_cache_with_ends_lock_fuzz_of_sglang_leaves_the_slot_counts_of_its_tree(
    kind: str, seed: int
) -> None:
    """Without ends it runs in `test_radix_model.py`."""
    tree = type("Tree", (CakeRadixCache,), {"ends": tree_of(kind).ends})
    cfg = CacheConfig(
        components=KINDS[kind].components,
        sliding_window_size=4,
        mamba_cache_size=200,
        max_num_reqs=200,
    )
    assert lock_fuzz(tree, cfg, seed) == lock_fuzz(UnifiedRadixCache, cfg, seed)
