"""New blocks on their way out: from the slots of a request into the write pipeline."""

from array import array

import torch

from sglang_cake.core.buffers import Buffer
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.restore import Restore
from sglang_cake.loading.meet import BlockState
from sglang_cake.writeback.block_writer import WriteJob, Writer


class BlockSaving:
    """Copies the full blocks that a checkpoint completed and nobody stores. Scheduler thread."""

    def __init__(self, kv: DeviceKV, writer: Writer) -> None:
        self._kv = kv
        self._writer = writer
        self._block_tokens = kv.layout.block_tokens

    def checkpointed(
        self, restore: Restore, tokens: "array[int]", row: torch.Tensor, *, last: bool
    ) -> None:
        """The tree holds the KV of `tokens`.

        Args:
            tokens: the request's tokens whose KV is complete; restarts where an earlier call ended.
            row: slot of each of them, on the device, `[len(tokens)]`.
            last: no further checkpoint of this request will come.
        """
        if not restore.known and not last:
            return  # whether they are stored is not known yet; the next checkpoint looks again
        full = len(tokens) // self._block_tokens
        todo = [b for b in range(restore.next_write, full) if self._is_new(restore, b)]
        restore.next_write = max(restore.next_write, full)
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
                chain=restore.chain,
                tokens=tokens[: full * size],
                blocks=tuple(blocks),
                buffers=tuple(buffers),
                ready=copy.wait,
                # At the lookup the store was told of the prompt's blocks; these are new to it.
                facts=restore.facts if full * size > len(restore.tokens) else None,
            )
        )

    def _is_new(self, restore: Restore, block: int) -> bool:
        if block in restore.failed:
            return True  # the store could not give it: put it there again
        if block < restore.meet.blocks and restore.meet.state(block) is BlockState.ATTACHED:
            return False
        return not (block < len(restore.stored) and restore.stored[block])
