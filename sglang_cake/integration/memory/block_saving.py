"""New blocks, copied from the slots of a request into the write pipeline."""

from array import array
from weakref import WeakKeyDictionary

import torch

from sglang_cake.core.buffers import Buffer
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.loading.meet import BlockState
from sglang_cake.writeback.block_writer import WriteJob, Writer


class BlockSaving:
    """Copies the full blocks that a checkpoint completed and the store lacks. Scheduler thread."""

    def __init__(self, kv: DeviceKV, writer: Writer) -> None:
        self._kv = kv
        self._writer = writer
        self._block_tokens = kv.layout.block_tokens
        # Blocks before this one were offered to the writer, or are left out for good.
        self._next: WeakKeyDictionary[PromptRecord, int] = WeakKeyDictionary()

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
        full = len(tokens) // self._block_tokens
        start = self._next.get(record, 0)
        todo = [b for b in range(start, full) if self._is_new(record, b)]
        self._next[record] = max(start, full)
        blocks: list[int] = []
        buffers: list[Buffer] = []
        for block in todo:
            buffer = self._writer.take()
            if buffer is not None:
                blocks.append(block)
                buffers.append(buffer)
        if not blocks:
            return
        size = self._block_tokens
        slots = torch.cat([row[b * size : (b + 1) * size] for b in blocks]).to(torch.int64)
        copy = self._kv.save(slots, buffers)
        self._writer.offer(
            WriteJob(
                chain=record.chain,
                tokens=tokens[: full * size],
                blocks=tuple(blocks),
                buffers=tuple(buffers),
                ready=copy.wait,
                # The lookup told the store of the prompt's blocks; later blocks are new to it.
                facts=record.facts if full * size > len(record.tokens) else None,
            )
        )

    def _is_new(self, record: PromptRecord, block: int) -> bool:
        if block in record.local.failed:
            return True  # the store could not deliver it: put it there again
        if block < record.meet.blocks and record.meet.state(block) is BlockState.ATTACHED:
            return False
        stored = record.agreed.stored
        return not (block < len(stored) and stored[block])
