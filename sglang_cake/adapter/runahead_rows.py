"""SGLang's KV pool as a chain sees it: layers of rows, and the gate that every layer passes."""

from collections.abc import Iterator
from typing import Any

import torch

from sglang_cake.adapter.pools import DeviceKV
from sglang_cake.runahead.hop import Hop


class PoolRows:
    """`hop.Rows` over a pool in CPU memory. Slots are int64 tensors."""

    def __init__(self, kv: DeviceKV) -> None:
        self._planes = len(kv.layout.parts)
        self._rows = kv.rows
        self._plane_bytes = kv.layout.plane_token_bytes[: self._planes]
        self.layers = kv.layout.layers
        self.token_bytes = sum(self._plane_bytes)

    def read(self, layer: int, slots: torch.Tensor, out: memoryview) -> None:
        with torch.inference_mode():
            for rows, plane in self._parts(layer, out):
                torch.index_select(rows, 0, slots, out=plane)

    def write(self, layer: int, slots: torch.Tensor, payload: memoryview, skip: int) -> None:
        with torch.inference_mode():
            for rows, plane in self._parts(layer, payload):
                rows.index_copy_(0, slots, plane[skip:])

    def _parts(self, layer: int, bytes_: memoryview) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The layer's planes in the pool, and in `bytes_`, in the same words."""
        whole = torch.frombuffer(bytes_, dtype=torch.uint8)
        tokens = len(bytes_) // self.token_bytes
        first, offset = layer * self._planes, 0
        for rows, token_bytes in zip(
            self._rows[first : first + self._planes], self._plane_bytes, strict=True
        ):
            size = tokens * token_bytes
            plane = whole[offset : offset + size].view(rows.dtype).view(tokens, -1)
            yield rows, plane
            offset += size


class LayerGate:
    """A layer-transfer counter for the pool: attention passes it after it has written K and V of
    its own tokens of a layer, and before it reads any. One forward runs at a time."""

    def __init__(self, pool: Any) -> None:
        self.consumer_index = -1  # SGLang's counters have one; nothing here reads it
        self._hop: Hop | None = None
        pool.register_layer_transfer_counter(self)

    def wait_until(self, layer: int) -> None:
        """Called by the pool. Raises: RunaheadError, out of the forward."""
        if self._hop is not None:
            self._hop.reach(layer)

    def __call__(self, hop: Hop) -> "LayerGate":
        """`with gate(hop):` a forward of this hop."""
        self._hop = hop
        return self

    def __enter__(self) -> None:
        assert self._hop is not None

    def __exit__(self, *error: object) -> None:
        self._hop = None
