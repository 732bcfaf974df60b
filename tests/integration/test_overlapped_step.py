"""The last step that begins while blocks are still on their way, with a store that gives bytes one
by one and a forward that looks at the KV it would read."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

pytest.importorskip("sglang")

from faults import Fault
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_pools import as_bytes, buffers_of
from test_coordinator import BLOCK, PAGE, PATIENCE_S, Desk, FakeReq, req_of

from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.spans import Span
from sglang_cake.integration.boundary import BOUNDARY, OriginalFunction
from sglang_cake.integration.overlap import overlapped_step as module
from sglang_cake.integration.overlap.layer_gate import LayerGate, PoolRows
from sglang_cake.integration.overlap.overlapped_step import LastStep
from sglang_cake.integration.overlap.streamed_blocks import StreamedBlocks
from sglang_cake.loading.cost_model import PrefillCost
from sglang_cake.testing.faulty import PassingStore

LAYERS = 2
TOKEN_S = 1.0
Fate = Literal["whole", "corrupt", "anew", "never"]


class PieceStore(PassingStore):
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


class Stage:
    """A prompt whose blocks are all stored, a server that has nothing else to do, and no model."""

    def __init__(self, *, slots: int = 20 * BLOCK) -> None:
        # A step takes longer than all loads: they win, and the last step may begin at once.
        self.desk = Desk(
            slots=slots,
            mode="auto",
            prefill=PrefillCost(0.0, TOKEN_S, 0.0, error=0.0),
            store=PieceStore,
        )
        desk = self.desk
        desk.step_costs.overlap = 1 - 1 / LAYERS
        self.gate = LayerGate(desk.pool)
        self.rows = PoolRows(desk.kv)
        self.last = LastStep(
            desk.cake, desk.loader, desk.device_slots, self.rows, self.gate, desk.counters
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
        self.keys = self.desk.fill(req.origin_input_ids, set(range(int(blocks))))
        self.desk.front.fates = dict(zip(self.keys, fates, strict=False))
        self.desk.arrive(req, matched)
        return req

    def give(self, share: float, *blocks: int) -> None:
        keys = [self.keys[block] for block in blocks]
        self.desk.io.run(self.desk.front.give(share, *keys), PATIENCE_S)
        self.desk.settle_io()

    def begin(self) -> Span | None:
        """As a scheduling step does for a request that is alone."""
        self.desk.cake.poll([self.req.rid])
        self.desk.cake.settle(self.req, self.desk.attach)
        step = self.desk.cake.plan(self.req, 64)
        if step is None or not step.wait:
            return None
        return self.last.begin(self.req, 64)  # type: ignore[arg-type]

    def schedule(self, span: Span) -> Any:
        req: Any = self.req
        req.prefix_len = span.stop
        slots = self.last.keep(req)
        assert len(slots) == span.tokens
        req.owned.append(slots)
        total = len(req.origin_input_ids)
        pages = -(-(total - span.stop) // PAGE)
        own = self.desk.allocator.alloc(pages * PAGE)
        req.owned.append(own)
        self.desk.cake.claimed(req, total)
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
        sizes = self.desk.kv.layout.plane_token_bytes
        parts = len(sizes) // LAYERS
        blocks = [
            torch.frombuffer(bytearray(self.desk.block(b)), dtype=torch.uint8)
            for b in range(-(-span.stop // BLOCK))
        ]
        for plane in range(layer * parts, (layer + 1) * parts):
            at, size = sum(sizes[:plane]) * BLOCK, sizes[plane]
            rows = torch.cat([b[at : at + size * BLOCK].view(BLOCK, size) for b in blocks])
            yield buffers_of(self.desk.pool)[plane], rows[span.start : span.stop]

    def over(self) -> dict[str, Any]:
        """The story that the response tells; everything is given back."""
        [story] = self.req.customized_info["cake"]  # type: ignore[index]
        self.desk.leave(self.req)
        self.desk.all_back()
        return dict(story)

    def failures(self) -> dict[str, int]:
        counted = self.desk.counters.snapshot().items()
        return {label: n for (name, label), n in counted if name == "overlap_failures" and n}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(**settings: int) -> Stage:
        made.append(Stage(**settings))
        monkeypatch.setattr(module, "run_part", made[-1].part)
        return made[-1]

    yield make
    for stage in made:
        stage.desk.cake.end_all()
        stage.desk.io.close()


def _fail(*args: Any, **kwargs: Any) -> None:
    raise Fault


@pytest.mark.parametrize("part", ["begin", "wait", "finish", "write_whole"])
def test_a_step_in_which_our_part_fails_computes_what_was_to_come(
    stages: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    stage = stages()
    stage.arrive(2.5)
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    stage.give(1.0, 0, 1)
    if part == "begin":
        stage.rows.begin = _fail  # type: ignore[method-assign]
    else:
        monkeypatch.setattr(StreamedBlocks, part, _fail)
    if part == "write_whole":  # which is called if something else went wrong before
        monkeypatch.setattr(StreamedBlocks, "finish", _fail)
    stage.run(batch)
    assert stage.bad == 0
    assert stage.computed == ([Span(0, 2 * BLOCK)] if part == "write_whole" else [])
    stage.desk.leave(stage.req)
    stage.desk.all_back()


def test_a_step_that_cannot_be_counted_is_right_and_ends_cakes_part(
    stages: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stages()
    req = stage.arrive(2.5)
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    stage.give(1.0, 0, 1)
    monkeypatch.setattr(stage.desk.cake, "overlapped", _fail)
    stage.run(batch)
    assert (stage.bad, stage.sampled) == (0, 1)
    assert stage.desk.cake.restore(req.rid) is None
    stage.desk.leave(req)
    stage.desk.all_back()


def test_a_step_that_can_neither_load_nor_compute_gives_no_answer(
    stages: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stages()
    req: Any = stage.arrive(2.5, fates=["whole", "corrupt"])
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    stage.give(1.0, 0, 1)
    monkeypatch.setattr(module, "run_part", _fail)
    before = BOUNDARY.counts.total()
    stage.run(batch)
    assert BOUNDARY.counts.total() == before + 1
    assert req.skip_radix_cache_insert
    assert req.discard_output_reason is not None
    stage.desk.leave(req)
    stage.desk.all_back()


def test_what_sglang_raises_in_the_step_passes(stages: Callable[..., Stage]) -> None:
    stage, error = stages(), MemoryError("of the device")
    stage.arrive(2.5)
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    stage.give(1.0, 0, 1)

    def fail(layer: int) -> None:
        raise error

    stage.on_layer = fail
    with pytest.raises(MemoryError) as caught:
        stage.run(batch)
    assert caught.value is error
    stage.desk.leave(stage.req)
    stage.desk.all_back()


@pytest.mark.parametrize("kept", [False, True])
def test_a_request_leaves_before_its_step_and_not_within(
    stages: Callable[..., Stage], kept: bool
) -> None:
    stage = stages()
    req = stage.arrive(2.5)
    span = stage.begin()
    assert span is not None
    if kept:
        batch = stage.schedule(span)
        stage.give(1.0, 0, 1)
        assert not stage.last.leave(req.rid)
        stage.run(batch)
        assert stage.bad == 0
    assert stage.last.leave(req.rid)
    stage.desk.leave(req)
    stage.desk.all_back()


@pytest.mark.parametrize("blocks", [2, 2.25, 2.5])
@pytest.mark.parametrize("matched", [0, 4, 16, 20])
def test_each_layer_is_there_when_attention_comes_to_it(
    stages: Callable[..., Stage], blocks: float, matched: int
) -> None:
    """Whether or not the first block is begun, or the last one is wanted to its end."""
    stage = stages()
    req = stage.arrive(blocks, matched)
    span = stage.begin()
    total = len(req.origin_input_ids)
    assert span == (matched, min(2 * BLOCK, (total - 1) // PAGE * PAGE))
    batch = stage.schedule(span)
    stage.on_layer = lambda layer: stage.give((layer + 1) / LAYERS, 0, 1)
    stage.run(batch)
    assert stage.bad == 0
    assert stage.computed == []
    assert stage.failures() == {}
    story = stage.over()
    assert story["loaded_tokens"] == story["overlapped_tokens"] == span.tokens
    assert story["computed_tokens"] == total - span.stop
    assert stage.desk.counters.snapshot()["overlapped_tokens", ""] == span.tokens


def test_what_landed_before_is_part_of_it(stages: Callable[..., Stage]) -> None:
    stage = stages()
    stage.arrive(4.5)
    assert stage.begin() is None  # two reads at once: the first two blocks have not begun
    stage.give(1.0, 3, 2)
    span = stage.begin()
    assert span == (0, 4 * BLOCK)
    batch = stage.schedule(span)
    stage.give(1.0, 0, 1)
    stage.run(batch)
    assert stage.bad == 0
    story = stage.over()
    assert story["loaded_tokens"] == 4 * BLOCK
    assert story["overlapped_tokens"] == 2 * BLOCK
    assert story["meet_token"] == 0


def test_a_step_that_is_not_scheduled_leaves_all_as_it_was(stages: Callable[..., Stage]) -> None:
    stage = stages()
    req: Any = stage.arrive(4.5)
    stage.give(1.0, 3, 2)
    stage.desk.cake.poll([req.rid])
    free = stage.desk.allocator.available_size()
    assert stage.desk.cake.held_tokens == 2 * BLOCK
    for _ in range(3):
        assert stage.begin() == (0, 4 * BLOCK)
        assert stage.desk.cake.held_tokens == 0  # nobody may count on them
        stage.last.give_up(req)
        assert stage.desk.allocator.available_size() == free
        assert stage.desk.cake.held_tokens == 2 * BLOCK
    stage.give(1.0, 0, 1)
    stage.desk.cake.poll([req.rid])
    assert stage.desk.step(req)
    assert stage.over()["loaded_tokens"] == 4 * BLOCK


def test_without_memory_it_waits(stages: Callable[..., Stage]) -> None:
    stage = stages(slots=3 * BLOCK)
    req: Any = stage.arrive(2.5)
    hog = stage.desk.allocator.alloc(2 * BLOCK)
    assert stage.begin() is None
    assert stage.desk.allocator.available_size() == BLOCK
    stage.desk.allocator.free(hog)
    stage.give(1.0, 0, 1)
    stage.desk.cake.poll([req.rid])
    assert stage.desk.step(req)
    assert stage.over()["loaded_tokens"] == 2 * BLOCK


def test_a_block_that_is_wrong_at_its_end_is_computed_and_the_step_repeated(
    stages: Callable[..., Stage],
) -> None:
    stage = stages()
    stage.arrive(2.5, fates=["corrupt"])
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    stage.on_layer = lambda layer: stage.give((layer + 1) / LAYERS, 0, 1)
    stage.run(batch)
    assert stage.bad == 0
    assert stage.computed == [(0, BLOCK)]
    assert stage.failures() == {"lost": 1}
    assert stage.sampled == 1  # nothing is sampled from bytes that did not pass the check
    story = stage.over()
    assert story["loaded_tokens"] == story["overlapped_tokens"] == BLOCK
    assert story["computed_tokens"] == BLOCK + BLOCK // 2


def test_bytes_that_come_anew_after_they_were_used_are_used_again(
    stages: Callable[..., Stage],
) -> None:
    """A connection that broke off in the middle, after which the whole block came."""
    stage = stages()
    stage.arrive(2.5, fates=["whole", "anew"])
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    stage.on_layer = lambda layer: stage.give((layer + 1) / LAYERS, 0, 1)
    stage.run(batch)
    assert stage.bad == 0
    assert stage.computed == []
    assert stage.failures() == {"lost": 1}
    assert stage.over()["loaded_tokens"] == 2 * BLOCK


def test_a_link_that_falls_silent_is_waited_for_no_longer_than_it_may_take(
    stages: Callable[..., Stage],
) -> None:
    stage = stages()
    req: Any = stage.arrive(2.5)
    span = stage.begin()
    assert span is not None
    overlap = stage.desk.cake.restore(req.rid).overlap  # type: ignore[union-attr]
    # One step, and by how much predictions miss: not what is loaded, computed, which is 32 tokens.
    assert 8 * TOKEN_S <= overlap.patience_s <= 1.25 * 8.2 * TOKEN_S
    overlap.patience_s = 0.05
    batch = stage.schedule(span)
    stage.give(0.75, 0, 1)
    stage.run(batch)
    assert stage.bad == 0
    assert stage.computed == [(0, 2 * BLOCK)]
    assert stage.failures() == {"late": 1}
    story = stage.over()  # which gives up what is still being read
    assert story["loaded_tokens"] == story["overlapped_tokens"] == 0


@pytest.mark.parametrize("skipped", range(LAYERS))
def test_attention_that_comes_not_to_all_layers_is_no_answer(
    stages: Callable[..., Stage], skipped: int
) -> None:
    stage = stages()
    stage.arrive(2.5)
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    stage.give(1.0, 0, 1)
    stage.skips = {skipped}
    stage.run(batch)
    assert stage.bad == 0
    assert stage.failures() == {"layers": 1}
    assert stage.over()["loaded_tokens"] == 2 * BLOCK
    stage.arrive(2.5)
    assert stage.begin() is None  # never again: it will not be better next time
    stage.give(1.0, 0, 1)


def test_one_at_a_time(stages: Callable[..., Stage]) -> None:
    stage = stages()
    stage.arrive(2.5)
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    assert stage.last.begin(req_of(2.5, "r"), 64) is None  # type: ignore[arg-type]
    stage.give(1.0, 0, 1)
    stage.run(batch)
    stage.over()


@given(
    fates=st.lists(st.sampled_from(["whole", "corrupt", "anew", "never"]), min_size=2, max_size=2),
    matched=st.sampled_from([0, 8, 16]),
    shares=st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=2, max_size=2),
    tail=st.integers(1, BLOCK - 1),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_the_answer_stands_on_what_was_stored(
    fates: list[Fate], matched: int, shares: list[list[float]], tail: int
) -> None:
    stage = Stage()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_part", stage.part)
        try:
            req: Any = stage.arrive(2 + tail / BLOCK, matched, fates=fates)
            span = stage.begin()
            assert span == (matched, 2 * BLOCK)
            overlap = stage.desk.cake.restore(req.rid).overlap  # type: ignore[union-attr]
            overlap.patience_s = 0.05 if "never" in fates else PATIENCE_S
            coming = sorted(overlap.readings)
            batch = stage.schedule(span)

            def on_layer(layer: int) -> None:
                for block in coming:
                    last = layer == LAYERS - 1 or max(shares[0][block], shares[1][block]) > 0.9
                    stage.give(1.0 if last else max(0.5, shares[layer][block]), block)

            stage.on_layer = on_layer
            stage.run(batch)
            assert stage.bad == 0
            assert stage.sampled == 1
            found = {fates[block] for block in coming}
            assert stage.failures() or not found & {"corrupt", "never"}
            assert not stage.failures() or found - {"whole"}  # anew: unless nothing was used before
            had = [b for b in coming if fates[b] in ("whole", "anew")]
            sure = not any(fates[b] == "never" for b in coming)
            story = stage.over()
            stored = sum(min(2 * BLOCK, (b + 1) * BLOCK) - max(matched, b * BLOCK) for b in had)
            if sure:
                assert story["loaded_tokens"] in range(stored + 1)
            assert story["loaded_tokens"] + story["computed_tokens"] + matched == 2 * BLOCK + tail
        finally:
            stage.desk.cake.end_all()
            stage.desk.io.close()


def test_a_request_may_ask_to_wait_for_all(stages: Callable[..., Stage]) -> None:
    stage = stages()
    stage.arrive(2.5, asks={"cake_last_step": "late"})
    assert stage.begin() is None
    stage.give(1.0, 0, 1)


def test_what_was_computed_after_all_is_not_called_cached(stages: Callable[..., Stage]) -> None:
    stage = stages()
    req = stage.arrive(2.5, fates=["whole", "corrupt"])
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    req.cached_tokens = 2 * BLOCK  # as SGLang counts when it schedules
    req._cache_breakdown_computed = True
    stage.give(1.0, 0, 1)
    stage.run(batch)
    assert (req.cached_tokens, req.cached_tokens_storage) == (BLOCK, BLOCK)
    assert stage.over()["loaded_tokens"] == BLOCK


def test_what_is_missing_is_computed_in_steps_of_what_one_may_compute(
    stages: Callable[..., Stage],
) -> None:
    stage = stages()
    stage.desk.step_costs.chunk_tokens = 20
    stage.arrive(2.5, fates=["corrupt", "corrupt"])
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    stage.give(1.0, 0, 1)
    stage.run(batch)
    assert stage.computed == [(0, 20), (20, 2 * BLOCK)]
    assert stage.bad == 0
    stage.over()


def test_a_step_is_learned_from_without_what_it_waited(stages: Callable[..., Stage]) -> None:
    stage = stages()
    stage.arrive(2.5)
    batch = stage.schedule(stage.begin())  # type: ignore[arg-type]
    waited: list[float] = []
    stage.desk.step_costs.waited = waited.append  # type: ignore[method-assign]
    stage.on_layer = lambda layer: stage.give((layer + 1) / LAYERS, 0, 1)
    stage.run(batch)
    assert len(waited) == 1
    assert stage.desk.step_costs._work.tokens == BLOCK // 2  # what `polled` will observe
    stage.over()
