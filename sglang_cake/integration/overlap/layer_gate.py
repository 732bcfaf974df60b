"""SGLang's KV pool as a chain sees it: layers of rows, and the gate that every layer passes."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from sglang_cake.core.errors import CakeError, RunaheadError
from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.runahead.transport import Payload

_HOOK = "LayerGate.wait_until"
BOUNDARY.hooks[_HOOK] = []


class PoolRows:
    """`runahead.rows.Rows` over a pool in CPU memory: every copy is complete when the call returns.

    Slots are int64 tensors.
    """

    def __init__(self, kv: DeviceKV) -> None:
        self._planes = len(kv.layout.parts)
        self._rows = kv.rows
        self._plane_bytes = kv.layout.plane_token_bytes[: self._planes]
        self.layers = kv.layout.layers
        self.token_bytes = sum(self._plane_bytes)

    def buffer(self, size_bytes: int) -> Payload:
        return memoryview(bytearray(size_bytes))

    def begin(self) -> None:
        pass

    def read(self, layer: int, slots: torch.Tensor, out: Payload) -> None:
        with torch.inference_mode():
            self._gather(layer, slots, torch.frombuffer(out, dtype=torch.uint8))

    def write(self, layer: int, slots: torch.Tensor, payload: Payload, skip: int) -> Copy:
        with torch.inference_mode():
            self._scatter(layer, slots, torch.frombuffer(payload, dtype=torch.uint8), skip)
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
        first, offset = layer * self._planes, 0
        for rows, token_bytes in zip(
            self._rows[first : first + self._planes], self._plane_bytes, strict=True
        ):
            size = tokens * token_bytes
            yield rows, part[offset : offset + size].view(rows.dtype).view(tokens, -1)
            offset += size


class Passage(Protocol):
    """What a forward needs of elsewhere, layer by layer (a `Hop` is one). What it raises ends the
    forward."""

    def reach(self, layer: int) -> None:
        """The forward has written K and V of its own tokens of `layer`, and goes on to read: until
        all that is before them is there."""
        ...

    def check(self) -> None:
        """Whether to go on at all."""
        ...

    def wrote(self, layer: int) -> None:
        """K and V of the own tokens of `layer` are in the pool."""
        ...

    def has(self, layer: int) -> bool:
        """Whether all that is before the own tokens of `layer` is there."""
        ...

    def wait(self, layer: int) -> None:
        """Until it is."""
        ...


class LayerGate:
    """A layer-transfer counter for the pool: attention passes it after it has written K and V of
    its own tokens of a layer, and before it reads any, as `torch_native` does. One forward runs at
    a time."""

    def __init__(self, pool: Any) -> None:
        self.consumer_index = -1  # SGLang's counters have one; nothing here reads it
        self._passage: Passage | None = None
        pool.register_layer_transfer_counter(self)

    def wait_until(self, layer: int) -> None:
        """Called by the pool. Raises: OverlapError or RunaheadError, out of the forward; whatever
        else the passage raises becomes one, so that it is known for ours there."""
        passage = self._passage
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
        """`with gate(passage):` a forward of it."""
        self._passage = passage
        return self

    def __enter__(self) -> None:
        assert self._passage is not None

    def __exit__(self, *error: object) -> None:
        self._passage = None
