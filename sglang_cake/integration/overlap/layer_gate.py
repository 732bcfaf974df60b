"""Copies rows of one layer into and out of SGLang's KV pool, and lets a forward wait at each layer.

KV-Runahead and overlapped last steps use it to bring KV of a layer into the pool before attention
reads it, and to take KV out as soon as it is written.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.errors import CakeError, ConfigError, RunaheadError
from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV

_HOOK = "LayerGate.wait_until"
BOUNDARY.hooks[_HOOK] = []


class PoolRows:
    """`kv_passing.Rows` over a pool in CPU memory. Every copy is complete when the call returns.

    Slots are int64 tensors.

    Args: kv: of a pool with equal layers, a row for each slot. Raises: ConfigError for others.
    """

    def __init__(self, kv: DeviceKV) -> None:
        if not kv.layout.is_plain:
            raise ConfigError("KV-Runahead needs equal layers: remove --cake-runahead-peers")
        (group,) = kv.layout.groups
        self._planes = len(group.parts)
        self._rows = kv.rows
        self._plane_bytes = group.part_bytes
        self.layers = group.layers
        self.token_bytes = sum(self._plane_bytes)

    def buffer(self, size_bytes: int) -> PartBytes:
        return memoryview(bytearray(size_bytes))

    def begin(self) -> None:
        pass

    def read(self, layer: int, slots: torch.Tensor, out: PartBytes) -> None:
        with torch.inference_mode():
            self._gather(layer, slots, torch.frombuffer(out, dtype=torch.uint8))

    def write(self, layer: int, slots: torch.Tensor, data: PartBytes, skip: int) -> Copy:
        with torch.inference_mode():
            self._scatter(layer, slots, torch.frombuffer(data, dtype=torch.uint8), skip)
        return Copy()

    def _gather(self, layer: int, slots: torch.Tensor, part: torch.Tensor) -> None:
        for rows, plane in self._planes_of(layer, part):
            torch.index_select(rows, 0, slots, out=plane)

    def _scatter(self, layer: int, slots: torch.Tensor, part: torch.Tensor, skip: int) -> None:
        for rows, plane in self._planes_of(layer, part):
            rows.index_copy_(0, slots, plane[skip : skip + len(slots)])

    def _planes_of(
        self, layer: int, part: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The layer's planes in the pool, and in a part (uint8 `[bytes]`), in the same words."""
        tokens = part.numel() // self.token_bytes
        first = layer * self._planes
        offset = 0
        for rows, token_bytes in zip(
            self._rows[first : first + self._planes], self._plane_bytes, strict=True
        ):
            size = tokens * token_bytes
            yield rows, part[offset : offset + size].view(rows.dtype).view(tokens, -1)
            offset += size


class Passage(Protocol):
    """KV that a forward needs from elsewhere, layer by layer (`KvPassing`, `StreamedBlocks`). The
    forward's own tokens are those that it computes. Exceptions of these methods end the forward.
    """

    def reach(self, layer: int) -> None:
        """The forward has written K and V of its own tokens of `layer`. Return when the KV of all
        tokens before them is in the pool."""
        ...

    def check(self) -> None:
        """Raise if the forward should not go on."""
        ...

    def wrote(self, layer: int) -> None:
        """K and V of the own tokens of `layer` are in the pool."""
        ...

    def has(self, layer: int) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self, layer: int) -> None:
        """Return when the KV of `layer` of all tokens before the own ones is in the pool."""
        ...


class LayerGate:
    """A layer-transfer counter for SGLang's pool. Attention calls it when it has written K and V of
    its own tokens of a layer, and before it reads any, as the `torch_native` backend does. One
    forward runs at a time.

    `with gate(passage):` runs a forward with that passage.

    Attributes:
        passage: of the forward that runs; None: it has none.
    """

    def __init__(self, pool: Any) -> None:
        self.consumer_index = -1  # SGLang's counters have it; it is not used here
        self.passage: Passage | None = None
        pool.register_layer_transfer_counter(self)

    def wait_until(self, layer: int) -> None:
        """Called by the pool. Raises: OverlapError or RunaheadError, which leave the forward. Other
        exceptions of the passage become a RunaheadError, so that they are known as cake's there."""
        passage = self.passage
        if passage is None:
            return
        try:
            self._reach(passage, layer)
        except CakeError:
            raise
        except Exception as error:
            BOUNDARY.failed(_HOOK, error, rid="")
            raise RunaheadError(f"layer {layer}: {error!r}") from error

    def _reach(self, passage: Passage, layer: int) -> None:
        passage.reach(layer)

    def __call__(self, passage: Passage) -> "LayerGate":
        self.passage = passage
        return self

    def __enter__(self) -> None:
        assert self.passage is not None

    def __exit__(self, *error: object) -> None:
        self.passage = None
