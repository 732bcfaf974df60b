"""The memory that SGLang's device pools keep for a slot, as groups of planes.

The buffers of a pool decide what is stored, not its class. A pool with further memory for a slot is
refused: blocks without that memory would be wrong KV.

Draft models keep their KV in the target's slots, in those of its sliding windows and recurrent
states, or in rings of requests, which are not stored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import DTYPE_BYTES, Parts, PlaneGroup

# Row copies use the widest integer type that divides every row, whatever the dtype of the KV: there
# are no index kernels for float8.
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# Attributes of a pool that are pools with the same slots, and the prefix for names of their planes.
# A hybrid has a pool for full attention. MiniMax's sparse attention has one for all layers, and one
# for the index.
_INNER = {"full_kv_pool": "", "main_pool": "", "index_kv_pool": "index_", "index_k_pool": "index_"}
# Attributes of a pool with the scales of its numbers, and the names of their planes.
_SCALES = {
    "k_scale_buffer": "k_scale",
    "v_scale_buffer": "v_scale",
    "native_k_scale_buffer": "k_native_scale",
    "native_v_scale_buffer": "v_native_scale",
    "kv_scale_buffer": "kv_scale",
}
# Memory for one layer of a step, which each layer fills anew.
_WORKSPACES = ("dq_k_buffer", "dq_v_buffer")
# Pools of DeepSeek V4, by compression ratio.
_COMPRESSED = ("kv_pools", "index_pools")
# Attributes of pools whose slots are not the rows of their buffers. The pool translates slots, or a
# rank has only some of the rows.
_NO_ROWS = ("translate_loc_to_hisparse_device", "layer_shard_enabled", "shard_spec")


@dataclass(frozen=True, slots=True)
class PoolPlanes:
    """The planes of one group in device memory.

    Attributes:
        buffers: one for each plane, in block order, of contiguous rows. Row `i` holds the slots
            `[i * row_tokens, (i + 1) * row_tokens)`. SGLang owns them.
    """

    group: PlaneGroup
    buffers: tuple[torch.Tensor, ...]

    @property
    def slots(self) -> int:
        """Every buffer has rows for at least so many slots."""
        return min(map(len, self.buffers)) * self.group.row_tokens


class Piece(NamedTuple):
    """Consecutive planes of a block."""

    planes: slice
    start: int  # its first byte
    size_bytes: int
    moves: bool = False  # SGLang moves the rows of these planes


def moves_slots(pool: Any) -> bool:
    """Whether the numbers of a pool's slots are not those of its rows, since SGLang moves slots in
    a memory that several pools share (`--enable-unified-memory`)."""
    return bool(getattr(_of_full_attention(pool), "requires_physical_write_loc", False))


def translation_of(pool: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What gives the rows of slots, int64, as they are at that moment; None: slots are rows."""
    found: Callable[[torch.Tensor], torch.Tensor] | None
    found = getattr(_of_full_attention(pool), "host_transfer_translate", None)
    return found


def _of_full_attention(pool: Any) -> Any:
    return getattr(pool, "full_kv_pool", None) or pool


