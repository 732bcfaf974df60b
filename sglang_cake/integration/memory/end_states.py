"""End states: data that a stored prefix needs at its end, beside the KV of its blocks.

A model with sliding windows or recurrent layers can continue a stored prefix only at certain
tokens, the prefix's ends. At an end it needs an end state:

| layers | end state at token `P` |
|---|---|
| sliding windows | their KV of the last window, `[P - window_tokens, P)` |
| recurrent: Mamba, linear attention, short convolutions | their state after token `P - 1` |
| compressed: DeepSeek V4 | the last page of the window, with sums of tokens yet to be compressed |

With SGLang's bounded replay (DeepSeek V4.1), the last layers compute a step's last tokens alone. So
their window before an end is incomplete, and no part of an end state. They need no window before a
step that has the last `tail_tokens` of a prompt.

An end state is stored as end blocks. Each has the size of a block; unused bytes are zero.
So stores, host buffers and the loader handle one size.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sglang_cake.core.buffers import Buffer
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout
from sglang_cake.integration.memory.kv_pool import Copy, CopyStreams, DeviceKV, Fence, memory_of
from sglang_cake.integration.memory.pool_planes import DraftPools, translation_of

if TYPE_CHECKING:
    from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache

# Pools inside of a KV pool that hold the data of end states.
END_POOLS = (
    *("swa_kv_pool", "mamba_pool", "compress_state_pools", "indexer_compress_state_pools"),
    "request_window",  # of `window_replay`
)


def is_compressed(pool: Any) -> bool:
    """Whether a KV pool keeps sums of tokens that are not compressed yet."""
    return hasattr(pool, "compress_state_pools")


@dataclass(frozen=True, slots=True)
class EndSlots:
    """Device memory of the end state at one token.

    Attributes:
        window: rows of the last window in the pool of sliding windows, int64, oldest first. Nearer
            to the start of a prompt than a window, there are fewer. What is loaded into row 0 is
            not needed: it is SGLang's target for padding.
        state: slot in the pool of recurrent states, and its row once it is prepared; or page of a
            compressed window; int64 `[1]`.
    """

    window: torch.Tensor | None = None
    state: torch.Tensor | None = None


class EndStates:
    """The end states of one model, of all kinds of its layers. The copier's thread calls `load` and
    `save`, and the scheduler thread the rest.

    Attributes:
        parts: in the order of their end blocks.
        window_tokens: tokens of an end's window; 0: no layer has a sliding window.
        tail_tokens: so many last tokens of a prompt are computed, whatever is stored.
        count: end blocks of one end.

    Args:
        streams: that all parts are copied on; None: on a CPU.
        also_scheduler: as for `CopyStreams.hold_back`.
    """

    def __init__(
        self,
        parts: Sequence["EndPart"],
        *,
        streams: CopyStreams | None,
        also_scheduler: bool,
        window_tokens: int,
        tail_tokens: int,
    ) -> None:
        self._streams = streams
        self._also_scheduler = also_scheduler
        self.parts = tuple(parts)
        self.window_tokens = window_tokens
        self.tail_tokens = tail_tokens
        self.count = sum(part.count for part in parts)

    @classmethod
    def of(cls, tree: "CakeRadixCache", kv: DeviceKV, drafts: DraftPools) -> "EndStates | None":
        """Those of a model; None: a prefix needs none.

        Args: tree: of the model. kv: of its blocks. drafts: of its draft models.

        Raises: ConfigError.
        """
        windows = drafts.windows
        parts: list[EndPart] = []
        window_tokens = tail_tokens = 0
        block_bytes = kv.layout.block_bytes
        if tree.supports_swa():
            pool = tree.token_to_kv_pool_allocator.get_kvcache()
            page = tree.page_size
            window_tokens = -(-max(tree.sliding_window_size, page) // page) * page
            if is_compressed(pool):
                layers = None
                if tree.decoder_swa_bounded_replay:
                    tail_tokens, windows = tree.sliding_window_size, ()
                    layers = max(pool.kv_source_layers)  # the first one of the last layers
                parts.append(
                    CompressedWindow(
                        pool,
                        block_bytes=block_bytes,
                        streams=kv.streams,
                        drafts=windows,
                        layers=layers,
                    )
                )
            else:
                parts.append(
                    WindowRows(
                        partial(kv.beside, pool.swa_kv_pool, drafts=windows),
                        page=DeviceKV(pool.swa_kv_pool, block_tokens=page, drafts=windows).layout,
                        window_tokens=window_tokens,
                        block_bytes=block_bytes,
                    )
                )
        if tree.supports_mamba():
            parts.append(
                RecurrentStates(
                    tree.req_to_token_pool.mamba_pool,
                    block_bytes=block_bytes,
                    streams=kv.streams,
                    drafts=drafts.states,
                )
            )
        if not parts:
            return None
        return cls(
            parts,
            streams=kv.streams,
            # The scheduler thread copies states on its own stream.
            also_scheduler=kv.moves or any(isinstance(part, StateRows) for part in parts),
            window_tokens=window_tokens,
            tail_tokens=tail_tokens,
        )

    def describe(self) -> str:
        """Canonical JSON for the namespace: end states of another form are never found."""
        return json.dumps([part.describe() for part in self.parts], separators=(",", ":"))

    def prepare(self, slots: EndSlots) -> EndSlots:
        """The slots as `load` and `save` take them. The device computes them before the fence that
        these get."""
        for part in self.parts:
            slots = part.prepare(slots)
        return slots

    def save(self, slots: EndSlots, buffers: Sequence[Buffer], after: Fence) -> Copy:
        """Copy an end state, as it is once `after` is reached, into `count` buffers."""
        copies: list[Copy] = []
        first = 0
        try:
            for part in self.parts:
                copies.append(part.save(slots, buffers[first : first + part.count], after))
                first += part.count
        except BaseException:  # the caller takes all buffers back
            for copy in copies:
                copy.wait()
            raise
        # All parts are copied in one stream, so the last copy ends last.
        return replace(copies[-1], keep=tuple(itertools.chain(*(copy.keep for copy in copies))))

    def load(self, index: int, buffer: Buffer, slots: EndSlots, after: Fence) -> Copy:
        """Copy end block `index` into the slots, once `after` is reached."""
        for part in self.parts:
            if index < part.count:
                return part.load(index, buffer, slots, after)
            index -= part.count
        raise IndexError(index)

    def order_forwards_after(self, copies: Sequence[Copy]) -> None:
        """As `DeviceKV.order_forwards_after`, for copies of end states."""
        if self._streams is not None:
            self._streams.hold_back(copies, also_scheduler=self._also_scheduler)


class WindowRows:
    """KV of sliding windows: the rows of the last window before an end, whole rows in each block.

    Args:
        kv_of: `(block_tokens)` gives the copies of blocks of so many tokens of the windows' pool.
        page: the layout of a page of that pool.
        window_tokens: tokens of a window, whole pages.
        block_bytes: size of a buffer.
    """

    def __init__(
        self,
        kv_of: Callable[[int], DeviceKV],
        *,
        page: BlockLayout,
        window_tokens: int,
        block_bytes: int,
    ) -> None:
        row_tokens = math.lcm(*(group.row_tokens for group in page.groups))
        row_bytes = page.block_bytes * row_tokens // page.block_tokens
        rows = min(window_tokens, block_bytes // row_bytes * row_tokens)
        if not rows:
            raise ConfigError(
                f"cake stores sliding windows in blocks, and {row_tokens} tokens of them take more "
                "than a block: raise --cake-block-tokens"
            )
        self.count = -(-window_tokens // rows)
        self._kv = kv_of(rows)
        self._rows = rows
        self._row_tokens = row_tokens
        self._window_tokens = window_tokens

    def describe(self) -> dict[str, object]:
        return {
            "window_tokens": self._window_tokens,
            "layout": json.loads(self._kv.layout.describe()),
        }

    def prepare(self, slots: EndSlots) -> EndSlots:
        """Whole blocks of slots: the last row is repeated. So the bytes stay those of one request,
        and a load writes equal bytes twice."""
        assert slots.window is not None
        missing = (self.count * self._rows - len(slots.window)) // self._row_tokens
        last = slots.window[-self._row_tokens :].repeat(missing)
        return replace(slots, window=torch.cat([slots.window, last]))

    def save(self, slots: EndSlots, buffers: Sequence[Buffer], after: Fence) -> Copy:
        assert slots.window is not None
        for buffer in buffers:
            _zero(buffer, self._kv.layout.block_bytes)
        return self._kv.save(slots.window, [self._piece(buffer) for buffer in buffers], after)

    def load(self, index: int, buffer: Buffer, slots: EndSlots, after: Fence) -> Copy:
        assert slots.window is not None
        rows = slots.window[index * self._rows : (index + 1) * self._rows]
        return self._kv.load(self._piece(buffer), rows, after)

    def _piece(self, buffer: Buffer) -> Buffer:
        return Buffer(buffer.view[: self._kv.layout.block_bytes])


class StateRows:
    """One row of each of some tensors: the bytes of all rows, one after the other, cut into blocks.

    Args:
        planes: the tensors, of contiguous rows. SGLang owns them.
        block_bytes: size of a buffer.
        streams: of the blocks' copies; None: on a CPU. They go through its rings, in pieces.
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        *,
        block_bytes: int,
        streams: CopyStreams | None = None,
    ) -> None:
        if not planes or not all(plane[0].is_contiguous() for plane in planes):
            raise ConfigError("cake cannot store end states in this form of memory")
        self._planes = planes
        self._rows = [plane.view(len(plane), -1).view(torch.uint8) for plane in planes]
        self._starts = list(itertools.accumulate((rows.shape[1] for rows in self._rows), initial=0))
        self._block_bytes = block_bytes
        self.count = -(-self._starts[-1] // block_bytes)
        self._streams = streams

    def describe(self) -> dict[str, object]:
        forms = [
            [str(plane.dtype).removeprefix("torch."), *plane.shape[1:]] for plane in self._planes
        ]
        runs = [[len(list(run)), form] for form, run in itertools.groupby(forms)]
        return {"states": runs}

    def prepare(self, slots: EndSlots) -> EndSlots:
        return slots

    def save(self, slots: EndSlots, buffers: Sequence[Buffer], after: Fence) -> Copy:
        state = slots.state
        assert state is not None

        def move(ring: torch.Tensor) -> None:
            for rows, start in zip(self._rows, self._starts, strict=False):
                for index, within, part in self._cut(start, start + rows.shape[1], len(ring)):
                    row = ring[: part.stop - part.start].unsqueeze(0)
                    torch.index_select(rows[:, part], 0, state, out=row)
                    memory_of(buffers[index])[within].copy_(row[0], non_blocking=True)

        _zero(buffers[-1], self._starts[-1] - (self.count - 1) * self._block_bytes)
        streams = self._streams
        if streams is None:
            move(torch.empty(self._block_bytes, dtype=torch.uint8))
            return Copy()
        return self._launch(streams.out, after, partial(move, streams.ring_out[0]), state)

    def load(self, index: int, buffer: Buffer, slots: EndSlots, after: Fence) -> Copy:
        state = slots.state
        assert state is not None
        first = index * self._block_bytes
        source = memory_of(buffer)[: self._starts[-1] - first]

        streams = self._streams
        if streams is None:
            started_s = time.perf_counter()
            self._put(source, first, state)
            return Copy(took_s=time.perf_counter() - started_s)

        def move() -> None:
            size = streams.ring_in.shape[1]
            for at in range(0, len(source), size):
                place = streams.next_place()
                self._put(streams.fetch(source[at : at + size], place), first + at, state)
                streams.end_use(place)

        return self._launch(streams.into, after, move, state)

    def _put(self, piece: torch.Tensor, begin: int, state: torch.Tensor) -> None:
        """Copy bytes of a state, from byte `begin` on, into its rows."""
        stop = begin + len(piece)
        for rows, start in zip(self._rows, self._starts, strict=False):
            low, high = max(begin, start), min(stop, start + rows.shape[1])
            if low < high:
                part = piece[low - begin : high - begin].unsqueeze(0)
                rows[:, low - start : high - start].index_copy_(0, state, part)

    def _cut(self, start: int, stop: int, most: int) -> Iterator[tuple[int, slice, slice]]:
        """The bytes `[start, stop)` of a state, in parts of at most `most` bytes, each in one
        block: index of the block, place in the block, and place in these bytes."""
        size = self._block_bytes
        low = start
        while low < stop:
            index = low // size
            high = min(stop, low + most, (index + 1) * size)
            within = slice(low - index * size, high - index * size)
            yield index, within, slice(low - start, high - start)
            low = high

    def _launch(
        self,
        stream: torch.cuda.Stream,
        after: Fence,
        move: Callable[[], object],
        keep: torch.Tensor,
    ) -> Copy:
        assert self._streams is not None
        with self._streams.launching(stream, after):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            move()
            end.record(stream)
            return Copy(end, end, (keep,), begin, number=next(self._streams.numbers))


class RecurrentStates(StateRows):
    """States of recurrent layers, each in a row of the state pool.

    Args:
        pool: SGLang's `MambaPool`.
        drafts: those of draft models, with a row for each state.
        Others as for `StateRows`.
    """

    def __init__(
        self,
        pool: Any,
        *,
        block_bytes: int,
        streams: CopyStreams | None = None,
        drafts: Sequence[Any] = (),
    ) -> None:
        self._translate = translation_of(pool)
        own, *others = (_states_of(each) for each in (pool, *drafts))
        memory = {plane.untyped_storage().data_ptr() for plane in own}
        planes = [*own, *itertools.chain(*others)]
        if self._translate is not None and any(
            plane.untyped_storage().data_ptr() not in memory for plane in planes
        ):
            raise ConfigError(
                "cake does not support a draft model with recurrent states in slots of its own: "
                "remove --speculative-algorithm"
            )
        if drafts and min(map(len, planes)) < len(planes[0]):
            raise ConfigError("cake cannot store a draft model without rows for all states")
        super().__init__(planes, block_bytes=block_bytes, streams=streams)

    def prepare(self, slots: EndSlots) -> EndSlots:
        if self._translate is None or slots.state is None:
            return slots
        return replace(slots, state=self._translate(slots.state))


class CompressedWindow(StateRows):
    """The window of a model with compressed attention, one page for each end.

    A page of the window has the KV of its tokens, and the sums of those that are not compressed
    yet: SGLang keeps them in rings that belong to the page. Sums over 128 tokens are a request's
    own, and empty at the end of a page.

    Args:
        pool: SGLang's `DeepSeekV4TokenToKVPool`.
        drafts: pools of draft models with pages for the same windows.
        layers: so many first layers have windows without gaps; None: all.
        Others as for `StateRows`.
    """

    def __init__(
        self,
        pool: Any,
        *,
        block_bytes: int,
        streams: CopyStreams | None = None,
        drafts: Sequence[Any] = (),
        layers: int | None = None,
    ) -> None:
        windows = [*pool.swa_kv_pool.kv_buffer[:layers]]
        windows += [buffer for each in drafts for buffer in each.kv_buffer]
        if min(map(len, windows)) < len(windows[0]):
            raise ConfigError("cake cannot store a draft model without pages for all windows")
        rings = [
            each
            for each in (*pool.compress_state_pools, *pool.indexer_compress_state_pools)
            if each is not None and not each.request_scoped
        ]
        planes = [*windows, *map(_pages_of_sums, rings)]
        super().__init__(planes, block_bytes=block_bytes, streams=streams)
        self._page_tokens = pool.swa_page_size
        self._kv_form = pool.pd_kv_layout()

    def describe(self) -> dict[str, object]:
        return {"compressed": self._kv_form, **super().describe()}

    def prepare(self, slots: EndSlots) -> EndSlots:
        assert slots.window is not None
        return replace(slots, state=slots.window[-1:] // self._page_tokens)


EndPart = WindowRows | StateRows


def _states_of(pool: Any) -> list[torch.Tensor]:
    """All that SGLang's `MambaPool` keeps of a state, with a row for each."""
    (inventory,) = pool.get_device_pool_infos()
    found = inventory.buffer_info
    layers = [layer for some in (*found.conv, found.temporal) for layer in some]
    return [plane for plane in (*layers, *found.extra_checkpoint_buffers) if plane.numel()]


def _pages_of_sums(ring: Any) -> torch.Tensor:
    """The memory of one of SGLang's `CompressStatePool`: a row for each page, `[pages, bytes]`."""
    sums = ring.kv_score_buffer.kv_score
    pages = len(sums) // ring.ring_size
    rows: torch.Tensor = sums[: pages * ring.ring_size].view(pages, -1)
    return rows


def _zero(buffer: Buffer, start: int) -> None:
    """A buffer still has bytes of another block: none of them is stored."""
    memory_of(buffer)[start:].zero_()
