"""The last step of a prompt, begun while its last blocks are still on their way (docs/theory.md).

To SGLang it is a step over what no store has: the prefix before it counts as there. Slots of the
prefix belong to the request alone, as those of what it computes do; they join the tree with those,
when the step is over and every byte has passed its check. The forward waits at each layer for the
KV that it reads there. If something does not come, or turns out wrong, the same forward computes
it, and then the step again: nobody else notices.
"""

import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import CakeError, OverlapError, RunaheadError
from sglang_cake.core.spans import Span
from sglang_cake.integration.boundary import BOUNDARY, OriginalFunction, guarded
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.overlap.layer_gate import LayerGate, PoolRows
from sglang_cake.integration.overlap.partial_batch import part_before, run_part
from sglang_cake.integration.overlap.streamed_blocks import LAYERS, StreamedBlock, StreamedBlocks
from sglang_cake.integration.request.restore import Overlap, Restore
from sglang_cake.integration.runahead.runahead_request import drop_answer
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.loading.early_last_step import early_last_step
from sglang_cake.loading.loader import Loader

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger("sglang_cake")
MOST_SLACK = 0.25  # of a step, for loads that come a little later than predicted

_HOOK = "TpModelWorker.forward_batch_generation"


class LastStep:
    """Last steps that overlap with loads, one at a time. The scheduler thread owns it."""

    def __init__(
        self,
        cake: Coordinator,
        loader: Loader,
        device_slots: DeviceSlots,
        rows: PoolRows,
        gate: LayerGate,
        counters: Counters,
    ) -> None:
        self._cake, self._loader, self._device_slots = cake, loader, device_slots
        self._rows, self._gate, self._counters = rows, gate, counters
        self._block_tokens = cake.block_tokens
        self._lent: dict[int, torch.Tensor] = {}  # by block, until the step is scheduled
        self.due: Req | None = None  # its step is scheduled, and has not run

    # ---- while a step is scheduled ----

    def begin(self, req: "Req", chunk_tokens: int) -> Span | None:
        """The stored tokens that may count as there for a last step of a settled request, which is
        alone; None: it is no time for that, or there is no memory. `keep` or `give_up` must follow.
        """
        restore = self._cake.restore(req.rid)
        if restore is None or self.due is not None:
            return None
        costs, readings = (
            self._cake.step_costs.costs(restore),
            self._loader.under_way(restore.ticket),
        )
        if not costs.overlap:
            return None
        coming = {block: reading for block, reading in readings.items() if reading.begun}
        span = early_last_step(
            restore.meet.view(),
            coming={block: reading.to_come for block, reading in coming.items()},
            chunk_tokens=chunk_tokens,
            costs=costs,
        )
        if span is None:
            return None
        wanted = {b: coming[b] for b in restore.meet.blocks_of(span) if b in coming}
        lent = self._device_slots.lend(restore, span, wanted)
        if lent is None:
            return None
        self._lent = lent
        step_s = costs.prefill.step_s(span.stop, len(restore.tokens))
        # The loads should be over within a step, as far as predictions hold. A longer wait could
        # cost more than the prompt would have taken without the store, by more than a step.
        patience_s = step_s * (1 + min(costs.load.error, MOST_SLACK))
        restore.overlap = Overlap(span, wanted, patience_s)
        return span

    def keep(self, req: "Req") -> torch.Tensor:
        """The step is scheduled. Returns the slots of the tokens that count as there (int64
        `[tokens]`), which are the request's from now on."""
        _, overlap = self._mine(req)
        overlap.slots = self._device_slots.keep(self._lent, overlap.span)
        self._lent, self.due = {}, req
        return overlap.slots

    def give_up(self, req: "Req") -> None:
        """The step is not scheduled."""
        restore, overlap = self._mine(req)
        self._device_slots.take_back(restore, self._lent, overlap.readings)
        self._lent, restore.overlap = {}, None

    def leave(self, rid: str) -> bool:
        """The request is computed without cake. False: not yet, its step is scheduled."""
        if self.due is not None and self.due.rid == rid:
            return False
        restore = self._cake.restore(rid)
        if restore is not None and restore.overlap is not None:
            self._device_slots.take_back(restore, self._lent, restore.overlap.readings)
            self._lent, restore.overlap = {}, None
        return True

    def abandon(self, req: "Req") -> None:
        """The step was scheduled, and is not any more: free the slots that it had."""
        restore = self._cake.restore(req.rid)
        if self.due is req and restore is not None and restore.overlap is not None:
            assert restore.overlap.slots is not None
            self._device_slots.free(restore.overlap.slots)
            restore.overlap = None
            self.due = None

    # ---- the forward ----

    def is_due(self, batch: Any) -> bool:
        """Whether a batch is the step that was scheduled."""
        return self.due is not None and batch is not None and self.due in batch.reqs

    def forward(self, original: OriginalFunction, worker: Any, batch: Any, **kwargs: Any) -> Any:
        """AROUND a worker's `forward_batch_generation`, of a batch that is due. Raises: what SGLang
        raises. If something of ours fails, what was to come is computed; if that cannot be done
        either, the request ends without an answer."""
        (req,) = batch.reqs
        counted = False
        try:
            result, tail, landed = self._overlap(original, worker, batch, kwargs)
            counted = self._count(req, batch, tail, landed)
        except Exception as error:
            if original.error is error and not isinstance(error, CakeError):
                raise
            BOUNDARY.failed(_HOOK, error, unsafe=True)
            drop_answer(req)
            result = original(worker, batch, **kwargs)
        finally:
            self.due = None
        if not counted and (restore := self._cake.restore(req.rid)) is not None:
            restore.overlap = None  # its slots are the row's
            self._cake.end(req.rid)
        return result

    # ---- inside ----

    def _overlap(
        self, original: OriginalFunction, worker: Any, batch: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, StreamedBlocks, Collection[int]]:
        """The step, once more if something did not come. Returns its result, and the blocks that
        have come."""
        (req,) = batch.reqs
        restore, overlap = self._mine(req)
        pieces = self._pieces(overlap)
        until_s = time.monotonic() + overlap.patience_s
        tail = StreamedBlocks(self._rows, pieces, block_tokens=self._block_tokens, until_s=until_s)
        try:
            self._rows.begin()
            with self._gate(tail):
                result = original(worker, batch, **kwargs)
            tail.finish()
            return result, tail, {piece.block for piece in pieces}
        except (OverlapError, RunaheadError) as error:
            self._failed(req, error)
        except Exception as error:
            if original.error is error:
                raise
            BOUNDARY.failed(_HOOK, error, rid=req.rid)
        landed = self._bring(req, tail, pieces)
        self._compute(worker, batch, restore, [p for p in pieces if p.block not in landed])
        return original(worker, batch, **kwargs), tail, landed

    def _mine(self, req: "Req") -> tuple[Restore, Overlap]:
        restore = self._cake.restore(req.rid)
        assert restore is not None
        assert restore.overlap is not None
        return restore, restore.overlap

    def _pieces(self, overlap: Overlap) -> list[StreamedBlock]:
        assert overlap.slots is not None
        size, (start, stop), pieces = self._block_tokens, overlap.span, []
        for block, reading in overlap.readings.items():
            first, last = max(start, block * size), min(stop, (block + 1) * size)
            slots = overlap.slots[first - start : last - start]
            pieces.append(StreamedBlock(block, reading, slots, first - block * size))
        return pieces

    @guarded(_HOOK, False)
    def _count(self, req: "Req", batch: Any, tail: StreamedBlocks, landed: Collection[int]) -> bool:
        """The step is over: the books of the request, and of the process."""
        restore, _ = self._mine(req)
        self._cake.inbox.take()
        self._cake.step_costs.waited(tail.waited_s)
        tokens = sum(len(piece.slots) for piece in tail.pieces if piece.block in landed)
        restore.overlapped_tokens += tokens
        self._counters.add("overlapped_tokens", tokens)
        self._cake.overlapped(req, batch.prefix_lens[0] + batch.extend_lens[0], landed)
        return True

    @guarded(_HOOK, frozenset())
    def _bring(
        self, req: "Req", tail: StreamedBlocks, pieces: Sequence[StreamedBlock]
    ) -> Collection[int]:
        """Bring what has come by now to its slots, once more; returns its blocks."""
        restore, _ = self._mine(req)
        tail.settle()
        self._cake.inbox.take()
        landed = {piece.block for piece in pieces if piece.block in restore.arrived}
        tail.write_whole([piece for piece in pieces if piece.block in landed])
        return landed

    def _compute(
        self, worker: Any, batch: Any, restore: Restore, pieces: Sequence[StreamedBlock]
    ) -> None:
        """Compute what was to come, in place of it."""
        overlap, limit_tokens = restore.overlap, self._cake.step_costs.chunk_tokens
        assert overlap is not None
        assert overlap.slots is not None
        for missing in self._runs(pieces):
            for start in range(missing.start, missing.stop, limit_tokens):
                span = Span(start, min(start + limit_tokens, missing.stop))
                first = overlap.span.start
                slots = overlap.slots[span.start - first : span.stop - first]
                tokens = restore.tokens[span.start : span.stop]
                run_part(worker, part_before(batch, tokens, slots, span))

    def _runs(self, pieces: Sequence[StreamedBlock]) -> list[Span]:
        """What pieces cover, from left to right."""
        found: list[Span] = []
        for piece in sorted(pieces, key=lambda piece: piece.block):
            start = piece.block * self._block_tokens + piece.skip
            stop = start + len(piece.slots)
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(Span(start, stop))
        return found

    def _failed(self, req: "Req", error: OverlapError | RunaheadError) -> None:
        self._cake.step_costs.helped()  # what the step takes says nothing of others
        reason = error.reason if isinstance(error, OverlapError) else LAYERS
        self._counters.add("overlap_failures", label=reason)
        logger.warning("cake: request %s, last step once more: %s", req.rid, error)
        if reason == LAYERS:  # it will not be better next time
            self._cake.step_costs.overlap = 0.0
