"""End states: data that a stored prefix needs at its end, beside the KV of its blocks
(docs/end-states.md): at token `P` the KV of sliding windows, `[P - window_tokens, P)`, and the
states of recurrent layers after token `P - 1`.

An end state is stored as end blocks. Each has the size of a block; unused bytes are zero.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_cake.core.buffers import Buffer
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import PlaneGroup
from sglang_cake.integration.compat import state_chunk_tokens
from sglang_cake.integration.memory.kv_pool import (
    PIECE_BYTES,
    Copy,
    DeviceKV,
    Fence,
    MakeKV,
    memory_of,
)
from sglang_cake.integration.memory.pool_planes import DraftPools, PoolPlanes, translation_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

# Pools inside of a KV pool that hold the data of end states.
END_POOLS = (
    *("swa_kv_pool", "mamba_pool", "compress_state_pools", "indexer_compress_state_pools"),
    "request_window",  # windows of requests
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
        state: slot in the pool of recurrent states, int64 `[1]`.
        new_rows: so many last ones of `window` were allocated for this end.
    """

    window: torch.Tensor | None = None
    state: torch.Tensor | None = None
    new_rows: int = 0


@dataclass(frozen=True, slots=True)
class EndPart:
    """The end blocks of one kind of layers. They are copied as blocks of a KV pool are.

    Attributes:
        copies: the copies of each run of end blocks of one form, and the number of these blocks.
        slots_of: gives the slots of any of these runs, int64 `[blocks * block_tokens]`.
        form: for the namespace.
    """

    copies: Sequence[tuple[DeviceKV, int]]
    slots_of: Callable[[EndSlots], torch.Tensor]
    form: dict[str, object]


