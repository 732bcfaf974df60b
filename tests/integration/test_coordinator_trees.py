"""A coordinator with SGLang's own tree, allocators and pools, of families that no server on a CPU
runs: sliding windows beside recurrent states, DeepSeek V4 and V4.1, V3.2 and MiniMax M3.

Each step reads what a model's step would, and finds it right (`HybridTree.check_context`).
"""

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest

pytest.importorskip("sglang.test.kits.unified_radix_cache")  # from SGLang 0.5.23 on

from coordinator_harness import NAMESPACE, NO_MEMORY, CoordinatorHarness
from faults import Fault
from held_reads import PATIENCE_S
from hybrid_trees import SPARSE, CompressedTree, HybridTree, RequestWindowTree, SparseTree, tree_of
from kv_pools import buffers_for

from sglang_cake.core.buffers import BufferPool
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey, KeyChain, KeySeed, end_keys
from sglang_cake.integration.memory.block_saving import BlockSaving, Writer

KINDS: dict[str, Callable[[], HybridTree]] = {
    "window-state": partial(tree_of, "window-state"),
    "window-state-extra-buffer": partial(tree_of, "window-state-extra-buffer"),
    "window-unequal": partial(tree_of, "window-unequal"),
    "deepseek v4": partial(CompressedTree, pages=12),
    "deepseek v4.1, replay": partial(CompressedTree, kind="v4.1, replay", pages=12),
    "deepseek v4.1, windows of requests": partial(RequestWindowTree, pages=12),
    "dsa": partial(SparseTree, SPARSE["dsa"]),
    "minimax": partial(SparseTree, SPARSE["minimax"]),
}
BLOCKS = 6  # of a document


def document_of(side: HybridTree) -> list[int]:
    return [*range(1000, 1000 + BLOCKS * side.block)]


