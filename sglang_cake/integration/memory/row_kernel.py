"""A Triton kernel that copies the rows of any number of blocks into a KV pool, or out of it.

One launch does what `DeviceKV` does with one index operation for each plane of each block. Only a
server on a GPU imports this module: it imports Triton.
"""

# Triton reads types off the arguments, not off annotations
# mypy: allow-untyped-decorators, disable-error-code="no-untyped-def"

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_cake.core.layout import BlockLayout
from sglang_cake.integration.memory.pool_planes import WORDS, Piece

# Memory is addressed in units: the widest power of two, up to what one access of a thread can copy,
# that divides the address and the width of every row. A unit has one or two words.
_MAX_UNIT_BYTES = 16
# A tile is what a program copies at a time: 16 KiB of the widest words. A warp copies 512 bytes of
# a row at once.
_TILE_WORDS = 2048
_TILE_COLUMNS = 64
_MOST_TILES = 32  # of a row, that one program copies


# One compilation for each direction, wherever in a tensor the slots begin.
@triton.jit(do_not_specialize=["stride", "first"], do_not_specialize_on_alignment=["slots"])
def copy_rows(
    blocks,  # the words of all blocks
    slots,  # [blocks * BLOCK_TOKENS]
    planes,  # int64 [planes, 5]: address in the pool; units of a row; units before it in a block;
    #                  slots of a row; units from a row of the pool to the next
    stride,  # units from a block to the next
    first,  # units of a block before those that are copied
    BLOCK_TOKENS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    UNIT_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile
    COLUMNS: tl.constexpr,  # of a tile
    PAGED: tl.constexpr,  # rows of some planes have several slots
    INTO_POOL: tl.constexpr,
):
    """A program copies up to TOKENS rows of one plane of one block, or its share of the columns."""
    TILES: tl.constexpr = (BLOCK_TOKENS + TOKENS - 1) // TOKENS
    block = tl.program_id(0) // TILES
    row = tl.program_id(0) % TILES * TOKENS + tl.arange(0, TOKENS)
    plane = planes + tl.program_id(1) * 5
    if PAGED:
        row_slots = tl.load(plane + 3)
        inside = row * row_slots < BLOCK_TOKENS
        in_slots = tl.load(slots + block * BLOCK_TOKENS + row * row_slots, mask=inside)
        in_rows = in_slots // row_slots
    else:
        inside = row < BLOCK_TOKENS
        in_rows = tl.load(slots + block * BLOCK_TOKENS + row, mask=inside)
    pool = tl.multiple_of(tl.load(plane).to(blocks.dtype), UNIT_BYTES)
    # The compiler knows that a product with UNIT_WORDS is a multiple of it. So a thread copies
    # whole units. Width and start are int64, and all offsets with them: a plane, and the memory of
    # all blocks, may have more than 2 GiB.
    width = tl.load(plane + 1) * UNIT_WORDS
    start = (block.to(tl.int64) * stride + tl.load(plane + 2) - first) * UNIT_WORDS
    in_pool = pool + in_rows[:, None] * (tl.load(plane + 4) * UNIT_WORDS)
    in_block = blocks + start + row[:, None] * width
    for begin in range(tl.program_id(2) * COLUMNS, width, tl.num_programs(2) * COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        mask = inside[:, None] & (column < width)
        if INTO_POOL:
            tl.store(in_pool + column, tl.load(in_block + column, mask=mask), mask=mask)
        else:
            tl.store(in_block + column, tl.load(in_pool + column, mask=mask), mask=mask)


class RowKernel:
    """Copies between blocks and slots of a KV pool, both in the memory of one GPU.

    Every copy is one launch, for any number of blocks, on the calling thread's stream. The thread's
    device must be that GPU. The caller orders the copy with all other work on the pool and on the
    blocks, and keeps the arguments alive until it is done. Nothing is copied to the host, and the
    host does not wait. The first copy in each direction compiles the kernel, unless `compile` has.

    The rows of a plane are contiguous, and each warp reads or writes up to 512 bytes of a row at a
    time. On an H100 a block of 16 MiB takes 13 us, 0.91 of the rate of a memcpy within the device.

    Args:
        planes: the pool in block order (`DeviceKV.rows`): for each plane a tensor of any dtype,
            `[rows, ...]`, of contiguous rows. Its memory must not move.
        layout: the layout of a block.
    """

    def __init__(self, planes: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        widths = [plane.row_bytes for plane in layout.planes]
        for plane, width in zip(planes, widths, strict=True):
            assert plane[0].is_contiguous(), plane.stride()
            assert plane.nbytes == len(plane) * width, (plane.shape, width)
        addresses = [plane.data_ptr() for plane in planes]
        strides = [plane.stride(0) * plane.itemsize for plane in planes]
        unit = math.gcd(_MAX_UNIT_BYTES, *addresses, *widths, *strides)
        self._unit_bytes = unit
        self._word = WORDS[min(unit, max(WORDS))]
        columns = min(triton.next_power_of_2(max(widths) // self._word.itemsize), _TILE_COLUMNS)
        tokens = min(triton.next_power_of_2(layout.block_tokens), _TILE_WORDS // columns)
        self._tiles = -(-layout.block_tokens // tokens)  # of a plane of a block
        self._shares = -(-max(widths) // (self._word.itemsize * columns * _MOST_TILES))
        self._sizes = (  # the kernel's constants but the last
            layout.block_tokens,
            unit,
            unit // self._word.itemsize,
            tokens,
            columns,
            any(plane.row_tokens > 1 for plane in layout.planes),
        )
        self._layout = layout
        self._whole = Piece(slice(None), 0, layout.block_bytes)
        self._pool = tuple(planes)  # keeps the addresses valid
        # By the part of a block and the direction. Triton would look a compiled kernel up by its
        # arguments in each launch, which takes the host three times as long as the rest of it.
        self._compiled: dict[tuple[int, int, bool], tuple[torch.Tensor, Any]] = {}
        self._planes = torch.tensor(
            [
                (
                    address,
                    plane.row_bytes // unit,
                    plane.start // unit,
                    plane.row_tokens,
                    stride // unit,
                )
                for address, stride, plane in zip(addresses, strides, layout.planes, strict=True)
            ],
            dtype=torch.int64,
            device=planes[0].device,
        )

    def compile(self, pieces: Sequence[Piece]) -> None:
        """Compile and load the kernel for both directions, by copies of no blocks. Otherwise the
        first prompt with stored blocks would wait for that."""
        slots = torch.empty(0, dtype=torch.int64, device=self._planes.device)
        for piece in pieces:
            blocks = slots.new_empty((0, piece.size_bytes), dtype=torch.uint8)
            self.scatter(blocks, slots, piece)
            self.gather(slots, blocks, piece)

    def scatter(
        self, blocks: torch.Tensor, slots: torch.Tensor, piece: Piece | None = None
    ) -> None:
        """Copy blocks into slots.

        Args:
            blocks: uint8 `[n, stride_bytes]`. A block begins at the first byte of its row, and its
                bytes are contiguous. Address and stride are multiples of 16 bytes.
            slots: int64 `[n * block_tokens]`, those of each block in turn, all different. Where a
                row of a plane has several slots, they are those of whole rows, in order.
            piece: `blocks` have this part of each block alone; None: all of it.

        Slots are not checked, since they are on the device.
        """
        self._launch(blocks, slots, piece, into_pool=True)

    def gather(self, slots: torch.Tensor, blocks: torch.Tensor, piece: Piece | None = None) -> None:
        """Copy slots into blocks. The arguments are those of `scatter`."""
        self._launch(blocks, slots, piece, into_pool=False)

    def _launch(
        self, blocks: torch.Tensor, slots: torch.Tensor, piece: Piece | None, *, into_pool: bool
    ) -> None:
        piece = piece or self._whole
        # A wrong size would be an access to any address.
        copied, stride = len(blocks), blocks.stride(0)
        assert slots.is_contiguous(), slots.stride()
        assert slots.dtype == torch.int64, slots.dtype
        assert slots.numel() == copied * self._layout.block_tokens, (slots.shape, blocks.shape)
        assert blocks.shape[1] >= piece.size_bytes, (blocks.shape, piece)
        assert blocks.data_ptr() % _MAX_UNIT_BYTES == stride % self._unit_bytes == 0, stride
        assert stride < 2**31, stride  # as compiled
        key = piece.start, piece.size_bytes, into_pool
        planes, compiled = self._compiled.get(key) or (self._planes[piece.planes], None)
        grid = copied * self._tiles, planes.shape[0], self._shares
        units = stride // self._unit_bytes, piece.start // self._unit_bytes
        sizes = (*self._sizes, into_pool)
        if compiled is None:
            words = blocks.view(self._word)
            compiled = copy_rows[grid](words, slots, planes, *units, *sizes)
            self._compiled[key] = planes, compiled  # None in Triton's interpreter
        else:
            compiled[grid](blocks, slots, planes, *units, *sizes)