class EndStates:
    """The end states of one model, of all kinds of its layers. The copier's thread calls `save`,
    and the scheduler thread the rest.

    Attributes:
        window_tokens: tokens of an end's window; 0: no layer has a sliding window.
        tail_tokens: so many last tokens of a prompt are computed, whatever is stored.
        state_chunk_tokens: with SGLang's extra buffers, the forward keeps a recurrent state inside
            of a step at multiples of so many tokens from the start of the step. 1: it keeps one
            where the step ends.
        count: end blocks of one end.

    Args: parts: in the order of their end blocks.
    """

    def __init__(
        self,
        parts: Sequence[EndPart],
        *,
        window_tokens: int = 0,
        tail_tokens: int = 0,
        state_chunk_tokens: int = 1,
    ) -> None:
        self.parts = parts
        self.window_tokens = window_tokens
        self.tail_tokens = tail_tokens
        self.state_chunk_tokens = state_chunk_tokens
        self._runs = [run for part in parts for run in part.copies]
        self.count = sum(count for _, count in self._runs)

    @classmethod
    def of(cls, tree: "UnifiedRadixCache", kv: DeviceKV, drafts: DraftPools) -> "EndStates | None":
        """The end states of a model; None: a prefix needs none.

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
                parts.append(compressed_window(kv.beside, pool, block_bytes, windows, layers))
                kv.also_scheduler = True
            else:
                parts.append(
                    window_rows(
                        kv.beside,
                        pool.swa_kv_pool,
                        block_bytes,
                        windows,
                        page_tokens=page,
                        window_tokens=window_tokens,
                    )
                )
        if tree.supports_mamba():
            pool = tree.req_to_token_pool.mamba_pool
            parts.append(recurrent_states(kv.beside, pool, block_bytes, drafts.states))
            kv.also_scheduler = True  # the scheduler thread copies states on its own stream
        if not parts:
            return None
        return cls(
            parts,
            window_tokens=window_tokens,
            tail_tokens=tail_tokens,
            state_chunk_tokens=state_chunk_tokens() if tree.enable_mamba_extra_buffer else 1,
        )

    def describe(self) -> str:
        """Canonical JSON for the namespace: end states of another form are never found."""
        return json.dumps([part.form for part in self.parts], separators=(",", ":"))

    def prepare(self, end: EndSlots) -> list[torch.Tensor]:
        """The slots of an end as `blocks_of` and `save` take them. The device computes them before
        the fence of the copies."""
        return [slots for part in self.parts for slots in [part.slots_of(end)] * len(part.copies)]

    def save(self, slots: Sequence[torch.Tensor], buffers: Sequence[Buffer], after: Fence) -> Copy:
        """Copy an end state, as it is once `after` is reached, into `count` buffers."""
        copies: list[Copy] = []
        first = 0
        try:
            for (kv, count), its_slots in zip(self._runs, slots, strict=True):
                its_buffers = buffers[first : first + count]
                for buffer in its_buffers:  # it still has bytes of another block: none is stored
                    memory_of(buffer)[kv.layout.block_bytes :].zero_()
                copies.append(kv.save(its_slots, its_buffers, after))
                first += count
        except BaseException:  # the caller takes all buffers back
            for copy in copies:
                copy.wait()
            raise
        # All are copied in one stream, so the last copy ends last.
        return replace(copies[-1], keep=tuple(itertools.chain(*(copy.keep for copy in copies))))

    def blocks_of(self, slots: Sequence[torch.Tensor]) -> Iterator[tuple[DeviceKV, torch.Tensor]]:
        """For each end block, what copies it, and its slots."""
        for (kv, _), its_slots in zip(self._runs, slots, strict=True):
            yield from ((kv, rows) for rows in its_slots.split(kv.layout.block_tokens))


def window_rows(
    make: MakeKV,
    pool: Any,
    block_bytes: int,
    drafts: Sequence[Any] = (),
    *,
    page_tokens: int,
    window_tokens: int,
) -> EndPart:
    """KV of sliding windows: the rows of the last window before an end, whole rows in each block.

    Args:
        pool: the pool of the windows.
        block_bytes: size of a buffer.
        drafts: pools of draft models with rows for the same windows.
        window_tokens: tokens of a window, whole pages.

    Raises: ConfigError.
    """
    page = DeviceKV(pool, block_tokens=page_tokens, drafts=drafts).layout
    row_tokens = math.lcm(*(group.row_tokens for group in page.groups))
    row_bytes = page.block_bytes * row_tokens // page.block_tokens
    rows = min(window_tokens, block_bytes // row_bytes * row_tokens)
    if not rows:
        raise ConfigError(
            f"cake stores sliding windows in blocks, and {row_tokens} tokens of them take more "
            "than a block: raise --cake-block-tokens"
        )
    count = -(-window_tokens // rows)
    kv = make(pool, block_tokens=rows, drafts=drafts)

    def slots_of(end: EndSlots) -> torch.Tensor:
        """Whole blocks of slots: the last row is repeated. So the bytes stay those of one request,
        and a load writes equal bytes twice."""
        assert end.window is not None
        missing = (count * rows - len(end.window)) // row_tokens
        return torch.cat([end.window, end.window[-row_tokens:].repeat(missing)])

    form = {"window_tokens": window_tokens, "layout": json.loads(kv.layout.describe())}
    return EndPart([(kv, count)], slots_of, form)


def recurrent_states(
    make: MakeKV, pool: Any, block_bytes: int, drafts: Sequence[Any] = ()
) -> EndPart:
    """States of recurrent layers, each in a row of the state pool.

    Args:
        pool: SGLang's `MambaPool`.
        block_bytes: size of a buffer.
        drafts: the pools of draft models, with a row for each state.

    Raises: ConfigError.
    """
    translate = translation_of(pool)
    own, *others = (_states_of(each) for each in (pool, *drafts))
    memory = {plane.untyped_storage().data_ptr() for plane in own}
    planes = [*own, *itertools.chain(*others)]
    if translate is not None and any(
        plane.untyped_storage().data_ptr() not in memory for plane in planes
    ):
        raise ConfigError(
            "cake does not support a draft model with recurrent states in slots of its own: "
            "remove --speculative-algorithm"
        )
    if drafts and min(map(len, planes)) < len(planes[0]):
        raise ConfigError("cake cannot store a draft model without rows for all states")

    def slots_of(end: EndSlots) -> torch.Tensor:
        assert end.state is not None
        return end.state if translate is None else translate(end.state)

    return EndPart(_rows_in_blocks(make, planes, block_bytes), slots_of, _form_of(planes))


def compressed_window(
    make: MakeKV,
    pool: Any,
    block_bytes: int,
    drafts: Sequence[Any] = (),
    layers: int | None = None,
) -> EndPart:
    """The window of a model with compressed attention, one page for each end. Sums that belong to
    a request are empty at the end of a page.

    Args:
        pool: SGLang's `DeepSeekV4TokenToKVPool`.
        block_bytes: size of a buffer.
        drafts: pools of draft models with pages for the same windows.
        layers: so many first layers have windows without gaps; None: all.

    Raises: ConfigError.
    """
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

    def page_of(end: EndSlots) -> torch.Tensor:
        assert end.window is not None
        return end.window[-1:] // int(pool.swa_page_size)

    form = {"compressed": pool.pd_kv_layout(), **_form_of(planes)}
    return EndPart(_rows_in_blocks(make, planes, block_bytes), page_of, form)


def _rows_in_blocks(
    make: MakeKV, planes: Sequence[torch.Tensor], block_bytes: int
) -> list[tuple[DeviceKV, int]]:
    """One row of each of some tensors: the bytes of all rows, one after the other, cut into blocks.
    To `DeviceKV`, what lies in a block is the KV of one token."""
    if not planes or not all(plane[0].is_contiguous() for plane in planes):
        raise ConfigError("cake cannot store end states in this form of memory")
    blocks: list[list[PoolPlanes]] = []
    left_bytes = 0  # of the last block
    for plane in planes:
        rest = plane.view(len(plane), -1).view(torch.uint8)
        while rest.shape[1]:
            if not left_bytes:
                blocks.append([])
                left_bytes = block_bytes
            width = min(rest.shape[1], left_bytes, PIECE_BYTES)
            group = PlaneGroup(1, (("state", (width,)),), "uint8")
            blocks[-1].append(PoolPlanes(group, (rest[:, :width],)))
            rest = rest[:, width:]
            left_bytes -= width
    return [(make(block, block_tokens=1), 1) for block in blocks]


def _form_of(planes: Sequence[torch.Tensor]) -> dict[str, object]:
    forms = [[str(plane.dtype).removeprefix("torch."), *plane.shape[1:]] for plane in planes]
    return {"states": [[len(list(run)), form] for form, run in itertools.groupby(forms)]}


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