@cache
def documented(kind: str) -> dict[BlockKey, bytes]:
    """What another server has stored of the document, with the ends in its middle and behind it."""
    side = KINDS[kind]()
    document, chain = document_of(side), KeyChain(KeySeed(NAMESPACE), side.block)
    req = side.start([*document, 1])
    for blocks in (BLOCKS // 2, BLOCKS):
        assert side.compute(req, blocks * side.block)
        assert side.save(req, blocks * side.block)
    keys = chain.of(document)
    stored = {k: side.store.blocks[(*document[: n * side.block],)] for n, k in enumerate(keys, 1)}
    for end, pieces in side.store.ends.items():
        stored |= dict(zip(end_keys(chain.of(end)[-1], len(pieces)), pieces, strict=True))
    return stored


class TreeHarness(CoordinatorHarness):
    """The coordinator serves requests of the tree, as the prefill adder has it."""

    def __init__(self, kind: str) -> None:
        self.side = KINDS[kind]()
        self.block_tokens = self.side.block
        count = 0 if self.side.ends is None else self.side.ends.count
        super().__init__(tree=self.side, end_blocks=count, staging=2 * count + 2 * BLOCKS)
        self.question = [*range(1, 4 + self.side.tail_tokens)]
        self.chain = KeyChain(KeySeed(NAMESPACE), self.block_tokens)
        self.document = document_of(self.side)
        stored = documented(kind)
        self.store(dict(stored))
        self.keys = [*stored]
        ends = end_keys(self.chain.of(self.document)[-1], count)
        self.end = [stored[key] for key in ends]  # behind the document
        self.side.scramble()
        self.side.tree.coordinator = self.coordinator

    def prompt(self, tokens: Sequence[int]) -> Any:
        req = self.side.arrive(tokens)
        tree = self.side.tree
        matched = lambda tokens, limit: tree.matched_tokens(req, tokens, limit)  # noqa: E731
        self.coordinator.arrive(req, matched)
        self.side.waiting.append(req)
        self.settle()
        return req

    def run_step(self, req: Any) -> bool:
        """One scheduling step of a request. True: its prefill is over."""
        side, tree = self.side, self.side.tree
        page, chunk = side.cfg.page_size, 2 * self.block_tokens
        if self.coordinator.awaits_lookup(req):
            return False
        if req in side.waiting:
            req.init_next_round_input(tree)
            lock = tree.lock(req.last_node)
            try:
                self.coordinator.attach_islands(req, tree.attach_waiting, tree)
            finally:
                tree.unlock(lock)
            side.check_slots()
        else:
            self.coordinator.attach_islands(req, tree.attach_running, tree)
            side.check_slots()
        plan = self.coordinator.plan(req, chunk)
        if plan is not None and plan.wait:
            if req in side.waiting:
                tree.drop_state(req)
            return False
        total = len(req.full_untruncated_fill_ids)
        stop = min(total, req.prefix_len + chunk) if plan is None else plan.stop
        if stop < total:
            stop -= stop % page
        if stop <= req.prefix_len:
            return False
        lock = tree.lock(req.last_node)  # its prefix is not evicted for its step
        try:
            if not side.room(stop - req.prefix_len + 2 * page):
                return False
            if req in side.waiting:
                if not side.admit(req):
                    return False
                side.waiting.remove(req)
        finally:
            tree.unlock(lock)
        req.extend_end = stop
        self.coordinator.claimed(req, stop)
        tree.track_end(req)
        assert side.compute(req, stop)
        side.check_slots()
        return stop == total

    def prefill(self, req: Any, steps: int = 60) -> dict[str, int]:
        """Until its prefill is over; the report."""
        for _ in range(steps):
            for _ in range(3):
                self.poll(*self.side.live, *self.side.waiting)
            if self.run_step(req):
                [report] = req.customized_info["cake"]
                return report
        raise AssertionError("no progress")

    def go(self, req: Any, *, checkpoint: bool = True) -> None:
        """It has ended, or is aborted."""
        side = self.side
        if req in side.waiting:
            side.waiting.remove(req)
            side.drop(req)
            self.coordinator.release(req.rid)
        else:
            side.release(req, checkpoint=checkpoint)
        side.check_slots()

    def all_back(self) -> None:
        """Every request ends, and all that the coordinator had is back."""
        for req in [*self.side.live, *self.side.waiting]:
            self.go(req)
        self.settle()
        self.poll()
        assert list(self.coordinator.live) == []
        assert self.coordinator.reclaimable_tokens == 0
        assert self.staging.free == self.staging.capacity
        assert self.slow.waiting == []
        self.side.check_slots()


def kinds() -> Any:
    return pytest.mark.parametrize("kind", KINDS)


@kinds()
def test_coordinator_trees_waiting_prompt_is_loaded_to_its_end(kind: str) -> None:
    with TreeHarness(kind) as harness:
        harness.open(*harness.keys)
        req = harness.prompt([*harness.document, *harness.question])
        report = harness.prefill(req)
        assert report["loaded_tokens"] == len(harness.document)
        assert report["computed_tokens"] == len(harness.question)


@kinds()
def test_coordinator_trees_running_prompt_meets_what_has_landed(kind: str) -> None:
    with TreeHarness(kind) as harness:
        req = harness.prompt([*harness.document, *harness.question])
        harness.poll(req)
        assert not harness.run_step(req)
        computed = req.prefix_len
        assert 0 < computed < len(harness.document)
        harness.open(*harness.keys)
        report = harness.prefill(req)
        assert report["loaded_tokens"] > 0
        assert report["meet_token"] >= computed
        if isinstance(harness.side, RequestWindowTree):
            assert harness.side.replays
        assert report["loaded_tokens"] + report["computed_tokens"] == len(req.origin_input_ids)


def running_prompt(harness: TreeHarness) -> Any:
    """A prompt between two chunks, left of its target, which lands with the next polls."""
    req = harness.prompt([*harness.document, *harness.question])
    harness.poll(req)
    assert not harness.run_step(req)
    harness.open(*harness.keys)
    return req


def waiting_prompt(harness: TreeHarness) -> Any:
    """A prompt in the queue, whose target lands with the next polls."""
    req = harness.prompt([*harness.document, *harness.question])
    harness.open(*harness.keys)
    return req


several_end_blocks = pytest.mark.parametrize(
    "kind", ["window-state", "window-state-extra-buffer", "window-unequal"]
)


@several_end_blocks
@pytest.mark.parametrize("running", [True, False])
def test_coordinator_trees_end_state_copied_in_part_leaves_the_state_of_its_request(
    kind: str, running: bool
) -> None:
    """One end block finds no device memory, the others are copied. The request goes on."""
    with TreeHarness(kind) as harness:
        first, *others = harness.end
        harness.copier.errors[first] = NO_MEMORY
        harness.prefill(running_prompt(harness) if running else waiting_prompt(harness))
        assert not harness.copier.errors
        assert {*others} <= {*harness.copier.launched}


@several_end_blocks
def test_coordinator_trees_end_state_of_which_a_block_is_lost_is_stored_again(kind: str) -> None:
    """Its first block is stored, and each lookup finds that one."""
    with TreeHarness(kind) as harness:
        side, chain = harness.side, harness.chain.of(harness.document)
        lower, (first, *_, lost) = (
            end_keys(chain[blocks - 1], len(harness.end)) for blocks in (BLOCKS // 2, BLOCKS)
        )
        for key in (*lower, lost):
            del harness.memory.blocks[key]
        buffers = BufferPool(buffers_for(harness.kv, 20))
        writer = Writer(harness.memory, buffers, harness.io, harness.counters)
        side.tree.saving = BlockSaving(harness.kv, harness.copier, writer, ends=side.ends)
        harness.open(*harness.keys)
        req = harness.prompt([*harness.document, *harness.question])
        assert harness.prefill(req)["loaded_tokens"] == 0
        harness.go(req)
        harness.io.run(writer.drained(), PATIENCE_S)
        assert harness.memory.blocks[first] == harness.end[0]
        assert harness.memory.blocks[lost] == harness.end[-1]


@several_end_blocks
def test_coordinator_trees_end_block_that_is_late_leaves_the_state_of_its_request(
    kind: str,
) -> None:
    """The copier has launched the other end blocks by then."""
    with TreeHarness(kind) as harness:
        *others, last = harness.end
        harness.copier.held.add(last)
        harness.prefill(running_prompt(harness))
        assert {*others} <= {*harness.copier.launched}
        assert last not in harness.copier.launched


@pytest.mark.parametrize("running", [True, False])
def test_coordinator_trees_error_of_an_end_block_withdraws_those_after_it(running: bool) -> None:
    """Their slots are free by the time that the copier gets to them."""
    with TreeHarness("window-state") as harness:
        first, *others = harness.end
        harness.copier.errors[first] = Fault("a copy")
        harness.copier.held.update(others)
        req = running_prompt(harness) if running else waiting_prompt(harness)
        with pytest.raises(Fault):
            harness.prefill(req)
        assert others
        assert not {*others} & {*harness.copier.launched}
        with pytest.raises(Fault):
            harness.poll()  # as the server hears of it


def test_coordinator_trees_failure_behind_a_loaded_end_leaves_the_state_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TreeHarness("window-state") as harness:
        req = running_prompt(harness)

        def fail(*args: Any) -> None:
            raise Fault("take_slots")

        monkeypatch.setattr(harness.device_slots, "take_slots", fail)
        with pytest.raises(Fault):
            harness.prefill(req)
        harness.coordinator.release(req.rid)  # as the boundary does: SGLang computes the request
        harness.side.check_slots()
        assert harness.side.compute(req, len(req.full_untruncated_fill_ids))


@kinds()
@pytest.mark.parametrize("running", [True, False])
def test_coordinator_trees_failure_before_slots_join_the_tree_frees_them(
    monkeypatch: pytest.MonkeyPatch, kind: str, running: bool
) -> None:
    with TreeHarness(kind) as harness:
        side, tree = harness.side, harness.side.tree
        req = running_prompt(harness) if running else waiting_prompt(harness)

        def fail(*args: Any) -> None:
            raise NO_MEMORY

        with monkeypatch.context() as patch:
            patch.setattr(tree, "give_running" if running else "prefix_device_indices", fail)
            with pytest.raises(type(NO_MEMORY)):
                harness.prefill(req)
        harness.coordinator.release(req.rid)  # as the boundary does: SGLang computes the request
        side.check_slots()
        if not running:
            assert side.admit(req)
            side.waiting.remove(req)
        assert side.compute(req, len(req.full_untruncated_fill_ids))


def test_coordinator_trees_forgotten_request_is_a_failure_and_an_aborted_one_is_none() -> None:
    """Other ranks hear of a failure in the next vote."""
    with TreeHarness("window-state") as harness:
        tree, coordinator = harness.side.tree, harness.coordinator
        req = harness.prompt(harness.document)
        tree.release_aborted_request(req)
        tree.give_up_all()
        assert not coordinator.live
        assert not coordinator.failed
        tree.forget(req.rid)
        assert coordinator.failed
        coordinator.failed = False
        tree.forget(None)
        assert coordinator.failed
        harness.side.waiting.remove(req)
        harness.side.drop(req)


@kinds()
@pytest.mark.parametrize("how", ["aborted", "back in the queue"])
def test_coordinator_trees_prompt_that_goes_behind_an_attached_end_returns_its_state(
    kind: str, how: str
) -> None:
    """Before the next step, as an abort or a return to the queue between two chunks."""
    with TreeHarness(kind) as harness:
        side, req = harness.side, running_prompt(harness)
        front = req.prefix_len
        for _ in range(5):
            harness.poll(req)
        harness.coordinator.attach_islands(req, side.tree.attach_running, side.tree)
        assert req.prefix_len > front
        side.check_slots()
        harness.go(req, checkpoint=how != "aborted")


@kinds()
@pytest.mark.parametrize(
    ("running", "landed"), [(False, "everything"), (True, "nothing"), (True, "some blocks")]
)
def test_coordinator_trees_abort_returns_all_of_a_prompt(
    kind: str, running: bool, landed: str
) -> None:
    with TreeHarness(kind) as harness:
        req = harness.prompt([*harness.document, *harness.question])
        harness.poll(req)
        if running:
            assert not harness.run_step(req)
            assert req in harness.side.live
        count = {"nothing": 0, "some blocks": 3, "everything": len(harness.keys)}[landed]
        harness.open(*harness.slow.waiting[:count])
        if landed == "everything":
            harness.open(*harness.keys)
        harness.poll(req)
        harness.side.check_slots()
        harness.go(req, checkpoint=False)
        harness.open(*harness.keys)


@kinds()
def test_coordinator_trees_slots_that_another_prompt_needs_are_given_up(kind: str) -> None:
    with TreeHarness(kind) as harness:
        side, block = harness.side, harness.block_tokens
        harness.open(*harness.keys)
        req = harness.prompt([*harness.document, *harness.question])
        for _ in range(3):
            harness.poll(req)
        placed = harness.coordinator.reclaimable_tokens
        assert placed == len(harness.document)
        free = side.full_allocator.available_size()
        other = side.start(range(50_000, 50_000 + free), free // block * block)
        assert side.room(block)
        assert harness.coordinator.reclaimable_tokens < placed
        side.check_slots()
        harness.go(other, checkpoint=False)
        report = harness.prefill(req)
        assert report["loaded_tokens"] < len(harness.document)


@kinds()
def test_coordinator_trees_random_prompts_and_faults_return_everything(kind: str) -> None:
    seeds = range(8 if "window" in kind else 3)  # the others have large blocks
    assert sum(loaded_by_random_prompts(kind, seed) for seed in seeds) > 0


def loaded_by_random_prompts(kind: str, seed: int) -> int:
    """How many tokens were loaded, for prompts that end, or are aborted, in a pool that is too
    small for the tree to keep them all."""
    dice = random.Random(f"{kind} {seed}")
    with TreeHarness(kind) as harness:
        side, whole = harness.side, len(harness.document)
        for key in harness.keys:
            if dice.random() < 0.01:
                harness.faulty.fail(key, BlockCorrupt("x"))
        prompts, loaded = 6, 0
        for _ in range(2000):
            requests = [*side.live, *side.waiting]
            if not prompts and not requests:
                break
            if prompts and len(requests) < 3 and dice.random() < 0.4:
                part = dice.choice([whole, whole, dice.randrange(whole)])
                own = range(10_000 * prompts, 10_000 * prompts + dice.randint(1, 40))
                harness.prompt([*harness.document[:part], *own])
                prompts -= 1
            if dice.random() < 0.3:
                some = dice.sample(harness.keys, len(harness.keys) // 3)
                harness.open(*dice.choice([some, harness.keys]))
            if dice.random() < 0.2:
                side.room(dice.choice([side.block, side.full_allocator.size]))
            requests = [*side.live, *side.waiting]
            harness.poll(*requests)
            if not requests or dice.random() < 0.4:
                continue
            req = dice.choice(requests)
            if harness.run_step(req):
                [report] = (req.customized_info or {}).get("cake", [{}])
                loaded += report.get("loaded_tokens", 0)
                harness.go(req)
            elif dice.random() < 0.05:
                harness.go(req, checkpoint=False)
        else:
            raise AssertionError("no progress")
    return loaded
