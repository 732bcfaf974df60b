"""The overlapped last step: a prompt's last step, begun while its last blocks are still being read
(docs/theory.md).

To SGLang it is a step over the tokens that are not stored: the prefix before them counts as
present. The slots of that prefix belong to the request alone, like those of the tokens that the
step computes. They join the tree together, when the step is over and every byte has passed its
check.

The forward waits at each layer for the KV that it reads there. If a block does not arrive, or fails
its check, the same forward computes it and then repeats the step; SGLang sees one step.
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import CakeError, OverlapError, RunaheadError
from sglang_cake.core.keys import Span
from sglang_cake.integration.boundary import BOUNDARY, OriginalFunction, guarded
from sglang_cake.integration.memory.copier import SlotCopy
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.overlap.layer_gate import LayerGate, PoolRows
from sglang_cake.integration.overlap.partial_forward import (
    drop_answer,
    preceding_batch,
    run_forward,
)
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.loading.loader import BlockRead, Loader
from sglang_cake.loading.planner import overlap_span, patience_s

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger("sglang_cake")
MOST_SLACK = 0.25  # of a step, for loads that end a little later than predicted
LAYERS = "layers"  # reason of a failure: this model's attention cannot be followed by layer

_HOOK = "TpModelWorker.forward_batch_generation"


@dataclass(slots=True, eq=False)
class OverlappedStep:
    """One overlapped last step, from before it is scheduled until it has run.

    Attributes:
        span: stored tokens that the step finds, or that arrive while it runs.
        reads: the blocks of `span` that are being read.
        patience_s: how long the step may take before blocks that have not arrived are computed.
        handed_out: slots of the blocks of `span`, until the step is scheduled.
        slots: slots of `span`, int64 `[span.tokens]`, once the step is scheduled.
    """

    record: PromptRecord
    span: Span
    reads: dict[int, BlockRead]
    patience_s: float
    handed_out: dict[int, SlotCopy]
    slots: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StreamedBlock:
    """A block that is being read while a forward needs it.

    Attributes:
        slots: of those of its tokens that are needed, int64.
        skip: tokens of the block before these.
    """

    block: int
    block_read: BlockRead
    slots: torch.Tensor
    skip: int


class StreamedBlocks:
    """A `Passage` that copies each layer of some blocks into their slots before attention reads the
    layer. Used by the forward's thread.

    Args:
        block_tokens: tokens of a whole block.
        until_s: monotonic; the forward waits for no byte longer than that.

    Attributes:
        waited_s: how long the forward has waited so far.
    """

    def __init__(
        self, rows: PoolRows, pieces: Sequence[StreamedBlock], *, block_tokens: int, until_s: float
    ) -> None:
        self._rows = rows
        self._until_s = until_s
        self._layer_bytes = rows.token_bytes * block_tokens
        self.pieces = pieces
        self.waited_s = 0.0

    def reach(self, layer: int) -> None:
        """Return when the layer is in its slots. At the last layer, every byte has passed its check
        then, so that nothing is sampled from unchecked bytes. Raises: OverlapError."""
        began_s = time.monotonic()
        for piece in self.pieces:
            if not self._arrived(piece.block_read, layer):
                late = time.monotonic() >= self._until_s
                what = "did not come in time" if late else "did not come, or came anew"
                raise OverlapError(f"block {piece.block} {what}", "late" if late else "lost")
        self.waited_s += time.monotonic() - began_s
        self._write(self.pieces, layer)

    def write_whole(self, pieces: Sequence[StreamedBlock]) -> None:
        """Copy all layers of pieces whose reads have ended well, again if need be."""
        for layer in range(self._rows.layers):
            self._write(pieces, layer)

    def _write(self, pieces: Sequence[StreamedBlock], layer: int) -> None:
        size = self._layer_bytes
        for piece in pieces:
            buffer = piece.block_read.buffer
            part = buffer.view[layer * size : (layer + 1) * size]
            self._rows.write(layer, piece.slots, part, piece.skip)  # complete: this is a CPU

    def _arrived(self, block_read: BlockRead, layer: int) -> bool:
        if layer == self._rows.layers - 1:
            return block_read.wait_whole(self._until_s)
        return block_read.wait((layer + 1) * self._layer_bytes, self._until_s)


class OverlapRunner:
    """Runs overlapped last steps, one at a time. The scheduler thread owns it.

    A step goes through `begin`, `confirm` (it is scheduled) and `forward`. Before the forward,
    `give_up` ends it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        loader: Loader,
        device_slots: DeviceSlots,
        rows: PoolRows,
        gate: LayerGate,
        counters: Counters,
    ) -> None:
        self._coordinator = coordinator
        self._loader = loader
        self._device_slots = device_slots
        self._rows = rows
        self._gate = gate
        self._counters = counters
        self._block_tokens = coordinator.block_tokens
        self._step: OverlappedStep | None = None
        self.due: Req | None = None  # its step is scheduled, and has not run

    # ---- while a step is scheduled ----

    def step_of(self, req: "Req") -> OverlappedStep | None:
        """The step that was begun for this request and has not run, if there is one."""
        step = self._step
        if step is None or self._coordinator.record(req) is not step.record:
            return None
        return step

    def begin(self, req: "Req", chunk_tokens: int) -> Span | None:
        """The stored tokens that count as present for a last step of `req`, which is settled and
        alone on the device. `confirm` or `give_up` must follow. None: the step must wait, since
        loads would take too long or there is no memory."""
        record = self._coordinator.record(req)
        if record is None or self.due is not None:
            return None
        costs = self._coordinator.step_costs.costs(record)
        if not costs.overlap_share:
            return None
        reads = self._loader.under_way(record.load_id)
        coming = {block: read for block, read in reads.items() if read.is_coming}
        span = overlap_span(
            record.meet.view(),
            missing_shares={block: read.missing_share for block, read in coming.items()},
            chunk_tokens=chunk_tokens,
            costs=costs,
        )
        if span is None:
            return None
        needed = {b: coming[b] for b in record.meet.blocks_of(span) if b in coming}
        handed_out = self._device_slots.hand_out(record, span, needed)
        if handed_out is None:
            return None
        step_s = costs.prefill.step_s(span.stop, len(record.tokens))
        # The loads should be over within a step, as far as predictions hold.
        left_s = patience_s(
            record.meet.view(), chunk_tokens=chunk_tokens, costs=costs, progress=record.progress
        )
        most_s = min(left_s, step_s * (1 + min(costs.load.error, MOST_SLACK)))
        self._step = OverlappedStep(record, span, needed, most_s, handed_out)
        return span

    def confirm(self, req: "Req") -> torch.Tensor:
        """The step is scheduled. Returns the slots of the tokens that count as present (int64
        `[tokens]`), which the request owns from now on."""
        step = self._begun(req)
        step.slots = self._device_slots.trim(step.handed_out, step.span)
        step.handed_out = {}
        self.due = req
        return step.slots

    def give_up(self, req: "Req") -> None:
        """The step is not scheduled, or not any more."""
        step = self.step_of(req)
        if step is not None and step.slots is not None:
            self._device_slots.free(step.slots)
            self._step = None
            self.due = None
        elif step is not None:
            self._take_back(step)

    def leave(self, rid: str) -> bool:
        """The request is computed without cake. False: not yet, its step is scheduled."""
        if self.due is not None and self.due.rid == rid:
            return False
        step = self._step
        if step is not None and step.record.rid == rid and self.step_of(step.record.req):
            self._take_back(step)
        return True

    # ---- the forward ----

    def is_due(self, batch: Any) -> bool:
        """Whether a batch is the step that was scheduled."""
        return self.due is not None and batch is not None and self.due in batch.reqs

    def forward(self, original: OriginalFunction, worker: Any, batch: Any, **kwargs: Any) -> Any:
        """AROUND a worker's `forward_batch_generation`, of a batch that is due.

        After an exception of cake it computes the blocks that were being read. If that fails too,
        the request ends without an answer. Raises: what SGLang raises.
        """
        (req,) = batch.reqs
        reported = False
        try:
            result, streamed, used = self._overlapped(original, worker, batch, kwargs)
            reported = self._report(req, batch, streamed, used)
        except Exception as error:
            if original.error is error and not isinstance(error, CakeError):
                raise
            BOUNDARY.failed(_HOOK, error, unsafe=True)
            drop_answer(req)
            result = original(worker, batch, **kwargs)
        finally:
            self.due = None
        if not reported and self._coordinator.record(req) is not None:
            self._step = None  # its slots are the row's
            self._coordinator.release(req.rid)
        return result

    # ---- inside ----

    def _overlapped(
        self, original: OriginalFunction, worker: Any, batch: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, StreamedBlocks, Collection[int]]:
        """Run the step, and once more if a block did not arrive. Returns its result, and the blocks
        that arrived and were used."""
        (req,) = batch.reqs
        step = self._begun(req)
        pieces = self._pieces(step)
        until_s = time.monotonic() + step.patience_s
        streamed = StreamedBlocks(
            self._rows, pieces, block_tokens=self._block_tokens, until_s=until_s
        )
        try:
            self._rows.begin()
            with self._gate(streamed):
                result = original(worker, batch, **kwargs)
            return result, streamed, {piece.block for piece in pieces}
        except (OverlapError, RunaheadError) as error:
            self._failed(req, error)
        except Exception as error:
            if original.error is error:
                raise
            BOUNDARY.failed(_HOOK, error, rid=req.rid)
        used = self._write_fetched(req, streamed, pieces)
        self._compute(worker, batch, step, [p for p in pieces if p.block not in used])
        return original(worker, batch, **kwargs), streamed, used

    def _begun(self, req: "Req") -> OverlappedStep:
        step = self.step_of(req)
        assert step is not None
        return step

    def _take_back(self, step: OverlappedStep) -> None:
        self._device_slots.take_back(step.record, step.handed_out, step.reads)
        self._step = None

    def _pieces(self, step: OverlappedStep) -> list[StreamedBlock]:
        assert step.slots is not None
        size = self._block_tokens
        start, stop = step.span
        pieces = []
        for block, block_read in step.reads.items():
            first = max(start, block * size)
            last = min(stop, (block + 1) * size)
            slots = step.slots[first - start : last - start]
            pieces.append(StreamedBlock(block, block_read, slots, first - block * size))
        return pieces

    @guarded(_HOOK, False)
    def _report(
        self, req: "Req", batch: Any, streamed: StreamedBlocks, used: Collection[int]
    ) -> bool:
        """The step has run: bring the request's record up to date. Returns True."""
        step = self._begun(req)
        self._coordinator.prompt_loads.take_events()
        self._coordinator.step_costs.waited(streamed.waited_s)
        self._step = None
        self._coordinator.overlapped_step_ran(
            req,
            batch.prefix_lens[0] + batch.extend_lens[0],
            span=step.span,
            used=[block for block in step.reads if block in used],
            missing=[block for block in step.reads if block not in used],
            tokens=sum(len(piece.slots) for piece in streamed.pieces if piece.block in used),
        )
        return True

    @guarded(_HOOK, frozenset())
    def _write_fetched(
        self, req: "Req", streamed: StreamedBlocks, pieces: Sequence[StreamedBlock]
    ) -> Collection[int]:
        """Write the blocks that have been fetched by now to their slots, whatever was written
        before. Returns these blocks."""
        record = self._begun(req).record
        self._coordinator.prompt_loads.take_events()
        fetched = {piece.block for piece in pieces if piece.block in record.local.fetched}
        streamed.write_whole([piece for piece in pieces if piece.block in fetched])
        return fetched

    def _compute(
        self, worker: Any, batch: Any, step: OverlappedStep, pieces: Sequence[StreamedBlock]
    ) -> None:
        """Compute blocks that did not arrive, into their slots."""
        limit_tokens = self._coordinator.step_costs.chunk_tokens
        first = step.span.start
        assert step.slots is not None
        for missing in self._runs(pieces):
            for start in range(missing.start, missing.stop, limit_tokens):
                span = Span(start, min(start + limit_tokens, missing.stop))
                slots = step.slots[span.start - first : span.stop - first]
                tokens = step.record.tokens[span.start : span.stop]
                run_forward(worker, preceding_batch(batch, tokens, slots, span))

    def _runs(self, pieces: Sequence[StreamedBlock]) -> list[Span]:
        """The token spans of pieces, from left to right; adjacent ones are joined."""
        found: list[Span] = []
        for piece in sorted(pieces, key=lambda piece: piece.block):
            start = piece.block * self._block_tokens + piece.skip
            stop = start + len(piece.slots)
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(Span(start, stop))
        return found

    def _failed(self, req: "Req", error: OverlapError | RunaheadError) -> None:
        self._coordinator.step_costs.do_not_measure()
        reason = error.reason if isinstance(error, OverlapError) else LAYERS
        self._counters.add("overlap_failures", label=reason)
        logger.warning("cake: request %r: the last step is run again: %s", req.rid, error)
        if reason == LAYERS:  # it would fail every time
            self._coordinator.step_costs.overlap_share = 0.0
