"""What stands in for SGLang: modules, where it is not installed, and KV pools of its form."""

import importlib
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

# What the modules of the copies, the coordinator and the costs take from SGLang. Nothing of it is
# called here.
_MODULES: dict[str, dict[str, object]] = {
    "sglang": {},
    "sglang.version": {"__version__": "0"},
    "sglang.srt": {},
    "sglang.srt.managers": {},
    "sglang.srt.managers.schedule_batch": {"MM_PAD_SHIFT_VALUE": 1_000_000},
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
    """A KV pool. `v_dim` 0: MLA, one row of `heads * dim` values for each token and layer, and with
    `index_page_bytes` an index of it (DSA), with that many bytes for each page. `index_dim`: an
    index (MiniMax) of so many values of each token, with K and V in the second layer, and with K
    alone in the layers behind it."""

    layers: int
    heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype = torch.bfloat16
    index_page_bytes: int = 0
    index_dim: int = 0

    @property
    def token_bytes(self) -> int:
        """Of all layers, without an index."""
        return self.layers * self.heads * (self.dim + self.v_dim) * self.dtype.itemsize


class MhaPool:
    """As `MHATokenToKVPool`: with rows of one width, K and V are halves of one allocation."""

    def __init__(self, form: PoolForm, slots: int, page_tokens: int, device: torch.device) -> None:
        self.size = slots
        self.page_size = page_tokens
        self.dtype = form.dtype
        rows = slots + page_tokens
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        for _ in range(form.layers):
            if form.dim == form.v_dim:
                both = _zeros((2, rows, form.heads, form.dim), form.dtype, device)
                self.k_buffer.append(both[0])
                self.v_buffer.append(both[1])
            else:
                self.k_buffer.append(_zeros((rows, form.heads, form.dim), form.dtype, device))
                self.v_buffer.append(_zeros((rows, form.heads, form.v_dim), form.dtype, device))


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
) -> MhaPool | MlaPool | MiniMaxPool:
    """A pool of `slots` slots, the first of which is `page_tokens`."""
    kind = MiniMaxPool if form.index_dim else MhaPool if form.v_dim else MlaPool
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
