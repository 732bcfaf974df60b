"""An overlapped last step, with a store whose bytes come as a test says and a forward that checks
the KV that it would read."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("sglang")

from coordinator_harness import BLOCK, PAGE, CoordinatorHarness, FakeReq, req_of
from faults import Fault
from held_reads import PATIENCE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_pools import as_bytes, buffers_of

from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey, Span
from sglang_cake.integration.boundary import BOUNDARY, OriginalFunction
from sglang_cake.integration.memory.kv_pool import Copy
from sglang_cake.integration.overlap import overlapped_step
from sglang_cake.integration.overlap.layer_gate import LayerGate, PoolRows
from sglang_cake.integration.overlap.overlapped_step import OverlapRunner
from sglang_cake.loading.cost_model import PrefillCost
from sglang_cake.stores.base import WrapperStore

LAYERS = 2
TOKEN_S = 1.0
Make = Callable[..., "LastStepHarness"]
Fate = Literal["whole", "corrupt", "anew", "never"]


class PieceStore(WrapperStore):
    """Reads get as much as the test says; `fates` says what comes of them."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.fates: dict[BlockKey, Fate] = {}
        self._share: dict[BlockKey, float] = {}  # of a block's bytes that may come
        self._changed = asyncio.Condition()

    async def give(self, share: float, *keys: BlockKey) -> None:
        async with self._changed:
            self._share |= dict.fromkeys(keys, share)
            self._changed.notify_all()

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        block, fate = bytearray(len(out)), self.fates.get(key, "whole")
        size = await self.inner.get_into(key, memoryview(block))
        assert progress is not None
        progress(0)
        turns, done = [block], 0
        if fate in ("corrupt", "anew"):
            turns.insert(0, bytearray(byte ^ 0xFF for byte in block))
        while done < size or fate == "never":
            async with self._changed:
                while (came := int(self._share.get(key, 0) * size)) <= done:
                    await self._changed.wait()
            done = came
            out[:done] = turns[0][:done]
            progress(done)
        if fate == "corrupt":
            raise BlockCorrupt("as the checksum says")
        if fate == "anew":
            progress(0)
            out[:] = block
            progress(size)
        return size


