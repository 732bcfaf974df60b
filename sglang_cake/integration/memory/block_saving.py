"""New blocks, copied from the slots of a request into the write pipeline."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from sglang_cake.core.buffers import Buffer
from sglang_cake.integration.memory.copier import Copier, Save
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.memory.kv_shard import SOLE, KvShard
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.loading.meet import BlockState
from sglang_cake.writeback.block_writer import WriteJob, Writer


@dataclass(slots=True, eq=False)
class _Unsaved:
    """What is known of a request whose blocks are saved.

    Attributes:
        tokens: the request's leading tokens whose KV the tree holds, as of the last checkpoint.
        row: device slot of each of these tokens.
        next_block: blocks before this one were looked at.
        blocks: blocks that are new to the store, and had no buffer yet, ascending.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    row: torch.Tensor | None = None
    next_block: int = 0
    blocks: list[int] = field(default_factory=list)


class BlockSaving:
    """Copies the full blocks that checkpoints complete and the store lacks, as far as it is this
    rank's turn to store them. Scheduler thread.

    A block that gets no buffer is tried again at each poll and each checkpoint, while the request
    keeps its KV in the tree. After the last checkpoint it is given up, and counted.
    """

    def __init__(self, kv: DeviceKV, copier: Copier, writer: Writer, shard: KvShard = SOLE) -> None:
        self._kv = kv
        self._shard = shard
        self._copier = copier
        self._writer = writer
        self._block_tokens = kv.layout.block_tokens
        self._requests: WeakKeyDictionary[PromptRecord, _Unsaved] = WeakKeyDictionary()
        self._saves: list[tuple[PromptRecord, Save]] = []  # copies that may still read slots

    def checkpointed(
        self, record: PromptRecord, tokens: "array[int]", row: torch.Tensor, *, last: bool
    ) -> None:
        """The tree holds the KV of `tokens`.

        Args:
            tokens: the request's leading tokens whose KV is complete.
            row: device slot of each of these tokens, `[len(tokens)]`.
            last: no further checkpoint of this request will come.
        """
        if not record.agreed.lookup_done and not last:
            return  # it is not known which blocks are stored; the next checkpoint looks again
        unsaved = self._requests.setdefault(record, _Unsaved())
        full = len(tokens) // self._block_tokens
        new = range(unsaved.next_block, full)
        unsaved.blocks += [block for block in new if self._is_new(record, block)]
        unsaved.next_block = max(unsaved.next_block, full)
        unsaved.tokens = tokens
        unsaved.row = row
        self._save(record, unsaved)
        if last:
            self._writer.give_up(len(unsaved.blocks))
            unsaved.blocks.clear()

    def polled(self, is_live: Callable[[PromptRecord], bool]) -> None:
        """A step is about to be scheduled: save what had no buffer before, as far as there are
        buffers now. Args: is_live: whether the request still has its slots."""
        for record, unsaved in list(self._requests.items()):
            if unsaved.blocks and is_live(record):
                self._save(record, unsaved)

    def released(self, record: PromptRecord) -> None:
        """The request ends: the tree may free its slots from now on."""
        unsaved = self._requests.pop(record, None)
        if unsaved is not None:
            self._writer.give_up(len(unsaved.blocks))

    def before_slots_are_freed(self, is_live: Callable[[PromptRecord], bool]) -> None:
        """The tree is about to free slots: forwards that write to them start after they were
        read. The scheduler thread waits until these copies are launched.

        Args: is_live: whether a request still locks its slots in the tree.
        """
        self._saves = [(record, save) for record, save in self._saves if not save.ended.done()]
        saves = [save for record, save in self._saves if not is_live(record)]
        self._kv.order_forwards_after([save.launched.result() for save in saves])

    def _save(self, record: PromptRecord, unsaved: _Unsaved) -> None:
        blocks: list[int] = []
        buffers: list[Buffer] = []
        for block in unsaved.blocks:
            buffer = self._writer.take()
            if buffer is None:
                break
            blocks.append(block)
            buffers.append(buffer)
        if not blocks:
            return
        del unsaved.blocks[: len(blocks)]
        size = self._block_tokens
        row = unsaved.row
        assert row is not None
        slots = torch.cat([row[b * size : (b + 1) * size] for b in blocks]).to(torch.int64)
        save = self._copier.save(slots, buffers, self._kv.fence())
        self._saves = [each for each in self._saves if not each[1].ended.done()]
        self._saves.append((record, save))
        end = (blocks[-1] + 1) * size
        self._writer.offer(
            WriteJob(
                chain=record.chain,
                tokens=unsaved.tokens[:end],
                blocks=tuple(blocks),
                buffers=tuple(buffers),
                copied=save.ended,
                # The lookup told the store of the prompt's blocks; later blocks are new to it.
                facts=record.facts if end > len(record.tokens) else None,
            )
        )

    def _is_new(self, record: PromptRecord, block: int) -> bool:
        if block in record.local.failed:
            return True  # the store could not deliver it: put it there again
        if not self._shard.stores(block):
            return False
        if block < record.meet.blocks and record.meet.state(block) is BlockState.ATTACHED:
            return False
        stored = record.agreed.stored
        return not (block < len(stored) and stored[block])
