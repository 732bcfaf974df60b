"""Random calls on a tree and its pools: every step reads right KV, and each slot has one owner."""

from collections.abc import Callable
from copy import deepcopy

from hybrid_trees import HybridTree, Store
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

SETTINGS = settings(max_examples=15, stateful_step_count=50)
UNIT_BLOCK = 8  # the numbers below are for blocks of so many tokens, and 20 of them in a pool


def tokens_of(document: int, tokens: int) -> list[int]:
    return [10_000 * (document + 1) + at for at in range(tokens)]


def with_documents(side: HybridTree) -> Store:
    """The store of this tree with two documents."""
    unit = side.block // UNIT_BLOCK
    for document in range(2):
        req = side.arrive(tokens_of(document, 57 * unit))
        assert side.admit(req)
        for stop in (16, 32, 56):
            assert side.compute(req, min(stop * unit + side.behind, 57 * unit))
            assert side.save(req, stop * unit)
        side.release(req, checkpoint=False)
    return side.store


class HybridMachine(RuleBasedStateMachine):
    """Requests come, are loaded for, are computed, and go, in a pool that is too small for all."""

    make: Callable[[], HybridTree]
    stored: Store  # two documents

    @initialize()
    def begin(self) -> None:
        self.side = type(self).make()
        self.side.store = deepcopy(self.stored)
        self.unit = self.side.block // UNIT_BLOCK

    def tokens_of(self, document: int, units: int) -> list[int]:
        return tokens_of(document, units * self.unit)

    @precondition(lambda self: len(self.side.live) < 4)  # SGLang has states for those that run
    @rule(
        document=st.integers(0, 1),
        shared=st.sampled_from([0, 7, 16, 30, 33, 56, 60, 60]),
        more=st.integers(1, 30),
        own=st.integers(0, 2),
        loads=st.sampled_from([False, False, True]),
    )
    def arrive(self, document: int, shared: int, more: int, own: int, loads: bool) -> None:
        """A prompt of a part of a document and a question, with a load if it is stored."""
        side = self.side
        tokens = self.tokens_of(document, shared)
        tokens += self.tokens_of(2 + own, more)[own:]
        if not tokens:
            return
        req = side.arrive(tokens)
        end = side.stored_end(tokens, req.prefix_len)
        if loads and end is not None and side.load(req, end, running=False):
            assert req.prefix_len >= end
        side.admit(req)

    @precondition(lambda self: self.side.live)
    @rule(data=st.data(), blocks=st.integers(1, 4), aligned=st.booleans())
    def compute(self, data: st.DataObject, blocks: int, aligned: bool) -> None:
        side = self.side
        live = [req for req in side.live if req.prefix_len < len(req.full_untruncated_fill_ids)]
        if not live:
            return
        req = data.draw(st.sampled_from(live), "req")
        total = len(req.full_untruncated_fill_ids)
        stop = (req.prefix_len // side.block + blocks) * side.block
        if stop >= total or not aligned:
            page = side.cfg.page_size
            inside = (stop - 3 * self.unit) // page * page
            stop = total if stop >= total else max(req.prefix_len + page, inside)
        stop = min(stop, total)
        req.extend_end = stop
        side.tree.track_end(req)
        if side.compute(req, stop):
            end = req.kv.cache_protected_len // side.block * side.block
            if end and side.save(req, end):
                assert end <= stop

    @precondition(lambda self: self.side.live)
    @rule(data=st.data(), aborts=st.booleans())
    def load(self, data: st.DataObject, aborts: bool) -> None:
        side = self.side
        ends = [
            (req, end)
            for req in side.live
            if req.prefix_len % side.cfg.page_size == 0
            and (end := side.stored_end(req.full_untruncated_fill_ids, req.prefix_len))
        ]
        if not ends:
            return
        req, end = data.draw(st.sampled_from(ends), "req, end")
        if side.load(req, end, running=True, aborts=aborts):
            assert req.prefix_len == end
        elif aborts:
            side.release(req, checkpoint=False)

    @precondition(lambda self: self.side.live)
    @rule(data=st.data(), checkpoint=st.booleans())
    def release(self, data: st.DataObject, checkpoint: bool) -> None:
        self.side.release(data.draw(st.sampled_from(self.side.live), "req"), checkpoint=checkpoint)

    @rule(full=st.integers(0, 60), window=st.integers(0, 60), states=st.integers(0, 4))
    def evict(self, full: int, window: int, states: int) -> None:
        tokens = (full * self.unit, window * self.unit)
        self.side.tree.evict(EvictParams(*tokens, mamba_num=states))

    @precondition(lambda self: not self.side.live)
    @rule()
    def reset(self) -> None:
        self.side.empty()

    @invariant()
    def the_books_balance(self) -> None:
        if getattr(self, "side", None):
            self.side.check_slots()

    def teardown(self) -> None:
        if getattr(self, "side", None):
            for req in list(self.side.live):
                self.side.release(req, checkpoint=False)
            self.side.check_slots()


def run_machine(make: Callable[[], HybridTree]) -> None:
    names = {"make": staticmethod(make), "stored": with_documents(make())}
    machine = type("Machine", (HybridMachine,), names)
    run_state_machine_as_test(machine, settings=SETTINGS)
