"""What stands in for SGLang: modules, where it is not installed, and KV pools of its form."""

import importlib
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

# What the modules of the copies, the coordinator and the costs take from SGLang. Nothing of it is
# called here.
_MODULES: dict[str, dict[str, object]] = {
    "sglang": {},
    "sglang.version": {"__version__": "0"},
    "sglang.srt": {},
    "sglang.srt.managers": {},
    "sglang.srt.managers.schedule_batch": {"MM_PAD_SHIFT_VALUE": 1_000_000},
    "sglang.srt.managers.schedule_policy": {"CLIP_MAX_NEW_TOKENS": 4096},
    "sglang.srt.plugins": {},
    "sglang.srt.plugins.hook_registry": {
        "HookRegistry": type("HookRegistry", (), {}),
        "HookType": type("HookType", (), {}),
    },
}


def install() -> None:
    """Make `sglang_cake.integration` importable without SGLang. No effect where it is installed."""
    try:
        importlib.import_module("sglang.version")
    except ModuleNotFoundError:
        for name, members in _MODULES.items():
            module = ModuleType(name)
            module.__path__ = []
            vars(module).update(members)
            sys.modules[name] = module


@dataclass(frozen=True, slots=True)
class PoolForm:
    """A KV pool.

    Attributes:
        v_dim: 0: MLA, one row of `heads * dim` values for each token and layer.
        index_page_bytes: of an index of MLA's rows (DSA), for each page.
        index_dim: an index (MiniMax) of so many values of each token, with K and V in the second
            layer, and with K alone in the layers behind it.
        scale_bytes: of K, and of V, for each token and layer, in pages (MXFP8).
        is_hnd: a row is a page, with the tokens of one head after those of another.
        is_shared: a memory of all pools, where slots are in other rows (unified memory). Beside it
            is a draft model of the same form with a pool of its own.
    """

    layers: int
    heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype = torch.bfloat16
    index_page_bytes: int = 0
    index_dim: int = 0
    scale_bytes: int = 0
    is_hnd: bool = False
    is_shared: bool = False

    @property
    def token_bytes(self) -> int:
        """Of all layers, without an index."""
        return self.layers * self.heads * (self.dim + self.v_dim) * self.dtype.itemsize

    @property
    def has_pages(self) -> bool:
        """Whether a page of several tokens is a row of it."""
        return bool(self.index_page_bytes or self.scale_bytes or self.is_hnd)


class MhaPool:
    """As `MHATokenToKVPool`: with rows of one width, K and V are halves of one allocation."""

    def __init__(self, form: PoolForm, slots: int, page_tokens: int, device: torch.device) -> None:
        self.size = slots
        self.page_size = page_tokens
        self.dtype = form.dtype
        self.kv_cache_layout = "hnd" if form.is_hnd else "nhd"
        rows = slots + page_tokens
        k_shape, v_shape = ((rows, form.heads, dim) for dim in (form.dim, form.v_dim))
        if form.is_hnd:
            k_shape, v_shape = (
                (rows // page_tokens, form.heads, page_tokens, dim)
                for dim in (form.dim, form.v_dim)
            )
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        for _ in range(form.layers):
            if k_shape == v_shape:
                both = _zeros((2, *k_shape), form.dtype, device)
                self.k_buffer.append(both[0])
                self.v_buffer.append(both[1])
            else:
                self.k_buffer.append(_zeros(k_shape, form.dtype, device))
                self.v_buffer.append(_zeros(v_shape, form.dtype, device))
        if form.scale_bytes:
            scales = (rows // page_tokens, page_tokens * form.scale_bytes)
            self.k_scale_buffer, self.v_scale_buffer = (
                [_zeros(scales, torch.uint8, device) for _ in range(form.layers)] for _ in range(2)
            )


class SharedPool:
    """As `UnifiedMHATokenToKVPool`: a row has K and V of all layers, and pages are in other rows
    than their numbers say."""

    requires_physical_write_loc = True

    def __init__(self, form: PoolForm, slots: int, page_tokens: int, device: torch.device) -> None:
        self.size = slots
        self.page_size = page_tokens
        self.dtype = form.dtype
        rows, width = slots + page_tokens, form.heads * (form.dim + form.v_dim)
        memory = _zeros((rows, form.layers, width), form.dtype, device)
        k, v = memory.split([form.heads * form.dim, form.heads * form.v_dim], dim=2)
        self.k_buffer = [each.unflatten(1, (form.heads, form.dim)) for each in k.unbind(1)]
        self.v_buffer = [each.unflatten(1, (form.heads, form.v_dim)) for each in v.unbind(1)]
        pages = torch.randperm(rows // page_tokens, generator=torch.Generator().manual_seed(7))
        self._rows = (pages[:, None] * page_tokens + torch.arange(page_tokens)).flatten().to(device)

    def host_transfer_translate(self, slots: torch.Tensor) -> torch.Tensor:
        return self._rows[slots]


class MlaPool:
    """As `MLATokenToKVPool`, and `DSATokenToKVPool`."""

    def __init__(self, form: PoolForm, slots: int, page_tokens: int, device: torch.device) -> None:
        self.size = slots
        self.page_size = page_tokens
        self.dtype = form.dtype
        shape = (slots + page_tokens, form.heads, form.dim)
        self.kv_buffer = [_zeros(shape, form.dtype, device) for _ in range(form.layers)]
        if form.index_page_bytes:
            pages = (slots // page_tokens + 1, form.index_page_bytes)
            self.index_k_with_scale_buffer = [
                _zeros(pages, torch.uint8, device) for _ in range(form.layers)
            ]


class MiniMaxPool:
    """As `MiniMaxSparseKVPool`."""

    def __init__(self, form: PoolForm, slots: int, page_tokens: int, device: torch.device) -> None:
        self.size = slots
        self.page_size = page_tokens
        self.dtype = form.dtype
        index = PoolForm(1, 1, form.index_dim, form.index_dim, form.dtype)
        self.main_pool = MhaPool(form, slots, page_tokens, device)
        self.index_kv_pool = MhaPool(index, slots, page_tokens, device)
        keys = replace(index, layers=form.layers - 2)
        self.index_k_pool = MhaPool(keys, slots, page_tokens, device)
        self.index_k_pool.v_buffer.clear()


def make_pool(
    form: PoolForm, slots: int, *, page_tokens: int = 1, device: torch.device
) -> MhaPool | MlaPool | MiniMaxPool | SharedPool:
    """A pool of `slots` slots, the first of which is `page_tokens`."""
    kind: Any = MiniMaxPool if form.index_dim else MhaPool if form.v_dim else MlaPool
    if form.is_shared:
        kind = SharedPool
    return kind(form, slots, page_tokens, device)


@dataclass
class SlotAllocator:
    """As SGLang's allocator of slots on the device. Nothing in it waits for the device."""

    slots: int
    device: torch.device
    page_tokens: int = 1
    _free: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        first = self.page_tokens
        self._free = torch.arange(first, first + self.slots, device=self.device)

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, tokens: int) -> torch.Tensor | None:
        if tokens > len(self._free):
            return None
        found, self._free = self._free[:tokens], self._free[tokens:]
        return found

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        del start_pos
        self._free = torch.cat([self._free, slots])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device)