def pool_planes(pool: Any, *, apart: Sequence[object] = (), prefix: str = "") -> list[PoolPlanes]:
    """All planes that a pool keeps for a slot. In a hybrid, these are the KV of full attention.

    Args:
        apart: pools inside of `pool` that the caller stores in another way: end states.
        prefix: the prefix of the names of the parts.

    Raises: ConfigError, one line, if the pool keeps anything else, or its slots are not rows.
    """
    name = type(pool).__name__
    found = list(_planes(pool, prefix))
    if not found:
        raise ConfigError(f"cake cannot store a {name}: it has no K and V in rows of slots")
    full = _of_full_attention(pool)
    sized = full if moves_slots(pool) else pool
    needed = (sized.size // pool.page_size + 1) * pool.page_size  # the first page is never used
    buffers = [buffer for planes in found for buffer in planes.buffers]
    if min(planes.slots for planes in found) < needed or not all(
        buffer[0].is_contiguous() for buffer in buffers
    ):
        raise ConfigError(f"cake cannot store a {name}: its buffers are no rows of {needed} slots")
    workspaces = [getattr(full, each, None) for each in _WORKSPACES]
    others = [each for _, each in _memory([*apart, *workspaces], "")]
    known = {_storage(tensor) for tensor in (*buffers, *others, *_tails(pool))}
    further = {
        path.split(".")[0]
        for path, tensor in _memory(pool, "")
        if tensor.dim() > 1 and tensor.nbytes >= needed and _storage(tensor) not in known
    }
    if further:
        raise ConfigError(
            f"cake cannot store a {name}: it keeps {', '.join(sorted(further))} beside K and V; "
            "use another --kv-cache-dtype or model"
        )
    return found


def _planes(pool: Any, prefix: str) -> Iterator[PoolPlanes]:
    for name, its_prefix in _INNER.items():
        if (inner := getattr(pool, name, None)) is not None:
            yield from _planes(inner, prefix + its_prefix)
    for name in _COMPRESSED:
        for ratio, inner in getattr(pool, name, {}).items():
            if inner is not None:
                yield from _own_planes(inner, prefix, inner.page_size * ratio)
    yield from _own_planes(pool, prefix, getattr(pool, "page_size", 1))
    if keys := tuple(getattr(pool, "qsa_compressed_k_buffer_pool", ())):
        parts = ((f"{prefix}index", tuple(keys[0].shape[1:])),)
        dtype = str(pool.qsa_compressed_dtype).removeprefix("torch.")
        yield PoolPlanes(PlaneGroup(len(keys), parts, dtype, pool.qsa_compress_ratio), keys)


def _tails(pool: Any) -> Iterator[torch.Tensor]:
    """Memory of a pooled or compressed index for tokens whose key is not complete yet. There are
    no such tokens at the end of a page, and blocks are whole pages."""
    for name in _INNER:
        if (inner := getattr(pool, name, None)) is not None:
            yield from _tails(inner)
    if getattr(pool, "kpool_use_compress", False):
        for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
            yield from pool.get_compress_tail_buffers(layer)
    if hasattr(pool, "qsa_key_state_buffer_pool"):
        yield from (*pool.qsa_key_state_buffer_pool, pool.qsa_rope_position_buffer)


def _own_planes(pool: Any, prefix: str, page_tokens: int) -> Iterator[PoolPlanes]:
    """The planes of a pool without those of the pools in it.

    Args: page_tokens: tokens of a page, which may be one row.
    """
    keys, values, both, index, slab = (
        () if value is None else value
        for value in (
            getattr(pool, name, None)
            for name in ("k_buffer", "v_buffer", "kv_buffer", "index_k_with_scale_buffer", "slab")
        )
    )
    if not any(map(len, (keys, both, index, slab))):
        return
    if any(getattr(pool, name, None) for name in _NO_ROWS):
        raise ConfigError(
            f"cake cannot store a {type(pool).__name__}: its slots are not rows of its buffers"
        )
    layers: Iterable[dict[str, torch.Tensor]]
    if len(slab):  # K, V and their scales are views of it
        layers = ({"page": each} for each in slab)
    elif len(both):
        layers = ({"kv": each} for each in both)
    elif len(values):
        layers = ({"k": k, "v": v} for k, v in zip(keys, values, strict=True))
    else:
        layers = ({"k": each} for each in keys)
    yield from _grouped(pool, layers, prefix, page_tokens)
    if index:  # layers without an index of their own have buffers without rows
        indexed = ({"index": each} for each in index if len(each))
        yield from _grouped(pool, indexed, prefix, page_tokens)
    if not len(slab):
        yield from _scales(pool, prefix, page_tokens)


def _scales(pool: Any, prefix: str, page_tokens: int) -> Iterator[PoolPlanes]:
    """The planes of scales that a pool has beside its numbers, a row for a token or for a page."""
    found = {
        name: buffers
        for attribute, name in _SCALES.items()
        if (buffers := getattr(pool, attribute, None))
    }
    for row_tokens in sorted({1, page_tokens}):
        rows = (pool.size + pool.page_size) // row_tokens
        planes = {name: each for name, each in found.items() if len(each[0]) == rows}
        if planes:
            buffers = [buffer for layer in zip(*planes.values(), strict=True) for buffer in layer]
            parts = tuple((prefix + n, tuple(each[0].shape[1:])) for n, each in planes.items())
            group = PlaneGroup(len(buffers) // len(parts), parts, "uint8", row_tokens)
            yield PoolPlanes(group, tuple(buffers))


def _grouped(
    pool: Any, layers: Iterable[Mapping[str, torch.Tensor]], prefix: str, page_tokens: int
) -> Iterator[PoolPlanes]:
    """Layers with equal planes together, in the order of the pool."""
    # A row of such a pool may be a page: all tokens of a head, and then those of the next one.
    has_pages = getattr(pool, "kv_cache_layout", None) == "hnd"
    groups: dict[tuple[Parts, bool, bool], list[torch.Tensor]] = {}
    for layer in layers:
        parts = tuple((prefix + name, tuple(each.shape[1:])) for name, each in layer.items())
        dims = {each.dim() for each in layer.values()}
        is_page = has_pages and dims == {4}
        if not is_page and (not dims <= {2, 3} or len(dims) > 1):
            raise ConfigError(
                f"cake cannot store a {type(pool).__name__}: it needs KV buffers of "
                "[slots, heads, dim]"
            )
        groups.setdefault((parts, dims == {2}, is_page), []).extend(layer.values())
    for (parts, packed, is_page), buffers in groups.items():
        dtype = _dtype(pool, buffers, packed=packed)
        row_tokens = page_tokens if packed or is_page else 1
        group = PlaneGroup(len(buffers) // len(parts), parts, dtype, row_tokens)
        yield PoolPlanes(group, tuple(buffers))


def _dtype(pool: Any, buffers: Sequence[torch.Tensor], *, packed: bool) -> str:
    """The dtype of the numbers in `buffers`; that of bytes if they are packed, two in a byte or
    with their scales."""
    packed = packed or getattr(pool, "dsa_kv_cache_store_fp8", False)
    packed = packed or pool.dtype == torch.float4_e2m1fn_x2
    dtype = torch.uint8 if packed else pool.dtype
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES or any(each.itemsize != dtype.itemsize for each in buffers):
        raise ConfigError(
            f"cake cannot store KV of {name} in a {type(pool).__name__}: use another "
            "--kv-cache-dtype"
        )
    return name


def _memory(holder: object, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """All tensors that a pool holds, also in pools and caches inside of it, by where they are."""
    seen = set() if seen is None else seen
    if id(holder) in seen:
        return
    seen.add(id(holder))
    inside: Iterable[tuple[str, object]] = ()
    if isinstance(holder, torch.Tensor):
        yield path, holder
    elif isinstance(holder, list | tuple):
        inside = ((path, each) for each in holder)
    elif isinstance(holder, dict):
        inside = ((path, each) for each in holder.values())
    elif not path or _may_hold_memory(holder):
        inside = (
            (f"{path}.{name}".removeprefix("."), each)
            for name, each in getattr(holder, "__dict__", {}).items()
        )
    for its_path, each in inside:
        yield from _memory(each, its_path, seen)


def _may_hold_memory(holder: object) -> bool:
    """Whether it may be a pool or a cache. Allocators lead to pools of other slots."""
    module = type(holder).__module__
    return module.startswith("sglang.srt.mem_cache") and not module.startswith(
        "sglang.srt.mem_cache.allocator"
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---- draft models ----


def belongs_to_requests(pool: Any) -> bool:
    """Whether a draft model keeps its KV in rings of requests, which are not stored: SGLang begins
    them anew (`CakeRadixCache.restart_windows`)."""
    return getattr(pool, "swa_req_ring_size", None) is not None


@dataclass(frozen=True, slots=True)
class DraftPools:
    """The pools of draft models, in the order of the models. SGLang owns them.

    Attributes:
        rows: with a row for each slot of the target. Blocks have them.
        windows: with a row for each slot of the target's sliding windows. End states have them.
        states: of recurrent states, with a row for each of the target's. End states have them.
    """

    rows: tuple[Any, ...] = ()
    windows: tuple[Any, ...] = ()
    states: tuple[Any, ...] = ()

    @classmethod
    def of(cls, pools: Sequence[Any], target: Any, *, states: Sequence[Any] = ()) -> "DraftPools":
        """
        Args:
            pools: one for each draft model with KV of the tree.
            target: the pool of the model itself.
            states: pools of the draft models' own recurrent states.

        Raises: ConfigError, one line, if a pool has its rows elsewhere.
        """
        rows: list[Any] = []
        windows: list[Any] = []
        for pool in pools:
            window = getattr(pool, "swa_kv_pool", None)
            if window is None:
                has_index = hasattr(pool, "qsa_compressed_k_buffer_pool")
                # A hybrid's pool has the states of the target beside its rows.
                rows.append(pool if has_index else getattr(pool, "full_kv_pool", pool))
                continue
            sums = (*getattr(pool, "compress_state_pools", ()),)
            mapping = getattr(target, "full_to_swa_index_mapping", None)
            # In the memory of all pools, a draft model has its rows beside those of the target.
            is_beside = moves_slots(pool) or pool.full_to_swa_index_mapping is mapping is not None
            if pool.swa_uses_full_indices:
                rows.append(window)
            elif window.layer_num:
                if not is_beside or any(sums):
                    raise ConfigError(
                        f"cake does not support a draft model with a {type(pool).__name__} of its "
                        "own slots: remove --speculative-algorithm"
                    )
                windows.append(window)
            full = getattr(pool, "full_kv_pool", None)
            if full is not None and full.layer_num:
                rows.append(full)
        return cls(tuple(rows), tuple(windows), tuple(states))