class LastStepHarness:
    """A prompt whose blocks are all stored, on a server without other requests or a model."""

    def __init__(self, *, slots: int = 20 * BLOCK) -> None:
        # A step takes longer than all loads: they win, and the last step may begin at once.
        self.base = CoordinatorHarness(
            slots=slots,
            mode="auto",
            prefill=PrefillCost(0.0, TOKEN_S, 0.0, error=0.0),
            store=PieceStore,
        )
        base = self.base
        base.step_costs.overlap_share = 1 - 1 / LAYERS
        self.gate = LayerGate(base.pool, LAYERS)
        self.rows = PoolRows(base.kv)
        self.last = OverlapRunner(
            base.coordinator,
            base.loader,
            base.device_slots,
            self.rows,
            self.gate,
            base.counters,
        )
        self.req, self.keys = FakeReq("none", req_of(1).origin_input_ids), []
        self.computed: list[Span] = []
        self.bad = 0  # layers that the last forward found wrong
        self.sampled = 0  # forwards that came to their end
        self.skips: set[int] = set()  # layers that attention does not come to, the first time
        self.on_layer: Callable[[int], None] = lambda layer: None

    def arrive(
        self,
        blocks: float,
        matched: int = 0,
        *,
        fates: Sequence[Fate] = (),
        asks: dict[str, object] | None = None,
    ) -> FakeReq:
        self.req = req = req_of(blocks)
        req.sampling_params.custom_params = asks
        self.keys = self.base.fill(req.origin_input_ids, set(range(int(blocks))))
        self.base.front.fates = dict(zip(self.keys, fates, strict=False))
        self.base.arrive(req, matched)
        return req

    def give(self, share: float, *blocks: int) -> None:
        keys = [self.keys[block] for block in blocks]
        self.base.io.run(self.base.front.give(share, *keys), PATIENCE_S)
        self.base.settle()

    def begin(self) -> Span | None:
        """As a scheduling step does for a request that is alone."""
        self.base.coordinator.poll([self.req.rid])
        self.base.coordinator.attach_islands(self.req, self.base.attach)
        step = self.base.coordinator.plan(self.req, 64)
        if step is None or not step.wait:
            return None
        return self.last.begin(self.req, 64)  # type: ignore[arg-type]

    def schedule(self, span: Span) -> Any:
        req: Any = self.req
        req.prefix_len = span.stop
        slots = self.last.confirm(req)
        assert len(slots) == span.tokens
        req.owned.append(slots)
        total = len(req.origin_input_ids)
        pages = -(-(total - span.stop) // PAGE)
        own = self.base.allocator.alloc(pages * PAGE)
        req.owned.append(own)
        self.base.coordinator.claimed(req, total, overlapped=True)
        self.slots = torch.cat([*req.owned])[:total]
        return SimpleNamespace(
            reqs=[req],
            prefix_lens=[span.stop],
            extend_lens=[total - span.stop],
            extend_num_tokens=total - span.stop,
            extend_logprob_start_lens=None,
            input_ids=torch.arange(total - span.stop),
            out_cache_loc=own,
            seq_lens=torch.tensor([total]),
            seq_lens_cpu=torch.tensor([total]),
        )

    def run(self, batch: Any) -> None:
        assert self.last.is_due(batch)
        with patch.object(overlapped_step, "run_forward", self.part):
            self.last.forward(OriginalFunction(self._forward), None, batch)
        assert not self.last.is_due(batch)

    def _forward(self, worker: Any, batch: Any) -> None:
        self.bad = 0
        for layer in range(LAYERS):
            self.on_layer(layer)
            if layer not in self.skips:
                self.gate.wait_until(layer)
                self.gate.wait_until(layer)  # K, then V
            self.bad += not self.is_right(layer, batch.prefix_lens[0])
        self.sampled += 1
        self.skips = set()

    def part(self, worker: Any, part: Any) -> None:
        """A forward over what is missing."""
        span = Span(part.prefix_lens[0], part.seq_lens_cpu.item())
        assert part.input_ids.tolist() == self.req.origin_input_ids[span.start : span.stop].tolist()
        assert part.out_cache_loc.tolist() == self.slots[span.start : span.stop].tolist()
        self.computed.append(span)
        for layer in range(LAYERS):
            for buffer, want in self._rows_of(layer, span):
                as_bytes(buffer)[part.out_cache_loc] = want

    def is_right(self, layer: int, stop: int) -> bool:
        """Whether the pool holds what is stored of the tokens `[0, stop)`."""
        owned = self.req.owned[0] if len(self.req.owned) > 2 else ()  # what was in the tree
        span = Span(len(owned), stop)
        return all(
            torch.equal(as_bytes(buffer)[self.slots[span.start : span.stop]], want)
            for buffer, want in self._rows_of(layer, span)
        )

    def _rows_of(self, layer: int, span: Span) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        sizes = [plane.row_bytes for plane in self.base.kv.layout.planes]
        parts = len(sizes) // LAYERS
        blocks = [
            torch.frombuffer(bytearray(self.base.block(b)), dtype=torch.uint8)
            for b in range(-(-span.stop // BLOCK))
        ]
        for plane in range(layer * parts, (layer + 1) * parts):
            at, size = sum(sizes[:plane]) * BLOCK, sizes[plane]
            rows = torch.cat([b[at : at + size * BLOCK].view(BLOCK, size) for b in blocks])
            yield buffers_of(self.base.pool)[plane], rows[span.start : span.stop]

    def over(self) -> dict[str, Any]:
        """The report that the response tells; everything is given back."""
        [report] = self.req.customized_info["cake"]  # type: ignore[index]
        self.base.all_back()
        return dict(report)

    def failures(self) -> dict[str, int]:
        counted = self.base.counters.snapshot().items()
        return {label: n for (name, label), n in counted if name == "overlap_failures" and n}


@pytest.fixture
def harnesses() -> Iterator[Make]:
    with ExitStack() as running:

        def make(**settings: Any) -> LastStepHarness:
            made = LastStepHarness(**settings)
            running.enter_context(made.base)
            return made

        yield make


def _fail(*args: Any, **kwargs: Any) -> None:
    raise Fault


def rows_cannot_begin(harness: "LastStepHarness") -> None:
    harness.rows.begin = _fail  # type: ignore[method-assign]


def the_first_copy_fails(harness: "LastStepHarness") -> None:
    write = harness.rows.write

    def fail_once(*args: Any) -> Copy:
        harness.rows.write = write  # type: ignore[method-assign]
        raise Fault

    harness.rows.write = fail_once  # type: ignore[method-assign]


def every_copy_fails(harness: "LastStepHarness") -> None:
    harness.rows.write = _fail  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "computed"),
    [
        (rows_cannot_begin, []),
        (the_first_copy_fails, []),
        (every_copy_fails, [Span(0, 2 * BLOCK)]),
    ],
)
def test_overlapped_step_failing_part_still_gives_right_kv(
    harnesses: Make, fault: Callable[[Any], None], computed: list[Span]
) -> None:
    harness = harnesses()
    harness.arrive(2.5)
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    harness.give(1.0, 0, 1)
    fault(harness)
    harness.run(batch)
    assert harness.bad == 0
    assert harness.computed == computed


def test_overlapped_step_failing_count_gives_right_kv_and_ends_the_restore(harnesses: Make) -> None:
    harness = harnesses()
    req = harness.arrive(2.5)
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    harness.give(1.0, 0, 1)
    add = harness.base.counters.add

    def fail(name: str, *args: Any, **kwargs: Any) -> None:
        if name == "overlapped_tokens":
            raise Fault
        add(name, *args, **kwargs)

    harness.base.counters.add = fail  # type: ignore[method-assign]
    harness.run(batch)
    assert (harness.bad, harness.sampled) == (0, 1)
    assert harness.base.coordinator.record(req) is None


def test_overlapped_step_neither_loaded_nor_computed_gives_no_output(harnesses: Make) -> None:
    harness = harnesses()
    harness.part = _fail
    req: Any = harness.arrive(2.5, fates=["whole", "corrupt"])
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    harness.give(1.0, 0, 1)
    before = BOUNDARY.counts.total()
    harness.run(batch)
    assert BOUNDARY.counts.total() == before + 1
    assert req.skip_radix_cache_insert
    assert req.discard_output_reason is not None


def test_overlapped_step_error_of_sglang_passes(harnesses: Make) -> None:
    harness, error = harnesses(), MemoryError("of the device")
    harness.arrive(2.5)
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    harness.give(1.0, 0, 1)

    def fail(layer: int) -> None:
        raise error

    harness.on_layer = fail
    with pytest.raises(MemoryError) as caught:
        harness.run(batch)
    assert caught.value is error


@pytest.mark.parametrize("kept", [False, True])
def test_overlapped_step_leave_is_refused_only_within_the_step(harnesses: Make, kept: bool) -> None:
    harness = harnesses()
    req = harness.arrive(2.5)
    span = harness.begin()
    assert span is not None
    if kept:
        batch = harness.schedule(span)
        harness.give(1.0, 0, 1)
        assert not harness.last.leave(req.rid)
        harness.run(batch)
        assert harness.bad == 0
    assert harness.last.leave(req.rid)


@pytest.mark.parametrize("blocks", [2, 2.25, 2.5])
@pytest.mark.parametrize("matched", [0, 4, 16, 20])
def test_overlapped_step_each_layer_lands_before_attention_reads_it(
    harnesses: Make, blocks: float, matched: int
) -> None:
    """Whether or not the first block is begun, or the last one is wanted to its end."""
    harness = harnesses()
    req = harness.arrive(blocks, matched)
    span = harness.begin()
    total = len(req.origin_input_ids)
    assert span == (matched, min(2 * BLOCK, (total - 1) // PAGE * PAGE))
    batch = harness.schedule(span)
    harness.on_layer = lambda layer: harness.give((layer + 1) / LAYERS, 0, 1)
    harness.run(batch)
    assert harness.bad == 0
    assert harness.computed == []
    assert harness.failures() == {}
    report = harness.over()
    assert report["loaded_tokens"] == report["overlapped_tokens"] == span.tokens
    assert report["computed_tokens"] == total - span.stop
    assert harness.base.counters.snapshot()["overlapped_tokens", ""] == span.tokens


def test_overlapped_step_landed_blocks_are_part_of_its_span(harnesses: Make) -> None:
    harness = harnesses()
    harness.arrive(4.5)
    assert harness.begin() is None  # two reads at once: the first two blocks have not begun
    harness.give(1.0, 3, 2)
    span = harness.begin()
    assert span == (0, 4 * BLOCK)
    batch = harness.schedule(span)
    harness.give(1.0, 0, 1)
    harness.run(batch)
    assert harness.bad == 0
    report = harness.over()
    assert report["loaded_tokens"] == 4 * BLOCK
    assert report["overlapped_tokens"] == 2 * BLOCK
    assert report["meet_token"] == 0


def test_overlapped_step_given_up_restores_slots_and_held_tokens(
    harnesses: Make,
) -> None:
    harness = harnesses()
    req: Any = harness.arrive(4.5)
    harness.give(1.0, 3, 2)
    harness.base.coordinator.poll([req.rid])
    free = harness.base.allocator.available_size() + 2 * BLOCK
    assert harness.base.coordinator.reclaimable_tokens == 4 * BLOCK  # two of them are reserved
    for _ in range(3):
        assert harness.begin() == (0, 4 * BLOCK)
        assert harness.base.coordinator.reclaimable_tokens == 0  # nobody may count on them
        harness.last.give_up(req)
        assert harness.base.allocator.available_size() == free
        assert harness.base.coordinator.reclaimable_tokens == 2 * BLOCK
    harness.give(1.0, 0, 1)
    harness.base.coordinator.poll([req.rid])
    assert harness.base.step(req)
    assert harness.over()["loaded_tokens"] == 4 * BLOCK


def test_overlapped_step_without_free_slots_does_not_begin(harnesses: Make) -> None:
    harness = harnesses(slots=3 * BLOCK)
    req: Any = harness.arrive(2.5)
    hog = harness.base.allocator.alloc(2 * BLOCK)
    assert harness.begin() is None
    assert harness.base.allocator.available_size() == BLOCK
    harness.base.allocator.free(hog)
    harness.give(1.0, 0, 1)
    harness.base.coordinator.poll([req.rid])
    assert harness.base.step(req)
    assert harness.over()["loaded_tokens"] == 2 * BLOCK


def test_overlapped_step_corrupt_block_is_computed_and_sampled_once(
    harnesses: Make,
) -> None:
    harness = harnesses()
    harness.arrive(2.5, fates=["corrupt"])
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    harness.on_layer = lambda layer: harness.give((layer + 1) / LAYERS, 0, 1)
    harness.run(batch)
    assert harness.bad == 0
    assert harness.computed == [(0, BLOCK)]
    assert harness.failures() == {"lost": 1}
    assert harness.sampled == 1  # nothing is sampled from bytes that did not pass the check
    report = harness.over()
    assert report["loaded_tokens"] == report["overlapped_tokens"] == BLOCK
    assert report["computed_tokens"] == BLOCK + BLOCK // 2


def test_overlapped_step_block_read_again_after_use_is_used_again(
    harnesses: Make,
) -> None:
    """A connection that broke off in the middle, after which the whole block came."""
    harness = harnesses()
    harness.arrive(2.5, fates=["whole", "anew"])
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    harness.on_layer = lambda layer: harness.give((layer + 1) / LAYERS, 0, 1)
    harness.run(batch)
    assert harness.bad == 0
    assert harness.computed == []
    assert harness.failures() == {"lost": 1}
    assert harness.over()["loaded_tokens"] == 2 * BLOCK


def test_overlapped_step_silent_link_is_given_up_after_its_patience(
    harnesses: Make,
) -> None:
    harness = harnesses()
    req: Any = harness.arrive(2.5)
    span = harness.begin()
    assert span is not None
    overlap = harness.last.step_of(req)
    # One step, and by how much predictions miss: not what is loaded, computed, which is 32 tokens.
    assert 8 * TOKEN_S <= overlap.patience_s <= 1.25 * 8.2 * TOKEN_S
    overlap.patience_s = 0.05
    batch = harness.schedule(span)
    harness.give(0.75, 0, 1)
    harness.run(batch)
    assert harness.bad == 0
    assert harness.computed == [(0, 2 * BLOCK)]
    assert harness.failures() == {"late": 1}
    report = harness.over()  # which gives up what is still being read
    assert report["loaded_tokens"] == report["overlapped_tokens"] == 0


@pytest.mark.parametrize("skipped", range(LAYERS))
def test_overlapped_step_attention_skipping_a_layer_disables_it(
    harnesses: Make, skipped: int
) -> None:
    harness = harnesses()
    harness.arrive(2.5)
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    harness.give(1.0, 0, 1)
    harness.skips = {skipped}
    harness.run(batch)
    assert harness.bad == 0
    assert harness.failures() == {"layers": 1}
    assert harness.over()["loaded_tokens"] == 2 * BLOCK
    harness.arrive(2.5)
    assert harness.begin() is None  # never again: it will not be better next time
    harness.give(1.0, 0, 1)


def test_overlapped_step_second_begin_is_refused(harnesses: Make) -> None:
    harness = harnesses()
    harness.arrive(2.5)
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    assert harness.last.begin(req_of(2.5, "r"), 64) is None  # type: ignore[arg-type]
    harness.give(1.0, 0, 1)
    harness.run(batch)


@given(
    fates=st.lists(st.sampled_from(["whole", "corrupt", "anew", "never"]), min_size=2, max_size=2),
    matched=st.sampled_from([0, 8, 16]),
    shares=st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=2, max_size=2),
    tail=st.integers(1, BLOCK - 1),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_overlapped_step_random_block_fates_give_right_kv(
    fates: list[Fate], matched: int, shares: list[list[float]], tail: int
) -> None:
    harness = LastStepHarness()
    with harness.base:
        req: Any = harness.arrive(2 + tail / BLOCK, matched, fates=fates)
        span = harness.begin()
        assert span == (matched, 2 * BLOCK)
        overlap = harness.last.step_of(req)
        coming = sorted(overlap.reads)
        hangs = any(fates[block] == "never" for block in coming)
        overlap.patience_s = 0.05 if hangs else PATIENCE_S
        batch = harness.schedule(span)

        def on_layer(layer: int) -> None:
            for block in coming:
                last = layer == LAYERS - 1 or max(shares[0][block], shares[1][block]) > 0.9
                harness.give(1.0 if last else max(0.5, shares[layer][block]), block)

        harness.on_layer = on_layer
        harness.run(batch)
        assert harness.bad == 0
        assert harness.sampled == 1
        found = {fates[block] for block in coming}
        assert harness.failures() or not found & {"corrupt", "never"}
        assert not harness.failures() or found - {"whole"}  # anew: unless nothing was used before
        had = [b for b in coming if fates[b] in ("whole", "anew")]
        report = harness.over()
        stored = sum(min(2 * BLOCK, (b + 1) * BLOCK) - max(matched, b * BLOCK) for b in had)
        if not hangs:
            assert report["loaded_tokens"] in range(stored + 1)
        assert report["loaded_tokens"] + report["computed_tokens"] + matched == 2 * BLOCK + tail


def test_overlapped_step_cake_last_step_late_does_not_begin(harnesses: Make) -> None:
    harness = harnesses()
    harness.arrive(2.5, asks={"cake_last_step": "late"})
    assert harness.begin() is None
    harness.give(1.0, 0, 1)


def test_overlapped_step_computed_block_is_not_counted_as_cached(
    harnesses: Make,
) -> None:
    harness = harnesses()
    req = harness.arrive(2.5, fates=["whole", "corrupt"])
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    req.cached_tokens = 2 * BLOCK  # as SGLang counts when it schedules
    req._cache_breakdown_computed = True
    harness.give(1.0, 0, 1)
    harness.run(batch)
    assert (req.cached_tokens, req.cached_tokens_storage) == (BLOCK, BLOCK)
    assert harness.over()["loaded_tokens"] == BLOCK


def test_overlapped_step_lost_blocks_are_computed_in_chunks(
    harnesses: Make,
) -> None:
    harness = harnesses()
    harness.base.step_costs.chunk_tokens = 20
    harness.arrive(2.5, fates=["corrupt", "corrupt"])
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    harness.give(1.0, 0, 1)
    harness.run(batch)
    assert harness.computed == [(0, 20), (20, 2 * BLOCK)]
    assert harness.bad == 0


def test_overlapped_step_waiting_time_is_reported_apart_from_its_work(
    harnesses: Make,
) -> None:
    harness = harnesses()
    harness.arrive(2.5)
    batch = harness.schedule(harness.begin())  # type: ignore[arg-type]
    waited: list[float] = []
    harness.base.step_costs.waited = waited.append  # type: ignore[method-assign]
    harness.on_layer = lambda layer: harness.give((layer + 1) / LAYERS, 0, 1)
    harness.run(batch)
    assert len(waited) == 1
    load = harness.base.coordinator.live["r"]
    step_s = harness.base.step_costs.costs(load).others_s  # of the step that will be observed
    assert step_s == pytest.approx(TOKEN_S * BLOCK / 2)
